"""What all commands share in how they speak to the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from staffel.config import ConfigError

out = Console()


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """A typer option in a panel of the help; `names` and `more` are typer's own."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def or_error(work: Callable[[], None]) -> None:
    """Run; what the user did wrong is said in one line, with exit status 2."""
    try:
        work()
    except ConfigError as error:
        Console(stderr=True).print(
            f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """The first row is the head; the first column is text, the others numbers."""
    table = Table(box=None)
    for place, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if place else "left")
    for row in rows[1:]:
        table.add_row(*row)
    out.print(table)

"""`staffel kv-cost` as its users see it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from staffel.latency.commands import kv_cost

QUESTION = {"--model": "opt-175b", "--tokens": "2048", "--link": "8x64GB/s"}


def run(**changed: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(kv_cost)
    options = {**QUESTION, **{f"--{name}": value for name, value in changed.items()}}
    result = CliRunner().invoke(app, [word for pair in options.items() for word in pair])
    return result.exit_code, result.output


def test_opt_175b_over_eight_links() -> None:
    """17.6 ms is the same with the GB of both sides read as powers of two."""
    status, text = run()
    assert status == 0
    assert "4.5 MiB" in text
    assert "18.9 ms" in text
    assert "17.6 ms" in text


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "no-such-model"}, "--model"),
        ({"link": "64"}, "--link"),
        ({"hardware": "abacus"}, "--hardware"),
        ({"mla": "folded"}, "--mla"),
        ({"tokens": "0"}, "--tokens"),
    ],
)
def test_a_wrong_option_is_named(changed: dict[str, str], named: str) -> None:
    status, text = run(**changed)
    assert status == 2
    assert named in text

"""The bar that says how far a search is."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """One line for each stage, on stderr. Candidates that are ruled out shorten the bar."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._stages: dict[str, TaskID] = {}

    def tell(self, stage: str, done: int, left: int) -> None:
        """So many of a stage's candidates are simulated, so many may follow."""
        if stage not in self._stages:
            self._stages[stage] = self._bar.add_task(stage)
        self._bar.update(self._stages[stage], completed=done, total=done + left)

    def within(self, title: str) -> Callable[[str, int, int], None]:
        """`tell` for the stages of one search among several."""
        return lambda stage, done, left: self.tell(f"{title}: {stage}", done, left)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

"""An executor without a model: the same token always, and the work that a batch would have been."""

from __future__ import annotations

from staffel.control.messages import Batch, BatchResult, Row, RowResult
from staffel.latency.model import Work, pairs

TOKEN = 0
_DRAWN = RowResult(TOKEN)
_NOTHING = RowResult()


class CountingExecutor:
    """Knows of each slot how many tokens it has."""

    def __init__(self, slots: int) -> None:
        self._lengths = [0] * slots

    def execute(self, batch: Batch) -> tuple[BatchResult, Work]:
        for enter in batch.enters:
            self._lengths[enter.slot] = len(enter.ids)
        context = self._decode(batch.decodes)
        rows = [self._row(row) for row in batch.rows]
        result = BatchResult(rows, [True] * len(batch.reads), [TOKEN] * len(batch.decodes))
        return result, _work(batch, context)

    def _decode(self, slots: list[int]) -> int:
        """The keys that they see, all together: a sequence's known tokens."""
        lengths = self._lengths
        context = 0
        for slot in slots:
            context += lengths[slot]
            lengths[slot] += 1
        return context

    def _row(self, row: Row) -> RowResult:
        if not row.sample:
            return _NOTHING
        self._lengths[row.slot] += 1
        return _DRAWN


def _work(batch: Batch, context: int) -> Work:
    rows = batch.rows
    if not rows:
        return Work(decodes=len(batch.decodes), decode_context=context)
    return Work(
        prompt_tokens=sum(row.count for row in rows),
        prompt_pairs=sum(pairs(row.count, row.start) for row in rows),
        prompts=len(rows),
        decodes=len(batch.decodes),
        decode_context=context,
    )

"""Every family's tokens and logits equal transformers' own, colocated and disaggregated.

All requests are in flight together, through the real router, engines, handoffs and executors.
"""

from __future__ import annotations

import pytest
import torch

from staffel.control.messages import Batch
from staffel.model.executor import Executor
from tests.model.families import (
    FAMILIES,
    TIE,
    Reference,
    make_model,
    mixed_prompts,
    reference,
)
from tests.runtime.system import Output, generate_all, greedy, model_spec, running

BLOCK, CHUNK, TOKENS = 4, 16, 20
PLACEMENTS = {"colocated": ["colocated"], "1P1D": ["prefill", "decode"]}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
    torch.set_num_threads(1)
    path = make_model(request.param, tmp_path_factory.mktemp("families"))
    prompts = mixed_prompts(BLOCK, CHUNK)
    return path, prompts, reference(path, prompts, TOKENS)


async def serve(path, roles, prompts) -> list[Output]:
    requests = [greedy(f"r{i}", p, TOKENS, logprobs=2) for i, p in enumerate(prompts)]
    settings = {"block_size": BLOCK, "chunk_tokens": CHUNK, "max_sequences": 48}
    async with running(model_spec(path), roles, **settings) as service:
        return await generate_all(service, requests)


@pytest.mark.parametrize("roles", PLACEMENTS.values(), ids=PLACEMENTS)
async def test_tokens_and_logits_equal_transformers(family, roles) -> None:
    path, prompts, references = family
    outputs = await serve(path, roles, prompts)
    for output, expected in zip(outputs, references, strict=True):
        assert output.finish == "length"
        assert expected.agrees(output.ids)
        assert_same_logprobs(output, expected)


def assert_same_logprobs(output: Output, expected: Reference) -> None:
    """As far as the tokens are the same; behind a tie there is nothing to compare."""
    theirs = torch.log_softmax(expected.logits.double(), dim=-1)
    for position, entry in enumerate(output.logprobs):
        if output.ids[:position] != expected.tokens[:position]:
            return
        for token, logprob in [(entry.token, entry.logprob), *entry.top]:
            assert logprob == pytest.approx(theirs[position, token].item(), abs=TIE)


async def test_a_corrupted_block_changes_the_output(monkeypatch, tmp_path) -> None:
    """The footing of the test above: one wrong block in one handoff is seen."""
    torch.set_num_threads(1)
    path = make_model("llama", tmp_path)
    prompts = mixed_prompts(BLOCK, CHUNK)
    references = reference(path, prompts, TOKENS)
    execute = Executor.execute
    corrupted = []

    def execute_and_corrupt(self, batch: Batch):
        result = execute(self, batch)
        if batch.reads and not corrupted:
            corrupted.append(batch.reads[0].blocks[0])
            self._memory.k[corrupted] += 1.0
        return result

    monkeypatch.setattr(Executor, "execute", execute_and_corrupt)
    outputs = await serve(path, ["prefill", "decode"], prompts)
    wrong = [
        output
        for output, expected in zip(outputs, references, strict=True)
        if not expected.agrees(output.ids)
    ]
    assert wrong


async def test_every_instance_takes_part(monkeypatch, tmp_path) -> None:
    """Prompts are computed by prefill instances only, tokens by decode instances only."""
    torch.set_num_threads(1)
    path = make_model("llama", tmp_path)
    longest: dict[int, int] = {}
    execute = Executor.execute

    def watch(self, batch: Batch):
        counts = [1 for _ in batch.decodes] + [row.count for row in batch.rows]
        longest[id(self)] = max([longest.get(id(self), 0), *counts])
        return execute(self, batch)

    monkeypatch.setattr(Executor, "execute", watch)
    await serve(path, ["prefill", "prefill", "decode", "decode"], mixed_prompts(BLOCK, CHUNK))
    assert sorted(longest.values()) == [1, 1, CHUNK, CHUNK]

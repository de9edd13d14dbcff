"""Every family that is served says what transformers' own `generate` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from staffel.config import ModelSpec
from staffel.control.request import SamplingParams
from staffel.model.executor import Executor
from tests.model.driver import Driver, Seat
from tests.model.families import FAMILIES, VOCAB, Reference, make_model, mixed_prompts, reference

BLOCK, CHUNK, TOKENS = 4, 16, 20
UNRECORDED = {"gpt2"}
"""Families that decide by numbers: their decode steps go through their own code each time."""
EVERYTHING = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=VOCAB)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def same_logprobs(seat: Seat, theirs: Reference) -> bool:
    """Whether whole distributions are equal, as long as the tokens are."""
    for result, token, logits in zip(seat.results, theirs.tokens, theirs.logits, strict=True):
        expected = logits.log_softmax(-1)
        ours = torch.empty(VOCAB)
        for entry in result.logprobs.top:
            ours[entry[0]] = entry[1]
        if not torch.allclose(ours, expected, atol=1e-3, rtol=1e-4):
            return False
        if result.token != token:
            break
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_paged_generation_equals_transformers(family: str, tmp_path: Path) -> None:
    path = make_model(family, tmp_path)
    prompts = mixed_prompts(BLOCK, CHUNK, 14)
    executor = Executor(
        ModelSpec.load(path, name=family), kv_bytes=1 << 24, block_size=BLOCK, max_sequences=9
    )
    seats = Driver(executor).generate(prompts, EVERYTHING, chunk=CHUNK)
    for seat, theirs in zip(seats, reference(path, prompts, TOKENS), strict=True):
        assert theirs.agrees(seat.tokens), (len(seat.prompt), seat.tokens, theirs.tokens)
        assert same_logprobs(seat, theirs), len(seat.prompt)
    if executor._recorded is not None:  # with the kernels
        assert len(executor._recorded) == (0 if family in UNRECORDED else 9)
    executor.close()

"""The executor, batch by batch, on a small random llama."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from staffel.config import ConfigError, ModelSpec
from staffel.control.messages import Enter, ReadChunk, Row
from staffel.control.request import SamplingParams
from staffel.kernels import library
from staffel.model import tape
from staffel.model.executor import Executor
from tests.model.driver import Driver, Seat
from tests.model.families import VOCAB, make_model, mixed_prompts

BLOCK = 4
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=3)
PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    torch.set_num_threads(1)
    return ModelSpec.load(make_model("llama", tmp_path_factory.mktemp("models")), name="llama")


def executor(spec: ModelSpec, **options: object) -> Executor:
    return Executor(
        spec, **{"kv_bytes": 1 << 20, "block_size": BLOCK, "max_sequences": 6} | options
    )


@pytest.fixture
def first(spec: ModelSpec) -> Iterator[Driver]:
    driver = Driver(executor(spec), seed=1)
    yield driver
    driver.executor.close()


@pytest.fixture
def second(spec: ModelSpec) -> Iterator[Driver]:
    driver = Driver(executor(spec), seed=2)
    yield driver
    driver.executor.close()


def alone(driver: Driver, params: SamplingParams, prompt: list[int] = PROMPT) -> Seat:
    """One sequence to its end, nothing else running."""
    seat = driver.go_on(driver.enter(prompt, params))
    driver.leave(seat)
    return seat


# ---- a sequence's life


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_alone_and_in_a_batch_the_tokens_are_the_same(
    first: Driver, params: SamplingParams
) -> None:
    prompts = mixed_prompts(BLOCK, 8, 12)
    together = first.generate(prompts, params, chunk=8, at_once=5)
    assert [alone(first, params, p).tokens for p in prompts] == [s.tokens for s in together]


def test_rows_that_need_no_token_give_none(first: Driver) -> None:
    seat = first.enter(PROMPT, msgspec.structs.replace(GREEDY, max_tokens=0))
    first.step([seat], 4)
    result = first.run(rows=(first.row(seat, 100),)).rows[0]
    assert (result.token, result.logprobs, result.prompt_logprobs) == (None, None, None)


def test_a_slot_that_is_taken_again_starts_fresh(first: Driver) -> None:
    expected = alone(first, GREEDY).tokens
    other = first.enter([7] * 30, GREEDY)
    first.go_on(other)
    enters = (Enter(other.slot, 99, PROMPT, len(PROMPT), GREEDY),)
    first.run(leaves=(other.slot,), enters=enters)
    again = Seat(other.slot, PROMPT, GREEDY)
    assert first.go_on(again).tokens == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_resumed_sequence_goes_on_with_the_same_tokens(
    first: Driver, second: Driver, params: SamplingParams
) -> None:
    expected = alone(first, params).tokens
    seat = second.go_on(second.enter(PROMPT, params, expected[:5]))
    assert seat.tokens == expected[5:]


def test_prompts_that_share_blocks_in_one_batch(first: Driver) -> None:
    expected = alone(first, GREEDY).tokens
    one, two = first.enter(PROMPT, GREEDY), first.enter(PROMPT, GREEDY)
    writes = first.row(one, 100)
    # The second takes two full blocks from the first, which computes them in the same batch.
    two.blocks, two.done = one.blocks[:2], 2 * BLOCK
    first.grown.append((two.slot, one.blocks[:2]))
    uses = first.row(two, 100)
    results = first.run(rows=(uses, writes)).rows
    assert [result.token for result in results] == expected[:1] * 2


def test_a_damaged_block_is_not_overlooked(first: Driver) -> None:
    expected = alone(first, GREEDY)
    seat = first.enter(PROMPT, GREEDY)
    first.step([seat], 100)
    first.executor._memory.k[seat.blocks[1]] += 1.0
    first.step([seat], 1)
    ours, theirs = seat.results[1].logprobs, expected.results[1].logprobs
    assert abs(ours.logprob - theirs.logprob) > 1e-3


def test_rows_beyond_what_is_known_are_refused(first: Driver) -> None:
    seat = first.enter(PROMPT, GREEDY)
    table = ((seat.slot, [0, 1, 2]),)
    with pytest.raises(ValueError, match=f"slot {seat.slot}"):
        first.run(grown=table, rows=(Row(seat.slot, 0, len(PROMPT) + 1, True),))
    with pytest.raises(ValueError, match=f"slot {seat.slot}"):
        first.run(rows=(Row(seat.slot, 3, 0, False),))
    other = first.enter(PROMPT, GREEDY)
    with pytest.raises(ValueError, match=f"slot {other.slot}"):
        first.run(grown=((other.slot, [0]),), rows=(Row(other.slot, 0, BLOCK + 1, False),))
    with pytest.raises(ValueError, match=f"slot {other.slot}"):
        first.run(rows=(Row(other.slot, 0, 2, True),))


class OnlyEven:
    """A grammar: two tokens of even id."""

    problem = None

    def __init__(self) -> None:
        self.taken = 0

    @property
    def ended(self) -> bool:
        return self.taken == 2

    def advance(self, ids: list[int]) -> None:
        self.taken += len(ids)

    def mask(self) -> np.ndarray:
        return np.arange(VOCAB) % 2 == 0


@pytest.mark.parametrize("emitted", [[], [4]])
def test_a_grammar_goes_on_where_the_ids_end(
    first: Driver, monkeypatch: pytest.MonkeyPatch, emitted: list[int]
) -> None:
    monkeypatch.setattr(first.executor._grammars, "matcher", {"even": OnlyEven()}.get)
    params = msgspec.structs.replace(GREEDY, grammar="even")
    seat = first.enter(PROMPT, params, emitted)
    for _ in range(2 - len(emitted)):
        first.step([seat], 100)
    assert all(token % 2 == 0 for token in seat.tokens)
    ended = [result.grammar_ended for result in seat.results]
    assert ended == [False] * (len(ended) - 1) + [True]


# ---- scoring prompts


@pytest.mark.parametrize("chunk", [4, 5, 100])
def test_prompt_logprobs_are_the_models(first: Driver, spec: ModelSpec, chunk: int) -> None:
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    seat = first.go_on(first.enter(PROMPT, params), chunk)
    model = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert [score.token for score in seat.scores] == PROMPT[1:]
    for position, score in enumerate(seat.scores):
        assert score.logprob == pytest.approx(float(expected[position, score.token]), abs=1e-4)
        assert score.top[0][0] == int(expected[position].argmax())
        assert len(score.top) == 2


def test_a_prompt_of_one_token_has_nothing_to_score(first: Driver) -> None:
    params = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    seat = first.enter([5], params)
    result = first.run(rows=(first.row(seat, 1),)).rows[0]
    assert result.prompt_logprobs == []
    assert first.run(decodes=(seat.slot,)).details[0].prompt_logprobs is None


# ---- handing over


def prefill(driver: Driver, params: SamplingParams) -> tuple[Seat, int]:
    """A seat with its prompt computed and the first token drawn, and its dispatch."""
    seat = driver.enter(PROMPT, params)
    driver.step([seat], 100)
    return seat, driver.dispatch


def read(source: Seat, into: Seat, confirm: tuple[int, int] | None, part: slice) -> ReadChunk:
    return ReadChunk("p", 1, source.blocks[part], into.blocks[part], confirm)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_handed_over_kv_goes_on_as_if_it_had_stayed(
    first: Driver, second: Driver, params: SamplingParams
) -> None:
    source, dispatch = prefill(first, params)
    second.executor.attach("p", 1, first.executor.region)
    target = second.take_over(source)
    early = read(source, target, None, slice(0, 2))
    late = read(source, target, (source.slot, dispatch), slice(2, None))
    assert second.run(reads=(early,)).reads == [True]
    # A read and the first row that uses it come in one batch.
    result = second.run(reads=(late,), rows=(second.row(target, 1),))
    assert result.reads == [True]
    target.results.append(result.rows[0])
    first.go_on(source)
    second.go_on(target)
    assert target.tokens == source.tokens[1:]
    for ours, theirs in zip(target.results, source.results[1:], strict=True):
        assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-5)


class SlowPeer:
    """A peer whose copies go on beside the step; notes what is asked of it."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def read_blocks(self, source_blocks: list[int], blocks: list[int]) -> None:
        self._events.append("read")

    def wait(self) -> None:
        self._events.append("wait")

    def finish(self) -> float:
        self._events.append("finish")
        return 0.25

    def confirm(self, slot: int, dispatch: int) -> bool:
        self._events.append("confirm")
        return True

    def close(self) -> None:
        pass


def test_what_was_read_is_whole_before_it_is_used(
    first: Driver, second: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is still being copied, before its blocks can be given to another."""
    events: list[str] = []
    source, dispatch = prefill(first, GREEDY)
    target = second.take_over(source)
    executor = second.executor
    executor._peers["p", 1] = SlowPeer(events)
    compute = executor._compute
    monkeypatch.setattr(executor, "_compute", lambda r: events.append("compute") or compute(r))
    early = read(source, target, None, slice(0, 2))
    late = read(source, target, (source.slot, dispatch), slice(2, None))
    result = second.run(reads=(early, late), rows=(second.row(target, 1),))
    assert events == ["read", "read", "wait", "confirm", "compute", "finish"]
    blocks = len(early.blocks) + len(late.blocks)
    assert result.copied_bytes == blocks * (
        executor._memory.k[0].nbytes + executor._memory.v[0].nbytes
    )
    assert result.copied_s == 0.25


def test_a_prefill_instance_records_no_decode_steps(spec: ModelSpec) -> None:
    ours = executor(spec, decodes=False)
    assert ours._recorded is None
    ours.close()


def test_a_read_whose_source_has_gone_fails(first: Driver, second: Driver) -> None:
    source, dispatch = prefill(first, GREEDY)
    second.executor.attach("p", 1, first.executor.region)
    target = second.take_over(source)
    chunk = read(source, target, (source.slot, dispatch), slice(None))
    assert second.run(reads=(chunk,)).reads == [True]
    first.leave(source)
    assert second.run(reads=(chunk,)).reads == [False]
    first.enter(PROMPT, GREEDY)  # another sequence in the same slot
    assert second.run(reads=(chunk,)).reads == [False]


def test_a_read_from_a_peer_that_is_not_there_fails(first: Driver, second: Driver) -> None:
    source, dispatch = prefill(first, GREEDY)
    target = second.take_over(source)
    chunk = read(source, target, (source.slot, dispatch), slice(None))
    region = first.executor.region
    assert second.run(reads=(chunk,)).reads == [False]  # never attached
    second.executor.attach("p", 1, msgspec.structs.replace(region, pid=2**22 - 1))
    assert second.run(reads=(chunk,)).reads == [False]  # its process is gone
    second.executor.attach("p", 2, region)
    assert second.run(reads=(chunk,)).reads == [False]  # another life of it
    second.executor.attach("p", 1, region)
    assert second.run(reads=(chunk,)).reads == [True]
    second.executor.detach("p", 1)
    assert second.run(reads=(chunk,)).reads == [False]
    second.executor.detach("p", 1)


def test_a_peer_of_another_layout_is_refused(first: Driver, second: Driver) -> None:
    region = msgspec.structs.replace(first.executor.region, block_size=8)
    with pytest.raises(ConfigError, match="block_size"):
        second.executor.attach("p", 1, region)


# ---- memory, options, threads


def test_blocks_of_one_token(spec: ModelSpec) -> None:
    ours, usual = executor(spec, block_size=1), executor(spec)
    assert alone(Driver(ours), GREEDY).tokens == alone(Driver(usual), GREEDY).tokens
    ours.close()
    usual.close()


@pytest.mark.skipif(library.level() is None, reason="no kernels")
def test_a_recorded_step_amid_others_is_what_the_model_computes(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in between, tables in random order, sizes that come and go."""
    prompts = mixed_prompts(BLOCK, 8, 14)
    recorded = executor(spec)
    assert len(recorded._recorded) == 6  # max_sequences
    monkeypatch.setattr(tape, "MOST", 0)
    plain = executor(spec)
    assert len(plain._recorded) == 0
    ours, theirs = (
        Driver(each, seed=4).generate(prompts, GREEDY, chunk=8, at_once=5)
        for each in (recorded, plain)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens == b.tokens
        assert [r.logprobs.logprob for r in a.results] == [r.logprobs.logprob for r in b.results]
    recorded.close()
    plain.close()


def test_too_little_kv_memory_names_the_option(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        executor(spec, kv_bytes=4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="--device"):
        executor(spec, device="cuda")


def test_half_precision_on_request(spec: ModelSpec) -> None:
    ours = executor(spec, dtype="bfloat16")
    assert ours.region.dtype == "bfloat16"
    seat = alone(Driver(ours), GREEDY)
    assert all(0 <= token < VOCAB for token in seat.tokens)
    ours.close()


def test_close_gives_everything_back(spec: ModelSpec) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:staffel-kv")

    before = held()
    one, two = executor(spec), executor(spec)
    two.attach("p", 1, one.region)
    alone(Driver(one), GREEDY)
    one.close()
    two.close()
    assert held() == before


def test_executors_in_threads_do_not_meet(spec: ModelSpec) -> None:
    prompts = mixed_prompts(BLOCK, 8, 10)

    def work(seed: int) -> list[list[int]]:
        ours = executor(spec)
        seats = Driver(ours, seed).generate(prompts, GREEDY, chunk=8, at_once=4)
        ours.close()
        return [seat.tokens for seat in seats]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    assert results[0] == results[1] == results[2]

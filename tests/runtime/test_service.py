"""The live shell on a small model: the same tokens everywhere, losses, journal, limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from staffel.config import ConfigError
from staffel.control.journal import replay
from staffel.control.messages import Batch
from staffel.control.request import Request, SamplingParams
from staffel.model.executor import Executor
from tests.model.families import MAX_LEN, make_model, mixed_prompts
from tests.runtime.system import (
    at_rest,
    generate,
    generate_all,
    greedy,
    model_spec,
    running,
)

SETTINGS = {"block_size": 4, "chunk_tokens": 16, "max_sequences": 48}
PLACEMENTS = [
    ["colocated"],
    ["prefill", "decode"],
    ["prefill", "prefill", "decode"],
    ["prefill", "decode", "decode"],
    ["prefill", "decode", "colocated"],
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return make_model("llama", tmp_path_factory.mktemp("service"))


def sampled(name: str, prompt: list[int], tokens: int = 16, choice: int = 0) -> Request:
    params = SamplingParams(
        max_tokens=tokens,
        temperature=0.9,
        top_p=0.9,
        seed=len(prompt),
        choice=choice,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
    )
    return Request(id=name, prompt=prompt, params=params)


async def test_seeded_draws_are_the_same_everywhere(llama: Path) -> None:
    requests = [sampled(f"r{i}", p) for i, p in enumerate(mixed_prompts(4, 16, 24))]
    outputs = []
    for roles in PLACEMENTS:
        async with running(model_spec(llama), roles, **SETTINGS) as service:
            outputs.append([o.ids for o in await generate_all(service, requests)])
    async with running(model_spec(llama), ["prefill", "decode"], **SETTINGS) as service:
        outputs.append([(await generate(service, request)).ids for request in requests])
    for other in outputs[1:]:
        assert other == outputs[0]


async def test_choices_of_a_request_differ(llama: Path) -> None:
    async with running(model_spec(llama), ["prefill", "decode"], **SETTINGS) as service:
        choices = [sampled(f"r-{n}", [5, 6, 7], choice=n) for n in range(4)]
        outputs = await generate_all(service, choices)
    assert len({tuple(output.ids) for output in outputs}) == 4


async def test_stream_goes_on_when_its_decode_instance_dies(llama: Path, monkeypatch) -> None:
    requests = [sampled(f"r{i}", p, 40) for i, p in enumerate(mixed_prompts(4, 16, 12))]
    async with running(model_spec(llama), ["prefill", "decode", "decode"], **SETTINGS) as service:
        expected = await generate_all(service, requests)
    killed = kill_first_decoder_after(8, monkeypatch)
    async with running(model_spec(llama), ["prefill", "decode", "decode"], **SETTINGS) as service:
        outputs = await generate_all(service, requests)
        assert service.state() == "ready"
    assert killed
    assert [output.ids for output in outputs] == [output.ids for output in expected]


async def test_streams_fail_cleanly_when_the_last_of_a_phase_dies(llama: Path, monkeypatch) -> None:
    kill_first_decoder_after(8, monkeypatch)
    requests = [greedy(f"r{i}", [i + 1] * 5, 60) for i in range(4)]
    async with running(model_spec(llama), ["prefill", "decode"], **SETTINGS) as service:
        outputs = await generate_all(service, requests)
        assert all(output.failure.status == 503 for output in outputs)
        assert service.state() == "degraded"
        late = await generate(service, greedy("late", [1, 2], 3))
        assert late.failure.status == 503
        assert late.failure.retry_after


def kill_first_decoder_after(steps: int, monkeypatch) -> list[Executor]:
    """The first executor that decodes dies in its n-th step that does nothing else."""
    execute = Executor.execute
    decoders: list[Executor] = []
    counts: list[int] = []

    def dying(self, batch: Batch):
        if batch.decodes and not batch.rows:
            decoders.append(self)
            counts.append(1)
            if self is decoders[0] and decoders.count(self) == steps:
                raise RuntimeError("killed by the test")
        return execute(self, batch)

    monkeypatch.setattr(Executor, "execute", dying)
    return decoders


async def test_journal_of_a_live_run_replays(llama: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    options = {"record": journal, "local_prefill_below": 6}
    roles = ["prefill", "decode", "colocated"]
    async with running(model_spec(llama), roles, options=options, **SETTINGS) as service:
        requests = [sampled(f"r{i}", p, 5) for i, p in enumerate(mixed_prompts(4, 16) * 3)]
        service.submit(sampled("leaves", [1, 2, 3], 100))
        running_ones = asyncio.create_task(generate_all(service, requests))
        await asyncio.sleep(0.1)
        service.cancel("leaves")
        await running_ones
    with journal.open("rb") as lines:
        result = replay(lines)
    assert result.mismatch is None
    assert result.cores == 5, "fleet, router, three engines"
    assert result.calls > 200
    assert journal.stat().st_mode & 0o077 == 0, "it holds prompts"


async def test_longest_sequence_fits(llama: Path) -> None:
    async with running(model_spec(llama), ["prefill", "decode"], **SETTINGS) as service:
        outputs = await generate_all(
            service,
            [greedy("long", [3] * (MAX_LEN - 5), 5), greedy("short", [3], MAX_LEN - 1)],
        )
    assert [len(output.ids) for output in outputs] == [5, MAX_LEN - 1]


async def test_memory_too_small_for_a_sequence_is_said(llama: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        async with running(model_spec(llama), ["colocated"], kv_memory="10kB"):
            pass


async def test_scored_prompt_has_an_entry_for_each_token(llama: Path) -> None:
    prompt = mixed_prompts(4, 16)[9]
    asked = greedy("score", prompt, 2, logprobs=1, prompt_logprobs=2)
    for roles in PLACEMENTS[:2]:
        async with running(model_spec(llama), roles, **SETTINGS) as service:
            output = await generate(service, asked)
        assert [entry.token for entry in output.prompt_logprobs] == prompt[1:]
        assert len(output.logprobs) == 2


async def test_cancelling_frees_everything(llama: Path) -> None:
    async with running(model_spec(llama), ["prefill", "decode"], **SETTINGS) as service:
        for steps in range(30):
            service.submit(greedy(f"r{steps}", [steps + 1] * 40, 60))
            for _ in range(steps):
                await asyncio.sleep(0.001)
            service.cancel(f"r{steps}")
        await at_rest(service)
        assert (await generate(service, greedy("next", [1, 2, 3], 4))).finish == "length"


async def test_a_fault_in_the_router_is_raised(llama: Path, monkeypatch) -> None:
    """It must end the server loudly, and not leave requests hanging."""
    async with running(model_spec(llama), ["colocated"], **SETTINGS) as service:

        def fail(*_: object) -> None:
            raise RuntimeError("fault made by the test")

        monkeypatch.setattr(service._core, "tick", fail)
        with pytest.raises(RuntimeError, match="made by the test"):
            await asyncio.wait_for(service.failed(), 10)

"""Is the engine right on this GPU, and how near does it come to what the card can do?

    python scripts/gpu_check.py [--device cuda] [--quick] [--no-peer] [--out FILE]

Needs no model files and no network: all weights are random. Checks, and prints as a table:

1. greedy tokens of small models of eight families against transformers' own, colocated, and with
   the KV handed from one executor to another;
2. attention in bfloat16 over thousands of keys, and drawn tokens, against the same on a CPU;
3. a handoff of 4,096 tokens of KV from another process: bytes per second, and what it does to the
   decode steps that it runs beside;
4. step times at the shape of Llama-3.1-8B in bfloat16, beside the limits measured in this run:
   weights and KV over the copy bandwidth, products over the rate of a large matrix product;
5. what `staffel profile` says of its own fit, on a model of about a billion parameters;
6. the step times of 4 by transformers' own continuous batching, and how many times ours they are.

`--device cpu --quick` rehearses all of it with small sizes. Writes JSON with date, card and
versions; gpu_check.md says how to run it elsewhere. Fails where something is wrong, not where it
is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["PYTHONPATH"] = str(ROOT / "src")  # of the processes that `profile` starts

from staffel.config import ConfigError, InstanceSpec, ModelSpec  # noqa: E402
from staffel.control.messages import KvRegion, ReadChunk  # noqa: E402
from staffel.control.request import SamplingParams  # noqa: E402
from staffel.model import hook, loader  # noqa: E402
from staffel.model.attention import Flavour  # noqa: E402
from staffel.model.attention_kernels import best  # noqa: E402
from staffel.model.cache import PagedCache  # noqa: E402
from staffel.model.executor import Executor  # noqa: E402
from staffel.model.profile import Wanted, profile  # noqa: E402
from staffel.model.sampler import SamplingState, sample  # noqa: E402
from staffel.model.shapes import BatchShape  # noqa: E402
from staffel.model.station import Stage  # noqa: E402
from staffel.terminal import out, print_table  # noqa: E402
from tests.model.driver import Driver  # noqa: E402
from tests.model.families import make_model, mixed_prompts, reference  # noqa: E402
from tests.model.test_attention import Scene  # noqa: E402

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma2", "gpt_oss", "mixtral", "gpt2", "deepseek_v3",
)  # fmt: skip
BLOCK, CHUNK, TOKENS = 4, 16, 20
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0)

LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
}  # fmt: skip
LLAMA_1B = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 16_384,
}  # fmt: skip
REPEATS = 9

Rows = list[dict[str, Any]]


# ---- 1. right?


def equality(device: str) -> Rows:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            path = make_model(family, Path(folder))
            prompts = mixed_prompts(BLOCK, CHUNK, 14)
            expected = reference(path, prompts, TOKENS)
            for way, generate in (("colocated", _colocated), ("handed over", _handed_over)):
                row = {"check": f"{family}, {way}", "right": 0, "of": len(prompts)}
                try:
                    found = generate(path, prompts, device)
                    row["right"] = sum(r.agrees(t) for r, t in zip(expected, found, strict=True))
                except Exception as error:  # the next family may do
                    row["error"] = repr(error)
                rows.append(row)
    return rows


def _executor(path: Path, device: str) -> Executor:
    return Executor(
        ModelSpec.load(path, name=path.name), kv_bytes=1 << 24, block_size=BLOCK, max_sequences=9,
        device=device, dtype="float32",
    )  # fmt: skip


def _colocated(path: Path, prompts: list[list[int]], device: str) -> list[list[int]]:
    executor = _executor(path, device)
    seats = Driver(executor).generate(prompts, GREEDY, chunk=CHUNK)
    executor.close()
    return [seat.tokens for seat in seats]


def _handed_over(path: Path, prompts: list[list[int]], device: str) -> list[list[int]]:
    source, target = (Driver(_executor(path, device), seed) for seed in (1, 2))
    target.executor.attach("p", 1, source.executor.region)
    found = [_hand_over(source, target, prompt) for prompt in prompts]
    for driver in (target, source):
        driver.executor.close()
    return found


def _hand_over(source: Driver, target: Driver, prompt: list[int]) -> list[int]:
    first = source.enter(prompt, GREEDY)
    while not first.results:
        source.step([first], CHUNK)
    taken = target.take_over(first)
    chunk = ReadChunk("p", 1, first.blocks, taken.blocks, (first.slot, source.dispatch))
    assert target.run(reads=(chunk,)).reads == [True]
    source.leave(first)
    tokens = first.tokens + target.go_on(taken).tokens
    target.leave(taken)
    return tokens


# ---- 2. attention, in the width that serves


def attention(device: str, quick: bool) -> Rows:
    """Of long sequences against the same formula in float64; and draws against those of a CPU."""
    dtype, length = (torch.float32, 300) if quick else (torch.bfloat16, 4000)
    flavours = {
        "plain": Flavour(scaling=0.1),
        "window": Flavour(scaling=0.1, window=700),
        "softcap": Flavour(scaling=0.1, softcap=20.0),
    }
    rows = []
    for name, how in flavours.items():
        scene = Scene(
            [length, length // 3], seed=1, block_size=16, heads=8, kv_heads=2, k_width=128,
            v_width=128,
        )  # fmt: skip
        cache = scene.cache
        k, v = (part.to(device, dtype) for part in (cache.k, cache.v))
        scene.attention = best(PagedCache(k, v, cache.layers, cache.block_size))
        for part in (scene.q, scene.k, scene.v):
            part[:] = [x.to(device, dtype) for x in part]
        ends = [length - 1, length // 3 - 1]
        chunk = scene.compute([(s, 0, end) for s, end in enumerate(ends)], how)
        token = scene.compute([(s, end, end + 1) for s, end in enumerate(ends)], how)
        expected = [scene.expected(s, how) for s in range(2)]
        right = sum(
            torch.allclose(torch.cat(parts).double(), theirs, atol=0.02, rtol=0.02)
            for *parts, theirs in zip(chunk, token, expected, strict=True)
        )
        rows.append({"check": f"attention, {name}, {length} keys", "right": right, "of": 2})
    return [*rows, _draws(device)]


def _draws(device: str) -> dict[str, Any]:
    logits = torch.randn(300, 50_000, generator=torch.Generator().manual_seed(1)) * 3
    found = [
        [r.token for r in sample(rows, [_free_state(row) for row in range(len(rows))])]
        for rows in (logits.to(device), logits)
    ]
    right = sum(a == b for a, b in zip(*found, strict=True))
    return {"check": "tokens drawn as on a CPU", "right": right, "of": len(logits)}


def _free_state(row: int) -> SamplingState:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=row)
    return SamplingState(params, [1], [], None)


# ---- 3. handoff

OWNER = """
import sys, msgspec, torch
sys.path[:0] = {paths!r}
from staffel.transfer import KvShape, create
region = msgspec.json.decode(sys.stdin.readline())
names = ("slots", "num_blocks", "layers", "block_size", "kv_heads", "k_width", "v_width")
shape = KvShape(**{{n: region[n] for n in names}}, dtype=getattr(torch, region["dtype"]))
memory = create(shape, torch.device({device!r}))
memory.set_generation(0, 1)
print(msgspec.json.encode(memory.region).decode(), flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def _owner(like: KvRegion, blocks: int, device: str) -> Iterator[KvRegion]:
    """Another process with KV of the same layout."""
    script = OWNER.format(paths=[str(ROOT), str(ROOT / "src")], device=device)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        wanted = msgspec.structs.replace(like, num_blocks=blocks, handle=b"")
        process.stdin.write(msgspec.json.encode(wanted).decode() + "\n")
        process.stdin.flush()
        yield msgspec.json.decode(process.stdout.readline(), type=KvRegion)
        process.stdin.write("\n")


def handoff(executor: Executor, device: str, tokens: int, batch: int) -> Rows:
    """The whole KV at once; then in parts, one in each step of a decoding batch."""
    region = executor.region
    blocks = tokens // region.block_size
    size = blocks * (region.size // region.num_blocks)
    with _owner(region, blocks, device) as theirs:
        executor.attach("owner", 1, theirs)
        whole = ReadChunk("owner", 1, list(range(blocks)), list(range(blocks)), (0, 1))
        driver = Driver(executor)
        times = [_timed(lambda: driver.run(reads=(whole,))) for _ in range(REPEATS)]
        alone, beside = _decode_beside(driver, batch, blocks)
        executor.detach("owner", 1)
    return [
        {"check": f"handoff of {tokens} tokens", "ms": 1e3 * median(times),
         "bytes_per_second": size / median(times)},
        {"check": f"decode step of {batch}, while it is pulled", "ms": 1e3 * beside,
         "alone_ms": 1e3 * alone, "ratio": beside / alone},
    ]  # fmt: skip


def _decode_beside(driver: Driver, batch: int, blocks: int) -> tuple[float, float]:
    """Median seconds of a decode step, without and with a part of the KV being read."""
    prompt, steps = list(range(100, 164)), 2 * REPEATS
    params = SamplingParams(max_tokens=1 << 20, temperature=0)
    driver.free = [block for block in driver.free if block >= blocks]
    seats = [driver.enter(prompt, params) for _ in range(batch)]
    while not all(seat.results for seat in seats):
        driver.step(seats, len(prompt))
    alone = [_timed(lambda: driver.step(seats, 1)) for _ in range(steps)]
    part = max(1, blocks // steps)
    beside = []
    for at in range(0, part * steps, part):
        taken = list(range(at, at + part))
        for seat in seats:
            driver.advance(seat, 1)
        chunk = ReadChunk("owner", 1, taken, taken, None)
        slots = tuple(seat.slot for seat in seats)
        beside.append(_timed(lambda slots=slots, c=chunk: driver.run(decodes=slots, reads=(c,))))
    for seat in seats:
        driver.leave(seat)
    return median(alone), median(beside)


def _timed(work: Any) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


# ---- 4. fast?


def _random_net(config: Any, dtype: torch.dtype, device: str, attention: str) -> PreTrainedModel:
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return net.eval().requires_grad_(False)


def _config(shape: dict[str, int]) -> LlamaConfig:
    return LlamaConfig(**shape, architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2)


@contextlib.contextmanager
def _random_weights(device: str) -> Iterator[None]:
    """Let models be made up in memory instead of read: 16 GB would take a minute to write."""
    own = loader._read_weights

    def make(path: Path, config: Any, dtype: torch.dtype) -> Any:
        return _random_net(config, dtype, device, hook.NAME)

    loader._read_weights = make
    try:
        yield
    finally:
        loader._read_weights = own


def big_executor(shape: dict[str, int], device: str, dtype: str, quick: bool) -> Executor:
    with tempfile.TemporaryDirectory() as folder, _random_weights(device):
        _config(shape).save_pretrained(folder)
        spec = ModelSpec.load(Path(folder), name="shape", max_model_len=2048 if quick else 8448)
        return Executor(
            spec, kv_bytes=None if device == "cuda" else 1 << 28, device=device, dtype=dtype,
            max_sequences=16 if quick else 256, chunk_tokens=512 if quick else 8192,
        )  # fmt: skip


def limits(device: str, dtype: torch.dtype, quick: bool) -> dict[str, float]:
    """Bytes copied (read and written) and operations of a product, per second; best of ten."""
    size = (1 << 26) if quick else (1 << 31)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 512 if quick else 8192
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy = min(_timed(lambda: _synced(device, lambda: target.copy_(source))) for _ in range(10))
    product = min(_timed(lambda: _synced(device, lambda: a @ b)) for _ in range(10))
    return {"bytes_per_second": 2 * size / copy, "flops": 2 * side**3 / product}


def _synced(device: str, work: Any) -> None:
    work()
    if device == "cuda":
        torch.cuda.synchronize()


def speed(
    executor: Executor, shape: dict[str, int], machine: dict[str, float], quick: bool
) -> Rows:
    stage = Stage(executor, shape["vocab_size"])
    rows = []
    for cell in cells(quick):
        for _ in range(3):
            stage.time_step(cell)
        seconds = median(stage.time_step(cell) for _ in range(REPEATS))
        least = _least_seconds(cell, shape, executor.region, machine)
        rows.append({"check": _name(cell), "ms": 1e3 * seconds, "limit_ms": 1e3 * least,
                     "over_limit": seconds / least})  # fmt: skip
    return rows


def cells(quick: bool) -> list[BatchShape]:
    context = 256 if quick else 1024
    return [
        *(BatchShape(decodes=n, context=context) for n in ((1, 16) if quick else (1, 16, 64, 256))),
        *(BatchShape(prompts=1, new=n) for n in ((128, 512) if quick else (512, 2048, 8192))),
    ]


def _name(cell: BatchShape) -> str:
    return f"decode {cell.decodes} x {cell.context}" if cell.decodes else f"prefill {cell.new}"


def _least_seconds(
    cell: BatchShape, shape: dict[str, int], region: KvRegion, machine: dict[str, float]
) -> float:
    """Reading weights and KV once, or the products: whichever takes longer."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kv = 2 * region.kv_heads * region.k_width
    layer = hidden * (2 * hidden + kv + 3 * shape["intermediate_size"])
    head = hidden * shape["vocab_size"]
    width = getattr(torch, region.dtype).itemsize
    work = cell.work
    tokens, pairs = work.prompt_tokens + work.decodes, work.prompt_pairs + work.decode_context
    seen = work.decode_context + work.prompt_tokens
    moved = width * (layers * layer + head + layers * kv * seen)
    sampled = work.prompts + work.decodes
    operations = 2 * (tokens * layers * layer + sampled * head + 2 * pairs * layers * hidden)
    return max(moved / machine["bytes_per_second"], operations / machine["flops"])


# ---- 5. what a profile says of itself


def profiled(device: str, dtype: str, quick: bool) -> Rows:
    """The error of its fit on batches that it did not see, as shares."""
    with tempfile.TemporaryDirectory() as folder:
        net = _random_net(
            _config(SMALL if quick else LLAMA_1B), getattr(torch, dtype), "cpu", "sdpa"
        )
        net.save_pretrained(folder)
        wanted = Wanted(
            model=ModelSpec.load(Path(folder), name="shape", max_model_len=1024 if quick else 4096),
            spec=InstanceSpec(
                role="colocated", device=device, dtype=dtype,
                kv_memory="64MiB" if quick else "4GiB",
            ),
            threads=1,
            budget=3 if quick else 40,
        )  # fmt: skip
        try:
            found = profile(wanted, lambda *_: None)
        except ConfigError as error:
            return [{"check": "profile", "error": str(error)}]
    return [
        {"check": f"fit of {e.phase}, {e.region}", "batches": e.points, "median_error": e.median,
         "p90_error": e.p90}
        for e in found.errors[1]
    ]  # fmt: skip


# ---- 6. the same by transformers

TAIL = 16
"""Tokens of the last sequence over which its steps are timed, while all others decode too."""
ROUNDS = 128
"""More steps than all prompts take: the first sequence still decodes when the last one does."""


def peer(shape: dict[str, int], device: str, dtype: str, ours: Rows, quick: bool) -> Rows:
    """Step times of transformers' continuous batching; `ours` are those of `speed`."""
    net = _random_net(_config(shape), getattr(torch, dtype), device, "sdpa")
    rows = []
    for cell, own in zip(cells(quick), ours, strict=True):
        row: dict[str, Any] = {"check": f"transformers, {_name(cell)}"}
        try:
            seconds = _peer_step(net, cell)
            row |= {"ms": 1e3 * seconds, "over_ours": 1e3 * seconds / own["ms"]}
        except Exception as error:  # what it can't do is no fault of ours
            row["error"] = repr(error)
        rows.append(row)
    return rows


def _peer_step(net: PreTrainedModel, cell: BatchShape) -> float:
    """Median seconds between tokens of the last sequence, or those of a prompt."""
    from transformers import GenerationConfig  # with what an older version lacks: noted in a row
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    tokens = cell.context if cell.decodes else cell.new
    ids = torch.randint(3, net.config.vocab_size, (max(1, cell.decodes), tokens))
    options: dict[str, Any] = {
        "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(allow_block_sharing=False),
        "record_timestamps": True,
        "max_new_tokens": ROUNDS + TAIL if cell.decodes else 2,
    }
    outputs = list(net.generate_batch(ids.tolist(), **options).values())
    if len(outputs) < len(ids) or any(output.error for output in outputs):
        raise RuntimeError(next((o.error for o in outputs if o.error), "nothing came"))
    if not cell.decodes:
        return outputs[0].timestamps[0] - outputs[0].lifespan[0]
    times = max(outputs, key=lambda output: output.timestamps[0]).timestamps[1 : TAIL + 2]
    return median(b - a for a, b in itertools.pairwise(times))


# ---- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--no-peer", action="store_true", help="without transformers' step times")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu_check.json"))
    options = parser.parse_args()
    device, quick = options.device, options.quick
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu --quick rehearses the check")
    dtype = "bfloat16" if device == "cuda" else "float32"
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    started = perf_counter()

    def keep(part: str, rows: Any) -> None:
        """At once: what comes later may fail."""
        found[part], found["seconds"] = rows, perf_counter() - started
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        if isinstance(rows, list):
            _report(part, rows)

    keep("equality", equality(device))
    keep("attention", attention(device, quick))
    shape = SMALL if quick else LLAMA_8B
    keep("machine", limits(device, getattr(torch, dtype), quick))
    executor = big_executor(shape, device, dtype, quick)
    keep("kv_bytes", executor.region.size)
    keep("speed", speed(executor, shape, found["machine"], quick))
    keep("handoff", handoff(executor, device, 512 if quick else 4096, 4 if quick else 16))
    executor.close()
    del executor
    gc.collect()  # modules with rotary functions of ours know themselves
    if device == "cuda":
        torch.cuda.empty_cache()
    keep("profile", profiled(device, dtype, quick))
    if not options.no_peer:
        keep("peer", peer(shape, device, dtype, found["speed"], quick))
    rows = [*found["equality"], *found["attention"]]
    wrong = [row["check"] for row in rows if row["right"] < row["of"]]
    out.print(f"took {found['seconds']:.0f} s; wrong: {', '.join(wrong) or 'nothing'}")
    sys.exit(bool(wrong))


def _report(title: str, rows: Rows) -> None:
    heads = list(dict.fromkeys(name for row in rows for name in row))
    out.print(f"\n{title}")
    print_table([heads, *([_cell(row.get(name, "")) for name in heads] for row in rows)])


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

"""What int8 weights cost in quality: perplexity of programs under fp32 and under int8.

    python benchmarks/int8_perplexity.py humaneval.jsonl.gz [--tasks N]

The file is HumanEval (Chen et al., 2021): a JSON object a line, with `prompt` and
`canonical_solution`, which make one text. Perplexity is exp of the mean negative log probability of
all tokens of all texts but their first ones, each text by itself, as the executor scores prompts.
The last line is the relative change.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from staffel.config import ModelSpec, Quantization
from staffel.control.messages import Batch, Enter, Row
from staffel.control.request import SamplingParams
from staffel.kernels import library
from staffel.model import hub
from staffel.model.executor import Executor

FILE = Path(__file__).parent / "results" / "int8_perplexity.json"
BLOCK = 16
SCORED = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)


def texts(file: Path, tasks: int) -> list[str]:
    """Prompt and solution of the first `tasks` of them; fewer if the file has fewer."""
    data = file.read_bytes()
    lines = (gzip.decompress(data) if file.suffix == ".gz" else data).splitlines()
    rows = [json.loads(line) for line in lines[:tasks]]
    return [row["prompt"] + row["canonical_solution"] for row in rows]


def perplexity(executor: Executor, sequences: list[list[int]]) -> float:
    logprobs = [value for ids in sequences for value in _score(executor, ids)]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def _score(executor: Executor, ids: list[int]) -> Iterator[float]:
    """Natural-log probability of each id but the first."""
    blocks = list(range(-(-len(ids) // BLOCK)))
    batch = Batch(
        id=0,
        leaves=[0],
        enters=[Enter(0, 1, ids, len(ids), SCORED)],
        grown=[(0, blocks)],
        reads=[],
        decodes=[],
        rows=[Row(0, 0, len(ids), False)],
    )
    for score in executor.execute(batch).rows[0].prompt_logprobs:
        yield score.logprob


@contextmanager
def executor(spec: ModelSpec, options: argparse.Namespace, how: str) -> Iterator[Executor]:
    quantization: Quantization | None = "int8" if how == "int8" else None
    made = Executor(
        spec,
        kv_bytes=options.kv_bytes,
        block_size=BLOCK,
        max_sequences=1,
        quantization=quantization,
        threads=options.threads,
    )
    try:
        yield made
    finally:
        made.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(options.path / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in texts(options.file, options.tasks)]
    spec = ModelSpec.load(options.path, name="model", max_model_len=max(map(len, encoded)) + 1)
    found = {}
    for how in ("fp32", "int8"):
        with executor(spec, options, how) as made:
            found[how] = perplexity(made, encoded)
        print(f"{how}: perplexity {found[how]:.4f}", flush=True)
    tokens = sum(len(ids) - 1 for ids in encoded)
    return {"tasks": len(encoded), "tokens": tokens, "perplexity": found}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="HumanEval's tasks, .jsonl or .jsonl.gz")
    parser.add_argument("--tasks", type=int, default=164, help="how many, from the first on")
    parser.add_argument("--model", help="a Hugging Face folder; default: the default model")
    parser.add_argument("--threads", type=int, default=1, help="of the executor")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30, help="for one text's KV")
    parser.add_argument("--json", type=Path, default=FILE, help="where the result goes")
    options = parser.parse_args()
    if not options.file.is_file():
        parser.error(f"file: there is no {options.file}")
    if options.tasks < 1:
        parser.error("--tasks: 1 or more")
    options.path = hub.resolve(options.model, lambda text: print(text, file=sys.stderr))
    return options


def main() -> None:
    options = _options()
    found = measure(options)
    change = found["perplexity"]["int8"] / found["perplexity"]["fp32"] - 1
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": options.path.name,
        "versions": {name: version(name) for name in ("staffel", "torch", "transformers")},
        "kernels": library.level(),
        **found,
        "relative_change": change,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"perplexity_change={change:+.4%}")


if __name__ == "__main__":
    main()

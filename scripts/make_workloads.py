"""Derives the tables in src/staffel/bench/data from public traces.

    python scripts/make_workloads.py SOURCES --tokenizer TOKENIZER.json

SOURCES is a folder with azure_code_2023.csv, azure_conversation_2023.csv (AzurePublicDataset),
mooncake_conversation.jsonl (kvcache-ai/Mooncake), arxiv_summarization_lengths.csv (microsoft/vidur)
and humaneval.jsonl.gz (openai/human-eval). TOKENIZER.json is OPT's or GPT-2's: the same byte-level
BPE, to which OPT adds one token at the start. Needs scipy beyond the project's dependencies.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import spearmanr
from tokenizers import Tokenizer

from staffel.bench.tables import Curve, Error, Fidelity, Sessions, Slices, Table

OUT = Path(__file__).parent.parent / "src/staffel/bench/data"
AZURE = (
    "Azure Public Dataset, AzureLLMInferenceTrace_{}, 2023 (github.com/Azure/AzurePublicDataset)"
)
PROMPT_LEVELS = np.unique([*np.arange(101) / 100, 0.005, 0.985, 0.995, 0.998, 0.9995])
OUTPUT_LEVELS = np.unique(
    [*np.arange(21) / 20, 0.01, 0.025, 0.925, 0.975, 0.98, 0.985, 0.99, 0.995]
)
SHARED_LEVELS = np.arange(21) / 20
CHAT_MEANS = (755.5, 200.3)
"""Average prompt and output tokens of ShareGPT in the DistServe paper (OSDI 2024, figure 7)."""
ANSWER_MEAN = 90.7
"""Average output tokens of LongBench there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    for table in tables(options.sources, Tokenizer.from_file(str(options.tokenizer))):
        path = OUT / f"{table.name}.json"
        path.write_bytes(msgspec.json.encode(table) + b"\n")
        print(f"{table.name:22} {path.stat().st_size:6} bytes  {describe(table)}")


def tables(sources: Path, tokenizer: Tokenizer) -> list[Table]:
    talk = azure(sources / "azure_conversation_2023.csv")
    return [
        table(
            azure(sources / "azure_code_2023.csv"),
            name="azure-code",
            source=AZURE.format("code"),
            licence="CC BY 4.0",
            derived="as it is",
            style="code",
        ),
        table(
            talk,
            name="azure-conversation",
            source=AZURE.format("conv"),
            licence="CC BY 4.0",
            derived="as it is",
        ),
        table(
            chat(talk),
            name="chatbot",
            source=AZURE.format("conv"),
            licence="CC BY 4.0",
            derived=(
                "prompts and outputs each rescaled, and requests of 2,048 tokens or more left out, "
                f"so that the averages are ShareGPT's in the DistServe paper, {CHAT_MEANS}"
            ),
            below=2048,
        ),
        table(
            summaries(sources / "arxiv_summarization_lengths.csv"),
            name="summarization",
            source="arXiv summarisation lengths of Vidur (github.com/microsoft/vidur)",
            licence="MIT",
            derived=(
                "prompts of 1,900 to 2,048 tokens; outputs rescaled to the average of LongBench "
                f"in the DistServe paper, {ANSWER_MEAN}"
            ),
            slices=4,
        ),
        table(
            human_eval(sources / "humaneval.jsonl.gz", tokenizer),
            name="code",
            source="HumanEval (github.com/openai/human-eval)",
            licence="MIT",
            derived="lengths of prompts and of canonical solutions in OPT's tokens",
            style="code",
            slices=8,
        ),
        mooncake(sources / "mooncake_conversation.jsonl"),
    ]


def azure(path: Path) -> np.ndarray:
    return columns(path, "ContextTokens", "GeneratedTokens")


def columns(path: Path, *names: str) -> np.ndarray:
    with path.open(newline="") as file:
        return np.array([[float(row[name]) for name in names] for row in csv.DictReader(file)])


def chat(lengths: np.ndarray) -> np.ndarray:
    """Factors for both lengths such that what stays below 2,048 tokens has the wanted means."""
    factors = np.ones(2)
    for _ in range(200):
        scaled = np.maximum(1, np.round(lengths * factors))
        kept = scaled[scaled.sum(axis=1) < 2048]
        factors *= CHAT_MEANS / kept.mean(axis=0)
    print(f"chatbot: factors {factors.round(3)}, kept {len(kept) / len(lengths):.1%}")
    return kept


def summaries(path: Path) -> np.ndarray:
    lengths = columns(path, "num_prefill_tokens", "num_decode_tokens")
    kept = lengths[(lengths[:, 0] >= 1900) & (lengths[:, 0] <= 2048)]
    return kept * (1, ANSWER_MEAN / kept[:, 1].mean())


def human_eval(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    with gzip.open(path) as file:
        rows = [json.loads(line) for line in file]

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids) + 1

    return np.array([[tokens(row["prompt"]), tokens(row["canonical_solution"])] for row in rows])


def table(lengths: np.ndarray, *, slices: int = 32, style: str = "prose", **names: object) -> Table:
    """`lengths`: [requests, 2], prompt and output."""
    order = np.argsort(lengths[:, 0], kind="stable")
    made = Table(
        style=style,
        rows=len(lengths),
        prompt=Curve(levels(PROMPT_LEVELS), quantiles(lengths[:, 0], PROMPT_LEVELS)),
        output=sliced(lengths[order, 1], slices, OUTPUT_LEVELS),
        fidelity=None,
        **names,
    )
    return msgspec.structs.replace(made, fidelity=fidelity(made, lengths))


def sliced(values: np.ndarray, slices: int, at: np.ndarray) -> Slices:
    """`values` in the order of the prompt's length."""
    rows = tuple(quantiles(part, at) for part in np.array_split(values, slices))
    return Slices(levels(at), rows)


def levels(at: np.ndarray) -> tuple[float, ...]:
    return tuple(np.round(at, 4).tolist())


def quantiles(values: np.ndarray, at: np.ndarray) -> tuple[float, ...]:
    """Rounded to 4 digits, which is below the error of the interpolation."""
    return tuple(float(f"{value:.4g}") for value in np.quantile(values, at, method="hazen"))


def fidelity(made: Table, lengths: np.ndarray) -> Fidelity:
    middles = (np.arange(500) + 0.5) / 500
    drawn = np.array([made.sizes(u, v) for u in middles for v in middles])
    if made.below is not None:
        drawn = drawn[drawn.sum(axis=1) < made.below]
    return Fidelity(
        prompt=error(drawn[:, 0], lengths[:, 0]),
        output=error(drawn[:, 1], lengths[:, 1]),
        rank_correlation=(round(rank(lengths), 3), round(rank(drawn), 3)),
    )


def error(made: np.ndarray, source: np.ndarray) -> Error:
    def measures(values: np.ndarray) -> np.ndarray:
        return np.array([values.mean(), *np.quantile(values, (0.5, 0.9, 0.99))])

    return Error(*(measures(made) / measures(source) - 1).round(4).tolist())


def rank(lengths: np.ndarray) -> float:
    return float(spearmanr(lengths[:, 0], lengths[:, 1]).statistic)


def mooncake(path: Path) -> Table:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = np.array([(row["input_length"], row["output_length"]) for row in rows], float)
    made = table(
        lengths,
        name="mooncake-conversation",
        source="Mooncake conversation trace (github.com/kvcache-ai/Mooncake)",
        licence="Apache-2.0",
        derived="as it is; how prefixes are shared as a model of conversations",
    )
    return msgspec.structs.replace(made, sessions=sessions([row["hash_ids"] for row in rows]))


def sessions(requests: list[list[int]]) -> Sessions:
    """From the second half only: the first lacks the conversations from before its start."""
    shared, lag = np.array(sharing(requests)).T
    half = len(requests) // 2
    sizes = np.array([len(ids) for ids in requests[half:]])
    order = np.argsort(sizes, kind="stable")
    continued = lag[half:][shared[half:] > 1]
    return Sessions(
        block=512,
        shared=sliced(shared[half:][order], 32, SHARED_LEVELS),
        lag=Curve(levels(OUTPUT_LEVELS), quantiles(continued, OUTPUT_LEVELS)),
    )


def sharing(requests: list[list[int]]) -> list[tuple[int, int]]:
    """For each request: leading blocks seen before, and how many requests ago the last of them."""
    last: dict[int, int] = {}
    found = []
    for number, ids in enumerate(requests):
        shared = next((place for place, key in enumerate(ids) if key not in last), len(ids))
        found.append((shared, number - last[ids[shared - 1]] if shared else 0))
        last.update(dict.fromkeys(ids, number))
    return found


def describe(made: Table) -> str:
    parts = [
        f"{part} mean {each.mean:+.1%} P50 {each.p50:+.1%} P90 {each.p90:+.1%} P99 {each.p99:+.1%}"
        for part, each in (("prompt", made.fidelity.prompt), ("output", made.fidelity.output))
    ]
    source, table_ = made.fidelity.rank_correlation
    return f"{'; '.join(parts)}; rank correlation {source:+.3f} {table_:+.3f}"


if __name__ == "__main__":
    main()

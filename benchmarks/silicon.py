"""Sheets judged by real GPUs: predicted TTFT and TPOT beside thousands of measured ones.

    pip download aiconfigurator-core==0.12.0 --no-deps
    python benchmarks/silicon.py aiconfigurator_core-0.12.0-*.whl [--fit] [--peer peer.json]

The wheel (Apache-2.0) ships measurements of several engines, models and GPUs at fixed numbers of
clients. Each is predicted by a closed loop (`silicon_loop.py`) over a `RooflineModel`. `--fit` fits
the efficiency factors of each engine, anew, to those aggregated H100 rows whose id has an even
hash; without it the recorded ones are used. No factor is fitted to any other row; the form of the
model, though, was settled with all of them in view. `--peer` adds what `silicon_peer.py` printed,
on the same rows. Writes results/silicon.json.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from silicon_fit import Fitted, fit_engine
from silicon_predict import Prediction, predict
from silicon_rows import Refused, Row, Silicon

from staffel.config import ConfigError
from staffel.terminal import out, print_table

RESULTS = Path(__file__).parent / "results" / "silicon.json"
BACKENDS = ("trtllm", "vllm", "sglang")

Pair = tuple[Row, Prediction]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the factors anew (minutes)")
    parser.add_argument("--peer", type=Path, help="what silicon_peer.py printed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows, refused = read(Silicon(args.wheel))
    fitted = fit_all(rows) if args.fit else recorded(args.out)
    pairs = predict_all(rows, fitted, refused)
    report = {
        "source": "aiconfigurator-core 0.12.0, systems/silicon_sample.csv",
        "rows": sum(1 for _ in Silicon(args.wheel).raw()),
        "predicted": len(pairs),
        "refused": dict(refused.most_common()),
        "fitted": {name: msgspec.to_builtins(value) for name, value in fitted.items()},
        "tables": tables(pairs),
    }
    if args.peer:
        report["peer"] = compare(pairs, json.loads(args.peer.read_text()))
    show(report)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def read(silicon: Silicon) -> tuple[list[Row], Counter[str]]:
    rows, refused, seen = [], Counter(), set()
    for raw in silicon.raw():
        try:
            row = silicon.row(raw)
            if row.measurement in seen:
                raise Refused("a measurement that is listed twice")
            seen.add(row.measurement)
            rows.append(row)
        except Refused as reason:
            refused[f"{raw['mode']}: {reason}"] += 1
    return rows, refused


def fit_all(rows: Sequence[Row]) -> dict[str, Fitted]:
    seen = [row for row in rows if was_seen(row)]
    members = [[row for row in seen if row.backend == backend] for backend in BACKENDS]
    with ProcessPoolExecutor() as pool:
        return dict(zip(BACKENDS, pool.map(fit_engine, BACKENDS, members), strict=True))


def was_seen(row: Row) -> bool:
    """Whether the fit may look at it."""
    return row.hardware == "h100" and row.mode == "agg" and row.half == 0


def recorded(file: Path) -> dict[str, Fitted]:
    return msgspec.convert(json.loads(file.read_text())["fitted"], dict[str, Fitted])


def predict_all(
    rows: Iterable[Row], fitted: Mapping[str, Fitted], refused: Counter[str]
) -> list[Pair]:
    pairs = []
    for row in rows:
        try:
            known = fitted[row.backend]
            pairs.append((row, predict(row, known.factors, known.setup_of(row.group))))
        except ConfigError as reason:
            refused[f"{row.mode}: {str(reason).split('(')[0].strip()}"] += 1
    return pairs


def errors(pairs: Sequence[Pair]) -> dict[str, float | int]:
    """Median and P90 of |predicted / measured - 1|."""
    ttft = [abs(predicted.ttft / row.ttft - 1) for row, predicted in pairs]
    tpot = [abs(predicted.tpot / row.tpot - 1) for row, predicted in pairs]
    return {
        "rows": len(pairs),
        "ttft_median": round(float(np.median(ttft)), 4),
        "ttft_p90": round(float(np.quantile(ttft, 0.9)), 4),
        "tpot_median": round(float(np.median(tpot)), 4),
        "tpot_p90": round(float(np.quantile(tpot, 0.9)), 4),
    }


def grouped(pairs: Sequence[Pair], key: Callable[[Row], str]) -> dict[str, dict[str, float | int]]:
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[key(pair[0])].append(pair)
    return {name: errors(groups[name]) for name in sorted(groups)}


def tables(pairs: Sequence[Pair]) -> dict[str, dict[str, dict[str, float | int]]]:
    unseen = [pair for pair in pairs if not was_seen(pair[0])]
    return {
        "seen by the fit": grouped([pair for pair in pairs if was_seen(pair[0])], lambda r: r.mode),
        "unseen, all": grouped(unseen, lambda r: r.mode),
        "unseen, by GPU and mode": grouped(unseen, lambda r: f"{r.hardware} {r.mode}"),
        "unseen, by engine and mode": grouped(unseen, lambda r: f"{r.backend} {r.mode}"),
        "unseen, by model and mode": grouped(unseen, lambda r: f"{r.model} {r.mode}"),
        "unseen, by GPU, model, engine and mode": grouped(
            unseen, lambda r: f"{r.hardware} {r.model} {r.backend} {r.mode}"
        ),
    }


def compare(
    pairs: Sequence[Pair], answers: Mapping[str, str | list[list[float]]]
) -> dict[str, dict[str, float | int]]:
    """On the rows that both predict; the peer's two ways of asking are told apart."""
    both = [pair for pair in pairs if isinstance(answers.get(pair[0].id), list)]
    unseen = [pair for pair in both if not was_seen(pair[0])]

    def peers(chosen: Sequence[Pair], way: int) -> list[Pair]:
        return [(row, Prediction(*answers[row.id][way])) for row, _ in chosen]  # type: ignore[arg-type]

    table = {}
    for name, chosen in (("all", both), ("unseen by our fit", unseen)):
        table[f"{name}: ours"] = errors(chosen)
        table[f"{name}: AIConfigurator, its best batch"] = errors(peers(chosen, 0))
        table[f"{name}: AIConfigurator, one prompt a step"] = errors(peers(chosen, 1))
    return table


def show(report: Mapping[str, object]) -> None:
    out.print(f"{report['predicted']} of {report['rows']} rows predicted; refused:")
    for reason, count in report["refused"].items():  # type: ignore[attr-defined]
        out.print(f"  {count:5} {reason}", highlight=False, soft_wrap=True)
    shown = {**report["tables"], "beside a peer": report.get("peer", {})}  # type: ignore[dict-item]
    for title, table in shown.items():
        if table:
            out.print(f"\n{title}")
            print_table([HEAD, *(line(name, values) for name, values in table.items())])


HEAD = ("", "rows", "TTFT median", "P90", "TPOT median", "P90")


def line(name: str, values: Mapping[str, float | int]) -> list[str]:
    rows, *shares = values.values()
    return [name, str(rows), *(f"{share:.1%}" for share in shares)]


if __name__ == "__main__":
    main()

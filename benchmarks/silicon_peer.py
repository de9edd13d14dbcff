"""AIConfigurator's own predictions of the aggregated rows, for comparison.

    VENV/bin/python benchmarks/silicon_peer.py [--model TEXT] [--system NAME] > peer.json

Runs in an environment of its own with `aiconfigurator-core` installed, and imports nothing of
Staffel. Each row's batch is asked for as the row has it, in two ways: with the context tokens per
step at which the tool finds the highest throughput, as its own search would choose them, and with
one prompt at a time. Prints a JSON object: id to [[ttft_s, tpot_s], [ttft_s, tpot_s]], or a text
with the reason where it has no answer.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import sys
from functools import cache
from pathlib import Path

import aiconfigurator_core
from aiconfigurator_core.sdk.backends.factory import get_backend
from aiconfigurator_core.sdk.config import RuntimeConfig
from aiconfigurator_core.sdk.config_builders import build_model_config
from aiconfigurator_core.sdk.models import get_model
from aiconfigurator_core.sdk.perf_database import get_database, get_latest_database_version

CSV = Path(aiconfigurator_core.__file__).parent / "systems" / "silicon_sample.csv"
KNOWN_AS = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
}
"""Configs that the wheel has; others it would download."""
SYSTEMS_ASKED = ("h100_sxm", "h200_sxm")


@cache
def database(system: str, backend: str):
    return get_database(system, backend, get_latest_database_version(system, backend))


def predict(row: dict[str, str]) -> list[list[float]]:
    backend = get_backend(row["backend"])
    known = database(row["system"], row["backend"])
    config = build_model_config(
        tp_size=int(row["tp_size"]),
        pp_size=int(row["pp_size"]),
        attention_dp_size=max(1, int(row["attention_dp_size"] or 1)),
        moe_tp_size=max(1, int(row["moe_tp_size"] or 1)),
        moe_ep_size=max(1, int(row["moe_ep_size"] or 1)),
        gemm_quant_mode=row["gemm_quant_mode"] or None,
        moe_quant_mode=row["moe_quant_mode"] or None,
    )
    model = get_model(KNOWN_AS.get(row["model_path"], row["model_path"]), config, row["backend"])
    isl, osl, batch = int(row["isl"]), int(row["osl"]), int(row["batch_size"])
    runtime = RuntimeConfig(isl=isl, osl=osl, batch_size=batch)
    answers = {}
    for tokens in backend._get_ctx_tokens_list_for_agg_sweep(isl, 512, False):
        if batch > 1 and batch - -(-tokens // isl) < 1:
            break
        summary = backend.run_agg(model, known, runtime, ctx_tokens=tokens)
        answers[tokens] = summary.get_result_dict()
    best = max(answers.values(), key=lambda answer: answer["seq/s"])
    return [[a["ttft"] / 1e3, a["tpot"] / 1e3] for a in (best, answers[isl])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Llama-3.1", help="text in the model's name")
    parser.add_argument("--system", action="append", help="default: H100 and H200")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    answers: dict[str, object] = {}
    with CSV.open() as file:
        for row in csv.DictReader(file):
            if row["mode"] != "agg" or args.model not in row["model_path"]:
                continue
            if row["system"] not in (args.system or SYSTEMS_ASKED):
                continue
            try:
                answers[row["id"]] = predict(row)
            except Exception as error:  # whatever it raises is the reason that is reported
                answers[row["id"]] = f"{type(error).__name__}: {error}"[:160]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

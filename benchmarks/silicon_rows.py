"""Measured rows of GPUs, as read from the wheel that ships them, and which of them are predicted.

The rows stay in the wheel; nothing of them is kept here.
"""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from staffel.config import ConfigError
from staffel.latency.roofline import Precision
from staffel.latency.shape import ModelShape

CSV = "aiconfigurator_core/systems/silicon_sample.csv"
CONFIG = "aiconfigurator_core/model_configs/{}_config.json"
SYSTEMS = {
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
}
NVLINK_DOMAIN = {"gb200": 72, "gb300": 72}
NODE = 8
OTHER_NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
_PUBLIC = re.compile(r"db-dump/|source_file=\d{4}-\d\d-\d\d\.csv")
FOUR_BIT = {"fp4": "fp4", "int4": "int4"}


class Refused(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    id: str
    campaign: str
    """public: the nightly public benchmark, whose lengths vary; other: fixed lengths."""
    mode: str
    backend: str
    model: str
    system: str
    shape: ModelShape
    precision: Precision
    tp: int
    decode_tp: int
    prefill_workers: int
    decode_workers: int
    clients: int
    """Of one colocated instance, where several share them out evenly; else of all workers."""
    prompt_tokens: int
    output_tokens: int
    ttft: float
    tpot: float
    """Both in seconds."""

    @property
    def hardware(self) -> str:
        return SYSTEMS[self.system]

    @property
    def group(self) -> str:
        """Rows that were run in the same way."""
        return f"{self.backend} {self.campaign} {self.model}"

    @property
    def measurement(self) -> tuple[object, ...]:
        """Two rows with the same are one measurement under two ids."""
        kind = (self.model, self.system, self.backend, self.prompt_tokens, self.output_tokens)
        return (*kind, self.ttft, self.tpot)

    @property
    def half(self) -> int:
        """0 or 1, by a hash of the id."""
        return zlib.crc32(self.id.encode()) % 2


class Silicon:
    """The wheel's rows."""

    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self._shape = cache(self._load_shape)

    def raw(self) -> Iterator[dict[str, str]]:
        yield from csv.DictReader(io.StringIO(self._zip.read(CSV).decode()))

    def row(self, raw: dict[str, str]) -> Row:
        """Raises Refused with the reason."""
        disaggregated = raw["mode"] == "disagg"
        prefix = "prefill_" if disaggregated else ""
        for phase in (prefix, "decode_"):
            if int(raw[f"{phase}attention_dp_size"] or 1) > 1:
                raise Refused("attention is data parallel")
        tp = int(raw[f"{prefix}tp_size"])
        decode_tp = int(raw["decode_tp_size"] or tp)
        if max(tp, decode_tp) > NVLINK_DOMAIN.get(raw["system"], NODE):
            raise Refused("tensor parallel beyond a node")
        shape = self._shape(raw["model_path"])
        if shape.heads % tp or shape.heads % decode_tp:
            raise Refused("tp does not divide the attention heads")
        return Row(
            id=raw["id"],
            campaign="public" if _PUBLIC.search(raw["silicon_data_source"]) else "other",
            mode=raw["mode"],
            backend=raw["backend"],
            model=raw["model_path"],
            system=raw["system"],
            shape=shape,
            precision=_precision(raw, shape),
            tp=tp,
            decode_tp=decode_tp,
            prefill_workers=_workers(raw, "prefill") if disaggregated else 0,
            decode_workers=_workers(raw, "decode") if disaggregated else 0,
            clients=_clients(raw),
            prompt_tokens=int(raw["isl"]),
            output_tokens=int(raw["osl"]),
            ttft=float(raw["silicon_ttft_ms"]) / 1e3,
            tpot=float(raw["silicon_tpot_ms"]) / 1e3,
        )

    def _load_shape(self, model: str) -> ModelShape:
        name = CONFIG.format(OTHER_NAMES.get(model, model).replace("/", "--"))
        try:
            return ModelShape.from_config(json.loads(self._zip.read(name)))
        except KeyError:
            raise Refused(f"no config of {model}") from None
        except ConfigError as error:
            raise Refused(f"{model}: {error}") from None


def _workers(raw: dict[str, str], phase: str) -> int:
    if not raw[f"{phase}_num_workers"]:
        raise Refused("the number of workers is not given")
    return int(raw[f"{phase}_num_workers"])


def _clients(raw: dict[str, str]) -> int:
    if raw["mode"] == "agg":
        return int(raw["batch_size"])
    stated = re.search(r"silicon_concurrency=(\d+)", raw["silicon_data_source"])
    if stated is None:
        raise Refused("the number of clients is not given")
    return int(stated[1])


def _precision(raw: dict[str, str], shape: ModelShape) -> Precision:
    """Four-bit checkpoints of models with experts keep the rest in two bytes."""
    stated = raw["precision"] or "bf16"
    if stated in FOUR_BIT:
        dense = "bfloat16" if shape.experts else FOUR_BIT[stated]
        return Precision(dense, FOUR_BIT[stated], "fp8" if stated == "fp4" else "bfloat16")
    dtype = {"bf16": "bfloat16", "fp8": "fp8"}[stated]
    return Precision(dtype, dtype, dtype)

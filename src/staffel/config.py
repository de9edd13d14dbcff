"""What to serve and where: validated nouns, loadable from YAML and from model folders.

Every error is a `ConfigError` whose text names the field and the way out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Role = Literal["prefill", "decode", "colocated"]
Policy = Literal["chunked", "prefill-first"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]

CPU_KV_MEMORY = "1GiB"
"""KV cache of an instance on a CPU, unless it is told otherwise."""
GPU_MEMORY_UTILIZATION = 0.9
"""The rest is for what can't be foreseen: other libraries' workspaces, fragments."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}ib": 1024 ** (i + 1) for i, u in enumerate("kmgt")}
_UNITS |= {f"{u}b": 1000 ** (i + 1) for i, u in enumerate("kmgt")}


class ConfigError(ValueError):
    """Wrong use: the text names the field or option and says what to do."""


def check_choice(option: str, value: str, known: Collection[str]) -> None:
    """Raises ConfigError where `value` is none of the known ones."""
    if value not in known:
        raise ConfigError(f"{option}: {value!r} is not one of {', '.join(known)}")


def parse_bytes(text: str | int, field: str = "size") -> int:
    """Bytes from "1GiB", "512MiB", "2GB" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f'{field}: cannot read {text!r}; write it like "1GiB" or "512MiB"')
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"{field}: must be above 0")
    return size


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder, as far as it can be known without loading the weights."""

    name: str
    """The name that clients use."""
    path: str
    """The Hugging Face folder."""
    model_type: str
    architecture: str
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    eos_ids: tuple[int, ...]
    """Ids that end a text, from generation_config.json, else config.json."""

    @classmethod
    def load(cls, path: Path, *, name: str, max_model_len: int | None = None) -> ModelSpec:
        """Read a model folder's config.

        Raises:
            ConfigError: no folder, no config.json, no architecture, or `max_model_len` beyond
                what the model was made for.
        """
        config = _read_config(path)
        text = {**config, **config.get("text_config", {})}
        architectures = text.get("architectures")
        if not (isinstance(architectures, list) and architectures):
            raise ConfigError(f"MODEL: {path}/config.json names no architecture")
        if not isinstance(text.get("vocab_size"), int):
            raise ConfigError(f"MODEL: {path}/config.json names no vocab_size")
        limit = _context_limit(text)
        if max_model_len is not None and limit is not None and max_model_len > limit:
            raise ConfigError(
                f"--max-model-len: {max_model_len} is beyond the model's own limit of {limit}"
            )
        length = limit if max_model_len is None else max_model_len
        if length is None:
            raise ConfigError("--max-model-len: the model's config names no limit; give one")
        if length < 2:
            raise ConfigError("--max-model-len: must be at least 2")
        return cls(
            name=name,
            path=str(path),
            model_type=text.get("model_type", ""),
            architecture=architectures[0],
            vocab_size=text["vocab_size"],
            max_model_len=length,
            eos_ids=_eos_ids(path, text),
        )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ConfigError(f"MODEL: {path} is no folder; give a Hugging Face folder or a hub id")
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"MODEL: {path} has no config.json; give a Hugging Face model folder "
            "(config.json, tokenizer.json, *.safetensors)"
        )
    return _read_object(path / "config.json")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"MODEL: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"MODEL: {file} is not a JSON object")
    return config


def _context_limit(config: dict[str, Any]) -> int | None:
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"):
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    value = config.get("eos_token_id")
    if generation.is_file():
        value = _read_object(generation).get("eos_token_id", value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


class ParallelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one instance is spread over devices: tensor (`tp`) times pipeline (`pp`) parallel."""

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for field in ("tp", "pp"):
            if getattr(self, field) < 1:
                raise ConfigError(f"parallel: {field}: must be at least 1")

    @property
    def devices(self) -> int:
        return self.tp * self.pp


class InstanceSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """`count` like instances of one role."""

    role: Role
    count: int = 1
    parallel: ParallelSpec = ParallelSpec()
    policy: Policy | None = None
    """Batch policy of a colocated instance; None: chunked."""
    chunk_tokens: int = 256
    """Most tokens of one step; longer prompts are prefilled in chunks."""
    max_sequences: int = 128
    """Most sequences that an instance holds at a time."""
    kv_memory: str | None = None
    """Bytes of KV cache; None: 1 GiB on a CPU, and on a GPU what is left of its memory."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that is used by all instances on it; None: 0.9."""
    block_size: int = 16
    """Tokens of one block."""
    prefix_cache: bool = True
    """Whether prompts that begin like earlier ones take the KV of that part from them."""
    dtype: Dtype = "auto"
    quantization: Quantization | None = None
    """Weights in fewer bits, made when the model is loaded; None: as they are."""
    device: Device = "auto"
    cuda_graphs: bool = True
    """Whether a GPU's decode steps are captured and played again. Without, a step is many launches,
    start-up is faster, and the graphs' memory is free."""
    threads: int | None = None
    """CPU threads; None: the machine's cores shared out."""

    def __post_init__(self) -> None:
        for field in ("count", "chunk_tokens", "max_sequences", "block_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}: must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads: must be at least 1")
        if self.policy is not None and self.role != "colocated":
            raise ConfigError(f"policy: is for colocated instances, not for role {self.role}")
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory, "kv_memory")
        self._check_quantization()
        self._check_gpu()

    def _check_quantization(self) -> None:
        if self.quantization is None:
            return
        if self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"quantization: {self.quantization} computes in float32, not in {self.dtype}; "
                "leave dtype or quantization out"
            )
        if self.device == "cuda":
            raise ConfigError(
                f"quantization: {self.quantization} is for CPUs; leave device or quantization out"
            )

    def _check_gpu(self) -> None:
        share = self.gpu_memory_utilization
        if self.device != "cuda" and (share is not None or not self.cuda_graphs):
            field = "cuda_graphs" if share is None else "gpu_memory_utilization"
            raise ConfigError(f"{field}: is for GPUs; add device: cuda, or leave it out")
        if share is None:
            return
        if not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization: must be above 0 and at most 1, like 0.9")
        if self.kv_memory is not None:
            raise ConfigError(
                "gpu_memory_utilization: kv_memory settles the KV cache already; "
                "leave one of them out"
            )

    @property
    def kv_bytes(self) -> int | None:
        """None: what is left of the GPU's memory."""
        if self.kv_memory is None and self.device == "cuda":
            return None
        return parse_bytes(self.kv_memory or CPU_KV_MEMORY, "kv_memory")

    @property
    def gpu_share(self) -> float:
        """Of the GPU's memory, for all instances on it."""
        return self.gpu_memory_utilization or GPU_MEMORY_UTILIZATION


class Placement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The instances to run.

    YAML::

        model: HuggingFaceTB/SmolLM2-135M-Instruct   # optional
        instances:
          - {role: prefill, count: 2, kv_memory: 2GiB}
          - {role: decode, threads: 2}
    """

    instances: tuple[InstanceSpec, ...]
    model: str | None = None
    hosts: int = 1
    """Machines that it takes."""

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ConfigError("placement: hosts: must be at least 1")
        prefill, decode = self.count("prefill"), self.count("decode")
        if not self.instances:
            raise ConfigError(
                "placement: no instances; give --prefill and --decode, or --colocated"
            )
        if bool(prefill) != bool(decode):
            lacking = "decode" if prefill else "prefill"
            raise ConfigError(
                f"placement: no {lacking} instance; prefill and decode need each other "
                "(--prefill N --decode N), or use --colocated N"
            )
        for field in ("block_size", "dtype", "quantization"):
            if len({getattr(spec, field) for spec in self.instances}) > 1:
                raise ConfigError(f"placement: {field} must be the same for all instances")

    @classmethod
    def of_counts(cls, counts: Mapping[Role, int | None], fields: Mapping[str, Any]) -> Placement:
        """So many instances of each role, all with these fields; 1P1D without any count.

        Raises:
            ConfigError: a policy without colocated instances, or a placement that can't be.
        """
        colocated = counts["colocated"] or 0
        if "policy" in fields and not colocated:
            raise ConfigError("--policy: is for colocated instances; add --colocated N")
        others = {name: value for name, value in fields.items() if name != "policy"}
        default = 0 if colocated else 1
        wanted: dict[Role, int] = {}
        for role in ("prefill", "decode"):
            count = counts[role]
            wanted[role] = default if count is None else count
        wanted["colocated"] = colocated
        return cls(
            instances=tuple(
                InstanceSpec(role=role, count=count, **(fields if role == "colocated" else others))
                for role, count in wanted.items()
                if count
            )
        )

    def count(self, role: Role) -> int:
        return sum(spec.count for spec in self.instances if spec.role == role)

    def each(self) -> list[tuple[str, InstanceSpec]]:
        """Every single instance with its name: ("prefill-0", spec), ("prefill-1", spec) ..."""
        numbers: dict[Role, int] = {}
        named = []
        for spec in self.instances:
            for _ in range(spec.count):
                number = numbers.get(spec.role, 0)
                numbers[spec.role] = number + 1
                named.append((f"{spec.role}-{number}", spec))
        return named

    def short(self) -> str:
        """The usual short form: "1P1D", "2C", "1P1D+1C"."""
        disaggregated = f"{self.count('prefill')}P{self.count('decode')}D"
        parts = [disaggregated] if self.count("prefill") else []
        if self.count("colocated"):
            parts.append(f"{self.count('colocated')}C")
        return "+".join(parts)

    @classmethod
    def load(cls, path: Path) -> Placement:
        """Read a YAML file. Raises ConfigError with the field's path where it is wrong."""
        try:
            return msgspec.yaml.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"--placement: {path}: {error.strerror}") from None
        except ConfigError:
            raise
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigError(f"--placement: {path}: {error}") from None


class SLO(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Bounds that a request must keep, all of them. Seconds; None: no bound.

    What each objective means is defined in `staffel.bench.records`.
    """

    ttft: float | None = None
    """Arrival to first token."""
    tpot: float | None = None
    """Mean time per output token after the first."""
    itl_p99: float | None = None
    """99th percentile of the request's own gaps between tokens."""
    e2e: float | None = None
    """Arrival to last token."""
    ema: float | None = None
    """Largest exponentially weighted mean of the gaps between tokens."""

    def __post_init__(self) -> None:
        bounds = self.bounds()
        if not bounds:
            raise ConfigError(f"slo: give at least one of {', '.join(self.__struct_fields__)}")
        for name, bound in bounds.items():
            if not (math.isfinite(bound) and bound > 0):
                raise ConfigError(f"slo: {name}: must be a number of seconds above 0")

    def bounds(self) -> dict[str, float]:
        """The objectives that are set, in seconds."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: value for name, value in values if value is not None}

    def scaled(self, factor: float) -> SLO:
        """All bounds times `factor`: above 1 is laxer."""
        return SLO(**{name: bound * factor for name, bound in self.bounds().items()})

    def __str__(self) -> str:
        return ",".join(f"{name}={bound:g}" for name, bound in self.bounds().items())

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def load(cls, path: Path) -> SLO:
        """Read what `save` wrote. Raises ConfigError where the file isn't that."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"--slo: {path}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"--slo: {path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> SLO:
        """From "ttft=0.25,tpot=0.1". Raises ConfigError naming what is wrong."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                raise ConfigError(f"--slo: {part!r} is not NAME=SECONDS with one of {known}")
            if name in bounds:
                raise ConfigError(f"--slo: {name} is given twice")
            try:
                bounds[name] = float(value)
            except ValueError:
                raise ConfigError(f"--slo: {name}: {value!r} is not a number of seconds") from None
        return cls(**bounds)

"""A profile: what was measured on a machine, as a file that planner and simulator read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from staffel.config import CPU_KV_MEMORY, ConfigError, parse_bytes
from staffel.latency.model import FittedModel


class TransferModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time to copy KV from one instance to another: fixed_s + bytes / bytes_per_second."""

    bytes_per_second: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.fixed_s < 0:
            raise ConfigError("transfer: bytes_per_second must be above 0, fixed_s not below")

    def seconds(self, size: int) -> float:
        """Seconds for `size` bytes."""
        return self.fixed_s + size / self.bytes_per_second


class Slowdown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step takes longer beside a busy neighbour: fixed_s + share * what it takes alone.

    Weights come from memory once in each step, however large it is, and that is what neighbours
    contend for most: a short step is slowed down by a larger share than a long one.
    """

    fixed_s: float = 0.0
    share: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed_s < 0 or self.share < 0:
            raise ConfigError("slowdown: fixed_s and share must not be below 0")

    def seconds(self, alone: float) -> float:
        """That a step takes longer which takes `alone` seconds without the neighbour."""
        return self.fixed_s + self.share * alone


class FitError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Relative errors of a fit in one region, on points that the fit did not see."""

    phase: str
    region: str
    """Like "tokens 65-256"."""
    points: int
    median: float
    """Of |predicted - measured| / measured."""
    p90: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast each phase of one model is on one machine."""

    model: str
    dtype: str
    device: str
    threads: int
    """CPU threads of the instance that was measured; 0 on a GPU."""
    versions: dict[str, str]
    """Of what was measured: staffel, torch, transformers, python ..."""
    date: str
    """ISO 8601."""
    kv_bytes_per_token: int
    models: dict[int, FittedModel]
    """By tensor-parallel degree."""
    transfer: TransferModel
    errors: dict[int, tuple[FitError, ...]] = {}
    """By tensor-parallel degree."""
    quantization: str | None = None
    """"int8": weights in 8 bits; None: as they are."""
    cores: int = 0
    """CPU cores of the machine; 0: not known."""
    slowdown: dict[str, dict[str, Slowdown]] = {}
    """What a step of a phase ("prefill", "decode", "mixed") takes longer while another instance of
    the same machine computes "prefill" or "decode". Empty: not measured."""
    interrupted: bool = False
    """Whether measuring was cut short: fewer repetitions, or fewer batches."""

    @property
    def basis(self) -> str:
        """What step times that come from it rest on, for the user."""
        return f"profile of {self.model} on {self.device}, {self.dtype}, {self.date}"

    def kv_bytes(self, given: str | None, field: str) -> int:
        """Of an instance's KV cache: what is given, else `serve`'s default on a CPU.

        Raises:
            ConfigError: naming `field`, where it can't be read, or depends on a GPU.
        """
        if given is None and self.device != "cpu":
            raise ConfigError(f"{field}: a GPU's profile doesn't say what is left; give it")
        return parse_bytes(given or CPU_KV_MEMORY, field)

    def for_tp(self, tp: int) -> FittedModel:
        """Raises ConfigError where this degree was not measured."""
        if tp not in self.models:
            known = ", ".join(str(degree) for degree in sorted(self.models))
            raise ConfigError(
                f"tp: {tp} is not in the profile (it has {known}); measure it with "
                f"staffel profile --tp {tp}"
            )
        return self.models[tp]

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read what `save` wrote. Raises ConfigError naming the field that is wrong."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"--profile: {path}: {error.strerror}") from None
        except ConfigError:
            raise
        except msgspec.DecodeError as error:
            raise ConfigError(f"--profile: {path}: {error}") from None

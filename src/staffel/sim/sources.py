"""From a placement, and a profile or a hardware sheet, to instances that can be simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from staffel.config import ConfigError, InstanceSpec, Placement, parse_bytes
from staffel.latency.hardware import Hardware
from staffel.latency.model import LatencyModel
from staffel.latency.profile import Profile
from staffel.latency.roofline import Precision, RooflineModel
from staffel.latency.shape import ModelShape
from staffel.sim.models import InstanceModel, LinkModel


def check_source(profile: Path | None, hardware: str | None, model: str | None) -> None:
    """Step times come from one place. Raises ConfigError naming the option that is wrong."""
    if (profile is None) == (hardware is None):
        raise ConfigError("give either --profile FILE or --hardware NAME with --model")
    if hardware is not None and model is None:
        raise ConfigError("--model: is needed with --hardware: a folder, or a name like opt-66b")


@dataclass(frozen=True)
class Setting:
    """What is simulated, and what that rests on."""

    instances: tuple[InstanceModel, ...]
    link: LinkModel
    model: str
    placement: str
    """Its short form, like 1P1D."""
    basis: str
    """Where the times come from."""

    @property
    def devices(self) -> int:
        return sum(instance.devices for instance in self.instances)

    def over(self, bytes_per_second: float) -> Setting:
        """The same with another link."""
        return replace(self, link=replace(self.link, bytes_per_second=bytes_per_second))


def from_profile(profile: Profile, placement: Placement) -> Setting:
    """Instances as they were measured.

    Raises:
        ConfigError: the placement is for another dtype, quantisation or number of threads.
    """
    for _, spec in placement.each():
        _check_measured(spec, profile)
    on_cpu = profile.device == "cpu"

    def instance(spec: InstanceSpec) -> InstanceModel:
        tp, pp = spec.parallel.tp, spec.parallel.pp
        kv_tokens = profile.kv_bytes(spec.kv_memory, "kv_memory") // profile.kv_bytes_per_token
        made = _instance(spec, profile.for_tp(tp), kv_tokens)
        devices = profile.threads if on_cpu else tp * pp
        return replace(made, devices=devices, slowdown=profile.slowdown)

    transfer = profile.transfer
    link = LinkModel(
        transfer.bytes_per_second, transfer.fixed_s, profile.kv_bytes_per_token, beside=not on_cpu
    )
    return _setting(placement, instance, link, profile.model, profile.basis)


@dataclass(frozen=True)
class Sheet:
    """A model on an accelerator that is known by its data sheet."""

    hardware: Hardware
    model: str
    shape: ModelShape
    dtype: str
    """Of weights and KV."""

    def latency(self, tp: int, pp: int) -> RooflineModel:
        precision = Precision(self.dtype, self.dtype, self.dtype)
        return RooflineModel(self.hardware, self.shape, tp=tp, pp=pp, precision=precision)

    def setting(self, placement: Placement) -> Setting:
        """Raises ConfigError where an instance can't hold the model and its `kv_memory`."""

        def instance(spec: InstanceSpec) -> InstanceModel:
            tp, pp = spec.parallel.tp, spec.parallel.pp
            latency = self.latency(tp, pp)
            fits = kv_tokens = latency.kv_tokens(usable=spec.gpu_share)
            if spec.kv_memory is not None:
                asked = parse_bytes(spec.kv_memory, "kv_memory")
                kv_tokens = asked // latency.kv_bytes_per_token()
            if kv_tokens > fits:
                raise ConfigError(
                    f"kv_memory: {spec.kv_memory} is more than fits beside the weights: "
                    f"{fits * latency.kv_bytes_per_token()} bytes"
                )
            return replace(_instance(spec, latency, kv_tokens), devices=tp * pp)

        kv_bytes = self.latency(1, 1).kv_bytes_per_token()
        link = LinkModel(self.hardware.link_bytes_per_second, 0.0, kv_bytes, beside=True)
        return _setting(placement, instance, link, self.model, self.hardware.basis(self.dtype))


def _setting(
    placement: Placement,
    instance: Callable[[InstanceSpec], InstanceModel],
    link: LinkModel,
    model: str,
    basis: str,
) -> Setting:
    instances = tuple(instance(spec) for _, spec in placement.each())
    return Setting(instances, link, model, placement.short(), basis)


def _instance(spec: InstanceSpec, latency: LatencyModel, kv_tokens: int) -> InstanceModel:
    return InstanceModel(
        role=spec.role,
        latency=latency,
        kv_tokens=kv_tokens,
        chunk_tokens=spec.chunk_tokens,
        policy=spec.policy or "chunked",
        max_sequences=spec.max_sequences,
        block_size=spec.block_size,
        prefix_cache=spec.prefix_cache,
        pp=spec.parallel.pp,
    )


def _check_measured(spec: InstanceSpec, profile: Profile) -> None:
    asked: dict[str, str | None] = {"quantization": spec.quantization}
    if spec.dtype != "auto":
        asked["dtype"] = spec.dtype
    if spec.threads is not None and profile.device == "cpu":
        asked["threads"] = str(spec.threads)
    for field, value in asked.items():
        measured = getattr(profile, field)
        if value != (measured if measured is None else str(measured)):
            raise ConfigError(
                f"{field}: the placement has {value}, the profile was measured with {measured}; "
                "measure again with `staffel profile`, or change the placement"
            )

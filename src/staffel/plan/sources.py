"""The instances that can be had: by a profile that was measured, or by a hardware sheet."""

from __future__ import annotations

from dataclasses import replace

from staffel.config import ConfigError
from staffel.latency.hardware import Hardware
from staffel.latency.profile import Profile
from staffel.latency.roofline import Precision, RooflineModel
from staffel.latency.shape import Mla, ModelShape, shape_of
from staffel.plan.candidates import Build, Cluster, Engines, Parallel

PROFILE_SEQUENCES = 128
"""As `serve` has it."""
EXECUTABLE = Parallel(1, 1)
"""What `serve` runs."""


def from_hardware(
    sheet: Hardware, model: str, cluster: Cluster, *, dtype: str, mla: Mla
) -> tuple[Engines, list[str]]:
    """Every (tp, pp) of the model that fits on the cluster, and what was assumed.

    Raises:
        ConfigError: an unknown model.
    """
    shape = shape_of(model, mla=mla)
    precision = Precision(dtype, dtype, dtype)
    builds = {}
    for parallel in cluster.parallels(shape.layers, shape.heads):
        latency = RooflineModel(sheet, shape, tp=parallel.tp, pp=parallel.pp, precision=precision)
        kv_tokens = fitting_tokens(latency)
        if kv_tokens:
            builds[parallel] = Build(latency, kv_tokens)
    kv_bytes = RooflineModel(sheet, shape, precision=precision).kv_bytes_per_token()
    engines = Engines(model=model, kv_bytes_per_token=kv_bytes, builds=builds)
    return engines, _mla_note(model, shape, mla)


def fitting_tokens(latency: RooflineModel) -> int:
    """0 where not even the weights fit."""
    try:
        return latency.kv_tokens()
    except ConfigError:
        return 0


def _mla_note(model: str, shape: ModelShape, mla: Mla) -> list[str]:
    other: Mla = "expanded" if mla == "compressed" else "compressed"
    if shape_of(model, mla=other) == shape:
        return []
    return [
        f"KV is kept {mla}: {shape.kv_values} values per token and layer, "
        f"{shape_of(model, mla=other).kv_values} if it were {other}"
    ]


def from_profile(profile: Profile, cluster: Cluster, kv_bytes: int) -> Engines:
    """The degrees of tensor parallelism that were measured, each with so many bytes of KV."""
    kv_tokens = kv_bytes // profile.kv_bytes_per_token
    builds = {
        Parallel(tp, 1): Build(model, kv_tokens)
        for tp, model in sorted(profile.models.items())
        if tp <= cluster.devices_per_node
    }
    return Engines(
        model=profile.model,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        builds=builds,
        max_sequences=PROFILE_SEQUENCES,
        slowdown=profile.slowdown,
    )


def executable(engines: Engines) -> Engines:
    """What `serve` can run of them.

    Raises:
        ConfigError: nothing.
    """
    if EXECUTABLE not in engines.builds:
        raise ConfigError(
            f"--executable: {engines.model} needs more than one device, which serve can't use yet"
        )
    return replace(engines, builds={EXECUTABLE: engines.builds[EXECUTABLE]})

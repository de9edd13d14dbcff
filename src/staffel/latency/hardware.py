"""Hardware sheets: what vendors state of their accelerators. Peaks are dense, without sparsity."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from staffel.config import ConfigError

TERA, GIGA, GIB = 10**12, 10**9, 1024**3

WEIGHT_BYTES: Mapping[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp4": 0.5625,
    "int4": 0.5625,
}
"""Bytes of a weight; the four-bit ones with a byte of scale for every 16."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator."""

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops: Mapping[str, float]
    """Peak FLOP/s by dtype of the operands."""
    link_bytes_per_second: float
    """To a neighbour in the node, one direction, all links together."""
    pcie_bytes_per_second: float
    """One direction."""
    source: str

    def basis(self, dtype: str) -> str:
        """What step times that come from it rest on, for the user."""
        return f"roofline of {self.name} ({self.source}), {dtype}"

    def peak(self, dtype: str) -> float:
        """FLOP/s with weights of `dtype`: what has no arithmetic of its own is widened first."""
        for wider in _WIDENINGS.get(dtype, (dtype,)):
            if wider in self.flops:
                return self.flops[wider]
        known = ", ".join(sorted(self.flops))
        raise ConfigError(f"dtype: {self.name} has no figure for {dtype!r}; it has {known}")


_WIDENINGS = {
    "fp4": ("fp4", "fp8", "bfloat16"),
    "fp8": ("fp8", "bfloat16"),
    "int4": ("bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("bfloat16", "float16"),
}


def hardware_named(name: str) -> Hardware:
    """The sheet of that name, in any case. Raises ConfigError listing the names."""
    try:
        return SHEETS[name.lower()]
    except KeyError:
        raise ConfigError(f"--hardware: {name!r} is not one of {', '.join(SHEETS)}") from None


def _sheet(
    name: str,
    *,
    memory: float,
    bandwidth: float,
    link: float,
    pcie: float,
    source: str,
    **tera_flops: float,
) -> Hardware:
    """Memory in GB or GiB as sold, bandwidths in GB/s, arithmetic in TFLOP/s."""
    return Hardware(
        name=name,
        memory_bytes=int(memory * GIB),
        memory_bytes_per_second=bandwidth * GIGA,
        flops={dtype: peak * TERA for dtype, peak in tera_flops.items()},
        link_bytes_per_second=link * GIGA,
        pcie_bytes_per_second=pcie * GIGA,
        source=source,
    )


_BLACKWELL = "NVIDIA Blackwell datasheet (HGX B200, GB200 NVL72), 2025"
_BLACKWELL_ULTRA = "NVIDIA Blackwell Ultra datasheet (HGX B300, GB300 NVL72), 2025"

SHEETS: Mapping[str, Hardware] = {
    sheet.name: sheet
    for sheet in (
        _sheet(
            "a100-40g",
            memory=40,
            bandwidth=1555,
            link=300,
            pcie=32,
            float32=19.5,
            bfloat16=312,
            source="NVIDIA A100 datasheet (SXM4 40GB), 2020",
        ),
        _sheet(
            "a100-80g",
            memory=80,
            bandwidth=2039,
            link=300,
            pcie=32,
            float32=19.5,
            bfloat16=312,
            source="NVIDIA A100 datasheet (SXM4 80GB), 2021",
        ),
        _sheet(
            "h100",
            memory=80,
            bandwidth=3350,
            link=450,
            pcie=64,
            float32=67,
            bfloat16=989.5,
            fp8=1979,
            source="NVIDIA H100 datasheet (SXM5 80GB), 2023",
        ),
        _sheet(
            "h200",
            memory=131.4,  # 141 GB
            bandwidth=4800,
            link=450,
            pcie=64,
            float32=67,
            bfloat16=989.5,
            fp8=1979,
            source="NVIDIA H200 datasheet (SXM5 141GB), 2024",
        ),
        _sheet(
            "b200",
            memory=167.6,  # 180 GB
            bandwidth=7700,
            link=900,
            pcie=64,
            float32=75,
            bfloat16=2250,
            fp8=4500,
            fp4=9000,
            source=_BLACKWELL,
        ),
        _sheet(
            "gb200",
            memory=173.2,  # 186 GB
            bandwidth=8000,
            link=900,
            pcie=64,
            float32=80,
            bfloat16=2500,
            fp8=5000,
            fp4=10000,
            source=_BLACKWELL,
        ),
        _sheet(
            "b300",
            memory=251.5,  # 270 GB
            bandwidth=7700,
            link=900,
            pcie=128,
            float32=75,
            bfloat16=2250,
            fp8=4500,
            fp4=13500,
            source=_BLACKWELL_ULTRA,
        ),
        _sheet(
            "gb300",
            memory=259.8,  # 279 GB
            bandwidth=8000,
            link=900,
            pcie=128,
            float32=80,
            bfloat16=2500,
            fp8=5000,
            fp4=15000,
            source=_BLACKWELL_ULTRA,
        ),
        _sheet(
            "l40s",
            memory=48,
            bandwidth=864,
            link=32,  # no NVLink: PCIe
            pcie=32,
            float32=91.6,
            bfloat16=362,
            fp8=733,
            source="NVIDIA L40S datasheet, 2023",
        ),
        _sheet(
            "a10g",
            memory=24,
            bandwidth=600,
            link=32,  # no NVLink: PCIe
            pcie=32,
            float32=35,
            bfloat16=70,
            source="NVIDIA A10G datasheet, 2021",
        ),
        _sheet(
            "l4",
            memory=24,
            bandwidth=300,
            link=32,  # no NVLink: PCIe
            pcie=32,
            float32=30.3,
            bfloat16=121,
            fp8=242.5,
            source="NVIDIA L4 datasheet, 2023",
        ),
        _sheet(
            "mi300x",
            memory=192,
            bandwidth=5300,
            link=448,
            pcie=64,
            float32=163.4,
            bfloat16=1307.4,
            fp8=2614.9,
            source="AMD Instinct MI300X datasheet (Infinity Fabric 7 x 64 GB/s), 2023",
        ),
    )
}

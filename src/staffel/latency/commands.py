"""`staffel kv-cost`: what handing the KV of a sequence over costs on a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from staffel.config import ConfigError
from staffel.terminal import or_error, print_table

if TYPE_CHECKING:  # what computes is loaded when it is asked
    from staffel.latency.link import KvCost

_MLA = ("compressed", "expanded")


def kv_cost(
    model: Annotated[
        str, typer.Option(help="A model whose shape is known, like opt-175b, or a folder.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the sequence.")],
    link: Annotated[
        str, typer.Option(help='Like "25Gb/s" (bits), "64GB/s" or "8x64GB/s" (links side by side).')
    ],
    hardware: Annotated[
        str, typer.Option(help="Where it decodes, to say how many steps the transfer lasts.")
    ] = "a100-80g",
    mla: Annotated[
        str, typer.Option(help="How latent attention is cached: compressed or expanded.")
    ] = "compressed",
) -> None:
    """What it costs to hand one sequence's KV (16 bits a value) over a link."""

    def run() -> None:
        from staffel.latency import link as links
        from staffel.latency.hardware import hardware_named
        from staffel.latency.roofline import RooflineModel, fewest_devices
        from staffel.latency.shape import shape_of

        if mla not in _MLA:
            raise ConfigError(f"--mla: {mla!r} is not one of {', '.join(_MLA)}")
        shape = shape_of(model, mla=mla)  # type: ignore[arg-type]
        cost = links.kv_cost(shape, tokens, links.parse_bandwidth(link))
        sheet = hardware_named(hardware)
        devices = fewest_devices(sheet, shape)
        steps = cost.decode_steps(RooflineModel(sheet, shape, tp=devices))
        place = f"on {devices} x {hardware}"
        _show(model, cost, f"decode steps of one sequence {place}, by its sheet", steps)

    or_error(run)


def _show(model: str, cost: KvCost, steps_of: str, steps: float) -> None:
    print_table(
        [
            [f"{model}, {cost.tokens:,} tokens", ""],
            ["KV of a token", f"{cost.bytes_per_token / 2**20:.3g} MiB"],
            ["KV of the sequence", f"{cost.size / 2**30:.3g} GiB"],
            ["transfer", f"{1e3 * cost.seconds:.1f} ms"],
            ["transfer, if the link's GB are GiB", f"{1e3 * cost.binary_seconds:.1f} ms"],
            [steps_of, f"{steps:.2f}"],
        ]
    )

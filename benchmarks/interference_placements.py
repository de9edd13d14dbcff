"""What arriving prompts do to running streams: one colocated instance against 1P1D.

    python benchmarks/interference_placements.py [--out FOLDER]

Four streams decode steadily while prompts of 128, 256 and 512 tokens arrive one at a time
(`staffel bench interference`). Every instance has one thread. Writes one result per placement.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from goodput_placements import RESULTS, URL, serving, staffel

PLACEMENTS = {
    "1C-chunked": ["--colocated", "1", "--threads", "1"],
    "1C-prefill-first": ["--colocated", "1", "--threads", "1", "--policy", "prefill-first"],
    "1P1D": ["--prefill", "1", "--decode", "1", "--threads", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "interference")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, options in PLACEMENTS.items():
        with serving(options, "4096"):
            subprocess.run(
                staffel(
                    "bench", "interference", URL, "--streams", "4", "--lengths", "128,256,512",
                    "--label", name, "--output", str(out / f"{name}.json.gz"),
                ),
                check=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()

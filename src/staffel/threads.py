"""The thread pools of a process that computes: set up at import, so before the process starts."""

from __future__ import annotations

import os


def environment(threads: int) -> dict[str, str]:
    """This process's environment, for one that computes with so many threads.

    Threads that wait for each other spin, by default for so long that on a core which somebody
    else needs as well a step takes three times as long; so short, 1.7 times. On a quiet machine
    both are equally fast.
    """
    count = str(threads)
    pools = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    return {"GOMP_SPINCOUNT": "1000", **os.environ, **pools}

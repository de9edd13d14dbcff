"""Thread pools and memory of a process that computes: set up at import, so before it starts."""

from __future__ import annotations

import os

_FROM_THE_HEAP, _KEPT = str(32 << 20), str(1 << 30)
"""Bytes: what is taken from the heap (glibc allows no more), and what the heap keeps."""


def environment(threads: int) -> dict[str, str]:
    """This process's environment, for one that computes with so many threads.

    Threads that wait for each other spin, by default for so long that on a core which somebody
    else needs as well a step takes three times as long; so short, 1.7 times. On a quiet machine
    both are equally fast.

    What a layer frees is kept for the next one, in large pages where the system has them: a prompt
    takes some hundredths less time. By default glibc gives megabytes back to the system at once,
    and a fault for each page brings them back.
    """
    count = str(threads)
    pools = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    memory = {
        "MALLOC_TRIM_THRESHOLD_": _KEPT,
        "MALLOC_MMAP_THRESHOLD_": _FROM_THE_HEAP,
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    return {"GOMP_SPINCOUNT": "1000", **memory, **os.environ, **pools}

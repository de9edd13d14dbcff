"""Builds the CPU kernels; everything else about the package is in pyproject.toml.

The same C sources are compiled once for each instruction set. What comes out are plain shared
libraries without a Python module in them: `staffel.kernels.library` loads the best one that the
CPU can run. `optional`: without a C compiler the package installs all the same, and torch does the
work.
"""

from glob import glob

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c11", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra"]
LEVELS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
}

setup(
    ext_modules=[
        Extension(
            f"staffel.kernels._{level}",
            sources=sorted(glob("src/staffel/kernels/source/*.c")),
            depends=sorted(glob("src/staffel/kernels/source/*.h")),
            extra_compile_args=FLAGS + flags,
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for level, flags in LEVELS.items()
    ]
)

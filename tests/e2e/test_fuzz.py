"""A few hundred inputs of scripts/fuzz_http.py: whatever comes in, nobody else feels it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Server, until

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
fuzz_http = importlib.import_module("fuzz_http")

pytestmark = pytest.mark.e2e

INPUTS = 200
SEED = 1


def test_nobody_feels_it(disaggregated: Server) -> None:
    pid = disaggregated.process.pid
    result = fuzz_http.fuzz(disaggregated.url, pid, inputs=INPUTS, seed=SEED)
    assert result.good, "\n".join([*result.shown, result.summary()])
    assert result.inputs == INPUTS
    until(lambda: disaggregated.quiet, 20, "the instances are at rest")
    assert disaggregated.errors() == []

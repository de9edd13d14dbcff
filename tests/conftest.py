"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads it when it is imported, and many a library imports it: kernels for GPUs are tested
# under its interpreter.
os.environ["TRITON_INTERPRET"] = "1"

import pytest

from staffel.model import hub


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the default model, fetched and converted at its first use."""
    return hub.resolve(None, print)

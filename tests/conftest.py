"""Fixtures that every room's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from staffel.model import hub


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the default model, fetched and converted at its first use."""
    return hub.resolve(None, print)

"""Packed weights in the cache: made once, whole, and anew when something they depend on changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from staffel.model import packfile

TENSORS = [
    torch.arange(5, dtype=torch.int8),
    torch.randn(3, 7),
    torch.empty(0),
    torch.full((2, 2), torch.nan),
]


class Maker:
    """Gives the tensors, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Iterator[Tensor]:
        self.times += 1
        yield from TENSORS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAFFEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def same(tensors: list[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(tensors, TENSORS, strict=True)
    )


def files(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name != ".lock"]


def test_made_once(cache: Path, source: Path) -> None:
    make = Maker()
    first, second = (packfile.stored(source, "float32", "1", make) for _ in range(2))
    assert same(first)
    assert same(second)
    assert make.times == 1
    assert len(files(cache)) == 1


def test_they_begin_at_cache_lines(cache: Path, source: Path) -> None:
    tensors = packfile.stored(source, "float32", "1", Maker())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors if tensor.numel())


def test_writing_to_them_changes_no_file(cache: Path, source: Path) -> None:
    packfile.stored(source, "float32", "1", Maker())[1].zero_()
    assert same(packfile.stored(source, "float32", "1", Maker()))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_changed_model_is_packed_anew(cache: Path, source: Path, file: str) -> None:
    make = Maker()
    packfile.stored(source, "float32", "1", make)
    (source / file).write_text("other weights")
    packfile.stored(source, "float32", "1", make)
    assert make.times == 2
    assert len(files(cache)) == 1


def test_versions_replace_each_other_and_variants_dont(cache: Path, source: Path) -> None:
    make = Maker()
    for variant, version in [("float32", "1"), ("int8", "1"), ("float32", "2"), ("int8", "1")]:
        packfile.stored(source, variant, version, make)
    assert make.times == 3
    assert len(files(cache)) == 2


def test_a_write_that_fails_leaves_nothing_behind(
    cache: Path, source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file, tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packfile, "_append", full)
    with caplog.at_level(logging.WARNING):
        assert same(packfile.stored(source, "float32", "1", Maker()))
    assert "No space left on device" in caplog.text
    assert not files(cache)


def test_a_cache_that_is_no_folder(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STAFFEL_CACHE", str(tmp_path / "file"))
    assert same(packfile.stored(source, "float32", "1", Maker()))

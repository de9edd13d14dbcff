"""Where models come from, and that the default model is what it should be."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import PreTrainedTokenizerFast

from staffel.config import ConfigError, ModelSpec
from staffel.model import hub


def quiet(line: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAFFEL_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(real_model)


# ---- resolve


def test_an_existing_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path), quiet) == tmp_path


@pytest.mark.parametrize(
    "name", [None, "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_names_of_the_default_model(name: str | None, cache: Path) -> None:
    folder = cache / "models" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    assert hub.resolve(name, quiet) == folder


@pytest.mark.parametrize(
    "model", ["./nowhere", "/no/such/folder", "~/nowhere/x", "nowhere", "a b/c"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"MODEL: no folder .*hub id"):
        hub.resolve(model, quiet)


def test_an_unreachable_hub_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError\nand more")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"MODEL: cannot get org/name .*ConnectError\); give a"):
        hub.resolve("org/name", quiet)


def test_a_hub_model_without_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ConfigError, match="safetensors"):
        hub.resolve("org/name", quiet)
    (tmp_path / "model.safetensors").touch()
    assert hub.resolve("org/name", quiet) == tmp_path


# ---- making the default model


def test_without_pip_the_error_says_how_to_get_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "python: No module named pip\n")
    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ConfigError, match="ensurepip"):
        hub.resolve(None, quiet)


def test_what_pip_says_reaches_the_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "WARNING: retry\nERROR: no index\n")
    monkeypatch.setattr(hub.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(ConfigError, match="ERROR: no index"):
        hub.resolve(None, quiet)


def test_a_half_made_folder_is_never_taken_for_a_finished_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError("disk full")

    def whole(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(hub, "_download_default", lambda folder: folder)
    monkeypatch.setattr(hub, "convert", half)
    with pytest.raises(ConfigError, match="disk full; set STAFFEL_CACHE"):
        hub.resolve(None, quiet)
    assert hub.cached_models() == []

    assert not (cache / "models" / ".SmolLM2-135M-Instruct.partial").exists()

    left = cache / "models" / ".SmolLM2-135M-Instruct.partial" / "model"  # as after a kill
    left.mkdir(parents=True)
    (left / "config.json").touch()
    monkeypatch.setattr(hub, "convert", whole)
    folder = hub.resolve(None, quiet)
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]


def test_of_two_at_once_one_works_and_the_other_waits(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, both = threading.Event(), threading.Event()
    made: list[Path] = []
    found: list[Path] = []

    def convert(_: Path, folder: Path) -> None:
        started.set()
        both.wait(timeout=10)
        made.append(folder)

    def resolve() -> None:
        found.append(hub.resolve(None, quiet))

    monkeypatch.setattr(hub, "_download_default", lambda folder: folder)
    monkeypatch.setattr(hub, "convert", convert)
    first, second = threading.Thread(target=resolve), threading.Thread(target=resolve)
    first.start()
    assert started.wait(timeout=10)
    second.start()
    both.set()
    first.join(timeout=10)
    second.join(timeout=10)
    assert len(made) == 1
    assert found == [cache / "models" / "SmolLM2-135M-Instruct"] * 2


# ---- cached_models


def test_cached_models_of_both_caches(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = cache / "models" / "SmolLM2-135M-Instruct"
    snapshot = cache / "hub" / "models--org--name" / "snapshots" / "abc"
    for folder in (own, snapshot):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("12345")
    monkeypatch.setattr(hub, "scan_cache_dir", partial(scan_cache_dir, cache / "hub"))
    assert hub.cached_models() == [
        hub.CachedModel("HuggingFaceTB/SmolLM2-135M-Instruct", own, 5),
        hub.CachedModel("org/name", snapshot, 5),
    ]


def test_no_cache_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "scan_cache_dir", partial(scan_cache_dir, cache / "nowhere"))
    assert hub.cached_models() == []


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAFFEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.cache_folder() == Path("/x/staffel")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_folder() == Path.home() / ".cache" / "staffel"
    monkeypatch.setenv("STAFFEL_CACHE", "/own")
    assert hub.cache_folder() == Path("/own")


def test_it_needs_no_torch() -> None:
    code = "import sys, staffel.model.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the default model itself


def test_the_config_says_what_the_model_is(real_model: Path) -> None:
    spec = ModelSpec.load(real_model, name="m")
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.max_model_len, spec.eos_ids) == (49152, 8192, (2,))
    config = json.loads((real_model / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 100000
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)


@pytest.mark.parametrize(
    "text",
    [
        "Hello world",
        "  leading and trailing  ",
        "tabs\t\tand\n\n\nnewlines \n x",
        "def f(x):\n    return x**2  # ünïcödé",
        "emoji 🎉👩\u200d👩\u200d👧",
        "日本語 русский العربية",
        "don't I'll we've",
        "12345 ²³ ½ Ⅷ ٣",
        "<|im_start|>user\nhi<|im_end|>\n",
        "\x00\x07",
        "",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_known_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    """Special tokens are one id each, every digit stands alone, and none takes a space along."""
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x  120")) == ["x", "ĠĠ", "1", "2", "0"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.decode([1, 6004, 2], skip_special_tokens=True) == "hi"


def test_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>assistant\n"
    )
    default = tokenizer.apply_chat_template(messages[1:2], tokenize=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_the_weights_know_the_capital_of_france(
    real_model: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=3)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris.\n"

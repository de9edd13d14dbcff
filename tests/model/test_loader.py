"""What is refused at load, and why; what is held still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from staffel.config import ConfigError
from staffel.model import hook, selfcheck
from staffel.model.attention import PagedAttention
from staffel.model.attention_kernels import best
from staffel.model.cache import PagedCache
from staffel.model.loader import CausalLM, load
from tests.model.families import MAX_LEN, make_model

REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "attention interface 0 times"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "packed input"),
    "mamba": ({}, "running state"),
    "qwen3_next": ({"num_hidden_layers": 4}, "running state"),
    "llama4_text": ({"num_local_experts": 2}, "chunked_attention"),
    "gpt_neo": ({"num_layers": 2, "attention_types": [[["global"], 2]]}, "interface"),
    "bert": ({}, "logits differ"),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def checked(path: Path, max_model_len: int = MAX_LEN) -> CausalLM:
    model = load(path, dtype=torch.float32, max_model_len=max_model_len)
    selfcheck.check(model, selfcheck.reference(model))
    return model


def edit(path: Path, **changes: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_and_reason(family: str, tmp_path: Path) -> None:
    options, reason = REFUSED[family]
    with pytest.raises(ConfigError, match=f"{family} can't be served.*{reason}"):
        checked(make_model(family, tmp_path, **options))


def test_falcon_is_refused(tmp_path: Path) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="falcon can't be served"):
        checked(tmp_path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = edit(make_model("llama", tmp_path), model_type="brontosaurus")
    with pytest.raises(ConfigError, match="brontosaurus"):
        load(path, dtype=torch.float32, max_model_len=MAX_LEN)


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    path = edit(make_model("llama", tmp_path), model_type="vit")
    with pytest.raises(ConfigError, match=r"vit can't be served.*text generation"):
        load(path, dtype=torch.float32, max_model_len=MAX_LEN)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="can't load the weights"):
        load(path, dtype=torch.float32, max_model_len=MAX_LEN)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model.layers.1.mlp.up_proj.weight"):
        load(path, dtype=torch.float32, max_model_len=MAX_LEN)


def test_a_window_that_does_not_arrive_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("gemma2", tmp_path)  # its window is 21
    note = hook.Probe._note

    def without_window(self, module, q, k, v, how):
        return note(self, module, q, k, v, hook.Flavour(scaling=how.scaling))

    monkeypatch.setattr(hook.Probe, "_note", without_window)
    load(path, dtype=torch.float32, max_model_len=21)  # nothing can outgrow it
    with pytest.raises(ConfigError, match="sliding window"):
        load(path, dtype=torch.float32, max_model_len=22)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_the_self_check_sees_wrong_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right attention passes; without gemma2's softcap or gpt_oss's sinks it doesn't."""
    model = checked(make_model(family, tmp_path))

    def forgetful(cache: PagedCache) -> PagedAttention:
        attention = best(cache)
        attend = attention.attend

        def forget(layer, q, k, v, how):
            return attend(layer, q, k, v, hook.Flavour(scaling=how.scaling, window=how.window))

        attention.attend = forget
        return attention

    monkeypatch.setattr(selfcheck, "best", forgetful)
    with pytest.raises(ConfigError, match="logits differ"):
        selfcheck.check(model, selfcheck.reference(model))


# ---- rotary embeddings that look at the whole batch

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}


def logits_beside(model: CausalLM, neighbour: int) -> torch.Tensor:
    """Of three tokens, packed with one token of another sequence at position `neighbour`."""
    for layer in model.layers:
        # Any function of the rotated queries will do.
        setattr(layer.module, hook._HOOK, lambda q, k, v, how: q)
    with torch.inference_mode():
        return model.logits([5, 6, 7, 8], [0, 1, 2, neighbour], [0, 1, 2])


@pytest.mark.parametrize("max_model_len", [64, 65, MAX_LEN])
def test_longrope_does_not_depend_on_the_neighbours(max_model_len: int, tmp_path: Path) -> None:
    path = make_model(
        "phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=64
    )
    model = checked(path, max_model_len)
    near, far = (logits_beside(model, position) for position in (1, max_model_len - 1))
    assert torch.equal(near, far)


def test_longrope_picks_frequencies_by_the_longest_sequence(tmp_path: Path) -> None:
    path = make_model(
        "phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=64
    )
    short, long = (logits_beside(checked(path, length), 1) for length in (64, MAX_LEN))
    assert not torch.allclose(short, long, atol=1e-2)


def test_dynamic_rotary_is_refused_where_it_would_change(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0
    })  # fmt: skip
    checked(path, MAX_LEN)
    with pytest.raises(ConfigError, match=f"dynamic.*--max-model-len {MAX_LEN}"):
        checked(path, MAX_LEN + 1)


def test_layers_are_found_in_order(tmp_path: Path) -> None:
    model = load(make_model("gemma3_text", tmp_path), dtype=torch.float32, max_model_len=MAX_LEN)
    assert [layer.module.layer_idx for layer in model.layers] == [0, 1]
    assert [layer.window for layer in model.layers] == [21, None]
    assert model.kv_shape == (2, 8, 8)

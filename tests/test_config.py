"""Wrong configuration is refused with the field's name and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staffel.config import ConfigError, InstanceSpec, ModelSpec, Placement, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 2**30), ("512 MiB", 2**29), ("2GB", 2 * 10**9), ("1.5k", 1500), (4096, 4096)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "1XB", "0", "1 GiB GiB"])
def test_bad_sizes_name_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        InstanceSpec(role="decode", kv_memory=text)


def placement(text: str, tmp_path: Path) -> Placement:
    file = tmp_path / "placement.yaml"
    file.write_text(text)
    return Placement.load(file)


def test_placement_file(tmp_path: Path) -> None:
    loaded = placement(
        "instances:\n  - {role: prefill, count: 2, kv_memory: 2GiB}\n  - {role: decode}\n", tmp_path
    )
    assert loaded.short() == "2P1D"
    names = [name for name, _ in loaded.each()]
    assert names == ["prefill-0", "prefill-1", "decode-0"]
    assert loaded.instances[0].kv_bytes == 2 * 2**30
    assert loaded.instances[1].kv_bytes == 2**30


def test_kv_of_a_gpu_is_what_is_left_unless_it_is_told(tmp_path: Path) -> None:
    loaded = placement(
        "instances:\n  - {role: colocated, device: cuda}\n"
        "  - {role: colocated, device: cuda, kv_memory: 2GiB, cuda_graphs: false}\n",
        tmp_path,
    )
    assert [spec.kv_bytes for spec in loaded.instances] == [None, 2 * 2**30]
    assert loaded.instances[0].gpu_share == 0.9


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("instances: []", "--prefill"),
        ("instances: [{role: prefill}]", "no decode instance"),
        ("instances: [{role: decode}]", "no prefill instance"),
        ("instances: [{role: cook}]", "role"),
        ("instances: [{role: colocated, kv_memory: lots}]", "kv_memory"),
        ("instances: [{role: colocated, colour: red}]", "colour"),
        ("instances: [{role: colocated, count: 0}]", "count"),
        ("instances: [{role: colocated, threads: 0}]", "threads"),
        ("instances: [{role: colocated, parallel: {tp: 0}}]", "tp"),
        ("instances: [{role: colocated}, {role: colocated, block_size: 32}]", "block_size"),
        ("instances: 3", "instances"),
        ("instances: [{role: colocated}, {role: colocated, dtype: bfloat16}]", "dtype"),
        ("instances: [{role: colocated}, {role: colocated, quantization: int8}]", "quantization"),
        ("instances: [{role: colocated, quantization: int4}]", "quantization"),
        ("instances: [{role: colocated, quantization: int8, dtype: bfloat16}]", "quantization"),
        ("instances: [{role: colocated, quantization: int8, device: cuda}]", "quantization"),
        ("instances: [{role: prefill, policy: chunked}, {role: decode}]", "policy"),
        ("instances: [{role: colocated, cuda_graphs: false}]", "cuda_graphs: is for GPUs"),
        (
            "instances: [{role: colocated, gpu_memory_utilization: 0.5}]",
            "gpu_memory_utilization: is for GPUs",
        ),
        (
            "instances: [{role: colocated, device: cuda, gpu_memory_utilization: 90}]",
            "gpu_memory_utilization: must be",
        ),
        (
            "instances: [{role: colocated, device: cuda, gpu_memory_utilization: 0.5, "
            "kv_memory: 2GiB}]",
            "kv_memory settles",
        ),
        ("a: [", "placement"),
    ],
)
def test_bad_placements_name_the_field(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        placement(text, tmp_path)


def test_missing_placement_file_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--placement: .*none\.yaml: No such file"):
        Placement.load(tmp_path / "none.yaml")


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
}


def model(tmp_path: Path, generation: dict | None = None, **changes: object) -> ModelSpec:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelSpec.load(tmp_path, name="m", max_model_len=None)


def test_model_folder(tmp_path: Path) -> None:
    spec = model(tmp_path)
    assert (spec.max_model_len, spec.eos_ids, spec.vocab_size) == (64, (3,), 100)


def test_generation_config_has_the_last_word_on_the_end(tmp_path: Path) -> None:
    assert model(tmp_path, {"eos_token_id": [4, 5]}).eos_ids == (4, 5)
    assert model(tmp_path, {}).eos_ids == (3,)


def test_model_folder_without_limit_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        model(tmp_path, max_position_embeddings=None)


def test_limit_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    model(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len: 65"):
        ModelSpec.load(tmp_path, name="m", max_model_len=65)


def test_folder_in_place_of_a_placement_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        Placement.load(tmp_path)


def test_zero_is_no_limit_to_be_ignored(tmp_path: Path) -> None:
    model(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len: must be at least 2"):
        ModelSpec.load(tmp_path, name="m", max_model_len=0)


def test_missing_vocabulary_and_broken_generation_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        model(tmp_path, vocab_size=None)
    model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        ModelSpec.load(tmp_path, name="m")


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_broken_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelSpec.load(tmp_path, name="m")


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelSpec.load(tmp_path, name="m")

"""Grammars on the default model's tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from staffel.config import ConfigError
from staffel.control.request import SamplingParams
from staffel.model.grammar import Grammars, Matcher
from staffel.model.sampler import SamplingState, sample

VOCAB, EOS = 49152, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


def from_schema(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


@pytest.fixture(scope="module")
def grammars(real_model: Path) -> Grammars:
    return Grammars(real_model, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(real_model / "tokenizer.json"))


def random_output(matcher: Matcher, seed: int) -> list[int]:
    """A walk among the allowed ids to the grammar's end; short, for it favours low ids."""
    draws = random.Random(seed)
    ids: list[int] = []
    while not matcher.ended:
        allowed = matcher.mask().nonzero()[0].tolist()
        ids.append(draws.choice(allowed[:40]))
        matcher.advance(ids[-1:])
        assert len(ids) < 500
    return ids


def expect(value: dict[str, object]) -> None:
    assert list(value) == ["name", "kind", "ages"]
    assert len(value["name"]) <= 12
    assert value["kind"] in ("cat", "dog")
    assert all(type(age) is int for age in value["ages"])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_allowed_fits_the_schema(
    grammars: Grammars, tokenizer: Tokenizer, seed: int
) -> None:
    ids = random_output(grammars.matcher(from_schema(SCHEMA)), seed)
    expect(json.loads(tokenizer.decode([token for token in ids if token != EOS])))


@pytest.mark.parametrize("seed", range(3))
def test_a_matcher_rebuilt_from_ids_allows_the_same(grammars: Grammars, seed: int) -> None:
    text = from_schema(SCHEMA)
    ids = random_output(grammars.matcher(text), seed)
    steady = grammars.matcher(text)
    for position in range(len(ids) + 1):
        rebuilt = grammars.matcher(text)
        rebuilt.advance(ids[:position])
        np.testing.assert_array_equal(rebuilt.mask(), steady.mask())
        assert rebuilt.ended == steady.ended
        steady.advance(ids[position : position + 1])


def test_it_ends_with_the_last_byte_and_allows_eos_alone(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.matcher(from_schema({"const": {"a": 1}}))
    matcher.advance(tokenizer.encode('{"a":1').ids)
    assert not matcher.ended
    assert not matcher.mask()[EOS]
    matcher.advance(tokenizer.encode("}").ids)
    assert matcher.ended
    assert matcher.mask().nonzero()[0].tolist() == [EOS]


def test_eos_is_allowed_where_the_grammar_may_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(LLMatcher.grammar_from_regex("ab*"))
    assert not matcher.mask()[EOS]
    matcher.advance(tokenizer.encode("a").ids)
    assert matcher.mask()[EOS]
    assert not matcher.ended
    matcher.advance([EOS])
    assert matcher.ended


def test_an_illegal_id_ends_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(from_schema(SCHEMA))
    matcher.advance(tokenizer.encode("hello").ids)
    assert matcher.ended
    assert matcher.mask().nonzero()[0].tolist() == [EOS]
    fresh = grammars.matcher(from_schema(SCHEMA))
    assert not fresh.ended


@pytest.mark.parametrize("width", [VOCAB + 100, VOCAB - 3000])
def test_masks_are_as_wide_as_the_logits(real_model: Path, width: int) -> None:
    narrow = Grammars(real_model, VOCAB, (EOS,)).matcher(LLMatcher.grammar_from_regex(".*"))
    matcher = Grammars(real_model, width, (EOS,)).matcher(LLMatcher.grammar_from_regex(".*"))
    mask = matcher.mask()
    assert mask.shape == (width,)
    assert not mask[VOCAB:].any()
    shared = min(VOCAB, width)
    np.testing.assert_array_equal(mask[:shared], narrow.mask()[:shared])


def test_constrained_draws_fit_the_schema_and_resume_from_ids(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    torch.set_num_threads(1)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 6}
    params = SamplingParams(max_tokens=50, seed=3, stop_ids=(EOS,), grammar=from_schema(schema))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))

    def finish(outputs: list[int]) -> list[int]:
        state = SamplingState(params, [1], outputs, grammars.matcher(params.grammar))
        ended = False
        while not ended:
            (result,) = sample(logits, [state])
            outputs = [*outputs, result.token]
            ended = result.grammar_ended
        return outputs

    ids = finish([])
    value = json.loads(tokenizer.decode([token for token in ids if token != EOS]))
    assert 3 <= len(value) <= 6
    assert all(finish(ids[:cut]) == ids for cut in range(len(ids)))


def test_a_bad_grammar_has_ended(grammars: Grammars, caplog) -> None:
    matcher = grammars.matcher("start: nothing")
    assert matcher.ended
    assert matcher.mask().nonzero()[0].tolist() == [EOS]
    assert "can't be followed" in caplog.text


def test_a_model_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Grammars(tmp_path, VOCAB, (EOS,)).matcher("")

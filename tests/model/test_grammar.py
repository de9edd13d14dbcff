"""Grammars on the default model's tokenizer."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer

from staffel.config import ConfigError
from staffel.control.request import SamplingParams
from staffel.grammar import of_schema
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
    ids = random_output(grammars.matcher(of_schema(SCHEMA)), seed)
    expect(json.loads(tokenizer.decode([token for token in ids if token != EOS])))


@pytest.mark.parametrize("seed", range(3))
def test_a_matcher_rebuilt_from_ids_allows_the_same(grammars: Grammars, seed: int) -> None:
    text = of_schema(SCHEMA)
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
    matcher = grammars.matcher(of_schema({"const": {"a": 1}}))
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
    matcher = grammars.matcher(of_schema(SCHEMA))
    matcher.advance(tokenizer.encode("hello").ids)
    assert matcher.ended
    assert matcher.mask().nonzero()[0].tolist() == [EOS]
    fresh = grammars.matcher(of_schema(SCHEMA))
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
    params = SamplingParams(max_tokens=50, seed=3, stop_ids=(EOS,), grammar=of_schema(schema))
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


def test_a_bad_grammar_has_ended(grammars: Grammars) -> None:
    matcher = grammars.matcher("start: nothing")
    assert matcher.ended
    assert "nothing" in matcher.problem
    assert matcher.mask().nonzero()[0].tolist() == [EOS]


# ---- forced text


@pytest.mark.parametrize(
    "value", ["<|im_end|>", "a<|endoftext|>b", "<|im_start|>", {"<|im_end|>": 1}]
)
def test_forced_text_is_spelt_by_ordinary_tokens(
    grammars: Grammars, tokenizer: Tokenizer, value: object
) -> None:
    """Though a special token is written just so."""
    ids = random_output(grammars.matcher(of_schema({"const": value})), 1)
    specials = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not specials.intersection(token for token in ids if token != EOS)
    assert json.loads(tokenizer.decode([t for t in ids if t != EOS], False)) == value


def test_much_forced_text_costs_a_step_nothing(grammars: Grammars) -> None:
    """Three megabytes of it: it isn't looked up how all of it would be spelt."""
    matcher = grammars.matcher(
        of_schema({"type": "array", "items": {"const": 5e-324}, "minItems": 10000})
    )
    began = time.monotonic()
    for _ in range(100):
        matcher.advance([int(matcher.mask().nonzero()[0][-1])])
    assert matcher.problem is None
    assert time.monotonic() - began < 5  # it took ten seconds a step


# ---- compiling beside the steps


def wait_for(grammars: Grammars, count: int) -> dict[str, str | None]:
    news: dict[str, str | None] = {}
    deadline = time.monotonic() + 20
    while len(news) < count:
        assert time.monotonic() < deadline
        news |= grammars.arrived()
        time.sleep(0.005)
    return news


def test_wanted_grammars_arrive(grammars: Grammars) -> None:
    good, bad = of_schema({"const": "wanted"}), "start: nothing"
    grammars.want([good, bad])
    news = wait_for(grammars, 2)
    assert news[good] is None
    assert "nothing" in news[bad]
    assert grammars.arrived() == []


def test_what_nobody_wants_any_more_is_not_compiled(grammars: Grammars) -> None:
    slow = of_schema({"properties": {f"p{i}": {"type": "string"} for i in range(2000)}})
    forgotten, last = (of_schema({"const": name}) for name in ("forgotten", "last"))
    grammars.want([slow, forgotten])
    grammars.want([slow, last])
    grammars.want([last])
    news = wait_for(grammars, 1)
    while last not in news:
        news |= wait_for(grammars, 1)
    assert forgotten not in news


def test_a_model_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Grammars(tmp_path, VOCAB, (EOS,)).matcher("")

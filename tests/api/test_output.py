"""One choice: text, ends and counts, without any server."""

from __future__ import annotations

import pytest

from staffel.api.output import Echo, Ending, Output, Piece
from staffel.api.tokens import Tokenizer
from staffel.control.messages import Delta
from staffel.control.request import Request, SamplingParams
from tests.api.doubles import EOS, deltas


def play(
    tokenizer: Tokenizer,
    ids: list[int],
    *stops: str,
    group: int = 1,
    finish: str | None = "length",
    named: tuple[int, ...] = (),
    **params: int,
) -> Piece:
    """The whole choice that the ids make, fed in deltas of `group` ids."""
    asked = SamplingParams(max_tokens=99, logprobs=1, stop_ids=(EOS, *named), **params)
    output = Output(tokenizer, asked, Ending(list(stops), frozenset(named)), None)
    choice = Piece()
    for delta in deltas(Request(id="r", prompt=[1], params=asked), ids, finish, group=group):
        assert isinstance(delta, Delta)
        if output.finish is None:
            choice.extend(output.add(delta))
    assert output.count == len(choice.ids) == len(choice.scores)
    return choice


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text], add_special_tokens=False)[0]


@pytest.mark.parametrize("group", [1, 2, 99])
def test_a_stop_string_over_two_tokens_ends_text_ids_and_scores(
    tokenizer: Tokenizer, group: int
) -> None:
    ids = ids_of(tokenizer, "one two three four")
    assert len(ids) == 4
    choice = play(tokenizer, ids, "o th", group=group)
    assert (choice.text, choice.finish, choice.stop_reason) == ("one tw", "stop", "o th")
    assert choice.ids == ids[:3]


def test_a_stop_string_in_the_first_token(tokenizer: Tokenizer) -> None:
    choice = play(tokenizer, ids_of(tokenizer, "one two"), "on")
    assert (choice.text, len(choice.ids), choice.stop_reason) == ("", 1, "on")


def test_a_stop_string_in_the_last_token_beats_its_length(tokenizer: Tokenizer) -> None:
    choice = play(tokenizer, ids_of(tokenizer, "one"), "e", finish="length")
    assert (choice.text, choice.finish) == ("on", "stop")


def test_text_held_back_comes_with_the_natural_end(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one two")
    choice = play(tokenizer, [*ids, EOS], "two three", finish="stop")
    assert (choice.text, choice.finish, choice.stop_reason) == ("one two", "stop", None)
    assert choice.ids == [*ids, EOS]


def test_a_stop_string_counts_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one one one one")
    assert play(tokenizer, ids, "one", min_tokens=2).ids == ids[:3]
    assert play(tokenizer, ids, "one", min_tokens=2).text == "one one "


def test_a_named_stop_id_is_no_text_and_is_the_reason(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "one two three")
    choice = play(tokenizer, ids, finish="stop", named=(ids[-1],))
    assert (choice.text, choice.ids, choice.stop_reason) == ("one two", ids, ids[-1])


def test_the_grammars_end_keeps_the_last_tokens_text(tokenizer: Tokenizer) -> None:
    choice = play(tokenizer, ids_of(tokenizer, '{"a":1}'), finish="stop")
    assert (choice.text, choice.stop_reason) == ('{"a":1}', None)


def test_offsets_are_places_in_the_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a😀 bc")
    choice = play(tokenizer, ids)
    last = choice.scores[-1]
    assert choice.text[last.offset :] == " bc"
    assert [score.offset for score in choice.scores[:3]] == [0, 1, 1]


def test_pieces_are_the_same_text_however_the_deltas_are_cut(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "Grüße 😀 日本語, one two")
    texts = {play(tokenizer, ids, "zzz", group=group).text for group in (1, 2, 3, 99)}
    assert texts == {"Grüße 😀 日本語, one two"}


def test_prompt_offsets_follow_special_tokens_that_are_written_out(tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nHi"
    ids = ids_of(tokenizer, text)
    echo = Echo.of(tokenizer, [EOS, *ids], text)
    assert echo.text == text
    assert echo.offsets[:3] == [0, 0, len("<|im_start|>")]
    assert text[echo.offsets[-1] :] == "Hi"

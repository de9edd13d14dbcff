"""How many tokens each chunk brought."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from staffel.bench.tokens import Piece, TextTokenizer, count_tokens
from staffel.config import ConfigError


def pieces(
    count: int,
    *,
    ids: tuple[int, ...] = (),
    scores: tuple[int, ...] = (),
    running: tuple[int, ...] = (),
    texts: tuple[str, ...] = (),
    events: tuple[int, ...] = (),
) -> list[Piece]:
    def at(values: tuple, index: int, default: object) -> object:
        return values[index] if values else default

    return [
        Piece(
            float(i),
            at(events, i, 1),
            at(ids, i, 0),
            at(scores, i, 0),
            at(running, i, 0),
            at(texts, i, ""),
        )
        for i in range(count)
    ]


class Words:
    """One token per word, with the space before it."""

    def ends(self, text: str) -> list[int]:
        return [at for at in range(1, len(text) + 1) if at == len(text) or text[at] == " "]


def test_ids_come_first() -> None:
    given = pieces(2, ids=(3, 1), scores=(9, 9), running=(5, 6), texts=("a", "b"))
    assert count_tokens(given, 7, Words()) == ([3, 1], "ids")


def test_logprobs_come_next() -> None:
    assert count_tokens(pieces(2, scores=(2, 1), running=(5, 6)), 7, None) == ([2, 1], "logprobs")


def test_continuous_usage_gives_rises() -> None:
    assert count_tokens(pieces(3, running=(2, 3, 7)), 7, None) == ([2, 1, 4], "usage")


def test_a_token_belongs_to_the_chunk_with_its_last_character() -> None:
    given = pieces(3, texts=("one tw", "o three", " four"))
    assert count_tokens(given, None, Words()) == ([1, 2, 1], "text")


@pytest.mark.parametrize(
    ("total", "count", "tokens"),
    [(6, 3, [2, 2, 2]), (7, 3, [2, 2, 3]), (4, 1, [4]), (5, 4, [1, 1, 1, 2]), (2, 4, [1, 0, 0, 1])],
)
def test_a_total_is_spread_and_says_so(total: int, count: int, tokens: list[int]) -> None:
    assert count_tokens(pieces(count), total, None) == (tokens, "spread")


def test_a_total_is_spread_over_events_not_reads() -> None:
    assert count_tokens(pieces(2, events=(3, 1)), 8, None) == ([6, 2], "spread")


def test_without_any_word_of_tokens_none_are_made_up() -> None:
    assert count_tokens(pieces(2), None, None) == ([0, 0], "none")
    assert count_tokens([], 5, Words()) == ([], "none")


def test_a_tokenizer_is_read_from_a_model_folder(tmp_path: Path) -> None:
    model = tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(str(tmp_path)).ends("one two") == [3, 7]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer.*tokenizer\.json"):
        TextTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="--tokenizer"):
        TextTokenizer(str(tmp_path))

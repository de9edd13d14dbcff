"""Log probabilities in both endpoints' forms."""

from __future__ import annotations

from typing import Any

from staffel.api.output import Scored
from staffel.api.tokens import Tokenizer

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON can't say."""


def completion_logprobs(tokenizer: Tokenizer, scores: list[Scored]) -> dict[str, Any]:
    """The completions form: parallel lists; the drawn token is among the top ones, always."""
    return {
        "tokens": [_completion_text(tokenizer, score.token) for score in scores],
        "token_logprobs": [_finite(score.logprob) for score in scores],
        "top_logprobs": [_top_texts(tokenizer, score) for score in scores],
        "text_offset": [score.offset for score in scores],
    }


def _top_texts(tokenizer: Tokenizer, score: Scored) -> dict[str, float] | None:
    if score.logprob is None:
        return None
    pairs = [*score.top, (score.token, score.logprob)]
    return {_completion_text(tokenizer, id): max(logprob, _FLOOR) for id, logprob in pairs}


def chat_logprobs(tokenizer: Tokenizer, scores: list[Scored], top: int) -> dict[str, Any]:
    """The chat form: one entry per token, with its bytes and the `top` likeliest."""
    return {
        "content": [
            {
                **_chat_entry(tokenizer, score.token, score.logprob),
                "top_logprobs": [_chat_entry(tokenizer, *pair) for pair in score.top[:top]],
            }
            for score in scores
        ],
        "refusal": None,
    }


def _chat_entry(tokenizer: Tokenizer, id: int, logprob: float | None) -> dict[str, Any]:
    raw = tokenizer.token_bytes(id)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _FLOOR)


def _completion_text(tokenizer: Tokenizer, id: int) -> str:
    raw = tokenizer.token_bytes(id)
    text = _text(raw)
    return text if text.encode() == raw else f"bytes:{text}"


def _text(raw: bytes) -> str:
    r"""The token as text; one that is part of a character as OpenAI writes it: \xf0\x9f."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)

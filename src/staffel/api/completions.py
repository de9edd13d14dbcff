"""/v1/completions: its prompts and its form of a choice."""

from __future__ import annotations

from typing import Any

from staffel.api.errors import bad_field
from staffel.api.generation import Job, Prompt
from staffel.api.logprobs import completion_logprobs
from staffel.api.output import Echo, Piece
from staffel.api.params import check_ids, check_length, output_limit
from staffel.api.protocol import CompletionBody
from staffel.api.tokens import Tokenizer
from staffel.config import ModelSpec


def prompts_of(body: CompletionBody, tokenizer: Tokenizer, spec: ModelSpec) -> list[Prompt]:
    """The prompts as ids.

    Raises:
        ApiError: 400 for an empty or mixed one, unknown ids, or one beyond the context; what comes
            after it isn't looked at.
    """
    return [_prompt(item, body, tokenizer, spec) for item in _as_list(body.prompt)]


def _prompt(
    given: str | list[int], body: CompletionBody, tokenizer: Tokenizer, spec: ModelSpec
) -> Prompt:
    text = given if isinstance(given, str) else None
    ids = given if isinstance(given, list) else _encode(given, tokenizer, spec)
    if not given or not ids:
        raise bad_field("prompt", "is empty; give at least one token")
    output_limit(body, len(ids), spec.max_model_len)
    check_ids(ids, spec.vocab_size, "prompt")
    return Prompt(ids, Echo.of(tokenizer, ids, text) if body.echo else None)


def _encode(text: str, tokenizer: Tokenizer, spec: ModelSpec) -> list[int]:
    check_length(text, tokenizer, spec, "prompt")
    [ids] = tokenizer.encode([text], add_special_tokens=True)
    return ids


def _as_list(prompt: str | list[Any]) -> list[Any]:
    """One item per prompt: all strings, or all lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not kinds:
        raise bad_field("prompt", "is empty; give at least one token")
    if len(kinds) > 1:
        raise bad_field("prompt", "mixes strings, ids and lists; give one kind")
    return [prompt] if kinds == {int} else prompt


class CompletionView:
    """OpenAI's text_completion, with vLLM's stop_reason and token ids."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, job: Job, tokenizer: Tokenizer) -> None:
        self._body = body
        self._job = job
        self._tokenizer = tokenizer

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._part(index, piece) | self._prompt_ids(index)

    def parts(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        return [self.choice(index, piece) if first else self._part(index, piece)]

    def extras(self) -> dict[str, Any]:
        return {}

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = completion_logprobs(self._tokenizer, piece.scores)
        part = {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        return part | ({"token_ids": piece.ids} if self._body.return_token_ids else {})

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._job.prompts[index // self._job.n].ids}

"""From a validated body and its prompts to what the engine is asked for."""

from __future__ import annotations

import msgspec
from msgspec import structs

from staffel import grammar as grammars
from staffel.api.errors import ApiError, bad_field, context_exceeded
from staffel.api.generation import Job, Prompt
from staffel.api.output import Ending
from staffel.api.protocol import Body, ChatBody, CompletionBody, ResponseFormat
from staffel.api.tokens import Tokenizer
from staffel.config import ModelSpec
from staffel.control.request import Request, SamplingParams

_UINT64 = 2**64 - 1


def build_job(
    body: CompletionBody | ChatBody,
    spec: ModelSpec,
    prompts: list[Prompt],
    *,
    id: str,
    seed: int,
    grammar: str | None = None,
) -> Job:
    """The engine requests of a client request; `seed` is taken where the body has none, and
    `grammar` is that of its response_format.

    Raises:
        ApiError: 400, naming the field at fault.
    """
    shared = sampling_params(body, spec, seed=seed, grammar=grammar)
    requests: list[Request] = []
    for prompt in prompts:
        limit = output_limit(body, len(prompt.ids), spec.max_model_len)
        requests += [
            Request(
                id=f"{id}-{len(requests) + choice}",
                group=id if body.prompts * body.n > 1 else "",
                prompt=prompt.ids,
                params=structs.replace(shared, max_tokens=limit, choice=choice),
                use_cache=shared.prompt_logprobs is None,
            )
            for choice in range(body.n)
        ]
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    return Job(prompts, requests, body.n, Ending(stops, frozenset(body.stop_token_ids)))


def sampling_params(
    body: CompletionBody | ChatBody, spec: ModelSpec, *, seed: int, grammar: str | None
) -> SamplingParams:
    """All but what differs between the choices and prompts of one client request."""
    check_ids(body.stop_token_ids, spec.vocab_size, "stop_token_ids")
    top = body.top_wanted()
    return SamplingParams(
        max_tokens=0,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        seed=(seed if body.seed is None else body.seed) & _UINT64,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, spec.vocab_size),
        stop_ids=_stop_ids(body, spec),
        logprobs=top,
        prompt_logprobs=top if body.echo else None,
        grammar=grammar,
    )


def output_limit(body: CompletionBody | ChatBody, prompt: int, context: int) -> int:
    """Most output tokens after a prompt of that many: what the body says, or all there is room for.

    Raises ApiError where prompt and output don't fit into `context` together.
    """
    field, asked = body.token_limit()
    if asked == 0 and not body.echo:
        raise bad_field(field, "must be at least 1 (0 only with echo, to score a prompt)")
    limit = max(context - prompt, 1) if asked is None else asked
    if prompt + limit > context:
        source = "messages" if isinstance(body, ChatBody) else "prompt"
        raise context_exceeded(context, prompt, limit, source if prompt >= context else field)
    if body.min_tokens > limit:
        raise bad_field("min_tokens", f"{body.min_tokens} is above the most output tokens, {limit}")
    return limit


_SHORT_BYTES = 1 << 20
"""A text of that size is tokenised whatever the context; it takes half a second."""


def check_length(text: str, tokenizer: Tokenizer, spec: ModelSpec, field: str) -> None:
    """Refuse a text that is longer than the context's tokens can spell, before it is tokenised.

    Raises ApiError (400).
    """
    most = max(spec.max_model_len * tokenizer.longest_token, _SHORT_BYTES)
    if len(text) > most or len(text.encode(errors="replace")) > most:
        raise ApiError(
            400,
            f"{field}: is longer than {most} bytes, which is more than this model's maximum "
            f"context length of {spec.max_model_len} tokens can hold. Shorten it.",
            param=field,
            code="context_length_exceeded",
        )


def check_ids(ids: list[int], vocab_size: int, field: str) -> None:
    """Raises ApiError (400) for an id that the model doesn't have."""
    for id in ids:
        if not 0 <= id < vocab_size:
            raise bad_field(field, f"{id} is no token id; the vocabulary is 0 .. {vocab_size - 1}")


def _stop_ids(body: Body, spec: ModelSpec) -> tuple[int, ...]:
    own = () if body.ignore_eos else spec.eos_ids
    return tuple(dict.fromkeys([*own, *body.stop_token_ids]))


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    ids = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise bad_field("logit_bias", f"{key[:40]!r} is no token id")
        ids[int(key)] = bias
    check_ids(list(ids), vocab_size, "logit_bias")
    return ids


def grammar_of(wanted: ResponseFormat | None, most_bytes: int) -> str | None:
    """llguidance's text of a response format, not compiled yet; None: any text will do.

    Raises:
        ApiError: 400; its schema is longer than `most_bytes`, or sets what clients may not set.
    """
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise bad_field("response_format", "type json_schema and field json_schema need each other")
    if wanted.type == "text":
        return None
    schema = wanted.json_schema.schema if wanted.json_schema else {"type": "object"}
    try:
        grammar = grammars.of_schema(schema)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise unfollowable(str(error)) from None
    if len(grammar) > most_bytes:
        raise unfollowable(f"it is longer than {most_bytes} bytes (--max-schema)")
    return grammar


def unfollowable(problem: str) -> ApiError:
    return bad_field("response_format", f"this schema can't be followed: {problem}")

"""From a request's bytes to its answer: what the routes call."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from staffel import __version__
from staffel.api import chat, completions
from staffel.api.answers import View, chunks, whole
from staffel.api.engine import Engine
from staffel.api.errors import bad_field, json_response, unknown_model
from staffel.api.generation import Generation, Job, Prompt
from staffel.api.params import build_job, check_ids
from staffel.api.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChat,
    TokenizeText,
    parse,
    read_object,
)
from staffel.api.record import Record
from staffel.api.streaming import EventStream, unless_gone
from staffel.api.tokens import Tokenizer
from staffel.config import ModelSpec


@dataclass(frozen=True, slots=True)
class ApiOptions:
    api_key: str | None = None
    """What clients must send; None: nobody is asked."""
    served_model_name: str | None = None
    """The name that clients use; None: the ModelSpec's."""
    seed: int | None = None
    """Makes the seeds of requests that bring none repeatable."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the two generating endpoints differ in."""

    name: str
    id_prefix: str
    body: type[Body]
    prompts: Callable[[Any, Tokenizer, ModelSpec], list[Prompt]]
    view: Callable[[Any, Job, Tokenizer], View]


COMPLETIONS = Endpoint(
    "completions", "cmpl", CompletionBody, completions.prompts_of, completions.CompletionView
)
CHAT = Endpoint("chat.completions", "chatcmpl", ChatBody, chat.prompts_of, chat.ChatView)


class Serving:
    """One model behind one engine."""

    def __init__(
        self, engine: Engine, spec: ModelSpec, tokenizer: Tokenizer, options: ApiOptions
    ) -> None:
        self.engine = engine
        self.model = options.served_model_name or spec.name
        self._spec = spec
        self._tokenizer = tokenizer
        self._random = random.Random(options.seed)
        self._numbers = itertools.count()
        self._started = int(time.time())

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self._started,
            "owned_by": "staffel",
            "max_model_len": self._spec.max_model_len,
        }

    async def generate(self, http: HttpRequest, endpoint: Endpoint) -> Response:
        """Answer a completion or chat request. Raises ApiError."""
        raw = await http.body()
        record: Record = http.state.record
        record.endpoint = endpoint.name
        record.id = f"{endpoint.id_prefix}-{record.request_id}"
        record.model = self.model
        # Clients may use an id twice at a time; the engine's must be unique.
        engine_id = f"{record.id}-{next(self._numbers):x}"
        seed = self._random.getrandbits(63)
        body, job = await asyncio.to_thread(self._prepare, endpoint, raw, engine_id, seed)
        generation = Generation(self.engine, self._tokenizer, job, record)
        view = endpoint.view(body, job, self._tokenizer)
        head = self._head(record.id)
        if body.stream:
            return EventStream(chunks(generation, view, head, body), record)
        return await unless_gone(http.receive, _as_response(whole(generation, view, head)))

    def _prepare(
        self, endpoint: Endpoint, raw: bytes, engine_id: str, seed: int
    ) -> tuple[Any, Job]:
        """Everything that takes time before the first token, away from the event loop."""
        body: Any = parse(read_object(raw), endpoint.body)
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_field("stream_options", "needs stream: true")
        prompts = endpoint.prompts(body, self._tokenizer, self._spec)
        return body, build_job(body, self._spec, prompts, id=engine_id, seed=seed)

    def _head(self, id: str) -> dict[str, Any]:
        return {
            "id": id,
            "object": "",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"staffel-{__version__}",
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        raw = await http.body()
        http.state.record.endpoint = "tokenize"
        return json_response(await asyncio.to_thread(self._tokenize, raw))

    def _tokenize(self, raw: bytes) -> dict[str, Any]:
        fields = read_object(raw)
        body: TokenizeChat | TokenizeText
        if "messages" in fields:
            body = parse(fields, TokenizeChat)
            text = chat.render(body, self._tokenizer)
        else:
            body = parse(fields, TokenizeText)
            text = body.prompt
        self.check_model(body.model)
        [ids] = self._tokenizer.encode([text], add_special_tokens=body.add_special_tokens)
        return {
            "count": len(ids),
            "max_model_len": self._spec.max_model_len,
            "tokens": ids,
            "token_strs": self._tokenizer.token_strings(ids) if body.return_token_strs else None,
        }

    async def detokenize(self, http: HttpRequest) -> Response:
        raw = await http.body()
        http.state.record.endpoint = "detokenize"
        return json_response(await asyncio.to_thread(self._detokenize, raw))

    def _detokenize(self, raw: bytes) -> dict[str, Any]:
        body = parse(read_object(raw), DetokenizeBody)
        self.check_model(body.model)
        check_ids(body.tokens, self._spec.vocab_size, "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens)}

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that isn't the one served."""
        if name is not None and name != self.model:
            raise unknown_model(name, self.model)


async def _as_response(answer: Any) -> Response:
    return Response(msgspec.json.encode(await answer), media_type="application/json")

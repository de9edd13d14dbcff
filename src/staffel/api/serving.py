"""From a request's bytes to its answer: what the routes call."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from staffel import __version__
from staffel.api import chat, completions
from staffel.api.answers import View, chunks, whole
from staffel.api.bodies import Bodies
from staffel.api.engine import Engine
from staffel.api.errors import bad_field, json_response, unknown_model
from staffel.api.generation import Generation, Job, Prompt
from staffel.api.grammars import Grammars
from staffel.api.lanes import Lanes
from staffel.api.limits import Limits
from staffel.api.params import build_job, check_ids, check_length, grammar_of, unfollowable
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
    limits: Limits = field(default_factory=Limits)


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
        self,
        engine: Engine,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        grammars: Grammars,
        options: ApiOptions,
    ) -> None:
        self.engine = engine
        self._limits = options.limits
        self._grammars = grammars
        self._bodies = Bodies(options.limits)
        self._lanes = Lanes()
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
        record: Record = http.state.record
        record.endpoint = endpoint.name
        record.id = f"{endpoint.id_prefix}-{record.request_id}"
        record.model = self.model
        async with self._bodies.read(http) as raw:
            # Whoever has left by now costs nothing more.
            prepared = await unless_gone(http.receive, self._prepare(endpoint, raw, record.id))
        body, job = prepared
        generation = Generation(self.engine, self._tokenizer, job, record)
        view = endpoint.view(body, job, self._tokenizer)
        head = self._head(record.id)
        if body.stream:
            return EventStream(chunks(generation, view, head, body), record)
        return await unless_gone(http.receive, _as_response(whole(generation, view, head)))

    async def _prepare(self, endpoint: Endpoint, raw: bytes, id: str) -> tuple[Any, Job]:
        """Everything that takes time before the first token, away from the event loop."""
        # Clients may use an id twice at a time; the engine's must be unique.
        engine_id = f"{id}-{next(self._numbers):x}"
        seed = self._random.getrandbits(63)
        body, prompts, grammar = await self._lanes.run(len(raw), lambda: self._read(endpoint, raw))
        if grammar is not None and (problem := await self._grammars.problem(grammar)) is not None:
            raise unfollowable(problem)
        return body, build_job(body, self._spec, prompts, id=engine_id, seed=seed, grammar=grammar)

    def _read(self, endpoint: Endpoint, raw: bytes) -> tuple[Any, list[Prompt], str | None]:
        """The body, its prompts, and the grammar of its response format."""
        body: Any = parse(read_object(raw), endpoint.body)
        self.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise bad_field("stream_options", "needs stream: true")
        if body.prompts * body.n > self._limits.max_choices:
            text = f"asks for {body.prompts} * {body.n} choices; prompts times n may be"
            raise bad_field("n", f"{text} {self._limits.max_choices} at most (--max-choices)")
        grammar = grammar_of(body.response_format, self._limits.max_schema_bytes)
        return body, endpoint.prompts(body, self._tokenizer, self._spec), grammar

    def _head(self, id: str) -> dict[str, Any]:
        return {
            "id": id,
            "object": "",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"staffel-{__version__}",
        }

    async def tokenize(self, http: HttpRequest) -> Response:
        http.state.record.endpoint = "tokenize"
        return await self._in_lane(http, self._tokenize)

    async def _in_lane(
        self, http: HttpRequest, answer: Callable[[bytes], dict[str, Any]]
    ) -> Response:
        """The answer to a body, found in a thread."""
        async with self._bodies.read(http) as raw:
            work = self._lanes.run(len(raw), lambda: json_response(answer(raw)))
            return await unless_gone(http.receive, work)

    def _tokenize(self, raw: bytes) -> dict[str, Any]:
        fields = read_object(raw)
        body: TokenizeChat | TokenizeText
        if "messages" in fields:
            body = parse(fields, TokenizeChat)
            text, name = chat.render(body, self._tokenizer), "messages"
        else:
            body = parse(fields, TokenizeText)
            text, name = body.prompt, "prompt"
        self.check_model(body.model)
        check_length(text, self._tokenizer, self._spec, name)
        [ids] = self._tokenizer.encode([text], add_special_tokens=body.add_special_tokens)
        return {
            "count": len(ids),
            "max_model_len": self._spec.max_model_len,
            "tokens": ids,
            "token_strs": self._tokenizer.token_strings(ids) if body.return_token_strs else None,
        }

    async def detokenize(self, http: HttpRequest) -> Response:
        http.state.record.endpoint = "detokenize"
        return await self._in_lane(http, self._detokenize)

    def _detokenize(self, raw: bytes) -> dict[str, Any]:
        body = parse(read_object(raw), DetokenizeBody)
        self.check_model(body.model)
        if len(body.tokens) > self._spec.max_model_len:
            most = self._spec.max_model_len
            raise bad_field("tokens", f"are more than the context's {most}; give fewer at a time")
        check_ids(body.tokens, self._spec.vocab_size, "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens)}

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that isn't the one served."""
        if name is not None and name != self.model:
            raise unknown_model(name, self.model)


async def _as_response(answer: Any) -> Response:
    return Response(msgspec.json.encode(await answer), media_type="application/json")

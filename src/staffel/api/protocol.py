"""The request bodies: their fields, ranges and neutral values.

A field that is null has its default. A field that isn't served is refused by name, unless its
value is the one that asks for nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from staffel.api.errors import ApiError, bad_field

_Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_Stops = Annotated[list[_StopString], Meta(max_length=256)]
MAX_LOGPROBS = 20
_MOST_IDS = 1024
"""In a field that is looked at for each token of the output."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    min_tokens: _Count = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: _Share = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: _StopString | _Stops = []
    stop_token_ids: Annotated[list[int], Meta(max_length=_MOST_IDS)] = []
    ignore_eos: bool = False
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=_MOST_IDS)
    ] = {}
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    def token_limit(self) -> tuple[str, int | None]:
        """The name and value of the field that limits the output."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise bad_field("max_tokens", "differs from max_completion_tokens; give one of them")
        return "max_completion_tokens", self.max_completion_tokens


class CompletionBody(Body, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def top_wanted(self) -> int | None:
        """How many likeliest tokens to tell of each token; None: no log probabilities at all."""
        return self.logprobs

    @property
    def prompts(self) -> int:
        """How many there are."""
        several = isinstance(self.prompt, list) and not all(type(p) is int for p in self.prompt)
        return len(self.prompt) if several else 1


class ChatBody(Body, frozen=True, kw_only=True):
    echo: ClassVar[bool] = False
    prompts: ClassVar[int] = 1
    messages: _Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def top_wanted(self) -> int | None:
        """How many likeliest tokens to tell of each token; None: no log probabilities at all."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeText(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: _Messages
    model: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


_METADATA = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "user",
}
"""Fields that have no effect on the output, whatever their value."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "modalities": (["text"],),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
"""Fields that aren't served, with the values that ask for nothing."""

Parsed = TypeVar("Parsed", bound=Struct)


_MOST_STRINGS = 250_000
"""In a body: to make more of them at once would hold everybody else up."""


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body, without its nulls."""
    if raw.count(b'"') - raw.count(b'\\"') > 2 * _MOST_STRINGS:
        raise ApiError(400, f"The body has more than {_MOST_STRINGS} strings.")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return {name: value for name, value in body.items() if value is not None}


def parse(body: dict[str, Any], kind: type[Parsed]) -> Parsed:
    """A body as one of the structs above. Raises ApiError (400) naming the field at fault."""
    fields = {name: value for name, value in body.items() if not _asks_nothing(name, value, kind)}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None


def _asks_nothing(name: str, value: Any, kind: type[Struct]) -> bool:
    if name in kind.__struct_fields__:
        return False
    if name in _METADATA:
        return True
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _NEUTRAL.get(name, ())
    )


def _refusal(text: str) -> ApiError:
    """msgspec's "Expected `int` >= 1 - at `$.n`" with the field in front and as `param`."""
    what, _, path = text.partition(" - at `$")
    where = path.rstrip("`").lstrip(".").removesuffix("[...]")
    named = re.search(r"(unknown|required) field `(.+)`", what)
    if named is None:
        return ApiError(400, f"{where}: {what}" if where else what, param=where or None)
    field = f"{where}.{named[2]}" if where else named[2]
    if named[1] == "unknown":
        return bad_field(field, "this field, or this value of it, is not supported; leave it out")
    return bad_field(field, "this field is required")

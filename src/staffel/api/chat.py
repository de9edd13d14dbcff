"""/v1/chat/completions: its prompt and its form of a choice."""

from __future__ import annotations

from typing import Any

from staffel.api.errors import bad_field
from staffel.api.generation import Job, Prompt
from staffel.api.logprobs import chat_logprobs
from staffel.api.output import Piece
from staffel.api.params import check_ids, check_length
from staffel.api.protocol import ChatBody, TokenizeChat
from staffel.api.tokens import Tokenizer
from staffel.config import ModelSpec

_ROLES = ("system", "developer", "user", "assistant")


def prompts_of(body: ChatBody, tokenizer: Tokenizer, spec: ModelSpec) -> list[Prompt]:
    """The one prompt that the chat template makes of the messages."""
    text = render(body, tokenizer)
    check_length(text, tokenizer, spec, "messages")
    # The template writes the special tokens itself.
    [ids] = tokenizer.encode([text], add_special_tokens=False)
    if not ids:
        raise bad_field("messages", "give an empty prompt; write something")
    check_ids(ids, spec.vocab_size, "messages")
    return [Prompt(ids)]


def render(body: ChatBody | TokenizeChat, tokenizer: Tokenizer) -> str:
    """The chat template's text. Raises ApiError (400) if messages and template don't agree."""
    messages = [_message(message, place) for place, message in enumerate(body.messages)]
    if body.continue_final_message and body.add_generation_prompt:
        raise bad_field("continue_final_message", "needs add_generation_prompt: false")
    taken = body.chat_template_kwargs.keys() & tokenizer.reserved_template_names()
    if taken:
        raise bad_field("chat_template_kwargs", f"{min(taken)} can't be set this way")
    try:
        return tokenizer.render(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
        )
    except Exception as error:
        # A template is a program of the model's makers; it may object to messages in any way.
        raise bad_field("messages", f"the model's chat template refuses them: {error}") from None


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    # Clients send back what they got, with its empty fields.
    given = {name: value for name, value in message.items() if value not in (None, [])}
    for name in given.keys() - {"role", "content", "name"}:
        raise bad_field(f"{where}.{name}", "is not supported; leave it out")
    if given.get("role") not in _ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    if not isinstance(given.get("name", ""), str):
        raise bad_field(f"{where}.name", "must be a string")
    return given | {"content": _content(given.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A string, or text parts one below the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, "must be a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise bad_field(where, 'must be {"type": "text", "text": "..."}')
    if part.get("type") != "text":
        raise bad_field(f"{where}.type", f"{part.get('type')!r} is not supported; only text is")
    if not isinstance(part.get("text"), str):
        raise bad_field(f"{where}.text", "must be a string")
    for name in part.keys() - {"type", "text"}:
        raise bad_field(f"{where}.{name}", "is not supported; leave it out")
    text: str = part["text"]
    return text


class ChatView:
    """OpenAI's chat.completion, with vLLM's stop_reason and token ids."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, job: Job, tokenizer: Tokenizer) -> None:
        self._body = body
        self._job = job
        self._tokenizer = tokenizer

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"message": message} | self._part(index, piece)

    def parts(self, index: int, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
        delta = {"content": piece.text} if piece.text else {}
        part = {"delta": delta} | self._part(index, piece)
        if not first:
            return [part]
        begin = {"delta": {"role": "assistant", "content": ""}} | self._part(index, Piece())
        return [begin | {"logprobs": None}, part]

    def extras(self) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._job.prompts[0].ids}

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        top = self._body.top_wanted()
        if top is not None:
            logprobs = chat_logprobs(self._tokenizer, piece.scores, top)
        part = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        return part | ({"token_ids": piece.ids} if self._body.return_token_ids else {})

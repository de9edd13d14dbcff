"""The model's tokeniser: text to ids, ids to bytes, messages to a prompt. Imports no torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from staffel.config import ConfigError

_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}


class Tokenizer:
    """Wraps a fast tokeniser for use from several threads."""

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        """Raises ConfigError for a kind of tokeniser whose tokens have no bytes of their own."""
        self._fast = fast
        self._backend = fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes_of = byte_rule(json.loads(self._backend.to_str())["decoder"])
        added = self._backend.get_added_tokens_decoder()
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._known: dict[int, bytes] = {}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """Ids that stand for no text."""
        self.longest_token = self._longest_token()
        """Bytes of text that a token stands for at most."""

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read a model folder. Raises ConfigError if it has no usable fast tokeniser."""
        if not (Path(path) / "tokenizer.json").is_file():
            raise ConfigError(f"MODEL: {path} has no tokenizer.json; only fast tokenisers serve")
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(str(path))
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ConfigError(f"MODEL: {path}/tokenizer.json can't be read: {error}") from None
        return cls(fast)

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        # The batch form lets go of the interpreter's lock, so other requests go on meanwhile.
        batch = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def decode(self, ids: list[int]) -> str:
        """The text of the ids, special tokens written out."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token adds to the text; of a special token, its written form.

        Empty for an id that the model's padded vocabulary has and the tokeniser hasn't.
        """
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._look_up(id)
        return known

    def _look_up(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id]
        token = self._backend.id_to_token(id)
        return b"" if token is None else self._bytes_of(token)

    def _longest_token(self) -> int:
        # By the vocabulary's own writing, of which no character stands for more than four bytes.
        longest = sorted(self._backend.get_vocab().items(), key=lambda entry: -len(entry[0]))[:64]
        return max((len(self.token_bytes(id)) for _, id in longest), default=1) or 1

    def token_strings(self, ids: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them."""
        return [self._backend.id_to_token(id) or "" for id in ids]

    def reserved_template_names(self) -> frozenset[str]:
        """Names that `chat_template_kwargs` can't use: they steer the rendering itself."""
        names = inspect.signature(self._fast.apply_chat_template).parameters
        return frozenset({*names, "messages", "tools", "documents"})

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> str:
        """The chat template's text of the messages.

        Raises whatever the template does with messages that it doesn't like, and ValueError
        where the model has no template.
        """
        text: Any = self._fast.apply_chat_template(
            self._with_known_roles(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return str(text)

    def _with_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """OpenAI's newer "developer" is "system" to a template that never heard of it."""
        if "developer" in str(self._fast.chat_template):
            return messages
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]


def byte_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How a vocabulary entry is turned into bytes, from tokenizer.json's `decoder`."""
    steps = _flat(decoder)
    kinds = {step["type"] for step in steps}
    if not kinds or kinds - _DECODERS:
        names = ", ".join(sorted(kinds)) or "none"
        raise ConfigError(
            f"MODEL: tokenizer.json's decoder ({names}) is not supported; "
            "byte-level and sentencepiece tokenisers are"
        )
    if "ByteLevel" in kinds:
        return _byte_level
    return _sentencepiece(steps, byte_fallback="ByteFallback" in kinds)


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flat(part)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: itself if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _sentencepiece(steps: list[dict[str, Any]], *, byte_fallback: bool) -> Callable[[str], bytes]:
    """A leading space stays: the output goes on after a prompt, it doesn't begin a text."""
    replaced = [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]

    def rule(token: str) -> bytes:
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token[-1] == ">":
            return bytes.fromhex(token[3:5])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return rule

"""What a grammar is: llguidance's text for a JSON schema, its limits, and how it is compiled.

The API compiles each grammar once in a process that may be lost, and instances compile what has
passed there, with the same tokenizer and limits. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from staffel.config import ConfigError

_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""llguidance's own but for states, of which each takes one or two kB: 100 MB at most."""


def of_schema(schema: dict[str, Any]) -> str:
    """The grammar of the JSON texts that a schema admits, without white space between tokens.

    Left free, white space is something that a model can write for ever. Text that the schema
    forces is spelt by the model out of ordinary tokens, as all other text: llguidance would look up
    how its tokenizer spells it, which may be a special token, and do so for the whole rest of the
    output at every step.

    Raises:
        ValueError: the schema sets llguidance's options.
    """
    if "x-guidance" in schema:
        raise ValueError("x-guidance is not supported; leave it out")
    options = {"whitespace_flexible": False}
    text = msgspec.json.encode({**schema, "x-guidance": options}).decode()
    return f'%llguidance {{"no_forcing": true}}\nstart: %json {text}\n'


def load_tokenizer(model_path: Path, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """The model's vocabulary as llguidance needs it; takes half a second.

    Raises:
        ConfigError: the model has no tokenizer.json, or one that llguidance can't use.
    """
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"MODEL: {file} is missing; grammars need it")
    try:
        return LLTokenizer(file.read_text(), eos_token=list(eos_ids) or None)
    except ValueError as error:
        raise ConfigError(f"MODEL: {file} can't be used for grammars: {error}") from None


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's start; `problem` says whether it can be used."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def problem(matcher: LLMatcher) -> str | None:
    """Why a matcher can't go on, without the state that llguidance prints below; None: it can."""
    return matcher.get_error().partition("\n")[0] if matcher.is_error() else None

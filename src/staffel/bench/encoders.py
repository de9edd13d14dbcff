"""Where token counts come from: a model's folder, the server itself, or a rough guess."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import tokenizers

from staffel.bench.endpoint import Address
from staffel.config import ConfigError

Encode = Callable[[str], list[int]]
"""Token ids of a text, with the special tokens that the server adds to a plain prompt."""


def folder_encode(folder: Path) -> Encode:
    """From a model folder's tokenizer.json. Raises ConfigError where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--tokenizer: {folder} has no tokenizer.json; give the model's folder")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--tokenizer: {file}: {error}") from None
    # A file may carry its training's settings; a server applies neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: tokenizer.encode(text).ids


def server_encode(url: str, *, model: str, api_key: str | None = None) -> Encode:
    """By the server's /tokenize (Staffel, vLLM, SGLang, llama.cpp), over one connection.

    Args:
        url: As for the measurement, with or without /v1.

    Raises:
        ConfigError: here, where it can't be reached or has no /tokenize.
    """
    address = Address.parse(url)
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=30)
    path = re.sub(r"/v\d+$", "", address.prefix) + "/tokenize"
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def encode(text: str) -> list[int]:
        # llama.cpp reads `content`, and gives no tokens at all for `prompt`.
        for body in ({"model": model, "prompt": text}, {"content": text, "add_special": True}):
            if tokens := _tokenize(connection, path, headers, body):
                return tokens
        raise ConfigError(
            f"--tokenizer: {url} has no /tokenize that could be used; give the model's folder"
        )

    encode("start")
    return encode


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _tokenize(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str], body: object
) -> list[int] | None:
    """None where the server answers anything else than tokens."""
    for last in (False, True):
        try:
            connection.request("POST", path, msgspec.json.encode(body), headers)
            return msgspec.json.decode(connection.getresponse().read(), type=_Tokens).tokens
        except msgspec.DecodeError:
            return None
        except (OSError, http.client.HTTPException) as error:
            # A server closes a connection that was idle; the next try opens a new one.
            connection.close()
            if last:
                raise ConfigError(f"--tokenizer: {connection.host}: {error}") from None
    return None


def approximate_tokens(text: str) -> int:
    """Words, digits, marks and line breaks, one each: a rough guess for any BPE tokenizer.

    A long word is more than one token: one for each 8 letters begun.
    """
    return len(re.findall(r"[^\W\d_]{1,8}|\d|[^\w\s]|_|\n\s*", text))

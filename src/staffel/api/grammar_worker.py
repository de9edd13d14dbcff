"""The process in which a client's grammar is compiled for the first time.

The library may crash, hang or take all memory over it: then this process is lost, and nothing else.
A request on stdin is a grammar, an answer on stdout what is wrong with it; each with its length in
front (4 bytes, little endian). An empty answer: nothing is wrong.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from staffel import grammar
from staffel.config import ConfigError

_MEMORY = 1 << 30
"""Bytes that a grammar may take."""
_TRIAL_TOKENS = 16
"""Some limits show only when tokens are taken."""
_NICENESS = 10
"""What runs already takes precedence."""


def read_message(descriptor: int) -> bytes | None:
    """The next message; None: the other side is gone."""
    head = _read_exactly(descriptor, 4)
    return None if head is None else _read_exactly(descriptor, int.from_bytes(head, "little"))


def write_message(descriptor: int, data: bytes) -> None:
    """Raises OSError where the other side is gone."""
    data = len(data).to_bytes(4, "little") + data
    while data:
        data = data[os.write(descriptor, data) :]


def _read_exactly(descriptor: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(descriptor, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def trouble(tokenizer: LLTokenizer, text: str) -> str | None:
    """What is wrong with a grammar, found by compiling it and taking some tokens that it admits."""
    matcher = grammar.compiled(tokenizer, text)
    draws = random.Random(0)
    for _ in range(_TRIAL_TOKENS):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or mask == 0:
            break
        matcher.consume_token(_some_bit(mask, draws.randrange(mask.bit_length())))
    return _reason(matcher)


def _reason(matcher: LLMatcher) -> str | None:
    found = grammar.problem(matcher)
    return found if found is None else found or "the grammar library doesn't say why"


def _some_bit(mask: int, start: int) -> int:
    """A place of a one: the first from `start` on, or the first of all."""
    rest = mask >> start << start or mask
    return (rest & -rest).bit_length() - 1


def main() -> None:
    """`python -m staffel.api.grammar_worker MODEL_PATH SECONDS [EOS_ID ...]`"""
    model_path, seconds, eos_ids = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the server: at end of file
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tokenizer = grammar.load_tokenizer(model_path, tuple(map(int, eos_ids)))
    except ConfigError as error:
        write_message(1, str(error).encode())
        return
    write_message(1, b"")
    _limit_memory()
    while (text := read_message(0)) is not None:
        # Ends the process even if the server, which watches the time as well, is gone by then.
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        found = trouble(tokenizer, text.decode())
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(1, (found or "").encode())


def _limit_memory() -> None:
    """What is mapped now, and so much more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()

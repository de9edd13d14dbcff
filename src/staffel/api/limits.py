"""How much of the server one client may take. docs/api.md has the table."""

from __future__ import annotations

import resource

from msgspec import Struct

from staffel.config import ConfigError

_LONGEST_S = 86_400.0
_LEAST_BODY = 1024
_OWN_FILES = 96
"""File descriptors that the server needs besides its connections."""
_MOST_FILES = 65_536


class Limits(Struct, frozen=True, kw_only=True):
    """What is beyond is refused, and the answer names the option. Times in seconds."""

    max_connections: int = 4096
    """Connections at a time; the system's limit on open files may allow less."""
    max_head_bytes: int = 64 << 10
    """Of a request's first line and headers."""
    head_timeout: float = 10.0
    """From a connection's, or a further head's, first byte to the head's end."""
    max_body_bytes: int = 8 << 20
    body_timeout: float = 60.0
    """From a head's end to its body's."""
    max_choices: int = 1024
    """Prompts times n of a request."""
    max_schema_bytes: int = 256 << 10
    """Of a JSON schema in response_format."""
    grammar_timeout: float = 5.0
    """For the compilation of a schema."""

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_choices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{option(name)}: must be at least 1")
        for name in ("max_head_bytes", "max_body_bytes", "max_schema_bytes"):
            if getattr(self, name) < _LEAST_BODY:
                raise ConfigError(f"{option(name)}: must be at least {_LEAST_BODY} bytes")
        for name in ("head_timeout", "body_timeout", "grammar_timeout"):
            if not 0 < getattr(self, name) <= _LONGEST_S:
                raise ConfigError(f"{option(name)}: must be above 0, and {_LONGEST_S:g} at most")


def option(name: str) -> str:
    """How the command line calls a limit: max_body_bytes is --max-body."""
    return f"--{name.removesuffix('_bytes').replace('_', '-')}"


def connections_that_fit(wanted: int) -> int:
    """So many, or as many as files may be open: this process's own limit is raised to the most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(8, min(wanted, most - _OWN_FILES))

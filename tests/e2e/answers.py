"""Questions whose likeliest answers are far from a tie, and how to check them on a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.e2e.server import MODEL, InstanceState, Server

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Germany?",
    "Name three colors.",
    "How many days are in a week?",
    "Count from one to five.",
    "What is the opposite of hot?",
]


def check_answers(server: Server, expected: dict[str, str]) -> None:
    """All questions at once, streamed and not: the same texts, and every instance took part."""
    before = server.instances()
    with ThreadPoolExecutor(2 * len(expected)) as pool:
        whole = pool.map(server.greedy, expected)
        streamed = pool.map(lambda question: _streamed(server, question), expected)
        assert dict(zip(expected, whole, strict=True)) == expected
        assert dict(zip(expected, streamed, strict=True)) == expected
    _check_who_worked(before, server.instances(), 2 * len(expected))


def _streamed(server: Server, question: str) -> str:
    chunks = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=16,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def _check_who_worked(
    before: dict[str, InstanceState], now: dict[str, InstanceState], requests: int
) -> None:
    """Every instance took part, and each phase saw every request."""
    counts = {name: state.started - before[name].started for name, state in now.items()}
    assert all(counts.values()), counts
    for role in {name.rpartition("-")[0] for name in now}:
        of_role = sum(count for name, count in counts.items() if name.startswith(role))
        assert of_role == requests, counts
    for name, state in now.items():
        if name.startswith("decode"):
            assert state.copied_bytes > before[name].copied_bytes
            assert state.copied_seconds > before[name].copied_seconds

"""Requests for the cores: token ids that are alike where the workload says that prompts are."""

from __future__ import annotations

from itertools import chain

from staffel.control.request import Request, SamplingParams
from staffel.sim.models import Arrival

_SHARED = -1
"""The token of what all prompts have in common."""


class RequestMaker:
    """Makes requests whose prompts nobody writes to, so that equal ones are the same list."""

    def __init__(self) -> None:
        self._prompts: dict[int, list[int]] = {}
        self._params: dict[int, SamplingParams] = {}

    def make(self, number: int, arrival: Arrival) -> Request:
        """The request of an arrival; its id is the number."""
        output = arrival.output_tokens
        params = self._params.get(output)
        if params is None:
            params = self._params[output] = SamplingParams(max_tokens=output)
        return Request(
            id=str(number),
            prompt=_ids(number, arrival) if arrival.shares else self._plain(arrival.prompt_tokens),
            params=params,
            use_cache=arrival.shares,
        )

    def _plain(self, tokens: int) -> list[int]:
        """Of a prompt that no cache knows: what the ids are doesn't matter."""
        prompt = self._prompts.get(tokens)
        if prompt is None:
            prompt = self._prompts[tokens] = [0] * tokens
        return prompt


def _ids(number: int, arrival: Arrival) -> list[int]:
    """Shared tokens, then each block's own token repeated, then the request's own.

    Blocks have even ids and requests odd ones, so that none is taken for another.
    """
    blocks = ([2 * block] * arrival.block for block in arrival.prefix)
    head = [_SHARED] * arrival.shared + list(chain.from_iterable(blocks))
    own = max(0, arrival.prompt_tokens - len(head))
    return head[: arrival.prompt_tokens] + [2 * number + 1] * own

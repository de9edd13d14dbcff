"""Choosing tokens: adjusted logits, the candidates, and a draw that anyone can repeat.

A draw is a function of the seed, the choice and the token's position, and of nothing else that
happens in the batch. It takes the largest of logit / temperature + noise, the noise of a token
being its own draw from a Gumbel distribution (the Gumbel-max trick: Gumbel, 1954). A change in the
last bits of the logits, as a batch's shape brings, then changes the choice only where two tokens
tie, which is rarer than with a walk along cumulated probabilities.

The noise is a hash of the token's id in whole numbers: the same on every device, and computed for
the candidates alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor

from staffel.control.messages import RowResult
from staffel.control.request import SamplingParams, TokenLogprobs
from staffel.kernels import sampling
from staffel.model.grammar import Matcher

_NUCLEUS_GUESS = 64
"""How many of the likeliest tokens are sorted first in search of the top-p mass."""

_AT_ONCE = 1 << 24
"""Logits for which noise is computed at a time; each takes some tens of bytes meanwhile."""

_FARTHEST = 1e30
"""Stands for a logit that is no number."""

_STEP, _MIX_1, _MIX_2 = (
    word - 2**64  # as signed words
    for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants."""


class SamplingState:
    """What the choice of a sequence's next token depends on, besides the logits.

    A pure function of its arguments, so it can be rebuilt wherever the sequence goes on.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: list[int],
        output_ids: list[int],
        grammar: Matcher | None,
    ) -> None:
        """`grammar` is at its start; the output ids are fed to it here."""
        self.params = params
        self.position = len(output_ids)
        """Output tokens so far: the place of the next one."""
        self.history = _History(prompt_ids, output_ids) if _has_penalty(params) else None
        self.grammar = grammar
        if grammar is not None:
            grammar.advance(output_ids)

    @property
    def masks(self) -> bool:
        """Whether tokens are forbidden at this position."""
        return self.grammar is not None or self.position < self.params.min_tokens

    @property
    def untouched(self) -> bool:
        """Whether the choice is made from the logits as they are."""
        return not (self.masks or self.history or self.params.logit_bias)

    @property
    def plain(self) -> bool:
        """Whether the likeliest token of the raw logits is the answer."""
        return self.params.temperature == 0 and self.untouched

    @property
    def free(self) -> bool:
        """Whether any token may be drawn, by the raw logits."""
        params = self.params
        narrowed = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return params.temperature > 0 and self.untouched and not narrowed

    def advance(self, token: int) -> None:
        self.position += 1
        if self.history is not None:
            self.history.add(token)
        if self.grammar is not None:
            self.grammar.advance([token])


def sample(logits: Tensor, states: list[SamplingState]) -> list[RowResult]:
    """Draw the next token of each row and advance its state.

    Args:
        logits: [rows, vocabulary], float32; left as they are.
        states: one a row.
    """
    tokens = _choose_all(logits, states)
    logprobs = _logprobs(logits, tokens, states)
    return [
        _result(token, state, logprobs.get(row))
        for row, (token, state) in enumerate(zip(tokens, states, strict=True))
    ]


def score(logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
    """Log probabilities of `targets` and of the `top` likeliest tokens of each row.

    `logits` is [rows, vocabulary], float32. Equal logits share the better rank.
    """
    norm = logits.logsumexp(-1)
    chosen = logits.gather(1, torch.tensor(targets, device=logits.device).unsqueeze(1))
    ranks = (logits > chosen).sum(-1) + 1
    best = logits.topk(min(top, logits.shape[1]), dim=-1)
    return [
        TokenLogprobs(target, logprob, rank, _best_first(ids, values))
        for target, logprob, rank, ids, values in zip(
            targets,
            (chosen.squeeze(1) - norm).tolist(),
            ranks.tolist(),
            best.indices.tolist(),
            (best.values - norm.unsqueeze(1)).tolist(),
            strict=True,
        )
    ]


def _best_first(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    return sorted(zip(ids, logprobs, strict=True), key=lambda entry: (-entry[1], entry[0]))


def _logprobs(
    logits: Tensor, tokens: list[int], states: list[SamplingState]
) -> dict[int, TokenLogprobs]:
    """By row, of the rows that ask."""
    asked = {
        row: state.params.logprobs
        for row, state in enumerate(states)
        if state.params.logprobs is not None
    }
    if not asked:
        return {}
    rows = list(asked)
    scores = score(logits[rows], [tokens[row] for row in rows], max(asked.values()))
    return {
        row: TokenLogprobs(s.token, s.logprob, s.rank, s.top[: asked[row]])
        for row, s in zip(rows, scores, strict=True)
    }


def _result(token: int, state: SamplingState, logprobs: TokenLogprobs | None) -> RowResult:
    state.advance(token)
    grammar = state.grammar
    if grammar is None:
        return RowResult(token=token, logprobs=logprobs)
    problem = grammar.problem
    if problem is not None:
        return RowResult(token=token, failure=_unfollowable(problem))
    return RowResult(token=token, logprobs=logprobs, grammar_ended=grammar.ended)


def _unfollowable(problem: str) -> str:
    return f"the output can't follow this schema any further: {problem}"


# ---- one token


def _choose_all(logits: Tensor, states: list[SamplingState]) -> list[int]:
    plain = [row for row, state in enumerate(states) if state.plain]
    tokens = logits.argmax(-1) if plain else logits.new_empty(len(states), dtype=torch.long)
    # Each operation on a GPU has its price, however small: one for all rows.
    free = [row for row, state in enumerate(states) if state.free] if logits.is_cuda else []
    for rows in _batches(free, logits.shape[1]):
        tokens[rows] = _draw_rows(logits[rows], [states[row] for row in rows])
    for row in set(range(len(states))).difference(plain, free):
        tokens[row] = _choose(logits[row], states[row])
    return tokens.tolist()


def _batches(rows: list[int], vocabulary: int) -> Iterator[list[int]]:
    """Some rows at a time: as many as have `_AT_ONCE` logits."""
    size = max(1, _AT_ONCE // vocabulary)
    return (rows[at : at + size] for at in range(0, len(rows), size))


def _draw_rows(logits: Tensor, states: list[SamplingState]) -> Tensor:
    """What `_draw` gives for each row, of states that are `free`."""
    keys = [_key(s.params.seed, s.params.choice, s.position) for s in states]
    temperatures = logits.new_tensor([s.params.temperature for s in states], dtype=torch.float64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    columns = temperatures.unsqueeze(1), torch.tensor(keys, device=logits.device).unsqueeze(1)
    return _place(logits, ids, *columns)


def _choose(raw: Tensor, state: SamplingState) -> Tensor | int:
    """The next token after `raw`, [vocabulary]."""
    row = _adjusted(raw, state)
    if not state.free and not (largest := row.max()).isfinite():
        if state.masks and largest == -torch.inf:
            return _when_nothing_is_allowed(raw, state.params)
        # A model that overflows, or a penalty beyond what floats hold: what is NaN isn't drawn.
        least = -torch.inf if state.masks else -_FARTHEST
        row = row.nan_to_num(nan=-_FARTHEST, posinf=_FARTHEST, neginf=least)
    if state.params.temperature == 0:
        return row.argmax()
    return _draw(row, state.params, state.position)


def _when_nothing_is_allowed(raw: Tensor, params: SamplingParams) -> Tensor | int:
    """End the output, even before min_tokens; if it can't be ended, ignore the masks."""
    return params.stop_ids[0] if params.stop_ids else raw.argmax()


def _draw(row: Tensor, params: SamplingParams, position: int) -> Tensor | int:
    ids, key = _candidates(row, params), _key(params.seed, params.choice, position)
    if ids is not None:
        return ids[_place(row[ids], ids, params.temperature, key)]
    if sampling.can_draw(row):
        return sampling.draw(row, params.temperature, key)
    return _place(row, torch.arange(len(row), device=row.device), params.temperature, key)


def _place(logits: Tensor, ids: Tensor, temperature: float | Tensor, key: int | Tensor) -> Tensor:
    """Where the largest of logit / temperature + noise is, in a row or in each of several, which
    have a temperature and a key each, [rows, 1]."""
    return (_scaled(logits, temperature) + _gumbel(ids, key)).argmax(-1)


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits over temperature, float64, the largest at 0 so that none can overflow."""
    return (logits - logits.amax(-1, keepdim=True)).double() / temperature


# ---- adjusted logits


def _adjusted(raw: Tensor, state: SamplingState) -> Tensor:
    """Bias, penalties and masks applied; `raw` itself where there are none."""
    params = state.params
    row = raw.clone() if state.masks or state.history or params.logit_bias else raw
    if params.logit_bias:
        ids = _known(params.logit_bias, row)
        row[ids] += row.new_tensor([params.logit_bias[token] for token in ids])
    if state.history is not None:
        _penalise(row, state.history, params)
    if state.position < params.min_tokens:
        row[_known(params.stop_ids, row)] = -torch.inf
    if state.grammar is not None:
        allowed = torch.from_numpy(state.grammar.mask()).to(row.device)
        row.masked_fill_(~allowed, -torch.inf)
    return row


def _known(ids: tuple[int, ...] | dict[int, float], row: Tensor) -> list[int]:
    """Those that can be drawn at all."""
    return [token for token in ids if 0 <= token < len(row)]


def _has_penalty(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


class _History:
    """Which tokens occurred, as tensors over the vocabulary: a step costs the same at any length.

    They are made at the first use, when the vocabulary's size and the device are known.
    """

    def __init__(self, prompt_ids: list[int], output_ids: list[int]) -> None:
        self._prompt_ids = prompt_ids
        self._output_ids = list(output_ids)
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """How often each token was put out, float32; whether it occurs at all, bool."""
        if self._tables is None:
            outputs, prompt = (
                torch.tensor(ids, dtype=torch.long, device=like.device)
                for ids in (self._output_ids, self._prompt_ids)
            )
            counts = torch.bincount(outputs, minlength=len(like)).to(like)
            seen = counts > 0
            seen[prompt] = True
            self._tables = counts, seen
        return self._tables

    def add(self, token: int) -> None:
        if self._tables is None:
            self._output_ids.append(token)
            return
        counts, seen = self._tables
        counts[token] += 1
        seen[token] = True


def _penalise(row: Tensor, history: _History, params: SamplingParams) -> None:
    """Repetition (prompt and output) as in CTRL (Keskar et al., 2019), frequency and presence
    (output alone) as in OpenAI's API reference."""
    counts, seen = history.tables(row)
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row))
    if params.frequency_penalty != 0:
        row.sub_(counts, alpha=params.frequency_penalty)
    if params.presence_penalty != 0:
        row.sub_((counts > 0).to(row), alpha=params.presence_penalty)


# ---- candidates


def _candidates(row: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that top_k, then top_p, then min_p leave; None: all.

    Each keeps what reaches a floor, so tokens of equal logits stay or go together, and the set
    doesn't depend on how a sort orders them.
    """
    ids = None
    if 0 < params.top_k < len(row):
        ids, row = _at_least(_top_k_floor(row, params.top_k), ids, row)
    if params.top_p < 1:
        ids, row = _at_least(_top_p_floor(row, params.top_p, params.temperature), ids, row)
    if params.min_p > 0:
        ids, row = _at_least(_min_p_floor(row, params.min_p, params.temperature), ids, row)
    return ids


def _at_least(floor: Tensor, ids: Tensor | None, row: Tensor) -> tuple[Tensor, Tensor]:
    kept = (row >= floor).nonzero().squeeze(1)
    return kept if ids is None else ids[kept], row[kept]


def _top_k_floor(row: Tensor, k: int) -> Tensor:
    return row.topk(k).values[-1]


def _top_p_floor(row: Tensor, p: float, temperature: float) -> Tensor:
    """The lowest logit of the smallest set of likeliest tokens whose probability reaches `p`."""
    mass = p * _scaled(row, temperature).exp().sum()
    size = _NUCLEUS_GUESS
    while True:  # a full sort costs many times more than a part of it
        best = row.topk(min(size, len(row))).values
        reached = _scaled(best, temperature).exp().cumsum(0)
        if size >= len(row) or reached[-1] >= mass:
            short = int((reached < mass).sum())
            return best[min(short, len(best) - 1)]
        size *= 16


def _min_p_floor(row: Tensor, p: float, temperature: float) -> Tensor:
    """The logit whose probability is `p` times the likeliest one's."""
    kept = _scaled(row, temperature).exp() >= p
    return row[kept].min()


# ---- noise


def _gumbel(ids: Tensor, key: int | Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens `ids`, float64; kernels/source/sampling.c has it too."""
    bits = _hash(ids, key)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # never 0, never 1
    return -(-uniform.log()).log()


def _key(seed: int, choice: int, position: int) -> int:
    """64 well-mixed bits, as a signed integer."""
    words = b"".join((word % 2**64).to_bytes(8, "little") for word in (seed, choice, position))
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little", signed=True)


def _hash(ids: Tensor, key: int | Tensor) -> Tensor:
    """64 bits for each id: output number `id` of SplitMix64 started at `key` (Steele, Lea and
    Flood, Fast Splittable Pseudorandom Number Generators, 2014). Products wrap, as they should."""
    z = (ids + 1) * _STEP + key
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)

"""The sampler against plain references, and its draws against their distributions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from staffel.control.request import SamplingParams
from staffel.model import sampler
from staffel.model.sampler import SamplingState, sample, score

VOCAB = 500


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def params(**wanted: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **wanted)


def state(
    prompt: tuple[int, ...] = (1,),
    outputs: tuple[int, ...] = (),
    grammar: Any = None,
    **wanted: Any,
) -> SamplingState:
    return SamplingState(params(**wanted), list(prompt), list(outputs), grammar)


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def tokens(logits: Tensor, states: list[SamplingState]) -> list[int]:
    return [result.token for result in sample(logits, states)]


def draws(row: Tensor, number: int, **wanted: Any) -> Counter[int]:
    """Drawn at as many positions of one sequence."""
    sequence = state(**wanted)
    return Counter(tokens(row.unsqueeze(0), [sequence])[0] for _ in range(number))


def chi_square(counts: Counter[int], probabilities: Tensor) -> float:
    """In standard deviations above its mean; `probabilities` over all ids, 0 where impossible."""
    number = sum(counts.values())
    possible = probabilities.nonzero().squeeze(1).tolist()
    assert set(counts) <= set(possible)
    expected = {token: number * float(probabilities[token]) for token in possible}
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    freedom = len(possible) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


class FakeGrammar:
    """Admits the given ids at each position in turn, and ends after the last."""

    def __init__(self, *admitted: set[int]) -> None:
        self.admitted, self.position = admitted, 0
        self.problem: str | None = None

    @property
    def ended(self) -> bool:
        return self.position >= len(self.admitted)

    def advance(self, ids: list[int]) -> None:
        self.position += len(ids)

    def mask(self) -> np.ndarray:
        mask = np.zeros(VOCAB, dtype=np.bool_)
        mask[list(self.admitted[self.position])] = True
        return mask


def test_a_grammar_that_gives_up_says_so() -> None:
    grammar = FakeGrammar({1}, {2})
    grammar.problem = "too many items"
    (result,) = sample(torch.zeros(1, VOCAB), [state_of(grammar)])
    assert "too many items" in result.failure
    assert not result.grammar_ended


def state_of(grammar: FakeGrammar) -> SamplingState:
    return SamplingState(SamplingParams(max_tokens=5, temperature=0), [1], [], grammar)


# ---- distributions


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    ],
)
def test_draws_follow_the_distribution(wanted: dict[str, Any]) -> None:
    row = torch.linspace(2, -2, 40)
    probabilities = reference_support(row, params(**wanted)).softmax(0)
    assert chi_square(draws(row, 8000, seed=7, **wanted), probabilities) < 4


def test_choices_and_seeds_and_positions_are_independent() -> None:
    """Pairs of neighbouring draws fill the square evenly, whatever the neighbours differ in."""
    row = torch.zeros(1, 8)

    def draw(seed: int, choice: int, position: int) -> int:
        sequence = state(seed=seed, choice=choice, outputs=(0,) * position)
        return tokens(row, [sequence])[0]

    even = torch.full((64,), 1 / 64)
    for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        pairs = Counter(
            8 * draw(i, i % 5, i % 7) + draw(i + step[0], i % 5 + step[1], i % 7 + step[2])
            for i in range(4000)
        )
        assert chi_square(pairs, even) < 4


def test_rows_that_are_drawn_together_give_what_each_gives_alone() -> None:
    logits = random_logits(40)
    states = [state(seed=row, choice=row % 3, temperature=0.2 + row / 10) for row in range(40)]
    together = sampler._draw_rows(logits, states).tolist()
    assert together == tokens(logits, states)


def test_rows_are_batched_by_their_size() -> None:
    batches = list(sampler._batches(list(range(300)), 150_000))
    assert [len(batch) for batch in batches] == [111, 111, 78]
    assert [row for batch in batches for row in batch] == list(range(300))


def test_noise_is_splitmix64() -> None:
    """Against the published algorithm in whole numbers: the draws must never change."""

    def output(key: int, number: int) -> int:
        z = (key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    ids = [0, 1, 17, 49151, 200_000]
    for key in (0, 1234567, -(2**63), 2**63 - 1):
        hashed = sampler._hash(torch.tensor(ids), key).tolist()
        assert [word % 2**64 for word in hashed] == [output(key, token) for token in ids]
    assert int(sampler._hash(torch.tensor([0]), 1234567)) == 6457827717110365317
    assert sampler._key(3, 1, 4) == -4938247510052647388


def test_noise_is_finite_and_gumbel() -> None:
    noise = sampler._gumbel(torch.arange(200_000), sampler._key(1, 2, 3))
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.03)


# ---- candidates


def reference_support(row: Tensor, wanted: SamplingParams) -> Tensor:
    """transformers' own processors: scaled logits, -inf where a token can't be drawn."""
    scores = row.unsqueeze(0) / wanted.temperature
    if wanted.top_k:
        scores = TopKLogitsWarper(wanted.top_k)(None, scores)
    if wanted.top_p < 1:
        scores = TopPLogitsWarper(wanted.top_p)(None, scores)
    if wanted.min_p:
        scores = MinPLogitsWarper(wanted.min_p)(None, scores)
    return scores[0]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
@pytest.mark.parametrize(
    "wanted",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB - 1},
        {"top_k": VOCAB + 1},
        {"top_p": 0.001},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.001},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 30, "top_p": 0.7},
        {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    ],
)
def test_candidates_equal_transformers(wanted: dict[str, Any], temperature: float) -> None:
    for row in random_logits(5):
        asked = params(temperature=temperature, **wanted)
        ids = sampler._candidates(row, asked)
        kept = set(range(VOCAB)) if ids is None else set(ids.tolist())
        expected = reference_support(row, asked).isfinite().nonzero().squeeze(1)
        assert kept == set(expected.tolist())


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, expected in ((0.0, [0]), (0.49, [0]), (0.51, [0, 1]), (0.81, [0, 1, 2])):
        assert sampler._candidates(row, params(top_p=top_p)).tolist() == expected


def test_top_p_on_a_flat_row_goes_beyond_the_first_guess() -> None:
    row = torch.linspace(0, -0.001, 5000)
    assert len(sampler._candidates(row, params(top_p=0.5))) == pytest.approx(2500, abs=3)


def test_equal_logits_stay_together() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    assert sampler._candidates(row, params(top_k=2)).tolist() == [1, 2, 3, 4]


# ---- the same draw wherever it is made


def test_alone_in_a_batch_and_resumed_are_the_same() -> None:
    asked = [
        {"seed": 1},
        {"seed": 2, "top_k": 9},
        {"seed": 3, "top_p": 0.7, "temperature": 0.8},
        {"temperature": 0.0},
        {"seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"seed": -5, "choice": 3, "min_p": 0.01, "logit_bias": {7: 3.0}},
    ]
    steps = [random_logits(len(asked), seed=step) for step in range(12)]
    together = [state(**wanted) for wanted in asked]
    batched = [tokens(logits, together) for logits in steps]
    for row, wanted in enumerate(asked):
        expected = [step[row] for step in batched]
        alone = state(**wanted)
        assert [tokens(logits[row : row + 1], [alone])[0] for logits in steps] == expected
        for cut in (1, 5, 11):
            resumed = state(outputs=tuple(expected[:cut]), **wanted)
            rest = [tokens(logits[row : row + 1], [resumed])[0] for logits in steps[cut:]]
            assert rest == expected[cut:]


def test_seeds_and_choices_differ() -> None:
    logits = random_logits(1, scale=1.0)
    for field in ("seed", "choice"):
        assert len({tokens(logits, [state(**{field: i})])[0] for i in range(30)}) > 20


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(3)
    before = logits.clone()
    sample(
        logits,
        [
            state(repetition_penalty=2.0, logit_bias={1: 5.0}),
            state(min_tokens=3, stop_ids=(4,)),
            state(grammar=FakeGrammar({1}, {2})),
        ],
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-300, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(4)
    assert tokens(logits, [state(temperature=temperature)] * 4) == logits.argmax(-1).tolist()
    filtered = state(temperature=temperature, top_p=0.9, min_p=0.1)
    assert tokens(logits, [filtered] * 4) == logits.argmax(-1).tolist()


# ---- adjusted logits


def adjusted(row: Tensor, sequence: SamplingState) -> Tensor:
    return sampler._adjusted(row, sequence)


def test_penalties_by_hand() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 0.5])
    sequence = state(
        prompt=(0, 1),
        outputs=(2, 2, 1),
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.125,
    )
    # 0: prompt alone; 1: prompt and once put out; 2: twice put out; 3: never seen.
    expected = [1.0, -4.0 - 0.25 - 0.125, 0.5 - 0.5 - 0.125, 0.5]
    assert adjusted(row, sequence).tolist() == expected


def test_repetition_penalty_equals_transformers() -> None:
    row = random_logits(1)
    prompt, outputs = (3, 4, 4, 99), (4, 17, 250)
    ours = adjusted(row[0], state(prompt=prompt, outputs=outputs, repetition_penalty=1.7))
    ids = torch.tensor([[*prompt, *outputs]])
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(1.7)(ids, row)[0])


def test_penalties_keep_counting() -> None:
    row = random_logits(1)
    wanted = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    walked = state(**wanted)
    outputs: list[int] = []
    for _ in range(20):
        outputs += tokens(row, [walked])
        fresh = state(outputs=tuple(outputs), **wanted)
        assert torch.equal(adjusted(row[0], walked), adjusted(row[0], fresh))


def test_logit_bias_forces_and_bans() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    assert tokens(logits, [state(temperature=0.0, logit_bias={42: 100.0})]) == [42]
    assert tokens(logits, [state(temperature=0.0, logit_bias={best: -100.0})]) != [best]
    assert set(draws(logits[0], 300, logit_bias={42: 100.0})) == {42}
    assert tokens(logits, [state(temperature=0.0, logit_bias={VOCAB: 100.0})]) == [best]


def test_min_tokens_holds_stop_ids_back() -> None:
    row = torch.zeros(VOCAB)
    row[[5, 6]] = torch.tensor([50.0, 49.0])
    sequence = state(temperature=0.0, min_tokens=2, stop_ids=(5, 6, 10**6))
    drawn = [tokens(row.unsqueeze(0), [sequence])[0] for _ in range(3)]
    assert not {5, 6} & set(drawn[:2])
    assert drawn[2] == 5


# ---- grammars


def test_a_grammar_masks_advances_and_ends() -> None:
    logits = random_logits(1)
    for temperature in (0.0, 1.0):
        sequence = state(grammar=FakeGrammar({3, 4}, {5}), temperature=temperature)
        (first,) = sample(logits, [sequence])
        assert first.token in (3, 4)
        assert not first.grammar_ended
        (second,) = sample(logits, [sequence])
        assert (second.token, second.grammar_ended) == (5, True)


def test_a_state_feeds_output_ids_to_its_grammar() -> None:
    sequence = state(outputs=(3,), grammar=FakeGrammar({3}, {5}))
    assert tokens(random_logits(1), [sequence]) == [5]


def test_where_nothing_is_allowed_the_output_ends() -> None:
    logits = random_logits(1)
    for temperature in (0.0, 1.0):
        wanted = {"temperature": temperature, "min_tokens": 4}
        ending = state(grammar=FakeGrammar({9}), stop_ids=(9, 8), **wanted)
        assert tokens(logits, [ending]) == [9]
        endless = state(grammar=FakeGrammar(set()), **wanted)
        assert tokens(logits, [endless]) == [int(logits.argmax())]


# ---- log probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(4)
    results = sample(
        logits,
        [
            state(logprobs=3, temperature=0.3, top_k=1, logit_bias={8: 100.0}),
            state(temperature=0.0),
            state(logprobs=0, seed=5),
            state(logprobs=1, temperature=0.0),
        ],
    )
    expected = logits.log_softmax(-1)
    assert results[0].token == 8
    assert results[1].logprobs is None
    for row, top in ((0, 3), (2, 0), (3, 1)):
        got, token = results[row].logprobs, results[row].token
        assert got.token == token
        assert got.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        best = expected[row].sort(descending=True)
        assert [entry[0] for entry in got.top] == best.indices[:top].tolist()
        assert [entry[1] for entry in got.top] == pytest.approx(
            best.values[:top].tolist(), abs=1e-5
        )
        assert got.rank == best.indices.tolist().index(token) + 1
    assert results[3].logprobs.rank == 1


def test_equal_logits_share_the_better_rank_and_stand_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    ranks = [score(logits, [target], 0)[0].rank for target in range(4)]
    assert ranks == [4, 1, 1, 3]
    assert [token for token, _ in score(logits, [0], 4)[0].top] == [1, 2, 3, 0]


def test_score_of_a_prompt() -> None:
    logits = random_logits(6)
    targets = [0, 5, 77, 499, 5, 1]
    scores = score(logits, targets, 2)
    expected = logits.log_softmax(-1)[range(6), targets].tolist()
    assert [entry.token for entry in scores] == targets
    assert [entry.logprob for entry in scores] == pytest.approx(expected, abs=1e-5)
    assert all(len(entry.top) == 2 for entry in scores)
    assert score(logits[:0], [], 2) == []


# ---- what no request may do to others in its batch

_EXTREMES: dict[str, list[float]] = {
    "temperature": [0, 5e-324, 1e-300, 1e-30, 1, 2],
    "top_p": [5e-324, 1e-300, 0.5, 1],
    "top_k": [0, 1, VOCAB, 2**31 - 1],
    "min_p": [0, 5e-324, 0.1, 1],
    "repetition_penalty": [0.01, 1, 100],
    "frequency_penalty": [-2, 0, 2],
    "presence_penalty": [-2, 0, 2],
}


@pytest.mark.parametrize("seed", range(150))
def test_extreme_parameters_and_logits_give_a_token(seed: int) -> None:
    draws = random.Random(seed)
    chosen = {name: draws.choice(values) for name, values in _EXTREMES.items()}
    bias = draws.choice([{}, {1: -100, 2: 100}])
    params = SamplingParams(max_tokens=9, seed=seed, logit_bias=bias, **chosen)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    odd = draws.choice([None, torch.nan, torch.inf, -torch.inf, 3e38])
    if odd is not None:
        logits[0, draws.sample(range(VOCAB), draws.choice([1, VOCAB // 2, VOCAB]))] = odd
    (result,) = sample(logits, [SamplingState(params, [1, 2, 3], [4, 5], None)])
    assert 0 <= result.token < VOCAB


def test_a_token_without_a_logit_is_not_drawn() -> None:
    logits = torch.full((1, VOCAB), torch.nan)
    logits[0, 7] = -50
    params = SamplingParams(max_tokens=9, min_p=0.1, seed=1)
    (result,) = sample(logits, [SamplingState(params, [1], [], None)])
    assert result.token == 7

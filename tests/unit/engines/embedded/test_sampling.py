"""Choosing tokens: greedy, random but repeatable, and what is reported about the choice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engines.embedded.request import Sampling
from kvbaton.engines.embedded.sampling import sample

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.06, 0.04], np.float32))


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert sample(row(1, 3, 0, 3), Sampling(1), 0, 7).token_id == 1


def test_logprobs_only_when_asked_for() -> None:
    chosen = sample(LOGITS, Sampling(1), 0, 0)
    assert (chosen.logprob, chosen.top_logprobs) == (0.0, ())


@pytest.mark.parametrize("temperature", [0.0, 0.3, 2.0])
def test_logprobs_are_of_the_raw_logits(temperature: float) -> None:
    chosen = sample(LOGITS + np.float32(100), Sampling(1, temperature=temperature, logprobs=0), 3, 5)
    assert chosen.logprob == pytest.approx(float(LOGITS[chosen.token_id]), abs=1e-4)
    assert chosen.top_logprobs == ()


def test_top_logprobs_are_sorted_with_ties_to_the_lowest_id() -> None:
    chosen = sample(row(0, 2, 1, 2, 1), Sampling(1, logprobs=4), 0, 0)
    assert [token_id for token_id, _ in chosen.top_logprobs] == [1, 3, 2, 4]
    assert chosen.top_logprobs[0][1] == chosen.logprob == chosen.top_logprobs[1][1] > chosen.top_logprobs[2][1]


def test_more_candidates_than_tokens_gives_all() -> None:
    assert len(sample(LOGITS, Sampling(1, logprobs=20), 0, 0).top_logprobs) == 5


def test_frequencies_follow_the_distribution() -> None:
    counts = Counter(sample(LOGITS, Sampling(1, temperature=1.0), index, 11).token_id for index in range(4000))
    for token_id, probability in enumerate(np.exp(LOGITS)):
        assert counts[token_id] / 4000 == pytest.approx(float(probability), abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.0, {0}), (0.5, {0}), (0.6, {0, 1}), (0.75, {0, 1}), (0.89, {0, 1, 2}), (0.999, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, allowed: set[int]) -> None:
    seen = {sample(LOGITS, Sampling(1, temperature=1.0, top_p=top_p), index, 3).token_id for index in range(600)}
    assert seen == allowed


def test_top_p_of_equal_logits_still_chooses() -> None:
    assert sample(row(1, 1, 1, 1), Sampling(1, temperature=1.0, top_p=1e-6), 0, 0).token_id == 0


@given(st.integers(-(1 << 70), 1 << 70), st.integers(0, 10_000))
def test_choice_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    sampling = Sampling(1, temperature=0.8, top_p=0.95)
    logits = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    assert sample(logits, sampling, index, seed) == sample(logits.copy(), sampling, index, seed)


def test_seeds_and_indices_make_a_difference() -> None:
    logits, sampling = np.zeros(1000, np.float32), Sampling(1, temperature=1.0)
    assert len({sample(logits, sampling, index, 1).token_id for index in range(50)}) > 40
    assert len({sample(logits, sampling, 1, seed).token_id for seed in range(50)}) > 40


def test_known_choices_stay_as_they_are() -> None:
    """Two instances of different releases may share a request: the stream of choices is part of the protocol."""
    logits = np.zeros(1 << 16, np.float32)
    assert [sample(logits, Sampling(1, temperature=1.0), index, 1234).token_id for index in range(3)] == [21936, 15711, 49044]


@pytest.mark.parametrize("temperature", [1e-9, 1e-4, 1e4])
def test_extreme_temperatures_are_finite(temperature: float) -> None:
    chosen = sample(row(-1e4, 0, 1e4), Sampling(1, temperature=temperature, logprobs=1), 0, 0)
    assert chosen.token_id in range(3)
    assert np.isfinite(chosen.top_logprobs[0][1])

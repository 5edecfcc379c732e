"""The requests of a verification: bounded, repeatable, of very different lengths, some sharing prefixes."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.verify.workload import make_prompts, make_text


def _encode(text: str) -> list[int]:
    """One token per character: short prompts already differ."""
    return [ord(character) for character in text]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 300))
def test_lengths_are_within_bounds(requests: int, seed: int, longest: int) -> None:
    prompts = make_prompts(_encode, requests, seed, longest)
    assert len(prompts) == requests
    assert all(1 <= len(prompt) <= longest for prompt in prompts)


def test_a_shortest_length_is_kept_too() -> None:
    assert all(20 <= len(prompt) <= 50 for prompt in make_prompts(_encode, 60, 3, longest=50, shortest=20))


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    first, again, other = (make_prompts(_encode, 20, seed, 200) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_lengths_are_spread_log_uniformly() -> None:
    lengths = [len(prompt) for prompt in make_prompts(_encode, 400, 0, 1500)]
    short, middle = (sum(length <= bound for length in lengths) / len(lengths) for bound in (11, 131))
    assert 0.15 < short < 0.5
    assert 0.5 < middle < 0.85
    assert max(lengths) > 1000


def test_some_prompts_share_prefixes_and_most_do_not() -> None:
    prompts = [prompt for prompt in make_prompts(_encode, 100, 1, 400) if len(prompt) >= 60]
    sharing = {one for pair in combinations(prompts, 2) if pair[0][:60] == pair[1][:60] for one in pair}
    assert sharing
    assert len(sharing) < len(prompts)


@pytest.mark.parametrize("block", [1, 16, 31])
def test_prompts_of_whole_blocks_have_one_token_more_and_share_nothing(block: int) -> None:
    prompts = make_prompts(_encode, 60, 5, longest=400, shortest=block + 1, whole_blocks=block)
    assert all(len(prompt) % block == 1 % block and block < len(prompt) <= 400 for prompt in prompts)
    long = [prompt for prompt in prompts if len(prompt) > 60]
    assert not any(one[:60] == other[:60] for one, other in combinations(long, 2))


@pytest.mark.parametrize("words", [0, 1, 50])
def test_text_is_at_least_as_long_as_asked_for(words: int) -> None:
    assert len(make_text(random.Random(0), words).split()) >= words


def test_a_seed_gives_the_same_lengths_for_good() -> None:
    """A word more in a sentence would shift what is drawn after it, and with it every kept result of a seed."""
    lengths = [len(prompt) for prompt in make_prompts(lambda text: list(text.encode()), 8, 0, 1500)]
    assert lengths == [481, 1, 3, 5, 190, 445, 167, 102]

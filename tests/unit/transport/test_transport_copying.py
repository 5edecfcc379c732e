"""Copies of many runs at once, held against a plain loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.transport.copying import RunCopier

CELL = 40_000


@given(st.lists(st.sampled_from([1, 7, 64, 100, 4096, 33_000, 40_000]), min_size=1, max_size=40), st.integers(0, 2**32))
def test_every_byte_lands_where_a_loop_puts_it(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    source = random.integers(0, 255, len(sizes) * CELL, dtype=np.uint8)
    target, expected = np.full_like(source, 255), np.full_like(source, 255)
    source.flags.writeable = False
    starts = np.stack([random.permutation(len(sizes)), random.permutation(len(sizes))], axis=1) * CELL
    runs = np.column_stack([starts, sizes]).astype(np.uint64)
    RunCopier(source, target).copy(runs)
    for at, to, count in runs.tolist():
        expected[to : to + count] = source[at : at + count]
    assert np.array_equal(target, expected)


def test_runs_at_odd_offsets_and_at_both_ends() -> None:
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    RunCopier(source, target).copy(np.array([[3, 0, 8], [248, 9, 8], [17, 30, 8], [0, 248, 8], [99, 101, 8]], np.uint64))
    for at, to in ((3, 0), (248, 9), (17, 30), (0, 248), (99, 101)):
        assert np.array_equal(target[to : to + 8], source[at : at + 8])
    assert target.astype(bool).sum() == 39

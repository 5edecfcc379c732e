"""The wire benchmark: the batches of its GPU part are what it says."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kvbaton.bench.wire.cuda import PLANES, TOKEN_BYTES, measure_cuda, patterns
from kvbaton.core.strips import Plan
from kvbaton.errors import ConfigError
from kvbaton.transport.runs import check_runs


def quiet(line: str) -> None:
    """Progress that nobody reads."""


class TestPatterns:
    def test_every_batch_moves_the_same_bytes_inside_both_regions(self) -> None:
        for pattern in patterns(64):
            assert pattern.wire_bytes == 64 * TOKEN_BYTES * PLANES
            assert len(check_runs(pattern.runs, pattern.source_bytes, pattern.target_bytes)) == len(pattern.runs)
            assert not (pattern.runs % np.uint64(pattern.run_bytes)).any()

    def test_blocks_are_not_in_order(self) -> None:
        for pattern in patterns(256):
            sources, targets = (np.diff(pattern.runs[:, side].astype(np.int64)) for side in range(2))
            assert (sources < 0).any()
            # Plans have their blocks in the order of target memory, but not one behind the other.
            assert (targets > pattern.run_bytes).any() if isinstance(pattern.posted, Plan) else (targets < 0).any()

    def test_half_a_block_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--tokens is 24"):
            patterns(24)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_without_torch_the_cuda_part_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"kvbaton\[cuda\]"):
        measure_cuda(16, 1, quiet)

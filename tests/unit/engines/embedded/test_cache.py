"""The paged cache: one region, described truthfully by its layout."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engines.embedded.cache import POISON_BYTE, PagedCache
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.errors import ConfigError

CONFIG = ModelConfig(
    architecture="llama",
    layers=3,
    hidden_size=64,
    heads=6,
    kv_heads=2,
    head_size=16,
    ffn_size=128,
    vocab_size=259,
    context_tokens=4096,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    tied_head=False,
)


def test_region_is_zero_page_aligned_and_whole() -> None:
    cache = PagedCache(CONFIG, 5, 8)
    assert cache.data.shape == (3, 2, 5, 8, 2, 16)
    assert cache.data.flags.c_contiguous
    assert not cache.data.any()
    assert cache.data.ctypes.data % mmap.PAGESIZE == 0
    assert cache.memory.nbytes == cache.data.nbytes == cache.layout().region_bytes


def test_memory_is_the_data() -> None:
    cache = PagedCache(CONFIG, 2, 4)
    cache.memory[0:4] = np.float32(2.5).tobytes()
    assert cache.data[0, 0, 0, 0, 0, 0] == 2.5


@given(st.integers(0, 2), st.integers(0, 1), st.integers(0, 4), st.integers(0, 7), st.integers(0, 1))
def test_layout_finds_every_head(layer: int, plane: int, block: int, token: int, head: int) -> None:
    cache = PagedCache(CONFIG, 5, 8)
    cache.data[layer, plane, block, token, head] = np.arange(16)
    (group,) = cache.layout().groups
    own = group.planes[plane]
    offset = own.layer_offsets[layer] + block * own.block_stride + token * own.token_stride + head * own.head_stride
    found = np.frombuffer(cache.memory[offset : offset + own.head_bytes], np.float32)
    assert np.array_equal(found, np.arange(16))


def test_layout_describes_the_group() -> None:
    (group,) = PagedCache(CONFIG, 5, 8).layout().groups
    assert (group.kind, group.layers, group.blocks, group.block_tokens) == ("full", (0, 1, 2), 5, 8)
    assert [plane.name for plane in group.planes] == ["k", "v"]
    for plane in group.planes:
        assert (plane.dtype, plane.head_count, plane.total_heads, plane.head_size) == ("float32", 2, 2, 16)
        assert plane.is_channel_contiguous
        assert plane.token_stride == plane.token_bytes, "any span of tokens is one run"


def test_poison_fills_exactly_the_blocks_named() -> None:
    cache = PagedCache(CONFIG, 5, 8)
    cache.poison([1, 4])
    raw = cache.data.view(np.uint8)
    assert (raw[:, :, [1, 4]] == POISON_BYTE).all()
    assert not raw[:, :, [0, 2, 3]].any()
    assert np.isfinite(cache.data).all()


def test_poison_of_nothing_changes_nothing() -> None:
    cache = PagedCache(CONFIG, 2, 8)
    cache.poison([])
    assert not cache.data.any()


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 16), (4, 0), (-1, 16)])
def test_a_cache_without_room_is_refused(blocks: int, block_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"{blocks} blocks of {block_tokens}"):
        PagedCache(CONFIG, blocks, block_tokens)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="use fewer blocks"):
        PagedCache(CONFIG, 1 << 48, 16)


def test_the_memory_is_there_from_the_start() -> None:
    """Where the kernel can do it; the first hand-off must not pay for the first touch of its blocks."""
    before = _resident_bytes()
    cache = PagedCache(CONFIG, 4096, 16)
    if not _can_populate():
        pytest.skip("this kernel cannot populate memory ahead")
    assert _resident_bytes() - before > cache.data.nbytes * 0.9
    assert not cache.data[:, :, ::512].any()


def _can_populate() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        try:
            page.madvise(23)
        except OSError:
            return False
    return True


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

"""State beside the cache, on SGLang's own pools with real tensors: sliding windows, Mamba states, the sparse index.

SGLang's build for CPUs runs no model that has them. Each check hands a prompt over between two instances; its control moves no
bytes, and must find the state missing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, compute_mamba_state_slice_byte_blocks, setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MambaPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sides import PAGE, PORTS, Side, wait

from kvbaton.core.plan import pair_layouts, plan_runs
from kvbaton.engines.sglang.pool import CachePool, PoolFacts, read_pool
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE
from kvbaton.errors import ConfigError

ROOM, WINDOW, INDEX_PAGE = 11, 6, 64


def windows() -> Any:
    return SWAKVPool(128, 64, PAGE, torch.float32, 2, 8, [0, 2], [1], "cpu")


def states(tp: int = 1, heads: int = 2) -> Any:
    groups = [16, 16, 32]
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=groups[2],
        n_groups=8,
        num_heads=8,
        head_dim=4,
        state_size=groups[0] // 8,
        conv_kernel=4,
        conv_shard_groups=groups,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    params = Mamba2CacheParams(shape=shape, layers=[0, 2], dtype=dtype)
    mamba = MambaPool(size=8, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu")
    return HybridLinearKVPool(64, torch.float32, PAGE, heads, 8, [1, 3], "cpu", mamba)


def sparse() -> Any:
    return DSATokenToKVPool(
        size=512,
        page_size=INDEX_PAGE,
        kv_lora_rank=16,
        dtype=torch.float32,
        qk_rope_head_dim=8,
        layer_num=3,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=24,
        index_buf_size=512,
        skip_topk_layers=[False, True, False],
    )


def everything(pool: Any) -> list[Any]:
    """Every tensor of a pool, the first axis being the slot or the page."""
    if isinstance(pool, SWAKVPool):
        inner = (pool.full_kv_pool, pool.swa_kv_pool)
        return [tensor for each in inner for tensor in (*each.k_buffer, *each.v_buffer)]
    if isinstance(pool, HybridLinearKVPool):
        cache = pool.mamba_pool.mamba_cache
        layers = [tensor[layer] for tensor in (*cache.conv, cache.temporal) for layer in range(2)]
        return [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer, *layers]
    return [*pool.kv_buffer, *(tensor for tensor in pool.index_k_with_scale_buffer if tensor.shape[0])]


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in everything(pool):
        if tensor.dtype is torch.uint8:
            tensor.copy_(torch.randint(1, 255, tensor.shape, dtype=torch.uint8, generator=generator))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


class Pair:
    """Two instances over pools of one kind, and one request."""

    def __init__(self, make: Callable[[], Any], tokens: int, page: int = PAGE, cached: int = 0, drops: bool = False) -> None:
        self.tokens, self.page, self.cached = tokens, page, cached
        common = {"page": page, "window": WINDOW}
        self.prefill = Side("prefill", make(), PORTS.pick(), **common)
        os.environ[CONFIG_VARIABLE] = '{"drop_writes": true}' if drops else ""
        try:
            self.decode = Side("decode", make(), 0, **common)
        finally:
            os.environ[CONFIG_VARIABLE] = ""
        fill(self.prefill.pool, 5)
        prompt, port = list(range(tokens)), self.prefill.port
        self.sender = self.prefill.make(KVClassType.SENDER, ROOM, prompt, port)
        self.receiver = self.decode.make(KVClassType.RECEIVER, ROOM, prompt, port)
        self.receiver.init(0)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def hand_over(self, source: list[int], target: list[int], sent: Any, allocated: Any) -> tuple[int, int]:
        """Pages of both sides from the first token on, and SGLang's state indices; the final states of both."""
        cached_pages = self.cached // self.page
        self.receiver.send_metadata(np.array(target[cached_pages:], np.int32), 3, [allocated], self.cached)
        if wait(self.sender, KVPoll.WaitingForInput, KVPoll.Failed) == KVPoll.WaitingForInput:
            self.sender.init(len(source), 1)
            self.prefill.metadata.bootstrap_room[1, 0] = ROOM
            for chunk in range(0, len(source) - 1, 2):
                self.sender.send(np.array(source[chunk : chunk + 2][: len(source) - 1 - chunk], np.int32), None)
            self.sender.send(np.array(source[-1:], np.int32), [sent])
        ends = KVPoll.Success, KVPoll.Failed
        return wait(self.sender, *ends), wait(self.receiver, *ends)

    def equal_slots(self, source: Any, target: Any, pages: tuple[list[int], list[int]], first: int) -> bool:
        """Whether every token from `first` on is the same in two tensors of slots."""
        places = [
            [ids[token // self.page] * self.page + token % self.page for token in range(first, self.tokens)] for ids in pages
        ]
        return bool(torch.equal(source[places[0]], target[places[1]]))


@contextmanager
def pair(*args: Any, **kwargs: Any) -> Iterator[Pair]:
    made = Pair(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def _windows(tokens: int, cached: int = 0, drops: bool = False) -> None:
    count, first = -(-tokens // PAGE), max(cached, max(0, tokens - WINDOW) // PAGE * PAGE)
    source, target = [9, 3, 7, 1, 12, 4][:count], [2, 5, 9, 11, 6, 8][:count]
    window = [4, 2, 9, 1, 3, 5][: count - max(0, tokens - WINDOW) // PAGE], [7, 1, 3, 2, 8, 4][: count - first // PAGE]
    with pair(windows, tokens, cached=cached, drops=drops) as made:
        assert made.hand_over(source, target, np.array(window[0]), np.array(window[1])) == (KVPoll.Success,) * 2
        full, windowed = (
            [(pool.full_kv_pool, pool.swa_kv_pool)[number] for pool in (made.prefill.pool, made.decode.pool)]
            for number in range(2)
        )
        for plane in ("k_buffer", "v_buffer"):
            ours, theirs = (getattr(each, plane)[0] for each in full)
            assert made.equal_slots(ours, theirs, (source, target), cached) != drops
            # SGLang's radix cache reads the page that the window begins in for shorter prompts: all of it has to be there.
            aligned = [[0] * (count - len(ids)) + list(ids) for ids in window]
            for layer in range(2):
                ours, theirs = (getattr(each, plane)[layer] for each in windowed)
                assert made.equal_slots(ours, theirs, (aligned[0], aligned[1]), first) != drops
                if not drops:
                    others = [page for page in range(theirs.shape[0] // PAGE) if page not in window[1]]
                    assert not theirs.view(-1, PAGE, *theirs.shape[1:])[others].any(), "a page of no window was written"


def pages_of_a_sliding_window_are_handed_over_whole() -> None:
    _windows(21)
    _windows(5)


def pages_of_a_sliding_window_that_are_cached_are_left_out() -> None:
    _windows(21, cached=16)


def the_check_of_sliding_windows_notices_bytes_that_never_moved() -> None:
    _windows(21, drops=True)


def _states(drops: bool) -> None:
    with pair(states, 10, drops=drops) as made:
        pages = [7, 3, 1], [2, 5, 9]
        assert made.hand_over(*pages, [np.array(5)], [np.array(2)]) == (KVPoll.Success,) * 2
        for place, (ours, theirs) in enumerate(zip(everything(made.prefill.pool), everything(made.decode.pool), strict=True)):
            is_same = made.equal_slots(ours, theirs, pages, 0) if place < 4 else torch.equal(ours[5], theirs[2])
            assert is_same != drops, place
            if place >= 4 and not drops:
                assert not theirs[[0, 1, 3, 4, 5, 6, 7, 8]].any(), "another slot was written"


def states_of_mamba_are_handed_over() -> None:
    _states(drops=False)


def the_check_of_mamba_states_notices_bytes_that_never_moved() -> None:
    _states(drops=True)


def _sparse(drops: bool) -> None:
    pages = [3, 1, 5], [2, 6, 4]
    with pair(sparse, 150, INDEX_PAGE, drops=drops) as made:
        assert made.hand_over(*pages, np.array(pages[0]), np.array(pages[1])) == (KVPoll.Success,) * 2
        for place, (ours, theirs) in enumerate(zip(everything(made.prefill.pool), everything(made.decode.pool), strict=True)):
            is_same = made.equal_slots(ours, theirs, pages, 0) if place < 3 else torch.equal(ours[pages[0]], theirs[pages[1]])
            assert is_same != drops, place


def the_index_of_sparse_attention_is_handed_over() -> None:
    _sparse(drops=False)


def the_check_of_the_sparse_index_notices_bytes_that_never_moved() -> None:
    _sparse(drops=True)


def state_indices_that_do_not_fit_fail_one_request_by_name() -> None:
    wrong: list[tuple[Callable[[], Any], int, int, Any, Any, str]] = [
        (states, 10, PAGE, [np.array(5), np.array(6)], [np.array(2)], "2 indices of the states of linear attention"),
        (states, 10, PAGE, [np.array(5)], [], "0 indices of the states of linear attention"),
        (states, 10, PAGE, [np.array(99)], [np.array(2)], "index 99 of the states of linear attention is outside"),
        (windows, 10, PAGE, np.array([4]), np.array([7, 1]), "1 indices of the pool of sliding windows for 10 tokens, not 2"),
        (windows, 10, PAGE, np.array([4, 2]), np.array([7, -1]), "index -1 of the pool of sliding windows is outside"),
        (sparse, 150, INDEX_PAGE, np.array([3, 1, 7]), np.array([2, 6, 4]), "not the pages of the cache"),
    ]
    for make, tokens, page, sent, allocated, named in wrong:
        pages = ([3, 1, 5], [2, 6, 4]) if make is sparse else ([7, 3, 1], [2, 5, 9])
        with pair(make, tokens, page) as made:
            assert KVPoll.Failed in made.hand_over(*pages, sent, allocated)
            reasons = f"{made.sender.half.reason} {made.receiver.half.reason}"
            assert named in reasons, reasons


def _described(pool: Any, tp: int, rank: int, heads: int = 8) -> CachePool:
    arguments = SimpleNamespace()
    setup_state_kv_args(arguments, pool)
    return read_pool(pool, PoolFacts(PAGE, 0, heads, tp, rank), arguments)


def _bytes(address: int, size: int) -> Any:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


def mamba_states_are_cut_as_sglang_cuts_them() -> None:
    """Unequal ranks in both directions: the runs of a plan put every byte where SGLang's own slicing puts it."""
    for source_tp, target_tp in ((1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)):
        sources, ours = (
            [states(source_tp, 8 // source_tp) for _ in range(source_tp)],
            [states(target_tp, 8 // target_tp) for _ in range(target_tp)],
        )
        theirs = [states(target_tp, 8 // target_tp) for _ in range(target_tp)]
        for seed, pool in enumerate(sources):
            fill(pool, seed)
        for here, source in enumerate(sources):
            for there, (target, expected) in enumerate(zip(ours, theirs, strict=True)):
                _copy_as_planned(_described(source, source_tp, here), _described(target, target_tp, there))
                if here * target_tp // source_tp == there or there * source_tp // target_tp == here:
                    _copy_as_sglang(source, expected, source_tp, target_tp, here, there)
        for target, expected in zip(ours, theirs, strict=True):
            for one, other in zip(everything(target)[4:], everything(expected)[4:], strict=True):
                assert other[2].any()
                assert torch.equal(one, other), (source_tp, target_tp)


def _copy_as_planned(source: CachePool, target: CachePool) -> None:
    runs = plan_runs(pair_layouts(source.layout, target.layout), ((7, 3, 1), (5,)), ((2, 5, 9), (2,)), 0, 10)
    read, written = (np.frombuffer(each.region.view, np.uint8) for each in (source, target))
    for offset, at, count in runs.tolist():
        written[at : at + count] = read[offset : offset + count]


def _copy_as_sglang(source: Any, target: Any, source_tp: int, target_tp: int, here: int, there: int) -> None:
    read, written = (SimpleNamespace(), SimpleNamespace())
    setup_state_kv_args(read, source)
    setup_state_kv_args(written, target)
    for entry in range(len(read.state_data_ptrs[0])):
        sizes = [each.state_item_lens[0][entry] for each in (read, written)]
        blocks = compute_mamba_state_slice_byte_blocks(
            src_item_len=sizes[0],
            dst_item_len=sizes[1],
            src_dim=read.state_dim_per_tensor[0][entry],
            dst_dim=written.state_dim_per_tensor[0][entry],
            outer_count=read.state_slice_outer_counts[0][entry],
            src_attn_tp_size=source_tp,
            dst_attn_tp_size=target_tp,
            dst_tp_rank_in_group=there,
            local_tp_rank_in_group=here,
            conv_shard_groups=read.state_conv_shard_groups[0][entry],
        )
        places = read.state_data_ptrs[0][entry] + 5 * sizes[0], written.state_data_ptrs[0][entry] + 2 * sizes[1]
        for offset, at, count in blocks:
            _bytes(places[1] + at, count)[:] = _bytes(places[0] + offset, count)


def windows_and_states_that_do_not_fit_are_refused_by_name() -> None:
    one = _described_windows(PAGE)
    for other, named in ((_described_windows(2 * PAGE), "block_tokens"), (_described(states(), 1, 0, heads=2), "kind")):
        refusal = ""
        try:
            pair_layouts(one.layout, other.layout)
        except Exception as error:  # noqa: BLE001 - its text is checked
            refusal = str(error)
        assert named in refusal, refusal
    whole = states(2, 4)
    whole.mamba_pool.conv_shard_groups = None
    try:
        pair_layouts(_described(whole, 2, 0).layout, _described(states(1, 8), 1, 0).layout)
    except Exception as error:  # noqa: BLE001 - its text is checked
        refusal = str(error)
    assert "total_heads" in refusal, refusal
    try:
        read_pool(windows(), PoolFacts(PAGE, 0, 2), SimpleNamespace(state_types=["swa"]))
    except ConfigError as error:
        refusal = str(error)
    assert "sliding_window_size" in refusal, refusal


def _described_windows(page: int) -> CachePool:
    pool = SWAKVPool(128, 64, page, torch.float32, 2, 8, [0, 2], [1], "cpu")
    arguments = SimpleNamespace()
    setup_state_kv_args(arguments, pool)
    return read_pool(pool, PoolFacts(page, 0, 2, window=WINDOW), arguments)


STATE_CHECKS = (
    pages_of_a_sliding_window_are_handed_over_whole,
    pages_of_a_sliding_window_that_are_cached_are_left_out,
    the_check_of_sliding_windows_notices_bytes_that_never_moved,
    states_of_mamba_are_handed_over,
    the_check_of_mamba_states_notices_bytes_that_never_moved,
    the_index_of_sparse_attention_is_handed_over,
    the_check_of_the_sparse_index_notices_bytes_that_never_moved,
    state_indices_that_do_not_fit_fail_one_request_by_name,
    mamba_states_are_cut_as_sglang_cuts_them,
    windows_and_states_that_do_not_fit_are_refused_by_name,
)

"""What users of SGLang's own backends report as broken, each as a hand-off over real agents and memory."""

from __future__ import annotations

import pytest
from sglang_instances import Instance, Request, instances, wait_for
from test_sglang_instances import PROMPT, ROOM, TOKENS, hand_over

from kvbaton.engines.sglang.halves import Poll
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker

PAGES = [1 + 2 * page for page in range(-(-TOKENS // 4))]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "heads"),
    [(4, 2, 8), (2, 4, 8), (4, 2, 2), (2, 4, 2), (4, 1, 2), (1, 4, 2), (2, 8, 4), (3, 2, 6)],
)
def test_heads_arrive_right_also_where_ranks_share_or_split_them(prefill_tp: int, decode_tp: int, heads: int) -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, prefill_tp, total_heads=heads)
    decode = Instance("decode", ports, decode_tp, total_heads=heads, poison=True)
    with instances(prefill, decode):
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        assert decode.problems(PAGES, TOKENS, seed=3) == []


def test_heads_that_cannot_be_divided_are_refused_at_start_with_both_numbers() -> None:
    with (
        pytest.raises(ConfigError, match="6 heads cannot be divided for tp4"),
        instances(Instance("prefill", PortPicker(), 4, total_heads=6)),
    ):
        pass


def test_another_dtype_is_refused_at_the_handshake_with_both_values() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, dtype="float16")
    with instances(prefill, decode):
        target = Request(decode, ROOM, PROMPT, prefill.address)
        wait_for(target, Poll.FAILED)
        assert "float16" in target.reason
        assert "float32" in target.reason


@pytest.mark.parametrize("chunk_pages", [1, 3, 4])
def test_chunks_of_any_size_make_one_cache(chunk_pages: int) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports, poison=True)
    with instances(prefill, decode):
        assert hand_over(prefill, decode, chunk_pages=chunk_pages).poll() is Poll.SUCCESS
        assert decode.problems(PAGES, TOKENS, seed=3) == []


def test_a_grant_that_comes_before_its_prefill_waits_for_it() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        target = Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        target.poll()
        source = Request(prefill, ROOM, PROMPT)
        wait_for(source, Poll.WAITING)
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_page_outside_the_pool_fails_by_name_and_nothing_is_written_there(side: str) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4 if side == "source" else 999], 2, 0)
        wait_for(source, Poll.WAITING, Poll.FAILED)
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8 if side == "target" else 999])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert "999" in target.reason
        assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED


def test_a_prefill_restarted_on_the_same_address_costs_at_most_one_request_and_no_restart_of_decode() -> None:
    """Here both are in one process, so the old one does not look dead: its successor is noticed when it answers."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        assert hand_over(prefill, decode, room=1).poll() is Poll.SUCCESS
        prefill.close()
        again = Instance("prefill", ports)
        again.control_port = prefill.control_port
        with instances(again):
            first = Request(decode, 2, PROMPT, again.address)
            first.each("ready")
            first.each("allocated", [1, 2, 3, 4], 2, 0)
            wait_for(first, Poll.FAILED)
            assert "replaced" in first.reason
            assert hand_over(again, decode, room=3).poll() is Poll.SUCCESS


def test_a_decode_that_ends_gives_its_prefill_back_and_others_are_served() -> None:
    ports = PortPicker()
    prefill, ending, decode = (Instance(role, ports) for role in ("prefill", "decode", "decode"))
    with instances(prefill, ending, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(ending, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        wait_for(source, Poll.WAITING)
        source.each("begin", 4, 0)
        source.each("send", [5])
        ending.close()
        assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert hand_over(prefill, decode, room=ROOM + 1).poll() is Poll.SUCCESS


def test_a_room_is_used_again_right_after_its_end_and_at_two_prefills_at_once() -> None:
    ports = PortPicker()
    one, other, decode = Instance("prefill", ports), Instance("prefill", ports), Instance("decode", ports)
    with instances(one, other, decode):
        for _ in range(3):
            assert hand_over(one, decode).poll() is Poll.SUCCESS
        waiting = Request(one, ROOM, PROMPT)
        assert hand_over(other, decode).poll() is Poll.SUCCESS
        assert waiting.poll() is Poll.BOOTSTRAPPING

"""Hand-offs between SGLang's halves over real agents and memory: TP on either end, GQA and MLA, page sizes, bad peers."""

from __future__ import annotations

import time

import numpy as np
import pytest
from sglang_instances import HEADS, ArrayPool, Instance, Request, instances, wait_for, wait_until_over

from kvbaton.core.handoff import Mode
from kvbaton.core.topology import Shape
from kvbaton.engines.sglang.halves import Poll, SourceHalf
from kvbaton.engines.sglang.instance import replica_halves
from kvbaton.engines.sglang.pool import PoolFacts, read_pool
from kvbaton.errors import LocalError
from kvbaton.launch.ports import PortPicker

TOKENS = 14
PROMPT = tuple(range(TOKENS))
ABORTED = PROMPT[::-1]
"""The prompt of a request that is aborted: a notice of that may come late, and is about the requests of this prompt."""
ROOM = 4711


def hand_over(prefill: Instance, decode: Instance, *, room: int = ROOM, chunk_pages: int = 2, cached_pages: int = 0) -> Request:
    """A whole hand-off; returns the decode request in its last state."""
    source_pages = [9 - page for page in range(-(-TOKENS // prefill.page))]
    target_pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
    prefill.fill(source_pages, TOKENS, seed=3)
    source, target = Request(prefill, room, PROMPT), Request(decode, room, PROMPT, prefill.address)
    target.each("ready")
    target.each("allocated", target_pages[cached_pages:], 2, cached_pages * decode.page)
    for rows in prefill.rows:
        rows["output_ids"][1].view(np.int32)[0] = 123
    wait_for(source, Poll.WAITING, Poll.FAILED, meanwhile=target)
    source.each("begin", len(source_pages), 1)
    for first in range(0, len(source_pages), chunk_pages):
        source.each("send", source_pages[first : first + chunk_pages])
    wait_for(source, Poll.SUCCESS, Poll.FAILED)
    wait_for(target, Poll.SUCCESS, Poll.FAILED)
    return target


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "is_mla"),
    [(1, 1, False), (2, 1, False), (1, 2, False), (2, 2, False), (4, 2, False), (2, 1, True), (1, 2, True)],
)
def test_every_head_of_every_token_arrives_on_the_right_rank(mode: Mode, prefill_tp: int, decode_tp: int, is_mla: bool) -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, prefill_tp, is_mla=is_mla, mode=mode)
    decode = Instance("decode", ports, decode_tp, is_mla=is_mla, mode=mode, poison=True)
    with instances(prefill, decode):
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert decode.problems(pages, TOKENS, seed=3) == []
        for rows in decode.rows:
            assert rows["output_ids"][2].view(np.int32)[0] == 123
            assert rows["bootstrap_room"][2].view(np.uint64)[0] == ROOM
        untouched = [slot for page in (0, 2, 4) for slot in range(page * decode.page, (page + 1) * decode.page)]
        for pool in decode.pools:
            assert not any(tensor.array[untouched].any() for tensors in pool.planes for tensor in tensors)


def test_an_instance_registers_its_true_size(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Shape] = []
    monkeypatch.setattr("kvbaton.engines.sglang.instance.announcer_of", lambda **facts: registered.append(facts["shape"]))
    with instances(Instance("prefill", PortPicker(), 2)):
        assert registered == [Shape(tp=2)], "once, by the leader"


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1)])
def test_every_stage_of_a_pipelined_prefill_is_handed_over(mode: Mode, prefill_tp: int, decode_tp: int) -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, prefill_tp, pp=2, mode=mode)
    decode = Instance("decode", ports, decode_tp, mode=mode, poison=True)
    with instances(prefill, decode):
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert decode.problems(pages, TOKENS, seed=3) == []


def test_a_later_stage_of_a_pipeline_may_be_behind_the_first_one() -> None:
    """Its scheduler takes requests and results from the stage before it: everything may be over when it begins."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, pp=2), Instance("decode", ports, poison=True)
    with instances(prefill, decode):
        pages = [1, 2, 3, 4]
        prefill.fill(pages, TOKENS, seed=3)
        first, last = (rank.halves for rank in prefill.ranks)
        source, target = SourceHalf(first, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [5, 6, 7, 8], 2, 0)
        _poll_until(source, Poll.WAITING)
        source.begin(4, 1)
        source.send(pages[:3])
        last.take_events()
        late = SourceHalf(last, ROOM, PROMPT)
        assert late.poll() in (Poll.BOOTSTRAPPING, Poll.WAITING)
        late.begin(4, 1)
        late.send(pages[:3])
        source.send(pages[3:])
        _poll_until(source, Poll.SUCCESS)
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, target.reason
        assert late.poll() is Poll.WAITING
        late.send(pages[3:])
        assert late.poll() is Poll.SUCCESS
        assert decode.problems([5, 6, 7, 8], TOKENS, seed=3) == []
        assert not first.live
        assert not last.live


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(("prefill_tp", "prefill_pp", "decode_tp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_every_stage_of_a_pipelined_decode_gets_its_layers(
    mode: Mode, prefill_tp: int, prefill_pp: int, decode_tp: int
) -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, prefill_tp, pp=prefill_pp, mode=mode)
    decode = Instance("decode", ports, decode_tp, pp=2, mode=mode, poison=True)
    with instances(prefill, decode):
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert decode.problems(pages, TOKENS, seed=3) == []
        for rows in decode.rows:
            assert rows["bootstrap_room"][2].view(np.uint64)[0] == ROOM


def test_pages_are_granted_when_the_last_stage_of_decode_has_them() -> None:
    """Until then a later stage may still use them for a request that the first one has ended."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, pp=2)
    with instances(prefill, decode):
        early, other = Request(prefill, ROOM, PROMPT), Request(prefill, ROOM + 1, PROMPT)
        target = Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.halves[0].allocated([1, 2, 3, 4], 2, 0)
        later = Request(decode, ROOM + 1, PROMPT, prefill.address)
        later.each("ready")
        later.each("allocated", [5, 6, 7, 8], 3, 0)
        wait_for(other, Poll.WAITING, meanwhile=later)
        assert early.poll() is Poll.BOOTSTRAPPING, "a grant that was asked for later has come, and this one has not"
        target.halves[1].allocated([1, 2, 3, 4], 2, 0)
        wait_for(early, Poll.WAITING, meanwhile=target)


def test_stages_with_other_pages_are_refused_by_name_and_the_room_is_free_again() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, pp=2, poison=True)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        for half, pages in zip(target.halves, ([1, 2, 3, 4], [1, 2, 4, 3]), strict=True):
            half.allocated(pages, 2, 0)
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert "rank 0 has the blocks ((1, 2, 3, 4),)" in target.reason
        assert "rank 1 ((1, 2, 4, 3),)" in target.reason
        wait_for(source, Poll.FAILED)
        wait_until_over(source, target)
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS


def test_what_a_later_stage_has_allocated_for_an_aborted_request_is_not_that_of_the_next_one() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, pp=2, poison=True)
    with instances(prefill, decode):
        aborted = Request(decode, ROOM, ABORTED, prefill.address)
        aborted.each("ready")
        aborted.halves[0].allocated([5, 6, 7, 8], 2, 0)
        aborted.halves[0].abort()
        aborted.halves[1].allocated([5, 6, 7, 8], 2, 0)
        wait_for(aborted, Poll.FAILED)
        wait_until_over(aborted)
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_room_may_be_used_again_while_another_rank_has_not_taken_the_end_of_its_last_request(tp: int, pp: int) -> None:
    """SGLang ends a request on all ranks when one reports its failure: the others may poll no more before the next one."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, tp, pp=pp), Instance("decode", ports, tp, pp=pp, poison=True)
    with instances(prefill, decode):
        for _ in range(3):
            source, target = Request(prefill, ROOM, ABORTED), Request(decode, ROOM, ABORTED, prefill.address)
            source.each("abort")
            target.each("abort")
            for half in (source.halves[0], target.halves[0]):
                _poll_until(half, Poll.FAILED)
                _poll_until_over(half)
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert decode.problems(pages, TOKENS, seed=3) == []
        for instance in (prefill, decode):
            for rank in instance.ranks:
                rank.halves.take_events()
                assert not rank.halves.live


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_whether_a_room_is_in_use_is_decided_once_for_all_ranks(tp: int, pp: int) -> None:
    """Another rank may have taken the end of the first request when the second one comes there, and the leader has not."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, tp, pp=pp), Instance("decode", ports, tp, pp=pp)
    with instances(prefill, decode):
        first, second = Request(prefill, ROOM, PROMPT), Request(prefill, ROOM, PROMPT)
        assert [half.state for half in second.halves] == [Poll.FAILED, Poll.BOOTSTRAPPING]
        assert wait_for(second, Poll.FAILED) is Poll.FAILED
        wait_until_over(second)
        for half in second.halves:
            assert f"room {ROOM} is in use" in half.reason
        assert first.poll() is Poll.BOOTSTRAPPING
        first.each("abort")
        wait_until_over(first)
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS


def test_a_room_may_be_used_again_at_once_on_a_rank_that_has_a_copy_of_the_cache() -> None:
    halves = replica_halves(read_pool(ArrayPool(HEADS), PoolFacts(4, 0, HEADS)))
    first = SourceHalf(halves, ROOM, PROMPT, request="first")
    first.fail("another rank of this instance failed")
    second = SourceHalf(halves, ROOM, PROMPT, request="second")
    assert second.poll() is Poll.WAITING
    assert list(halves.live.values()) == [second]


def test_a_request_that_the_leaders_agents_refuse_is_left_on_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, 2)

    def refuse(*_: object) -> None:
        raise LocalError("the agents have stopped")

    with instances(prefill):
        monkeypatch.setattr(prefill.ranks[0].port, "expect_target", refuse)
        source = Request(prefill, ROOM, PROMPT)
        wait_until_over(source)
        assert "the agents have stopped" in source.halves[1].reason
        assert not any(rank.halves.live for rank in prefill.ranks)


def _poll_until_over(half: SourceHalf) -> None:
    until = time.monotonic() + 20
    while not half.is_over:
        assert time.monotonic() < until, "the agents report no end"
        half.poll()
        time.sleep(0.002)


def _poll_until(half: SourceHalf, state: Poll) -> None:
    until = time.monotonic() + 20
    while half.poll() is not state:
        assert time.monotonic() < until, f"still {half.state}: {half.reason}"
        time.sleep(0.002)


def test_the_check_notices_writes_that_are_dropped() -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, 2, drop_writes=True)
    decode = Instance("decode", ports, 1, poison=True, drop_writes=True)
    with instances(prefill, decode):
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert len(decode.problems(pages, TOKENS, seed=3)) == 2 * 2 * TOKENS


@pytest.mark.parametrize(("source_page", "target_page"), [(4, 2), (2, 4), (1, 4)])
def test_page_sizes_may_differ(source_page: int, target_page: int) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, page=source_page), Instance("decode", ports, page=target_page, poison=True)
    with instances(prefill, decode):
        prefill_pages = list(range(3, 3 + -(-TOKENS // source_page)))
        pages = list(range(1, 1 + -(-TOKENS // target_page)))
        prefill.fill(prefill_pages, TOKENS, seed=5)
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", pages, 2, 0)
        wait_for(source, Poll.WAITING)
        source.each("begin", len(prefill_pages), 0)
        source.each("send", prefill_pages)
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, target.reason
        assert decode.problems(pages, TOKENS, seed=5) == []


def test_pages_that_decode_has_cached_are_left_out() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, poison=True)
    with instances(prefill, decode):
        assert hand_over(prefill, decode, cached_pages=2).poll() is Poll.SUCCESS
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert decode.problems(pages, TOKENS, seed=3, first=2 * decode.page) == []
        assert not decode.pools[0].k_buffer[0].array[4:8].any()


def test_a_prefill_that_is_aborted_fails_its_decode_request_at_once() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        wait_for(source, Poll.WAITING)
        source.each("abort")
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert not decode.ranks[0].halves.live


def test_a_decode_request_that_is_aborted_fails_its_prefill_at_once() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports, 2)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        wait_for(source, Poll.WAITING)
        source.each("begin", 4, 0)
        source.each("send", [5])
        target.each("abort")
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("other", "named"),
    [({"model": "two"}, "two"), ({"is_mla": True}, "mla"), ({"dtype": "float16"}, "float16")],
    ids=["another model", "another kind of cache", "another dtype"],
)
def test_a_peer_that_does_not_fit_is_refused_by_name_on_both_sides(other: dict[str, object], named: str, first: str) -> None:
    """Whichever instance gets its request first: the prefill must not wait for a target that has been refused."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, **other)  # type: ignore[arg-type]
    with instances(prefill, decode):
        source = Request(prefill, ROOM, PROMPT) if first == "prefill" else None
        target = Request(decode, ROOM, PROMPT, prefill.address)
        assert wait_for(target, Poll.FAILED) is Poll.FAILED
        assert named in target.reason
        source = source or Request(prefill, ROOM, PROMPT)
        assert wait_for(source, Poll.FAILED) is Poll.FAILED
        assert named in source.reason


def test_another_prompt_under_the_same_room_is_refused_and_the_right_one_is_served() -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports)
    stranger, decode = Instance("decode", ports), Instance("decode", ports)
    with instances(prefill, stranger, decode):
        source = Request(prefill, ROOM, PROMPT)
        wrong = Request(stranger, ROOM, (9, 9, 9), prefill.address)
        wrong.each("ready")
        wrong.each("allocated", [1], 2, 0)
        assert wait_for(wrong, Poll.FAILED) is Poll.FAILED
        right = Request(decode, ROOM, PROMPT, prefill.address)
        right.each("ready")
        right.each("allocated", [1, 2, 3, 4], 2, 0)
        wait_for(source, Poll.WAITING)
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8])
        assert wait_for(right, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS


def test_rooms_by_the_hundred_leave_nothing_behind() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        for room in range(1, 101):
            assert hand_over(prefill, decode, room=room).poll() is Poll.SUCCESS
        assert not prefill.ranks[0].halves.live
        assert not decode.ranks[0].halves.live


@pytest.mark.parametrize(("source_mode", "target_mode"), [(Mode.PUSH, Mode.PULL), (Mode.PULL, Mode.PUSH)])
def test_the_mode_is_that_of_the_prefill(source_mode: Mode, target_mode: Mode) -> None:
    """It decides alone when pages are announced; a decode instance of the other mode is served all the same."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, mode=source_mode), Instance("decode", ports, mode=target_mode, poison=True)
    with instances(prefill, decode):
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS
        pages = [1 + 2 * page for page in range(-(-TOKENS // decode.page))]
        assert decode.problems(pages, TOKENS, seed=3) == []

"""Policies: what each prefers, that loads and caps count, that every pair and every rank is used, and that modes do not mix."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.discovery.messages import Dispatch, InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance, Registry
from kvbaton.router.board import Board, Loads
from kvbaton.router.choosing import Busy, Chooser, Missing, SeatRequest, Seats
from kvbaton.router.policy import (
    Candidate,
    InstancePair,
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    RouteRequest,
    missing_sides,
    pools_of,
)
from kvbaton.router.settings import RouterSettings
from kvbaton.router.slots import SlotBook, instance_key

NOTHING = RouteRequest({})
ANY_SEAT = SeatRequest(NOTHING)
READ, WRITE = TransferMode.READ, TransferMode.WRITE
PREFILL, DECODE = InstanceType.PREFILL, InstanceType.DECODE


def registrations(kind: InstanceType, count: int, mode: TransferMode = READ, **more: Any) -> list[Registration]:
    made = []
    for number in range(count):
        port = 9000 + number + 100 * (mode is WRITE) + 1000 * (kind is DECODE)
        address = f"host:127.0.0.1,handshake:{port},notify:{port}"
        made.append(Registration(type=kind, http_address=f"h:{port}", zmq_address=address, transfer_mode=mode, **more))
    return made


def instances(kind: InstanceType, count: int, mode: TransferMode = READ) -> list[Instance]:
    return [Instance(message, 0.0, 0.0) for message in registrations(kind, count, mode)]


def chooser(*live: Registration, **settings: Any) -> Chooser:
    registry = Registry(expire_after_s=1e9)
    for message in live:
        registry.register(message, 0.0)
    board = Board(1, 64)
    return Chooser(RouterSettings(**settings), registry, Loads(board, 0, 0), SlotBook(64))


def pair_of(found: Seats | Missing | Busy) -> InstancePair:
    assert isinstance(found, Seats)
    return found.pair


def take(chooser: Chooser, count: int, request: SeatRequest = ANY_SEAT) -> list[InstancePair]:
    """Choose, and leave the seats at once."""
    pairs = []
    for _ in range(count):
        seats = chooser.choose(request, 0.0)
        assert isinstance(seats, Seats)
        seats.leave_prefill()
        seats.leave_decode()
        pairs.append(seats.pair)
    return pairs


def addresses(pair: InstancePair) -> tuple[str, str]:
    assert pair.prefill is not None
    return pair.prefill.http_address, pair.decode.http_address


POLICIES = ("round_robin", "least_loaded")


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(POLICIES))
def test_every_pair_meets_and_shares_are_equal(prefills: int, decodes: int, policy: str) -> None:
    live = registrations(PREFILL, prefills) + registrations(DECODE, decodes)
    pairs = [addresses(p) for p in take(chooser(*live, prefill_policy=policy, decode_policy=policy), prefills * decodes * 6)]
    assert len(set(pairs)) == prefills * decodes
    assert max(Counter(p for p, _ in pairs).values()) - min(Counter(p for p, _ in pairs).values()) <= 1
    assert max(Counter(d for _, d in pairs).values()) - min(Counter(d for _, d in pairs).values()) <= 6


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_modes_do_not_mix_and_none_is_left_out(p_read: int, d_read: int, p_write: int, d_write: int) -> None:
    live = registrations(PREFILL, p_read) + registrations(DECODE, d_read)
    live += registrations(PREFILL, p_write, WRITE) + registrations(DECODE, d_write, WRITE)
    pairs = take(chooser(*live), 60)
    assert all(p.prefill is not None and p.prefill.transfer_mode is p.decode.transfer_mode is p.transfer_mode for p in pairs)
    assert {p.transfer_mode for p in pairs} == {READ, WRITE}


def test_instances_of_two_ways_to_dispatch_are_no_pair() -> None:
    live = registrations(PREFILL, 1, WRITE, dispatch=Dispatch.BOOTSTRAP) + registrations(DECODE, 1, WRITE)
    assert isinstance(chooser(*live).choose(ANY_SEAT, 0.0), Missing)


def test_a_mode_with_one_side_only_is_left_out() -> None:
    live = instances(PREFILL, 2, WRITE) + instances(PREFILL, 1) + instances(DECODE, 1)
    (pool,) = pools_of(live)
    assert pool.transfer_mode is READ
    assert missing_sides(live) == ""


def test_what_is_missing_is_named() -> None:
    assert missing_sides([]).startswith("no live prefill and no live decode instance")
    assert missing_sides(instances(DECODE, 1)).startswith("no live prefill instance")
    apart = missing_sides(instances(PREFILL, 1) + instances(DECODE, 1, WRITE))
    assert "prefill instances hand over by pull (READ) and decode instances by push (WRITE)" in apart


def candidates(*loads: int) -> list[Candidate]:
    return [Candidate(instance, n, loads.__getitem__) for n, instance in enumerate(instances(PREFILL, len(loads)))]


def test_least_loaded_prefers_the_one_with_the_least() -> None:
    assert {LeastLoaded().choose(NOTHING, candidates(3, 1, 2), turn).slot for turn in range(9)} == {1}
    assert {LeastLoaded().choose(NOTHING, candidates(1, 2, 1), turn).slot for turn in range(9)} == {0, 2}
    assert {RoundRobin().choose(NOTHING, candidates(3, 1, 2), turn).slot for turn in range(9)} == {0, 1, 2}


@pytest.mark.parametrize("in_turn", [True, False], ids=["ends in turn", "ends at random"])
@pytest.mark.parametrize("at_once", range(1, 9))
@pytest.mark.parametrize("count", range(2, 7))
def test_no_instance_is_skipped_however_many_requests_are_there_at_once(count: int, at_once: int, in_turn: bool) -> None:
    """Requests that all take as long end in the order they came: turns must not fall into step with that."""
    live = [*registrations(PREFILL, count), *registrations(DECODE, 1, dp_size=count)]
    one, generator = chooser(*live), random.Random(7)
    here: list[Seats] = []
    sources, ranks = Counter[str](), Counter[int | None]()
    for _ in range(100 * count):
        if len(here) == at_once:
            gone = here.pop(0 if in_turn else generator.randrange(at_once))
            gone.leave_prefill()
            gone.leave_decode()
        found = one.choose(ANY_SEAT, 0.0)
        assert isinstance(found, Seats)
        here.append(found)
        sources[addresses(found.pair)[0]] += 1
        ranks[found.pair.decode_dp_rank] += 1
    assert len(sources) == len(ranks) == count
    assert min(*sources.values(), *ranks.values()) >= 60


def asking(prompt: str, session: str | None = None) -> RouteRequest:
    return RouteRequest({"prompt": msgspec.Raw(msgspec.json.encode(prompt))}, session)


def chosen(policy: PrefixAffinity, requests: Sequence[RouteRequest], loads: Sequence[int]) -> list[int]:
    return [policy.choose(request, candidates(*loads), turn).slot for turn, request in enumerate(requests)]


def test_equal_prompts_stick_and_different_ones_spread() -> None:
    policy = PrefixAffinity()
    assert len(set(chosen(policy, [asking("the same " * 100)] * 10, [0, 0, 0]))) == 1
    assert len(set(chosen(policy, [asking(f"{n} another " * 100) for n in range(50)], [0, 0, 0]))) == 3


def test_a_longer_conversation_goes_where_its_beginning_went() -> None:
    """Two conversations share a beginning; each goes on where it was, although the shared part points to one place."""
    policy, shared = PrefixAffinity(), "system prompt " * 80
    first = chosen(policy, [asking(shared + "a" * 2000)], [0, 0])[0]
    loads = [50 if first == 0 else 0, 50 if first == 1 else 0]
    other = chosen(policy, [asking(shared + "b" * 2000)], loads)[0]
    assert other != first, "an overloaded instance is left alone"
    assert chosen(policy, [asking(shared + "a" * 2000 + "more")], [0, 0]) == [first]
    assert chosen(policy, [asking(shared + "b" * 2000 + "more")], [0, 0]) == [other]


def test_a_session_sticks_whatever_it_asks() -> None:
    policy, generator = PrefixAffinity(), random.Random(1)
    for session in ("one", "two", "three"):
        requests = [asking(str(generator.random()) * 100, session) for _ in range(10)]
        assert len(set(chosen(policy, requests, [0, 0, 0]))) == 1


def test_affinity_gives_way_to_load_and_its_memory_is_bounded() -> None:
    policy = PrefixAffinity(known_pieces=100)
    here = chosen(policy, [asking("x" * 600)], [0, 0])[0]
    assert chosen(policy, [asking("x" * 600)], [20 if here == 0 else 0, 20 if here == 1 else 0]) != [here]
    chosen(policy, [asking(f"{n}" * 5000) for n in range(100)], [0, 0])
    assert len(policy._served) <= 100


def test_separate_routers_agree_on_where_a_prompt_goes() -> None:
    """Processes and routers that know nothing of each other send an unknown prompt to the same place."""
    requests = [asking(f"{n} hello" * 200) for n in range(20)]
    assert [chosen(PrefixAffinity(), [r], [0, 0, 0]) for r in requests] == [
        chosen(PrefixAffinity(), [r], [0, 0, 0]) for r in requests
    ]


def test_every_data_parallel_rank_is_used_alike() -> None:
    """Also when the number of ranks divides the number of instances."""
    live = registrations(PREFILL, 2, WRITE, dp_size=2) + registrations(DECODE, 2, WRITE, dp_size=4)
    pairs = take(chooser(*live), 64)
    sources = Counter((p.prefill.http_address, p.prefill_dp_rank) for p in pairs if p.prefill is not None)
    targets = Counter((p.decode.http_address, p.decode_dp_rank) for p in pairs)
    assert len(sources) == 4
    assert len(targets) == 8
    held = chooser(*live)
    seats = [held.choose(ANY_SEAT, 0.0) for _ in range(64)]
    loads = Counter((pair_of(s).decode.http_address, pair_of(s).decode_dp_rank) for s in seats)
    assert set(loads.values()) == {8}


def test_data_parallel_ranks_that_register_themselves_are_instances_of_their_own() -> None:
    """They share an HTTP address; each has a control address of its own, and a request names the rank."""
    (first,) = registrations(DECODE, 1, WRITE, dp_size=2, dp_rank=0, incarnation="one")
    address = "host:127.0.0.1,handshake:7777,notify:7777"
    second = msgspec.structs.replace(first, dp_rank=1, zmq_address=address, incarnation="two")
    pairs = take(chooser(*registrations(PREFILL, 1, WRITE), first, second), 8)
    targets = Counter((p.decode.http_address, p.decode.zmq_address, p.decode_dp_rank) for p in pairs)
    assert targets == {(first.http_address, first.zmq_address, 0): 4, (first.http_address, address, 1): 4}


def test_a_rank_with_an_api_of_its_own_is_not_named() -> None:
    """vLLM refuses a rank in the header there: its API has one engine, whichever rank that is."""
    live = [
        msgspec.structs.replace(each, dp_rank=rank, dp_size=2, dp_size_local=1)
        for rank, each in enumerate(registrations(DECODE, 2, WRITE))
    ]
    pairs = take(chooser(*registrations(PREFILL, 1, WRITE), *live), 8)
    assert {(p.decode.http_address, p.decode_dp_rank) for p in pairs} == {(each.http_address, None) for each in live}


def test_a_rank_is_only_named_where_there_is_a_choice() -> None:
    (pair,) = take(chooser(*registrations(PREFILL, 1), *registrations(DECODE, 1)), 1)
    assert (pair.prefill_dp_rank, pair.decode_dp_rank) == (None, None)


@pytest.mark.parametrize(("cap", "side"), [("max_per_prefill", PREFILL), ("max_per_decode", DECODE)])
def test_caps_are_strict_and_seats_come_back_once(cap: str, side: InstanceType) -> None:
    one = chooser(*registrations(PREFILL, 2), *registrations(DECODE, 2), **{cap: 3})
    seats = [one.choose(ANY_SEAT, 0.0) for _ in range(6)]
    assert all(isinstance(s, Seats) for s in seats)
    assert one.choose(ANY_SEAT, 0.0) == Busy(side)
    first = seats[0]
    assert isinstance(first, Seats)
    for _ in range(3):
        first.leave_prefill()
        first.leave_decode()
    assert isinstance(one.choose(ANY_SEAT, 0.0), Seats)
    assert one.choose(ANY_SEAT, 0.0) == Busy(side)


def test_a_busy_prefill_pool_may_be_bypassed() -> None:
    live = registrations(PREFILL, 1) + registrations(DECODE, 1)
    one = chooser(*live, max_per_prefill=1, local_prefill_when_busy=True)
    assert pair_of(one.choose(ANY_SEAT, 0.0)).prefill is not None
    assert pair_of(one.choose(ANY_SEAT, 0.0)).prefill is None


def two_modes(**settings: Any) -> Chooser:
    return chooser(*(one for kind in InstanceType for mode in TransferMode for one in registrations(kind, 1, mode)), **settings)


def test_what_one_mode_cannot_serve_the_other_does() -> None:
    """A request whose instances of one mode have failed, or are full or out of reach, must not end or wait because of that."""
    failed = SeatRequest(NOTHING, avoid={"h:9000"})
    assert {pair.transfer_mode for pair in take(two_modes(), 8, failed)} == {WRITE}
    one = two_modes(max_per_prefill=1)
    assert {pair_of(one.choose(ANY_SEAT, 0.0)).transfer_mode for _ in range(2)} == {READ, WRITE}
    assert [one.choose(ANY_SEAT, 0.0) for _ in range(2)] == [Busy(PREFILL)] * 2
    assert one.choose(failed, 0.0) == Busy(PREFILL)
    registry = Registry(expire_after_s=1e9)
    one = Chooser(RouterSettings(), registry, Loads(Board(1, 64), 0, 0), SlotBook(64))
    for kind in InstanceType:
        for mode in TransferMode:
            registry.register(registrations(kind, 1, mode)[0], 0.0)
    lost = registry.find("h:10100", DECODE)
    assert lost is not None
    registry.report_lost(lost, 0.0)
    assert {pair.transfer_mode for pair in take(one, 8)} == {READ}


def test_only_decode_instances_that_can_prefill_are_left_to_do_it() -> None:
    """One of SGLang's cannot: it would wait for a source."""
    live = [*registrations(PREFILL, 1, dispatch=Dispatch.BOOTSTRAP), *registrations(DECODE, 1, dispatch=Dispatch.BOOTSTRAP)]
    one = chooser(*live, max_per_prefill=1, local_prefill_when_busy=True)
    assert pair_of(one.choose(SeatRequest(NOTHING, local=True), 0.0)).prefill is not None
    assert one.choose(ANY_SEAT, 0.0) == Busy(PREFILL)


def test_an_instance_that_failed_is_avoided_and_one_that_may_have_had_a_part_in_it_is_tried_last() -> None:
    one = chooser(*registrations(PREFILL, 2), *registrations(DECODE, 2))
    for pair in take(one, 8, SeatRequest(NOTHING, avoid={"h:9000"}, shun={"h:10000"})):
        assert addresses(pair) == ("h:9001", "h:10001")
    for pair in take(one, 8, SeatRequest(NOTHING, shun={"h:9000", "h:9001"})):
        assert addresses(pair)[0] in ("h:9000", "h:9001")
    assert one.choose(SeatRequest(NOTHING, avoid={"h:9000", "h:9001"}), 0.0) == Missing("no other instance is left to try")


def test_an_unreachable_instance_is_put_aside_for_longer_each_time_unless_no_other_is_left() -> None:
    registry = Registry(expire_after_s=1e9)
    for message in registrations(PREFILL, 2) + registrations(DECODE, 1):
        registry.register(message, 0.0)
    one = Chooser(RouterSettings(), registry, Loads(Board(1, 64), 0, 0), SlotBook(64))
    lost = registry.live(0.0, PREFILL)[0]
    assert registry.report_lost(lost, 0.0) == 0.5
    assert registry.report_lost(lost, 0.1) is None
    assert {addresses(p)[0] for p in take(one, 8)} == {"h:9001"}
    assert [registry.report_lost(lost, now) for now in (10.0, 20.0, 40.0, 60.0, 80.0)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    registry.report_reached(lost)
    assert {addresses(p)[0] for p in take(one, 8)} == {"h:9000", "h:9001"}
    for instance in registry.live(0.0, PREFILL):
        registry.report_lost(instance, 0.0)
    assert {addresses(p)[0] for p in take(one, 8)} == {"h:9000", "h:9001"}


def test_slots_come_back_when_an_instance_is_gone_for_good() -> None:
    book = SlotBook(3)
    keys = [instance_key(message) for message in registrations(PREFILL, 4)]
    assert [book.slot_of(key) for key in keys] == [0, 1, 2, 2]
    book.keep(keys[1:], 0.0, lambda _: 0)
    book.keep(keys[1:], 59.0, lambda _: 0)
    assert book.slot_of(("new", "P", "")) == 2
    book.keep(keys[1:], 61.0, lambda slot: slot == 0)
    book.keep(keys[1:], 62.0, lambda _: 0)
    assert book.slot_of(("newer", "P", "")) == 0

"""Two drivers over real sockets: bytes that arrive, garbage that does no harm, peers that are not admitted, a clean end."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driver_rig import (
    AUX,
    TOKENS,
    Intruder,
    Side,
    ask,
    is_equal,
    is_poison,
    key_of,
    landed,
    offer,
    pair,
    start_handoff,
)

from kvbaton.agent import driver as driver_module
from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import Granted, Landed, SourceEnded, TargetEnded
from kvbaton.agent.rank_orders import CopyId, RankOrder, SpansSummed
from kvbaton.agent.rank_sets import LocalRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Trust, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Executor, Integrity, Mode, Outcome, Span
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
)
from kvbaton.core.timeline import Side as TimelineSide
from kvbaton.launch.ports import check_port_free
from kvbaton.transport.faulty import Faults
from kvbaton.transport.memory import MemoryHub
from watching import wait_until

SECRET, OTHER_SECRET = b"the key of this cluster", b"the key of another cluster"
KEY, OTHER_KEY = Trust(SECRET), Trust(OTHER_SECRET)
NO_KEY = Trust()


@pytest.fixture(scope="module", params=[NO_KEY, KEY], ids=["without a key", "with a key"])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    with pair(request.param, request.param) as (source, target):
        yield source, target


_names = iter(f"check-{number}" for number in range(10_000))


def assert_works(source: Side, target: Side) -> None:
    """The next hand-off is right, and no error of ours was met on the way."""
    landed(source, target, next(_names))
    assert is_equal(source, target)
    assert (source.driver.errors_total, target.driver.errors_total) == (0, 0)


# Hand-offs.


def test_a_handoff_moves_the_right_bytes(sides: tuple[Side, Side]) -> None:
    source, target = sides
    event = landed(source, target, "first")
    assert is_equal(source, target)
    assert event.aux == AUX
    assert event.stats.bytes_moved == event.stats.bytes_planned == TOKENS * 2 * 2 * 8 * 4
    assert source.wait_for(SourceEnded, key_of("first")).outcome is Outcome.DELIVERED


def test_what_it_took_is_counted() -> None:
    with pair() as (source, target):
        for name in ("one", "two"):
            landed(source, target, name)
            source.wait_for(SourceEnded, key_of(name))
        counted = target.driver.stats()
        assert (counted.peers, counted.handshakes_total, counted.failures_total) == (1, 1, {})
        assert counted.runs_total >= 2
        assert (source.driver.stats().peers, source.driver.stats().handshakes_total) == (1, 1)


def test_without_the_writes_the_bytes_are_wrong() -> None:
    with pair(faults=Faults(drop_writes=True)) as (source, target):
        landed(source, target, "dropped")
        assert not is_equal(source, target)
        assert is_poison(target.cache.data)


def test_many_handoffs_at_once(sides: tuple[Side, Side]) -> None:
    source, target = sides
    names = [f"many-{number}" for number in range(50)]
    for name in names:
        start_handoff(source, target, name)
    for name in names:
        target.wait_for(Landed, key_of(name))
        assert source.wait_for(SourceEnded, key_of(name)).outcome is Outcome.DELIVERED


def test_a_failed_copy_fails_both_sides_and_the_next_one_works() -> None:
    with pair(faults=Faults(fail_after=0)) as (source, target):
        start_handoff(source, target, "failing")
        assert "failed on command" in target.wait_for(TargetEnded, key_of("failing")).reason
        assert source.wait_for(SourceEnded, key_of("failing")).outcome is Outcome.FAILED
        assert target.driver.stats().failures_total == {("target", "copy failed"): 1}
        assert source.driver.stats().failures_total == {("source", "stop asked"): 1}
        target.transport.set_faults(Faults())
        assert_works(source, target)


# Garbage on the port.

GARBAGE: dict[str, tuple[bytes, ...]] = {
    "nothing": (b"",),
    "random bytes": (random.Random(1).randbytes(100),),
    "a frame of 10 MB": (bytes(10_000_000),),
    "msgpack that is no map": (b"\xc0",),
    "an empty map": (b"\x80",),
    "a map without an end": (b"\xdf\xff\xff\xff\xff",),
    "deep nesting": (b"\x91" * 100_000,),
    "HTTP": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",),
    "a seal and nothing in it": (b"\xc1KVB\x01" + bytes(32),),
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_dropped_counted_and_harmless(sides: tuple[Side, Side], frames: tuple[bytes, ...]) -> None:
    source, target = sides
    before = source.driver.stats().dropped_total.total()
    with Intruder() as intruder:
        intruder.dial(source.driver.address)
        for _ in range(3):
            intruder.send(*frames)
        wait_until(lambda: source.driver.stats().dropped_total.total() >= before + 3, "three frames are counted")
    assert_works(source, target)


@pytest.mark.parametrize("count", [2, 3, 100])
def test_a_wrong_number_of_frames_is_dropped_and_counted(sides: tuple[Side, Side], count: int) -> None:
    source, target = sides
    # With a key, a peer without one does not get as far as a message.
    cause = "wrong number of frames" if source.trust.key is None else "not authenticated"
    before = source.driver.stats().dropped_total[cause]
    with Intruder() as intruder:
        intruder.dial(source.driver.address)
        intruder.send(*([b"x"] * count))
        source.wait_dropped(cause, before + 1)
    assert_works(source, target)


@pytest.mark.parametrize(
    "text", [b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n", random.Random(2).randbytes(5000), b"\xff" * 64]
)
def test_what_is_not_even_zmq_is_harmless(sides: tuple[Side, Side], text: bytes) -> None:
    source, target = sides
    with socket.create_connection(("127.0.0.1", source.driver.address.handshake), timeout=10) as connection:
        connection.sendall(text)
        assert_works(source, target)


def test_a_frame_beyond_all_limits_ends_that_connection_only(sides: tuple[Side, Side]) -> None:
    source, target = sides
    with Intruder() as intruder:
        intruder.dial(source.driver.address)
        intruder.send(bytes(40_000_000))
        assert_works(source, target)


def test_a_flood_of_garbage_is_harmless(sides: tuple[Side, Side]) -> None:
    source, target = sides
    before = source.driver.stats().dropped_total.total()
    with Intruder() as intruder:
        intruder.dial(source.driver.address)
        for number in range(2000):
            intruder.send(b"%d" % number)
        assert_works(source, target)
        # With a key each connection is counted, not what it would have sent.
        counted = 2000 if source.trust.key is None else 2
        wait_until(lambda: source.driver.stats().dropped_total.total() >= before + counted, "all of it is counted")


# Well-formed messages that make no sense.

KEY_OF_NOTHING = key_of("never seen")
SENSELESS: list[Message] = [
    Grant(KEY_OF_NOTHING, 1, "prompt", Mode.PULL, Executor.TARGET_READS, 1, (), 0, 1),
    Grant(KEY_OF_NOTHING, 2, "prompt", Mode.PUSH, Executor.SOURCE_WRITES, 1, ((10**9, 10**18),), 0, 2),
    Announced(KEY_OF_NOTHING, 1, 1, ((10**9,),), (Span(0, 0, 5, 0, 2),)),
    Prefilled(KEY_OF_NOTHING, 1, 1, 1, 10, 0.0),
    AuxSent(KEY_OF_NOTHING, 1, AUX),
    Retracted(KEY_OF_NOTHING, 1, 9),
    ConfirmAsk(KEY_OF_NOTHING, 1, 1),
    Confirmed(KEY_OF_NOTHING, 1, 1, 1),
    Release(KEY_OF_NOTHING, 1),
    Stop(KEY_OF_NOTHING, 1, Outcome.DELIVERED),
    Stopped(KEY_OF_NOTHING, 1),
    Over(KEY_OF_NOTHING, 1, Outcome.FAILED),
    Heartbeat(True, ((KEY_OF_NOTHING, 1),)),
    Heartbeat(False, ((KEY_OF_NOTHING, 1),)),
    Refused("no", KEY_OF_NOTHING, 1),
    Refused("no"),
]


def test_messages_of_an_unknown_peer_are_dropped_and_counted() -> None:
    with pair() as (source, target), Intruder() as intruder:
        intruder.dial(source.driver.address)
        for message in SENSELESS:
            intruder.send_message(message, source.incarnation)
        source.wait_dropped("from an unknown peer", len(SENSELESS) - 1)
        assert_works(source, target)


def test_messages_for_an_earlier_incarnation_are_dropped_and_counted() -> None:
    with pair() as (source, target), Intruder() as intruder:
        intruder.dial(source.driver.address)
        for message in SENSELESS:
            intruder.send_message(message, "an earlier one")
        source.wait_dropped("for an earlier incarnation", len(SENSELESS))
        assert_works(source, target)


def test_messages_of_a_known_peer_in_the_wrong_state_are_harmless() -> None:
    with pair() as (source, target), Intruder() as intruder:
        intruder.dial(source.driver.address)
        intruder.send_message(Hello(intruder.card_like(target.card), wants_answer=True))
        intruder.receive_message(Hello)
        for message in SENSELESS:
            intruder.send_message(message, source.incarnation)
            intruder.send_message(message, source.incarnation)
        intruder.send_message(Hello(intruder.card_like(target.card), wants_answer=True))
        intruder.receive_message(Hello)
        assert_works(source, target)


def test_a_card_that_does_not_fit_is_refused_with_the_field() -> None:
    with pair() as (source, target), Intruder() as intruder:
        intruder.dial(source.driver.address)
        card = intruder.card_like(target.card)
        intruder.send_message(Hello(msgspec.structs.replace(card, fingerprint="beef"), wants_answer=True))
        refused = intruder.receive_message(Refused).message
        assert isinstance(refused, Refused)
        assert "f00d" in refused.reason
        assert "beef" in refused.reason
        assert_works(source, target)


BAD_BLOCKS: dict[str, tuple[tuple[int, ...], ...]] = {
    "beyond the last block": ((1, 2, 8),),
    "absurd": ((1, 2, 2**62),),
    "too few": ((1, 2),),
    "of too many groups": ((1, 2, 3), (1, 2, 3)),
    "of no group": (),
}


@pytest.mark.parametrize("blocks", BAD_BLOCKS.values(), ids=BAD_BLOCKS.keys())
def test_blocks_that_do_not_exist_fail_the_request_and_nothing_else(blocks: tuple[tuple[int, ...], ...]) -> None:
    with pair() as (source, target), Intruder() as intruder:
        target.cache.poison(range(target.cache.blocks))
        intruder.listen()
        ask(target, intruder.address, "bad blocks")
        intruder.receive_message(Hello)
        intruder.send_message(Hello(intruder.card_like(source.card), wants_answer=False), target.incarnation)
        grant = intruder.receive_message(Grant).message
        assert isinstance(grant, Grant)
        whole = Span(0, 0, TOKENS, 0, 2)
        intruder.send_message(Announced(grant.key, grant.grant, 1, blocks, (whole,)), target.incarnation)
        ended = target.wait_for(TargetEnded, grant.key)
        assert ended.outcome is Outcome.FAILED
        assert "source block" in ended.reason
        assert is_poison(target.cache.data)
        assert_works(source, target)


def test_negative_blocks_are_no_message_and_harmless() -> None:
    with pair() as (source, target), Intruder() as intruder:
        intruder.dial(source.driver.address)
        intruder.send_message(Hello(intruder.card_like(target.card), wants_answer=True))
        intruder.receive_message(Hello)
        intruder.send_message(Announced(KEY_OF_NOTHING, 1, 1, ((1, 2, -1),), ()), source.incarnation)
        source.wait_dropped("not a message", 1)
        assert_works(source, target)


# Who is admitted.

REFUSED: dict[str, tuple[Trust, Trust, str]] = {
    "another key": (KEY, OTHER_KEY, "wrong key"),
    "no key at the target": (KEY, NO_KEY, "no key here"),
    "no key at the source": (NO_KEY, KEY, "not authenticated"),
    "the target is not on the source's list": (
        parse_trust(allow=["10.0.0.0/8"]),
        NO_KEY,
        "127.0.0.1 is not on the allow-list here",
    ),
    "the source is not on the target's list": (
        NO_KEY,
        parse_trust(allow=["10.0.0.0/8"]),
        "127.0.0.1 is not on the allow-list (10.0.0.0/8)",
    ),
}


@pytest.mark.parametrize(("source_trust", "target_trust", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_peer_that_is_not_admitted_gets_nothing_but_the_reason(source_trust: Trust, target_trust: Trust, text: str) -> None:
    with pair(source_trust, target_trust) as (source, target):
        start_handoff(source, target, "not admitted")
        ended = target.wait_for(TargetEnded, key_of("not admitted"))
        assert ended.outcome is Outcome.FAILED
        assert text in ended.reason
        assert is_poison(target.cache.data)
        assert not any(secret.decode() in ended.reason for secret in (SECRET, OTHER_SECRET))
        assert (source.driver.errors_total, target.driver.errors_total) == (0, 0)


@pytest.mark.parametrize("intruder_key", [None, OTHER_SECRET], ids=["no key", "another key"])
def test_an_intruder_is_dropped_counted_and_harmless(intruder_key: bytes | None) -> None:
    with pair(KEY, KEY) as (source, target), Intruder(intruder_key) as intruder:
        for number, message in enumerate(SENSELESS, 1):
            intruder.dial(source.driver.address)
            intruder.send_message(message, source.incarnation, sender=target.incarnation)
            source.wait_dropped("not authenticated", number)
        assert_works(source, target)


def test_a_holder_of_the_key_sends_as_one_incarnation_per_connection() -> None:
    with pair(KEY, KEY) as (source, target), Intruder(SECRET) as intruder:
        landed(source, target, "before")
        intruder.dial(source.driver.address)
        intruder.send_message(Hello(intruder.card_like(target.card), wants_answer=True))
        intruder.receive_message(Hello)
        for message in SENSELESS:
            intruder.send_message(message, source.incarnation, sender=target.incarnation)
        source.wait_dropped("another incarnation on the same connection", len(SENSELESS))
        assert_works(source, target)


def test_an_allow_list_admits_the_listed() -> None:
    trust = parse_trust(allow=["127.0.0.0/8"])
    with pair(trust, trust) as (source, target):
        assert_works(source, target)


@pytest.mark.parametrize("host", ["10.255.255.1", "example.com", "0.0.0.0", "2130706433"])  # noqa: S104
def test_an_address_in_a_request_is_a_hint_and_no_right(host: str) -> None:
    with pair() as (source, target):
        ask(target, ControlAddress.of(host, 9), "elsewhere")
        ended = target.wait_for(TargetEnded, key_of("elsewhere"))
        assert ended.reason.startswith(f"{host} is not this machine")
        assert target.driver.stats().dropped_total["not dialled"] > 0
        assert_works(source, target)


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE.keys())
def test_an_address_where_another_program_answers_fails_the_request_at_once(answer: tuple[bytes, ...]) -> None:
    with pair() as (source, target), Intruder() as intruder:
        intruder.listen()
        ask(target, intruder.address, "another")
        intruder.receive()
        intruder.send(*answer)
        ended = target.wait_for(TargetEnded, key_of("another"))
        assert f"what answers at {intruder.address} is no peer of ours" in ended.reason
        assert_works(source, target)


# The thread.


def test_close_leaves_no_thread_no_socket_and_no_port() -> None:
    threads, files = set(threading.enumerate()), _open_files()
    with pair(KEY, KEY) as (source, target):
        landed(source, target, "the only one")
        ports = [side.driver.address.handshake for side in (source, target)]
        start_handoff(source, target, "in the middle")
    source.driver.close()
    assert set(threading.enumerate()) <= threads
    assert _open_files() <= files
    for port in ports:
        check_port_free("127.0.0.1", port, "--control-port")


def test_a_driver_that_was_never_started_closes_too() -> None:
    files = _open_files()
    Side(MemoryHub()).driver.close()
    assert _open_files() <= files


def test_the_other_side_is_notified_when_one_closes() -> None:
    hub = MemoryHub()
    with Side(hub) as source:
        with Side(hub) as target:
            landed(source, target, "before")
            ask(target, source.driver.address, "for nothing")
            source.driver.expect_target(key_of("for nothing"), "prompt")
            target.driver.expect_target(key_of("back"), "prompt")
            ask(source, target.driver.address, "back")
            wait_until(lambda: "Granted" in str(target.events), "the target knows who waits for it")
        ended = source.wait_for(TargetEnded, key_of("back"))
        assert "the instance is stopping" in ended.reason


def test_the_engine_is_woken_as_soon_as_a_turn_has_brought_something(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs a while to get up, and what is left of the turn, and what it sends, need not come first."""
    waited: list[int] = []
    for side in sides:
        driver, tick = side.driver, side.driver._tick_if_due

        def look(*args: Any, driver: Driver = driver, tick: Callable[..., None] = tick) -> None:
            waited.append(len(driver._events))
            tick(*args)

        monkeypatch.setattr(driver, "_tick_if_due", look)
    for mode in Mode:
        landed(*sides, f"woken {mode}", mode)
    assert len(waited) > 4
    assert not any(waited)


@pytest.mark.parametrize("settings", [DEFAULT_HANDOFF, HandoffSettings(integrity=Integrity.FULL)], ids=["copies", "sums"])
def test_what_ranks_do_at_once_is_taken_before_the_frames_of_a_turn_leave(
    settings: HandoffSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows from it leaves with them, and the other side is woken once."""
    with pair(settings=settings) as sides:
        _check_that_reports_are_taken_first(sides, monkeypatch)


def _check_that_reports_are_taken_first(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = SpansSummed(CopyId(key_of("unknown"), 1, 1), TimelineSide.TARGET, 0, {})
    left: list[int] = []
    for side in sides:
        ranks, sockets = side.driver._ranks, side.driver._sockets
        assert isinstance(ranks, LocalRanks)
        assert isinstance(sockets, ControlSockets)

        def carry_out(order: RankOrder, ranks: LocalRanks = ranks, handle: Callable[..., None] = ranks.agent.handle) -> None:
            handle(order)
            ranks.reports.append(unknown)

        def leave(ranks: LocalRanks = ranks, send_waiting: Callable[[], None] = sockets._send_waiting) -> None:
            left.append(len(ranks.reports))
            send_waiting()

        monkeypatch.setattr(ranks.agent, "handle", carry_out)
        monkeypatch.setattr(sockets, "_send_waiting", leave)
    for mode in Mode:
        landed(*sides, f"at once {mode}", mode)
    source, target = sides
    source.driver.expect_target(key_of("granted first"), "prompt")
    ask(target, source.driver.address, "granted first", Mode.PUSH)
    source.wait_for(Granted, key_of("granted first"))
    offer(source, "granted first")
    target.wait_for(Landed, key_of("granted first"))
    late = sum(side.driver.stats().late_total["summed"] for side in sides)
    assert late >= len(Mode), "each copy was opened by an order"
    assert len(left) > 4
    assert not any(left)


def test_an_idle_driver_waits_and_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_IDLE_S", 0.05)
    with pair(KEY, KEY) as (source, target):
        landed(source, target, "and then nothing")
        for side in (source, target):
            waits = _recorded_waits(side, monkeypatch)
            wait_until(partial(_is_long, waits), "some turns")
            assert not any(was_ready for _, was_ready in waits[4:])
            assert all(timeout_s == 0.05 for timeout_s, _ in waits[4:])


def test_an_error_of_its_own_is_counted_and_the_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pair() as (source, target):

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as broken:
            broken.setattr(target.driver._coordinator, "allocated", fail)
            start_handoff(source, target, "buggy")
            wait_until(lambda: target.driver.errors_total > 0, "the error is counted")
        wait_until(lambda: "continues after an error of its own" in caplog.text, "it is logged")
        target.driver.cancel(key_of("buggy"))
        target.wait_for(TargetEnded, key_of("buggy"))
        landed(source, target, "the next")
        assert is_equal(source, target)


def test_a_wait_that_fails_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (source, target):

        def fail(*_: object) -> None:
            raise OverflowError("a port beyond all limits")

        with monkeypatch.context() as broken:
            broken.setattr(target.driver._sockets, "wait", fail)
            target.driver.cancel(key_of("unknown"))
            wait_until(lambda: target.driver.errors_total > 1, "the error is counted")
        landed(source, target, "the next")
        assert is_equal(source, target)


def _is_long(waits: list[tuple[float, bool]]) -> bool:
    return len(waits) > 8


def _recorded_waits(side: Side, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    waits: list[tuple[float, bool]] = []
    original: Callable[[float, list[int]], bool] = side.sockets.wait

    def wait(timeout_s: float, wakeups: list[int]) -> bool:
        was_ready = original(timeout_s, wakeups)
        waits.append((timeout_s, was_ready))
        return was_ready

    monkeypatch.setattr(side.sockets, "wait", wait)
    return waits


def _open_files() -> set[str]:
    """Every socket, pipe and event descriptor of this process, by number and kind."""
    links: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            links.add(f"{path.name} {path.readlink()}")
        except FileNotFoundError:
            continue
    return {link for link in links if "socket:" in link or "eventfd" in link or "eventpoll" in link or "pipe:" in link}

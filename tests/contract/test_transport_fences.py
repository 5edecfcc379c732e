"""The suite for transports whose writers can be fenced: what the owner of the memory has ended stores no byte any more.

Both ends are in this process: a fence has to hold when the call returns, which no message from another process could show.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from contract_kinds import FENCED_KINDS, params
from transport_peer import POISON, WRITER
from transport_rig import BIG, KIB, MIB, PATIENCE_S, make_runs, wait_until
from write_rig import Holder, Writer, WriteRig

from kvbaton.transport.base import Arrival, Endpoint, FencingTransport, LateWrites, ReportingTransport
from kvbaton.transport.tcp import TcpTransport, wire
from kvbaton.transport.tcp.gate import WriteGate, WriteStream
from kvbaton.transport.tcp.transport import TcpMover

pytestmark = pytest.mark.sampled(1)

WHOLE = make_runs((0, 0, BIG))


@pytest.fixture(params=params(FENCED_KINDS))
def rig(request: pytest.FixtureRequest) -> Iterator[WriteRig]:
    """A fresh rig of each kind, with both ends here."""
    made = WriteRig(request.param, in_process=True)
    try:
        yield made
    finally:
        made.take_down()


@pytest.fixture
def pair(rig: WriteRig) -> tuple[Writer, Holder]:
    """A writer and a holder of 1 MiB, connected."""
    return rig.pair(MIB)


def _owner(holder: Holder) -> TcpTransport:
    assert isinstance(holder.transport, TcpTransport)
    return holder.transport


def _arrivals(holder: Holder, count: int) -> list[Arrival]:
    """The next notices, as one gets them who waits at the descriptor."""
    owner = _owner(holder)
    found: list[Arrival] = []
    while len(found) < count:
        assert select.select([owner.wakeup_fd], [], [], PATIENCE_S)[0], f"{len(found)} of {count} notices came"
        owner.poll()
        found += owner.take_arrivals()
    return found


def test_declares_that_writers_can_be_fenced(pair: tuple[Writer, Holder]) -> None:
    _, holder = pair
    owner = _owner(holder)
    assert owner.late_writes is LateWrites.REVOCABLE
    assert isinstance(owner, FencingTransport)
    assert isinstance(owner, ReportingTransport)


# Fences.


def test_what_was_granted_before_a_fence_stores_nothing(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    _owner(holder).fence_peer(WRITER, 3)
    for epoch in (0, 2):
        completion = writer.write(holder, make_runs((0, 0, KIB)), epoch)
        assert completion.error.startswith("PeerRefused")
        assert f"granted in epoch {epoch}, and the writer was fenced up to epoch 3" in completion.error
    assert holder.holds(writer.content, make_runs())
    assert writer.write(holder, make_runs((0, 0, KIB)), 3).error == ""
    _owner(holder).fence_peer(WRITER, 2)  # a late one takes nothing back
    assert writer.write(holder, make_runs((0, 0, KIB)), 2).error.startswith("PeerRefused")


def test_a_fence_holds_in_every_later_session(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    owner, endpoint = _owner(holder), writer.transport.endpoint()
    assert writer.write(holder, make_runs((0, 0, KIB)), 1).error == ""
    owner.revoke(WRITER)
    owner.fence_peer(WRITER, 2)
    owner.connect(WRITER, endpoint)
    writer.transport.revoke(holder.peer)
    writer.transport.connect(holder.peer, holder.endpoint)
    holder.memory[:] = POISON
    assert "fenced up to epoch 2" in writer.write(holder, make_runs((0, 0, KIB)), 1).error
    assert holder.holds(writer.content, make_runs())
    assert writer.write(holder, make_runs((0, 0, KIB)), 2).error == ""


def test_memory_registered_anew_refuses_every_writer(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    _owner(holder).reset_region(5)
    assert "epoch 5" in writer.write(holder, make_runs((0, 0, KIB)), 4).error
    assert holder.holds(writer.content, make_runs())
    assert writer.write(holder, make_runs((0, 0, KIB)), 5).error == ""


def test_the_oldest_of_many_fences_becomes_one_for_all(pair: tuple[Writer, Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    writer, holder = pair
    monkeypatch.setattr("kvbaton.transport.tcp.gate._MAX_FENCES", 1)
    _owner(holder).fence_peer(WRITER, 3)
    _owner(holder).fence_peer(holder.peer, 1)
    assert writer.write(holder, make_runs((0, 0, KIB)), 2).error.startswith("PeerRefused")
    assert writer.write(holder, make_runs((0, 0, KIB)), 3).error == ""


_ENDS: dict[str, Callable[[TcpTransport], None]] = {
    "revoke": lambda owner: owner.revoke(WRITER),
    "fence": lambda owner: owner.fence_peer(WRITER, 2),
    "reset": lambda owner: owner.reset_region(2),
}


def _end_during_a_store(rig: WriteRig, end: str) -> tuple[Writer, Holder, bool]:
    """End the right of a write that is under way; whether a byte was stored after the call had returned."""
    for _ in range(20):
        writer, holder = rig.pair(BIG, slice_bytes=64 * KIB)
        writer.post(holder, WHOLE, None, 1, b"all of it")
        wait_until(lambda now=holder.memory: now[0] != POISON)  # type: ignore[misc]
        _ENDS[end](_owner(holder))
        holder.memory[:] = POISON
        completion = writer.wait()[0]
        if completion.error or not (holder.memory == POISON).all():
            return writer, holder, not (holder.memory == POISON).all()
    raise AssertionError("20 writes were over before their right could be ended")


@pytest.mark.parametrize("end", _ENDS)
def test_a_right_that_ends_during_a_store_stores_no_further_byte(rig: WriteRig, end: str) -> None:
    writer, holder, is_late = _end_during_a_store(rig, end)
    assert not is_late
    holder.assert_quiet()
    assert _owner(holder).take_arrivals() == []
    if end == "revoke":
        _owner(holder).connect(WRITER, writer.transport.endpoint())
    runs = make_runs((0, MIB, 2 * MIB))
    writer.transport.revoke(holder.peer)
    writer.transport.connect(holder.peer, holder.endpoint)
    assert writer.write(holder, runs, 2).error == ""
    assert holder.holds(writer.content, runs)


def test_negative_control_without_the_look_at_the_epoch_it_goes_red(rig: WriteRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteGate, "why_stale", lambda *_: "")
    writer, holder = rig.pair(MIB)
    _owner(holder).fence_peer(WRITER, 2)
    assert writer.write(holder, make_runs((0, 0, KIB)), 1).error == ""
    assert holder.holds(writer.content, make_runs((0, 0, KIB)))


def test_negative_control_without_the_look_at_the_session_it_goes_red(rig: WriteRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_held(gate: WriteGate, stream: WriteStream, holder: object) -> bool:
        del gate
        return stream.holder is holder

    monkeypatch.setattr(WriteGate, "is_held", is_held)
    assert _end_during_a_store(rig, "revoke")[2]


def test_a_writer_that_is_not_connected_waits_and_is_refused_by_name(rig: WriteRig) -> None:
    writer, holder = rig.writer(MIB), rig.holder(MIB)
    writer.transport.connect(holder.peer, holder.endpoint)
    waiting = writer.post(holder, make_runs((0, 0, KIB)))
    _owner(holder).connect(WRITER, writer.transport.endpoint())
    assert [(c.ticket, c.error) for c in writer.wait()] == [(waiting, "")]
    hasty, stranger = rig.writer(MIB, timeout_s=30), rig.holder(MIB, timeout_s=1.0)
    hasty.transport.connect(stranger.peer, stranger.endpoint)
    completion = hasty.write(stranger, make_runs((0, 0, KIB)))
    assert completion.error.startswith("PeerRefused")
    assert "does not know the writer" in completion.error
    assert stranger.holds(hasty.content, make_runs())


def test_a_frame_beyond_the_region_is_refused_by_its_owner(rig: WriteRig) -> None:
    """The writer was given a larger region than there is: its own check passes, and the owner's does not."""
    writer, holder = rig.writer(2 * MIB), rig.holder(MIB)
    holder.connect(writer.transport.endpoint())
    forged = Endpoint(holder.endpoint.transport, 2 * MIB, holder.endpoint.details)
    writer.transport.connect(holder.peer, forged)
    for runs in (make_runs((0, MIB - 7, 8)), make_runs((0, 0, 8), (8, MIB + KIB, 8)), make_runs((0, 0, 2 * MIB))):
        completion = writer.write(holder, runs)
        assert completion.error.startswith("RangeError")
        assert f"the target region of {MIB} bytes" in completion.error
    assert holder.holds(writer.content, make_runs())
    assert writer.write(holder, make_runs((0, 0, MIB))).error == ""


# Notices.


def test_a_notice_comes_once_when_every_byte_is_in(rig: WriteRig) -> None:
    writer, holder = rig.pair(4 * MIB, slice_bytes=100_001)
    for number in range(5):
        holder.memory[:] = POISON
        ticket = writer.post(holder, make_runs((0, 0, 4 * MIB)), None, 0, b"%d" % number)
        assert _arrivals(holder, 1) == [Arrival(WRITER, b"%d" % number, 4 * MIB)]
        assert np.array_equal(holder.memory, writer.content)
        assert [(c.ticket, c.error) for c in writer.wait()] == [(ticket, "")]
    assert _owner(holder).take_arrivals() == []


def test_a_notice_that_was_taken_leaves_nothing_to_wake_for(pair: tuple[Writer, Holder]) -> None:
    """Nothing of the owner completes meanwhile: its descriptor would stay readable, and its agent's thread run on and on."""
    writer, holder = pair
    writer.write(holder, make_runs((0, 0, KIB)), notice=b"done")
    owner = _owner(holder)
    assert _arrivals(holder, 1) == [Arrival(WRITER, b"done", KIB)]
    assert not select.select([owner.wakeup_fd], [], [], 0)[0]


def test_a_batch_without_bytes_has_its_notice(pair: tuple[Writer, Holder]) -> None:
    writer, holder = pair
    assert writer.write(holder, make_runs(), 0, b"nothing").error == ""
    assert _arrivals(holder, 1) == [Arrival(WRITER, b"nothing", 0)]


def test_a_batch_of_which_a_frame_was_refused_has_no_notice(rig: WriteRig) -> None:
    writer, holder = rig.writer(2 * MIB, slice_bytes=64 * KIB), rig.holder(MIB)
    holder.connect(writer.transport.endpoint())
    forged = Endpoint(holder.endpoint.transport, 2 * MIB, holder.endpoint.details)
    writer.transport.connect(holder.peer, forged)
    runs = make_runs((0, MIB, 64 * KIB), (64 * KIB, 0, 64 * KIB))
    assert writer.write(holder, runs, 0, b"part").error.startswith("RangeError")
    assert writer.write(holder, make_runs((0, 0, 8)), 0, b"next").error == ""
    assert _arrivals(holder, 1) == [Arrival(WRITER, b"next", 8)]


def test_notices_that_are_not_taken_are_bounded(rig: WriteRig) -> None:
    writer, holder = rig.writer(MIB), rig.holder(MIB, max_in_flight=3)
    rig.join(writer, holder)
    for _ in range(3):
        assert writer.write(holder, make_runs((0, 0, 8)), 0, b"one").error == ""
    completion = writer.write(holder, make_runs((0, 0, 8)), 0, b"one too many")
    assert "3 notices wait for the owner of the memory to take them, the limit" in completion.error
    assert len(_arrivals(holder, 3)) == 3
    assert writer.write(holder, make_runs((0, 0, 8)), 0, b"again").error == ""
    assert _arrivals(holder, 1) == [Arrival(WRITER, b"again", 8)]


# Streams that break, and streams beside each other.


class _Cutter:
    """A relay in front of a holder: it passes so many bytes of each connection on, and then cuts it; later ones pass whole.

    Of connections that are to be cut only so many bytes are passed back; that of number `held_up` waits there until `go_on`.
    """

    def __init__(
        self, endpoint: Endpoint, cut_after: list[int], *, back: int = 1 << 60, held_up: int = -1, hold_after: int = 0
    ) -> None:
        self._to = (str(endpoint.details["host"]), int(endpoint.details["port"]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._cut_after, self._back = cut_after, back
        self._held_up, self._hold_after = held_up, hold_after
        self.is_holding, self.go_on = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._ends: list[socket.socket] = []
        self._over: set[int] = set()
        self.passed: list[int] = []
        """Bytes of the writer, by connection."""
        details = endpoint.details | {"port": self._listener.getsockname()[1]}
        self.endpoint = Endpoint(endpoint.transport, endpoint.region_bytes, details)
        self._start(self._accept)

    def close(self) -> None:
        self.go_on.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut(*self._ends)
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                here = self._listener.accept()[0]
            except OSError:
                return
            there, number = socket.create_connection(self._to), len(self.passed)
            self._ends += (here, there)
            is_cut = number < len(self._cut_after)
            self.passed.append(0)
            self._start(self._pass, here, there, number, self._cut_after[number] if is_cut else 1 << 60)
            self._start(self._pass_back, there, here, number, self._back if is_cut else 1 << 60)

    def _pass(self, source: socket.socket, target: socket.socket, number: int, limit: int) -> None:
        passed = 0
        try:
            while passed < limit and (data := source.recv(min(64 * KIB, limit - passed))):
                if number == self._held_up and passed + len(data) > self._hold_after:
                    self.is_holding.set()
                    self.go_on.wait(PATIENCE_S)
                target.sendall(data)
                passed += len(data)
                self.passed[number] = passed
            if passed >= limit:
                # The holder takes what it was passed, and closes; then `_pass_back` cuts the other end, too.
                self._over.add(number)
                target.shutdown(socket.SHUT_WR)
                return
        except OSError:
            pass
        self._cut(source, target)

    def _pass_back(self, source: socket.socket, target: socket.socket, number: int, limit: int) -> None:
        """What comes beyond the limit, or after the cut, is taken, and lost with the connection."""
        passed = 0
        try:
            while data := source.recv(64 * KIB):
                target.sendall(b"" if number in self._over else data[: max(0, limit - passed)])
                passed += len(data)
        except OSError:
            pass
        self._cut(source, target)

    @staticmethod
    def _cut(*ends: socket.socket) -> None:
        for each in ends:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def _through_a_relay(
    rig: WriteRig, cuts: list[int], streams: int = 1, timeout_s: float = 30.0, **how: int
) -> Iterator[tuple[Writer, Holder, _Cutter]]:
    writer, holder = rig.writer(BIG, slice_bytes=64 * KIB, streams=streams, timeout_s=timeout_s), rig.holder(BIG)
    holder.connect(writer.transport.endpoint())
    cutter = _Cutter(holder.endpoint, cuts, **how)
    try:
        writer.transport.connect(holder.peer, cutter.endpoint)
        yield writer, holder, cutter
        cutter.go_on.set()
        writer.transport.close()
    finally:
        cutter.close()


_CUTS = {
    "once": [3 * MIB],
    "three times": [5 * MIB + 77, MIB, 2 * MIB + 5],
    "again in the handshake": [3 * MIB, 10, 40, 60],
}


@pytest.mark.parametrize("cuts", _CUTS.values(), ids=_CUTS)
def test_a_stream_that_breaks_is_resumed_not_restarted(rig: WriteRig, cuts: list[int]) -> None:
    with _through_a_relay(rig, cuts) as (writer, holder, cutter):
        half = BIG // 2
        tickets = [writer.post(holder, make_runs((n * half, n * half, half)), None, 0, b"%d" % n) for n in range(2)]
        assert [(c.ticket, c.error, c.moved_bytes) for c in writer.wait(2)] == [(ticket, "", half) for ticket in tickets]
        assert np.array_equal(holder.memory, writer.content)
        assert _arrivals(holder, 2) == [Arrival(WRITER, b"%d" % n, half) for n in range(2)]
        assert len(cutter.passed) == len(cuts) + 1
        # What a connection had passed on is not sent again, but for what no reply had been sent for.
        assert cutter.passed[-1] < BIG - cuts[0] + 2 * MIB
    assert _owner(holder).take_arrivals() == []


def test_a_stream_that_breaks_again_and_again_without_a_frame_acknowledged_is_given_up(rig: WriteRig) -> None:
    """Each connection passes the handshake, opens the stream, and is cut before the first frame is in."""
    with _through_a_relay(rig, [16 * KIB] * 10_000, timeout_s=0.5) as (writer, holder, cutter):
        completion = writer.write(holder, make_runs((0, 0, MIB)))
        assert completion.error.startswith("PeerLost")
        assert len(cutter.passed) > 2, "it was resumed before"


_OPENED = wire.HELLO_BYTES + wire.REPLY_BYTES + wire.PROOF_BYTES + wire.REPLY_BYTES
"""What an owner sends until a stream is open, and no frame is acknowledged."""


def _cut_without_replies(rig: WriteRig) -> tuple[int, Arrival]:
    """How much the second connection carried, when the first broke after 3 MiB and no reply; and the notice."""
    if rig.kind.variant.kind != "tcp":
        pytest.skip("replies of an encrypted connection cannot be counted by their bytes")
    with _through_a_relay(rig, [3 * MIB], back=_OPENED) as (writer, holder, cutter):
        writer.post(holder, WHOLE, None, 0, b"all")
        assert writer.wait()[0].error == ""
        (arrival,) = _arrivals(holder, 1)
        return cutter.passed[1], arrival


def test_what_was_stored_and_not_acknowledged_is_not_sent_again(rig: WriteRig) -> None:
    resent, arrival = _cut_without_replies(rig)
    assert resent < BIG - 3 * MIB + 128 * KIB
    assert arrival.stored_bytes == BIG


def test_negative_control_an_owner_that_remembers_no_frame_gets_all_of_it_again(
    rig: WriteRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "pack_ends", lambda _: b"")
    resent, arrival = _cut_without_replies(rig)
    assert resent > BIG
    assert arrival.stored_bytes > BIG


def test_negative_control_a_stream_that_is_not_resumed_fails(rig: WriteRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpMover, "_suspends", lambda *_: False)
    with _through_a_relay(rig, [3 * MIB]) as (writer, holder, _):
        assert writer.write(holder, WHOLE).error.startswith("PeerLost")


def _write_beside_one_that_is_held_up(rig: WriteRig, streams: int) -> tuple[list[Arrival], list[int]]:
    """Of eight batches the first, which no stream takes at once, is held up; what has arrived of them before it goes on."""
    part = BIG // 8
    runs = [make_runs((n * part, n * part, part)) for n in range(8)]
    with _through_a_relay(rig, [], streams, held_up=0, hold_after=32 * KIB) as (writer, holder, cutter):
        for number, each in enumerate(runs):
            writer.post(holder, each, None, 0, b"%d" % number)
        if streams > 1:
            found = _arrivals(holder, 7)
        else:
            assert cutter.is_holding.wait(PATIENCE_S)
            found = _owner(holder).take_arrivals()
        cutter.go_on.set()
        late = _arrivals(holder, 8 - len(found))
        assert {c.error for c in writer.wait(8)} == {""}
        assert np.array_equal(holder.memory, writer.content)
        assert sorted(each.notice for each in (*found, *late)) == [b"%d" % number for number in range(8)]
        assert {each.stored_bytes for each in (*found, *late)} == {part}
        return found, cutter.passed


def test_a_stream_that_is_held_up_holds_up_no_other(rig: WriteRig) -> None:
    found, passed = _write_beside_one_that_is_held_up(rig, 3)
    assert b"0" not in {each.notice for each in found}
    assert len(passed) > 1


def test_negative_control_with_one_stream_all_are_held_up(rig: WriteRig) -> None:
    found, passed = _write_beside_one_that_is_held_up(rig, 1)
    assert found == []
    assert len(passed) == 1


def test_a_holder_that_is_revoked_with_frames_on_their_way_can_be_written_to_again(rig: WriteRig) -> None:
    """The batch ends with the last reply, and its connection with it; the writer goes on."""
    with _through_a_relay(rig, [], held_up=0, hold_after=32 * KIB) as (writer, holder, cutter):
        ticket = writer.post(holder, WHOLE)
        assert cutter.is_holding.wait(PATIENCE_S)
        writer.transport.revoke(holder.peer)
        assert writer.transport.poll() == [], "what has begun to leave may still land"
        cutter.go_on.set()
        assert [(c.ticket, "revoked" in c.error) for c in writer.wait()] == [(ticket, True)]
        holder.assert_quiet()
        writer.transport.connect(holder.peer, cutter.endpoint)
        assert writer.write(holder, make_runs((0, 0, MIB))).error == ""
        assert holder.holds(writer.content, make_runs((0, 0, MIB)))


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_write_that_was_cancelled_states_what_it_had_on_its_way_when_its_connection_was_given_up(
    rig: WriteRig, is_given_up: bool
) -> None:
    timeout_s = 0.5 if is_given_up else 30.0
    with _through_a_relay(rig, [], timeout_s=timeout_s, held_up=0, hold_after=32 * KIB) as (writer, holder, cutter):
        ticket = writer.post(holder, WHOLE)
        assert cutter.is_holding.wait(PATIENCE_S)
        writer.transport.cancel(ticket)
        if not is_given_up:
            cutter.go_on.set()
        completion = writer.wait()[0]
        assert completion.error
        assert completion.may_land is is_given_up


def test_a_session_that_ended_while_its_stream_was_broken_is_not_resumed(rig: WriteRig) -> None:
    with _through_a_relay(rig, [BIG // 2]) as (writer, holder, _):
        writer.post(holder, WHOLE, None, 1, b"never")
        wait_until(lambda: holder.memory[MIB] != POISON)
        _owner(holder).revoke(WRITER)
        _owner(holder).connect(WRITER, writer.transport.endpoint())
        holder.memory[:] = POISON
        completion = writer.wait()[0]
        assert completion.error.startswith("PeerRefused")
        assert "the session was torn down" in completion.error
        holder.assert_quiet()
    assert _owner(holder).take_arrivals() == []

"""A control connection whose link was cut: it ends and is dialled anew, and is not silent for as long again as the cut was."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from two_hosts import TwoHosts, can_have_two_hosts

from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import MAX_FRAME_BYTES, Heartbeat
from kvbaton.launch.ports import PortPicker
from kvbaton.wire.door import DoorLimits, PeerConnection
from watching import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_have_two_hosts(), reason="needs root, ip, tc and /dev/net/tun"),
]

KEY = Trust(b"the key of this cluster")
BEAT = Heartbeat(True, ())
ALICE, BOB = Incarnation("alice"), Incarnation("bob")
BEAT_S = 1.0
_LIBC, _CLONE_NEWNET = ctypes.CDLL(None), 0x40000000
_BACKOFF = struct.Struct("4xB")
"""Of `struct tcp_info`: how often the wait before the next try was doubled."""
_TOO_OFTEN = 5
"""From 0.2 s on, that is more than five intervals."""


class Pair:
    """The control sockets of two hosts, both driven by this thread."""

    def __init__(self, two: TwoHosts, alice: ControlSockets, bob: ControlSockets) -> None:
        self.link, self.alice, self.bob = two.link, alice, bob
        self.got: list[Incarnation] = []
        self.at = ControlAddress.of(two.there, bob.address.handshake)

    def turn(self) -> None:
        for sockets in (self.alice, self.bob):
            sockets.wait(0.01, [])
            self.got += [envelope.sender for envelope, _ in sockets.receive()]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            self.turn()
            return condition()

        wait_until(is_so, what)

    def connection(self, sockets: ControlSockets) -> PeerConnection:
        (known,) = vars(sockets)["_door"].known
        assert isinstance(known, PeerConnection)
        return known

    def talk(self) -> None:
        """A message each way; each sends until it is answered, as the logic does with heartbeats."""
        self.got.clear()

        def has_both() -> bool:
            self.alice.dial(self.at, BEAT)
            self.bob.send(ALICE, BEAT)
            self.turn()
            return {ALICE, BOB} <= set(self.got)

        wait_until(has_both, f"a message each way, not only {self.got}")


@contextmanager
def apart(limits: DoorLimits | None = None) -> Iterator[Pair]:
    """Sockets on two hosts that have exchanged messages."""
    with ExitStack() as parts:
        two = TwoHosts()
        parts.callback(two.close)
        made: list[ControlSockets] = []

        def listen_there() -> None:
            # Of this thread alone: sockets belong to the host on which they were made.
            with Path(f"/run/netns/{two.namespace}").open() as namespace:
                assert _LIBC.setns(namespace.fileno(), _CLONE_NEWNET) == 0
            made.append(ControlSockets(BOB, two.there, PortPicker().pick(), KEY, limits, beat_s=BEAT_S))

        thread = threading.Thread(target=listen_there)
        thread.start()
        thread.join()
        parts.callback(made[0].close)
        alice = ControlSockets(ALICE, two.here, PortPicker().pick(), KEY, limits, beat_s=BEAT_S)
        parts.callback(alice.close)
        pair = Pair(two, alice, made[0])
        pair.talk()
        yield pair


def _backoff(connection: PeerConnection) -> int:
    info = connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BACKOFF.size)
    (count,) = _BACKOFF.unpack(info)
    return int(count)


@pytest.mark.sampled(1)
def test_a_connection_that_is_cut_ends_within_an_interval_and_is_dialled_anew() -> None:
    with apart() as pair:
        cut = [pair.connection(sockets) for sockets in (pair.alice, pair.bob)]
        pair.link.is_cut = True
        pair.alice.dial(pair.at, BEAT)
        pair.bob.send(ALICE, BEAT)
        most = 0

        def has_ended() -> bool:
            nonlocal most
            most = max([most, *(_backoff(each) for each in cut if not each.is_over)])
            return all(each.is_over for each in cut)

        pair.until(has_ended, "both ends give the connection up")
        assert most < _TOO_OFTEN
        # Longer than the cut lasts, nothing is kept of it: the next dial is a new one, which begins with short waits.
        pair.link.is_cut = False
        pair.talk()
        assert pair.connection(pair.alice) is not cut[0]


@pytest.mark.sampled(1)
def test_control_without_the_limit_the_waits_of_the_same_connection_double() -> None:
    with apart(DoorLimits(frame_bytes=MAX_FRAME_BYTES, unknown_frame_bytes=MAX_FRAME_BYTES)) as pair:
        cut = pair.connection(pair.alice)
        pair.link.is_cut = True
        pair.alice.dial(pair.at, BEAT)
        pair.until(lambda: _backoff(cut) >= _TOO_OFTEN, "TCP waits longer and longer")
        assert not cut.is_over
        pair.link.is_cut = False
        pair.talk()
        assert pair.connection(pair.alice) is cut


@pytest.mark.sampled(1)
def test_a_peer_that_reads_nothing_for_a_while_keeps_its_connection() -> None:
    """TCP still answers there, and has no room: not a cut link."""
    many = Heartbeat(True, tuple((HandoffKey(TransferId(f"{number:0100}"), 0, 0), 1) for number in range(2000)))
    with apart() as pair:
        connection = pair.connection(pair.alice)

        def is_full() -> bool:
            if not connection.unsent:
                pair.alice.dial(pair.at, many)
            pair.alice.wait(0.01, [])
            list(pair.alice.receive())
            return _backoff(connection) >= _TOO_OFTEN or connection.is_over

        wait_until(is_full, "TCP asks for room less and less often", 60)
        assert not connection.is_over
        pair.talk()
        assert pair.connection(pair.alice) is connection

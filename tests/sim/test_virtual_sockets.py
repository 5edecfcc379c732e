"""The control sockets of production over virtual connections: the connections do what TCP does, and the runs use them."""

from __future__ import annotations

import errno
import selectors
import socket
from dataclasses import dataclass, field

import msgspec
import pytest

from kvbaton.agent.sockets import ControlSockets
from kvbaton.sim.drills import script_of_seed
from kvbaton.sim.network import Network
from kvbaton.sim.run import Run, run_script
from kvbaton.sim.script import Fault, FaultKind
from kvbaton.sim.virtual_sockets import CONNECT_AGAIN_S, VirtualMachine, VirtualSocket, Wires
from kvbaton.sim.world import World

SEEDS = [seed for seed in range(400) if script_of_seed(seed).has_sockets]


@dataclass
class Rig:
    """Two machines, of which one listens."""

    world: World = field(default_factory=lambda: World(1))
    woken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network(self.world, lambda *_: None)
        self.wires = Wires(self.world, self.network)
        self.p0, self.d0 = self.machine("p0"), self.machine("d0")
        self.listener = self.p0.listen("p0", 1)

    def machine(self, address: str) -> VirtualMachine:
        return VirtualMachine(self.wires, address, lambda: self.world.now, lambda: self.woken.append(address))

    def pass_s(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds, 10_000)

    def dialled(self) -> VirtualSocket:
        """A socket of d0 that begins to connect to p0."""
        near = self.d0.socket(socket.AF_INET)
        assert near.connect_ex(("p0", 1)) == errno.EINPROGRESS
        return near

    def connected(self) -> tuple[VirtualSocket, VirtualSocket]:
        near = self.dialled()
        self.pass_s(0.1)
        far, (host, _) = self.listener.accept()
        assert host == "d0"
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        return near, far


def _unacknowledged(each: VirtualSocket) -> int:
    return int.from_bytes(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)[24:28], "little")


def test_bytes_arrive_whole_and_in_order_although_some_are_lost_and_late() -> None:
    rig = Rig()
    near, far = rig.connected()
    link = rig.network.link("d0", "p0")
    for number in range(20):
        link.lose_next, link.slow_until, link.slow_s = number % 3, rig.world.now + 1, 0.5
        assert near.send(bytes([number])) == 1
        rig.pass_s(0.01)
    rig.pass_s(10)
    assert far.recv(100) == bytes(range(20))
    assert _unacknowledged(near) == 0
    with pytest.raises(BlockingIOError):
        far.recv(100)


def test_a_cut_link_acknowledges_nothing_and_delivers_when_it_is_whole_again() -> None:
    rig = Rig()
    near, far = rig.connected()
    rig.network.sever("d0", "p0", rig.world.now + 1.0)
    near.send(b"held up")
    rig.pass_s(0.9)
    assert not far.events() & selectors.EVENT_READ
    assert _unacknowledged(near) == 1
    rig.pass_s(2.0)
    assert far.recv(100) == b"held up"


def test_an_acknowledgement_does_not_come_back_through_a_link_that_is_cut_in_that_direction() -> None:
    rig = Rig()
    near, far = rig.connected()
    rig.network.link("p0", "d0").cut_until = rig.world.now + 1.0
    near.send(b"one way")
    rig.pass_s(0.5)
    assert far.recv(100) == b"one way"
    assert _unacknowledged(near) == 1


def test_a_lost_dial_is_sent_again_after_a_second() -> None:
    rig = Rig()
    rig.network.link("d0", "p0").lose_next = 1
    near = rig.dialled()
    rig.pass_s(CONNECT_AGAIN_S - 0.01)
    assert near.events() == 0
    rig.pass_s(0.1)
    assert near.events() == selectors.EVENT_WRITE


def test_nothing_that_listens_refuses() -> None:
    rig = Rig()
    rig.listener.close()
    near = rig.dialled()
    rig.pass_s(0.1)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def test_the_system_of_a_dead_process_closes_its_connections() -> None:
    rig = Rig()
    near, far = rig.connected()
    far.send(b"last words")
    rig.p0.die()
    rig.pass_s(0.1)
    assert near.recv(100) == b"last words"
    assert near.recv(100) == b""
    near.send(b"too late")
    rig.pass_s(0.1)
    with pytest.raises(ConnectionResetError):
        near.recv(100)


def test_a_socket_that_is_closed_unread_resets_its_connection() -> None:
    rig = Rig()
    near, far = rig.connected()
    near.send(b"unread")
    far.send(b"has arrived")
    rig.pass_s(0.1)
    far.send(b"on its way")
    far.close()
    rig.pass_s(0.1)
    assert near.recv(100) == b"has arrived"
    with pytest.raises(ConnectionResetError):
        near.recv(100)
    with pytest.raises(ConnectionResetError):
        near.send(b"more")


def test_a_dial_whose_answer_is_held_up_is_not_accepted_and_ends_with_its_dialler() -> None:
    rig = Rig()
    rig.network.link("p0", "d0").cut_until = rig.world.now + 0.5
    near = rig.dialled()
    rig.pass_s(0.3)
    assert not rig.listener.backlog
    near.close()
    rig.pass_s(5)
    assert not rig.listener.backlog
    assert list(rig.p0.sockets) == [rig.listener]


def test_a_peer_that_does_not_read_fills_the_window() -> None:
    rig = Rig()
    near, far = rig.connected()
    sent = near.send(bytes(1 << 20))
    assert 0 < sent < 1 << 20
    with pytest.raises(BlockingIOError):
        near.send(b"more")
    rig.pass_s(0.1)
    assert not near.events() & selectors.EVENT_WRITE
    assert len(far.recv(1 << 20)) == sent
    assert near.events() & selectors.EVENT_WRITE


def test_a_selector_finds_what_is_ready_in_another_one() -> None:
    rig = Rig()
    inner, outer = rig.p0.selector(), rig.p0.selector()
    inner.register(rig.listener, selectors.EVENT_READ)
    outer.register(inner.fileno(), selectors.EVENT_READ, "inner")
    assert outer.select(3.0) == []
    assert rig.p0.wait_s == 3.0
    rig.dialled()
    rig.pass_s(0.1)
    assert [key.data for key, _ in outer.select(3.0)] == ["inner"]
    assert rig.p0.wait_s == 0.0


def test_some_runs_of_each_kind_have_the_control_sockets_of_production() -> None:
    scripts = [script_of_seed(seed) for seed in SEEDS]
    assert {bool(script.caches) for script in scripts} == {True, False}
    assert all(script.has_driver for script in scripts)
    run = Run(scripts[0])
    assert all(isinstance(vars(each.thread.driver)["_sockets"], ControlSockets) for each in run.all_instances if each.thread)


def test_the_same_script_gives_the_same_run() -> None:
    for seed in SEEDS[:6]:
        one, other = (run_script(script_of_seed(seed), keep_timeline=True) for _ in range(2))
        assert one.timeline == other.timeline
        assert one.events == other.events


def test_messages_go_over_a_new_connection_when_the_first_has_ended() -> None:
    """A bit that flips ends the connection; the hand-offs go on over the next one."""
    calm = [script for script in map(script_of_seed, SEEDS) if script.caches and not script.faults]
    script = next(each for each in calm if len(each.requests) > 2 and not any(request.is_turned for request in each.requests))
    source, target = script.requests[0].ends
    corrupt = Fault(FaultKind.CORRUPT_FRAME, 0.02, who=target, other=source, number=1)
    run = Run(msgspec.structs.replace(script, faults=(corrupt,)))
    result = run.run()
    assert result.violations == []
    sockets = [vars(each.thread.driver)["_sockets"] for each in run.all_instances if each.thread]
    assert sum(each.dropped_total["not authenticated"] for each in sockets) >= 1
    assert result.outcomes["delivered", "delivered"] >= 1

"""What the transport contract needs from each transport: a target side here, and sources to read from, in other processes."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from contract_kinds import ContractKind
from transport_peer import POISON, content

from forked_peers import PeerProcess, start_peer
from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import Plan, unroll
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    PeerRank,
    Region,
    Runs,
    Ticket,
    Transport,
    TransportSettings,
)
from kvbaton.transport.faulty import Faults
from kvbaton.transport.table import load
from watching import pause

__all__ = [
    *("BIG", "KIB", "MIB", "PATIENCE_S", "PEER_SCRIPT", "WHOLE"),
    *("Rig", "Source", "Target"),
    *("assert_quiet", "make_runs", "wait_until"),
]

PATIENCE_S = 30.0
KIB, MIB = 1 << 10, 1 << 20
BIG = 32 * MIB
_LAUNCH_BYTES = 64 << 20
_TRIES = 20
PEER_SCRIPT = Path(__file__).with_name("transport_peer.py")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; fails the test when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.0005)


def make_runs(*rows: tuple[int, int, int]) -> Runs:
    """Runs from rows of source offset, target offset, bytes."""
    return np.array(rows, np.uint64).reshape(-1, 3)


WHOLE = make_runs((0, 0, BIG))


@dataclass
class Source:
    """A peer with a region of known content."""

    peer: PeerRank
    endpoint: Endpoint
    content: npt.NDArray[np.uint8]
    kill: Callable[[], None]
    process: PeerProcess | None = None

    def withdraw(self) -> None:
        """Close its transport; its process, if it has one, lives on."""
        if self.process is None:
            self.kill()
            return
        self.process.stdin.write(b"withdraw\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"withdrawn\n"

    def stop(self) -> None:
        """Make the process stand still."""
        assert self.process is not None
        pause(self.process.pid)

    def resume(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@dataclass
class Target:
    """This side: poisoned memory and the transport over it."""

    memory: npt.NDArray[np.uint8]
    transport: Transport
    region: Region

    def post(self, source: Source, runs: Runs | Plan, after: AfterEvent | None = None) -> Ticket:
        """Read `runs` from `source`."""
        return self.transport.post(Batch(source.peer, Direction.READ, runs), after)

    def wait(self, count: int = 1) -> list[Completion]:
        """The next `count` completions, in order of arrival."""
        found: list[Completion] = []
        while len(found) < count:
            assert select.select([self.transport.wakeup_fd], [], [], PATIENCE_S)[0], f"{len(found)} of {count} completions came"
            found += self.transport.poll()
        assert len(found) == count
        return found

    def read(self, source: Source, runs: Runs | Plan) -> Completion:
        """Post `runs` and wait for the completion."""
        ticket = self.post(source, runs)
        completion = self.wait()[0]
        assert completion.ticket == ticket
        return completion

    def is_readable(self) -> bool:
        """Whether the wake-up descriptor is readable now."""
        return bool(select.select([self.transport.wakeup_fd], [], [], 0)[0])

    def holds(self, source: Source, runs: Runs | Plan) -> bool:
        """Whether memory is what it should be after `runs`, poison everywhere else included."""
        now = np.asarray(self.memory)
        expected = np.full_like(now, POISON)
        for at, to, count in unroll(runs).tolist():
            expected[to : to + count] = source.content[at : at + count]
        return np.array_equal(now, expected)


@dataclass
class Rig:
    """Makes targets and sources for one kind of transport, and takes them down again."""

    kind: ContractKind
    source_prefix: tuple[str, ...] = ()
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _made: int = 0

    def target(self, region_bytes: int, faults: Faults | None = None, **settings: Any) -> Target:
        """A poisoned region with its transport."""
        region, memory = load(self.kind.variant.memory)(np.full(region_bytes, POISON, np.uint8))
        settings.setdefault("launch_bytes", settings.get("slice_bytes", _LAUNCH_BYTES))
        return self._over(memory, region, TransportSettings(incarnation=Incarnation("target"), **settings), faults)

    def again(self, target: Target) -> Target:
        """A new transport over the memory of `target`, whose own is closed."""
        return self._over(target.memory, target.region, TransportSettings(incarnation=Incarnation("target")), None)

    def source(self, region_bytes: int, seed: int = 1, host: str = "127.0.0.1") -> Source:
        """A peer to read from, on its own."""
        self._made += 1
        peer = PeerRank(Incarnation(f"source{self._made}"))
        return self._spawn(peer, region_bytes, seed, host) if self.kind.has_processes else self._seat(peer, region_bytes, seed)

    def pair(self, region_bytes: int, **settings: Any) -> tuple[Target, Source]:
        """A target and a source of equal size, connected."""
        target, source = self.target(region_bytes, **settings), self.source(region_bytes)
        target.transport.connect(source.peer, source.endpoint)
        return target, source

    def interrupted(self, act: Callable[[Target, Source, Ticket], None], **settings: Any) -> tuple[Target, Source, Completion]:
        """A large batch that was under way when `act` befell it, and how it ended; one that was over by then is tried again."""
        for _ in range(_TRIES):
            target, source = self.pair(BIG, slice_bytes=4 * KIB, **settings)
            ticket = target.post(source, WHOLE)
            wait_until(lambda now=target.memory: now[0] != POISON)  # type: ignore[misc]
            act(target, source, ticket)
            completion = (target.transport.poll() or target.wait())[0]
            if completion.error:
                return target, source, completion
        raise AssertionError(f"{_TRIES} batches went on as if nothing had happened to them")

    def take_down(self) -> None:
        """Close and kill everything, latest first."""
        while self._undo:
            self._undo.pop()()

    def _over(
        self, memory: npt.NDArray[np.uint8], region: Region, settings: TransportSettings, faults: Faults | None
    ) -> Target:
        transport = self.kind.open(region, settings, faults)
        self._undo.append(transport.close)
        return Target(memory, transport, region)

    def _seat(self, peer: PeerRank, region_bytes: int, seed: int) -> Source:
        bytes_there = content(seed, region_bytes)
        region, settings = Region.of(bytes_there), TransportSettings(incarnation=peer.incarnation)
        transport = self.kind.open(region, settings)
        self._undo.append(transport.close)
        return Source(peer, transport.endpoint(), bytes_there, transport.close)

    def _spawn(self, peer: PeerRank, region_bytes: int, seed: int, host: str) -> Source:
        arguments = [self.kind.variant.kind, host, str(region_bytes), str(seed), peer.incarnation]
        process = start_peer(PEER_SCRIPT, arguments, prefix=self.source_prefix)

        def kill() -> None:
            process.close(PATIENCE_S)

        self._undo.append(kill)
        endpoint = msgspec.json.decode(process.stdout.readline(), type=Endpoint)
        return Source(peer, endpoint, content(seed, region_bytes), kill, process)


def assert_quiet(target: Target) -> None:
    """Nobody writes to target memory any more: poison that is put there now stays."""
    target.memory[:] = POISON
    for _ in range(5):
        assert (target.memory == POISON).all()

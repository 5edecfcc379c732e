"""What the write half of the transport contract needs: a source here that writes, and targets whose memory the test can see."""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from contract_kinds import ContractKind
from transport_peer import POISON, WRITER, content
from transport_rig import BIG, KIB, PATIENCE_S, PEER_SCRIPT, WHOLE, wait_until

from forked_peers import PeerProcess, start_peer
from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import Plan, unroll
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    LateWrites,
    PeerRank,
    Region,
    Runs,
    Ticket,
    Transport,
    TransportSettings,
)
from kvbaton.transport.faulty import Faults

__all__ = ["Holder", "WriteRig", "Writer"]

_TRIES = 20
_SOURCE_SEED = 3


@dataclass
class Holder:
    """A peer that takes writes: poisoned memory, which the test sees as it is there."""

    peer: PeerRank
    endpoint: Endpoint
    memory: npt.NDArray[np.uint8]
    kill: Callable[[], None]
    withdraw: Callable[[], None]
    connect: Callable[[Endpoint], None]
    """Connect the writer from its side too, as both ends of a hand-off do."""
    process: PeerProcess | None = None
    transport: Transport | None = None
    """Where it is in this process."""

    def holds(self, content_there: npt.NDArray[np.uint8], runs: Runs | Plan) -> bool:
        """Whether memory is what it should be after `runs`, poison everywhere else included."""
        expected = np.full_like(self.memory, POISON)
        for at, to, count in unroll(runs).tolist():
            expected[to : to + count] = content_there[at : at + count]
        return np.array_equal(self.memory, expected)

    def assert_quiet(self) -> None:
        """Nobody writes there any more: poison that is put there now stays."""
        self.memory[:] = POISON
        for _ in range(5):
            assert (self.memory == POISON).all()


@dataclass
class Writer:
    """This side: memory of known content, and the transport over it."""

    content: npt.NDArray[np.uint8]
    memory: npt.NDArray[np.uint8]
    transport: Transport

    def post(
        self, holder: Holder, runs: Runs | Plan, after: AfterEvent | None = None, epoch: int = 0, notice: bytes = b""
    ) -> Ticket:
        """Write `runs` to `holder`."""
        return self.transport.post(Batch(holder.peer, Direction.WRITE, runs, epoch, notice), after)

    def wait(self, count: int = 1) -> list[Completion]:
        """The next `count` completions, in order of arrival."""
        found: list[Completion] = []
        while len(found) < count:
            assert select.select([self.transport.wakeup_fd], [], [], PATIENCE_S)[0], f"{len(found)} of {count} completions came"
            found += self.transport.poll()
        assert len(found) == count
        return found

    def write(self, holder: Holder, runs: Runs | Plan, epoch: int = 0, notice: bytes = b"") -> Completion:
        """Post `runs` and wait for the completion."""
        ticket = self.post(holder, runs, None, epoch, notice)
        completion = self.wait()[0]
        assert completion.ticket == ticket
        return completion

    @property
    def is_untouched(self) -> bool:
        """Whether this side's memory is what it was."""
        return np.array_equal(self.memory, self.content)


@dataclass
class WriteRig:
    """Makes writers and holders for one kind of transport, and takes them down again."""

    kind: ContractKind
    in_process: bool = False
    """Whether holders are in this process, where the test can fence writers."""
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _made: int = 0

    def writer(self, region_bytes: int, faults: Faults | None = None, writes: bool = True, **settings: Any) -> Writer:
        """A region of known content with its transport."""
        memory = content(_SOURCE_SEED, region_bytes)
        chosen = {"incarnation": WRITER.incarnation, **self.kind.choice(writes), **settings}
        transport = self.kind.open(Region.of(memory), TransportSettings(**chosen), faults)
        self._undo.append(transport.close)
        return Writer(memory.copy(), memory, transport)

    def holder(self, region_bytes: int, writes: bool = True, **settings: Any) -> Holder:
        """A peer to write to, on its own; `settings` are for one in this process."""
        self._made += 1
        peer = PeerRank(Incarnation(f"holder{self._made}"))
        is_process = self.kind.has_processes and not self.in_process
        return self._spawn(peer, region_bytes, writes) if is_process else self._seat(peer, region_bytes, writes, settings)

    def join(self, writer: Writer, holder: Holder) -> None:
        """Connect both, each from its side."""
        if LateWrites.REVOCABLE in self.kind.entry.promises.values():
            holder.connect(writer.transport.endpoint())
        writer.transport.connect(holder.peer, holder.endpoint)

    def pair(self, region_bytes: int, **settings: Any) -> tuple[Writer, Holder]:
        """A writer and a holder of equal size, connected."""
        writer, holder = self.writer(region_bytes, **settings), self.holder(region_bytes)
        self.join(writer, holder)
        return writer, holder

    def interrupted(self, act: Callable[[Writer, Holder, Ticket], None], **settings: Any) -> tuple[Writer, Holder, Completion]:
        """A large write that was under way when `act` befell it, and how it ended; one that was over by then is tried again."""
        for _ in range(_TRIES):
            writer, holder = self.pair(BIG, slice_bytes=4 * KIB, **settings)
            ticket = writer.post(holder, WHOLE)
            wait_until(lambda now=holder.memory: now[0] != POISON)  # type: ignore[misc]
            act(writer, holder, ticket)
            completion = (writer.transport.poll() or writer.wait())[0]
            if completion.error:
                return writer, holder, completion
        raise AssertionError(f"{_TRIES} batches went on as if nothing had happened to them")

    def take_down(self) -> None:
        """Close and kill everything, latest first."""
        while self._undo:
            self._undo.pop()()

    def _seat(self, peer: PeerRank, region_bytes: int, writes: bool, settings: dict[str, Any]) -> Holder:
        memory = np.full(region_bytes, POISON, np.uint8)
        chosen = {"incarnation": peer.incarnation, **self.kind.choice(writes), **settings}
        transport = self.kind.open(Region.of(memory), TransportSettings(**chosen))
        self._undo.append(transport.close)

        def connect(endpoint: Endpoint) -> None:
            transport.connect(WRITER, endpoint)

        return Holder(peer, transport.endpoint(), memory, transport.close, transport.close, connect, transport=transport)

    def _spawn(self, peer: PeerRank, region_bytes: int, writes: bool) -> Holder:
        """The memory is a file without a name, which both processes map."""
        fd = os.memfd_create("kvbaton-test-holder")
        os.ftruncate(fd, region_bytes)
        memory = np.frombuffer(mmap.mmap(fd, region_bytes), np.uint8)
        memory[:] = POISON
        takes = "writes" if writes else "reads"
        arguments = [self.kind.variant.kind, "127.0.0.1", str(region_bytes), "0", peer.incarnation, str(fd), takes]
        process = start_peer(PEER_SCRIPT, arguments, (fd,))
        os.close(fd)

        def kill() -> None:
            process.close(PATIENCE_S)

        def order(words: bytes, answer: bytes) -> None:
            process.stdin.write(words + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == answer + b"\n"

        def connect(endpoint: Endpoint) -> None:
            order(b"connect " + msgspec.json.encode(endpoint), b"connected")

        def withdraw() -> None:
            order(b"withdraw", b"withdrawn")

        self._undo.append(kill)
        endpoint = msgspec.json.decode(process.stdout.readline(), type=Endpoint)
        return Holder(peer, endpoint, memory, kill, withdraw, connect, process)

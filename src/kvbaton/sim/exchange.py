"""The owner's side of the exchange under faults: its real code, on a network and a scheduler that a seed decides.

Every connection is the generator that production runs (`OwnerSide`), fed with bytes in pieces of any size; between any two
steps memories are withdrawn and registered, and connections end. Sources are arrays that a simulated process shows. What must
hold is checked after every step:

- not one byte of a memory changes after it was withdrawn, and none outside the runs of a call;
- a notice is there only when every byte of its call is, and never for a call that failed;
- a call that is answered OK has stored, or sent, every byte.

Two plants show that the checks can fail: a slice that begins in a withdrawn memory, and a notice before the bytes.
"""

from __future__ import annotations

import ctypes
import random
import secrets
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.plan import Runs
from kvbaton.errors import PeerLost, ProtocolError, RangeError
from kvbaton.transport.exchange.base import MemoryHandle
from kvbaton.transport.exchange.flow import TURN, MemoryFill, MemorySend, Skip, Step
from kvbaton.transport.exchange.memories import MemoryTable, NoticeTable
from kvbaton.transport.exchange.owner import ExchangeState, OwnerSide
from kvbaton.transport.exchange.reach import CopyHelpers
from kvbaton.transport.exchange.wire import (
    ANSWER_BYTES,
    CallKind,
    CallOutcome,
    Introduction,
    MemoryCall,
    pack_call,
    unpack_answer,
)
from kvbaton.transport.neighbour import Neighbour
from kvbaton.transport.tcp.vectors import Vectors
from kvbaton.transport.tcp.wire import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, Secret, unpack_hello

__all__ = ["EXCHANGE_PLANTS", "ExchangeBugs", "ExchangeCampaign", "ExchangeViolation", "run_exchange", "run_exchange_seeds"]

_MEMORIES = 64
_CHUNKS = 8
_CHUNK_BYTES = 48
_GUARD_BYTES = 64
_STEPS = 400
_SLICE_BYTES = 16


class ExchangeViolation(Exception):
    """A rule did not hold; names the seed, the step and the rule."""

    def __init__(self, seed: int, step: int, rule: str) -> None:
        super().__init__(f"seed {seed}, step {step}: {rule}")
        self.seed, self.step, self.rule = seed, step, rule


class _SimulatedSource:
    """A process whose memories the owner reads: one array per connection, in slot 0 under stamp 1, until it is withdrawn."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self.content = content
        self.is_live = True

    def find(self, slot: int, stamp: int) -> tuple[int, int]:
        if not self.is_live or (slot, stamp) != (0, 1):
            raise RangeError(f"the memory in slot {slot} is withdrawn")
        return int(self.content.ctypes.data), self.content.nbytes

    def copy(self, _name: tuple[int, int], source_address: int, target_address: int, runs: Runs) -> int:
        for source, target, count in runs.tolist():
            ctypes.memmove(target_address + target, source_address + source, count)
        return int(runs[:, 2].sum())

    def copy_few(self, name: tuple[int, int], target_address: int, target_bytes: int, runs: list[list[int]]) -> int:
        source_address, source_bytes = self.find(*name)
        if any(source + size > source_bytes or target + size > target_bytes for source, target, size in runs):
            raise RangeError("outside")
        return self.copy(name, source_address, target_address, np.array(runs, np.uint64))

    def close(self) -> None:
        """Nothing to give back."""


class _SimulatedOwner(OwnerSide):
    """Finds the simulated process at the other end."""

    source: _SimulatedSource

    def _open_process(self) -> str:
        self._process = self.source  # type: ignore[assignment]
        return ""


class _LateTable(MemoryTable):
    """The plant: a slice may begin in a memory that was withdrawn."""

    def __init__(self) -> None:
        super().__init__(1.0, _MEMORIES)
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def pin(self, slot: int, stamp: int) -> tuple[int, int]:
        try:
            self._places[slot, stamp] = super().pin(slot, stamp)
        except RangeError:
            if (slot, stamp) not in self._places:
                raise
            self._pins[slot] += 1
        return self._places[slot, stamp]


class _EarlyNotice(_SimulatedOwner):
    """The plant: the notice is kept when the call arrives."""

    def _serve(self, call: MemoryCall) -> Generator[Step, bytes, None]:
        self._note(call)
        yield from super()._serve(call)


@dataclass(frozen=True, slots=True)
class ExchangeBugs:
    """The classes of a run, and the mistake in them."""

    mistake: str = ""
    rule: str = ""
    """The rule that the mistake breaks."""
    table: Callable[[], MemoryTable] = lambda: MemoryTable(1.0, _MEMORIES)
    owner: type[_SimulatedOwner] = _SimulatedOwner


EXCHANGE_PLANTS = {
    "late-store": ExchangeBugs(
        "write stored after the memory was withdrawn", "a byte changed after the memory was withdrawn", table=_LateTable
    ),
    "early-notice": ExchangeBugs(
        "notice kept before the bytes are stored", "a notice is here before the bytes of its call", owner=_EarlyNotice
    ),
}
"""Mistakes that the checks must find."""


@dataclass(slots=True)
class _SimMemory:
    """Memory of the owner between two guards, and what it may hold."""

    arena: npt.NDArray[np.uint8]
    handle: MemoryHandle
    expected: npt.NDArray[np.uint8]
    is_live: bool = True
    free: list[int] = field(default_factory=lambda: list(range(_CHUNKS)))

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self.arena[_GUARD_BYTES:-_GUARD_BYTES]


@dataclass(slots=True)
class _SimCall:
    """One call on the wire: what it moves, and what became of it."""

    call: MemoryCall
    memory: _SimMemory
    chunk: int
    data: bytes


class _SimCalls:
    """The socket's calls, as the generator's steps make them: some of what has arrived, or some room."""

    def __init__(self, connection: _SimConnection, most: int) -> None:
        self._connection, self._most = connection, most

    def receive(self, _sock: object, vectors: Vectors) -> int:
        address, _ = vectors.head()
        place, length = _numbers_at(address)
        count = min(length, self._most, len(self._connection.inbound))
        ctypes.memmove(place, bytes(self._connection.inbound[:count]), count)
        del self._connection.inbound[:count]
        vectors.advance(count)
        return count

    def send(self, _sock: object, vectors: Vectors) -> int:
        address, _ = vectors.head()
        place, length = _numbers_at(address)
        count = min(length, self._most)
        self._connection.outbound += ctypes.string_at(place, count)
        vectors.advance(count)
        return count


def _numbers_at(address: int) -> tuple[int, int]:
    """The first piece of vectors: where it lies, and its size."""
    pair = (ctypes.c_uint64 * 2).from_address(address)
    return int(pair[0]), int(pair[1])


class _SimConnection:
    """An initiator, and the owner's generator for its connection."""

    def __init__(self, name: str, state: ExchangeState, owner: type[_SimulatedOwner], draw: random.Random) -> None:
        self.name = name
        self.source = _SimulatedSource(np.frombuffer(draw.randbytes(_CHUNK_BYTES * _CHUNKS), np.uint8).copy())
        self._side = owner(state, lambda: "")
        self._side.source = self.source
        self._steps = self._side.steps()
        self._step: Step = next(self._steps)
        self.inbound, self.outbound = bytearray(), bytearray()
        self.calls: dict[int, _SimCall] = {}
        self.number = 0
        self.is_over = False
        self._shake_hands(state, draw)

    def _shake_hands(self, state: ExchangeState, draw: random.Random) -> None:
        assert isinstance(self._step, bytes)  # noqa: S101
        challenge, nonce = unpack_hello(self._step), draw.randbytes(NONCE_BYTES)
        assert len(self._step) == HELLO_BYTES  # noqa: S101
        introduction = msgspec.msgpack.encode(Introduction(self.name))
        self.inbound += state.secret.handshake(challenge, nonce)
        self.inbound += len(introduction).to_bytes(4, "little") + introduction
        while self.advance(1 << 20):
            pass
        del self.outbound[: HELLO_BYTES + ANSWER_BYTES + PROOF_BYTES + ANSWER_BYTES]

    def advance(self, most: int) -> bool:
        """One step, as far as what has arrived allows; False when it waits."""
        step = self._step
        try:
            if isinstance(step, int):
                if len(self.inbound) < step:
                    return False
                data = bytes(self.inbound[:step])
                del self.inbound[:step]
                self._step = self._steps.send(data)
            elif isinstance(step, bytes):
                self.outbound += step
                self._step = self._steps.send(b"")
            elif isinstance(step, Skip):
                count = min(step.left_bytes, len(self.inbound), most)
                del self.inbound[:count]
                step.left_bytes -= count
                if not step.left_bytes:
                    self._step = self._steps.send(b"")
                elif not count:
                    return False
            elif step is TURN:
                self._step = self._steps.send(b"")
            elif isinstance(step, MemoryFill | MemorySend):
                return self._move(step, most)
        except RangeError as error:
            self._throw(error)
        except (ProtocolError, PeerLost, StopIteration):
            self.is_over = True
        return not self.is_over

    def _move(self, step: MemoryFill | MemorySend, most: int) -> bool:
        if step.vectors.remaining_bytes:
            if isinstance(step, MemoryFill) and not self.inbound:
                return False
            step.move(_SimCalls(self, most), None, is_send=isinstance(step, MemorySend))  # type: ignore[arg-type]
        if not step.vectors.remaining_bytes:
            self._step = self._steps.send(b"")
        return True

    def _throw(self, error: RangeError) -> None:
        try:
            self._step = self._steps.throw(error)
        except (RangeError, ProtocolError, PeerLost, StopIteration):
            self.is_over = True

    def close(self) -> None:
        self._steps.close()
        self.is_over = True


class _ExchangeRun:
    def __init__(self, seed: int, bugs: ExchangeBugs) -> None:
        self._seed, self._bugs = seed, bugs
        self._draw = random.Random(seed)
        self._step = 0
        self._state = ExchangeState(
            name="owner",
            secret=Secret(secrets.token_bytes(16), b"", "run"),
            table=bugs.table(),
            notices=NoticeTable(),
            keeps_notices=True,
            slice_bytes=_SLICE_BYTES,
            here=Neighbour("host", 1, 1),
            process_memory=None,
            helpers=CopyHelpers(1),
            inline_bytes=self._draw.choice([0, _CHUNK_BYTES]),
        )
        self._memories: list[_SimMemory] = []
        self._connections: list[_SimConnection] = []
        self._names = 0

    def run(self) -> dict[str, int]:
        counts: dict[str, int] = {"ok": 0, "refused": 0, "withdrawn": 0}
        for self._step in range(_STEPS):
            self._act(counts)
            self._check_bytes()
            for connection in self._connections:
                self._read_answers(connection, counts)
                self._check_notices(connection)
            self._connections = [each for each in self._connections if not each.is_over]
            self._state.table.check()
        return counts

    def _act(self, counts: dict[str, int]) -> None:
        draw = self._draw
        choice = draw.random()
        live = [memory for memory in self._memories if memory.is_live]
        if len(live) < 2 or choice < 0.03:
            self._register()
        elif choice < 0.08:
            memory = draw.choice(live)
            self._state.table.withdraw(memory.handle.slot, memory.handle.stamp)
            memory.is_live = False
            memory.expected = memory.arena.copy()
            counts["withdrawn"] += 1
        elif not self._connections or choice < 0.1:
            self._names += 1
            self._connections.append(_SimConnection(f"peer-{self._names}", self._state, self._bugs.owner, draw))
        elif choice < 0.12:
            draw.choice(self._connections).close()
        elif choice < 0.14:
            draw.choice(self._connections).source.is_live = False
        elif choice < 0.4:
            self._post(draw.choice(self._connections))
        else:
            draw.choice(self._connections).advance(draw.choice([1, 5, 16, 1 << 20]))

    def _register(self) -> None:
        arena = np.full(_CHUNKS * _CHUNK_BYTES + 2 * _GUARD_BYTES, 0xEE, np.uint8)
        memory = _SimMemory(arena, MemoryHandle(0, 0, 0), arena.copy())
        memory.handle = self._state.table.register(memory.view.ctypes.data, memory.view.nbytes)
        self._memories.append(memory)

    def _post(self, connection: _SimConnection) -> None:
        """A call for a chunk that no other call has; sometimes of a memory that is gone, or beyond its end."""
        draw = self._draw
        memory = draw.choice(self._memories)
        if not memory.free:
            return
        chunk = memory.free.pop(draw.randrange(len(memory.free)))
        kind = draw.choice([CallKind.PULL, CallKind.PUSH, CallKind.FETCH])
        connection.number += 1
        start = chunk * _CHUNK_BYTES + (_CHUNKS * _CHUNK_BYTES if draw.random() < 0.1 else 0)
        cut = draw.randrange(1, _CHUNK_BYTES)
        pieces = [(0, cut), (cut, _CHUNK_BYTES - cut)]
        draw.shuffle(pieces)
        ends = [(chunk * _CHUNK_BYTES + at, start + at, size) for at, size in pieces]
        runs = np.array([(b, a, size) if kind is CallKind.FETCH else (a, b, size) for a, b, size in ends], np.uint64)
        names = (0, 1, memory.handle.slot, memory.handle.stamp)
        call = MemoryCall(kind, connection.number, connection.number, *names, 2, _CHUNK_BYTES)
        own = connection.source.content[chunk * _CHUNK_BYTES :][:_CHUNK_BYTES].tobytes()
        connection.calls[connection.number] = _SimCall(call, memory, chunk, own)
        connection.inbound += pack_call(call, runs)
        if kind is CallKind.PUSH:
            connection.inbound += b"".join(own[at : at + size] for at, size in pieces)

    def _stored(self, made: _SimCall) -> bool:
        start = made.chunk * _CHUNK_BYTES
        return made.call.kind is CallKind.FETCH or made.memory.view[start : start + _CHUNK_BYTES].tobytes() == made.data

    def _read_answers(self, connection: _SimConnection, counts: dict[str, int]) -> None:
        while len(connection.outbound) >= ANSWER_BYTES:
            answer = unpack_answer(bytes(connection.outbound[:ANSWER_BYTES]))
            if len(connection.outbound) < ANSWER_BYTES + answer.payload_bytes:
                return
            del connection.outbound[: ANSWER_BYTES + answer.payload_bytes]
            made = connection.calls.pop(answer.number)
            if answer.outcome is CallOutcome.OK:
                counts["ok"] += 1
                # A memory that was withdrawn after the last byte, and before the answer, keeps what was stored.
                self._hold(self._stored(made), "a call was answered OK before every byte was stored")
            else:
                counts["refused"] += 1
                noticed = self._state.notices.has(connection.name, answer.number)
                self._hold(not noticed, "a call that failed has left a notice")

    def _check_notices(self, connection: _SimConnection) -> None:
        for number, made in connection.calls.items():
            if self._state.notices.has(connection.name, number):
                self._hold(self._stored(made), "a notice is here before the bytes of its call")

    def _check_bytes(self) -> None:
        for memory in self._memories:
            if not memory.is_live:
                self._hold(bool((memory.arena == memory.expected).all()), "a byte changed after the memory was withdrawn")
            guards = np.concatenate([memory.arena[:_GUARD_BYTES], memory.arena[-_GUARD_BYTES:]])
            self._hold(bool((guards == 0xEE).all()), "a byte changed outside a registered memory")

    def _hold(self, is_so: bool, rule: str) -> None:
        if not is_so:
            raise ExchangeViolation(self._seed, self._step, rule)


def run_exchange(seed: int, bugs: ExchangeBugs | None = None) -> dict[str, int]:
    """One run; returns how many calls ended how. Raises ExchangeViolation."""
    return _ExchangeRun(seed, bugs or ExchangeBugs()).run()


@dataclass(slots=True)
class ExchangeCampaign:
    """What came of many runs: how many, how many calls ended how, and the rules that broke."""

    runs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[ExchangeViolation] = field(default_factory=list)


def run_exchange_seeds(first: int, count: int, plant: str | None, on_progress: Callable[[int], None]) -> ExchangeCampaign:
    """Run `count` seeds from `first` on; with a plant, until it is found."""
    campaign = ExchangeCampaign()
    for seed in range(first, first + count):
        try:
            campaign.counts.update(run_exchange(seed, None if plant is None else EXCHANGE_PLANTS[plant]))
        except ExchangeViolation as violation:
            campaign.violations.append(violation)
        campaign.runs += 1
        on_progress(campaign.runs)
        if plant is not None and campaign.violations:
            break
    return campaign

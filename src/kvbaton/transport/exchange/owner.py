"""The owner's side of one connection: authenticates the peer, then carries out its calls on the memories of this process.

It is a generator of steps (see `flow`), so that one thread serves every connection. A call that is wrong in itself (a memory
that is not live, a range) is answered with the reason; one that is no call of this protocol ends the connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbaton.core.plan import Runs
from kvbaton.errors import KVBatonError, PeerLost, ProtocolError, RangeError
from kvbaton.transport.exchange.base import INLINE_BYTES, MemoryHandle
from kvbaton.transport.exchange.flow import TURN, MemoryFill, MemorySend, Skip, Step
from kvbaton.transport.exchange.gpu import ExchangeGpu, GpuReader, GpuSources
from kvbaton.transport.exchange.memories import MemoryTable, NoticeTable
from kvbaton.transport.exchange.reach import CopyHelpers, ReadableProcess
from kvbaton.transport.exchange.wire import (
    CALL_BYTES,
    MAX_INTRODUCTION_BYTES,
    RUN_BYTES,
    CallKind,
    CallOutcome,
    Introduction,
    MemoryCall,
    pack_answer,
    pack_done,
    unpack_call,
    unpack_handle,
    unpack_introduction,
    unpack_runs,
)
from kvbaton.transport.neighbour import Neighbour, ProcessMemory
from kvbaton.transport.runs import MAX_SLICE_RUNS, RunCursor, check_offsets
from kvbaton.transport.tcp.wire import CHALLENGE_BYTES, HANDSHAKE_BYTES, Secret, pack_hello, unpack_handshake

__all__ = ["COUNTS", "ONE_KIND", "SLICE_RUNS", "ExchangeState", "OwnerSide", "copy_few", "copy_slices"]

SLICE_RUNS = 16 * MAX_SLICE_RUNS
COUNTS = ("stored_bytes_total", "stored_calls_total", "posted_total", "succeeded_total", "failed_total")
"""What an exchange counts: bytes stored in memories of this side, calls that did; transfers of this side, and their ends."""
_FEW_RUNS = 64
ONE_KIND = "both must be main memory, or both memory of GPUs; copy it first"
_NOT_READABLE = "the initiator's memory cannot be read from here"


@dataclass(slots=True, eq=False)
class ExchangeState:
    """What the parts of one exchange share.

    dropped:      for negative controls: stamps of memories in which nothing is stored
    counts:       what `COUNTS` names, in this order
    gpu:          the GPU that memories of this side lie on, once one does
    """

    name: str
    secret: Secret
    table: MemoryTable
    notices: NoticeTable
    keeps_notices: bool
    slice_bytes: int
    here: Neighbour
    process_memory: ProcessMemory | None
    helpers: CopyHelpers
    dropped: set[int] = field(default_factory=set)
    inline_bytes: int = INLINE_BYTES
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(COUNTS), np.int64))
    served: dict[CallKind, int] = field(default_factory=lambda: dict.fromkeys(CallKind, 0))
    gpu: ExchangeGpu | None = None

    def gpu_of(self, name: tuple[int, int]) -> ExchangeGpu:
        """The GPU that a memory of this side lies on. Raises RangeError when it lies on none, or is not live."""
        if self.gpu is None or not self.gpu.holds(name[1]):
            self.table.find(*name)
            raise RangeError(f"the memory in slot {name[0]} is main memory, and the other one memory of a GPU: {ONE_KIND}")
        return self.gpu

    def check_main(self, name: tuple[int, int]) -> None:
        """Raise RangeError when a memory of this side lies on a GPU."""
        if self.gpu is not None and self.gpu.holds(name[1]):
            raise RangeError(f"the memory in slot {name[0]} is memory of a GPU, and the other one main memory: {ONE_KIND}")

    def is_small(self, runs: int, total_bytes: int) -> bool:
        """Whether a transfer is moved at once, without slices."""
        return runs <= _FEW_RUNS and total_bytes <= self.inline_bytes

    def count_stored(self, stored_bytes: int) -> None:
        """A call has stored so many bytes here."""
        # Through a view: adding a pair to the array takes longer than copying 8 KiB.
        counts = self.counts.data
        counts[0] += stored_bytes
        counts[1] += 1


def copy_few(
    state: ExchangeState,
    source: ReadableProcess,
    source_name: tuple[int, int],
    target_name: tuple[int, int],
    runs: Sequence[Sequence[int]],
) -> int:
    """Copy a few short runs of main memory as `copy_slices` does, at once; returns the bytes. Raises KVBatonError."""
    state.check_main(target_name)
    address, target_bytes = state.table.pin(*target_name)
    try:
        is_dropped = target_name[1] in state.dropped
        moved = sum(run[2] for run in runs) if is_dropped else source.copy_few(source_name, address, target_bytes, runs)
    finally:
        state.table.unpin(target_name[0])
    state.count_stored(moved)
    return moved


def copy_slices(
    state: ExchangeState,
    source: ReadableProcess | GpuReader,
    source_name: tuple[int, int],
    target_name: tuple[int, int],
    runs: Runs,
) -> Generator[int, None, None]:
    """Copy runs out of a memory of another process into one of this process, a slice per step; yields the bytes of each.

    Raises RangeError when a range is wrong or either memory is not live, before the first slice or later.
    """
    source_address, source_bytes = source.find(*source_name)
    _, target_bytes = state.table.find(*target_name)
    check_offsets(runs[:, 0], runs[:, 2], source_bytes, "source")
    check_offsets(runs[:, 1], runs[:, 2], target_bytes, "target")
    cursor = RunCursor(runs)
    while cursor.remaining_bytes:
        piece = cursor.peek(state.slice_bytes, SLICE_RUNS)
        # Looked up for every slice: between two of them the memory may have been withdrawn, and its pages belong to something
        # else.
        address, _ = state.table.pin(*target_name)
        try:
            is_dropped = target_name[1] in state.dropped
            moved = int(piece[:, 2].sum()) if is_dropped else source.copy(source_name, source_address, address, piece)
        finally:
            state.table.unpin(target_name[0])
        cursor.advance(moved)
        yield moved
    state.count_stored(cursor.total_bytes)
    # After the last byte: what was copied counts only if the source had the memory registered all the time.
    source.find(*source_name)


class OwnerSide:
    """One accepted connection. `is_admitted` once the other end has shown that it knows the token."""

    def __init__(self, state: ExchangeState, why_full: Callable[[], str]) -> None:
        self.is_admitted = False
        self._state = state
        self._why_full = why_full
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._introduction = Introduction("")
        self._process: ReadableProcess | None = None
        self._gpu_sources = GpuSources()
        self._last_number = 0

    def steps(self) -> Generator[Step, bytes, None]:
        """The whole life of the connection."""
        try:
            yield from self._admit()
            while True:
                call = unpack_call((yield CALL_BYTES))
                if call.number <= self._last_number:
                    raise ProtocolError(f"request {call.number} after request {self._last_number}: a repetition")
                self._last_number = call.number
                is_one = call.kind is CallKind.PULL and call.count == 1 and not call.handle_bytes
                if is_one and self._state.is_small(1, call.total_bytes):
                    yield self._pulled_one(call)
                else:
                    yield from self._serve(call)
                self._state.served[call.kind] += 1
        finally:
            self._gpu_sources.close()
            if self._process is not None:
                self._process.close()

    def _admit(self) -> Generator[Step, bytes, None]:
        yield pack_hello(self._challenge)
        message = yield HANDSHAKE_BYTES
        secret = self._state.secret.fitting(message, self._challenge)
        refusal = self._why_full()
        if secret is None:
            refusal = "the token is not that of this engine: it has ended, or was restarted; fetch its description again"
        if secret is None or refusal:
            yield pack_answer(CallOutcome.FAILED, 0, refusal)
            raise PeerLost(refusal)
        proof = secret.owner_proof(self._challenge, unpack_handshake(message))
        yield pack_answer(CallOutcome.OK, 0, payload_bytes=len(proof)) + proof
        self.is_admitted = True
        length = int.from_bytes((yield 4), "little")
        if not 0 < length <= MAX_INTRODUCTION_BYTES:
            raise ProtocolError(f"an introduction of {length} bytes; at most {MAX_INTRODUCTION_BYTES} are allowed")
        self._introduction = unpack_introduction((yield length))
        reason = self._open_process()
        yield pack_answer(CallOutcome.FAILED if reason else CallOutcome.OK, 0, reason)

    def _open_process(self) -> str:
        """Find the initiator's process; returns why it cannot be read, which costs writes over `local` only."""
        peer, memory = self._introduction, self._state.process_memory
        if memory is None:
            return "this engine reads no other process"
        if peer.host_id != self._state.here.host:
            return f"it runs on another host (host_id {peer.host_id!r}, here {self._state.here.host!r})"
        process: ReadableProcess | None = None
        try:
            neighbour = Neighbour(peer.host_id, peer.pid, peer.start_ticks)
            process = ReadableProcess(memory, neighbour, peer.board_address, self._state.helpers)
            process.check_challenge(peer.challenge_address, self._challenge)
        except KVBatonError as error:
            if process is not None:
                process.close()
            return str(error)
        self._process = process
        return ""

    def _serve(self, call: MemoryCall) -> Generator[Step, bytes, None]:
        if call.kind is CallKind.NOTE:
            self._note(call)
            return
        if call.kind is CallKind.PROBE:
            yield self._probed(call)
            return
        runs = unpack_runs(call, (yield (call.count - 1) * RUN_BYTES) if call.count > 1 else b"")
        handle = unpack_handle((yield call.handle_bytes)) if call.handle_bytes else None
        if call.kind is CallKind.FETCH:
            yield from self._fetch(call, runs)
            return
        outcome, reason = CallOutcome.OK, ""
        try:
            if call.kind is CallKind.PULL:
                yield from self._pull(call, runs, handle)
            else:
                yield from self._push(call, runs)
        except RangeError as error:
            outcome, reason = CallOutcome.RANGE, str(error)
        except ProtocolError:
            raise
        except KVBatonError as error:
            outcome, reason = CallOutcome.FAILED, f"{type(error).__name__}: {error}"
        if not reason:
            self._note(call)
        yield pack_answer(outcome, call.number, reason)

    def _pulled_one(self, call: MemoryCall) -> bytes:
        """What `_serve` does with one short run, without arrays and further steps: a small write is mostly overhead."""
        if call.first[2] != call.total_bytes:
            raise ProtocolError(f"the run of a request does not add up to its {call.total_bytes} bytes")
        names = (call.own_slot, call.own_stamp), (call.remote_slot, call.remote_stamp)
        try:
            if self._process is None:
                raise PeerLost(_NOT_READABLE)
            copy_few(self._state, self._process, *names, (call.first,))
        except RangeError as error:
            return pack_answer(CallOutcome.RANGE, call.number, str(error))
        except KVBatonError as error:
            return pack_answer(CallOutcome.FAILED, call.number, f"{type(error).__name__}: {error}")
        if call.tag is not None:
            self._note(call)
        return pack_done(call.number)

    def _probed(self, call: MemoryCall) -> bytes:
        try:
            self._state.table.find(call.remote_slot, call.remote_stamp)
        except RangeError as error:
            return pack_answer(CallOutcome.RANGE, call.number, str(error))
        self._note(call)  # a read of GPU memory: its initiator asks after the last byte
        return pack_answer(CallOutcome.OK, call.number)

    def _pull(self, call: MemoryCall, runs: Runs, handle: MemoryHandle | None) -> Generator[Step, bytes, None]:
        names = (call.own_slot, call.own_stamp), (call.remote_slot, call.remote_stamp)
        source: ReadableProcess | GpuReader
        if handle is not None:
            source = GpuReader(self._state.gpu_of(names[1]), self._gpu_sources, handle)
        elif self._process is None:
            raise PeerLost(_NOT_READABLE)
        elif self._state.is_small(call.count, call.total_bytes):
            copy_few(self._state, self._process, *names, runs.tolist())
            return
        else:
            self._state.check_main(names[1])
            source = self._process
        for _ in copy_slices(self._state, source, *names, runs):
            if call.total_bytes > self._state.slice_bytes:
                yield TURN

    def _push(self, call: MemoryCall, runs: Runs) -> Generator[Step, bytes, None]:
        fill = None
        try:
            fill = MemoryFill(self._state.table, *self._target(call, runs, 1), runs[:, 1], runs[:, 2])
            yield Skip(call.total_bytes) if call.remote_stamp in self._state.dropped else fill
            self._state.count_stored(call.total_bytes)
        except RangeError:
            # The bytes are on their way: they are taken off the connection, so that the next call can be read.
            yield Skip(fill.vectors.remaining_bytes if fill is not None else call.total_bytes)
            raise

    def _fetch(self, call: MemoryCall, runs: Runs) -> Generator[Step, bytes, None]:
        try:
            send = MemorySend(self._state.table, *self._target(call, runs, 0), runs[:, 0], runs[:, 2])
        except RangeError as error:
            yield pack_answer(CallOutcome.RANGE, call.number, str(error))
            return
        yield pack_answer(CallOutcome.OK, call.number, payload_bytes=call.total_bytes)
        try:
            yield send
        except RangeError as error:
            # The reply's head has promised these bytes: whatever is sent instead, the peer would store.
            raise PeerLost(f"a memory was withdrawn while it was sent: {error}") from error
        self._note(call)

    def _target(self, call: MemoryCall, runs: Runs, column: int) -> tuple[int, int]:
        """The name of the memory of this side that a call means, once its ranges are checked. Raises RangeError."""
        name = call.remote_slot, call.remote_stamp
        _, memory_bytes = self._state.table.find(*name)
        self._state.check_main(name)
        check_offsets(runs[:, column], runs[:, 2], memory_bytes, ("source", "target")[column])
        return name

    def _note(self, call: MemoryCall) -> None:
        if call.tag is not None and self._state.keeps_notices:
            self._state.notices.add(self._introduction.initiator, call.tag)

"""The initiator's side: a connection to one peer, and the transfers that are on it.

Theory of progress. Replies come in the order of the calls. Whichever thread holds `_receiving` reads them: the thread that
waits for a transfer, one that asks for its state, or, while none does, the service thread, which is woken by epoll. Epoll is
armed for one event at a time and only while no thread reads, so a small write costs no change of threads on this side. A thread
that stops reading arms it again if anything is in flight; one that fails to get the lock relies on the holder to do so. Calls
are sent under `_sending`, which nothing waits under, so a thread can post while another one waits.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

import msgspec
import numpy as np

from kvbaton.core.plan import Runs
from kvbaton.errors import KVBatonError, PeerLost, PeerRefused, ProtocolError, QueueFull, RangeError, TransportError
from kvbaton.transport.base import Direction, Region
from kvbaton.transport.exchange.base import INLINE_BYTES, INLINE_S, MemoryHandle, TransferRequest
from kvbaton.transport.exchange.flow import Flow, MemoryFill, MemorySend, Skip, Step
from kvbaton.transport.exchange.gpu import GpuReader, GpuSources
from kvbaton.transport.exchange.owner import ONE_KIND, ExchangeState, copy_few, copy_slices
from kvbaton.transport.exchange.reach import ReadableProcess
from kvbaton.transport.exchange.wire import (
    ANSWER_BYTES,
    MAX_CALL_BYTES,
    MAX_CALL_RUNS,
    CallKind,
    CallOutcome,
    Introduction,
    MemoryCall,
    pack_call,
    pack_done,
    pack_pull,
    unpack_answer,
)
from kvbaton.transport.runs import RunCursor, check_offsets
from kvbaton.transport.tcp.sockets import VectorCalls, tune
from kvbaton.transport.tcp.wire import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, Secret, unpack_hello

__all__ = ["ExchangeChannel", "InFlight", "ReadJob", "Transit"]

_NO_RUNS = np.empty((0, 3), np.uint64)


class InFlight:
    """How many transfers of an exchange are under way, the limit, and how they ended. Safe to use from any thread."""

    def __init__(self, most: int, ends: memoryview) -> None:
        """`ends` is where transfers that were posted, succeeded and failed are counted."""
        self._most = most
        self._count = 0
        self._ends = ends
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def enter(self) -> None:
        """Count one more. Raises QueueFull."""
        with self._lock:
            if self._count >= self._most:
                raise QueueFull(f"queue full: {self._count} transfers are in flight (max_in_flight {self._most}); wait for one")
            self._ends[0] += 1
            self._count += 1

    def refuse(self) -> None:
        """Count one that was refused before it began: posted, and failed."""
        with self._lock:
            self._ends[0] += 1
            self._ends[2] += 1

    def leave(self, has_failed: bool = False) -> None:
        """Count one less."""
        with self._lock:
            self._ends[2 if has_failed else 1] += 1
            self._count -= 1


class Transit:
    """A posted transfer; the parts that carry it out call `finish_part`."""

    __slots__ = ("_channel", "_counter", "_event", "_lock", "_parts", "error", "moved_bytes")

    def __init__(self, channel: ExchangeChannel, parts: int, counter: InFlight) -> None:
        counter.enter()
        self._channel = channel
        self._counter = counter
        self._parts = parts
        self._event: threading.Event | None = None
        self._lock = threading.Lock()
        self.error = ""
        self.moved_bytes = 0
        if not parts:
            counter.leave()

    def is_finished(self) -> bool:
        """Whether it is over, after one look at what has arrived."""
        if self._parts:
            self._channel.look()
        return not self._parts

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it is over; see `PendingTransfer`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._parts:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return self.is_finished()
            self._channel.drive(self, left)
        return True

    @property
    def is_over(self) -> bool:
        """Whether it is over, without a look."""
        return not self._parts

    def wait_for_event(self, timeout_s: float) -> None:
        """Wait until another thread has finished it, at most `timeout_s`."""
        with self._lock:
            if not self._parts:
                return
            event = self._event = self._event or threading.Event()
        event.wait(timeout_s)

    def finish_part(self, moved_bytes: int, error: str = "") -> None:
        """One part is over."""
        with self._lock:
            self.moved_bytes += moved_bytes
            self.error = self.error or error
            self._parts -= 1
            if self._parts:
                return
            event = self._event
        self._counter.leave(has_failed=bool(self.error))
        if event is not None:
            event.set()


class _CallPart:
    """One call of a transfer on the wire."""

    __slots__ = ("is_gpu", "number", "runs", "slot", "stamp", "total_bytes", "transit")

    def __init__(
        self, transit: Transit, number: int, runs: Runs | None, name: tuple[int, int], total_bytes: int, is_gpu: bool = False
    ) -> None:
        """`runs` are those of a read, whose bytes follow the answer into the memory that `name` names.

        `is_gpu`: memory of a GPU was written from, which must be registered here when the answer has come.
        """
        self.transit, self.number, self.runs, self.total_bytes = transit, number, runs, total_bytes
        self.slot, self.stamp = name
        self.is_gpu = is_gpu


class ReadJob:
    """A read that this side executes, slice by slice: over `local`, or out of memory of a GPU."""

    def __init__(
        self, channel: ExchangeChannel, request: TransferRequest, transit: Transit, source: ReadableProcess | GpuReader
    ) -> None:
        own, remote = (request.own.slot, request.own.stamp), (request.remote.slot, request.remote.stamp)
        self._channel, self._transit, self._request = channel, transit, request
        self._slices = copy_slices(channel.state, source, remote, own, request.runs)
        self._moved_bytes = 0

    def step(self) -> bool:
        """Copy a slice; returns whether there is more to do. Never raises."""
        error = ""
        try:
            self._moved_bytes += next(self._slices)
            return True
        except StopIteration:
            if self._request.remote.gpu_parts:
                self._channel.confirm_read(self._request, self._transit, self._moved_bytes)
                return False
            self._channel.send_notice(self._request.tag)
        except (KVBatonError, OSError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        self._transit.finish_part(self._moved_bytes, error)
        return False

    def abandon(self, reason: str) -> None:
        """End it with an error."""
        self._transit.finish_part(self._moved_bytes, reason)


class ExchangeChannel:
    """A peer, connected. Posts transfers to it; `arm` and `queue` belong to the service thread's loop."""

    def __init__(
        self,
        state: ExchangeState,
        secret: Secret,
        address: tuple[str, int],
        timeout_s: float,
        counter: InFlight,
        arm: Callable[[ExchangeChannel, bool], None],
        queue: Callable[[ReadJob], None],
    ) -> None:
        """Dial and authenticate, within `timeout_s`. Raises PeerLost, PeerRefused, ProtocolError."""
        self.state = state
        self.peer_process: ReadableProcess | None = None
        self.owner_reads = False
        self.why_not_read = ""
        self._gpu_sources = GpuSources()
        self._counter, self._arm, self._queue = counter, arm, queue
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._outbox: deque[bytes | MemorySend] = deque()
        self._parts: deque[_CallPart] = deque()
        self._calls = VectorCalls()
        self._number = 0
        self._failure = ""
        self._broken = ""
        self._is_slow = False
        self.progress_at = time.monotonic()
        try:
            self.sock = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise PeerLost(f"no connection to {address[0]}:{address[1]}: {error}") from error
        try:
            self._handshake(secret, time.monotonic() + timeout_s)
        except OSError as error:
            self.sock.close()
            raise PeerLost(f"{address[0]}:{address[1]} did not complete the handshake: {error}") from error
        except BaseException:
            self.sock.close()
            raise
        tune(self.sock)
        # Only used while `_receiving` is held: a poll object refuses a second thread.
        self._readable, self._sendable = select.poll(), select.poll()
        self._readable.register(self.sock.fileno(), select.POLLIN)
        self._sendable.register(self.sock.fileno(), select.POLLIN | select.POLLOUT)
        self._flow = Flow(self.sock, self._answers())

    @property
    def failure(self) -> str:
        """Why it is broken; empty while it works."""
        return self._broken

    @property
    def is_busy(self) -> bool:
        """Whether something is in flight, or waits to be sent."""
        return bool(self._parts or self._outbox or self._broken)

    def post(self, request: TransferRequest) -> Transit:
        """Start a transfer; see `PeerLink.post`."""
        runs = request.runs
        if runs.dtype != np.uint64 or runs.ndim != 2 or runs.shape[1] != 3:
            raise RangeError(f"runs must be a uint64 array of shape (n, 3), not {runs.dtype} of shape {runs.shape}")
        self._check_ranges(request)
        is_gpu = bool(request.own.gpu_parts)
        if is_gpu is not bool(request.remote.gpu_parts):
            kinds = ("memory of a GPU", "main memory") if is_gpu else ("main memory", "memory of a GPU")
            raise TransportError(f"the memory of this side is {kinds[0]}, that of the peer {kinds[1]}: {ONE_KIND}")
        if self._broken:
            raise TransportError(f"the connection to the peer is broken ({self._broken}); connect again")
        total = int(runs[:, 2].sum())
        if not total:
            transit = Transit(self, 0, self._counter)
            self.send_notice(request.tag)
        elif request.direction is Direction.READ and is_gpu:
            gpu = self.state.gpu_of((request.own.slot, request.own.stamp))
            transit = self._read_here(request, GpuReader(gpu, self._gpu_sources, request.remote), total)
            self._settle_small(transit, total)
        elif request.direction is Direction.READ and self.peer_process is not None:
            transit = self._read_here(request, self.peer_process, total)
        else:
            transit = self._send_calls(request, total)
        return transit

    def post_run(
        self, direction: Direction, own: MemoryHandle, remote: MemoryHandle, run: tuple[int, int, int], tag: int | None
    ) -> Transit | None:
        """`post` for one short run, without arrays, which cost more than the copy; None when it has to be posted as others."""
        source, target, size = run
        reads = direction is Direction.READ
        process = self.peer_process
        if self._broken or not 0 < size <= INLINE_BYTES or (process is None if reads else not self.owner_reads):
            return None
        if own.gpu_parts or remote.gpu_parts:
            return None
        _, own_bytes = self.state.table.find(own.slot, own.stamp)
        source_bytes, target_bytes = (remote.memory_bytes, own_bytes) if reads else (own_bytes, remote.memory_bytes)
        if source + size > source_bytes or target + size > target_bytes:
            sizes = f"{source_bytes} and {target_bytes}"
            raise RangeError(f"{size} bytes from offset {source} to {target} lie outside memories of {sizes} bytes")
        if process is not None and reads:
            transit = Transit(self, 1, self._counter)
            self._read_few(own, remote, (run,), tag, transit, process)
            return transit
        with self._sending:
            # Looked at again: once `fail` has emptied the calls in flight, nothing would end one that is added.
            if self.failure:
                return None
            transit = Transit(self, 1, self._counter)
            number = self._number = self._number + 1
            self._parts.append(_CallPart(transit, number, None, (own.slot, own.stamp), size))
            self._outbox.append(pack_pull(number, tag, (own.slot, remote.slot, own.stamp, remote.stamp), run))
            self.progress_at = time.monotonic()
            problem = self._send_first() if len(self._outbox) == 1 else ""
        if problem:
            self._break(problem)
        self._settle_small(transit, size)
        return transit

    def probe(self, remote: MemoryHandle, timeout_s: float) -> None:
        """Ask whether a memory of the peer is registered. RangeError: it is not; TransportError: no answer."""
        transit = Transit(self, 1, self._counter)
        self._send_probe(remote, transit, 0, None)
        if not transit.wait(timeout_s):
            raise TransportError(f"the peer did not answer within {timeout_s:g} s")
        if transit.error.startswith("RangeError"):
            raise RangeError(transit.error.removeprefix("RangeError: "))
        if transit.error:
            raise TransportError(transit.error)

    def confirm_read(self, request: TransferRequest, transit: Transit, moved_bytes: int) -> None:
        """End a read out of memory of a GPU: the answer of its owner decides, and a notice is left if that is good."""
        self._send_probe(request.remote, transit, moved_bytes, request.tag)
        self._arm(self, bool(self._outbox))

    def _send_probe(self, remote: MemoryHandle, transit: Transit, moved_bytes: int, tag: int | None) -> None:
        with self._sending:
            # Looked at with the lock held: once `fail` has emptied the calls in flight, nothing would end one that is added.
            problem = self._broken
            if not problem:
                self._number += 1
                self._parts.append(_CallPart(transit, self._number, None, (remote.slot, remote.stamp), moved_bytes))
                call = MemoryCall(CallKind.PROBE, self._number, tag, 0, 0, remote.slot, remote.stamp, 0, 0)
                self._outbox.append(pack_call(call, _NO_RUNS))
                self.progress_at = time.monotonic()
        if problem:
            transit.finish_part(0, problem)
        self._flush()

    def send_notice(self, tag: int | None) -> None:
        """Have the peer keep a notice; one that it does not get is not sent again."""
        if tag is None or self._broken:
            return
        with self._sending:
            self._number += 1
            call = MemoryCall(CallKind.NOTE, self._number, tag, 0, 0, 0, 0, 0, 0)
            self._outbox.append(pack_call(call, _NO_RUNS))
        self._flush()

    def look(self) -> None:
        """Take what has arrived, unless another thread does; never waits."""
        if self._receiving.acquire(blocking=False):
            try:
                self._flush()
                self._advance()
            finally:
                self._receiving.release()
            if self.is_busy:
                self._arm(self, bool(self._outbox))

    def drive(self, transit: Transit, timeout_s: float | None) -> None:
        """Make progress until `transit` is over, at most about `timeout_s`."""
        until = time.monotonic() + (1.0 if timeout_s is None else min(timeout_s, 1.0))
        if self._broken or not self._parts or not self._receiving.acquire(blocking=False):
            # A read that the service thread executes, or another thread reads the replies: it may leave when its own transfer
            # is over, and arms epoll then, so the service thread finishes this one.
            transit.wait_for_event(max(0.0, until - time.monotonic()))
            return
        try:
            is_open = self.sock.fileno() >= 0
            while is_open and not transit.is_over and not self._broken and (left := until - time.monotonic()) > 0:
                poller = self._sendable if self._outbox else self._readable
                if poller.poll(left * 1000):
                    if self._outbox:
                        self._flush()
                    if not self._take_done():
                        self._advance(lambda: transit.is_over)
        finally:
            self._receiving.release()
        if self.is_busy:
            self._arm(self, bool(self._outbox))

    def on_event(self, timeout_s: float) -> None:
        """The service thread's turn, after an event or for the time limit."""
        overdue = self._parts and time.monotonic() - self.progress_at > timeout_s
        if overdue and not self._broken:
            self._broken = f"PeerLost: the peer made no progress within {timeout_s:g} s"
        if self._broken:
            self.fail(self._broken)
        else:
            self.look()

    def fail(self, reason: str) -> None:
        """End the connection and everything on it. Idempotent; from any thread."""
        with self._sending:
            if self._failure:
                return
            self._failure = self._broken = reason
            self._outbox.clear()
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        with self._receiving:
            self._flow.close()
            while self._parts:
                self._parts.popleft().transit.finish_part(0, reason)
        self._gpu_sources.close()
        if self.peer_process is not None:
            self.peer_process.close()

    def _handshake(self, secret: Secret, deadline: float) -> None:
        def take(count: int) -> bytes:
            data = b""
            while len(data) < count:
                self.sock.settimeout(max(0.001, deadline - time.monotonic()))
                part = self.sock.recv(count - len(data))
                if not part:
                    raise PeerLost("the peer closed the connection during the handshake")
                data += part
            return data

        challenge = unpack_hello(take(HELLO_BYTES))
        nonce, secret = secrets.token_bytes(NONCE_BYTES), secret.now()
        self.sock.sendall(secret.handshake(challenge, nonce))
        answer = unpack_answer(take(ANSWER_BYTES))
        if answer.outcome is not CallOutcome.OK:
            raise PeerRefused(take(answer.payload_bytes).decode(errors="replace"))
        if answer.payload_bytes != PROOF_BYTES or take(PROOF_BYTES) != secret.owner_proof(challenge, nonce):
            raise ProtocolError("the process at the other end is not the peer: it does not know the token")
        # The owner reads the challenge back out of this process, so it has to stay where it is until the answer has come.
        shown = Region.of(bytearray(challenge))
        here = self.state.here
        introduction = Introduction(self.state.name)
        if self.state.process_memory is not None:
            places = self.state.table.board_address, shown.address
            introduction = Introduction(self.state.name, here.host, here.pid, here.ticks, *places)
        data = msgspec.msgpack.encode(introduction)
        self.sock.sendall(len(data).to_bytes(4, "little") + data)
        answer = unpack_answer(take(ANSWER_BYTES))
        self.owner_reads = answer.outcome is CallOutcome.OK
        self.why_not_read = take(answer.payload_bytes).decode(errors="replace")
        del shown

    def _check_ranges(self, request: TransferRequest) -> None:
        own, remote = (1, 0) if request.direction is Direction.READ else (0, 1)
        _, own_bytes = self.state.table.find(request.own.slot, request.own.stamp)
        names = "source", "target"
        for column, memory_bytes in ((own, own_bytes), (remote, request.remote.memory_bytes)):
            check_offsets(request.runs[:, column], request.runs[:, 2], memory_bytes, names[column])

    def _read_here(self, request: TransferRequest, source: ReadableProcess | GpuReader, total: int) -> Transit:
        transit = Transit(self, 1, self._counter)
        if isinstance(source, ReadableProcess) and self.state.is_small(len(request.runs), total):
            self._read_few(request.own, request.remote, request.runs.tolist(), request.tag, transit, source)
            return transit
        job = ReadJob(self, request, transit, source)
        if total > INLINE_BYTES:
            self._queue(job)
        else:
            while job.step():
                pass
        return transit

    def _read_few(
        self,
        own: MemoryHandle,
        remote: MemoryHandle,
        runs: Sequence[Sequence[int]],
        tag: int | None,
        transit: Transit,
        process: ReadableProcess,
    ) -> None:
        try:
            moved = copy_few(self.state, process, (remote.slot, remote.stamp), (own.slot, own.stamp), runs)
        except (KVBatonError, OSError, ValueError) as problem:
            transit.finish_part(0, f"{type(problem).__name__}: {problem}")
            return
        self.send_notice(tag)
        transit.finish_part(moved)

    def _send_calls(self, request: TransferRequest, total: int) -> Transit:
        kind = CallKind.FETCH
        own, remote = request.own, request.remote
        handle = msgspec.msgpack.encode(own) if own.gpu_parts else b""
        if request.direction is Direction.WRITE:
            kind = CallKind.PULL if self.owner_reads or handle else CallKind.PUSH
        pieces = _cut(request.runs, total)
        sends = []
        if kind is CallKind.PUSH:
            sends = [MemorySend(self.state.table, own.slot, own.stamp, runs[:, 0], runs[:, 2]) for runs in pieces]
        with self._sending:
            if self._broken:
                raise TransportError(f"the connection to the peer is broken ({self._broken}); connect again")
            transit = Transit(self, len(pieces), self._counter)
            for at, runs in enumerate(pieces):
                self._number += 1
                part_bytes = int(runs[:, 2].sum()) if len(pieces) > 1 else total
                tag = request.tag if at == len(pieces) - 1 else None
                names = own.slot, own.stamp, remote.slot, remote.stamp
                call = MemoryCall(kind, self._number, tag, *names, len(runs), part_bytes)
                filled = runs if kind is CallKind.FETCH else None
                name = own.slot, own.stamp
                self._parts.append(_CallPart(transit, self._number, filled, name, part_bytes, is_gpu=bool(handle)))
                self._outbox.append(pack_call(call, runs, handle))
                self._outbox.extend(sends[at : at + 1])
            self.progress_at = time.monotonic()
        self._settle_small(transit, total)
        return transit

    def _settle_small(self, transit: Transit, total: int) -> None:
        """Send what was posted; wait for the end of a small transfer, and have the service thread watch what is not over."""
        if self._outbox:
            self._flush()
        if total <= INLINE_BYTES and not self._is_slow:
            self.drive(transit, INLINE_S)
            self._is_slow = not transit.is_over  # a peer that stands still costs its callers one wait, not one per call
        if not transit.is_over:
            self._arm(self, bool(self._outbox))

    def _flush(self) -> None:
        """Send what the socket takes."""
        problem = ""
        with self._sending:
            while self._outbox and not self._broken and not problem:
                before = len(self._outbox)
                problem = self._send_first()
                if len(self._outbox) == before:
                    break
        if problem:
            self._break(problem)

    def _send_first(self) -> str:
        """Send the first item of the outbox, or what the socket takes of it, with `_sending` held; why the connection broke."""
        item = self._outbox[0]
        try:
            if isinstance(item, bytes):
                sent = self.sock.send(item)
                if sent < len(item):
                    self._outbox[0] = item[sent:]
                    return ""
            elif item.vectors.remaining_bytes:
                item.move(self._calls, self.sock, is_send=True)
                if item.vectors.remaining_bytes:
                    return ""
        except BlockingIOError:
            return ""
        except RangeError as error:
            # The head of the call is sent, its bytes are gone: the only way to end the call is to end the connection.
            return f"RangeError: {error}"
        except OSError as error:
            return f"PeerLost: the connection to the peer broke: {error}"
        self._outbox.popleft()
        self.progress_at = time.monotonic()
        return ""

    def _advance(self, is_enough: Callable[[], bool] | None = None) -> None:
        """Take what has arrived, until that `is_enough`; with `_receiving` held."""
        if self._broken:
            return
        before = self._flow.moved_bytes
        try:
            self._flow.advance(is_enough)
        except OSError as error:
            self._break(f"PeerLost: the connection to the peer broke: {error}")
        except (KVBatonError, StopIteration, ValueError) as error:
            self._break(f"{type(error).__name__}: {error}")
        if self._flow.moved_bytes != before:
            self.progress_at = time.monotonic()
            self._is_slow = False

    def _take_done(self) -> bool:
        """Take the reply to the oldest call without the flow, where it is that of a write that was stored; with `_receiving`
        held and something to receive. A small write is mostly overhead, and half of this side's is the flow.
        """
        parts = self._parts
        if self._broken or not parts or not self._flow.is_between_messages:
            return False
        part = parts[0]
        if part.runs is not None or part.is_gpu:
            return False
        try:
            data = self.sock.recv(ANSWER_BYTES)
        except OSError:
            return False  # nothing was taken, so the flow meets it again
        if data != pack_done(part.number):
            self._flow.put_back(data)
            return False
        parts.popleft()
        self.progress_at = time.monotonic()
        self._is_slow = False
        part.transit.finish_part(part.total_bytes)
        return True

    def _break(self, reason: str) -> None:
        """Have the connection failed by the service thread: this thread may hold either lock, and `fail` takes both."""
        self._broken = self._broken or reason
        self._arm(self, True)

    def _answers(self) -> Generator[Step, bytes, None]:
        while True:
            answer = unpack_answer((yield ANSWER_BYTES))
            if not self._parts or self._parts[0].number != answer.number:
                raise ProtocolError(f"an answer to request {answer.number}, which is not the next one")
            part, error, moved = self._parts[0], "", 0
            if answer.outcome is not CallOutcome.OK:
                text = (yield answer.payload_bytes).decode(errors="replace") if answer.payload_bytes else "refused"
                error = f"RangeError: {text}" if answer.outcome is CallOutcome.RANGE else text
                self._gpu_sources.forget(part.stamp)
            elif part.runs is None:
                moved, error = part.total_bytes, self._why_stale(part) if part.is_gpu else ""
            elif answer.payload_bytes != part.total_bytes:
                raise ProtocolError(f"{answer.payload_bytes} bytes instead of {part.total_bytes}")
            else:
                error = yield from self._fill(part, part.runs)
                moved = 0 if error else part.total_bytes
            self._parts.popleft()
            part.transit.finish_part(moved, error)

    def _why_stale(self, part: _CallPart) -> str:
        """Why what the owner of the target has read does not count: the memory here was withdrawn meanwhile."""
        try:
            self.state.table.find(part.slot, part.stamp)
        except RangeError as error:
            return f"RangeError: {error}"
        return ""

    def _fill(self, part: _CallPart, runs: Runs) -> Generator[Step, bytes, str]:
        fill = None
        try:
            fill = MemoryFill(self.state.table, part.slot, part.stamp, runs[:, 1], runs[:, 2])
            yield Skip(part.total_bytes) if part.stamp in self.state.dropped else fill
            self.state.count_stored(part.total_bytes)
        except RangeError as error:
            yield Skip(fill.vectors.remaining_bytes if fill is not None else part.total_bytes)
            return f"RangeError: {error}"
        return ""


def _cut(runs: Runs, total: int) -> list[Runs]:
    """The runs, in as many calls as the limits ask for."""
    if total <= MAX_CALL_BYTES and len(runs) <= MAX_CALL_RUNS:
        return [runs[runs[:, 2] > 0] if not runs[:, 2].all() else runs]
    cursor, pieces = RunCursor(runs[runs[:, 2] > 0]), []
    while cursor.remaining_bytes:
        pieces.append(cursor.peek(MAX_CALL_BYTES, MAX_CALL_RUNS))
        cursor.advance(int(pieces[-1][:, 2].sum()))
    return pieces

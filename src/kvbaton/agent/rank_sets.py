"""The ranks of an instance as its driver runs them: all in this process, or each in one of its own, which runs a `RankLoop`."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.agent.ports import Memory, Ranks
from kvbaton.agent.rank import NO_CONTROLS, RankAgent, RankControls, RegionMemory
from kvbaton.agent.rank_orders import RankOrder, RankReport, Reports, decode_order, decode_reports, encode_order, encode_reports
from kvbaton.core.handoff import Executor
from kvbaton.core.layout import Layout
from kvbaton.errors import KVBatonError
from kvbaton.transport.base import Transport
from kvbaton.transport.runs import load_loops

__all__ = ["LocalRanks", "RankLoop", "RankSet", "RemoteRanks"]

log = logging.getLogger(__name__)

_SEND_S = 10.0
_FRAMES_PER_TURN = 256

_IDLE_S = 5.0
_REPORT_S = 30.0
_STOP_S = 10.0
_ORDERS_PER_TURN = 256


class RankSet(Ranks, Protocol):
    """What a driver needs of its ranks beside what the coordinator sends them. Nothing here waits for a peer."""

    @property
    def transport_name(self) -> str:
        """The transport that moves the bytes of this instance."""

    @property
    def reports(self) -> deque[RankReport]:
        """What ranks have reported and the driver has not taken yet."""

    @property
    def runs_total(self) -> int:
        """How many runs the ranks have posted so far."""

    @property
    def wakeups(self) -> list[int]:
        """File descriptors that are readable when `poll` has something to do."""

    @property
    def has_work(self) -> bool:
        """Whether `poll` should be called again at once."""

    def deadlines(self) -> list[float | None]:
        """When `poll` should be called again at the latest, whatever wakes us."""

    def poll(self) -> None:
        """Let the ranks work, and take what they report."""

    def close(self) -> None:
        """Close everything. Idempotent."""


class LocalRanks:
    """The one rank of an instance, in this process. `memory` is the region of `transport`, for checksums.

    `unfenced_writes` lets peers write there, over a transport that cannot fence them.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        transfer_timeout: float,
        memory: memoryview | Memory | None = None,
        *,
        unfenced_writes: bool = False,
        controls: RankControls = NO_CONTROLS,
    ) -> None:
        self.reports: deque[RankReport] = deque()
        self._transport = transport
        if isinstance(memory, memoryview):
            memory = RegionMemory(memory) if memory else None
        self.agent = RankAgent(
            0,
            layout,
            transport,
            self.reports.append,
            clock=time.monotonic,
            transfer_timeout=transfer_timeout,
            memory=memory,
            unfenced_writes=unfenced_writes,
            controls=controls,
            loops=load_loops(),
        )
        self.transport_name, self.executor = transport.name, self.agent.executor
        self.counts_arrivals, self.fences_writers = self.agent.counts_arrivals, self.agent.fences_writers

    @property
    def runs_total(self) -> int:
        return self.agent.runs_total

    @property
    def wakeups(self) -> list[int]:
        return [self._transport.wakeup_fd]

    @property
    def has_work(self) -> bool:
        return self.agent.has_work

    def deadlines(self) -> list[float | None]:
        return [self.agent.next_deadline()]

    def poll(self) -> None:
        self.agent.poll()

    def close(self) -> None:
        self._transport.close()

    def send(self, rank: int, order: RankOrder) -> None:
        del rank
        self.agent.handle(order)

    def send_all(self, order: RankOrder) -> None:
        self.agent.handle(order)


class RemoteRanks:
    """Ranks in processes of their own, each at the other end of a channel; `lost` is called when one cannot be reached.

    Orders go out at once. While a rank does not take one, its reports are read: otherwise both ends could have full buffers
    and wait for each other. A rank that takes nothing for long is lost, and so is the instance.
    """

    has_work = False  # the ranks work by themselves
    counts_arrivals = False  # the source states when all of its bytes are in

    def __init__(
        self,
        channels: Sequence[Channel],
        transport_name: str,
        executor: Executor,
        lost: Callable[[str], None],
        *,
        fences_writers: bool,
    ) -> None:
        self.reports: deque[RankReport] = deque()
        self.transport_name = transport_name
        self.executor = executor
        self.fences_writers = fences_writers
        self._channels = list(channels)
        self._lost = lost
        self._is_lost = False
        self._runs: dict[int, int] = {}

    @property
    def runs_total(self) -> int:
        """As the ranks counted them when they last reported something."""
        return sum(self._runs.values())

    @property
    def wakeups(self) -> list[int]:
        return [] if self._is_lost else [channel.fileno() for channel in self._channels]

    def deadlines(self) -> list[float | None]:
        """None: the ranks keep their own."""
        return []

    def poll(self) -> None:
        for channel in self._channels:
            for _ in range(_FRAMES_PER_TURN):
                if self._is_lost or not self._take(channel):
                    break

    def close(self) -> None:
        """Close the channels; the ranks end by that."""
        self._is_lost = True
        for channel in self._channels:
            channel.close()

    def send(self, rank: int, order: RankOrder) -> None:
        """Send the order to its process; a rank that cannot be reached is reported by `lost`."""
        channel = self._channels[rank]
        if not self._is_lost:
            try:
                channel.send(encode_order(order), _SEND_S, meanwhile=lambda: self._take(channel))
            except (ChannelClosed, ChannelStuck) as error:
                self._lose(error)

    def send_all(self, order: RankOrder) -> None:
        for rank in range(len(self._channels)):
            self.send(rank, order)

    def _take(self, channel: Channel) -> bool:
        """Take one frame of reports, if there is one."""
        try:
            frame = channel.receive(0.0)
        except (ChannelClosed, ChannelStuck) as error:
            self._lose(error)
            return False
        if frame is not None:
            reports = decode_reports(frame)
            self._runs[channel.fileno()] = reports.runs_total
            self.reports += reports.reports
        return frame is not None

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.error("the agents have lost a rank: %s", error)
            self._lost(str(error))


class RankLoop:
    """Runs one rank agent until `close`, or until its coordinator is gone.

    `instance` has the layouts of all ranks of the instance, this one's among them at `rank`. `unfenced_writes` lets peers write
    into `memory`, over a transport that cannot fence them.
    """

    def __init__(
        self,
        rank: int,
        instance: Sequence[Layout],
        transport: Transport,
        channel: Channel,
        transfer_timeout: float,
        memory: memoryview,
        *,
        unfenced_writes: bool = False,
        controls: RankControls = NO_CONTROLS,
    ) -> None:
        self._transport = transport
        self._channel = channel
        self._reports: list[RankReport] = []
        self.agent = RankAgent(
            rank,
            instance[rank],
            transport,
            self._reports.append,
            clock=time.monotonic,
            transfer_timeout=transfer_timeout,
            memory=RegionMemory(memory),
            unfenced_writes=unfenced_writes,
            instance=instance,
            controls=controls,
            loops=load_loops(),
        )
        self.errors_total = 0
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvbaton-rank-agent", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and the transport; waits a bounded time. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._transport.close()
        self._channel.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        poll = select.poll()
        for number in (self._channel.fileno(), self._transport.wakeup_fd, self._wake_fd):
            poll.register(number, select.POLLIN)
        try:
            while not self._stopping.is_set():
                poll.poll(self._timeout_s() * 1000)
                self._turn()
        except (ChannelClosed, ChannelStuck) as error:
            log.info("the agent of rank %d ends: %s", self.agent.rank, error)

    def _timeout_s(self) -> float:
        if self.agent.has_work:
            return 0.0
        deadline = self.agent.next_deadline()
        return _IDLE_S if deadline is None else min(_IDLE_S, max(0.0, deadline - time.monotonic()))

    def _turn(self) -> None:
        for _ in range(_ORDERS_PER_TURN):
            frame = self._channel.receive(0.0)
            if frame is None:
                break
            self._guarded(partial(self.agent.handle, decode_order(frame)))
        self._guarded(self.agent.poll)
        # One frame per turn, after the orders and completions: the coordinator sees all that this turn has changed at once.
        if self._reports:
            frame_out = encode_reports(Reports(self.agent.runs_total, self._reports))
            self._reports.clear()
            self._channel.send(frame_out, _REPORT_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        """One failing order never stops the thread; a copy that needed it fails when it moves something."""
        try:
            work()
        except KVBatonError as error:
            self.errors_total += 1
            log.warning("rank %d: %s", self.agent.rank, error)
        except Exception:  # one bug must not take the other hand-offs of this rank with it
            self.errors_total += 1
            log.exception("the agent of rank %d continues after an error of its own", self.agent.rank)

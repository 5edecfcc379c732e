"""The ranks of an instance as its driver runs them: all in this process, or each in one of its own."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.agent.ports import Ranks
from kvbaton.agent.rank import RankAgent
from kvbaton.agent.rank_orders import RankOrder, RankReport, decode_reports, encode_order
from kvbaton.agent.summing import RegionMemory
from kvbaton.core.handoff import Executor
from kvbaton.core.layout import Layout
from kvbaton.transport.base import Transport

__all__ = ["LocalRanks", "RankSet", "RemoteRanks"]

log = logging.getLogger(__name__)

_SEND_S = 10.0
_FRAMES_PER_TURN = 256


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
        memory: memoryview | None = None,
        *,
        unfenced_writes: bool = False,
    ) -> None:
        self.reports: deque[RankReport] = deque()
        self._transport = transport
        region = RegionMemory(memory) if memory else None
        self.agent = RankAgent(
            0,
            layout,
            transport,
            self.reports.append,
            clock=time.monotonic,
            transfer_timeout=transfer_timeout,
            memory=region,
            unfenced_writes=unfenced_writes,
        )

    @property
    def transport_name(self) -> str:
        return self._transport.name

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

    @property
    def executor(self) -> Executor:
        return self.agent.executor

    @property
    def holds_aux(self) -> bool:
        return self.agent.holds_aux

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

    def __init__(
        self, channels: Sequence[Channel], transport_name: str, executor: Executor, lost: Callable[[str], None]
    ) -> None:
        self.reports: deque[RankReport] = deque()
        self.transport_name = transport_name
        self.executor = executor
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

    @property
    def has_work(self) -> bool:
        """Never: the ranks work by themselves."""
        return False

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

    @property
    def holds_aux(self) -> bool:
        """No: aux records of such an instance travel in messages."""
        return False

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

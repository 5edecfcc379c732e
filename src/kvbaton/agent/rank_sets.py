"""The ranks of an instance as its driver runs them: all in this process, or each in one of its own."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.agent.ports import AuxAsk, LegId, LegOpen, RankReport, Ranks, SumAsk
from kvbaton.agent.rank import RankAgent
from kvbaton.agent.rank_orders import (
    CloseLeg,
    Connect,
    Disconnect,
    DropSums,
    Move,
    OpenLeg,
    Order,
    ResetRegion,
    Revoke,
    StopLeg,
    SumSpans,
    decode_reports,
    encode_order,
)
from kvbaton.agent.summing import RegionMemory
from kvbaton.core.card import Card
from kvbaton.core.handoff import BlockLists, Executor, HandoffKey, Incarnation, Span
from kvbaton.core.layout import Layout
from kvbaton.core.timeline import Side
from kvbaton.transport.base import Transport

__all__ = ["LocalRanks", "RankSet", "RemoteRanks"]

log = logging.getLogger(__name__)

_SEND_S = 10.0
_FRAMES_PER_TURN = 256


class RankSet(Ranks, Protocol):
    """What a driver needs of its ranks beside what the coordinator says to them. Nothing here waits for a peer."""

    @property
    def transport_name(self) -> str:
        """How the bytes of this instance travel."""

    @property
    def reports(self) -> deque[RankReport]:
        """What ranks have reported and nobody has taken yet."""

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
        """Let the ranks go on, and take what they report."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class LocalRanks:
    """The one rank of an instance, in this process. `memory` is the region of `transport`, for checksums.

    `unfenced_writes` lets peers write there, over a transport that cannot fence them.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        patience_s: float,
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
            patience_s=patience_s,
            memory=region,
            unfenced_writes=unfenced_writes,
        )

    @property
    def transport_name(self) -> str:
        """That of the transport."""
        return self._transport.name

    @property
    def runs_total(self) -> int:
        """Those of the agent."""
        return self.agent.runs_total

    @property
    def wakeups(self) -> list[int]:
        """That of the transport."""
        return [self._transport.wakeup_fd]

    @property
    def has_work(self) -> bool:
        """Whether the agent has."""
        return self.agent.has_work

    def deadlines(self) -> list[float | None]:
        """That of the agent."""
        return [self.agent.next_deadline()]

    def poll(self) -> None:
        """Let the agent go on."""
        self.agent.poll()

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    @property
    def executor(self) -> Executor:
        """Who copies into this rank's memory."""
        return self.agent.executor

    def connect(self, card: Card) -> None:
        """Tell the agent."""
        self.agent.connect(card)

    def disconnect(self, incarnation: Incarnation) -> None:
        """Tell the agent."""
        self.agent.disconnect(incarnation)

    def revoke(self, incarnation: Incarnation, epoch: int) -> None:
        """Tell the agent."""
        self.agent.revoke(incarnation, epoch)

    def reset_region(self, epoch: int) -> None:
        """Tell the agent."""
        self.agent.reset_region(epoch)

    def open_leg(self, rank: int, start: LegOpen) -> None:
        """Tell the agent."""
        del rank
        self.agent.open_leg(start)

    def move(self, rank: int, leg: LegId, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Tell the agent."""
        del rank
        self.agent.move(leg, source_blocks, spans)

    def close_leg(self, rank: int, leg: LegId) -> None:
        """Tell the agent."""
        del rank
        self.agent.close_leg(leg)

    def stop_leg(self, rank: int, leg: LegId) -> None:
        """Tell the agent."""
        del rank
        self.agent.stop_leg(leg)

    def sum_spans(self, rank: int, ask: SumAsk) -> None:
        """Tell the agent."""
        del rank
        self.agent.sum_spans(ask)

    def drop_sums(self, rank: int, side: Side, key: HandoffKey) -> None:
        """Tell the agent."""
        del rank
        self.agent.drop_sums(side, key)

    def put_aux(self, offset: int, data: bytes) -> bool:
        """Tell the agent."""
        return self.agent.put_aux(offset, data)

    def read_aux(self, ask: AuxAsk) -> None:
        """Tell the agent."""
        self.agent.read_aux(ask)


class RemoteRanks:
    """Ranks in processes of their own, each at the other end of a channel; `lost` is told when one cannot be reached.

    Orders go out at once. While a rank does not take one, what it reports is read meanwhile, so that neither end can wait for
    the other; one that takes nothing for long is lost, and so is the instance.
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
        """The channels."""
        return [] if self._is_lost else [channel.fileno() for channel in self._channels]

    @property
    def has_work(self) -> bool:
        """Never: the ranks work by themselves."""
        return False

    def deadlines(self) -> list[float | None]:
        """None: the ranks keep their own."""
        return []

    def poll(self) -> None:
        """Take what the ranks have reported."""
        for channel in self._channels:
            for _ in range(_FRAMES_PER_TURN):
                if self._is_lost or not self._take(channel):
                    break

    def close(self) -> None:
        """Close the channels; the ranks end by that."""
        self._is_lost = True
        for channel in self._channels:
            channel.close()

    def connect(self, card: Card) -> None:
        """Tell every rank; one that cannot reach its peers says so when it is to move something."""
        self._tell_all(Connect(card))

    def disconnect(self, incarnation: Incarnation) -> None:
        """Tell every rank."""
        self._tell_all(Disconnect(incarnation))

    def revoke(self, incarnation: Incarnation, epoch: int) -> None:
        """Tell every rank."""
        self._tell_all(Revoke(incarnation, epoch))

    def reset_region(self, epoch: int) -> None:
        """Tell every rank."""
        self._tell_all(ResetRegion(epoch))

    def open_leg(self, rank: int, start: LegOpen) -> None:
        """Tell one rank."""
        self._tell(rank, OpenLeg(start))

    def move(self, rank: int, leg: LegId, source_blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Tell one rank."""
        self._tell(rank, Move(leg, source_blocks, spans))

    def close_leg(self, rank: int, leg: LegId) -> None:
        """Tell one rank."""
        self._tell(rank, CloseLeg(leg))

    def stop_leg(self, rank: int, leg: LegId) -> None:
        """Tell one rank."""
        self._tell(rank, StopLeg(leg))

    def sum_spans(self, rank: int, ask: SumAsk) -> None:
        """Tell one rank."""
        self._tell(rank, SumSpans(ask))

    def drop_sums(self, rank: int, side: Side, key: HandoffKey) -> None:
        """Tell one rank."""
        self._tell(rank, DropSums(side, key))

    def put_aux(self, offset: int, data: bytes) -> bool:
        """Aux records of such an instance travel in messages."""
        del offset, data
        return False

    def read_aux(self, ask: AuxAsk) -> None:
        """Never asked: such an instance has no slots for aux records."""
        del ask

    def _tell_all(self, order: Order) -> None:
        for rank in range(len(self._channels)):
            self._tell(rank, order)

    def _tell(self, rank: int, order: Order) -> None:
        channel = self._channels[rank]
        if not self._is_lost:
            try:
                channel.send(encode_order(order), _SEND_S, meanwhile=lambda: self._take(channel))
            except (ChannelClosed, ChannelStuck) as error:
                self._lose(error)

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

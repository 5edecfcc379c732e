"""The agent of one rank in a process of its own: a thread that carries out its coordinator's orders and reports back."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.agent.rank import RankAgent
from kvbaton.agent.rank_orders import RankReport, Reports, decode_order, encode_reports
from kvbaton.agent.summing import RegionMemory
from kvbaton.core.layout import Layout
from kvbaton.errors import KVBatonError
from kvbaton.transport.base import Transport

__all__ = ["RankLoop"]

log = logging.getLogger(__name__)

_IDLE_S = 5.0
_REPORT_S = 30.0
_STOP_S = 10.0
_ORDERS_PER_TURN = 256


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

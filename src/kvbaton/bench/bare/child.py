"""The process of a bare instance: takes orders and sends reports over one channel, until that closes or a SIGTERM comes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys

import msgspec

from kvbaton.agent.channel import Channel, ChannelClosed
from kvbaton.bench.bare.instance import BareInstance
from kvbaton.bench.bare.orders import BareSettings, Order, Report

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_SEND_S = 60.0
_IDLE_MS = 5_000


class _Child:
    """Joins the channel, the signal and the instance in one loop."""

    def __init__(self, settings: BareSettings, channel: Channel) -> None:
        self._channel = channel
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False
        self._instance = BareInstance(settings, self._send, self._wake)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._news_fd, select.POLLIN)

    def run(self) -> None:
        """Until a SIGTERM comes, or the parent closes its end."""
        signal.signal(signal.SIGTERM, self._stop)
        with contextlib.suppress(ChannelClosed):
            self._instance.start()
            more = True
            while not self._is_over:
                for fd, _ in self._poll.poll(0 if more else _IDLE_MS):
                    if fd == self._channel.fileno():
                        self._take_orders()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news_fd)
                more = self._instance.work()
        with contextlib.suppress(ChannelClosed):
            self._instance.close()

    def _stop(self, number: int, where: object) -> None:
        del number, where
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._news_fd, 1)

    def _take_orders(self) -> None:
        while (frame := self._channel.receive(0.0)) is not None:
            self._instance.take(self._decoder.decode(frame))

    def _send(self, report: Report) -> None:
        self._channel.send(msgspec.msgpack.encode(report), _SEND_S)


def main() -> None:
    """Arguments: the settings as JSON, and the socket of the channel. The kernel ends this process with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.ERROR)
    channel = Channel(socket.socket(fileno=int(sys.argv[2])), "the parent")
    _Child(msgspec.json.decode(sys.argv[1], type=BareSettings), channel).run()


if __name__ == "__main__":
    main()

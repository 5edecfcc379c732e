"""The process of a bare instance: orders on standard input, reports on standard output, until the input ends or a SIGTERM."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys

import msgspec

from kvbaton.bench.bare.instance import BareInstance
from kvbaton.bench.bare.orders import BareSettings, Order, Report, frame, split_frames

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 20
_IDLE_MS = 5_000


class _Child:
    """Joins the two pipes, the signal and the instance in one loop."""

    def __init__(self, settings: BareSettings) -> None:
        self._orders = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Order)
        self._unsent = bytearray()
        self._news_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False
        self._instance = BareInstance(settings, self._tell, self._wake)
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._poll.register(self._news_fd, select.POLLIN)

    def run(self) -> None:
        """Until told to stop."""
        signal.signal(signal.SIGTERM, self._stop)
        self._instance.start()
        more = True
        while not self._is_over:
            self._flush()
            for fd, _ in self._poll.poll(0 if more else _IDLE_MS):
                if fd == 0:
                    self._take_orders()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news_fd)
            more = self._instance.work()
        self._instance.close()
        with contextlib.suppress(BrokenPipeError):
            self._flush()

    def _stop(self, number: int, where: object) -> None:
        del number, where
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._news_fd, 1)

    def _take_orders(self) -> None:
        content = os.read(0, _READ_BYTES)
        self._is_over |= not content
        self._orders += content
        for one in split_frames(self._orders):
            self._instance.take(self._decoder.decode(one))

    def _tell(self, report: Report) -> None:
        self._unsent += frame(report)

    def _flush(self) -> None:
        while self._unsent:
            del self._unsent[: os.write(1, self._unsent)]


def main() -> None:
    """Run with the settings in the first argument. The kernel ends this process with its parent, even a stopped one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.ERROR)
    _Child(msgspec.json.decode(sys.argv[1], type=BareSettings)).run()


if __name__ == "__main__":
    main()

"""The process that beats for an `Announcer`: orders come in on its input, then a dot now and then; news go out as lines.

It ends, with a goodbye, when its input closes or its parent is gone. While no dot comes for too long it keeps silent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import msgspec

from kvbaton.discovery.heartbeats import Errand, Heartbeats, News

__all__ = ["Order", "main"]

_INPUT, _OUTPUT = 0, 1
_LOOK_S = 0.25
_MAX_ORDER_BYTES = 1024 * 1024


class Order(msgspec.Struct, frozen=True):
    """What the parent sends first, as one line of JSON."""

    errand: Errand
    stall_limit_s: float


def main() -> int:
    """Beat until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    os.set_blocking(_OUTPUT, False)
    order = _read_order()
    if order is None:
        return 0
    with Heartbeats(order.errand, _tell, time.monotonic()) as beats:
        _beat(beats, order.stall_limit_s, parent)
        beats.say_goodbye(time.monotonic())
    return 0


def _beat(beats: Heartbeats, stall_limit_s: float, parent: int) -> None:
    life = time.monotonic()
    is_quiet = False
    while os.getppid() == parent:
        now = time.monotonic()
        if now - life < stall_limit_s:
            due, is_quiet = beats.turn(now), False
        else:
            if not is_quiet:
                beats.say_goodbye(now)
            due, is_quiet = now + _LOOK_S, True
        if select.select([_INPUT], [], [], min(_LOOK_S, max(0.0, due - now)))[0]:
            if not os.read(_INPUT, 4096):
                return
            life = time.monotonic()


def _read_order() -> Order | None:
    content = b""
    while b"\n" not in content:
        piece = os.read(_INPUT, 65536)
        if not piece or len(content) > _MAX_ORDER_BYTES:
            return None
        content += piece
    return msgspec.json.decode(content.partition(b"\n")[0], type=Order)


def _tell(news: News) -> None:
    """What the parent does not read in time is not worth waiting for."""
    try:
        os.write(_OUTPUT, msgspec.json.encode(news) + b"\n")
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())

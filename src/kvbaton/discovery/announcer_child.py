"""The process that sends heartbeats for an `Announcer`: reads its task and then signs on its input, writes events as lines.

It ends, with a goodbye, when its input closes or its parent is gone. It sends nothing while the last sign is too old, or states
that the engine hangs.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time

import msgspec

from kvbaton.discovery.heartbeats import Announcement, Heartbeats, RouterEvent

__all__ = ["ALIVE", "HUNG", "AnnouncerTask", "main"]

ALIVE, HUNG = b".", b"!"
"""The signs: the process is alive; it is, and its engine hangs."""

_INPUT, _OUTPUT = 0, 1
_LOOK_S = 0.25
_MAX_TASK_BYTES = 1024 * 1024


class AnnouncerTask(msgspec.Struct, frozen=True):
    """What the parent sends first, as one line of JSON."""

    announcement: Announcement
    stall_limit_s: float


def main() -> int:
    """Beat until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    os.set_blocking(_OUTPUT, False)
    task = _read_task()
    if task is None:
        return 0
    with Heartbeats(task.announcement, _report, time.monotonic()) as beats:
        _beat(beats, task.stall_limit_s, parent)
        beats.send_goodbye(time.monotonic())
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
                beats.send_goodbye(now)
            due, is_quiet = now + _LOOK_S, True
        if select.select([_INPUT], [], [], min(_LOOK_S, max(0.0, due - now)))[0]:
            signs = os.read(_INPUT, 4096)
            if not signs:
                return
            life = -math.inf if signs.endswith(HUNG) else time.monotonic()


def _read_task() -> AnnouncerTask | None:
    content = b""
    while b"\n" not in content:
        piece = os.read(_INPUT, 65536)
        if not piece or len(content) > _MAX_TASK_BYTES:
            return None
        content += piece
    return msgspec.json.decode(content.partition(b"\n")[0], type=AnnouncerTask)


def _report(event: RouterEvent) -> None:
    """What the parent does not read in time is not worth waiting for."""
    try:
        os.write(_OUTPUT, msgspec.json.encode(event) + b"\n")
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())

"""A prefill instance in a process of its own, for tests that end it. Arguments: control port, room, pages to send of four.

Prints `announced` when the pages are sent, and the last state when the request is over; then waits for its end.
"""

from __future__ import annotations

import sys
import time

from sglang_instances import Instance, Request, wait_for

from kvbaton.engines.sglang.halves import Poll
from kvbaton.launch.ports import PortPicker

PROMPT = tuple(range(14))
LIMITS = {"transfer_timeout": 4.0, "defer_timeout": 8.0, "stop_timeout": 0.5, "retry": 0.2}


def main(port: int, room: int, pages: int) -> None:
    """Run it."""
    instance = Instance("prefill", PortPicker(), limits=LIMITS)
    instance.control_port = port
    instance.start()
    source = Request(instance, room, PROMPT)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wait_for(source, Poll.WAITING, Poll.FAILED)
    source.each("begin", 4, 0)
    source.each("send", [5, 6, 7, 8][:pages])
    sys.stdout.write("announced\n")
    sys.stdout.flush()
    sys.stdout.write(f"{wait_for(source, Poll.SUCCESS, Poll.FAILED).name}\n")
    sys.stdout.flush()
    while True:
        source.poll()
        time.sleep(0.01)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

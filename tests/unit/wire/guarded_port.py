"""A process with one port that peers reach: the control port of an instance, or the discovery port of a router; a script.

On the control port every message is answered with a heartbeat that lists how many messages were taken so far.
"""

from __future__ import annotations

import logging
import resource
import sys
import threading

from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import Trust
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import Heartbeat
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.registry import Registry


def main(kind: str, port: int, key: bytes | None, files: int) -> None:
    """Serve until killed."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if kind == "discovery":
        with Listener(Registry(), "127.0.0.1", port, cluster_key=key):
            print("ready", flush=True)
            threading.Event().wait()
    sockets = ControlSockets(Incarnation("guarded"), "127.0.0.1", port, Trust(key))
    print("ready", flush=True)
    taken = 0
    while True:
        sockets.wait(1.0, [])
        for envelope, _ in sockets.receive():
            taken += 1
            sockets.send(envelope.sender, Heartbeat(True, ((HandoffKey(TransferId("taken")), taken),)))
        sockets.refusals()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].encode() or None, int(sys.argv[4]))

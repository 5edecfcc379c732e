"""A process with one port that others reach: control or data of an instance, discovery or HTTP of a router; a script.

It prints `ready` and a JSON object: the endpoint of the data port, which chooses its own.

On the control port every message is answered with a heartbeat that lists how many messages were taken so far.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import threading

import msgspec

from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import Trust
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import Heartbeat
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.registry import Registry
from kvbaton.launch.ports import PortPicker
from kvbaton.router.app import serve_router
from kvbaton.router.settings import RouterSettings
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import open_transport


def main(kind: str, port: int, key: bytes | None, files: int) -> None:
    """Serve until killed."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if kind == "discovery":
        with Listener(Registry(), "127.0.0.1", port, cluster_key=key):
            print("ready {}", flush=True)
            threading.Event().wait()
    if kind == "tcp":
        settings = TransportSettings(incarnation=Incarnation("guarded"), cluster_key=key or b"")
        endpoint = open_transport("tcp", Region.of(bytearray(1 << 16)), settings).endpoint()
        print("ready", msgspec.json.encode(endpoint).decode(), flush=True)
        threading.Event().wait()
    if kind == "http":
        router = RouterSettings(port=port, discovery_port=PortPicker().pick(), api_keys=((key or b"").decode(),))
        asyncio.run(serve_router(router, lambda: print("ready {}", flush=True)))
    sockets = ControlSockets(Incarnation("guarded"), "127.0.0.1", port, Trust(key))
    print("ready {}", flush=True)
    taken = 0
    while True:
        sockets.wait(1.0, [])
        for envelope, _ in sockets.receive():
            taken += 1
            sockets.send(envelope.sender, Heartbeat(True, ((HandoffKey(TransferId("taken")), taken),)))
        sockets.refusals()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3].encode() or None, int(sys.argv[4]))

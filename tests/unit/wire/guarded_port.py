"""A process with one port that others reach: control or data of an instance, discovery or HTTP of a router; a script.

It prints `ready` and a JSON object: the endpoint of the data port, which chooses its own, or the card of the agents.

On the port `control` every message is answered with a heartbeat that lists how many messages were taken so far. On the port
`agent` real agents take it, with sources that any peer can name: LIVE of them, each expected again when it has ended.
"""

from __future__ import annotations

import logging
import resource
import sys
import threading

import msgspec
import uvloop

from kvbaton.agent.engine_port import SourceEnded
from kvbaton.agent.sockets import ControlSockets
from kvbaton.bench.bare.instance import MODEL
from kvbaton.bench.bare.pages import SMALL, TaggedPages
from kvbaton.config import Trust
from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import Heartbeat
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.registry import Registry
from kvbaton.engines.instance import AgentSettings, open_driver
from kvbaton.launch.ports import PortPicker
from kvbaton.router.app import serve_router
from kvbaton.router.settings import RouterSettings
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import open_transport

LIVE = 8


def serve_agents(port: int, trust: Trust) -> None:
    """Serve the control port of an instance, with its agents, until killed."""
    pages = TaggedPages(SMALL, blocks=32, most_tokens=64)
    name = Incarnation("guarded")
    woken = threading.Event()
    driver = open_driver(AgentSettings(port, trust=trust), name, MODEL, pages.layout(), pages.region, woken.set)
    for number in range(LIVE):
        driver.expect_target(HandoffKey(TransferId(f"live-{number}")), "prompt")
    driver.start()
    print("ready", msgspec.json.encode(driver.card).decode(), flush=True)
    while True:
        woken.wait(1.0)
        woken.clear()
        for event in driver.events():
            if isinstance(event, SourceEnded):
                driver.expect_target(event.key, "prompt")


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
        uvloop.run(serve_router(router, lambda: print("ready {}", flush=True)))
    if kind == "agent":
        serve_agents(port, Trust(key))
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

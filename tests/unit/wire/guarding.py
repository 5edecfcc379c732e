"""Processes that serve one port each, for attacks on them; and the measure of how they bear them."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.core.card import Card
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Heartbeat, Hello, decode, encode
from kvbaton.discovery.heartbeats import Announcement, Heartbeats, RouterEvent, RouterEventKind
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import Endpoint
from kvbaton.transport.tcp.wire import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    Secret,
    Status,
    unpack_hello,
    unpack_reply,
)
from wire_peer import WirePeer

__all__ = ["BEAT", "KEY", "ME", "GuardedPort", "guarded", "holds_its_size", "too_often"]

KEY = "the-key-of-this-cluster"
SPARE_BYTES = 64 << 20
BEAT = encode(Incarnation("peer"), "", Heartbeat(True, ()))
ME = Registration(
    type=InstanceType.DECODE,
    http_address="127.0.0.1:8201",
    zmq_address="host:127.0.0.1,handshake:6301,notify:6301",
    transfer_mode=TransferMode.READ,
    incarnation="good",
)
_SCRIPT = Path(__file__).with_name("guarded_port.py")
_numbers = itertools.count(1)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{8,}|\\x..|\d+|\([^)]*held back\)")
# A hand-off that failed is logged once, by name: as many lines as the engine itself has begun hand-offs, whatever peers send.
_HANDOFF_ENDED = re.compile(r"hand-off live-\S+: source ")
_CAUSE = re.compile(r"dropped \(([^,]*), \d+ so far\)|skipped: (.*)")


@dataclass
class GuardedPort:
    """A process that serves one port."""

    kind: str
    key: str
    port: int
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What the process has printed about itself."""

    @property
    def secret(self) -> bytes | None:
        return self.key.encode() or None

    def rss(self) -> int:
        """Bytes of memory that it has now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE

    def files(self) -> int:
        """Descriptors that it has open now."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208

    def open(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def assert_serves(self, within_s: float = 30.0) -> None:
        """A key holder that comes now is served."""
        assert self.process.poll() is None, self.lines
        if self.kind not in ("control", "agent"):
            {"discovery": self._assert_registers, "tcp": self._assert_read, "http": self._assert_answers}[self.kind](within_s)
            return
        until = time.monotonic() + within_s
        while True:
            # A flood may take its place before its handshake is done: it connects again, as every dialler of ours does.
            with contextlib.suppress(EOFError, ConnectionError), WirePeer.dial(self.port, self.secret) as peer:
                if self.kind == "agent":
                    card = self.card_of(f"good-{next(_numbers)}")
                    peer.send(encode(card.incarnation, "", Hello(card, wants_answer=True)))
                    answer = decode(peer.receive()).message
                    assert isinstance(answer, Hello), answer
                else:
                    peer.send(BEAT)
                    assert isinstance(decode(peer.receive()).message, Heartbeat)
                return
            assert time.monotonic() < until, "no key holder was served"

    def card_of(self, name: str) -> Card:
        """The card of a peer that fits the agents."""
        return msgspec.json.decode(json.dumps(self.facts).replace('"guarded"', json.dumps(name)), type=Card)

    def _assert_registers(self, within_s: float) -> None:
        events: list[RouterEvent] = []
        began = time.monotonic()
        # An instance of its own each time: without a key, any sender may have replaced the one before.
        number = next(_numbers)
        fresh = msgspec.structs.replace(ME, http_address=f"127.0.0.2:{number}", incarnation=f"fresh-{number}")
        announcement = Announcement(fresh, (f"127.0.0.1:{self.port}",), 0.2, self.secret)
        with Heartbeats(announcement, events.append, began) as beats:
            while not any(each.kind is RouterEventKind.WELCOME for each in events):
                beats.turn(time.monotonic())
                time.sleep(0.01)
                assert time.monotonic() < began + within_s, events

    def shake_hands(self, timeout_s: float = 10.0) -> tuple[socket.socket, bytes]:
        """A reader of the tcp data port, and the handshake that it has sent."""
        endpoint = msgspec.convert(self.facts, Endpoint)
        incarnation = str(endpoint.details.get("incarnation", ""))
        secret = Secret(bytes.fromhex(str(endpoint.details["token"])), self.key.encode(), incarnation)
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)
        challenge, nonce = unpack_hello(_take(sock, HELLO_BYTES)), os.urandom(NONCE_BYTES)
        sock.sendall(secret.handshake(challenge, nonce))
        if unpack_reply(_take(sock, REPLY_BYTES)).status is not Status.OK:
            raise ConnectionError("refused")
        if _take(sock, PROOF_BYTES) != secret.owner_proof(challenge, nonce):
            raise ConnectionError("not the owner")
        return sock, secret.handshake(challenge, nonce)

    def _assert_read(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        while True:
            with contextlib.suppress(OSError):
                self.shake_hands(within_s)[0].close()
                return
            assert time.monotonic() < until, "no reader was admitted"

    def _assert_answers(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=within_s)
                try:
                    headers = {"Authorization": f"Bearer {self.key}"}
                    connection.request("POST", "/v1/completions", json.dumps({"prompt": "x"}), headers)
                    assert connection.getresponse().status == 503, "there is no instance"
                finally:
                    connection.close()
                return
            assert time.monotonic() < until, "no request was answered"


def _take(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


@contextmanager
def guarded(kind: str, key: str = KEY, files: int = 0) -> Iterator[GuardedPort]:
    port = PortPicker().pick()
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), kind, str(port), key, str(files)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    served = GuardedPort(kind, key, port, process)
    reader = threading.Thread(target=lambda: served.lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready "), served.lines
        served.facts = json.loads(ready.removeprefix("ready "))
        served.port = int(served.facts.get("details", {}).get("port", port))
        served.assert_serves()
        yield served
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        process.stdout.close()
        process.stderr.close()


@contextmanager
def holds_its_size(served: GuardedPort) -> Iterator[None]:
    """At its largest, a process has at most 64 MB more than before, and serves at the end."""
    before, largest, stopping = served.rss(), [0], threading.Event()

    def watch() -> None:
        while not stopping.wait(0.02):
            with contextlib.suppress(OSError, IndexError, ValueError):
                largest[0] = max(largest[0], served.rss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
        served.assert_serves(30.0)
    finally:
        stopping.set()
        watcher.join()
    assert largest[0] - before < SPARE_BYTES, f"{(largest[0] - before) >> 20} MiB more"


def too_often(served: GuardedPort, took_s: float) -> dict[str, int]:
    """The causes of which more lines were logged than one per second."""
    causes = Counter(_cause(line) for line in served.lines if not _HANDOFF_ENDED.search(line))
    return {cause: count for cause, count in causes.items() if count > took_s + 2}


def _cause(line: str) -> str:
    """A line without what differs between two frames of one cause."""
    found = _CAUSE.search(line)
    return _VARYING.sub("#", next(filter(None, found.groups())) if found else line).strip()[:80]

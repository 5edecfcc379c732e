"""A whole system under test: real processes on free ports, and the small HTTP client that talks to them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvbaton.config import DEFAULT_HANDOFF, HTTP_KEY_HEADER, HandoffSettings, http_token
from kvbaton.engines.base import EngineOptions
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import kvbaton_command, new_cluster_key, router_part
from kvbaton.launch.ports import PortPicker
from watching import command_line, descendants, wait_until

__all__ = ["Client", "Reply", "Stand", "Up", "blocks", "stream_events"]

_ANSWER_S = 120.0
_START_S = 180.0
_BLOCKS = re.compile(r'^kvbaton_blocks\{state="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def document(self) -> Any:
        """The content as JSON."""
        return json.loads(self.content)

    @property
    def error(self) -> str:
        """The message of an error answer."""
        return str(self.document["error"]["message"])

    @property
    def text(self) -> str:
        """The text of a completion."""
        return str(self.document["choices"][0]["text"])


class Client:
    """Talks to one server."""

    def __init__(self, port: int, cluster_key: str = "", host: str = "127.0.0.1") -> None:
        self.port = port
        self._host = host
        self._headers = {"Content-Type": "application/json"}
        if cluster_key:
            self._headers[HTTP_KEY_HEADER] = http_token(cluster_key.encode())

    def get(self, path: str) -> Reply:
        """Ask for a page."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Reply:
        """Send JSON, or bytes as they are."""
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def complete(self, prompt: str | list[int] = "Hello", **fields: Any) -> Reply:
        """A greedy completion of eight tokens, unless `fields` differ."""
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0} | fields)

    @contextmanager
    def stream(self, path: str, body: dict[str, Any], timeout_s: float = _ANSWER_S) -> Iterator[http.client.HTTPResponse]:
        """A streamed answer, open while inside; every read has a deadline."""
        connection = http.client.HTTPConnection(self._host, self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes | None) -> Reply:
        connection = http.client.HTTPConnection(self._host, self.port, timeout=_ANSWER_S)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()


def stream_events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event, as it comes."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def blocks(port: int, host: str = "127.0.0.1") -> dict[str, int]:
    """Blocks of an instance by state, from its metrics."""
    text = Client(port, host=host).get("/metrics").content.decode()
    return {state: int(float(value)) for state, value in _BLOCKS.findall(text)}


class Up:
    """`kvbaton up` as a process of its own; killed, with everything it started, when it is left."""

    def __init__(self, *arguments: str, temporary: Path, start_s: float = _START_S) -> None:
        self._start_s = start_s
        self.port = PortPicker().pick()
        self.client = Client(self.port)
        self._lines: list[str] = []
        environment = {**os.environ, "COLUMNS": "200", "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            kvbaton_command("up", "--port", str(self.port), *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        wait_until(lambda: "Ctrl-C" in self.output or self.process.poll() is not None, "up is up", self._start_s)
        assert self.process.poll() is None, self.output
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        left = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for pid in left:
            if "kvbaton" in command_line(pid):
                os.kill(pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """All that was printed so far."""
        return "".join(self._lines)

    def children(self) -> set[int]:
        """Every process that it has started."""
        return descendants(self.process.pid)

    def child(self, role: str) -> int:
        """The process of the one instance with that role."""
        (pid,) = [pid for pid in self.children() if f"--role {role} " in command_line(pid)]
        return pid

    def wait(self, timeout_s: float) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def _read(self) -> None:
        if self.process.stdout is not None:
            self._lines.extend(self.process.stdout)


@dataclass
class Stand:
    """A router, and instances started by hand beside it, each in a fleet of its own so that one may die."""

    fleets: dict[str, Fleet] = field(default_factory=dict)
    ports: PortPicker = field(default_factory=PortPicker)
    lines: list[str] = field(default_factory=list)
    cluster_key: str = field(default_factory=new_cluster_key)
    router_arguments: tuple[str, ...] = ()
    transport: str = "local"

    def __post_init__(self) -> None:
        self.router_port, self.discovery_port = self.ports.pick(), self.ports.pick()
        self.client = Client(self.router_port)

    def __enter__(self) -> Self:
        more, key = self.router_arguments, self.cluster_key
        part = router_part("127.0.0.1", self.router_port, self.discovery_port, *more, cluster_key=key)
        self._fleet("router").start(replace(part, health_url=f"http://127.0.0.1:{self.router_port}/instances"))
        self.fleets["router"].wait_healthy(_START_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fleet in self.fleets.values():
            fleet.stop()

    def start(
        self,
        name: str,
        role: str,
        model: str = "tiny",
        *extra: str,
        cluster_key: str | None = None,
        handoff: HandoffSettings = DEFAULT_HANDOFF,
        program: Path | None = None,
    ) -> int:
        """Start an instance, with the key of the others unless another is given, and wait until it is healthy; its port.

        `program` is run instead of kvbaton, with the same arguments.
        """
        key = cluster_key or self.cluster_key
        side = EmbeddedServers(EngineOptions(model, self.transport, 2, handoff, arguments=extra, cluster_key=key))
        part = side.part(name, role, self.ports, [f"127.0.0.1:{self.discovery_port}"])
        if program is not None:
            part = replace(part, command=[sys.executable, str(program), *part.command[len(kvbaton_command()) :]])
        self._fleet(name).start(part)
        self.fleets[name].wait_healthy(_START_S)
        return int(part.base_url.rpartition(":")[2])

    def kill(self, name: str) -> None:
        """End an instance as the kernel would: at once, without a message to its peers."""
        self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send an instance a signal."""
        os.kill(self.fleets[name].pid(name), number)

    def instances(self, kind: str) -> list[dict[str, Any]]:
        """What the router knows: `live` or `refused`."""
        known: list[dict[str, Any]] = self.client.get("/instances").document[kind]
        return known

    def wait_for(self, kind: str, count: int) -> None:
        """Wait until the router knows so many."""
        wait_until(lambda: len(self.instances(kind)) == count, f"{count} {kind} instances")

    def _fleet(self, name: str) -> Fleet:
        self.fleets[name] = Fleet(lambda part, line: self.lines.append(f"{part} | {line}"))
        return self.fleets[name]

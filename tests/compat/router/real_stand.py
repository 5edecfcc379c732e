"""The real vllm-router with embedded instances under it, and a single instance whose answers are the right ones."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Self

from system import Client, Stand, blocks, stream_events

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import EngineOptions
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.launch.router_peers import ensure_router_peers, vllm_router_part
from watching import wait_until

__all__ = ["InstanceAnswer", "RealStand", "ask", "handed_over", "requests_to_try"]

_START_S = 120.0
_ALLOW = ("--allow", "127.0.0.0/8")
"""vllm-router sends no token of the cluster key, so the operator has to name the hosts that its requests may."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_HANDED_OVER = re.compile(r'^kvbaton_handoffs_total\{(?=[^}]*outcome="delivered")[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class InstanceAnswer:
    """What a client has at the end, however it came: the status, the text and why it ended."""

    status: int
    text: str
    finish_reason: str | None
    tokens: int | None = None


def ask(client: Client, path: str, body: dict[str, Any], stream: bool) -> InstanceAnswer:
    """Ask, and put together what came."""
    return _streamed(client, path, body) if stream else _whole(client, path, body)


def requests_to_try(count: int, first: int = 0) -> list[tuple[str, dict[str, Any], bool]]:
    """Requests of every kind, each with another prompt: completions and chat, streamed and not, short and long."""
    found: list[tuple[str, dict[str, Any], bool]] = []
    for index in range(first, first + count):
        words = f"Story {index}: " + "the river ran on and on " * (1 + 5 * (index % 4))
        common = {"model": "tiny", "max_tokens": 12 + index % 5, "temperature": 0, "ignore_eos": True}
        if index % 2:
            found.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": words}], **common}, index % 4 > 1))
        else:
            found.append(("/v1/completions", {"prompt": words, **common}, index % 4 > 1))
    return found


def handed_over(port: int) -> int:
    """How many hand-offs of an instance were delivered, from its metrics."""
    return sum(int(float(value)) for value in _HANDED_OVER.findall(Client(port).get("/metrics").content.decode()))


@dataclass
class RealStand(Stand):
    """A real router, instances under it that are started by hand, and `single`, which answers alone."""

    mode: Mode = Mode.PUSH
    connector: str = "moriio"
    flags: tuple[str, ...] = ()
    http_ports: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Self:
        peers = ensure_router_peers(self.lines.append)
        ports = (self.router_port, self.discovery_port, self.ports.pick())
        part = vllm_router_part(peers, *ports, *self.flags, connector=self.connector)
        self._fleet("vllm-router").start(part)
        single = EmbeddedServers(self._options(())).part("single", "both", self.ports)
        self._fleet("single").start(single)
        self.single = Client(int(single.base_url.rpartition(":")[2]))
        return self

    def launch(self, name: str, role: str, *extra: str, port: int | None = None, mode: Mode | None = None) -> int:
        """Start an instance, on this port if one is named; its port. It registers when it is healthy."""
        options = replace(self._options(("--poison", *_ALLOW, *extra)), handoff=HandoffSettings(mode=mode or self.mode))
        part = EmbeddedServers(options).part(name, role, self.ports, [f"127.0.0.1:{self.discovery_port}"])
        picked = part.base_url.rpartition(":")[2]
        if port is not None:
            command = [str(port) if word == picked else word for word in part.command]
            part = replace(part, command=command, health_url=part.health_url.replace(picked, str(port)))
        self._fleet(name).start(part)
        self.http_ports[name] = port or int(picked)
        return self.http_ports[name]

    def wait_ready(self, *names: str) -> None:
        """Wait until the router, the single instance and these are there, and the router knows them."""
        self.wait_added(*names)
        for name in ("vllm-router", "single"):
            self.fleets[name].wait_healthy(_START_S)

    def stop(self, name: str) -> None:
        """End an instance as its owner would."""
        self.fleets.pop(name).stop()

    def log(self) -> str:
        """What the router has printed."""
        return "\n".join(_COLOURS.sub("", line) for line in list(self.lines) if line.startswith("vllm-router | "))

    def wait_added(self, *names: str) -> None:
        """Wait until the router has taken these instances in."""
        for name in names:
            self.fleets[name].wait_healthy(_START_S)
            wait_until(lambda name=name: self.is_known(name), f"{name} is known\n{self.log()}", 60)  # type: ignore[misc]

    def wait_removed(self, port: int) -> None:
        """Wait until the router has forgotten the instance that was at this port."""
        wait_until(lambda: not self._is_known(port), f"the instance at {port} is forgotten\n{self.log()}")

    def compare(self, path: str, body: dict[str, Any], stream: bool) -> None:
        """Fail unless router and single instance answer the same."""
        want = ask(self.single, path, body, stream)
        assert want.status == 200, want
        assert ask(self.client, path, body, stream) == want, f"{path} {body} {stream}\n{self.log()[-4000:]}"

    def keeps_no_block(self) -> bool:
        """Whether no instance holds a block for anybody."""
        states = [blocks(port) for port in self.http_ports.values()]
        return all(state["held"] + state["in_use"] == 0 for state in states)

    def is_known(self, name: str) -> bool:
        """Whether the router has this instance now."""
        return self._is_known(self.http_ports[name])

    def _is_known(self, port: int) -> bool:
        marks = re.findall(rf"(Add|Remove) (?:Prefill|Decode) \[HTTP:127\.0\.0\.1:{port},", self.log())
        return bool(marks) and marks[-1] == "Add"

    def _options(self, extra: tuple[str, ...]) -> EngineOptions:
        return EngineOptions("tiny", "local", 3, arguments=extra, cluster_key=self.cluster_key)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.single = self.client


def _whole(client: Client, path: str, body: dict[str, Any]) -> InstanceAnswer:
    reply = client.post(path, body)
    if reply.status != 200:
        return InstanceAnswer(reply.status, reply.content.decode(errors="replace"), None)
    (choice,) = reply.document["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return InstanceAnswer(200, text, choice["finish_reason"], reply.document["usage"]["completion_tokens"])


def _streamed(client: Client, path: str, body: dict[str, Any]) -> InstanceAnswer:
    with client.stream(path, body) as response:
        if response.status != 200:
            return InstanceAnswer(response.status, response.read().decode(errors="replace"), None)
        text, reason, ended = "", None, False
        for event in stream_events(response):
            if event == "[DONE]":
                ended = True
                continue
            for choice in json.loads(event).get("choices", ()):
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
        assert ended, f"the stream broke off after {text!r}"
        return InstanceAnswer(200, text, reason)

"""Embedded instances under the real `vllm-router`, unchanged, in both modes: every answer is that of a single instance.

The router is installed from PyPI in an environment of its own. Instances restart on other ports and are killed while it runs;
what it then does is its own affair, but no answer may be wrong and nothing may be left behind.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from system import Client, blocks, stream_events

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import InstanceOptions, instance_part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.router_peers import RouterPeers, ensure_router_peers, vllm_router_part
from watching import wait_until

pytestmark = pytest.mark.compat

PROMPTS = ["Hello", "A b c d e f", "x" * 150, "The quick brown fox jumps over the lazy dog. " * 3]
MODEL = "tiny"
START_S = 180.0


@pytest.fixture(scope="module")
def peers() -> RouterPeers:
    """The real routers; the only reason for which these tests are skipped."""
    try:
        return ensure_router_peers(print)
    except LocalError as error:
        pytest.skip(f"NOTHING IS TESTED WITH THE REAL ROUTER, because it cannot be installed here: {error}")


class System:
    """A real router, and instances beside it that come and go."""

    def __init__(self, peers: RouterPeers, mode: Mode) -> None:
        self.ports = PortPicker()
        self.options = InstanceOptions(MODEL, "local", 4, handoff=HandoffSettings(mode=mode))
        self.port, self.discovery_port = self.ports.pick(), self.ports.pick()
        self.client = Client(self.port)
        self.fleets: dict[str, Fleet] = {}
        self.urls: dict[str, str] = {}
        self._peers = peers

    def begin(self, prefills: int, decodes: int) -> None:
        """Start the router, a single instance to compare with, and so many of each side; returns when it serves."""
        self.fleets["router"] = Fleet()
        self.fleets["router"].start(vllm_router_part(self._peers, self.port, self.discovery_port, self.ports.pick()))
        self.start("single", "both")
        for role, count in (("prefill", prefills), ("decode", decodes)):
            for number in range(count):
                self.start(f"{role}-{number}", role)
        for fleet in self.fleets.values():
            fleet.wait_healthy(START_S)
        time.sleep(0)
        wait_until(lambda: self.client.complete("warm").status == 200, "the real router serves", 30)

    def start(self, name: str, role: str) -> None:
        """Start an instance on ports of its own."""
        routers = [] if role == "both" else [f"127.0.0.1:{self.discovery_port}"]
        part, self.urls[name] = instance_part(name, role, self.options, self.ports, routers)
        self.fleets[name] = Fleet()
        self.fleets[name].start(part)

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """Send an instance a signal, and wait for its end."""
        os.kill(self.fleets[name].pid(name), number)
        self.fleets.pop(name).stop()

    def port_of(self, name: str) -> int:
        return int(self.urls[name].rpartition(":")[2])

    def is_quiet(self) -> bool:
        """Whether no instance holds a block for anybody."""
        for name in self.fleets:
            if name != "router":
                states = blocks(self.port_of(name))
                if states["held"] or states["in_use"]:
                    return False
        return True

    def stop(self) -> None:
        """End everything."""
        for fleet in self.fleets.values():
            fleet.stop()


@contextmanager
def running(peers: RouterPeers, mode: Mode, prefills: int, decodes: int) -> Iterator[System]:
    system = System(peers, mode)
    try:
        system.begin(prefills, decodes)
        yield system
    finally:
        system.stop()


@pytest.fixture(scope="module", params=[Mode.PULL, Mode.PUSH], ids=["READ", "WRITE"])
def two_by_two(request: pytest.FixtureRequest, peers: RouterPeers) -> Iterator[System]:
    """Two prefill and two decode instances."""
    with running(peers, request.param, 2, 2) as system:
        yield system


def chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 0}


def streamed(client: Client, path: str, body: dict[str, Any]) -> str:
    """The text of a stream, which must end as streams do."""
    text, last = "", ""
    with client.stream(path, body) as response:
        assert response.status == 200
        for data in stream_events(response):
            last = data
            if data != "[DONE]":
                choice = json.loads(data)["choices"][0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    assert last == "[DONE]"
    return text


def answer(client: Client, prompt: str, kind: str) -> str:
    """The answer to one prompt, asked for in one of four ways."""
    completion = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    match kind:
        case "completions":
            return client.complete(prompt).text
        case "completions, streamed":
            return streamed(client, "/v1/completions", completion)
        case "chat":
            return str(client.post("/v1/chat/completions", chat(prompt)).document["choices"][0]["message"]["content"])
        case _:
            return streamed(client, "/v1/chat/completions", chat(prompt))


KINDS = ("completions", "completions, streamed", "chat", "chat, streamed")


class TestTwoByTwo:
    """2P2D."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_answer_is_that_of_a_single_instance(self, two_by_two: System, kind: str) -> None:
        single = Client(two_by_two.port_of("single"))
        cases = list(itertools.product(PROMPTS, range(3)))
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda case: answer(two_by_two.client, case[0], kind), cases))
        assert got == [answer(single, prompt, kind) for prompt, _ in cases]
        wait_until(two_by_two.is_quiet, "nobody holds anything")

    def test_every_request_was_handed_off(self, two_by_two: System) -> None:
        for prompt in PROMPTS:
            assert two_by_two.client.complete(prompt).document["kvbaton"]["handed_off"] is True
        assert all(_tokens(two_by_two.port_of(name), "prompt") > 0 for name in ("prefill-0", "prefill-1"))
        assert all(_tokens(two_by_two.port_of(name), "generated") > 0 for name in ("decode-0", "decode-1"))

    def test_a_client_that_leaves_frees_both_sides(self, two_by_two: System) -> None:
        for prompt, reads in itertools.product(PROMPTS, (0, 1)):
            connection = http.client.HTTPConnection("127.0.0.1", two_by_two.port, timeout=30)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 100, "stream": True}))
            if reads:
                connection.getresponse().read(10)
            connection.close()
        wait_until(two_by_two.is_quiet, "nobody holds anything")


def _tokens(port: int, kind: str) -> float:
    text = Client(port).get("/metrics").content.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"kvbaton_{kind}_tokens_total"))


@pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH], ids=["READ", "WRITE"])
def test_one_by_one_with_instances_that_restart_elsewhere_and_die(peers: RouterPeers, mode: Mode) -> None:
    """1P1D: each side is restarted on other ports, then killed; each time the next answers are right again."""
    with running(peers, mode, 1, 1) as system:
        single = Client(system.port_of("single"))
        expected = {prompt: single.complete(prompt).text for prompt in PROMPTS}

        def serves() -> bool:
            replies = [system.client.complete(prompt) for prompt in PROMPTS]
            for prompt, reply in zip(PROMPTS, replies, strict=True):
                assert reply.status != 200 or reply.text == expected[prompt], "a wrong answer"
            return all(reply.status == 200 for reply in replies)

        wait_until(serves, "it serves", 30)
        for role, number in (
            ("prefill", signal.SIGTERM),
            ("decode", signal.SIGTERM),
            ("prefill", signal.SIGKILL),
            ("decode", signal.SIGKILL),
        ):
            system.end(f"{role}-0", number)
            system.start(f"{role}-0", role)
            system.fleets[f"{role}-0"].wait_healthy(START_S)
            wait_until(serves, f"it serves again after its {role} instance got signal {number}", 60)
        wait_until(system.is_quiet, "nobody holds anything", 90)

"""A real SGLang pair, one plain SGLang to compare with, and our router in front of the pair; and what tests ask of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import Controls, EngineOptions
from kvbaton.engines.sglang.setup.environment import SglangEnvironment, ensure_sglang
from kvbaton.engines.sglang.setup.servers import SglangServers
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.installing import alone, default_cache_dir
from kvbaton.launch.local import new_cluster_key, router_part
from kvbaton.launch.ports import PortPicker

__all__ = ["Answer", "SglangStand", "StandSpec", "different", "prompt", "ready", "stand", "tiny_model"]

START_S = 600.0
VOCABULARY = 500
OUTPUT = 8
_TOLERANCE = 1e-4
_INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True)
class Answer:
    """What a server answered: tokens and their logprobs, or the status and text of an error."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    status: int = 200
    text: str = ""
    cached: int = 0


@dataclass(frozen=True)
class StandSpec:
    """What to start: the shapes of the two sides, and the settings of both."""

    mode: Mode = Mode.PUSH
    prefill_shape: str = "tp1"
    decode_shape: str = "tp1"
    transport: str = "local"
    drop_writes: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    chunk: int = 64
    with_single: bool = True
    connector: str = "kvbaton"
    counts_directory: str = ""


def ready() -> SglangEnvironment:
    """SGLang, installed if need be. That it cannot be is the only reason for which these tests are skipped."""
    try:
        return ensure_sglang(default_cache_dir(), print)
    except LocalError as error:
        pytest.skip(f"NOTHING IS TESTED WITH SGLANG, because it cannot be installed here: {error}")


def tiny_model(environment: SglangEnvironment) -> Path:
    """A tiny model with grouped heads, made once."""
    target = environment.directory / "models" / "tiny-gqa"
    target.mkdir(parents=True, exist_ok=True)
    with alone(target / "lock", "making a tiny model", 600.0):
        if not (target / "made").exists():
            command = [str(environment.python), str(_INSIDE / "make_model.py"), str(target)]
            subprocess.run(command, check=True, env={**os.environ, **environment.variables()}, timeout=600)
            (target / "made").touch()
    return target


class SglangStand:
    """The servers of one stand."""

    def __init__(self, spec: StandSpec) -> None:
        self.spec = spec
        environment = ready()
        self.fleet = Fleet()
        self.ports = PortPicker()
        key = new_cluster_key()
        router_port, discovery_port = self.ports.pick(), self.ports.pick()
        self.router_url = f"http://127.0.0.1:{router_port}"
        options = EngineOptions(
            "tiny",
            spec.transport,
            3,
            HandoffSettings(mode=spec.mode),
            spec.prefill_shape,
            cluster_key=key,
            step_tokens=spec.chunk,
            controls=Controls(poison=True, drop_writes=spec.drop_writes),
            arguments=("--skip-tokenizer-init",),
            connector=spec.connector,
            counts_directory=spec.counts_directory,
        )
        model = tiny_model(environment)
        prefill = SglangServers(environment, model, options, spec.settings)
        decode = replace(prefill, options=replace(options, shape=spec.decode_shape))
        routers = [f"127.0.0.1:{discovery_port}"]
        self.prefill = prefill.part("prefill", "prefill", self.ports, routers)
        self.decode = decode.part("decode", "decode", self.ports, routers)
        self.single = replace(prefill, options=replace(options, shape="tp1")).part("single", "both", self.ports)
        self._router = router_part("127.0.0.1", router_port, discovery_port, cluster_key=key)
        self.bootstrap_port = ControlAddress.parse(self.prefill.control_address).handshake

    def start(self) -> None:
        """Start everything, and wait until it is healthy and registered."""
        for part in (self._router, self.prefill, self.decode, *([self.single] if self.spec.with_single else [])):
            self.fleet.start(part)
        self.fleet.wait_healthy(START_S)

    def signal(self, part: FleetPart, number: int) -> None:
        """Send a signal to a server and to everything that it started."""
        os.killpg(self.fleet.pid(part.name), number)

    def is_alive(self, part: FleetPart) -> bool:
        """Whether a server has not ended by itself, and answers."""
        return all(death.name != part.name for death in self.fleet.deaths()) and self.health(part) == 200

    def health(self, part: FleetPart) -> int:
        """The status of its health."""
        try:
            with urllib.request.urlopen(part.health_url, timeout=30) as answer:
                return int(answer.status)
        except OSError:
            return 0

    def log(self, part: FleetPart) -> str:
        """What a server has printed."""
        return (self.fleet.log_directory / f"{part.name}.log").read_text(errors="replace")

    def live_handoffs(self, part: FleetPart) -> int:
        """How many hand-offs a server reports as under way."""
        with urllib.request.urlopen(f"http://{part.handoffs_address}/handoffs", timeout=20) as answer:
            return sum(each["outcome"] is None for each in json.load(answer)["handoffs"])

    async def generate(
        self, session: aiohttp.ClientSession, url: str, token_ids: Sequence[int], output: int = OUTPUT, **more: Any
    ) -> Answer:
        """One request in SGLang's own format."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": output, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            **more,
        }
        async with session.post(f"{url}/generate", json=body) as response:
            text = await response.text()
            if response.status != 200:
                return Answer(status=response.status, text=text)
            document = json.loads(text)
            logprobs = document["meta_info"]["output_token_logprobs"]
            cached = int(document["meta_info"].get("cached_tokens", 0))
            return Answer(tuple(each[1] for each in logprobs), tuple(each[0] for each in logprobs), cached=cached)

    async def pair(
        self, session: aiohttp.ClientSession, token_ids: Sequence[int], output: int = OUTPUT, room: int = 0, **more: Any
    ) -> tuple[Answer, Answer]:
        """One request to both sides, as a balancer sends it; the answers of prefill and of decode."""
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room or random.getrandbits(62) + 1,
            **more,
        }
        sides = (self.generate(session, part.base_url, token_ids, output, **where) for part in (self.prefill, self.decode))
        prefill, decode = await asyncio.gather(*sides)
        return prefill, decode


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    """Random tokens."""
    chance = random.Random(seed)
    return tuple(chance.randrange(3, VOCABULARY) for _ in range(tokens))


def different(one: Answer, other: Answer) -> str:
    """In what two answers differ; empty when they are equal."""
    if one.status != 200 or other.status != 200:
        return f"status {one.status} {one.text[:200]} / {other.status} {other.text[:200]}"
    if one.tokens != other.tokens:
        return f"tokens {one.tokens} / {other.tokens}"
    largest = max(abs(here - there) for here, there in zip(one.logprobs, other.logprobs, strict=True))
    return f"logprobs differ by {largest}" if largest > _TOLERANCE else ""


@contextmanager
def stand(spec: StandSpec) -> Iterator[SglangStand]:
    """Start a stand, and end it, also where a test has stopped one of its servers."""
    made = SglangStand(spec)
    kept = os.environ.get("KVBATON_SGLANG_LOGS")
    with made.fleet:
        try:
            made.start()
            yield made
        finally:
            for part in (made.prefill, made.decode):
                try:
                    made.signal(part, signal.SIGCONT)
                except (ProcessLookupError, StopIteration):
                    continue
            if kept:
                for path in made.fleet.log_directory.glob("*.log"):
                    (Path(kept) / path.name).write_text(path.read_text(errors="replace"))

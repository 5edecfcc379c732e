"""Real SGLang servers, one plain SGLang to compare with, and our router in front of a pair; and what tests ask of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sglang_forked import ForkedServers

from kvbaton.config import CLUSTER_KEY_VARIABLE, HTTP_KEY_HEADER, HandoffSettings, http_token
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode, room_transfer_id
from kvbaton.engines.base import Controls, EngineOptions
from kvbaton.engines.sglang.setup.environment import SglangEnvironment, ensure_sglang
from kvbaton.engines.sglang.setup.servers import SglangServers
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.installing import alone, default_cache_dir
from kvbaton.launch.local import new_cluster_key, router_part
from kvbaton.launch.ports import PortPicker

__all__ = [
    "START_S",
    "Answer",
    "Grid",
    "SglangStand",
    "StandSpec",
    "Trio",
    "different",
    "generate",
    "hand_over",
    "health",
    "live_handoffs",
    "new_room",
    "noted",
    "noted_at",
    "outcome",
    "prompt",
    "ready",
    "run",
    "stand",
    "tiny_model",
    "wait_at_rest",
    "wait_until_noted",
]

START_S = 600.0
REQUEST_S = 300.0
WAIT_S = 60.0
VOCABULARY = 500
OUTPUT = 8
_TOLERANCE = 1e-4
_INSIDE = Path(__file__).parent / "inside"


# Tests, and balancers without the key, choose rooms that prove nothing; `kvbaton verify` shows those of our router.
_ALLOWED: dict[str, Any] = {"allow": ["127.0.0.1", "localhost"]}


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


def tiny_model(environment: SglangEnvironment, kind: str = "gqa") -> Path:
    """A tiny model with grouped heads or with MLA, made once."""
    target = environment.directory / "models" / f"tiny-{kind}"
    target.mkdir(parents=True, exist_ok=True)
    with alone(target / "lock", "making a tiny model", 600.0):
        if not (target / "made").exists():
            command = [str(environment.python), str(_INSIDE / "make_model.py"), str(target), kind]
            subprocess.run(command, check=True, env={**os.environ, **environment.variables()}, timeout=600)
            (target / "made").touch()
    return target


class SglangStand:
    """The servers of one stand."""

    def __init__(self, spec: StandSpec) -> None:
        self.spec = spec
        environment = ready()
        self.fleet: Fleet = ForkedServers()
        self.ports = PortPicker()
        self.key = key = new_cluster_key()
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
        prefill = SglangServers(environment, model, options, _ALLOWED | spec.settings)
        decode = replace(prefill, options=replace(options, shape=spec.decode_shape))
        routers = [f"127.0.0.1:{discovery_port}"]
        self.prefill = prefill.part("prefill", "prefill", self.ports, routers)
        self.decode = decode.part("decode", "decode", self.ports, routers)
        self.single = replace(prefill, options=replace(options, shape="tp1")).part("single", "both", self.ports)
        self._router = router_part("127.0.0.1", router_port, discovery_port, cluster_key=key)
        self.bootstrap_port = ControlAddress.parse(self.prefill.control_address).handshake

    def start(self) -> None:
        """Start everything, and wait until it is healthy and registered."""
        # SGLang's own backends register with no router, and one without instances never becomes healthy.
        routers = [self._router] if self.spec.connector == "kvbaton" else []
        for part in (*routers, self.prefill, self.decode, *([self.single] if self.spec.with_single else [])):
            self.fleet.start(part)
        self.fleet.wait_healthy(START_S)

    def signal(self, part: FleetPart, number: int) -> None:
        """Send a signal to a server and to everything that it started."""
        os.killpg(self.fleet.pid(part.name), number)

    def is_alive(self, part: FleetPart) -> bool:
        """Whether a server has not ended by itself, and answers."""
        return all(death.name != part.name for death in self.fleet.deaths()) and health(part) == 200

    def log(self, part: FleetPart) -> str:
        """What a server has printed."""
        return (self.fleet.log_directory / f"{part.name}.log").read_text(errors="replace")

    def live_handoffs(self, part: FleetPart) -> int:
        """How many hand-offs a server reports as under way."""
        return live_handoffs(part)

    async def generate(
        self, session: aiohttp.ClientSession, url: str, token_ids: Sequence[int], output: int = OUTPUT, **more: Any
    ) -> Answer:
        """One request in SGLang's own format."""
        return await generate(session, url, token_ids, output, **more)

    async def pair(
        self, session: aiohttp.ClientSession, token_ids: Sequence[int], output: int = OUTPUT, room: int = 0, **more: Any
    ) -> tuple[Answer, Answer]:
        """One request to both sides, as a balancer sends it; the answers of prefill and of decode."""
        return await hand_over(session, self.prefill, self.decode, token_ids, output, room, **more)


class Grid:
    """Servers of one model, each with settings of its own, started when they are needed. Ends them when it is left."""

    def __init__(self, kind: str = "gqa") -> None:
        environment = ready()
        self.fleet: Fleet = ForkedServers()
        self.ports = PortPicker()
        options = EngineOptions(
            "tiny",
            "local",
            2,
            cluster_key=new_cluster_key(),
            step_tokens=64,
            controls=Controls(poison=True),
            arguments=("--skip-tokenizer-init",),
        )
        self._servers = SglangServers(environment, tiny_model(environment, kind), options)

    def start(self, name: str, role: str, shape: str = "tp1", fleet: Fleet | None = None, **changes: Any) -> FleetPart:
        """Start a server; `changes` are of its options, `settings` of the backend, `arguments` of its command line, `kind`
        of its model, `variables` of its environment.
        """
        settings, arguments, kind, variables = (
            _ALLOWED | changes.pop("settings", {}),
            changes.pop("arguments", ()),
            changes.pop("kind", ""),
            changes.pop("variables", {}),
        )
        options = self._servers.options
        options = replace(options, shape=shape, arguments=(*options.arguments, *arguments), **changes)
        servers = replace(self._servers, options=options, settings=settings)
        if kind:
            servers = replace(servers, model=tiny_model(servers.environment, kind))
        part = servers.part(name, role, self.ports)
        part = replace(part, environment={**part.environment, **variables})
        (fleet or self.fleet).start(part)
        return part

    def wait_healthy(self) -> None:
        """Wait until all servers answer."""
        self.fleet.wait_healthy(START_S)

    def is_alive(self, part: FleetPart) -> bool:
        """Whether a server has not ended by itself, and answers."""
        return all(death.name != part.name for death in self.fleet.deaths()) and health(part) == 200


@dataclass(frozen=True)
class Trio:
    """Servers of a grid: a plain one, and a pair."""

    grid: Grid
    single: FleetPart
    prefill: FleetPart
    decode: FleetPart

    @property
    def bootstrap_port(self) -> int:
        """Where the prefill listens."""
        return ControlAddress.parse(self.prefill.control_address).handshake

    def where(self, room: int = 0) -> dict[str, Any]:
        """The fields that name the prefill and a room there, a new one unless it is given."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port, "bootstrap_room": room or new_room()}

    def check_serves(self, tokens: int, *others: FleetPart) -> None:
        """All run and answer, nothing is held on either side, and the pair hands over a prompt of so many tokens."""
        wait_at_rest(self.prefill, self.decode)
        for part in (self.prefill, self.decode, *others):
            assert self.grid.is_alive(part), part.name

        async def work(session: aiohttp.ClientSession) -> None:
            ids = prompt(new_room(), tokens)
            single = await generate(session, self.single.base_url, ids)
            assert different(single, (await hand_over(session, self.prefill, self.decode, ids))[1]) == ""

        run(work)


async def generate(
    session: aiohttp.ClientSession, url: str, token_ids: Sequence[int], output: int = OUTPUT, **more: Any
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


async def hand_over(
    session: aiohttp.ClientSession,
    prefill: FleetPart,
    decode: FleetPart,
    token_ids: Sequence[int],
    output: int = OUTPUT,
    room: int = 0,
    **more: Any,
) -> tuple[Answer, Answer]:
    """One request to both servers, as a balancer sends it; the answers of prefill and of decode."""
    where = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": ControlAddress.parse(prefill.control_address).handshake,
        "bootstrap_room": room or new_room(),
        **more,
    }
    sides = (generate(session, part.base_url, token_ids, output, **where) for part in (prefill, decode))
    answers = await asyncio.gather(*sides)
    return answers[0], answers[1]


def new_room() -> int:
    """A room that no other request has."""
    return random.getrandbits(62) + 1


def run(work: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Run a test's requests."""

    async def main() -> None:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await work(session)

    asyncio.run(main())


def health(part: FleetPart) -> int:
    """The status of a server's health."""
    try:
        with urllib.request.urlopen(part.health_url, timeout=30) as answer:
            return int(answer.status)
    except OSError:
        return 0


def live_handoffs(part: FleetPart) -> int:
    """How many hand-offs a server reports as under way."""
    return sum(each["outcome"] is None for each in _reported(part, "/handoffs")["handoffs"])


def wait_at_rest(*parts: FleetPart) -> None:
    """Wait until none of these has a hand-off under way, for a bounded time."""
    until = time.monotonic() + WAIT_S
    while any(live_handoffs(part) for part in parts):
        assert time.monotonic() < until, "hand-offs are left"
        time.sleep(0.1)


def noted(part: FleetPart, room: int, stage: str) -> int:
    """How often a server has noted a stage of the hand-off of a room so far."""
    return sum(note["stage"] == stage for note in _notes(part, room))


async def wait_until_noted(part: FleetPart, room: int, stage: str, count: int = 1) -> None:
    """Wait until a server has noted a stage of the hand-off of a room so often, for a bounded time."""
    until = time.monotonic() + WAIT_S
    while await asyncio.to_thread(noted, part, room, stage) < count:
        assert time.monotonic() < until, f"{part.name} has not noted {stage!r}"
        await asyncio.sleep(0.002)


def outcome(part: FleetPart, room: int) -> str:
    """How the hand-off of a room ended on a server; empty while it is under way."""
    return next((str(note["outcome"]) for note in _notes(part, room) if note.get("outcome")), "")


def noted_at(part: FleetPart, room: int, stage: str) -> float:
    """Seconds after its first note at which a server noted a stage of the hand-off of a room; -1 when it has not."""
    return next((float(note["at_s"]) for note in _notes(part, room) if note["stage"] == stage), -1.0)


def _notes(part: FleetPart, room: int) -> list[dict[str, Any]]:
    try:
        document = _reported(part, f"/handoffs/{room_transfer_id(room)}")
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return []
    return [note for side in document["sides"] for note in side["notes"]]


def _reported(part: FleetPart, path: str) -> Any:
    """What a server reports of its hand-offs, asked for as a router asks: with the token of the cluster key."""
    token = http_token(part.environment[CLUSTER_KEY_VARIABLE].encode())
    request = urllib.request.Request(f"http://{part.handoffs_address}{path}", headers={HTTP_KEY_HEADER: token})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


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

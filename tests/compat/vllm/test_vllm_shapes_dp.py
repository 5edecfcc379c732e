"""Data parallelism of real vLLMs on either end, balanced by vLLM or outside of it, behind our router.

Every engine registers by itself, with its own incarnation, control address and rank; each rank serves requests, and the answers
are those of one plain vLLM. The control on the same servers: with nothing copied, answers differ.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from vllm_handing import prompt_of
from vllm_servers import CLUSTER_KEY, MODEL, Server, ServerSpec, starting
from vllm_shaped import LIMITS, VOCABULARY, Singles
from vllm_stand import together

from kvbaton.core.handoff import Mode
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.verify.client import ServerReply, ask
from kvbaton.verify.compare import Verdict, compare
from watching import wait_until

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

MODELS = {"internal": "small-llama", "external": "small-gptoss"}
"""vLLM refuses external balancing of models without experts: those are to be independent servers. The ranks exchange rows
between experts, for which vLLM has no operations on CPUs: `inside/cpu_experts.py` adds them."""
RANKS = 2
_DELIVERED = re.compile(
    r'^vllm:kvbaton_handoffs_total\{(?=[^}]*outcome="delivered")[^}]*engine="(\d+)"[^}]*\} (\S+)$', re.MULTILINE
)
LENGTHS = (3, 40, 127, 128, 129, 300, 250, 60)
CASES = [
    ("prefill", "internal", Mode.PUSH),
    ("decode", "internal", Mode.PULL),
    ("prefill", "external", Mode.PULL),
    ("decode", "external", Mode.PUSH),
]


@dataclass(frozen=True)
class DpStand:
    """A router, the servers behind it, and the side that has several data-parallel ranks."""

    side: str
    balancing: str
    router: str
    single: Server
    several: list[Server]
    """Those of the side with several ranks: one server, or one for each rank."""
    decodes: list[Server]

    def ranks_that_served(self) -> set[tuple[str, str]]:
        """Server and engine of the ranks that have delivered a hand-off."""
        found = set()
        for server in self.several:
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=20) as answer:
                text = answer.read().decode()
            found |= {(server.url, engine) for engine, count in _DELIVERED.findall(text) if float(count) > 0}
        return found

    def instances(self) -> list[dict[str, Any]]:
        """What the router has registered."""
        with urllib.request.urlopen(f"{self.router}/instances", timeout=10) as answer:
            live: list[dict[str, Any]] = json.load(answer)["live"]
        return live


@pytest.fixture(scope="module")
def singles() -> Iterator[Singles]:
    with ExitStack() as kept:
        yield Singles(kept)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def stand(request: pytest.FixtureRequest, singles: Singles) -> Iterator[DpStand]:
    side, balancing, mode = request.param
    model = MODELS[balancing]
    ports = PortPicker()
    router_port, discovery_port = ports.pick(), ports.pick()
    specs = []
    for role in ("prefill", "decode"):
        settings: dict[str, Any] = {**LIMITS, "allow": []}
        common = {"mode": mode, "routers": (f"127.0.0.1:{discovery_port}",), "holds": True, "model": model, "forks": True}
        if role != side:
            specs.append(ServerSpec(role, role, settings=settings, **common))
        elif balancing == "internal":
            # Several API processes would share metrics by a variable that has to be set before imports: not when forked.
            api = ("--api-server-count", "1")
            specs.append(ServerSpec(role, role, settings=settings, shape=f"dp{RANKS}", arguments=api, **common))
        else:
            master = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(ports.pick()))
            for rank in range(RANKS):
                place = ("--data-parallel-size", str(RANKS), "--data-parallel-rank", str(rank), *master)
                sized = {**settings, "dp_size": RANKS}
                specs.append(ServerSpec(f"{role}{rank}", role, settings=sized, arguments=place, **common))
    with Fleet() as fleet, starting(*specs) as servers:
        single = singles.of(model)
        fleet.start(router_part("127.0.0.1", router_port, discovery_port, cluster_key=CLUSTER_KEY))
        for each in (*servers, single):
            each.wait()
        fleet.wait_healthy(60)
        of_role = {
            role: [s for s, spec in zip(servers, specs, strict=True) if spec.role == role] for role in ("prefill", "decode")
        }
        router = f"http://127.0.0.1:{router_port}"
        found = DpStand(side, balancing, router, single, of_role[side], of_role["decode"])
        wait_until(lambda: len(found.instances()) == 1 + RANKS, "every engine to register", 120)
        yield found


async def _replies(opened: aiohttp.ClientSession, stand: DpStand, seed: str) -> list[tuple[ServerReply, ServerReply]]:
    """Answers of the single server and through the router."""
    prompts = [tuple(token % VOCABULARY for token in prompt_of(length, seed)) for length in LENGTHS]
    pair = await asyncio.gather(*(ask(opened, stand.router, MODEL, prompt, 8) for prompt in prompts))
    single = [await ask(opened, stand.single.url, MODEL, prompt, 8) for prompt in prompts]
    return list(zip(single, pair, strict=True))


def test_every_engine_registers_with_its_own_address_and_rank(stand: DpStand) -> None:
    kind = {"prefill": "P", "decode": "D"}[stand.side]
    ranks = [each for each in stand.instances() if each["type"] == kind]
    assert sorted(each["dp_rank"] for each in ranks) == list(range(RANKS))
    assert {(each["dp_size"], each["tp_size"], each["pp_size"]) for each in ranks} == {(RANKS, 1, 1)}
    for field in ("incarnation", "zmq_address"):
        assert len({each[field] for each in ranks}) == RANKS, ranks
    assert len({each["http_address"] for each in ranks}) == (1 if stand.balancing == "internal" else RANKS)


def test_every_answer_is_that_of_one_plain_server_and_every_rank_has_served(stand: DpStand) -> None:
    async def send(opened: aiohttp.ClientSession) -> None:
        for single, pair in await _replies(opened, stand, f"same {stand.side} {stand.balancing}"):
            assert compare(single.answer, pair.answer).verdict is Verdict.EQUAL
            assert pair.record["handed_off"], pair.record
            assert not pair.record["recomputed"], pair.record
            assert pair.record["bytes_moved"] == pair.record["bytes_planned"] > 0

    together(send)
    wait_until(lambda: len(stand.ranks_that_served()) == RANKS, "every rank to have served", 60)


def test_control_nothing_copied_shows(stand: DpStand) -> None:
    async def send(opened: aiohttp.ClientSession) -> None:
        with ExitStack() as held:
            for each in stand.decodes:
                held.enter_context(each.holding("drop"))
            replies = await _replies(opened, stand, f"control {stand.side} {stand.balancing}")
        different = [compare(single.answer, pair.answer).verdict is Verdict.DIFFERENT for single, pair in replies]
        assert sum(different) > len(different) / 2, different

    together(send)

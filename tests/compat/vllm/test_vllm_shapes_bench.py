"""vLLM's own load generator, `vllm bench serve`, through our router to a pair of TP 2: the command of `docs/vllm.md`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_servers import CLUSTER_KEY, MODEL, Server, ServerSpec, ready, starting
from vllm_shaped import LIMITS

from kvbaton.core.handoff import Mode
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from watching import wait_until

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

SMALL = "small-llama"
REQUESTS = 32
PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[str, Server]]:
    """The router and the decode server."""
    ports = PortPicker()
    router_port, discovery_port = ports.pick(), ports.pick()
    specs = [
        ServerSpec(
            role,
            role,
            Mode.PUSH,
            settings=LIMITS,
            routers=(f"127.0.0.1:{discovery_port}",),
            model=SMALL,
            shape="tp2",
            forks=True,
        )
        for role in ("prefill", "decode")
    ]
    with Fleet() as fleet, starting(*specs) as servers:
        fleet.start(router_part("127.0.0.1", router_port, discovery_port, cluster_key=CLUSTER_KEY))
        for each in servers:
            each.wait()
        fleet.wait_healthy(60)
        router = f"http://127.0.0.1:{router_port}"
        wait_until(lambda: _live(router) == len(specs), "both instances to register", 120)
        yield router, servers[1]


def _live(router: str) -> int:
    with urllib.request.urlopen(f"{router}/instances", timeout=10) as answer:
        return len(json.load(answer)["live"])


def test_every_request_is_served_and_handed_over(serving: tuple[str, Server], tmp_path: Path) -> None:
    router, decode = serving
    prepared = ready(model=SMALL)
    documented = re.search(r"^vllm (bench serve [^\n]*\\\n[^\n]*)$", PAGE.read_text(), re.MULTILINE)
    assert documented is not None
    arguments = documented[1].replace("\\\n", "").split()
    given = {"--base-url": router, "--model": MODEL, "--tokenizer": str(prepared.model), "--num-prompts": str(REQUESTS)}
    for option, value in given.items():
        arguments[arguments.index(option) + 1] = value
    run = subprocess.run(
        [
            str(prepared.environment.python),
            "-m",
            "vllm.entrypoints.cli.main",
            *arguments,
            "--save-result",
            "--result-dir",
            tmp_path,
        ],
        env={**os.environ, **prepared.environment.variables()},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (result,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert (result["completed"], result.get("failed", 0)) == (REQUESTS, 0), result.get("errors")
    name = 'vllm:kvbaton_handoffs_total{outcome="delivered",side="target"}'
    wait_until(lambda: decode.metrics().get(name, 0.0) >= REQUESTS - 1, "each to be handed over", 60)

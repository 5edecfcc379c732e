"""Real vLLM on hosts of their own, 10 ms apart, behind a router on a third: the answers of one vLLM, and a red control."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from hosts import can_have_two_hosts, hosts

from kvbaton.config import CLUSTER_KEY_VARIABLE, HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import Controls, EngineOptions
from kvbaton.engines.table import find_engine
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import kvbaton_command, new_cluster_key
from kvbaton.launch.ports import PortPicker
from watching import wait_until

pytestmark = [
    pytest.mark.vllm_full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_have_two_hosts(), reason="needs root, ip, tc and /dev/net/tun"),
]

_MODEL = "smollm2"
_REQUESTS = 4
_START_S = 900.0


@pytest.mark.parametrize(("mode", "drop_writes"), [(Mode.PULL, False), (Mode.PUSH, True)], ids=["pull", "push, control"])
def test_every_answer_is_the_same_across_hosts(mode: Mode, drop_writes: bool) -> None:
    plugin, ports, key = find_engine("vllm"), PortPicker(), new_cluster_key()
    options = EngineOptions(_MODEL, "tcp", 3, HandoffSettings(mode=mode), cluster_key=key)
    plugin.check(options, options, print)
    with hosts(2) as (switch, (here, *others)), Fleet() as fleet:
        switch.delay_s = 0.01
        port, discovery_port = ports.pick(), ports.pick()
        url = f"http://{here.ipv4}:{port}"
        command = kvbaton_command("router", "--host", here.ipv4, "--port", str(port), "--discovery-port", str(discovery_port))
        fleet.start(FleetPart("router", command, f"{url}/metrics", {CLUSTER_KEY_VARIABLE: key}))
        for role, host in zip(("prefill", "decode"), others, strict=True):
            controls = Controls(poison=True, drop_writes=drop_writes)
            prepared = plugin.prepare(replace(options, host=host.ipv4, controls=controls, served_name=_MODEL), print)
            part = prepared.part(role, role, ports, [f"{here.ipv4}:{discovery_port}"])
            fleet.start(replace(part, command=host.command(*part.command)))
        single = plugin.prepare(replace(options, served_name=_MODEL), print).part("single", "both", ports)
        fleet.start(single)
        fleet.wait_healthy(_START_S)
        wait_until(lambda: len(_live(url)) == 2, "both instances register", 60)
        assert {each["http_address"].rpartition(":")[0] for each in _live(url)} == {host.ipv4 for host in others}
        carried = switch.carried_total
        command = kvbaton_command("verify", "--engine", "vllm", "--model", _MODEL, "--requests", str(_REQUESTS), "--json")
        command += ["--longest-prompt", "200", "--max-tokens", "6", "--pair-url", url, "--single-url", single.base_url]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert run.stdout, run.stderr
        document = json.loads(run.stdout)
        assert switch.carried_total > carried
        if drop_writes:
            assert run.returncode == 1
            assert document["different"] > 0
        else:
            assert (run.returncode, document["problems"]) == (0, [])
            assert (document["equal"], document["handed_off"]) == (_REQUESTS, _REQUESTS)


def _live(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/instances", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["live"]
    return found

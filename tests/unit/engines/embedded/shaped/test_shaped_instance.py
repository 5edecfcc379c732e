"""An instance in a shape, as users start it: it answers, and goes down by name with the first rank that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request

import pytest

from kvbaton.engines.base import EngineOptions
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import kvbaton_command
from kvbaton.launch.ports import PortPicker
from watching import command_line, descendants, is_running, wait_until

WAIT_S = 100.0


def _ranks_of(leader: int) -> dict[str, int]:
    """The rank processes of an instance, by their coordinates."""
    ranks = [pid for pid in descendants(leader) if "rank_process" in command_line(pid)]
    cuts = {pid: json.loads(command_line(pid).partition("rank_process ")[2])["cut"] for pid in ranks}
    return {f"pp{cut['pp_rank']},tp{cut['tp_rank']}": pid for pid, cut in cuts.items()}


def _start(fleet: Fleet, shape: str) -> tuple[FleetPart, str]:
    part = EmbeddedServers(EngineOptions("tiny-swa", "local", 2, shape=shape)).part("single", "both", PortPicker())
    fleet.start(part)
    return part, part.base_url


def _answer(url: str) -> str:
    body = {"model": "tiny-swa", "prompt": "The harbour near the bridge", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
    return text


def test_it_answers_as_an_uncut_one_and_falls_with_a_rank() -> None:
    with Fleet() as fleet, Fleet() as other:
        _, url = _start(fleet, "pp2,tp2")
        _, plain = _start(other, "tp1")
        fleet.wait_healthy(WAIT_S)
        other.wait_healthy(WAIT_S)
        assert _answer(url) == _answer(plain) != ""
        ranks = _ranks_of(fleet.pid("single"))
        assert sorted(ranks) == ["pp0,tp0", "pp0,tp1", "pp1,tp0", "pp1,tp1"]
        os.kill(ranks["pp1,tp0"], signal.SIGKILL)
        wait_until(lambda: fleet.death() is not None, "the instance goes down", WAIT_S)
        death = fleet.death()
        assert death is not None
        assert death.returncode == 2
        assert any("rank pp1,tp0" in line for line in death.last_lines)
        wait_until(lambda: not any(map(is_running, ranks.values())), "its other ranks end too", WAIT_S)


@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        ("tiny-gqa6", "tp4", "6 KV heads and tp is 4"),
        ("tiny", "tp2", "cannot be cut into tp2"),
        ("tiny-gqa8", "tp2x", "tp2x"),
        ("tiny-gqa8", "cp2", "cp1 only"),
    ],
)
def test_a_shape_that_is_not_possible_is_refused(model: str, shape: str, text: str) -> None:
    command = kvbaton_command("serve", "--model", model, "--shape", shape)
    run = subprocess.run(command, capture_output=True, timeout=WAIT_S, text=True)
    assert run.returncode == 2
    assert text in run.stderr

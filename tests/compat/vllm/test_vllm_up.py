"""`kvbaton up --engine vllm` as users run it: it answers, it can be watched, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from system import Client, Up
from vllm_servers import MODEL, ready

from kvbaton.launch.local import kvbaton_command
from kvbaton.launch.ports import check_port_free
from watching import is_running, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    ready()
    with Up("--engine", "vllm", temporary=tmp_path_factory.mktemp("up"), start_s=900) as running:
        yield running


def explain(client: Client) -> dict[str, object]:
    command = kvbaton_command("explain", "last", "--router", f"http://127.0.0.1:{client.port}", "--json")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    document: dict[str, object] = json.loads(result.stdout)
    return document


def metrics(http_address: str) -> dict[str, float]:
    """Every series of kvbaton at an instance, without the labels that all have."""
    with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r"^vllm:kvbaton_(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    own = re.compile(r'(?:side|cause|outcome)="([^"]*)"')
    return {" ".join([name, *sorted(own.findall(labels))]): float(value) for name, labels, value in found}


def shared_memory(pids: set[int]) -> set[Path]:
    """Every named piece of shared memory that these processes use."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(name) for name in re.findall(rf"({SHARED_MEMORY}/\S+)$", maps, re.MULTILINE)}


def test_it_answers_and_its_hand_off_can_be_explained(up: Up) -> None:
    reply = up.client.post(
        "/v1/completions", {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    )
    assert reply.status == 200, reply.content
    assert reply.text.startswith(" Paris")
    summary = explain(up.client)["summary"]
    assert isinstance(summary, dict)
    assert summary["transfer_id"] == reply.headers["X-KVBaton-Transfer"]
    assert [participant["problem"] for participant in summary["participants"]] == ["", ""]
    (handoff,) = summary["handoffs"]
    assert [end["outcome"] for end in handoff["ends"]] == ["delivered", "delivered"]
    assert {"prefill", "wire", "confirmation", "first step"} <= {bar["phase"] for bar in handoff["bars"]}
    assert handoff["exposed_s"] > 0


def test_it_is_counted_where_vllm_shows_it(up: Up) -> None:
    live = up.client.get("/instances").document["live"]
    addresses = {instance["type"]: instance["http_address"] for instance in live}
    wait_until(lambda: metrics(addresses["P"]).get("handoffs_total delivered source", 0) >= 1, "the source counts it", 30)
    wait_until(lambda: metrics(addresses["D"]).get("handoffs_total delivered target", 0) >= 1, "the target counts it", 30)
    target = metrics(addresses["D"])
    assert target["moved_bytes_total"] > 0
    assert target["runs_total"] > 0
    assert (target["peers"], target["handshakes_total"], target["quarantined_blocks"]) == (1, 1, 0)
    assert target["handover_seconds_count"] == target["target_queue_seconds_count"] == target["handoffs_total delivered target"]


def test_ctrl_c_leaves_nothing_behind(up: Up) -> None:
    ports = [int(instance["http_address"].rpartition(":")[2]) for instance in up.client.get("/instances").document["live"]]
    children = up.children()
    assert len(children) >= 7, "a router, and three processes of each vLLM"
    segments = shared_memory(children)
    assert segments, "vLLM's processes share memory"
    up.process.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    wait_until(lambda: not [pid for pid in children if is_running(pid)], "every process is gone", 10)
    for port in (up.port, *ports):
        check_port_free("127.0.0.1", port, "--port")
    assert not [each for each in segments if each.exists()]
    assert "Traceback" not in up.output

"""`kvbaton up --engine sglang` as users run it: it answers, its hand-off is explained, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from sglang_stand import ready
from system import Up

from kvbaton.launch.local import kvbaton_command
from kvbaton.launch.ports import check_port_free
from watching import is_running, wait_until

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]


def test_up_answers_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    ready()
    with Up("--engine", "sglang", temporary=tmp_path, start_s=900) as up:
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        reply = up.client.post("/v1/completions", body)
        assert reply.status == 200, reply.content
        assert reply.text.startswith(" Paris")
        command = kvbaton_command("explain", "last", "--router", f"http://127.0.0.1:{up.port}", "--json")
        explained = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert explained.returncode == 0, explained.stderr
        summary = json.loads(explained.stdout)["summary"]
        assert summary["transfer_id"] == reply.headers["X-KVBaton-Transfer"]
        assert [end["outcome"] for end in summary["handoffs"][0]["ends"]] == ["delivered", "delivered"]
        ports = [int(each["http_address"].rpartition(":")[2]) for each in up.client.get("/instances").document["live"]]
        children = up.children()
        assert len(children) >= 5, "a router, and at least two processes of each SGLang"
        up.process.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
        wait_until(lambda: not [pid for pid in children if is_running(pid)], "every process is gone", 20)
        for port in (up.port, *ports):
            check_port_free("127.0.0.1", port, "--port")
        found = up.output.find("Traceback")
        assert found < 0, up.output[max(0, found - 500) : found + 4000]

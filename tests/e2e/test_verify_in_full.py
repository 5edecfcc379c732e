"""`kvbaton verify` in full, with the real model: every answer the same over every transport, and the control detected.

Each run takes half a minute of both cores, so `make test-e2e` runs a sample; `make test-e2e-full` runs all.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kvbaton.launch.local import kvbaton_command

pytestmark = [pytest.mark.e2e, pytest.mark.real_model]


def _verify(requests: int, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = kvbaton_command("verify", "--requests", str(requests), "--concurrency", "8", "--json", *arguments)
    run = subprocess.run(command, capture_output=True, timeout=850, text=True)
    assert run.stdout, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


@pytest.mark.sampled(2, group="verify in full")
def test_every_answer_is_the_same() -> None:
    code, document = _verify(24)
    assert (code, document["problems"]) == (0, [])
    assert (document["handed_off"], document["recomputed"], document["failed"]) == (24, 0, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0
    assert max(row["prompt_tokens"] for row in document["rows"]) > 500
    assert any(row["cached_tokens"] > 0 for row in document["rows"])


@pytest.mark.sampled(2, group="verify in full")
@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_every_answer_is_the_same_in_each_mode_over_each_transport(mode: str, transport: str) -> None:
    code, document = _verify(10, "--mode", mode, "--transport", transport, "--seed", "1")
    assert (code, document["problems"]) == (0, [])
    assert (document["handed_off"], document["recomputed"], document["failed"]) == (10, 0, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0
    assert (document["settings"]["mode"], document["settings"]["transport"]) == (mode, transport)
    assert max(row["prompt_tokens"] for row in document["rows"]) > 500


@pytest.mark.sampled(2, group="verify in full")
@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_control_that_moves_nothing_is_detected(mode: str, transport: str) -> None:
    code, document = _verify(8, "--mode", mode, "--transport", transport, "--longest-prompt", "300", "--drop-writes")
    assert code == 1
    assert document["different"] > 4
    assert (document["handed_off"], document["recomputed"], document["failed"]) == (8, 0, 0)


@pytest.mark.sampled(2, group="verify in full")
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_with_checksums_the_control_fails_and_a_good_run_does_not(mode: str) -> None:
    short = ("--mode", mode, "--longest-prompt", "300", "--integrity", "full")
    code, document = _verify(6, *short)
    assert (code, document["problems"]) == (0, [])
    code, document = _verify(6, *short, "--drop-writes")
    assert code == 1
    assert (document["failed"], document["different"], document["handed_off"]) == (6, 0, 0)


@pytest.mark.sampled(2, group="verify in full")
def test_several_instances_on_each_side() -> None:
    code, document = _verify(24, "--prefill", "2", "--decode", "2", "--longest-prompt", "300")
    assert (code, document["problems"]) == (0, [])
    assert (document["handed_off"], document["recomputed"]) == (24, 0)

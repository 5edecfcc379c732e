"""vLLM's own MoRIIOConnector, unchanged, on the drop-in for MoRI: every answer is that of one plain vLLM.

A few requests in one of the two modes with `--sample`. The connector ends a server whose cache does not begin on a page; that
memory does in the environment of a server is looked at in every run. The control shows that the answers depend on what was
stored.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_servers import ready
from vllm_verifying import verify

from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.setup.environment import ensure_msgpack
from kvbaton.launch.ports import PortPicker

pytestmark = pytest.mark.timeout(1800)

_FEW = ("--requests", "4", "--longest-prompt", "200", "--max-tokens", "4")
_FACTS = ("drop-in", "begins on a page", "write", "read", "deregistered")


@pytest.mark.vllm
@pytest.mark.parametrize(("control", "is_equal"), [("0", "True"), ("1", "False")], ids=["as it is", "control"])
def test_the_wrapper_of_vllm_moves_tensors_both_ways(control: str, is_equal: str) -> None:
    prepared = ready()
    environment = prepared.environment
    ensure_msgpack(environment, print)
    script = Path(__file__).parent / "inside" / "moriio_wrapper.py"
    server = replace(prepared, options=replace(prepared.options, connector="moriio")).part("server", "prefill", PortPicker())
    variables = {**os.environ, **server.environment, "KVBATON_MORI_DROP_WRITES": control}
    run = subprocess.run(
        [str(environment.python), str(script)], env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith(_FACTS)]
    expected = ["drop-in True available True", "begins on a page True", f"write {is_equal}", f"read {is_equal}"]
    assert lines[:4] == expected, run.stderr[-3000:]
    assert lines[4:] == ["deregistered TransferError"]


@pytest.mark.vllm
@pytest.mark.sampled(1, group="vllm verify")
@pytest.mark.parametrize("mode", list(Mode))
def test_every_answer_is_the_same(mode: Mode) -> None:
    code, document = verify("--connector", "moriio", "--mode", mode, *_FEW)
    assert code == 0, document["problems"]
    assert (document["requests"], document["equal"], document["handed_off"]) == (4, 4, 4)
    assert document["bytes_moved"] > 0


@pytest.mark.vllm_full
@pytest.mark.parametrize("mode", list(Mode))
def test_twenty_answers_are_the_same(mode: Mode) -> None:
    code, document = verify("--connector", "moriio", "--mode", mode, "--requests", "20")
    assert code == 0, document["problems"]
    assert document["equal"] + document["near_ties"] == document["handed_off"] == 20


@pytest.mark.vllm_full
@pytest.mark.parametrize("mode", list(Mode))
def test_a_control_that_stores_nothing_is_noticed(mode: Mode) -> None:
    code, document = verify("--connector", "moriio", "--mode", mode, "--requests", "20", "--drop-writes")
    assert code == 1
    assert document["different"] > 0

"""An engine of another package: found by its entry point alone, it passes `kvbaton verify`, and its control does not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvbaton.launch.local import kvbaton_command

ENGINE = Path(__file__).parents[3] / "engines_outside" / "summing_engine.py"
SHORT = ("--engine", "summing", "--requests", "4", "--longest-prompt", "60", "--max-tokens", "4", "--json")


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the engine is installed, as a package that pip has unpacked would be."""
    metadata = tmp_path / "summing-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: summing\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[kvbaton.engines]\nsumming = summing_engine:SummingPlugin\n")
    (tmp_path / ENGINE.name).write_text(ENGINE.read_text())
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}


def _verify(environment: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    command = kvbaton_command("verify", *SHORT, *arguments)
    run = subprocess.run(command, capture_output=True, timeout=110, text=True, env=environment)
    assert run.stdout, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


def test_it_has_fewer_than_100_lines_of_code() -> None:
    assert len([line for line in ENGINE.read_text().splitlines() if line.strip()]) < 100


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_every_answer_of_a_pair_is_the_same(installed: dict[str, str], mode: str) -> None:
    code, document = _verify(installed, "--mode", mode)
    assert code == 0, document["problems"]
    assert (document["equal"], document["handed_off"]) == (4, 4)
    assert document["bytes_moved"] == document["bytes_planned"] > 0


def test_its_control_is_found_out(installed: dict[str, str]) -> None:
    code, document = _verify(installed, "--drop-writes")
    assert code == 1
    assert (document["different"], document["handed_off"], document["failed"]) == (4, 4, 0)


def test_without_its_entry_point_it_is_no_engine() -> None:
    run = subprocess.run(kvbaton_command("verify", *SHORT), capture_output=True, timeout=60, text=True)
    assert run.returncode == 2
    assert "--engine is 'summing', which is no engine; known are embedded, vllm" in " ".join(run.stderr.split())

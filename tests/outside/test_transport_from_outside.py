"""A transport of under 100 lines that lives in another package: one entry point, and all of kvbaton knows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULE = HERE / "procmem.py"
SUITES = ("test_transport_contract.py", "test_transport_order.py")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process in whose environment the package is installed, as pip leaves it there."""
    site = tmp_path_factory.mktemp("site")
    (site / MODULE.name).write_text(MODULE.read_text())
    installed = site / "procmem-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: procmem\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[kvbaton.transports]\nprocmem = procmem:ENTRY\n")
    (installed / "entry_points.txt").open("a").write("broken = no_such_module:ENTRY\n")
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_it_has_fewer_than_100_lines() -> None:
    assert len(MODULE.read_text().splitlines()) < 100


@pytest.fixture(scope="module")
def contract(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One run of all suites of the contract."""
    files = [f"tests/contract/{suite}" for suite in SUITES]
    return run(environment, "pytest", *files, "-k", "procmem", "-vv", "-p", "no:cacheprovider")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("suite", SUITES)
def test_it_passes_the_contract_suite(contract: subprocess.CompletedProcess[str], suite: str) -> None:
    assert contract.returncode == 0, contract.stdout[-3000:] + contract.stderr[-1000:]
    counts = Counter(re.findall(rf"/{suite}::\S+\[procmem\S* ([A-Z]+)", contract.stdout))
    assert counts["PASSED"] >= 14, contract.stdout[-3000:]
    assert counts["SKIPPED"] <= 1, "only what a peer has to do itself may be skipped"
    assert sum(counts.values()) == counts["PASSED"] + counts["SKIPPED"]


def test_doctor_tries_it_and_reports_a_package_that_is_broken(environment: dict[str, str]) -> None:
    done = run(environment, "kvbaton.cli.main", "doctor", "--json")
    rows = {row["transport"]: row for row in json.loads(done.stdout)["transports"]}
    assert done.returncode == 0
    assert rows["procmem"] == {"transport": "procmem", "works": True, "problem": ""}
    assert "no_such_module" in rows["broken"]["problem"]


def test_bench_wire_measures_it_beside_its_peer(environment: dict[str, str]) -> None:
    arguments = ["--blocks", "16", "--batch-mib", "2", "--rounds", "1", "--idle", "0", "--json"]
    done = run(environment, "kvbaton.cli.main", "bench", "wire", "--transport", "procmem", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert {row["name"] for row in report["rows"]} == {"procmem: 16 KiB", "memcpy: 16 KiB"}
    assert next(row for row in report["rows"] if row["name"].startswith("procmem"))["peer"] == "memcpy"


def test_the_command_line_offers_it_and_its_setting_is_checked(environment: dict[str, str]) -> None:
    assert "procmem" in run(environment, "kvbaton.cli.main", "serve", "--help").stdout
    near = run(environment, "kvbaton.cli.main", "bench", "wire", "--transport", "procmen")
    assert near.returncode == 2
    assert "unknown transport 'procmen' (did you mean procmem?)" in near.stderr
    wrong = {**environment, "KVBATON_TRANSPORT_SETTINGS": "procmem_load=0"}
    refused = run(wrong, "kvbaton.cli.main", "bench", "wire", "--transport", "procmem", "--batch-mib", "1", "--blocks", "16")
    assert "transport setting procmem_load is 0; it must be at least 1" in refused.stderr

"""Runs vLLM's own tests of connectors with ours in the place of theirs; see `inside/peer_tests_plugin.py`."""

from __future__ import annotations

import ast
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm_peer_sources import ensure_packages, ensure_peer_tests
from vllm_servers import ready

from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.setup.environment import VLLM_VERSION
from kvbaton.engines.vllm.setup.servers import VllmServers
from kvbaton.errors import LocalError

__all__ = ["Case", "PeerTests", "peer_tests"]

_INSIDE = Path(__file__).parent / "inside"
_UNIT = "tests/v1/kv_connector/unit"
_PACKAGE = _UNIT.replace("/", ".") + "."
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Case:
    """What became of one of vLLM's tests: why it did not pass, if so, and what it did with our connector."""

    problem: str
    made: int
    calls: int
    named: int


@dataclass(frozen=True)
class PeerTests:
    """vLLM's tests on this machine, and what runs them."""

    directory: Path
    pytest_packages: Path
    options: VllmServers

    def names(self) -> dict[str, list[str]]:
        """Every test of every file, without parameters, as `test_name` or `TestClass::test_name`."""
        unit = self.directory / _UNIT
        files = sorted(unit.rglob("test_*.py"))
        return {file.relative_to(unit).as_posix(): _names(ast.parse(file.read_text()).body) for file in files}

    def run(self, tests: Iterable[str], mode: Mode, results: Path, plant: str = "") -> dict[str, Case]:
        """Run these, named `file.py::test`; what became of each, by the same names, with the parameters that pytest adds."""
        unit = self.directory / _UNIT
        junit = results / "results.xml"
        command = [
            str(self.options.environment.python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "peer_tests_plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-c", os.devnull, "--rootdir", str(self.directory), "--confcutdir", str(unit), "--junitxml", str(junit)]
        run = subprocess.run(
            [*command, *(f"{unit}/{test}" for test in tests)],
            cwd=results,
            env={**os.environ, **self._variables(mode, plant)},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        assert junit.exists(), run.stdout[-3000:] + run.stderr[-3000:]
        cases = list(ElementTree.parse(junit).iter("testcase"))  # noqa: S314 - written by our own pytest
        assert cases, run.stdout[-3000:]
        return {_name(case): _case(case) for case in cases}

    def _variables(self, mode: Mode, plant: str) -> dict[str, str]:
        variables = self.options.environment.variables()
        paths = (variables["PYTHONPATH"], _INSIDE, self.directory, self.pytest_packages)
        return {
            **variables,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
            "PYTEST_ADDOPTS": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "KVBATON_PEER_MODEL": str(self.options.model),
            "KVBATON_PEER_MODE": str(mode),
            "KVBATON_PEER_PLANT": plant,
        }


def peer_tests(version: str = VLLM_VERSION) -> PeerTests:
    """vLLM and its tests, fetched if need be; where they cannot be fetched, the caller is skipped."""
    options = ready(version)
    try:
        tests = ensure_peer_tests(options.environment, version, print)
        packages = ensure_packages(options.environment, print, f"pytest=={pytest.__version__}")
    except LocalError as error:
        pytest.skip(f"NONE OF VLLM'S OWN TESTS IS RUN, because they cannot be fetched here: {error}")
    return PeerTests(tests, packages, options)


def _names(body: list[ast.stmt], inside: str = "") -> list[str]:
    names = []
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names += _names(node.body, f"{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            names.append(inside + node.name)
    return names


def _name(case: ElementTree.Element) -> str:
    module, _, inside = case.get("classname", "").removeprefix(_PACKAGE).partition(".")
    return "::".join(part for part in (f"{module}.py", inside, case.get("name", "")) if part)


def _case(case: ElementTree.Element) -> Case:
    counted = {each.get("name", ""): int(each.get("value", "0")) for each in case.iter("property")}
    problems = [
        f"{each.tag}: {each.get('message')}\n{each.text}" for each in case if each.tag in ("failure", "error", "skipped")
    ]
    return Case("\n".join(problems), *(counted.get(f"kvbaton_{name}", 0) for name in ("made", "calls", "named")))

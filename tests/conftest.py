"""For every test: helpers in this directory can be imported, properties may be slow, and large suites can be sampled.

`--sample` keeps, of the cases of each test that is marked `sampled(count)`, that many; with `sampled(count, by="name")`, that
many for each value of the parameter `name`; with `sampled(count, group="text")`, that many of all tests of that group. Which
ones depends on a seed alone: the commit, unless one is given. So one commit always runs the same cases, the next one others,
and `--sample=SEED` repeats a run.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A landing is judged by its own change: it tries the same examples each time. Every other run tries new ones.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ)
settings.load_profile("busy")

_COMMIT = "HEAD"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", nargs="?", const=_COMMIT, metavar="SEED", help="only a sample of the tests marked `sampled`")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = _seed(config)
    if seed is not None:
        terminalreporter.line(f"a sample of the cases; the same again: --sample={seed}")


# After `-k` and `-m`: a sample is one of what they leave.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = _seed(config)
    if seed is None:
        return
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and isinstance(item, pytest.Function):
            group = marker.kwargs.get("group") or item.nodeid.partition("[")[0]
            if by := marker.kwargs.get("by"):
                group += f" {item.callspec.params[by]}"
            cases.setdefault((group, marker.args[0]), []).append(item)
    left_out: set[pytest.Item] = set()
    for (group, count), found in cases.items():
        left_out |= {*found} - {*random.Random(f"{seed} {group}").sample(found, min(count, len(found)))}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _seed(config: pytest.Config) -> str | None:
    given: str | None = config.getoption("--sample")
    return _commit() if given == _COMMIT else given


def _commit() -> str:
    """The commit that is checked out, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


@pytest.fixture(scope="session", autouse=True)
def noted_commit(request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]) -> None:
    """The JUnit file, where there is one, names the commit that was tested."""
    if request.config.getoption("--junitxml"):
        record_testsuite_property("commit", _commit())

"""`pytest --sample`: how many cases of a marked test it keeps, and what decides which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(12))
def test_sampled(case): ...

@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", range(2))
def test_with_fewer_cases_than_the_sample(case): ...

@pytest.mark.sampled(1, by="name")
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_one_for_each_name(name, mode): ...

@pytest.mark.sampled(2, group="both")
@pytest.mark.parametrize("case", range(3))
def test_one_of_a_group(case): ...

@pytest.mark.sampled(2, group="both")
@pytest.mark.parametrize("case", range(3))
def test_another_of_the_group(case): ...

@pytest.mark.parametrize("case", range(4))
def test_in_full(case): ...
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def collected(directory: Path, *options: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "test_it.py", *options]
    lines = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        test, _, case = line.partition("[")
        if case:
            found.setdefault(test.partition("::")[2], []).append(case)
    return found


def counts(found: dict[str, list[str]]) -> list[int]:
    return [len(found[name]) for name in ("test_sampled", "test_with_fewer_cases_than_the_sample", "test_in_full")]


def test_without_the_option_every_case_is_run(suite: Path) -> None:
    assert counts(collected(suite)) == [12, 2, 4]


def test_a_seed_decides_which_cases_are_run(suite: Path) -> None:
    samples = [collected(suite, f"--sample={seed}") for seed in ("a", "a", "b")]
    assert [counts(sample) for sample in samples] == [[3, 2, 4]] * 3
    assert samples[0] == samples[1] != samples[2]
    for sample in samples:
        assert sorted(case.partition("-")[0] for case in sample["test_one_for_each_name"]) == ["one", "three", "two"]
        assert len(sample.get("test_one_of_a_group", []) + sample.get("test_another_of_the_group", [])) == 2


def test_without_a_seed_it_is_the_commit(suite: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    # Fixed, so that every run makes the same commits, and so the same samples.
    dates = {f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    samples = []
    for number in range(3):
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "--allow-empty", "-m", f"commit {number}"]):
            subprocess.run([*git, *command], cwd=suite, env={**os.environ, **dates}, check=True)
        samples.append(collected(suite, "--sample")["test_sampled"])
    assert len({*map(tuple, samples)}) > 1
    assert collected(suite, "--sample")["test_sampled"] == samples[-1]

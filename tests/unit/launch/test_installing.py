"""Work that is done once per machine: one at a time, with a log, an end and a name for each failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbaton.errors import LocalError
from kvbaton.launch.installing import alone, run_logged


def test_a_second_one_waits_until_its_limit_and_says_for_what(tmp_path: Path) -> None:
    with alone(tmp_path / "lock", "installing", 1.0), pytest.raises(LocalError, match=r"been installing for 0 s .*lock"):  # noqa: SIM117
        with alone(tmp_path / "lock", "installing", 0.0):
            pytest.fail("two are alone")


def test_the_lock_is_free_afterwards_also_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), alone(tmp_path / "lock", "installing", 0.0):
        raise ZeroDivisionError
    with alone(tmp_path / "lock", "installing", 0.0):
        pass


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_command_says_is_kept(tmp_path: Path) -> None:
    for word in ("one", "two"):
        run_logged(python(f"print('{word}')"), tmp_path / "log", "saying", 60.0)
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("command", "limit_s", "text"),
    [
        (python("print('no such package'); raise SystemExit(3)"), 60.0, "fetching failed; .*no such package"),
        (python("input(); import time; time.sleep(600)"), 60.0, "EOFError"),
        (python("import time; time.sleep(600)"), 0.05, "fetching has not ended after 0.05 s"),
        (["/nothing/here"], 60.0, "fetching failed: .*No such file"),
    ],
)
def test_a_failure_says_what_and_where(tmp_path: Path, command: list[str], limit_s: float, text: str) -> None:
    with pytest.raises(LocalError, match=f"(?s){text}"):
        run_logged(command, tmp_path / "log", "fetching", limit_s)

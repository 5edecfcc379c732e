"""What is kept of a server's output as its first error: as vLLM, SGLang and Python print it, bounded whatever they print."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.launch.first_error import FirstError

_HEADER = "Traceback (most recent call last):"


def first_error(*lines: str) -> tuple[str, ...]:
    error = FirstError()
    for line in lines:
        error.take(line)
    return error.lines()


def test_of_several_processes_that_of_the_one_which_failed_first() -> None:
    """As vLLM prints it: the worker's record, a line of the engine in the middle of it, then what follows from it."""
    worker, engine = (
        "(Worker pid=7) ERROR 11-19 15:21:05 [executor.py:1063] ",
        "(EngineCore pid=6) ERROR 11-19 15:21:06 [core.py:1510] ",
    )
    found = first_error(
        "(Worker pid=7) INFO 11-19 15:21:04 [x.py:1] Loading weights took 3.63 seconds",
        worker + "WorkerProc hit an exception.",
        worker + _HEADER,
        worker + '  File "executor.py", line 1055, in worker_busy_loop',
        "(EngineCore pid=6) INFO 11-19 15:21:05 [y.py:2] Waiting for workers.",
        worker + "    output = func(*args)",
        worker + "ValueError: shared KV backing too small",
        worker + _HEADER,
        worker + '  File "executor.py", line 1055, in worker_busy_loop',
        engine + "EngineCore failed to start.",
        engine + _HEADER,
        engine + '  File "core.py", line 3, in run',
        engine + "RuntimeError: Worker failed",
        _HEADER,
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )
    assert found == (
        worker + "WorkerProc hit an exception.",
        worker + _HEADER,
        '  File "executor.py", line 1055, in worker_busy_loop',
        "    output = func(*args)",
        "ValueError: shared KV backing too small",
    )


def test_a_record_with_a_head_on_its_first_line_only() -> None:
    """As SGLang prints it."""
    head = "[2026-11-19 15:00:00 TP0] Scheduler hit an exception: "
    found = first_error(head + _HEADER, '  File "scheduler.py", line 3, in run', "    raise", "OSError: no room", "", "Killed")
    assert found == (head + _HEADER, '  File "scheduler.py", line 3, in run', "    raise", "OSError: no room")


@pytest.mark.parametrize(
    "link", ["During handling of the above exception, another", "The above exception was the direct cause"]
)
def test_of_a_chain_what_was_raised_first(link: str) -> None:
    chain = ["", f"{link} …:", "", _HEADER, '  File "b.py", line 2', "RuntimeError: cannot start"]
    found = first_error(_HEADER, '  File "a.py", line 1', "KeyError: 'host_ip'", *chain)
    assert found == (_HEADER, '  File "a.py", line 1', "KeyError: 'host_ip'")


def test_what_python_prints_itself() -> None:
    code = "def f(n):\n    if n: f(n - 1)\n    raise ValueError('1 error\\n  a: too long\\n  b: missing')\nprint('well')\nf(3)"
    run = subprocess.run([sys.executable, "-c", code], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, check=False)
    found = first_error(*run.stdout.splitlines())
    assert found[0] == _HEADER
    assert found[-3:] == ("ValueError: 1 error", "  a: too long", "  b: missing")
    assert len(found) == 1 + 5 + 3


def test_without_a_traceback_the_first_lines_of_level_error() -> None:
    found = first_error(
        "INFO fine", "ERROR: [Errno 98] address already in use", "2026 CRITICAL no memory", "an error, in words"
    )
    assert found == ("ERROR: [Errno 98] address already in use", "2026 CRITICAL no memory")


def test_nothing_where_no_error_was_printed() -> None:
    assert first_error("INFO Terrors and errors", "ready") == ()


def test_of_a_long_traceback_the_frames_next_to_the_cause() -> None:
    frames = [f'  File "f.py", line {n}' for n in range(200)]
    found = first_error(_HEADER, *frames, "RecursionError: too deep")
    assert found[:2] == (_HEADER, "  ... 188 lines ...")
    assert found[2:] == (*frames[-12:], "RecursionError: too deep")


@given(st.lists(st.sampled_from([_HEADER, "x " + _HEADER, "  File", "", "x   File", "ERROR", "E" * 10_000, "x E: m", "E: m"])))
def test_it_is_short_whatever_is_printed(lines: list[str]) -> None:
    found = first_error(*lines * 20)
    assert len(found) <= 3 + 1 + 1 + 12 + 8
    assert all(len(line) <= 400 for line in found)

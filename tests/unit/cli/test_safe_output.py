"""Standard output that is full, closed or not read: what prints goes on, and the loss is reported once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import pytest
from rich.console import Console

from kvbaton.cli import output as output_module
from kvbaton.cli.output import SafeOutput
from watching import wait_until


class Pipe:
    """A pipe, and all that was read from it so far."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()

    def read(self) -> str:
        return os.read(self.read_end, 1 << 20).decode()

    def close(self) -> None:
        for descriptor in (self.read_end, self.write_end):
            os.close(descriptor)


@pytest.fixture
def out() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.fixture
def report() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_a_console_prints_through_it_in_order(out: Pipe) -> None:
    with SafeOutput(out.write_end) as output:
        console = Console(file=cast("IO[str]", output), width=80)
        for number in range(100):
            console.print(f"line {number} ✓", highlight=False)
        assert not console.is_terminal
    assert out.read() == "".join(f"line {number} ✓\n" for number in range(100))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_reported_once_at_the_end(report: Pipe) -> None:
    with open("/dev/full", "wb") as full, SafeOutput(full.fileno(), report.write_end) as output:  # noqa: PTH123
        for _ in range(3):
            output.write("a line\n")
    assert report.read() == "kvbaton: lines of output lost: 3 (No space left on device)\n"


def test_a_reader_that_is_gone_is_reported_once_at_the_end(report: Pipe) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with SafeOutput(write_end, report.write_end) as output:
        output.write("a line\n")
    os.close(write_end)
    assert report.read() == "kvbaton: lines of output lost: 1 (Broken pipe)\n"


def test_the_loss_is_reported_where_it_was_as_soon_as_writing_works_again(
    out: Pipe, report: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()
    tried: list[int] = []
    write = os.write

    def write_or_fail(descriptor: int, content: bytes) -> int:
        if failing.is_set() and descriptor == out.write_end:
            tried.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", write_or_fail)
    with SafeOutput(out.write_end, report.write_end) as output:
        output.write("before\n")
        assert out.read() == "before\n"
        failing.set()
        for count in (1, 2):
            output.write("lost\n")
            wait_until(lambda count=count: len(tried) == count, "it was tried")  # type: ignore[misc]
        failing.clear()
        output.write("after\n")
        output.write("and on\n")
    assert out.read() == "\nkvbaton: lines of output lost here: 2 (No space left on device)\nafter\nand on\n"
    os.write(report.write_end, b"nothing")
    assert report.read() == "nothing"


def test_an_output_that_is_not_read_holds_up_no_thread_that_prints(
    out: Pipe, report: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "_FLUSH_S", 0.1)
    with SafeOutput(out.write_end, report.write_end) as output:
        for _ in range(5000):
            output.write("x" * 100 + "\n")
    assert "(standard output takes no more, or is too slow)" in report.read()
    drained = threading.Thread(target=lambda: [None for _ in iter(out.read, "")], daemon=True)
    drained.start()
    output._writer.join(10)
    assert not output._writer.is_alive()
    os.close(out.write_end)
    drained.join(10)
    out.write_end = os.open(os.devnull, os.O_WRONLY)


@pytest.mark.parametrize(
    ("redirection", "reported"),
    [("> /dev/full", "No space left on device"), (">&-", "standard output is closed"), ("> /dev/full 2>&1", "")],
)
def test_the_exit_code_stays_that_of_the_command(redirection: str, reported: str) -> None:
    code = textwrap.dedent(
        """
        import sys
        from rich.console import Console
        from kvbaton.cli.output import SafeOutput
        with SafeOutput() as output:
            Console(file=output).print("a line")
        sys.exit(0)
        """
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert reported in ended.stderr
    assert "Traceback" not in ended.stderr

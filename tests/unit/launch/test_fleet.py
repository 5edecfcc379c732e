"""Fleets of tiny processes: healthy, dying, killed, stubborn; and that nothing is ever left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.errors import LocalError
from kvbaton.launch import fleet as fleet_module
from kvbaton.launch.fleet import Death, Fleet, FleetPart, core_share
from kvbaton.launch.ports import PortPicker
from watching import descendants, is_running, wait_until

SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2])); self.end_headers()
    def log_message(self, *_):
        pass
print("ready", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
NOBODY = "http://127.0.0.1:9/health"


def _part(name: str, code: str, *arguments: str, health_url: str = NOBODY) -> FleetPart:
    return FleetPart(name, [sys.executable, "-c", code, *arguments], health_url)


def _server(name: str, status: int = 200) -> FleetPart:
    port = PortPicker().pick()
    return _part(name, SERVE, str(port), str(status), health_url=f"http://127.0.0.1:{port}/health")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def test_a_proxy_for_the_world_outside_is_not_asked_about_parts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr("urllib.request._opener", None)
    fleet.start(_server("one"))
    fleet.wait_healthy(10)


def test_parts_that_answer_are_healthy_and_none_is_dead(fleet: Fleet) -> None:
    fleet.start(_server("one"))
    fleet.start(_server("two"))
    healthy: list[str] = []
    fleet.wait_healthy(30, healthy.append)
    assert sorted(healthy) == ["one", "two"]
    assert fleet.death() is None
    assert is_running(fleet.pid("one"))


def test_a_part_that_dies_early_is_told_with_its_last_lines(fleet: Fleet) -> None:
    fleet.start(_server("well"))
    fleet.start(_part("bad", "import sys; print('cannot open the model'); print('next line'); sys.exit(3)"))
    with pytest.raises(LocalError) as caught:
        fleet.wait_healthy(30)
    assert "bad (pid " in str(caught.value)
    assert "ended with exit code 3" in str(caught.value)
    assert "cannot open the model\n  next line" in str(caught.value)


def test_the_last_lines_are_few(fleet: Fleet) -> None:
    fleet.start(_part("chatty", "print('\\n'.join(f'line {i}' for i in range(5000))); raise SystemExit(1)"))
    with pytest.raises(LocalError) as caught:
        fleet.wait_healthy(30)
    assert "line 4999" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 50


# A worker fails, and the server that waits for it prints more than is kept of last lines.
_HELPER_FAILS = """
print("(Worker pid=7) ERROR 11-19 15:21:05 [x.py:1] Traceback (most recent call last):")
print("(Worker pid=7) ERROR 11-19 15:21:05 [x.py:1]   File 'x.py', line 1, in register")
print("(Worker pid=7) ERROR 11-19 15:21:05 [x.py:1] ValueError: shared KV backing too small")
print("\\n".join(f"frame {n}" for n in range(1000)))
print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
"""


def test_a_part_that_dies_early_is_explained_by_its_first_error_however_much_follows(fleet: Fleet) -> None:
    fleet.start(_part("bad", _HELPER_FAILS + "raise SystemExit(1)"))
    with pytest.raises(LocalError) as caught:
        fleet.wait_healthy(30)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("ended with exit code 1; its first error:")
    assert lines[3] == "  ValueError: shared KV backing too small"
    assert lines[-1] == "  RuntimeError: Engine core initialization failed. See root cause above."
    assert len(lines) < 20


def test_a_part_that_prints_an_error_and_never_answers_is_explained_by_it(fleet: Fleet) -> None:
    fleet.start(_part("stuck", _HELPER_FAILS + SLEEP))
    log = fleet.log_directory / "stuck.log"
    wait_until(lambda: log.exists() and "RuntimeError" in log.read_text(), "its lines are in the log")
    with pytest.raises(LocalError) as caught:
        fleet.wait_healthy(0.5)
    assert "\n  stuck: ValueError: shared KV backing too small\n" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 20


def test_a_part_that_never_answers_is_named_with_its_last_lines_because_its_logs_go_with_it(fleet: Fleet) -> None:
    fleet.start(_server("ill", status=503))
    log = fleet.log_directory / "ill.log"
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "its line is in the log")
    with pytest.raises(LocalError, match=r"not healthy after 0\.5 s: ill; their last lines:\n  ill: ready$"):
        fleet.wait_healthy(0.5)


def test_a_part_that_never_answers_and_says_nothing_is_named(fleet: Fleet) -> None:
    fleet.start(_part("silent", SLEEP))
    with pytest.raises(LocalError, match=r"not healthy after 0\.5 s: silent; their last lines: none$"):
        fleet.wait_healthy(0.5)


def test_a_part_that_answers_nonsense_is_not_healthy(fleet: Fleet) -> None:
    port = PortPicker().pick()
    code = (
        "import socket, sys\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nwhile 1: s.accept()[0].sendall(b'?\\n')"
    )
    fleet.start(_part("odd", code, str(port), health_url=f"http://127.0.0.1:{port}/"))
    with pytest.raises(LocalError, match="not healthy"):
        fleet.wait_healthy(1.0)


def test_a_part_that_is_killed_is_told_by_signal(fleet: Fleet) -> None:
    fleet.start(_part("victim", SLEEP))
    pid = fleet.pid("victim")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: fleet.death() is not None, "the death is seen")
    assert str(fleet.death()) == f"victim (pid {pid}) was killed by signal 9 (SIGKILL)"


def test_the_text_of_a_death() -> None:
    assert str(Death("decode-0", 7, 0, ())) == "decode-0 (pid 7) ended with exit code 0"
    assert str(Death("decode-0", 7, -11, ())) == "decode-0 (pid 7) was killed by signal 11 (SIGSEGV)"


def test_stop_leaves_no_process_and_no_log_directory() -> None:
    fleet = Fleet()
    fleet.start(_part("sleeper", SLEEP))
    fleet.start(_part("gone already", "pass"))
    pid = fleet.pid("sleeper")
    assert fleet.log_directory.is_dir()
    fleet.stop()
    assert not is_running(pid)
    assert not fleet.log_directory.exists()
    fleet.stop()


def test_leaving_with_an_error_stops_everything_too() -> None:
    def fail() -> None:
        with Fleet() as fleet:
            fleet.start(_part("sleeper", SLEEP))
            pids.append(fleet.pid("sleeper"))
            raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not is_running(pids[0])


def test_a_part_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_KILL_AFTER_S", 0.5)
    lines: list[str] = []
    fleet = Fleet(lambda _name, line: lines.append(line))
    fleet.start(_part("stubborn", STUBBORN))
    wait_until(lambda: "deaf" in lines, "it ignores SIGTERM")
    pid = fleet.pid("stubborn")
    fleet.stop()
    assert not is_running(pid)
    assert not fleet.log_directory.exists()


def test_what_a_part_leaves_behind_may_tidy_up_and_is_killed_if_it_stays(tmp_path: Path) -> None:
    """The helpers of a server see its end and remove what it shared; one that does not go is not waited for."""
    tidy = "import pathlib, sys; print('here', flush=True); sys.stdin.read(); pathlib.Path(sys.argv[1]).touch()"
    leader = (
        "import subprocess, sys\n"
        "tidy, path, stay = sys.argv[1:]\n"
        "children = [subprocess.Popen([sys.executable, '-c', tidy, path], stdin=subprocess.PIPE)]\n"
        "children.append(subprocess.Popen([sys.executable, '-c', stay]))\n"
        "children[0].wait()\n"
    )
    lines: list[str] = []
    with Fleet(lambda _, line: lines.append(line)) as fleet:
        fleet.start(_part("leader", leader, tidy, str(tmp_path / "tidied"), STUBBORN))
        wait_until(lambda: {"here", "deaf"} <= set(lines), "both helpers are there")
        children = descendants(fleet.pid("leader"))
        assert len(children) == 2
    assert (tmp_path / "tidied").exists()
    wait_until(lambda: not [pid for pid in children if is_running(pid)], "nobody is left")


def test_every_line_is_handed_on_and_kept_in_the_log() -> None:
    lines: list[tuple[str, str]] = []
    with Fleet(lambda name, line: lines.append((name, line))) as fleet:
        fleet.start(
            _part("talker", "import sys; print('out'); print('err', file=sys.stderr); sys.stdout.buffer.write(b'\\xff\\n')")
        )
        wait_until(lambda: len(lines) == 3, "three lines")
        log = (fleet.log_directory / "talker.log").read_text()
    assert {("talker", "out"), ("talker", "err"), ("talker", "\ufffd")} == set(lines)
    assert "out\n" in log


CHATTY = "import sys\nfor number in range(20000): print('line', number, 'x' * 50)\nprint('done', file=sys.stderr); sys.exit(7)"
"""Prints far more than a pipe holds: it ends only when its output is read to the end."""


def test_an_output_that_cannot_be_written_neither_ends_the_reader_nor_blocks_the_part() -> None:
    def fail(_name: str, _line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Fleet(fail) as fleet:
        fleet.start(_part("chatty", CHATTY))
        wait_until(lambda: fleet.death() is not None, "it has printed everything")
        death = fleet.death()
        log = (fleet.log_directory / "chatty.log").read_text()
    assert death is not None
    assert (death.returncode, death.last_lines[-1]) == (7, "done")
    assert "line 0 " in log
    assert "was not handed on: OSError: [Errno 28] No space left on device" in log


def test_a_log_that_cannot_be_written_neither_ends_the_reader_nor_blocks_the_part() -> None:
    lines: list[str] = []
    with Fleet(lambda _name, line: lines.append(line)) as fleet:
        (fleet.log_directory / "chatty.log").symlink_to("/dev/full")
        fleet.start(_part("chatty", CHATTY))
        wait_until(lambda: fleet.death() is not None, "it has printed everything")
        assert len(lines) == 20001
        assert fleet.death().last_lines[-1] == "done"  # type: ignore[union-attr]
    assert not fleet.log_directory.exists()


def test_a_log_states_what_is_missing_once_it_can_be_written_again() -> None:
    code = "import sys\nfor line in open(sys.argv[1]): print(line, end='', flush=True)"
    lines: list[str] = []
    with Fleet(lambda _name, line: lines.append(line)) as fleet:
        fifo, log = fleet.log_directory / "fifo", fleet.log_directory / "part.log"
        os.mkfifo(fifo)
        log.mkdir()
        fleet.start(_part("part", code, str(fifo)))
        with fifo.open("w") as pen:
            pen.write("one\ntwo\n")
            pen.flush()
            wait_until(lambda: lines == ["one", "two"], "two lines")
            log.rmdir()
            pen.write("three\nfour\n")
        wait_until(lambda: len(lines) == 4, "four lines")
        assert log.read_text() == "\nkvbaton: lines lost here: 2 (Is a directory)\nthree\nfour\n"


def test_a_part_that_prints_no_line_ends_is_read_in_pieces() -> None:
    lines: list[str] = []
    with Fleet(lambda _name, line: lines.append(line)) as fleet:
        fleet.start(_part("endless", "import sys; sys.stdout.write('x' * 100000)"))
        wait_until(lambda: sum(map(len, lines)) == 100000, "all of it")
    assert max(map(len, lines)) < 20000


def test_a_part_gets_its_environment() -> None:
    lines: list[str] = []
    code = "import os; print(os.environ['GREETING'], os.environ.get('PATH') is not None)"
    with Fleet(lambda _name, line: lines.append(line)) as fleet:
        fleet.start(FleetPart("env", [sys.executable, "-c", code], NOBODY, {"GREETING": "hello"}))
        wait_until(lambda: bool(lines), "a line")
    assert lines == ["hello True"]


def test_parts_die_when_this_process_is_killed() -> None:
    parent_code = textwrap.dedent(
        f"""
        import sys, time
        from kvbaton.launch.fleet import Fleet, FleetPart
        fleet = Fleet()
        fleet.start(FleetPart("child", [sys.executable, "-c", {SLEEP!r}], {NOBODY!r}))
        print(fleet.pid("child"), fleet.log_directory, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, log_directory = parent.stdout.readline().split()
    assert is_running(int(pid))
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    wait_until(lambda: not is_running(int(pid)), "the child is gone")
    subprocess.run(["rm", "-r", log_directory], check=True)


@pytest.mark.parametrize(("engines", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (3, 2, 1), (0, 4, 4)])
def test_cores_are_shared_out(engines: int, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    share = core_share(engines)
    assert set(share.values()) == {str(threads)}
    assert "OPENBLAS_NUM_THREADS" in share

"""Restarts of real, tiny processes: on the same port, with the same environment, up to the limit, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbaton
from kvbaton.launch.fleet import Death, Fleet, FleetPart
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.restarts import RestartPolicy, RestartSchedule
from kvbaton.launch.supervisor import Supervisor
from watching import is_running, wait_until

SERVE = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["KEY"].encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
helper = subprocess.Popen(["sleep", "600"], pass_fds=[server.fileno()])
print("helper", helper.pid, flush=True)
server.serve_forever()
"""
ONCE = "import pathlib, sys; path = pathlib.Path(sys.argv[2]); path.exists() and sys.exit('no second time'); path.touch()\n"


class Stage:
    """A fleet, its supervisor with a quick policy, and what both have reported."""

    def __init__(self, fleet: Fleet, lines: list[str]) -> None:
        self.fleet = fleet
        self.lines = lines
        self.reports: list[str] = []

    def start(self, name: str, code: str, *arguments: str) -> None:
        port = str(PortPicker().pick())
        command = [sys.executable, "-c", code, port, *arguments]
        self.fleet.start(FleetPart(name, command, f"http://127.0.0.1:{port}/", {"KEY": "a key"}))

    def supervisor(self, limit: int, healthy_within_s: float = 20.0) -> Supervisor:
        policy = RestartPolicy(limit, first_wait_s=0.05, longest_wait_s=0.2)
        return Supervisor(self.fleet, RestartSchedule(policy), healthy_within_s, self.reports.append)

    def kill_and_wait_for(self, supervisor: Supervisor, name: str, report: str) -> Death | None:
        """Kill a part, and let the supervisor work until it reports that, or gives up."""
        os.kill(self.fleet.pid(name), signal.SIGKILL)
        before = len(self.reports)
        ended: list[Death] = []

        def is_done() -> bool:
            if (death := supervisor.step(time.monotonic())) is not None:
                ended.append(death)
            return bool(ended) or any(report in line for line in self.reports[before:])

        wait_until(is_done, report)
        return ended[0] if ended else None


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("kvbaton.launch.fleet._TIDY_S", 0.2)
    lines: list[str] = []
    with Fleet(lambda name, line: lines.append(f"{name} {line}")) as fleet:
        yield Stage(fleet, lines)


def test_a_killed_part_is_restarted_on_its_port_although_a_helper_still_held_it(stage: Stage) -> None:
    stage.start("one", SERVE)
    stage.start("two", SERVE)
    stage.fleet.wait_healthy(20)
    supervisor = stage.supervisor(limit=2)
    killed, other = stage.fleet.pid("one"), stage.fleet.pid("two")
    assert stage.kill_and_wait_for(supervisor, "one", "is healthy again") is None
    assert stage.fleet.pid("one") != killed
    assert stage.fleet.pid("two") == other
    assert stage.fleet.death() is None
    assert stage.reports == [
        f"one (pid {killed}) was killed by signal 9 (SIGKILL); restarting it in 0.05 s (restart 1 of 2 within 10 minutes)",
        f"one (pid {stage.fleet.pid('one')}) is healthy again",
    ]
    wait_until(lambda: len(stage.lines) == 3, "every helper is named")
    helpers = [int(line.split()[-1]) for line in stage.lines]
    assert [is_running(helper) for helper in helpers].count(True) == 2
    stage.fleet.stop()
    wait_until(lambda: not any(is_running(helper) for helper in helpers), "no helper is left")


def test_one_death_more_than_the_limit_ends_it_with_the_last_output(stage: Stage) -> None:
    stage.start("part", SERVE)
    stage.fleet.wait_healthy(20)
    supervisor = stage.supervisor(limit=2)
    for _ in range(2):
        assert stage.kill_and_wait_for(supervisor, "part", "is healthy again") is None
    death = stage.kill_and_wait_for(supervisor, "part", "is healthy again")
    assert death is not None
    assert (death.name, death.returncode) == ("part", -signal.SIGKILL)
    assert "helper" in death.last_lines[-1]


def test_without_restarts_the_first_death_ends_it(stage: Stage) -> None:
    stage.start("part", SERVE)
    stage.fleet.wait_healthy(20)
    assert stage.kill_and_wait_for(stage.supervisor(limit=0), "part", "never") is not None
    assert stage.reports == []


def test_a_part_that_dies_again_before_it_is_healthy_counts_as_one_more_death(stage: Stage, tmp_path: Path) -> None:
    stage.start("part", ONCE + SERVE, str(tmp_path / "started"))
    stage.fleet.wait_healthy(20)
    death = stage.kill_and_wait_for(stage.supervisor(limit=3), "part", "is healthy again")
    assert death is not None
    assert (death.returncode, death.last_lines) == (1, ("no second time",))
    assert len(stage.reports) == 3


def test_a_part_that_does_not_become_healthy_is_ended_and_counts_as_one_more_death(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.start("part", SERVE)
    stage.fleet.wait_healthy(20)
    monkeypatch.setattr(stage.fleet, "is_healthy", lambda _name: False)
    death = stage.kill_and_wait_for(stage.supervisor(limit=1, healthy_within_s=0.1), "part", "is healthy again")
    assert death is not None
    assert stage.reports[1] == "part is not healthy 0.1 s after its restart; ending it"


def test_a_restart_that_the_system_refuses_is_tried_again_and_counts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    stage.start("part", SERVE)
    stage.fleet.wait_healthy(20)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert stage.kill_and_wait_for(stage.supervisor(limit=2), "part", "is healthy again") is not None
    refused = [line for line in stage.reports if "could not be started" in line]
    assert refused == ["part could not be started: [Errno 11] Resource temporarily unavailable"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_back_off_at_once(number: signal.Signals) -> None:
    code = textwrap.dedent(
        """
        import os, signal, sys, time
        from kvbaton.cli.running import end_like_ctrl_c
        from kvbaton.launch.fleet import Fleet, FleetPart
        from kvbaton.launch.restarts import RestartPolicy, RestartSchedule
        from kvbaton.launch.supervisor import Supervisor
        end_like_ctrl_c()
        with Fleet() as fleet:
            fleet.start(FleetPart("part", ["sleep", "600"], "http://127.0.0.1:9/"))
            os.kill(fleet.pid("part"), signal.SIGKILL)
            try:
                schedule = RestartSchedule(RestartPolicy(5, first_wait_s=600.0, longest_wait_s=600.0))
                Supervisor(fleet, schedule, 1.0, lambda line: print(line, flush=True)).watch()
            except KeyboardInterrupt:
                print("ended", flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "restarting it in 600 s" in process.stdout.readline()
    process.send_signal(number)
    assert process.stdout.read() == "ended\n"
    assert process.wait(10) == 0
    process.stdout.close()


def test_only_up_restarts_parts() -> None:
    """In `verify` and `bench` a death is an error: a restart in the middle would hide it."""
    source = Path(kvbaton.__file__).parent
    users = [path for path in source.rglob("*.py") if "kvbaton.launch.supervisor" in path.read_text()]
    assert [path.relative_to(source).as_posix() for path in users] == ["cli/up.py"]

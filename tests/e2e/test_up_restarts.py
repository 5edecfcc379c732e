"""`kvbaton up` restarts what was killed: on the same ports, up to a limit, and nothing is left behind; its output may fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from system import Client, Up

from kvbaton.launch.local import kvbaton_command
from kvbaton.launch.ports import PortPicker, check_port_free
from watching import command_line, descendants, is_running, shared_files, wait_until

pytestmark = pytest.mark.e2e

TINY = ("--model", "tiny")


def _addresses(up: Up) -> set[tuple[str, str, str]]:
    return {(each["type"], each["http_address"], each["zmq_address"]) for each in up.client.get("/instances").document["live"]}


def _kill(up: Up, part: str) -> int:
    """Kill a part as the kernel would; its process id. The router is the one that serves on the port of the clients."""
    mark = f" router --host 127.0.0.1 --port {up.port} " if part == "router" else f"--role {part} "
    pid = _pid(up.process.pid, mark)
    os.kill(pid, signal.SIGKILL)
    return pid


def _pid(ancestor: int, mark: str) -> int:
    """The one descendant that has `mark` in its command line."""
    (pid,) = [pid for pid in descendants(ancestor) if mark in command_line(pid)]
    return pid


def _wait_printed(up: Up, pattern: str) -> None:
    wait_until(lambda: re.search(pattern, up.output) is not None, pattern, 60)


def _is_served(client: Client) -> bool:
    """Whether a request is handed off: after a restart the router has to learn of the new process first."""
    try:
        reply = client.complete()
    except OSError:
        return False
    return reply.status == 200 and reply.document["kvbaton"]["handed_off"] is True


def _check_nothing_left(up: Up, seen: set[int], shared: set[Path], temporary: Path) -> None:
    wait_until(lambda: not [pid for pid in seen if is_running(pid)], "no process is left", 60)
    check_port_free("127.0.0.1", up.port, "--port")
    wait_until(lambda: not [each for each in shared if each.exists()], "no shared memory is left", 60)
    assert list(temporary.iterdir()) == []
    assert "Traceback" not in up.output


def test_killed_parts_are_restarted_on_their_ports_and_a_signal_ends_a_back_off(tmp_path: Path) -> None:
    with Up(*TINY, temporary=tmp_path) as up:
        assert up.client.complete().status == 200
        addresses, seen = _addresses(up), up.children()
        shared = shared_files(seen)
        for part, name in (("decode", "decode-0"), ("router", "router")):
            pid = _kill(up, part)
            _wait_printed(
                up, rf"{name} \(pid {pid}\) was killed by signal 9 \(SIGKILL\); restarting it in 1 s \(restart 1 of 5 "
            )
            _wait_printed(up, rf"{name} \(pid \d+\) is healthy again")
            wait_until(lambda: _is_served(up.client), "a request is served", 30)
            assert _addresses(up) == addresses
            seen |= up.children()
            shared |= shared_files(seen)
        _kill(up, "decode")
        _wait_printed(up, r"restarting it in 2 s \(restart 2 of 5 within 10 minutes\)")
        up.process.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
        assert up.output.count("is healthy again") == 2
    _check_nothing_left(up, seen, shared, tmp_path)


def test_one_kill_more_than_the_limit_ends_everything_with_the_reason(tmp_path: Path) -> None:
    with Up(*TINY, "--restarts", "1", temporary=tmp_path) as up:
        seen = up.children()
        shared = shared_files(seen)
        _kill(up, "decode")
        _wait_printed(up, r"decode-0 \(pid \d+\) is healthy again")
        seen |= up.children()
        shared |= shared_files(seen)
        pid = _kill(up, "decode")
        assert up.wait(60) == 1
    assert (
        f"decode-0 (pid {pid}) was killed by signal 9 (SIGKILL); restarts within 10 minutes: 1 of 1; stopping the others"
        in up.output
    )
    assert "--restarts N allows more" in up.output
    _check_nothing_left(up, seen, shared, tmp_path)


def test_an_output_that_fails_stops_neither_the_command_nor_a_restart(tmp_path: Path) -> None:
    port = PortPicker().pick()
    command = kvbaton_command("up", "--port", str(port), "--verbose", *TINY)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    client = Client(port)
    try:
        assert process.stdout is not None
        assert any("Ctrl-C" in line for line in process.stdout)
        process.stdout.close()
        pid = _pid(process.pid, "--role decode ")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "it is gone")
        wait_until(lambda: _is_served(client), "a request is served again", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        reported = process.stderr.read()
    finally:
        process.kill()
        process.wait(10)
    assert reported.count("kvbaton: lines of output lost: ") == 1
    assert "(Broken pipe)" in reported
    assert "Traceback" not in reported

"""The announcer's own process: it beats while the instance's interpreter stands still, and ends with the instance."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_announcing import listening, live, registration, wait_until

from kvbaton.discovery import announcer as announcer_module
from kvbaton.discovery.announcer import Announcer, ThreadAnnouncer
from kvbaton.discovery.registry import Registry
from watching import command_line, descendants, is_running


def hold_the_lock(seconds: float) -> None:
    """Nothing else of this interpreter runs in that time: a call into C that keeps the lock."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


_ROUTER = """
import sys, time, threading
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.registry import Registry
registry = Registry(expire_after_s=1.0)
with Listener(registry, "127.0.0.1", int(sys.argv[1])):
    was = None
    while True:
        now = [i.http_address for i in registry.live(time.monotonic())]
        if now != was:
            print("live" if now else "nobody", flush=True)
            was = now
        time.sleep(0.02)
"""


class OtherRouter:
    """A registry in a process of its own, which prints when somebody comes or goes."""

    def __init__(self, port: int) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen([sys.executable, "-c", _ROUTER, str(port)], stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.strip() for line in self.process.stdout)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.mark.parametrize("kind", [Announcer, ThreadAnnouncer])
def test_a_stalled_interpreter_keeps_its_registration(kind: type[Announcer] | type[ThreadAnnouncer]) -> None:
    """The control: heartbeats from a thread of the same interpreter are lost."""
    with listening(Registry()) as (_, port):
        pass
    router = OtherRouter(port)
    try:
        with kind(registration(), [f"127.0.0.1:{port}"], heartbeat_s=0.2):
            wait_until(lambda: router.lines[-1:] == ["live"])
            before = len(router.lines)
            hold_the_lock(3.0)
            time.sleep(0.3)
            after = router.lines[before:]
            assert after == [] if kind is Announcer else "nobody" in after
    finally:
        router.end()


def test_an_instance_that_is_killed_says_goodbye_all_the_same() -> None:
    script = (
        "import sys, time\nsys.path[:0] = ['tests/unit/discovery']\n"
        "from kvbaton.discovery.announcer import Announcer\n"
        "from kvbaton.discovery.messages import InstanceType, Registration, TransferMode\n"
        "port = sys.argv[1]\n"
        "me = Registration(type=InstanceType.PREFILL, http_address='127.0.0.1:8101', transfer_mode=TransferMode.READ,\n"
        "    zmq_address='host:127.0.0.1,handshake:8101,notify:8101', incarnation='one')\n"
        "Announcer(me, [f'127.0.0.1:{port}']).start()\ntime.sleep(600)\n"
    )
    registry = Registry(expire_after_s=600.0)
    with listening(registry) as (_, port):
        process = subprocess.Popen([sys.executable, "-c", script, str(port)])
        wait_until(lambda: live(registry) == ["127.0.0.1:8101"])
        children = descendants(process.pid)
        assert len(children) == 1
        process.kill()
        process.wait(10)
        wait_until(lambda: live(registry) == [])
        wait_until(lambda: not any(is_running(child) for child in children))


def test_a_beating_process_that_is_killed_is_replaced() -> None:
    registry = Registry(expire_after_s=600.0)
    with listening(registry) as (_, port), Announcer(registration(), [f"127.0.0.1:{port}"]) as announcer:
        wait_until(lambda: live(registry) == ["127.0.0.1:8101"])
        (child,) = [pid for pid in descendants(os.getpid()) if "beating" in command_line(pid)]
        os.kill(child, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: registry.live(time.monotonic())[0].last_seen > killed)
        announcer.stop()
        wait_until(lambda: live(registry) == [])
    assert not [pid for pid in descendants(os.getpid()) if "beating" in command_line(pid)]


@pytest.mark.parametrize("is_used", [False, True])
def test_who_is_never_asked_is_told_what_may_be_wrong(
    is_used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcer_module, "_ADVICE_S", 0.3)
    monkeypatch.setattr(announcer_module, "_SIGN_S", 0.1)
    asked = threading.Event()

    def used() -> bool:
        asked.set()
        return is_used

    registry = Registry()
    with listening(registry) as (_, port), Announcer(registration(), [f"127.0.0.1:{port}"], is_used=used):
        assert asked.wait(20)
        time.sleep(0.3)
    advice = [record.getMessage() for record in caplog.records if "no request has come" in record.getMessage()]
    assert len(advice) == (0 if is_used else 1)
    assert is_used or ("READ" in advice[0] and "--mode push" in advice[0])


def test_a_silent_instance_is_taken_off_and_put_back_at_its_next_sign() -> None:
    registry = Registry(expire_after_s=600.0)
    with listening(registry) as (_, port):
        voice = ThreadAnnouncer(registration(), [f"127.0.0.1:{port}"])
        orders = {
            "name": "x",
            "routers": [f"127.0.0.1:{port}"],
            "hello": voice._hello.hex(),
            "goodbye": voice._goodbye.hex(),
            "heartbeat_s": 0.1,
            "stall_s": 0.5,
        }
        command = [sys.executable, "-m", "kvbaton.discovery.beating"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        wait_until(lambda: live(registry) == ["127.0.0.1:8101"])
        wait_until(lambda: live(registry) == [])
        process.stdin.write(b".")
        wait_until(lambda: live(registry) == ["127.0.0.1:8101"])
        process.stdin.close()
        assert process.wait(20) == 0
        wait_until(lambda: live(registry) == [])

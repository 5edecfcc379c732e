"""An announcer's own process: heartbeats that survive a stalled interpreter, a goodbye however the instance ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbaton.discovery.announcer import Announcer, ThreadAnnouncer
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import Cause, InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Registry
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker
from watching import is_running, wait_until

PROGRAM = Path(__file__).with_name("announcing_process.py")
LONG_S = 600.0
REGISTRATION = Registration(
    type=InstanceType.PREFILL,
    http_address="127.0.0.1:8101",
    zmq_address="host:127.0.0.1,handshake:6301,notify:6301",
    transfer_mode=TransferMode.READ,
    incarnation="one",
)


class Receiver:
    """A registry that listens."""

    def __init__(self, expire_after_s: float = LONG_S, transfer_mode: TransferMode | None = None) -> None:
        self.registry = Registry(transfer_mode, expire_after_s)
        self.port = PortPicker().pick()
        self.listener = Listener(self.registry, "127.0.0.1", self.port)

    @property
    def is_known(self) -> bool:
        """Whether the instance is live."""
        return bool(self.registry.live(time.monotonic()))

    def wait_for_beats(self, count: int) -> None:
        """Wait until so many more messages have come."""
        want = self.listener.messages_total() + count
        wait_until(lambda: self.listener.messages_total() >= want, f"{count} more heartbeats")


@contextmanager
def stalled(
    receiver: Receiver, stall_s: int = 600, stall_limit_s: float = LONG_S, kind: str = "Announcer"
) -> Iterator[subprocess.Popen[str]]:
    """A process whose interpreter stands still, after it has registered."""
    command = [sys.executable, str(PROGRAM), str(receiver.port), str(stall_s), str(stall_limit_s), kind]
    with receiver.listener, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: receiver.is_known, "the instance registers", 60)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "stalled\n"
            yield process
        finally:
            process.kill()
            process.wait(10)


def test_a_stalled_interpreter_loses_no_heartbeat() -> None:
    receiver = Receiver(expire_after_s=20.0)
    with stalled(receiver):
        receiver.wait_for_beats(30)
        assert receiver.is_known


def test_control_on_a_thread_of_the_stalled_interpreter_the_registration_is_lost() -> None:
    receiver = Receiver(expire_after_s=2.0)
    with stalled(receiver, kind="ThreadAnnouncer"):
        wait_until(lambda: not receiver.is_known, "the registration is lost", 30)


def test_a_killed_instance_is_deregistered_by_its_announcer() -> None:
    receiver = Receiver()
    with stalled(receiver) as process:
        process.kill()
        wait_until(lambda: not receiver.is_known, "the goodbye has come")


def test_an_instance_that_shows_no_life_for_too_long_is_taken_off_until_it_does() -> None:
    receiver = Receiver()
    with stalled(receiver, stall_s=4, stall_limit_s=1.0):
        wait_until(lambda: not receiver.is_known, "it is taken off")
        wait_until(lambda: receiver.is_known, "it is back", 30)


def test_start_stop_and_the_process_is_gone() -> None:
    receiver = Receiver()
    with receiver.listener:
        announcer = Announcer(REGISTRATION, [f"127.0.0.1:{receiver.port}"], 0.05)
        assert not announcer.is_alive
        announcer.start()
        wait_until(lambda: receiver.is_known, "it registers")
        pid = announcer.pid
        assert pid is not None
        announcer.stop()
        announcer.stop()
        wait_until(lambda: not receiver.is_known, "it has deregistered")
        assert not is_running(pid)
        assert not announcer.is_alive


def test_a_killed_announcer_process_is_started_again() -> None:
    receiver = Receiver()
    with receiver.listener, Announcer(REGISTRATION, [f"127.0.0.1:{receiver.port}"], 0.05) as announcer:
        wait_until(lambda: receiver.is_known, "it registers")
        first = announcer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: announcer.pid != first, "there is another process")
        receiver.wait_for_beats(3)


def test_a_refusal_is_reported_to_the_owner_of_the_instance(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver(transfer_mode=TransferMode.WRITE)
    with receiver.listener, Announcer(REGISTRATION, [f"127.0.0.1:{receiver.port}"], 0.05):
        wait_until(
            lambda: "refuses prefill instance 127.0.0.1:8101: transfer_mode is READ there" in caplog.text, "it is reported"
        )


def test_a_process_without_routers_starts_nothing() -> None:
    with Announcer(REGISTRATION, []) as announcer:
        assert not announcer.is_alive
        assert announcer.pid is None


@pytest.mark.parametrize("stall_limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_stall_limit_that_cannot_work_is_refused(stall_limit_s: float) -> None:
    with pytest.raises(ConfigError, match="stall_limit_s"):
        Announcer(REGISTRATION, ["127.0.0.1:1"], stall_limit_s=stall_limit_s)


def test_it_proves_to_a_router_with_a_key_that_it_is_no_recording() -> None:
    """The process beside the instance seals by itself: hello, heartbeats and goodbye."""
    key, registry, port = b"k" * 32, Registry(expire_after_s=LONG_S), PortPicker().pick()
    with Listener(registry, "127.0.0.1", port, cluster_key=key) as listener:
        with Announcer(REGISTRATION, [f"127.0.0.1:{port}"], 0.05, cluster_key=key):
            wait_until(lambda: bool(registry.live(time.monotonic())), "it registers")
            seen = registry.live(time.monotonic())[0].last_seen
            wait_until(lambda: registry.live(time.monotonic())[0].last_seen > seen, "it beats")
        wait_until(lambda: not registry.live(time.monotonic()), "it deregisters")
        assert listener.malformed_total()[Cause.NOT_FRESH] >= 1
        assert listener.malformed_total()[Cause.NOT_SEALED] == 0


@pytest.mark.parametrize("kind", [Announcer, ThreadAnnouncer])
def test_an_instance_whose_engine_hangs_is_taken_off_at_once_until_it_goes_on(kind: type[Announcer | ThreadAnnouncer]) -> None:
    receiver, hung = Receiver(), threading.Event()
    with receiver.listener, kind(REGISTRATION, [f"127.0.0.1:{receiver.port}"], 0.05, is_hung=hung.is_set):
        wait_until(lambda: receiver.is_known, "the instance registers", 60)
        hung.set()
        wait_until(lambda: not receiver.is_known, "it is taken off, long before the stall limit")
        hung.clear()
        wait_until(lambda: receiver.is_known, "it is back")

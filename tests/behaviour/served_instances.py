"""Embedded instances as processes: `kvbaton serve --model tiny`, asked over HTTP as a router would, without one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from system import Client, Reply, blocks

from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import EngineOptions
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.launch.fleet import Death, Fleet
from kvbaton.launch.local import new_cluster_key
from kvbaton.launch.ports import PortPicker, check_port_free
from watching import wait_until

__all__ = ["CLUSTER_KEY", "SHORT_TIMEOUTS", "Served", "served_pair"]

CLUSTER_KEY = new_cluster_key()
SHORT_TIMEOUTS = ("--transfer-timeout", "2", "--defer-timeout", "3", "--retry", "0.2")
_START_S = 60.0


class Served:
    """One instance. It may be ended and started again, with the same command on the same ports."""

    def __init__(self, role: str, *extra: str) -> None:
        pull = HandoffSettings(mode=Mode.PULL)
        options = EngineOptions("tiny", "local", 2, pull, arguments=("--poison", *extra), cluster_key=CLUSTER_KEY)
        self.part = EmbeddedServers(options).part(role, role, PortPicker())
        self.port = int(self.part.base_url.rpartition(":")[2])
        command = list(self.part.command)
        self.control_port = int(command[command.index("--control-port") + 1])
        self.client = Client(self.port, CLUSTER_KEY)
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.stop()

    @property
    def control(self) -> ControlAddress:
        """Where peers reach it."""
        return ControlAddress.of("127.0.0.1", self.control_port)

    @property
    def pid(self) -> int:
        return self._fleet.pid(self.part.name)

    def start(self) -> None:
        """Start the process and wait until it is healthy."""
        self._fleet = Fleet(lambda _, line: self.lines.append(line))
        self._fleet.start(self.part)
        self._fleet.wait_healthy(_START_S)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait_for_end(self, timeout_s: float = 20.0) -> Death:
        """Wait until it has ended by itself."""
        wait_until(lambda: self._fleet.death() is not None, f"{self.part.name} has ended", timeout_s)
        death = self._fleet.death()
        assert death is not None
        self._fleet.stop()
        return death

    def check_ports_free(self) -> None:
        """Fail when one of its ports is still taken."""
        check_port_free("127.0.0.1", self.port, "--port")
        check_port_free("127.0.0.1", self.control_port, "--control-port")

    def memory_bytes(self) -> int:
        """The most memory that the process has had."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the kernel reports no VmHWM")

    def counter(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.client.get("/metrics").content.decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def prefill(self, prompt: str, transfer_id: str) -> dict[str, Any]:
        """The source's half of a hand-off; what it answers for the target."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        reply = self.client.complete(prompt, max_tokens=1, kv_transfer_params=params)
        assert reply.status == 200, reply.content
        answered: dict[str, Any] = reply.document["kv_transfer_params"]
        return answered

    def decode(self, prompt: str, params: Any) -> Reply:
        """The target's half."""
        return self.client.complete(prompt, kv_transfer_params=params)

    def wait_idle(self) -> None:
        """Wait until no block is held or in use."""

        def is_idle() -> bool:
            states = blocks(self.port)
            return states["held"] == states["in_use"] == 0 and self.counter("kvbaton_handoffs_live") == 0

        wait_until(is_idle, f"all blocks of {self.part.name} are back")

    def complaints(self) -> list[str]:
        """What it logged as a mistake of its own."""
        marks = ("Traceback", "ERROR", "Exception", "error of its own")
        return [line for line in self.lines if any(mark in line for mark in marks)]


@contextmanager
def served_pair(*extra: str) -> Iterator[tuple[Served, Served]]:
    """A prefill and a decode instance."""
    with Served("prefill", *extra) as source, Served("decode", *extra) as target:
        yield source, target

"""The processes of a replay: several prefill and decode instances, each at an address of its own, which die and come back."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, Protocol, Self

import msgspec

from kvbaton.bench.replay.instance import HealAll, PeerCame, RankStarted, ReplayProcess, ReplaySettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.ports import PortPicker, check_port_free

__all__ = ["ProcessHoldings", "House", "HouseLinks", "HousePlace"]

_START_S = 60.0
_END_S = 30.0


class HouseLinks(Protocol):
    """The network between places, where it can be cut: real packets, of messages and of data alike."""

    def cut(self, sender: str, receiver: str) -> None:
        """Carry nothing from one instance to another."""

    def join(self, sender: str, receiver: str) -> None:
        """Carry packets from one instance to another again."""


@dataclass(frozen=True, slots=True)
class HousePlace:
    """Where an instance lives: the host to listen on, and the command that starts a process there."""

    host: str = "127.0.0.1"
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessHoldings:
    """What a process holds of the system."""

    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessHoldings:
        """That of a running process."""
        root = Path(f"/proc/{pid}")
        return cls(len(list((root / "fd").iterdir())), len(list((root / "task").iterdir())))


@dataclass
class House:
    """Instances by name, started when it is entered and ended when it is left. One thread calls it."""

    names: Sequence[str]
    settings: ReplaySettings
    plants: Mapping[str, str] = field(default_factory=dict)
    """Which instances are started with a mistake."""
    places: Mapping[str, HousePlace] = field(default_factory=dict)
    processes: dict[str, ReplayProcess] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """The rank processes of instances that have one."""
    footprints: dict[int, ProcessHoldings] = field(default_factory=dict)
    """What each process held when it was first idle."""
    is_known: set[str] = field(default_factory=set)
    """Who has reported itself to the others."""

    def __enter__(self) -> Self:
        picker = PortPicker()
        for name in self.names:
            self.ports[name] = picker.pick()
            self.start(name)
        began = time.monotonic()
        while not self.is_up_since(began):
            for _ in self.turn(0.2):
                pass
        return self

    def is_up_since(self, began: float) -> bool:
        """Whether all instances are up; raises LocalError where one of them is not, and has had its time since `began`."""
        if self.is_known == set(self.names):
            return True
        if time.monotonic() > began + _START_S:
            raise LocalError(f"of {', '.join(self.names)} only {', '.join(sorted(self.is_known))} came up in {_START_S:g} s")
        return False

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def address(self, name: str) -> str:
        """Where peers reach an instance, whether it lives or not."""
        return str(ControlAddress.of(self.places.get(name, HousePlace()).host, self.ports[name]))

    def start(self, name: str) -> None:
        """Start an instance; it reports itself later."""
        place = self.places.get(name, HousePlace())
        settings = msgspec.structs.replace(
            self.settings, port=self.ports[name], host=place.host, plant=self.plants.get(name, "")
        )
        self.processes[name] = ReplayProcess(name, settings, place.command)

    def kill(self, name: str) -> None:
        """End an instance as the kernel does, and its rank with it."""
        process = self.processes.pop(name)
        self.is_known.discard(name)
        process.send_signal(SIGKILL)
        process.end()
        self.ranks.pop(name, None)

    def signal(self, name: str, number: Signals) -> None:
        """Send a signal to an instance that runs."""
        if name in self.processes:
            self.processes[name].send_signal(number)

    def signal_rank(self, name: str, number: Signals) -> None:
        """Send a signal to the rank of an instance that runs."""
        if name in self.processes and name in self.ranks:
            os.kill(self.ranks[name], number)

    def order(self, name: str, order: msgspec.Struct) -> None:
        """Send an order to an instance that runs."""
        if name in self.processes:
            self.processes[name].order(order)

    def heal(self) -> None:
        """Let every instance be disturbed no longer."""
        for process in self.processes.values():
            process.order(HealAll())

    def turn(self, timeout_s: float) -> Iterator[tuple[str, Any]]:
        """Wait for reports at most so long; each with the name of its instance, None for one that has ended by itself."""
        running = list(self.processes.values())
        for process in select.select(running, [], [], timeout_s)[0]:
            process.take()
        for name, process in list(self.processes.items()):
            reports, process.reports = process.reports, []
            if process.is_up and name not in self.is_known:
                self._introduce(name)
            for report in reports:
                if isinstance(report, RankStarted):
                    self.ranks[name] = report.pid
                else:
                    yield name, report
            if process.is_over:
                self.kill(name)
                yield name, None

    def stop(self) -> list[str]:
        """End all in good order; what was wrong with that."""
        wrong = []
        for process in self.processes.values():
            process.send_signal(SIGTERM)
        for name, process in list(self.processes.items()):
            try:
                code = process.wait(_END_S)
            except subprocess.TimeoutExpired as error:
                wrong.append(f"{name} does not end: {error}")
            else:
                wrong += [f"{name} ended with code {code}"] if code else []
            self.kill(name)
        for name, port in self.ports.items():
            # In its own namespace, a port is gone with its host.
            if name not in self.places:
                try:
                    check_port_free("127.0.0.1", port, name)
                except ConfigError as error:
                    wrong.append(str(error))
        return wrong

    def _introduce(self, name: str) -> None:
        """All learn who lives at the address of a new one, and it learns who the others are."""
        self.is_known.add(name)
        here = self.processes[name].here
        for other in self.is_known - {name}:
            there = self.processes[other].here
            self.order(other, PeerCame(here.address, here.incarnation))
            self.order(name, PeerCame(there.address, there.incarnation))

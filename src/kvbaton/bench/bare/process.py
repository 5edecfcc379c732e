"""The parent's end of bare instances: starts their processes, sends orders and takes reports; a relay stands between them."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from kvbaton.agent.channel import Channel, ChannelClosed, channel_pair
from kvbaton.bench.bare.instance import Ask, BareSettings, Begin, Ended, Gauges, HandoffEnd, Here, Offered, Report, Task
from kvbaton.core.handoff import Mode
from kvbaton.errors import LocalError

__all__ = ["BareProcess", "Relay"]

_START_S = 60.0
_ANSWER_S = 60.0
_END_S = 15.0
_TURN_S = 0.2


class BareProcess:
    """One bare instance in a process of its own. Leaving it ends the process; `is_over` once it will report nothing more.

    `prefix` is a command that runs the interpreter elsewhere, such as on another host, as the same process.
    """

    program: tuple[str, ...] = ("-m", "kvbaton.bench.bare.instance")
    """What the interpreter runs."""
    report_types: Any = Report
    """What it reports."""

    def __init__(self, name: str, settings: BareSettings, prefix: Sequence[str] = ()) -> None:
        self.name = name
        ours, theirs = channel_pair()
        arguments = [msgspec.json.encode(settings).decode(), str(theirs.fileno())]
        with theirs:
            command = [*prefix, sys.executable, *self.program, *arguments]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._channel = Channel(ours, f"bare instance {name}")
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(self.report_types)
        self._asked = 0
        self._here: Here | None = None
        self.reports: list[Report] = []
        self.is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there are reports."""
        return self._channel.fileno()

    @property
    def here(self) -> Here:
        """Where it is; waits until it runs. Raises LocalError when it does not."""
        give_up_at = time.monotonic() + _START_S
        while self._here is None:
            self.take(max(0.0, give_up_at - time.monotonic()))
            if self._here is None and (time.monotonic() > give_up_at or self._process.poll() is not None):
                raise LocalError(f"bare instance {self.name} did not start within {_START_S:g} s; its last output is above")
        return self._here

    def order(self, *orders: msgspec.Struct) -> None:
        """Send orders; those to an instance that is gone are dropped."""
        for each in orders:
            with contextlib.suppress(ChannelClosed):
                self._channel.send(msgspec.msgpack.encode(each), _ANSWER_S)

    def take(self, timeout_s: float = 0.0) -> bool:
        """Read what it has reported into `reports`, waiting at most so long for something; false at its end."""
        try:
            while (frame := self._channel.receive(timeout_s)) is not None:
                timeout_s = 0.0
                report = self._decoder.decode(frame)
                if isinstance(report, Here):
                    self._here = report
                else:
                    self.reports.append(report)
        except ChannelClosed:
            self.is_over = True
        return not self.is_over

    def gauges(self) -> Gauges:
        """Its state now. Raises LocalError when it does not report it."""
        self._asked += 1
        self.order(Ask(self._asked))
        give_up_at = time.monotonic() + _ANSWER_S
        while time.monotonic() < give_up_at:
            is_open = self.take(max(0.0, give_up_at - time.monotonic()))
            for report in self.reports:
                if isinstance(report, Gauges) and report.number == self._asked:
                    self.reports.remove(report)
                    return report
            if not is_open:
                break
        raise LocalError(f"bare instance {self.name} (pid {self.pid}) does not answer; it ended, or is stopped")

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = _END_S) -> int:
        """Wait for its end; the exit code."""
        return self._process.wait(timeout_s)

    def end(self) -> None:
        """End the process: its channel closes, and if that does not help it is killed."""
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)

    def cpu_s(self) -> float:
        """Seconds of processor time that its threads have used so far."""
        return self._thread_cpu_s("*")

    def engine_cpu_s(self) -> float:
        """Of these, what its first thread has used: the stand-in for an engine, which fills and checks pages."""
        return self._thread_cpu_s(str(self.pid))

    def _thread_cpu_s(self, threads: str) -> float:
        spent = 0
        for path in Path(f"/proc/{self.pid}/task").glob(f"{threads}/schedstat"):
            spent += int(path.read_text().split()[0])
        return spent / 1e9


@dataclass
class Relay:
    """What a router is to real instances: begins hand-offs on both sides, forwards offers to targets. One thread calls it.

    `ends` are by task and instance, in the order in which they came.
    """

    processes: Sequence[BareProcess]
    ends: dict[tuple[str, str], list[HandoffEnd]] = field(default_factory=dict)
    _waiting: dict[str, BareProcess] = field(default_factory=dict)

    def begin(self, task: Task, source: BareProcess, target: BareProcess) -> None:
        """Start both sides of a task."""
        if task.mode is Mode.PULL:
            self._waiting[task.name] = target
        for process in (source, target):
            self.ends[task.name, process.name] = []
        source.order(Begin(task))
        target.order(Begin(task, source.here.address))

    def turn(self, timeout_s: float = _TURN_S) -> None:
        """Wait for reports, at most so long, and take them."""
        running = [process for process in self.processes if not process.is_over]
        for process in select.select(running, [], [], timeout_s)[0] if running else ():
            process.take()
        for process in self.processes:
            self._take_reports(process)

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Go on until `condition` holds. Raises LocalError, with `what`, when it does not in time."""
        give_up_at = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > give_up_at:
                so_far = ", ".join(f"{len(ends)} of {task} at {name}" for (task, name), ends in self.ends.items())
                raise LocalError(f"not within {timeout_s:g} s: {what}; ended so far: {so_far}")
            self.turn()

    def _take_reports(self, process: BareProcess) -> None:
        reports, process.reports = process.reports, []
        for report in reports:
            if isinstance(report, Offered) and report.task in self._waiting:
                self._waiting[report.task].order(report)
            elif isinstance(report, Ended):
                self.ends.setdefault((report.task, process.name), []).extend(report.ends)

"""Hand-offs over a distance: two bare instances whose every byte, of messages and of caches, passes a relay that delays it.

Both instances listen on one loopback address and give another one as theirs; there the relay listens, on the same ports. It
carries each direction of each connection by itself, and opens a connection as late as it carries its first byte. What TCP
does over a distance by itself (slow start, windows, losses) is not there.

Hand-offs run one at a time, in push, layer by layer, once with targets that read and once with sources that write. A hand-over
is counted from when the source has computed everything until the target's engine gets it, on the clock that both processes
share. Without a delay it is what the wire, the relay and the agents take; what is above that is the distance.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from kvbaton.agent.driver import Driver
from kvbaton.bench.bare.instance import (
    MODEL,
    BareInstance,
    BareSettings,
    Begin,
    Ended,
    Gauges,
    Here,
    Offered,
    Task,
    run_child,
)
from kvbaton.bench.bare.pages import SMALL, TaggedPages
from kvbaton.bench.bare.process import BareProcess, Relay
from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware
from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Confirmation, Mode, Outcome
from kvbaton.engines.base import Progress
from kvbaton.engines.instance import AgentSettings, open_driver
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.ports import PortPicker

__all__ = ["DelayBench", "DelayRelay", "FarInstance", "FarProcess", "main", "run_delay_bench"]

HOST = "127.0.0.1"
"""Where the instances listen."""
FAR_HOST = "127.0.0.3"
"""Where the relay does, and where each instance takes the other to be."""

_PIECE_BYTES = 256 << 10
_MOST_BYTES = 64 << 20
"""What one direction of a connection holds; beyond that its sender waits."""
_LOOK_S = 0.5
_END_S = 10.0
_TASK_S = 300.0
_WARM = 3
"""Hand-offs of each task that are not measured: the first of all opens connections."""


class DelayRelay:
    """Passes connections to ports of `HOST` on from the same ports of `FAR_HOST`, each byte `delay_s` later. For any thread."""

    def __init__(self, ports: tuple[int, ...]) -> None:
        """Raises LocalError for a port that is in use there."""
        self.delay_s = 0.0
        self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        for port in ports:
            try:
                listener = socket.create_server((FAR_HOST, port))
            except OSError as error:
                self.close()
                raise LocalError(f"port {port} of {FAR_HOST} cannot be listened on: {error}") from error
            self._start(self._accept, listener, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut every connection, and end every thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            sockets, threads = list(self._sockets), list(self._threads)
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(_END_S)
        for each in sockets:
            each.close()

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        """Run something on a thread of its own; `arguments` may have sockets, which are closed with the relay."""
        thread = threading.Thread(target=run, args=arguments, name="kvbaton-delay", daemon=True)
        with self._lock:
            self._sockets += [each for each in arguments if isinstance(each, socket.socket) and each not in self._sockets]
            if not self._is_closed:
                self._threads.append(thread)
                thread.start()
                return
        for each in arguments:
            if isinstance(each, socket.socket):
                each.close()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while not self._is_closed:
            try:
                if not select.select([listener], [], [], _LOOK_S)[0]:
                    continue
                near, _ = listener.accept()
            except OSError:
                return
            self._start(self._open, near, port)

    def _open(self, near: socket.socket, port: int) -> None:
        """The request to open a connection takes as long as a byte."""
        time.sleep(self.delay_s)
        try:
            far = socket.create_connection((HOST, port), _END_S)
        except OSError:
            near.close()
            return
        for each in (near, far):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start(self._carry, near, far)
        self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        held: deque[tuple[float, bytes]] = deque()
        held_bytes, is_open = 0, True
        try:
            while (is_open or held) and not self._is_closed:
                wait_s = max(0.0, held[0][0] - time.monotonic()) if held else _LOOK_S
                if not is_open or held_bytes >= _MOST_BYTES:
                    time.sleep(min(wait_s, _LOOK_S))
                elif select.select([source], [], [], min(wait_s, _LOOK_S))[0]:
                    data = source.recv(_PIECE_BYTES)
                    held.append((time.monotonic() + self.delay_s, data))
                    held_bytes += len(data)
                    is_open = bool(data)
                while held and held[0][0] <= time.monotonic():
                    data = held.popleft()[1]
                    held_bytes -= len(data)
                    if data:
                        target.sendall(data)
                    else:  # the end travels as late as a byte
                        target.shutdown(socket.SHUT_WR)
        except OSError:
            # One of the two ends is gone: so is the connection.
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


class FarHere(Here, frozen=True, tag="here"):
    """The instance runs; `data_port` is where its transport listens."""

    data_port: int = 0


class FarInstance(BareInstance):
    """A bare instance that others reach through the relay."""

    def open_driver(self, settings: BareSettings, pages: TaggedPages, news: Callable[[], None]) -> Driver:
        agents = AgentSettings(PortPicker().pick(), HOST, FAR_HOST, transport=settings.transport, handoff=settings.handoff)
        transport = agents.open_transport(self.incarnation, pages.region)
        self._data_port = int(transport.endpoint().details["port"])
        return open_driver(agents, self.incarnation, MODEL, pages.layout(), pages.region, news, transport=transport)

    def start(self) -> None:
        """Start the driver, and report it with the port of the transport."""
        self.driver.start()
        self._send(FarHere(str(self.driver.address), self.incarnation, os.getpid(), self._data_port))


class FarProcess(BareProcess):
    """Such an instance in a process of its own."""

    program = ("-m", "kvbaton.bench.delayed")
    report_types = FarHere | Offered | Ended | Gauges


@dataclass(frozen=True, slots=True)
class DelayBench:
    """What to measure: delays of one direction in milliseconds, of which the first is 0."""

    delays_ms: tuple[int, ...] = (0, 1, 10, 50)
    tokens: int = 512
    layer_ms: int = 10
    handoffs: int = 10
    rounds: int = 3

    def __post_init__(self) -> None:
        if not self.delays_ms or min(self.delays_ms) < 0 or self.delays_ms[0] != 0:
            raise ConfigError(f"--delays is {self.delays_ms}; give milliseconds with commas between them, 0 first")
        check_at_least_one(self, "tokens", "handoffs", "rounds")
        if self.layer_ms < 0:
            raise ConfigError(f"--layer-ms is {self.layer_ms}; it must be 0 or more")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {
            "delays_ms": ",".join(map(str, self.delays_ms)),
            "mode": Mode.PUSH.value,
            "transport": "tcp",
            "tokens": self.tokens,
            "layers": SMALL.layers,
            "layer_ms": self.layer_ms,
            "handoffs": self.handoffs,
            "rounds": self.rounds,
            "bytes_per_layer": SMALL.cache_bytes(self.tokens) // SMALL.layers,
        }


_READS, _WRITES = "target reads", "source writes"
# Instances that are apart share no memory, in which a target could look at stamps.
_READING = HandoffSettings(confirmation=Confirmation.MESSAGE)
_KINDS = {_READS: _READING, _WRITES: replace(_READING, fenced_writes=True)}


class _FarPair:
    """A source and a target with a relay between them."""

    def __init__(self, bench: DelayBench, kind: str, parts: ExitStack) -> None:
        self._bench = bench
        settings = BareSettings(2 * SMALL.blocks_for(bench.tokens), bench.tokens, "tcp", _KINDS[kind])
        self.source = parts.enter_context(FarProcess(f"source ({kind})", settings))
        self.target = parts.enter_context(FarProcess(f"target ({kind})", settings))
        self._tasks = Relay([self.source, self.target])
        control = ControlAddress.parse(self.source.here.address)
        ports = [each.here.data_port for each in (self.source, self.target) if isinstance(each.here, FarHere)]
        self._source_address = str(ControlAddress.of(FAR_HOST, control.handshake))
        self.relay = parts.enter_context(DelayRelay((control.handshake, *ports)))

    def measure(self, name: str, delay_ms: int) -> list[float]:
        """Seconds of each hand-over. Raises LocalError when one is not delivered."""
        bench = self._bench
        self.relay.delay_s = delay_ms / 1e3
        count, chunk = bench.handoffs + _WARM, SMALL.blocks_for(bench.tokens) * SMALL.block_tokens
        task = Task(name, Mode.PUSH, count, 1, bench.tokens, chunk, layer_s=bench.layer_ms / 1e3)
        for process in (self.source, self.target):
            self._tasks.ends[name, process.name] = []
        self.source.order(Begin(task))
        self.target.order(Begin(task, self._source_address))
        ends = [self._tasks.ends[name, process.name] for process in (self.source, self.target)]
        self._tasks.wait(lambda: all(len(side) == count for side in ends), f"{count} hand-offs, {name}", _TASK_S)
        if failed := [end for side in ends for end in side if end.outcome != Outcome.DELIVERED]:
            raise LocalError(f"a hand-off did not end as delivered: {failed[0]}")
        computed = {end.index: end.computed_at for end in ends[0]}
        return [end.at - computed[end.index] for end in sorted(ends[1], key=lambda end: end.index)[_WARM:]]

    def problems(self) -> Iterator[str]:
        """What must not be left over when all is done."""
        for process in (self.source, self.target):
            gauges = process.gauges()
            if gauges.blocks_in_use or gauges.live or gauges.foreign_bytes:
                yield f"{process.name} still has something, or found foreign bytes: {gauges}"


def run_delay_bench(bench: DelayBench, progress: Progress) -> BenchReport:
    """Measure; values are medians over all hand-offs of all rounds. Raises LocalError when hand-offs hang or fail."""
    rounds: list[dict[str, list[float]]] = []
    with ExitStack() as parts:
        pairs = {kind: _FarPair(bench, kind, parts) for kind in _KINDS}
        for index in range(bench.rounds):
            taken: dict[str, list[float]] = {}
            for delay_ms in bench.delays_ms:
                for kind, pair in pairs.items():
                    series = _series(kind, delay_ms)
                    taken[series] = [round(each, 6) for each in pair.measure(f"{index}.{series}", delay_ms)]
                    progress(f"round {index + 1} of {bench.rounds}: {np.median(taken[series]) * 1e3:.2f} ms, {series}")
            rounds.append(taken)
        problems = [problem for pair in pairs.values() for problem in pair.problems()]
    return BenchReport(list(_rows(bench, rounds)), describe_hardware(), rounds, problems)


def _series(kind: str, delay_ms: int) -> str:
    return f"{kind}, {delay_ms} ms each way"


def _rows(bench: DelayBench, rounds: list[dict[str, list[float]]]) -> Iterator[BenchRow]:
    def median_ms(kind: str, delay_ms: int) -> float:
        return float(np.median([each for one in rounds for each in one[_series(kind, delay_ms)]])) * 1e3

    for delay_ms in bench.delays_ms:
        for kind in _KINDS:
            value, reads = median_ms(kind, delay_ms), median_ms(_READS, delay_ms)
            beyond = value - median_ms(kind, 0)
            settings: dict[str, Setting] = {
                "delay_ms": delay_ms,
                "beyond_no_delay_ms": round(beyond, 3),
                "one_way_delays": round(beyond / delay_ms, 3) if delay_ms else 0.0,
            }
            yield BenchRow(f"hand-over, {_series(kind, delay_ms)}", value, "ms", _READS, value / reads, settings)


def main() -> None:
    """The process of such an instance."""
    run_child(FarInstance, BareSettings)


if __name__ == "__main__":
    main()

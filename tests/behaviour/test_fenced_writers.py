"""A source in a process of its own is paused, or killed, in the middle of a written hand-off.

Its target frees the blocks, another request gets them, and what the source had sent or sends later changes no byte of them.
The server of the target is held up in the middle of a frame, so that there is always something left to come.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from held_instances import HeldProcess, HeldSettings
from kvbaton.agent.driver import Driver
from kvbaton.bench.bare.instance import MODEL, BareInstance, BareSettings, Begin, Ended, HandoffEnd, Report, Task
from kvbaton.bench.bare.pages import SMALL, TaggedPages, spans_of
from kvbaton.config import HandoffSettings, Limits
from kvbaton.core.handoff import BlockLists, HandoffKey, Mode, TransferId
from kvbaton.engines.instance import AgentSettings, open_driver
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.tcp import TcpTransport
from kvbaton.transport.tcp.gate import WriteGate, WriteStream
from watching import pause, wait_until

TOKENS = 16_384
"""32 MiB: more than the buffers of a connection hold, so that a source that is held up has not sent everything."""
BLOCKS = SMALL.blocks_for(TOKENS)
LIMITS = Limits(transfer_timeout=20.0, defer_timeout=25.0, stop_timeout=0.2, retry=0.2)
WRITES = HandoffSettings(fenced_writes=True)
FIRST = HandoffKey(TransferId("first-0"))
OTHER = HandoffKey(TransferId("other-0"))
PATIENCE_S = 30.0


class _Brake:
    """The lock of a gate, which lets the server's thread in a few times and then holds it up, outside, until it is released."""

    def __init__(self, entries: int) -> None:
        self._lock = threading.Lock()
        self._entries = entries
        self.is_on = threading.Event()
        self._released = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "kvbaton-tcp-server":
            self._entries -= 1
            if self._entries < 0 and not self._released.is_set():
                self.is_on.set()
                assert self._released.wait(PATIENCE_S)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def release(self) -> None:
        self._released.set()


class _Target(BareInstance):
    """A target in this process, whose transport the test can look into."""

    transport: TcpTransport

    def open_driver(self, settings: BareSettings, pages: TaggedPages, news: Callable[[], None]) -> Driver:
        agents = AgentSettings(PortPicker().pick(), transport="tcp", limits=LIMITS, handoff=settings.handoff)
        transport = agents.open_transport(self.incarnation, pages.region)
        assert isinstance(transport, TcpTransport)
        self.transport = transport
        wrapped: Any = {"transport": transport}
        return open_driver(agents, self.incarnation, MODEL, pages.layout(), pages.region, news, **wrapped)


@dataclass
class _Scene:
    """A source that writes, held up in the middle of it."""

    source: HeldProcess
    target: _Target
    reports: list[Report]
    brake: _Brake
    blocks: BlockLists = ()
    source_ends: list[HandoffEnd] = field(default_factory=list)

    @property
    def server(self) -> Any:
        return self.target.transport._server

    def begin(self) -> None:
        task = Task("first", Mode.PUSH, 1, 1, TOKENS, TOKENS)
        self.source.order(Begin(task))
        self.target.take(Begin(task, self.source.here.address))
        self.work_until(self.brake.is_on.is_set, "the source is held up in the middle")
        self.blocks = self.target.targets["first"].live[FIRST].blocks
        missing = self.foreign_bytes(FIRST)
        assert 0 < missing < SMALL.cache_bytes(TOKENS), "some of it is stored, and some is not"

    def work_until(self, condition: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            self.target.work()
            if self.source.take():
                ends = [end for report in self.source.reports if isinstance(report, Ended) for end in report.ends]
                self.source_ends += ends
                self.source.reports.clear()
            return condition()

        wait_until(is_so, what, PATIENCE_S)

    def end_of_target(self) -> str:
        """Wait until the target has given the blocks back; why."""
        self.work_until(lambda: not self.target.targets["first"].live, "its blocks are back")
        (end,) = (end for report in self.reports if isinstance(report, Ended) for end in report.ends)
        assert end.outcome != "delivered"
        return end.reason

    def give_to_another(self) -> None:
        """Another request gets the very same blocks, and fills them."""
        taken = self.target.books.pool.take(BLOCKS)
        assert taken is not None
        assert set(taken[0]) == set(self.blocks[0])
        self.blocks = taken
        for span in spans_of(SMALL, TOKENS, TOKENS):
            self.target.books.pages.write(OTHER, self.blocks, span)
        assert self.foreign_bytes(OTHER) == 0

    def foreign_bytes(self, key: HandoffKey) -> int:
        return self.target.books.pages.foreign_bytes(key, self.blocks, TOKENS)


@pytest.fixture
def scene(source_limits: Limits) -> Iterator[_Scene]:
    reports: list[Report] = []
    settings = HeldSettings(blocks=BLOCKS, most_tokens=TOKENS, transport="tcp", handoff=WRITES, limits=source_limits)
    with HeldProcess("source", settings) as source:
        target = _Target(BareSettings(BLOCKS, TOKENS, "tcp", WRITES), reports.append, lambda: None)
        brake = _Brake(entries=8)
        target.transport._server.gate.lock = brake  # type: ignore[assignment]
        target.start()
        try:
            yield _Scene(source, target, reports, brake)
        finally:
            brake.release()
            target.close()


def _take_the_gate_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at but which connection a frame came over."""

    def is_held(gate: WriteGate, stream: WriteStream, holder: object) -> bool:
        del gate
        return stream.holder is holder

    monkeypatch.setattr(WriteGate, "is_held", is_held)
    monkeypatch.setattr(WriteGate, "why_stale", lambda *_: "")


def _wake_after_the_fence(scene: _Scene) -> None:
    """The source stands still, its target gives up, fences it and gives the blocks to another request; then it goes on."""
    scene.begin()
    pause(scene.source.pid)
    scene.target.driver.cancel(FIRST)
    assert scene.end_of_target() == "the request was cancelled"
    scene.give_to_another()
    scene.brake.release()
    os.kill(scene.source.pid, signal.SIGCONT)
    scene.work_until(lambda: len(scene.source_ends) == 1, "the source has ended")
    assert scene.source_ends[0].outcome != "delivered"


def _kill_in_the_middle(scene: _Scene) -> None:
    """The source is dead; what it had sent is in the buffers of its target, and is taken when other blocks are there."""
    scene.begin()
    pid = scene.source.pid
    os.kill(pid, signal.SIGKILL)
    scene.source.wait()
    assert scene.end_of_target() == f"process {pid} of the peer is dead"
    scene.give_to_another()
    scene.brake.release()
    scene.work_until(lambda: not scene.server._readers, "what it had sent is taken, to the end of its connection")


_HASTY = replace(LIMITS, transfer_timeout=1.0)


def _fail_in_the_middle(scene: _Scene) -> None:
    """The source gives its connection up, and has ended; what it had sent is taken when another has the blocks."""
    scene.begin()
    assert "no progress within 1 s" in scene.end_of_target()
    scene.give_to_another()
    scene.brake.release()
    scene.work_until(lambda: not scene.server._readers, "what it had sent is taken, to the end of its connection")


each_case = pytest.mark.parametrize(
    ("play", "source_limits"),
    [
        pytest.param(_wake_after_the_fence, LIMITS, id="it wakes after it was fenced"),
        pytest.param(_kill_in_the_middle, LIMITS, id="it was killed"),
        pytest.param(_fail_in_the_middle, _HASTY, id="its copy failed"),
    ],
)


@each_case
def test_what_a_source_sends_after_its_end_changes_nothing(play: Callable[[_Scene], None], scene: _Scene) -> None:
    play(scene)
    assert scene.foreign_bytes(OTHER) == 0


@each_case
def test_control_without_the_gate_it_lands_in_blocks_of_another_request(
    play: Callable[[_Scene], None], scene: _Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    _take_the_gate_away(monkeypatch)
    play(scene)
    assert scene.foreign_bytes(OTHER) > 0

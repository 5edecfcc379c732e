"""The port of an engine of production in the simulator: every call and every event goes through here, and is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import Allocation, EngineEvent, HandoffPort, Offer, SourceRequest, SpansReady
from kvbaton.core.handoff import BlockLists, HandoffKey, Span
from kvbaton.core.timeline import Side
from kvbaton.sim.watch import Watch

__all__ = ["PortUser", "WatchedPort"]


class PortUser(Protocol):
    """The engine behind the port, as far as what it calls for is looked at."""

    watch: Watch
    retracted_total: int

    def fail(self, error: Exception) -> None:
        """The code of production has raised what it should not."""

    def notify(self, event: EngineEvent) -> None:
        """The engine takes an event."""

    def on_expected(self, key: HandoffKey, side: Side) -> None:
        """The engine has taken up a request of a hand-off."""

    def on_allocated(self, allocation: Allocation) -> None:
        """The engine has blocks for a target."""


class WatchedPort(HandoffPort):
    """The driver as the engine calls it: every call is looked at, and what it raises is an error of ours."""

    def __init__(self, driver: Driver, engine: PortUser) -> None:
        self._driver = driver
        self._engine = engine

    def _call(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._engine.fail(error)
            raise

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        self._engine.on_expected(key, Side.SOURCE)
        self._call(partial(self._driver.expect_target, key, prompt))

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        self.spans_ready_all([SpansReady(key, blocks, spans)])

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        for key, _, _ in ready:
            self._engine.watch.computes(key, is_complete=False)
        self._call(partial(self._driver.spans_ready_all, ready))

    def retract(self, key: HandoffKey) -> None:
        self._engine.retracted_total += 1
        self._engine.watch.computes(key, is_complete=False)
        self._call(partial(self._driver.retract, key))

    def offer(self, offer: Offer) -> None:
        self._engine.watch.computes(offer.key, is_complete=True)
        self._call(partial(self._driver.offer, offer))

    def expect_source(self, request: SourceRequest) -> None:
        self._engine.on_expected(request.key, Side.TARGET)
        self._call(partial(self._driver.expect_source, request))

    def allocated(self, allocation: Allocation) -> None:
        self._engine.on_allocated(allocation)
        self._call(partial(self._driver.allocated, allocation))

    def decline(self, request: SourceRequest, reason: str) -> None:
        self._engine.watch.declined(request.key, is_whole=not request.prompt)
        self._call(partial(self._driver.decline, request, reason))

    def refuse(self, key: HandoffKey, reason: str) -> None:
        self._call(partial(self._driver.refuse, key, reason))

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        self._call(partial(self._driver.cancel, key, side))

    def events(self) -> list[EngineEvent]:
        events = self._driver.events()
        for event in events:
            self._engine.notify(event)
        return events

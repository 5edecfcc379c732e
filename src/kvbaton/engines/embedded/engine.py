"""The engine's thread, and the methods through which other threads reach it.

Requests, cancels and wake-ups go into an inbox under one lock; the thread takes them at the start of each step, so the
engine itself needs no locks. Sinks are called from the thread, with no lock held.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Self

from kvbaton.agent.engine_port import HandoffPort
from kvbaton.core.handoff import RequestId
from kvbaton.core.timeline import Observer, no_observer
from kvbaton.engines.embedded.engine_core import EngineCore
from kvbaton.engines.embedded.fair_queue import Crowd
from kvbaton.engines.embedded.request import EngineBusy, FinishReason, GenerationRequest, RequestRecord, Sink, TokenOutput
from kvbaton.engines.embedded.seams import EngineCache, EngineModel
from kvbaton.engines.embedded.settings import EngineSettings
from kvbaton.engines.embedded.stats import EngineStats
from kvbaton.errors import LocalError

__all__ = ["Engine", "EngineBusy", "EngineSettings", "EngineStats", "EngineStopped"]

_logger = logging.getLogger(__name__)

_STOPPING = "the engine is stopping"


class EngineStopped(LocalError):
    """The engine is closed, or its thread does not stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    """What the engine's thread has to do for a request; with a `sink`, it is a submission."""

    request_id: RequestId
    take: Callable[[], None]
    sink: Sink | None = None


class Engine:
    """Runs requests on one thread of its own: `start` it, `submit` to it from anywhere, `close` it."""

    def __init__(
        self,
        loaded: EngineModel,
        cache: EngineCache,
        port: HandoffPort | None,
        settings: EngineSettings,
        clock: Callable[[], float] = time.monotonic,
        observe: Observer = no_observer,
    ) -> None:
        self._core = EngineCore(loaded, cache, port, settings, clock, observe)
        self._loaded = loaded
        self._settings = settings
        self._clock = clock
        self._condition = threading.Condition()
        self._inbox: deque[_Item] = deque()
        self._submissions = 0
        self._is_woken = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._stats = self._core.stats()
        self._crowd: Crowd | None = None

    @property
    def loaded(self) -> EngineModel:
        """The model that this engine runs."""
        return self._loaded

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request; every output goes to `sink`, from the engine's thread, and the last has a finish reason.

        Raises BadRequest for what can never run, EngineBusy when too many wait, EngineStopped after `close`.
        """
        self._core.check(request)
        with self._condition:
            if self._is_stopping:
                raise EngineStopped(f"request {request.request_id} is refused: {_STOPPING}; send it to another instance")
            waiting = self._submissions + self._core.queued
            most = self._settings.max_waiting
            # A full queue still takes what its largest request gives way to; the engine's thread then ends one of that.
            if waiting >= most and not (waiting < 2 * most and self._crowd and self._crowd.gives_way_to(request.call)):
                raise EngineBusy(f"{waiting} sequences wait already and max_waiting is {most}; try again later")
            self._submissions += 1
            self._put(_Item(request.request_id, partial(self._core.add, request, sink, self._clock()), sink))

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request; unknown and finished ones are ignored."""
        with self._condition:
            if not self._is_stopping:
                self._put(_Item(request_id, partial(self._core.cancel, request_id)))

    def decline(self, request: GenerationRequest, reason: str) -> None:
        """A request was refused before it reached the engine: notify its source, if it has one, that no target will fetch it.

        When very many are declined at once, the sources of some release their blocks at `defer_timeout` instead.
        """
        with self._condition:
            # Submissions are bounded by max_waiting, declined requests are not: a flood of bad bodies must not grow the inbox.
            if not self._is_stopping and len(self._inbox) < 2 * self._settings.max_waiting:
                self._put(_Item(request.request_id, partial(self._core.decline, request, reason)))

    def wake(self) -> None:
        """Make the engine take its port's events now."""
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def step(self) -> bool:
        """Do one step on the caller's thread; false when there was nothing to do. Not while the engine's own thread runs."""
        took = self._take_inbox()
        worked = self._core.step()
        self._stats = self._core.stats()
        # Read by other threads: a snapshot, and only of a queue that is full.
        self._crowd = self._core.largest() if self._core.queued >= self._settings.max_waiting else None
        return worked or took

    def stats(self) -> EngineStats:
        """How the engine stood after its last step; what has been submitted since counts as waiting."""
        stats, submissions = self._stats, self._submissions
        if not submissions:
            return stats
        waiting = stats.requests["waiting"] + submissions
        return dataclasses.replace(stats, requests={**stats.requests, "waiting": waiting})

    def start(self) -> None:
        """Start the thread."""
        with self._condition:
            if self._is_stopping or self._thread is not None:
                raise EngineStopped("an engine starts once; make a new one")
            self._thread = threading.Thread(target=self._run, name="kvbaton-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread and end every live request as cancelled; hand-offs are cancelled. Idempotent.

        Raises EngineStopped when the step under way does not end in `close_s` seconds; then no request was ended.
        """
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(self._settings.close_s)
            if self._thread.is_alive():
                raise EngineStopped(f"the engine's step has not ended in {self._settings.close_s} s (close_s); kill it")
        # What was queued after the last step has sinks too; they must get their last output.
        self._take_inbox()
        self._core.end_all(FinishReason.CANCELLED, _STOPPING)
        self._stats = self._core.stats()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_stopping:
            if not self._step_safely():
                self._wait()

    def _step_safely(self) -> bool:
        """One step; a bug in the engine itself ends every live request, and the thread goes on."""
        try:
            return self.step()
        except Exception as error:
            _logger.exception("a step of the engine failed; every live request is ended")
            reason = f"the engine failed: {error!r}"
        try:
            self._core.end_all(FinishReason.ERROR, reason)
        except Exception:
            _logger.exception("the engine could not end its requests")
        return False

    def _wait(self) -> None:
        with self._condition:
            if not (self._is_woken or self._is_stopping):
                self._condition.wait(self._settings.idle_wait_s)
            self._is_woken = False

    def _put(self, item: _Item) -> None:
        self._inbox.append(item)
        self._is_woken = True
        self._condition.notify()

    def _take_inbox(self) -> bool:
        with self._condition:
            items = tuple(self._inbox)
            self._inbox.clear()
        try:
            for item in items:
                self._take_safely(item)
        finally:
            with self._condition:
                self._submissions -= sum(item.sink is not None for item in items)
        return bool(items)

    def _take_safely(self, item: _Item) -> None:
        """Pass one item to the engine; a bug there ends this request and no other."""
        try:
            item.take()
        except Exception as error:
            _logger.exception("the engine failed to take request %s", item.request_id)
            if item.sink is not None:
                _refuse(item.request_id, item.sink, f"the engine failed: {error!r}")


def _refuse(request_id: RequestId, sink: Sink, error: str) -> None:
    output = TokenOutput(-1, "", finish_reason=FinishReason.ERROR, error=error, record=RequestRecord())
    try:
        sink(output)
    except Exception:
        _logger.exception("the sink of request %s failed; its end is not reported", request_id)

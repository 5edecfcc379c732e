"""How an engine process calls its worker: over a socket, whose end on either side may go."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.engines.vllm.engine_calls import CallListener, EngineCaller, listen

_PATIENT_S = 30.0


@dataclass
class _Worker:
    """Notes what it is called with."""

    incarnation: Incarnation = field(default_factory=lambda: Incarnation(f"test-{uuid.uuid4().hex}"))
    can_be_called: threading.Event = field(default_factory=threading.Event)
    cannot_be_called: threading.Event = field(default_factory=threading.Event)
    called: threading.Event = field(default_factory=threading.Event)

    def set_callable(self, is_callable: bool) -> None:
        (self.can_be_called if is_callable else self.cannot_be_called).set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        listener = CallListener(self.incarnation, self.set_callable, self.called.set)
        listener.start()
        try:
            yield
        finally:
            listener.close()
            listener.close()


def test_a_worker_is_called_until_the_engine_is_gone() -> None:
    worker, engine = _Worker(), EngineCaller()
    with worker.listening():
        assert engine.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
        assert not worker.called.is_set()
        for _ in range(2):
            engine.call()
            assert worker.called.wait(_PATIENT_S)
            worker.called.clear()
        assert not worker.cannot_be_called.is_set()
        engine.close()
        engine.close()
        assert worker.cannot_be_called.wait(_PATIENT_S)
        engine.call()
    assert not worker.called.is_set()


def test_the_last_engine_that_connects_counts() -> None:
    worker, first, last = _Worker(), EngineCaller(), EngineCaller()
    with worker.listening():
        assert first.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
        worker.can_be_called.clear()
        assert last.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
        last.call()
        assert worker.called.wait(_PATIENT_S)
        first.call()


def test_an_engine_without_a_worker_calls_none() -> None:
    engine = EngineCaller()
    assert not engine.connect(Incarnation("no worker"))
    engine.call()
    worker = _Worker()
    with worker.listening():
        assert engine.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
    assert worker.cannot_be_called.is_set(), "a worker that ends is called no more"
    engine.call()


def test_calls_that_are_not_read_keep_no_request_waiting() -> None:
    worker, engine = _Worker(), EngineCaller()
    silent = socket.socket(socket.AF_UNIX)
    with contextlib.closing(silent):
        silent.bind(f"\0kvbaton.{worker.incarnation}.calls")
        silent.listen(1)
        assert engine.connect(worker.incarnation)
        for _ in range(100_000):
            engine.call()
        engine.close()


def test_an_engine_of_another_user_is_not_taken_and_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine, stranger, next_engine = _Worker(), EngineCaller(), EngineCaller(), EngineCaller()
    own = os.getuid()
    with worker.listening():
        assert engine.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
        worker.can_be_called.clear()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert stranger.connect(worker.incarnation)
        stranger.call()
        engine.call()
        assert worker.called.wait(_PATIENT_S), "the rightful engine is still heard"
        assert not worker.cannot_be_called.is_set()
        monkeypatch.undo()
        assert next_engine.connect(worker.incarnation)
        # Connections are taken in order: the stranger was looked at before this one.
        assert worker.can_be_called.wait(_PATIENT_S)


def test_a_worker_that_may_not_listen_goes_on_without() -> None:
    worker = _Worker()
    with worker.listening():
        assert listen(worker.incarnation, worker.set_callable, worker.called.set) is None, "the name is taken"


def test_an_error_of_accepting_takes_no_engine_away(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = _Worker(), EngineCaller()
    failed = threading.Event()

    class _Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if worker.can_be_called.is_set() and not failed.is_set():
                failed.set()
                raise OSError(24, "too many open files")
            return super().accept()

    monkeypatch.setattr("kvbaton.engines.vllm.engine_calls.socket.socket", _Full)
    with worker.listening():
        assert engine.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
        other = EngineCaller()
        assert other.connect(worker.incarnation)
        assert failed.wait(_PATIENT_S)
        engine.call()
        assert worker.called.wait(_PATIENT_S)

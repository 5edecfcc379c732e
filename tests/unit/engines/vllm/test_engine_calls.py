"""How an engine process calls its worker: over a socket, whose end on either side may go."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.engines.vllm.engine_calls import CallListener, EngineCaller

_PATIENT_S = 30.0


@dataclass
class _Worker:
    """Keeps what it is told."""

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


def test_an_engine_without_a_worker_calls_nobody() -> None:
    engine = EngineCaller()
    assert not engine.connect(Incarnation("nobody"))
    engine.call()
    worker = _Worker()
    with worker.listening():
        assert engine.connect(worker.incarnation)
        assert worker.can_be_called.wait(_PATIENT_S)
    assert worker.cannot_be_called.is_set(), "a worker that ends is called no more"
    engine.call()


def test_calls_that_nobody_reads_keep_no_request_waiting() -> None:
    worker, engine = _Worker(), EngineCaller()
    silent = socket.socket(socket.AF_UNIX)
    with contextlib.closing(silent):
        silent.bind(f"\0kvbaton.{worker.incarnation}.calls")
        silent.listen(1)
        assert engine.connect(worker.incarnation)
        for _ in range(100_000):
            engine.call()
        engine.close()


def test_an_engine_of_another_user_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, stranger = _Worker(), EngineCaller()
    monkeypatch.setattr(os, "getuid", lambda: struct.unpack("i", struct.pack("i", 12345))[0])
    with worker.listening():
        assert stranger.connect(worker.incarnation)
        stranger.call()
        assert not worker.can_be_called.wait(0.3)
    assert not worker.called.is_set()

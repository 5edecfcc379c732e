"""When vLLM's engine process sleeps: in steps without a forward that follow one another, and in no other."""

from __future__ import annotations

import math

import pytest

from kvbaton.engines.vllm.engine_waits import EngineWaits


def test_it_sleeps_only_when_two_steps_in_a_row_compute_nothing() -> None:
    waits = EngineWaits()
    asleep = []
    for has_forward in (False, False, False, True, False, False, True):
        waits.step(has_forward=has_forward)
        asleep.append(waits.is_asleep)
    assert asleep == [False, True, True, False, False, True, False]


def test_the_last_engine_of_a_process_guides_its_waits() -> None:
    class Condition:
        """What vLLM's readers wait for, as far as it matters: they poll for a second after the last read."""

        last_read = 5.0

        def wait(self, timeout_ms: int | None = None) -> int | None:
            return timeout_ms

    first, last = EngineWaits(), EngineWaits()
    for each in (first, last):
        each.guide(Condition)
    for _ in range(2):
        first.step(has_forward=False)
        last.step(has_forward=True)
    condition = Condition()
    assert (condition.wait(timeout_ms=5000), condition.wait(), condition.last_read) == (5000, None, 5.0)
    for _ in range(2):
        last.step(has_forward=False)
    assert (condition.wait(timeout_ms=5000), condition.wait(timeout_ms=2), condition.wait()) == (5, 2, 5)
    assert condition.last_read == -math.inf


def test_naps_are_longer_where_the_step_takes_long() -> None:
    class Condition:
        last_read = 5.0

        def wait(self, timeout_ms: int | None = None) -> int | None:
            return timeout_ms

    now = 100.0
    waits = EngineWaits(lambda: now)
    waits.guide(Condition)
    for _ in range(2):
        waits.step(has_forward=False)
    for now, nap_ms in ((100.0, 5), (100.01, 5), (100.04, 20), (100.5, 50)):  # noqa: B007 - the clock reads it
        assert Condition().wait() == pytest.approx(nap_ms, abs=1)
    waits.step(has_forward=False)
    assert Condition().wait() == 5


def test_a_request_calls_the_worker_only_while_steps_compute_nothing() -> None:
    class Engine:
        """Prepares requests as vLLM's `EngineCore` does."""

        def preprocess_add_request(self, request: str) -> tuple[str, int]:
            if request == "bad":
                raise ValueError(request)
            return request, 0

    calls: list[str] = []
    first, last = EngineWaits(), EngineWaits()
    first.watch(Engine, lambda: calls.append("first"))
    last.watch(Engine, lambda: calls.append("last"))
    first.step(has_forward=False)
    first.step(has_forward=False)
    assert Engine().preprocess_add_request("a") == ("a", 0)
    assert not calls, "only the last engine of a process counts, and it computes"
    last.step(has_forward=False)
    last.step(has_forward=False)
    assert Engine().preprocess_add_request(request="b") == ("b", 0)
    assert calls == ["last"]
    with pytest.raises(ValueError, match="bad"):
        Engine().preprocess_add_request("bad")
    assert calls == ["last"] * 2

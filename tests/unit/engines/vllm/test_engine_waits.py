"""When vLLM's engine process sleeps: in steps without a forward that follow one another, and in no other."""

from __future__ import annotations

import math

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

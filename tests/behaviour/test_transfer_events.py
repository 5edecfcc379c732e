"""Source data that is not ready: a copy starts only after its event, and an event that fails is a failure, not a hang."""

from __future__ import annotations

import threading

import pytest
from embedded_nodes import Node, hand_off, is_untouched, names, prompt_of

from kvbaton.config import Limits
from watching import wait_until

PROMPT = prompt_of(1)


@pytest.mark.parametrize("transport", ["local", "tcp"])
class TestDataThatIsNotReady:
    """Through the agents of a real pair, over each transport between processes."""

    def test_nothing_moves_before_the_event(self, transport: str) -> None:
        asked, is_ready = threading.Event(), threading.Event()

        def event() -> bool:
            asked.set()
            return is_ready.is_set()

        with Node(transport=transport) as source, Node(transport=transport) as target:
            target.transport.gate = lambda _: event
            name = next(names)
            source.prefill(name, PROMPT).wait()
            request = target.decode(name, PROMPT, source.address)
            assert asked.wait(10)
            assert is_untouched(target)
            assert not request.is_over
            is_ready.set()
            assert request.wait().tokens == source.alone(PROMPT).wait().tokens
            assert not is_untouched(target)

    def test_an_event_that_raises_fails_its_request_on_both_sides(self, transport: str) -> None:
        def broken() -> bool:
            raise ZeroDivisionError("the device is lost")

        with Node(transport=transport) as source, Node(transport=transport) as target:
            target.transport.gate = lambda _: broken
            request = hand_off(source, target, PROMPT)
            assert "the event that the batch waits for raised" in request.error
            assert "the device is lost" in request.error
            assert is_untouched(target)
            wait_until(lambda: source.engine.stats().handoffs_total == {("source", "failed"): 1}, "the source has failed too")
            target.transport.gate = lambda _: None
            assert hand_off(source, target, PROMPT).tokens == source.alone(PROMPT).wait().tokens
            source.wait_idle()
            target.wait_idle()

    def test_an_event_that_never_comes_is_bounded(self, transport: str) -> None:
        limits = Limits(transfer_timeout=0.5, defer_timeout=1.0, retry=0.1)
        with (
            Node(transport=transport, limits=limits) as source,
            Node(transport=transport, limits=limits) as target,
        ):
            target.transport.gate = lambda _: lambda: False
            assert "did not come within 0.5 s" in hand_off(source, target, PROMPT).error
            assert is_untouched(target)
            source.wait_idle()
            target.wait_idle()

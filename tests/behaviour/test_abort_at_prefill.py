"""A prefill that is aborted, or was never begun: its target is notified at once, not at a deadline."""

from __future__ import annotations

import pytest
from embedded_nodes import Collected, Node, key_of, names, prompt_of

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.errors import BadRequest
from watching import wait_until

LONG = prompt_of(1, 100)


def waiting_target(source: Node, target: Node, name: str) -> Collected:
    """A request that waits for a prefill which is under way; both sides know of each other."""
    source.prefill(name, LONG)
    assert source.engine.step()
    request = target.decode(name, LONG, source.address, source.incarnation)
    live = source.driver._coordinator.source.live
    wait_until(lambda: key_of(name) in live and live[key_of(name)].grant is not None, "the source has the grant")
    return request


class TestAbortAtPrefill:
    """An abort at the prefill side reaches decode without any deadline. These are 30 s and more; the tests wait 20 s."""

    def test_an_abort_while_computing(self) -> None:
        name = next(names)
        with Node(step_tokens=16, thread=False) as source, Node() as target:
            request = waiting_target(source, target, name)
            source.cancel(name)
            source.engine.step()
            assert "cancelled: the request was cancelled at the source" in request.wait().error
            source.wait_idle()
            target.wait_idle()

    def test_without_an_abort_it_is_served(self) -> None:
        """The control: what ended it was the abort."""
        name = next(names)
        with Node(step_tokens=16, thread=False) as source, Node() as target:
            request = waiting_target(source, target, name)

            def is_served() -> bool:
                source.engine.step()
                return request.is_over

            wait_until(is_served, "the request is served")
            assert request.tokens == target.alone(LONG).wait().tokens

    def test_an_abort_while_the_finished_cache_waits(self) -> None:
        """Then it is not held any more, and a target that asks for it is refused at once."""
        name = next(names)
        with Node() as source, Node() as target:
            source.prefill(name, LONG).wait()
            wait_until(lambda: source.engine.stats().blocks_held > 0, "the finished cache is held")
            source.driver.cancel(key_of(name))
            source.wait_idle()
            assert "it is not held here" in target.decode(name, LONG, source.address).wait().error

    @pytest.mark.parametrize("mode", list(Mode))
    def test_a_caller_that_leaves_frees_a_finished_prefill_at_once(self, mode: Mode) -> None:
        """Its target never came; in push, all of it was announced to the agents. `defer_timeout` is 60 s."""
        name = next(names)
        with Node(handoff=HandoffSettings(mode=mode), blocks=600) as source:
            source.prefill(name, LONG).wait()
            wait_until(lambda: source.engine.stats().blocks_held > 0, "the finished cache is held")
            source.cancel(name)
            source.wait_idle()
            assert source.engine.stats().handoffs_total == {("source", "cancelled"): 1}

    def test_an_engine_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = next(names)
        with Node(step_tokens=16, thread=False) as source, Node() as target:
            request = waiting_target(source, target, name)

            def fail(*_: object) -> None:
                raise ZeroDivisionError("out of memory")

            with monkeypatch.context() as broken:
                broken.setattr(source.engine._core._loaded.model, "forward", fail)
                source.engine.step()
            assert "cancelled at the source" in request.wait().error
            source.wait_idle()

    def test_a_request_that_was_refused_before_anything_started(self) -> None:
        """The prefill instance cannot take the prompt at all; it does not know the hand-off when the target asks."""
        name, prompt = next(names), prompt_of(2, 200)
        with Node(blocks=8) as source, Node() as target:
            with pytest.raises(BadRequest, match="the cache holds 128"):
                source.prefill(name, prompt)
            assert "it is not held here" in target.decode(name, prompt, source.address).wait().error
            target.wait_idle()

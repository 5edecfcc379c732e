"""An engine without traffic: what it holds still expires, and then it does next to nothing."""

from __future__ import annotations

import time

from embedded_nodes import Node, names, prompt_of

from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.launch.ports import PortPicker
from watching import wait_until

LIMITS = Limits(transfer_timeout=0.6, defer_timeout=0.9, retry=0.1)
_HANDFUL = 4


def turns_in_a_while(node: Node) -> int:
    """How often the agents' thread wakes in two thirds of a second."""
    before, until = node.driver.stats().turns_total, time.monotonic() + 0.66
    wait_until(lambda: time.monotonic() >= until, "a while has passed")
    return node.driver.stats().turns_total - before


class TestHeldBlocksWithoutTraffic:
    """No target ever fetches a held cache: it expires without any traffic, and the instance goes idle."""

    def test_held_blocks_expire_and_then_nothing_happens(self) -> None:
        with Node(limits=LIMITS) as source:
            source.prefill(next(names), prompt_of(1)).wait()
            assert source.engine.stats().blocks_held == 3
            wait_until(lambda: source.engine.stats().handoffs_total == {("source", "expired"): 1}, "it expires")
            source.wait_idle()
            steps = source.engine.stats().steps_total
            assert turns_in_a_while(source) <= _HANDFUL
            assert source.engine.stats().steps_total == steps
            assert source.driver.stats().errors_total == 0

    def test_while_something_lives_it_does_more(self) -> None:
        """The control: a target that dials a dead source is not idle, and the same count shows it."""
        with Node(limits=Limits(transfer_timeout=0.3, defer_timeout=60.0, retry=0.01)) as target:
            dead = ControlAddress.of("127.0.0.1", PortPicker().pick())
            requests = [target.decode(next(names), prompt_of(seed), dead) for seed in range(3)]
            busy = turns_in_a_while(target)
            assert busy > _HANDFUL
            for request in requests:
                assert "no progress" in request.wait().error
            target.wait_idle()
            assert turns_in_a_while(target) <= _HANDFUL

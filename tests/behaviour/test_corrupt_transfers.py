"""A byte that changes on its way is noticed before anything is decoded from it, when integrity is `full`."""

from __future__ import annotations

import pytest
from embedded_nodes import Node, hand_off, prompt_of

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.transport.faulty import Faults
from watching import wait_until

PROMPT = prompt_of(1)
FULL = HandoffSettings(mode=Mode.PULL, integrity=Integrity.FULL)


@pytest.mark.parametrize("transport", ["local", "tcp"])
class TestCorruptByte:
    """Detected before decode; nothing of it enters the prefix cache; counted on both sides."""

    def test_a_corrupt_byte_is_detected_before_decode(self, transport: str) -> None:
        with (
            Node(transport=transport, handoff=FULL) as source,
            Node(transport=transport, handoff=FULL, faults=Faults(corrupt=True)) as target,
        ):
            request = hand_off(source, target, PROMPT)
            assert "checksum" in request.error
            assert len(request.outputs) == 1, "no token was shown"
            target.wait_idle()
            source.wait_idle()
            assert target.engine.stats().blocks_cached == 0
            wait_until(lambda: target.engine.stats().handoffs_total == {("target", "failed"): 1}, "it is counted")
            wait_until(lambda: source.engine.stats().handoffs_total == {("source", "failed"): 1}, "there too")
            target.transport.set_faults(Faults())
            assert hand_off(source, target, PROMPT).tokens == source.alone(PROMPT).wait().tokens

    def test_without_integrity_it_is_not(self, transport: str) -> None:
        """The control: the fault does strike, and only the checksums notice."""
        with (
            Node(transport=transport) as source,
            Node(transport=transport, faults=Faults(corrupt=True)) as target,
        ):
            assert hand_off(source, target, PROMPT).is_good
            assert target.engine.stats().blocks_cached > 0

    def test_with_integrity_and_without_the_fault_all_is_well(self, transport: str) -> None:
        with (
            Node(transport=transport, handoff=FULL) as source,
            Node(transport=transport, handoff=FULL) as target,
        ):
            assert hand_off(source, target, PROMPT).tokens == source.alone(PROMPT).wait().tokens

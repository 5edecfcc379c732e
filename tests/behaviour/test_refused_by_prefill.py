"""With a router in front: decode does not wait for what prefill refuses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from system import Stand, blocks

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from watching import wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=[HandoffSettings(mode=mode) for mode in Mode], ids=list(Mode))
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    """A prefill instance with little memory beside a decode instance with much. Their timeouts are 30 s and more."""
    with Stand() as stand:
        stand.start("prefill", "prefill", "tiny", "--blocks", "8", handoff=request.param)
        stand.start("decode", "decode", "tiny", handoff=request.param)
        stand.wait_for("live", 2)
        yield stand


def handoffs_live(stand: Stand) -> list[str]:
    """What the instances report of live hand-offs and blocks, where it is not 0."""
    found = []
    for instance in stand.instances("live"):
        states = blocks(int(instance["http_address"].rpartition(":")[2]))
        found += [f"{instance['type']} {state} {states[state]}" for state in ("held", "in_use") if states[state]]
    return found


class TestRefusedByPrefill:
    """A request that prefill refuses before anything started fails at once at both ends."""

    def test_refused_by_prefill_alone(self, stand: Stand) -> None:
        with ThreadPoolExecutor(4) as pool:
            replies = [pool.submit(stand.client.complete, [65] * 300) for _ in range(4)]
            for reply in replies:
                answer = reply.result(20)
                assert 400 <= answer.status < 600
                assert "the cache holds 128" in answer.error
        wait_until(lambda: handoffs_live(stand) == [], "no hand-off waits", timeout_s=5)
        served = stand.client.complete("Hello")
        assert served.status == 200
        assert served.document["kvbaton"]["handed_off"] is True

    def test_what_both_can_take_is_served(self, stand: Stand) -> None:
        """The control."""
        assert stand.client.complete([65] * 100).status == 200

"""A hand-off between real processes is explained: both sides joined, and one side alone when the other was killed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from system import Client, Stand

from kvbaton.core.handoff import Outcome
from kvbaton.observe.transfer_report import TransferReport
from watching import wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        stand.start("p", "prefill")
        stand.start("d", "decode")
        stand.wait_for("live", 2)
        yield stand


def story(client: Client, transfer_id: str) -> TransferReport:
    reply = client.get(f"/handoffs/{transfer_id}")
    assert reply.status == 200, reply.content
    return msgspec.json.decode(reply.content, type=TransferReport)


def ends(joined: TransferReport) -> list[Outcome | None]:
    return [end.outcome for handoff in joined.handoffs for end in handoff.ends]


def test_both_sides_of_a_real_hand_off_are_joined_and_one_alone_is_shown_when_the_other_is_dead(stand: Stand) -> None:
    reply = stand.client.complete("hello " * 30)
    transfer_id = reply.headers["X-KVBaton-Transfer"]
    wait_until(lambda: ends(story(stand.client, transfer_id)) == [Outcome.DELIVERED] * 2, "both sides have ended")
    joined = story(stand.client, transfer_id)
    assert joined.clock.is_joined
    assert joined.clock.uncertain_s is not None
    assert joined.handoffs[0].wire_bytes == reply.document["kvbaton"]["bytes_moved"] > 0
    assert joined.handoffs[0].exposed_s is not None
    assert [line["transfer_id"] for line in stand.client.get("/handoffs").document["handoffs"]] == [transfer_id]
    stand.kill("p")
    joined = story(stand.client, transfer_id)
    assert joined.participants[0].problem != ""
    assert ends(joined) == [None, Outcome.DELIVERED]

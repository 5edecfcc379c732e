"""The HTTP server reports hand-offs: a list of the newest, the notes of one, and what to do when there are none."""

from __future__ import annotations

import msgspec
from served import ScriptedEngine, run, serving

from kvbaton.core.handoff import HandoffKey, Outcome, TransferId
from kvbaton.core.timeline import Note, Side, Stage
from kvbaton.observe.records import InstanceInfo, InstanceRecord
from kvbaton.observe.timelines import Timelines


def noted(*transfers: str) -> Timelines:
    timelines = Timelines(InstanceInfo("decode", "127.0.0.1:1", "inc-d"))
    for number, transfer in enumerate(transfers):
        key = HandoffKey(TransferId(transfer))
        timelines.note(Note(key, Side.TARGET, Stage.ARRIVED, 100.0 + number))
        timelines.note(Note(key, Side.TARGET, Stage.ENDED, 100.5 + number, outcome=Outcome.FAILED, text="lost"))
    return timelines


def test_a_transfer_is_reported_in_durations() -> None:
    async def test() -> None:
        async with serving(ScriptedEngine(), timelines=noted("tx-1")) as client:
            reply = await client.get("/handoffs/tx-1")
        record = msgspec.json.decode(reply.raw, type=InstanceRecord)
        assert reply.status == 200
        assert (record.transfer_id, record.instance.role) == ("tx-1", "decode")
        assert [(note.stage, note.at_s) for note in record.sides[0].notes] == [(Stage.ARRIVED, 0), (Stage.ENDED, 0.5)]
        assert "100" not in reply.raw.decode()

    run(test())


def test_the_newest_come_first_and_at_most_a_hundred() -> None:
    async def test() -> None:
        async with serving(ScriptedEngine(), timelines=noted(*(f"tx-{number}" for number in range(120)))) as client:
            listed = (await client.get("/handoffs")).json["handoffs"]
        assert [line["transfer_id"] for line in listed] == [f"tx-{number}" for number in range(119, 19, -1)]
        assert (listed[0]["outcome"], listed[0]["sides"], listed[0]["total_s"]) == ("failed", ["target"], 0.5)

    run(test())


def test_an_unknown_transfer_says_what_to_do() -> None:
    async def test() -> None:
        async with serving(ScriptedEngine(), timelines=noted()) as client:
            reply = await client.get("/handoffs/" + "x" * 1000)
            assert reply.status == 404
            assert reply.error["code"] == "handoff_not_found"
            assert "GET /handoffs lists" in reply.error["message"]
            assert len(reply.error["message"]) < 600

    run(test())


def test_a_face_without_timelines_has_no_such_route() -> None:
    async def test() -> None:
        async with serving(ScriptedEngine()) as client:
            assert (await client.get("/handoffs")).status == 404

    run(test())

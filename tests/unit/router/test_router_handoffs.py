"""The router explains hand-offs: it joins what both instances report, and states which did not, and why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from aiohttp import web
from router_fakes import (
    Behaviour,
    FakeInstance,
    Router,
    answering,
    decode,
    decode_well,
    prefill,
    prefill_well,
    reset_at_once,
    routing,
    until,
    wait_for_ever,
)

from kvbaton.core.timeline import Side
from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import InstanceType
from kvbaton.discovery.registry import Registry
from kvbaton.observe.transfer_report import TransferReport
from kvbaton.router.policy import InstancePair
from kvbaton.router.routed import Rings, RoutedTransfers
from kvbaton.router.slots import SlotBook, instance_key
from true_notes import TRANSFER, Way, notes_of_push, record


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapped() -> None:
        asyncio.run(test())

    wrapped.__name__ = test.__name__
    return wrapped


def reporting(side: Side, otherwise: Behaviour, reported: Behaviour | None = None) -> Behaviour:
    """An instance that answers completions well, and reports hand-offs as `reported` does."""
    notes = msgspec.json.encode(record(side, notes_of_push(Way()))).decode()

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not request.path.startswith("/handoffs/"):
            return await otherwise(request, body)
        if reported is not None:
            return await reported(request, body)
        transfer_id = request.path.removeprefix("/handoffs/")
        return web.Response(text=notes.replace(TRANSFER, transfer_id), content_type="application/json")

    return behave


def reporting_prefill(reported: Behaviour | None = None) -> FakeInstance:
    return prefill(reporting(Side.SOURCE, prefill_well, reported))


def reporting_decode(reported: Behaviour | None = None) -> FakeInstance:
    return decode(reporting(Side.TARGET, decode_well, reported))


async def routed_one(router: Router) -> str:
    """Send a request through; its transfer id."""
    status, headers, _ = await router.post({"prompt": "hi"})
    assert status == 200
    return headers["x-kvbaton-transfer"]


async def report_of(router: Router, transfer_id: str) -> TransferReport:
    status, _, content = await router.get(f"/handoffs/{transfer_id}")
    assert status == 200, content
    return msgspec.json.decode(content, type=TransferReport)


@run
async def test_both_sides_are_asked_and_joined() -> None:
    async with reporting_prefill() as p, reporting_decode() as d, routing(p, d) as router:
        transfer_id = await routed_one(router)
        story = await report_of(router, transfer_id)
        assert story.transfer_id == transfer_id
        assert story.clock.is_joined
        assert [participant.problem for participant in story.participants] == ["", ""]
        assert [participant.name for participant in story.participants] == [
            f"prefill instance {p.http_address}",
            f"decode instance {d.http_address}",
        ]
        assert "The first decode step came" in story.sentence
        assert (await router.get("/metrics"))[2].count(transfer_id.encode()) == 0


@run
async def test_an_instance_that_reports_elsewhere_is_asked_there() -> None:
    async with reporting_decode() as participant, reporting_prefill() as p, decode(decode_well) as d:
        d.handoffs_address = participant.http_address
        async with routing(p, d) as router:
            story = await report_of(router, await routed_one(router))
            assert [each.problem for each in story.participants] == ["", ""]
            assert story.participants[1].name == f"decode instance {d.http_address}"


@run
async def test_the_newest_are_listed_first() -> None:
    async with reporting_prefill() as p, reporting_decode() as d, routing(p, d) as router:
        assert json.loads((await router.get("/handoffs"))[2]) == {"handoffs": []}
        ids = [await routed_one(router) for _ in range(3)]
        listed = json.loads((await router.get("/handoffs"))[2])["handoffs"]
        assert [line["transfer_id"] for line in listed] == ids[::-1]
        assert {(line["prefill"], line["decode"]) for line in listed} == {(p.http_address, d.http_address)}


@run
async def test_an_unknown_transfer_is_a_404_and_no_instance_is_asked() -> None:
    async with reporting_prefill() as p, reporting_decode() as d, routing(p, d) as router:
        for transfer_id in ("nope", "..%2F..%2Fmetrics", "x" * 3000):
            status, _, content = await router.get(f"/handoffs/{transfer_id}")
            assert status == 404
            assert json.loads(content)["error"]["code"] == "handoff_not_found"
        assert p.seen == d.seen == []


BAD: list[tuple[str, Behaviour, str]] = [
    ("no timelines", answering(404, "{}"), "keeps no timelines"),
    ("an error", answering(500, "oops"), "it answered 500"),
    ("no JSON", answering(200, "{"), "no timeline"),
    ("another shape", answering(200, '{"transfer_id": "x"}'), "no timeline"),
    ("a number beyond bounds", answering(200, '{"transfer_id":"x","instance":1e999}'), "no timeline"),
    ("too much", answering(200, "x" * (5 * 1024 * 1024)), "more than"),
    ("nothing", reset_at_once, "closed the connection"),
    ("silence", wait_for_ever, "did not answer in time"),
]


@pytest.mark.parametrize(("reported", "expected"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_an_instance_that_does_not_report_is_named_and_the_other_one_is_shown(reported: Behaviour, expected: str) -> None:
    async def test() -> None:
        async with reporting_prefill() as p, reporting_decode(reported) as d, routing(p, d, explain_timeout_s=0.5) as router:
            story = await report_of(router, await routed_one(router))
            assert expected in story.participants[1].problem
            assert story.participants[0].problem == ""
            assert "target side" in story.sentence
            assert story.handoffs[0].bars

    asyncio.run(test())


@run
async def test_a_record_of_another_transfer_is_not_believed() -> None:
    other = msgspec.json.encode(record(Side.TARGET, notes_of_push(Way()))).decode()
    async with reporting_prefill() as p, reporting_decode(answering(200, other)) as d, routing(p, d) as router:
        story = await report_of(router, await routed_one(router))
        assert "another transfer" in story.participants[1].problem


@run
async def test_when_no_instance_reports_it_is_an_error_with_both_reasons() -> None:
    gone = answering(404, "{}")
    async with reporting_prefill(gone) as p, reporting_decode(gone) as d, routing(p, d) as router:
        status, _, content = await router.get(f"/handoffs/{await routed_one(router)}")
        assert status == 404
        message = json.loads(content)["error"]["message"]
        assert p.http_address in message
        assert d.http_address in message


@run
async def test_an_instance_that_was_restarted_is_not_asked_for_what_it_cannot_know() -> None:
    async with reporting_prefill() as p, reporting_decode() as d, routing(p, d) as router:
        transfer_id = await routed_one(router)
        await asyncio.to_thread(router.announcers[d.port].stop)
        reborn = msgspec.structs.replace(d.registration(), incarnation="another")
        with ThreadAnnouncer(reborn, [f"127.0.0.1:{router.settings.discovery_port}"], heartbeat_s=0.3):
            async with asyncio.timeout(20):
                while "it is gone, or was restarted" not in (await report_of(router, transfer_id)).participants[1].problem:
                    await asyncio.sleep(0.01)
        seen = len(d.seen)
        assert (await report_of(router, transfer_id)).handoffs
        assert len(d.seen) == seen


@run
async def test_too_many_questions_at_once_are_turned_away_and_nothing_sticks() -> None:
    gate = asyncio.Event()

    async def reported_late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await gate.wait()
        return web.Response(status=404)

    async with reporting_prefill() as p, reporting_decode(reported_late) as d, routing(p, d) as router:
        transfer_id = await routed_one(router)
        path = f"/handoffs/{transfer_id}"
        waiting = [asyncio.create_task(router.get(path)) for _ in range(16)]
        await until(lambda: sum(seen.path == path for seen in d.seen) == 16)
        status, headers, content = await router.get(path)
        assert (status, json.loads(content)["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in headers
        gate.set()
        assert {(await task)[0] for task in waiting} == {200}
        assert (await router.get(path))[0] == 200


def test_processes_see_each_others_newest_transfers() -> None:
    rings, registry, slots = Rings(2), Registry(), SlotBook(8)
    one, other = (RoutedTransfers(rings, row, slots, registry) for row in range(2))
    live = {}
    for kind in InstanceType:
        registry.register(FakeInstance(kind, prefill_well, port=9000).registration(), 0.0)
        live[kind] = registry.live(0.0, kind)[0]
        slots.slot_of(instance_key(live[kind].registration))
    pair, alone = (
        InstancePair(live[InstanceType.PREFILL], live[InstanceType.DECODE]),
        InstancePair(None, live[InstanceType.DECODE]),
    )
    for number in range(5000):
        (one, other)[number % 2].add(f"tx-{number:032x}", pair if number % 3 else alone, 1.0 + number)
    for book in (one, other):
        assert [routed.transfer_id for routed in book.newest(4)] == [f"tx-{n:032x}" for n in (4999, 4998, 4997, 4996)]
        found = book.get(f"tx-{4999:032x}")
        assert found is not None
        assert (found.pair.prefill, found.pair.decode, found.arrived) == (pair.prefill, pair.decode, 5000.0)
        lonely = book.get(f"tx-{4998:032x}")
        assert lonely is not None
        assert lonely.pair.prefill is None
        assert book.get(f"tx-{1:032x}") is None
        assert book.get("tx-nothing") is None


def test_a_slot_that_another_request_has_taken_over_names_no_client() -> None:
    rings, registry, slots = Rings(1), Registry(), SlotBook(8)
    book = RoutedTransfers(rings, 0, slots, registry)
    registry.register(FakeInstance(InstanceType.DECODE, prefill_well, port=9000).registration(), 0.0)
    book.add("tx-" + "0" * 32, InstancePair(None, registry.live(0.0)[0]), 1.0)
    assert book.newest(1)[0].pair.decode.http_address == "127.0.0.1:9000"
    slots.keep((), 0.0, lambda _slot: 0)
    slots.keep((), 100.0, lambda _slot: 0)
    slots.slot_of(("127.0.0.1:9001", "D", "another"))
    assert book.newest(1)[0].pair.decode.http_address == "forgotten"

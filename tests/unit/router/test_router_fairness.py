"""Limits count sequences, and clients have their turns: one that sends very much does not starve the others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_fakes import Router, decode, decode_well, prefill, routing, run, until, wait_for_ever

from kvbaton.discovery.messages import TransferMode
from kvbaton.router.bodies import parse_body
from kvbaton.router.request_queue import ClientShare, RequestQueue

WRITE = TransferMode.WRITE
BATCH = {"prompt": ["hello"] * 1024}


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": "a", "n": 3}, 3),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3], [4]]}, 3),
        ({"prompt": ["a"] * 1024}, 1024),
        ({"prompt": []}, 1),
        ({"prompt": "a", "n": 2, "best_of": 5}, 5),
        ({"prompt": "a", "n": "many"}, 1),
        ({"prompt": "a", "n": None}, 1),
        ({"prompt": "a", "n": -4}, 1),
        ({"messages": [{"role": "user", "content": "a"}], "n": 4}, 4),
        ({"text": ["a", "b"], "sampling_params": {"n": 4}}, 8),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 4}, {}]}, 2),
    ],
)
def test_sequences_are_prompts_times_samples(body: dict[str, Any], sequences: int) -> None:
    for separators in ((",", ":"), (" , ", " : ")):
        assert parse_body(json.dumps(body, separators=separators).encode()).sequences() == sequences


@dataclass(eq=False)
class Waiting:
    """A request that goes on when `seats` has room for it, and notes that."""

    name: str
    share: ClientShare
    sequences: int
    seats: list[int]
    log: list[str]
    ended: list[str] = field(default_factory=list)

    def try_again(self, now: float) -> bool:  # noqa: ARG002
        if self.seats[0] < self.sequences:
            return False
        self.seats[0] -= self.sequences
        self.log.append(self.name)
        return True

    def waited_too_long(self) -> None:
        self.ended.append("late")

    def crowded_out(self) -> None:
        self.ended.append("crowded out")


class TestQueue:
    def setup_method(self) -> None:
        self.seats, self.log = [0], list[str]()
        self.shares = {name: ClientShare() for name in "abc"}
        self.held_back: set[ClientShare] = set()
        self.queue = RequestQueue(10, lambda request: request.share not in self.held_back)

    def add(self, name: str, sequences: int = 1, priority: int = 0) -> Waiting:
        request = Waiting(name, self.shares[name[0]], sequences, self.seats, self.log)
        request.ended = [] if self.queue.add(request, priority, 100.0) else ["refused"]
        return request

    def run(self, seats: int) -> list[str]:
        self.seats[0] = seats
        self.queue.wake(0.0)
        done, self.log[:] = list(self.log), []
        return done

    def test_clients_have_turns_however_much_each_has_sent(self) -> None:
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            self.add(name)
        assert self.run(7) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    def test_turns_are_counted_in_sequences(self) -> None:
        for name, sequences in (("a1", 3), ("a2", 3), ("b1", 1), ("b2", 1), ("b3", 1)):
            self.add(name, sequences)
        assert self.run(3) == ["a1"]
        assert self.run(9) == ["b1", "b2", "b3", "a2"]

    def test_priority_is_among_the_requests_of_one_client(self) -> None:
        self.add("a1", priority=5)
        self.add("a2", priority=-5)
        self.add("b1", priority=0)
        assert self.run(3) == ["a2", "b1", "a1"]

    def test_a_client_that_is_held_back_holds_up_no_other(self) -> None:
        for name in ("a1", "b1", "b2"):
            self.add(name)
        self.held_back = {self.shares["a"]}
        assert self.run(9) == ["b1", "b2"]
        self.held_back = set()
        assert self.run(9) == ["a1"]

    def test_a_request_that_finds_no_seat_is_not_overtaken(self) -> None:
        self.add("a1", 4)
        self.add("b1")
        assert self.run(3) == []
        assert self.run(5) == ["a1", "b1"]

    def test_a_client_that_comes_late_has_saved_up_no_turns(self) -> None:
        for number in range(4):
            self.add(f"a{number}")
        self.run(4)
        for name in ("a4", "a5", "b1", "b2", "b3"):
            self.add(name)
        assert self.run(5)[:4] != ["b1", "b2", "b3", "a4"]

    def test_a_full_queue_makes_room_at_the_expense_of_the_client_with_the_most(self) -> None:
        many = [self.add(f"a{number}") for number in range(10)]
        assert self.add("a10").ended == ["refused"]
        assert self.add("b1", 2).ended == []
        assert [request.ended for request in many] == [[]] * 8 + [["crowded out"]] * 2
        assert self.add("b2", 9).ended == ["refused"]
        assert self.run(99) == ["a0", "b1", *(f"a{number}" for number in range(1, 8))]

    def test_a_request_that_waited_too_long_leaves(self) -> None:
        late = self.add("a1")
        self.queue.sweep(99.0)
        assert not late.ended
        self.queue.sweep(100.0)
        assert late.ended == ["late"]
        assert not self.queue.deadlines
        assert self.run(9) == []

    def test_what_has_left_leaves_nothing_behind(self) -> None:
        self.add("a1", 2)
        for _ in range(1000):
            self.queue.discard(self.add("a2"))
            self.queue.discard(self.add("b1"))
        self.queue.sweep(0.0)
        assert len(self.shares["a"].requests) + len(self.shares["b"].requests) < 100
        assert len(self.queue._turns) < 100
        assert self.run(2) == ["a1"]


async def post_from(router: Router, address: str, body: dict[str, Any]) -> int:
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{router.settings.port}", connector=connector) as client,
        client.post("/v1/completions", json=body) as got,
    ):
        await got.read()
        return got.status


async def wait_with_batches(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await (wait_for_ever if isinstance(body["prompt"], list) else decode_well)(request, body)


@run
async def test_ten_requests_of_a_thousand_prompts_do_not_starve_another_client() -> None:
    p, d = prefill(mode=WRITE), decode(wait_with_batches, mode=WRITE)
    async with p, d, routing(p, d) as router:
        batches = [asyncio.create_task(post_from(router, "127.0.0.1", BATCH)) for _ in range(10)]
        async with asyncio.timeout(20):
            while await router.metric("kvbaton_router_queued_requests") != 8:
                await asyncio.sleep(0.01)
        await until(lambda: d.running == 2)
        assert await post_from(router, "127.0.0.2", {"prompt": "hello"}) == 200
        for batch in batches:
            batch.cancel()
        await until(lambda: d.is_idle)


@run
async def test_the_next_seat_goes_to_the_client_that_had_none() -> None:
    order: list[str] = []
    go_on = asyncio.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        order.append(str(len(body["prompt"])))
        await go_on.wait()
        return await decode_well(request, body)

    p, d = prefill(mode=WRITE), decode(hold, mode=WRITE)
    async with p, d, routing(p, d, max_per_decode=4) as router:
        requests = []
        for number, (address, count) in enumerate([("127.0.0.1", 3), ("127.0.0.1", 4), ("127.0.0.1", 4), ("127.0.0.2", 2)]):
            requests.append(asyncio.create_task(post_from(router, address, {"prompt": ["a"] * count})))
            async with asyncio.timeout(20):
                while await router.metric("kvbaton_router_queued_requests") != number:
                    await asyncio.sleep(0.01)
        go_on.set()
        assert [await request for request in requests] == [200] * 4
        assert order[0] == "3"
        assert order.index("2") < 3
        assert await router.metric("kvbaton_router_in_flight_requests") == 0


@run
async def test_a_request_of_more_sequences_than_an_instance_takes_has_it_alone() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d, max_per_decode=4) as router:
        assert (await router.post({"prompt": "a", "n": 100}))[0] == 200


@run
async def test_too_many_sequences_are_refused_with_the_limit() -> None:
    async with prefill(mode=WRITE) as p, decode(mode=WRITE) as d, routing(p, d, max_sequences=100) as router:
        for body in ({"prompt": "a", "n": 101}, {"prompt": ["a"] * 51, "n": 2}, {"prompt": "a", "n": 10**18}):
            status, _, content = await router.post(body)
            assert status == 400
            assert "the limit is 100" in json.loads(content)["error"]["message"]
        assert d.seen == []


@run
async def test_a_client_without_requests_in_flight_is_not_turned_away() -> None:
    p, d = prefill(mode=WRITE), decode(wait_with_batches, mode=WRITE)
    async with p, d, routing(p, d, max_in_flight=8) as router:
        batch = asyncio.create_task(post_from(router, "127.0.0.1", {"prompt": ["a"] * 8}))
        await until(lambda: d.running == 1)
        assert await post_from(router, "127.0.0.1", {"prompt": "hello"}) == 503
        assert await post_from(router, "127.0.0.2", {"prompt": "hello"}) == 200
        batch.cancel()

"""One attempt, given by hand what its calls answer: whose failure it is when both sides fail within moments of each other."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance, Registry
from kvbaton.errors import PeerLost
from kvbaton.router.attempt import Attempt, Failure
from kvbaton.router.board import Board, Loads
from kvbaton.router.bodies import parse_body
from kvbaton.router.choosing import Chooser, SeatRequest, Seats
from kvbaton.router.http.call import Call
from kvbaton.router.http.messages import InstanceAnswer
from kvbaton.router.http.upstream import Upstream, fetch
from kvbaton.router.pair_request import Digits, new_pair_request
from kvbaton.router.policy import RouteRequest
from kvbaton.router.settings import RouterSettings
from kvbaton.router.slots import SlotBook


class Wire:
    """An upstream that sends nothing and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def start(self, call: Call) -> None:
        self.calls.append(call)

    def clock(self) -> float:
        return 0.0


class Ear:
    """An owner that notes what it gets."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def decode_answered(self, answer: InstanceAnswer) -> None:
        self.received.append(answer)

    def decode_streamed(self, content_type: str, piece: bytes) -> None:  # noqa: ARG002
        self.received.append(piece)

    def decode_ended(self) -> None:
        self.received.append("end")

    def attempt_failed(self, failure: Failure) -> None:
        self.received.append(failure)


class Rig:
    """An attempt in push on one pair."""

    def __init__(self, mode: TransferMode = TransferMode.WRITE) -> None:
        registry = Registry()
        for kind, port in ((InstanceType.PREFILL, 9000), (InstanceType.DECODE, 9001)):
            address = f"host:127.0.0.1,handshake:{port},notify:{port}"
            message = Registration(type=kind, http_address=f"127.0.0.1:{port}", zmq_address=address, transfer_mode=mode)
            registry.register(message, 0.0)
        self.loads = Loads(Board(1, 8), 0, 0)
        settings = RouterSettings()
        seats = Chooser(settings, registry, self.loads, SlotBook(8)).choose(SeatRequest(RouteRequest({})), 0.0)
        assert isinstance(seats, Seats)
        self.wire, self.owner = Wire(), Ear()
        job = new_pair_request("/v1/completions", parse_body(b'{"prompt":"x"}'), seats.pair, b"", Digits())
        self.attempt = Attempt(self.owner, cast(Upstream, self.wire), settings, job, seats)
        self.attempt.start()

    def answer(self, number: int, status: int, content: bytes = b"{}") -> None:
        """The instance of that call answers."""
        call = self.wire.calls[number]
        if not call.is_over:
            call.is_over = True
            self.attempt.call_answered(call, InstanceAnswer(status, "application/json", content))

    @property
    def load(self) -> list[int]:
        return [self.loads.of(slot) for slot in range(2)]


def failure_of(rig: Rig) -> tuple[InstanceType, int]:
    (failure,) = rig.owner.received
    assert isinstance(failure, Failure)
    assert isinstance(failure.cause, InstanceAnswer)
    return failure.side, failure.cause.status


@pytest.mark.parametrize(
    ("status", "blamed"), [(400, InstanceType.DECODE), (503, InstanceType.DECODE), (500, InstanceType.DECODE)]
)
def test_prefill_fails_because_decode_refused(status: int, blamed: InstanceType) -> None:
    async def test() -> None:
        rig = Rig()
        rig.answer(0, 502)
        assert rig.owner.received == []
        rig.answer(1, status)
        await asyncio.sleep(0.1)
        assert failure_of(rig) == (blamed, status)
        assert rig.load == [0, 0]

    asyncio.run(test())


def test_prefill_fails_alone_and_decode_is_given_up() -> None:
    async def test() -> None:
        rig = Rig()
        rig.answer(0, 502)
        async with asyncio.timeout(20):
            while not rig.owner.received:
                await asyncio.sleep(0.005)
        assert failure_of(rig) == (InstanceType.PREFILL, 502)
        assert rig.wire.calls[1].is_over
        assert rig.load == [0, 0]

    asyncio.run(test())


def test_a_refusal_of_prefill_is_reported_at_once() -> None:
    async def test() -> None:
        rig = Rig()
        rig.answer(0, 400)
        assert failure_of(rig) == (InstanceType.PREFILL, 400)
        assert rig.wire.calls[1].is_over

    asyncio.run(test())


def test_prefill_may_fail_when_decode_has_begun() -> None:
    async def test() -> None:
        rig = Rig()
        rig.attempt.call_data(rig.wire.calls[1], b"data")
        rig.answer(0, 500)
        await asyncio.sleep(0.05)
        assert rig.owner.received == [b"data"]
        assert rig.load == [0, 1]

    asyncio.run(test())


def test_seats_are_left_one_by_one_and_prefill_ends_in_peace() -> None:
    async def test() -> None:
        rig = Rig()
        assert rig.load == [1, 1]
        rig.answer(1, 200)
        assert rig.load == [1, 0]
        assert not rig.wire.calls[0].is_over
        rig.attempt.call_lost(rig.wire.calls[0], PeerLost("late"))
        assert rig.load == [0, 0]
        assert len(rig.owner.received) == 1

    asyncio.run(test())


def test_in_pull_decode_is_called_with_what_prefill_answered_and_what_is_not_fetched_is_released() -> None:
    async def test() -> None:
        rig = Rig(TransferMode.READ)
        assert len(rig.wire.calls) == 1
        rig.answer(0, 200, b'{"kv_transfer_params":{"remote_host":"here"}}')
        assert b'"remote_host":"here"' in rig.wire.calls[1].payload
        rig.attempt.close()
        assert rig.wire.calls[2].payload.startswith(b"DELETE /handoffs/tx-")
        assert len(rig.wire.calls) == 3
        assert rig.load == [0, 0]

    asyncio.run(test())


def test_a_dial_that_fails_in_an_unforeseen_way_loses_its_call() -> None:
    async def ask() -> None:
        registration = Registration(
            type=InstanceType.PREFILL, http_address="127.0.0.1:1", zmq_address="", transfer_mode=TransferMode.READ
        )
        upstream = Upstream(5.0)
        with pytest.raises(PeerLost, match="cannot be called"):
            await asyncio.wait_for(fetch(upstream, Instance(registration, 0, 0), "/", 5.0, 100, "127.0.0.1:no-port"), 10)
        await upstream.close()

    asyncio.run(ask())

"""What comes to real instances from outside: bad bodies, sources that never answer, garbage on the control port, nothing."""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from driver_rig import Intruder
from served_instances import CLUSTER_KEY, SHORT_TIMEOUTS, Served, served_pair

from kvbaton.core.handoff import HandoffKey, Incarnation, TransferId
from kvbaton.core.messages import Release, encode
from kvbaton.launch.ports import PortPicker
from watching import wait_until

ALLOW = ("--allow", "127.0.0.0/8")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Served, Served]]:
    with served_pair(*SHORT_TIMEOUTS, *ALLOW) as (source, target):
        yield source, target
        for instance in (source, target):
            instance.wait_idle()
            assert instance.complaints() == []


def assert_works(pair: tuple[Served, Served]) -> None:
    """The next hand-off gives the text of a single instance."""
    source, target = pair
    number = next(_numbers)
    prompt = f"number {number} of the requests that must work"
    reply = target.decode(prompt, source.prefill(prompt, f"works-{number}"))
    assert reply.status == 200, reply.content
    assert reply.document["kvbaton"]["handed_off"] is True
    assert reply.text == source.client.complete(prompt).text


WRONG_TYPES: dict[str, tuple[Any, str]] = {
    "a text": ("yes", "kv_transfer_params"),
    "a number": (5, "kv_transfer_params"),
    "a list": ([], "kv_transfer_params"),
    "a switch as text": ({"do_remote_prefill": "true"}, "do_remote_prefill"),
    "both sides": ({"do_remote_prefill": True, "do_remote_decode": True}, "do_remote_prefill"),
    "a transfer id as number": ({"do_remote_prefill": True, "transfer_id": 7}, "transfer_id"),
    "no transfer id": ({"do_remote_prefill": True}, "transfer_id"),
    "an empty transfer id": ({"do_remote_decode": True, "transfer_id": ""}, "transfer_id"),
    "a transfer id beyond all limits": ({"do_remote_decode": True, "transfer_id": "x" * 257}, "transfer_id"),
    "no source": ({"do_remote_prefill": True, "transfer_id": "t"}, "remote_host"),
    "a host as list": ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": ["h"]}, "remote_host"),
    "an engine id as number": ({"do_remote_prefill": True, "transfer_id": "t", "remote_engine_id": 1}, "remote_engine_id"),
    "a port as text": (
        {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": "x"},
        "remote_port",
    ),
    "a port below all ports": (
        {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": -1},
        "remote_port",
    ),
    "a port above all ports": (
        {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": 65536},
        "remote_port",
    ),
    "no port": ({"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1"}, "remote_port"),
    "a host that is none": (
        {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "a,b", "remote_port": 9},
        "remote_host",
    ),
}


class TestHandoffParamsOfABody:
    """The hand-off parameters of a body are checked field by field; an address in them is a hint and no right."""

    @pytest.mark.parametrize(("params", "field"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
    def test_wrong_types_and_missing_fields_are_a_400_that_names_the_field(
        self, pair: tuple[Served, Served], params: Any, field: str
    ) -> None:
        for instance in pair:
            reply = instance.decode("Hello", params)
            assert reply.status == 400, reply.content
            assert field in reply.error
            assert reply.document["error"]["param"].startswith("kv_transfer_params")
        assert_works(pair)

    @pytest.mark.parametrize(
        "params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "extra": [1]}], ids=str
    )
    def test_nothing_asked_for_is_a_plain_request(self, pair: tuple[Served, Served], params: Any) -> None:
        texts = {instance.decode("Hello", params).text for instance in pair}
        assert texts == {pair[0].client.complete("Hello").text}

    @pytest.mark.parametrize("lists", [[-1], [2**70], "all", [[1, 2], [3]], {"0": [1]}], ids=str)
    def test_block_lists_of_clients_are_not_even_read(self, pair: tuple[Served, Served], lists: Any) -> None:
        source, target = pair
        prompt = f"with lists {lists}"
        params = source.prefill(prompt, f"lists-{next(_numbers)}") | {"remote_block_ids": lists}
        reply = target.decode(prompt, params)
        assert (reply.status, reply.text) == (200, source.client.complete(prompt).text)

    def test_another_engine_id_fails_by_name(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        params = source.prefill("Hello", "another engine")
        reply = target.decode("Hello", params | {"remote_engine_id": "unknown"})
        assert reply.status == 502
        assert "incarnation unknown is gone" in reply.error
        assert params["remote_engine_id"] in reply.error
        assert target.decode("Hello", params).status == 200, "the cache was not touched and still waits for its target"

    def test_another_prompt_fails_by_name(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        reply = target.decode("Good evening", source.prefill("Hello", "another prompt"))
        assert reply.status == 502
        assert "the source has another prompt of that transfer id" in reply.error

    def test_an_unknown_transfer_fails_at_once(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        params = source.prefill("Hello", "known")
        reply = target.decode("Hello", params | {"transfer_id": "unknown"})
        assert reply.status == 502
        assert "it is not held here" in reply.error
        assert target.decode("Hello", params).status == 200

    @pytest.mark.parametrize("host", ["10.255.255.1", "example.com", "::2"])
    def test_a_host_that_is_not_admitted_is_not_dialled(self, pair: tuple[Served, Served], host: str) -> None:
        source, target = pair
        before = target.counter('kvbaton_control_dropped_total{cause="not dialled"}')
        reply = target.decode("Hello", source.prefill("Hello", f"to {host}") | {"remote_host": host})
        assert reply.status == 502
        assert f"{host} is not on the allow-list (127.0.0.0/8)" in reply.error
        assert target.counter('kvbaton_control_dropped_total{cause="not dialled"}') > before
        assert_works(pair)

    def test_a_port_of_another_service_fails_by_name_and_is_left_alone(self, pair: tuple[Served, Served]) -> None:
        """An HTTP server is no peer: whatever it answers to our hello, it is not dialled again once no request waits for it."""
        source, target = pair
        params = source.prefill("Hello", "to HTTP")
        reply = target.decode("Hello", params | {"remote_port": source.port})
        assert reply.status == 502
        assert "is no peer of ours" in reply.error or "no progress for 2 s" in reply.error
        dropped = target.counter("kvbaton_control_dropped_total")
        assert target.decode("Hello", params).status == 200
        assert_works(pair)
        assert target.counter("kvbaton_control_dropped_total") == dropped


class TestSourceThatNeverAnswers:
    """A source that never answers costs its own request `transfer_timeout`, and the requests beside it nothing."""

    def test_a_black_hole_delays_no_other_request(self, pair: tuple[Served, Served]) -> None:
        _, target = pair
        port = PortPicker().pick()
        with socket.create_server(("127.0.0.1", port)), ThreadPoolExecutor(4) as pool:
            bad = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
            lost = [pool.submit(target.decode, "Hello", bad | {"transfer_id": f"hole-{number}"}) for number in range(4)]
            wait_until(lambda: target.counter('kvbaton_handoffs_live{side="target"}') == len(lost), "they wait")
            assert_works(pair)
            assert not any(request.done() for request in lost)
            for request in lost:
                assert request.result(20).status == 502
                assert "no progress for 2 s while handshaking" in request.result().error


def message() -> bytes:
    """A message about nothing, without a seal."""
    return encode(Incarnation("some peer"), "", Release(HandoffKey(TransferId("x")), 1))


class TestGarbageOnTheControlPort:
    """Garbage on the control port is dropped and counted in the metrics, and the instance serves on."""

    @pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
    def test_frames_that_are_no_messages(self, pair: tuple[Served, Served], side: int) -> None:
        instance, dice = pair[side], random.Random(side)
        whole = message()
        frames = [
            b"",
            dice.randbytes(5000),
            bytes(10_000_000),
            whole[:-1],
            whole[1:],
            whole[:40],
            bytes(16) + whole,
        ]
        before = instance.counter("kvbaton_control_dropped_total")
        with Intruder(CLUSTER_KEY.encode()) as intruder:
            intruder.dial(instance.control)
            for frame in frames:
                intruder.send(frame)
            intruder.send(b"too", b"many", b"parts")
            intruder.send(whole)
            counted = len(frames) + 2
            wait_until(lambda: instance.counter("kvbaton_control_dropped_total") == before + counted, "all are counted")
        assert_works(pair)

    @pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
    @pytest.mark.parametrize(
        "text", [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", random.Random(3).randbytes(99_999)], ids=["HTTP", "random"]
    )
    def test_what_does_not_even_speak_zmq(self, pair: tuple[Served, Served], side: int, text: bytes) -> None:
        with socket.create_connection(("127.0.0.1", pair[side].control_port), timeout=10) as connection:
            connection.sendall(text)
            assert_works(pair)


class TestExpiryWithoutTraffic:
    """No target fetches a held cache: it expires after `defer_timeout` without any traffic, and the agents go to sleep."""

    def test_it_expires_and_goes_idle(self, pair: tuple[Served, Served]) -> None:
        source, _ = pair
        expired = 'kvbaton_handoffs_total{outcome="expired",side="source"}'
        before = source.counter(expired)
        source.prefill("no target fetches this", "unclaimed")
        wait_until(lambda: source.counter(expired) == before + 1, "it expires")
        source.wait_idle()
        turns, until = source.counter("kvbaton_agent_turns_total"), time.monotonic() + 1.0
        wait_until(lambda: time.monotonic() >= until, "a while has passed")
        assert source.counter("kvbaton_agent_turns_total") - turns <= 5

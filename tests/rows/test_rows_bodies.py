"""Bad `kv_transfer_params` to real instances: an error by name for that request, and the next one is served."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from row_processes import IMPATIENT, Served, served_pair

ALLOW = ("--allow", "127.0.0.0/8")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Served, Served]]:
    with served_pair(*IMPATIENT, *ALLOW) as (source, target):
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


class TestVllmRow10:
    """What a body says about a hand-off is checked field by field; an address in it is a hint and no right."""

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
        reply = target.decode("Hello", params | {"remote_engine_id": "nobody"})
        assert reply.status == 502
        assert "incarnation nobody is gone" in reply.error
        assert params["remote_engine_id"] in reply.error
        assert target.decode("Hello", params).status == 200, "the cache was not touched and still waits for its target"

    def test_another_prompt_fails_by_name(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        reply = target.decode("Good evening", source.prefill("Hello", "another prompt"))
        assert reply.status == 502
        assert "the source has another prompt of that transfer id" in reply.error

    def test_a_transfer_that_nobody_knows_fails_at_once(self, pair: tuple[Served, Served]) -> None:
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

    def test_a_port_where_somebody_else_answers_is_bounded(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        reply = target.decode("Hello", source.prefill("Hello", "to HTTP") | {"remote_port": source.port})
        assert reply.status == 502
        assert "no progress for 2 s" in reply.error
        assert_works(pair)

"""Clients without the cluster key, on real instances: they list, release and start no hand-off, and have no host dialled."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from served_instances import Served, served_pair
from system import Client

from kvbaton.launch.ports import PortPicker
from watching import wait_until


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Served, Served]]:
    with served_pair() as (source, target):
        yield source, target
        for instance in (source, target):
            instance.wait_idle()
            assert instance.complaints() == []


def test_a_client_without_the_key_releases_nothing(pair: tuple[Served, Served]) -> None:
    source, target = pair
    params = source.prefill("Hello", "held for the router")
    stranger = Client(source.port)
    assert stranger.get("/handoffs").status == 401
    assert stranger.get("/handoffs/held%20for%20the%20router").status == 401
    assert stranger._ask("DELETE", "/handoffs/held%20for%20the%20router", None).status == 401
    assert Client(target.port).complete("Hello", kv_transfer_params=params).status == 401
    assert source.client.get("/handoffs").status == 200
    assert target.decode("Hello", params).status == 200, "the cache was still held"


def test_a_client_without_the_key_has_nothing_dialled(pair: tuple[Served, Served]) -> None:
    """Neither for its request nor to decline it."""
    _, target = pair
    port = PortPicker().pick()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.7)
        params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": port}
        for fields in ({}, {"max_tokens": 0}, {"n": 10**9}):
            assert Client(target.port).complete("Hello", kv_transfer_params=params, **fields).status == 401
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_release_with_the_key_frees_the_blocks_at_once(pair: tuple[Served, Served]) -> None:
    """What a router does when its client has left: without it the blocks are held for defer_timeout, 60 s."""
    source, _ = pair
    source.prefill("no target will fetch this", "left")
    assert source.counter('kvbaton_blocks{state="held"}') > 0
    assert source.client._ask("DELETE", "/handoffs/left", None).document == {"released": 1}
    wait_until(lambda: source.counter('kvbaton_blocks{state="held"}') == 0, "the blocks are free", timeout_s=30)

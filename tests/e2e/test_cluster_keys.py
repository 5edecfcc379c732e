"""Instances that do not share a cluster key, and clients that name addresses: what is refused, and with which error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from system import Client, Stand, Up, blocks

from kvbaton.launch.local import new_cluster_key
from watching import command_line, wait_until

pytestmark = pytest.mark.e2e

SHORT_LIMITS = ("--transfer-timeout", "2", "--defer-timeout", "3")


@pytest.fixture
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        yield stand


def _is_idle(port: int) -> bool:
    states = blocks(port)
    return states["held"] + states["in_use"] == 0


def _metric(port: int, cause: str) -> float:
    prefix = f'kvbaton_control_dropped_total{{cause="{cause}"}} '
    for line in Client(port).get("/metrics").content.decode().splitlines():
        if line.startswith(prefix):
            return float(line.removeprefix(prefix))
    raise AssertionError(f"no {prefix}")


def test_a_peer_with_another_key_is_refused_and_the_client_gets_the_reason(stand: Stand) -> None:
    other = new_cluster_key()
    prefill = stand.start("prefill", "prefill", "tiny", *SHORT_LIMITS)
    decode = stand.start("decode", "decode", "tiny", *SHORT_LIMITS, cluster_key=other)
    stand.wait_for("live", 1)
    assert stand.client.complete().status == 503, "the router has another key, too"
    to_target = {"do_remote_decode": True, "transfer_id": "t"}
    held = Client(prefill, stand.cluster_key).complete(max_tokens=1, kv_transfer_params=to_target)
    params = held.document["kv_transfer_params"]
    assert Client(decode, stand.cluster_key).complete(kv_transfer_params=params).status == 401
    reply = Client(decode, other).complete(kv_transfer_params=params)
    assert reply.status >= 500
    assert "wrong key" in reply.error
    assert "set the same on both sides" in reply.error
    assert _metric(prefill, "not authenticated") > 0
    for port in (prefill, decode):
        wait_until(partial(_is_idle, port), "all blocks are back")
        metrics = Client(port).get("/metrics").content.decode()
        assert stand.cluster_key not in metrics
        assert other not in metrics
    assert not [line for line in stand.lines if other in line or stand.cluster_key in line or "Traceback" in line]
    stand.fleets["decode"].stop()
    stand.start("decode again", "decode", "tiny", *SHORT_LIMITS)
    wait_until(lambda: stand.client.complete().status == 200, "the right key is all it needed")


def test_an_address_that_a_client_names_is_not_dialled(stand: Stand) -> None:
    decode = stand.start("decode", "decode", "tiny", "--allow", "127.0.0.1")
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.255.255.1", "remote_port": 9}
    for key in ("", stand.cluster_key):
        reply = Client(decode, key).complete(kv_transfer_params=params)
        assert reply.status == (502 if key else 401)
        assert "10.255.255.1" in reply.error
        assert "allow-list (127.0.0.1/32)" in reply.error
    assert _metric(decode, "not dialled") > 0
    assert Client(decode).complete().status == 200


def test_up_gives_its_router_and_instances_a_key_that_no_command_line_shows(tmp_path: Path) -> None:
    with Up("--model", "tiny", temporary=tmp_path) as up:
        assert up.client.complete().document["kvbaton"]["handed_off"] is True
        (router,) = [pid for pid in up.children() if " router --host " in command_line(pid)]
        parts = (up.child("prefill"), up.child("decode"), router)
        keys = {_environment(pid).get("KVBATON_CLUSTER_KEY", "") for pid in parts}
        (key,) = keys
        assert len(key) >= 32
        assert not [pid for pid in (*up.children(), up.process.pid) if key in command_line(pid)]
        assert key not in up.output
        assert key not in os.environ.values()


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

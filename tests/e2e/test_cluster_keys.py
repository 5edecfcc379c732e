"""Instances that do not share a cluster key, clients that name addresses: what is refused, and how; keys that are replaced."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


def test_the_key_is_replaced_in_three_steps_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    """Every part has a file of its own, so that parts are one step apart while requests go on."""
    old, new = new_cluster_key(), new_cluster_key()
    files = {name: tmp_path / name for name in ("router", "prefill", "decode", "late")}
    for path in files.values():
        _write(path, old)
    options = {name: ("--cluster-key-file", str(path)) for name, path in files.items()}
    with Stand(router_arguments=options["router"], transport="tcp") as stand:
        ports = {role: stand.start(role, role, "tiny", *options[role]) for role in ("prefill", "decode")}
        ports["router"] = stand.router_port
        stand.wait_for("live", 2)
        with _asking(stand.client) as answered:
            for number, keys in enumerate(((old, new), (new, old), (new,)), 1):
                for name, port in ports.items():
                    _write(files[name], *keys)
                    wait_until(partial(_has_loaded, port, number), f"{name} has taken step {number}", 60)
                    before = len(answered)
                    wait_until(lambda before=before: len(answered) > before + 5, "requests go on", 60)  # type: ignore[misc]
            _write(files["decode"], "short")
            wait_until(
                lambda: _counted(ports["decode"], "failed_cluster_key_loads") == 1, "a file without a key is counted", 60
            )
        assert {*answered} == {(200, True)}, "all were answered, and handed over"
        for role in ("prefill", "decode"):
            assert Client(ports[role], old).get("/handoffs").status == 401
            assert Client(ports[role], new).get("/handoffs").status == 200
        # The control: with the key that was removed, an instance is no member, and both sides log why.
        stand.start("late", "decode", "tiny", *options["late"])
        for side in ("router", "late"):
            wait_until(partial(_has_logged, stand, side, "wrong key: the seal does not fit"), f"{side} logs the reason", 60)
        stand.wait_for("live", 2)
        # One that starts now reads the new key, and opens every connection anew.
        stand.kill("decode")
        _write(files["decode"], new)
        stand.start("decode again", "decode", "tiny", *options["decode"])
        wait_until(lambda: stand.client.complete().status == 200, "a new process is a member", 60)
        assert not [line for line in stand.lines if old in line or new in line or "Traceback" in line]


@contextmanager
def _asking(client: Client) -> Iterator[list[tuple[int, bool]]]:
    """Clients that ask without a pause; how each request was answered: its status, and whether it was handed over."""
    answered: list[tuple[int, bool]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                reply = client.complete(max_tokens=2)
            except OSError:
                answered.append((0, False))
            else:
                answered.append((reply.status, reply.status == 200 and reply.document["kvbaton"]["handed_off"] is True))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield answered
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def _write(path: Path, *keys: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(keys) + "\n")
    fresh.chmod(0o600)
    fresh.replace(path)


def _counted(port: int, name: str) -> int:
    page = Client(port).get("/metrics").content.decode()
    (found,) = re.findall(rf"^kvbaton_(?:router_)?{name}_total (\S+)$", page, re.MULTILINE)
    return int(float(found))


def _has_loaded(port: int, count: int) -> bool:
    return _counted(port, "cluster_key_loads") == count


def _has_logged(stand: Stand, part: str, text: str) -> bool:
    return any(line.startswith(f"{part} |") and text in line for line in stand.lines)

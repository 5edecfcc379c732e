"""A whole set-up with certificates: equal answers, a control that notices, ports that give nothing in the clear, new keys."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from system import Up

from kvbaton.launch.local import kvbaton_command
from kvbaton.wire.certificates import make_certificate
from kvbaton.wire.tls import ClusterTls
from watching import listening_ports, wait_until

pytestmark = pytest.mark.e2e


def verify(*arguments: str) -> tuple[int, dict[str, object]]:
    command = kvbaton_command("verify", "--model", "tiny", "--requests", "6", "--transport", "tcp", "--encrypt", "--json")
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_answers_are_equal_and_the_control_notices(mode: str) -> None:
    code, report = verify("--mode", mode)
    assert (code, report["equal"], report["handed_off"]) == (0, 6, 6)
    assert report["settings"]["encrypt"] is True  # type: ignore[index]
    code, report = verify("--mode", mode, "--drop-writes")
    assert code == 1
    assert int(str(report["different"])) > 0


def test_no_port_of_an_instance_gives_anything_in_the_clear_and_new_keys_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = tmp_path / "certificates"
    make_certificate(certificates)
    monkeypatch.setenv("KVBATON_TLS_DIR", str(certificates))
    with Up("--model", "tiny", "--transport", "tcp", temporary=tmp_path) as up:
        assert up.client.complete().document["kvbaton"]["handed_off"] is True
        ports = {port for role in ("prefill", "decode") for port in listening_ports(up.child(role))}
        assert len(ports) >= 6, "HTTP, control and data of both"
        for port in ports:
            assert _plain(port) <= 400, f"port {port} answers a plain peer with more than a refusal"
        live = up.client.get("/instances").document["live"]
        for instance in live:
            url = f"https://{instance['http_address']}/metrics"
            with urllib.request.urlopen(url, timeout=10, context=ClusterTls(certificates).client) as answer:
                assert b"kvbaton_" in answer.read()
            with pytest.raises(OSError, match=r"certificate|reset|closed|EOF"):
                urllib.request.urlopen(url, timeout=10, context=_believing(certificates)).read()
        _bad_files_are_counted(up, certificates)
        _rotate_under_load(up, certificates)


def _plain(port: int) -> int:
    """How many bytes a plain peer gets: none, an alert of TLS, or a reason; never an answer."""
    received = b""
    for greeting in (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock, suppress(OSError):
            sock.sendall(greeting)
            while data := sock.recv(65536):
                received += data
    assert b"HTTP/1.1 200" not in received
    assert b"KVBATON" not in received
    return len(received)


def _believing(certificates: Path) -> ssl.SSLContext:
    """A client that believes the cluster's authority, and has no certificate itself."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.check_hostname = False
    return context


def _bad_files_are_counted(up: Up, certificates: Path) -> None:
    """A key that does not belong to the certificate: every process counts it, and serves as before."""
    assert _loads(up, certificates, "failed_certificate_loads") == [0, 0, 0]
    key = (certificates / "tls.key").read_bytes()
    other = certificates.parent / "other"
    make_certificate(other)
    _replace(certificates / "tls.key", (other / "tls.key").read_bytes())
    # With certificates of its own: this process cannot load what does not fit.
    shown = certificates.parent / "shown"
    shutil.copytree(certificates, shown)
    (shown / "tls.key").write_bytes(key)
    counted = "failed_certificate_loads"
    wait_until(lambda: _loads(up, shown, counted) == [1, 1, 1], "router, prefill and decode count the files", 30)
    assert up.client.complete().document["kvbaton"]["handed_off"] is True
    _replace(certificates / "tls.key", key)
    wait_until(lambda: _loads(up, shown) == [1, 1, 1], "all have taken the right key again", 30)


def _replace(path: Path, content: bytes) -> None:
    """In one step: a process that looks meanwhile would count half a file as another change."""
    half = path.with_suffix(".half")
    half.write_bytes(content)
    half.replace(path)


def _loads(up: Up, certificates: Path, counted: str = "certificate_loads") -> list[int]:
    """How many changes of the files the router and the instances have taken, or not taken."""
    pages = [up.client.get("/metrics").content.decode()]
    for instance in up.client.get("/instances").document["live"]:
        url = f"https://{instance['http_address']}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=ClusterTls(certificates).client) as answer:
            pages.append(answer.read().decode())
    found = [re.findall(rf"^kvbaton_(?:router_)?{counted}_total (\S+)$", page, re.MULTILINE) for page in pages]
    return [int(float(*counts)) for counts in found]


def _have_taken(up: Up, certificates: Path, changes: int) -> bool:
    """Whether router, prefill and decode have taken so many changes."""
    loads = _loads(up, certificates)
    return len(loads) == 3 and min(loads) >= changes


def _rotate_under_load(up: Up, certificates: Path) -> None:
    """Another authority, certificates of it, and the old one ended, while requests go on: none fails."""
    failed: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            reply = up.client.complete(max_tokens=2)
            if reply.status != 200:
                failed.append(reply.error)

    asking = threading.Thread(target=ask)
    asking.start()
    old = certificates.parent / "old"
    try:
        shutil.copytree(certificates, old)
        # Each step waits until all have taken the one before it, as docs/security.md says.
        make_certificate(certificates, new_authority=True)
        wait_until(lambda: _have_taken(up, certificates, 2), "all believe the new authority", 30)
        make_certificate(certificates)
        wait_until(lambda: _have_taken(up, certificates, 3), "all show certificates of the new authority", 30)
        _replace(certificates / "ca.crt", (certificates / "authority" / "ca.crt").read_bytes())
        wait_until(lambda: _have_taken(up, certificates, 4), "none believes the old authority", 30)
        instance = up.client.get("/instances").document["live"][0]["http_address"]
        assert _is_served(instance, certificates)
        assert not _is_served(instance, old)
        pid = up.child("decode")
    finally:
        stop.set()
        asking.join(60)
    assert failed == []
    assert up.child("decode") == pid
    os.kill(pid, signal.SIGKILL)  # its successor reads the new files, and meets peers that have followed them
    wait_until(lambda: _is_new_member(up, pid), "the new process is a member", 60)


def _is_new_member(up: Up, before: int) -> bool:
    try:
        return up.child("decode") != before and up.client.complete().status == 200
    except (OSError, ValueError):
        return False


def _is_served(address: str, certificates: Path) -> bool:
    try:
        with urllib.request.urlopen(f"https://{address}/health", timeout=10, context=ClusterTls(certificates).client) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

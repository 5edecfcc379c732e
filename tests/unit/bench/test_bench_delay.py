"""The relay that delays every byte, and the benchmark behind it on a small scale: what it reports, not how fast it is."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvbaton.bench.delayed import FAR_HOST, HOST, DelayBench, DelayRelay, run_delay_bench
from kvbaton.cli.main import make_app
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.ports import PortPicker

DELAY_S = 0.05
PATIENCE_S = 20.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server((HOST, PortPicker().pick())) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener


def _through(relay: DelayRelay, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    del relay
    near = socket.create_connection((FAR_HOST, server.getsockname()[1]), PATIENCE_S)
    far, _ = server.accept()
    far.settimeout(PATIENCE_S)
    return near, far


def _take(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"the connection ended after {len(data)} of {count} bytes"
        data += piece
    return bytes(data)


def test_every_byte_arrives_in_order_and_no_earlier_than_the_delay(server: socket.socket) -> None:
    with DelayRelay((server.getsockname()[1],)) as relay:
        relay.delay_s = DELAY_S
        begun = time.monotonic()
        near, far = _through(relay, server)
        assert time.monotonic() - begun >= DELAY_S, "the connection itself takes as long"
        with near, far:
            for giver, taker in ((near, far), (far, near)):
                sent = bytes(range(256)) * 20_000
                begun = time.monotonic()
                sender = threading.Thread(target=giver.sendall, args=(sent,))
                sender.start()
                first = _take(taker, 1)
                assert time.monotonic() - begun >= DELAY_S
                assert first + _take(taker, len(sent) - 1) == sent
                sender.join(PATIENCE_S)
            near.shutdown(socket.SHUT_WR)
            assert far.recv(1) == b"", "the end of one direction travels, too"
            far.sendall(b"x")
            assert near.recv(1) == b"x"


def test_a_relay_that_is_closed_cuts_its_connections_and_leaves_no_thread(server: socket.socket) -> None:
    before = set(threading.enumerate())
    with DelayRelay((server.getsockname()[1],)) as relay:
        near, far = _through(relay, server)
    with near, far:
        assert near.recv(1) == far.recv(1) == b""
    assert set(threading.enumerate()) <= before
    relay.close()


def test_a_port_that_is_in_use_is_named() -> None:
    with socket.create_server((FAR_HOST, PortPicker().pick())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalError, match=f"port {port} of {FAR_HOST}"):
            DelayRelay((port,))


def test_writes_are_measured_beside_reads(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "bench delay --delays 0,20 --handoffs 2 --rounds 1 --tokens 32 --layer-ms 1 --json".split()
    with pytest.raises(SystemExit) as end:
        make_app()(arguments)
    assert end.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "bench delay"
    assert document["ok"] is True
    (taken,) = document["rounds"]
    assert {len(values) for values in taken.values()} == {2}
    # Bytes that were computed last take one way at least; one that is read is announced, asked for, sent and confirmed.
    assert min(taken["source writes, 20 ms each way"]) >= 0.020
    assert min(taken["target reads, 20 ms each way"]) >= 0.100
    names = [row["name"] for row in document["rows"]]
    assert names[-1] == "hand-over, source writes, 20 ms each way"
    assert document["rows"][-1]["peer"] == "target reads"


def test_what_is_missing_is_an_error_and_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: through a relay that passes nothing on, no hand-over is reported."""
    monkeypatch.setattr(DelayRelay, "_open", lambda _self, near, _port: near.close())
    monkeypatch.setattr("kvbaton.bench.delayed._TASK_S", 1.0)
    with pytest.raises(LocalError, match="not within 1 s"):
        run_delay_bench(DelayBench((0,), 16, 0, 1, 1), print)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"delays_ms": (1, 2)}, "--delays"),
        ({"delays_ms": (0, -1)}, "--delays"),
        ({"tokens": 0}, "--tokens"),
        ({"layer_ms": -1}, "--layer-ms"),
    ],
)
def test_settings_that_make_no_sense_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DelayBench(**wrong)  # type: ignore[arg-type]

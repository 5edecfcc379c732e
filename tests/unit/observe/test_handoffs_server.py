"""Timelines over HTTP without the engine's own server: right answers, bounded clients, and a port that is closed."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvbaton.config import HTTP_KEY_HEADER, Trust, http_token
from kvbaton.core.handoff import HandoffKey, TransferId
from kvbaton.core.timeline import Side, Stage, note
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker
from kvbaton.observe import handoffs_server
from kvbaton.observe.handoffs_server import HandoffsServer
from kvbaton.observe.records import InstanceInfo, InstanceRecord
from kvbaton.observe.timelines import Timelines
from tls_files import other_tls, our_tls
from watching import wait_until


@pytest.fixture
def timelines() -> Timelines:
    return Timelines(InstanceInfo("prefill", "127.0.0.1:1", "i1"))


@pytest.fixture
def server(timelines: Timelines) -> Iterator[HandoffsServer]:
    serving = HandoffsServer(timelines, "127.0.0.1", PortPicker().pick(), Trust())
    serving.start()
    yield serving
    serving.close()


def get(server: HandoffsServer, path: str, **headers: str) -> dict[str, object]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        document: dict[str, object] = json.load(answer)
    return document


def test_a_transfer_and_the_list_of_them(timelines: Timelines, server: HandoffsServer) -> None:
    import msgspec

    key = HandoffKey(TransferId("tx/1 ?"), 0, 0)
    timelines.note(note(key, Side.SOURCE, Stage.ARRIVED, 5.0))
    timelines.note(note(key, Side.SOURCE, Stage.STARTED, 5.5))
    record = msgspec.convert(get(server, "/handoffs/tx%2F1%20%3F"), InstanceRecord)
    assert (record.transfer_id, record.instance.role) == ("tx/1 ?", "prefill")
    assert [note.at_s for note in record.sides[0].notes] == [0.0, 0.5]
    assert get(server, "/handoffs")["handoffs"]


def test_with_certificates_only_members_of_the_cluster_read_them(timelines: Timelines) -> None:
    serving = HandoffsServer(timelines, "127.0.0.1", PortPicker().pick(), Trust(tls_dir=our_tls().folder))
    serving.start()
    try:
        url = f"https://127.0.0.1:{serving.port}/handoffs"
        with urllib.request.urlopen(url, timeout=5, context=our_tls().client) as answer:
            assert json.load(answer)["handoffs"] == []
        believing = ssl.create_default_context(cafile=str(our_tls().folder / "ca.crt"))
        for context in (other_tls().client, believing):
            # The alert may be lost with the connection, which the server closes at once.
            with pytest.raises(OSError, match=r"certificate|violation|reset|closed"):
                urllib.request.urlopen(url, timeout=5, context=context).read()
        with pytest.raises(OSError, match=r"reset|closed|violated|Remote end"):
            get(serving, "/handoffs")
        with urllib.request.urlopen(url, timeout=5, context=our_tls().client) as answer:
            assert answer.status == 200
    finally:
        serving.close()


def test_with_a_key_only_holders_of_its_token_read_them(timelines: Timelines) -> None:
    key = b"a key of more than sixteen bytes"
    serving = HandoffsServer(timelines, "127.0.0.1", PortPicker().pick(), Trust(key))
    serving.start()
    try:
        for headers in ({}, {HTTP_KEY_HEADER: "x"}, {HTTP_KEY_HEADER: key.decode()}, {"Authorization": "Bearer é"}):
            for path in ("/handoffs", "/handoffs/tx-1"):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    get(serving, path, **headers)
                assert caught.value.code == 401
        assert get(serving, "/handoffs", **{HTTP_KEY_HEADER: http_token(key)})["handoffs"] == []
        assert get(serving, "/handoffs", Authorization=f"Bearer {http_token(key)}")["handoffs"] == []
    finally:
        serving.close()


@pytest.mark.parametrize("path", ["/handoffs/tx-2", "/handoffs/", "/", "/metrics", "/handoffs/" + "x" * 1000])
def test_what_is_not_known_is_404(server: HandoffsServer, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, path)
    assert caught.value.code == 404


def test_readers_that_say_nothing_do_not_keep_others_out_for_long(server: HandoffsServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(20)]
    try:
        silent[-1].settimeout(5)
        assert silent[-1].recv(1) == b"", "beyond the limit they are closed at once"
    finally:
        for each in silent:
            each.close()

    def answers() -> bool:
        try:
            return "handoffs" in get(server, "/handoffs")
        except (OSError, ValueError):
            return False

    wait_until(answers, "an answer after the silent ones have gone", 10)


def test_a_reader_that_never_comes_to_the_point_is_ended(server: HandoffsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes soon enough; the request never does."""
    monkeypatch.setattr(handoffs_server, "_REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
        slow.settimeout(0.05)

        def is_ended() -> bool:
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_ended, "the end of a request that takes for ever", 4)
    assert "handoffs" in get(server, "/handoffs")


def test_garbage_does_not_stop_it(server: HandoffsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as rude:
        rude.sendall(b"\x00\xff garbage\r\n\r\n")
        while rude.recv(4096):
            pass
    assert "handoffs" in get(server, "/handoffs")


def test_a_port_that_is_taken_is_named_and_one_that_is_closed_is_free_again(timelines: Timelines) -> None:
    first = HandoffsServer(timelines, "127.0.0.1", PortPicker().pick(), Trust())
    first.start()
    with pytest.raises(ConfigError, match=f"handoffs_port {first.port}"):
        HandoffsServer(timelines, "127.0.0.1", first.port, Trust())
    first.close()
    first.close()
    again = HandoffsServer(timelines, "127.0.0.1", first.port, Trust())
    again.close()

"""Certificates of a directory: what is refused by name, how they are followed, and both ends of a stream without sockets."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from kvbaton.errors import ConfigError
from kvbaton.wire.certificates import make_certificate
from kvbaton.wire.tls import ClusterTls, TlsError, TlsStream
from tls_files import copy_files, expired_files, other_tls, our_tls


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shake_hands(client: TlsStream, server: TlsStream) -> None:
    data = client.encrypt(b"")
    for _ in range(3):
        server.feed(data)
        client.feed(server.outgoing())
        data = client.outgoing()


def connect(client: ClusterTls, server: ClusterTls) -> tuple[TlsStream, TlsStream]:
    ends = TlsStream(client.client, is_listener=False), TlsStream(server.server, is_listener=True)
    shake_hands(*ends)
    return ends


def test_bytes_arrive_as_they_were_sent_and_are_not_on_the_wire() -> None:
    client, server = connect(our_tls(), our_tls())
    sent = bytes(range(256)) * 1000
    wire = client.encrypt(sent)
    assert sent[:16] not in wire
    assert server.feed(wire[:1000]) + server.feed(wire[1000:]) == sent
    assert client.feed(server.encrypt(b"back")) == b"back"


def test_what_is_queued_before_the_handshake_is_over_follows_it() -> None:
    client, server = TlsStream(our_tls().client, is_listener=False), TlsStream(our_tls().server, is_listener=True)
    assert server.feed(client.encrypt(b"early")) == b""
    assert client.feed(server.outgoing()) == b""
    assert server.feed(client.outgoing()) == b"early"


def test_a_byte_that_was_changed_ends_the_stream() -> None:
    client, server = connect(our_tls(), our_tls())
    wire = bytearray(client.encrypt(b"hand-off"))
    wire[-1] ^= 1
    with pytest.raises(TlsError, match=r"decryption failed|bad record mac"):
        server.feed(bytes(wire))


@pytest.mark.parametrize("data", [b"\xff" + bytes(9), b"GET / HTTP/1.1\r\n", b"KVBATON\x03"])
def test_a_plain_peer_is_named_on_either_side(data: bytes) -> None:
    for context, is_listener in ((our_tls().server, True), (our_tls().client, False)):
        stream = TlsStream(context, is_listener=is_listener)
        with pytest.raises(TlsError, match="does not encrypt") as caught:
            stream.feed(data)
        assert caught.value.is_plain
        assert stream.encrypt(b"secret") == b""


def test_another_authority_is_refused_by_both_sides() -> None:
    client, server = TlsStream(other_tls().client, is_listener=False), TlsStream(our_tls().server, is_listener=True)
    server.feed(client.encrypt(b""))
    with pytest.raises(TlsError, match=r"certificate of the peer is refused: unable to get local issuer|self.signed"):
        client.feed(server.outgoing())
    with pytest.raises(TlsError, match="the peer refuses the certificate of this side"):
        server.feed(client.outgoing())


def test_a_certificate_that_expires_later_is_refused_by_both_sides(tmp_path: Path) -> None:
    """The files of a running process expire under it: nothing is loaded again, and the peer sees it."""
    late = _unchecked(expired_files())
    client, server = TlsStream(late.client, is_listener=False), TlsStream(our_tls().server, is_listener=True)
    server.feed(client.encrypt(b""))
    client.feed(server.outgoing())
    with pytest.raises(TlsError, match="certificate of the peer is refused: certificate has expired"):
        server.feed(client.outgoing())
    with pytest.raises(TlsError, match="the peer refuses the certificate of this side: it has expired"):
        client.feed(server.outgoing())


def _unchecked(folder: Path) -> ClusterTls:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbaton.wire.tls._try_out", lambda *_: "")
        return ClusterTls(folder)


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_files_that_are_missing_or_malformed_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = copy_files(our_tls().folder, tmp_path / "files")
    for content in ("", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "\x00\xff" * 100):
        (folder / name).write_text(content)
        with pytest.raises(ConfigError, match=f"tls_dir .*{name}.*kvbaton keys"):
            ClusterTls(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"tls_dir .*{name}: No such file"):
        ClusterTls(folder)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder = copy_files(our_tls().folder, tmp_path / "files")
    (folder / "tls.key").write_bytes((other_tls().folder / "tls.key").read_bytes())
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        ClusterTls(folder)


@pytest.mark.parametrize(
    ("folder", "reason"), [(expired_files, "certificate has expired"), (lambda: other_tls().folder, "issuer|self.signed")]
)
def test_an_own_certificate_that_no_peer_would_take_is_refused(tmp_path: Path, folder: object, reason: str) -> None:
    files = copy_files(folder(), tmp_path / "files")  # type: ignore[operator]
    (files / "ca.crt").write_bytes((our_tls().folder / "ca.crt").read_bytes())
    with pytest.raises(ConfigError, match=f"tls.crt is not valid under ca.crt: .*({reason})"):
        ClusterTls(files)


def test_new_files_are_followed_without_a_restart(tmp_path: Path) -> None:
    """First the new authority is believed beside the old one, then members show its certificates, then the old one ends."""
    clock = Clock()
    folder = tmp_path / "files"
    make_certificate(folder)
    followed, slow = ClusterTls(folder, clock), ClusterTls(copy_files(folder, tmp_path / "slow"), clock)

    def both_ways(other: ClusterTls) -> None:
        clock.now += 2
        connect(other, followed)
        connect(followed, other)

    both_ways(slow)
    make_certificate(folder, new_authority=True)
    both_ways(slow)  # which does not believe the new authority yet
    copy_files(folder, slow.folder)
    make_certificate(folder)
    both_ways(slow)  # which shows a certificate of the old one
    (folder / "ca.crt").write_bytes((folder / "authority" / "ca.crt").read_bytes())
    both_ways(ClusterTls(copy_files(folder, tmp_path / "quick")))
    with pytest.raises(TlsError):
        connect(slow, followed)


def test_files_that_do_not_fit_change_nothing_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    folder = copy_files(our_tls().folder, tmp_path / "files")
    followed = ClusterTls(folder, clock)
    with caplog.at_level(logging.ERROR):
        for name in ("tls.key", "tls.crt"):
            (folder / name).write_bytes((other_tls().folder / name).read_bytes())
            clock.now += 2
            connect(our_tls(), followed)
            connect(our_tls(), followed)
    assert followed.failed_loads_total() == 2
    assert len(caplog.records) == 2
    assert all("the certificates stay as they were" in record.getMessage() for record in caplog.records)
    copy_files(our_tls().folder, folder)
    clock.now += 2
    connect(our_tls(), followed)
    assert (followed.loads_total(), followed.failed_loads_total()) == (1, 2)


def test_no_session_is_resumed() -> None:
    client, _ = connect(our_tls(), our_tls())
    assert client._tls.session is None or not client._tls.session.has_ticket


def test_the_key_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    make_certificate(tmp_path, ["kvbaton.example", "10.0.0.1"])
    for path in (tmp_path / "tls.key", tmp_path / "authority" / "ca.key"):
        assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="--host is 'a b'"):
        make_certificate(tmp_path, ["a b"])


@pytest.mark.parametrize("call", ["load_verify_locations", "load_cert_chain"])
def test_files_that_go_while_they_are_read_change_nothing_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    clock = Clock()
    followed = ClusterTls(copy_files(our_tls().folder, tmp_path / "files"), clock)

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, call, gone)
    copy_files(other_tls().folder, tmp_path / "files")
    clock.now += 60.0
    connect(our_tls(), followed)
    assert followed.failed_loads_total() == 1

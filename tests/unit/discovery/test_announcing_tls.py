"""Registrations inside TLS: they arrive, and a wrong, expired or missing certificate is named on both sides and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbaton.discovery.announcer import Announcer, ThreadAnnouncer
from kvbaton.discovery.dealers import TlsDealer
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import Cause, InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Registry
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker
from kvbaton.wire.certificates import make_certificate
from kvbaton.wire.tls import ClusterTls
from tls_files import expired_files, other_tls, our_tls
from watching import wait_until

KEY = b"the key of this cluster"
INSTANCE = Registration(
    type=InstanceType.PREFILL,
    http_address="127.0.0.1:8101",
    zmq_address="host:127.0.0.1,handshake:8101,notify:8101",
    transfer_mode=TransferMode.READ,
    incarnation="one",
)


@contextmanager
def listening(tls: ClusterTls | None, key: bytes | None = None) -> Iterator[tuple[Registry, Listener, str]]:
    registry, port = Registry(expire_after_s=60.0), PortPicker().pick()
    with Listener(registry, "127.0.0.1", port, cluster_key=key, tls=tls) as listener:
        yield registry, listener, f"127.0.0.1:{port}"


def count(registry: Registry) -> int:
    return len(registry.live(time.monotonic()))


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("kind", [ThreadAnnouncer, Announcer])
def test_an_instance_registers_and_deregisters(kind: type[ThreadAnnouncer] | type[Announcer], key: bytes | None) -> None:
    with listening(our_tls(), key) as (registry, listener, router):
        with kind(INSTANCE, [router], 0.1, cluster_key=key, tls_dir=our_tls().folder):
            wait_until(lambda: count(registry) == 1, "it is registered")
        wait_until(lambda: count(registry) == 0, "it has left")
        assert listener.malformed_total()[Cause.TLS_FAILED] == 0


def test_a_router_that_comes_back_is_found_again() -> None:
    port = PortPicker().pick()
    with ThreadAnnouncer(INSTANCE, [f"127.0.0.1:{port}"], 0.1, tls_dir=our_tls().folder):
        for _ in range(2):
            registry = Registry(expire_after_s=60.0)
            with Listener(registry, "127.0.0.1", port, tls=our_tls()):
                wait_until(lambda registry=registry: count(registry) == 1, "it is registered")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("announced", "listened", "here", "there"),
    [
        (other_tls, our_tls, "the certificate of the peer is refused", "refuses the certificate of this side"),
        (None, our_tls, "", "does not encrypt"),
        (our_tls, None, "does not encrypt", "the peer encrypts"),
    ],
    ids=["another authority", "plain instance", "plain router"],
)
def test_what_does_not_fit_is_refused_on_both_sides(
    announced: object, listened: object, here: str, there: str, caplog: pytest.LogCaptureFixture
) -> None:
    tls, folder = (listened() if listened else None), (announced().folder if announced else None)  # type: ignore[operator]
    with caplog.at_level(logging.WARNING), listening(tls) as (registry, listener, router):
        with ThreadAnnouncer(INSTANCE, [router], 0.1, tls_dir=folder):
            wait_until(lambda: there in caplog.text, "the router names it")
            wait_until(lambda: here in caplog.text, "the instance names it")
        counted = listener.malformed_total()
        assert counted[Cause.TLS_FAILED if tls else Cause.NOT_ZMTP] > 0
        assert count(registry) == 0


def test_an_expired_certificate_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="certificate has expired"):
        Announcer(INSTANCE, ["127.0.0.1:1"], tls_dir=expired_files())


def test_keys_rotate_while_an_instance_is_registered(tmp_path: Path) -> None:
    """The listener follows the files; what comes after it with certificates of before is refused, what has new ones is not."""
    make_certificate(tmp_path)
    now = [0.0]
    followed = ClusterTls(tmp_path, lambda: now[0])
    with listening(followed) as (registry, _, router):
        make_certificate(tmp_path, new_authority=True)
        make_certificate(tmp_path)
        now[0] += 2
        with ThreadAnnouncer(INSTANCE, [router], 0.1, tls_dir=tmp_path):
            wait_until(lambda: count(registry) == 1, "it is registered with the new one")


def test_a_dealer_keeps_its_connection_when_the_handshake_is_over() -> None:
    """One that is not admitted would be ended when the time for a handshake is over, and dialled anew for ever."""
    with listening(our_tls()) as (_, _, router):
        dealer = TlsDealer(router, our_tls().folder)
        try:
            wait_until(lambda: dealer.send(b"x"), "it is connected")
            assert dealer._connection is not None
            assert dealer._connection.is_known
        finally:
            dealer.close()

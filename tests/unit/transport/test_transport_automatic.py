"""What `auto` picks, and that it says so."""

from __future__ import annotations

import logging
import select
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport import choose
from kvbaton.transport.automatic import AutoTransport
from kvbaton.transport.base import Batch, Direction, Endpoint, LateWrites, PeerRank, Region, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.mori import MoriTransport
from mori_stand_in import MoriWorld

PEER = PeerRank(Incarnation("source"))


def make(incarnation: str) -> AutoTransport:
    settings = TransportSettings(incarnation=Incarnation(incarnation))
    transport = open_transport("auto", Region.of(np.zeros(64, np.uint8)), settings)
    assert isinstance(transport, AutoTransport)
    return transport


@pytest.fixture
def pair() -> Iterator[tuple[AutoTransport, AutoTransport]]:
    target, source = make("target"), make("source")
    yield target, source
    target.close()
    source.close()


def changed(endpoint: Endpoint, **details: str | int) -> Endpoint:
    return msgspec.structs.replace(endpoint, details=endpoint.details | details)


def test_the_fastest_that_both_offer_is_picked(pair: tuple[AutoTransport, AutoTransport]) -> None:
    target, source = pair
    target.connect(PEER, source.endpoint())
    assert str(target.choice(PEER)) == "local (the fastest that both ends offer)"
    target.revoke(PEER)
    assert target.choice(PEER) is None


def test_what_does_not_work_is_passed_over_loudly(
    pair: tuple[AutoTransport, AutoTransport], caplog: pytest.LogCaptureFixture
) -> None:
    target, source = pair
    inner = msgspec.json.decode(str(source.endpoint().details["local"]), type=Endpoint)
    elsewhere = msgspec.json.encode(changed(inner, host_id="elsewhere")).decode()
    with caplog.at_level(logging.WARNING, "kvbaton.transport"):
        target.connect(PEER, changed(source.endpoint(), local=elsewhere))
    choice = target.choice(PEER)
    assert choice is not None
    assert choice.name == "tcp"
    assert "another host" in caplog.text


def test_nothing_in_common_is_refused_with_every_reason(pair: tuple[AutoTransport, AutoTransport]) -> None:
    target, source = pair
    with pytest.raises(TransportError, match=r"local is not offered.*tcp is not offered.*nixl is left out"):
        target.connect(PEER, msgspec.structs.replace(source.endpoint(), details={}))
    with pytest.raises(TransportError, match="local is not usable"):
        target.connect(PEER, msgspec.structs.replace(source.endpoint(), details={"local": "{"}))


def test_writes_are_passed_through_where_all_that_may_be_picked_write() -> None:
    world, how = MoriWorld(), TransportSettings(unfenced_writes=True)
    memories = [np.full(64, fill, np.uint8) for fill in (1, 0)]
    regions = [Region.of(memory) for memory in memories]
    source, target = (AutoTransport(each, how, {"mori": MoriTransport(each, how, world.api())}, {}) for each in regions)
    assert source.directions == {Direction.READ, Direction.WRITE}
    assert source.late_writes is LateWrites.UNFENCED
    source.connect(PEER, target.endpoint())
    ticket = source.post(Batch(PEER, Direction.WRITE, np.array([[0, 8, 16]], np.uint64)))
    assert select.select([source.wakeup_fd], [], [], 10)[0]
    assert [(each.ticket, each.error) for each in source.poll()] == [(ticket, "")]
    assert memories[1].tolist() == [0] * 8 + [1] * 16 + [0] * 40
    source.close()
    target.close()


def test_writes_are_refused_where_one_that_may_be_picked_only_reads(pair: tuple[AutoTransport, AutoTransport]) -> None:
    target, source = pair
    assert target.directions == {Direction.READ}
    target.connect(PEER, source.endpoint())
    with pytest.raises(TransportError, match="local does not write"):
        target.post(Batch(PEER, Direction.WRITE, np.array([[0, 0, 8]], np.uint64)))


def test_what_cannot_be_opened_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(region: Region, settings: TransportSettings) -> AutoTransport:
        raise TransportError("not today")

    monkeypatch.setitem(choose.TRANSPORTS, "local", broken)
    transport = make("target")
    assert set(transport.endpoint().details) == {"tcp"}
    transport.close()
    monkeypatch.setitem(choose.TRANSPORTS, "tcp", broken)
    with pytest.raises(ConfigError, match="not today"):
        make("target")

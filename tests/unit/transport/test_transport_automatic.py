"""What `auto` picks, and that it says so."""

from __future__ import annotations

import logging
import select
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    LateWrites,
    PeerRank,
    Region,
    Ticket,
    Transport,
    TransportSettings,
)
from kvbaton.transport.choose import AutoTransport, TransportChoice, open_transport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from kvbaton.transport.mori import MoriTransport
from kvbaton.transport.table import TRANSPORTS
from kvbaton.transport.tcp import TcpTransport
from mori_stand_in import MoriWorld

PEER = PeerRank(Incarnation("source"))
ONE_RUN = np.array([[0, 0, 8]], np.uint64)


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


def test_what_cannot_be_opened_here_is_left_out_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(region: Region, settings: TransportSettings) -> AutoTransport:
        raise TransportError("not today")

    source = make("source")
    monkeypatch.setitem(TRANSPORTS, "local", replace(TRANSPORTS["local"], opener=broken))
    with caplog.at_level(logging.WARNING, "kvbaton.transport"):
        target = make("target")
    assert "auto does without local: not today" in caplog.text
    assert set(target.endpoint().details) == {"tcp"}
    target.connect(PEER, source.endpoint())
    assert str(target.choice(PEER)) == "tcp (local is left out here: not today)"
    assert "is reached by tcp (local is left out here: not today)" in caplog.text
    target.close()
    source.close()
    monkeypatch.setitem(TRANSPORTS, "tcp", replace(TRANSPORTS["tcp"], opener=broken))
    with pytest.raises(ConfigError, match="not today"):
        make("target")


def read_once(target: AutoTransport) -> str:
    target.post(Batch(PEER, Direction.READ, ONE_RUN))
    return next_error(target)


def next_error(target: AutoTransport) -> str:
    assert select.select([target.wakeup_fd], [], [], 10)[0]
    return target.poll()[0].error


def test_a_way_that_fails_from_the_first_byte_on_gives_place_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    """A fabric that both ends have, and that does not join them: nothing shows before bytes are to move."""
    hubs = MemoryHub(), MemoryHub()
    memories = [np.full(64, fill, np.uint8) for fill in (7, 0)]
    settings = TransportSettings(timeout_s=5.0)
    made = []
    for hub, memory in zip(hubs, memories, strict=True):
        region = Region.of(memory)
        inner: dict[str, Transport] = {"fabric": MemoryTransport(region, hub, settings), "tcp": TcpTransport(region, settings)}
        made.append(AutoTransport(region, settings, inner, {}))
    source, target = made
    filler = MemoryTransport(Region.of(np.zeros(64, np.uint8)), hubs[1], settings)
    target.connect(PEER, changed(source.endpoint(), fabric=msgspec.json.encode(filler.endpoint()).decode()))
    filler.close()
    with caplog.at_level(logging.WARNING, "kvbaton.transport"):
        assert "PeerLost" in read_once(target)
    assert str(target.choice(PEER)).startswith("tcp (fabric: PeerLost")
    assert "is reached by tcp (fabric: PeerLost" in caplog.text
    assert read_once(target) == ""
    assert memories[1][:8].tolist() == [7] * 8
    source.close()
    assert "PeerLost" in read_once(target)
    assert str(target.choice(PEER)).startswith("tcp")
    target.close()


def test_a_peer_that_is_revoked_while_its_way_changes_stays_revoked() -> None:
    settings, made = TransportSettings(timeout_s=5.0), []
    for _ in range(2):
        region = Region.of(np.zeros(64, np.uint8))
        made.append(AutoTransport(region, settings, {"fabric": Revoking(region, MemoryHub(), settings)}, {}))
    source, target = made
    region = Region.of(np.zeros(64, np.uint8))
    tcp = TcpTransport(region, settings)
    target._inner["tcp"], target._order = tcp, ("fabric", "tcp")
    fabric = target._inner["fabric"]
    assert isinstance(fabric, Revoking)
    fabric.by = target
    target._choose(
        PEER, changed(source.endpoint(), tcp=msgspec.json.encode(tcp.endpoint()).decode()), TransportChoice("fabric")
    )
    target._fall_back(PEER, "PeerLost: nothing came")
    assert target.choice(PEER) is None
    with pytest.raises(TransportError, match="not connected"):
        target.post(Batch(PEER, Direction.READ, np.array([[0, 0, 8]], np.uint64)))
    source.close()
    target.close()


class Revoking(MemoryTransport):
    """Lets somebody revoke the peer in the middle of the change."""

    by: AutoTransport | None = None

    def revoke(self, peer: PeerRank) -> None:
        super().revoke(peer)
        if self.by is not None:
            by, self.by = self.by, None
            by.revoke(peer)


def test_a_batch_that_completes_before_its_ticket_is_noted_is_told_afterwards() -> None:
    """Posting holds no lock, so another thread may poll in between."""
    hub, settings = MemoryHub(), TransportSettings(timeout_s=5.0)
    early: list[Completion] = []

    class Quick(MemoryTransport):
        def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
            ticket = super().post(batch, after)
            assert select.select([self.wakeup_fd], [], [], 5)[0]
            early.extend(target.poll())
            return ticket

    source_memory, target_memory = (np.full(64, fill, np.uint8) for fill in (7, 0))
    source = AutoTransport(
        Region.of(source_memory), settings, {"quick": MemoryTransport(Region.of(source_memory), hub, settings)}, {}
    )
    region = Region.of(target_memory)
    target = AutoTransport(region, settings, {"quick": Quick(region, hub, settings)}, {})
    target.connect(PEER, source.endpoint())
    ticket = target.post(Batch(PEER, Direction.READ, np.array([[0, 0, 64]], np.uint64)))
    assert early == []
    assert select.select([target.wakeup_fd], [], [], 5)[0]
    assert [(found.ticket, found.error) for found in target.poll()] == [(ticket, "")]
    assert not select.select([target.wakeup_fd], [], [], 0)[0]
    assert target_memory.tolist() == [7] * 64
    source.close()
    target.close()


def test_a_way_that_has_worked_is_kept(pair: tuple[AutoTransport, AutoTransport]) -> None:
    target, source = pair
    target.connect(PEER, source.endpoint())
    assert read_once(target) == ""
    source.close()
    assert "PeerLost" in read_once(target)
    assert str(target.choice(PEER)).startswith("local")


def test_a_batch_of_an_earlier_connection_says_nothing_about_the_next(pair: tuple[AutoTransport, AutoTransport]) -> None:
    target, source = pair
    target.connect(PEER, source.endpoint())
    target.post(Batch(PEER, Direction.READ, ONE_RUN), after=lambda: False)
    target.revoke(PEER)
    target.connect(PEER, source.endpoint())
    assert "revoked" in next_error(target)
    assert str(target.choice(PEER)) == "local (the fastest that both ends offer)"


def test_an_event_that_fails_says_nothing_about_the_way(pair: tuple[AutoTransport, AutoTransport]) -> None:
    def fails() -> bool:
        raise ValueError("not computed")

    target, source = pair
    target.connect(PEER, source.endpoint())
    target.post(Batch(PEER, Direction.READ, ONE_RUN), after=fails)
    assert "not computed" in next_error(target)
    assert str(target.choice(PEER)) == "local (the fastest that both ends offer)"


def test_all_are_closed_though_one_does_not_let_go() -> None:
    class Stubborn(MemoryTransport):
        def close(self) -> None:
            super().close()
            raise TransportError("it does not let go")

    region, settings = Region.of(np.zeros(64, np.uint8)), TransportSettings()
    tcp = TcpTransport(region, settings)
    transport = AutoTransport(region, settings, {"stubborn": Stubborn(region, MemoryHub(), settings), "tcp": tcp}, {})
    with pytest.raises(TransportError, match="does not let go"):
        transport.close()
    assert tcp.wakeup_fd == -1

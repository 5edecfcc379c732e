"""An exchange between two hosts, over a link that is far, lossy, or cut. See `two_hosts` for how."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from exchange_peer import ExchangePeer, exchange_peer
from two_hosts import TwoHosts, can_have_two_hosts

from kvbaton.transport.base import Direction, TransportSettings
from kvbaton.transport.exchange.base import TransferRequest
from kvbaton.transport.exchange.service import MemoryExchange, open_tcp
from watching import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.sampled(1, group="an exchange between hosts"),
    pytest.mark.skipif(not can_have_two_hosts(), reason="needs root, ip, tc and /dev/net/tun"),
]

MIB = 1 << 20
_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def both_hosts() -> Iterator[TwoHosts]:
    made = TwoHosts()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def hosts(both_hosts: TwoHosts) -> TwoHosts:
    both_hosts.mend()
    return both_hosts


@pytest.fixture
def exchange(hosts: TwoHosts) -> Iterator[MemoryExchange]:
    made = open_tcp("here", TransportSettings(host=hosts.here, timeout_s=1.5))
    yield made
    made.check()
    made.close()


@pytest.fixture
def peer(hosts: TwoHosts) -> Iterator[ExchangePeer]:
    with exchange_peer("tcp", host=hosts.there, prefix=hosts.command()) as started:
        yield started


@pytest.mark.parametrize("is_dropped", [False, True], ids=["as it is", "control"])
def test_delay_and_loss_change_no_byte(hosts: TwoHosts, exchange: MemoryExchange, peer: ExchangePeer, is_dropped: bool) -> None:
    """Blocks are written to the other host in another order, with a notice, and read back; the control stores none of them."""
    hosts.link.delay_s, hosts.link.loss = 0.01, 0.02
    memory = np.random.default_rng(1).integers(1, 256, MIB, dtype=np.uint8)
    before = memory.copy()
    own, remote = exchange.register(memory.ctypes.data, MIB), peer.register(MIB)
    if is_dropped:
        exchange.drop_stores(own)
    link = exchange.connect(peer.endpoint)
    blocks = np.arange(64, dtype=np.uint64) << 14
    there = np.stack([blocks, blocks[::-1], np.full(64, 1 << 14, np.uint64)], axis=1)
    written = link.post(TransferRequest(Direction.WRITE, own, remote, there, tag=7))
    assert written.wait(_LIMIT_S)
    assert written.error == ""
    assert peer.ask("notice", initiator="here", tag=7)
    memory[:] = 0
    read = link.post(TransferRequest(Direction.READ, own, remote, there[:, (1, 0, 2)].copy(order="F")))
    assert read.wait(_LIMIT_S)
    assert read.error == ""
    assert np.array_equal(memory, before) is not is_dropped
    assert hosts.link.lost_total > 0


def test_what_comes_after_a_cut_and_a_withdrawal_changes_no_byte(
    hosts: TwoHosts, exchange: MemoryExchange, peer: ExchangePeer
) -> None:
    """The bytes of a write wait in the kernel of this host when the other one withdraws the memory, and are sent after that."""
    memory = np.ones(MIB, np.uint8)
    own, remote = exchange.register(memory.ctypes.data, MIB), peer.register(MIB, 5)
    link = exchange.connect(peer.endpoint)
    hosts.link.is_cut = True
    runs = np.array([[0, 0, MIB]], np.uint64)
    status = link.post(TransferRequest(Direction.WRITE, own, remote, runs))
    peer.ask("withdraw", slot=remote.slot)
    carried = hosts.link.carried_total
    hosts.link.is_cut = False
    assert status.wait(_LIMIT_S)
    assert status.error
    wait_until(lambda: hosts.link.carried_total > carried, "the bytes to come")
    assert peer.content(remote.slot) == bytes([5]) * MIB


def test_a_cut_link_is_an_error_in_time_and_the_peer_is_reached_again(
    hosts: TwoHosts, exchange: MemoryExchange, peer: ExchangePeer
) -> None:
    memory = np.ones(4096, np.uint8)
    own, remote = exchange.register(memory.ctypes.data, 4096), peer.register(4096)
    runs = np.array([[0, 0, 4096]], np.uint64)
    link = exchange.connect(peer.endpoint)
    hosts.link.is_cut = True
    status = link.post(TransferRequest(Direction.WRITE, own, remote, runs))
    assert status.wait(_LIMIT_S)
    assert "no progress within 1.5 s" in status.error
    hosts.link.is_cut = False
    again = exchange.connect(peer.endpoint).post(TransferRequest(Direction.WRITE, own, remote, runs))
    assert again.wait(_LIMIT_S)
    assert again.error == ""
    assert peer.content(remote.slot) == bytes([1]) * 4096

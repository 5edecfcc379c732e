"""Transports between two hosts, over a link that is slow, far, lossy, or cut. See `two_hosts` for how."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_kinds import HOST_KINDS, params
from transport_peer import POISON
from transport_rig import Rig, make_runs, wait_until
from two_hosts import TwoHosts, can_have_two_hosts

from kvbaton.transport.nixl import NixlTransport
from kvbaton.transport.table import load
from kvbaton.transport.tcp import TcpTransport

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_have_two_hosts(), reason="needs root, ip, tc and /dev/net/tun"),
]

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def ucx_is_new() -> bool:
    """Whether UCX has not looked at the devices of this process yet; it does so once."""
    return "nixl._api" not in sys.modules


@pytest.fixture(scope="module")
def both_hosts(ucx_is_new: bool) -> Iterator[TwoHosts]:
    """The same for all tests, because of UCX."""
    made = TwoHosts()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def hosts(both_hosts: TwoHosts) -> TwoHosts:
    both_hosts.mend()
    return both_hosts


@pytest.fixture(params=params(HOST_KINDS))
def rig(request: pytest.FixtureRequest, ucx_is_new: bool, hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Sources on the other host; the target here. UCX must not see that it is one machine."""
    if load(request.param.entry.opener) is NixlTransport and not ucx_is_new:
        pytest.skip("UCX has looked at the devices of this process before there were two hosts; run this file by itself")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", hosts.device)
    made = Rig(request.param, source_prefix=hosts.command())
    try:
        yield made
    finally:
        made.take_down()


def test_a_slow_link_costs_time_and_nothing_else(rig: Rig, hosts: TwoHosts) -> None:
    """Slower than `timeout_s` for the whole batch, but never without progress for so long."""
    hosts.limit_rate("24mbit")
    target = rig.target(4 * MIB, host=hosts.here, timeout_s=0.75, slice_bytes=128 * KIB)
    source = rig.source(4 * MIB, host=hosts.there)
    target.transport.connect(source.peer, source.endpoint)
    runs = make_runs(*((n * 64 * KIB, (63 - n) * 64 * KIB, 63 * KIB) for n in range(64)))
    started = time.monotonic()
    assert target.read(source, runs).error == ""
    assert time.monotonic() - started > 0.75
    assert target.holds(source, runs)


def test_delay_and_loss_change_no_byte(rig: Rig, hosts: TwoHosts) -> None:
    hosts.link.delay_s, hosts.link.loss = 0.01, 0.02
    target = rig.target(4 * MIB, host=hosts.here)
    source = rig.source(4 * MIB, host=hosts.there)
    target.transport.connect(source.peer, source.endpoint)
    runs = make_runs(*((n * 64 * KIB, (63 - n) * 64 * KIB, 63 * KIB) for n in range(64)))
    assert target.read(source, runs).error == ""
    assert target.holds(source, runs)
    assert hosts.link.lost_total > 0


def test_a_cut_link_is_an_error_in_time_and_nothing_comes_late(rig: Rig, hosts: TwoHosts) -> None:
    hosts.limit_rate("100mbit")
    target = rig.target(32 * MIB, host=hosts.here, timeout_s=1.0, slice_bytes=256 * KIB)
    source = rig.source(32 * MIB, host=hosts.there)
    target.transport.connect(source.peer, source.endpoint)
    target.post(source, make_runs((0, 0, 32 * MIB)))
    wait_until(lambda: target.memory[0] != POISON)
    hosts.link.is_cut = True
    completion = target.wait()[0]
    assert completion.error
    assert completion.moved_bytes < 32 * MIB
    target.memory[:] = POISON
    carried = hosts.link.carried_total
    hosts.link.is_cut = False
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        assert (target.memory == POISON).all()
    assert hosts.link.carried_total > carried or not isinstance(target.transport, TcpTransport), (
        "the other end has sent nothing, so nothing was tested"
    )


def test_nothing_is_left_after_a_cut_link(rig: Rig, hosts: TwoHosts) -> None:
    source = rig.source(MIB, host=hosts.there)
    warm = rig.target(MIB, host=hosts.here)
    warm.transport.connect(source.peer, source.endpoint)
    assert warm.read(source, make_runs((0, 0, KIB))).error == ""
    warm.transport.close()
    before = (threading.active_count(), _descriptors())
    target = rig.target(MIB, host=hosts.here, timeout_s=1.0)
    target.transport.connect(source.peer, source.endpoint)
    hosts.link.is_cut = True
    assert target.read(source, make_runs((0, 0, KIB))).error
    target.transport.close()
    hosts.link.is_cut = False
    wait_until(lambda: (threading.active_count(), _descriptors()) == before)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))

"""Round robin: equal shares, every pair met, whatever the counts; and never a pair of two modes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.router.policy import RoundRobin, RouteRequest, missing_sides, pools_of

REQUEST = RouteRequest("/v1/completions", {})
READ, WRITE = TransferMode.READ, TransferMode.WRITE
PREFILL, DECODE = InstanceType.PREFILL, InstanceType.DECODE


def instances(kind: InstanceType, count: int, mode: TransferMode = READ) -> list[Instance]:
    made = []
    for number in range(count):
        port = 9000 + number + 100 * (mode is WRITE)
        address = f"host:127.0.0.1,handshake:{port},notify:{port}"
        message = Registration(type=kind, http_address=f"h:{port}", zmq_address=address, transfer_mode=mode)
        made.append(Instance(message, 0.0, 0.0))
    return made


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_pair_meets_and_shares_are_equal(prefills: int, decodes: int) -> None:
    policy, pools = RoundRobin(), pools_of(instances(PREFILL, prefills) + instances(DECODE, decodes))
    pairs = [policy.choose(REQUEST, pools) for _ in range(prefills * decodes)]
    assert len({(p.prefill.http_address, p.decode.http_address) for p in pairs}) == prefills * decodes
    assert set(Counter(p.prefill.http_address for p in pairs).values()) == {decodes}
    assert set(Counter(p.decode.http_address for p in pairs).values()) == {prefills}


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_modes_do_not_mix_and_no_pair_of_a_mode_is_left_out(p_read: int, d_read: int, p_write: int, d_write: int) -> None:
    live = instances(PREFILL, p_read) + instances(DECODE, d_read)
    live += instances(PREFILL, p_write, WRITE) + instances(DECODE, d_write, WRITE)
    policy, pools = RoundRobin(), pools_of(live)
    rounds = (p_read + p_write) * d_read * d_write
    pairs = [policy.choose(REQUEST, pools) for _ in range(rounds)]
    assert all(p.prefill.transfer_mode is p.decode.transfer_mode is p.transfer_mode for p in pairs)
    met = {(p.prefill.http_address, p.decode.http_address) for p in pairs}
    assert len(met) == p_read * d_read + p_write * d_write
    assert set(Counter(p.prefill.http_address for p in pairs).values()) == {d_read * d_write}


def test_a_mode_with_one_side_only_is_left_out() -> None:
    live = instances(PREFILL, 2, WRITE) + instances(PREFILL, 1) + instances(DECODE, 1)
    (pool,) = pools_of(live)
    assert pool.transfer_mode is READ
    assert missing_sides(live) == ""


def test_what_is_missing_is_named() -> None:
    assert missing_sides([]).startswith("no live prefill and no live decode instance")
    assert missing_sides(instances(DECODE, 1)).startswith("no live prefill instance")
    apart = missing_sides(instances(PREFILL, 1) + instances(DECODE, 1, WRITE))
    assert "prefill instances hand over by pull (READ) and decode instances by push (WRITE)" in apart


def test_instances_may_come_and_go_between_choices() -> None:
    policy = RoundRobin()
    for count in (3, 1, 5, 2):
        sources, targets = instances(PREFILL, count), instances(DECODE, 6 - count)
        pair = policy.choose(REQUEST, pools_of(sources + targets))
        assert pair.prefill in sources
        assert pair.decode in targets
        policy.finished(pair)

"""Round robin: equal shares, every pair met, whatever the counts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.router.policy import RoundRobin, RouteRequest


def instances(kind: InstanceType, count: int) -> list[Instance]:
    made = []
    for port in range(9000, 9000 + count):
        address = f"host:127.0.0.1,handshake:{port},notify:{port}"
        message = Registration(type=kind, http_address=f"h:{port}", zmq_address=address, transfer_mode=TransferMode.READ)
        made.append(Instance(message, 0.0, 0.0))
    return made


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_pair_meets_and_shares_are_equal(prefills: int, decodes: int) -> None:
    policy, request = RoundRobin(), RouteRequest("/v1/completions", {})
    sources, targets = instances(InstanceType.PREFILL, prefills), instances(InstanceType.DECODE, decodes)
    pairs = [policy.choose(request, sources, targets) for _ in range(prefills * decodes)]
    assert len({(p.prefill.http_address, p.decode.http_address) for p in pairs}) == prefills * decodes
    assert set(Counter(p.prefill.http_address for p in pairs).values()) == {decodes}
    assert set(Counter(p.decode.http_address for p in pairs).values()) == {prefills}


def test_instances_may_come_and_go_between_choices() -> None:
    policy, request = RoundRobin(), RouteRequest("/v1/completions", {})
    for count in (3, 1, 5, 2):
        sources, targets = instances(InstanceType.PREFILL, count), instances(InstanceType.DECODE, 6 - count)
        pair = policy.choose(request, sources, targets)
        assert pair.prefill in sources
        assert pair.decode in targets
        policy.finished(pair)

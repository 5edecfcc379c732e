"""Data-parallel ranks of a prefill instance behind one bootstrap port: each has a port of its own, counted from that one."""

from __future__ import annotations

import socket

import pytest
from sglang_instances import Instance, Request, instances, wait_for
from sglang_rig import ADDRESS, ROOM, Rig
from test_sglang_instances import PROMPT, TOKENS

from kvbaton.agent.engine_port import SourceRequest
from kvbaton.core.addresses import ControlAddress
from kvbaton.engines.sglang.halves import Poll
from kvbaton.engines.sglang.settings import parse_settings
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker

RANKS = 2
SOURCE, TARGET = [5, 6, 7, 8], [1, 2, 3, 4]


def _neighbours(ports: PortPicker) -> tuple[int, int]:
    """Two free ports, one after the other."""
    for _ in range(200):
        first = ports.pick()
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", first + 1)) and first + 1 < 32768:
                return first, first + 1
    raise AssertionError("no two free ports beside each other")


def test_each_rank_hands_over_the_rooms_that_are_its_own() -> None:
    """The same pages hold another cache on each rank, so a room that is asked of the wrong one would be noticed."""
    ports = PortPicker()
    prefills = [Instance("prefill", ports) for _ in range(RANKS)]
    for prefill, port in zip(prefills, _neighbours(ports), strict=True):
        prefill.control_port = port
    decode = Instance("decode", ports, prefill_dp_size=RANKS, poison=True)
    with instances(*prefills, decode):
        for room in (10, 11, 12, 13):
            rank = room % RANKS
            prefills[rank].fill(SOURCE, TOKENS, seed=3 + rank)
            source = Request(prefills[rank], room, PROMPT)
            target = Request(decode, room, PROMPT, prefills[0].address)
            assert target.poll() is Poll.BOOTSTRAPPING
            target.each("ready", rank)
            target.each("allocated", TARGET, 2, 0)
            wait_for(source, Poll.WAITING)
            source.each("begin", 4, 0)
            source.each("send", SOURCE)
            assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, target.reason
            assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, source.reason
            assert decode.problems(TARGET, TOKENS, seed=3 + rank) == []
            assert decode.problems(TARGET, TOKENS, seed=4 - rank) != []


def test_a_room_that_its_rank_refuses_at_the_door_ends_there() -> None:
    ports = PortPicker()
    prefills = [Instance("prefill", ports) for _ in range(RANKS)]
    for prefill, port in zip(prefills, _neighbours(ports), strict=True):
        prefill.control_port = port
    decode = Instance("decode", ports, prefill_dp_size=RANKS)
    with instances(*prefills, decode):
        source, other = Request(prefills[1], 11, PROMPT), Request(prefills[0], 10, PROMPT)
        decode.ranks[0].halves.refuse_source(11, prefills[0].address, "too long")
        wait_for(source, Poll.FAILED)
        assert "too long" in source.reason
        assert other.poll() is Poll.BOOTSTRAPPING


def test_the_source_is_asked_for_when_its_rank_is_known() -> None:
    rig = Rig(prefill_dp_size=4)
    target = rig.target()
    assert rig.agents.named("expect_source") == []
    target.ready(3)
    target.ready(2)
    (request,) = rig.agents.named("expect_source")
    assert isinstance(request, SourceRequest)
    host, _, port = ADDRESS.rpartition(":")
    assert request.source == ControlAddress.of(host, int(port) + 3)
    assert target.state is Poll.WAITING


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_that_no_prefill_has_fails_by_name(rank: int) -> None:
    rig = Rig(prefill_dp_size=2)
    target = rig.target()
    target.ready(rank)
    assert target.poll() is Poll.FAILED
    assert f"disagg_prefill_dp_rank is {rank}; by prefill_dp_size prefill instances have 2" in target.reason
    assert rig.agents.calls == []


def test_a_port_beyond_the_last_one_fails_by_name() -> None:
    target = Rig(prefill_dp_size=2).target(address="127.0.0.1:65535")
    target.ready(1)
    assert target.poll() is Poll.FAILED
    assert "bootstrap_port" in target.reason


def test_an_abort_before_the_rank_is_known_fails_at_once_and_frees_the_room() -> None:
    rig = Rig(prefill_dp_size=2)
    target = rig.target()
    target.abort()
    assert target.poll() is Poll.FAILED
    assert rig.agents.calls == []
    again = rig.target()
    again.ready(1)
    assert again.poll() is Poll.WAITING


def test_a_room_used_twice_fails_the_second_request_also_where_both_wait_for_their_rank() -> None:
    rig = Rig(prefill_dp_size=2)
    first, second = rig.target(), rig.target()
    first.ready(1)
    second.ready(1)
    assert first.poll() is Poll.WAITING
    assert second.poll() is Poll.FAILED
    assert f"room {ROOM} is in use" in second.reason
    assert len(rig.agents.named("expect_source")) == 1
    assert rig.agents.named("cancel") == []


def test_ranks_have_ports_of_their_own() -> None:
    settings = parse_settings('{"handoffs_port": 7000, "control_port": 7100}')
    assert settings.of_dp_rank(1, 0) is settings
    ranks = [settings.of_dp_rank(3, rank) for rank in range(3)]
    assert [(each.handoffs_port, each.control_port) for each in ranks] == [(7000, 7100), (7001, 7101), (7002, 7102)]
    assert parse_settings("{}").of_dp_rank(3, 2).handoffs_port == 0


def test_ranks_do_not_register_with_routers() -> None:
    settings = parse_settings('{"routers": ["127.0.0.1:8001"]}')
    with pytest.raises(ConfigError, match="has 2 data-parallel ranks, among which no router"):
        settings.of_dp_rank(2, 0)
    with pytest.raises(ConfigError, match="prefill_dp_size is 0"):
        parse_settings('{"prefill_dp_size": 0}')

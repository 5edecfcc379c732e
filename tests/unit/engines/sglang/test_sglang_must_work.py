"""What users of SGLang's own backends report as broken, each as a hand-off over real agents and memory."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from sglang_instances import Instance, Request, instances, wait_for, wait_until_over
from test_sglang_instances import PROMPT, ROOM, TOKENS, hand_over

from kvbaton.agent.channel import Channel
from kvbaton.core.handoff import Mode
from kvbaton.engines.instance import AgentSettings
from kvbaton.engines.sglang.halves import Poll
from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.faulty import Faults, FaultyTransport

FILES = Path("/proc/self/fd")
PAGES = [1 + 2 * page for page in range(-(-TOKENS // 4))]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "heads"),
    [(4, 2, 8), (2, 4, 8), (4, 2, 2), (2, 4, 2), (4, 1, 2), (1, 4, 2), (2, 8, 4), (3, 2, 6)],
)
def test_heads_arrive_right_also_where_ranks_share_or_split_them(prefill_tp: int, decode_tp: int, heads: int) -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports, prefill_tp, total_heads=heads)
    decode = Instance("decode", ports, decode_tp, total_heads=heads, poison=True)
    with instances(prefill, decode):
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        assert decode.problems(PAGES, TOKENS, seed=3) == []


def test_heads_that_cannot_be_divided_are_refused_at_start_with_both_numbers() -> None:
    with (
        pytest.raises(ConfigError, match="6 heads cannot be divided for tp4"),
        instances(Instance("prefill", PortPicker(), 4, total_heads=6)),
    ):
        pass


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"dtype": "float16"}, ("float16", "float32")),
        ({"layers": 3}, ("'0, 1'", "'0-2'")),
        ({"total_heads": 8}, ("4", "8")),
    ],
    ids=["dtype", "layers", "heads"],
)
def test_another_cache_is_refused_at_the_handshake_with_both_values(other: dict[str, object], both: tuple[str, str]) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports, **other)  # type: ignore[arg-type]
    with instances(prefill, decode):
        target = Request(decode, ROOM, PROMPT, prefill.address)
        wait_for(target, Poll.FAILED)
        assert all(value in target.reason for value in both), target.reason


@pytest.mark.parametrize("chunk_pages", [1, 3, 4])
def test_chunks_of_any_size_make_one_cache(chunk_pages: int) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports, poison=True)
    with instances(prefill, decode):
        assert hand_over(prefill, decode, chunk_pages=chunk_pages).poll() is Poll.SUCCESS
        assert decode.problems(PAGES, TOKENS, seed=3) == []


def test_a_grant_that_comes_before_its_prefill_waits_for_it() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        target = Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        target.poll()
        source = Request(prefill, ROOM, PROMPT)
        wait_for(source, Poll.WAITING)
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS


@pytest.mark.parametrize("page", [999, -1, 1 << 31])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_page_outside_the_pool_fails_by_name_and_nothing_is_written_there(side: str, page: int) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4 if side == "source" else page], 2, 0)
        wait_for(source, Poll.WAITING, Poll.FAILED)
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8 if side == "target" else page])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert f"page {page} is outside" in (source if side == "source" else target).reason
        assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED


def test_a_page_that_is_granted_twice_fails_by_name() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 2], 2, 0)
        wait_for(source, Poll.WAITING, Poll.FAILED)
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert "2" in target.reason


@pytest.mark.parametrize("mode", list(Mode))
def test_a_prompt_that_decode_has_cached_whole_still_gets_its_first_token(mode: Mode) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, mode=mode), Instance("decode", ports, mode=mode)
    prompt = tuple(range(16))
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, prompt), Request(decode, ROOM, prompt, prefill.address)
        target.each("ready")
        target.each("allocated", [], 2, 16)
        wait_for(source, Poll.WAITING)
        prefill.rows[0]["output_ids"][0].view("int32")[0] = 77
        source.each("begin", 4, 0)
        source.each("send", [5, 6, 7, 8])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, target.reason
        assert decode.rows[0]["output_ids"][2].view("int32")[0] == 77
        assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS


@pytest.mark.parametrize("state", ["waiting for pages", "granted", "streaming", "sent"])
def test_an_abort_of_decode_in_any_state_ends_its_prefill_and_frees_the_room(state: str) -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports)
    with instances(prefill, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        if state != "waiting for pages":
            target.each("allocated", [1, 2, 3, 4], 2, 0)
            wait_for(source, Poll.WAITING)
            source.each("begin", 4, 0)
            source.each("send", {"granted": [], "streaming": [5, 6], "sent": [5, 6, 7, 8]}[state])
        target.each("abort")
        # Everything may have landed before the abort was received; the request is over on both sides all the same.
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        wait_for(source, *([Poll.SUCCESS, Poll.FAILED] if state == "sent" else [Poll.FAILED]))
        wait_until_over(source, target)
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_that_decode_refuses_at_its_door_ends_its_prefill(first: str) -> None:
    """SGLang makes no receiver for a prompt that is too long for its cache; the prefill would wait until queue_timeout."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports, 2)
    with instances(prefill, decode):
        source = Request(prefill, ROOM, PROMPT) if first == "prefill" else None
        for rank in decode.ranks:
            rank.halves.refuse_source(ROOM, prefill.address, "1200 tokens are too many")
        if source is None:
            other = Request(prefill, ROOM + 1, PROMPT)
            decode.ranks[0].halves.refuse_source(ROOM + 1, prefill.address, "too many")
            # Decline notices keep their order, so this one ends after that of the room before it was received.
            wait_for(other, Poll.FAILED)
            source = Request(prefill, ROOM, PROMPT)
        wait_for(source, Poll.FAILED)
        assert "1200 tokens are too many" in source.reason


def test_a_request_that_prefill_refuses_at_its_door_ends_its_decode_request_and_no_other() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        live = Request(prefill, ROOM + 1, PROMPT)
        target = Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        until_parked = Request(decode, ROOM + 1, PROMPT, prefill.address)
        until_parked.each("ready")
        until_parked.each("allocated", [5, 6, 7, 8], 3, 0)
        wait_for(live, Poll.WAITING)
        for room in (ROOM + 1, ROOM):
            prefill.ranks[0].halves.refuse_target(room, "1200 tokens are too many")
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert "1200 tokens are too many" in target.reason
        assert live.poll() is Poll.WAITING


def test_a_request_that_prefill_refuses_before_its_pages_come_ends_its_decode_request_and_no_later_one() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports)
    with instances(prefill, decode):
        for rank in prefill.ranks:
            rank.halves.refuse_target(ROOM, "1200 tokens are too many")
        target = Request(decode, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert "1200 tokens are too many" in target.reason
        wait_until_over(target)
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS


@pytest.mark.parametrize("mode", list(Mode))
def test_reports_of_one_rank_do_not_count_for_another(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reports everything twice, and one of the two begins later: success before it has ended would show."""
    originals = Channel.send, AgentSettings.open_transport
    late: list[FaultyTransport] = []

    def send_twice(self: Channel, frame: bytes, timeout_s: float, meanwhile: Any = None) -> None:
        for _ in range(2 if threading.current_thread().name.startswith("kvbaton-rank") else 1):
            originals[0](self, frame, timeout_s, meanwhile)

    def open_late(self: AgentSettings, incarnation: Any, region: Any) -> Any:
        transport = originals[1](self, incarnation, region)
        if late or self.control_port != decode.control_port:
            return transport
        late.append(FaultyTransport(transport, region, Faults(delay_s=0.2)))
        return late[0]

    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, mode=mode), Instance("decode", ports, 2, mode=mode, poison=True)
    monkeypatch.setattr(Channel, "send", send_twice)
    monkeypatch.setattr(AgentSettings, "open_transport", open_late)
    with instances(prefill, decode):
        target = hand_over(prefill, decode)
        assert target.poll() is Poll.SUCCESS, target.reason
        assert decode.problems(PAGES, TOKENS, seed=3) == []
        assert late


def test_a_bootstrap_port_in_use_fails_at_start_by_name() -> None:
    ports = PortPicker()
    prefill = Instance("prefill", ports)
    with (
        socket.create_server(("127.0.0.1", prefill.control_port)),
        pytest.raises((KVBatonError, OSError), match=str(prefill.control_port)),
        instances(prefill),
    ):
        pass


@pytest.mark.parametrize("host", ["::1", "localhost", "0.0.0.0"])  # noqa: S104
def test_addresses_of_every_kind_are_served(host: str) -> None:
    ports = PortPicker()
    key: dict[str, Any] = {"advertise_host": "127.0.0.1", "allow": ("127.0.0.1",)} if host == "0.0.0.0" else {}  # noqa: S104
    prefill, decode = Instance("prefill", ports, host=host, **key), Instance("decode", ports, host=host, **key)
    with instances(prefill, decode):
        assert hand_over(prefill, decode).poll() is Poll.SUCCESS


def test_an_instance_that_ends_fails_its_peers_by_name_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports, 2), Instance("decode", ports, 2)
    with instances(decode):
        with instances(prefill):
            source, target = Request(prefill, ROOM, PROMPT), Request(decode, ROOM, PROMPT, prefill.address)
            target.each("ready")
            target.each("allocated", [1, 2, 3, 4], 2, 0)
            wait_for(source, Poll.WAITING)
            source.each("begin", 4, 0)
            source.each("send", [5])
        assert wait_for(target, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert target.reason
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_64_rooms_at_once_need_no_more_files_or_threads_than_one() -> None:
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        assert hand_over(prefill, decode, room=1).poll() is Poll.SUCCESS
        files, threads = len(list(FILES.iterdir())), threading.active_count()
        rooms = range(2, 66)
        sources = {room: Request(prefill, room, PROMPT) for room in rooms}
        targets = {room: Request(decode, room, PROMPT, prefill.address) for room in rooms}
        for target in targets.values():
            target.each("ready")
            target.each("allocated", [1, 2, 3, 4], 2, 0)
        for source in sources.values():
            wait_for(source, Poll.WAITING)
            source.each("begin", 4, 0)
            source.each("send", [5, 6, 7, 8])
        assert len(list(FILES.iterdir())) <= files + 2
        assert threading.active_count() <= threads
        for each in (*targets.values(), *sources.values()):
            assert wait_for(each, Poll.SUCCESS, Poll.FAILED) is Poll.SUCCESS, each.reason


def test_a_prefill_restarted_on_the_same_address_costs_at_most_one_request_and_no_restart_of_decode() -> None:
    """Here both are in one process, so the old one does not look dead: its successor is noticed when it answers."""
    ports = PortPicker()
    prefill, decode = Instance("prefill", ports), Instance("decode", ports)
    with instances(prefill, decode):
        assert hand_over(prefill, decode, room=1).poll() is Poll.SUCCESS
        prefill.close()
        again = Instance("prefill", ports)
        again.control_port = prefill.control_port
        with instances(again):
            first = Request(decode, 2, PROMPT, again.address)
            first.each("ready")
            first.each("allocated", [1, 2, 3, 4], 2, 0)
            wait_for(first, Poll.FAILED)
            assert "replaced" in first.reason
            assert hand_over(again, decode, room=3).poll() is Poll.SUCCESS


def test_a_decode_that_ends_gives_its_prefill_back_and_others_are_served() -> None:
    ports = PortPicker()
    prefill, ending, decode = (Instance(role, ports) for role in ("prefill", "decode", "decode"))
    with instances(prefill, ending, decode):
        source, target = Request(prefill, ROOM, PROMPT), Request(ending, ROOM, PROMPT, prefill.address)
        target.each("ready")
        target.each("allocated", [1, 2, 3, 4], 2, 0)
        wait_for(source, Poll.WAITING)
        source.each("begin", 4, 0)
        source.each("send", [5])
        ending.close()
        assert wait_for(source, Poll.SUCCESS, Poll.FAILED) is Poll.FAILED
        assert hand_over(prefill, decode, room=ROOM + 1).poll() is Poll.SUCCESS


def test_a_room_is_used_again_right_after_its_end_and_at_two_prefills_at_once() -> None:
    ports = PortPicker()
    one, other, decode = Instance("prefill", ports), Instance("prefill", ports), Instance("decode", ports)
    with instances(one, other, decode):
        for _ in range(3):
            assert hand_over(one, decode).poll() is Poll.SUCCESS
        waiting = Request(one, ROOM, PROMPT)
        assert hand_over(other, decode).poll() is Poll.SUCCESS
        assert waiting.poll() is Poll.BOOTSTRAPPING

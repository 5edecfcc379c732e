"""What users report of other backends, on SGLang's own pools and buffers and the backend's real classes, over real agents.

Here is what servers on CPUs cannot show: context-parallel ranks (SGLang has no attention for them on CPUs), events of a device,
a transport that fails on command, fifty peers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType
from sides import PAGE, PORTS, PROMPT, ROWS, TOKENS, Side, mha, parallel, tensors, wait

from kvbaton.engines.instance import AgentSettings
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE
from kvbaton.transport.base import Ticket
from kvbaton.transport.faulty import Faults, FaultyTransport

SOURCE, TARGET = [7, 3, 1], [2, 5, 9]
"""The pages of the prompt on either side."""
UNTOUCHED = -7.0
WAIT_S = 20.0
_FILES = Path("/proc/self/fd")


@contextmanager
def pair(**changes: Any) -> Iterator[tuple[Side, Side]]:
    """Two instances; the cache of decode has one number everywhere. `changes` are of decode."""
    sides = [Side("prefill", mha(), PORTS.pick())]
    try:
        sides.append(Side("decode", mha(), 0, **changes))
        for tensor in tensors(sides[0].pool):
            tensor.normal_()
        for tensor in tensors(sides[1].pool):
            tensor.fill_(UNTOUCHED)
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.close()


def made(prefill: Side, decode: Side, room: int = 99) -> tuple[Any, Any]:
    """A sender and a receiver of one room."""
    sender = prefill.make(KVClassType.SENDER, room, PROMPT, prefill.port)
    receiver = decode.make(KVClassType.RECEIVER, room, PROMPT, prefill.port)
    receiver.init(0)
    return sender, receiver


def granted(prefill: Side, decode: Side, room: int = 99) -> tuple[Any, Any]:
    """Both, when the prefill has its grant and has begun."""
    sender, receiver = made(prefill, decode, room)
    receiver.send_metadata(pages(TARGET), 3, [], 0)
    wait(sender, KVPoll.WaitingForInput)
    sender.init(len(SOURCE), 1)
    return sender, receiver


def delivered(sender: Any, receiver: Any) -> None:
    """Both sides succeed."""
    for each in (sender, receiver):
        assert wait(each, KVPoll.Success, KVPoll.Failed) == KVPoll.Success, each.half.reason


def served(prefill: Side, decode: Side, room: int = 7777) -> None:
    """A whole hand-off."""
    sender, receiver = granted(prefill, decode, room)
    sender.send(pages(SOURCE), [])
    delivered(sender, receiver)


def pages(numbers: list[int]) -> Any:
    return np.array(numbers, np.int32)


def wrong_tensors(prefill: Side, decode: Side) -> int:
    """How many tensors of decode are not what they were, with the prompt of prefill in its pages."""
    wrong = 0
    for source, target in zip(tensors(prefill.pool), tensors(decode.pool), strict=True):
        expected = torch.full_like(target, UNTOUCHED)
        for token in range(TOKENS):
            page, slot = divmod(token, PAGE)
            expected[TARGET[page] * PAGE + slot] = source[SOURCE[page] * PAGE + slot]
        wrong += not torch.equal(expected, target)
    return wrong


def only_the_slots_of_the_prompt_are_written() -> None:
    with pair() as (prefill, decode):
        assert wrong_tensors(prefill, decode) == len(tensors(decode.pool)), "the check notices what is not there"
        served(prefill, decode)
        assert wrong_tensors(prefill, decode) == 0


def a_context_parallel_rank_behind_the_first_sends_nothing_and_ends_with_it() -> None:
    """Each rank has the whole cache, so the first hands it over; SGLang takes the lowest state of all ranks."""
    with pair() as (prefill, decode):
        sides = [prefill]
        for rank in (1, 2):
            with parallel(attn_cp_size=3, attn_cp_rank=rank):
                sides.append(Side("prefill", mha(), prefill.port))
        for pages_of_chunks in ([[7, 3], [1]], [[7], [3], [1]], [[7, 3, 1]], [[7, 3, 1], []]):
            senders = [side.make(KVClassType.SENDER, 5, PROMPT, prefill.port) for side in sides]
            assert [sender.poll() for sender in senders] == [KVPoll.Bootstrapping, *[KVPoll.WaitingForInput] * 2]
            receiver = decode.make(KVClassType.RECEIVER, 5, PROMPT, prefill.port)
            receiver.init(0)
            receiver.send_metadata(pages(TARGET), 3, [], 0)
            wait(senders[0], KVPoll.WaitingForInput)
            for sender in senders:
                sender.init(len(SOURCE), 1)
                for chunk in pages_of_chunks:
                    sender.send(pages(chunk), [] if chunk is pages_of_chunks[-1] else None)
            for sender in senders:
                delivered(sender, receiver)
            assert wrong_tensors(prefill, decode) == 0
        senders = [side.make(KVClassType.SENDER, 6, PROMPT, prefill.port) for side in sides]
        for sender in senders:
            sender.abort()
        assert [wait(sender, KVPoll.Failed) for sender in senders] == [KVPoll.Failed] * 3
        _until(
            lambda: [sender.poll() for sender in senders] and not any(side.manager.halves.live for side in sides), "it is over"
        )


def a_last_chunk_without_pages_delivers_the_metadata() -> None:
    with pair() as (prefill, decode):
        sender, receiver = made(prefill, decode)
        receiver.send_metadata(pages([]), 3, [], len(SOURCE) * PAGE)
        wait(receiver, KVPoll.Failed)
        assert "12 of them cached" in receiver.half.reason, "ten tokens are in the prompt"
        sender, receiver = granted(prefill, decode, 100)
        assert sender.should_send_kv_chunk(0, True)
        prefill.metadata.output_ids[1, 0] = 41
        sender.send(pages(SOURCE[:2]), None)
        sender.send(pages([]), None)
        sender.send(pages(SOURCE[2:]), [])
        delivered(sender, receiver)
        assert decode.metadata.get_buf(3)[0][0].item() == 41
        assert wrong_tensors(prefill, decode) == 0


def more_or_fewer_pages_than_announced_fail_by_name_on_both_sides() -> None:
    with pair() as (prefill, decode):
        for room, announced, chunks in ((1, 3, ([7, 3], [1, 4])), (2, 3, ([7, 3, 1, 4],)), (3, 2, ())):
            sender, receiver = granted(prefill, decode, room)
            if announced != len(SOURCE):
                sender.init(announced, 1)
            for chunk in chunks:
                sender.send(pages(chunk), None)
            assert wait(sender, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
            assert f"{announced}" in sender.half.reason, sender.half.reason
            assert wait(receiver, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
        served(prefill, decode)


def pages_of_decode_that_come_early_twice_or_late_change_nothing() -> None:
    with pair() as (prefill, decode):
        receiver = decode.make(KVClassType.RECEIVER, 1, PROMPT, prefill.port)
        receiver.init(0)
        receiver.send_metadata(pages(TARGET), 3, [], 0)
        receiver.send_metadata(pages([11, 12, 13]), 4, [], 0)
        sender = prefill.make(KVClassType.SENDER, 1, PROMPT, prefill.port)
        wait(sender, KVPoll.WaitingForInput)
        sender.init(len(SOURCE), 1)
        sender.send(pages(SOURCE), [])
        delivered(sender, receiver)
        assert wrong_tensors(prefill, decode) == 0
        receiver.send_metadata(pages([11, 12, 13]), 4, [], 0)
        assert receiver.poll() == KVPoll.Success
        for side in (prefill, decode):
            assert not side.manager.halves.live, "nothing comes to life again"
        ended = decode.make(KVClassType.RECEIVER, 2, PROMPT, prefill.port)
        ended.init(0)
        ended.abort()
        ended.send_metadata(pages(TARGET), 3, [], 0)
        assert wait(ended, KVPoll.Failed) == KVPoll.Failed
        served(prefill, decode)


def a_failed_request_stays_failed_whatever_arrives_later() -> None:
    with pair() as (prefill, decode):
        sender, receiver = granted(prefill, decode)
        sender.send(pages(SOURCE), [])
        receiver.abort()
        assert wait(receiver, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed, "also where everything had landed"
        wait(sender, KVPoll.Failed, KVPoll.Success)
        served(prefill, decode, 99)
        assert receiver.poll() == KVPoll.Failed


def metadata_rows_outside_the_buffers_fail_by_name() -> None:
    with pair() as (prefill, decode):
        for room, row in ((1, ROWS), (2, -1), (3, 1 << 40)):
            sender, receiver = made(prefill, decode, room)
            receiver.send_metadata(pages(TARGET), row, [], 0)
            if row != -1:
                wait(sender, KVPoll.WaitingForInput)
                sender.init(len(SOURCE), 1)
                sender.send(pages(SOURCE), [])
            assert wait(receiver, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
            assert f"row {row}" in receiver.half.reason, receiver.half.reason
            wait(sender, KVPoll.Failed, KVPoll.Success)
        for room, row in ((4, ROWS), (5, -1)):
            sender, receiver = made(prefill, decode, room)
            receiver.send_metadata(pages(TARGET), 3, [], 0)
            wait(sender, KVPoll.WaitingForInput)
            sender.init(len(SOURCE), row)
            sender.send(pages(SOURCE), [])
            assert wait(sender, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
            assert f"row {row}" in sender.half.reason, sender.half.reason
            assert wait(receiver, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
        served(prefill, decode)


def other_metadata_buffers_are_refused_at_the_handshake_with_both_sizes() -> None:
    with pair(hidden=64) as (prefill, decode):
        sender, receiver = made(prefill, decode)
        for each in (receiver, sender):
            assert wait(each, KVPoll.Failed) == KVPoll.Failed
            assert "aux_format" in each.half.reason, each.half.reason
        (other,) = [name for name, sizes in _fields(receiver.half.reason).items() if len(set(sizes)) == 2]
        assert "hidden_states" in other


def _fields(reason: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in reason.replace("'", ",").split(","):
        words = part.split()
        if len(words) == 2 and words[1].isdecimal():
            found.setdefault(words[0], []).append(words[1])
    return found


def pages_outside_the_pool_or_granted_twice_fail_by_name() -> None:
    with pair() as (prefill, decode):
        for room, wrong in enumerate(([2, 5, 999], [2, 5, -1], [2, 5, 2]), 1):
            sender, receiver = made(prefill, decode, room)
            receiver.send_metadata(pages(wrong), 3, [], 0)
            wait(sender, KVPoll.WaitingForInput, KVPoll.Failed)
            sender.init(len(SOURCE), 1)
            sender.send(pages(SOURCE), [])
            assert wait(receiver, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
            assert str(wrong[-1]) in receiver.half.reason, receiver.half.reason
            assert wait(sender, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
        for room, wrong in enumerate(([7, 3, 999], [7, 3, -1]), 10):
            sender, receiver = granted(prefill, decode, room)
            sender.send(pages(wrong), [])
            assert wait(sender, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
            assert f"page {wrong[-1]} is outside" in sender.half.reason, sender.half.reason
            assert wait(receiver, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
        served(prefill, decode)
        assert wrong_tensors(prefill, decode) == 0


class _HoldingTransport(FaultyTransport):
    """What was posted does not end when it is cancelled, but when `end_cancelled` is called: a read that is under way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cancelled: list[Ticket] = []

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def end_cancelled(self) -> None:
        for ticket in self.cancelled:
            super().cancel(ticket)


@contextmanager
def pair_over(kind: type[FaultyTransport], faults: Faults) -> Iterator[tuple[Side, Side, Any]]:
    """A pair whose decode, which reads, has a transport that fails on command; and that transport."""
    opened: list[FaultyTransport] = []
    original = AgentSettings.open_transport

    def open_faulty(self: AgentSettings, incarnation: Any, region: Any) -> Any:
        opened.append(kind(original(self, incarnation, region), region, faults if opened else Faults()))
        return opened[-1]

    AgentSettings.open_transport = open_faulty  # type: ignore[method-assign]
    try:
        with pair() as (prefill, decode):
            yield prefill, decode, opened[1]
    finally:
        AgentSettings.open_transport = original  # type: ignore[method-assign]


def posts_that_a_full_queue_refuses_are_posted_again() -> None:
    with pair_over(FaultyTransport, Faults(refuse_posts=8)) as (prefill, decode, transport):
        served(prefill, decode)
        assert wrong_tensors(prefill, decode) == 0
        assert transport._faults.refuse_posts == 0, "the queue was full"


def an_error_of_the_transport_fails_both_sides_once_with_its_reason() -> None:
    with pair_over(FaultyTransport, Faults(fail_after=0)) as (prefill, decode, transport):
        sender, receiver = granted(prefill, decode)
        sender.send(pages(SOURCE), [])
        for each in (receiver, sender):
            assert wait(each, KVPoll.Failed, KVPoll.Success) == KVPoll.Failed
            assert "fail_after" in each.half.reason, each.half.reason
        transport.set_faults(Faults())
        served(prefill, decode)
        assert wrong_tensors(prefill, decode) == 0


def pages_of_a_failed_request_are_held_until_posted_reads_have_drained() -> None:
    with pair_over(_HoldingTransport, Faults(stall=True)) as (prefill, decode, transport):
        sender, receiver = granted(prefill, decode, 55)
        sender.send(pages(SOURCE[:2]), None)
        _until(lambda: transport._posted, "a read is posted")
        sender.abort()
        receiver.abort()
        _until(lambda: transport.cancelled, "it is cancelled")
        for _ in range(50):
            assert receiver.poll() == KVPoll.Transferring, receiver.half.reason
            assert not decode.manager.is_abort_release_safe(55, 1)
            assert receiver.abort_notified
        transport.end_cancelled()
        assert wait(receiver, KVPoll.Failed) == KVPoll.Failed
        assert decode.manager.is_abort_release_safe(55, 1)
        wait(sender, KVPoll.Failed)
        transport.set_faults(Faults())
        served(prefill, decode)
        assert wrong_tensors(prefill, decode) == 0


def _until(is_true: Any, what: str) -> None:
    waiting = threading.Event()
    for _ in range(int(WAIT_S / 0.005)):
        if is_true():
            return
        waiting.wait(0.005)
    raise AssertionError(f"not within {WAIT_S:g} s: {what}")


def a_thousand_rooms_of_fifty_peers_need_no_more_threads_and_files() -> None:
    prefill = Side("prefill", mha(), PORTS.pick())
    decodes: list[Side] = []
    try:
        for tensor in tensors(prefill.pool):
            tensor.normal_()
        for number in range(50):
            decodes.append(Side("decode", mha(), 0))
            served(prefill, decodes[-1], 1_000_000 + number)
        threads, files = threading.active_count(), len(list(_FILES.iterdir()))
        both = [made(prefill, decode, 20 * number + room) for number, decode in enumerate(decodes, 1) for room in range(20)]
        for _, receiver in both:
            receiver.send_metadata(pages(TARGET), 3, [], 0)
        for sender, _ in both:
            wait(sender, KVPoll.WaitingForInput)
            sender.init(len(SOURCE), 1)
            sender.send(pages(SOURCE), [])
        assert threading.active_count() <= threads
        assert len(list(_FILES.iterdir())) <= files + 2
        for sender, receiver in both:
            delivered(sender, receiver)
        assert len(both) == 1000
        assert not prefill.manager.halves.live
    finally:
        for side in (prefill, *decodes):
            side.close()


def no_call_of_the_scheduler_waits_for_agents_that_stand_still() -> None:
    """As they do where a peer is dead and a send would wait. A call that waited for them would wait until the limit."""
    with pair() as (prefill, decode):
        go_on, was_set = threading.Event(), []
        for side in (prefill, decode):
            side.manager.instance.port._submit(lambda: was_set.append(go_on.wait(WAIT_S)))
        sender, receiver = made(prefill, decode)
        receiver.send_metadata(pages(TARGET), 3, [], 0)
        dead = decode.make(KVClassType.RECEIVER, 98, PROMPT, 1)
        dead.init(0)
        for each in (sender, receiver, dead):
            each.poll()
            each.abort()
            each.poll()
        assert not was_set, "the agents still stand still"
        go_on.set()
        for each in (sender, receiver, dead):
            assert wait(each, KVPoll.Failed) == KVPoll.Failed
        assert was_set == [True, True]
        served(prefill, decode)


def rooms_at_the_limits_used_again_and_at_two_prefills_are_served() -> None:
    with pair() as (prefill, decode):
        for room in (1, (1 << 63) - 1, (1 << 63) - 1, 1):
            served(prefill, decode, room)
        other = Side("prefill", mha(), PORTS.pick())
        try:
            waiting = other.make(KVClassType.SENDER, 44, PROMPT, other.port)
            served(prefill, decode, 44)
            assert waiting.poll() == KVPoll.Bootstrapping
        finally:
            other.close()


def hosts_may_be_names_ipv6_or_every_address() -> None:
    for host, named, settings in (
        ("::1", "[::1]", ""),
        ("localhost", "localhost", ""),
        ("0.0.0.0", "127.0.0.1", '{"advertise_host": "127.0.0.1", "allow": ["127.0.0.1"]}'),  # noqa: S104
    ):
        os.environ[CONFIG_VARIABLE] = settings
        try:
            prefill = Side("prefill", mha(), PORTS.pick(), host=host)
            decode = Side("decode", mha(), 0, host=host)
        finally:
            os.environ[CONFIG_VARIABLE] = ""
        try:
            sender = prefill.make(KVClassType.SENDER, 9, PROMPT, prefill.port, named)
            receiver = decode.make(KVClassType.RECEIVER, 9, PROMPT, prefill.port, named)
            receiver.init(0)
            receiver.send_metadata(pages(TARGET), 3, [], 0)
            wait(sender, KVPoll.WaitingForInput)
            sender.init(len(SOURCE), 1)
            sender.send(pages(SOURCE), [])
            delivered(sender, receiver)
        finally:
            prefill.close()
            decode.close()


def a_chunk_is_announced_when_the_event_of_its_device_has_come() -> None:
    """SGLang sends a cached prefix early with overlap scheduling: an earlier forward may still write to it."""
    with pair() as (prefill, decode):
        has_come: list[int] = []
        sender, receiver = granted(prefill, decode)
        right = [tensor.clone() for tensor in tensors(prefill.pool)]
        for tensor in tensors(prefill.pool):
            tensor.fill_(0.5)
        sender._early_send_wait_event = SimpleNamespace(query=lambda: bool(has_come))
        sender.send(pages(SOURCE[:2]), None)
        sender.send(pages(SOURCE[2:]), [])
        for _ in range(50):
            assert (sender.poll(), receiver.poll()) == (KVPoll.WaitingForInput, KVPoll.Transferring)
        assert all((tensor == UNTOUCHED).all() for tensor in tensors(decode.pool)), "nothing was read before"
        for tensor, content in zip(tensors(prefill.pool), right, strict=True):
            tensor.copy_(content)
        has_come.append(1)
        delivered(sender, receiver)
        assert wrong_tensors(prefill, decode) == 0


def an_event_of_the_device_that_fails_fails_the_request_by_name() -> None:
    def query() -> bool:
        raise RuntimeError("the device was lost")

    with pair() as (prefill, decode):
        sender, receiver = granted(prefill, decode)
        sender._early_send_wait_event = SimpleNamespace(query=query)
        sender.send(pages(SOURCE), [])
        assert wait(sender, KVPoll.Failed) == KVPoll.Failed
        assert "the device was lost" in sender.half.reason, sender.half.reason
        assert wait(receiver, KVPoll.Failed) == KVPoll.Failed
        served(prefill, decode)


def an_instance_that_ends_fails_its_peers_by_name_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pair() as (prefill, decode):
        sender, receiver = granted(prefill, decode)
        sender.send(pages(SOURCE[:1]), None)
        prefill.close()
        assert wait(receiver, KVPoll.Failed) == KVPoll.Failed
        assert receiver.half.reason
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


REPORTED_CHECKS = (
    only_the_slots_of_the_prompt_are_written,
    a_context_parallel_rank_behind_the_first_sends_nothing_and_ends_with_it,
    a_last_chunk_without_pages_delivers_the_metadata,
    more_or_fewer_pages_than_announced_fail_by_name_on_both_sides,
    pages_of_decode_that_come_early_twice_or_late_change_nothing,
    a_failed_request_stays_failed_whatever_arrives_later,
    metadata_rows_outside_the_buffers_fail_by_name,
    other_metadata_buffers_are_refused_at_the_handshake_with_both_sizes,
    pages_outside_the_pool_or_granted_twice_fail_by_name,
    posts_that_a_full_queue_refuses_are_posted_again,
    an_error_of_the_transport_fails_both_sides_once_with_its_reason,
    pages_of_a_failed_request_are_held_until_posted_reads_have_drained,
    a_thousand_rooms_of_fifty_peers_need_no_more_threads_and_files,
    no_call_of_the_scheduler_waits_for_agents_that_stand_still,
    rooms_at_the_limits_used_again_and_at_two_prefills_are_served,
    hosts_may_be_names_ipv6_or_every_address,
    a_chunk_is_announced_when_the_event_of_its_device_has_come,
    an_event_of_the_device_that_fails_fails_the_request_by_name,
    an_instance_that_ends_fails_its_peers_by_name_and_leaves_no_thread,
)

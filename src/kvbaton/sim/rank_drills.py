"""Drills about what ranks meet rarely."""

from __future__ import annotations

import random

from msgspec import structs

from kvbaton.core.checks import PIECE_TOKENS
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.sim.drill_stage import Drill, make_request, make_stage
from kvbaton.sim.script import CacheScript, Fault, FaultKind, Script
from kvbaton.transport.base import LateWrites

__all__ = ["RANKS"]


def _stopped_while_full(rng: random.Random) -> Script:
    """A hand-off is cancelled while batches of it wait for a transport that takes nothing."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=rng.choice((1, 2, 6)))
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    at_s = rng.uniform(0.0, 0.05)
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET, FaultKind.PREEMPT))
    faults = (
        Fault(FaultKind.QUEUE_FULL, at_s, who=rng.choice(("p0", "d0")), for_s=rng.choice((0.1, 0.4)), number=0),
        Fault(kind, at_s + rng.uniform(0.0, 0.2), who="p0", number=0),
    )
    return structs.replace(script, faults=faults, rank_lag_s=rng.choice((0.0, 0.01, 0.05)))


def _full_for_long(rng: random.Random) -> Script:
    """A transport is full for longer than a hand-off may stand still, and takes a batch now and then."""
    request = make_request(rng, Mode.PUSH, tokens=8, chunk=1)
    writes = rng.random() < 0.5
    script, who = make_stage(rng, writes=writes, request=request), "p0" if writes else "d0"
    full = [Fault(FaultKind.QUEUE_FULL, 0.005, who=who, for_s=10.0, number=rank, is_whole=True) for rank in range(script.ranks)]
    return structs.replace(script, faults=tuple(full), move_s=0.01, step_s=0.002)


def _moves_less(rng: random.Random) -> Script:
    """A transport completes a batch of which a part is missing, and its count of bytes is all that shows it."""
    request = make_request(rng, rng.choice(list(Mode)), tokens=6, chunk=rng.choice((3, 6)), retries=1, retry_after_s=0.1)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    short = [Fault(FaultKind.COPY_FAILS, 0.0, who=who, other="short", number=0) for who in ("p0", "d0")]
    integrity = rng.choice((Integrity.OFF, Integrity.OFF, Integrity.FULL))
    return structs.replace(script, faults=tuple(short), integrity=integrity)


def _changed_on_the_way(rng: random.Random) -> Script:
    """A byte changes in transit, read or written, and everything is summed: the hand-off fails, and the next one does not."""
    request = make_request(rng, rng.choice(list(Mode)), retries=1, retry_after_s=0.1)
    writes = rng.random() < 0.6
    script, who = make_stage(rng, writes=writes, request=request), "p0" if writes and request.mode is Mode.PUSH else "d0"
    changed = Fault(FaultKind.CORRUPT, rng.uniform(0.0, 0.05), who=who, number=rng.randint(0, 1))
    return structs.replace(script, faults=(changed,), integrity=Integrity.FULL)


def _out_of_reach(rng: random.Random) -> Script:
    """A rank of one instance is reached by no transport of the others: what is sent between them fails, the rest goes on."""
    requests = tuple(
        make_request(
            rng,
            rng.choice((Mode.PUSH, Mode.PUSH, Mode.PULL)),
            tokens=rng.randint(2, 4),
            prefill=number % 2,
            decode=rng.randrange(2),
            at_s=0.1 * number,
            retries=rng.randint(0, 1),
        )
        for number in range(rng.randint(3, 5))
    )
    rank_lag_s = rng.choice((0.0, 0.01))
    # A rank of its own that cannot reach a writer takes no part in the copy: that one would wait for its session.
    script = make_stage(rng, writes=not rank_lag_s and rng.random() < 0.5, request=requests[0])
    return structs.replace(
        script,
        requests=requests,
        prefills=2,
        decodes=2,
        strangers=(rng.choice(("p0~", "p1~", "d0~", "d1~")),),
        rank_lag_s=rank_lag_s,
        # Several in one process are not run by production: none of them would notice that another one has failed.
        ranks=2 if rank_lag_s else 1,
        integrity=rng.choice(list(Integrity)),
        move_s=0.01,
        router_cancels=0.0,
    )


def _fails_to_connect(rng: random.Random) -> Script:
    """A transport fails to connect a peer, which may try again."""
    request = make_request(rng, rng.choice(list(Mode)), tokens=4, retries=2, retry_after_s=0.1)
    script = make_stage(rng, writes=rng.random() < 0.5, request=request)
    failed = Fault(FaultKind.COPY_FAILS, 0.0, who=rng.choice(("p0", "d0")), other="connect")
    gone = Fault(FaultKind.CUT, rng.uniform(0.1, 0.3), who="p0", other="d0", for_s=rng.choice((0.3, 9.0)))
    return structs.replace(script, faults=(failed, gone)[: rng.randint(1, 2)], ranks=1, router_cancels=0.0)


def _full_for_two(rng: random.Random) -> Script:
    """A transport is full, takes a batch now and then, and batches to two peers wait for it."""
    requests = tuple(
        make_request(rng, Mode.PUSH, tokens=6, chunk=rng.choice((1, 2)), decode=number % 2, at_s=rng.uniform(0.0, 0.02))
        for number in range(4)
    )
    script = make_stage(rng, writes=True, request=requests[0])
    full = [
        Fault(
            FaultKind.QUEUE_FULL,
            0.002,
            who="p0",
            other=rng.choice(("", "shared")),
            for_s=rng.choice((0.4, 6.0)),
            number=rank,
            is_whole=True,
        )
        for rank in range(script.ranks)
    ]
    return structs.replace(
        script, requests=requests, faults=tuple(full), decodes=2, move_s=rng.choice((0.001, 0.005)), step_s=0.002
    )


def _library_writes(rng: random.Random) -> Script:
    """Writes of a library that fences none of its peers, in small batches, some of which fail."""
    request = make_request(rng, rng.choice(list(Mode)), tokens=6, chunk=rng.choice((1, 2, 3)), retries=2, retry_after_s=0.1)
    script = make_stage(rng, writes=True, request=request)
    failed = Fault(FaultKind.COPY_FAILS, rng.uniform(0.0, 0.1), who=rng.choice(("p0", "d0")), number=0)
    return structs.replace(
        script,
        faults=(failed,)[: rng.randint(0, 1)],
        late_writes=LateWrites.UNFENCED,
        unfenced_writes=True,
        library_writes=True,
        few_cells=rng.choice((0, 2, 3)),
        integrity=rng.choice(list(Integrity)),
        rank_lag_s=rng.choice((0.0, 0.01)),
    )


def _sums_in_whole_turns(rng: random.Random) -> Script:
    """Spans are summed of which each is just as long as a turn, or two of them are."""
    requests = tuple(make_request(rng, rng.choice(list(Mode)), tokens=6, chunk=2, at_s=0.02 * number) for number in range(3))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return structs.replace(
        script, requests=requests, layers=1, few_cells=rng.choice((2, 4)), integrity=Integrity.FULL, move_s=0.002
    )


def _sums_pile_up(rng: random.Random) -> Script:
    """Spans of several hand-offs are to be summed at the same time, by a rank that has stood still for a while."""
    requests = tuple(make_request(rng, Mode.PUSH, tokens=6, chunk=rng.choice((2, 3))) for _ in range(3))
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    stands = Fault(FaultKind.PAUSE_RANK, rng.uniform(0.005, 0.02), who=rng.choice(("p0", "d0")), for_s=0.3, number=0)
    return structs.replace(
        script,
        requests=requests,
        faults=(stands,),
        few_cells=rng.randint(1, 3),
        integrity=Integrity.FULL,
        rank_lag_s=rng.choice((0.001, 0.01)),
        move_s=0.002,
    )


def _plain_transports(rng: random.Random) -> Script:
    """Transports that do no more than they have to, of which peers are lost, cut off or fenced, and come back."""
    requests = tuple(
        make_request(rng, rng.choice(list(Mode)), tokens=rng.randint(3, 6), at_s=0.1 * number, retries=rng.randint(0, 1))
        for number in range(rng.randint(1, 3))
    )
    script = make_stage(rng, writes=False, request=requests[0])
    kind = rng.choice((FaultKind.SEVER, FaultKind.CUT, FaultKind.CRASH, FaultKind.CANCEL_TARGET, FaultKind.STALL))
    who, other = rng.choice((("p0", "d0"), ("d0", "p0")))
    fault = Fault(kind, rng.uniform(0.01, 0.2), who=who, other=other, for_s=rng.choice((0.5, 5.0)), number=0)
    return structs.replace(
        script,
        requests=requests,
        faults=(fault,)[: rng.randint(0, 3)],
        late_writes=rng.choice((LateWrites.IMPOSSIBLE, LateWrites.REVOCABLE)),
        is_plain=True,
        integrity=rng.choice(list(Integrity)),
        rank_lag_s=rng.choice((0.0, 0.01)),
    )


def _with_engines(rng: random.Random, block_tokens: int, ranks: tuple[int, int]) -> Script:
    """Two instances with the embedded engine of production, and room for all that they are asked for."""
    mode = rng.choice(list(Mode))
    requests = tuple(
        make_request(rng, mode, tokens=rng.randint(6, 15), chunk=1, at_s=rng.uniform(0.0, 0.02), outputs=rng.randint(1, 4))
        for _ in range(rng.randint(2, 4))
    )
    script = make_stage(rng, writes=rng.random() < 0.5, request=requests[0])
    return structs.replace(
        script,
        requests=requests,
        ranks=1,
        caches=tuple(CacheScript(each, block_tokens, 64 // block_tokens * 2, step_tokens=rng.choice((1, 5))) for each in ranks),
        integrity=rng.choice((Integrity.FULL, Integrity.FULL, Integrity.SAMPLED)),
        move_s=0.0005,
        step_s=0.002,
        rank_lag_s=rng.choice((0.0005, 0.001)),
        has_driver=True,
    )


def _sums_in_blocks(rng: random.Random) -> Script:
    """Blocks are as long as a piece that is summed: orders are summed in one go, at once or in a turn, if they are short."""
    ranks = rng.choice((1, 2))
    script = _with_engines(rng, PIECE_TOKENS, (ranks, ranks))
    return structs.replace(script, few_cells=rng.choice((0, 50, 70, 130, 200, 300)))


def _block_sums_pile_up(rng: random.Random) -> Script:
    """Orders that are summed in one go pile up at a rank that stands still: of two, one waits for a turn of its own."""
    script = _with_engines(rng, PIECE_TOKENS, (1, 1))
    requests = tuple(structs.replace(each, at_s=0.0) for each in (*script.requests, script.requests[0]))
    stands = Fault(FaultKind.PAUSE_RANK, rng.uniform(0.0, 0.003), who=rng.choice(("p0", "p0", "d0")), for_s=0.3, number=0)
    return structs.replace(script, requests=requests, faults=(stands,), layers=1, few_cells=rng.choice((70, 100, 150)))


def _heads_on_several_ranks(rng: random.Random) -> Script:
    """There are more ranks than heads, so that some of a source have nothing to hand over; heads are in another order."""
    script = _with_engines(rng, rng.choice((2, 3, 4)), rng.choice(((4, 1), (4, 2), (2, 2), (4, 4))))
    first, second = script.caches
    caches = structs.replace(first, is_reversed=True), second
    return structs.replace(script, caches=caches, layers=rng.choice((1, 1, 2)))


def _ended_while_full(rng: random.Random) -> Script:
    """A hand-off ends while its batches wait for a transport that takes none for a while, and then takes what is left."""
    request = make_request(rng, Mode.PUSH, tokens=6, chunk=1)
    writes = rng.random() < 0.5
    script, who = make_stage(rng, writes=writes, request=request), "p0" if writes else "d0"
    at_s = rng.uniform(0.01, 0.04)
    full = [Fault(FaultKind.QUEUE_FULL, at_s, who=who, for_s=0.15, number=rank) for rank in range(script.ranks)]
    kind = rng.choice((FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET, FaultKind.CRASH, FaultKind.COPY_FAILS))
    end = Fault(kind, at_s + rng.uniform(0.0, 0.1), who="d0" if writes else "p0", number=0)
    failed = Fault(FaultKind.COPY_FAILS, 0.0, who=who, number=0)
    return structs.replace(
        script, faults=(*full, failed if kind is FaultKind.COPY_FAILS else end), step_s=0.01, move_s=rng.choice((0.02, 0.1))
    )


RANKS: tuple[Drill, ...] = (
    _ended_while_full,
    _stopped_while_full,
    _full_for_long,
    _moves_less,
    _changed_on_the_way,
    _out_of_reach,
    _fails_to_connect,
    _full_for_two,
    _library_writes,
    _sums_in_whole_turns,
    _sums_in_blocks,
    _heads_on_several_ranks,
    _plain_transports,
    _sums_pile_up,
    _block_sums_pile_up,
)

"""Legs with several ranks of a peer: instances of different shapes, each rank with its own memory and agent."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from agent_rig import card_of, key_of

from kvbaton.agent.ports import LegFailed, LegId, LegMoved, LegOpen, RankReport
from kvbaton.agent.rank import RankAgent
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import Executor, Incarnation, Span
from kvbaton.core.layout import Layout, uniform_group
from kvbaton.core.topology import head_range, stage_layers
from kvbaton.transport.base import AfterEvent, Batch, Completion, Direction, Endpoint, LateWrites, PeerRank, Ticket

LAYERS, HEADS, SIZE, BLOCKS, BLOCK_TOKENS = 4, 4, 2, 8, 4
TOKENS = 11
SOURCE_BLOCKS, TARGET_BLOCKS = ((5, 0, 3),), ((1, 6, 2),)
LEG = LegId(key_of("shapes"), 1, 1)
SOURCE, TARGET = Incarnation("source"), Incarnation("target")
POISON = 7777.0


Memories = dict[PeerRank, memoryview]


class Direct:
    """Copies at once and in both directions, between memories that all ranks share; or, as a control, not at all."""

    name, late_writes, directions, wakeup_fd = "direct", LateWrites.REVOCABLE, frozenset(Direction), -1

    def __init__(self, memories: Memories, me: PeerRank, *, drops: bool) -> None:
        self._memories, self._me, self._drops = memories, me, drops
        self._done: list[Completion] = []

    def endpoint(self) -> Endpoint:
        return Endpoint("direct", len(self._memories[self._me]), {})

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        assert endpoint.region_bytes == len(self._memories[peer])

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        del after
        ends = (batch.peer, self._me) if batch.direction is Direction.READ else (self._me, batch.peer)
        theirs, ours = (self._memories[end] for end in ends)
        for source, target, count in [] if self._drops else batch.runs.tolist():
            ours[target : target + count] = theirs[source : source + count]
        self._done.append(Completion(Ticket(len(self._done)), batch.wire_bytes))
        return Ticket(len(self._done) - 1)

    def poll(self) -> list[Completion]:
        return self._done

    def cancel(self, ticket: Ticket) -> None:
        raise AssertionError(ticket)

    def revoke(self, peer: PeerRank) -> None:
        raise AssertionError(peer)

    def close(self) -> None:
        return


class Rank:
    """One rank: its part of the layers and heads, filled with numbers that say what they are, or with poison."""

    def __init__(self, memories: Memories, name: Incarnation, cut: tuple[int, int, int, int], *, drops: bool) -> None:
        pp, pp_size, tp, tp_size = cut
        self.number = pp * tp_size + tp
        self.layers, self.heads = stage_layers(LAYERS, pp_size, pp), head_range(HEADS, tp_size, tp)
        shape = (len(self.layers), 2, BLOCKS, BLOCK_TOKENS, self.heads.count, SIZE)
        self.data: npt.NDArray[np.float32] = np.full(shape, POISON, np.float32)
        me = PeerRank(name, self.number)
        memories[me] = self.data.reshape(-1).view(np.uint8).data
        self.transport = Direct(memories, me, drops=drops)
        self.reports: list[RankReport] = []
        self.layout = self._layout()
        self.agent = RankAgent(
            self.number, self.layout, self.transport, self.reports.append, clock=time.monotonic, patience_s=30.0
        )

    def fill(self) -> None:
        self.data[...] = POISON + 1
        self.data[:, :, self._places(SOURCE_BLOCKS)[0], self._places(SOURCE_BLOCKS)[1]] = self.expected()

    def expected(self) -> npt.NDArray[np.float32]:
        """(layer, plane, token, head, channel) as one number."""
        heads = range(self.heads.start, self.heads.end)
        axes = np.ix_(self.layers, range(2), range(TOKENS), heads, range(SIZE))
        scaled = [axis * scale for axis, scale in zip(axes, (10_000, 1_000, 20, 4, 1), strict=True)]
        return np.asarray(sum(scaled[1:], start=scaled[0]), np.float32)

    def landed(self) -> npt.NDArray[np.float32]:
        blocks, tokens = self._places(TARGET_BLOCKS)
        values: npt.NDArray[np.float32] = self.data[:, :, blocks, tokens]
        return values

    def _places(self, lists: tuple[tuple[int, ...], ...]) -> tuple[Any, Any]:
        tokens = np.arange(TOKENS)
        return np.array(lists[0])[tokens // BLOCK_TOKENS], tokens % BLOCK_TOKENS

    def _layout(self) -> Layout:
        layer, plane, block, token, head, _ = self.data.strides
        group = uniform_group(
            kind="full",
            layers=tuple(self.layers),
            planes=2,
            blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            head_start=self.heads.start,
            heads=self.heads.count,
            total_heads=HEADS,
            head_size=SIZE,
            dtype="float32",
            element_bytes=4,
            layer_offsets=tuple(place * layer for place in range(len(self.layers))),
            plane_stride=plane,
            block_stride=block,
            token_stride=token,
            head_stride=head,
        )
        return Layout(self.data.nbytes, (group,))


class Instance:
    def __init__(self, memories: Memories, name: Incarnation, pp: int, tp: int, *, drops: bool = False) -> None:
        self.ranks = [Rank(memories, name, (stage, pp, rank, tp), drops=drops) for stage in range(pp) for rank in range(tp)]
        cards = tuple(RankCard(rank.number, rank.layout, (rank.transport.endpoint(),)) for rank in self.ranks)
        shape = f"pp{pp},tp{tp}"
        self.card: Card = msgspec.structs.replace(card_of(name), incarnation=name, ranks=cards, shape=shape)

    def connect(self, other: Instance) -> None:
        for rank in self.ranks:
            rank.agent.connect(other.card, self.card)


def hand_over(source: Instance, target: Instance, executor: Executor) -> list[RankReport]:
    """Move everything in spans of two layers and two chunks; what the ranks that copy report."""
    for one, other in ((source, target), (target, source)):
        one.connect(other)
    movers, peer = (target, SOURCE) if executor is Executor.TARGET_READS else (source, TARGET)
    spans = tuple(
        Span(number, *tokens, first, first + 2)
        for number, (tokens, first) in enumerate((tokens, first) for tokens in ((0, 8), (8, TOKENS)) for first in (0, 2))
    )
    for rank in movers.ranks:
        rank.agent.open_leg(LegOpen(LEG, peer, executor, 0, TARGET_BLOCKS, 0, TOKENS))
        rank.agent.move(LEG, SOURCE_BLOCKS, spans)
        rank.agent.poll()
    return [report for rank in movers.ranks for report in rank.reports]


SHAPES = [
    ((1, 2), (1, 4)),
    ((1, 4), (1, 1)),
    ((1, 8), (1, 2)),
    ((1, 2), (1, 8)),
    ((2, 1), (1, 2)),
    ((2, 2), (1, 4)),
    ((1, 4), (2, 2)),
]


@pytest.mark.parametrize("executor", list(Executor))
@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_every_rank_gets_its_part_and_nothing_twice(
    prefill: tuple[int, int], decode: tuple[int, int], executor: Executor
) -> None:
    memories: Memories = {}
    source, target = Instance(memories, SOURCE, *prefill), Instance(memories, TARGET, *decode)
    for rank in source.ranks:
        rank.fill()
    reports = hand_over(source, target, executor)
    assert [report for report in reports if not isinstance(report, LegMoved)] == []
    for rank in target.ranks:
        np.testing.assert_array_equal(rank.landed(), rank.expected())
    needed = sum(rank.expected().size * 4 for rank in target.ranks)
    moved = [(report.bytes_planned, report.bytes_moved) for report in reports if isinstance(report, LegMoved)]
    assert (sum(planned for planned, _ in moved), sum(done for _, done in moved)) == (needed, needed)


def test_control_without_the_copies_the_poison_stays() -> None:
    memories: Memories = {}
    source, target = Instance(memories, SOURCE, 1, 2), Instance(memories, TARGET, 1, 4, drops=True)
    for rank in source.ranks:
        rank.fill()
    hand_over(source, target, Executor.TARGET_READS)
    assert all((rank.landed() == POISON).all() for rank in target.ranks)


def test_a_peer_out_of_reach_is_told_when_something_is_to_be_moved() -> None:
    memories: Memories = {}
    source, target = Instance(memories, SOURCE, 1, 2), Instance(memories, TARGET, 1, 1)
    agent = target.ranks[0].agent
    nowhere = msgspec.structs.replace(
        source.card, ranks=tuple(msgspec.structs.replace(rank, endpoints=()) for rank in source.card.ranks)
    )
    with pytest.raises(Exception, match="no common transport"):
        agent.connect(nowhere, target.card)
    agent.open_leg(LegOpen(LEG, SOURCE, Executor.TARGET_READS, 0, TARGET_BLOCKS, 0, TOKENS))
    agent.move(LEG, SOURCE_BLOCKS, (Span(0, 0, TOKENS, 0, LAYERS),))
    (report,) = target.ranks[0].reports
    assert isinstance(report, LegFailed)
    assert "no common transport" in report.reason

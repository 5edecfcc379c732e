"""Rank agents of instances with different shapes: each target rank gathers what it holds from the sources it meets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from agent_rig import card_of, key_of

from kvbaton.agent.rank import RankAgent, RegionMemory, find_routes
from kvbaton.agent.rank_orders import (
    Connect,
    CopyId,
    MoveSpans,
    OpenCopy,
    RankReport,
    SpansMoved,
    SpansSummed,
    SumSpans,
    sums_by_leg,
)
from kvbaton.core.card import Card, RankCard
from kvbaton.core.checks import sums_problem
from kvbaton.core.handoff import Executor, Incarnation, Integrity, Span
from kvbaton.core.layout import Layout
from kvbaton.core.pair import Share
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.timeline import Side
from kvbaton.core.topology import Shape, head_range
from kvbaton.errors import TransportError
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from model_cuts import stage_layers
from watching import wait_until

LAYERS, TOKENS, BLOCKS, BLOCK_TOKENS = 4, 8, 3, 4
COPY = CopyId(key_of("k"), 1, 1)
IDS = ((2, 0),)
POISON = 0xEE

Memory = npt.NDArray[np.uint8]


def rank_layout(shape: Shape, number: int, total_heads: int) -> Layout:
    """(layer, plane, block, head, token), one byte per head and token."""
    at = shape.at(number)
    layers, own = tuple(stage_layers(LAYERS, shape.pp, at.pp)), head_range(total_heads, shape.tp, at.tp)
    cache = dense_tensor((len(layers), 2, BLOCKS, own.count, BLOCK_TOKENS, 1), "uint8", 1)
    axes = ("plane", "block", "head", "token", "channel")
    group = tensor_group("full", layers, split_layers(cache), axes, heads=(own,), total_heads=total_heads)
    return Layout(group.end, (group,))


class Ranks:
    """The memory and transports of an instance, and its card."""

    def __init__(self, name: str, text: str, total_heads: int, hub: MemoryHub) -> None:
        shape = Shape.parse(text)
        self.layouts = [rank_layout(shape, number, total_heads) for number in range(shape.ranks)]
        self.memories = [np.full(layout.region_bytes, POISON, np.uint8) for layout in self.layouts]
        self.transports = [
            MemoryTransport(Region.of(memory), hub, TransportSettings(incarnation=Incarnation(name)))
            for memory in self.memories
        ]
        cards = tuple(
            RankCard(number, layout, (transport.endpoint(),))
            for number, (layout, transport) in enumerate(zip(self.layouts, self.transports, strict=True))
        )
        self.card: Card = msgspec.structs.replace(card_of(name), shape=text, ranks=cards)

    def fill(self) -> None:
        """Have every byte of the request state what it is, in every rank that holds it."""
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            (group,) = layout.groups
            for number, plane in enumerate(group.planes):
                for index, token, head in np.ndindex(len(group.layers), TOKENS, plane.head_count):
                    at = plane.layer_offsets[index] + IDS[0][token // BLOCK_TOKENS] * plane.block_stride
                    at += token % BLOCK_TOKENS * plane.token_stride + head * plane.head_stride
                    whole = ((group.layers[index] * 2 + number) * TOKENS + token) * 8 + plane.heads[0].start + head
                    memory[at] = whole % 223

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


CASES = [
    ("tp2", "tp4", 8), ("tp4", "tp2", 8), ("tp3", "tp2", 6), ("tp1", "tp4", 2), ("tp2", "tp8", 4), ("tp4", "tp1", 2),
    ("pp2", "pp1", 4), ("pp1", "pp2", 4), ("pp2,tp2", "tp4", 4), ("tp4", "pp2,tp2", 4),
]  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, Ranks, Ranks]]:
    """A source with content, a target with poison, and what the target should become."""
    prefill, decode, heads = request.param
    hub = MemoryHub()
    ranks = Ranks("source", prefill, heads, hub), Ranks("target", decode, heads, hub), Ranks("wanted", decode, heads, hub)
    ranks[0].fill()
    ranks[2].fill()
    yield ranks
    for each in ranks:
        each.close()


def gather(source: Ranks, target: Ranks, spans: tuple[Span, ...]) -> list[RankReport]:
    """Let every rank of the target read these spans; returns the reports when each rank has moved each."""
    reports: list[RankReport] = []
    agents = [
        RankAgent(rank, layout, transport, reports.append, clock=time.monotonic, transfer_timeout=30.0, instance=target.layouts)
        for rank, (layout, transport) in enumerate(zip(target.layouts, target.transports, strict=True))
    ]
    for agent in agents:
        agent.handle(Connect(source.card))
        start = OpenCopy(
            copy=COPY,
            peer=source.card.incarnation,
            executor=Executor.TARGET_READS,
            epoch=1,
            target_blocks=IDS,
            cached_tokens=0,
            total_tokens=TOKENS,
        )
        agent.handle(start)
        agent.handle(MoveSpans(COPY, IDS, spans))

    def all_moved() -> bool:
        for agent in agents:
            agent.poll()
        return sum(len(report.spans) for report in reports if isinstance(report, SpansMoved)) == len(agents) * len(spans)

    wait_until(all_moved, "every rank to have every span")
    return reports


def test_every_rank_of_the_target_gets_what_it_holds(pair: tuple[Ranks, Ranks, Ranks]) -> None:
    source, target, wanted = pair
    spans = (Span(0, 0, 5, 0, LAYERS), Span(1, 5, TOKENS, 0, 2), Span(2, 5, TOKENS, 2, LAYERS))
    moved = [report for report in gather(source, target, spans) if isinstance(report, SpansMoved)]
    assert sorted(number for report in moved for number in report.spans) == sorted([*range(len(spans))] * len(target.layouts))
    for found, expected in zip(target.memories, wanted.memories, strict=True):
        assert np.array_equal(found, expected)
    needed = sum(TOKENS * len(layout.groups[0].layers) * layout.groups[0].token_bytes for layout in target.layouts)
    assert sum(report.bytes_moved for report in moved) == needed


def test_control_a_layer_that_is_left_out_is_seen(pair: tuple[Ranks, Ranks, Ranks]) -> None:
    source, target, wanted = pair
    gather(source, target, (Span(0, 0, TOKENS, 0, LAYERS - 1),))
    assert any(not np.array_equal(found, expected) for found, expected in zip(target.memories, wanted.memories, strict=True))


def sums(own: Ranks, peer: Ranks, side: Side, spans: tuple[Span, ...]) -> dict[tuple[int, int], int]:
    """Let every rank of an instance sum these spans for its legs with the ranks of `peer`."""
    reports: list[RankReport] = []
    for rank, (layout, transport) in enumerate(zip(own.layouts, own.transports, strict=True)):
        memory = RegionMemory(own.memories[rank].data)
        agent = RankAgent(
            rank,
            layout,
            transport,
            reports.append,
            clock=time.monotonic,
            transfer_timeout=30.0,
            memory=memory,
            instance=own.layouts,
        )
        agent.handle(Connect(peer.card))
        agent.handle(
            SumSpans(
                copy=COPY,
                side=side,
                blocks=IDS,
                spans=spans,
                cached_tokens=0,
                integrity=Integrity.FULL,
                total_tokens=TOKENS,
                peer=peer.card.incarnation,
            )
        )
        while agent.has_work:
            agent.poll()
    summed = [report for report in reports if isinstance(report, SpansSummed)]
    assert not any(report.error for report in summed)
    found = {(report.rank, span): sums for report in summed for span, sums in report.sums.items()}
    assert len(found) == len(own.layouts) * len(spans)
    return sums_by_leg(found)


def test_both_sides_sum_every_leg_alike_and_a_byte_that_changed_is_found(pair: tuple[Ranks, Ranks, Ranks]) -> None:
    source, target, _ = pair
    spans = (Span(0, 0, 5, 0, LAYERS), Span(1, 5, TOKENS, 0, LAYERS))
    gather(source, target, spans)
    theirs = sums(source, target, Side.SOURCE, spans)
    assert sums_problem(spans, sums(target, source, Side.TARGET, spans), theirs) == ""
    changed = target.memories[-1]
    at = int(np.flatnonzero(changed != POISON)[-1])
    changed[at] ^= 1
    assert "checksum of span" in sums_problem(spans, sums(target, source, Side.TARGET, spans), theirs)


def test_sums_for_a_peer_that_is_not_connected_are_refused() -> None:
    hub = MemoryHub()
    own = Ranks("own", "tp1", 2, hub)
    reports: list[RankReport] = []
    agent = RankAgent(0, own.layouts[0], own.transports[0], reports.append, clock=time.monotonic, transfer_timeout=30.0)
    agent.handle(
        SumSpans(
            copy=COPY,
            side=Side.SOURCE,
            blocks=IDS,
            spans=(Span(0, 0, 5, 0, LAYERS),),
            cached_tokens=0,
            integrity=Integrity.FULL,
            total_tokens=TOKENS,
            peer=Incarnation("unknown"),
        )
    )
    own.close()
    (report,) = reports
    assert isinstance(report, SpansSummed)
    assert report.error == "checksum: unknown is not connected"


def test_a_peer_of_which_one_rank_is_out_of_reach_has_no_session_with_the_others_either() -> None:
    """It is refused as a whole: what was reached before would stay for ever, because nothing disconnects it any more."""
    connected: list[PeerRank] = []
    revoked: list[PeerRank] = []

    class Noted(MemoryTransport):
        def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
            connected.append(peer)
            super().connect(peer, endpoint)

        def revoke(self, peer: PeerRank) -> None:
            revoked.append(peer)
            super().revoke(peer)

    hub, memory = MemoryHub(), np.zeros(1 << 16, np.uint8)
    transport = Noted(Region.of(memory), hub, TransportSettings(incarnation=Incarnation("here")))
    own, halves = rank_layout(Shape.parse("tp1"), 0, 2), [rank_layout(Shape.parse("tp2"), rank, 2) for rank in range(2)]
    there = MemoryTransport(Region.of(memory), hub, TransportSettings(incarnation=Incarnation("peer")))
    ranks = RankCard(0, halves[0], (there.endpoint(),)), RankCard(1, halves[1], ())
    agent = RankAgent(0, own, transport, print, clock=time.monotonic, transfer_timeout=30.0)
    with pytest.raises(TransportError, match="none there"):
        agent.handle(Connect(msgspec.structs.replace(card_of("peer"), ranks=ranks)))
    assert len(connected) == 1
    assert set(connected) <= set(revoked)


def test_a_filter_of_shares_leaves_out_what_it_drops_in_both_directions() -> None:
    """What controls of `verify` are made with: a head that is not moved has to be noticed."""
    layouts = [rank_layout(Shape.parse("tp1"), 0, 2)]
    card = msgspec.structs.replace(card_of("peer"), ranks=(RankCard(0, layouts[0], ()),))
    met: list[Share] = []

    def keep(share: Share) -> Share:
        met.append(share)
        return share[:0]

    whole, part = find_routes(layouts[0], layouts, 0, card), find_routes(layouts[0], layouts, 0, card, keep)
    assert len(met) == 2
    for before, after in ((whole.reads, part.reads), (whole.writes, part.writes)):
        assert [route.pair for route in before] != [route.pair for route in after]

"""What the leader of an instance and its rank processes exchange: the setup of a rank, its transport, orders and replies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.config import BUSY_POLL_S, KeyFile, parse_trust
from kvbaton.core.auth import ClusterKey
from kvbaton.core.card import Endpoint
from kvbaton.core.handoff import Executor, Incarnation
from kvbaton.core.layout import Layout
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.cache import RegionCache
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.shaped.blueprint import Cut
from kvbaton.engines.embedded.shaped.drops import dropping
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES
from kvbaton.errors import Bug
from kvbaton.transport.base import Transport, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.wire.tls import cluster_tls

__all__ = [
    "GroupSettings",
    "LayerWritten",
    "LeaderOrder",
    "Links",
    "Poison",
    "Poisoned",
    "RankKey",
    "RankReady",
    "RankReply",
    "RankSetup",
    "RankTransport",
    "RunStep",
    "StepDone",
    "StepFailed",
    "WireSpan",
    "decode_order",
    "decode_reply",
    "from_wire",
    "open_rank_transport",
    "rank_name",
    "to_wire",
]


class RankKey(msgspec.Struct, frozen=True):
    """The cluster key of a rank process; the one of a file is followed by each process on its own."""

    fixed: bytes = b""
    file: str = ""

    def __repr__(self) -> str:
        return f"RankKey({self.file})"

    @classmethod
    def of(cls, key: ClusterKey) -> RankKey:
        """What to send of a key."""
        if isinstance(key, bytes):
            return cls(fixed=key)
        if isinstance(key, KeyFile):
            return cls(file=str(key.path))
        raise Bug(f"{key} cannot be followed by another process")

    def key(self) -> ClusterKey:
        """What was sent. Raises ConfigError for a file that cannot be used."""
        return KeyFile(Path(self.file)) if self.file else self.fixed


class Links(msgspec.Struct, frozen=True):
    """File descriptors of one rank's sockets: two to its leader, the others within its stage and to the stages beside it."""

    steps: int
    agent: int
    stage: tuple[int, ...] = ()
    before: int | None = None
    after: int | None = None

    def numbers(self) -> tuple[int, ...]:
        """All of them."""
        beside = (number for number in (self.before, self.after) if number is not None)
        return (self.steps, self.agent, *self.stage, *beside)


class RankTransport(msgspec.Struct, frozen=True):
    """The transport of a rank. `drop` names what a control leaves out; see `drops.py`.

    `unfenced_writes` and `fenced_writes` allow peers to write into its memory, and this rank into theirs. `allow` are the
    networks of peers, `tls_dir` has the certificates with which it encrypts; `busy_poll_s` is as in `TransportSettings`.
    """

    name: str
    incarnation: Incarnation
    timeout_s: float
    host: str
    advertise_host: str
    drop: str = ""
    unfenced_writes: bool = False
    fenced_writes: bool = False
    busy_poll_s: float = BUSY_POLL_S
    allow: tuple[str, ...] = ()
    tls_dir: str = ""


class GroupSettings(msgspec.Struct, frozen=True):
    """What all ranks of an instance have in common."""

    model: str
    shape: Shape
    blocks: int
    block_tokens: int
    transport: RankTransport
    step_s: float = 60.0
    dtype: str = CACHE_DTYPES[0]
    model_id: str = ""
    """Names the model to instances of other engines; then the cache is described in their order."""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every rank, by its number."""
        return Cut(0, self.shape.pp, 0, self.shape.tp).all()


class RankSetup(msgspec.Struct, frozen=True):
    """One rank: what it shares with the others, its part of the model, and its links."""

    group: GroupSettings
    cut: Cut
    links: Links


def rank_name(cut: Cut) -> str:
    """The name of a rank in messages: its coordinates."""
    return f"rank pp{cut.pp_rank},tp{cut.tp_rank}"


class WireSpan(msgspec.Struct, frozen=True, array_like=True):
    """A `TokenSpan` on the wire."""

    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Run these spans. With `reports_layers`, send `LayerWritten` when what a layer remembers is in the cache."""

    spans: tuple[WireSpan, ...]
    reports_layers: bool


class Poison(msgspec.Struct, frozen=True, tag=True):
    """Fill these blocks with the poison pattern."""

    blocks: tuple[int, ...]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank has its weights and its cache, and its transport can be reached."""

    layout: Layout
    endpoint: Endpoint
    executor: Executor
    fences_writers: bool
    fingerprint: str


class LayerWritten(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of a layer is in its cache."""

    layer: int


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has run a step; `logits` (float32, span after span) come from the first rank of the last stage only."""

    logits: bytes = b""


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not run a step, and ends."""

    reason: str


class Poisoned(msgspec.Struct, frozen=True, tag=True):
    """The blocks are filled."""


LeaderOrder = RunStep | Poison
RankReply = RankReady | LayerWritten | StepDone | StepFailed | Poisoned

decode_order: Callable[[bytes | bytearray], LeaderOrder] = msgspec.msgpack.Decoder(LeaderOrder).decode
"""Read an order of the leader."""

decode_reply: Callable[[bytes | bytearray], RankReply] = msgspec.msgpack.Decoder(RankReply).decode
"""Read a reply of a rank."""


def to_wire(span: TokenSpan) -> WireSpan:
    """A span for the wire."""
    return WireSpan(tuple(span.token_ids.tolist()), span.start, tuple(span.blocks.tolist()))


def from_wire(span: WireSpan) -> TokenSpan:
    """A span from the wire."""
    return TokenSpan(np.array(span.token_ids, np.int32), span.start, np.array(span.blocks, np.int32))


def open_rank_transport(settings: RankTransport, cache: RegionCache, cluster_key: ClusterKey) -> Transport:
    """Open it; it moves nothing of what `settings.drop` names."""
    transport_settings = TransportSettings(
        incarnation=settings.incarnation,
        timeout_s=settings.timeout_s,
        host=settings.host,
        advertise_host=settings.advertise_host,
        cluster_key=cluster_key,
        tls=cluster_tls(Path(settings.tls_dir)) if settings.tls_dir else None,
        unfenced_writes=settings.unfenced_writes,
        fenced_writes=settings.fenced_writes,
        busy_poll_s=settings.busy_poll_s,
        admits=parse_trust(allow=settings.allow).accepts_from,
    )
    return dropping(open_transport(settings.name, cache.region, transport_settings), cache, settings.drop)

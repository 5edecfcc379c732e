"""The table of transports: one entry each, and what is found by name. A new transport is added here, or from outside.

A package outside of kvbaton adds one through an entry point of the group `kvbaton.transports`, which is called like the
transport and refers to its `TransportEntry`. Entry points are imported when they are asked for, so a package that is broken
costs only those that use its transport.
"""

from __future__ import annotations

import difflib
import functools
import logging
from importlib import metadata

from kvbaton.errors import ConfigError
from kvbaton.transport.entry import (
    AutoOffer,
    Direction,
    LateWrites,
    LibrarySetting,
    MemoryKind,
    PeerPart,
    TransportEntry,
    TransportVariant,
)

__all__ = [
    "AUTO",
    "ENTRY_POINTS",
    "TRANSPORTS",
    "library_settings",
    "nearest",
    "transport_entries",
    "transport_entry",
    "transport_names",
    "variant_of",
]

ENTRY_POINTS = "kvbaton.transports"
"""The group of entry points under which packages add transports."""

AUTO = "auto"
"""Each pair of ranks on its own: the first that both ends offer and that works."""

_log = logging.getLogger("kvbaton.transport")
_WRITES_UNFENCED = {Direction.READ: LateWrites.IMPOSSIBLE, Direction.WRITE: LateWrites.UNFENCED}

TRANSPORTS: dict[str, TransportEntry] = {
    entry.name: entry
    for entry in (
        TransportEntry(
            name="local",
            opener="kvbaton.transport.local:LocalTransport",
            stands_alone=True,
            auto=AutoOffer(rank=10),
            variants=(
                TransportVariant(
                    kind="local, shared memory",
                    memory="kvbaton.transport.sample_memory:shared_memory",
                    subject="local",
                    beside="memcpy",
                ),
                TransportVariant(kind="local, process_vm_readv", subject="local, process_vm_readv", beside="memcpy"),
            ),
        ),
        TransportEntry(
            name="tcp",
            opener="kvbaton.transport.tcp:TcpTransport",
            crosses_hosts=True,
            peer_part=PeerPart.MOVE,
            stands_alone=True,
            auto=AutoOffer(rank=30),
            variants=(TransportVariant(kind="tcp", subject="tcp", beside="socket"),),
        ),
        TransportEntry(
            name="cuda",
            opener="kvbaton.transport.cuda:CudaTransport",
            memory=frozenset({MemoryKind.GPU}),
            sees_withdrawal=False,  # memory that was opened through CUDA IPC stays readable until the process ends
            check="kvbaton.transport.cuda.sample_memory:check_gpu",
            auto=AutoOffer(rank=10),
            variants=(TransportVariant(kind="cuda", memory="kvbaton.transport.cuda.sample_memory:gpu_memory"),),
            bench="kvbaton.bench.wire.cuda:measure_cuda",
        ),
        TransportEntry(
            name="nixl",
            opener="kvbaton.transport.nixl:NixlTransport",
            promises=_WRITES_UNFENCED,
            crosses_hosts=True,
            peer_part=PeerPart.CONNECT,
            check="kvbaton.transport.nixl.library:check_nixl",
            auto=AutoOffer(rank=20, unless="kvbaton.transport.nixl.library:why_not_offered"),
            settings=(LibrarySetting("nixl_backends", "UCX"), LibrarySetting("nixl_lanes", 2, least=1, most=16)),
            variants=(TransportVariant(kind="nixl", subject="nixl", beside="raw nixl"),),
        ),
        TransportEntry(
            name="mooncake",
            opener="kvbaton.transport.mooncake:MooncakeTransport",
            promises=_WRITES_UNFENCED,
            crosses_hosts=True,
            peer_part=PeerPart.MOVE,
            check="kvbaton.transport.mooncake.library:load_mooncake",
            settings=(LibrarySetting("mooncake_protocol", "tcp"), LibrarySetting("mooncake_devices", "")),
            variants=(TransportVariant(kind="mooncake", subject="mooncake", beside="raw mooncake"),),
        ),
        TransportEntry(
            name="mori",
            opener="kvbaton.transport.mori:MoriTransport",
            promises=_WRITES_UNFENCED,
            memory=frozenset(MemoryKind),
            crosses_hosts=True,
            peer_part=PeerPart.CONNECT,
            check="kvbaton.transport.mori.library:load_mori",
            settings=(
                LibrarySetting("mori_backend", "rdma", choices=("rdma", "xgmi")),
                LibrarySetting("mori_queue_pairs", 1, least=1),
                LibrarySetting("mori_workers", 1, least=1),
                LibrarySetting("mori_post_batch", -1, least=-1),
                LibrarySetting("mori_device", -1, least=-1),
            ),
            variants=(TransportVariant(kind="mori"),),
            stand_in="mori_stand_in:open_on_stand_in",
        ),
        TransportEntry(name=AUTO, opener="kvbaton.transport.choose:open_auto", memory=frozenset(MemoryKind)),
    )
}
"""The transports of this package."""


def transport_names() -> list[str]:
    """All names that users can choose: those of this package as the table has them, then those of entry points."""
    return [*TRANSPORTS, *sorted(_entry_points())]


def transport_entry(name: str) -> TransportEntry:
    """The entry called `name`. Raises ConfigError, with the nearest name, for one that is unknown."""
    if name in TRANSPORTS:
        return TRANSPORTS[name]
    points = _entry_points()
    if name in points:
        return _loaded(points[name])
    known = sorted(transport_names())
    raise ConfigError(f"unknown transport {name!r} (did you mean {nearest(name, known)}?); known are {', '.join(known)}")


def transport_entries() -> list[TransportEntry]:
    """All entries: those of this package as the table has them, then those of entry points that can be loaded."""
    entries = list(TRANSPORTS.values())
    for _, point in sorted(_entry_points().items()):
        try:
            entries.append(_loaded(point))
        except ConfigError as error:  # `doctor`, and choosing it by name, report it as an error
            _log.warning("%s", error)
    return entries


def variant_of(kind: str) -> tuple[TransportEntry, TransportVariant]:
    """The variant that is called `kind`, and its transport. Raises ConfigError for one that is unknown."""
    variants = {variant.kind: (entry, variant) for entry in transport_entries() for variant in entry.variants}
    if kind not in variants:
        raise ConfigError(f"no transport has a variant {kind!r}; known are {'; '.join(variants)}")
    return variants[kind]


def library_settings() -> dict[str, LibrarySetting]:
    """The settings of all transports, by name."""
    return {setting.name: setting for entry in transport_entries() for setting in entry.settings}


def nearest(name: str, known: list[str]) -> str:
    """The one of `known` that looks most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


@functools.cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    """Those that add a name; one that is called like a transport of this package does not replace it."""
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name not in TRANSPORTS}


@functools.cache
def _loaded(point: metadata.EntryPoint) -> TransportEntry:
    try:
        entry = point.load()
    except Exception as error:
        raise ConfigError(f"transport {point.name}: its entry point {point.value!r} cannot be loaded: {error}") from error
    if not isinstance(entry, TransportEntry) or entry.name != point.name:
        raise ConfigError(
            f"transport {point.name}: its entry point {point.value!r} is {entry!r}; it must be a TransportEntry of that name"
        )
    return entry

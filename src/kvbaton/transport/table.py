"""The table of transports: one entry each, with all that the rest of kvbaton has to know before it opens the transport.

A new transport is added here, or from outside: a package adds one through an entry point of the group `kvbaton.transports`,
which is called like the transport and refers to its `TransportEntry`. Entry points are imported when they are asked for, so a
package that is broken costs only those that use its transport. Nothing heavy is imported here: the command line reads the
table to list its choices. What has to be imported to be used is therefore named as `module:attribute`, and loaded by `load`.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvbaton.errors import ConfigError

if TYPE_CHECKING:
    from kvbaton.wire.tls import ClusterTls

__all__ = [
    "AUTO",
    "Direction",
    "exchange_names",
    "LateWrites",
    "LibrarySetting",
    "MemoryKind",
    "PeerPart",
    "Reference",
    "TRANSPORTS",
    "TransportEntry",
    "TransportVariant",
    "library_settings",
    "load",
    "nearest",
    "transport_entries",
    "transport_entry",
    "transport_names",
    "variant_of",
]

_log = logging.getLogger("kvbaton.transport")

Reference = str | Callable[..., Any]
"""Something to call, or its name as `module:attribute`, which is imported when it is first needed."""


class Direction(enum.StrEnum):
    """Which side holds the source: READ fills this side's memory from the peer's, WRITE the other way round."""

    READ = "read"
    WRITE = "write"


class LateWrites(enum.StrEnum):
    """What a peer can do to this side's memory after it lost the right to: nothing; nothing once it is revoked; still write."""

    IMPOSSIBLE = "impossible"
    REVOCABLE = "revocable"
    UNFENCED = "unfenced"


class MemoryKind(enum.StrEnum):
    """Where a region lies."""

    MAIN = "main memory"
    GPU = "GPU memory"


class PeerPart(enum.StrEnum):
    """What the peer's process has to do while this side reads: nothing, answer the first connection, or move every byte."""

    NONE = "none"
    CONNECT = "connect"
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class LibrarySetting:
    """A setting of one transport, which `KVBATON_TRANSPORT_SETTINGS` may change; the default gives its type."""

    name: str
    default: int | str
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    def parsed(self, text: str) -> int | str:
        """The value that `text` stands for. Raises ConfigError."""
        try:
            return type(self.default)(text)
        except ValueError as error:
            raise ConfigError(f"transport setting {self.name} is {text!r}; it must be a whole number") from error

    def check(self, value: int | str) -> None:
        """Raise ConfigError, with the limit, unless `value` is allowed."""
        problem = ""
        if type(value) is not type(self.default):
            problem = f"of type {type(self.default).__name__}"
        elif self.choices and value not in self.choices:
            problem = " or ".join(self.choices)
        elif self.least is not None and isinstance(value, int) and value < self.least:
            problem = f"at least {self.least}"
        elif self.most is not None and isinstance(value, int) and value > self.most:
            problem = f"at most {self.most}"
        if problem:
            raise ConfigError(f"transport setting {self.name} is {value!r}; it must be {problem}")


_TRIAL_TLS = "kvbaton.wire.certificates:trial_tls"


@dataclass(frozen=True, slots=True)
class TransportVariant:
    """One kind of memory with which a transport is tried, tested and measured.

    kind:    its name in `kvbaton doctor` and in the contract suite
    memory:  makes such memory from its content (an array of bytes); returns the region and an array to look at it
    subject: its name in `kvbaton bench wire`; empty where it is not measured by size of blocks
    beside:  the subject of `kvbaton bench wire` that it is compared with
    check:   may name a function that raises KVBatonError where there is no such memory on this machine
    is_encrypted: whether it is tried with certificates
    """

    kind: str
    memory: Reference = "kvbaton.transport.trial:private_memory"
    subject: str = ""
    beside: str = ""
    check: Reference = ""
    is_encrypted: bool = False

    def why_not_here(self) -> str:
        """Why there is no such memory on this machine, as far as `check` finds; else an empty string."""
        return _complaint(self.check)

    def tls(self) -> ClusterTls | None:
        """The certificates for a trial."""
        made: ClusterTls | None = load(_TRIAL_TLS)() if self.is_encrypted else None
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportEntry:
    """One transport, as `choose`, `auto`, `doctor`, the command line, the contract suite and `bench wire` know it.

    name:        how users choose it
    opener:      called with the region and the `TransportSettings`; returns the transport. Raises KVBatonError
    promises:    the directions that can be chosen, and what each lets a peer do late to this side's memory; a direction that
                 is UNFENCED has to be chosen with `unfenced_writes`, one that is REVOCABLE with `fenced_writes`
    memory:      the kinds of memory that it moves
    crosses_hosts: whether peers may be on other hosts
    encrypts:    whether it encrypts with the certificates of `TransportSettings.tls`
    peer_part:   what the peer's process has to do during a read
    sees_withdrawal: whether a peer that closes its transport, and lives on, is noticed by the transport itself
    stands_alone: whether it needs nothing but kvbaton; `doctor` succeeds when one such transport works
    check:       may name a function that raises KVBatonError where the transport cannot run on this machine
    auto_rank:   in which order `auto` offers it: those of a lower rank are tried first; None: it does not
    auto_unless: may name a function that returns why `auto` does not offer it on this machine, or an empty string
    settings:    its settings in `KVBATON_TRANSPORT_SETTINGS`
    variants:    with which memory it is tried, tested and measured
    bench:       may name the function that measures it in `bench wire`, where blocks in main memory are not its case: called
                 with the tokens of a batch, the rounds, and what is given each line of progress
    exchange:    may name a function that opens an `ExchangeContract` over it (memories that come and go, writes by their
                 owner): called with the name of the initiator and the `TransportSettings`
    stand_in:    may name a function like `opener` that opens it, with both ends in one process, where its hardware is missing:
                 the contract suite then runs on that
    """

    name: str
    opener: Reference
    promises: Mapping[Direction, LateWrites] = field(default_factory=lambda: {Direction.READ: LateWrites.IMPOSSIBLE})
    memory: frozenset[MemoryKind] = frozenset({MemoryKind.MAIN})
    crosses_hosts: bool = False
    encrypts: bool = False
    peer_part: PeerPart = PeerPart.NONE
    sees_withdrawal: bool = True
    stands_alone: bool = False
    check: Reference = ""
    auto_rank: int | None = None
    auto_unless: Reference = ""
    settings: tuple[LibrarySetting, ...] = ()
    variants: tuple[TransportVariant, ...] = ()
    bench: Reference = ""
    exchange: Reference = ""
    stand_in: Reference = ""

    @property
    def can_write(self) -> bool:
        """Whether `post` can be made to accept writes."""
        return Direction.WRITE in self.promises

    def writing(self, is_on: bool) -> dict[str, Any]:
        """The setting of `TransportSettings` with which writes are chosen, or left out."""
        is_fenced = self.promises.get(Direction.WRITE) is LateWrites.REVOCABLE
        return {"fenced_writes" if is_fenced else "unfenced_writes": is_on}

    def why_not_here(self) -> str:
        """Why the transport cannot run on this machine, as far as `check` finds; else an empty string."""
        return _complaint(self.check)


def _complaint(check: Reference) -> str:
    """What the check raises; empty where it raises nothing, or there is none."""
    try:
        if check:
            load(check)()
    except Exception as error:  # noqa: BLE001 - a library that is broken may raise anything when it is imported
        return str(error) or type(error).__name__
    return ""


def load(reference: Reference) -> Callable[..., Any]:
    """What `reference` names. Raises ConfigError when the module or the attribute does not exist."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{reference!r} of a transport's registration cannot be loaded: {error}") from error
    return found


ENTRY_POINTS = "kvbaton.transports"
"""The group of entry points under which packages add transports."""

AUTO = "auto"
"""Each pair of ranks on its own: the first that both ends offer and that works."""

_GPU_MEMORY = "kvbaton.transport.cuda.region:gpu_memory"
_CHECK_GPU = "kvbaton.transport.cuda.region:check_gpu"
_WRITES_UNFENCED = {Direction.READ: LateWrites.IMPOSSIBLE, Direction.WRITE: LateWrites.UNFENCED}

TRANSPORTS: dict[str, TransportEntry] = {
    entry.name: entry
    for entry in (
        TransportEntry(
            name="local",
            opener="kvbaton.transport.local:LocalTransport",
            stands_alone=True,
            auto_rank=10,
            exchange="kvbaton.transport.exchange.service:open_local",
            variants=(
                TransportVariant(
                    kind="local, shared memory",
                    memory="kvbaton.transport.trial:shared_memory",
                    subject="local",
                    beside="memcpy",
                ),
                TransportVariant(kind="local, process_vm_readv", subject="local, process_vm_readv", beside="memcpy"),
            ),
        ),
        TransportEntry(
            name="tcp",
            opener="kvbaton.transport.tcp:TcpTransport",
            promises={Direction.READ: LateWrites.IMPOSSIBLE, Direction.WRITE: LateWrites.REVOCABLE},
            memory=frozenset(MemoryKind),
            crosses_hosts=True,
            encrypts=True,
            peer_part=PeerPart.MOVE,
            stands_alone=True,
            auto_rank=30,
            exchange="kvbaton.transport.exchange.service:open_tcp",
            variants=(
                TransportVariant(kind="tcp", subject="tcp", beside="socket"),
                TransportVariant(
                    kind="tcp, encrypted",
                    subject="tcp, encrypted",
                    beside="tcp",
                    check="kvbaton.wire.certificates:check_openssl",
                    is_encrypted=True,
                ),
                TransportVariant(kind="GPU memory over tcp", memory=_GPU_MEMORY, check=_CHECK_GPU),
            ),
        ),
        TransportEntry(
            name="cuda",
            opener="kvbaton.transport.cuda:CudaTransport",
            memory=frozenset({MemoryKind.GPU}),
            sees_withdrawal=False,  # memory that was opened through CUDA IPC stays readable until the process ends
            check=_CHECK_GPU,
            auto_rank=10,
            variants=(TransportVariant(kind="cuda", memory=_GPU_MEMORY),),
            bench="kvbaton.bench.wire.cuda:measure_cuda",
        ),
        TransportEntry(
            name="nixl",
            opener="kvbaton.transport.nixl:NixlTransport",
            promises=_WRITES_UNFENCED,
            memory=frozenset(MemoryKind),
            crosses_hosts=True,
            peer_part=PeerPart.CONNECT,
            check="kvbaton.transport.nixl:check_nixl",
            auto_rank=20,
            auto_unless="kvbaton.transport.nixl:why_not_offered",
            settings=(LibrarySetting("nixl_backends", "UCX"), LibrarySetting("nixl_lanes", 2, least=1, most=16)),
            variants=(
                TransportVariant(kind="nixl", subject="nixl", beside="raw nixl"),
                TransportVariant(kind="GPU memory over nixl", memory=_GPU_MEMORY, check=_CHECK_GPU),
            ),
        ),
        TransportEntry(
            name="mooncake",
            opener="kvbaton.transport.mooncake:MooncakeTransport",
            promises=_WRITES_UNFENCED,
            crosses_hosts=True,
            peer_part=PeerPart.MOVE,
            check="kvbaton.transport.mooncake:load_mooncake",
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
            check="kvbaton.transport.mori:load_mori",
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


def exchange_names() -> list[str]:
    """The transports of this package over which memories can be exchanged."""
    return [name for name, entry in TRANSPORTS.items() if entry.exchange]


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

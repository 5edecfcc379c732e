"""The form of a transport's one registration: all that the rest of kvbaton has to know before it opens the transport.

Nothing heavy is imported here: the command line reads the table to list its choices. What has to be imported to be used is
therefore named as `module:attribute`, and loaded by `load`.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbaton.errors import ConfigError

__all__ = [
    "AutoOffer",
    "Direction",
    "LateWrites",
    "LibrarySetting",
    "MemoryKind",
    "PeerPart",
    "Reference",
    "TransportEntry",
    "TransportVariant",
    "load",
]

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


@dataclass(frozen=True, slots=True)
class AutoOffer:
    """That `auto` offers the transport: those of a lower `rank` are tried first.

    `unless` may name a function that returns why the transport is not offered on this machine, or an empty string.
    """

    rank: int
    unless: Reference = ""


@dataclass(frozen=True, slots=True)
class TransportVariant:
    """One kind of memory with which a transport is tried, tested and measured.

    kind:    its name in `kvbaton doctor` and in the contract suite
    memory:  makes such memory from its content (an array of bytes); returns the region and an array to look at it
    subject: its name in `kvbaton bench wire`; empty where it is not measured by size of blocks
    beside:  the subject of `kvbaton bench wire` that it is compared with
    """

    kind: str
    memory: Reference = "kvbaton.transport.sample_memory:private_memory"
    subject: str = ""
    beside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportEntry:
    """One transport, as `choose`, `auto`, `doctor`, the command line, the contract suite and `bench wire` know it.

    name:        how users choose it
    opener:      called with the region and the `TransportSettings`; returns the transport. Raises KVBatonError
    promises:    the directions that can be chosen, and what each lets a peer do late to this side's memory; a direction that
                 is UNFENCED has to be chosen with `unfenced_writes`
    memory:      the kinds of memory that it moves
    crosses_hosts: whether peers may be on other hosts
    peer_part:   what the peer's process has to do during a read
    sees_withdrawal: whether a peer that closes its transport, and lives on, is noticed by the transport itself
    stands_alone: whether it needs nothing but kvbaton; `doctor` succeeds when one such transport works
    check:       may name a function that raises KVBatonError where the transport cannot run on this machine
    auto:        whether, and in which order, `auto` offers it
    settings:    its settings in `KVBATON_TRANSPORT_SETTINGS`
    variants:    with which memory it is tried, tested and measured
    bench:       may name the function that measures it in `bench wire`, where blocks in main memory are not its case: called
                 with the tokens of a batch, the rounds, and what is given each line of progress
    stand_in:    may name a function like `opener` that opens it, with both ends in one process, where its hardware is missing:
                 the contract suite then runs on that
    """

    name: str
    opener: Reference
    promises: Mapping[Direction, LateWrites] = field(default_factory=lambda: {Direction.READ: LateWrites.IMPOSSIBLE})
    memory: frozenset[MemoryKind] = frozenset({MemoryKind.MAIN})
    crosses_hosts: bool = False
    peer_part: PeerPart = PeerPart.NONE
    sees_withdrawal: bool = True
    stands_alone: bool = False
    check: Reference = ""
    auto: AutoOffer | None = None
    settings: tuple[LibrarySetting, ...] = ()
    variants: tuple[TransportVariant, ...] = ()
    bench: Reference = ""
    stand_in: Reference = ""

    @property
    def can_write(self) -> bool:
        """Whether `post` can be made to accept writes."""
        return Direction.WRITE in self.promises

    def why_not_here(self) -> str:
        """Why the transport cannot run on this machine, as far as `check` finds; else an empty string."""
        try:
            if self.check:
                load(self.check)()
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

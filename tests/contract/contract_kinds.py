"""What the contract suite runs against: every variant of every transport in the table, and what is only for tests.

A transport is added by its entry in the table (or an entry point) alone; there is nothing to add here.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.choose import open_entry
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from kvbaton.transport.table import (
    AUTO,
    Direction,
    LateWrites,
    Reference,
    TransportEntry,
    TransportVariant,
    load,
    transport_entries,
    transport_entry,
)
from kvbaton.transport.tcp import TcpTransport

__all__ = ["FENCED_KINDS", "HOST_KINDS", "READ_KINDS", "WRITE_KINDS", "ContractKind", "find_kind", "params"]

_HUB = MemoryHub()


@dataclass(frozen=True)
class ContractKind:
    """One transport with one kind of memory; `in_process` opens it where both ends are in one process."""

    entry: TransportEntry
    variant: TransportVariant
    in_process: Reference = ""
    is_faulty: bool = False

    @property
    def has_processes(self) -> bool:
        """Whether each side is a process of its own."""
        return not self.in_process

    def choice(self, writes: bool) -> dict[str, Any]:
        """The setting that lets it write, as the entry requires it."""
        return self.entry.writing(writes)

    def open(self, region: Region, settings: TransportSettings, faults: Faults | None = None) -> Transport:
        """A transport over `region`, with faults where there are some."""
        opener = load(self.in_process) if self.in_process else functools.partial(open_entry, self.entry)
        inner: Transport = opener(region, dataclasses.replace(settings, tls=self.variant.tls()))
        return FaultyTransport(inner, region, faults or Faults()) if faults or self.is_faulty else inner

    def why_skipped(self) -> str:
        """Why it cannot be tested here."""
        return "" if self.in_process else self.entry.why_not_here() or self.variant.why_not_here()


def _open_in_memory(region: Region, settings: TransportSettings) -> Transport:
    return MemoryTransport(region, _HUB, settings)


def _open_without_compiler(region: Region, settings: TransportSettings) -> Transport:
    """Transport tcp as it is where there are no loops in C."""
    with (
        patch("kvbaton.transport.tcp.transport.load_loops", new=_no_loops),
        patch("kvbaton.transport.queued.load_loops", new=_no_loops),
    ):
        return TcpTransport(region, settings)


def _no_loops() -> None:
    return None


def _kind_of(entry: TransportEntry, variant: TransportVariant) -> ContractKind:
    return ContractKind(entry, variant, entry.stand_in if entry.stand_in and entry.why_not_here() else "")


def _for_tests_only() -> list[ContractKind]:
    memory, faulty = (TransportEntry(name=name, opener=_open_in_memory) for name in ("memory", "faulty"))
    return [
        ContractKind(memory, TransportVariant("memory"), _open_in_memory),
        ContractKind(faulty, TransportVariant("faulty"), _open_in_memory, is_faulty=True),
        ContractKind(transport_entry(AUTO), TransportVariant("auto")),
        ContractKind(
            dataclasses.replace(transport_entry("tcp"), opener=_open_without_compiler), TransportVariant("tcp, no compiler")
        ),
    ]


def _faulty_writer(kinds: list[ContractKind]) -> list[ContractKind]:
    """Faults around a transport that writes, on the first of them that needs no other process."""
    inner = next(kind for kind in kinds if not kind.has_processes)
    return [ContractKind(inner.entry, TransportVariant("faulty"), inner.in_process, is_faulty=True)]


_FROM_TABLE = [_kind_of(entry, variant) for entry in transport_entries() for variant in entry.variants]
FENCED_KINDS = [
    kind for kind in _FROM_TABLE if kind.entry.promises.get(Direction.WRITE) is LateWrites.REVOCABLE and kind.has_processes
]
_WRITERS = [kind for kind in _FROM_TABLE if Direction.WRITE in kind.entry.promises]

READ_KINDS = [*_for_tests_only(), *_FROM_TABLE]
WRITE_KINDS = [*_WRITERS, *_faulty_writer(_WRITERS)]
HOST_KINDS = [kind for kind in _FROM_TABLE if kind.entry.crosses_hosts and kind.has_processes]


def find_kind(name: str) -> ContractKind:
    """The kind of the read suite that is called `name`."""
    return next(kind for kind in READ_KINDS if kind.variant.kind == name)


def params(kinds: list[ContractKind]) -> list[object]:
    """The kinds as parameters of a fixture; those that cannot run here are skipped, with the reason."""
    made: list[object] = []
    for kind in kinds:
        why = kind.why_skipped()
        if not why:
            kind.variant.tls()  # before the other process is started, which takes over what is made here
        marks = [pytest.mark.skip(reason=f"{why}; see make test-compat")] if why else []
        made.append(pytest.param(kind, id=kind.variant.kind, marks=marks))
    return made

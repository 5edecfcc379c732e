"""Which process this is, and whether another one of this host is provably dead."""

from __future__ import annotations

import os

from kvbaton.core.card import ProcessId
from kvbaton.errors import PeerLost
from kvbaton.transport.process_memory import host_id, start_ticks

__all__ = ["is_gone", "this_process"]


def this_process() -> ProcessId:
    """The name of this process, for its card; without a host where that is unknown, so that no peer relies on it."""
    try:
        return ProcessId(host_id(), os.getpid(), start_ticks(os.getpid()))
    except (OSError, PeerLost):
        return ProcessId("", os.getpid(), 0)


def is_gone(process: ProcessId) -> bool:
    """Whether `process` ran on this host and does not any more; false whenever that cannot be known."""
    if not process.host or process.host != this_process().host:
        return False
    try:
        return start_ticks(process.pid) != process.started
    except PeerLost:
        return True

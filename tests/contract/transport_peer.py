"""The other side of the transport contract, as a process of its own: a region with a known content, until stdin ends.

A line on stdin has it connect to a writer, or withdraw the region; the process lives on. Instead of known content the region
may be a file that is handed over open, and then it may be written to.
"""

from __future__ import annotations

import mmap
import sys

import msgspec
import numpy as np
import numpy.typing as npt
from contract_kinds import find_kind

from kvbaton.core.handoff import Incarnation
from kvbaton.transport.base import Endpoint, PeerRank, Region, TransportSettings
from kvbaton.transport.table import load

__all__ = ["POISON", "WRITER", "content"]

WRITER = PeerRank(Incarnation("writer"))
"""The one that writes."""

POISON = 0xA5
"""What target memory holds before a batch; no byte of `content` has this value."""


def content(seed: int, count: int) -> npt.NDArray[np.uint8]:
    """The bytes of a source region."""
    period = np.random.default_rng(seed).integers(0, POISON, 1_000_003, dtype=np.uint8)
    return np.resize(period, count)


def main() -> None:
    """Serve one region; the endpoint goes to stdout as one line of JSON."""
    kind, host, count, seed, incarnation, *shared = sys.argv[1:]
    bytes_there = np.frombuffer(mmap.mmap(int(shared[0]), int(count)), np.uint8) if shared else content(int(seed), int(count))
    found = find_kind(kind)
    # What is written must stay in the file, which the test maps too.
    region = Region.of(bytes_there) if shared else load(found.variant.memory)(bytes_there)[0]
    takes_writes = shared[1:] == ["writes"]
    settings = TransportSettings(incarnation=Incarnation(incarnation), host=host, **found.choice(takes_writes))
    transport = found.open(region, settings)
    sys.stdout.buffer.write(msgspec.json.encode(transport.endpoint()) + b"\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order, _, writer = line.partition(" ")
        if order == "connect":
            transport.connect(WRITER, msgspec.json.decode(writer, type=Endpoint))
        else:
            transport.close()
        sys.stdout.write("connected\n" if order == "connect" else "withdrawn\n")
        sys.stdout.flush()
    transport.close()


if __name__ == "__main__":
    main()

"""As many NIXL peers as there are, or are not, file descriptors for: UCX ends the process when it runs out of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.compat,
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="THE PACKAGE nixl IS NOT INSTALLED: not tried"),
]

READ_FROM_MANY = """
import resource, select, sys
import numpy as np
from kvbaton.core.handoff import Incarnation
from kvbaton.transport.base import Batch, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.nixl import NixlTransport

limit, count = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
settings = TransportSettings(timeout_s=20.0)
held, memory = np.full(4096, 7, np.uint8), np.zeros(4096, np.uint8)
source, target = (NixlTransport(Region.of(each), settings) for each in (held, memory))
peers = [PeerRank(Incarnation("source"), rank) for rank in range(count)]
for peer in peers:
    target.connect(peer, source.endpoint())
errors = []
for rank, peer in enumerate(peers):
    target.post(Batch(peer, Direction.READ, np.array([[0, 64 * rank, 64]], np.uint64)))
    while not (found := target.poll()):
        poller = select.poll()
        poller.register(target.wakeup_fd, select.POLLIN)
        assert poller.poll(60_000)
    errors += [completion.error for completion in found]
assert (memory[: 64 * errors.count("")] == 7).all()
print("@", errors.count(""), *{error for error in errors if error}, sep="|")
target.close()
source.close()
"""


def read_from_many(limit: int, count: int) -> list[str]:
    """How many of `count` peers were read from by a process with so many descriptors, and what was said of the others."""
    run = subprocess.run(
        [sys.executable, "-c", READ_FROM_MANY, str(limit), str(count)], capture_output=True, text=True, timeout=180, check=False
    )
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    return next(line for line in run.stdout.splitlines() if line.startswith("@")).split("|")[1:]


def test_nixl_reaches_64_peers_with_the_usual_limit() -> None:
    assert read_from_many(1024, 64) == ["64"]


def test_nixl_names_what_is_missing_when_there_are_more_peers_than_descriptors() -> None:
    read, *errors = read_from_many(256, 40)
    assert 5 < int(read) < 40
    assert len(errors) >= 1
    assert all("file descriptors are left" in error for error in errors)
    assert all("raise `ulimit -n`" in error for error in errors)

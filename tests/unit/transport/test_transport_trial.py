"""Trials of transports: what works, what does not and why, and other processes that hang, die or lie."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest

from kvbaton.transport import trial
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.table import AUTO, TRANSPORTS, TransportEntry
from kvbaton.transport.trial import Trial, try_all, try_transport
from watching import descendants

HANGS = "import sys; print('still loading', flush=True); sys.stdin.read()"
SENDS_HALF = "import os, sys; os.write(int(sys.argv[2]), b'{'); sys.stdin.read()"
DIES = "import sys; print('first'); sys.exit('libfabric: no such device')"
DIES_SILENTLY = "import os; os._exit(3)"
LIES = "import os, sys; os.write(int(sys.argv[2]), b'no endpoint\\n'); sys.stdin.read()"
HOLDS_OTHER_BYTES = "import kvbaton.transport.trial as t; real = t._open; t._open = lambda k, f, p: real(k, 7, p); t._main()"


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """After each trial: no further process, no further descriptor."""
    processes, descriptors = descendants(os.getpid()), open_descriptors()
    yield
    assert descendants(os.getpid()) <= processes
    assert open_descriptors() <= descriptors


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def attempt(script: str, timeout_s: float = 20.0) -> str:
    """The problem of a trial of tcp whose other process runs `script`."""
    return try_transport("tcp", timeout_s=timeout_s, source_command=[sys.executable, "-c", script]).problem


def test_every_transport_that_users_can_choose_is_tried() -> None:
    assert {name for name, entry in TRANSPORTS.items() if not entry.variants} == {AUTO}
    kinds = [variant.kind for entry in TRANSPORTS.values() for variant in entry.variants]
    assert [trial.kind for trial in try_all()] == kinds


@pytest.mark.parametrize("kind", ["local, shared memory", "local, process_vm_readv", "tcp"])
def test_what_needs_nothing_else_works_here(kind: str) -> None:
    assert try_transport(kind) == Trial(kind, "", is_enough=True)


def test_wrong_bytes_are_noticed() -> None:
    assert attempt(HOLDS_OTHER_BYTES) == "wrong bytes arrived; please report this"


@pytest.mark.parametrize(
    ("script", "timeout_s", "problem"),
    [
        (HANGS, 0.5, r"the other process was not ready within 0\.5 s.*"),
        (SENDS_HALF, 0.5, r"the other process was not ready within 0\.5 s, and printed nothing"),
        (DIES, 20.0, r"the other process ended before it was ready; its last output: .*libfabric: no such device.*"),
        (DIES_SILENTLY, 20.0, r"the other process ended before it was ready, and printed nothing"),
        (LIES, 20.0, r"DecodeError: .*"),
    ],
    ids=["hangs", "sends half", "dies with output", "dies silently", "lies"],
)
def test_another_process_in_trouble_is_described(script: str, timeout_s: float, problem: str) -> None:
    assert re.fullmatch(problem, attempt(script, timeout_s))


def test_a_process_that_cannot_be_started_is_a_problem() -> None:
    assert try_transport("tcp", source_command=["/no/such/command"]).problem.startswith("FileNotFoundError")


def test_a_library_that_breaks_in_its_own_way_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_entry: TransportEntry, _region: Region, _settings: TransportSettings) -> Transport:
        raise RuntimeError("undefined symbol: ucp_worker_create")

    monkeypatch.setattr(trial, "open_entry", broken)
    assert try_transport("nixl") == Trial("nixl", "RuntimeError: undefined symbol: ucp_worker_create")


def test_cuda_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'kvbaton[cuda]'" in try_transport("cuda").problem

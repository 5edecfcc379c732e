"""Stamps in shared memory: what one process shows, another one reads, for as long as it may."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_rig import card_of

from kvbaton.agent import stamps as stamps_module
from kvbaton.agent.ports import NO_STAMPS
from kvbaton.agent.stamps import SharedStamps, open_stamps
from kvbaton.core.card import Card, ProcessId
from kvbaton.core.handoff import Incarnation
from kvbaton.core.stamps import StampArea
from kvbaton.transport.neighbour import this_process
from kvbaton.transport.runs import load_loops
from watching import pause, wait_until

PEER = Incarnation("peer")
OTHER = """
import sys
import msgspec
from kvbaton.agent.stamps import open_stamps
from kvbaton.transport.neighbour import this_process

stamps = open_stamps()
stamps.vouch()
print(msgspec.json.encode((this_process(), stamps.area)).decode(), flush=True)
for line in sys.stdin:
    if line.strip() == "end":
        sys.exit()
    slot, value = map(int, line.split())
    stamps.write(slot, value)
    print(flush=True)
"""

needs_loops = pytest.mark.skipif(load_loops() is None, reason="no compiler is here, so there are no stamps")


class Other:
    """A process that shows what it is ordered to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        who, area = msgspec.json.decode(process.stdout.readline(), type=tuple[ProcessId, StampArea])
        self.card = card_of(PEER, process=who, stamps=area)

    def write(self, slot: int, value: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{slot} {value}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@contextmanager
def other_process(script: str = OTHER) -> Iterator[Other]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


@pytest.fixture
def own() -> Iterator[SharedStamps]:
    stamps = open_stamps()
    assert isinstance(stamps, SharedStamps)
    yield stamps
    stamps.close()


@needs_loops
def test_what_a_process_shows_another_one_reads_until_it_is_cleared(own: SharedStamps) -> None:
    with other_process() as other:
        assert own.follow(other.card)
        assert own.read(PEER, 5) == 0
        other.write(5, (1 << 62) - 1)
        assert own.read(PEER, 5) == (1 << 62) - 1
        assert own.read(PEER, 4) == own.read(PEER, 6) == 0
        other.write(5, 0)
        assert own.read(PEER, 5) == 0


@needs_loops
def test_it_stands_although_the_process_stands_still(own: SharedStamps) -> None:
    with other_process() as other:
        assert own.follow(other.card)
        other.write(1, 7)
        pause(other.process.pid)
        assert own.read(PEER, 1) == 7
        other.process.send_signal(signal.SIGCONT)


@needs_loops
def test_of_a_process_that_is_dead_none_stands_before_anything_else_of_it_is_gone(own: SharedStamps) -> None:
    """The kernel marks it first: a pipe of which the process had the other end still shows it alive when the stamp is void."""
    for _ in range(20):
        with other_process() as other:
            assert own.follow(other.card)
            other.write(1, 7)
            assert own.read(PEER, 1) == 7
            other.process.send_signal(signal.SIGKILL)
            assert other.process.stdout is not None
            assert other.process.stdout.read() == "", "its files are closed"
            assert own.read(PEER, 1) == 0
            own.forget(PEER)


@needs_loops
def test_none_stands_whose_thread_has_ended_or_has_yet_to_vouch(own: SharedStamps) -> None:
    """What the agents' thread has shown counts while it could answer; other threads of the process do not."""
    stamps = open_stamps()
    reader = own
    assert reader.follow(card_of(PEER, process=this_process(), stamps=stamps.area))
    stamps.write(1, 7)
    assert reader.read(PEER, 1) == 0, "no thread has vouched for it"
    vouched, may_end = threading.Event(), threading.Event()

    def vouch() -> None:
        stamps.vouch()
        vouched.set()
        may_end.wait(30)

    thread = threading.Thread(target=vouch)
    thread.start()
    assert vouched.wait(30)
    assert reader.read(PEER, 1) == 7
    may_end.set()
    thread.join()
    wait_until(lambda: reader.read(PEER, 1) == 0, "the thread is gone")
    stamps.close()


@needs_loops
def test_what_a_thread_shows_that_hangs_counts_no_more_once_it_is_closed(own: SharedStamps) -> None:
    """An engine that gives up on its agents uses their memory again, whatever their thread shows."""
    stamps = open_stamps()
    assert own.follow(card_of(PEER, process=this_process(), stamps=stamps.area))
    vouched, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        stamps.vouch()
        stamps.write(1, 7)
        vouched.set()
        may_end.wait(30)
        stamps.write(1, 8)
        stamps.withdraw()

    thread = threading.Thread(target=hang)
    thread.start()
    assert vouched.wait(30)
    assert own.read(PEER, 1) == 7
    stamps.close()
    assert own.read(PEER, 1) == 0
    may_end.set()
    thread.join()
    assert own.read(PEER, 1) == 0
    stamps.close()


ENDING = f"""
import atexit
atexit.register(lambda: print("libraries end", flush=True) or sys.stdin.readline())
{OTHER}
"""


@needs_loops
def test_of_a_process_that_ends_by_itself_none_stands_while_its_libraries_end(own: SharedStamps) -> None:
    with other_process(ENDING) as other:
        assert own.follow(other.card)
        other.write(1, 7)
        assert own.read(PEER, 1) == 7
        assert other.process.stdin is not None
        assert other.process.stdout is not None
        other.process.stdin.write("end\n")
        other.process.stdin.flush()
        assert other.process.stdout.readline() == "libraries end\n", "it lives, with all of its threads"
        assert own.read(PEER, 1) == 0


_CHILD = """
import os
stamps.write(1, 7)
if not os.fork():
    sys.exit()
os.wait()
print("the child has ended", flush=True)
for line in sys.stdin:"""
FORKING = OTHER.replace("\nfor line in sys.stdin:", _CHILD)


@needs_loops
def test_the_end_of_a_child_process_voids_nothing(own: SharedStamps) -> None:
    with other_process(FORKING) as other:
        assert other.process.stdout is not None
        assert other.process.stdout.readline() == "the child has ended\n"
        assert own.follow(other.card)
        assert own.read(PEER, 1) == 7


WITHOUT = """
import ctypes, os, struct, threading
from kvbaton.agent.ports import NO_STAMPS
from kvbaton.agent.stamps import open_stamps
from kvbaton.transport.runs import load_loops

# A filter as sandboxes have them: this one call returns {error} and does nothing.
number = {{"x86_64": 273, "aarch64": 99}}[os.uname().machine]
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | {error}), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
assert load_loops().can_vouch()
system = ctypes.CDLL(None)
assert system.prctl(38, 1, 0, 0, 0) == 0
assert system.prctl(22, 2, program, 0, 0) == 0
print("none" if open_stamps() is NO_STAMPS else "stamps")
"""


@needs_loops
@pytest.mark.parametrize("error", [0, 1, 38], ids=["ignored", "forbidden", "unknown"])
def test_where_the_kernel_would_not_mark_the_dead_there_are_none(error: int) -> None:
    script = WITHOUT.format(error=error)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "none\n"


@needs_loops
def test_peers_beyond_the_limit_are_asked_until_they_are_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps_module, "_MAX_PEERS", 1)
    few = open_stamps()
    with other_process() as other:
        other.write(1, 7)
        second = msgspec.structs.replace(other.card, incarnation=Incarnation("second"))
        assert few.follow(other.card)
        assert few.follow(second)
        assert few.read(PEER, 1) == 0
        assert few.read(Incarnation("second"), 1) == 7
        assert few.follow(other.card)
        assert few.read(PEER, 1) == 7
    few.close()


@needs_loops
def test_one_that_was_forgotten_or_never_followed_shows_nothing(own: SharedStamps) -> None:
    with other_process() as other:
        other.write(1, 7)
        assert own.read(PEER, 1) == 0
        assert own.follow(other.card)
        assert own.read(PEER, 1) == 7
        own.forget(PEER)
        assert own.read(PEER, 1) == 0


@needs_loops
@pytest.mark.parametrize("slot", [-1, 8192, 1 << 40, 1 << 62])
def test_slots_that_a_peer_does_not_have_are_not_read(own: SharedStamps, slot: int) -> None:
    with other_process() as other:
        assert own.follow(other.card)
        assert own.read(PEER, slot) == 0
        own.write(slot, 1)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _wrong(card: Card, **changes: Any) -> Card:
    assert card.stamps is not None
    return msgspec.structs.replace(card, stamps=msgspec.structs.replace(card.stamps, **changes))


@needs_loops
@pytest.mark.parametrize(
    "changes",
    [
        {"fd": -1},
        {"fd": 1 << 40},
        {"fd": 0},
        {"inode": 1},
        {"slots": 0},
        {"slots": -1},
        {"slots": 1 << 50},
        {"slots": 1 << 100},
    ],
    ids=str,
)
def test_an_area_that_is_not_there_costs_questions_and_nothing_else(own: SharedStamps, changes: dict[str, int]) -> None:
    with other_process() as other:
        assert not own.follow(_wrong(other.card, **changes))
        assert own.read(PEER, 0) == 0


@needs_loops
def test_a_process_of_another_host_is_not_looked_at(own: SharedStamps) -> None:
    with other_process() as other:
        elsewhere = msgspec.structs.replace(other.card.process, host="another")
        assert not own.follow(msgspec.structs.replace(other.card, process=elsewhere))
        assert not own.follow(msgspec.structs.replace(other.card, incarnation=Incarnation("old"), stamps=None))


@needs_loops
def test_nothing_is_left_when_it_is_closed() -> None:
    before = _open_files()
    stamps = open_stamps()
    stamps.vouch()
    stamps.write(3, 9)
    assert stamps.follow(card_of(PEER, process=this_process(), stamps=stamps.area))
    assert stamps.read(PEER, 3) == 9
    stamps.withdraw()
    stamps.close()
    stamps.close()
    stamps.write(3, 10)
    assert stamps.read(PEER, 3) == 0
    assert _open_files() == before


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps_module, "load_loops", lambda: None)
    stamps = open_stamps()
    assert stamps is NO_STAMPS
    stamps.write(0, 1)
    assert stamps.area is None
    assert not stamps.follow(card_of(PEER, stamps=StampArea(3, 1, 1)))
    assert stamps.read(PEER, 0) == 0

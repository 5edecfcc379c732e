"""The books of a transport, without a mover."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Iterator

import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import count_runs
from kvbaton.errors import Bug, PeerLost, RangeError, TransportError
from kvbaton.transport.base import Batch, Direction, Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.queued import CancelJob, Ledger, PostJob, RevokeLink
from kvbaton.transport.runs import Pages, StripTable
from kvbaton.transport.wakeup import Wakeup

PEER = PeerRank(Incarnation("p"))
BATCH = Batch(PEER, Direction.READ, np.array([[0, 0, 5]], np.uint64))
PAGES = Pages((ctypes.c_int64 * 9)(5, 5, 5, 1, 2, 2, 1, 0, 0), (0,), (0,), 0, 1, 5)


def is_set(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.fd], [], [], 0)[0])


@pytest.fixture
def ledger() -> Iterator[Ledger[str]]:
    made: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings(max_in_flight=2))
    made.add_peer(PEER, Endpoint("test", 10, {}), "link")
    yield made
    made.close()


def test_wishes_become_commands_in_order(ledger: Ledger[str]) -> None:
    ticket = ledger.admit(BATCH, None)
    ledger.ask_cancel(ticket)
    ledger.ask_cancel(ticket)
    ledger.remove_peer(PEER)
    assert is_set(ledger.work)
    assert [type(command) for command in ledger.take_commands()] == [PostJob, CancelJob, RevokeLink]
    assert not is_set(ledger.work)


def test_a_batch_counts_until_it_was_handed_out(ledger: Ledger[str]) -> None:
    ledger.admit(BATCH, None)
    ledger.admit(BATCH, None)
    jobs = [command.job for command in ledger.take_commands() if isinstance(command, PostJob)]
    ledger.finish(jobs[0])
    with pytest.raises(TransportError, match="queue full"):
        ledger.admit(BATCH, None)
    assert [completion.ticket for completion in ledger.take_completions()] == [jobs[0].ticket]
    ledger.admit(BATCH, None)


def test_the_source_of_a_write_is_here_and_its_target_there() -> None:
    books: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings())
    books.add_peer(PEER, Endpoint("test", 20, {}), "link")
    for direction, row in ((Direction.READ, [15, 5, 5]), (Direction.WRITE, [5, 15, 5])):
        books.admit(Batch(PEER, direction, np.array([row], np.uint64)), None)
        command = books.take_commands()[0]
        assert isinstance(command, PostJob)
        assert command.job.direction is direction
        other = Direction.WRITE if direction is Direction.READ else Direction.READ
        with pytest.raises(RangeError, match="region of 10 bytes"):
            books.admit(Batch(PEER, other, np.array([row], np.uint64)), None)
    books.finish_all()
    books.close()


def test_runs_that_were_checked_against_another_connection_are_refused() -> None:
    def reconnect(link: str, runs: Runs | StripTable) -> Runs | StripTable:
        books.remove_peer(PEER)
        books.add_peer(PEER, Endpoint("test", 1, {}), "smaller")
        return runs

    books: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings(), reconnect)
    books.add_peer(PEER, Endpoint("test", 10, {}), "link")
    with pytest.raises(TransportError, match="connected anew in the meantime; post again"):
        books.admit(BATCH, None)
    assert [type(command) for command in books.take_commands()] == [RevokeLink]
    books.close()


def test_finishing_twice_is_a_bug(ledger: Ledger[str]) -> None:
    ledger.admit(BATCH, None)
    command = ledger.take_commands()[0]
    assert isinstance(command, PostJob)
    ledger.finish(command.job)
    assert not ledger.is_in_flight(command.job)
    with pytest.raises(Bug):
        ledger.finish(command.job)
    ledger.ask_cancel(command.job.ticket)
    assert ledger.take_commands() == []


def test_a_shut_ledger_never_lets_its_mover_sleep(ledger: Ledger[str]) -> None:
    ledger.admit(BATCH, None)
    ledger.shut("closed")
    ledger.shut("another reason")
    ledger.take_commands()
    assert is_set(ledger.work)
    ledger.finish_all()
    assert [completion.error for completion in ledger.take_completions()] == ["closed"]
    with pytest.raises(TransportError, match="closed"):
        ledger.admit(BATCH, None)


def test_a_wakeup_is_a_flag_not_a_counter() -> None:
    wakeup = Wakeup()
    for _ in range(100_000):
        wakeup.set()
    wakeup.clear()
    assert not is_set(wakeup)
    wakeup.clear()
    wakeup.close()
    wakeup.close()
    wakeup.set()
    wakeup.clear()
    assert wakeup.fd == -1


def test_a_small_batch_is_moved_by_the_caller_and_completes_like_any_other(ledger: Ledger[str]) -> None:
    ticket = ledger.move_now(BATCH, lambda link, batch: len(link) + count_runs(batch.runs))
    assert ticket is not None
    assert is_set(ledger.done)
    assert not is_set(ledger.work)
    assert [(each.ticket, each.moved_bytes, each.error) for each in ledger.take_completions()] == [(ticket, 5, "")]
    assert not is_set(ledger.done)
    assert ledger.move_now(BATCH, lambda *_: 5) != ticket


def test_what_the_caller_cannot_move_is_left_to_the_mover(ledger: Ledger[str]) -> None:
    assert ledger.move_now(BATCH, lambda *_: 0) is None
    assert ledger.take_completions() == []


def test_a_small_batch_overtakes_nothing(ledger: Ledger[str]) -> None:
    moved: list[str] = []

    def move(link: str, batch: Batch) -> int:
        moved.append(link)
        return count_runs(batch.runs)

    ledger.admit(BATCH, None)
    assert ledger.move_now(BATCH, move) is None
    (command,) = ledger.take_commands()
    assert ledger.move_now(BATCH, move) is None
    assert isinstance(command, PostJob)
    ledger.finish(command.job)
    assert moved == []
    assert ledger.move_now(BATCH, move) is not None
    assert moved == ["link"]
    # As many completions wait as may be in flight.
    assert ledger.move_now(BATCH, move) is None


def test_nothing_is_moved_for_a_peer_that_was_revoked_or_after_the_end(ledger: Ledger[str]) -> None:
    ledger.remove_peer(PEER)
    assert ledger.move_now(BATCH, lambda *_: 5) is None
    ledger.take_commands()
    with pytest.raises(TransportError, match="not connected"):
        ledger.move_now(BATCH, lambda *_: 5)
    ledger.shut("closed")
    with pytest.raises(TransportError, match="closed"):
        ledger.move_now(BATCH, lambda *_: 5)


def test_a_transport_with_checks_of_its_own_keeps_them() -> None:
    books: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings(), lambda _, runs: runs)
    books.add_peer(PEER, Endpoint("test", 10, {}), "link")
    assert books.move_now(BATCH, lambda *_: 5) is None
    books.close()


def test_pages_that_the_caller_moves_overtake_nothing_and_complete_like_any_batch(ledger: Ledger[str]) -> None:
    moved: list[tuple[str, Pages]] = []

    def move(link: str, pages: Pages) -> tuple[int, int]:
        moved.append((link, pages))
        return 5, 3

    ledger.admit(BATCH, None)
    assert ledger.move_pages(PEER, PAGES, move) is None
    (command,) = ledger.take_commands()
    assert isinstance(command, PostJob)
    assert ledger.move_pages(PEER, PAGES, move) is None
    ledger.finish(command.job)
    assert moved == []
    answer = ledger.move_pages(PEER, PAGES, move)
    assert answer is not None
    assert (moved, answer.runs) == ([("link", PAGES)], 3)
    assert ledger.move_pages(PEER, PAGES, move) is None, "two wait to be handed out, which is the limit"
    assert [(each.ticket, each.moved_bytes) for each in ledger.take_completions()] == [
        (command.job.ticket, 0),
        (answer.ticket, 5),
    ]
    assert ledger.take_completions() == []
    assert not is_set(ledger.done)


def test_pages_are_left_alone_where_nothing_moves_them_or_runs_have_checks_of_their_own(ledger: Ledger[str]) -> None:
    assert ledger.move_pages(PEER, PAGES, lambda *_: (0, 0)) is None
    assert ledger.take_completions() == []
    books: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings(), lambda _, runs: runs)
    books.add_peer(PEER, Endpoint("test", 10, {}), "link")
    assert books.move_pages(PEER, PAGES, lambda *_: (5, 1)) is None
    books.close()


class Helper:
    """Moves what was begun when the test ends it; `wait_end` ends it too."""

    def __init__(self) -> None:
        self.wakeup_fd, self.wire_bytes, self.moving, self.waited, self.problem = -1, 5, False, 0, ""
        self.ends_when_looked_at = False
        self.near = self.ends_while_lingering = False
        self.confirmed = 0

    def begin(self, link: str, batch: Batch, wakeup_fd: int) -> int:
        assert (link, batch, self.moving) == ("link", BATCH, False)
        self.wakeup_fd, self.moving = wakeup_fd, bool(self.wire_bytes)
        return self.wire_bytes

    def end(self) -> None:
        self.moving = False
        os.write(self.wakeup_fd, b"\0")

    def has_ended(self) -> bool:
        was_moving = self.moving
        if self.ends_when_looked_at and was_moving:
            self.end()
        return not was_moving

    def come_near(self) -> None:
        self.near = True
        os.write(self.wakeup_fd, b"\0")

    def is_near(self) -> bool:
        return self.near

    def linger(self) -> bool:
        assert self.near
        was_moving, self.near = self.moving, False
        self.moving = was_moving and not self.ends_while_lingering
        return was_moving and not self.moving

    def wait_end(self) -> None:
        self.waited += 1
        self.end()

    def confirm(self, link: str) -> None:
        assert (link, self.moving) == ("link", False)
        self.confirmed += 1
        if self.problem:
            raise PeerLost(self.problem)


@pytest.fixture
def helper() -> Helper:
    return Helper()


@pytest.fixture
def begun(helper: Helper) -> Iterator[Ledger[str]]:
    made: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings(max_in_flight=2), starter=helper)
    made.add_peer(PEER, Endpoint("test", 10, {}), "link")
    yield made
    made.close()


def test_a_begun_batch_completes_when_its_last_byte_is_there(begun: Ledger[str], helper: Helper) -> None:
    for problem in ("", "withdrawn"):
        helper.problem = problem
        ticket = begun.begin_now(BATCH)
        assert ticket is not None
        assert not is_set(begun.work)
        assert begun.take_completions() == []
        assert not is_set(begun.done)
        helper.end()
        assert is_set(begun.done)
        (completion,) = begun.take_completions()
        assert (completion.ticket, completion.moved_bytes) == (ticket, 5)
        assert completion.error == (f"PeerLost: {problem}" if problem else "")
        assert not is_set(begun.done)
        assert begun.take_completions() == []


def test_an_early_byte_is_waited_for_and_leaves_no_byte_behind(begun: Ledger[str], helper: Helper) -> None:
    ticket = begun.begin_now(BATCH)
    helper.ends_while_lingering = True
    helper.come_near()
    assert is_set(begun.done)
    assert [each.ticket for each in begun.take_completions()] == [ticket]
    assert not is_set(begun.done)


def test_an_end_that_came_before_its_early_byte_was_taken_is_not_forgotten(begun: Ledger[str], helper: Helper) -> None:
    ticket = begun.begin_now(BATCH)
    helper.come_near()
    helper.end()
    assert [each.ticket for each in begun.take_completions()] == [ticket]
    assert not is_set(begun.done)


@pytest.mark.parametrize("ends_when_looked_at", [False, True])
def test_a_byte_that_came_too_early_is_taken_and_the_end_has_its_own(
    begun: Ledger[str], helper: Helper, ends_when_looked_at: bool
) -> None:
    ticket = begun.begin_now(BATCH)
    helper.come_near()
    helper.ends_when_looked_at = ends_when_looked_at
    assert begun.take_completions() == []
    if not ends_when_looked_at:
        assert not is_set(begun.done), "a caller would look again and again"
        helper.end()
    assert is_set(begun.done)
    assert [each.ticket for each in begun.take_completions()] == [ticket]
    assert not is_set(begun.done)


def test_many_begun_batches_between_two_looks_leave_no_byte_behind(helper: Helper) -> None:
    books: Ledger[str] = Ledger(Region.of(bytearray(10)), TransportSettings(max_in_flight=200), starter=helper)
    books.add_peer(PEER, Endpoint("test", 10, {}), "link")
    for _ in range(150):
        assert books.begin_now(BATCH) is not None
        helper.end()
    assert len(books.take_completions()) == 150
    assert not is_set(books.done)
    books.close()


def test_a_begun_batch_that_ends_right_after_the_look_is_not_forgotten(begun: Ledger[str], helper: Helper) -> None:
    begun.move_now(BATCH, lambda *_: 5)
    ticket = begun.begin_now(BATCH)
    helper.ends_when_looked_at = True
    assert ticket not in [each.ticket for each in begun.take_completions()]
    assert is_set(begun.done)
    assert [each.ticket for each in begun.take_completions()] == [ticket]
    assert not is_set(begun.done)


@pytest.mark.parametrize("problem", ["", "withdrawn"])
def test_the_peer_of_small_batches_is_confirmed_once_when_they_complete(
    begun: Ledger[str], helper: Helper, problem: str
) -> None:
    tickets = [begun.move_now(BATCH, lambda *_: 5) for _ in range(2)]
    assert helper.confirmed == 0, "a peer that dies after this must not count"
    helper.problem = problem
    error = f"PeerLost: {problem}" if problem else ""
    assert [(each.ticket, each.error) for each in begun.take_completions()] == [(ticket, error) for ticket in tickets]
    assert helper.confirmed == 1
    assert not is_set(begun.done)
    assert begun.take_completions() == []


@pytest.mark.parametrize("end", ["revoke", "shut"])
def test_small_batches_are_confirmed_before_their_peer_is_released(begun: Ledger[str], helper: Helper, end: str) -> None:
    ticket = begun.move_now(BATCH, lambda *_: 5)
    if end == "revoke":
        begun.remove_peer(PEER)
    else:
        begun.shut("closed")
    assert helper.confirmed == 1
    helper.problem = "released"
    assert is_set(begun.done)
    assert [(each.ticket, each.error) for each in begun.take_completions()] == [(ticket, "")]


def test_what_is_moved_later_completes_later(begun: Ledger[str], helper: Helper) -> None:
    small = begun.move_now(BATCH, lambda *_: 5)
    large = begun.begin_now(BATCH)
    helper.end()
    assert [each.ticket for each in begun.take_completions()] == [small, large]
    small = begun.move_now(BATCH, lambda *_: 5)
    admitted = begun.admit(BATCH, None)
    (command,) = begun.take_commands()
    assert isinstance(command, PostJob)
    begun.finish(command.job)
    assert [each.ticket for each in begun.take_completions()] == [small, admitted]


def test_nothing_is_begun_beside_other_work(begun: Ledger[str], helper: Helper) -> None:
    assert begun.begin_now(BATCH) is not None
    assert begun.begin_now(BATCH) is None
    assert begun.move_now(BATCH, lambda *_: 5) is None
    helper.end()
    begun.admit(BATCH, None)
    (command,) = begun.take_commands()
    assert begun.begin_now(BATCH) is None
    assert isinstance(command, PostJob)
    begun.finish(command.job)
    first, second = begun.take_completions()
    assert first.ticket < second.ticket
    helper.wire_bytes = 0
    assert begun.begin_now(BATCH) is None
    assert begun.take_completions() == []


def test_a_begun_batch_counts_in_the_queue(begun: Ledger[str]) -> None:
    begun.begin_now(BATCH)
    begun.admit(BATCH, None)
    with pytest.raises(TransportError, match="queue full"):
        begun.admit(BATCH, None)


def test_a_begun_batch_is_waited_for_before_its_peer_is_released(begun: Ledger[str], helper: Helper) -> None:
    ticket = begun.begin_now(BATCH)
    begun.stop_begun("another link", "revoked")
    assert helper.waited == 0
    begun.stop_begun("link", "revoked")
    assert helper.waited == 1
    assert [(each.ticket, each.error) for each in begun.take_completions()] == [(ticket, "revoked")]
    begun.stop_begun("link", "revoked")
    assert helper.waited == 1


def test_a_begun_batch_is_waited_for_before_the_end(begun: Ledger[str], helper: Helper) -> None:
    ticket = begun.begin_now(BATCH)
    begun.shut("closed")
    begun.finish_all()
    assert helper.waited == 1
    assert [(each.ticket, each.error) for each in begun.take_completions()] == [(ticket, "closed")]
    with pytest.raises(TransportError, match="closed"):
        begun.begin_now(BATCH)

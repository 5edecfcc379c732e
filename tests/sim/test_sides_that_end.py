"""Sides that are aborted, die, queue, or send their last message at odd times, as connectors for vLLM got them wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from scenario import (
    BOTH_DELIVERED,
    HOP_S,
    Flow,
    at_every_event,
    disturbed,
    echo,
    every_flow,
    every_push,
    first_broken,
    losing,
    make,
    play,
    request,
    sides,
)

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.card import Card
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome
from kvbaton.core.lifecycle import SOURCE, TARGET
from kvbaton.core.messages import Announced, Confirmed, Grant, Heartbeat, Message, Release, Stop, Stopped, encode
from kvbaton.sim.instance import Bugs
from kvbaton.sim.run import LIMITS, Run
from kvbaton.sim.script import Fault, FaultKind, Script


class TestTargetAborted:
    """A target that is aborted at any stage frees the source once; its own blocks go back only when nobody can write to them,
    and nothing late lands in them when they are used anew."""

    @staticmethod
    def _aborts(flow: Flow, *, step: int = 1) -> Iterator[Script]:
        """Two requests for a pool that holds one: the second takes over the very blocks of the first."""
        pair = request(flow), request(flow, at_s=0.004)
        return at_every_event(make(flow, *pair, decode_blocks=3, move_s=0.004), Fault(FaultKind.CANCEL_TARGET), step=step)

    @every_flow
    def test_target_aborted_at_every_stage(self, flow: Flow) -> None:
        stories = [play(script) for script in self._aborts(flow)]
        assert not [story.result.violations for story in stories if story.rules]
        assert {story.ends[0][1] for story in stories} == {Outcome.CANCELLED, Outcome.DELIVERED}
        assert all(story.ends[1] == BOTH_DELIVERED for story in stories)

    @every_flow
    def test_memory_is_back_as_soon_as_every_copy_is_quiet(self, flow: Flow) -> None:
        for script in at_every_event(make(flow), Fault(FaultKind.CANCEL_TARGET)):
            story = play(script)
            hurry = 2 * HOP_S if story.ends[0][1] is Outcome.CANCELLED else 6 * HOP_S
            assert story.back("d0") < hurry
            had_met = story.ends[0][0] is not Outcome.EXPIRED
            patience = 6 * HOP_S if had_met else LIMITS.defer_timeout + 6 * HOP_S
            assert story.back("p0") < patience

    @every_flow
    def test_without_waiting_for_quiet_a_late_write_lands(self, flow: Flow) -> None:
        class Hasty(TargetSide):
            def is_quiet(self, record: TargetRecord) -> bool:
                del record
                return True

        assert first_broken(self._aborts(flow), sides(target=Hasty)) == {"epoch"}


class TestSourceEnds:
    """When a source is aborted, crashes, fails or expires, its target is told at once, or gives up by its own deadline; a
    retry then gives the right tokens."""

    @every_flow
    def test_an_aborted_source_notifies_its_target_at_once(self, flow: Flow) -> None:
        told = 0
        for script in at_every_event(make(flow), Fault(FaultKind.CANCEL_SOURCE)):
            story = play(script)
            assert not story.rules
            if story.said("Over(") and story.ends[0][1] is not Outcome.DELIVERED:
                told += 1
                assert story.ends[0] == (Outcome.CANCELLED, Outcome.FAILED)
                assert story.times("TargetEnded", "the source cancelled")[0] - story.fault_at < HOP_S
            assert story.back("d0") < LIMITS.transfer_timeout + HOP_S
        assert told > 10

    @every_push
    def test_without_a_message_a_target_waits(self, flow: Flow) -> None:
        class Silent(SourceSide):
            def send_end(self, record: SourceRecord) -> None:
                pass

        stories = [play(script, sides(source=Silent)) for script in at_every_event(make(flow), Fault(FaultKind.CANCEL_SOURCE))]
        waited = [story.times("TargetEnded")[0] - story.fault_at for story in stories if story.said("TargetEnded")]
        assert max(waited) >= LIMITS.retry / 2

    @every_flow
    @pytest.mark.parametrize("one_host", [False, True], ids=["two-hosts", "one-host"])
    def test_a_crashed_source_is_given_up_in_time(self, flow: Flow, one_host: bool) -> None:
        patience = LIMITS.transfer_timeout + (0 if one_host else flow.fences * LIMITS.stop_timeout)
        for script in at_every_event(make(flow, one_host=one_host), Fault(FaultKind.CRASH, who="p0", for_s=20.0), step=2):
            story = play(script)
            assert not story.rules
            assert story.back("d0") < patience + HOP_S

    @every_flow
    def test_without_a_deadline_a_target_waits_for_ever(self, flow: Flow) -> None:
        class Patient(TargetSide):
            def _deadline(self, record: TargetRecord) -> float:
                del record
                return math.inf

        scripts = at_every_event(make(flow), Fault(FaultKind.CRASH, who="p0", for_s=20.0), step=2)
        stories = [play(script, sides(target=Patient)) for script in scripts]
        assert max(story.back("d0") for story in stories) > 19.0

    @every_flow
    @pytest.mark.parametrize("kind", [FaultKind.RESTART, FaultKind.COPY_FAILS, FaultKind.CANCEL_SOURCE], ids=str)
    def test_a_retry_gives_the_right_tokens(self, flow: Flow, kind: FaultKind) -> None:
        script = make(flow, request(flow, retries=9), router_cancels=1.0)
        for each in at_every_event(script, Fault(kind, who="p0"), step=5):
            story = play(each)
            assert not story.rules
            assert story.ends[-1][1] is Outcome.DELIVERED or story.ends == [(None, None)]


class TestTargetDies:
    """A source takes its blocks back when its target has died, not while a slow target only queues; and it always holds them
    longer than a target waits."""

    @every_flow
    def test_a_dead_targets_blocks_are_back_after_the_lease(self, flow: Flow) -> None:
        reach = 6 * HOP_S
        for script in at_every_event(make(flow), Fault(FaultKind.CRASH, who="d0", for_s=20.0), step=2):
            story = play(script)
            assert not story.rules
            waited = story.back("p0")
            assert waited < LIMITS.defer_timeout + reach
            if story.ends[0][0] is Outcome.EXPIRED:
                assert waited > LIMITS.defer_timeout - LIMITS.beat_s - reach

    @staticmethod
    def _queue(flow: Flow) -> Script:
        """The second request waits for the blocks of the first, far longer than its source would hold for nobody."""
        pair = request(flow), request(flow, at_s=0.001)
        return make(flow, *pair, decode_blocks=3, decode_s=3 * LIMITS.defer_timeout)

    @every_flow
    def test_a_slow_but_living_target_keeps_its_source(self, flow: Flow) -> None:
        story = play(self._queue(flow))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED, BOTH_DELIVERED]
        assert story.back_at["p0"] > 3 * LIMITS.defer_timeout

    @every_flow
    def test_without_heartbeats_a_queued_target_loses_its_source(self, flow: Flow) -> None:
        class Mute(TargetSide):
            def beat(self) -> dict[Incarnation, Heartbeat]:
                return {}

        assert play(self._queue(flow), sides(target=Mute)).rules == {"spurious failure"}

    class Impatient(Coordinator):
        """A target that would wait longer than the source holds."""

        def __init__(self, card: Card, *others: object) -> None:
            is_target = card.incarnation.startswith("d")
            card = msgspec.structs.replace(card, transfer_timeout=LIMITS.defer_timeout) if is_target else card
            super().__init__(card, *others)  # type: ignore[arg-type]

    @every_flow
    def test_a_target_that_waits_longer_than_the_source_holds_is_refused(self, flow: Flow) -> None:
        story = play(make(flow), Bugs(coordinator=self.Impatient), prepare=disturbed)
        assert not story.rules
        assert story.ends[0][1] is Outcome.FAILED
        assert story.said("TargetEnded", "source defer_timeout must be longer than target transfer_timeout")
        assert not story.said("-> p0: Grant(")

    @every_flow
    def test_without_the_check_it_is_not_refused(self, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvbaton.agent.coordinator.check_compatible", lambda *_, **__: None)
        assert play(make(flow), Bugs(coordinator=self.Impatient)).ends == [BOTH_DELIVERED]


class TestLateMessages:
    """A last word that comes late, early, for nobody, or more often than expected is counted, and frees nothing twice."""

    @every_flow
    def test_every_message_again_while_it_lives_and_when_it_is_over(self, flow: Flow) -> None:
        pair = request(flow), request(flow, at_s=0.01)
        story = play(make(flow, *pair, decode_blocks=3), prepare=echo(0.0, 0.002, 0.02, 2.0, 6.0))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED, BOTH_DELIVERED]
        assert {"release", "grant", "confirmed"} <= set(story.counted)

    @staticmethod
    def _forged(moment: float, key: HandoffKey, grant: int, run: Run) -> None:
        """Say every last word there is, in both directions."""
        disturbed(run)
        for_source = Release(key, grant), Stop(key, grant, Outcome.FAILED) if grant == 99 else Release(key, grant)
        for_target = Stopped(key, grant), Confirmed(key, grant, 1, 1)
        for sender, reader, messages in (("d0#2", "p0#1", for_source), ("p0#1", "d0#2", for_target)):
            for message in messages:
                frame = encode(Incarnation(sender), reader, message)
                run.world.at(moment, None, partial(run.cluster.arrive, reader[:2], frame, sender[:2]))

    @every_flow
    @pytest.mark.parametrize("key", ["t0.1", "unknown"])
    @pytest.mark.parametrize("grant", [0, 99])
    def test_a_last_message_for_no_hand_off_or_for_another_grant(self, flow: Flow, key: str, grant: int) -> None:
        for moment in (0.0, 0.004, 0.008, 0.012, 0.016, 0.1):
            forged = partial(self._forged, moment, HandoffKey(key), grant)  # type: ignore[arg-type]
            story = play(make(flow), prepare=forged)
            assert not story.rules
            assert story.ends == [BOTH_DELIVERED]

    @every_push
    def test_a_release_before_the_prefill_is_done_is_late(self, flow: Flow) -> None:
        forged = partial(self._forged, 0.008, HandoffKey("t0.1"), 1)  # type: ignore[arg-type]
        story = play(make(flow, request(flow, tokens=8, chunk=1)), prepare=forged)
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert story.counted["release"] + story.counted["released"] >= 2

    @every_flow
    def test_without_late_rows_a_duplicate_is_an_error(self, flow: Flow) -> None:
        class StrictSource(SourceSide):
            table = dataclasses.replace(SOURCE, late=frozenset())

        class StrictTarget(TargetSide):
            table = dataclasses.replace(TARGET, late=frozenset())

        scripts = at_every_event(make(flow), Fault(FaultKind.CANCEL_TARGET), step=3)
        assert first_broken(scripts, sides(StrictSource, StrictTarget), prepare=echo(0.0, 0.002, 0.02)) == {"exception"}


class TestLossyNetwork:
    """When messages are lost, doubled and reordered, every request finishes or fails in bounded time, and no block is lost."""

    LOSSY_S = 3.0
    END_S = LOSSY_S + LIMITS.defer_timeout + LIMITS.transfer_timeout

    def _storm(self, flow: Flow, seed: int) -> Script:
        requests = (request(flow, at_s=0.2 * number, tokens=1 + number % 4, decode_delay_s=0.01) for number in range(12))
        ways = (("p0", "d0"), ("d0", "p0"))
        faults = (Fault(FaultKind.LOSSY, who=who, other=other, for_s=self.LOSSY_S) for who, other in ways)
        return make(flow, *requests, faults=faults, seed=seed, prefill_blocks=12, decode_blocks=8)

    @every_flow
    def test_all_requests_end_in_bounded_time(self, flow: Flow) -> None:
        delivered = 0
        for seed in range(8):
            story = play(self._storm(flow, seed))
            assert not story.rules
            assert all(None not in pair for pair in story.ends)
            delivered += sum(target is Outcome.DELIVERED for _, target in story.ends)
            assert max(story.back_at.values()) < self.END_S
        assert delivered > 8 * 12 * 0.9

    @every_flow
    def test_without_asking_again_something_waits_for_a_hard_end(self, flow: Flow) -> None:
        class Once(TargetSide):
            def _asks_again(self, record: TargetRecord) -> bool:
                del record
                return False

        stories = [play(self._storm(flow, seed), sides(target=Once)) for seed in range(8)]
        assert any(story.out or max(story.back_at.values()) > self.END_S for story in stories)

    @every_flow
    @pytest.mark.parametrize("lost", [Grant, Announced, Confirmed, Release], ids=lambda kind: kind.__name__)
    def test_the_first_three_of_any_message_may_be_lost(self, flow: Flow, lost: type[Message]) -> None:
        left = [3]

        def is_lost(message: Message) -> bool:
            left[0] -= isinstance(message, lost)
            return isinstance(message, lost) and left[0] >= 0

        story = play(make(flow), prepare=losing(is_lost))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert max(story.back_at.values()) < 7 * LIMITS.retry + LIMITS.beat_s * 4

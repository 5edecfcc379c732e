"""Doubled, late and reordered messages, as SGLang got them wrong: each rule holds, and is missed when it is removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from scenario import (
    BOTH_DELIVERED,
    HOP_S,
    Flow,
    at_every_event,
    broken,
    confirmed_early,
    disturbed,
    echo,
    every_flow,
    every_push,
    every_read,
    every_write,
    first_broken,
    make,
    play,
    request,
    sides,
)

from kvbaton.agent import source as source_module
from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Offer
from kvbaton.agent.rank_orders import RankReport, SpansMoved
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.handoff import BlockLists, HandoffKey, Incarnation, Mode, Outcome, Span
from kvbaton.core.lifecycle import TARGET, Row, SourceState, TargetEffect, TargetEvent, TargetState
from kvbaton.core.messages import Grant, Stopped
from kvbaton.sim.engine import Ended, SimPrompt, SourceEngine
from kvbaton.sim.instance import Bugs
from kvbaton.sim.plant_rows import with_rows
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.run import LIMITS, Run
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.sim.transport import SimRank


class TestLastPieceByCount:
    """What is the last piece is decided by counting: more than announced, fewer, or something after the last is an error."""

    class Fewer(Coordinator):
        """An engine that keeps the second span to itself."""

        def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
            if spans[0].number != 1:
                super().spans_ready(key, blocks, spans)

    class More(Coordinator):
        """An engine that tells its first span twice, as two."""

        def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
            again = msgspec.structs.replace(spans[0], number=99)
            super().spans_ready(key, blocks, (*spans, again) if spans[0].number == 0 else spans)

    class AfterLast(Coordinator):
        """An engine that goes on after it has offered the whole."""

        def offer(self, offer: Offer) -> None:
            super().offer(offer)
            self.spans_ready(offer.key, offer.blocks, (Span(9, 0, 1, 0, 1),))

    @every_push
    @pytest.mark.parametrize(
        ("engine", "reason"),
        [
            (Fewer, "layer 1, where there is token 0 to come next"),
            (More, "span 99 starts at token 0 of layer 0, where there is token 2 to come next"),
            (AfterLast, "1 more spans after it had offered the whole cache"),
        ],
        ids=["fewer", "more", "after-last"],
    )
    @pytest.mark.parametrize("delay_s", [0.0, 0.1], ids=["early-target", "late-target"])
    def test_another_count_than_the_whole_is_an_error(
        self, flow: Flow, engine: type[Coordinator], reason: str, delay_s: float
    ) -> None:
        story = play(make(flow, request(flow, decode_delay_s=delay_s)), Bugs(coordinator=engine), prepare=disturbed)
        assert not story.rules
        assert story.ends[0][0] is Outcome.FAILED
        assert story.ends[0][1] is not Outcome.DELIVERED
        assert story.said("SourceEnded", reason)
        if not delay_s:
            assert story.said("TargetEnded", reason)
            assert story.back_at["d0"] < 5 * HOP_S

    @every_push
    def test_without_the_count_poison_is_decoded(self, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
        class Trusting(TargetSide):
            def span_problem(self, record: TargetRecord) -> str:
                del record
                return ""

        class Careless(self.Fewer):  # type: ignore[name-defined, misc]
            target_side = Trusting

        monkeypatch.setattr(source_module, "span_problem", lambda *_: "")
        assert play(make(flow), Bugs(coordinator=Careless), prepare=disturbed).rules == {"foreign byte"}

    @every_read
    def test_a_target_counts_for_itself(self, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source_module, "span_problem", lambda *_: "")
        story = play(make(flow), Bugs(coordinator=self.More), prepare=disturbed)
        assert not story.rules
        if flow.mode is Mode.PUSH:
            assert story.ends == [(Outcome.FAILED, Outcome.FAILED)]
            assert story.said("TargetEnded", "the source's spans are not the whole cache")


class TestEitherSideFirst:
    """Either side may come first, more than once, or when all is over: nothing comes back to life, and what nobody knows
    expires."""

    class Absent(SourceEngine):
        """A prefill engine that never hears of a request."""

        def prefill(self, prompt: SimPrompt, answer: Callable[[], None], ended: Ended) -> None:
            del prompt, answer, ended

    @every_push
    def test_a_grant_whose_prefill_never_comes_is_given_up(self, flow: Flow) -> None:
        story = play(make(flow), Bugs(source_engine=self.Absent), prepare=disturbed)
        assert not story.rules
        assert story.ends == [(None, Outcome.EXPIRED)]
        assert story.back_at["d0"] < LIMITS.transfer_timeout + HOP_S

    @staticmethod
    def _orphans(flow: Flow) -> Script:
        """The target dies with its grant parked at a source that never hears of the request."""
        return make(flow, faults=[Fault(FaultKind.CRASH, at_s=0.01, who="d0", for_s=20.0)])

    @every_push
    def test_a_grant_of_a_dead_target_for_nothing_expires(self, flow: Flow) -> None:
        parked: dict[bool, float] = {}

        def prepare(run: Run) -> None:
            disturbed(run)
            run.is_probed = False
            live = run.all_instances[0].coordinator.source.live
            run.world.on_event.append(lambda: parked.update({bool(live): run.world.now}))
            run.world.at(3.0, None, lambda: None)

        assert not play(self._orphans(flow), Bugs(source_engine=self.Absent), prepare=prepare).rules
        assert 3.0 <= parked[True] < LIMITS.defer_timeout + HOP_S < parked[False] + LIMITS.defer_timeout

    @every_push
    def test_without_a_lease_it_stays_for_ever(self, flow: Flow) -> None:
        class Hoarder(SourceSide):
            def _has_deadline(self, record: SourceRecord) -> bool:
                return record.state is not SourceState.PARKED and super()._has_deadline(record)

        bugs = dataclasses.replace(sides(source=Hoarder), source_engine=self.Absent)
        assert play(self._orphans(flow), bugs, prepare=disturbed).rules == {"hard end"}

    @every_flow
    @pytest.mark.parametrize("kind", [FaultKind.CANCEL_TARGET, FaultKind.CANCEL_SOURCE], ids=str)
    def test_a_grant_after_any_end_brings_nothing_back(self, flow: Flow, kind: FaultKind) -> None:
        again = echo(0.0, 0.005, 0.5, 7.0, of=Grant)
        assert not broken(at_every_event(make(flow), Fault(kind), step=3), prepare=again)

    @every_push
    def test_without_high_water_marks_it_does(self, flow: Flow) -> None:
        scripts = at_every_event(make(flow), Fault(FaultKind.CANCEL_TARGET), step=3)
        rules = first_broken(scripts, PLANTS["late-grant"].bugs, prepare=echo(0.5, of=Grant))
        assert rules == {"resurrection"}


class TestFailedStaysFailed:
    """Failed never becomes done: a confirmation after the end is ignored, and nothing that is over is made anew by it."""

    @staticmethod
    def _late_words(flow: Flow) -> list[Script]:
        """The target gives up while everything the source says is slow to come."""
        slow = Fault(FaultKind.CLOG, who="p0", other="d0", for_s=1.0)
        script = make(flow, router_cancels=0.0)
        return [
            msgspec.structs.replace(each, faults=(*each.faults, Fault(FaultKind.CANCEL_TARGET, at_s=0.3)))
            for each in at_every_event(script, slow, step=2)
        ]

    @every_flow
    def test_failed_never_becomes_done(self, flow: Flow) -> None:
        late = 0
        for script in self._late_words(flow):
            story = play(script, prepare=echo(0.5, 3.0))
            assert not story.rules
            assert story.ends[0][1] in (Outcome.CANCELLED, Outcome.DELIVERED)
            cancelled_first = story.ends[0][1] is Outcome.CANCELLED
            assert story.said("Landed(") is not cancelled_first
            late += cancelled_first
        assert late > 5

    @every_flow
    def test_a_failed_hand_off_that_lands_would_be_seen(self, flow: Flow) -> None:
        class Forgiving(TargetSide):
            table = with_rows(
                TARGET,
                {
                    (state, TargetEvent.QUIET_CANCELLED): Row(
                        TargetState.DELIVERED, (TargetEffect.SEND_RELEASE, TargetEffect.DELIVER)
                    )
                    for state in (TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED)
                },
            )

        assert first_broken(self._late_words(flow), sides(target=Forgiving)) & {"foreign byte", "everything ends"}


class TestDoubledReports:
    """A rank that reports a success twice counts once: what counts is the set of ranks, and of spans, not the number of
    reports."""

    class Stammering(SimRank):
        """Says everything twice."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            report = self._report

            def twice(what: RankReport) -> None:
                report(what)
                report(what)

            self._report = twice

    @staticmethod
    def _uneven(flow: Flow) -> list[Script]:
        """One rank is far slower than the others."""
        slow = Fault(FaultKind.STALL, at_s=0.004, who="p0" if flow.source_writes else "d0", number=2, for_s=0.5)
        return [make(flow, request(flow, tokens=5), seed=seed, ranks=3, faults=(slow,)) for seed in range(4)]

    @every_flow
    def test_a_success_that_is_reported_twice_counts_once(self, flow: Flow) -> None:
        for script in self._uneven(flow):
            story = play(script, Bugs(rank=self.Stammering))
            assert not story.rules
            assert story.ends == [BOTH_DELIVERED]

    @every_flow
    def test_counting_reports_instead_of_ranks_would_be_seen(self, flow: Flow) -> None:
        class CountingTarget(TargetSide):
            def count_moved(self, record: TargetRecord, report: SpansMoved) -> None:
                number = sum(len(moved) for moved in record.moved.values())
                record.moved.setdefault(0, set()).update(range(number, number + len(report.spans)))

            def is_complete(self, record: TargetRecord) -> bool:
                wanted = (record.span_count or 0) * len(self._card.ranks)
                return super().is_complete(record) if record.executor == "source writes" else self._enough(record, wanted)

            def _enough(self, record: TargetRecord, wanted: int) -> bool:
                return bool(wanted) and self.has_aux(record) and len(record.moved.get(0, ())) >= wanted

        class CountingSource(SourceSide):
            reports = 0

            def on_copy(self, report: Any) -> None:
                self.reports += len(report.spans) if isinstance(report, SpansMoved) else 0
                super().on_copy(report)

            def _is_moved(self, record: SourceRecord) -> bool:
                return self.reports >= len(record.spans) * self._ranks_count

        bugs = dataclasses.replace(sides(CountingSource, CountingTarget), rank=self.Stammering)
        assert "foreign byte" in broken(self._uneven(flow), bugs, prepare=confirmed_early)

    @every_read
    def test_a_success_of_the_wrong_rank_would_be_seen(self, flow: Flow) -> None:
        assert "foreign byte" in broken(self._uneven(flow), PLANTS["wrong-rank"].bugs, prepare=confirmed_early)


class TestAbortFromTheTarget:
    """An abort from the target reaches every rank of the source; blocks go back after the acknowledged stop or a fence, and an
    acknowledgement of an earlier attempt does not count."""

    @staticmethod
    def _aborts(flow: Flow) -> list[Script]:
        pair = request(flow), request(flow, at_s=0.3)
        script = make(flow, *pair, ranks=3, decode_blocks=3, move_s=0.01)
        return list(at_every_event(script, Fault(FaultKind.CANCEL_TARGET), step=3))

    @every_write
    def test_an_abort_reaches_every_rank_of_the_source(self, flow: Flow) -> None:
        stopped = 0
        for script in self._aborts(flow):
            story = play(script)
            assert not story.rules
            assert story.ends[1] == BOTH_DELIVERED
            stopped += story.said("p0#1 -> d0: Stopped(")
        assert stopped > 10

    @every_write
    def test_a_rank_that_gets_no_order_would_be_seen(self, flow: Flow) -> None:
        class OnlyFirst(SourceSide):
            def stop_copy(self, record: SourceRecord) -> None:
                for rank in set(record.open_copies) - {0}:
                    del record.open_copies[rank]
                super().stop_copy(record)

        assert first_broken(self._aborts(flow), sides(source=OnlyFirst)) & {"epoch", "everything ends"}

    @every_write
    def test_without_an_acknowledgement_blocks_wait_for_the_fence(self, flow: Flow) -> None:
        script = make(flow, faults=[Fault(FaultKind.CUT, at_s=0.006, who="p0", other="d0", for_s=9.0)])
        story = play(msgspec.structs.replace(script, faults=(*script.faults, Fault(FaultKind.CANCEL_TARGET, at_s=0.008))))
        assert not story.rules
        waited = story.back_at["d0"] - 0.008
        assert flow.fences * LIMITS.stop_timeout - HOP_S < waited < flow.fences * LIMITS.stop_timeout + HOP_S

    @every_write
    def test_freeing_on_time_alone_would_be_seen(self, flow: Flow) -> None:
        """The source stands still with writes posted; they go on when nobody expects them any more."""
        stalls = [Fault(FaultKind.STALL, who="p0", number=rank, for_s=6.0) for rank in range(2)]
        still = Fault(FaultKind.PAUSE, who="p0", for_s=9.0)
        later = [request(flow, at_s=at_s) for at_s in (0.0, 3.2)]
        scripts = list(at_every_event(make(flow, *later, decode_blocks=3), *stalls, still, step=2))
        assert not broken(scripts)
        assert first_broken(scripts, PLANTS["freed-on-time-alone"].bugs) == {"epoch"}

    @staticmethod
    def _retries(flow: Flow) -> list[Script]:
        """The same transfer id is tried again while the source's words about the first attempt are still on their way."""
        again = request(flow, retries=2, reuse_id=True, tokens=4)
        script = make(flow, again, router_cancels=1.0, move_s=0.02)
        return list(at_every_event(script, Fault(FaultKind.CANCEL_TARGET), step=4))

    @every_flow
    def test_an_acknowledgement_of_an_earlier_attempt_is_ignored(self, flow: Flow) -> None:
        ignored = 0
        for script in self._retries(flow):
            story = play(script, prepare=echo(0.03, 0.06, 0.1, of=Stopped))
            assert not story.rules
            ignored += story.counted["stopped"]
        assert ignored > 10

    @every_write
    def test_without_the_number_of_the_grant_it_would_count(self, flow: Flow) -> None:
        class Forgetful(TargetSide):
            def current(self, sender: Incarnation, key: HandoffKey, grant: int) -> TargetRecord | None:
                del grant
                record = self.live.get(key)
                return record if record is not None and record.source == sender else None

            def on_stopped(self, sender: Incarnation, stopped: Stopped) -> None:
                record = self.current(sender, stopped.key, stopped.grant)
                if record is not None:
                    record.peer_is_quiet = True
                super().on_stopped(sender, stopped)

        pair = [request(flow, at_s=at_s, transfer_id="again", tokens=4) for at_s in (0.0, 0.1)]
        first = Fault(FaultKind.CANCEL_TARGET, at_s=0.02)
        second = [Fault(FaultKind.CANCEL_TARGET, at_s=at_s, number=1) for at_s in (0.11, 0.12, 0.13)]
        scripts = [make(flow, *pair, seed=seed, move_s=0.05, faults=(first, each)) for seed in range(3) for each in second]
        late = echo(0.08, 0.09, of=Stopped)
        assert not broken(scripts, prepare=late)
        assert first_broken(scripts, sides(target=Forgetful), prepare=late) == {"epoch"}

"""Transfer ids, grants and counts, as connectors for vLLM got them wrong: each rule holds, and is missed when removed."""

from __future__ import annotations

import dataclasses
from functools import partial

import msgspec
import pytest
from scenario import (
    BOTH_DELIVERED,
    FLOWS,
    HOP_S,
    Flow,
    Story,
    at_every_event,
    broken,
    confirmed_early,
    disturbed,
    echo,
    every_flow,
    every_push,
    every_read,
    first_broken,
    make,
    play,
    request,
    sides,
)

from kvbaton.agent import source as source_module
from kvbaton.agent import target as target_module
from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import Allocation
from kvbaton.agent.rank import _Copy
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.handoff import MAX_TRANSFER_ID, BlockLists, Executor, HandoffKey, Incarnation, Outcome, Span
from kvbaton.core.messages import Grant, Release, encode
from kvbaton.core.strips import Plan, Runs
from kvbaton.sim.instance import Bugs
from kvbaton.sim.plants import PLANTS
from kvbaton.sim.run import Run
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.sim.transport import SimRank
from kvbaton.transport.base import PeerRank


class TestTransferIds:
    """A transfer id that is missing, used twice, reused, absurdly long or no text concerns one request only, and no two live
    requests are ever joined by one."""

    @staticmethod
    def _theft(flow: Flow) -> Script:
        """Two prompts of one transfer id: the thief's target asks the owner's source first."""
        owner = request(flow, decode_delay_s=0.05)
        thief = request(flow, at_s=0.001, decode=1, steal_id=0)
        return make(flow, owner, thief, decodes=2)

    @every_flow
    def test_two_live_requests_never_share_a_transfer_id(self, flow: Flow) -> None:
        story = play(self._theft(flow))
        assert not story.rules
        assert story.ends[0] == BOTH_DELIVERED
        assert story.ends[1][1] in (None, Outcome.FAILED)

    @every_push
    def test_without_the_prompt_check_a_stolen_id_gets_foreign_bytes(self, flow: Flow) -> None:
        class Credulous(SourceSide):
            def is_same_prompt(self, record: SourceRecord, prompt: str) -> bool:
                del record, prompt
                return True

        assert first_broken([self._theft(flow)], sides(source=Credulous)) & {"foreign byte", "foreign aux"}

    @staticmethod
    def _odd(flow: Flow, transfer_id: str) -> Story:
        odd = request(flow, transfer_id=transfer_id)
        return play(make(flow, odd, request(flow, at_s=0.001)), prepare=disturbed)

    @every_flow
    @pytest.mark.parametrize("length", [0, MAX_TRANSFER_ID + 1, 1_000_000])
    def test_a_missing_or_absurd_id_fails_its_own_request_only(self, flow: Flow, length: int) -> None:
        story = self._odd(flow, "x" * length)
        assert not story.rules
        assert story.ends[0][0] is Outcome.FAILED
        assert story.ends[0][1] in (None, Outcome.FAILED)
        assert story.said("SourceEnded", f"the transfer id has {length} characters; 1 to {MAX_TRANSFER_ID} are possible")
        assert story.ends[1] == BOTH_DELIVERED

    @every_flow
    def test_the_longest_id_there_may_be_works(self, flow: Flow) -> None:
        assert self._odd(flow, "x" * MAX_TRANSFER_ID).ends == [BOTH_DELIVERED, BOTH_DELIVERED]

    @every_flow
    def test_without_the_check_an_absurd_id_reaches_the_wire(self, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (source_module, target_module):
            monkeypatch.setattr(module, "key_problem", lambda _: "")
        assert self._odd(flow, "x" * 1000).rules == {"wire"}

    @every_flow
    def test_an_id_may_be_used_again_when_its_hand_off_is_over(self, flow: Flow) -> None:
        story = play(make(flow, *(request(flow, at_s=at_s, transfer_id="again") for at_s in (0.0, 0.2, 0.4))))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED] * 3

    def test_an_id_that_is_no_text_is_dropped_and_counted(self) -> None:
        def prepare(run: Run) -> None:
            disturbed(run)
            run.cluster.has_foreigners = True
            frame = msgspec.msgpack.decode(encode(Incarnation("d0#2"), "p0#1", Release(HandoffKey("t0.1"), 1)))  # type: ignore[arg-type]
            for odd in (7, None, ["t0.1"], b"t0.1"):
                frame["message"]["key"][0] = odd
                run.world.at(0.01, None, partial(run.cluster.arrive, "p0", msgspec.msgpack.encode(frame), "d0"))

        story = play(make(FLOWS[0]), prepare=prepare)
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert sum(story.run.all_instances[0].dropped_total.values()) == 4


class TestGrantAtAnyTime:
    """A grant may come before, during or after the prefill, twice, or when all is over; its block list may be too long, but
    one that is too short or empty fails the hand-off and nothing else."""

    @every_push
    @pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.005, 0.5], ids=["before", "early", "during", "after"])
    @pytest.mark.parametrize("ranks", [1, 3])
    def test_a_grant_before_during_and_after_prefill(self, flow: Flow, delay_s: float, ranks: int) -> None:
        story = play(make(flow, request(flow, decode_delay_s=delay_s, tokens=5), ranks=ranks))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]

    @every_flow
    def test_a_grant_that_comes_again_and_again_changes_nothing(self, flow: Flow) -> None:
        story = play(make(flow), prepare=echo(0.0, 0.001, 0.004, 0.02, 1.0, 5.0, of=Grant))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert story.counted["grant"] >= 2

    @every_push
    def test_without_used_numbers_a_late_grant_resurrects(self, flow: Flow) -> None:
        assert play(make(flow), PLANTS["late-grant"].bugs, prepare=echo(1.0, of=Grant)).rules == {"resurrection"}

    @staticmethod
    def _listing(change: int, rank: type[SimRank] = SimRank) -> Bugs:
        """Targets that name so many blocks more (or fewer) than they should; -9 leaves none."""

        class Lister(Coordinator):
            def allocated(self, allocation: Allocation) -> None:
                (blocks,) = allocation.blocks
                listed = blocks + blocks[:1] * change if change > 0 else blocks[: max(0, len(blocks) + change)]
                super().allocated(dataclasses.replace(allocation, blocks=(listed,)))

        return Bugs(coordinator=Lister, rank=rank)

    @every_flow
    @pytest.mark.parametrize("change", [-1, -9], ids=["short", "empty"])
    def test_a_list_that_is_too_short_fails_both_sides(self, flow: Flow, change: int) -> None:
        story = play(make(flow), self._listing(change), prepare=disturbed)
        assert not story.rules
        assert story.ends == [(Outcome.FAILED, Outcome.FAILED)]
        assert story.said("TargetEnded", "target block list has")
        assert max(story.back_at.values()) < 5 * HOP_S

    @every_flow
    def test_a_list_that_is_too_long_is_no_harm(self, flow: Flow) -> None:
        assert play(make(flow), self._listing(2)).ends == [BOTH_DELIVERED]

    @every_flow
    def test_without_the_length_check_poison_is_decoded(self, flow: Flow) -> None:
        class Lenient(SimRank):
            def _plan(
                self, copy: _Copy, source_blocks: BlockLists, spans: tuple[Span, ...]
            ) -> list[tuple[PeerRank, Runs | Plan, int]]:
                known = len(copy.order.target_blocks[0])
                cut = tuple(msgspec.structs.replace(span, end_token=min(known, span.end_token)) for span in spans)
                return super()._plan(copy, source_blocks, cut)

        assert play(make(flow), self._listing(-1, Lenient), prepare=disturbed).rules == {"foreign byte"}


class TestAllLayersOfAllRanks:
    """A request is complete when all layers of all ranks are in, and one failed layer of one rank fails it."""

    @every_flow
    def test_one_failed_layer_of_one_rank_fails_the_request(self, flow: Flow) -> None:
        writer = "p0" if flow.source_writes else "d0"
        script = make(flow, ranks=2, layers=3, move_s=0.004)
        stories = [
            play(each)
            for rank in range(2)
            for each in at_every_event(script, Fault(FaultKind.COPY_FAILS, who=writer, number=rank), step=2)
        ]
        assert not [story.result.violations for story in stories if story.rules]
        assert {story.ends[0] for story in stories} == {BOTH_DELIVERED, (Outcome.FAILED, Outcome.FAILED)}
        failed = [story for story in stories if story.ends[0] != BOTH_DELIVERED]
        assert all(story.said("TargetEnded", "the simulated copy failed") for story in failed)
        assert all(story.back_at["p0"] - story.back_at["d0"] < HOP_S for story in failed)

    @every_flow
    @pytest.mark.parametrize(("ranks", "layers"), [(3, 1), (1, 3), (2, 3)])
    def test_complete_only_with_every_layer_of_every_rank(self, flow: Flow, ranks: int, layers: int) -> None:
        assert not broken(make(flow, seed=seed, move_s=0.02, ranks=ranks, layers=layers) for seed in range(5))

    @every_flow
    def test_without_counting_every_rank_poison_is_decoded(self, flow: Flow) -> None:
        class AnySource(SourceSide):
            def _is_moved(self, record: SourceRecord) -> bool:
                wanted = {span.number for span in record.spans}
                return any(moved >= wanted for moved in record.moved.values())

            def _is_on_its_way(self, record: SourceRecord) -> bool:
                wanted = {span.number for span in record.spans}
                return flow.counts_arrivals and any(planned >= wanted for planned in record.planned.values())

        class AnyTarget(TargetSide):
            def is_complete(self, record: TargetRecord) -> bool:
                if record.executor is Executor.SOURCE_WRITES:
                    return super().is_complete(record)
                counts = [len(moved) for moved in record.moved.values()]
                return self.has_aux(record) and record.span_count in counts

        long = request(flow, tokens=6, chunk=6)
        scripts = [make(flow, long, seed=seed, ranks=3, move_s=0.1) for seed in range(5)]
        if not flow.counts_arrivals:
            assert "confirmed after the last byte" in broken(scripts, sides(AnySource, AnyTarget))
        assert "foreign byte" in broken(scripts, sides(AnySource, AnyTarget), prepare=confirmed_early)

    @every_read
    def test_without_the_failure_of_one_rank_poison_is_decoded(self, flow: Flow) -> None:
        scripts = list(at_every_event(make(flow, ranks=2, layers=3), Fault(FaultKind.COPY_FAILS, who="d0", number=1)))
        assert "confirmed after the last byte" in broken(scripts, PLANTS["rank-failure-lost"].bugs)
        assert first_broken(scripts, PLANTS["rank-failure-lost"].bugs, prepare=confirmed_early) == {"foreign byte"}

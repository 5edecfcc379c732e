"""Planted bugs of the vLLM connector of production: one known mistake each, in one of its halves or in what they count with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvbaton.core.handoff import HandoffKey
from kvbaton.core.timeline import Side
from kvbaton.engines.vllm.computed_spans import ComputedSpans, SpanStep
from kvbaton.engines.vllm.orders import ComputedChunk, SourceWithdraws, StepOrders
from kvbaton.engines.vllm.rank_links import StepCleared, StepEnded
from kvbaton.engines.vllm.reached_steps import ReachedSteps
from kvbaton.engines.vllm.scheduler_half import Computing, SchedulerHalf
from kvbaton.engines.vllm.worker_half import FollowerHalf, WorkerHalf, WorkerSource, WorkerTarget
from kvbaton.sim.vllm_workers import VllmClasses

__all__ = ["vllm_plants"]


class _SentWhenOffered(WorkerHalf):
    """Reports a sending as finished when the cache is offered: vLLM has its blocks back before the source side has ended."""

    def _settle_source(self, key: HandoffKey, source: WorkerSource) -> None:
        if source.is_kept and not source.has_ended:
            self._finished.sending.add(source.request_id)
            source.is_withdrawn, source.is_kept = True, False
        super()._settle_source(key, source)


class _RetryTakenForEnded(WorkerHalf):
    """Forgets a prefill that is given up at once: its end, which comes later, passes for that of the next one of its key."""

    def _withdraw(self, order: SourceWithdraws) -> None:
        if self._source(order.key, order.request_id) is not None:
            del self._sources[order.key]
            self._spans.forget(order.key)
            self._port.cancel(order.key, Side.SOURCE)


class _ReceivedWhenCancelled(WorkerHalf):
    """Reports a receiving as finished when its request is aborted, while its blocks are still being filled."""

    def _settle_target(self, key: HandoffKey, target: WorkerTarget) -> None:
        if target.is_over and target.is_allocated and target.end is None:
            self._report_failed(target.request_id)
            target.is_allocated = False
        super()._settle_target(key, target)


class _OneRankReports(FollowerHalf):
    """Leaves it to the first rank to report what has finished receiving: vLLM waits for the others for ever."""

    def _take(self, message: StepCleared | StepEnded | None) -> None:
        super()._take(message)
        self._finished.receiving.clear()


class _AnnouncedByOneRank(ComputedSpans):
    """Announces a layer when the first of its ranks has computed it."""

    def _reported_by_all(self, known: SpanStep, layers: Iterable[int]) -> list[int]:
        return [layer for layer in layers if layer not in known.announced]


class _BlocksOfAnEarlierStep(ComputedSpans):
    """Announces layers with the blocks of their own step, although those of a later step were announced before."""

    def _announce(self, step: int, known: SpanStep, layers: list[int], keys: Iterable[HandoffKey]) -> None:
        newest = dict(self._blocks)
        self._blocks |= {key: chunk.blocks for key, chunk in known.chunks.items()}
        super()._announce(step, known, layers, keys)
        self._blocks = newest


class _PreemptedNotRetracted(SchedulerHalf):
    """Keeps what was announced of a prefill that has lost its blocks: the rest of it is announced behind that."""

    def orders(
        self,
        computing: Iterable[Computing],
        preempted: Iterable[str],
        block_ids: Callable[[str], Sequence[Sequence[int]]],
        has_forward: bool,
    ) -> StepOrders:
        self._begun.difference_update(preempted)
        return super().orders(computing, (), block_ids, has_forward)


class _LastBlockCut(SchedulerHalf):
    """Announces a prompt in whole blocks only, its last one too: what is in the middle of a block is forgotten."""

    def _chunks(
        self, computing: Iterable[Computing], block_ids: Callable[[str], Sequence[Sequence[int]]]
    ) -> Iterable[ComputedChunk]:
        size = self._counts.chunk
        for chunk in super()._chunks(computing, block_ids):
            end = chunk.end_token - chunk.end_token % size
            if end > chunk.first_token:
                yield ComputedChunk(chunk.request_id, chunk.key, chunk.blocks, chunk.first_token, end)


class _OtherRanksNotAwaited(ReachedSteps):
    """Grants blocks as soon as the first rank has them, although another one may still compute into them."""

    def when_reached(self, step: int, key: HandoffKey, call: Callable[[], None]) -> None:
        del step, key
        call()


def vllm_plants() -> Iterator[tuple[str, str, str, VllmClasses]]:
    """Name, mistake, the rule that it breaks, and the classes that make it."""
    yield "vllm-sent-when-offered", "blocks freed before the source ended", "one outcome", VllmClasses(worker=_SentWhenOffered)
    retry = VllmClasses(worker=_RetryTakenForEnded)
    yield "vllm-retry-taken-for-ended", "end of an attempt taken for that of the next", "one outcome", retry
    cancelled = VllmClasses(worker=_ReceivedWhenCancelled)
    yield "vllm-received-when-cancelled", "aborted load reported before it stopped", "one outcome", cancelled
    one_rank = VllmClasses(follower=_OneRankReports)
    yield "vllm-one-rank-reports", "finished receiving reported by one rank", "one outcome", one_rank
    early = VllmClasses(spans=_AnnouncedByOneRank)
    yield "vllm-announced-by-one-rank", "layer announced before every rank computed it", "foreign byte", early
    earlier = VllmClasses(spans=_BlocksOfAnEarlierStep)
    yield "vllm-blocks-of-an-earlier-step", "blocks of an earlier step announced last", "spurious failure", earlier
    kept = VllmClasses(scheduler=_PreemptedNotRetracted)
    yield "vllm-preempted-not-retracted", "old blocks of a preempted prefill kept", "foreign byte", kept
    behind = VllmClasses(reached=_OtherRanksNotAwaited)
    yield "vllm-other-ranks-not-awaited", "blocks granted while another rank may compute into them", "foreign byte", behind
    cut = VllmClasses(scheduler=_LastBlockCut)
    yield "vllm-last-block-cut", "tokens of a last block not announced", "spurious failure", cut

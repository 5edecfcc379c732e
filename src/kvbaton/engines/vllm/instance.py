"""One vLLM instance's agents put together in its worker processes: transport, control sockets, driver, registration.

The ranks of an instance describe their caches to each other before anything is opened; then the worker of rank 0 runs the
coordinator and the registration, and every worker the agent of its own rank.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import msgspec

from kvbaton.agent.channel import Channel, channel_pair
from kvbaton.agent.driver import Driver
from kvbaton.agent.rank import RankControls
from kvbaton.agent.rank_sets import LocalRanks, RankLoop, RankSet, RemoteRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.agent.stamps import open_stamps
from kvbaton.config import Limits
from kvbaton.core.card import RankCard
from kvbaton.core.handoff import Incarnation
from kvbaton.core.timeline import no_observer
from kvbaton.engines.base import Role
from kvbaton.engines.instance import LateAnnouncer, ModelIdentity, announcer_of, answers, instance_card, new_incarnation
from kvbaton.engines.vllm.computed_spans import ComputedSpans, LayerGroups
from kvbaton.engines.vllm.controls import share_filter
from kvbaton.engines.vllm.device import Gate
from kvbaton.engines.vllm.engine_calls import CallListener, listen
from kvbaton.engines.vllm.rank_links import (
    FirstRankLinks,
    LayersDone,
    OneRank,
    RankExchange,
    RankLinks,
    StepCleared,
    StepReached,
    check_one_host,
)
from kvbaton.engines.vllm.reached_steps import ReachedSteps
from kvbaton.engines.vllm.requests import HandoffInfo
from kvbaton.engines.vllm.settings import DRAFTS, ConnectorSettings, DpPlace
from kvbaton.engines.vllm.tensors import InstanceCaches, RankCaches, RegisteredCache, instance_caches
from kvbaton.engines.vllm.worker_half import Finished, FollowerHalf, WorkerHalf, idle_wait_s
from kvbaton.observe.handoffs_server import HandoffsServer
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines
from kvbaton.transport.base import Region, Transport
from kvbaton.transport.neighbour import this_process

__all__ = ["WorkerInstance", "take_from_rank"]

log = logging.getLogger(__name__)


class _Described(msgspec.Struct, frozen=True):
    """What every rank states before anything is opened. The incarnation of rank 0 is that of the instance."""

    incarnation: Incarnation
    host: str
    caches: RankCaches


class WorkerInstance:
    """Everything that one worker process of a vLLM instance owns of kvbaton. Made and closed by the connector.

    `agent_limits`, `open_sockets` and `open_transport` may be overridden: so tests hold a hand-off up at a stage.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        cache: RegisteredCache,
        model: ModelIdentity,
        role: Role,
        exchange: RankExchange | None = None,
        dp: DpPlace = DpPlace(),  # noqa: B008 - frozen
    ) -> None:
        self._settings = settings
        self._dp = dp
        self._cache = cache
        exchange = exchange or OneRank()
        self._shape, self._rank = exchange.shape, exchange.rank
        described = exchange.gather(_Described(new_incarnation(), this_process().host, cache.caches))
        check_one_host([each.host for each in described])
        self._incarnation = described[0].incarnation
        hands_drafts = settings.draft == DRAFTS[0]
        self.caches: InstanceCaches = instance_caches(exchange.shape, [each.caches for each in described], hands_drafts)
        self.has_drafts = hands_drafts and any(layer.is_draft for layer in cache.caches.layers)
        drafts = [layer for each in described for layer in each.caches.layers if layer.is_draft]
        self._has_drafts_anywhere = hands_drafts and bool(drafts)
        self.info = HandoffInfo(settings.control_address, self._incarnation, self._shape.tp, dp.rank)
        self.driver: Driver | None = None
        self._loop: RankLoop | None = None
        self._gate: Gate | None = None
        self._links: FirstRankLinks | RankLinks | None = None
        self._calls: CallListener | None = None
        self._notes: HandoffsServer | None = None
        self._announcer: LateAnnouncer | None = None
        self.half: WorkerHalf | FollowerHalf
        with ExitStack() as opened:
            opened.callback(self._close_agents)
            if exchange.rank == 0 and self._shape.ranks > 1:
                self._links = FirstRankLinks(self._incarnation, self._shape)
            transport = cache.device.ordered(self.open_transport(settings, self._incarnation, cache.region))
            opened.callback(transport.close)
            endpoints = exchange.gather(transport.endpoint())
            cards = [RankCard(number, self.caches.layouts[number], (each,)) for number, each in enumerate(endpoints)]
            if exchange.rank:
                self._open_other_rank(transport)
            else:
                self._open_first_rank(transport, cards, model, role)
            opened.pop_all()

    @property
    def is_first(self) -> bool:
        """Whether this is the worker of rank 0, which has the coordinator."""
        return self._rank == 0

    def _open_other_rank(self, transport: Transport) -> None:
        self._links = links = RankLinks(self._incarnation, self._rank)
        self._loop = self._rank_loop(transport, links.agent)
        self._gate = gate = self._cache.device.gate()
        self.half = FollowerHalf(links, LayerGroups(self.caches.layouts[self._rank]), gate)

    def _open_first_rank(self, transport: Transport, cards: list[RankCard], model: ModelIdentity, role: Role) -> None:
        settings = self._settings
        timelines = _timelines(settings, self._incarnation, role)
        observe = no_observer if timelines is None else timelines.note
        sockets = self.open_sockets(settings, self._incarnation)
        with ExitStack() as opened:
            opened.callback(sockets.close)
            if timelines is not None:
                self._notes = HandoffsServer(timelines, settings.control_host, settings.handoffs_port, settings.trust())
            ranks = self._ranks(transport)
            news = threading.Event()
            card = instance_card(self._incarnation, model, settings.limits, cards, self._shape)
            limits = self.agent_limits(settings)
            stamps = open_stamps()
            self.driver = driver = Driver(card, ranks, limits, sockets, news.set, settings.handoff, observe, stamps=stamps)
            opened.pop_all()
        holders = {layer: self._shape.tp for layout in self.caches.layouts for layer in layout.layers}
        self._gate = self._cache.device.gate()
        spans = ComputedSpans(driver, holders, self.caches.lists)
        reached = ReachedSteps(range(1, self._shape.ranks))
        self.half = WorkerHalf(
            driver,
            spans,
            LayerGroups(self.caches.layouts[0]),
            news,
            settings.stop_timeout,
            driver.poison if settings.poison else None,
            observe,
            self.caches.lists,
            self._cleared,
            driver.engine_is_busy,
            self._gate,
            reached,
            has_drafts=self._has_drafts_anywhere,
            idle_wait_s=idle_wait_s(len(os.sched_getaffinity(0))),
        )
        if settings.engine_sleeps:
            self._calls = listen(self._incarnation, self.half.set_callable, self.half.hurry)
        if isinstance(self._links, FirstRankLinks):
            self._links.start(partial(take_from_rank, spans, reached))
        self._announcer = self._make_announcer(model, role)

    def _ranks(self, transport: Transport) -> RankSet:
        """This rank's agent, in the thread of the driver; or every rank's, each at the other end of a channel."""
        settings = self._settings
        if not isinstance(self._links, FirstRankLinks):
            return LocalRanks(
                self.caches.layouts[0],
                transport,
                self.agent_limits(settings).transfer_timeout,
                self._cache.region.accessor(),
                unfenced_writes=settings.unfenced_writes,
                controls=self._controls(),
            )
        self._links.accept()
        ours, theirs = channel_pair()
        self._loop = self._rank_loop(transport, Channel(theirs, "the coordinator"))
        channels = {0: Channel(ours, "the agent of rank 0"), **self._links.agents}
        in_order = [channels[number] for number in range(self._shape.ranks)]
        agent = self._loop.agent
        return RemoteRanks(in_order, transport.name, agent.executor, self._lost, fences_writers=agent.fences_writers)

    def _rank_loop(self, transport: Transport, channel: Channel) -> RankLoop:
        settings = self._settings
        return RankLoop(
            self._rank,
            self.caches.layouts,
            transport,
            channel,
            self.agent_limits(settings).transfer_timeout,
            self._cache.region.view,
            unfenced_writes=settings.unfenced_writes,
            controls=self._controls(),
        )

    def _controls(self) -> RankControls:
        controls = RankControls(keep=share_filter(self._settings.drop, self.caches))
        if not self._settings.poison:
            return controls
        return replace(controls, poison=partial(self._cache.poison, self.caches.layouts[self._rank]))

    def _make_announcer(self, model: ModelIdentity, role: Role) -> LateAnnouncer | None:
        """Every data-parallel engine registers itself: it has an incarnation, an address and hand-offs of its own."""
        settings, dp = self._settings, self._dp
        announcer = announcer_of(
            role=role,
            http_address=settings.http_address,
            control_address=settings.control_address,
            mode=settings.mode,
            incarnation=self._incarnation,
            model=model,
            routers=settings.routers,
            is_used=self.is_used,
            trust=settings.trust(),
            handoffs_address=settings.handoffs_address,
            heartbeat_s=settings.heartbeat_s,
            shape=msgspec.structs.replace(self._shape, dp=dp.size),
            dp_rank=dp.rank if dp.size > 1 else None,
            dp_size_local=1 if dp.is_external else 0,
        )
        return (
            None
            if announcer is None
            else LateAnnouncer(announcer, settings.http_address, partial(answers, tls_dir=settings.trust().tls_dir))
        )

    def is_used(self) -> bool:
        """Whether any request has ever asked it for a hand-off."""
        if self.driver is None:
            return False
        stats = self.driver.stats()
        return bool(stats.handshakes_total or stats.failures_total or any(stats.handoffs_live.values()))

    def agent_limits(self, settings: ConnectorSettings) -> Limits:
        """The limits that the agents keep: those that the card promises."""
        return settings.limits

    def open_sockets(self, settings: ConnectorSettings, incarnation: Incarnation) -> ControlSockets:
        """The control channel."""
        return settings.agents().open_sockets(incarnation)

    def open_transport(self, settings: ConnectorSettings, incarnation: Incarnation, region: Region) -> Transport:
        """What moves the bytes."""
        return settings.agents().open_transport(incarnation, region)

    def start(self) -> None:
        """Start the agents, and register with the routers as soon as the API answers."""
        if self._loop is not None:
            self._loop.start()
        if self.driver is not None:
            self.driver.start()
        if self._calls is not None:
            self._calls.start()
        if self._notes is not None:
            self._notes.start()
        if self._announcer is not None:
            self._announcer.start()

    def end_step(self) -> Finished:
        """What this worker reports to vLLM after a step; the first rank sends it to the others."""
        finished = self.half.end_step()
        if isinstance(self._links, FirstRankLinks) and isinstance(self.half, WorkerHalf):
            self._links.send(finished.of_step(self.half.step))
        return finished

    def close(self) -> None:
        """Deregister, end every hand-off, and release everything. Idempotent."""
        if self._announcer is not None:
            self._announcer.stop()
        self._close_agents()

    def _close_agents(self) -> None:
        if self._calls is not None:
            self._calls.close()
        if self._notes is not None:
            self._notes.close()
        if self._gate is not None:
            self._gate.close()
        if self.driver is not None:
            self.driver.close()
        if self._loop is not None:
            self._loop.close()
        if self._links is not None:
            self._links.close()

    def _cleared(self, step: int) -> None:
        if isinstance(self._links, FirstRankLinks):
            self._links.send(StepCleared(step))

    def _lost(self, reason: str) -> None:
        """vLLM ends an instance that has lost a worker; until then its hand-offs make no progress, and its peers see that."""
        log.error("%s; nothing can be handed over until this instance is restarted", reason)


def take_from_rank(spans: ComputedSpans, reached: ReachedSteps, message: LayersDone | StepReached) -> None:
    """What another rank has sent."""
    if isinstance(message, StepReached):
        reached.reached(message.rank, message.step)
    else:
        spans.computed(message.step, message.layers)


def _timelines(settings: ConnectorSettings, incarnation: Incarnation, role: Role) -> Timelines | None:
    if not settings.handoffs_port:
        return None
    return Timelines(InstanceInfo(role, settings.http_address or str(settings.control_address), incarnation))

"""One rank of an SGLang instance put together in its scheduler process: pool, transport, agents, registration."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvbaton.agent.engine_port import AgentStats, HandoffPort
from kvbaton.agent.rank_sets import RankLoop, RemoteRanks
from kvbaton.agent.stamps import open_stamps
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.card import RankCard
from kvbaton.core.handoff import Aux, Mode
from kvbaton.core.timeline import Observer, no_observer
from kvbaton.core.topology import Shape
from kvbaton.discovery.messages import Dispatch
from kvbaton.engines.handoff_params import SourceCheck
from kvbaton.engines.instance import (
    AgentSettings,
    LateAnnouncer,
    ModelIdentity,
    announcer_of,
    answers,
    instance_card,
    new_incarnation,
    open_driver,
)
from kvbaton.engines.sglang.halves import HalfSettings, Halves
from kvbaton.engines.sglang.metadata import MetadataRows
from kvbaton.engines.sglang.pool import CachePool
from kvbaton.engines.sglang.ranks import FollowerPort, LeaderDriver, Meeting, ReplicaPort, SglangRank, join, start_rank
from kvbaton.engines.sglang.settings import SglangSettings
from kvbaton.engines.vllm.fingerprint import fingerprint
from kvbaton.errors import LocalError
from kvbaton.observe.handoffs_server import HandoffsServer
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines

__all__ = ["RankInstance", "SglangPlace", "model_identity", "replica_halves"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SglangPlace:
    """What and where an instance is, by SGLang's arguments; `broadcast` sends a value from rank 0 to all ranks."""

    role: str
    host: str
    http_port: int
    control_port: int
    shape: Shape = field(default_factory=Shape)
    rank: int = 0
    broadcast: Callable[[Any], Any] = field(default=lambda value: value)

    @property
    def is_leader(self) -> bool:
        """Whether the coordinator runs here."""
        return self.rank == 0


def model_identity(model_config: Any, server_args: Any, settings: SglangSettings) -> ModelIdentity:
    """The fingerprint covers what decides the meaning of a cache: architecture, weights, dtypes, kind of CPU."""
    name = str(server_args.served_model_name or server_args.model_path)
    if settings.fingerprint:
        return ModelIdentity(name, settings.fingerprint)
    others = [str(model_config.dtype), str(server_args.kv_cache_dtype), str(server_args.quantization), platform.machine()]
    return ModelIdentity(name, fingerprint(model_config.hf_config.to_dict(), str(server_args.model_path), others))


class RankInstance:
    """Everything that a scheduler process of an SGLang instance owns of kvbaton."""

    def __init__(
        self, settings: SglangSettings, place: SglangPlace, pool: CachePool, rows: MetadataRows, model: ModelIdentity
    ) -> None:
        self.settings, self.place, self.pool = settings, place, pool
        model = replace(model, aux_format=rows.format)
        agents = settings.agents(place.host, place.control_port)
        incarnation = place.broadcast(new_incarnation())
        timelines = _timelines(settings, place, incarnation)
        self._observe: Observer = no_observer if timelines is None else timelines.note
        self._loop: RankLoop | None = None
        with ExitStack() as opened:
            self._notes: HandoffsServer | None = None
            if timelines is not None:
                self._notes = HandoffsServer(timelines, place.host, settings.handoffs_port, settings.trust())
                opened.callback(self._notes.close)
            if place.shape.ranks == 1:
                driver = open_driver(agents, incarnation, model, pool.layout, pool.region, lambda: None, observe=self._observe)
                self.port: HandoffPort = driver
                self._stats: Callable[[], AgentStats] | None = driver.stats
                driver.start()
            else:
                self.port = self._open_ranks(agents, incarnation, model, opened)
            opened.pop_all()
        # The first stage of a pipeline has its chunks before the others have them. When it sends the last one, all have all.
        half_settings = HalfSettings(
            pool.page_tokens,
            (pool.first_layer, pool.end_layer),
            pool.tables,
            announces=settings.mode is Mode.PUSH and place.shape.pp == 1,
            follows=not place.is_leader,
            prefill_dp_size=settings.prefill_dp_size,
        )
        poison = pool.poison if settings.poison else None
        # Every rank checks by the leader's address, which routers know: all of them refuse, or none.
        own = place.broadcast(agents.control_address)
        sources = SourceCheck(agents.trust, own)
        followers = self.port if isinstance(self.port, LeaderDriver) else None
        self.halves = Halves(self.port, half_settings, rows.read, rows.write, poison, self._observe, sources, followers)
        self._announcer = self._announcer_of(agents.control_address, incarnation, model) if place.is_leader else None
        if self._notes is not None:
            self._notes.start()
        if self._announcer is not None:
            self._announcer.start()

    def is_used(self) -> bool:
        """Whether any request has ever asked it for a hand-off."""
        stats = None if self._stats is None else self._stats()
        return bool(stats and (stats.handshakes_total or stats.failures_total or any(stats.handoffs_live.values())))

    def _open_ranks(self, agents: AgentSettings, incarnation: Any, model: ModelIdentity, opened: ExitStack) -> HandoffPort:
        place, region, layout = self.place, self.pool.region, self.pool.layout
        transport = agents.open_transport(incarnation, region)
        opened.callback(transport.close)
        own = SglangRank(place.rank, layout, transport.endpoint())
        limits, writes = agents.limits, agents.handoff.unfenced_writes
        waits_for_all = place.shape.pp > 1
        meeting = Meeting(place.shape.ranks) if place.is_leader else None
        path = place.broadcast(meeting.path if meeting is not None else "")
        self._stats = None
        if meeting is None:
            layouts, orders, events = join(path, own)
            self._loop, _ = start_rank(
                place.rank, layouts, transport, orders, limits.transfer_timeout, region, unfenced_writes=writes
            )
            return FollowerPort(events, reports_pages=waits_for_all)
        ready, channels, followers = meeting.accept(own)
        layouts = [each.layout for each in ready]
        self._loop, channel = start_rank(0, layouts, transport, None, limits.transfer_timeout, region, unfenced_writes=writes)
        if channel is None:
            raise LocalError("the leader's own rank has no channel")
        agent = self._loop.agent
        ranks = RemoteRanks([channel, *channels], transport.name, agent.executor, _lost, fences_writers=agent.fences_writers)
        cards = [RankCard(each.rank, each.layout, (each.endpoint,)) for each in ready]
        card = instance_card(incarnation, model, limits, cards, place.shape)
        sockets = agents.open_sockets(incarnation)
        opened.callback(sockets.close)
        driver = LeaderDriver(
            card,
            ranks,
            limits,
            sockets,
            lambda: None,
            agents.handoff,
            self._observe,
            stamps=open_stamps(),
            followers=followers,
            waits_for_all=waits_for_all,
        )
        self._stats = driver.stats
        driver.start()
        return driver

    def _announcer_of(self, control: ControlAddress, incarnation: Any, model: ModelIdentity) -> LateAnnouncer | None:
        settings, place = self.settings, self.place
        http_address = f"{in_url(settings.advertise_host or place.host)}:{place.http_port}"
        announcer = announcer_of(
            role=place.role,
            http_address=http_address,
            control_address=control,
            mode=settings.mode,
            incarnation=incarnation,
            model=model,
            routers=settings.routers,
            is_used=self.is_used,
            trust=settings.trust(),
            handoffs_address=settings.handoffs_address(place.host),
            heartbeat_s=settings.heartbeat_s,
            shape=place.shape,
            dispatch=Dispatch.BOOTSTRAP,
            bootstrap_port=place.control_port if place.role == "prefill" else 0,
        )
        return (
            None
            if announcer is None
            else LateAnnouncer(announcer, http_address, partial(answers, tls_dir=settings.trust().tls_dir))
        )

    def close(self) -> None:
        """Deregister, end every hand-off, and release everything. Idempotent."""
        if self._announcer is not None:
            self._announcer.stop()
        if self._notes is not None:
            self._notes.close()
        for part in (self.port, self._loop):
            close = getattr(part, "close", None)
            if close is not None:
                close()


def replica_halves(pool: CachePool) -> Halves:
    """The halves of a rank whose cache is the same as that of another rank, which hands it over."""
    layers = (pool.first_layer, pool.end_layer)
    settings = HalfSettings(pool.page_tokens, layers, pool.tables, announces=False, follows=True)
    nothing = Aux(token_id=0, logprob=0.0)
    return Halves(ReplicaPort(), settings, lambda _: nothing, lambda *_: None)


def _lost(reason: str) -> None:
    log.error("a rank of this instance is lost, and hand-offs fail from now on; SGLang ends the server: %s", reason)


def _timelines(settings: SglangSettings, place: SglangPlace, incarnation: Any) -> Timelines | None:
    if not settings.handoffs_port or not place.is_leader:
        return None
    return Timelines(InstanceInfo(place.role, f"{in_url(place.host)}:{place.http_port}", incarnation))

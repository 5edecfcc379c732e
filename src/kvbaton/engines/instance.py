"""What an instance is to its peers and to routers: its agents, its card and its registration, made here for every engine.

A card and a registration state the same facts to two kinds of readers. Engines that assembled them field by field disagreed
about defaults, so an engine now gives the facts, and nothing else.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvbaton.agent.driver import Driver
from kvbaton.agent.rank_sets import LocalRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.agent.stamps import open_stamps
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, RankCard, make_card
from kvbaton.core.handoff import Incarnation, Mode
from kvbaton.core.layout import Layout
from kvbaton.core.timeline import Observer, no_observer
from kvbaton.core.topology import Shape
from kvbaton.discovery.advertise import numeric_host
from kvbaton.discovery.announcer import DEFAULT_HEARTBEAT_S, Announcer
from kvbaton.discovery.messages import Dispatch, InstanceType, Registration, TransferMode
from kvbaton.launch.fleet import answers_ok
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.busy_selector import BusyMachine
from kvbaton.transport.choose import open_transport
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.neighbour import this_process
from kvbaton.wire.tls import cluster_tls

__all__ = [
    "ONE_RANK",
    "AgentSettings",
    "LateAnnouncer",
    "ModelIdentity",
    "announcer_of",
    "answers",
    "instance_card",
    "new_incarnation",
    "open_driver",
]

log = logging.getLogger(__name__)

ONE_RANK = Shape()
"""An instance that is not cut."""

_LOOK_S = 0.5
_JOIN_S = 5.0
_ADVISE_S = 300.0
"""An engine that serves a large model may need minutes until its API answers; after this long the user gets a warning."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What is served: the name that clients use, and a digest of everything that decides what a cache means."""

    name: str
    fingerprint: str
    aux_format: str = ""
    """See `Card.aux_format`."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Where the agents of an instance with one rank listen, and how they hand over."""

    control_port: int
    control_host: str = "127.0.0.1"
    advertise_host: str = ""
    """Where others reach this instance, when that is not `control_host`."""
    transport: str = "local"
    limits: Limits = field(default_factory=Limits)
    handoff: HandoffSettings = DEFAULT_HANDOFF
    trust: Trust = field(default_factory=Trust)
    drop_writes: bool = False
    """The control of `kvbaton verify`: move no byte, and report it as moved."""

    @property
    def control_address(self) -> ControlAddress:
        """Where other instances reach this one."""
        return ControlAddress.of(self.advertise_host or self.control_host, self.control_port)

    def open_sockets(self, incarnation: Incarnation) -> ControlSockets:
        """The control channel. Raises ConfigError for a port that is in use."""
        return ControlSockets(
            incarnation,
            self.control_host,
            self.control_port,
            self.trust,
            beat_s=self.limits.beat_s,
            machine=BusyMachine(self.handoff.busy_poll_s),
        )

    def open_transport(self, incarnation: Incarnation, region: Region) -> Transport:
        """What moves the bytes of `region`. Raises ConfigError where it does not work."""
        settings = TransportSettings(
            incarnation=incarnation,
            timeout_s=self.limits.transfer_timeout,
            host=self.control_host,
            advertise_host=numeric_host(self.control_address.host, "advertise_host"),
            cluster_key=self.trust.key or b"",
            tls=cluster_tls(self.trust.tls_dir),
            unfenced_writes=self.handoff.unfenced_writes,
            fenced_writes=self.handoff.fenced_writes,
            busy_poll_s=self.handoff.busy_poll_s,
            admits=self.trust.accepts_from,
        )
        transport = open_transport(self.transport, region, settings)
        return FaultyTransport(transport, region, Faults(drop_writes=True)) if self.drop_writes else transport


def open_driver(
    agents: AgentSettings,
    incarnation: Incarnation,
    model: ModelIdentity,
    layout: Layout,
    region: Region,
    news: Callable[[], None],
    *,
    limits: Limits | None = None,
    sockets: ControlSockets | None = None,
    transport: Transport | None = None,
    observe: Observer = no_observer,
) -> Driver:
    """The agents of an instance with one rank, whose cache is `region`; `news` is called when there are events.

    `limits`, `sockets` and `transport` replace what `agents` would open. What is opened here is closed on failure.
    """
    with ExitStack() as opened:
        if sockets is None:
            sockets = agents.open_sockets(incarnation)
            opened.callback(sockets.close)
        if transport is None:
            transport = agents.open_transport(incarnation, region)
            opened.callback(transport.close)
        card = instance_card(incarnation, model, agents.limits, [RankCard(0, layout, (transport.endpoint(),))])
        limits = limits or agents.limits
        unfenced = agents.handoff.unfenced_writes
        ranks = LocalRanks(layout, transport, limits.transfer_timeout, region.accessor(), unfenced_writes=unfenced)
        driver = Driver(card, ranks, limits, sockets, news, agents.handoff, observe, stamps=open_stamps())
        opened.pop_all()
    return driver


def new_incarnation() -> Incarnation:
    """A name that no other instance has, nor this one before its restart."""
    return Incarnation(secrets.token_hex(8))


def instance_card(
    incarnation: Incarnation, model: ModelIdentity, limits: Limits, ranks: Iterable[RankCard], shape: Shape = ONE_RANK
) -> Card:
    """The card of an instance whose coordinator runs in this process. Raises ConfigError for ranks that are not whole."""
    return make_card(
        incarnation=incarnation,
        model=model.name,
        fingerprint=model.fingerprint,
        process=this_process(),
        limits=limits,
        ranks=ranks,
        shape=shape,
        aux_format=model.aux_format,
    )


def announcer_of(
    *,
    role: str,
    http_address: str,
    control_address: ControlAddress,
    mode: Mode,
    incarnation: Incarnation,
    model: ModelIdentity,
    routers: Sequence[str],
    is_used: Callable[[], bool],
    trust: Trust,
    handoffs_address: str = "",
    heartbeat_s: float = DEFAULT_HEARTBEAT_S,
    shape: Shape = ONE_RANK,
    dp_rank: int | None = None,
    dp_size_local: int = 0,
    dispatch: Dispatch = Dispatch.HANDOFF,
    bootstrap_port: int = 0,
    is_hung: Callable[[], bool] = lambda: False,
) -> Announcer | None:
    """What registers an instance; None where it registers with no router: role `both` answers clients by itself.

    `is_used` states whether a request has ever come; while none has, the announcer logs advice. While `is_hung`, routers get no
    registration.
    """
    kinds = {kind.word: kind for kind in InstanceType}
    if role not in kinds or not routers:
        return None
    registration = Registration(
        type=kinds[role],
        http_address=http_address,
        zmq_address=str(control_address),
        dp_size=shape.dp,
        dp_rank=dp_rank,
        dp_size_local=dp_size_local,
        tp_size=shape.tp,
        pp_size=shape.pp,
        transfer_mode=TransferMode.of(mode),
        incarnation=incarnation,
        model=model.name,
        fingerprint=model.fingerprint,
        handoffs_address=handoffs_address,
        dispatch=dispatch,
        bootstrap_port=bootstrap_port,
    )
    return Announcer(
        registration,
        routers,
        heartbeat_s,
        is_used=is_used,
        cluster_key=trust.key,
        tls_dir=trust.tls_dir,
        is_hung=is_hung,
    )


def answers(http_address: str, tls_dir: Path | None = None) -> bool:
    """Whether the API at this address answers that it is healthy."""
    return answers_ok(f"{'http' if tls_dir is None else 'https'}://{http_address}/health", tls_dir)


class LateAnnouncer:
    """Starts `announcer` once the API at `http_address` answers; asks until then, or until `stop`.

    For engines whose workers are ready long before their API: a registration means "send me requests".
    """

    def __init__(
        self,
        announcer: Announcer,
        http_address: str,
        is_up: Callable[[str], bool] = answers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._announcer = announcer
        self._http_address = http_address
        self._is_up = is_up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-registration", daemon=True)

    def start(self) -> None:
        """Begin to ask; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Deregister from the routers, and end the thread. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._announcer.stop()

    def _run(self) -> None:
        advise_at = self._clock() + _ADVISE_S
        while not self._is_up(self._http_address):
            if self._clock() >= advise_at:
                advise_at = self._clock() + _ADVISE_S
                self._advise()
            if self._stopping.wait(_LOOK_S):
                return
        if not self._stopping.is_set():
            self._announcer.start()

    def _advise(self) -> None:
        log.warning(
            "the API at %s has not answered for %g s, so this instance is registered with no router and gets no requests from"
            " them; if it is up, is http_address right? Routers use HTTPS to instances when tls_dir is set, with its files as"
            " --ssl-ca-certs, --ssl-certfile and --ssl-keyfile of the engine; without tls_dir, start the engine without them",
            self._http_address,
            _ADVISE_S,
        )

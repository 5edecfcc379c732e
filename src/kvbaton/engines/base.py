"""The engine seam: what `up`, `verify`, `bench` and `config` need of an engine, whichever it is.

An engine is an `EnginePlugin`. Commands call it in this order, once per set-up:

1. `check` the options of the prefill and of the decode instances. Nothing is installed or started yet; the result has what
   clients have to know of the model.
2. `prepare` one side: install, convert the model, whatever takes long and is done once. The answer is a `PreparedEngine`.
3. `PreparedEngine.part` describes the process of one instance; `kvbaton.launch.fleet` starts it, waits for its health URL and
   ends it.

The two sides may be different engines: each checks and prepares its own. Engines are found by name in `kvbaton.engines.table`.
What happens inside an instance is another seam: `kvbaton.agent.engine_port`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbaton.config import CLUSTER_KEY_VARIABLE, DEFAULT_HANDOFF, TLS_DIR_VARIABLE, HandoffSettings, Limits
from kvbaton.core.handoff import AuxChannel, Mode
from kvbaton.core.topology import Shape
from kvbaton.errors import ConfigError
from kvbaton.launch.fleet import FleetPart
from kvbaton.launch.local import new_cluster_key
from kvbaton.launch.ports import PortPicker
from kvbaton.wire.tls import TLS_FILES

__all__ = [
    "LOOPBACK",
    "OWN_CONNECTOR",
    "CommandRequest",
    "Controls",
    "EngineOptions",
    "EnginePlugin",
    "PreparedEngine",
    "Progress",
    "Role",
    "ModelFacts",
    "Support",
    "pair_parts",
]

Role = Literal["prefill", "decode", "both"]
"""`both` is a plain instance that answers clients by itself: what a pair is compared with."""

Progress = Callable[[str], None]
"""Gets a line before each step that takes long."""

LOOPBACK = "127.0.0.1"
"""Where instances listen that are reached from this machine only."""

OWN_CONNECTOR = "kvbaton"
"""The connector that every engine has: ours."""


@dataclass(frozen=True, slots=True)
class Controls:
    """What a control makes an instance do wrong, so that a check can prove that it would notice."""

    poison: bool = False
    """Fill the blocks of a target with a pattern before they are granted: a missing write shows. Not a fault by itself."""
    drop_writes: bool = False
    """Move no byte of any hand-off."""
    drop: str = ""
    """Leave one thing out of every hand-off: a layer, a head, a kind of cache."""
    lacks: str = ""
    """Leave one thing out of the card."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the instances of one side of a set-up have in common, the same for every engine."""

    model: str
    transport: str = "local"
    sharing: int = 1
    """How many engines share the cores of this machine."""
    handoff: HandoffSettings = DEFAULT_HANDOFF
    shape: str = "tp1"
    device: str = "cpu"
    connector: str = OWN_CONNECTOR
    """Which connector moves caches: ours, or one that the engine ships, to compare with."""
    cache_dtype: str = "float32"
    cache_blocks: int | None = None
    step_tokens: int | None = None
    served_name: str = ""
    """How clients call the model, where the engine can be given a name for it."""
    controls: Controls = Controls()
    model_id: str = ""
    """Stands for the model where the two sides are different engines: then they cannot compare what they have loaded."""
    arguments: tuple[str, ...] = ()
    """More arguments for the engine's own command line."""
    counts_directory: str = ""
    """Where engines count the bytes that another connector's library has stored; one that is ours reports them itself."""
    host: str = LOOPBACK
    """The IP address of this machine on which instances listen, and under which others reach them."""
    cluster_key: str = field(default_factory=new_cluster_key, repr=False)
    """Admits the instances of a set-up to each other. Travels in the environment: every user can read command lines."""
    tls_dir: Path | None = None
    """The certificates with which the instances encrypt; None where they do not."""

    @property
    def scheme(self) -> str:
        """How URLs of the instances begin."""
        return "http" if self.tls_dir is None else "https"

    def trust_variables(self) -> dict[str, str]:
        """What the environment of an instance has of the cluster key and the certificates."""
        return {CLUSTER_KEY_VARIABLE: self.cluster_key} | self.tls_variables()

    def tls_variables(self) -> dict[str, str]:
        """What the environment of a process has of the certificates; empty without any, whatever this process has."""
        return {TLS_DIR_VARIABLE: "" if self.tls_dir is None else str(self.tls_dir)}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a client has to know of a model: its name, how many tokens prompt and answer may have, and its tokenizer."""

    name: str
    context_tokens: int
    encode: Callable[[str], Sequence[int]]
    token_ids: range = range(1000, 40_000)
    """Ids of ordinary tokens, for prompts that are drawn at random."""


@dataclass(frozen=True, slots=True)
class Support:
    """What an engine can be asked for. What a model of it can be asked for, the engine checks itself."""

    modes: tuple[Mode, ...] = tuple(Mode)
    aux_channels: tuple[AuxChannel, ...] = tuple(AuxChannel)
    devices: tuple[str, ...] = ("cpu",)
    connectors: tuple[str, ...] = (OWN_CONNECTOR,)
    controls: tuple[str, ...] = ("drop_writes",)
    crosses: bool = False
    """Whether its instances can hand over to and from those of another engine, under one `model_id`."""
    shapes: bool = False
    """Whether an instance can consist of more than one rank."""
    hosts: bool = False
    """Whether `prepare` can make instances that others reach from another machine."""
    cache_dtypes: tuple[str, ...] = ("float32",)


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """One instance that is started by hand: what `kvbaton config` has an engine turn into a command line."""

    role: str
    model: str
    host: str
    port: int
    control_port: int
    handoffs_port: int
    """Where the instance reports its hand-offs; 0 for nowhere."""
    routers: tuple[str, ...] = ()
    advertise_host: str | None = None
    transport: str = "local"
    handoff: HandoffSettings = DEFAULT_HANDOFF
    limits: Limits = field(default_factory=Limits)
    cluster_key_file: Path | None = None
    """May be a file of another machine: nothing reads it here."""
    allow: tuple[str, ...] = ()
    tls_dir: Path | None = None
    """May be a directory of another machine, too."""

    def settings(self) -> dict[str, Any]:
        """What kvbaton in that instance is set to; what has its default value is left out, so that a line stays short."""
        given: dict[str, Any] = {"transport": self.transport, "handoffs_port": self.handoffs_port}
        given |= {"advertise_host": self.advertise_host, "routers": list(self.routers), "allow": list(self.allow)}
        given["cluster_key_file"] = None if self.cluster_key_file is None else str(self.cluster_key_file)
        given["tls_dir"] = None if self.tls_dir is None else str(self.tls_dir)
        return {name: value for name, value in given.items() if value}

    def changed_limits(self) -> dict[str, float]:
        """The limits that do not have their default values."""
        defaults = asdict(Limits())
        return {name: value for name, value in asdict(self.limits).items() if value != defaults[name]}


def ssl_arguments(tls_dir: Path | None) -> list[str]:
    """The options under which both vLLM and SGLang serve HTTPS with the certificates of a directory, and follow the files."""
    if tls_dir is None:
        return []
    options = ("--ssl-ca-certs", "--ssl-certfile", "--ssl-keyfile")
    given = [part for option, name in zip(options, TLS_FILES, strict=True) for part in (option, str(tls_dir / name))]
    return [*given, "--enable-ssl-refresh"]


class PreparedEngine(ABC):
    """One side of a set-up, ready to start as many instances as are asked for."""

    @abstractmethod
    def part(self, name: str, role: str, ports: PortPicker, routers: Sequence[str] = ()) -> FleetPart:
        """The process of one instance, on free ports; it registers with `routers` (discovery addresses)."""


class EnginePlugin(ABC):
    """One engine. An instance of it is what `kvbaton.engines.table` finds; making it imports nothing heavy."""

    name: str
    """How it is chosen: `--engine NAME`."""
    title: str
    """How it is called in messages and reports."""
    support = Support()
    healthy_within_s = 180.0
    """An instance that is not healthy after so long has failed."""
    server_bytes = 0
    """Memory that one instance takes at least; benchmarks check it before they start several."""
    start_notice = ""
    """What a user should know who waits for the first instance to start."""
    meets_in_rooms = False
    """Whether the two instances of a request find each other by a room that the client draws, as SGLang's do."""
    reports_handover = False
    """Whether answers carry the time of the hand-over: then `bench serve` measures it alone, not against one plain server."""

    @abstractmethod
    def check(self, prefill: EngineOptions, decode: EngineOptions, progress: Progress) -> ModelFacts:
        """Check what only this engine knows: the model, whether the two sides fit. Raises ConfigError or Incompatible.

        Called after `check_support`; installs and starts nothing.
        """

    @abstractmethod
    def prepare(self, options: EngineOptions, progress: Progress) -> PreparedEngine:
        """Install and convert what is missing. Raises KVBatonError with the step that failed."""

    def command_line(self, request: CommandRequest) -> str:
        """The line that starts one instance by hand. Raises ConfigError for settings that it would refuse."""
        raise ConfigError(f"engine {self.name} has no line to print for {request.role}: it is not started by hand")

    def versions(self, connector: str) -> dict[str, str]:
        """The releases that `prepare` would use, for reports."""
        del connector
        return {}

    def accepted_drafts(self, base_url: str) -> int | None:
        """How many drafted tokens an instance has accepted so far; None for one that drafts none, or does not count them.

        A draft changes no answer, so a cache of the draft that was lost on the way shows here alone.
        """
        del base_url
        return None

    def drain_arguments(self, timeout_s: float) -> tuple[str, ...]:
        """The arguments by which an instance that is stopped goes on with its requests for so long; none where it decides."""
        del timeout_s
        return ()

    def check_support(self, options: EngineOptions) -> None:
        """Raise ConfigError, with the option, for what `support` does not have."""
        support, handoff, controls = self.support, options.handoff, options.controls
        for option, asked, known in (
            ("--mode", handoff.mode, support.modes),
            ("--aux-channel", handoff.aux_channel, support.aux_channels),
            ("--cache-dtype", options.cache_dtype, support.cache_dtypes),
            ("--device", options.device, support.devices),
            ("--connector", options.connector, support.connectors),
        ):
            if asked not in known:
                raise ConfigError(f"{option} is {asked}; with {self.title} it is {' or '.join(known)}, leave it out")
        if options.model_id and not support.crosses:
            raise ConfigError(f"{self.title} cannot hand over to or from another engine so far; use one engine for both sides")
        if not support.shapes and Shape.parse(options.shape) != Shape():
            raise ConfigError(f"a shape is {options.shape}; instances of {self.title} have one rank here, leave it out")
        if options.host != LOOPBACK and not support.hosts:
            raise ConfigError(f"host is {options.host}; {self.title} is started on {LOOPBACK} only, leave it out")
        for option, control in (("--drop-writes", "drop_writes"), ("--drop", "drop"), ("--decode-lacks", "lacks")):
            if getattr(controls, control) and control not in support.controls:
                others = " or ".join(f"--{each.replace('_', '-')}" for each in support.controls)
                raise ConfigError(f"{option} is no control of {self.title}; use {others} with {self.name}")


def pair_parts(
    prefill: PreparedEngine, decode: PreparedEngine, counts: tuple[int, int], ports: PortPicker, discovery_port: int
) -> list[FleetPart]:
    """So many prefill and decode instances, which register with the router of this machine at `discovery_port`."""
    routers = [f"{LOOPBACK}:{discovery_port}"]
    sides = (("prefill", prefill, counts[0]), ("decode", decode, counts[1]))
    return [side.part(f"{role}-{index}", role, ports, routers) for role, side, count in sides for index in range(count)]

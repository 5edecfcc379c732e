"""The settings of the connector: `kv_connector_extra_config`, read once and checked, every mistake named by its key."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.config import HandoffSettings, Limits, Trust, parse_limits, parse_trust
from kvbaton.core.addresses import ControlAddress, in_url, is_host
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.core.topology import RankAt, Shape, rank_port
from kvbaton.discovery.advertise import is_wildcard
from kvbaton.discovery.announcer import DEFAULT_HEARTBEAT_S, LONGEST_HEARTBEAT_S
from kvbaton.discovery.messages import check_http_address
from kvbaton.engines.instance import AgentSettings
from kvbaton.engines.vllm.controls import DROPS
from kvbaton.errors import ConfigError
from kvbaton.transport.choose import check_writes

__all__ = ["ConnectorSettings", "parse_settings"]

_WHERE = "kv_connector_extra_config"
DRAFTS = ("refuse", "target computes")
"""What may become of draft layers."""
_MOST_DP = 1024
_ELSEWHERE = {
    "on_failure": "vLLM decides that: set kv_load_failure_policy of kv_transfer_config to 'fail' or 'recompute'",
    "role": "vLLM decides that: set kv_role of kv_transfer_config",
    "proxy_ip": "give routers, a list of discovery addresses host:port",
    "proxy_ping_port": "give routers, a list of discovery addresses host:port",
    "http_port": "give http_address, host:port of this instance's API",
    "handshake_port": "kvbaton needs one port: give control_port",
    "notify_port": "kvbaton needs one port: give control_port",
    "host_ip": "give control_host",
    "read_mode": "give mode: 'pull' for true, 'push' for false",
    "recv_abort_timeout": "give transfer_timeout",
    "backend": "give transport: 'local', 'tcp', or another that is known",
    "backends": "give transport: 'local', 'tcp', or another that is known",
    "num_threads": "a transport has as many threads as it needs; leave it out",
    "qp_per_transfer": "transports are not tuned here; leave it out",
    "post_batch_size": "transports are not tuned here; leave it out",
    "num_workers": "transports are not tuned here; leave it out",
    "kv_buffer_device": "the cache itself is registered; leave it out",
    "engine_ttl": "peers are distinguished by their incarnation and forgotten when they are gone; leave it out",
    "bidirectional_kv_xfer": "caches go from prefill to decode instances only, so far; leave it out",
    "kv_recompute_threshold": "caches go from prefill to decode instances only, so far; leave it out",
    "decoder_kv_blocks_ttl": "caches go from prefill to decode instances only, so far; leave it out",
    "kv_lease_duration": "give defer_timeout",
    "push_registration_timeout": "give transfer_timeout",
    "enforce_handshake_compat": "peers that do not fit are always refused; leave it out",
    "cluster_key": f"{_WHERE} can be read by every user: give cluster_key_file, or set KVBATON_CLUSTER_KEY",
}


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `kv_connector_extra_config` may have.

    mode:             push (stream while computing) or pull (fetch when complete); both instances of a pair have the same
    transport:        how cache bytes travel: local (same host) or tcp; others are taken, and not tested with vLLM
    control_host:     where other instances reach this one
    control_port:     on which port; must be given
    advertise_host:   under which address others reach this instance, when that is not control_host
    handoffs_port:    port on which it reports its hand-offs (`kvbaton explain`), at control_host; 0 for none
    http_address:     host:port of this instance's API, as registered with routers
    routers:          discovery addresses (host:port) of the routers to register with
    heartbeat_s:      how often a heartbeat is sent to routers
    integrity:        how much of a received cache is checked before it counts as landed
    cluster_key_file: file that holds the key that all instances share
    allow:            addresses, networks or names that peers may have
    poison:           fill blocks with a pattern before they are handed over, so that a missing byte shows
    drop:             what of every hand-off is not moved: writes (all), heads, layers, state, draft; controls of `verify`
    draft:            what becomes of draft layers: refuse (they are handed over; peers without them are refused), or target
                      computes (they stay where they are, and a target drafts without those of the prompt)
    dp_size:          how many data-parallel ranks this vLLM has; rank N listens N ports behind control_port
    unfenced_writes:  in push, let sources write into targets, over nixl, mooncake or mori; nothing can take that right back

    The five limits are those of `kvbaton.config.Limits`.
    """

    control_port: int
    mode: Mode = Mode.PUSH
    transport: str = "local"
    control_host: str = "127.0.0.1"
    advertise_host: str = ""
    handoffs_port: int = 0
    http_address: str = ""
    routers: tuple[str, ...] = ()
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    integrity: Integrity = Integrity.OFF
    transfer_timeout: float = Limits().transfer_timeout
    defer_timeout: float = Limits().defer_timeout
    stop_timeout: float = Limits().stop_timeout
    retry: float = Limits().retry
    queue_timeout: float = Limits().queue_timeout
    cluster_key_file: str | None = None
    allow: tuple[str, ...] = ()
    poison: bool = False
    drop: str = ""
    draft: str = DRAFTS[0]
    dp_size: int = 1
    unfenced_writes: bool = False

    @property
    def control_address(self) -> ControlAddress:
        """Where other instances reach this one."""
        return ControlAddress.of(self.advertise_host or self.control_host, self.control_port)

    def of_dp_rank(self, rank: int) -> ConnectorSettings:
        """The settings of one data-parallel rank: with ports of its own. Raises ConfigError."""
        if not 0 <= rank < self.dp_size:
            raise ConfigError(
                f"{_WHERE}: dp_size is {self.dp_size}, and this is data-parallel rank {rank}; give the --data-parallel-size of"
                " this vLLM"
            )
        shape, at = Shape(dp=self.dp_size), RankAt(dp=rank)
        control, handoffs = (base and rank_port(base, shape, at) for base in (self.control_port, self.handoffs_port))
        return msgspec.structs.replace(self, control_port=control, handoffs_port=handoffs)

    @property
    def handoffs_address(self) -> str:
        """Where this instance reports its hand-offs; empty where it does not."""
        return f"{in_url(self.control_address.host)}:{self.handoffs_port}" if self.handoffs_port else ""

    @property
    def limits(self) -> Limits:
        """How long this instance waits for what."""
        return parse_limits({name: getattr(self, name) for name in Limits.__dataclass_fields__})

    @property
    def handoff(self) -> HandoffSettings:
        """How this instance hands over."""
        return HandoffSettings(mode=self.mode, integrity=self.integrity, unfenced_writes=self.unfenced_writes)

    def agents(self) -> AgentSettings:
        """What the agents of this instance are opened with."""
        return AgentSettings(
            control_port=self.control_port,
            control_host=self.control_host,
            advertise_host=self.advertise_host,
            transport=self.transport,
            limits=self.limits,
            handoff=self.handoff,
            trust=self.trust(),
            drop_writes=self.drop == "writes",
        )

    def trust(self, environment: Mapping[str, str] = os.environ) -> Trust:
        """Who is admitted as a peer. Raises ConfigError that names the key."""
        key_file = None if self.cluster_key_file is None else Path(self.cluster_key_file)
        try:
            return parse_trust(key_file, environment, self.allow)
        except ConfigError as error:
            raise _by_key(error) from error


def parse_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Read `kv_connector_extra_config`. Raises ConfigError that names the key, for unknown ones with the nearest known."""
    for key in extra_config:
        if key not in ConnectorSettings.__struct_fields__:
            raise ConfigError(f"{_WHERE}: unknown key {key!r}; {_hint(key)}")
    if "control_port" not in extra_config:
        raise ConfigError(f"{_WHERE}: control_port is missing; give a port on which other instances reach this one")
    for key, choices in (("mode", tuple(Mode)), ("integrity", tuple(Integrity)), ("drop", ("", *DROPS)), ("draft", DRAFTS)):
        if key in extra_config and extra_config[key] not in choices:
            raise ConfigError(f"{_WHERE}: {key} is {extra_config[key]!r}; known are {', '.join(choices)}")
    try:
        settings = msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    _check(settings)
    return settings


def _hint(key: str) -> str:
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    known = ConnectorSettings.__struct_fields__
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"


def _by_key(error: ConfigError) -> ConfigError:
    """What is wrong with an option, as it is wrong with a key."""
    text = str(error)
    for option, key in (("--allow", "allow"), ("--cluster-key-file", "cluster_key_file")):
        text = text.replace(option, key)
    return ConfigError(f"{_WHERE}: {text}")


def _check(settings: ConnectorSettings) -> None:
    _check_ports(settings)
    _check_hosts(settings)
    _check_routers(settings)
    try:
        check_writes(settings.transport, settings.unfenced_writes)
        _ = settings.limits
        parse_trust(None, {}, settings.allow, resolve=lambda _: ())
    except ConfigError as error:
        raise _by_key(error) from error


def _check_ports(settings: ConnectorSettings) -> None:
    if not 0 < settings.control_port < 65536:
        raise ConfigError(f"{_WHERE}: control_port is {settings.control_port}; it must be between 1 and 65535")
    if not 0 <= settings.handoffs_port < 65536 or settings.handoffs_port == settings.control_port:
        raise ConfigError(
            f"{_WHERE}: handoffs_port is {settings.handoffs_port}; it must be between 1 and 65535 and not the control_port,"
            " or 0 for no timelines"
        )
    if not 1 <= settings.dp_size <= _MOST_DP:
        raise ConfigError(f"{_WHERE}: dp_size is {settings.dp_size}; it must be between 1 and {_MOST_DP}")
    if settings.handoffs_port and abs(settings.handoffs_port - settings.control_port) < settings.dp_size:
        raise ConfigError(
            f"{_WHERE}: control_port {settings.control_port} and handoffs_port {settings.handoffs_port} are too near: each of"
            f" {settings.dp_size} data-parallel ranks takes one port behind each of them"
        )


def _check_hosts(settings: ConnectorSettings) -> None:
    """Names are looked up where the instance runs; here they must be such that they can be."""
    hosts = {"control_host": settings.control_host, "advertise_host": settings.advertise_host}
    for key, host in hosts.items():
        is_left_out = key == "advertise_host" and not host
        if not (is_left_out or is_wildcard(host) or is_host(host)):
            raise ConfigError(f"{_WHERE}: {key} is {host!r}; give an IP address, without brackets, or a host name")
    if is_wildcard(settings.control_address.host):
        key = "advertise_host" if settings.advertise_host else "control_host"
        raise ConfigError(
            f"{_WHERE}: {key} is {hosts[key]!r}, which no peer can dial; give advertise_host, an address of this"
            " machine that others reach"
        )


def _check_routers(settings: ConnectorSettings) -> None:
    if not 0 < settings.heartbeat_s <= LONGEST_HEARTBEAT_S:
        raise ConfigError(
            f"{_WHERE}: heartbeat_s is {settings.heartbeat_s}; it must be above 0 and at most {LONGEST_HEARTBEAT_S:g}, routers"
            " forget silent instances"
        )
    for router in settings.routers:
        if (wrong := check_http_address(router)) is not None:
            raise ConfigError(f"{_WHERE}: routers has {router!r}, which {wrong}; give a router's discovery address, host:port")
    if settings.http_address and (wrong := check_http_address(settings.http_address)) is not None:
        raise ConfigError(f"{_WHERE}: http_address is {settings.http_address!r}, which {wrong}; give host:port of the API here")
    if is_wildcard(settings.http_address.rpartition(":")[0] or "127.0.0.1"):
        raise ConfigError(f"{_WHERE}: http_address is {settings.http_address!r}, which no router can dial")
    if settings.routers and not settings.http_address:
        raise ConfigError(
            f"{_WHERE}: routers are given, but no http_address; give host:port of this instance's API, so that they reach it"
        )

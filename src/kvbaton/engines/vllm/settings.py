"""The settings of the connector: `kv_connector_extra_config`, read once and checked, every mistake named by its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from kvbaton.config import Limits, parse_limits
from kvbaton.core.addresses import ControlAddress, in_url, is_host
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.core.topology import RankAt, Shape, rank_port
from kvbaton.discovery.advertise import is_wildcard
from kvbaton.discovery.messages import check_http_address
from kvbaton.engines.hosted_settings import HostedSettings
from kvbaton.engines.instance import AgentSettings
from kvbaton.engines.vllm.controls import DROPS
from kvbaton.errors import ConfigError

__all__ = ["ConnectorSettings", "DpPlace", "parse_settings"]

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


class DpPlace(msgspec.Struct, frozen=True):
    """Which of how many data-parallel engines this is; with external balancing each has an API and settings of its own."""

    size: int = 1
    rank: int = 0
    is_external: bool = False


class ConnectorSettings(HostedSettings, frozen=True, kw_only=True):
    """What `kv_connector_extra_config` may have, beside what every hosted kvbaton has.

    control_host:     where other instances reach this one
    control_port:     on which port; must be given
    http_address:     host:port of this instance's API, as registered with routers
    drop:             what of every hand-off is not moved: writes (all), heads, layers, state, draft; controls of `verify`
    draft:            what becomes of draft layers: refuse (they are handed over; peers without them are refused), or target
                      computes (they stay where they are, and a target drafts without those of the prompt)
    dp_size:          how many data-parallel ranks this vLLM has; rank N listens N ports behind control_port
    engine_sleeps:    whether vLLM's engine process sleeps, and does not poll, while requests only wait for their caches

    The five limits are those of `kvbaton.config.Limits`.
    """

    where: ClassVar[str] = _WHERE
    elsewhere: ClassVar[Mapping[str, str]] = _ELSEWHERE

    control_port: int
    control_host: str = "127.0.0.1"
    http_address: str = ""
    transfer_timeout: float = Limits().transfer_timeout
    defer_timeout: float = Limits().defer_timeout
    stop_timeout: float = Limits().stop_timeout
    retry: float = Limits().retry
    queue_timeout: float = Limits().queue_timeout
    drop: str = ""
    draft: str = DRAFTS[0]
    dp_size: int = 1
    engine_sleeps: bool = True

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

    def agents(self) -> AgentSettings:
        """What the agents of this instance are opened with."""
        return self.agents_at(self.control_host, self.control_port, self.limits, drop_writes=self.drop == "writes")

    def check(self) -> None:
        """Raise ConfigError for a value that cannot work, as far as that is known on any machine."""
        _check_ports(self)
        _check_hosts(self)
        super().check()
        _check_http_address(self)
        try:
            _ = self.limits
        except ConfigError as error:
            raise self.by_key(error) from error


def parse_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Read `kv_connector_extra_config`. Raises ConfigError that names the key, for unknown ones with the nearest known."""
    ConnectorSettings.check_keys(extra_config)
    if "control_port" not in extra_config:
        raise ConfigError(f"{_WHERE}: control_port is missing; give a port on which other instances reach this one")
    for key, choices in (("mode", tuple(Mode)), ("integrity", tuple(Integrity)), ("drop", ("", *DROPS)), ("draft", DRAFTS)):
        if key in extra_config and extra_config[key] not in choices:
            raise ConfigError(f"{_WHERE}: {key} is {extra_config[key]!r}; known are {', '.join(choices)}")
    try:
        settings = msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    settings.check()
    return settings


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


def _check_http_address(settings: ConnectorSettings) -> None:
    if settings.http_address and (wrong := check_http_address(settings.http_address)) is not None:
        raise ConfigError(f"{_WHERE}: http_address is {settings.http_address!r}, which {wrong}; give host:port of the API here")
    if is_wildcard(settings.http_address.rpartition(":")[0] or "127.0.0.1"):
        raise ConfigError(f"{_WHERE}: http_address is {settings.http_address!r}, which no router can dial")
    if settings.routers and not settings.http_address:
        raise ConfigError(
            f"{_WHERE}: routers are given, but no http_address; give host:port of this instance's API, so that they reach it"
        )

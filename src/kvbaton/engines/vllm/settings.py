"""The settings of the connector: `kv_connector_extra_config`, read once and checked, every mistake named by its key."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.config import HandoffSettings, Limits, Trust, parse_limits, parse_trust
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.discovery.advertise import is_wildcard
from kvbaton.discovery.announcer import DEFAULT_HEARTBEAT_S
from kvbaton.errors import ConfigError
from kvbaton.transport.choose import AUTO, TRANSPORTS, check_writes

__all__ = ["ConnectorSettings", "parse_settings"]

_WHERE = "kv_connector_extra_config"
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
    "backend": "give transport: 'local' or 'tcp'",
    "backends": "give transport: 'local' or 'tcp'",
    "kv_lease_duration": "give defer_timeout",
    "push_registration_timeout": "give transfer_timeout",
    "enforce_handshake_compat": "peers that do not fit are always refused; leave it out",
    "cluster_key": f"{_WHERE} can be read by everybody: give cluster_key_file, or set KVBATON_CLUSTER_KEY",
}


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `kv_connector_extra_config` may say.

    mode:             push (stream while computing) or pull (fetch when complete); both instances of a pair have the same
    transport:        how cache bytes travel: local (same host) or tcp
    control_host:     where other instances reach this one
    control_port:     on which port; must be given
    advertise_host:   under which address others reach this instance, when that is not control_host
    handoffs_port:    port on which it tells of its hand-offs (`kvbaton explain`), at control_host; 0 for none
    http_address:     host:port of this instance's API, told to routers
    routers:          discovery addresses (host:port) of the routers to register with
    heartbeat_s:      how often to tell routers that this instance lives
    integrity:        how much of a received cache is checked before it counts as landed
    cluster_key_file: file that holds the key that all instances share
    allow:            addresses, networks or names that peers may have
    poison:           fill blocks with a pattern before they are handed over, so that a missing byte shows
    drop_writes:      move no bytes; the control of `kvbaton verify`
    unfenced_writes:  in push, let sources write into targets, over nixl, mooncake or mori; nothing can take that right back

    The four limits are those of `kvbaton.config.Limits`.
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
    cluster_key_file: str | None = None
    allow: tuple[str, ...] = ()
    poison: bool = False
    drop_writes: bool = False
    unfenced_writes: bool = False

    @property
    def control_address(self) -> ControlAddress:
        """Where other instances reach this one."""
        return ControlAddress.of(self.advertise_host or self.control_host, self.control_port)

    @property
    def handoffs_address(self) -> str:
        """Where this instance tells of its hand-offs; empty where it does not."""
        return f"{in_url(self.control_address.host)}:{self.handoffs_port}" if self.handoffs_port else ""

    @property
    def limits(self) -> Limits:
        """How long this instance waits for what."""
        return parse_limits({name: getattr(self, name) for name in Limits.__struct_fields__})

    @property
    def handoff(self) -> HandoffSettings:
        """How this instance hands over."""
        return HandoffSettings(mode=self.mode, integrity=self.integrity, unfenced_writes=self.unfenced_writes)

    def trust(self, environment: Mapping[str, str] = os.environ) -> Trust:
        """Who is admitted as a peer."""
        key_file = None if self.cluster_key_file is None else Path(self.cluster_key_file)
        return parse_trust(key_file, environment, self.allow)


def parse_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Read `kv_connector_extra_config`. Raises ConfigError that names the key, for unknown ones with the nearest known."""
    for key in extra_config:
        if key not in ConnectorSettings.__struct_fields__:
            raise ConfigError(f"{_WHERE}: unknown key {key!r}; {_hint(key)}")
    if "control_port" not in extra_config:
        raise ConfigError(f"{_WHERE}: control_port is missing; give a port on which other instances reach this one")
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


def _check(settings: ConnectorSettings) -> None:
    if not 0 < settings.control_port < 65536:
        raise ConfigError(f"{_WHERE}: control_port is {settings.control_port}; it must be between 1 and 65535")
    if not 0 <= settings.handoffs_port < 65536 or settings.handoffs_port == settings.control_port:
        raise ConfigError(
            f"{_WHERE}: handoffs_port is {settings.handoffs_port}; it must be between 1 and 65535 and not the control_port,"
            " or 0 to tell no timelines"
        )
    if is_wildcard(settings.control_address.host):
        raise ConfigError(
            f"{_WHERE}: control_host is {settings.control_host!r}, where nobody can be told to come; give advertise_host"
        )
    if settings.transport not in (AUTO, *TRANSPORTS):
        known = ", ".join([AUTO, *sorted(TRANSPORTS)])
        raise ConfigError(f"{_WHERE}: transport is {settings.transport!r}; known are {known}")
    try:
        check_writes(settings.transport, settings.unfenced_writes)
        _ = settings.limits
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}: {error}") from error
    if settings.routers and not settings.http_address:
        raise ConfigError(
            f"{_WHERE}: routers are given, but no http_address; give host:port of this instance's API, so that they reach it"
        )

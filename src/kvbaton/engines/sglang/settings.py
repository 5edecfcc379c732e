"""The settings of the backend: one environment variable with JSON, read once and checked, every mistake named by its key.

SGLang has no place for a backend's own settings. What SGLang itself knows (host, ports, role, model) is read from its
arguments.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvbaton.config import HandoffSettings, Limits, Trust, parse_limits, parse_trust
from kvbaton.core.addresses import in_url, is_host
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.discovery.advertise import is_wildcard
from kvbaton.discovery.announcer import DEFAULT_HEARTBEAT_S, LONGEST_HEARTBEAT_S
from kvbaton.discovery.messages import check_http_address
from kvbaton.engines.instance import AgentSettings
from kvbaton.errors import ConfigError
from kvbaton.transport.choose import check_writes

__all__ = ["CONFIG_VARIABLE", "SglangSettings", "parse_settings"]

CONFIG_VARIABLE = "KVBATON_SGLANG_CONFIG"
"""The environment variable that holds the settings, a JSON object."""

_ELSEWHERE = {
    "control_host": "give SGLang's --host",
    "http_address": "SGLang's --host and --port; give advertise_host where others reach them elsewhere",
    "role": "give SGLang's --disaggregation-mode",
    "on_failure": "SGLang fails a request whose transfer failed; leave it out",
    "bootstrap_timeout": "give queue_timeout",
    "waiting_timeout": "give transfer_timeout",
    "cluster_key": "the settings can be read by every process of the user: give cluster_key_file, or set KVBATON_CLUSTER_KEY",
}


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the variable may have.

    mode:             push (stream chunk by chunk) or pull (fetch when complete); that of the prefill instance decides
    transport:        how cache bytes travel: local (same host) or tcp; others are taken, and not tested with SGLang
    advertise_host:   under which address others reach this instance, when that is not SGLang's --host
    control_port:     where a decode instance listens, 0: any free port; a prefill instance takes SGLang's bootstrap port
    handoffs_port:    port on which it reports its hand-offs (`kvbaton explain`); 0 for none
    routers:          discovery addresses (host:port) of the routers to register with
    heartbeat_s:      how often a heartbeat is sent to routers
    integrity:        how much of a received cache is checked before it counts as landed
    cluster_key_file: file that holds the key that all instances share
    allow:            addresses, networks or names that peers may have
    poison:           fill pages with a pattern before they are handed over, so that a missing byte shows
    drop_writes:      move no bytes; the control of `kvbaton verify`
    unfenced_writes:  in push, let sources write into targets, over nixl, mooncake or mori; nothing can take that right back
    fingerprint:      stands for the model, where instances of different engines serve the same one; empty: computed

    The limits are those of `kvbaton.config.Limits`.
    """

    mode: Mode = Mode.PUSH
    transport: str = "local"
    advertise_host: str = ""
    control_port: int = 0
    handoffs_port: int = 0
    routers: tuple[str, ...] = ()
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    integrity: Integrity = Integrity.OFF
    limits: dict[str, float] = {}
    cluster_key_file: str | None = None
    allow: tuple[str, ...] = ()
    poison: bool = False
    drop_writes: bool = False
    unfenced_writes: bool = False
    fingerprint: str = ""

    def handoffs_address(self, host: str) -> str:
        """Where this instance reports its hand-offs; empty where it does not."""
        return f"{in_url(self.advertise_host or host)}:{self.handoffs_port}" if self.handoffs_port else ""

    @property
    def handoff(self) -> HandoffSettings:
        """How this instance hands over. In pull no source writes, whatever the transport could do."""
        writes = self.unfenced_writes and self.mode is Mode.PUSH
        return HandoffSettings(mode=self.mode, integrity=self.integrity, unfenced_writes=writes)

    def agents(self, host: str, port: int) -> AgentSettings:
        """What the agents of an instance at this address are opened with."""
        return AgentSettings(
            control_port=port,
            control_host=host,
            advertise_host=self.advertise_host,
            transport=self.transport,
            limits=parse_limits(self.limits),
            handoff=self.handoff,
            trust=self.trust(),
            drop_writes=self.drop_writes,
        )

    def trust(self, environment: Mapping[str, str] = os.environ) -> Trust:
        """Which peers are admitted. Raises ConfigError that names the key."""
        key_file = None if self.cluster_key_file is None else Path(self.cluster_key_file)
        return parse_trust(key_file, environment, self.allow)


def parse_settings(text: str) -> SglangSettings:
    """Read the variable. Raises ConfigError that names the key, for unknown ones with the nearest known."""
    try:
        given = msgspec.json.decode(text or "{}", type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE} is {text[:80]!r}, which is no JSON object: {error}") from error
    for key in given:
        if key not in SglangSettings.__struct_fields__:
            raise ConfigError(f"{CONFIG_VARIABLE}: unknown key {key!r}; {_hint(key)}")
    try:
        settings = msgspec.json.decode(text or "{}", type=SglangSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error
    try:
        _check(settings)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error
    return settings


def _hint(key: str) -> str:
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    if key in Limits.__dataclass_fields__:
        return f"give it inside limits: {{'limits': {{{key!r}: ...}}}}"
    near = difflib.get_close_matches(key, SglangSettings.__struct_fields__, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(SglangSettings.__struct_fields__))}"


def _check(settings: SglangSettings) -> None:
    for name, port in (("handoffs_port", settings.handoffs_port), ("control_port", settings.control_port)):
        if not 0 <= port < 65536:
            raise ConfigError(f"{name} is {port}; it must be between 1 and 65535, or 0")
    host = settings.advertise_host
    if host and (is_wildcard(host) or not is_host(host)):
        raise ConfigError(f"advertise_host is {host!r}; give an IP address, without brackets, or a host name that others reach")
    if not 0 < settings.heartbeat_s <= LONGEST_HEARTBEAT_S:
        raise ConfigError(f"heartbeat_s is {settings.heartbeat_s}; it must be above 0 and at most {LONGEST_HEARTBEAT_S:g}")
    for router in settings.routers:
        if (wrong := check_http_address(router)) is not None:
            raise ConfigError(f"routers has {router!r}, which {wrong}; give a router's discovery address, host:port")
    check_writes(settings.transport, settings.unfenced_writes)
    parse_limits(settings.limits)
    parse_trust(None, {}, settings.allow, resolve=lambda _: ())

"""The settings of the backend: one environment variable with JSON, read once and checked, every mistake named by its key.

SGLang has no place for a backend's own settings. What SGLang itself knows (host, ports, role, model) is read from its
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from kvbaton.config import HandoffSettings, Limits, parse_limits
from kvbaton.core.addresses import in_url, is_host
from kvbaton.core.handoff import Mode
from kvbaton.core.topology import RankAt, Shape, rank_port
from kvbaton.discovery.advertise import is_wildcard
from kvbaton.engines.hosted_settings import HostedSettings
from kvbaton.engines.instance import AgentSettings
from kvbaton.errors import ConfigError

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
    **{name: f"give it inside limits: {{'limits': {{{name!r}: ...}}}}" for name in Limits.__dataclass_fields__},
}


class SglangSettings(HostedSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the variable may have, beside what every hosted kvbaton has. The mode is that of the prefill instance.

    control_port:     where a decode instance listens, 0: any free port; a prefill instance takes SGLang's bootstrap port
    drop_writes:      move no bytes; the control of `kvbaton verify`
    prefill_dp_size:  how many data-parallel ranks the prefill instances have that a decode instance is paired with

    The limits are those of `kvbaton.config.Limits`.
    """

    where: ClassVar[str] = CONFIG_VARIABLE
    elsewhere: ClassVar[Mapping[str, str]] = _ELSEWHERE

    control_port: int = 0
    limits: dict[str, float] = msgspec.field(default_factory=dict)
    drop_writes: bool = False
    prefill_dp_size: int = 1

    def of_dp_rank(self, size: int, rank: int) -> SglangSettings:
        """The settings of one of `size` data-parallel ranks: with ports of its own. Raises ConfigError."""
        if size == 1:
            return self
        if self.routers:
            raise ConfigError(
                f"{self.where}: routers is {list(self.routers)}, and this instance has {size} data-parallel ranks, among which"
                " no router can choose so far; leave routers out, and put SGLang's own balancer in front"
            )
        shape, at = Shape(dp=size), RankAt(dp=rank)
        control, handoffs = (base and rank_port(base, shape, at) for base in (self.control_port, self.handoffs_port))
        return msgspec.structs.replace(self, control_port=control, handoffs_port=handoffs)

    def handoffs_address(self, host: str) -> str:
        """Where this instance reports its hand-offs; empty where it does not."""
        return f"{in_url(self.advertise_host or host)}:{self.handoffs_port}" if self.handoffs_port else ""

    @property
    def handoff(self) -> HandoffSettings:
        """How this instance hands over. In pull no source writes, whatever the transport could do."""
        is_push = self.mode is Mode.PUSH
        return HandoffSettings(
            mode=self.mode,
            integrity=self.integrity,
            unfenced_writes=self.unfenced_writes and is_push,
            fenced_writes=self.fenced_writes and is_push,
            confirmation=self.confirmation,
            busy_poll_s=self.busy_poll_s,
        )

    def agents(self, host: str, port: int) -> AgentSettings:
        """What the agents of an instance at this address are opened with."""
        return self.agents_at(host, port, parse_limits(self.limits), drop_writes=self.drop_writes)

    def check(self) -> None:
        """Raise ConfigError for a value that cannot work, as far as that is known on any machine."""
        for name, port in (("handoffs_port", self.handoffs_port), ("control_port", self.control_port)):
            if not 0 <= port < 65536:
                raise ConfigError(f"{self.where}: {name} is {port}; it must be between 1 and 65535, or 0")
        if self.prefill_dp_size < 1:
            raise ConfigError(f"{self.where}: prefill_dp_size is {self.prefill_dp_size}; it must be at least 1")
        host = self.advertise_host
        if host and (is_wildcard(host) or not is_host(host)):
            text = f"advertise_host is {host!r}; give an IP address, without brackets, or a host name that others reach"
            raise ConfigError(f"{self.where}: {text}")
        super().check()
        try:
            parse_limits(self.limits)
        except ConfigError as error:
            raise self.by_key(error) from error


def parse_settings(text: str) -> SglangSettings:
    """Read the variable. Raises ConfigError that names the key, for unknown ones with the nearest known."""
    try:
        given = msgspec.json.decode(text or "{}", type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{CONFIG_VARIABLE} is {text[:80]!r}, which is no JSON object: {error}") from error
    SglangSettings.check_keys(given)
    try:
        settings = msgspec.json.decode(text or "{}", type=SglangSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error
    settings.check()
    return settings

"""The settings of kvbaton inside another engine's servers (vLLM's connector, SGLang's backend): what all of them have.

They are read once and checked where the server starts; every mistake is named by its key, for unknown ones with the nearest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from kvbaton.config import (
    BUSY_POLL_S,
    CLUSTER_KEY_VARIABLE,
    DEFAULT_HANDOFF,
    HandoffSettings,
    Limits,
    Trust,
    nearest_known,
    parse_trust,
)
from kvbaton.core.handoff import Confirmation, Integrity, Mode
from kvbaton.discovery.announcer import DEFAULT_HEARTBEAT_S, LONGEST_HEARTBEAT_S
from kvbaton.discovery.messages import check_http_address
from kvbaton.engines.instance import AgentSettings
from kvbaton.errors import ConfigError
from kvbaton.transport.choose import check_writes

__all__ = ["HostedSettings", "changed_options"]


class HostedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings of every such engine may have.

    mode:             push (stream while computing) or pull (fetch when complete); both instances of a pair have the same
    transport:        how cache bytes travel: local (same host) or tcp; others are taken, and not tested with the engine
    advertise_host:   under which address others reach this instance, when that is not where it listens
    handoffs_port:    port on which it reports its hand-offs (`kvbaton explain`); 0 for none
    routers:          discovery addresses (host:port) of the routers to register with
    heartbeat_s:      how often a heartbeat is sent to routers
    integrity:        how much of a received cache is checked before it counts as landed
    cluster_key_file: file that holds the key that all instances share
    tls_dir:          directory with ca.crt, tls.crt and tls.key: every connection is encrypted, and the engine serves HTTPS
    allow:            addresses, networks or names that peers may have
    fingerprint:      stands for the model, where instances of different engines serve the same one; empty: computed
    poison:           fill blocks with a pattern before they are handed over, so that a missing byte shows
    unfenced_writes:  in push, let sources write into targets, over nixl, mooncake or mori; nothing can take that right back
    fenced_writes:    in push, let sources write into targets, over tcp; the target can take that right back
    confirmation:     stamp: targets on the host of their source look whether what they have read still holds; message: they ask
    busy_poll_s:      for how long the threads that hand over look for news before they sleep, while most waits are that short
    """

    where: ClassVar[str]
    """Where users give the settings: the beginning of every message."""
    elsewhere: ClassVar[Mapping[str, str]]
    """Keys that users may expect here, and what to give in place of each."""

    mode: Mode = Mode.PUSH
    transport: str = "local"
    advertise_host: str = ""
    handoffs_port: int = 0
    routers: tuple[str, ...] = ()
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    integrity: Integrity = Integrity.OFF
    cluster_key_file: str | None = None
    tls_dir: str | None = None
    allow: tuple[str, ...] = ()
    fingerprint: str = ""
    poison: bool = False
    unfenced_writes: bool = False
    fenced_writes: bool = False
    confirmation: Confirmation = Confirmation.STAMP
    busy_poll_s: float = BUSY_POLL_S

    @property
    def handoff(self) -> HandoffSettings:
        """How this instance hands over."""
        return HandoffSettings(
            mode=self.mode,
            integrity=self.integrity,
            unfenced_writes=self.unfenced_writes,
            fenced_writes=self.fenced_writes,
            confirmation=self.confirmation,
            busy_poll_s=self.busy_poll_s,
        )

    def agents_at(self, host: str, port: int, limits: Limits, *, drop_writes: bool) -> AgentSettings:
        """What the agents of an instance that listens there are opened with."""
        return AgentSettings(
            control_port=port,
            control_host=host,
            advertise_host=self.advertise_host,
            transport=self.transport,
            limits=limits,
            handoff=self.handoff,
            trust=self.trust(),
            drop_writes=drop_writes,
        )

    def trust(self, environment: Mapping[str, str] = os.environ) -> Trust:
        """Which peers are admitted. Raises ConfigError that names the key."""
        key_file = None if self.cluster_key_file is None else Path(self.cluster_key_file)
        try:
            tls_dir = None if self.tls_dir is None else Path(self.tls_dir)
            return parse_trust(key_file, environment, self.allow, tls_dir=tls_dir)
        except ConfigError as error:
            raise self.by_key(error) from error

    def check_bind(self, host: str) -> None:
        """Raise ConfigError for an address that may not be bound without a key. A key file may be one of another machine."""
        has_key = self.cluster_key_file is not None or bool(os.environ.get(CLUSTER_KEY_VARIABLE))
        if not has_key and not self.allow:
            parse_trust().check_bind(host)

    @classmethod
    def check_keys(cls, keys: Iterable[str]) -> None:
        """Raise ConfigError for the first key that is unknown."""
        known = sorted(cls.__struct_fields__)
        for key in keys:
            if key not in known:
                hint = cls.elsewhere.get(key) or nearest_known(key, known)
                raise ConfigError(f"{cls.where}: unknown key {key!r}; {hint}")

    @classmethod
    def by_key(cls, error: ConfigError) -> ConfigError:
        """What is wrong with an option, as it is wrong with a key."""
        text = str(error)
        for option, key in (("--allow", "allow"), ("--cluster-key-file", "cluster_key_file")):
            text = text.replace(option, key)
        return ConfigError(f"{cls.where}: {text}")

    def check(self) -> None:
        """Raise ConfigError for a value that cannot work, as far as that is known on any machine."""
        if not 0 < self.heartbeat_s <= LONGEST_HEARTBEAT_S:
            raise ConfigError(
                f"{self.where}: heartbeat_s is {self.heartbeat_s}; it must be above 0 and at most {LONGEST_HEARTBEAT_S:g},"
                " routers forget silent instances"
            )
        for router in self.routers:
            if (wrong := check_http_address(router)) is not None:
                text = f"routers has {router!r}, which {wrong}; give a router's discovery address, host:port"
                raise ConfigError(f"{self.where}: {text}")
        try:
            _ = self.handoff  # it checks itself
            check_writes(self.transport, self.unfenced_writes, self.fenced_writes)
            parse_trust(None, {}, self.allow, resolve=lambda _: ())
        except ConfigError as error:
            raise self.by_key(error) from error


def changed_options(handoff: HandoffSettings) -> dict[str, Any]:
    """The keys that state how an instance hands over, for a server that kvbaton starts: what has its default is left out."""
    always = {"mode": str(handoff.mode), "integrity": str(handoff.integrity)}
    given = {name: getattr(handoff, name) for name in ("unfenced_writes", "fenced_writes", "confirmation", "busy_poll_s")}
    return always | {name: value for name, value in given.items() if value != getattr(DEFAULT_HANDOFF, name)}

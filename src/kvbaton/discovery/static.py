"""Instances that do not register by themselves: a JSON list of registrations in a file.

The file is read again when it changes. Listed instances are kept alive; one that was taken off the list leaves. A file that
cannot be read changes nothing, and is logged once. An instance that is on the list and registers too is one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.discovery.messages import Malformed, Registration, read_registration
from kvbaton.discovery.registry import RegistrationRefused, Registry
from kvbaton.errors import ConfigError

__all__ = ["StaticInstances", "read_instances"]

_logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 4 * 1024 * 1024
_BEAT_S = 1.0

_Stamp = tuple[int, int, int]


def read_instances(path: Path) -> tuple[Registration, ...]:
    """The instances of a file. Raises ConfigError, which names the entry and the field."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"instances_file {path} cannot be read: {error.strerror}; name a file that can") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"instances_file {path} is larger than {_MAX_FILE_BYTES} bytes; is it a list of instances?")
    try:
        entries = msgspec.json.decode(content, type=list[dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"instances_file {path} is no JSON list of instances ({error}); see docs/protocol.md") from error
    return tuple(_read_entry(path, number, entry) for number, entry in enumerate(entries, 1))


def _read_entry(path: Path, number: int, entry: dict[str, Any]) -> Registration:
    registration = read_registration(entry)
    if isinstance(registration, Malformed):
        raise ConfigError(f"instances_file {path}: instance {number}: {registration}")
    if registration.bye:
        raise ConfigError(f"instances_file {path}: instance {number}: type: is a goodbye; it must be 'P' or 'D'")
    return msgspec.structs.replace(registration, answer=False)


class StaticInstances:
    """Keeps the instances of `path` in `registry`; call `refresh` more often than the registry forgets."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self._path = path
        self._registry = registry
        self._stamp = _stamp(path)
        self._instances = read_instances(path)
        self._due = float("-inf")

    def refresh(self, now: float) -> None:
        """Read the file again if it has changed, and register every listed instance."""
        if now < self._due:
            return
        self._due = now + min(_BEAT_S, self._registry.expire_after_s / 3)
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read_again(now)
        for registration in self._instances:
            self._keep(registration, now)

    def _keep(self, listed: Registration, now: float) -> None:
        """What an instance registers itself takes precedence over the list."""
        known = self._registry.find(listed.http_address, listed.type, now, listed.dp_rank or 0)
        outcome = self._registry.register(listed if known is None else known.registration, now, is_listed=True)
        if isinstance(outcome, RegistrationRefused) and outcome.is_new:
            name = f"{listed.type.word} instance {listed.http_address}"
            _logger.warning("discovery: %s of %s refused: %s", name, self._path, outcome.reason)

    def _read_again(self, now: float) -> None:
        try:
            instances = read_instances(self._path)
        except ConfigError as error:
            _logger.error("discovery: %s; the instances stay as they were", error)
            return
        for gone in set(self._instances) - set(instances):
            self._registry.register(msgspec.structs.replace(gone, bye=True), now)
        self._instances = instances


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

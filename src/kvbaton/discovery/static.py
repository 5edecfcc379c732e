"""Instances that do not register by themselves: a JSON list of registrations in a file, which speaks for them.

The file is read again when it changes. Whoever is on the list is kept alive; whoever was taken off it leaves. A file that
cannot be read changes nothing, and is complained about once.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.discovery.messages import Malformed, Registration, read_registration
from kvbaton.discovery.registry import Registry
from kvbaton.errors import ConfigError

__all__ = ["StaticInstances", "read_instances"]

_logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 4 * 1024 * 1024
_BEAT_S = 1.0


def read_instances(path: Path) -> tuple[Registration, ...]:
    """The instances of a file. Raises ConfigError, which names the entry and the field."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ConfigError(f"instances_file {path} is larger than {_MAX_FILE_BYTES} bytes")
        entries = msgspec.json.decode(content, type=list[dict[str, Any]])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"instances_file {path} is no JSON list of instances: {error}") from error
    found = []
    for number, entry in enumerate(entries):
        registration = read_registration(entry)
        if isinstance(registration, Malformed):
            raise ConfigError(f"instances_file {path}: entry {number}: {registration}")
        found.append(registration)
    return tuple(found)


class StaticInstances:
    """Keeps the instances of `path` in `registry`; call `refresh` more often than the registry forgets."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self._path = path
        self._registry = registry
        self._instances = read_instances(path)
        self._stamp = _stamp(path)
        self._due = float("-inf")

    def refresh(self, now: float) -> None:
        """Read the file again if it has changed, and speak for whoever is on the list."""
        if now < self._due:
            return
        self._due = now + _BEAT_S
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read_again(now)
        for registration in self._instances:
            self._registry.register(registration, now)

    def _read_again(self, now: float) -> None:
        try:
            instances = read_instances(self._path)
        except ConfigError as error:
            _logger.error("discovery: %s; the instances stay as they were", error)
            return
        for gone in set(self._instances) - set(instances):
            self._registry.register(msgspec.structs.replace(gone, bye=True), now)
        self._instances = instances


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size

"""Opens the transport that users call by a name, and the ones that `auto` offers; the table has which there are."""

from __future__ import annotations

import dataclasses
import logging
import os

from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.transport.automatic import AutoTransport
from kvbaton.transport.base import Region, Transport, TransportSettings
from kvbaton.transport.neighbour import files_left
from kvbaton.transport.table import (
    AUTO,
    LateWrites,
    TransportEntry,
    library_settings,
    load,
    nearest,
    transport_entries,
    transport_entry,
)

__all__ = ["LIBRARY_SETTINGS_VARIABLE", "check_writes", "open_auto", "open_entry", "open_transport", "with_library_settings"]

LIBRARY_SETTINGS_VARIABLE = "KVBATON_TRANSPORT_SETTINGS"
"""Settings that single transports have, as `mooncake_protocol=rdma;mori_queue_pairs=4`."""

_log = logging.getLogger("kvbaton.transport")

_FILES_TO_OPEN = 48


def check_writes(name: str, unfenced_writes: bool) -> None:
    """Raise ConfigError for an unknown name, and when writes are requested of a transport that cannot write unfenced."""
    entry = transport_entry(name)
    if unfenced_writes and LateWrites.UNFENCED not in entry.promises.values():
        why = "may choose one that only reads" if name == AUTO else "only reads: the owner of the target memory copies"
        writers = sorted(each.name for each in transport_entries() if LateWrites.UNFENCED in each.promises.values())
        raise ConfigError(f"unfenced_writes is on, and transport {name} {why}; leave it out, or choose {', '.join(writers)}")


def open_transport(name: str, region: Region, settings: TransportSettings) -> Transport:
    """Open the transport that users call `name` over this rank's region. Raises ConfigError for an unknown name."""
    check_writes(name, settings.unfenced_writes)
    return open_entry(transport_entry(name), region, settings)


def open_entry(entry: TransportEntry, region: Region, settings: TransportSettings) -> Transport:
    """Open a transport by its entry, with what KVBATON_TRANSPORT_SETTINGS adds to `settings`. Raises KVBatonError.

    It is refused where this process may hardly open a file any more: a transport that runs out of descriptors half-way would
    leave threads and sockets behind.
    """
    settings = with_library_settings(settings, os.environ.get(LIBRARY_SETTINGS_VARIABLE, ""))
    left, limit = files_left()
    if left < _FILES_TO_OPEN:
        raise ConfigError(
            f"transport {entry.name} needs up to {_FILES_TO_OPEN} file descriptors to open, and {left} of {limit} are left; "
            "raise `ulimit -n`"
        )
    if region.kind not in entry.memory:
        others = [each.name for each in _offered(region)]
        raise ConfigError(
            f"transport {entry.name} moves {' and '.join(sorted(entry.memory))}, and the region is {region.kind}; "
            f"choose transport {' or '.join(others)}"
        )
    opened: Transport = load(entry.opener)(region, settings)
    return opened


def open_auto(region: Region, settings: TransportSettings) -> Transport:
    """Open all that `auto` offers for this kind of memory, fastest first. Raises ConfigError where none can be opened."""
    inner: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    not_offered: dict[str, str] = {}
    order: list[str] = []
    for entry in _offered(region):
        if entry.auto and entry.auto.unless and (why := load(entry.auto.unless)()):
            not_offered[entry.name] = why
            continue
        order.append(entry.name)
        try:
            inner[entry.name] = load(entry.opener)(region, settings)
        except KVBatonError as error:
            left_out[entry.name] = str(error)
    if not inner:
        raise ConfigError(f"transport auto finds nothing that works here: {left_out}; run kvbaton doctor")
    for name, why in left_out.items():
        _log.warning("transport auto does without %s: %s", name, why)
    return AutoTransport(region, settings, inner, left_out | not_offered, order)


def _offered(region: Region) -> list[TransportEntry]:
    """What `auto` offers for this kind of memory, fastest first, whether or not it can be opened here."""
    ranked = [(entry.auto.rank, entry) for entry in transport_entries() if entry.auto and region.kind in entry.memory]
    return [entry for _, entry in sorted(ranked, key=lambda each: each[0])]


def with_library_settings(settings: TransportSettings, text: str) -> TransportSettings:
    """`settings` with what `text` sets; see `LIBRARY_SETTINGS_VARIABLE`. Raises ConfigError, which names the setting."""
    found: dict[str, str | int] = {}
    known = library_settings() if text else {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, value = part.partition("=")
        if name not in known:
            near = nearest(name, list(known))
            raise ConfigError(f"{LIBRARY_SETTINGS_VARIABLE}: unknown setting {name!r}; did you mean {near}?")
        found[name] = known[name].parsed(value)
    return dataclasses.replace(settings, library={**settings.library, **found}) if found else settings

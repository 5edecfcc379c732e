"""Settings of the libraries under transports, which come from one variable: `mooncake_protocol=rdma;mori_queue_pairs=4`."""

from __future__ import annotations

import dataclasses
import difflib

from kvbaton.errors import ConfigError
from kvbaton.transport.base import TransportSettings

__all__ = ["LIBRARY_SETTINGS", "LIBRARY_SETTINGS_VARIABLE", "with_library_settings"]

LIBRARY_SETTINGS_VARIABLE = "KVBATON_TRANSPORT_SETTINGS"

LIBRARY_SETTINGS: dict[str, type[int] | type[str]] = {
    field.name: int if isinstance(field.default, int) else str
    for field in dataclasses.fields(TransportSettings)
    if field.name.startswith(("nixl_", "mooncake_", "mori_"))
}
"""What can be set, and of which type it is."""


def with_library_settings(settings: TransportSettings, text: str) -> TransportSettings:
    """`settings`, changed as `text` says. Raises ConfigError, which names the setting, for what is not known or no number."""
    found: dict[str, str | int] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, value = part.partition("=")
        if name not in LIBRARY_SETTINGS:
            near = difflib.get_close_matches(name, LIBRARY_SETTINGS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{LIBRARY_SETTINGS_VARIABLE}: unknown setting {name!r}; did you mean {near}?")
        try:
            found[name] = LIBRARY_SETTINGS[name](value)
        except ValueError as error:
            raise ConfigError(f"{LIBRARY_SETTINGS_VARIABLE}: {name} is {value!r}; it must be a whole number") from error
    return dataclasses.replace(settings, **found)  # type: ignore[arg-type]

"""Every engine by its name: those of this package, and those that other packages register as entry points.

Another package adds an engine with an entry point in the group `kvbaton.engines`: its name is the engine's, its object a
subclass of `kvbaton.engines.base.EnginePlugin`. An engine is imported when it is asked for, not before: listing engines is
quick, and one that cannot be imported costs nothing until it is chosen.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING

from kvbaton.config import nearest_known
from kvbaton.errors import ConfigError

if TYPE_CHECKING:
    from kvbaton.engines.base import EnginePlugin

__all__ = ["DEFAULT_ENGINE", "GROUP", "OWN_ENGINES", "engine_names", "engine_with_connector", "find_engine", "known_engine"]

GROUP = "kvbaton.engines"
"""The group of entry points."""

OWN_ENGINES = {
    "embedded": "kvbaton.engines.embedded.plugin:EmbeddedPlugin",
    "vllm": "kvbaton.engines.vllm.setup.plugin:VllmPlugin",
    "sglang": "kvbaton.engines.sglang.setup.plugin:SglangPlugin",
}
"""The engines of this package, and where their plugins are."""

DEFAULT_ENGINE = "embedded"


def engine_names() -> tuple[str, ...]:
    """All engines, those of this package first."""
    return tuple(dict.fromkeys((*OWN_ENGINES, *sorted(point.name for point in metadata.entry_points(group=GROUP)))))


def known_engine(name: str, option: str = "--engine") -> str:
    """`name`. Raises ConfigError, naming `option` and the nearest known name, when no engine has it; imports none."""
    names = engine_names()
    if name not in names:
        raise ConfigError(f"{option} is {name!r}, which is no engine; {nearest_known(name, names)}")
    return name


def find_engine(name: str, option: str = "--engine") -> EnginePlugin:
    """The engine of this name. Raises ConfigError, naming `option`, for one that is not known or cannot be imported."""
    try:
        plugin = _load(known_engine(name, option))()
    except ImportError as error:
        raise ConfigError(f"{option} is {name!r}, which cannot be imported: {error}; install what it needs") from error
    if plugin.name != name:
        raise ConfigError(f"{option} is {name!r}, and the engine registered for it calls itself {plugin.name!r}; rename one")
    return plugin


def engine_with_connector(connector: str, option: str) -> EnginePlugin:
    """The first engine that has this connector beside ours. Raises ConfigError, naming `option`, when none has."""
    plugins = [find_engine(name) for name in engine_names()]
    for plugin in plugins:
        if connector in plugin.support.connectors[1:]:
            return plugin
    known = sorted({each for plugin in plugins for each in plugin.support.connectors[1:]})
    raise ConfigError(f"{option} is {connector!r}, which no engine has; known are {', '.join(known)}")


def _load(name: str) -> type[EnginePlugin]:
    if name in OWN_ENGINES:
        module, _, attribute = OWN_ENGINES[name].partition(":")
        plugin: type[EnginePlugin] = getattr(importlib.import_module(module), attribute)
        return plugin
    (point, *_) = metadata.entry_points(group=GROUP, name=name)
    loaded: type[EnginePlugin] = point.load()
    return loaded

"""Makes `kvbaton.compat.mori` importable as `mori`, where no real one is installed.

The finder is asked last, so a real `mori` wins. A directory that happens to be called `mori` on the path (the working directory
is on it) would win too, as a namespace package; a namespace has no code, so it is no MoRI, and the finder goes before the path
then.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from types import ModuleType

__all__ = ["MARK", "activate", "install"]

MARK = "__kvbaton__"
"""An attribute that the modules of this drop-in have, and MoRI's do not."""

_SWITCH = "KVBATON_MORI"
_PARTS = ("io", "cpp", "ops")
_SOURCE = "kvbaton.compat.mori"
_VERSION = "1.2.2+kvbaton"


class _Loader(importlib.abc.Loader):
    """Fills a module with the public names of one of ours."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:  # noqa: ARG002 - the default
        return None

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, MARK, True)
        _, _, part = module.__name__.partition(".")
        if not part:
            module.__dict__.update(__version__=_VERSION, __doc__="MoRI-IO's interface on kvbaton's transports.")
            module.__dict__["__getattr__"] = _lazy_part
            return
        source = importlib.import_module(f"{_SOURCE}.{part}")
        names = {name: value for name, value in vars(source).items() if not name.startswith("_")}
        module.__dict__.update(names, __all__=list(source.__all__), __doc__=source.__doc__)


def _lazy_part(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"mori.{name}")
    raise AttributeError(f"this mori is kvbaton's, and has {', '.join(_PARTS)} only, not {name!r}")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `mori` and its parts."""

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        head, part = fullname.split(".")[0], fullname.partition(".")[2]
        if head != "mori" or (part and part not in _PARTS):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), origin="kvbaton", is_package=not part)


def install() -> bool:
    """Make this drop-in importable as `mori`, unless a real one is installed; returns whether it is. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    loaded = sys.modules.get("mori")
    if loaded is not None and getattr(loaded, "__file__", None):
        return False
    spec = None if loaded is not None else importlib.util.find_spec("mori")
    if spec is not None and spec.origin is not None and spec.loader is not None:
        return False
    if loaded is not None:
        del sys.modules["mori"]  # a namespace that was imported: it has no code
    is_namespace = loaded is not None or spec is not None
    # Before the path only where the path would answer with an empty namespace.
    sys.meta_path.insert(0 if is_namespace else len(sys.meta_path), _Finder())
    return True


def activate() -> None:
    """The entry point that engines call in every process: installs when `KVBATON_MORI` is set, and does nothing otherwise."""
    if os.environ.get(_SWITCH, "").strip().lower() in ("", "0", "off", "no", "false"):
        return
    if not install():
        logging.getLogger("kvbaton.mori").warning(
            "%s is set, but a real mori is installed; it is used. Uninstall it to run on kvbaton's transports", _SWITCH
        )

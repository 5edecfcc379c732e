"""What SGLang's package lacks on CPUs, replaced before it is imported: for its servers on this machine, and for tests.

No build of SGLang for CPUs is on PyPI. The package itself runs on CPUs once three things exist: the names of `sgl_kernel` (only
imported, never called on the paths in use), two operators that torchvision's build for GPUs registers fakes for, and on ARM two
operators that SGLang calls when it starts its ranks.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

__all__ = ["define_rank_operators", "is_cpu", "replace_missing"]

_kept: list[Any] = []
"""Libraries of torch: their operators are gone when they are collected."""


def replace_missing() -> None:
    """Have later imports find replacements. Called once, when the interpreter starts."""
    sys.meta_path.insert(0, _CpuFinder())


def is_cpu() -> bool:
    """Whether SGLang was started for CPUs."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def define_rank_operators() -> None:
    """Define what SGLang calls on ARM when a rank starts; `LOCAL_SIZE` 0 keeps collectives on gloo, away from its kernels."""
    import torch

    if hasattr(torch.ops.sgl_kernel, "initialize"):
        return
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("init_cpu_threads_env(str cpus) -> ()")
    library.define("initialize(int size, int rank) -> ()")
    library.impl("init_cpu_threads_env", _accept_threads, "CompositeExplicitAutograd")
    library.impl("initialize", _use_gloo, "CompositeExplicitAutograd")
    _kept.append(library)


def _accept_threads(cpus: str) -> None:
    del cpus


def _use_gloo(size: int, rank: int) -> None:
    del size, rank
    os.environ["LOCAL_SIZE"] = "0"


class _CpuFinder(importlib.abc.MetaPathFinder):
    """Defines torchvision's operators when it is first imported, and makes `sgl_kernel` a module of names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define_vision_operators()
            sys.meta_path.insert(0, self)
        if name == "sgl_kernel":
            # Not its submodules: where SGLang imports one of those, it has a fallback for a missing one.
            return importlib.machinery.ModuleSpec(name, _NamesLoader(), is_package=True)
        return None


class _NamesLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


class _Names(types.ModuleType):
    """Every name exists; one that is called raises an error that names it."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"

        def missing(*args: object, **kwargs: object) -> None:
            del args, kwargs
            raise NotImplementedError(f"{full_name} has no build for CPUs; choose flags that do not need it")

        return missing


def _define_vision_operators() -> None:
    if _kept:
        return
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)

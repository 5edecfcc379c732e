"""Makes a vLLM server fork its processes, where vLLM for CPUs spawns them: each would import vLLM again, most of a start.

vLLM forks them by itself on other platforms, and takes care that a worker keeps no pipe of another one open.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

_get_context = multiprocessing.get_context


def _forking(method: str | None = None) -> BaseContext:
    return _get_context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking  # type: ignore[assignment]

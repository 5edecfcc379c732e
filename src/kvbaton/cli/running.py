"""What the commands that run servers share: logging for people, an event loop, and an orderly end on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop

__all__ = ["end_like_ctrl_c", "raise_open_files", "run_server", "set_up_logging", "settle_memory"]


def set_up_logging(verbose: bool = False) -> None:
    """Log to standard error, one line per event."""
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")


def end_like_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP end this command as Ctrl-C does: what it has started is stopped, and its files are removed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def raise_open_files(wanted: int = 65536) -> None:
    """Let this process open as many files as the system allows it, up to `wanted`: every stream needs three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def settle_memory() -> None:
    """Leave what was loaded so far out of garbage collection: it stays, and looking at it again and again costs time."""
    gc.collect()
    gc.freeze()


def run_server(server: Coroutine[Any, Any, None]) -> int:
    """Run until the server ends by itself, or until SIGINT or SIGTERM asks it to; returns the exit code."""
    return uvloop.run(_until_signal(server))


async def _until_signal(server: Coroutine[Any, Any, None]) -> int:
    task = asyncio.ensure_future(server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 0

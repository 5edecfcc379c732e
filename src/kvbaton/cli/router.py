"""`kvbaton router`: the router alone."""

from __future__ import annotations

import logging
from typing import Literal

__all__ = ["router"]


def router(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    discovery_host: str | None = None,
    discovery_port: int = 8001,
    transfer_mode: Literal["READ", "WRITE", "auto"] = "auto",
    expire_after_s: float = 5.0,
    verbose: bool = False,
) -> int:
    """Route OpenAI-style requests to prefill and decode instances that register here, and serve the chat page at `/`.

    Parameters
    ----------
    host
        where to listen.
    port
        port of the OpenAI-compatible API and the page.
    discovery_host
        where to listen for registrations; the same as `host` when not given.
    discovery_port
        port on which instances register.
    transfer_mode
        `READ` takes pull instances only, `WRITE` push instances only; `auto` takes both, and pairs those of the same mode.
    expire_after_s
        an instance that was silent for so long is no longer used.
    verbose
        log more.
    """
    from kvbaton.cli.running import run_server, set_up_logging
    from kvbaton.config import is_loopback
    from kvbaton.discovery.messages import TransferMode
    from kvbaton.router.app import serve_router
    from kvbaton.router.settings import RouterSettings

    set_up_logging(verbose)
    settings = RouterSettings(
        host=host,
        port=port,
        discovery_host=discovery_host or host,
        discovery_port=discovery_port,
        transfer_mode=None if transfer_mode == "auto" else TransferMode(transfer_mode),
        expire_after_s=expire_after_s,
    )
    log = logging.getLogger("kvbaton")
    if not is_loopback(settings.discovery_host):
        log.warning(
            "anybody who reaches port %d on %s can register an instance and receive prompts",
            discovery_port,
            settings.discovery_host,
        )
    return run_server(serve_router(settings, lambda: log.info("router on http://%s:%d", host, port)))

"""`kvbaton router`: the router alone."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvbaton.router.settings import RouterOptions

__all__ = ["router"]

_DEFAULT_OPTIONS = RouterOptions()
_API_KEY_VARIABLE = "KVBATON_API_KEY"
_INSTANCE_KEY_VARIABLE = "KVBATON_INSTANCE_API_KEY"


def router(
    *,
    options: Annotated[RouterOptions, Parameter(name="*")] = _DEFAULT_OPTIONS,
    discovery_host: str | None = None,
    transfer_mode: Literal["READ", "WRITE", "auto", "first"] = "auto",
    p2p_mode: Literal["READ", "WRITE"] | None = None,
    cluster_key_file: Path | None = None,
    tls_dir: Path | None = None,
    forward_header: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    allow_host: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    verbose: bool = False,
) -> int:
    """Route OpenAI-style requests to prefill and decode instances that register here, and serve the chat page at `/`.

    With KVBATON_API_KEY set (several keys are separated by commas), clients must send one of these keys as a bearer token.
    KVBATON_INSTANCE_API_KEY is sent to the instances.

    Parameters
    ----------
    discovery_host
        where to listen for registrations; the same as `host` when not given.
    transfer_mode
        `READ` takes pull instances only, `WRITE` push instances only; `auto` takes both, and pairs those of the same mode;
        with `first`, the first instance decides for all.
    p2p_mode
        also take instances of vLLM's P2pNcclConnector, whose registrations state no mode: this one.
    cluster_key_file
        file that holds the key all instances share; the variable KVBATON_CLUSTER_KEY may hold it instead. Only kvbaton's
        instances with this key are admitted; without a key, all are.
    tls_dir
        directory with the certificates of `kvbaton keys`, which the variable KVBATON_TLS_DIR may name instead: registrations
        and calls to instances are encrypted, and both ends show a certificate. Clients are served HTTP as before.
    forward_header
        header of clients that instances see; may be repeated. By default Authorization (unless the router has keys of its
        own), traceparent, tracestate and X-Session-Id.
    allow_host
        host name under which browsers may open the page and call the API; may be repeated. `localhost` and IP addresses
        always may, other names never do by default: a web site could point its own name at this router.
    verbose
        log more.
    """
    from kvbaton.cli.running import raise_open_files, run_server, set_up_logging, settle_memory
    from kvbaton.config import CLUSTER_KEY_VARIABLE, is_loopback, parse_trust
    from kvbaton.core.addresses import in_url
    from kvbaton.discovery.messages import TransferMode
    from kvbaton.router.app import serve_router
    from kvbaton.router.processes import run_processes
    from kvbaton.router.settings import DEFAULT_FORWARD_HEADERS, RouterSettings

    set_up_logging(verbose)
    trust = parse_trust(cluster_key_file, os.environ, tls_dir=tls_dir)
    settings = RouterSettings(
        discovery_host=discovery_host or options.host,
        transfer_mode=None if transfer_mode in ("auto", "first") else TransferMode(transfer_mode),
        first_fixes_mode=transfer_mode == "first",
        p2p_mode=None if p2p_mode is None else TransferMode(p2p_mode),
        api_keys=_api_keys(os.environ.get(_API_KEY_VARIABLE, "")),
        instance_api_key=os.environ.get(_INSTANCE_KEY_VARIABLE) or None,
        cluster_key=trust.key,
        tls_dir=trust.tls_dir,
        allow_hosts=allow_host,
        forward_headers=DEFAULT_FORWARD_HEADERS if forward_header is None else forward_header,
        **asdict(options),
    )
    log = logging.getLogger("kvbaton")
    if settings.cluster_key is None:
        log.warning(
            "NO CLUSTER KEY: every process%s that reaches port %d on %s can register an instance, receive prompts and forge"
            " answers; set a key with --cluster-key-file or %s",
            " and every user of this machine" if is_loopback(settings.discovery_host) else "",
            settings.discovery_port,
            settings.discovery_host,
            CLUSTER_KEY_VARIABLE,
        )
    raise_open_files()
    settle_memory()
    where = f"router on http://{in_url(settings.host)}:{settings.port}"
    if settings.processes > 1:
        return run_processes(settings, lambda: log.info("%s, %d processes", where, settings.processes))
    return run_server(serve_router(settings, lambda: log.info("%s", where)))


def _api_keys(value: str) -> tuple[str, ...]:
    """The keys of a list. A list without any key is an error: it must not turn the check off."""
    from kvbaton.errors import ConfigError

    keys = tuple(filter(None, value.split(",")))
    if value and not keys:
        raise ConfigError(
            f"{_API_KEY_VARIABLE} is {value!r}, which holds no key; put one in, or unset it to admit every client"
        )
    return keys

"""`kvbaton router`: the router alone."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

__all__ = ["ChoiceOptions", "TimeoutOptions", "router"]

_API_KEY_VARIABLE = "KVBATON_API_KEY"
_INSTANCE_KEY_VARIABLE = "KVBATON_INSTANCE_API_KEY"


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """How instances are chosen; the same names and defaults as `kvbaton.router.settings.RouterSettings`.

    Parameters
    ----------
    prefill_policy
        how the prefill instance is chosen: in turn, the one with the fewest requests, or the one that has seen the prompt's
        beginning (or the client's `X-Session-Id`) before.
    decode_policy
        how the decode instance is chosen.
    max_per_prefill
        most sequences (prompts times n) at one prefill instance at once; 0 is no limit. More wait.
    max_per_decode
        most sequences at one decode instance at once; 0 is no limit. More wait.
    max_per_client
        most sequences of one client (an API key, else an address) at instances at once, for each live decode instance; 0 is
        no limit. More wait, and other clients go first.
    queue_limit
        most sequences that wait; those beyond are answered 429.
    local_prefill_chars
        prompts with fewer characters are prefilled by the decode instance itself; 0 never.
    local_prefill_when_busy
        when every prefill instance has as many requests as it takes, decode instances prefill by themselves.
    max_attempts
        how often a request is tried before its first byte, each time with another instance in place of the one that failed.
    """

    prefill_policy: Literal["round_robin", "least_loaded", "prefix_affinity"] = "least_loaded"
    decode_policy: Literal["round_robin", "least_loaded", "prefix_affinity"] = "least_loaded"
    max_per_prefill: int = 0
    max_per_decode: int = 0
    max_per_client: int = 2048
    queue_limit: int = 16384
    local_prefill_chars: int = 0
    local_prefill_when_busy: bool = False
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class TimeoutOptions:
    """How long the router waits for what, in seconds.

    Parameters
    ----------
    expire_after_s
        an instance that was silent for so long is no longer used.
    queue_timeout_s
        a request that waited so long for a free instance is answered 503.
    prefill_timeout_s
        a prefill instance must have answered within this time.
    decode_timeout_s
        a decode instance must send something at least this often.
    client_timeout_s
        a client must send its body, and read what is written to it, at least this fast.
    drain_timeout_s
        requests in flight have so long to end when the router is asked to stop.
    """

    expire_after_s: float = 5.0
    queue_timeout_s: float = 30.0
    prefill_timeout_s: float = 600.0
    decode_timeout_s: float = 600.0
    client_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0


def router(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    discovery_host: str | None = None,
    discovery_port: int = 8001,
    transfer_mode: Literal["READ", "WRITE", "auto"] = "auto",
    instances_file: Path | None = None,
    processes: int = 1,
    cluster_key_file: Path | None = None,
    forward_header: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    allow_host: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    show_details: bool | None = None,
    choice: Annotated[ChoiceOptions, Parameter(name="*")] = ChoiceOptions(),  # noqa: B008
    timeouts: Annotated[TimeoutOptions, Parameter(name="*")] = TimeoutOptions(),  # noqa: B008
    verbose: bool = False,
) -> int:
    """Route OpenAI-style requests to prefill and decode instances that register here, and serve the chat page at `/`.

    With KVBATON_API_KEY set (several keys are separated by commas), clients must send one of these keys as a bearer token.
    KVBATON_INSTANCE_API_KEY is sent to the instances.

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
    instances_file
        JSON list of instances that do not register by themselves; read again when it changes.
    processes
        how many processes serve the port together.
    cluster_key_file
        file that holds the key all instances share; the variable KVBATON_CLUSTER_KEY may hold it instead. Only kvbaton's
        instances with this key are admitted; without a key, all are.
    forward_header
        header of clients that instances see; may be repeated. By default Authorization (unless the router has keys of its
        own), traceparent, tracestate and X-Session-Id.
    allow_host
        host name under which browsers may open the page and call the API; may be repeated. `localhost` and IP addresses
        always may, other names never do by default: a web site could point its own name at this router.
    show_details
        show clients which instances served them, how many prompt tokens were cached, timelines, /instances and /handoffs. By
        default only without API keys: with keys, one client could learn what another has sent.
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
    settings = RouterSettings(
        host=host,
        port=port,
        discovery_host=discovery_host or host,
        discovery_port=discovery_port,
        transfer_mode=None if transfer_mode == "auto" else TransferMode(transfer_mode),
        instances_file=instances_file,
        processes=processes,
        api_keys=_api_keys(os.environ.get(_API_KEY_VARIABLE, "")),
        instance_api_key=os.environ.get(_INSTANCE_KEY_VARIABLE) or None,
        cluster_key=parse_trust(cluster_key_file, os.environ).key,
        allow_hosts=allow_host,
        show_details=show_details,
        forward_headers=DEFAULT_FORWARD_HEADERS if forward_header is None else forward_header,
        **asdict(choice),
        **asdict(timeouts),
    )
    log = logging.getLogger("kvbaton")
    if settings.cluster_key is None:
        log.warning(
            "NO CLUSTER KEY: every process%s that reaches port %d on %s can register an instance, receive prompts and forge"
            " answers; set a key with --cluster-key-file or %s",
            " and every user of this machine" if is_loopback(settings.discovery_host) else "",
            discovery_port,
            settings.discovery_host,
            CLUSTER_KEY_VARIABLE,
        )
    raise_open_files()
    settle_memory()
    if processes > 1:
        return run_processes(settings, lambda: log.info("router on http://%s:%d, %d processes", in_url(host), port, processes))
    return run_server(serve_router(settings, lambda: log.info("router on http://%s:%d", in_url(host), port)))


def _api_keys(value: str) -> tuple[str, ...]:
    """The keys of a list. A list without any key is an error: it must not turn the check off."""
    from kvbaton.errors import ConfigError

    keys = tuple(filter(None, value.split(",")))
    if value and not keys:
        raise ConfigError(
            f"{_API_KEY_VARIABLE} is {value!r}, which holds no key; put one in, or unset it to admit every client"
        )
    return keys

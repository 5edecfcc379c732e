"""The router's settings, checked once when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvbaton.config import CLIENT_HEADER, HTTP_KEY_HEADER, NO_KEY_FOR_METRICS
from kvbaton.core.auth import ClusterKey
from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import ConfigError
from kvbaton.router.http.messages import is_header_value

__all__ = ["DEFAULT_FORWARD_HEADERS", "PolicyName", "RouterOptions", "RouterSettings"]

PolicyName = Literal["round_robin", "least_loaded", "prefix_affinity"]
"""How instances of one side are chosen; the same names as in `kvbaton.router.policy`."""

DEFAULT_FORWARD_HEADERS = ("authorization", "traceparent", "tracestate", "x-session-id")
"""The headers of clients that instances see by default."""

_NEVER_FORWARDED = {
    "x-request-id", "x-data-parallel-rank", "host", "content-length", "content-type", "transfer-encoding", "connection",
    "upgrade", "expect", "te", "trailer", "accept-encoding", HTTP_KEY_HEADER,
    CLIENT_HEADER,
}  # fmt: skip
_OPTIONAL_COUNTS = ("max_per_prefill", "max_per_decode", "max_per_client", "queue_limit", "local_prefill_chars")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Where the router listens, how it chooses and how long it waits. The command line reads its options off this class.

    Parameters
    ----------
    host
        where to listen.
    port
        port of the OpenAI-compatible API and the page.
    discovery_port
        port on which instances register.
    instances_file
        JSON list of instances that do not register by themselves; read again when it changes.
    processes
        how many processes serve the port together.
    show_details
        show clients which instances served them, how many prompt tokens were cached, timelines, /instances and /handoffs. By
        default only without API keys: with keys, one client could learn what another has sent.
    keyed_metrics
        /metrics only for holders of the cluster key: its token in the header x-kvbaton-key, or as a bearer token.
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

    host: str = "127.0.0.1"
    port: int = 8000
    discovery_port: int = 8001
    instances_file: Path | None = None
    processes: int = 1
    show_details: bool | None = None
    keyed_metrics: bool = False
    prefill_policy: PolicyName = "least_loaded"
    decode_policy: PolicyName = "least_loaded"
    max_per_prefill: int = 0
    max_per_decode: int = 0
    max_per_client: int = 2048
    queue_limit: int = 16384
    local_prefill_chars: int = 0
    local_prefill_when_busy: bool = False
    max_attempts: int = 3
    expire_after_s: float = 5.0
    queue_timeout_s: float = 30.0
    prefill_timeout_s: float = 600.0
    decode_timeout_s: float = 600.0
    client_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RouterSettings(RouterOptions):
    """Where the router listens, what it takes and how it chooses and waits. Raises ConfigError for a value that cannot work.

    transfer_mode:          instances of the other mode are refused; None takes both, and pairs instances of the same mode
    first_fixes_mode:       the first instance that is admitted fixes `transfer_mode`, if that is None
    p2p_mode:               the mode of instances that register as P2pNcclConnector does, without one; None skips them
    max_sequences:          requests of more sequences are answered 400
    api_keys:               clients must send one of these as a bearer token; without any, every client is admitted
    allow_hosts:            names under which browsers may open the page and call the API, besides loopback and IP addresses
    instance_api_key:       sent to instances as a bearer token
    forward_headers:        headers of clients that instances see; Authorization only goes along without `api_keys`
    tls_dir:                certificates: registrations and calls to instances are encrypted; None for neither
    cluster_key:            only registrations that a holder of this key has sealed are taken; None takes all
    connect_timeout_s:      a connection to an instance must stand within this time
    head_timeout_s:         a client must send the head of a request within this time
    keep_alive_s:           a connection without a request is closed after this time
    explain_timeout_s:      an instance must send its record of a hand-off within this time
    max_in_flight:          sequences beyond this many at once are answered 503, unless their client has none
    max_connections:        connections beyond this many are closed
    max_head_bytes:         longer heads are answered 431
    max_body_bytes:         larger requests are answered 413
    max_held_bytes:         bodies of all clients together in one process; large ones beyond it are answered 429
    max_json_depth:         bodies that are nested more deeply are answered 400
    max_json_keys:          bodies with more keys, or more arrays and objects, are answered 400
    max_answer_bytes:       an instance's answer that is not streamed must be smaller than this
    """

    discovery_host: str = "127.0.0.1"
    transfer_mode: TransferMode | None = None
    first_fixes_mode: bool = False
    p2p_mode: TransferMode | None = None
    max_sequences: int = 4096
    allow_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    instance_api_key: str | None = field(default=None, repr=False)
    cluster_key: ClusterKey | None = field(default=None, repr=False)
    tls_dir: Path | None = None
    forward_headers: tuple[str, ...] = DEFAULT_FORWARD_HEADERS
    connect_timeout_s: float = 5.0
    head_timeout_s: float = 15.0
    keep_alive_s: float = 75.0
    explain_timeout_s: float = 5.0
    max_in_flight: int = 32768
    max_connections: int = 16384
    max_head_bytes: int = 64 * 1024
    max_body_bytes: int = 32 * 1024 * 1024
    max_held_bytes: int = 512 * 1024 * 1024
    max_json_depth: int = 128
    max_json_keys: int = 32768
    max_answer_bytes: int = 64 * 1024 * 1024

    @property
    def shows_details(self) -> bool:
        """Whether clients see what could show one client the requests of another."""
        return not self.api_keys if self.show_details is None else self.show_details

    def __post_init__(self) -> None:
        if self.keyed_metrics and self.cluster_key is None:
            raise ConfigError(NO_KEY_FOR_METRICS)
        for name in ("port", "discovery_port"):
            value = getattr(self, name)
            if not 0 < value < 65536:
                raise ConfigError(f"{name} is {value}; it must be between 1 and 65535")
        if self.port == self.discovery_port and self.host == self.discovery_host:
            raise ConfigError(f"port and discovery_port are both {self.port}; give each its own")
        for name in (name for name in self.__dataclass_fields__ if name.endswith("_s")):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} is {value}; it must be a positive, finite number of seconds")
        for name in (name for name, declared in self.__dataclass_fields__.items() if declared.type == "int"):
            value, least = getattr(self, name), 0 if name in _OPTIONAL_COUNTS else 1
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        self._check_choices()

    def _check_choices(self) -> None:
        known = get_args(PolicyName)
        for name in ("prefill_policy", "decode_policy"):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        for header in self.forward_headers:
            if header.lower() in _NEVER_FORWARDED or not is_header_value(header) or ":" in header or " " in header:
                raise ConfigError(f"forward_headers has {header!r}, which cannot be forwarded")
        for key in (*self.api_keys, *filter(None, (self.instance_api_key,))):
            if not key or not is_header_value(key) or " " in key:
                raise ConfigError("an API key is empty, or holds spaces or characters that cannot stand in a header")

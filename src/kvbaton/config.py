"""Settings that several packages share, parsed once into frozen values and checked together."""

from __future__ import annotations

import difflib
import enum
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.core.addresses import is_host
from kvbaton.core.auth import MIN_KEY_BYTES, ClusterKey, keys_of
from kvbaton.core.handoff import AuxChannel, Confirmation, Integrity, Mode
from kvbaton.errors import ConfigError

__all__ = [
    "BUSY_POLL_S",
    "CLIENT_HEADER",
    "CLUSTER_KEY_VARIABLE",
    "DEFAULT_HANDOFF",
    "HTTP_KEY_HEADER",
    "KEYED_METRICS",
    "NO_KEY_FOR_METRICS",
    "AllowList",
    "HandoffSettings",
    "HttpTokens",
    "KeyFile",
    "LONGEST_BUSY_POLL_S",
    "Limits",
    "TLS_DIR_VARIABLE",
    "OnFailure",
    "Trust",
    "http_token",
    "is_loopback",
    "nearest_known",
    "parse_limits",
    "parse_trust",
]

log = logging.getLogger(__name__)

CLUSTER_KEY_VARIABLE = "KVBATON_CLUSTER_KEY"
"""The environment variable that may hold the cluster key; never a command line: every user of the host can read it."""

TLS_DIR_VARIABLE = "KVBATON_TLS_DIR"
"""The environment variable that may name the directory with the certificates of the cluster."""

HTTP_KEY_HEADER = "x-kvbaton-key"
"""The HTTP header in which a holder of the cluster key proves it to an instance: its value is `http_token(key)`."""

CLIENT_HEADER = "x-kvbaton-client"
"""The HTTP header in which a router with the cluster key names the client of a request: instances give each its turns."""

KEYED_METRICS = (
    f"metrics are for holders of the cluster key here; send its token in the header {HTTP_KEY_HEADER}, or as a bearer token"
)
"""What a scrape without the token is answered."""

NO_KEY_FOR_METRICS = (
    f"keyed_metrics is set, and there is no cluster key; give one with --cluster-key-file or {CLUSTER_KEY_VARIABLE}"
)
"""Why a start is refused."""

BUSY_POLL_S = 0.001
"""For how long threads that hand over look for news before they sleep, unless another time is set."""

LONGEST_BUSY_POLL_S = 0.1

_MAX_KEY_BYTES = 4096
_MOST_KEYS = 8
_LOOK_S = 1.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an instance waits for what, in seconds. The command line reads its options off this class.

    Parameters
    ----------
    transfer_timeout
        seconds without progress after which a target expires a hand-off.
    defer_timeout
        seconds for which a source keeps finished blocks without a message from their target; more than `transfer_timeout`.
    stop_timeout
        seconds without `stopped` after which a peer is fenced by the next stronger means.
    retry
        seconds after which an unanswered message is sent again.
    queue_timeout
        seconds for which a hand-off may wait in its own side's queue, a source for a sign of its target, or a target for
        memory.
    """

    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    stop_timeout: float = 5.0
    retry: float = 1.0
    queue_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} is {value!r}; it must be a positive, finite number of seconds")
        if self.defer_timeout <= self.transfer_timeout:
            raise ConfigError(
                f"defer_timeout ({self.defer_timeout:g} s) must be longer than transfer_timeout ({self.transfer_timeout:g} s): "
                "a source has to keep its blocks longer than a target waits for them"
            )
        if self.retry >= self.transfer_timeout:
            raise ConfigError(f"retry ({self.retry:g} s) must be shorter than transfer_timeout ({self.transfer_timeout:g} s)")

    @property
    def beat_s(self) -> float:
        """The interval of heartbeats: five may be lost before a target gives up."""
        return self.transfer_timeout / 6

    @property
    def hold_cap(self) -> float:
        """For how long heartbeats alone keep a hand-off alive that gets no further.

        Longer than any side with the same limits queues: the side that has a queue gives up first, and states why.
        """
        return self.queue_timeout + self.defer_timeout


class OnFailure(enum.StrEnum):
    """What a target does with a request whose hand-off failed: fail it with the reason, or compute its prompt here."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """How an instance takes part in hand-offs. The command line reads its options off this class.

    Parameters
    ----------
    mode
        `push`: the cache streams to the target while it is computed; `pull`: the target fetches it when it is complete.
    integrity
        how much of what a target received is checked against the source's checksums before it counts as landed.
    aux_channel
        how the first token travels to a target: in a control message, or over the data transport.
    on_failure
        what becomes of a request whose hand-off failed: it fails, or the decode instance computes its prompt.
    unfenced_writes
        in push, let the prefill instance write into the decode instance's memory, over `nixl`, `mooncake` or `mori`; nothing
        can take that right back from one that hangs. Both instances need the same value; without it the decode instance reads.
    fenced_writes
        the same over `tcp`, where the decode instance's own process stores what comes, and refuses it once it has taken the
        right back. A hand-over then needs no round trip after the last layer. Both instances need the same value.
    confirmation
        how a decode instance that has read a cache learns that it had not changed meanwhile. `stamp`: where both instances are
        on one host it looks into memory of the prefill instance, and asks elsewhere; `message`: it asks always.
    busy_poll_s
        for how many seconds the threads that hand over look for news before they sleep, while at least half of their waits
        are that short; 0: they sleep at once, as they should where processor time is limited or paid for.
    """

    mode: Mode = Mode.PUSH
    integrity: Integrity = Integrity.OFF
    aux_channel: AuxChannel = AuxChannel.CONTROL
    on_failure: OnFailure = OnFailure.FAIL
    unfenced_writes: bool = False
    fenced_writes: bool = False
    confirmation: Confirmation = Confirmation.STAMP
    busy_poll_s: float = BUSY_POLL_S

    def __post_init__(self) -> None:
        if not 0 <= self.busy_poll_s <= LONGEST_BUSY_POLL_S:
            raise ConfigError(
                f"busy_poll_s is {self.busy_poll_s!r}; it must be a number of seconds from 0 (sleep at once) to "
                f"{LONGEST_BUSY_POLL_S:g}"
            )


DEFAULT_HANDOFF = HandoffSettings()
"""The settings of an instance without any."""


def nearest_known(name: str, known: Collection[str]) -> str:
    """How an error about an unknown name ends: with the nearest known one, or with all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def parse_limits(values: Mapping[str, Any]) -> Limits:
    """Read limits from a mapping; an unknown key is refused with the nearest known name, a bad value by its key."""
    known = tuple(Limits.__dataclass_fields__)
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting {key!r}; {nearest_known(key, known)}")
    try:
        return msgspec.convert(dict(values), Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"limits: {error}") from error


@dataclass(frozen=True, slots=True)
class AllowList:
    """Networks and host names of peers. Outgoing connections match a name as text, incoming ones by its addresses at start."""

    networks: tuple[_Network, ...] = ()
    names: frozenset[str] = frozenset()

    def __contains__(self, host: str) -> bool:
        address = _address(host)
        if address is None:
            return host.lower() in self.names
        return any(address in network for network in self.networks)

    def __str__(self) -> str:
        return ", ".join([*sorted(self.names), *map(str, self.networks)])


@dataclass(frozen=True, slots=True)
class Trust:
    """Which peers are admitted: holders of the cluster key, addresses on the allow-list, both if both are set, else loopback.

    A client can put any address into a request, so an address is a hint: it is dialled only if `dial_refusal` allows it.
    With the certificates of `tls_dir`, every connection is encrypted, and both ends show one (`wire/tls.py`).
    """

    key: ClusterKey | None = field(default=None, repr=False)
    allowed: AllowList | None = None
    tls_dir: Path | None = None

    def cluster_key_loads_total(self) -> int:
        """How many changes of the file with the cluster keys were taken."""
        return self.key.loads_total() if isinstance(self.key, KeyFile) else 0

    def failed_cluster_key_loads_total(self) -> int:
        """How many changes of the file with the cluster keys were not taken."""
        return self.key.failed_loads_total() if isinstance(self.key, KeyFile) else 0

    def dial_refusal(self, host: str) -> str | None:
        """Why `host` must not be dialled; None when it may be."""
        if self.allowed is not None:
            return None if host in self.allowed else f"{host} is not on the allow-list ({self.allowed}); add it with --allow"
        if self.key is not None or is_loopback(host):
            return None
        return (
            f"{host} is not this machine, and without a cluster key or an allow-list only loopback is dialled; "
            f"set one with --cluster-key-file, {CLUSTER_KEY_VARIABLE} or --allow"
        )

    def accepts_from(self, address: str) -> bool:
        """Whether frames from the IP address `address` are read at all: without an allow-list, those of every address."""
        return self.allowed is None or address in self.allowed

    def check_bind(self, host: str) -> None:
        """Raise ConfigError when listening on `host` would admit unknown peers: reachable by others, without authentication."""
        if self.key is None and self.allowed is None and not is_loopback(host):
            raise ConfigError(
                f"the control port would listen on {host}, where others can reach it, without a cluster key or an allow-list; "
                f"set a key (--cluster-key-file or {CLUSTER_KEY_VARIABLE}), name the peers (--allow), or listen on 127.0.0.1"
            )


def http_token(key: bytes) -> str:
    """The token of a cluster key for HTTP. It is derived, so that a captured header does not reveal the key itself."""
    return hmac.new(key, b"kvbaton http", hashlib.sha256).hexdigest()


class HttpTokens:
    """The tokens of the cluster keys as they are now; none, and false, without a key. Safe to use from any thread."""

    __slots__ = ("_key", "_made")

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._made: tuple[tuple[bytes, ...], tuple[str, ...]] = ((), ())

    def __bool__(self) -> bool:
        return self._key is not None

    def current(self) -> tuple[str, ...]:
        """The tokens; the first is the one to send."""
        keys = () if self._key is None else keys_of(self._key)
        made = self._made
        if made[0] != keys:
            made = self._made = keys, tuple(map(http_token, keys))
        return made[1]

    def are_carried(self, header: str, authorization: str) -> bool:
        """Whether the values of these two headers (HTTP_KEY_HEADER, Authorization) hold one of the tokens."""
        sent = [each.encode("utf-8", "surrogateescape") for each in (header, authorization.removeprefix("Bearer "))]
        return any(hmac.compare_digest(each, token.encode()) for token in self.current() for each in sent)


def _resolve(name: str) -> set[str]:
    return {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}


def parse_trust(
    key_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    allow: Iterable[str] = (),
    *,
    tls_dir: Path | None = None,
    resolve: Callable[[str], Iterable[str]] = _resolve,
) -> Trust:
    """Read the cluster key, from the file if one is named, else from the environment, and the allow-list. A file is followed.

    The directory of the certificates comes from the environment as well, where none is named.

    Raises ConfigError that names the setting and never shows the key.
    """
    key: ClusterKey | None = None
    if key_file is not None and key_file.is_file():
        key = KeyFile(key_file, warns=True)
    elif key_file is not None:
        key = _read_once(key_file)
    elif environment is not None and CLUSTER_KEY_VARIABLE in environment:
        key = _checked_key(os.fsencode(environment[CLUSTER_KEY_VARIABLE]), CLUSTER_KEY_VARIABLE)
    networks: list[_Network] = []
    names: set[str] = set()
    for entry in allow:
        network = _network(entry)
        if network is not None:
            networks.append(network)
        else:
            names.add(entry.lower())
            networks += _networks_of(entry, resolve)
    if tls_dir is None and environment is not None and environment.get(TLS_DIR_VARIABLE):
        tls_dir = Path(environment[TLS_DIR_VARIABLE])
    return Trust(key, AllowList(tuple(networks), frozenset(names)) if networks else None, tls_dir)


class KeyFile:
    """The cluster keys of a file, one per line: the first signs, all open. Raises ConfigError for what cannot be used.

    The file is followed: `current` looks at it, at most once a second. What cannot be used then changes nothing, is counted
    and logged. Safe to use from any thread.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, *, warns: bool = False) -> None:
        self.path = path.absolute()
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._keys = _read_keys(path, warns=warns)
        self._look_at = clock() + _LOOK_S
        self._loads_total = self._failed_loads_total = 0

    def __repr__(self) -> str:
        return f"KeyFile({self.path})"

    def current(self) -> tuple[bytes, ...]:
        """The keys as they are now; the same object, as long as nothing changes."""
        # Without the lock: a caller that comes a moment too early takes what was valid a moment ago.
        if self._clock() < self._look_at:
            return self._keys
        with self._lock:
            now = self._clock()
            if now >= self._look_at:
                self._look_at = now + _LOOK_S
                self._follow()
            return self._keys

    def loads_total(self) -> int:
        """How many changes of the file were taken."""
        self.current()
        return self._loads_total

    def failed_loads_total(self) -> int:
        """How many changes of the file were not taken."""
        self.current()
        return self._failed_loads_total

    def _follow(self) -> None:
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            if stamp is None:
                raise ConfigError(f"--cluster-key-file {str(self.path)!r} is gone, or no file any more")
            keys = _read_keys(self.path, warns=False)
        except ConfigError as error:
            self._failed_loads_total += 1
            log.error("the cluster keys stay as they were: %s", error)
            return
        log.info("the cluster keys of %s were read again: there are %d now, of which the first signs", self.path, len(keys))
        self._loads_total += 1
        self._keys = keys


def _read_once(path: Path) -> bytes:
    """The key of a pipe, which cannot be followed, nor read by another process."""
    first, *others = _read_keys(path, warns=False)
    if others:
        raise ConfigError(
            f"--cluster-key-file {str(path)!r} is no file, and holds {1 + len(others)} keys; give a file, or one key"
        )
    return first


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file; None where there is none. Secrets of Kubernetes are links that are moved: the target counts."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _read_keys(path: Path, *, warns: bool) -> tuple[bytes, ...]:
    setting = f"--cluster-key-file {str(path)!r}"
    most_bytes = _MOST_KEYS * (_MAX_KEY_BYTES + 1)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {error.strerror}; name a file that holds the cluster key") from error
    if warns and stat.S_ISREG(mode) and mode & 0o077:
        log.warning("%s can be read by others (mode %03o); run chmod 600 on it", setting, stat.S_IMODE(mode))
    lines = [line for line in content.splitlines() if line.strip()] or [b""]
    if len(lines) == 1:
        return (_checked_key(lines[0], setting),)
    if len(lines) > _MOST_KEYS or len(content) > most_bytes:
        raise ConfigError(f"{setting} holds more than {_MOST_KEYS} cluster keys, one per line; delete those that are old")
    return tuple(_checked_key(line, f"{setting}, line {number},") for number, line in enumerate(lines, 1))


def _checked_key(content: bytes, setting: str) -> bytes:
    key = content.strip()
    if not MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        count = f"more than {_MAX_KEY_BYTES}" if len(key) > _MAX_KEY_BYTES else len(key)
        raise ConfigError(f"{setting} holds {count} bytes; a cluster key has {MIN_KEY_BYTES} to {_MAX_KEY_BYTES}")
    return key


def _network(entry: str) -> _Network | None:
    """The network of an entry of the allow-list; None for a host name."""
    address, slash, _ = entry.partition("/")
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError as error:
        if slash or not is_host(entry):
            raise ConfigError(
                f"--allow is {entry!r}: not an IP address, a network such as 10.0.0.0/8, or a host name"
            ) from error
        return None
    if slash and str(network.network_address) != str(ipaddress.ip_address(address)):
        raise ConfigError(f"--allow is {entry!r}, an address inside a network; did you mean {network} or {address}?")
    return network


def _networks_of(name: str, resolve: Callable[[str], Iterable[str]]) -> list[_Network]:
    try:
        return [ipaddress.ip_network(address.partition("%")[0]) for address in sorted(resolve(name))]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--allow is {name!r}: no address is found for that name ({error}); give its IP address") from error


def _address(host: str) -> _Address | None:
    """The IP address in `host`; None for a name.

    A dual-stack socket reports IPv4 peers as `::ffff:10.0.0.1`, which would match no IPv4 network of an allow-list.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback

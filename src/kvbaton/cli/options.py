"""Kinds of values, and groups of options, that several commands take."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvbaton.engines.table import engine_names, known_engine
from kvbaton.transport.table import transport_entry, transport_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token

    from kvbaton.config import HandoffSettings

__all__ = ["EngineName", "HandoffOptions", "LimitOptions", "TransportName", "TrustOptions", "handoff_settings"]


def _known_engine(_kind: object, tokens: Sequence[Token]) -> str:
    """The name that was given. Raises ConfigError, with the nearest known name, for one that no engine has."""
    return known_engine(tokens[0].value, tokens[0].keyword or "ENGINE")


if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = Annotated[
        Literal[engine_names()],
        Parameter(
            converter=_known_engine,
            help="what computes; others than `embedded` are real servers on this machine's CPUs, installed on first use.",
        ),
    ]
"""The name of an engine from the table of engines, those of other packages included."""


def _known_transport(_kind: object, tokens: Sequence[Token]) -> str:
    """The name that was given. Raises ConfigError, with the nearest known name, for one that no transport has."""
    return transport_entry(tokens[0].value).name


if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Annotated[Literal[tuple(sorted(transport_names()))], Parameter(converter=_known_transport)]
"""How cache bytes travel: a name from the table of transports, those of other packages included."""


@dataclass(frozen=True, slots=True)
class TrustOptions:
    """Who is admitted as a peer; with none of these, and without KVBATON_CLUSTER_KEY, only this machine.

    Parameters
    ----------
    cluster_key_file
        file that holds the key all instances share; the variable KVBATON_CLUSTER_KEY may hold it instead.
    allow
        IP address, network or host name that peers may have; may be repeated.
    """

    cluster_key_file: Path | None = None
    allow: Annotated[tuple[str, ...], Parameter(negative=())] = ()


@dataclass(frozen=True, slots=True)
class HandoffOptions:
    """How caches are handed over; the same names and defaults as `kvbaton.config.HandoffSettings`.

    Parameters
    ----------
    mode
        `push`: the cache streams to the target while it is computed; `pull`: the target fetches it when it is complete.
    integrity
        how much of a received cache is checked against the source's checksums before it is used.
    aux_channel
        how the first token travels: in a control message, or over the data transport.
    on_failure
        what becomes of a request whose hand-off failed: it fails, or the decode instance computes its prompt.
    unfenced_writes
        in push, let the prefill instance write into the decode instance's memory, over `nixl`, `mooncake` or `mori`; nothing
        can take that right back from one that hangs. Without it the decode instance reads.
    """

    mode: Literal["push", "pull"] = "push"
    integrity: Literal["off", "sampled", "full"] = "off"
    aux_channel: Literal["control", "data"] = "control"
    on_failure: Literal["fail", "recompute"] = "fail"
    unfenced_writes: Annotated[bool, Parameter(negative=())] = False


def handoff_settings(options: HandoffOptions) -> HandoffSettings:
    """The options as settings."""
    import msgspec

    from kvbaton.config import HandoffSettings

    return msgspec.convert(asdict(options), HandoffSettings)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How long an instance waits for what, in seconds; the same names and defaults as `kvbaton.config.Limits`.

    Parameters
    ----------
    transfer_timeout
        seconds without progress after which a target gives a hand-off up.
    defer_timeout
        seconds for which a source keeps finished blocks without a message from their target; more than `transfer_timeout`.
    stop_timeout
        seconds after which blocks whose peer does not confirm that it has stopped are fenced by stronger means.
    retry
        seconds after which a question without an answer is asked again.
    queue_timeout
        seconds for which a hand-off may wait in an instance's queue, for a grant or for memory, before it expires.
    """

    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    stop_timeout: float = 5.0
    retry: float = 1.0
    queue_timeout: float = 600.0

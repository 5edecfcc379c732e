"""Kinds of values, and groups of options, that several commands take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvbaton.config import HandoffSettings, Limits
from kvbaton.engines.table import engine_names, known_engine
from kvbaton.transport.table import transport_entry, transport_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token

__all__ = ["DEFAULT_LIMITS", "NO_TRUST", "EngineName", "HandoffOptions", "LimitOptions", "TransportName", "TrustOptions"]


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


HandoffOptions = Annotated[HandoffSettings, Parameter(name="*", negative=())]
"""How caches are handed over."""

LimitOptions = Annotated[Limits, Parameter(name="*")]
"""How long an instance waits for what."""

DEFAULT_LIMITS = Limits()
NO_TRUST = TrustOptions()

"""Kinds of values, and groups of options, that several commands take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["TransportName", "TrustOptions"]

TransportName = Literal["local", "tcp"]
"""How cache bytes travel; the same names as in `kvbaton.transport.choose`."""


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
    allow: tuple[str, ...] = ()

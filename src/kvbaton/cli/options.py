"""Kinds of values, and groups of options, that several commands take."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvbaton import __version__
from kvbaton.config import HandoffSettings, Limits, Trust
from kvbaton.engines.table import engine_names, known_engine
from kvbaton.transport.table import transport_entry, transport_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token

__all__ = [
    "DEFAULT_LIMITS",
    "EngineName",
    "HandoffOptions",
    "JsonOption",
    "LimitOptions",
    "ModelName",
    "NO_TRUST",
    "TransportName",
    "TrustOptions",
    "json_document",
    "set_up_tls",
    "print_json",
]


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
    TransportName = Annotated[
        Literal[tuple(sorted(transport_names()))],
        Parameter(
            converter=_known_transport,
            help="how cache bytes travel: `local` (same host), `tcp`, `auto`, ...; `kvbaton doctor` reports what works here.",
        ),
    ]
"""How cache bytes travel: a name from the table of transports, those of other packages included."""

_MODEL_HELP = (
    "`smollm2`, `tiny`, a .gguf file, a directory of Hugging Face safetensors, or a small model: `tiny-gqa8`, ... of "
    "the embedded engine, `small-llama`, ... of vLLM."
)
ModelName = Annotated[str, Parameter(help=_MODEL_HELP)]
JsonOption = Annotated[bool, Parameter(negative=(), help="print one JSON object.")]


@dataclass(frozen=True, slots=True)
class TrustOptions:
    """Who is admitted as a peer; with none of these, and without KVBATON_CLUSTER_KEY, only this machine.

    Parameters
    ----------
    cluster_key_file
        file that holds the key all instances share; the variable KVBATON_CLUSTER_KEY may hold it instead.
    allow
        IP address, network or host name that peers may have; may be repeated.
    tls_dir
        directory with the certificates of `kvbaton keys` (ca.crt, tls.crt, tls.key), which the variable KVBATON_TLS_DIR may
        name instead: every connection is encrypted, and both ends show a certificate.
    """

    cluster_key_file: Path | None = None
    allow: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    tls_dir: Path | None = None


HandoffOptions = Annotated[HandoffSettings, Parameter(name="*", negative=())]
"""How caches are handed over."""

LimitOptions = Annotated[Limits, Parameter(name="*")]
"""How long an instance waits for what."""

DEFAULT_LIMITS = Limits()
NO_TRUST = TrustOptions()


def set_up_tls(trust: Trust, *, encrypt: bool) -> Path | None:
    """The certificates of a set-up on this machine: those of the environment, or new ones, or none. Raises ConfigError."""
    if trust.tls_dir is None and encrypt:
        from kvbaton.wire.certificates import trial_tls

        return trial_tls().folder
    if trust.tls_dir is not None:
        from kvbaton.wire.tls import cluster_tls

        cluster_tls(trust.tls_dir)
    return trust.tls_dir


def print_json(command: str, ok: bool, settings: Mapping[str, object], **found: object) -> None:
    """Print what a command found as one JSON object, with the head that all of them have."""
    sys.stdout.write(json_document(command, ok, settings, **found).decode() + "\n")


def json_document(command: str, ok: bool, settings: Mapping[str, object], **found: object) -> bytes:
    """What `print_json` prints."""
    import msgspec

    head = {"command": command, "version": __version__, "ok": ok, "settings": settings}
    return msgspec.json.encode(head | found)

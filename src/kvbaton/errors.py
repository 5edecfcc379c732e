"""The error tree of kvbaton, split by where the fault lies.

KVBatonError
├── PeerError                 the other side broke the protocol, or is gone
│   ├── PeerLost              it does not answer, died, or closed the connection
│   ├── PeerRefused           it refused, with a reason
│   ├── ProtocolError         it sent something that is not a message of this protocol
│   └── Incompatible          its card does not fit ours; names the field and both values
├── LocalError                this machine cannot do what was asked
│   ├── ConfigError           a setting is wrong; names the setting
│   ├── ModelError            a model file is missing or broken
│   └── TransportError        a copy failed
│       ├── RangeError        a run lies outside the registered memory
│       └── QueueFull         the queue of a transport is full; post again when something has completed
├── RequestError              the caller asked for something impossible
│   ├── AddressError          a control address or request id that cannot be parsed
│   └── BadRequest            a field of an API request is wrong; names the field
└── Bug                       a defect of kvbaton itself
    └── IllegalTransition     an event that the lifecycle table does not allow

Every error states whether a retry can help (`retryable`), and carries the transfer id where one is known.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AddressError",
    "BadRequest",
    "Bug",
    "ConfigError",
    "IllegalTransition",
    "Incompatible",
    "KVBatonError",
    "LocalError",
    "ModelError",
    "PeerError",
    "PeerLost",
    "PeerRefused",
    "ProtocolError",
    "QueueFull",
    "RangeError",
    "RequestError",
    "TransportError",
]


class KVBatonError(Exception):
    """Base of every error that kvbaton raises on purpose."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, transfer_id: str | None = None) -> None:
        super().__init__(message)
        self.transfer_id = transfer_id


class PeerError(KVBatonError):
    """The fault is at the other side."""


class PeerLost(PeerError):
    """The peer does not answer, died, or closed the connection."""

    retryable = True


class PeerRefused(PeerError):
    """The peer refused, with a reason."""


class ProtocolError(PeerError):
    """The peer sent something that is not a message of this protocol."""


class Incompatible(PeerError):
    """Two cards do not fit together; `field`, `ours` and `theirs` are the first difference."""

    def __init__(self, field: str, ours: Any, theirs: Any, *, transfer_id: str | None = None) -> None:
        super().__init__(f"incompatible peer: {field} is {ours!r} here and {theirs!r} there", transfer_id=transfer_id)
        self.field = field
        self.ours = ours
        self.theirs = theirs


class LocalError(KVBatonError):
    """The fault is on this machine, or in its configuration."""


class ConfigError(LocalError):
    """A setting is wrong; the message names it."""


class ModelError(LocalError):
    """A model file is missing, broken, or of an unsupported kind."""


class TransportError(LocalError):
    """A copy failed."""

    retryable = True


class RangeError(TransportError):
    """A run lies outside the memory that was registered for it."""

    retryable = False


class QueueFull(TransportError):
    """A transport has as much in flight as it accepts; the same batch can be posted again later."""


class RequestError(KVBatonError):
    """The caller asked for something impossible."""


class AddressError(RequestError):
    """A control address or a request id cannot be parsed."""


class BadRequest(RequestError):
    """A field of an API request is wrong; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Bug(KVBatonError):
    """A defect of kvbaton itself; please report it."""


class IllegalTransition(Bug):
    """An event arrived in a state whose table has no row for it; nothing was changed."""

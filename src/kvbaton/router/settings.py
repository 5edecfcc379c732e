"""The router's settings, checked once when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbaton.discovery.messages import TransferMode
from kvbaton.errors import ConfigError

__all__ = ["RouterSettings"]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Where the router listens and how long it waits. Raises ConfigError for a value that cannot work.

    transfer_mode:          instances of the other mode are refused; None takes both, and pairs instances of the same mode
    expire_after_s:         an instance that was silent for so long is no longer used
    connect_timeout_s:      a connection to an instance must stand within this time
    prefill_timeout_s:      a prefill instance must have answered within this time
    decode_timeout_s:       a decode instance must send something at least this often
    client_timeout_s:       a client must send its body, and read what is written to it, at least this fast
    explain_timeout_s:      an instance must tell of a hand-off within this time
    max_in_flight:          requests beyond this many at once are answered 503
    max_body_bytes:         larger requests are answered 413
    max_answer_bytes:       an instance's answer that is not streamed must be smaller than this
    """

    host: str = "127.0.0.1"
    port: int = 8000
    discovery_host: str = "127.0.0.1"
    discovery_port: int = 8001
    transfer_mode: TransferMode | None = None
    expire_after_s: float = 5.0
    connect_timeout_s: float = 5.0
    prefill_timeout_s: float = 600.0
    decode_timeout_s: float = 600.0
    client_timeout_s: float = 60.0
    explain_timeout_s: float = 5.0
    max_in_flight: int = 4096
    max_body_bytes: int = 32 * 1024 * 1024
    max_answer_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
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
        for name in ("max_in_flight", "max_body_bytes", "max_answer_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")

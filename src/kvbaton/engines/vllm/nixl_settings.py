"""The settings of a connector that was started as vLLM's `NixlConnector`, by a launcher that knows only that name.

Such a launcher gives the address in two environment variables, and may give tuning keys of NIXL, which have no meaning here.
What changes the result of a request is still refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvbaton.core.handoff import Mode
from kvbaton.engines.vllm.settings import ConnectorSettings, parse_settings
from kvbaton.errors import ConfigError

__all__ = ["HOST_VARIABLE", "PORT_VARIABLE", "parse_nixl_settings"]

log = logging.getLogger(__name__)

HOST_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""Where NIXL's side channel listens: the control host here."""
PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Its port: the control port here."""

_DEFAULT_HOST, _DEFAULT_PORT = "localhost", "5600"
_LOOPBACK = "127.0.0.1"
_TUNING = (
    "backends",
    "decoder_kv_blocks_ttl",
    "enforce_handshake_compat",
    "engine_ttl",
    "kv_buffer_device",
    "kv_lease_duration",
    "kv_recompute_threshold",
    "num_threads",
    "push_registration_timeout",
)
_SWITCHES = ("bidirectional_kv_xfer",)
"""Features that kvbaton lacks. Off is what it does anyway; on is refused."""


def parse_nixl_settings(extra_config: Mapping[str, Any], environment: Mapping[str, str]) -> ConnectorSettings:
    """Read `kv_connector_extra_config` of a `NixlConnector`. Raises ConfigError that names the key or the variable.

    Keys of kvbaton are taken as they are. The mode is pull by default: a proxy for NIXL asks the decode instance after the
    prefill instance has answered. The transport is `tcp` by default: pods share no memory.
    """
    ignored = [key for key in _TUNING if key in extra_config]
    ignored += [key for key in _SWITCHES if key in extra_config and not extra_config[key]]
    if ignored:
        log.warning("started as NixlConnector: %s of NIXL has no effect in kvbaton", ", ".join(ignored))
    given = {key: value for key, value in extra_config.items() if key not in ignored}
    host = environment.get(HOST_VARIABLE, "").strip() or _DEFAULT_HOST
    # Instances are dialled by address, and the default of NIXL is a name with two of them.
    defaults = {"control_host": _LOOPBACK if host == _DEFAULT_HOST else host, "mode": str(Mode.PULL), "transport": "tcp"}
    if "control_port" not in given:
        given["control_port"] = _port(environment.get(PORT_VARIABLE, "").strip() or _DEFAULT_PORT)
    return parse_settings(defaults | given)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise ConfigError(f"{PORT_VARIABLE} is {text[:32]!r}; it must be a port between 1 and 65535")
    return int(text)

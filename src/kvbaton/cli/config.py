"""`kvbaton config`: prints what other engines have to be started with."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from kvbaton.cli.options import HandoffOptions, LimitOptions, TransportName, TrustOptions, handoff_settings

if TYPE_CHECKING:
    from kvbaton.engines.vllm.settings import ConnectorSettings

__all__ = ["config_app"]

config_app = App(name="config", help="Print the command line that starts another engine with kvbaton in it.")

_DEFAULT_HANDOFF = HandoffOptions()
_DEFAULT_LIMITS = LimitOptions()
_NO_TRUST = TrustOptions()


@config_app.command
def vllm(
    *,
    role: Literal["prefill", "decode", "both"],
    model: str,
    host: str = "127.0.0.1",
    port: int = 8100,
    control_port: int = 8101,
    handoffs_port: int = 8102,
    router: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    advertise_host: str | None = None,
    transport: TransportName = "local",
    handoff: Annotated[HandoffOptions, Parameter(name="*")] = _DEFAULT_HANDOFF,
    limits: Annotated[LimitOptions, Parameter(name="*")] = _DEFAULT_LIMITS,
    trust: Annotated[TrustOptions, Parameter(name="*")] = _NO_TRUST,
) -> int:
    """Print a complete `vllm serve` line with the connector; every setting is checked first.

    Parameters
    ----------
    role
        prefill instances compute prompts, decode instances answer; `both` does either.
    model
        what vLLM is to serve.
    host
        where vLLM listens for HTTP, and the connector for control messages.
    port
        port of vLLM's API.
    control_port
        port on which other instances reach this one.
    handoffs_port
        port on which this instance tells of its hand-offs, for `kvbaton explain`; 0 for none.
    router
        discovery address (host:port) of a router to register with; may be repeated.
    advertise_host
        under which address others reach this instance; `host` when not given.
    transport
        how cache bytes travel: `local` (same host) or `tcp`; the others are taken, and not tested with vLLM.
    """
    from kvbaton.core.addresses import in_url
    from kvbaton.engines.vllm.settings import parse_settings
    from kvbaton.launch.ports import check_port
    from kvbaton.launch.vllm import serve_arguments, transfer_config

    check_port(port, "--port")
    _check_apart(port, {"--control-port": control_port, "--handoffs-port": handoffs_port})
    _check_used(role, router, handoff)
    extra: dict[str, Any] = {"control_port": control_port, "control_host": host, "transport": transport}
    if handoffs_port:
        extra["handoffs_port"] = handoffs_port
    if advertise_host is not None:
        extra["advertise_host"] = advertise_host
    if router:
        extra |= {"routers": list(router), "http_address": f"{in_url(advertise_host or host)}:{port}"}
    extra |= _changed(limits) | _trusted(trust)
    config = transfer_config(role, handoff_settings(handoff), extra)
    _check_heard(host, parse_settings(config["kv_connector_extra_config"]))
    sys.stdout.write("vllm " + shlex.join(serve_arguments(model, host, port, config)) + "\n")
    return 0


def _check_apart(port: int, others: dict[str, int]) -> None:
    """Refuse two servers on one port."""
    from kvbaton.errors import ConfigError

    for option, other in others.items():
        if port == other:
            raise ConfigError(f"--port and {option} are both {port}; give each its own")


def _check_used(role: str, router: tuple[str, ...], handoff: HandoffOptions) -> None:
    """Refuse options that the connector would not obey."""
    from kvbaton.errors import ConfigError

    if role == "both" and router:
        raise ConfigError(
            "--router with --role both: routers take prefill or decode instances; choose one, or leave --router out"
        )
    if handoff.aux_way != _DEFAULT_HANDOFF.aux_way:
        raise ConfigError(f"--aux-way is {handoff.aux_way}; with vLLM it is {_DEFAULT_HANDOFF.aux_way}, leave it out")


def _check_heard(host: str, settings: ConnectorSettings) -> None:
    """Refuse a control port that the instance would refuse to open; its key may be in a file of another machine."""
    from kvbaton.config import CLUSTER_KEY_VARIABLE, parse_trust

    has_key = settings.cluster_key_file is not None or bool(os.environ.get(CLUSTER_KEY_VARIABLE))
    if not has_key and not settings.allow:
        parse_trust().check_bind(host)


def _changed(limits: LimitOptions) -> dict[str, float]:
    """What differs from the defaults, so that the line stays short."""
    names = ("transfer_timeout", "defer_timeout", "stop_timeout", "retry")
    return {name: getattr(limits, name) for name in names if getattr(limits, name) != getattr(_DEFAULT_LIMITS, name)}


def _trusted(trust: TrustOptions) -> dict[str, Any]:
    told: dict[str, Any] = {} if trust.cluster_key_file is None else {"cluster_key_file": str(trust.cluster_key_file)}
    return told | ({"allow": list(trust.allow)} if trust.allow else {})

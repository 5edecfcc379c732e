"""`kvbaton config`: prints the command line that starts another engine with kvbaton in it."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter

from kvbaton.cli.options import (
    DEFAULT_LIMITS,
    NO_TRUST,
    EngineName,
    HandoffOptions,
    LimitOptions,
    TransportName,
    TrustOptions,
)
from kvbaton.config import DEFAULT_HANDOFF

__all__ = ["config_app"]

config_app = App(name="config", help="Print the command line that starts another engine with kvbaton in it.")


@config_app.default
def config(
    engine: EngineName,
    /,
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
    handoff: HandoffOptions = DEFAULT_HANDOFF,
    limits: LimitOptions = DEFAULT_LIMITS,
    trust: Annotated[TrustOptions, Parameter(name="*")] = NO_TRUST,
) -> int:
    """Print a complete line, such as `vllm serve ...` with the connector; every setting is checked first.

    Transports other than `local` and `tcp` are accepted, and not tested with vLLM.

    Parameters
    ----------
    role
        prefill instances compute prompts, decode instances answer; `both` does either.
    model
        what the engine is to serve.
    host
        where the engine listens for HTTP, and the connector for control messages.
    port
        port of the engine's API.
    control_port
        port on which other instances reach this one.
    handoffs_port
        port on which this instance reports its hand-offs, for `kvbaton explain`; 0 for none.
    router
        discovery address (host:port) of a router to register with; may be repeated.
    advertise_host
        under which address others reach this instance; `host` when not given.
    """
    from kvbaton.engines.base import CommandRequest
    from kvbaton.engines.table import find_engine
    from kvbaton.errors import ConfigError
    from kvbaton.launch.ports import check_port

    check_port(port, "--port")
    for option, other in {"--control-port": control_port, "--handoffs-port": handoffs_port}.items():
        if port == other:
            raise ConfigError(f"--port and {option} are both {port}; give each its own")
    request = CommandRequest(
        role=role,
        model=model,
        host=host,
        port=port,
        control_port=control_port,
        handoffs_port=handoffs_port,
        routers=router,
        advertise_host=advertise_host,
        transport=transport,
        handoff=handoff,
        limits=limits,
        cluster_key_file=trust.cluster_key_file,
        allow=trust.allow,
    )
    sys.stdout.write(find_engine(engine, "ENGINE").command_line(request) + "\n")
    return 0

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
        tls_dir=trust.tls_dir,
    )
    sys.stdout.write(find_engine(engine, "ENGINE").command_line(request) + "\n")
    return 0


@config_app.command(name="mori")
def mori(
    *,
    model: str,
    host: str = "127.0.0.1",
    port: int = 8100,
    router: str = "127.0.0.1:8001",
    mode: Literal["push", "pull"] = "push",
    paths: Literal["auto", "local", "tcp"] = "auto",
) -> int:
    """Print the lines that start stock vLLM (MoRIIOConnector) and stock SGLang (mori backend) on kvbaton's drop-in for MoRI.

    Parameters
    ----------
    model
        what the engines are to serve.
    host
        where they listen.
    port
        of the prefill instance; the next two are taken as well, and the decode instance has those ten further on.
    router
        discovery address (host:port) that vLLM's instances register with; SGLang's are given to its balancer by hand.
    mode
        `push` is WRITE, `pull` is READ; SGLang has `push` only.
    paths
        how bytes may go: out of the other process's memory (`local`), over TCP (`tcp`), or whichever works (`auto`).
    """
    from kvbaton.compat.mori.command_lines import MoriLines
    from kvbaton.errors import ConfigError
    from kvbaton.launch.ports import check_port

    check_port(port, "--port")
    if not router.rpartition(":")[2].isdigit():
        raise ConfigError(f"--router is {router!r}; it must be host:port of a router's discovery port")
    lines = MoriLines(model, host, port, router, mode == "pull", paths)
    sys.stdout.write("\n".join((*lines.vllm(), *lines.sglang())) + "\n")
    return 0

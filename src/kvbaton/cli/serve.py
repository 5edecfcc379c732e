"""`kvbaton serve`: one embedded instance."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace
from typing import Annotated

from cyclopts import Parameter

from kvbaton.cli.options import DEFAULT_LIMITS, NO_TRUST, HandoffOptions, LimitOptions, TransportName, TrustOptions
from kvbaton.config import DEFAULT_HANDOFF
from kvbaton.engines.embedded.settings import DEFAULT_HTTP, DEFAULT_INSTANCE, HttpSettings, InstanceOptions
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import check_port

__all__ = ["serve"]

_API_KEY_VARIABLES = ("KVBATON_API_KEY", "KVBATON_INSTANCE_API_KEY")
_ABOUT_ROUTERS = {
    True: "--router has no effect with --role both: such an instance answers clients by itself",
    False: "no --router is given: no router will know this instance",
}


def serve(
    *,
    instance: Annotated[InstanceOptions, Parameter(name="*")] = DEFAULT_INSTANCE,
    advertise_host: str | None = None,
    router: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    transport: TransportName = "local",
    step_tokens: int = 256,
    max_sequences: int = 64,
    max_waiting: int = 4096,
    threads: int | None = None,
    poison: bool = False,
    shape: str = "tp1",
    drop_writes: Annotated[bool, Parameter(show=False)] = False,
    drop: Annotated[str, Parameter(show=False)] = "",
    lacks: Annotated[str, Parameter(show=False)] = "",
    handoff: HandoffOptions = DEFAULT_HANDOFF,
    limits: LimitOptions = DEFAULT_LIMITS,
    trust: Annotated[TrustOptions, Parameter(name="*")] = NO_TRUST,
    http: Annotated[HttpSettings, Parameter(name="*")] = DEFAULT_HTTP,
    verbose: bool = False,
) -> int:
    """Serve a model with the embedded engine, as a prefill instance, a decode instance, or alone.

    Parameters
    ----------
    advertise_host
        host name or IP address under which others reach this instance; `host` when not given. Needed when `host` is
        0.0.0.0 or ::, unless a router finds out which of this machine's addresses it is.
    router
        discovery address (host:port) of a router to register with; may be repeated.
    step_tokens
        most tokens computed in one step.
    max_sequences
        most requests computed at once.
    max_waiting
        sequences of all requests that may wait; more are answered 429.
    threads
        BLAS threads; all cores when not given.
    poison
        fill blocks with a pattern before they are handed over, so that a missing byte shows.
    shape
        into how many ranks the model is cut, each a process: `tp2`, `pp2,tp2`, ...; for the small models only.
    verbose
        log more.
    """
    _check_ports(instance.port, instance.control_port)
    _share_cores(threads)
    from kvbaton.cli.running import raise_open_files, run_server, set_up_logging
    from kvbaton.config import parse_trust
    from kvbaton.core.topology import Shape
    from kvbaton.discovery.advertise import advertised_host, numeric_host
    from kvbaton.engines.embedded.engine import EngineSettings
    from kvbaton.engines.embedded.instance import InstanceSettings, serve_instance

    set_up_logging(verbose)
    trusted = parse_trust(trust.cluster_key_file, os.environ, trust.allow, tls_dir=trust.tls_dir)
    trusted.check_bind(instance.host)
    settings = InstanceSettings(
        **asdict(instance),
        control_host=numeric_host(instance.host),
        advertise_host=advertised_host(instance.host, advertise_host, router),
        transport=transport,
        routers=router,
        limits=limits,
        engine=EngineSettings(
            step_tokens=step_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            poison=poison,
            handoff=handoff,
            has_both_roles=instance.role == "both",
            defer_timeout_s=limits.defer_timeout,
        ),
        trust=trusted,
        handoff=handoff,
        drop_writes=drop_writes,
        shape=Shape.parse(shape),
        drop=drop,
        lacks=lacks,
        http=replace(http, show_details=_shows_details() if http.show_details is None else http.show_details),
    )
    log = logging.getLogger("kvbaton")
    if (instance.role == "both") == bool(router):
        log.warning("%s", _ABOUT_ROUTERS[bool(router)])
    raise_open_files()
    return run_server(serve_instance(settings, log.info))


def _shows_details() -> bool:
    """Where clients need an API key they are tenants, who must learn nothing of each other."""
    return not any(os.environ.get(name) for name in _API_KEY_VARIABLES)


def _check_ports(port: int, control_port: int) -> None:
    check_port(port, "--port")
    check_port(control_port, "--control-port")
    if port == control_port:
        raise ConfigError(f"--port and --control-port are both {port}; give each its own")


def _share_cores(threads: int | None) -> None:
    """BLAS reads these once, when it is loaded; nothing has loaded it before this."""
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1")
    if threads is not None:
        os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))

"""Real vLLM servers for tests, each started and ended by itself, and what can be asked of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from vllm_forked import FORKING, ForkedFleet

from kvbaton.config import HandoffSettings, OnFailure
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.engines.base import EngineOptions
from kvbaton.engines.vllm.setup.environment import VLLM_VERSION, ensure_environment
from kvbaton.engines.vllm.setup.plugin import VllmPlugin
from kvbaton.engines.vllm.setup.servers import VllmServers
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.installing import default_cache_dir
from kvbaton.launch.local import new_cluster_key
from kvbaton.launch.ports import PortPicker
from watching import command_line, descendants, is_running, processor_s, wait_until

__all__ = ["BLOCK_TOKENS", "CLUSTER_KEY", "MODEL", "Server", "ServerSpec", "ready", "servers", "starting"]

MODEL = "smollm2"
BLOCK_TOKENS = 128
START_S = 900.0
LOGS_VARIABLE = "KVBATON_VLLM_LOGS"
"""Names a directory that keeps the logs of the servers."""

CLUSTER_KEY = new_cluster_key()
"""Of every server."""

_ALLOW = ["127.0.0.1"]
"""vllm-router, and tests that are their own router, prove nothing: operators name the hosts of peers then."""
_INSIDE = Path(__file__).parent / "inside"
_METRIC = re.compile(r"^(vllm:\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class ServerSpec:
    """A server to start. `holds` gives it the connector that holds messages and copies up on command; `kv_role` overrides
    that of `role`.

    With `forks` it and its processes are forked instead of spawned, and it starts in a third of the time.
    With `lease_s` it keeps blocks for so long only, whatever its settings make it promise. Whichever its `model` is, clients
    call it `MODEL`.
    """

    name: str
    role: str
    mode: Mode = Mode.PUSH
    policy: OnFailure = OnFailure.FAIL
    integrity: Integrity = Integrity.OFF
    transport: str = "local"
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    holds: bool = False
    kv_role: str = ""
    lease_s: float = 0.0
    model: str = MODEL
    shape: str = "tp1"
    forks: bool = False
    beside: tuple[dict[str, Any], ...] = ()
    """Other connectors, which a `MultiConnector` has beside ours."""


class Server:
    """One running server. `start` and `restart` wait until it is healthy; `hold` is the directory of the held connector."""

    def __init__(self, part: FleetPart, url: str, control_port: int, hold: Path, forks: bool = False) -> None:
        self.name = part.name
        self.url = url
        self.control_port = control_port
        self.hold = hold
        self._part = part
        self._make: type[Fleet | ForkedFleet] = ForkedFleet if forks else Fleet
        self._fleet = self._make()

    def begin(self) -> None:
        """Start the process. From the main thread only: it would die with any other that starts it."""
        assert threading.current_thread() is threading.main_thread()
        self._fleet.start(self._part)

    def wait(self) -> None:
        """Wait until it answers."""
        self._fleet.wait_healthy(START_S)

    def restart(self) -> None:
        """Start it again on the same ports, after it has ended."""
        self.end()
        self._fleet = self._make()
        self.begin()
        self.wait()

    def signal(self, number: int) -> None:
        """Send a signal to it and to everything it started."""
        os.killpg(self._fleet.pid(self.name), number)

    def ranks(self) -> list[int]:
        """The process ids of its workers, in the order of their ranks; of one rank, that of the only worker."""
        found = {command_line(each): each for each in descendants(self._fleet.pid(self.name))}
        return [pid for name, pid in sorted(found.items()) if name.startswith("VLLM::Worker")]

    def has_engine(self) -> bool:
        """Whether any process of its engine is left."""
        pid = self._fleet.pid(self.name)
        return is_running(pid) and any(command_line(each).startswith("VLLM::") for each in descendants(pid))

    def ask_to_end(self) -> None:
        """Send SIGTERM to the server alone, as a service manager does, and wait until its engine is gone."""
        pid = self._fleet.pid(self.name)
        engine = {each for each in descendants(pid) if command_line(each).startswith("VLLM::")}
        assert engine, "vLLM's processes have names of their own"
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not any(map(is_running, engine)), f"the engine of {self.name} to end after SIGTERM", 60)

    def wait_ended(self) -> None:
        """Wait until the server itself is gone. vLLM waits for its clients, whose requests get no answer any more."""
        pid = self._fleet.pid(self.name)
        wait_until(lambda: not is_running(pid), f"{self.name} to end after SIGTERM", 60)

    def end(self) -> None:
        """End it, also when it is stopped."""
        with suppress(ProcessLookupError, StopIteration):
            self.signal(signal.SIGCONT)
        self._keep_log()
        self._fleet.stop()

    def is_alive(self) -> bool:
        """Whether it has not ended by itself."""
        return self._fleet.death() is None

    def log(self) -> str:
        """What it has printed."""
        return (self._fleet.log_directory / f"{self.name}.log").read_text(errors="replace")

    def _keep_log(self) -> None:
        """Copy the log to `$KVBATON_VLLM_LOGS`, if that is set."""
        kept, log = os.environ.get(LOGS_VARIABLE), self._fleet.log_directory / f"{self.name}.log"
        if kept and log.exists():
            shutil.copy(log, Path(kept) / f"{int(time.time())}-{self.name}.log")

    def metrics(self) -> dict[str, float]:
        """Its metrics, those with more labels than the engine's under `name{label=value}`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        return dict(_named(*match) for match in _METRIC.findall(text))

    def is_idle(self) -> bool:
        """Whether it holds no block and has no request."""
        found = self.metrics()
        names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(found[name] for name in names)

    def rests(self) -> bool:
        """Whether all its processes together use less than a quarter of a core for a second: an engine that steps uses one."""
        members = {self._fleet.pid(self.name), *descendants(self._fleet.pid(self.name))}
        before = sum(map(processor_s, members))
        time.sleep(1.0)
        return sum(map(processor_s, members)) - before < 0.25

    def wait_idle(self, timeout_s: float = 90.0) -> None:
        """Wait for that."""
        wait_until(
            self.is_idle, f"{self.name} to hold no block and no request; its log ends with\n{self.log()[-3000:]}", timeout_s
        )

    def held(self) -> list[str]:
        """What the held connector has noted."""
        return _lines(self.hold / "held")

    def read(self) -> list[str]:
        """Digests of what delayed copies have brought."""
        return _lines(self.hold / "read")

    @contextmanager
    def holding(self, what: str, value: str = "") -> Iterator[None]:
        """Hold up what is posted meanwhile."""
        (self.hold / what).write_text(value)
        try:
            yield
        finally:
            (self.hold / what).unlink()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _named(name: str, labels: str, value: str) -> tuple[str, float]:
    own = [label for label in labels.split(",") if label and label.split("=")[0] not in ("engine", "model_name")]
    return (f"{name}{{{','.join(own)}}}" if own else name), float(value)


def ready(version: str = VLLM_VERSION, model: str = MODEL, shape: str = "tp1") -> VllmServers:
    """vLLM, installed if need be. That it cannot be is the only reason for which these tests are skipped."""
    try:
        ensure_environment(default_cache_dir(), print, version)
    except LocalError as error:
        pytest.skip(f"NOTHING IS TESTED WITH VLLM, because it cannot be installed here: {error}")
    return VllmPlugin(version).prepare(EngineOptions(model, "local", 3, served_name=MODEL, shape=shape), print)


@contextmanager
def servers(*specs: ServerSpec, version: str = VLLM_VERSION) -> Iterator[list[Server]]:
    """Start servers at once, and wait for all; ends them afterwards."""
    with starting(*specs, version=version) as started:
        for server in started:
            server.wait()
        yield started


@contextmanager
def starting(*specs: ServerSpec, version: str = VLLM_VERSION) -> Iterator[list[Server]]:
    """Start servers, and wait for none; ends them afterwards."""
    ports = PortPicker()
    with ExitStack() as parts:
        started = []
        for spec in specs:
            hold = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="kvbaton-hold-")))
            if spec.lease_s:
                (hold / "lease").write_text(str(spec.lease_s))
            server = _server(spec, ready(version, spec.model, spec.shape), ports, hold)
            parts.callback(server.end)
            server.begin()
            started.append(server)
        yield started


def _server(spec: ServerSpec, prepared: VllmServers, ports: PortPicker, hold: Path) -> Server:
    handoff = HandoffSettings(mode=spec.mode, integrity=spec.integrity, on_failure=spec.policy)
    options = replace(
        prepared.options,
        handoff=handoff,
        transport=spec.transport,
        cluster_key=CLUSTER_KEY,
        step_tokens=256,
        arguments=(*prepared.options.arguments, *spec.arguments),
    )
    mine = replace(prepared, options=options, settings={"poison": True, "allow": _ALLOW, **spec.settings})
    part = mine.part(spec.name, spec.role, ports, spec.routers)
    command, control_port = list(part.command), 0
    if "--kv-transfer-config" in command:
        at = command.index("--kv-transfer-config") + 1
        config = json.loads(command[at])
        control_port = config["kv_connector_extra_config"]["control_port"]
        if spec.holds:
            held = "HeldPart" if spec.beside else "HeldConnector"
            config |= {"kv_connector": held, "kv_connector_module_path": "held_connector"}
        if spec.kv_role:
            config["kv_role"] = spec.kv_role
        if spec.beside:
            common = {name: config[name] for name in ("kv_role", "kv_load_failure_policy")}
            parts = {"connectors": [config, *({**common, **each} for each in spec.beside)]}
            config = {**common, "kv_connector": "MultiConnector", "kv_connector_extra_config": parts}
        command[at] = json.dumps(config)
    inside = [str(_INSIDE), *([str(FORKING)] if spec.forks else [])]
    path = os.pathsep.join((part.environment["PYTHONPATH"], *inside))
    environment = {**part.environment, "PYTHONPATH": path, "KVBATON_HOLD": str(hold)}
    return Server(replace(part, command=command, environment=environment), part.base_url, control_port, hold, spec.forks)

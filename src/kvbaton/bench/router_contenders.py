"""The routers of `kvbaton bench router`, ours and others', each in front of the same two instances without a model."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from kvbaton.config import CLUSTER_KEY_VARIABLE
from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import kvbaton_command, new_cluster_key
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.router_peers import RouterPeers, sglang_router_part, vllm_router_part

__all__ = ["Contender", "Driven", "NO_ROUTER", "SGLANG_ROUTER", "LoadTool", "RunningRouter", "build_load_tool", "running"]

SGLANG_ROUTER = "sglang-router"
"""The name of the contender that gets its instances on the command line."""

NO_ROUTER = "no router"
"""The name of the contender that is an instance itself."""

_CLUSTER_KEY = new_cluster_key()
_HEALTHY_S = 60.0
_DRIVE_EXTRA_S = 60.0
_COMPILE_S = 120.0
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
_TICKS = os.sysconf("SC_CLK_TCK")


class Driven(msgspec.Struct, frozen=True):
    """What one run of the load generator saw."""

    requests: int
    errors: int
    seconds: float
    p50_us: float
    p99_us: float
    max_us: float

    @property
    def per_second(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class LoadTool:
    """The compiled load generator."""

    path: Path

    def drive(self, port: int, clients: int, seconds: float, kind: str, prompt_bytes: int) -> Driven:
        """Keep so many clients busy for so long. Raises LocalError when it cannot."""
        command = [str(self.path), "drive", str(port), str(clients), str(seconds), kind, str(prompt_bytes)]
        done = subprocess.run(command, capture_output=True, timeout=seconds + _DRIVE_EXTRA_S, check=False)
        if done.returncode:
            raise LocalError(f"the load generator failed: {done.stderr.decode(errors='replace').strip()}")
        return msgspec.json.decode(done.stdout, type=Driven)


@dataclass(frozen=True, slots=True)
class Contender:
    """A router to measure: its name, the mode of its instances, and how many processes (0: another project's router)."""

    name: str
    transfer_mode: TransferMode
    processes: int = 0

    @property
    def is_bare(self) -> bool:
        """Whether there is no router at all."""
        return self.name == NO_ROUTER


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A contender that runs: where, and as which process."""

    contender: Contender
    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time that its processes have used."""
        return sum(_cpu_s(pid) for pid in _tree(self.pid))

    def memory_kib(self) -> int:
        """Resident memory of its processes."""
        return sum(_memory_kib(pid) for pid in _tree(self.pid))


def build_load_tool(directory: Path) -> LoadTool:
    """Compile the load generator into `directory`. Raises LocalError when there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise LocalError("no C compiler (cc or gcc) is found; the load generator needs one: apt-get install gcc")
    source = resources.files("kvbaton.bench") / "router_load.c"
    target = directory / "router_load"
    with resources.as_file(source) as path:
        command = [compiler, "-O2", "-o", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise LocalError(f"the load generator does not compile: {done.stderr.decode(errors='replace')[:500]}")
    return LoadTool(target)


@contextmanager
def running(contenders: Sequence[Contender], tool: LoadTool, peers: RouterPeers | None) -> Iterator[list[RunningRouter]]:
    """Start all contenders, each with two instances of its own mode behind it; ends them afterwards."""
    ports = PortPicker()
    with ExitStack() as stack:
        found = []
        for contender in contenders:
            fleet = stack.enter_context(Fleet())
            instances = {kind: ports.pick() for kind in InstanceType}
            for kind, port in instances.items():
                fleet.start(FleetPart(kind.word, [str(tool.path), "serve", str(port)], f"http://127.0.0.1:{port}/health"))
            if contender.is_bare:
                fleet.wait_healthy(_HEALTHY_S)
                word = InstanceType.DECODE.word
                found.append(RunningRouter(contender, instances[InstanceType.DECODE], fleet.pid(word)))
                continue
            port, discovery_port = ports.pick(), ports.pick()
            if contender.name == SGLANG_ROUTER:
                fleet.start(_sglang_router(peers, port, instances, ports))
            else:
                fleet.start(_router(contender, peers, port, discovery_port, ports))
                for kind, instance_port in instances.items():
                    message = _registration(kind, instance_port, contender.transfer_mode)
                    routers = [f"127.0.0.1:{discovery_port}"]
                    stack.enter_context(ThreadAnnouncer(message, routers, cluster_key=_CLUSTER_KEY.encode()))
            fleet.wait_healthy(_HEALTHY_S)
            found.append(RunningRouter(contender, port, fleet.pid("router")))
        yield found


def _router(contender: Contender, peers: RouterPeers | None, port: int, discovery_port: int, ports: PortPicker) -> FleetPart:
    if contender.processes:
        command = kvbaton_command("router", "--port", str(port), "--discovery-port", str(discovery_port))
        command += ["--processes", str(contender.processes)]
        return FleetPart("router", command, f"http://127.0.0.1:{port}/health", {CLUSTER_KEY_VARIABLE: _CLUSTER_KEY})
    if peers is None:
        raise LocalError("the other routers are not installed")
    part = vllm_router_part(peers, port, discovery_port, ports.pick(), "--log-level", "error")
    return FleetPart("router", part.command, part.health_url)


def _sglang_router(peers: RouterPeers | None, port: int, instances: dict[InstanceType, int], ports: PortPicker) -> FleetPart:
    if peers is None:
        raise LocalError("the other routers are not installed")
    part = sglang_router_part(peers, port, instances[InstanceType.PREFILL], instances[InstanceType.DECODE], ports.pick())
    return FleetPart("router", part.command, part.health_url)


def _registration(kind: InstanceType, port: int, mode: TransferMode) -> Registration:
    return Registration(
        type=kind,
        http_address=f"127.0.0.1:{port}",
        zmq_address=f"host:127.0.0.1,handshake:{port},notify:{port}",
        transfer_mode=mode,
        incarnation=f"bench-{port}",
    )


def _tree(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    for child in children:
        found += _tree(int(child))
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory_kib(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB
    except OSError:
        return 0

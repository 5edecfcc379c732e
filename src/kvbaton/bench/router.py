"""How fast the router is: ours and the others in the same run, in front of the same instances, all features on.

A load generator and two instances without a model, both in C, are never the limit. Every contender runs the whole time; each
round visits all of them in turn with the same load, and at the lowest one an instance without a router in front, which shows
what a router adds. CPU time per request shows what a router costs where other work disturbs the clock.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from kvbaton.bench.processes import Processes
from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware, ratio
from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.engines.base import Progress
from kvbaton.errors import ConfigError, LocalError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import new_cluster_key, router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.router_peers import ensure_router_peers, sglang_router_part, vllm_router_part
from kvbaton.transport.runs import compile_c

__all__ = [
    "NO_ROUTER",
    "Contender",
    "Driven",
    "LoadCase",
    "LoadTool",
    "RouterBench",
    "RunningRouter",
    "contenders_of",
    "many_name",
    "median_of",
    "rows",
    "run_router_bench",
    "series_name",
]

Series = dict[str, list[float]]
"""Every measurement, by name, in the order taken."""

NO_ROUTER = "no router"
"""The name of the contender that is an instance itself."""

_VLLM_ROUTER = "vllm-router"
"""The name of the contender that ours is compared with."""
_SGLANG_ROUTER = "sglang-router"
"""The name of the contender that gets its instances on the command line."""
_PEERS = {TransferMode.WRITE: (_VLLM_ROUTER, _SGLANG_ROUTER), TransferMode.READ: (_VLLM_ROUTER,)}
"""The other routers; sglang-router calls both instances at once, as in push."""
_MANY = 2048
"""So many streams at once are very many."""

_FIGURES = (("per second", "1/s"), ("p50 ms", "ms"), ("p99 ms", "ms"), ("CPU us per request", "us"))
_GOALS = {("json", TransferMode.WRITE): 1.0, ("json", TransferMode.READ): 0.9, ("stream", TransferMode.WRITE): 1.5}
_STREAM_GOAL = 1.5
_ADDED_GOAL_MS = 0.4
_CLUSTER_KEY = new_cluster_key()
_HEALTHY_S = 60.0
_DRIVE_EXTRA_S = 60.0
_WARM_S = 0.3
_LOOK_S = 0.05


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
    """A contender that runs: where, and as which processes."""

    contender: Contender
    port: int
    processes: Processes


def _build_load_tool(directory: Path) -> LoadTool:
    """Compile the load generator into `directory`. Raises LocalError when there is no C compiler."""
    source = resources.files("kvbaton.bench") / "router_load.c"
    target = directory / "router_load"
    try:
        with resources.as_file(source) as path:
            compile_c([path], target, "-O2")
    except (OSError, subprocess.SubprocessError) as error:
        raise LocalError(f"the load generator does not compile ({error}); install a C compiler: apt-get install gcc") from error
    return LoadTool(target)


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One kind of load."""

    kind: str
    clients: int

    def __str__(self) -> str:
        return f"{'JSON' if self.kind == 'json' else 'streams'}, {self.clients} clients"


@dataclass(frozen=True, slots=True)
class RouterBench:
    """What to measure: so many rounds of so many seconds each, with so many clients."""

    clients: tuple[int, ...] = (1, 32, 256)
    processes: tuple[int, ...] = (1, 2)
    rounds: int = 5
    seconds: float = 2.0
    prompt_bytes: int = 64
    peers: bool = True

    def __post_init__(self) -> None:
        for name in ("rounds", "seconds", "prompt_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")
        for name in ("clients", "processes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"--{name} needs at least one number, all above 0")

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {name: value if isinstance(value := getattr(self, name), int | float) else str(value) for name in self.__slots__}

    def cases(self) -> list[LoadCase]:
        """Every kind of load."""
        return [LoadCase(kind, clients) for kind in ("json", "stream") for clients in self.clients]


def contenders_of(bench: RouterBench, mode: TransferMode) -> list[Contender]:
    """The contenders of one mode."""
    found = [*_ours(bench, mode), Contender(NO_ROUTER, mode)]
    return found + [Contender(name, mode) for name in _PEERS[mode]] if bench.peers else found


def _ours(bench: RouterBench, mode: TransferMode) -> list[Contender]:
    """Our router, with each number of processes."""
    return [Contender(f"kvbaton, {n} process{'es' * (n > 1)}", mode, n) for n in bench.processes]


def series_name(case: LoadCase, contender: Contender) -> str:
    """What the measurements of one contender under one load are called."""
    return f"{case}, {contender.transfer_mode.mode}, {contender.name}"


def many_name(contender: Contender) -> str:
    """What the measurements under very many streams are called."""
    return f"{_MANY} streams at once, {contender.transfer_mode.mode}, {contender.name}"


def median_of(series: Series, name: str) -> float:
    """The median of all rounds; 0 when there is none."""
    return statistics.median(series[name]) if name in series else 0.0


def _best_of_ours(bench: RouterBench, case: LoadCase, mode: TransferMode, series: Series) -> float:
    """Requests per second of our router, with the number of processes that is best."""
    return max(median_of(series, f"{series_name(case, each)}, per second") for each in _ours(bench, mode))


def run_router_bench(bench: RouterBench, progress: Progress) -> BenchReport:
    """Measure; installs the other routers on first use. Raises KVBatonError when something cannot run."""
    peers = ensure_router_peers(progress) if bench.peers else None
    series: Series = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvbaton-bench-") as directory:
        tool = _build_load_tool(Path(directory))
        for mode in TransferMode:
            contenders = contenders_of(bench, mode)
            progress(f"starting {len(contenders)} contenders ({mode.mode})")
            with _running(contenders, tool, peers) as routers:
                for router in routers:
                    problems += _crowd(bench, tool, router, series, progress)
                problems += _measure(bench, tool, routers, series, progress)
    return BenchReport(list(rows(bench, series)), describe_hardware(), [series], problems)


def _measure(
    bench: RouterBench, tool: LoadTool, routers: Sequence[RunningRouter], series: Series, progress: Progress
) -> list[str]:
    problems = []
    for number in range(bench.rounds):
        for case in bench.cases():
            progress(f"round {number + 1} of {bench.rounds}: {case}")
            for router in routers if number % 2 else reversed(routers):
                if router.contender.is_bare and case.clients > min(bench.clients):
                    continue
                tool.drive(router.port, case.clients, _WARM_S, case.kind, bench.prompt_bytes)
                before = router.processes.cpu_s()
                driven = tool.drive(router.port, case.clients, bench.seconds, case.kind, bench.prompt_bytes)
                _note(series, router.contender, case, driven, router.processes.cpu_s() - before)
                if router.contender.processes:
                    problems += _found_wrong(series_name(case, router.contender), driven)
    return problems


def _crowd(bench: RouterBench, tool: LoadTool, router: RunningRouter, series: Series, progress: Progress) -> list[str]:
    """Very many streams at once, and what each costs in memory: before anything else, which would have made room already."""
    if router.contender.is_bare:
        return []
    progress(f"{_MANY} streams at once: {router.contender.name}")
    tool.drive(router.port, 1, _WARM_S, "stream", bench.prompt_bytes)
    before = most = router.processes.memory_kib()
    with ThreadPoolExecutor(1) as pool:
        drive = pool.submit(tool.drive, router.port, _MANY, max(2.0, bench.seconds), "stream", bench.prompt_bytes)
        while not drive.done():
            most = max(most, router.processes.memory_kib())
            time.sleep(_LOOK_S)
    driven = drive.result()
    name = many_name(router.contender)
    series[f"{name}, per second"] = [driven.per_second]
    series[f"{name}, KiB per stream"] = [(most - before) / _MANY]
    series[f"{name}, errors"] = [float(driven.errors)]
    return _found_wrong(name, driven) if router.contender.processes else []


def _found_wrong(name: str, driven: Driven) -> list[str]:
    """Errors; and silence, which would otherwise pass for an answer within 0 ms."""
    found = [f"{name}: {driven.errors} errors"] if driven.errors else []
    return found if driven.requests else [*found, f"{name}: no request was answered in time; give it more --seconds"]


def _note(series: Series, contender: Contender, case: LoadCase, driven: Driven, cpu_s: float) -> None:
    name = series_name(case, contender)
    figures = {
        "per second": driven.per_second,
        "p50 ms": driven.p50_us / 1e3,
        "p99 ms": driven.p99_us / 1e3,
        "CPU us per request": 1e6 * cpu_s / max(1, driven.requests),
        "errors": float(driven.errors),
    }
    for what, value in figures.items():
        series.setdefault(f"{name}, {what}", []).append(value)


@contextmanager
def _running(contenders: Sequence[Contender], tool: LoadTool, peers: Path | None) -> Iterator[list[RunningRouter]]:
    """Start all contenders, each with two instances of its own mode behind it; ends them afterwards."""
    ports = PortPicker()
    with ExitStack() as stack:
        found = []
        for contender in contenders:
            fleet = stack.enter_context(Fleet())
            instances = {kind: ports.pick() for kind in InstanceType}
            for kind, port in instances.items():
                fleet.start(FleetPart(kind.word, [str(tool.path), "serve", str(port)], f"http://127.0.0.1:{port}/health"))
            port, front = instances[InstanceType.DECODE], InstanceType.DECODE.word
            if not contender.is_bare:
                port, discovery_port = ports.pick(), ports.pick()
                part = _router(contender, peers, port, discovery_port, instances, ports)
                fleet.start(part)
                front = part.name
                for kind, instance_port in instances.items() if contender.name != _SGLANG_ROUTER else ():
                    message = _registration(kind, instance_port, contender.transfer_mode)
                    routers = [f"127.0.0.1:{discovery_port}"]
                    stack.enter_context(ThreadAnnouncer(message, routers, cluster_key=_CLUSTER_KEY.encode()))
            fleet.wait_healthy(_HEALTHY_S)
            found.append(RunningRouter(contender, port, Processes([fleet.pid(front)])))
        yield found


def _router(
    contender: Contender,
    peers: Path | None,
    port: int,
    discovery_port: int,
    instances: dict[InstanceType, int],
    ports: PortPicker,
) -> FleetPart:
    if contender.processes:
        processes = ("--processes", str(contender.processes))
        return router_part("127.0.0.1", port, discovery_port, *processes, cluster_key=_CLUSTER_KEY)
    if peers is None:
        raise LocalError("the other routers are not installed")
    if contender.name == _SGLANG_ROUTER:
        both = instances[InstanceType.PREFILL], instances[InstanceType.DECODE]
        return sglang_router_part(peers, port, *both, ports.pick())
    return vllm_router_part(peers, port, discovery_port, ports.pick(), "--log-level", "error")


def _registration(kind: InstanceType, port: int, mode: TransferMode) -> Registration:
    return Registration(
        type=kind,
        http_address=f"127.0.0.1:{port}",
        zmq_address=f"host:127.0.0.1,handshake:{port},notify:{port}",
        transfer_mode=mode,
        incarnation=f"bench-{port}",
    )


def rows(bench: RouterBench, series: Series) -> Iterator[BenchRow]:
    """What is aimed at first, then everything that was measured."""
    yield from _goals(bench, series)
    for mode in TransferMode:
        for case in bench.cases():
            for each in _ours(bench, mode):
                name = series_name(case, each)
                for peer in _PEERS[mode] if bench.peers else ("",):
                    theirs = series_name(case, Contender(peer, mode))
                    for what, unit in _FIGURES:
                        yield _row(f"{name}, {what}", peer, f"{theirs}, {what}", unit, series)
        for each in _ours(bench, mode):
            name, theirs = many_name(each), many_name(Contender(_VLLM_ROUTER, mode))
            for what, unit in (("per second", "1/s"), ("KiB per stream", "KiB")):
                yield _row(f"{name}, {what}", _VLLM_ROUTER, f"{theirs}, {what}", unit, series)


def _goals(bench: RouterBench, series: Series) -> Iterator[BenchRow]:
    """The rows that have a figure to reach: best of ours beside vllm-router, and what a router adds to one client's wait."""
    for mode in TransferMode:
        for case in bench.cases():
            if case.clients > 1:
                goal = _GOALS.get((case.kind, mode), _STREAM_GOAL)
                value = _best_of_ours(bench, case, mode, series)
                theirs = median_of(series, f"{series_name(case, Contender(_VLLM_ROUTER, mode))}, per second")
                yield _goal(f"{case}, {mode.mode}, best of ours, per second", value, "1/s", theirs, f"at least {goal:g} x")
        if 1 in bench.clients:
            case, each = LoadCase("json", 1), _ours(bench, mode)[0]
            bare = median_of(series, f"{series_name(case, Contender(NO_ROUTER, mode))}, p50 ms")
            added = median_of(series, f"{series_name(case, each)}, p50 ms") - bare
            theirs = median_of(series, f"{series_name(case, Contender(_VLLM_ROUTER, mode))}, p50 ms") - bare
            name = f"{case}, {mode.mode}, {each.name}, added p50 ms"
            yield _goal(name, added, "ms", theirs if bench.peers else 0.0, f"at most {_ADDED_GOAL_MS:g} ms")


def _goal(name: str, value: float, unit: str, theirs: float, goal: str) -> BenchRow:
    return BenchRow(name, value, unit, _VLLM_ROUTER if theirs else "", ratio(value, theirs), {"goal": goal})


def _row(name: str, peer: str, theirs: str, unit: str, series: Series) -> BenchRow:
    value, other = median_of(series, name), median_of(series, theirs)
    return BenchRow(name, value, unit, peer if other else "", ratio(value, other), {"rounds": len(series[name])})

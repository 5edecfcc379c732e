"""What a hand-off between two servers costs, beside one server alone and beside another connector, in one run.

All servers are up all the time, with the same model, threads and settings; those that are not being measured are paused
(SIGSTOP), because an idle server of some connectors keeps a core busy. Variants take turns within a round, in a changing
order, with the same prompts. A prompt is new in every round, so that no prefix is in a cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import aiohttp
import msgspec
import numpy as np

from kvbaton.bench.asking import Alone, AskedPrompt, Asking, AtOnce, InOneRoom, OneAfterTheOther
from kvbaton.bench.processes import Processes, available_memory_bytes, guarded
from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware, ratio
from kvbaton.config import HTTP_KEY_HEADER, HandoffSettings, http_token
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import AddressProof, RoomProof
from kvbaton.core.handoff import Mode, Outcome
from kvbaton.core.timeline import Side
from kvbaton.engines.base import OWN_CONNECTOR, EngineOptions, EnginePlugin, Progress
from kvbaton.errors import ConfigError, KVBatonError, LocalError, PeerError, PeerLost, ProtocolError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.ports import PortPicker
from kvbaton.observe.phases import HandoffPhase
from kvbaton.observe.records import InstanceRecord
from kvbaton.observe.transfer_report import HandoffReport, SideAnswer, build_report

__all__ = [
    "SERVED_NAME",
    "SETTLE_S",
    "SINGLE",
    "THREADS_FOR",
    "Round",
    "ServersBench",
    "Variant",
    "Variants",
    "added_s",
    "check_memory",
    "name_of",
    "rows_of",
    "run_servers_bench",
    "stage_s",
]

Round = dict[str, list[float]]

SINGLE = "one server"
"""What everything is compared with: a plain server of the engine, without any connector."""

SERVED_NAME = "bench"
"""Under which servers serve their model."""

SETTLE_S = 1.0
"""How long servers go on before they are measured."""

_ASK_S = 10.0
_CACHE_BLOCKS = 64
_REQUEST_S = 300.0
_MAX_DIFFERENT = 0.02
THREADS_FOR = 2
"""Servers that share the cores at a time: each has the threads that it would have in a pair, the single one too."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant, up and running."""

    name: str
    servers: int
    asking: Asking
    processes: Processes
    reports: tuple[str, str] | None = None
    """Where source and target report their hand-offs, if they do."""
    token: str = ""
    urls: tuple[str, ...] = ()
    """Of its servers: prefill, then decode."""

    def fetch_report(self, transfer_id: str) -> HandoffReport | None:
        """Where the time of one hand-off went; None for a variant that does not report. Raises PeerError when it should."""
        if self.reports is None:
            return None
        source, target = (SideAnswer(address, _record(address, transfer_id, self.token)) for address in self.reports)
        return build_report(transfer_id, source, target).handoffs[0]


class Variants:
    """Starts variants of one engine, one after the other; each is paused as soon as it is up. `kept` ends them."""

    def __init__(self, engine: EnginePlugin, sides: Sequence[EngineOptions], kept: ExitStack, progress: Progress) -> None:
        self._engine = engine
        self._sides = sides
        self._kept = kept
        self._progress = progress
        self._ports = PortPicker()

    def single(self) -> Variant:
        """One plain server."""
        options = replace(self._sides[0], shape="tp1")
        part = self._engine.prepare(options, self._progress).part("single", "both", self._ports)
        return self._start(SINGLE, [part], Alone(part.base_url))

    def pair(self, name: str, mode: Mode, connector: str) -> Variant:
        """A prefill and a decode server with this connector; ours has timelines, and in push both are asked at once."""
        parts = []
        for role, side in zip(("prefill", "decode"), self._sides, strict=True):
            options = replace(side, handoff=HandoffSettings(mode=mode), connector=connector)
            prepared = self._engine.prepare(options, self._progress)
            parts.append(prepared.part(f"{connector}-{mode}-{role}", role, self._ports))
        prefill, decode = parts
        asking: Asking = OneAfterTheOther(prefill.base_url, decode.base_url)
        if self._engine.meets_in_rooms:
            source = ControlAddress.parse(prefill.control_address)
            rooms = RoomProof(options.cluster_key.encode(), source, ControlAddress.parse(decode.control_address))
            asking = InOneRoom(prefill.base_url, decode.base_url, source, rooms)
        elif prefill.control_address and decode.control_address:
            source, target = (ControlAddress.parse(part.control_address) for part in parts)
            proof = AddressProof(options.cluster_key.encode(), source, target)
            asking = OneAfterTheOther(prefill.base_url, decode.base_url, proof)
            if mode is Mode.PUSH:
                address = {"remote_host": source.host, "remote_port": source.handshake}
                asking = AtOnce(prefill.base_url, decode.base_url, address, proof)
        reports = (prefill.handoffs_address, decode.handoffs_address)
        token = http_token(options.cluster_key.encode())
        return replace(self._start(name, parts, asking), reports=reports if all(reports) else None, token=token)

    def _start(self, name: str, parts: list[FleetPart], asking: Asking) -> Variant:
        self._progress(f"starting {name}: {len(parts)} server{'s' if len(parts) > 1 else ''}; {self._engine.start_notice}")
        fleet = self._kept.enter_context(Fleet())
        for part in parts:
            fleet.start(part)
        fleet.wait_healthy(self._engine.healthy_within_s)
        leaders = [fleet.pid(part.name) for part in parts]
        self._kept.enter_context(guarded(leaders))
        processes = Processes(leaders)
        self._kept.callback(processes.resume)
        processes.pause()
        return Variant(name, len(parts), asking, processes, urls=tuple(part.base_url for part in parts))


def _record(address: str, transfer_id: str, token: str) -> InstanceRecord:
    request = urllib.request.Request(f"http://{address}/handoffs/{transfer_id}", headers={HTTP_KEY_HEADER: token})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S) as answer:  # noqa: S310 - our own server, over http
            return msgspec.json.decode(answer.read(), type=InstanceRecord)
    except (OSError, KVBatonError) as error:
        raise PeerLost(f"{address} does not report {transfer_id}: {error}") from error
    except (msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise ProtocolError(f"{address} answered with no timeline: {error}") from error


@dataclass(frozen=True, slots=True)
class ServersBench:
    """What to measure: prompts of these lengths, `rounds` of each in each variant, one at a time."""

    engine: EnginePlugin
    model: str = "smollm2"
    transport: str = "local"
    modes: tuple[Mode, ...] = (Mode.PUSH, Mode.PULL)
    peer: str = ""
    """Another connector of the engine to compare with."""
    prefill_shape: str = "tp1"
    decode_shape: str = "tp1"
    """Of every pair; the single server has one rank."""
    lengths: tuple[int, ...] = (128, 512, 1500)
    rounds: int = 10
    max_tokens: int = 4
    idle_s: float = 6.0
    device: str = "cpu"
    cache_dtype: str = "float32"
    engine_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_at_least_one(self, "rounds")
        if not self.lengths or min(self.lengths) < 1:
            raise ConfigError(f"--lengths is {self.lengths}; prompts have at least 1 token")

    @property
    def ours(self) -> dict[str, Mode]:
        """Kvbaton's pairs by their names."""
        return {f"{OWN_CONNECTOR} {mode}": mode for mode in self.modes}

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of what is measured, in order."""
        return (SINGLE, *self.ours, *((self.peer,) if self.peer else ()))

    @property
    def servers(self) -> int:
        """How many servers are up at once."""
        return 1 + 2 * (len(self.modes) + bool(self.peer))

    @property
    def options(self) -> EngineOptions:
        """What every server has in common. Those on a GPU share its memory, and take all of their part for the cache."""
        on_cpu = self.device == "cpu"
        return EngineOptions(
            self.model,
            self.transport,
            THREADS_FOR if on_cpu else self.servers,
            device=self.device,
            cache_dtype=self.cache_dtype,
            cache_blocks=_CACHE_BLOCKS if on_cpu else None,
            served_name=SERVED_NAME,
            arguments=self.engine_arguments,
        )

    def described(self) -> dict[str, Setting]:
        """The settings as a report shows them."""
        return {
            "engine": self.engine.name,
            "model": self.model,
            "transport": self.transport,
            "modes": ",".join(self.modes),
            "peer": self.peer or "none",
            "prefill_shape": self.prefill_shape,
            "decode_shape": self.decode_shape,
            "lengths": ",".join(map(str, self.lengths)),
            "rounds": self.rounds,
            "max_tokens": self.max_tokens,
            "device": self.device,
            "cache_dtype": self.cache_dtype,
            "engine_arguments": " ".join(self.engine_arguments),
            **self.engine.versions(self.peer),
        }


def run_servers_bench(bench: ServersBench, progress: Progress) -> BenchReport:
    """Install, start, measure and stop. Raises LocalError when there is too little memory, KVBatonError when servers fail."""
    options = bench.options
    sides = [replace(options, shape=shape) for shape in (bench.prefill_shape, bench.decode_shape)]
    for side in sides:
        bench.engine.check_support(side)
    model = bench.engine.check(sides[0], sides[1], progress)
    context = model.context_tokens
    if max(bench.lengths) > context - bench.max_tokens:
        raise ConfigError(f"--lengths is {bench.lengths}; from 1 to {context - bench.max_tokens} tokens are possible")
    check_memory(bench.engine, bench.servers, "measure one mode with --mode")
    with ExitStack() as kept:
        start = Variants(bench.engine, sides, kept, progress)
        variants = [start.single(), *(start.pair(name, mode, OWN_CONNECTOR) for name, mode in bench.ours.items())]
        if bench.peer:
            variants.append(start.pair(bench.peer, Mode.PULL, bench.peer))
        rounds, problems = asyncio.run(_Measurement(bench, variants, model.token_ids, progress).run())
    rows = list(rows_of(bench.lengths, bench.variants, rounds, bench.peer or SINGLE))
    return BenchReport(rows, _hardware(), rounds, problems)


def check_memory(engine: EnginePlugin, servers: int, remedy: str) -> None:
    """Raise LocalError where there is too little memory for so many servers at once; `remedy` is what to do about it."""
    needed, there = servers * engine.server_bytes, available_memory_bytes()
    if needed > there:
        raise LocalError(
            f"{servers} {engine.title} servers at once need about {needed / 1e9:.0f} GB of memory, "
            f"{there / 1e9:.0f} GB are free; end other programs, or {remedy}"
        )


def _hardware() -> dict[str, Setting]:
    return {name: value for name, value in describe_hardware().items() if name != "blas_threads"}


class _Measurement:
    def __init__(self, bench: ServersBench, variants: list[Variant], token_ids: range, progress: Progress) -> None:
        self._bench = bench
        self._variants = variants
        self._token_ids = token_ids
        self._progress = progress
        self._answers: dict[tuple[int, int, str], str] = {}
        self._problems: list[str] = []

    async def run(self) -> tuple[list[Round], list[str]]:
        """Warm up, look at the idle servers, then measure round by round."""
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
            idle: Round = {}
            for variant in self._variants:
                idle |= await self._warm_up(session, variant)
            rounds = [await self._round(session, index) for index in range(self._bench.rounds)]
        rounds[0] |= idle
        asked = self._bench.rounds * len(self._bench.lengths) * len(self._bench.modes)
        if (different := self._different()) > _MAX_DIFFERENT * asked:
            self._problems.append(f"{different} of {asked} answers were not those of {SINGLE}")
        return rounds, self._problems

    async def _warm_up(self, session: aiohttp.ClientSession, variant: Variant) -> Round:
        """The first requests make the handshakes and touch the memory; then nothing happens for a while."""
        variant.processes.resume()
        try:
            for length in self._bench.lengths:
                await variant.asking.ask(session, self._prompt(-1, length))
            await asyncio.sleep(2 * SETTLE_S)
            before = variant.processes.cpu_s()
            await asyncio.sleep(self._bench.idle_s)
            share = (variant.processes.cpu_s() - before) / self._bench.idle_s
        finally:
            variant.processes.pause()
        self._progress(f"{variant.name}, {variant.servers} idle: {share * 100:.0f} % of a core")
        return {name_of("idle cores", variant.name): [share]}

    async def _round(self, session: aiohttp.ClientSession, index: int) -> Round:
        turn = index % len(self._variants)
        taken: Round = {}
        for variant in (*self._variants[turn:], *self._variants[:turn]):
            variant.processes.resume()
            try:
                await asyncio.sleep(SETTLE_S)
                for length in self._bench.lengths:
                    taken |= await self._one(session, variant, index, length)
            finally:
                variant.processes.pause()
        self._progress(f"round {index + 1} of {self._bench.rounds}: {self._line(taken)}")
        return taken

    async def _one(self, session: aiohttp.ClientSession, variant: Variant, index: int, length: int) -> Round:
        cpu = variant.processes.cpu_s()
        answered = await variant.asking.ask(session, self._prompt(index, length))
        await asyncio.sleep(SETTLE_S / 2)
        used = variant.processes.cpu_s() - cpu
        self._answers[index, length, variant.name] = answered.text
        taken = {
            name_of("first token", variant.name, length): [answered.first_token_s],
            name_of("prefill answered", variant.name, length): [answered.prefill_s],
            name_of("total", variant.name, length): [answered.total_s],
            name_of("cpu", variant.name, length): [used],
        }
        try:
            report = await asyncio.to_thread(variant.fetch_report, answered.transfer_id)
        except PeerError as error:
            self._problems.append(f"{variant.name}, {length} tokens: {error}")
            return taken
        return taken if report is None else taken | self._stages(variant, length, report)

    def _stages(self, variant: Variant, length: int, report: HandoffReport) -> Round:
        end = next(end for end in report.ends if end.side is Side.TARGET)
        if end.outcome is not Outcome.DELIVERED or report.exposed_s is None:
            self._problems.append(f"{variant.name}, {length} tokens: not handed over ({report.sentence})")
            return {}
        taken = {name_of(f"stage {wait.phase}", variant.name, length): [wait.seconds] for wait in report.waits}
        taken[name_of("exposed", variant.name, length)] = [report.exposed_s]
        taken[name_of("hidden wire", variant.name, length)] = [report.hidden_s]
        return taken

    def _different(self) -> int:
        """How many answers of our pairs differ from the single server's."""
        ours = [key for key in self._answers if key[2] in self._bench.ours]
        return sum(self._answers[key] != self._answers[key[0], key[1], SINGLE] for key in ours)

    def _prompt(self, index: int, length: int) -> AskedPrompt:
        generator = random.Random(f"{index} {length}")
        return AskedPrompt(SERVED_NAME, tuple(generator.choices(self._token_ids, k=length)), self._bench.max_tokens)

    def _line(self, taken: Round) -> str:
        parts = []
        for variant in self._variants:
            seconds = [taken[name_of("first token", variant.name, length)][0] for length in self._bench.lengths]
            parts.append(f"{variant.name} {' / '.join(f'{each * 1e3:,.0f}' for each in seconds)} ms")
        return "; ".join(parts)


def name_of(what: str, variant: str, length: int | None = None) -> str:
    """The name under which a round holds a measurement."""
    return f"{what}, {variant}" if length is None else f"{what}, {variant}, {length} tokens"


def added_s(rounds: Sequence[Round], variant: str, length: int, percent: float) -> float:
    """What a variant adds to the first token of one server: differences within each round, where prompts are equal."""
    one, single = (_values(rounds, name_of("first token", each, length)) for each in (variant, SINGLE))
    return float(np.percentile(np.subtract(one, single), percent))


def stage_s(rounds: Sequence[Round], variant: str, length: int, phase: HandoffPhase) -> float:
    """How long a phase was waited for after the first token of the source, in the median; 0 where it never was."""
    taken = [each.get(name_of(f"stage {phase}", variant, length), [0.0])[0] for each in rounds]
    return float(np.median(taken))


def rows_of(lengths: Sequence[int], variants: Sequence[str], rounds: Sequence[Round], peer: str = SINGLE) -> Iterator[BenchRow]:
    """Every row of the report, beside that of `peer`: another connector where one was measured, else one server."""
    pairs = [name for name in variants if name != SINGLE]
    for length in lengths:
        yield from _first_token_rows(length, pairs, peer, rounds)
    for length in lengths:
        for name in variants:
            yield _cpu_row(length, name, peer, rounds)
    for name in variants:
        share, other = (rounds[0][name_of("idle cores", each)][0] for each in (name, peer))
        yield BenchRow(f"idle, {name}", share * 100, "% of a core", peer, ratio(share, other), {})
    for length in lengths:
        for name in pairs:
            yield from _stage_rows(length, name, rounds)


def _first_token_rows(length: int, pairs: Sequence[str], peer: str, rounds: Sequence[Round]) -> Iterator[BenchRow]:
    settings: dict[str, Setting] = {"prompt_tokens": length}
    alone = float(np.median(_values(rounds, name_of("first token", SINGLE, length))))
    yield BenchRow(f"first token, {length} tokens, {SINGLE}", alone * 1e3, "ms", SINGLE, 1.0, settings)
    for name in pairs:
        for percent in (50, 99):
            value = added_s(rounds, name, length, percent)
            other = added_s(rounds, peer, length, percent) if peer != SINGLE else alone
            what = f"added to it, p{percent}, {name}"
            yield BenchRow(what, value * 1e3, "ms", peer, ratio(value, other), settings)
    for name in pairs:
        value, other = (_decode_leg_s(rounds, each, length) for each in (name, peer if peer in pairs else name))
        if value > 0:
            yield BenchRow(f"after the prefill answer, {name}", value * 1e3, "ms", peer, ratio(value, other), settings)


def _decode_leg_s(rounds: Sequence[Round], name: str, length: int) -> float:
    """From the prefill server's answer to the first token, seen by the client alone; push has asked for both at once."""
    first, answered = (_values(rounds, name_of(what, name, length)) for what in ("first token", "prefill answered"))
    return float(np.median(np.subtract(first, answered)))


def _cpu_row(length: int, name: str, peer: str, rounds: Sequence[Round]) -> BenchRow:
    value, other = (float(np.median(_values(rounds, name_of("cpu", each, length)))) for each in (name, peer))
    return BenchRow(
        f"processor time per request, {length} tokens, {name}",
        value,
        "s",
        peer,
        ratio(value, other),
        {"prompt_tokens": length},
    )


def _stage_rows(length: int, name: str, rounds: Sequence[Round]) -> Iterator[BenchRow]:
    """Where the time of a hand-over went, for variants that report it; the ratio is the share of the whole."""
    exposed = [each[name_of("exposed", name, length)][0] for each in rounds if name_of("exposed", name, length) in each]
    if not exposed:
        return
    settings: dict[str, Setting] = {"prompt_tokens": length}
    whole = float(np.median(exposed))
    yield BenchRow(f"hand-over, {length} tokens, {name}", whole * 1e3, "ms", "all of it", 1.0, settings)
    for phase in HandoffPhase:
        if (value := stage_s(rounds, name, length, phase)) > 0:
            yield BenchRow(f"  {phase}, {length} tokens, {name}", value * 1e3, "ms", "all of it", ratio(value, whole), settings)


def _values(rounds: Sequence[Round], name: str) -> list[float]:
    return [each[name][0] for each in rounds]

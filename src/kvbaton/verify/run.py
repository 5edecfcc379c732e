"""Runs a verification: starts a P/D pair and a single instance, sends the same requests to both, compares the answers."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.config import HandoffSettings
from kvbaton.engines.base import OWN_CONNECTOR, Controls, EngineOptions, EnginePlugin, ModelFacts, Progress, pair_parts
from kvbaton.engines.table import find_engine
from kvbaton.errors import ConfigError, PeerError, PeerRefused
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.choose import check_writes
from kvbaton.verify.client import ServerReply, ask
from kvbaton.verify.compare import compare
from kvbaton.verify.report import Report, RequestRow, make_report
from kvbaton.verify.settings import VerifySettings
from kvbaton.verify.stored import StoredCounts
from kvbaton.verify.workload import make_prompts
from kvbaton.wire.tls import cluster_tls

__all__ = ["VerifiedPair", "run_verify"]

_REQUEST_S = 900.0
_REFUSAL = "incompatible peer"
_FEWEST_TOKENS = 1


@dataclass(frozen=True, slots=True)
class VerifiedPair:
    """What is verified: engines by their names, over a transport, with these settings of hand-offs.

    `engine` is that of prefill, and of decode too unless `decode_engine` names another.
    """

    engine: str
    transport: str
    handoff: HandoffSettings
    decode_engine: str = ""
    tls_dir: Path | None = None
    """The certificates with which all parts encrypt; None where they do not."""

    @property
    def is_mixed(self) -> bool:
        """Whether the two sides are different engines."""
        return self.decode_engine not in ("", self.engine)

    def shown(self) -> dict[str, str | bool]:
        """Every setting by its name, in one level."""
        decode = self.decode_engine or self.engine
        shown = {"engine": self.engine, "decode_engine": decode, "transport": self.transport, **asdict(self.handoff)}
        return shown | {"encrypt": self.tls_dir is not None}


@dataclass(frozen=True, slots=True)
class _VerifiedServers:
    pair_url: str
    single_url: str
    decode_urls: tuple[str, ...]
    model: str


def run_verify(
    pair: VerifiedPair, settings: VerifySettings, progress: Progress, on_row: Callable[[RequestRow], None]
) -> Report:
    """Do it; raises KVBatonError when it could not be run at all."""
    check_writes(pair.transport, pair.handoff.unfenced_writes, pair.handoff.fenced_writes)
    engines = find_engine(pair.engine), find_engine(pair.decode_engine or pair.engine, "--decode-engine")
    counts = StoredCounts() if settings.connector != OWN_CONNECTOR else None
    prefill, decode = _options(pair, settings, counts.directory if counts is not None else "")
    for engine, side in zip(engines, (prefill, decode), strict=True):
        engine.check_support(side)
    model = _check(engines, (prefill, decode), progress)
    longest = _longest_prompt(settings, model, progress)
    shortest = min(max(settings.shortest_prompt, settings.whole_blocks + 1), longest)
    prompts = make_prompts(model.encode, settings.requests, settings.seed, longest, shortest, settings.whole_blocks)
    with contextlib.ExitStack() as stack:
        if counts is not None:
            stack.callback(counts.close)
        if settings.pair_url:
            servers = _VerifiedServers(settings.pair_url.rstrip("/"), settings.single_url.rstrip("/"), (), model.name)
        else:
            fleet = stack.enter_context(Fleet())
            progress("starting a router, a prefill, a decode and a single instance")
            servers = _start(fleet, engines, (prefill, decode), settings, model, progress)
        progress(f"sending {settings.requests} requests to both, {settings.concurrency} at a time")
        rows = asyncio.run(_send_all(servers, prompts, settings, on_row, pair.tls_dir))
        if counts is not None:
            rows = counts.attributed(rows)
        # Of instances that run already, the decode ones are not known, and have drafted for others too.
        singles = [] if settings.pair_url else [servers.single_url]
        accepted = _accepted(engines[0], singles), _accepted(engines[1], servers.decode_urls)
    _check_not_refused(rows)
    return make_report({**settings.shown(), **pair.shown()}, rows, *accepted)


def _accepted(engine: EnginePlugin, urls: Sequence[str]) -> int:
    """How many drafted tokens these instances have accepted; 0 where none drafts."""
    return sum(engine.accepted_drafts(url) or 0 for url in urls)


def _check(
    engines: tuple[EnginePlugin, EnginePlugin], sides: tuple[EngineOptions, EngineOptions], progress: Progress
) -> ModelFacts:
    """Have each engine check what only it knows; of two, each its own side. The shorter context counts."""
    if engines[0].name == engines[1].name:
        return engines[0].check(*sides, progress)
    facts = [engine.check(side, side, progress) for engine, side in zip(engines, sides, strict=True)]
    return replace(facts[0], context_tokens=min(each.context_tokens for each in facts))


def _options(pair: VerifiedPair, settings: VerifySettings, counts_directory: str) -> tuple[EngineOptions, EngineOptions]:
    """The options of the prefill instances, and those of the decode instances."""
    prefill = EngineOptions(
        settings.model,
        pair.transport,
        settings.engines,
        pair.handoff,
        settings.prefill_shape,
        settings.device,
        connector=settings.connector,
        counts_directory=counts_directory,
        cache_dtype=settings.cache_dtype,
        arguments=tuple(shlex.split(settings.engine_arguments)),
        controls=Controls(poison=True, drop_writes=settings.drop_writes, drop=settings.drop),
        model_id=f"verify-{settings.model}" if pair.is_mixed else "",
        tls_dir=pair.tls_dir,
    )
    decode = replace(
        prefill,
        model=settings.decode_model or settings.model,
        shape=settings.decode_shape,
        cache_dtype=settings.decode_cache_dtype or settings.cache_dtype,
        controls=replace(prefill.controls, lacks=settings.decode_lacks),
    )
    return prefill, decode


def _longest_prompt(settings: VerifySettings, model: ModelFacts, progress: Progress) -> int:
    context = model.context_tokens
    if settings.max_tokens >= context:
        raise ConfigError(f"--max-tokens is {settings.max_tokens}; the context has {context} tokens, leave some to the prompt")
    longest = min(settings.longest_prompt, context - settings.max_tokens)
    if longest < settings.longest_prompt:
        progress(f"prompts have at most {longest} tokens, so that they fit into the model's context")
    return longest


def _check_not_refused(rows: list[RequestRow]) -> None:
    """Raise PeerRefused when the two instances do not fit together: then nothing was compared."""
    if rows and all(row.verdict == "failed" and _REFUSAL in row.detail for row in rows):
        raise PeerRefused(f"nothing was handed off: {rows[0].detail}")


def _start(
    fleet: Fleet,
    engines: tuple[EnginePlugin, EnginePlugin],
    sides: tuple[EngineOptions, EngineOptions],
    settings: VerifySettings,
    model: ModelFacts,
    progress: Progress,
) -> _VerifiedServers:
    """Start everything and wait until it is healthy. The single instance is an uncut one of the prefill side."""
    prefill, decode = (replace(side, served_name=model.name) for side in sides)
    single = replace(prefill, shape="tp1")
    parts = zip((*engines, engines[0]), (prefill, decode, single), strict=True)
    prepared = [engine.prepare(options, progress) for engine, options in parts]
    ports = PortPicker()
    router_port, discovery_port = ports.pick(), ports.pick()
    # Connectors that are not ours have no key; the router takes registrations on loopback only.
    key = prefill.cluster_key if prefill.connector == OWN_CONNECTOR else None
    alone = prepared[2].part("single", "both", ports)
    pair = pair_parts(prepared[0], prepared[1], (settings.prefill, settings.decode), ports, discovery_port)
    listed = _list_instances(fleet.log_directory, pair)
    fleet.start(router_part("127.0.0.1", router_port, discovery_port, *listed, cluster_key=key, tls_dir=prefill.tls_dir))
    for part in (*pair, alone):
        fleet.start(part)
    fleet.wait_healthy(max(engine.healthy_within_s for engine in engines))
    decode_urls = tuple(part.base_url for part in pair[settings.prefill :])
    return _VerifiedServers(f"http://127.0.0.1:{router_port}", alone.base_url, decode_urls, model.name)


def _list_instances(directory: Path, pair: Sequence[FleetPart]) -> list[str]:
    """The router's arguments that name the instances which do not register by themselves; nothing where all do."""
    listed = [part.listed for part in pair if part.listed]
    if not listed:
        return []
    path = directory / "instances.json"
    path.write_bytes(msgspec.json.encode(listed))
    return ["--instances-file", str(path)]


async def _send_all(
    servers: _VerifiedServers,
    prompts: list[tuple[int, ...]],
    settings: VerifySettings,
    on_row: Callable[[RequestRow], None],
    tls_dir: Path | None,
) -> list[RequestRow]:
    gate = asyncio.Semaphore(settings.concurrency)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    tls = cluster_tls(tls_dir)
    connector = aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls.client)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(index: int) -> RequestRow:
            async with gate:
                if settings.whole_blocks:
                    with contextlib.suppress(PeerError):  # A server that fails fails the second time too, and that is reported.
                        await ask(session, servers.single_url, servers.model, prompts[index], _FEWEST_TOKENS)
                row = await _send_one(session, servers, index, prompts[index], settings.max_tokens)
            on_row(row)
            return row

        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


async def _send_one(
    session: aiohttp.ClientSession, servers: _VerifiedServers, index: int, prompt: tuple[int, ...], max_tokens: int
) -> RequestRow:
    single, pair = await asyncio.gather(
        ask(session, servers.single_url, servers.model, prompt, max_tokens),
        ask(session, servers.pair_url, servers.model, prompt, max_tokens),
        return_exceptions=True,
    )
    for reply in (single, pair):
        if isinstance(reply, BaseException) and not isinstance(reply, PeerError):
            raise reply
    if isinstance(single, ServerReply) and isinstance(pair, ServerReply):
        return _row(index, prompt, single, pair)
    side, error = ("single instance", single) if isinstance(single, BaseException) else ("P/D pair", pair)
    return _failed_row(index, prompt, f"{side}: {error}")


def _row(index: int, prompt: tuple[int, ...], single: ServerReply, pair: ServerReply) -> RequestRow:
    comparison = compare(single.answer, pair.answer)
    facts = {
        "request": index,
        "prompt_tokens": len(prompt),
        "verdict": comparison.verdict,
        "detail": comparison.detail,
        "output_tokens": len(pair.answer.tokens),
        "largest_difference": comparison.largest_difference,
    }
    return msgspec.convert(pair.record | facts, RequestRow, strict=False)


def _failed_row(index: int, prompt: tuple[int, ...], detail: str) -> RequestRow:
    return RequestRow(index, len(prompt), "failed", detail)

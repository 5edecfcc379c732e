"""Runs a verification: starts a P/D pair and a single instance, sends the same requests to both, compares the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import aiohttp
import msgspec

from kvbaton.config import CLUSTER_KEY_VARIABLE, DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.lacks import check_lacks
from kvbaton.engines.embedded.models import find_model
from kvbaton.engines.embedded.seams import EngineModel
from kvbaton.engines.embedded.shaped.cut import check_cut
from kvbaton.engines.embedded.shaped.drops import check_drop, check_has
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES, check_dtype
from kvbaton.engines.embedded.shaped.model import LoadedShaped, load_shaped
from kvbaton.errors import ConfigError, PeerError, PeerRefused
from kvbaton.launch.fleet import Fleet, Part
from kvbaton.launch.local import InstanceOptions, instance_part, pair_parts, router_part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.vllm import MAX_MODEL_TOKENS, vllm_pair_parts, vllm_part
from kvbaton.launch.vllm_ready import ready_vllm
from kvbaton.transport.choose import check_writes
from kvbaton.verify.client import Reply, ask
from kvbaton.verify.compare import compare
from kvbaton.verify.fit import check_fit
from kvbaton.verify.report import Report, RequestRow, make_report
from kvbaton.verify.workload import make_prompts

__all__ = ["VerifySettings", "run_verify"]

_HEALTHY_WITHIN_S = {"embedded": 180.0, "vllm": 900.0}
_REQUEST_S = 900.0
_FEWEST_TOKENS = 2
_REFUSAL = "incompatible peer"


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What to verify, and how much of it. `engine` is `embedded` or `vllm`."""

    engine: str = "embedded"
    model: str = "smollm2"
    transport: str = "local"
    requests: int = 40
    concurrency: int = 8
    prefill: int = 1
    decode: int = 1
    max_tokens: int = 16
    longest_prompt: int = 1500
    seed: int = 0
    drop_writes: bool = False
    prefill_shape: str = "tp1"
    decode_shape: str = "tp1"
    drop: str = ""
    decode_model: str = ""
    """Another model for the decode instances, which must then refuse; that of the others when empty."""
    cache_dtype: str = CACHE_DTYPES[0]
    decode_cache_dtype: str = ""
    """Another type for the caches of the decode instances, which must then refuse; that of the others when empty."""
    decode_lacks: str = ""
    """What the cards of the decode instances leave out; they must then be refused."""
    handoff: HandoffSettings = DEFAULT_HANDOFF

    @property
    def engines(self) -> int:
        """How many engines share the cores of this machine."""
        return self.prefill + self.decode + 1

    def shown(self) -> dict[str, str | int | bool]:
        """Every setting by its name, in one level."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "handoff"}
        return {**own, **msgspec.structs.asdict(self.handoff)}


@dataclass(frozen=True, slots=True)
class _Servers:
    pair_url: str
    single_url: str
    model: str


def run_verify(settings: VerifySettings, say: Callable[[str], None], on_row: Callable[[RequestRow], None]) -> Report:
    """Do it; raises KVBatonError when it could not be run at all."""
    check_writes(settings.transport, settings.handoff.unfenced_writes)
    if settings.max_tokens < _FEWEST_TOKENS:
        raise ConfigError(
            f"--max-tokens is {settings.max_tokens}; it must be at least {_FEWEST_TOKENS}: the first token is the prefill "
            "instance's own, and says nothing of the cache that was handed over"
        )
    loaded = find_model(settings.model, progress=say)
    _check_shapes(settings, loaded)
    context = min(loaded.config.context_tokens, MAX_MODEL_TOKENS if settings.engine == "vllm" else 1 << 30)
    if settings.max_tokens >= context:
        raise ConfigError(f"--max-tokens is {settings.max_tokens}; the context has {context} tokens, leave some to the prompt")
    longest = min(settings.longest_prompt, context - settings.max_tokens)
    if longest < settings.longest_prompt:
        say(f"prompts have at most {longest} tokens, so that they fit into the model's context")
    prompts = make_prompts(lambda text: loaded.tokenizer.encode(text), settings.requests, settings.seed, longest)
    with Fleet() as fleet:
        say("starting a router, a prefill, a decode and a single instance")
        servers = _start(fleet, settings, loaded, say)
        say(f"sending {settings.requests} requests to both, {settings.concurrency} at a time")
        rows = asyncio.run(_send_all(servers, prompts, settings, on_row))
    _check_not_refused(rows)
    return make_report(settings.shown(), rows)


def _check_shapes(settings: VerifySettings, loaded: EngineModel) -> None:
    """Raise ConfigError or Incompatible for models that cannot be cut as asked or do not fit, before anything is started."""
    check_drop(settings.drop)
    check_lacks(settings.decode_lacks)
    check_dtype(settings.cache_dtype)
    check_dtype(settings.decode_cache_dtype or settings.cache_dtype)
    shapes = Shape.parse(settings.prefill_shape), Shape.parse(settings.decode_shape)
    if isinstance(loaded, LoadedShaped):
        for shape in shapes:
            check_cut(loaded.blueprint, shape)
        check_has(loaded.blueprint, settings.drop)
        if settings.decode_model:
            check_fit(loaded, shapes[0], load_shaped(settings.decode_model), shapes[1])
    elif shapes != (Shape(), Shape()) or settings.decode_model or settings.cache_dtype != CACHE_DTYPES[0]:
        raise ConfigError(f"model {settings.model} has one shape and one type of cache; use a small model such as tiny-gqa8")
    elif settings.drop not in ("", "all"):
        raise ConfigError(
            f"--drop {settings.drop}: of {settings.model} only all can be left out; use a small model such as tiny-gqa8"
        )
    _check_lacks_something(settings, loaded.config.layers, shapes[1].ranks)


def _check_lacks_something(settings: VerifySettings, layers: int, ranks: int) -> None:
    """Raise ConfigError for controls that would leave out nothing: they would prove nothing."""
    if settings.engine == "vllm" and (settings.drop or settings.decode_lacks or settings.decode_cache_dtype):
        raise ConfigError(
            "--drop, --decode-lacks and --decode-cache-dtype are controls of the embedded engine; use --drop-writes with vllm"
        )
    what, _, number = settings.decode_lacks.partition(":")
    most = {"layer": layers, "rank": ranks}.get(what, 0)
    if number and int(number) >= most:
        raise ConfigError(f"--decode-lacks {settings.decode_lacks}: there are {what}s 0 to {most - 1}; name one of them")


def _check_not_refused(rows: list[RequestRow]) -> None:
    """Raise PeerRefused when the two instances do not fit together: then nothing was compared."""
    if rows and all(row.verdict == "failed" and _REFUSAL in row.detail for row in rows):
        raise PeerRefused(f"nothing was handed off: {rows[0].detail}")


def _start(fleet: Fleet, settings: VerifySettings, loaded: EngineModel, say: Callable[[str], None]) -> _Servers:
    ports = PortPicker()
    router_port, discovery_port = ports.pick(), ports.pick()
    make = _vllm_parts if settings.engine == "vllm" else _embedded_parts
    parts, single_url = make(settings, loaded, ports, discovery_port, say)
    fleet.start(router_part("127.0.0.1", router_port, discovery_port, cluster_key=parts[0].environment[CLUSTER_KEY_VARIABLE]))
    for part in parts:
        fleet.start(part)
    fleet.wait_healthy(_HEALTHY_WITHIN_S[settings.engine])
    return _Servers(f"http://127.0.0.1:{router_port}", single_url, loaded.name)


def _embedded_parts(
    settings: VerifySettings, loaded: EngineModel, ports: PortPicker, discovery_port: int, say: Callable[[str], None]
) -> tuple[list[Part], str]:
    del loaded, say
    extra = ["--poison"] + ["--drop-writes"] * settings.drop_writes + (["--drop", settings.drop] if settings.drop else [])
    options = InstanceOptions(
        settings.model,
        settings.transport,
        settings.engines,
        (*extra, *_dtype_arguments(settings.cache_dtype)),
        handoff=settings.handoff,
    )
    single, single_url = instance_part("single", "both", options, ports)
    prefill = replace(options, shape=settings.prefill_shape)
    of_decode = [*extra, *_dtype_arguments(settings.decode_cache_dtype or settings.cache_dtype)]
    of_decode += ["--lacks", settings.decode_lacks] if settings.decode_lacks else []
    decode = replace(
        options, shape=settings.decode_shape, model=settings.decode_model or settings.model, extra=tuple(of_decode)
    )
    return [*pair_parts(settings.prefill, settings.decode, prefill, ports, discovery_port, decode), single], single_url


def _dtype_arguments(dtype: str) -> list[str]:
    return ["--cache-dtype", dtype] if dtype != CACHE_DTYPES[0] else []


def _vllm_parts(
    settings: VerifySettings, loaded: EngineModel, ports: PortPicker, discovery_port: int, say: Callable[[str], None]
) -> tuple[list[Part], str]:
    extra = {"poison": True, "drop_writes": settings.drop_writes}
    options = ready_vllm(settings.model, loaded.name, settings.transport, settings.engines, settings.handoff, say, extra)
    single, single_url = vllm_part("single", "both", options, ports)
    return [*vllm_pair_parts(settings.prefill, settings.decode, options, ports, discovery_port), single], single_url


async def _send_all(
    servers: _Servers, prompts: list[tuple[int, ...]], settings: VerifySettings, on_row: Callable[[RequestRow], None]
) -> list[RequestRow]:
    gate = asyncio.Semaphore(settings.concurrency)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(index: int) -> RequestRow:
            async with gate:
                row = await _send_one(session, servers, index, prompts[index], settings.max_tokens)
            on_row(row)
            return row

        return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


async def _send_one(
    session: aiohttp.ClientSession, servers: _Servers, index: int, prompt: tuple[int, ...], max_tokens: int
) -> RequestRow:
    single, pair = await asyncio.gather(
        ask(session, servers.single_url, servers.model, prompt, max_tokens),
        ask(session, servers.pair_url, servers.model, prompt, max_tokens),
        return_exceptions=True,
    )
    for reply in (single, pair):
        if isinstance(reply, BaseException) and not isinstance(reply, PeerError):
            raise reply
    if isinstance(single, Reply) and isinstance(pair, Reply):
        return _row(index, prompt, single, pair)
    side, error = ("single instance", single) if isinstance(single, BaseException) else ("P/D pair", pair)
    return _failed_row(index, prompt, f"{side}: {error}")


def _row(index: int, prompt: tuple[int, ...], single: Reply, pair: Reply) -> RequestRow:
    comparison = compare(single.answer, pair.answer)
    record = pair.record
    return RequestRow(
        request=index,
        prompt_tokens=len(prompt),
        output_tokens=len(pair.answer.tokens),
        verdict=comparison.verdict,
        detail=comparison.detail,
        handed_off=bool(record.get("handed_off")),
        recomputed=bool(record.get("recomputed")),
        cached_tokens=int(record.get("cached_tokens", 0)),
        bytes_planned=int(record.get("bytes_planned", 0)),
        bytes_moved=int(record.get("bytes_moved", 0)),
        handoff_s=float(record.get("handoff_s", 0.0)),
        handover_s=float(record.get("handover_s", 0.0)),
        largest_difference=comparison.largest_difference,
        source_writes=bool(record.get("source_writes")),
    )


def _failed_row(index: int, prompt: tuple[int, ...], detail: str) -> RequestRow:
    return RequestRow(index, len(prompt), 0, "failed", detail, False, False, 0, 0, 0, 0.0, 0.0, 0.0)

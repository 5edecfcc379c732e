"""The variants that are measured beside each other: which servers each has, how it is asked, where its timelines are."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from kvbaton.bench.vllm.processes import Processes, guarded
from kvbaton.bench.vllm.ways import Alone, AtOnce, OneAfterTheOther, Way
from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.errors import KVBatonError, PeerLost, ProtocolError
from kvbaton.launch.fleet import Fleet, Part
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.vllm import VllmOptions, nixl_part, vllm_part
from kvbaton.observe.records import InstanceRecord
from kvbaton.observe.transfer_report import HandoffReport, SideAnswer, build_report

__all__ = ["NIXL", "SINGLE", "Variant", "start_variants"]

SINGLE = "one vLLM"
NIXL = "NIXL"

_START_S = 900.0
_ASK_S = 10.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of serving, up and running."""

    name: str
    servers: int
    way: Way
    processes: Processes
    notes: tuple[str, str] | None = None
    """Where source and target tell of their hand-offs, if they do."""

    def story(self, transfer_id: str) -> HandoffReport | None:
        """Where the time of one hand-off went; None for a variant that does not tell. Raises PeerError when it should."""
        if self.notes is None:
            return None
        source, target = (SideAnswer(address, _record(address, transfer_id)) for address in self.notes)
        return build_report(transfer_id, source, target).handoffs[0]


def start_variants(
    modes: tuple[Mode, ...], has_nixl: bool, options: VllmOptions, kept: ExitStack, progress: Progress
) -> list[Variant]:
    """Start all, one variant after the other; each stands still as soon as it is up. `kept` ends them."""
    ports = PortPicker()
    makers: list[tuple[str, Callable[[], _Plan]]] = [(SINGLE, lambda: _single(options, ports))]
    makers += [(f"kvbaton {mode}", lambda mode=mode: _ours(mode, options, ports)) for mode in modes]  # type: ignore[misc]
    if has_nixl:
        makers.append((NIXL, lambda: _nixl(options, ports)))
    return [_start(name, make(), kept, progress) for name, make in makers]


@dataclass(frozen=True, slots=True)
class _Plan:
    parts: tuple[Part, ...]
    way: Way
    notes: tuple[str, str] | None = None


def _start(name: str, plan: _Plan, kept: ExitStack, progress: Progress) -> Variant:
    progress(f"starting {name}: {len(plan.parts)} server{'s' if len(plan.parts) > 1 else ''}, one to two minutes")
    fleet = kept.enter_context(Fleet())
    for part in plan.parts:
        fleet.start(part)
    fleet.wait_healthy(_START_S)
    leaders = [fleet.pid(part.name) for part in plan.parts]
    kept.enter_context(guarded(leaders))
    processes = Processes(leaders)
    kept.callback(processes.resume)
    processes.pause()
    return Variant(name, len(plan.parts), plan.way, processes, plan.notes)


def _single(options: VllmOptions, ports: PortPicker) -> _Plan:
    part, url = vllm_part("single", "both", options, ports)
    return _Plan((part,), Alone(url))


def _ours(mode: Mode, options: VllmOptions, ports: PortPicker) -> _Plan:
    parts, urls, control, notes = [], [], [], []
    for role in ("prefill", "decode"):
        settings = {"control_port": ports.pick(), "handoffs_port": ports.pick()}
        mine = replace(options, handoff=HandoffSettings(mode=mode), settings={**options.settings, **settings})
        part, url = vllm_part(f"{mode}-{role}", role, mine, ports)
        parts.append(part)
        urls.append(url)
        control.append(settings["control_port"])
        notes.append(f"127.0.0.1:{settings['handoffs_port']}")
    source = {"remote_host": "127.0.0.1", "remote_port": control[0]}
    way = AtOnce(urls[0], urls[1], source) if mode is Mode.PUSH else OneAfterTheOther(urls[0], urls[1])
    return _Plan(tuple(parts), way, (notes[0], notes[1]))


def _nixl(options: VllmOptions, ports: PortPicker) -> _Plan:
    (prefill, prefill_url), (decode, decode_url) = (
        nixl_part(f"nixl-{role}", role, options, ports) for role in ("prefill", "decode")
    )
    return _Plan((prefill, decode), OneAfterTheOther(prefill_url, decode_url))


def _record(address: str, transfer_id: str) -> InstanceRecord:
    try:
        with urllib.request.urlopen(f"http://{address}/handoffs/{transfer_id}", timeout=_ASK_S) as answer:
            return msgspec.json.decode(answer.read(), type=InstanceRecord)
    except (OSError, KVBatonError) as error:
        raise PeerLost(f"{address} does not tell of {transfer_id}: {error}") from error
    except (msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise ProtocolError(f"{address} told no timeline: {error}") from error

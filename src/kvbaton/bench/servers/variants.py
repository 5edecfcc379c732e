"""The variants that are measured beside each other: which servers each has, how it is asked, where its timelines are."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from kvbaton.bench.servers.asking import Alone, Asking, AtOnce, OneAfterTheOther
from kvbaton.bench.servers.processes import Processes, guarded
from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import EngineOptions, EnginePlugin, Progress
from kvbaton.errors import KVBatonError, PeerLost, ProtocolError
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.ports import PortPicker
from kvbaton.observe.records import InstanceRecord
from kvbaton.observe.transfer_report import HandoffReport, SideAnswer, build_report

__all__ = ["SINGLE", "Variant", "Variants"]

SINGLE = "one server"
"""What everything is compared with: a plain server of the engine, without any connector."""

_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant, up and running."""

    name: str
    servers: int
    asking: Asking
    processes: Processes
    reports: tuple[str, str] | None = None
    """Where source and target report their hand-offs, if they do."""

    def story(self, transfer_id: str) -> HandoffReport | None:
        """Where the time of one hand-off went; None for a variant that does not report. Raises PeerError when it should."""
        if self.reports is None:
            return None
        source, target = (SideAnswer(address, _record(address, transfer_id)) for address in self.reports)
        return build_report(transfer_id, source, target).handoffs[0]


class Variants:
    """Starts variants of one engine, one after the other; each is paused as soon as it is up. `kept` ends them."""

    def __init__(self, engine: EnginePlugin, options: EngineOptions, kept: ExitStack, progress: Progress) -> None:
        self._engine = engine
        self._options = options
        self._kept = kept
        self._progress = progress
        self._ports = PortPicker()

    def single(self) -> Variant:
        """One plain server."""
        part = self._engine.prepare(self._options, self._progress).part("single", "both", self._ports)
        return self._start(SINGLE, [part], Alone(part.base_url))

    def pair(self, name: str, mode: Mode, connector: str) -> Variant:
        """A prefill and a decode server with this connector; ours has timelines, and in push both are asked at once."""
        options = replace(self._options, handoff=HandoffSettings(mode=mode), connector=connector)
        side = self._engine.prepare(options, self._progress)
        prefill, decode = parts = [side.part(f"{connector}-{mode}-{role}", role, self._ports) for role in ("prefill", "decode")]
        asking: Asking = OneAfterTheOther(prefill.base_url, decode.base_url)
        if prefill.control_address and mode is Mode.PUSH:
            source = ControlAddress.parse(prefill.control_address)
            address = {"remote_host": source.host, "remote_port": source.handshake}
            asking = AtOnce(prefill.base_url, decode.base_url, address)
        reports = (prefill.handoffs_address, decode.handoffs_address)
        return self._start(name, parts, asking, reports if all(reports) else None)

    def _start(self, name: str, parts: list[FleetPart], asking: Asking, reports: tuple[str, str] | None = None) -> Variant:
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
        return Variant(name, len(parts), asking, processes, reports)


def _record(address: str, transfer_id: str) -> InstanceRecord:
    try:
        with urllib.request.urlopen(f"http://{address}/handoffs/{transfer_id}", timeout=_ASK_S) as answer:
            return msgspec.json.decode(answer.read(), type=InstanceRecord)
    except (OSError, KVBatonError) as error:
        raise PeerLost(f"{address} does not report {transfer_id}: {error}") from error
    except (msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise ProtocolError(f"{address} answered with no timeline: {error}") from error

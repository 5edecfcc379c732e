"""A connector that holds messages and copies up on command: runs inside vLLM, for the tests of faults.

The transfer id of a hand-off states what is to happen to it: with `mute.SIDE.KIND.NAME` that side (`source`, `target`) never
sends its messages of that kind about this hand-off. Files in the directory `$KVBATON_HOLD` do the rest: while
`stall` is there, copies that are posted do not complete; with `drop`, nothing is copied; with `corrupt`, one byte of each
copy is flipped; with `delay`, copies begin so many seconds later; with `silent`, heartbeats are not sent, with `mute` no
message about a hand-off. A `lease` that is there at the start holds for how many seconds this instance keeps blocks, whatever
its card promises. What was held up is noted in the file `held`, one line each, and so is every retraction; `read` has a digest
of what each delayed batch brought.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import cpu_experts
from msgspec import structs

from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import Limits
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Heartbeat, Message, Prefilled, Retracted
from kvbaton.core.strips import unroll
from kvbaton.engines.vllm.connector import KVBatonConnector
from kvbaton.engines.vllm.instance import WorkerInstance
from kvbaton.engines.vllm.settings import ConnectorSettings
from kvbaton.transport.base import AfterEvent, Batch, Completion, Region, Ticket, Transport
from kvbaton.transport.faulty import Faults, FaultyTransport

__all__ = ["HeldConnector", "HeldPart"]

_SOURCE_SENDS = frozenset({"announced", "prefilled", "aux", "retracted", "confirmed", "over", "stopped", "refused"})
_TARGET_SENDS = frozenset({"grant", "confirm_ask", "release", "stop"})

cpu_experts.install()


class _HeldSockets(ControlSockets):
    def __init__(self, directory: Path, incarnation: Incarnation, settings: ConnectorSettings) -> None:
        super().__init__(incarnation, settings.control_host, settings.control_port, settings.trust())
        self._directory = directory

    def send(self, peer: Incarnation, message: Message) -> None:
        """Send, unless the hand-off's transfer id forbids it."""
        if isinstance(message, Heartbeat) and (self._directory / "silent").exists():
            return
        key = getattr(message, "key", None)
        if key is not None and (self._directory / "mute").exists():
            return
        kind = str(message.__struct_config__.tag)
        if key is not None and _is_muted(key.transfer_id, kind):
            _note(self._directory / "held", f"{kind} {key.transfer_id}")
            return
        if isinstance(message, Prefilled) and _is_muted(message.key.transfer_id, "confirmed"):
            # With its stamp, nothing would be asked, and no answer be there to be held back.
            message = structs.replace(message, stamp=None)
        if isinstance(message, Retracted):
            _note(self._directory / "held", f"retracted {message.key.transfer_id}")
        super().send(peer, message)


def _is_muted(transfer_id: str, kind: str) -> bool:
    verb, _, rest = transfer_id.partition(".")
    side, _, rest = rest.partition(".")
    kinds = rest.split(".", 1)[0].split("+")
    sent_here = _SOURCE_SENDS if side == "source" else _TARGET_SENDS
    return verb == "mute" and kind in sent_here and kind in kinds


class _HeldTransport(FaultyTransport):
    def __init__(self, directory: Path, inner: Transport, region: Region) -> None:
        super().__init__(inner, region, Faults())
        self._directory = directory
        self._runs: dict[Ticket, Batch] = {}
        self._memory = region.view

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """Post, with the faults that the directory asks for now."""
        faults = self._requested_faults()
        self.set_faults(faults)
        ticket = super().post(batch, after)
        if faults.stall or faults.delay_s:
            _note(self._directory / "held", f"moving {batch.wire_bytes}")
        if faults.delay_s:
            self._runs[ticket] = batch
        return ticket

    def poll(self) -> list[Completion]:
        """Take completions; of delayed ones, note what they brought."""
        completions = super().poll()
        for completion in completions:
            batch = self._runs.pop(completion.ticket, None)
            if batch is not None and not completion.error:
                digest = hashlib.blake2b(digest_size=8)
                for _, target, count in unroll(batch.runs).tolist():
                    digest.update(self._memory[target : target + count])
                _note(self._directory / "read", digest.hexdigest())
        return completions

    def _requested_faults(self) -> Faults:
        delay = self._directory / "delay"
        return Faults(
            drop_writes=(self._directory / "drop").exists(),
            stall=(self._directory / "stall").exists(),
            corrupt=(self._directory / "corrupt").exists(),
            delay_s=float(delay.read_text()) if delay.exists() else 0.0,
        )


def _note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(f"{line}\n")


class _HeldInstance(WorkerInstance):
    def agent_limits(self, settings: ConnectorSettings) -> Limits:
        """With a lease, shorter ones than the card promises."""
        lease = _directory() / "lease"
        if not lease.exists():
            return settings.limits
        lease_s = float(lease.read_text())
        return Limits(lease_s / 2, lease_s, settings.stop_timeout, settings.retry)

    def open_sockets(self, settings: ConnectorSettings, incarnation: Incarnation) -> ControlSockets:
        """Sockets that drop messages."""
        return _HeldSockets(_directory(), incarnation, settings)

    def open_transport(self, settings: ConnectorSettings, incarnation: Incarnation, region: Region) -> Transport:
        """A transport that stalls."""
        return _HeldTransport(_directory(), super().open_transport(settings, incarnation, region), region)


def _directory() -> Path:
    return Path(os.environ["KVBATON_HOLD"])


class HeldConnector(KVBatonConnector):
    """`KVBatonConnector`, except for what it is ordered to hold up."""

    instance_class = _HeldInstance

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same; where a test measures, note how large every table of the worker is, of several that of the first rank."""
        if self._instance is None or self._instance.is_first:
            self._measure("worker", self._instance)
        return super().get_transfer_results(finished_req_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """The same; where a test measures, note how large every table of the scheduler is."""
        self._measure("scheduler", self._scheduler)
        return super().build_connector_meta(scheduler_output)

    def _measure(self, name: str, root: object) -> None:
        path = _directory() / f"measure-{name}"
        if path.exists():
            (_directory() / f"sizes-{name}").write_text(json.dumps(_sizes(root)))
            path.unlink()


class HeldPart(HeldConnector):
    """The same as a part of a MultiConnector."""


# That finds the statistics of its parts by the names of their classes, in a process that has not loaded this module.
HeldPart.__name__ = KVBatonConnector.__name__


def _sizes(root: object) -> dict[str, int]:
    """How many things every container that belongs to kvbaton's objects holds, by where it is."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    level: list[tuple[str, object]] = [("", root)]
    while level:
        path, thing = level.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | deque):
            found[path] = found.get(path, 0) + len(thing)
            values = list(thing.values()) if isinstance(thing, dict) else list(thing)
            level += [(f"{path}[]", value) for value in values]
        elif type(thing).__module__.startswith("kvbaton"):
            names = {*getattr(thing, "__dict__", {}), *(slot for kind in type(thing).__mro__ for slot in _slots(kind))}
            level += [(f"{path}.{name}", getattr(thing, name, None)) for name in names]
    return found


def _slots(kind: type) -> tuple[str, ...]:
    slots = getattr(kind, "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

"""What happens right now, for the live page: every instance with its hand-offs under way, bytes moved and failures by cause.

The instances count all of that already, in their metrics. They are asked when a page asks, for all pages at once and at most
every half second, so that a router without an open page does nothing, and many pages cost as much as one. An instance that
does not answer in time, or has no such numbers, is shown with the reason; the others are shown all the same.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbaton.discovery.registry import Instance, Registry
from kvbaton.errors import PeerError
from kvbaton.router.answers import json_response
from kvbaton.router.choosing import Chooser
from kvbaton.router.http.messages import HttpRequest, Response
from kvbaton.router.http.upstream import Upstream, fetch
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.pair_template import InstanceLines
from kvbaton.router.settings import RouterSettings

__all__ = ["LiveView", "read_counts"]

_EVERY_S = 0.5
_ASK_S = 2.0
_MOST_BYTES = 4 * 1024 * 1024
_MOST_ASKED = 128
_MOST_CAUSES = 64
_SHOWN_CHARACTERS = 200
_OWN = ("in_flight_requests", "queued_requests", "retries", "prefill_failures", "decode_failures", "quarantines")
_LINE = re.compile(
    rb"^(?:vllm:)?kvbaton_(handoffs_live|moved_bytes_total|handoff_failures_total)(?:\{([^\n]*)\})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)
_LABEL = re.compile(rb'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(eq=False, repr=False)
class LiveView:
    """Answers GET /live."""

    _registry: Registry
    _upstream: Upstream
    _settings: RouterSettings
    _metrics: RouterMetrics
    _chooser: Chooser
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lines = InstanceLines(self._settings)
        self._document: dict[str, Any] = {}
        self._made_at = float("-inf")
        self._making: asyncio.Task[None] | None = None

    async def show(self, _request: HttpRequest) -> Response:
        """The numbers of now, or those of half a second ago at most."""
        if self._making is None and self._clock() - self._made_at >= _EVERY_S:
            self._making = asyncio.get_running_loop().create_task(self._make())
            self._making.add_done_callback(self._made)
        if self._making is not None:
            # A page that goes away must not take the answer from the others.
            await asyncio.shield(self._making)
        return json_response(self._document)

    def _made(self, _task: asyncio.Task[None]) -> None:
        self._making = None

    async def _make(self) -> None:
        live = self._registry.live(self._clock())
        # The engines of one data-parallel server register one by one, and count together.
        servers = {(each.type, each.http_address): each for each in live}
        shown = await asyncio.gather(*(self._one(each) for each in list(servers.values())[:_MOST_ASKED]))
        refused = [
            {"http_address": each.registration.http_address, "reason": each.reason[:_SHOWN_CHARACTERS]}
            for each in self._registry.refused(self._clock())
        ]
        self._made_at = self._clock()
        router = {name: self._metrics.value(name) for name in _OWN}
        self._document = {"at_s": self._made_at, "router": router, "instances": shown, "refused": refused}
        self._document["not_shown"] = max(0, len(servers) - _MOST_ASKED)

    async def _one(self, instance: Instance) -> dict[str, Any]:
        now = self._clock()
        known: dict[str, Any] = {
            "type": instance.type,
            "http_address": instance.http_address,
            "incarnation": instance.registration.incarnation,
            "age_s": now - instance.last_seen,
            "in_flight": self._chooser.load_of(instance),
            "put_aside_s": max(0.0, instance.aside_until - now),
        }
        try:
            answer = await fetch(self._upstream, instance, "/metrics", _ASK_S, _MOST_BYTES, lines=self._lines.now())
        except PeerError as error:
            return known | {"problem": str(error)[:_SHOWN_CHARACTERS]}
        if not answer.is_ok:
            return known | {"problem": f"/metrics answered {answer.status}"}
        counts = read_counts(answer.content)
        return known | (counts or {"problem": "its /metrics has no numbers of hand-offs"})


def read_counts(content: bytes) -> dict[str, Any]:
    """Hand-offs under way by side, bytes moved, and failures by cause, from metrics as text; empty where there are none.

    What cannot be read is left out: the text is an instance's, and not trusted.
    """
    handoffs: dict[str, float] = {}
    failures: dict[str, float] = {}
    moved, found = 0.0, False
    for name, labels, text in _LINE.findall(content):
        try:
            value = float(text)
        except ValueError:
            continue
        by = {key.decode(): label.decode(errors="replace") for key, label in _LABEL.findall(labels)}
        found = True
        if name == b"handoffs_live":
            side = by.get("side", "")[:_SHOWN_CHARACTERS]
            handoffs[side] = handoffs.get(side, 0.0) + value
        elif name == b"moved_bytes_total":
            moved += value
        elif value and len(failures) < _MOST_CAUSES:
            cause = by.get("cause", "")[:_SHOWN_CHARACTERS]
            failures[cause] = failures.get(cause, 0.0) + value
    return {"handoffs": handoffs, "moved_bytes": moved, "failures": failures} if found else {}

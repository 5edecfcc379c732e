"""The routes that explain hand-offs: fetches the records of both instances of a transfer and joins them into one report.

Instances are not trusted. Each has a deadline and a size limit, its record is checked as it is decoded, and an instance that
is gone, silent or sends garbage is named in the report; the other side's record is still shown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, unquote

import msgspec

from kvbaton.core.handoff import MAX_TRANSFER_ID
from kvbaton.discovery.registry import Instance, Registry
from kvbaton.errors import PeerError, PeerRefused, ProtocolError
from kvbaton.observe.records import InstanceRecord
from kvbaton.observe.transfer_report import SideAnswer, TransferReport, build_report
from kvbaton.router.answers import error_response, json_response
from kvbaton.router.http.messages import HttpRequest, InstanceAnswer, Response
from kvbaton.router.http.upstream import Upstream, fetch
from kvbaton.router.pair_template import InstanceLines
from kvbaton.router.routed import Routed, RoutedTransfers
from kvbaton.router.settings import RouterSettings
from kvbaton.wire.log_limit import LogLimit, shown

__all__ = ["HandoffPages"]

_logger = logging.getLogger(__name__)

_log_limit = LogLimit(every_s=1.0)

_MOST_LISTED = 100
_MOST_AT_ONCE = 16
_MAX_RECORD_BYTES = 4 * 1024 * 1024


@dataclass(eq=False, repr=False)
class HandoffPages:
    """Answers /handoffs and /handoffs/{transfer_id} for the transfers in `routed`."""

    _registry: Registry
    _upstream: Upstream
    _routed: RoutedTransfers
    _settings: RouterSettings
    _clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._timeout_s = self._settings.explain_timeout_s
        self._lines = InstanceLines(self._settings)
        self._asking = 0

    def newest(self, _request: HttpRequest) -> Response:
        """GET /handoffs."""
        now = self._clock()
        newest = [_line(routed, now) for routed in self._routed.newest(_MOST_LISTED)]
        return json_response({"handoffs": newest})

    async def one(self, request: HttpRequest) -> Response:
        """GET /handoffs/{transfer_id}."""
        transfer_id = unquote(request.path.removeprefix("/handoffs/"))
        routed = self._routed.get(transfer_id)
        if routed is None:
            message = (
                f"this router knows no transfer {transfer_id[:MAX_TRANSFER_ID]!a}: it was routed elsewhere, or too long ago; "
                "GET /handoffs lists the newest"
            )
            return error_response(404, message, code="handoff_not_found", param="transfer_id")
        if self._asking >= _MOST_AT_ONCE:
            message = f"{self._asking} hand-offs are being explained, which is the limit; try again"
            return error_response(503, message, code="overloaded", headers={"Retry-After": "1"})
        self._asking += 1
        try:
            return await self._explain(routed)
        finally:
            self._asking -= 1

    async def _explain(self, routed: Routed) -> Response:
        transfer_id, pair = routed.transfer_id, routed.pair
        if pair.prefill is None:
            message = f"{transfer_id} was not handed off: decode instance {pair.decode.http_address} prefilled it by itself"
            return error_response(404, message, code="handoff_not_found", param="transfer_id")
        source, target = await self._ask_both(transfer_id, pair.prefill, pair.decode)
        if source.record is None and target.record is None:
            message = f"no record of {transfer_id}: {source.name}: {source.problem}; {target.name}: {target.problem}"
            return error_response(404, message, code="handoff_not_found", param="transfer_id")
        report = await asyncio.to_thread(build_report, transfer_id, source, target)
        return json_response(report)

    async def report(self, transfer_id: str) -> TransferReport | None:
        """What both instances have noted of a transfer; None where neither has noted anything, or it is not known here."""
        routed = self._routed.get(transfer_id)
        if routed is None or routed.pair.prefill is None:
            return None
        source, target = await self._ask_both(transfer_id, routed.pair.prefill, routed.pair.decode)
        if source.record is None and target.record is None:
            return None
        return await asyncio.to_thread(build_report, transfer_id, source, target)

    async def _ask_both(self, transfer_id: str, prefill: Instance, decode: Instance) -> tuple[SideAnswer, SideAnswer]:
        return await asyncio.gather(self._ask(prefill, transfer_id), self._ask(decode, transfer_id))

    async def _ask(self, instance: Instance, transfer_id: str) -> SideAnswer:
        """The record of an instance; never raises for anything that the instance does."""
        name = instance.name
        if not self._is_live(instance):
            return SideAnswer(name, problem="it is gone, or was restarted since; what it noted went with it")
        try:
            path = f"/handoffs/{quote(transfer_id, safe='')}"
            where = instance.registration.handoffs_address
            answer = await fetch(self._upstream, instance, path, self._timeout_s, _MAX_RECORD_BYTES, where, self._lines.now())
            return SideAnswer(name, _read(answer, instance, transfer_id))
        except PeerError as error:
            return SideAnswer(name, problem=str(error))

    def _is_live(self, instance: Instance) -> bool:
        live = self._registry.live(self._clock(), instance.type)
        known = {(one.http_address, one.registration.incarnation) for one in live}
        return (instance.http_address, instance.registration.incarnation) in known


def _read(answer: InstanceAnswer, instance: Instance, transfer_id: str) -> InstanceRecord:
    if answer.status == 404:
        raise PeerRefused("it knows nothing of the transfer, or keeps no timelines")
    if not answer.is_ok:
        raise PeerRefused(f"it answered {answer.status}")
    try:
        record = msgspec.json.decode(answer.content, type=InstanceRecord)
    except (ValueError, RecursionError) as error:
        # The client chooses the id, and the instance what it sends: neither may write lines into the log.
        held_back = _log_limit.allow(instance.http_address, time.monotonic())
        if held_back is not None:
            text = shown(f"{transfer_id}: {instance.http_address} sent no timeline: {str(error)[:200]}")
            _logger.warning("%s", text)
        raise ProtocolError(f"what it answered is no timeline ({str(error)[:200]})") from error
    if record.transfer_id != transfer_id:
        raise ProtocolError(f"it sent the record of another transfer, {record.transfer_id!a}")
    return record


def _line(routed: Routed, now: float) -> dict[str, object]:
    return {
        "transfer_id": routed.transfer_id,
        "prefill": routed.pair.prefill.http_address if routed.pair.prefill is not None else None,
        "decode": routed.pair.decode.http_address,
        "age_s": round(now - routed.arrived, 6),
    }

"""The routes that report an instance's hand-offs: a list of the newest, and the notes of one transfer."""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvbaton.core.handoff import MAX_TRANSFER_ID
from kvbaton.engines.embedded.http_errors import HttpError
from kvbaton.observe.timelines import Timelines

__all__ = ["add_handoff_routes"]

_MOST_LISTED = 100


def add_handoff_routes(app: web.Application, timelines: Timelines) -> None:
    """Serve `timelines` at /handoffs and /handoffs/{transfer_id}."""
    routes = _HandoffRoutes(timelines)
    app.router.add_get("/handoffs", routes.newest)
    app.router.add_get("/handoffs/{transfer_id}", routes.one)


class _HandoffRoutes:
    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines

    async def newest(self, http: web.Request) -> web.Response:  # noqa: ARG002
        newest = self._timelines.newest(_MOST_LISTED)
        return _json({"instance": self._timelines.about, "handoffs": newest})

    async def one(self, http: web.Request) -> web.Response:
        transfer_id = http.match_info["transfer_id"]
        record = self._timelines.record(transfer_id)
        if record is None:
            shown = transfer_id[:MAX_TRANSFER_ID]
            message = (
                f"this instance knows no transfer {shown!a}: it had no part in it, or its notes are no longer kept; "
                "GET /handoffs lists those it knows"
            )
            raise HttpError(404, "not_found_error", message, param="transfer_id", code="handoff_not_found")
        return _json(record)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")

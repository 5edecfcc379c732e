"""The HTTP routes that list, show and release an instance's hand-offs, and the rule for which requests may act on one.

With a cluster key, a request acts on a hand-off only with the key's token, which the router sends: other clients must not list,
release or start hand-offs of the cluster, nor have this instance dial an address of their choice. A source is also dialled with
the router's proof of that very address, or if the allow-list has it. Without a cluster key nothing is required, because then
the instance listens on, and dials, loopback only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from kvbaton.config import CLIENT_HEADER, HTTP_KEY_HEADER, KEYED_METRICS, HttpTokens, Trust
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import MAX_TRANSFER_ID, RequestId
from kvbaton.engines.embedded.http_errors import HttpError
from kvbaton.engines.embedded.openai import ApiRequest
from kvbaton.engines.embedded.submission import EngineClient
from kvbaton.engines.handoff_params import SourceCheck, TargetParams
from kvbaton.observe.timelines import Timelines

__all__ = ["HandoffAccess", "HandoffRoutes"]

_MOST_LISTED = 100
_KNOWN_SOURCES = 8192
_REQUESTS_PER_SOURCE = 1024
_CLIENT_CHARACTERS = 64


class HandoffAccess:
    """Which HTTP requests may act on hand-offs, and whose they are."""

    def __init__(self, trust: Trust, sources: SourceCheck | None) -> None:
        self._tokens = HttpTokens(trust.key)
        self._sources = sources

    def has_key(self, http: web.Request) -> bool:
        """Whether the request carries the token, as its own header or as a bearer token; true without a cluster key."""
        if not self._tokens:
            return True
        return self._tokens.are_carried(http.headers.get(HTTP_KEY_HEADER, ""), http.headers.get("Authorization", ""))

    def client(self, http: web.Request) -> str:
        """Whose turn in the queue a request takes: that of the client whom a router with the key names, or of the address.

        Other headers do not count: a client could send another one each time, and have as many turns as it likes.
        """
        named = http.headers.get(CLIENT_HEADER, "") if self._tokens and self.has_key(http) else ""
        return f"named {named[:_CLIENT_CHARACTERS]}" if named else f"at {http.remote}"

    def dial_refusal(self, http: web.Request, params: TargetParams) -> str | None:
        """Why the source that the request names must not be dialled; None when it may be."""
        return None if self._sources is None or self.has_key(http) else self._sources.refusal(params)

    def check(self, http: web.Request) -> None:
        """Raise HttpError unless the request may act on any hand-off."""
        if not self.has_key(http):
            what = f"{http.method} {http.path} acts on hand-offs, and this instance has a cluster key"
            raise _no_key(f"{what}; send its token in the header {HTTP_KEY_HEADER}, as kvbaton's router does")

    def check_metrics(self, http: web.Request) -> None:
        """Raise HttpError unless the request may read metrics that are for holders of the key only."""
        if not self.has_key(http):
            raise _no_key(KEYED_METRICS)

    def check_dial(self, http: web.Request, params: TargetParams) -> None:
        """Raise HttpError unless the source may be dialled for the request."""
        if (refusal := self.dial_refusal(http, params)) is not None:
            raise _no_key(f"{refusal}; or send its token in the header {HTTP_KEY_HEADER}", param="kv_transfer_params")


class HandoffRoutes:
    """The routes, and the requests of this instance's sources by transfer id."""

    def __init__(self, engine: EngineClient, timelines: Timelines | None, access: HandoffAccess) -> None:
        self._engine = engine
        self._timelines = timelines
        self._access = access
        self._sources: BoundedMap[str, tuple[RequestId, ...]] = BoundedMap(_KNOWN_SOURCES)

    def add_to(self, app: web.Application) -> None:
        """Serve the routes; without timelines only the release."""
        app.router.add_delete("/handoffs/{transfer_id}", self.release)
        if self._timelines is not None:
            app.router.add_get("/handoffs", self.newest)
            app.router.add_get("/handoffs/{transfer_id}", self.one)

    def remember(self, transfer_id: str, api: ApiRequest) -> None:
        """Keep the ids of a source's requests, so that `release` finds them."""
        known = self._sources.pop(transfer_id, ()) + tuple(request.request_id for request in api.requests)
        self._sources[transfer_id] = known[-_REQUESTS_PER_SOURCE:]

    def withdraw(self, transfer_id: str, api: ApiRequest, finished: Sequence[RequestId]) -> None:
        """The response of a source was not delivered, so no target will fetch its `finished` prefills: release them now."""
        own = {request.request_id for request in api.requests}
        left = tuple(request_id for request_id in self._sources.pop(transfer_id, ()) if request_id not in own)
        if left:
            self._sources[transfer_id] = left
        for request_id in finished:
            self._engine.cancel(request_id)

    async def release(self, http: web.Request) -> web.Response:
        """No target will fetch what this instance has prefilled under that transfer id: release it."""
        self._access.check(http)
        requests = self._sources.pop(http.match_info["transfer_id"], ())
        for request_id in requests:
            self._engine.cancel(request_id)
        return _json({"released": len(requests)})

    async def newest(self, http: web.Request) -> web.Response:
        """The newest hand-offs."""
        self._access.check(http)
        if self._timelines is None:
            raise web.HTTPNotFound
        return _json({"instance": self._timelines.instance, "handoffs": self._timelines.newest(_MOST_LISTED)})

    async def one(self, http: web.Request) -> web.Response:
        """The notes of one transfer."""
        self._access.check(http)
        transfer_id = http.match_info["transfer_id"]
        record = self._timelines.record(transfer_id) if self._timelines is not None else None
        if record is None:
            shown = transfer_id[:MAX_TRANSFER_ID]
            message = (
                f"this instance knows no transfer {shown!a}: it had no part in it, or its notes are no longer kept; "
                "GET /handoffs lists those it knows"
            )
            raise HttpError(404, "not_found_error", message, param="transfer_id", code="handoff_not_found")
        return _json(record)


def _no_key(message: str, param: str | None = None) -> HttpError:
    return HttpError(401, "authentication_error", message, param=param, code="missing_cluster_key")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")

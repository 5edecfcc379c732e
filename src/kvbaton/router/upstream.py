"""Calls from the router to instances: every one has deadlines, and whatever goes wrong on the way is one PeerLost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import quote

import aiohttp

from kvbaton.discovery.registry import Instance
from kvbaton.errors import PeerLost, ProtocolError
from kvbaton.router.settings import RouterSettings

__all__ = ["Answer", "StreamedAnswer", "Upstream"]

_KEEPALIVE_S = 4.0
_MODELS_TIMEOUT_S = 10.0
_HANDOFF_BYTES = 4 * 1024 * 1024
_EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Answer:
    """An instance's complete answer."""

    status: int
    content_type: str
    content: bytes
    retry_after: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the instance did what it was asked."""
        return self.status == 200


class StreamedAnswer:
    """An instance's answer whose body is still on its way. Raises PeerLost when the body breaks off."""

    def __init__(self, instance: Instance, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self._instance = instance
        self._response = response
        self._max_bytes = max_bytes

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._response.status

    @property
    def content_type(self) -> str:
        """The Content-Type header, as it came."""
        return self._response.headers.get("Content-Type", "application/octet-stream")

    @property
    def is_event_stream(self) -> bool:
        """Whether this is an answer to pass on piece by piece."""
        return self.status == 200 and self._response.content_type == _EVENT_STREAM

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive."""
        with _blaming(self._instance):
            async for chunk in self._response.content.iter_any():
                yield chunk

    async def read(self) -> Answer:
        """The whole body. Raises ProtocolError when it is larger than the settings allow."""
        content = bytearray()
        async for chunk in self.chunks():
            content += chunk
            if len(content) > self._max_bytes:
                raise ProtocolError(f"{_name(self._instance)} sent an answer of more than {self._max_bytes} bytes")
        return Answer(self.status, self.content_type, bytes(content), self._response.headers.get("Retry-After"))


class Upstream:
    """The router's connections to instances; open while entered. A call that is cancelled closes its connection at once."""

    def __init__(self, settings: RouterSettings) -> None:
        connect = settings.connect_timeout_s
        self._max_bytes = settings.max_answer_bytes
        self._connections = 2 * settings.max_in_flight + 16
        self._prefill = aiohttp.ClientTimeout(total=settings.prefill_timeout_s, sock_connect=connect)
        self._decode = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=settings.decode_timeout_s)
        self._models = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT_S, sock_connect=connect)
        self._handoff = aiohttp.ClientTimeout(total=settings.explain_timeout_s, sock_connect=connect)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=_KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def prefill(self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Run the prefill leg to its end."""
        async with self._open("POST", instance, path, body, headers, self._prefill) as answer:
            return await answer.read()

    @asynccontextmanager
    async def decode(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[StreamedAnswer]:
        """Start the decode leg; the answer's headers are in when this is entered, its body may be still to come."""
        async with self._open("POST", instance, path, body, headers, self._decode) as answer:
            yield answer

    async def models(self, instance: Instance) -> Answer:
        """Ask an instance for its list of models."""
        async with self._open("GET", instance, "/v1/models", None, {}, self._models) as answer:
            return await answer.read()

    async def handoff(self, instance: Instance, transfer_id: str) -> Answer:
        """Ask an instance for what it noted of a transfer."""
        path = f"/handoffs/{quote(transfer_id, safe='')}"
        where = instance.registration.handoffs_address or instance.http_address
        async with self._open("GET", instance, path, None, {}, self._handoff, _HANDOFF_BYTES, where) as answer:
            return await answer.read()

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        instance: Instance,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        max_bytes: int | None = None,
        where: str | None = None,
    ) -> AsyncIterator[StreamedAnswer]:
        if self._session is None:
            raise PeerLost("the router is shutting down")
        url = f"http://{where or instance.http_address}{path}"
        with _blaming(instance):
            response = await self._session.request(
                method, url, data=body, headers=dict(headers), timeout=timeout, allow_redirects=False
            )
        try:
            yield StreamedAnswer(instance, response, self._max_bytes if max_bytes is None else max_bytes)
        except BaseException:
            response.close()
            raise
        response.release()


@contextmanager
def _blaming(instance: Instance) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise PeerLost(f"{_name(instance)} did not answer in time ({str(error) or 'timeout'})") from error
    except aiohttp.ClientConnectorError as error:
        raise PeerLost(f"{_name(instance)} cannot be reached ({error})") from error
    except aiohttp.ClientPayloadError as error:
        raise PeerLost(f"{_name(instance)} broke off in the middle of its answer") from error
    except (aiohttp.ClientError, OSError) as error:
        raise PeerLost(f"{_name(instance)} closed the connection ({str(error) or type(error).__name__})") from error


def _name(instance: Instance) -> str:
    return f"{instance.type.word} instance {instance.http_address}"

"""The two legs of one request. In pull prefill runs first, and what it answers goes to decode; in push both start at once.

Everything that a request has open belongs to `Legs.open`: leaving it closes the connections and cancels what still runs,
and an instance whose connection is closed gives that request up. In push the client is served by the decode leg alone:
nothing waits for prefill's answer. Only when prefill fails before decode has said its first word is the decode leg, which
would wait in vain, given up at once. When both have failed, a refusal of decode is what the client is told: prefill then
failed because nobody took its cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvbaton.discovery.messages import InstanceType, TransferMode
from kvbaton.errors import PeerError
from kvbaton.router.bodies import ClientBody, decode_body, prefill_body, push_params, transfer_params
from kvbaton.router.policy import Pair
from kvbaton.router.upstream import Answer, StreamedAnswer, Upstream

__all__ = ["Begun", "Job", "LegFailure", "Legs"]

_Result = TypeVar("_Result")

_REFUSALS = frozenset((*range(400, 500), 503))


@dataclass(frozen=True, slots=True)
class Job:
    """One request on its way: what the client asked, who serves it, and under which names."""

    path: str
    body: ClientBody
    pair: Pair
    transfer_id: str
    leg_headers: Mapping[str, str]
    answer_headers: Mapping[str, str]
    arrived: float

    def __str__(self) -> str:
        return f"{self.transfer_id} ({self.pair.prefill.http_address} to {self.pair.decode.http_address})"


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg came to nothing: `said` is the instance's own answer, or how its connection failed."""

    side: InstanceType
    said: Answer | PeerError


@dataclass(frozen=True, slots=True)
class Begun:
    """A stream of the decode leg whose first bytes are in."""

    content_type: str
    first: bytes
    rest: AsyncIterator[bytes]


class Legs:
    """Runs the two legs of requests over `upstream`."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    @asynccontextmanager
    async def open(self, job: Job) -> AsyncIterator[Answer | Begun | LegFailure]:
        """Run both legs until decode has answered, or its stream has begun, or one of them has failed."""
        async with AsyncExitStack() as kept:
            in_push = job.pair.transfer_mode is TransferMode.WRITE
            yield await (self._push(job, kept) if in_push else self._pull(job, kept))

    async def _pull(self, job: Job, kept: AsyncExitStack) -> Answer | Begun | LegFailure:
        answer = await self._prefill(job, prefill_body(job.body, job.transfer_id))
        if isinstance(answer, LegFailure):
            return answer
        try:
            params = transfer_params(answer.content)
        except PeerError as error:
            return LegFailure(InstanceType.PREFILL, error)
        return await self._decode(job, decode_body(job.body, params), kept)

    async def _push(self, job: Job, kept: AsyncExitStack) -> Answer | Begun | LegFailure:
        source, target = job.pair.prefill.registration, job.pair.decode.registration
        first_body = prefill_body(job.body, job.transfer_id, target.tp_size)
        second_body = decode_body(job.body, push_params(job.transfer_id, source.tp_size))
        prefill = await kept.enter_async_context(_running(self._prefill(job, first_body)))
        async with _running(self._decode(job, second_body, kept)) as decode:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and isinstance(failure := prefill.result(), LegFailure) and not _has_spoken(decode):
                return failure
            await asyncio.wait((decode,))
            return decode.result()

    async def _prefill(self, job: Job, body: bytes) -> Answer | LegFailure:
        try:
            answer = await self._upstream.prefill(job.pair.prefill, job.path, body, job.leg_headers)
        except PeerError as error:
            return LegFailure(InstanceType.PREFILL, error)
        return answer if answer.is_ok else LegFailure(InstanceType.PREFILL, answer)

    async def _decode(self, job: Job, body: bytes, kept: AsyncExitStack) -> Answer | Begun | LegFailure:
        try:
            async with AsyncExitStack() as mine:
                streamed = await mine.enter_async_context(
                    self._upstream.decode(job.pair.decode, job.path, body, job.leg_headers)
                )
                begun = await _first_word(streamed)
                kept.push_async_exit(mine.pop_all())
        except PeerError as error:
            return LegFailure(InstanceType.DECODE, error)
        if isinstance(begun, Answer) and not begun.is_ok:
            return LegFailure(InstanceType.DECODE, begun)
        return begun


async def _first_word(streamed: StreamedAnswer) -> Answer | Begun:
    if not streamed.is_event_stream:
        return await streamed.read()
    chunks = streamed.chunks()
    return Begun(streamed.content_type, await anext(chunks, b""), chunks)


def _has_spoken(decode: asyncio.Task[Answer | Begun | LegFailure]) -> bool:
    """Whether decode has answered, or refused the request by itself; any other failure may follow from that of prefill."""
    if not decode.done():
        return False
    match decode.result():
        case LegFailure(said=Answer(status=status)):
            return status in _REFUSALS
        case LegFailure():
            return False
    return True


@asynccontextmanager
async def _running(leg: Coroutine[Any, Any, _Result]) -> AsyncIterator[asyncio.Task[_Result]]:
    """A task for `leg`, which is over when this is left: what still runs is cancelled, and that closes its connection."""
    task = asyncio.create_task(leg)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))

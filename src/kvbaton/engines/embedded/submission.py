"""The choices of one API request: submits them, brings their outputs into the event loop, cancels the unfinished."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.http_errors import HttpError
from kvbaton.engines.embedded.request import EngineBusy, FinishReason, FromSource, GenerationRequest, Sink, TokenOutput
from kvbaton.engines.embedded.seams import ModelInfo
from kvbaton.engines.embedded.stats import EngineStats

__all__ = ["EngineClient", "Submission"]

_logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """An engine as the HTTP server sees it; its methods may be called from any thread and do not wait."""

    @property
    def loaded(self) -> ModelInfo:
        """The model it runs."""

    def stats(self) -> EngineStats:
        """A snapshot of its counters."""

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Start `request`; its outputs go to `sink`."""

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a running request."""

    def decline(self, request: GenerationRequest, reason: str) -> None:
        """A request was refused before it ran: notify its source, if it has one."""


@dataclass(eq=False, repr=False)
class Submission:
    """Owns its requests in the engine: entering submits all or none, leaving cancels those that have not finished.

    Sources of requests that could not be submitted are notified at once, so that they release their blocks.
    """

    _engine: EngineClient
    _requests: tuple[GenerationRequest, ...]
    progress_timeout_s: float
    show_details: bool = True

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        most_outputs = sum(request.sampling.max_tokens + 1 for request in self._requests)
        self._outputs: asyncio.Queue[tuple[int, TokenOutput]] = asyncio.Queue(most_outputs)
        self._running: set[int] = set()
        self._finished: set[int] = set()

    def __enter__(self) -> Submission:
        for index, request in enumerate(self._requests):
            self._running.add(index)
            try:
                self._engine.submit(request, self._sink(index))
            except BaseException as error:
                self._running.discard(index)
                self._cancel_running()
                for declined in self._requests[index:]:
                    self._engine.decline(declined, str(error))
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_running()

    def finished(self) -> list[RequestId]:
        """The requests that have ended well, also those whose last output was not taken with `next` yet."""
        return [self._requests[index].request_id for index in sorted(self._finished)]

    async def next(self) -> tuple[int, TokenOutput]:
        """The next output and the index of its choice; raises HttpError when a choice failed or nothing moves any more."""
        try:
            async with asyncio.timeout(self.progress_timeout_s):
                index, output = await self._outputs.get()
        except TimeoutError as error:
            message = f"the engine has produced nothing for {self.progress_timeout_s:g} s; the request was cancelled"
            raise HttpError(504, "timeout", message) from error
        self._raise_if_failed(index, output)
        return index, output

    def _raise_if_failed(self, index: int, output: TokenOutput) -> None:
        if output.finish_reason is FinishReason.CROWDED_OUT:
            raise EngineBusy(output.error)
        if output.finish_reason is FinishReason.CANCELLED:
            raise HttpError(503, "cancelled", output.error or "the engine cancelled the request; send it again", retry=True)
        if output.finish_reason is FinishReason.ERROR:
            handoff = self._requests[index].handoff
            if isinstance(handoff, FromSource):
                message = f"hand-off {handoff.key} from {handoff.source} failed: {output.error or 'no reason given'}"
                if not self.show_details:
                    # The reason names addresses and incarnations of peers.
                    _logger.warning("%s", message)
                    message = "the hand-off failed; the log of the decode instance has the reason"
                raise HttpError(502, "handoff_failed", message)
            raise HttpError(500, "server_error", output.error or "the engine failed and gave no reason")

    def _sink(self, index: int) -> Sink:
        def take(output: TokenOutput) -> None:
            if output.finish_reason is not None:
                self._running.discard(index)
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._finished.add(index)
            try:
                self._loop.call_soon_threadsafe(self._put, index, output)
            except RuntimeError:
                _logger.debug("output of %s dropped: the event loop is closed", self._requests[index].request_id)

        return take

    def _put(self, index: int, output: TokenOutput) -> None:
        try:
            self._outputs.put_nowait((index, output))
        except asyncio.QueueFull:
            _logger.error("bug: the engine sends more outputs for %s than it may", self._requests[index].request_id)

    def _cancel_running(self) -> None:
        for index in sorted(self._running):
            self._engine.cancel(self._requests[index].request_id)
        self._running.clear()

"""One try of a request on one pair: its call to the prefill instance and its call to the decode instance.

In pull prefill is called first, and what it answers goes to decode; in push and between SGLang instances both are called at
once. The client is served by decode alone: nothing waits for prefill's answer. Only when prefill fails before decode's first
byte is decode's call closed, because its cache would never arrive. An instance aborts a request whose call is closed.

Prefill may fail *because* decode refused. Both answers then come within milliseconds of each other, and the refusal is what
the client must see: so the verdict on a prefill that answers with a server error waits for `_VERDICT_S`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from kvbaton.discovery.messages import InstanceType, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.errors import PeerError
from kvbaton.router.choosing import Seats
from kvbaton.router.http.call import Call, Caller
from kvbaton.router.http.messages import InstanceAnswer, request_head
from kvbaton.router.http.upstream import Upstream
from kvbaton.router.pair_request import PairRequest
from kvbaton.router.settings import RouterSettings

__all__ = ["Attempt", "Failure", "AttemptOwner"]

# Decode's refusal reaches the router right after the prefill failure that it caused; 20 ms covers a busy event loop.
_VERDICT_S = 0.02
_AFTERMATH_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """One side failed: `cause` is the instance's own answer, or how its connection failed."""

    side: InstanceType
    instance: Instance
    cause: InstanceAnswer | PeerError
    was_reached: bool = True
    was_cut: bool = False
    """Whether its connection broke after the request was sent: the instance may have died of it."""
    was_kept: bool = False
    """Whether a kept connection broke before a byte came: the instance may have closed it as idle at that very moment."""


class AttemptOwner(Protocol):
    """Makes attempts, and is notified of their outcome."""

    def decode_answered(self, answer: InstanceAnswer) -> None:
        """Decode has answered, completely and well. The attempt is over."""

    def decode_streamed(self, content_type: str, piece: bytes) -> None:
        """A piece of decode's stream."""

    def decode_ended(self) -> None:
        """Decode's stream is complete. The attempt is over."""

    def attempt_failed(self, failure: Failure) -> None:
        """One side has failed, and the other was given up. The attempt is over."""


@dataclass(slots=True, eq=False, repr=False)
class Attempt(Caller):
    """Runs its pair request in `_seats`, which it leaves as soon as each side is done."""

    _owner: AttemptOwner
    _upstream: Upstream
    _settings: RouterSettings
    _pair_request: PairRequest
    _seats: Seats
    _prefill: Call | None = None
    _decode: Call | None = None
    _verdict: asyncio.TimerHandle | None = None
    _has_begun: bool = False
    _may_hold: bool = False
    """Whether prefill may hold a cache that only a decode which goes on would fetch."""
    _is_paused: bool = False
    _is_over: bool = False

    def start(self) -> None:
        """Call the instances; in pull, only prefill."""
        job = self._pair_request
        if job.pair.prefill is None:
            self._call_decode(job.local_payload())
        elif job.pair.is_bootstrap:
            to_prefill, to_decode = job.at_once_payloads()
            self._call_prefill(to_prefill)
            self._call_decode(to_decode)
        elif job.pair.transfer_mode is TransferMode.WRITE:
            self._may_hold = True
            self._call_prefill(job.prefill_payload())
            self._call_decode(job.push_payload())
        else:
            self._call_prefill(job.prefill_payload())

    def close(self) -> None:
        """Close both calls, now."""
        self._is_over = True
        if self._verdict is not None:
            self._verdict.cancel()
        prefill, decode, self._prefill, self._decode = self._prefill, self._decode, None, None
        for call in (prefill, decode):
            if call is not None:
                call.close()
        self._seats.leave_prefill()
        self._seats.leave_decode()
        self._release_caches()

    def pause(self) -> None:
        """Take no more of decode's stream for now, or of the one that is to come."""
        self._is_paused = True
        if self._decode is not None:
            self._decode.pause()

    def resume(self) -> None:
        """Go on with decode's stream."""
        self._is_paused = False
        if self._decode is not None:
            self._decode.resume()

    def call_answered(self, call: Call, answer: InstanceAnswer) -> None:
        """An answer is complete."""
        if call is self._prefill:
            self._prefill = None
            self._seats.leave_prefill()
            self._on_prefill(answer)
        elif answer.is_ok:
            self._finish()
            self._owner.decode_answered(answer)
        else:
            self._fail(InstanceType.DECODE, answer)

    def call_data(self, call: Call, piece: bytes) -> None:
        """A piece of a stream; what prefill streams is of no use."""
        if call is self._decode:
            self._has_begun = True
            self._may_hold = False
            self._owner.decode_streamed(call.content_type, piece)

    def call_ended(self, call: Call) -> None:
        """A stream is complete."""
        if call is self._prefill:
            self._prefill = None
            self._seats.leave_prefill()
            return
        self._finish()
        self._owner.decode_ended()

    def call_lost(self, call: Call, error: PeerError) -> None:
        """A call came to nothing."""
        if call is self._decode:
            self._fail(InstanceType.DECODE, error, call)
            return
        self._prefill = None
        self._seats.leave_prefill()
        if not self._has_begun and not self._is_over:
            self._fail(InstanceType.PREFILL, error, call)

    def _on_prefill(self, answer: InstanceAnswer) -> None:
        if self._is_over or self._has_begun:
            return
        if not answer.is_ok:
            failure = self._failure(InstanceType.PREFILL, answer)
            if self._decode is not None and answer.status >= 500:
                loop = asyncio.get_running_loop()
                self._verdict = loop.call_later(_VERDICT_S, self._pronounce, failure)
            else:
                self._give_up(failure)
        elif self._decode is None:
            self._may_hold = True
            try:
                payload = self._pair_request.pull_payload(answer.content)
            except PeerError as error:
                self._give_up(self._failure(InstanceType.PREFILL, error))
                return
            self._call_decode(payload)

    def _release_caches(self) -> None:
        """Have prefill release what it holds, in push also decode what it expects; an instance without that route ignores it.

        Closing a call aborts a request that still runs. A short prefill may have finished, and its source then waits for a
        target that was aborted before the two had met: only this message reaches it before `defer_timeout`.
        """
        pair = self._pair_request.pair
        if not self._may_hold or pair.prefill is None:
            return
        self._may_hold = False
        path = f"/handoffs/{self._pair_request.transfer_id}"
        deadline = self._upstream.clock() + _AFTERMATH_S
        for instance in (pair.prefill, pair.decode) if pair.transfer_mode is TransferMode.WRITE else (pair.prefill,):
            payload = request_head("DELETE", path, instance.http_address, 0, self._pair_request.lines)
            self._upstream.start(Call(Caller(), instance, payload, deadline=deadline))

    def _pronounce(self, failure: Failure) -> None:
        if not self._is_over and not self._has_begun:
            self._give_up(failure)

    def _call_prefill(self, payload: bytes) -> None:
        instance = self._pair_request.pair.prefill
        assert instance is not None  # noqa: S101
        settings, deadline = self._settings, self._upstream.clock() + self._settings.prefill_timeout_s
        may_stream = self._pair_request.pair.prefill_bootstraps
        self._prefill = Call(self, instance, payload, deadline, None, may_stream, settings.max_answer_bytes)
        self._upstream.start(self._prefill)

    def _call_decode(self, payload: bytes) -> None:
        instance, settings = self._pair_request.pair.decode, self._settings
        idle_s = settings.decode_timeout_s
        may_stream = True
        self._decode = Call(
            self, instance, payload, self._upstream.clock() + idle_s, idle_s, may_stream, settings.max_answer_bytes
        )
        if self._is_paused:
            self._decode.pause()
        self._upstream.start(self._decode)

    def _finish(self) -> None:
        """Decode is done; prefill, which then is nearly done, is not interrupted."""
        self._is_over = True
        self._may_hold = False
        self._decode = None
        self._seats.leave_decode()
        if self._prefill is not None and not self._prefill.is_over:
            self._prefill.deadline = min(self._prefill.deadline, self._upstream.clock() + _AFTERMATH_S)

    def _fail(self, side: InstanceType, cause: InstanceAnswer | PeerError, call: Call | None = None) -> None:
        if not self._is_over:
            self._give_up(self._failure(side, cause, call))

    def _failure(self, side: InstanceType, cause: InstanceAnswer | PeerError, call: Call | None = None) -> Failure:
        instance = self._pair_request.pair.prefill if side is InstanceType.PREFILL else self._pair_request.pair.decode
        assert instance is not None  # noqa: S101
        if call is None:
            return Failure(side, instance, cause)
        was_kept = call.was_kept and not call.has_received and not call.is_stream
        return Failure(side, instance, cause, call.was_sent, call.was_cut, was_kept)

    def _give_up(self, failure: Failure) -> None:
        self.close()
        self._owner.attempt_failed(failure)

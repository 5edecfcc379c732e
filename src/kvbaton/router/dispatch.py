"""Completion requests from their arrival to their end: admitted, seated, tried on a pair (`attempt.py`), and passed on.

Everything that a request has belongs to its `Exchange`. When the client goes away, the exchange closes both calls at once.
Until the first byte for the client, a failure that another instance may not have is tried again with new ids, on other
instances, a bounded number of times, unless the instance died and the request may be the cause (`deaths.py`); afterwards it
is sent as an event of the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvbaton.discovery.messages import Dispatch, InstanceType, TransferMode
from kvbaton.discovery.registry import Registry
from kvbaton.errors import BadRequest, PeerError
from kvbaton.observe.trace_context import TraceContext, parse_traceparent
from kvbaton.router.answers import error_event, error_response
from kvbaton.router.attempt import Attempt, Failure
from kvbaton.router.bodies import ClientBody, parse_body
from kvbaton.router.choosing import Chooser, Missing, SeatRequest, Seats
from kvbaton.router.deaths import MOST_DEATHS, DeathBook
from kvbaton.router.http.client_connection import ClientConnection
from kvbaton.router.http.messages import HttpRequest, InstanceAnswer, Response, head_lines, is_header_value
from kvbaton.router.http.upstream import Upstream
from kvbaton.router.json_scan import is_simple, scan
from kvbaton.router.metrics import RouterMetrics
from kvbaton.router.pair_request import Digits, PairRequest, new_pair_request
from kvbaton.router.pair_template import InstanceLines, client_lines
from kvbaton.router.policy import RouteRequest
from kvbaton.router.request_queue import ClientShare, QueuedRequest, RequestQueue
from kvbaton.router.routed import RoutedTransfers
from kvbaton.router.settings import RouterSettings
from kvbaton.router.shown import hide_details, hide_in_events
from kvbaton.router.tracing import RequestSpan, RequestTracing
from kvbaton.wire.log_limit import LogLimit, shown

__all__ = ["BOOTSTRAP_PATHS", "COMPLETION_PATHS", "Dispatcher", "Exchange"]

_logger = logging.getLogger(__name__)

COMPLETION_PATHS = frozenset(("/v1/completions", "/v1/chat/completions", "/generate"))
"""What is served by a pair of instances."""
BOOTSTRAP_PATHS = frozenset(("/generate",))
"""What only SGLang instances serve."""

_RETRY_AFTER = {"Retry-After": "2"}
# OpenAI's client libraries retry a 5xx by themselves, unless this header forbids it.
_NO_RETRY = {"X-Should-Retry": "false"}
# An instance that is stopped sends its goodbye before it closes connections. When one dies, a child of it sends the goodbye,
# which this process may read just before it notices the closed connection.
_GOODBYE_AHEAD_S = 0.02
_MAX_ECHO = 256
_MOST_SHARES = 4096
_EVENT_END = b"\n\n"
_LINE_END = b"\n"
_ID_BYTES = 64
_MOST_HELD_BYTES = 64 * 1024
_TRACE_HEADERS = frozenset((b"traceparent", b"tracestate"))
# Other statuses (4xx, 501) would be the same on every instance.
_TRIED_AGAIN = frozenset((500, 502, 503, 504))


@dataclass(eq=False, repr=False)
class Dispatcher:
    """Serves completion requests; what all of them share."""

    settings: RouterSettings
    registry: Registry
    chooser: Chooser
    upstream: Upstream
    metrics: RouterMetrics
    routed: RoutedTransfers
    clock: Callable[[], float] = time.monotonic
    tracing: RequestTracing | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self.chooser.on_freed = self.wake_waiting
        self.digits = Digits()
        self.deaths = DeathBook()
        self.queue = RequestQueue(settings.queue_limit, self.may_run)
        self._has_keys = bool(settings.api_keys)
        self.shows_details = settings.shows_details
        self._shares: dict[bytes, ClientShare] = {}
        self._in_flight = 0
        self._limit = LogLimit()
        self._is_waking = False
        names = [
            name.lower() for name in settings.forward_headers if not (settings.api_keys and name.lower() == "authorization")
        ]
        self._forwarded = tuple(name.encode() for name in names)
        self._forwarded_names = frozenset(self._forwarded)
        self._instance_lines = InstanceLines(settings)
        self._replaces_authorization = settings.instance_api_key is not None

    def serve(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer one completion request, now or later."""
        self.metrics.add("in_flight_requests")
        key = request.headers.get(b"authorization", b"") if self._has_keys else connection.peer
        share = self._shares.get(key)
        if share is None:
            share = self._new_share(key)
        Exchange(self, connection, request, share, self.clock()).begin()

    def admit(self, share: ClientShare, sequences: int) -> str | None:
        """Count the sequences of a request, until `finished`; or why they are too many."""
        settings = self.settings
        if sequences > settings.max_sequences:
            return f"the request is for {sequences} sequences (prompts times n), and the limit is {settings.max_sequences}"
        # A client that has nothing in flight is not turned away because of what the others have.
        if self._in_flight + sequences > settings.max_in_flight and share.in_flight:
            return f"{self._in_flight} sequences are in flight, and the limit is {settings.max_in_flight}; try again"
        self._in_flight += sequences
        share.in_flight += sequences
        return None

    def may_run(self, request: QueuedRequest) -> bool:
        """Whether the client's share of the instances has room for the request; one that has none running may always run."""
        running = request.share.running
        return not running or running + request.sequences <= self.chooser.client_limit

    def finished(self, share: ClientShare, sequences: int, was_running: bool) -> None:
        """An exchange is over; 0 sequences when it was not admitted."""
        self._in_flight -= sequences
        share.in_flight -= sequences
        if was_running:
            share.running -= sequences
        self.metrics.add("in_flight_requests", -1)

    def _new_share(self, key: bytes) -> ClientShare:
        if len(self._shares) >= _MOST_SHARES:
            self._shares = {name: share for name, share in self._shares.items() if share.in_flight}
        share = self._shares[key] = ClientShare(client_lines(self.settings, key))
        return share

    def wake_waiting(self) -> None:
        """Let waiting requests go on soon, when a seat was left."""
        if self.queue.deadlines and self.chooser.freed and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def sweep(self, now: float) -> None:
        """Take in changes of instances, refuse requests that waited too long, and look whether other processes left seats."""
        self.chooser.refresh(now)
        self.queue.sweep(now)
        self.queue.wake(now)

    def read_trace(self, request: HttpRequest) -> TraceContext | None:
        """The trace of the client. A header that is malformed is counted, and no instance sees it; the request goes on."""
        header = request.headers.get(b"traceparent")
        if header is None:
            return None
        context = parse_traceparent(header)
        if context is None:
            self.metrics.add("malformed_traces")
        return context

    def forwarded_lines(self, request: HttpRequest, without: frozenset[bytes] = frozenset()) -> bytes:
        """The client's headers that instances may see, but those in `without`, as lines."""
        headers = request.headers
        if self._forwarded_names.isdisjoint(headers):
            return self._instance_lines.now()
        found = [b"%b: %b\r\n" % (name, headers[name]) for name in self._forwarded if name in headers and name not in without]
        if self._replaces_authorization:
            found = [line for line in found if not line.startswith(b"authorization:")]
        return self._instance_lines.now() + b"".join(found)

    def log_failure(self, job: PairRequest, failure: Failure, text: str) -> None:
        """Log a failure, but not the same one for every request."""
        held_back = self._limit.allow((failure.side, failure.instance.http_address), self.clock())
        if held_back is not None:
            more = f" ({held_back} similar lines held back)" if held_back else ""
            _logger.warning("%s: %s%s", job, shown(text), more)

    def _wake(self) -> None:
        self._is_waking = False
        self.chooser.freed = False
        self.queue.wake(self.clock())


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One client's request and everything it has open."""

    _dispatcher: Dispatcher
    _connection: ClientConnection
    _request: HttpRequest
    share: ClientShare
    _arrived: float
    _body: ClientBody | None = None
    _attempt: Attempt | None = None
    _pair_request: PairRequest | None = None
    _failure: Failure | None = None
    _avoid: frozenset[str] = frozenset()
    _shun: frozenset[str] = frozenset()
    _attempts: int = 0
    _stale_retries: int = 0
    _answer_lines: bytes = b""
    _held: bytes = b""
    """The start of a line of decode's stream: the id in it may be cut in the middle."""
    _last: bytes = _EVENT_END
    _id_prefix: bytes = b""
    """What instances put before the id of their answers: the addresses of both."""
    _rewrites: bool = False
    _has_begun: bool = False
    sequences: int = 0
    """How many sequences it is counted for; 0 until it is admitted."""
    _is_running: bool = False
    _is_waiting: bool = False
    _is_held_back: bool = False
    _is_over: bool = False
    _span: RequestSpan | None = None
    _has_bad_trace: bool = False

    def begin(self) -> None:
        """Read the request and find it a pair."""
        dispatcher, request = self._dispatcher, self._request
        if dispatcher.tracing is not None or b"traceparent" in request.headers:
            self._begin_trace()
        self._connection.host(self)
        if dispatcher.deaths.has_any and self._is_suspected():
            return
        body, settings = request.body, dispatcher.settings
        if is_simple(body, settings.max_json_depth, settings.max_json_keys):
            self._parse()
        else:
            self._scan_on(scan(body, settings.max_json_depth, settings.max_json_keys))

    def _begin_trace(self) -> None:
        tracing, context = self._dispatcher.tracing, self._dispatcher.read_trace(self._request)
        self._has_bad_trace = context is None and b"traceparent" in self._request.headers
        self._span = None if tracing is None else tracing.begin(context, self._request.path)

    def _scan_on(self, slices: Iterator[None]) -> None:
        """Look at one slice of a body, and let the event loop run before the next."""
        if self._is_over:
            return
        try:
            next(slices)
        except StopIteration:
            self._parse()
        except BadRequest as error:
            self._refuse(error)
        else:
            asyncio.get_running_loop().call_soon(self._scan_on, slices)

    def _parse(self) -> None:
        dispatcher = self._dispatcher
        try:
            self._body = parse_body(self._request.body)
            sequences = self._body.sequences()
        except BadRequest as error:
            self._refuse(error)
            return
        problem = dispatcher.admit(self.share, sequences)
        if problem is None:
            self.sequences = sequences
            self._place(self._arrived)
        elif sequences > dispatcher.settings.max_sequences:
            self._send(error_response(400, problem, code="too_many_sequences"))
        else:
            self._send(error_response(503, problem, code="overloaded", headers=_RETRY_AFTER))

    def client_gone(self) -> None:
        """Close whatever is open."""
        if not self._is_over:
            self._dispatcher.metrics.count_request(self._request.path, "client_closed")
            self._close()

    def client_pauses(self) -> None:
        """Hold decode back while the client catches up."""
        self._is_held_back = True
        if self._attempt is not None:
            self._attempt.pause()

    def client_resumes(self) -> None:
        """Go on."""
        self._is_held_back = False
        if self._attempt is not None:
            self._attempt.resume()

    def try_again(self, now: float) -> bool:
        """From the queue: look for seats again."""
        return self._place(now)

    def waited_too_long(self) -> None:
        """From the queue: its deadline has passed."""
        self._is_waiting = False
        dispatcher = self._dispatcher
        dispatcher.metrics.add("queued_requests", -1)
        dispatcher.metrics.add("queue_timeouts")
        message = f"no instance was free within {dispatcher.settings.queue_timeout_s:g} s; try again"
        self._send(error_response(503, message, code="overloaded", headers=_RETRY_AFTER))

    def crowded_out(self) -> None:
        """From the queue: another client, which has less in it, has its place."""
        self._is_waiting = False
        self._dispatcher.metrics.add("queued_requests", -1)
        self._refuse_full_queue("the queue is full, and no client has more sequences in it than this one; try again")

    def _refuse_full_queue(self, message: str) -> None:
        self._dispatcher.metrics.add("queue_refusals")
        self._send(error_response(429, message, code="overloaded", headers=_RETRY_AFTER))

    def decode_answered(self, answer: InstanceAnswer) -> None:
        """Pass a whole answer on."""
        dispatcher = self._dispatcher
        dispatcher.metrics.see_first_byte(dispatcher.clock() - self._arrived)
        self._report_reached()
        if dispatcher.deaths.has_any:
            dispatcher.deaths.clear(self._request.path, self._request.body)
        self._pass_on(answer)

    def decode_streamed(self, content_type: str, piece: bytes) -> None:
        """Pass a piece of a stream on, as it came but for what clients are not shown."""
        if self._has_begun:
            self._last = piece = self._rewritten(piece) if self._rewrites else piece
            self._connection.stream(piece)
            return
        if self._rewrites:
            # All events of a stream have the same id: where that of the first is not made of the addresses, none is.
            start = piece[:_ID_BYTES]
            is_other_id = len(start) == _ID_BYTES and b'"id":"' in start and b"___" not in start
            self._rewrites = not (self._dispatcher.shows_details and is_other_id)
            piece = self._rewritten(piece) if self._rewrites else piece
        self._last = piece
        self._has_begun = True
        self._dispatcher.metrics.see_first_byte(self._dispatcher.clock() - self._arrived)
        self._report_reached()
        self._connection.begin_stream(content_type, self._answer_lines, piece)

    def decode_ended(self) -> None:
        """End the stream."""
        if self._held or not self._has_begun:
            held, self._held = self._held, b""
            self.decode_streamed("text/event-stream", held + _LINE_END if held else b"")
        self._attempt = None
        if self._dispatcher.deaths.has_any:
            self._dispatcher.deaths.clear(self._request.path, self._request.body)
        self._finish()
        self._connection.end_stream()

    def attempt_failed(self, failure: Failure) -> None:
        """Send an error event in mid-stream, try again, or answer with the failure."""
        self._attempt = None
        self._note(failure)
        if self._span is not None:
            self._span.fail_attempt(f"{failure.side.word} {failure.cause}")
        if self._has_begun:
            gap = b"" if self._last.endswith(_EVENT_END) else _EVENT_END
            message = self._shown(f"{failure.cause}; send the request again")
            self._connection.stream(gap + error_event(message, "decode_failed"))
            self._finish()
            self._connection.end_stream(is_whole=False)
        elif failure.was_cut:
            failed_at = self._dispatcher.clock()
            self._dispatcher.upstream.probe(
                failure.instance.http_address, lambda listens: self._probed(failure, failed_at, listens)
            )
        else:
            self._retry_or_answer(failure)

    def _retry_or_answer(self, failure: Failure) -> None:
        if not self._may_try_again(failure) or not self._place(self._dispatcher.clock()):
            self._answer_failure(failure)

    def _probed(self, failure: Failure, failed_at: float, listens: bool) -> None:
        """Try again, unless the instance died while it had the request; one that was stopped left before that."""
        if self._is_over:
            return
        registry, instance = self._dispatcher.registry, failure.instance
        left_at = registry.left_at(instance)
        was_stopped = left_at is not None and failed_at - left_at >= _GOODBYE_AHEAD_S
        if was_stopped or (listens and left_at is None and registry.is_registered(instance)):
            self._retry_or_answer(failure)
            return
        self._dispatcher.metrics.add("instance_deaths")
        count = self._dispatcher.deaths.note(self._request.path, self._request.body, failed_at)
        message = (
            f"{instance.name} died while it served this request, which is not tried on another instance because it may be the"
            f" cause ({count} of {MOST_DEATHS} deaths after which it is refused); see the instance's log"
        )
        self._send(error_response(502, self._shown(message), code="instance_died", headers=_NO_RETRY))

    def _is_suspected(self) -> bool:
        """Refuse a request that several instances died of; whether it was one."""
        request, dispatcher = self._request, self._dispatcher
        count = dispatcher.deaths.count(request.path, request.body, self._arrived)
        if count < MOST_DEATHS:
            return False
        dispatcher.metrics.add("suspected_requests")
        message = (
            f"{count} instances died while they served a request with this very body, so it is refused for a while; see the"
            " instances' logs"
        )
        self._send(error_response(422, message, code="instances_died", headers=_NO_RETRY))
        return True

    def _place(self, now: float) -> bool:
        """Take seats and start, or wait for some, or answer that there are none. False when a waiting request still waits.

        A field that is first decoded here, and is malformed, is answered here too: the queue must not see the error.
        """
        try:
            return self._find_place(now)
        except BadRequest as error:
            self._leave_queue()
            self._refuse(error)
            return True

    def _find_place(self, now: float) -> bool:
        dispatcher = self._dispatcher
        is_new = not self._is_running and not self._is_waiting
        if is_new and self.share.running + self.sequences > dispatcher.chooser.client_limit and not dispatcher.may_run(self):
            return self._wait("this client has as many sequences at the instances as one may have (max_per_client)", now)
        found = dispatcher.chooser.choose(self._seat_request(), now)
        if isinstance(found, Seats):
            if self._is_waiting:
                self._leave_queue()
            self._start(found)
            return True
        if isinstance(found, Missing):
            if self._failure is not None and not self._is_waiting:
                return False
            self._leave_queue()
            self._send(error_response(503, found.reason, code="no_instance", headers=_RETRY_AFTER))
            return True
        return self._wait(f"every {found.side.word} instance has as many sequences as it takes", now)

    def _seat_request(self) -> SeatRequest:
        assert self._body is not None  # noqa: S101
        limit = self._dispatcher.settings.local_prefill_chars
        is_local = "use_beam_search" in self._body.fields and self._body.searches_beams()
        if limit and not is_local:
            chars = self._body.prompt_chars()
            is_local = chars is not None and chars < limit
        dispatch = Dispatch.BOOTSTRAP if self._request.path in BOOTSTRAP_PATHS else None
        session = self._request.header(b"x-session-id") if b"x-session-id" in self._request.headers else None
        return SeatRequest(
            RouteRequest(self._body.fields, session),
            is_local and dispatch is None,
            self._avoid,
            self._shun,
            dispatch,
            self.sequences,
        )

    def _wait(self, reason: str, now: float) -> bool:
        if self._is_waiting:
            return False
        dispatcher = self._dispatcher
        assert self._body is not None  # noqa: S101
        if dispatcher.queue.add(self, self._body.priority(), now + dispatcher.settings.queue_timeout_s):
            self._is_waiting = True
            dispatcher.metrics.add("queued_requests")
        else:
            self._refuse_full_queue(f"{reason}, and the queue is full; try again")
        return True

    def _leave_queue(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._dispatcher.queue.discard(self)
            self._dispatcher.metrics.add("queued_requests", -1)

    def _start(self, seats: Seats) -> None:
        dispatcher, request = self._dispatcher, self._request
        assert self._body is not None  # noqa: S101
        if not self._is_running:
            self._is_running = True
            self.share.running += self.sequences
        self._attempts += 1
        if self._attempts > 1:
            dispatcher.metrics.add("retries")
        if seats.pair.prefill is None:
            dispatcher.metrics.add("local_prefills")
        is_plain = self._span is None and not self._has_bad_trace
        forwarded = (dispatcher.forwarded_lines(request) if is_plain else self._forwarded()) + self.share.lines
        try:
            job = self._pair_request = new_pair_request(request.path, self._body, seats.pair, forwarded, dispatcher.digits)
            if self._span is not None:
                self._span.describe_attempt(job)
            self._id_prefix = job.pair.template.id_prefix
            self._rewrites = bool(self._id_prefix) or not dispatcher.shows_details
            self._answer_lines = job.answer_lines(self._client_request_id(), dispatcher.shows_details)
            dispatcher.routed.add(job.transfer_id, seats.pair, self._arrived)
            self._attempt = Attempt(self, dispatcher.upstream, dispatcher.settings, job, seats)
            if self._is_held_back:
                self._attempt.pause()
            self._attempt.start()
        except BadRequest:
            self._attempt = None
            seats.leave()
            raise

    def _forwarded(self) -> bytes:
        """The client's headers that instances of a traced attempt see; where there are spans, the attempt's is their parent."""
        dispatcher, request = self._dispatcher, self._request
        if self._has_bad_trace:
            lines = dispatcher.forwarded_lines(request, _TRACE_HEADERS)
        else:
            lines = dispatcher.forwarded_lines(request, frozenset((b"traceparent",)))
        return lines if self._span is None else lines + self._span.begin_attempt()

    def _client_request_id(self) -> str:
        if b"x-request-id" not in self._request.headers:
            return self._dispatcher.digits.take()
        given = self._request.header(b"x-request-id")
        return given[:_MAX_ECHO] if given is not None and is_header_value(given) else self._dispatcher.digits.take()

    def _may_try_again(self, failure: Failure) -> bool:
        self._failure = failure
        # The instance may have closed an idle connection just as the request was sent. That is not its failure, so it may be
        # tried again and counts as no attempt; once only, because it may also have died.
        if failure.was_kept and not self._stale_retries:
            self._stale_retries += 1
            return True
        if self._attempts - self._stale_retries >= self._dispatcher.settings.max_attempts:
            return False
        if isinstance(failure.cause, InstanceAnswer) and failure.cause.status not in _TRIED_AGAIN:
            return False
        self._avoid |= {failure.instance.http_address}
        pair = self._pair_request.pair if self._pair_request is not None else None
        is_push = pair is not None and pair.transfer_mode is TransferMode.WRITE
        if failure.side is InstanceType.DECODE and is_push and pair is not None and pair.prefill is not None:
            # In push decode may have failed because of its source, which the failure does not name.
            self._shun |= {pair.prefill.http_address}
        return True

    def _note(self, failure: Failure) -> None:
        dispatcher, side = self._dispatcher, failure.side
        dispatcher.metrics.add("prefill_failures" if side is InstanceType.PREFILL else "decode_failures")
        cause = failure.cause
        failed = f"failed: {cause}" if isinstance(cause, PeerError) else f"instance answered {cause.status}"
        assert self._pair_request is not None  # noqa: S101
        dispatcher.log_failure(self._pair_request, failure, f"{side.word} {failed}")
        if not failure.was_reached:
            aside_s = dispatcher.registry.report_lost(failure.instance, dispatcher.clock())
            if aside_s is not None:
                dispatcher.metrics.add("quarantines")
                _logger.warning("%s cannot be reached and is put aside for %g s", failure.instance.name, aside_s)

    def _report_reached(self) -> None:
        """Both instances of the pair have shown that they can be reached."""
        assert self._pair_request is not None  # noqa: S101
        pair = self._pair_request.pair
        if pair.decode.strikes:
            self._dispatcher.registry.report_reached(pair.decode)
        if pair.prefill is not None and pair.prefill.strikes:
            self._dispatcher.registry.report_reached(pair.prefill)

    def _answer_failure(self, failure: Failure) -> None:
        """The failure as the client sees it: what is its own fault keeps status and body, as does whatever decode answered."""
        side, cause = failure.side, failure.cause
        if isinstance(cause, InstanceAnswer) and (side is InstanceType.DECODE or 400 <= cause.status < 500):
            self._pass_on(cause)
            return
        if isinstance(cause, InstanceAnswer):
            text = cause.content[:500].decode(errors="replace")
            message = f"{failure.instance.name} answered {cause.status}: {text}"
        else:
            message = str(cause)
        self._send(error_response(502, self._shown(message), code=f"{side.word}_failed"))

    def _shown(self, message: str) -> str:
        """A message as clients may see it: without the addresses of instances where details are not shown."""
        pair = self._pair_request.pair if self._pair_request is not None else None
        for instance in (pair.prefill, pair.decode) if pair is not None and not self._dispatcher.shows_details else ():
            if instance is not None:
                message = message.replace(f" {instance.http_address}", "")
        return message

    def _rewritten(self, piece: bytes) -> bytes:
        """Whole lines of the stream without what clients are not shown; the rest is held until its line is complete."""
        if self._held or not piece.endswith(_LINE_END):
            piece = self._held + piece
            end = piece.rfind(_LINE_END) + 1 if len(piece) <= _MOST_HELD_BYTES else len(piece)
            piece, self._held = piece[:end], piece[end:]
        if self._id_prefix:
            piece = piece.replace(self._id_prefix, b"")
        return piece if self._dispatcher.shows_details else hide_in_events(piece)

    def _pass_on(self, answer: InstanceAnswer) -> None:
        self._attempt = None
        lines = self._answer_lines
        if answer.retry_after is not None and is_header_value(answer.retry_after):
            lines += head_lines({"Retry-After": answer.retry_after})
        content = answer.content.replace(self._id_prefix, b"") if self._id_prefix else answer.content
        if self._span is not None:
            self._span.answered(answer.status)
        if not self._dispatcher.shows_details:
            content = hide_details(content)
        self._finish()
        self._connection.send_raw(answer.status, answer.content_type, content, lines)

    def _refuse(self, error: BadRequest) -> None:
        self._send(error_response(400, str(error), code="bad_request", param=error.field))

    def _send(self, response: Response) -> None:
        lines = self._answer_lines + head_lines(response.headers)
        if self._span is not None:
            self._span.answered(response.status)
        self._finish()
        self._connection.send_raw(response.status, response.content_type, response.body, lines)

    def _close(self) -> None:
        self._leave_queue()
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._finish()

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._span is not None:
                self._span.end()
            self._dispatcher.finished(self.share, self.sequences, self._is_running)

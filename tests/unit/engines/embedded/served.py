"""A scripted engine and a client for it, so that the tests of the HTTP server need no model."""

from __future__ import annotations

import asyncio
import io
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp import web

from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation, RequestId
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.request import FinishReason, GenerationRequest, RequestRecord, Sink, TokenOutput
from kvbaton.engines.embedded.server import Role, make_app, start_server
from kvbaton.engines.embedded.settings import DEFAULT_HTTP, HttpSettings
from kvbaton.engines.embedded.stats import EngineStats
from kvbaton.engines.embedded.submission import EngineClient
from kvbaton.engines.handoff_params import HandoffInfo
from kvbaton.observe.timelines import Timelines

CONTEXT = 64
VOCAB = 256
MODEL = "tiny"
INFO = HandoffInfo(ControlAddress.of("127.0.0.1", 6301), Incarnation("inc-p"))
DEADLINE_S = 20.0
NO_TRUST = Trust()

Result = TypeVar("Result")
Script = Callable[[GenerationRequest], Iterable[TokenOutput]]


class CharTokenizer:
    """One token per character; remembers whether special tokens were asked for."""

    def __init__(self) -> None:
        self.added_special: list[bool] = []
        self.longest_token_bytes = 4

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        self.added_special.append(add_special_tokens)
        return [ord(c) % VOCAB for c in text]

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<>"


@dataclass(frozen=True)
class FakeModel:
    config: ModelConfig
    tokenizer: CharTokenizer
    name: str = "fake"
    fingerprint: str = "f00d"


def alphabet(request: GenerationRequest) -> Iterable[TokenOutput]:
    """Say a, b, c, … until max_tokens, the finish reason on the last token."""
    last = request.sampling.max_tokens - 1
    wants = request.sampling.logprobs
    for step in range(last + 1):
        token_id = ord("a") + step % 26
        top = tuple((token_id + k, -0.5 - k) for k in range(wants or 0))
        done = step == last
        record = RequestRecord(handed_off=request.handoff is not None, queue_s=0.123456789) if done else None
        yield TokenOutput(token_id, chr(token_id), -0.5, top, FinishReason.LENGTH if done else None, record=record)


class ScriptedEngine:
    """Plays `script` for each request on a thread of its own; without a script, the test feeds the outputs."""

    def __init__(self, script: Script | None = alphabet, *, refuse: Exception | None = None) -> None:
        config = ModelConfig("llama", 1, 8, 1, 1, 8, 8, VOCAB, CONTEXT, 1e4, 1e-5, True)
        self.loaded = FakeModel(config, CharTokenizer())
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[RequestId] = []
        self.declined: list[tuple[GenerationRequest, str]] = []
        self.refuse = refuse
        self.refuse_after = 0
        self._script = script
        self._sinks: list[Sink] = []
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        with self._changed:
            if self.refuse is not None and len(self.submitted) >= self.refuse_after:
                raise self.refuse
            self.submitted.append(request)
            self._sinks.append(sink)
            self._changed.notify_all()
        if self._script is not None:
            self._thread.submit(self._play, self._script, request, sink)

    def cancel(self, request_id: RequestId) -> None:
        with self._changed:
            self.cancelled.append(request_id)
            self._changed.notify_all()

    def decline(self, request: GenerationRequest, reason: str) -> None:
        with self._changed:
            self.declined.append((request, reason))
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        return EngineStats(
            blocks_total=10,
            blocks_free=7,
            blocks_in_use=2,
            blocks_held=1,
            blocks_cached=3,
            requests={"waiting": 4, "decoding": 5},
            requests_total={"stop": 6},
            handoffs_total={("source", "delivered"): 8},
            prompt_tokens_total=100,
            generated_tokens_total=200,
            cached_tokens_total=50,
            preemptions_total=9,
            steps_total=300,
        )

    def feed(self, index: int, output: TokenOutput) -> None:
        """Give an output to the request that was submitted as number `index`."""
        self._thread.submit(self._sinks[index], output).result(DEADLINE_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a submit or a cancel has made `condition` true."""
        assert await asyncio.to_thread(self._wait, condition), (self.submitted, self.cancelled)

    def close(self) -> None:
        self._thread.shutdown()

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, DEADLINE_S)

    @staticmethod
    def _play(script: Script, request: GenerationRequest, sink: Sink) -> None:
        for output in script(request):
            sink(output)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.raw)

    @property
    def error(self) -> Any:
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The events of a stream; a closing [DONE] is the string."""
        blocks = self.raw.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        texts = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else orjson.loads(text) for text in texts]


class Client:
    """Talks to one server."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self.port = port
        self._session = session

    async def get(self, path: str) -> Reply:
        async with self._session.get(f"http://127.0.0.1:{self.port}{path}") as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())

    async def send(self, method: str, path: str, headers: dict[str, str]) -> Reply:
        """A request without a body."""
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self._session.request(method, url, headers=headers) as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        """Send `body` as JSON, or as it is when it is bytes."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self._session.post(f"http://127.0.0.1:{self.port}{path}", data=io.BytesIO(raw), headers=headers) as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())

    async def complete(self, headers: dict[str, str] | None = None, **fields: object) -> Reply:
        return await self.post("/v1/completions", {"prompt": "hi", **fields}, headers)

    async def chat(self, headers: dict[str, str] | None = None, **fields: object) -> Reply:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields}, headers)


@asynccontextmanager
async def serving(
    engine: EngineClient,
    *,
    role: Role = "both",
    handoff: HandoffInfo | None = INFO,
    progress_timeout_s: float = DEADLINE_S,
    shutdown_timeout_s: float = 2.0,
    timelines: Timelines | None = None,
    trust: Trust = NO_TRUST,
    settings: HttpSettings = DEFAULT_HTTP,
) -> AsyncIterator[Client]:
    """Serve `engine` on a free port."""
    app = make_app(
        engine,
        served_model=MODEL,
        role=role,
        handoff=handoff,
        progress_timeout_s=progress_timeout_s,
        timelines=timelines,
        trust=trust,
        settings=settings,
    )
    runner, port = await _listen(app, shutdown_timeout_s)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
            yield Client(session, port)
    finally:
        await runner.cleanup()
        if isinstance(engine, ScriptedEngine):
            engine.close()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a test's coroutine with a deadline."""

    async def bounded() -> Result:
        async with asyncio.timeout(2 * DEADLINE_S):
            return await work

    return asyncio.run(bounded())


async def _listen(app: web.Application, shutdown_timeout_s: float) -> tuple[web.AppRunner, int]:
    for port in random.sample(range(20000, 32768), 50):
        try:
            return await start_server(app, "127.0.0.1", port, shutdown_timeout_s=shutdown_timeout_s), port
        except OSError:
            continue
    raise AssertionError("no free port below 32768")

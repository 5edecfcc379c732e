"""With a cluster key, only requests with its token act on hand-offs or name addresses to dial; what a response shows."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from typing import Any

import pytest
from served import INFO, Client, Reply, ScriptedEngine, alphabet, run, serving

from kvbaton.config import HTTP_KEY_HEADER, Trust, http_token, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import AddressProof
from kvbaton.core.handoff import Incarnation, RequestId
from kvbaton.engines.embedded.request import FinishReason, GenerationRequest, Sampling, TokenOutput
from kvbaton.engines.embedded.settings import HttpSettings
from kvbaton.engines.embedded.submission import Submission
from kvbaton.errors import ConfigError
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines

KEY = b"the key of this cluster"
KEYED = Trust(KEY)
TOKEN = {HTTP_KEY_HEADER: http_token(KEY)}
FROM_SOURCE = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.9", "remote_port": 6301}
TO_TARGET = {"do_remote_decode": True, "transfer_id": "t"}
NOT_KEYS = [
    {},
    {HTTP_KEY_HEADER: ""},
    {HTTP_KEY_HEADER: "0" * 64},
    {HTTP_KEY_HEADER: KEY.decode()},
    {HTTP_KEY_HEADER: http_token(b"the key of another cluster")},
    {"Authorization": "Bearer "},
]


def timelines() -> Timelines:
    return Timelines(InstanceInfo("prefill", "127.0.0.1:1", Incarnation("inc")))


def test_the_token_is_derived_from_the_key() -> None:
    assert http_token(KEY) == hmac.new(KEY, b"kvbaton http", hashlib.sha256).hexdigest()
    assert HTTP_KEY_HEADER == "x-kvbaton-key"


async def acted(client: Client, headers: dict[str, str]) -> list[int]:
    """The statuses of everything that acts on hand-offs of others."""
    replies = [
        await client.send("GET", "/handoffs", headers),
        await client.send("GET", "/handoffs/t", headers),
        await client.send("DELETE", "/handoffs/t", headers),
        await client.complete(headers, kv_transfer_params=FROM_SOURCE),
        await client.chat(headers, kv_transfer_params=FROM_SOURCE),
    ]
    for reply in replies:
        if reply.status == 401:
            assert reply.error["code"] == "missing_cluster_key"
            assert HTTP_KEY_HEADER in reply.error["message"]
    return [reply.status for reply in replies]


@pytest.mark.parametrize("headers", NOT_KEYS, ids=str)
def test_without_the_token_nothing_acts_on_a_hand_off(headers: dict[str, str]) -> None:
    async def work() -> list[int]:
        async with serving(engine, timelines=timelines(), trust=KEYED) as client:
            return await acted(client, headers)

    engine = ScriptedEngine()
    assert run(work()) == [401] * 5
    assert (engine.submitted, engine.cancelled) == ([], [])
    assert engine.declined == [], "a source that is declined is dialled"


@pytest.mark.parametrize("headers", [TOKEN, {"Authorization": f"Bearer {http_token(KEY)}"}], ids=["header", "bearer"])
def test_with_the_token_everything_is_possible(headers: dict[str, str]) -> None:
    async def work() -> list[int]:
        async with serving(ScriptedEngine(), timelines=timelines(), trust=KEYED) as client:
            return await acted(client, headers)

    assert run(work()) == [200, 404, 200, 200, 200]


def test_without_a_cluster_key_nothing_is_required() -> None:
    async def work() -> list[int]:
        async with serving(ScriptedEngine(), timelines=timelines()) as client:
            return await acted(client, {})

    assert run(work()) == [200, 404, 200, 200, 200]


@pytest.mark.parametrize("is_keyed", [True, False])
def test_metrics_are_for_holders_of_the_key_where_that_is_set(is_keyed: bool) -> None:
    async def work() -> list[int]:
        async with serving(ScriptedEngine(), trust=KEYED, settings=HttpSettings(keyed_metrics=is_keyed)) as client:
            return [(await client.send("GET", "/metrics", headers)).status for headers in (*NOT_KEYS, TOKEN)]

    assert run(work()) == [401 if is_keyed else 200] * len(NOT_KEYS) + [200]


def test_metrics_for_holders_of_no_key_are_refused_at_the_start() -> None:
    async def work() -> None:
        async with serving(ScriptedEngine(), settings=HttpSettings(keyed_metrics=True)):
            pass

    with pytest.raises(ConfigError, match="keyed_metrics is set, and there is no cluster key"):
        run(work())


def test_an_address_on_the_allow_list_needs_no_token() -> None:
    """The operator vouches for it. vllm-router, which sends no token, works this way."""

    async def work() -> list[int]:
        async with serving(ScriptedEngine(), trust=Trust(KEY, parse_trust(allow=["10.0.0.0/24"]).allowed)) as client:
            hosts = ("10.0.0.9", "10.0.1.9")
            return [(await client.complete(kv_transfer_params=FROM_SOURCE | {"remote_host": host})).status for host in hosts]

    assert run(work()) == [200, 401]


SOURCE = ControlAddress.of("10.0.0.9", 6301)
PROVED = {"address_proof": AddressProof(KEY, SOURCE, INFO.control_address).of("t")}
FORGED = {"address_proof": AddressProof(b"the key of another cluster", SOURCE, INFO.control_address).of("t")}


@pytest.mark.parametrize(
    ("params", "status"),
    [(PROVED, 200), (FORGED, 401), ({**PROVED, "remote_port": 22}, 401), ({**PROVED, "transfer_id": "u"}, 401)],
    ids=["proved", "forged", "another port", "another transfer"],
)
@pytest.mark.parametrize("wrong", [{}, {"max_tokens": 0}], ids=["good", "declined"])
def test_a_source_is_dialled_with_the_proof_of_a_router(params: dict[str, Any], status: int, wrong: dict[str, Any]) -> None:
    """As vLLM's connector requires it, which sees no headers; `kvbaton bench` is its own router, and proves this way."""

    async def work() -> int:
        async with serving(engine, trust=KEYED) as client:
            return (await client.complete(kv_transfer_params=FROM_SOURCE | params, **wrong)).status

    engine = ScriptedEngine()
    got = run(work())
    assert got == (400 if wrong and status == 200 else status)
    assert (len(engine.submitted), len(engine.declined)) == ((0, 0) if status == 401 else (not wrong, len(wrong)))


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"prompt": 5}], ids=str)
@pytest.mark.parametrize("headers", [{}, TOKEN], ids=["no token", "token"])
def test_a_bad_request_is_declined_only_with_the_token(headers: dict[str, str], wrong: dict[str, Any]) -> None:
    async def work() -> Reply:
        async with serving(engine, trust=KEYED) as client:
            return await client.complete(headers, kv_transfer_params=FROM_SOURCE, **wrong)

    engine = ScriptedEngine()
    assert run(work()).status in (400, 401)
    assert len(engine.declined) == bool(headers)


def test_plain_requests_and_prefills_need_no_token() -> None:
    async def work() -> list[int]:
        async with serving(ScriptedEngine(), trust=KEYED) as client:
            replies = [await client.complete(), await client.chat(), await client.complete(kv_transfer_params=TO_TARGET)]
            return [reply.status for reply in [*replies, await client.get("/v1/models"), await client.get("/health")]]

    assert run(work()) == [200] * 5


DETAILS = ("cached_tokens", "queue_s", "prefill_s", "10.0.0.9", "handed_off")


@pytest.mark.parametrize("show", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_what_a_client_is_shown_is_a_setting(show: bool, stream: bool) -> None:
    async def work() -> Reply:
        async with serving(ScriptedEngine(), settings=HttpSettings(show_details=show)) as client:
            headers = {"X-Request-Id": "___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:2_abc"}
            return await client.complete(headers, stream=stream)

    reply = run(work())
    assert reply.status == 200
    for detail in DETAILS:
        assert (detail.encode() in reply.raw) == show, detail


def test_the_answer_of_a_source_keeps_what_the_router_needs() -> None:
    async def work() -> Reply:
        async with serving(ScriptedEngine(), settings=HttpSettings(show_details=False)) as client:
            return await client.complete(kv_transfer_params=TO_TARGET)

    assert run(work()).json["kv_transfer_params"]["remote_host"] == INFO.control_address.host


@pytest.mark.parametrize("show", [True, False])
def test_the_reason_of_a_failed_hand_off_is_a_detail(show: bool, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: object) -> list[TokenOutput]:
        return [TokenOutput(-1, "", finish_reason=FinishReason.ERROR, error="incarnation 77 is gone")]

    async def work() -> Reply:
        async with serving(ScriptedEngine(failing), settings=HttpSettings(show_details=show)) as client:
            return await client.complete(kv_transfer_params=FROM_SOURCE)

    reply = run(work())
    assert reply.status == 502
    assert (b"10.0.0.9" in reply.raw) == (b"incarnation 77" in reply.raw) == show
    assert ("incarnation 77 is gone" in caplog.text) == (not show)


class TestUndeliveredPrefill:
    """A finished prefill whose response does not reach its caller is released at once: no target will come."""

    def test_a_caller_that_leaves_before_the_response_is_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if the connection broke between the last output and the response."""

        async def work() -> None:
            async with serving(engine) as client:

                async def lost(self: Any) -> None:
                    self.is_lost = True

                with monkeypatch.context() as patched:
                    patched.setattr("kvbaton.engines.embedded.server._ResponseWriter.finish", lost)
                    await client.complete(kv_transfer_params=TO_TARGET, max_tokens=1)
                await engine.until(lambda: bool(engine.cancelled))
                assert (await client.send("DELETE", "/handoffs/t", {})).json == {"released": 0}

        engine = ScriptedEngine()
        run(work())
        assert engine.cancelled == [engine.submitted[0].request_id]

    def test_a_caller_that_leaves_while_one_choice_is_unfinished(self) -> None:
        async def work() -> None:
            async with serving(engine) as client:
                request = asyncio.create_task(client.complete(kv_transfer_params=TO_TARGET, max_tokens=1, n=2))
                await engine.until(lambda: len(engine.submitted) == 2)
                engine.feed(0, TokenOutput(65, "A", finish_reason=FinishReason.LENGTH))
                request.cancel()
                await engine.until(lambda: len(engine.cancelled) == 2)

        engine = ScriptedEngine(None)
        run(work())
        assert set(engine.cancelled) == {request.request_id for request in engine.submitted}

    def test_a_last_output_that_was_not_taken_yet_counts(self) -> None:
        """The engine finishes in its own thread, while the handler is being cancelled."""

        async def work() -> list[RequestId]:
            with Submission(engine, (request,), progress_timeout_s=5) as submission:
                engine.feed(0, TokenOutput(65, "A", finish_reason=FinishReason.LENGTH))
                return submission.finished()

        engine = ScriptedEngine(None)
        request = GenerationRequest(RequestId("r"), (1,), Sampling(1))
        assert run(work()) == ["r"]
        assert engine.cancelled == []
        engine.close()

    def test_a_response_that_arrives_leaves_the_prefill_alone(self) -> None:
        async def work() -> Any:
            async with serving(engine) as client:
                await client.complete(kv_transfer_params=TO_TARGET, max_tokens=1)
                assert engine.cancelled == []
                return (await client.send("DELETE", "/handoffs/t", {})).json

        engine = ScriptedEngine()
        assert run(work()) == {"released": 1}
        assert engine.cancelled == [engine.submitted[0].request_id]

    def test_one_choice_that_fails_releases_the_others(self) -> None:
        def script(request: Any) -> list[TokenOutput]:
            if request.handoff.key.sample_index == 1:
                return [TokenOutput(-1, "", finish_reason=FinishReason.ERROR, error="no blocks")]
            return list(alphabet(request))

        async def work() -> int:
            async with serving(engine) as client:
                return (await client.complete(kv_transfer_params=TO_TARGET, max_tokens=1, n=2)).status

        engine = ScriptedEngine(script)
        assert run(work()) == 500
        assert engine.cancelled == [engine.submitted[0].request_id]

    def test_a_second_prefill_of_the_same_transfer_does_not_hide_the_first(self) -> None:
        def script(request: Any) -> list[TokenOutput]:
            if len(engine.submitted) > 1:
                return [TokenOutput(-1, "", finish_reason=FinishReason.ERROR, error="under way already")]
            return list(alphabet(request))

        async def work() -> Any:
            async with serving(engine) as client:
                assert (await client.complete(kv_transfer_params=TO_TARGET, max_tokens=1)).status == 200
                assert (await client.complete(kv_transfer_params=TO_TARGET, max_tokens=1)).status == 500
                return (await client.send("DELETE", "/handoffs/t", {})).json

        engine = ScriptedEngine(script)
        assert run(work()) == {"released": 1}
        assert engine.cancelled == [engine.submitted[0].request_id]

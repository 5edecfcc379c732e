"""Two vLLMs with this connector under the real vllm-router, READ and WRITE: the answers of one vLLM, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from vllm_servers import MODEL, Server
from vllm_stand import VllmStand, together

from watching import wait_until

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

_WORDS = "The river ran past the mill and on towards the sea. "
_COMMON: dict[str, Any] = {"model": MODEL, "max_tokens": 10, "temperature": 0, "seed": 0}


def _requests() -> list[tuple[str, dict[str, Any]]]:
    """Completions and chat, of one block, of several and of more than one step."""
    found: list[tuple[str, dict[str, Any]]] = []
    for index, times in enumerate((1, 12, 40)):
        words = f"Story {index}. " + _WORDS * times
        found.append(("/v1/completions", {"prompt": words, **_COMMON}))
        found.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": words}], **_COMMON}))
    return found


@pytest.mark.sampled(1, by="stream")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_real_router_gets_the_answers_of_one_server(standing: VllmStand, stream: bool) -> None:
    pair = standing.pair

    async def send(session: aiohttp.ClientSession) -> None:
        for path, body in _requests():
            right = await _ask(session, pair.single.url + path, body, stream)
            assert right, "one server answers with a text"
            assert await _ask(session, standing.peer_router + path, body, stream) == right, f"{path} {body}"

    before = _handed_over(pair.decode)
    together(send)
    pair.wait_idle()
    wait_until(lambda: _handed_over(pair.decode) == before + len(_requests()), "each to be counted as handed over", 30)


@pytest.mark.sampled(1)
def test_the_real_router_cuts_no_answer(standing: VllmStand) -> None:
    """It prints a chat's answer anew and keeps its length: what this connector adds must not change under that. A client that
    gets fewer bytes than it was promised raises."""

    async def send(session: aiohttp.ClientSession) -> None:
        for index in range(24):
            body = {"messages": [{"role": "user", "content": f"Tale {index}. {_WORDS}"}], **_COMMON, "max_tokens": 2}
            assert await _ask(session, standing.peer_router + "/v1/chat/completions", body, stream=False)

    together(send)


def _handed_over(server: Server) -> float:
    counts = server.metrics().items()
    return sum(value for name, value in counts if name.startswith("vllm:kvbaton_handoffs_total") and '"delivered"' in name)


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], stream: bool) -> str:
    async with session.post(url, json={**body, "stream": stream}) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    if not stream:
        return _text(json.loads(text))
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text[-500:]
    return "".join(_text(json.loads(event)) for event in events[:-1])


def _text(document: dict[str, Any]) -> str:
    (choice,) = document["choices"]
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice["delta"]).get("content") or "")

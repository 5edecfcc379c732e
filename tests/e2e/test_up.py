"""`kvbaton up` as users run it: what it serves, how it stops, and what happens when a part is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from system import Client, Up, stream_events

from kvbaton.launch.ports import check_port_free
from watching import command_line, is_running, shared_files, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Up(temporary=tmp_path_factory.mktemp("up")) as up:
        yield up.client


@pytest.mark.real_model
def test_the_page_is_served_with_everything_it_needs(client: Client) -> None:
    page = client.get("/")
    assert page.status == 200
    assert page.headers["Content-Type"].startswith("text/html")
    assert b"kvbaton" in page.content
    for name in ("style.css", "chat.js", "stream.js"):
        assert client.get(f"/page/{name}").status == 200


@pytest.mark.real_model
def test_the_capital_of_france(client: Client) -> None:
    reply = client.complete("The capital of France is", max_tokens=4)
    assert reply.status == 200
    assert reply.text.startswith(" Paris")
    assert reply.document["kvbaton"]["handed_off"] is True
    assert reply.document["kvbaton"]["recomputed"] is False


@pytest.mark.real_model
def test_a_chat_answer_streams(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 12, "temperature": 0}
    with client.stream("/v1/chat/completions", body) as response:
        assert response.status == 200
        assert (response.getheader("Content-Type") or "").startswith("text/event-stream")
        events = list(stream_events(response))
    assert events[-1] == "[DONE]"
    pieces = [choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert len([piece for piece in pieces if piece]) > 1
    whole = client.post("/v1/chat/completions", body).document
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


@pytest.mark.real_model
def test_a_streamed_completion_is_the_same_as_a_whole_one(client: Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    with client.stream("/v1/completions", body) as response:
        events = list(stream_events(response))
    text = "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
    assert text == client.post("/v1/completions", body).text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_without_a_trace(number: signal.Signals, tmp_path: Path) -> None:
    with Up("--model", "tiny", "--prefill", "2", temporary=tmp_path) as up:
        assert up.client.complete().status == 200
        known = up.client.get("/instances").document["live"]
        children = up.children()
        shared = shared_files(children)
        beating = {pid for pid in children if "kvbaton.discovery.announcer_child" in command_line(pid)}
        assert (len(beating), len(children - beating)) == (3, 4)
        up.process.send_signal(number)
        assert up.wait(30) == 0
    assert not [pid for pid in children if is_running(pid)]
    for port in [up.port, *(int(instance["http_address"].rpartition(":")[2]) for instance in known)]:
        check_port_free("127.0.0.1", port, "--port")
    wait_until(lambda: not [each for each in shared if each.exists()], "no shared memory is left")
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in up.output


def _read_to_the_end(response: http.client.HTTPResponse) -> tuple[list[str], bool]:
    """The rest of the events, and whether the connection broke. That it did neither end nor break is an error of the test."""
    events: list[str] = []
    try:
        events.extend(stream_events(response))
    except TimeoutError:
        raise
    except (http.client.HTTPException, OSError):
        return events, True
    return events, False


@pytest.mark.real_model
def test_a_killed_decode_instance_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    with Up("--restarts", "0", temporary=tmp_path) as up:
        body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 0}
        with up.client.stream("/v1/completions", body, timeout_s=60.0) as response:
            events = stream_events(response)
            for _ in range(3):
                assert "error" not in json.loads(next(events))
            pid = up.child("decode")
            children = up.children()
            os.kill(pid, signal.SIGKILL)
            rest, is_broken = _read_to_the_end(response)
        assert "[DONE]" not in rest
        assert is_broken or "error" in json.loads(rest[-1])
        assert up.wait(30) == 1
    assert f"decode-0 (pid {pid}) was killed by signal 9 (SIGKILL)" in up.output
    assert not [child for child in children if is_running(child)]
    assert list(tmp_path.iterdir()) == []

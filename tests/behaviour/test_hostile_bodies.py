"""Bodies that would take memory or time: an instance refuses them before any work, stays alive, and its memory is bounded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import pytest
from served_instances import Served

_MEBIBYTE = 1 << 20
_MOST_MORE = 64 * _MEBIBYTE
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARAMS = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "127.0.0.1", "remote_port": 9}


@pytest.fixture(scope="module")
def instance() -> Iterator[Served]:
    with Served("both") as instance:
        warm_up(instance)
        yield instance
        assert instance.complaints() == []


def warm_up(instance: Served) -> None:
    """Bodies of every size that is still taken, so that the memory that they need is there before it is measured."""
    for size in (10, 4000, 50_000):
        instance.client.complete("x" * size)
    instance.client.post(COMPLETIONS, b" " * _MEBIBYTE + b"{}")


def text(size: int) -> bytes:
    return json.dumps({"prompt": "hello, how are you? " * (size // 20)}).encode()


def same_bytes(size: int) -> bytes:
    return b'{"prompt": "' + b"a" * size + b'"}'


def escapes(size: int) -> bytes:
    return b'{"prompt": "' + rb"\u00e9" * (size // 6) + b'"}'


def prompts(size: int) -> bytes:
    return b'{"prompt": [' + b'"a",' * (size // 4) + b'"a"]}'


def empty_lists(size: int) -> bytes:
    return b'{"prompt": [' + b"[]," * (size // 3) + b"[]]}"


def token_ids(size: int) -> bytes:
    return b'{"prompt": [' + b"1," * (size // 2) + b"1]}"


def declined_prompts(size: int) -> bytes:
    return prompts(size)[:-1] + b', "kv_transfer_params": ' + json.dumps(PARAMS).encode() + b"}"


def stops(size: int) -> bytes:
    return b'{"prompt": "a", "stop": [' + b'"b",' * (size // 4) + b'"b"]}'


def one_stop(size: int) -> bytes:
    return b'{"prompt": "a", "stop": "' + b"b" * size + b'"}'


def salt(size: int) -> bytes:
    return b'{"prompt": "a", "cache_salt": "' + b"b" * size + b'"}'


def deep(size: int) -> bytes:
    return b'{"prompt": ' + b"[" * size


def deep_and_unknown(size: int) -> bytes:
    return b'{"prompt": "a", "other": ' + b'{"a":' * (size // 5)


def keys(size: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % number for number in range(size // 12)) + b"}"


BODIES: tuple[Callable[[int], bytes], ...] = (
    text,
    same_bytes,
    escapes,
    prompts,
    empty_lists,
    token_ids,
    declined_prompts,
    stops,
    one_stop,
    salt,
    deep,
    deep_and_unknown,
    keys,
)


def messages(size: int) -> bytes:
    return b'{"messages": [' + b'{"role":"user","content":"a"},' * (size // 30) + b'{"role":"user","content":"a"}]}'


def content_parts(size: int) -> bytes:
    parts = b'{"type":"text","text":"a"},' * (size // 27)
    return b'{"messages": [{"role": "user", "content": [' + parts + b'{"type":"text","text":"a"}]}]}'


def one_message(size: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "' + b"a" * size + b'"}]}'


def one_role(size: int) -> bytes:
    return b'{"messages": [{"role": "' + b"a" * size + b'", "content": "a"}]}'


CONVERSATIONS: tuple[Callable[[int], bytes], ...] = (messages, content_parts, one_message, one_role)


def refused(instance: Served, path: str, body: bytes) -> int:
    """The status; a client that sends on after a 413 may find its connection closed."""
    try:
        reply = instance.client.post(path, body)
    except (OSError, HTTPException):
        return 413
    assert reply.status in (400, 413), reply.content[:300]
    assert len(reply.content) < 4000
    return reply.status


@pytest.mark.parametrize("size", [200_000, _MEBIBYTE, 12 * _MEBIBYTE])
@pytest.mark.parametrize(
    ("path", "make"),
    [*((COMPLETIONS, make) for make in BODIES), *((CHAT, make) for make in CONVERSATIONS)],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_hostile_body_is_refused_in_little_memory(
    instance: Served, path: str, make: Callable[[int], bytes], size: int
) -> None:
    before = instance.memory_bytes()
    refused(instance, path, make(size))
    assert instance.memory_bytes() - before < _MOST_MORE
    assert instance.client.complete("Hello").status == 200


def test_many_at_once_take_bounded_memory(instance: Served) -> None:
    before = instance.memory_bytes()
    bodies = [make(size) for make in BODIES for size in (900_000, 12 * _MEBIBYTE)]
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda body: refused(instance, COMPLETIONS, body), bodies))
    assert set(statuses) <= {400, 413}
    assert instance.memory_bytes() - before < 2 * _MOST_MORE
    assert instance.client.complete("Hello").status == 200

"""What the two instances of a request are sent, made from the client's body. Values that are not changed keep their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.errors import BadRequest, ProtocolError

__all__ = [
    "ClientBody",
    "Fields",
    "Peer",
    "bootstrap_body",
    "decode_body",
    "parse_body",
    "plain_body",
    "prefill_body",
    "push_params",
    "transfer_params",
]

Fields = dict[str, msgspec.Raw]
"""The top-level fields of a JSON object, each still encoded."""

_CHOOSES_PEERS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_DECODES_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}
_PREFILLS_ELSEWHERE = {"do_remote_decode": False, "do_remote_prefill": True}
_MAX_SHOWN = 100


class Peer(msgspec.Struct, frozen=True):
    """What one instance is told about the other: its sizes, and the data-parallel rank that prefills, if there are several."""

    dp_size: int = 1
    tp_size: int = 1
    prefill_dp_rank: int | None = None


class ClientBody(msgspec.Struct, frozen=True):
    """A client's request: its fields without those that could choose peers, and whether it wants a stream."""

    fields: Fields
    stream: bool

    def batch_size(self) -> int | None:
        """How many prompts a batch has; None for a single one."""
        for name in ("prompt", "text", "input_ids"):
            value = self.fields.get(name)
            if value is not None and bytes(value).startswith(b"["):
                items = msgspec.json.decode(value, type=list[msgspec.Raw])
                return len(items) if items and bytes(items[0])[:1] in (b"[", b'"') else None
        return None

    def priority(self) -> int:
        """The `priority` that the client gives the request; 0 when it gives none, or none that is a number."""
        value = _value(self.fields, "priority") if "priority" in self.fields else 0
        return value if type(value) is int else 0

    def prompt_chars(self) -> int | None:
        """How long the prompt is, in characters as they were sent; None when that says nothing of its length in tokens."""
        names = [name for name in ("prompt", "messages") if name in self.fields]
        if len(names) != 1 or self.batch_size() is not None:
            return None
        return len(bytes(self.fields[names[0]]))


def parse_body(content: bytes) -> ClientBody:
    """Read a client's body. Raises BadRequest, which names what is wrong; fields the router does not need are not looked at."""
    try:
        fields = msgspec.json.decode(content, type=Fields)
    except RecursionError:
        raise BadRequest("body", "the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest("body", f"the body is no JSON object: {error}") from error
    for name in _CHOOSES_PEERS:
        fields.pop(name, None)
    _check_what_differs(fields)
    return ClientBody(fields, "stream" in fields and bool(_value(fields, "stream")))


def _check_what_differs(fields: Fields) -> None:
    """The prefill instance does not see these as they are; found wrong only at decode, they would cost held blocks."""
    for name in ("max_tokens", "max_completion_tokens"):
        if name not in fields:
            continue
        value = _value(fields, name)
        if value is not None and type(value) is not int:
            raise BadRequest(name, f"{name} is {_shown(value)}; it must be a whole number")
        if value is not None and value < 1:
            raise BadRequest(name, f"{name} is {value}; it must be at least 1")
    for name, kind, words in (("stream", bool, "true or false"), ("stream_options", dict, "an object")):
        value = _value(fields, name) if name in fields else None
        if value is not None and not isinstance(value, kind):
            raise BadRequest(name, f"{name} is {_shown(value)}; it must be {words}")


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


def prefill_body(body: ClientBody, transfer_id: str, target: Peer, *, in_push: bool) -> bytes:
    """To the prefill instance: one token, no stream, and the order to keep the cache for a remote decode.

    In push it is told more of its target, which it must know before the target speaks.
    """
    fields: dict[str, Any] = dict(body.fields)
    fields.pop("stream_options", None)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    if "min_tokens" in fields:
        least = _value(body.fields, "min_tokens")
        if isinstance(least, int):
            fields["min_tokens"] = min(least, 1)
    fields["max_tokens"] = 1
    fields["stream"] = False
    fields["kv_transfer_params"] = _params(_DECODES_ELSEWHERE, transfer_id, target, with_tp_size=in_push)
    return msgspec.json.encode(fields)


def push_params(transfer_id: str, source: Peer) -> dict[str, Any]:
    """What decode is told in push, where prefill has not answered yet: only the request id names the source."""
    return _params(_PREFILLS_ELSEWHERE, transfer_id, source, with_tp_size=True)


def transfer_params(answer: bytes) -> Fields:
    """The `kv_transfer_params` object in a prefill instance's answer. Raises ProtocolError when there is none."""
    try:
        top = msgspec.json.decode(answer, type=Fields)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the prefill answer is no JSON object: {error}") from error
    if "kv_transfer_params" not in top:
        raise ProtocolError("the prefill answer has no kv_transfer_params; is that instance running with a KV connector?")
    try:
        return msgspec.json.decode(top["kv_transfer_params"], type=Fields)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"kv_transfer_params in the prefill answer is no object: {error}") from error


def decode_body(body: ClientBody, params: Mapping[str, Any], source: Peer) -> bytes:
    """To the decode instance: the client's body, and where its cache is."""
    return msgspec.json.encode({**body.fields, "kv_transfer_params": {**params, "remote_dp_size": source.dp_size}})


def plain_body(body: ClientBody) -> bytes:
    """To a decode instance that does it all: the client's body without what could choose peers."""
    return msgspec.json.encode(body.fields)


def bootstrap_body(body: ClientBody, host: str, port: int | None, rooms: list[int] | int) -> bytes:
    """To both SGLang instances: the client's body, and the room in which they meet; one room per prompt of a batch."""
    if isinstance(rooms, int):
        where: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms}
    else:
        count = len(rooms)
        where = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
    return msgspec.json.encode({**body.fields, **where})


def _params(sides: dict[str, bool], transfer_id: str, peer: Peer, *, with_tp_size: bool) -> dict[str, Any]:
    params: dict[str, Any] = {**sides, "remote_engine_id": None, "remote_block_ids": None, "transfer_id": transfer_id}
    params["remote_dp_size"] = peer.dp_size
    if with_tp_size:
        params["remote_tp_size"] = peer.tp_size
        if peer.prefill_dp_rank is not None:
            params["remote_dp_rank"] = peer.prefill_dp_rank
    return params


def _value(fields: Fields, name: str) -> Any:
    try:
        return msgspec.json.decode(fields[name])
    except (ValueError, RecursionError) as error:
        raise BadRequest(name, f"{name} is malformed: {error}") from error

"""What the two legs of a request are sent, made from the client's body. Values that are not changed keep their exact bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.errors import BadRequest, ProtocolError

__all__ = ["ClientBody", "Fields", "decode_body", "parse_body", "prefill_body", "push_params", "transfer_params"]

Fields = dict[str, msgspec.Raw]
"""The top-level fields of a JSON object, each still encoded."""

_CHOOSES_PEERS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
_REMOTE_DP_SIZE = 1
_DECODES_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}
_PREFILLS_ELSEWHERE = {"do_remote_decode": False, "do_remote_prefill": True}
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A client's request: its fields without those that could choose peers, and whether it wants a stream."""

    fields: Fields
    stream: bool


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
    _check_what_legs_differ_in(fields)
    return ClientBody(fields, bool(_value(fields, "stream")))


def _check_what_legs_differ_in(fields: Fields) -> None:
    """The prefill leg does not see these as they are; found wrong only at decode, they would cost held blocks."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = _value(fields, name)
        if value is not None and type(value) is not int:
            raise BadRequest(name, f"{name} is {_shown(value)}; it must be a whole number")
        if value is not None and value < 1:
            raise BadRequest(name, f"{name} is {value}; it must be at least 1")
    for name, kind, words in (("stream", bool, "true or false"), ("stream_options", dict, "an object")):
        value = _value(fields, name)
        if value is not None and not isinstance(value, kind):
            raise BadRequest(name, f"{name} is {_shown(value)}; it must be {words}")


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


def prefill_body(body: ClientBody, transfer_id: str, target_tp_size: int | None = None) -> bytes:
    """The prefill leg: one token, no stream, and the order to keep the cache for a remote decode.

    `target_tp_size` is told in push, where the source must know it before the target speaks.
    """
    fields: dict[str, Any] = dict(body.fields)
    fields.pop("stream_options", None)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = 1
    least = _value(body.fields, "min_tokens")
    if isinstance(least, int):
        fields["min_tokens"] = min(least, 1)
    params = _params(_DECODES_ELSEWHERE, transfer_id, target_tp_size)
    return msgspec.json.encode({**fields, "max_tokens": 1, "stream": False, "kv_transfer_params": params})


def push_params(transfer_id: str, source_tp_size: int) -> dict[str, Any]:
    """What the decode leg is told in push, where prefill has not answered yet: only the request id names the source."""
    return _params(_PREFILLS_ELSEWHERE, transfer_id, source_tp_size)


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


def decode_body(body: ClientBody, params: Mapping[str, Any]) -> bytes:
    """The decode leg: the client's body, and where its cache is."""
    return msgspec.json.encode({**body.fields, "kv_transfer_params": {**params, "remote_dp_size": _REMOTE_DP_SIZE}})


def _params(sides: dict[str, bool], transfer_id: str, peer_tp_size: int | None) -> dict[str, Any]:
    known = {"remote_engine_id": None, "remote_block_ids": None, "transfer_id": transfer_id, "remote_dp_size": _REMOTE_DP_SIZE}
    return {**sides, **known} if peer_tp_size is None else {**sides, **known, "remote_tp_size": peer_tp_size}


def _value(fields: Fields, name: str) -> Any:
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name])
    except (ValueError, RecursionError) as error:
        raise BadRequest(name, f"{name} is malformed: {error}") from error

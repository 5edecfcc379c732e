"""What the two instances of a request are sent, made from the client's body. Values that are not changed keep their bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from kvbaton.errors import BadRequest, ProtocolError

__all__ = [
    "ClientBody",
    "Fields",
    "bootstrap_body",
    "decode_body",
    "parse_body",
    "plain_body",
    "prefill_body",
    "transfer_params",
]

Fields = dict[str, msgspec.Raw]
"""The top-level fields of a JSON object, each still encoded."""

_CHOOSES_PEERS = frozenset(("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"))
_MAX_SHOWN = 100
_PEEKED_BYTES = 64
_OPEN = ord("[")
_COUNTED = frozenset(("n", "best_of", "sampling_params", "text", "input_ids"))
_ADDED = (b"remote_dp_size", b"address_proof")
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_FIELDS = msgspec.json.Decoder(Fields)
_PREFILL_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


class ClientBody(msgspec.Struct, frozen=True):
    """A client's request: its fields without those that could choose peers, and whether it wants a stream.

    `content` is the body as it came, where nothing was taken out of it.
    """

    fields: Fields
    stream: bool
    content: bytes | None = None

    def batch_size(self) -> int | None:
        """How many prompts a batch has; None for a single one. Raises BadRequest when it is nested too deeply."""
        for name in ("prompt", "text", "input_ids"):
            value = self.fields.get(name)
            if value is None or (view := memoryview(value))[0] != _OPEN:
                continue
            if bytes(view[1:_PEEKED_BYTES]).lstrip()[:1] not in (b"[", b'"', b""):
                return None
            try:
                items = msgspec.json.decode(value, type=list[msgspec.Raw])
            except RecursionError:
                raise BadRequest(name, f"{name} is nested too deeply") from None
            return len(items) if items and bytes(memoryview(items[0])[:1]) in (b"[", b'"') else None
        return None

    def sequences(self) -> int:
        """How many sequences an instance makes of the request: prompts times `n`. Raises BadRequest as `batch_size` does."""
        fields = self.fields
        if _COUNTED.isdisjoint(fields):
            prompt = fields.get("prompt")
            return 1 if prompt is None or memoryview(prompt)[0] != _OPEN else self.batch_size() or 1
        copies = _copies(fields)
        if "sampling_params" in fields:
            # Where it is a list of them, or malformed, the instance decides.
            with contextlib.suppress(ValueError, RecursionError):
                copies *= _copies(_FIELDS.decode(fields["sampling_params"]))
        return copies * (self.batch_size() or 1)

    def priority(self) -> int:
        """The `priority` that the client gives the request; 0 when it gives none, or none that is a number."""
        try:
            value = _value(self.fields, "priority") if "priority" in self.fields else 0
        except BadRequest:
            return 0
        return value if type(value) is int else 0

    def searches_beams(self) -> bool:
        """Whether vLLM makes requests of its own of it, step by step: none of them can be handed over."""
        return "use_beam_search" in self.fields and bytes(self.fields["use_beam_search"]) == b"true"

    def prompt_chars(self) -> int | None:
        """How long the prompt is, in characters as they were sent; None when that is no measure of its length in tokens."""
        names = [name for name in ("prompt", "messages") if name in self.fields]
        if len(names) != 1 or self.batch_size() is not None:
            return None
        return len(bytes(self.fields[names[0]]))


def parse_body(content: bytes) -> ClientBody:
    """Read a client's body. Raises BadRequest, which names what is wrong; fields the router does not need are not looked at."""
    try:
        fields = _FIELDS.decode(content)
    except RecursionError:
        raise BadRequest("body", "the body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest("body", f"the body is no JSON object: {error}") from error
    is_whole = bool(fields) and _CHOOSES_PEERS.isdisjoint(fields)
    if not is_whole:
        for name in _CHOOSES_PEERS:
            fields.pop(name, None)
    return ClientBody(fields, _check_what_differs(fields), content if is_whole else None)


def _check_what_differs(fields: Fields) -> bool:
    """The prefill instance does not see these as they are; found wrong only at decode, they would cost held blocks.

    Whether a stream is wanted.
    """
    if "max_tokens" in fields:
        _check_count(fields, "max_tokens", 0 if _only_scores(fields) else 1)
    if "max_completion_tokens" in fields:
        _check_count(fields, "max_completion_tokens")
    if "stream_options" in fields:
        _check_kind(fields, "stream_options", dict, "an object")
    return "stream" in fields and bool(_check_kind(fields, "stream", bool, "true or false"))


def _only_scores(fields: Fields) -> bool:
    """Whether the client wants its prompt back, as those do that want its logprobs and no answer."""
    return "echo" in fields and _value(fields, "echo") is True


def _check_count(fields: Fields, name: str, least: int = 1) -> None:
    value = _value(fields, name)
    if value is None:
        return
    if type(value) is not int:
        raise BadRequest(name, f"{name} is {_shown(value)}; it must be a whole number")
    if value < least:
        raise BadRequest(name, f"{name} is {value}; it must be at least {least}")


def _check_kind(fields: Fields, name: str, kind: type, expected: str) -> Any:
    value = _value(fields, name)
    if value is not None and not isinstance(value, kind):
        raise BadRequest(name, f"{name} is {_shown(value)}; it must be {expected}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


def prefill_body(body: ClientBody, params: bytes) -> bytes:
    """To the prefill instance: one token, no stream, and the order to keep the cache for a remote decode."""
    fields = dict(body.fields)
    fields.pop("stream_options", None)
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    if "min_tokens" in fields:
        least = _value(body.fields, "min_tokens")
        if isinstance(least, int) and least > 1:
            fields["min_tokens"] = _ONE
    fields["max_tokens"] = _ONE
    fields["stream"] = _FALSE
    fields["kv_transfer_params"] = msgspec.Raw(params)
    return msgspec.json.encode(fields)


def transfer_params(answer: bytes, source_dp_size: int, address_proof: str = "") -> bytes:
    """What decode gets in pull: the `kv_transfer_params` of prefill's answer, the size of the source, and a proof if given.

    Raises ProtocolError when there are none.
    """
    try:
        found = _PREFILL_ANSWER.decode(answer).kv_transfer_params
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the prefill answer is no JSON object: {error}") from error
    if found is msgspec.UNSET:
        raise ProtocolError("the prefill answer has no kv_transfer_params; is that instance running with a KV connector?")
    raw = bytes(found)
    if raw[:1] == b"{" and raw[1:-1].strip() and not any(name in raw for name in _ADDED):
        proof = b',"address_proof":"%b"' % address_proof.encode() if address_proof else b""
        return b'%b,"remote_dp_size":%d%b}' % (raw[:-1], source_dp_size, proof)
    try:
        params: dict[str, Any] = dict(_FIELDS.decode(found))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"kv_transfer_params in the prefill answer is no object: {error}") from error
    params["remote_dp_size"] = source_dp_size
    if address_proof:
        params["address_proof"] = address_proof
    return msgspec.json.encode(params)


def decode_body(body: ClientBody, params: bytes) -> bytes:
    """To the decode instance: the client's body, byte for byte if nothing was taken out of it, and where its cache is."""
    if body.content is None:
        return msgspec.json.encode({**body.fields, "kv_transfer_params": msgspec.Raw(params)})
    return b'%b,"kv_transfer_params":%b}' % (body.content[: body.content.rindex(b"}")], params)


def plain_body(body: ClientBody) -> bytes:
    """To a decode instance that does it all: the client's body without what could choose peers."""
    return msgspec.json.encode(body.fields) if body.content is None else body.content


def bootstrap_body(body: ClientBody, host: str, port: int | None, rooms: list[int] | int) -> bytes:
    """To both SGLang instances: the client's body, and the room in which they meet; one room per prompt of a batch."""
    if isinstance(rooms, int):
        where: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": rooms}
    else:
        count = len(rooms)
        where = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
    return msgspec.json.encode({**body.fields, **where})


def _copies(fields: Fields) -> int:
    """How many samples of each prompt the client requests; what is no count is left to the instance."""
    most = 1
    for name in ("n", "best_of"):
        if name in fields:
            value = _value(fields, name)
            most = max(most, value) if type(value) is int else most
    return most


def _value(fields: Fields, name: str) -> Any:
    try:
        return msgspec.json.decode(fields[name])
    except (ValueError, RecursionError) as error:
        raise BadRequest(name, f"{name} is malformed: {error}") from error

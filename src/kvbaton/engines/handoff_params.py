"""The seam between a router's `kv_transfer_params` and an engine's hand-offs: translates both ways.

Its one decision is `SourceCheck`: whether the address in a request may be dialled at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvbaton.config import Trust
from kvbaton.core.addresses import ControlAddress, parse_request_id
from kvbaton.core.auth import AddressProof, RoomProof, keys_of
from kvbaton.core.handoff import MAX_TRANSFER_ID, Incarnation, TransferId
from kvbaton.errors import AddressError, BadRequest

__all__ = [
    "HandoffInfo",
    "HandoffParams",
    "KVTransferParams",
    "SourceCheck",
    "SourceParams",
    "TargetParams",
    "answer_params",
    "automatic_id",
    "read_params",
    "size_doubt",
    "shown_seconds",
]

_FIELD = "kv_transfer_params"
_MAX_PORT = 65535
_DIGITS, _DIGITS_OF_LITTLE, _LITTLE_S = 6, 4, 1e-4


@dataclass(frozen=True, slots=True)
class HandoffInfo:
    """What an instance states about itself in its answers, so that a target finds it."""

    control_address: ControlAddress
    """Its own one, whichever data-parallel rank it is."""
    incarnation: Incarnation
    tp_size: int = 1
    dp_rank: int = 0


class KVTransferParams(msgspec.Struct, frozen=True):
    """The `kv_transfer_params` object of a request body. Keys that are not listed here are ignored."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_handshake_port: int | None = None
    remote_notify_port: int | None = None
    remote_dp_rank: int | None = None
    remote_dp_size: int | None = None
    remote_tp_size: int | None = None
    tp_size: int | None = None
    address_proof: str | None = None


@dataclass(frozen=True, slots=True)
class SourceParams:
    """The caller wants this instance to prefill, and another one to decode, which will connect."""

    transfer_id: TransferId
    request_id: str = field(default="", compare=False)

    def target(self) -> ControlAddress | None:
        """The decode instance that the request id names; None where it names none.

        Looked for when it is asked for: a source waits for its target to connect, and needs the address for messages alone.
        """
        try:
            return parse_request_id(self.request_id)[1]
        except AddressError:
            return None


@dataclass(frozen=True, slots=True)
class TargetParams:
    """The caller wants this instance to decode what `source` has prefilled.

    `target` is the decode address that the request id names, and `proof` that a holder of the key has paired the two.
    """

    transfer_id: TransferId
    source: ControlAddress
    source_incarnation: Incarnation | None
    target: ControlAddress | None = None
    proof: str = ""


HandoffParams = SourceParams | TargetParams


class SourceCheck:
    """Whether an instance may dial the source that a request names.

    Clients reach instances, and can name any address. So where there is a cluster key, a holder of it has to have named the
    address, for this transfer and this instance, or the operator's allow-list has it. Without a key the agents themselves
    dial the allow-list only, or loopback.
    """

    def __init__(self, trust: Trust, own: ControlAddress) -> None:
        self._key = trust.key
        self._allowed = trust.allowed
        self._own = own

    def refusal(self, params: TargetParams) -> str | None:
        """Why the source must not be dialled, and what to do; None when it may be."""
        source = params.source
        if self._key is None or (self._allowed is not None and source.host in self._allowed):
            return None
        # Engines may lose the request id on the way; a proof that was made for this instance then fits its own address.
        target = params.target or self._own
        if any(AddressProof(key, source, target).fits(params.proof, params.transfer_id) for key in keys_of(self._key)):
            return None
        wrong = f"does not fit the source {source}, this transfer and {target}" if params.proof else f"is missing for {source}"
        return f"{_FIELD}.address_proof: {wrong}; {self._advice(source)}"

    def room_refusal(self, source: ControlAddress, room: int) -> str | None:
        """The same for a request of SGLang: its room has to be one that a holder of the key has made for the two addresses."""
        if self._key is None or (self._allowed is not None and source.host in self._allowed):
            return None
        if any(RoomProof(key, source, self._own).fits(room) for key in keys_of(self._key)):
            return None
        return f"bootstrap_room {room} proves nothing about the source {source} and {self._own}; {self._advice(source)}"

    def _advice(self, source: ControlAddress) -> str:
        listed = "" if self._allowed is None else f" ({self._allowed})"
        return (
            "this instance has a cluster key and dials only what a router with the same key has paired, or what its "
            f"allow-list{listed} has: give the router the key, or add {source.host} with --allow"
        )


def automatic_id() -> TransferId:
    """A transfer id for a prefill whose caller named none."""
    return TransferId(f"auto-{uuid.uuid4().hex}")


def read_params(
    params: KVTransferParams | None,
    request_id: str | None,
    make_id: Callable[[], TransferId] = automatic_id,
    *,
    has_dp_ranks: bool = False,
) -> HandoffParams | None:
    """What the caller wants to hand off; None for a plain request. Raises BadRequest that names the field.

    The source's address comes from the request id when that carries one, else from the `remote_*` keys. A prefill without a
    transfer id is given one by `make_id`. Without `has_dp_ranks` sources have one data-parallel rank, whatever a router claims:
    vllm-router makes ranks up from its own options.
    """
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return None
    if params.do_remote_decode and params.do_remote_prefill:
        raise _bad("do_remote_prefill", "do_remote_decode and do_remote_prefill are both true; a request has one side only")
    if params.do_remote_decode:
        return SourceParams(_transfer_id(params, make_id), request_id or "")
    incarnation = Incarnation(params.remote_engine_id) if params.remote_engine_id else None
    transfer_id = _transfer_id(params, None)
    source, target = _addresses(params, request_id, (params.remote_dp_rank or 0) if has_dp_ranks else 0)
    return TargetParams(transfer_id, source, incarnation, target, params.address_proof or "")


def size_doubt(params: KVTransferParams | None) -> str | None:
    """What is odd about the size that a router claims for the other side, and what to do; None when nothing is.

    vllm-router takes it from its own options, not from what was registered.
    """
    claimed = None if params is None else params.remote_dp_size
    if claimed is None or claimed == 1:
        return None
    return (
        f"{_FIELD}.remote_dp_size: the router claims {claimed} data-parallel ranks for the other side, and embedded instances"
        " have 1; start vllm-router with --intra-node-data-parallel-size 1"
    )


def answer_params(params: SourceParams, info: HandoffInfo) -> dict[str, object]:
    """What a source's answer carries for the request that goes to the target."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": params.transfer_id,
        "remote_engine_id": info.incarnation,
        "remote_host": info.control_address.host,
        "remote_port": info.control_address.handshake,
        "remote_block_ids": None,
        "tp_size": info.tp_size,
        "remote_dp_rank": info.dp_rank,
    }


def shown_seconds(seconds: float) -> float:
    """A duration for an answer: of few digits, and never so small that JSON is written with an exponent.

    vllm-router parses an answer, prints it again and keeps its old Content-Length: a number that comes out shorter or longer
    (`1e-05` as `1e-5`, the seventeenth digit of a float) cuts the answer.
    """
    return round(seconds, _DIGITS if seconds >= _LITTLE_S else _DIGITS_OF_LITTLE)


def _transfer_id(params: KVTransferParams, make_id: Callable[[], TransferId] | None) -> TransferId:
    if params.transfer_id is None:
        if make_id is None:
            raise _bad("transfer_id", "is missing; send the one that the prefill instance answered with")
        return make_id()
    if not 1 <= len(params.transfer_id) <= MAX_TRANSFER_ID:
        raise _bad("transfer_id", f"has {len(params.transfer_id)} characters; 1 to {MAX_TRANSFER_ID} are possible")
    if not params.transfer_id.isprintable():
        raise _bad("transfer_id", f"{params.transfer_id!a} has characters that cannot be printed; log lines carry it")
    return TransferId(params.transfer_id)


def _addresses(params: KVTransferParams, request_id: str | None, dp_rank: int) -> tuple[ControlAddress, ControlAddress | None]:
    """The source, and the target where the request id names it."""
    stated = _body_address(params)
    embedded = target = None
    why = "there is no X-Request-Id header"
    try:
        if request_id:
            embedded, target = parse_request_id(request_id)
    except AddressError as error:
        why = str(error)
    if embedded is None:
        if stated is None:
            raise _bad("remote_host", f"do_remote_prefill is true, but no source is named: {why}, and remote_host is missing")
        return stated, None
    # Routers that know one address for all data-parallel ranks put that of the first one into the id.
    of_rank = _at_dp_rank(embedded, dp_rank)
    if stated is None:
        return of_rank, target
    for known in (embedded, of_rank):
        if (stated.host, stated.handshake) == (known.host, known.handshake):
            return known, target
    raise _bad("remote_host", f"names the source {stated}, but X-Request-Id names {embedded}; send one of them, or equal ones")


def _at_dp_rank(first: ControlAddress, rank: int) -> ControlAddress:
    """Where a data-parallel rank listens: so many ports behind the first one."""
    if not 0 <= rank <= _MAX_PORT - first.handshake:
        raise _bad("remote_dp_rank", f"{rank} from port {first.handshake} is no port")
    return ControlAddress.of(first.host, first.handshake + rank) if rank else first


def _body_address(params: KVTransferParams) -> ControlAddress | None:
    if params.remote_host is None:
        return None
    handshake_field = "remote_port" if params.remote_handshake_port is None else "remote_handshake_port"
    handshake = _port(
        handshake_field, params.remote_port if params.remote_handshake_port is None else params.remote_handshake_port
    )
    notify = handshake if params.remote_notify_port is None else _port("remote_notify_port", params.remote_notify_port)
    address = ControlAddress(params.remote_host, handshake, notify)
    try:
        is_usable = ControlAddress.parse(str(address)) == address
    except AddressError:
        is_usable = False
    if not is_usable:
        raise _bad("remote_host", f"{params.remote_host!r} is no host name or IP address")
    return address


def _port(field: str, value: int | None) -> int:
    if value is None:
        raise _bad(field, "is missing, although remote_host is given")
    if not 1 <= value <= _MAX_PORT:
        raise _bad(field, f"{value} is no port; 1 to {_MAX_PORT} are possible")
    return value


def _bad(field: str, message: str) -> BadRequest:
    return BadRequest(f"{_FIELD}.{field}", f"{_FIELD}.{field}: {message}")

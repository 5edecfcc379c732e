"""One try of a request as bytes: what each instance of its pair is sent, and what the client is told about it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.core.addresses import make_request_id
from kvbaton.discovery.messages import Dispatch, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.router.bodies import (
    ClientBody,
    Peer,
    bootstrap_body,
    decode_body,
    plain_body,
    prefill_body,
    push_params,
)
from kvbaton.router.http.messages import request_head
from kvbaton.router.policy import Pair

__all__ = ["Job", "new_job"]

_ROOM_BITS = 63


class Job(msgspec.Struct, frozen=True):
    """A request on its way to `pair` under `transfer_id`; `lines` are the headers that both instances are sent."""

    path: str
    body: ClientBody
    pair: Pair
    transfer_id: str
    lines: bytes
    rooms: list[int] | int = 0

    def __str__(self) -> str:
        source = self.pair.prefill.http_address if self.pair.prefill is not None else "nobody"
        return f"{self.transfer_id} ({source} to {self.pair.decode.http_address})"

    @property
    def is_bootstrap(self) -> bool:
        """Whether the two instances find each other in SGLang's way."""
        return self.pair.decode.registration.dispatch is Dispatch.BOOTSTRAP

    def prefill_payload(self) -> bytes:
        """To the prefill instance."""
        in_push = self.pair.transfer_mode is TransferMode.WRITE
        target = self._peer(self.pair.decode)
        content = prefill_body(self.body, self.transfer_id, target, in_push=in_push)
        return self._payload(self._source, self.pair.prefill_dp_rank, content)

    def push_payload(self) -> bytes:
        """To the decode instance, before prefill has answered."""
        source = self._peer(self._source)
        content = decode_body(self.body, push_params(self.transfer_id, source), source)
        return self._payload(self.pair.decode, self.pair.decode_dp_rank, content)

    def pull_payload(self, params: Mapping[str, Any]) -> bytes:
        """To the decode instance, with what prefill has answered."""
        content = decode_body(self.body, params, self._peer(self._source))
        return self._payload(self.pair.decode, self.pair.decode_dp_rank, content)

    def local_payload(self) -> bytes:
        """To a decode instance that prefills by itself."""
        return self._payload(self.pair.decode, self.pair.decode_dp_rank, plain_body(self.body))

    def bootstrap_payload(self, instance: Instance) -> bytes:
        """To either SGLang instance."""
        host = self._source.http_address.rpartition(":")[0]
        content = bootstrap_body(self.body, host, self._source.registration.bootstrap_port or None, self.rooms)
        rank = self.pair.prefill_dp_rank if instance is self.pair.prefill else self.pair.decode_dp_rank
        return self._payload(instance, rank, content)

    def answer_lines(self, request_id: str) -> bytes:
        """The headers that tell the client what became of its request; `request_id` is its own, or new."""
        pair = self.pair
        source = "" if pair.prefill is None else f"X-KVBaton-Prefill: {pair.prefill.http_address}\r\n"
        mode = "local" if pair.prefill is None else pair.transfer_mode.mode
        return (
            f"X-Request-Id: {request_id}\r\nX-KVBaton-Transfer: {self.transfer_id}\r\n{source}"
            f"X-KVBaton-Decode: {pair.decode.http_address}\r\nX-KVBaton-Mode: {mode}\r\n"
        ).encode("latin-1", "replace")

    @property
    def _source(self) -> Instance:
        assert self.pair.prefill is not None  # noqa: S101
        return self.pair.prefill

    def _peer(self, instance: Instance) -> Peer:
        registration = instance.registration
        return Peer(registration.dp_size, registration.tp_size, self.pair.prefill_dp_rank)

    def _payload(self, instance: Instance, dp_rank: int | None, content: bytes) -> bytes:
        lines = self.lines if dp_rank is None else b"%bX-Data-Parallel-Rank: %d\r\n" % (self.lines, dp_rank)
        return request_head("POST", self.path, instance.http_address, len(content), lines) + content


def new_job(path: str, body: ClientBody, pair: Pair, forwarded: bytes) -> Job:
    """A job under ids that nobody has used; `forwarded` are the client's headers that instances may see."""
    tail = secrets.token_hex(32)
    request_id = tail[:32]
    if pair.prefill is not None:
        request_id = make_request_id(pair.prefill.zmq_address, pair.decode.zmq_address, request_id)
    lines = b"Content-Type: application/json\r\nX-Request-Id: %b\r\n%b" % (request_id.encode(), forwarded)
    rooms: list[int] | int = 0
    if pair.decode.registration.dispatch is Dispatch.BOOTSTRAP:
        batch = body.batch_size()
        rooms = secrets.randbits(_ROOM_BITS) if batch is None else [secrets.randbits(_ROOM_BITS) for _ in range(batch)]
    return Job(path, body, pair, f"tx-{tail[32:]}", lines, rooms)

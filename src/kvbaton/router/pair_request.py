"""One try of a request as bytes: what each instance of its pair is sent, and the headers of the client's answer."""

from __future__ import annotations

import os
import secrets

import msgspec

from kvbaton.discovery.registry import Instance
from kvbaton.router.bodies import ClientBody, bootstrap_body, decode_body, plain_body, prefill_body, transfer_params
from kvbaton.router.policy import InstancePair

__all__ = ["Digits", "PairRequest", "new_pair_request"]

_ROOM_BITS = 63
_ID_DIGITS = 32
_DRAWN_BYTES = 2048


class Digits:
    """Random hex digits for ids, drawn from the system in large pieces."""

    def __init__(self) -> None:
        self._drawn = ""
        self._next = 0

    def take(self) -> str:
        """32 digits that were not returned before."""
        start = self._next
        if start >= len(self._drawn):
            self._drawn, start = os.urandom(_DRAWN_BYTES).hex(), 0
        self._next = start + _ID_DIGITS
        return self._drawn[start : start + _ID_DIGITS]


class PairRequest(msgspec.Struct, frozen=True):
    """A request on its way to `pair` under `transfer_id`; `lines` are the headers that both instances are sent."""

    path: str
    body: ClientBody
    pair: InstancePair
    transfer_id: str
    lines: bytes
    rooms: list[int] | int = 0

    def __str__(self) -> str:
        source = self.pair.prefill.http_address if self.pair.prefill is not None else "no prefill"
        return f"{self.transfer_id} ({source} to {self.pair.decode.http_address})"

    def prefill_payload(self) -> bytes:
        """To the prefill instance."""
        template = self.pair.template
        return self._payload(template.prefill_head, prefill_body(self.body, template.prefill_params.under(self.transfer_id)))

    def push_payload(self) -> bytes:
        """To the decode instance, before prefill has answered."""
        template = self.pair.template
        params = template.push_params.under(self.transfer_id, template.address_proof(self.transfer_id))
        return self._payload(template.decode_head, decode_body(self.body, params))

    def pull_payload(self, answer: bytes) -> bytes:
        """To the decode instance, with what prefill has answered. Raises ProtocolError when that names no hand-off."""
        template = self.pair.template
        params = transfer_params(answer, template.source_dp_size, template.address_proof(self.transfer_id))
        return self._payload(template.decode_head, decode_body(self.body, params))

    def local_payload(self) -> bytes:
        """To a decode instance that prefills by itself."""
        return self._payload(self.pair.template.decode_head, plain_body(self.body))

    def bootstrap_payload(self, instance: Instance) -> bytes:
        """To either SGLang instance."""
        source, template = self.pair.prefill, self.pair.template
        assert source is not None  # noqa: S101
        host = source.http_address.rpartition(":")[0]
        content = bootstrap_body(self.body, host, source.registration.bootstrap_port or None, self.rooms)
        return self._payload(template.prefill_head if instance is source else template.decode_head, content)

    def answer_lines(self, request_id: str, shows_details: bool) -> bytes:
        """The headers that show the client how its request was routed; `request_id` is its own, or new."""
        if not shows_details:
            return f"X-Request-Id: {request_id}\r\n".encode("latin-1", "replace")
        ids = f"X-Request-Id: {request_id}\r\nX-KVBaton-Transfer: {self.transfer_id}\r\n"
        return ids.encode("latin-1", "replace") + self.pair.template.answer_lines

    def _payload(self, head: bytes, content: bytes) -> bytes:
        start = b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n"
        return start % (self.path.encode(), head, self.lines, len(content)) + content


def new_pair_request(path: str, body: ClientBody, pair: InstancePair, forwarded: bytes, digits: Digits) -> PairRequest:
    """A pair request under new ids; `forwarded` are the client's headers that instances may see."""
    lines = pair.template.request_id_line(digits.take()) + forwarded
    rooms: list[int] | int = 0
    if pair.is_bootstrap:
        batch = body.batch_size()
        rooms = secrets.randbits(_ROOM_BITS) if batch is None else [secrets.randbits(_ROOM_BITS) for _ in range(batch)]
    return PairRequest(path, body, pair, f"tx-{digits.take()}", lines, rooms)

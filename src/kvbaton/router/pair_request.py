"""One try of a request as bytes: what each instance of its pair is sent, and the headers of the client's answer."""

from __future__ import annotations

import os
import secrets

import msgspec

from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.auth import MAX_ROOM_NUMBER
from kvbaton.core.handoff import room_transfer_id
from kvbaton.discovery.registry import Instance
from kvbaton.router.bodies import ClientBody, bootstrap_body, decode_body, plain_body, prefill_body, transfer_params
from kvbaton.router.pair_template import PairTemplate
from kvbaton.router.policy import InstancePair

__all__ = ["Digits", "PairRequest", "new_pair_request"]

_ID_DIGITS = 32
_DRAWN_BYTES = 2048


class Digits:
    """Random hex digits for ids, drawn from the system in large pieces."""

    def __init__(self) -> None:
        self._drawn = ""
        self._next = 0
        # Counted, not drawn: a number of 31 bits would soon be drawn twice. Routers and their processes start apart.
        self._room = secrets.randbelow(MAX_ROOM_NUMBER)

    def take(self) -> str:
        """32 digits that were not returned before."""
        start = self._next
        if start >= len(self._drawn):
            self._drawn, start = os.urandom(_DRAWN_BYTES).hex(), 0
        self._next = start + _ID_DIGITS
        return self._drawn[start : start + _ID_DIGITS]

    def room(self, template: PairTemplate) -> int:
        """A room that was not returned before."""
        self._room = self._room % MAX_ROOM_NUMBER + 1
        return template.room(self._room)


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
        if template.source_is_p2p:  # it answers with no parameters: its connector finds the peer in the request id alone
            return self.push_payload()
        params = transfer_params(answer, template.source_dp_size, template.address_proof(self.transfer_id))
        return self._payload(template.decode_head, decode_body(self.body, params))

    def local_payload(self) -> bytes:
        """To a decode instance that prefills by itself."""
        return self._payload(self.pair.template.decode_head, plain_body(self.body))

    def bootstrap_payload(self, instance: Instance) -> bytes:
        """To an SGLang instance, whose peer may be one of another engine."""
        source, template = self.pair.prefill, self.pair.template
        assert source is not None  # noqa: S101
        if self.pair.prefill_bootstraps:
            host, port = source.http_address.rpartition(":")[0], source.registration.bootstrap_port or None
        else:
            address = ControlAddress.parse(source.zmq_address)
            host, port = in_url(address.host), address.handshake
        content = bootstrap_body(self.body, host, port, self.rooms)
        return self._payload(template.prefill_head if instance is source else template.decode_head, content)

    def at_once_payloads(self) -> tuple[bytes, bytes]:
        """To prefill and to decode, where one of them or both are SGLang's."""
        pair = self.pair
        assert pair.prefill is not None  # noqa: S101
        to_prefill = self.bootstrap_payload(pair.prefill) if pair.prefill_bootstraps else self.prefill_payload()
        return to_prefill, self.bootstrap_payload(pair.decode) if pair.decode_bootstraps else self.push_payload()

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
        rooms = digits.room(pair.template) if batch is None else [digits.room(pair.template) for _ in range(batch)]
    # SGLang's instances know a request by its room alone, so its transfer id is made of that.
    room = rooms if isinstance(rooms, int) else 0
    transfer_id = room_transfer_id(room) if room else pair.template.new_transfer_id(digits.take)
    return PairRequest(path, body, pair, transfer_id, lines, rooms)

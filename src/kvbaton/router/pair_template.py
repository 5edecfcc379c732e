"""What all requests to one pair of instances have in common, as bytes: made once per pair, because it is the same each time."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from kvbaton.config import CLIENT_HEADER, HTTP_KEY_HEADER, HttpTokens
from kvbaton.core.addresses import ControlAddress, make_request_id
from kvbaton.core.auth import AddressProof, ClusterKey, RoomProof, keys_of
from kvbaton.discovery.messages import TransferMode, is_p2p_address, peer_address
from kvbaton.discovery.registry import Instance
from kvbaton.router.http.messages import head_lines
from kvbaton.router.settings import RouterSettings

__all__ = ["InstanceLines", "PairTemplate", "Params", "client_lines"]

_DECODES_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}
_IDS_AT_ONCE = 64
_PREFILLS_ELSEWHERE = {"do_remote_decode": False, "do_remote_prefill": True}


class Params(msgspec.Struct, frozen=True):
    """A `kv_transfer_params` object that lacks its transfer id."""

    start: bytes

    @classmethod
    def of(cls, values: dict[str, Any]) -> Params:
        """The object with these values."""
        return cls(msgspec.json.encode(values)[:-1])

    def under(self, transfer_id: str, proof: str = "") -> bytes:
        """The object with an id, which is one of ours and needs no escapes, and with a proof if there is one."""
        if not proof:
            return b'%b,"transfer_id":"%b"}' % (self.start, transfer_id.encode())
        return b'%b,"transfer_id":"%b","address_proof":"%b"}' % (self.start, transfer_id.encode(), proof.encode())


class PairTemplate:
    """The bytes for one pair: heads, ids and parameters. Without `prefill`, decode does it all.

    With a cluster key, decode gets the proof that its source was chosen by this router, and not by a client. A key that has
    changed since is taken with the next id.
    """

    __slots__ = (
        "_addresses", "_ids", "_key", "_proof", "_proofs", "_rooms", "_signing", "answer_lines", "decode_head", "id_prefix",
        "prefill_head", "prefill_params", "push_params", "source_dp_size", "source_is_p2p",
    )  # fmt: skip

    def __init__(
        self,
        prefill: Instance | None,
        decode: Instance,
        prefill_rank: int | None,
        decode_rank: int | None,
        cluster_key: ClusterKey | None = None,
    ) -> None:
        self.decode_head = _head(decode, decode_rank)
        self.answer_lines = _answer_lines(prefill, decode)
        self.prefill_head = b""
        self.prefill_params = self.push_params = Params(b"")
        self.source_dp_size = 1
        self.source_is_p2p = False
        self.id_prefix = b""
        self._ids: list[str] = []
        self._proofs: dict[str, str] = {}
        self._proof: AddressProof | None = None
        self._rooms: RoomProof | None = None
        self._key: ClusterKey | None = None
        self._signing = b""
        if prefill is not None:
            in_push = decode.transfer_mode is TransferMode.WRITE
            self.prefill_head = _head(prefill, prefill_rank)
            self.prefill_params = Params.of(_peer_params(_DECODES_ELSEWHERE, decode, prefill_rank, with_tp_size=in_push))
            self.push_params = Params.of(_source_params(prefill, prefill_rank))
            self.source_dp_size = prefill.registration.dp_size
            self.source_is_p2p = is_p2p_address(prefill.zmq_address)
            self.id_prefix = make_request_id(prefill.zmq_address, decode.zmq_address, "").encode()
            if cluster_key is not None:
                source, target = (peer_address(each.zmq_address) for each in (prefill, decode))
                self._key, self._addresses = cluster_key, (source, _bootstrap_address(prefill), target)
                self._follow()

    def address_proof(self, transfer_id: str) -> str:
        """The proof that this router has paired the two for this transfer; empty without a key."""
        self._follow()
        if self._proof is None:
            return ""
        return self._proofs.pop(transfer_id, "") or self._proof.of(transfer_id)

    def new_transfer_id(self, draw: Callable[[], str]) -> str:
        """A transfer id that was not returned before, of 32 random digits that `draw` returns.

        Ids and their proofs are made several at once: between two requests the code of the digest leaves the processor's
        caches, and a proof alone costs several times as much.
        """
        self._follow()
        if not self._ids:
            self._ids = [f"tx-{draw()}" for _ in range(_IDS_AT_ONCE)]
            if self._proof is not None:
                self._proofs = {each: self._proof.of(each) for each in self._ids}
        return self._ids.pop()

    def room(self, number: int) -> int:
        """A room in which the two meet: with a key, that of the number, and a proof of the pair. Never 0, which means none."""
        self._follow()
        return (secrets.randbits(63) or 1) if self._rooms is None else self._rooms.room(number)

    def _follow(self) -> None:
        """Sign with the key that is the first now; what was made ahead under another is dropped."""
        if self._key is None or (signing := keys_of(self._key)[0]) == self._signing:
            return
        source, bootstrap, target = self._addresses
        self._signing = signing
        self._proof, self._rooms = AddressProof(signing, source, target), RoomProof(signing, bootstrap, target)
        self._ids, self._proofs = [], {}

    def request_id_line(self, tail: str) -> bytes:
        """The header that names both control addresses; `tail` is 32 lowercase hex digits that make the id unique."""
        return b"X-Request-Id: %b%b\r\n" % (self.id_prefix, tail.encode())


def _bootstrap_address(prefill: Instance) -> ControlAddress:
    """What an SGLang instance takes for the address of its source: it gets a host and one port (`bootstrap_payload`)."""
    if port := prefill.registration.bootstrap_port:
        return ControlAddress.of(prefill.http_address.rpartition(":")[0].removeprefix("[").removesuffix("]"), port)
    address = peer_address(prefill.zmq_address)
    return ControlAddress.of(address.host, address.handshake)


class InstanceLines:
    """The headers of every request to an instance: its API key, and the proof that this router has the cluster key."""

    __slots__ = ("_lines", "_own", "_token", "_tokens")

    def __init__(self, settings: RouterSettings) -> None:
        api_key = settings.instance_api_key
        self._own = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._lines = head_lines(self._own)
        self._tokens = HttpTokens(settings.cluster_key)
        self._token = ""

    def now(self) -> bytes:
        """As lines, with the token of the key that is the first now."""
        if self._tokens and (token := self._tokens.current()[0]) != self._token:
            self._token = token
            self._lines = head_lines({**self._own, HTTP_KEY_HEADER: token})
        return self._lines


def client_lines(settings: RouterSettings, client: bytes) -> bytes:
    """The header by which instances know a client: a digest, so that they learn neither its API key nor its address."""
    if settings.cluster_key is None:
        return b""
    name = hashlib.blake2b(client, digest_size=8, key=keys_of(settings.cluster_key)[0][:64]).hexdigest()
    return head_lines({CLIENT_HEADER: name})


def _head(instance: Instance, dp_rank: int | None) -> bytes:
    lines = f"Host: {instance.http_address}\r\nAccept-Encoding: identity\r\nContent-Type: application/json\r\n"
    return (lines if dp_rank is None else f"{lines}X-Data-Parallel-Rank: {dp_rank}\r\n").encode()


def _answer_lines(prefill: Instance | None, decode: Instance) -> bytes:
    source = "" if prefill is None else f"X-KVBaton-Prefill: {prefill.http_address}\r\n"
    mode = "local" if prefill is None else decode.transfer_mode.mode
    return f"{source}X-KVBaton-Decode: {decode.http_address}\r\nX-KVBaton-Mode: {mode}\r\n".encode()


def _source_params(prefill: Instance, prefill_rank: int | None) -> dict[str, Any]:
    """What decode is params of its source in push: also where it listens, for engines that forget the request id."""
    address = peer_address(prefill.zmq_address)
    params = _peer_params(_PREFILLS_ELSEWHERE, prefill, prefill_rank, with_tp_size=True)
    return {**params, "remote_host": address.host, "remote_port": address.handshake}


def _peer_params(sides: dict[str, bool], peer: Instance, prefill_rank: int | None, *, with_tp_size: bool) -> dict[str, Any]:
    params: dict[str, Any] = {**sides, "remote_engine_id": None, "remote_block_ids": None}
    params["remote_dp_size"] = peer.registration.dp_size
    if with_tp_size:
        params["remote_tp_size"] = peer.registration.tp_size
        if prefill_rank is not None:
            params["remote_dp_rank"] = prefill_rank
    return params

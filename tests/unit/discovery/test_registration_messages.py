"""The registration message: the exact form on the wire, and a decoder that no bytes can break."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import Seal
from kvbaton.discovery.messages import (
    Cause,
    InstanceType,
    Malformed,
    Registration,
    TransferMode,
    check_http_address,
    decode_registration,
    encode_registration,
    peer_address,
    read_registration,
)

VERBATIM: dict[str, Any] = {
    "type": "P",
    "http_address": "127.0.0.1:8101",
    "zmq_address": "host:127.0.0.1,handshake:6301,notify:6105",
    "dp_size": 1,
    "tp_size": 1,
    "transfer_mode": "WRITE",
}


def decode(fields: Any) -> Registration | Malformed:
    return decode_registration(msgspec.msgpack.encode(fields))


def decode_bad(fields: Any) -> Malformed:
    got = decode(fields)
    assert isinstance(got, Malformed)
    return got


def test_the_message_of_a_foreign_instance_is_understood() -> None:
    got = decode(VERBATIM)
    assert got == Registration(
        type=InstanceType.PREFILL,
        http_address="127.0.0.1:8101",
        zmq_address="host:127.0.0.1,handshake:6301,notify:6105",
        transfer_mode=TransferMode.WRITE,
    )


def test_ours_is_one_map_with_the_real_routers_keys_first() -> None:
    ours = decode({**VERBATIM, "incarnation": "i1", "model": "m", "fingerprint": "f"})
    assert isinstance(ours, Registration)
    sent = msgspec.msgpack.decode(encode_registration(ours))
    assert sent == {**VERBATIM, "incarnation": "i1", "model": "m", "fingerprint": "f"}
    assert list(sent)[:6] == list(VERBATIM)


def test_where_hand_offs_are_reported_comes_back_and_must_be_an_address() -> None:
    ours = decode({**VERBATIM, "handoffs_address": "127.0.0.1:9"})
    assert isinstance(ours, Registration)
    assert decode_registration(encode_registration(ours)) == ours
    assert decode_bad({**VERBATIM, "handoffs_address": "http://elsewhere/"}).field == "handoffs_address"
    assert decode_bad({**VERBATIM, "handoffs_address": 7}).field == "handoffs_address"


def test_another_data_parallel_rank_has_a_type_of_its_own_so_that_no_other_router_takes_it_for_the_first() -> None:
    sizes = {"dp_size": 2, "tp_size": 4, "pp_size": 3}
    for rank, local, kind in ((0, 0, "P"), (1, 0, "RANK"), (1, 1, "P")):
        ours = decode({**VERBATIM, **sizes, "dp_rank": rank, "dp_size_local": local})
        assert isinstance(ours, Registration)
        assert (ours.dp_rank, ours.dp_size, ours.tp_size, ours.pp_size) == (rank, 2, 4, 3)
        sent = msgspec.msgpack.decode(encode_registration(ours))
        assert sent["type"] == kind
        assert decode(sent) == ours
        goodbye = decode_registration(encode_registration(msgspec.structs.replace(ours, bye=True)))
        assert goodbye == msgspec.structs.replace(ours, bye=True)
    assert decode_bad({**VERBATIM, "dp_size": 2, "dp_rank": 2}).field == "dp_rank"


def test_a_goodbye_has_a_type_of_its_own_so_that_no_other_router_takes_it_for_a_heartbeat() -> None:
    ours = decode({**VERBATIM, "incarnation": "i1"})
    assert isinstance(ours, Registration)
    goodbye = msgspec.structs.replace(ours, bye=True)
    sent = msgspec.msgpack.decode(encode_registration(goodbye))
    assert (sent["type"], sent["leaving"]) == ("BYE", "P")
    assert set(VERBATIM) <= set(sent)
    assert decode(sent) == goodbye
    assert decode_bad({**sent, "leaving": "X"}).cause is Cause.UNKNOWN_TYPE


class TestSeal:
    """With a cluster key a router reads only what a holder of the key has written."""

    KEY = Seal(b"k" * 32)
    OURS = Registration(
        type=InstanceType.PREFILL,
        http_address="127.0.0.1:8101",
        zmq_address="host:127.0.0.1,handshake:6301,notify:6105",
        transfer_mode=TransferMode.WRITE,
        incarnation="i1",
    )

    @pytest.mark.parametrize("bye", [False, True])
    def test_a_sealed_message_is_read_with_the_key_and_without_one(self, bye: bool) -> None:
        message = msgspec.structs.replace(self.OURS, bye=bye)
        frame = encode_registration(message, self.KEY)
        assert decode_registration(frame, self.KEY) == message
        assert decode_registration(frame) == message
        assert decode_registration(frame, Seal(None)) == message

    @pytest.mark.parametrize("field", ["http_address", "zmq_address", "transfer_mode", "incarnation", "seal"])
    def test_what_was_changed_on_the_way_is_refused(self, field: str) -> None:
        fields = msgspec.msgpack.decode(encode_registration(self.OURS, self.KEY))
        fields[field] = fields[field].replace(fields[field][-1:], b"~" if field == "seal" else "2")
        got = decode_registration(msgspec.msgpack.encode(fields), self.KEY)
        assert isinstance(got, Malformed)
        assert got.cause is Cause.NOT_SEALED

    @pytest.mark.parametrize("seal", [None, Seal(b"x" * 32)], ids=["no seal", "another key"])
    def test_an_unknown_sender_is_refused(self, seal: Seal | None) -> None:
        got = decode_registration(encode_registration(self.OURS, seal), self.KEY)
        assert isinstance(got, Malformed)
        assert got.cause is Cause.NOT_SEALED

    @pytest.mark.parametrize("seal", [7, "text", None, {}, b""])
    def test_a_seal_of_a_wrong_type_is_no_seal(self, seal: object) -> None:
        got = decode_registration(msgspec.msgpack.encode({**VERBATIM, "seal": seal}), self.KEY)
        assert isinstance(got, Malformed)
        assert got.cause is Cause.NOT_SEALED


def test_a_long_frame_is_not_looked_into() -> None:
    assert decode_bad({**VERBATIM, "padding": "x" * 9000}).cause is Cause.TOO_LONG


def test_unknown_keys_are_ignored() -> None:
    assert decode({**VERBATIM, "colour": [1, {"deep": None}]}) == decode(VERBATIM)


def test_a_list_of_instances_may_leave_sizes_out() -> None:
    got = read_registration({k: v for k, v in VERBATIM.items() if k not in ("dp_size", "tp_size")})
    assert isinstance(got, Registration)
    assert (got.dp_size, got.tp_size) == (1, 1)


class TestP2pNccl:
    """Three fields, the control address as host:port; the mode is the router's setting."""

    FIELDS: ClassVar[dict[str, str]] = {"type": "P", "http_address": "10.0.0.7:8100", "zmq_address": "10.0.0.7:21001"}

    @pytest.mark.parametrize("mode", TransferMode)
    def test_it_registers_under_the_mode_that_was_chosen(self, mode: TransferMode) -> None:
        got = decode_registration(msgspec.msgpack.encode(self.FIELDS), p2p_mode=mode)
        assert isinstance(got, Registration)
        assert (got.transfer_mode, got.dp_size, got.tp_size, got.zmq_address) == (mode, 1, 1, "10.0.0.7:21001")
        assert peer_address(got.zmq_address) == ControlAddress.of("10.0.0.7", 21001)

    def test_without_a_mode_it_is_skipped_and_the_option_is_named(self) -> None:
        got = decode_bad(self.FIELDS)
        assert (got.cause, got.field) == (Cause.MISSING_FIELD, "transfer_mode")
        assert "--p2p-mode" in str(got)

    def test_a_moriio_address_needs_its_own_mode(self) -> None:
        fields = {k: v for k, v in VERBATIM.items() if k != "transfer_mode"}
        got = decode_registration(msgspec.msgpack.encode(fields), p2p_mode=TransferMode.WRITE)
        assert isinstance(got, Malformed)


@pytest.mark.parametrize("field", ["type", "http_address", "zmq_address", "transfer_mode", "dp_size", "tp_size"])
def test_a_missing_field_is_named(field: str) -> None:
    got = decode_bad({k: v for k, v in VERBATIM.items() if k != field})
    assert (got.cause, got.field) == (Cause.MISSING_FIELD, field)
    assert field in str(got)


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("type", "p", Cause.UNKNOWN_TYPE),
        ("type", "HELLO", Cause.UNKNOWN_TYPE),
        ("type", None, Cause.WRONG_TYPE),
        ("http_address", 8000, Cause.WRONG_TYPE),
        ("http_address", "", Cause.WRONG_VALUE),
        ("http_address", "http://127.0.0.1:8101", Cause.WRONG_VALUE),
        ("http_address", "127.0.0.1", Cause.WRONG_VALUE),
        ("http_address", "127.0.0.1:0", Cause.WRONG_VALUE),
        ("http_address", "127.0.0.1:65536", Cause.WRONG_VALUE),
        ("http_address", "user@127.0.0.1:80", Cause.WRONG_VALUE),
        ("http_address", "a b:80", Cause.WRONG_VALUE),
        ("http_address", "::1:80", Cause.WRONG_VALUE),
        ("http_address", "h" * 600 + ":80", Cause.WRONG_VALUE),
        ("zmq_address", b"host:h,handshake:1,notify:1", Cause.WRONG_TYPE),
        ("zmq_address", "host:h,handshake:1", Cause.WRONG_VALUE),
        ("zmq_address", "host:h,handshake:x,notify:1", Cause.WRONG_VALUE),
        ("zmq_address", "host:h,handshake:1,notify:1\nX-Evil: 1", Cause.WRONG_VALUE),
        ("zmq_address", "host:h___decode_addr_,handshake:1,notify:1", Cause.WRONG_VALUE),
        ("dp_size", "1", Cause.WRONG_TYPE),
        ("dp_size", 1.0, Cause.WRONG_TYPE),
        ("dp_size", None, Cause.WRONG_TYPE),
        ("tp_size", True, Cause.WRONG_TYPE),
        ("tp_size", 0, Cause.WRONG_VALUE),
        ("tp_size", -1, Cause.WRONG_VALUE),
        ("tp_size", 2**40, Cause.WRONG_VALUE),
        ("transfer_mode", "write", Cause.WRONG_VALUE),
        ("incarnation", 7, Cause.WRONG_TYPE),
        ("model", "line\nbreak", Cause.WRONG_VALUE),
        ("answer", "yes", Cause.WRONG_TYPE),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object, cause: Cause) -> None:
    got = decode_bad({**VERBATIM, field: value})
    assert (got.cause, got.field) == (cause, field)
    assert str(got).startswith(f"{field}: ")


@pytest.mark.parametrize("frame", [b"", b"\xc1", b'{"type":"P"}', b"HELLO", msgspec.msgpack.encode(["P", "h:1", "z"])])
def test_what_is_no_map_is_refused_as_none(frame: bytes) -> None:
    got = decode_registration(frame)
    assert isinstance(got, Malformed)
    assert got.cause is Cause.NOT_A_MAP


def test_deep_nesting_and_trailing_bytes_are_refused() -> None:
    for frame in (b"\x81\xa1a" + b"\x91" * 100_000, msgspec.msgpack.encode(VERBATIM) + b"\x00"):
        assert isinstance(decode_registration(frame), Malformed)


@pytest.mark.parametrize("address", ["127.0.0.1:80", "[::1]:80", "node-7.example:65535"])
def test_usable_http_addresses(address: str) -> None:
    assert check_http_address(address) is None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_decoder(frame: bytes) -> None:
    assert isinstance(decode_registration(frame), Registration | Malformed)


@given(st.dictionaries(st.sampled_from([*VERBATIM, "incarnation", "model", "fingerprint", "bye", "x"]), _VALUES))
def test_no_values_break_the_decoder_and_what_passes_is_usable(changes: dict[str, Any]) -> None:
    got = decode({**VERBATIM, **changes})
    if isinstance(got, Registration):
        assert check_http_address(got.http_address) is None
        assert got.zmq_address.isprintable()
        assert decode_registration(encode_registration(got)) == got


@given(st.integers(0, 120), st.integers(0, 255))
def test_one_wrong_byte_breaks_nothing(position: int, value: int) -> None:
    frame = bytearray(msgspec.msgpack.encode(VERBATIM))
    frame[position % len(frame)] = value
    assert isinstance(decode_registration(bytes(frame)), Registration | Malformed)

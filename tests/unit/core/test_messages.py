"""The control channel's messages: round trips, tolerance for newer peers, and that nothing but ProtocolError comes out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from caches import compact_group, layout_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbaton.core.card import PROTOCOL, Card, Endpoint, ProcessId, RankCard
from kvbaton.core.handoff import Aux, HandoffKey, Incarnation, Outcome, TransferId
from kvbaton.core.messages import (
    MAX_FRAME_BYTES,
    Ask,
    ConfirmAsk,
    Confirmed,
    Hello,
    Message,
    Offered,
    Refused,
    Release,
    Renew,
    Retracted,
    decode,
    encode,
)
from kvbaton.errors import ProtocolError

ME = Incarnation("5e5e5e5e")

counts = st.integers(0, 2**63 - 1)
seconds = st.floats(0, 1e6)
texts = st.text(max_size=20)
keys = st.builds(HandoffKey, texts.map(TransferId), counts, counts)
block_lists = st.lists(st.lists(counts, max_size=5).map(tuple), max_size=3).map(tuple)
auxes = st.builds(
    Aux, counts, st.floats(-1e3, 0), st.lists(st.tuples(counts, seconds), max_size=3).map(tuple), seconds, seconds
)
endpoints = st.builds(Endpoint, texts, counts, st.dictionaries(texts, texts | counts, max_size=3))
ranks = st.builds(RankCard, counts, st.just(layout_of(compact_group())), st.lists(endpoints, max_size=2).map(tuple))
cards = st.builds(
    Card,
    incarnation=texts.map(Incarnation),
    ranks=st.lists(ranks, max_size=2).map(tuple),
    process=st.builds(ProcessId, texts, counts, counts),
    hold_s=seconds,
    give_up_s=seconds,
    protocol=counts,
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, cards, st.booleans()),
    st.builds(Ask, keys, counts),
    st.builds(Offered, keys, counts, block_lists, counts, auxes, seconds),
    st.builds(Renew, st.lists(keys, max_size=4).map(tuple)),
    st.builds(ConfirmAsk, keys, counts),
    st.builds(Confirmed, keys, counts),
    st.builds(Release, keys, st.sampled_from(Outcome), texts),
    st.builds(Retracted, keys, texts),
    st.builds(Refused, texts, st.none() | keys),
)

KEY = HandoffKey(TransferId("tx-1"))
EXAMPLES: tuple[Message, ...] = (
    Ask(KEY, 1),
    Offered(KEY, 1, ((1, 2),), 20, Aux(5, -0.5), 0.1),
    Renew((KEY, KEY)),
    ConfirmAsk(KEY, 1),
    Confirmed(KEY, 1),
    Release(KEY, Outcome.DELIVERED),
    Retracted(KEY, "gone"),
    Refused("no", KEY),
)
OFFERED_FRAME = encode(ME, "their", EXAMPLES[1])


def _as_map(message: Message) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(encode(ME, "their", message))
    return decoded


def _refusal(frame: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    return str(caught.value)


def test_there_is_an_example_and_a_strategy_of_every_message() -> None:
    kinds = set(Message.__args__)
    assert {type(message) for message in EXAMPLES} | {Hello} == kinds


@settings(deadline=None)
@given(messages, texts.map(Incarnation), texts)
def test_every_message_comes_back_as_it_was_sent(message: Message, sender: Incarnation, recipient: str) -> None:
    envelope = decode(encode(sender, recipient, message))
    assert (envelope.version, envelope.sender, envelope.recipient) == (PROTOCOL, sender, recipient)
    assert envelope.message == message
    assert type(envelope.message) is type(message)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_memoryview_is_read_too(message: Message) -> None:
    assert decode(memoryview(encode(ME, "", message))).message == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_unknown_fields_are_tolerated(message: Message) -> None:
    frame = _as_map(message)
    frame["hop_count"] = [1, {"x": None}]
    frame["message"]["colour"] = "red"
    assert decode(msgspec.msgpack.encode(frame)).message == message


@pytest.mark.parametrize("version", [0, 2, 99, -1, 2**63])
def test_another_version_is_refused_by_name_whatever_else_it_holds(version: int) -> None:
    frame = msgspec.msgpack.encode({"version": version, "message": {"type": "telepathy"}})
    assert _refusal(frame) == f"protocol version is {PROTOCOL} here and {version} there"


def test_a_frame_that_is_too_large_is_refused_unread() -> None:
    frame = encode(ME, "", Retracted(KEY, "x" * MAX_FRAME_BYTES))
    assert str(MAX_FRAME_BYTES) in _refusal(frame)


def test_a_frame_of_the_largest_size_is_read() -> None:
    empty = len(encode(ME, "", Retracted(KEY, "x" * 70_000))) - 70_000
    frame = encode(ME, "", Retracted(KEY, "x" * (MAX_FRAME_BYTES - empty)))
    assert len(frame) == MAX_FRAME_BYTES
    decode(frame)


WRONG: dict[str, dict[str, Any]] = {
    "no version": {"version": ...},
    "a version that is no number": {"version": "1"},
    "no sender": {"sender": ...},
    "a sender that is no text": {"sender": 7},
    "a null recipient": {"recipient": None},
    "no message": {"message": ...},
    "a message that is a list": {"message": []},
    "a message without a type": {"message": {"reason": "no"}},
    "an unknown message": {"message": {"type": "telepathy"}},
    "a message with a field missing": {"message": {"type": "ask", "key": ["tx"]}},
    "a key that is empty": {"message": {"type": "ask", "key": [], "grant": 1}},
    "a key that is a map": {"message": {"type": "ask", "key": {"transfer_id": "x"}, "grant": 1}},
    "an outcome that does not exist": {"message": {"type": "release", "key": ["x"], "outcome": "vanished"}},
    "blocks that are text": {"message": _as_map(EXAMPLES[1])["message"] | {"blocks": [["1"]]}},
    "a block that is a fraction": {"message": _as_map(EXAMPLES[1])["message"] | {"blocks": [[1.5]]}},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_message_of_ours_is_refused(change: dict[str, Any]) -> None:
    fields = _as_map(EXAMPLES[0]) | change
    _refusal(msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not ...}))


HOSTILE = {
    "nothing": b"",
    "one null": b"\xc0",
    "trailing bytes": OFFERED_FRAME + b"\x00",
    "a reserved byte": b"\xc1",
    "an array that claims 4 billion items": b"\xdd\xff\xff\xff\xff",
    "a map that claims 4 billion items": b"\xdf\xff\xff\xff\xff",
    "a text that claims 4 GiB": b"\x81\xa7version\xdb\xff\xff\xff\xff",
    "nested arrays": b"\x91" * 1_000_000 + b"\xc0",
    "nested maps": b"\x81\xa1x" * 500_000 + b"\xc0",
    "deep nesting in an unknown field": b"\x82\xa7version\x01\xa1x" + b"\x91" * 1_000_000 + b"\xc0",
    "text that is not UTF-8": OFFERED_FRAME.replace(b"tx-1", b"\xff\xfe\xfd\xfc"),
    "a key that is not UTF-8": b"\x81\xa2\xff\xff\x01",
    "an extension": b"\xc7\x01\x05x",
    "json": b'{"version": 1}',
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94.",
}


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_frames_are_refused(frame: bytes) -> None:
    assert len(_refusal(frame)) < 2000


def _reads_or_refuses(frame: bytes) -> None:
    try:
        decode(frame)
    except ProtocolError:
        return


@given(st.binary(max_size=200))
@example(b"\x81\xa7version\x01")
def test_random_bytes_are_read_or_refused(frame: bytes) -> None:
    _reads_or_refuses(frame)


@given(messages, st.data())
@settings(deadline=None)
def test_truncated_frames_are_refused(message: Message, data: st.DataObject) -> None:
    frame = encode(ME, "x", message)
    with pytest.raises(ProtocolError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_frames_are_read_or_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(ME, "x", message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _reads_or_refuses(bytes(frame))


@given(st.recursive(st.none() | st.booleans() | counts | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_any_msgpack_value_as_a_message_is_read_or_refused(value: Any) -> None:
    _reads_or_refuses(msgspec.msgpack.encode(value))
    fields = {"version": PROTOCOL, "sender": "x", "recipient": "", "message": value}
    _reads_or_refuses(msgspec.msgpack.encode(fields))

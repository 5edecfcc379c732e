"""The control channel's messages: round trips, tolerance for newer peers, and that nothing but ProtocolError comes out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from caches import compact_group, layout_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbaton.core.card import PROTOCOL, Card, Endpoint, ProcessId, RankCard
from kvbaton.core.handoff import MAX_TRANSFER_ID, Aux, Executor, HandoffKey, Incarnation, Mode, Outcome, Span, TransferId
from kvbaton.core.messages import (
    MAX_FRAME_BYTES,
    MAX_INCARNATION,
    MAX_MORE,
    MAX_REASON,
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
    decode,
    encode,
    encode_several,
    split,
)
from kvbaton.errors import ProtocolError

ME = Incarnation("5e5e5e5e")

numbers = st.integers(0, 1 << 62)
counts = st.integers(0, 2**63 - 1)
seconds = st.floats(0, 1e6)
texts = st.text(max_size=20)
names = st.text(min_size=1, max_size=20)
incarnations = names.map(Incarnation)
outcomes = st.sampled_from(Outcome)
keys = st.builds(HandoffKey, names.map(TransferId), numbers, numbers)
block_lists = st.lists(st.lists(numbers, max_size=5).map(tuple), max_size=3).map(tuple)
spans = st.lists(st.builds(Span, numbers, numbers, numbers, numbers, numbers), max_size=4).map(tuple)
auxes = st.builds(
    Aux, counts, st.floats(-1e3, 0), st.lists(st.tuples(counts, seconds), max_size=3).map(tuple), seconds, seconds
)
endpoints = st.builds(Endpoint, texts, counts, st.dictionaries(texts, texts | counts, max_size=3))
ranks = st.builds(RankCard, counts, st.just(layout_of(compact_group())), st.lists(endpoints, max_size=2).map(tuple))
cards = st.builds(
    Card,
    incarnation=incarnations,
    ranks=st.lists(ranks, max_size=2).map(tuple),
    process=st.builds(ProcessId, texts, counts, counts),
    defer_timeout=seconds,
    transfer_timeout=seconds,
    protocol=counts,
)
KINDS: dict[type, st.SearchStrategy[Message]] = {
    Hello: st.builds(Hello, cards, st.booleans(), takes_several=st.booleans()),
    Refused: st.builds(Refused, texts, st.none() | keys, numbers, st.booleans()),
    Grant: st.builds(
        Grant,
        keys,
        st.integers(1, 1 << 62),
        texts,
        st.sampled_from(Mode),
        st.sampled_from(Executor),
        numbers,
        block_lists,
        numbers,
        st.integers(1, 1 << 62),
    ),
    Announced: st.builds(Announced, keys, numbers, numbers, block_lists, spans),
    Prefilled: st.builds(Prefilled, keys, numbers, numbers, numbers, numbers, seconds),
    AuxSent: st.builds(AuxSent, keys, numbers, auxes),
    Retracted: st.builds(Retracted, keys, numbers, numbers),
    ConfirmAsk: st.builds(ConfirmAsk, keys, numbers, numbers),
    Confirmed: st.builds(Confirmed, keys, numbers, numbers, numbers),
    Release: st.builds(Release, keys, numbers),
    Stop: st.builds(Stop, keys, numbers, outcomes, texts),
    Stopped: st.builds(Stopped, keys, numbers),
    Over: st.builds(Over, keys, numbers, outcomes, texts),
    Heartbeat: st.builds(Heartbeat, st.booleans(), st.lists(st.tuples(keys, numbers), max_size=4).map(tuple)),
}
messages = st.one_of(list(KINDS.values()))

KEY = HandoffKey(TransferId("tx-1"))
ANNOUNCED = Announced(KEY, 1, 1, ((1, 2),), (Span(0, 0, 20, 0, 2),))
GRANT = Grant(KEY, 1, "d16e57", Mode.PUSH, Executor.SOURCE_WRITES, 1, ((3, 4),), 0, 1)
PREFILLED = Prefilled(KEY, 1, 1, 2, 20, 0.1)
EXAMPLES: tuple[Message, ...] = (
    GRANT,
    ANNOUNCED,
    PREFILLED,
    AuxSent(KEY, 1, Aux(5, -0.5)),
    Retracted(KEY, 1, 2),
    ConfirmAsk(KEY, 1, 1),
    Confirmed(KEY, 1, 1, 2),
    Release(KEY, 1),
    Stop(KEY, 1, Outcome.CANCELLED, "the client is gone"),
    Stopped(KEY, 1),
    Over(KEY, 1, Outcome.EXPIRED, "nobody came"),
    Heartbeat(True, ((KEY, 1), (KEY, 2))),
    Refused("no", KEY, 1, True),
)
FRAME = encode(ME, "their", ANNOUNCED)


def _name(message: Message) -> str:
    return type(message).__name__


def _as_map(message: Message) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.msgpack.decode(encode(ME, "their", message))
    return decoded


def _refusal(frame: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    return str(caught.value)


def _changed(message: Message, **fields: Any) -> bytes:
    """The frame of a message with some of its fields replaced, whatever their types say."""
    frame = _as_map(message)
    frame["message"] |= fields
    return msgspec.msgpack.encode(frame)


def test_there_is_an_example_and_a_strategy_of_every_message() -> None:
    kinds = set(Message.__args__)
    assert {type(message) for message in EXAMPLES} | {Hello} == kinds
    assert set(KINDS) == kinds


@settings(deadline=None)
@given(messages, incarnations, texts)
def test_every_message_comes_back_as_it_was_sent(message: Message, sender: Incarnation, recipient: str) -> None:
    envelope = decode(encode(sender, recipient, message))
    assert (envelope.version, envelope.sender, envelope.recipient) == (PROTOCOL, sender, recipient)
    assert envelope.message == message
    assert type(envelope.message) is type(message)


@settings(deadline=None)
@given(st.lists(messages, min_size=1, max_size=1 + MAX_MORE), incarnations, texts)
def test_messages_of_one_frame_come_back_in_their_order(sent: list[Message], sender: Incarnation, recipient: str) -> None:
    envelopes = list(split(decode(encode_several(sender, recipient, sent))))
    assert [each.message for each in envelopes] == sent
    assert {(each.version, each.sender, each.recipient, each.more) for each in envelopes} == {(PROTOCOL, sender, recipient, ())}


@pytest.mark.parametrize("message", EXAMPLES, ids=_name)
def test_one_message_alone_is_a_frame_that_older_releases_know(message: Message) -> None:
    assert encode_several(ME, "their", [message]) == encode(ME, "their", message)
    assert "more" not in _as_map(message)


def test_a_frame_of_too_many_messages_is_refused_whole() -> None:
    most = [Release(KEY, number) for number in range(1 + MAX_MORE)]
    assert len(list(split(decode(encode_several(ME, "", most))))) == 1 + MAX_MORE
    assert "more" in _refusal(encode_several(ME, "", [*most, Release(KEY, 99)]))


@pytest.mark.parametrize("other", [{"type": "telepathy"}, {"type": "release", "key": ["tx"]}, None, 7, [], "release"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_message_that_is_none_of_ours_makes_the_whole_frame_invalid(place: int, other: object) -> None:
    frame: dict[str, Any] = msgspec.msgpack.decode(encode_several(ME, "", [Release(KEY, number) for number in range(4)]))
    decode(msgspec.msgpack.encode(frame))
    frame["more"][place] = other
    _refusal(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize("message", EXAMPLES, ids=_name)
def test_a_memoryview_is_read_too(message: Message) -> None:
    assert decode(memoryview(encode(ME, "", message))).message == message


@pytest.mark.parametrize("message", EXAMPLES, ids=_name)
def test_unknown_fields_are_tolerated(message: Message) -> None:
    frame = _as_map(message)
    frame["hop_count"] = [1, {"x": None}]
    frame["message"]["colour"] = "red"
    assert decode(msgspec.msgpack.encode(frame)).message == message


@pytest.mark.parametrize("version", [0, PROTOCOL + 1, 99, -1, 2**63])
def test_another_version_is_refused_by_name_whatever_else_it_holds(version: int) -> None:
    frame = msgspec.msgpack.encode({"version": version, "message": {"type": "telepathy"}})
    assert _refusal(frame) == f"protocol version is {PROTOCOL} here and {version} there"


def _announced_of(frame_bytes: int) -> bytes:
    """A frame of exactly so many bytes."""
    few, many = (len(encode(ME, "", msgspec.structs.replace(ANNOUNCED, blocks=((1,) * count,)))) for count in (70_000, 70_001))
    assert many == few + 1
    return encode(ME, "", msgspec.structs.replace(ANNOUNCED, blocks=((1,) * (70_000 + frame_bytes - few),)))


def test_a_frame_that_is_too_large_is_refused_unread() -> None:
    frame = _announced_of(MAX_FRAME_BYTES + 1)
    assert len(frame) == MAX_FRAME_BYTES + 1
    assert str(MAX_FRAME_BYTES) in _refusal(frame)


def test_a_frame_of_the_largest_size_is_read() -> None:
    frame = _announced_of(MAX_FRAME_BYTES)
    assert len(frame) == MAX_FRAME_BYTES
    decode(frame)


def test_a_transfer_id_of_the_longest_length_is_read_and_a_longer_one_refused() -> None:
    longest = "é" * MAX_TRANSFER_ID
    assert decode(_changed(ConfirmAsk(KEY, 1, 1), key=[longest])).message == ConfirmAsk(HandoffKey(TransferId(longest)), 1, 1)
    assert "length <= 256" in _refusal(_changed(ConfirmAsk(KEY, 1, 1), key=[longest + "é"]))
    assert "length >= 1" in _refusal(_changed(ConfirmAsk(KEY, 1, 1), key=[""]))


@pytest.mark.parametrize("message", [message for message in EXAMPLES if hasattr(message, "key")], ids=_name)
def test_every_message_refuses_an_absurd_key(message: Message) -> None:
    for key in (["x" * 100_000], ["x", -1], ["x", 0, -1], ["x", 1 << 63], ["x", 0, 1 << 63]):
        _refusal(_changed(message, key=key))


def test_a_heartbeat_refuses_an_absurd_key_anywhere_in_its_list() -> None:
    _refusal(_changed(Heartbeat(True, ()), live=[[["x"], 1], [["x" * 257], 1]]))


def test_an_absurd_incarnation_is_refused() -> None:
    decode(encode(Incarnation("i" * MAX_INCARNATION), "r" * MAX_INCARNATION, Release(KEY, 1)))
    _refusal(encode(Incarnation("i" * (MAX_INCARNATION + 1)), "", Release(KEY, 1)))
    _refusal(encode(Incarnation(""), "", Release(KEY, 1)))
    _refusal(encode(ME, "r" * (MAX_INCARNATION + 1), Release(KEY, 1)))


def test_a_reason_as_we_send_it_is_read_and_an_absurd_one_refused() -> None:
    decode(encode(ME, "", Over(KEY, 1, Outcome.FAILED, "x" * MAX_REASON)))
    _refusal(encode(ME, "", Over(KEY, 1, Outcome.FAILED, "x" * 100_000)))


NUMBERS = [
    (GRANT, "grant"),
    (GRANT, "epoch"),
    (GRANT, "cached_tokens"),
    (ANNOUNCED, "generation"),
    (PREFILLED, "span_count"),
    (PREFILLED, "tokens"),
    (Confirmed(KEY, 1, 1, 2), "span_count"),
]


@pytest.mark.parametrize(("message", "field"), NUMBERS)
@pytest.mark.parametrize("value", [-1, -(2**63), (1 << 62) + 1, 2**64 - 1, 1.5, "1", None, True])
def test_a_number_that_is_none_of_ours_is_refused(message: Message, field: str, value: object) -> None:
    decode(_changed(message, **{field: 1 << 62}))
    assert field in _refusal(_changed(message, **{field: value}))


@pytest.mark.parametrize("held_s", [-0.1, float("nan"), float("inf"), float("-inf"), 1e300, "1"])
def test_a_duration_is_finite_and_not_negative(held_s: object) -> None:
    assert "held_s" in _refusal(_changed(PREFILLED, held_s=held_s))


@pytest.mark.parametrize("blocks", [[[-1]], [[1 << 63]], [["1"]], [[1.5]], [1], "ab", None])
def test_blocks_that_cannot_be_are_refused(blocks: object) -> None:
    _refusal(_changed(ANNOUNCED, blocks=blocks))
    _refusal(_changed(GRANT, blocks=blocks))


@pytest.mark.parametrize(
    "span", [[0, -1, 2, 0, 1], [-1, 0, 2, 0, 1], [0, 0, 2, 0, 1 << 63], [0, 0, 2, 0], [0, 0, 2.5, 0, 1], {}]
)
def test_spans_that_cannot_be_are_refused(span: object) -> None:
    _refusal(_changed(ANNOUNCED, spans=[span]))


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
    "a message with a field missing": {"message": {"type": "release", "key": ["tx"]}},
    "a key that is empty": {"message": {"type": "release", "key": [], "grant": 1}},
    "a key that is a map": {"message": {"type": "release", "key": {"transfer_id": "x"}, "grant": 1}},
    "an outcome that does not exist": {"message": {"type": "stop", "key": ["x"], "grant": 1, "outcome": "vanished"}},
    "a mode that does not exist": {"message": _as_map(GRANT)["message"] | {"mode": "shove"}},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_message_of_ours_is_refused(change: dict[str, Any]) -> None:
    fields = _as_map(EXAMPLES[0]) | change
    _refusal(msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not ...}))


HOSTILE = {
    "nothing": b"",
    "one null": b"\xc0",
    "trailing bytes": FRAME + b"\x00",
    "a reserved byte": b"\xc1",
    "an array that claims 4 billion items": b"\xdd\xff\xff\xff\xff",
    "a map that claims 4 billion items": b"\xdf\xff\xff\xff\xff",
    "a text that claims 4 GiB": b"\x81\xa7version\xdb\xff\xff\xff\xff",
    "nested arrays": b"\x91" * 1_000_000 + b"\xc0",
    "nested maps": b"\x81\xa1x" * 500_000 + b"\xc0",
    "deep nesting in an unknown field": b"\x82\xa7version\x01\xa1x" + b"\x91" * 1_000_000 + b"\xc0",
    "text that is not UTF-8": FRAME.replace(b"tx-1", b"\xff\xfe\xfd\xfc"),
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


@given(st.lists(st.sampled_from(EXAMPLES), min_size=2, max_size=1 + MAX_MORE), st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_frames_of_several_messages_are_read_or_refused(sent: list[Message], data: st.DataObject) -> None:
    frame = bytearray(encode_several(ME, "x", sent))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _reads_or_refuses(bytes(frame))


@given(st.recursive(st.none() | st.booleans() | counts | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)))
def test_any_msgpack_value_as_a_message_is_read_or_refused(value: Any) -> None:
    _reads_or_refuses(msgspec.msgpack.encode(value))
    fields = {"version": PROTOCOL, "sender": "x", "recipient": "", "message": value}
    _reads_or_refuses(msgspec.msgpack.encode(fields))
    _reads_or_refuses(msgspec.msgpack.encode(_as_map(EXAMPLES[0]) | {"more": value}))

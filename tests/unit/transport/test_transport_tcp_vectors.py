"""What is sent and filled in order: laid out by NumPy, and by the loops in C that are held to it."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import ProtocolError, RangeError
from kvbaton.transport.base import Region, Runs
from kvbaton.transport.runs import MAX_SLICE_RUNS, Loops, check_runs, load_loops
from kvbaton.transport.tcp.sockets import VectorCalls
from kvbaton.transport.tcp.vectors import LoopVectors, Vectors, reply_vectors, request_vectors, target_vectors
from kvbaton.transport.tcp.wire import (
    MAX_PAYLOAD_BYTES,
    MAX_PIECES,
    PIECE_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    OpenBody,
    Status,
    pack_frame,
    pack_open,
    pack_reply,
    pack_request,
    unpack_reply,
)

LOOPS = load_loops()
WAYS = pytest.mark.parametrize("loops", [None, LOOPS] if LOOPS else [None], ids=lambda loops: "C" if loops else "NumPy")
needs_compiler = pytest.mark.skipif(LOOPS is None, reason="needs a C compiler")

FAR = 1 << 40
"""Where a region is said to lie whose memory nothing touches."""

REGIONS = st.sampled_from([1, 64, 4096, MAX_PAYLOAD_BYTES, 1 << 62])
SIZES = st.sampled_from([0, 1, 8, 64, 4096, MAX_PAYLOAD_BYTES - 1, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1])
HUGE = st.sampled_from([2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1])
PIECES = st.lists(
    st.tuples(st.one_of(st.integers(0, 70), SIZES, HUGE), st.one_of(st.integers(0, 70), SIZES, HUGE)), min_size=1, max_size=8
)
RUNS = st.lists(st.tuples(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(0, 100)), min_size=1, max_size=12)


def region_of(region_bytes: int) -> Region:
    return Region(FAR, region_bytes, memoryview(b""))


def body_of(pieces: list[tuple[int, int]]) -> bytearray:
    return bytearray(b"".join(struct.pack("<QQ", *piece) for piece in pieces))


def runs_of(rows: list[tuple[int, int, int]]) -> Runs:
    return np.array(rows, np.uint64).reshape(-1, 3)


def pieces_left(vectors: Vectors) -> list[list[int]]:
    return vectors.peek(vectors.remaining_bytes)


def described(vectors: Vectors) -> list[tuple[int, int]]:
    """What a system call is given."""
    address, count = vectors.head()
    return [struct.unpack("<QQ", ctypes.string_at(address + 16 * row, 16)) for row in range(count)]


def reply_or_error(pieces: list[tuple[int, int]], region_bytes: int, loops: Loops | None) -> object:
    """The head of the reply and the pieces behind it, or what is raised."""
    try:
        reply = reply_vectors(9, body_of(pieces), region_of(region_bytes), loops)
    except (ProtocolError, RangeError) as error:
        return type(error), str(error)
    (head, size), *behind = pieces_left(reply)
    return ctypes.string_at(head, size), behind, reply.total_bytes


@needs_compiler
@given(PIECES, REGIONS)
def test_the_loop_lays_out_the_reply_that_numpy_does_or_raises_the_same(
    pieces: list[tuple[int, int]], region_bytes: int
) -> None:
    found = reply_or_error(pieces, region_bytes, LOOPS)
    assert found == reply_or_error(pieces, region_bytes, None)
    is_right = (
        all(offset + size <= region_bytes for offset, size in pieces) and sum(size for _, size in pieces) <= MAX_PAYLOAD_BYTES
    )
    if is_right:
        total = sum(size for _, size in pieces)
        behind = [[FAR + offset, size] for offset, size in pieces if size]
        assert found == (pack_reply(Status.OK, 9, total), behind, REPLY_BYTES + total)
    else:
        assert found[0] in (ProtocolError, RangeError)  # type: ignore[index]


@WAYS
def test_a_reply_to_pieces_that_are_too_much_or_outside_is_refused_by_name(loops: Loops | None) -> None:
    half = MAX_PAYLOAD_BYTES // 2
    reply_vectors(1, body_of([(0, half), (half, half)]), region_of(MAX_PAYLOAD_BYTES), loops)
    with pytest.raises(ProtocolError, match="at most"):
        reply_vectors(1, body_of([(0, half), (0, half), (0, 1)]), region_of(MAX_PAYLOAD_BYTES), loops)
    with pytest.raises(RangeError, match="run 1: source offset 65 with 0 bytes lies outside the source region of 64 bytes"):
        reply_vectors(1, body_of([(64, 0), (65, 0)]), region_of(64), loops)


@needs_compiler
@pytest.mark.parametrize("order", ["C", "F", "backwards"])
@given(rows=RUNS)
def test_the_loop_lays_out_the_request_and_the_target_that_numpy_does(order: str, rows: list[tuple[int, int, int]]) -> None:
    runs = runs_of(rows)
    runs = {"C": runs, "F": np.asfortranarray(runs), "backwards": runs[::-1].copy()[::-1]}[order]
    request, payload_bytes = request_vectors(2**64 - 1, runs, LOOPS)
    assert isinstance(request, LoopVectors)
    [(address, size)] = described(request)
    assert ctypes.string_at(address, size) == pack_request(2**64 - 1, runs)
    assert payload_bytes == sum(size for _, _, size in rows)
    target, reference = (target_vectors(3, runs, region_of(1 << 62), loops) for loops in (LOOPS, None))
    assert isinstance(target, LoopVectors)
    assert pieces_left(target) == pieces_left(reference) == [[FAR + to, size] for _, to, size in rows if size]
    assert target.total_bytes == reference.total_bytes == payload_bytes


@WAYS
@given(st.lists(st.integers(0, 9), max_size=12), st.data())
def test_vectors_walk_their_pieces_in_order(loops: Loops | None, lengths: list[int], data: st.DataObject) -> None:
    memory = np.arange(sum(lengths) + 1, dtype=np.uint8)
    starts = np.cumsum([0, *lengths])[:-1]
    runs = np.stack([starts, starts, np.array(lengths, np.int64)], axis=1).astype(np.uint64)
    vectors = target_vectors(1, runs, Region.of(memory), loops)
    seen = b""
    while vectors.remaining_bytes:
        pieces = described(vectors)
        assert pieces == [tuple(piece) for piece in pieces_left(vectors)]
        assert vectors.first() == pieces[0]
        most = data.draw(st.integers(1, vectors.remaining_bytes))
        assert sum(size for _, size in vectors.peek(most)) == most
        head = b"".join(ctypes.string_at(*piece) for piece in pieces)
        moved = data.draw(st.integers(1, len(head)))
        seen += head[:moved]
        vectors.advance(moved)
    assert seen == memory[:-1].tobytes()
    assert pieces_left(vectors) == []


@needs_compiler
@given(st.lists(st.tuples(st.integers(0, 4096), st.one_of(st.integers(0, 9), SIZES)), min_size=1, max_size=12), st.data())
def test_the_loop_leaves_bytes_behind_as_numpy_does(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    runs = runs_of([(0, at, size) for at, size in pieces])
    loop, reference = (target_vectors(1, runs, region_of(1 << 62), loops) for loops in (LOOPS, None))
    while reference.remaining_bytes:
        assert described(loop) == described(reference)
        assert loop.first() == reference.first()
        _, next_size = reference.first()
        moved = data.draw(st.one_of(st.integers(1, reference.remaining_bytes), st.integers(1, next_size), st.just(next_size)))
        loop.advance(moved)
        reference.advance(moved)
        assert (loop.remaining_bytes, loop.total_bytes) == (reference.remaining_bytes, reference.total_bytes)
        most = data.draw(st.integers(0, reference.remaining_bytes + 1))
        assert loop.peek(most) == reference.peek(most)
    assert (loop.remaining_bytes, described(loop)) == (0, [])


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        yield here, there


@WAYS
def test_bytes_are_sent_from_and_filled_into_pieces(loops: Loops | None, pair: tuple[socket.socket, socket.socket]) -> None:
    """More pieces than one system call takes, and more bytes than a socket does."""
    here, there = pair
    source, target = np.random.default_rng(1).integers(0, 255, (2, 3 << 20), np.uint8)
    count, calls = 3000, VectorCalls(loops)
    places = np.random.default_rng(2).permutation(count) * 1024
    runs = np.stack([places, places[::-1], np.full(count, 1000)], axis=1).astype(np.uint64)
    sent = target_vectors(1, runs[:, [1, 0, 2]], Region.of(source), loops)
    filled = target_vectors(1, runs, Region.of(target), loops)
    with pytest.raises(BlockingIOError):
        calls.receive(there, filled)
    expected = target.copy()
    for at, to, size in runs.tolist():
        expected[to : to + size] = source[at : at + size]
    while filled.remaining_bytes:
        if sent.remaining_bytes:
            assert 0 < calls.send(here, sent) <= 1000 * MAX_SLICE_RUNS
        calls.receive(there, filled)
    assert np.array_equal(target, expected)
    here.close()
    with pytest.raises(BrokenPipeError):
        calls.send(there, target_vectors(1, runs, Region.of(target), loops))
    assert calls.receive(there, target_vectors(1, runs, Region.of(target), loops)) == 0


REGION = Region.of(bytearray(range(256)) * 256)


def taken(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 20)
    except BlockingIOError:
        return b""


@needs_compiler
@pytest.mark.parametrize("count", [1, 3, MAX_SLICE_RUNS, MAX_SLICE_RUNS + 1, MAX_PIECES])
def test_a_request_to_read_is_answered_in_one_call(count: int, pair: tuple[socket.socket, socket.socket]) -> None:
    reader, owner = pair
    calls, kept = VectorCalls(LOOPS), None
    runs = runs_of([(number * 7, 0, number % 3) for number in range(count)])
    message = pack_request(5, runs)
    for _ in range(3):
        reader.sendall(message + b"the next one")
        begun = calls.answer_read(owner, REGION, kept)
        assert begun is not None
        taken_bytes, kept = begun
        assert taken_bytes == len(message)
        assert kept.most_pieces == max(count, MAX_SLICE_RUNS)
        assert owner.recv(64) == b"the next one"
        content = b"".join(bytes(REGION.view[at : at + size]) for at, _, size in runs.tolist())
        answer = taken(reader)
        while kept.remaining_bytes:
            calls.send(owner, kept)
            answer += taken(reader)
        assert answer == pack_reply(Status.OK, 5, len(content)) + content


WELL = runs_of([(0, 0, 8), (8, 0, 8)])
OPEN = pack_open(1, OpenBody(bytes(16), 1, 1))


@needs_compiler
@pytest.mark.parametrize(
    "message",
    [
        b"",
        pack_request(1, WELL)[: REQUEST_BYTES - 1],
        pack_request(1, WELL)[:-1],
        OPEN,
        pack_frame(1, 1, 1, b"", WELL),
        b"WHAT" + pack_request(1, WELL)[4:],
        struct.pack("<4sIQ", b"READ", 0, 1),
        struct.pack("<4sIQ", b"READ", MAX_PIECES + 1, 1) + bytes((MAX_PIECES + 1) * PIECE_BYTES),
        struct.pack("<4sIQ", b"READ", 2**32 - 1, 1) + bytes(64),
        pack_request(1, runs_of([(0, 0, 8), (65536, 0, 1)])),
        pack_request(1, runs_of([(2**64 - 4, 0, 8)])),
        pack_request(1, runs_of([(65537, 0, 0)])),
        struct.pack("<4sIQQQQQ", b"READ", 2, 1, 0, 2**63, 0, 2**63),
    ],
)
def test_everything_else_is_left_where_it_is(message: bytes, pair: tuple[socket.socket, socket.socket]) -> None:
    reader, owner = pair
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    reader.sendall(message)
    assert VectorCalls(LOOPS).answer_read(owner, REGION, None) is None
    assert taken(owner) == message
    assert taken(reader) == b""


@needs_compiler
@given(st.binary(max_size=80), st.booleans())
def test_no_bytes_that_come_are_answered_with_memory_outside_the_region(data: bytes, is_read: bool) -> None:
    owner_end, reader_end = socket.socketpair()
    with owner_end as owner, reader_end as reader:
        owner.setblocking(False)
        reader.setblocking(False)
        message = (b"READ" + data) if is_read else data
        reader.sendall(message)
        begun = VectorCalls(LOOPS).answer_read(owner, REGION, None)
        if begun is not None:
            named = struct.iter_unpack("<QQ", message[REQUEST_BYTES : begun[0]])
            content = b"".join(bytes(REGION.view[at : at + size]) for at, size in named)
            answer = taken(reader)
            assert unpack_reply(answer[:REPLY_BYTES]).payload_bytes == len(content)
            assert answer[REPLY_BYTES:] == content
        assert taken(owner) == message[begun[0] if begun else 0 :]


@needs_compiler
def test_a_reply_is_begun_only_where_its_head_is_the_one_that_is_due(pair: tuple[socket.socket, socket.socket]) -> None:
    owner, reader = pair
    memory = bytearray(16)
    target, calls = target_vectors(7, runs_of([(0, 8, 8), (0, 0, 4)]), Region.of(memory), LOOPS), VectorCalls(LOOPS)
    due = pack_reply(Status.OK, 7, 12)
    for head in (
        pack_reply(Status.OK, 8, 12),
        pack_reply(Status.OK, 7, 11),
        pack_reply(Status.RANGE, 7, 12),
        b"WHAT" + due[4:],
        due[:-1],
    ):
        owner.sendall(head + b"x" * 12 if len(head) == REPLY_BYTES else head)
        assert calls.begin_reply(reader, target) == 0
        assert taken(reader)[: len(head)] == head
        assert (bytes(memory), target.remaining_bytes) == (bytes(16), 12)
    with pytest.raises(BlockingIOError):
        calls.begin_reply(reader, target)
    owner.sendall(due + b"12345678abcd+next")
    assert calls.begin_reply(reader, target) == REPLY_BYTES + 12
    assert (bytes(memory), target.remaining_bytes) == (b"abcd\0\0\0\x0012345678", 0)
    assert taken(reader) == b"+next"
    owner.sendall(due)
    assert calls.begin_reply(reader, target) == 0, "its bytes have come before"


@needs_compiler
def test_a_reply_that_comes_piece_by_piece_is_begun_with_what_is_there(pair: tuple[socket.socket, socket.socket]) -> None:
    owner, reader = pair
    memory = bytearray(8)
    target, calls = target_vectors(7, runs_of([(0, 0, 8)]), Region.of(memory), LOOPS), VectorCalls(LOOPS)
    owner.sendall(pack_reply(Status.OK, 7, 8))
    assert (calls.begin_reply(reader, target), target.remaining_bytes) == (REPLY_BYTES, 8)
    owner.sendall(b"abc")
    assert (calls.receive(reader, target), target.remaining_bytes) == (3, 5)
    owner.sendall(b"defgh")
    assert calls.begin_reply(reader, target) == 0
    assert (calls.receive(reader, target), bytes(memory)) == (5, b"abcdefgh")


@needs_compiler
def test_errors_of_a_socket_keep_their_number() -> None:
    calls, target = VectorCalls(LOOPS), target_vectors(7, runs_of([(0, 0, 8)]), REGION, LOOPS)
    with socket.socket() as unconnected:
        for call in (calls.begin_reply, calls.receive):
            with pytest.raises(OSError, match="not connected") as caught:
                call(unconnected, target)
            assert caught.value.errno == errno.ENOTCONN


def test_what_was_checked_is_laid_out_as_it_is() -> None:
    """The copy that `post` makes has its columns in one piece each."""
    runs = check_runs(runs_of([(0, 64, 8), (8, 32, 8)]), 64, 128, LOOPS)
    target = target_vectors(1, runs, region_of(128), LOOPS)
    assert pieces_left(target) == [[FAR + 64, 8], [FAR + 32, 8]]

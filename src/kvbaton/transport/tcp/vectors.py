"""Pieces of memory that are sent or filled in order: laid out as system calls take them, and left behind as bytes are moved.

Each request needs that three times: the request itself, where its bytes go, and the reply. Where a C compiler was there, each
is one call of `vectors.c`. Elsewhere NumPy does it in some ten calls. With warm caches that would make little difference; but
between two requests some 16 MiB pass through them, and then a call of NumPy takes ten microseconds and more.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvbaton.transport.base import Region, Runs
from kvbaton.transport.runs import MAX_SLICE_RUNS, Loops, VectorPlace, check_offsets
from kvbaton.transport.tcp import wire

__all__ = ["LoopVectors", "Vectors", "pieces_of", "reply_vectors", "request_vectors", "target_vectors", "vectors_of"]

_PIECE_BYTES = 16
_PLACE_BYTES = 64
"""What `struct vectors` has before its pieces."""

_NO_PIECES = np.empty((0, 2), np.uint64)


class Vectors:
    """`pieces` has the shape (n, 2): address and bytes. The maker keeps the memory alive, and passes `keep` for that."""

    def __init__(self, pieces: Runs, keep: object = None) -> None:
        # A copy in any case: the next piece is shortened in place.
        self._pieces = pieces.copy() if pieces[:, 1].all() else pieces[pieces[:, 1] > 0]
        self._first = int(self._pieces.ctypes.data)
        self._keep = keep
        self._ends = self._pieces.view(np.int64)[:, 1].cumsum()
        self._index = 0
        self._done_bytes = 0
        self._total_bytes = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return self._total_bytes

    @property
    def remaining_bytes(self) -> int:
        """Bytes that are still to be moved."""
        return self._total_bytes - self._done_bytes

    def head(self) -> tuple[int, int]:
        """Where the next pieces are described, and how many of them one call takes."""
        return self._first + self._index * _PIECE_BYTES, min(len(self._pieces) - self._index, MAX_SLICE_RUNS)

    def first(self) -> tuple[int, int]:
        """Address and bytes of the next piece."""
        address, size = self._left()[0].tolist()
        return address, size

    def peek(self, most_bytes: int) -> list[list[int]]:
        """Address and bytes of the next pieces, the last one cut where they would be more than `most_bytes`."""
        pieces, left, at, found = self._left(), min(most_bytes, self.remaining_bytes), 0, []
        while left:
            # As many as there are if the others are as long as the first: making lists of all that follow would cost more.
            taken = pieces[at : at + 1 + left // int(pieces[at, 1])].tolist()
            at += len(taken)
            for address, size in taken:
                found.append([address, min(size, left)])
                left -= found[-1][1]
                if not left:
                    break
        return found

    def advance(self, count: int) -> None:
        """Leave the next `count` bytes behind."""
        self._done_bytes += count
        self._index = int(np.searchsorted(self._ends, self._done_bytes, side="right"))
        if self._index < len(self._pieces):
            left = np.uint64(int(self._ends[self._index]) - self._done_bytes)
            piece = self._pieces[self._index]
            piece[0] += piece[1] - left
            piece[1] = left

    def _left(self) -> Runs:
        return self._pieces[self._index :]


class LoopVectors(Vectors):
    """The same in room for `most_pieces` and a head, which a loop in C fills."""

    def __init__(self, loops: Loops, most_pieces: int, more_bytes: int = 0, keep: object = None) -> None:
        """`more_bytes` are behind the room for pieces."""
        self.loops = loops
        self.most_pieces = most_pieces
        self._room = bytearray(_PLACE_BYTES + (most_pieces + 1) * _PIECE_BYTES + more_bytes)
        self.place = VectorPlace.from_buffer(self._room)
        self._keep = keep

    @property
    def total_bytes(self) -> int:
        total_bytes: int = self.place[2]
        return total_bytes

    @property
    def remaining_bytes(self) -> int:
        left_bytes: int = self.place[2] - self.place[3]
        return left_bytes

    def head(self) -> tuple[int, int]:
        return self.place[0], min(self.place[1], MAX_SLICE_RUNS)

    def advance(self, count: int) -> None:
        self.loops.leave_behind(self.place, count)

    def _left(self) -> Runs:
        first, count, _, _ = self.place
        at = first - ctypes.addressof(self.place)
        return np.frombuffer(self._room, np.uint64, 2 * count, at).reshape(-1, 2)


def vectors_of(head: bytes, pieces: Runs = _NO_PIECES, keep: object = None) -> Vectors:
    """A head and the pieces of memory that follow it."""
    kept = np.frombuffer(head, np.uint8)
    first = np.array([[kept.ctypes.data, len(kept)]], np.uint64)
    return Vectors(np.concatenate([first, pieces]) if len(pieces) else first, (kept, keep))


def pieces_of(region: Region, pieces: Runs) -> Runs:
    """Offsets in a region as addresses; the bytes stay."""
    return pieces + np.array([region.address, 0], np.uint64)


def request_vectors(request_id: int, runs: Runs, loops: Loops | None) -> tuple[Vectors, int]:
    """The request for the source side of `runs`, and how many bytes they have."""
    if loops is not None:
        laid_out = LoopVectors(loops, 0, wire.REQUEST_BYTES + len(runs) * wire.PIECE_BYTES)
        payload_bytes = loops.lay_out_request(request_id, runs, laid_out.place)
        if payload_bytes >= 0:
            return laid_out, payload_bytes
    return vectors_of(wire.pack_request(request_id, runs)), int(runs[:, 2].sum())


def target_vectors(request_id: int, runs: Runs, region: Region, loops: Loops | None) -> Vectors:
    """Where the reply's bytes go: the target side of `runs`."""
    if loops is not None:
        laid_out = LoopVectors(loops, len(runs), keep=region)
        if loops.lay_out_target(request_id, runs, region.address, laid_out.place):
            return laid_out
    return Vectors(pieces_of(region, runs[:, 1:3]), region)


def reply_vectors(request_id: int, named: bytearray, region: Region, loops: Loops | None) -> Vectors:
    """The reply to a request for the pieces that are named in its body.

    Raises ProtocolError when they are too much, RangeError when one leaves the region.
    """
    if loops is not None:
        laid_out = LoopVectors(loops, len(named) // wire.PIECE_BYTES, keep=region)
        within = (region.address, region.region_bytes)
        if loops.lay_out_reply(request_id, named, within, wire.MAX_PAYLOAD_BYTES, laid_out.place):
            return laid_out
    pieces = wire.unpack_pieces(named)
    check_offsets(pieces[:, 0], pieces[:, 1], region.region_bytes, "source")
    head = wire.pack_reply(wire.Status.OK, request_id, int(pieces[:, 1].sum()))
    return vectors_of(head, pieces_of(region, pieces), region)

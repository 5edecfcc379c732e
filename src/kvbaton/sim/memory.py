"""Tagged memory: every cell names its content, every block its holder, so that a foreign byte is visible at once."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from kvbaton.agent.rank import RegionMemory
from kvbaton.core.aux_area import AuxArea
from kvbaton.core.checks import ONE_IN, PIECE_TOKENS, BlockSums, Pieces
from kvbaton.core.handoff import Span
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.errors import Bug
from kvbaton.sim.world import World

__all__ = ["FREED", "POISON", "SimBlockPool", "TaggedCell", "RankMemory", "make_layout"]


class TaggedCell(msgspec.Struct, frozen=True, gc=False):
    """What one cell holds: the KV of one token of one layer on one rank, as computed in one attempt of one request."""

    content: str
    token: int
    layer: int
    rank: int
    attempt: int
    is_corrupt: bool = False

    def corrupted(self) -> TaggedCell:
        """What arrives when a bit flips on the way."""
        return msgspec.structs.replace(self, is_corrupt=not self.is_corrupt)


AUX_SLOTS = 2
AUX_SLOT_BYTES = 256

POISON = TaggedCell("poison", -1, -1, -1, -1)
FREED = TaggedCell("freed", -1, -1, -1, -1)


@lru_cache(maxsize=256)
def make_layout(blocks: int, layers: int) -> Layout:
    """A layout in which one byte is one cell and one block is one token."""
    tensors = split_layers(dense_tensor((layers, blocks, 1, 1, 1), "tag", 1))
    axes = ("block", "token", "head", "channel")
    group = tensor_group("full", range(layers), tensors, axes, heads=(HeadRange(0, 1),), total_heads=1, planes=("kv",))
    return Layout(blocks * layers, (group,))


class RankMemory:
    """The cells of one rank."""

    def __init__(self, blocks: int, layers: int) -> None:
        self.blocks = blocks
        self.layers = layers
        self.cells: list[TaggedCell] = [FREED] * (blocks * layers)
        self.aux = bytearray(AUX_SLOTS * AUX_SLOT_BYTES)
        """Bytes, not cells: they lie after the last cell."""
        self._aux_region = RegionMemory(memoryview(self.aux))
        self.summed = self.largest = 0
        """How many cells were summed in this turn, and in how large a piece at most."""
        self.most = sys.maxsize
        self.is_late = False
        """How many may be summed in a turn, and whether a sum was begun when these were summed."""

    def get(self, block: int, layer: int) -> TaggedCell:
        """What the cell of `layer` in `block` holds."""
        return self.cells[layer * self.blocks + block]

    def put(self, block: int, layer: int, cell: TaggedCell) -> None:
        """Let the owner write one cell."""
        self.cells[layer * self.blocks + block] = cell

    def sum_blocks(self, blocks: BlockSums, most_bytes: int) -> tuple[list[int], int] | None:
        """The checksums over the tags of all spans, and of how many cells; None where these may be more than `most_bytes`."""
        if not blocks.spans or most_bytes <= 0:
            raise Bug(f"{blocks} within {most_bytes} bytes: nothing to sum")
        size = self.most_cells(blocks)
        if size is None or size > most_bytes:
            return None
        before, sums = self.summed, []
        for span in blocks.spans:
            value = 0
            for first, end in _pieces_of(blocks, span):
                self.summed += end - first
                for cell in self.cells[first:end]:
                    value = zlib.crc32(repr(cell).encode(), value)
            sums.append(value)
        return sums, self.summed - before

    def most_cells(self, blocks: BlockSums) -> int | None:
        """How many cells these spans have at most, counted in whole blocks; None where they cannot be summed in one go."""
        ids, grid, size = blocks.ids, blocks.grid, 0
        if len(set(ids)) < len(ids) or not all(0 <= each < grid.blocks for each in ids):
            return None
        last = grid.first + len(grid.offsets) // grid.planes
        for span in blocks.spans:
            first = max(span.first_token, blocks.cached_tokens)
            is_there = 0 <= first < span.end_token <= len(ids) * PIECE_TOKENS
            if not is_there or not grid.first <= span.first_layer < span.end_layer <= last:
                return None
            count = -(-span.end_token // PIECE_TOKENS) - first // PIECE_TOKENS
            chosen = count if blocks.seed is None else -(-count // ONE_IN)
            size += (span.end_layer - span.first_layer) * grid.planes * chosen * grid.piece_bytes
        return size

    def sums(self, pieces: Pieces, ends: Sequence[int], value: int) -> list[int]:
        """The checksums over the tags of the cells of each part, in order; the first one continues `value`."""
        if not ends or ends[-1] != len(pieces):
            raise Bug(f"{len(pieces)} pieces are to be summed up to {list(ends)}")
        self.is_late |= self.summed >= self.most
        sums, first = [], 0
        for end in ends:
            for offset, count in pieces[first:end].tolist():
                self.summed += count
                self.largest = max(self.largest, count)
                for cell in self.cells[offset : offset + count]:
                    value = zlib.crc32(repr(cell).encode(), value)
            sums.append(value)
            first, value = end, 0
        return sums

    @property
    def aux_area(self) -> AuxArea:
        """Where aux records may lie."""
        return AuxArea(len(self.cells), AUX_SLOTS, AUX_SLOT_BYTES)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """A copy of what lies in the aux area."""
        return self._aux_region.read(offset - len(self.cells), size_bytes)

    def write(self, offset: int, data: bytes) -> None:
        """Put something into the aux area."""
        self._aux_region.write(offset - len(self.cells), data)

    def fill(self, block: int, cell: TaggedCell) -> None:
        """Let the owner write all cells of a block."""
        for layer in range(self.layers):
            self.put(block, layer, cell)


def _pieces_of(blocks: BlockSums, span: Span) -> Iterator[tuple[int, int]]:
    """The first cell and the end of each piece of a span that is summed: by layer, plane and block, all of them or a sample."""
    grid, size = blocks.grid, PIECE_TOKENS
    first_token, end_token = max(span.first_token, blocks.cached_tokens), span.end_token
    first, end, token_cells = first_token // size, -(-end_token // size), grid.piece_bytes // size
    for layer in range(span.first_layer, span.end_layer):
        chosen = range(first, end)
        if blocks.seed is not None:
            pick = zlib.crc32(f" {span.number} {layer}".encode(), blocks.seed)
            chosen = range(first + pick % min(ONE_IN, len(chosen)), end, ONE_IN)
        at = (layer - grid.first) * grid.planes
        for offset in grid.offsets[at : at + grid.planes]:
            for number in chosen:
                start = blocks.ids[number] * grid.block_stride + offset
                skipped, kept = max(0, first_token - number * size), min(size, end_token - number * size)
                yield start + skipped * token_cells, start + kept * token_cells


class SimBlockPool:
    """The blocks of one instance: free, or held by a numbered allocation. Blocks are conserved."""

    def __init__(self, world: World, name: str, blocks: int) -> None:
        self._world = world
        self._name = name
        self.total = blocks
        self.free: list[int] = list(range(blocks))
        self.holder: dict[int, int] = {}
        self.is_changed = False
        """Whether something was taken or returned since it was last looked at."""

    def allocate(self, count: int, allocation: int) -> list[int]:
        """Take `count` free blocks for an allocation: the longest free ones, or those freed last."""
        self.is_changed = True
        if self._world.random.random() < 0.5:
            taken, self.free = self.free[:count], self.free[count:]
        else:
            taken, self.free = self.free[len(self.free) - count :], self.free[: len(self.free) - count]
        for block in taken:
            self.holder[block] = allocation
        return taken

    def release(self, blocks: list[int]) -> None:
        """Return blocks."""
        self.is_changed = True
        for block in blocks:
            if self.holder.pop(block, None) is None:
                self._world.violate("blocks conserved", f"{self._name}: block {block} was freed twice")
            else:
                self.free.append(block)

    def check(self) -> None:
        """free + held == total, and no block twice."""
        self.is_changed = False
        if len(self.free) + len(self.holder) != self.total or len(set(self.free)) != len(self.free):
            detail = f"{self._name}: {len(self.free)} free and {len(self.holder)} held of {self.total}"
            self._world.violate("blocks conserved", detail)

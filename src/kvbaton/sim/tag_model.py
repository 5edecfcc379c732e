"""A model whose cache holds tags: each cell states which tokens it was computed from, and which layer, plane and head it is of.

It runs in the embedded engine of production as any model does, step by step over the block tables that the scheduler made. As
attention does, it reads all that the cache holds of a sequence before it computes more of it: a cell that is of other tokens or
of another place, or was not written, is noticed at the first step that uses it, and changes the answer, too.

Caches may differ from instance to instance in block size and in the number of ranks, over which the heads are cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.model import TokenSpan, Written
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.errors import Bug
from kvbaton.sim.memory import FREED, POISON, RankMemory, TaggedCell

__all__ = [
    "CONTEXT_TOKENS",
    "FreedBlocks",
    "HEADS",
    "VOCABULARY",
    "TagCacheShape",
    "LoadedTags",
    "TagCache",
    "TagModel",
    "answer_to",
    "prompt_ids",
    "tags_of",
    "token_ids",
]

VOCABULARY = 61
CONTEXT_TOKENS = 24
HEADS = 2
_PLANES = 2
_ROOT = "root"

_AXES = ("plane", "block", "token", "head", "channel")


@dataclass(frozen=True, slots=True)
class TagCacheShape:
    """The cache of one instance: keys and values of `heads` heads, in blocks of several tokens.

    It is cut over `ranks`: the layers over `stages`, and the heads over the ranks of a stage; where these are more than there
    are heads, several hold the same one.
    """

    ranks: int
    blocks: int
    layers: int
    block_tokens: int
    heads: int
    stages: int = 1
    is_reversed: bool = False
    """Whether the first rank of a stage has its last heads."""

    @property
    def shape(self) -> Shape:
        """How the instance is cut."""
        return Shape(pp=self.stages, tp=self.ranks // self.stages)

    @property
    def held_heads(self) -> int:
        """Heads of one rank."""
        return max(1, self.heads * self.stages // self.ranks)

    @property
    def cells_of_token(self) -> int:
        """Cells of one token, on all ranks."""
        return self.layers * _PLANES * self.held_heads * self.shape.tp

    def layers_of(self, rank: int) -> range:
        """The layers of one rank: those of its stage."""
        stage = rank * self.stages // self.ranks
        return range(self.layers * stage // self.stages, self.layers * (stage + 1) // self.stages)

    def heads_of(self, rank: int) -> range:
        """The heads of one rank."""
        place = rank % self.shape.tp
        first = (self.shape.tp - 1 - place if self.is_reversed else place) * self.heads // self.shape.tp
        return range(first, first + self.held_heads)

    def cells_of(self, rank: int) -> int:
        """Cells of one rank."""
        return len(self.layers_of(rank)) * _PLANES * self.blocks * self.block_tokens * self.held_heads

    def layout(self, rank: int) -> Layout:
        """The memory of one rank: one cell is one byte."""
        layers = self.layers_of(rank)
        shape = (len(layers), _PLANES, self.blocks, self.block_tokens, self.held_heads, 1)
        tensors = split_layers(dense_tensor(shape, "tag", 1))
        heads = (HeadRange(self.heads_of(rank).start, self.held_heads),)
        group = tensor_group("full", layers, tensors, _AXES, heads=heads, total_heads=self.heads)
        return Layout(self.cells_of(rank), (group,))

    def cell(self, layer: int, plane: int, block: int, slot: int, head: int) -> int:
        """Where a cell lies in the memory of its rank; layer and head count those of that rank."""
        return (((layer * _PLANES + plane) * self.blocks + block) * self.block_tokens + slot) * self.held_heads + head

    def slot_at(self, at: int) -> tuple[int, int]:
        """The block, and the token in it, of a cell."""
        block, slot = divmod(at // self.held_heads % (self.blocks * self.block_tokens), self.block_tokens)
        return block, slot


@lru_cache(maxsize=4096)
def _tag(before: str, token: int) -> str:
    """What the cache of a token is computed from: the token, and all that is before it."""
    return f"{zlib.crc32(f'{before} {token}'.encode()):08x}"


def tags_of(tokens: Sequence[int]) -> tuple[str, ...]:
    """What each cell of these tokens has to be computed from."""
    return _tags_of(tuple(tokens))


@lru_cache(maxsize=4096)
def _tags_of(tokens: tuple[int, ...]) -> tuple[str, ...]:
    # Every step of every rank asks for those of all tokens so far, layer by layer.
    tags, before = [], _ROOT
    for token in tokens:
        before = _tag(before, token)
        tags.append(before)
    return tuple(tags)


def _next_token(tag: str) -> int:
    return int(tag, 16) % VOCABULARY


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens, as any instance has to compute them."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_next_token(tags_of(tokens)[-1]))
    return tokens[len(prompt) :]


def token_ids(name: str, first: int, end: int) -> list[int]:
    """The tokens `first` to `end` of a text that is known by its name."""
    return [zlib.crc32(f"{name} {position}".encode()) % VOCABULARY for position in range(first, end)]


def prompt_ids(prefix: int, shared: int, client: int, tokens: int) -> tuple[int, ...]:
    """The prompt of a client, the first `shared` tokens of which are those of a prefix."""
    return (*token_ids(f"prefix {prefix}", 0, shared), *token_ids(f"request {client}", shared, tokens))


class TagCache:
    """The cache of all ranks of an instance, as its engine and its model see it."""

    shares_prefixes = True

    def __init__(self, shape: TagCacheShape) -> None:
        self.shape = shape
        self.blocks = shape.blocks
        self.block_tokens = shape.block_tokens
        self.memories = [RankMemory(shape.cells_of(rank), 1) for rank in range(shape.ranks)]
        self._held_heads = shape.held_heads
        self._layers = [shape.layers_of(rank) for rank in range(shape.ranks)]
        self._places = [[self._places_of(rank, layer) for layer in self._layers[rank]] for rank in range(shape.ranks)]
        """By rank and held layer: of every head and plane, how far its cell is from the first one of a token in the memory of
        the rank, and as which one it is tagged."""

    def _places_of(self, rank: int, layer: int) -> tuple[tuple[int, int], ...]:
        shape, held_layer = self.shape, layer - self._layers[rank].start
        return tuple(
            (shape.cell(held_layer, plane, 0, 0, held), plane * shape.heads + head)
            for held, head in enumerate(shape.heads_of(rank))
            for plane in range(_PLANES)
        )

    def block_lists(self, blocks: Sequence[int]) -> BlockLists:
        """One list: there is one group."""
        return (tuple(blocks),)

    def poison(self, blocks: Sequence[int]) -> None:
        """Spoil blocks that are about to be granted."""
        for block in blocks:
            self.fill(block, POISON)

    def fill(self, block: int, cell: TaggedCell) -> None:
        """Let the owner write all cells of a block."""
        size = self.block_tokens * self._held_heads
        filling, plane_size = [cell] * size, self.blocks * size
        for rank, memory in enumerate(self.memories):
            first = block * size
            for _ in range(len(self._layers[rank]) * _PLANES):
                memory.cells[first : first + size] = filling
                first += plane_size

    def write(self, layer: int, block: int, slot: int, position: int, tag: str, attempt: int) -> None:
        """Put the keys and values of one token of one layer there, of every head."""
        for rank, layers in enumerate(self._layers):
            if layer in layers:
                self.write_rank(rank, layer, block, slot, position, tag, attempt)

    def write_rank(self, rank: int, layer: int, block: int, slot: int, position: int, tag: str, attempt: int) -> None:
        """Put the keys and values of one token of one layer there, of the heads of one rank."""
        cells, first = self.memories[rank].cells, (block * self.block_tokens + slot) * self._held_heads
        for offset, head in self._places[rank][layer - self._layers[rank].start]:
            cells[first + offset] = TaggedCell(tag, position, layer, head, attempt)

    def tag_at(self, block: int, slot: int) -> str:
        """What the first cell of a token was computed from."""
        return self.memories[0].cells[self.shape.cell(0, 0, block, slot, 0)].content

    def problem(self, blocks: Sequence[int], tags: Sequence[str], *, is_checked: bool = False, first_block: int = 0) -> str:
        """What is wrong with the cache of the tokens that have to have these tags; with checksums, no byte may be corrupt.

        Blocks before `first_block` are not looked at.
        """
        first = first_block * self.shape.block_tokens
        for rank, layers in enumerate(self._layers):
            if problem := self.rank_problem(rank, layers, blocks, tags, is_checked=is_checked, first=first):
                return problem
        return ""

    def rank_problem(
        self,
        rank: int,
        layers: range,
        blocks: Sequence[int],
        tags: Sequence[str],
        *,
        is_checked: bool = False,
        first: int = 0,
    ) -> str:
        """The same for these layers of one rank, from token `first` on."""
        cells, size, held_heads = self.memories[rank].cells, self.block_tokens, self._held_heads
        places = [(layer, self._places[rank][layer - self._layers[rank].start]) for layer in layers]
        for position in range(first, len(tags)):
            tag, block = tags[position], blocks[position // size]
            start = (block * size + position % size) * held_heads
            for layer, heads in places:
                for offset, head in heads:
                    cell = cells[start + offset]
                    is_it = cell.content == tag and cell.token == position and cell.layer == layer and cell.rank == head
                    if not is_it or (is_checked and cell.is_corrupt):
                        wanted = (tag, position, layer, head)
                        return f"token {position} in block {block}: wanted {wanted}, there is {cell}"
        return ""


class FreedBlocks:
    """Marks what no request and no prefix holds any more: it may be anything, and a read from now on gets that."""

    def __init__(self, pool: BlockPool, cache: TagCache) -> None:
        self._pool = pool
        self._cache = cache
        self._open = self._now()

    def mark(self) -> None:
        """Fill the blocks that were freed since the last call."""
        is_open = self._now()
        if is_open != self._open:
            for block, (now, before) in enumerate(zip(is_open, self._open, strict=True)):
                if now and not before:
                    self._cache.fill(block, FREED)
            self._open = is_open

    def _now(self) -> bytes:
        is_open: bytes = vars(self._pool)["_open"].tobytes()
        return is_open


class TagModel:
    """Computes tags; what it finds in the cache that cannot be there is reported to `on_problem`."""

    def __init__(self, on_problem: Callable[[str], None]) -> None:
        self._on_problem = on_problem
        self._parents: dict[str, str] = {}
        self._steps = 0

    def forward(self, spans: Sequence[TokenSpan], cache: TagCache, written: Written | None = None) -> npt.NDArray[np.float32]:
        """Run every token of `spans`, layer by layer, and return the logits that follow each span."""
        self._steps += 1
        computed = [self._compute(span, cache) for span in spans]
        for layer in range(cache.shape.layers):
            for span, tags in zip(spans, computed, strict=True):
                for position, tag in enumerate(tags, span.start):
                    block = int(span.blocks[position // cache.block_tokens])
                    cache.write(layer, block, position % cache.block_tokens, position, tag, self._steps)
            if written is not None:
                written(layer)
        logits = np.zeros((len(spans), VOCABULARY), np.float32)
        for row, tags in enumerate(computed):
            logits[row, _next_token(tags[-1])] = 1.0
        return logits

    def _compute(self, span: TokenSpan, cache: TagCache) -> list[str]:
        """The tags of the tokens of a span, from those before it as the cache has them."""
        before = _ROOT
        if span.start:
            blocks = span.blocks.tolist()
            before = cache.tag_at(blocks[(span.start - 1) // cache.block_tokens], (span.start - 1) % cache.block_tokens)
            if problem := cache.problem(blocks, self._way_to(before, span.start)):
                self._on_problem(problem)
        tags = []
        for token in span.token_ids.tolist():
            parent, before = before, _tag(before, token)
            self._parents[before] = parent
            tags.append(before)
        return tags

    def learn(self, tags: Sequence[str]) -> None:
        """The cache of these tokens was computed elsewhere, and has landed."""
        self._parents.update(zip(tags, (_ROOT, *tags), strict=False))

    def _way_to(self, tag: str, count: int) -> list[str]:
        """The tags of the `count` tokens up to the one with this tag."""
        way = []
        for _ in range(count):
            way.append(tag)
            tag = self._parents.get(tag, "unknown")
        return way[::-1]


class _TagTokenizer:
    """Tokens without text: requests name them by number."""

    eos_ids: frozenset[int] = frozenset()
    longest_token_bytes = 1

    def token_bytes(self, token_id: int) -> bytes:
        """No text."""
        del token_id
        return b""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """No text."""
        del ids, skip_special_tokens
        return ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """There is no text to encode."""
        raise Bug(f"a text of {len(text)} characters (special tokens: {add_special_tokens}) in the simulator")

    def token_text(self, token_id: int) -> str:
        """No text."""
        del token_id
        return ""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        """There are no conversations."""
        raise Bug(f"{len(messages)} messages in the simulator")


@dataclass(frozen=True, slots=True)
class LoadedTags:
    """The model as an engine loads it."""

    model: TagModel
    config: ModelConfig
    tokenizer: _TagTokenizer = field(default_factory=_TagTokenizer)
    name: str = "tags"
    fingerprint: str = "tags"

    @classmethod
    def of(cls, shape: TagCacheShape, on_problem: Callable[[str], None]) -> LoadedTags:
        """The model for a cache of this shape."""
        config = ModelConfig(
            architecture="tags",
            layers=shape.layers,
            hidden_size=shape.heads,
            heads=shape.heads,
            kv_heads=shape.heads,
            head_size=1,
            ffn_size=1,
            vocab_size=VOCABULARY,
            context_tokens=CONTEXT_TOKENS,
            rope_theta=1.0,
            norm_epsilon=1.0,
            tied_head=True,
        )
        return cls(TagModel(on_problem), config)

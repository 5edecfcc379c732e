"""The block pool: which blocks of the cache are free, in use or held, and which of them hold a known prefix.

Pure bookkeeping; it never touches cache memory. Every block is in exactly one state:

- *free*: without a reference. A free block may still be *cached*: its contents are a known prefix, and it is given out anew
  only after every other free block, least recently used first.
- *in use*: sequences refer to it, hand-offs do not.
- *held*: at least one hand-off refers to it, so it must not change until that hand-off has ended.

A full block enters the prefix cache under a chained digest of all tokens up to its end, so equal digests mean equal contents
and a block can be shared.

The model reads consecutive blocks fastest. So an allocation may ask for *room*: free blocks behind it, for the sequence to
grow into, that other allocations avoid while they find blocks elsewhere. Room is best effort and never makes one fail.
`free + in_use + held == total` is checked wherever blocks move.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.errors import Bug, ConfigError

__all__ = ["BlockPool", "PrefixDigests", "salt_key"]

_DIGEST_BYTES = 16
_MOST_ROOM = 32
"""At most the pool's 32nd part is kept as room for one allocation."""
_NO_OWNER = -1


def salt_key(salt: str) -> bytes:
    """A cache salt in a fixed length; empty without one."""
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest() if salt else b""


class PrefixDigests:
    """The digests of the full blocks of a growing list of tokens; each depends on every token before it, and on the salt.

    Without a salt, a client learns from `cached_tokens`, or from the time to its first token, which prompts others have sent.
    """

    def __init__(self, block_tokens: int, salt: str = "") -> None:
        self._block_tokens = block_tokens
        self._digests: list[bytes] = []
        self._root = salt_key(salt)

    def of(self, token_ids: Sequence[int], tokens: int) -> list[bytes]:
        """The digests of the full blocks within the first `tokens` tokens. `token_ids` may only ever have been appended to."""
        size = self._block_tokens
        for index in range(len(self._digests), tokens // size):
            parent = self._digests[-1] if index else self._root
            block = np.asarray(token_ids[index * size : (index + 1) * size], dtype="<i4").tobytes()
            self._digests.append(hashlib.blake2b(parent + block, digest_size=_DIGEST_BYTES).digest())
        return self._digests[: tokens // size]


class BlockPool:
    """Gives out blocks 0 to `blocks` - 1, counts references to them, and remembers which full blocks hold which prefix."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ConfigError(f"a pool of {blocks} blocks of {block_tokens} tokens is empty; give it at least one of each")
        self.total = blocks
        self.block_tokens = block_tokens
        self._in_use = 0
        self._held = 0
        self._uses = [0] * blocks
        self._holds = [0] * blocks
        self._open: npt.NDArray[np.bool_] = np.ones(blocks, dtype=np.bool_)
        self._open_count = blocks
        self._room_owner: npt.NDArray[np.int32] = np.full(blocks, _NO_OWNER, dtype=np.int32)
        self._rooms: dict[int, slice] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that can be given out now, the cached ones among them included."""
        return self._open_count + len(self._evictable)

    @property
    def in_use(self) -> int:
        """Blocks that only sequences refer to."""
        return self._in_use

    @property
    def held(self) -> int:
        """Blocks that a hand-off refers to."""
        return self._held

    @property
    def cached(self) -> int:
        """Blocks in the prefix cache, whatever their state."""
        return len(self._block_of)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit when one sequence has the whole pool."""
        return self.total * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """How many blocks the cache of `tokens` tokens takes."""
        return -(-tokens // self.block_tokens)

    def match_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """The longest cached prefix, as blocks in token order. Pins nothing: `acquire` them before the next `allocate`."""
        matched: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            matched.append(block)
        return matched

    def can_allocate(self, count: int) -> bool:
        """Whether `count` blocks are free."""
        return self.free >= count

    def free_beside(self, acquired: Sequence[int]) -> int:
        """How many blocks could still be given out once the cached blocks `acquired` are pinned."""
        return self.free - sum(not self._is_referenced(block) for block in acquired)

    def held_once(self, blocks: Iterable[int]) -> int:
        """How many of these blocks would be free if the one hand-off that refers to them released them."""
        return sum(self._holds[block] == 1 and not self._uses[block] for block in blocks)

    def acquire(self, blocks: Sequence[int], *, held: bool = False) -> None:
        """Add one reference to each of these cached or referenced blocks, so that they stay as they are."""
        for block in blocks:
            if not self._is_referenced(block) and block not in self._evictable:
                raise Bug(f"block {block} is neither cached nor referenced; it cannot be acquired")
        for block in blocks:
            self._evictable.pop(block, None)
            self._add(block, held=held)
        self.check()

    def allocate(self, count: int, *, after: int | None = None, room: int = 0, held: bool = False) -> list[int]:
        """Take `count` free blocks, consecutive where possible and following block `after` where that is free.

        The blocks behind them, `room` of them if there are, are kept for a later allocation `after` the last one. Cached
        blocks are dropped only when there are too few others. Raises Bug when fewer than `count` blocks are free.
        """
        if count > self.free:
            raise Bug(f"{count} blocks requested with {self.free} free; call can_allocate first")
        if not count:
            return []
        room = min(room, self.total // _MOST_ROOM)
        self._make_open(count, room)
        taken = self._follow(after, count)
        taken += self._choose(count - len(taken), room)
        self._keep_room(taken[-1], room)
        for block in taken:
            self._add(block, held=held)
        self.check()
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Turn one sequence's references into those of a hand-off."""
        for block in blocks:
            self._add(block, held=True)
            self._drop(block, held=False)
        self.check()

    def use(self, blocks: Iterable[int]) -> None:
        """Turn one hand-off's references into those of a sequence."""
        for block in blocks:
            self._add(block, held=False)
            self._drop(block, held=True)
        self.check()

    def release(self, blocks: Sequence[int], *, held: bool = False) -> None:
        """Drop one reference to each; a block without references is free again, and stays cached if it was registered."""
        # In reverse, so that the end of a prefix is evicted before its beginning: a beginning alone can still be matched.
        for block in reversed(blocks):
            self._drop(block, held=held)
            if self._is_referenced(block):
                continue
            self._give_room_back(block)
            if block in self._digest_of:
                self._evictable[block] = None
            else:
                self._open[block] = True
                self._open_count += 1
        self.check()

    def register(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Enter full, completely computed blocks into the prefix cache; a prefix that is known already keeps its block."""
        for block, digest in zip(blocks, digests, strict=True):
            if not self._is_referenced(block):
                raise Bug(f"block {block} is free; only a referenced block can be registered")
            if digest not in self._block_of and block not in self._digest_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest

    def check(self) -> None:
        """Raise Bug unless free, in use and held blocks add up to the total."""
        if self.free + self._in_use + self._held != self.total:
            raise Bug(f"blocks do not add up: {self.free} free + {self._in_use} in use + {self._held} held != {self.total}")

    def check_integrity(self) -> None:
        """Recount every block and raise Bug at the first disagreement; takes time in proportion to the pool."""
        self.check()
        held = len(self._holds) - self._holds.count(0)
        in_use = sum([bool(uses and not holds) for uses, holds in zip(self._uses, self._holds, strict=True)])
        if (in_use, held, int(self._open.sum())) != (self._in_use, self._held, self._open_count):
            raise Bug(f"recount differs: in use {in_use}/{self._in_use}, held {held}/{self._held}, open {self._open_count}")
        if {block: digest for digest, block in self._block_of.items()} != self._digest_of:
            raise Bug("the two directions of the prefix cache disagree")
        if sum(room.stop - room.start for room in self._rooms.values()) != int((self._room_owner != _NO_OWNER).sum()):
            raise Bug("the rooms and their owners disagree")
        for block, (uses, holds, is_open) in enumerate(zip(self._uses, self._holds, self._open.tolist(), strict=True)):
            is_referenced, is_evictable = uses > 0 or holds > 0, block in self._evictable
            if is_referenced + is_open + is_evictable != 1:
                places = (is_referenced, is_open, is_evictable)
                raise Bug(f"block {block} is (referenced, open, evictable) = {places}; exactly one must hold")
            if not is_referenced and is_open == (block in self._digest_of):
                raise Bug(f"free block {block} must be cached exactly when it is evictable")

    def _is_referenced(self, block: int) -> bool:
        return self._uses[block] > 0 or self._holds[block] > 0

    def _add(self, block: int, *, held: bool) -> None:
        self._count(block, -1)
        (self._holds if held else self._uses)[block] += 1
        self._count(block, +1)

    def _drop(self, block: int, *, held: bool) -> None:
        references = self._holds if held else self._uses
        if references[block] == 0:
            raise Bug(f"block {block} has no {'hold' if held else 'use'} to drop")
        self._count(block, -1)
        references[block] -= 1
        self._count(block, +1)

    def _count(self, block: int, sign: int) -> None:
        if self._holds[block]:
            self._held += sign
        elif self._uses[block]:
            self._in_use += sign

    def _evict(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        self._open[block] = True
        self._open_count += 1

    def _make_open(self, count: int, room: int) -> None:
        while self._open_count < count:
            self._evict()
        if room:
            for _ in range(min(count + room - int(self._unclaimed().sum()), len(self._evictable))):
                self._evict()

    def _follow(self, after: int | None, count: int) -> list[int]:
        stop = first = self.total if after is None else after + 1
        while stop - first < count and stop < self.total and self._open[stop]:
            stop += 1
        return self._take(first, stop)

    def _choose(self, count: int, room: int) -> list[int]:
        if not count:
            return []
        for candidates, length in ((self._unclaimed(), count + room), (self._unclaimed(), count), (self._open, count)):
            starts, lengths = _runs(candidates)
            fitting = np.flatnonzero(lengths >= length)
            if fitting.size:
                start = int(starts[fitting[np.argmin(lengths[fitting])]])
                return self._take(start, start + count)
        taken: list[int] = []
        starts, lengths = _runs(self._open)
        for index in np.argsort(-lengths, kind="stable"):
            start = int(starts[index])
            taken += self._take(start, start + min(int(lengths[index]), count - len(taken)))
        return taken

    def _take(self, first: int, stop: int) -> list[int]:
        self._open[first:stop] = False
        self._open_count -= stop - first
        return list(range(first, stop))

    def _unclaimed(self) -> npt.NDArray[np.bool_]:
        unclaimed: npt.NDArray[np.bool_] = self._open & (self._room_owner == _NO_OWNER)
        return unclaimed

    def _keep_room(self, block: int, room: int) -> None:
        stop = block + 1
        while stop <= block + room and stop < self.total and self._open[stop] and self._room_owner[stop] == _NO_OWNER:
            stop += 1
        if stop > block + 1:
            self._rooms[block] = slice(block + 1, stop)
            self._room_owner[block + 1 : stop] = block

    def _give_room_back(self, block: int) -> None:
        room = self._rooms.pop(block, None)
        if room is not None:
            self._room_owner[room] = _NO_OWNER


def _runs(mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where the runs of true begin, and how long they are."""
    padded = np.zeros(len(mask) + 2, dtype=np.int8)
    padded[1:-1] = mask
    edges = np.diff(padded)
    starts = np.flatnonzero(edges == 1)
    return starts, np.flatnonzero(edges == -1) - starts

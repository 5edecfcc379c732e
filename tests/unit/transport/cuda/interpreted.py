"""The kernel under Triton's interpreter, on main memory: exits with 1 and says what, when a byte is not where it belongs."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np

from kvbaton.core.strips import Plan, Strip, TokenPattern, unroll
from kvbaton.transport.base import Runs
from kvbaton.transport.cuda.kernel import copy_pieces, copy_strip
from kvbaton.transport.cuda.launch import Launch, Placement, Segment, launches_for
from kvbaton.transport.cuda.strip_launch import StripLaunch, strip_launches

SIZE = 1 << 19
POISON = 0xA5


def interpret(launch: Launch | StripLaunch, source: int, target: int) -> None:
    """What `GpuCopier` does, without a GPU."""
    kernel = copy_strip if isinstance(launch, StripLaunch) else copy_pieces
    tables = (int(table.ctypes.data) for table in launch.tables)
    kernel[(launch.programs,)](source, target, *tables, *launch.numbers, *launch.constants)


def is_strip_right(strip: Strip) -> bool:
    """Whether the kernel moves exactly the runs of a strip."""
    source = np.random.default_rng(1).integers(0, POISON, SIZE, dtype=np.uint8)
    target, expected = np.full(SIZE, POISON, np.uint8), np.full(SIZE, POISON, np.uint8)
    for at, to, count in unroll(Plan((strip,))).tolist():
        expected[to : to + count] = source[at : at + count]
    places = [Placement([Segment(0, SIZE, int(memory.ctypes.data))]) for memory in (source, target)]
    for launch in strip_launches(Plan((strip,)), *places) or ():
        interpret(launch, places[0].floor, places[1].floor)
    return np.array_equal(target, expected)


def strip_cases() -> dict[str, Strip]:
    """Pages, tokens of one and of several items, counts that are even and not."""
    slots = np.array([[0, 131072, 0], [131072, 0, 0]])
    pages = np.array([[0, 65536, 4096], [8192, 16384, 4096], [32768, 0, 4096]])
    uneven = pages - np.array([[0, 0, 48], [0, 0, 0], [0, 0, 1024]])
    tokens, some = pages.copy(), pages.copy()
    tokens[:, 2], some[:, 2] = 16, (16, 3, 7)
    one = TokenPattern(np.array([[0, 0, 256]]), 256, 256)
    short = TokenPattern(np.array([[16, 0, 48]]), 256, 64)
    several = TokenPattern(np.array([[0, 32, 32], [64, 96, 160]]), 240, 256)
    cases = {"pages": Strip(slots, pages), "uneven pages": Strip(slots, uneven)}
    for name, places in (("even", tokens), ("uneven", some)):
        for kind, pattern in (("one", one), ("short", short), ("several", several)):
            cases[f"{name} tokens, {kind}"] = Strip(slots, places, pattern)
    return cases


def is_right(runs: Runs, source_bias: int, target_bias: int, extent: int) -> bool:
    """Whether the kernel moves exactly `runs`; a large `extent` makes it use wide offsets."""
    source = np.random.default_rng(1).integers(0, POISON, SIZE, dtype=np.uint8)
    target, expected = np.full(SIZE, POISON, np.uint8), np.full(SIZE, POISON, np.uint8)
    for at, to, count in runs.tolist():
        expected[to + target_bias :][:count] = source[at + source_bias :][:count]
    places = [
        Placement([Segment(0, extent, int(m.ctypes.data) + b)]) for m, b in ((source, source_bias), (target, target_bias))
    ]
    for launch in launches_for(runs, *places):
        interpret(launch, places[0].floor, places[1].floor)
    return np.array_equal(target, expected)


def uniform(count: int, length: int, step: int) -> Runs:
    """Runs of one length, from places in one order to places in another."""
    random = np.random.default_rng(2)
    columns = [random.permutation(count) * step, random.permutation(count) * step, np.full(count, length)]
    return np.stack(columns, axis=1).astype(np.uint64)


def main() -> int:
    """Every size of piece, full and not, and what does not lie on lines."""
    cases = {f"{length} bytes": uniform(5, length, 40960) for length in (32768, 16384, 8192, 4096, 20000, 40000)}
    cases |= {f"{length} bytes": uniform(99, length, 2048) for length in (2048, 1024, 1152, 512, 256, 128, 64, 16)}
    cases["ragged"] = np.array([[0, 0, 32], [64, 4096, 70000], [80000, 80000, 48]], np.uint64)
    cases["odd"] = np.array([[0, 0, 32], [64, 4096, 7001], [80000, 80000, 48], [90001, 90002, 3]], np.uint64)
    wrong = [
        f"{name}, moved by {biases}, extent {extent}"
        for name, runs in cases.items()
        for biases, extent in (((0, 0), SIZE), ((0, 0), 1 << 37), ((4, 8), SIZE))
        if not is_right(runs, *biases, extent)
    ]
    wrong += [f"strip: {name}" for name, strip in strip_cases().items() if not is_strip_right(strip)]
    sys.stderr.write("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

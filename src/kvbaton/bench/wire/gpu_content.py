"""GPU memory whose every word encodes its place, so that each byte that arrives can be checked. Imports torch when used."""

from __future__ import annotations

from typing import Any

from kvbaton.bench.wire.patterns import Pattern

__all__ = ["POISON", "expected_target", "fill_source"]

POISON = 0xA5
"""Every byte of target memory before a batch; no word of a source looks like it."""

_WORD = 4
_CHUNK_WORDS = 1 << 26


def fill_source(torch: Any, source: Any) -> None:
    """Give every word of a tensor of bytes the value that belongs to its place."""
    words = source.view(torch.int32)
    for start in range(0, len(words), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        chunk.copy_(_words(torch, torch.arange(start, start + len(chunk), device=source.device)))


def expected_target(torch: Any, pattern: Pattern, device: Any) -> Any:
    """What the target must hold after the batch, poison between the runs included; made without the code that is measured."""
    words = pattern.run_bytes // _WORD
    expected = torch.full((pattern.target_bytes,), POISON, dtype=torch.uint8, device=device)
    slots = expected.view(torch.int32).view(-1, words)
    runs = torch.from_numpy(pattern.runs.astype("int64")).to(device)
    column = torch.arange(words, device=device)
    step = max(1, _CHUNK_WORDS // words)
    for start in range(0, len(runs), step):
        part = runs[start : start + step]
        slots[part[:, 1] // pattern.run_bytes] = _words(torch, (part[:, :1] // _WORD) + column)
    return expected


def _words(torch: Any, places: Any) -> Any:
    mixed = (places * 2654435761) ^ (places >> 7)
    return (mixed & 0x7FFFFFFF).to(torch.int32)

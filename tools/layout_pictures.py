"""Draws the pictures of docs/layouts.md from real layouts, plans and meetings: `python tools/layout_pictures.py [--check]`.

Exit code 1 with `--check` when a picture differs from the code, 0 otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvbaton.core.layout import FULL, Group, HeadRange, Layout
from kvbaton.core.legs import assign_legs
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.tensors import LayerTensor, tensor_group
from kvbaton.core.topology import head_range

__all__ = ["PICTURES", "pictures"]

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

_CELL, _TOKENS, _HEADS = 22, 4, 2
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
_STYLE = """
    .paper { fill: #fbfaf8; stroke: #e4e0d9; } .cell { stroke: #fbfaf8; stroke-width: 1; }
    .h0 { fill: #3f7fbf; } .h1 { fill: #c9451f; } .h2 { fill: #5a9a4a; } .h3 { fill: #9a6fb0; }
    .h4 { fill: #b08a2e; } .h5 { fill: #3f9a9a; } .v { fill-opacity: 0.55; } .none { fill: #d9d4cb; }
    .name { font-size: 13px; font-weight: 600; fill: #1d1c1a; } .say { font-size: 12px; fill: #5d5a54; }
    .in { font-size: 9px; fill: #ffffff; } .way { stroke: #8d877c; stroke-width: 1.5; fill: none; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #171614; stroke: #35322d; } .cell { stroke: #171614; } .none { fill: #35322d; }
      .name { fill: #ece8e1; } .say { fill: #b5afa5; }
    }
"""

ORDERS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, int]]] = {
    "(blocks, 2, tokens, heads, channels): halves of a block": (
        (2, 2, _TOKENS, _HEADS, 1),
        ("block", "plane", "token", "head", "channel"),
        {},
    ),
    "(blocks, 2, heads, tokens, channels): heads-major": (
        (2, 2, _HEADS, _TOKENS, 1),
        ("block", "plane", "head", "token", "channel"),
        {},
    ),
    "(blocks, heads, tokens, 2 x channels): K and V fused": (
        (2, _HEADS, _TOKENS, 2),
        ("block", "head", "token", "plane*channel"),
        {"channel": 1},
    ),
    "(2, blocks, tokens, heads, channels): halves of the whole": (
        (2, 2, _TOKENS, _HEADS, 1),
        ("plane", "block", "token", "head", "channel"),
        {},
    ),
}


def pictures() -> dict[str, str]:
    """Every picture by the name of its file."""
    return {"layouts.svg": _draw_layouts(), "plan.svg": _draw_plan(), "meeting.svg": _draw_meeting()}


def _group(shape: tuple[int, ...], axes: tuple[str, ...], sizes: dict[str, int], own: HeadRange, total: int) -> Group:
    array = np.empty(shape, np.uint8)
    tensor = LayerTensor(0, array.shape, array.strides, "uint8", 1)
    return tensor_group(FULL, [0], [tensor], axes, heads=(own,), total_heads=total, sizes=sizes)


def _cells(group: Group) -> dict[int, tuple[int, int, int, int]]:
    """Offset -> (block, plane, token, head), heads as the model counts them."""
    found = {}
    for number, plane in enumerate(group.planes):
        for block, token, head in np.ndindex(group.blocks, group.block_tokens, plane.head_count):
            at = plane.layer_offsets[0] + block * plane.block_stride + token * plane.token_stride + head * plane.head_stride
            found[at] = (block, number, token, plane.heads[0].start + head)
    return found


def _strip(group: Group, x: int, y: int, blocks: Iterable[int]) -> list[str]:
    """The memory of a group from left to right, one cell per head of a token; other blocks than these are grey."""
    shown = set(blocks)
    drawn = []
    for at, (block, plane, token, head) in sorted(_cells(group).items()):
        kind = f"h{head}{' v' if plane else ''}" if block in shown else "none"
        left = x + at * _CELL
        drawn.append(f'<rect class="cell {kind}" x="{left}" y="{y}" width="{_CELL}" height="{_CELL}"/>')
        if block in shown:
            drawn.append(f'<text class="in" x="{left + 5}" y="{y + 15}">{"KV"[plane]}{token}</text>')
    return drawn


def _text(kind: str, x: int, y: int, text: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def _svg(name: str, title: str, width: int, height: int, body: Iterable[str]) -> str:
    lines = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{_FONT}" role="img" '
        f'aria-labelledby="{name}-title">\n  <title id="{name}-title">{title}</title>\n  <style>{_STYLE}  </style>\n'
        f'  <rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12"/>\n{lines}\n</svg>\n'
    )


def _draw_layouts() -> str:
    body = []
    for row, (name, (shape, axes, sizes)) in enumerate(ORDERS.items()):
        y = 30 + row * 66
        body.append(_text("name", 20, y, name))
        body += _strip(_group(shape, axes, sizes, HeadRange(0, _HEADS), _HEADS), 20, y + 10, [0])
    body.append(
        _text(
            "say",
            20,
            30 + len(ORDERS) * 66,
            "Two blocks of four tokens; block 0 in colour. Blue is head 0, red head 1; K is full, V is pale.",
        )
    )
    return _svg(
        "layouts", "One block in four orders of axes, as it lies in memory", 20 * 2 + 32 * _CELL, 46 + len(ORDERS) * 66, body
    )


def _draw_plan() -> str:
    axes = ("block", "plane", "head", "token", "channel")
    source = _group((2, 2, 2, _TOKENS, 1), axes, {}, HeadRange(0, 2), 4)
    target = _group((2, 2, 1, _TOKENS, 1), axes, {}, HeadRange(1, 1), 4)
    pair = pair_layouts(Layout(source.end, (source,)), Layout(target.end, (target,)))
    runs = plan_runs(pair, ((1,),), ((0,),), 0, _TOKENS).tolist()
    body = [_text("name", 20, 30, "source rank: heads 0 and 1 of 4, the request is in block 1"), *_strip(source, 20, 40, [1])]
    body += [_text("name", 20, 190, "target rank: head 1 of 4, the request goes to block 0"), *_strip(target, 20, 140, [0])]
    for source_at, target_at, count in runs:
        from_x, to_x = 20 + (source_at + count / 2) * _CELL, 20 + (target_at + count / 2) * _CELL
        body.append(f'<path class="way" d="M{from_x:g} {40 + _CELL} C{from_x:g} 105 {to_x:g} 95 {to_x:g} 138"/>')
        for x, y in ((source_at, 40 + _CELL), (target_at, 138)):
            body.append(f'<path class="way" stroke-width="3" d="M{20 + x * _CELL} {y}h{count * _CELL}"/>')
    body.append(
        _text("say", 20, 214, f"{len(runs)} runs of {runs[0][2]} cells: the tokens of a head lie side by side on both sides.")
    )
    return _svg("plan", "Two runs from a rank with two heads to a rank with one", 20 * 2 + 32 * _CELL, 230, body)


def _draw_meeting() -> str:
    total, sizes = 6, (3, 2)
    sides = [[head_range(total, size, rank) for rank in range(size)] for size in sizes]
    layouts = [
        [
            Layout(
                (group := _group((1, 2, own.count, 1, 1), ("block", "plane", "head", "token", "channel"), {}, own, total)).end,
                (group,),
            )
            for own in side
        ]
        for side in sides
    ]
    widths = [total * 40 // size for size in sizes]
    body = [_text("name", 20, 30, "prefill, tp3"), _text("name", 20, 170, "decode, tp2")]
    for side, y in ((0, 20), (1, 160)):
        for rank, own in enumerate(sides[side]):
            for head in range(own.start, own.end):
                x = 140 + head * 40 + rank * 60
                body.append(f'<rect class="cell h{head}" x="{x}" y="{y}" width="40" height="{_CELL}"/>')
                body.append(f'<text class="in" x="{x + 14}" y="{y + 15}">h{head}</text>')
            body.append(_text("say", 140 + own.start * 40 + rank * 60, y - 4 if side == 0 else y + 38, f"rank {rank}"))
    for leg in assign_legs(layouts[0], layouts[1]).legs:
        for each in leg.share[0].heads:
            middle = each.start * 40 + each.count * 20 + 140
            from_x, to_x = middle + leg.source * 60, middle + leg.target * 60
            body.append(
                f'<path class="way" stroke-width="{each.count * 2}" d="M{from_x} 44C{from_x} 100 {to_x} 100 {to_x} 158"/>'
            )
    body.append(_text("say", 20, 226, "Four legs; the middle source serves both targets, and no head crosses twice."))
    return _svg("meeting", "Three ranks of two heads meet two ranks of three", 140 + max(widths) * 3 + 220, 240, body)


def main(arguments: list[str]) -> int:
    """Write the pictures, or only compare them."""
    stale = [name for name, text in pictures().items() if _read(PICTURES / name) != text]
    if arguments == ["--check"]:
        if stale:
            sys.stderr.write(f"{', '.join(stale)} differ from the code; run: python tools/layout_pictures.py\n")
        return int(bool(stale))
    for name, text in pictures().items():
        (PICTURES / name).write_text(text, encoding="utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

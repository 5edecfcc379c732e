"""Draws the report of a transfer for a terminal: a row per phase, bars to scale, what was hidden and what was exposed.

Kinds of time differ in their glyph as well as in their colour, so that the picture can be read in a log file.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbaton.core.timeline import Side
from kvbaton.observe.phases import Bar, HandoffPhase
from kvbaton.observe.transfer_report import HandoffReport, TransferReport, duration, row_label, size

__all__ = ["print_details", "print_report"]

_MOST_HANDOFFS = 8
_LABEL = 20
_TIME = 9
_REMARK = 22
_LEAST_BAR = 16
_MOST_BAR = 100
_QUEUED, _COMPUTED, _HIDDEN, _EXPOSED = ("░", "dim"), ("█", "blue"), ("▒", "green"), ("▓", "bold red")
_LEGEND = ((_QUEUED, "queue"), (_COMPUTED, "prefill"), (_HIDDEN, "hidden behind prefill"), (_EXPOSED, "exposed"))


def print_report(console: Console, report: TransferReport) -> None:
    """Print the instances, a picture of each hand-off, and the sentence."""
    console.print(Text.assemble(("transfer ", "bold"), report.transfer_id), soft_wrap=True)
    for side in report.participants:
        problem = f" ({side.problem})" if side.problem else ""
        dropped = f" ({side.notes_dropped} notes were not kept)" if side.notes_dropped else ""
        console.print(f"  {side.side}: {side.name}{problem}{dropped}", style="dim", highlight=False, markup=False)
    for handoff in report.handoffs[:_MOST_HANDOFFS]:
        console.print()
        if len(report.handoffs) > 1:
            console.print(f"prompt {handoff.prompt_index}, sample {handoff.sample_index}", style="bold", highlight=False)
        _print_picture(console, handoff)
        _print_waits(console, handoff)
        console.print(handoff.sentence, highlight=False, markup=False, soft_wrap=True)
    rest = len(report.handoffs) - _MOST_HANDOFFS
    if rest > 0:
        console.print(f"and {rest} more hand-offs; --json has them all", style="dim", highlight=False)


def print_details(console: Console, report: TransferReport) -> None:
    """Print a line per chunk and span: how long it took to compute, and how long to travel."""
    for handoff in report.handoffs[:_MOST_HANDOFFS]:
        table = Table("tokens", "layers", "computed in", "announced at", "on the wire", "exposed", "bytes")
        for part, span in _details(handoff):
            table.add_row(*_cells(part, span))
        if table.row_count:
            console.print(table)


def _print_picture(console: Console, handoff: HandoffReport) -> None:
    end_s = max((bar.end_s for bar in handoff.bars), default=0.0)
    start_s = min((bar.start_s for bar in handoff.bars), default=0.0)
    canvas = _Canvas(_width(console), start_s, end_s, handoff.first_token_s)
    console.print(canvas.scale(), highlight=False, soft_wrap=True)
    for bar in handoff.bars:
        console.print(_row(canvas, bar), soft_wrap=True)
    legend = Text(" " * (_LABEL + 2))
    for (glyph, style), words in _LEGEND:
        legend.append(glyph * 2, style).append(f" {words}   ")
    console.print(legend, soft_wrap=True)


def _print_waits(console: Console, handoff: HandoffReport) -> None:
    """What was waited for after the first token, one after the other, on a scale of its own."""
    if not handoff.waits or handoff.exposed_s is None:
        return
    canvas = _Canvas(_width(console), 0.0, handoff.exposed_s, 0.0)
    console.print(
        Text(f"{'after the first token':<{_LABEL + 2}}{'':<{_width(console)}} {duration(handoff.exposed_s):>{_TIME}}")
    )
    start_s = 0.0
    for wait in handoff.waits:
        end_s = start_s + wait.seconds
        console.print(_row(canvas, Bar(wait.phase, Side.TARGET, start_s, end_s, exposed_s=wait.seconds)), soft_wrap=True)
        start_s = end_s
    console.print()


def _width(console: Console) -> int:
    return max(_LEAST_BAR, min(_MOST_BAR, console.width - _LABEL - _TIME - _REMARK - 4))


def _row(canvas: _Canvas, bar: Bar) -> Text:
    text = Text(f"{row_label(bar):<{_LABEL}.{_LABEL}}  ")
    text.append_text(canvas.draw(bar))
    text.append(f" {duration(bar.end_s - bar.start_s):>{_TIME}}", "bold" if bar.exposed_s > 0 else "")
    return text.append(f" {_remark(bar)}", "dim")


def _remark(bar: Bar) -> str:
    notes = []
    if bar.phase is HandoffPhase.PREFILL and bar.parts:
        notes.append(f"{len(bar.parts)} chunk{'s' * (len(bar.parts) > 1)}")
    if bar.phase is HandoffPhase.WIRE and bar.parts:
        notes.append(f"{size(bar.moved_bytes)}, {len(bar.parts)} span{'s' * (len(bar.parts) > 1)}")
    if bar.is_cut:
        notes.append("not done")
    return ", ".join(notes)


class _Canvas:
    """A row of character cells that stands for a stretch of time."""

    def __init__(self, width: int, start_s: float, end_s: float, first_token_s: float | None) -> None:
        self._width = width
        self._start_s = start_s
        self._cell_s = max(end_s - start_s, 1e-9) / width
        self._end_s = end_s
        self._token_cell = None if first_token_s is None else self._cell(first_token_s)

    def scale(self) -> str:
        """The line above the bars: where it begins and ends, and where the first token was chosen."""
        line = [" "] * self._width
        if self._token_cell is not None:
            words = "▼ first token" if self._token_cell <= self._width - 13 else "first token ▼"
            at = self._token_cell if words[0] == "▼" else max(0, self._token_cell - len(words) + 1)
            line[at : at + len(words)] = words
        return " " * (_LABEL + 2) + "".join(line[: self._width]) + f" {duration(self._end_s - self._start_s):>{_TIME}}"

    def draw(self, bar: Bar) -> Text:
        """The cells of one row. A wire is drawn only where something was on its way."""
        cells: list[tuple[str, str]] = [(" ", "")] * self._width
        pieces = bar.parts if bar.phase is HandoffPhase.WIRE and bar.parts else (bar,)
        for piece in pieces:
            for cell in range(self._cell(piece.start_s), self._last_cell(piece) + 1):
                cells[cell] = self._kind(bar, cell)
        text = Text()
        for glyph, style in cells:
            text.append(glyph, style)
        return text

    def _kind(self, bar: Bar, cell: int) -> tuple[str, str]:
        if bar.side is Side.SOURCE:
            return _QUEUED if bar.phase is HandoffPhase.QUEUE else _COMPUTED
        is_exposed = bar.exposed_s > 0 and self._token_cell is not None and cell >= self._token_cell
        return _EXPOSED if is_exposed else _HIDDEN

    def _cell(self, at_s: float) -> int:
        return max(0, min(self._width - 1, int((at_s - self._start_s) / self._cell_s)))

    def _last_cell(self, bar: Bar) -> int:
        """The cell in which a bar ends; one that ends on a border does not reach into the next cell."""
        return max(self._cell(bar.start_s), self._cell(bar.end_s - self._cell_s / 1000))


def _details(handoff: HandoffReport) -> Iterator[tuple[Bar | None, Bar | None]]:
    """Every computed part with the span that carried it, or followed by the spans that did; then spans that match none."""
    spans: dict[tuple[int, ...], Bar] = {}
    computed: list[Bar] = []
    for bar in handoff.bars:
        if bar.phase is HandoffPhase.PREFILL:
            computed = list(bar.parts)
        if bar.phase is HandoffPhase.WIRE:
            spans = {_place(span): span for span in bar.parts}
    for part in computed:
        span = spans.get(_place(part))
        carries = span is not None and span.first_token >= part.first_token
        yield part, spans.pop(_place(part)) if carries else None
        for place in [place for place in spans if not carries and place[0] == part.end_token]:
            yield None, spans.pop(place)
    for span in spans.values():
        yield None, span


def _place(bar: Bar) -> tuple[int, ...]:
    return (bar.end_token, bar.first_layer, bar.end_layer)


def _cells(part: Bar | None, span: Bar | None) -> list[str]:
    shown = part or span
    if shown is None:
        return []
    computed = "" if part is None else duration(part.end_s - part.start_s)
    cells = [_range(shown.first_token, shown.end_token), _range(shown.first_layer, shown.end_layer), computed]
    if span is None:
        return [*cells, "", "", "", ""]
    return [
        *cells,
        duration(span.start_s),
        duration(span.end_s - span.start_s),
        duration(span.exposed_s),
        size(span.moved_bytes),
    ]


def _range(first: int, end: int) -> str:
    return f"{first} to {end - 1}" if end - first > 1 else str(first)

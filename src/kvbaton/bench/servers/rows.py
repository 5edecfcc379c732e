"""From the rounds of this benchmark to its rows: what each variant adds to one server, and uses of the processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvbaton.bench.report import BenchRow, Setting
from kvbaton.bench.servers.variants import SINGLE
from kvbaton.observe.phases import HandoffPhase

__all__ = ["Round", "added_s", "name_of", "rows_of", "stage_s"]

Round = dict[str, list[float]]


def name_of(what: str, variant: str, length: int | None = None) -> str:
    """The name under which a round holds a measurement."""
    return f"{what}, {variant}" if length is None else f"{what}, {variant}, {length} tokens"


def added_s(rounds: Sequence[Round], variant: str, length: int, percent: float) -> float:
    """What a variant adds to the first token of one server: differences within each round, where prompts are equal."""
    one, single = (_values(rounds, name_of("first token", each, length)) for each in (variant, SINGLE))
    return float(np.percentile(np.subtract(one, single), percent))


def stage_s(rounds: Sequence[Round], variant: str, length: int, phase: HandoffPhase) -> float:
    """How long a phase was waited for after the first token of the source, in the median; 0 where it never was."""
    taken = [each.get(name_of(f"stage {phase}", variant, length), [0.0])[0] for each in rounds]
    return float(np.median(taken))


def rows_of(lengths: Sequence[int], variants: Sequence[str], rounds: Sequence[Round], peer: str = SINGLE) -> Iterator[BenchRow]:
    """Every row of the report, beside that of `peer`: another connector where one was measured, else one server."""
    pairs = [name for name in variants if name != SINGLE]
    for length in lengths:
        yield from _first_token_rows(length, pairs, peer, rounds)
    for length in lengths:
        for name in variants:
            yield _cpu_row(length, name, peer, rounds)
    for name in variants:
        share, other = (rounds[0][name_of("idle cores", each)][0] for each in (name, peer))
        yield BenchRow(f"idle, {name}", share * 100, "% of a core", peer, _ratio(share, other), {})
    for length in lengths:
        for name in pairs:
            yield from _stage_rows(length, name, rounds)


def _first_token_rows(length: int, pairs: Sequence[str], peer: str, rounds: Sequence[Round]) -> Iterator[BenchRow]:
    settings: dict[str, Setting] = {"prompt_tokens": length}
    alone = float(np.median(_values(rounds, name_of("first token", SINGLE, length))))
    yield BenchRow(f"first token, {length} tokens, {SINGLE}", alone * 1e3, "ms", SINGLE, 1.0, settings)
    for name in pairs:
        for percent in (50, 99):
            value = added_s(rounds, name, length, percent)
            other = added_s(rounds, peer, length, percent) if peer != SINGLE else alone
            what = f"added to it, p{percent}, {name}"
            yield BenchRow(what, value * 1e3, "ms", peer, _ratio(value, other), settings)
    for name in pairs:
        value, other = (_decode_leg_s(rounds, each, length) for each in (name, peer if peer in pairs else name))
        if value > 0:
            yield BenchRow(f"after the prefill answer, {name}", value * 1e3, "ms", peer, _ratio(value, other), settings)


def _decode_leg_s(rounds: Sequence[Round], name: str, length: int) -> float:
    """From the prefill server's answer to the first token, seen by the client alone; push has asked for both at once."""
    first, answered = (_values(rounds, name_of(what, name, length)) for what in ("first token", "prefill answered"))
    return float(np.median(np.subtract(first, answered)))


def _cpu_row(length: int, name: str, peer: str, rounds: Sequence[Round]) -> BenchRow:
    value, other = (float(np.median(_values(rounds, name_of("cpu", each, length)))) for each in (name, peer))
    return BenchRow(
        f"processor time per request, {length} tokens, {name}",
        value,
        "s",
        peer,
        _ratio(value, other),
        {"prompt_tokens": length},
    )


def _stage_rows(length: int, name: str, rounds: Sequence[Round]) -> Iterator[BenchRow]:
    """Where the time of a hand-over went, for variants that report it; the ratio is the share of the whole."""
    exposed = [each[name_of("exposed", name, length)][0] for each in rounds if name_of("exposed", name, length) in each]
    if not exposed:
        return
    settings: dict[str, Setting] = {"prompt_tokens": length}
    whole = float(np.median(exposed))
    yield BenchRow(f"hand-over, {length} tokens, {name}", whole * 1e3, "ms", "all of it", 1.0, settings)
    for phase in HandoffPhase:
        if (value := stage_s(rounds, name, length, phase)) > 0:
            yield BenchRow(
                f"  {phase}, {length} tokens, {name}", value * 1e3, "ms", "all of it", _ratio(value, whole), settings
            )


def _values(rounds: Sequence[Round], name: str) -> list[float]:
    return [each[name][0] for each in rounds]


def _ratio(value: float, other: float) -> float:
    return value / other if other else 0.0

"""Evaluates the part of PromQL that our board and alert rules use, over two scrapes of every process.

Parsed by a real parser, so what Prometheus would refuse is refused here. `rate` and `increase` are the growth between the two
scrapes. Anything else that an expression uses is an error, not an empty answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Scrapes", "evaluate"]

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]
Scrapes = tuple[Mapping[str, str], Mapping[str, str]]
"""Pages by instance, earlier and later."""

_NAME = "__name__"
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "==": lambda a, b: a == b,
}
_COMPUTED: dict[str, Callable[[float, float], float]] = {"+": lambda a, b: a + b, "*": lambda a, b: a * b}


def evaluate(expression: str, scrapes: Scrapes) -> Vector:
    """The vector that an expression gives; series that it filters out are not in it."""
    import promql_parser

    found = _value(promql_parser.parse(expression), tuple(map(_samples, scrapes)))
    assert isinstance(found, dict), f"{expression} gives a number"
    return found


def _samples(pages: Mapping[str, str]) -> Vector:
    found: Vector = {}
    for instance, page in pages.items():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {**sample.labels, _NAME: sample.name, "job": "kvbaton", "instance": instance}
                found[tuple(sorted(labels.items()))] = sample.value
    return found


def _value(node: Any, at: tuple[Vector, ...]) -> Vector | float:
    kind = type(node).__name__
    if kind == "NumberLiteral":
        return float(node.val)
    if kind == "ParenExpr":
        return _value(node.expr, at)
    if kind == "VectorSelector":
        return _selected(node, at[1])
    if kind == "Call":
        return _called(node, at)
    if kind == "AggregateExpr":
        return _summed(node, at)
    assert kind == "BinaryExpr", f"{kind} is not known here"
    return _combined(node, at)


def _selected(selector: Any, samples: Vector) -> Vector:
    tests: list[tuple[str, str, str]] = [(m.name, str(m.op), m.value) for m in selector.matchers.matchers]
    if selector.name:
        tests.append((_NAME, "MatchOp.Equal", selector.name))
    return {key: value for key, value in samples.items() if all(_fits(dict(key).get(n, ""), op, v) for n, op, v in tests)}


def _fits(value: str, op: str, expected: str) -> bool:
    if op == "MatchOp.Equal":
        return value == expected
    assert op == "MatchOp.Re", f"{op} is not known here"
    return re.fullmatch(expected, value) is not None


def _called(call: Any, at: tuple[Vector, ...]) -> Vector:
    name = call.func.name
    if name == "histogram_quantile":
        buckets = _value(call.args[1], at)
        assert isinstance(buckets, dict)
        return _quantiles(float(call.args[0].val), buckets)
    earlier, later = (_selected(call.args[0].vector_selector, samples) for samples in at)
    if name == "min_over_time":
        return {_unnamed(key): min(value, earlier.get(key, value)) for key, value in later.items()}
    assert name in ("rate", "increase"), f"{name} is not known here"
    return {_unnamed(key): value - earlier.get(key, 0.0) for key, value in later.items()}


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """The upper edge of the bucket that has the quantile; nothing where nothing was observed."""
    edges = sorted((float(dict(key)["le"]), value) for key, value in buckets.items())
    total = edges[-1][1] if edges else 0.0
    return {(): next(edge for edge, value in edges if value >= quantile * total)} if total else {}


def _summed(node: Any, at: tuple[Vector, ...]) -> Vector:
    inner = _value(node.expr, at)
    assert str(node.op) == "sum", f"{node.op} is not known here"
    assert isinstance(inner, dict)
    by = [] if node.modifier is None else list(node.modifier.labels)
    found: Vector = {}
    for key, value in inner.items():
        kept = tuple((name, text) for name, text in key if name in by)
        found[kept] = found.get(kept, 0.0) + value
    return found


def _combined(node: Any, at: tuple[Vector, ...]) -> Vector | float:
    left, right, op = _value(node.lhs, at), _value(node.rhs, at), str(node.op)
    if op == "or":
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        return {**right, **left}
    if isinstance(left, dict):
        left = {_unnamed(key): value for key, value in left.items()}
        pairs = {key: (value, right if not isinstance(right, dict) else right.get(key)) for key, value in left.items()}
    else:
        assert isinstance(right, dict), "two numbers"
        pairs = {key: (left, value) for key, value in right.items()}
    known = {key: (a, b) for key, (a, b) in pairs.items() if b is not None}
    if op in _COMPARED:
        return {key: a for key, (a, b) in known.items() if _COMPARED[op](a, b)}
    return {key: _COMPUTED[op](a, b) for key, (a, b) in known.items()}


def _unnamed(key: Labels) -> Labels:
    return tuple((name, value) for name, value in key if name != _NAME)

"""`bench plan`: from block lists to runs, beside the planning code of vLLM and SGLang on the same lists in the same run.

The peers run in environments of their own, called as installed: vLLM plans whole blocks layer by layer, SGLang (its Mooncake
backend) groups pages once and builds the transfers of all layers from them. Neither splits heads-major pages, so the row with
split heads stands beside SGLang's split of tokens-major ones, token by token.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbaton.bench.report import BenchReport, BenchRow, Setting, describe_hardware
from kvbaton.core.layout import Layout, uniform_group
from kvbaton.core.meeting import arrange
from kvbaton.core.pair import Pair, pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.topology import head_range
from kvbaton.errors import ConfigError

__all__ = ["PlanBench", "run_plan_bench"]

_BLOCKS, _BLOCK_TOKENS, _HEADS, _HEAD_SIZE, _ELEMENT_BYTES = 4096, 16, 8, 128, 2
_PEER_S = 900.0
_PEERS = Path(__file__).parent / "peers"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanBench:
    """What is planned, and which interpreters have the peers."""

    tokens: int = 8192
    layers: int = 80
    rounds: int = 15
    seed: int = 1
    vllm: Path | None = None
    sglang: Path | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "layers", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be at least 1")
        most = _BLOCKS * _BLOCK_TOKENS
        if self.tokens > most:
            raise ConfigError(f"--tokens is {self.tokens}; the benchmark's caches hold {most}")

    def described(self) -> dict[str, Setting]:
        """The settings, for a report."""
        settings: dict[str, Setting] = {"tokens": self.tokens, "layers": self.layers, "rounds": self.rounds, "seed": self.seed}
        return settings | {"block_tokens": _BLOCK_TOKENS, "heads": _HEADS, "vllm": str(self.vllm), "sglang": str(self.sglang)}

    def lists(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two block lists in random order, the same for everybody."""
        count = -(-self.tokens // _BLOCK_TOKENS)
        dice = random.Random(self.seed)
        return tuple(dice.sample(range(_BLOCKS), count)), tuple(dice.sample(range(_BLOCKS), count))


@dataclass(slots=True)
class _Measured:
    rows: list[BenchRow] = field(default_factory=list)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run_plan_bench(bench: PlanBench, say: Say) -> BenchReport:
    """Measure our plans, then the peers that are there; `say` gets a line per step."""
    measured = _Measured()
    peers = {"vLLM": ("plan_vllm.py", bench.vllm), "SGLang": ("plan_sglang.py", bench.sglang)}
    found: dict[str, dict[str, list[float]]] = {}
    for name, (script, python) in peers.items():
        if python is not None:
            say(f"{name}: importing and planning, this can take a minute")
            found[name] = _ask_peer(bench, _PEERS / script, python)
            measured.rounds |= {f"{name} {what}": values for what, values in found[name].items()}
    for title, kind, source_tp, target_tp, heads_major in _CASES:
        say(f"kvbaton: {title}")
        pair = _pair(bench, source_tp, target_tp, heads_major)
        seconds, runs = _time_plans(bench, pair)
        measured.rounds[title] = seconds
        beside = {name: values[kind] for name, values in found.items() if kind in values} or {"": []}
        measured.rows += [_row(title, seconds, name, values, {"runs": runs}) for name, values in beside.items()]
    measured.problems += _replicated(bench, measured)
    return BenchReport(measured.rows, describe_hardware(), [measured.rounds], measured.problems)


_CASES = (
    ("equal TP", "equal", 8, 8, True),
    ("TP 8 to 4, heads-major pages", "split", 8, 4, True),
    ("TP 8 to 4, tokens-major pages", "split", 8, 4, False),
    ("TP 4 to 8, heads-major pages", "split", 4, 8, True),
)


def _row(title: str, seconds: Sequence[float], peer: str, theirs: Sequence[float], settings: dict[str, Setting]) -> BenchRow:
    ours = statistics.median(seconds)
    ratio = ours / statistics.median(theirs) if theirs else 0.0
    return BenchRow(
        title, ours * 1e3, "ms", f"{peer}: {statistics.median(theirs) * 1e3:.1f} ms" if theirs else "", ratio, settings
    )


def _layout(bench: PlanBench, tp_size: int, tp_rank: int, heads_major: bool, heads: int = _HEADS) -> Layout:
    own = head_range(heads, tp_size, tp_rank)
    head_bytes = _HEAD_SIZE * _ELEMENT_BYTES
    block = own.count * _BLOCK_TOKENS * head_bytes
    group = uniform_group(
        kind="full",
        layers=tuple(range(bench.layers)),
        planes=2,
        blocks=_BLOCKS,
        block_tokens=_BLOCK_TOKENS,
        head_start=own.start,
        heads=own.count,
        total_heads=heads,
        head_size=_HEAD_SIZE,
        dtype="bfloat16",
        element_bytes=_ELEMENT_BYTES,
        layer_offsets=tuple(2 * layer * _BLOCKS * block for layer in range(bench.layers)),
        plane_stride=_BLOCKS * block,
        block_stride=block,
        token_stride=head_bytes if heads_major else own.count * head_bytes,
        head_stride=_BLOCK_TOKENS * head_bytes if heads_major else head_bytes,
    )
    return Layout(2 * bench.layers * _BLOCKS * block, (group,))


def _pair(bench: PlanBench, source_tp: int, target_tp: int, heads_major: bool) -> Pair:
    return pair_layouts(_layout(bench, source_tp, 0, heads_major), _layout(bench, target_tp, 0, heads_major))


def _time_plans(bench: PlanBench, pair: Pair) -> tuple[list[float], int]:
    source, target = bench.lists()
    plan_runs(pair, (source,), (target,), 0, bench.tokens)
    seconds, runs = [], 0
    for _ in range(bench.rounds):
        since = time.perf_counter()
        runs = len(plan_runs(pair, (source,), (target,), 0, bench.tokens))
        seconds.append(time.perf_counter() - since)
    return seconds, runs


def _replicated(bench: PlanBench, measured: _Measured) -> list[str]:
    """Bytes planned where heads are replicated, beside the bytes that the targets need; they must be the same."""
    problems = []
    source, target = bench.lists()
    for source_tp, target_tp, heads in ((4, 1, 2), (8, 4, 2), (2, 8, 4)):
        sources, targets = ([_layout(bench, tp, rank, True, heads) for rank in range(tp)] for tp in (source_tp, target_tp))
        pairs = (pair_layouts(sources[leg.source], targets[leg.target], leg.share) for leg in arrange(sources, targets).legs)
        planned = sum(int(plan_runs(pair, (source,), (target,), 0, bench.tokens)[:, 2].sum()) for pair in pairs)
        needed = sum(bench.tokens * bench.layers * layout.groups[0].token_bytes for layout in targets)
        title = f"bytes planned, TP {source_tp} to {target_tp} with {heads} heads"
        measured.rows.append(BenchRow(title, planned, "bytes", f"bytes needed: {needed}", planned / needed, {}))
        if planned != needed:
            problems.append(f"{title}: {planned} where {needed} are needed")
    return problems


def _ask_peer(bench: PlanBench, script: Path, python: Path) -> dict[str, list[float]]:
    source, target = bench.lists()
    ask = {"layers": bench.layers, "blocks": _BLOCKS, "block_tokens": _BLOCK_TOKENS, "heads": _HEADS, "head_size": _HEAD_SIZE}
    ask |= {"source_tp": 8, "target_tp": 4, "rounds": bench.rounds}
    question = json.dumps(ask | {"source": source, "target": target})
    try:
        done = subprocess.run(
            [str(python), str(script)],
            input=question,
            capture_output=True,
            text=True,
            timeout=_PEER_S,
            check=False,
            env=_peer_variables(python),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} cannot run {script.name}: {error}") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"{script.name} failed in {python}: {last}; name an interpreter that has the package") from error
    return {name: values for name, values in answer.items() if isinstance(values, list)}


def _peer_variables(python: Path) -> dict[str, str]:
    """Nothing of ours on the path; where `kvbaton` made the environment, what it put beside it."""
    beside = python.parent.parent.parent / "path"
    path = {"PYTHONPATH": str(beside)} if beside.is_dir() else {}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | path | {"HF_HUB_OFFLINE": "1"}

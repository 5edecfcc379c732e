"""`bench plan`: from block lists to runs, beside the planning code of vLLM and SGLang on the same lists in the same run.

The peers run in environments of their own, called as installed: vLLM plans whole blocks layer by layer, SGLang (its Mooncake
backend) groups pages once and builds the transfers of all layers from them. Neither splits heads-major pages, so the row with
split heads stands beside SGLang's split of tokens-major ones, token by token. All take turns, round by round. Our plans are in
short form, as they are posted; what a transport takes to check one is measured too, and what it takes to unroll one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbaton.bench.report import BenchReport, BenchRow, Setting, check_at_least_one, describe_hardware
from kvbaton.core.layout import Layout
from kvbaton.core.legs import assign_legs
from kvbaton.core.pair import Pair, pair_layouts
from kvbaton.core.plan import plan_blocks, plan_layers, plan_runs
from kvbaton.core.strips import Plan, Runs, count_runs, unroll
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.topology import head_range
from kvbaton.engines.base import Progress
from kvbaton.engines.sglang.setup.environment import ensure_sglang
from kvbaton.engines.vllm.setup.environment import ensure_environment
from kvbaton.errors import ConfigError, PeerLost
from kvbaton.launch.installing import default_cache_dir
from kvbaton.transport.checks import check_plan
from kvbaton.transport.runs import Loops, check_runs, load_loops
from kvbaton.transport.source_process import SourceProcess

__all__ = ["PlanBench", "ensure_plan_peers", "run_plan_bench"]

_BLOCKS, _BLOCK_TOKENS, _HEADS, _HEAD_SIZE, _ELEMENT_BYTES = 4096, 16, 8, 128, 2
_SCRIPT = Path(__file__).parent / "peers" / "plan_peers.py"
_IMPORT_S = 900.0
_PLAN_S = 120.0
_END_S = 10.0
_REPEATS = 5
"""Each subject makes each plan so often at a turn: the first one after others had the processor is slower."""


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
        check_at_least_one(self, "tokens", "layers", "rounds")
        most = _BLOCKS * _BLOCK_TOKENS
        if self.tokens > most:
            raise ConfigError(f"--tokens is {self.tokens}; the benchmark's caches hold {most}")

    def described(self) -> dict[str, Setting]:
        """The settings, for a report."""
        settings: dict[str, Setting] = {"tokens": self.tokens, "layers": self.layers, "rounds": self.rounds, "seed": self.seed}
        peers: dict[str, Setting] = {"vllm": self.vllm is not None, "sglang": self.sglang is not None}
        return settings | {"block_tokens": _BLOCK_TOKENS, "heads": _HEADS} | peers

    def lists(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Two block lists in random order, the same for every subject."""
        count = -(-self.tokens // _BLOCK_TOKENS)
        dice = random.Random(self.seed)
        return tuple(dice.sample(range(_BLOCKS), count)), tuple(dice.sample(range(_BLOCKS), count))


class _PlanPeer:
    """Planning code of others in its own environment, asked for one plan at a time: `plan_peers.py NAME` run in `python`.

    Raises ConfigError with its last output when it does not answer.
    """

    def __init__(self, name: str, python: Path, ask: Mapping[str, object], opened: ExitStack) -> None:
        self._script = f"{_SCRIPT.name} {name}"
        self._python = python
        self.runs: dict[str, int] = {}
        try:
            self._process = SourceProcess([str(python), str(_SCRIPT), name], _END_S, environment=_variables(python))
        except OSError as error:
            raise ConfigError(f"{python} cannot run {self._script}: {error}") from error
        opened.callback(self._process.close)
        about = self._question(json.dumps(ask), _IMPORT_S)
        self.plans: list[str] = about["plans"]
        self.version: str = about["version"]

    def make(self, plan: str) -> float:
        """Let it make one plan; how long that took there, in seconds. How many runs it has is in `runs` afterwards."""
        answer = self._question(plan, _PLAN_S)
        self.runs[plan] = int(answer["runs"])
        return float(answer["seconds"])

    def _question(self, line: str, timeout_s: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._process.ask(line, timeout_s))
        except PeerLost as error:
            raise ConfigError(
                f"{self._script} failed in {self._python}: {error}; name an interpreter that has the package, or leave it out"
            ) from error
        return answer


def _variables(python: Path) -> dict[str, str]:
    """Nothing of ours on the path; where `kvbaton` made the environment, what it put beside it."""
    beside = python.parent.parent.parent / "path"
    path = {"PYTHONPATH": str(beside)} if beside.is_dir() else {}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | path | {"HF_HUB_OFFLINE": "1"}


def ensure_plan_peers(progress: Progress) -> tuple[Path, Path]:
    """The interpreters that have vLLM and SGLang, installed first if need be. Raises LocalError."""
    directory = default_cache_dir()
    return ensure_environment(directory, progress).python, ensure_sglang(directory, progress).python


def run_plan_bench(bench: PlanBench, progress: Progress) -> BenchReport:
    """Measure our plans and those of the peers that are there, in turns; `progress` gets a line per step."""
    with ExitStack() as opened:
        peers = {}
        for name, python in (("vLLM", bench.vllm), ("SGLang", bench.sglang)):
            if python is not None:
                progress(f"{name}: importing, this can take a minute")
                peers[name] = _PlanPeer(name.lower(), python, _question(bench), opened)
        rounds, runs = _measure(bench, peers, progress)
    rows = []
    for title, kind, *_ in _CASES:
        beside: dict[str, dict[str, Setting]] = {
            name: {"peer_runs": peer.runs[kind], "peer_version": peer.version}
            for name, peer in peers.items()
            if kind in peer.plans
        } or {"": {}}
        rows += [
            _row(title, rounds[title], name, rounds.get(f"{name} {kind}", []), {"runs": runs[title], **theirs})
            for name, theirs in beside.items()
        ]
    rows += [
        _row(f"{title}, {step}", rounds[f"{title}, {step}"], "", [], {"runs": runs[title]})
        for step in (_CHECK, _UNROLL)
        for title in runs
    ]
    replicated, problems = _replicated(bench)
    return BenchReport([*rows, *replicated], describe_hardware(), [rounds], problems)


_CHECK, _UNROLL = "checked", "unrolled"

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
    page = (own.count, _BLOCK_TOKENS) if heads_major else (_BLOCK_TOKENS, own.count)
    cache = dense_tensor((bench.layers, 2, _BLOCKS, *page, _HEAD_SIZE), "bfloat16", _ELEMENT_BYTES)
    axes = ("plane", "block", *(("head", "token") if heads_major else ("token", "head")), "channel")
    group = tensor_group("full", range(bench.layers), split_layers(cache), axes, heads=(own,), total_heads=heads)
    return Layout(group.end, (group,))


def _pair(bench: PlanBench, source_tp: int, target_tp: int, heads_major: bool) -> Pair:
    return pair_layouts(_layout(bench, source_tp, 0, heads_major), _layout(bench, target_tp, 0, heads_major))


def _measure(
    bench: PlanBench, peers: Mapping[str, _PlanPeer], progress: Progress
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every round, ours by title and the peers' by name and kind; and how many runs ours have."""
    pairs = {title: _pair(bench, source_tp, target_tp, heads_major) for title, _, source_tp, target_tp, heads_major in _CASES}
    rounds: dict[str, list[float]] = defaultdict(list)
    runs = {title: count_runs(_time_plan(bench, pair)[1]) for title, pair in pairs.items()}
    loops = load_loops()
    for number in range(bench.rounds):
        progress(f"round {number + 1} of {bench.rounds}")
        for title, pair in pairs.items():
            for _ in range(_REPEATS):
                seconds, plan = _time_plan(bench, pair)
                rounds[title].append(seconds)
                rounds[f"{title}, {_CHECK}"].append(_time_check(pair, plan, loops))
            rounds[f"{title}, {_UNROLL}"].append(_time_unroll(plan))
        for name, peer in peers.items():
            for kind in peer.plans:
                rounds[f"{name} {kind}"] += [peer.make(kind) for _ in range(_REPEATS)]
    return dict(rounds), runs


def _time_plan(bench: PlanBench, pair: Pair) -> tuple[float, Runs | Plan]:
    source, target = bench.lists()
    since = time.perf_counter()
    plan = plan_layers(pair, plan_blocks(pair, (source,), (target,), 0, bench.tokens))
    return time.perf_counter() - since, plan


def _time_check(pair: Pair, plan: Runs | Plan, loops: Loops | None) -> float:
    """How long a transport takes to check and to copy the plan before it accepts it, as one batch."""
    sizes = pair.source.region_bytes, pair.target.region_bytes
    since = time.perf_counter()
    if isinstance(plan, Plan):
        check_plan(plan, *sizes, loops)
    else:
        check_runs(plan, *sizes, loops)
    return time.perf_counter() - since


def _time_unroll(plan: Runs | Plan) -> float:
    since = time.perf_counter()
    unroll(plan)
    return time.perf_counter() - since


def _question(bench: PlanBench) -> dict[str, object]:
    """What the peers have to plan."""
    source, target = bench.lists()
    cache = {"blocks": _BLOCKS, "block_tokens": _BLOCK_TOKENS, "heads": _HEADS, "head_size": _HEAD_SIZE}
    return {"layers": bench.layers, **cache, "source_tp": 8, "target_tp": 4, "source": source, "target": target}


def _replicated(bench: PlanBench) -> tuple[list[BenchRow], list[str]]:
    """Bytes planned where heads are replicated, beside the bytes that the targets need; what is wrong if those differ."""
    rows, problems = [], []
    source, target = bench.lists()
    for source_tp, target_tp, heads in ((4, 1, 2), (8, 4, 2), (2, 8, 4)):
        sources, targets = ([_layout(bench, tp, rank, True, heads) for rank in range(tp)] for tp in (source_tp, target_tp))
        pairs = (
            pair_layouts(sources[leg.source], targets[leg.target], leg.share) for leg in assign_legs(sources, targets).legs
        )
        planned = sum(int(plan_runs(pair, (source,), (target,), 0, bench.tokens)[:, 2].sum()) for pair in pairs)
        needed = sum(bench.tokens * bench.layers * layout.groups[0].token_bytes for layout in targets)
        title = f"bytes planned, TP {source_tp} to {target_tp} with {heads} heads"
        rows.append(BenchRow(title, planned, "bytes", f"bytes needed: {needed}", planned / needed, {}))
        if planned != needed:
            problems.append(f"{title}: {planned} where {needed} are needed")
    return rows, problems

"""Caches of instances that are cut: every element arrives where the target's cut has it, and a control leaves one kind out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from test_tensors import Tensor

from kvbaton.core.card import ProcessId, RankCard, check_compatible, make_card
from kvbaton.core.handoff import Incarnation
from kvbaton.core.pair import Share, pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.topology import RankAt, Shape
from kvbaton.engines.vllm.controls import share_filter
from kvbaton.engines.vllm.device import EngineDevice, HostDevice
from kvbaton.engines.vllm.settings import ConnectorSettings
from kvbaton.engines.vllm.specs import CutFacts, layer_specs, token_counts
from kvbaton.engines.vllm.tensors import InstanceCaches, RegisteredCache, instance_caches, read_tensors
from kvbaton.errors import ConfigError, Incompatible
from model_cuts import stage_layers

BLOCK_TOKENS, BLOCKS, HEAD = 4, 6, 6
LAYERS, HEADS, WINDOW, CHUNK, INDEX_SIZE = 5, 4, 5, 6, 3
STATE_HEADS, STATE_HEAD, STATE_SIZE, TAPS = 4, 3, 2, 3
Array = npt.NDArray[Any]


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


class CrossAttentionSpec(SimpleNamespace):
    pass


class Float32:
    itemsize = 4

    def __str__(self) -> str:
        return "torch.float32"


def attention(kind: type[SimpleNamespace], heads: int, **more: Any) -> Any:
    return kind(block_size=BLOCK_TOKENS, num_kv_heads=heads, **more)


def state(tp: int, groups: int) -> Any:
    channels = STATE_HEADS // tp * STATE_HEAD + 2 * max(groups // tp, 1) * STATE_SIZE
    return MambaSpec(
        block_size=1024,
        shapes=((TAPS, channels), (STATE_HEADS // tp, STATE_HEAD, STATE_SIZE)),
        dtypes=(Float32(), Float32()),
        mamba_type=SimpleNamespace(name="MAMBA2"),
        mamba_cache_mode="none",
        num_speculative_blocks=0,
    )


def dense_cache(heads: int) -> Array:
    return np.zeros((BLOCKS, heads, BLOCK_TOKENS, HEAD), np.float32)


class Instance:
    """One instance of a model: its ranks' arrays, filled with what the whole model would have there."""

    def __init__(
        self,
        model: str,
        shape: Shape,
        *,
        seed: int | None,
        draft: bool = False,
        device: Callable[[], EngineDevice] = HostDevice,
    ) -> None:
        self.model, self.shape = model, shape
        self.arrays: list[dict[str, Array]] = []
        self.registered: list[RegisteredCache] = []
        for at in shape.all():
            groups, arrays = self._rank(at, draft)
            specs = layer_specs(SimpleNamespace(kv_cache_groups=groups), self._facts(at, draft))
            self.arrays.append(arrays)
            tensors = read_tensors({name: Tensor(each) for name, each in arrays.items()})
            self.registered.append(RegisteredCache(tensors, specs, device()))
        self.caches: InstanceCaches = instance_caches(shape, [each.caches for each in self.registered])
        if seed is not None:
            self._fill(seed)

    def _facts(self, at: RankAt, draft: bool) -> CutFacts:
        groups = 2 if self.model == "mamba2g" else 1
        return CutFacts(at.tp, self.shape.tp, HEADS, groups, LAYERS, draft_heads=2 if draft else 0)

    def _rank(self, at: RankAt, draft: bool) -> tuple[list[Any], dict[str, Array]]:
        tp, here = self.shape.tp, stage_layers(LAYERS, self.shape.pp, at.pp)
        named = {f"model.layers.{layer}.attn": layer for layer in here}
        heads = max(HEADS // tp, 1)
        arrays: dict[str, Array] = {}
        full: Any = attention(FullAttentionSpec, heads)
        if self.model in ("mla", "index"):
            full = attention(MLAAttentionSpec, 1)
        arrays |= {name: dense_cache(full.num_kv_heads) for name in named}
        groups = [SimpleNamespace(layer_names=list(named), kv_cache_spec=full)]
        if self.model == "index":
            indexed = {f"{name}.indexer.k_cache": np.zeros((BLOCKS, 1, BLOCK_TOKENS, INDEX_SIZE), np.float32) for name in named}
            index = attention(MLAAttentionSpec, 1, cache_role=SimpleNamespace(name="INDEXER"))
            several = dict.fromkeys(named, full) | dict.fromkeys(indexed, index)
            arrays |= indexed
            groups[0] = SimpleNamespace(layer_names=list(several), kv_cache_spec=SimpleNamespace(kv_cache_specs=several))
        if self.model in ("windows", "chunks"):
            odd = [name for name, layer in named.items() if layer % 2]
            window = attention(SlidingWindowSpec, heads, sliding_window=WINDOW + 1)
            if self.model == "chunks":
                window = attention(ChunkedLocalAttentionSpec, heads, attention_chunk_size=CHUNK)
            groups = [
                SimpleNamespace(layer_names=[name for name in named if name not in odd], kv_cache_spec=full),
                SimpleNamespace(layer_names=odd, kv_cache_spec=window),
            ]
        if self.model.startswith("mamba"):
            spec = state(tp, 2 if self.model == "mamba2g" else 1)
            size = sum(int(np.prod(shape)) for shape in spec.shapes)
            states = {f"model.layers.{layer}.mamba": np.zeros((BLOCKS, 1, 1, 4 * size + 24), np.int8) for layer in here}
            arrays |= states
            groups.append(SimpleNamespace(layer_names=list(states), kv_cache_spec=spec))
        if draft and at.pp == self.shape.pp - 1:
            arrays["draft_model.layers.0.attn"] = dense_cache(2 // tp)
            several = dict.fromkeys(named, full) | {"draft_model.layers.0.attn": attention(FullAttentionSpec, 2 // tp)}
            groups[0] = SimpleNamespace(layer_names=list(several), kv_cache_spec=SimpleNamespace(kv_cache_specs=several))
        return groups, arrays

    def _fill(self, seed: int) -> None:
        for place, layout in enumerate(self.caches.layouts):
            view = np.frombuffer(self.registered[place].region.view, np.uint8)
            for group in layout.groups:
                for index, layer in enumerate(group.layers):
                    for plane in group.planes:
                        for axes, value in elements(group, plane, layer, seed):
                            offset = plane.layer_offsets[index] + axes
                            view[offset : offset + 4] = np.frombuffer(np.float32(value).tobytes(), np.uint8)

    def read(self) -> dict[tuple[Any, ...], float]:
        """Every element of every rank, by what it is in the model."""
        found: dict[tuple[Any, ...], float] = {}
        for place, layout in enumerate(self.caches.layouts):
            view = np.frombuffer(self.registered[place].region.view, np.uint8)
            for number, group in enumerate(layout.groups):
                for index, layer in enumerate(group.layers):
                    for plane in group.planes:
                        for offset, name in places(group, plane):
                            at = plane.layer_offsets[index] + offset
                            value = float(np.frombuffer(view[at : at + 4].tobytes(), np.float32)[0])
                            found[place, number, layer, plane.name, name] = value
        return found


def places(group: Any, plane: Any) -> Any:
    """(offset, (block, head, token, channel)) of every element of one layer, heads as the model numbers them."""
    heads = [head for each in plane.heads for head in range(each.start, each.end)]
    tokens = range(1 if group.is_state else group.block_tokens)
    channels = list(itertools.product(*(range(axis.count) for axis in plane.channels)))
    for block, (place, head), token, channel in itertools.product(range(group.blocks), enumerate(heads), tokens, channels):
        inner = sum(index * axis.stride for index, axis in zip(channel, plane.channels, strict=True))
        offset = block * plane.block_stride + place * plane.head_stride + token * plane.token_stride + inner
        yield offset, (block, head, token, channel)


def elements(group: Any, plane: Any, layer: int, seed: int) -> Any:
    for offset, (block, head, token, channel) in places(group, plane):
        yield offset, float(hash((seed, layer, plane.name, block, head, token, channel)) % 100_003) + 1


def move(source: Instance, target: Instance, blocks: tuple[tuple[int, ...], ...], tokens: int, keep: Any = None) -> None:
    """Every leg between two instances, as their agents plan it."""
    cards = [card_of(each) for each in (source, target)]
    lists = tuple(each.caches.lists(blocks) for each in (source, target))
    for leg in check_compatible(*cards, ours=cards[1]).legs:
        share: Share = keep(leg.share) if keep else leg.share
        pair = pair_layouts(source.caches.layouts[leg.source], target.caches.layouts[leg.target], share)
        there, here = (each.region.view for each in (source.registered[leg.source], target.registered[leg.target]))
        for source_at, target_at, count in plan_runs(pair, lists[0], lists[1], 0, tokens).tolist():
            here[target_at : target_at + count] = there[source_at : source_at + count]


def card_of(instance: Instance) -> Any:
    limits = ConnectorSettings(control_port=1).limits
    ranks = [RankCard(number, layout, ()) for number, layout in enumerate(instance.caches.layouts)]
    process, name = ProcessId("h", 1, 1), Incarnation(f"{id(instance)}")
    return make_card(
        incarnation=name, model="m", fingerprint="f", process=process, limits=limits, ranks=ranks, shape=instance.shape
    )


SHAPES = ["tp1", "tp2", "tp4", "pp2", "pp3", "pp2,tp2"]
MODELS = ["full", "mla", "index", "windows", "chunks", "mamba", "mamba2g"]
LISTS = {"full": 1, "mla": 1, "index": 1, "windows": 2, "chunks": 2, "mamba": 2, "mamba2g": 2}


def block_lists(model: str) -> tuple[tuple[int, ...], ...]:
    """Blocks of 10 tokens; of a window or a chunk, the first is gone; a state has one."""
    if model in ("windows", "chunks"):
        return ((1, 3, 5), (0, 2, 4))
    return ((1, 3, 5), (4,))[: LISTS[model]]


def expected(source: Instance, target: Instance, blocks: tuple[tuple[int, ...], ...]) -> dict[tuple[Any, ...], float]:
    values = {}
    for place, number, layer, plane, name in target.read():
        block, head, token, channel = name
        group = target.caches.layouts[place].groups[number]
        is_moved = block in blocks[target.caches.block_lists[number]]
        whole = float(hash((7, layer, plane, block, head, token if not group.is_state else 0, channel)) % 100_003) + 1
        values[place, number, layer, plane, name] = whole if is_moved and block else 0.0
    return values


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shapes", [*itertools.product(SHAPES, repeat=2)], ids=lambda pair: "-".join(pair))
def test_every_element_arrives_between_any_two_shapes(model: str, shapes: tuple[str, str]) -> None:
    if "mamba2g" in model and any("tp4" in shape for shape in shapes):
        pytest.skip("two groups are not divided into four")
    source = Instance(model, Shape.parse(shapes[0]), seed=7)
    target = Instance(model, Shape.parse(shapes[1]), seed=None)
    blocks = block_lists(model)
    move(source, target, blocks, 10)
    assert target.read() == expected(source, target, blocks)


@pytest.mark.parametrize(("drop", "model"), [("heads", "full"), ("layers", "windows"), ("state", "mamba"), ("heads", "mla")])
def test_a_control_leaves_out_what_it_names_and_nothing_else(drop: str, model: str) -> None:
    source, target = Instance(model, Shape(tp=2), seed=7), Instance(model, Shape(), seed=None)
    blocks = block_lists(model)
    move(source, target, blocks, 10, share_filter(drop, target.caches))
    wanted, found = expected(source, target, blocks), target.read()
    lost = {name for name in wanted if wanted[name] != found[name]}
    assert lost
    assert all(found[name] == 0.0 for name in lost)
    layers = {name[2] for name in lost}
    heads = {name[4][1] for name in lost}
    if drop == "heads":
        assert heads == {0 if model == "mla" else HEADS - 1}
    if drop == "layers":
        assert layers == {LAYERS - 1}
    if drop == "state":
        assert {name[3] for name in lost} == {"conv", "ssm"}


def test_a_control_that_would_prove_nothing_is_refused() -> None:
    caches = Instance("full", Shape(), seed=None).caches
    for drop in ("state", "draft"):
        with pytest.raises(ConfigError, match="nothing of that kind"):
            share_filter(drop, caches)


@pytest.mark.parametrize("shapes", [("tp1", "tp1"), ("tp1", "tp2"), ("pp2", "tp1"), ("tp2", "pp2")], ids="-".join)
def test_draft_layers_travel_with_the_others(shapes: tuple[str, str]) -> None:
    source = Instance("full", Shape.parse(shapes[0]), seed=7, draft=True)
    target = Instance("full", Shape.parse(shapes[1]), seed=None, draft=True)
    assert len(target.caches.layouts[0].groups) == 2
    assert target.caches.block_lists == (0, 0)
    assert target.caches.drafts == {1}
    move(source, target, ((1, 3, 5),), 10)
    assert target.read() == expected(source, target, ((1, 3, 5),))


def test_one_side_with_draft_layers_is_refused_with_both_values() -> None:
    source, target = Instance("full", Shape(), seed=7, draft=True), Instance("full", Shape(), seed=None)
    with pytest.raises(Incompatible, match=r"layout groups is '1 \(full\)' here and '2 \(full, full draft\)' there"):
        move(source, target, ((1, 3, 5),), 10)


def test_an_instance_that_keeps_its_draft_layers_fits_one_that_has_none() -> None:
    source, target = Instance("full", Shape(), seed=7), Instance("full", Shape(tp=2), seed=None, draft=True)
    target.caches = instance_caches(target.shape, [each.caches for each in target.registered], has_drafts=False)
    assert "draft_model.layers.0.attn" not in target.caches.numbers
    move(source, target, ((1, 3, 5),), 10)
    assert target.read() == expected(source, target, ((1, 3, 5),))
    assert not any(array.any() for arrays in target.arrays for name, array in arrays.items() if "draft" in name)


def test_an_unknown_kind_of_cache_is_refused_by_name() -> None:
    group = SimpleNamespace(layer_names=["a"], kv_cache_spec=attention(CrossAttentionSpec, 1))
    with pytest.raises(ConfigError, match="the cache of a is a CrossAttentionSpec"):
        layer_specs(SimpleNamespace(kv_cache_groups=[group]), CutFacts(0, 1, 1))


@pytest.mark.parametrize(("field", "value"), [("mamba_cache_mode", "align"), ("num_speculative_blocks", 2)])
def test_states_that_cannot_be_handed_over_are_refused_by_name(field: str, value: Any) -> None:
    spec = state(1, 1)
    setattr(spec, field, value)
    group = SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)
    with pytest.raises(ConfigError, match=field):
        layer_specs(SimpleNamespace(kv_cache_groups=[group]), CutFacts(0, 1, 1))


def test_models_with_windows_or_states_hand_over_one_token_less() -> None:
    full, window = attention(FullAttentionSpec, 1), attention(SlidingWindowSpec, 1, sliding_window=8)

    def counts(*specs: Any) -> Any:
        groups = [SimpleNamespace(layer_names=["a"], kv_cache_spec=spec) for spec in specs]
        return token_counts(SimpleNamespace(kv_cache_groups=groups), 16)

    assert counts(full).handed(10) == 10
    assert counts(full, window).handed(10) == 9
    assert counts(full, state(1, 1)).handed(1) == 0
    assert counts(full).blocks(10) == 3
    assert counts(full, window).blocks(100) == 25 + 7
    chunks = attention(ChunkedLocalAttentionSpec, 1, attention_chunk_size=8)
    assert (counts(full, chunks).handed(10), counts(full, chunks).blocks(100)) == (9, 25 + 7)
    assert counts(state(1, 1)).blocks(100) == 1

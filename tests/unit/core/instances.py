"""Whole instances to plan between: models cut by shapes, each rank with memory of its own, and hand-offs carried out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from caches import Choose, GroupModel, PlaneModel, Side, draw_group, draw_model, draw_sizes

from kvbaton.core.layout import Group, HeadRange, Layout, TokenSplit
from kvbaton.core.legs import Legs
from kvbaton.core.pair import pair_layouts
from kvbaton.core.plan import plan_runs
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.topology import Shape, head_range
from model_cuts import part_ranges, stage_layers

__all__ = ["Instance", "Meet", "compact_instance", "draw_instance", "draw_meet", "hand_off", "tagged"]

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Instance:
    """An instance of a shape: its ranks in the order of their numbers."""

    shape: Shape
    ranks: tuple[Side, ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(rank.layout for rank in self.ranks)


def heads_of(model: GroupModel, plane: PlaneModel, tp_size: int, tp_rank: int) -> tuple[HeadRange, ...]:
    """What a rank holds: MLA latents and indices whole, conv in two parts, heads in equal shares or replicated."""
    if model.kind in ("mla", "index"):
        return (HeadRange(0, plane.total_heads),)
    if plane.name == "conv":
        return part_ranges((plane.total_heads // 2, plane.total_heads - plane.total_heads // 2), tp_size, tp_rank)
    return (head_range(plane.total_heads, tp_size, tp_rank),)


def draw_instance(choose: Choose, models: list[GroupModel], shape: Shape, interleave: int, total: int) -> Instance:
    """Cut these models by the shape; every rank lays its memory out in a way of its own, blocks of one size per group."""
    ranks = []
    sizes = [draw_sizes(choose) for _ in models]
    for at in shape.all():
        groups: list[Group] = []
        lists: list[tuple[int, ...]] = []
        end = 0
        for model, size in zip(models, sizes, strict=True):
            stage = stage_layers(len(model.layers), shape.pp, at.pp)
            heads = [heads_of(model, plane, shape.tp, at.tp) for plane in model.planes]
            split = TokenSplit() if model.is_state or shape.cp == 1 else TokenSplit(at.cp, shape.cp, interleave)
            layers = tuple(layer for layer in model.layers if layer in stage)
            group, ids = draw_group(choose, model, layers, heads, split, total, end, size)
            end = max(end, group.end)
            groups.append(group)
            lists.append(ids)
        ranks.append(Side(Layout(end, tuple(groups)), tuple(lists)))
    return Instance(shape, tuple(ranks))


@dataclass(frozen=True)
class Meet:
    """Two instances of one model, and a request that is cut into chunks."""

    source: Instance
    target: Instance
    cuts: list[int]
    total: int


def _sizes(models: list[GroupModel]) -> list[int]:
    """Tensor-parallel sizes by which all of these can be cut."""
    counts = [plane.total_heads for model in models if model.kind not in ("mla", "index") for plane in model.planes]
    counts += [
        count // 2 for model in models for plane in model.planes if plane.name == "conv" for count in [plane.total_heads]
    ]
    return [size for size in range(1, 5) if all(count % size == 0 or size % count == 0 for count in counts)]


def draw_meet(choose: Choose) -> Meet:
    """Two instances of one model in shapes of their own, and a request."""
    models = [draw_model(choose) for _ in range(choose.integer(1, 2))]
    total = choose.integer(0, 9)
    instances = []
    for _ in range(2):
        shape = Shape(pp=choose.integer(1, 2), tp=choose.one_of(_sizes(models)), cp=choose.one_of([1, 1, 1, 2]))
        instances.append(draw_instance(choose, models, shape, choose.integer(0, 3), total))
    cuts = sorted({0, total, *(choose.integer(0, total) for _ in range(2))})
    return Meet(instances[0], instances[1], cuts if total else [0, 0], total)


def tagged(instance: Instance, total: int) -> list[Memory]:
    """The memory of each rank, with every byte of the request saying which element it belongs to, and 0 elsewhere."""
    memories = []
    for rank in instance.ranks:
        memory = np.zeros(rank.layout.region_bytes, np.uint8)
        for element, at in rank.elements(0, total, total):
            for byte in range(rank.element_bytes(element)):
                memory[at + byte] = tag(element, byte)
        memories.append(memory)
    return memories


def tag(element: tuple[int, ...], byte: int) -> int:
    """1 to 251, and hardly ever the same for neighbours in any direction."""
    value = byte
    for number in element:
        value = value * 37 + number + 1
    return value % 251 + 1


def hand_off(
    source: Instance, target: Instance, legs: Legs, cuts: list[int], memories: list[Memory], total: int
) -> tuple[list[Memory], list[npt.NDArray[np.int64]], int]:
    """Carry a hand-off out chunk by chunk; the target's memory, how often each byte was written, and the bytes moved."""
    found = [np.zeros(rank.layout.region_bytes, np.uint8) for rank in target.ranks]
    times = [np.zeros(rank.layout.region_bytes, np.int64) for rank in target.ranks]
    moved = 0
    for leg in legs.legs:
        here, there = target.ranks[leg.target], source.ranks[leg.source]
        pair = pair_layouts(there.layout, here.layout, leg.share)
        for first, end in itertools.pairwise(cuts):
            for source_at, target_at, count in plan_runs(
                pair, there.blocks, here.blocks, first, end, total_tokens=total
            ).tolist():
                found[leg.target][target_at : target_at + count] = memories[leg.source][source_at : source_at + count]
                times[leg.target][target_at : target_at + count] += 1
                moved += count
    return found, times, moved


def compact_instance(text: str, total_heads: int, layers: int = 4, head_size: int = 2, kind: str = "full") -> Instance:
    """An instance with one group of keys and values, heads-major pages without gaps, one request of 8 tokens in blocks of 4."""
    shape = Shape.parse(text)
    ranks = []
    for at in shape.all():
        stage = stage_layers(layers, shape.pp, at.pp)
        own = head_range(total_heads, shape.tp, at.tp)
        ranks.append(Side(_compact(kind, tuple(stage), own, total_heads, head_size), ((2, 0),)))
    return Instance(shape, tuple(ranks))


def _compact(kind: str, layers: tuple[int, ...], own: HeadRange, total_heads: int, head_size: int) -> Layout:
    tensors = split_layers(dense_tensor((len(layers), 2, 3, own.count, 4, head_size), "uint8", 1))
    axes = ("plane", "block", "head", "token", "channel")
    group = tensor_group(kind, layers, tensors, axes, heads=(own,), total_heads=total_heads)
    return Layout(group.end, (group,))

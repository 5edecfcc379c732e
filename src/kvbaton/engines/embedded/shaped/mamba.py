"""Mamba2 layers: a short convolution and a state space model, whose states are all that is remembered of the tokens before."""

from __future__ import annotations

import numpy as np

from kvbaton.engines.embedded.shaped.blueprint import Blueprint
from kvbaton.engines.embedded.shaped.cut import Cut
from kvbaton.engines.embedded.shaped.memory import ShapedCache, Values
from kvbaton.engines.embedded.shaped.mixing import Place, rms_normed, rows_of, silu
from kvbaton.engines.embedded.shaped.weights import Array

__all__ = ["Mamba"]


class Mamba:
    """The heads of one rank, and the groups of B and C that they use; those may be held by several ranks."""

    def __init__(self, blueprint: Blueprint, layer: int, weights: dict[str, Array], cut: Cut) -> None:
        self._blueprint = blueprint
        self._layer = layer
        heads, groups = cut.share(blueprint.mamba_heads), cut.share(blueprint.mamba_groups)
        size, state = blueprint.head_size, blueprint.state_size
        parts = (("x", heads, size), ("b", groups, state), ("c", groups, state))
        self._project = np.concatenate([rows_of(weights[name], own, each) for name, own, each in parts])
        self._conv = np.concatenate([rows_of(weights[f"{name}_conv"], own, each) for name, own, each in parts])
        self._gate = rows_of(weights["gate"], heads, size)
        self._step, self._decay, self._skip = (rows_of(weights[name], heads, 1) for name in ("step", "decay", "skip"))
        self._out = weights["out"][:, heads.start * size : heads.stop * size]
        per_group = blueprint.mamba_heads // blueprint.mamba_groups
        self._group_of = np.arange(heads.start, heads.stop) // per_group - groups.start
        self._heads, self._groups = len(heads), len(groups)

    def mix(self, rows: Array, places: list[Place], cache: ShapedCache) -> Array:
        """Step the states through the tokens of each place."""
        conv, ssm = (cache.layer(name, name, self._layer) for name in ("conv", "ssm"))
        inputs = (rows @ self._project.T).astype(conv.dtype)
        steps = np.logaddexp(0.0, rows @ self._step.T)
        seen = np.empty((len(rows), self._heads, self._blueprint.head_size))
        for place in places:
            own, slot = slice(place.first, place.stop), int(place.span.blocks[0])
            if place.span.start == 0:
                conv[slot], ssm[slot] = 0.0, 0.0
            mixed = self._convolve(inputs[own], conv[slot])
            seen[own] = self._run(mixed, steps[own], ssm[slot])
        gate = silu(rows @ self._gate.T).reshape(seen.shape)
        added: Array = rms_normed(seen * gate, self._blueprint.norm_epsilon).reshape(len(rows), -1) @ self._out.T
        return added

    def _convolve(self, inputs: Values, state: Values) -> Array:
        """The convolution of each channel with its inputs; `state` keeps the last of them, as (units, channels, taps)."""
        taps = self._blueprint.conv_taps
        before = state.reshape(-1, taps - 1).T
        known = np.concatenate([before, inputs])
        mixed = sum(known[tap : tap + len(inputs)] * self._conv[:, tap] for tap in range(taps))
        state[...] = known[len(known) - taps + 1 :].T.reshape(state.shape)
        return silu(np.asarray(mixed, np.float64))

    def _run(self, mixed: Array, steps: Array, state: Values) -> Array:
        """Step the state of every head token by token; what is read from it after each step."""
        size, width = self._blueprint.head_size, self._blueprint.state_size
        inner, shared = self._heads * size, self._groups * width
        x = mixed[:, :inner].reshape(-1, self._heads, size)
        b = mixed[:, inner : inner + shared].reshape(-1, self._groups, width)[:, self._group_of]
        c = mixed[:, inner + shared :].reshape(-1, self._groups, width)[:, self._group_of]
        kept, added = np.exp(-self._decay * steps), steps[:, :, None] * x
        seen = np.empty_like(x)
        for token in range(len(x)):
            state[...] = state * kept[token, :, None, None] + added[token, :, :, None] * b[token, :, None]
            seen[token] = np.einsum("hsw,hw->hs", state, c[token], dtype=np.float64)
        seen += self._skip[:, None] * x
        return seen

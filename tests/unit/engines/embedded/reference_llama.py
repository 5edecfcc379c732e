"""A plain, obvious Llama: full attention, no cache, float64, one token after the other as Hugging Face defines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]


class ReferenceLlama:
    """Reads a Hugging Face directory and computes the logits of every position."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tensors = {name: value.astype(np.float64) for name, value in load_file(directory / "model.safetensors").items()}

    def logits(self, token_ids: list[int]) -> Array:
        hidden = self.tensors["model.embed_tokens.weight"][token_ids]
        for layer in range(self.config["num_hidden_layers"]):
            hidden = hidden + self._attention(self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight"), layer)
            hidden = hidden + self._mlp(self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight"), layer)
        name = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        logits: Array = self._norm(hidden, "model.norm.weight") @ self.tensors[name].T
        return logits

    def _norm(self, hidden: Array, name: str) -> Array:
        mean = (hidden**2).mean(axis=-1, keepdims=True)
        result: Array = hidden / np.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[name]
        return result

    def _mlp(self, hidden: Array, layer: int) -> Array:
        gate = self._linear(hidden, f"model.layers.{layer}.mlp.gate_proj.weight")
        up = self._linear(hidden, f"model.layers.{layer}.mlp.up_proj.weight")
        return self._linear(gate / (1 + np.exp(-gate)) * up, f"model.layers.{layer}.mlp.down_proj.weight")

    def _attention(self, hidden: Array, layer: int) -> Array:
        tokens, size = len(hidden), self.config["head_dim"]
        prefix = f"model.layers.{layer}.self_attn."
        query = self._rotated(self._linear(hidden, prefix + "q_proj.weight").reshape(tokens, -1, size))
        key = self._rotated(self._linear(hidden, prefix + "k_proj.weight").reshape(tokens, -1, size))
        value = self._linear(hidden, prefix + "v_proj.weight").reshape(tokens, -1, size)
        group = query.shape[1] // key.shape[1]
        heads = []
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // group].T / np.sqrt(size)
            scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ value[:, head // group])
        return self._linear(np.concatenate(heads, axis=1), prefix + "o_proj.weight")

    def _rotated(self, vectors: Array) -> Array:
        half = vectors.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-np.arange(half) / half)
        angles = (np.arange(len(vectors))[:, None] * frequencies)[:, None, :]
        first, second = vectors[..., :half], vectors[..., half:]
        turned = (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
        return np.concatenate(turned, axis=-1)

    def _linear(self, hidden: Array, name: str) -> Array:
        result: Array = hidden @ self.tensors[name].T
        return result

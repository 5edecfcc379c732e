"""Writes the weights of one small model: a script that runs in vLLM's environment, `write_small_model.py DIRECTORY [DRAFT]`.

The directory has the `config.json`. A tensor gets random numbers of a sane scale, from a seed that is made of its name: so
layers and heads differ, and a draft model that consists of the first layers of another model has their very weights. Later
layers contribute less than earlier ones, but far more than the tolerance of a comparison; hence the first layers alone guess
many of the tokens, and a draft made of them is accepted often if, and only if, its cache is the right one.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["main"]

_QUERY_KEY = 1.6
_VALUE_OUT = 1.5
_HEAD = 3.0
_LATER = 0.6
_RARE = 0.2
_SPECIAL = 3


def main(directory: Path, draft: str) -> None:
    """Write `model.safetensors` for the `config.json` that is there."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    tensors = _eagle(config) if draft == "eagle" else _whole(directory)
    if draft == "mtp":
        tensors |= _mtp(tensors, config["num_hidden_layers"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _whole(directory: Path) -> dict[str, Any]:
    """What transformers saves for this configuration, so that names and shapes are those of real checkpoints."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    is_tied, repeats = bool(config.tie_word_embeddings), getattr(config, "repeated_kv_heads", 1)
    with torch.no_grad():
        for name, values in model.named_parameters():
            is_repeated = repeats > 1 and ("k_proj" in name or "v_proj" in name)
            part = values[: len(values) // repeats] if is_repeated else values
            _fill(name, part, is_tied)
            if is_repeated:
                # Every KV head of the model stands so many times in its draft: another size of cache, the same guesses.
                heads = part.clone().view(config.num_key_value_heads // repeats, -1, part.shape[1])
                values.copy_(heads.repeat_interleave(repeats, dim=0).view_as(values))
    kept = {name: values.detach().clone().contiguous() for name, values in model.state_dict().items()}
    if is_tied:
        kept.pop("lm_head.weight", None)
    return kept


def _fill(name: str, values: Any, is_tied: bool) -> None:
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if values.dim() == 1:
        _fill_vector(name, values, noise)
    elif "conv1d" in name:
        values.copy_(noise * 0.5)
    elif "embed" in name:
        values.copy_(noise / values.shape[1] ** 0.5 if is_tied else noise)
    else:
        # Experts of gpt-oss are stacked, and the last axis of each is its output; elsewhere it is the input.
        inputs = values.shape[1]
        values.copy_(noise * _gain(name) / inputs**0.5)
        if "lm_head" in name:
            values[-_SPECIAL:] *= _RARE


def _fill_vector(name: str, values: Any, noise: Any) -> None:
    """Norms near what they start with (0 or 1), biases and sinks small; how fast a state decays stays as it is made."""
    if "A_log" in name or name.endswith(".D") or "dt_bias" in name:
        return
    values.add_(noise.clamp(-2, 2) * 0.1)


def _gain(name: str) -> float:
    if "lm_head" in name:
        return _HEAD
    if re.search(r"\b(q|k|kv_a|kv_b)\w*_proj", name):
        return _QUERY_KEY
    found = re.search(r"layers\.(\d+)\.", name)
    later = _LATER ** int(found[1]) if found else 1.0
    is_last = re.search(r"\b(o_proj|down_proj|out_proj|output_linear)", name)
    return max(later, 0.25) * _VALUE_OUT if is_last else _VALUE_OUT


def _mtp(tensors: dict[str, Any], number: int) -> dict[str, Any]:
    """A layer of MTP that works like the first layer of its model: it takes the embedding, and little of the hidden state."""
    first, own = "model.layers.0.", f"model.layers.{number}."
    norm, embedding = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    layer = {own + name.removeprefix(first): values.clone() for name, values in tensors.items() if name.startswith(first)}
    layer |= {f"{own}{name}.weight": torch.ones_like(norm) for name in ("enorm", "hnorm")}
    hidden = torch.eye(len(norm))
    layer[f"{own}eh_proj.weight"] = torch.cat([hidden, 0.01 * hidden], dim=1)
    layer[f"{own}embed_tokens.weight"] = embedding.clone()
    layer[f"{own}shared_head.norm.weight"] = norm.clone()
    layer[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return layer


def _eagle(config: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE head that works like the first layer of its model: it takes the embedding, and little of the hidden state."""
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, query), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    shapes |= {"mlp.down_proj": (hidden, ffn)}
    tensors = {"fc.weight": torch.cat([torch.eye(hidden), 0.01 * torch.eye(hidden)], dim=1)}
    for part, shape in shapes.items():
        values = torch.zeros(shape)
        _fill(f"model.layers.0.{part}.weight", values, is_tied=False)
        tensors[f"layers.0.{part}.weight"] = values
    norm = torch.ones(hidden)
    _fill("model.layers.0.post_attention_layernorm.weight", norm, is_tied=False)
    tensors["layers.0.post_attention_layernorm.weight"] = norm
    return tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]), (sys.argv[2:] or [""])[0])

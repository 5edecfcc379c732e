"""Makes a tiny model whose next token depends on far tokens: runs in SGLang's environment. Arguments: directory, kind.

With weights as they are usually drawn, the next token depends on the last one alone, and a test would not notice a cache that
never arrived. The wide projections make attention count.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
)

_WIDTHS = {"q_proj": 0.15, "k_proj": 0.15, "v_proj": 0.2, "o_proj": 0.2, "embed": 0.05, "lm_head": 0.3}
_WIDTHS |= {"kv_a_proj": 0.15, "kv_b_proj": 0.2}
_COMMON = {"vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 4}


def _gqa(heads: int = 4, kv_heads: int = 2, width: int = 256) -> LlamaForCausalLM:
    sizes = {"hidden_size": width, "intermediate_size": width, "head_dim": 64}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return LlamaForCausalLM(LlamaConfig(**_COMMON, **sizes, tie_word_embeddings=False))


def _mla() -> MiniCPM3ForCausalLM:
    """The one architecture with MLA whose layers are all dense: SGLang has no experts for CPUs."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    plain = {"q_lora_rank": None, "scale_emb": 1, "scale_depth": None, "dim_model_base": None, "tie_word_embeddings": False}
    return MiniCPM3ForCausalLM(MiniCPM3Config(**_COMMON, **sizes, **plain))


def _gqa6() -> LlamaForCausalLM:
    """Six heads: they can be divided among three ranks and among two."""
    return _gqa(6, 6, 384)


def _window() -> MellumForCausalLM:
    """Every second layer has a sliding window, whose pages SGLang keeps in a pool of their own."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_layer_types": ["dense"] * 4}
    return MellumForCausalLM(MellumConfig(**_COMMON, **sizes, **kinds, sliding_window=48, tie_word_embeddings=False))


_KINDS = {"gqa": _gqa, "gqa6": _gqa6, "mla": _mla, "window": _window}


def main(directory: str, kind: str) -> None:
    """Make it and store it."""
    torch.manual_seed(7)
    model: Any = _KINDS[kind]()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, next((width for part, width in _WIDTHS.items() if part in name), 0.02))
    model.eval().save_pretrained(directory, safe_serialization=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

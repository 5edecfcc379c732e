"""Makes a tiny model whose next token depends on far tokens: runs in SGLang's environment. Arguments: directory, kind.

With weights as they are usually drawn, the next token depends on the last one alone, and a test would not notice a cache that
never arrived. The wide projections make attention count.
"""

from __future__ import annotations

import sys

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

_WIDTHS = {"q_proj": 0.15, "k_proj": 0.15, "v_proj": 0.2, "o_proj": 0.2, "kv_": 0.2, "embed": 0.05, "lm_head": 0.3}
_COMMON = {"vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 4}


def _gqa() -> LlamaForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**_COMMON, **sizes, tie_word_embeddings=False))


def _mla() -> DeepseekV2ForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    latent = {"kv_lora_rank": 64, "q_lora_rank": None, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    dense = {"first_k_dense_replace": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(**_COMMON, **sizes, **latent, **dense, moe_intermediate_size=64, tie_word_embeddings=False)
    )


def main(directory: str, kind: str) -> None:
    """Make it and store it."""
    torch.manual_seed(7)
    model = {"gqa": _gqa, "mla": _mla}[kind]()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, next((width for part, width in _WIDTHS.items() if part in name), 0.02))
    model.eval().save_pretrained(directory, safe_serialization=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

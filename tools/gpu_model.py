"""Writes a Llama of random weights of a sane scale, with a tokenizer, for a GPU: `gpu_model.py DIRECTORY`.

The directory's name chooses the shape. Weights are made on the GPU, from one seed, and written once. Their scale is such that
answers depend on the whole prompt, and the best two candidates are rarely close: a wrong byte in a cache shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": {"hidden": 1024, "inner": 2816, "layers": 4, "heads": 8, "kv_heads": 4, "vocabulary": 32000},
    "m8b": {"hidden": 4096, "inner": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocabulary": 128256},
}
HEAD = 128


def write_config(directory: Path, shape: dict[str, int]) -> None:
    """What vLLM reads first."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": HEAD,
        "vocab_size": shape["vocabulary"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """One word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ("<s>", "</s>", "<unk>")
    words = {special[i] if i < len(special) else f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(directory: Path, shape: dict[str, int]) -> None:
    """One file for the ends of the model, and one per layer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator("cuda").manual_seed(7)
    hidden, inner = shape["hidden"], shape["inner"]
    queries, keys = shape["heads"] * HEAD, shape["kv_heads"] * HEAD
    index: dict[str, str] = {}

    def linear(rows: int, columns: int, scale: float) -> Any:
        weights = torch.randn(rows, columns, generator=generator, device="cuda") * (scale / columns**0.5)
        return weights.to(torch.bfloat16).cpu()

    def save(name: str, weights: dict[str, Any]) -> None:
        save_file(weights, str(directory / name), {"format": "pt"})
        index.update(dict.fromkeys(weights, name))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    ends = {"model.embed_tokens.weight": linear(shape["vocabulary"], hidden, hidden**0.5), "model.norm.weight": ones}
    save("ends.safetensors", {**ends, "lm_head.weight": linear(shape["vocabulary"], hidden, 4.0)})
    for layer in range(shape["layers"]):
        weights = {
            "self_attn.q_proj": linear(queries, hidden, 2.0),
            "self_attn.k_proj": linear(keys, hidden, 2.0),
            "self_attn.v_proj": linear(keys, hidden, 1.5),
            "self_attn.o_proj": linear(hidden, queries, 1.5),
            "mlp.gate_proj": linear(inner, hidden, 1.5),
            "mlp.up_proj": linear(inner, hidden, 1.5),
            "mlp.down_proj": linear(hidden, inner, 1.5),
            "input_layernorm": ones.clone(),
            "post_attention_layernorm": ones.clone(),
        }
        save(f"layer-{layer}.safetensors", {f"model.layers.{layer}.{name}.weight": value for name, value in weights.items()})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main() -> None:
    """Write what is not there yet."""
    directory = Path(sys.argv[1])
    shape = SHAPES[directory.name]
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / "written"
    if not done.exists():
        write_config(directory, shape)
        write_tokenizer(directory, shape["vocabulary"])
        write_weights(directory, shape)
        done.touch()


if __name__ == "__main__":
    main()

"""Writes small GGUF files from Hugging Face directories, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, directory: Path, *, quantised: bool = False, extra: dict[str, Any] | None = None, drop: str = ""
) -> Path:
    """Convert `directory` as llama.cpp does: names, metadata, and query and key rows with rotating pairs side by side."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, (extra or {}).get("architecture", "llama"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, directory, config)
    for key, value in ((extra or {}).get("texts") or {}).items():
        writer.add_string(key, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        if _gguf_name(name) != drop:
            _add_tensor(writer, name, tensor, config["head_dim"], quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, directory: Path, config: dict[str, Any]) -> None:
    description = json.loads((directory / "tokenizer.json").read_text())
    tokens = sorted(description["model"]["vocab"], key=description["model"]["vocab"].__getitem__)
    special = {token["content"] for token in description["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])


def _add_tensor(writer: Any, name: str, tensor: npt.NDArray[np.float32], head_size: int, quantised: bool) -> None:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        halves = tensor.reshape(-1, 2, head_size // 2, tensor.shape[1])
        tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if quantised and tensor.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    else:
        writer.add_tensor(_gguf_name(name), tensor)


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, role = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[role]}.weight"

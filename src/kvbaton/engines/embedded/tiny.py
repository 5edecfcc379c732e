"""A small random Llama with a working byte-level tokenizer, for tests and for trying things out without a download."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from kvbaton.engines.embedded.tokenizer import TokenizerFiles
from kvbaton.errors import ModelError

__all__ = ["TINY_FORMAT", "byte_tokenizer", "readable_tokens", "write_tiny_model"]

TINY_FORMAT = 1
"""Part of the name under which a tiny model is kept; raised when what is written changes."""

_BOS, _EOS = "<|im_start|>", "<|im_end|>"
_SPECIAL = ("<|endoftext|>", _BOS, _EOS)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_RARE = 0.2


def write_tiny_model(
    directory: Path,
    seed: int = 0,
    *,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 6,
    kv_heads: int = 2,
    head_size: int = 16,
    ffn: int = 128,
    context_tokens: int = 4096,
    tied_head: bool = False,
) -> Path:
    """Write a model directory with safetensors; it appears whole or not at all. Returns `directory`.

    Weights are large enough for attention to decide the answer, and rows of unprintable bytes and special tokens are
    weak, so that answers are mostly readable text and rarely end early.
    """
    characters = sorted(ByteLevel.alphabet())
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "intermediate_size": ffn,
        "vocab_size": len(characters) + len(_SPECIAL),
        "max_position_embeddings": context_tokens,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied_head,
        "eos_token_id": len(characters) + _SPECIAL.index(_EOS),
    }
    settings = {"bos_token": _BOS, "eos_token": _EOS, "chat_template": _TEMPLATE}
    texts = {"config.json": config, "tokenizer.json": _tokenizer(characters), "tokenizer_config.json": settings}
    _write_whole(directory, texts, _weights(config, np.random.default_rng(seed)))
    return directory


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    hidden, ffn, head_size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query_size, kv_size = config["num_attention_heads"] * head_size, config["num_key_value_heads"] * head_size

    def matrix(outputs: int, inputs: int, gain: float) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = (rng.standard_normal((outputs, inputs)) * gain / np.sqrt(inputs)).astype(np.float32)
        return values

    def norm() -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = rng.uniform(0.8, 1.2, hidden).astype(np.float32)
        return values

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, np.sqrt(hidden)), "model.norm.weight": norm()}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": norm(),
            prefix + "self_attn.q_proj.weight": matrix(query_size, hidden, 1.6),
            prefix + "self_attn.k_proj.weight": matrix(kv_size, hidden, 1.6),
            prefix + "self_attn.v_proj.weight": matrix(kv_size, hidden, 2.0),
            prefix + "self_attn.o_proj.weight": matrix(hidden, query_size, 2.0),
            prefix + "post_attention_layernorm.weight": norm(),
            prefix + "mlp.gate_proj.weight": matrix(ffn, hidden, 1.0),
            prefix + "mlp.up_proj.weight": matrix(ffn, hidden, 1.0),
            prefix + "mlp.down_proj.weight": matrix(hidden, ffn, 1.5),
        }
    if not config["tie_word_embeddings"]:
        head = matrix(config["vocab_size"], hidden, 3.0) * np.where(readable_tokens(), 1.0, _RARE)[:, None]
        tensors["lm_head.weight"] = head.astype(np.float32)
    return tensors


def byte_tokenizer() -> TokenizerFiles:
    """The tokenizer of every tiny model."""
    characters = sorted(ByteLevel.alphabet())
    return TokenizerFiles(
        tokenizer_json=json.dumps(_tokenizer(characters), ensure_ascii=False),
        chat_template=_TEMPLATE,
        bos_token=_BOS,
        eos_token=_EOS,
        eos_ids=(len(characters) + _SPECIAL.index(_EOS),),
    )


def readable_tokens() -> npt.NDArray[np.bool_]:
    """Of each token of that tokenizer, whether it is a printable character; the others are to be rare in answers."""
    characters = sorted(ByteLevel.alphabet())
    return np.array([0x20 <= ord(c) < 0x7F or c in "ĠĊ" for c in characters] + [False] * len(_SPECIAL))


def _tokenizer(characters: list[str]) -> dict[str, Any]:
    """Byte-level BPE of single bytes: every text can be written, every byte is one token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [*characters, *_SPECIAL]
    return {
        "version": "1.0",
        "added_tokens": [{"id": tokens.index(token), "content": token, **plain} for token in _SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }


def _write_whole(directory: Path, texts: dict[str, Any], weights: dict[str, npt.NDArray[np.float32]]) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.") as temporary:
            made = Path(temporary) / "model"
            made.mkdir()
            for name, content in texts.items():
                (made / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
            save_file(weights, made / "model.safetensors")
            _move(made, directory)
    except OSError as error:
        raise ModelError(f"{directory}: cannot write the tiny model: {error}; make room there, or set KVBATON_CACHE") from error


def _move(made: Path, directory: Path) -> None:
    """Rename into place; if another process was first, keep its files, which are the same."""
    try:
        made.rename(directory)
    except OSError:
        if not (directory / "model.safetensors").is_file():
            raise
        shutil.rmtree(made)

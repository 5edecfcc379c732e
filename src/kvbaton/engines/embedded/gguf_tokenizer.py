"""Turns the tokenizer inside a GGUF file's metadata into the `tokenizer.json` form that the tokenizers library reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvbaton.engines.embedded.tokenizer import TokenizerFiles
from kvbaton.errors import ModelError

__all__ = ["tokenizer_from_gguf"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "llama-bpe": [
        {"type": "Split", "pattern": {"Regex": _LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ],
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> TokenizerFiles:
    """Build a byte-level BPE tokenizer from `tokenizer.ggml.*`; raises ModelError for kinds that are not supported."""
    _refuse_unless(where, metadata, "tokenizer.ggml.model", ("gpt2",))
    _refuse_unless(where, metadata, "tokenizer.ggml.pre", tuple(_PRE_TOKENIZERS))
    tokens, types = _texts(where, metadata, "tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type") or []
    needs_merges = any(len(token) > 1 and kind == _NORMAL for token, kind in zip(tokens, types, strict=False))
    merges = _texts(where, metadata, "tokenizer.ggml.merges") if needs_merges else []
    bos_id, eos_id = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    eos_ids = {one for one in (eos_id, metadata.get("tokenizer.ggml.eot_token_id")) if isinstance(one, int)}
    bos_token = tokens[bos_id] if isinstance(bos_id, int) and bos_id < len(tokens) else ""
    eos_token = tokens[eos_id] if isinstance(eos_id, int) and eos_id < len(tokens) else ""
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token")) and bool(bos_token)
    pre = metadata["tokenizer.ggml.pre"]
    description = {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _leading_token(bos_token, int(bos_id)) if adds_bos and isinstance(bos_id, int) else None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
            "ignore_merges": pre == "llama-bpe",
        },
    }
    return TokenizerFiles(
        tokenizer_json=json.dumps(description),
        chat_template=str(metadata.get("tokenizer.chat_template") or ""),
        bos_token=bos_token,
        eos_token=eos_token,
        eos_ids=tuple(sorted(eos_ids)),
    )


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "content": token,
            "special": kind == _CONTROL,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _leading_token(token: str, token_id: int) -> dict[str, Any]:
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _texts(where: str, metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ModelError(f"{where}: {key} is missing or no list of texts; use a GGUF file that includes its tokenizer")
    return value


def _refuse_unless(where: str, metadata: Mapping[str, Any], key: str, supported: tuple[str, ...]) -> None:
    value = metadata.get(key)
    if value not in supported:
        allowed = ", ".join(supported)
        raise ModelError(f"{where}: {key} is {value!r}, supported are {allowed}; use the model's safetensors directory instead")

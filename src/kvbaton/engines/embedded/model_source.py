"""Where weights come from: one view of GGUF files and of Hugging Face directories, by role instead of by name.

Query and key rows come in the order in which the two numbers that rotate together are neighbours. GGUF files of the
llama architecture already store them so; Hugging Face stores the halves of a head apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.config import ModelConfig, config_from_gguf, config_from_hugging_face
from kvbaton.engines.embedded.gguf_tokenizer import tokenizer_from_gguf
from kvbaton.engines.embedded.model_files import GgufFile, SafetensorsDir
from kvbaton.engines.embedded.tokenizer import TokenizerFiles
from kvbaton.errors import ModelError

__all__ = ["ModelSource", "open_source"]

Array = npt.NDArray[np.float32]

_GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "query": "blk.{}.attn_q.weight",
    "key": "blk.{}.attn_k.weight",
    "value": "blk.{}.attn_v.weight",
    "attention_out": "blk.{}.attn_output.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_HUGGING_FACE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "query": "model.layers.{}.self_attn.q_proj.weight",
    "key": "model.layers.{}.self_attn.k_proj.weight",
    "value": "model.layers.{}.self_attn.v_proj.weight",
    "attention_out": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_HARMLESS_ENDING = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The unprepared weights of one model. `read` and `tokenizer_files` raise ModelError, as `tensor` does.

    With `halves_apart`, query and key rows have to be brought into the order above.
    """

    path: Path
    config: ModelConfig
    names: Mapping[str, str]
    read: Callable[[str], Array]
    tokenizer_files: Callable[[], TokenizerFiles]
    halves_apart: bool = False

    def tensor(self, role: str, layer: int | None = None) -> Array:
        """The tensor that plays `role`, in the shape the config requires."""
        name = self.names[role].format(layer)
        tensor = _shaped(self.path, name, self.read(name), _expected_shape(self.config, role))
        if self.halves_apart and role in ("query", "key"):
            halves = tensor.reshape(-1, 2, self.config.head_size // 2, self.config.hidden_size)
            return halves.swapaxes(1, 2).reshape(tensor.shape)
        return tensor


def open_source(path: Path) -> ModelSource:
    """Open a GGUF file or a Hugging Face directory and check its description; tensors are read later."""
    return _open_gguf(path) if path.is_file() else _open_hugging_face(path)


def _open_gguf(path: Path) -> ModelSource:
    file = GgufFile(path)
    embedding = file.tensors.get(_GGUF_NAMES["embedding"])
    if embedding is None:
        raise ModelError(f"{path}: tensor {_GGUF_NAMES['embedding']} is missing; use a complete file")
    tied_head = _GGUF_NAMES["head"] not in file.tensors
    config = config_from_gguf(file.metadata, vocab_size=embedding.shape[0], tied_head=tied_head, where=str(path))
    _refuse_unknown(path, file.tensors, _GGUF_NAMES, config.layers)
    return ModelSource(path, config, _GGUF_NAMES, file.tensor, lambda: tokenizer_from_gguf(file.metadata, str(path)))


def _open_hugging_face(path: Path) -> ModelSource:
    directory = SafetensorsDir(path)
    config = config_from_hugging_face(directory.config, str(path / "config.json"))
    _refuse_unknown(path, directory.tensor_names, _HUGGING_FACE_NAMES, config.layers)
    names, files = _HUGGING_FACE_NAMES, directory.tokenizer_files
    return ModelSource(path, config, names, directory.tensor, files, halves_apart=True)


def _expected_shape(config: ModelConfig, role: str) -> tuple[int, ...]:
    hidden = config.hidden_size
    outputs_of = {
        "embedding": config.vocab_size,
        "head": config.vocab_size,
        "query": config.query_size,
        "key": config.kv_size,
        "value": config.kv_size,
        "gate": config.ffn_size,
        "up": config.ffn_size,
    }
    if role in outputs_of:
        return outputs_of[role], hidden
    inputs_of = {"attention_out": config.query_size, "down": config.ffn_size}
    return (hidden, inputs_of[role]) if role in inputs_of else (hidden,)


def _shaped(path: Path, name: str, tensor: Array, expected: tuple[int, ...]) -> Array:
    if tensor.shape != expected:
        raise ModelError(
            f"{path}: tensor {name} has the shape {tensor.shape}, the model's description requires {expected}; "
            "weights and description are of different models, download both again"
        )
    return tensor


def _refuse_unknown(path: Path, found: Iterable[str], names: dict[str, str], layers: int) -> None:
    """An unread tensor means a computation that this model leaves out: refuse it, because its answers would be wrong."""
    known = {name.format(layer) for name in names.values() for layer in range(layers)}
    for name in sorted(found):
        if name not in known and not name.endswith(_HARMLESS_ENDING):
            raise ModelError(
                f"{path}: tensor {name} is not part of a plain Llama model and not supported; choose another model"
            )

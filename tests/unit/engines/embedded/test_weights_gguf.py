"""GGUF files that are broken or of another kind: always a ModelError that names the file, never a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engines.embedded.model_files import GgufFile
from kvbaton.engines.embedded.tiny import write_tiny_model
from kvbaton.engines.embedded.weights import load_model
from kvbaton.errors import ModelError

HEADER_BYTES = 10_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gguf") / "model", 4, layers=1)


@pytest.fixture(scope="module")
def raw(directory: Path) -> bytes:
    return write_gguf(directory.parent / "whole.gguf", directory).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def test_metadata_and_tensors_are_read(directory: Path, raw: bytes) -> None:
    file = GgufFile(directory.parent / "whole.gguf")
    assert raw
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 1
    assert file.metadata["llama.rope.freq_base"] == 10_000.0
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 259
    assert file.tensors["blk.0.ffn_down.weight"].shape == (64, 128)
    assert file.tensor("output_norm.weight").dtype == np.float32


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere_is_a_model_error(raw: bytes, scratch: Path, share: float) -> None:
    path = scratch / "short.gguf"
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ModelError, match=r"short\.gguf"):
        load_model(str(path), cache_dir=scratch / "cache")


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, HEADER_BYTES), value=st.integers(0, 255), count=st.sampled_from([1, 4, 8]))
def test_any_damage_to_the_header_loads_or_is_a_model_error(
    raw: bytes, scratch: Path, position: int, value: int, count: int
) -> None:
    path = scratch / "damaged.gguf"
    path.write_bytes(raw[:position] + bytes([value]) * count + raw[position + count :])
    reported = ""
    try:
        load_model(str(path), cache_dir=scratch / "cache")
    except ModelError as error:
        reported = str(error)
    assert not reported or "damaged.gguf" in reported
    for cached in (scratch / "cache").glob("*.weights"):
        cached.unlink()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture is 'gemma', supported is 'llama'"),
        ({"texts": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is 'yarn', supported is 'none'"),
        ({"texts": {"llama.expert_count": "x"}}, "llama.expert_count is 'x', supported is 0"),
    ],
)
def test_other_kinds_are_refused_by_name(directory: Path, tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", directory, extra=extra)
    with pytest.raises(ModelError, match=message):
        load_model(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["blk.0.attn_k.weight", "token_embd.weight", "output_norm.weight"])
def test_missing_tensor_is_named(directory: Path, tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "part.gguf", directory, drop=name)
    with pytest.raises(ModelError, match=rf"part\.gguf: tensor {name} is missing"):
        load_model(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all", b"GGUF\x63\0\0\0"])
def test_what_is_no_gguf_says_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fake.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"fake\.gguf"):
        load_model(str(path), cache_dir=tmp_path / "cache")

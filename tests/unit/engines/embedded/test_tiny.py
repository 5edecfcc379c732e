"""The tiny model: made once, the same for the same seed, and readable by others."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.tiny import write_tiny_model
from kvbaton.engines.embedded.weights import LoadedModel, load_model
from kvbaton.errors import ModelError


def greedy(loaded: LoadedModel, text: str, count: int) -> list[int]:
    cache, blocks = PagedCache(loaded.config, 16, 16), np.arange(16, dtype=np.int32)
    ids, start, answer = np.array(loaded.tokenizer.encode(text), np.int32), 0, []
    for _ in range(count):
        answer.append(int(loaded.model.forward([TokenSpan(ids, start, blocks)], cache)[0].argmax()))
        start += len(ids)
        ids = np.array(answer[-1:], np.int32)
    return answer


def test_tiny_is_made_once_and_named_as_asked_for(tmp_path: Path) -> None:
    first, second = load_model("tiny", cache_dir=tmp_path), load_model("tiny:0", cache_dir=tmp_path)
    assert (first.name, second.name) == ("tiny", "tiny:0")
    assert first.fingerprint == second.fingerprint
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_seeds_are_different_models_everywhere_the_same(tmp_path: Path) -> None:
    here, there = load_model("tiny:3", cache_dir=tmp_path / "a"), load_model("tiny:3", cache_dir=tmp_path / "b")
    assert here.fingerprint == there.fingerprint != load_model("tiny:4", cache_dir=tmp_path / "a").fingerprint


@pytest.mark.parametrize("model", ["tiny:x", "tiny:-1", "tiny:1.5", "tiny:9999999999"])
def test_a_seed_that_is_none_is_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelError, match="is no seed"):
        load_model(model, cache_dir=tmp_path)


def test_answers_are_readable_long_and_depend_on_the_prompt(tmp_path: Path) -> None:
    loaded = load_model("tiny", cache_dir=tmp_path)
    answers = [greedy(loaded, text, 60) for text in ("The capital of France is", "The capital of Spain is", "x")]
    assert len({tuple(answer) for answer in answers}) == 3
    for answer in answers:
        text = loaded.tokenizer.decode(answer)
        assert sum(character.isprintable() for character in text) > 0.8 * len(answer)
        assert not loaded.tokenizer.eos_ids & set(answer)


def test_dimensions_are_as_asked_for(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "other", layers=2, hidden=32, heads=4, kv_heads=1, head_size=8, tied_head=True)
    config = load_model(str(directory), cache_dir=tmp_path / "cache").config
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_size) == (2, 32, 4, 1, 8)
    assert config.tied_head
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")


def test_written_by_many_at_once_is_one_whole_model(tmp_path: Path) -> None:
    target, failures = tmp_path / "tiny", []

    def write() -> None:
        try:
            write_tiny_model(target, 1, layers=1)
        except ModelError as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert load_model(str(target), cache_dir=tmp_path / "cache").config.layers == 1


def test_no_room_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the tiny model"):
        write_tiny_model(tmp_path / "file" / "tiny")

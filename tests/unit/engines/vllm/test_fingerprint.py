"""Fingerprints: equal for one model wherever it lies and whoever read it, different for two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbaton.engines.vllm.fingerprint import fingerprint

CONFIG: dict[str, Any] = {"hidden_size": 64, "vision": {"depth": 2, "_name_or_path": "a"}, "_name_or_path": "a"}


def model_at(directory: Path, size: int = 8) -> str:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"w" * size)
    return str(directory)


def test_where_a_model_lies_and_what_read_it_do_not_count(tmp_path: Path) -> None:
    here, there = model_at(tmp_path / "here"), model_at(tmp_path / "there")
    config = {**CONFIG, "_name_or_path": here, "transformers_version": "5.0.0"}
    other = {**CONFIG, "_name_or_path": there, "transformers_version": "5.1.0", "vision": {"depth": 2, "_name_or_path": "b"}}
    assert fingerprint(config, here, ["float32"]) == fingerprint(other, there, ["float32"])


@pytest.mark.parametrize(
    ("config", "size", "others"),
    [({**CONFIG, "hidden_size": 65}, 8, ["float32"]), (CONFIG, 9, ["float32"]), (CONFIG, 8, ["bfloat16"])],
)
def test_what_decides_the_meaning_of_a_cache_counts(
    tmp_path: Path, config: dict[str, Any], size: int, others: list[str]
) -> None:
    one = fingerprint(CONFIG, model_at(tmp_path / "one"), ["float32"])
    assert fingerprint(config, model_at(tmp_path / "two", size), others) != one


def test_a_name_counts_where_there_are_no_weights_to_look_at() -> None:
    assert fingerprint(CONFIG, "org/model", ()) != fingerprint(CONFIG, "org/other", ())


@pytest.mark.parametrize("at", [0, 100_000, 999_999])
def test_other_weights_of_the_same_size_count(tmp_path: Path, at: int) -> None:
    one, two = model_at(tmp_path / "one", 1_000_000), model_at(tmp_path / "two", 1_000_000)
    weights = bytearray(b"w" * 1_000_000)
    weights[at : at + 20_000] = b"x" * len(weights[at : at + 20_000])
    (Path(two) / "model.safetensors").write_bytes(weights)
    assert fingerprint(CONFIG, one, ()) != fingerprint(CONFIG, two, ())


def test_defaults_that_a_library_adds_do_not_count_and_stated_values_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layers": 2, "rope": {"theta": 1}}')
    one = {"layers": 2, "rope": {"theta": 1}}
    newer = {"layers": 2, "rope": {"theta": 1, "kind": "default"}, "added_in_5_19": False}
    assert fingerprint(one, str(tmp_path), []) == fingerprint(newer, str(tmp_path), [])
    for other in ({**one, "layers": 3}, {**one, "rope": {"theta": 2}}, {**one, "rope_scaling": {"factor": 8}}):
        assert fingerprint(other, str(tmp_path), []) != fingerprint(one, str(tmp_path), [])

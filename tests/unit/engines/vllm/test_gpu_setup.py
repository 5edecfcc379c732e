"""vLLM on a GPU behind the engine seam, as far as that shows without one: options, arguments, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvbaton.engines.base import EngineOptions
from kvbaton.engines.vllm.setup.environment import GpuEnvironment, find_gpu_environment
from kvbaton.engines.vllm.setup.plugin import VllmPlugin
from kvbaton.engines.vllm.setup.servers import VllmServers, gpu_cache_bytes
from kvbaton.engines.vllm.setup.small_models import MadeModel
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker

CONFIG = {
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a configuration, and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def options(model: Path, transport: str = "cuda", dtype: str = "float32") -> EngineOptions:
    return EngineOptions(str(model), transport, 3, device="cuda", cache_dtype=dtype)


def arguments_of(model: Path, dtype: str) -> list[str]:
    chosen = options(model, dtype=dtype)
    cache_bytes = gpu_cache_bytes(model, dtype)
    servers = VllmServers(GpuEnvironment(model), model, chosen, cache_bytes=cache_bytes, context_tokens=10_240)
    return list(servers.part("single", "both", PortPicker()).command)


def test_facts_come_from_the_configuration_and_prompts_from_hashes(model: Path) -> None:
    plugin = VllmPlugin()
    plugin.check_support(options(model))
    facts = plugin.check(options(model), options(model), lambda _: None)
    assert facts.name == model.name
    assert facts.context_tokens == 10_240
    tokens = facts.encode("one two one")
    assert len(tokens) == 3
    assert tokens[0] != tokens[2]
    assert all(16 <= token < 32000 for token in tokens)
    assert facts.encode("one two one") == tokens


def test_a_directory_without_a_configuration_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="with --device cuda it is a directory"):
        VllmPlugin().check(options(tmp_path), options(tmp_path), lambda _: None)
    with pytest.raises(ConfigError, match="does not show how large its cache is"):
        gpu_cache_bytes(tmp_path, "float32")


@pytest.mark.parametrize("transport", ["local", "mooncake"])
def test_a_transport_of_main_memory_is_refused_before_anything_starts(model: Path, transport: str) -> None:
    chosen = options(model, transport)
    with pytest.raises(ConfigError, match=f"--transport is {transport}, which moves main memory only.*tcp, cuda, nixl"):
        VllmPlugin().check(chosen, chosen, lambda _: None)


def test_servers_on_a_gpu_share_its_memory_and_have_kernels_for_their_type(model: Path) -> None:
    exact, quick = arguments_of(model, "float32"), arguments_of(model, "bfloat16")
    assert exact[exact.index("--gpu-memory-utilization") + 1] == "0.310"
    assert exact[exact.index("--kv-cache-memory-bytes") + 1] == str(32_768 * 256 * 1024)
    assert quick[quick.index("--kv-cache-memory-bytes") + 1] == str(32_768 * 128 * 1024)
    assert "TRITON_ATTN" in exact
    assert "TRITON_ATTN" not in quick
    assert "--no-enable-prefix-caching" in exact
    assert exact[exact.index("--max-model-len") + 1] == "10240"


@pytest.mark.parametrize("shape", ["tp1", "tp2", "pp2"])
def test_small_models_are_served_on_a_gpu_in_any_shape(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MadeModel(tmp_path, ("--no-enable-prefix-caching",))
    monkeypatch.setattr("kvbaton.engines.vllm.setup.plugin.find_gpu_environment", lambda: GpuEnvironment(tmp_path))
    monkeypatch.setattr("kvbaton.engines.vllm.setup.plugin.ensure_small_model", lambda *_: made)
    chosen = EngineOptions("small-granite4", "cuda", 3, device="cuda", shape=shape)
    assert VllmPlugin().check(chosen, chosen, lambda _: None).context_tokens == 2048
    command = list(VllmPlugin().prepare(chosen, lambda _: None).part("single", "both", PortPicker()).command)
    assert command[command.index("--max-model-len") + 1] == "2048"
    assert "--enforce-eager" in command
    assert ("--tensor-parallel-size" in command) is (shape == "tp2")
    local = replace(chosen, transport="local")
    with pytest.raises(ConfigError, match="--transport is local, which moves main memory only"):
        VllmPlugin().check(local, local, lambda _: None)


def test_without_vllm_in_this_python_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs vLLM for NVIDIA GPUs in the Python that runs kvbaton"):
        find_gpu_environment()

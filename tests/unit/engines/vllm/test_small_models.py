"""Small models for vLLM by name, and servers of several ranks; nothing is installed or written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbaton.core.topology import Shape
from kvbaton.engines.base import Controls, EngineOptions
from kvbaton.engines.vllm.settings import parse_settings
from kvbaton.engines.vllm.setup.environment import VllmEnvironment
from kvbaton.engines.vllm.setup.plugin import VllmPlugin
from kvbaton.engines.vllm.setup.servers import VllmServers, check_shape
from kvbaton.engines.vllm.setup.small_models import SMALL_MODELS, ensure_small_model, find_small_model
from kvbaton.errors import ConfigError, ModelError
from kvbaton.launch.fleet import FleetPart
from kvbaton.launch.ports import PortPicker


def part(tmp_path: Path, shape: str, role: str = "prefill", **controls: str) -> FleetPart:
    options = EngineOptions("small-llama", "local", 1, shape=shape, controls=Controls(**controls))  # type: ignore[arg-type]
    return VllmServers(VllmEnvironment(tmp_path), tmp_path / "model", options).part("it", role, PortPicker())


def value(part: FleetPart, option: str) -> str:
    return part.command[part.command.index(option) + 1] if option in part.command else ""


def written(directory: Path, name: str) -> Path:
    made = directory / "models" / f"{name}-v1"
    made.mkdir(parents=True)
    (made / "written").touch()
    return made


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("tp1", ("", "", "")),
        ("tp2", ("2", "", "")),
        ("pp3", ("", "3", "")),
        ("pp2,tp2", ("2", "2", "")),
        ("dp2", ("", "", "2")),
    ],
)
def test_a_shape_becomes_arguments_of_vllm(tmp_path: Path, shape: str, sizes: tuple[str, str, str]) -> None:
    found = part(tmp_path, shape)
    options = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    assert tuple(value(found, option) for option in options) == sizes


def test_stages_are_traced_because_they_have_to_run_once_before_they_serve(tmp_path: Path) -> None:
    whole, stages = part(tmp_path, "tp2"), part(tmp_path, "pp2")
    assert ("--enforce-eager" in whole.command, "--enforce-eager" in stages.command) == (True, False)
    assert json.loads(value(stages, "--compilation-config"))["backend"] == "eager"


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    ranks = Shape.parse("pp2,tp2,dp2")
    one, many = part(tmp_path, "tp1").environment, part(tmp_path, str(ranks)).environment
    assert int(many["OMP_NUM_THREADS"]) == max(1, int(one["OMP_NUM_THREADS"]) // (ranks.ranks * ranks.dp))


def test_each_engine_of_a_data_parallel_server_has_ports_of_its_own(tmp_path: Path) -> None:
    options = EngineOptions("small-llama", "local", 1, shape="dp4")
    servers, ports = VllmServers(VllmEnvironment(tmp_path), tmp_path / "model", options), PortPicker()
    taken: list[int] = []
    for name in ("one", "two"):
        config = json.loads(value(servers.part(name, "prefill", ports), "--kv-transfer-config"))["kv_connector_extra_config"]
        assert parse_settings(config).dp_size == 4
        taken += [config[key] + rank for key in ("control_port", "handoffs_port") for rank in range(4)]
    assert len(set(taken)) == len(taken)


def test_what_is_dropped_reaches_the_connector(tmp_path: Path) -> None:
    config = json.loads(value(part(tmp_path, "tp1", drop="heads"), "--kv-transfer-config"))
    assert config["kv_connector_extra_config"]["drop"] == "heads"
    assert "drop" not in json.loads(value(part(tmp_path, "tp1"), "--kv-transfer-config"))["kv_connector_extra_config"]


def test_context_parallel_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape cp2 has cp2; .* dp, pp and tp"):
        check_shape("cp2")


def test_a_mistyped_name_gets_the_nearest_one() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'small-llama'"):
        find_small_model("small-lama")


@pytest.mark.parametrize(
    ("model", "drop", "problem"),
    [
        ("small-mla", "heads", "has nothing of that kind; it has layers"),
        ("small-llama", "state", "it has heads, layers"),
        ("small-llama", "head:1", "names nothing"),
        ("smollm2", "draft", "it has heads, layers"),
    ],
)
def test_a_control_that_would_leave_out_nothing_is_refused(model: str, drop: str, problem: str) -> None:
    options = EngineOptions(model, controls=Controls(drop=drop))
    with pytest.raises(ConfigError, match=problem):
        VllmPlugin().check(options, options, print)


def test_clients_learn_the_name_and_the_tokens_without_vllm() -> None:
    options = EngineOptions("small-gemma3", controls=Controls(drop="layers"))
    facts = VllmPlugin().check(options, options, print)
    assert (facts.name, facts.context_tokens, list(facts.encode("ab"))) == ("small-gemma3", 2048, [64, 65])
    assert max(facts.token_ids) < 256


def test_a_model_that_is_written_is_used_as_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    model, draft = written(tmp_path, "small-eagle"), written(tmp_path, "small-eagle.draft")
    made = ensure_small_model("small-eagle", VllmEnvironment(tmp_path), said.append)
    assert (made.directory, said) == (model, [])
    config = json.loads(made.arguments[made.arguments.index("--speculative-config") + 1])
    assert (config["method"], config["model"]) == ("eagle", str(draft))


def test_models_whose_prefixes_vllm_cannot_cache_are_served_without(tmp_path: Path) -> None:
    written(tmp_path, "small-mamba2")
    assert "--no-enable-prefix-caching" in ensure_small_model("small-mamba2", VllmEnvironment(tmp_path), print).arguments


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_layers_and_heads_can_be_divided_by_two(name: str) -> None:
    config = SMALL_MODELS[name].config
    assert config["num_hidden_layers"] % 2 == 0
    assert config.get("num_attention_heads", 8) % 2 == 0


def test_every_small_model_is_in_the_document() -> None:
    text = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text()
    rows = [
        f"| `{name}` | {model.about} | {', '.join(f'`{kind}`' for kind in model.kinds)} |"
        for name, model in SMALL_MODELS.items()
    ]
    assert [row for row in rows if row not in text] == []

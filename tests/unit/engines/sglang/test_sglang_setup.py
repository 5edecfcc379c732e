"""SGLang behind the engine seam: command lines, environments and what is refused before anything is started."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvbaton.config import CLUSTER_KEY_VARIABLE, HandoffSettings, Limits
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import CommandRequest, Controls, EngineOptions
from kvbaton.engines.embedded.weights import load_model
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE, parse_settings
from kvbaton.engines.sglang.setup.environment import SGLANG_VERSION, SglangEnvironment, ensure_sglang
from kvbaton.engines.sglang.setup.plugin import SglangPlugin
from kvbaton.engines.sglang.setup.servers import SglangServers
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker


def servers(options: EngineOptions) -> SglangServers:
    return SglangServers(SglangEnvironment(Path("/nowhere")), Path("/model"), options)


def test_the_line_of_an_instance_can_be_run_and_its_settings_read() -> None:
    request = CommandRequest(
        "prefill", "/m", "127.0.0.1", 30000, 8998, 9000, ("127.0.0.1:8001",), limits=Limits(transfer_timeout=20.0)
    )
    variable, *line = shlex.split(SglangPlugin().command_line(request))
    name, _, value = variable.partition("=")
    settings = parse_settings(value)
    assert name == CONFIG_VARIABLE
    assert (settings.handoffs_port, settings.routers) == (9000, ("127.0.0.1:8001",))
    assert settings.agents("127.0.0.1", 1).limits.transfer_timeout == 20.0
    assert line[line.index("--disaggregation-bootstrap-port") + 1] == "8998"
    assert line[line.index("--disaggregation-transfer-backend") + 1] == "kvbaton"


def test_a_plain_instance_has_no_line() -> None:
    with pytest.raises(ConfigError, match="--role both"):
        SglangPlugin().command_line(CommandRequest("both", "/m", "127.0.0.1", 1, 2, 0))


def test_the_bootstrap_port_of_a_prefill_instance_is_its_control_port() -> None:
    options = EngineOptions("m", handoff=HandoffSettings(mode=Mode.PULL), controls=Controls(poison=True), model_id="one")
    part = servers(options).part("p", "prefill", PortPicker(), ["127.0.0.1:8001"])
    command = list(part.command)
    settings = json.loads(part.environment[CONFIG_VARIABLE])
    port = command[command.index("--disaggregation-bootstrap-port") + 1]
    assert f"handshake:{port}" in part.control_address
    assert (settings["mode"], settings["poison"], settings["fingerprint"]) == ("pull", True, "one")
    assert part.environment[CLUSTER_KEY_VARIABLE] == options.cluster_key
    assert options.cluster_key not in " ".join(command)


def test_ranks_share_the_cores_and_are_bound_to_them() -> None:
    part = servers(EngineOptions("m", shape="tp2")).part("d", "decode", PortPicker())
    assert part.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "--tp-size" in part.command


def test_a_plain_server_has_no_backend() -> None:
    part = servers(EngineOptions("m")).part("s", "both", PortPicker())
    assert not [word for word in part.command if word.startswith("--disaggregation")]
    assert CONFIG_VARIABLE not in part.environment


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ("dp2", "tp1", "prefill is dp2"),
        ("cp2", "tp1", "prefill is cp2"),
        ("tp1", "dp2,tp2", "decode is dp2,tp2"),
    ],
)
def test_cuts_that_cannot_be_handed_over_are_refused_by_name(prefill: str, decode: str, named: str) -> None:
    sides = [EngineOptions("smollm2", shape=shape) for shape in (prefill, decode)]
    with pytest.raises(ConfigError, match=f"the shape of {named}; instances of SGLang can be cut by tp and pp so far"):
        SglangPlugin().check(sides[0], sides[1], lambda _: None)


def test_prompts_have_tokens_that_the_model_has() -> None:
    options = EngineOptions("tiny")
    facts = SglangPlugin().check(options, options, lambda _: None)
    assert 0 < facts.token_ids.start < facts.token_ids.stop < load_model("tiny").config.vocab_size


def test_the_mori_backend_only_pushes() -> None:
    options = EngineOptions("smollm2", connector="mori", handoff=HandoffSettings(mode=Mode.PULL))
    with pytest.raises(ConfigError, match="--mode is pull; SGLang's own mori only pushes"):
        SglangPlugin().check(options, options, lambda _: None)


def test_the_environment_names_this_kvbaton_and_its_entry_point(tmp_path: Path) -> None:
    installed = SglangEnvironment.named(tmp_path, f"sglang-{SGLANG_VERSION}").directory
    installed.mkdir()
    (installed / "installed-to-serve").touch()
    made = ensure_sglang(tmp_path, print)
    points = next(made.kvbaton_path.glob("kvbaton-*.dist-info")) / "entry_points.txt"
    assert "kvbaton = kvbaton.engines.sglang:register" in points.read_text()
    assert (made.kvbaton_path / "kvbaton" / "engines" / "sglang" / "cpu_build.py").exists()
    assert made.variables()["PYTHONPATH"] == str(made.kvbaton_path)

"""What kvbaton asks of Ray, as far as it needs no Ray: settings of replicas, and how many of them a load needs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.core.handoff import Mode
from kvbaton.deploy.ray import RaySettings, ReplicaSettings, application, register_connector, replicas_for_load
from kvbaton.engines.table import find_engine
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"least": 0}, "least is 0; it must be at least 1"),
        ({"least": 3, "most": 2}, "most is 2, below least, which is 3"),
        ({"in_flight": 0}, "in_flight is 0; it must be above 0"),
    ],
)
def test_numbers_of_replicas_that_cannot_serve_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicaSettings(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "tiny"}, "options has 'modle', which engines do not have"),
        ({"handoff": {"mode": "sideways"}}, "options of the engine: Invalid enum value 'sideways'"),
        ({"sharing": "two"}, "options of the engine: Expected `int`, got `str`"),
    ],
)
def test_options_that_no_engine_has_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings(options=options).engine_options(ReplicaSettings(), "10.0.0.5", "key")


def test_no_time_to_drain_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="drain_timeout_s is 0; it must be above 0"):
        RaySettings(drain_timeout_s=0)


def test_one_side_may_have_options_of_its_own() -> None:
    settings = RaySettings("tiny", options={"handoff": {"mode": "pull"}, "sharing": 4})
    found = settings.engine_options(ReplicaSettings(engine={"sharing": 2}), "10.0.0.5", "key")
    assert (found.model, found.host, found.transport, found.sharing, found.handoff.mode) == (
        "tiny", "10.0.0.5", "tcp", 2, Mode.PULL,
    )  # fmt: skip


def test_an_engine_that_is_started_on_loopback_only_is_refused() -> None:
    options = RaySettings("tiny").engine_options(ReplicaSettings(), "10.0.0.5", "key")
    with pytest.raises(ConfigError, match=r"host is 10\.0\.0\.5; SGLang is started on 127\.0\.0\.1 only"):
        find_engine("sglang").check_support(options)


def test_an_instance_listens_on_the_host_that_its_options_name() -> None:
    options = RaySettings("tiny").engine_options(ReplicaSettings(), "fd00::5", "key")
    part = find_engine("embedded").prepare(options, print).part("prefill", "prefill", PortPicker(), ["[fd00::1]:8001"])
    assert part.base_url.startswith("http://[fd00::5]:")
    assert part.command[part.command.index("--host") + 1] == "fd00::5"


def test_a_fixed_number_of_replicas_is_not_scaled() -> None:
    placed = {"max_replicas_per_node": 1}
    assert ReplicaSettings(least=2, serve=placed).options() == {"num_replicas": 2, **placed}
    scaled = ReplicaSettings(least=2, most=5, in_flight=3, autoscaling={"upscale_delay_s": 1}).options()["autoscaling_config"]
    assert scaled == {
        "min_replicas": 2,
        "max_replicas": 5,
        "target_ongoing_requests": 3,
        "policy": {"policy_function": replicas_for_load},
        "upscale_delay_s": 1,
    }


@pytest.mark.parametrize(
    ("reported", "wanted"), [({}, 0), ({"in_flight": {"a": 5.0, "b": 4.0}}, 3), ({"in_flight": {"a": 0.0}}, 0)]
)
def test_replicas_follow_the_requests_at_all_of_them(reported: dict[str, Any], wanted: float) -> None:
    context = SimpleNamespace(aggregated_metrics=reported, config=SimpleNamespace(target_ongoing_requests=3))
    assert replicas_for_load(context) == (wanted, {})


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"kvbaton\[ray\]"):
        application(RaySettings())
    with pytest.raises(ConfigError, match=r"ray\[llm\]"):
        register_connector()


def test_each_engine_states_how_its_instances_are_given_time_to_drain() -> None:
    assert find_engine("embedded").drain_arguments(7.5) == ("--drain-timeout-s", "7.5")
    assert find_engine("vllm").drain_arguments(7.5) == ()

"""Manifests for Kubernetes: valid by its published schemas, and every setting in them one that kvbaton takes."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kustomized import render

from kvbaton.cli.main import make_app
from kvbaton.config import TLS_DIR_VARIABLE
from kvbaton.core.handoff import Mode
from kvbaton.engines.embedded.settings import InstanceOptions
from kvbaton.engines.vllm.nixl_settings import HOST_VARIABLE, PORT_VARIABLE, parse_nixl_settings
from kvbaton.engines.vllm.settings import parse_settings
from kvbaton.router.settings import RouterSettings

_ROOT = Path(__file__).parents[3]
_KUBERNETES = _ROOT / "deploy" / "kubernetes"
_OVERLAYS = [_KUBERNETES / "base", *sorted((_KUBERNETES / "overlays").iterdir())]
_POD_IP = "10.1.2.3"
_VERSION = "1.33"
"""Of Kubernetes."""
_CUSTOM = {"InferencePool"}

overlays = pytest.mark.parametrize("overlay", _OVERLAYS, ids=[path.name for path in _OVERLAYS])


@functools.cache
def rendered(overlay: Path) -> list[dict[str, Any]]:
    return render(overlay)


def of_kind(overlay: Path, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in rendered(overlay) if each["kind"] == kind}


def pods(overlay: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, deployment in of_kind(overlay, "Deployment").items():
        yield name, deployment["spec"]["template"]["spec"]


def containers(overlay: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods(overlay):
        for container in pod["containers"]:
            yield name, container


def arguments(container: dict[str, Any]) -> list[str]:
    """What the kubelet runs: with variables of the pod in place."""
    return [each.replace("$(POD_IP)", _POD_IP) for each in container["args"]]


def transfer_config(container: dict[str, Any]) -> dict[str, Any]:
    given = arguments(container)
    config: dict[str, Any] = json.loads(given[given.index("--kv-transfer-config") + 1])
    return config


def test_every_manifest_is_valid_by_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    found = {json.dumps(each, sort_keys=True): each for overlay in _OVERLAYS for each in rendered(overlay)}
    kinds = [each["kind"] for each in found.values() if each["kind"] not in _CUSTOM]
    assert {"Deployment", "Service"} == set(kinds)
    for manifest in found.values():
        if manifest["kind"] not in _CUSTOM:
            validate(manifest, _VERSION, strict=True)


@overlays
@pytest.mark.skipif(not shutil.which("kustomize"), reason="no kustomize here; on Debian 13: apt-get install kustomize")
def test_kustomize_renders_the_same(overlay: Path) -> None:
    done = subprocess.run(["kustomize", "build", str(overlay)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    found = list(yaml.safe_load_all(done.stdout))

    def by_name(manifests: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(each["kind"], each["metadata"]["name"]): each for each in manifests}

    assert by_name(found) == by_name(rendered(overlay))


def test_the_schemas_notice_a_mistake() -> None:
    library = pytest.importorskip("kubernetes_validate")
    deployment = copy.deepcopy(of_kind(_KUBERNETES / "base", "Deployment")["kvbaton-prefill"])
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(library.ValidationError):
        library.validate(deployment, _VERSION, strict=True)


@overlays
def test_every_command_of_kvbaton_is_one_that_it_takes(overlay: Path) -> None:
    app = make_app()
    for _, container in containers(overlay):
        if container.get("command") == ["kvbaton"]:
            command, bound, *_ = app.parse_args(arguments(container), print_error=False, exit_on_error=False)
            assert command.__name__ == container["args"][0]
            group = "options" if command.__name__ == "router" else "instance"
            assert bound.arguments[group].host == "0.0.0.0"  # noqa: S104


def test_a_command_with_a_wrong_option_is_noticed() -> None:
    import cyclopts

    with pytest.raises(cyclopts.CycloptsError):
        make_app().parse_args(["serve", "--rol=prefill"], print_error=False, exit_on_error=False)


def test_the_connector_takes_the_settings_of_the_overlay_for_vllm() -> None:
    found = dict(containers(_KUBERNETES / "overlays" / "vllm"))
    for name, role in (("kvbaton-prefill", "kv_producer"), ("kvbaton-decode", "kv_consumer")):
        config = transfer_config(found[name])
        assert (config["kv_connector"], config["kv_role"]) == ("KVBatonConnector", role)
        settings = parse_settings(config["kv_connector_extra_config"])
        assert (settings.control_host, settings.http_address) == (_POD_IP, f"{_POD_IP}:8100")
        assert settings.routers == ("kvbaton-discovery:8001",)


def test_the_alias_takes_the_settings_of_the_overlay_for_llm_d() -> None:
    overlay = _KUBERNETES / "overlays" / "llm-d"
    assert of_kind(overlay, "Service") == {}
    assert sorted(of_kind(overlay, "Deployment")) == ["kvbaton-decode", "kvbaton-prefill"]
    for name, container in containers(overlay):
        if container["name"] != "engine":
            continue
        config = transfer_config(container)
        assert config["kv_connector"] == "NixlConnector"
        variables = {each["name"]: each.get("value", _POD_IP) for each in container["env"]}
        settings = parse_nixl_settings(
            config["kv_connector_extra_config"], {key: variables[key] for key in (HOST_VARIABLE, PORT_VARIABLE)}
        )
        assert (settings.control_host, settings.control_port, settings.mode) == (_POD_IP, 8101, Mode.PULL)
        labels = of_kind(overlay, "Deployment")[name]["spec"]["template"]["metadata"]["labels"]
        assert labels["llm-d.ai/role"] == name.removeprefix("kvbaton-")
    sidecars = [name for name, container in containers(overlay) if container["name"] == "routing-proxy"]
    assert sidecars == ["kvbaton-decode"]


def test_the_pool_selects_the_pods_of_the_overlay() -> None:
    overlay = _KUBERNETES / "overlays" / "inference-pool"
    (pool,) = of_kind(overlay, "InferencePool").values()
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    selector = pool["spec"]["selector"]["matchLabels"].items()
    for deployment in of_kind(overlay, "Deployment").values():
        assert selector <= deployment["spec"]["template"]["metadata"]["labels"].items()
    ports = [port["containerPort"] for _, container in containers(overlay) for port in container["ports"]]
    assert all(port["number"] in ports for port in pool["spec"]["targetPorts"])


@overlays
def test_selectors_and_ports_fit(overlay: Path) -> None:
    deployments = of_kind(overlay, "Deployment").values()
    for deployment in deployments:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for service in of_kind(overlay, "Service").values():
        selected = [
            each["spec"]["template"]["spec"]
            for each in deployments
            if service["spec"]["selector"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert len(selected) == 1
        names = {port["name"] for container in selected[0]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@overlays
def test_instances_can_register_before_the_router_is_ready(overlay: Path) -> None:
    services = of_kind(overlay, "Service")
    if services:
        assert services["kvbaton-discovery"]["spec"]["publishNotReadyAddresses"] is True
        assert "publishNotReadyAddresses" not in services["kvbaton-router"]["spec"]


@overlays
def test_a_pod_has_time_to_drain_and_no_more_rights_than_it_needs(overlay: Path) -> None:
    for name, pod in pods(overlay):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            sleeps = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in container else 0
            given = [each.partition("=")[2] for each in container.get("args", ()) if each.startswith("--drain-timeout-s=")]
            drain_s = RouterSettings().drain_timeout_s if name == "kvbaton-router" else InstanceOptions().drain_timeout_s
            assert pod["terminationGracePeriodSeconds"] > sleeps + float(*given or [drain_s])
            mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}


@overlays
def test_no_key_is_in_the_repository(overlay: Path) -> None:
    assert of_kind(overlay, "Secret") == {}
    named = [v["secret"]["secretName"] for _, pod in pods(overlay) for v in pod["volumes"] if "secret" in v]
    encrypted = {"kvbaton-tls"} if overlay.name == "encrypted" else set()
    assert set(named) == {"kvbaton-cluster-key"} | encrypted


def test_every_pod_of_the_encrypted_overlay_has_the_certificates_and_no_probe_without_one() -> None:
    overlay = _KUBERNETES / "overlays" / "encrypted"
    found = dict(pods(overlay))
    assert set(found) == {"kvbaton-router", "kvbaton-prefill", "kvbaton-decode"}
    for name, pod in found.items():
        (container,) = pod["containers"]
        folder = {each["name"]: each.get("value") for each in container["env"]}[TLS_DIR_VARIABLE]
        (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == folder]
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        assert "items" not in volume["secret"]
        assert "subPath" not in mount, "a file that is mounted alone does not follow its secret"
        probes = [probe for field, probe in container.items() if field.endswith("Probe")]
        assert name == "kvbaton-router" or all("httpGet" not in probe for probe in probes)


def test_images_are_those_of_the_container_file() -> None:
    text = (_ROOT / "deploy" / "Containerfile").read_text()
    built = set(re.findall(r"-t (kvbaton\S*)", text))
    used = {c["image"] for overlay in _OVERLAYS for _, c in containers(overlay) if c["image"].startswith("kvbaton")}
    assert used == built
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    assert all((_ROOT / path).exists() for line in copied for path in line.split())

"""Renders the part of kustomize that our overlays use: resources, patches by strategic merge, labels. Refuses everything else.

kustomize itself is in no package registry that Python or Node installs from. This follows its documentation, for what is used;
where a kustomize is installed, a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

__all__ = ["render"]

Manifest = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "resources", "patches", "labels"}
_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath", "ports": "containerPort"}
"""By which field the items of a list are merged; other lists are replaced."""
_PATCH = "$patch"


def render(directory: Path) -> list[Manifest]:
    """Every manifest of an overlay, in order."""
    (kustomization,) = _documents(directory / "kustomization.yaml")
    unknown = kustomization.keys() - _KNOWN
    assert not unknown, f"{directory}: this renderer does not know {sorted(unknown)}"
    found: list[Manifest] = []
    for resource in kustomization["resources"]:
        path = directory / resource
        found += render(path) if path.is_dir() else _documents(path)
    for patch in kustomization.get("patches", ()):
        assert patch.keys() == {"path"}, "only patches in files of their own"
        documents = _documents(directory / patch["path"])
        assert len(documents) == 1 or all(_PATCH not in each for each in documents), "kustomize crashes over several deletions"
        for document in documents:
            found = _patched(found, document)
    for label in kustomization.get("labels", ()):
        assert label.keys() == {"pairs", "includeTemplates"}
        for manifest in found:
            _add_labels(manifest, label["pairs"], label["includeTemplates"])
    return found


def _documents(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def _identity(manifest: Manifest) -> tuple[str, str, str]:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


def _patched(found: list[Manifest], patch: Manifest) -> list[Manifest]:
    at = [_identity(each) for each in found].index(_identity(patch))
    if patch.get(_PATCH) == "delete":
        return found[:at] + found[at + 1 :]
    return [*found[:at], _merged(found[at], patch), *found[at + 1 :]]


def _merged(base: Any, patch: Any, field: str = "") -> Any:
    if isinstance(base, dict) and isinstance(patch, dict):
        both = {**base, **{name: _merged(base[name], value, name) if name in base else value for name, value in patch.items()}}
        return {name: value for name, value in both.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and field in _KEYS:
        return _merged_items(base, patch, _KEYS[field])
    return patch


def _merged_items(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    """In kustomize's order: the items of the patch as it has them, then the others."""
    others = {item[key]: item for item in base}
    mine = [_merged(others.pop(item[key]), item) if item[key] in others else item for item in patch]
    return mine + list(others.values())


def _add_labels(manifest: Manifest, pairs: dict[str, str], in_templates: bool) -> None:
    manifest["metadata"].setdefault("labels", {}).update(pairs)
    template = manifest.get("spec", {}).get("template")
    if in_templates and template is not None:
        template["metadata"].setdefault("labels", {}).update(pairs)

"""What one layer repeats of another, because it must not import it, is held together here."""

from __future__ import annotations

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import asdict

import pytest

import kvbaton
from kvbaton.cli.router import router
from kvbaton.cli.serve import serve
from kvbaton.discovery.messages import TransferMode
from kvbaton.engines.embedded import instance
from kvbaton.engines.embedded.settings import InstanceOptions
from kvbaton.router.settings import RouterOptions, RouterSettings
from kvbaton.transport.table import transport_names


def _modules() -> Iterator[str]:
    return (module.name for module in pkgutil.walk_packages(kvbaton.__path__, "kvbaton.") if not module.ispkg)


def test_the_command_line_offers_exactly_the_transports_there_are() -> None:
    offered = typing.get_type_hints(serve)["transport"]
    assert set(typing.get_args(offered)) == set(transport_names())


def test_the_command_line_offers_exactly_the_roles_there_are() -> None:
    offered = typing.get_type_hints(InstanceOptions)["role"]
    assert set(typing.get_args(offered)) == set(typing.get_args(instance.Role))


def test_router_offers_exactly_the_modes_there_are() -> None:
    offered = typing.get_args(typing.get_type_hints(router)["transfer_mode"])
    assert set(offered) == {*TransferMode, "auto", "first"}


def test_defaults_of_router_are_those_of_its_settings() -> None:
    settings = RouterSettings()
    for name, default in asdict(RouterOptions()).items():
        assert default == getattr(settings, name), name


@pytest.mark.parametrize("name", sorted(_modules()))
def test_every_module_says_what_it_is_for_and_what_is_public(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "torch", "triton", "vllm", "sglang"):
            raise
        pytest.skip(f"needs {error.name}, which is not installed here")
    assert module.__doc__
    public = module.__all__
    assert len(set(public)) == len(public)
    for item in public:
        assert hasattr(module, item), f"{name}.__all__ names {item}, which does not exist"

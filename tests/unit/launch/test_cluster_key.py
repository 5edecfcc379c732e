"""The cluster key of a local set-up: the same for all its instances, another one each time, and never on a command line."""

from __future__ import annotations

from dataclasses import replace

from kvbaton.config import CLUSTER_KEY_VARIABLE, parse_trust
from kvbaton.engines.base import EngineOptions, pair_parts
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.launch.fleet import FleetPart
from kvbaton.launch.local import router_part
from kvbaton.launch.ports import PortPicker


def _options() -> EngineOptions:
    return EngineOptions("tiny", "local", 3)


def _parts(options: EngineOptions, count: int = 1) -> list[FleetPart]:
    side = EmbeddedServers(options)
    return pair_parts(side, side, (count, count), PortPicker(), 12000)


def test_all_parts_of_a_set_up_get_the_same_key() -> None:
    options = _options()
    keys = {part.environment[CLUSTER_KEY_VARIABLE] for part in _parts(options, 2)}
    assert keys == {options.cluster_key}
    router = router_part("127.0.0.1", 11000, 11001, cluster_key=options.cluster_key)
    assert router.environment[CLUSTER_KEY_VARIABLE] == options.cluster_key
    assert options.cluster_key not in repr(router)
    assert not [argument for argument in router.command if options.cluster_key in argument]


def test_every_set_up_gets_a_key_of_its_own_that_instances_accept() -> None:
    keys = {_options().cluster_key for _ in range(20)}
    assert len(keys) == 20
    for key in keys:
        assert parse_trust(None, {CLUSTER_KEY_VARIABLE: key}).key == key.encode()


def test_a_given_key_is_kept() -> None:
    options = replace(_options(), cluster_key="a key that was chosen by hand")
    for part in _parts(options):
        assert part.environment[CLUSTER_KEY_VARIABLE] == "a key that was chosen by hand"


def test_no_command_line_and_no_text_shows_the_key() -> None:
    options = _options()
    assert options.cluster_key not in repr(options)
    for part in _parts(options):
        assert not [argument for argument in part.command if options.cluster_key in argument]
        assert options.cluster_key not in repr(part)

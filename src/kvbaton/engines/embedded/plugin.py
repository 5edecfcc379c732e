"""The embedded engine behind the engine seam: each instance is a `kvbaton serve` process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.card import Card, RankCard, check_compatible
from kvbaton.core.handoff import Incarnation
from kvbaton.core.topology import Shape
from kvbaton.engines.base import (
    CommandRequest,
    EngineOptions,
    EnginePlugin,
    ModelFacts,
    PreparedEngine,
    Progress,
    Support,
)
from kvbaton.engines.embedded.models import find_model
from kvbaton.engines.embedded.seams import EngineModel
from kvbaton.engines.embedded.shaped.blueprint import Cut, check_cut
from kvbaton.engines.embedded.shaped.drops import check_drop, check_has, check_lacks
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES, ShapedCache
from kvbaton.engines.embedded.shaped.model import LoadedShaped, load_shaped
from kvbaton.engines.instance import ModelIdentity, instance_card
from kvbaton.errors import ConfigError
from kvbaton.launch.fleet import FleetPart, core_share
from kvbaton.launch.local import kvbaton_command
from kvbaton.launch.ports import PortPicker

__all__ = ["EmbeddedPlugin", "EmbeddedServers", "check_fit"]


class EmbeddedPlugin(EnginePlugin):
    """The engine of this package. Nothing is installed for it."""

    name = "embedded"
    title = "the embedded engine"
    support = Support(
        controls=("drop_writes", "drop", "lacks"), crosses=True, shapes=True, hosts=True, cache_dtypes=CACHE_DTYPES
    )
    reports_handover = True

    def drain_arguments(self, timeout_s: float) -> tuple[str, ...]:
        """Its own option."""
        return ("--drain-timeout-s", str(timeout_s))

    def check(self, prefill: EngineOptions, decode: EngineOptions, progress: Progress) -> ModelFacts:
        """Models that cannot be cut as asked, sides that do not fit, controls that would leave out nothing."""
        check_drop(prefill.controls.drop)
        check_lacks(decode.controls.lacks)
        loaded = find_model(prefill.model, progress=progress)
        if isinstance(loaded, LoadedShaped):
            _check_shaped(loaded, prefill, decode)
        else:
            _check_whole(prefill, decode)
        _check_lacks_something(loaded, decode)
        return ModelFacts(loaded.name, loaded.config.context_tokens, loaded.tokenizer.encode)

    def prepare(self, options: EngineOptions, progress: Progress) -> EmbeddedServers:
        """Nothing has to be done."""
        del progress
        return EmbeddedServers(options)

    def command_line(self, request: CommandRequest) -> str:
        """Instances of this engine have a command of their own."""
        raise ConfigError(
            f"engine {self.name} is started with `kvbaton serve --role {request.role}`; see `kvbaton serve --help`"
        )


@dataclass(frozen=True, slots=True)
class EmbeddedServers(PreparedEngine):
    """Instances of the embedded engine with the same options."""

    options: EngineOptions

    def part(self, name: str, role: str, ports: PortPicker, routers: Sequence[str] = ()) -> FleetPart:
        """One instance on free ports."""
        options, host = self.options, self.options.host
        port, control_port = ports.pick(), ports.pick()
        command = kvbaton_command("serve", "--role", role, "--model", options.model, "--host", host)
        command += ["--port", str(port), "--control-port", str(control_port), "--transport", options.transport]
        for router in routers:
            command += ["--router", router]
        for setting, value in asdict(options.handoff).items():
            option = f"--{setting.replace('_', '-')}"
            command += [option] * value if isinstance(value, bool) else [option, str(value)]
        command += [*_serve_arguments(options), *options.arguments]
        url = f"{options.scheme}://{in_url(host)}:{port}"
        environment = core_share(options.sharing) | options.trust_variables()
        return FleetPart(
            name,
            command,
            f"{url}/health",
            environment,
            base_url=url,
            control_address=str(ControlAddress.of(host, control_port)),
            handoffs_address=f"{in_url(host)}:{port}",
            tls_dir=options.tls_dir,
        )


def _serve_arguments(options: EngineOptions) -> list[str]:
    """What differs from the defaults of `kvbaton serve`."""
    controls = options.controls
    arguments = ["--poison"] * controls.poison + ["--drop-writes"] * controls.drop_writes
    for option, value, default in (
        ("--drop", controls.drop, ""),
        ("--lacks", controls.lacks, ""),
        ("--model-id", options.model_id, ""),
        ("--cache-dtype", options.cache_dtype, CACHE_DTYPES[0]),
        ("--shape", options.shape, str(Shape())),
        ("--blocks", options.cache_blocks, None),
        ("--step-tokens", options.step_tokens, None),
    ):
        arguments += [option, str(value)] if value != default else []
    return arguments


def _check_shaped(loaded: LoadedShaped, prefill: EngineOptions, decode: EngineOptions) -> None:
    shapes = Shape.parse(prefill.shape), Shape.parse(decode.shape)
    for shape in shapes:
        check_cut(loaded.blueprint, shape)
    check_has(loaded.blueprint, prefill.controls.drop)
    if decode.model != prefill.model:
        check_fit(loaded, shapes[0], load_shaped(decode.model), shapes[1])


def _check_whole(prefill: EngineOptions, decode: EngineOptions) -> None:
    """A model from files has one shape, one type of cache, and is moved whole."""
    sides = (prefill, decode)
    is_changed = decode.model != prefill.model or any(side.cache_dtype != CACHE_DTYPES[0] for side in sides)
    if is_changed or any(Shape.parse(side.shape) != Shape() for side in sides):
        raise ConfigError(f"model {prefill.model} has one shape and one type of cache; use a small model such as tiny-gqa8")
    if prefill.controls.drop not in ("", "all"):
        raise ConfigError(
            f"--drop {prefill.controls.drop}: of {prefill.model} only all can be left out; use a small model such as tiny-gqa8"
        )


def _check_lacks_something(loaded: EngineModel, decode: EngineOptions) -> None:
    """A control that would leave out nothing would prove nothing."""
    what, _, number = decode.controls.lacks.partition(":")
    most = {"layer": loaded.config.layers, "rank": Shape.parse(decode.shape).ranks}.get(what, 0)
    if number and int(number) >= most:
        raise ConfigError(f"--decode-lacks {decode.controls.lacks}: there are {what}s 0 to {most - 1}; name one of them")


def check_fit(source: LoadedShaped, source_shape: Shape, target: LoadedShaped, target_shape: Shape) -> None:
    """Make the check of a handshake before anything is started.

    Raises ConfigError for a model that cannot be cut so, Incompatible with both values for two that do not fit.
    """
    for loaded, shape in ((source, source_shape), (target, target_shape)):
        check_cut(loaded.blueprint, shape)
    theirs, ours = _card(source, source_shape), _card(target, target_shape)
    check_compatible(theirs, ours, ours=ours)


def _card(loaded: LoadedShaped, shape: Shape) -> Card:
    cuts = [Cut(at.pp, shape.pp, at.tp, shape.tp) for at in shape.all()]
    layouts = [ShapedCache(loaded.blueprint, blocks=1, block_tokens=16, cut=cut).layout() for cut in cuts]
    model = ModelIdentity(loaded.name, loaded.fingerprint)
    ranks = [RankCard(number, layout, ()) for number, layout in enumerate(layouts)]
    return instance_card(Incarnation(""), model, Limits(), ranks, shape)

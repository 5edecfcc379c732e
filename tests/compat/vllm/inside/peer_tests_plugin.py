"""A plugin of pytest that puts our connector where vLLM's own tests have another one; it runs in vLLM's environment.

The tests stay as vLLM ships them. What is replaced round them: the connector that a configuration names; the model, by one that
is there; in requests, what only NIXL needs, by a transfer id; in answers, the blocks that NIXL lists there, by those that ours
offers to its worker; and in metadata, what NIXL is to receive, by what ours is to pull. Where a test puts a mock in the place
of the connector, the mock stands before ours, and its requests are ones whose cache comes from a source: what the test scripts
is scripted, every other call reaches ours. Which ranks of a remote engine are read from (`TransferTopology`) is answered by our
`assign_legs`, and the connector that a file defines to receive the handshakes of two stages is replaced by ours.

Each test notes in the JUnit file how many of our connectors it made, and how many of their hooks were called. Environment:
KVBATON_PEER_MODEL is the directory of a model, KVBATON_PEER_MODE push or pull, KVBATON_PEER_PLANT a mistake to make, or empty.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector import utils as kv_utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation
from kvbaton.core.layout import HeadRange, Layout
from kvbaton.core.legs import assign_legs
from kvbaton.core.tensors import dense_tensor, split_layers, tensor_group
from kvbaton.core.topology import head_range
from kvbaton.engines.vllm.connector import KVBatonConnector, _Handshake, _Metadata
from kvbaton.engines.vllm.orders import SourceOffers, StepOrders, TargetAllocates
from kvbaton.engines.vllm.requests import HandoffInfo

__all__ = ["ReplacedConnector"]

_MODEL = os.environ["KVBATON_PEER_MODEL"]
_MODE = os.environ["KVBATON_PEER_MODE"]
_PLANT = os.environ["KVBATON_PEER_PLANT"]

_INFO = HandoffInfo(ControlAddress.of("127.0.0.1", 7001), Incarnation("p1"))
_REPLACED = {"test_hma_auto_config.py": "SimpleCPUOffloadConnector", "test_multi_connector.py": "MockHMAConnector"}
"""Which connector ours stands for, where it is not NIXL's."""
_SCRIPTED = frozenset(
    f"test_{name}.py"
    for name in ("error_propagation", "invalid_blocks_correctness", "cache_pollution_prevention", "kv_load_failure_recovery")
)
"""Files that put a mock in the place of the connector."""
_UTILS = "tests.v1.kv_connector.unit.utils"
_THEIR_TOPOLOGY = kv_utils.TransferTopology


@dataclass
class _Watch:
    """What the test that runs, or the file that is read, has done with our connector."""

    file: str = ""
    named: int = 0
    calls: int = 0
    made: list[Any] = field(default_factory=list)

    def begin(self, file: str) -> None:
        self.file, self.named, self.calls, self.made = file, 0, 0, []


_watch = _Watch()


class ReplacedConnector(KVBatonConnector):
    """Ours, introduced to a worker at once; its answers list the blocks that it offers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, _with_a_group(kv_cache_config))
        _watch.made.append(self)
        if role is KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            sizes = range(parallel.pipeline_parallel_size), range(parallel.tensor_parallel_size)
            self.set_xfer_handshake_metadata_pp_aware({at: _Handshake(_INFO) for at in itertools.product(*sizes)})

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (0, False) if _PLANT == "loads_nothing" else tokens

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        is_kept, answer = super().request_finished_all_groups(request, block_ids)
        orders = self._half._orders
        if answer is not None and orders and isinstance(orders[-1], SourceOffers):
            answer["remote_block_ids"] = [list(ids) for ids in orders[-1].offer.blocks]
        return is_kept and _PLANT != "frees_at_once", answer


def _counted(name: str) -> Callable[..., Any]:
    hook = getattr(ReplacedConnector, name)

    @functools.wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        _watch.calls += 1
        return hook(*arguments, **named)

    return call


for _name, _hook in list(vars(KVBatonConnector).items()):
    if isinstance(_hook, FunctionType) and not _name.startswith("_"):
        setattr(ReplacedConnector, _name, _counted(_name))


def _with_a_group(config: Any) -> Any:
    """A cache of one group of layers where a test has none at all."""
    if config.kv_cache_groups:
        return config
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


# What is replaced.


def _replace_configured() -> None:
    """Let every configuration that names the replaced connector name ours, in either role; keys of another's are dropped."""
    validate = KVTransferConfig.__post_init__

    def post_init(self: Any) -> None:
        if self.kv_connector == _REPLACED.get(_watch.file, "NixlConnector") and _PLANT != "is_not_there":
            _name_ours(self)
        validate(self)

    KVTransferConfig.__post_init__ = post_init
    find = KVConnectorFactory.get_connector_class.__func__

    def get_connector_class(cls: type, config: Any) -> Any:
        found = find(cls, config)
        _watch.named += found is ReplacedConnector
        return found

    KVConnectorFactory.get_connector_class = classmethod(get_connector_class)


def _name_ours(config: Any) -> None:
    config.kv_connector = ReplacedConnector.__name__
    config.kv_connector_module_path = __name__
    config.kv_role = "kv_both"
    config.kv_connector_extra_config = {"control_port": 7001, "mode": _MODE}


def _replace_example() -> None:
    """Let the recorder that vLLM puts round its example connector be put round ours."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    def make(config: Any, role: Any, kv_cache_config: Any) -> ReplacedConnector:
        config = copy.copy(config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        _name_ours(config.kv_transfer_config)
        return ReplacedConnector(config, role, kv_cache_config)

    sys.modules[_UTILS].ExampleConnector = make  # type: ignore[attr-defined]
    example_connector.ExampleConnectorMetadata = lambda: _Metadata(StepOrders())


def _replace_metadata() -> None:
    """Let our metadata be asked as NIXL's is: which requests are to receive, and into which blocks."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

    def reqs_to_recv(self: Any) -> dict[str, SimpleNamespace]:
        pulls = [order for order in self.orders.orders if isinstance(order, TargetAllocates)]
        return {each.request_id: SimpleNamespace(local_block_ids=each.allocation.blocks) for each in pulls}

    _Metadata.reqs_to_recv = property(reqs_to_recv)
    nixl.NixlConnectorMetadata = _Metadata


def _replace_helpers(utils: ModuleType) -> None:
    """Have vLLM's helpers make requests and configurations that suit ours."""
    make_config, make_request, is_empty = utils.create_vllm_config, utils.create_request, utils.assert_scheduler_empty

    def create_vllm_config(**fields: Any) -> Any:
        return make_config(**{"model": _MODEL, **fields})

    def create_request(*arguments: Any, **fields: Any) -> Any:
        if _watch.file in _SCRIPTED:
            fields["do_remote_prefill"] = True
        request = make_request(*arguments, **fields)
        params = request.kv_transfer_params or {}
        if "remote_request_id" in params:
            params["transfer_id"] = params["remote_request_id"]
        return request

    def assert_scheduler_empty(scheduler: Any) -> None:
        is_empty(scheduler)
        assert [each._half.live for each in _watch.made if each.role is KVConnectorRole.SCHEDULER and each._half.live] == []

    def create_mock_connector() -> Mock:
        mock = Mock(wraps=_watch.made[-1])
        mock.get_external_cache_hit_sources = _watch.made[-1].get_external_cache_hit_sources
        return mock

    vars(utils).update(
        create_vllm_config=create_vllm_config,
        create_request=create_request,
        assert_scheduler_empty=assert_scheduler_empty,
        create_mock_connector=create_mock_connector,
    )


class _OwnTopology:
    """Asked as vLLM asks its `TransferTopology`; which ranks of a peer one of our ranks reads from, our `assign_legs` answers.

    Ours keeps no table of remote stages: it reads the peer's card. What the test registers is kept here, and makes that card.
    """

    def __init__(self, **fields: Any) -> None:
        self._rank, self._heads = fields["tp_rank"], fields["total_num_kv_heads"]
        self._layouts = self._layouts_of(fields["tp_size"])
        self._engines: dict[tuple[str, int], Any] = {}
        _watch.made.append(self)

    def _layouts_of(self, tp_size: int) -> list[Layout]:
        return [_layout(head_range(self._heads, tp_size, rank), self._heads) for rank in range(tp_size)]

    def register_remote_engine(self, engine: str, info: Any) -> Any:
        return self._engines.setdefault((engine, info.remote_pp_rank), info)

    def get_engine_info(self, engine: str, pp_rank: int = 0) -> Any:
        return self._engines[engine, pp_rank]

    def target_remote_ranks(self, engine: str, pp_rank: int = 0) -> list[int]:
        _watch.calls += 1
        theirs = self._layouts_of(self._engines[engine, pp_rank].remote_tp_size)
        return [leg.source for leg in assign_legs(theirs, self._layouts).of_target(self._rank)]


def _layout(own: HeadRange, total_heads: int) -> Layout:
    cache = dense_tensor((1, 2, 1, 16, own.count, 4), "uint8", 1)
    axes = ("plane", "block", "token", "head", "channel")
    group = tensor_group("full", (0,), split_layers(cache), axes, heads=(own,), total_heads=total_heads)
    return Layout(group.end, (group,))


class _TwoStages(ReplacedConnector):
    """Ours in an instance of two stages, without arguments; it notes what the engine hands over."""

    legacy_metadata = None

    def __init__(self) -> None:
        config = sys.modules[_UTILS].create_vllm_config(kv_connector="NixlConnector")
        config.parallel_config.pipeline_parallel_size = 2
        empty = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
        super().__init__(config, KVConnectorRole.SCHEDULER, empty)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self.pp_aware_metadata = metadata


def _replace_in(module: ModuleType) -> None:
    """Put ours in the place of what a file defines itself."""
    if _watch.file == "test_handshake_pp_aggregation.py":
        vars(module).update(_PPAwareConnector=_TwoStages, _Metadata=lambda: _Handshake(_INFO))


# What pytest calls.


def pytest_configure(config: pytest.Config) -> None:
    """Replace everything before the first of vLLM's test files is read."""
    config.addinivalue_line("markers", "cpu_test: vLLM's own")
    if importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = MagicMock()
    utils = importlib.import_module(_UTILS)
    _replace_helpers(utils)
    _replace_configured()
    _replace_example()
    _replace_metadata()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Some configurations are made while a file is read."""
    if isinstance(collector, pytest.Module):
        _watch.begin(collector.path.name)
        is_sharded = _watch.file == "test_transfer_topology_sharded.py"
        kv_utils.TransferTopology = _OwnTopology if is_sharded else _THEIR_TOPOLOGY


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note what the test did with our connector."""
    yield
    counts = {"made": len(_watch.made), "calls": _watch.calls, "named": _watch.named}
    item.user_properties += [(f"kvbaton_{name}", count) for name, count in counts.items()]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fixtures make connectors too."""
    _watch.begin(item.path.name)
    if isinstance(item, pytest.Function):
        _replace_in(item.module)

"""vLLM's own unit tests of connectors, as vLLM ships them, with our connector in the place of the one they were written for.

They are not in vLLM's package: its source distribution is fetched by name and version, and kept beside vLLM's environment. What
is replaced round the tests is listed in `inside/peer_tests_plugin.py`. `RUN` lists what is run, `LEFT_OUT` why the rest is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from vllm_peer_tests import Case, PeerTests, peer_tests

from kvbaton.core.handoff import Mode

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(3600)]

RUN: dict[str, tuple[str, ...]] = {
    "test_remote_decode_lifecycle.py": (
        "test_basic_lifecycle",
        "test_short_prompt_lifecycle",
        "test_prefix_cache_lifecycle",
        "test_abort_during_kv_transfer",
    ),
    "test_remote_prefill_lifecycle.py": (
        "test_basic_lifecycle",
        "test_interleaved_lifecycle",
        "test_no_spurious_prefix_caching",
        "test_full_block_prompt",
        "test_cannot_schedule_after_recv",
        "test_cannot_recv",
        "test_kv_fetch_stages_cleared_on_abort",
        "test_async_load_reserves_blocks_for_inflight",
        "test_async_loads_both_admitted_when_pool_fits",
        "test_p_side_chunked_prefill_mamba",
        "test_async_load_reserves_blocks_for_promotion_margin",
        "test_async_load_does_not_double_reserve_mamba_spec_blocks",
        "test_deferred_lookup_does_not_block_parked_load",
    ),
    "test_error_propagation.py": ("test_error_propagation_sync_load", "test_error_propagation_async_load"),
    "test_invalid_blocks_correctness.py": (
        "test_sync_recompute_blocks_not_freed_for_running_requests",
        "test_sync_fail_invalid_blocks_evicted",
        "test_async_recompute_blocks_not_cached_when_invalid",
    ),
    "test_cache_pollution_prevention.py": ("test_invalid_blocks_evicted_prevents_cache_pollution",),
    "test_kv_load_failure_recovery.py": (
        "test_failed_receive_completion_honors_failure_policy",
        "test_async_load_failure",
        "test_sync_load_failure",
        "test_sync_load_failure_with_shared_blocks",
        "test_async_progressive_load_failure",
        "test_block_level_load_failure_fails_closed_with_multiple_groups",
    ),
    "test_kv_connector_lifecycle.py": ("test_kv_connector_mixin_clears_metadata",),
    "test_multi_connector.py": (
        "test_multi_connector_handle_preemptions_integration",
        "test_multi_connector_hma_support_detection",
        "test_divergent_local_hybrid_hit_capability_is_conservative",
    ),
    "test_hma_auto_config.py": (
        "test_hma_auto_config[hma_connector]",
        "test_hma_auto_config[multi_all_hma]",
        "test_hma_auto_config[multi_mixed]",
    ),
    "test_nixl_simple_cpu_offload.py": (
        "test_nixl_wins_load_over_cpu_offload",
        "test_cpu_offload_wins_when_nixl_has_no_match",
        "test_request_finished_no_async_save",
    ),
    "test_nixl_connector.py": (
        "test_basic_interface",
        "test_prompt_less_than_block_size",
        "test_prefill_exports_cached_tokens_in_kv_transfer_params",
    ),
    "test_bidirectional_kv_transfer.py": (
        "test_first_turn_no_remote_blocks",
        "test_abort_p_side_during_send",
        "test_p_node_finished_holds_blocks_for_d",
        "test_cache_miss_first_turn_no_remote_pull",
    ),
    "test_handshake_pp_aggregation.py": ("test_engine_passes_handshake_metadata_through_for_pp_aware_connector",),
    "test_transfer_topology_sharded.py": ("test_legacy_register_remote_engine_uses_pp_rank_zero",),
}
CASES = 60
"""What pytest makes of them, with all their parameters."""

ONLY_ASKED = frozenset(
    {
        "test_multi_connector.py::test_multi_connector_hma_support_detection",
        "test_multi_connector.py::test_divergent_local_hybrid_hit_capability_is_conservative",
        *(f"test_hma_auto_config.py::{name}" for name in RUN["test_hma_auto_config.py"]),
    }
)
"""They ask the class, or the object, what it supports, and call no hook."""

_LEGACY = "a connector without stages, which ours is not"
_MOCKS = "MultiConnector over nothing but mocks"
_STAGES = "the table that NIXL keeps of remote stages; ours reads the peer's card, which has all of them"
_STATS = "the statistics of NIXL by their names, or MultiConnector's without any connector"

LEFT_OUT: dict[str, str] = {
    "test_hma_auto_config.py::test_hma_auto_config[non_hma_connector]": "a connector of the other kind",
    "test_hma_auto_config.py::test_explicit_hma_with_non_hma_connector_errors_at_factory": "a connector of the other kind",
    "test_multi_connector.py::test_register_finished_partial_tail_notifies_every_connector": _MOCKS,
    "test_multi_connector.py::test_loaded_groups_follow_the_connector_serving_the_request": _MOCKS,
    "test_multi_connector.py::test_multi_connector_mem_pool_context_none": _MOCKS,
    "test_multi_connector.py::test_multi_connector_forwards_mem_pool_context": _MOCKS,
    "test_multi_connector.py::test_multi_connector_rejects_multiple_mem_pool_contexts": _MOCKS,
    "test_multi_connector.py::test_cache_hit_sources_delegate_to_selected_connector": _MOCKS,
    "test_multi_connector.py::test_multi_connector_worker_metadata": _MOCKS,
    "test_multi_connector.py::test_multi_connector_overrides_all_base_methods": "MultiConnector's own methods",
    "test_multi_connector.py::test_engine_id_conflict": "vLLM's configuration, without a connector",
    "test_multi_connector.py::test_multi_example_connector_consistency": "how two stores on disk are filled",
    "test_multi_connector.py::test_multi_connector_mixed_hma_disables_hybrid_kv_cache": "needs a GPU",
    "test_multi_connector.py::TestMultiConnectorStats": _STATS,
    "test_nixl_connector.py": "NIXL's handshake, descriptors, notifications, statistics and peers",
    "test_bidirectional_kv_transfer.py": "caches that go from decode to prefill, which ours does not do so far",
    "test_config.py": "vLLM's configuration of offloading; connectors are named there, and none is made",
    "test_output_aggregator.py": "how vLLM adds up what workers report, without a connector",
    "test_handshake_pp_aggregation.py::test_engine_unwraps_handshake_metadata_for_legacy_connector": _LEGACY,
    "test_handshake_pp_aggregation.py::test_engine_rejects_pp_producer_for_legacy_connector": _LEGACY,
    "test_scheduler_kv_connector_override.py": "a scheduler that a plugin changed, with a connector of its own",
    "test_tp_mapping.py": "how NIXL maps ranks",
    "test_transfer_topology_sharded.py::test_register_remote_engine_stores_pp_ranks_separately": _STAGES,
    "test_transfer_topology_sharded.py::test_engine_info_fields_have_backward_compatible_defaults": _STAGES,
    "test_transfer_topology_sharded.py::test_helpers_use_requested_pp_rank": "lists every replica of a head; ours reads one",
    "test_decode_bench_connector.py": "what a benchmark's connector fills a cache with",
    "test_example_connector.py": "how a store on disk hashes images, with a model that has to be downloaded",
    "test_flexkv_connector.py": "the calls that one connector passes to its library",
    "test_hf3fs_client.py": "one store's client",
    "test_hf3fs_connector.py": "one store's client and statistics",
    "test_hf3fs_metadata_server.py": "one store's server",
    "test_hidden_states_connector.py": "where one connector finds hidden states",
    "test_hisparse_connector.py": "one connector's mirror in host memory",
    "test_hisparse_stats.py": "one connector's statistics",
    "test_lmcache_connector.py": "one store's events and adapters",
    "test_lmcache_integration.py": "names in vLLM that one store uses",
    "test_mooncake_connector.py": "Mooncake's regions, handshake and bootstrap server",
    "test_mooncake_connector_hma.py": "Mooncake's groups and regions",
    "test_mooncake_connector_hybrid_mamba.py": "Mooncake's groups and regions",
    "test_mooncake_stats.py": "Mooncake's statistics",
    "test_mooncake_store_connector.py": "one store's keys, hits and workers",
    "test_mooncake_store_coordinator.py": "one store's keys, hits and workers",
    "test_mooncake_store_hma_e2e.py": "one store's keys, hits and workers",
    "test_mooncake_store_layout.py": "one store's keys, hits and workers",
    "test_mooncake_store_scheduler.py": "one store's keys, hits and workers",
    "test_mooncake_store_worker.py": "one store's keys, hits and workers",
    "test_moriio_connector.py": "MoRI-IO's metadata, settings and registration",
    "test_moriio_hma_scheduler.py": "MoRI-IO's tables",
    "test_moriio_kv_layout.py": "MoRI-IO's offsets and messages",
    "test_moriio_proxy_routing.py": "a proxy for MoRI-IO",
    "test_moriio_routing.py": "MoRI-IO's choice of ranks",
    "test_moriio_routing_fairness.py": "MoRI-IO's choice of ranks",
    "test_moriio_toy_proxy_server.py": "a proxy for MoRI-IO",
    "test_moriio_tp_ack.py": "MoRI-IO's acknowledgements",
    "test_moriio_transfer_completion.py": "MoRI-IO's waits",
    "test_moriio_unmap.py": "MoRI-IO's tables",
    "test_moriio_write_done_routing.py": "MoRI-IO's notifications",
    "test_nixl_connector_hma.py": "NIXL's groups, descriptors and tables",
    "test_nixl_desc_geometry.py": "NIXL's descriptors",
    "test_nixl_heartbeat.py": "NIXL's heartbeats",
    "test_nixl_push_connector.py": "NIXL's messages and tables in push",
    "test_nixl_rocm_gpu_mem_diag.py": "NIXL's diagnosis of memory of one kind of GPU",
    "offloading_connector": "offloading to host memory",
    "test_offloading_connector.py": "offloading to host memory, on a GPU",
    "test_simple_cpu_offload_connector.py": "one store's settings",
    "test_simple_cpu_offload_metrics.py": "one store's metrics",
}

LISTED = [f"{file}::{name}" for file, names in RUN.items() for name in names]


@pytest.fixture(scope="module")
def theirs() -> PeerTests:
    return peer_tests()


@pytest.fixture(scope="module", params=[Mode.PUSH, Mode.PULL], ids=str)
def found(request: pytest.FixtureRequest, theirs: PeerTests, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return theirs.run(LISTED, request.param, tmp_path_factory.mktemp("peer"))


def problem_of(listed: str, found: Mapping[str, Case]) -> str:
    """Why one of the tests is not as it should be; empty when it passed, with our connector."""
    cases = {name: case for name, case in found.items() if name == listed or name.startswith(f"{listed}[")}
    if not cases:
        return f"{listed} did not run"
    for name, case in cases.items():
        if case.problem:
            return f"{name}: {case.problem}"
        if not (case.named if listed in ONLY_ASKED else case.made and case.calls):
            return f"{name} passed without our connector: {case}"
    return ""


@pytest.mark.parametrize("listed", LISTED)
def test_of_vllms(found: dict[str, Case], listed: str) -> None:
    assert problem_of(listed, found) == ""


def test_nothing_else_was_run_and_nothing_less(found: dict[str, Case]) -> None:
    assert len(found) == CASES
    assert {name.partition("[")[0] for name in found} == {name.partition("[")[0] for name in LISTED}


def test_each_of_vllms_tests_is_run_or_has_a_reason(theirs: PeerTests) -> None:
    known = {name.partition("[")[0] for name in (*LISTED, *LEFT_OUT)}
    there = {f"{file}::{name}": parents_of(file, name) for file, names in theirs.names().items() for name in names}
    assert {name for name, parents in there.items() if not known & {name, *parents}} == set()
    assert known - there.keys() - set().union(*there.values()) == set()


def parents_of(file: str, name: str) -> set[str]:
    """What a reason may be given for in the place of a single test: its class, its file, its folder."""
    return {f"{file}::{name.partition('::')[0]}", file, file.partition("/")[0]}


@pytest.mark.parametrize(
    ("plant", "listed"),
    [
        ("frees_at_once", "test_remote_decode_lifecycle.py::test_basic_lifecycle"),
        ("loads_nothing", "test_remote_prefill_lifecycle.py::test_basic_lifecycle"),
    ],
)
def test_control_a_connector_with_a_mistake_fails(theirs: PeerTests, tmp_path: Path, plant: str, listed: str) -> None:
    found = theirs.run([listed], Mode.PUSH, tmp_path, plant)
    assert "assert" in problem_of(listed, found)
    assert found[listed].calls


def test_control_another_connector_is_noticed(theirs: PeerTests, tmp_path: Path) -> None:
    listed = "test_remote_decode_lifecycle.py::test_basic_lifecycle"
    case = theirs.run([listed], Mode.PUSH, tmp_path, "is_not_there")[listed]
    assert (case.made, case.calls, case.named) == (0, 0, 0)
    assert problem_of(listed, {listed: case})

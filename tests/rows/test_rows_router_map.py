"""Must-work behaviours of a P/D router and of instances under one: each row of the list has a test that names what is right.

The list holds what the real routers and their users were seen to need or get wrong. Rows 1 to 10 are about instances under the
real vllm-router, rows 11 to 27 about a router; "vLLM" rows are those of discovery and addresses.

| row | what it is about | test |
|---|---|---|
| Router 1 | one map from a DEALER, heartbeats, only when healthy | `unit/discovery/test_registration_messages.py::test_ours_is_one_map_with_the_real_routers_keys_first`, `unit/discovery/test_announcing.py::test_an_instance_joins_keeps_beating_and_says_goodbye`, `unit/discovery/test_announcer_process.py::test_a_stalled_interpreter_loses_no_heartbeat`, `compat/router/test_vllm_router_answers.py::test_two_prefill_and_two_decode_instances_answer_like_one_instance` |
| Router 2 | addresses that survive a header and a request id | `unit/core/test_addresses.py::test_an_address_that_an_id_would_not_give_back_is_found_before_it_is_used`, `unit/discovery/test_registration_messages.py::test_a_wrong_value_is_named`, `unit/core/test_addresses.py::test_hosts_of_every_kind_are_read` |
| Router 3 | the peer from the request id, else from the body, else a clean error | `compat/router/test_vllm_router_answers.py::test_instances_in_pull_work_under_a_router_of_three_fields_too`, `unit/router/test_router_bodies.py::test_in_push_decode_is_told_where_its_source_listens_as_the_request_id_tells_it`, `unit/core/test_addresses.py::test_known_prefixes_and_suffixes`, `rows/test_rows_inputs.py::TestVllmRow10` |
| Router 4 | either order in push, a complete answer in pull | `compat/router/test_vllm_router_answers.py::test_two_prefill_and_two_decode_instances_answer_like_one_instance` |
| Router 5 | sizes that are told are those that were registered; what a real router makes up is told | `compat/router/test_vllm_router_answers.py::test_a_router_that_makes_ranks_up_is_told_of_and_answers_are_right`, `unit/engines/embedded/test_server_handoff.py::test_a_size_that_a_router_made_up_is_told_and_harms_nobody`, `unit/router/test_router_admission.py::test_every_rank_is_used_and_told` |
| Router 6 | decode without parameters computes by itself | `unit/engines/embedded/test_rows_vllm.py::TestRow30`, `unit/router/test_router_admission.py::test_short_prompts_are_prefilled_by_decode` |
| Router 7 | compact JSON, so that the real router does not cut it | `compat/router/test_vllm_router_answers.py::test_two_prefill_and_two_decode_instances_answer_like_one_instance` |
| Router 8 | restarted elsewhere: old addresses fail fast | `compat/router/test_vllm_router_changes.py::test_an_instance_restarted_on_another_port_is_used_again`, `::test_an_instance_restarted_on_the_same_port_is_reached_at_its_new_control_address`, `::test_requests_around_a_kill_are_right_or_fail` |
| Router 9 | advice when nobody asks | `unit/discovery/test_advice.py::test_advice_comes_once_when_nobody_asks`, `compat/router/test_vllm_router_changes.py::test_an_instance_of_the_other_mode_is_not_used_and_the_others_keep_working` |
| Router 10 | a closed connection frees both sides | `compat/router/test_vllm_router_answers.py::test_a_client_that_leaves_frees_both_sides`, `unit/router/test_router_admission.py::test_clients_that_leave_at_any_moment_leave_nothing_behind` |
| Router 11 | prefill fails | `unit/router/test_router_retry.py::test_a_failing_prefill_is_replaced_and_decode_gets_a_new_transfer`, `::test_what_another_instance_would_say_too_is_not_tried_again`, `::test_attempts_are_bounded`, `unit/router/test_router_dispatch.py::test_a_failing_prefill_is_a_502_with_the_reason_and_decode_is_left_alone` |
| Router 12 | decode fails, before and after the first byte | `unit/router/test_router_retry.py::test_a_failing_decode_is_replaced_with_a_new_transfer`, `::test_nothing_is_tried_again_after_the_first_byte` |
| Router 13 | the client goes away at every point | `unit/router/test_router_admission.py::test_clients_that_leave_at_any_moment_leave_nothing_behind`, `::test_a_client_that_leaves_the_queue_is_forgotten` |
| Router 14 | streams, slow readers, framings, old clients | `unit/router/test_router_dispatch.py::test_a_stream_is_passed_on_piece_by_piece`, `unit/router/test_router_http.py::test_a_slow_reader_holds_decode_back_and_memory_stays_bounded`, `::test_old_clients_get_a_stream_that_ends_with_the_connection`, `::test_a_client_that_asks_first_is_told_to_go_on`, `unit/router/test_router_push.py::test_the_first_bytes_of_a_stream_come_before_prefill_has_answered_and_it_may_then_fail` |
| Router 15 | the body without loss | `unit/router/test_router_bodies.py::test_what_is_not_ours_arrives_unchanged_on_both_sides`, `::test_decode_gets_the_bytes_that_the_client_sent`, `unit/router/test_router_dispatch.py::test_values_the_router_does_not_need_keep_their_bytes` |
| Router 16 | a client cannot choose peers | `unit/router/test_router_dispatch.py::test_a_client_cannot_choose_peers`, `unit/router/test_router_bodies.py::test_what_chooses_peers_is_taken_out_however_it_is_spelt`, `unit/router/test_router_admission.py::test_sglang_instances_meet_in_a_room_that_only_the_router_chooses` |
| Router 17 | headers and keys as configured | `unit/router/test_router_admission.py::test_headers_go_along_as_configured`, `::test_keys_are_asked_for_and_not_passed_on` |
| Router 18 | bad registrations | `unit/discovery/test_hostile_registrations.py::test_a_flood_does_not_disturb_an_instance_that_is_there`, `::test_every_field_wrong_in_turn_is_named`, `::test_an_endless_message_is_cut_off_and_counted`, `::test_garbage_is_logged_once_per_sender`, `::test_of_a_flood_only_what_one_sender_may_say_is_looked_at_and_the_rest_is_dropped_and_counted`, `::test_what_was_recorded_brings_nobody_back`, `unit/discovery/test_announcing.py::test_the_listener_survives_everything`, `::test_a_flood_of_registrations_disturbs_nobody_and_fills_nothing`, `unit/discovery/test_registration_messages.py::test_a_wrong_value_is_named`, `unit/router/test_router_processes.py::test_a_flood_of_registrations_is_dropped_and_no_request_notices` |
| Router 19 | expiry, quarantine, goodbye, flapping | `unit/discovery/test_registry.py::TestPatience`, `::TestQuarantine`, `::test_two_lost_heartbeats_do_not_drop_an_instance`, `::test_goodbye_removes_at_once`, `unit/router/test_router_policy.py::test_who_cannot_be_reached_is_put_aside_for_longer_each_time_unless_nobody_else_is_left`, `unit/router/test_router_processes.py::test_what_one_process_holds_against_an_instance_all_do` |
| Router 20 | both modes at once | `unit/router/test_router_push.py::test_instances_of_both_modes_serve_side_by_side_each_in_its_own` |
| Router 21 | nobody there, or one side only | `unit/router/test_router_app.py::test_with_nothing_registered_each_route_says_so`, `unit/router/test_router_dispatch.py::test_a_missing_side_is_named` |
| Router 22 | caps, queue, deadline, priority | `unit/router/test_router_admission.py::test_requests_beyond_a_cap_wait_for_their_turn_by_priority`, `::test_a_full_queue_is_a_429_and_a_long_wait_a_503_and_both_say_when_to_come_back`, `unit/router/test_router_policy.py::test_caps_are_strict_and_seats_come_back_once` |
| Router 23 | policies that act, all ranks used | `unit/router/test_router_policy.py::test_equal_prompts_stick_and_different_ones_spread`, `::test_every_data_parallel_rank_is_used_alike`, `unit/router/test_router_admission.py::test_a_session_stays_where_it_was` |
| Router 24 | kept connections, bursts | `unit/router/test_router_retry.py::test_connections_to_instances_are_kept`, `unit/router/test_router_push.py::test_many_requests_at_once`, `unit/bench/test_bench_router.py::test_every_mode_and_kind_is_measured_without_an_error` (2,048 streams at once) |
| Router 25 | errors are OpenAI's, unknown paths 404, bounded labels | `unit/router/test_router_app.py::test_errors_are_openai_objects`, `::test_unknown_paths_share_one_label` |
| Router 26 | drains, rolling restarts | `unit/router/test_router_admission.py::test_the_router_finishes_what_it_has_when_it_is_asked_to_stop`, `e2e/test_rolling_restart.py::test_no_request_fails_while_every_instance_is_restarted` |
| Router 27 | slow, large, deep and smuggled requests | `unit/router/test_router_http.py::test_bytes_that_could_be_two_requests_are_refused_and_the_connection_closed`, `::test_slow_clients_are_sent_away`, `::test_long_heads_are_refused_whether_in_one_line_or_in_many`, `::test_strange_json_is_a_client_error_or_passed_on`, `::test_noise_never_kills_it`, `::test_instances_that_answer_noise_fail_requests_and_nothing_else` |
| vLLM 1 | registered in any order, router first or last | `unit/discovery/test_announcing.py::test_every_router_is_told_although_one_is_away_and_one_comes_late`, `::test_an_instance_registers_again_with_a_restarted_router` |
| vLLM 2 | a new incarnation replaces the entry | `unit/discovery/test_registry.py::test_a_restarted_instance_replaces_its_entry_at_once`, `::test_a_late_message_of_an_earlier_incarnation_changes_nothing` |
| vLLM 3 | silence removes, the next heartbeat brings back | `unit/discovery/test_registry.py::test_silence_expires_exactly_after_the_limit_and_is_told_once` |
| vLLM 4 | a differing mode is refused, others go on | `unit/discovery/test_registry.py::test_a_differing_transfer_mode_is_refused_and_others_keep_working`, `unit/router/test_router_app.py::test_a_router_of_one_mode_refuses_the_other_by_name` |
| vLLM 5 | malformed messages | `unit/discovery/test_announcing.py::test_the_listener_survives_everything` |
| vLLM 6 | no pair, prefill errors, one token for prefill | `unit/router/test_router_dispatch.py::test_a_missing_side_is_named`, `::test_both_sides_are_sent_what_the_protocol_asks_for` |
| vLLM 7 | ids with what engines put round them | `unit/core/test_addresses.py::test_known_prefixes_and_suffixes` |
| vLLM 8 | ids and addresses that are wrong | `unit/core/test_addresses.py::test_both_sides_refuse_together`, `::test_what_is_no_host_is_refused_by_name`, `::test_what_is_no_port_is_refused_by_name` |

This module fails when a test named here does not exist, or a row is missing.
"""  # noqa: E501

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
ROWS = {"Router": set(range(1, 28)), "vLLM": set(range(1, 9))}


def table() -> list[tuple[str, int, str]]:
    """(list, row, tests) of each line of the map."""
    text = ast.get_docstring(ast.parse(Path(__file__).read_text())) or ""
    found = re.findall(r"^\| (Router|vLLM) (\d+) \|[^|]*\| (.*) \|$", text, re.MULTILINE)
    return [(source, int(row), tests) for source, row, tests in found]


def test_every_row_is_in_the_map() -> None:
    assert {source: {row for name, row, _ in table() if name == source} for source in ROWS} == ROWS


def test_every_test_in_the_map_exists() -> None:
    for source, row, tests in table():
        assert "::" in tests, f"{source} {row} names no test"
        path = Path()
        for file, name in re.findall(r"`([\w/]+\.py)?::(\w+)`", tests):
            path = TESTS / file if file else path
            names = {
                node.name
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in names, f"{source} {row}: {name} is not in {path.name}"

"""The registry: which instances are live when, which replace which, and which are refused. Time is an argument."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from kvbaton.discovery.registry import Left, Refreshed, Registered, RegistrationRefused, Registry, Replaced, Standing


def message(
    kind: str = "P",
    port: int = 8101,
    *,
    control: int = 6301,
    incarnation: str = "one",
    mode: TransferMode = TransferMode.READ,
    model: str = "m",
    fingerprint: str = "f",
    bye: bool = False,
) -> Registration:
    return Registration(
        type=InstanceType(kind),
        http_address=f"127.0.0.1:{port}",
        zmq_address=f"host:127.0.0.1,handshake:{control},notify:{control}",
        transfer_mode=mode,
        incarnation=incarnation,
        model=model,
        fingerprint=fingerprint,
        bye=bye,
    )


def addresses(registry: Registry, now: float, kind: InstanceType | None = None) -> list[str]:
    return [instance.http_address for instance in registry.live(now, kind)]


def test_an_instance_joins_and_is_refreshed() -> None:
    registry = Registry()
    assert isinstance(registry.register(message(), 0.0), Registered)
    assert isinstance(registry.register(message(), 1.5), Refreshed)
    (instance,) = registry.live(2.0)
    assert (instance.since, instance.last_seen) == (0.0, 1.5)


def test_silence_expires_exactly_after_the_limit_and_is_reported_once() -> None:
    registry = Registry(expire_after_s=5.0)
    registry.register(message(), 10.0)
    assert addresses(registry, 14.999) == ["127.0.0.1:8101"]
    assert addresses(registry, 15.0) == []
    registry.register(message("D", 8201), 16.0)
    assert [i.http_address for i in registry.expire(16.0)] == ["127.0.0.1:8101"]
    assert registry.expire(16.0) == ()


def test_two_lost_heartbeats_do_not_drop_an_instance() -> None:
    registry = Registry()
    registry.register(message(), 0.0)
    assert addresses(registry, 3 * 1.5) != []


def test_data_parallel_ranks_share_an_address_and_live_and_leave_by_themselves() -> None:
    registry = Registry()
    ranks = [
        msgspec.structs.replace(message(control=6301 + rank, incarnation=f"i{rank}"), dp_size=2, dp_rank=rank)
        for rank in range(2)
    ]
    for rank in ranks:
        assert isinstance(registry.register(rank, 0.0), Registered)
        assert isinstance(registry.register(rank, 1.0), Refreshed)
    assert [i.registration.dp_rank for i in registry.live(1.0)] == [0, 1]
    thief = msgspec.structs.replace(ranks[1], incarnation="thief")
    assert isinstance(registry.register(thief, 1.0), RegistrationRefused)
    found = registry.find_process("127.0.0.1:8101", InstanceType.PREFILL, "i1")
    assert found is not None
    assert found.name == "prefill instance 127.0.0.1:8101 (dp rank 1)"
    registry.report_lost(found, 1.0)
    other = Registry()
    for rank in ranks:
        other.register(rank, 1.0)
    other.adopt(registry.standing(found, 1.0), 1.0)
    assert [i.strikes for i in other.live(1.0)] == [0, 1]
    registry.register(msgspec.structs.replace(ranks[1], bye=True), 2.0)
    assert [i.registration.dp_rank for i in registry.live(2.0)] == [0]


LATE = 4.0
"""A heartbeat is overdue by then, and the instance not yet expired."""


def test_a_restarted_instance_replaces_its_dead_predecessor() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message(incarnation="one"), 0.0)
    outcome = registry.register(message(incarnation="two", control=6999), LATE)
    assert isinstance(outcome, Replaced)
    assert [i.registration.incarnation for i in outcome.earlier] == ["one"]
    (instance,) = registry.live(LATE)
    assert instance.zmq_address.endswith("notify:6999")


class TestClaims:
    """A registration for the address of a live instance, under another incarnation: any process can send one."""

    @pytest.mark.parametrize("is_keyed", [False, True])
    def test_a_live_instance_keeps_its_address(self, is_keyed: bool) -> None:
        registry = Registry(is_keyed=is_keyed)
        for tenth in range(200):
            now = tenth / 10
            if tenth % 15 == 0:
                assert not isinstance(registry.register(message(incarnation="one"), now), RegistrationRefused)
            for kind in "PD":
                outcome = registry.register(message(kind, incarnation="two", control=6999), now)
                assert isinstance(outcome, RegistrationRefused)
                assert "'two' claims 127.0.0.1:8101, which the live incarnation 'one'" in outcome.reason
            assert [i.registration.incarnation for i in registry.live(now)] == ["one"]

    def test_without_a_key_silence_must_last_until_the_earlier_one_expires(self) -> None:
        registry = Registry(expire_after_s=5.0)
        for now in (0.0, 1.5, 3.0):
            registry.register(message(incarnation="one"), now)
        assert isinstance(registry.register(message(incarnation="two"), 7.9), RegistrationRefused)
        assert isinstance(registry.register(message(incarnation="two"), 8.0), Registered)

    def test_with_a_key_one_missed_heartbeat_is_enough(self) -> None:
        registry = Registry(is_keyed=True)
        for now in (0.0, 1.5, 3.0):
            registry.register(message(incarnation="one"), now)
        assert isinstance(registry.register(message(incarnation="two"), 5.2), RegistrationRefused)
        assert isinstance(registry.register(message(incarnation="two"), 5.3), Replaced)

    def test_with_a_key_an_instance_that_cannot_be_reached_is_replaced_at_once(self) -> None:
        registry = Registry(is_keyed=True)
        registry.register(message(incarnation="one"), 0.0)
        registry.report_lost(registry.live(0.1)[0], 0.1)
        assert isinstance(registry.register(message(incarnation="two"), 0.2), Replaced)

    def test_a_goodbye_frees_the_address_at_once(self) -> None:
        registry = Registry()
        registry.register(message(incarnation="one"), 0.0)
        registry.register(message(incarnation="one", bye=True), 0.1)
        assert isinstance(registry.register(message(incarnation="two"), 0.2), Registered)

    def test_an_eviction_is_not_for_good(self) -> None:
        """The process that was replaced only stood still, and the one that took its place has left."""
        registry = Registry(is_keyed=True)
        registry.register(message(incarnation="one"), 0.0)
        registry.register(message(incarnation="two"), LATE)
        registry.register(message(incarnation="two", bye=True), LATE + 1.0)
        assert isinstance(registry.register(message(incarnation="one"), LATE + 29.0), RegistrationRefused)
        assert isinstance(registry.register(message(incarnation="one"), LATE + 31.0), Registered)

    @pytest.mark.parametrize("leaves", [False, True], ids=["expired", "left"])
    def test_a_late_message_of_a_process_that_was_gone_before_does_not_take_the_address_back(self, leaves: bool) -> None:
        registry = Registry(is_keyed=True)
        registry.register(message(incarnation="one"), 0.0)
        if leaves:
            registry.register(message(incarnation="one", bye=True), 1.0)
        assert isinstance(registry.register(message(incarnation="two"), 20.0), Registered)
        registry.report_lost(registry.live(20.1)[0], 20.1)
        assert isinstance(registry.register(message(incarnation="one"), 20.2), RegistrationRefused)
        assert not isinstance(registry.register(message(incarnation="two"), 21.0), RegistrationRefused)
        assert [i.registration.incarnation for i in registry.live(21.0)] == ["two"]

    def test_what_another_registry_has_decided_is_followed(self) -> None:
        registry = Registry()
        registry.register(message(incarnation="one"), 0.0)
        assert isinstance(registry.register(message(incarnation="two"), 0.1, is_decided=True), Replaced)

    def test_a_listed_instance_that_registers_itself_is_the_same_one(self) -> None:
        registry = Registry()
        registry.register(message(incarnation=""), 0.0, is_listed=True)
        assert isinstance(registry.register(message(incarnation="", control=1), 0.1), RegistrationRefused)
        assert isinstance(registry.register(message(incarnation="one"), 0.1), Replaced)

    def test_a_list_does_not_keep_a_dead_process_in_place_of_its_successor(self) -> None:
        registry = Registry()
        registry.register(message(incarnation="one"), 0.0)
        for now in range(1, 10):
            registry.register(message(incarnation="one"), float(now), is_listed=True)
        assert isinstance(registry.register(message(incarnation="two"), 9.5), Replaced)


class TestPause:
    """A router that stood still reads the heartbeats that came meanwhile before it expires an instance."""

    def test_a_pause_is_not_held_against_instances(self) -> None:
        registry = Registry(notices_pauses=True)
        for port in (8101, 8102):
            registry.register(message(port=port), 0.0)
        for tenth in range(10):
            registry.expire(tenth / 10)
        assert isinstance(registry.register(message(port=8101), 60.0), Refreshed)
        assert registry.expire(60.1) == ()
        assert isinstance(registry.register(message(port=8102), 60.2), Refreshed)
        assert len(registry.live(60.3)) == 2

    def test_what_looks_first_after_a_pause_may_be_a_request(self) -> None:
        registry = Registry(notices_pauses=True)
        registry.register(message(), 0.0)
        registry.expire(0.1)
        assert len(registry.live(60.0)) == 1
        assert registry.expire(60.1) == ()

    def test_after_a_pause_silence_counts_again(self) -> None:
        registry = Registry(notices_pauses=True)
        registry.register(message(), 0.0)
        registry.expire(60.0)
        for tenth in range(60):
            registry.expire(60.0 + tenth / 10)
        assert registry.live(65.9) == ()


def test_a_late_message_of_an_earlier_incarnation_changes_nothing() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message(incarnation="one"), 0.0)
    registry.register(message(incarnation="two"), LATE)
    assert isinstance(registry.register(message(incarnation="one"), LATE + 0.1), RegistrationRefused)
    assert registry.register(message(incarnation="one", bye=True), LATE + 0.2) == Left(None)
    assert [i.registration.incarnation for i in registry.live(LATE + 0.2)] == ["two"]


def test_an_instance_without_incarnation_is_replaced_by_its_control_address() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message(incarnation="", control=1), 0.0)
    assert isinstance(registry.register(message(incarnation="", control=2), LATE), Replaced)
    assert isinstance(registry.register(message(incarnation="", control=1), 2 * LATE), Replaced)


def test_a_process_that_comes_back_as_the_other_type_leaves_no_ghost() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message("P", incarnation="one"), 0.0)
    registry.register(message("D", incarnation="two"), LATE)
    assert addresses(registry, LATE, InstanceType.PREFILL) == []
    assert addresses(registry, LATE, InstanceType.DECODE) == ["127.0.0.1:8101"]


def test_one_process_may_be_both() -> None:
    registry = Registry()
    registry.register(message("P"), 0.0)
    registry.register(message("D"), 0.1)
    assert isinstance(registry.register(message("P"), 0.2), Refreshed)
    assert len(registry.live(0.2)) == 2


def test_goodbye_removes_at_once() -> None:
    registry = Registry()
    registry.register(message(), 0.0)
    outcome = registry.register(message(bye=True), 0.1)
    assert isinstance(outcome, Left)
    assert outcome.instance is not None
    assert registry.live(0.1) == ()


def test_a_differing_transfer_mode_is_refused_and_others_keep_working() -> None:
    registry = Registry(TransferMode.READ)
    registry.register(message(), 0.0)
    outcome = registry.register(message("D", 8201, mode=TransferMode.WRITE), 0.1)
    assert isinstance(outcome, RegistrationRefused)
    assert "transfer_mode is WRITE there and READ here" in outcome.reason
    assert addresses(registry, 0.1) == ["127.0.0.1:8101"]
    assert [r.registration.http_address for r in registry.refused(0.1)] == ["127.0.0.1:8201"]


def test_without_a_mode_of_its_own_a_registry_takes_both() -> None:
    registry = Registry()
    for port, mode in enumerate(TransferMode, 8101):
        assert isinstance(registry.register(message(port=port, mode=mode), 0.0), Registered)
    assert {i.transfer_mode for i in registry.live(0.0)} == set(TransferMode)


@pytest.mark.parametrize("first", TransferMode)
def test_the_first_instance_fixes_the_mode_where_that_was_chosen(first: TransferMode) -> None:
    registry = Registry(first_fixes_mode=True)
    other = next(mode for mode in TransferMode if mode is not first)
    assert isinstance(registry.register(message(mode=first), 0.0), Registered)
    refused = registry.register(message("D", 8201, mode=other), 0.1)
    assert isinstance(refused, RegistrationRefused)
    assert f"transfer_mode is {other} there and {first} here" in refused.reason
    assert isinstance(registry.register(message("D", 8202, mode=first), 0.2), Registered)
    registry.register(message(mode=first, bye=True), 0.3)
    assert isinstance(registry.register(message("D", 8203, mode=other), 60.0), RegistrationRefused)


def test_a_differing_model_is_refused_with_both_values() -> None:
    registry = Registry()
    registry.register(message(fingerprint="aaa"), 0.0)
    outcome = registry.register(message("D", 8201, fingerprint="bbb"), 0.1)
    assert isinstance(outcome, RegistrationRefused)
    assert "'bbb'" in outcome.reason
    assert "'aaa'" in outcome.reason
    by_name = registry.register(message("D", 8202, fingerprint="aaa", model="other"), 0.2)
    assert isinstance(by_name, RegistrationRefused)
    assert "'other'" in by_name.reason


def test_a_refused_instance_is_taken_once_no_reason_is_left() -> None:
    registry = Registry()
    registry.register(message(fingerprint="aaa"), 0.0)
    other = message("D", 8201, fingerprint="bbb")
    first, second = registry.register(other, 1.0), registry.register(other, 2.0)
    assert isinstance(first, RegistrationRefused)
    assert isinstance(second, RegistrationRefused)
    assert (first.is_new, second.is_new) == (True, False)
    assert isinstance(registry.register(other, 6.0), Registered)
    assert registry.refused(6.0) == ()


def test_an_instance_restarted_with_another_model_is_not_used_under_its_old_entry() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message(), 0.0)
    registry.register(message("D", 8201), 0.0)
    outcome = registry.register(message("D", 8201, incarnation="two", fingerprint="other"), LATE)
    assert isinstance(outcome, RegistrationRefused)
    assert addresses(registry, LATE) == ["127.0.0.1:8101"]


def test_both_types_of_one_process_must_agree_too() -> None:
    registry = Registry()
    registry.register(message("P", fingerprint="aaa"), 0.0)
    assert isinstance(registry.register(message("D", fingerprint="bbb"), 0.1), RegistrationRefused)


def test_the_only_instance_may_change_its_model() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message(fingerprint="aaa"), 0.0)
    assert isinstance(registry.register(message(incarnation="two", fingerprint="bbb"), LATE), Replaced)


def test_unknown_fingerprints_are_not_held_against_anyone() -> None:
    registry = Registry()
    registry.register(message(fingerprint="aaa"), 0.0)
    assert isinstance(registry.register(message("D", 8201, fingerprint="", model=""), 0.1), Registered)
    assert isinstance(registry.register(message("D", 8202, fingerprint="bbb"), 0.2), RegistrationRefused)


def test_every_table_is_bounded() -> None:
    registry = Registry(max_instances=4, max_refused=3)
    outcomes = [registry.register(message(port=9000 + i), 0.0) for i in range(20)]
    assert sum(isinstance(outcome, Registered) for outcome in outcomes) == 4
    assert len(registry.live(0.0)) == 4
    assert len(registry.refused(0.0)) == 3
    assert isinstance(registry.register(message(port=9000), 0.1), Refreshed)
    assert "full" in registry.refused(0.0)[0].reason


_STEPS = st.tuples(
    st.sampled_from("PD"),
    st.sampled_from([8101, 8102, 8103]),
    st.sampled_from(["", "one", "two"]),
    st.sampled_from([1, 2]),
    st.sampled_from(["", "aaa", "bbb"]),
    st.sampled_from(list(TransferMode)),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 3.0, 6.0]),
)


@given(st.sampled_from([None, *TransferMode]), st.booleans(), st.lists(_STEPS, max_size=25))
def test_the_live_instances_always_agree(
    fixed: TransferMode | None, is_keyed: bool, steps: list[tuple[str, int, str, int, str, TransferMode, bool, float]]
) -> None:
    registry, now = Registry(fixed, is_keyed=is_keyed), 0.0
    for kind, port, incarnation, control, fingerprint, mode, bye, wait in steps:
        now += wait
        registry.register(
            message(kind, port, incarnation=incarnation, control=control, fingerprint=fingerprint, mode=mode, bye=bye), now
        )
        live = registry.live(now)
        assert len({i.registration.fingerprint for i in live} - {""}) <= 1
        assert all(fixed in (None, i.transfer_mode) and not i.registration.bye for i in live)
        assert all(now - i.last_seen < 10.0 for i in live)
        processes = {(i.http_address, i.registration.incarnation, i.zmq_address) for i in live}
        assert len({address for address, _, _ in processes}) == len(processes)


class TestPatience:
    """Silence ends an instance after the limit, or after three of its own heartbeats when those are slower."""

    def test_a_foreign_instance_that_beats_every_three_seconds_may_lose_two_heartbeats(self) -> None:
        registry = Registry(expire_after_s=5.0)
        for now in (0.0, 3.0, 6.0):
            registry.register(message(), now)
        assert addresses(registry, 6.0 + 9.0) != []
        assert addresses(registry, 6.0 + 9.95) == []

    def test_our_own_that_beats_every_one_and_a_half_is_gone_after_five(self) -> None:
        registry = Registry(expire_after_s=5.0)
        for now in (0.0, 1.5, 3.0):
            registry.register(message(), now)
        assert addresses(registry, 7.9) != []
        assert addresses(registry, 8.0) == []

    def test_patience_has_an_end(self) -> None:
        registry = Registry(expire_after_s=5.0)
        for now in (0.0, 4.9, 14.0, 23.0):
            registry.register(message(), now)
        assert addresses(registry, 32.9) != []
        assert addresses(registry, 33.0) == []


class TestQuarantine:
    """An instance that cannot be reached is put aside, longer each time, until it was reached."""

    def test_each_failure_puts_aside_for_longer_up_to_a_limit(self) -> None:
        registry, now, times = Registry(expire_after_s=100.0), 0.0, []
        registry.register(message(), now)
        for _ in range(7):
            (instance,) = registry.live(now)
            times.append(registry.report_lost(instance, now))
            (instance,) = registry.live(now)
            assert registry.report_lost(instance, now) is None
            now = instance.aside_until
        assert times == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]

    def test_one_answer_clears_it(self) -> None:
        registry = Registry()
        registry.register(message(), 0.0)
        registry.report_lost(registry.live(0.0)[0], 0.0)
        before = registry.version
        registry.report_reached(registry.live(0.0)[0])
        (instance,) = registry.live(0.0)
        assert instance.aside_until < 0.0
        assert registry.version > before
        assert registry.report_lost(instance, 0.0) == 0.5

    def test_a_heartbeat_does_not_clear_it_and_a_new_process_does(self) -> None:
        registry = Registry(is_keyed=True)
        registry.register(message(), 0.0)
        registry.report_lost(registry.live(0.0)[0], 0.0)
        registry.register(message(), 0.1)
        assert registry.live(0.1)[0].aside_until == 0.5
        registry.register(message(incarnation="two"), 0.2)
        assert registry.live(0.2)[0].aside_until < 0.2

    def test_a_report_about_an_earlier_process_does_not_count_for_a_later_one(self) -> None:
        registry = Registry(is_keyed=True)
        registry.register(message(), 0.0)
        (earlier,) = registry.live(0.0)
        registry.register(message(incarnation="two"), LATE)
        assert registry.report_lost(earlier, LATE) is None
        assert registry.live(LATE)[0].aside_until < LATE

    def test_what_another_registry_has_found_out_is_held_and_forgotten_alike(self) -> None:
        one, other = Registry(), Registry()
        for registry in (one, other):
            registry.register(message(), 0.0)
        (instance,) = one.live(0.0)
        for now in (0.0, 0.5):
            one.report_lost(instance, now)
        other.adopt(one.standing(instance, 1.0), 1.0)
        assert [(i.strikes, i.aside_until) for i in other.live(1.0)] == [(2, 1.5)]
        assert other.report_lost(instance, 1.5) == 2.0
        assert one.report_reached(instance)
        other.adopt(one.standing(instance, 1.6), 1.6)
        assert other.live(1.6)[0].strikes == 0
        assert other.live(1.6)[0].aside_until < 0.0

    def test_what_another_registry_holds_against_an_earlier_process_is_not_held_here(self) -> None:
        registry = Registry()
        registry.register(message(incarnation="two"), 0.0)
        before = registry.version
        registry.adopt(Standing(message().http_address, message().type, "one", 3, 5.0), 0.0)
        registry.adopt(Standing("10.9.9.9:1", message().type, "two", 3, 5.0), 0.0)
        assert registry.live(0.0)[0].strikes == 0
        assert registry.version == before

    def test_reports_are_bounded(self) -> None:
        registry = Registry(expire_after_s=100.0)
        registry.register(message(), 0.0)
        registry.adopt(Standing(message().http_address, message().type, message().incarnation, 10**6, 10.0**6), 0.0)
        assert registry.live(0.0)[0].aside_until == 8.0

    def test_one_that_comes_and_goes_is_put_aside_and_a_calm_minute_forgives_it(self) -> None:
        registry, now = Registry(), 0.0
        asides = []
        for _ in range(6):
            registry.register(message(), now)
            asides.append(max(0.0, registry.live(now)[0].aside_until - now))
            registry.register(message(bye=True), now + 0.5)
            now += 1.0
        assert asides == [0.0, 0.0, 0.0, 0.5, 1.0, 2.0]
        registry.register(message(), now + 60.0)
        assert registry.live(now + 60.0)[0].aside_until < now


def test_the_version_changes_with_the_live_instances_only() -> None:
    registry = Registry(is_keyed=True)
    registry.register(message(), 0.0)
    versions = [registry.version]
    registry.register(message(), 1.0)
    assert registry.version == versions[0]
    for change in (message("D", 8201), message(incarnation="two"), message(incarnation="two", bye=True)):
        registry.register(change, LATE)
        assert registry.version not in versions
        versions.append(registry.version)
    registry.expire(60.0)
    assert registry.version not in versions

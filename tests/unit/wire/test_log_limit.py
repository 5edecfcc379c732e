"""How often lines are logged: once per second and cause, once per key and time, and none that matters is lost."""

from __future__ import annotations

from kvbaton.wire.log_limit import PacedLines


def test_the_first_line_comes_at_once_and_the_next_of_its_cause_a_second_later() -> None:
    lines = PacedLines()
    for number in range(3):
        lines.add("garbage", number, f"line {number}", 0.0)
    assert lines.due(0.0) == ["line 0"]
    assert lines.due(0.9) == []
    assert [lines.due(now) for now in (1.0, 1.5, 2.0, 3.0)] == [["line 1"], [], ["line 2"], []]
    assert not lines


def test_causes_do_not_wait_for_each_other() -> None:
    lines = PacedLines()
    for cause in "abc":
        lines.add(cause, "", cause, 0.0)
    assert lines.due(0.0) == ["a", "b", "c"]


def test_of_one_key_the_last_line_follows_after_its_time_with_the_count() -> None:
    lines = PacedLines()
    for number in range(5):
        lines.add("a", "key", f"line {number}", 0.0)
        if not number:
            assert lines.due(0.0) == ["line 0"]
    assert lines.due(9.9) == []
    assert lines.due(10.0) == ["line 4 (3 similar lines held back)"]
    assert lines.due(100.0) == []


def test_a_flood_of_keys_fills_no_memory_and_no_log() -> None:
    lines, logged = PacedLines(most=8), 0
    for number in range(100_000):
        now = number / 1000
        lines.add("a", number, f"line {number}", now)
        logged += len(lines.due(now))
    assert logged <= 101
    assert len(lines._waiting) <= 8
    assert len(lines._by_key) <= 12
    assert sum(int(line.partition("(")[2].split()[0]) for line in lines.due(200.0)) > 0, "what was dropped is counted"

"""Stop strings are never shown, however the text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engines.embedded.text_stream import StopFilter


def shown(pieces: list[str], *stops: str) -> tuple[str, bool]:
    stop_filter = StopFilter(stops)
    text = "".join(stop_filter.feed(piece) for piece in pieces)
    return text + stop_filter.finish(), stop_filter.stopped


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopFilter(()).feed("abc") == "abc"


def test_a_stop_string_across_pieces_ends_the_text() -> None:
    assert shown(["on", "e EN", "D two"], "END") == ("one ", True)


def test_a_false_start_is_shown_in_the_end() -> None:
    stop_filter = StopFilter(("END",))
    assert stop_filter.feed("one EN") == "one "
    assert stop_filter.feed("ough") == "ENough"
    assert stop_filter.feed(" E") == " "
    assert stop_filter.finish() == "E"
    assert not stop_filter.stopped


def test_a_beginning_inside_a_beginning_is_found() -> None:
    assert shown(["a", "a", "a", "b"], "aab") == ("a", True)


def test_the_stop_string_that_ends_first_counts() -> None:
    assert shown(["xabcd"], "abcd", "bc") == ("xa", True)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_cuts_make_no_difference(text: str, stops: list[str]) -> None:
    whole = shown([text], *stops)
    assert shown(list(text), *stops) == whole
    shown_text, stopped = whole
    assert text.startswith(shown_text)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in shown_text for stop in stops)
    if not stopped:
        assert shown_text == text

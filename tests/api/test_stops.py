from __future__ import annotations

import pytest

from staffel.api.stops import StopScanner


def run(stops: list[str], *parts: str) -> tuple[list[str], str | None]:
    scanner = StopScanner(stops)
    released = []
    for part in parts:
        text, stop = scanner.feed(part)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, scanner.flush()], None


def test_text_without_stop_strings_goes_straight_through() -> None:
    assert run([], "a", "b") == (["a", "b", ""], None)


def test_a_stop_string_inside_one_part_cuts_it() -> None:
    assert run(["END"], "one END two") == (["one "], "END")


def test_a_stop_string_that_straddles_parts_is_never_seen() -> None:
    assert run(["STOP"], "go S", "TO", "P on") == (["go ", "", ""], "STOP")


def test_a_beginning_that_comes_to_nothing_is_released() -> None:
    assert run(["STOP"], "S", "TO", "NE") == (["", "", "STONE", ""], None)


def test_a_beginning_at_the_end_of_the_text_is_released_by_flush() -> None:
    assert run(["STOP"], "a STO") == (["a ", "STO"], None)


def test_only_what_may_still_match_is_held_back() -> None:
    assert run(["aab"], "aaa") == (["a", "aa"], None)
    assert run(["aab"], "aaa", "b!") == (["a", ""], "aab")


def test_a_stop_string_that_contains_its_own_beginning() -> None:
    assert run(["abab"], "aba", "cabab") == (["", "abac"], "abab")


def test_the_first_complete_stop_string_wins_and_of_those_the_longest() -> None:
    assert run(["bcd", "c"], "abcd") == (["ab"], "c")
    assert run(["c", "bc"], "abcd") == (["a"], "bc")


@pytest.mark.parametrize("cut", range(1, 9))
def test_the_cutting_of_the_text_makes_no_difference(cut: int) -> None:
    text = "xabcabdy"
    released, stop = run(["abd"], text[:cut], text[cut:])
    assert ("".join(released), stop) == ("xabc", "abd")


def test_unarmed_it_lets_stop_strings_pass_but_remembers_beginnings() -> None:
    scanner = StopScanner(["ab"])
    assert scanner.feed("ab", armed=False) == ("ab", None)
    assert scanner.feed("a", armed=False) == ("", None)
    assert scanner.feed("b") == ("", "ab")

"""Stop strings against a search of the whole text, however it is cut into pieces."""

from __future__ import annotations

import random

import pytest

from distmk.errors import UsageError
from distmk.text.stop_strings import MAX_CHARS, MAX_STRINGS, StopStrings


def naive(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The released text and the stop string met, by trying every end."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            met = max(ended, key=len)
            return text[: end if include else end - len(met)], met
    return text, None


def may_begin(text: str, stop: list[str]) -> int:
    """The length of the longest end of `text` that begins a stop string."""
    return max((k for s in stop for k in range(1, len(s)) if text.endswith(s[:k])), default=0)


@pytest.mark.parametrize("include", [False, True])
def test_any_split_gives_the_text_of_a_search_at_once(include: bool) -> None:
    rng = random.Random(1)
    num_met = 0
    for _ in range(3000):
        letters = rng.choice(["ab", "abc", "aé🙂"])
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(30)))
        stop = ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 7))) for _ in range(rng.randrange(1, 4))]
        want, met = naive(text, stop, include)
        stops, released, pushed = StopStrings(stop, include), "", ""
        rest = text
        while rest and stops.met is None:
            size = rng.randrange(1, 5)
            piece, rest = rest[:size], rest[size:]
            released += stops.push(piece)
            pushed += piece
            # Never behind the stop string, never a part of one, and nothing held that cannot begin one.
            assert want.startswith(released), (text, stop)
            if stops.met is None:
                assert len(released) == len(pushed) - may_begin(pushed, stop), (text, stop)
        assert (released + stops.flush(), stops.met) == (want, met), (text, stop)
        assert stops.push("more") == "" if met else True
        num_met += met is not None
    assert 500 < num_met < 2900


def test_a_stop_string_begins_behind_the_tokens_without_stops() -> None:
    stops = StopStrings(["end"])
    assert stops.push("the e") == "the "
    assert stops.push("nd e", active=False) == "end e"
    assert stops.push("nd") == "nd", "a stop string contains an inactive character"
    assert stops.push("end") == ""
    assert stops.met == "end"


def test_bounds() -> None:
    """The longest is found; more than can be looked for in the time of a token are refused."""
    stop = "a" * (MAX_CHARS - 1) + "b"
    stops = StopStrings([stop] * MAX_STRINGS)
    assert stops.push("a" * (MAX_CHARS - 1)) == ""
    assert stops.push("a" * 10) == "a" * 10
    assert stops.push("b") == ""
    assert stops.met == stop
    for wrong in ([""], ["a", ""], ["a" * (MAX_CHARS + 1)], ["a"] * (MAX_STRINGS + 1)):
        with pytest.raises(UsageError, match="stop has "):
            StopStrings(wrong)

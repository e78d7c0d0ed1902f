"""The parts of the night, of which one landing runs one."""

from types import SimpleNamespace

import pytest

from tests.conftest import of_other_parts


def night_test():
    return SimpleNamespace(get_closest_marker={"night": True}.get)


def test_each_test_with_parameters_is_in_one_part_of_three():
    by_day = SimpleNamespace(get_closest_marker={}.get, callspec=None)
    others = [by_day, night_test()]
    kinds = [night_test() for _ in range(7)]
    for test in kinds:
        test.callspec = None  # its parameters

    def part(number):
        left_out = of_other_parts([*others, *kinds], f"{number}/3")
        return [test for test in (*others, *kinds) if test not in left_out]

    for number in (1, 2, 3):
        assert part(number) == [*others, *kinds[number - 1 :: 3]]
    assert of_other_parts([*others, *kinds], "") == []


@pytest.mark.parametrize("text", ["4/3", "0/3", "1", "a third"])
def test_no_part(text):
    with pytest.raises(pytest.UsageError, match=f"NIGHT_PART is '{text}'"):
        of_other_parts([], text)

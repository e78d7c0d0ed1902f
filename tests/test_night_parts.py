"""The parts of the night, of which one landing runs one."""

from types import SimpleNamespace

import pytest

from tests.conftest import of_other_parts


def item(name, night=True, parameters=True):
    made = SimpleNamespace(name=name, get_closest_marker=lambda marker: night)
    if parameters:
        made.callspec = None
    return made


def test_each_test_with_parameters_is_in_one_part_of_three():
    kinds = [item(f"kind {i}") for i in range(7)]
    others = [item("a whole run", parameters=False), item("by day", night=False)]
    parts = {
        part: [
            each
            for each in (*others, *kinds)
            if each not in of_other_parts([*others, *kinds], part)
        ]
        for part in ("1/3", "2/3", "3/3")
    }
    assert all(kept[:2] == others for kept in parts.values())
    assert [kept[2:] for kept in parts.values()] == [
        kinds[0::3],
        kinds[1::3],
        kinds[2::3],
    ]
    assert of_other_parts([*others, *kinds], "") == []
    for wrong in ("4/3", "0/3", "1", "a third"):
        with pytest.raises(pytest.UsageError, match=f"NIGHT_PART is '{wrong}'"):
            of_other_parts(kinds, wrong)

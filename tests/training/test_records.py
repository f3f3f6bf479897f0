"""Descriptions of runs, compared."""

from espformer.training.records import changes


def test_what_differs_between_two_runs():
    asked = {"seed": 1, "data": {"batch_size": 8, "group_by_length": False}, "clip": 2.0}
    there = {"seed": 2, "data": {"batch_size": 8}}
    assert changes(asked, there) == [("clip", 2.0, None), ("seed", 1, 2)]


def test_a_switch_that_is_on_differs_from_one_that_did_not_exist():
    assert changes({"group_by_length": True}, {}) == [("group_by_length", True, None)]

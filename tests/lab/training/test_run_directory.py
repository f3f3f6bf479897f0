"""Descriptions of runs, compared."""

import pytest
from typer.testing import CliRunner

from espformer.lab.cli import app
from espformer.lab.errors import RunError
from espformer.lab.training.experiments import plan
from espformer.lab.training.run_directory import changes
from espformer.lab.training.trainer import execute


def test_what_differs_between_two_runs():
    asked = {"seed": 1, "data": {"batch_size": 8, "group_by_length": False}, "clip": 2.0}
    there = {"seed": 2, "data": {"batch_size": 8}}
    assert changes(asked, there) == [("clip", 2.0, None), ("seed", 1, 2)]


@pytest.mark.parametrize("part", [{"model": {"vit": {}}}, {"mechanism": {"esp": {}}}])
@pytest.mark.parametrize("value", [False, 0, 0.0, ""])
def test_arguments_that_were_not_given_are_not_off(part, value):
    (name, spec), *_ = part.items()
    (kind, _), *_ = spec.items()
    assert changes({name: {kind: {"a": value, "b": 1}}}, {name: {kind: {"b": 1}}})


def test_zero_is_not_off():
    there = {"schedule": {"name": "milestones"}}
    assert changes({"schedule": {"name": "milestones", "factor": 0.0}}, there)


def test_a_switch_that_is_on_differs_from_one_that_did_not_exist():
    on = {"data": {"batch_size": 8, "group_by_length": True}}
    assert changes(on, {"data": {"batch_size": 8}}) == [("data.group_by_length", True, None)]


def test_runs_older_than_the_unit_of_temperatures_had_absolute_ones():
    old = {"mechanism": {"esp": {"sort_temperature": 0.1}}}
    new = {"mechanism": {"esp": {"sort_temperature": 0.1, "temperature_unit": "absolute"}}}
    spread = {"mechanism": {"esp": {"sort_temperature": 0.1, "temperature_unit": "spread"}}}
    assert changes(new, old) == []
    assert changes(spread, old) == [("mechanism.esp.temperature_unit", "spread", None)]


def test_a_run_with_other_settings_does_not_stand_for_the_one_asked(recipe, tiny, tmp_path):
    short = ["trainer.epochs=1"]
    (job,) = plan(recipe, str(tiny), tmp_path, seeds=[0], only=["plain", "learnt"], overrides=short)
    execute(job.run, job.directory, progress=False)
    with pytest.raises(RunError, match=r"trainer\.epochs is 1 there and 2 here.*another --output"):
        plan(recipe, str(tiny), tmp_path, seeds=[0])
    same = plan(recipe, str(tiny), tmp_path, seeds=[0], only=["learnt"], overrides=short)
    assert [job.state for job in same] == ["finished", "new"]
    command = ["reproduce", str(tiny), "--seeds", "0", "--output", str(tmp_path), "--dry-run"]
    failure = CliRunner().invoke(app, command).exception
    assert isinstance(failure, RunError), "what would be done is not done either"

"""Kept results: files, merging, claims and their tests, and the page made of them."""

import dataclasses
import functools
import math
import random
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from espformer.lab.cli import app
from espformer.lab.errors import ConfigError, RunError, UserError
from espformer.lab.machine import revision
from espformer.lab.recipes.recipe import load_recipe, recipe_names
from espformer.lab.recipes.yaml_schema import plain
from espformer.lab.results.claims import CLAIMS, Claim, compare, verdict
from espformer.lab.results.claims import SCORES as SCORE_NAMES
from espformer.lab.results.page import first_page, paper_gap, results_page
from espformer.lab.results.result_files import (
    Results,
    beside_saved,
    merge_files,
    read_file,
    save_file,
)
from espformer.lab.results.result_tables import markdown
from espformer.lab.training.experiments import plan

ROOT = Path(__file__).parents[3]
SCORES = {"transformer": 90.0, "sinkformer": 95.0, "espformer": 96.0, "espformer-soft": 97.0}


@functools.cache
def patch_sizes():
    return load_recipe("mnist-patch-size")


def run(label, setting, seed, **changes):
    """A result as `collect` gives it, of a run of the patch-size recipe."""
    recipe = patch_sizes()
    noise = random.Random(f"{label}{setting}{seed}").gauss(0, 0.1)
    return {
        "recipe": recipe.name, "mechanism": label, "setting": setting, "seed": seed,
        "score": "accuracy", "scores": {"test": SCORES[label] + noise}, "epochs": 45,
        "seconds": 60.0, "parameters": 1234, "samples_per_second": 1e4, "device": "a card",
        "versions": {"torch": "2", "espformer": "0.1", "revision": "abc"}, "command": "a command",
        "data": {"differences": ["a part of it"]},
        "attention": {"row_error": 0.1, "column_error": 0.2, "entropy": 0.5},
        "config": plain(recipe.run(label, setting, seed)) | changes,
    }  # fmt: skip


def runs(seeds=(0, 1, 2), labels=tuple(SCORES), settings=("patch=4", "patch=7")):
    return [run(label, s, seed) for label in labels for s in settings for seed in seeds]


def results(made, **conditions):
    made = [{**one, **conditions} for one in made]
    return Results("mnist-patch-size", "MNIST, impact of patch size", made)


def test_a_file_gives_back_what_was_saved(tmp_path):
    made = runs()
    path = save_file(results(made), tmp_path / "mnist-patch-size.json")
    key = lambda r: (r["setting"], r["mechanism"], r["seed"])  # noqa: E731
    assert read_file(path).runs == sorted(made, key=key)
    text = path.read_text()
    assert text.count('"abc"') == 1, "what all runs share is there once"
    assert len([line for line in text.splitlines() if '"seed"' in line]) == len(made)


def test_a_file_does_not_tell_where_data_lay(tmp_path):
    made = results(runs(seeds=[0]), data={"source": str(tmp_path / "mnist"), "differences": []})
    path = save_file(made, tmp_path / "mnist-patch-size.json")
    assert str(tmp_path) not in path.read_text()
    assert {one["data"]["source"] for one in read_file(path).runs} == {"mnist"}


def test_parts_are_merged_and_newer_runs_win(tmp_path):
    path = tmp_path / "mnist-patch-size.json"
    save_file(results(runs(seeds=(0, 1)), command="first"), path)
    newer = runs(seeds=(1, 2))
    newer[0]["scores"]["test"] = 12.0
    part = results(newer, command="second", device="another card")
    other = save_file(part, tmp_path / "part" / "results.json", merge=False)
    assert merge_files([other], tmp_path) == [path]
    merged = read_file(path)
    assert len(merged.runs) == 3 * len(SCORES) * 2
    made_by = {(run["seed"], run["command"], run["device"]) for run in merged.runs}
    assert made_by == {
        (0, "first", "a card"), (1, "second", "another card"), (2, "second", "another card"),
    }  # fmt: skip
    changed = [r for r in merged.runs if r["scores"]["test"] == 12.0]
    assert [(r["mechanism"], r["seed"]) for r in changed] == [("transformer", 1)]


def test_runs_of_one_row_have_the_same_settings(tmp_path):
    path = save_file(results(runs(seeds=(0,))), tmp_path / "x.json")
    short = runs(seeds=(1,))
    for one in short:
        one["config"]["trainer"] = {**one["config"]["trainer"], "epochs": 5}
    with pytest.raises(RunError, match=r"trainer\.epochs is 45 there and 5 here"):
        save_file(results(short), path)
    assert len(read_file(path).runs) == len(SCORES) * 2, "nothing was changed"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"experiment": "x", "title": "", "commands": [], "runs": [1]}']
)
def test_files_that_are_none_are_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(RunError, match="not a file of results"):
        read_file(path)
    with pytest.raises(RunError, match="no such file"):
        read_file(tmp_path / "none.json")
    with pytest.raises(UserError, match="no results there"):
        results_page(tmp_path / "empty")


def test_the_section_says_what_happened():
    recipe = load_recipe("mnist-patch-size")
    made = runs()
    for one in made:
        one["config"]["trainer"] = {**one["config"]["trainer"], "epochs": 15}
    text = markdown(recipe, made, level=2)
    assert text.startswith("## MNIST, impact of patch size\n")
    assert "- Made on a card; precision 32-true; torch 2; espformer 0.1; commit abc.\n" in text
    assert "\n- command: `a command`\n" in text
    assert "| `trainer.epochs` | 15 | 45 |" in text
    assert "settings not run: patch=1, patch=2, patch=14, patch=28" in text
    assert "data: a part of it" in text
    (claim,) = [line for line in text.splitlines() if "more accurate than softmax" in line]
    assert "(the paper) | ESP − softmax | +" in claim
    assert "| 6 | < 0.0001 | ✓ held (rows with different learning rates) | patch=4 +" in claim
    assert recipe.note.splitlines()[0] in text
    assert "ESP attention is more accurate than differential" not in text, "it was not run"
    assert "24 runs, seeds 0, 1, 2; 24.0 min of training, summed over runs.\n" in text
    assert "| softmax (`transformer`) | 3 | " in text
    assert "`espformer recipes mnist-patch-size`. `espformer` has the paper's settings.\n" in text


def test_runs_that_lost_the_time_before_a_stop_are_left_out_of_the_time():
    made = runs(labels=("espformer",))
    made[0] |= {"continued": True, "seconds": 3.0}
    made[1] |= {"continued": True, "seconds": 120.0, "seconds_before": 90.0}
    text = markdown(load_recipe("mnist-patch-size"), made)
    assert "| 60 to 120 |" in text
    assert (
        "6.0 min of training, summed over runs. Neither this nor the seconds per run count a run "
        "that went on after a stop"
    ) in text


def test_parts_of_an_experiment_keep_their_conditions():
    made = runs(seeds=(0, 1), labels=("espformer",))
    for one in made:
        if one["setting"] == "patch=7" and one["seed"] == 1:
            one.update(command="later", versions={**one["versions"], "revision": "def"})
    text = markdown(load_recipe("mnist-patch-size"), made)
    assert (
        "- 4 runs, seeds 0, 1; 4.0 min of training, summed over runs.\n"
        "- Made on a card; precision 32-true; torch 2; espformer 0.1.\n"
        "- 3 runs, patch=4, patch=7, seeds 0, 1; commit abc: `a command`\n"
        "- 1 run, patch=7, seed 1; commit def: `later`\n"
    ) in text
    for one in made:
        one["command"] = f"do --jobs {one['seed']} --save results --skip-saved x=1"
    text = markdown(load_recipe("mnist-patch-size"), made)
    assert text.count("`do x=1`") == 2, "how many at once and where to does not matter"


def test_settings_that_differ_are_told_with_whom_they_belong_to():
    made = runs(seeds=(0,))
    for one in made:
        epochs = 10 if one["setting"] == "patch=4" else 20
        one["config"]["trainer"] = {**one["config"]["trainer"], "epochs": epochs}
        one["config"]["data"] = {
            **one["config"]["data"], "batch_size": 7 if one["mechanism"] == "espformer" else 8
        }  # fmt: skip
    text = markdown(load_recipe("mnist-patch-size"), made)
    assert "| `trainer.epochs` | 10 (patch=4), 20 (patch=7) | 45 |" in text
    assert "| `data.batch_size` | 8 (all but ESP), 7 (ESP) | 100 |" in text


def test_a_copied_recipe_is_compared_with_the_paper(tmp_path):
    """What was changed in the file of the copy differs from the paper as an override does."""
    text = (ROOT / "src/espformer/lab/recipes/mnist-patch-size.yaml").read_text()
    assert text.count("epochs: 45") == 1
    copy = tmp_path / "mine.yaml"
    copy.write_text(text.replace("epochs: 45", "epochs: 9").replace("[35, 41]", "[7]"))
    mine = load_recipe(copy)
    made = [{**one, "config": plain(mine.run("espformer", "patch=4", 0))} for one in runs([0])]
    section = markdown(mine, [made[-4]])
    assert (made[-4]["mechanism"], made[-4]["setting"]) == ("espformer", "patch=4")
    assert "| `trainer.epochs` | 9 | 45 |" in section
    assert "`recipe`" not in section
    copy.write_text(text.replace("paper: mnist-patch-size", "paper: mnist-patch-sizes"))
    with pytest.raises(ConfigError, match=r"paper: no table .*did you mean 'mnist-patch-size'"):
        load_recipe(copy)


def test_overrides_of_the_runs_before_are_told_one_by_one():
    recipe = load_recipe("cats-dogs-anneal")
    said = ["trainer.cuda_graph=true", "trainer.epochs=100", "optimizer.learning_rate=5e-4"]
    asked = plain(recipe.run("espformer", seed=0))
    asked["start"] = {**asked["start"], "overrides": said}
    made = [{**run("espformer", "patch=4", 0), "setting": asked["setting"], "config": asked}]
    text = markdown(recipe, made)
    assert "| `trainer.epochs` of the runs before | 100 | as `cats-dogs` |" in text
    assert "| `optimizer.learning_rate` of the runs before | 0.0005 | as `cats-dogs` |" in text
    assert "cuda_graph" not in text


def planned(tmp_path, **options):
    recipe = load_recipe("mnist-patch-size")
    return recipe, plan(recipe, recipe.name, tmp_path / "runs", **options)


def test_saved_runs_are_left_out_when_asked(tmp_path):
    recipe, work = planned(tmp_path, only=["patch=4", "espformer", "transformer"])
    assert len(work) == 6
    save_file(results(runs(seeds=(0, 2))), tmp_path / "mnist-patch-size.json")
    assert beside_saved(recipe, work, tmp_path, skip=False) == work
    assert beside_saved(recipe, work, tmp_path / "elsewhere", skip=True) == work
    left = beside_saved(recipe, work, tmp_path, skip=True)
    assert [(job.run.label, job.run.seed) for job in left] == [("transformer", 1), ("espformer", 1)]
    with pytest.raises(ConfigError, match="--save DIR"):
        beside_saved(recipe, work, None, skip=True)


def test_saved_runs_with_other_settings_do_not_stand_for_those_asked(tmp_path):
    save_file(results(runs(seeds=(0,))), tmp_path / "mnist-patch-size.json")
    only = {"seeds": [0], "only": ["patch=4", "espformer"]}
    recipe, work = planned(tmp_path, overrides=["trainer.epochs=5"], **only)
    with pytest.raises(
        RunError, match=r"espformer seed 0 .*trainer\.epochs is 45 there and 5 here"
    ):
        beside_saved(recipe, work, tmp_path, skip=True)
    assert beside_saved(recipe, work, tmp_path, skip=False) == work
    recipe, work = planned(tmp_path, overrides=["trainer.cuda_graph=true"], **only)
    assert beside_saved(recipe, work, tmp_path, skip=True) == [], "only computed in another way"


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.stem)
def test_the_commands_behind_these_results_would_leave_them_out(path, tmp_path):
    saved = read_file(path)
    if saved.experiment not in recipe_names():
        pytest.skip("made without a recipe")
    recipe = load_recipe(saved.experiment)
    for one in saved.runs:
        overrides = [word for word in shlex.split(one["command"]) if re.match(r"\w+\.\S+=", word)]
        options = {"seeds": [one["seed"]], "only": [one["mechanism"], one["setting"]]}
        work = plan(recipe, recipe.name, tmp_path, overrides=overrides, **options)
        assert work
        assert beside_saved(recipe, work, path.parent, skip=True) == []


def test_what_others_start_from_is_left_out_with_them(tmp_path):
    recipe = load_recipe("mnist-hardening")
    work = plan(recipe, recipe.name, tmp_path / "runs", seeds=[0, 1])
    assert len(work) == 2 * (7 + 2)
    saved = [
        {"setting": "default", "mechanism": label, "seed": 0, "config": plain(recipe.run(label))}
        for label in recipe.mechanisms
    ]
    save_file(Results(recipe.name, recipe.title, saved), tmp_path / "mnist-hardening.json")
    left = beside_saved(recipe, work, tmp_path, skip=True)
    assert len(left) == 9
    assert {job.run.seed for job in left} == {1}


def test_what_cannot_join_saved_results_is_refused_before_it_runs(tmp_path):
    save_file(results(runs(seeds=(0, 2))), tmp_path / "mnist-patch-size.json")
    options = {"only": ["patch=4", "espformer"], "overrides": ["trainer.epochs=5"]}
    recipe, work = planned(tmp_path, seeds=[1], **options)
    with pytest.raises(RunError, match=r"trainer\.epochs is \d+ there and \d+ here"):
        beside_saved(recipe, work, tmp_path, skip=False)
    recipe, work = planned(tmp_path, seeds=[0, 2], **options)
    assert beside_saved(recipe, work, tmp_path, skip=False) == work, "these replace all of the row"


def test_parts_that_end_at_the_same_time_are_all_kept(tmp_path):
    kept = tmp_path / "kept" / "mnist-patch-size.json"
    parts = [results(runs(seeds=(seed,), labels=("espformer",))) for seed in range(8)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: save_file(part, kept), parts))
    assert {run["seed"] for run in read_file(kept).runs} == set(range(8))
    assert [path.name for path in kept.parent.iterdir()] == [kept.name], "no lock is left behind"


def test_learnt_temperatures_are_told():
    made = runs(labels=("espformer",))
    for one, t in zip(made, (0.01, 0.02, 0.03, 0.02, 0.02, 0.02), strict=True):
        one["learnt_sort_temperatures"] = [t]
    assert "0.01 to 0.03 |" in markdown(load_recipe("mnist-patch-size"), made)


def test_paired_comparison_against_a_printed_table():
    """The quantile of Student's distribution with 2 degrees of freedom is 4.3027 at 97.5 %."""
    made = [
        {"mechanism": label, "setting": "s", "seed": seed, "scores": {"test": value}}
        for seed, difference in enumerate((1.0, 2.0, 3.0))
        for label, value in (("a", 50.0 + difference), ("b", 50.0))
    ]
    found = compare(Claim("a beats b", ("a", "test"), ("b", "test")), made)
    half = 4.3027 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), abs=1e-4)
    # t = 2 √3, whose tail has a closed form: 1 - t / √(2 + t²).
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))


@pytest.mark.parametrize(("margin", "p"), [(None, 0.0), (0.5, 1.0)])
def test_differences_that_are_all_the_same(margin, p):
    made = [
        {"mechanism": label, "setting": "s", "seed": seed, "scores": {"test": value}}
        for seed in range(3)
        for label, value in (("a", 49.5), ("b", 50.0))
    ]
    found = compare(Claim("a beats b", ("a", "test"), ("b", "test"), margin=margin), made)
    assert (found.low, found.high, found.p) == (-0.5, -0.5, p)


def test_paired_comparison_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    claim = CLAIMS["mnist-patch-size"][0]
    made = runs()
    # Order and unpaired runs must not matter.
    random.Random(0).shuffle(made)
    found = compare(claim, [*made, run("espformer", "patch=14", 7)])
    by_pair = {(r["mechanism"], r["setting"], r["seed"]): r["scores"]["test"] for r in made}
    pairs = [(s, seed) for s in ("patch=4", "patch=7") for seed in (0, 1, 2)]
    ours, theirs = ([by_pair[label, *p] for p in pairs] for label in ("espformer", "transformer"))
    expected = stats.ttest_rel(ours, theirs)
    interval = expected.confidence_interval()
    assert found.pairs == 6
    assert found.by_setting["patch=7"] == pytest.approx(
        sum(a - b for a, b in list(zip(ours, theirs, strict=True))[3:]) / 3
    )
    assert sorted(found.by_setting) == ["patch=4", "patch=7"]
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    margin = compare(dataclasses.replace(claim, margin=0.5), made)
    shifted = [value + 0.5 for value in ours]
    assert margin.p == pytest.approx(stats.ttest_rel(shifted, theirs).pvalue)


@pytest.mark.parametrize(
    ("differences", "margin", "expected"),
    [
        ((1.0, 1.1, 0.9), None, "held"),
        ((-1.0, -1.1, -0.9), None, "did not hold, the opposite is seen"),
        ((1.0, 0.2, 0.6), None, "not decided"),
        ((0.1, 0.0, -0.1), None, "not decided; any difference is below 0.5 points"),
        ((0.1, 0.0, -0.1), 0.5, "held within 0.5 points"),
        ((-0.2, -0.21, -0.19), 0.5, "held within 0.5 points; a smaller loss is seen"),
        ((1.0, 1.1, 0.9), 0.5, "held, it is even better"),
        ((-2.0, -2.1, -1.9), 0.5, "did not hold, a loss of more than 0.5 points"),
        ((-2.0, 1.0, 0.5), 0.5, "not decided"),
        ((-0.5, -0.6, -0.4), 0.5, "not decided; a loss is seen, perhaps within 0.5 points"),
        ((0.5,), None, "a single pair decides nothing"),
    ],
)
def test_verdicts(differences, margin, expected):
    made = [
        {"mechanism": label, "setting": "s", "seed": seed, "scores": {"test": value}}
        for seed, difference in enumerate(differences)
        for label, value in (("a", 50.0 + difference), ("b", 50.0))
    ]
    claim = Claim("a beats b", ("a", "test"), ("b", "test"), margin=margin)
    found = compare(claim, made)
    outcome, words = verdict(claim, found)
    assert words == expected
    assert compare(claim, made[:1]) is None
    if len(differences) > 1:
        assert (outcome == "open") == (found.p >= 0.05), "p and the interval say the same"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {}, True),
        ({"batch_size": 8}, {"batch_size": 8, "group_by_length": False, "workers": 2}, True),
        ({"batch_size": 8}, {"batch_size": 8, "group_by_length": True}, False),
        ({"batch_size": 8}, {"batch_size": 9}, False),
        ({"set": "digits"}, {"set": {"digits": {"validation": 0.0}}}, True),
        ({"set": "digits"}, {"set": {"digits": {"validation": 0.1}}}, False),
        ({"set": "digits"}, {"set": "mnist"}, False),
        ({"set": {"imdb": {}}}, {"set": {"imdb": {"split": "published"}}}, True),
        ({"set": {"imdb": {"split": "pooled"}}}, {"set": "imdb"}, False),
        ({"set": "mine"}, {"set": {"mine": {"part": 0}}}, False),
    ],
)
def test_pairs_with_different_batches_are_marked(one, other, same):
    made = [
        {
            "mechanism": label, "setting": "s", "seed": seed, "scores": {"test": value + seed / 9},
            "config": {"data": data},
        }
        for seed in range(3)
        for label, value, data in (("a", 51.0, one), ("b", 50.0, other))
    ]  # fmt: skip
    claim = Claim("a beats b", ("a", "test"), ("b", "test"))
    found = compare(claim, made)
    assert ("different batches" in verdict(claim, found).words) == (not same)


@pytest.mark.parametrize(("score", "marked"), [("test", True), ("start", False)])
def test_pairs_with_different_learning_rates_are_marked(score, marked):
    made = [
        {
            "mechanism": label, "setting": "s", "seed": seed, "scores": {score: value + seed / 9},
            "config": {"optimizer": {"learning_rate": rate}},
        }
        for seed in range(3)
        for label, value, rate in (("a", 51.0, 2e-3), ("b", 50.0, 1e-3), ("c", 50.5, 2e-3))
    ]  # fmt: skip
    for other, different in (("b", marked), ("c", False)):
        claim = Claim(f"a beats {other}", ("a", score), (other, score))
        words = verdict(claim, compare(claim, made)).words
        assert words == "held" + " (rows with different learning rates)" * different


def test_all_claims_are_judged_in_their_section_and_counted(tmp_path):
    save_file(results(runs([*range(8)])), tmp_path / "mnist-patch-size.json")
    claims = CLAIMS["mnist-patch-size"]
    text = results_page(tmp_path)
    begin, section, rules = re.split(
        r"^## MNIST, impact of patch size$|^## How a claim is judged$", text, flags=re.MULTILINE
    )
    assert "## The paper's claims" in begin
    lines = [line for line in section.splitlines() if re.search(r"\| [✓✗?] ", line)]
    rows = set(SCORES)
    asked = [claim for claim in claims if {claim.row[0], claim.other[0]} <= rows]
    assert len(lines) == len(asked) > 2
    for line, claim in zip(lines, asked, strict=True):
        assert claim.says[1:] in line
    rules = " ".join(rules.split())
    assert f"Of the {len(asked)} claims on this page, {len(asked)} held (✓), 0 did not (✗)" in rules
    assert "lies above the threshold" in rules


def test_claims_that_the_runs_suggested_are_marked():
    claim = dataclasses.replace(CLAIMS["mnist-patch-size"][0], post_hoc=True, by="ours")
    assert claim.source == "ours, asked after seeing these runs"
    late = {(c.row[0], c.other[0]) for c in CLAIMS["mnist-patch-size"] if c.post_hoc}
    assert late == {("espformer-learnt", "sinkformer"), ("diff-espformer", "sinkformer")}
    assert "(ours, asked after seeing these runs)" in results_page(ROOT / "results")


def test_every_claim_is_about_rows_of_its_recipe():
    for name, claims in CLAIMS.items():
        if name.startswith("finetune-"):  # whose rows are named on the command line
            continue
        recipe = load_recipe(name)
        for claim in claims:
            for label, score in (claim.row, claim.other):
                assert label in recipe.mechanisms
                expected = recipe.run(label)
                assert score != "hard" or expected.harden
                assert score != "start" or expected.start is not None
                assert score in SCORE_NAMES
            for setting in claim.settings or ():
                assert setting in recipe.grid.settings
    asked = {name for name, claims in CLAIMS.items() if any(c.by == "the paper" for c in claims)}
    paper = {name for name in recipe_names() if load_recipe(name).paper is not None}
    # Base models and times: nothing is claimed of them that has a score.
    assert paper - asked == {"iwslt14", "runtime"}


def test_a_claim_about_two_settings_pairs_seeds():
    made = [
        {"mechanism": "a", "setting": setting, "seed": seed, "scores": {"test": value + seed}}
        for setting, value in (("one", 60.0), ("two", 50.0), ("three", 0.0))
        for seed in range(3)
    ]
    claim = Claim("one beats two", ("a", "test"), ("a", "test"), settings=("one", "two"))
    found = compare(claim, made)
    assert (found.pairs, found.mean) == (3, 10.0)
    assert compare(claim, made[3:]) is None


@pytest.mark.parametrize("rate", [3e-5, 5e-4])
def test_the_first_page_marks_training_that_is_not_the_papers(rate):
    recipe = load_recipe("cats-dogs")
    made = []
    for label in ("espformer", "transformer"):
        config = plain(recipe.run(label, "200 images", 0))
        config["optimizer"]["learning_rate"] = rate
        made.append({
            "mechanism": label, "setting": "200 images", "seed": 0, "scores": {"test": 60.0},
            "config": config,
        })  # fmt: skip
    (row,) = [line for line in first_page([(recipe, made)]) if "more accurate than softmax" in line]
    assert (")¹ |" in row) == (rate != 3e-5)


def test_the_first_page_puts_our_gap_beside_the_papers():
    """The paper's is of the settings that were run, and what was not run says so."""
    recipe = load_recipe("cats-dogs")
    made = [
        {"mechanism": label, "setting": setting, "seed": seed, "scores": {"test": value + noise}}
        for setting in ("200 images", "2000 images")
        for seed, noise in enumerate((0.0, 0.1, 0.3))
        for label, value in (("espformer", 70.0), ("transformer", 69.0 + noise))
    ]
    lines = first_page([(recipe, made)])
    (row,) = [line for line in lines if "more accurate than softmax" in line]
    gap = ((55.66 - 49.71) + (71.49 - 57.25)) / 2
    experiment = "[Cats and Dogs, by number of training images](#cats-and-dogs-by-"
    assert row.startswith("| ESP attention is more accurate than softmax attention | " + experiment)
    assert f"| {gap:+.2f} | +0.87 (" in row
    assert row.endswith("| ✓ held |")
    text = " ".join(lines)
    assert "of its 1 claims that were tested here, 1 held (✓), 0 did not (✗)" in text
    assert "Cats and Dogs, by number of training images (2);" in text, "differential and Sinkhorn"
    assert "IMDb, sentiment of film reviews (3);" in text
    assert "our defaults instead" not in text, "no run of our defaults"
    (row,) = [line for line in lines if "), 2000 images |" in line]
    assert row.endswith("| 3 | – | 69.27 (57.25) | – (67.34) | – (69.56) | 70.13 (71.49) | – | – |")
    assert "single pair" not in text
    assert "are not decided (?), 1 of them because they have a single pair of runs" in " ".join(
        first_page([(recipe, made[:2])])
    )
    assert "Of the 1 that held, 0 rest on two or three pairs of runs." in text
    few = [run for run in made if run["setting"] == "200 images"]
    assert "Of the 1 that held, 1 rest on" in " ".join(first_page([(recipe, few)]))
    assert first_page([]) == []
    former = [{**run, "mechanism": "former name", "setting": "5000 images"} for run in made[:2]]
    assert first_page([(recipe, [*made, *former])]) == lines, "rows that the recipe has no more"
    claim = CLAIMS["cats-dogs-slicers"][-1]
    assert paper_gap(claim, load_recipe("cats-dogs-slicers")) == pytest.approx(79.47 - 77.75)
    figure = CLAIMS["mnist-patch-size"][0]
    assert paper_gap(figure, load_recipe("mnist-patch-size")) is None


def scored(values):
    """Results of seeds 0, 1, ... from (score before fine-tuning, score after it) by label."""
    return [
        {
            "mechanism": label, "setting": "default", "seed": seed,
            "scores": {"start": start, "test": test},
        }
        for label, pairs in values.items()
        for seed, (start, test) in enumerate(pairs)
    ]  # fmt: skip


def test_claims_that_were_not_run_are_those_tested_on_other_data():
    """The paper's claims about IWSLT'14, asked of Multi30k: what became of them is counted."""
    run = load_recipe("digits"), scored({"espformer": [(0, 1)], "transformer": [(0, 2)]})
    assert first_page([run]) == [], "no claim of the paper was tested"
    patches = [(load_recipe("mnist-patch-size"), runs())]
    assert "on other data" not in " ".join(first_page(patches))
    instead = load_recipe("multi30k-plug-and-play")
    made = scored({
        "transformer": [(33.0, 34.0), (33.1, 34.2), (33.2, 34.4)],
        "sinkformer": [(30.0, 33.0), (30.1, 33.3), (30.2, 33.5)],
        "espformer": [(31.0, 33.1), (31.2, 33.2), (31.3, 33.6)],
    })  # fmt: skip
    lines = first_page([*patches, (instead, made)])
    text = " ".join(lines)
    assert "but 4 of these were tested [on other data](#claims-that-were-not-run)" in text
    assert "where 1 held." in text
    begin = lines.index("### Claims that were not run")
    assert "IWSLT'14, plug-and-play and fine-tuning (6)" in " ".join(lines[begin:])
    assert "1 held (✓), 2 did not (✗), and 1 are not decided (?)." in " ".join(lines[begin:])
    (row,) = [line for line in lines[begin:] if "better than Sinkhorn attention before" in line]
    assert "fine-tuning | +0.02 | +1.07 (" in row
    assert row.endswith("| ✓ held |")


def test_runs_that_did_not_learn_are_marked():
    """One of two runs at chance: neither its mean nor its distance to others says anything."""
    made = [
        {"mechanism": label, "setting": "published", "seed": seed, "scores": {"test": value}}
        for label, values in (("difftransformer", (74.6, 50.0)), ("espformer", (86.4, 86.0)))
        for seed, value in enumerate(values)
    ]
    lines = first_page([(load_recipe("imdb"), made)])
    (row,) = [line for line in lines if line.startswith("| [IMDb]")]
    assert "| 62.30² (85.45) |" in row
    assert "² marks means of runs" in " ".join(lines)
    (row,) = [line for line in lines if "more accurate than differential" in line]
    assert "| too uncertain to say (-129.85 to +177.65) | ? not decided |" in row


def test_the_page_of_this_repository_is_made_of_its_results():
    page = ROOT / "RESULTS.md"
    if not page.exists():
        pytest.skip("not a checkout")
    assert page.read_text(encoding="utf-8") == results_page(ROOT / "results", page)


def test_the_command_adds_writes_and_checks(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    save_file(results(runs()), tmp_path / "runs" / "results.json")
    call = CliRunner().invoke
    done = call(app, ["results", "runs/results.json"])
    assert done.exit_code == 0, done.output
    picture = ["results/mnist-patch-size.png"] if find_spec("matplotlib") else []
    assert done.output.split() == ["results/mnist-patch-size.json", *picture, "RESULTS.md"]
    page = (tmp_path / "RESULTS.md").read_text()
    assert "impact of patch size" in page
    assert ("(results/mnist-patch-size.png)" in page) == bool(picture)
    assert call(app, ["results", "--check"]).exit_code == 0
    (tmp_path / "RESULTS.md").write_text("edited by hand")
    assert isinstance(call(app, ["results", "--check"]).exception, RunError)


def test_patch_sizes_are_drawn_from_results(tmp_path):
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    path = save_file(results(runs()), tmp_path / "results.json")
    target = tmp_path / "patch-size.png"
    done = CliRunner().invoke(app, ["plot", "patch-size", str(path), "--to", str(target)])
    assert done.exit_code == 0, done.output
    assert target.stat().st_size > 5000
    wrong = {"softness": path, "patch-size": ROOT / "results" / "digits.json"}
    for figure, file in wrong.items():
        error = CliRunner().invoke(app, ["plot", figure, str(file), "--to", str(target)]).exception
        assert isinstance(error, UserError)
        assert f"plot {figure} draws those of mnist-" in str(error)


def test_results_without_a_recipe_have_their_section(tmp_path):
    made = results(runs(labels=("espformer",)))
    save_file(dataclasses.replace(made, experiment="mine", title="Mine"), tmp_path / "mine.json")
    text = results_page(tmp_path)
    assert "## Mine" in text
    assert "| ESP (`espformer`) | 3 |" in text


def test_revision_can_be_told(monkeypatch):
    monkeypatch.setenv("ESPFORMER_REVISION", "v1")
    assert revision() == "v1"
    monkeypatch.delenv("ESPFORMER_REVISION")
    monkeypatch.setenv("PATH", "")
    assert revision() is None


def test_pairs_with_different_precision_are_marked():
    made = [
        {
            "mechanism": label, "setting": "s", "seed": seed, "scores": {"test": value + seed / 9},
            "config": {"trainer": {"precision": precision}},
        }
        for seed in range(3)
        for label, value, precision in (("a", 51.0, "32-true"), ("b", 50.0, "bf16-mixed"))
    ]  # fmt: skip
    claim = Claim("a beats b", ("a", "test"), ("b", "test"))
    assert verdict(claim, compare(claim, made)).words == "held (rows with different precision)"

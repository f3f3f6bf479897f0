"""One quick demonstration for all tests of the page: five small models, two of them annealed."""

import contextlib
import io
from types import SimpleNamespace

import pytest

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")

TINY = ("trainer.epochs=2", "trainer.limit_batches=3", "trainer.limit_eval_batches=2")


@pytest.fixture(scope="session")
def demonstration(tmp_path_factory):
    """Its folder, its exit code and what it printed."""
    from espformer.lab import demo
    from espformer.lab.report import inspection

    folder = tmp_path_factory.mktemp("demo") / "made" / "by the demo"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(inspection, "SCORED", 48)
        patch.setattr(demo, "QUICK", TINY)
        patch.setenv("COLUMNS", "80")  # the table must fit a small terminal
        code = demo.main(["--quick", "--output", str(folder)])
    return SimpleNamespace(folder=folder, code=code, text=printed.getvalue())


@pytest.fixture(scope="session")
def page(demonstration):
    """The page it wrote."""
    return demonstration.folder / "report.html"


@pytest.fixture(scope="session")
def runs(demonstration):
    """Its runs, opened, by label."""
    from espformer.lab.report.inspection import open_run

    paths = (demonstration.folder / "runs" / "digits" / "default").glob("*/seed-0")
    return {run.label: run for run in map(open_run, sorted(paths))}

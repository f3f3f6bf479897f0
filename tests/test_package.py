"""The package as a whole: what it exports, what it needs, and which way its imports point."""

import ast
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import RENAMED, SLOW
from tests.processes import run_beside_torch

PACKAGE = Path(__file__).parents[1] / "src" / "espformer"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450
# A file of kernels is read from top to bottom, however long: kernel, launcher, operator.
KERNELS = sorted([*PACKAGE.glob("ops/*/triton.py"), *PACKAGE.glob("ops/*/triton/*.py")])

# From the bottom up. A component imports from the layers below its own; only those of the top
# layer may also import each other, and the public names of `espformer` itself.
LAYERS = (
    {"ops"},
    {"functional"},
    {"nn", "sorting"},
    {"models", "integrations"},
    {"lab"},
)
HEIGHT = {component: height for height, layer in enumerate(LAYERS) for component in layer}
TOP = len(LAYERS) - 1


def component_of(module: str) -> str:
    """`ops` for `espformer.ops.esp.linear`, nothing for `espformer` itself."""
    return module.split(".")[1] if "." in module else ""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, full dotted name) for each import, wherever in the file it stands."""
    package = ("espformer", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def wrong_way_imports(path: Path, source: str) -> list[str]:
    importer = component_of(module_of(path))
    if importer == "":
        return []
    if importer not in HEIGHT:
        return [f"{path.name}: component '{importer}' has no layer, give it one in LAYERS"]
    wrong = []
    for line, name in imported_modules(path, source):
        if name.partition(".")[0] != "espformer":
            continue
        imported = component_of(name)
        # A name that is no component is a public name of `espformer/__init__.py`, above them all.
        height = HEIGHT.get(imported, TOP)
        inside = imported == importer
        if not (inside or height < HEIGHT[importer] or HEIGHT[importer] == TOP):
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: '{importer}' imports {name}")
    return wrong


def test_version_is_exported():
    import espformer

    assert espformer.__version__ == importlib.metadata.version("espformer")


def test_public_names_exist():
    import espformer

    missing = [name for name in espformer.__all__ if not hasattr(espformer, name)]
    assert not missing
    assert dir(espformer) == sorted(espformer.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(espformer, "nothing")  # noqa: B009


@pytest.mark.parametrize("name", ["integrations", "models", "convert", "revert"])
def test_what_is_imported_when_asked_for(name):
    package = "models" if name == "models" else "integrations"
    program = (
        f"import sys, espformer; assert 'espformer.{package}' not in sys.modules;"
        f"asked = espformer.{name}; import espformer.{package} as module;"
        f"assert asked is getattr(module, {name!r}, module)"
    )
    done = run_beside_torch(program)
    assert done.returncode == 0, done.stderr


def test_exports_and_loading_are_imported_when_asked_for():
    program = (
        "import sys, espformer.integrations as module;"
        "later = {'espformer.integrations.onnx', 'espformer.integrations.pretrained'};"
        "assert not later & {*sys.modules}; assert {*module.__all__} <= {*dir(module)};"
        "from espformer.integrations.onnx import export_onnx;"
        "assert module.export_onnx is export_onnx; assert not hasattr(module, 'nothing')"
    )
    done = run_beside_torch(program)
    assert done.returncode == 0, done.stderr


def test_core_needs_torch_alone():
    """Imports the core in a process that sees the standard library, torch and what it requires."""
    program = """
        import importlib, importlib.metadata, pathlib, re, sys

        def normal(distribution):
            return re.sub(r"[-_.]+", "-", distribution).lower()

        visible, pending = set(), ["torch"]
        while pending:
            name = normal(pending.pop())
            if name in visible:
                continue
            visible.add(name)
            try:
                requirements = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            for requirement in requirements:
                if not re.search(r"\\bextra\\s*==", requirement):
                    pending.append(re.match(r"[\\w.-]+", requirement).group())

        blocked = {
            module
            for module, owners in importlib.metadata.packages_distributions().items()
            if not visible & {normal(owner) for owner in owners}
        } - {"espformer"}
        # Without these the finder below would block nothing that matters.
        assert "pytest" in blocked and "torch" not in blocked, blocked

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in blocked:
                    raise ModuleNotFoundError(f"{name} is not needed by the core", name=name)

        sys.meta_path.insert(0, Blocker())

        import espformer

        root = pathlib.Path(espformer.__file__).parent
        core = "ops/*.py", "ops/*/*.py", "functional/*.py", "nn/**/*.py", "models/**/*.py"
        for pattern in (*core, "sorting/*.py", "integrations/__init__.py"):
            found = sorted(root.glob(pattern))
            assert found, f"no file matches {pattern}"
            for path in found:
                if path.name in ("triton.py", "cuda.py"):  # imported when a GPU is to be used
                    continue
                module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                importlib.import_module(module.removesuffix(".__init__"))
    """
    done = run_beside_torch(program)
    assert done.returncode == 0, done.stderr


def test_slow_tests_exist(request):
    """What the list of slow tests names has not been renamed; a GPU has other cases."""
    for name in SLOW:
        file, _, test = name.partition("::")
        source = (Path(__file__).parent / file).read_text("utf-8")
        assert f"def {test.partition('[')[0]}(" in source, name
    whole = not any("::" in argument for argument in request.config.args)
    if whole and not torch.cuda.is_available():
        assert not request.config.stash[RENAMED]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    assert not wrong_way_imports(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("file", "statement", "allowed"),
    [
        ("ops/esp/linear.py", "from espformer.ops.esp.coupling import quantile", True),
        ("ops/esp/linear.py", "from .coupling import quantile", True),
        ("ops/esp/triton/soft_plan.py", "from ..linear import apply_plans", True),
        ("ops/esp/linear.py", "from ... import functional", False),
        ("ops/esp/linear.py", "def late():\n    import espformer.nn", False),
        ("functional/esp.py", "from ..ops import esp", True),
        ("functional/esp.py", "from espformer.functional.arguments import make_problem", True),
        ("functional/esp.py", "from .. import nn", False),
        ("nn/attention.py", "from espformer import functional", True),
        ("nn/attention.py", "from espformer import esp_attention", False),
        ("nn/attention.py", "import espformer", False),
        ("models/vit.py", "from espformer.nn.attention import Attention", True),
        ("models/vit.py", "from espformer.integrations import timm", False),
        ("integrations/timm.py", "import timm", True),
        ("models/vit.py", "from espformer.lab.data import digits", False),
        ("integrations/onnx.py", "import espformer.lab.machine", False),
        ("lab/training/module.py", "from espformer.lab.plots import maps", True),
        ("lab/demo.py", "import espformer", True),
        ("helpers.py", "import torch", False),
    ],
)
def test_the_import_rule_itself(file, statement, allowed):
    assert bool(wrong_way_imports(PACKAGE / file, statement)) is not allowed


def test_source_files_are_short():
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCES
        if path not in KERNELS
    }
    assert lengths, f"no source file under {PACKAGE}"
    assert KERNELS, f"no kernels under {PACKAGE}"
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}

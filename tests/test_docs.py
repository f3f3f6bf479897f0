"""The Python of README.md and docs/ runs as it is pasted, and their links lead somewhere."""

import html
import importlib
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import espformer

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*src=\"([^\"]+)\"")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, source) of every fenced block; the source keeps its line numbers."""
    text = page.read_text(encoding="utf-8")
    return [
        (m[1], "\n" * text[: m.start()].count("\n") + "\n" + m[2]) for m in FENCE.finditer(text)
    ]


def anchors(page: Path) -> set[str]:
    """The fragments that headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def run_blocks(page: Path, *, exports: bool) -> None:
    """Run the Python of a page from top to bottom, with or without exporting to ONNX."""
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for language, source in blocks(page):
        if language == "python" and (exports or "export_onnx(" not in source):
            exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, exports=False)


@pytest.mark.slow
def test_examples_of_exports_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = [page for page in PAGES if "export_onnx(" in page.read_text(encoding="utf-8")]
    assert pages
    for page in pages:
        run_blocks(page, exports=True)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.finditer(text):
        address = link[1] or link[2]
        if address.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = address.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)}: {address} does not exist"
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), f"{name(page)}: no heading for {address}"


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_figures_are_of_commits_that_can_be_looked_up():
    """A figure names the code that made it; docs/reproduce.md lists commits that are not kept."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("the history is not here")
    files = [*PAGES, *ROOT.glob("results/*.json"), *ROOT.glob("benchmarks/results/*.*")]
    texts = [f.read_text(encoding="utf-8") for f in files if f.suffix in (".md", ".json", ".csv")]
    named = re.compile(r"(?:commit |\bat |\"revision\": \")([0-9a-f]{7,40})\b")
    commits = sorted({commit for text in texts for commit in named.findall(text)})
    kept = git("rev-list", "HEAD").splitlines()
    lost = {commit for commit in commits if not any(full.startswith(commit) for full in kept)}
    told = re.findall(r"`([0-9a-f]{7})`", (ROOT / "docs/reproduce.md").read_text(encoding="utf-8"))
    assert len(commits) > 20
    assert {commit[:7] for commit in lost} <= {*told}


def test_the_readme_has_an_example():
    assert any(language == "python" for language, _ in blocks(ROOT / "README.md"))


def test_pictures_are_small():
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 200_000, f"{picture.name} is larger than 200 KB"


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The documentation as `make docs` builds it: links that lead nowhere are errors."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "-d", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_asks_the_network_for_nothing(site):
    remote = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//[^>]*>"
        r"|<link[^>]+rel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]+href=[\"']?(?:https?:)?//[^>]*>"
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        found = remote.search(page.read_text("utf-8"))
        assert found is None, f"{page.relative_to(site)}: {found[0]}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text("utf-8")), sheet


@pytest.mark.slow
def test_the_site_shows_what_stands_elsewhere(site):
    results = (site / "results.html").read_text("utf-8")
    assert "How a claim is judged" in results
    assert 'src="results/mnist-patch-size.png"' in results
    assert (site / "results" / "mnist-patch-size.png").exists()
    mathematics = (site / "mathematics.html").read_text("utf-8")
    assert mathematics.count("<math") > 50
    assert "arithmatex" not in mathematics, "a formula is still LaTeX"
    functions = (site / "api" / "functional.html").read_text("utf-8")
    assert "slice_dropout" in functions, "options are filled in"
    assert ":func:" not in functions
    for name in ("kernels", "contributing", "changelog", "security"):
        assert (site / f"{name}.html").exists()


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site):
    """Also those that mkdocs does not look at: of signatures, pictures and generated pages."""
    anchor = re.compile(r"\sid=[\"']?([^\"'\s>]+)")
    link = re.compile(r"<(?:a|img)\s[^>]*?(?:href|src)=[\"']?([^\"'\s>]+)")
    known: dict[Path, set[str]] = {}
    for page in site.rglob("*.html"):
        known[page] = {html.unescape(x) for x in anchor.findall(page.read_text("utf-8"))}
    for page in known:
        if page.name == "404.html":
            continue  # its links begin at the root of a server
        for address in link.findall(page.read_text("utf-8")):
            address = unquote(html.unescape(address))
            if address.startswith(("http://", "https://", "mailto:", "data:")):
                continue
            path, _, fragment = address.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.relative_to(site)}: {address}"
            if fragment and target in known and not fragment.startswith("__"):
                assert fragment in known[target], f"{page.relative_to(site)}: {address}"


@pytest.mark.slow
def test_the_site_in_a_browser(site):
    """Opened as files on a desktop and a phone: nothing overflows, fails or asks the network."""
    from tests.lab.report.browser import Browser, find_browser

    if find_browser() is None:
        pytest.skip("no Chromium here")
    pages = [*site.glob("*.html"), *(site / "api").glob("*.html")]
    with Browser.start() as browser:
        for page in sorted(pages):
            if page.name == "404.html":
                continue
            for width, height in ((1280, 900), (390, 844)):
                tab = browser.open(page, width=width, height=height)
                root = "document.documentElement"
                overflow = tab.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
                assert overflow <= 0, f"{page.name} is {overflow} pixels wider than {width}"
                assert not tab.errors, f"{page.name}: {tab.errors}"
        tab = browser.open(site / "index.html", width=1280, height=900)
        tab.evaluate("""
            document.querySelector("[data-md-toggle=search]").click();
            const field = document.querySelector(".md-search__input");
            field.focus();
            field.value = "calibrate";
            field.dispatchEvent(new Event("keyup"));
        """)
        deadline = time.monotonic() + 30
        found = 0
        while not found and time.monotonic() < deadline:
            time.sleep(0.1)
            found = tab.evaluate("document.querySelectorAll('.md-search-result__item').length")
        assert found, "the search finds nothing in pages that are opened as files"


@pytest.mark.parametrize("name", ["functional", "nn", "sorting", "integrations", "models"])
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(f"espformer.{name}")
    page = (ROOT / "docs" / "api" / f"{name}.md").read_text("utf-8")
    shown = re.findall(rf"^::: (espformer\.{name}\.[\w.]+)$", page, re.MULTILINE)
    assert sorted(path.rpartition(".")[2] for path in shown) == sorted(module.__all__)
    for path in shown:
        place, _, label = path.rpartition(".")
        assert getattr(importlib.import_module(place), label) is getattr(module, label)


def test_the_reference_has_every_name_of_the_top_level():
    page = (ROOT / "docs" / "api" / "index.md").read_text("utf-8")
    named = {name.removeprefix("espformer.") for name in re.findall(r"`([\w.]+)`", page)}
    assert {*espformer.__all__} - {"__version__"} <= named


@pytest.mark.slow
def test_tables_of_the_site_are_as_wide_as_they_must_be(site):
    """The first table of the results shows its last column, and on a phone several of them."""
    from tests.lab.report.browser import Browser, find_browser

    if find_browser() is None:
        pytest.skip("no Chromium here")
    table = "document.querySelector('.md-content table')"
    with Browser.start() as browser:
        tab = browser.open(site / "results.html", width=1280, height=900)
        text = "document.querySelector('.md-content p')"
        assert tab.evaluate(f"{table}.offsetWidth <= {text}.offsetWidth")
        tab = browser.open(site / "results.html", width=390, height=844)
        inside = "x => x.getBoundingClientRect().right < 390"
        row = f"[...{table}.querySelectorAll('tbody tr:first-child td')]"
        assert tab.evaluate(f"{row}.filter({inside}).length") > 2
        width = f"{table}.querySelector('td.text').getBoundingClientRect().width"
        assert tab.evaluate(width) > 150


@pytest.mark.slow
def test_docstrings_become_markdown():
    """Not slow, but griffe is among the packages that `make test-slow` installs."""
    pytest.importorskip("griffe")
    from tools.site_docstrings import to_markdown

    docstring = """See :func:`~espformer.revert`, :meth:`torch.sort` and :math:`x_i`.

    .. math::

        a &= b,\\\\
        c &= d.

    After.

    Example:
        >>> 1
        1
    """
    text = to_markdown(docstring)
    revert = "[`espformer.revert`][espformer.integrations.revert]"
    assert f"See {revert}, `torch.sort` and $x_i$." in text
    assert r"$$\begin{align*} a &= b,\\ c &= d. \end{align*}$$" in text
    assert "    After.\n" in text
    assert "    Examples:\n" in text


def test_the_page_of_options_is_up_to_date():
    from tools.options_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/options_page.py"

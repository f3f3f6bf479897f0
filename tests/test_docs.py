"""The Python of README.md and docs/ runs as it is pasted, and their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("**/*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    for language, source in blocks(page):
        if language == "python":
            exec(compile(source, str(page), "exec"), namespace)


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


def test_the_readme_has_an_example():
    assert any(language == "python" for language, _ in blocks(ROOT / "README.md"))


def test_pictures_are_small():
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 200_000, f"{picture.name} is larger than 200 KB"


def test_the_page_of_options_is_up_to_date():
    command = [sys.executable, ROOT / "tools" / "options_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

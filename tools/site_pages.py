"""Hooks of mkdocs: pages from elsewhere in the repository, and formulas without scripts.

RESULTS.md, CONTRIBUTING.md, the README of the kernels and others are read by people in the
repository too, so they are shown on the site from where they stand, without a copy. Source files,
tables of benchmarks and notebooks that a page links to become pages as well: no link of the site
leads out of it, except to the web.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# In the repository → on the site.
PAGES = {
    "RESULTS.md": "results.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "src/espformer/ops/esp/triton/README.md": "kernels.md",
    "README.md": "index.md",  # linked, not shown: the site has a first page of its own
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".txt": "text"}
# Fenced blocks and spans of code hold no links and no formulas.
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s]+)(?=\))|(?<=src=\")(?P<source>[^\"]+)(?=\")")
MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
CELL = re.compile(r"<td((?: style=[^>]*)?)>(.*?)</td>", re.DOTALL)
LONG = 30  # characters
REMOTE_WORKER = 'src="https://unpkg.com/iframe-worker/shim"'
LETTERS = re.compile(r'(?:<mi mathvariant="normal">[A-Za-z]</mi>){2,}')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what that links to in turn."""
    known = {f"docs/{file.src_uri}": file.src_uri for file in files}
    known.update(PAGES)
    pending = [path for path in (*known, *PAGES) if path.endswith(".md")]
    for original, shown in PAGES.items():
        if original != "README.md":
            files.append(_generated(config, shown, original))
    while pending:
        original = pending.pop()
        for path in _linked(original):
            if path in known or not (ROOT / path).is_file():
                continue
            shown = path if path.endswith((".md", ".png", ".svg", ".csv")) else f"{path}.md"
            shown = shown if shown.startswith(("benchmarks/", "results/")) else f"source/{shown}"
            known[path] = shown
            files.append(_generated(config, shown, path))
            if path.endswith(".md"):
                pending.append(path)
    config.extra["pages_of"] = known
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that are right in the repository become right on the site."""
    del files
    known: dict[str, str] = config.extra["pages_of"]
    here = page.file.src_uri
    originals = {shown: path for path, shown in known.items() if path != "README.md"}
    original = originals.get(here, f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        address = match["target"] or match["source"]
        path, mark, fragment = address.partition("#")
        if "://" in address or address.startswith("mailto:") or not path:
            return address
        target = _resolve(original, path)
        if target not in known:
            return address  # mkdocs says that it leads nowhere
        return posixpath.relpath(known[target], posixpath.dirname(here)) + mark + fragment

    return _outside_code(LINK, moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas in LaTeX become MathML, which browsers draw by themselves; long cells are marked."""
    del page, config, files
    return CELL.sub(_marked, MATH.sub(_mathml, html))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Search in pages that are opened as files: by a script of ours, not by one from the web."""
    del config
    depth = page.url.count("/")
    return output.replace(REMOTE_WORKER, f'src="{"../" * depth}file-worker.js"')


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The page for what is not found stands at the root."""
    del template_name, config
    return output_content.replace(REMOTE_WORKER, 'src="file-worker.js"')


def _mathml(match: re.Match[str]) -> str:
    latex = match[3].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    mathml = convert(latex.strip(), display="block" if match[2] == "[" else "inline")
    # Words, such as softmax, come letter by letter.
    return LETTERS.sub(lambda m: f"<mi>{re.sub('<[^>]+>', '', m[0])}</mi>", mathml)


def _marked(match: re.Match[str]) -> str:
    """A cell, of the class `text` if it would be a tall one in a narrow column."""
    if len(re.sub("<[^>]+>", "", match[2])) > LONG:
        return f'<td class="text"{match[1]}>{match[2]}</td>'
    return match[0].replace(" ± ", "&nbsp;±&nbsp;")  # a number and its deviation stay in one line


def _outside_code(pattern: re.Pattern[str], change: Any, text: str) -> str:
    parts, position = [], 0
    for code in CODE.finditer(text):
        # A span of code inside the text of a link does not end the link.
        if not text[code.end() :].startswith("]("):
            parts.append(pattern.sub(change, text[position : code.start()]) + code[0])
            position = code.end()
    return "".join(parts) + pattern.sub(change, text[position:])


def _resolve(original: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(original), path))


def _linked(original: str) -> Iterator[str]:
    """Files of the repository that a page links to."""
    found: list[str] = []

    def note(match: re.Match[str]) -> str:
        found.append((match["target"] or match["source"]).partition("#")[0])
        return match[0]

    _outside_code(LINK, note, (ROOT / original).read_text("utf-8"))
    for path in found:
        if path and "://" not in path:
            yield _resolve(original, path)


def _generated(config: MkDocsConfig, shown: str, original: str) -> File:
    path = ROOT / original
    suffix = path.suffix
    if suffix == ".ipynb":
        content: str | bytes = notebook_page(path)
    elif suffix == ".md":
        content = path.read_text("utf-8")
    elif shown.endswith(".md"):
        fence = f"```{LANGUAGES.get(suffix, 'text')}\n{path.read_text('utf-8').rstrip()}\n```"
        content = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {original}\n\n{fence}\n"
    else:
        content = path.read_bytes()
    file = File.generated(config, shown, content=content)
    # They are reached by links, and need no place in the navigation.
    file.inclusion = file.inclusion if original in PAGES else _not_in_nav()
    return file


def _not_in_nav() -> Any:
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV


def notebook_page(path: Path) -> str:
    """A notebook as a page: its texts, its code, and what that printed and drew."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).strip()
                parts.append(
                    f'<img alt="drawn by the cell above" src="data:image/png;base64,{png}">'
                )
            elif text := "".join(output.get("text", data.get("text/plain", []))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"

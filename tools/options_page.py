"""Write docs/options.md from the list of options of ESP attention, or check that it is up to date.

python tools/options_page.py           # write
python tools/options_page.py --check   # fail where the page differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from espformer.ops.esp.options import OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = """\
# Options of ESP attention

Made by `python tools/options_page.py` from the one list in
[`ops/esp/options.py`](../src/espformer/ops/esp/options.py). `espformer.esp_attention`,
`espformer.esp_plan` and `espformer.nn.ESP` take all of them as keywords.

| option | default | meaning |
|---|---|---|
"""
TAIL = """
`esp_attention` and `esp_plan` also take tensors: `slices` and `slice_logits`, `query_mask` and
`key_mask`. `ESP` has slices of its own (`slicer`, `slices`), and may learn its temperature
(`learn_temperature`) and the weights of its slices (`learn_slice_weights`). All take `backend`.

The paper's setting is `temperature_unit="absolute", metric="squared", sort_temperature=1e-3` along
the axes (`slicer="axis"`).
"""


def page() -> str:
    """The text of docs/options.md."""
    rows = [
        f"| `{name}` | `{option.default!r}` | {_in_markdown(option.metadata['meaning'])} |\n"
        for name, option in OPTIONS.items()
    ]
    return HEAD + "".join(rows) + TAIL


def _in_markdown(meaning: str) -> str:
    return meaning.replace("``", "`").replace("|x - y|", "\\|x - y\\|")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is not up to date")
    PAGE.write_text(page(), encoding="utf-8")

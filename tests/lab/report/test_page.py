"""The page in a real browser: it loads alone, shows everything, moves, and fits its window."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from espformer.lab.cli import app
from espformer.lab.errors import RunError
from espformer.lab.report import page as page_module
from espformer.lab.report.svg import Series, line_chart, log_ticks, ticks
from tests.lab.report.browser import Browser, find_browser

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome here (set CHROME to its path)"
)


@pytest.fixture(scope="module")
def browser():
    with Browser.start() as started:
        yield started


@pytest.fixture(scope="module")
def desktop(browser, page):
    return browser.open(page, width=1280, height=900)


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_loads_without_an_error_and_fits(browser, page, width, dark):
    tab = browser.open(page, width=width, height=800, dark=dark)
    assert tab.errors == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    sticking_out = tab.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && "
        "getComputedStyle(e).visibility !== 'hidden' && e.getBoundingClientRect().width > 1 && "
        "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"
    )
    assert sticking_out == []
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness < 60) if dark else (brightness > 230)


@needs_browser
def test_every_figure_is_there(desktop):
    count = desktop.evaluate
    assert count("document.querySelectorAll('tbody tr').length") == 6
    assert count("document.querySelectorAll('.charts svg').length") == 6
    assert count("document.querySelectorAll('.plans svg').length") == 8
    assert count("document.querySelectorAll('.slices svg').length") == 6
    # Softmax, differential (one matrix for both heads), Sinkhorn, three of ESP soft and hard.
    assert count("document.querySelectorAll('#maps .map canvas').length") == 2 + 1 + 2 + 4 + 4 + 4
    drawn = (
        "[...document.querySelectorAll('.map canvas')].every(c => c.width === 17 && "
        "c.getContext('2d').getImageData(0, 0, 17, 17).data.some(byte => byte > 0))"
    )
    assert count(drawn)
    assert count("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


@needs_browser
def test_everything_has_an_alternative_text(desktop):
    missing = desktop.evaluate(
        "[...document.querySelectorAll('svg, canvas, img')].filter(e => "
        "e.getAttribute('aria-hidden') !== 'true' && "
        "!(e.getAttribute('alt') || e.getAttribute('aria-label')))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert missing == []
    assert desktop.evaluate("document.querySelectorAll('h1').length") == 1
    assert desktop.evaluate("document.documentElement.lang") == "en"


@needs_browser
def test_the_slider_moves_maps_sums_and_numbers(desktop):
    def slide(to: str) -> dict[str, str]:
        return desktop.evaluate(
            f"(() => {{ const s = document.getElementById('slider'); s.value = {to};"
            "s.dispatchEvent(new Event('input', {bubbles: true}));"
            "const c = document.querySelector('#soft-maps canvas');"
            "return {t: document.getElementById('reading-t').textContent,"
            "columns: document.getElementById('reading-columns').textContent,"
            "map: c.toDataURL(), alt: c.getAttribute('aria-label'),"
            "bars: document.querySelector('#soft-maps .sum-columns').getAttribute('d'),"
            "x: document.querySelector('#soft-chart circle').getAttribute('cx'),"
            "spoken: s.getAttribute('aria-valuetext')}; })()"
        )

    soft, hard = slide("s.min"), slide("s.max")
    assert (soft["t"], hard["t"]) == ("1", "hard")
    assert hard["columns"] == "0"
    assert float(soft["columns"]) > 1e-3
    assert soft["map"] != hard["map"]
    assert soft["bars"] != hard["bars"]
    assert float(soft["x"]) < float(hard["x"])
    assert "hard" in hard["alt"]
    assert hard["spoken"].startswith("hard, accuracy")


@needs_browser
def test_another_model_and_another_input_can_be_chosen(desktop):
    def click(selector: str, watched: str) -> bool:
        return desktop.evaluate(
            f"(() => {{ const c = document.querySelector('{watched}'), before = c.toDataURL();"
            f"document.querySelector('{selector}').click(); return before !== c.toDataURL(); }})()"
        )

    assert click("#soft-runs label:last-child input", "#soft-maps canvas")
    assert click("#examples label:nth-child(3) input", "#maps .map canvas")
    alt = desktop.evaluate("document.querySelector('#shown img').alt")
    assert alt.startswith("test example 2, class ")


@needs_browser
def test_pointing_at_a_map_tells_the_weight_and_lights_up_the_input(desktop, runs):
    desktop.evaluate("document.querySelector('#examples label:first-child input').click()")
    said = desktop.evaluate(
        "(() => { const c = document.querySelector('#maps .map canvas');"
        "const b = c.getBoundingClientRect(), o = document.getElementById('overlay');"
        "const leave = () => c.dispatchEvent(new PointerEvent('pointerleave'));"
        "leave(); const before = o.toDataURL(), at = {clientX: b.left + b.width * 2.5 / 17,"
        "clientY: b.top + b.height * 5.5 / 17};"
        "c.dispatchEvent(new PointerEvent('pointermove', at));"
        "const during = o.toDataURL(), tip = document.getElementById('tip').textContent;"
        "leave(); return [before, during, o.toDataURL(), tip]; })()"
    )
    assert said[0] == said[2] != said[1]
    weight = re.fullmatch(r"query 5 → key 2weight (\S+)", said[3])[1]
    # The class token comes first.
    matrix = runs["transformer"].matrices(runs["transformer"].example(0))[-1]
    assert float(weight) == pytest.approx(float(matrix[0, 5, 2]), rel=0.1, abs=1e-3)


@needs_browser
def test_a_chart_tells_its_numbers_and_a_chip_dims_the_others(desktop):
    said = desktop.evaluate(
        "(() => { const s = document.getElementById('chart-accuracy');"
        "const b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.right - 20, clientY: b.top}));"
        "return document.getElementById('tip').textContent; })()"
    )
    assert said.startswith("epoch 2Softmax")
    assert "ESP, learnt t" in said
    dimmed = desktop.evaluate(
        "(() => { document.querySelector('.chip').click();"
        "return document.querySelectorAll('.charts .line.dimmed').length; })()"
    )
    assert 0 < dimmed < desktop.evaluate("document.querySelectorAll('.charts .line').length")
    assert desktop.errors == []


@needs_browser
def test_a_screenshot_shows_the_page(browser, page, tmp_path):
    from PIL import Image

    browser.open(page, width=390, height=800).screenshot(tmp_path / "phone.png")
    with Image.open(tmp_path / "phone.png") as image:
        assert image.width == 390
        assert image.height > 4000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 100


def test_one_file_that_needs_no_other(page):
    text = page.read_text(encoding="utf-8")

    class Addresses(HTMLParser):
        def __init__(self):
            super().__init__()
            self.found = []

        def handle_starttag(self, tag, attrs):
            self.found += [v for k, v in attrs if k in ("src", "href", "srcset") and v]

    parser = Addresses()
    parser.feed(text)
    assert all(address.startswith(("#", "data:")) for address in parser.found)
    assert "@import" not in text
    assert "{{" not in text.partition('<script type="application/json"')[0]
    assert len(text) < 1_500_000
    assert "shown by its root, negative weights in the other colour." in text


def test_numbers_of_the_page_are_those_of_the_runs(page, runs):
    text = page.read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    charts = {one["name"]: one["points"] for one in data["charts"]["chart-accuracy"]}
    curve = runs["sinkformer"].curves["valid/accuracy"]
    assert charts["Sinkhorn"] == [[e + 1, pytest.approx(100 * curve[e], rel=1e-3)] for e in curve]
    frames = data["softness"][0]["frames"]
    assert [frame["t"] for frame in frames][:: len(frames) - 1] == ["t = 1", "hard"]
    assert frames[data["softness"][0]["trained"]]["t"] == "t = 0.3"


def test_text_from_outside_cannot_become_markup(runs):
    nasty = "</script><script>alert(1)</script>"
    made = page_module.make_page([runs["transformer"]], command=nasty, title=nasty, examples=[0])
    assert "<script>alert" not in made
    run = runs["transformer"]
    labelled = dataclasses.replace(run, run=dataclasses.replace(run.run, label=nasty))
    made = page_module.make_page([labelled], command="x", examples=[0])
    data = json.loads(re.search(r'id="data">(.*?)</script>', made, re.DOTALL)[1])
    assert data["attention"]["states"] == [nasty], "the element ends after the data, not in them"


def test_a_page_of_one_run_without_a_sort(runs):
    made = page_module.make_page([runs["transformer"]], command="x", examples=[0])
    assert 'id="softness"' not in made
    assert "negative weights" not in made
    assert "One model on digits" in made
    with pytest.raises(RunError, match="1 to 8 runs"):
        page_module.make_page([runs["transformer"]] * 9, command="x")
    with pytest.raises(RunError, match="no test example 9999: they are 0 to 358"):
        page_module.make_page([runs["transformer"]], command="x", examples=[0, 9999])


def test_a_page_that_cannot_be_written(runs, tmp_path):
    with pytest.raises(RunError, match=r"is a directory; name the page, such as .*report\.html"):
        page_module.write_page([runs["transformer"]], tmp_path, command="x")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="the page could not be written"):
        page_module.write_page([runs["transformer"]], tmp_path / "file" / "page", command="x")


def test_the_command_writes_a_page(runs, tmp_path):
    path = tmp_path / "made" / "page.html"
    command = ["report", str(runs["sinkformer"].directory), "--to", str(path), "--title", "Mine"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(path)
    assert "<h1>Mine</h1>" in path.read_text(encoding="utf-8")


def test_ticks():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(91.2, 96.4) == [92, 94, 96]
    assert log_ticks(1e-6, 2.0)[0] == 1e-6
    assert len(log_ticks(1e-9, 1.0)) <= 6
    chart = line_chart("x", [Series("a", 0, [(1, 0.0), (2, 0.1)])], summary="s", log=True)
    assert chart.count("<circle") == 1, "zero has no place on a logarithmic axis"

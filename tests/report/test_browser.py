"""The page in a real browser."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import made
from gadam.report import page
from gadam.report.chart import vega
from gadam.report.serve import Server
from gadam.report.style import PAIRS
from gadam.report.theory_figures import FIGURES
from gadam.runs import Experiment, collect, summary
from gadam.runs.files import write_json

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
DRIVER = shutil.which("chromedriver")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
if DRIVER is None or CHROMIUM is None:
    pytest.skip(
        "Chromium is not installed: apt-get install chromium chromium-driver",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("report")
    collection = collect([made.sweep(folder)])
    path = folder / "report.html"
    path.write_text(page.render(collection))
    return path, collection


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def until(browser: Any, condition: str) -> None:
    """Wait until a JavaScript expression is true."""
    script = (
        "const done = arguments[0], start = Date.now();"
        f"const check = () => ({condition}) ? done(true) : Date.now() - start > 20000 ? done(false)"
        " : setTimeout(check, 50); check();"
    )
    assert browser.execute_async_script(script), condition


def load(browser: Any, path: Path, width: int = 1200, theme: str = "light") -> None:
    browser.set_window_size(width, 900)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(f"file://{path}")
    until(browser, "document.body.dataset.drawn === 'true'")


def act(browser: Any, element: Any) -> None:
    """Click, and wait until the curves are drawn again."""
    before = browser.execute_script(f"return {READY}")
    element.click()
    until(browser, f"{READY} !== '{before}'")


READY = "document.getElementById('curves-0').dataset.ready"


def lines_drawn(browser: Any, panel: int = 0) -> int:
    return len(find(browser, f"#curves-{panel} g.mark-line.role-mark path"))


# Elements whose text is wider than they are, unless they are hidden or scroll by themselves.
CLIPPED = """
return [...document.querySelectorAll("main *")].filter((e) => {
  const style = getComputedStyle(e);
  if (e.closest(".hidden, thead, svg, #answer h2") || style.overflowX === "auto") return false;
  const box = e.getBoundingClientRect();
  const scroller = e.closest(".scroll, pre");
  return e.scrollWidth > e.clientWidth + 1 && style.display !== "inline" && e.clientWidth > 0
    || !scroller && box.right > document.documentElement.clientWidth + 1;
}).map((e) => e.outerHTML.slice(0, 80));
"""


@pytest.mark.parametrize("width", [420, 1400])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_loads_without_errors_and_fits_the_window(browser, report, width, theme):
    load(browser, report[0], width, theme)
    assert not [
        entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")
    ]
    for chart in ("gains", "curves", "rates", "costs"):
        (svg,) = find(browser, f"#{chart}-0 svg")
        assert svg.size["width"] > 200
        assert find(browser, f"#{chart}-0 svg g.role-legend")
    assert browser.execute_script(
        "const root = document.documentElement; return root.scrollWidth <= root.clientWidth + 1"
    )
    assert browser.execute_script(CLIPPED) == []
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    dark = sum(int(v) for v in background.strip("rgba()").split(",")[:3]) < 200
    assert dark == (theme == "dark")


def test_the_numbers_match_the_records(browser, report):
    load(browser, report[0])
    collection = report[1]
    shown = {
        cells[0]: cells[1:]
        for cells in (
            [
                cell.text.removesuffix("(best)").strip()
                for cell in row.find_elements("css selector", "th, td")
            ]
            for row in find(browser, "#results tbody tr:not(.group)")
        )
    }
    for row in summary.summarize(collection.experiment, collection.results):
        assert shown[row.label][0] == str(row.iterate)
        assert shown[row.label][1] == str(row.average or "–")
    assert shown["Gadam"][2].endswith("over AdamW")
    assert shown["Gadam"][-1] == "75.73"


def test_checkboxes_hide_and_show_lines(browser, report):
    load(browser, report[0])
    assert lines_drawn(browser) == 3  # AdamW's iterate, Gadam's iterate and average
    (gadam,) = find(browser, "input[name=method][value=Gadam]")
    act(browser, gadam)
    assert lines_drawn(browser) == 1
    act(browser, gadam)
    (iterate,) = find(browser, "input[name=point][value='last iterate']")
    act(browser, iterate)
    assert lines_drawn(browser) == 1
    act(browser, iterate)
    act(browser, find(browser, "button[data-all=false]")[0])
    assert lines_drawn(browser) == 0
    act(browser, find(browser, "button[data-all=true]")[0])
    assert lines_drawn(browser) == 3


def test_axes_can_be_changed(browser, report):
    load(browser, report[0])

    def titles() -> list[str]:
        return [t.text for t in find(browser, "#curves-0 g.role-axis-title text")]

    def paths() -> list[str]:
        return [p.get_attribute("d") for p in find(browser, "#curves-0 g.mark-line.role-mark path")]

    assert "epochs" in titles()
    act(browser, find(browser, "input[name=x][value=seconds]")[0])
    assert "seconds" in titles()
    before = paths()
    act(browser, find(browser, "input[name=y][value=log]")[0])
    assert paths() != before
    legends = [e.text for e in find(browser, "#controls legend")]
    assert legends == ["methods", "points", "x axis", "y scale", "split"]


def test_averages_are_solid_and_last_iterates_dotted(browser, report):
    load(browser, report[0])
    lines = find(browser, "#curves-0 g.mark-line.role-mark path")
    looks = {(e.get_attribute("stroke"), e.get_attribute("stroke-dasharray")) for e in lines}
    base, averaged = PAIRS[0]
    assert looks == {(base, "2,3"), (averaged, "2,3"), (averaged, "1,0")}
    markers = find(browser, "#curves-0 g.mark-symbol.role-mark path")
    assert len(markers) >= 6 + 6 + 4  # every evaluated epoch of every curve


def test_the_forest_plot_shows_the_gain_and_its_numbers(browser, report):
    load(browser, report[0])
    (row,) = summary.summarize(report[1].experiment, report[1].results)[1:]
    assert row.difference is not None
    text = find(browser, "#gains-0 svg")[0].text
    assert "Gadam over AdamW" in text
    assert f"{row.difference.mean:+.2f}" in text


def test_hovering_shows_values(browser, report):
    load(browser, report[0])
    (svg,) = find(browser, "#curves-0 svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    chain = webdriver.ActionChains(browser)
    chain.move_to_element_with_offset(svg, 100, 20).move_by_offset(3, 3).perform()
    until(browser, "document.querySelector('#vg-tooltip-element.visible') !== null")
    tip = find(browser, "#vg-tooltip-element")[0].text
    assert "method" in tip
    assert "test accuracy" in tip
    assert "undefined" not in tip
    assert any(label in tip for label in ("AdamW", "Gadam"))


def test_images_and_text_on_one_page(browser, tmp_path):
    """Each task has a panel with its own metric, and the best possible value if it is known."""
    made.sweep(tmp_path, seeds=1)
    made.run(tmp_path / "lm-0", "LSTM", 0, recipe=made.LANGUAGE)
    recipes = {**made.RECIPES, "LSTM": made.LANGUAGE}
    floors = {"perplexity": {"test": 7.5, "validation": 7.0}}
    experiment = Experiment("made", "Made up", recipes, seeds=1, floors=floors)
    write_json(tmp_path / "experiment.json", experiment.to_dict())
    path = tmp_path / "report.html"
    path.write_text(page.render(collect([tmp_path])))
    browser.get_log("browser")  # discard entries of earlier pages
    load(browser, path)

    def drawn(panel: int) -> tuple[str, int, int]:
        rules = find(browser, f"#curves-{panel} g.mark-rule.role-mark line")
        (svg,) = find(browser, f"#curves-{panel} svg")
        return svg.text, len(rules), lines_drawn(browser, panel)

    text, rules, lines = drawn(0)
    assert "test accuracy, %" in text
    assert (rules, lines) == (0, 3)
    text, rules, lines = drawn(1)
    assert "test perplexity" in text
    assert (rules, lines) == (1, 2)
    act(browser, find(browser, "input[name=split][value=validation]")[0])
    assert "validation perplexity" in drawn(1)[0]
    assert not [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]


def test_choices_open_sections_and_the_position_survive_a_live_reload(browser, tmp_path):
    runs = made.sweep(tmp_path)
    with Server([runs]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            browser.set_window_size(1200, 900)
            browser.get(server.url)
            until(browser, "document.body.dataset.drawn === 'true'")
            (gadam,) = find(browser, "input[name=method][value=Gadam]")
            act(browser, gadam)
            act(browser, find(browser, "input[name=x][value=seconds]")[0])
            browser.execute_script(
                "document.querySelector('details[data-keep=\"recipe of AdamW\"]').open = true;"
                "document.getElementById('how-heading').scrollIntoView()"
            )
            place = "return document.getElementById('how-heading').getBoundingClientRect().top"
            top = browser.execute_script(f"window.old = true; {place}")
            (runs / "gadam-2" / "result.json").unlink()  # a record changes
            until(browser, "!window.old && document.body.dataset.drawn === 'true'")
            assert not find(browser, "input[name=method][value=Gadam]:checked")
            assert find(browser, "input[name=x][value=seconds]:checked")
            assert lines_drawn(browser) == 1
            (kept,) = find(browser, "details[open]")
            assert kept.get_attribute("data-keep") == "recipe of AdamW"
            assert "5 of 6 runs are finished" in find(browser, ".lead")[0].text
            assert browser.execute_script("return scrollY") > 0
            assert browser.execute_script(place) == pytest.approx(top, abs=3)
        finally:
            server.shutdown()


def test_a_page_with_only_sections(browser, tmp_path):
    chart = FIGURES["ema"](0)  # has lines, dashed lines and points
    block = {"kind": "chart", "spec": vega(chart), "caption": chart.caption}
    (tmp_path / "sections").mkdir()
    write_json(tmp_path / "sections" / "chart.json", {"title": chart.title, "blocks": [block]})
    (tmp_path / "report.html").write_text(page.render(collect([tmp_path])))
    browser.get_log("browser")
    load(browser, tmp_path / "report.html")
    assert len(find(browser, "#section-chart-0 svg")) == 1
    assert not [e for e in browser.get_log("browser") if e["level"] in ("SEVERE", "WARNING")]


def test_the_theme_button_and_the_keyboard(browser, report):
    load(browser, report[0])
    (button,) = find(browser, "#theme")
    act(browser, button)
    assert button.get_attribute("aria-pressed") == "true"
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    (gadam,) = find(browser, "input[name=method][value=Gadam]")
    before = browser.execute_script(f"return {READY}")
    gadam.send_keys(keys.SPACE)
    until(browser, f"{READY} !== '{before}'")
    assert lines_drawn(browser) == 1


def test_everything_has_a_name_for_screen_readers(browser, report):
    load(browser, report[0])
    script = (
        "return [...document.querySelectorAll('[role=img]')]"
        ".every(e => e.getAttribute('aria-label')) &&"
        "[...document.querySelectorAll('input')].every(e => e.labels.length) &&"
        "document.querySelectorAll('h1').length === 1 && !!document.documentElement.lang &&"
        "[...document.querySelectorAll('table')].every(t => t.querySelector('th[scope]'))"
    )
    assert browser.execute_script(script)

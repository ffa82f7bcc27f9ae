"""Several runs on one page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mmgrpo.files import RunError
from mmgrpo.report import write_comparison
from tests.kit.run_folder import CONFIG, make_run
from tests.kit.web_page import Page, outside_references


def rows(page: Page, section: str) -> dict[str, str]:
    text = page.source.split(f'<section id="{section}">')[1].split("</section>")[0]
    part = Page(text)
    return {row.text.split("  ")[0]: row.text for row in part.all("tr")}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "plain", samples=14)
    make_run(folder / "hacked", samples=14, hacked=True, lr="3e-4", seed=1)
    out = write_comparison([folder / "plain", folder / "hacked"], folder / "deep" / "comparison.html")
    return Page(out.read_text(encoding="utf-8"))


def test_the_page_is_whole_and_self_contained(page: Page) -> None:
    assert not page.unbalanced and not outside_references(page)
    assert all(e.attributes["src"].startswith("data:image/png") for e in page.all("img"))


def test_each_run_has_its_verdict(page: Page) -> None:
    first, second = page.all("div", "card")
    assert first.text.startswith("plain") and "The gain holds" in first.text
    assert second.text.startswith("hacked") and "Reward hacking suspected" in second.text


def test_final_numbers_and_the_best_of_them(page: Page) -> None:
    found = rows(page, "numbers")
    (distance,) = [text for text in found.values() if text.startswith("Distance to real images")]
    assert "0.412 → 0.359" in distance and "0.412 → 0.562" in distance
    better = [e.text for e in page.all("span", "better")]
    assert better == ["0.695", "0.359"], "equal numbers have no best"


def test_only_differing_keys_are_listed(page: Page) -> None:
    keys = [row.text for row in Page(page.source.split('<section id="config">')[1].split("</section>")[0]).all("tr")]
    assert keys[1:] == ["optimizer.lr0.000150.0003", "training.seed01"]


def test_curves_lie_over_each_other(page: Page) -> None:
    labels = [e.attributes["aria-label"] for e in page.all("svg")]
    (judge,) = [text for text in labels if text.startswith("reader, held-out prompts")]
    assert "plain: 0.539 at step 0, 0.695 at step 120" in judge and "hacked: 0.539 at step 0, 0.419" in judge


def test_a_run_keeps_its_colour_where_another_has_no_values(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=20, samples=1) for name in ("a", "b")]
    (runs[0] / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "reward": 0.5}\n')
    page = Page(write_comparison(runs, tmp_path / "out.html").read_text(encoding="utf-8"))
    colours = {(e.attributes["data-name"], e.attributes["class"]) for e in page.all("path", "line")}
    assert {("a", "line c0"), ("b", "line c1")} == {pair for pair in colours if "faint" not in pair[1]}


def test_the_same_items_side_by_side(page: Page) -> None:
    assert len(page.all("img")) == 12 * 3
    assert "The first 12 are shown, 2 are left out." in page.text


def test_runs_of_one_name_and_empty_runs(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a" / "image", steps=20, samples=1)
    shutil.copytree(a, tmp_path / "b" / "image")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text(CONFIG)
    out = write_comparison([a, tmp_path / "b" / "image", empty], tmp_path / "out.html")
    page = Page(out.read_text(encoding="utf-8"))
    assert [e.text for e in page.all("h3")][:3] == ["a/image", "b/image", f"{tmp_path.name}/empty"]
    assert "No verdict" in page.text and "Not every run has saved held-out samples." in page.text
    same = write_comparison([a, a], tmp_path / "same.html").read_text(encoding="utf-8")
    assert "The configurations are the same." in same and "image (1)" in same


def test_one_run_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="two runs or more, got 1"):
        write_comparison([tmp_path], tmp_path / "out.html")

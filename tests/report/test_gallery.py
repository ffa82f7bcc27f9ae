"""Galleries, the strip over the steps, and scores per prompt."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path

from PIL import Image

from mmgrpo.report.data import Run, read_run
from mmgrpo.report.gallery import Budget, galleries, media, prompt_tables
from tests.kit.run_folder import CONFIG, make_run, write_samples
from tests.kit.web_page import Page


def entry(caption: str, score: float | None = 0.5, **more: object) -> dict:
    return {"caption": caption, "file": None, "media": "text", "text": "said", "scores": {"digits": score}, **more}


def run_with(folder: Path, before: list[dict], after: list[dict]) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    write_samples(folder, 0, "heldout", before)
    write_samples(folder, 20, "heldout", after)
    return read_run(folder)


def test_pairs_show_the_same_item_twice(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "image", steps=20, samples=2))
    page = Page(galleries(run, Budget()))
    pairs = page.all("article", "pair")
    assert len(pairs) == 4
    assert pairs[0].text.startswith("a red 0 on white") and "Before" in pairs[0].text and "After" in pairs[0].text
    assert page.all("img", "pixel"), "small pictures keep sharp pixels"


def test_a_gallery_has_a_bound(tmp_path: Path) -> None:
    many = [entry(f"item {i}") for i in range(30)]
    html = galleries(run_with(tmp_path / "two", many, many), Budget())
    assert len(Page(html).all("article", "pair")) == 24 and "6 are left out" in html
    write_samples(tmp_path / "two", 20, "heldout", [])
    html = galleries(read_run(tmp_path / "two"), Budget())
    assert len(Page(html).all("article", "pair")) == 24 and "6 are left out" in html


def test_samples_without_partner_are_counted(tmp_path: Path) -> None:
    run = run_with(tmp_path, [entry("a"), entry("b"), entry("c")], [entry("a"), entry("other")])
    page = Page(galleries(run, Budget()))
    assert len(page.all("article", "pair")) == 1
    assert "2 samples have no partner and are left out." in page.all("p", "note")[1].text


def test_unscored_samples_show_a_dash(tmp_path: Path) -> None:
    run = run_with(tmp_path, [entry("a", None)], [entry("a", 0.25)])
    cells = [cell.text for cell in Page(galleries(run, Budget())).all("td")]
    assert cells == ["–", "0.25", "–", "0.25"], "the weighted total, then the score"


def test_large_pictures_are_reduced(tmp_path: Path) -> None:
    write_samples(tmp_path, 0, "heldout", [{"caption": "big", "file": "0.png", "media": "image"}])
    (tmp_path / "config.yaml").write_text(CONFIG)
    path = tmp_path / "samples/step_000000/heldout/0.png"
    Image.new("RGBA", (2000, 1000), (200, 10, 10, 128)).save(path)
    html = media(read_run(tmp_path).samples[0]["heldout"][0], "step 0", Budget())
    uri = Page(html).all("img")[0].attributes["src"]
    assert uri.startswith("data:image/jpeg;base64,")
    assert Image.open(BytesIO(base64.b64decode(uri.split(",")[1]))).size == (384, 192)


def test_the_strip_follows_items_over_the_steps(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "image", steps=120, samples=8))
    strip = Page(galleries(run, Budget())).all("table")[0]
    assert "step 0step 20step 40" in strip.text and "a green 5 on black" in strip.text
    assert "a blue 6 on white" not in strip.text


def test_scores_per_prompt_are_means(tmp_path: Path) -> None:
    run = run_with(
        tmp_path,
        [entry("a", 0.25), entry("b", 0.1), entry("a", 0.75)],
        [entry("a", 1.0), entry("b", None), entry("a", 0.5)],
    )
    (a, b) = [e.text for e in Page(prompt_tables(run)).all("tr")][1:]
    assert a == "a2" + "0.5000.750+0.250" * 2
    assert b.startswith("b10.100–")


def test_no_samples_are_said(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    run = read_run(tmp_path)
    assert "No samples were saved" in galleries(run, Budget())
    assert "No samples were saved" in prompt_tables(run)

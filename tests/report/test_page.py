"""The report of one run: complete, self-contained, escaped, and written for every broken run too."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
from pathlib import Path

import pytest

from mmgrpo.files import RunError
from mmgrpo.report import write_report
from tests.kit.run_folder import CONFIG, eval_line, make_run, sample, write_samples
from tests.kit.web_page import Page, outside_references


def read(path: Path) -> Page:
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.unbalanced
    assert not outside_references(page)
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return read(write_report(make_run(tmp_path_factory.mktemp("runs") / "image")))


def metrics(folder: Path, *lines: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_the_page_lies_in_the_run_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "image", steps=20, samples=2)
    assert write_report(folder) == folder / "report.html"
    assert not list(folder.glob(".*")), "no temporary file stays"


def test_headline_numbers_and_verdict(page: Page) -> None:
    cards = [card.text for card in page.all("div", "card")]
    wanted = [("0.640", "0.797", "+0.157"), ("0.631", "0.768", "+0.137"), ("0.539", "0.695", "+0.156")]
    for card, numbers in zip(cards, [*wanted, ("0.412", "0.359", "−0.053")], strict=True):
        assert all(number in card for number in numbers), card
    assert "The gain holds" in page.all("p", "verdict")[0].text
    assert "good" in page.all("p", "verdict")[0].attributes["class"]


def test_every_section_has_its_content(page: Page) -> None:
    sections = {e.attributes["id"]: " ".join(e.text.split()) for e in page.all("section")}
    assert list(sections) == ["samples", "curves", "prompts", "numbers", "cost", "config"]
    titles = [e.text for e in page.all("h3") if "figure" in e.inside]
    for title in ("Reward", "Unseen judge: reader", "Distance to real images", "KL to the reference", "Clip share"):
        assert title in titles
    for title in ("Silent share", "Gradient norm", "Learning rate", "Seconds per step", "rollouts per second"):
        assert title in titles
    assert "Always the same: effective_group 8.00" in sections["curves"]
    assert "a red 0 on white" in sections["samples"] and "a red 0 on white" in sections["prompts"]
    assert "12.5" in sections["cost"] and "rollout" in sections["cost"]
    assert "lr: 1.5e-4" in sections["config"] and "2.14.1" in sections["config"]


def test_pictures_are_inside_and_described(page: Page) -> None:
    images = page.all("img")
    assert len(images) >= 2 * (24 + 24)
    assert all(e.attributes["src"].startswith("data:image/png;base64,") for e in images)
    assert all(e.attributes["alt"].strip() for e in images)
    assert {"a red 0 on white, step 0", "a red 0 on white, step 120"} <= {e.attributes["alt"] for e in images}


def test_charts_and_tables_are_accessible(page: Page) -> None:
    charts = page.all("svg")
    assert len(charts) >= 12
    assert all(e.attributes["role"] == "img" and e.attributes["aria-label"] for e in charts)
    reward = next(e.attributes["aria-label"] for e in charts if e.attributes["aria-label"].startswith("Reward."))
    assert "held-out prompts: 0.631 at step 0, 0.768 at step 120" in reward
    assert all(e.attributes["scope"] in ("row", "col") for e in page.all("th"))
    assert page.all("html")[0].attributes["lang"] == "en"
    assert len(page.all("h1")) == 1 and len({e.attributes["id"] for e in page.all("section")}) == 6


def test_the_page_forbids_itself_to_load_anything(page: Page) -> None:
    policy = next(e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes)
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        (element,) = page.all(tag)
        assert base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode() in policy


HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'&amp;</style></pre>"


def test_everything_is_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run <b>&", steps=20, samples=2)
    (folder / "config.yaml").write_text(CONFIG + f"logging: {json.dumps(HOSTILE)}\n")
    (folder / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    lines = [{**eval_line(step, 20, False), f"heldout/{HOSTILE}": 0.5, f"guard/{HOSTILE}": 1.0} for step in (0, 20)]
    train = [{"kind": "train", "step": step, HOSTILE: 1.0, f"seconds/{HOSTILE}": 1.0} for step in range(1, 21)]
    metrics(folder, *lines, *train)
    (folder / "config.yaml").write_text(CONFIG + f"logging: {json.dumps(HOSTILE)}\n")
    for step in (0, 20):
        for split in ("heldout", "train"):
            entries = [
                {**sample(0, 1.0, random.Random(0)), "caption": HOSTILE, "scores": {HOSTILE: 0.5}},
                {"caption": HOSTILE, "file": None, "media": "text", "text": HOSTILE, "scores": {}},
                {"caption": "x", "file": f"{HOSTILE}.png", "media": HOSTILE, "text": None, "scores": {}},
            ]
            write_samples(folder, step, split, entries)
    page = read(write_report(folder))
    assert len(page.all("script")) == 1
    assert all(e.attributes["src"].startswith("data:") for e in page.all("img"))
    assert page.text.count("<script>alert('x')</script>") >= 10, "shown as text"
    assert page.all("h1")[0].text == "run <b>&"


def test_size_is_bounded_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "image", steps=20, samples=60)
    noise = os.urandom(5_000_000)
    entries = [{"caption": f"sound {i}", "file": f"{i}.wav", "media": "audio", "scores": {"q": 0.5}} for i in range(60)]
    for step in (0, 20):
        place = write_samples(folder, step, "train", entries)
        for entry in entries:
            (place / entry["file"]).write_bytes(noise[: 5_000_000 if entry["file"] == "0.wav" else 1_000_000])
    path = write_report(folder)
    page = read(path)
    assert path.stat().st_size < 18_000_000
    assert "The first 24 are shown, 36 are left out" in page.text
    assert "0.wav: left out, 5.0 MB" in page.text
    assert "files left out to keep this page small" in page.text
    assert 0 < len(page.all("audio")) < 48


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step, "reward": step / 20_000, "kl": 0.1} for step in range(20_000)]
    path = write_report(metrics(tmp_path / "long", *lines))
    read(path)
    assert path.stat().st_size < 200_000


def test_unicode_and_long_prompts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "Läufe 画像 🎨", steps=20, samples=1)
    captions = [
        "ein rotes Känguru 🦘 in 東京",
        "word " * 2_000,
        "x" * 10_000,
        "",
        "\ud800 half a character",
        "a\nb\x00c",
    ]
    for step in (0, 20):
        entries = [{"caption": text, "file": None, "media": "text", "text": text, "scores": {}} for text in captions]
        write_samples(folder, step, "heldout", entries)
    page = read(write_report(folder))
    assert "ein rotes Känguru 🦘 in 東京" in page.text and "Läufe 画像 🎨" in page.text
    assert "(10,000 characters)" in page.text and "(no caption)" in page.text
    assert page.source.count("x" * 10_000) <= 4


def test_media_players(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mixed", steps=20, samples=1)
    files = {"a.wav": "audio", "v.mp4": "video", "v.gif": "video", "t": "text", "x.exe": "image", "gone.png": "image"}
    for step in (0, 20):
        entries = [
            {"caption": name, "file": name, "media": media, "text": "spoken words" if media == "text" else None}
            for name, media in files.items()
        ]
        place = write_samples(folder, step, "heldout", entries)
        for name in ("a.wav", "v.mp4", "x.exe"):
            (place / name).write_bytes(b"RIFFdata")
        (place / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    page = read(write_report(folder))
    assert len(page.all("audio")) == 2 and all("controls" in e.attributes for e in page.all("audio"))
    assert page.all("audio")[0].attributes["src"].startswith("data:audio/wav;base64,")
    assert len(page.all("video")) == 2 and page.all("video")[0].attributes["aria-label"]
    assert "spoken words" in page.text
    assert "x.exe: this kind of file cannot be shown" in page.text
    assert "gone.png: missing or damaged" in page.text


NOTHING_THERE = {
    "only a config": ([], "No training step was recorded."),
    "one training line": ([{"kind": "train", "step": 1, "reward": 0.5}], "its last recorded step is 1 of 120"),
    "killed before the first evaluation": (
        [{"kind": "train", "step": s, "reward": 0.5, "seconds/rollout": 1.0} for s in (1, 2, 3)],
        "no evaluation was recorded",
    ),
    "one evaluation": ([eval_line(0, 1, False)], "only one evaluation was recorded"),
    "a torn last line": ([eval_line(0, 1, False), '{"kind": "train", "step": 1, "rew'], "1 unreadable line left out"),
    "lines that are no records": (["[1]", "3", "null", '{"kind": "train"}', "\x00"], "5 unreadable lines left out"),
    "no numbers": (
        [
            {"kind": "train", "step": s, "reward": None, "kl": float("nan"), "lr": float("inf"), "grad_norm": "big"}
            for s in range(5)
        ],
        "No values were recorded.",
    ),
    "some missing": (
        [{"kind": "train", "step": s, "reward": None if s % 3 else 0.5, "clip_share": 10**400} for s in range(9)],
        "6 missing values",
    ),
    "enormous": ([{"kind": "train", "step": s, "kl": (-1) ** s * 9e99, "lr": 1e-300} for s in range(9)], "9e99"),
    "evaluations without numbers": (
        [{"kind": "eval", "step": s, "heldout/reward": None, "guard/distance_to_real": None} for s in (0, 5)],
        "No verdict",
    ),
}


@pytest.mark.parametrize("name", NOTHING_THERE)
def test_what_is_missing_is_said(name: str, tmp_path: Path) -> None:
    lines, said = NOTHING_THERE[name]
    page = read(write_report(metrics(tmp_path / "run", *lines)))
    assert said in page.text
    assert "No samples were saved" in page.text
    assert "environment.json is missing or empty" in page.text


def test_damaged_files_are_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "image", steps=20, samples=3)
    (folder / "environment.json").write_text("{torn")
    (folder / "summary.json").write_text("[]")
    (folder / "config.yaml").write_text("a: [1\nb: <x>")
    (folder / "samples/step_000000/heldout/samples.json").write_text('[{"capt')
    (folder / "samples/step_000020/train/samples.json").write_text(
        '[3, null, {}, {"scores": [1]}, {"file": "../../x"}]'
    )
    (folder / "samples/step_000020/heldout/000.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    (folder / "samples/step_abc").mkdir()
    page = read(write_report(folder))
    for said in ("environment.json: cannot be read", "not valid YAML", "samples.json: cannot be read", "b: <x>"):
        assert said in page.text
    assert "000.png: missing or damaged" in page.text


def test_samples_of_one_step_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "image", steps=0, samples=3)
    page = read(write_report(folder))
    assert "Samples were saved at one step only" in page.text
    assert len(page.all("img")) == 6


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        write_report(tmp_path / "nothing")
    with pytest.raises(RunError, match="holds no run"):
        write_report(tmp_path)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "image", steps=20, samples=2)
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()

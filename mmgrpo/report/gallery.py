"""Samples in the page: before and after side by side, a strip over the steps, and the scores per prompt."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from .checks import total_score
from .data import Run, Sample, reward_weights
from .markup import MISSING, Html, change, el, fold, join, number, table

MAX_PAIRS, SHOWN_PAIRS = 24, 12
STRIP_ITEMS, STRIP_STEPS = 6, 8
MAX_ROWS = 300
MAX_SIDE, PIXEL_SIDE = 384, 128
MAX_FILE_BYTES, MAX_PAGE_BYTES = 4_000_000, 16_000_000
CAPTION_START = 160

TYPES = {
    "image": {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".gif": "gif", ".webp": "webp"},
    "audio": {".wav": "wav", ".mp3": "mpeg", ".ogg": "ogg", ".flac": "flac", ".m4a": "mp4"},
    "video": {".mp4": "mp4", ".webm": "webm"},
}
TITLES = {"heldout": "Held-out prompts", "train": "Training prompts"}


@dataclass
class Budget:
    """The bytes of media that may still go into the page, and how many files were left out for lack of them."""

    left: int = MAX_PAGE_BYTES
    left_out: int = 0


def galleries(run: Run, budget: Budget) -> Html:
    """Before/after galleries of both splits and the strip over the steps; sentences where there is nothing to show."""
    if not run.samples:
        return el("p", "No samples were saved.", class_="empty")
    parts = [_strip(run, budget)]
    for split in ("heldout", "train"):
        found = [step for step, splits in run.samples.items() if splits.get(split)]
        if found:
            content = _gallery(run, split, found[0], found[-1], budget)
            parts.append(join(el("h3", TITLES[split]), content) if split == "heldout" else fold(TITLES[split], content))
    if budget.left_out:
        parts.append(el("p", f"{budget.left_out} files left out to keep this page small; see samples/.", class_="note"))
    return join(parts)


def _gallery(run: Run, split: str, first: int, last: int, budget: Budget) -> Html:
    before, after = run.samples[first][split], run.samples[last][split]
    if first == last:
        cards = [_single(sample, first, budget) for sample in before[:MAX_PAIRS]]
        return join(_left_out(len(before) - MAX_PAIRS), el("div", *cards, class_="pairs"))
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a.caption == b.caption]
    unmatched = max(len(before), len(after)) - len(pairs)
    weights = reward_weights(run)
    cards = [_pair(a, b, (first, last), weights, budget) for a, b in pairs[:MAX_PAIRS]]
    return join(
        el("p", f"Same prompts and same noise at step {first} (left) and step {last} (right).", class_="note"),
        el("p", f"{unmatched} samples have no partner and are left out.", class_="note") if unmatched else None,
        _left_out(len(pairs) - MAX_PAIRS),
        el("div", *cards[:SHOWN_PAIRS], class_="pairs"),
        fold(f"{len(cards) - SHOWN_PAIRS} more", el("div", *cards[SHOWN_PAIRS:], class_="pairs"))
        if len(cards) > SHOWN_PAIRS
        else None,
    )


def _left_out(count: int) -> Html | None:
    text = f"The first {MAX_PAIRS} are shown, {count} are left out; all are in the folder samples/."
    return el("p", text, class_="note") if count > 0 else None


def _pair(a: Sample, b: Sample, steps: tuple[int, int], weights: dict[str, float], budget: Budget) -> Html:
    sides = [
        el("div", media(sample, f"step {step}", budget), el("p", name, class_="side"), class_="half")
        for sample, step, name in ((a, steps[0], "Before"), (b, steps[1], "After"))
    ]
    names = list(dict.fromkeys([*a.scores, *b.scores]))
    if len(weights) > 1 and "reward" not in names:
        names.insert(0, "reward")
    rows = [
        _score_row(name, total_score(a.scores, name, weights), total_score(b.scores, name, weights)) for name in names
    ]
    head = el("thead", el("tr", *(el("th", text, scope="col") for text in ("Score", "Before", "After"))))
    scores = el("table", head, el("tbody", *rows), class_="scores") if rows else el("p", "Not scored.", class_="note")
    wide = a.media == "text" or b.media == "text"
    return el(
        "article", caption(a.caption), el("div", *sides, class_="sides"), scores, class_="pair wide" if wide else "pair"
    )


def _score_row(name: str, before: float | None, after: float | None) -> Html:
    texts = [_short(before), _short(after)]
    up = after is not None and before is not None and after > before
    kind = None if MISSING in texts or texts[0] == texts[1] else ("up" if up else "down")
    return el("tr", el("th", name, scope="row"), el("td", texts[0]), el("td", texts[1], class_=kind))


def _short(score: float | None) -> str:
    """Two decimals, or two digits of a large score; the table of scores per prompt has more."""
    return number(score, 2) if score is None or abs(score) >= 10 else f"{score:.2f}".replace("-", "−")


def _single(sample: Sample, step: int, budget: Budget) -> Html:
    scores = ", ".join(f"{name} {_short(score)}" for name, score in sample.scores.items())
    content = [media(sample, f"step {step}", budget), el("p", scores, class_="note")]
    return el("article", caption(sample.caption), *content, class_="pair wide" if sample.media == "text" else "pair")


def caption(text: str) -> Html:
    """A caption; a long one opens on a click."""
    if not text.strip():
        return el("p", "(no caption)", class_="caption empty")
    if len(text) <= CAPTION_START:
        return el("p", text, class_="caption")
    start = el("span", text[:CAPTION_START].rstrip(), "… ", el("i", f"({len(text):,} characters)"))
    return fold(start, el("p", text, class_="caption whole"))


def media(sample: Sample, when: str, budget: Budget) -> Html:
    """The sample itself: text, picture, audio or video player; a sentence where it cannot be shown."""
    if sample.media == "text" or (sample.file is None and sample.text is not None):
        return el("blockquote", sample.text if sample.text else "(empty text)", class_="output")
    what = f"{sample.caption[:CAPTION_START] or 'sample'}, {when}"
    if sample.file is None:
        return el("p", "no file named", class_="empty")
    kind, uri, pixelated = _data_uri(sample.file, budget)
    if kind == "image":
        return el("img", src=uri, alt=what, loading="lazy", class_="pixel" if pixelated else None)
    if kind == "audio":
        return el("audio", src=uri, controls=True, preload="metadata", aria_label=what)
    if kind == "video":
        return el("video", src=uri, controls=True, loop=True, muted=True, playsinline=True, aria_label=what)
    return el("p", uri, class_="empty")


def _data_uri(path: Path, budget: Budget) -> tuple[str, str, bool]:
    """(kind, data URI, shown with sharp pixels), or ("", why it is not shown, False)."""
    suffix = path.suffix.lower()
    kind = next((kind for kind, types in TYPES.items() if suffix in types), "")
    if not kind:
        return "", f"{path.name}: this kind of file cannot be shown", False
    try:
        content = path.read_bytes()
        mime, size = f"{kind}/{TYPES[kind][suffix]}", None
        if kind == "image":
            mime, content, size = _picture(content, mime)
    except OSError:  # Pillow's error for a damaged picture is an OSError too
        return "", f"{path.name}: missing or damaged", False
    uri = f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"
    if len(content) > MAX_FILE_BYTES or len(uri) > budget.left:
        budget.left_out += 1
        return "", f"{path.name}: left out, {len(content) / 1e6:.1f} MB", False
    budget.left -= len(uri)
    return kind, uri, size is not None and max(size) <= PIXEL_SIDE


def _picture(content: bytes, mime: str) -> tuple[str, bytes, tuple[int, int]]:
    """The picture as it goes into the page: small ones untouched, still ones over 384 pixels a side reduced."""
    from PIL import Image

    try:
        with Image.open(BytesIO(content)) as image:
            image.load()
            if max(image.size) <= MAX_SIDE or getattr(image, "is_animated", False):
                return mime, content, image.size
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            reduced = BytesIO()
            image.convert("RGB").save(reduced, "JPEG", quality=88)
            return "image/jpeg", reduced.getvalue(), image.size
    except (SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise OSError(str(error)) from error


def _strip(run: Run, budget: Budget) -> Html | None:
    """A few held-out items over the course of training, for pictures saved at three steps or more."""
    found = {step: splits["heldout"] for step, splits in run.samples.items() if splits.get("heldout")}
    if len(found) < 3 or any(sample.media != "image" for samples in found.values() for sample in samples[:STRIP_ITEMS]):
        return None
    steps = _spread(list(found), STRIP_STEPS)
    count = min(STRIP_ITEMS, *(len(found[step]) for step in steps))
    rows = []
    for index in range(count):
        items = [found[step][index] for step in steps]
        if len({item.caption for item in items}) == 1:
            cells = [el("td", media(item, f"step {step}", budget)) for item, step in zip(items, steps, strict=True)]
            label = items[0].caption if len(items[0].caption) <= 60 else f"{items[0].caption[:59]}…"
            rows.append(el("tr", el("th", label, scope="row"), *cells))
    head = el("tr", el("th", "Prompt", scope="col"), *(el("th", f"step {step}", scope="col") for step in steps))
    strip = el("table", el("caption", "The same noise as training goes on"), el("thead", head), el("tbody", *rows))
    return el("div", strip, class_="scroll strip", tabindex="0", role="region", aria_label="Samples over the steps")


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def prompt_tables(run: Run) -> Html:
    """Mean scores per prompt, before and after, over all saved samples of each split."""
    parts = [_prompt_table(run, split) for split in ("heldout", "train")]
    return (
        join(parts)
        if any(parts)
        else el("p", "No samples were saved, so there are no scores per prompt.", class_="empty")
    )


def _prompt_table(run: Run, split: str) -> Html | None:
    found = [splits[split] for splits in run.samples.values() if splits.get(split)]
    if not found:
        return None
    before, after = _means(run, found[0]), _means(run, found[-1])
    names = list(dict.fromkeys(name for means in (*before.values(), *after.values()) for name in means if name != "n"))
    head: list[object] = ["Prompt", "Samples"]
    for name in names:
        head += [f"{name} before", f"{name} after", "change"]
    rows: list[list[object]] = []
    for text in list(dict.fromkeys([*before, *after]))[:MAX_ROWS]:
        a, b = before.get(text, {}), after.get(text, {})
        row: list[object] = [caption(text), f"{b.get('n', a.get('n', 0)):.0f}"]
        for name in names:
            row += [number(a.get(name)), number(b.get(name)), change(a.get(name), b.get(name))]
        rows.append(row)
    more = len({*before, *after}) - len(rows)
    note = el("p", f"The first {MAX_ROWS} prompts are shown, {more} are left out.", class_="note") if more > 0 else None
    grid = table(head, rows, caption=f"{TITLES[split]}: mean score of the saved samples", kind="sortable")
    return join(grid, note) if split == "heldout" else fold(TITLES[split], grid, note)


def _means(run: Run, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """caption -> score name -> mean over its scored samples, with the number of samples as `n`."""
    weights = reward_weights(run)
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.caption, []).append(sample)
    means: dict[str, dict[str, float]] = {}
    for text, members in groups.items():
        names = list(dict.fromkeys(name for member in members for name in member.scores))
        if len(weights) > 1 and "reward" not in names:
            names.insert(0, "reward")
        means[text] = {"n": float(len(members))}
        for name in names:
            scored = [s for member in members if (s := total_score(member.scores, name, weights)) is not None]
            if scored:
                means[text][name] = sum(scored) / len(scored)
    return means

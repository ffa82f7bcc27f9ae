"""The pages in a real browser: drawn, without errors, without scrolling sideways on a telephone, and with their script
working under the page's own policy."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from mmgrpo.report import write_comparison, write_report
from tests.kit.run_folder import make_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --virtual-time-budget=3000"
).split()

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser installed (looked for {', '.join(NAMES)})"),
]


def browse(page: Path, profile: Path, *flags: str) -> str:
    """Open a page; returns what the browser printed. Fails on any message in the page's console."""
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "image", samples=8))


@pytest.mark.parametrize("scheme", ["0", "1"], ids=["dark", "light"])
def test_the_page_is_drawn(scheme: str, report: Path, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    flags = (f"--screenshot={shot}", "--window-size=1200,3000", f"--blink-settings=preferredColorScheme={scheme}")
    browse(report, tmp_path / "profile", *flags)
    picture = Image.open(shot).convert("RGB")
    assert picture.size == (1200, 3000)
    ground = picture.getpixel((2, 2))
    assert (sum(ground) > 600) == (scheme == "1"), f"the ground is {ground}"
    for top in range(0, 3000, 500):  # something is drawn all the way down
        colours = picture.crop((0, top, 1200, top + 500)).getcolors(1 << 20)
        assert colours is not None and len(colours) > 20
    counted = {colour: n for n, colour in picture.getcolors(1 << 24) or []}
    red = sum(n for (r, g, b), n in counted.items() if r > 180 and g < 90 and b < 90)
    assert red > 2_000, "the pictures of the gallery are there"


def test_the_comparison_is_drawn(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=40, samples=4) for name in ("a", "b")]
    shot = tmp_path / "page.png"
    page = write_comparison(runs, tmp_path / "comparison.html")
    browse(page, tmp_path / "profile", f"--screenshot={shot}", "--window-size=1200,2000")
    assert len(Image.open(shot).convert("RGB").getcolors(1 << 24) or []) > 200


def test_the_script_runs_under_the_policy(report: Path, tmp_path: Path) -> None:
    dom = browse(report, tmp_path / "profile", "--dump-dom")
    assert '<th scope="col"><button>Prompt</button></th>' in dom


DRIVE = """
<script>
  const click = column => document.querySelectorAll('table.sortable th button')[column].click();
  const firsts = () => [...document.querySelector('table.sortable tbody').rows].map(row => row.cells[0].textContent);
  const said = [];
  click(0); said.push(firsts().join());
  click(0); said.push(firsts().join());
  const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 9}));
  said.push(svg.querySelector('.axis').textContent, svg.parentNode.querySelectorAll('.legend b')[2].textContent);
  svg.dispatchEvent(new PointerEvent('pointerleave'));
  said.push(svg.querySelector('.axis').textContent, svg.parentNode.querySelectorAll('.legend b')[2].textContent);
  document.title = said.join('|');
</script>
"""


def test_sorting_and_reading_off_a_chart(report: Path, tmp_path: Path) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text(encoding="utf-8"))
    driven = tmp_path / "driven.html"
    driven.write_text(text.replace("</body>", DRIVE + "</body>"), encoding="utf-8")
    dom = browse(driven, tmp_path / "profile", "--dump-dom")
    up, down, step, value, idle, last = re.findall(r"<title>(.*?)</title>", dom)[0].split("|")
    assert up.split(",") == sorted(up.split(",")) and down.split(",") == sorted(up.split(","), reverse=True)
    assert re.fullmatch(r"step (5|6)\d", step)
    assert float(value) == pytest.approx(0.70, abs=0.02), "held-out reward half-way"
    assert (idle, last) == ("step", "0.768")


def test_a_telephone_scrolls_down_only(report: Path, tmp_path: Path) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text(encoding="utf-8"))
    tell = "<script>parent.postMessage([innerWidth, document.documentElement.scrollWidth], '*')</script></body>"
    (tmp_path / "inner.html").write_text(text.replace("</body>", tell), encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text(
        "<title>waiting</title><script>addEventListener('message', e => { document.title = e.data.join() })</script>"
        '<iframe src="inner.html" style="width:390px;height:800px;border:0"></iframe>'
    )
    dom = browse(outer, tmp_path / "profile", "--dump-dom")
    assert re.findall(r"<title>(.*?)</title>", dom) == ["390,390"]

"""The documents say what is true: their commands exist, their Python runs, their links and lists are right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mmgrpo.cli import _parse, command_help

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> set[str]:
    """Lines of the bash blocks."""
    return {line for block in blocks(text, "bash") for line in block.splitlines() if line and not line.startswith("#")}


def make_lines(target: str) -> list[str]:
    """What `make target` runs, the stamp files apart."""
    # The tests run under make themselves, whose variables must not reach this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"}
    done = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines() if not line.startswith(("touch", "make"))]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_only_wraps_what_the_readme_spells_out(target: str) -> None:
    missing = [line for line in make_lines(target) if line not in commands(README)]
    assert f"make {target}" in commands(README) and missing == []


def test_every_make_target_of_the_documents_exists() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    targets = set(re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE))
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert targets == rules


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_in_the_documents_runs(path: Path, tmp_path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "python"):
        script = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{block}"
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_the_table_of_commands_is_the_command_lines() -> None:
    assert re.findall(r"^\| `mmgrpo ([a-z-]+)", README, flags=re.MULTILINE) == list(command_help())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_the_documents_is_understood(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"`mmgrpo ([a-z-]+)", text)) <= set(command_help())
    for line in commands(text):
        program, *arguments = shlex.split(line)
        if program.rpartition("/")[2] == "mmgrpo":
            assert _parse(arguments) is not None


def test_the_table_of_recipes_is_the_cores() -> None:
    from mmgrpo.core import recipes

    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", text.split("## KL")[0], flags=re.MULTILINE)) == recipes()


def test_the_catalogue_numbers_every_method_once() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").split("## The catalogue")[1]
    assert re.findall(r"^\| (\d\d) \|", text, flags=re.MULTILINE) == [f"{n:02d}" for n in range(1, 61)]


def test_the_constraints_lie_in_the_ranges_and_cover_them() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pins[canonicalize_name(line.split("==")[0])] = line.split("==")[1]
    groups = project["optional-dependencies"]
    wanted = [Requirement(text) for text in [*project["dependencies"], *groups["rewards"], *groups["dev"]]]
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name not in ("mmgrpo", "pip"):
            assert requirement.specifier.contains(pins[name]), f"{requirement} and the pin {pins[name]}"


def test_the_changelog_has_the_version() -> None:
    import mmgrpo

    assert f"## {mmgrpo.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

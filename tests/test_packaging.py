"""The package as users get it: every way of installing, in new environments that see the dependencies and no source.

A new environment is a venv whose site-packages names the folder with the dependencies as a plain path, so that an
editable installation of ours in that folder (a .pth hook) does not take effect there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parent.parent
# Where a folder of the source tree is found in the wheel.
FOLDERS = {"mmgrpo": "mmgrpo", **{name: f"mmgrpo/{name}" for name in ("pipelines", "rewards", "configs")}}
NAMES = ["mmgrpo", "mmgrpo.pipelines", "mmgrpo.rewards", "mmgrpo.configs"]


def source_files() -> dict[str, Path]:
    """Every file that the package consists of: path in the wheel -> path in the source tree."""
    files = {}
    for folder, target in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[f"{target}/{path.relative_to(ROOT / folder).as_posix()}"] = path
    return files


def modules() -> list[str]:
    """The dotted names of all modules in the source tree."""
    names = [Path(name).with_suffix("").parts for name in source_files() if name.endswith(".py")]
    return sorted({".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names})


def run(python: Path | str, *args: str, cwd: Path, **env: str) -> str:
    """Run Python without the caller's PYTHON* variables; its output. A failure shows what it printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | env
    done = subprocess.run([str(python), *args], cwd=cwd, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"in {cwd}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def new_environment(folder: Path) -> Path:
    """A venv without ours that finds the dependencies of the running interpreter; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def install(python: Path, *what: str) -> None:
    """pip install without dependencies and without the network."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", str(python), "install", *options, *what, cwd=python.parent)


def copy_source(folder: Path) -> Path:
    """A copy of what is needed to build, so that building leaves nothing in the source tree."""
    folder.mkdir(parents=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_source(tmp_path_factory.mktemp("build") / "mmgrpo")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", ".", cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel installed."""
    python = new_environment(tmp_path_factory.mktemp("wheel") / "venv")
    install(python, str(wheel))
    return python


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        extra = [name for name in archive.namelist() if ".dist-info/" in name]
    assert names == set(source_files())
    assert "mmgrpo/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in extra) and any("NOTICE" in name for name in extra)


def test_every_module_of_the_wheel_imports_without_the_source_tree(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {modules()!r}:\n"
        "    importlib.import_module(name)\n"
        "ours = [m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'mmgrpo' and m.__file__]\n"
        "print(*ours, sep='\\n')\n"
    )
    files = run(installed, "-P", "-c", code, cwd=tmp_path).splitlines()
    assert len(files) == len(modules())
    assert all(Path(file).is_relative_to(installed.parent.parent) for file in files), files


def test_every_config_of_the_wheel_resolves(installed: Path, tmp_path: Path) -> None:
    names = [path.stem for path in (ROOT / "configs").glob("*.yaml")]
    code = f"from mmgrpo.config import load_config\nfor name in {names!r}: load_config(name, [])\nprint('fine')"
    assert names and run(installed, "-P", "-c", code, cwd=tmp_path).strip() == "fine"


def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run([installed.parent / "mmgrpo", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "train" in done.stdout, done.stderr


def in_checkout(source: Path, tmp: Path) -> Path:
    """Not installed at all: works from the checkout's own folder alone."""
    return new_environment(tmp / "venv")


def editable(source: Path, tmp: Path) -> Path:
    """pip install -e ."""
    python = new_environment(tmp / "venv")
    install(python, "--editable", str(source))
    return python


def strict(source: Path, tmp: Path) -> Path:
    """pip install -e . with setuptools' strict mode: a tree of links instead of the source folders."""
    python = new_environment(tmp / "venv")
    install(python, "--config-settings", "editable_mode=strict", "--editable", str(source))
    return python


def from_wheel(source: Path, tmp: Path) -> Path:
    """pip install ."""
    python = new_environment(tmp / "venv")
    install(python, str(source))
    return python


@pytest.mark.parametrize("way", [in_checkout, editable, strict, from_wheel], ids=lambda way: way.__name__)
def test_our_names_import_from_the_checkout_and_from_elsewhere(
    way: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    source = copy_source(tmp_path / "checkout")
    python = way(source, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = f"import importlib\nfor name in {NAMES!r}: print(importlib.import_module(name).__file__)"
    for folder in [source] if way is in_checkout else [source, elsewhere]:
        assert len(run(python, "-c", code, cwd=folder).splitlines()) == len(NAMES)
    # In the checkout's folder Python takes the checkout, whatever is installed: what one edits is what runs.
    found = run(python, "-c", code, cwd=source).splitlines()
    assert all(Path(file).is_relative_to(source) for file in found), found


def test_a_users_own_modules_of_the_same_names_do_not_hide_ours(installed: Path, tmp_path: Path) -> None:
    for name in ("rewards", "pipelines", "configs"):
        (tmp_path / f"{name}.py").write_text("mine = True\n", encoding="utf-8")
    script = "import configs, pipelines, rewards\nassert configs.mine and pipelines.mine and rewards.mine\n"
    script += "".join(f"import {name}\nassert not hasattr({name}, 'mine')\n" for name in NAMES)
    (tmp_path / "script.py").write_text(script + "print('fine')\n", encoding="utf-8")
    assert run(installed, "script.py", cwd=tmp_path).strip() == "fine"
    # The same beside a source checkout on the path, as an editable installation puts it there.
    assert run(sys.executable, str(tmp_path / "script.py"), cwd=tmp_path, PYTHONPATH=str(ROOT)).strip() == "fine"


@pytest.mark.parametrize("name", ["rewards", "pipelines", "configs", "mmgrpo.mmgrpo"])
def test_another_name_is_refused_with_the_cure(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError" in done.stderr and "mmgrpo" in done.stderr.splitlines()[-1]


def test_a_folder_that_only_contains_the_package_adds_no_path(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mmgrpo", tmp_path / "mmgrpo", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import mmgrpo; print(len(mmgrpo.__path__))"
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "1"
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "theirs" # and not name = "mmgrpo"\n', encoding="utf-8")
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "1"
    project.write_text("[project]\nname = 'mmgrpo'\n", encoding="utf-8")
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "2"


def test_import_is_fast_and_help_does_not_load_torch(tmp_path: Path) -> None:
    # CPU time: the clock on the wall would measure how busy the machine is.
    code = "import time; t = time.process_time(); import mmgrpo; print(time.process_time() - t)"
    assert min(float(run(sys.executable, "-c", code, cwd=ROOT)) for _ in range(5)) < 0.05
    code = (
        "import sys\nimport mmgrpo\nfrom mmgrpo.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'torch', 'numpy', 'diffusers', 'transformers', 'pydantic', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    assert "train" in run(sys.executable, "-c", code, cwd=ROOT)


def test_python_m_is_the_command() -> None:
    assert "train" in run(sys.executable, "-m", "mmgrpo", "--help", cwd=ROOT)


def test_lazy_names_are_the_cores() -> None:
    import mmgrpo
    from mmgrpo import core

    assert all(getattr(mmgrpo, name) is getattr(core, name) for name in mmgrpo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Rolouts'"):
        _ = mmgrpo.Rolouts

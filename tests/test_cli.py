"""The command line: help for newcomers, errors in one line, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mmgrpo.pipelines.base import PipelineError
from mmgrpo.rewards.base import RewardError

from mmgrpo import __version__, cli
from mmgrpo.cli import command_help, is_user_error, main
from mmgrpo.core import RolloutError
from mmgrpo.errors import Interrupted, UserError
from mmgrpo.policies.base import PolicyError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands in for the module of `train` and `resume`: the tests put functions into it."""
    module = ModuleType("mmgrpo.commands.train")
    monkeypatch.setitem(sys.modules, "mmgrpo.commands.train", module)
    return module


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_of_everything_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        if arguments:
            with pytest.raises(SystemExit) as stop:
                main(arguments)
            assert stop.value.code == 0
        else:
            assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in command_help())
        assert "mmgrpo train image" in out
    for name in command_help():
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"example:\n  mmgrpo {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"mmgrpo {__version__}\n"


WRONG = {
    "misspelt command": (["trian"], "unknown command 'trian'; did you mean 'train'? (there are: compare, "),
    "unlike any command": (["xyz"], "unknown command 'xyz' (there are: "),
    "misspelt option": (["train", "image", "--sett", "a=b"], "unknown option '--sett'; did you mean --set?"),
    "abbreviated option": (["train", "image", "--se", "a=b"], "unknown option '--se'; did you mean --set?"),
    "misspelt global option": (["--verson"], "unknown option '--verson'; did you mean --version?"),
    "no config": (["train"], "the following arguments are required: CONFIG; see `mmgrpo train --help`"),
    "forgotten --set": (
        ["train", "image", "lr=1"],
        "unexpected argument 'lr=1'; to change the config, write --set lr=1",
    ),
    "too much": (["train", "image", "more"], "unexpected argument 'more'; see `mmgrpo train --help`"),
    "not a number": (
        ["sample", "runs/x", "--count", "many"],
        "argument --count: invalid int value: 'many'; see `mmgrpo s",
    ),
    "misspelt config": (["train", "imgae"], "unknown ready-made config 'imgae'; did you mean 'image'?"),
    "config before --set": (["train", "--set", "a=b", "image"], "the following arguments are required: CONFIG"),
    "missing run": (["resume", "runs/nowhere"], "runs/nowhere: no such folder"),
    "missing run of a report": (["report", "runs/nowhere"], "runs/nowhere: no such folder"),
    "bad override": (
        ["train", "image", "--set", "optimizer.lrr=1"],
        "optimizer.lrr: unknown key; did you mean optimizer.lr?",
    ),
    "misspelt list": (["list", "recipies"], "unknown list 'recipies'; did you mean 'recipes'?"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_errors_are_one_line_with_a_cure(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("mmgrpo: ") and message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("kind", [UserError, RolloutError, RewardError, PipelineError, PolicyError])
def test_errors_for_the_user_have_no_traceback(
    stub: ModuleType, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def train(args: Namespace) -> None:
        raise kind("the reward 'x' returned NaN on row 3")

    stub.train = train  # type: ignore[attr-defined]
    assert run("train", "image", capsys=capsys) == (2, "", "mmgrpo: the reward 'x' returned NaN on row 3\n")


def test_a_bug_shows_its_traceback_and_debug_shows_all(stub: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(args: Namespace) -> None:
        raise args.error

    stub.train = train  # type: ignore[attr-defined]
    monkeypatch.setattr(cli, "_parse", lambda arguments: Namespace(does="train:train", error=ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        main(["train"])
    monkeypatch.setattr(cli, "_parse", lambda arguments: Namespace(does="train:train", error=UserError("known")))
    assert main(["train"]) == 2
    monkeypatch.setenv("MMGRPO_DEBUG", "1")
    with pytest.raises(UserError, match="known"):
        main(["train"])


def test_out_of_memory_names_the_cure(stub: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def train(args: Namespace) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    stub.train = train  # type: ignore[attr-defined]
    code, _, err = run("train", "image", capsys=capsys)
    assert code == 2 and err.startswith("mmgrpo: the GPU is out of memory; lower training.chunk")


def test_is_user_error() -> None:
    class Own(RewardError):
        pass

    assert is_user_error(Own()) and is_user_error(Interrupted())
    assert not is_user_error(ValueError())


def test_interrupts(stub: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def train(args: Namespace) -> None:
        raise KeyboardInterrupt

    def resume(args: Namespace) -> None:
        raise Interrupted("step 20 is saved; continue with `mmgrpo resume runs/a`")

    stub.train, stub.resume = train, resume  # type: ignore[attr-defined]
    assert run("train", "image", capsys=capsys) == (130, "", "mmgrpo: interrupted; nothing was changed\n")
    said = "mmgrpo: step 20 is saved; continue with `mmgrpo resume runs/a`\n"
    assert run("resume", "runs/a", capsys=capsys) == (130, "", said)
    monkeypatch.setenv("RANK", "1")
    assert run("train", "image", capsys=capsys) == (130, "", "")


def test_an_interrupt_inside_an_import_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(
        "import sys\nfrom types import ModuleType\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from mmgrpo.cli import main\n"
        "module = sys.modules['mmgrpo.commands.train'] = ModuleType('mmgrpo.commands.train')\n"
        "module.train = lambda args: exec('raise KeyboardInterrupt')\n"
        "sys.exit(main(['train', 'image']))\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, "-m", "probe"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "mmgrpo: interrupted; nothing was changed\n")


def test_arguments_reach_the_command(stub: ModuleType) -> None:
    seen = []
    stub.train = seen.append  # type: ignore[attr-defined]
    assert main(["train", "image", "--set", "a=1", "b=[x, y]", "--set", "c=2"]) == 0
    assert (seen[0].config, seen[0].overrides) == ("image", ["a=1", "b=[x, y]", "c=2"])


def test_help_loads_no_torch_and_a_closed_pipe_is_no_error() -> None:
    code = (
        "import sys\nfrom mmgrpo.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "main(['list', 'configs'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    piped = f"{sys.executable} -m mmgrpo schema | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {piped}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("wait", [0.05, 0.3, 1.0])
def test_ctrl_c_while_starting_says_one_line(tmp_path: Path, wait: float) -> None:
    """At any moment before the loop: no traceback, nothing written."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mmgrpo.cli import main; print(1, flush=True); "
    script = code + "sys.exit(main(['list', 'recipes']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) in [(130, "mmgrpo: interrupted; nothing was changed\n"), (0, "")]
    assert list(tmp_path.iterdir()) == []

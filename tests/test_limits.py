"""The limits that keep the code small and the optimizer free of any domain. Each check is a function that returns what
breaks it, so that the checks themselves are tested on made-up sources at the end of this file.

Exceptions stand in allow-lists with their reason, and one that is no longer needed fails like a broken limit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("mmgrpo", "pipelines", "rewards", "configs")
FILE_LINES, CORE_FILE_LINES, CORE_LINES, FUNCTION_LINES = 500, 300, 3000, 60

# No word of a domain in the optimizer: it sees rows of decisions.
DOMAIN_WORDS = (
    "image images picture pictures pixel pixels photo video videos frame frames latent latents scheduler vae "
    "audio speech waveform phoneme token tokens tokenizer vocabulary text texts prompt prompts caption captions "
    "sentence sentences language diffusion denoise denoising denoiser flow robot robots driving vehicle gripper"
).split()
# Names of published methods that hold such a word: they stand in the core as sources.
DOMAIN_NAMES = {"gspo_token", "GSPO-token", "Flow-GRPO"}
# (file in mmgrpo/core, word) -> why it stands there.
DOMAIN_ALLOWED: dict[tuple[str, str], str] = {}

# Where a method's name may stand in code: the records, the core's classics and the list of what they are.
METHOD_HOMES = ("mmgrpo/methods/", "mmgrpo/core/recipes.py")
# (file, method) -> why it stands there.
METHOD_ALLOWED: dict[tuple[str, str], str] = {}

# Modules whose tests lie under another name: module -> (test file, reason).
MIRROR_ALLOWED: dict[str, tuple[str, str]] = {
    "mmgrpo/__init__.py": ("test_packaging.py", "what it does is how the package is found"),
    "mmgrpo/core/recipes.py": ("core/test_identity.py", "every recipe, by the weight it gives to a success rate"),
    "mmgrpo/core/stage.py": ("core/test_algorithm.py", "declaring and building stages shows in what is built of them"),
    "mmgrpo/policies/conformance.py": ("policies/test_base.py", "the promises behind base.check_policy"),
    "mmgrpo/policies/reference.py": ("policies/test_base.py", "two helpers of every policy, beside the protocol"),
    "mmgrpo/policies/weights.py": ("policies/test_base.py", "saving and loading, beside the protocol"),
    "mmgrpo/training/clock.py": ("training/test_loop.py", "the seconds in a run's metrics"),
    "mmgrpo/training/replay.py": ("training/test_step.py", "one helper of the step"),
    "mmgrpo/training/session.py": ("training/test_loop.py", "what a run holds between its steps"),
}

# What may be imported from where, outside of the standard library (rooms of mmgrpo by their folder).
CORE_IMPORTS = {"torch", "mmgrpo.core"}
NEVER_IN_REWARDS = {"diffusers", "peft"}
HEAVY = {"torchvision", "torchaudio", "transformers", "diffusers", "peft", "accelerate", "sklearn", "open_clip"}
# Distributions whose import name is another.
IMPORT_NAMES = {"pillow": "PIL", "scikit-learn": "sklearn", "pyyaml": "yaml", "open_clip_torch": "open_clip"}
# Rooms that rewards know nothing of; of pipelines, the others may know the protocol alone.
ROOMS = [f"mmgrpo.{room}" for room in ("pipelines", "training", "policies", "sampling", "methods")]


def sources(*folders: str) -> dict[str, str]:
    """path -> text of the Python files in these folders of the repository."""
    paths = (p for folder in folders for p in sorted((ROOT / folder).rglob("*.py")))
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}


def too_long(files: dict[str, str], limit: int) -> list[str]:
    lengths = {path: len(text.splitlines()) for path, text in files.items()}
    return [f"{path} has {n} lines (limit {limit})" for path, n in lengths.items() if n > limit]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def long_functions(files: dict[str, str]) -> list[str]:
    found = []
    for path, text in files.items():
        for node in functions(ast.parse(text)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}: {node.name} has {length} lines (limit {FUNCTION_LINES})")
    return found


def words(text: str) -> set[str]:
    """Lower-case words of a text; `text_encoder`, `textEncoder` and "Text" all hold `text`, `context` does not."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)}


def domain_words(files: dict[str, str], allowed: Iterable[tuple[str, str]], exempt: set[str]) -> list[str]:
    """Domain words in identifiers, strings, docstrings and comments. `exempt`: names in which they may stand."""
    found, used = [], set()
    for path, text in files.items():
        name = path.removeprefix("mmgrpo/core/")
        for number, line in enumerate(text.splitlines(), 1):
            for item in exempt:
                line = re.sub(rf"\b{item}\b", "", line)
            for word in sorted(words(line) & set(DOMAIN_WORDS)):
                used.add((name, word))
                if (name, word) not in allowed:
                    found.append(f"{path}:{number}: the word {word!r} belongs to a domain")
    return found + [f"the exception {pair} is no longer needed" for pair in allowed if pair not in used]


def code_tokens(text: str) -> Iterator[tuple[int, str]]:
    """(line, token) of identifiers and strings, without comments and docstrings (documentation may name sources)."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for item in tokenize.generate_tokens(io.StringIO(text).readline):
        if item.type in (tokenize.NAME, tokenize.STRING) and item.start[0] not in docstrings:
            yield item.start[0], item.string


def method_names(files: dict[str, str], names: set[str], allowed: Iterable[tuple[str, str]]) -> list[str]:
    """Names of methods in code outside of their homes: `if method == "grpo"`, `use_grpo`, `GRPOTrainer`."""
    pattern = re.compile(rf"(?<![a-z])({'|'.join(sorted(names, key=len, reverse=True))})(?![a-z])")
    found, used = [], set()
    for path, text in files.items():
        if path.startswith(METHOD_HOMES):
            continue
        for number, token in code_tokens(text):
            spelled = re.sub(r"([a-z])([A-Z])|([A-Z])([A-Z][a-z])", r"\1\3_\2\4", token).lower()
            for name in sorted(set(pattern.findall(spelled))):
                used.add((path, name))
                if (path, name) not in allowed:
                    found.append(f"{path}:{number}: the method's name {name!r} outside of mmgrpo/methods")
    return found + [f"the exception {pair} is no longer needed" for pair in allowed if pair not in used]


def is_stage(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "apply" in {item.name for item in node.body if hasattr(item, "name")}


def docless(files: dict[str, str]) -> list[str]:
    """Public modules, classes, functions and methods without a docstring, and stages that name no source.

    A stage's `apply` is described by its class. A module that only re-exports needs no docstring.
    """
    found = []
    for path, text in files.items():
        tree = ast.parse(text)
        if tree.body and ast.get_docstring(tree) is None:
            found.append(f"{path} has no docstring")
        for owner in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]:
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                    continue
                docstring = ast.get_docstring(node) or ""
                if not docstring.strip() and not (is_stage(owner) and node.name in ("apply", "init", "formula")):
                    found.append(f"{path}: {node.name} has no docstring")
                if is_stage(node) and "Source" not in docstring:
                    found.append(f"{path}: the stage {node.name} names no source (`Source: ...`, or `Source: ours`)")
    return found


def imports(path: str, text: str, *, top_level: bool = False) -> set[str]:
    """Absolute dotted names that a module imports; with `top_level`, only what importing it loads."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    if top_level:
        later = [*functions(tree), *(n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))]
        nested = {inner for node in later for inner in ast.walk(node)}
        nodes = [node for node in nodes if node not in nested]
    parts = Path(path).with_suffix("").parts
    parts = parts if parts[0] == "mmgrpo" else ("mmgrpo", *parts)
    package = parts[:-1]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{module}.{item.name}" for item in node.names)
    return names


def within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def wrong_imports(files: dict[str, str], stdlib: frozenset[str]) -> list[str]:
    """Imports against the direction pipelines -> training, policies, sampling, methods, rewards -> core."""
    found = []
    for path, text in files.items():
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = module if within(module, ["mmgrpo"]) else f"mmgrpo.{module}"
        names = imports(path, text)
        if within(module, ["mmgrpo.core"]):
            bad = {n for n in names if not within(n, CORE_IMPORTS) and n.split(".")[0] not in stdlib}
        elif within(module, ["mmgrpo.rewards"]):
            heavy = {n for n in imports(path, text, top_level=True) if within(n, HEAVY)}
            bad = {n for n in names if within(n, NEVER_IN_REWARDS)} | heavy
            bad |= {n for n in names if within(n, ROOMS)}
        elif within(module, ROOMS[1:]):
            bad = {n for n in names if within(n, ROOMS[:1]) and not within(n, ["mmgrpo.pipelines.base"])}
        else:
            bad = set()
        found += [f"{path} imports {name}" for name in sorted(bad)]
    return found


def has_code(text: str) -> bool:
    """Whether a module defines a function or class (a module's own `__getattr__` apart)."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(node, kinds) and node.name != "__getattr__" for node in ast.parse(text).body)


def unmirrored(files: dict[str, str], tests: set[str], allowed: dict[str, tuple[str, str]]) -> list[str]:
    """Modules with code but no test: mmgrpo/core/clip.py is tested in tests/core/test_clip.py (or test_clip_....py)."""
    found = [f"the exception {path} names no module" for path in allowed if path not in files]
    for path, text in files.items():
        home = Path(path.removeprefix("mmgrpo/"))
        own = (home.parent / f"test_{home.stem}").as_posix()
        has_own = any(test.startswith(own) for test in tests)
        if path in allowed:
            found += [f"the exception {path} is no longer needed"] if has_own else []
            found += [] if allowed[path][0] in tests else [f"{path} has no tests/{allowed[path][0]}"]
        elif has_code(text) and not has_own:
            found.append(f"{path} has no tests/{own}.py")
    return found


def none(problems: list[str]) -> None:
    """Fail with the problems, one a line."""
    assert not problems, "\n".join(["", *problems])


def test_files_and_functions_are_short() -> None:
    files = sources(*PACKAGE, "tests", "benchmarks")
    core = sources("mmgrpo/core")
    total = sum(len(text.splitlines()) for text in core.values())
    none(too_long(files, FILE_LINES) + too_long(core, CORE_FILE_LINES) + long_functions(files))
    assert total <= CORE_LINES, f"mmgrpo/core has {total} lines (limit {CORE_LINES})"


def test_no_domain_word_in_the_core() -> None:
    none(domain_words(sources("mmgrpo/core"), DOMAIN_ALLOWED, DOMAIN_NAMES))


def test_no_method_name_outside_the_catalogue() -> None:
    from mmgrpo.core import recipes

    none(method_names(sources(*PACKAGE), {*recipes(), "grpo"}, METHOD_ALLOWED))


def test_every_public_name_of_the_core_is_documented() -> None:
    none(docless(sources("mmgrpo/core")))


def test_dependencies_point_one_way() -> None:
    none(wrong_imports(sources(*PACKAGE), frozenset(sys.stdlib_module_names)))


def test_every_import_is_a_declared_dependency() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = [text for group in project["optional-dependencies"].values() for text in group]
    declared = {re.match(r"[\w-]+", text)[0].lower() for text in [*project["dependencies"], *extras]}  # type: ignore[index]
    names = {IMPORT_NAMES.get(name, name) for name in declared} | set(sys.stdlib_module_names) | {"mmgrpo"}
    found = {
        f"{p} imports {n}" for p, t in sources(*PACKAGE).items() for n in imports(p, t) if n.split(".")[0] not in names
    }
    none(sorted(found))


def test_tests_mirror_the_package() -> None:
    tests = {p.relative_to(ROOT / "tests").as_posix() for p in (ROOT / "tests").rglob("test_*.py")}
    none(unmirrored(sources(*PACKAGE), tests, MIRROR_ALLOWED))


def test_pyproject_lists_every_package() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    folders = {Path(path).parent for path in sources(*PACKAGE)}
    names = {".".join(f.parts if f.parts[0] == "mmgrpo" else ("mmgrpo", *f.parts)) for f in folders}
    assert listed == names
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_resolves(name: str) -> None:
    from mmgrpo.config import load_config

    assert load_config(name, []).pipeline.name


# The checks can fail: each on a source that breaks its limit, and on one that does not.


def test_length_checks_can_fail() -> None:
    body = "\n".join(f"    x{i} = {i}" for i in range(60))
    assert too_long({"a.py": "x\n" * 501, "b.py": "x\n" * 500}, 500) == ["a.py has 501 lines (limit 500)"]
    assert long_functions({"a.py": f"def f():\n{body}\n"}) == ["a.py: f has 61 lines (limit 60)"]
    assert long_functions({"a.py": "def f():\n" + body.replace("    x59 = 59", "") + "\n"}) == []


@pytest.mark.parametrize("text", ["# one token each", "text_encoder = 1", "class TextStage: ...", "'''An Image.'''"])
def test_the_domain_check_can_fail(text: str) -> None:
    path = "mmgrpo/core/x.py"
    assert len(domain_words({path: text}, (), set())) == 1
    assert domain_words({path: text}, {("x.py", w) for w in words(text) & set(DOMAIN_WORDS)}, set()) == []


def test_the_domain_check_knows_names_and_stale_exceptions() -> None:
    path = "mmgrpo/core/x.py"
    assert domain_words({path: "context = 'gspo_token'"}, (), {"gspo_token"}) == []
    assert domain_words({path: ""}, {("x.py", "token")}, set()) == [
        "the exception ('x.py', 'token') is no longer needed"
    ]


@pytest.mark.parametrize(
    "text", ['if method == "grpo": ...', "use_grpo = 1", "class GRPOTrainer: ...", "x = 'dr_grpo'"]
)
def test_the_method_check_can_fail(text: str) -> None:
    names = {"grpo", "dr_grpo"}
    assert len(method_names({"mmgrpo/training/x.py": text}, names, ())) == 1
    assert method_names({"mmgrpo/methods/x.py": text, "mmgrpo/core/recipes.py": text}, names, ()) == []
    assert method_names({"mmgrpo/x.py": '"""As GRPO does."""\nimport mmgrpo  # like dr_grpo\n'}, names, ()) == []
    assert method_names({}, names, {("x.py", "grpo")}) == ["the exception ('x.py', 'grpo') is no longer needed"]


def test_the_docstring_check_can_fail() -> None:
    stage = "'''m'''\nclass S:\n    '''A stage.{}'''\n    def apply(self): ...\n"
    assert docless({"x.py": stage.format(" Source: ours.")}) == []
    assert len(docless({"x.py": stage.format("")})) == 1
    assert docless({"x.py": "def f(): ...\ndef _g(): ...\n"}) == ["x.py has no docstring", "x.py: f has no docstring"]


def test_the_import_check_can_fail() -> None:
    std = frozenset({"math"})
    for path, good, bad in [
        ("mmgrpo/core/x.py", "import math, torch\nfrom .clip import f", "import numpy"),
        ("mmgrpo/core/x.py", "from . import clip", "from ..sampling import keys"),
        ("rewards/x.py", "def f():\n    import sklearn", "import sklearn"),
        ("rewards/x.py", "from ..core import f", "def f():\n    import peft"),
        ("rewards/x.py", "from .base import f", "from ..policies import base"),
        ("mmgrpo/policies/x.py", "from ..core import f", "from ..pipelines import image"),
        ("mmgrpo/sampling/x.py", "from ..pipelines.base import P", "from mmgrpo.pipelines.image import P"),
    ]:
        assert wrong_imports({path: good}, std) == [], (path, good)
        assert len(wrong_imports({path: bad}, std)) == 1, (path, bad)


def test_the_mirror_check_can_fail() -> None:
    files = {"mmgrpo/core/clip.py": "def f(): ...", "rewards/x.py": "def f(): ...", "mmgrpo/core/__init__.py": ""}
    assert unmirrored(files, {"core/test_clip.py", "rewards/test_x.py"}, {}) == []
    assert len(unmirrored(files, {"core/test_clip.py"}, {})) == 1
    assert len(unmirrored(files, set(), {"rewards/x.py": ("core/test_y.py", "")})) == 2

"""YAML files as plain mappings: strict reading, `extends`, and `--set a.b=c` overrides. No knowledge of the keys."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError, unknown


class ConfigError(UserError, ValueError):
    """A configuration cannot be used. The message names the key, its value and what is allowed."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with three changes: a repeated key is an error, keys are text (`{0: 0.2}` is `{"0": 0.2}`), and
    scalars follow YAML 1.2 (so `1e-4` is a number, and `on`, `no` or `12:30` are text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value
            where = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                raise ConfigError(f"{where}: a key must be a name, not a list or a mapping")
            if key in seen:
                raise ConfigError(f"{where}: the key {key!r} is given twice; keep one of them")
            seen.add(key)
            if key_node.tag != "tag:yaml.org,2002:merge":
                key_node.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag == "tag:yaml.org,2002:merge"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)  # base 10 always: YAML 1.1 reads 010 as eight


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _plain(value: Any) -> Any:
    """A copy in which nothing is shared (an alias must not carry an override to its other places)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a value of type {type(value).__name__}; use text, numbers, true/false, lists and mappings")


def parse(text: str, source: str) -> Any:
    """The value that a YAML text holds. `source` is named in errors. Raises ConfigError."""
    try:
        return _plain(yaml.load(text, Loader=_Loader))  # noqa: S506 - a SafeLoader
    except ConfigError as error:
        raise ConfigError(f"{source}, {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None


def ready_made() -> dict[str, Any]:
    """The configs that come with mmgrpo: name -> a readable resource, in the wheel and in a checkout alike."""
    folder = importlib.resources.files("mmgrpo.configs")
    return {f.name.removesuffix(".yaml"): f for f in folder.iterdir() if f.name.endswith(".yaml")}


def _looks_like_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or "\\" in name


def _read(name: str, relative_to: Path) -> tuple[str, str, Path]:
    """(text, source, folder of the file) of a ready-made name or a path."""
    if not _looks_like_path(name):
        found = ready_made()
        if name not in found:
            hint = " To use a file of yours, write its path (ending in .yaml)."
            raise ConfigError(unknown("ready-made config", name, found) + "." + hint)
        return found[name].read_text(encoding="utf-8"), f"config {name}", relative_to
    path = relative_to / Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8"), str(path), path.parent
    except FileNotFoundError:
        names = ", ".join(sorted(ready_made()))
        raise ConfigError(f"{path}: no such file; ready-made configs are named without .yaml: {names}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a YAML file; a run is continued by `mmgrpo resume`") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `patch` laid over it; mappings are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in patch.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_document(name: str, relative_to: Path = Path(), seen: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """(mapping, source) of a ready-made name or a YAML file, with `extends: NAME` filled in from that base.

    Raises ConfigError: missing, unreadable, empty, not YAML, not a mapping, extends itself.
    """
    text, source, folder = _read(name, relative_to)
    document = parse(text, source)
    if document is None:
        raise ConfigError(f"{source}: empty; the shortest config is `extends: image`")
    if not isinstance(document, dict):
        kind = "a list" if isinstance(document, list) else f"the value {document!r}"
        raise ConfigError(f"{source}: holds {kind}, but a config is a mapping of sections (`optimizer: {{lr: 1e-4}}`)")
    base = document.pop("extends", None)
    if base is None:
        return document, source
    if not isinstance(base, str):
        raise ConfigError(f"{source}: extends: {base!r} is not a name; give one ready-made name or path")
    if source in seen:
        raise ConfigError(f"{source}: extends itself ({' -> '.join([*seen, source])})")
    return merge(read_document(base, folder, [*seen, source])[0], document), source


def apply_override(document: dict[str, Any], override: str) -> None:
    """Put one `a.b=value` into the mapping, in place. The value is read as YAML; a number in the path is a place in
    a list (`rewards.0.weight=2`). Raises ConfigError."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: must read key=value, for example --set optimizer.lr=1e-4")
    if not text.strip():
        raise ConfigError(f"--set {override}: no value; write {path}=null for none, or {path}='\"\"' for empty text")
    value = parse(text, f"--set {override}")
    here: Any = document
    for depth, key in enumerate(keys):
        reached = ".".join(keys[:depth])
        last = depth == len(keys) - 1
        if isinstance(here, list):
            place = _place(here, key, reached, override)
            if last:
                here[place] = value
            here = here[place]
        elif isinstance(here, dict):
            if last:
                here[key] = value
            elif here.get(key) is None:
                here[key] = {}
            here = here[key]
        else:
            raise ConfigError(f"--set {override}: {reached} is {here!r}, which holds no keys")


def _place(items: list[Any], key: str, reached: str, override: str) -> int:
    if not key.isdecimal():
        raise ConfigError(f"--set {override}: {reached} is a list; give a place in it, such as {reached}.0")
    if int(key) >= len(items):
        have = f"its places are 0 to {len(items) - 1}" if items else "it is empty"
        raise ConfigError(f"--set {override}: {reached} has no place {key}; {have}; set the whole list to add one")
    return int(key)

"""Validation errors of pydantic in plain words: the path, the value and what is allowed, one line each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .errors import nearest

_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
}


def explain(error: ValidationError, model: type[BaseModel], data: Any, prefix: str = "") -> list[str]:
    """One line per problem, in the order of the file.

    Args:
        error: what validating `data` as `model` raised.
        prefix: where `data` stands in the file: "" or "policy".
    """
    problems: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        path, value = _locate(item["loc"], data, item["type"] == "missing")
        where = ".".join([prefix, *path] if prefix else path)
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):
            lines = explain(inner, BaseModel, value, where)
        elif item["type"] == "extra_forbidden":
            lines = [f"{where}: unknown key; {_suggest(path, model, prefix)}"]
        elif item["type"] == "value_error":
            lines = [f"{where}: {line}" if where else line for line in str(inner).splitlines()]
        elif item["type"] == "missing":
            lines = [_missing(path, where, model)]
        else:
            lines = [f"{where}: {show(value)} {_rule(item, value)}" if where else f"{show(value)} {_rule(item, value)}"]
        for line in lines:
            problems.setdefault(where, []).append(line)
    # A misspelt required key would count twice: as unknown and as missing.
    meant = {line.rpartition("did you mean ")[2].rstrip("?") for lines in problems.values() for line in lines}
    lines = [line for lines in problems.values() for line in _joined(lines)]
    return [line for line in lines if line.partition(": missing")[0] not in meant or ": missing" not in line]


def _joined(lines: list[str]) -> list[str]:
    """Alternatives of a union (same path, same value) as one line."""
    heads = {line.partition(" must be ")[0] for line in lines}
    if len(lines) > 1 and len(heads) == 1 and all(" must be " in line for line in lines):
        rules = dict.fromkeys(line.partition(" must be ")[2] for line in lines)
        return [f"{heads.pop()} must be " + " or ".join(rules)]
    return lines


def show(value: Any) -> str:
    """A value as it would stand in the file, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _locate(loc: Sequence[int | str], data: Any, missing: bool) -> tuple[list[str], Any]:
    """(path, value there). Steps of `loc` that are not in the data are pydantic's names of union members."""
    path = []
    for place, key in enumerate(loc):
        if isinstance(data, dict) and key in data:
            data = data[key]
        elif isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif not (missing and place == len(loc) - 1):
            continue
        path.append(str(key))
    return path, data


def _rule(item: Any, value: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "literal_error":
        options = context["expected"]
        hint = nearest(str(value), [word.strip("' ") for word in options.replace(" or ", ",").split(",")])
        return f"must be {options}" + (f"; did you mean {hint}?" if hint else "")
    if kind == "string_too_short":
        return "must not be empty"
    if kind in ("too_short", "too_long"):
        some = "at least" if kind == "too_short" else "at most"
        count = context.get("min_length", context.get("max_length"))
        return f"must have {some} {count} item{'s' if count != 1 else ''}"
    return _WORDS.get(kind) or item["msg"].replace("Input should be", "must be")


def _missing(path: list[str], where: str, model: type[BaseModel]) -> str:
    owner = _model_at(path[:-1], model)
    if owner is None and path and path[-1].isdecimal():
        return f"{where}: missing; the list needs more items"
    field = owner.model_fields.get(path[-1]) if owner else None
    return f"{where}: missing" + (f"; {field.description}" if field and field.description else "; it is required")


def _suggest(path: list[str], model: type[BaseModel], prefix: str) -> str:
    """The nearest key of the same section; else a key of that name elsewhere; else all keys of the section."""
    owner = _model_at(path[:-1], model)
    names = list(owner.model_fields) if owner else []
    stem = [prefix, *path[:-1]] if prefix else path[:-1]
    hint = nearest(path[-1], names)
    if hint:
        return f"did you mean {'.'.join([*stem, hint])}?"
    elsewhere = {leaf.rpartition(".")[2]: leaf for leaf in _leaves(model, prefix)}
    hint = nearest(path[-1], elsewhere, cutoff=0.8)
    if hint:
        return f"did you mean {elsewhere[hint]}?"
    return f"the keys here are {', '.join(names)}"


def _model_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """The model that a path leads to, through Optional, Annotated, lists and mappings."""
    here: type[BaseModel] | None = model
    for key in path:
        if here is not None and key in here.model_fields:
            here = next(_models(here.model_fields[key].annotation), None)
        elif not key.isdecimal():
            return None
    return here


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        inner = next(_models(field.annotation), None)
        if inner is not None:
            yield from _leaves(inner, path)
        else:
            yield path

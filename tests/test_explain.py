"""Validation errors in plain words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field, ValidationError

from mmgrpo.config import Section
from mmgrpo.explain import explain


class Window(Section):
    size: int = Field(ge=1, description="How many.")


class Pair(Section):
    key: str


class Options(Section):
    kernel: str = "langevin"
    noise: float | str = 1.0
    window: Window | None = None
    pairs: list[Pair] = []


SECTIONS = {
    "unknown key": ({"kernal": "x"}, "policy.kernal: unknown key; did you mean policy.kernel?"),
    "nested": ({"window": {"sise": 1}}, "policy.window.sise: unknown key; did you mean policy.window.size?"),
    "nested value": ({"window": {"size": 0}}, "policy.window.size: 0 must be greater than or equal to 1"),
    "either of two types": ({"noise": []}, "policy.noise: [] must be a number or text"),
    "missing": ({"window": {}}, "policy.window.size: missing; How many."),
    "missing, undescribed": ({"pairs": [{}]}, "policy.pairs.0.key: missing; it is required"),
    "in a list": ({"pairs": [{"key": 1}]}, "policy.pairs.0.key: 1 must be text"),
    "unknown in a list": (
        {"pairs": [{"key": "a", "keyy": 1}]},
        "policy.pairs.0.keyy: unknown key; did you mean policy.pairs.0.key?",
    ),
    "elsewhere": ({"size": 1}, "policy.size: unknown key; did you mean policy.window.size?"),
    "long value": ({"kernel": ["a" * 100]}, 'policy.kernel: ["' + "a" * 55 + "... must be text"),
    "not a mapping": ([], "policy: [] must be a mapping (key: value)"),
}


@pytest.mark.parametrize(("section", "message"), SECTIONS.values(), ids=SECTIONS)
def test_sections_of_pipelines_have_the_same_errors(section: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Options.model_validate(section)
    assert explain(caught.value, Options, section, "policy") == [message]

"""Configuration: what is read, what is refused, and that every refusal is one plain line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, Field

from mmgrpo import config as config_module
from mmgrpo.config import (
    ConfigError,
    Section,
    dump_config,
    json_schema,
    load_config,
    resolve_config,
    resolve_method,
    validate_section,
)
from mmgrpo.documents import ready_made

SMALL = "pipeline: {name: image}\nrewards: [{name: digits}]\nmethod: {recipe: grpo}\n"


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


# override(s) -> what the message must say after the name of the file
REFUSED = {
    "unknown key": (["optimizer.lrr=1"], "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
    "key of another section": (["lr=1"], "lr: unknown key; did you mean optimizer.lr?"),
    "misspelt section": (["optimzer.lr=1"], "optimzer: unknown key; did you mean optimizer?"),
    "no key like it": (["run.zzz=1"], "run.zzz: unknown key; the keys here are folder"),
    "text for a number": (["optimizer.lr=fast"], 'optimizer.lr: "fast" must be a number'),
    "null for a number": (["optimizer.lr=null"], "optimizer.lr: null must be a number"),
    "not finite": (["optimizer.lr=.nan"], "optimizer.lr: NaN must be a finite number"),
    "not positive": (["optimizer.lr=-1"], "optimizer.lr: -1 must be greater than 0"),
    "fraction for a count": (["training.steps=8.5"], "training.steps: 8.5 must be a whole number"),
    "yes for a count": (["training.steps=true"], "training.steps: true must be a whole number"),
    "number for yes or no": (["evaluation.final=1"], "evaluation.final: 1 must be true or false"),
    "number for text": (["run.folder=3"], "run.folder: 3 must be text"),
    "empty text": (["run.folder=''"], 'run.folder: "" must not be empty'),
    "not among the choices": (
        ["training.old=replai"],
        "training.old: \"replai\" must be 'auto', 'rollout' or 'replay'; did you mean replay?",
    ),
    "choice in a list": (
        ["logging.trackers=[wandbb]"],
        "logging.trackers.0: \"wandbb\" must be 'tensorboard', 'wandb' or 'trackio'; did you mean wandb?",
    ),
    "a value for a section": (["optimizer=3"], "optimizer: 3 must be a mapping (key: value)"),
    "a value for a list": (["rewards=digits"], 'rewards: "digits" must be a list'),
    "empty list": (["rewards=[]"], "rewards: [] must have at least 1 item"),
    "pair too short": (["optimizer.betas=[0.9]"], "optimizer.betas.1: missing; the list needs more items"),
    "pair too long": (["optimizer.betas=[0, 0, 0]"], "optimizer.betas: [0, 0, 0] must have at most 2 items"),
    "bad member of a pair": (["optimizer.betas=[0.9, 1.5]"], "optimizer.betas.1: 1.5 must be less than 1"),
    "one rollout": (["sampling.rollouts=1"], "sampling.rollouts: 1 must be greater than or equal to 2"),
    "no pipeline": (["pipeline=null"], "pipeline: missing; The domain: its prompts, its model, how samples look."),
    "reward without a name": (["rewards=[{weight: 1}]"], "rewards.0.name: missing; it is required"),
    "reward of a wrong kind": (["rewards=[3]"], "rewards.0: 3 must be a mapping (key: value)"),
    "reward's weight": (["rewards.0.weight=heavy"], 'rewards.0.weight: "heavy" must be a number'),
    "reward twice": (
        ["rewards=[a, {name: a}]"],
        "rewards: the reward 'a' is given twice; a reward of yours can have any other name",
    ),
    "judge with a weight": (
        ["evaluation.rewards=[{name: judge, weight: 2}]"],
        "evaluation.rewards.0: a held-out reward is only reported, so nothing reads its weight; remove `weight`",
    ),
    "judge that nobody asks": (
        ["evaluation.every=0", "evaluation.final=false", "evaluation.rewards=[judge]"],
        "evaluation.rewards: nothing reads it, because evaluation.every is 0 and evaluation.final is false; "
        "set one of them, or remove it",
    ),
    "prompts of no evaluation": (
        ["evaluation.every=0", "evaluation.final=false", "evaluation.prompts=3"],
        "evaluation.prompts: nothing reads it, because evaluation.every is 0 and evaluation.final is false; "
        "set one of them, or remove it",
    ),
    "keeping nothing": (
        ["checkpoint.every=0", "checkpoint.keep=5"],
        "checkpoint.keep: nothing reads it, because checkpoint.every is 0; set that, or remove it",
    ),
    "minibatches": (
        ["training.minibatches=200"],
        "training.minibatches: 200 is more than the 128 rollouts of a batch "
        "(sampling.prompts 16 x sampling.rollouts 8)",
    ),
    "warm-up": (
        ["optimizer.warmup=100"],
        "optimizer.warmup: 100 steps of warm-up leave nothing of the 100 training.steps; use fewer",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_values_say_path_value_and_cure(small: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, overrides)
    assert str(caught.value) == f"{small}: {message}"


def test_several_problems_are_listed_one_a_line(small: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(small, ["optimizer.lr=x", "training.chunk=0", "trainingg.chunk=1"])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{small}: 3 problems"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == ["optimizer.lr", "training.chunk", "trainingg"]


def test_overrides_read_yaml_values(small: str) -> None:
    config = load_config(
        small,
        [
            "optimizer.lr=1e-4",
            "optimizer.betas=[0.8, 0.9]",
            "optimizer.clip_norm=null",
            "rewards=[{name: digits, weight: 2, sharpness: 3}, judge]",
            "rewards.0.weight=0.5",
            "method.clip={low: 0.1}",
            "method.clip.high=0.2",
            "policy.window.size=1",
            "run.folder=runs/a=b",
        ],
    )
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.optimizer.clip_norm is None
    assert config.rewards == [{"name": "digits", "weight": 0.5, "sharpness": 3}, {"name": "judge", "weight": 1.0}]
    assert config.method["clip"] == {"low": 0.1, "high": 0.2}
    assert config.policy == {"window": {"size": 1}}
    assert config.run.folder == "runs/a=b"


def test_a_config_written_out_reads_back_equal(small: str, tmp_path: Path) -> None:
    config = load_config(small, ["optimizer.eps=1e-9", "evaluation.rewards=[judge]", "policy.word='on'"])
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(str(path)) == config
    assert yaml.safe_load(dump_config(config))["policy"] == {"word": "on"}  # other readers agree


class Window(Section):
    size: int = Field(1, ge=1)


class Options(Section):
    kernel: str = "langevin"
    noise: float | str = 1.0
    window: Window | None = None


def test_section_models_must_forbid_unknown_keys() -> None:
    class Loose(BaseModel):
        a: int = 1

    with pytest.raises(TypeError, match="Loose must forbid unknown keys"):
        validate_section(Loose, {"b": 1}, "policy")


def test_resolve_config_writes_out_the_defaults_of_the_pipeline(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Domain(Section):
        size: int = 12

    module = SimpleNamespace(Options=Domain, PolicyOptions=Options)
    monkeypatch.setattr(config_module, "pipeline_module", lambda name: module)
    resolved = resolve_config(load_config(small, ["policy.kernel=cps"]))
    assert resolved.pipeline.options == {"size": 12}
    assert resolved.policy == {"kernel": "cps", "noise": 1.0, "window": None}
    assert resolve_config(resolved) == resolved
    with pytest.raises(ConfigError, match="pipeline.sice: unknown key; did you mean pipeline.size?"):
        resolve_config(load_config(small, ["pipeline.sice=3"]))


def test_unknown_pipeline(small: str) -> None:
    with pytest.raises(ConfigError, match="pipeline.name: unknown pipeline 'imagge'"):
        resolve_config(load_config(small, ["pipeline.name=imagge"]))


METHODS = {
    "method.recipe=grop": "method: unknown recipe 'grop'; did you mean 'grpo'?",
    "method.recipe=null": "method.recipe: missing; name one of `mmgrpo list recipes`",
    "method.recipe=3": "method.recipe: 3 is not a name; see `mmgrpo list recipes`",
    "method.name=gspo": "method.name: unknown key; did you mean method.recipe?",
    "method.clipp={low: 0.1}": "method: unknown slot 'clipp'; did you mean 'clip'?",
    "method.clip={lo: 0.1}": "method: clip: PPO has no option 'lo'; did you mean 'low'?",
    "method.penalty=[{type: KLL}]": "method: penalty: unknown stage 'KLL'; did you mean 'KL'?",
    "method.clip=3": "method: clip: a stage is a dataclass with apply, or a mapping of its options; got 3",
}


@pytest.mark.parametrize(("override", "message"), METHODS.items())
def test_errors_of_the_method_are_passed_on(small: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_method(load_config(small, [override]))
    assert str(caught.value) == message


def test_the_method_section_becomes_an_algorithm(small: str) -> None:
    config = load_config(small, ["method={recipe: gspo, clip: {high: 0.1}, penalty: [{type: KL, estimator: exact}]}"])
    algorithm = resolve_method(config)
    assert algorithm.name == "gspo"
    assert algorithm.clip[0].high == 0.1
    assert algorithm.channels == ("logp", "kl_ref")


@pytest.mark.parametrize("name", sorted(ready_made()))
def test_every_ready_made_config_resolves(name: str) -> None:
    config = resolve_config(load_config(name))
    assert config.policy


def _described(schema: dict[str, Any], path: str) -> None:
    for name, field in schema.get("properties", {}).items():
        if "$ref" not in field and "const" not in field:
            assert field.get("description"), f"{path}.{name} has no description"


def test_schema_describes_every_field_and_knows_the_pipelines() -> None:
    schema = json_schema()
    json.dumps(schema)
    _described(schema, "")
    for name, part in schema["$defs"].items():
        _described(part, name)
    assert "extends" in schema["properties"]
    cases = [case["then"]["properties"] for case in schema["allOf"]]
    image = next(case for case in cases if case["pipeline"]["properties"]["name"] == {"const": "image"})
    assert image["policy"]["properties"]

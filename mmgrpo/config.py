"""The typed configuration of a run: one YAML file, checked before anything is loaded or trained.

Nothing heavy is imported here. `load_config` reads and checks the general sections; `resolve_config` also checks the
sections that the pipeline and the method define, which imports them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from .documents import ConfigError, apply_override, read_document
from .errors import unknown
from .explain import explain

if TYPE_CHECKING:
    from .core import Algorithm

__all__ = ["ConfigError", "RunConfig", "Section", "json_schema", "load_config", "resolve_config", "resolve_method"]
__all__ += ["validate_section"]


class Section(BaseModel):
    """Base of every typed section, the pipelines' own among them: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def changed(self) -> set[str]:
        """Keys whose value is not their default. A check for options that nothing reads looks at these, not at the
        keys that were given: a config written out in full gives every key."""
        fields = type(self).model_fields.items()
        return {name for name, f in fields if getattr(self, name) != f.get_default(call_default_factory=True)}


class PipelineSection(Section):
    """Which pipeline makes the prompts and the samples. Its own options stand beside `name`."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, description="The pipeline, by name: see `mmgrpo list pipelines`.")

    @property
    def options(self) -> dict[str, Any]:
        """The pipeline's own options, as given."""
        return dict(self.model_extra or {})


class RewardSpec(Section):
    """One reward. Options of the reward itself stand beside these keys."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, description="A reward of `mmgrpo list rewards`, or a name of yours with `path`.")
    weight: float = Field(1.0, description="Its share in the trained reward; negative for a cost.")
    path: str | None = Field(None, description="A function of yours: `my_rewards.py:function`.")


class JudgeSpec(Section):
    """One held-out reward: reported, never trained on, so it has no weight."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, description="A reward of `mmgrpo list rewards`, or a name of yours with `path`.")
    path: str | None = Field(None, description="A function of yours: `my_rewards.py:function`.")


def _spec(model: type[Section]) -> Any:
    """Specs stay plain mappings (the form `mmgrpo.rewards` reads); a bare name is short for {name: it}."""

    def check(value: Any) -> dict[str, Any]:
        value = {"name": value} if isinstance(value, str) else value
        if model is JudgeSpec and isinstance(value, Mapping) and "weight" in value:
            raise ValueError("a held-out reward is only reported, so nothing reads its weight; remove `weight`")
        return model.model_validate(value).model_dump(exclude_none=True)

    schema = model.model_json_schema()
    if model is JudgeSpec:
        schema["not"] = {"required": ["weight"]}
    named = {"type": "string", "description": "The name alone."}
    return Annotated[dict[str, Any], BeforeValidator(check), WithJsonSchema({"anyOf": [named, schema]})]


def _distinct(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [spec["name"] for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the reward {name!r} is given twice; a reward of yours can have any other name")
    return specs


if TYPE_CHECKING:
    RewardSpecs = list[dict[str, Any]]
    JudgeSpecs = list[dict[str, Any]]
else:
    RewardSpecs = Annotated[list[_spec(RewardSpec)], AfterValidator(_distinct)]
    JudgeSpecs = Annotated[list[_spec(JudgeSpec)], AfterValidator(_distinct)]


class SamplingSection(Section):
    """How many rollouts one training step draws."""

    prompts: int = Field(16, ge=1, description="Prompts per step; each makes one group.")
    rollouts: int = Field(8, ge=2, description="Rollouts per prompt (the group size G): they are compared.")
    refill: int = Field(
        0, ge=0, description="Extra rounds of rollouts allowed per step to replace groups whose rewards are all equal."
    )


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    lr: float = Field(1e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.99), strict=False, description="Adam's two decay rates."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest norm of the whole gradient; null: no clipping.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="The learning rate after warm-up: constant, or falling to 0 after the last step."
    )
    warmup: int = Field(0, ge=0, description="Training steps over which the learning rate rises from 0 to lr.")


class TrainingSection(Section):
    """The training loop."""

    steps: int = Field(100, ge=1, description="Training steps; each samples, scores and updates once.")
    updates: int = Field(1, ge=1, description="Passes over each batch of rollouts.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps that one pass is cut into.")
    chunk: int = Field(128, ge=1, description="Most rows in one pass through the model: changes memory, not results.")
    old: Literal["auto", "rollout", "replay"] = Field(
        "auto",
        description="Where the old log-probs come from: the rollout, or a replay before the first update. "
        "auto: the rollout, but a replay where the two differ by more than rounding or the method compares them.",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of the model's forward pass; auto: bfloat16 on a GPU, float32 on a CPU."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads per process; null: torch's own choice. A small model is fastest with 1, by far on a "
        "busy machine.",
    )
    ema: float = Field(
        0.0, ge=0, lt=1, description="Decay of the running mean of the weights that is evaluated and saved; 0: none."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="All randomness of the run follows from it.")


class EvaluationSection(Section):
    """Samples and scores on fixed prompts under fixed noise, of the model as it is used after training."""

    every: int = Field(20, ge=0, description="Training steps between evaluations; 0: none during training.")
    prompts: int = Field(64, ge=1, description="Prompts evaluated, of the training and of the held-out list each.")
    rewards: JudgeSpecs = Field(
        default_factory=list, description="Held-out rewards: reported, never trained on. They catch reward hacking."
    )
    final: bool = Field(True, description="Evaluate before the first and after the last step.")


class CheckpointSection(Section):
    """What `mmgrpo resume` starts from."""

    every: int = Field(20, ge=0, description="Training steps between checkpoints; 0: only after the last step.")
    keep: int = Field(2, ge=1, description="How many checkpoints stay; older ones are deleted.")


class RunSection(Section):
    """Where the run is written."""

    folder: str | None = Field(None, min_length=1, description="The run's folder; null: runs/<pipeline>-<date>-<time>.")


class LoggingSection(Section):
    """Metrics always go to metrics.jsonl in the run's folder; these go elsewhere too."""

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="Extra places for the metrics: tensorboard, wandb, trackio."
    )


class RunConfig(Section):
    """One training run."""

    pipeline: PipelineSection = Field(description="The domain: its prompts, its model, how samples look.")
    policy: dict[str, Any] = Field(default_factory=dict, description="How the model samples: the pipeline's options.")
    rewards: RewardSpecs = Field(min_length=1, description="What is trained for: the weighted sum of these.")
    method: dict[str, Any] = Field(
        description="`recipe`: a name of `mmgrpo list recipes`; beside it any slot to replace, such as "
        "clip: {low: 0.2, high: 0.28}. A slot set to null is empty.",
    )
    sampling: SamplingSection = Field(default_factory=SamplingSection, description="The size of a batch.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="AdamW.")
    training: TrainingSection = Field(default_factory=TrainingSection, description="The loop.")
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Before, during and after.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="What resume starts from.")
    run: RunSection = Field(default_factory=RunSection, description="Where it is written.")
    logging: LoggingSection = Field(default_factory=LoggingSection, description="Extra trackers.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = _unread(self)
        rows = self.sampling.prompts * self.sampling.rollouts
        if self.training.minibatches > rows:
            problems.append(
                f"training.minibatches: {self.training.minibatches} is more than the {rows} rollouts of a batch "
                f"(sampling.prompts {self.sampling.prompts} x sampling.rollouts {self.sampling.rollouts})"
            )
        if self.optimizer.warmup >= self.training.steps:
            problems.append(
                f"optimizer.warmup: {self.optimizer.warmup} steps of warm-up leave nothing of the "
                f"{self.training.steps} training.steps; use fewer"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _unread(config: RunConfig) -> list[str]:
    """Options that differ from their default although nothing reads them."""
    problems = []
    if config.evaluation.every == 0 and not config.evaluation.final:
        for name in sorted(config.evaluation.changed() - {"every", "final"}):
            problems.append(
                f"evaluation.{name}: nothing reads it, because evaluation.every is 0 and evaluation.final is "
                "false; set one of them, or remove it"
            )
    if config.checkpoint.every == 0 and "keep" in config.checkpoint.changed():
        problems.append("checkpoint.keep: nothing reads it, because checkpoint.every is 0; set that, or remove it")
    return problems


Model = TypeVar("Model", bound=BaseModel)


def validate_section(model: type[Model], section: Any, path: str) -> Model:
    """A pipeline's or policy's own section as its typed model.

    Args:
        model: a pydantic model that forbids unknown keys; subclass `Section`.
        section: the mapping from the YAML file.
        path: where it stands in the file, for messages: "policy".

    Raises ConfigError: an unknown key (with the nearest one), a wrong type or value.
    """
    if model.model_config.get("extra") != "forbid":
        raise TypeError(f"{model.__name__} must forbid unknown keys: let it subclass mmgrpo.config.Section")
    try:
        return model.model_validate(section)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, model, section, path))) from None


def load_config(path_or_name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a ready-made config by name (`image`) or a YAML file by path, with `a.b=value` overrides laid over it.

    Raises ConfigError with one line per problem.
    """
    document, source = read_document(str(path_or_name))
    for override in overrides:
        apply_override(document, override)
    document = {name: section for name, section in document.items() if section is not None}  # left empty: default
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        problems = explain(error, RunConfig, document)
    if len(problems) == 1:
        raise ConfigError(f"{source}: {problems[0]}")
    raise ConfigError(f"{source}: {len(problems)} problems\n" + "\n".join(f"  {problem}" for problem in problems))


def resolve_method(config: RunConfig) -> Algorithm:
    """The algorithm that the method section describes. Imports the core.

    Raises ConfigError: an unknown recipe, slot, stage or option, or a value that a stage refuses.
    """
    from .core import recipe

    slots = dict(config.method)
    if "name" in slots:
        raise ConfigError("method.name: unknown key; did you mean method.recipe?")
    name = slots.pop("recipe", None)
    if name is None:
        raise ConfigError("method.recipe: missing; name one of `mmgrpo list recipes`")
    if not isinstance(name, str):
        raise ConfigError(f"method.recipe: {name!r} is not a name; see `mmgrpo list recipes`")
    try:
        return recipe(name, **slots)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"method: {error.args[0] if error.args else error}") from error


def pipeline_module(name: str) -> ModuleType:
    """The module of a pipeline, imported. Raises ConfigError for an unknown name."""
    from .pipelines.base import pipelines

    if name not in pipelines():
        raise ConfigError("pipeline.name: " + unknown("pipeline", name, pipelines()))
    return importlib.import_module(f"mmgrpo.pipelines.{name}")


def resolve_config(config: RunConfig) -> RunConfig:
    """The config with every default of its pipeline and policy written out. Imports the pipeline and the core.

    Raises ConfigError for what only they can tell: an unknown pipeline, option, recipe, slot.
    """
    module = pipeline_module(config.pipeline.name)
    options = validate_section(module.Options, config.pipeline.options, "pipeline").model_dump(mode="json")
    policy = validate_section(module.PolicyOptions, config.policy, "policy").model_dump(mode="json")
    resolve_method(config)
    section = PipelineSection(name=config.pipeline.name, **options)
    return config.model_copy(update={"pipeline": section, "policy": policy})


def dump_config(config: RunConfig) -> str:
    """The config as YAML text that `load_config` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file for editors, with the options of every pipeline. Imports the pipelines."""
    from .pipelines.base import pipelines

    schema = RunConfig.model_json_schema()
    schema["title"] = "mmgrpo run"
    schema["required"] = []  # a file that extends another may leave anything out
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "A ready-made name or a path: every key that this file does not set is taken from there.",
    }
    schema["$defs"]["PipelineSection"]["properties"]["name"]["enum"] = pipelines()
    cases = []
    for name in pipelines():
        module = pipeline_module(name)
        options = module.Options.model_json_schema(ref_template=f"#/$defs/{name}_{{model}}")
        policy = module.PolicyOptions.model_json_schema(ref_template=f"#/$defs/{name}_{{model}}")
        for part in (options, policy):
            schema["$defs"] |= {f"{name}_{key}": value for key, value in part.pop("$defs", {}).items()}
        options.setdefault("properties", {})["name"] = {"const": name}
        named = {"properties": {"pipeline": {"properties": {"name": {"const": name}}, "required": ["name"]}}}
        cases.append(
            {"if": named | {"required": ["pipeline"]}, "then": {"properties": {"pipeline": options, "policy": policy}}}
        )
    return schema | {"allOf": cases}

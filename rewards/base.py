"""What a reward is: a plain function from a batch of samples to one number a row, checked before anyone trusts it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import UserError, unknown
from .registry import REWARDS


class RewardError(UserError, ValueError):
    """A reward cannot be loaded or gave something that is no score. The message names the reward, the row, the cure."""


@dataclass(frozen=True)
class Batch:
    """B samples to be scored.

    Args:
        prompts: B prompt items (JSON values), row-aligned.
        samples: modality -> B samples, row-aligned: "image" [B,3,H,W] float in [0,1]; "text" list of B str.
        group: B labels of who is compared with whom; None where the samples are not grouped. With several processes
            each scores its own rows: a reward that compares a group needs prompts divisible by their number, so that
            no group is cut.
    """

    prompts: list[Any]
    samples: dict[str, Any]
    group: list[int] | None = None

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in self.samples.items()}
        if self.group is not None:
            lengths["group"] = len(self.group)
        for name, length in lengths.items():
            if length != len(self.prompts):
                raise RewardError(f"a batch of {len(self.prompts)} prompts has {length} rows of {name!r}")

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> Batch:
        """The given rows, in the given order."""

        def pick(value: Any) -> Any:
            return (
                value[torch.as_tensor(rows, dtype=torch.long)]
                if isinstance(value, Tensor)
                else [value[i] for i in rows]
            )

        group = None if self.group is None else [self.group[i] for i in rows]
        return Batch([self.prompts[i] for i in rows], {k: pick(v) for k, v in self.samples.items()}, group)


@dataclass(frozen=True)
class Context:
    """When and why the scores are asked for: the optimisation step, training or evaluation, the run's seed."""

    step: int = 0
    train: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Scores:
    """Checked scores.

    Args:
        values: [B] float32 on the CPU, NaN where not scored, never infinite.
        reasons: row -> why its value is NaN. Exactly the NaN rows have one.
    """

    values: Tensor
    reasons: dict[int, str] = field(default_factory=dict)


Reward: TypeAlias = Callable[[Batch, Context], "Scores | Sequence[float | None] | Tensor"]


def score(rewards: Mapping[str, Reward], batch: Batch, ctx: Context | None = None) -> dict[str, Scores]:
    """Call every reward on the batch and check what comes back.

    A reward returns B numbers, as a sequence (None = does not apply to this row), a tensor or array [B], or a `Scores`
    whose NaN rows have reasons.

    Raises:
        RewardError: if a reward raises, returns another number of values, or returns a NaN without a reason or an
            infinity. The message names the reward, the row with its prompt, and the cure.
    """
    ctx = Context() if ctx is None else ctx
    return {name: _check(name, _call(name, reward, batch, ctx), batch) for name, reward in rewards.items()}


def _call(name: str, reward: Reward, batch: Batch, ctx: Context) -> Any:
    try:
        return reward(batch, ctx)
    except Exception as error:
        row = _failing_row(reward, batch, ctx)
        where = (
            f"row {_row(batch, row)}" if row is not None else f"a batch of {len(batch)} rows, though not on one alone"
        )
        raise RewardError(
            f"reward {name!r} raised {type(error).__name__} on {where}: {error}. "
            "Catch it in the reward and return None for a row that cannot be scored"
        ) from error


def _failing_row(reward: Reward, batch: Batch, ctx: Context) -> int | None:
    """The first row on which the reward raises, found by halving; None if it raises only on several together."""
    rows = list(range(len(batch)))
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        rows = half if _raises(reward, batch.select(half), ctx) else rows[len(half) :]
    return rows[0] if rows and _raises(reward, batch.select(rows), ctx) else None


def _raises(reward: Reward, batch: Batch, ctx: Context) -> bool:
    try:
        reward(batch, ctx)
    except Exception:  # noqa: BLE001 - whatever a user's function raises counts
        return True
    return False


def _check(name: str, result: Any, batch: Batch) -> Scores:
    reasons: dict[int, str] = dict(result.reasons) if isinstance(result, Scores) else {}
    raw = result.values if isinstance(result, Scores) else result
    values = raw.detach().cpu().tolist() if isinstance(raw, Tensor) else raw.tolist() if hasattr(raw, "tolist") else raw
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise RewardError(
            f"reward {name!r} returned {type(result).__name__}; return a list of {len(batch)} numbers, one for each row"
        )
    if len(values) != len(batch):
        raise RewardError(
            f"reward {name!r} returned {len(values)} scores for {len(batch)} rows; "
            "return exactly one for each row, and None for a row it does not apply to"
        )
    numbers = []
    for row, value in enumerate(values):
        if value is None:
            reasons.setdefault(row, "the reward does not apply to this row")
        numbers.append(_number(name, batch, row, value, row in reasons))
    return Scores(torch.tensor(numbers, dtype=torch.float32), reasons)


def _number(name: str, batch: Batch, row: int, value: Any, has_reason: bool) -> float:
    if value is None:
        return math.nan
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise RewardError(
            f"reward {name!r} returned a {type(value).__name__} on row {_row(batch, row)}; return one number a row"
        )
    if math.isnan(value) != has_reason:
        state = "a NaN without a reason" if not has_reason else f"both a value ({value}) and a reason for having none"
        raise RewardError(
            f"reward {name!r} returned {state} on row {_row(batch, row)}; "
            "return None, or Scores with a reason, exactly for the rows that are not scored"
        )
    if math.isinf(torch.tensor(value, dtype=torch.float32).item()):
        raise RewardError(
            f"reward {name!r} returned {value} on row {_row(batch, row)}; "
            "bound the score, or return None for a row that cannot be scored"
        )
    return float(value)


def _row(batch: Batch, row: int) -> str:
    text = repr(batch.prompts[row])
    return f"{row} (prompt {text if len(text) <= 80 else text[:77] + '...'})"


def load_reward(spec: Mapping[str, Any] | str) -> tuple[str, float, Reward]:
    """A reward from its entry in a config: (name, weight, reward).

    Args:
        spec: a registered name, or {"name": ..., "weight": 1.0, ...options of that reward}; a user's own function
            is {"name": ..., "path": "my_rewards.py:function", ...}, called as function(batch, ctx, **options).
            The path is taken from the working directory.

    Raises:
        RewardError: if the name, the file, the function or an option is unknown, or the weight is no finite number.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name, weight, path = options.pop("name", None), options.pop("weight", 1.0), options.pop("path", None)
    if not isinstance(name, str) or not name:
        raise RewardError(f"a reward needs a name, got {spec!r}; write {{name: digits}}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise RewardError(f"the weight of reward {name!r} must be a finite number, got {weight!r}")
    if path is not None:
        function = _user_function(name, path)
        _check_options(name, function, options, skip=2)
        return name, float(weight), functools.partial(function, **options) if options else function
    if name not in REWARDS:
        raise RewardError(unknown("reward", name, REWARDS) + "; give your own as path: my_rewards.py:function")
    module, _, attribute = REWARDS[name].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    _check_options(name, factory, options, skip=0)
    try:
        return name, float(weight), factory(**options)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name!r} does not accept {options}: {error}") from error


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any], skip: int) -> None:
    """Every option must be a keyword of the function; its first `skip` parameters are not options."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    for option in options:
        if option not in known:
            raise RewardError(f"reward {name!r}: " + unknown("option", option, known))


def _user_function(name: str, path: Any) -> Callable[..., Any]:
    file_name, separator, attribute = str(path).rpartition(":")
    if not separator or not attribute.isidentifier():
        raise RewardError(f"path of reward {name!r} must be file.py:function, got {path!r}")
    file = Path(file_name).expanduser().resolve()
    if not file.is_file():
        raise RewardError(f"reward {name!r}: there is no file {file}; the path is taken from the working directory")
    module = _load_file(name, file)
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise RewardError(f"reward {name!r}: {file}: " + unknown("function", attribute, names))
    return function


def _load_file(name: str, file: Path) -> ModuleType:
    module_name = f"mmgrpo_user_rewards_{zlib.crc32(str(file).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward {name!r}: {file} is no Python file; name it something.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickling look the module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise RewardError(f"reward {name!r}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module

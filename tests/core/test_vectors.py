"""TRL's own numbers: losses and gradients to 1e-10 in float64, advantages to 1e-5 (they are float32).

How TRL's terms map to ours:

- the log-probs of the sampling engine are `Rollouts.logp`; `old_logps` is the channel `old`; where a case has no
  sampler of its own, both are the old log-probs, and on-policy cases have no `old` at all;
- `is_ratio` is exp(old - behaviour), so the behaviour is built from it;
- `tool_mask` is part of the mask; `completion_mask` and `tool_mask` multiply;
- with K accumulation steps TRL divides what a micro-batch contributes; the case shows one micro-batch of four rows out
  of a larger batch. Ours weighs over the whole optimisation batch, so the harness divides by the same factor: row means
  and constants by K (the other micro-batches hold K-1 times as many rows); token means over N tokens of the generation
  batch by N K / (S n), where n is the micro-batch's own tokens and S the steps per generation.

Two differences that are decisions of ours, and how a case is compared all the same:

- TRL's GMPO gives a row without any token the geometric mean 1, so it adds the constant -A/B to the loss (and nothing
  to the gradient). Ours adds nothing; the constant is taken off the expected loss.
- TRL's VESPO puts the sampler's drift into its weight only when the correction for another engine is on. Ours always
  does, since the weight is defined against the behaviour. Where a case has a sampler but no correction, the rows to
  drop are found on the batch with the sampler and the loss is evaluated on the batch without.
"""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgrpo.core import Algorithm, Rollouts, Signal, recipe
from tests.kit.algorithms import close
from tests.kit.worlds import F64

VECTORS = json.loads(gzip.decompress((Path(__file__).parent.parent / "data" / "grpo_losses.json.gz").read_bytes()))
CASES = {case["name"]: case for case in VECTORS["loss_cases"]}
TOKEN_MEANS = ("dapo", "cispo", "vespo")
OFF_POLICY = "off_policy_mask_threshold"
TOLERANCE = 1e-10


def tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=F64)


def algorithm(case: dict[str, Any]) -> Algorithm:
    """The recipe with the case's options in its slots."""
    options, inputs = case["options"], case["inputs"]
    name = options["loss_type"]
    slots: dict[str, Any] = {}
    high = options.get("epsilon_high")
    if name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        slots["clip"] = {"low": 0.2, "high": 0.2 if high is None else high, "delta": options.get("delta")}
    elif name == "cispo":
        slots["clip"] = {"high": high}
    clips = [slots["clip"]] if "clip" in slots else [{}]
    if OFF_POLICY in options:
        slots["clip"] = [*clips, {"type": "OffPolicyMask", "threshold": options[OFF_POLICY]}]
    level = options.get("importance_sampling_level", "token")
    ratio = {"type": "Ratio", "unit": "row" if level == "sequence" else "decision"}
    slots["ratio"] = [ratio]
    if "top_entropy_quantile" in options:
        slots["ratio"].append({"type": "EntropyMask", "top": options["top_entropy_quantile"]})
    if name == "dr_grpo":
        slots["weights"] = {"length": 8}
    if "is_ratio" in inputs and name != "vespo":  # VESPO puts the ratio inside its weight
        unit = "row" if len(inputs["is_ratio"][0]) == 1 else "decision"
        slots["credit"] = [{}, {"type": "ImportanceCorrection", "unit": unit, "mode": "truncate"}]
    slots["penalty"] = []
    if options.get("beta"):
        with_ratio = options.get("use_bias_correction_kl", True) and name != "gmpo"  # TRL's GMPO has plain k3
        estimator = "k3_ratio" if with_ratio else "k3"
        slots["penalty"].append({"type": "KL", "estimator": estimator, "coef": options["beta"]})
    if options.get("entropy_coef"):
        slots["penalty"].append({"type": "Entropy", "coef": options["entropy_coef"], "mean": "decision"})
    return recipe(name, **slots)


def behaviour(inputs: dict[str, Any], mask: Tensor, old: Tensor) -> Tensor:
    """[B,T] log-probs of the sampler that give the case's importance ratio."""
    if "sampling_logps" in inputs:
        return tensor(inputs["sampling_logps"])
    if "is_ratio" not in inputs:
        return old
    log_ratio = tensor(inputs["is_ratio"]).log()
    if log_ratio.shape[1] == 1:  # one ratio per sequence: spread evenly over its decisions
        log_ratio = torch.where(mask, log_ratio / mask.sum(1, keepdim=True), 0.0)
    elif inputs["loss_type"] == "vespo":
        # TRL sums the ratios of padded positions too; the same sum, put into the first decision of the row.
        leak = torch.where(mask, 0.0, log_ratio).sum(1)
        log_ratio = torch.where(mask, log_ratio, 0.0)
        log_ratio[:, 0] += leak
    return old - log_ratio


def rollouts(case: dict[str, Any]) -> Rollouts:
    inputs = {**case["inputs"], "loss_type": case["options"]["loss_type"]}
    logp, mask = tensor(inputs["logps"]), tensor(inputs["mask"]).bool()
    if "tool_mask" in inputs:
        mask &= tensor(inputs["tool_mask"]).bool()
    channels = {"ref": tensor(inputs["ref_logps"]), "entropy": tensor(inputs["entropies"])}
    old = logp
    if "old_logps" in inputs:
        old = channels["old"] = tensor(inputs["old_logps"])
    return Rollouts(
        logp=behaviour(inputs, mask, old),
        mask=mask,
        group=torch.zeros(len(logp), dtype=torch.long),
        scores={"r": torch.zeros(len(logp), dtype=F64)},
        channels=channels,
    )


def share(case: dict[str, Any], batch: Rollouts) -> float:
    """What part of a whole optimisation batch's loss the case's micro-batch is (see the module's docstring)."""
    options = case["options"]
    K = options.get("accum", 1)
    S = options.get("spg", K)
    if options["loss_type"] not in TOKEN_MEANS:
        return 1 / K
    return float(batch.mask.sum()) * S / (K * case["inputs"]["num_items_in_batch"])


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name: str) -> None:
    case = CASES[name]
    algo, batch = algorithm(case), rollouts(case)
    _, w, _ = algo.signal(batch)
    A = tensor(case["inputs"]["advantages"])
    A = A if A.dim() == 2 else A[:, None].expand(batch.shape).contiguous()
    if "is_ratio" in case["inputs"] and case["options"]["loss_type"] != "vespo":
        A = corrected(algo, batch, A)
    w = w * share(case, batch)
    if case["options"]["loss_type"] == "vespo" and "sampling_logps" in case["inputs"]:
        w = w * kept_rows(case, batch, A)
        batch = batch.replace(logp=batch.old)
        algo = algo.replace(clip=algo.clip[:1])
    channels = {"logp": tensor(case["inputs"]["logps"]), "entropy": tensor(case["inputs"]["entropies"])}
    channels = {k: channels[k] for k in algo.channels}
    out = algo.loss(channels, batch, A, w)
    grads = algo.grad(channels, batch, A, w)
    expected = case["expected"]
    if case["options"].get("entropy_coef"):
        # TRL divides the bonus by K alone, as ours does with a weight of its own.
        assert case["options"].get("accum", 1) == 1
        close(grads["entropy"], tensor(expected["grad_entropies"]), TOLERANCE)
    loss = expected["loss"]
    if case["options"]["loss_type"] == "gmpo":
        empty = ~batch.mask.any(1)
        loss += float(A[empty, 0].sum()) / len(A)
    close(float(out.loss), loss, TOLERANCE)
    close(grads["logp"], tensor(expected["grad_logps"]), TOLERANCE)
    check_metrics(case, algo, out.metrics, batch)


def kept_rows(case: dict[str, Any], batch: Rollouts, A: Tensor) -> Tensor:
    """[B,1] 1 for the rows that the off-policy mask keeps, by the gradient of a loss that is nowhere 0 elsewhere."""
    algo = recipe("cispo", clip=[{}, {"type": "OffPolicyMask", "threshold": case["options"][OFF_POLICY]}])
    grad = algo.grad({"logp": tensor(case["inputs"]["logps"])}, batch, A, torch.ones_like(A))["logp"]
    return ((grad != 0).any(1, keepdim=True) | (A[:, :1] == 0)).to(F64)


def corrected(algo: Algorithm, batch: Rollouts, A: Tensor) -> Tensor:
    """A given advantage [B,T] through the algorithm's credit stages after the first."""
    zero = torch.zeros_like(A)
    none = zero[:, :0]
    signal = Signal(batch, none, (), none, none.bool(), torch.where(batch.trained, A, 0.0), zero)
    for stage in algo.credit[1:]:
        signal = stage.apply(signal)
    return signal.credit


def check_metrics(case: dict[str, Any], algo: Algorithm, ours: dict[str, tuple[float, float]], batch: Rollouts) -> None:
    """The metrics that have a counterpart: KL, entropy, shares of clipped decisions."""
    theirs = case["expected"]["metrics"]

    def mean(name: str) -> float:
        return ours[name][0] / ours[name][1]

    if "kl" in theirs and "kl" in ours:
        close(mean("kl"), theirs["kl"], 1e-6)
    if "entropy" in theirs and "entropy" in ours:
        close(mean("entropy"), theirs["entropy"], 1e-6)
    plain = not any(k in case["options"] for k in ("delta", OFF_POLICY, "top_entropy_quantile"))
    if plain and "clip_ratio/region_mean" in theirs and case["options"]["loss_type"] != "gmpo":
        close(mean("clip_share"), theirs["clip_ratio/region_mean"], 1e-6)


def test_every_case_is_covered() -> None:
    """185 loss cases, 20 advantage cases, 5 single functions; none is left out."""
    assert len(CASES) == 185
    assert len(VECTORS["advantage_cases"]) == 20
    assert len(VECTORS["misc_cases"]) == 5
    seen = {key for case in CASES.values() for key in case["options"]}
    known = {"loss_type", "importance_sampling_level", "beta", "use_bias_correction_kl", "epsilon_high", "epsilon"}
    known |= {"accum", "spg", "top_entropy_quantile", OFF_POLICY, "use_vllm", "entropy_coef", "delta"}
    assert seen == known


def test_sampled_ratio_cases_are_within_the_truncation() -> None:
    """The harness truncates at 3 and no case comes near it, so that the ratio passes unchanged."""
    ratios = [r for c in CASES.values() for row in c["inputs"].get("is_ratio", []) for r in row]
    assert ratios and max(ratios) < 3


@pytest.mark.parametrize("case", VECTORS["advantage_cases"], ids=lambda c: c["name"])
def test_advantages(case: dict[str, Any]) -> None:
    table = torch.tensor([[math.nan if x is None else x for x in row] for row in case["rewards"]])
    B, K = table.shape
    names = [f"r{k}" for k in range(K)]
    weights = dict(zip(names, case["weights"] or [1.0] * K, strict=True))
    if case["multi_objective_aggregation"] == "normalize_then_sum":
        algo = recipe("gdpo_trl", transform=[{"type": "Sum", "weights": weights}, {"type": "Whiten"}])
    else:
        scale = {"group": "std", "batch": "batch", "none": "none"}[case["scale_rewards"]]
        algo = recipe("grpo", combine={"weights": weights}, advantage={"scale": scale})
    batch = Rollouts(
        logp=torch.zeros(B, 1),
        mask=torch.ones(B, 1, dtype=torch.bool),
        group=torch.arange(B) // case["num_generations"],
        scores={name: table[:, k] for k, name in enumerate(names)},
    )
    A, _, _ = algo.signal(batch)
    close(A[:, 0], torch.tensor(case["expected"]["advantages"]), 1e-5)


@pytest.mark.parametrize("i", range(len(VECTORS["misc_cases"])))
def test_single_functions(i: int) -> None:
    """Entropy mask, off-policy mask and gamma weights, read off the element of a loss with unit weights."""
    case = VECTORS["misc_cases"][i]
    mask = tensor(case["mask"]).bool()
    ones = torch.ones(mask.shape, dtype=F64)
    A = tensor(case["advantages"]).expand(mask.shape).contiguous() if "advantages" in case else ones
    logp, old, sampler = torch.zeros_like(ones), torch.zeros_like(ones), torch.zeros_like(ones)
    channels = {}
    if case["fn"] == "get_high_entropy_mask":
        channels["entropy"] = tensor(case["entropies"])
        # TRL's threshold is the quantile itself; ours is the share that is kept.
        algo = recipe("cispo", ratio=[{}, {"type": "EntropyMask", "top": 1 - case["threshold"]}])
        expected = tensor(case["expected"])
    elif case["fn"] == "get_off_policy_mask":
        logp = old = tensor(case["logps"])
        sampler = tensor(case["sampling_logps"])
        algo = recipe("cispo", clip=[{}, {"type": "OffPolicyMask", "threshold": case["threshold"]}])
        expected = A * tensor(case["expected"]) * mask
    else:
        assert case["fn"] == "get_gamma_weights"
        logp = tensor(case["log_ratio"])
        log_is = tensor(case["is_ratio"]).log()
        log_is[:, 0] += torch.where(mask, 0.0, log_is).sum(1)  # TRL sums the ratios of padded positions too
        sampler = -torch.where(mask, log_is, 0.0)
        algo = recipe("vespo")
        expected = A * tensor(case["expected"]) * mask
    batch = Rollouts(
        logp=sampler,
        mask=mask,
        group=torch.zeros(len(mask), dtype=torch.long),
        channels={**channels, "old": old},
    )
    # d loss / d logp of these losses is minus the mask or weight times A.
    grad = algo.grad({"logp": logp}, batch, A, ones)["logp"]
    close(-grad, expected, TOLERANCE)
    if algo.name == "vespo":  # a weight is defined where A is 0, too
        phi = algo.loss({"logp": logp}, batch, A, ones).metrics["phi"]
        close(phi, (float((tensor(case["expected"]) * mask).sum()), float(mask.sum())), TOLERANCE)

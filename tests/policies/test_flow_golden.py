"""Distance of each sampler's samples to the data on flows with closed-form velocity: figures of the field.

Full windows: at equal steps and injected noise, the exact Langevin kernel is closer than the Flow-SDE step and than the
ODE when there are few steps. With twenty steps it no longer is, and its second call is not counted here.
"""

from __future__ import annotations

import pytest
import torch

from mmgrpo.policies.transitions import Noise, plan, timetable
from tests.kit.flows import F64, GaussianFlow, MixtureFlow, power_law

KERNELS = ("ode", "flow_sde", "langevin_frozen", "langevin", "cps")
UNCLAMPED = 100.0

# steps, schedule, level, window -> W2 in the order of KERNELS
TABLE = [
    (10, "flow", 0.7, range(9), (0.0886, 0.0648, 0.0813, 0.0595, 0.1103)),
    (10, "flow", 1.0, range(9), (0.0886, 0.0491, 0.0706, 0.0452, 0.1094)),
    (10, "cps", 0.7, range(9), (0.0886, 0.0588, 0.0788, 0.0526, 0.1326)),
    (10, "precise", 1.0, range(9), (0.0886, 0.0612, 0.0764, 0.0577, 0.1024)),
    (20, "flow", 0.7, range(19), (0.0518, 0.0350, 0.0468, 0.0360, 0.0654)),
    (20, "cps", 0.7, range(19), (0.0518, 0.0303, 0.0464, 0.0328, 0.1062)),
    (10, "flow", 0.7, (1, 2), (0.0886, 0.0714, 0.0755, 0.0678, 0.0923)),
]


def distance(flow: GaussianFlow, kernel: str, steps: int, schedule: str, level: float, window) -> float:  # type: ignore[no-untyped-def]
    sigmas = timetable(steps, 3.0)
    if kernel == "ode":
        made = plan(sigmas, "ode")
    else:
        made = plan(sigmas, kernel, Noise(schedule=schedule, level=level, kappa_max=UNCLAMPED), window)
    return flow.wasserstein(flow.propagate(made)[-1])


@pytest.mark.parametrize("steps, schedule, level, window, expected", TABLE)
def test_wasserstein_table(steps, schedule, level, window, expected) -> None:  # type: ignore[no-untyped-def]
    """256 directions of power-law spectrum, shift 3, exact velocity; to the printed digits."""
    got = [distance(power_law(), kernel, steps, schedule, level, window) for kernel in KERNELS]
    assert got == pytest.approx(expected, abs=5.1e-5)
    if steps == 10:
        assert got[3] < got[1] < got[0]


def test_noise_level_of_what_the_model_sees() -> None:
    """sqrt(variance)/t in noise directions over the nine stochastic steps (1 = as trained), flow schedule 0.7."""
    flow = GaussianFlow(torch.zeros(1, dtype=F64))

    def level(kernel: str) -> list[float]:
        steps = plan(timetable(10, 3.0), kernel, Noise(schedule="flow", level=0.7, kappa_max=UNCLAMPED), range(9))
        variances = flow.propagate(steps)[:9]
        return [float(v.sqrt()) / step.next_sigma for v, step in zip(variances, steps, strict=False)]

    em = level("flow_sde")
    assert (em[0], em[-1], max(em)) == pytest.approx((1.041, 1.289, 1.289), abs=5e-4)
    for kernel in ("langevin", "langevin_frozen"):
        lc = level(kernel)
        assert (lc[0], lc[-1], max(lc)) == pytest.approx((1.034, 1.140, 1.140), abs=5e-4)
    cps = level("cps")
    assert cps[:8] == pytest.approx([1.0] * 8, abs=1e-9) and cps[8] == pytest.approx(1.025, abs=5e-4)


# W2 of samples of a one-dimensional mixture, ten steps, cps schedule 0.7, in the order of KERNELS: the field's figures,
# which come without the mixture's parameters, and the exact ones of a mixture found to be close to all ten.
MODES = ((1 / 3, 1 / 3, 1 / 3), (-2.0, -0.25, 1.6), (0.25, 0.3, 0.2))
MIXTURE = [
    (0.0, (0.212, 0.159, 0.220, 0.111, 0.339), (0.2094, 0.1601, 0.2205, 0.1052, 0.3444)),
    (0.1, (0.338, 0.212, 0.274, 0.158, 0.403), (0.3411, 0.2099, 0.2748, 0.1625, 0.4044)),
]


@pytest.mark.parametrize("error, field, ours", MIXTURE)
def test_mixture_figures(error: float, field: tuple[float, ...], ours: tuple[float, ...]) -> None:
    """Exact velocity, and one that is off by 0.1 sin(3x)."""
    flow = MixtureFlow(*MODES, error)
    noise, sigmas = Noise(schedule="cps", level=0.7, kappa_max=UNCLAMPED), timetable(10, 3.0)
    plans = [plan(sigmas, "ode") if k == "ode" else plan(sigmas, k, noise, range(9)) for k in KERNELS]
    got = [flow.wasserstein(steps) for steps in plans]
    assert got == pytest.approx(ours, abs=1e-3)
    assert got == pytest.approx(field, abs=6e-3)
    ode, em, _, lc, cps = got
    assert lc < em < ode < cps

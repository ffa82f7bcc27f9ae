"""Hints for names that do not exist."""

from __future__ import annotations

from mmgrpo.errors import nearest, unknown


def test_nearest() -> None:
    assert nearest("Flow-SDE", ["flow_sde", "cps"]) == "flow_sde"
    assert nearest("xyz", ["flow_sde", "cps"]) is None


def test_unknown() -> None:
    assert (
        unknown("kernel", "cpss", ["sde", "cps"]) == "unknown kernel 'cpss'; did you mean 'cps'? (there are: cps, sde)"
    )
    assert unknown("kernel", "zzz", []) == "unknown kernel 'zzz' (there are: none)"

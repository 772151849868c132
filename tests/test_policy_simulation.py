"""The policy on computed machines: near the best fixed choice in hindsight, never below plain.

The whole table is printed by `benchmarks/policy_simulation.py`; here a part of it.
"""

from __future__ import annotations

import pytest
from benchmarks.policy_simulation import MACHINES, MODELS, Costs, Machine, Model, scenario

GEOMETRIC = {t: (1 - 0.85**t) / 0.15 for t in (1, 8, 16)}


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
@pytest.mark.parametrize("context", [2048, 32768])
def test_within_5_percent_of_the_best_fixed_choice_and_2_of_plain(
    machine: Machine, model: Model, context: int
) -> None:
    # each machine and model once with good drafts and once with poor ones
    level = 0.85 if (context == 2048) == (machine.name in ("M3 Ultra", "H200")) else 0.6
    result = scenario(machine, model, context, level, cap=16, count=64)
    assert result.of_best >= 0.95
    assert result.of_plain >= 0.98


def test_the_cost_model_gives_the_speeds_it_was_made_for() -> None:
    """Plain tokens/s and the ratio of fixed T = 16, at acceptance 0.85 and a context of 2,000."""
    for name, kind, rows, plain, ratio in (
        ("M3 Ultra", "9B bf16", 8, 297, 1.45),
        ("M3 Ultra", "9B 4-bit", 1, 120, 1.49),
        ("M3 Ultra", "9B 4-bit", 16, 514, 0.72),
        ("M4 Max", "9B 4-bit", 8, 259, 0.92),
        ("M5 Max", "9B bf16", 32, 812, 1.07),
        ("H200", "9B 4-bit", 8, 1647, 2.00),
        ("H200", "35B-A3B 4-bit", 1, 184, 4.29),
    ):
        costs = Costs(
            next(m for m in MACHINES if m.name == name), next(m for m in MODELS if m.name == kind)
        )
        seconds = costs.forward(rows, 1, 2000)
        assert rows / seconds == pytest.approx(plain, rel=0.05)
        assert GEOMETRIC[16] * seconds / costs.cycle(rows, 16, 2000) == pytest.approx(
            ratio, rel=0.06
        )

"""Text of ``check``: what was planned, beside what is predicted now."""

from budgetfit.core.budget import Budget
from budgetfit.gpus.table import generic_gpu
from budgetfit.reporting.check_text import check_text
from budgetfit.reporting.render import render
from tests.reporting.sample_plans import sample_estimate, sample_plan


def test_a_limit_without_a_card_is_named_by_its_size() -> None:
    size_bytes = 24 * 10**9
    plan = sample_plan(gpu=generic_gpu(size_bytes), budget=Budget(size_bytes, 0, 0))
    text = render(check_text(plan, sample_estimate(), None, None, {"torch": "9.0"}))
    assert text.count("22.00 GiB, 24GB = 22.35 GiB, ") == 2
    assert "assumed" not in text

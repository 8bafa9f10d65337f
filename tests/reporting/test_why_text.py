from dataclasses import replace

from budgetfit.core.block_report import BlockChoice, BlockRow
from budgetfit.core.plan import Plan
from tests.reporting.sample_plans import MIB, sample_plan

KEEP = BlockChoice(
    mode="keep",
    saved_bytes=400 * MIB,
    backward_bytes=200 * MIB,
    extra_ms=0.0,
    plan_peak_bytes=1300 * MIB,
    plan_ms=90.0,
)
RECOMPUTE = replace(
    KEEP,
    mode="recompute",
    saved_bytes=16 * MIB,
    extra_ms=3.0,
    plan_peak_bytes=1000 * MIB,
    plan_ms=93.0,
)
SELECTIVE = replace(
    RECOMPUTE, mode="selective", saved_ops=("aten.mm.default:0",), plan_ms=91.0
)
OFFLOAD = replace(RECOMPUTE, mode="offload", plan_ms=95.0)
ROW = BlockRow(
    name="model.layers.3",
    segment=("model.layers.3",),
    choices=(KEEP, RECOMPUTE, OFFLOAD),
    chosen=1,
    prefix_bytes=500 * MIB,
    peak_bytes=900 * MIB,
    limit_bytes=1100 * MIB,
)


def why(row: BlockRow) -> str:
    return replace(sample_plan(), block_table=(row,)).why(row.name)


def test_the_reason_is_what_every_faster_treatment_would_take() -> None:
    text = why(ROW)
    assert text.startswith("model.layers.3 is recomputed\n")
    assert "384 MiB less wait for its backward than if it were kept" in text
    assert "even kept would be 200 MiB over the limit" in " ".join(text.split())
    assert "200 MiB below the limit" in " ".join(text.split())
    assert "> recomputed" in text
    assert "200 MiB too much" in text


def test_nothing_is_faster_than_keeping() -> None:
    text = " ".join(why(replace(ROW, segment=(), chosen=0)).split())
    assert "model.layers.3 is kept" in text
    assert "nothing is faster, and the plan fits with it" in text
    assert "less wait" not in text


def test_a_faster_treatment_that_would_fit_is_admitted() -> None:
    row = replace(ROW, choices=(KEEP, RECOMPUTE, SELECTIVE))
    text = " ".join(why(row).split())
    assert "saves 1 matrix product would be 2.00 ms faster and fit by the" in text


def test_treatments_are_named_with_what_belongs_to_them() -> None:
    chosen = replace(ROW, choices=(KEEP, SELECTIVE))
    assert "recomputed but for aten.mm.default:0" in why(chosen)
    host = replace(ROW, choices=(KEEP, replace(RECOMPUTE, input_on_host=True)))
    assert "recomputed, input on host" in why(host)
    nested = replace(ROW, segment=("a", "model.layers.3", "c"), nested=True)
    assert "recomputed together with 2 more, in two levels" in why(nested)
    assert "offloaded" in why(ROW)


def test_a_plan_that_was_saved_answers_as_before() -> None:
    plan = replace(sample_plan(), block_table=(ROW,))
    assert Plan.from_json(plan.to_json()).block_table == (ROW,)
    assert Plan.from_json(plan.to_json()).why("layers.3") == plan.why("layers.3")

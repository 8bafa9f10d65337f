"""The layer table and the card table."""

import dataclasses

from budgetfit.gpus.table import all_gpus
from budgetfit.reporting.render import WIDE, gpus_text, layers_text, render
from tests.reporting.sample_plans import sample_layers


def test_policies_under_which_all_layers_are_alike_share_a_table() -> None:
    text = render(layers_text(sample_layers()), width=WIDE)
    headings = [line for line in text.splitlines() if line.startswith(("fp", "bf"))]
    assert headings == ["fp32, tf32", "fp16-mixed, bf16-mixed"]


def test_equal_layers_share_a_row() -> None:
    text = render(layers_text(sample_layers()), width=WIDE)
    assert text.count("2 x model.layers.*.mlp") == 2
    assert "model.layers.0" not in text


def test_layers_that_differ_keep_their_rows() -> None:
    first, second, head = sample_layers()
    second = dataclasses.replace(second, parameter_count=1000)
    text = render(layers_text((first, second, head)), width=WIDE)
    assert " x model" not in text
    assert text.count("model.layers.*.mlp") == 4


def test_a_row_has_weights_and_saved_bytes_of_one_layer() -> None:
    text = render(layers_text(sample_layers()), width=WIDE)
    fp32, mixed = [line.split() for line in text.splitlines() if "lm_head" in line]
    # 96 M parameters (96 * 2**20) * 4 bytes = 384 MiB; saved halves under autocast
    assert fp32[2:] == ["101", "M", "384", "MiB", "64", "MiB", "0", "B", "2"]
    assert mixed[2:] == ["101", "M", "384", "MiB", "32", "MiB", "0", "B", "2"]


def test_a_number_inside_a_name_is_no_index() -> None:
    (layer, *_) = sample_layers()
    layer = dataclasses.replace(layer, name="conv1.layer2.3")
    assert "conv1.layer2.*" in render(layers_text((layer,)), width=WIDE)


def test_a_model_without_layers_is_an_empty_table() -> None:
    assert "Weights and saved bytes" in render(layers_text(()), width=WIDE)


def test_every_card_is_a_row_within_100_columns() -> None:
    text = render(gpus_text(all_gpus()), width=WIDE)
    assert max(map(len, text.splitlines())) <= 100
    rates, shares = text.split("SHARES OF THESE RATES")
    for part in (rates, shares):
        names = [line.split()[0] for line in part.splitlines() if line.split()]
        assert all(names.count(gpu.name) == 1 for gpu in all_gpus())
    links = shares.split("WITHOUT --link")[1]
    for name, cards in (("NVLink 4", "h100-80gb, h200"), ("PCIe", "all others")):
        assert any(name in row and cards in row for row in links.splitlines())


def test_what_is_unknown_is_a_dash_and_what_is_assumed_has_a_tilde() -> None:
    (card, *_) = all_gpus()
    card = dataclasses.replace(
        card, bf16_tflops=None, fp32_tflops=8.5, rates_assumed=True
    )
    cells = render(gpus_text((card,)), width=WIDE).splitlines()[1].split()
    assert "~8.5" in cells
    assert "-" in cells

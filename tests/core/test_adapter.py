from typing import Any

import pytest

from budgetfit.core.adapter import Adapter, parse_adapter
from budgetfit.errors import InputError


def test_no_method_is_no_adapter() -> None:
    assert parse_adapter(None) is None


def test_qlora_is_lora_on_nf4_prepared_as_peft_does() -> None:
    assert parse_adapter("lora") == Adapter(method="lora")
    assert parse_adapter("qlora") == Adapter(
        method="qlora", quantization="nf4", prepared=True
    )
    assert parse_adapter("qlora", prepare_for_kbit=False) == Adapter(
        method="qlora", quantization="nf4"
    )
    eight = parse_adapter("lora", quantization="int8", target_modules=["q", "v"])
    assert eight == Adapter(
        method="lora", quantization="int8", target_modules=("q", "v"), prepared=True
    )


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"method": "dora"}, "'dora' is not a method. Use one of: lora, qlora"),
        ({"method": "qlora", "quantization": "int4"}, "Use one of: nf4, int8"),
        ({"method": None, "quantization": "nf4"}, "quantised weights are not trained"),
        (
            {"method": None, "prepare_for_kbit": False},
            "prepare_for_kbit is a setting of adapters, and none are trained",
        ),
        (
            {"method": "full", "double_quantization": False},
            "double_quantization is a setting of adapters",
        ),
        (
            {"method": "lora", "prepare_for_kbit": False},
            "prepare_for_kbit is a setting of nf4 and int8, in which the base is not",
        ),
        (
            {"method": "lora", "double_quantization": False},
            "double_quantization is a setting of nf4, in which the base is not",
        ),
        (
            {"method": "qlora", "quantization": "int8", "double_quantization": False},
            "double_quantization is a setting of nf4",
        ),
        ({"method": "lora", "lora_r": 0}, "lora_r must be a whole number"),
        ({"method": "lora", "lora_alpha": 1.5}, "lora_alpha must be a whole number"),
        ({"method": "lora", "lora_dropout": 1}, "lora_dropout must be a share"),
        ({"method": "lora", "target_modules": []}, "target_modules must be"),
        ({"method": "lora", "target_modules": 3}, "target_modules must be"),
    ],
)
def test_what_cannot_be_meant_is_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_adapter(**asked)
    assert text in str(refused.value)


def test_an_adapter_says_what_it_is() -> None:
    qlora = parse_adapter("qlora", lora_r=8, target_modules=["q_proj", "v_proj"])
    assert qlora is not None
    text = "LoRA r=8 on q_proj, v_proj, base in nf4 with double quantisation"
    assert qlora.describe() == text

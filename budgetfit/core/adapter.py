"""Adapter: LoRA settings and how the frozen base model is quantized.

Names are those of peft's ``LoraConfig`` and transformers' ``BitsAndBytesConfig``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from budgetfit.core.validation import check_positive_int
from budgetfit.errors import InputError

Method = Literal["lora", "qlora"]
Quantization = Literal["nf4", "int8"]
ComputeDtype = Literal["fp32", "fp16", "bf16"]

METHODS: Final = ("lora", "qlora")
FULL: Final = "full"  # full fine-tuning, the default
QUANTIZATIONS: Final = ("nf4", "int8")
ALL_LINEAR: Final = "all-linear"
INT8_THRESHOLD: Final = 6.0  # transformers' llm_int8_threshold
# How a class's name ends, peft's task type, and the heads that it trains as a whole.
_TASKS: Final = (
    # peft takes every name that ends so as a head: DistilBERT's pre_classifier, too.
    ("ForSequenceClassification", "SEQ_CLS", ("classifier", "score", "pre_classifier")),
    ("ForTokenClassification", "TOKEN_CLS", ("classifier", "score")),
    ("ForQuestionAnswering", "QUESTION_ANS", ("qa_outputs",)),
    ("ForCausalLM", "CAUSAL_LM", ()),
    ("LMHeadModel", "CAUSAL_LM", ()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA matrices on a frozen base.

    Attributes:
        method: As given; ``qlora`` is ``lora`` on a quantized base.
        r, alpha, dropout: ``LoraConfig(r, lora_alpha, lora_dropout)``.
        target_modules: Ends of module names, a pattern, or ``"all-linear"``: every
            linear layer but the output's.
        quantization: How bitsandbytes stores the base's linear layers: ``nf4`` (4 bits
            in blocks of 64) or ``int8`` (LLM.int8()); None leaves them as they are.
        double_quantization: Whether the scales of nf4 are quantized as well.
        compute_dtype: dtype to which nf4 weights are dequantized for a matmul.
        prepared: Whether peft's ``prepare_model_for_kbit_training`` casts parameters
            that are not quantized (embeddings, norms, the head) to fp32.
    """

    method: Method
    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    quantization: Quantization | None = None
    double_quantization: bool = True
    compute_dtype: ComputeDtype = "bf16"
    prepared: bool = False

    def describe(self) -> str:
        """Describe the adapter in one line for a report."""
        targets = self.target_modules
        where = targets if isinstance(targets, str) else ", ".join(targets)
        text = f"LoRA r={self.r} on {where}"
        if self.quantization is not None:
            twice = self.quantization == "nf4" and self.double_quantization
            text += f", base in {self.quantization}"
            text += " with double quantisation" if twice else ""
        return text


def peft_task(class_name: str) -> str | None:
    """Return peft's task type of a model's class."""
    return next((task for end, task, _ in _TASKS if class_name.endswith(end)), None)


def trained_heads(class_name: str) -> list[str]:
    """Return the names of the heads that peft trains as a whole, without adapters.

    They must not be quantised. For "all-linear" peft has to be told (0.21): it puts
    adapters on the heads of tokens and spans, and then cannot train them as a whole.
    """
    found = (heads for end, _, heads in _TASKS if class_name.endswith(end))
    return list(next(found, ()))


def parse_adapter(  # noqa: PLR0913 - the arguments of a plan, one value each
    method: str | None,
    *,
    lora_r: int = 16,
    lora_alpha: int = 32,
    lora_dropout: float = 0.0,
    target_modules: str | Sequence[str] = ALL_LINEAR,
    quantization: str | None = None,
    double_quantization: bool = True,
    prepare_for_kbit: bool = True,
    compute_dtype: ComputeDtype = "bf16",
) -> Adapter | None:
    """Parse adapter arguments; None for full fine-tuning.

    Raises:
        InputError: If an argument is invalid, or would have no effect.
    """
    if method in (None, FULL):
        if quantization is not None:
            raise InputError(
                f"quantization={quantization!r} is for a frozen base: quantised "
                'weights are not trained. Add method="qlora" (--method qlora).'
            )
        usual = Adapter(method="lora")
        _refuse_settings_of_none(
            lora_r=lora_r != usual.r,
            lora_alpha=lora_alpha != usual.alpha,
            lora_dropout=lora_dropout != usual.dropout,
            target_modules=target_modules != usual.target_modules,
            double_quantization=not double_quantization,
            prepare_for_kbit=not prepare_for_kbit,
        )
        return None
    stored: Quantization | None = "nf4" if method == "qlora" else None
    if quantization is not None:
        stored = _one_of("quantization", quantization, QUANTIZATIONS)
    known: Method = _one_of("method", method, (*METHODS, FULL))
    if stored is None and not prepare_for_kbit:
        raise _no_such_setting("prepare_for_kbit", "nf4 and int8, in which")
    if stored != "nf4" and not double_quantization:
        raise _no_such_setting("double_quantization", "nf4, in which")
    return Adapter(
        method=known,
        r=check_positive_int("lora_r", lora_r, example=16),
        alpha=check_positive_int("lora_alpha", lora_alpha, example=32),
        dropout=_share("lora_dropout", lora_dropout),
        target_modules=_targets(target_modules),
        quantization=stored,
        double_quantization=double_quantization,
        compute_dtype=compute_dtype,
        prepared=prepare_for_kbit and stored is not None,
    )


def _refuse_settings_of_none(**is_set: bool) -> None:
    """Raise InputError for adapter settings given without an adapter method."""
    for name, was_set in is_set.items():
        if was_set:
            raise InputError(
                f"{name} is a setting of adapters, and none are trained. Add "
                'method="lora" or method="qlora" (--method lora).'
            )


def _no_such_setting(name: str, storage: str) -> InputError:
    return InputError(
        f"{name} is a setting of {storage} the base is not quantised here. Leave it "
        'out, or use method="qlora" (--method qlora).'
    )


def _one_of(name: str, value: object, known: tuple[str, ...]) -> Any:  # noqa: ANN401
    if value not in known:
        raise InputError(
            f"{value!r} is not a {name}. Use one of: {', '.join(known)}; for example "
            f'{name}="{known[0]}".'
        )
    return value


def _share(name: str, value: object) -> float:
    number = None if isinstance(value, bool) else value
    if not isinstance(number, (int, float)) or not 0 <= number < 1:
        raise InputError(
            f"{name} must be a share from 0 to less than 1, for example 0.05; "
            f"got {value!r}."
        )
    return float(number)


def _targets(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.isidentifier():
        return (value,)  # a plain name; a regex would have to match the whole path
    if isinstance(value, str) and value:
        try:
            re.compile(value)
        except re.error as error:
            raise InputError(
                f"target_modules={value!r:.80} is no regular expression: {error}. Use "
                'names such as ["q_proj", "v_proj"].'
            ) from None
        return value
    names = tuple(value) if isinstance(value, Sequence) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(
            'target_modules must be "all-linear", a pattern, or names such as '
            f'["q_proj", "v_proj"]; got {value!r}.'
        )
    return names

"""Source text that loads a planned model with quantization and adapters.

peft's and bitsandbytes' own names (peft 0.21, transformers 5.23); neither is imported.
"""

import keyword
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from budgetfit.core.adapter import Adapter, peft_task, trained_heads
from budgetfit.core.plan import Plan
from budgetfit.core.precision import find_precision
from budgetfit.integrations.model_sources.model_name import config_file, is_local_path
from budgetfit.integrations.source_code.python_source import (
    DTYPES,
    asked_model,
    call_source,
    dequantizer_of,
    escape_line,
    to_source,
)
from budgetfit.utils.function_name import is_factory_text

DIFFUSERS: Final = "diffusers."  # before the class in ``ModelSummary.class_name``
# bitsandbytes quantises on the GPU, which for every rank would be the first.
DEVICE_MAP: Final = 'device_map={"": PartialState().device}'


@dataclass(frozen=True, slots=True)
class Loading:
    """A function ``load_model()`` as source, with its imports.

    Attributes:
        constants: Lines that come first.
        modules: For ``import``.
        names: For ``from`` imports: module and name.
        from_hub: Whether a constant ``MODEL`` names weights and tokenizer.
    """

    constants: str
    code: str
    modules: frozenset[str]
    names: tuple[tuple[str, str], ...]
    from_hub: bool


def load_model_text(plan: Plan) -> Loading:
    """Return source of a function that loads the model of a plan, with adapters.

    A model of transformers or diffusers is loaded by its class; a factory is called;
    for any other model there is a placeholder.
    """
    text, adapter, class_name = asked_model(plan), plan.adapter, plan.model.class_name
    names = [] if adapter is None else adapter_imports(adapter)
    modules, constants, builder = {"torch"}, "", ""
    said = "Load the model as it was planned."
    a_name = class_name.isidentifier() and not keyword.iskeyword(class_name)
    from_hub = a_name and not is_factory_text(text)
    if class_name.startswith(DIFFUSERS):
        kind = class_name.removeprefix(DIFFUSERS)
        names.append(("diffusers", kind))
        place, arguments = _part_of_pipeline(plan)
        constants = f"MODEL = {to_source(place)}\n"
        loaded = call_source(f"{kind}.from_pretrained", arguments, 4, len("model = "))
    elif from_hub:
        constants = f"MODEL = {to_source(weights_of(plan))}\n"
        names += [*device_imports(plan), ("transformers", class_name)]
        if dequantizer := dequantizer_of(plan):
            names.append(("transformers", dequantizer))
        loader, arguments = f"{class_name}.from_pretrained", _loading_arguments(plan)
        loaded = call_source(loader, arguments, 4, len("model = "))
    else:
        names += device_imports(plan)
        builder, needed = _own_builder(plan, text)
        modules |= needed
        loaded = f"build_model(){_cast(plan)}"
        said = "Build the model as it was planned; load your own weights here."
    lines = [f'"""{said}"""', f"model = {loaded}"]
    lines += adapter_lines(adapter, plan.recipe.precision, class_name, 4)
    body = "".join(f"    {line}\n" for line in lines)
    code = f"{builder}def load_model():\n{body}    return model\n"
    if "torch." not in code:
        modules.discard("torch")
    return Loading(constants, code, frozenset(modules), tuple(names), from_hub)


def _part_of_pipeline(plan: Plan) -> tuple[str, list[str]]:
    """Return the place of a model of diffusers, and how to load it from there."""
    place, arguments = weights_of(plan), ["MODEL"]
    if Path(place).expanduser().is_dir():
        place = str(config_file(place).parent)
    elif "/" in plan.model.name:
        arguments.append(f"subfolder={to_source(plan.model.name.rpartition('/')[2])}")
    dtype = dtype_of(plan)
    if plan.adapter is not None and dtype == '"auto"':  # as their training scripts do
        dtype = f"torch.{DTYPES[plan.adapter.compute_dtype]}"
    if dtype not in ('"auto"', "torch.float32"):
        arguments.append(f"torch_dtype={dtype}")
    return place, arguments


def weights_of(plan: Plan) -> str:
    """Return the hub id or folder that a plan was made from, or a placeholder."""
    text = asked_model(plan)
    if not text or is_factory_text(text):
        return f"REPLACE by the hub id or folder of {escape_line(plan.model.name)}"
    path = Path(text).expanduser()
    if is_local_path(text) and path.suffix == ".json":
        return str(path.parent)
    return text


def adapter_imports(adapter: Adapter) -> list[tuple[str, str]]:
    """Return the imports of ``adapter_lines`` and of loading."""
    names = [("peft", "LoraConfig"), ("peft", "get_peft_model")]
    if adapter.prepared:
        names.append(("peft", "prepare_model_for_kbit_training"))
    if adapter.quantization is not None:
        names.append(("transformers", "BitsAndBytesConfig"))
    return names


def device_imports(plan: Plan) -> list[tuple[str, str]]:
    """Return the import of ``DEVICE_MAP``; nothing where it is not needed."""
    adapter, several = plan.adapter, plan.recipe.parallelism
    quantized = adapter is not None and adapter.quantization is not None
    return [("accelerate", "PartialState")] if quantized and several else []


def adapter_lines(
    adapter: Adapter | None,
    precision: str = "as-is",
    class_name: str = "",
    indent: int = 0,
) -> list[str]:
    """Return statements that add adapters to a loaded ``model``.

    None of them without an adapter. Under ``bf16`` the LoRA matrices are in 16 bits,
    which peft needs as an argument. ``class_name``: of the model, which determines
    peft's task type; ``indent``: of the statements, without their first lines.
    """
    if adapter is None:
        return []
    lines = []
    if adapter.prepared:
        prepared = "prepare_model_for_kbit_training"
        lines.append(f"model = {prepared}(model, use_gradient_checkpointing=False)")
    arguments = ["model", lora_config(adapter, class_name, indent + 4)]
    if find_precision(precision).weights == "bf16":
        arguments.append("autocast_adapter_dtype=False")
    adapted = call_source("get_peft_model", arguments, indent, len("model = "))
    return [*lines, f"model = {adapted}"]


def lora_config(adapter: Adapter, class_name: str = "", indent: int = 0) -> str:
    """Return ``LoraConfig(...)`` as source."""
    arguments = [
        f"r={adapter.r}",
        f"lora_alpha={adapter.alpha}",
        f"lora_dropout={adapter.dropout}",
        f"target_modules={_names(adapter.target_modules)}",
    ]
    task = peft_task(class_name)
    if task is not None:
        arguments.append(f"task_type={to_source(task)}")
    if heads := trained_heads(class_name):
        arguments.append(f"modules_to_save={_names(heads)}")
    return call_source("LoraConfig", arguments, indent)


def quantization_config(adapter: Adapter, indent: int = 0, class_name: str = "") -> str:
    """Return ``BitsAndBytesConfig(...)`` as source; empty without quantization."""
    before = len("quantization_config=")
    if adapter.quantization is None:
        return ""
    arguments = ["load_in_8bit=True"]
    if adapter.quantization == "nf4":
        arguments = [
            "load_in_4bit=True",
            f"bnb_4bit_quant_type={to_source(adapter.quantization)}",
            f"bnb_4bit_use_double_quant={adapter.double_quantization}",
            f"bnb_4bit_compute_dtype=torch.{DTYPES[adapter.compute_dtype]}",
        ]
    if heads := trained_heads(class_name):
        arguments.append(f"llm_int8_skip_modules={_names(heads)}")
    return call_source("BitsAndBytesConfig", arguments, indent, before)


def dtype_of(plan: Plan) -> str:
    """Return the ``dtype`` argument of ``from_pretrained``, as source."""
    # Trained weights are loaded in the dtype of training. Under autocast a frozen base
    # keeps the dtype of its config.
    policy = find_precision(plan.recipe.precision)
    frozen = plan.adapter is not None and policy.autocast is not None
    if policy.weights == "as-is" or frozen:
        return '"auto"'
    return f"torch.{DTYPES[policy.weights]}"


def has_fp32_copies(plan: Plan) -> bool:
    """Whether a quantized base's embeddings, norms and head are planned in fp32."""
    pure = find_precision(plan.recipe.precision).weights == "bf16"
    return plan.adapter is not None and plan.adapter.prepared and not pure


def _loading_arguments(plan: Plan) -> list[str]:
    arguments = ["MODEL", f"dtype={dtype_of(plan)}"]
    if plan.adapter is not None and plan.adapter.quantization is not None:
        config = quantization_config(plan.adapter, 8, plan.model.class_name)
        arguments.append(f"quantization_config={config}")
        if device_imports(plan):
            arguments.append(DEVICE_MAP)
    elif dequantizer := dequantizer_of(plan):
        arguments.append(f"quantization_config={dequantizer}(dequantize=True)")
    return arguments


def _cast(plan: Plan) -> str:
    """Return source that casts a built model; not a frozen base under autocast."""
    dtype = dtype_of(plan)
    return f".to({dtype})" if dtype.startswith("torch.") else ""


def _own_builder(plan: Plan, text: str) -> tuple[str, set[str]]:
    """Return ``build_model`` of a factory, or a placeholder, and its imports."""
    from budgetfit.integrations.source_code import plain_torch  # noqa: PLC0415 - needs torch

    part = plain_torch.own_model(plan, text)
    modules = {line.removeprefix("import ") for line in part.imports} | {"torch"}
    return f"{part.code}\n\n", modules


def _names(targets: str | Sequence[str]) -> str:
    if isinstance(targets, str):
        return to_source(targets)
    return f"[{', '.join(to_source(name) for name in targets)}]"

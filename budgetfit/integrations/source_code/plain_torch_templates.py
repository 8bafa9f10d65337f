"""Templates of the exported training script, as source text.

Plain PyTorch without budgetfit. ``torch_script`` selects the ones that a recipe needs;
tests run the scripts. What is longer than a few lines is in ``exported/``.
"""

from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

from budgetfit.applying.optimizers import bitsandbytes, cpu_offload, torchao
from budgetfit.applying.optimizers.factory import TORCH_ONLY


@dataclass(frozen=True, slots=True)
class Part:
    """Source text and its imports."""

    code: str
    imports: tuple[str, ...] = ()


_LONGEST: Final = 70  # after "    return "
_FOLDER: Final = Path(__file__).with_name("exported")


def exported_part(file: str) -> Part:
    """Read source text from ``exported/``: the imports, two empty lines, the code."""
    imports, _, code = (_FOLDER / file).read_text("utf-8").partition("\n\n\n")
    return Part(code, tuple(imports.splitlines()))


MODEL_FROM_CONFIG: Final = Template('''\
CONFIG = $config


def build_model():
    """Build the model from its config, with random weights."""
    config = transformers.CONFIG_MAPPING[CONFIG["model_type"]].from_dict(CONFIG)
    return transformers.$class_name(config).to($dtype)
''')

MODEL_FROM_HUB: Final = Template('''\
MODEL = $name


def build_model(*, pretrained=False):
    """Build the model from its config, or with ``pretrained`` load its weights too."""
    config = transformers.AutoConfig.from_pretrained(MODEL)
    kind = transformers.$class_name
    if pretrained:
        return $loaded
    return kind(config).to(config.dtype or torch.float32)
''')

MODEL_FROM_FACTORY: Final = Template('''\
@functools.cache
def factory():
    """What the plan was made from: the model, perhaps with a batch and a loss."""
    made = $made
    made = made if isinstance(made, torch.nn.Module) else made()
    return made if isinstance(made, tuple) else (made,)


def build_model():
    """Build the model as it was planned."""
    return factory()[0]
''')

MODEL_TO_FILL_IN: Final = Template('''\
def build_model():
    """FILL IN: return the model that was planned."""
    raise SystemExit(
        $message
    )
''')


def _of(library: str, kind: str, *options: str) -> Part:
    given = ", ".join(options)
    call = f"{kind}(parameters, lr=lr, {given})"
    if len(call) > _LONGEST:
        call = f"{kind}(\n        parameters, lr=lr, {given}\n    )"
    return Part(call, (f"from {library} import {kind}",))


def _bitsandbytes(spec: bitsandbytes.OptimizerSpec) -> Part:
    options = {"Lion": ["betas=(0.9, 0.999)"], "RMSprop": []}
    given = options.get(spec.kind, ["weight_decay=0.0"])
    if spec.bits == 8 or spec.kind == "RMSprop":  # noqa: PLR2004
        given.append(f"optim_bits={spec.bits}")
    if spec.is_paged:
        given.append("is_paged=True")
    return _of("bitsandbytes.optim", spec.kind, *given)


OPTIMIZERS: Final = {
    **{name: _bitsandbytes(spec) for name, spec in bitsandbytes.SPECS.items()},
    **{
        name: _of("torchao.optim", spec.kind, "block_size=256", "weight_decay=0.0")
        for name, spec in torchao.SPECS.items()
    },
    cpu_offload.NAME: _of("torchao.optim", "CPUOffloadOptimizer", "weight_decay=0.0"),
    **{
        name: Part(f"torch.optim.{kind}(parameters, lr=lr{options})")
        for name, kind, options in (
            ("adamw_torch", "AdamW", ", weight_decay=0.0"),
            ("adamw_torch_fused", "AdamW", ", weight_decay=0.0, fused=True"),
            ("sgd", "SGD", ""),
            ("adagrad", "Adagrad", ""),
            ("rmsprop", "RMSprop", ""),
            *((name, kind.__name__, "") for name, kind in TORCH_ONLY.items()),
            ("muon", "Muon", ", weight_decay=0.0"),
        )
    },
    "adafactor": _of(
        "transformers.optimization",
        "Adafactor",
        "scale_parameter=False",
        "relative_step=False",
    ),
}

BATCHES: Final = Template('''\
def batches(model):
    """REPLACE by your own data: endless random batches of the planned shape.

    Yield CPU tensors; every micro-batch has BATCH_SIZE samples.$more
    """
$bound    while True:
$tensors
        yield {$names}
''')

EQUAL_BATCHES: Final = """
    All count the same in an update, however many of their tokens have labels."""

OWN_SAMPLES: Final = """
    Each rank yields its own samples, as of a DistributedSampler."""

VOCABULARY_LINE: Final = """\
    tokens = vocabulary_size(model)
"""

VOCABULARY: Final = '''\
def vocabulary_size(model):
    """How many different whole numbers the model takes."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    sizes = [getattr(config, "vocab_size", None)]
    sizes += [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
    ][:1]
    return min((size for size in sizes if size), default=2)
'''

OWN_LOSS: Final = '''\
def loss_of(model, batch):
    """The model's own loss."""
    return model(**batch).loss
'''

FOUND_LOSS: Final = Template('''\
def loss_of(model, batch):
    """REPLACE by your own loss where the model returns none."""
    check_names(model, $arguments)
    outputs = model($arguments)
    own = outputs if isinstance(outputs, dict) else {}
    loss = own.get("loss", getattr(outputs, "loss", None))
    if loss is None and isinstance(outputs, tuple) and "labels" in batch:
        loss = outputs[0]
    if loss is None and isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
        loss = outputs
    if loss is None:
        raise SystemExit("REPLACE loss_of() by your own loss: the model returns none.")
    return loss
''')

CHECK_NAMES: Final = '''\
def check_names(model, *inputs, **named):
    """Stop where the model takes other arguments, as one dataclass, than it gets."""
    forward = getattr(model, "module", model).forward
    try:
        inspect.signature(forward).bind(*inputs, **named)
    except TypeError as error:
        raise SystemExit(
            f"REPLACE batches() and loss_of(): the model takes other inputs ({error})."
        ) from None
'''

NAMED_LOSS: Final = Template('''\
@functools.cache
def planned_loss():
    """Return the function that was planned: loss(outputs, batch)."""
    return $found


def loss_of(model, batch):
    """The planned loss of the model's outputs."""
    takes = inspect.signature(getattr(model, "module", model).forward).parameters
$call
''')

CALL_BY_NAME: Final = """\
    takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    inputs = {name: batch[name] for name in batch if takes_any or name in takes}
    check_names(model, **inputs)
    return planned_loss()(model(**inputs), batch)"""

CALL_BY_POSITION: Final = """\
    batch = list(batch.values())
    needed = sum(each.default is each.empty for each in takes.values())
    count = len(batch) if len(batch) <= needed else min(len(takes), len(batch) - 1)
    check_names(model, *batch[:count])
    return planned_loss()(model(*batch[:count]), batch)"""

COMPILE: Final = '''\
def compiled(forward):
    """Compile without padding, which inductor decides by timing products."""
    return torch.compile(forward, dynamic=False, options={"shape_padding": False})
'''

COMPILE_BLOCKS: Final = """\
    torch._dynamo.config.recompile_limit += 2 * len(COMPILED)  # they share their code
    for name in COMPILED:
        block = model.get_submodule(name)
        block.forward = compiled(block.forward)
"""

WHOLE_GRAPHS: Final = """\
    torch._dynamo.config.optimize_ddp = False  # cuts no block's graph at a bucket
"""

COMPILE_MODEL: Final = """\
    model.forward = compiled(model.forward)
"""

EMPTY_CACHE: Final = """\
        if step <= 2 and device.type == "cuda":  # they compiled, and timed kernels
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
"""

MAIN: Final = Template((_FOLDER / "main.py.txt").read_text("utf-8"))

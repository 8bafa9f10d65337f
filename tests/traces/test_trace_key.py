"""The key of a cached trace: equal for equals, another for all that counts."""

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch.utils import checkpoint
from transformers.models.llama import modeling_llama

from budgetfit.core.recipe import Segment
from budgetfit.core.samples.sample_dims import SampleDims
from budgetfit.gpus.table import find_gpu
from budgetfit.traces.cache import key as trace_key
from budgetfit.traces.cache import package_hash as own_sources
from budgetfit.traces.cache.key import why_not_cacheable, workload_key
from budgetfit.workload.workload import Workload
from tests.models import EXAMPLES, sgd
from tests.processes import python

OWN_SOURCES = trace_key.package_hash
PROGRAM = ("fp32", "adamw_torch_fused", (), False, False)


@pytest.fixture(autouse=True)
def sources_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may be working on the package while its tests run."""
    monkeypatch.setattr(trace_key, "package_hash", lambda: "as they are")


def cache_key(workload: Workload, settings: object) -> str | None:
    """Return the key of a trace of ``workload``."""
    return trace_key.trace_key(workload_key(workload), settings)


class Net(nn.Module):
    """One of everything that a model can carry."""

    scale = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.zeros(3))
        self.factor = 0.5
        self.names = ["a", "b"]
        self.settings = {"kind": "plain", "sizes": (1, 2)}
        self.lookup = np.arange(3)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(self.first(x)) * self.scale)[which].sum()


def loss(outputs: torch.Tensor, _: object) -> torch.Tensor:
    return outputs.mean() * FACTOR


FACTOR = 2.0


def other_loss(outputs: torch.Tensor, _: object) -> torch.Tensor:
    return outputs.sum() * FACTOR


def net_subject() -> Workload:
    """Build everything anew."""
    batch = {"x": torch.zeros(2, 4), "which": torch.tensor([0, 1])}
    return Workload(
        model=Net().train(),
        batch=batch,
        loss=loss,
        optimizer=sgd,
        gpu=find_gpu("rtx-4090"),
        blocks=("first",),
    )


def key(workload: Workload) -> str:
    found = cache_key(workload, PROGRAM)
    assert found is not None, why_not_cacheable(workload)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_model_built_twice_has_the_same_key(name: str) -> None:
    example = EXAMPLES[name]
    keys = {
        key(
            Workload(
                model=example.model(), batch=example.batch, gpu=find_gpu("t4")
            ).with_found_blocks()
        )
        for _ in range(2)
    }
    assert len(keys) == 1


def test_weights_and_what_floats_say_do_not_count() -> None:
    one, other = net_subject(), net_subject()
    with torch.no_grad():
        other.model.first.weight.add_(1)
        other.model.table.add_(1)
        other.batch["x"].add_(1)
    assert key(one) == key(other)


def test_a_name_is_no_part_of_a_trace() -> None:
    one = net_subject()
    assert key(one) == key(replace(one, name="mine", source="there", notes=("n",)))


def test_another_process_has_the_same_key() -> None:
    code = (
        "from tests.traces.test_trace_key import *\n"
        "trace_key.package_hash = lambda: 'as they are'\n"
        "example = EXAMPLES['gpt2']\n"
        "t4 = find_gpu('t4')\n"
        "gpt2 = Workload(model=example.model(), batch=example.batch, gpu=t4)"
        "\nprint(key(net_subject()), key(gpt2))"
    )

    def found(seed: str) -> str:
        path = os.pathsep.join(sys.path)
        made = python("-c", code, check=True, PYTHONHASHSEED=seed, PYTHONPATH=path)
        return made.stdout

    assert found("1") == found("2") != ""


def _tie(model: Any) -> None:
    model.second.weight = model.first.weight


def _alias(model: Any) -> None:
    """Two parameters of one storage."""
    model.second.weight = nn.Parameter(model.first.weight.detach())


def _replace_forward(model: Any) -> None:
    def forward(self: Any, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return (self.first(x) + 1)[which].sum()

    model.forward = types.MethodType(forward, model)


def _transposed(model: Any) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().t())


def _rename(model: Any) -> None:
    model.third = model.second
    del model.second


class OtherNet(Net):
    """The same in another class."""


MODELS: dict[str, Callable[[Any], object]] = {
    "a number": lambda m: setattr(m, "factor", 0.25),
    "a list": lambda m: m.names.append("c"),
    "a dictionary": lambda m: m.settings.update(kind="other"),
    "a tuple in it": lambda m: m.settings.update(sizes=(1, 3)),
    "an array": lambda m: m.lookup.__setitem__(0, 7),
    "a function": lambda m: setattr(m, "activation", torch.sigmoid),
    "a child's attribute": lambda m: setattr(m.norm, "momentum", 0.3),
    "a child's class": lambda m: setattr(m, "norm", nn.Identity()),
    "a new child": lambda m: m.add_module("third", nn.Linear(1, 1)),
    "a child's name": _rename,
    "the class": lambda m: setattr(m, "__class__", OtherNet),
    "evaluation": lambda m: m.norm.eval(),
    "a shape": lambda m: setattr(m, "first", nn.Linear(4, 5)),
    "no bias": lambda m: setattr(m, "first", nn.Linear(4, 4, bias=False)),
    "a dtype": lambda m: m.first.bfloat16(),
    "strides": _transposed,
    "frozen": lambda m: m.first.weight.requires_grad_(requires_grad=False),
    "tied": _tie,
    "sharing a storage": _alias,
    "a buffer's shape": lambda m: m.register_buffer("table", torch.zeros(5)),
    "on meta": lambda m: m.to("meta"),
    "a gradient that is there": lambda m: setattr(
        m.first.weight, "grad", torch.zeros(4, 4)
    ),
    "a method of its own": _replace_forward,
}


@pytest.mark.parametrize("change", MODELS.values(), ids=MODELS)
def test_what_a_model_is_counts(change: Callable[[Any], object]) -> None:
    one, other = net_subject(), net_subject()
    change(other.model)
    assert key(one) != key(other)


def test_tied_and_sharing_a_storage_are_two_things() -> None:
    tied, sharing = net_subject(), net_subject()
    _tie(tied.model)
    _alias(sharing.model)
    assert key(tied) != key(sharing)


def _weighted(weight: float) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))


def _closure(weight: float) -> Callable[..., torch.Tensor]:
    tensor = torch.tensor(weight)
    return lambda outputs, _: outputs.mean() * tensor


BATCH: dict[str, Any] = {"x": torch.zeros(2, 4), "which": torch.tensor([0, 1])}
SUBJECTS: dict[str, dict[str, Any]] = {
    "whole numbers in the batch": {"batch": {**BATCH, "which": torch.tensor([1, 1])}},
    "a shape in the batch": {"batch": {**BATCH, "x": torch.zeros(2, 5)}},
    "a dtype in the batch": {"batch": {**BATCH, "x": torch.zeros(2, 4).half()}},
    "a name in the batch": {"batch": {"y": BATCH["x"], "which": BATCH["which"]}},
    "the batch's structure": {"batch": tuple(BATCH.values())},
    "a flag in the batch": {"batch": {**BATCH, "flag": True}},
    "the batch dimension": {"batch_dims": SampleDims(1)},
    "what is said of a part": {"batch_dims": SampleDims(0, {"x": 0})},
    "what is said of another": {"batch_dims": SampleDims(0, {"which": 0})},
    "that it goes with all": {"batch_dims": SampleDims(0, {"which": None})},
    "the blocks": {"blocks": ("first", "second")},
    "no loss": {"loss": None},
    "another loss": {"loss": other_loss},
    "a loss with arguments": {"loss": functools.partial(loss, batch=1)},
    "a loss that is a module": {"loss": _weighted(1.0)},
    "its weights": {"loss": _weighted(2.0)},
    "a loss with a closure": {"loss": _closure(1.0)},
    "its values": {"loss": _closure(2.0)},
    "no optimizer": {"optimizer": None},
    "another optimizer": {"optimizer": torch.optim.AdamW},
    "another capability": {"gpu": find_gpu("t4")},
    "without cuDNN": {"cudnn": False},
}


def test_what_surrounds_a_model_counts() -> None:
    keys = [key(net_subject())]
    keys += [key(replace(net_subject(), **change)) for change in SUBJECTS.values()]
    same = [
        name
        for name, found in zip(["plain", *SUBJECTS], keys, strict=True)
        if keys.count(found) > 1
    ]
    assert not same


def test_a_card_of_the_same_capability_has_the_same_key() -> None:
    one = net_subject()
    assert key(one) == key(replace(one, gpu=find_gpu("l4")))


PROGRAMS: dict[str, Any] = {
    "plain": PROGRAM,
    "precision": ("bf16-mixed", *PROGRAM[1:]),
    "optimizer": ("fp32", "sgd", *PROGRAM[2:]),
    "a segment": (*PROGRAM[:2], (Segment(("first",)),), False, False),
    "a segment's mode": (*PROGRAM[:2], (Segment(("first",), "offload"),), False, False),
    "its ops": (
        *PROGRAM[:2],
        (Segment(("first",), "selective", ("aten.mm.default:0",)),),
        False,
        False,
    ),
    "accumulation": (*PROGRAM[:3], True, False),
    "own checkpointing": (*PROGRAM[:4], True),
    "chunks": (*PROGRAM, 4),
    "a batch size": (PROGRAM, 7),
}


def test_every_part_of_the_program_counts() -> None:
    workload = net_subject()
    keys = {cache_key(workload, program) for program in PROGRAMS.values()}
    assert None not in keys
    assert len(keys) == len(PROGRAMS)


def _set(
    module: object, name: str, value: object
) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, value, raising=False)


def _switch(
    get: Callable[[], Any], put: Callable[[Any], Any], value: object
) -> Callable[[pytest.MonkeyPatch], Callable[[], None]]:
    def change(_: pytest.MonkeyPatch) -> Callable[[], None]:
        before = get()
        put(value)
        return lambda: put(before)

    return change


CUDA = torch.backends.cuda
SETTINGS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "flash": _switch(CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, False),
    "efficient": _switch(
        CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp, False
    ),
    "math": _switch(CUDA.math_sdp_enabled, CUDA.enable_math_sdp, False),
    "cudnn attention": _switch(CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, False),
    "default dtype": _switch(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "tf32": _switch(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    ),
    "determinism": _switch(
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "early stop": _set(checkpoint, "_enable_checkpoint_early_stop", False),
    "torch's version": _set(torch, "__version__", "99.1"),
    "a class attribute": _set(Net, "scale", 3),
    "a method": _set(Net, "forward", lambda _, x, _which: x),
    "a library's method": _set(nn.Linear, "forward", lambda _, x: x + 1),
    "a global of the loss": _set(sys.modules[__name__], "FACTOR", 3.0),
    "attention put into torch": _set(nn.functional, "softmax", loss),
    "a method put into tensors": _set(torch.Tensor, "mine", loss),
    "a flag on the loss": _set(loss, "flag", 1),
    "our own sources": _set(trace_key, "package_hash", lambda: "other"),
}


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_what_surrounds_the_process_counts(
    change: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = net_subject()
    before = key(workload)
    put_back = change(monkeypatch)
    try:
        assert key(workload) != before
    finally:
        if put_back is not None:
            put_back()
    monkeypatch.undo()


def test_attention_of_transformers_and_replaced_helpers_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def workload() -> Workload:
        example = EXAMPLES["llama"]
        return Workload(model=example.model(), batch=example.batch, gpu=find_gpu("t4"))

    eager = workload()
    eager.model.set_attn_implementation("eager")
    assert key(workload()) != key(eager)
    wider = workload()
    wider.model.config.rms_norm_eps = 0.5
    assert key(workload()) != key(wider)
    before = key(workload())
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", loss)
    assert key(workload()) != before


def test_a_helper_in_another_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(helper: str) -> str:
        folder = tmp_path / "mypackage"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("")
        (folder / "helper.py").write_text(helper)
        (folder / "net.py").write_text(
            "from torch import nn\n"
            "from mypackage import helper\n"
            "class Net(nn.Linear):\n"
            "    def forward(self, x):\n"
            "        return helper.double(super().forward(x))\n"
        )
        for name in [name for name in sys.modules if name.startswith("mypackage")]:
            del sys.modules[name]
        net = importlib.import_module("mypackage.net")
        return key(
            Workload(model=net.Net(2, 2), batch=torch.zeros(2, 2), gpu=find_gpu("t4"))
        )

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    twice = "def double(x):\n    return x * 2\n"
    assert built(twice) == built(twice)
    assert built(twice) != built("def double(x):\n    return x * 3 + x\n")


class Slotted:
    """Keeps something where Python cannot look."""

    def __init__(self) -> None:
        self.generator = torch.Generator()


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a forward hook": (lambda m: m.first.register_forward_hook(print), "forward_hooks"),
    "a hook before it": (
        lambda m: m.first.register_forward_pre_hook(print),
        "forward_pre_hooks",
    ),
    "a backward hook": (
        lambda m: m.first.register_full_backward_hook(print),
        "backward_hooks",
    ),
    "a parameter's hook": (lambda m: m.first.weight.register_hook(print), "hooks"),
    "an accumulation hook": (
        lambda m: m.first.weight.register_post_accumulate_grad_hook(print),
        "hooks",
    ),
    "an object of C": (lambda m: setattr(m, "x", torch.Generator()), "Generator"),
    "one within another": (lambda m: setattr(m, "x", Slotted()), "Generator"),
    "a tensor subclass": (
        lambda m: setattr(
            m, "x", torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {}))
        ),
        "Own",
    ),
}


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_told_is_not_cached(
    change: Callable[[Any], object], why: str
) -> None:
    workload = net_subject()
    change(workload.model)
    assert cache_key(workload, PROGRAM) is None
    assert why in why_not_cacheable(workload)


@pytest.fixture
def everywhere() -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    hook.remove()


@pytest.mark.usefixtures("everywhere")
def test_hooks_of_all_modules_are_seen() -> None:
    assert workload_key(net_subject()) is None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "room" / "file.py").write_text("x = 1")
    (tmp_path / "cards.toml").write_text("")
    own = tmp_path / "traces" / "cache" / "package_hash.py"
    monkeypatch.setattr(own_sources, "__file__", str(own))
    return tmp_path


@pytest.mark.parametrize("name", ["room/file.py", "cards.toml"])
def test_our_own_sources_count(
    package: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_sources, "_STARTED_S", float("inf"))
    before = OWN_SOURCES()
    assert OWN_SOURCES() == before
    (package / name).write_text("x = 2")
    assert OWN_SOURCES() != before


@pytest.mark.usefixtures("package")
def test_sources_edited_while_the_process_runs_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_key, "package_hash", OWN_SOURCES)
    monkeypatch.setattr(own_sources, "_STARTED_S", 0.0)
    assert workload_key(net_subject()) is None
    assert "just changed" in why_not_cacheable(net_subject())


def test_asking_changes_nothing() -> None:
    workload = net_subject()
    before = {
        name: value.clone() for name, value in workload.model.state_dict().items()
    }
    attributes = [sorted(vars(module)) for module in workload.model.modules()]
    key(workload)
    assert attributes == [sorted(vars(module)) for module in workload.model.modules()]
    for name, value in workload.model.state_dict().items():
        assert value.equal(before[name])


def test_torch_compile_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wraps methods of nn.Module, and leaves what it compiled in a model's file."""
    example = EXAMPLES["llama"]
    workload = Workload(model=example.model(), batch=example.batch, gpu=find_gpu("t4"))
    before = workload_key(workload)
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    install_generation_tagging_init()
    assert nn.Module.__init__.__module__ == install_generation_tagging_init.__module__
    monkeypatch.setattr(
        modeling_llama, "__compiled_fn_1_a", lambda: None, raising=False
    )
    assert before is not None
    assert workload_key(workload) == before

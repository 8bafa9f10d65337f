"""Blocks under torch.compile: inductor's code for a GPU on fake tensors."""

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import budgetfit
from budgetfit.core.recipe import Recipe, Segment
from budgetfit.core.step_trace import StepTrace
from budgetfit.errors import InputError, TraceError
from budgetfit.gpus.table import find_gpu
from budgetfit.traces import tracer
from budgetfit.traces.session import TraceSession
from budgetfit.traces.tracer import COMPILED_BATCH_SIZES
from budgetfit.tracing.compiled import cuda_backend
from budgetfit.tracing.compiled.compiled_blocks import CompiledBlocks
from budgetfit.tracing.compiled.cuda_backend import CHECKED_TORCH, check_supported
from budgetfit.tracing.compiled.decompositions import cuda_decompositions
from budgetfit.tracing.compiled.fused_kernel import FusedKernel
from budgetfit.tracing.compiled.generated_code import module_on_fakes
from budgetfit.tracing.compiled.inductor_answers import answers_for_inductor
from budgetfit.tracing.cuda.target import CudaTarget, installed_torch_version
from budgetfit.tracing.recording.batch_scaling import NotAffineError
from budgetfit.workload.workload import Workload

WIDTH, DEPTH, SAMPLES = 1024, 3, 64
TARGET = CudaTarget(
    compute_capability=(8, 9), torch_version=(2, 13), sm_count=128, threads_per_sm=1536
)
supported = pytest.mark.skipif(
    installed_torch_version() not in CHECKED_TORCH or sys.platform != "linux",
    reason="compiled blocks are predicted for other versions of torch",
)


class Pointwise(nn.Module):
    """Four ops that each save a tensor where they run one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sigmoid(torch.exp(x * self.scale)))


class Tower(nn.Module):
    """Pointwise blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pointwise() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def session(model: nn.Module | None = None, gpu: str = "rtx-4090") -> TraceSession:
    workload = Workload(
        model=model or Tower(),
        batch={"x": torch.ones(2, WIDTH)},
        loss=lambda outputs, _: outputs,
        gpu=find_gpu(gpu),
    )
    return TraceSession(workload.with_found_blocks())


def recipe(**changes: Any) -> Recipe:
    return replace(
        Recipe(batch_size=SAMPLES, optimizer="sgd", compile="blocks"), **changes
    )


def saved_bytes(trace: StepTrace) -> int:
    """Bytes that are live at the end of the first forward and not before it."""
    phase = next(each for each in trace.phases if each.name == "forward")
    live = 0
    for event in trace.events[phase.start : phase.end].tolist():
        size = int(trace.fixed_bytes[abs(event) - 1])
        live += size if event > 0 else -size
    return live


@supported
def test_a_compiled_block_saves_its_input_and_computes_the_rest_again() -> None:
    traces = session()
    eager = traces.tracer.trace(traces._program(recipe(compile="none")), SAMPLES)
    assert eager.log.sizes.count(SAMPLES * WIDTH * 4) >= 4 * DEPTH
    compiled = traces.exact(recipe())
    tensor = SAMPLES * WIDTH * 4
    # x, the two inputs between blocks, and the output; not three more in each block.
    assert saved_bytes(compiled) < (DEPTH + 2) * tensor
    assert saved_bytes(session().exact(recipe(compile="none"))) > 3 * DEPTH * tensor


@supported
def test_recomputed_blocks_are_compiled_inside_their_checkpoint() -> None:
    names = tuple(f"blocks.{n}" for n in range(DEPTH))
    alone = tuple(Segment((name,)) for name in names)
    traces = session()
    for segments in (alone, (Segment(names[:2]),), (Segment((names[1],), "offload"),)):
        trace = traces.exact(recipe(segments=segments))
        assert "budgetfit.fused_kernel.default" in trace.op_names
        assert "aten.sigmoid.default" not in trace.op_names


@supported
def test_blocks_under_selective_checkpointing_run_eagerly() -> None:
    kept = Segment(("blocks.1",), "selective", saved_ops=("aten.sigmoid.default:0",))
    names = session().exact(recipe(segments=(kept,))).op_names
    assert {"aten.sigmoid.default", "budgetfit.fused_kernel.default"} <= set(names)


@supported
def test_a_fused_kernel_moves_the_bytes_of_its_tensors_once() -> None:
    trace = session().exact(recipe())
    fused = trace.op_names.index("budgetfit.fused_kernel.default")
    least = trace.ops.bytes_fixed[trace.ops.name == fused].min()
    assert 2 * SAMPLES * WIDTH * 4 <= least <= 3 * SAMPLES * WIDTH * 4


def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of all code that is generated from here on."""
    made: list[str] = []

    def noting(code: str, on_call: Any) -> Any:
        made.append(code)
        return module_on_fakes(code, on_call)

    monkeypatch.setattr(cuda_backend, "module_on_fakes", noting)
    return made


@supported
def test_generated_code_is_made_once_for_equal_blocks_and_later_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracer, "SLOW_SECONDS", 0.0)
    made, said = generated(monkeypatch), list[str]()
    traces = session()
    traces.tracer.progress = said.append
    traces.exact(recipe())
    # Forward and backward; the first block's input needs no gradient.
    assert len(made) == 4
    traces.exact(recipe(segments=(Segment(("blocks.0",)),)))
    assert len(made) == 4
    traces.exact(recipe(batch_size=SAMPLES // 2))
    assert len(made) == 8
    assert said[-1].endswith(": torch.compile generates code for each batch size")


@supported
def test_a_compiled_model_recomputes_what_is_tagged_and_fuses_across_blocks() -> None:
    tensor = SAMPLES * WIDTH * 4
    model = recipe(compile="model")
    kept = session().exact(model)
    assert saved_bytes(kept) < saved_bytes(session().exact(recipe())) + tensor
    launches = [
        sum(name == "budgetfit.fused_kernel.default" for name in named(trace))
        for trace in (kept, session().exact(recipe()))
    ]
    assert launches[0] < launches[1]
    names = tuple(f"blocks.{n}" for n in range(DEPTH))
    alone = tuple(Segment((name,)) for name in names)
    tagged = session(Drops()).exact(replace(model, segments=alone))
    free = session(Drops()).exact(model)
    assert saved_bytes(tagged) < saved_bytes(free)


class Drops(Tower):
    """Products of matrices and random numbers: what is not recomputed untold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())
            for _ in range(DEPTH)
        )


def named(trace: StepTrace) -> list[str]:
    """Names of the ops of a trace, in order."""
    return [trace.op_names[number] for number in trace.ops.name.tolist()]


class Counts(Tower):
    """Changes an attribute that its forward reads."""

    def __init__(self, *, until: int) -> None:
        super().__init__()
        self.calls, self.until = 0, until

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = min(self.calls + 1, self.until)
        return super().forward(x) * self.calls


@supported
def test_a_model_that_its_first_call_changes_is_compiled_as_its_later_calls() -> None:
    names = session(Counts(until=2)).exact(recipe(compile="model")).op_names
    assert "budgetfit.fused_kernel.default" in names
    with pytest.raises(InputError, match=r"compiles Counts\.forward again in"):
        session(Counts(until=9)).exact(recipe(compile="model"))


@supported
def test_a_model_that_only_its_first_call_changes_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = generated(monkeypatch)
    session(Counts(until=1)).exact(recipe(compile="model", precision="bf16-mixed"))
    assert len(made) == 2  # forward and backward


class Collecting(Pointwise):
    """A block that adds its input to a list."""

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        seen.append(x)
        return super().forward(x)


class Collector(Tower):
    """Counts what its blocks have added."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collecting() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        assert len(seen) == DEPTH
        return x.sum()


@supported
def test_what_a_block_adds_to_a_list_is_added_once() -> None:
    """The calls that compile are given lists of their own."""
    names = session(Collector()).exact(recipe()).op_names
    assert "budgetfit.fused_kernel.default" in names


@supported
def test_breaks_of_the_graph_are_counted_and_said() -> None:
    class Broken(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            return self.blocks[1](x).sum()

    trace = session(Broken()).exact(recipe(compile="model"))
    (note,) = [each for each in trace.notes if "graphs of" in each]
    assert note.startswith("torch.compile makes 2 graphs of Broken.forward: ")


@supported
def test_another_number_of_multiprocessors_is_another_trace() -> None:
    one, other = session(), session(gpu="rtx-4060")
    assert one.workload.target == other.workload.target
    assert one._program(recipe()) != other._program(recipe())
    eager = recipe(compile="none")
    assert one._program(eager) == other._program(eager)


@supported
def test_what_a_user_has_compiled_stays_compiled_and_nothing_is_left_behind() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def noting(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Tower()
    block = model.blocks[0]
    compiled = torch.compile(block.forward, backend=noting)
    x = torch.ones(2, WIDTH)
    compiled(x)
    assert len(graphs) == 1
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    before = len(entries(Pointwise.forward.__code__))
    session(model).exact(recipe())
    assert len(entries(Pointwise.forward.__code__)) == before
    compiled(x)
    assert len(graphs) == 1
    assert all("forward" not in vars(each) for each in model.modules())


def scaled(kind: type[nn.Module]) -> type[nn.Module]:
    """Decorate the forward of a class, as transformers does with its layers."""
    forward: Any = kind.forward

    def twice(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return 2 * forward(self, x)

    kind.forward = twice
    return kind


@scaled
class Scaled(Pointwise):
    """Without a product of matrices."""


@scaled
class Product(nn.Module):
    """With one; its forward has the same code object as that of Scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@supported
def test_classes_with_the_same_decorator_run_each_their_own_forward() -> None:
    model = Tower()
    model.blocks[0], model.blocks[1] = Scaled(), Product()
    traces = session(model)
    traces.tracer.workload = replace(
        traces.workload, blocks=tuple(f"blocks.{n}" for n in range(DEPTH))
    )
    names = traces.exact(recipe()).op_names
    assert any("mm" in name for name in names)


class Fails(Pointwise):
    """Fails while it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(-1, 7, 11)


@supported
def test_torch_is_as_before_after_an_error() -> None:
    names = ("is_available", "synchronize", "get_device_properties", "_DeviceGuard")
    before = [getattr(torch.cuda, name) for name in names], torch.version.cuda
    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit
    model = Tower()
    model.blocks[1] = Fails()
    with pytest.raises(TraceError, match=r"reshape|invalid|shape"):
        session(model).exact(recipe())
    with answers_for_inductor(
        TARGET, uniform=False, partition=lambda *_: None, module=lambda _: None
    ):
        assert torch.cuda.is_available()
    after = [getattr(torch.cuda, name) for name in names], torch.version.cuda
    assert before == after
    assert (config.recompile_limit, config.accumulated_recompile_limit) == limits


@supported
def test_inductor_logs_no_error_that_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    kernels = importlib.import_module("torch._inductor.codegen.triton").TritonKernel
    monkeypatch.setattr(kernels, "store", Mock(side_effect=NotImplementedError))
    log = logging.getLogger("torch._inductor.scheduler")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda each: said.append(each.getMessage()))
    log.addHandler(handler)
    try:
        with pytest.raises(TraceError):
            session(Tower()).exact(recipe())
    finally:
        log.removeHandler(handler)
    assert not said


@supported
def test_inductor_sees_the_gpu_of_each_plan_and_of_none_afterwards() -> None:
    properties = importlib.import_module("torch._inductor.runtime.hints")
    known = properties.DeviceProperties.create
    for sm_count in (128, 40):
        with answers_for_inductor(
            replace(TARGET, sm_count=sm_count),
            uniform=False,
            partition=lambda *_: None,
            module=lambda _: None,
        ):
            assert known(torch.device("cuda", 0)).multi_processor_count == sm_count
    assert known.cache_info().currsize == 0


@supported
def test_training_compiles_in_the_process_of_a_plan() -> None:
    session(Tower()).exact(recipe())
    # Makes tables of patterns, and refuses to make them twice.
    importlib.import_module("torch._inductor.fx_passes.post_grad").lazy_init()


@supported
def test_a_block_that_cannot_be_compiled_is_an_error() -> None:
    class Eager(Pointwise):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = Tower()
    model.blocks[1] = Eager()
    traces = session(model)
    traces.tracer.workload = replace(
        traces.workload, blocks=tuple(f"blocks.{n}" for n in range(DEPTH))
    )
    with pytest.raises(InputError, match=r"runs Eager\.forward eagerly"):
        traces.exact(recipe())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (replace(TARGET, torch_version=(2, 9)), "predicted for torch 2.13, and this"),
        (replace(TARGET, compute_capability=(6, 1)), "capability 7.0; this GPU has"),
    ],
)
def test_what_was_not_compared_is_refused(target: CudaTarget, words: str) -> None:
    if target.torch_version in CHECKED_TORCH != installed_torch_version():
        target = replace(target, torch_version=installed_torch_version())
    with pytest.raises(InputError, match=words):
        check_supported(target)


def test_a_trace_of_the_cpu_is_refused() -> None:
    with pytest.raises(InputError, match="planned and verified for CUDA"):
        CompiledBlocks(None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.ops.budgetfit.fused_kernel,
        "default",
        lambda inputs, outputs: calls.append((inputs, outputs)),
    )
    return calls


def test_a_kernel_reads_and_writes_what_its_parameters_are_named_for(
    launched: list[Any],
) -> None:
    source = "import x\n\ndef triton_(in_ptr0, in_out_ptr0, out_ptr1, n, X : tl.c):\n"
    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    FusedKernel(source).run(a, b, c, 5, stream=0)
    ((inputs, outputs),) = launched
    assert [each.numel() for each in inputs] == [1, 2]
    assert [each.numel() for each in outputs] == [2, 3]


def test_autograd_does_not_see_what_a_kernel_writes() -> None:
    """As on the GPU: a saved tensor that a kernel wrote to is no error there."""
    with FakeTensorMode():
        written = torch.empty(4)
        FusedKernel("def triton_poi(out_ptr0, xnumel):").run(written, 4)
        assert written._version == 0


def test_generated_code_runs_on_the_cpu_and_is_counted() -> None:
    code = """
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
from torch._inductor.async_compile import AsyncCompile
import torch
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        made = empty_strided_cuda((4, 2), (2, 1), torch.float32)
        part = made[1:]
        return made, reinterpret_tensor(part, (2,), (1,), 2)
"""
    runs: list[int] = []
    made, view = module_on_fakes(code, lambda: runs.append(1)).call([])
    assert made.device.type == "cpu"
    assert runs == [1]
    assert view.storage_offset() == 4  # from the view's own start


def test_a_call_that_compiles_again_makes_outputs_alike_without_kernels() -> None:
    code = """
import torch
ran = []
def call(args):
    kept, other = args
    args.clear()
    ran.append(1)
    return torch.ones(2, 3).T, kept, None
"""
    module = module_on_fakes(code, lambda: True)
    first, second = ([torch.ones(1), torch.ones(2)] for _ in range(2))
    module.call([*first])
    given = [*second]
    made, kept, nothing = module.call(given)
    assert (made.shape, made.stride()) == ((3, 2), (1, 3))
    assert kept is second[0]
    assert nothing is None
    assert given == []  # the code frees its inputs
    assert module.ran == [1]


@pytest.mark.filterwarnings("ignore")  # torch's, of its own deprecated functions
def test_what_is_imported_while_code_is_generated_stays_imported() -> None:
    """A second class of one name fails inductor's checks of its schedulers."""
    sys.modules.pop("colorsys", None)
    with answers_for_inductor(
        TARGET, uniform=False, partition=lambda *_: None, module=lambda _: None
    ):
        importlib.import_module("colorsys")
    assert "colorsys" in sys.modules


def test_batch_sizes_are_traced_in_pairs_until_one_is_affine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces = session()
    tried: list[tuple[int, int]] = []
    first, second, *_ = COMPILED_BATCH_SIZES

    def trace_at(_: object, sizes: tuple[int, int]) -> object:
        tried.append(sizes)
        if sizes == first:
            raise NotAffineError("other kernels")
        return sizes

    monkeypatch.setattr(traces, "_trace_affine_at", trace_at)
    program = traces._program(recipe())
    assert traces._trace_affine(program) == second
    assert traces._trace_affine(program._replace(accumulates=True)) == second
    assert tried == [first, second, second]
    assert any("other kernels" in line for line in traces.log)


@pytest.mark.filterwarnings("ignore")  # torch's, of its own deprecated functions
def test_norms_of_16_bit_tensors_save_statistics_in_fp32_as_on_cuda() -> None:
    table = cuda_decompositions()
    x = torch.randn(4, 6, 8).bfloat16()
    scale, shift = torch.randn(2, 8).bfloat16()
    layer_norm = table[torch.ops.aten.native_layer_norm.default]
    out, mean, rstd = layer_norm(x, [8], scale, shift, 1e-5)
    assert (out.dtype, mean.dtype, rstd.dtype) == (
        *(torch.bfloat16, torch.float32, torch.float32),
    )
    expected = nn.functional.layer_norm(x, [8], scale, shift)
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
    batch_norm = table[torch.ops.aten._native_batch_norm_legit.no_stats]
    found = batch_norm(x, None, None, True, 0.1, 1e-5)
    assert [each.dtype for each in found] == [
        *(torch.bfloat16, torch.float32, torch.float32)
    ]


class ForCuda(nn.Module):
    """What torch decomposes for CUDA alone, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty_like(x).bernoulli_(0.9)
        chosen = self.idle(x).detach()
        x = torch.cumsum(x.masked_scatter(x > 0, chosen) * mask, -1)
        return x * nn.functional.logsigmoid(self.gate(x))


@supported
def test_ops_are_decomposed_and_generated_as_for_cuda() -> None:
    model = Tower()
    model.blocks = nn.ModuleList(ForCuda() for _ in range(DEPTH))
    names = session(model).exact(recipe()).op_names
    assert "budgetfit.fused_kernel.default" in names
    assert not {"aten.masked_scatter.default", "aten.bernoulli.p"} & set(names)


@pytest.mark.filterwarnings("ignore")  # torch's, of its own deprecated functions
def test_products_of_a_column_by_a_row_are_pointwise_as_on_cuda() -> None:
    aten, table = torch.ops.aten, cuda_decompositions()
    column, row, bias = torch.randn(4, 1), torch.randn(1, 3), torch.randn(3)
    expected = column @ row
    torch.testing.assert_close(table[aten.mm.default](column, row), expected)
    batched = table[aten.bmm.default](column[None], row[None])
    torch.testing.assert_close(batched, expected[None])
    scaled = table[aten.addmm.default](bias, column, row, beta=2, alpha=3)
    torch.testing.assert_close(scaled, 3 * expected + 2 * bias)
    for op in (aten.mm.default, aten.addmm.default):
        added = () if op is aten.mm.default else (torch.randn(1),)
        assert table[op](*added, row, row.T) is NotImplemented


@pytest.mark.parametrize("cudnn", [True, False])
def test_inductor_sees_the_layouts_of_convolutions_of_the_planned_gpu(
    cudnn: bool,
) -> None:
    target = replace(TARGET, cudnn=cudnn)
    with answers_for_inductor(
        target, uniform=False, partition=lambda *_: None, module=lambda _: None
    ):
        found = torch._C._conv_determine_backend_memory_format(
            torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last),
            torch.empty(8, 8, 3, 3),
            torch._C._ConvBackend.Cudnn,
        )
    assert found == (torch.channels_last if cudnn else torch.contiguous_format)


def test_batches_of_several_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="planned for batches of one size"):
        budgetfit.plan(
            Tower(),
            "24GB",
            batch={"x": torch.ones(2, WIDTH)},
            lengths=[512, WIDTH],
            compile="blocks",
        )


def test_compile_is_one_of_its_modes() -> None:
    with pytest.raises(InputError, match="must be one of: none, blocks, model; got"):
        Recipe(batch_size=1, compile="all")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="compile must be one of"):
        budgetfit.plan(Tower(), "24GB", compile="max-autotune")


@supported
def test_other_loops_are_refused() -> None:
    with pytest.raises(InputError, match=r"predicted without torch\.compile"):
        budgetfit.estimate(
            Tower(),
            recipe(),
            loop="plain",
            gpu="rtx-4090",
            batch={"x": torch.ones(2, WIDTH)},
            loss=lambda outputs, _: outputs,
        )

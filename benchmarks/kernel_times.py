"""Times of single ops on a card, and the shares of its rates that they ask for.

    python -m benchmarks.kernel_times --record FILE     # on a card
    python -m benchmarks.kernel_times                   # what an H100's ask for

Each is run for some 20 milliseconds, three times; the median counts. What is timed are
the ops of training steps at the sizes of training steps, one by one and alone. Where
they are recorded, nothing of budgetfit is needed.
"""

import argparse
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as torch has it
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], Any]
Case = tuple[str, Callable[[str], Call]]  # on a device
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RECORDED: Final = Path(__file__).parent / "card_recordings" / "h100-kernels.jsonl"
SMALL_MODULES: Final = "300 small modules"
PRODUCTS: Final = (
    *((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)),
    *((24576, 768, 768), (24576, 3072, 768), (24576, 768, 3072), (24576, 2304, 768)),
    *((24576, 50257, 768), (24576, 50304, 768), (768, 50304, 24576)),
    *((16384, 4096, 4096), (16384, 14336, 4096), (2048, 2048, 8192), (512, 4096, 4096)),
)
MOST_FP32: Final = 4e11  # products of larger ones take too long
LONGEST_FP32: Final = 4096  # tokens
IMAGES: Final = 4  # dimensions
ATTENTION: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def products() -> Iterator[Case]:
    """Matrix products, by rows, columns and the inner dimension."""
    for name in ("bf16", "fp16", "fp32", "tf32"):
        for m, n, k in PRODUCTS:
            if name not in ("fp32", "tf32") or m * n * k <= MOST_FP32:
                yield f"mm {name} {m}x{n}x{k}", partial(_product, (m, k), (n, k), name)
    for name, m, n, k in (
        ("bf16", 1024, 1024, 64),
        ("bf16", 1024, 64, 1024),
        ("fp32", 1024, 1024, 64),
    ):
        shapes = (288, m, k), (288, n, k)
        yield f"bmm {name} 288x{m}x{n}x{k}", partial(_product, *shapes, name)


def _product(
    rows: tuple[int, ...], columns: tuple[int, ...], name: str, device: str
) -> Call:
    dtype = DTYPES.get(name, torch.float32)
    one = torch.randn(rows, device=device, dtype=dtype)
    other = torch.randn(columns, device=device, dtype=dtype).mT

    def call() -> None:
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        torch.matmul(one, other)

    return call


def passes(
    name: str,
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: str,
    layout: torch.memory_format = torch.contiguous_format,
) -> Iterator[Case]:
    """A function's forward pass, and its backward pass for all inputs.

    Images, inputs of three channels, need no gradient.
    """

    def inputs(device: str) -> list[torch.Tensor]:
        made = [torch.randn(shape, device=device) for shape in shapes]
        return [
            tensor.to(
                DTYPES[dtype], memory_format=layout if tensor.dim() == IMAGES else None
            )
            .detach()
            .requires_grad_()
            for tensor in made
        ]

    def forward(device: str) -> Call:
        given = [tensor.detach() for tensor in inputs(device)]
        return lambda: function(*given)

    def backward(device: str) -> Call:
        given = inputs(device)
        out = function(*given)
        gradient = torch.randn_like(out)
        asked = given[1:] if given[0].shape[1:2] == (3,) else given
        return lambda: torch.autograd.grad(out, asked, gradient, retain_graph=True)

    what = f"{dtype} {'x'.join(map(str, shapes[0]))}"
    yield f"{name} {what}", forward
    yield f"{name} backward {what}", backward


def pointwise() -> Iterator[Case]:
    """Elementwise ops, copies, reductions, softmax, norms, loss."""
    wide, tall = (24576, 3072), (24576, 768)
    for dtype in ("bf16", "fp32"):
        yield from passes("add", torch.add, wide, wide, dtype=dtype)
        yield from passes("mul", torch.mul, wide, wide, dtype=dtype)
        yield from passes("gelu", F.gelu, wide, dtype=dtype)
        yield from passes("silu", F.silu, wide, dtype=dtype)
        yield from passes("relu", F.relu, wide, dtype=dtype)
        yield from passes("dropout", lambda x: F.dropout(x, 0.1), wide, dtype=dtype)
        yield from passes(
            "softmax", lambda x: x.softmax(-1), (288, 1024, 1024), dtype=dtype
        )
        yield from passes("sum rows", lambda x: x.sum(0), wide, dtype=dtype)
        yield from passes("sum columns", lambda x: x.sum(-1), wide, dtype=dtype)
        yield from passes("mean square", lambda x: x.pow(2).mean(-1), tall, dtype=dtype)
        for shape in (tall, (16384, 4096)):
            yield from passes(
                "layer_norm",
                lambda x, w, b: F.layer_norm(x, w.shape, w, b),
                *(shape, shape[1:], shape[1:]),
                dtype=dtype,
            )
            yield from passes(
                "rms_norm",
                lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
                *(shape, shape[1:]),
                dtype=dtype,
            )
        yield from passes(
            "transpose",
            lambda x: x.transpose(1, 2).contiguous(),
            (24, 1024, 12, 64),
            dtype=dtype,
        )
        yield from passes(
            "concatenate", lambda x, y: torch.cat([x, y], -1), tall, tall, dtype=dtype
        )
        yield from passes(
            "embedding",
            lambda w: F.embedding(_ids(w, 24576), w),
            (50304, 768),
            dtype=dtype,
        )
    yield from passes("to fp32", lambda x: x.float(), wide, dtype="bf16")
    yield from passes("to bf16", lambda x: x.bfloat16(), wide, dtype="fp32")
    yield from passes(
        "cross_entropy",
        lambda x: F.cross_entropy(x, _ids(x, 8192)),
        (8192, 50257),
        dtype="fp32",
    )


_TARGETS: dict[tuple[str, int], torch.Tensor] = {}


def _ids(like: torch.Tensor, count: int) -> torch.Tensor:
    key = (str(like.device), count)
    if key not in _TARGETS:
        _TARGETS[key] = torch.randint(50257, (count,), device=like.device)
    return _TARGETS[key]


def attention() -> Iterator[Case]:
    """Scaled dot product attention, by library."""
    sizes = (
        *(
            (24, 12, 1024, 64, True),
            (48, 12, 512, 64, False),
            (192, 12, 197, 64, False),
        ),
        *((8, 32, 2048, 64, True), (2, 32, 4096, 128, True), (1, 32, 16384, 128, True)),
        (1, 16, 8192, 128, False),
    )
    for library in ATTENTION:
        for dtype in ("bf16", "fp32") if library == "efficient" else ("bf16",):
            for *shape, causal in sizes:
                if dtype == "fp32" and shape[2] > LONGEST_FP32:
                    continue
                name = f"{library} attention{' causal' if causal else ''}"
                run = partial(_attention, ATTENTION[library], causal)
                yield from passes(name, run, *[tuple(shape)] * 3, dtype=dtype)


def _attention(backend: SDPBackend, causal: bool, *heads: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*heads, is_causal=causal)


class Convolution(NamedTuple):
    """Samples, channels, side of the image, filters, kernel size, stride, groups."""

    samples: int
    channels: int
    side: int
    filters: int
    kernel: int
    stride: int = 1
    groups: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the images and of the filters."""
        image = self.samples, self.channels, self.side, self.side
        filters = self.filters, self.channels // self.groups, self.kernel, self.kernel
        return image, filters

    def __call__(self, images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
        """Convolve; patches that do not overlap have no padding."""
        padding = 0 if self.kernel == self.stride else self.kernel // 2
        rest = self.stride, padding, 1, self.groups
        return F.conv2d(images, filters, None, *rest)


CONVOLUTIONS: Final = (
    *(Convolution(128, 64, 56, 64, 3), Convolution(128, 256, 56, 64, 1)),
    *(Convolution(128, 64, 56, 256, 1), Convolution(128, 128, 28, 128, 3)),
    *(Convolution(128, 256, 14, 256, 3), Convolution(128, 512, 7, 2048, 1)),
    *(Convolution(128, 3, 224, 64, 7, 2), Convolution(128, 96, 56, 96, 7, 1, 96)),
    *(Convolution(128, 384, 14, 384, 7, 1, 384), Convolution(128, 128, 28, 128, 3, 2)),
    *(Convolution(192, 3, 224, 768, 16, 16), Convolution(16, 320, 64, 320, 3)),
    Convolution(128, 256, 14, 256, 3, 1, 32),
)
BATCH_NORMS: Final = ((128, 64, 56, 56), (128, 256, 56, 56), (128, 1024, 14, 14))
FEW: Final = 256  # channels whose thread blocks all run at once
LAYOUTS: Final = {"": torch.contiguous_format, " channels_last": torch.channels_last}


def convolutions() -> Iterator[Case]:
    """Convolutions of ResNet, ConvNeXt, ViT and a diffusion network, norms, pooling."""
    for dtype in ("bf16", "fp32"):
        for last, layout in LAYOUTS.items():
            for row in CONVOLUTIONS:
                filters = f"{row.filters} {row.kernel}x{row.kernel}"
                yield from passes(
                    f"conv{last} {filters} s{row.stride} g{row.groups}",
                    row,
                    *row.shapes,
                    dtype=dtype,
                    layout=layout,
                )
            for shape in BATCH_NORMS:
                yield from passes(
                    f"batch_norm{last}",
                    lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
                    *(shape, shape[1:2], shape[1:2]),
                    dtype=dtype,
                    layout=layout,
                )
        yield from passes(
            "max_pool",
            lambda x: F.max_pool2d(x, 3, 2, 1),
            (128, 64, 112, 112),
            dtype=dtype,
        )
        yield from passes(
            "group_norm",
            lambda x, w, b: F.group_norm(x, 32, w, b),
            *((16, 320, 64, 64), (320,), (320,)),
            dtype=dtype,
        )


def optimizers() -> Iterator[Case]:
    """Steps of 100 tensors of 1.2 million values each, and clipping."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
        "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "SGD momentum foreach": lambda p: torch.optim.SGD(
            p, momentum=0.9, foreach=True
        ),
        "SGD momentum fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    }
    for dtype in ("fp32", "bf16"):
        for name, kind in kinds.items():

            def make(
                device: str,
                kind: Callable[..., torch.optim.Optimizer] = kind,
                dtype: str = dtype,
            ) -> Call:
                weights = _weights(device, dtype)
                return kind(weights).step

            yield f"{name} {dtype} 100 x 1228800", make

        def clip(device: str, dtype: str = dtype) -> Call:
            weights = _weights(device, dtype)
            return lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0)

        yield f"clip_grad_norm {dtype} 100 x 1228800", clip


def _weights(device: str, dtype: str) -> list[torch.Tensor]:
    weights = [
        torch.randn(1228800, device=device, dtype=DTYPES[dtype], requires_grad=True)
        for _ in range(100)
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight) * 1e-3
    return weights


def host() -> Iterator[Case]:
    """Copies between host and card, and what launching many small kernels takes."""
    size = 2**28
    for pinned in (True, False):
        for to_card in (True, False):

            def make(
                device: str, pinned: bool = pinned, to_card: bool = to_card
            ) -> Call:
                on_host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                on_card = torch.empty(size, dtype=torch.uint8, device=device)
                a, b = (on_card, on_host) if to_card else (on_host, on_card)
                return lambda: a.copy_(b, non_blocking=pinned)

            where = "to the card" if to_card else "to the host"
            yield f"copy {'pinned' if pinned else 'pageable'} {where} {size}", make

    def adds(device: str) -> Call:
        x = torch.zeros(64, device=device)
        return lambda: [x.add(1) for _ in range(1000)]

    yield "1000 small additions", adds
    yield f"{SMALL_MODULES}, forward", partial(_modules, False)
    yield f"{SMALL_MODULES}, forward and backward", partial(_modules, True)


def _modules(backward: bool, device: str) -> Call:
    """Layers that take less time than Python needs to launch them."""
    layers = (
        (torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU())
        for _ in range(100)
    )
    net = torch.nn.Sequential(*itertools.chain.from_iterable(layers)).to(device)
    x = torch.zeros(4, 64, device=device)

    def call() -> None:
        net.zero_grad()
        out = net(x)
        if backward:
            out.sum().backward()

    return call


def quantised() -> Iterator[Case]:
    """Weights of bitsandbytes, unpacked and multiplied."""
    import bitsandbytes as bnb

    for stored in ("nf4", "int8"):
        for tokens in (512, 4096, 16384):

            def make(device: str, stored: str = stored, tokens: int = tokens) -> Call:
                if stored == "nf4":
                    layer = bnb.nn.Linear4bit(
                        4096,
                        4096,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        compress_statistics=True,
                        quant_type="nf4",
                    )
                else:
                    layer = bnb.nn.Linear8bitLt(
                        4096, 4096, bias=False, has_fp16_weights=False
                    )
                layer = layer.to(device)
                x = torch.randn(
                    tokens,
                    4096,
                    device=device,
                    dtype=torch.bfloat16,
                    requires_grad=True,
                )
                gradient = torch.randn(
                    tokens, 4096, device=device, dtype=torch.bfloat16
                )

                def call() -> None:
                    torch.autograd.grad(layer(x), x, gradient)

                return call

            yield f"{stored} linear forward and backward, {tokens} x 4096 x 4096", make

    def unpack(device: str) -> Call:
        weight = torch.randn(14336, 4096, device=device, dtype=torch.bfloat16)
        packed, state = bnb.functional.quantize_4bit(
            weight, quant_type="nf4", compress_statistics=True
        )
        return lambda: bnb.functional.dequantize_4bit(packed, state)

    yield "nf4 unpack 14336 x 4096", unpack


def microseconds(call: Call) -> tuple[float, int]:
    """The median of three rounds of about 20 ms, and the calls of a round."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def took(times: int) -> float:
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / times

    times = max(1, min(500, round(20_000 / max(took(2), 1.0))))
    return statistics.median(took(times) for _ in range(3)), times


def sustained(seconds: float) -> list[dict[str, Any]]:
    """Large bf16 products without a pause: their rate, clock and power over time."""
    a, b = (
        torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    rows, started = [], time.perf_counter()
    while time.perf_counter() - started < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(200):
            torch.mm(a, b)
        end.record()
        state = query()
        end.synchronize()
        rows.append(
            {
                "tflops": round(200 * 2 * 8192**3 / begin.elapsed_time(end) / 1e9, 1),
                **state,
            }
        )
    return rows


def query() -> dict[str, str]:
    """Clocks, power and temperature as nvidia-smi reads them now."""
    names = (
        "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
    )
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(zip(names.split(","), done.stdout.strip().split(", "), strict=False))


def ratios(recorded: dict[str, float]) -> dict[str, float]:
    """What the table of shares and its constants are set by, of recorded ops.

    A product's share is that which misses the product's sizes least in the median, with
    its launch and bytes beside; the others are ratios of times.

    Args:
        recorded: Microseconds, by the name of the op.
    """
    from benchmarks.product_share import H100, product_share
    from budgetfit.gpus.kernel_shares import find_shares
    from budgetfit.timing.kernel_times import ISSUE_NS

    found: dict[str, float] = {}
    for dtype in ("bf16", "fp16", "tf32", "fp32"):
        rows = [
            (*map(int, name.group(1, 2, 3)), us)
            for op, us in recorded.items()
            if (name := re.fullmatch(rf"mm {dtype} (\d+)x(\d+)x(\d+)", op))
            and not int(name[2]) % 8
        ]
        found[f"products, {dtype}, of the rate ({len(rows)} sizes)"] = product_share(
            rows, dtype
        )
    for library in ("flash", "efficient"):
        found[f"{library} attention in bf16, of cuDNN's rate"] = statistics.median(
            recorded[op] / us
            for other, us in recorded.items()
            if other.startswith(f"{library} attention") and " bf16 " in other
            if (op := other.replace(library, "cudnn"))
        )
    found["efficient attention in fp32, backward rate of the forward's"] = (
        statistics.median(
            2.5 * us / recorded[op.replace(" fp32", " backward fp32")]
            for op, us in recorded.items()
            if re.fullmatch(r"efficient attention (causal )?fp32 .*", op)
        )
    )
    elements = 24576 * 3072
    found["elementwise kernels, of the memory bandwidth"] = (
        statistics.median(
            tensors * elements * size / recorded[f"{op} {dtype} 24576x3072"] / 1e3
            for op, tensors in (
                ("add", 3),
                ("mul", 3),
                ("gelu", 2),
                ("gelu backward", 3),
            )
            for dtype, size in (("bf16", 2), ("fp32", 4))
        )
        / H100.memory_gb_per_s
    )
    # Batch norm, by its channels: three passes forward, five backward.
    first, last, vectors = (
        [
            (shape[1], passes * math.prod(shape) * size / recorded[op] / 1e3)
            for shape in BATCH_NORMS
            for name, passes in (("batch_norm", 3), ("batch_norm backward", 5))
            if (op := f"{name}{layout} {dtype} {'x'.join(map(str, shape))}")
        ]
        for layout, dtype, size in (
            ("", "bf16", 2),
            (" channels_last", "bf16", 2),
            ("", "fp32", 4),
        )
    )
    reached = H100.memory_gb_per_s * find_shares(H100).bandwidth
    found["batch norm in bf16, channels last, of the bandwidth reached"] = (
        statistics.median(rate for _, rate in last) / reached
    )
    found["the same, channels first, bytes per nanosecond and channel"] = (
        statistics.median(rate / blocks for blocks, rate in first if blocks <= FEW)
    )
    found["in fp32 (cuDNN's), bytes per nanosecond and multiprocessor with one"] = (
        statistics.median(
            rate / min(blocks, H100.sm_count)
            for blocks, rate in vectors
            if blocks <= FEW
        )
    )
    # Casts to fp32 and transposed copies: elementwise kernels without vector loads.
    found["elements without vector loads, per nanosecond and multiprocessor"] = (
        statistics.median(
            count / recorded[op] / 1e3 / H100.sm_count
            for op, count in (
                ("to fp32 bf16 24576x3072", elements),
                ("transpose bf16 24x1024x12x64", elements // 4),
                ("transpose fp32 24x1024x12x64", elements // 4),
            )
        )
    )
    # Three kernels forward in three modules; a Linear has three backward, a LayerNorm
    # two, a GELU one.
    forward_us, backward_us = (
        count * ISSUE_NS[phase] / 1e3
        for phase, count in (("forward", 300), ("backward", 600))
    )
    forward = recorded[f"{SMALL_MODULES}, forward"] / forward_us
    both = recorded[f"{SMALL_MODULES}, forward and backward"]
    found["launches, forward, of a workstation's time"] = forward
    found["launches, forward and backward"] = both / (forward_us + backward_us)
    odd, aligned = (recorded[f"mm bf16 24576x{n}x768"] for n in (50257, 50304))
    found["products with rows of odd length, of aligned ones"] = aligned / odd
    return found


GROUPS: Final = (
    products,
    pointwise,
    attention,
    convolutions,
    optimizers,
    host,
    quantised,
)


def times() -> dict[str, float]:
    """The recorded microseconds, by the name of the op."""
    rows = map(json.loads, RECORDED.read_text("utf-8").splitlines())
    return {row["op"]: row["us"] for row in rows if "op" in row}


def show() -> int:
    """Print what the recorded ops ask for."""
    for what, ratio in ratios(times()).items():
        sys.stdout.write(f"{ratio:5.2f}  {what}\n")
    return 0


def main() -> int:
    """Time every op, and write what was found, an op a line; or show what is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--until", type=float, default=float("inf"), help="epoch time")
    options = parser.parse_args()
    if options.record is None:
        return show()
    device = torch.cuda.get_device_properties(0)
    head = {
        "card": device.name,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    with options.record.open("a", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        write(head | {"idle": query()})
        for group in GROUPS:
            try:
                cases = list(group())
            except ImportError as error:
                write({"group": group.__name__, "error": str(error)})
                continue
            for name, make in cases:
                if time.time() > options.until:
                    write({"stopped": name})
                    return 0
                try:
                    call = make("cuda")
                    took, times = microseconds(call)
                    row: dict[str, Any] = {
                        "op": name,
                        "us": round(took, 2),
                        "times": times,
                    }
                except Exception as error:  # noqa: BLE001 - a row says what happened
                    row = {
                        "op": name,
                        "error": f"{type(error).__name__}: {str(error)[:200]}",
                    }
                call = None
                write(row)
        write({"sustained": sustained(4)})
    sys.stdout.write("done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

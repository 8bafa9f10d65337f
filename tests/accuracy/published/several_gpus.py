"""Reserved memory of torchtitan's published rows on several GPUs.

python -m tests.accuracy.published.several_gpus          # print the section
python -m tests.accuracy.published.several_gpus --write  # renew it in docs/published.md
"""

import sys
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from benchmarks.shared import ROOT, one_thread, table
from budgetfit import Parallelism, Recipe, Segment, estimate

PAGE: Final = ROOT / "docs" / "published.md"
TITLE: Final = "## Several GPUs"
TEXT: Final = """
`python -m tests.accuracy.published.several_gpus` prints this section. torchtitan
trained Llama 3.1 8B with FSDP2 on H100s, 2 x 8,192 tokens on each, eager, with
selective checkpointing (`benchmarks/llama3_h100_202412_torchtitan.md`, December 2024).
The model, its loss and what its policy saves, attention and every second matrix
product, are rebuilt in plain PyTorch. Published is what PyTorch reserved. Whether
`expandable_segments` was on is not stated, so both are predicted; its launch script
sets it. Nothing was fitted on these rows. Its rows with compiled blocks, float8,
tensor, context and pipeline parallelism are not predicted.
"""
WIDTH, HEADS, KV_HEADS, HIDDEN, BLOCKS = 4096, 32, 8, 14_336, 32
VOCABULARY, LENGTH, BATCH = 128_256, 8192, 2
PARAMETERS: Final = 8_030_261_248
ROWS: Final = {8: 82.4, 128: 67.0}  # GPUs: GiB reserved
ALLOCATORS: Final = ("", "expandable_segments:True")
SAVED: Final = (
    *(f"aten.mm.default:{call}" for call in (0, 2, 4, 6)),
    "aten._scaled_dot_product_flash_attention.default:0",
    "aten._scaled_dot_product_cudnn_attention.default:0",
)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of the last dimension; (batch, length, heads, size) in and out."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = pairs * angles[: x.shape[1], None]
    return torch.view_as_real(turned).flatten(3).type_as(x)


class Block(nn.Module):
    """Attention with grouped queries and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * size, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * size, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind this block."""
        h = x + self.attention(self.attention_norm(x), angles)
        y = self.ffn_norm(h)
        return h + self.w2(functional.silu(self.w1(y)) * self.w3(y))

    def attention(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Attend; (batch, length, width) in and out."""
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, -1, WIDTH // HEADS)
            for each in (self.wq(x), self.wk(x), self.wv(x))
        )
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (
            each[:, :, :, None]
            .expand(batch, length, KV_HEADS, HEADS // KV_HEADS, -1)
            .reshape(batch, length, HEADS, -1)
            for each in (k, v)
        )
        y = functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), is_causal=True
        )
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))


class Llama(nn.Module):
    """Llama 3.1 8B; returns logits: (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.zeros(LENGTH, WIDTH // HEADS // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return torchtitan's loss, of logits in fp32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def reserved_gib(gpus: int, allocator: str) -> float:
    """Return the predicted peak of reserved memory."""
    with torch.device("meta"):
        model = Llama()
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    segments = tuple(
        Segment((f"layers.{number}",), mode="selective", saved_ops=SAVED)
        for number in range(BLOCKS)
    )
    recipe = Recipe(
        batch_size=BATCH,
        precision="bf16-mixed",
        optimizer="adamw_torch",
        segments=segments,
        parallelism=Parallelism(
            engine="fsdp2",
            gpus=gpus,
            gpus_per_node=8,
            param_dtype="bf16",
            reduce_dtype="fp32",
        ),
    )
    found = estimate(
        model,
        recipe,
        gpu="h100-80gb",
        batch=(tokens, tokens.clone()),
        loss=loss,
        allocator=allocator,
    )
    return found.reserved_bytes / 2**30


def section() -> str:
    """The comparison as a section of the page, the worst first."""
    rows = [
        (gpus, allocator or "default", published, reserved_gib(gpus, allocator))
        for gpus, published in ROWS.items()
        for allocator in ALLOCATORS
    ]
    rows.sort(key=lambda row: -abs(row[3] / row[2] - 1))
    cells = [
        (
            str(gpus),
            allocator,
            f"{published:.2f} GiB",
            f"{found:.2f} GiB",
            f"{found / published - 1:+.2%}",
        )
        for gpus, allocator, published, found in rows
    ]
    heads = ("GPUs", "allocator", "published", "predicted", "error")
    return f"{TITLE}\n{TEXT}\n{table(heads, cells, left=2)}\n"


def main() -> int:
    """Print the section, or renew it in the page."""
    one_thread()
    made = section()
    sys.stdout.write(made)
    if "--write" in sys.argv[1:]:
        before = PAGE.read_text(encoding="utf-8").partition(TITLE)[0]
        PAGE.write_text(f"{before.rstrip()}\n\n{made}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

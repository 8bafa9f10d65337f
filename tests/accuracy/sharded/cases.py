"""What one rank of several was recorded on: small models, engines, settings, cards."""

import importlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from budgetfit import Parallelism, Recipe, Segment
from tests.accuracy.loading.cases import CASES as LOADED
from tests.accuracy.loading.cases import LENGTH, LoadingCase

FILE: Final = Path(__file__).with_name("recordings.json")
STEPS: Final = 4  # DDP builds its buckets in the second one
VOCABULARY: Final = 16_000
_TEXT: Final = {"input_ids": (256,), "labels": (256,)}
_IMAGE: Final = {"pixel_values": (3, 224, 224), "labels": ()}


@dataclass(frozen=True)
class SmallModel:
    """A model by its classes in transformers, and the inputs of one sample."""

    family: str
    settings: dict[str, Any]
    blocks: tuple[str, ...]
    inputs: dict[str, tuple[int, ...]] = field(default_factory=lambda: _TEXT)

    def build(self) -> nn.Module:
        """The model with weights in fp32, in host memory."""
        transformers = importlib.import_module("transformers")
        config_class, _, model_class = self.family.partition(" ")
        config = getattr(transformers, config_class)(**self.settings)
        model: nn.Module = getattr(transformers, model_class)(config)
        return model.train()

    def batch(self, samples: int, device: str) -> dict[str, torch.Tensor]:
        """Zeros: no size depends on the values."""
        return {
            name: torch.zeros(
                (samples, *shape),
                dtype=torch.float32 if name == "pixel_values" else torch.int64,
                device=device,
            )
            for name, shape in self.inputs.items()
        }


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{number}" for number in range(count))


_LLAMA_LIKE: Final = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
_BERT_LIKE: Final = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
}
_LAYERS = _numbered("model.layers", 4)
MODELS: Final = {
    "llama": SmallModel("LlamaConfig LlamaForCausalLM", _LLAMA_LIKE, _LAYERS),
    "llama, wide": SmallModel(
        "LlamaConfig LlamaForCausalLM",
        {
            **_LLAMA_LIKE,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "tie_word_embeddings": True,
        },
        _numbered("model.layers", 8),
    ),
    "gpt2": SmallModel(
        "GPT2Config GPT2LMHeadModel",
        {"n_embd": 512, "n_layer": 6, "n_head": 8, "use_cache": False},
        _numbered("transformer.h", 6),
    ),
    "qwen2": SmallModel(
        "Qwen2Config Qwen2ForCausalLM",
        {**_LLAMA_LIKE, "tie_word_embeddings": True, "hidden_size": 640},
        _LAYERS,
    ),
    "gemma": SmallModel(
        "GemmaConfig GemmaForCausalLM", {**_LLAMA_LIKE, "head_dim": 64}, _LAYERS
    ),
    "opt": SmallModel(
        "OPTConfig OPTForCausalLM",
        {
            "hidden_size": 512,
            "ffn_dim": 2048,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "word_embed_proj_dim": 512,
            "vocab_size": VOCABULARY,
            "use_cache": False,
        },
        _numbered("model.decoder.layers", 5),
    ),
    "bert": SmallModel(
        "BertConfig BertForMaskedLM", _BERT_LIKE, _numbered("bert.encoder.layer", 6)
    ),
    "roberta": SmallModel(
        "RobertaConfig RobertaForSequenceClassification",
        {**_BERT_LIKE, "num_labels": 5},
        _numbered("roberta.encoder.layer", 6),
        {"input_ids": (256,), "labels": ()},
    ),
    "vit": SmallModel(
        "ViTConfig ViTForImageClassification",
        _BERT_LIKE,
        _numbered("vit.layers", 6),
        _IMAGE,
    ),
    "t5": SmallModel(
        "T5Config T5ForConditionalGeneration",
        {
            "d_model": 512,
            "d_ff": 1024,
            "num_layers": 3,
            "vocab_size": VOCABULARY,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        (*_numbered("encoder.block", 3), *_numbered("decoder.block", 3)),
    ),
}

FSDP2: Final = Parallelism(
    engine="fsdp2", gpus=8, param_dtype="bf16", reduce_dtype="fp32"
)
DDP: Final = Parallelism(engine="ddp", gpus=8, bucket_cap_mb=25)
ZERO: Final = Parallelism(engine="deepspeed", gpus=8, param_dtype="bf16", zero_stage=2)


@dataclass(frozen=True, kw_only=True)
class ShardedCase:
    """One rank's training.

    ``checkpointed``: the first so many blocks; ``treated``: or these segments;
    ``loaded``: the name of a way to load a model with adapters, which is trained in
    place of ``model``; ``compiled``: each block by ``torch.compile``.
    """

    parallelism: Parallelism
    model: str = "llama"
    loaded: str = ""
    card: str = "a100-80gb"
    samples: int = 4
    accumulation: int = 1
    precision: str = "bf16-mixed"
    optimizer: str = "adamw_torch_fused"
    checkpointed: int = 0
    treated: tuple[Segment, ...] = ()
    loss_chunks: int = 1
    compiled: bool = False

    @property
    def loading(self) -> LoadingCase | None:
        """How the model is loaded; None: one of ``MODELS`` is built."""
        return LOADED[self.loaded] if self.loaded else None

    @property
    def blocks(self) -> tuple[str, ...]:
        """Module paths of the blocks."""
        if self.loading is None:
            return MODELS[self.model].blocks
        return _numbered("base_model.model.model.layers", self.loading.layers)

    def batch(self, device: str) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        if self.loading is None:
            return MODELS[self.model].batch(self.samples, device)
        ids = torch.zeros(self.samples, LENGTH, dtype=torch.int64, device=device)
        return {"input_ids": ids, "labels": ids.clone()}

    @property
    def recipe(self) -> Recipe:
        """The recipe that is predicted."""
        blocks = self.blocks[: self.checkpointed]
        return Recipe(
            batch_size=self.samples,
            gradient_accumulation_steps=self.accumulation,
            precision=self.precision,
            optimizer=self.optimizer,
            segments=self.treated or tuple(Segment((name,)) for name in blocks),
            loss_chunks=self.loss_chunks,
            parallelism=self.parallelism,
            compile="blocks" if self.compiled else "none",
        )


def _cases() -> dict[str, ShardedCase]:
    sharded, copied = (ShardedCase(parallelism=each) for each in (FSDP2, DDP))

    def fsdp2(**changes: Any) -> ShardedCase:
        return replace(sharded, parallelism=replace(FSDP2, **changes))

    def ddp(**changes: Any) -> ShardedCase:
        return replace(copied, parallelism=replace(DDP, **changes))

    no_policy = {"param_dtype": None, "reduce_dtype": None}
    settings = {
        "fsdp2": sharded,
        "fsdp2, kept after forward": fsdp2(reshard_after_forward=False),
        "fsdp2, over 4 after forward": fsdp2(reshard_after_forward=4),
        "fsdp2, reduced in bf16": fsdp2(reduce_dtype="bf16"),
        "fsdp2, autocast": fsdp2(**no_policy),
        "fsdp2, fp32": replace(fsdp2(**no_policy), precision="fp32"),
        "fsdp2, bf16 weights": replace(fsdp2(**no_policy), precision="bf16"),
        "fsdp2, 2 ranks": fsdp2(gpus=2),
        "fsdp2, 7 ranks": fsdp2(gpus=7),
        "fsdp2, 64 ranks": fsdp2(gpus=64),
        "fsdp2, 2 x 4": fsdp2(shard=4),
        "fsdp2, 8 x 8": fsdp2(gpus=64, shard=8),
        "fsdp2, 2 micro-batches": replace(sharded, accumulation=2),
        "fsdp2, 3 micro-batches": replace(sharded, accumulation=3),
        "fsdp2, 2 micro-batches, each reduced": replace(
            fsdp2(sync_each_batch=True), accumulation=2
        ),
        "fsdp2, 2 x 4, 2 micro-batches": replace(fsdp2(shard=4), accumulation=2),
        "fsdp2, checkpointed": replace(sharded, checkpointed=4),
        "fsdp2, half checkpointed": replace(sharded, checkpointed=2),
        "fsdp2, foreach": replace(sharded, optimizer="adamw_torch"),
        "fsdp2, sgd": replace(sharded, optimizer="sgd"),
        "fsdp2, rtx-4090": replace(sharded, card="rtx-4090"),
        "fsdp2, h100": replace(sharded, card="h100-80gb"),
        "fsdp2, 16 samples": replace(sharded, samples=16),
        "ddp": copied,
        "ddp, fp32": replace(copied, precision="fp32"),
        "ddp, views": ddp(gradient_as_bucket_view=True),
        "ddp, PyTorch's buckets": ddp(bucket_cap_mb=None),
        "ddp, buckets of 100 MiB": ddp(bucket_cap_mb=100),
        "ddp, buckets of 5 MiB, views": ddp(
            bucket_cap_mb=5, gradient_as_bucket_view=True
        ),
        "ddp, 2 ranks": ddp(gpus=2),
        "ddp, 64 ranks": ddp(gpus=64),
        "ddp, 2 micro-batches": replace(copied, accumulation=2),
        "ddp, 2 micro-batches, each reduced": replace(
            ddp(sync_each_batch=True), accumulation=2
        ),
        "ddp, checkpointed": replace(copied, checkpointed=4),
        "ddp, bf16 weights": replace(copied, precision="bf16"),
        "ddp, rtx-4090": replace(copied, card="rtx-4090"),
        "ddp, 8 loss chunks": replace(copied, loss_chunks=8),
        "ddp, 8 loss chunks, checkpointed, 2 micro-batches": replace(
            copied, loss_chunks=8, checkpointed=4, accumulation=2
        ),
        "fsdp2, 8 loss chunks": replace(sharded, loss_chunks=8),
        "fsdp2, 8 loss chunks, kept after forward": replace(
            fsdp2(reshard_after_forward=False), loss_chunks=8
        ),
        "fsdp2, 8 loss chunks, autocast": replace(fsdp2(**no_policy), loss_chunks=8),
        "fsdp2, 8 loss chunks, checkpointed, 2 micro-batches": replace(
            sharded, loss_chunks=8, checkpointed=4, accumulation=2
        ),
    }
    for treatment, treated in _treatments().items():
        for name in ("ddp", "fsdp2", "fsdp2, kept after forward"):
            settings[f"{name}, {treatment}"] = replace(settings[name], treated=treated)
        two = settings["ddp, 2 micro-batches"]
        settings[f"ddp, 2 micro-batches, {treatment}"] = replace(two, treated=treated)
    settings |= _each_reduced(settings)
    settings |= _in_host_memory(settings)
    cases = {f"llama, {name}": case for name, case in settings.items()}
    for model in MODELS:
        if model == "llama":
            continue
        few = ["fsdp2", "fsdp2, kept after forward", "fsdp2, 7 ranks", "ddp"]
        few += _FURTHER.get(model, ())
        few += [f"fsdp2{_OFFLOAD}"] * (model in _OF_MODELS)
        for name in few:
            cases[f"{model}, {name}"] = replace(settings[name], model=model)
    further = _compiled(settings), _of_adapters(settings), _of_deepspeed()
    for each in further:
        cases |= each
    return cases


def _compiled(settings: dict[str, ShardedCase]) -> dict[str, ShardedCase]:
    """Blocks by ``torch.compile``."""
    cases = {f"llama, {name}": settings[name] for name in _COMPILED}
    for model in ("gpt2", "qwen2", "bert", "vit", "t5"):
        for name in ("ddp", "fsdp2"):
            cases[f"{model}, {name}"] = replace(settings[name], model=model)
    return {
        f"{name}, compiled": replace(case, compiled=True)
        for name, case in cases.items()
    }


_EACH: Final = ", 3 micro-batches, each reduced"
_EACH_REDUCED: Final = (
    "fsdp2",
    "fsdp2, kept after forward",
    "fsdp2, over 4 after forward",
    "fsdp2, reduced in bf16",
    "fsdp2, autocast",
    "fsdp2, bf16 weights",
    "fsdp2, 7 ranks",
    "fsdp2, 2 x 4",
    "fsdp2, checkpointed",
    "fsdp2, foreach",
    "fsdp2, 8 loss chunks",
    "fsdp2, selective",
    "fsdp2, offloaded",
)

# The head and the embedding of qwen2 are one weight.
_FURTHER: Final = {
    "gpt2": (f"fsdp2{_EACH}",),
    "qwen2": (f"fsdp2{_EACH}", "fsdp2, 8 loss chunks", "ddp, 8 loss chunks"),
    "vit": (f"fsdp2{_EACH}",),
}
_OF_MODELS: Final = ("gpt2", "qwen2", "bert", "roberta", "vit", "t5")  # offloaded


def _each_reduced(settings: dict[str, ShardedCase]) -> dict[str, ShardedCase]:
    """FSDP2 that reduces the gradients of each of three micro-batches."""
    return {
        name + _EACH: replace(
            settings[name],
            parallelism=replace(settings[name].parallelism, sync_each_batch=True),
            accumulation=3,
        )
        for name in _EACH_REDUCED
    }


_OFFLOADED: Final = (
    "fsdp2",
    "fsdp2, kept after forward",
    "fsdp2, over 4 after forward",
    "fsdp2, reduced in bf16",
    "fsdp2, autocast",
    "fsdp2, fp32",
    "fsdp2, bf16 weights",
    "fsdp2, 7 ranks",
    "fsdp2, 64 ranks",
    "fsdp2, 2 x 4",
    "fsdp2, 2 micro-batches",
    "fsdp2, 2 x 4, 2 micro-batches",
    f"fsdp2{_EACH}",
    f"fsdp2, 2 x 4{_EACH}",
    "fsdp2, checkpointed",
    "fsdp2, foreach",
    "fsdp2, sgd",
    "fsdp2, rtx-4090",
    "fsdp2, 8 loss chunks",
    "fsdp2, offloaded",
)
_OFFLOAD: Final = ", CPU offload"


def _in_host_memory(settings: dict[str, ShardedCase]) -> dict[str, ShardedCase]:
    """FSDP2 with weights, gradients and optimizer states in host memory."""
    return {
        name + _OFFLOAD: replace(
            settings[name],
            parallelism=replace(settings[name].parallelism, cpu_offload=True),
        )
        for name in _OFFLOADED
    }


_COMPILED: Final = (
    "ddp",
    "ddp, fp32",
    "ddp, views",
    "ddp, 2 micro-batches",
    "ddp, checkpointed",
    "fsdp2",
    "fsdp2, kept after forward",
    "fsdp2, autocast",
    "fsdp2, 2 x 4, 2 micro-batches",
    "fsdp2, half checkpointed",
    "fsdp2, h100",
)


def _treatments() -> dict[str, tuple[Segment, ...]]:
    """Options of a block beside keeping and recomputing it."""
    saved = ("aten.mm.default:0", "aten.mm.default:4")
    return {
        "selective": tuple(
            Segment((x,), "selective", saved_ops=saved) for x in _LAYERS
        ),
        "offloaded": tuple(Segment((x,), "offload") for x in _LAYERS),
        "inputs on host": tuple(Segment((x,), input_on_host=True) for x in _LAYERS),
    }


def _of_adapters(settings: dict[str, ShardedCase]) -> dict[str, ShardedCase]:
    """DDP with adapters, on bases that are quantised or not."""
    plain, views = settings["ddp, PyTorch's buckets"], settings["ddp, views"]
    cases = {
        "lora, moved": {"ddp": plain},
        "qlora": {
            "ddp": plain,
            "ddp, views": views,
            "ddp, 2 ranks": settings["ddp, 2 ranks"],
            "ddp, buckets of 5 MiB, views": settings["ddp, buckets of 5 MiB, views"],
            "ddp, 2 micro-batches": settings["ddp, 2 micro-batches"],
            "ddp, checkpointed": settings["ddp, checkpointed"],
            "ddp, h100": replace(views, card="h100-80gb"),
            "ddp, as-is": replace(views, precision="as-is"),
        },
        "qlora, flat": {"ddp": plain},
        "qlora, wide": {"ddp": plain},
        "qlora, all linear": {"ddp": plain},
        "int8": {"ddp": plain, "ddp, views": views},
        "int8, wide": {"ddp": plain},
    }
    return {
        f"{loaded}: {name}": replace(case, loaded=loaded)
        for loaded, cased in cases.items()
        for name, case in cased.items()
    }


def _of_deepspeed() -> dict[str, ShardedCase]:
    def zero(stage: int, **changes: Any) -> ShardedCase:
        given = replace(ZERO, zero_stage=stage, **changes)
        return ShardedCase(parallelism=given)

    settings = {}
    for stage in (1, 2, 3):
        settings |= {
            f"zero-{stage}": zero(stage),
            f"zero-{stage}, 2 ranks": zero(stage, gpus=2),
            f"zero-{stage}, buckets of 5e6": zero(stage, bucket_elements=5_000_000),
            f"zero-{stage}, 2 micro-batches": replace(zero(stage), accumulation=2),
            f"zero-{stage}, checkpointed": replace(zero(stage), checkpointed=4),
            f"zero-{stage}, {'not ' * (stage == 3)}overlapped": zero(
                stage, overlap_comm=stage != 3
            ),
            f"zero-{stage}, overlapped, buckets of 2e6, 2 micro-batches": replace(
                zero(stage, overlap_comm=True, bucket_elements=2_000_000),
                accumulation=2,
            ),
        }
        if stage > 1:
            settings |= {
                f"zero-{stage}, 7 ranks": zero(stage, gpus=7),
                f"zero-{stage}, fp32": replace(
                    zero(stage, param_dtype=None), precision="fp32"
                ),
                f"zero-{stage}, foreach": replace(zero(stage), optimizer="adamw_torch"),
            }
    cases = {f"llama, {name}": case for name, case in settings.items()}
    cases["t5, zero-3"] = replace(zero(3), model="t5")
    for model in ("gpt2", "bert", "vit"):
        for stage in (1, 2, 3):
            cases[f"{model}, zero-{stage}"] = replace(zero(stage), model=model)
    return cases


CASES: Final = _cases()

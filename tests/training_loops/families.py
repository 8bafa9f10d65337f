"""Small models of several architectures, and data for them: samples of many lengths."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.applying import small_models
from tests.applying.small_models import BLOCKS
from tests.models import VOCABULARY, bert_classifier

CLASSES = 4
LONGEST = 16
SHORTEST = 5
Sample = dict[str, Tensor]
Batch = dict[str, Tensor]


class Family(NamedTuple):
    """How a model is made, one sample of its data, and the chains of its blocks.

    ``frozen`` is where the names of parameters begin that people freeze: embeddings and
    the first block.
    """

    make: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Sample]
    chains: tuple[tuple[str, ...], ...]
    frozen: tuple[str, ...]

    def model(self, seed: int = 0) -> nn.Module:
        """Return it in training mode, always with the same weights for a seed."""
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's own
            return self.make().train()

    def samples(self, count: int, seed: int = 1) -> list[Sample]:
        """Return samples whose lengths differ, without the global generators."""
        generator = torch.Generator().manual_seed(seed)
        return [self.sample(generator) for _ in range(count)]


def collate(samples: list[Sample]) -> Batch:
    """Stack samples; pad texts to the longest, with a mask and labels of -100."""
    batch = {
        name: pad_sequence(
            [sample[name] for sample in samples],
            batch_first=True,
            padding_value=-100 if name == "labels" else 0,
        )
        if samples[0][name].dim() == 1
        else torch.stack([sample[name] for sample in samples])
        for name in samples[0]
    }
    if "input_ids" in batch:
        ones = [torch.ones_like(sample["input_ids"]) for sample in samples]
        batch["attention_mask"] = pad_sequence(ones, batch_first=True)
    return batch


class ConvBlock(nn.Module):
    """Batch norm, dropout, stochastic depth: what recomputation can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.relu(self.norm(self.convolution(x))))
        if self.training and torch.rand(()) < 0.2:
            y = 0.0 * y
        return x + y


class ConvNet(nn.Module):
    """A module of one's own, that returns its loss as transformers' Trainer asks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(BLOCKS))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": loss, "logits": logits}


def gpt2() -> nn.Module:
    """Tied embeddings and dropout.

    Without the generation cache that its config has on by default: plans switch it off,
    and with it keys are copied into another layout, so that products round otherwise.
    """
    model: Any = small_models.gpt2()
    model.config.use_cache = False
    return model


def t5_with_cache() -> nn.Module:
    """T5 as its config is by default: a generation cache, in training too."""
    model: Any = small_models.t5()
    model.config.use_cache = model.decoder.config.use_cache = True
    return model


def llama_with_lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear"
    )
    return peft.get_peft_model(small_models.llama(), config)


def _ids(generator: torch.Generator) -> Tensor:
    length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
    return torch.randint(2, VOCABULARY, (length,), generator=generator)


def _text(generator: torch.Generator) -> Sample:
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _two_texts(generator: torch.Generator) -> Sample:
    return {"input_ids": _ids(generator), "labels": _ids(generator)}


def _label(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (), generator=generator)


def _text_and_label(generator: torch.Generator) -> Sample:
    return {"input_ids": _ids(generator), "labels": _label(generator)}


def _image(name: str, size: int) -> Callable[[torch.Generator], Sample]:
    def sample(generator: torch.Generator) -> Sample:
        pixels = torch.randn(3, size, size, generator=generator)
        return {name: pixels, "labels": _label(generator)}

    return sample


def _chain(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{number}" for number in range(BLOCKS))


_GPT2_FROZEN = ("transformer.wte", "transformer.wpe", "transformer.h.0.")
_T5 = (_chain("encoder.block"), _chain("decoder.block"))
FAMILIES: dict[str, Family] = {
    "gpt2": Family(gpt2, _text, (_chain("transformer.h"),), _GPT2_FROZEN),
    "gpt2-cache": Family(
        small_models.gpt2, _text, (_chain("transformer.h"),), _GPT2_FROZEN
    ),
    "llama": Family(
        small_models.llama,
        _text,
        (_chain("model.layers"),),
        ("model.embed_tokens", "model.layers.0."),
    ),
    "t5": Family(small_models.t5, _two_texts, _T5, ("shared", "encoder.block.0.")),
    "t5-cache": Family(t5_with_cache, _two_texts, _T5, ("shared", "encoder.block.0.")),
    "vit": Family(
        small_models.vit,
        _image("pixel_values", 16),
        (_chain("vit.layers"),),
        ("vit.embeddings", "vit.layers.0."),
    ),
    "bert": Family(
        partial(
            bert_classifier,
            num_hidden_layers=BLOCKS,
            max_position_embeddings=2 * LONGEST,
            num_labels=CLASSES,
        ),
        _text_and_label,
        (_chain("bert.encoder.layer"),),
        ("bert.embeddings", "bert.encoder.layer.0."),
    ),
    "own": Family(ConvNet, _image("x", 8), (_chain("blocks"),), ("stem", "blocks.0.")),
    "lora": Family(
        llama_with_lora, _text, (_chain("base_model.model.model.layers"),), ()
    ),
}

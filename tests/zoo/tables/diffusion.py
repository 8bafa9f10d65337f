"""Diffusion networks written in plain torch, as diffusers writes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.networks import diffusers, diffusers_training

_LATENTS, _TEXT = torch.zeros(2, 4, 16, 16), torch.zeros(2, 7, diffusers.CONTEXT)
_TIMES = torch.tensor([3, 500])


def _plain(name: str, build: Callable[[], nn.Module], **plan: Any) -> Entry:
    return Entry(f"plain {name}", "plain diffusion networks", build, plan)


ENTRIES = [
    _plain(
        "UNet with time and text",
        diffusers.UNet2DCondition,
        batch={"sample": _LATENTS, "timestep": _TIMES, "encoder_hidden_states": _TEXT},
    ),
    _plain(
        "UNet, a tuple as output",
        diffusers.UNet2DCondition,
        batch={
            "sample": _LATENTS,
            "timestep": 7,
            "encoder_hidden_states": _TEXT,
            "return_dict": False,
        },
    ),
    _plain(
        "DiT", diffusers.DiT, batch=(_LATENTS, _TIMES, torch.zeros(2, dtype=torch.long))
    ),
    _plain(
        "MMDiT",
        diffusers.MMDiT,
        batch={"hidden_states": torch.zeros(2, 9, 16), "encoder_hidden_states": _TEXT},
    ),
    _plain("VAE", diffusers_training.VAE),
    _plain("VQ-VAE", diffusers_training.VQVAE),
    _plain("DDPM, noise drawn in forward", diffusers_training.DDPM),
    _plain(
        "ControlNet",
        diffusers_training.ControlNet,
        batch=(_LATENTS, _TIMES, _TEXT, torch.zeros(2, 3, 16, 16)),
    ),
    _plain("video UNet", diffusers_training.VideoUNet),
]

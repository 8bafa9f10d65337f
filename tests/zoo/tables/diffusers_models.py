"""Models of diffusers: those that its training scripts train, then the others.

Source of the first list: ``examples/`` of diffusers' repository, August 2026. Left out
are wrappers of several ControlNets, whose parts are here, and parts of pipelines that
no forward trains (projections, tokenizers, vocoders).
"""

from importlib.util import find_spec

from tests.zoo.entry import Entry

WITH_SCRIPT = (
    *("AutoencoderKL", "AutoencoderRAE", "CogVideoXTransformer3DModel"),
    *("CogView4Transformer2DModel", "ControlNetModel", "CosmosTransformer3DModel"),
    *("Flux2Transformer2DModel", "FluxControlNetModel", "FluxTransformer2DModel"),
    *("HiDreamImageTransformer2DModel", "Ideogram4Transformer2DModel"),
    *("Krea2Transformer2DModel", "Lumina2Transformer2DModel"),
    *("PixArtTransformer2DModel", "PriorTransformer", "QwenImageTransformer2DModel"),
    *("SD3ControlNetModel", "SD3Transformer2DModel", "SanaTransformer2DModel"),
    *("T2IAdapter", "UNet2DConditionModel", "UNet2DModel", "UVit2DModel", "VQModel"),
    "ZImageTransformer2DModel",
)
OTHERS = (
    *("AllegroTransformer3DModel", "AuraFlowTransformer2DModel"),
    *("BriaTransformer2DModel", "ChromaTransformer2DModel"),
    *("CogView3PlusTransformer2DModel", "ConsisIDTransformer3DModel"),
    *("DiTTransformer2DModel", "HunyuanImageTransformer2DModel"),
    *("HunyuanVideoTransformer3DModel", "Kandinsky3UNet"),
    *("LTXVideoTransformer3DModel", "LongCatImageTransformer2DModel"),
    *("MochiTransformer3DModel", "OvisImageTransformer2DModel"),
    *("SanaVideoTransformer3DModel", "SkyReelsV2Transformer3DModel"),
    *("StableCascadeUNet", "UNet3DConditionModel"),
    *("UNetSpatioTemporalConditionModel", "WanTransformer3DModel"),
)


def _entries() -> list[Entry]:
    if find_spec("diffusers") is None:
        return []
    from tests.zoo.diffusers_sizes import builder, plan_arguments  # noqa: PLC0415

    families = {"diffusers, with a training script": WITH_SCRIPT}
    families["other models of diffusers"] = OTHERS
    return [
        Entry(name, family, builder(name), plan_arguments(name))
        for family, names in families.items()
        for name in names
    ]


ENTRIES = _entries()

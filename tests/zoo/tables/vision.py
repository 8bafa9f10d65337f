"""Stock models of images and videos."""

from typing import Any

from transformers import ResNetConfig

from tests.zoo.shrink import small_entries

Models = dict[str, dict[str, Any]]
_AS_IS = {"/": 1}  # widths of a convolutional network that no one number divides

_WINDOWS = {"window_size": 2}  # the last stage has 2 x 2 patches


def _plain(names: str) -> Models:
    return {name: {} for name in names.split()}


def _resnet(*stages: str) -> ResNetConfig:
    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=list(stages),
    )


_LAST = {"backbone_config": _resnet("stage4")}

CLASSIFICATION: Models = {
    **_plain(
        "BeitForImageClassification CLIPForImageClassification "
        "ConvNextForImageClassification ConvNextV2ForImageClassification "
        "DeiTForImageClassification Dinov2ForImageClassification "
        "Dinov2WithRegistersForImageClassification "
        "FocalNetForImageClassification "
        "IJepaForImageClassification ImageGPTForImageClassification "
        "LevitForImageClassification MobileNetV1ForImageClassification "
        "MobileNetV2ForImageClassification MobileViTForImageClassification "
        "MobileViTV2ForImageClassification PvtV2ForImageClassification "
        "RegNetForImageClassification ResNetForImageClassification "
        "SegformerForImageClassification SiglipForImageClassification "
        "SwiftFormerForImageClassification Swinv2ForImageClassification "
        "TextNetForImageClassification "
        "ViTForImageClassification ViTMSNForImageClassification "
        "Data2VecVisionForImageClassification"
    ),
    **dict.fromkeys(
        (
            "BitForImageClassification",
            "EfficientNetForImageClassification",
            "PoolFormerForImageClassification",
            "PvtForImageClassification",
        ),
        _AS_IS,
    ),
    "SwinForImageClassification": _WINDOWS,
    "DonutSwinForImageClassification": _WINDOWS,
    "HieraForImageClassification": {"image_size": (64, 64)},
    "PerceiverForImageClassificationLearned": {
        "d_latents": 64,
        "d_model": 64,
        "num_latents": 16,
        "num_self_attends_per_block": 2,
    },
}
SEGMENTATION: Models = {
    **_plain(
        "DPTForSemanticSegmentation MobileNetV2ForSemanticSegmentation "
        "MobileViTForSemanticSegmentation MobileViTV2ForSemanticSegmentation "
        "Data2VecVisionForSemanticSegmentation"
    ),
    "BeitForSemanticSegmentation": {
        "out_indices": [1, 2, 3, 4],
        "num_hidden_layers": 4,
    },
    "SegformerForSemanticSegmentation": {"decoder_hidden_size": 32},
}
UNIVERSAL: Models = {
    **_plain("EomtForUniversalSegmentation MaskFormerForInstanceSegmentation"),
    "Mask2FormerForUniversalSegmentation": _AS_IS,
}
DETECTION: Models = {
    **_plain("YolosForObjectDetection"),
    "DetrForObjectDetection": _LAST,
    "ConditionalDetrForObjectDetection": _LAST,
    "DabDetrForObjectDetection": _LAST,
    "TableTransformerForObjectDetection": _LAST,
    "DeformableDetrForObjectDetection": {
        "backbone_config": _resnet("stage2", "stage3", "stage4")
    },
    "RTDetrForObjectDetection": _AS_IS,
    "RTDetrV2ForObjectDetection": _AS_IS,
}
DEPTH: Models = {
    **_plain("DPTForDepthEstimation"),
    "GLPNForDepthEstimation": _AS_IS,
    "DepthAnythingForDepthEstimation": _AS_IS,
}
OTHERS: Models = _plain(
    "VitPoseForPoseEstimation Swin2SRForImageSuperResolution "
    "SuperPointForKeypointDetection"
)
MASKED: Models = {
    **_plain(
        "ViTForMaskedImageModeling "
        "DeiTForMaskedImageModeling FocalNetForMaskedImageModeling "
        "Swinv2ForMaskedImageModeling ViTMAEForPreTraining VideoMAEForPreTraining"
    ),
    "SwinForMaskedImageModeling": _WINDOWS,
}
VIDEO: Models = _plain(
    "TimesformerForVideoClassification VideoMAEForVideoClassification "
    "VivitForVideoClassification VJEPA2ForVideoClassification"
)

ENTRIES = [
    *small_entries("image classification", CLASSIFICATION),
    *small_entries("semantic segmentation", SEGMENTATION),
    *small_entries("universal segmentation", UNIVERSAL),
    *small_entries("object detection", DETECTION),
    *small_entries("depth", DEPTH),
    *small_entries("images to images and points", OTHERS),
    *small_entries("masked images", MASKED),
    *small_entries("video", VIDEO),
]

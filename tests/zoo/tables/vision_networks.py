"""Image networks written in plain torch, as torchvision and timm write them."""

from collections.abc import Callable
from functools import partial

from torch import nn

from tests.zoo.entry import Entry
from tests.zoo.networks import convolutional as conv
from tests.zoo.networks import more_convolutional as more
from tests.zoo.networks import video_and_masked as masked
from tests.zoo.networks import vision_transformers as vit


def _plain(name: str, build: Callable[[], nn.Module]) -> Entry:
    return Entry(f"plain {name}", "plain vision networks", build)


def _bottleneck(groups: int, *, se: bool) -> Callable[[], nn.Module]:
    block = partial(conv.Bottleneck, groups=groups, se=se)
    return partial(conv.StagedNet, block)


ENTRIES = [
    _plain("ResNet", partial(conv.StagedNet, conv.BasicBlock)),
    _plain("ResNet with bottlenecks", _bottleneck(1, se=False)),
    _plain("ResNeXt", _bottleneck(4, se=False)),
    _plain("RegNet", _bottleneck(2, se=True)),
    _plain("ResNet with pre-activation", partial(conv.StagedNet, conv.PreActivation)),
    _plain("EfficientNet", partial(conv.MobileNet, nn.SiLU)),
    _plain("MobileNetV2", partial(conv.MobileNet, nn.ReLU6)),
    _plain("MobileNetV3", partial(conv.MobileNet, nn.Hardswish)),
    _plain("ConvNeXt", conv.ConvNeXt),
    _plain("DenseNet", conv.DenseNet),
    _plain("GoogLeNet", more.GoogLeNet),
    _plain("AlexNet", more.AlexNet),
    _plain("LeNet", more.LeNet),
    _plain("CIFAR network", more.CifarNet),
    _plain("SqueezeNet", more.squeezenet),
    _plain("ShuffleNet", more.shufflenet),
    _plain("BiT", more.bit),
    _plain("feature pyramid", more.FeaturePyramid),
    _plain("U-Net", more.UNet),
    _plain("DeepLab", more.AtrousPyramid),
    _plain("HRNet", more.HighResolution),
    _plain("YOLO", more.Yolo),
    _plain("RAFT", more.Flow),
    _plain("ViT", vit.ViT),
    _plain("ViT of 224 pixels", partial(vit.ViT, 224)),
    _plain("DINO", partial(vit.ViT, 48, 4, dino=True)),
    _plain("Swin", vit.Swin),
    _plain("MLP-Mixer", vit.Mixer),
    _plain("ConvMixer", vit.conv_mixer),
    _plain("PoolFormer", vit.PoolFormer),
    _plain("PVT", vit.SpatialReduction),
    _plain("CaiT", vit.ClassAttention),
    _plain("video transformer", masked.VideoTransformer),
    _plain("MAE", masked.MaskedAutoencoder),
]

"""Models of torchvision and timm that capture was not written for, by name, with few blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.field.models import BATCH, CLASSES, SIDE, ImageLoss, Made, load_torchvision

__all__ = ["PICTURES"]


class _Outputs(nn.Module):
    """The cross entropy of the outputs of a model that returns several by name, the auxiliary ones with less weight."""

    def __init__(self, backbone: nn.Module, weights: dict[str, float]) -> None:
        super().__init__()
        self._backbone, self.weights = backbone, weights

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        made = self._backbone(images)
        outputs = made if isinstance(made, dict) else made._asdict()
        losses = [weight * F.cross_entropy(outputs[name], labels) for name, weight in self.weights.items()]
        return sum(losses[1:], losses[0])


def _images(side: int) -> tuple[Any, ...]:
    return (BATCH, 3, side, side), ((BATCH,), "int64")


def _torchvision(name: str, side: int = SIDE, **settings: Any) -> Made:
    library = load_torchvision()
    return ImageLoss(getattr(library.models, name)(num_classes=CLASSES, **settings)), _images(side)


def _dense_net() -> Made:
    net = load_torchvision().models.DenseNet(8, (2, 2), 16, num_classes=CLASSES)
    return ImageLoss(net), _images(SIDE)


def _inception() -> Made:
    net = load_torchvision().models.inception_v3(num_classes=CLASSES, init_weights=False)
    return _Outputs(net, {"logits": 1.0, "aux_logits": 0.4}), _images(299)


def _google_net() -> Made:
    net = load_torchvision().models.googlenet(num_classes=CLASSES, init_weights=False)
    return _Outputs(net, {"logits": 1.0, "aux_logits1": 0.3, "aux_logits2": 0.3}), _images(224)


def _max_vit() -> Made:
    net = load_torchvision().models.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    return ImageLoss(net), _images(64)


def _swin_2() -> Made:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    net = SwinTransformer(
        [4, 4], 32, [1, 1], [2, 4], [4, 4], num_classes=CLASSES, stochastic_depth_prob=0.0,
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip
    return ImageLoss(net), _images(SIDE)


def _video(name: str) -> Made:
    net = getattr(load_torchvision().models.video, name)(num_classes=CLASSES)
    return ImageLoss(net), ((BATCH, 3, 4, 32, 32), ((BATCH,), "int64"))


def _segmentation(name: str) -> Made:
    library = load_torchvision()
    net = getattr(library.models.segmentation, name)(weights=None, weights_backbone=None, num_classes=CLASSES)
    return _Outputs(net, {"out": 1.0}), ((BATCH, 3, SIDE, SIDE), ((BATCH, SIDE, SIDE), "int64"))


def _timm(name: str, side: int = SIDE, **settings: Any) -> Made:
    load_torchvision()
    import timm

    return ImageLoss(timm.create_model(name, num_classes=CLASSES, **settings)), _images(side)


PICTURES: dict[str, Callable[[], Made]] = {
    "AlexNet": lambda: _torchvision("alexnet", 96),
    "VGG": lambda: _torchvision("vgg11_bn"),
    "SqueezeNet": lambda: _torchvision("squeezenet1_1"),
    "MobileNet 2": lambda: _torchvision("mobilenet_v2"),
    "MobileNet 3": lambda: _torchvision("mobilenet_v3_small"),
    "EfficientNet": lambda: _torchvision("efficientnet_b0"),
    "RegNet": lambda: _torchvision("regnet_y_400mf"),
    "ShuffleNet": lambda: _torchvision("shufflenet_v2_x0_5"),
    "MNASNet": lambda: _torchvision("mnasnet0_5"),
    "DenseNet": _dense_net,
    "Inception": _inception,
    "GoogLeNet": _google_net,
    "MaxViT": _max_vit,
    "Swin 2 of torchvision": _swin_2,
    "ResNet for video": lambda: _video("r3d_18"),
    "ResNet (2+1)D": lambda: _video("r2plus1d_18"),
    "FCN": lambda: _segmentation("fcn_resnet50"),
    "DeepLab": lambda: _segmentation("deeplabv3_mobilenet_v3_large"),
    "LR-ASPP": lambda: _segmentation("lraspp_mobilenet_v3_large"),
    "timm MLP-Mixer": lambda: _timm("mixer_s32_224", img_size=SIDE),
    "timm ConvMixer": lambda: _timm("convmixer_768_32"),
    "timm ResMLP": lambda: _timm("resmlp_12_224", img_size=SIDE),
    "timm gMLP": lambda: _timm("gmlp_ti16_224", img_size=SIDE),
    "timm CaiT": lambda: _timm("cait_xxs24_224", img_size=SIDE, embed_dim=64, depth=2, num_heads=4),
    "timm XCiT": lambda: _timm("xcit_nano_12_p16_224", img_size=SIDE, embed_dim=64, depth=2, num_heads=4),
    "timm BEiT": lambda: _timm("beit_base_patch16_224", img_size=SIDE, embed_dim=64, depth=2, num_heads=4),
    "timm EVA": lambda: _timm("eva02_tiny_patch14_224", img_size=56, embed_dim=64, depth=2, num_heads=4, side=56),
    "timm NFNet": lambda: _timm("nfnet_l0"),
    "timm GhostNet": lambda: _timm("ghostnet_050"),
    "timm RepVGG": lambda: _timm("repvgg_a0"),
    "timm SE-ResNet": lambda: _timm("seresnet18"),
    "timm Twins": lambda: _timm("twins_svt_small", img_size=SIDE),
    "timm CrossViT": lambda: _timm("crossvit_9_240", side=240),
    "timm EdgeNeXt": lambda: _timm("edgenext_xx_small"),
    "timm DaViT": lambda: _timm("davit_tiny"),
    "timm FastViT": lambda: _timm("fastvit_t8"),
    "timm ConvNeXt 2": lambda: _timm("convnextv2_atto"),
    "timm EfficientNet 2": lambda: _timm("tf_efficientnetv2_b0"),
    "timm CoAtNet": lambda: _timm("coatnet_nano_rw_224", img_size=SIDE),
    "timm MobileNet 4": lambda: _timm("mobilenetv4_conv_small"),
    "timm InceptionNeXt": lambda: _timm("inception_next_atto"),
    "timm ResNeSt": lambda: _timm("resnest14d"),
    "timm Hiera": lambda: _timm("hiera_tiny_224", side=224),
}
"""Name -> what makes it."""

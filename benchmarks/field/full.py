"""Models in the sizes that people train, on the meta device, as `twofold plan FILE:FUNCTION` takes them.

Each function gives (module with its loss, example inputs as shapes), the inputs with a global batch of 512. Searches of
them are timed by `python -m benchmarks.search.modules`. transformers, torchvision and segmentation-models-pytorch are
imported where they are needed: they are not dependencies of the project.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.field.models import ImageLoss, Made, OwnLoss, load_torchvision, load_transformers
from executor.networks import no_init_parameters

__all__ = ["convnext_tiny", "hf_llama_3_8b", "seed_mlp", "swin_t", "unet_resnet34"]

BATCH = 512


def hf_llama_3_8b() -> Made:
    """Llama 3 8B of transformers, with its own loss."""
    library = load_transformers()
    config = library.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=5e5,
        tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        net = library.LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = ((BATCH, 8192), "int64")
    return OwnLoss(net), (tokens, tokens)


def swin_t() -> Made:
    """torchvision's Swin-T for 1,000 classes of 224 x 224 pixels."""
    with torch.device("meta"):
        net = load_torchvision().models.swin_t(num_classes=1000)
    return ImageLoss(net), ((BATCH, 3, 224, 224), ((BATCH,), "int64"))


def convnext_tiny() -> Made:
    """torchvision's ConvNeXt-Tiny for 1,000 classes of 224 x 224 pixels."""
    with torch.device("meta"):
        net = load_torchvision().models.convnext_tiny(num_classes=1000)
    return ImageLoss(net), ((BATCH, 3, 224, 224), ((BATCH,), "int64"))


def unet_resnet34() -> Made:
    """segmentation-models' U-Net on a ResNet-34 for 21 classes of the pixels of 256 x 256."""
    load_torchvision()
    import segmentation_models_pytorch

    with torch.device("meta"):
        net = segmentation_models_pytorch.Unet("resnet34", encoder_weights=None, classes=21)
    return ImageLoss(net), ((BATCH, 3, 256, 256), ((BATCH, 256, 256), "int64"))


class _Classifier(nn.Module):
    """The classifier of digits of MindSpore's tutorials: 784, 512, 512 and 10 wide, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.layers(images), labels)
        return loss


def seed_mlp() -> Made:
    """A classifier of digits with three linear layers."""
    with no_init_parameters():
        return _Classifier(), ((BATCH, 784), ((BATCH,), "int64"))

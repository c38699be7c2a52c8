"""The models, by name: each a function that gives (module with its loss, example inputs as shapes).

Sizes are small (2 layers, hidden 64 or less); nothing of a model is changed. transformers, torchvision, timm and
segmentation-models-pytorch are imported where they are needed: they are not dependencies of the project.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "BATCH", "CLASSES", "LENGTH", "MODELS", "SIDE", "VOCAB", "ImageLoss", "LanguageLoss", "Made", "OwnLoss",
    "from_config", "hugging_face", "load_torchvision", "load_transformers",
]  # fmt: skip

BATCH, LENGTH, VOCAB, SIDE, CLASSES = 64, 32, 256, 64, 10

Made = tuple[nn.Module, tuple[Any, ...]]

_TEXT = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))
_IMAGES = ((BATCH, 3, SIDE, SIDE), ((BATCH,), "int64"))


class LanguageLoss(nn.Module):
    """The cross entropy of the logits of a model of transformers."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self._backbone(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class OwnLoss(nn.Module):
    """The loss that a model of transformers makes of its labels."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._backbone(input_ids=ids, labels=labels).loss
        return loss


class ImageLoss(nn.Module):
    """The cross entropy of classes, or of the pixels' classes."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        made = self._backbone(images)
        return F.cross_entropy(getattr(made, "logits", made), labels)


def load_transformers() -> Any:
    """The library, after torchvision where it is there."""
    with contextlib.suppress(ImportError):
        load_torchvision()  # which transformers imports where it is there
    import transformers

    return transformers


def hugging_face(
    model_type: str, kind: str = "AutoModelForCausalLM", loss: type[nn.Module] = LanguageLoss, **keys: Any
) -> Made:  # fmt: skip
    """A model of transformers by its type and the class that trains it, with these keys in its configuration."""
    library = load_transformers()
    named = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = library.AutoConfig.for_model(model_type, **(named | keys))
    return loss(from_config(library, kind, config)), _TEXT


def from_config(library: Any, kind: str, config: Any) -> nn.Module:
    """A model of a class of transformers, or of one of its Auto classes."""
    made = getattr(library, kind)
    net: nn.Module = made.from_config(config) if kind.startswith("Auto") else made(config)
    return net


def _hf_vit() -> Made:
    library = load_transformers()
    config = library.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=SIDE,
        patch_size=16, num_labels=CLASSES,
    )  # fmt: skip
    return ImageLoss(library.ViTForImageClassification(config)), _IMAGES


_KEPT: list[torch.library.Library] = []
"""Definitions of operators, which last as long as their library object."""


@lru_cache(maxsize=1)
def load_torchvision() -> Any:
    """torchvision. A wheel for CUDA does not load its library on other machines; no model here uses its operators."""
    try:
        import torchvision
    except RuntimeError:  # it registers kernels of operators that its library would have defined
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        import torchvision
    return torchvision


def _torchvision(name: str) -> Made:
    return ImageLoss(getattr(load_torchvision().models, name)(num_classes=CLASSES)), _IMAGES


def _timm(name: str, **settings: Any) -> Made:
    load_torchvision()
    import timm

    return ImageLoss(timm.create_model(name, num_classes=CLASSES, **settings)), _IMAGES


def _segmentation() -> Made:
    load_torchvision()
    import segmentation_models_pytorch

    net = segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=CLASSES)
    return ImageLoss(net), (_IMAGES[0], ((BATCH, SIDE, SIDE), "int64"))


class _Swin(nn.Module):
    """torchvision's Swin with two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.swin_transformer import SwinTransformer

        self.net = SwinTransformer(
            patch_size=[4, 4], embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(images)
        return made


def _swin() -> Made:
    load_torchvision()
    return ImageLoss(_Swin()), _IMAGES


def _convnext() -> Made:
    load_torchvision()
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    net = ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)], num_classes=CLASSES)
    return ImageLoss(net), _IMAGES


def _vit_of_torchvision() -> Made:
    load_torchvision()
    from torchvision.models import VisionTransformer

    net = VisionTransformer(
        image_size=SIDE, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=CLASSES
    )
    return ImageLoss(net), _IMAGES


class Translator(nn.Module):
    """torch's Transformer between two embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 64), nn.Embedding(VOCAB, 64)
        self.net = nn.Transformer(64, 4, 2, 2, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        made = self.net(self.source(source), self.target(target), tgt_mask=mask)
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    """Predicts the next word by an LSTM or a GRU."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.table, self.net, self.head = nn.Embedding(VOCAB, 64), kind(64, 64, batch_first=True), nn.Linear(64, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        made, _ = self.net(self.table(ids))
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


class PlainLlama(nn.Module):
    """Llama as llama2.c writes it in torch: complex-free rotary positions, RMS norms, a gated MLP."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 64)
        self.layers = nn.ModuleList(_PlainBlock() for _ in range(num_layers))
        self.norm, self.head = _PlainNorm(), nn.Linear(64, VOCAB, bias=False)
        rates = 1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16)
        angles = torch.outer(torch.arange(LENGTH), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class _PlainNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class _PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(64, 64, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.w2, self.first, self.second = nn.Linear(128, 64, bias=False), _PlainNorm(), _PlainNorm()

    @staticmethod
    def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = cos.view(1, LENGTH, 1, -1), sin.view(1, LENGTH, 1, -1)
        return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).flatten(3)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        y = self.first(x)
        q, k, v = (w(y).view(batch, LENGTH, 4, 16) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in (self._turned(q, cos, sin), self._turned(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(batch, LENGTH, 64))
        y = self.second(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class NanoGPT(nn.Module):
    """nanoGPT's model: one product for queries, keys and values, learned positions, a tied head."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 64), nn.Embedding(LENGTH, 64)
        self.h = nn.ModuleList(_NanoBlock() for _ in range(num_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(64), nn.Linear(64, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-1)


class _NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.c_attn, self.c_proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (each.view(batch, length, 4, width // 4).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class VAE(nn.Module):
    """A variational autoencoder; the noise is an input. Mean squared error plus the divergence's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.encode(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        made = self.decode(mean + noise * torch.exp(0.5 * spread))
        divergence = -0.5 * torch.mean(1 + spread - mean.pow(2) - spread.exp())
        return F.mse_loss(made, x) + divergence


class Discriminator(nn.Module):
    """One step of a GAN: the discriminator on real and made samples, the generator frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64)).requires_grad_(False)
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        good, bad = self.judge(real), self.judge(self.make(noise).detach())
        return 0.5 * (
            F.binary_cross_entropy_with_logits(good, torch.ones_like(good))
            + F.binary_cross_entropy_with_logits(bad, torch.zeros_like(bad))
        )


class Distillation(nn.Module):
    """A student that learns from a frozen teacher under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        made = self.student(x)
        return 0.5 * F.mse_loss(made, wanted) + 0.5 * F.cross_entropy(made, labels)


class Smoothed(nn.Module):
    """Label smoothing and class weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), labels, label_smoothing=0.1)


_ROWS = ((BATCH, 64), ((BATCH,), "int64"))
_NOISY = ((BATCH, 64), (BATCH, 8))
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS: dict[str, Callable[[], Made]] = {
    "transformers Llama": lambda: hugging_face("llama"),
    "transformers Llama, own loss": lambda: hugging_face("llama", loss=OwnLoss),
    "transformers Qwen2": lambda: hugging_face("qwen2"),
    "transformers Qwen3": lambda: hugging_face("qwen3", head_dim=16),
    "transformers Mistral": lambda: hugging_face("mistral", head_dim=16),
    "transformers Gemma2": lambda: hugging_face("gemma2", head_dim=16),
    "transformers Phi-3": lambda: hugging_face("phi3"),
    "transformers GPT-2": lambda: hugging_face("gpt2", **_GPT2, attn_pdrop=0.0),
    "transformers GPT-NeoX": lambda: hugging_face("gpt_neox"),
    "transformers OPT": lambda: hugging_face("opt", ffn_dim=128, word_embed_proj_dim=64, dropout=0.0),
    "transformers BERT": lambda: hugging_face(
        "bert", "AutoModelForMaskedLM", OwnLoss, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "transformers T5": lambda: hugging_face(
        "t5", "AutoModelForSeq2SeqLM", OwnLoss, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    ),
    "transformers ViT": _hf_vit,
    "transformers Mixtral": lambda: hugging_face("mixtral", num_local_experts=4, head_dim=16),
    "transformers Qwen2-MoE": lambda: hugging_face(
        "qwen2_moe", num_experts=4, shared_expert_intermediate_size=32, **_EXPERTS
    ),
    "transformers DeepSeek-V3": lambda: hugging_face(
        "deepseek_v3", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        **_EXPERTS,
    ),
    "torchvision ResNet-18": lambda: _torchvision("resnet18"),
    "torchvision ResNet-50": lambda: _torchvision("resnet50"),
    "torchvision ViT": _vit_of_torchvision,
    "torchvision ConvNeXt": _convnext,
    "torchvision Swin": _swin,
    "segmentation-models U-Net": _segmentation,
    "timm ViT": lambda: _timm(
        "vit_tiny_patch16_224", img_size=SIDE, embed_dim=64, depth=2, num_heads=4
    ),
    "torch Transformer": lambda: (Translator(), (_TEXT[0], *_TEXT)),
    "plain Llama": lambda: (PlainLlama(), _TEXT),
    "nanoGPT": lambda: (NanoGPT(), _TEXT),
    "LSTM": lambda: (Recurrent(nn.LSTM), _TEXT),
    "GRU": lambda: (Recurrent(nn.GRU), _TEXT),
    "VAE": lambda: (VAE(), _NOISY),
    "GAN, discriminator": lambda: (Discriminator(), _NOISY),
    "distillation": lambda: (Distillation(), _ROWS),
    "label smoothing": lambda: (Smoothed(), _ROWS),
}  # fmt: skip
"""Name -> what makes it."""

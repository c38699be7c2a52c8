"""Models of transformers in small sizes that capture was not written for, by name.

Two layers of width 64 or less; no weight is loaded and nothing of a model is changed. Each entry is a function that
gives (module with its loss, example inputs as shapes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.field.models import (
    BATCH,
    CLASSES,
    LENGTH,
    SIDE,
    VOCAB,
    ImageLoss,
    LanguageLoss,
    Made,
    OwnLoss,
    from_config,
    hugging_face,
    load_transformers,
)

__all__ = ["FAMILIES"]

_IMAGES = ((BATCH, 3, SIDE, SIDE), ((BATCH,), "int64"))
_SAMPLES = 1_600
_NO_DROPOUT = dict.fromkeys(
    (
        "dropout", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop",
        "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop", "encoder_layerdrop",
        "decoder_layerdrop", "dropout_rate", "classifier_dropout", "classifier_dropout_prob", "drop_path_rate",
        "feat_proj_dropout", "final_dropout", "mask_time_prob",
    ), 0.0,
)  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


class LabelledClasses(nn.Module):
    """The cross entropy of one class for each sample, whatever the sample is."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._backbone(x).logits, labels)


class Pooled(nn.Module):
    """A linear classifier on the mean of the last hidden states."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone, self.head = backbone, nn.Linear(backbone.config.hidden_size, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self._backbone(x).last_hidden_state.mean(1)), labels)


class Speech(nn.Module):
    """Speech to text by features and labels."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._backbone(input_features=features, labels=labels).loss
        return loss


class Pixels(nn.Module):
    """A class for every pixel, in the loss of the model itself."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._backbone(pixel_values=images, labels=labels).loss
        return loss


class Series(nn.Module):
    """A forecast of what follows a series."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._backbone(past_values=past, future_values=future).loss
        return loss


def _text(
    model_type: str, kind: str = "AutoModelForCausalLM", loss: type[nn.Module] = LanguageLoss, **keys: Any
) -> Made:  # fmt: skip
    return hugging_face(model_type, kind, loss, **(_NO_DROPOUT | keys))


def _masked(model_type: str, **keys: Any) -> Made:
    return _text(model_type, "AutoModelForMaskedLM", OwnLoss, **({"type_vocab_size": 2} | keys))


def _translates(model_type: str, **keys: Any) -> Made:
    sizes = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 0,
        "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
    }  # fmt: skip
    return _text(model_type, "AutoModelForSeq2SeqLM", OwnLoss, **(sizes | keys))


def _vision(
    model_type: str, kind: str = "AutoModelForImageClassification", loss: type[nn.Module] = ImageLoss,
    labels: Any = _IMAGES[1], **keys: Any,
) -> Made:  # fmt: skip
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "image_size": SIDE, "patch_size": 16, "num_labels": CLASSES,
    }  # fmt: skip
    library = load_transformers()
    given = {key: value for key, value in (sizes | _NO_DROPOUT | keys).items() if value is not None}
    config = library.AutoConfig.for_model(model_type, **given)
    return loss(from_config(library, kind, config)), (_IMAGES[0], labels)


def _sound(model_type: str) -> Made:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_labels": CLASSES,
        "classifier_proj_size": 32,
    }  # fmt: skip
    library = load_transformers()
    config = library.AutoConfig.for_model(model_type, **(sizes | _NO_DROPOUT))
    net = from_config(library, "AutoModelForAudioClassification", config)
    return LabelledClasses(net), ((BATCH, _SAMPLES), ((BATCH,), "int64"))


def _whisper() -> Made:
    library = load_transformers()
    config = library.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=32,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    net = library.WhisperForConditionalGeneration(config)
    return Speech(net), ((BATCH, 16, 64), ((BATCH, LENGTH), "int64"))


def _patches_of_series() -> Made:
    library = load_transformers()
    config = library.PatchTSTConfig(
        num_input_channels=3, context_length=32, prediction_length=8, patch_length=8, patch_stride=8, d_model=32,
        num_attention_heads=4, ffn_dim=64, num_hidden_layers=2, attention_dropout=0.0, head_dropout=0.0, ff_dropout=0.0,
    )  # fmt: skip
    return Series(library.PatchTSTForPrediction(config)), ((BATCH, 32, 3), (BATCH, 8, 3))


def _xlnet() -> Made:
    library = load_transformers()
    config = library.XLNetConfig(vocab_size=VOCAB, d_model=64, n_layer=2, n_head=4, d_inner=128, dropout=0.0)
    return OwnLoss(library.XLNetLMHeadModel(config)), (((BATCH, LENGTH), "int64"),) * 2


def _segments() -> Made:
    return _vision(
        "segformer", "SegformerForSemanticSegmentation", Pixels, ((BATCH, SIDE, SIDE), "int64"), hidden_sizes=[16, 32],
        depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1], num_attention_heads=[1, 2], patch_sizes=[7, 3],
        strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=32,
    )  # fmt: skip


class Matched(nn.Module):
    """Texts and images of a batch, each against all others, in the loss of the model itself."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._backbone = backbone

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._backbone(input_ids=ids, pixel_values=images, return_loss=True).loss
        return loss


def _clip() -> Made:
    library = load_transformers()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = sizes | {"vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = library.CLIPConfig(
        text_config=text, vision_config=sizes | {"image_size": SIDE, "patch_size": 16}, projection_dim=32
    )
    return Matched(library.CLIPModel(config)), (((BATCH, LENGTH), "int64"), _IMAGES[0])


DECODERS: dict[str, Callable[[], Made]] = {
    "Gemma 3": lambda: _text("gemma3_text", head_dim=16, sliding_window=8),
    "Phi-2": lambda: _text("phi", partial_rotary_factor=0.5),
    "Phi-4": lambda: _text("phi3", partial_rotary_factor=0.75, tie_word_embeddings=True),
    "Cohere 2": lambda: _text("cohere2", sliding_window=8),
    "OLMo": lambda: _text("olmo"),
    "OLMo 2": lambda: _text("olmo2"),
    "OLMo 3": lambda: _text("olmo3", sliding_window=8),
    "Granite": lambda: _text("granite"),
    "StarCoder 2": lambda: _text("starcoder2"),
    "Falcon": lambda: _text("falcon"),
    "Falcon with ALiBi": lambda: _text("falcon", alibi=True),
    "BLOOM": lambda: _text("bloom", n_layer=2, n_head=4),
    "MPT": lambda: _text("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=64),
    "GPT-J": lambda: _text("gptj", n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8),
    "CodeGen": lambda: _text("codegen", n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8),
    "GPT-Neo": lambda: _text(
        "gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8
    ),
    "SantaCoder": lambda: _text("gpt_bigcode", n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "StableLM": lambda: _text("stablelm"),
    "Persimmon": lambda: _text("persimmon"),
    "XGLM": lambda: _text("xglm", d_model=64, num_layers=2, attention_heads=4, ffn_dim=128),
    "CTRL": lambda: _text("ctrl", n_embd=64, n_layer=2, n_head=4, dff=128, n_positions=64),
    "GLM": lambda: _text("glm", head_dim=16),
    "GLM 4": lambda: _text("glm4", head_dim=16),
    "Nemotron": lambda: _text("nemotron"),
    "Arcee": lambda: _text("arcee"),
    "EXAONE 4": lambda: _text("exaone4", sliding_window=8),
    "SmolLM 3": lambda: _text("smollm3"),
    "Helium": lambda: _text("helium", head_dim=16),
    "Apertus": lambda: _text("apertus"),
    "Seed-OSS": lambda: _text("seed_oss", head_dim=16),
    "DiffLlama": lambda: _text("diffllama"),
    "BitNet": lambda: _text("bitnet"),
    "LFM 2": lambda: _text("lfm2", full_attn_idxs=[1]),
    "XLNet": _xlnet,
    "Gemma": lambda: _text("gemma", head_dim=16),
    "Cohere": lambda: _text("cohere"),
    "ERNIE 4.5": lambda: _text("ernie4_5", head_dim=16),
}

EXPERTS: dict[str, Callable[[], Made]] = {
    "JetMoE": lambda: _text("jetmoe", kv_channels=16, num_local_experts=4),
    "OLMoE": lambda: _text("olmoe", num_experts=4, num_experts_per_tok=2),
    "Granite-MoE": lambda: _text("granitemoe", num_local_experts=4),
    "Phi-MoE": lambda: _text("phimoe", num_local_experts=4),
    "Qwen3-MoE": lambda: _text("qwen3_moe", num_experts=4, head_dim=16, **_EXPERTS),
    "Mixtral, loss with balance": lambda: _text(
        "mixtral", loss=OwnLoss, num_local_experts=4, head_dim=16, output_router_logits=True
    ),
    "gpt-oss": lambda: _text("gpt_oss", num_local_experts=4, head_dim=16, sliding_window=8),
    "DeepSeek-V2": lambda: _text(
        "deepseek_v2", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        **_EXPERTS,
    ),
    "GLM 4 MoE": lambda: _text(
        "glm4_moe", head_dim=16, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1, **_EXPERTS
    ),
    "Llama 4": lambda: _text(
        "llama4_text", head_dim=16, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=128,
        attention_chunk_size=16,
    ),
    "DBRX": lambda: _text(
        "dbrx", d_model=64, n_heads=4, n_layers=2, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        ffn_config={"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    ),
}  # fmt: skip

RECURRENT: dict[str, Callable[[], Made]] = {
    "Mamba": lambda: _text("mamba", state_size=8),
    "Mamba 2": lambda: _text("mamba2", state_size=8, head_dim=16, num_heads=8, n_groups=2, chunk_size=8),
    "RWKV": lambda: _text("rwkv", attention_hidden_size=64, context_length=64),
    "Qwen3-Next": lambda: _text(
        "qwen3_next", head_dim=16, num_experts=4, shared_expert_intermediate_size=32, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, full_attention_interval=2,
        **_EXPERTS,
    ),
    "Bamba": lambda: _text(
        "bamba", mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
        attn_layer_indices=[1],
    ),
    "Zamba 2": lambda: _text(
        "zamba2", mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=8, mamba_headdim=16, chunk_size=8,
        layers_block_type=["mamba", "hybrid"],
    ),
    "RecurrentGemma": lambda: _text("recurrent_gemma", lru_width=64, attention_window_size=8, head_dim=16),
}  # fmt: skip

ENCODERS: dict[str, Callable[[], Made]] = {
    "RoBERTa": lambda: _masked("roberta", max_position_embeddings=66),
    "DistilBERT": lambda: _masked("distilbert", dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    "DistilBERT with dropout": lambda: _masked(
        "distilbert", dim=64, n_layers=2, n_heads=4, hidden_dim=128, dropout=0.1, attention_dropout=0.1
    ),
    "ALBERT": lambda: _masked("albert", embedding_size=32),
    "ELECTRA": lambda: _masked("electra", embedding_size=32),
    "DeBERTa": lambda: _masked("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "DeBERTa 2": lambda: _masked("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "MPNet": lambda: _masked("mpnet", max_position_embeddings=66),
    "FNet": lambda: _masked("fnet"),
    "ESM": lambda: _masked("esm", mask_token_id=3, position_embedding_type="rotary", max_position_embeddings=66),
    "ModernBERT": lambda: _masked("modernbert", local_attention=8, global_attn_every_n_layers=2),
    "RoFormer": lambda: _masked("roformer", embedding_size=64),
    "I-BERT": lambda: _masked("ibert", max_position_embeddings=66),
    "Longformer": lambda: _masked("longformer", attention_window=[8, 8], max_position_embeddings=66),
    "BigBird": lambda: _masked("big_bird", attention_type="block_sparse", block_size=4, num_random_blocks=1),
    "ConvBERT": lambda: _masked("convbert", embedding_size=64),
    "LongT5": lambda: _translates("longt5", local_radius=4, encoder_attention_type="local"),
    "M2M-100": lambda: _translates("m2m_100"),
    "BART": lambda: _translates("bart"),
    "Pegasus": lambda: _translates("pegasus"),
    "mT5": lambda: _translates("mt5"),
    "UMT5": lambda: _translates("umt5"),
    "Marian": lambda: _translates("marian"),
}

SIGNALS: dict[str, Callable[[], Made]] = {
    "Whisper": _whisper,
    "Wav2Vec 2": lambda: _sound("wav2vec2"),
    "HuBERT": lambda: _sound("hubert"),
    "WavLM": lambda: _sound("wavlm"),
    "PatchTST": _patches_of_series,
    "CLIP, vision": lambda: _vision("clip_vision_model", "CLIPVisionModel", Pooled),
    "CLIP": _clip,
    "SigLIP, vision": lambda: _vision("siglip_vision_model", "SiglipVisionModel", Pooled),
    "DINOv2": lambda: _vision("dinov2"),
    "BEiT": lambda: _vision("beit", use_relative_position_bias=True),
    "DeiT": lambda: _vision("deit", "DeiTForImageClassification"),
    "Swin 2": lambda: _vision(
        "swinv2", "Swinv2ForImageClassification", num_attention_heads=None, embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=4, patch_size=4, num_hidden_layers=None,
    ),
    "SegFormer": _segments,
    "MobileViT": lambda: _vision(
        "mobilevit", hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 8, 16, 24, 32, 40, 64], patch_size=2
    ),
    "ConvNeXt 2": lambda: _vision("convnextv2", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4),
    "PoolFormer": lambda: _vision("poolformer", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], patch_size=16),
    "PVT 2": lambda: _vision(
        "pvt_v2", num_attention_heads=[1, 1, 2, 4], hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], patch_size=4
    ),
    "FocalNet": lambda: _vision(
        "focalnet", embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[16, 32],
        patch_size=4,
    ),
    "LeViT": lambda: _vision(
        "levit", "LevitForImageClassification", drop_path_rate=0, patch_size=16, hidden_sizes=[32, 48, 64],
        num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8], hidden_size=None, mlp_ratio=[2, 2, 2],
    ),
}  # fmt: skip

FAMILIES = DECODERS | EXPERTS | RECURRENT | ENCODERS | SIGNALS
"""Name -> what makes it."""

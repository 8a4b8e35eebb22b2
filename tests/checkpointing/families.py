"""Models of transformers, tiny: how to make and call each, and what must be found in it without being told."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


class Family(NamedTuple):
    """A model, tiny, and the stacks that must be found in it."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    stacks: dict[str, tuple[str, int]]
    """Path of a stack -> class of its blocks and their number."""


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """A scalar that depends on every output of the model."""
    output = module(**batch)
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = [value for value in output.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return torch.stack([value.float().square().mean() for value in values]).sum()


def ids(vocabulary: int = 32, batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def text_batch() -> Batch:
    """Token ids with labels and one padded row: the mask is then not trivial."""
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def encoder_batch() -> Batch:
    batch = text_batch()
    del batch["labels"]
    return batch


def image_batch(size: int = 16) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size)}


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def causal(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A causal language model of transformers from a configuration class. The cache is off, as it is in training."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{**SMALL, **TOKENS, "use_cache": False, **settings})
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def bare(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of transformers by the name of its class."""

    def make() -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        return cls(cls.config_class(**settings))

    return make


def whisper_batch() -> Batch:
    return {"input_features": torch.randn(2, 8, 12), "decoder_input_ids": ids(), "labels": ids()}


def llava() -> nn.Module:
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "use_cache": False})
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    return transformers.LlavaForConditionalGeneration(config)


def llava_batch() -> Batch:
    """Four image tokens: an 8 x 8 image in patches of 4, without the class token."""
    tokens = torch.randint(6, 32, (2, 8))
    tokens[:, 1:5] = 5
    return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8), "labels": tokens}


def clip() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 32, "max_position_embeddings": 16, **TOKENS}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config)


def clip_batch() -> Batch:
    tokens = ids()
    return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8), "attention_mask": torch.ones_like(tokens)}


TRANSFORMERS: dict[str, Family] = {
    "Llama": Family(causal("Llama", num_key_value_heads=1), text_batch, {"model.layers": ("LlamaDecoderLayer", 3)}),
    "Qwen3": Family(
        causal("Qwen3", num_key_value_heads=1, head_dim=8), text_batch, {"model.layers": ("Qwen3DecoderLayer", 3)}
    ),
    "Mistral": Family(
        causal("Mistral", num_key_value_heads=1, sliding_window=4),
        text_batch,
        {"model.layers": ("MistralDecoderLayer", 3)},
    ),
    "Gemma": Family(
        causal("Gemma", num_key_value_heads=1, head_dim=8), text_batch, {"model.layers": ("GemmaDecoderLayer", 3)}
    ),
    "GPT-2": Family(
        causal("GPT2", loss_type="ForCausalLM", n_embd=16, n_layer=3, n_head=2, n_positions=32),
        text_batch,
        {"transformer.h": ("GPT2Block", 3)},
    ),
    "GPT-NeoX": Family(causal("GPTNeoX"), text_batch, {"gpt_neox.layers": ("GPTNeoXLayer", 3)}),
    "Phi": Family(causal("Phi"), text_batch, {"model.layers": ("PhiDecoderLayer", 3)}),
    "OPT": Family(
        causal("OPT", ffn_dim=24, word_embed_proj_dim=16),
        text_batch,
        {"model.decoder.layers": ("OPTDecoderLayer", 3)},
    ),
    "BERT": Family(bare("BertForMaskedLM", **SMALL), text_batch, {"bert.encoder.layer": ("BertLayer", 3)}),
    "RoBERTa": Family(
        bare("RobertaForMaskedLM", **SMALL, **TOKENS), text_batch, {"roberta.encoder.layer": ("RobertaLayer", 3)}
    ),
    "ModernBERT": Family(
        bare("ModernBertForMaskedLM", **SMALL, **TOKENS, cls_token_id=1, sep_token_id=2),
        text_batch,
        {"model.layers": ("ModernBertEncoderLayer", 3)},
    ),
    "DeBERTa-v2": Family(
        bare(
            "DebertaV2Model",
            **SMALL,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
        ),
        encoder_batch,
        {"encoder.layer": ("DebertaV2Layer", 3)},
    ),
    "T5": Family(
        bare(
            "T5ForConditionalGeneration",
            vocab_size=32,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=3,
            num_decoder_layers=2,
            num_heads=2,
            use_cache=False,
            decoder_start_token_id=0,
        ),
        text_batch,
        {"encoder.block": ("T5Block", 3), "decoder.block": ("T5Block", 2)},
    ),
    "BART": Family(
        bare(
            "BartForConditionalGeneration",
            vocab_size=32,
            d_model=16,
            encoder_layers=3,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
            use_cache=False,
            pad_token_id=0,
            decoder_start_token_id=2,
        ),
        text_batch,
        {"model.encoder.layers": ("BartEncoderLayer", 3), "model.decoder.layers": ("BartDecoderLayer", 2)},
    ),
    "Whisper": Family(
        bare(
            "WhisperForConditionalGeneration",
            vocab_size=32,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=3,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=6,
            max_target_positions=16,
            use_cache=False,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **TOKENS,
        ),
        whisper_batch,
        {"model.encoder.layers": ("WhisperEncoderLayer", 3), "model.decoder.layers": ("WhisperDecoderLayer", 2)},
    ),
    "ViT": Family(
        bare(
            "ViTModel",
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=16,
            patch_size=4,
        ),
        image_batch,
        {"layers": ("ViTLayer", 3)},
    ),
    "Swin": Family(
        bare(
            "SwinModel",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 3],
            num_heads=[1, 2],
            window_size=4,
            drop_path_rate=0.2,
        ),
        image_batch,
        {"encoder.layers.0.blocks": ("SwinLayer", 2), "encoder.layers.1.blocks": ("SwinLayer", 3)},
    ),
    "CLIP": Family(
        clip,
        clip_batch,
        {"text_model.encoder.layers": ("CLIPEncoderLayer", 2), "vision_model.encoder.layers": ("CLIPEncoderLayer", 2)},
    ),
    "Qwen3-MoE": Family(
        causal(
            "Qwen3Moe",
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            mlp_only_layers=[0],
        ),
        text_batch,
        {"model.layers": ("Qwen3MoeDecoderLayer", 3)},
    ),
    "LFM2 (convolutions and attention)": Family(
        causal("Lfm2", num_key_value_heads=1, layer_types=["conv", "full_attention", "conv"]),
        text_batch,
        {"model.layers": ("Lfm2DecoderLayer", 3)},
    ),
    "LLaVA (vision and language)": Family(
        llava,
        llava_batch,
        {
            "model.vision_tower.encoder.layers": ("CLIPEncoderLayer", 3),
            "model.language_model.layers": ("LlamaDecoderLayer", 3),
        },
    ),
}

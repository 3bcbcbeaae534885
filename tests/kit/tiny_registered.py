"""Tiny random checkpoints of the image-text architectures that transformers registers, with their own processors.

processor = tiny_registered.write(folder, "aya_vision")
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from inspect import getsource, signature
from pathlib import Path
from typing import Any

import torch

from torchvision_operators import HAS_TORCHVISION as HAS_TORCHVISION  # isort: skip, before transformers
import transformers
from transformers.models.auto import feature_extraction_auto, image_processing_auto, processing_auto
from transformers.models.auto import video_processing_auto as videos_auto
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import tiny_checkpoints
import tiny_foreign
import tiny_tokenizers

ARCHITECTURES: Mapping[str, str] = {
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "phi4_multimodal": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["phi4_multimodal"],
}
# transformers' names of classes by model type.
REGISTERED: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
PICTURES: Any = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]
VIDEOS: Any = vars(videos_auto)["VIDEO_PROCESSOR_MAPPING_NAMES"]
SOUNDS: Any = vars(feature_extraction_auto)["FEATURE_EXTRACTOR_MAPPING_NAMES"]
BASE_VOCABULARY = 400
MARKS = re.compile(r"""["'](<[^<>\s"'{}]+>|\[[A-Z_]+\])["']""")  # names of special tokens in a processor's code
READ = re.compile(r"""tokenizer\.(\w+_token)\b|tokenizer, ["'](\w+_token)["']""")  # and of attributes
USUAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "add_bos_token", "add_eos_token")
TOKENS: dict[str, Mapping[str, str]] = {  # further attributes of tokenizers
    "fuyu": {"speaker_token": "|SPEAKER|", "newline_token": "|NEWLINE|"},
}
MORE_TOKENS: dict[str, Sequence[str]] = {  # special tokens that `MARKS` does not find in a processor's code
    "minimax_m3_vl": ("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
    "ovis2": ("<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
}
# Model type -> special tokens that its processor puts in every prompt, or from whose id it counts.
NEEDED = {
    "kosmos-2": {"bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"},
    "paligemma": {"bos_token": "<|im_start|>"},
}
UNNAMED = ("blip-2", "cohere_compass")  # model types whose tokenizers have no attribute for the image token
# Model types whose processors are those of another one, or are registered under another name.
PROCESSORS = {
    "cosmos3_omni": "Qwen3VLProcessor", "glm_ocr": "Glm46VProcessor", "glmga": "Glm46VProcessor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor", "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
    "phi4_multimodal": "Phi4MultimodalProcessor", "fast_vlm": "LlavaProcessor", "kosmos-2": "Kosmos2Processor",
    "kosmos-2.5": "Kosmos2_5Processor",
}  # fmt: skip
ALIKE = {
    "glm4v_moe": "glm4v", "glm_ocr": "glm46v", "qwen3_vl_moe": "qwen3_vl", "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe", "diffusion_gemma": "gemma4", "fast_vlm": "llava",
}  # fmt: skip
_WHOLE = {"longest_edge": 512}
IMAGES: dict[str, Mapping[str, Any]] = {  # options of image processors
    "dots3_note": {"temporal_patch_size": 1},
    "fast_vlm": {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}},
    "gemma3n": {"size": {"height": 128, "width": 128}},
    "paligemma": {"image_seq_length": 196},
    "perception_lm": {"tile_size": 64, "max_num_tiles": 2},
    "qianfan_ocr": {"size": {"height": 448, "width": 448}, "max_patches": 1},
    "smolvlm": {"size": _WHOLE, "max_image_size": _WHOLE, "do_image_splitting": False},
}
OPTIONS: dict[str, Mapping[str, Any]] = {  # options of processors
    "granite_docling": {"image_seq_len": 64},
    "fast_vlm": {"patch_size": 32, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"},
    "gemma3n": {"image_seq_length": 16},
    "idefics2": {"image_seq_len": 64},
    "perception_lm": {"patch_size": 16},
    "smolvlm": {"image_seq_len": 256},
    "vipllava": {"vision_feature_select_strategy": "default"},
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
_QWEN_3_5 = {"text_config": {"rope_parameters": _SECTIONS}}
_CLIP = {"vision_config": {"image_size": 336, "patch_size": 14}}
# Model type -> {configuration field: its token or tokens}, if the processor has no attribute with the field's name.
TOKEN_IDS: dict[str, Mapping[str, str | Sequence[str]]] = {
    "blip-2": {"image_token_index": "<image>"},
    "molmo2": {"image_patch_id": "<im_patch>"},
    "ovis2": {
        "image_token_id": "<IMG_ATOM>",
        "visual_indicator_token_ids": ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
    },
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": "<vision_bos_token>",
        "audio_start_token_id": "<audio_bos_token>",
    },
    "qwen3_omni_moe_thinker": {
        "vision_start_token_id": "<vision_bos_token>",
        "audio_start_token_id": "<audio_bos_token>",
    },
}
CONFIG: dict[str, Mapping[str, Any]] = {  # fields of configurations
    "aria": {"vision_config": {"image_size": 980, "patch_size": 14}},
    "cohere2_vision": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "fast_vlm": {"vision_config": {"architecture": "test_convnext", "hidden_size": 64, "model_args": {}}},
    "gemma3n": {
        "vision_config": {"architecture": "test_convnext", "hidden_size": 64, "vocab_offset": 400},
        "audio_config": {"vocab_offset": 528},
        "text_config": {"vocab_size": 656, "vocab_size_per_layer_input": 400},
        "vision_soft_tokens_per_image": 16,
    },
    "gemma4": {
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 64, "num_hidden_layers": 2},
        "text_config": {"vocab_size_per_layer_input": 512, "pad_token_id": 3},
    },
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision", "hidden_size": 64}},
    "apertus1p5": {
        "image_token_offset": 448,
        "audio_token_offset": 512,
        "text_config": {"vocab_size": 640},
        "vision_config": {"codebook_size": 64},
        "audio_config": {"codebook_dim": 64, "codebook_size": 64},
    },
    "deepseek_ocr2": {"vision_config": {"sam_config": {"downsample_channels": [32, 64]}}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "granite4_vision": _CLIP,
    "dots3_note": {
        "vision_config": {"pyramid_num_routed": [-1, 4], "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "hy_v4_vl": {"text_config": {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1]}}},
    "inkling2": {"text_config": {"unpadded_vocab_size": 400}},
    "inkling2_loop": {"text_config": {"unpadded_vocab_size": 400}},
    "kimi_k25": {"projection_hidden_size": 64},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "nemotron_h_omni": {"vision_hidden_size": 64},
    "llava_next_video": _CLIP,
    "minicpm_ocr": {"text_config": {"tie_word_embeddings": True}},
    "minicpmv4_7": _QWEN_3_5,
    "qwen3_5_moe": {
        "text_config": {"rope_parameters": _SECTIONS, "layer_types": ["linear_attention", "full_attention"]}
    },
    "qwen4_exp": _QWEN_3_5,
    "paligemma": {"projection_dim": 64, "vision_config": {"projection_dim": 64}},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {
                "embed_dim": 64,
                "depth": 2,
                "num_heads": 4,
                "img_size": [64, 64],
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
                "ref_feat_shape": [4, 4],
            },
        },
        "projector_pooling_ratio": 2,
    },
    "glm5_next": {
        "text_config": {
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "index_topk": 256,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
        },
        "vision_config": {"projection_intermediate_size": 64},
    },
    "phi4_multimodal": {"vision_config": {"num_hidden_layers": 3, "image_size": 448, "patch_size": 14}},
    "smolvlm": {"vision_config": {"image_size": 512, "patch_size": 16}},
    "vipllava": {"vision_config": {"num_hidden_layers": 12}},
}


# Model type -> first id of the tokens that are parts of images or audio, never text.
NO_TEXT_FROM = {"gemma3n": 400}


class CannotBuild(Exception):
    """Says why there is no tiny checkpoint of an architecture."""


def write(folder: Path, model_type: str, text: Mapping[str, Any] | None = None) -> Any:
    """Write a checkpoint with tokenizer and processor, and return the processor. Raises CannotBuild with the reason.

    `text` has further fields of the configuration's text part.
    """
    kind = _processor_class(model_type)
    tokenizer = _tokenizer(folder, getsource(sys.modules[kind.__module__]), model_type)
    small = {**tiny_foreign.SMALL, "vocab_size": len(tokenizer), "max_position_embeddings": 8192}
    small |= {"out_hidden_size": 64, "text_hidden_size": 64}
    changes = dict(CONFIG.get(model_type, {}))
    if text:
        changes["text_config"] = {**changes.get("text_config", {}), **text}
    config = tiny_foreign.config(model_type, small, **changes)
    processor = _processor(folder, kind, tokenizer, config)
    _set_tokens(config, processor, tokenizer)
    for name, token in TOKEN_IDS.get(model_type, {}).items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    model = auto_class(model_type).from_config(config, dtype=torch.float32)
    tiny_checkpoints.redraw(model, 0)
    if model_type in NO_TEXT_FROM:  # so that greedy decoding never chooses such a token
        model.get_output_embeddings().weight.data[NO_TEXT_FROM[model_type] :] = 0
    model.save_pretrained(folder)
    return processor


def auto_class(model_type: str) -> Any:
    """Return the auto class of transformers for a model type."""
    seeing = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForMultimodalLM


def _processor_class(model_type: str) -> Any:
    name = PROCESSORS.get(model_type) or REGISTERED.get(model_type)
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if kind is None:
        raise CannotBuild("transformers registers no processor for it")
    return kind


def _tokenizer(folder: Path, code: str, model_type: str) -> Any:
    """Write a byte-level tokenizer with the special tokens that a processor's code names, and return it."""
    from tokenizers import AddedToken

    read = {one or other for one, other in READ.findall(code)} - {*USUAL}
    named = {"image_token": "<image>", **{name: f"<{name}>" for name in sorted(read - {"image_token"})}}
    named |= TOKENS.get(model_type, {})
    texts = (*MARKS.findall(code), *named.values(), *MORE_TOKENS.get(model_type, ()))
    marks = [AddedToken(text, special=True, normalized=False) for text in texts]
    tiny_tokenizers.write(folder, "byte_bpe", BASE_VOCABULARY)
    backend, _ = tiny_tokenizers.build("byte_bpe", BASE_VOCABULARY)
    backend.add_special_tokens(list({mark.content: mark for mark in marks}.values()))
    backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["added_tokens_decoder"] = {
        str(token_id): {"content": token.content, "special": token.special}
        for token_id, token in backend.get_added_tokens_decoder().items()
    }
    config["extra_special_tokens"] = {name: text for name, text in named.items() if model_type not in UNNAMED}
    file.write_text(json.dumps({**config, **NEEDED.get(model_type, {})}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def _processor(folder: Path, kind: Any, tokenizer: Any, config: Any) -> Any:
    """Return transformers' processor for a configuration, and write its files."""
    model_type: str = config.model_type
    alike: str = ALIKE.get(model_type, model_type)
    eyes = getattr(config, "vision_config", None)
    options = {**_options(kind, config, eyes), **OPTIONS.get(model_type, {})}
    parts: dict[str, Any] = {}
    file, values = folder / "preprocessor_config.json", {}
    for name in kind.get_attributes():
        if name.endswith("tokenizer"):
            parts[name] = tokenizer
        elif name == "image_processor":
            parts[name] = _images(alike, {**IMAGES.get(model_type, {})}, eyes)
        elif name == "video_processor" and HAS_TORCHVISION:
            parts[name] = _optional(VIDEOS.get(alike))
        elif name == "feature_extractor":
            parts[name] = _optional(SOUNDS.get(alike))
        else:
            parts[name] = None
        if parts[name] is not None and parts[name] is not tokenizer:
            try:
                parts[name].save_pretrained(folder)
            except ValueError:  # ERNIE's part for videos needs a font
                parts[name] = None
            values = {**json.loads(file.read_text()), **values} if file.is_file() else values
    file.write_text(json.dumps(values))  # the parts for images and audio have this file in common
    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: None})
    processor = lenient(**parts, **options)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind.__name__, **options}))
    return processor


def _options(kind: Any, config: Any, eyes: Any) -> dict[str, Any]:
    """Return the options of a processor that repeat values of the model's configuration."""
    takes = signature(kind.__init__).parameters
    known = {
        "patch_size": getattr(eyes, "patch_size", None),
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
        "num_additional_image_tokens": 1,
        "num_query_tokens": getattr(config, "num_query_tokens", None),
        "downsample_rate": getattr(config, "downsample_rate", None),
        "downsample_factor": getattr(config, "downsample_factor", None),
        "spatial_merge_size": getattr(config, "spatial_merge_size", None),
        "img_size": getattr(eyes, "image_size", None),
    }
    side, patch = getattr(eyes, "image_size", None), getattr(eyes, "patch_size", None)
    if isinstance(side, int) and isinstance(patch, int):
        known |= dict.fromkeys(("num_image_tokens", "image_seq_length", "image_seq_len"), (side // patch) ** 2)
    return {name: value for name, value in known.items() if name in takes and value is not None}


def _images(model_type: str, options: dict[str, Any], eyes: Any) -> Any:
    """Return the image processor, for images of the size that the encoder takes."""
    names: Any = PICTURES.get(model_type) or {}
    name = names.get("torchvision" if HAS_TORCHVISION else "pil") or names.get("pil")
    if name is None:
        lacks = "its image processor needs torchvision" if names else "transformers registers no image processor for it"
        raise CannotBuild(lacks)
    kind = getattr(transformers, name)
    usual, side = kind(), getattr(eyes, "image_size", None)
    if isinstance(side, int):
        for field in ("size", "crop_size"):
            given = dict(getattr(usual, field, None) or {})
            if given.keys() <= {"height", "width", "shortest_edge"} and given and field not in options:
                options[field] = dict.fromkeys(given, side)
    patch = getattr(eyes, "patch_size", None)
    if isinstance(patch, int) and isinstance(getattr(usual, "patch_size", None), int):
        options.setdefault("patch_size", patch)
    return kind(**options)


def _optional(names: Any) -> Any:
    name = names.get("torchvision") if isinstance(names, Mapping) else names
    try:
        return getattr(transformers, name)() if isinstance(name, str) else None
    except Exception:  # it may need any library, and only images are asked about
        return None


def _set_tokens(config: Any, processor: Any, tokenizer: Any) -> None:
    """Set the token ids of a configuration to those of the processor."""
    unknown = tokenizer.convert_tokens_to_ids("<no such token>")
    for name, part in list(config.to_dict().items()):
        if isinstance(part, dict) and hasattr(getattr(config, name), "to_dict"):
            _set_tokens(getattr(config, name), processor, tokenizer)
        short, found, end = name.partition("_token_i")
        if not found or end not in ("d", "ndex") or short in ("bos", "eos", "pad"):
            continue
        value = getattr(processor, f"{short}_token_id", None) or getattr(processor, f"{short}_token_ids", None)
        if value is None:
            text = getattr(processor, f"{short}_token", None) or getattr(tokenizer, f"{short}_token", None)
            text = getattr(text, "content", text) or ("<image>" if short == "image" else None)
            value = tokenizer.convert_tokens_to_ids(text) if isinstance(text, str) else None
        if isinstance(value, list):
            value = value[0]
        if isinstance(value, int) and value != unknown:
            setattr(config, name, value)

"""Tiny random checkpoints of models that see or hear, with a tokenizer and transformers' own processor for each family.

path = tiny_seeing.cached("qwen2_vl")
images = [tiny_seeing.picture(40, 30, seed=1)]
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from torchvision_operators import HAS_TORCHVISION as HAS_TORCHVISION  # isort: skip, before transformers
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as _MAPPING

import tiny_checkpoints
import tiny_tokenizers

NEEDS_TORCHVISION = ("mistral3", "llama4")
CONFIG_MAPPING: Any = _MAPPING
BASE_VOCABULARY = 400
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "rms_norm_eps": 1e-3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
GRID = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 64}}
NORM = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SQUARE = {"size": {"height": 16, "width": 16}, "do_resize": True, **NORM}


class Family(NamedTuple):
    """How to make a checkpoint. `config` gets the ids of `tokens` by name."""

    tokens: Mapping[str, str]  # special tokens of the processor, by a short name
    config: Callable[[Mapping[str, int], Mapping[str, Any]], Any]
    placeholder: str  # what the chat template writes for an image
    processor: str  # transformers' class
    image_processor: str
    image_options: Mapping[str, Any]
    options: Mapping[str, Any] = {}  # further fields of the processor's JSON
    extra_tokens: Sequence[str] = ()
    video: tuple[str, str, Mapping[str, Any]] | None = None  # placeholder, video processor and its options
    audio: tuple[str, str, Mapping[str, Any]] | None = None  # placeholder, feature extractor and its options


def _text(kind: str, values: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    return {"model_type": kind, **TEXT, **values, **own}


def _llava(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["llava"](
        text_config=_text("llama", text),
        vision_config={"model_type": "clip_vision_model", **EYES, "image_size": 16, "patch_size": 4},
        image_token_index=ids["image"],
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )


def _llava_next(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["llava_next"](
        text_config=_text("llama", text),
        vision_config={"model_type": "clip_vision_model", **EYES, "image_size": 16, "patch_size": 4},
        image_token_index=ids["image"],
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )


def _llava_onevision(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["llava_onevision"](
        text_config=_text("qwen2", text),
        vision_config={"model_type": "siglip_vision_model", **EYES, "image_size": 16, "patch_size": 4},
        image_token_index=ids["image"],
        video_token_index=ids["video"],
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        vision_feature_select_strategy="full",
    )


def _qwen2_vl(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["qwen2_vl"](
        text_config=_text("qwen2_vl_text", text, rope_parameters=SECTIONS),
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        **_qwen_ids(ids),
    )


def _qwen2_5_vl(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["qwen2_5_vl"](
        text_config=_text("qwen2_5_vl_text", text, rope_parameters=SECTIONS),
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
        },
        **_qwen_ids(ids),
    )  # fmt: skip


def _qwen3_vl(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["qwen3_vl"](
        text_config=_text("qwen3_vl_text", {**text, "num_hidden_layers": 3}, rope_parameters=SECTIONS),
        vision_config={
            "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64,
        },
        **_qwen_ids(ids),
    )  # fmt: skip


def _qwen3_5(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    delta = {**tiny_checkpoints.DELTA_NET, "num_hidden_layers": 3}
    return CONFIG_MAPPING["qwen3_5"](
        text_config=_text("qwen3_5_text", text, **delta, rope_parameters={**SECTIONS, "partial_rotary_factor": 1.0}),
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 32, "num_position_embeddings": 64,
        },
        **_qwen_ids(ids),
    )  # fmt: skip


def _qwen2_audio(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["qwen2_audio"](
        text_config=_text("qwen2", text),
        audio_config={
            "model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24, "d_model": 16, "max_source_positions": 100,
        },
        audio_token_index=ids["audio"],
    )  # fmt: skip


def _qwen_ids(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["image"], "video_token_id": ids["video"], "vision_start_token_id": ids["start"],
        "vision_end_token_id": ids["end"], "tie_word_embeddings": False,
    }  # fmt: skip


def _glm4v(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["glm4v"](
        text_config=_text("glm4v_text", text, rope_parameters={**SECTIONS, "mrope_section": [2, 1, 1]}),
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "image_size": 32,
            "out_hidden_size": 32,
        },
        image_token_id=ids["image"], video_token_id=ids["video"], image_start_token_id=ids["start"],
        image_end_token_id=ids["end"], video_start_token_id=ids["video_start"], video_end_token_id=ids["video_end"],
        tie_word_embeddings=False,
    )  # fmt: skip


def _gemma3(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    own = {**tiny_checkpoints.OWN["gemma3"], "sliding_window": 9, "num_hidden_layers": 3, "tie_word_embeddings": True}
    return CONFIG_MAPPING["gemma3"](
        text_config=_text("gemma3_text", {**text, **own}),
        vision_config={"model_type": "siglip_vision_model", **EYES, "image_size": 16, "patch_size": 4},
        image_token_index=ids["image"], boi_token_index=ids["start"], eoi_token_index=ids["end"], mm_tokens_per_image=4,
        tie_word_embeddings=True,
    )  # fmt: skip


def _mistral3(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["mistral3"](
        text_config=_text("mistral", text),
        vision_config={"model_type": "pixtral", **EYES, "head_dim": 8, "image_size": 32, "patch_size": 4},
        image_token_index=ids["image"],
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def _internvl(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["internvl"](
        text_config=_text("qwen2", text),
        vision_config={"model_type": "internvl_vision", **EYES, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=ids["image"],
        tie_word_embeddings=False,
    )


def _idefics3(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING["idefics3"](
        text_config=_text("llama", text),
        vision_config={"model_type": "idefics3_vision", **EYES, "image_size": 16, "patch_size": 4},
        image_token_id=ids["image"],
        scale_factor=2,
        tie_word_embeddings=False,
    )


def _llama4(ids: Mapping[str, int], text: Mapping[str, Any]) -> Any:
    own = {**tiny_checkpoints.OWN["llama4"], "num_hidden_layers": 3, "attention_chunk_size": 16}
    return CONFIG_MAPPING["llama4"](
        text_config=_text("llama4_text", text, **own),
        vision_config={
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "image_size": 16,
            "patch_size": 4, "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=ids["image"], boi_token_index=ids["start"], eoi_token_index=ids["end"],
    )  # fmt: skip


_QWEN = {"start": "<|vision_start|>", "end": "<|vision_end|>", "image": "<|image_pad|>", "video": "<|video_pad|>"}
_QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
_TILES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True, **NORM}
_IDEFICS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
_SQUARE_CLIP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, **NORM}

_QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_VIDEO_GRID_3 = {**GRID, "size": {"shortest_edge": 256, "longest_edge": 64 * 64 * 4}, "temporal_patch_size": 2, **NORM}
_VIDEO_GRID = {**GRID, "temporal_patch_size": 2, **NORM}

FAMILIES: dict[str, Family] = {
    "llava": Family(
        {"image": "<image>"}, _llava, "<image>\n", "LlavaProcessor", "CLIPImageProcessorPil", _SQUARE_CLIP,
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_next": Family(
        {"image": "<image>"}, _llava_next, "<image>\n", "LlavaNextProcessor", "LlavaNextImageProcessorPil",
        {**_SQUARE_CLIP, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": Family(
        {"image": "<image>", "video": "<video>"}, _llava_onevision, "<image>\n", "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessorPil",
        {**SQUARE, "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        video=("<video>\n", "LlavaOnevisionVideoProcessor", SQUARE),
    ),
    "qwen2_vl": Family(_QWEN, _qwen2_vl, _QWEN_TEXT, "Qwen2VLProcessor", "Qwen2VLImageProcessorPil", GRID,
                       video=(_QWEN_VIDEO, "Qwen2VLVideoProcessor", _VIDEO_GRID)),
    "qwen2_5_vl": Family(_QWEN, _qwen2_5_vl, _QWEN_TEXT, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil", GRID,
                         video=(_QWEN_VIDEO, "Qwen2VLVideoProcessor", _VIDEO_GRID)),
    "qwen3_vl": Family(_QWEN, _qwen3_vl, _QWEN_TEXT, "Qwen3VLProcessor", "Qwen2VLImageProcessorPil", GRID,
                       video=(_QWEN_VIDEO, "Qwen3VLVideoProcessor", _VIDEO_GRID_3)),
    "qwen3_5": Family(_QWEN, _qwen3_5, _QWEN_TEXT, "Qwen3VLProcessor", "Qwen2VLImageProcessorPil", GRID,
                      video=(_QWEN_VIDEO, "Qwen3VLVideoProcessor", _VIDEO_GRID_3)),
    "glm4v": Family(
        {"start": "<|begin_of_image|>", "end": "<|end_of_image|>", "image": "<|image|>", "video": "<|video|>",
         "video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>"},
        _glm4v, "<|begin_of_image|><|image|><|end_of_image|>", "Glm4vProcessor", "Glm4vImageProcessorPil", GRID,
    ),
    "gemma3": Family(
        {"image": "<image_soft_token>", "start": "<start_of_image>", "end": "<end_of_image>"}, _gemma3,
        "<start_of_image>", "Gemma3Processor", "Gemma3ImageProcessorPil", SQUARE, {"image_seq_length": 4},
    ),
    "mistral3": Family(
        {"image": "[IMG]", "break": "[IMG_BREAK]", "end": "[IMG_END]"}, _mistral3, "[IMG]", "PixtralProcessor",
        "PixtralImageProcessorPil", {"size": {"longest_edge": 32}, "patch_size": {"height": 8, "width": 8}, **NORM},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "internvl": Family(
        {"image": "<IMG_CONTEXT>", "start": "<img>", "end": "</img>", "video": "<video>"}, _internvl,
        "<IMG_CONTEXT>\n", "InternVLProcessor", "GotOcr2ImageProcessorPil",
        {**SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}, {"image_seq_length": 4},
        video=("<video>\n", "InternVLVideoProcessor", SQUARE),
    ),
    "idefics3": Family(
        {"image": "<image>", "fake": "<fake_token_around_image>", "end": "<end_of_utterance>", "whole": "<global-img>"},
        _idefics3, "<image>", "Idefics3Processor", "Idefics3ImageProcessorPil", _TILES, {"image_seq_len": 4},
        _IDEFICS,
    ),
    "llama4": Family(
        {"image": "<|patch|>", "placeholder": "<|image|>", "start": "<|image_start|>", "end": "<|image_end|>",
         "x": "<|tile_x_separator|>", "y": "<|tile_y_separator|>"},
        _llama4, "<|image|>", "Llama4Processor", "Llama4ImageProcessor", {"max_patches": 4, **SQUARE},
        {"patch_size": 4, "pixel_shuffle_ratio": 0.5},
    ),
}  # fmt: skip
HEARING: dict[str, Family] = {
    "qwen2_audio": Family(
        {"audio": "<|AUDIO|>", "start": "<|audio_bos|>", "end": "<|audio_eos|>"}, _qwen2_audio, "",
        "Qwen2AudioProcessor", "", {}, audio=("<|audio_bos|><|AUDIO|><|audio_eos|>", "WhisperFeatureExtractor",
                       {"feature_size": 16, "chunk_length": 2, "sampling_rate": 16_000, "hop_length": 160}),
    ),
}  # fmt: skip
FAMILIES_BY_NAME = {**FAMILIES, **HEARING}
# Attributes of a tokenizer that processors read.
_NAMED = {
    "gemma3": {"image_token": "image", "boi_token": "start", "eoi_token": "end"},
    "internvl": {"context_image_token": "image", "start_image_token": "start", "end_image_token": "end",
                 "video_token": "video"},
}  # fmt: skip
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'PLACEHOLDER' -}}
{%- elif part.type == 'video' -%}{{- 'VIDEO' -}}{%- elif part.type == 'audio' -%}{{- 'AUDIO' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write(directory: Path | str, family: str, *, seed: int = 0, dtype: str = "float32", **text: Any) -> str:
    """Write a checkpoint with tokenizer and processor, and return its path. Keywords are fields of the text part."""
    made, path = FAMILIES_BY_NAME[family], Path(directory)
    ids = _write_tokenizer(path, family)
    config = made.config(ids, {"vocab_size": BASE_VOCABULARY + len(_special(made)), **text})
    model = _auto(family).from_config(config, dtype=torch.float32)
    tiny_checkpoints.redraw(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    if made.image_processor:
        options = {"image_processor_type": made.image_processor.removesuffix("Pil"), **made.image_options}
    else:
        options = {"feature_extractor_type": made.audio[1], **made.audio[2]} if made.audio else {}
    (path / "preprocessor_config.json").write_text(json.dumps(options))
    if made.video is not None:
        videos = {"video_processor_type": made.video[1], **made.video[2]}
        (path / "video_preprocessor_config.json").write_text(json.dumps(videos))
    more = {"processor_class": made.processor, **made.options}
    (path / "processor_config.json").write_text(json.dumps(more))
    return str(path)


def _special(family: Family) -> list[str]:
    return [*family.tokens.values(), *family.extra_tokens]


def _write_tokenizer(path: Path, family: str) -> dict[str, int]:
    """Write a byte-level tokenizer with the special tokens of a family. Return their ids by short name."""
    from tokenizers import AddedToken

    made = FAMILIES_BY_NAME[family]
    tiny_tokenizers.write(path, "byte_bpe", BASE_VOCABULARY)
    backend, _ = tiny_tokenizers.build("byte_bpe", BASE_VOCABULARY)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _special(made)])
    backend.save(str(path / "tokenizer.json"))
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["added_tokens_decoder"] = {
        str(token_id): {"content": token.content, "special": token.special}
        for token_id, token in backend.get_added_tokens_decoder().items()
    }
    template = TEMPLATE.replace("PLACEHOLDER", made.placeholder)
    for word, other in (("VIDEO", made.video), ("AUDIO", made.audio)):
        template = template.replace(word, other[0] if other else "")
    config["chat_template"] = template
    names = {name: made.tokens[short] for name, short in _NAMED.get(family, {}).items()}
    if names:
        config["extra_special_tokens"] = names
    file.write_text(json.dumps(config))
    ids = {short: backend.token_to_id(token) for short, token in made.tokens.items()}
    return {short: token_id for short, token_id in ids.items() if token_id is not None}


def cached(family: str, **arguments: Any) -> str:
    """Like `write`, once per process and set of arguments, for tests that only read the checkpoint."""
    return _write_once(family, json.dumps(arguments, sort_keys=True))


@cache
def _write_once(family: str, arguments: str) -> str:
    folder = Path(_scratch().name) / f"{family}-{_write_once.cache_info().misses}"
    return write(folder, family, **json.loads(arguments))


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tiny-seeing-")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of random blocks, which stays distinct when it is scaled."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    """Return the picture as a PNG file."""
    from io import BytesIO

    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def processor_of(path: str, family: str) -> Any:
    """Return transformers' processor of the checkpoint. It has a video processor if there is torchvision."""
    made = FAMILIES_BY_NAME[family]
    if made.audio is not None:
        extractor = getattr(transformers, made.audio[1])(**made.audio[2])
        kind = getattr(transformers, made.processor)
        return kind(feature_extractor=extractor, tokenizer=transformers.AutoTokenizer.from_pretrained(path))
    # Like the engine: torchvision's processors are used if there are any.
    image_class = getattr(transformers, made.image_processor.removesuffix("Pil" if HAS_TORCHVISION else ""))
    kind = getattr(transformers, made.processor)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    lenient = type(made.processor, (kind,), {"check_argument_for_proper_class": lambda self, name, value: None})
    arguments = {"image_processor": image_class(**made.image_options), "tokenizer": tokenizer, **made.options}
    if "video_processor" in kind.get_attributes():
        videos = made.video if HAS_TORCHVISION else None
        arguments["video_processor"] = None if videos is None else getattr(transformers, videos[1])(**videos[2])
    return lenient(**arguments)


def _auto(family: str) -> Any:
    return AutoModelForMultimodalLM if family in HEARING else AutoModelForImageTextToText


@contextlib.contextmanager
def loaded(path: str, family: str):
    """Yield transformers' model of the checkpoint and its processor."""
    model: Any = _auto(family).from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        yield model, processor_of(path, family)


def prompt(family: str, text: str, num_images: int) -> str:
    """Return a prompt with images between the words of the text."""
    words = text.split(" ")
    parts = [words[0]]
    for index, word in enumerate(words[1:]):
        parts.append((FAMILIES[family].placeholder if index < num_images else " ") + word)
    return "".join(parts)


class Answer(NamedTuple):
    """A greedy answer."""

    ids: list[int]
    logprobs: list[float]  # of the ids

    def agrees(self, other: Answer) -> bool:
        """Whether the ids are equal, and the log-probabilities up to rounding."""
        return self.ids == other.ids and bool(np.allclose(self.logprobs, other.logprobs, atol=1e-3))


def prompt_logprobs(path: str, family: str, text: str, images: Sequence[Image.Image]) -> list[float]:
    """Return transformers' log-probability of each token of a prompt, from the second token on."""
    with loaded(path, family) as (model, processor):
        inputs = processor(text=[text], return_tensors="pt", **({"images": list(images)} if images else {}))
        scores = model(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    ids = inputs["input_ids"][0]
    return scores[:-1].gather(1, ids[1:, None])[:, 0].tolist()


def reference(path: str, family: str, text: str, images: Sequence[Image.Image], max_new: int, **more: Any) -> Answer:
    """Return transformers' answer to a text with placeholders and its images. `more` goes to the processor."""
    with loaded(path, family) as (model, processor):
        arguments = {"images": list(images)} if images else {}
        arguments |= more
        inputs = processor(text=[text], return_tensors="pt", **arguments)
        inputs = {
            name: value.to(model.dtype) if torch.is_floating_point(value) else value for name, value in inputs.items()
        }
        generate: Any = model.generate
        output = generate(
            **inputs, do_sample=False, max_new_tokens=max_new, eos_token_id=None, pad_token_id=0, use_cache=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    scores = [logits[0].float().log_softmax(-1)[token].item() for token, logits in zip(ids, output.logits)]
    return Answer(ids, scores)

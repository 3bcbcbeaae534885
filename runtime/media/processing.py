"""transformers' processor of a model: turns an image, video or audio (an "item") into tensors and a block of tokens."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.errors import CheckpointError, InvalidRequest
from runtime.media.placement import NumberMarks
from runtime.media.videos import Video
from runtime.media_source import PLURALS, Kind
from runtime.models.by_transformers.facts import quiet

logger = logging.getLogger("penstock.media")

FILES = ("processor_config.json", "preprocessor_config.json")
STRIP_BYTES = 2**20
# Attributes of processors that contain an item's placeholder text, the most specific first.
PLACEHOLDERS: Mapping[Kind, Sequence[str]] = {
    "image": ("boi_token", "fake_image_token", "image_placeholder_token", "image_token"),
    "video": ("video_token",),
    "audio": ("boa_token", "audio_token"),
}
# Kind -> names that a processor may use for the part that handles this kind. The first name that exists is used.
PARTS: Mapping[Kind, Sequence[str]] = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
FRAME_OPTIONS = ("fps", "num_frames")  # options that select frames; they are applied before the processor runs
FRAMES_PER_S = 2.0  # frames per second of a video, if the processor does not choose frames


class Processed(NamedTuple):
    """A processed image, video or audio."""

    text: str  # replaces the placeholder in a prompt
    inputs: Mapping[str, Any]  # tensors for the model, including the text's `input_ids` [1, T]


class _Recording:
    """A tokenizer that stores the text it encodes. Its other attributes are those of the processor's tokenizer."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.text = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real, name)

    def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
        self.text = text[0] if isinstance(text, list) else text
        return self.real(text, *arguments, **options)


class Processors:
    """Copies of a model's processor: one for each thread that processes at the same time."""

    def __init__(self, path: str, model_type: str, num_copies: int, *, fast: bool = True) -> None:
        """Load the processor. Raises CheckpointError if transformers or a required library is missing."""
        first = _load(Path(path), model_type, fast=fast)
        first.tokenizer = _Recording(first.tokenizer)
        self.name = type(first).__name__
        self.placeholders: dict[Kind, str] = {}
        self.refusals: dict[Kind, str] = {}  # reason why a kind is not accepted
        for kind in PLACEHOLDERS:
            try:
                self.placeholders[kind] = _placeholder(first, self.name, kind)
            except CheckpointError as error:
                self.refusals[kind] = str(error)
        if not self.placeholders:
            raise CheckpointError("; ".join(self.refusals.values()))
        self.marks = _number_marks(first)
        self._identities = {kind: _identity(first, kind) for kind in self.placeholders}
        self._any, self._video = first, _part_of(first, "video")
        self.sampling_rate = int(getattr(_part_of(first, "audio"), "sampling_rate", 16_000))
        # Maximum seconds of audio; the extractor would drop the rest. None: any length.
        self.audio_s: float | None = getattr(_part_of(first, "audio"), "chunk_length", None)
        self._free: SimpleQueue[Any] = SimpleQueue()
        self._free.put(first)
        for _ in range(num_copies - 1):
            self._free.put(copy.deepcopy(first))

    def digest(self, kind: Kind, content: Any, options: Mapping[str, Any]) -> bytes:
        """Return a 256-bit hash of a decoded item and of all settings that determine how the processor treats it."""
        hashed = hashlib.sha256(self._identities[kind])
        hashed.update(json.dumps(options, sort_keys=True).encode() + b"\n")
        if kind == "image":
            width, height = content.size
            hashed.update(f"{width}x{height}\n".encode())
            rows = max(1, STRIP_BYTES // (3 * width))
            for top in range(0, height, rows):  # in strips, because copying pixels holds the GIL
                hashed.update(content.crop((0, top, width, min(top + rows, height))).tobytes())
        elif kind == "video":
            hashed.update(f"{content.frames.shape} {content.indices} {content.total} {content.fps}\n".encode())
            for frame in content.frames:
                hashed.update(frame.data)
        else:
            hashed.update(content.data)
        return hashed.digest()

    def frames(self, total: int, fps: float | None, options: Mapping[str, Any]) -> Sequence[int]:
        """Return the indices of the frames that the model should see, for a video with `total` frames.

        The model's processor chooses the frames if it is configured to. Otherwise `FRAMES_PER_S` frames per second
        are chosen.
        """
        chosen = {name: options[name] for name in FRAME_OPTIONS if name in options}
        configured = getattr(self._video, "do_sample_frames", False) and (
            getattr(self._video, "fps", None) or getattr(self._video, "num_frames", None)
        )
        if configured or chosen:
            try:
                indices = self._video.sample_frames(metadata=_metadata(total, fps, None), **chosen)
                return [min(max(int(index), 0), total - 1) for index in indices]
            except (ValueError, TypeError, ArithmeticError) as error:
                logger.debug("The processor chose no frames: %s", error)
        wanted = chosen.get("num_frames") or round(total / (fps or 24.0) * chosen.get("fps", FRAMES_PER_S))
        count = min(max(int(wanted), 4), total)
        return [int(total * place / count) for place in range(count)]

    def unknown_options(self, kind: Kind, options: Mapping[str, Any]) -> list[str]:
        """Return the names of options that the processor would ignore."""
        known = getattr(getattr(_part_of(self._any, kind), "valid_kwargs", None), "__annotations__", {})
        return [name for name in options if name not in known and not (kind == "video" and name in FRAME_OPTIONS)]

    def process(self, kind: Kind, content: Any, options: Mapping[str, Any], param: str) -> Processed:
        """Return the tensors and the text of a decoded item. Raises `InvalidRequest` if the processor refuses it."""
        processor = self._free.get()
        try:
            with torch.inference_mode():
                return _process(processor, self.placeholders[kind], kind, content, options)
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, IndexError) as error:
            logger.info("The processor refused an item of kind %s: %s", kind, error)
            reason = "it may be too short" if kind == "audio" else "it may be too small, too large or too narrow"
            raise InvalidRequest(
                f"{param}: the model's processor cannot use this {kind}; {reason}.", param=param
            ) from error
        finally:
            self._free.put(processor)


def _process(processor: Any, placeholder: str, kind: Kind, content: Any, options: Mapping[str, Any]) -> Processed:
    options = {name: value for name, value in options.items() if name not in FRAME_OPTIONS}
    if kind == "image":
        given: dict[str, Any] = {"images": [content], **options}
    elif kind == "video":
        metadata = _metadata(content.total, content.fps, content)
        given = {"videos": [content.frames], "video_metadata": [metadata], "do_sample_frames": False, **options}
    else:
        rate = getattr(_part_of(processor, "audio"), "sampling_rate", 16_000)
        given = {"audio": [content], "sampling_rate": rate, **options}
    inputs = processor(
        text=[placeholder], return_tensors="pt", add_special_tokens=False, return_mm_token_type_ids=True, **given
    )
    return Processed(processor.tokenizer.text, dict(inputs))


def _metadata(total: int, fps: float | None, video: Video | None) -> Any:
    """Return transformers' `VideoMetadata`. `video` is None while the frames have not been chosen yet."""
    from transformers.video_utils import VideoMetadata

    if video is None:
        return VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps if fps else None)
    height, width = video.frames.shape[1:3]
    return VideoMetadata(
        total_num_frames=total, fps=fps, width=width, height=height, duration=total / fps if fps else None,
        frames_indices=list(video.indices),
    )  # fmt: skip


def _part_of(processor: Any, kind: Kind) -> Any:
    """Return the part of a processor for a kind, or None."""
    return next((part for name in PARTS[kind] if (part := getattr(processor, name, None)) is not None), None)


def trial(kind: Kind, sampling_rate: int) -> Any:
    """Return a small decoded image, video or audio, with which the processor and the encoder are tried."""
    import numpy as np
    from PIL import Image

    if kind == "image":
        return Image.fromarray(np.full((64, 64, 3), 127, np.uint8))
    if kind == "video":
        return Video(np.full((4, 64, 64, 3), 127, np.uint8), (0, 1, 2, 3), 4, 2.0)
    return np.sin(np.arange(sampling_rate, dtype=np.float32) / 8)


def has_processor(path: str) -> bool:
    """Return whether the checkpoint has the files of a processor."""
    return any((Path(path) / name).is_file() for name in FILES)


def _load(path: Path, model_type: str, *, fast: bool) -> Any:
    """Return the checkpoint's processor.

    The video processor is omitted if it cannot be loaded, because it needs torchvision even for images.
    """
    try:
        with quiet():
            return _make(path, model_type, fast=fast)
    except ImportError as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"The processor of {path} needs a library: {text}") from error
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises errors of many types
        raise CheckpointError(f"transformers cannot load the processor of {path}: {error}") from error


def _make(path: Path, model_type: str, *, fast: bool) -> Any:
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto import processing_auto

    values: dict[str, Any] = {}
    for name in reversed(FILES):
        file = path / name
        if file.is_file():
            values |= json.loads(file.read_text(encoding="utf-8"))
    named = values.get("processor_class") or processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type)  # pyright: ignore
    if not isinstance(named, str) or not hasattr(transformers, named):
        raise CheckpointError(f"transformers {transformers.__version__} has no processor for {model_type}.")
    kind: Any = getattr(transformers, named)
    names = kind.get_attributes()
    arguments: list[Any] = []
    for name in names:
        if name == "tokenizer":
            arguments.append(AutoTokenizer.from_pretrained(path, local_files_only=True))
        elif name == "image_processor":
            options = {} if fast else {"backend": "pil"}
            arguments.append(AutoImageProcessor.from_pretrained(path, local_files_only=True, **options))
        else:
            arguments.append(_optional(name, path))
    # The processor's own class requires all parts; this subclass accepts missing parts.
    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: None})
    own, _ = kind.get_processor_dict(str(path), local_files_only=True)
    for name in names:
        own.pop(name, None)
    return lenient.from_args_and_dict(arguments, own)


def _optional(name: str, path: Path) -> Any:
    """Return a part of a processor, or None if it cannot be loaded. Items of its kind are then refused."""
    from transformers import AutoFeatureExtractor, AutoVideoProcessor

    auto = {"video_processor": AutoVideoProcessor, "feature_extractor": AutoFeatureExtractor}.get(name)
    try:
        return auto.from_pretrained(path, local_files_only=True) if auto is not None else None
    except Exception:  # this part of the processor may need any library
        return None


def _placeholder(processor: Any, name: str, kind: Kind) -> str:
    """Return the placeholder of an item in a prompt, before the processor expands it."""
    plural = PLURALS[kind]
    part = _part_of(processor, kind)
    if part is None:
        needs = " (torchvision is not installed)" if kind == "video" and not _has_torchvision() else ""
        raise CheckpointError(f"{name}: {plural} are not supported: it has no part for them{needs}.")
    if hasattr(processor, "qformer_tokenizer"):
        raise CheckpointError(f"{name}: {plural} are not supported: their encoder also reads the text of the prompt.")
    item = trial(kind, int(getattr(part, "sampling_rate", 16_000)))
    problem: Exception | None = None
    texts = [_token(processor, attribute) for attribute in PLACEHOLDERS[kind]]
    ends = _token(processor, f"{kind}_start_token"), _token(processor, f"{kind}_end_token")
    if all(ends):  # some processors accept a placeholder only between these tokens
        texts.append(ends[0] + _token(processor, f"{kind}_token") + ends[1])
    for text in filter(None, texts):
        try:
            expanded = _process(processor, text, kind, item, {})
        except Exception as error:  # a processor may raise anything for the wrong text
            problem = problem or error
            continue
        ids = expanded.inputs.get("input_ids")
        if not isinstance(ids, Tensor) or len(expanded.text) < len(text):
            continue
        if ids[0].tolist() == processor.tokenizer.real(expanded.text, add_special_tokens=False)["input_ids"]:
            return text
        problem = problem or ValueError("its token ids are not those of the text that it encodes")
    reason = f" ({problem})" if problem is not None else ""
    raise CheckpointError(f"{name}: {plural} are not supported: it has no placeholder for them{reason}.")


def _number_marks(processor: Any) -> NumberMarks | None:
    """Return the texts around the numbers that a processor gives to images, or None if it does not number them."""
    marks = NumberMarks(_token(processor, "image_id_start_token"), _token(processor, "image_id_end_token"))
    return marks if all(marks) and getattr(processor, "default_use_image_id", False) else None


def _token(processor: Any, attribute: str) -> str:
    """Return the text of a processor's special token, or "" if it has none."""
    text = getattr(processor, attribute, None)
    text = getattr(text, "content", text)
    return text if isinstance(text, str) else ""


def _has_torchvision() -> bool:
    return find_spec("torchvision") is not None


def _identity(processor: Any, kind: Kind) -> bytes:
    """Return a text that identifies what a processor computes. Processors with equal texts compute the same."""
    parts = [type(processor).__name__, str(getattr(processor, "image_seq_length", "")), kind]
    parts.append(_part_of(processor, kind).to_json_string())
    return "\n".join(parts).encode()


__all__ = ["Processed", "Processors", "has_processor", "trial"]

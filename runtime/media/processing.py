"""transformers' processor of a model: turns an image into tensors and into its block of tokens."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.errors import CheckpointError, InvalidRequest
from runtime.models.by_transformers.facts import quiet

logger = logging.getLogger("penstock.media")

FILES = ("processor_config.json", "preprocessor_config.json")
STRIP_BYTES = 2**20
PLACEHOLDERS = ("boi_token", "fake_image_token", "image_token")  # attributes of processors, the most specific first


class ProcessedImage(NamedTuple):
    """An image after the processor."""

    text: str  # the text that replaces the placeholder in a prompt
    inputs: Mapping[str, Any]  # tensors for the model, with the `input_ids` [1, T] of the text


class _Recording:
    """A tokenizer that remembers the text it encodes, with all attributes of the real one."""

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
    """Private copies of a processor, one for each thread that uses it at a time."""

    def __init__(self, path: str, model_type: str, num_copies: int, *, fast: bool = True) -> None:
        """Load the processor. Raises CheckpointError if transformers or a library that it needs is missing."""
        first = _load(Path(path), model_type, fast=fast)
        first.tokenizer = _Recording(first.tokenizer)
        self.name = type(first).__name__
        self.placeholder = _placeholder(first, self.name)
        self._identity = _identity(first)
        self._free: SimpleQueue[Any] = SimpleQueue()
        self._free.put(first)
        for _ in range(num_copies - 1):
            self._free.put(copy.deepcopy(first))

    def digest(self, image: Any) -> bytes:
        """Return 256 bits that stand for an RGB image and everything that the processor does with it."""
        width, height = image.size
        hashed = hashlib.sha256(self._identity + f"{width}x{height}\n".encode())
        rows = max(1, STRIP_BYTES // (3 * width))
        for top in range(0, height, rows):  # in strips, because copying pixels holds the interpreter's lock
            hashed.update(image.crop((0, top, width, min(top + rows, height))).tobytes())
        return hashed.digest()

    def process(self, image: Any, param: str) -> ProcessedImage:
        """Return the tensors and the text of an image of Pillow. Raises `InvalidRequest` if the processor does."""
        processor = self._free.get()
        try:
            with torch.inference_mode():
                return _process(processor, self.placeholder, image)
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, IndexError) as error:
            logger.info("The processor refused an image: %s", error)
            raise InvalidRequest(
                f"{param}: the model's processor cannot use this image; it may be too small, too large or too narrow.",
                param=param,
            ) from error
        finally:
            self._free.put(processor)


def _process(processor: Any, placeholder: str, image: Any) -> ProcessedImage:
    inputs = processor(
        images=[image],
        text=[placeholder],
        return_tensors="pt",
        add_special_tokens=False,
        return_mm_token_type_ids=True,
    )
    return ProcessedImage(processor.tokenizer.text, dict(inputs))


def has_processor(path: str) -> bool:
    """Whether the checkpoint has the files of a processor."""
    return any((Path(path) / name).is_file() for name in FILES)


def _load(path: Path, model_type: str, *, fast: bool) -> Any:
    """Return the checkpoint's processor.

    Its video processor is left out if it cannot be loaded, because it needs torchvision even for images.
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
    # The real class insists on every part.
    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: None})
    own, _ = kind.get_processor_dict(str(path), local_files_only=True)
    for name in names:
        own.pop(name, None)
    return lenient.from_args_and_dict(arguments, own)


def _optional(name: str, path: Path) -> Any:
    """Return a part of a processor that images do not need, or None if it cannot be loaded."""
    from transformers import AutoFeatureExtractor, AutoVideoProcessor

    auto = {"video_processor": AutoVideoProcessor, "feature_extractor": AutoFeatureExtractor}.get(name)
    try:
        return auto.from_pretrained(path, local_files_only=True) if auto is not None else None
    except Exception:  # it may need any library
        return None


def _placeholder(processor: Any, name: str) -> str:
    """Return the text that stands for an image in a prompt before the processor expands it."""
    import numpy as np
    from PIL import Image

    trial = Image.fromarray(np.full((64, 64, 3), 127, np.uint8))
    problem: Exception | None = None
    for attribute in PLACEHOLDERS:
        text = getattr(processor, attribute, None)
        text = getattr(text, "content", text)
        if not isinstance(text, str) or not text:
            continue
        try:
            expanded = _process(processor, text, trial)
        except Exception as error:  # a processor may raise anything for the wrong text
            problem = problem or error
            continue
        if isinstance(expanded.inputs.get("input_ids"), Tensor) and len(expanded.text) >= len(text):
            return text
    raise CheckpointError(f"{name}: images are not supported: it has no placeholder for them ({problem}).")


def _identity(processor: Any) -> bytes:
    """Return text that differs for processors that compute differently."""
    parts = [type(processor).__name__, str(getattr(processor, "image_seq_length", ""))]
    parts.append(processor.image_processor.to_json_string())
    return "\n".join(parts).encode()


__all__ = ["ProcessedImage", "Processors", "has_processor"]

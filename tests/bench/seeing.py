"""`seeing`: ask every image-text architecture of transformers about images, and compare the answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers

import tiny_registered
import tiny_seeing
from bench import PROGRAM
from runtime.config.resolve.media import ENCODERS
from runtime.errors import CheckpointError, ConfigurationError, EngineFailure, InvalidRequest
from runtime.loading.facts import read_facts
from runtime.media_source import MediaSource
from runtime.request import LogprobParams, Request
from runtime.sampling_params import SamplingParams
from serve import Engine
from serve.bench.options import new_parser
from tiny_seeing import CONFIG_MAPPING

NUM_NEW = 6
SIZE = (64, 48)
ASKED: tuple[tuple[int, ...], ...] = ((0,), (), (1, 0))  # indices of the pictures in each prompt
CHUNKS = {"chunked_prefill_size": 16, "page_size": 4}  # chunks end inside images
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
EQUAL, DIFFERS, REFUSED, UNKNOWN = "equal", "differs", "refused", "not tried"
# Model type -> configuration fields that transformers requires.
BARE = {"vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}}}
# Model types with which transformers can generate only if it uses a cache.
CACHED = ("ernie4_5_vl_moe",)
# Model types that are compared only for prompts with at most one image: transformers encodes the same image differently
# if it is the second one of a prompt.
ALONE = ("minicpmv4_6", "minicpmv4_7")
# Errors of transformers that mean that the sizes or tokens of a tiny checkpoint are wrong.
MISFIT = re.compile(
    r"do not match|shapes? |size|cannot be multiplied|no attribute 'unsqueeze'|Mismatch in|total number|out of range|"
    r"processor of the checkpoint"
)
_PAGE = """\
# Image-text architectures of transformers

`just image-models` writes this page, with transformers {version}{torchvision}. For each architecture that transformers
registers for image-text models, it builds a tiny random checkpoint with the real classes of model and processor, serves
it in chunks of {chunk} tokens, asks about no, one and two images, in one batch and then again, and compares {count}
greedy tokens and their log-probabilities with transformers.

- *equal*: the same tokens, and log-probabilities within 0.001. Two images of MiniCPM-V 4.6 and 4.7 are left out:
  transformers encodes the second one differently from the same image alone. So are prompts that transformers refuses.
- *refused*: images are refused, with this reason. Texts may still be served ([models through
  transformers](models-by-transformers.md)).
- *not tried*: no tiny checkpoint could be built, for this reason. The check at loading decides about a real one.

{summary}.

| `model_type` | result | details |
|---|---|---|
"""


class Outcome(NamedTuple):
    """The result for one architecture."""

    result: str
    details: str


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = new_parser("seeing", "Every image-text architecture, asked about an image.", program=PROGRAM)
    options.add_argument("--only", nargs="+", metavar="TYPE", help="model types; default: all of transformers")
    options.add_argument("--markdown", action="store_true", help="print docs/image-models.md")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, print its table, and return 1 if an answer differs, else 0."""
    args = parser().parse_args(argv)
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    found: dict[str, Outcome] = {}
    for model_type in args.only or sorted(tiny_registered.ARCHITECTURES):
        found[model_type] = asyncio.run(outcome(model_type))
        if not args.markdown:
            print(f"{model_type:24} {found[model_type].result:10} {found[model_type].details}", flush=True)
    counts = Counter(each.result for each in found.values())
    summary = ", ".join(f"{counts[result]} {result}" for result in (EQUAL, DIFFERS, REFUSED, UNKNOWN) if counts[result])
    if args.markdown:
        torchvision = ", torchvision and timm" if tiny_registered.HAS_TORCHVISION else ""
        page = _PAGE.format(
            version=transformers.__version__, torchvision=torchvision, count=NUM_NEW, summary=summary,
            chunk=CHUNKS["chunked_prefill_size"],
        )  # fmt: skip
        rows = [f"| `{name}` | {each.result} | {each.details.replace('|', '/')} |" for name, each in found.items()]
        print(page + "\n".join(rows))
    else:
        print(summary)
    return 1 if counts[DIFFERS] else 0


async def outcome(model_type: str, text: Mapping[str, Any] | None = None) -> Outcome:
    """Build a tiny checkpoint of a model type, and compare answers about images with transformers.

    `text` has further fields of the configuration's text part.
    """
    with TemporaryDirectory(prefix="penstock-seeing-") as folder:
        try:
            if model_type in tiny_seeing.FAMILIES:
                tiny_seeing.write(folder, model_type)
                processor = tiny_seeing.processor_of(folder, model_type)
            else:
                processor = tiny_registered.write(Path(folder), model_type, text or {})
        except Exception as error:  # configurations, processors and models of transformers raise any exception
            return _refused_by_name(Path(folder), model_type) or Outcome(UNKNOWN, _short(error))
        return await _asked(folder, model_type, processor)


def _refused_by_name(folder: Path, model_type: str) -> Outcome | None:
    """Return why the configuration alone is refused, or None if it is not."""
    name = tiny_registered.ARCHITECTURES[model_type]
    config = {"model_type": model_type, "architectures": [name], **BARE.get(model_type, {})}
    (folder / "config.json").write_text(json.dumps(config))
    try:
        facts = read_facts(str(folder))
    except CheckpointError as error:
        return Outcome(REFUSED, _reason(error))
    has_encoder = any(part in facts.config for part in ENCODERS) or hasattr(CONFIG_MAPPING[model_type](), ENCODERS[0])
    return None if has_encoder else Outcome(REFUSED, "this model has no encoder for images")


async def _asked(path: str, model_type: str, processor: Any) -> Outcome:
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 12_288, "random_seed": 1, **CHUNKS}
    try:
        async with Engine(path, **options, enable_multimodal=True) as engine:
            media = engine.core.media
            placeholder = media.placeholders.get("image") if media is not None else None
            if media is None or placeholder is None:
                media.check([MediaSource("object", pictures()[0])]) if media is not None else None
                return Outcome(REFUSED, "this model has no encoder for images")
            together = await asyncio.gather(*(_answer(engine, placeholder, numbers) for numbers in ASKED))
            again = [await _answer(engine, placeholder, numbers) for numbers in ASKED]
    except (CheckpointError, ConfigurationError, InvalidRequest) as error:
        reason = _reason(error)
        if MISFIT.search(reason):
            return Outcome(UNKNOWN, f"the tiny checkpoint does not fit its processor ({reason.partition(': ')[2]})")
        return Outcome(REFUSED, reason)
    except EngineFailure as error:
        return Outcome(DIFFERS, f"the request fails: {_short(error)}")
    return _compared(path, model_type, processor, placeholder, together, again)


async def _answer(engine: Engine, placeholder: str, numbers: Sequence[int]) -> tuple[tiny_seeing.Answer, int]:
    """Return the answer about the pictures with these indices, and the number of tokens of its prompt."""
    media = tuple(MediaSource("object", pictures()[number]) for number in numbers)
    request = Request(text=prompt(placeholder, len(numbers)), media=media, sampling=GREEDY, logprobs=LogprobParams())
    [chunk] = await engine.core.submit(request).whole()
    assert chunk.logprobs is not None
    scores = [logprob or 0.0 for logprob, _ in chunk.logprobs.chosen]
    return tiny_seeing.Answer(chunk.ids, scores), chunk.usage.prompt


def _compared(
    path: str, model_type: str, processor: Any, placeholder: str, together: Sequence[Any], again: Sequence[Any]
) -> Outcome:
    """Compare both rounds of answers with transformers."""
    compared: list[str] = []
    for numbers, (first, count), (second, _) in zip(ASKED, together, again, strict=True):
        if len(numbers) > 1 and model_type in ALONE:
            continue
        try:
            wanted = reference(path, model_type, processor, prompt(placeholder, len(numbers)), numbers)
        except Exception as error:  # the reference may need what this machine lacks
            if numbers == ASKED[0]:
                return Outcome(UNKNOWN, f"transformers does not answer: {_short(error)}")
            continue  # a processor or a model may accept only prompts with one image
        for round_, answer in (("", first), (" the second time", second)):
            if not answer.agrees(wanted):
                return Outcome(DIFFERS, f"{len(numbers)} images{round_}: {answer.ids} instead of {wanted.ids}")
        compared.append(f"{len(numbers)} ({count} tokens)")
    return Outcome(EQUAL, f"images in a prompt: {', '.join(compared)}")


def pictures() -> tuple[Any, Any]:
    """Return two pictures of the same size."""
    return tiny_seeing.picture(*SIZE, 1), tiny_seeing.picture(*SIZE, 2)


def prompt(placeholder: str, num_images: int) -> str:
    """Return a prompt with images between its words."""
    return "Once " + f"{placeholder} upon " * num_images + "a time"


def reference(path: str, model_type: str, processor: Any, text: str, numbers: Sequence[int]) -> tiny_seeing.Answer:
    """Return transformers' greedy answer to a text with the pictures of these indices."""
    auto = tiny_registered.auto_class(model_type)
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    images = {"images": [pictures()[number] for number in numbers]} if numbers else {}
    inputs = processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **images)
    if not any("mm_token_type_ids" in signature(each.forward).parameters for each in (model, model.base_model)):
        inputs.pop("mm_token_type_ids", None)
    inputs = {
        name: value.to(model.dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.inference_mode():
        output = model.generate(
            **inputs, do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0,
            use_cache=model_type in CACHED, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    ids = output.sequences[0, -NUM_NEW:].tolist()
    scores = [logits[0].float().log_softmax(-1)[token].item() for token, logits in zip(ids, output.logits, strict=True)]
    return tiny_seeing.Answer(ids, scores)


def _short(error: Any) -> str:
    """Return the first sentence of an error, on one line."""
    text = re.sub(r"/\S*penstock-seeing-\w+", "the checkpoint", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _reason(error: Any) -> str:
    """Return the first sentence of a refusal, without its sentences about videos and audio."""
    return _short(re.split(r";? \S+: (?:videos|audio)\b", str(error))[0])


if __name__ == "__main__":
    raise SystemExit(main())

"""Images that Python callers have processed or encoded, in SGLang's formats: the same answers as transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import tiny_seeing
from runtime.errors import InvalidRequest
from serve import Engine
from tiny_seeing import HAS_TORCHVISION, NEEDS_TORCHVISION, Answer, picture, prompt

PLAIN: dict[str, Any] = {"random_seed": 1, "max_total_tokens": 4096, "dtype": "float32", "page_size": 4}
TEXT = "Once upon a time"
PICTURES = (picture(40, 30, 1), picture(30, 50, 2))
SAMPLING = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
FAST = ("llava", "qwen3_vl")


def families() -> list[Any]:
    return [
        pytest.param(
            family,
            marks=[
                *([pytest.mark.slow] if family not in FAST else []),
                *([pytest.mark.skipif(not HAS_TORCHVISION, reason="its processor needs torchvision")]
                  if family in NEEDS_TORCHVISION else []),
            ],
        )
        for family in tiny_seeing.FAMILIES
    ]  # fmt: skip


def processed(family: str) -> dict[str, Any]:
    """Return the output of transformers' processor for two pictures."""
    path = tiny_seeing.cached(family)
    processor = tiny_seeing.processor_of(path, family)
    return dict(processor(text=[prompt(family, TEXT, 2)], images=list(PICTURES), return_tensors="pt"))


def features(family: str, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the vectors of the pictures, as transformers' encoder makes them."""
    with tiny_seeing.loaded(tiny_seeing.cached(family), family) as (model, _):
        arguments = {name: inputs[name] for name in ("image_grid_thw", "image_sizes") if name in inputs}
        found = model.get_image_features(inputs["pixel_values"], **arguments)
    levels = getattr(found, "deepstack_features", None) or ()
    found = found if isinstance(found, torch.Tensor | list | tuple) else found.pooler_output
    return torch.cat([flat(found), *map(flat, levels)], dim=-1)


def flat(vectors: Any) -> torch.Tensor:
    """Return the vectors of all pictures, [N, W]."""
    return torch.cat(list(vectors)) if isinstance(vectors, list | tuple) else vectors.flatten(0, -2)


async def answer(engine: Engine, ids: Any, image_data: Any) -> tuple[Answer, int]:
    found = await engine.generate(
        input_ids=ids, image_data=image_data, sampling_params=SAMPLING, return_logprob=True, logprob_start_len=-1
    )
    info = found["meta_info"]
    logprobs = [logprob for logprob, *_ in info["output_token_logprobs"]]
    return Answer(list(found["output_ids"]), logprobs), info["cached_tokens"]


@pytest.mark.parametrize("family", families())
async def test_the_output_of_a_processor_is_answered_as_its_images(family: str) -> None:
    expected = tiny_seeing.reference(tiny_seeing.cached(family), family, prompt(family, TEXT, 2), PICTURES, 8)
    inputs = processed(family)
    ids = inputs["input_ids"][0].tolist()
    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        item = {**inputs, "format": "processor_output"}
        first, _ = await answer(engine, ids, item)
        assert first.agrees(expected)
        second, num_cached = await answer(engine, ids, [item])
        assert second.agrees(expected)
        assert num_cached or family in ("qwen3_5", "gemma3")
        swapped = {**item, "pixel_values": inputs["pixel_values"].flip(-1)}
        third, _ = await answer(engine, ids, swapped)
        assert not third.agrees(expected), "other pixels are no hit"
        engine.core.check()


@pytest.mark.parametrize(
    "family", ["qwen2_vl", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llava", "qwen3_vl", "gemma3"))]
)
async def test_vectors_are_answered_as_the_images_that_they_were_made_of(family: str) -> None:
    expected = tiny_seeing.reference(tiny_seeing.cached(family), family, prompt(family, TEXT, 2), PICTURES, 8)
    inputs = processed(family)
    ids, vectors = inputs["input_ids"][0].tolist(), features(family, inputs)
    grids = {"image_grid_thw": inputs["image_grid_thw"]} if "image_grid_thw" in inputs else {}
    encoded = {"format": "precomputed_embedding", **grids}
    async with Engine(tiny_seeing.cached(family), **PLAIN) as engine:
        media = engine.core.media
        assert media is not None
        before = media.encode_s
        first, _ = await answer(engine, ids, [{**encoded, "feature": vectors}])
        second, num_cached = await answer(engine, ids, [{**encoded, "feature": vectors.numpy()}])
        assert first.agrees(expected)
        assert second.agrees(expected)
        assert num_cached or family == "gemma3"
        assert media.encode_s == before, "nothing was encoded"
        if not grids:  # one item per picture
            items = [{**encoded, "feature": half} for half in vectors.chunk(2)]
            assert (await answer(engine, ids, items))[0].agrees(expected)
        other, _ = await answer(engine, ids, [{**encoded, "feature": vectors.flip(0)}])
        assert not other.agrees(expected)
        engine.core.check()


async def test_vectors_that_do_not_fit_are_refused() -> None:
    inputs = processed("qwen2_vl")
    ids, vectors = inputs["input_ids"][0].tolist(), features("qwen2_vl", inputs).numpy()
    encoded = {"format": "precomputed_embedding", "image_grid_thw": inputs["image_grid_thw"], "feature": vectors}
    text = [3, 4, 5]  # without tokens of images
    output = {**inputs, "format": "processor_output"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids, "image_data": {**encoded, "feature": vectors[1:]}}, "tokens for vectors"),
        ({"input_ids": text, "image_data": encoded}, "the prompt has no tokens of images"),
        ({"input_ids": text, "image_data": {**encoded, "feature": vectors[:0]}}, "the prompt has no tokens of images"),
        ({"input_ids": text, "image_data": {**output, "input_ids": text}}, "cannot encode"),
        ({"input_ids": ids, "image_data": {**encoded, "feature": vectors[:, 1:]}}, r"must be a tensor"),
        ({"input_ids": ids, "image_data": {**encoded, "feature": vectors.astype(int)}}, r"must be a tensor"),
        ({"input_ids": ids, "image_data": {**encoded, "feature": vectors * np.nan}}, "not finite"),
        ({"input_ids": ids, "image_data": {**encoded, "image_grid_thw": None}}, "image_grid_thw is required"),
        ({"input_ids": ids[1:], "image_data": output}, "differ from the prompt"),
        ({"input_ids": ids, "image_data": {**output, "pixel_values": inputs["pixel_values"][1:]}}, "cannot encode"),
        ({"input_ids": ids, "image_data": [output, output]}, "takes one processor_output"),
        ({"input_ids": ids, "image_data": [encoded, PICTURES[0]]}, "same format"),
        ({"text": "Once", "image_data": encoded}, "input_ids instead of text"),
        ({"input_ids": ids, "image_data": {**encoded, "feature": vectors.tolist(), "image_grid_thw": [[1, 2, 2]]}},
         "from Python only"),
    ]  # fmt: skip
    async with Engine(tiny_seeing.cached("qwen2_vl"), **PLAIN) as engine:
        for fields, reason in cases:
            with pytest.raises(InvalidRequest, match=reason):
                await engine.generate(fields.pop("text", None), SAMPLING, **fields)
        engine.core.check()

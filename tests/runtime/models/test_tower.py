"""The part of a multimodal model before its language model."""

from __future__ import annotations

import torch

from runtime.models.by_transformers.tower import _between_texts


def test_the_text_around_a_trial_is_no_token_of_the_image() -> None:
    """In a small vocabulary, one of the first ids may be the image token, so the trial's text must avoid it."""
    ids, types = torch.tensor([[4, 3, 3, 7]]), torch.tensor([[0, 1, 1, 0]])
    longer = _between_texts({"input_ids": ids, "mm_token_type_ids": types, "pixel_values": ids.float()})
    assert longer["input_ids"].tolist() == [[5, 4, 3, 3, 7, 5]]
    assert longer["mm_token_type_ids"].tolist() == [[0, 0, 1, 1, 0, 0]]
    assert torch.equal(longer["pixel_values"], ids.float())

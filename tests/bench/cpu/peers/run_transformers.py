"""transformers: `generate` on a batch of prompts of equal length."""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
from typing import Any

import answering


def convert(options: argparse.Namespace) -> None:
    os.symlink(options.checkpoint, options.output, target_is_directory=True)


class Generation:
    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return output[:, ids.shape[1] :].tolist()


if __name__ == "__main__":
    answering.main(("transformers", "torch"), convert, Generation)

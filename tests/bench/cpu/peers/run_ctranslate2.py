"""CTranslate2. It has no bfloat16 on CPUs, so it runs in float32 instead."""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
from pathlib import Path

import answering

FORMS = {"bf16": "float32", "int8": "int8"}


def convert(options: argparse.Namespace) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(options.checkpoint).convert(options.output, quantization=FORMS[options.weights])


class Generation:
    def __init__(self, options: argparse.Namespace) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            options.model, device="cpu", inter_threads=1, intra_threads=options.threads
        )
        names = json.loads((Path(options.model) / "vocabulary.json").read_text())
        self._names = names

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        results = self._generator.generate_batch(
            [[self._names[id] for id in ids] for ids in prompts],
            max_batch_size=0,
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]


if __name__ == "__main__":
    answering.main(("ctranslate2",), convert, Generation)

"""ONNX Runtime GenAI. It has no bfloat16 on CPUs, so it runs in float32 instead."""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import answering

FORMS = {"bf16": "fp32", "int8": "int8", "int4": "int4"}


def convert(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "--input", options.checkpoint]
    command += ["--output", options.output, "--precision", FORMS[options.weights], "--execution_provider"]
    command += ["cpu", "--cache_dir", f"{options.output}-cache"]
    if options.weights != "bf16":
        command += ["--extra_options", "int4_accuracy_level=4"]
    subprocess.run(command, check=True)


class Generation:
    def __init__(self, options: argparse.Namespace) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        config = onnxruntime_genai.Config(options.model)
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options.threads}}}})
        )
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        import numpy

        length = len(prompts[0]) + new_tokens
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=length, min_length=length)
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(numpy.array(prompts, dtype=numpy.int32))
        while not generator.is_done():
            generator.generate_next_token()
        start = len(prompts[0])
        return [generator.get_sequence(row)[start:].tolist() for row in range(len(prompts))]


if __name__ == "__main__":
    answering.main(("onnxruntime-genai", "onnxruntime"), convert, Generation)

"""OpenVINO GenAI: the continuous batching pipeline with its prefix cache."""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import answering

CACHE_GB = 2
FROM_OLDER = ("gemma3_text",)  # model types that its exporter reads only with an older transformers


def convert(options: argparse.Namespace) -> None:
    exporter = Path(sys.executable).parent / "optimum-cli"
    form = {"bf16": "fp16"}.get(options.weights, options.weights)
    command = [str(exporter), "export", "openvino", "--model", options.checkpoint]
    command += ["--task", "text-generation-with-past", "--weight-format", form, options.output]
    described = json.loads((Path(options.checkpoint) / "config.json").read_text())
    variables = dict(os.environ)
    if described["model_type"] in FROM_OLDER:
        variables["PYTHONPATH"] = str(Path(sys.prefix) / "older")
    subprocess.run(command, check=True, env=variables)


class Pipeline:
    def __init__(self, options: argparse.Namespace) -> None:
        import openvino
        import openvino_genai

        config = openvino_genai.SchedulerConfig()
        config.cache_size = CACHE_GB
        config.enable_prefix_caching = True
        config.max_num_seqs = options.batch
        config.max_num_batched_tokens = options.context  # the default of 256 is slower with shared prefixes
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": options.threads}
        self._tensor = openvino.Tensor
        self._settings = openvino_genai.GenerationConfig
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, config, "CPU", properties)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        import numpy

        settings = self._settings(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        tensors = [self._tensor(numpy.array([ids], dtype=numpy.int64)) for ids in prompts]
        results = self._pipeline.generate(tensors, [settings] * len(prompts))
        return [result.m_generation_ids[0] for result in results]


if __name__ == "__main__":
    answering.main(("openvino", "openvino-genai", "nncf", "optimum-intel"), convert, Pipeline)

"""Embeddings by one engine. A job is a line of JSON with texts; its answer has the duration and the vectors."""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import answering

Encode = Callable[[list[str]], Any]  # texts -> vectors [N, E] of length 1
ST_BATCH, OV_BATCH = 32, 16


def penstock(options: argparse.Namespace) -> Encode:
    from serve import SyncEngine

    engine = SyncEngine(model_path=options.model, dtype=options.dtype, log_level="warning")
    engine.start()
    return lambda texts: [answer["embedding"] for answer in engine.encode(texts)]


def sentence_transformers(options: argparse.Namespace) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(options.threads)
    model = SentenceTransformer(options.model, device="cpu", model_kwargs={"dtype": options.dtype})

    def encode(texts: list[str]) -> Any:
        made = model.encode(texts, batch_size=ST_BATCH, normalize_embeddings=True, convert_to_tensor=True)
        return made.float().numpy()

    return encode


def openvino(options: argparse.Namespace) -> Encode:
    """Use OpenVINO's fastest known method: asynchronous jobs, tokenization during computation, mean pooling only."""
    import numpy
    import openvino as ov
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    names = ("input_ids", "attention_mask", "token_type_ids")
    model: Any = AutoModel.from_pretrained(options.model).eval()
    converted = ov.convert_model(model, example_input={name: torch.ones(2, 128, dtype=torch.int64) for name in names})
    with TemporaryDirectory() as folder:  # a copy of the folder without torch's weights
        path = Path(folder) / "model.xml"
        ov.save_model(converted, path, compress_to_fp16=False)
        settings = {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_NUM_THREADS": options.threads}
        precision = {"float32": "f32", "bfloat16": "bf16"}[options.dtype]
        settings["INFERENCE_PRECISION_HINT"] = precision
        compiled = ov.Core().compile_model(path, "CPU", settings)
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    tokenizer.enable_padding()
    jobs, found = ov.AsyncInferQueue(compiled), {}

    def done(request: Any, job: tuple[int, Any]) -> None:
        first, mask = job
        states = request.get_output_tensor(0).data
        vectors = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        found[first] = vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)

    jobs.set_callback(done)

    def encode(texts: list[str]) -> Any:
        found.clear()
        for first in range(0, len(texts), OV_BATCH):
            made = tokenizer.encode_batch(texts[first : first + OV_BATCH])
            ids, mask = (numpy.array([getattr(one, of) for one in made]) for of in ("ids", "attention_mask"))
            inputs = dict(zip(names, (ids, mask, numpy.zeros_like(ids)), strict=True))
            jobs.start_async(inputs, (first, mask.astype(numpy.float32)))
        jobs.wait_all()
        return numpy.concatenate([found[first] for first in sorted(found)])

    return encode


ENGINES = {"ours": penstock, "sentence-transformers": sentence_transformers, "openvino": openvino}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, choices=tuple(ENGINES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    lines = answering.Lines()
    encode = ENGINES[options.engine](options)
    lines.say({"ready": True, "versions": answering.versions(("penstock", options.engine))})
    while (job := lines.next_job()) is not None:
        began, used = time.perf_counter(), time.process_time()
        vectors = encode(job["texts"])
        seconds, used = time.perf_counter() - began, time.process_time() - used
        kept = [[float(x) for x in vector] for vector in vectors[:4]]
        lines.say({"seconds": seconds, "cpu_s": used, "count": len(vectors), "vectors": kept})


if __name__ == "__main__":
    main()

"""Options of other servers, and of later versions of SGLang, with their replacements, for error messages."""

from __future__ import annotations

from collections.abc import Mapping

# Maps another server's flag to Penstock's option, or to advice.
_ELASTIC = (
    "leave it out: it needs the elastic process groups of Mooncake, which Penstock does not use; with --dp-size, a "
    "replica whose process ends is started again while the others continue"
)
OTHER_NAMES: Mapping[str, str] = {
    # SGLang after 0.5.2
    "--enable-single-batch-overlap": "--enable-two-batch-overlap, which needs no kernels of DeepEP",
    "--elastic-ep-backend": _ELASTIC,
    "--elastic-ep-rejoin": _ELASTIC,
    "--elastic-ep-join-mode": _ELASTIC,
    "--max-ep-size": _ELASTIC,
    "--mooncake-ib-device": "leave it out: pages of the KV cache are sent over TCP (--disaggregation-transfer-backend)",
    # vLLM
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enable-prefix-caching": "leave it out: prefixes are cached unless --disable-radix-cache is given",
    "--enable-chunked-prefill": "leave it out: long prompts are always computed in chunks (--chunked-prefill-size)",
    "--no-enable-chunked-prefill": "--chunked-prefill-size -1",
    "--enforce-eager": "--disable-cuda-graph",
    "--seed": "--random-seed",
    "--tokenizer": "--tokenizer-path",
    "--hf-overrides": "--json-model-override-args",
    "--override-generation-config": "--preferred-sampling-params",
    "--generation-config": "leave it out: the model's generation_config.json is read",
    "--runner": "--is-embedding for pooling; encoders need no option",
    "--task": "--is-embedding for embed; encoders and classifiers need no option",
    "--convert": "--is-embedding for embed; encoders and classifiers need no option",
    "--enable-auto-tool-choice": "leave it out: tool calls are on if their format is known (--tool-call-parser)",
    "--enable-reasoning": "leave it out: --reasoning-parser is guessed from the chat template",
    "--guided-decoding-backend": "--grammar-backend",
    "--structured-outputs-config": "--grammar-backend",
    "--scheduling-policy": "--enable-priority-scheduling --schedule-low-priority-values-first for priority",
    "--allowed-origins": "--cors-allow-origins",
    "--uvicorn-log-level": "--log-level-http",
    "--disable-uvicorn-access-log": "--log-level-http warning",
    "--enable-log-requests": "--log-requests",
    "--disable-log-requests": "leave it out: requests are logged with --log-requests only",
    "--no-enable-log-requests": "leave it out: requests are logged with --log-requests only",
    "--disable-log-stats": "--log-level warning; metrics are kept with --enable-metrics only",
    "--enable-expert-parallel": "--enable-ep-moe",
    "--distributed-executor-backend": "leave it out: Penstock starts one process per rank",
    "--kv-cache-memory-bytes": "--max-total-tokens",
    "--num-gpu-blocks-override": "--max-total-tokens",
    "--max-logprobs": "leave it out: the API's own limit applies",
    "--api-server-count": "--tokenizer-worker-num",
    "--async-scheduling": "leave it out: steps overlap unless --disable-overlap-schedule is given",
    "--enable-piecewise-cuda-graph": "leave it out: steps with prompts are captured by default",
    "--piecewise-cuda-graph-compiler": "leave it out: the model itself is captured, without a compiler",
    "--compilation-config": "leave it out, or --enable-torch-compile",
    "--num-scheduler-steps": "leave it out: steps overlap unless --disable-overlap-schedule is given",
    "--max-seq-len-to-capture": "--cuda-graph-max-bs, which limits graphs by batch size",
    "--disable-frontend-multiprocessing": "leave it out: the frontend and the engine share a process",
    "--chat-template-content-format": "leave it out: it is detected from the chat template",
    "--response-role": "leave it out: the role is always assistant",
    "--ssl-ca-cert": "--ssl-ca-certs",
    # llama.cpp
    "--ctx-size": "--context-length",
    "--n-gpu-layers": "leave it out: the whole model is on one device (--device)",
    "--gpu-layers": "leave it out: the whole model is on one device (--device)",
    "--threads": "--cpu-threads",
    "--parallel": "--max-running-requests",
    "--alias": "--served-model-name",
    "--batch-size": "--chunked-prefill-size",
    "--ubatch-size": "--chunked-prefill-size",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--flash-attn": "leave it out: see --attention-backend",
    "--jinja": "leave it out: jinja chat templates are always used",
    "--no-mmap": "--weight-loader-disable-mmap",
    "--mlock": "leave it out: weights stay in memory",
    "--embedding": "--is-embedding",
    "--embeddings": "--is-embedding",
    "--hf-repo": "--model-path",
    "--metrics": "--enable-metrics",
    # TGI
    "--model-id": "--model-path",
    "--num-shard": "--tp-size",
    "--sharded": "--tp-size",
    "--max-concurrent-requests": "--max-running-requests",
    "--max-batch-prefill-tokens": "--chunked-prefill-size",
    "--max-input-tokens": "--context-length, which holds prompt and output",
    "--max-input-length": "--context-length, which holds prompt and output",
    "--quantize": "--quantization",
    "--hostname": "--host",
}


def instead_of(flag: str) -> str:
    """Return the end of an error message that names the replacement for another server's flag, or ""."""
    said = OTHER_NAMES.get(flag, "")
    return f"; use {said}" if said.startswith("--") else f"; {said}" if said else ""

"""vLLM's offline API on Penstock's engine: `LLM`, `LLMEngine`, `AsyncLLM`, and the other names that scripts import.

    from penstock.vllm import LLM, SamplingParams

    llm = LLM(model="...")
    for output in llm.generate(["Hello", "Once"], SamplingParams(temperature=0, max_tokens=16)):
        print(output.outputs[0].text)

Scripts written for vLLM run with this module in place of `vllm` and its submodules.
"""

from serve.python.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams
from serve.vllm.arguments import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser, ProfilerConfig
from serve.vllm.async_llm import AsyncLLM, AsyncLLMEngine
from serve.vllm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from serve.vllm.llm import LLM, PoolingParams
from serve.vllm.llm_engine import LLMEngine
from serve.vllm.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    process_dict_updates,
)
from serve.vllm.metrics import Counter, Gauge, Histogram, Metric, Vector
from serve.vllm.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from serve.vllm.prompts import LoRARequest, TextPrompt, TokensPrompt
from serve.vllm.utilities import VllmConfig, cleanup_dist_env_and_memory, init_logger, print_embeddings

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BatchUpdate",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "Metric",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProfilerConfig",
    "RequestLogitsProcessor",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "VllmConfig",
    "cleanup_dist_env_and_memory",
    "init_logger",
    "print_embeddings",
    "process_dict_updates",
]

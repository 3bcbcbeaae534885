"""`serve.vllm` under Penstock's name: `from penstock.vllm import LLM, SamplingParams`."""

from serve.vllm import *  # noqa: F403
from serve.vllm import __all__ as __all__

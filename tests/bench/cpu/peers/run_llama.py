"""llama.cpp through llama-cpp-python: sequences are decoded together, and a common prefix is computed once and kept."""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import answering
from gguf_file import write

BATCH_TOKENS = 512  # tokens per call, llama.cpp's default physical batch size
MIN_PREFIX = 64  # minimum number of tokens worth sharing


def convert(options: argparse.Namespace) -> None:
    """Write a GGUF file like llama.cpp's conversion. 4-bit weights come from llama.cpp's quantiser."""
    Path(options.output).mkdir(parents=True)
    file = Path(options.output) / "model.gguf"
    if options.weights != "int4":
        write(Path(options.checkpoint), file, options.weights)
        return
    whole = file.with_name("whole.gguf")
    write(Path(options.checkpoint), whole, "bf16")
    quantize(whole, file, options.form or "q4_0")
    whole.unlink()


def quantize(whole: Path, file: Path, form: str) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{form.upper()}")
    if llama_cpp.llama_model_quantize(str(whole).encode(), str(file).encode(), params):
        raise RuntimeError(f"llama.cpp cannot write {form}")


class Batched:
    """Decodes many sequences greedily in one context. Sequence 0 keeps the prefix of the last call."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        file = str(Path(options.model) / "model.gguf")
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(4 * options.context, 256 * options.batch)
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = options.batch + 1
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = options.threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._kept: list[int] = []

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        prefix = common_prefix(prompts)
        for number in range(1, len(prompts) + 1):
            self._lib.llama_memory_seq_rm(self._memory, number, -1, -1)
        self._keep(prefix)
        for number in range(1, len(prompts) + 1):
            self._lib.llama_memory_seq_cp(self._memory, 0, number, -1, -1)
        outputs: list[list[int]] = [[] for _ in prompts]
        todo = [
            (id, position, number + 1, position + 1 == len(prompt))
            for number, prompt in enumerate(prompts)
            for position, id in list(enumerate(prompt))[len(prefix) :]
        ]
        for step in range(new_tokens):
            for number, id in self._compute(todo):
                outputs[number - 1].append(id)
            todo = [(ids[-1], len(prompts[number]) + step, number + 1, True) for number, ids in enumerate(outputs)]
        return outputs

    def _keep(self, prefix: list[int]) -> None:
        if prefix == self._kept and prefix:
            return
        self._lib.llama_memory_seq_rm(self._memory, 0, -1, -1)
        list(self._compute([(id, position, 0, False) for position, id in enumerate(prefix)]))
        self._kept = prefix

    def _compute(self, todo: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute entries (id, position, sequence, whether the next id is needed), and return the next id of each
        sequence.
        """
        import numpy

        found, batch = [], self._batch
        for start in range(0, len(todo), BATCH_TOKENS):
            part = todo[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for i, (id, position, number, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = id, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
            if self._lib.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed")
            for i, (_, _, number, wanted) in enumerate(part):
                if wanted:
                    logits = self._lib.llama_get_logits_ith(self._context, i)
                    found.append((number, int(numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())))
        self._lib.llama_synchronize(self._context)
        return found


def common_prefix(prompts: list[list[int]]) -> list[int]:
    """Return the common prefix of several prompts if it is long enough. It never includes a prompt's last token."""
    first, length = prompts[0], min(map(len, prompts)) - 1
    for prompt in prompts:
        length = next((i for i in range(length) if prompt[i] != first[i]), length)
    return first[:length] if len(prompts) > 1 and length >= MIN_PREFIX else []


def server_command(options: argparse.Namespace, port: int) -> list[str]:
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(Path(options.model) / "model.gguf")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", str(options.context)]
    command += ["--n_threads", str(options.threads), "--n_threads_batch", str(options.threads)]
    return [*command, "--interrupt_requests", "false"]


if __name__ == "__main__":
    answering.main(("llama-cpp-python", "gguf"), convert, Batched, server_command)

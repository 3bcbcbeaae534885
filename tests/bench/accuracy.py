"""`accuracy`: compare weights and caches of 16 bits or fewer with transformers in float32.

Weights are quantised while they load, or stored in a checkpoint of each format, which the study writes. The prompts are
held-out questions of the demo model's evaluation, and transformers answers them greedily in float32. The engine
generates its own answers. It also scores the reference answers: for each position it returns the most likely token and
the log-probability of the reference token.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from bench import PROGRAM
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.load import Progress, parse
from serve.bench.options import add_output_options, new_parser
from serve.demo import demo_path

if TYPE_CHECKING:
    from runtime.config import Args
    from serve import Engine


class Way(NamedTuple):
    """A configuration: options of the engine, and a function that writes its checkpoint, if it needs one."""

    options: Mapping[str, Any]
    write: Callable[[Path, Path], str] | None = None


def rounded(**options: Any) -> Way:
    """Return a configuration that quantises the ordinary checkpoint while it loads."""
    return Way({"dtype": "bfloat16", **options})


def form(name: str, **options: Any) -> Way:
    """Return a configuration with a checkpoint in this format, written by the format's library or by its published
    layout.
    """

    def write(source: Path, target: Path) -> str:
        from quantized_checkpoints import convert

        return convert(source, target, name, **options)[0]

    return Way({"dtype": "bfloat16"}, write)


def quantized(method: str) -> Way:
    """Return a configuration with a checkpoint of `penstock quantize`."""

    def write(source: Path, target: Path) -> str:
        from runtime.loading.quantize import quantize_checkpoint

        quantize_checkpoint(str(source), method, str(target))
        return str(target)

    return Way({"dtype": "bfloat16"}, write)


def gguf(kind: str) -> Way:
    """Return a configuration with a checkpoint of llama.cpp's quantiser."""

    def write(source: Path, target: Path) -> str:
        from gguf_files import by_llama_cpp, convert

        whole, _ = convert(source, target, "BF16")
        return by_llama_cpp(whole, target / f"{kind}.gguf", kind)

    return Way({"dtype": "bfloat16"}, write)


GGUF_KINDS = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M", "Q2_K")
WAYS: Mapping[str, Way] = {
    "float32": Way({"dtype": "float32"}),
    "bfloat16": rounded(),
    "w8a8_int8": rounded(quantization="w8a8_int8"),
    "w4a16": rounded(quantization="w4a16"),
    "w4a8": rounded(quantization="w4a8"),
    "int8wo": rounded(torchao_config="int8wo"),
    "fp8wo": rounded(torchao_config="fp8wo"),
    "int4wo-32": rounded(torchao_config="int4wo-32"),
    "a cache in e4m3": rounded(kv_cache_dtype="fp8_e4m3"),
    "a cache in e5m2": rounded(kv_cache_dtype="fp8_e5m2"),
    **{f"penstock quantize {method}": quantized(method) for method in ("w8a8", "fp8", "w4a16")},
    "fp8 in blocks": form("fp8"),
    "fp8 by output": form("fp8", scope="channel"),
    "fp8 of whole tensors": form("fp8", scope="tensor"),
    "compressed-tensors W8A8": form("compressed-tensors", preset="W8A8"),
    "compressed-tensors W4A16": form("compressed-tensors", preset="W4A16"),
    "compressed-tensors W4A16 with zeros": form("compressed-tensors", preset="W4A16", symmetric=False),
    "compressed-tensors nvfp4": form("compressed-tensors", preset="NVFP4A16"),
    "compressed-tensors mxfp4": form("compressed-tensors", preset="MXFP4A16"),
    "AWQ": form("awq"),
    **{f"GPTQ of {bits} bits": form("gptq", bits=bits) for bits in (8, 4, 3)},
    "bitsandbytes int8": form("bitsandbytes", kind="int8"),
    "bitsandbytes nf4": form("bitsandbytes", kind="nf4", nested=True),
    "bitsandbytes fp4": form("bitsandbytes", kind="fp4"),
    "torchao int8": form("torchao", kind="int8"),
    "torchao fp8": form("torchao", kind="fp8"),
    "torchao int4": form("torchao", kind="int4"),
    **{f"GGUF {kind}": gguf(kind) for kind in GGUF_KINDS},
}


class Expected(NamedTuple):
    """The reference results of transformers for one prompt."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # greedy answer, without the EOS token
    logprobs: tuple[float, ...]  # log-probabilities of the answer's tokens


class Found(NamedTuple):
    """The engine's results for the same prompt."""

    answer: tuple[int, ...]  # the engine's own answer
    likeliest: tuple[int, ...]  # most likely token after each prefix of the reference answer
    logprobs: tuple[float, ...]  # log-probabilities of the reference tokens


class Agreement(NamedTuple):
    """How well one configuration agrees with the reference."""

    way: str
    same_token: float  # share of positions with the same likeliest token
    mean_difference: float  # mean absolute difference of the log-probabilities of the reference tokens
    same_answer: float  # share of answers that are equal from beginning to end

    @classmethod
    def of(cls, way: str, expected: Sequence[Expected], found: Sequence[Found]) -> Agreement:
        """Compare the results, which must have at least one token."""
        pairs = list(zip(expected, found, strict=True))
        same = [a == b for one, other in pairs for a, b in zip(one.answer, other.likeliest, strict=True)]
        apart = [abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        equal = [one.answer == other.answer for one, other in pairs]
        return cls(way, sum(same) / len(same), sum(apart) / len(apart), sum(equal) / len(equal))


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "accuracy",
        "Compare with transformers in float32. Every other option is the engine's.",
        program=PROGRAM,
    )
    group = options.add_argument_group("prompts")
    group.add_argument("--num-prompts", type=int, default=100, help="held-out questions, of all skills")
    group.add_argument("--new-tokens", type=int, default=32, help="of each answer, at most")
    group.add_argument("--ways", nargs="+", choices=WAYS, default=tuple(WAYS), help="all unless told")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    options, args = parse(parser(), argv)
    if min(options.num_prompts, options.new_tokens) < 1:
        raise ConfigurationError("--num-prompts and --new-tokens must be at least 1.")
    path = args.model.model_path or demo_path()
    if path is None:
        raise ConfigurationError("There is no demo model here; name a checkpoint with --model-path.")
    expected = reference(path, options.num_prompts, options.new_tokens)
    agreements = []
    ask = partial(answers, expected, options.new_tokens)
    for name in options.ways:
        way = WAYS[name]
        with TemporaryDirectory(prefix="accuracy-") as folder:
            try:
                here = way.write(Path(path), Path(folder) / "made") if way.write else path
            except ImportError as error:
                report.say(f"{name} is left out: {error}.")
                continue
            agreements.append(Agreement.of(name, expected, _with_engine(here, args, way.options, ask)))
    report.say(render(expected, agreements))
    if options.output_file:
        results = {"agreements": [report.plain(agreement) for agreement in agreements]}
        settings = {**vars(options), "engine": args.keywords()}
        report.write(options.output_file, report.document("accuracy", settings, results, argv=argv, program=PROGRAM))
    return 0


def render(expected: Sequence[Expected], agreements: Sequence[Agreement]) -> str:
    """Return the table in Markdown."""
    tokens = sum(len(one.answer) for one in expected)
    lines = [
        f"{len(expected)} prompts, {tokens} tokens, against transformers in float32:",
        "",
        "| computed in | same likeliest token | mean difference of log-probabilities | same answer |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {way} | {same_token:.2%} | {difference:.5f} | {same_answer:.1%} |"
        for way, same_token, difference, same_answer in agreements
    ]
    return "\n".join(lines)


def reference(path: str, num_prompts: int, new_tokens: int) -> list[Expected]:
    """Return greedy answers of transformers in float32. Blocks."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise ConfigurationError(f"The questions need a chat template, and {path} has none.")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    expected = []
    with torch.inference_mode(), Progress(num_prompts, "reference answers") as progress:
        for prompt in prompts(tokenizer, num_prompts):
            ids = torch.tensor([prompt])
            whole = model.generate(
                ids, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=new_tokens
            )
            answer = [token for token in whole[0, len(prompt) :].tolist() if token not in ends]
            logits = model(whole, use_cache=False).logits[0, len(prompt) - 1 :].float()
            chosen = logits.log_softmax(-1)[range(len(answer)), answer]
            expected.append(Expected(tuple(prompt), tuple(answer), tuple(chosen.tolist())))
            progress.advance()
    return expected


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Return held-out questions of every skill in turn, as token ids."""
    from demo_model.evaluation import EXAMS, SEED

    drawn = []
    for exam in EXAMS:
        rng = Random(f"{SEED}/{exam.name}")
        questions = exam.questions(rng)
        drawn.append(rng.sample(questions, len(questions)))
    mixed = [question for turn in zip_longest(*drawn) for question in turn if question is not None]
    return [_prompt(tokenizer, question.asked, question.thinking) for question in mixed[:count]]


def _prompt(tokenizer: Any, asked: Any, thinking: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        [message.as_chat() for message in asked.messages],
        tools=[{"type": "function", "function": tool} for tool in asked.tools] or None,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=thinking,
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


async def answers(expected: Sequence[Expected], new_tokens: int, engine: Engine) -> list[Found]:
    """Return the engine's own answers, and its scores of the reference answers."""
    own = await engine.generate(
        input_ids=[list(one.prompt) for one in expected],
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens},
    )
    shown = await engine.generate(
        input_ids=[[*one.prompt, *one.answer] for one in expected],
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
    )
    return [_found(*one) for one in zip(expected, own, shown, strict=True)]


def _found(expected: Expected, own: Mapping[str, Any], shown: Mapping[str, Any]) -> Found:
    first, meta, output = len(expected.prompt), shown["meta_info"], list(own["output_ids"])
    reason = own["meta_info"]["finish_reason"]
    if output and reason["type"] == "stop" and reason.get("matched") == output[-1]:
        output.pop()
    return Found(
        tuple(output),
        tuple(top[0][1] for top in meta["input_top_logprobs"][first:]),
        tuple(logprob for logprob, *_ in meta["input_token_logprobs"][first:]),
    )


def _with_engine(
    path: str,
    args: Args,
    settings: Mapping[str, Any],
    work: Callable[[Engine], Awaitable[list[Found]]],
) -> list[Found]:
    from serve import Engine

    async def run() -> list[Found]:
        async with Engine(**{**args.keywords(), **settings, "model_path": path}) as engine:
            return await work(engine)

    return anyio.run(run)

"""On a CPU, tokens and log-probabilities of a request depend on the request alone, bit by bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import lora_adapters
import tiny_checkpoints
from ops.machine import Machine
from runtime.actors import assemble
from runtime.config import Args
from runtime.errors import ConfigurationError, InvalidRequest
from serve import Engine, SyncEngine

PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}
LENGTHS = (3, 17, 60, 110)


def prompts(count: int, vocab_size: int = 131) -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.randrange(3, vocab_size) for _ in range(40)]  # a prefix that half of the prompts begin with
    found = [[draw.randrange(3, vocab_size) for _ in range(draw.choice(LENGTHS))] for _ in range(count)]
    return [shared + ids if number % 2 else ids for number, ids in enumerate(found)]


async def answer(engine: Engine, ids: list[int], temperature: float = 1.0) -> tuple[Any, ...]:
    """Return the tokens of a seeded request, and the log-probabilities of its prompt and output."""
    sampling = {"temperature": temperature, "seed": len(ids), "max_new_tokens": 16, "ignore_eos": True}
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    found = await engine.generate(input_ids=ids, sampling_params=sampling, **options)
    meta = found["meta_info"]
    return found["output_ids"], meta["output_token_logprobs"], meta["input_token_logprobs"]


async def outputs_warm(engine: Engine, ids: list[int]) -> tuple[Any, ...]:
    """Like `answer` without the prompt's log-probabilities, so that a cached prefix is used."""
    sampling = {"temperature": 1.0, "seed": len(ids), "max_new_tokens": 16, "ignore_eos": True}
    found = await engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
    return found["output_ids"], found["meta_info"]["output_token_logprobs"]


SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "vocab_size": 131}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
SHAPES: dict[str, dict[str, int]] = {
    "llama": SHAPE, "qwen3_moe": {**SHAPE, "moe_intermediate_size": 64}, "deepseek_v3": {"hidden_size": 64, **LATENT},
}  # fmt: skip
CHUNKED: dict[str, Any] = {"chunked_prefill_size": 16, "page_size": 4}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {}, id="dense"),
        pytest.param("qwen3_moe", {}, id="experts", marks=pytest.mark.slow),
        pytest.param("llama", {"quantization": "w8a8_int8"}, id="int8", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"enable_deterministic_inference": True}, id="latent", marks=pytest.mark.slow),
    ],
)
async def test_answers_depend_on_the_request_alone(family: str, options: dict[str, Any]) -> None:
    path = tiny_checkpoints.cached(family, **SHAPES[family])
    sizes = prompts(16, 90)
    async with Engine(path, **PLAIN, **options, disable_radix_cache=True) as engine:
        alone = [await answer(engine, ids) for ids in sizes]
        for crowd in (2, 16):
            for first in range(0, len(sizes), crowd):
                together = await asyncio.gather(*(answer(engine, ids) for ids in sizes[first : first + crowd]))
                assert list(together) == alone[first : first + crowd], crowd
    async with Engine(path, **PLAIN, **options, **CHUNKED) as engine:
        assert list(await asyncio.gather(*(answer(engine, ids) for ids in sizes))) == alone
        for _ in range(2):  # cold, then warm
            warm = [await outputs_warm(engine, ids) for ids in sizes]
            assert warm == [each[:2] for each in alone]


async def crowd(engine: Engine, asked: list[list[int]], size: int, adapters: list[str | None]) -> list[tuple[Any, ...]]:
    """Return the answers of requests of which `size` run at a time; each has a neighbour of another model."""
    slots, found = asyncio.Semaphore(size), {}

    async def one(number: int) -> None:
        async with slots:
            neighbour = engine.generate(
                input_ids=asked[-1 - number][:20],
                sampling_params={"max_new_tokens": 3, "ignore_eos": True},
                lora_path=adapters[number % len(adapters)],
            )
            found[number], _ = await asyncio.gather(outputs_warm(engine, asked[number]), neighbour)

    await asyncio.gather(*(one(number) for number in range(len(asked))))
    return [found[number] for number in range(len(asked))]


RETRACTING: dict[str, Any] = {"page_size": 4, "max_total_tokens": 400, "schedule_conservativeness": 0.01}
SITUATIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "crowds": ({}, (2, 7, 64)),
    "chunks": (CHUNKED, (8, 64)),
    "retracted": (RETRACTING, (64,)),
    "speculated": ({"speculative_algorithm": "NGRAM", "speculative_adaptive": {"enabled": False}}, (16,)),
    "adapters": ({"enable_lora": True}, (16,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
async def test_nothing_around_a_request_changes_it(count: int) -> None:
    path = tiny_checkpoints.cached("llama", **SHAPE)
    asked = prompts(count, 90)
    async with Engine(path, **PLAIN, disable_radix_cache=True) as engine:
        alone = [await outputs_warm(engine, ids) for ids in asked]
    for name, (options, sizes) in SITUATIONS.items():
        adapters: list[str | None] = [None]
        if name == "adapters":
            folders = {letter: lora_adapters.adapter(path, seed) for letter, seed in (("a", 1), ("b", 2))}
            options = {**options, "lora_paths": [f"{letter}={folder}" for letter, folder in folders.items()]}
            adapters = ["a", None, "b"]
        async with Engine(path, **PLAIN, **options) as engine:
            for size in sizes:
                assert await crowd(engine, asked, size, adapters) == alone, (name, size)
            if name == "retracted":
                assert engine.status().num_retracted
            engine.core.check()


@pytest.mark.slow
async def test_sums_that_depend_on_the_batch_are_found() -> None:
    """The mutation: torch computes attention, whose sums depend on the longest row of the batch."""
    path = tiny_checkpoints.cached("llama", **SHAPE)
    asked = prompts(60, 90)
    async with Engine(path, **PLAIN, attention_backend="torch_native", disable_radix_cache=True) as engine:
        alone = [await outputs_warm(engine, ids) for ids in asked]
        assert await crowd(engine, asked, 16, [None]) != alone


@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow), pytest.param("deepseek_v3", marks=pytest.mark.slow)],
)
async def test_the_log_probabilities_equal_those_of_a_trainer(family: str) -> None:
    """The target keeps a checkpoint's weights in float32, although the checkpoint is in bfloat16."""
    path = tiny_checkpoints.cached(family, **{**SHAPES[family], "vocab_size": 131}, dtype="bfloat16")
    ids = prompts(2)[1]
    async with Engine(path, **PLAIN, rl_on_policy_target="fsdp") as engine:
        assert engine.core.plan.model.dtype == "float32"
        assert engine.core.plan.model.deterministic
        (found, outputs, inputs), *_ = await asyncio.gather(*(answer(engine, each) for each in (ids, ids[:9], ids[3:])))
    logits = tiny_checkpoints.reference(path, [*ids, *found[:-1]])
    wanted = logits.log_softmax(-1)
    chosen = [*ids[1:], *found]
    got = [logprob for logprob, *_ in [*inputs[1:], *outputs]]
    expected = [wanted[position, token].item() for position, token in enumerate(chosen)]
    most = 2e-5 if family == "deepseek_v3" else 1e-5  # latent attention multiplies in another order
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) < most


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "let the trainer compute in float32"),
        ({"quantization": "w8a8_int8"}, "not quantised"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype"),
        ({"attention_backend": "torch_native"}, "attention in torch"),
    ],
)
def test_a_trainer_is_not_promised_what_rounding_prevents(options: dict[str, Any], reason: str) -> None:
    path = tiny_checkpoints.cached("llama", **SHAPE)
    with pytest.raises(ConfigurationError, match=f"--rl-on-policy-target.*{reason}"):
        assemble.prepare(Args.of(model_path=path, rl_on_policy_target="fsdp", **options), Machine.probe())


def test_heads_of_other_sizes_make_no_such_promise() -> None:
    path = tiny_checkpoints.cached("llama", vocab_size=131)
    with (
        pytest.raises(ConfigurationError, match="heads of size 8"),
        SyncEngine(path, **PLAIN, enable_deterministic_inference=True),
    ):
        pass


async def test_a_request_may_insist_on_the_promise() -> None:
    insisting = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "deterministic": True}
    plain = {**insisting, "deterministic": False}
    for family, shape, options, refusal in (
        ("llama", SHAPE, {}, None),
        ("llama", SHAPE, {"attention_backend": "torch_native"}, "attention in torch"),
        ("deepseek_v3", SHAPES["deepseek_v3"], {}, "latent attention"),
        ("deepseek_v3", SHAPES["deepseek_v3"], {"enable_deterministic_inference": True}, None),
        ("llama", {"vocab_size": 131}, {}, "heads of size 8"),
    ):
        async with Engine(tiny_checkpoints.cached(family, **shape), **PLAIN, **options) as engine:
            found = await engine.generate(input_ids=[5, 6, 7], sampling_params=plain)
            if refusal is None:
                again = await engine.generate(input_ids=[5, 6, 7], sampling_params=insisting)
                assert again["output_ids"] == found["output_ids"]
            else:
                with pytest.raises(InvalidRequest, match=refusal) as failed:
                    await engine.generate(input_ids=[5, 6, 7], sampling_params=insisting)
                assert failed.value.param == "deterministic"


def test_a_gpu_makes_no_such_promise() -> None:
    from runtime.config.resolve import resolve
    from small_facts import FACTS

    args = Args.of(model_path="m", device="cuda", enable_deterministic_inference=True)
    with pytest.raises(ConfigurationError, match="depend on the batch"):
        resolve(args, Machine.named("h100"), FACTS)

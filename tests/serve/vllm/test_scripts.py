"""Calls that vLLM's published offline examples make, in our own words, on the demo model."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lora_adapters
from penstock.vllm import (
    LLM,
    AdapterLogitsProcessor,
    AsyncEngineArgs,
    AsyncLLM,
    BatchUpdate,
    BeamSearchParams,
    EngineArgs,
    FlexibleArgumentParser,
    Histogram,
    LLMEngine,
    LogitsProcessor,
    LoRARequest,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    process_dict_updates,
)
from runtime.errors import ConfigurationError, EngineClosed, InvalidRequest
from serve.demo import demo_path
from serve.vllm.arguments import EngineSettings

PROMPTS = ["Hello, my name is", "The capital of France is"]


class OnlyToken(LogitsProcessor):
    """Allows only the token that the request names, for a whole batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.tokens: dict[int, int] = {}

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def only(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> int | None:
            return params.extra_args["only"] if params.extra_args else None

        process_dict_updates(self.tokens, batch_update, only)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.tokens.items():
            kept = logits[row, token].clone()
            logits[row] = -torch.inf
            logits[row, token] = kept
        return logits


class NotTwice(AdapterLogitsProcessor):
    """Forbids the last token of the output, one function per request."""

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        def forbid(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if output_ids:
                logits[output_ids[-1]] = -torch.inf
            return logits

        return forbid


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "disable_log_stats": False}
    with LLM(logits_processors=[OnlyToken, NotTwice], **options) as llm:
        yield llm


def test_arguments_of_a_command_line() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    parser.set_defaults(model="m", runner="pooling", enforce_eager=True)
    args = parser.parse_args(["--max_tokens", "5", "--max_model_len=256", "--hf-overrides", '{"a": 1}'])
    assert args.max_tokens == 5
    engine_args = EngineArgs.from_cli_args(args)
    assert (engine_args.model, engine_args.max_model_len, engine_args.seed) == ("m", 256, None)
    assert EngineSettings.of(engine_args.keywords).options == {
        "model_path": "m",
        "context_length": 256,
        "disable_cuda_graph": True,
        "json_model_override_args": {"a": 1},
    }
    with pytest.raises(AttributeError):
        _ = engine_args.max_tokens


@pytest.mark.parametrize(
    ("keywords", "advice"),
    [
        ({"config_format": "mistral"}, "config.json"),
        ({"enable_prompt_embeds": True}, "token ids"),
        ({"distributed_executor_backend": "ray"}, "one process per rank"),
        ({"profiler_config": {"profiler": "cuda"}}, "torch"),
        ({"max_model_len": 8, "context_length": 9}, "twice"),
        ({"logits_processors": ["module:Class"]}, "classes"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(keywords: dict[str, Any], advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        EngineSettings.of(keywords)


def test_parameters_are_set_as_attributes() -> None:
    params = SamplingParams(temperature=0.5)
    params.max_tokens = 7
    params.logprobs = 2
    params.ignore_eos = True
    assert params == {"temperature": 0.5, "max_new_tokens": 7, "ignore_eos": True}
    assert params.logprobs == 2
    with pytest.raises(InvalidRequest, match="temperature"):
        params.temperature = -1
    with pytest.raises(InvalidRequest, match="max_tokens"):
        params.max_token = 3


def test_logits_processors_of_a_batch_and_of_requests(llm: LLM) -> None:
    only = SamplingParams(temperature=0, max_tokens=1, extra_args={"only": 67})
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(PROMPTS, [only, free], use_tqdm=False)
    assert first.outputs[0].token_ids == [67]
    ids = second.outputs[0].token_ids
    assert all(one != two for one, two in itertools.pairwise(ids))


def test_none_means_the_default(llm: LLM) -> None:
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "n": None, "temperature": 0}
    [output] = llm.generate(PROMPTS[0], SamplingParams(**nothing), use_tqdm=False)
    [plain] = llm.generate(PROMPTS[0], SamplingParams(temperature=0), use_tqdm=False)
    assert output.outputs == plain.outputs


def test_steps_of_an_engine(llm: LLM) -> None:
    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=1, prompt_logprobs=1)
    engine.add_request("a", PROMPTS[0], greedy)
    engine.add_request("b", PROMPTS[1], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.add_request("c", "word " * 900, greedy)
    with pytest.raises(InvalidRequest, match="unfinished"):
        engine.add_request("a", PROMPTS[0])
    done: dict[str, RequestOutput] = {}
    errors: list[Exception] = []
    while engine.has_unfinished_requests():
        try:
            done |= {output.request_id: output for output in engine.step() if output.finished}
        except InvalidRequest as error:
            errors.append(error)
    assert "context" in str(errors[0])
    assert {*done} == {"a", "b"}
    [whole] = llm.generate(PROMPTS[0], greedy, use_tqdm=False)
    assert done["a"].outputs == whole.outputs
    assert done["a"].prompt_logprobs == whole.prompt_logprobs
    assert len(done["b"].outputs[0].token_ids) == 3
    assert engine.step() == []


def test_a_step_returns_every_new_text(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA
    )
    llm.llm_engine.add_request("a", PROMPTS[0], params)
    while llm.engine.status().num_requests:  # all outputs arrive before the first step
        time.sleep(0.01)
    llm.llm_engine.add_request("long", "word " * 900)
    outputs: list[RequestOutput] = []
    failed = 0
    while llm.llm_engine.has_unfinished_requests():
        try:
            outputs += llm.llm_engine.step()
        except InvalidRequest:
            failed += 1
    [whole] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert "".join(output.outputs[0].text for output in outputs) == whole.outputs[0].text
    assert outputs[-1].outputs[0].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob)
    assert failed == 1


def test_a_step_after_the_end_does_not_wait_forever() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(max_model_len=512))
    engine.engine.pause_generation("in_place")
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    engine.shutdown()
    with pytest.raises(EngineClosed):
        list(iter(engine.step, None))  # step after step


def test_streams_of_every_kind_and_a_pause() -> None:
    async def texts(engine: AsyncLLM, name: str, kind: RequestOutputKind) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=kind)
        return [output.outputs[0].text async for output in engine.generate(PROMPTS[0], params, name)]

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=512))
        try:
            whole = await texts(engine, "whole", RequestOutputKind.FINAL_ONLY)
            assert len(whole) == 1
            assert (await texts(engine, "growing", RequestOutputKind.CUMULATIVE))[-1] == whole[0]
            assert "".join(await texts(engine, "new", RequestOutputKind.DELTA)) == whole[0]
            await engine.pause_generation(mode="keep")
            waiting = asyncio.ensure_future(texts(engine, "paused", RequestOutputKind.FINAL_ONLY))
            while not engine.engine.status().num_requests:
                await asyncio.sleep(0)
            assert not waiting.done()
            await engine.resume_generation()
            assert await waiting == whole
            with pytest.raises(InvalidRequest, match="abort"):
                await engine.pause_generation(mode="sometimes")
        finally:
            engine.shutdown()

    asyncio.run(main())


@pytest.mark.slow  # 10 s, most of them the import of transformers' models
def test_beam_search_finds_the_beams_of_transformers() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(str(demo_path()), dtype=torch.float32)
    with LLM(max_model_len=512, dtype="float32") as llm:
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
            beams = model.generate(
                ids, num_beams=3, num_return_sequences=3, max_new_tokens=6, do_sample=False, eos_token_id=None
            )
            assert [beam.tokens for beam in output.sequences] == beams.tolist()
            assert output.sequences[0].text == llm.get_tokenizer().decode(output.sequences[0].tokens)


def test_beams_of_more_prompts_than_a_call_takes(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=1, ignore_eos=True)
    outputs = llm.beam_search([[5]] * 1025, params, use_tqdm=True)
    assert "Beam search: 100%" in capsys.readouterr().err
    assert len(outputs) == 1025
    assert outputs[0].sequences[0].tokens == outputs[-1].sequences[0].tokens


def test_an_adapters_name_means_one_folder() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    first, second = (lora_adapters.adapter(str(demo_path()), seed) for seed in (1, 2))
    with LLM(max_model_len=512, enable_lora=True, max_lora_rank=8) as llm:
        [plain] = llm.generate(PROMPTS[0], greedy, use_tqdm=False)
        [adapted] = llm.generate(PROMPTS[0], greedy, use_tqdm=False, lora_request=LoRARequest("a", 1, first))
        assert adapted.outputs[0].cumulative_logprob != pytest.approx(plain.outputs[0].cumulative_logprob, abs=1e-3)
        with pytest.raises(InvalidRequest, match="another name"):
            llm.generate(PROMPTS[0], greedy, use_tqdm=False, lora_request=LoRARequest("a", 2, second))
        engine = llm.llm_engine  # a request may be aborted while its adapter is being loaded
        for name in ("1", "1_0"):
            long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
            engine.add_request(name, PROMPTS[0], long, lora_request=LoRARequest("b", 2, second))
        engine.abort_request("1")
        ends: dict[str, str | None] = {}
        while engine.has_unfinished_requests():
            ends |= {each.request_id: each.outputs[0].finish_reason for each in engine.step() if each.finished}
        assert ends == {"1": "abort", "1_0": "length"}


def test_metrics_are_objects(llm: LLM) -> None:
    llm.generate(PROMPTS[0], use_tqdm=False)
    metrics = llm.get_metrics()
    assert any(isinstance(metric, Histogram) and metric.count for metric in metrics)


def test_embeddings_are_shortened(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    [whole] = llm.encode(PROMPTS[0])
    assert "Prompts: 100%" in capsys.readouterr().err
    [short] = llm.embed(PROMPTS[0], pooling_params=PoolingParams(dimensions=8))
    expected = whole.outputs.data[:8] / whole.outputs.data[:8].norm()
    assert torch.allclose(short.outputs.data, expected, atol=1e-5)
    with pytest.raises(InvalidRequest, match="token_embed"):
        llm.encode(PROMPTS[0], pooling_task="token_embed")


def test_sleep_of_level_0_pauses(llm: LLM) -> None:
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])
    assert llm.generate(PROMPTS[0], use_tqdm=False)[0].finished
    assert isinstance(llm.llm_engine, LLMEngine)

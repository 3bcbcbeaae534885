"""Arguments, machine and model make a plan."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.machine import GIB, Gpu, Machine
from runtime.config import Args, Option, options
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan, stage_nodes
from runtime.config.resolve import check, decide, resolve
from runtime.config.resolve.cache import plan_of_replica
from runtime.config.resolve.kernels import CPP_NEEDS
from runtime.errors import ConfigurationError
from small_facts import FACTS

CPU = Machine.named("cpu")
H200 = Machine.named("h200")


def plan(machine: Machine = CPU, facts: ModelFacts = FACTS, **keywords: Any) -> Plan:
    return resolve(Args.of(**{"model_path": "/models/small"} | keywords), machine, facts)


def refusals(machine: Machine = CPU, facts: ModelFacts = FACTS, **keywords: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(machine, facts, **keywords)
    return str(caught.value)


@pytest.mark.parametrize("machine", [CPU, H200])
def test_every_value_has_its_reason(machine: Machine) -> None:
    made = plan(machine)
    for section in (getattr(made, field.name) for field in fields(made)):
        names = {field.name for field in fields(section)} - {"reasons"}
        assert section.reasons.keys() == names
        assert all(section.reasons.values())


def test_asked_values_are_done() -> None:
    made = plan(page_size=4, max_running_requests=3, port=0, dtype="half", random_seed=7, disable_radix_cache=True)
    assert (made.cache.page_size, made.scheduler.max_running, made.serve.port) == (4, 3, 0)
    assert (made.model.dtype, made.model.random_seed, made.cache.prefix_cache) == ("float16", 7, False)
    assert made.cache.reasons["page_size"] == made.cache.reasons["prefix_cache"] == "as asked"


def test_defaults_without_a_gpu() -> None:
    made = plan()
    assert made.model.device == "cpu"
    assert (made.cache.page_size, made.cache.mem_fraction, made.cache.of_free_memory) == (16, 0.3, True)
    assert (made.scheduler.max_running, made.scheduler.chunk_tokens) == (256, 4096)
    assert made.tokenizer.tokenizer_path == "/models/small"
    assert made.serve.served_model_name == "/models/small"


def test_steps_of_an_encoder_fit_into_a_cpus_cache() -> None:
    texts = replace(FACTS, is_encoder=True, context_length=512)
    assert plan().scheduler.max_prefill_tokens == plan(H200, texts).scheduler.max_prefill_tokens == 16384
    assert plan(facts=texts).scheduler.max_prefill_tokens == 2048
    assert plan(facts=replace(texts, context_length=8192)).scheduler.max_prefill_tokens == 8192
    assert plan(facts=texts, max_prefill_tokens=100).scheduler.max_prefill_tokens == 100


@pytest.mark.parametrize(
    ("machine", "asked", "queued"),
    [
        (CPU, {}, 2048),  # a benchmark that sends 2,000 prompts at once
        (CPU, {"max_running_requests": 8}, 2048),
        (CPU, {"max_running_requests": 3000}, 6000),
        (CPU, {"max_queued_requests": 5}, 5),
        (H200, {}, 4096),
    ],
)
def test_queue_takes_a_whole_benchmark(machine: Machine, asked: dict[str, Any], queued: int) -> None:
    assert plan(machine, **asked).scheduler.max_queued == queued


@pytest.mark.parametrize(
    ("name", "chunk", "fraction"),
    [("t4", 2048, 0.807), ("a100", 8192, 0.873), ("h200", 8192, 0.91), ("b200", 16384, 0.82)],
)
def test_defaults_follow_the_gpus_memory(name: str, chunk: int, fraction: float) -> None:
    made = plan(Machine.named(name))
    assert made.model.device == "cuda"
    assert made.scheduler.chunk_tokens == chunk
    assert made.cache.mem_fraction == pytest.approx(fraction, abs=0.001)
    assert not made.cache.of_free_memory


@pytest.mark.parametrize(
    ("machine", "checkpoint", "dtype"),
    [
        ("cpu", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
        ("h200", "float32", "bfloat16"),
        ("h200", "float16", "float16"),
        ("t4", "bfloat16", "float16"),
    ],
)
def test_automatic_precision(machine: str, checkpoint: str, dtype: str) -> None:
    made = plan(Machine.named(machine), replace(FACTS, dtype=checkpoint))
    assert made.model.dtype == made.cache.kv_dtype == dtype


@pytest.mark.parametrize(
    ("machine", "device", "reason"),
    [
        (CPU, "cuda", "this machine has no NVIDIA GPU"),
        (H200, "cuda:1", "the GPUs here are numbered 0 to 0"),
        (
            replace(H200, torch_cuda=None, packages={"torch": "2.13.0+cpu"}),
            "cuda",
            "(2.13.0+cpu) is built without",
        ),
        (CPU, "xpu", "needs an Intel GPU"),
        (CPU, "cuda:x", "use cpu, cuda or cuda:N"),
    ],
)
def test_impossible_device_is_refused(machine: Machine, device: str, reason: str) -> None:
    assert reason in refusals(machine, device=device)


def test_old_gpu_is_refused_and_the_cpu_is_not() -> None:
    old = replace(H200, gpus=(Gpu(name="P100", capability=(6, 0), memory_bytes=16 * GIB),))
    assert "P100 is too old" in refusals(old)
    assert plan(old, device="cpu").model.device == "cpu"


def test_bfloat16_is_refused_where_the_gpu_has_none() -> None:
    assert "use float16" in refusals(Machine.named("t4"), dtype="bfloat16")


def test_longer_context_than_the_models_is_refused() -> None:
    assert "use at most 2048" in refusals(context_length=2049)
    assert plan(context_length=100).model.context_length == 100


def test_chunk_is_a_multiple_of_the_page() -> None:
    assert plan(chunked_prefill_size=100).scheduler.chunk_tokens == 112
    assert plan(chunked_prefill_size=1).scheduler.reasons["chunk_tokens"] == "1 rounded up to whole pages of 16"
    assert plan(chunked_prefill_size=100, page_size=10).scheduler.chunk_tokens == 100
    assert plan(chunked_prefill_size=-1).scheduler.chunk_tokens is None
    assert plan(page_size=100).scheduler.chunk_tokens == 4000


def test_prompts_for_other_servers_have_a_small_last_chunk() -> None:
    assert plan().scheduler.last_chunk_tokens is None
    assert plan(disaggregation_mode="prefill").scheduler.last_chunk_tokens == 512
    assert plan(disaggregation_mode="prefill", page_size=100).scheduler.last_chunk_tokens == 500
    made = plan(dp_size=2, disaggregation_prefill_replicas=1)
    assert [plan_of_replica(made, index).scheduler.last_chunk_tokens for index in (0, 1)] == [512, None]


def test_conservativeness_scales_what_is_reserved() -> None:
    assert plan(schedule_conservativeness=0.5).scheduler.new_token_ratio == pytest.approx(0.35)
    eager = plan(schedule_conservativeness=9).scheduler
    assert eager.new_token_ratio == 1.0
    assert eager.new_token_ratio - 600 * eager.new_token_ratio_decay == pytest.approx(eager.min_new_token_ratio)


def test_demo_model_is_served_when_none_is_named() -> None:
    made = resolve(Args.of(), CPU, FACTS, demo_path="/demo")
    assert made.serve.served_model_name == "penstock-demo"
    with pytest.raises(ConfigurationError, match="--model-path"):
        resolve(Args.of(), CPU, FACTS)


def test_loader_options() -> None:
    assert plan().model.num_load_threads == 1
    assert plan(model_loader_extra_config={"enable_multithread_load": True}).model.num_load_threads == 8
    several = {"enable_multithread_load": True, "num_threads": 3}
    assert plan(model_loader_extra_config=several).model.num_load_threads == 3
    for wrong in ({"threads": 1}, {"num_threads": 0}, {"enable_multithread_load": 1}):
        assert "--model-loader-extra-config" in refusals(model_loader_extra_config=wrong)


def test_variables_of_the_template_that_requests_set_are_refused() -> None:
    assert plan(default_chat_template_kwargs={"a": 1}).serve.template_kwargs == {"a": 1}
    assert "cannot set tools" in refusals(default_chat_template_kwargs={"tools": []})


def test_preferred_sampling_is_checked() -> None:
    preferred = {"temperature": 0.5, "stop": ["a"], "stop_token_ids": [3]}
    assert plan(preferred_sampling_params=preferred).serve.preferred_sampling == preferred
    for wrong in (
        {"temprature": 1},
        {"temperature": -1},
        {"temperature": "x"},
        {"logit_bias": [1]},
        {"stop": 1},
    ):
        assert "--preferred-sampling-params" in refusals(preferred_sampling_params=wrong)


def test_text_options() -> None:
    assert plan(skip_tokenizer_init=True).tokenizer.tokenizer_path is None
    assert plan(tokenizer_path="/t").tokenizer.tokenizer_path == "/t"
    assert plan(chat_template="my.jinja").tokenizer.chat_template == "my.jinja"
    assert "names are chatml" in refusals(chat_template="llama-5")
    assert "exclude each other" in refusals(skip_tokenizer_init=True, tokenizer_path="/t")


def test_empty_api_key_is_refused_and_none_is_shown() -> None:
    assert "--api-key is empty" in refusals(api_key="")
    made = plan(api_key="hush-hush")
    assert made.serve.api_key == "hush-hush"
    assert "hush" not in repr(made)


def test_all_refusals_come_together() -> None:
    said = refusals(
        enable_mscclpp=True,
        device="cuda",
        context_length=9999,
        enable_lmcache=True,
    )
    assert len(said.splitlines()) == 4


def test_attention_groups_must_fit_the_ranks_and_other_options() -> None:
    made = plan(tp_size=4, dp_size=2, enable_dp_attention=True, moe_dense_tp_size=1).parallel
    assert (made.ranks, made.copies, made.num_groups, made.attention_ranks) == (4, 1, 2, 2)
    assert made.whole_dense
    assert not made.head_by_group
    groups = {"enable_dp_attention": True, "tp_size": 4}
    assert "--dp-size must be at least 2 and divide --tp-size" in refusals(**groups)
    assert "--dp-size must be at least 2 and divide --tp-size" in refusals(**groups, dp_size=3)
    assert "does not support a pipeline" in refusals(**groups, dp_size=2, pp_size=2)
    assert "does not support adapters" in refusals(**groups, dp_size=2, enable_lora=True, max_lora_rank=8)
    assert "states of its own attention group" in refusals(**groups, dp_size=2, enable_return_hidden_states=True)
    assert "--enable-dp-lm-head needs --enable-dp-attention" in refusals(enable_dp_lm_head=True, tp_size=2)
    assert "--moe-dense-tp-size 2 is not supported; use 1, or 4" in refusals(tp_size=4, moe_dense_tp_size=2)


def test_halves_of_steps_need_ranks_that_share_layers() -> None:
    halves = {"enable_two_batch_overlap": True, "tp_size": 2}
    assert plan(**halves).parallel.two_batches == 0.48
    assert plan(**halves, tbo_token_distribution_threshold=0.25).parallel.two_batches == 0.25
    assert plan(tp_size=2).parallel.two_batches is None
    assert "needs several ranks" in refusals(enable_two_batch_overlap=True)
    assert "a pipeline" in refusals(**halves, pp_size=2)
    assert "groups would be split differently" in refusals(**halves, dp_size=2, enable_dp_attention=True)
    assert "records of experts" in refusals(**halves, expert_distribution_recorder_mode="stat")
    assert "--tbo-token-distribution-threshold needs" in refusals(tbo_token_distribution_threshold=0.1)


def test_draft_heads_beside_several_ranks() -> None:
    head: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"}
    assert plan(**head, tp_size=2).scheduler.max_model_drafts == 4
    assert plan(**head, pp_size=2).scheduler.max_model_drafts == 4


def test_a_gpu_takes_drafts_of_a_small_model() -> None:
    small: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small"}
    schedule = plan(H200, **small).scheduler
    assert (schedule.max_model_drafts, schedule.draft_constraints) == (4, False)
    assert plan(**small).scheduler.draft_constraints
    by_prefill: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_attention_mode": "prefill"}
    assert plan(H200, **by_prefill).kernels.choices["draft_attention"] == "with_triton"
    by_prefill |= {"prefill_attention_backend": "torch_native"}
    assert "as rows of one token" in refusals(H200, **by_prefill)
    assert plan(H200, **by_prefill, disable_cuda_graph=True).kernels.choices["draft_attention"] == "native"
    tree: dict[str, Any] = {
        "speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16,
    }  # fmt: skip
    found = plan(H200, **small, **tree, max_running_requests=8)
    assert (found.scheduler.draft_topk, found.scheduler.max_model_drafts, found.scheduler.max_row_drafts) == (4, 3, 15)
    assert max(found.graphs.sizes) == 8 * 16
    assert plan(H200, **small, enable_torch_compile=True).scheduler.max_model_drafts == 4
    assert plan(H200, replace(FACTS, recurrent=True), **small).scheduler.max_model_drafts == 4
    two = replace(H200, gpus=H200.gpus * 2)
    assert plan(two, **small, tp_size=2).scheduler.max_model_drafts == 4
    assert plan(two, **small, pp_size=2).scheduler.max_model_drafts == 4
    groups = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    assert plan(two, **small, **groups).scheduler.max_model_drafts == 4
    for head in ("EAGLE", "EAGLE3", "NEXTN"):
        made = plan(H200, **{**small, "speculative_algorithm": head})
        assert made.scheduler.max_model_drafts == 4
        assert made.graphs.sizes
        assert made.graphs.prompt_sizes
        said = refusals(H200, **{**small, "speculative_algorithm": head}, enable_torch_compile=True)
        assert said.endswith("which compiled steps do not return; leave out this option or --enable-torch-compile.")


def test_graphs_have_room_for_drafts() -> None:
    assert max(plan(H200, max_running_requests=4).graphs.sizes) == 4
    assert max(plan(H200, max_running_requests=4, speculative_algorithm="NGRAM").graphs.sizes) == 4 + 4 * 8


def test_groups_of_experts_must_fit_the_machines() -> None:
    mixture = replace(FACTS, config={"num_experts": 8, "n_group": 4})
    options = {"tp_size": 8, "ep_size": 2, "nnodes": 4, "dist_init_addr": "first:5000", "enable_eplb": True}
    assert plan(facts=mixture, **options).experts.balance
    groups = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    assert "per_token: with" in refusals(facts=mixture, **groups, expert_distribution_recorder_mode="per_token")
    hierarchical = {**options, "eplb_algorithm": "deepseek_hierarchical"}
    by_step = {**options, "eplb_algorithm": "deepseek_vec_hierarchical"}
    assert "deepseek_vec_hierarchical: the 4 machines" in refusals(facts=mixture, **by_step)
    assert "the 4 machines of a pipeline stage must divide the 4 groups of experts and --ep-size 2" in refusals(
        facts=mixture, **hierarchical
    )
    assert plan(facts=mixture, **{**hierarchical, "nnodes": 2}).experts.balance_algorithm == "deepseek_hierarchical"
    staged = {**hierarchical, "tp_size": 4, "pp_size": 2, "nnodes": 4}
    assert plan(facts=mixture, **staged).parallel.stage_nodes == 2
    assert [stage_nodes(*sizes) for sizes in ((2, 2), (2, 4), (3, 2), (8, 2), (1, 1))] == [1, 1, 1, 4, 1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"tp_size": 4}, "--tp-size 2 or 1"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts"),
        ({"moe_a2a_backend": "all_to_all"}, "all_to_all"),
        ({"ep_dispatch_algorithm": "fake"}, "at random"),
        ({"speculative_algorithm": "NGRAM", "speculative_accept_threshold_single": 0.5}, "accept-threshold"),
    ],
)
def test_options_that_make_results_depend_on_other_requests(options: dict[str, Any], reason: str | None) -> None:
    machine = replace(CPU, compiler="/usr/bin/c++", cpu_flags=CPP_NEEDS["x86_64"])
    mixture = replace(FACTS, config={"num_experts": 8})
    options = {"tp_size": 2, "ep_size": 2, **options}
    found = plan(machine, mixture, **options).model.dependence
    assert found is None if reason is None else reason in str(found)
    if reason is not None:
        assert reason in refusals(machine, mixture, **options, enable_deterministic_inference=True)


def test_check_refuses_what_needs_no_model() -> None:
    assert check(Args.of(model_path="org/model", context_length=10**9), CPU) == "org/model"
    assert check(Args.of(), CPU, demo_path="/demo") == "/demo"
    with pytest.raises(
        ConfigurationError, match=r"--enable-mscclpp is refused: it needs the mscclpp package(.|\n)*no NVIDIA GPU"
    ):
        check(Args.of(model_path="m", enable_mscclpp=True, device="cuda"), CPU)


def test_symmetric_memory_needs_gpus_of_one_machine_that_share_layers() -> None:
    machine = replace(Machine.named("h100"), gpus=Machine.named("h100").gpus * 2)
    assert plan(machine, tp_size=2, enable_symm_mem=True).parallel.symmetric_memory
    assert not plan(machine, tp_size=2).parallel.symmetric_memory
    for changes, reason in (
        ({"device": "cpu"}, "needs NVIDIA GPUs"),
        ({"tp_size": 1}, "needs several GPUs"),
        ({"dtype": "float16"}, "--dtype bfloat16"),
        ({"nnodes": 2, "dist_init_addr": "a:1"}, "GPUs of one machine"),
        ({"dp_size": 2}, "one copy of the model"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ):
        asked: dict[str, Any] = {"tp_size": 2, "enable_symm_mem": True, **changes}
        assert reason in refusals(machine, **asked)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "device": st.text(max_size=8) | st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:7", "xpu:1"]),
    "chat_template": st.text(max_size=8),
    "model_loader_extra_config": st.dictionaries(
        st.sampled_from(["num_threads", "enable_multithread_load", "x"]),
        st.none() | st.booleans() | st.integers(),
    ),
    "preferred_sampling_params": st.dictionaries(
        st.sampled_from(["temperature", "stop", "logit_bias", "n", "stop_token_ids", "top_k", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=4,
        ),
    ),
} | {
    option.name: st.sampled_from(option.spec.choices)
    if option.spec.choices
    else {bool: st.booleans(), int: st.integers(), float: st.floats(), str: st.text(max_size=4)}[option.type]
    for option in options()
    if option.spec.plan and not option.many and option.type in (bool, int, float, str) and option.name != "device"
}
MACHINES = st.builds(
    Machine,
    gpus=st.lists(
        st.builds(
            Gpu,
            name=st.just("G"),
            capability=st.tuples(st.integers(3, 12), st.integers(0, 9)),
            memory_bytes=st.integers(1, 300 * GIB),
        ),
        max_size=2,
    ).map(tuple),
    torch_cuda=st.none() | st.just("13.0"),
)


@given(st.fixed_dictionaries({}, optional=VALUES), MACHINES, st.sampled_from(["float32", "bfloat16", "float8"]))
def test_nothing_but_refusals_is_ever_raised(keywords: dict[str, Any], machine: Machine, dtype: str) -> None:
    with suppress(ConfigurationError):
        made = resolve(Args.of(**keywords), machine, replace(FACTS, dtype=dtype), demo_path="/demo")
        assert made.cache.page_size >= 1
        assert 0 < made.cache.mem_fraction <= 1
        assert made.scheduler.chunk_tokens is None or made.scheduler.chunk_tokens % made.cache.page_size == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(8, 8, 4, True), (8, 2, 4, True), (8, 3, 4, False), (6, 3, 4, False)],
)
def test_heads_are_shared_or_repeated_evenly(heads: int, kv_heads: int, size: int, fits: bool) -> None:
    facts = replace(FACTS, path="/m", num_heads=heads, num_kv_heads=kv_heads)
    _, builder = decide(Args.of(model_path="/m", tp_size=size), CPU, facts)
    assert ("tp_size" not in builder.refusals) == fits


def test_ranks_need_a_gpu_each() -> None:
    args = Args.of(model_path="m", tp_size=2, device="cuda")
    with pytest.raises(ConfigurationError, match=r"--tp-size 2 .* needs 2 GPUs, starting at index 0; .* has 1"):
        check(args, H200)
    groups = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    assert "--tp-size 2 x --pp-size 1 needs 2 GPUs" in refusals(H200, **groups)


def test_gpus_from_a_number_on_and_at_a_distance() -> None:
    four = replace(H200, gpus=H200.gpus * 4)
    made = plan(four, tp_size=2, base_gpu_id=1, gpu_id_step=2)
    assert made.model.device == "cuda:1"
    assert made.parallel.gpu_step == 2
    assert "needs 2 GPUs" in refusals(four, tp_size=2, base_gpu_id=2, gpu_id_step=2)
    assert "give one of them" in refusals(four, base_gpu_id=1, device="cuda:2")
    assert "numbered 0 to 3" in refusals(four, base_gpu_id=4)
    assert "--base-gpu-id needs GPUs" in refusals(base_gpu_id=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nnodes": 2, "tp_size": 2}, "needs --dist-init-addr HOST:PORT"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "host"}, "needs --dist-init-addr HOST:PORT"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "h:1", "node_rank": 2}, "must be below --nnodes 2"),
        ({"nnodes": 2, "dist_init_addr": "h:1"}, "must divide --tp-size 1 x --pp-size 1"),
        ({"nnodes": 2, "tp_size": 2, "dp_size": 2, "dist_init_addr": "h:1"}, "start one server per machine"),
        ({"node_rank": 1}, "set --nnodes too"),
        ({"nccl_port": 5}, "set --nnodes too"),
        ({"dist_init_addr": "h:1"}, "set --nnodes too"),
        ({"pp_size": 5}, "has only 4 layers"),
        ({"max_micro_batch_size": 2}, "needs a pipeline"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    assert reason in refusals(**options)


def test_only_the_first_machine_needs_the_corpus() -> None:
    corpus: dict[str, Any] = {"speculative_ngram_external_corpus_path": "corpus.jsonl"}
    several = {"nnodes": 2, "tp_size": 2, "dist_init_addr": "h:1", "speculative_algorithm": "NGRAM"}
    assert plan(**corpus, **several, node_rank=1).draft.corpus_path == "corpus.jsonl"
    assert "is not a file of this machine" in refusals(**corpus, **several)


def test_one_machine_may_be_described_as_several_are() -> None:
    made = plan(nnodes=1, node_rank=0, dist_init_addr="h:1", nccl_port=5)
    assert (made.parallel.master_address, made.parallel.store_port) == (None, None)
    assert "on a single machine" in made.parallel.reasons["master_address"]


@pytest.mark.parametrize("machine", [CPU, H200])
@pytest.mark.parametrize(
    "option",
    [option for option in options() if option.default is not None and option.name != "config"],
    ids=lambda option: option.name,
)
def test_no_default_is_refused_where_it_is_set_explicitly(option: Option, machine: Machine) -> None:
    _, builder = decide(Args.of(**{"model_path": "m"} | {option.name: option.default}), machine, FACTS)
    assert builder.refusals == {}


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_orders_by_cached_prefix_need_prefixes(policy: str) -> None:
    assert plan(schedule_policy=policy).scheduler.policy == policy
    made = plan(schedule_policy=policy, disable_radix_cache=True)
    assert made.scheduler.policy == "fcfs"
    assert "prefix caching is off" in made.scheduler.reasons["policy"]


def test_address_of_version_six_is_taken_apart() -> None:
    made = plan(nnodes=2, tp_size=2, dist_init_addr="[fd00::1]:29500")
    assert made.parallel.master_address == ("fd00::1", 29500)
    assert list(made.parallel.ranks_here) == [0]
    assert not plan(pp_size=2).scheduler.overlap


MATMUL: list[tuple[Machine, str, str, str]] = [
    (CPU, "bfloat16", "with_onednn", "packed once"),
    (CPU, "float32", "with_onednn", "packed once"),
    (CPU, "float16", "native", "does not pack weights in float16"),
    (replace(CPU, cpu_flags=frozenset({"avx2", "fma"})), "float32", "with_onednn", "packed once"),
    (replace(CPU, cpu_flags=frozenset({"avx2", "fma"})), "bfloat16", "native", "avx_ne_convert"),
    (replace(CPU, cpu_flags=frozenset()), "float32", "native", "lacks avx2+fma"),
    (H200, "bfloat16", "native", "plain torch on a GPU"),
]


@pytest.mark.parametrize(("machine", "dtype", "backend", "reason"), MATMUL)
def test_weights_are_packed_where_the_processor_and_the_dtype_allow_it(
    machine: Machine, dtype: str, backend: str, reason: str
) -> None:
    made = plan(machine, dtype=dtype)
    assert made.kernels.choices["matmul"] == backend
    assert reason in made.kernels.reasons["choices"]


@pytest.mark.parametrize(
    ("machine", "more", "backend"),
    [
        (CPU, {}, "with_onednn"),
        (CPU, {"attention_backend": "torch_native"}, "native"),
        (CPU, {"dtype": "float32"}, "native"),
        (replace(CPU, cpu_flags=CPU.cpu_flags | {"amx_bf16"}), {}, "native"),
        (replace(CPU, cpu_flags=frozenset()), {}, "native"),
        (H200, {}, "with_triton"),
    ],
)
def test_attention_by_products_is_for_bfloat16_on_a_cpu_without_amx(machine: Machine, more, backend) -> None:
    assert plan(machine, **more).kernels.choices["attention"] == backend


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 3},
            {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": 5,
                "speculative_ngram_max_match_window_size": 4,
                "speculative_ngram_min_match_window_size": 3,
            },
        ),
        (
            {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_tree_depth": 24},
            {
                "speculative_algorithm": "NGRAM",
                "speculative_num_draft_tokens": 16,
                "speculative_ngram_match_type": "PROB",
                "speculative_ngram_max_trie_depth": 24,
            },
        ),
        (
            {"model": "draft", "num_speculative_tokens": 3},
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "draft",
                "speculative_num_steps": 3,
            },
        ),
    ],
)
def test_settings_of_vllm_for_speculation_are_those_options(config: dict[str, Any], options: dict[str, Any]) -> None:
    assert Args.of(speculative_config=config).speculative == replace(
        Args.of(**options).speculative, speculative_config=config
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "medusa"}, "method must be ngram"),
        ({}, None),
        ({"method": "ngram", "disable_by_batch_size": 4}, "disable_by_batch_size cannot be used"),
        ({"method": "ngram", "parallel_drafting": True, "enforce_eager": False}, ": parallel_drafting cannot be used"),
        ({"method": "ngram", "num_speculative_tokens": "many"}, "many"),
        ({"num_speculative_tokens": 3}, "method must be"),
    ],
)
def test_settings_of_vllm_that_cannot_be_used_are_named(config: dict[str, Any], said: str | None) -> None:
    if said is None:
        assert Args.of(speculative_config=config).speculative.speculative_algorithm is None
        return
    with pytest.raises(ConfigurationError, match=said):
        Args.of(speculative_config=config)


def test_settings_of_vllm_and_an_option_that_they_set_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="--speculative-algorithm too"):
        Args.of(speculative_config={"method": "ngram"}, speculative_algorithm="NGRAM")


@pytest.mark.parametrize(
    ("machine", "options", "refusal"),
    [
        ("cpu", {"cpu_offload_gb": 2}, "--cpu-offload-gb has no effect here: on a CPU all weights are in host memory"),
        ("cpu", {"offload_group_size": 2}, "--offload-group-size has no effect here: on a CPU all weights"),
        (
            "h200",
            {"offload_group_size": 8},
            "--offload-group-size 8 would keep 2 of 16 layers in host memory, but the ",
        ),
        ("h200", {"offload_group_size": 2, "offload_num_in_group": 3}, "--offload-num-in-group 3 exceeds"),
        ("h200", {"cpu_offload_gb": 2, "offload_group_size": 2}, "--offload-group-size cannot be combined with"),
        ("h200", {"cpu_offload_gb": 2, "enable_lora": True}, "--enable-lora cannot be combined with --cpu-offload-gb"),
        ("h200", {"offload_prefetch_step": 2}, "--offload-prefetch-step needs --offload-group-size or"),
        ("h200", {"offload_mode": "meta"}, "--offload-mode meta is refused: Penstock has no code"),
        ("h200", {"enable_double_sparsity": True}, "--enable-double-sparsity is refused: double sparsity"),
    ],
)
def test_layers_in_host_memory_are_refused_where_they_save_nothing(
    machine: str, options: dict[str, Any], refusal: str
) -> None:
    facts = replace(FACTS, num_layers=16, architecture="LlamaForCausalLM")
    assert refusals(Machine.named(machine), facts, **options).startswith(refusal)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"numa_node": (0, 1)}, "--numa-node 0 1: needs one node for each of the 1 ranks"),
        ({"numa_node": (7,)}, "--numa-node 7: this machine has the nodes 0, 1"),
        ({"numa_node": (1,), "dp_size": 2}, "--numa-node 1: cannot bind the replicas of --dp-size"),
        ({"hybrid_kvcache_ratio": 0.5}, "--hybrid-kvcache-ratio: this model has no layers with chunked attention"),
    ],
)
def test_what_the_machine_or_the_model_lacks_is_refused(options: dict[str, Any], refusal: str) -> None:
    assert refusals(Machine.named("cpu"), FACTS, **options).startswith(refusal)


def test_the_ratio_of_chunked_layers_follows_the_chunk() -> None:
    facts = replace(FACTS, config={"attention_chunk_size": 512}, context_length=2048)
    ratios = [plan(H200, facts, hybrid_kvcache_ratio=share).cache.window_ratio for share in (0.0, 0.5, 1.0)]
    assert ratios == [1.0, 0.625, 0.25]


@pytest.mark.parametrize(
    ("options", "ranks"), [({}, 1), ({"tp_size": 4}, 4), ({"tp_size": 2, "dp_size": 2}, 4), ({"pp_size": 2}, 2)]
)
def test_ranks_of_a_host_share_its_free_memory_for_layers(options: dict[str, Any], ranks: int) -> None:
    facts = replace(FACTS, num_layers=16, architecture="LlamaForCausalLM")
    machine = replace(H200, gpus=H200.gpus[:1] * 8, available_bytes=64 << 30)
    assert plan(machine, facts, cpu_offload_gb=2, **options).model.offload_host_bytes == (64 << 30) // ranks
    assert plan(machine, facts, **options).model.offload_host_bytes == 0


def test_layers_in_host_memory_leave_graphs_of_decode_steps() -> None:
    facts = replace(FACTS, num_layers=16, architecture="LlamaForCausalLM")
    made = plan(H200, facts, offload_group_size=4)
    assert (made.model.offload_group, made.model.offload_in_group, made.model.offload_ahead) == (4, 1, 1)
    assert made.graphs.sizes
    assert not made.graphs.prompt_sizes
    assert "copies of weights" in made.graphs.reasons["prompt_sizes"]

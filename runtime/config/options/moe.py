"""Options about mixtures of experts: the placement of experts on devices, and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ops.backends import EXPERTS
from runtime.config.option_spec import always, option, refused, renamed

_FLASHINFER = "the flashinfer package and an NVIDIA GPU for which it has these kernels"
_DEEPEP = "the deep_ep package and several GPUs with NVSHMEM"
_MOE_RUNNER_BACKENDS = (
    "auto", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_mxfp4",
    "flashinfer_cutedsl",
)  # fmt: skip
_EPLB_ALGORITHMS = ("auto", "deepseek_vec", "deepseek_vec_hierarchical", "deepseek", "deepseek_hierarchical")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeArgs:
    """Mixtures of experts."""

    ep_size: int = option(
        1,
        "Expert parallelism: number of parts of the --tp-size ranks that hold different experts. Each rank of a part "
        "has a share of its experts.",
        aliases=("--expert-parallel-size", "--ep"),
        low=1,
        plan="experts.ep_size",
    )
    moe_a2a_backend: str = option(
        "none",
        "How the results of experts reach the ranks of their tokens. none: partial results are summed; all_to_all: "
        "large steps outside CUDA graphs send each result to one rank (needs --ep-size equal to --tp-size).",
        choices=("none", "deepep", "all_to_all"),
        built=("all_to_all",),
        needs={"deepep": _DEEPEP},
        instead="use all_to_all, with an --ep-size equal to --tp-size",
        plan="experts.exchange",
    )
    moe_runner_backend: str = option(
        "auto",
        "Kernels that run the experts on a GPU. auto: triton if the GPU supports it, else torch. "
        + "; ".join(f"{name}: {EXPERTS[name].kernels} (needs {EXPERTS[name].needs})" for name in EXPERTS)
        + ". FlashInfer's kernels need experts with silu or gpt-oss's activation, and no --ep-size. On a CPU, auto is "
        "C++ or torch.",
        choices=_MOE_RUNNER_BACKENDS,
        built=("auto", *EXPERTS),
        needs={
            "triton_kernel": "the triton_kernels package and an NVIDIA GPU",
            "flashinfer_cutedsl": "NVIDIA's CuTe DSL, which compiles kernels while requests are served, and an NVIDIA "
            "Blackwell GPU; use flashinfer_trtllm",
        },
    )
    flashinfer_mxfp4_moe_precision: str = option(
        "default",
        "Precision of the inputs of MXFP4 experts in TensorRT-LLM's kernels on Blackwell. default: MXFP8, that is e4m3 "
        "with one power of two per 32 inputs. bf16: not rounded, as always on Hopper.",
        choices=("default", "bf16"),
    )
    enable_flashinfer_allreduce_fusion: bool = refused(
        False,
        "Sum over devices, add the residual and normalise in one FlashInfer kernel.",
        reason=f"it needs {_FLASHINFER}, and one process group of torch for all ranks, whereas Penstock has a group "
        "for each axis",
        instead="use --enable-symm-mem",
    )
    deepep_mode: str = refused(
        "auto",
        "Kernels of the DeepEP library: normal for prompts, low_latency for output tokens, auto for both.",
        choices=("normal", "low_latency", "auto"),
        reason=f"it needs {_DEEPEP}",
        instead="use --moe-a2a-backend all_to_all, which chooses by the size of a step",
    )
    deepep_config: str | None = refused(
        None,
        "JSON object or file with tuning values for the DeepEP library.",
        reason=f"it needs {_DEEPEP}",
        instead="use --moe-a2a-backend all_to_all, which needs no tuning values",
    )
    ep_num_redundant_experts: int = option(
        0,
        "Number of additional copies of busy experts, over all ranks.",
        low=0,
        plan="experts.num_redundant",
    )
    ep_dispatch_algorithm: str | None = option(
        None,
        "Which copy of an expert gets a token: a fixed one (static), a random one (dynamic), or a random "
        "expert altogether (fake, for measurements: the output is meaningless). Default: static.",
        choices=("static", "dynamic", "fake"),
        plan="experts.dispatch",
    )
    init_expert_location: str = option(
        "trivial",
        "Initial placement of the experts: trivial (in order), or JSON, or a .json or .pt file, with "
        "physical_to_logical_map (the expert of each slot, by layer) or logical_count (tokens by layer and expert, to "
        "balance).",
        plan="experts.location",
    )
    enable_eplb: bool = option(
        False, "Move experts between ranks from time to time to balance their load.", plan="experts.balance"
    )
    eplb_algorithm: str = option(
        "auto",
        "Algorithm that computes a new placement of the experts. deepseek: all ranks alike; deepseek_hierarchical: "
        "groups of experts stay on one machine; deepseek_vec, deepseek_vec_hierarchical: the same for the loads "
        "of up to 16 single steps, and not for the sum of all steps; auto: deepseek_hierarchical if the machines "
        "divide the groups, else deepseek.",
        choices=_EPLB_ALGORITHMS,
        plan="experts.balance_algorithm",
    )
    eplb_rebalance_num_iterations: int = option(
        1000, "Steps between two rebalancings of the experts.", low=1, plan="experts.balance_steps"
    )
    eplb_rebalance_layers_per_chunk: int | None = option(
        None,
        "Number of layers whose experts move between two steps. Default: all layers.",
        low=1,
        plan="experts.balance_layers",
    )
    eplb_min_rebalancing_utilization_threshold: float = option(
        1.0,
        "Do not rebalance while the mean utilization of the ranks is above this share.",
        low=0,
        high=1,
        plan="experts.balance_threshold",
    )
    expert_distribution_recorder_mode: str | None = option(
        None,
        "What /start_expert_distribution_record records: tokens of each expert (stat, and stat_approx, which is exact "
        "here), also those of each step (per_pass), or each token's experts (per_token).",
        choices=("stat", "stat_approx", "per_pass", "per_token"),
        plan="experts.record",
    )
    expert_distribution_recorder_buffer_size: int | None = option(
        None,
        "Number of steps that the record holds; -1: all steps. Default: --eplb-rebalance-num-iterations.",
        low=-1,
        plan="experts.record_steps",
    )
    enable_expert_distribution_metrics: bool = option(
        False,
        "Record from the start on, and log every 40 steps how evenly ranks and experts are used.",
        plan="experts.log_balance",
    )
    moe_dense_tp_size: int | None = option(
        None,
        "Tensor parallelism of the dense MLPs in mixture-of-experts models: 1, or the default, --tp-size. With 1, each "
        "rank has these MLPs whole.",
        low=1,
        plan="parallel.whole_dense",
        other_unit=True,
    )
    disable_shared_experts_fusion: bool = always(
        False,
        "Compute the shared expert separately and not as one of the routed experts.",
        reason="the shared expert is always computed separately",
        sglang="off: on some GPUs the shared expert of DeepSeek models is computed as a routed expert",
    )
    disable_flashinfer_cutlass_moe_fp4_allgather: bool = always(
        False,
        "Gather tokens of data-parallel ranks before they are rounded to FP4, not after.",
        reason="tokens are gathered in the model's dtype",
        sglang="off: flashinfer_cutlass gathers the tokens of NVFP4 experts in FP4",
    )
    enable_ep_moe: bool = option(
        False, "Old spelling of an --ep-size equal to --tp-size.", plan="experts.ep_size", other_unit=True
    )
    enable_deepep_moe: bool = renamed("moe_a2a_backend", "deepep")
    enable_flashinfer_cutlass_moe: bool = renamed("moe_runner_backend", "flashinfer_cutlass")
    enable_flashinfer_cutedsl_moe: bool = renamed("moe_runner_backend", "flashinfer_cutedsl")
    enable_flashinfer_trtllm_moe: bool = renamed("moe_runner_backend", "flashinfer_trtllm")
    enable_triton_kernel_moe: bool = renamed("moe_runner_backend", "triton_kernel")
    enable_flashinfer_mxfp4_moe: bool = renamed("moe_runner_backend", "flashinfer_mxfp4")

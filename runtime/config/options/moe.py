"""Options about mixtures of experts: the placement of experts on devices, and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import always, option, planned

_RUNNER = "use --moe-runner-backend auto"
_MOE_RUNNER_BACKENDS = (
    "auto", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_mxfp4",
    "flashinfer_cutedsl",
)  # fmt: skip
_EPLB_ALGORITHMS = (
    "auto", "deepseek", "deepseek_hierarchical", "deepseek_vec", "deepseek_vec_hierarchical",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeArgs:
    """Mixtures of experts."""

    ep_size: int = always(
        1,
        "Expert parallelism: number of devices over which the experts are spread.",
        aliases=("--expert-parallel-size", "--ep"),
        low=1,
        built=(1,),
        reason="each device holds its share of every expert",
    )
    moe_a2a_backend: str = planned(
        "none",
        "How tokens reach the devices of their experts. none: they do not; partial results are summed.",
        choices=("none", "deepep"),
    )
    moe_runner_backend: str = always(
        "auto",
        "Kernels that run the experts.",
        choices=_MOE_RUNNER_BACKENDS,
        built=("auto", "triton"),
        reason="experts run in Triton kernels on a GPU that supports them, else in C++ or plain torch",
    )
    flashinfer_mxfp4_moe_precision: str = planned(
        "default",
        "Precision of activations in FlashInfer's mxfp4 experts. default: mxfp8.",
        choices=("default", "bf16"),
    )
    enable_flashinfer_allreduce_fusion: bool = planned(
        False, "Sum over devices, add the residual and normalise in one FlashInfer kernel."
    )
    deepep_mode: str = planned(
        "auto",
        "Kernels of the DeepEP library: normal for prompts, low_latency for output tokens, auto for both.",
        choices=("normal", "low_latency", "auto"),
    )
    deepep_config: str | None = planned(None, "JSON object or file with tuning values for the DeepEP library.")
    ep_num_redundant_experts: int = planned(0, "Number of additional copies of busy experts, over all devices.", low=0)
    ep_dispatch_algorithm: str | None = planned(
        None,
        "Which copy of an expert gets a token: a fixed one (static), a random one (dynamic), or a random "
        "expert altogether (fake, for measurements).",
        choices=("static", "dynamic", "fake"),
    )
    init_expert_location: str = planned(
        "trivial", "Initial placement of the experts: trivial (in order), or JSON or a file with the placement."
    )
    enable_eplb: bool = planned(False, "Move experts between devices from time to time to balance their load.")
    eplb_algorithm: str = planned(
        "auto", "Algorithm that computes a new placement of the experts.", choices=_EPLB_ALGORITHMS
    )
    eplb_rebalance_num_iterations: int = planned(1000, "Steps between two rebalancings of the experts.", low=1)
    eplb_rebalance_layers_per_chunk: int | None = planned(
        None, "Number of layers whose experts move in one step. Default: all layers.", low=1
    )
    eplb_min_rebalancing_utilization_threshold: float = planned(
        1.0, "Do not rebalance while the mean utilization of the devices is above this share.", low=0, high=1
    )
    expert_distribution_recorder_mode: str | None = planned(
        None,
        "Statistics to record about the use of experts.",
        choices=("stat", "stat_approx", "per_pass", "per_token"),
    )
    expert_distribution_recorder_buffer_size: int | None = planned(
        None, "Number of steps that the record holds; -1: all steps.", low=-1
    )
    enable_expert_distribution_metrics: bool = planned(False, "Log how evenly the experts are used, from the start on.")
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
    disable_flashinfer_cutlass_moe_fp4_allgather: bool = planned(
        False, "Gather tokens before they are rounded to FP4, not after."
    )
    enable_ep_moe: bool = planned(
        False,
        "Old spelling of an --ep-size equal to --tp-size.",
        instead="use --ep-size once it is supported",
    )
    enable_deepep_moe: bool = planned(
        False,
        "Old spelling of --moe-a2a-backend deepep.",
        instead="use --moe-a2a-backend once it is supported",
    )
    enable_flashinfer_cutlass_moe: bool = planned(
        False, "Old spelling of --moe-runner-backend flashinfer_cutlass.", instead=_RUNNER
    )
    enable_flashinfer_cutedsl_moe: bool = planned(
        False, "Old spelling of --moe-runner-backend flashinfer_cutedsl.", instead=_RUNNER
    )
    enable_flashinfer_trtllm_moe: bool = planned(
        False, "Old spelling of --moe-runner-backend flashinfer_trtllm.", instead=_RUNNER
    )
    enable_triton_kernel_moe: bool = planned(
        False, "Old spelling of --moe-runner-backend triton_kernel.", instead=_RUNNER
    )
    enable_flashinfer_mxfp4_moe: bool = planned(
        False, "Old spelling of --moe-runner-backend flashinfer_mxfp4.", instead=_RUNNER
    )

"""Options about mixtures of experts: where experts live and which kernels run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec, planned

_RUNNER = "use --moe-runner-backend once it is built"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeArgs:
    """Mixtures of experts."""

    ep_size: Annotated[
        int,
        OptionSpec(
            "Expert parallelism: number of devices over which the experts are spread.",
            aliases=("--expert-parallel-size", "--ep"),
            low=1,
            built=(1,),
        ),
    ] = 1
    moe_a2a_backend: Annotated[
        str,
        planned(
            "How tokens travel to the experts' devices. none: by sums over all devices.",
            choices=("none", "deepep"),
        ),
    ] = "none"
    moe_runner_backend: Annotated[
        str,
        planned(
            "Kernels that run the experts.",
            choices=(
                "auto", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass",
                "flashinfer_mxfp4", "flashinfer_cutedsl",
            ),
        ),
    ] = "auto"  # fmt: skip
    flashinfer_mxfp4_moe_precision: Annotated[
        str,
        planned(
            "Precision of activations in FlashInfer's mxfp4 experts. default: mxfp8.",
            choices=("default", "bf16"),
        ),
    ] = "default"
    enable_flashinfer_allreduce_fusion: Annotated[
        bool, planned("Sum over devices, add the residual and normalise in one FlashInfer kernel.")
    ] = False
    deepep_mode: Annotated[
        str,
        planned(
            "Kernels of the DeepEP library: normal for prompts, low_latency for output tokens, auto for "
            "both.",
            choices=("normal", "low_latency", "auto"),
        ),
    ] = "auto"
    deepep_config: Annotated[
        str | None, planned("JSON object or file with tuning values for the DeepEP library.")
    ] = None
    ep_num_redundant_experts: Annotated[
        int, planned("Further copies of busy experts, over all devices.", low=0)
    ] = 0
    ep_dispatch_algorithm: Annotated[
        str | None,
        planned(
            "Which copy of an expert gets a token: a fixed one (static), a random one (dynamic), or a random "
            "expert altogether (fake, for measurements).",
            choices=("static", "dynamic", "fake"),
        ),
    ] = None
    init_expert_location: Annotated[
        str, planned("Where experts live at the start: trivial (in order), or JSON or a file that says so.")
    ] = "trivial"
    enable_eplb: Annotated[
        bool, planned("Move experts between devices now and then to even out their load.")
    ] = False
    eplb_algorithm: Annotated[
        str,
        planned(
            "How new places of the experts are found.",
            choices=(
                "auto", "deepseek", "deepseek_hierarchical", "deepseek_vec", "deepseek_vec_hierarchical",
            ),
        ),
    ] = "auto"  # fmt: skip
    eplb_rebalance_num_iterations: Annotated[int, planned("Steps between two such moves.", low=1)] = 1000
    eplb_rebalance_layers_per_chunk: Annotated[
        int | None, planned("Layers whose experts move in one step. Default: all.", low=1)
    ] = None
    eplb_min_rebalancing_utilization_threshold: Annotated[
        float, planned("Move nothing while the mean use of the devices is above this share.", low=0, high=1)
    ] = 1.0
    expert_distribution_recorder_mode: Annotated[
        str | None,
        planned(
            "What is recorded about the use of experts.",
            choices=("stat", "stat_approx", "per_pass", "per_token"),
        ),
    ] = None
    expert_distribution_recorder_buffer_size: Annotated[
        int | None, planned("Steps that the record holds; -1 for all.", low=-1)
    ] = None
    enable_expert_distribution_metrics: Annotated[
        bool, planned("Record from the start and log how evenly the experts are used.")
    ] = False
    moe_dense_tp_size: Annotated[
        int | None, planned("Tensor parallelism of the dense layers in such models.", low=1)
    ] = None
    disable_shared_experts_fusion: Annotated[
        bool, planned("Compute the shared expert on its own and not as one of the routed experts.")
    ] = False
    disable_flashinfer_cutlass_moe_fp4_allgather: Annotated[
        bool, planned("Gather tokens before, not after, they are rounded to FP4.")
    ] = False
    enable_ep_moe: Annotated[
        bool,
        planned("Old spelling of an --ep-size equal to --tp-size.", instead="use --ep-size once it is built"),
    ] = False
    enable_deepep_moe: Annotated[
        bool,
        planned(
            "Old spelling of --moe-a2a-backend deepep.", instead="use --moe-a2a-backend once it is built"
        ),
    ] = False
    enable_flashinfer_cutlass_moe: Annotated[
        bool, planned("Old spelling of --moe-runner-backend flashinfer_cutlass.", instead=_RUNNER)
    ] = False
    enable_flashinfer_cutedsl_moe: Annotated[
        bool, planned("Old spelling of --moe-runner-backend flashinfer_cutedsl.", instead=_RUNNER)
    ] = False
    enable_flashinfer_trtllm_moe: Annotated[
        bool, planned("Old spelling of --moe-runner-backend flashinfer_trtllm.", instead=_RUNNER)
    ] = False
    enable_triton_kernel_moe: Annotated[
        bool, planned("Old spelling of --moe-runner-backend triton_kernel.", instead=_RUNNER)
    ] = False
    enable_flashinfer_mxfp4_moe: Annotated[
        bool, planned("Old spelling of --moe-runner-backend flashinfer_mxfp4.", instead=_RUNNER)
    ] = False

"""Options about the weights: where they are, how they are read, in which precision and on which device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from runtime.config.option_spec import Json, OptionSpec, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """Weights and device."""

    model_path: Annotated[
        str | None,
        OptionSpec(
            "Folder with the weights and config.json, or a repository name on the Hugging Face Hub. "
            "Without it the small demo model that ships with Penstock is served.",
            aliases=("--model",),
            plan="model.path",
        ),
    ] = None
    load_format: Annotated[
        str,
        OptionSpec(
            "How the weights are stored. auto: safetensors files if there are any, else .bin and .pt files; "
            "dummy: random weights, for measurements without a download.",
            choices=(
                "auto", "safetensors", "pt", "dummy", "npcache", "sharded_state", "gguf", "bitsandbytes",
                "layered", "remote", "remote_instance",
            ),
            built=("auto", "safetensors", "pt", "dummy"),
            plan="model.load_format",
        ),
    ] = "auto"  # fmt: skip
    model_loader_extra_config: Annotated[
        Json,
        OptionSpec(
            "JSON object for the loader: enable_multithread_load (true or false) reads several files at "
            "once, num_threads says how many (default 8).",
        ),
    ] = field(default_factory=dict)
    trust_remote_code: Annotated[
        bool,
        OptionSpec(
            "Allow Python files inside the model folder to be executed. Off by default: such code can do "
            "anything that you can.",
            plan="text.trust_remote_code",
        ),
    ] = False
    context_length: Annotated[
        int | None,
        OptionSpec(
            "Longest sequence in tokens, prompt and output together. Default: what the model's configuration "
            "says; a larger value is refused.",
            low=1,
            plan="model.context_length",
        ),
    ] = None
    revision: Annotated[
        str | None,
        OptionSpec(
            "Branch, tag or commit of the model on the Hub, for weights and tokenizer. Default: its main "
            "branch.",
            plan="text.revision",
        ),
    ] = None
    download_dir: Annotated[
        str | None,
        OptionSpec(
            "Folder in which downloaded models are kept. Default: the cache folder of the Hugging Face Hub."
        ),
    ] = None
    json_model_override_args: Annotated[
        Json,
        OptionSpec("JSON object merged over the model's config.json before anything is read from it."),
    ] = field(default_factory=dict)
    dtype: Annotated[
        str,
        OptionSpec(
            "Precision of weights and activations. auto keeps the checkpoint's, except that a float32 "
            "checkpoint becomes bfloat16 on a GPU; half is float16, float is float32.",
            choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
            plan="model.dtype",
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        OptionSpec(
            "Where the model runs: cpu, cuda, or cuda:N for the GPU with number N. Default: the first GPU if "
            "there is one that the installed torch can use, else the CPU.",
            plan="model.device",
        ),
    ] = None
    random_seed: Annotated[
        int | None,
        OptionSpec(
            "Seed of every random choice. Requests without a seed of their own derive theirs from it. "
            "Default: a new one at each start.",
            low=0,
            high=2**63 - 1,
            plan="model.random_seed",
        ),
    ] = None
    weight_loader_disable_mmap: Annotated[
        bool,
        OptionSpec(
            "Read safetensors files with plain reads instead of mapping them into memory; helps on some "
            "network file systems.",
            plan="model.mmap",
        ),
    ] = False
    is_embedding: Annotated[
        bool,
        planned("Serve a text model for embeddings: the last token's hidden state, scaled to length one."),
    ] = False
    enable_multimodal: Annotated[
        bool | None,
        planned(
            "Load the image or audio part of models whose text part is served alone by default.",
            built=(False,),
        ),
    ] = None
    model_impl: Annotated[
        str,
        OptionSpec(
            "Which code runs the model. auto and sglang: ours; transformers: the transformers library's.",
            choices=("auto", "sglang", "transformers"),
            built=("auto", "sglang"),
        ),
    ] = "auto"
    delete_ckpt_after_loading: Annotated[
        bool,
        planned(
            "Delete the model folder once the weights are in memory.", instead="delete it yourself when ready"
        ),
    ] = False
    custom_weight_loader: Annotated[
        tuple[str, ...] | None,
        planned(
            "Import paths of functions that may be chosen to load weights sent to a running server.",
            empty=True,
        ),
    ] = None
    disable_mla: Annotated[
        bool,
        planned("Run DeepSeek models with expanded keys and values instead of the compressed latent cache."),
    ] = False
    remote_instance_weight_loader_seed_instance_ip: Annotated[
        str | None,
        planned(
            "Address of a running server from which the weights are copied (load format remote_instance)."
        ),
    ] = None
    remote_instance_weight_loader_seed_instance_service_port: Annotated[
        int | None,
        planned("HTTP port of the running server from which the weights are copied.", low=1, high=65535),
    ] = None
    remote_instance_weight_loader_send_weights_group_ports: Annotated[
        tuple[int, ...] | None,
        planned("Ports over which the weights arrive, one for each tensor-parallel rank, as a JSON list."),
    ] = None

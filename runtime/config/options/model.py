"""Options about the weights: where they are, how they are read, in which precision, on which device."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, option, planned
from runtime.config.plan import ModelPlan, TokenizerPlan
from runtime.config.quantization import METHODS, UNREADABLE, spellings

_LOAD_FORMATS = (
    "auto", "safetensors", "pt", "dummy", "npcache", "sharded_state", "gguf", "bitsandbytes", "layered",
    "remote", "remote_instance",
)  # fmt: skip
_QUANTIZATIONS = (
    "awq", "fp8", "gptq", "marlin", "gptq_marlin", "awq_marlin", "bitsandbytes", "gguf", "modelopt",
    "modelopt_fp4", "petit_nvfp4", "w8a8_int8", "w8a8_fp8", "moe_wna16", "qoq", "w4afp8", "mxfp4",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """Weights and device."""

    model_path: str | None = option(
        None,
        "Folder with the weights and config.json, a .gguf file, a repository name on the Hugging Face Hub, or the URL "
        "of a folder in a store (s3://bucket/folder, with pip install 'penstock[remote]'). Default: the small demo "
        "model that ships with Penstock.",
        sglang="must be given",
        aliases=("--model",),
        plan=ModelPlan.path,
    )
    load_format: str = option(
        "auto",
        "How the weights are stored. auto: safetensors files if there are any, else .bin and .pt files, else a .gguf "
        "file, which has its configuration and tokenizer within; gguf: that one; npcache: .bin and .pt files, copied "
        "into a folder np beside them at the first start, which is read from then on; sharded_state: files that "
        "penstock shard wrote for each rank; layered: one layer after the other is read and prepared, as with auto; "
        "remote: a URL (s3://..., gs://..., https://...), which auto takes too; "
        "dummy: random weights, for measurements without a download.",
        choices=_LOAD_FORMATS,
        built=("auto", "safetensors", "pt", "dummy", "gguf", "npcache", "sharded_state", "layered", "remote"),
        plan=ModelPlan.load_format,
    )
    model_loader_extra_config: Json = option(
        {},
        "JSON object for the loader: enable_multithread_load (true or false) reads with several threads, also within "
        "one file, num_threads says how many (default 8); pattern is how files of sharded_state are called (default "
        "model-rank-{rank}-part-{part}.safetensors).",
    )
    trust_remote_code: bool = option(
        False,
        "Allow Python files inside the model folder to be executed. Off by default: such code can do "
        "anything that you can.",
        plan=TokenizerPlan.trust_remote_code,
    )
    context_length: int | None = option(
        None,
        "Longest sequence in tokens, prompt and output together. Default: what the model's configuration "
        "says; a larger value is refused.",
        low=2,
        plan=ModelPlan.context_length,
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of the model on the Hub, for weights and tokenizer. Default: its main branch.",
        plan=TokenizerPlan.revision,
    )
    download_dir: str | None = option(
        None, "Folder in which downloaded models are kept. Default: the cache folder of the Hugging Face Hub."
    )
    json_model_override_args: Json = option(
        {}, "JSON object merged over the model's config.json before anything is read from it."
    )
    dtype: str = option(
        "auto",
        "Precision of weights and activations. half is float16, float is float32. Default: auto, which keeps the "
        "checkpoint's, except that a float32 checkpoint becomes bfloat16 on a GPU.",
        sglang="auto, with which a float32 checkpoint becomes float16 (bfloat16 for Gemma) everywhere",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        plan=ModelPlan.dtype,
    )
    device: str | None = option(
        None,
        "Where the model runs: cpu, cuda, or cuda:N for the GPU with number N. Default: the first GPU if "
        "there is one that the installed torch can use, else the CPU.",
        plan=ModelPlan.device,
    )
    random_seed: int | None = option(
        None,
        "Seed of every random choice. Requests without a seed of their own derive theirs from it. Default: a "
        "new one at each start.",
        low=0,
        high=2**63 - 1,
        plan=ModelPlan.random_seed,
    )
    weight_loader_disable_mmap: bool = option(
        False,
        "Read safetensors files with plain reads instead of mapping them into memory; helps on some network "
        "file systems.",
        plan=ModelPlan.mmap,
        says="the opposite",
    )
    is_embedding: bool = option(
        False,
        "Answer with vectors only, by /v1/embeddings, /encode and Engine.encode: the last token's hidden state, "
        "scaled to length one. Requests to generate are refused. Without it a model does both; encoders and "
        "checkpoints of sentence-transformers do only this, pooled as their files say.",
        sglang="generating models answer with vectors only where it is set",
        plan=ModelPlan.is_embedding,
    )
    enable_multimodal: bool | None = planned(
        None,
        "Load the image or audio part of models whose text part is served alone by default.",
        built=(False,),
    )
    model_impl: str = option(
        "auto",
        "Which code computes the model. native (SGLang's word is sglang): a family of ours; transformers: the "
        "modules of the transformers library, with our attention, cache and batches; auto: native where there is "
        "such a family.",
        choices=("auto", "native", "sglang", "transformers"),
        plan=ModelPlan.by_transformers,
        says=("native", "transformers"),
    )
    delete_ckpt_after_loading: bool = option(
        False,
        "Delete the checkpoint once everything is loaded: the weights, JSON and tokenizer files in the folder that "
        "--model-path names, and the folder if nothing else is in it. With one copy of the model on one machine.",
        plan=ModelPlan.delete_after_loading,
    )
    custom_weight_loader: tuple[str, ...] | None = option(
        None,
        "Import paths of functions (package.module.function) that take the model's folder and give pairs of names and "
        "tensors, which are loaded in place of the folder's weight files. They run with all rights of this process.",
        sglang="they load weights sent to a running server",
        empty=True,
        plan=ModelPlan.custom_loaders,
    )
    disable_mla: bool = planned(
        False, "Run DeepSeek models with expanded keys and values instead of the compressed latent cache."
    )
    remote_instance_weight_loader_seed_instance_ip: str | None = planned(
        None, "Address of a running server from which the weights are copied (load format remote_instance)."
    )
    remote_instance_weight_loader_seed_instance_service_port: int | None = planned(
        None, "HTTP port of the running server from which the weights are copied.", low=1, high=65535
    )
    remote_instance_weight_loader_send_weights_group_ports: tuple[int, ...] | None = planned(
        None, "Ports over which the weights arrive, one for each tensor-parallel rank, as a JSON list."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantArgs:
    """Quantisation."""

    quantization: str | None = option(
        None,
        "How the weights are quantised. A quantised checkpoint needs nothing: its form is read from its configuration, "
        "and naming it checks that it is so. w4a16 rounds the weights of any checkpoint to 4 bits, in groups of 32, "
        "when it is loaded, and w4a8 computes with activations of 8 bits too; w8a8_int8 has 8 bits for both; these two "
        "on a CPU so far. qoq and w4afp8 are refused. Default: as they are in the checkpoint.",
        choices=tuple(dict.fromkeys((*_QUANTIZATIONS, *METHODS))),
        built=(*spellings(), *UNREADABLE),
    )
    quantization_param_path: str | None = option(
        None,
        "JSON file with the scales of a KV cache in fp8_e4m3, by tensor-parallel rank and layer.",
        none_text=True,
        plan=ModelPlan.kv_scales,
    )
    torchao_config: str = option(
        "",
        "Round the weights of linear layers as torchao does when they are loaded: int8dq (as w8a8_int8), int8wo, "
        "int4wo-32, -64, -128 or -256, fp8wo. fp8dq is refused.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadArgs:
    """Weights in host memory."""

    cpu_offload_gb: int = planned(
        0, "Gigabytes of weights kept in host memory and copied to the device in every step.", low=0
    )
    offload_group_size: int = planned(
        -1, "Layers in one group, of which some are kept in host memory; -1 turns it off.", low=-1
    )
    offload_num_in_group: int = planned(1, "Layers of each group that are kept in host memory.", low=1)
    offload_prefetch_step: int = planned(1, "How many layers ahead weights are fetched.", low=1)
    offload_mode: str = planned(
        "cpu", "Where offloaded weights are kept.", choices=("meta", "cpu", "shm_cpu", "sharded_gpu")
    )
    enable_memory_saver: bool = planned(
        False, "Allow the memory of weights and KV cache to be given back and taken again while running."
    )

"""Options about the weights: their location, format and precision, and the device."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, always, option, refused
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
        sglang="required",
        aliases=("--model",),
        plan="model.path",
    )
    load_format: str = option(
        "auto",
        "Format of the weights. auto: safetensors files if there are any, else .bin and .pt files, else a .gguf "
        "file; gguf: a .gguf file, which also holds configuration and tokenizer; npcache: .bin and .pt files, which "
        "the first start copies into the subfolder np and later starts read from there; sharded_state: files that "
        "penstock shard wrote for each rank; layered: layer by layer, which auto also does; bitsandbytes: weights in "
        "nf4, fp4 or int8 as transformers saves them, which auto also reads; "
        "remote: a URL (s3://..., gs://..., https://...), which auto also accepts; "
        "remote_instance: copied from a running server with the same model, see "
        "--remote-instance-weight-loader-seed-instance-ip; "
        "dummy: random weights, for measurements without a download.",
        choices=_LOAD_FORMATS,
        built=(
            "auto",
            "safetensors",
            "pt",
            "dummy",
            "gguf",
            "npcache",
            "sharded_state",
            "layered",
            "bitsandbytes",
            "remote",
            "remote_instance",
        ),
        plan="model.load_format",
    )
    model_loader_extra_config: Json = option(
        {},
        "JSON object for the loader. enable_multithread_load (true or false): read with several threads, also within "
        "one file. num_threads: number of threads (default 8). pattern: file names of sharded_state (default "
        "model-rank-{rank}-part-{part}.safetensors).",
    )
    trust_remote_code: bool = option(
        False,
        "Execute the tokenizer's Python files in the model folder. Python files of the model itself are never "
        "executed. Off by default, because this code has all your rights.",
        plan="tokenizer.trust_remote_code",
    )
    context_length: int | None = option(
        None,
        "Longest sequence in tokens, prompt and output together. Default: the value in the model's configuration. "
        "Larger values are refused.",
        low=2,
        plan="model.context_length",
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of the model on the Hub, for weights and tokenizer. Default: the main branch.",
        plan="tokenizer.revision",
    )
    download_dir: str | None = option(
        None, "Folder for downloaded models. Default: the cache folder of the Hugging Face Hub."
    )
    json_model_override_args: Json = option({}, "JSON object whose values override those of the model's config.json.")
    dtype: str = option(
        "auto",
        "Precision of weights and activations. half is float16, float is float32. Default: auto, the checkpoint's "
        "dtype, except that a float32 checkpoint becomes bfloat16 on a GPU.",
        sglang="auto, but a float32 checkpoint becomes float16 (bfloat16 for Gemma) on every device",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        plan="model.dtype",
    )
    device: str | None = option(
        None,
        "Device that runs the model: cpu, cuda, or cuda:N for the GPU with number N. Default: the first GPU that the "
        "installed torch can use, else the CPU.",
        plan="model.device",
    )
    random_seed: int | None = option(
        None,
        "Seed of every random choice. The seeds of requests without `seed` derive from it. Default: a new seed at each "
        "start.",
        low=0,
        high=2**63 - 1,
        plan="model.random_seed",
    )
    weight_loader_disable_mmap: bool = option(
        False,
        "Read safetensors files with plain reads instead of mapping them into memory. This is faster on some network "
        "file systems.",
        plan="model.mmap",
        invert=True,
    )
    is_embedding: bool = option(
        False,
        "Compute embeddings only (/v1/embeddings, /encode and Engine.encode): the last token's hidden state, "
        "normalised to length one. Requests to generate text are refused. Without this option, a generating model "
        "does both. Encoders and sentence-transformers checkpoints always compute embeddings only, with the pooling "
        "that their files specify.",
        sglang="generating models compute embeddings only if it is set",
        plan="model.is_embedding",
    )
    model_impl: str = option(
        "auto",
        "Implementation of the model. native (SGLang's name: sglang): Penstock's own implementation; transformers: the "
        "modules of the transformers library, with Penstock's attention, cache and batches; auto: native if it "
        "exists, else transformers.",
        choices=("auto", "native", "sglang", "transformers"),
        plan="model.by_transformers",
        if_false_true=("native", "transformers"),
    )
    delete_ckpt_after_loading: bool = option(
        False,
        "Delete the checkpoint after loading: the weights, JSON and tokenizer files in the folder --model-path, and "
        "the folder itself if it is then empty. Requires a single copy of the model on one machine.",
        plan="model.delete_after_loading",
    )
    custom_weight_loader: tuple[str, ...] | None = option(
        None,
        "Import paths of functions (package.module.function) that take the model's folder and yield pairs (name, "
        "tensor). These tensors are loaded instead of the folder's weight files. The functions run with all rights "
        "of this process.",
        sglang="the functions load weights that are sent to a running server",
        empty=True,
        plan="model.custom_loaders",
    )
    disable_mla: bool = refused(
        False,
        "Run DeepSeek models with expanded keys and values instead of the compressed latent cache.",
        reason="it needs a KV cache of expanded keys and values, tens of times as large for the same output, and "
        "Penstock has only the compressed one",
        instead="leave it out, or use --attention-backend torch_native, the reference to which kernels are compared",
    )
    remote_instance_weight_loader_seed_instance_ip: str | None = option(
        None,
        "Address of a running server from which --load-format remote_instance copies the weights. It needs the same "
        "model and options. --model-path still names the folder with config.json and the tokenizer. The running server "
        "must accept this server's --admin-api-key or --api-key.",
        plan="model.seed_address",
    )
    remote_instance_weight_loader_seed_instance_service_port: int | None = option(
        None,
        "HTTP port of the running server from which the weights are copied.",
        low=1,
        high=65535,
        plan="model.seed_port",
    )
    remote_instance_weight_loader_send_weights_group_ports: tuple[int, ...] | None = option(
        None,
        "Ports that the running server opens to send the weights, one per rank.",
        low=1,
        high=65535,
        plan="model.seed_group_ports",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantArgs:
    """Quantisation."""

    quantization: str | None = option(
        None,
        "Quantisation of the weights. A quantised checkpoint does not need this option, because its configuration "
        "names its format; if the option is set, it must agree. w4a16 rounds the weights of any checkpoint to 4 bits, "
        "in groups of 32, while it loads. w4a8 does the same with 8-bit activations; w8a8_int8 uses 8 bits for both. "
        "fp8 and w8a8_fp8 round the linear layers and experts of an unquantised checkpoint to e4m3 with a scale per "
        "output; GPUs with float8 products keep them in 8 bits and round activations too, a CPU saves no memory. "
        "w4a8 and w8a8_int8 run on a CPU only so far. qoq and w4afp8 are refused. Default: the checkpoint's format.",
        choices=tuple(dict.fromkeys((*_QUANTIZATIONS, *METHODS))),
        built=(*spellings(), *UNREADABLE),
    )
    quantization_param_path: str | None = option(
        None,
        "JSON file with the scales of an fp8_e4m3 KV cache, by tensor-parallel rank and layer.",
        none_text=True,
        plan="model.kv_scales",
    )
    torchao_config: str = option(
        "",
        "Quantise the weights of linear layers like torchao while they load: int8dq (the same as w8a8_int8), int8wo, "
        "int4wo-32, -64, -128 or -256, fp8wo. fp8dq is refused.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadArgs:
    """Weights in host memory."""

    cpu_offload_gb: int = option(
        0,
        "Gigabytes (2^30 bytes) of each GPU's weights to keep in host memory: whole layers, at equal distances. Every "
        "step copies them to the GPU.",
        low=0,
        plan="model.offload_gib",
    )
    offload_group_size: int = option(
        -1,
        "Divide the layers into groups of this size, and keep the last --offload-num-in-group of each group in host "
        "memory. -1: off.",
        low=-1,
        plan="model.offload_group",
        other_unit=True,
    )
    offload_num_in_group: int = option(
        1, "Layers of each group that are kept in host memory.", low=1, plan="model.offload_in_group"
    )
    offload_prefetch_step: int = option(
        1,
        "Number of layers in host memory that are copied ahead of the one in use. The GPU has memory for one more.",
        low=1,
        plan="model.offload_ahead",
    )
    offload_mode: str = always(
        "cpu",
        "Where the weights of these layers are kept.",
        choices=("meta", "cpu", "shm_cpu", "sharded_gpu"),
        built=("cpu",),
        needs={
            "meta": "a measurement that ignores the output, because the weights of these layers are discarded",
            "shm_cpu": "ranks with equal weights, which could share one copy in shared memory",
            "sharded_gpu": "free memory on other GPUs that this GPU can read over NVLink",
        },
        instead="use cpu, with which each rank keeps its own shards in pinned host memory",
        reason="each rank keeps its own shards in pinned host memory",
    )
    enable_memory_saver: bool = option(
        False,
        "Allow the memory of weights and KV cache of a GPU to be given back and taken again while the server runs "
        "(/release_memory_occupation, /sleep). CUDA graphs, which hold the addresses of this memory, are then off. On "
        "a CPU this is possible without the option.",
        plan="model.memory_saver",
    )

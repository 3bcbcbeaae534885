"""GGUF files, written with llama.cpp's own package, give what that package and transformers read in them."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import cpp_kernels
import paged_forward
import tiny_checkpoints
from bench.accuracy import prompts
from ops.matmul.with_cpp import PackedWeight4
from ops.select import select
from runtime.config.gguf_header import KINDS, read_header
from runtime.errors import CheckpointError
from runtime.models.checkpoint import locate
from runtime.models.config import read_facts
from runtime.models.formats.gguf import TABLES, GgufFiles, dequantise, in_groups
from runtime.models.formats.stored import QuantizedTensors
from runtime.models.quantization import quantization_fields
from serve import Engine
from serve.demo import demo_path

NAMES = {  # model_type -> llama.cpp's architecture
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MOE = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
VECTOR = "shared_expert_gate.weight"  # whose one row is a vector there
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def write(directory: Path, family: str, kind: str, **config: Any) -> tuple[str, str]:
    """A GGUF file of a tiny model with matrices of a kind, and an ordinary checkpoint of what it holds: paths."""
    values = {**SHAPE, **MOE.get(family, {}), **config}
    return convert(Path(tiny_checkpoints.cached(family, **values)), directory, kind)


def convert(source: Path, directory: Path, kind: str, *, split: bool = False) -> tuple[str, str]:
    """As `write`, of a checkpoint in one file. With a tokenizer.json of byte-level tokens there, that too."""
    config = json.loads((source / "config.json").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    path, architecture = directory / "model.gguf", NAMES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=12 if split else 0)
    _describe(writer, config, architecture)
    if (source / "tokenizer.json").is_file():
        _add_tokenizer(writer, source, config)
    tensors = load_file(source / "model.safetensors")
    plain = {name: _held(name, tensor, kind) for name, tensor in tensors.items()}
    for name, stored in _gguf_tensors(tensors, config, architecture).items():
        if stored.ndim == 1:
            writer.add_tensor(name, stored)
        else:
            number = Kind[kind]
            writer.add_tensor(name, gguf.quantize(stored, number), raw_dtype=number)
    if (config.get("rope_scaling") or config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(source))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = directory / "plain"
    made.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, made)
    save_file(plain, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return str(directory / "model-00001-of-00003.gguf" if split else path), str(made)


def _held(name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if tensor.dim() == 1 or name.endswith(VECTOR):
        return tensor.float()
    number = Kind[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), number), number).copy())


def _gguf_tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], architecture: str
) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    found = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if expert := _EXPERT.fullmatch(name):
            experts[f"{expert[1]}.{expert[3]}.weight"][int(expert[2])] = values
            continue
        if architecture == "llama" and (part := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        found[_name(names, name)] = values[0] if name.endswith(VECTOR) else values
    for name, each in experts.items():
        found[_name(names, name)] = np.stack([each[number] for number in range(len(each))])
    return found


def _name(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"llama.cpp has no name for {name}")
    return found


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if whole.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    if config.get("sliding_window") and architecture.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            getattr(writer, f"add_{name}")(config[name])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _divisors(source: Path) -> np.ndarray:
    config = AutoConfig.from_pretrained(source)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size, base = len(scaled) * 2, config.rope_parameters["rope_theta"]
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (plain / scaled).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
    described = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    tokens: dict[int, tuple[str, gguf.TokenType]] = {
        number: (token, gguf.TokenType.NORMAL) for token, number in described["model"]["vocab"].items()
    }
    for each in described["added_tokens"]:
        kind = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
        tokens[each["id"]] = (each["content"], kind)
    absent = (f"[PAD{number}]" for number in range(config["vocab_size"]))
    ordered = [tokens.get(number, (text, gguf.TokenType.UNUSED)) for number, text in enumerate(absent)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ordered])
    writer.add_token_types([kind for _, kind in ordered])
    merges = described["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    if isinstance(settings.get("chat_template"), str):
        writer.add_chat_template(settings["chat_template"])


DEMO = str(demo_path())
IDS = torch.randint(3, 128, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
FILES = [
    ("llama", "F16", {}),
    ("llama", "Q8_0", {"tie_word_embeddings": True}),
    ("llama", "Q4_0", {"attention_bias": True, "mlp_bias": True}),
    (
        "llama",
        "Q5_1",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    ("mistral", "BF16", {}),
    ("qwen2", "Q5_0", {}),
    ("qwen3", "Q4_1", {}),
    ("mixtral", "Q4_0", {"intermediate_size": 64}),
    ("qwen2_moe", "Q8_0", {}),
    ("qwen3_moe", "Q4_0", {}),
    ("gemma", "Q8_0", {}),
    ("gemma2", "F32", {"query_pre_attn_scalar": 16}),
    (
        "gemma3",
        "Q4_0",
        {
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        },
    ),
]


def opened(path: str) -> QuantizedTensors:
    return QuantizedTensors(GgufFiles(Path(path)), quantization_fields(read_facts(path).config))


def read_whole(path: str) -> dict[str, torch.Tensor]:
    tensors, found = opened(path), {}
    tensors.read_all(lambda name, _, part: found.update({name: part}), dict.fromkeys(tensors.shapes, ((),)))
    return found


def random_rows(kind: str, rows: int = 6, blocks: int = 3) -> np.ndarray:
    """Blocks of any bits, their scales finite and small."""
    entry = next(each for each in KINDS.values() if each.name == kind)
    draw = np.random.default_rng(len(kind))
    found = draw.integers(0, 256, (rows, blocks, entry.bytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    for place in places.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        scale = draw.normal(0, 0.1, (rows, blocks)).astype(np.float16)
        found[..., place : place + 2] = scale.view(np.uint8).reshape(rows, blocks, 2)
    return found.reshape(rows, -1)


def test_the_kinds_of_numbers_are_llama_cpps() -> None:
    for number, kind in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.numbers, kind.bytes) == (theirs.name, *gguf.GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"],
)
def test_numbers_are_those_that_llama_cpps_package_reads(kind: str) -> None:
    rows = random_rows(kind)
    wanted = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    assert torch.isfinite(wanted).all()
    assert torch.equal(dequantise(torch.from_numpy(rows), kind), wanted)
    if kind in TABLES:
        torch.testing.assert_close(in_groups(torch.from_numpy(rows), kind).dequantised(), wanted)


@pytest.mark.parametrize(
    ("family", "kind", "config"), FILES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_a_file_gives_the_logits_of_its_dequantised_weights(
    family: str, kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = write(tmp_path, family, kind, **config)
    found, wanted = read_whole(path), load_file(Path(plain) / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():  # a norm's weight had 1 added and taken away
        torch.testing.assert_close(found[name].float(), tensor, rtol=0, atol=2e-7, msg=name)
    mine = paged_forward.all_logits(paged_forward.load(path), IDS[:1], 16)[0]
    theirs = tiny_checkpoints.reference(plain, IDS[0])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3 * float(theirs.std()))


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("qwen3", "Q4_0")])
async def test_a_file_is_served_as_the_checkpoint_of_its_weights(
    family: str, kind: str, tmp_path: Path
) -> None:
    path, plain = write(tmp_path, family, kind)
    async with Engine(path, skip_tokenizer_init=True, dtype="float32", tp_size=1) as engine:
        made = await engine.generate(input_ids=IDS, sampling_params={"temperature": 0, "max_new_tokens": 12})
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for ids, answer in zip(IDS, made, strict=True):
        output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert answer["output_ids"] == output[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_weights_of_4_bits_stay_so_where_there_are_kernels(kind: str, tmp_path: Path) -> None:
    cpp_kernels.library()
    path, plain = write(tmp_path, "llama", kind)
    kernels = select(cpp_kernels.CHOICES)
    kept: Any = paged_forward.load(path, kernels=kernels)
    for layer in kept.layers:
        assert isinstance(layer.attention.qkv.weight, PackedWeight4)
    mine, theirs = (
        paged_forward.all_logits(model, IDS, 16)
        for model in (kept, paged_forward.load(plain, kernels=kernels))
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * float(other.std()))


def test_a_table_of_codes_stays_with_its_weights(tmp_path: Path) -> None:
    """IQ4_NL, which the package does not write: blocks of any bits in the place of Q4_0's."""
    cpp_kernels.library()
    path, _ = write(tmp_path, "llama", "Q4_0")
    content = bytearray(Path(path).read_bytes())
    for name, tensor in read_header(Path(path)).tensors.items():
        if tensor.kind.name == "Q4_0":
            at = content.index(name.encode()) + len(name) + 4 + 8 * len(tensor.shape)
            content[at : at + 4] = (20).to_bytes(4, "little")
    Path(path).write_bytes(content)
    ordinary = paged_forward.load(path)
    kept: Any = paged_forward.load(path, kernels=select(cpp_kernels.CHOICES))
    assert isinstance(kept.layers[0].mlp.down.weight, PackedWeight4)
    mine, theirs = (paged_forward.all_logits(model, IDS, 16) for model in (kept, ordinary))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * float(other.std()))


def test_a_folder_stands_for_its_file_and_parts_for_the_whole(tmp_path: Path) -> None:
    source = Path(tiny_checkpoints.cached("qwen3", **SHAPE))
    whole, _ = convert(source, tmp_path / "whole", "Q8_0")
    parts, _ = convert(source, tmp_path / "parts", "Q8_0", split=True)
    assert locate(str(tmp_path / "parts")) == parts
    assert locate(str(tmp_path / "whole"), load_format="gguf") == whole
    one, other = read_whole(whole), read_whole(parts)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    Path(parts).rename(tmp_path / "parts" / "first.gguf")
    with pytest.raises(CheckpointError, match="must be called"):
        read_facts(str(tmp_path / "parts" / "first.gguf"))
    (tmp_path / "whole" / "second.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files \(model.gguf, second.gguf\)"):
        locate(str(tmp_path / "whole"))
    with pytest.raises(CheckpointError, match=r"no \.gguf file"):
        locate(str(source), load_format="gguf")


def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "llama", "F16")
    content = Path(path).read_bytes()
    broken = tmp_path / "broken.gguf"
    for changed, message in (
        (b"GGML" + content[4:], "is no GGUF file"),
        (content[:4] + b"\x01" + content[5:], "GGUF version 1"),
        (content[:-4000], "is cut off"),
        (content[:40], "is cut off or has a damaged header"),
        (content[:8] + b"\xff" * 8 + content[16:], "damaged header"),
        (content.replace(b"llama", b"lamma"), "architecture lamma"),
        (b"", "is no GGUF file"),
    ):
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            read_facts(str(broken))
    for place in range(24, 2000, 7):  # any byte of the header: never another error
        broken.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        with suppress(CheckpointError):
            opened(str(broken))


async def test_the_tokenizer_the_template_and_the_ends_are_the_files_own(tmp_path: Path) -> None:
    path, _ = convert(Path(DEMO), tmp_path, "BF16")
    assert read_facts(path).eos_ids == read_facts(DEMO).eos_ids | {0}  # <|endoftext|> ends a text too
    texts = ["Once upon a time", "so,\nhéllo <|im_end|>x", "<think>\n\n</think> So: 你好"]
    asked = [{"role": "user", "content": "Tell me a story about a lake."}]
    answers = []
    for model in (path, DEMO):
        async with Engine(model, dtype="float32") as engine:
            tokenizer = engine.core.tokenizer
            assert tokenizer is not None
            ids = tokenizer.encode_batch(texts)
            answer = await engine.chat(asked, temperature=0, max_tokens=60)
            texts_again = [tokenizer.decode(each) for each in ids]
            answers.append((ids, texts_again, answer.choices[0].message.content))
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "file_type"), [("Q8_0", 7), ("Q4_0", 2), ("Q4_K_M", 15)])
async def test_the_demo_model_answers_as_llama_cpp_does(kind: str, file_type: int, tmp_path: Path) -> None:
    """The files are llama.cpp's own quantiser's; 50 prompts, of whose tokens 95 % are to be the same."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    source, _ = convert(Path(DEMO), tmp_path, "BF16")
    path = str(tmp_path / f"{kind}.gguf")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = file_type
    assert llama_cpp.llama_model_quantize(source.encode(), path.encode(), options) == 0
    asked = prompts(AutoTokenizer.from_pretrained(DEMO), 50)
    sampling = {"temperature": 0, "max_new_tokens": 48}
    async with Engine(path) as engine:
        made = await engine.generate(input_ids=asked, sampling_params=sampling)
    theirs = llama_cpp.Llama(path, n_ctx=2048, verbose=False, n_threads=2)
    same, total, ends = 0, 0, read_facts(path).eos_ids
    for prompt, answer in zip(asked, made, strict=True):
        generated = []
        for token in islice(theirs.generate(prompt, temp=0.0, repeat_penalty=1.0), 48):
            generated.append(token)
            if token in ends:
                break
        same += sum(one == other for one, other in zip(answer["output_ids"], generated, strict=False))
        total += max(len(answer["output_ids"]), len(generated))
    print(f"{kind}: {same} of {total} tokens")
    assert same >= 0.95 * total

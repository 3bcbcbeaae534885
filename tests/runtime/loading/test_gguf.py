"""GGUF files, written with llama.cpp's package, give the same values as with that package and transformers."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import cpp_kernels
import paged_forward
import tiny_checkpoints
from bench.accuracy import prompts
from gguf_files import SHAPE, by_converter, by_llama_cpp, convert, write
from ops.matmul.grouped import GroupedWeight
from ops.matmul.with_cpp import PackedWeight4
from ops.select import select
from runtime.config.fields import Fields
from runtime.config.gguf_header import KINDS, read_header
from runtime.config.plan import TokenizerPlan
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading.checkpoint import locate
from runtime.loading.facts import read_facts
from runtime.loading.formats.gguf import FORMS, GgufFiles, dequantise, in_groups
from runtime.loading.formats.stored import QuantizedTensors
from runtime.loading.quantization import quantization_fields
from runtime.tokenizer.files import read_tokenizer
from serve import Engine
from serve.demo import demo_path

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
    (
        "phi3",
        "Q8_0",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0],
                "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0],
            },
        },
    ),
    (
        "qwen2",
        "Q5_0",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "attention_factor": 1.4,
                "beta_fast": 16.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
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


def random_rows(kind: str, rows: int = 6, blocks: int = 3, size: float = 0.1) -> np.ndarray:
    """Return blocks of random bits with finite and small scales."""
    entry = next(each for each in KINDS.values() if each.name == kind)
    draw = np.random.default_rng(len(kind))
    found = draw.integers(0, 256, (rows, blocks, entry.bytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    for place in places.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        scale = draw.normal(0, size, (rows, blocks)).astype(np.float16)
        found[..., place : place + 2] = scale.view(np.uint8).reshape(rows, blocks, 2)
    if kind == "MXFP4":
        found[..., 0] = draw.integers(110, 130, (rows, blocks))  # exponents
    return found.reshape(rows, -1)


def with_kinds(path: Path, kinds: dict[str, str], to: Path) -> str:
    """Copy the file with random blocks of other types in some matrices."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(to, "qwen3")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        kind = next((kinds[part] for part in kinds if f".{part}." in tensor.name), None)
        size, rows = (int(each) for each in (*tensor.shape, 1)[:2])
        number = tensor.tensor_type if kind is None else gguf.GGMLQuantizationType[kind]
        data = tensor.data if kind is None else random_rows(kind, rows, size // gguf.GGML_QUANT_SIZES[number][0], 2e-4)
        writer.add_tensor(tensor.name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(to)


def test_the_kinds_of_numbers_are_llama_cpps() -> None:
    for number, kind in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.numbers, kind.bytes) == (theirs.name, *gguf.GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"],
)
def test_numbers_are_those_that_llama_cpps_package_reads(kind: str) -> None:
    rows = random_rows(kind)
    wanted = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    assert torch.isfinite(wanted).all()
    assert torch.equal(dequantise(torch.from_numpy(rows), kind), wanted)
    if kind in FORMS:
        torch.testing.assert_close(in_groups(torch.from_numpy(rows), kind).dequantised(), wanted)


@pytest.mark.parametrize(("family", "kind", "config"), FILES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_file_gives_the_logits_of_its_dequantised_weights(
    family: str, kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = write(tmp_path, family, kind, **config)
    found, wanted = read_whole(path), load_file(Path(plain) / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():  # the converter adds 1 to a norm's weight, and loading subtracts it
        torch.testing.assert_close(found[name].float(), tensor, rtol=0, atol=2e-7, msg=name)
    mine = paged_forward.all_logits(paged_forward.load(path), IDS[:1], 16)[0]
    theirs = tiny_checkpoints.reference(plain, IDS[0])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3 * float(theirs.std()))


def test_gpt_oss_has_sinks_and_experts_apart_with_biases(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "beta_fast": 32.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 64, "attention_factor": 1.3}
    path, plain = write(tmp_path, "gpt_oss", "F16", rope_parameters=yarn)
    mine = paged_forward.all_logits(paged_forward.load(path), IDS[:1], 16)[0]
    theirs = tiny_checkpoints.reference(plain, IDS[0])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3 * float(theirs.std()))


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("qwen3", "Q4_0")])
async def test_a_file_is_served_as_the_checkpoint_of_its_weights(family: str, kind: str, tmp_path: Path) -> None:
    path, plain = write(tmp_path, family, kind)
    async with Engine(path, skip_tokenizer_init=True, dtype="float32", tp_size=1) as engine:
        made = await engine.generate(input_ids=IDS, sampling_params={"temperature": 0, "max_new_tokens": 12})
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for ids, answer in zip(IDS, made, strict=True):
        output = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert answer["output_ids"] == output[0, len(ids) :].tolist()


def test_only_the_rows_that_are_wanted_are_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write(tmp_path, "qwen3", "Q8_0")
    name, sizes = "model.embed_tokens.weight", []
    whole = read_whole(path)[name]

    def noted(rows: torch.Tensor, kind: str) -> torch.Tensor:
        sizes.append(len(rows))
        return dequantise(rows, kind)

    monkeypatch.setattr("runtime.loading.formats.gguf.dequantise", noted)
    parts: list[torch.Tensor] = []
    cuts = ((slice(3, 7), slice(32, 64)), (slice(7, 9), slice(0, 32)))
    opened(path).read_all(lambda name, number, part: parts.append(part), {name: cuts})
    assert sizes == [4, 2]
    assert all(torch.equal(part, whole[cut]) for part, cut in zip(parts, cuts, strict=True))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_weights_in_groups_are_unpacked_a_few_rows_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write(tmp_path, "qwen3", kind)
    stored = GgufFiles(Path(path)).read("blk.0.ffn_gate.weight")
    whole, sizes = in_groups(stored, kind), []

    def noted(rows: torch.Tensor, kind: str) -> GroupedWeight:
        sizes.append(len(rows))
        return in_groups(rows, kind)

    monkeypatch.setattr("runtime.loading.formats.gguf.in_groups", noted)
    monkeypatch.setattr("runtime.loading.formats.stored.NUMBERS_AT_ONCE", 4 * whole.codes.shape[1] + 1)
    tensors, name = opened(path), "model.layers.0.mlp.gate_proj.weight"
    tensors.keep_grouped({name: tensors.forms[name]._replace(shifted=True)})
    codes, rest = (slice(3, 20), slice(None)), (slice(1, 20), slice(0, 1))
    cuts = {f"{name}.codes": (codes,), f"{name}.scales": (rest,), f"{name}.shifts": (rest,)}
    found: dict[str, torch.Tensor] = {}
    tensors.read_all(lambda part, _, tensor: found.update({part: tensor}), cuts)
    assert sizes == [4, 4, 4, 4, 3]
    shifts = torch.zeros_like(whole.scales) if whole.shifts is None else whole.shifts
    assert torch.equal(found[f"{name}.codes"], whole.codes[codes])
    assert torch.equal(found[f"{name}.scales"], whole.scales[rest])
    assert torch.equal(found[f"{name}.shifts"], shifts[rest])


def test_a_header_is_read_without_its_lists_of_texts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    writer.add_token_list(["a", "", "bc"])
    writer.add_token_types([1, 3, 1])
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole, short = (read_header(tmp_path / "model.gguf", texts=texts) for texts in (True, False))
    assert whole.values["tokenizer.ggml.tokens"] == ["a", "", "bc"]
    assert short.values == {**whole.values, "tokenizer.ggml.tokens": []}
    assert short.values["tokenizer.ggml.token_type"] == [1, 3, 1]
    assert short.tensors == whole.tensors


@pytest.mark.parametrize(("family", "experts"), [("qwen3_moe", "fused"), ("mixtral", "apart")])
def test_experts_stand_together_or_apart(family: str, experts: str, tmp_path: Path) -> None:
    source = Path(tiny_checkpoints.cached(family, **{**SHAPE, "intermediate_size": 64, "moe_intermediate_size": 64}))
    path, plain = convert(source, tmp_path, "Q4_0", experts=experts)
    found, wanted = read_whole(path), load_file(Path(plain) / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), tensor) for name, tensor in wanted.items())


def test_a_number_beside_a_weight_multiplies_it(tmp_path: Path) -> None:
    path, rows = tmp_path / "model.gguf", random_rows("NVFP4")
    writer = gguf.GGUFWriter(path, "qwen3")
    kind = gguf.GGMLQuantizationType.NVFP4
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_q.scale", np.array([0.37], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = QuantizedTensors(GgufFiles(path), Fields({"quant_method": "gguf"}, ""))
    [name] = tensors.shapes
    found: list[torch.Tensor] = []
    tensors.read_all(lambda name, number, part: found.append(part), {name: ((),)})
    torch.testing.assert_close(found[0], torch.from_numpy(gguf.dequantize(rows, kind)) * 0.37)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Q4_1", {}),
        ("Q8_0", {"tie_word_embeddings": True}),
        ("Q5_0", {}),
        ("Q5_1", {"tie_word_embeddings": True}),
    ],
)
def test_weights_of_few_bits_stay_so_where_there_are_kernels(
    kind: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both vocabulary weights also stay quantised, in blocks. No weight is dequantised."""
    cpp_kernels.library()
    monkeypatch.setattr("runtime.layers.embedding.ROWS_AT_ONCE", 32)
    path, plain = write(tmp_path, "llama", kind, **config)
    kernels = select(cpp_kernels.CHOICES)
    with monkeypatch.context() as patch:
        patch.setattr("runtime.loading.formats.gguf.dequantise", None)
        kept: Any = paged_forward.load(path, kernels=kernels)
    packed = [layer.attention.qkv.weight for layer in kept.layers]
    for weight in (*packed, kept.embedding.weight, kept.head.prepared):
        assert isinstance(weight, PackedWeight4)
    assert kept.dtype == torch.float32
    assert (kept.head.prepared is kept.embedding.weight) == bool(config)
    mine, theirs = (
        paged_forward.all_logits(model, IDS, 16) for model in (kept, paged_forward.load(plain, kernels=kernels))
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 * float(other.std()))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_matrices_of_several_kinds_share_a_layer(kind: str, tmp_path: Path) -> None:
    """As in llama.cpp's mixtures: v has another type than q and k. Types that the package cannot write are drawn at
    random.
    """
    cpp_kernels.library()
    path, _ = write(tmp_path, "qwen3", "Q8_0", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    changed = with_kinds(Path(path), {"attn_q": kind, "attn_k": kind, "ffn_down": kind}, tmp_path / "changed.gguf")
    kept: Any = paged_forward.load(changed, kernels=select(cpp_kernels.CHOICES))
    assert isinstance(kept.layers[0].attention.qkv.weight, PackedWeight4)
    mine, theirs = (paged_forward.all_logits(model, IDS[:1], 16)[0] for model in (kept, paged_forward.load(changed)))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3 * float(theirs.std()))


def test_a_table_of_codes_stays_with_its_weights(tmp_path: Path) -> None:
    """IQ4_NL, which the package cannot write: blocks of random bits replace those of Q4_0."""
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
    for place in range(24, 2000, 7):  # any byte of the header: never another kind of error
        broken.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        with suppress(CheckpointError):
            opened(str(broken))


async def test_the_tokenizer_the_template_and_the_ends_are_the_files_own(tmp_path: Path) -> None:
    path, _ = convert(Path(DEMO), tmp_path, "BF16")
    assert read_facts(path).eos_ids == read_facts(DEMO).eos_ids | {0}  # <|endoftext|> also ends a text
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


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("smollm", ["a", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["a", "Ġ", "123", "4"]),
        ("gpt-2", ["a", "Ġ1234"]),
        ("deepseek-llm", None),
    ],
)
def test_texts_are_split_as_the_file_says_or_refused(split: str, pieces: list[str] | None, tmp_path: Path) -> None:
    source = Path(tiny_checkpoints.write(tmp_path / "source", vocab_size=4096, num_hidden_layers=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO) / name, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"split": split}))
    path, _ = convert(source, tmp_path / "made", "F16")
    plan = TokenizerPlan(tokenizer_path=path, mode="auto", trust_remote_code=False, revision=None, chat_template=None)
    if pieces is None:
        with pytest.raises(ConfigurationError, match=r"not known \(deepseek-llm\): .*--tokenizer-path"):
            read_tokenizer(plan)
        return
    backend: Any = read_tokenizer(plan).backend
    assert [piece for piece, _ in backend.library.pre_tokenizer.pre_tokenize_str("a 1234")] == pieces


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return models for llama.cpp: the demo model, and a Qwen3 with an untied head and the demo's tokens.

    If LLAMA_CPP_SOURCE is set, llama.cpp's converter writes the files, otherwise the test kit does. The weights are
    random, but the head makes each token predict a certain next token, because with pure noise the next token would
    change with every rounding.
    """
    folder = tmp_path_factory.mktemp("models")
    drawn = tiny_checkpoints.write(
        folder / "drawn",
        "qwen3",
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        max_position_embeddings=2048,
    )
    tensors = load_file(Path(drawn) / "model.safetensors")
    tensors |= {name: 0.33 * each for name, each in tensors.items() if name.endswith("proj.weight")}
    embedding = 5 * tensors["model.embed_tokens.weight"]
    head = embedding[torch.randperm(4096, generator=torch.Generator().manual_seed(5))] / 16
    save_file(
        tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head},
        Path(drawn) / "model.safetensors",
        {"format": "pt"},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO) / name, drawn)
    sources, llama_cpp = {"demo": DEMO, "qwen3": str(drawn)}, os.environ.get("LLAMA_CPP_SOURCE")
    if llama_cpp:
        return {name: by_converter(llama_cpp, source, folder / f"{name}.gguf") for name, source in sources.items()}
    return {name: convert(Path(source), folder / name, "BF16")[0] for name, source in sources.items()}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize("model", ["demo", "qwen3"])
async def test_answers_are_llama_cpps(model: str, kind: str, models: dict[str, str], tmp_path: Path) -> None:
    """llama.cpp's quantiser writes the files. 95 % of the tokens for 50 prompts must be equal."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = by_llama_cpp(models[model], tmp_path / f"{kind}.gguf", kind)
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
    print(f"{model} in {kind}: {same} of {total} tokens")
    assert same >= 0.95 * total

"""Models without a native family, served with transformers' modules, generate the tokens of transformers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import tiny_checkpoints
import tiny_foreign
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading.facts import read_facts
from runtime.models.by_transformers.attention import causal_lm, without_messages_of
from runtime.models.registry import find
from serve import Engine
from tiny_checkpoints import redraw

PROMPTS = [[3 + 2 * index + row for index in range(5 + 6 * row)] for row in range(4)]
NEW_TOKENS = 10


@cache
def checkpoint(model_type: str, auto: Any = AutoModelForCausalLM) -> str:
    """Return a temporary checkpoint of this kind."""
    folder = str(Path(_scratch().name) / auto.__name__ / model_type)
    model = auto.from_config(tiny_foreign.config(model_type), dtype=torch.float32)
    redraw(model, seed=0)
    model.save_pretrained(folder)
    return folder


def greedy(model_type: str, auto: Any = AutoModelForCausalLM) -> list[list[int]]:
    """Return the greedy tokens of transformers for each of `PROMPTS`, with one whole pass per token."""
    path = checkpoint(model_type, auto)
    model = causal_lm(auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager"))
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def test_messages_of_an_import_are_dropped_and_no_others(caplog: pytest.LogCaptureFixture):
    library, other = logging.getLogger("some_library"), logging.getLogger("some_library.part")
    with without_messages_of("some_library"):
        library.warning("of no use")
        other.warning("wanted")
    library.warning("wanted too")
    assert caplog.messages == ["wanted", "wanted too"]


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="transformers-models-")


COMMON_PAGED = ("deepseek_v3", "gpt2", "gpt_oss")  # models that use Penstock's paged cache
COMMON_HELD = ("bart", "bloom", "mamba2")  # models that use transformers' caches
COMMON = (*COMMON_PAGED, *COMMON_HELD)
MORE = (
    "afmoe", "apertus", "arcee", "aria_text", "beam", "biogpt", "bitnet", "codegen", "cohere", "cohere2", "cohere2_moe",
    "ctrl", "cwm", "deepseek_v2", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "granite",
    "granitemoe", "gptj", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "internlm3", "jais2", "laguna",
    "llama", "mellum", "mixtral", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "modernbert-decoder",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "stablelm", "vaultgemma",
    "youtu", "gemma3n_text", "gemma4_text", "dots1", "lfm2",
)  # fmt: skip
HELD = (
    "dbrx", "deepseek_v32", "falcon", "falcon_h1", "falcon_mamba", "gpt_neo", "jamba",
    "lfm2_moe", "llama4_text", "mamba", "minimax", "mpt", "nemotron_h", "openai-gpt", "recurrent_gemma", "xglm",
)  # fmt: skip
RARE_PAGED = (
    "apertus1p5_text",
    "axk1", "cohere_compass_text", "bert", "bert-generation", "dory",
    "electra", "ernie", "flint", "fuyu", "gemma4",
    "gemma4_unified", "gemma4_unified_text", "got_ocr2", "gpt-sw3", "granite_swa", "granitemoe_swa", "hrm_text",
    "hy_v3", "kolibri1", "mimo_v2_flash", "minimax_m3_vl_text", "phi4_multimodal", "roc_bert",
)  # fmt: skip
RARE_HELD = (
    "axk2", "bailing_hybrid", "bamba", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small",
    "camembert", "data2vec-text", "deepseek_v4", "doge", "dots3_note_text", "git", "glm_moe_dsa",
    "gpt_neox_japanese", "hy_v4", "inkling2_text", "inkling_text",
    "jetmoe", "kimi_linear", "lara_mini", "lfm3", "llama4",
    "longcat_flash", "marian", "mbart", "megatron-bert", "mvp", "olmo_hybrid", "pegasus",
    "plbart", "qwen4_exp", "qwen4_exp_text", "reformer", "rembert",
    "roberta", "roberta-prelayernorm", "roformer", "rwkv", "trocr", "whisper",
    "xlm-roberta", "xlm-roberta-xl", "xlstm", "xmod", "zamba", "zamba2",
    "zaya",
)  # fmt: skip
RARE = (*RARE_PAGED, *RARE_HELD)
SEEING = (  # multimodal models, of which only the text part is served
    "aria", "aya_vision", "blip-2", "chameleon", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni",
    "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid", "emu3", "ernie4_5_vl_moe", "exaone4_5", "fuyu", "gemma4",
    "gemma4_unified", "git", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "got_ocr2", "granite4_vision",
    "granite_docling", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3", "inkling2", "inkling_mm_model",
    "instructblip", "instructblipvideo", "internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr",
    "llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6",
    "minicpmv4_7", "minimax_m3_vl", "mistral3", "mistral4", "mistral_large4", "mllama", "molmo2", "muse_glimmer",
    "muse_spark", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "qianfan_ocr", "qwen2_5_omni_thinker",
    "qwen2_5_vl", "qwen2_vl", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "smolvlm", "step3p7",
    "video_llama_3", "video_llava", "vipllava",
)  # fmt: skip
USUAL_SEEING = ("llava", "mistral3", "qwen2_5_vl", "qwen3_vl")
NOT_SERVED = {
    "cpmant": "the tokens of a prompt attend to each other in both directions",
    "moshi": "with a cache it attends to other tokens than without one",
    "prophetnet": "it predicts several tokens at once, in separate streams",
    "xlm": "tokens attend to later tokens",
    "xlnet": "tokens attend to later tokens",
}
ONLY_SEEING = "only a checkpoint that sees is tried ([images](image-models.md))"
NOT_TRIED = {  # models for which no small checkpoint can be made
    "inkling2_loop_text": "a small model of its shape cannot be made; not tried",
    "dots3_note": ONLY_SEEING,
    "blt": "further models group its bytes into patches; not tried",
    **dict.fromkeys(
        ("emu3", "mllama"),
        "served as a multimodal model; a text-only checkpoint is not tried, because transformers cannot load one that "
        "it has written",
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it is a draft model; not tried"),
    "moss_transcribe_diarize": "its configuration holds several models; not tried",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it generates audio; not tried"),
}
SEEING_NOT_SERVED = {
    **dict.fromkeys(("dots3_note", "fast_vlm", "hy_v4_vl", "inkling2_loop"), ONLY_SEEING),
    "apertus1p5": "a small model of its shape cannot be made; not tried",
    **dict.fromkeys(("blip", "idefics", "kosmos-2"), "it generates nothing without an image"),
    **dict.fromkeys(
        ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
        "it has an encoder",
    ),
    "perception_lm": "its vision tower needs another library; not tried",
    "diffusion_gemma": "it generates blocks of tokens by diffusion",
    "evolla": "its input is proteins; not tried",
    "glm5_next": "even a small model of its shape is too slow to test; not tried",
    "kosmos-2.5": "it returns no hidden states",
    "pi0": "its output is robot actions",
    "pp_chart2table": "transformers registers its class under another configuration; not tried",
    "unlimited_ocr": "the attention window of its tokens depends on the end of the prompt",
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "max_total_tokens": 2048,
    "page_size": 16,
    "chunked_prefill_size": 16,
}
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


async def served(path: str, **options: Any) -> list[list[int]]:
    """Serve the prompts together, in chunks, and again from the prefix cache."""
    async with Engine(path, **OPTIONS, **options) as engine:
        first, second = [
            [answer["output_ids"] for answer in await engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
            for _ in range(2)
        ]
    assert first == second
    return first


@pytest.mark.parametrize("model_type", COMMON)
async def test_tokens_are_those_of_transformers(model_type: str) -> None:
    path = checkpoint(model_type)
    assert await served(path, model_impl="transformers") == greedy(model_type)


async def test_angles_of_long_texts_do_not_depend_on_the_chunk(tmp_path: Path) -> None:
    """Longrope has other angles beyond the trained context. Chunks of a long text and its first tokens alone must
    agree.
    """
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 5.0]}
    path = tiny_checkpoints.write(
        tmp_path,
        "llama",
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors,
        },
    )  # fmt: skip
    prompts = [[3 + index % 90 for index in range(length)] for length in (60, 41, 100)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    wanted = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        wanted.append(ids[len(prompt) :])
    async with Engine(path, **OPTIONS, model_impl="transformers") as engine:
        for _ in range(2):  # again from the prefix cache
            answers = await engine.generate(input_ids=prompts, sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in answers] == wanted


@pytest.mark.slow
# the set of models depends on transformers' version
@pytest.mark.parametrize("model_type", [kind for kind in (*MORE, *HELD) if kind in CONFIG_MAPPING])
async def test_tokens_of_many_more_are_those_of_transformers(model_type: str) -> None:
    path = checkpoint(model_type)
    assert await served(path, model_impl="transformers") == greedy(model_type)


@pytest.mark.long
@pytest.mark.parametrize("model_type", [kind for kind in RARE if kind in CONFIG_MAPPING])
async def test_tokens_of_rare_ones_are_those_of_transformers(model_type: str) -> None:
    path = checkpoint(model_type)
    assert await served(path, model_impl="transformers") == greedy(model_type)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in USUAL_SEEING else pytest.mark.long)
        for kind in SEEING
        if kind in CONFIG_MAPPING
    ],
)
async def test_tokens_of_models_that_also_see_are_those_of_transformers(model_type: str) -> None:
    path = checkpoint(model_type, AutoModelForImageTextToText)
    found = await served(path, model_impl="transformers")
    assert found == greedy(model_type, AutoModelForImageTextToText)


async def test_gemma_3n_is_served_without_what_it_sees_with(tmp_path: Path) -> None:
    """Only the text part is served, from a complete checkpoint with the published names."""
    tensors = load_file(Path(checkpoint("gemma3n_text")) / "model.safetensors")
    whole = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    whole |= {f"model.{name}.weight": torch.ones(3) for name in ("vision_tower.stem", "embed_audio.norm")}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((Path(checkpoint("gemma3n_text")) / "config.json").read_text())
    values = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert await served(str(tmp_path)) == greedy("gemma3n_text")


async def test_a_class_may_be_written_otherwise(tmp_path: Path) -> None:
    """As in Phi-3.5-MoE's files, which were published before transformers supported it."""
    shutil.copytree(checkpoint("phimoe"), tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["PhimoeForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["PhiMoEForCausalLM"]}))
    assert read_facts(str(tmp_path)).architecture == "PhimoeForCausalLM"
    assert await served(str(tmp_path)) == greedy("phimoe")


async def test_attention_that_depends_on_where_the_prompt_ends_is_refused() -> None:
    with pytest.raises(CheckpointError, match="where the prompt ends"):
        await served(checkpoint("unlimited_ocr", AutoModelForImageTextToText))


LISTED = (5, 24)  # version of transformers whose models are listed above; later ones bring further models
later = pytest.mark.skipif(
    Version(transformers.__version__).release[:2] > LISTED, reason=f"transformers is newer than {LISTED}"
)


@later
def test_every_model_that_also_sees_is_accounted_for() -> None:
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    foreign = {kind for kind, name in names.items() if not (isinstance(name, str) and find(name))}
    assert foreign <= {*SEEING, "gemma3n"} | SEEING_NOT_SERVED.keys()
    assert not set(SEEING) & SEEING_NOT_SERVED.keys()


@later
def test_every_causal_model_of_transformers_is_accounted_for() -> None:
    """Models without a native family are served here or listed with a reason, and the document has the same list."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    foreign = {kind for kind, name in names.items() if not (isinstance(name, str) and find(name))}
    tested = {*COMMON, *MORE, *HELD, *RARE, "gemma3n"}
    assert foreign <= tested | NOT_SERVED.keys() | NOT_TRIED.keys()
    assert not tested & (NOT_SERVED.keys() | NOT_TRIED.keys())
    document = (Path(__file__).parents[3] / "docs" / "models-by-transformers.md").read_text(encoding="utf-8")
    for line in listed(names):
        assert line in document, line


def listed(names: Mapping[str, Any]) -> list[str]:
    """Return the document's entry for each architecture: a line per implementation, and one for multimodal models."""

    def line(kinds: Iterable[str]) -> str:
        return ", ".join(f"`{kind}`" for kind in sorted(kinds) if kind in names)

    lines = [line((*COMMON_PAGED, *MORE, *RARE_PAGED)), line((*COMMON_HELD, *HELD, *RARE_HELD))]
    lines.append(", ".join(f"`{kind}`" for kind in SEEING))
    reasons = {kind: why for kind, why in {**NOT_SERVED, **NOT_TRIED}.items() if kind in names}
    return lines + [f"| `{kind}` | {why} |" for kind, why in sorted({**reasons, **SEEING_NOT_SERVED}.items())]


async def test_a_model_without_a_family_needs_no_option() -> None:
    path = checkpoint("persimmon")
    assert read_facts(path).by_transformers
    assert await served(path) == greedy("persimmon")
    assert not read_facts(tiny_checkpoints.cached()).by_transformers
    with pytest.raises(CheckpointError, match="PersimmonForCausalLM is not supported"):
        read_facts(path, model_impl="native")


async def test_logprobs_and_vectors_come_from_the_same_modules() -> None:
    path = checkpoint("starcoder2")
    async with Engine(path, **OPTIONS, model_impl="transformers") as engine:
        answer = await engine.generate(
            input_ids=PROMPTS[1],
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        vector = (await engine.encode(input_ids=PROMPTS[1]))["embedding"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        output = model(torch.tensor([PROMPTS[1]]), output_hidden_states=True, use_cache=False)
    scores = output.logits[0].log_softmax(-1)
    wanted = [float(scores[index, token]) for index, token in enumerate(PROMPTS[1][1:])]
    found = [pair[0] for pair in answer["meta_info"]["input_token_logprobs"][1:]]
    assert found == pytest.approx(wanted, abs=1e-4)
    last = torch.nn.functional.normalize(output.hidden_states[-1][0, -1], dim=-1)
    assert vector == pytest.approx(last.tolist(), abs=1e-5)


async def test_what_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copytree(checkpoint("bert"), tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "is_decoder": False}))
    with pytest.raises(CheckpointError, match="does it attend to later tokens"):
        await served(str(tmp_path))


def test_a_window_that_attention_is_not_told_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a window that it does not pass to attention"):
        read_facts(checkpoint("moshi"))


async def test_caches_of_transformers_come_back_from_behind_pages() -> None:
    """A sequence continues from a cached prefix, and generates the tokens of transformers."""
    path, wanted = checkpoint("gpt_neo"), greedy("gpt_neo")
    small = {**OPTIONS, "max_mamba_cache_size": 64, "page_size": 4}
    async with Engine(path, **small) as engine:
        for _ in range(2):
            answers = await engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in answers] == wanted
        assert max(answer["meta_info"]["cached_tokens"] for answer in answers) > 8


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    values = {
        "architectures": ["NoSuchForCausalLM"],
        "model_type": "nosuch",
        "auto_map": {"AutoModel": "x.py"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="code that comes with the checkpoint is not run"):
        read_facts(str(tmp_path))


@pytest.mark.parametrize("change", ["missing", "renamed", "misshapen"])
async def test_tensors_that_do_not_fit_are_named(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("persimmon"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.dense_h_to_4h.weight"
    tensor = tensors.pop(name)
    if change == "renamed":
        tensors[name + "s"] = tensor
    if change == "misshapen":
        tensors[name] = tensor[:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.dense_h_to_4h\.weight"):
        async with Engine(str(folder), **OPTIONS):
            pass


@pytest.mark.parametrize("options", [{"tp_size": 2}, {"pp_size": 2}, {"quantization": "w8a8_int8"}])
async def test_what_only_families_of_ours_can_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="transformers' modules"):
        async with Engine(checkpoint("persimmon"), **OPTIONS, **options):
            pass


async def test_a_model_that_mixes_tokens_elsewhere_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial before serving detects it. Here the norm of the first layer reads the previous token."""
    from transformers.models.persimmon import modeling_persimmon

    forward = modeling_persimmon.PersimmonMLP.forward
    monkeypatch.setattr(modeling_persimmon.PersimmonMLP, "forward", lambda self, x: forward(self, x.roll(1, 1) + x))
    with pytest.raises(CheckpointError, match="logits differ"):
        async with Engine(checkpoint("persimmon"), **OPTIONS):
            pass

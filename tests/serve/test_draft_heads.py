"""Draft heads propose what their definitions say, and outputs equal those of plain decoding."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import draft_heads
from draft_heads import TinyHead
from runtime.batch import Batch
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading.sharded_state import write_shards
from runtime.loading.token_map import read_token_map
from runtime.speculative.gain import DraftGain
from runtime.worker.host_drafter import HostDrafter
from runtime.worker.model_runner import StepExecutor
from serve import Engine
from weights_server import copied_from, serving, without_weights

IDS = "output_ids"
PROMPTS = ["the cat sat on the mat", "a b c d a b c d", "x"]
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PARAMS = [GREEDY, {"temperature": 0.9, "max_new_tokens": 16, "sampling_seed": 3, "ignore_eos": True}]
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 4, page size 4": {"page_size": 4, "chunked_prefill_size": 4},
    "operation by operation": {"attention_backend": "torch_native"},
}


class Proposals:
    """Records the drafts of every row: (first position of the row, drafts)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[tuple[int, list[int]]] = []
        propose = HostDrafter.propose

        def recorded(drafter: HostDrafter, batch: Batch, last_tokens: Any) -> Batch:
            found = propose(drafter, batch, last_tokens)
            if batch.drafts is not None:
                firsts = np.cumsum(batch.counts) - batch.counts
                for row, count in zip(batch.drafts.rows.tolist(), batch.drafts.counts.tolist(), strict=True):
                    first = int(firsts[row])
                    self.rows.append((int(batch.starts[row]), found.token_ids[first + 1 : first + 1 + count].tolist()))
            return found

        monkeypatch.setattr(HostDrafter, "propose", recorded)

    def take(self) -> list[tuple[int, list[int]]]:
        rows, self.rows = self.rows, []
        return rows


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


async def answers(**options: Any) -> list[dict[str, Any]]:
    async with Engine(log_level="error", random_seed=1, **options) as engine:
        calls = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
        alone = [await engine.generate(prompt, sampling_params=params) for prompt, params in calls]
        together = [engine.generate(prompt, sampling_params=params) for prompt, params in calls]
        found = [*alone, *await asyncio.gather(*together)]
        engine.core.check()
        return found


ALIKE = ("EAGLE qwen2", "NEXTN glm4_moe")  # built as other kinds are
PARAMETERS = [pytest.param(kind, marks=[pytest.mark.slow] if kind in ALIKE else []) for kind in draft_heads.KINDS]


@pytest.fixture(scope="module", params=PARAMETERS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyHead:
    return TinyHead(tmp_path_factory.mktemp("head"), request.param)


@pytest.mark.parametrize("way", ["default", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if WAYS[way])])
async def test_drafts_are_those_of_the_definition(way: str, tiny: TinyHead, monkeypatch: pytest.MonkeyPatch) -> None:
    proposals, checked = Proposals(monkeypatch), 0
    async with Engine(log_level="error", random_seed=1, dtype="float32", **tiny.options, **WAYS[way]) as engine:
        for length in (1, 7, 30):
            prompt = torch.randint(3, tiny.vocab_size, (length,), generator=tiny.generator).tolist()
            # Long enough for pauses in which entries are computed without drafts.
            params = {**GREEDY, "max_new_tokens": 260 if length == 7 else 24}
            ids = prompt + (await engine.generate(input_ids=prompt, sampling_params=params))[IDS]
            rows = proposals.take()
            assert rows
            for start, drafts in [*rows[:4], *rows[-3:]]:
                logits = tiny.logits_of_drafts(ids[: start + 1], drafts)
                for row, draft in zip(logits, drafts, strict=True):
                    assert row[draft] > row.max() - 1e-3
                    checked += 1
    assert checked >= 10


@pytest.mark.slow
@pytest.mark.parametrize("way", ["operation by operation"])  # others: test_draft_matrix.py
async def test_outputs_with_a_random_head_are_those_of_plain_decoding(way: str, tiny: TinyHead) -> None:
    found = await answers(**tiny.options, **WAYS[way])
    plain = await answers(model_path=str(tiny.target), **WAYS[way])
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in plain]
    assert any("spec_verify_ct" in answer["meta_info"] for answer in found)


async def test_a_head_rests_while_drafts_do_not_pay_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, note = TinyHead(tmp_path, "EAGLE3 llama"), DraftGain.note
    pays, steps = False, list[tuple[bool, bool]]()  # (read by the head, with drafts)

    def noted(gain: DraftGain, num_rows: int, *, drafted: bool, **more: Any) -> None:
        values: dict[str, Any] = {**more, "seconds": 0.1 if drafted == pays else 10.0}
        note(gain, num_rows, drafted=drafted, **values)

    run = StepExecutor.run
    monkeypatch.setattr(DraftGain, "note", noted)
    monkeypatch.setattr(
        StepExecutor,
        "run",
        lambda self, batch: steps.append((batch.read_by_drafter, batch.drafts is not None)) or run(self, batch),
    )
    options = {**tiny.options, "speculative_adaptive": {"enabled": True}}
    plain = await answers(model_path=str(tiny.target))
    for pays in (False, True):
        steps.clear()
        found = await answers(**options)
        assert [answer[IDS] for answer in found] == [answer[IDS] for answer in plain]
        assert steps.count((True, True)) >= 8  # the first trial
        assert steps.count((False, False)) >= (30 if not pays else 8)
        assert (False, True) not in steps
        assert pays or steps.count((True, True)) < 100


async def test_prompt_lookup_proposes_before_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that repeats is drafted by prompt lookup, in rows beside those of the head."""
    tiny, proposals = TinyHead(tmp_path, "EAGLE3 llama"), Proposals(monkeypatch)
    chain = {**tiny.options, "speculative_algorithm": "NGRAM,EAGLE3", "speculative_num_steps": 2}
    found = await answers(**chain)
    assert {len(drafts) for _, drafts in proposals.take()} > {1, 2}
    plain = await answers(model_path=str(tiny.target))
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in plain]


@pytest.mark.parametrize(
    ("kind", "ranks", "name"),
    [
        ("EAGLE llama", {}, "frequent.json"),
        pytest.param("NEXTN deepseek_v3", {}, "frequent.pt", marks=pytest.mark.slow),
        pytest.param("NEXTN mimo", {"tp_size": 2}, "frequent.json", marks=pytest.mark.slow),
        pytest.param("EAGLE llama", {"speculative_eagle_topk": 3}, "frequent.pt", marks=pytest.mark.slow),
    ],
)
async def test_a_token_map_limits_drafts(
    kind: str, ranks: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are the best of the frequent tokens, and outputs stay the same."""
    tiny, proposals, checked = TinyHead(tmp_path, kind), Proposals(monkeypatch), 0
    frequent = torch.randperm(tiny.vocab_size, generator=tiny.generator)[:40].tolist()
    file = tmp_path / name
    if name.endswith(".pt"):
        torch.save(frequent, file)
    else:
        file.write_text(json.dumps(frequent))
    rest = torch.ones(tiny.vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(frequent), False)
    options: dict[str, Any] = {"log_level": "error", "dtype": "float32"}
    async with Engine(**options, **tiny.options, **ranks, speculative_token_map=str(file)) as engine:
        for length in (1, 7, 30):
            prompt = torch.randint(3, tiny.vocab_size, (length,), generator=tiny.generator).tolist()
            proposals.take()
            found = (await engine.generate(input_ids=prompt, sampling_params=GREEDY))[IDS]
            for start, drafts in proposals.take()[:4]:
                logits = tiny.logits_of_drafts([*prompt, *found][: start + 1], drafts)
                for row, draft in zip(logits.masked_fill(rest, -torch.inf), drafts, strict=True):
                    assert row[draft] > row.max() - 1e-3
                    checked += 1
    assert checked >= 10
    size = {name: ranks[name] for name in ranks if name == "tp_size"}
    found = await answers(**tiny.options, **ranks, dtype="float32", speculative_token_map=str(file))
    plain = await answers(model_path=str(tiny.target), **size, dtype="float32")
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in plain]


@pytest.mark.parametrize("text", ["[1, 2", '{"a": 1}', "[]", "[1, 1000000]", "[0.5]", "[[1]]"])
def test_a_token_map_that_is_no_list_of_ids_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="--speculative-token-map"):
        read_token_map(str(file), 100)


async def test_a_head_that_predicts_the_model_is_always_right(tmp_path: Path) -> None:
    """The next token of this model depends on the last one alone, and the head passes this token on."""
    tiny = TinyHead(tmp_path, "EAGLE llama")
    for folder in (tiny.target, tiny.head):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc.bias")):
                tensor.zero_()
            elif name == "model.norm.weight":
                tensor.fill_(1)
            elif name == "fc.weight":
                tensor.copy_(torch.eye(*tensor.shape))
        save_file(tensors, file, {"format": "pt"})
    found = await answers(**tiny.options, speculative_num_steps=3)
    plain = await answers(model_path=str(tiny.target))
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in plain]
    greedy = [answer["meta_info"] for answer in found[: len(found) // 2 : len(PARAMS)]]
    assert all(meta["spec_accept_rate"] == 1 and meta["spec_accept_length"] > 3 for meta in greedy)


@pytest.mark.parametrize(
    ("kind", "changed", "sentence"),
    [
        ("EAGLE llama", {"speculative_draft_model_path": "target"}, "has no tensor fc.weight"),
        ("EAGLE llama", {"speculative_algorithm": "EAGLE3"}, "does not fit the model"),
        ("EAGLE3 llama", {"speculative_algorithm": "EAGLE"}, "is not a draft head of EAGLE"),
        ("EAGLE llama", {"speculative_algorithm": "NEXTN"}, "NEXTN needs multi-token prediction layers of"),
        ("NEXTN glm4_moe", {"model_path": "full"}, "was saved without multi-token prediction layers"),
    ],
)
async def test_what_is_not_a_head_is_refused(kind: str, changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    tiny = TinyHead(tmp_path, kind)
    folders = {"target": tiny.target, "head": tiny.head, "full": tiny.full}
    options = {name: str(folders.get(value, value)) for name, value in changed.items()}
    with pytest.raises((ConfigurationError, CheckpointError), match=sentence):
        await Engine(log_level="error", **{**tiny.options, **options}).start()


RANKS: list[dict[str, int]] = [{"tp_size": 2}, {"pp_size": 2}, {"tp_size": 2, "pp_size": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load_format", "groups"),
    [
        ("sharded_state", False),
        ("auto", True),
        *(pytest.param(each, False, marks=pytest.mark.long) for each in ("auto", "remote_instance")),
    ],
)
async def test_a_heads_vocabulary_follows_the_weights_of_two_ranks(
    load_format: str, groups: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's copy of the embedding and LM head has the values of all ranks, also after an update."""
    tiny, proposals = TinyHead(tmp_path, "EAGLE llama"), Proposals(monkeypatch)
    ranks: dict[str, Any] = {"tp_size": 2, "dtype": "float32"}
    if groups:
        # All requests get the same prompt, so rank 0's group gets them.
        ranks |= {"dp_size": 2, "enable_dp_attention": True, "load_balance_method": "longest_prefix"}
    options: dict[str, Any] = {**tiny.options, **ranks, "log_level": "error"}
    if load_format == "sharded_state":
        write_shards(str(tiny.target), str(tmp_path / "shards"), tp_size=2, pp_size=1, dtype="float32")
        options |= {"model_path": str(tmp_path / "shards"), "load_format": load_format}
    seed = AsyncExitStack()
    if load_format == "remote_instance":
        _, http = await seed.enter_async_context(serving(str(tiny.target), **ranks))
        options |= copied_from(http.base_url.port or 0, 2)
        options["model_path"] = without_weights(str(tiny.target), tmp_path / "new")
    updated = tmp_path / "updated"
    shutil.copytree(tiny.target, updated)
    tensors = load_file(updated / "model.safetensors")
    vocabulary = {"model.embed_tokens.weight": tiny.model.model.embed_tokens, "lm_head.weight": tiny.model.lm_head}
    tensors |= {name: tensors[name].roll(7, 0) for name in vocabulary if name in tensors}
    save_file(tensors, updated / "model.safetensors", {"format": "pt"})
    prompt = torch.randint(3, tiny.vocab_size, (9,), generator=tiny.generator).tolist()
    async with seed, Engine(**options) as engine:
        for turn in range(2):
            proposals.take()
            found = (await engine.generate(input_ids=prompt, sampling_params=GREEDY))[IDS]
            rows = proposals.take()[:4]
            assert rows
            for start, drafts in rows:
                logits = tiny.logits_of_drafts([*prompt, *found][: start + 1], drafts)
                for row, draft in zip(logits, drafts, strict=True):
                    assert row[draft] > row.max() - 1e-3
            if not turn:
                await engine.update_weights_from_disk(str(updated))
                for layer in vocabulary.values():
                    layer.weight.data = layer.weight.data.roll(7, 0)


@pytest.mark.parametrize(
    ("kind", "way", "more"),
    [
        ("NEXTN deepseek_v3", "disk", {}),
        ("NEXTN mimo", "tensors", {"speculative_token_map": "frequent.json"}),
        pytest.param("NEXTN qwen3_next", "disk", {"speculative_token_map": "frequent.json"}, marks=pytest.mark.slow),
        pytest.param(
            "NEXTN glm4_moe",
            "tensors",
            {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "EAGLE llama", "disk", {"tp_size": 2, "speculative_token_map": "frequent.json"}, marks=pytest.mark.slow
        ),
    ],
)
async def test_drafts_after_an_update_are_those_of_a_start_with_the_new_weights(
    kind: str, way: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update has the layers of NEXTN, and the LM head rows of the token map."""
    old, new = (TinyHead(make_folder(tmp_path / str(seed)), kind, seed=seed) for seed in (5, 6))
    if kind not in draft_heads.NEXTN:  # the update has no draft head
        shutil.rmtree(new.head)
        shutil.copytree(old.head, new.head)
    (tmp_path / "frequent.json").write_text(json.dumps(list(range(0, old.vocab_size, 3))))
    if "speculative_token_map" in more:
        more = {**more, "speculative_token_map": str(tmp_path / "frequent.json")}
    prompts = [[5, 9, 17, 30, 8], [40, 41, 42]]
    proposals = Proposals(monkeypatch)

    async def drafts(engine: Engine) -> list[Any]:
        proposals.take()
        found = [await engine.generate(input_ids=prompt, sampling_params=GREEDY) for prompt in prompts]
        return [proposals.take(), [answer[IDS] for answer in found]]

    options: dict[str, Any] = {"log_level": "error", "dtype": "float32", "disable_radix_cache": True, **more}
    async with Engine(**options, **new.options) as fresh:
        expected = await drafts(fresh)
    async with Engine(**options, **old.options) as engine:
        before = await drafts(engine)
        assert before[0] != expected[0]
        if kind in draft_heads.NEXTN:
            tensors = load_file(new.target / "model.safetensors")
            damaged = Path(shutil.copytree(new.target, tmp_path / "damaged"))
            name = next(name for name in tensors if name.startswith(new.names[3]))
            save_file({**tensors, name: tensors[name][:3].clone()}, damaged / "model.safetensors", {"format": "pt"})
            with pytest.raises(CheckpointError):
                await engine.update_weights_from_disk(str(damaged))
            assert await drafts(engine) == before
        if way == "disk":
            await engine.update_weights_from_disk(str(new.target))
        else:
            await engine.update_weights_from_tensor(load_file(new.target / "model.safetensors"))
        assert await drafts(engine) == expected
        engine.core.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("EAGLE3 small vocabulary", RANKS[2]),
        ("NEXTN deepseek_v3", RANKS[1]),
        *(
            pytest.param(kind, ranks, marks=pytest.mark.long)
            for kind, ranks in [
                ("EAGLE llama", RANKS[0]),
                ("EAGLE3 small vocabulary", RANKS[0]),
                ("EAGLE qwen2", RANKS[2]),
                ("NEXTN deepseek_v3", RANKS[0]),
                ("NEXTN glm4_moe", RANKS[1]),
                ("NEXTN qwen3_next", RANKS[0]),
            ]
        ),
    ],
    ids=str,
)
async def test_heads_beside_several_ranks(
    kind: str, ranks: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has the whole head. It proposes what the head's definition says, and outputs stay the same."""
    tiny, proposals, checked = TinyHead(tmp_path, kind), Proposals(monkeypatch), 0
    options: dict[str, Any] = {"log_level": "error", "dtype": "float32", **ranks}
    async with (
        Engine(**options, **tiny.options) as drafted,
        Engine(**options, model_path=str(tiny.target)) as plain,
    ):
        for length in (1, 7, 30):
            prompt = torch.randint(3, tiny.vocab_size, (length,), generator=tiny.generator).tolist()
            proposals.take()
            found = (await drafted.generate(input_ids=prompt, sampling_params=GREEDY))[IDS]
            rows = proposals.take()
            assert rows
            for start, drafts in rows[:4]:
                logits = tiny.logits_of_drafts([*prompt, *found][: start + 1], drafts)
                for row, draft in zip(logits, drafts, strict=True):
                    assert row[draft] > row.max() - 1e-3
                    checked += 1
            assert found == (await plain.generate(input_ids=prompt, sampling_params=GREEDY))[IDS]
        calls = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
        together = [
            await asyncio.gather(*(engine.generate(prompt, sampling_params=params) for prompt, params in calls))
            for engine in (drafted, plain)
        ]
        drafted.core.check()
    assert [answer[IDS] for answer in together[0]] == [answer[IDS] for answer in together[1]]
    assert checked >= 10


async def test_a_served_draft_head_is_refused(tmp_path: Path) -> None:
    tiny = TinyHead(tmp_path, "EAGLE3 llama")
    with pytest.raises(CheckpointError, match="name it in --speculative-draft-model-path"):
        await Engine(log_level="error", model_path=str(tiny.head)).start()

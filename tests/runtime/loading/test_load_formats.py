"""All sources of weights give the same model, and loading releases the memory of its files."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import paged_forward
import tiny_checkpoints
from runtime.errors import CheckpointError, ConfigurationError
from runtime.loading import remote
from runtime.loading.checkpoint import DESCRIPTIONS
from runtime.loading.sharded_state import write_shards
from serve import Engine
from serve.cli.main import run

IDS = list(range(10, 40))
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "max_total_tokens": 512}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


async def answer(path: str, **options: Any) -> list[int]:
    async with Engine(path, **OPTIONS, **options) as engine:
        return (await engine.generate(input_ids=IDS, sampling_params=GREEDY))["output_ids"]


def logits(path: str, **changes: Any) -> torch.Tensor:
    return paged_forward.all_logits(paged_forward.load(path, **changes), [IDS], page_size=4)[0]


def as_torch(folder: Path) -> str:
    """Write a checkpoint as two torch files, with one tensor in bfloat16."""
    path = tiny_checkpoints.write(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:])):
        torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    return path


async def test_npcache_writes_a_copy_once_and_reads_it_from_then_on(tmp_path: Path) -> None:
    path = as_torch(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is bfloat16"):
        paged_forward.load(path, load_format="npcache")
    expected = logits(path, load_format="pt", any_dtype=True)
    assert torch.equal(logits(path, load_format="npcache", any_dtype=True), expected)
    index = tmp_path / "np" / "index.json"
    written = index.stat().st_mtime_ns
    tensors = torch.load(tmp_path / "pytorch_model-0.bin", weights_only=True)
    assert torch.equal(logits(path, load_format="npcache", any_dtype=True, mmap=False), expected)
    assert index.stat().st_mtime_ns == written
    name = next(iter(tensors))
    # changes the files
    torch.save({**tensors, name: tensors[name] + 1}, tmp_path / "pytorch_model-0.bin")
    assert not torch.equal(logits(path, load_format="npcache", any_dtype=True), expected)
    for damaged in ("{", '{"source": 3}'):
        index.write_text(damaged)
        logits(path, load_format="npcache", any_dtype=True)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
async def test_shares_that_were_written_for_ranks_are_the_same_model(
    tmp_path: Path, tp_size: int, pp_size: int
) -> None:
    path, shares = tiny_checkpoints.cached("phi3"), str(tmp_path / "shares")
    ranks = [f"--tp-size={tp_size}", f"--pp-size={pp_size}"]
    assert run(["shard", "--model-path", path, "--output", shares, *ranks]) == 0
    sizes = {"tp_size": tp_size, "pp_size": pp_size}
    assert await answer(shares, load_format="sharded_state", **sizes) == await answer(path)
    if tp_size * pp_size > 1:
        with pytest.raises(CheckpointError, match="contains the shards of 2 ranks"):
            await answer(shares, load_format="sharded_state")
        return
    file = tmp_path / "shares" / "model-rank-0-part-0.safetensors"
    tensors = load_file(file)
    del tensors["norm.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 missing \(norm\.weight\), in .*model-rank-0-part-0"):
        paged_forward.load(shares, load_format="sharded_state")
    with pytest.raises(CheckpointError, match="exists already"):
        write_shards(path, shares, 1, 1)
    with pytest.raises(CheckpointError, match="penstock shard"):
        paged_forward.load(path, load_format="sharded_state")


async def test_layers_are_read_one_after_the_other_whatever_the_spelling() -> None:
    path = tiny_checkpoints.cached()
    assert await answer(path, load_format="layered") == await answer(path)


async def test_a_function_of_the_users_gives_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoints.write(tmp_path)
    expected = await answer(path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.mine")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loader.py").write_text(
        "from pathlib import Path\nfrom safetensors.torch import load_file\n"
        "def given(folder):\n    yield from load_file(Path(folder) / 'weights.mine').items()\n"
        "def wrong(folder):\n    return [('a', 3)]\n"
        "def broken(folder):\n    raise OSError('no disk')\n"
    )
    assert await answer(path, custom_weight_loader=("my_loader.given",)) == expected
    for name, why in (("wrong", "pairs of a name"), ("broken", "no disk"), ("absent", "cannot be imported")):
        with pytest.raises(CheckpointError, match=why):
            paged_forward.load(path, custom_loaders=(f"my_loader.{name}",))
    with pytest.raises(ConfigurationError, match="give one of them"):
        await answer(path, custom_weight_loader=("my_loader.given",), load_format="pt")


async def test_urls_are_copied_once(tmp_path: Path) -> None:
    path, store = tiny_checkpoints.cached(), fsspec.filesystem("memory")
    for file in Path(path).iterdir():
        store.pipe(f"/models/tiny/{file.name}", file.read_bytes())
    store.pipe("/models/tiny/optimizer/state.bin", b"not wanted")
    options = {"download_dir": str(tmp_path)}
    assert await answer("memory://models/tiny", **options) == await answer(path)
    [copy] = tmp_path.iterdir()
    assert not (copy / "optimizer").exists()
    written = (copy / "model.safetensors").stat().st_mtime_ns
    assert await answer("memory://models/tiny", load_format="remote", **options) == await answer(path)
    assert (copy / "model.safetensors").stat().st_mtime_ns == written
    config = json.loads(store.cat("/models/tiny/config.json"))
    store.pipe("/models/tiny/config.json", json.dumps({**config, "max_position_embeddings": 128}).encode())
    remote.download("memory://models/tiny", str(tmp_path), DESCRIPTIONS)
    assert json.loads((copy / "config.json").read_text())["max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://host/model", "redis is not a supported store"),
        ("simplecache::s3://bucket/model", "is not a supported store"),
        ("memory://nothing/here", "contains no model|cannot be read"),
        ("s3://bucket/model", r"penstock\[remote\]"),
    ],
)
def test_urls_that_cannot_be_read_are_refused(
    url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=why):
        remote.download(url, str(tmp_path), DESCRIPTIONS)


async def test_the_checkpoint_is_deleted_once_it_is_loaded(tmp_path: Path) -> None:
    path = shutil.copytree(tiny_checkpoints.cached(), tmp_path / "model")
    (path / "mine.py").write_text("something else")
    assert len(await answer(str(path), delete_ckpt_after_loading=True)) == 8
    assert [file.name for file in path.iterdir()] == ["mine.py"]
    path = shutil.copytree(tiny_checkpoints.cached(), tmp_path / "another")
    with pytest.raises(ConfigurationError, match="--dp-size 1"):
        await answer(str(path), delete_ckpt_after_loading=True, dp_size=2)
    assert (path / "model.safetensors").is_file()
    await answer(str(path), delete_ckpt_after_loading=True)
    assert not path.exists()


@pytest.mark.parametrize("mmap", [True, False])
def test_threads_share_the_work_within_one_file(mmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.loading.parameters.PIECE_BYTES", 100)
    path = tiny_checkpoints.cached("gpt_oss")
    pieces = logits(path, mmap=mmap, num_load_threads=4)
    monkeypatch.undo()
    assert torch.equal(pieces, logits(path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_tensor_of_another_dtype_is_named_with_its_file(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tiny_checkpoints.write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"1 of an unexpected dtype .{name} is .*, in .*model.safetensors"):
        paged_forward.load(path)


def peak_of_loading(path: str, **changes: Any) -> int:
    """Return the peak of this process's memory while it loads a model, in bytes above the level before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    model = paged_forward.load(path, **changes)
    peak = status("VmHWM") - before
    del model
    return peak


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is told by Linux")
@pytest.mark.parametrize(
    "form",
    [
        "mapped",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("plain", "threads", "pt", "npcache")),
    ],
)
def test_loading_takes_little_more_than_the_weights(form: str, wide: Path) -> None:
    """One tensor is more than half of the 110 MiB."""
    changes: dict[str, Any] = {
        "plain": {"mmap": False},
        "threads": {"num_load_threads": 4},
        "pt": {"load_format": "pt"},
        "npcache": {"load_format": "npcache"},
    }.get(form, {})
    path = str(wide)
    if form == "npcache":
        paged_forward.load(path, **changes)  # writes the numpy copy
    size = (wide / "model.safetensors").stat().st_size
    slack = 16 * 2**20  # the allocator's reserve differs between runs
    assert peak_of_loading(path, **changes) < 1.1 * size + slack


def test_a_pickle_of_other_objects_is_refused_with_their_name(tmp_path: Path) -> None:
    """For example, torchao's and HQQ's tensors."""
    shutil.copy(Path(tiny_checkpoints.cached()) / "config.json", tmp_path)
    torch.save({"lm_head.weight": Fraction(1, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"objects of fractions\.Fraction, .* as safetensors"):
        paged_forward.load(str(tmp_path))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    tiny_checkpoints.write(
        folder, vocab_size=2**15, hidden_size=512, head_dim=128, intermediate_size=2048, num_hidden_layers=3,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    return folder

"""Where a checkpoint's files are and what their headers say. Torch-free."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.config.args import Args
from runtime.config.gguf_header import is_gguf
from runtime.config.pooling import module_folders
from runtime.errors import CheckpointError
from runtime.models import remote

DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # of a repository: all but weights
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
NUMPY_FOLDER = "np"  # beside files of torch: the same for numpy
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
MAX_HEADER_BYTES = 100 * 2**20

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # how the file begins that git has without git-lfs
_DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class StoredTensor(NamedTuple):
    """One entry of a safetensors header. Offsets count from the start of the file."""

    dtype: str  # "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold a model's tensors, all of one format."""

    format: Literal["safetensors", "pt", "npcache"]
    files: tuple[Path, ...]


def stored_as(args: Args) -> str:
    """How the weights are stored, as asked: `load_format` of `locate`."""
    asked = args.model.load_format
    return "gguf" if asked == "auto" and args.quant.quantization == "gguf" else asked


def locate(
    path_or_hub_id: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    load_format: str = "auto",
) -> str:
    """The local directory of a model: the given one, or the Hub's or a store's (s3://...), copied if it is not here
    yet; or a GGUF file.

    A directory stands for the GGUF file in it where that is asked for (`load_format` gguf), or nothing else is there.
    Without `weights` only what describes the model and its tokenizer is downloaded.
    Raises CheckpointError where there is no such directory and no such model, or the Hub cannot be reached.
    """
    if remote.is_url(path_or_hub_id):
        copied = remote.download(path_or_hub_id, download_dir, DESCRIPTIONS, weights=weights)
        return _gguf_file(Path(copied), load_format) or copied
    if load_format == "remote":
        raise CheckpointError(
            f"--load-format remote needs a URL, as s3://bucket/folder, not {path_or_hub_id}."
        )
    if is_gguf(path_or_hub_id):
        if load_format not in ("auto", "layered", "gguf", "dummy"):
            raise CheckpointError(f"{path_or_hub_id} is no file of {load_format}; leave --load-format out.")
        return path_or_hub_id
    if Path(path_or_hub_id).is_dir():
        return _gguf_file(Path(path_or_hub_id), load_format) or path_or_hub_id
    if not _HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(f"There is no directory {path_or_hub_id}.")
    download = partial(_download, path_or_hub_id, revision, download_dir)
    directory = download([*DESCRIPTIONS, *(["*.safetensors"] if weights else [])])
    if weights and not any(Path(directory).glob("*.safetensors")):
        directory = download([*DESCRIPTIONS, "*.bin", "*.pt"])
    return _with_folders(Path(directory), download, ["*.safetensors", "*.bin"] if weights else [])


def _with_folders(directory: Path, download: Callable[..., str], weights: list[str]) -> str:
    """The directory with the folders of sentence-transformers' modules, which say how vectors are made."""
    folders = module_folders(directory)
    patterns = [f"{escape(folder)}/{each}" for folder in folders for each in ("config.json", *weights)]
    return download(patterns, skipped=None) if patterns else str(directory)


def _gguf_file(directory: Path, load_format: str) -> str | None:
    """The GGUF file that a directory stands for, the first where it was split; None for an ordinary checkpoint."""
    if load_format not in ("auto", "layered", "remote", "gguf"):
        return None
    others = ("*.safetensors", "*.bin", "*.pt")
    if load_format != "gguf" and any(any(directory.glob(pattern)) for pattern in others):
        return None
    later = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
    found = sorted(file for file in directory.glob("*.gguf") if not later.fullmatch(file.name))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:20])
        raise CheckpointError(
            f"{directory} holds several GGUF files ({names}): give --model-path one of them."
        )
    if not found and load_format == "gguf":
        raise CheckpointError(f"{directory} holds no .gguf file.")
    return str(found[0]) if found else None


def _download(
    hub_id: str,
    revision: str | None,
    download_dir: str | None,
    patterns: list[str],
    *,
    skipped: Sequence[str] | None = ("consolidated*", "*/*"),
) -> str:
    from huggingface_hub import errors, snapshot_download

    try:
        return snapshot_download(
            hub_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=None if skipped is None else [*skipped],
        )
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"There is no directory {hub_id}, and the Hub has no such model, or not for you (HF_TOKEN)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"The Hub's {hub_id} has no revision {revision}.") from error
    except (OSError, ValueError) as error:  # also what the Hub's client raises for no network
        raise CheckpointError(
            f"There is no directory {hub_id}, no earlier download of it, and the Hub cannot be reached. "
            "Give a local directory, or go online (HF_HUB_OFFLINE unset)."
        ) from error


def find_weights(directory: Path, load_format: str = "auto") -> WeightFiles:
    """The weight files of a local checkpoint; `load_format` is "auto", "safetensors", "pt" or "npcache".

    An index decides which files count; without one all do, but for `consolidated*` and training state. Raises
    CheckpointError where there are none.
    """
    if load_format in ("auto", "safetensors"):
        files = _indexed(directory, SAFETENSORS_INDEX) or _matching(directory, "*.safetensors")
        if files:
            return WeightFiles("safetensors", files)
    if load_format in ("auto", "pt", "npcache"):
        files = (
            _indexed(directory, TORCH_INDEX) or _matching(directory, "*.bin") or _matching(directory, "*.pt")
        )
        if files:
            return WeightFiles("npcache" if load_format == "npcache" else "pt", files)
    torch_files = "*.bin or *.pt"
    kinds = {"safetensors": "*.safetensors", "pt": torch_files, "npcache": torch_files}.get(
        load_format, f"*.safetensors, {torch_files}"
    )
    raise CheckpointError(f"{directory} holds no weights: no {kinds} file.")


def delete(path: str) -> None:
    """Delete a local checkpoint: its weights, what describes them, and its folder unless something else is in it.

    Raises OSError for what cannot be deleted.
    """
    place = Path(path)
    if place.is_file():  # GGUF, perhaps split
        stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", place.name)
        found = [
            file for file in place.parent.glob("*.gguf") if file.name.startswith(f"{stem}-") or file == place
        ]
        for file in found:
            file.unlink()
        return
    for file in {file for pattern in (*DESCRIPTIONS, *WEIGHTS) for file in place.glob(pattern)}:
        file.unlink()
    shutil.rmtree(place / NUMPY_FOLDER, ignore_errors=True)
    if not any(place.iterdir()):
        place.rmdir()


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Names, dtypes, shapes and offsets of a safetensors file.

    Raises CheckpointError for a damaged one, and for one that cannot be opened.
    """
    try:
        stream = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    with stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is no safetensors file.{lfs_hint(file)}")
        try:
            header = json.loads(stream.read(length))
            entries = {
                name: StoredTensor(
                    entry["dtype"],
                    tuple(entry["shape"]),
                    8 + length + entry["data_offsets"][0],
                    8 + length + entry["data_offsets"][1],
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{file} has a damaged header.") from error
    _check_entries(file, entries, 8 + length)
    expected = max((entry.end for entry in entries.values()), default=8 + length)
    if file.stat().st_size < expected:
        raise CheckpointError(f"{file} is cut off: {file.stat().st_size} bytes of {expected}.")
    return entries


def lfs_hint(file: Path) -> str:
    """A sentence to add to an error about a file that is only git-lfs' pointer to the real one; else nothing."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return ""
    return " It is a pointer of git-lfs: run `git lfs pull` in its folder to get the real file." * is_pointer


def _check_entries(file: Path, entries: Mapping[str, StoredTensor], begin: int) -> None:
    """Raise CheckpointError unless the tensors have the sizes that they claim and lie one behind the other."""
    for name, entry in entries.items():
        sizes = [*entry.shape, entry.begin, entry.end]
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
            raise CheckpointError(f"{file} has a damaged header: {name} has no usable shape or place.")
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if not isinstance(entry.dtype, str) or entry.dtype not in _DTYPE_BITS:
            raise CheckpointError(f"{file}: {name} has the dtype {entry.dtype}, which is not known.")
        num_bytes = -(-math.prod(entry.shape) * _DTYPE_BITS[entry.dtype] // 8)
        if entry.end - entry.begin != num_bytes:
            raise CheckpointError(
                f"{file} has a damaged header: {name} ({entry.dtype}, {'x'.join(map(str, entry.shape)) or 'a scalar'}) "
                f"needs {num_bytes} bytes and has {entry.end - entry.begin}."
            )
        if entry.begin != begin:
            trouble = "overlaps the tensor before it" if entry.begin < begin else "leaves a gap before it"
            raise CheckpointError(f"{file} has a damaged header: {name} {trouble}.")
        begin = entry.end


def weight_bytes(directory: Path) -> int:
    """The size of all tensors of a checkpoint, 0 where there are no weight files."""
    if directory.is_file():
        return directory.stat().st_size
    try:
        weights = find_weights(directory)
    except CheckpointError:
        return 0  # a configuration alone is enough for dummy weights
    if weights.format == "pt":
        return sum(file.stat().st_size for file in weights.files)
    return sum(entry.end - entry.begin for file in weights.files for entry in read_header(file).values())


def stored_dtype(directory: Path) -> str | None:
    """The dtype of the first floating tensor, for a configuration that does not say."""
    for file in _matching(directory, "*.safetensors"):
        for entry in read_header(file).values():
            if entry.dtype in _DTYPE_NAMES:
                return _DTYPE_NAMES[entry.dtype]
    return None


def _matching(directory: Path, pattern: str) -> tuple[Path, ...]:
    skipped = ("consolidated", "training_args", "optimizer", "scheduler", "scaler")
    return tuple(sorted(file for file in directory.glob(pattern) if not file.name.startswith(skipped)))


def _indexed(directory: Path, name: str) -> tuple[Path, ...]:
    """The files that an index names."""
    if not (directory / name).is_file():
        return ()
    try:
        index: Mapping[str, Any] = json.loads((directory / name).read_text(encoding="utf-8"))
        files = sorted({directory / Path(file).name for file in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / name} cannot be read.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing[:20])}, named by {name}.")
    return tuple(files)

"""Locate the files of a checkpoint and read their headers. Does not import torch."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
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
from runtime.loading import remote

# Files of a repository other than weights.
DESCRIPTIONS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
NUMPY_FOLDER = "np"  # folder, beside the torch files, with numpy copies of the tensors
SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
MAX_HEADER_BYTES = 100 * 2**20

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # start of a git-lfs pointer file
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
    """A tensor listed in a safetensors header. Offsets are in bytes from the start of the file."""

    dtype: str  # "F32", "BF16", ...
    shape: tuple[int, ...]
    begin: int
    end: int


WITHOUT_FILES = ("dummy", "remote_instance")  # load formats that read no weight files


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold a model's tensors. All have the same format."""

    format: Literal["safetensors", "pt", "npcache"]
    files: tuple[Path, ...]


def stored_as(args: Args) -> str:
    """Return the `load_format` to pass to `locate`: --load-format, or "gguf" with --quantization gguf."""
    load_format = args.model.load_format
    return "gguf" if load_format == "auto" and args.quant.quantization == "gguf" else load_format


def locate(
    path_or_hub_id: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
    load_format: str = "auto",
) -> str:
    """Return the local directory or GGUF file of a model. Downloads models from the Hub or a store (s3://...).

    For a directory, return the GGUF file in it if `load_format` is "gguf" or the directory has no other weights.
    If `weights` is false or `load_format` reads no weight files, download only the configuration and the tokenizer.
    Raises CheckpointError if the directory or model does not exist, or if the Hub cannot be reached.
    """
    wanted = weights and load_format not in WITHOUT_FILES
    if remote.is_url(path_or_hub_id):
        folder = remote.download(path_or_hub_id, download_dir, DESCRIPTIONS, weights=wanted)
        return _gguf_file(Path(folder), load_format) or folder
    if load_format == "remote":
        raise CheckpointError(f"--load-format remote needs a URL such as s3://bucket/folder, not {path_or_hub_id}.")
    if is_gguf(path_or_hub_id):
        if load_format not in ("auto", "layered", "gguf", "dummy"):
            raise CheckpointError(f"{path_or_hub_id} is a GGUF file, not {load_format}. Omit --load-format.")
        return path_or_hub_id
    if Path(path_or_hub_id).is_dir():
        return _gguf_file(Path(path_or_hub_id), load_format) or path_or_hub_id
    if not _HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(f"There is no directory {path_or_hub_id}, and it is not a model id of the Hub.")
    download = partial(_download, path_or_hub_id, revision, download_dir)
    directory = download([*DESCRIPTIONS, *(["*.safetensors"] if wanted else [])])
    if wanted and not any(Path(directory).glob("*.safetensors")):
        directory = download([*DESCRIPTIONS, "*.bin", "*.pt"])
    return _with_folders(Path(directory), download, ["*.safetensors", "*.bin"] if weights else [])


def _with_folders(directory: Path, download: Callable[..., str], weights: list[str]) -> str:
    """Download the folders of sentence-transformers modules, which configure pooling, and return the directory."""
    folders = module_folders(directory)
    patterns = [f"{escape(folder)}/{each}" for folder in folders for each in ("config.json", *weights)]
    return download(patterns, skipped=None) if patterns else str(directory)


def _gguf_file(directory: Path, load_format: str) -> str | None:
    """Return the GGUF file of a directory (the first of a split file), or None for other checkpoints."""
    if load_format not in ("auto", "layered", "remote", "gguf"):
        return None
    other_formats = ("*.safetensors", "*.bin", "*.pt")
    if load_format != "gguf" and any(any(directory.glob(pattern)) for pattern in other_formats):
        return None
    later = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
    files = sorted(file for file in directory.glob("*.gguf") if not later.fullmatch(file.name))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:20])
        raise CheckpointError(f"{directory} contains several GGUF files ({names}). Set --model-path to one of them.")
    if not files and load_format == "gguf":
        raise CheckpointError(f"{directory} contains no .gguf file.")
    return str(files[0]) if files else None


def _download(
    hub_id: str,
    revision: str | None,
    download_dir: str | None,
    patterns: list[str],
    *,
    skipped: Sequence[str] | None = ("consolidated*", "*/*"),
) -> str:
    from tqdm import TqdmWarning

    with warnings.catch_warnings():  # no warning about missing ipywidgets: progress bars as plain text are enough
        warnings.simplefilter("ignore", TqdmWarning)
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
            f"There is no directory {hub_id}, and the Hub has no such model or denies access to it (HF_TOKEN)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"The Hub's {hub_id} has no revision {revision}.") from error
    except (OSError, ValueError) as error:  # the Hub's client raises these if there is no network
        raise CheckpointError(
            f"There is no directory {hub_id}, no earlier download of it, and the Hub cannot be reached. "
            "Use a local directory, or connect to the network and unset HF_HUB_OFFLINE."
        ) from error


def find_weights(directory: Path, load_format: str = "auto") -> WeightFiles:
    """Return the weight files of a local checkpoint; `load_format` is "auto", "safetensors", "pt" or "npcache".

    If the checkpoint has an index, the index lists the weight files. Otherwise all weight files are used except
    `consolidated*` and training state. Raises CheckpointError if there are no weight files.
    """
    if load_format in ("auto", "safetensors"):
        files = _indexed(directory, SAFETENSORS_INDEX) or _matching(directory, "*.safetensors")
        if files:
            return WeightFiles("safetensors", files)
    if load_format in ("auto", "pt", "npcache"):
        files = _indexed(directory, TORCH_INDEX) or _matching(directory, "*.bin") or _matching(directory, "*.pt")
        if files:
            return WeightFiles("npcache" if load_format == "npcache" else "pt", files)
    torch_files = "*.bin or *.pt"
    kinds = {"safetensors": "*.safetensors", "pt": torch_files, "npcache": torch_files}.get(
        load_format, f"*.safetensors, {torch_files}"
    )
    raise CheckpointError(f"{directory} contains no weights: it has no {kinds} file.")


def delete(path: str) -> None:
    """Delete a local checkpoint: its weights, its configuration and, if nothing else is left in it, its folder.

    Raises OSError if a file cannot be deleted.
    """
    root = Path(path)
    if root.is_file():  # a GGUF file, which may be the first of a split file
        stem = re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", root.name)
        parts = [file for file in root.parent.glob("*.gguf") if file.name.startswith(f"{stem}-") or file == root]
        for file in parts:
            file.unlink()
        return
    for file in {file for pattern in (*DESCRIPTIONS, *WEIGHTS) for file in root.glob(pattern)}:
        file.unlink()
    shutil.rmtree(root / NUMPY_FOLDER, ignore_errors=True)
    if not any(root.iterdir()):
        root.rmdir()


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return names, dtypes, shapes and offsets of the tensors in a safetensors file.

    Raises CheckpointError if the file is damaged or cannot be opened.
    """
    try:
        stream = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    with stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is not a safetensors file.{lfs_hint(file)}")
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
        raise CheckpointError(f"{file} is cut off: it has {file.stat().st_size} of {expected} bytes.")
    return entries


def lfs_hint(file: Path) -> str:
    """Return a sentence for the error message if the file is a git-lfs pointer; else ""."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return ""
    return " It is a git-lfs pointer. Run `git lfs pull` in its folder to download the file." * is_pointer


def _check_entries(file: Path, entries: Mapping[str, StoredTensor], begin: int) -> None:
    """Raise CheckpointError unless the tensors' sizes match their shapes and the tensors are contiguous."""
    for name, entry in entries.items():
        sizes = [*entry.shape, entry.begin, entry.end]
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
            raise CheckpointError(f"{file} has a damaged header: {name} has an invalid shape or offset.")
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if not isinstance(entry.dtype, str) or entry.dtype not in _DTYPE_BITS:
            raise CheckpointError(f"{file}: {name} has the dtype {entry.dtype}, which is not supported.")
        num_bytes = -(-math.prod(entry.shape) * _DTYPE_BITS[entry.dtype] // 8)
        if entry.end - entry.begin != num_bytes:
            raise CheckpointError(
                f"{file} has a damaged header: {name} ({entry.dtype}, {'x'.join(map(str, entry.shape)) or 'a scalar'}) "
                f"needs {num_bytes} bytes and has {entry.end - entry.begin}."
            )
        if entry.begin != begin:
            problem = "overlaps the tensor before it" if entry.begin < begin else "leaves a gap before it"
            raise CheckpointError(f"{file} has a damaged header: {name} {problem}.")
        begin = entry.end


def weight_bytes(directory: Path) -> int:
    """Return the size of all tensors of a checkpoint in bytes; 0 if it has no weight files."""
    if directory.is_file():
        return directory.stat().st_size
    try:
        weights = find_weights(directory)
    except CheckpointError:
        return 0  # with --load-format dummy, a checkpoint without weights is valid
    if weights.format == "pt":
        return sum(file.stat().st_size for file in weights.files)
    return sum(entry.end - entry.begin for file in weights.files for entry in read_header(file).values())


def tensor_names(path: str) -> frozenset[str] | None:
    """Return the names of all tensors of a checkpoint, or None if only torch can read them (format "pt")."""
    weights = find_weights(Path(path))
    if weights.format != "safetensors":
        return None
    return frozenset(name for file in weights.files for name in read_header(file))


def stored_dtype(directory: Path) -> str | None:
    """Return the dtype of the first floating-point tensor, or None if no safetensors file has one."""
    for file in _matching(directory, "*.safetensors"):
        for entry in read_header(file).values():
            if entry.dtype in _DTYPE_NAMES:
                return _DTYPE_NAMES[entry.dtype]
    return None


def _matching(directory: Path, pattern: str) -> tuple[Path, ...]:
    skipped = ("consolidated", "training_args", "optimizer", "scheduler", "scaler")
    return tuple(sorted(file for file in directory.glob(pattern) if not file.name.startswith(skipped)))


def _indexed(directory: Path, name: str) -> tuple[Path, ...]:
    """Return the weight files that the index lists; () if there is no index."""
    if not (directory / name).is_file():
        return ()
    try:
        index: Mapping[str, Any] = json.loads((directory / name).read_text(encoding="utf-8"))
        files = sorted({directory / Path(file).name for file in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / name} cannot be read.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing[:20])}, which {name} lists.")
    return tuple(files)

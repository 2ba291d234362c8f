"""Checkpoints of torch.distributed.checkpoint, the form that TorchRec models are saved in: read and written.

The file `.metadata` of such a checkpoint is a pickle, which could run anything. It is read here by an unpickler that
knows the few classes torch writes into it, and refuses all others by name.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from freescale.errors import CheckpointError, DamagedCheckpointError

_METADATA = ".metadata"
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}


class _KnownClasses(pickle.Unpickler):
    """Makes objects of the classes above, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no business in it")


class CheckpointReader(FileSystemReader):
    """Reads a folder that torch.distributed.checkpoint has written, without running anything it holds."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds.

        Raises:
            CheckpointError: there is none, or it holds what no such checkpoint does.
        """
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint holds: names, shapes and files."""
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            found = _KnownClasses(file).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"this is no checkpoint of torch.distributed.checkpoint: it has no {_METADATA}",
            got=folder,
            next_step="give the folder that `torch.distributed.checkpoint.save` wrote",
        ) from None
    except Exception as error:  # a pickle that is cut off or made up fails in many ways
        raise DamagedCheckpointError(
            f"{path} cannot be read as a list of tensors",
            got=f"{type(error).__name__}: {error}",
            next_step="save the checkpoint again; a file that was made to run code is refused, too",
        ) from error
    if not isinstance(found, Metadata):
        raise DamagedCheckpointError(f"{path} is no list of tensors", got=type(found).__name__)
    return found


def tensors_in(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and types of all tensors of a checkpoint, by name."""
    entries = read_metadata(folder).state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def load_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors by name; DTensors of a group get their part, however many ranks have written it."""
    load(dict(tensors), storage_reader=CheckpointReader(folder), process_group=group, no_dist=group is None)


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors by name into a new folder; every rank of the group must call it with its parts."""
    first = group is None or dist.get_rank(group) == 0
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(
            "the folder is not empty", got=folder, next_step="choose another one, or remove it"
        )
    staged = folder.with_name(f"{folder.name}.tmp")
    if first:
        shutil.rmtree(staged, ignore_errors=True)
        staged.parent.mkdir(parents=True, exist_ok=True)
    if group is not None:
        dist.barrier(group)
    writer = FileSystemWriter(staged)
    save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    if first:
        if folder.exists():
            folder.rmdir()
        staged.rename(folder)
    if group is not None:
        dist.barrier(group)

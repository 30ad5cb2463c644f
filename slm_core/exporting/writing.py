"""The converter to GGUF."""

from __future__ import annotations

import shutil
from pathlib import Path

from slm_core.errors import InvalidOption
from slm_core.exporting.directory import ExportedDirectory
from slm_core.types import Progress


def write_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write a directory of a Hugging Face model as a GGUF file, with the weights' own types.

    Args:
        source: the directory.
        target: the new file; it appears when it is complete.
        progress: called with the share that is done, 0.0 to 1.0.

    Raises:
        InvalidOption: the source is not a directory, or the target exists or has no room.
        InvalidModelFile, UnsupportedModel: the directory is damaged, or cannot be expressed as GGUF.
    """
    if not source.is_dir():
        raise InvalidOption(f"{source}: not a directory (slm quantize writes GGUF files of GGUF files)")
    if target.exists():
        raise InvalidOption(f"{target}: there is a file already")
    if not target.parent.is_dir():
        raise InvalidOption(f"{target}: there is no folder {target.parent}")
    with ExportedDirectory(source) as directory:
        writer = directory.writer()
        free = shutil.disk_usage(target.parent).free
        if writer.size_bytes > free:
            needed = f"{writer.size_bytes / 1e6:,.0f} MB are needed, and {free / 1e6:,.0f} MB free in its folder"
            raise InvalidOption(f"{target}: {needed}")
        done, total = 0, max(1, sum(info.n_bytes for info in directory.tensors.values()))
        with writer.open(target) as sink:
            for info in directory.tensors.values():
                sink.write(directory.tensor_data(info.name))
                done += info.n_bytes
                progress(done / total)

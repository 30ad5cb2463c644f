"""A backend for the suite whose models are directories: it converts GGUF files before it loads them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from slm_core.gguf import GgufFile
from slm_core.types import ModelOptions, ModelSource, SourceKind, Support
from slm_onnx.backend import OnnxBackend
from slm_onnx.model import OnnxModel

_KEPT: list[
    tempfile.TemporaryDirectory[str]
] = []  # kept until the process ends, because chat templates are read lazily


class DirectoryBackend(OnnxBackend):
    """ONNX Runtime on converted directories."""

    source_kinds = frozenset({SourceKind.FILE, SourceKind.DIRECTORY})

    def supports(self, source: ModelSource, device: str = "auto") -> Support:
        """Supports the files that the converter supports."""
        if isinstance(source, Path) and source.is_file():
            with GgufFile.open(source) as gguf:
                architecture = gguf.require("general.architecture", str)
            if architecture not in ("llama", "qwen2", "qwen3"):
                return Support(False, f"architecture {architecture!r} is not converted")
        return super().supports(source, device)

    def load(self, source: Path, options: ModelOptions) -> OnnxModel:
        """Convert the file and load the directory."""
        from slm_onnx.convert import convert

        if source.is_dir():
            return super().load(source, options)
        _KEPT.append(tempfile.TemporaryDirectory())
        folder = Path(_KEPT[-1].name) / "model"
        progress = options.progress or (lambda share: None)
        convert(source, folder, lambda share: progress(share / 2))
        heard = replace(options, progress=lambda share: progress(0.5 + share / 2))
        return super().load(folder, heard)

"""Writes directories of Hugging Face models as GGUF files, with their vocabularies and chat templates."""

from slm_core.exporting.directory import ExportedDirectory, open_gguf
from slm_core.exporting.writing import write_gguf

__all__ = ["ExportedDirectory", "open_gguf", "write_gguf"]

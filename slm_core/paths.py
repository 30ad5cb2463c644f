"""Paths of models, and hints for the usual mistakes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slm_core.errors import InvalidModelFile, InvalidOption, ModelFileNotFound
from slm_core.hub import fetch, is_reference
from slm_core.tensor_source import TENSOR_SOURCE_MEMBERS, TensorSource
from slm_core.types import ModelSource
from slm_core.user_paths import exists, expanded, text_of

_URL = re.compile(
    r"https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(?:/(?:blob|resolve|tree)/(?P<revision>[^/]+)(?:/(?P<file>.+\.gguf))?)?/?(?:\?.*)?",
    re.ASCII,
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?", re.ASCII)
_MAIN = "main"


def source_of(model: str | os.PathLike[str] | bytes | TensorSource) -> ModelSource:
    """The source of a model that a caller gave; a path is made ``local``.

    Raises:
        InvalidOption: an object of another kind; the message names the missing members.
        InvalidModelFile, ModelFileNotFound, UnsupportedModel: see ``local``.
    """
    if isinstance(model, bytes):
        return model
    if isinstance(model, str | os.PathLike):
        return local(model)
    lacking = [name for name in TENSOR_SOURCE_MEMBERS if not _has_member(model, name)]
    if lacking:
        raise InvalidOption(
            f"{type(model).__name__} is not a source of a model: it has no"
            f" {', '.join(lacking)} (accepted: a path, bytes,"
            " or an object with the members of slm.TensorSource)"
        )
    return model


def _has_member(source: object, name: str) -> bool:
    """Whether an object of the caller's has a member; an error in a property is reported when the source is read."""
    try:
        getattr(source, name)
    except AttributeError:
        return False
    except Exception:
        return True
    return True


def local(path: str | os.PathLike[str]) -> Path:
    """The local path of a model; a reference to the Hub (``hf://user/repo:Q4_K_M``) is downloaded, see ``hub``.

    Raises:
        InvalidModelFile: the model cannot be downloaded, or the path cannot be a model's; the message says what can.
        ModelFileNotFound: there is nothing, and the path cannot be a model's.
        UnsupportedModel: see ``hub.fetch``.
    """
    text = os.fspath(path)
    if is_reference(text):
        return fetch(text)
    with _reported(text):
        file = expanded(text)
    hint = _hint(text, file)
    if hint:
        kind = InvalidModelFile if exists(file) else ModelFileNotFound
        raise kind(f"{text}: {hint}")
    return model_file(text)


def model_file(path: str | os.PathLike[str]) -> Path:
    """The path of a model's or adapter's file or directory, with ``expanded``; there may be nothing.

    Raises:
        InvalidOption: the value is no path.
        InvalidModelFile: no file can have this path, or the system refuses to look at it.
        ModelFileNotFound: the path begins with an unknown user.
    """
    with _reported(text_of(path)):
        file = expanded(path)
        with suppress(FileNotFoundError, NotADirectoryError):
            file.stat()
        return file


@contextmanager
def _reported(text: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ModelFileNotFound(f"{text}: {error.strerror}") from None
    except OSError as error:
        raise InvalidModelFile(f"{text}: cannot be read: {error.strerror}") from None


def _hint(text: str, path: Path) -> str:
    """The source to use instead of a path that no model can have; "" for any other path."""
    if re.match(r"https?:/", text):
        match = _URL.fullmatch(text)
        if match is None:
            return "a URL; download the file, and give its path"
        revision = "" if match["revision"] in (None, _MAIN) else f"@{match['revision']}"
        file = "" if match["file"] is None else f"/{match['file']}"
        return f"a URL; give the reference hf://{match['repo']}{revision}{file}"
    if path.suffix == ".safetensors":
        return f"weights only; give the directory {path.parent}, with its config.json and tokenizer"
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf") and not exists(path.parent):
        return f"no such file; for the model of the Hugging Face Hub give hf://{text}"
    return ""

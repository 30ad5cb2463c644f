"""Models of the Hugging Face Hub by reference: ``huggingface_hub`` downloads them, or finds them in its cache.

``hf://user/repo:Q4_K_M`` is the GGUF file of that type, ``hf://user/repo/folder/file.gguf`` a file by its name, and
``hf://user/repo`` the only GGUF file, the one of type Q4_K_M among several, or the directory of a repository without
any. ``hf://user/repo@revision`` names a branch, tag or commit. ``HF_HOME``, ``HF_HUB_CACHE``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` have the same meaning as in that library. If the Hub does not list the files within 3 seconds
(``HF_HUB_ETAG_TIMEOUT`` sets another time), only the cache is used.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_core.errors import InvalidModelFile, UnsupportedModel

INSTALL_HINT = 'pip install "slm-core[hub]"'
_REFERENCE = re.compile(
    r"hf:/{1,2}(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[^:/]+))?(:(?P<kind>[\w.-]+)|/(?P<file>.+\.gguf))?", re.ASCII
)
_SHARD = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)")
_OTHER_PARTS = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_DIRECTORY = ("*.json", "*.jinja", "*.safetensors", "rwkv_vocab_v20230424.txt")
_DEFAULT = "Q4_K_M"
_TIMEOUT_S = 3.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reference:
    """A model of the Hub.

    Attributes:
        text: the text of the reference.
        repo: "user/name".
        revision: a branch, tag or commit; None for the main branch.
        kind: the weight type at the end of the file's name, or None.
        file: the file, or None.
    """

    text: str
    repo: str
    revision: str | None
    kind: str | None
    file: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse a reference.

        Raises:
            InvalidModelFile: the text is not a reference.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in text:
            raise InvalidModelFile(
                f"{text[:200]!r} is not a reference to the Hub (accepted: hf://user/repo, hf://user/repo:TYPE,"
                " hf://user/repo/file.gguf, each with @revision behind the repository)"
            )
        return cls(text, match["repo"], match["revision"], match["kind"], match["file"])


def is_reference(text: str) -> bool:
    """Whether a text names a model of the Hub; a path object may have replaced two slashes by one."""
    return text.startswith("hf:/")


def fetch(text: str) -> Path:
    """The local file or directory of a reference; missing files are downloaded.

    Raises:
        InvalidModelFile: the text is not a reference, or the model cannot be downloaded.
        UnsupportedModel: ``huggingface_hub`` is not installed, or the repository has no such model.
    """
    ref = Reference.parse(text)
    huggingface_hub = library(text)
    failures: tuple[type[Exception], ...] = (ValueError, *_failures(huggingface_hub))
    try:
        listed, reached = _listed(huggingface_hub, ref)
        files = choose(ref, listed)
        patterns = list(files) if files else list(_DIRECTORY)
        folder = Path(
            huggingface_hub.snapshot_download(
                ref.repo, revision=ref.revision, allow_patterns=patterns, local_files_only=not reached
            )
        )
    except failures as error:
        raise InvalidModelFile(f"{text} could not be fetched: {_one_line(error)}") from error
    path = folder / files[0] if files else folder
    if not path.exists():
        raise InvalidModelFile(
            f"{text}: {path.name} is not in the cache ({folder}), and {_offline_reason(huggingface_hub)}"
        )
    return path


def library(what: str) -> Any:
    """The module ``huggingface_hub``.

    Args:
        what: begins the error's message.

    Raises:
        UnsupportedModel: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise UnsupportedModel(
            f"{what}: huggingface_hub, which fetches models, is not installed: {INSTALL_HINT}"
        ) from error
    return huggingface_hub


def choose(ref: Reference, files: Sequence[str]) -> list[str]:
    """The files of a reference, the first shard first; [] for the directory.

    Args:
        ref: the reference.
        files: names of all files of the repository.

    Raises:
        UnsupportedModel: there is no such model, or several models match.
    """
    models = models_of(files)
    if ref.file is not None:
        name = _SHARD.sub("", ref.file)
        if name not in models or ref.file not in models[name]:
            raise UnsupportedModel(f"{ref.text}: there is no such file ({_available(models)})")
        return models[name]
    if ref.kind is None and not models:
        if "config.json" not in files:
            raise UnsupportedModel(f"{ref.text}: the repository has neither GGUF files nor a config.json")
        return []
    if ref.kind is None and len(models) == 1:
        return next(iter(models.values()))
    kind = ref.kind or _DEFAULT
    matching = [name for name in models if _is_of_kind(name, kind)]
    if len(matching) != 1:
        what = f"no GGUF file of type {kind}" if not matching else f"{len(matching)} GGUF files of type {kind}"
        raise UnsupportedModel(f"{ref.text}: the repository has {what} ({_available(models)})")
    return models[matching[0]]


def models_of(files: Sequence[str]) -> dict[str, list[str]]:
    """The GGUF files of each model, by the name without the shard's number."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not _OTHER_PARTS.search(file):
            models.setdefault(_SHARD.sub("", file), []).append(file)
    return models


def _is_of_kind(name: str, kind: str) -> bool:
    """Whether the name of a file, or of its folder, has a weight type."""
    return re.search(rf"(^|[-./]){re.escape(kind)}(\.gguf$|/[^/]+$)", name, re.IGNORECASE) is not None


def _available(models: dict[str, list[str]]) -> str:
    names = list(models)
    more = f", and {len(names) - 20} more" if len(names) > 20 else ""
    return f"there are: {', '.join(names[:20])}{more}" if names else "there are none"


def _listed(hub: Any, reference: Reference) -> tuple[list[str], bool]:
    """The names of the repository's files, and True; of the cached files, and False, if the Hub cannot be reached."""
    if not hub.constants.HF_HUB_OFFLINE:
        timeout_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _TIMEOUT_S)

        def ask() -> list[str]:
            info = hub.HfApi().model_info(reference.repo, revision=reference.revision, timeout=timeout_s)
            return [file.rfilename for file in info.siblings or ()]

        try:
            return _with_timeout(timeout_s, ask), True
        except hub.errors.HfHubHTTPError:  # the Hub answered: there is no such repository, or no permission to read it
            raise
        except _failures(hub) as error:
            _log.warning("%s: the Hub cannot be reached (%s): looking in the cache", reference.text, _one_line(error))
    folder = cached_folder(hub, reference)
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()], False


def _with_timeout(seconds: float, ask: Callable[[], list[str]]) -> list[str]:
    """The result of ``ask``, which runs in a thread: looking up a name in the DNS has no timeout.

    Raises:
        TimeoutError: it took longer.
    """
    results: list[list[str]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(ask())
        except Exception as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="slm-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


def _failures(hub: Any) -> tuple[type[Exception], ...]:
    """The library's exceptions for connections: ``OSError``, and httpx's errors if it uses httpx."""
    return (OSError, *hub.errors.HfHubHTTPError.__bases__)


def _offline_reason(hub: Any) -> str:
    """The reason why only the cache was searched."""
    return "the Hub is not asked offline" if hub.constants.HF_HUB_OFFLINE else "the Hub cannot be reached"


def cached_folder(hub: Any, reference: Reference) -> Path:
    """The folder of the cache that holds a revision, laid out as the library documents it.

    Raises:
        InvalidModelFile: the revision is not in the cache.
    """
    home = Path(hub.constants.HF_HUB_CACHE) / f"models--{reference.repo.replace('/', '--')}"
    revision = reference.revision or "main"
    named = home / "refs" / revision
    commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    folder = home / "snapshots" / commit
    if not folder.is_dir():
        raise InvalidModelFile(f"{reference.text}: not in the cache ({home}), and {_offline_reason(hub)}")
    return folder


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

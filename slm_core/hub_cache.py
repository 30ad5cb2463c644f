"""The models in the cache of ``huggingface_hub``: listing and removing them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.hub import Reference, choose, library, models_of

_KIND = re.compile(
    r"(?:^|[-./])((?:I?Q|TQ|MXFP|NVFP)\d\w*|B?F16|F32)(?:(?:-\d{5}-of-\d{5})?\.gguf$|/[^/]+$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache.

    Attributes:
        reference: the reference for ``slm.load``: "hf://user/repo:Q8_0".
        path: the GGUF file (the first shard), or the directory.
        kind: the weight type in the name of the file, "GGUF" without one, or "directory".
        n_bytes: bytes of its files.
        last_used: when a file was last read, in seconds since 1970.
        repo: "user/name".
        revisions: the commit, and the branches and tags that name it.
        files: its files, all of the revision for a directory.
    """

    reference: str
    path: Path
    kind: str
    n_bytes: int
    last_used: float
    repo: str
    revisions: tuple[str, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class CachedModels:
    """The models in the cache.

    Attributes:
        folder: the folder of the cache.
        models: the models, sorted by reference.
        unreadable: for each damaged repository in the cache, its error.
    """

    folder: Path
    models: tuple[CachedModel, ...]
    unreadable: tuple[str, ...]

    def find(self, text: str) -> CachedModel:
        """The model of a reference.

        Raises:
            InvalidModelFile: the text is not a reference, or its revision is not in the cache.
            UnsupportedModel: the revision has no such model, or several.
        """
        ref = Reference.parse(text)
        revision = ref.revision or "main"
        models = [model for model in self.models if model.repo == ref.repo and revision in model.revisions]
        if not models:
            raise InvalidModelFile(f"{text}: not in the cache, {self.folder} (slm list shows the models in it)")
        by_name = {_name(model, file): model for model in models for file in model.files}
        names = choose(ref, sorted(by_name))
        return by_name[names[0]] if names else models[0]


def cached_models() -> CachedModels:
    """The models in the cache.

    Raises:
        UnsupportedModel: ``huggingface_hub`` is not installed.
        OSError: the cache cannot be read.
    """
    hub = library("the cache of the Hub")
    folder = Path(hub.constants.HF_HUB_CACHE)
    if not folder.is_dir():
        return CachedModels(folder, (), ())
    info = hub.scan_cache_dir(folder)
    models = [
        model
        for repo in info.repos
        if repo.repo_type == "model"
        for revision in repo.revisions
        for model in _models(repo.repo_id, revision)
    ]
    unreadable = tuple(" ".join(str(warning).split()) for warning in info.warnings)
    return CachedModels(folder, tuple(sorted(models, key=lambda model: model.reference)), unreadable)


def remove(model: CachedModel) -> int:
    """Remove a model from the cache; returns the freed bytes. Files that another model or revision uses stay.

    Raises:
        OSError: a file could not be removed.
    """
    hub = library("the cache of the Hub")
    folder = Path(hub.constants.HF_HUB_CACHE)
    info, commit = hub.scan_cache_dir(folder), model.revisions[0]
    others = [each for each in cached_models().models if each.revisions[0] == commit and each.path != model.path]
    freed = _remove_files(info, model) if others else _remove_revision(info, commit)
    left = [path for path in model.files if path.exists()]
    if left:
        raise OSError(f"{left[0]} could not be removed")
    return freed


def _remove_revision(info: Any, revision: str) -> int:
    return _executed(info.delete_revisions(revision))


def _remove_files(info: Any, model: CachedModel) -> int:
    """Remove some files of a revision, and their blobs if no other file of the cache is a link to them."""
    cached = [file for repo in info.repos for revision in repo.revisions for file in revision.files]
    selected = [file for file in cached if file.file_path in model.files]
    if hasattr(info, "delete_files"):  # newer versions of the library
        return _executed(info.delete_files(*selected))
    others = {file.blob_path for file in cached if file.file_path not in model.files}
    blobs = {file.blob_path: file.size_on_disk for file in selected if file.blob_path not in others}
    for file in selected:
        file.file_path.unlink()
    for blob in blobs:
        blob.unlink(missing_ok=True)  # a copy in place of a link is gone already
    return sum(blobs.values())


def _executed(strategy: Any) -> int:
    """Remove the files that a strategy of the library lists; returns the freed bytes."""
    strategy.execute()
    return int(strategy.expected_freed_size)


def _models(repo: str, revision: Any) -> Iterable[CachedModel]:
    """The models of a revision: its GGUF files, or its directory if there are none."""
    base = f"hf://{repo}{_revision_suffix(revision)}"
    if not _is_valid(base):  # a repository without a user: slm cannot name it
        return
    by_name = {file.file_path.relative_to(revision.snapshot_path).as_posix(): file for file in revision.files}
    models = models_of(list(by_name))
    for names in models.values():
        reference, kind = _named(base, names, list(by_name))
        files = [by_name[name] for name in names]
        yield _model(reference, files[0].file_path, kind, repo, revision, files)
    if not models and "config.json" in by_name:
        yield _model(base, revision.snapshot_path, "directory", repo, revision, list(by_name.values()))


def _model(reference: str, path: Path, kind: str, repo: str, revision: Any, files: Sequence[Any]) -> CachedModel:
    n_bytes = sum({file.blob_path: file.size_on_disk for file in files}.values())
    last_used = max(file.blob_last_accessed for file in files)
    revisions = (revision.commit_hash, *sorted(revision.refs))
    return CachedModel(
        reference, path, kind, n_bytes, last_used, repo, revisions, tuple(file.file_path for file in files)
    )


def _named(base: str, names: Sequence[str], files: Sequence[str]) -> tuple[str, str]:
    """The reference and the kind of a GGUF file: by its type if only this file has it, or by its name."""
    match = _KIND.search(names[0])
    if match is None:
        return f"{base}/{names[0]}", "GGUF"
    kind = match[1].upper()
    try:
        choose(Reference.parse(f"{base}:{kind}"), files)
    except UnsupportedModel:  # several files have this type
        return f"{base}/{names[0]}", kind
    return f"{base}:{kind}", kind


def _is_valid(reference: str) -> bool:
    try:
        Reference.parse(reference)
    except InvalidModelFile:
        return False
    return True


def _revision_suffix(revision: Any) -> str:
    if "main" in revision.refs:
        return ""
    usable = sorted(ref for ref in revision.refs if "/" not in ref and ":" not in ref)
    return f"@{usable[0] if usable else revision.commit_hash}"


def _name(model: CachedModel, file: Path) -> str:
    """The name of a file in its repository."""
    parts = file.parts
    return "/".join(parts[parts.index(model.revisions[0]) + 1 :])

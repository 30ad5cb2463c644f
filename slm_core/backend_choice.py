"""Chooses a backend for a model: by name, by rank, by the capabilities of its contexts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from slm_core.argument_checks import checked_list, refused
from slm_core.errors import InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.foreign import class_and_message
from slm_core.gguf.cursor import is_checkpoint
from slm_core.hints import did_you_mean
from slm_core.plugins import Registry
from slm_core.protocols import Backend, BackendModel, Context
from slm_core.types import Capability, ContextOptions, EditLevel, ModelSource, SourceKind, Support

BACKEND_VARIABLE = "SLM_BACKEND"
_BACKENDS = "the name of a backend, names, or None"
_KINDS = {
    SourceKind.FILE: "a file",
    SourceKind.DIRECTORY: "a directory",
    SourceKind.BYTES: "bytes",
    SourceKind.TENSORS: "an object with tensors",
}
_SMALL = ContextOptions(n_ctx=32, n_seq_max=1, n_batch=32)

Candidate: TypeAlias = tuple[str, str]
"""The name of a backend, and why it was chosen."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The capabilities and the edit level that contexts of a model have to declare.

    Attributes:
        capabilities: the capabilities.
        level: the lowest edit level.
    """

    capabilities: frozenset[Capability]
    level: EditLevel

    @classmethod
    def of(cls, require: Collection[Capability | EditLevel | str]) -> Needs:
        """Read capabilities and edit levels, or their names.

        Raises:
            InvalidOption: an unknown name.
        """
        if isinstance(require, str) or not isinstance(require, Collection):
            raise InvalidOption(f"require={require!r} (accepted: a set of capabilities and edit levels)")
        levels = {level.name.lower(): level for level in EditLevel}
        capabilities, level = set(), EditLevel.REPLAY
        for each in require:
            name = each.name.lower() if isinstance(each, EditLevel) else each
            if name in levels:
                level = max(level, levels[name])
            elif name in set(Capability):
                capabilities.add(Capability(name))
            else:
                names = [*Capability, *levels]
                raise InvalidOption(
                    f"require={each!r} (accepted: {', '.join(names)}{did_you_mean(each, map(str, names))})"
                )
        return cls(frozenset(capabilities), level)

    def missing(self, context: Context) -> list[str]:
        """The names of the capabilities and the edit level that a context lacks."""
        lacks = sorted(self.capabilities - context.capabilities)
        return [*lacks, *([self.level.name.lower()] if context.edit_level < self.level else [])]


def candidates(
    plugins: Registry, source: ModelSource, backend: str | Sequence[str] | None, device: str
) -> list[Candidate]:
    """The backends to try, in order; a single name is not asked whether it can run the model.

    Raises:
        UnknownBackend: no plugin provides a named backend.
        InvalidOption: neither a name nor a list of names, or an empty list.
        UnsupportedModel: no backend can run the model.
        InvalidModelFile: the file is missing or damaged.
    """
    if backend is not None and not isinstance(backend, str):
        backend = checked_list("backend", backend, _BACKENDS)
        if not backend or not all(isinstance(name, str) for name in backend):
            raise refused("backend", backend, _BACKENDS)
    chosen = backend or os.environ.get(BACKEND_VARIABLE)
    if isinstance(chosen, str):
        return [(chosen, "named by the caller" if backend else f"named by {BACKEND_VARIABLE}")]
    answers = ranked(plugins, source, device) if chosen is None else _preferred(plugins, source, chosen, device)
    able = [(name, support.rank) for name, support in answers.items() if support.supported]
    refusals = [f"{name}: {support.reason}" for name, support in answers.items() if not support.supported]
    if not able:
        raise UnsupportedModel(
            f"no backend can run {_shown(source)} on device {device!r} ({'; '.join(refusals) or 'none is registered'})"
        )

    def why(name: str, rank: int) -> str:
        rivals = ", ".join(f"{other} {r}" for other, r in able if other != name)
        if chosen is not None:
            return "; ".join([f"number {list(chosen).index(name) + 1} of the caller's list", *refusals])
        first = f"ranked {rank} for this file and device"
        return "; ".join([f"{first} (others: {rivals})" if rivals else f"{first}, the only one that can", *refusals])

    return [(name, why(name, rank)) for name, rank in able]


def first_that_has(
    needs: Needs, tried: Sequence[Candidate], load: Callable[[str], BackendModel]
) -> tuple[BackendModel, str, str]:
    """Load the model on the first backend whose contexts have all needs.

    Returns:
        The model, the name of the backend, and why it was chosen.

    Raises:
        UnsupportedModel: no backend has all needs.
    """
    lacking: list[str] = []
    for name, reason in tried:
        with ExitStack() as closing:
            model = load(name)
            closing.callback(model.close)
            missing = _missing(needs, model)
            if not missing:
                closing.pop_all()
                return model, name, "; ".join([reason, *lacking])
            lacking.append(f"{name}: has no {', '.join(missing)}")
    raise UnsupportedModel(f"no backend has all required capabilities and the edit level ({'; '.join(lacking)})")


def ranked(plugins: Registry, source: ModelSource, device: str = "auto") -> dict[str, Support]:
    """Whether each backend can run a model, best first.

    Raises:
        InvalidModelFile: the file is missing or damaged.
    """
    answers = _answers(plugins, plugins.backends, source, device)
    return dict(sorted(answers.items(), key=lambda item: (not item[1].supported, -item[1].rank)))


def kind_of(source: ModelSource) -> SourceKind:
    """The kind of a source."""
    if isinstance(source, Path):
        return SourceKind.DIRECTORY if source.is_dir() else SourceKind.FILE
    return SourceKind.BYTES if isinstance(source, bytes) else SourceKind.TENSORS


def refused_kind(engine: Backend, source: ModelSource) -> str | None:
    """Why a backend does not read sources of this kind, in one line; None if it declares the kind."""
    kind = kind_of(source)
    if kind in engine.source_kinds:
        return None
    is_convertible = isinstance(source, Path) and is_checkpoint(source)
    remedy = f" (slm convert {_shown(source)} model.gguf --to gguf writes a file)" if is_convertible else ""
    accepted = ", ".join(text for each, text in _KINDS.items() if each in engine.source_kinds)
    return f"{_shown(source)}: {_KINDS[kind]}, but {engine.name} reads {accepted}{remedy}"


def _preferred(plugins: Registry, source: ModelSource, names: Sequence[str], device: str) -> dict[str, Support]:
    """Whether each named backend can run a model, in the order of the names."""
    for name in names:
        if name not in plugins.backends:
            plugins.backend(name)  # raises, with a hint
    return _answers(plugins, names, source, device)


def _answers(plugins: Registry, names: Iterable[str], source: ModelSource, device: str) -> dict[str, Support]:
    """The answer of each backend. A file that is damaged for one may be the format of another."""
    answers: dict[str, Support] = {}
    damaged: InvalidModelFile | None = None
    for name in names:
        try:
            answers[name] = _answer(plugins, name, source, device)
        except InvalidModelFile as error:
            damaged = damaged or error
            answers[name] = Support(False, str(error))
    if damaged is not None and not any(answer.supported for answer in answers.values()):
        raise damaged
    return answers


def _answer(plugins: Registry, name: str, source: ModelSource, device: str) -> Support:
    """Whether a backend can run a model. One that fails or does not read directories answers no: others may run it.

    Raises:
        InvalidModelFile: the file is missing or damaged.
    """
    try:
        engine = plugins.backend(name)
        if (refusal := refused_kind(engine, source)) is not None:
            return Support(False, refusal)
        answer = engine.supports(source, device)
    except InvalidModelFile as error:
        if kind_of(source) is not SourceKind.DIRECTORY:
            raise
        return Support(False, str(error))
    except Exception as error:  # a third-party plugin may raise any exception
        return Support(False, class_and_message(error))
    return answer if isinstance(answer, Support) else Support(False, f"supports() returned {type(answer).__name__}")


def _missing(needs: Needs, model: BackendModel) -> list[str]:
    if needs == Needs.of(()):
        return []
    with model.new_context(_SMALL) as context:
        return needs.missing(context)


def _shown(source: ModelSource) -> str:
    if isinstance(source, Path):
        return str(source)
    return f"these {len(source)} bytes" if isinstance(source, bytes) else f"this {type(source).__name__}"

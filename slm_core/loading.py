"""``slm.load``: choose a backend for a file, and load the model."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slm_core.argument_checks import check_function, check_methods, check_text
from slm_core.backend_choice import Needs, candidates, first_that_has, ranked, refused_kind
from slm_core.errors import InvalidOption, TemplateError, UnsupportedModel
from slm_core.formatting import check_template, choose
from slm_core.formatting import source_of as template_source_of
from slm_core.isolation import Isolation, isolation_of, refuse_object
from slm_core.isolation import isolated as in_a_process
from slm_core.model import Model
from slm_core.paths import source_of
from slm_core.plugins import Registry, registry
from slm_core.protocols import BackendModel, Formatter, Vocab
from slm_core.tensor_source import TensorSource
from slm_core.types import (
    BackendStatus,
    Capability,
    EditLevel,
    ModelInfo,
    ModelOptions,
    Progress,
    Support,
)
from slm_core.vocabularies import vocab_for

if TYPE_CHECKING:
    pass


def load(
    path: str | os.PathLike[str] | bytes | TensorSource,
    *,
    backend: str | Sequence[str] | None = None,
    require: Collection[Capability | EditLevel | str] = (),
    device: str = "auto",
    n_threads: int | None = None,
    isolated: bool | Isolation = False,
    progress: Progress | None = None,
    formatter: str | Formatter | None = None,
    chat_template: str | None = None,
    tokenizer: str | os.PathLike[str] | Vocab | None = None,
    **backend_options: object,
) -> Model:
    """Load a model file, or a directory of a model.

    Args:
        path: a file, any shard of a sharded model, a directory, or a model of the Hugging Face Hub, such as
            "hf://user/repo:Q4_K_M". Bytes are the content of a GGUF file, not its name. A ``TensorSource`` is an object
            with the metadata and the tensors; slm-core never closes it, and the caller may close it after the model.
        backend: the name of a backend; or names in the order of preference, for the first that is installed, supports
            file and device, and has all of ``require``. None for the value of ``SLM_BACKEND``, or else for all
            backends, best first. ``info.reason`` says why.
        require: capabilities that contexts of the model need, such as ``Capability.KV_PAYLOAD`` or "kv_payload", or an
            edit level, such as ``EditLevel.CUT`` or "cut".
        device: "auto", "cpu", "cuda", ...; a missing device is an error.
        n_threads: CPU threads; None for one per physical core that this process may use.
        isolated: whether the backend runs in a process of its own, so that a crash raises ``BackendCrashed``; an
            ``Isolation`` sets its timeouts.
        progress: called with the share that is loaded, 0.0 to 1.0.
        formatter: a chat format, the name of a chat format ("chatml"), or the name of one of the model's additional
            templates ("tool_use"). None for the model's template, or for the chat format that its control tokens
            indicate; ``info`` shows which.
        chat_template: text of a jinja template that replaces the model's template.
        tokenizer: a vocabulary that replaces the vocabulary of the model, for models without one: a directory with
            ``tokenizer.json``, a ``tokenizer.json``, a GGUF file, or a vocabulary with the same number of tokens as the
            model. None for the vocabulary of the model.
        backend_options: options that the backend's ``load_options`` lists.

    Raises:
        InvalidModelFile, UnsupportedModel: the file or source is damaged, or no installed backend can run it.
        UnknownBackend, BackendUnavailable: the backend does not exist, or is not installed completely.
        BackendCrashed: ``isolated``, and the process ended or exceeded its timeout.
        UnknownOption, InvalidOption: an option that the backend does not have, or an invalid value, such as a
            ``tokenizer`` with another number of tokens than the model; an object that is not a source; a
            ``TensorSource`` together with ``isolated``.
        TemplateError: the template, or the named chat format, is missing or invalid.
    """
    if formatter is not None and chat_template is not None:
        raise InvalidOption("give a chat_template or a formatter, not both")
    check_template("chat_template", chat_template)
    check_text("device", device)
    check_function("progress", progress)
    if formatter is not None and not isinstance(formatter, str):
        check_methods("formatter", formatter, ("render", "parse", "stream_parser"), "a chat format, its name, or None")
    source = source_of(path)
    plugins = registry()
    isolation = isolation_of(isolated)
    if isolation is not None:
        refuse_object(source)
    needs = Needs.of(require)
    options = ModelOptions(device, n_threads, progress, backend_options)

    def load_on(name: str) -> BackendModel:
        engine = plugins.backend(name)
        if isolation is not None:
            engine = in_a_process(engine, plugins.backend_target(name), isolation)
        if (refusal := refused_kind(engine, source)) is not None:
            raise UnsupportedModel(refusal)
        return engine.load(source, options)

    model, name, reason = first_that_has(needs, candidates(plugins, source, backend, device), load_on)
    if isolation is not None:
        reason = f"{reason}; in its own process"
    try:
        vocab = model.vocab if tokenizer is None else vocab_for(tokenizer, model.info.n_vocab)
        chat_format, origin = _formatter(plugins, _Described(model.info, vocab), formatter, chat_template)
        return Model(model, chat_format, reason, origin, source, vocab, name)
    except BaseException:
        model.close()
        raise


def backends() -> list[BackendStatus]:
    """The status of every backend, with the reason if it is unavailable. Never raises."""
    return registry().statuses()


def supports(path: str | os.PathLike[str] | bytes | TensorSource, *, device: str = "auto") -> dict[str, Support]:
    """Which backends can run a model here, best first; reads only headers.

    Args:
        path: as for ``load``.
        device: as for ``load``.

    Returns:
        From the name of each backend to its answer: whether it can, its rank, and why.

    Raises:
        InvalidModelFile: the file is missing or damaged, or a source is damaged.
        InvalidOption: an object that is not a source, or a ``device`` that is not a text.
    """
    check_text("device", device)
    return ranked(registry(), source_of(path), device)


def demo_model_path() -> Path:
    """The small chat model that ships with the package."""
    return Path(str(importlib.resources.files("slm_core") / "data" / "demo.gguf"))


def demo_adapter_path() -> Path:
    """An adapter (LoRA) of the demo model that ships with the package: answers of a pirate."""
    return Path(str(importlib.resources.files("slm_core") / "data" / "demo-adapter.gguf"))


@dataclass(frozen=True, slots=True)
class _Described:
    """The properties of a model that decide its chat format."""

    info: ModelInfo
    vocab: Vocab


def _formatter(
    plugins: Registry, model: _Described, requested: str | Formatter | None, template: str | None
) -> tuple[Formatter | TemplateError, str]:
    """The chat format and its origin; if the model has none, the error to raise when a chat format is needed."""
    if requested is not None and not isinstance(requested, str):
        return requested, requested.name
    source, has_token = template_source_of(model)
    try:
        return choose(plugins, source, has_token, name=requested, template=template)
    except TemplateError as error:
        if requested is not None or template is not None:
            raise
        return error, f"none: {error}"

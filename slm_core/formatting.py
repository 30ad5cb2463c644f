"""``slm.formatter``: chooses the chat format.

The sources, in order: the caller's template; a format by name; the model's template, in its file or its directory; a
guess from the control tokens of the vocabulary, with a warning. Otherwise an error lists the available names.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from slm_core.errors import InvalidOption, TemplateError, VocabError
from slm_core.numerics import shown
from slm_core.paths import model_file
from slm_core.plugins import FormatterSource, Registry, registry
from slm_core.protocols import Formatter, Vocab
from slm_core.types import ModelInfo

_log = logging.getLogger(__name__)
_MAX_BYTES = 64 << 20
_CALLER_ORIGIN = "template of the caller"
HasToken: TypeAlias = Callable[[str], bool]
"""Whether a vocabulary has a token with this text."""


class Described(Protocol):
    """The properties of a model that a chat format needs; results of ``slm.load`` and models of backends have them."""

    @property
    def info(self) -> ModelInfo:
        """The model's properties."""
        ...

    @property
    def vocab(self) -> Vocab:
        """The vocabulary."""
        ...


def formatter(
    template: str | None = None,
    *,
    name: str | None = None,
    model: Described | str | os.PathLike[str] | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    now: datetime | None = None,
    parser: str | None = None,
    reasoning: tuple[str, str] | None = None,
) -> Formatter:
    """A chat format from a template, by name, or of a model.

    Args:
        template: text of a jinja template, in the dialect of transformers.
        name: a registered format, such as "chatml"; or one of the model's additional templates, such as "tool_use".
        model: a loaded model, a model file, or a directory with ``chat_template.jinja`` or ``tokenizer_config.json``.
            Its template is used if there is neither ``template`` nor ``name``; its tokens are always used.
        bos_token: text of the token that begins a sequence; None for the model's, or "".
        eos_token: text of the token that ends a sequence; None for the model's, or "".
        now: the time for templates; None for the real time.
        parser: the name of the answer format, such as "hermes"; None to detect it from the template.
        reasoning: the texts that open and close reasoning in answers, such as ``("<think>", "</think>")``; None to
            detect them from the template.

    Returns:
        The format. ``render`` converts messages to segments, whose joined texts are the prompt; ``parse`` parses
        answers.

    Raises:
        TemplateError: no source, contradictory arguments, an unknown name, or an invalid template.
        InvalidOption: the template is not a text.
        InvalidModelFile, UnsupportedModel: the model file is damaged, or has no vocabulary.
    """
    if template is not None and name is not None:
        raise TemplateError("give a template or the name of a chat format, not both")
    if template is None and name is None and model is None:
        raise TemplateError(f"give a template, a model or the name of a chat format ({_registered(registry())})")
    check_template("template", template)
    source, has_token = (FormatterSource(), _no_token) if model is None else source_of(model)
    arguments = {"bos_token": bos_token, "eos_token": eos_token, "now": now, "parser": parser, "reasoning": reasoning}
    source = replace(source, **{key: value for key, value in arguments.items() if value is not None})  # type: ignore[arg-type]
    return choose(registry(), source, has_token, name=name, template=template)[0]


def check_template(name: str, template: object) -> None:
    """Check the type of a caller's template.

    Raises:
        InvalidOption: it is neither a text nor None.
    """
    if template is not None and not isinstance(template, str):
        raise InvalidOption(f"{name}={shown(template)} (accepted: a text, or None)")


def choose(
    registered: Registry,
    source: FormatterSource,
    has_token: HasToken,
    *,
    name: str | None = None,
    template: str | None = None,
) -> tuple[Formatter, str]:
    """The chat format for a model, and its origin.

    Args:
        registered: the registered formats.
        source: the model's templates and tokens.
        has_token: whether the vocabulary has a token, for a guess.
        name: the name of a format, or of one of the model's additional templates.
        template: the caller's template.

    Raises:
        TemplateError: no source, an unknown name, or an invalid template.
    """
    if template is not None:
        source = replace(source, template=template, templates={}, origin=_CALLER_ORIGIN)
    elif name is not None:
        return _named(registered, source, name)
    elif source.template is None and not source.templates:
        return _guessed(registered, source, has_token)
    elif source.template is None and "tool_use" not in source.templates:
        only = ", ".join(sorted(source.templates))
        raise TemplateError(f"the model has no main chat template: name one of its others ({only})")
    formatter = registered.formatter("template", source)
    return formatter, formatter.name


def _named(registered: Registry, source: FormatterSource, name: str) -> tuple[Formatter, str]:
    if registered.has_formatter(name):
        formatter = registered.formatter(name, source)
    elif name in source.templates:
        origin = f"{source.origin} ({name!r})"
        variant = replace(source, template=source.templates[name], templates={}, origin=origin)
        formatter = registered.formatter("template", variant)
    else:
        template_names = f"; templates of the model: {', '.join(sorted(source.templates))}" if source.templates else ""
        raise TemplateError(f"unknown chat format {name!r} ({_registered(registered)}{template_names})")
    return formatter, formatter.name


def _guessed(registered: Registry, source: FormatterSource, has_token: HasToken) -> tuple[Formatter, str]:
    name = registered.guess_formatter(has_token)
    if name is None:
        raise TemplateError(
            f"the model has no chat template, and its vocabulary indicates none: name a"
            f" format ({_registered(registered)})"
        )
    _log.warning("the model has no chat template; its control tokens look like %r, which is used", name)
    return registered.formatter(name, source), f"{name} (guessed from the vocabulary: the model has no template)"


def source_of(model: Described | str | os.PathLike[str]) -> tuple[FormatterSource, HasToken]:
    """The templates and tokens of a model, a model file or a directory.

    Raises:
        TemplateError: a file of the directory is damaged.
        InvalidModelFile, UnsupportedModel: the model file is damaged, or has no vocabulary.
    """
    if not isinstance(model, (str, os.PathLike)):
        return _of_model(model.info, model.vocab)
    path = model_file(model)
    if path.is_dir():
        return _of_directory(path)
    from slm_core.gguf import GgufFile
    from slm_core.modelinfo import chat_template, further_templates
    from slm_core.tokenization import build_vocab

    with GgufFile.open(path) as file:
        return _with_vocab(FormatterSource(chat_template(file), templates=further_templates(file)), build_vocab(file))


def _of_model(info: ModelInfo, vocab: Vocab) -> tuple[FormatterSource, HasToken]:
    source = FormatterSource(info.chat_template, templates=info.chat_templates)
    if source.template is None and info.path.is_dir():
        source = _of_directory(info.path)[0]
    return _with_vocab(source, vocab)


def _with_vocab(source: FormatterSource, vocab: Vocab) -> tuple[FormatterSource, HasToken]:
    def text(token: int | None) -> str:
        return "" if token is None else vocab.token_bytes(token, special=True).decode("utf-8", "replace")

    def has_token(token_text: str) -> bool:
        try:
            return len(vocab.encode(token_text, add_special=False, parse_special=True)) == 1
        except VocabError:  # the model has no vocabulary
            return False

    return replace(source, bos_token=text(vocab.bos), eos_token=text(vocab.eos)), has_token


def directory_templates(folder: Path) -> tuple[dict[str, str], str]:
    """The chat templates of a directory by name ("default" for the main one), and the file that has them.

    As in transformers, template files take precedence over the configuration.

    Raises:
        TemplateError: a file is damaged.
    """
    if templates := _template_files(folder):
        return templates, "chat_template.jinja"
    return _configured_templates(_read_config(folder / "tokenizer_config.json")), "tokenizer_config.json"


def _of_directory(folder: Path) -> tuple[FormatterSource, HasToken]:
    config = _read_config(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an older directory: another file names the special tokens
        config |= _read_config(folder / "special_tokens_map.json")
    tokens = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
    texts = {key: text for key, text in tokens.items() if text is not None}
    templates, origin = directory_templates(folder)
    source = FormatterSource(
        template=templates.pop("default", None),
        bos_token=texts.pop("bos_token", ""),
        eos_token=texts.pop("eos_token", ""),
        templates=templates,
        tokens=texts,
        origin=origin,
    )
    added = config.get("added_tokens_decoder")
    token_texts = {_token_text(token) for token in added.values()} if isinstance(added, dict) else set()
    return source, token_texts.__contains__


def _template_files(folder: Path) -> dict[str, str]:
    main = folder / "chat_template.jinja"
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    default = {"default": _read(main)} if main.is_file() else {}
    return default | {path.stem: _read(path) for path in named}


def _configured_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """One template, or a list of named ones."""
    entry = config.get("chat_template")
    if entry is None or isinstance(entry, str):
        return {} if entry is None else {"default": entry}
    try:
        templates = {named["name"]: named["template"] for named in entry}
    except (TypeError, KeyError):
        templates = {None: None}
    if not all(isinstance(part, str) for pair in templates.items() for part in pair):
        raise TemplateError("chat_template in tokenizer_config.json is neither a text nor a list of named texts")
    return templates


def _token_text(token: object) -> str | None:
    """The text of a token, which a configuration stores as a text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TemplateError(f"{path} is not a JSON object")
    return config


def _read(path: Path) -> str:
    if path.stat().st_size > _MAX_BYTES:
        raise TemplateError(f"{path} has {path.stat().st_size} bytes (accepted: up to {_MAX_BYTES})")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path} is not UTF-8: {error}") from error


def _no_token(_: str) -> bool:
    return False


def _registered(registered: Registry) -> str:
    names = ", ".join(sorted(name for name in registered.formatters if name != "template"))
    return f"registered: {names or 'none'}"

"""Reads a ``config.json`` strictly: every key is read, declared neutral, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf.cursor import shown

MAX_PARTS = 4096
"""The largest number of layers or experts, far above any model: it limits the cost of hostile numbers."""

_MAX_SIZE = 2**31 - 1
_LARGEST = 1e30  # far above any real value, and arithmetic with it does not overflow

_NEUTRAL = """
_attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path _num_labels
_sliding_window_pattern architectures attention_dropout attn_dropout_p attn_implementation attn_pdrop auto_map
bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout decoder_start_token_id dtype embd_pdrop
embedding_dropout eos_token_id ep_plan forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout
hidden_dropout_prob id2label initializer_range is_decoder is_llama_config label2id max_window_layers model_type
num_labels output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type
quantization_config resid_pdrop residual_dropout return_dict router_aux_loss_coef router_jitter_noise sep_token_id
task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unk_token_id
unsloth_fixed unsloth_version use_bfloat16 use_cache use_mrope vocab_size
"""
_GENERATION = """
bad_words_ids begin_suppress_tokens cross_attention_hidden_size diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores pruned_heads remove_invalid_values
repetition_penalty return_dict_in_generate suppress_tokens temperature tf_legacy_loss tie_encoder_decoder top_k top_p
typical_p
"""
"""Keys that transformers 4 saved in every configuration, and in those of text models inside others."""
NEUTRAL = frozenset((_NEUTRAL + _GENERATION).split())
"""Keys without effect on the forward pass, or that are read elsewhere."""
_RENAMED = {"type": "rope_type"}


class Config:
    """The keys of a JSON object. A null counts as a missing key, except in ``is_null``.

    Args:
        source: the file, for messages.
        stated: its content.
        name: the prefix of a nested object's keys, with a dot at its end.
        is_partial: whether it was made for many families (``config_of``), so that unread keys are no error.
    """

    def __init__(self, source: Path, stated: Mapping[str, Any], name: str = "", *, is_partial: bool = False) -> None:
        self.source = source
        self._is_partial = is_partial
        self._stated = {key: value for key, value in stated.items() if value is not None}
        self._nulls = stated.keys() - self._stated.keys()
        self._name = name
        self._seen: set[str] = set()
        self._parts: dict[str, Config] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stated

    def is_null(self, name: str) -> bool:
        """Whether a key exists and is null."""
        return name in self._nulls

    def is_true(self, name: str) -> bool:
        """Whether a key is true. Its other values are not checked."""
        return self._stated.get(name) is True

    def says_no_more_than(self, other: Config) -> bool:
        """Whether every key is in ``other`` with the same value; "type" is an old name of "rope_type"."""
        return all(other._stated.get(_RENAMED.get(name, name)) == value for name, value in self._stated.items())

    def is_list(self, name: str) -> bool:
        """Whether a key that may have one or several values has a list."""
        return isinstance(self._stated.get(name), list)

    def size(self, name: str, default: int | None = None, largest: int = _MAX_SIZE) -> int:
        """An integer from 1 to ``largest``.

        Raises:
            UnsupportedModel: the key is missing and has no default.
            InvalidModelFile: the value is invalid.
        """
        return self._integer(name, default, 1, largest)

    def count(self, name: str, default: int | None = None) -> int:
        """An integer from 0; errors as for ``size``."""
        return self._integer(name, default, 0, _MAX_SIZE)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; errors as for ``size``."""
        value = self._get(name, default)
        if not _is_number(value):
            raise self._wrong(name, f"a number up to {_LARGEST}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A truth value; errors as for ``size``."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text; errors as for ``size``."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def items(self, name: str, kind: type[Any], n: int) -> list[Any] | None:
        """A list of ``n`` values of one type; None if it is missing.

        Raises:
            InvalidModelFile: it is something else.
        """
        values = self._get(name, [])
        if name not in self._stated:
            return None
        checks: dict[type, Callable[[object], bool]] = {float: _is_number, int: _is_integer}
        fits = checks.get(kind, lambda item: type(item) is kind)
        if not isinstance(values, list) or len(values) != n or not all(map(fits, values)):
            raise self._wrong(name, f"a list of {n}: {kind.__name__}")
        return [kind(item) for item in values]

    def integers(self, name: str) -> list[int]:
        """A list of integers; [] if it is missing.

        Raises:
            InvalidModelFile: it is something else.
        """
        values = self._get(name, [])
        if not isinstance(values, list) or not all(map(_is_integer, values)):
            raise self._wrong(name, f"a list of integers up to {_MAX_SIZE}")
        return values

    def strings(self, name: str) -> list[str]:
        """A list of texts; [] if it is missing.

        Raises:
            InvalidModelFile: it is something else.
        """
        values = self._get(name, [])
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise self._wrong(name, "a list of texts")
        return values

    def mapping(self, name: str) -> dict[str, Any]:
        """An object with any keys; {} if it is missing.

        Raises:
            InvalidModelFile: it is something else.
        """
        section = self._get(name, {})
        if not isinstance(section, dict):
            raise self._wrong(name, "an object")
        return section

    def part(self, name: str) -> Config:
        """A nested object; empty if it is missing.

        Raises:
            InvalidModelFile: it is something else.
        """
        if name not in self._parts:
            self._parts[name] = self.aside(name)
        return self._parts[name]

    def aside(self, name: str) -> Config:
        """A nested object whose unread keys are not refused."""
        return Config(self.source, self.mapping(name), f"{self._name}{name}.")

    def only(self, name: str, *accepted: object) -> None:
        """A key that may be missing, or have one of these values.

        Raises:
            UnsupportedModel: it has another.
        """
        self._seen.add(name)
        if name not in self._stated:
            return
        value = self._stated[name]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            spelled = ", ".join(map(_spelled, accepted)) or "null"
            raise UnsupportedModel(f"{self._told(name)}, which is not implemented (accepted: {spelled})")

    def neutral(self, *names: str) -> None:
        """Keys whose value has no effect here."""
        self._seen.update(names)

    def refuse_others(self) -> None:
        """Refuse every key that was neither read nor declared neutral: it could change results.

        Raises:
            UnsupportedModel: there is such a key.
        """
        for name in () if self._is_partial else self._stated:
            if name not in self._seen and name not in NEUTRAL:
                raise UnsupportedModel(
                    f"{self._told(name)}, which is unknown here, so results could be wrong (remove the key if it"
                    " changes nothing)"
                )
        for part in self._parts.values():
            part.refuse_others()

    def _integer(self, name: str, default: int | None, least: int, largest: int) -> int:
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= largest:
            raise self._wrong(name, f"an integer from {least} to {largest}")
        return value

    def _get(self, name: str, default: object) -> object:
        self._seen.add(name)
        if name in self._stated:
            return self._stated[name]
        if default is None:
            raise UnsupportedModel(f"{self.source}: {self._name + name!r} is missing")
        return default

    def _wrong(self, name: str, accepted: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self._told(name)} (accepted: {accepted})")

    def _told(self, name: str) -> str:
        return f"{self.source}: {shown(self._name + name)} is {_spelled(self._stated.get(name))}"


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number of at most ``_LARGEST``; an integer may be too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) <= _MAX_SIZE


def _spelled(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

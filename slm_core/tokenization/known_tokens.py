"""Roles of tokens with well-known texts, as in llama.cpp's llama_vocab::impl::load.

GGUF files seldom list all tokens that end an answer, and some mark control tokens as ordinary ones. Like llama.cpp,
this module recognizes them by their text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from slm_core.tokenization.kinds import TokenKind
from slm_core.types import InfillTokens

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[e~[",
)
# Fill-in-the-middle tokens: padding, repository and file separators end an answer, the others are only control tokens.
_FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Texts that have a role if the file has no token for the role.
_FIM_OTHERS = (
    (
        ("fim_pre", "prefix"),
        ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
    ),
    (
        ("fim_suf", "suffix"),
        ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
    ),
    (
        ("fim_mid", "middle"),
        ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
    ),
    (("fim_pre", "prefix"), ("<|code_prefix|>", "<|prefix|>")),
    (("fim_suf", "suffix"), ("<|code_suffix|>", "<|suffix|>")),
    (("fim_mid", "middle"), ("<|code_middle|>", "<|middle|>")),
)
_HARMONY_MARKUP = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class KnownTokens(NamedTuple):
    """Kinds of all tokens after correction, and the tokens with a role.

    Attributes:
        kinds: the corrected kind of each token.
        eog_ids: tokens that end an answer.
        shown_control: control tokens whose text is part of answers.
        infill: tokens for text with a gap; None without them.
    """

    kinds: bytes
    eog_ids: frozenset[int]
    shown_control: frozenset[int]
    infill: InfillTokens | None


def apply_known_texts(ids: Mapping[str, int], kinds: bytearray, special: Mapping[str, int]) -> KnownTokens:
    """Find the tokens that end an answer and correct the kinds of well-known tokens.

    Args:
        ids: id by spelling.
        kinds: kind of each token; changed in place.
        special: ids by role, from the file.
    """

    def first(texts: tuple[str, ...]) -> list[int]:
        return [ids[text] for text in texts if text in ids][:1]

    eog = {ids[text] for text in _ENDS if text in ids}
    control = set(eog)
    for role, texts in _FIM_ENDS.items():
        if role in special:
            eog.add(special[role])
        else:
            control.update(first(texts))
            eog.update(first(texts))
    for roles, texts in _FIM_OTHERS:
        if not any(role in special for role in roles):
            control.update(first(texts))
    for i in control:
        kinds[i] = TokenKind.CONTROL
    eog.update(special[role] for role in ("eos", "eot", "eom") if role in special)
    shown = {ids[text] for text in _HARMONY_MARKUP if text in ids}
    for i in shown:
        kinds[i] = TokenKind.CONTROL
    _except_harmony_end(ids, eog, shown)
    _except_plain_s(ids, eog, kinds)
    return KnownTokens(bytes(kinds), frozenset(eog), frozenset(shown), _infill_tokens(ids, special))


def _infill_tokens(ids: Mapping[str, int], special: Mapping[str, int]) -> InfillTokens | None:
    """The file's tokens for these roles, else the first tokens with a well-known text; the deprecated names win."""

    def token(roles: tuple[str, ...], texts: tuple[str, ...]) -> int | None:
        stated = [special[role] for role in roles if role in special]
        return next(iter([*stated, *(ids[text] for text in texts if text in ids)]), None)

    prefix, suffix, middle = (
        token((role, f"fim_{name}"), tuple(text for roles, texts in _FIM_OTHERS if role in roles for text in texts))
        for name, role in (("pre", "prefix"), ("suf", "suffix"), ("mid", "middle"))
    )
    file, repository = (token((role,), _FIM_ENDS[role]) for role in ("fim_sep", "fim_rep"))
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(prefix, suffix, middle, file, repository)


def _except_harmony_end(ids: Mapping[str, int], eog: set[int], shown: set[int]) -> None:
    """In gpt-oss and solar-open vocabularies ``<|end|>`` ends a message, not the answer, and is shown."""
    ends = {text for text in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>") if ids.get(text) in eog}
    calls = bool(ends & {"<|call|>", "<|calls|>"})
    if calls and ends & {"<|return|>", "<|flush|>"} and ids.get("<|end|>") in eog:
        eog.discard(ids["<|end|>"])
        shown.add(ids["<|end|>"])


def _except_plain_s(ids: Mapping[str, int], eog: set[int], kinds: bytearray) -> None:
    """In gemma-4 and plamo vocabularies ``</s>`` is an ordinary token."""
    if ids.get("</s>") in eog and any(ids.get(text) in eog for text in ("<|tool_response>", "<|plamo:eos|>")):
        eog.discard(ids["</s>"])
        kinds[ids["</s>"]] = TokenKind.NORMAL

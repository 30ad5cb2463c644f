"""Prompts with a gap, for models that are trained to fill it (Bavarian et al., arXiv:2207.14255)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slm_core.argument_checks import check_text, refused
from slm_core.errors import VocabError
from slm_core.protocols import Vocab


@dataclass(frozen=True, slots=True)
class Infill:
    """A text with a gap. The answer is the text of the gap.

    The tokens are in the order of Qwen2.5-Coder (arXiv:2409.12186) and of llama.cpp's server: other files, the text
    before the gap, the text after it.

    Attributes:
        prefix: the text before the gap.
        suffix: the text after the gap.
        files: other files that belong to the text, by name; models without a token for files cannot read them.
        name: name of the file that has the gap; "" leaves it out.
        repository: name of the repository of the files; "" leaves it out.

    Raises:
        InvalidOption: an attribute that is not a text, or files that are not a mapping of names to texts.
    """

    prefix: str
    suffix: str
    files: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    repository: str = ""

    def __post_init__(self) -> None:
        for attribute in ("prefix", "suffix", "name", "repository"):
            check_text(attribute, getattr(self, attribute))
        if not isinstance(self.files, Mapping):
            raise refused("files", self.files, "a mapping of names to texts")
        for name, text in self.files.items():
            check_text("a name of files", name)
            check_text(f"files[{name!r}]", text)

    def tokens(self, vocab: Vocab) -> list[int]:
        """The tokens of the prompt, after BOS if texts begin with it; control tokens in the texts are not parsed.

        Raises:
            VocabError: the vocabulary has no tokens for a gap, for files, or for a repository.
        """
        infill = vocab.infill
        if infill is None:
            raise VocabError("the vocabulary has no tokens for text with a gap: this model was not trained to fill it")

        def encoded(text: str) -> list[int]:
            return vocab.encode(text, add_special=False, parse_special=False)

        tokens = [bos] if (bos := vocab.bos) in vocab.encode("", add_special=True, parse_special=False)[:1] else []
        if self.repository:
            tokens += [_existing(infill.repository, "repository"), *encoded(f"{self.repository}\n")]
        for name, text in (*self.files.items(), *([(self.name, "")] if self.name else [])):
            tokens += [_existing(infill.file, "files and name"), *encoded(f"{name}\n"), *encoded(text)]
        return [*tokens, infill.prefix, *encoded(self.prefix), infill.suffix, *encoded(self.suffix), infill.middle]


def _existing(token: int | None, attribute: str) -> int:
    if token is None:
        raise VocabError(f"the vocabulary has no token for {attribute}: leave it out")
    return token

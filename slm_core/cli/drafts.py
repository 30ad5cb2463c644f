"""The flags of speculative decoding, and the drafters that they ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slm_core.cli.options import EngineOptions, model_files
from slm_core.closing import Closing
from slm_core.errors import InvalidOption
from slm_core.generation.speculation import DraftModel, Speculation, TranslatedDraftModel, prompt_lookup
from slm_core.generation.speculation.mtp import MTP
from slm_core.model import Model
from slm_core.sampling import Sampling

_PANEL = "Speculative decoding"

Lookup = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="Draft tokens by copying from the prompt, while it pays. Without the flag, only answers that are drawn"
        " without a seed do.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]


class Drafts(Closing):
    """Provides the speculation of answers; owns the draft model.

    Args:
        draft: the draft model; None without one.
        mtp: whether the answering model drafts with its own layers for multi-token prediction.
        lookup: without a draft model and ``mtp``, whether answers use prompt lookup; None: only sampled answers without
            a seed.
    """

    def __init__(self, draft: Model | None = None, *, mtp: bool = False, lookup: bool | None = None) -> None:
        self._draft = draft
        self._mtp = mtp
        self._lookup = lookup
        self._drafter: DraftModel | TranslatedDraftModel | None = None
        self._made_for: tuple[Model, int] | None = None

    def speculation(self, target: Model, n_ctx: int, sampling: Sampling) -> Speculation | None:
        """The speculation of the next answer; None without drafts.

        Args:
            target: the model that answers. Another model than before gets a new drafter.
            n_ctx: the context of the answer. Another size than before gets a new drafter.
            sampling: how the answer is sampled.

        Raises:
            InvalidOption: the draft model cannot draft for the model.
        """
        if self._mtp:
            return Speculation(MTP)
        if self._draft is None:
            return prompt_lookup(sampling, self._lookup)
        if self._drafter is None or self._made_for != (target, n_ctx):
            self._close_drafter()
            self._drafter, self._made_for = self._draft.drafter(target, n_ctx=n_ctx), (target, n_ctx)
        return Speculation(self._drafter)

    def close(self) -> None:
        """Close the drafter and the draft model. A second call does nothing."""
        self._close_drafter()
        if self._draft is not None:
            self._draft.close()

    def _close_drafter(self) -> None:
        if self._drafter is not None:
            self._drafter.close()
        self._drafter = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """The flags of speculative decoding."""

    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A small model that drafts tokens, or 'mtp' for the model's own layers for multi-token prediction: the"
            " answer is the same, and often faster.",
            rich_help_panel=_PANEL,
            autocompletion=model_files,
        ),
    ] = None
    lookup: Lookup = None

    @property
    def flag(self) -> str | None:
        """The flag that is set; None without one.

        Raises:
            InvalidOption: both are set.
        """
        if self.draft is not None and self.lookup:
            raise InvalidOption("--draft and --lookup do not go together: an answer has one drafter")
        return "--draft" if self.draft is not None else "--lookup" if self.lookup else None

    def load(self, engine: EngineOptions) -> Drafts:
        """Load the draft model, if there is one, with the flags of the engine.

        Raises:
            InvalidOption: both flags are set.
        """
        if self.flag == "--draft":
            assert self.draft is not None
            return Drafts(mtp=True) if str(self.draft) == MTP else Drafts(engine.load(self.draft))
        return Drafts(lookup=self.lookup)

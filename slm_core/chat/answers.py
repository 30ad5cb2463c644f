"""Answers of a session: starting a generation, and dumping and resuming an unfinished one."""

from __future__ import annotations

from collections.abc import Sequence

from slm_core.argument_checks import check_kind, check_methods
from slm_core.chat.session_dump import OwnSampler, UnfinishedAnswer, restore_constraint
from slm_core.chat.source import SessionSource
from slm_core.constraints import GrammarConstraint, Spec, compile  # noqa: A004  (as in re.compile)
from slm_core.errors import InvalidOption, SessionError
from slm_core.generation import Control, Generation
from slm_core.generation.shifting import ShiftingSource, TokenShift
from slm_core.generation.speculation import Speculation
from slm_core.generation.speculation.source import SpeculativeSource
from slm_core.generation.token_loop import Progress
from slm_core.generation.top import TopChoice, top_choice
from slm_core.protocols import Constraint, Sampler, Vocab
from slm_core.sampling import LogitsProcessor, ProcessedChain, SamplerChain

SAMPLER_METHODS = ("sample", "set_history")
SAMPLERS = "a sampler, such as SamplerChain(...)"
"""The accepted values in the error for an argument that is not a sampler."""


def own_constraint(constraint: Constraint | Spec | None, vocab: Vocab) -> Constraint | None:
    """A constraint that no other code advances: a spec is compiled, a constraint is copied.

    Raises:
        InvalidOption: it is neither a spec nor a constraint.
        ConstraintError: the spec is invalid or unsupported.
    """
    if isinstance(constraint, Spec):
        return compile(constraint, vocab)
    if constraint is None:
        return None
    accepted = "a spec, such as Regex(...) or JsonSchema(...)"
    check_methods("constraint", constraint, ("clone", "mask", "advance"), accepted)
    return constraint.clone()


def check_source(speculation: Speculation | None, shift: TokenShift | None) -> None:
    """Refuse options that an answer cannot combine.

    Raises:
        InvalidOption: an option has the wrong type, or both are set.
    """
    check_kind("speculation", speculation, Speculation)
    check_kind("shift", shift, TokenShift)
    if speculation is not None and shift is not None:
        raise InvalidOption("speculation and shift do not go together: a shift moves what drafts are compared with")


def begun(
    history: SessionSource,
    vocab: Vocab,
    sampler: Sampler,
    progress: Progress,
    control: Control,
    constraint: Constraint | None,
    source: Speculation | TokenShift | None,
    *,
    special: bool,
) -> Generation:
    """Start an answer; see ``Session.generate``."""
    drafts = shifting = None
    if isinstance(source, Speculation):
        drafts = SpeculativeSource(history, source, progress, constraint=constraint)
    elif source is not None:
        shifting = ShiftingSource(history, source)
    return Generation(
        drafts or shifting or history,
        vocab,
        sampler,
        progress,
        control=control,
        constraint=constraint,
        speculation=drafts,
        shifting=shifting,
        top=_top_choice(history, sampler, vocab) if constraint is None and source is None else None,
        special=special,
        guard=history.guard.block,
    )


def check_processors(processors: Sequence[LogitsProcessor], sampler: Sampler | None) -> None:
    """Refuse logits processors together with a sampler, and an object that is not a sampler, such as options.

    Raises:
        InvalidOption: there are both, or the sampler lacks a method.
    """
    if sampler is not None:
        check_methods("sampler", sampler, SAMPLER_METHODS, SAMPLERS)
    if processors and sampler is not None:
        raise InvalidOption("logits_processors and sampler together (accepted: one of them)")


def kept(running: Generation | None, sampler: Sampler) -> UnfinishedAnswer | None:
    """An unfinished answer for a dump; None if there is none.

    Args:
        running: the answer.
        sampler: the session's sampler, which the dump already contains.

    Raises:
        SessionError: its constraint or sampler cannot be dumped.
    """
    if running is None or running.finished:
        return None
    rule = running.constraint
    if rule is not None and not isinstance(rule, GrammarConstraint):
        raise SessionError(
            f"an answer under a {type(rule).__name__} cannot be dumped (accepted: constraints of slm_core):"
            " let it end, or roll back"
        )
    if running.shifting is not None:
        raise SessionError("an answer that shifts tokens out cannot be dumped: let it end, or roll back")
    drafts = running.speculation
    return UnfinishedAnswer(
        running.progress,
        _own_sampler(running, sampler),
        None if rule is None else rule.state(),
        special=running.special,
        speculation=None if drafts is None else drafts.dumped(),
    )


def taken_up(history: SessionSource, vocab: Vocab, sampler: Sampler, answer: UnfinishedAnswer) -> Generation:
    """A generation that continues a dumped one.

    Args:
        history: the restored history.
        vocab: the model's vocabulary.
        sampler: the session's sampler, in the dumped state.
        answer: the dumped answer.
    """
    if answer.sampler is not None:
        sampler = SamplerChain.for_vocab(answer.sampler.sampling, vocab)
        sampler.set_state(answer.sampler.state)
        sampler.set_history(history.history, n_said=len(answer.progress.tokens))
    rule, source = restore_constraint(answer, vocab), None
    if answer.speculation is not None:
        drafts = history.dumped_speculation(answer.speculation)
        source = SpeculativeSource(history, drafts.speculation, answer.progress, constraint=rule, taken_up=drafts)
    return Generation(
        source or history,
        vocab,
        sampler,
        answer.progress,
        constraint=rule,
        speculation=source,
        top=_top_choice(history, sampler, vocab) if rule is None and source is None else None,
        special=answer.special,
        paused=True,
        guard=history.guard.block,
    )


def _top_choice(history: SessionSource, sampler: Sampler, vocab: Vocab) -> TopChoice | None:
    """A ``TopChoice``; None if the context cannot compute the top-k, or the sampler needs more logits."""
    return top_choice(history, sampler, vocab.size) if history.picks_top else None


def _own_sampler(running: Generation, sampler: Sampler) -> OwnSampler | None:
    if running.sampler is sampler:
        return None
    own = running.sampler
    if not isinstance(own, SamplerChain) or isinstance(own, ProcessedChain):
        kind = "logits processors" if isinstance(own, ProcessedChain) else "a custom sampler"
        raise SessionError(f"an answer with {kind} cannot be dumped: let it end, or roll back")
    return OwnSampler(own.sampling, own.state())

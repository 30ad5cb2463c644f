"""Beam search: the most likely answers. Hypotheses are forks of one sequence and are decoded together."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slm_core.errors import ContextFull, InvalidOption, SamplingError
from slm_core.generation.beam_options import Beams, Hypothesis
from slm_core.generation.branches import Branches
from slm_core.generation.events import FinishReason
from slm_core.generation.forced_words import ForcedWords
from slm_core.numerics import checked_log_sum_exp
from slm_core.protocols import Constraint, Stop, Vocab

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished hypothesis.

    Attributes:
        seq_id: the sequence with all its tokens but the last. Before ``_place``, the sequence of its parent.
        tokens: its tokens.
        logprobs: the model's log probability of each.
        score: their sum, with biases and diversity penalties.
        data: its bytes.
        constraint: restricts the next tokens; None for no constraint.
        contained: indices of the forced words that it contains.
    """

    seq_id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: float = 0.0
    data: bytes = b""
    constraint: Constraint | None = None
    contained: frozenset[int] = frozenset()


class Rules:
    """The rules by which a token extends or ends a beam.

    Args:
        vocab: the model's vocabulary.
        beams: the options of the search.
        special: whether control tokens other than EOG become text.

    Raises:
        InvalidOption: a biased token is not in the vocabulary, or a forced word is too long.
    """

    def __init__(self, vocab: Vocab, beams: Beams, *, special: bool = False) -> None:
        self.beams = beams
        self._vocab = vocab
        self._special = special
        self._eog = sorted(vocab.eog_ids)
        self._stops = [stop.encode("utf-8", "replace") for stop in beams.stop]
        self.words = ForcedWords(beams.force_words, vocab, beams.max_tokens)
        if beams.logit_bias and max(beams.logit_bias) >= vocab.size:
            raise InvalidOption(f"logit_bias of token {max(beams.logit_bias)} (accepted: 0 to {vocab.size - 1})")

    @property
    def n_candidates(self) -> int:
        """Candidates per beam: one per EOG token plus one, so that ``width`` beams can always continue."""
        return max(2, 1 + len(self._eog))

    def scores(self, beam: Beam, row: NDArray[np.float32], norm: float, chosen: Counter[int]) -> Scores:
        """The score of each continuation of a beam, float64 [V]; -inf for a token that may not follow.

        Args:
            beam: the beam.
            row: the logits after it, float32 [V].
            norm: the logarithm of the sum of their exponentials; see ``log_sum_exp``.
            chosen: how often earlier groups chose each token in this step.
        """
        scores = row.astype(np.float64)
        scores += beam.score - norm
        for token, bias in self.beams.logit_bias.items():
            scores[token] += bias
        for token, n in chosen.items():
            scores[token] -= n * self.beams.diversity_penalty
        if len(beam.tokens) < self.beams.min_tokens or not self.words.complete(beam.contained):
            scores[self._eog] = -np.inf
        if beam.constraint is not None:
            scores[np.isneginf(beam.constraint.mask(row))] = -np.inf
        return scores

    def extend(self, beam: Beam, token: int, logprob: float, score: float) -> tuple[Beam, FinishReason | None] | None:
        """A beam with one more token, and its finish reason if it ends; None if the token is not allowed."""
        tokens = (*beam.tokens, token)
        contained = self.words.contained(tokens, beam.contained)
        constraint, ends = self._advance(beam, token)
        ends_generation = token in self._vocab.eog_ids
        data = beam.data + (b"" if ends_generation else self._vocab.token_bytes(token, special=self._special))
        if ends_generation or any(stop in data for stop in self._stops):
            ends = FinishReason.STOP
        n_left = self.beams.max_tokens - len(tokens)
        if n_left < self.words.needed(tokens, contained) or (ends is not None and not self.words.complete(contained)):
            return None
        child = Beam(beam.seq_id, tokens, (*beam.logprobs, logprob), score, data, constraint, contained)
        return child, FinishReason.LENGTH if ends is None and n_left == 0 else ends

    def finished(self, beam: Beam, reason: FinishReason) -> Hypothesis:
        """The hypothesis of a beam that ended."""
        offsets = [offset for offset in (beam.data.find(stop) for stop in self._stops) if offset >= 0]
        data = beam.data[: min(offsets)] if offsets else beam.data
        score = beam.score / len(beam.tokens) ** self.beams.length_penalty
        return Hypothesis(data.decode("utf-8", "replace"), beam.tokens, beam.logprobs, score, reason)

    def _advance(self, beam: Beam, token: int) -> tuple[Constraint | None, FinishReason | None]:
        if beam.constraint is None or token in self._vocab.eog_ids:
            return None, None
        constraint = beam.constraint.clone()
        outcome = constraint.advance(token)
        return constraint, FinishReason.CONSTRAINT if isinstance(outcome, Stop) else None


class Group:
    """Beams that compete with each other; a plain search has one group.

    Args:
        rules: the rules of the search.
        width: the number of beams of the group.
        first: the empty hypothesis.
    """

    def __init__(self, rules: Rules, width: int, first: Beam) -> None:
        self._rules = rules
        self._width = width
        self.live = [first]
        self.finished: list[Hypothesis] = []
        self.done = False

    def step(self, rows: NDArray[np.float32], chosen: Counter[int]) -> list[int]:
        """Extend each beam by a token; returns the last tokens of the live beams, or of ended beams if none is live.

        Args:
            rows: the logits after the beams, float32 [n_live, V].
            chosen: how often earlier groups chose each token in this step.
        """
        ranked: list[Beam] = []
        ended: list[int] = []
        n_complete = 0
        norms = [checked_log_sum_exp(row) for row in rows]
        for beam, token, score in self._candidates(rows, norms, chosen):
            extended = self._rules.extend(self.live[beam], token, float(rows[beam, token]) - norms[beam], score)
            if extended is None:
                continue
            child, ends = extended
            if ends is None:
                ranked.append(child)
            elif n_complete < self._width:
                self._keep(self._rules.finished(child, ends))
                ended.append(token)
            n_complete += self._rules.words.complete(child.contained)
        self.live = self._chosen(ranked)
        self.done = not self.live or self._cannot_improve()
        return [beam.tokens[-1] for beam in self.live] or ended

    def give_up(self, reason: FinishReason) -> None:
        """End the live beams that contain all forced words."""
        for beam in self.live:
            if beam.tokens and self._rules.words.complete(beam.contained):
                self._keep(self._rules.finished(beam, reason))
        self.live, self.done = [], True

    def _candidates(
        self, rows: NDArray[np.float32], norms: Sequence[float], chosen: Counter[int]
    ) -> Iterator[tuple[int, int, float]]:
        """Beam, token and score of the best continuations, best first."""
        n_vocab = rows.shape[1]
        scores = np.empty(rows.shape)  # [n_live, V]
        for i, beam in enumerate(self.live):
            scores[i] = self._rules.scores(beam, rows[i], norms[i], chosen)
        flat_indices = set(largest(scores.ravel(), self._rules.n_candidates * self._width))
        if self._rules.beams.force_words:
            for i, beam in enumerate(self.live):
                follow = self._rules.words.next_tokens(beam.tokens, beam.contained)
                flat_indices.update(i * n_vocab + token for token in (*follow, int(scores[i].argmax())))
        candidates = [(*divmod(flat_index, n_vocab), float(scores.flat[flat_index])) for flat_index in flat_indices]
        yield from sorted((c for c in candidates if c[2] > -np.inf), key=lambda c: (-c[2], c[0], c[1]))

    def _chosen(self, ranked: list[Beam]) -> list[Beam]:
        """The beams to continue: the best ones. With forced words, beams of each progress take turns, best first."""
        if not self._rules.beams.force_words:
            return ranked[: self._width]
        banks: dict[int, list[Beam]] = {}
        for beam in ranked:
            banks.setdefault(self._rules.words.needed(beam.tokens, beam.contained), []).append(beam)
        turns = [(turn, needed, beam) for needed, bank in banks.items() for turn, beam in enumerate(bank)]
        return [beam for _, _, beam in sorted(turns, key=lambda t: t[:2])[: self._width]]

    def _keep(self, hypothesis: Hypothesis) -> None:
        insort(self.finished, hypothesis, key=lambda h: -h.score)
        del self.finished[self._width :]

    def _cannot_improve(self) -> bool:
        beams = self._rules.beams
        if len(self.finished) < self._width:
            return False
        if beams.early_stopping is True:
            return True
        length = len(self.live[0].tokens)
        if beams.early_stopping == "never" and beams.length_penalty > 0:
            length = beams.max_tokens
        best = max(beam.score for beam in self.live) / float(length) ** beams.length_penalty
        return bool(best <= self.finished[-1].score)


class BeamSearch:
    """A search over forks of one sequence; the sequence itself does not change.

    Args:
        rules: the rules of the search.
        branches: ``beams.width`` sequences for the forks of the prompt.
        constraint: restricts the answer; None for no constraint.
    """

    def __init__(self, rules: Rules, branches: Branches, constraint: Constraint | None) -> None:
        beams = rules.beams
        self._branches = branches
        first = Beam(branches.base.seq_id, constraint=constraint)
        self._groups = [Group(rules, beams.width // beams.n_groups, first) for _ in range(beams.n_groups)]
        self._n_best = beams.n_best

    def run(self, row: NDArray[np.float32], cancelled: Callable[[], bool]) -> list[Hypothesis]:
        """Search from the prompt's row of logits; returns the best hypotheses, best first.

        Args:
            row: the prompt's row, float32 [V].
            cancelled: called before each batch; if it returns True, the live beams end there.

        Raises:
            SamplingError: constraint, biases and forced words exclude every answer.
            ContextFull: no room for a single step.
        """
        rows: NDArray[np.float32] | None = np.stack([row] * len(self._groups))
        while rows is not None:
            self._step(rows)
            open_beams = self._open_beams
            if not open_beams:
                break
            rows = None if cancelled() else self._decode(open_beams)
        reason = FinishReason.CANCELLED if cancelled() else FinishReason.LENGTH
        for group in self._groups:
            if not group.done:
                group.give_up(reason)
        hypotheses = [hypothesis for group in self._groups for hypothesis in group.finished]
        if not hypotheses and reason is not FinishReason.CANCELLED:
            raise SamplingError("no answer is left: constraint, banned tokens and forced words exclude each other")
        return sorted(hypotheses, key=lambda h: -h.score)[: self._n_best]

    @property
    def _open_beams(self) -> list[Beam]:
        return [beam for group in self._groups if not group.done for beam in group.live]

    def _step(self, rows: NDArray[np.float32]) -> None:
        chosen: Counter[int] = Counter()
        first_row = 0
        for group in self._groups:
            if not group.done:
                n_live = len(group.live)
                chosen.update(group.step(rows[first_row : first_row + n_live], chosen))
                first_row += n_live

    def _decode(self, beams: Sequence[Beam]) -> NDArray[np.float32] | None:
        """The logits after the beams, float32 [n_beams, V]; None if the context is full in the middle of a search."""
        try:
            placed = self._place(beams)
            rows = self._branches.decode([(beam.seq_id, beam.tokens[-1:]) for beam in placed])
        except ContextFull:
            if len(beams[0].tokens) == 1:
                raise
            return None
        next_beam = iter(placed)
        for group in self._groups:
            if not group.done:
                group.live = [next(next_beam) for _ in group.live]
        return rows

    def _place(self, beams: Sequence[Beam]) -> list[Beam]:
        """Assign a sequence to each beam: the first child gets its parent's sequence, other children get forks."""
        for seq_id in self._branches.taken - {beam.seq_id for beam in beams}:
            self._branches.drop(seq_id)
        unassigned = set(self._branches.taken)
        placed = []
        for beam in beams:
            if beam.seq_id in unassigned:
                unassigned.remove(beam.seq_id)
                placed.append(beam)
            else:
                placed.append(replace(beam, seq_id=self._branches.fork(beam.seq_id)))
        return placed


def largest(values: Scores, n: int) -> list[int]:
    """Indices of the n largest values, largest first, equal values in order."""
    threshold = np.partition(values, -n)[-n] if n < len(values) else -np.inf
    indices = np.flatnonzero(values >= threshold)
    ranked: list[int] = indices[np.argsort(-values[indices], kind="stable")][:n].tolist()
    return ranked

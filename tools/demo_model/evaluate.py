"""Scores the demo model on held-out conversations and prints a table per skill.

An answer counts as right if it equals the expected answer token for token.  The conversation before it is the expected
one, so one forward pass scores every answer of a conversation: an answer is right exactly if each of its tokens is the
most likely one after the tokens before it, which is what greedy decoding would write.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import torch
from conversations import generate
from rendering import Encoded, Encoder, Turn
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

# Enough exchanges of the skills that mixed conversations have little of.
EVAL_DRILLS = {"arithmetic": 0.12, "spell": 0.03, "repeat": 0.02, "chat": 0.02, "recall": 0.03}
LogitsFn = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Failure:
    """A wrong answer: the conversation up to its end, and the tokens that the model predicts."""

    skill: str
    context: list[int]
    expected: list[int]
    predicted: list[int]


@dataclass
class Scores:
    """Counts of answers and of right answers per skill, over all phrasings and over those that training never shows."""

    answered: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    answered_new: Counter[str] = field(default_factory=Counter)
    right_new: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # smallest top-2 logit gap of each right answer

    def add(self, turn: Turn, is_right: bool) -> None:
        """Count one answer."""
        self.answered[turn.skill] += 1
        self.right[turn.skill] += is_right
        if turn.new_phrase:
            self.answered_new[turn.skill] += 1
            self.right_new[turn.skill] += is_right

    def overall(self) -> float:
        """Share of right answers in percent."""
        return 100 * self.right.total() / self.answered.total()

    def summary(self) -> str:
        """All skills on one line."""
        skills = " ".join(
            f"{skill}:{100 * self.right[skill] / self.answered[skill]:.1f}" for skill in sorted(self.answered)
        )
        return f"all {self.overall():.2f} | {skills}"

    def table(self) -> str:
        """A Markdown table per skill."""
        lines = ["| skill | right % | n | right % in new phrasings | n |", "|---|---|---|---|---|"]
        for skill in sorted(self.answered):
            share = 100 * self.right[skill] / self.answered[skill]
            n_new = self.answered_new[skill]
            new = f"{100 * self.right_new[skill] / n_new:.1f}" if n_new else "-"
            lines.append(f"| {skill} | {share:.1f} | {self.answered[skill]} | {new} | {n_new} |")
        n, n_new = self.answered.total(), self.answered_new.total()
        new = f"{100 * self.right_new.total() / max(1, n_new):.2f}"
        lines.append(f"| **all** | **{self.overall():.2f}** | {n} | **{new}** | {n_new} |")
        return "\n".join(lines)


def held_out(encoder: Encoder, count: int, seed: int) -> list[Encoded]:
    """Evaluation conversations, sorted by length so that batches need little padding."""
    rng = random.Random(seed)
    conversations = [encoder.encode(generate(rng, held_out=True, drills=EVAL_DRILLS)) for _ in range(count)]
    return sorted((c for c in conversations if c.turns), key=lambda encoded: len(encoded.ids))


@torch.inference_mode()
def score(logits_fn: LogitsFn, data: Sequence[Encoded], batch_size: int = 32) -> Scores:
    """Score conversations with a function from ids [B, T] to logits [B, T, V]."""
    scores = Scores()
    for start in range(0, len(data), batch_size):
        batch = data[start : start + batch_size]
        length = max(len(encoded.ids) for encoded in batch)
        ids = torch.tensor([encoded.ids + [0] * (length - len(encoded.ids)) for encoded in batch])
        top = logits_fn(ids).float().topk(2)
        for row, encoded in enumerate(batch):
            _score_conversation(scores, encoded, top.indices[row, :, 0], top.values[row, :, 0] - top.values[row, :, 1])
    return scores


def _score_conversation(scores: Scores, encoded: Encoded, best: torch.Tensor, gap: torch.Tensor) -> None:
    for turn in encoded.turns:
        predicted = best[turn.start - 1 : turn.end - 1].tolist()
        expected = encoded.ids[turn.start : turn.end]
        scores.add(turn, predicted == expected)
        if predicted == expected:
            scores.gaps.append(float(gap[turn.start - 1 : turn.end - 1].min()))
        else:
            scores.failures.append(Failure(turn.skill, encoded.ids[: turn.end], expected, predicted))


def load_model(path: Path) -> Qwen3ForCausalLM:
    """Load a checkpoint folder or a GGUF file (then with its quantized weights)."""
    if path.suffix == ".gguf":
        # transformers does not read a qwen3 file's head_dim and would assume 128.
        head_dim = gguf.GGUFReader(path).fields["qwen3.attention.key_length"].contents()
        options = {"gguf_file": path.name, "head_dim": head_dim}
        path = path.parent
    else:
        options = {}
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    model.train(False)
    return model


def main() -> None:
    """Print the table, the smallest top-2 gaps and some wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder or GGUF file")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json from tokenizer.py")
    parser.add_argument("--count", type=int, default=1500, help="conversations")
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to print per skill")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    model = load_model(args.model)
    data = held_out(Encoder(tokenizer), args.count, args.seed)
    scores = score(lambda ids: model(input_ids=ids, use_cache=False).logits, data)
    print(scores.table())
    gaps = torch.tensor(scores.gaps)
    print(
        f"\nSmallest top-2 gap of a right answer: median {gaps.median():.2f}, 1st percentile {gaps.quantile(0.01):.2f}"
    )
    shown: Counter[str] = Counter()
    for failure in scores.failures:
        shown[failure.skill] += 1
        if shown[failure.skill] <= args.failures:
            context = tokenizer.decode(failure.context, skip_special_tokens=False)[-200:]
            predicted = tokenizer.decode(failure.predicted, skip_special_tokens=False)
            print(f"[{failure.skill}] {context!r} predicted {predicted!r}")


if __name__ == "__main__":
    main()

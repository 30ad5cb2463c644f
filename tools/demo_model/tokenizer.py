"""Trains the tokenizer: byte-level BPE with the Qwen2 pre-tokenizer, which keeps every digit a token of its own."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from conversations import DRILLS, generate
from rendering import render
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(vocab_size: int, conversations: int) -> Tokenizer:
    """Train on rendered conversations, so that the tools' schemas and the JSON answers become few tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*CONTROL_TOKENS, *USER_DEFINED_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    return tokenizer


def _texts(conversations: int) -> Iterator[str]:
    rng = random.Random(7)
    for _ in range(conversations):
        text = render(generate(rng, drills=DRILLS))
        for token in (*CONTROL_TOKENS, *USER_DEFINED_TOKENS):
            text = text.replace(token, "\n")
        yield text


def main() -> None:
    """Train the tokenizer and write it as a tokenizer.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("output", type=Path, help="path of the tokenizer.json to write")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--conversations", type=int, default=30000)
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(args.vocab_size, args.conversations).save(str(args.output))


if __name__ == "__main__":
    main()

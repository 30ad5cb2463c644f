"""RWKV World's vocabulary as a ``tokenizer.json``, like in RWKV's directories."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|endoftext|>"


def world_tokenizer(pieces: Mapping[int, bytes], size: int) -> Tokenizer:
    """A tokenizer of the tokenizers library with World's greedy search over bytes.

    Args:
        pieces: bytes by id, from id 1 on.
        size: vocabulary size of the model; unused ids get names that no text contains.
    """
    characters = _characters()
    vocab = {END: 0} | {"".join(characters[byte] for byte in piece): i for i, piece in pieces.items()}
    vocab |= {f"\ue000{i}\ue001": i for i in range(1, size) if i not in pieces}
    model = models.WordPiece(
        vocab=vocab, unk_token=END, max_input_chars_per_word=2**31 - 1, continuing_subword_prefix=""
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def _characters() -> list[str]:
    """GPT-2's character for each byte: the byte's own character if printable, otherwise one after Latin-1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]

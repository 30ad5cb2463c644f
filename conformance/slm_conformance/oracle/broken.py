"""Model files with damaged weights."""

from __future__ import annotations

from pathlib import Path

from slm_core.gguf import GgufFile


def with_broken_token(source: Path, token: int, target: Path) -> Path:
    """Write a copy of a model file in which the embedding of a token is NaN; returns ``target``.

    Args:
        source: a file whose output matrix is another tensor: NaN would be in every row of logits.
        token: the token.
        target: the file to write.
    """
    data = bytearray(source.read_bytes())
    with GgufFile.open(source) as file:
        info = file.tensors["token_embd.weight"]
        table = bytes(file.tensor_data(info.name))
    n_row = len(table) // info.shape[0]
    start = data.index(table) + token * n_row
    data[start : start + n_row] = b"\xff" * n_row  # NaN in float32, in float16, and as the float16 scale of a block
    target.write_bytes(data)
    return target

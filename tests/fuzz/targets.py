"""The fuzz targets: every reader of external bytes. An error of slm_core.errors in one line is a valid outcome."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from fuzz.corpora import KINDS, SEPARATOR, loaded
from slm_core.chat import Chat, Session
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.reading import recipe_of
from slm_core.checkpoints.safetensors import SafetensorsFile
from slm_core.container import pack
from slm_core.errors import SlmError
from slm_core.gguf import GgufFile
from slm_core.jsonfile import read_json
from slm_core.model import Model
from slm_core.modelinfo import chat_template
from slm_core.protocols import Context
from slm_core.sampling import Sampling
from slm_core.tokenization import build_vocab
from slm_core.tokenization.directory import directory_vocab
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend

_DIGEST_SIZE = 32


def gguf(data: bytes) -> None:
    """Open a GGUF file, read all of it, and build its vocabulary."""
    with GgufFile.open(data) as file:
        for key in file.metadata:
            file.metadata[key]
        for name, tensor in file.tensors.items():
            assert file.tensor_data(name).nbytes == tensor.n_bytes
        file.fingerprint()
        chat_template(file)
        vocab = build_vocab(file)
        ids = vocab.encode("hello <|im_end|> \u00e9", add_special=True, parse_special=True)
        vocab.decode([token for token in ids if 0 <= token < vocab.size])


def load(data: bytes) -> None:
    """Load a GGUF file on the native engine and decode a few tokens."""
    backend = NativeBackend()
    with backend.load(data, ModelOptions("cpu", 1)) as model, model.new_context(ContextOptions(16, 2, 8)) as context:
        _use(context, model.vocab.size)


def safetensors(data: bytes) -> None:
    """Open a safetensors file and read its tensors."""
    file = SafetensorsFile(_written("model.safetensors", data))
    try:
        for name, tensor in file.tensors.items():
            assert file.data(name).nbytes == tensor.n_bytes
    finally:
        file.close()


def config(data: bytes) -> None:
    """Read a ``config.json``."""
    path = _written("config.json", data)
    recipe_of(Config(path, read_json(path)))


def tokenizer(data: bytes) -> None:
    """Read a ``tokenizer.json``, and tokenize a text."""
    path = _written("tokenizer.json", data)
    vocab = directory_vocab(path.parent)
    for parse_special in (False, True):
        ids = vocab.encode("abc <s> \u00e9", add_special=True, parse_special=parse_special)
        vocab.decode([token for token in ids if 0 <= token < vocab.size], special=True)


def dump(data: bytes) -> None:
    """Correct the checksum of a dump and restore it as each kind."""
    checked = data[:-_DIGEST_SIZE]
    checked += hashlib.blake2b(checked, digest_size=_DIGEST_SIZE).digest()
    for kind in KINDS:
        _allowed(lambda kind=kind: _restore(kind, checked))


def dump_parts(data: bytes) -> None:
    """Build a dump with right lengths and checksum from a kind, JSON and sections, and restore it."""
    kind, (meta, *sections) = KINDS[data[0] % len(KINDS)] if data else KINDS[0], data[1:].split(SEPARATOR)
    try:
        stated = json.loads(meta)
    except (ValueError, RecursionError):
        return
    if isinstance(stated, dict):
        _restore(kind, pack(kind, stated, sections))


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "gguf": gguf,
    "load": load,
    "safetensors": safetensors,
    "config": config,
    "tokenizer": tokenizer,
    "dump": dump,
    "dump_parts": dump_parts,
}


def run(target: str, data: bytes) -> None:
    """Run a target on bytes.

    Raises:
        AssertionError: the bytes were refused, but not in one line.
        Exception: any error that is not in slm_core.errors.
    """
    _allowed(lambda: TARGETS[target](data))


def _allowed(call: Callable[[], None]) -> None:
    try:
        call()
    except SlmError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 2000, f"not one line: {message!r}"


def _restore(kind: str, data: bytes) -> None:
    """Restore a dump next to a sequence that must not change, and continue it."""
    model = loaded()
    if kind == "chat":
        with Chat.restore(model, data, n_ctx=64) as chat:
            chat.send("you")
        return
    with model.new_context(n_ctx=64, n_seq_max=2, n_batch=32) as context:
        _decode(context, 0, [5, 6, 7])
        try:
            if kind == "sequence":
                context.restore(1, data)
                _use(context, model.vocab.size, seq_id=1)
            else:
                _go_on(context, model, data)
        finally:
            assert context.tokens(0) == (5, 6, 7), "another sequence changed"


def _go_on(context: Context, model: Model, data: bytes) -> None:
    with Session.restore(context, model.vocab, data, seq_id=1) as session:
        for _, _event in zip(range(3), session.generate(), strict=False):
            pass
        session.append("x")
        session.generate(Sampling(temperature=0, max_tokens=2)).run()


def _use(context: Context, n_vocab: int, seq_id: int = 0) -> None:
    length = context.length(seq_id)
    if context.n_free >= 3 and n_vocab > 2:
        _decode(context, seq_id, [0, n_vocab // 2, n_vocab - 1])
    if length and context.edit_level > 1:
        context.cut(Pos(seq_id, 0), Pos(seq_id, 1))
    context.dump(seq_id)


def _decode(context: Context, seq_id: int, tokens: list[int]) -> None:
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="all")
    context.decode(batch)


@cache
def _folder() -> Path:
    """A folder of this process, in memory if the system has such a file system."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="slm-fuzz-", dir=memory if memory.is_dir() else None)
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def _written(name: str, data: bytes) -> Path:
    folder = _folder() / name.partition(".")[0]
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(data)
    return path

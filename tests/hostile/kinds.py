"""The kinds of hostile inputs: each makes an input from a seed, passes it to a backend, and reports the outcome."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.family_table import ENCODERS, FAMILIES, SMALL
from slm_conformance.suite.spec import make_backend
from slm_core import constraints
from slm_core.errors import InvalidOption, InvalidToken, SlmError
from slm_core.exporting import write_gguf
from slm_core.gguf import GgufFile
from slm_core.protocols import BackendModel, Context, Vocab
from slm_core.tokenization import build_vocab
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions, Pos
from tests.hostile import adapter_files, dump_mutations, folders, gguf_mutations, template_mutations, text_mutations
from tests.hostile.gguf_form import GgufForm, parse

LONGEST_MESSAGE = 2000
_TEXT = "Hello <|im_start|>user \N{SNOWMAN}\0 \ud800 123\n\n  the answer </s>"
_FILE_FAMILIES = (
    *("llama", "llama_yarn", "qwen2", "qwen3", "qwen2vl", "gemma2", "gemma3", "gemma3n", "gemma4", "phi2", "phi3_long"),
    *("gptneox", "gpt2", "falcon", "mpt", "mixtral", "qwen3moe", "deepseek2", "glm4", "stablelm", "gpt_oss", "llama4"),
    *("mamba", "mamba2", "jamba", "rwkv7", "lfm2", "falcon_h1", "granitehybrid", "bert", "nomic_bert", "modern_bert"),
    *("gemma_embedding", "small_mtp"),
)
_STATES = ("lfm2", "mamba2", "rwkv7")


class Nonsense(Exception):
    """An input was accepted, but its results are impossible."""


class Kind(ABC):
    """One kind of hostile input for one backend. ``attack`` may raise SlmError, which means a refusal."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend = backend
        self.folder = folder

    @abstractmethod
    def prepare(self) -> None:
        """Create the valid inputs that ``attack`` damages."""

    @abstractmethod
    def attack(self, seed: int) -> None:
        """Pass the input of this seed to the backend; equal seeds give equal inputs.

        Raises:
            SlmError: the input was refused.
            Nonsense: the input was accepted wrongly.
        """


class Files(Kind):
    """Model files."""

    def prepare(self) -> None:
        """One small model per architecture, for many architectures."""
        self._backend = make_backend(self.backend)
        self._forms: dict[str, GgufForm] = {}

    def attack(self, seed: int) -> None:
        """Load a damaged file; if it loads, use the model."""
        path = self.folder / "model.gguf"
        path.write_bytes(self.damaged_file(seed))
        use_file(self._backend, path)

    def damaged_file(self, seed: int) -> bytes:
        """The damaged file of this seed."""
        rng = np.random.default_rng([seed, 0])
        name = _FILE_FAMILIES[rng.integers(len(_FILE_FAMILIES))] if rng.random() < 0.8 else "llama"
        if name not in self._forms:
            self._forms[name] = parse(family_model(self.folder, name).read_bytes())
        return gguf_mutations.mutated(rng, self._forms[name])


def use_file(backend: Any, path: Path) -> None:
    """Load a model from a file or directory and use it; an error of ``supports`` is raised, too."""
    support = backend.supports(path)
    if not support.supported and "\n" in support.reason:
        raise Nonsense(f"a reason of several lines: {support.reason!r}")
    model = backend.load(path, ModelOptions("cpu", 1))
    try:
        _use(model)
    finally:
        model.close()


def _use(model: BackendModel) -> None:
    vocab = model.vocab
    for parse_special in (False, True):
        ids = vocab.encode(_TEXT, add_special=True, parse_special=parse_special)
        if any(not 0 <= token < vocab.size for token in ids):
            raise Nonsense(f"tokens {ids} of a vocabulary of {vocab.size}")
        vocab.decode(ids[:50])
    for token in (*range(min(20, vocab.size)), vocab.size - 1):
        vocab.token_bytes(token, special=True)
    with model.new_context(ContextOptions(n_ctx=64, n_seq_max=2, n_batch=32)) as context:
        tokens = [token % vocab.size for token in (3, 70, 99, 5, 41)]
        if Capability.ENCODER in context.capabilities:
            context.embed(_batch(context, tokens))
            return
        _decoded(context, tokens, vocab)
        _decoded(context, tokens[:1], vocab)
        if Capability.MTP in context.capabilities:
            context.draft(0, tokens[1], 3)
        context.restore(1, context.dump(0))
        _decoded(context, tokens[:2], vocab, seq_id=1)


def _batch(context: Context, tokens: Sequence[int], seq_id: int = 0) -> Any:
    batch = context.new_batch()
    batch.extend(tokens, Pos(seq_id, context.length(seq_id)), logits="all")
    return batch


def _decoded(context: Context, tokens: Sequence[int], vocab: Vocab, seq_id: int = 0) -> np.ndarray:
    logits = context.decode(_batch(context, tokens, seq_id)).copy()
    if logits.shape != (len(tokens), vocab.size):
        raise Nonsense(f"logits of shape {logits.shape} for {len(tokens)} tokens of {vocab.size}")
    return logits


class Folders(Kind):
    """Model directories."""

    def prepare(self) -> None:
        """Valid directories."""
        self._backend = make_backend(self.backend)
        make = folders.onnx_folders if self.backend == "onnx" else folders.transformers_folders
        self._sound = make(self.folder)

    def attack(self, seed: int) -> None:
        """Load a damaged directory; if it loads, use the model."""
        rng = np.random.default_rng([seed, 2])
        files = folders.mutated(rng, self._sound[rng.integers(len(self._sound))])
        place = self.folder / "broken"
        shutil.rmtree(place, ignore_errors=True)
        use_file(self._backend, folders.write(files, place))


class Conversions(Kind):
    """Model directories that become GGUF files."""

    def prepare(self) -> None:
        """Valid directories."""
        self._backend = make_backend(self.backend)
        self._sound = folders.transformers_folders(self.folder)

    def attack(self, seed: int) -> None:
        """Write a damaged directory as a GGUF file; if it is written, use the file."""
        rng, target = np.random.default_rng([seed, 6]), self.folder / "converted.gguf"
        files = folders.mutated(rng, self._sound[rng.integers(len(self._sound))])
        place = self.folder / "broken"
        shutil.rmtree(place, ignore_errors=True)
        target.unlink(missing_ok=True)
        try:
            write_gguf(folders.write(files, place), target, lambda share: None)
        except SlmError:
            if target.exists():
                raise Nonsense("a refused directory left a file") from None
            raise
        use_file(self._backend, target)


class Adapters(Kind):
    """Adapters, loaded for a model beside a sequence that must not change."""

    def prepare(self) -> None:
        """A model, a GGUF adapter, a control vector and a directory of PEFT."""
        path = family_model(self.folder, "llama")
        self._model = make_backend(self.backend).load(path, ModelOptions("cpu", 1))
        sound = self.folder / "sound.gguf"
        self._forms = [parse(make(sound, path)) for make in (adapter_files.gguf_adapter, adapter_files.control_vector)]
        self._folder = adapter_files.peft_adapter(path)
        self._expected = self._logits("")

    def attack(self, seed: int) -> None:
        """Load a damaged adapter; if it loads, decode with it and without."""
        rng, place = np.random.default_rng([seed, 5]), self.folder / "broken"
        shutil.rmtree(place, ignore_errors=True)
        if rng.random() < 0.5:
            place.mkdir()
            place /= "adapter.gguf"
            place.write_bytes(gguf_mutations.mutated(rng, self._forms[rng.integers(len(self._forms))]))
        else:
            folders.write(folders.mutated(rng, self._folder), place)
        self._model.adapters.load(place, "broken")
        try:
            self._logits("broken")
        finally:
            self._model.adapters.unload("broken")
        if not np.array_equal(self._logits(""), self._expected):
            raise Nonsense("the logits without adapters changed")

    def _logits(self, name: str) -> np.ndarray:
        with self._model.new_context(ContextOptions(n_ctx=64, n_batch=32)) as context:
            context.set_adapters(0, {name: 1.0} if name else {})
            return _decoded(context, [3, 70, 99, 5, 41], self._model.vocab)


class Dumps(Kind):
    """Dumps with right checksums, restored next to a sequence that must not change."""

    _FAMILIES: Sequence[str] = ("llama", "gemma3")

    def prepare(self) -> None:
        """Contexts of several models and KV types, and their dumps."""
        backend = make_backend(self.backend)
        self._targets = []
        for family in self._FAMILIES:
            model = backend.load(family_model(self.folder, family), ModelOptions("cpu", 1))
            for kv_type in ("f32", "f16", "bf16", "q8_0", "q4_0"):
                try:
                    self._targets.append(_Target(model, KvType(kv_type)))
                except InvalidOption:  # this backend lacks the KV type
                    continue

    def attack(self, seed: int) -> None:
        """Restore a damaged dump; if it is accepted, decode more tokens in it and in the other sequence."""
        target = self._targets[seed % len(self._targets)]
        try:
            target.attack(seed // len(self._targets))
        except SlmError:
            target.check_bystander()
            raise
        except BaseException:
            target.renew()
            raise


class StateDumps(Dumps):
    """Dumps of models with recurrent layers."""

    _FAMILIES = _STATES


class _Target:
    def __init__(self, model: BackendModel, kv_type: KvType) -> None:
        self._model = model
        self._options = ContextOptions(64, 4, 32, kv_type, kv_type)
        self._context = model.new_context(self._options)
        tokens = [3, 70, 99, 5, 41, 200, 7, 11]
        self._tokens, self._next = tokens, [17]
        _decoded(self._context, tokens, model.vocab)
        self._expected = self._beside()
        self._dumps = self._sound()

    def renew(self) -> None:
        self._context.close()
        self._context = self._model.new_context(self._options)
        _decoded(self._context, self._tokens, self._model.vocab)

    def attack(self, seed: int) -> None:
        context, vocab = self._context, self._model.vocab
        context.restore(1, dump_mutations.mutated(seed, self._dumps))
        if any(not -1 <= token < vocab.size for token in context.tokens(1)):
            raise Nonsense(f"restored tokens {context.tokens(1)}")
        if context.n_free:
            _check_finite(_decoded(context, self._next, vocab, 1), "the restored sequence")
        context.drop(1)
        self.check_bystander()

    def check_bystander(self) -> None:
        logits = self._beside()
        _check_finite(logits, "a sequence beside the restored one")
        error = np.linalg.norm(logits - self._expected) / np.linalg.norm(self._expected)
        # Other KV cells change the order of sums and the rounding to f16, 2**-11 each, over a few layers.
        if error > 2e-2:
            raise Nonsense(f"the logits of a sequence beside the restored one moved by {error:.1e}")

    def _beside(self) -> np.ndarray:
        """The logits after sequence 0, computed on a fork."""
        self._context.fork(0, 2)
        try:
            return _decoded(self._context, self._next, self._model.vocab, 2)
        finally:
            self._context.drop(2)

    def _sound(self) -> list[bytes]:
        context, vocab = self._context, self._model.vocab
        dumps = [context.dump(0)]
        _decoded(context, self._tokens[:5], vocab, 1)
        if context.edit_level.name == "CUT":
            context.cut(Pos(1, 1), Pos(1, 3))
            dumps.append(context.dump(1))
        if Capability.EMBEDDING_INPUT in context.capabilities:
            rows = np.random.default_rng(0).standard_normal((3, self._model.info.n_embd)).astype(np.float32)
            batch = context.new_batch()
            batch.add_embeddings(rows, Pos(1, context.length(1)), logits="last")
            context.decode(batch)
            dumps += [context.dump(1)] * 2
        context.drop(1)
        return dumps


def _check_finite(logits: np.ndarray, source: str) -> None:
    if not np.isfinite(logits).all():
        raise Nonsense(f"the logits of {source} are not finite")


class Constraints(Kind):
    """Schemas, grammars and expressions."""

    def prepare(self) -> None:
        """The vocabulary."""
        with GgufFile.open(family_model(self.folder, "llama")) as gguf:
            self._vocab = build_vocab(gguf)

    def attack(self, seed: int) -> None:
        """Compile a constraint, and advance it by some tokens."""
        rng = np.random.default_rng([seed, 3])
        constraint = constraints.compile(text_mutations.mutated(rng), self._vocab)
        for _ in range(12):
            tokens = np.flatnonzero(constraint.allowed)
            if not len(tokens):
                return
            token = int(rng.choice(tokens))
            try:
                constraint.advance(token)
            except InvalidToken as error:
                raise Nonsense(f"token {token} is allowed and refused: {error}") from error
            if token in self._vocab.eog_ids:
                return
        constraint.clone().state()


class Templates(Kind):
    """Chat templates."""

    def prepare(self) -> None:
        """Templates need no preparation."""

    def attack(self, seed: int) -> None:
        """Compile a template and render a conversation."""
        template_mutations.attack(np.random.default_rng([seed, 4]))


KINDS: dict[str, tuple[Callable[[str, Path], Kind], tuple[str, ...]]] = {
    "files": (Files, ("native", "llamacpp", "onnx")),
    "dumps": (Dumps, ("native", "llamacpp", "onnx")),
    "states": (StateDumps, ("native", "llamacpp")),
    "folders": (Folders, ("native", "onnx")),
    "conversions": (Conversions, ("llamacpp",)),
    "adapters": (Adapters, ("native", "llamacpp", "onnx")),
    "constraints": (Constraints, ("core",)),
    "templates": (Templates, ("core",)),
}
"""By name: the kind of inputs, and the backends that it attacks."""
assert set(_FILE_FAMILIES) <= FAMILIES.keys() | ENCODERS.keys() | SMALL.keys()

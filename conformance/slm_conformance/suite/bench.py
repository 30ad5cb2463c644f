"""The bench of a scenario: one backend, one model, and methods to feed contexts and check results."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from slm_conformance.oracle.adapters import RandomAdapter
from slm_conformance.oracle.broken import with_broken_token
from slm_conformance.oracle.factories import WeightType, make_tiny_model, shape_name
from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.reference import Reference
from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.state_reference import StateWeights
from slm_conformance.oracle.twin import Oracle, Twin
from slm_conformance.oracle.weights import Weights
from slm_conformance.suite.child import OtherProcess
from slm_conformance.suite.tolerance import Tolerance, random_tokens, relative_errors
from slm_conformance.suite.workshop import Rows, Workshop
from slm_core.errors import SlmError, UnsupportedModel
from slm_core.formatting import formatter
from slm_core.protocols import Backend, BackendModel, Batch, Context, Formatter, Vocab
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, Pos

_TODAY = datetime.datetime(2026, 1, 15, tzinfo=datetime.UTC)  # some chat formats contain the date
_TWIN_N_CTX, _TWIN_N_BATCH = 1024, 256
_UNRELATED = 0.5
"""The mean error that is allowed with a KV type if the model has no reference. The error of the type is then unknown,
and the expected rows are the model's, with its most exact KV type. Wrong keys and values give an error of about 1."""


class Bench:
    """The bench of one scenario. Its contexts and models are closed after the scenario.

    Args:
        workshop: the shared files and models.
        name: name of the model.

    Attributes:
        notes: text for reports about a scenario that holds.
    """

    def __init__(self, workshop: Workshop, name: str) -> None:
        self.workshop = workshop
        self.name = name
        self.notes: list[str] = []
        self._stack = ExitStack()

    def note(self, text: str) -> None:
        """Add a note about a scenario that holds to the report."""
        self.notes.append(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # What is under test.

    @property
    def backend(self) -> Backend:
        """The backend."""
        return self.workshop.backend

    @property
    def model(self) -> BackendModel:
        """The model; shared, so no scenario may close it."""
        return self.workshop.model(self.name)

    @property
    def path(self) -> Path:
        """The model's file."""
        return self.workshop.source(self.name).path

    @property
    def calm_name(self) -> str:
        """The name of a tiny model of the same shape in which attention and its rounding errors have less effect."""
        return f"{shape_name(self.weights().shape)}-{self.weights().main_type}-calm"

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        return self.model.vocab

    @property
    def kv_types(self) -> tuple[KvType, ...]:
        """The supported KV types, the most exact one first."""
        return self.workshop.kv_types(self.name)

    @property
    def kv_type(self) -> KvType:
        """The KV type that scenarios use."""
        return self.kv_types[0]

    @property
    def tolerance(self) -> Tolerance:
        """The tolerances of the model's logits."""
        return self.workshop.tolerance(self.name, self.kv_type)

    @functools.cached_property
    def formatter(self) -> Formatter:
        """The chat format after "+" in the name of the model; without a "+", the format of the model file."""
        return formatter(name=self.name.partition("+")[2] or None, model=self.model, now=_TODAY)

    @functools.cached_property
    def directory(self) -> Path:
        """An empty directory, deleted afterwards."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory()))

    def own_model(self) -> BackendModel:
        """The model, loaded for this scenario only."""
        return self._stack.enter_context(self.workshop.load(self.path))

    def broken_model(self, token: int) -> BackendModel:
        """The model with NaN as the embedding of a token; skips if the embeddings are the output matrix, too.

        Raises:
            InvalidModelFile, UnsupportedModel: the backend refuses such a file.
        """
        if "output.weight" not in self.weights().tensors:
            pytest.skip(f"the logits of {self.name} are products with the embeddings: NaN would be in every row")
        path = with_broken_token(self.path, token, self.directory / "broken.gguf")
        return self._stack.enter_context(self.workshop.load(path))

    def sibling(self, directory: Path) -> Path:
        """A tiny model of the same kind with other weights than the suite's."""
        if isinstance(self.weights(), StateWeights):
            return family_model(directory, self.name.partition("-")[0], seed=99)
        kind = shape_name(self.weights().shape), cast("WeightType", self.weights().main_type)
        sibling = dataclasses.replace(make_tiny_model(*kind, seed=99), metadata=make_tiny_model(*kind).metadata)
        return sibling.write(directory / "sibling.gguf")

    def context(
        self,
        *,
        n_ctx: int = 256,
        n_seq_max: int = 4,
        n_batch: int = 64,
        model: BackendModel | None = None,
        kv_type: KvType | None = None,
    ) -> Context:
        """An empty context."""
        kv_type = kv_type or self.kv_type
        return self.context_with(ContextOptions(n_ctx, n_seq_max, n_batch, kv_type, kv_type), model)

    def context_with(self, options: ContextOptions, model: BackendModel | None = None) -> Context:
        """An empty context with these options."""
        return self._stack.enter_context((model or self.model).new_context(options))

    def weights(self) -> Weights:
        """The model's weights; skips if the reference cannot run them."""
        weights = self.workshop.source(self.name).weights
        if weights is None:
            pytest.skip(f"no reference for {self.name}: it is for llama, qwen2, qwen3 and qwen2vl in F32, F16 and Q8_0")
        return weights

    def requires_toy(self) -> None:
        """Skip the scenario if the toy cannot run the model."""
        if isinstance(self.weights(), StateWeights):
            pytest.skip(f"the toy does not run {self.name}: it has no states")

    def reference(self) -> Reference:
        """An empty float64 reference of the model; skips if it cannot run the model."""
        return reference_of(self.weights())

    def oracle(self) -> Oracle:
        """An empty reference; for models that the reference cannot run, the same engine with plain decoding."""
        weights = self.workshop.source(self.name).weights
        if weights is not None:
            return reference_of(weights)
        return Twin(self.context(n_ctx=_TWIN_N_CTX, n_seq_max=1, n_batch=_TWIN_N_BATCH))

    @property
    def edit_level(self) -> EditLevel:
        """The edit level that contexts of this model declare."""
        return self.workshop.declared(self.name)[0]

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that contexts of this model declare."""
        return self.workshop.declared(self.name)[1]

    def requires(self, level: EditLevel) -> None:
        """Skip the scenario if the backend does not run the model, or declares a lower edit level."""
        refusal = self.workshop.refusal(self.name)
        if refusal is not None:
            pytest.skip(f"declared absent: {self.backend.name} does not run {self.name}: {refusal}")
        if self.edit_level < level:
            pytest.skip(f"declared absent: the edit level is {self.edit_level.name}, this needs {level.name}")

    def adapter(self, seed: int = 1) -> RandomAdapter:
        """A random adapter, loaded for the suite's model; skips if the backend takes none, or there is no reference."""
        weights = self.weights()
        if Capability.ADAPTERS not in self.capabilities:
            pytest.skip("declared absent: adapters")
        adapter = self.workshop.adapter(self.name, seed)
        if not adapter.changes:
            pytest.skip(f"{self.name} has no matrix that random adapters change, in {len(weights.tensors)} tensors")
        return adapter

    def control_vector(self, seed: int = 1) -> RandomAdapter:
        """A random control vector, loaded for the suite's model; skips if the backend takes none, as ``adapter``."""
        self.weights()
        if Capability.ADAPTERS not in self.capabilities:
            pytest.skip("declared absent: adapters")
        try:
            return self.workshop.control_vector(self.name, seed)
        except UnsupportedModel as error:
            pytest.skip(f"refused: control vectors of {self.name}: {error}")

    # Actions of a scenario.

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        """Random tokens of the model's vocabulary; equal for equal arguments."""
        return list(random_tokens(self.model.info.n_vocab, n, seed))

    def feed(self, context: Context, tokens: Sequence[int], seq_id: int = 0, chunk: int | None = None) -> Rows:
        """Append tokens to a sequence, ``chunk`` at a time; returns the logits after each, float32 [T, V]."""
        chunk = chunk or context.n_batch
        rows = []
        for first in range(0, len(tokens), chunk):
            batch = context.new_batch()
            batch.extend(tokens[first : first + chunk], Pos(seq_id, context.length(seq_id)), logits="all")
            rows.append(context.decode(batch).copy())
        return np.concatenate(rows)

    def batch(self, context: Context, *runs: tuple[int, int, Sequence[int]]) -> Batch:
        """A batch of runs (sequence, first position, tokens) with all logits requested."""
        batch = context.new_batch()
        for seq_id, first, tokens in runs:
            batch.extend(tokens, Pos(seq_id, first), logits="all")
        return batch

    def in_another_process(self) -> OtherProcess:
        """A process that decoded 40 tokens of this model, ``tokens(40)``; started once for all scenarios."""
        return self.workshop.other_process(self.name)

    # Checks of a scenario.

    def agree(self, rows: Rows, expected: Rows, what: str, allowed: Tolerance | None = None) -> None:
        """Fail if a row of logits is further from the expected one than the tolerance."""
        self._compare(rows, expected, what, (allowed or self.tolerance).row)

    def same(self, rows: Rows, others: Rows, what: str) -> None:
        """Fail if two ways to decode the same tokens differ by more than two tolerances, as each may be off by one."""
        self._compare(rows, others, what, 2 * self.tolerance.row)

    def agree_in_the_mean(self, rows: Rows, expected: Rows, what: str, kv_type: KvType, factor: float = 1) -> None:
        """Fail if the mean error of rows exceeds the tolerance for a KV type, times ``factor``."""
        has_reference = self.workshop.source(self.name).weights is not None
        allowed = factor * self.workshop.tolerance(self.name, kv_type).mean if has_reference else _UNRELATED
        errors = relative_errors(rows, expected)
        if not errors.mean() <= allowed:
            pytest.fail(
                f"{what}: the logits of {len(rows)} tokens differ by {errors.mean():.2e} of their norm in the mean, and"
                f" by {errors.max():.2e} at most (allowed in the mean: {allowed:.1e})",
                pytrace=False,
            )

    def states_agree(self, rows: Rows, expected: Rows, what: str, allowed: Tolerance | None = None) -> None:
        """Fail if a row of hidden states is further from the expected one than the tolerance."""
        self._compare(rows, expected, what, (allowed or self.tolerance).state)

    def chosen(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        what: str,
        change: Callable[[int, Rows], Rows] = lambda i, row: row,
        factor: float = 1,
    ) -> None:
        """Fail if a greedy token is not the best after the tokens before it, within the tolerance.

        The tokens are decoded as they are (teacher forcing), so a choice between two equally good tokens does not
        change later comparisons.

        Args:
            prompt: the tokens before.
            tokens: the choices, in order.
            what: for the message.
            change: the change of the logits before choice ``i``, such as a penalty or the mask of a constraint.
            factor: by how much ``change`` may increase a difference of logits.
        """
        rows, n_gaps = self._rows_before(prompt, tokens)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            changed = change(i, row)
            best, slack = int(changed.argmax()), n_gaps * factor * self.tolerance.gap * float(np.linalg.norm(row))
            if not changed[token] >= changed[best] - slack:
                pytest.fail(
                    f"{what}: token {i} is {token}, with logit {changed[token]:.4f}; the largest is that of token"
                    f" {best}, {changed[best]:.4f} (allowed: {slack:.1e} behind it)",
                    pytrace=False,
                )

    def same_choices(self, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], what: str) -> None:
        """Fail if two greedy answers diverge although the better token was clear (clause 9).

        Where they diverge, both tokens must be the best within the tolerance. Later tokens have another history.
        """
        n = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), -1)
        if n < 0:
            assert len(first) == len(second), f"{what}: {len(first)} and {len(second)} tokens, the same up to there"
            return
        for token in (first[n], second[n]):
            self.chosen([*prompt, *first[:n]], [token], f"{what}: the answers part after {n} tokens, and there")

    def log_probabilities_agree(
        self, prompt: Sequence[int], tokens: Sequence[int], actual: Sequence[float], what: str
    ) -> None:
        """Fail if the error of a token's log-probability, after the tokens before it, exceeds the tolerance."""
        rows, n_gaps = self._rows_before(prompt, tokens)
        expected = log_softmax(rows)[np.arange(len(tokens)), list(tokens)]
        # One gap for rows of the reference, two for rows of the engine: its errors may be in opposite directions.
        allowed = 2 * min(n_gaps, 2) * self.tolerance.gap * np.linalg.norm(rows, axis=1) + 1e-5
        errors = np.abs(np.asarray(actual) - expected)
        worst = int(np.argmax(errors - allowed))
        if not errors[worst] <= allowed[worst]:
            pytest.fail(
                f"{what}: token {worst} has log-probability {actual[worst]:.5f}, expected {expected[worst]:.5f}"
                f" (allowed: {allowed[worst]:.1e} apart)",
                pytrace=False,
            )

    def _rows_before(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Rows, int]:
        """The row before each token, and by how many gaps a choice may be below the best token of its row.

        The rows are the reference's, or the backend's if the reference cannot run the model. ``Tolerance.gap`` derives
        the number of gaps.
        """
        history = [*prompt, *tokens]
        if self.workshop.source(self.name).weights is not None:
            return self.reference().decode(history)[len(prompt) - 1 : -1], 1
        return self.feed(self.context(), history)[len(prompt) - 1 : -1], 3

    @staticmethod
    def _compare(rows: Rows, expected: Rows, what: str, allowed: float) -> None:
        if rows.shape != expected.shape:
            pytest.fail(f"{what}: rows of shape {rows.shape}, expected {expected.shape}", pytrace=False)
        errors = relative_errors(rows, expected)
        worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        if not errors[worst] <= allowed:
            pytest.fail(
                f"{what}: row {worst} of {len(rows)} differs by {errors[worst]:.2e} of its norm"
                f" (allowed: {allowed:.1e})",
                pytrace=False,
            )

    @contextmanager
    def refused(self, why: str, *errors: type[SlmError], context: Context | None = None) -> Iterator[None]:
        """The block must raise one of ``errors``, with a one-line message, and leave ``context`` as it was."""
        before = None if context is None else contents_of(context)
        expected = " or ".join(error.__name__ for error in errors)
        try:
            yield
        except errors as error:
            message = str(error)
            assert message and "\n" not in message, f"{why}: the message of {expected} is not one line: {message!r}"
        except Exception as error:
            raise AssertionError(f"{why}: raised {type(error).__name__} ({error}), not {expected}") from error
        else:
            pytest.fail(f"{why}: accepted, but the contract says {expected}", pytrace=False)
        if context is not None:
            assert contents_of(context) == before, f"{why}: refused with {expected}, but the context changed"


def log_softmax(rows: Rows) -> NDArray[np.float64]:
    """Log-probabilities of rows of logits, float64 [..., V]."""
    wide = rows.astype(np.float64)
    return np.asarray(wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True))


def contents_of(context: Context) -> tuple[object, ...]:
    """The tokens of all sequences of a context, and its ``n_free``."""
    return (context.n_free, *(context.tokens(seq_id) for seq_id in range(context.n_seq_max)))

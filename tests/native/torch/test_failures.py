"""A device that runs out of memory during a batch raises an error of the contract and changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.errors import DecodeFailed
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")


def test_out_of_memory_is_reported_and_changes_nothing(tmp_path, feed, random_tokens, monkeypatch):
    path = make_tiny_model("llama").write(tmp_path / "tiny.gguf")
    options = ModelOptions(device="cpu", backend_options={"tier": "torch"})
    with NativeBackend().load(path, options) as model:
        context, untouched = (model.new_context(ContextOptions(n_ctx=256)) for _ in range(2))
        for each in (context, untouched):
            feed(each, random_tokens(70))
        kernels, calls = context._transformer._kernels, []

        def fail(*args: object, **named: object) -> None:
            calls.append(args)
            if len(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return attention(*args, **named)

        attention = kernels.attention_over_runs
        batch = context.new_batch()
        batch.extend(random_tokens(10, seed=1), Pos(0, 70))
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "attention_over_runs", fail)
            with pytest.raises(DecodeFailed, match=r"batch of 10 tokens: CUDA out of memory.*20\.00 MiB"):
                context.decode(batch)
        assert context.length(0) == 70
        more = random_tokens(20, seed=2)
        np.testing.assert_array_equal(feed(context, more), feed(untouched, more))

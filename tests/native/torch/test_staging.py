"""The inputs of a step are uploaded unchanged into one buffer, for any types and shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from slm_native.kernels.torch.staging import StepUploader, tensors_of  # noqa: E402


class Named(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Inputs:
    x: Any
    rest: Any
    label: str = "unchanged"


def input_tree(seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    bytes_, shared = torch.from_numpy(rng.integers(0, 255, 3, np.uint8)), torch.from_numpy(rng.standard_normal((3, 5)))
    ids = torch.from_numpy(rng.integers(0, 9, (2, 7)))
    transposed = torch.from_numpy(rng.standard_normal((4, 6)).astype(np.float32)).T  # not C-contiguous
    return Inputs(bytes_, {"k": [shared, None, 3], 7: (Named(shared, ids), transposed)}, "x" * seed)


def uploader() -> StepUploader:
    return StepUploader(torch.device("cpu"))


def test_uploads_keep_numbers_types_shapes_and_sharing():
    inputs = input_tree()
    staged = uploader().upload(inputs)
    uploaded = staged.tree
    actual, expected = tensors_of(uploaded), tensors_of(inputs)
    assert [x.dtype for x in actual] == [x.dtype for x in expected] and len(actual) == 4
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y) and x.is_contiguous()
        assert x.untyped_storage().data_ptr() == staged.memory.untyped_storage().data_ptr(), (
            "the tensor is outside of the buffer"
        )
    assert uploaded.rest["k"][0] is uploaded.rest[7][0].a and uploaded.rest["k"][1:] == [None, 3]
    assert isinstance(uploaded.rest[7][0], Named) and (uploaded.label, inputs.rest["k"][2]) == ("", 3)


def test_refill_writes_to_the_same_addresses():
    upload_buffer, first, second = uploader(), input_tree(1), input_tree(2)
    staged = upload_buffer.upload(first)
    addresses = [x.data_ptr() for x in tensors_of(staged.tree)]
    other = upload_buffer.upload(first)
    upload_buffer.refill(staged, tensors_of(second))
    assert [x.data_ptr() for x in tensors_of(staged.tree)] == addresses
    assert all(map(torch.equal, tensors_of(staged.tree), tensors_of(second)))
    assert all(map(torch.equal, tensors_of(other.tree), tensors_of(first))), "refill changed another upload"


def test_empty_inputs():
    inputs = {"a": [1, "b"], "n": torch.zeros(0, 4)}
    assert uploader().upload(inputs).tree["n"].shape == (0, 4)
    assert uploader().upload({}).tree == {}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_step_uploads_its_inputs_in_one_copy(tmp_path, monkeypatch, architecture):
    """Token ids, pages, slots, page tables and angles of a decode step are sent in one copy, and nothing else."""
    path, sent_bytes = make_tiny_model(architecture).write(tmp_path / "tiny.gguf"), []
    with (
        NativeBackend().load(path, ModelOptions(device="cpu", backend_options={"tier": "torch"})) as model,
        model.new_context(ContextOptions(256, 3, 64)) as context,
    ):
        send, kernels = StepUploader._send, model._transformer._kernels

        def recording_send(self, tensors, offsets, target):
            sent_bytes.append(sum(tensor.nbytes for tensor in tensors))
            send(self, tensors, offsets, target)

        for i in range(3):
            batch = context.new_batch()
            for seq_id in range(3):
                batch.add(5 + seq_id, Pos(seq_id, i), logits=i > 0)
            if i == 1:
                monkeypatch.setattr(StepUploader, "_send", recording_send)
                monkeypatch.setattr(kernels, "from_host", lambda values: pytest.fail("a second copy"))
            context.decode(batch)
    assert len(sent_bytes) == 2 and min(sent_bytes) > 100

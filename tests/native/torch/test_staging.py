"""What a step is told arrives as it was, in one piece of memory, whatever its types and shapes."""

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
class Held:
    x: Any
    rest: Any
    told: str = "as it is"


def tree(seed: int = 0) -> Held:
    rng = np.random.default_rng(seed)
    bytes_, shared = torch.from_numpy(rng.integers(0, 255, 3, np.uint8)), torch.from_numpy(rng.standard_normal((3, 5)))
    ids = torch.from_numpy(rng.integers(0, 9, (2, 7)))
    turned = torch.from_numpy(rng.standard_normal((4, 6)).astype(np.float32)).T  # rows do not lie one after another
    return Held(bytes_, {"k": [shared, None, 3], 7: (Named(shared, ids), turned)}, "x" * seed)


def uploader() -> StepUploader:
    return StepUploader(torch.device("cpu"))


def test_numbers_types_shapes_and_sharing_stay():
    told = tree()
    staged = uploader().upload(told)
    arrived = staged.tree
    found, wanted = tensors_of(arrived), tensors_of(told)
    assert [x.dtype for x in found] == [x.dtype for x in wanted] and len(found) == 4
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y) and x.is_contiguous()
        assert x.untyped_storage().data_ptr() == staged.memory.untyped_storage().data_ptr(), "a copy of its own"
    assert arrived.rest["k"][0] is arrived.rest[7][0].a and arrived.rest["k"][1:] == [None, 3]
    assert isinstance(arrived.rest[7][0], Named) and (arrived.told, told.rest["k"][2]) == ("", 3)


def test_later_numbers_come_to_the_same_place():
    up, first, second = uploader(), tree(1), tree(2)
    staged = up.upload(first)
    places = [x.data_ptr() for x in tensors_of(staged.tree)]
    other = up.upload(first)
    up.refill(staged, tensors_of(second))
    assert [x.data_ptr() for x in tensors_of(staged.tree)] == places
    assert all(map(torch.equal, tensors_of(staged.tree), tensors_of(second)))
    assert all(map(torch.equal, tensors_of(other.tree), tensors_of(first))), "what came before was written to"


def test_nothing_is_nothing():
    told = {"a": [1, "b"], "n": torch.zeros(0, 4)}
    assert uploader().upload(told).tree["n"].shape == (0, 4)
    assert uploader().upload({}).tree == {}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_step_is_one_copy(tmp_path, monkeypatch, architecture):
    """Decoding of several sequences: ids, places, tables and angles are sent together, and nothing else is."""
    path, sent = make_tiny_model(architecture).write(tmp_path / "tiny.gguf"), []
    with (
        NativeBackend().load(path, ModelOptions(device="cpu", backend_options={"tier": "torch"})) as model,
        model.new_context(ContextOptions(256, 3, 64)) as context,
    ):
        send, kernels = StepUploader._send, model._transformer._kernels

        def counted(self, tensors, offsets, target):
            sent.append(sum(tensor.nbytes for tensor in tensors))
            send(self, tensors, offsets, target)

        for i in range(3):
            batch = context.new_batch()
            for seq_id in range(3):
                batch.add(5 + seq_id, Pos(seq_id, i), logits=i > 0)
            if i == 1:
                monkeypatch.setattr(StepUploader, "_send", counted)
                monkeypatch.setattr(kernels, "from_host", lambda values: pytest.fail("a copy beside it"))
            context.decode(batch)
    assert len(sent) == 2 and min(sent) > 100

"""GGUF adapters: reading, writing, merging; damaged files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from native.exact import exact
from slm_conformance.oracle.adapters import adapter_metadata, merged, random_adapter, usual_matrices
from slm_conformance.oracle.factories import TinyModel, make_tiny_model
from slm_conformance.oracle.gguf_writer import StoredTensor, write_gguf
from slm_conformance.oracle.references import reference_of
from slm_conformance.oracle.weights import Weights
from slm_core.adapters import merge, read_adapter, write_adapter
from slm_core.errors import InvalidModelFile, InvalidOption, ModelError, UnsupportedInput, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.quant import dequantize
from slm_core.types import Capability, Pos

TOKENS = list(range(5, 30))
BOUND = 1e-4  # clause 9 of the contract: float32, relative


def logits(path: Path, adapters: dict[Path, float]) -> np.ndarray:
    with slm.load(path, backend="native", tier="reference") as model:
        scales = {model.adapters.load(adapter).name: scale for adapter, scale in adapters.items()}
        with model.model.new_context(exact(n_ctx=64, n_batch=64)) as context:
            context.set_adapters(0, scales)
            batch = context.new_batch()
            batch.extend(TOKENS, Pos(0, 0), logits="all")
            return np.array(context.decode(batch))


def test_written_and_read_again(tiny, base, tmp_path) -> None:
    """All numbers, and the fingerprint, are the same, embeddings and ranks of different size included."""
    _, weights = tiny
    names = ["blk.0.attn_q.weight", "output.weight", "token_embd.weight"]
    original = random_adapter(tmp_path / "a.gguf", "llama", weights, names, 1)
    adapter = read_adapter(original.path, base)
    write_adapter(adapter, "llama", tmp_path / "b.gguf")
    again = read_adapter(tmp_path / "b.gguf", base)
    assert again.info.fingerprint == adapter.info.fingerprint
    for name, change in original.changes.items():
        np.testing.assert_allclose(again.changes[name].dense(), change, rtol=1e-5, atol=1e-7)


def test_quantized_adapters(tiny, base, tmp_path) -> None:
    """Changes in F16 and Q8_0 are dequantized."""
    _, weights = tiny
    rng, out, into = np.random.default_rng(0), *weights.tensors["blk.0.ffn_up.weight"].shape
    a, b = rng.normal(size=(32, into)).astype(np.float32), rng.normal(size=(out, 32)).astype(np.float32)
    tensors = {"blk.0.ffn_up.weight.lora_a": StoredTensor.pack(a, "q8_0"),
               "blk.0.ffn_up.weight.lora_b": StoredTensor.pack(b, "f16")}  # fmt: skip
    change = read_adapter(write_gguf(tmp_path / "q.gguf", adapter_metadata("llama"), tensors), base).changes
    np.testing.assert_array_equal(change["blk.0.ffn_up.weight"].a, tensors["blk.0.ffn_up.weight.lora_a"].values())
    np.testing.assert_array_equal(change["blk.0.ffn_up.weight"].b, b.astype(np.float16).astype(np.float32))


def test_without_alpha(tiny, base, tmp_path) -> None:
    """Without alpha, or with 0, a change is B A, as in llama.cpp."""
    _, weights = tiny
    out, into = weights.tensors["blk.0.ffn_up.weight"].shape
    ones = {"blk.0.ffn_up.weight.lora_a": StoredTensor.pack(np.ones((4, into), np.float32), "f32"),
            "blk.0.ffn_up.weight.lora_b": StoredTensor.pack(np.ones((out, 4), np.float32), "f32")}  # fmt: skip
    metadata = adapter_metadata("llama")
    for changed in ({key: value for key, value in metadata.items() if not key.endswith("alpha")},
                    {**metadata, "adapter.lora.alpha": 0.0}):  # fmt: skip
        adapter = read_adapter(write_gguf(tmp_path / "a.gguf", changed, ones), base)
        np.testing.assert_array_equal(adapter.changes["blk.0.ffn_up.weight"].dense(), np.full((out, into), 4.0))


def test_a_scale_that_exceeds_float32(tiny, base, tmp_path) -> None:
    """A and B are finite, and B times the scale is not."""
    _, weights = tiny
    out, into = weights.tensors["blk.0.ffn_up.weight"].shape
    large = {"blk.0.ffn_up.weight.lora_a": StoredTensor.pack(np.ones((4, into), np.float32), "f32"),
             "blk.0.ffn_up.weight.lora_b": StoredTensor.pack(np.full((out, 4), 1e3, np.float32), "f32")}  # fmt: skip
    path = write_gguf(tmp_path / "a.gguf", {**adapter_metadata("llama"), "adapter.lora.alpha": 3e38}, large)
    with pytest.raises(InvalidModelFile, match="not finite"):
        read_adapter(path, base)


@pytest.mark.parametrize(
    ("metadata", "kind", "words"),
    [
        ({"general.type": "model"}, InvalidModelFile, "not an adapter"),
        ({"adapter.type": "control_vector"}, UnsupportedModel, "control_vector"),
        ({"general.architecture": "qwen2"}, InvalidModelFile, "an adapter of 'qwen2' models"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, UnsupportedModel, "aLoRA"),
    ],
)
def test_refused_files(metadata, kind, words, tiny, base, tmp_path) -> None:
    _, weights = tiny
    adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
    with GgufFile.open(adapter.path) as file:
        tensors = {
            name: StoredTensor(info.shape, "f32", bytes(file.tensor_data(name))) for name, info in file.tensors.items()
        }
    path = write_gguf(tmp_path / "b.gguf", {**adapter_metadata("llama"), **metadata}, tensors)
    with pytest.raises(kind, match=words):
        read_adapter(path, base)


def write_shards(folder: Path, model: TinyModel) -> list[Path]:
    """A model as two files, each with half of its tensors."""
    shards, names = [], sorted(model.tensors)
    for i in range(2):
        split = {"split.no": i, "split.count": 2, "split.tensors.count": len(names)}
        shard = folder / f"s-0000{i + 1}-of-00002.gguf"
        shards.append(write_gguf(shard, {**model.metadata, **split}, {n: model.tensors[n] for n in names[i::2]}))
    return shards


class TestMerging:
    """A merged file has the logits of the model with its adapters."""

    def test_equals_adapters(self, tiny, tmp_path) -> None:
        path, weights = tiny
        parts = [(random_adapter(tmp_path / f"{i}.gguf", "llama", weights, usual_matrices(weights), i), 0.5 - i)
                 for i in range(2)]  # fmt: skip
        shares: list[float] = []
        n_changed = merge(
            path, [(adapter.path, scale) for adapter, scale in parts], tmp_path / "m.gguf", progress=shares.append
        )
        assert n_changed == len(usual_matrices(weights))
        assert shares == sorted(shares) and shares[-1] == 1.0
        rows = logits(tmp_path / "m.gguf", {})
        with_adapters = logits(path, {adapter.path: scale for adapter, scale in parts})
        np.testing.assert_allclose(rows, with_adapters, rtol=1e-3, atol=1e-4)
        expected = reference_of(merged(weights, *parts)).decode(TOKENS)
        assert (np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)).max() < BOUND

    def test_types(self, tmp_path) -> None:
        """Changed matrices keep their type, or get the one that is asked for; others are copied byte for byte."""
        model = make_tiny_model("llama", "q8_0")
        path, weights = model.write(tmp_path / "q.gguf"), Weights.of(model)
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.1.ffn_up.weight"], 1)
        expected = weights.tensors["blk.1.ffn_up.weight"] + adapter.changes["blk.1.ffn_up.weight"]
        for dtype, name, error in ((None, "Q8_0", 1 / 127), ("f16", "F16", 2**-10), ("F32", "F32", 2**-20)):
            target = tmp_path / f"{name}.gguf"
            merge(path, [(adapter.path, 1.0)], target, ggml_type=dtype)
            with GgufFile.open(target) as file, GgufFile.open(path) as before:
                info = file.tensors["blk.1.ffn_up.weight"]
                assert info.ggml_type.name == name
                values = dequantize(file.tensor_data(info.name), info.ggml_type, info.shape)
                assert np.abs(values - expected).max() <= error * np.abs(expected).max()
                for other in before.tensors.keys() - {info.name}:
                    np.testing.assert_array_equal(file.tensor_data(other), before.tensor_data(other))
                assert {key: file.metadata.stored(key) for key in file.metadata} == {
                    key: before.metadata.stored(key) for key in before.metadata
                }

    @pytest.mark.parametrize(("name", "file_type"), [("F16", 1), ("Q8_0", 7), ("Q5_0", 8)])
    def test_the_file_type_is_that_of_most_weights(self, tiny, tmp_path, name, file_type) -> None:
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, usual_matrices(weights), 1)
        merge(path, [(adapter.path, 1.0)], tmp_path / "m.gguf", ggml_type=name)
        with GgufFile.open(tmp_path / "m.gguf") as file:
            n_changed = sum(file.tensors[matrix].n_elements for matrix in usual_matrices(weights))
            assert 2 * n_changed > sum(info.n_elements for info in file.tensors.values()), "most weights are changed"
            assert file.require("general.file_type", int) == file_type

    def test_shards_become_one_file(self, tiny, tmp_path) -> None:
        (path, weights), model = tiny, make_tiny_model("llama", "f32")
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
        shards = write_shards(tmp_path, model)
        for source, target in ((path, tmp_path / "of_file.gguf"), (shards[1], tmp_path / "of_shards.gguf")):
            merge(source, [(adapter.path, 1.0)], target)
        np.testing.assert_array_equal(logits(tmp_path / "of_file.gguf", {}), logits(tmp_path / "of_shards.gguf", {}))

    def test_refusals(self, tiny, tmp_path) -> None:
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
        existing = tmp_path / "taken.gguf"
        existing.write_bytes(b"something")
        for target, options, words in (
            (existing, {}, "there is a file already"),
            (path, {"force": True}, "cannot be the one that is read"),
            (adapter.path, {"force": True}, "cannot be the one that is read"),
            (tmp_path / "new.gguf", {"ggml_type": "Q9_9"}, "cannot be written as 'Q9_9'"),
            (tmp_path / "none" / "new.gguf", {}, "there is no folder"),
        ):
            before = set(tmp_path.iterdir())
            with pytest.raises(InvalidOption, match=words):
                merge(path, [(adapter.path, 1.0)], target, **options)
            assert set(tmp_path.iterdir()) == before
        assert existing.read_bytes() == b"something"

    @pytest.mark.parametrize("scale", [math.nan, math.inf, -1e7])
    def test_scales_out_of_range_are_refused(self, scale, tiny, tmp_path) -> None:
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
        with pytest.raises(InvalidOption, match=r"a\.gguf' is .* \(accepted: -1e6 to 1e6\)"):
            merge(path, [(adapter.path, scale)], tmp_path / "m.gguf")

    def test_weights_that_are_too_large_name_their_tensor(self, tiny, tmp_path) -> None:
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
        with pytest.raises(ModelError, match=r"tensor 'blk\.0\.ffn_up\.weight', merged: .* too large for F16"):
            merge(path, [(adapter.path, 1e6)], tmp_path / "m.gguf", ggml_type="F16")

    def test_no_shard_of_the_model_is_replaced(self, tiny, tmp_path) -> None:
        (_, weights), model = tiny, make_tiny_model("llama", "f32")
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
        shards = write_shards(tmp_path, model)
        with pytest.raises(InvalidOption, match="cannot be the one that is read"):
            merge(shards[0], [(adapter.path, 1.0)], shards[1], force=True)

    def test_an_interrupt_leaves_no_file(self, tiny, tmp_path) -> None:
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)

        def interrupt(share: float) -> None:
            raise KeyboardInterrupt

        before = set(tmp_path.iterdir())
        with pytest.raises(KeyboardInterrupt):
            merge(path, [(adapter.path, 1.0)], tmp_path / "m.gguf", progress=interrupt)
        assert set(tmp_path.iterdir()) == before


class TestBackends:
    """What a backend cannot compute, it refuses."""

    def test_llamacpp_refuses_what_llama_cpp_ignores(self, tiny, tmp_path) -> None:
        path, _ = tiny
        tensors = {"rope_freqs.weight.lora_a": StoredTensor.pack(np.ones((2, 16), np.float32), "f32"),
                   "rope_freqs.weight.lora_b": StoredTensor.pack(np.ones((1, 2), np.float32), "f32")}  # fmt: skip
        bad = write_gguf(tmp_path / "a.gguf", adapter_metadata("llama"), tensors)
        with (
            slm.load(path, backend="llamacpp", n_threads=1) as model,
            pytest.raises((UnsupportedModel, InvalidModelFile)),
        ):
            model.adapters.load(bad)

    def test_llamacpp_refuses_tied_embeddings(self, tmp_path) -> None:
        """It would end the process: it applies the change of the embedding to the output, whose shape is another."""
        model = make_tiny_model("qwen3", "f32")
        path, weights = model.write(tmp_path / "q.gguf"), Weights.of(model)
        adapter = random_adapter(tmp_path / "a.gguf", "qwen3", weights, ["token_embd.weight"], 1)
        with (
            slm.load(path, backend="llamacpp", n_threads=1) as loaded,
            pytest.raises(UnsupportedModel, match="without output"),
        ):
            loaded.adapters.load(adapter.path)

    def test_offloaded_layers_take_no_adapters(self, tiny, tmp_path) -> None:
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, ["blk.0.ffn_up.weight"], 1)
        with slm.load(path, backend="native", resident_bytes=800_000) as model:
            with pytest.raises(UnsupportedInput, match="offload"):
                model.adapters.load(adapter.path)
            assert Capability.ADAPTERS not in model.new_context(n_ctx=16).capabilities

    def test_many_sets(self, tiny, tmp_path) -> None:
        """More sets than are kept prepared take turns in one context."""
        path, weights = tiny
        adapter = random_adapter(tmp_path / "a.gguf", "llama", weights, usual_matrices(weights), 1)
        scales = [i / 8 for i in range(12)]
        with slm.load(path, backend="native", tier="reference") as model:
            model.adapters.load(adapter.path, "a")
            with model.model.new_context(exact(n_ctx=512, n_seq_max=12, n_batch=64)) as context:
                for seq_id, scale in enumerate(scales):
                    context.set_adapters(seq_id, {"a": scale})
                for step in range(2):
                    batch = context.new_batch()
                    for seq_id in range(12):
                        batch.add(7, Pos(seq_id, step), logits=True)
                    rows = context.decode(batch)
                for scale, row in zip(scales, rows, strict=True):
                    expected = reference_of(merged(weights, (adapter, scale))).decode([7, 7])[1]
                    assert np.linalg.norm(row - expected) / np.linalg.norm(expected) < BOUND

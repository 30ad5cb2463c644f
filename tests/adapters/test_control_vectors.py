"""Control vectors: files, and what they compute on every backend; other implementations are the oracle."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import slm_core as slm
from native.exact import exact
from slm_conformance.oracle.adapters import adapter_metadata, control_vector_metadata, random_control_vector
from slm_conformance.oracle.families import family_model, write_family
from slm_conformance.oracle.gguf_writer import StoredTensor, write_gguf
from slm_core.adapters import BaseModel, merge, read_adapter, write_control_vector
from slm_core.errors import InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.quant import dequantize
from slm_core.types import Capability, Pos

TOKENS = list(range(5, 25))
BOUND = 2e-4  # clause 9 of the contract, relative, of both files
ENGINES = {
    "reference": {"backend": "native", "tier": "reference"},
    "cpu": {"backend": "native", "tier": "cpu", "n_threads": 1},
    "torch": {"backend": "native", "tier": "torch", "device": "cpu"},
    "onnx": {"backend": "onnx", "n_threads": 1, "accuracy_level": 0},
    "llamacpp": {"backend": "llamacpp", "n_threads": 1},
}


def random_directions(n_layers: int, n_embd: int) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(4)
    return {layer: rng.standard_normal(n_embd).astype(np.float32) for layer in range(1, n_layers)}


def outputs(path: Path, engine: str, vector: Path | None = None, scale: float = 1.0) -> np.ndarray:
    """The logits after each token; the hidden states of an encoder."""
    with slm.load(path, **ENGINES[engine]) as model:
        if vector is not None:
            model.adapters.load(vector, "vector")
        with model.model.new_context(exact(n_ctx=64, n_batch=64)) as context:
            context.set_adapters(0, {} if vector is None else {"vector": scale})
            batch = context.new_batch()
            batch.extend(TOKENS, Pos(0, 0), logits="all")
            run = context.embed if Capability.ENCODER in context.capabilities else context.decode
            return np.array(run(batch), np.float64)


def with_biases(path: Path, family: str, bias: str, scale: float, vector: Path) -> Path:
    """Write a control vector, and the model with its directions, scaled, added to a bias of each layer."""
    with GgufFile.open(path) as file:
        base = BaseModel.of(file)
        directions, tensors = random_directions(base.n_layers, base.n_embd), {}
        for name, info in file.tensors.items():
            values = dequantize(file.tensor_data(name), info.ggml_type, info.shape)
            if name.endswith(bias):
                values = values + np.float32(scale) * directions.get(int(name.split(".")[1]), np.float32(0))
            tensors[name] = StoredTensor.pack(values, "f32")
    write_control_vector(directions, vector)
    return write_family(path.with_name("changed.gguf"), family, tensors)


@pytest.mark.parametrize("engine", ENGINES)
def test_equals_a_change_of_a_bias(engine, tmp_path) -> None:
    """The bias of a feed-forward layer is added to the residual stream where the direction is."""
    if engine == "torch":
        pytest.importorskip("torch")
    path, vector = family_model(tmp_path, "gpt2"), tmp_path / "vector.gguf"
    expected = outputs(with_biases(path, "gpt2", ".ffn_down.bias", -0.75, vector), engine)
    plain, steered = outputs(path, engine), outputs(path, engine, vector, -0.75)
    errors = np.linalg.norm(steered - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < BOUND
    assert np.linalg.norm(plain - expected) > 0.05 * np.linalg.norm(expected), "the change of the bias changes nothing"


def test_encoders(tmp_path) -> None:
    """A post-norm encoder: the last norm's bias is added where the direction is. llama.cpp ignores the direction."""
    path, vector = family_model(tmp_path, "bert"), tmp_path / "vector.gguf"
    changed = with_biases(path, "bert", ".layer_output_norm.bias", 1.0, vector)
    for engine in ("reference", "cpu"):
        expected, steered = outputs(changed, engine), outputs(path, engine, vector)
        assert np.linalg.norm(steered - expected) < BOUND * np.linalg.norm(expected)
    with slm.load(path, backend="llamacpp", n_threads=1) as model, pytest.raises(UnsupportedModel, match="ignores"):
        model.adapters.load(vector)


def test_nothing_is_added_without_a_vector(tiny, tmp_path) -> None:
    """The steps of the native engine are the same as before, and its logits the same bits."""
    path, weights = tiny
    control = random_control_vector(tmp_path / "v.gguf", weights, 1)
    before = outputs(path, "cpu")
    with slm.load(path, backend="native", n_threads=1) as model:
        steps = model.model.steps
        model.adapters.load(control.path, "v")
        with model.model.new_context(exact(n_ctx=64, n_batch=64)) as context:
            for scales in ({"v": 1.0}, {}):
                context.drop(0)
                context.set_adapters(0, scales)
                batch = context.new_batch()
                batch.extend(TOKENS, Pos(0, 0), logits="all")
                rows = np.array(context.decode(batch))
        assert model.model.steps == steps
    np.testing.assert_array_equal(rows, before)


class TestFiles:
    def test_as_repeng_writes_them(self, base, tmp_path) -> None:
        """With the gguf package, as ``ControlVector.export_gguf`` of repeng calls it."""
        directions, path = random_directions(base.n_layers, base.n_embd), tmp_path / "happy.gguf"
        writer = gguf.GGUFWriter(path, "controlvector")
        writer.add_string("controlvector.model_hint", "mistral")
        writer.add_uint32("controlvector.layer_count", len(directions))
        for layer, direction in directions.items():
            writer.add_tensor(f"direction.{layer}", direction)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        adapter = read_adapter(path, base)
        assert (adapter.info.name, adapter.info.layers, adapter.info.tensors) == ("happy", (1, 2), ())
        for layer, direction in directions.items():
            np.testing.assert_array_equal(adapter.directions[layer], direction)

    def test_written(self, base, tmp_path) -> None:
        """Read by the gguf package, and the same fingerprint whatever the order and the hint."""
        directions = random_directions(base.n_layers, base.n_embd)
        write_control_vector(directions, tmp_path / "a.gguf", "llama")
        write_control_vector(dict(reversed(directions.items())), tmp_path / "b.gguf")
        reader = gguf.GGUFReader(tmp_path / "a.gguf")
        assert {tensor.name for tensor in reader.tensors} == {f"direction.{layer}" for layer in directions}
        for tensor in reader.tensors:
            np.testing.assert_array_equal(tensor.data, directions[int(tensor.name.partition(".")[2])])
        fields = {name: reader.fields[name].contents() for name in reader.fields if "." in name and "GGUF" not in name}
        assert fields == {
            "general.architecture": "controlvector",
            "controlvector.model_hint": "llama",
            "controlvector.layer_count": 2,
        }
        first, second = (read_adapter(tmp_path / f"{name}.gguf", base).info for name in "ab")
        assert first.fingerprint == second.fingerprint

    @pytest.mark.parametrize(
        ("directions", "words"),
        [
            ({}, "at least one layer"),
            ({0: np.ones(4, np.float32)}, "direction of layer 0"),
            ({1: np.ones((2, 2), np.float32)}, "at least one layer"),
            ({1: np.ones(4, np.float32), 2: np.ones(5, np.float32)}, "of one width"),
            ({1: np.full(4, np.nan, np.float32)}, "direction of layer 1"),
        ],
    )
    def test_nothing_wrong_is_written(self, directions, words, tmp_path) -> None:
        with pytest.raises(InvalidOption, match=words):
            write_control_vector(directions, tmp_path / "v.gguf")
        assert not (tmp_path / "v.gguf").exists()

    @pytest.mark.parametrize(
        ("metadata", "words"),
        [
            ({"general.architecture": "llama"}, "not an adapter"),
            ({"controlvector.model_hint": 7}, "model_hint"),
        ],
    )
    def test_refused_metadata(self, metadata, words, base, tmp_path) -> None:
        direction = StoredTensor.pack(np.ones(base.n_embd, np.float32), "f32")
        path = write_gguf(tmp_path / "v.gguf", control_vector_metadata() | metadata, {"direction.1": direction})
        with pytest.raises(InvalidModelFile, match=words) as refused:
            read_adapter(path, base)
        assert "\n" not in str(refused.value)

    def test_a_width_that_does_not_fit(self, base, tmp_path) -> None:
        """The hint of the file is in the message."""
        write_control_vector({1: np.ones(base.n_embd + 1, np.float32)}, tmp_path / "v.gguf", "gemma")
        with pytest.raises(InvalidModelFile, match=r"96 wide: it is a control vector of another model \('gemma'\)"):
            read_adapter(tmp_path / "v.gguf", base)

    def test_integers_and_duplicates(self, base, tmp_path) -> None:
        """The bytes of a good file, with another type of numbers, and with the name of another tensor."""
        path = tmp_path / "v.gguf"
        write_control_vector(random_directions(3, base.n_embd), path)
        good = path.read_bytes()
        entry = b"direction.1" + struct.pack("<IQI", 1, base.n_embd, 0)
        assert good.count(entry) == 1
        i32 = 26
        for bad, words in (
            (good.replace(entry, entry[:-4] + struct.pack("<I", i32)), r"direction.1 is I32 \(accepted: F32\)"),
            (good.replace(b"direction.2", b"direction.1"), "direction.1"),
        ):
            path.write_bytes(bad)
            with pytest.raises(InvalidModelFile, match=words):
                read_adapter(path, base)

    def test_layers_are_for_control_vectors(self, tiny, base, tmp_path) -> None:
        _, weights = tiny
        tensors = {"blk.0.ffn_up.weight.lora_a": StoredTensor.pack(np.ones((2, 96), np.float32), "f32"),
                   "blk.0.ffn_up.weight.lora_b": StoredTensor.pack(np.ones((160, 2), np.float32), "f32")}  # fmt: skip
        lora = write_gguf(tmp_path / "a.gguf", adapter_metadata("llama"), tensors)
        with pytest.raises(InvalidOption, match="is not a control vector"):
            read_adapter(lora, base, layers=(1, 2))
        control = random_control_vector(tmp_path / "v.gguf", weights, 1)
        assert read_adapter(control.path, base, layers=(2, 40)).info.layers == (2,)
        for layers in ((0, 2), (2, 1), (1.0, 2), (True, 2), (1, 2, 3), 1):
            with pytest.raises(InvalidOption, match="accepted: the first and the last layer"):
                read_adapter(control.path, base, layers=layers)

    def test_merging_is_refused(self, tiny, tmp_path) -> None:
        path, weights = tiny
        control = random_control_vector(tmp_path / "v.gguf", weights, 1)
        with pytest.raises(InvalidOption, match="changes no weights"):
            merge(path, [(control.path, 1.0)], tmp_path / "merged.gguf")
        assert not (tmp_path / "merged.gguf").exists()

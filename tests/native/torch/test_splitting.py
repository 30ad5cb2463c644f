"""Layers on several devices: their placement, and that no operation mixes tensors of two devices.

The test simulates devices on the CPU: a tensor moved to a device is labelled with its name, results inherit the label,
and an operation on tensors with two labels fails, as between two GPUs.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.families import family_model
from slm_core.adapters import write_control_vector
from slm_core.architectures import read_spec
from slm_core.errors import BackendUnavailable, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import ContextOptions, ModelOptions, Pos
from slm_native.backend import NativeBackend
from slm_native.kernels import WeightBytes

torch = pytest.importorskip("torch", reason="the torch tier needs torch: pip install 'slm-core[torch]'")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.weak import WeakTensorKeyDictionary  # noqa: E402

from slm_native.kernels.torch import kernels as torch_kernels  # noqa: E402
from slm_native.kernels.torch import splitting  # noqa: E402
from slm_native.kernels.torch.splitting import counts_by_map, counts_by_memory  # noqa: E402

MIB = 1 << 20


class FakeDevices(TorchDispatchMode):
    """Labels tensors with device names; every operation checks the labels and passes them on."""

    def __init__(self) -> None:
        super().__init__()
        self.names = WeakTensorKeyDictionary()
        self.n_checked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        devices = {self.names[each] for each in tensors if each in self.names}
        assert len(devices) <= 1, f"{func} takes tensors of {' and '.join(sorted(devices))}"
        self.n_checked += bool(devices)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result) if devices else ():
            if isinstance(each, torch.Tensor):
                self.names[each] = next(iter(devices))
        return result

    def to_device(self, tensor, device):
        """Replaces ``Tensor.to``, which does nothing between two names of the CPU."""
        if self.names.get(tensor) == str(device):
            return tensor
        with torch.utils._python_dispatch._disable_current_modes():
            copy = tensor.clone()
        self.names[copy] = str(device)
        return copy


@pytest.fixture
def fake_devices(monkeypatch) -> FakeDevices:
    devices = FakeDevices()
    for module in (splitting, torch_kernels):
        monkeypatch.setattr(module, "to_device", devices.to_device)
    monkeypatch.setattr(splitting, "choose_device", lambda name: torch.device("cpu:0" if name == "auto" else name))
    return devices


def run_session(model, vector=None, name_pages=lambda context: None) -> tuple[list[np.ndarray], bytes]:
    """Logits and a dump of a session: prefills and steps of two sequences, a fork, a cut in shared pages, a restore.

    The second sequence has the control vector, if there is one.
    """
    rng, rows = np.random.default_rng(1), []
    with model.new_context(ContextOptions(n_ctx=512, n_seq_max=3, n_batch=128)) as context:
        name_pages(context)
        if vector is not None:
            model.adapters.load(vector, "vector")
            context.set_adapters(1, {"vector": 0.5})

        def decode(counts: dict[int, int]) -> None:
            batch = context.new_batch()
            for seq_id, n in counts.items():
                start = Pos(seq_id, context.length(seq_id))
                batch.extend(rng.integers(3, 200, n).tolist(), start, logits="all")
            rows.append(context.decode(batch).copy())

        decode({0: 70, 1: 5})
        decode({0: 1, 1: 1})
        context.fork(0, 2, 66)
        if context.edit_level > 1:
            context.cut(Pos(0, 10), Pos(0, 40))
        decode({0: 1, 1: 2, 2: 1})
        dump = context.dump(2)
        context.restore(1, dump)
        decode({1: 1})
    return rows, dump


@pytest.mark.parametrize("family", ["llama", "qwen3", "mpt", "olmoe", "gemma2", "gemma4_dense", "deepseek2"])
def test_logits_equal_those_of_one_device(family, tmp_path, fake_devices, monkeypatch):
    """Bit for bit. The families cover tied embeddings, experts, ALiBi slopes and latent attention."""
    path = make_tiny_model(family).write(tmp_path / "m.gguf") if family in ("llama", "qwen3") else None
    path = path or family_model(tmp_path, family)
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        n_layers, vector = spec.n_layers, tmp_path / "vector.gguf"
        tied = "output.weight" not in file.tensors
    write_control_vector({i: np.full(spec.n_embd, 0.1 * i, np.float32) for i in range(1, n_layers)}, vector)
    device_map = (
        {"cpu:0": 1, "cpu:1": n_layers - 1} if n_layers < 3 else {"cpu:0": 1, "cpu:1": n_layers - 2, "cpu:2": 1}
    )
    device_of_layer = [name for name, n in device_map.items() for _ in range(n)]

    def labelled(create):
        def make(self, tensor):
            tensor_on_device = create(self, tensor)
            name = tensor.name
            device = device_of_layer[int(name.split(".")[1])] if name.startswith("blk.") else "cpu:0"
            if name.startswith("output") and not tied:
                device = device_of_layer[-1]
            fake_devices.names[getattr(tensor_on_device, "packed", tensor_on_device)] = device
            return tensor_on_device

        return make

    def name_pages(context) -> None:
        for layer, device in zip(context._memory.layers, device_of_layer, strict=True):
            for plane in (*layer.key_planes, *layer.value_planes):
                fake_devices.names[plane] = device

    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "torch"})) as model:
        expected, dump = run_session(model, vector)
    for step in ("prepare", "vector"):
        monkeypatch.setattr(torch_kernels.TorchKernels, step, labelled(getattr(torch_kernels.TorchKernels, step)))
    options = {"tier": "torch", "device_map": device_map}
    with NativeBackend().load(path, ModelOptions(backend_options=options)) as model, fake_devices:
        assert model.info.device == ", ".join(device_map)
        actual, other_dump = run_session(model, vector, name_pages)
    assert fake_devices.n_checked > 100
    assert dump == other_dump, "the dump depends on the devices of the layers"
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def sizes(*blocks: int, embedding: int = 0, output: int = 0) -> WeightBytes:
    return WeightBytes(embedding * MIB, [n * MIB for n in blocks], output * MIB)


@pytest.mark.parametrize(
    ("weights", "free", "expected"),
    [
        (sizes(*[10] * 8), [100, 100], [4, 4]),
        (sizes(*[10] * 8), [300, 100], [6, 2]),
        (sizes(*[10] * 8, embedding=40), [100, 100], [2, 6]),
        (sizes(*[10] * 8, output=40), [100, 100], [6, 2]),
        (sizes(*[10] * 8), [81], [8]),
        (sizes(*[10] * 3), [10, 10, 10], [1, 1, 1]),
        (sizes(*[10] * 4, embedding=5), [4, 100], [0, 4]),
        (sizes(30, 10, 10, 10), [100, 100], [1, 3]),
    ],
)
def test_auto_splits_minimize_the_fill_of_the_fullest_device(weights, free, expected):
    counts = counts_by_memory(weights, {f"cuda:{i}": n * MIB for i, n in enumerate(free)})
    assert counts == expected


def test_no_other_split_fills_the_fullest_device_less():
    """Against all contiguous splits of random sizes over two devices."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        blocks = rng.integers(1, 50, 7).tolist()
        free = rng.integers(80, 300, 2).tolist()
        weights = sizes(*blocks, embedding=int(rng.integers(0, 30)), output=int(rng.integers(0, 30)))
        first = [0, *accumulate(blocks)]
        outside = weights.embedding // MIB, weights.output // MIB

        def fullest(n, first=first, outside=outside, free=free) -> float:
            loads = [first[n] + outside[0] * (n > 0), first[-1] - first[n] + outside[1] * (n < 7)]
            loads[0] += outside[1] * (n == 7)
            loads[1] += outside[0] * (n == 0)
            return max(load / n_free for load, n_free in zip(loads, free, strict=True))

        best = min(fullest(n) for n in range(8))
        if best > 1:
            with pytest.raises(UnsupportedModel, match="the layers do not fit"):
                counts_by_memory(weights, {"a": free[0] * MIB, "b": free[1] * MIB})
            continue
        n = counts_by_memory(weights, {"a": free[0] * MIB, "b": free[1] * MIB})[0]
        assert fullest(n) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("device_map", [{"a": 3}, {"a": 4, "b": 1}, {"a": 4, "b": 0}, {"a": 5, "b": -1}])
def test_counts_that_do_not_sum_to_the_layers_are_refused(device_map):
    with pytest.raises(InvalidOption, match="the model has 4 layers, and each device gets some"):
        counts_by_map(device_map, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": "all"}, InvalidOption, "or auto"),
        ({"device_map": {"cpu": True}}, InvalidOption, "or auto"),
        ({"device_map": {}}, InvalidOption, "or auto"),
        ({"device_map": {"cpu": 2}}, InvalidOption, "the model has 3 layers"),
        ({"device_map": {"npu:7": 3}}, BackendUnavailable, "no device 'npu:7'"),
        ({"device_map": {"cpu": 3}, "tier": "reference"}, InvalidOption, "device_map is for the torch tier"),
        ({"device_map": {"cpu": 3}, "resident_bytes": 1 << 30}, InvalidOption, "if layers are streamed"),
    ],
)
def test_wrong_device_maps_are_refused(tmp_path, options, error, message):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    with pytest.raises(error, match=message):
        NativeBackend().load(path, ModelOptions(backend_options={"tier": "torch", **options}))


@pytest.mark.parametrize("device_map", [{"cuda:0": 2, "cpu": 1}, {"cuda": 2, "cuda:0": 1}])
def test_devices_must_be_of_one_kind_and_named_once(monkeypatch, device_map):
    known = {"cuda": "cuda:0"}
    monkeypatch.setattr(splitting, "choose_device", lambda name: torch.device(known.get(name, name)))
    with pytest.raises(InvalidOption, match="devices of one kind, each once"):
        splitting.devices_of("auto", device_map)


def test_a_device_map_must_begin_with_the_device_option(monkeypatch):
    monkeypatch.setattr(splitting, "choose_device", torch.device)
    with pytest.raises(InvalidOption, match="device_map begins with cuda:1, and device is 'cuda:0'"):
        splitting.devices_of("cuda:0", {"cuda:1": 2, "cuda:0": 1})


def test_weights_beyond_device_memory_are_refused_with_sizes(tmp_path, monkeypatch):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    monkeypatch.setattr(splitting, "memory", lambda device: (MIB, 2 * MIB))
    for device_map, message in (({"cpu": 3}, r"gives cpu weights of 1 MiB"), ("auto", r"take 1 MiB, .*\(cpu 1\)")):
        with pytest.raises(UnsupportedModel, match=message):
            NativeBackend().load(path, ModelOptions(backend_options={"tier": "torch", "device_map": device_map}))


def test_auto_uses_all_devices_of_a_kind(tmp_path):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    with NativeBackend().load(
        path, ModelOptions(device="cpu", backend_options={"tier": "torch", "device_map": "auto"})
    ) as model:
        assert model.info.device == "cpu"
        run_session(model)

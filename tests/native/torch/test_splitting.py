"""Layers on several devices: where they go, and that nothing of one device meets what is on another.

Here is one device. Others are made up: every tensor that is brought to one carries its name, what is computed from it
inherits the name, and an operation on tensors of two names fails, as it would between two GPUs.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.families import family_model
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


class MadeUpDevices(TorchDispatchMode):
    """Names of devices on tensors, checked and passed on by every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names = WeakTensorKeyDictionary()
        self.n_checked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        found = {self.names[each] for each in tensors if each in self.names}
        assert len(found) <= 1, f"{func} takes tensors of {' and '.join(sorted(found))}"
        self.n_checked += bool(found)
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made) if found else ():
            if isinstance(each, torch.Tensor):
                self.names[each] = next(iter(found))
        return made

    def bring(self, tensor, device):
        """In the place of ``Tensor.to``, which does nothing between names of the CPU."""
        if self.names.get(tensor) == str(device):
            return tensor
        with torch.utils._python_dispatch._disable_current_modes():
            copy = tensor.clone()
        self.names[copy] = str(device)
        return copy


@pytest.fixture
def made_up(monkeypatch) -> MadeUpDevices:
    found = MadeUpDevices()
    for module in (splitting, torch_kernels):
        monkeypatch.setattr(module, "to_device", found.bring)
    monkeypatch.setattr(splitting, "choose_device", lambda name: torch.device("cpu:0" if name == "auto" else name))
    return found


def life(model, name_pages=lambda context: None) -> tuple[list[np.ndarray], bytes]:
    """Prefills and steps of two sequences, a fork, a cut in the middle of shared pages, a dump and its restoration."""
    rng, rows = np.random.default_rng(1), []
    with model.new_context(ContextOptions(n_ctx=512, n_seq_max=3, n_batch=128)) as context:
        name_pages(context)

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
def test_logits_are_those_of_one_device(family, tmp_path, made_up, monkeypatch):
    """To the bit; the embedding is the output matrix of some, experts, slopes and latents are others'."""
    path = make_tiny_model(family).write(tmp_path / "m.gguf") if family in ("llama", "qwen3") else None
    path = path or family_model(tmp_path, family)
    with GgufFile.open(path) as file:
        n_layers = read_spec(file).n_layers
        tied = "output.weight" not in file.tensors
    told = {"cpu:0": 1, "cpu:1": n_layers - 1} if n_layers < 3 else {"cpu:0": 1, "cpu:1": n_layers - 2, "cpu:2": 1}
    of_layer = [name for name, n in told.items() for _ in range(n)]

    def named(create):
        def make(self, tensor):
            made = create(self, tensor)
            name = tensor.name
            device = of_layer[int(name.split(".")[1])] if name.startswith("blk.") else "cpu:0"
            if name.startswith("output") and not tied:
                device = of_layer[-1]
            made_up.names[getattr(made, "packed", made)] = device
            return made

        return make

    def name_pages(context) -> None:
        for layer, device in zip(context._memory.layers, of_layer, strict=True):
            for plane in (*layer.key_planes, *layer.value_planes):
                made_up.names[plane] = device

    with NativeBackend().load(path, ModelOptions(backend_options={"tier": "torch"})) as model:
        wanted, dump = life(model)
    for step in ("prepare", "vector"):
        monkeypatch.setattr(torch_kernels.TorchKernels, step, named(getattr(torch_kernels.TorchKernels, step)))
    options = {"tier": "torch", "device_map": told}
    with NativeBackend().load(path, ModelOptions(backend_options=options)) as model, made_up:
        assert model.info.device == ", ".join(told)
        found, other = life(model, name_pages)
    assert made_up.n_checked > 100
    assert dump == other, "dumps depend on where layers are"
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def sizes(*blocks: int, embedding: int = 0, output: int = 0) -> WeightBytes:
    return WeightBytes(embedding * MIB, [n * MIB for n in blocks], output * MIB)


@pytest.mark.parametrize(
    ("weights", "free", "wanted"),
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
def test_the_fullest_device_is_filled_as_little_as_can_be(weights, free, wanted):
    counts = counts_by_memory(weights, {f"cuda:{i}": n * MIB for i, n in enumerate(free)})
    assert counts == wanted


def test_no_split_would_fill_the_fullest_device_less():
    """Against every split of random sizes into runs."""
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
            return max(load / room for load, room in zip(loads, free, strict=True))

        best = min(fullest(n) for n in range(8))
        if best > 1:
            with pytest.raises(UnsupportedModel, match="the layers do not fit"):
                counts_by_memory(weights, {"a": free[0] * MIB, "b": free[1] * MIB})
            continue
        n = counts_by_memory(weights, {"a": free[0] * MIB, "b": free[1] * MIB})[0]
        assert fullest(n) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("told", [{"a": 3}, {"a": 4, "b": 1}, {"a": 4, "b": 0}, {"a": 5, "b": -1}])
def test_counts_that_are_not_the_models_are_refused(told):
    with pytest.raises(InvalidOption, match="the model has 4 layers, and each device gets some"):
        counts_by_map(told, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device_map": "all"}, InvalidOption, "or auto"),
        ({"device_map": {"cpu": True}}, InvalidOption, "or auto"),
        ({"device_map": {}}, InvalidOption, "or auto"),
        ({"device_map": {"cpu": 2}}, InvalidOption, "the model has 3 layers"),
        ({"device_map": {"npu:7": 3}}, BackendUnavailable, "no device 'npu:7'"),
        ({"device_map": {"cpu": 3}, "tier": "reference"}, InvalidOption, "device_map is for the torch tier"),
        ({"device_map": {"cpu": 3}, "resident_bytes": 1 << 30}, InvalidOption, "where layers are streamed"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path, options, error, message):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    with pytest.raises(error, match=message):
        NativeBackend().load(path, ModelOptions(backend_options={"tier": "torch", **options}))


@pytest.mark.parametrize("told", [{"cuda:0": 2, "cpu": 1}, {"cuda": 2, "cuda:0": 1}])
def test_devices_are_of_one_kind_and_named_once(monkeypatch, told):
    known = {"cuda": "cuda:0"}
    monkeypatch.setattr(splitting, "choose_device", lambda name: torch.device(known.get(name, name)))
    with pytest.raises(InvalidOption, match="devices of one kind, each once"):
        splitting.devices_of("auto", told)


def test_a_map_begins_with_the_device_that_is_named(monkeypatch):
    monkeypatch.setattr(splitting, "choose_device", torch.device)
    with pytest.raises(InvalidOption, match="device_map begins with cuda:1, and device is 'cuda:0'"):
        splitting.devices_of("cuda:0", {"cuda:1": 2, "cuda:0": 1})


def test_more_than_a_device_has_is_refused_with_sizes(tmp_path, monkeypatch):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    monkeypatch.setattr(splitting, "memory", lambda device: (MIB, 2 * MIB))
    for device_map, message in (({"cpu": 3}, r"gives cpu weights of 1 MiB"), ("auto", r"take 1 MiB, .*\(cpu 1\)")):
        with pytest.raises(UnsupportedModel, match=message):
            NativeBackend().load(path, ModelOptions(backend_options={"tier": "torch", "device_map": device_map}))


def test_auto_takes_all_devices_of_a_kind(tmp_path):
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    with NativeBackend().load(
        path, ModelOptions(device="cpu", backend_options={"tier": "torch", "device_map": "auto"})
    ) as model:
        assert model.info.device == "cpu"
        life(model)

"""Decisions before a model is loaded: options, devices, threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slm_core.cpu import count_cores, cpu_quota, usable_cores
from slm_core.errors import BackendUnavailable, InvalidOption, UnknownOption
from slm_llamacpp.devices import Device, DeviceKind, choose
from slm_llamacpp.options import DESCRIPTIONS, LoadOptions

CPU = Device(1, "CPU", "a CPU", DeviceKind.CPU)
BLAS = Device(2, "BLAS", "OpenBLAS", DeviceKind.ACCELERATOR)
CUDA = [Device(3, "CUDA0", "a GPU", DeviceKind.GPU), Device(4, "CUDA1", "a GPU", DeviceKind.GPU)]
INTEGRATED = Device(5, "Vulkan0", "a GPU in a CPU", DeviceKind.INTEGRATED_GPU)
METAL, NEW_METAL = Device(6, "Metal", "M", DeviceKind.GPU), Device(6, "MTL0", "M", DeviceKind.GPU)
ALL = [*CUDA, INTEGRATED, BLAS, CPU]


class TestDevices:
    @pytest.mark.parametrize(
        ("devices", "requested", "names", "label"),
        [
            (ALL, "auto", ["CUDA0", "CUDA1"], "cuda:0,cuda:1"),
            (ALL, "cpu", [], "cpu"),
            (ALL, "cuda", ["CUDA0", "CUDA1"], "cuda:0,cuda:1"),
            (ALL, "cuda:1", ["CUDA1"], "cuda:1"),
            (ALL, "vulkan", ["Vulkan0"], "vulkan:0"),
            ([INTEGRATED, CPU], "auto", ["Vulkan0"], "vulkan:0"),
            ([BLAS, CPU], "auto", [], "cpu"),
            ([METAL, CPU], "metal", ["Metal"], "metal"),
            ([METAL, CPU], "metal:0", ["Metal"], "metal"),
            ([NEW_METAL, CPU], "metal", ["MTL0"], "mtl:0"),
        ],
    )
    def test_choice(self, devices: list[Device], requested: str, names: list[str], label: str) -> None:
        choice = choose(requested, devices)
        assert ([gpu.name for gpu in choice.gpus], choice.label) == (names, label)

    @pytest.mark.parametrize("requested", ["cuda:2", "CUDA", "cud", "rocm", "blas", "cpu:0", "", "cuda:", "cuda:-1"])
    def test_a_missing_device(self, requested: str) -> None:
        with pytest.raises(BackendUnavailable) as caught:
            choose(requested, ALL)
        assert "(accepted: auto, cpu, cuda:0, cuda:1, vulkan:0)" in str(caught.value)


class TestOptions:
    def test_defaults(self) -> None:
        assert LoadOptions.parse({}) == LoadOptions()
        assert set(DESCRIPTIONS) == set(LoadOptions.__dataclass_fields__)

    def test_values(self) -> None:
        values = {"n_gpu_layers": -1, "tensor_split": [1, 2.5], "flash_attention": True, "split_mode": "row"}
        parsed = LoadOptions.parse(values)
        assert (parsed.n_gpu_layers, parsed.tensor_split, parsed.flash_attention) == (-1, (1.0, 2.5), True)
        assert LoadOptions.parse({"flash_attention": "auto"}).flash_attention is None

    def test_unknown(self) -> None:
        with pytest.raises(UnknownOption, match=r"'n_gpu_layer' .*accepted: flash_attention, .*n_gpu_layers"):
            LoadOptions.parse({"n_gpu_layer": 3})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("flash_attention", "on"),
            ("flash_attention", 1),
            ("n_ubatch", 0),
            ("n_ubatch", True),
            ("n_ubatch", 2**31),
            ("n_ubatch", 64.0),
            ("use_mmap", "yes"),
            ("use_mlock", None),
            ("check_tensors", 0),
            ("repack", "auto"),
            ("n_gpu_layers", -2),
            ("n_gpu_layers", "all"),
            ("split_mode", "rows"),
            ("split_mode", ["row"]),
            ("main_gpu", -1),
            ("tensor_split", []),
            ("tensor_split", "11"),
            ("tensor_split", [0, 0]),
            ("tensor_split", [1, -1]),
            ("tensor_split", [1, float("nan")]),
            ("tensor_split", [True]),
            ("tensor_split", 1.0),
            ("offload_kv", "no"),
        ],
    )
    def test_wrong_values_are_refused(self, name: str, value: object) -> None:
        with pytest.raises(InvalidOption, match=rf"{name}=.*\(accepted: "):
            LoadOptions.parse({name: value})

    @pytest.mark.parametrize(
        "values",
        [{"n_gpu_layers": 3}, {"split_mode": "row"}, {"main_gpu": 0}, {"tensor_split": [1]}, {"offload_kv": True}],
    )
    def test_gpu_options_without_a_gpu(self, values: dict[str, object]) -> None:
        options = LoadOptions.parse(values)
        with pytest.raises(InvalidOption, match="the model runs on the CPU"):
            options.check_gpus(0, 16)
        options.check_gpus(1, 16)

    def test_gpu_options_for_other_gpus(self) -> None:
        LoadOptions.parse({"n_gpu_layers": 0}).check_gpus(0, 16)
        with pytest.raises(InvalidOption, match=r"main_gpu=2 \(accepted: 0 to 1\)"):
            LoadOptions.parse({"main_gpu": 2}).check_gpus(2, 16)
        with pytest.raises(InvalidOption, match="3 shares for 2 GPUs"):
            LoadOptions.parse({"tensor_split": [1, 1, 1]}).check_gpus(2, 16)


class TestThreads:
    def test_hardware_threads_of_one_core_count_once(self, tmp_path: Path) -> None:
        for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{siblings}\n")
        assert [count_cores(cpus, tmp_path) for cpus in ({0, 1, 2, 3}, {0, 2}, {0, 7}, set())] == [2, 1, 2, 1]

    @pytest.mark.parametrize(
        ("inner", "outer", "quota"),
        [("max 100000", "max 100000", None), ("150000 100000", "max 100000", 1.5), ("max 100000", "50000 100000", 0.5)],
    )
    def test_the_smallest_quota_of_all_parent_groups_counts(
        self, tmp_path: Path, inner: str, outer: str, quota: float | None
    ) -> None:
        group = tmp_path / "cgroup" / "slice" / "job"
        group.mkdir(parents=True)
        (group / "cpu.max").write_text(f"{inner}\n")
        (group.parent / "cpu.max").write_text(f"{outer}\n")
        membership = tmp_path / "self"
        membership.write_text("0::/slice/job\n")
        assert cpu_quota(tmp_path / "cgroup", membership) == quota
        assert cpu_quota(tmp_path / "nowhere", tmp_path / "nothing") is None

    @pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
    @pytest.mark.parametrize(
        ("inner", "outer", "quota"),
        [("-1", "-1", None), ("150000", "-1", 1.5), ("-1", "50000", 0.5), ("9000", "50000", 0.09)],
    )
    def test_quotas_of_version_1(self, tmp_path: Path, mount: str, inner: str, outer: str, quota: float | None) -> None:
        """Groups of other controllers do not count, nor does a period of 0."""
        group = tmp_path / "cgroup" / mount / "slice" / "job"
        other = tmp_path / "cgroup" / "cpuset" / "slice" / "job"
        for folder, value, period in ((group, inner, 100000), (group.parent, outer, 100000), (other, 1, 100000)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "cpu.cfs_quota_us").write_text(f"{value}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
        membership = tmp_path / "self"
        membership.write_text("9:name=systemd:/slice/job\n5:cpuset:/slice/job\n4:cpu,cpuacct:/slice/job\n0::/\n")
        assert cpu_quota(tmp_path / "cgroup", membership) == quota
        (group / "cpu.cfs_period_us").write_text("0\n")
        assert cpu_quota(tmp_path / "cgroup", membership) == (None if outer == "-1" else int(outer) / 100000)

    def test_the_root_of_a_container_counts(self, tmp_path: Path) -> None:
        """The membership names the group outside of the container, whose folder is not there."""
        folder = tmp_path / "cgroup" / "cpu"
        folder.mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text("200000\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "self").write_text("4:cpu,cpuacct:/docker/0123\n")
        assert cpu_quota(tmp_path / "cgroup", tmp_path / "self") == 2

    def test_usable_cores_is_within_the_number_of_cpus(self) -> None:
        assert 1 <= usable_cores() <= (os.cpu_count() or 1)

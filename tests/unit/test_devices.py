"""The table of known devices: names, figures that come to the vendor's peak rates, its page, and GPUs that the driver tells of."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.build.gpu.driver import read_device
from flashgen.codegen.devices import Device, device_by_name, device_of_target, devices_like, find_device, mma_rate_by_name, named_devices
from flashgen.codegen.devices.table import DEVICES
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.target import find_target, targets

ROOT = Path(__file__).parents[2]

# Dense fp16 FLOP a cycle and SM with fp32 accumulation at full rate, by the best instruction of the architecture (wgmma, tcgen05).
PEAK_FLOPS_PER_CYCLE = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90a": 4096, "sm_100a": 8192, "sm_120a": 1024, "sm_121a": 1024}
# Dense fp16 TFLOP/s with fp32 accumulation, from the vendor's documents; a10g from NVIDIA TensorRT-LLM, gb10 as measured by users.
# The clocks of h100-pcie and b200 were derived from these: for them this checks the SMs and the rate alone.
PEAK_TFLOPS = {
    "a100": 312, "a100-40gb": 312, "a100-pcie": 312, "a100-pcie-40gb": 312, "a10": 125, "a10g": 70, "a40": 149.7, "rtx-a6000": 154.8,
    "rtx3090": 71, "l4": 121, "l40s": 362, "rtx6000-ada": 364.2, "rtx4090": 165.2, "h100": 989.4, "h100-pcie": 756.5, "h200": 989.4,
    "gh200": 990, "b200": 2250, "rtx5090": 209.5, "rtx5070": 61.7, "gb10": 118,
}  # fmt: skip
HOPPER_TENSOR_CLOCK = 1830e6  # these three have the clock of the model's fit instead


@pytest.mark.parametrize("key", PEAK_TFLOPS)
def test_figures_come_to_the_peak_rate_of_the_vendor(key: str) -> None:
    device = named_devices()[key]
    clock = HOPPER_TENSOR_CLOCK if key in ("h100", "h200", "gh200") else device.clock_hz
    peak = device.sm_count * clock * PEAK_FLOPS_PER_CYCLE[device.target.name] * device.mma_rate / 1e12
    assert peak == pytest.approx(PEAK_TFLOPS[key], rel=0.015)


def test_figures_are_in_the_right_unit() -> None:
    for name, device in named_devices().items():
        # Between half the smallest embedded GPU and twice the fastest of today.
        assert 4e8 < device.clock_hz < 4e9, name
        assert 3e10 < device.memory_bandwidth < 2e13, name
        assert 2**19 <= device.l2_bytes < 2**29, name
        assert 8 <= device.memory_gb < 1000, name
        assert 0 < device.mma_rate <= 1, name


def test_a_row_of_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"^arch of device h200 must be one of sm_80, .*; got 'sm_77'$"):
        replace(next(known for known in DEVICES if known.key == "h200"), arch="sm_77")
    with pytest.raises(ArgumentError, match=r"^l2_mib must be of type int; got 1\.5$"):
        replace(DEVICES[0], l2_mib=1.5)  # type: ignore[arg-type]


def test_every_device_has_sources_and_a_name_of_its_own() -> None:
    for known in DEVICES:
        assert known.sources, known.key
        assert all(source.title and source.url.startswith("https://") for source in known.sources), known.key
        for text in (known.key, *known.aliases, *known.names):
            assert find_device(text) == named_devices()[known.key], f"{text} is ambiguous"
        assert known.key == known.key.lower()
        assert not known.key.isdigit(), "a number is a GPU's ordinal"


def test_the_devices_asked_for_are_there() -> None:
    wanted = {"a100", "a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090", "h100", "h100-pcie", "h200", "gh200", "b200"}
    assert wanted <= set(named_devices())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H200", "NVIDIA H200"),
        ("h100-sxm", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("nvidia a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB"),
    ],
)
def test_a_device_is_found_by_any_of_its_names(text: str, name: str) -> None:
    assert find_device(text).name == name


@pytest.mark.parametrize("text", ["h300", "", "nvidia", "4090", "rtx"])
def test_an_unknown_device_lists_the_known(text: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^device must be one of a100, .*h200.*; got '{text}'$"):
        find_device(text)


def test_only_what_the_model_was_fitted_to_is_measured() -> None:
    assert [name for name, device in named_devices().items() if device.measured] == ["h200"]


def test_geforce_accumulates_at_half_rate() -> None:
    for device in named_devices().values():
        if "GeForce" in device.name:
            assert device.mma_rate == mma_rate_by_name(device.name) == 0.5


def test_every_target_has_a_device() -> None:
    for target in targets().values():
        assert device_of_target(target).target is target
    assert device_of_target(find_target("sm_90a")).name == "NVIDIA H200", "a measured one stands for its target"
    assert device_of_target(find_target("sm_80")).name == "NVIDIA A100-SXM4-80GB"


def test_the_page_is_that_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools/devices_page.py"), run_name="__main__")
    page = (ROOT / "docs/devices.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page, "run: python tools/devices_page.py > docs/devices.md"


def told(name: str, arch: str, sm_count: int, memory_khz: int = 9_751_000, bus_bits: int = 320) -> Device:
    """What becomes of a GPU that the driver tells of: 6 MiB of L2, at most 2.1 GHz."""
    attributes = {
        "MULTIPROCESSOR_COUNT": sm_count,
        "L2_CACHE_SIZE": 6 * 2**20,
        "CLOCK_RATE": 2_100_000,
        "MEMORY_CLOCK_RATE": memory_khz,
        "GLOBAL_MEMORY_BUS_WIDTH": bus_bits,
    }
    return read_device(name, find_target(arch), attributes.__getitem__)


def test_a_gpu_in_the_table_gets_what_the_driver_does_not_tell() -> None:
    known = device_by_name("NVIDIA GeForce RTX 3080")
    assert known is not None
    assert told(known.name, "sm_86", known.sm_count) == replace(known, l2_bytes=6 * 2**20), "the driver knows the L2 better"
    assert told("NVIDIA H200", "sm_90a", 132).measured
    assert told("NVIDIA GH200 120GB", "sm_90a", 132).name == "NVIDIA GH200 120GB", "records go by the driver's name"


def test_a_larger_board_under_the_same_name_is_not_the_one_in_the_table() -> None:
    device = told("NVIDIA GeForce RTX 3080", "sm_86", 70, bus_bits=384)
    assert (device.sm_count, device.clock_hz, device.mma_rate) == (70, 2.1e9, 0.5)
    assert device.memory_bandwidth == pytest.approx(936e9, rel=0.01)
    assert not device.measured


def test_a_gpu_that_is_not_in_the_table() -> None:
    geforce, other = told("NVIDIA GeForce RTX 4060", "sm_89", 24), told("NVIDIA RTX 4000 Ada Generation", "sm_89", 48)
    assert (geforce.mma_rate, other.mma_rate) == (0.5, 1.0)
    assert not geforce.measured
    assert geforce.memory_bandwidth == pytest.approx(780e9, rel=0.01)


def test_a_driver_that_does_not_tell_the_memory_clock_leaves_a_bandwidth_to_predict_with() -> None:
    assert told("Thor", "sm_110a", 12, memory_khz=0, bus_bits=0).memory_bandwidth > 0


def test_devices_are_alike_whose_sms_are() -> None:
    h100 = find_device("h100")
    assert {device.name for device in devices_like(h100)} == {"NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"}
    assert find_device("h200") in devices_like(replace(h100, name="NVIDIA H100 NVL", memory_gb=94)), "one that no table knows"
    for other in (replace(h100, sm_count=114), replace(h100, mma_rate=0.5), find_device("h100-pcie"), find_device("rtx4090")):
        assert not {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} & {device.name for device in devices_like(other)}

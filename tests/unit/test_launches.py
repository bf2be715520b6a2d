"""Loading, binding and launching on a driver that is made up: what it is asked for, in which order, and what becomes of its errors."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as binding

from flashgen.build.artifact import Artifact
from flashgen.build.gpu import driver, kernel, parameter_memory, tensor_map
from flashgen.build.gpu.driver import DriverError, Gpu
from flashgen.build.gpu.kernel import MAX_GRID, Kernel
from flashgen.build.gpu.tensor_map import tensor_maps_of
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.program import BlockResources, KernelLaunch, Program
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.tensor_map import TensorMapShape
from flashgen.codegen.workload import Workload
from tests.support.programs import program_of
from tests.support.two_steps import InClusters, TwoSteps, TwoStepsConfig

H200 = find_device("h200")
PROBLEM, WORKLOAD = Problem(Dtype.BF16, 64, 32), Workload(2, 6, 3, 70, 130)
SHAPE = TensorMapShape(Dtype.FP16, (64, 1000, 3), (128, 2**20), (32, 8, 1), 64)


class FakeDriver:
    """The binding's types and names, and functions that keep what they are given. `failing` names the one that fails."""

    def __init__(self) -> None:
        self.failure = binding.CUresult.CUDA_ERROR_INVALID_VALUE
        self.failing, self.asked, self.launches = "", list[tuple[Any, ...]](), list[SimpleNamespace]()
        self.kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(binding, name)
        results = {
            "cuLibraryLoadData": 11,
            "cuLibraryGetKernel": 12,
            "cuDeviceGet": 13,
            "cuDevicePrimaryCtxRetain": 14,
            "cuKernelGetFunction": 15,
            "cuCtxPopCurrent": 14,
        }
        return lambda *given: (self.status(name, *given), *([results[name]] if name in results else []))

    def status(self, name: str, *given: Any) -> Any:
        self.asked.append((name, *given))
        return self.failure if name == self.failing else binding.CUresult.CUDA_SUCCESS

    def cuTensorMapEncodeTiled(self, *given: Any) -> tuple[Any, Any]:
        """A map that says which address it is of."""
        status = self.status("cuTensorMapEncodeTiled", *given)
        encoded = ctypes.create_string_buffer(struct.pack("=16Q", *[given[2]] * 16), TENSOR_MAP_BYTES)
        self.kept.append(encoded)
        return status, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded))

    def cuLaunchKernelEx(self, config: Any, function: Any, *given: Any) -> tuple[Any]:
        shape = [getattr(config, f"{what}Dim{axis}") for what in ("grid", "block") for axis in "XYZ"]
        status = self.cuLaunchKernel(function, *shape, config.sharedMemBytes, int(config.hStream), *given)
        self.launches[-1].attributes = [(attribute.id, attribute.value) for attribute in config.attrs[: config.numAttrs]]
        return status

    def cuLaunchKernel(self, function: Any, *given: Any) -> tuple[Any]:
        *shape, shared, stream, arguments, extra = given
        (address,) = struct.unpack("=Q", ctypes.string_at(arguments, 8))
        self.launches.append(SimpleNamespace(function=int(function), shape=shape, shared=shared, stream=stream, at=address, extra=extra))
        return (self.status("cuLaunchKernel"),)


@pytest.fixture
def cu(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    for module in (driver, kernel, parameter_memory, tensor_map):
        monkeypatch.setattr(module, "driver", lambda: fake)
    for kept in ("_libraries", "_contexts"):
        monkeypatch.setattr(kernel, kept, {})
    return fake


def load(family: str, arch: str = "sm_90a") -> Kernel:
    chosen = find_family(family)
    spec = KernelSpec(chosen, PROBLEM, chosen.default(PROBLEM, H200.target), H200.target)
    return Kernel(spec, Artifact("entry", arch, "text", b"code", "log", "13.0"), Gpu(3, H200, "uuid", "580.1"))


def program(loaded: Kernel) -> Program:
    return program_of(loaded.spec.family, PROBLEM, loaded.spec.config, WORKLOAD)


def bind(loaded: Kernel) -> kernel.Launch:
    return loaded.bind(program(loaded))


def test_a_kernel_is_loaded_and_may_use_its_shared_memory(cu: FakeDriver) -> None:
    loaded = load("attention_forward_sm90")
    shared = loaded.spec.largest_block.shared_bytes
    limit = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert cu.asked == [
        ("cuLibraryLoadData", b"code", [], [], 0, [], [], 0),
        ("cuDeviceGet", 3),
        ("cuLibraryGetKernel", 11, b"entry"),
        ("cuKernelSetAttribute", limit, shared, 12, 13),
        ("cuDevicePrimaryCtxRetain", 13),
        ("cuCtxPushCurrent", 14),
        ("cuKernelGetFunction", 12),
        ("cuCtxPopCurrent",),
    ]
    cu.asked.clear()
    load("attention_forward_sm90")
    assert ("cuDevicePrimaryCtxRetain", 13) not in cu.asked, "a context that is there"


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("cuLibraryLoadData", "loading entry failed: CUDA_ERROR_INVALID_VALUE"),
        ("cuLibraryGetKernel", "finding entry failed: "),
        ("cuKernelSetAttribute", r"allowing \d+ B of shared memory failed: "),
        ("cuDevicePrimaryCtxRetain", "finding the GPU's primary context failed: "),
        ("cuCtxPushCurrent", "entering the GPU's primary context failed: "),
        ("cuKernelGetFunction", "finding a kernel in the GPU's primary context failed: "),
        ("cuCtxPopCurrent", "leaving the GPU's primary context failed: "),
    ],
)
def test_what_the_driver_refuses_is_said(cu: FakeDriver, failing: str, message: str) -> None:
    cu.failing = failing
    with pytest.raises(DriverError, match=f"^{message}"):
        load("attention_forward")


def test_machine_code_of_another_architecture_is_not_loaded(cu: FakeDriver) -> None:
    with pytest.raises(ArgumentError, match=r"^artifact must be for sm_90a, the architecture of device 3; got sm_80$"):
        load("attention_forward", "sm_80")
    assert cu.asked == []


@pytest.mark.parametrize("grid", [-1, 0, MAX_GRID + 1])
def test_a_grid_has_blocks(cu: FakeDriver, grid: int) -> None:
    loaded = load("attention_forward")
    (some,) = program(loaded).launches
    with pytest.raises(ArgumentError, match=rf"^workload must need from 1 to {MAX_GRID} blocks; got {grid}$"):
        loaded.bind(Program((some._replace(grid=grid),)))
    for most in (1, MAX_GRID):
        loaded.bind(Program((some._replace(grid=most),)))(0, *range(16, 96, 16))
        assert cu.launches[-1].shape[0] == most


@pytest.mark.parametrize("family", ["attention_forward", "attention_forward_sm90"])
def test_a_launch_writes_each_address_into_its_field(cu: FakeDriver, family: str) -> None:
    loaded = load(family)
    launch, block, spec = bind(loaded), loaded.spec.family.parameters, loaded.spec
    (asked,) = program(loaded).launches
    assert launch.names == ("q", "k", "v", "out", "lse", *(buffer.name for buffer in program(loaded).buffers))
    for round, stream in ((1, 77), (2, 78), (3, 77)):
        addresses = {name: 1024 * (round + 10 * i) for i, name in enumerate(launch.names)}
        launch(stream, *addresses.values())
        made = cu.launches[-1]
        threads, shared = spec.resources[""].threads, spec.resources[""].shared_bytes
        assert (made.function, made.stream, made.extra) == (15, stream, 0)
        assert made.shape == [asked.grid, 1, 1, threads, 1, 1]
        assert made.shared == shared
        packed = block.pack(asked.values)
        parameters, expected = ctypes.string_at(made.at, len(packed)), bytearray(packed)
        for place in block.pointers:
            struct.pack_into("=Q", expected, place.offset, addresses.get(place.name, 0))
        for place in block.tensor_maps:
            struct.pack_into("=16Q", expected, place.offset, *[addresses[place.name]] * 16)
        assert parameters == expected
        assert made.at % 64 == 0
    assert len(block.tensor_maps) + len(block.pointers) >= 5


def test_the_launches_of_a_program_follow_each_other(cu: FakeDriver) -> None:
    family = TwoSteps()
    spec = KernelSpec(family, PROBLEM, TwoStepsConfig(), H200.target)
    loaded = Kernel(spec, Artifact("entry", "sm_90a", "text", b"code", "log", "13.0"), Gpu(3, H200, "uuid", "580.1"))
    assert [asked[2] for asked in cu.asked if asked[0] == "cuLibraryGetKernel"] == [b"entry", b"entry_add"]
    assert [asked[2] for asked in cu.asked if asked[0] == "cuKernelSetAttribute"] == [0, 1024], "each what its own blocks take"
    assert spec.largest_block == BlockResources(32, 1024)
    launch = loaded.bind(program(loaded))
    assert launch.names == ("q", "k", "v", "out", "lse", "doubled")
    launch(77, 1, 2, 3, 4, 5, 6)
    first, second = cu.launches
    assert struct.unpack("=QI", ctypes.string_at(first.at, 12)) == (6, 2 * 6 * 70)
    assert struct.unpack("=QQIf", ctypes.string_at(second.at, 24)) == (6, 5, 2 * 6 * 70, 0.125)
    cu.failing = "cuLaunchKernel"
    with pytest.raises(DriverError, match=r"^launching entry failed: "):
        launch(77, 1, 2, 3, 4, 5, 6)


def test_a_launch_that_overlaps_the_one_before_says_so(cu: FakeDriver) -> None:
    spec = KernelSpec(TwoSteps(), PROBLEM, TwoStepsConfig(), H200.target)
    loaded = Kernel(spec, Artifact("entry", "sm_90a", "text", b"code", "log", "13.0"), Gpu(3, H200, "uuid", "580.1"))
    first, second = program(loaded).launches
    launch = loaded.bind(Program((first, second._replace(overlaps=True)), program(loaded).buffers))
    for stream in (77, 78):
        launch(stream, 1, 2, 3, 4, 5, 6)
        plain, overlapping = cu.launches[-2:]
        assert not hasattr(plain, "attributes"), "it costs no more than it did"
        assert (overlapping.shape, overlapping.shared, overlapping.stream) == ([second.grid, 1, 1, 32, 1, 1], 1024, stream)
        assert struct.unpack("=QQIf", ctypes.string_at(overlapping.at, 24)) == (6, 5, 2 * 6 * 70, 0.125)
        ((attribute, value),) = overlapping.attributes
        assert attribute == binding.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert value.programmaticStreamSerializationAllowed == 1
    cu.failing = "cuLaunchKernel"
    with pytest.raises(DriverError, match=r"^launching entry failed: "):
        launch(77, 1, 2, 3, 4, 5, 6)


def test_a_grid_is_of_whole_clusters(cu: FakeDriver) -> None:
    spec = KernelSpec(InClusters(), PROBLEM, TwoStepsConfig(), H200.target)
    loaded = Kernel(spec, Artifact("entry", "sm_90a", "text", b"code", "log", "13.0"), Gpu(3, H200, "uuid", "580.1"))
    first = KernelLaunch(4, {"rows": 128})
    loaded.bind(Program((first,)))(77, *range(5))
    assert cu.launches[-1].shape[0] == 4, "the text says the rest: see __cluster_dims__"
    with pytest.raises(ArgumentError, match=r"^grid must be a multiple of 2, the blocks of a cluster; got 5$"):
        loaded.bind(Program((first._replace(grid=5),)))


@pytest.mark.parametrize("blocks", [0, 9])
def test_a_cluster_runs_on_every_gpu(blocks: int) -> None:
    with pytest.raises(ArgumentError, match=f"^cluster must be an integer from 1 to 8; got {blocks}$"):
        BlockResources(32, 0, blocks)


def test_a_refused_launch_is_said(cu: FakeDriver) -> None:
    launch = bind(load("attention_forward"))
    cu.failing = "cuLaunchKernel"
    with pytest.raises(DriverError, match=r"^launching entry failed: CUDA_ERROR_INVALID_VALUE$"):
        launch(0, *range(16, 96, 16))
    cu.failing = ""
    launch(0, *range(16, 96, 16))


@pytest.mark.parametrize("status", [status for status in binding.CUresult if int(status)], ids=lambda status: str(status.name))
def test_no_status_but_success_is_taken_for_it(cu: FakeDriver, status: binding.CUresult) -> None:
    launch = bind(load("attention_forward"))
    cu.failing, cu.failure = "cuLaunchKernel", status
    with pytest.raises(DriverError, match=f"^launching entry failed: {status.name}$"):
        launch(0, *range(16, 96, 16))


def test_a_map_is_encoded_with_all_that_its_shape_says(cu: FakeDriver) -> None:
    encoded = tensor_maps_of(SHAPE).at(0x7F00)
    ((name, dtype, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill),) = cu.asked
    assert (name, dtype, rank, address) == (
        "cuTensorMapEncodeTiled",
        binding.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        3,
        0x7F00,
    )
    assert [[int(n) for n in numbers] for numbers in (sizes, strides, box, steps)] == [[64, 1000, 3], [128, 2**20], [32, 8, 1], [1, 1, 1]]
    assert interleave == binding.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == binding.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B
    assert promotion == binding.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert fill == binding.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, "0 beyond the tensor"
    assert encoded == struct.pack("=16Q", *[0x7F00] * 16)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_element_types_and_swizzles_have_the_driver_s_names(cu: FakeDriver, dtype: Dtype, swizzle: int) -> None:
    tensor_maps_of(TensorMapShape(dtype, (64, 8), (256,), (8, 8), swizzle)).at(16)
    names = {Dtype.BF16: "BFLOAT16", Dtype.FP16: "FLOAT16", Dtype.FP32: "FLOAT32"}, {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
    assert cu.asked[0][1].name == f"CU_TENSOR_MAP_DATA_TYPE_{names[0][dtype]}"
    assert cu.asked[0][9].name == f"CU_TENSOR_MAP_SWIZZLE_{names[1][swizzle]}"


@pytest.mark.parametrize(("size", "name"), [(0, "NONE"), (64, "L2_64B"), (128, "L2_128B"), (256, "L2_256B")])
def test_the_l2_is_filled_as_the_shape_says(cu: FakeDriver, size: int, name: str) -> None:
    tensor_maps_of(TensorMapShape(Dtype.BF16, (64, 8), (256,), (8, 8), l2_promotion=size)).at(16)
    assert cu.asked[0][10].name == f"CU_TENSOR_MAP_L2_PROMOTION_{name}"


def test_a_refused_map_says_what_was_asked_for(cu: FakeDriver) -> None:
    cu.failing = "cuTensorMapEncodeTiled"
    with pytest.raises(
        DriverError, match=r"^encoding a tensor map of TensorMapShape\(.*\) at address 0x7f00 failed: CUDA_ERROR_INVALID_VALUE$"
    ):
        tensor_maps_of(SHAPE).at(0x7F00)


@pytest.mark.parametrize("family", ["attention_forward", "attention_forward_sm90"])
def test_launches_of_other_sizes_take_turns_in_one_memory(cu: FakeDriver, family: str) -> None:
    """Each launch has its own numbers, maps and addresses, whichever came before; a thread's launches of a kernel use one memory."""
    loaded, block = load(family), find_family(family).parameters
    sizes = [WORKLOAD, dataclasses.replace(WORKLOAD, len_kv=131), dataclasses.replace(WORKLOAD, len_q=71)]
    programs = [program_of(loaded.spec.family, PROBLEM, loaded.spec.config, workload) for workload in sizes]
    launches = [loaded.bind(each) for each in programs]
    alone = load(family)
    for turn in (0, 1, 0, 2, 2, 1, 0):
        addresses = [1024 * (i + 1) for i in range(len(launches[turn].names))]
        launches[turn](77, *addresses)
        shared = cu.launches[-1]
        found = ctypes.string_at(shared.at, block.size)
        alone._of_thread.memories.clear()
        alone.bind(programs[turn])(77, *addresses)
        assert found == ctypes.string_at(cu.launches[-1].at, block.size)
        assert cu.launches[-1].shape == shared.shape
    assert len({launch.memories[0].arguments for launch in launches}) == 1


@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_are_those_of_the_last_numbers_whoever_was_interrupted(cu: FakeDriver, overlaps: bool) -> None:
    loaded = load("attention_forward_sm90")
    launch = bind(loaded)
    memory, (own,) = loaded.parameter_memory("", launch.names, overlaps), launch.numbers
    launch_of, fewer, same = memory._launch_of, own._replace(grid=own.grid - 1), own._replace(values=bytes(len(own.values)))

    def interrupted(grid: int) -> Any:
        launch_of(grid)
        raise KeyboardInterrupt

    def launched(numbers: Any) -> int:
        memory.load(numbers)
        memory.launch(None, memory.arguments, 0)
        return int(cu.launches[-1].shape[0])

    for numbers in (own, same, fewer, own, fewer):
        assert launched(numbers) == numbers.grid
    memory._launch_of = interrupted
    with pytest.raises(KeyboardInterrupt):
        memory.load(own)
    assert memory.holds is None
    memory._launch_of = launch_of
    assert launched(fewer) == fewer.grid


def test_threads_have_memories_of_their_own(cu: FakeDriver) -> None:
    loaded = load("attention_forward_sm90")
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(bind, loaded).result()
    assert bind(loaded).memories[0] is not theirs.memories[0]

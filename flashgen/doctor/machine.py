"""Checks of what flashgen stands on: versions, driver, GPUs and their targets, NVRTC, cuda-python, PyTorch, the host, the environment."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flashgen.build.cache_dir import cache_dir
from flashgen.build.emulator.compiler import CxxCompilerMissingError, cxx_compiler
from flashgen.build.emulator.folder import allows_programs
from flashgen.build.gpu.driver import CUDA_MAJOR, MINIMUM_DRIVER, DriverState, Gpu, cuda_name, driver_state, gpu, gpu_count, memory_bytes
from flashgen.build.nvrtc import CompilerMissingError, nvrtc_architectures, nvrtc_path, nvrtc_version
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.target import target_for_capability, targets

from ..selection.families import families_for
from ..version import __version__
from .finding import Finding, Status

GIB = 2**30
VARIABLES = ("FLASHGEN_CACHE_DIR", "FLASHGEN_CPU", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CXX")  # that change what flashgen does

_UPDATE_NVRTC = f"pip install -U 'nvidia-cuda-nvrtc>={CUDA_MAJOR},<{CUDA_MAJOR + 1}'"
_WITHOUT_GPU = "nothing can be launched or timed here; `flashgen tune` ranks by prediction, and generate, compile and show work in full"
_NO_LAUNCH = "no kernel can be launched"

# By what cuInit says: what it means, and the cure.
_DRIVER_FAULTS = {
    "CUDA_ERROR_NO_DEVICE": (
        "the driver shows this process no GPU",
        "run nvidia-smi; if it lists GPUs and this is a container, start it with --gpus all; if it lists none, ask who runs the machine",
    ),
    "CUDA_ERROR_STUB_LIBRARY": (
        "the toolkit's stub of libcuda was loaded in place of the driver's library",
        "take the folder 'stubs' out of LD_LIBRARY_PATH",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the GPUs are joined by NVSwitch, and the service that sets it up is not running",
        "sudo systemctl start nvidia-fabricmanager",
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "the driver's library and its kernel module are of different versions, as after an update without a restart",
        "sudo reboot",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "a forward-compatibility library was loaded, and this GPU does not allow one",
        f"take the folder 'compat' out of LD_LIBRARY_PATH, and update the NVIDIA driver to {MINIMUM_DRIVER} or newer",
    ),
}


def versions(name: str) -> Finding:
    """flashgen, Python and the system."""
    found = f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding(name, Status.WRONG, found, "flashgen is made and tested for Linux only", "use Linux, or WSL 2 on Windows")
    return Finding(name, Status.OK, found)


def installed_driver(name: str) -> Finding:
    """The driver: whether there is one, and whether it can run our machine code."""
    return judge_driver(name, driver_state(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_driver(name: str, state: DriverState, visible: str | None) -> Finding:
    """What to say of a driver; `visible` is CUDA_VISIBLE_DEVICES."""
    if state.cuda is None and state.kernel_module is None:
        return Finding(
            name, Status.NOTE, "no NVIDIA driver on this machine", _WITHOUT_GPU, f"for launches: driver {MINIMUM_DRIVER} or newer"
        )
    update = f"update the NVIDIA driver to {MINIMUM_DRIVER} or newer, for example: sudo apt install nvidia-driver-{MINIMUM_DRIVER}-open"
    if state.cuda is None:
        found = f"kernel module {state.kernel_module}, but its library libcuda.so.1 cannot be loaded ({state.error})"
        cure = "in a container: start it with --gpus all (NVIDIA Container Toolkit); else install the driver's user-space packages"
        return Finding(name, Status.WRONG, found, _NO_LAUNCH, cure)
    version = f"{state.kernel_module or 'of unknown version'}, supports CUDA {cuda_name(state.cuda)}"
    if state.cuda < CUDA_MAJOR * 1000:
        found = f"{version}; kernels of CUDA {CUDA_MAJOR} need driver {MINIMUM_DRIVER} or newer"
        return Finding(name, Status.WRONG, found, "the driver refuses the machine code that flashgen compiles", update)
    if state.error == "CUDA_ERROR_NO_DEVICE" and visible is not None:
        found = f"{version}; no GPU is visible, with CUDA_VISIBLE_DEVICES={visible!r}"
        return Finding(name, Status.WRONG, found, "the variable hides all GPUs: " + _NO_LAUNCH, "unset CUDA_VISIBLE_DEVICES")
    if state.error is not None:
        meaning, cure = _DRIVER_FAULTS.get(state.error, (_NO_LAUNCH, "run nvidia-smi for the driver's own word; sudo reboot often helps"))
        return Finding(name, Status.WRONG, f"{version}; {state.error}", meaning, cure)
    return Finding(name, Status.OK, version)


def graphics_card(name: str, ordinal: int) -> Finding:
    """One GPU: what it is."""
    device = gpu(ordinal).device
    capability = ".".join(map(str, device.target.capability))
    memory = memory_bytes(ordinal) / GIB
    return Finding(name, Status.OK, f"{device.name}: compute capability {capability}, {device.sm_count} SMs, {memory:.1f} GiB of memory")


def target(name: str, on: Gpu) -> Finding:
    """Whether kernels can be made for a GPU's architecture, and by what figures."""
    target = on.device.target
    major, minor = target.capability
    try:
        families_for(Problem(Dtype.BF16, 64), target)
    except ArgumentError as error:
        return Finding(
            name, Status.WRONG, f"{target.name}: {error}", "no kernel family runs on this GPU", "use a GPU from Ampere (sm_80) on"
        )
    if 10 * major + minor not in nvrtc_architectures():
        found = f"{target.name}, which NVRTC {nvrtc_version()} does not compile for"
        return Finding(name, Status.WRONG, found, "no kernel can be compiled for this GPU", _UPDATE_NVRTC)
    if target_for_capability(target.capability) is None:
        found = f"{target.name} has no target file: a generic one, by what the driver says"
        meaning = "kernels run, but the model's figures are guesses and nothing of this architecture's own is used"
        return Finding(name, Status.NOTE, found, meaning, "pip install -U flashgen; or add one, see docs/adding-an-architecture.md")
    return Finding(name, Status.OK, f"{target.name}, from its target file")


def nvrtc(name: str) -> Finding:
    """The compiler: version, library, and what it compiles for."""
    try:
        known = nvrtc_architectures()
    except CompilerMissingError as error:
        return Finding(name, Status.WRONG, str(error), "nothing can be compiled", f"{_UPDATE_NVRTC} cuda-python")
    found = f"{nvrtc_version()}, from {nvrtc_path()}; compiles for sm_{known[0]} to sm_{known[-1]}"
    if int(nvrtc_version().split(".")[0]) != CUDA_MAJOR:
        return Finding(name, Status.WRONG, found, f"flashgen is made for NVRTC {CUDA_MAJOR}", _UPDATE_NVRTC)
    missing = [t.name for t in targets().values() if 10 * t.capability[0] + t.capability[1] not in known]
    if missing:
        return Finding(name, Status.NOTE, found, f"it cannot compile for {', '.join(missing)}", _UPDATE_NVRTC)
    return Finding(name, Status.OK, found)


def bindings(name: str) -> Finding:
    """cuda-python, by which NVRTC and the driver are called."""
    cure = f"pip install 'cuda-python>={CUDA_MAJOR},<{CUDA_MAJOR + 1}'"
    try:
        version = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return Finding(name, Status.WRONG, "cuda-bindings is not installed", "nothing can be compiled or launched", cure)
    if version.split(".")[0] != str(CUDA_MAJOR):
        return Finding(name, Status.WRONG, f"cuda-bindings {version}", f"flashgen is made for version {CUDA_MAJOR}", cure)
    return Finding(name, Status.OK, f"cuda-bindings {version}")


def cpu(name: str) -> Finding:
    """What kernels on the CPU need: a C++ compiler, and a folder from which its programs may be run."""
    meaning = "kernels cannot run on the CPU: no verify --device cpu, no debug, no CPU tensors; tune without a GPU does not verify"
    try:
        compiler = cxx_compiler()
    except CxxCompilerMissingError as error:
        return Finding(name, Status.NOTE, str(error), meaning, "apt install g++, or name a compiler in CXX")
    folders = {folder: allows_programs(folder) for folder in (Path(tempfile.gettempdir()), cache_dir())}
    refused = ", ".join(f"{folder} is mounted noexec" for folder, allowed in folders.items() if not allowed)
    found = f"{compiler.version}{refused and f'; {refused}'}"
    if not any(folders.values()):
        return Finding(name, Status.NOTE, found, meaning, "set TMPDIR to a folder in which programs may be run")
    return Finding(name, Status.OK, found)


@dataclass(frozen=True)
class TorchState:
    """PyTorch: its version, the CUDA that it was built for (None: none), and how many GPUs it can use."""

    version: str
    cuda: str | None
    gpus: int


def torch_state() -> TorchState | str:
    """PyTorch as it is, or why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # ImportError, or OSError where one of its libraries is missing
        return str(error)
    return TorchState(torch.__version__, torch.version.cuda, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def torch(name: str) -> Finding:
    """PyTorch, and whether it sees the GPUs that the driver shows."""
    return judge_torch(name, torch_state(), gpu_count())


def judge_torch(name: str, state: TorchState | str, gpus: int) -> Finding:
    """What to say of PyTorch, as `torch_state` gives it, where the driver shows `gpus` GPUs."""
    if isinstance(state, str):
        meaning = "flashgen.attention does not work, nor do tune and verify on a GPU"
        return Finding(name, Status.WRONG, f"cannot be imported: {state}", meaning, "pip install 'torch>=2.11'")
    version = f"{state.version}, " + (f"built for CUDA {state.cuda}" if state.cuda else "built without CUDA")
    cure = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu{CUDA_MAJOR}0"
    if not gpus:
        return Finding(name, Status.OK, version)
    if not state.cuda:
        return Finding(name, Status.WRONG, version, "this build of PyTorch cannot use the GPU", cure)
    if not state.gpus:
        meaning = "PyTorch cannot use the GPU, though the driver shows one: most often its CUDA is newer than the driver supports"
        return Finding(name, Status.WRONG, f"{version}; does not see the driver's {_count(gpus)}", meaning, cure)
    if state.gpus != gpus:
        meaning = "PyTorch and the driver count differently: tensors cannot be put on all GPUs"
        return Finding(
            name, Status.NOTE, f"{version}; sees {state.gpus} of the driver's {_count(gpus)}", meaning, "look at CUDA_VISIBLE_DEVICES"
        )
    return Finding(name, Status.OK, f"{version}; sees {_count(gpus)}")


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def environment(name: str) -> Finding:
    """The environment variables that change what flashgen does, and those that look as if they did."""
    given = {key: value for key, value in sorted(os.environ.items()) if key in VARIABLES or key.startswith("FLASHGEN_")}
    found = ", ".join(f"{key}={value}" for key, value in given.items()) or "none set"
    unknown = [key for key in given if key not in VARIABLES]
    if unknown:
        known = ", ".join(key for key in VARIABLES if key.startswith("FLASHGEN_"))
        return Finding(
            name, Status.NOTE, found, f"flashgen does not read {', '.join(unknown)}", f"unset {' '.join(unknown)}; it reads {known}"
        )
    if given.get("XDG_CACHE_HOME") and not os.path.isabs(given["XDG_CACHE_HOME"]):
        return Finding(name, Status.NOTE, found, "XDG_CACHE_HOME is relative, and therefore ignored", "give an absolute path, or unset it")
    return Finding(name, Status.OK, found)

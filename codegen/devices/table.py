"""The table of known devices: one row a GPU model, with the sources of its figures. What is done with the rows is in `__init__.py`.

Clocks are boost clocks unless a note says otherwise. A figure that sources disagree on has a note: which one was taken, and why.
`docs/devices.md` is this table for people: `python tools/devices_page.py > docs/devices.md` writes it, a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import choice_error
from ..target import targets
from ..typed import require_field_types


@dataclass(frozen=True)
class Citation:
    """Where figures come from."""

    title: str
    url: str


@dataclass(frozen=True)
class KnownDevice:
    """One GPU model.

    key:        what `--device` calls it
    names:      as the driver reports it, the usual one first
    arch:       name of its target
    sm_count:   streaming multiprocessors
    clock_mhz:  SM clock under load
    l2_mib:     L2 cache, in MiB
    gb_per_s:   memory bandwidth, in 1e9 bytes a second
    gb:         memory, in GB as data sheets count them
    mma_rate:   share of the target's mma rate at which it accumulates in fp32
    measured:   whether the model's constants were fitted to times of this device
    aliases:    other names for `--device`
    """

    key: str
    names: tuple[str, ...]
    arch: str
    sm_count: int
    clock_mhz: int
    l2_mib: int
    gb_per_s: int
    gb: int
    sources: tuple[Citation, ...]
    mma_rate: float = 1.0
    measured: bool = False
    aliases: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        require_field_types(self)
        if self.arch not in targets():
            raise choice_error(f"arch of device {self.key}", self.arch, targets())


def _techpowerup(page: str) -> Citation:
    return Citation(f"TechPowerUp GPU database, {page.rpartition('.')[0]}", f"https://www.techpowerup.com/gpu-specs/{page}")


_NVIDIA = "https://www.nvidia.com/content"
_IMAGES = "https://images.nvidia.com/aem-dam"
_A100_SHEET = Citation(
    "NVIDIA A100 data sheet", f"{_NVIDIA}/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A100_PAPER = Citation(
    "NVIDIA A100 architecture white paper", f"{_IMAGES}/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_GA102_PAPER = Citation(
    "NVIDIA GA102 architecture white paper 2.0", f"{_NVIDIA}/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_ADA_PAPER = Citation("NVIDIA Ada architecture white paper", f"{_IMAGES}/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf")
_H100_SHEET = Citation("NVIDIA H100 data sheet", "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet")
_H100_PAPER = Citation(
    "NVIDIA H100 architecture white paper 1.04", "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
)
_RTX_PAPER = Citation(
    "NVIDIA RTX Blackwell white paper", f"{_IMAGES}/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)

_HOPPER_CLOCK = (
    "Clock: the same as the H200's, which has the same chip; the boost clock is 1830 MHz for tensor work and 1980 MHz otherwise."
)

DEVICES = (
    # Ampere, data centre
    KnownDevice(
        "a100", ("NVIDIA A100-SXM4-80GB",), "sm_80", 108, 1410, 40, 2039, 80,
        (_A100_SHEET, _A100_PAPER, _techpowerup("a100-sxm4-80-gb.c3746")), aliases=("a100-80gb", "a100-sxm"),
    ),
    KnownDevice(
        "a100-40gb", ("NVIDIA A100-SXM4-40GB",), "sm_80", 108, 1410, 40, 1555, 40,
        (_A100_SHEET, _A100_PAPER, _techpowerup("a100-sxm4-40-gb.c3506")),
    ),
    KnownDevice(
        "a100-pcie", ("NVIDIA A100 80GB PCIe",), "sm_80", 108, 1410, 40, 1935, 80,
        (_A100_SHEET, _A100_PAPER, _techpowerup("a100-pcie-80-gb.c3821")),
        note="L2: TechPowerUp says 80 MB; the white paper's 40 MB is that of every A100.",
    ),
    KnownDevice(
        "a100-pcie-40gb", ("NVIDIA A100-PCIE-40GB",), "sm_80", 108, 1410, 40, 1555, 40,
        (_A100_SHEET, _A100_PAPER, _techpowerup("a100-pcie-40-gb.c3623")),
    ),
    # Ampere with GDDR
    KnownDevice(
        "a10", ("NVIDIA A10",), "sm_86", 72, 1695, 6, 600, 24,
        (
            Citation("NVIDIA A10 data sheet", f"{_NVIDIA}/dam/en-zz/Solutions/Data-Center/a10/pdf/datasheet-new/nvidia-a10-datasheet.pdf"),
            _techpowerup("a10-pcie.c3793"),
        ),
    ),
    KnownDevice(
        "a10g", ("NVIDIA A10G",), "sm_86", 80, 1710, 6, 600, 24,
        (
            Citation(
                "NVIDIA TensorRT-LLM, cluster_info.py",
                "https://github.com/NVIDIA/TensorRT-LLM/blob/16d2467ea8e3b45d7d9555010c2ad018d006d5c1/tensorrt_llm/auto_parallel/cluster_info.py",
            ),
            _techpowerup("a10g.c3798"),
        ),
        mma_rate=0.5,
        note="SMs: TechPowerUp says 72, its driver 80. Half rate: 70 TFLOP/s by TensorRT-LLM's table are 80 SMs at 512 FLOP a cycle.",
    ),
    KnownDevice(
        "a40", ("NVIDIA A40",), "sm_86", 84, 1740, 6, 696, 48,
        (
            Citation("NVIDIA A40 data sheet", "https://images.nvidia.cn/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"),
            _GA102_PAPER,
            _techpowerup("a40-pcie.c3700"),
        ),
    ),
    KnownDevice("rtx-a6000", ("NVIDIA RTX A6000",), "sm_86", 84, 1800, 6, 768, 48, (_GA102_PAPER, _techpowerup("rtx-a6000.c3686"))),
    KnownDevice(
        "rtx3090", ("NVIDIA GeForce RTX 3090",), "sm_86", 82, 1695, 6, 936, 24,
        (_GA102_PAPER, _techpowerup("geforce-rtx-3090.c3622")), mma_rate=0.5,
    ),
    KnownDevice(
        "rtx3080", ("NVIDIA GeForce RTX 3080",), "sm_86", 68, 1710, 5, 760, 10,
        (_GA102_PAPER, _techpowerup("geforce-rtx-3080.c3621")), mma_rate=0.5,
        note="The board with 10 GB; that with 12 GB has 70 SMs and more bandwidth under the same name.",
    ),
    KnownDevice(
        "orin", ("Orin",), "sm_87", 16, 1300, 4, 205, 64,
        (
            Citation(
                "NVIDIA Jetson AGX Orin technical brief",
                f"{_NVIDIA}/dam/en-zz/Solutions/gtcf21/jetson-orin/nvidia-jetson-agx-orin-technical-brief.pdf",
            ),
            _techpowerup("jetson-agx-orin-64-gb.c4085"),
        ),
        aliases=("jetson-agx-orin",),
        note="The AGX module with 64 GB; smaller ones have the same name. L2: TechPowerUp says 6 MB, the brief and the driver 4 MiB.",
    ),
    # Ada
    KnownDevice(
        "l4", ("NVIDIA L4",), "sm_89", 58, 2040, 48, 300, 24,
        (Citation("NVIDIA L4 data sheet", "https://nvdam.widen.net/s/rvq98gbwsw/l4-datasheet-2595652"), _techpowerup("l4.c4091")),
        note="SMs: TechPowerUp says 60; the driver says 58, and so do the data sheet's 121 TFLOP/s.",
    ),
    KnownDevice(
        "l40s", ("NVIDIA L40S",), "sm_89", 142, 2520, 96, 864, 48,
        (Citation("NVIDIA L40S data sheet", "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"), _techpowerup("l40s.c4173")),
        note="L2: TechPowerUp says 48 MB; its driver says 96 MiB, all that AD102 has by the Ada white paper.",
    ),
    KnownDevice(
        "rtx6000-ada", ("NVIDIA RTX 6000 Ada Generation",), "sm_89", 142, 2505, 96, 960, 48,
        (_ADA_PAPER, _techpowerup("rtx-6000-ada-generation.c3933")),
    ),
    KnownDevice(
        "rtx4090", ("NVIDIA GeForce RTX 4090",), "sm_89", 128, 2520, 72, 1008, 24,
        (_ADA_PAPER, _techpowerup("geforce-rtx-4090.c3889")), mma_rate=0.5,
    ),
    # Hopper
    KnownDevice(
        "h100", ("NVIDIA H100 80GB HBM3",), "sm_90a", 132, 1755, 50, 3350, 80,
        (_H100_SHEET, _H100_PAPER, _techpowerup("h100-sxm5-80-gb.c3900")), aliases=("h100-sxm", "h100-80gb"), note=_HOPPER_CLOCK,
    ),
    KnownDevice(
        "h100-pcie", ("NVIDIA H100 PCIe",), "sm_90a", 114, 1620, 50, 2000, 80,
        (_H100_SHEET, _H100_PAPER, _techpowerup("h100-pcie-80-gb.c3899")),
        note="Clock: what the data sheet's 756 TFLOP/s (dense fp16) come to; the boost clock is 1755 MHz outside tensor work.",
    ),
    KnownDevice(
        "h200", ("NVIDIA H200",), "sm_90a", 132, 1755, 60, 4800, 141,
        (
            Citation("NVIDIA H200 data sheet", "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"),
            _techpowerup("h200-sxm-141-gb.c4255"),
        ),
        measured=True, aliases=("h200-sxm",),
        note="Clock: that of the model's fit; the boost clock is 1980 MHz. L2: its driver says 60 MiB, TechPowerUp 50 MB. "
        "Bandwidth: the data sheet's; TechPowerUp computes 4890 GB/s from the memory clock.",
    ),
    KnownDevice(
        "gh200", ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), "sm_90a", 132, 1755, 60, 4023, 96,
        (
            Citation("NVIDIA GH200 data sheet", "https://nvdam.widen.net/s/rrgqqnpbz8/grace-datasheet-gh200-grace-hopper-superchip-3773000"),
            _H100_PAPER,
        ),
        note="With 96 GB of HBM3. Bandwidth by its driver: 6144 bits at 2619 MHz, twice a cycle; the data sheet says up to 4 TB/s. "
        f"L2 by its driver. {_HOPPER_CLOCK}",
    ),
    # Blackwell, data centre and embedded
    KnownDevice(
        "b200", ("NVIDIA B200",), "sm_100a", 148, 1856, 126, 7672, 180,
        (
            Citation(
                "NVIDIA Blackwell technical brief",
                "https://resources.nvidia.com/en-us-blackwell-architecture/blackwell-architecture-technical-brief",
            ),
            Citation("NVIDIA Blackwell tuning guide", "https://docs.nvidia.com/cuda/blackwell-tuning-guide/index.html"),
            Citation("torchao, peak bandwidth of a B200", "https://github.com/pytorch/ao/pull/4002"),
            _techpowerup("b200.c4210"),
        ),
        note="Clock: what the brief's 2250 TFLOP/s (dense fp16) come to; the boost clock is 1965 MHz. Bandwidth by its driver: 7680 bits "
        "at 3996 MHz, twice a cycle; NVIDIA says 8 TB/s. L2 by the tuning guide; TechPowerUp's L2 and memory are those of one die or less."
        " Memory: of each GPU of a DGX B200.",
    ),
    KnownDevice(
        "thor", ("NVIDIA Thor",), "sm_110a", 20, 1575, 32, 273, 128,
        (
            Citation(
                "NVIDIA, Introducing Jetson Thor",
                "https://developer.nvidia.com/blog/introducing-nvidia-jetson-thor-the-ultimate-platform-for-physical-ai/",
            ),
            Citation("deviceQuery of a Jetson AGX Thor", "https://github.com/NVIDIA/cutlass/issues/2784"),
            _techpowerup("jetson-t5000.c4370"),
        ),
        aliases=("jetson-agx-thor",),
        note="The T5000 module. Clock: what 1035 TFLOP/s (dense fp4) come to; its driver says 1049 MHz, TechPowerUp 2525 MHz.",
    ),
    # Blackwell, consumer and workstation
    KnownDevice(
        "rtx5090", ("NVIDIA GeForce RTX 5090",), "sm_120a", 170, 2407, 96, 1792, 32,
        (_RTX_PAPER, _techpowerup("geforce-rtx-5090.c4216")), mma_rate=0.5,
    ),
    KnownDevice(
        "rtx5080", ("NVIDIA GeForce RTX 5080",), "sm_120a", 84, 2617, 64, 960, 16,
        (_techpowerup("geforce-rtx-5080.c4217"),), mma_rate=0.5,
        note="Half rate as the other GeForce cards of the RTX Blackwell white paper; not verified for this one.",
    ),
    KnownDevice(
        "rtx5070", ("NVIDIA GeForce RTX 5070",), "sm_120a", 48, 2512, 48, 672, 12,
        (_RTX_PAPER, _techpowerup("geforce-rtx-5070.c4218")), mma_rate=0.5,
    ),
    KnownDevice(
        "rtx-pro-6000", ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        "sm_120a", 188, 2617, 128, 1792, 96,
        (_techpowerup("rtx-pro-6000-blackwell.c4272"), _techpowerup("rtx-pro-6000-blackwell-server.c4274")),
        note="Not the Max-Q edition, whose clock is lower. Full rate by analogy with earlier workstation GPUs; not verified.",
    ),
    KnownDevice(
        "gb10", ("NVIDIA GB10",), "sm_121a", 48, 2418, 24, 273, 128,
        (
            Citation(
                "deviceQuery of a DGX Spark",
                "https://blog.kubesimplify.com/blog/"
                "day-3-the-dgx-spark-unpacked-gb10-unified-memory-sm-121-and-the-one-reason-this-hardware-exists",
            ),
            _techpowerup("gb10.c4342"),
        ),
        aliases=("dgx-spark",),
        note="L2: TechPowerUp says 50 MB, its driver 24 MiB. Full rate: users measure 118 TFLOP/s of bf16 with fp32 accumulation.",
    ),
)  # fmt: skip

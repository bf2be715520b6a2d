"""Prints docs/devices.md, the table of known devices for people: `python tools/devices_page.py > docs/devices.md`."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.codegen.devices.table import DEVICES, KnownDevice

INTRODUCTION = """\
# Devices

`flashgen tune --device NAME` predicts for these GPUs where they are not in the machine. A GPU that is here is looked up by the name
that its driver reports, for what the driver does not tell. Case, spaces and dashes do not matter: `--device "RTX 4090"`.

Where times are *measured* the model's constants were fitted to them. For the others they are *predicted*: no measurement on that
device stands behind the model.

`python tools/devices_page.py > docs/devices.md` writes this page from `codegen/devices/table.py`.

| name | also | architecture | SMs | clock MHz | L2 MiB | memory GB | GB/s | fp32 accumulation | times |
|---|---|---|--:|--:|--:|--:|--:|---|---|"""

DRIVER_NAMES = "https://github.com/NVIDIA/open-gpu-kernel-modules/blob/main/src/nvidia/generated/g_nv_name_released.h"
SOURCES = f"""\
## Sources

Names are those of NVIDIA's [kernel modules]({DRIVER_NAMES}) and of drivers' reports. Clocks are boost clocks where no note says
otherwise. "By its driver" is what users' drivers report on such a GPU. NVIDIA's documents were read in transcriptions; the test suite
checks that SMs, clock and rate come to the TFLOP/s that they state.
"""


def main() -> None:
    """See the module's docstring."""
    print(INTRODUCTION)
    for known in DEVICES:
        print(row(known))
    print()
    print(SOURCES)
    for known in DEVICES:
        print("\n".join(entry(known)))


def row(known: KnownDevice) -> str:
    """The device's line of the table."""
    also = ", ".join([*(f"`{alias}`" for alias in known.aliases), *known.names])
    rate, times = ("half rate" if known.mma_rate < 1 else "full rate"), ("measured" if known.measured else "predicted")
    cells = [f"`{known.key}`", also, known.arch, known.sm_count, known.clock_mhz, known.l2_mib, known.gb, known.gb_per_s, rate, times]
    return f"| {' | '.join(map(str, cells))} |"


def entry(known: KnownDevice) -> Iterator[str]:
    """The device's sources and note."""
    yield f"- `{known.key}`: " + "; ".join(f"[{source.title}]({source.url})" for source in known.sources)
    if known.note:
        yield f"  {known.note}"


if __name__ == "__main__":
    main()

"""That `verify` without a GPU sees what dense tensors and short sequences hide."""

from __future__ import annotations

import itertools

import pytest

from flashgen.build.host_fault import HostFaultError
from flashgen.build.host_kernel import HostKernel
from flashgen.codegen.family import Family, Strides, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.measure import Tensors
from flashgen.verification import LONG, SCREENING, Screen
from tests.host.runs import host_kernel

PROBLEM, TARGET = Problem(Dtype.BF16, 64, 64, Mask.FULL), find_target("sm_90a")
FAMILIES = pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
COMPENSATION = {
    "attention_forward": "row.lost[h] += partial[i][h] - (row.sum[h] - before);",
    "attention_forward_sm90": "lost[h] += partial[h][0] - (sum[h] - before);",
}
NAMES, DIMS = ("q", "k", "v", "out"), ("batch", "head", "row")
INCREASED = "setmaxnreg_inc<kConsumerRegisters>"
DECREASED = "setmaxnreg_dec<kProducerRegisters>"


def kernel_of(family: Family, find: str = "", replace: str = "") -> HostKernel:
    spec = KernelSpec(family, PROBLEM, family.default(PROBLEM, TARGET), TARGET)
    text = render(spec, Atoms.HOST).text
    assert not find or text.count(find) == 1
    return host_kernel(spec, Source(spec.name, text.replace(find, replace) if find else text))


def why_rejected(screen: Screen, kernel: HostKernel) -> str:
    try:
        return "; ".join(result.verdict.message for result in screen.judge(kernel) if not result.verdict.ok)
    except HostFaultError as fault:
        return str(fault)


@FAMILIES
def test_a_stride_taken_for_another_is_seen(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor's batch, head and row with the strides of each other one."""
    screen, kernel, strides = Screen(PROBLEM, "cpu", SCREENING[:1]), kernel_of(family), Tensors.strides
    assert not why_rejected(screen, kernel)
    for (taken, of), dim in itertools.product(itertools.permutations(range(4), 2), range(3)):

        def mixed(tensors: Tensors, taken: int = taken, of: int = of, dim: int = dim) -> list[Strides]:
            found = [list(own) for own in strides(tensors)]
            found[taken][dim] = found[of][dim]
            return [tuple(own) for own in found]  # type: ignore[misc]

        monkeypatch.setattr(Tensors, "strides", mixed)
        assert why_rejected(screen, kernel), f"{NAMES[taken]}'s stride of its {DIMS[dim]} was taken from {NAMES[of]}, and accepted"


@FAMILIES
def test_sums_without_compensation_are_seen(family: Family) -> None:
    screen = Screen(PROBLEM, "cpu", (), special=[LONG])
    assert [case.workload.len_kv for case in screen.cases(1)] == [LONG[-1]]
    assert not why_rejected(screen, kernel_of(family))
    assert why_rejected(screen, kernel_of(family, COMPENSATION[family.name])).startswith("lse max error")


@pytest.mark.parametrize(
    ("find", "change", "says"),
    [
        (INCREASED, "+ 8", "have 520 registers together, a thread of each; the launch gives them 504"),
        (INCREASED, "- 8", "have 488 registers together, a thread of each; the launch gives them 504"),
        (DECREASED, "+ 8", "have 512 registers together"),
        (DECREASED, "+ 136", "is at setmaxnreg_dec to have 176 registers a thread, and has 168"),
    ],
)
def test_registers_that_do_not_add_up_are_seen(find: str, change: str, says: str) -> None:
    kernel = kernel_of(families()["attention_forward_sm90"], find, find[:-1] + f" {change}>")
    assert says in why_rejected(Screen(PROBLEM, "cpu", SCREENING[1:]), kernel)


def test_threads_that_the_launch_bounds_do_not_say_are_seen() -> None:
    kernel = kernel_of(families()["attention_forward"])
    kernel.threads += 32
    assert "launch: the block has 160 threads, the kernel's launch bounds say 128" in why_rejected(Screen(PROBLEM, "cpu"), kernel)

"""The operators of packed sequences: schemas, implementations, fakes and FLOPs, and the way past the dispatcher for a known signature.

`flashgen::attention_varlen_output` computes out, `flashgen::attention_varlen_forward` lse, too. packed_gradients.py has gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload

from ..launch import packed_arguments
from ..launch.arguments import check_options
from ..launch.asked import asked
from ..launch.packed_arguments import PackedTokens, check_packed_call, check_packed_traced, require_right_values, without_batch
from ..launch.packed_plan import OF_MODIFIERS, PackedPlan, PackedRun, PackedTensors
from ..launch.private_names import knows_tensors, tensor_guard
from ..launch.untraced import untraced
from ..selection import loaded
from . import plans
from .gradients import NoDerivativeError
from .registration import LIBRARY, cpu_is_allowed, register_for_all_others

NO_TRANSFORM = "flashgen.attention_varlen has no forward-mode derivative, and no rules for the transforms of torch.func: use autograd"
ARGUMENTS_OF_TOKENS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? seqused_q, Tensor? seqused_kv, SymInt? max_seqlen_q, SymInt? max_seqlen_kv"
)
_ARGUMENTS = (
    f"(Tensor q, Tensor k, Tensor v, {ARGUMENTS_OF_TOKENS}, bool causal, float? scale, "
    'str modifiers="", SymInt[] sizes=[], float[] numbers=[], Tensor[]? tensors=None)'
)
LIBRARY.define(f"attention_varlen_output{_ARGUMENTS} -> Tensor out")
LIBRARY.define(f"attention_varlen_forward{_ARGUMENTS} -> (Tensor out, Tensor lse)")


class PackedOptions(NamedTuple):
    """What decides a plan beside tensors."""

    causal: bool
    scale: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    modifiers: Given = NO_MODIFIERS

    def tokens(self, tensors: PackedTensors) -> PackedTokens:
        """Of a call's tensors."""
        _, _, _, of_q, of_kv, used_q, used_kv, *_ = tensors
        return PackedTokens(of_q, of_kv, used_q, used_kv, self.max_seqlen_q, self.max_seqlen_kv)


class _Before:
    """What ran a call, and what tells that another one has its signature: see `plans`. distinct: the tensors that PyTorch's check sees."""

    __slots__ = ("count", "distinct", "fits", "generation", "options", "run", "twins")

    def __init__(self, run: PackedRun, tensors: PackedTensors, options: PackedOptions) -> None:
        self.run, self.options, self.count, self.generation = run, options, len(tensors), loaded.kernels.generation
        self.twins = of_keys, _, _, used = _twins(tensors)
        # The check knows no tensor that is there twice.
        excluded = [at for at, is_twin in ((4, of_keys), (6, used)) if is_twin]
        there = [at for at, tensor in enumerate(tensors) if tensor is not None and at not in excluded]
        self.distinct = itemgetter(*there)
        self.fits = tensor_guard(self.distinct(tensors))


def _twins(tensors: PackedTensors) -> tuple[bool, bool, bool, bool]:
    """Whether keys have the boundaries of queries, which used lengths are not there, and whether both are the same."""
    _, _, _, of_q, of_kv, used_q, used_kv, *_ = tensors
    return of_kv is of_q, used_q is None, used_kv is None, used_kv is used_q


@untraced
def packed_run_at_hand(
    tensors: PackedTensors,
    causal: bool,
    scale: float | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    modifiers: Given = NO_MODIFIERS,
) -> PackedRun | None:
    """What runs a call past the dispatcher, if that would do nothing but run it: see `plans.run_at_hand`.

    q, k and v may have a batch of 1 in front: see `PackedPlan`. Where boundaries are checked there is none. Raises ArgumentError as
    `check_options` and `PackedPlan` do.
    """
    before: _Before | None = plans._LOCAL.before_packed
    if (
        before is not None
        and before.count == len(tensors)
        and before.options == (causal, scale, max_seqlen_q, max_seqlen_kv, modifiers)
        and before.twins == (tensors[4] is tensors[3], tensors[5] is None, tensors[6] is None, tensors[6] is tensors[5])
        and before.fits(*before.distinct(tensors))
        and before.generation == loaded.kernels.generation
        and plans.no_modes()
        and type(causal) is bool
    ):
        return before.run
    options = PackedOptions(causal, scale, max_seqlen_q, max_seqlen_kv, modifiers)
    try:
        if packed_arguments.values_are_checked:
            return None
        plan: PackedPlan | None = None
        if plans.no_modes() and type(causal) is bool:
            plan = plans.sized_plans("packed").find(*_sized(tensors, options), alone=True)
        if plan is None:
            if not _is_plain(tensors) or not plans.nobody_listens():
                return None
            key = _signature(tensors, options)
            plan = _plans().get(key)
    except (AttributeError, TypeError, RuntimeError):  # an argument that `check_packed_types` will speak of
        return None
    if plan is None:
        if not all(tensor.is_cuda for tensor in tensors[:3]) or torch.is_autocast_enabled("cuda"):  # which may cast them first
            return None
        check_options(causal, scale, "bshd", False)
        return _new_plan(key, tensors, options).run
    if knows_tensors and type(causal) is bool:
        if plan.before is None and plan.met and not any(tensor is not None and tensor.requires_grad for tensor in tensors):
            plan.before = _Before(plan.run, tensors, options)
        plan.met = True
        plans._LOCAL.before_packed = plan.before
    return plan.run


def _is_plain(tensors: PackedTensors) -> bool:
    """Whether the dispatcher would do nothing with a call of these but hand it to the kernel."""
    differentiates = torch.is_grad_enabled()
    if any(tensor is None for tensor in tensors[:3]):
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not torch.Tensor or tensor.is_neg() or (differentiates and tensor.requires_grad)):
            return False
    return True


def _signature(tensors: PackedTensors, options: PackedOptions) -> tuple[Any, ...]:
    """What decides a plan. Which tensors are not there options do not tell."""
    of_tensors = tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    return (of_tensors, options, loaded.kernels.generation)


def _sized(tensors: PackedTensors, options: PackedOptions) -> tuple[tuple[Any, ...], list[torch.Tensor], tuple[int | None, int | None]]:
    """What `SizedPlans` is told of a call: what decides plans but for sizes, tensors that are there, and expected lengths."""
    causal, scale, max_seqlen_q, max_seqlen_kv, modifiers = options
    there = [tensor for tensor in tensors if tensor is not None]
    known = causal, scale, modifiers, tensors[5] is None, tensors[6] is None, loaded.kernels.generation
    return known, there, (max_seqlen_q, max_seqlen_kv)


def _new_plan(key: tuple[Any, ...], tensors: PackedTensors, options: PackedOptions) -> PackedPlan:
    """The plan for a signature that this thread has not met."""
    plan, (known, there, hints) = PackedPlan(*_checks(tensors, options)), _sized(tensors, options)
    are_there = [tensor is not None for tensor in tensors]

    def planned(found: Sequence[Any], lengths: Any) -> tuple[Any, ...]:
        left = iter(found)
        every = tuple(next(left) if is_there else None for is_there in are_there)
        return plan.numbers_of(*_checks(every, options._replace(max_seqlen_q=lengths[0], max_seqlen_kv=lengths[1])))

    plans.sized_plans("packed").learn(known, there, plan, planned, hints)
    return plans.kept(_plans(), key, plan)


def _plans() -> dict[tuple[Any, ...], PackedPlan]:
    """This thread's."""
    found: dict[tuple[Any, ...], PackedPlan] = plans._LOCAL.__dict__.setdefault("packed_plans", {})
    return found


def packed_plan_for(tensors: PackedTensors, options: PackedOptions) -> PackedPlan:
    """This thread's plan for the call's signature."""
    found = plans.sized_plans("packed").find(*_sized(tensors, options))
    if found is not None:
        return found  # type: ignore[no-any-return]
    key = _signature(tensors, options)
    return _plans().get(key) or _new_plan(key, tensors, options)


def packed_told(*arguments: Any) -> tuple[PackedTensors, PackedOptions]:
    """The tensors, and the options, of what operators are told."""
    max_seqlen_q, max_seqlen_kv, causal, scale, *modified = arguments[OF_MODIFIERS:]
    given, others = asked(*modified)
    return (*arguments[:OF_MODIFIERS], *others), PackedOptions(causal, scale, max_seqlen_q, max_seqlen_kv, given)


def _checked(*arguments: Any) -> tuple[PackedTensors, PackedOptions]:
    tensors, options = packed_told(*arguments)
    if packed_arguments.values_are_checked or without_batch(*tensors[:3])[1]:  # operators have none
        check_packed_call(*_checks(tensors, options))
    if packed_arguments.values_are_checked:
        require_right_values(tensors[0], tensors[1], options.tokens(tensors), options.modifiers, tensors[OF_MODIFIERS:])
    return tensors, options


def _checks(tensors: PackedTensors, options: PackedOptions) -> tuple[Any, ...]:
    """The arguments of `check_packed_call`."""
    q, k, v, *_ = tensors
    return q, k, v, options.tokens(tensors), options.causal, options.scale, options.modifiers, tensors[OF_MODIFIERS:]


def _run_cuda(with_lse: bool, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors, options = _checked(*arguments)
    return packed_plan_for(tensors, options).run(with_lse, *tensors)


@untraced
def _forward_cuda(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _run_cuda(True, *arguments)


@untraced
def _output_cuda(*arguments: Any) -> torch.Tensor:
    return _run_cuda(False, *arguments)[0]


@untraced
def _forward_elsewhere(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, options = packed_told(*arguments)
    given = _checks(tensors, options)
    check_packed_call(*given)
    cpu_is_allowed(tensors[0])
    if packed_arguments.values_are_checked:
        require_right_values(tensors[0], tensors[1], options.tokens(tensors), options.modifiers, tensors[OF_MODIFIERS:])
    from . import cpu

    return cpu.packed_attention_on_cpu(*given)


@untraced
def _output_elsewhere(*arguments: Any) -> torch.Tensor:
    return _forward_elsewhere(*arguments)[0]


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, _, v, *_ = arguments
    check_packed_traced(*_checks(*packed_told(*arguments)))
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _output_fake(*arguments: Any) -> torch.Tensor:
    return _forward_fake(*arguments)[0]


def refuse_mapped(*_: Any) -> NoReturn:
    """Raises NoDerivativeError: see NO_TRANSFORM."""
    raise NoDerivativeError(NO_TRANSFORM)


def register_packed(name: str, cuda: Callable[..., Any], elsewhere: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Of an operator that is defined, what it does on a GPU, elsewhere, and on fake tensors; torch.vmap is refused."""
    LIBRARY.impl(name, cuda, "CUDA")
    register_for_all_others(name, elsewhere)
    torch.library.register_fake(f"flashgen::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"flashgen::{name}", refuse_mapped, lib=LIBRARY)


register_packed("attention_varlen_output", _output_cuda, _output_elsewhere, _output_fake)
register_packed("attention_varlen_forward", _forward_cuda, _forward_elsewhere, _forward_fake)
attention_varlen_output = torch.ops.flashgen.attention_varlen_output.default
attention_varlen_forward = torch.ops.flashgen.attention_varlen_forward.default


@register_flop_formula([torch.ops.flashgen.attention_varlen_output, torch.ops.flashgen.attention_varlen_forward])
def _flops(*arguments: Any, **_: Any) -> int:
    """For `torch.utils.flop_counter`; shapes in place of tensors."""
    return flops_of_packed("forward", *arguments)


def flops_of_packed(operation: str, q: Sequence[int], k: Sequence[int], v: Sequence[int], boundaries: Sequence[int], *rest: Any) -> int:
    """Floating-point operations on tensors of these shapes. How long each sequence is only the device knows: all count as equal."""
    _, _, _, _, _, causal, _, *modified = rest  # behind boundaries of keys come used and expected lengths
    nothing: tuple[Any, ...] = ("", (), (), None)
    names, sizes, numbers, shapes = (*modified, *nothing[len(modified) :])
    given = asked(names, sizes, numbers, [torch.empty(shape, device="meta") for shape in shapes or ()])[0]
    mask = Mask.CAUSAL if causal else Mask.FULL
    problem = Problem(Dtype.BF16, q[2], v[2], mask, operation, modifiers=given.names, sequences=Sequences.PACKED)
    workload = Workload(boundaries[0] - 1, q[1], k[1], q[0], k[0], **dict(given.sizes), tokens_q=q[0], tokens_kv=k[0])
    return int(operation_of(problem).flops(problem, workload))  # the dtype does not matter

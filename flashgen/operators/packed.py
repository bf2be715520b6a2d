"""The operators of packed sequences: schemas, implementations, fakes and FLOPs, and the way past the dispatcher for a known signature.

`flashgen::attention_varlen_output` computes out, `flashgen::attention_varlen_forward` lse, too. packed_gradients.py has gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload

from ..launch import packed_arguments
from ..launch.arguments import check_options
from ..launch.asked import asked, signature_of
from ..launch.packed_arguments import MOST_TOKENS, PackedTokens, check_packed_call, check_packed_traced, require_right_values
from ..launch.packed_plan import PackedPlan, PackedRun
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
_BOTH = (True, True)


class PackedOptions(NamedTuple):
    """What decides a plan beside tensors. has_seqused: of queries, and of keys."""

    causal: bool
    scale: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    has_seqused: tuple[bool, bool]
    modifiers: Given = NO_MODIFIERS

    def tokens(self, tensors: Sequence[torch.Tensor]) -> PackedTokens:
        """Of all tensors of a call, in the order of its operands."""
        used = iter(tensors[5:])
        used_q, used_kv = (next(used) if has else None for has in self.has_seqused)
        return PackedTokens(tensors[3], tensors[4], used_q, used_kv, self.max_seqlen_q, self.max_seqlen_kv)

    @property
    def first_of_modifiers(self) -> int:
        """Which of all tensors is the first of modifiers."""
        return 5 + sum(self.has_seqused)


class _Before:
    """What ran a call, and what tells that another one has its signature: see `plans`."""

    __slots__ = ("count", "fits", "generation", "options", "run")

    def __init__(self, run: PackedRun, tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> None:
        different = _different(tensors, options)
        self.run, self.options, self.count, self.generation = run, options, len(different), loaded.kernels.generation
        self.fits = tensor_guard(different)


def _different(tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> tuple[torch.Tensor, ...]:
    """Without what is of keys where it is that of queries as well: PyTorch's check knows no tensor that is there twice."""
    if options.has_seqused == _BOTH and tensors[6] is tensors[5]:
        tensors = (*tensors[:6], *tensors[7:])
    return (*tensors[:4], *tensors[5:]) if tensors[4] is tensors[3] else tensors


@untraced
def packed_run_at_hand(tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> PackedRun | None:
    """What runs a call past the dispatcher, if that would do nothing but run it: see `plans.run_at_hand`. tensors: all that are there.

    Where boundaries are checked there is none. Raises ArgumentError as `check_options` and `PackedPlan` do.
    """
    before: _Before | None = plans._LOCAL.before_packed
    different = _different(tensors, options)
    if (
        before is not None
        and before.count == len(different)
        and before.options == options
        and before.fits(*different)
        and before.generation == loaded.kernels.generation
        and plans.no_modes()
        and type(options.causal) is bool
    ):
        return before.run
    try:
        if packed_arguments.values_are_checked or not _is_plain(tensors) or not plans.nobody_listens():
            return None
        key = _signature(tensors, options)
        plan = _plans().get(key)
    except (AttributeError, TypeError, RuntimeError):  # an argument that `check_packed_types` will speak of
        return None
    if plan is None:
        if not all(tensor.is_cuda for tensor in tensors[:3]):
            return None
        check_options(options.causal, options.scale, "bshd", False)
        return _new_plan(key, tensors, options).run
    if knows_tensors and type(options.causal) is bool:
        if plan.before is None and not any(tensor.requires_grad for tensor in tensors):
            plan.before = _Before(plan.run, tensors, options)
        plans._LOCAL.before_packed = plan.before
    return plan.run


def _is_plain(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the dispatcher would do nothing with a call of these but hand it to the kernel."""
    return not any(type(t) is not torch.Tensor or t.is_neg() or (t.requires_grad and torch.is_grad_enabled()) for t in tensors)


def _signature(tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> tuple[Any, ...]:
    """What decides a plan."""
    return (signature_of(tensors), options, loaded.kernels.generation)


def _but_for_tokens(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A signature without what `PackedPlan.with_tokens` looks at; None for one that needs all checks: strides of one token mean nothing."""
    (of_q, of_k, of_v, *others), options, generation = key
    least, most = 2, MOST_TOKENS
    if not len(of_q[0]) == len(of_k[0]) == len(of_v[0]) == 3 or of_k[0][0] != of_v[0][0]:
        return None
    if not (least <= of_q[0][0] <= most and least <= of_k[0][0] <= most):
        return None
    for length in options[2:4]:
        if length is not None and not (type(length) is int and 0 <= length <= most):
            return None
    of_tokens = (*of_q[0][1:], *of_q[1:], *of_k[0][1:], *of_k[1:], *of_v[0][1:], *of_v[1:])
    return of_tokens, tuple(others), options.causal, options.scale, options.has_seqused, options.modifiers, generation


def _new_plan(key: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> PackedPlan:
    """The plan for a signature that this thread has not met: made from one that differs in its tokens alone, if there is one."""
    alike: dict[tuple[Any, ...], PackedPlan] = plans._LOCAL.__dict__.setdefault("packed_but_for_tokens", {})
    but_for_tokens = _but_for_tokens(key)
    known = alike.get(but_for_tokens) if but_for_tokens is not None else None
    if known is not None:
        return plans.kept(_plans(), key, known.with_tokens(tensors[0], tensors[1], tensors[2], options.tokens(tensors)))
    plan = PackedPlan(*_checks(tensors, options))
    if but_for_tokens is not None and plan.call is not None:
        plans.kept(alike, but_for_tokens, plan)
    return plans.kept(_plans(), key, plan)


def _plans() -> dict[tuple[Any, ...], PackedPlan]:
    """This thread's."""
    found: dict[tuple[Any, ...], PackedPlan] = plans._LOCAL.__dict__.setdefault("packed_plans", {})
    return found


def packed_plan_for(tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> PackedPlan:
    """This thread's plan for the call's signature."""
    key = _signature(tensors, options)
    return _plans().get(key) or _new_plan(key, tensors, options)


def packed_told(*arguments: Any) -> tuple[tuple[torch.Tensor, ...], PackedOptions]:
    """All tensors, and the options, of what operators are told."""
    q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, max_seqlen_q, max_seqlen_kv, causal, scale, *modified = arguments
    given, others = asked(*modified)
    there = [tensor for tensor in (seqused_q, seqused_kv) if tensor is not None]
    has_seqused = seqused_q is not None, seqused_kv is not None
    options = PackedOptions(causal, scale, max_seqlen_q, max_seqlen_kv, has_seqused, given)
    return (q, k, v, cu_seqlens_q, cu_seqlens_kv, *there, *others), options


def _checked(*arguments: Any) -> tuple[tuple[torch.Tensor, ...], PackedOptions]:
    tensors, options = packed_told(*arguments)
    if packed_arguments.values_are_checked:
        check_packed_call(*_checks(tensors, options))
        require_right_values(tensors[0], tensors[1], options.tokens(tensors))
    return tensors, options


def _checks(tensors: tuple[torch.Tensor, ...], options: PackedOptions) -> tuple[Any, ...]:
    """The arguments of `check_packed_call`."""
    q, k, v, *_ = tensors
    return q, k, v, options.tokens(tensors), options.causal, options.scale, options.modifiers, tensors[options.first_of_modifiers :]


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
        require_right_values(tensors[0], tensors[1], options.tokens(tensors))
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

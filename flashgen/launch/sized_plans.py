"""`SizedPlans`: the plans of calls that differ in sizes alone, which are made from one another by functions of sizes (codegen/sizes.py).

A call of sizes that nobody has met is planned in full, and once more with sizes that remember how numbers came about. What that gives is a
way: a function from sizes to all numbers of a plan, for those sizes that pass all comparisons as the first ones did. It is planning itself
that was recorded, with its checks and its limits, so a plan by a way is the one that planning would make, as long as records and imports
are what they were. Which entries of shapes and strides are sizes follows from the calls: those that have differed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.sizes import function_of_sizes

from ..selection import loaded
from .private_names import form_guard, knows_tensors
from .sized_plan import SizedPlan
from .sized_tensor import SizedTensor

# Plans that a form keeps, of sizes that come again, and sizes that it remembers for that. If it kept those that come once, each would in
# time cost the collector of garbage more than it takes to make.
_MOST_PLANS, _MOST_MET = 256, 2**14
_MOST_KINDS = 128  # beyond that the oldest half is dropped
# Of the same options, and of a form: a call looks at one after the other. Batches beside queries have more than a hundred ways in decoding:
# each of both decides which tiles, shares of keys and semaphores there are.
_MOST_FORMS, _MOST_WAYS = 8, 256
_MOST_RECORDED = 1024  # of a kind, which takes some seconds in all: whose calls find no way again and again gives up

_PLAIN = {torch.Tensor, torch.nn.Parameter}

Numbers = tuple[Any, ...]  # what a plan has of sizes
_Sizes = tuple[int, ...]
_Hints = tuple[Any, ...]  # of lengths, which a caller expects: ints or None
_Entries = frozenset[tuple[int, int, int]]  # each of which tensor, 0 for its shape or 1 for its strides, and of which dimension
_ENTRIES = "shape", "stride()"


class _Way:
    """A plan, and the function that gives the numbers of another one. sources: what holds as long as these do."""

    __slots__ = ("numbers", "plan", "sources")

    def __init__(self, plan: SizedPlan, numbers: Callable[..., Numbers | None], sources: Any) -> None:
        self.plan, self.numbers, self.sources = plan, numbers, sources


class _Form:
    """Calls whose tensors differ in some entries of shapes and strides alone. known: plans of those that were met, `last` the last one.

    sizes: gives those entries, and hints, of a call
    fits: whether tensors, each once, are those of such a call; twins: places of those that are there twice
    is_plain: whether no tensor is of a class that may listen to what PyTorch does with it
    """

    __slots__ = (
        "_distinct",
        "_entries",
        "_met",
        "_twins",
        "fits_distinct",
        "is_plain",
        "known",
        "last",
        "requires_grad",
        "sizes",
        "ways",
    )

    def __init__(self, tensors: Sequence[torch.Tensor], twins: tuple[tuple[int, int], ...], varying: _Entries, hints: _Hints) -> None:
        again = {second for _, second in twins}
        self._twins, self._distinct = twins, [i for i in range(len(tensors)) if i not in again]
        self._entries = sorted(one for one in varying if one[0] not in again)
        self.sizes = _reader(self._entries, hints)
        self.fits_distinct = form_guard([tensors[i] for i in self._distinct], [_varying_of(i, varying) for i in self._distinct])
        self.is_plain = {*map(type, tensors)} <= _PLAIN
        self.requires_grad = any(tensor.requires_grad for tensor in tensors)
        self.known: dict[_Sizes, Any] = {}
        self.last: tuple[_Sizes, Any] = (), None
        self._met: set[int] = set()
        self.ways: list[_Way] = []

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        if not self._twins:
            return self.fits_distinct(*tensors)
        for first, second in self._twins:
            if tensors[first] is not tensors[second]:
                return False
        return self.fits_distinct(*[tensors[i] for i in self._distinct])

    def plan(self, tensors: Sequence[torch.Tensor], hints: _Hints) -> Any:
        """The plan of a call that fits; None if it must be made in full."""
        sizes = self.sizes(tensors, hints)
        last, plan = self.last
        if last != sizes:
            plan = self.known.get(sizes)
        if plan is not None or not self.ways:
            return plan
        sources = loaded.kernels.sources()
        for at, way in enumerate(self.ways):
            try:
                found = way.numbers(sizes)
                if found is None:
                    continue
                if way.sources != sources:
                    self.ways.clear()
                    return None
                plan = way.plan.with_numbers(found)
            except (ArithmeticError, ArgumentError):  # planning it in full says what is wrong
                continue
            if at:
                self.ways.insert(0, self.ways.pop(at))
            return self.keep(sizes, plan)
        return None

    def keep(self, sizes: _Sizes, plan: Any) -> Any:
        """The plan, which is known until the next one, or from now on if its sizes have come again."""
        self.last, met = (sizes, plan), hash(sizes)
        if met in self._met:
            _drop_old(self.known, _MOST_PLANS)
            self.known[sizes] = plan
        elif len(self._met) < _MOST_MET:
            self._met.add(met)
        else:
            self._met = {met}
        return plan

    def learn(self, tensors: Sequence[torch.Tensor], hints: _Hints, plan: SizedPlan, planned: Callable[..., Numbers]) -> None:
        """Adds the way of a plan that was made in full. planned: see `SizedPlans.learn`."""
        sizes = self.sizes(tensors, hints)
        self.keep(sizes, plan)

        def recorded(given: _Sizes) -> Numbers:
            left = iter(given)
            of = dict(zip(self._entries, left, strict=False))
            found = []
            for i, tensor in enumerate(tensors):
                own = next((first for first, second in self._twins if second == i), i)
                entries = [
                    [of.get((own, which, j), entry) for j, entry in enumerate(plain)]
                    for which, plain in enumerate((tensor.shape, tensor.stride()))
                ]
                found.append(SizedTensor(entries[0], entries[1], tensor.dtype, tensor.device))
            return planned(found, tuple([None if hint is None else next(left) for hint in hints]))

        sources = loaded.kernels.sources()  # those of the recording: they may change meanwhile
        try:
            way = _Way(plan, function_of_sizes(recorded, (sizes,)), sources)
        except Exception:  # a call that has been planned must not fail because nobody can learn from it; a test knows what can be recorded
            return
        del self.ways[_MOST_WAYS - 1 :]
        self.ways.insert(0, way)


class _Kind:
    """Calls that may be of one form. entries: shapes and strides of the first one; varying: which entries have differed."""

    __slots__ = ("entries", "forms", "recorded", "varying")

    def __init__(self, entries: tuple[Any, ...]) -> None:
        self.entries, self.forms, self.recorded = entries, list[_Form](), 0
        self.varying: _Entries = frozenset()


class SizedPlans:
    """A thread's, of one operator."""

    def __init__(self, of_heads: int = 3) -> None:
        """of_heads: of so many tensors, the first ones, the last dimension is a head's, for which kernels are made."""
        self._of_heads = of_heads
        self._forms: dict[Hashable, list[_Form]] = {}
        self._kinds: dict[Hashable, _Kind] = {}

    def find(self, options: Hashable, tensors: Sequence[torch.Tensor], hints: _Hints = (), alone: bool = False) -> Any:
        """The plan of a call like others but for its sizes, if it is known or there is a way to it.

        options: all that decides a plan beside tensors that are there; hints: but for these, expected lengths or None
        alone: past PyTorch's dispatcher: none for tensors of other classes, nor where some require grad and gradients are enabled
        """
        forms = self._forms.get(_with_types(options, hints))
        if forms is not None:
            for at, form in enumerate(forms):
                if form.fits(tensors):
                    if at:
                        forms.insert(0, forms.pop(at))
                    if alone and not (form.is_plain and not (form.requires_grad and torch.is_grad_enabled())):
                        return None
                    return form.plan(tensors, hints)
        return None

    def learn(
        self, options: Hashable, tensors: Sequence[torch.Tensor], plan: SizedPlan, planned: Callable[..., Numbers], hints: _Hints = ()
    ) -> None:
        """Remembers a plan that was made in full: the second of a kind, and each further one, gives a way to others.

        planned: what `plan.with_numbers` takes, of `SizedTensor`s in place of the tensors, and of such hints
        """
        if not knows_tensors or plan.bound is None or not {*map(type, hints)} <= {int, type(None)}:
            return
        twins = tuple((i, j) for j, one in enumerate(tensors) for i in range(j) if tensors[i] is one)
        of_tensors = tuple(
            (one.dtype, one.device, one.ndim, one.requires_grad, one.shape[-1] if i < self._of_heads and one.ndim else 0)
            for i, one in enumerate(tensors)
        )
        options = _with_types(options, hints)
        key = (options, of_tensors, twins)
        entries = tuple((tuple(one.shape), one.stride()) for one in tensors)
        kind = self._kinds.get(key)
        if kind is None:
            _drop_old(self._kinds, _MOST_KINDS)
            self._kinds[key] = _Kind(entries)
            return
        kind.recorded += 1
        if kind.recorded > _MOST_RECORDED:
            return
        varying = kind.varying | _different(kind.entries, entries)
        _drop_old(self._forms, _MOST_KINDS)
        forms = self._forms.setdefault(options, [])
        if varying != kind.varying:
            forms[:] = [form for form in forms if form not in kind.forms]
            kind.varying, kind.forms = varying, []
        kind.forms = [form for form in kind.forms if form in forms]
        form = next((form for form in kind.forms if form.fits(tensors)), None)
        if form is None:  # of other hints alone, or seen from elsewhere in PyTorch's dispatcher
            form = _Form(tensors, twins, varying, hints)
            kind.forms.append(form)
            forms.insert(0, form)
            del forms[_MOST_FORMS:]
        form.learn(tensors, hints, plan, planned)


def _with_types(options: Hashable, hints: _Hints) -> Hashable:
    """Options, and which hints are None: no form is of both. Others than ints are of no form."""
    return (options, *map(type, hints)) if hints else options


def _reader(entries: Sequence[tuple[int, int, int]], hints: _Hints) -> Callable[[Sequence[torch.Tensor], _Hints], _Sizes]:
    """What gives the sizes of a call, of its tensors and hints: these entries, and the hints that are not None here."""
    read = {f"s{i}_{which}": f"tensors[{i}].{_ENTRIES[which]}" for i, which, _ in entries}
    given = [f"s{i}_{which}[{dim}]" for i, which, dim in entries] + [f"hints[{i}]" for i, hint in enumerate(hints) if hint is not None]
    lines = "".join(f"    {name} = {value}\n" for name, value in read.items())
    made: dict[str, Any] = {}
    exec(f"def sizes(tensors, hints):\n{lines}    return ({''.join(f'{one}, ' for one in given)})", made)
    return made["sizes"]  # type: ignore[no-any-return]


def _different(some: tuple[Any, ...], others: tuple[Any, ...]) -> _Entries:
    """Which entries of shapes and strides differ."""
    return frozenset(
        (i, which, dim)
        for i, (one, other) in enumerate(zip(some, others, strict=True))
        for which in (0, 1)
        for dim, (entry, their) in enumerate(zip(one[which], other[which], strict=True))
        if entry != their
    )


def _varying_of(i: int, varying: _Entries) -> tuple[set[int], set[int]]:
    """Dimensions of a tensor whose sizes, and whose strides, vary."""
    return {dim for at, which, dim in varying if (at, which) == (i, 0)}, {dim for at, which, dim in varying if (at, which) == (i, 1)}


def _drop_old(kept: dict[Any, Any], most: int) -> None:
    if len(kept) >= most:
        for old in list(kept)[: most // 2]:
            del kept[old]

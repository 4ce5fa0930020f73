"""Which plan computes a call of an optimized module: made by `optimize`, or for other sizes when they first come."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ai3_ops._torch import pytree, without_autocast
from ai3_ops.explaining.report import OptimizeReport
from ai3_ops.graph.alike import Graphs
from ai3_ops.graph.caches import CACHE, Past, as_examples, as_long, is_cache, noted
from ai3_ops.graph.calls import Calls, Uncapturable
from ai3_ops.graph.network import agree, batch_of, flat, of_one_batch
from ai3_ops.graph.state import copied, others
from ai3_ops.optimizing import mixed_batches, pipeline
from ai3_ops.optimizing.example import COMPARED, Example, of_other_lengths, shown
from ai3_ops.optimizing.example import listed as listed_inputs
from ai3_ops.optimizing.pipeline import Budget, Plan, Settings, Swapped, make_plan, unthorough
from ai3_ops.optimizing.states import StatesChecked
from ai3_ops.programs.lower import Region
from ai3_ops.programs.program import Program
from ai3_ops.selecting.selectors import listed
from ai3_ops.surveying import examples
from ai3_ops.surveying.examples import Inputs

PLANS = 4  # for so many sizes a module keeps plans, or for all that a model calls it with in one call; the oldest goes
SIZES = 1024  # that are known to be one plan's
# That a call may take for other sizes, in all parts of a model together: else the original computes them.
PLAN_SECONDS = 1.0
_planning = threading.RLock()


class Planned(nn.Module):
    """The plans of an optimized module, for the calls of its example and for others."""

    _ai3_signature: inspect.Signature  # of the original's `forward`

    def __init__(self, original: nn.Module, settings: Settings) -> None:
        super().__init__()
        self._ai3_settings = settings
        self._ai3_original: tuple[nn.Module, ...] = (original,)  # not a submodule: names are as in the original
        self._ai3_plans: dict[Any, Plan] = {}
        # Of other calls: of a batch beside inputs of one item for all of it, and those that are left to the original.
        self._ai3_known: dict[Any, Plan] = {}
        # How many of the former were compared, by the inputs that have one item; and of what a cache is updated with `narrow`'s.
        self._ai3_mixed: dict[Any, tuple[int, frozenset[int]]] = {}
        self._ai3_odd: dict[Any, None] = {}  # kinds of caches that cannot be examples, by the calls' kinds
        self._ai3_most = PLANS
        self._ai3_patience = PLAN_SECONDS
        self._ai3_asked = False  # for plans, by further examples: they are made however long it takes
        self._ai3_first: Plan | None = None
        self._ai3_spec: Any = None  # the structure of its example's arguments, and
        self._ai3_plain = -1  # how many tensors, where it was nothing but positional ones
        self._ai3_report = OptimizeReport()
        # The kinds of warnings that were given; of a whole model one, which its parts share.
        self._ai3_told: set[str] = set()

    def plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str = "",
        progress: Callable[[str], None] = lambda _: None,
        whole: nn.Module | None = None,
        budget: Budget | None = None,
        rehearsal: nn.Module | None = None,
        first: Calls | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Makes the first plan, from example inputs; `name` is the module's within the whole model, if it is a part.

        `rehearsal` is a copy that may run meanwhile, as are those of `first`, the first call. `graphs` are those of other parts.
        """
        original = self._ai3_original[0]
        runs = rehearsal or (first and first.cold) or original
        args, kwargs = as_examples(runs, args, kwargs)
        settings = self._ai3_settings

        def planned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
            plan = make_plan(
                runs, args, kwargs, settings, name, progress, whole, budget=budget, first=first, graphs=graphs
            )
            self._begin(plan, args, kwargs)
            return plan

        own = given = args, kwargs
        plan = None
        if first is None and (wide := _wide(args, kwargs)) is not None:
            with contextlib.suppress(Uncapturable):
                plan = planned(*wide)
                mixed = self._planned_mixed(*self._call(args, kwargs))
                if mixed is not None and mixed.body is not None:
                    given = wide
                else:  # a plan of this batch, then
                    plan = None
        plan = plan or planned(args, kwargs)
        # The choices stay, not the selectors, which may be functions that no file holds.
        self._ai3_settings = unthorough(settings, plan.resolved)
        self._ai3_report.parts.append(plan.report)
        if settings.verify != "off" and not (budget and budget.over):
            self._compare_lengths(plan, *given)
            if given is not own:
                self._compare_mixed(plan, *own)

    def _begin(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With the first plan, made of these inputs."""
        leaves, self._ai3_spec = pytree.tree_flatten((args, kwargs))
        self._ai3_first, plan.example = plan, Example.of(leaves)
        self._ai3_plain = len(args) if not kwargs and all(isinstance(x, Tensor) for x in args) else -1
        self._ai3_plans, self._ai3_known = {key_of(leaves, plan.dynamic): plan}, {}

    def _call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], form: str = ""
    ) -> tuple[Any, list[Any], tuple[Any, ...], dict[str, Any], str]:
        """What plans are looked up by, and the leaves of the arguments, before these."""
        assert self._ai3_first is not None
        leaves = pytree.tree_leaves((args, kwargs))
        return key_of(leaves, self._ai3_first.dynamic, form), leaves, args, kwargs, form

    def plan_call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
        progress: Callable[[str], None],
        whole: nn.Module,
        budget: Budget,
        rehearsal: nn.Module,
        graphs: Graphs | None = None,
    ) -> None:
        """Makes a plan for another call of this part, as one step of decoding is; packs are shared."""
        assert self._ai3_first is not None
        args, kwargs, form = self._arranged(*as_examples(rehearsal, args, kwargs))
        own, wide = (args, kwargs), _wide(args, kwargs) if self._ai3_first.dynamic else None
        args, kwargs = wide or own
        key, leaves, *_ = self._call(args, kwargs, form)
        name = self._ai3_report.parts[0].name
        if key in self._ai3_plans:
            return
        try:
            plan = make_plan(rehearsal, args, kwargs, settings, name, progress, whole, budget=budget, graphs=graphs)
        except Uncapturable as reason:
            self._ai3_report.parts[0].notes.append(f"called with {listed_inputs(map(shown, leaves))}: {reason}")
            return
        if plan.dynamic != self._ai3_first.dynamic:  # which is what tells plans apart
            return
        plan.report.name = f"{name}, called with {listed_inputs(shown(x) for x in leaves if isinstance(x, Tensor))}"
        _share_packs(plan, self._ai3_plans.values())
        plan.example = Example.of(leaves, form)
        self._ai3_most += 1
        self._keep(key, plan)
        self._ai3_report.parts.append(plan.report)
        if wide is not None:
            self._planned_mixed(*self._call(*own, form))
        if settings.verify != "off" and not budget.over:
            self._compare_lengths(plan, args, kwargs)
            if wide is not None:
                self._compare_mixed(plan, *own, form)

    def plan_further(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes plans for further example inputs where the programs do not compute them, in the parts, too; packs are shared.

        The choices of algorithms are those of the first example, as far as they can do the other sizes.
        """
        modules = [m for m in self.modules() if isinstance(m, Planned)]
        known = [module._ai3_known for module in modules]
        for module in modules:
            module._ai3_asked, module._ai3_most, module._ai3_known = True, module._ai3_most + 1, {}
        try:
            self(*args, **kwargs)
        finally:
            for module, before in zip(modules, known, strict=True):
                module._ai3_asked, module._ai3_known = False, before | module._ai3_known

    def _planned(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: str) -> Plan | None:
        """The plan for other sizes than before, made now; None where the original computes them."""
        assert self._ai3_first is not None
        body = self._ai3_first.body
        if body is None:  # nothing was gained, as was said: no other sizes are tried in a call
            return None
        if isinstance(body, Swapped):  # only the form is another one
            return replace(self._ai3_first, body=Swapped(body.module, pytree.tree_structure((args, kwargs))))
        what = f"optimized for inputs of {self._ai3_first.example}, called with {listed_inputs(map(shown, leaves))}"
        if form:
            names = f" and {', '.join(map(repr, kwargs))} by name" if kwargs else ""
            what += f" in the form of {len(args)} arguments{names}"
        key = key_of(leaves, self._ai3_first.dynamic, form)
        cached = any(map(is_cache, leaves))
        unequal = self._ai3_first.dynamic and len(_batches(leaves)) > 1
        alike = [] if unequal else self._alike(leaves, form)
        for plan in alike:
            if plan.example and plan.example.takes(leaves, plan.lengths):
                self._keep(key, plan)
                return plan
        if not self._ai3_original:
            raise ValueError(
                f"ai3_ops.optimize: {what}: optimize again, with inputs of these sizes in a list of "
                "example_inputs, or call the module that optimize returned with keep_original=True, which plans anew; a file "
                "has no original"
            )
        with _planning:
            if (known := self._ai3_plans.get(key) or self._ai3_known.get(key)) is not None:
                return known
            costly = self._ai3_first.seconds > self._ai3_patience and not self._ai3_asked
            if cached and costly:  # prompts of any length come once each: no plan is kept of them
                self._warn_of_sizes(what)
                return self._note(key, None)
            if not self._ai3_odd.keys().isdisjoint(_caches(key, leaves)):
                return None
            args, kwargs = as_examples(self._ai3_original[0], args, kwargs)  # a cache stays as it is
            leaves = pytree.tree_leaves((args, kwargs))
            if self._is_odd(key, leaves):
                return None
            of_batch = self._ai3_first.example and self._ai3_first.example.is_of_another_batch(leaves)
            if of_batch and not form and not self._ai3_asked:
                name = self._ai3_report.parts[0].name or "the model"
                if self._tells("batch"):
                    what = f"{name} was {what}: batches of other sizes are computed as by the original, not optimized"
                    warnings.warn(f"ai3_ops.optimize: {what}; optimize for each that matters", stacklevel=5)
                return self._note(key, None)
            for plan in alike:
                if self._computes(plan, (args, kwargs), others(args, kwargs)):
                    self._keep(key, plan)
                    return plan
            if costly and "sizes" in self._ai3_told:
                return self._note(key, None)
            try:
                tried = examples.copied(Inputs(args, kwargs))  # the call itself is still to come
                with torch.no_grad():
                    self._ai3_original[0](*tried.args, **tried.kwargs)
            except Exception as error:  # said at once and once, by the model's own words
                error.add_note(f"ai3_ops.optimize: {what}; the original model fails on these, too")
                raise
            if costly:
                self._warn_of_sizes(what)
                return self._note(key, None)
            try:
                with torch.inference_mode(False), torch.no_grad(), without_autocast():
                    fresh = [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in leaves]
                    a, k = pytree.tree_unflatten(fresh, pytree.tree_structure((args, kwargs)))
                    plan = make_plan(self._ai3_original[0], a, k, self._ai3_settings, self._ai3_report.parts[0].name)
                if self._ai3_first.dynamic and not plan.dynamic and not unequal:  # a key has no batch then
                    raise Uncapturable("its graph is for this batch alone")
            except (Uncapturable, RuntimeError) as error:
                warnings.warn(f"ai3_ops.optimize: {what}: the original computes them ({error})", stacklevel=5)
                return self._note(key, None)
            plan.example = Example.of(leaves, form)
            _share_packs(plan, self._ai3_plans.values())
            if self._ai3_asked:
                self._compare_lengths(plan, a, k)
            else:
                warnings.warn(f"ai3_ops.optimize: {what}: planned anew", stacklevel=5)
            self._keep(key, plan)
            return plan

    def _planned_mixed(
        self, key: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: str
    ) -> Plan | None:
        """For inputs of which some have one item for the batch of the others: the plan for as many of those as the batch has.

        None where inputs are otherwise, and where that plan is not what the original computes of these, or takes longer: the
        first calls in which the same inputs have one item are compared.
        """
        first = self._ai3_first
        if first is None or first.body is None or isinstance(first.body, Swapped) or not first.dynamic:
            return None
        if self._ai3_asked or (wide := of_one_batch(leaves)) is None:
            return None
        alike, structure = key_of(wide, True, form), pytree.tree_structure((args, kwargs))
        with _planning:
            if key in self._ai3_known:
                return self._ai3_known[key]
            if not self._ai3_odd.keys().isdisjoint(_caches(key, leaves)):
                return None
            plan, mixed = self._ai3_plans.get(alike), None
            # Of a plan that has lengths open, a few comparisons of a batch tell of all.
            likely = plan or next(iter(self._alike(wide, form)), None)
            final = likely is not None and likely.lengths is None
            enough = 1 if final or not self._ai3_original else COMPARED
            alone = tuple(x is not y for x, y in zip(leaves, wide, strict=True))
            which = likely and likely.example, alone, batch_of(wide)
            count, places = self._ai3_mixed.get(which, (0, None))
            positional, named = pytree.tree_unflatten(wide, structure)
            if plan is None and count >= enough:
                plan = self._planned(wide, positional, named, form)
                count = count if plan is likely else 0
            if count >= enough and plan is not None and plan.body is not None and places is not None:
                return self._note(key, replace(plan, body=mixed_batches.Mixed(plan.body, places)))
            if not self._ai3_original:
                return None
            original = self._ai3_original[0]
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._device(leaves), enabled=False):
                own = as_examples(original, args, kwargs)
                if self._is_odd(key, pytree.tree_leaves(own)):
                    return None
                own = pytree.tree_map_only(Tensor, _apart, own)
                places = mixed_batches.alone_in_updates(original, own)
                plan = None if places is None else plan or self._planned(wide, positional, named, form)
                if plan is not None and plan.body is not None and places is not None:
                    copy, body = copied(original, sharing=True), mixed_batches.Mixed(plan.body, places)
                    mixed = replace(plan, body=body)
                    same = self._agrees(mixed, copy, *own) and self._agrees(mixed, copy, *others(*own)) is not False
                    if same and not count and mixed_batches.is_slower(copy, body, *own):
                        return self._note(key, None)
                    mixed = mixed if same else None
            if mixed is not None and places is not None:
                self._ai3_mixed = dict([*self._ai3_mixed.items(), (which, (count + 1, places))][-SIZES:])
            self._note(key, mixed)
            return mixed

    def _is_odd(self, key: Any, leaves: list[Any]) -> bool:
        """Whether a cache could not be made an example, so that each call of it would change it.

        It is remembered: to find it out copies the cache, and calls the original.
        """
        found = _caches(key, leaves)
        self._ai3_odd = dict([*self._ai3_odd.items(), *dict.fromkeys(found).items()][-SIZES:])
        return bool(found)

    def _note(self, key: Any, plan: Plan | None) -> Plan:
        """What computes calls of this kind from now on: None for the original."""
        assert self._ai3_first is not None
        plan = plan or Plan(None, self._ai3_first.dynamic, None, self._ai3_first.report)
        self._ai3_known = dict([*self._ai3_known.items(), (key, plan)][-SIZES:])
        return plan

    def _warn_of_sizes(self, what: str) -> None:
        """Once."""
        if self._tells("sizes"):
            what = f"{self._ai3_report.parts[0].name or 'the model'} was {what}"
            warnings.warn(
                f"ai3_ops.optimize: {what}: its programs are for other sizes, and new ones would take longer than a call "
                "may: computed as by the original, not optimized; optimize for each that matters",
                stacklevel=6,
            )

    def _keep(self, key: Any, plan: Plan) -> None:
        """One more kind of calls. A plan's oldest go, and the oldest plans but the first, one without a program before others."""
        plans = {**self._ai3_plans, key: plan}
        keys: dict[int, list[Any]] = {id(self._ai3_first): []}
        for k, own in plans.items():
            keys.setdefault(id(own), []).append(k)
        first, *further = keys.values()
        further.sort(key=lambda own: plans[own[0]].body is not None)
        gone = [k for own in (first, *further) for k in own[1 : len(own) - SIZES + 1]]
        gone += [k for own in further[: max(0, len(further) - self._ai3_most + 1)] for k in own]
        self._ai3_plans = {k: own for k, own in plans.items() if k not in set(gone)}

    def _alike(self, leaves: list[Any], form: str) -> list[Plan]:
        """The plans whose examples a call differs from in sizes alone, of which the first plan is the first."""
        plans = {id(plan): plan for plan in (self._ai3_first, *self._ai3_plans.values()) if plan is not None}
        examples = ((plan, plan.example) for plan in plans.values() if plan.body is not None)
        return [plan for plan, own in examples if own is not None and own.form == form and own.is_alike(leaves)]

    def _compare_lengths(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares other lengths, made of a plan's example's, with the original, so that no call has to."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if plan.body is None or plan.lengths is None:
            return
        compared = list[dict[str, int]]()
        with warnings.catch_warnings():  # a model may have something to say about long ones
            warnings.simplefilter("ignore")
            for lengths, other in of_other_lengths(leaves, plan.lengths):
                given = pytree.tree_unflatten(other, spec)
                if self._computes(plan, others(*given) if compared else given):
                    compared.append(lengths)
                if len(compared) == COMPARED:
                    break
        if len(compared) == COMPARED:
            at = listed([" and ".join(map(str, lengths.values())) for lengths in compared])
            plan.report.notes.append(f"other lengths run by the same programs: compared with the module at {at}")

    def _compare_mixed(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], form: str = "") -> None:
        """Compares other lengths of a batch beside inputs of one item with the original, so that no call has to."""
        if plan.lengths is None:
            return
        (leaves, spec), told = pytree.tree_flatten((args, kwargs)), set(self._ai3_told)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _, other in islice(of_other_lengths(leaves, plan.lengths), COMPARED - 1):
                positional, named = pytree.tree_unflatten(other, spec)
                self._planned_mixed(*self._call(positional, named, form))
        self._ai3_told.intersection_update(told)  # no call of the user's

    def _computes(self, plan: Plan, *inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        """Whether a plan's programs compute other sizes, too: as a copy of the original does, on these inputs.

        Of the first plan any sizes, of others those that their lengths have. Of a batch that is left open, the first item.
        """
        (args, kwargs), example = inputs[0], plan.example
        leaves = pytree.tree_leaves(inputs[0])
        if plan.body is None or example is None or not example.is_alike(leaves):
            return False
        if plan is not self._ai3_first and not example.other_lengths(leaves, plan.lengths):
            return False
        copy, compared = copied(self._ai3_original[0], sharing=True), 0
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._device(args, kwargs), enabled=False):
            item = functools.partial(
                pytree.tree_map_only, Tensor, lambda x: (x[:1] if plan.dynamic else x).detach().clone()
            )
            for given in map(item, inputs):
                same = self._agrees(plan, copy, *given)
                if same is None:
                    break
                if not same:
                    return False
                compared += 1
        if compared:
            example.note_comparison(leaves, plan.lengths)
        return compared > 0

    @staticmethod
    def _agrees(plan: Plan, copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether a plan computes what a copy of the original does; None of sizes, or of values, that the original refuses."""
        assert plan.body is not None
        worst = max(pipeline.WORST_ERROR, pipeline.OWN_ERROR * (plan.report.error or 0.0))
        try:
            with noted() as theirs:
                calls = Calls(copy, args, kwargs)
        except Exception:
            return None
        _, expected = calls.made[0]
        if calls.alters:
            return False
        try:
            with StatesChecked(), noted() as ours:
                outputs = pipeline.flat_outputs(plan.body(*flat(args, kwargs)))
            returned = outputs if plan.returned is None else plan.returned.leaves(outputs)
            return mixed_batches.are_the_same(ours, theirs) and all(
                agree(one, other, worst) for one, other in zip(returned, expected, strict=True)
            )
        except Exception:  # of sizes that a program or a step does not take
            return False

    def _arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], str]:
        """The arguments in the places and the order that those of the example had; their form where it is another one."""
        if self._ai3_spec is None or pytree.tree_structure((args, kwargs)) == self._ai3_spec:
            return args, kwargs, ""
        example, named = pytree.tree_unflatten([None] * self._ai3_spec.num_leaves, self._ai3_spec)
        signature = self._ai3_signature
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"ai3_ops.optimize: the optimized module: {error}") from None
        places = list(signature.parameters)[: len(example)]
        if given.keys() == {*places, *named}:
            args = tuple(given[name] for name in places)
            kwargs = {name: given[name] for name in named}
        form = pytree.tree_structure((args, kwargs))
        return args, kwargs, "" if form == self._ai3_spec else " ".join(str(form).split())

    def _tells(self, kind: str) -> bool:
        """Whether a warning of a kind is still to be given; it is from now on."""
        new = kind not in self._ai3_told
        self._ai3_told.add(kind)
        return new

    @staticmethod
    def _device(*given: Any) -> str:
        """The kind of the inputs' device."""
        return next((x.device.type for x in pytree.tree_leaves(given) if isinstance(x, Tensor)), "cpu")


def _wide(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A call with a cache, of a batch beside inputs of one item for all of it, with as many of those; None of others."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    wide = of_one_batch(leaves) if any(map(is_cache, leaves)) else None
    if wide is None:
        return None
    given = pytree.tree_unflatten(wide, spec)
    return given[0], given[1]


def _share_packs(plan: Plan, others: Iterable[Plan]) -> None:
    """Of a new plan the packed weights that another one has already."""
    known = [c for other in others for program in _programs(other) for c in program.constants]
    for program in _programs(plan):
        for i, own in enumerate(program.constants):
            same = (c for c in known if c.shape == own.shape and torch.equal(c, own))
            program.constants[i] = next(same, own)


def _programs(plan: Plan) -> list[Program]:
    return [] if plan.body is None else [m.program for m in plan.body.modules() if isinstance(m, Region)]


def _inner(x: Tensor, start: int, stop: int | None = None) -> tuple[int, ...] | None:
    """Those between two dimensions; None of one number, which has no batch either."""
    return x.shape[start:stop] if x.ndim or not start else None


def _caches(key: Any, leaves: list[Any]) -> list[Any]:
    """The kinds of caches that a call of a kind has; of those that are examples, none."""
    return [(key, type(x)) for x in leaves if is_cache(x) and not isinstance(x, Past)]


def _apart(x: Tensor) -> Tensor:
    """A copy, which may have been made in inference mode."""
    return x.detach().clone()


def _batches(leaves: list[Any]) -> set[Any]:
    return {x.shape[:1] for x in leaves if isinstance(x, Tensor)}


def key_of(leaves: list[Any], dynamic: bool, form: str = "") -> Any:
    """What a plan holds for: sizes, without the batch where any will do, types and values that are no tensors; and the
    arguments' form, where it is not the first example's.
    """
    if form:
        return form, key_of(leaves, dynamic)
    if len(leaves) == 1 and dynamic:
        x = leaves[0]
        return (_inner(x, 1), x.dtype) if isinstance(x, Tensor) else repr(x)
    batches = _batches(leaves) if dynamic else set[Any]()
    start = 1 if dynamic and len(batches) == 1 else 0  # of several batches a plan is for these
    cached = any(map(is_cache, leaves))  # whichever cache, and however long it is
    return len(batches), *(
        (_inner(x, start, -1 if cached and as_long(x) else None), x.dtype, x.device.type)
        if isinstance(x, Tensor)
        else CACHE
        if is_cache(x)
        else repr(x)
        for x in leaves
    )

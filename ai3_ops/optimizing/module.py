"""The module that `optimize` returns."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import reprlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, repeat
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ai3_ops._torch import (
    any_autocast,
    any_tangent,
    has_constant_sizes,
    in_forward_mode,
    in_transform,
    is_differentiated,
    is_exporting,
    is_wrapped,
    pytree,
    tracing_state,
    users_level,
    without_autocast,
)
from ai3_ops.explaining.report import OptimizeReport
from ai3_ops.graph.alike import Graphs
from ai3_ops.graph.caches import CACHE, Past, as_examples, as_long, is_cache, noted
from ai3_ops.graph.capture import Calls, Uncapturable
from ai3_ops.graph.network import agree, batch_of, flat, of_one_batch
from ai3_ops.graph.state import copied, hooks_of, others
from ai3_ops.operations.of_transformers import recorded
from ai3_ops.optimizing import mixed_batches, pipeline
from ai3_ops.optimizing.attributes import Attributes, Hooks, Stores, reads
from ai3_ops.optimizing.document import Reader, Refused, Writer, reading
from ai3_ops.optimizing.pipeline import Budget, Plan, Settings, Swapped, make_plan, unthorough
from ai3_ops.optimizing.states import StatesChecked
from ai3_ops.programs import container
from ai3_ops.programs.lower import Region
from ai3_ops.programs.program import Program
from ai3_ops.selecting.selectors import listed
from ai3_ops.surveying import examples
from ai3_ops.surveying.examples import Inputs, cycled

PLANS = 4  # for so many sizes a module keeps plans, or for all that a model calls it with in one call; the oldest goes
SIZES = 1024  # that are known to be the first plan's
COMPARED = 2  # other sizes of each length that the capture left open, after which they are not compared any more
PLAN_SECONDS = (
    1.0  # that a call may take for other sizes, in all parts of a model together: else the original computes them
)
GENERATE = "generate"  # transformers' method
GENERATES = (
    "`generate` is the original's and calls no program: give an example with which the model returns its cache "
    "(use_cache=True)"
)
_FREED = "keep_original=False freed the original weights and modules"
_BACK = "it is put back"
_is_training = operator.attrgetter("training")
_planning = threading.RLock()


class Optimized(nn.Module):
    """A module for inference that computes what another one does, faster; `ai3_ops.explain` says how.

    `state_dict()`, parameters and submodules are the original's. Other batch sizes run at once; so do other lengths and
    sizes that the same programs compute, once they were compared. What needs others is planned, with a warning, where that
    takes no second.
    """

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
        self._ai3_compared: dict[str, int] = {}  # how many sizes of each open length were, with the original
        self._ai3_asked = False  # for plans, by further examples: they are made however long it takes
        self._ai3_first: Plan | None = None
        self._ai3_shown: list[Any] = []  # the first example's sizes,
        self._ai3_types: list[torch.dtype] = []
        self._ai3_spec: Any = None  # its structure, and
        self._ai3_plain = -1  # how many tensors, where it was nothing but positional ones
        try:
            self._sign(_bare(inspect.signature(original.forward)))
        except ValueError:  # what torch.jit compiled has none
            self._sign(_bare(inspect.signature(self.forward)))
        self._ai3_report = OptimizeReport()
        # The kinds of warnings that were given; of a whole model one, which its parts share.
        self._ai3_told: set[str] = set()
        self.training = False
        self._ai3_hooks, self._ai3_known_hooks = self._hooks()  # of the modules inside
        self._modules.update(original._modules)
        # The original's own, so that it computes with what `functional_call` puts there.
        self._parameters, self._buffers = original._parameters, original._buffers
        self._non_persistent_buffers_set.update(original._non_persistent_buffers_set)
        self._watch()

    @property
    def __class__(self) -> Any:
        """For `isinstance`, a layer of transformers': it looks those up by class whose outputs it records when asked to."""
        original = self.__dict__.get("_ai3_original")
        kind: type = type(original[0]) if original else Optimized
        layer = kind.__module__.startswith("transformers.models.") and not hasattr(kind, "from_pretrained")
        return kind if layer else type(self)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        vars(object)["__class__"].__set__(self, cls)

    def _get_name(self) -> str:
        return type(self).__name__

    @classmethod
    def restored(
        cls,
        settings: Settings,
        *,
        first: Plan,
        plans: dict[Any, Plan],
        compared: dict[str, int],
        shown: list[Any],
        types: list[torch.dtype],
        spec: Any,
        plain: int,
        signature: inspect.Signature,
        report: OptimizeReport,
    ) -> Optimized:
        """One without an original, from what a file has; the arguments are the attributes of these names."""
        module = cls(nn.Module(), settings)
        module._ai3_first, module._ai3_plans, module._ai3_compared = first, plans, compared
        module._ai3_shown, module._ai3_types, module._ai3_spec, module._ai3_plain = shown, types, spec, plain
        module._ai3_report = report
        module._sign(signature)
        module.forget_original()
        return module

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of the original, which may be a part of a model that reads them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = vars(self).get("_ai3_original")
            if original is None or name.startswith(("__", "_ai3")):
                raise
            if not original:
                raise AttributeError(f"ai3_ops.optimize: no attribute {name!r}: {_FREED}") from None
            found = getattr(original[0], name)
            if name == GENERATE and self.changed and self._tells(name):
                warnings.warn(f"ai3_ops.optimize: {GENERATES}", stacklevel=2)
            return found

    def _sign(self, signature: inspect.Signature) -> None:
        """The original's signature is that of `forward`, for torch.export and others who read it."""
        self._ai3_signature = signature
        signed: Any = _signed(signature)
        self.__class__ = signed

    # Pickles and copies -----------------------------------------------------------------------------------------------
    def __getstate__(self) -> dict[str, Any]:
        """Programs and graphs as in a file of `save`, its tensors as tensors; as they are where such a file cannot hold them."""
        state: dict[str, Any] = super().__getstate__() | {"_ai3_known": {}, "_ai3_mixed": {}, "_ai3_odd": {}}
        by_key = state["_ai3_plans"]  # another thread may put a new one in its place
        plans = list({id(p): p for p in (state["_ai3_first"], *by_key.values()) if p is not None}.values())
        writer = Writer(spelling=False)
        try:
            bodies = [None if plan.body is None else writer.body(plan.body) for plan in plans]
        except Refused:
            return state
        if not any(bodies):
            return state
        number = {id(plan): i for i, plan in enumerate(plans)}
        sealed = *container.sealed(writer.head | {"bodies": bodies}, writer.tensors), _alone(writer.tensors)
        return state | {
            "_ai3_first": None,
            "_ai3_plans": {key: number[id(plan)] for key, plan in by_key.items()},
            "_ai3_container": ([replace(plan, body=None) for plan in plans], sealed),
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (), *super().__reduce_ex__(protocol)[2:]

    def __setstate__(self, state: dict[str, Any]) -> None:
        bare, sealed = state.pop("_ai3_container", (None, None))
        super().__setstate__(state)
        self._sign(self._ai3_signature)
        if bare is None:
            return
        with reading("ai3_ops: a pickled module of optimize"):
            document, tensors = container.opened(*sealed)
            reader = Reader(document, tensors)
            bodies = [None if body is None else reader.body(body) for body in document["bodies"]]
            plans = [replace(plan, body=body) for plan, body in zip(bare, bodies, strict=True)]
        self._ai3_first, self._ai3_plans = plans[0], {key: plans[i] for key, i in state["_ai3_plans"].items()}

    def __copy__(self) -> Optimized:
        copied = type(self).__new__(type(self))
        nn.Module.__setstate__(copied, super().__getstate__())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        copied = memo[id(self)] = type(self).__new__(type(self))
        nn.Module.__setstate__(copied, copy.deepcopy(super().__getstate__(), memo))
        return copied

    # Planning ---------------------------------------------------------------------------------------------------------
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
        plan = make_plan(runs, args, kwargs, settings, name, progress, whole, budget=budget, first=first, graphs=graphs)
        # The choices stay, not the selectors, which may be functions that no file holds.
        self._ai3_settings = unthorough(settings, plan.resolved)
        leaves = pytree.tree_leaves((args, kwargs))
        shown = [tuple(x.shape) if isinstance(x, Tensor) else repr(x) if is_cache(x) else x for x in leaves]
        self._ai3_first, self._ai3_shown = plan, shown
        self._ai3_types = [x.dtype for x in leaves if isinstance(x, Tensor)]
        self._ai3_spec = pytree.tree_structure((args, kwargs))
        if not kwargs and all(isinstance(x, Tensor) for x in args):
            self._ai3_plain = len(args)
        self._ai3_plans[_key(leaves, plan.dynamic)] = plan
        self._ai3_report.parts.append(plan.report)
        if settings.verify != "off" and not (budget and budget.over):
            self._compare_lengths(args, kwargs)

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
        leaves, name = pytree.tree_leaves((args, kwargs)), self._ai3_report.parts[0].name
        key = _key(leaves, self._ai3_first.dynamic)
        key = (form, key) if form else key
        beside = self._ai3_first.dynamic and of_one_batch(leaves) is not None  # of those plans that have any batch
        if key in self._ai3_plans or beside:
            return
        try:
            plan = make_plan(rehearsal, args, kwargs, settings, name, progress, whole, budget=budget, graphs=graphs)
        except Uncapturable as reason:
            self._ai3_report.parts[0].notes.append(f"called with {_listed(map(_shown, leaves))}: {reason}")
            return
        if plan.dynamic != self._ai3_first.dynamic:  # which is what tells plans apart
            return
        plan.report.name = f"{name}, called with {_listed(_shown(x) for x in leaves if isinstance(x, Tensor))}"
        _share_packs(plan, self._ai3_plans.values())
        self._ai3_most += 1
        self._keep(key, plan)
        self._ai3_report.parts.append(plan.report)

    def plan_further(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes plans for further example inputs where the programs do not compute them, in the parts, too; packs are shared.

        The choices of algorithms are those of the first example, as far as they can do the other sizes.
        """
        modules = [m for m in self.modules() if isinstance(m, Optimized)]
        for module in modules:
            module._ai3_asked, module._ai3_most, module._ai3_known = True, module._ai3_most + 1, {}
        try:
            self(*args, **kwargs)
        finally:
            for module in modules:
                module._ai3_asked = False

    @property
    def changed(self) -> bool:
        """Whether something else than the original computes a call that was planned."""
        return any(plan.body is not None for plan in self._ai3_plans.values())

    def forget_original(self) -> None:
        """Frees the original where it computes nothing any more, for no size that was planned."""
        if self.changed and all(plan.body is not None for plan in self._ai3_plans.values()):
            self._ai3_original, self._ai3_hooks, self._ai3_stores = (), Hooks.of(()), Stores.of(())
            self._ai3_known = {}
            self._ai3_inside, self._ai3_attributes = list[nn.Module](), Attributes.of(())
            self._modules, self._parameters, self._buffers = {}, {}, {}

    def _planned(self, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], form: str) -> Plan | None:
        """The plan for other sizes than before, made now; None where the original computes them."""
        assert self._ai3_first is not None
        body = self._ai3_first.body
        if body is None:  # nothing was gained, as was said: no other sizes are tried in a call
            return None
        if isinstance(body, Swapped):  # only the form is another one
            return replace(self._ai3_first, body=Swapped(body.module, pytree.tree_structure((args, kwargs))))
        types = iter(self._ai3_types)
        first = [_shown(x, next(types)) if isinstance(x, tuple) else _shown(x) for x in self._ai3_shown]
        what = f"optimized for inputs of {_listed(first)}, called with {_listed(map(_shown, leaves))}"
        if form:
            names = f" and {', '.join(map(repr, kwargs))} by name" if kwargs else ""
            what += f" in the form of {len(args)} arguments{names}"
        key = _key(leaves, self._ai3_first.dynamic)
        key = (form, key) if form else key
        cached = any(map(is_cache, leaves))
        unequal = self._ai3_first.dynamic and len({x.shape[:1] for x in leaves if isinstance(x, Tensor)}) > 1
        if not form and not unequal and self._takes(leaves):
            self._keep(key, self._ai3_first)
            return self._ai3_first
        if not self._ai3_original:
            raise ValueError(
                f"ai3_ops.optimize: {what}: optimize again, with inputs of these sizes in a list of example_inputs, or with "
                "keep_original=True, which plans anew"
            )
        with _planning:
            if key in self._ai3_plans:
                return self._ai3_plans[key]
            costly = self._ai3_first.seconds > self._ai3_patience and not self._ai3_asked
            if cached and costly:  # prompts of any length come once each: no plan is kept of them
                self._warn_of_sizes(what)
                self._note(key, None)
                return None
            if not self._ai3_odd.keys().isdisjoint(_caches(key, leaves)):
                return None
            args, kwargs = as_examples(self._ai3_original[0], args, kwargs)  # a cache stays as it is
            leaves = pytree.tree_leaves((args, kwargs))
            if self._is_odd(key, leaves):
                return None
            if not form and not self._ai3_asked and self._is_another_batch(leaves):
                name = self._ai3_report.parts[0].name or "the model"
                if self._tells("batch"):
                    what = f"{name} was {what}: batches of other sizes are computed as by the original, not optimized"
                    warnings.warn(f"ai3_ops.optimize: {what}; optimize for each that matters", stacklevel=5)
                self._note(key, None)
                return None
            if not form and not unequal and self._computes((args, kwargs), others(args, kwargs)):
                self._keep(key, self._ai3_first)
                return self._ai3_first
            try:
                tried = examples.copied(Inputs(args, kwargs))  # the call itself is still to come
                with torch.no_grad():
                    self._ai3_original[0](*tried.args, **tried.kwargs)
            except Exception as error:  # said at once and once, by the model's own words
                error.add_note(f"ai3_ops.optimize: {what}; the original model fails on these, too")
                raise
            left = Plan(None, self._ai3_first.dynamic, None, self._ai3_first.report)
            if costly:
                plan = left
                self._warn_of_sizes(what)
            else:
                try:
                    with torch.inference_mode(False), torch.no_grad(), without_autocast():
                        fresh = [x.clone() if isinstance(x, Tensor) and x.is_inference() else x for x in leaves]
                        a, k = pytree.tree_unflatten(fresh, pytree.tree_structure((args, kwargs)))
                        plan = make_plan(
                            self._ai3_original[0], a, k, self._ai3_settings, self._ai3_report.parts[0].name
                        )
                    _share_packs(plan, self._ai3_plans.values())
                    if not self._ai3_asked:
                        warnings.warn(f"ai3_ops.optimize: {what}: planned anew", stacklevel=5)
                except (Uncapturable, RuntimeError) as error:
                    warnings.warn(f"ai3_ops.optimize: {what}: the original computes them ({error})", stacklevel=5)
                    plan = left
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
        if self._ai3_asked or not self._ai3_original or (wide := of_one_batch(leaves)) is None:
            return None
        alike, structure = _key(wide, True), pytree.tree_structure((args, kwargs))
        alike = (form, alike) if form else alike
        with _planning:
            if key in self._ai3_known:
                return self._ai3_known[key]
            if not self._ai3_odd.keys().isdisjoint(_caches(key, leaves)):
                return None
            plan, mixed = self._ai3_plans.get(alike), None
            # Of the first plan, which has any length, a few comparisons of a batch tell of all.
            kind = None if plan is None or plan is first else alike
            alone = tuple(x is not y for x, y in zip(leaves, wide, strict=True))
            which = form, kind, alone, batch_of(wide)
            count, places = self._ai3_mixed.get(which, (0, None))
            positional, named = pytree.tree_unflatten(wide, structure)
            if plan is None and count >= COMPARED:
                plan = self._planned(wide, positional, named, form)
                count = count if plan is first else 0
            if count >= COMPARED and plan is not None and plan.body is not None and places is not None:
                return self._note(key, replace(plan, body=mixed_batches.Mixed(plan.body, places)))
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
                self._ai3_mixed = self._ai3_mixed | {which: (count + 1, places)}
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
        """One more plan; the oldest of those that others take the place of goes, one without a program first; the first stays."""
        first, plans = self._ai3_first, {**self._ai3_plans, key: plan}
        same = [k for k, other in plans.items() if other is first]
        own = sorted((k for k, other in plans.items() if other is not first), key=lambda k: plans[k].body is not None)
        for old in (*same[1 : len(same) - SIZES + 1], *own[: max(0, len(own) - self._ai3_most + 1)]):
            del plans[old]
        self._ai3_plans = plans

    def _takes(self, leaves: list[Any]) -> bool:
        """Whether they are of lengths that the first plan leaves open, after some of these were compared."""
        others = self._other_lengths(leaves) if self._differs_in_sizes(leaves) else {}
        return bool(others) and all(self._ai3_compared.get(length, 0) >= COMPARED for length in others)

    def _other_lengths(self, leaves: list[Any]) -> dict[str, bool]:
        """Which open lengths differ from the example's, and whether that tells anything; {} where the plan does not hold."""
        lengths = self._ai3_first and self._ai3_first.lengths
        if not lengths:
            return {}
        shown = lengths.of([x if isinstance(x, tuple) else () for x in self._ai3_shown])
        found = lengths.of(_sizes(leaves))
        if shown is None or found is None:
            return {}
        tells = lengths.tell(found, shown)
        return {name: tells for name, n in found.items() if n != shown[name]}

    def _compare_lengths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares other lengths, made of the example's, with the original, so that no call has to."""
        first, compared = self._ai3_first, list[dict[str, int]]()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if first is None or first.body is None or first.lengths is None:
            return
        own = first.lengths.of(_sizes(leaves)) or {}
        with warnings.catch_warnings():  # a model may have something to say about long ones
            warnings.simplefilter("ignore")
            for lengths in islice(first.lengths.others(own), 2 * COMPARED):
                given = pytree.tree_unflatten(list(map(_resized, leaves, first.lengths.inputs, repeat(lengths))), spec)
                if self._computes(others(*given) if compared else given):
                    compared.append(lengths)
                if len(compared) == COMPARED:
                    break
        if len(compared) == COMPARED:
            shown = listed([" and ".join(map(str, lengths.values())) for lengths in compared])
            first.report.notes.append(f"other lengths run by the same programs: compared with the module at {shown}")

    def _computes(self, *inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        """Whether the programs of the first plan compute other sizes, too: as a copy of the original does, on these inputs.

        Of a batch that is left open, on the first item.
        """
        (args, kwargs), first = inputs[0], self._ai3_first
        leaves = pytree.tree_leaves(inputs[0])
        if first is None or first.body is None or not self._differs_in_sizes(leaves):
            return False
        copy, compared = copied(self._ai3_original[0], sharing=True), 0
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self._device(args, kwargs), enabled=False):
            item = functools.partial(
                pytree.tree_map_only, Tensor, lambda x: (x[:1] if first.dynamic else x).detach().clone()
            )
            for given in map(item, inputs):
                same = self._agrees(first, copy, *given)
                if same is None:
                    break
                if not same:
                    return False
                compared += 1
        for length, tells in self._other_lengths(leaves).items():  # a number left in may fit what is a multiple of it
            self._ai3_compared[length] = self._ai3_compared.get(length, 0) + (compared > 0 and tells)
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

    def _differs_in_sizes(self, leaves: list[Any]) -> bool:
        """Whether tensors have the example's types and numbers of dimensions, and all else its values."""
        types = iter(self._ai3_types)
        return len(leaves) == len(self._ai3_shown) and all(
            isinstance(shown, tuple) and len(x.shape) == len(shown) and x.dtype == next(types)
            if isinstance(x, Tensor)
            else (shown == CACHE if is_cache(x) else type(x) is type(shown) and repr(x) == repr(shown))
            for x, shown in zip(leaves, self._ai3_shown, strict=True)
        )

    def _is_another_batch(self, leaves: list[Any]) -> bool:
        """Whether tensors differ from the example's in their first dimension alone, which the graph does not leave open."""
        tensors = [(x, shown) for x, shown in zip(leaves, self._ai3_shown, strict=False) if isinstance(x, Tensor)]
        return self._differs_in_sizes(leaves) and all(x.shape[1:] == shown[1:] for x, shown in tensors)

    # Calling ----------------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's, in evaluation mode and without gradients."""
        first = self._ai3_first
        form = ""  # of the arguments, where it is not the example's
        if not kwargs and len(args) == self._ai3_plain and all(type(x) is Tensor for x in args):
            leaves = list(args)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if spec != self._ai3_spec:
                args, kwargs, form = self._arranged(args, kwargs)
                leaves = pytree.tree_leaves((args, kwargs))
        watched = "" if torch.compiler.is_compiling() else self._is_watched(leaves)
        if torch.is_grad_enabled():
            for x in [*leaves, *filter(is_wrapped, self.parameters())] if watched else leaves:
                if is_differentiated(x):
                    raise RuntimeError(
                        "ai3_ops.optimize: the module is for inference and has no gradients: call it with inputs and weights "
                        "that require none, or use the original model"
                    )
        if first is None:  # a model of which only submodules could be captured
            return self._by_original(args, kwargs)
        changes = first.body is not None or len(self._ai3_plans) > 1
        if watched and changes and not isinstance(first.body, Swapped):
            if not self._ai3_original:
                raise RuntimeError(f"ai3_ops.optimize: {watched} sees nothing of programs: {_FREED}")
            if self._tells(watched):
                name, level = self._ai3_report.parts[0].name or "the model", users_level()
                text = f"{watched} sees nothing of programs: within it the original of {name} computes"
                warnings.warn(f"ai3_ops.optimize: {text}", stacklevel=level)
            return self._by_original(args, kwargs)
        eagerly = changes and not torch.compiler.is_compiling()
        if eagerly and self._ai3_original and recorded():  # of modules inside, which programs do not call
            return self._by_original(args, kwargs)
        if eagerly and (self._hooked() or self._replaced() or self._altered()):
            self._warn_of_changes()
            return self._by_original(args, kwargs)
        plan: Plan | None
        if isinstance(first.body, Swapped) and not form:
            plan = first
        elif torch.compiler.is_compiling():
            plan = self._of_trace(leaves, first, form)
        else:
            key = _key(leaves, first.dynamic)
            key = (form, key) if form else key
            plan = self._ai3_plans.get(key) or self._ai3_known.get(key)
            if plan is None:
                plan = self._planned_mixed(key, leaves, args, kwargs, form) or self._planned(leaves, args, kwargs, form)
        if plan is None or plan.body is None:
            out = self._by_original(args, kwargs)
            if eagerly and (self._replaced() or self._altered()):
                self._watch()  # it made a table anew, for these sizes
            return out
        if any_autocast():
            with torch.autocast(self._device(leaves), enabled=False), torch.no_grad():
                out = plan.body(*leaves)
        elif isinstance(plan.body, Swapped):  # its weights may require gradients
            with torch.no_grad():
                out = plan.body(*leaves)
        else:
            out = plan.body(*leaves)
        return out if plan.returned is None else plan.returned.of(out)

    def _by_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            return self._ai3_original[0](*args, **kwargs)

    def _is_watched(self, leaves: list[Any]) -> str:
        """What follows each operator of this call, as "torch.func"; "" where nothing does."""
        if tracing_state() is not None:
            return "torch.jit.trace"
        if in_forward_mode() and (any(map(is_wrapped, (*leaves, *self.parameters()))) or any_tangent(leaves)):
            return "torch.func" if in_transform() else "forward-mode differentiation"
        return ""

    @staticmethod
    def _device(*given: Any) -> str:
        """The kind of the inputs' device."""
        return next((x.device.type for x in pytree.tree_leaves(given) if isinstance(x, Tensor)), "cpu")

    def _hooked(self) -> bool:
        """Whether a module inside has a hook that came later: the original runs then, which calls it."""
        if self._ai3_hooks.are_all():
            return False
        now, count = self._hooks()
        if count > self._ai3_known_hooks:
            return True
        self._ai3_hooks = now  # those that came are passive
        return False

    def _hooks(self) -> tuple[Hooks, int]:
        """The hooks of the modules inside as they are; how many of them somebody may expect to be called."""
        original = self._ai3_original[0]
        inside = [m for m in self._inside() if m is not original]
        return Hooks.of(inside), sum(len(hooks_of(m)) for m in inside)

    def _watch(self) -> None:
        """Notes what is inside as it is: where a tensor or module is replaced or a setting changed, the original computes."""
        inside = self._inside()
        self._ai3_stores = Stores.of(inside)
        self._ai3_inside = [m for m in inside if not m.training and "training" in reads(m)]  # in evaluation mode
        self._ai3_attributes = Attributes.of(inside)

    def _inside(self) -> list[nn.Module]:
        return [m for m in self._ai3_original[0].modules() if not isinstance(m, torch.jit.ScriptModule)]

    def _altered(self) -> tuple[str, str, str] | None:
        """What module inside is in training mode now, or has another plain value as an attribute, as a warning says it."""
        attributes = self._ai3_attributes
        if not any(map(_is_training, self._ai3_inside)) and attributes.are_same():
            return None
        names = {m: name for name, m in self._ai3_original[0].named_modules()}
        for m in self._ai3_inside:
            if m.training:
                return names.get(m) or "the model", "is in training mode", "it is in evaluation mode again"
        if found := attributes.changed():
            m, name = found
            return f"{names[m]}.{name}" if names.get(m) else name, "was changed, which programs do not see", _BACK
        self._ai3_attributes = attributes.renewed()  # equal ones, as of a pickle
        return None

    def _replaced(self) -> bool:
        """Whether one of them is another object now."""
        before = self._ai3_stores
        if before.are_same():
            return False
        now = Stores.of(self._inside())
        if not now.hold_those_of(before):
            return True
        self._ai3_stores = now  # torch.export leaves a module with other dictionaries of the same tensors
        return False

    def _tells(self, kind: str) -> bool:
        """Whether a warning of a kind is still to be given; it is from now on."""
        new = kind not in self._ai3_told
        self._ai3_told.add(kind)
        return new

    def _warn_of_changes(self) -> None:
        """Names what has a hook, or was replaced."""
        modules = dict(self._ai3_original[0].named_modules())
        if self._hooked():
            kind, end = "has a hook, which programs would not call", "it is removed"
            name = next(n for n, m in modules.items() if n and hooks_of(m))
        elif not self._replaced() and (altered := self._altered()):
            name, kind, end = altered
        else:
            kind, end = "was replaced, which programs do not see", _BACK
            known = set(map(id, self._ai3_stores.values))
            names = (
                f"{name}.{key}" if name else key
                for name, m in modules.items()
                for own in (m._parameters, m._buffers, m._modules)
                for key, value in own.items()
                if id(value) not in known
            )
            name = next(names, "a weight")  # one is missing where none is new
        if self._tells(kind):
            warnings.warn(f"ai3_ops.optimize: {name!r} {kind}: the original computes until {end}", stacklevel=4)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused where the original has one of this name."""
        self._refuse_replacing(name)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses what would change the original and not what is computed of it."""
        if name == "qconfig":  # torch.ao.quantization is about to replace modules inside
            raise RuntimeError("ai3_ops.optimize: an optimized module cannot be quantized: quantize the original model")
        if not name.startswith("_") and name not in ("training", "forward"):
            self._refuse_replacing(name, value)
        super().__setattr__(name, value)

    def _refuse_replacing(self, name: str, value: Any = None) -> None:
        original = vars(self).get("_ai3_original")
        if original == () and isinstance(value, Tensor):
            raise RuntimeError(f"ai3_ops.optimize: {name!r} cannot be replaced: {_FREED}")
        if original and hasattr(original[0], name):
            raise RuntimeError(
                f"ai3_ops.optimize: {name!r} of an optimized module stays as it is: replace it in the original model and "
                "optimize it again"
            )

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

    def _of_trace(self, leaves: list[Any], first: Plan, form: str) -> Plan | None:
        """For compiled and exported programs, which get no plans for sizes, dtypes and values that come later."""
        if form:
            if self._ai3_original:
                return None
            raise ValueError(
                f"ai3_ops.optimize: optimized for {len(self._ai3_shown)} arguments in another form than {form}"
            )
        start = 1 if first.dynamic else 0
        types = iter(self._ai3_types)
        if is_exporting() and self._ai3_original and not has_constant_sizes(leaves, start):
            return None  # a comparison would make constants of them
        batch = next((x.shape[0] for x in leaves if isinstance(x, Tensor)), None) if first.dynamic else None
        for x, shown in zip(leaves, self._ai3_shown, strict=True):
            if isinstance(x, Tensor):
                fits = tuple(x.shape[start:]) == shown[start:] and x.dtype == next(types)
                fits = fits and (batch is None or x.shape[0] == batch)
            else:  # a constant of the plan
                fits = type(x) is type(shown) and x == shown
            if not fits:
                if self._ai3_original:
                    return None
                called = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
                raise ValueError(f"ai3_ops.optimize: optimized for inputs of {self._ai3_shown}, called with {called}")
        return first

    # What is refused --------------------------------------------------------------------------------------------------
    def train(self, mode: bool = True) -> Optimized:
        """Refused: batch normalizations are folded and weights packed. `eval()` changes nothing."""
        if mode:
            raise RuntimeError(
                "ai3_ops.optimize: an optimized module is for inference: train the original model and optimize it again"
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Optimized:
        places = {p.dtype: p.device for p in (*self.parameters(), *self.buffers())}
        places = places or {torch.float32: torch.device("cpu")}
        for dtype in sorted(places, key=lambda dtype: not dtype.is_floating_point):
            probe = torch.empty(1, dtype=dtype, device=places[dtype])
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise RuntimeError(
                    f"ai3_ops.optimize: an optimized module stays where and what it is: move the original model to "
                    f"{moved.device}, {moved.dtype}, and optimize it again"
                )
        return self

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the weights are folded and packed."""
        raise RuntimeError("ai3_ops.optimize: load weights into the original model and optimize it again")

    def _load_from_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused likewise where a model around this one loads its own."""
        self.load_state_dict()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, by its names."""
        if not self._ai3_original:
            raise RuntimeError(f"ai3_ops.optimize: {_FREED}: there is no state_dict")
        return self._ai3_original[0].state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        """What it gained."""
        parts = self._ai3_report.parts
        if not parts or not parts[0].before_ms or not parts[0].after_ms:
            return "optimized"
        return f"optimized: {parts[0].before_ms:.3g} ms before, {parts[0].after_ms:.3g} ms after"


def _alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that are parts of other memory, as of a mapped file, in their own: a pickle would hold the whole for each."""
    return {name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in tensors.items()}


def _share_packs(plan: Plan, others: Iterable[Plan]) -> None:
    """Of a new plan the packed weights that another one has already."""
    known = [c for other in others for program in _programs(other) for c in program.constants]
    for program in _programs(plan):
        for i, own in enumerate(program.constants):
            same = (c for c in known if c.shape == own.shape and torch.equal(c, own))
            program.constants[i] = next(same, own)


def _programs(plan: Plan) -> list[Program]:
    return [] if plan.body is None else [m.program for m in plan.body.modules() if isinstance(m, Region)]


def _sizes(leaves: Iterable[Any]) -> list[tuple[int, ...]]:
    """Of tensors; () of what is none."""
    return [tuple(x.shape) if isinstance(x, Tensor) else () for x in leaves]


def _resized(x: Any, sizes: Sequence[int | str | None], lengths: Mapping[str, int]) -> Any:
    """An input of other lengths, in which its values repeat; the keys that a mask is of are as many more as its queries."""
    more = 0
    for dim, size in enumerate(sizes, 1):
        if isinstance(size, str):
            more = lengths[size] - x.shape[dim]
            x = cycled(x, dim, lengths[size])
        elif size is None:
            x = cycled(x, dim, x.shape[dim] + more)
    return x


def _new() -> Optimized:
    return Optimized.__new__(Optimized)


@functools.cache
def _signed(signature: inspect.Signature) -> type[Optimized]:
    """Optimized with a signature of `forward`, which is the same function."""
    parameters = signature.parameters.values()
    own = next(name for name in ("self", "_self", "_ai3_self") if name not in signature.parameters)
    first = inspect.Parameter(own, inspect.Parameter.POSITIONAL_ONLY)
    plain: Any = Optimized.forward
    forward: Any = FunctionType(
        plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__doc__, forward.__qualname__, forward.__signature__ = (
        plain.__doc__,
        plain.__qualname__,
        inspect.Signature([first, *parameters]),
    )
    names = {"__module__": Optimized.__module__, "__doc__": Optimized.__doc__, "forward": forward}
    return type(Optimized.__name__, (Optimized,), names)


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """Names and kinds alone: annotations and defaults may be what no file holds."""
    empty = inspect.Parameter.empty

    def bare(p: inspect.Parameter) -> inspect.Parameter:
        return p.replace(annotation=empty, default=empty if p.default is empty else None)

    return inspect.Signature([bare(p) for p in signature.parameters.values()])


def _shown(leaf: Any, dtype: torch.dtype | None = None) -> str:
    """A tensor's sizes and type in a few words (or those of one that had such sizes), another value shortened."""
    if isinstance(leaf, Tensor):
        return _shown(leaf.shape, leaf.dtype)
    if dtype is not None:
        return f"{'x'.join(map(str, leaf)) or 'one number'} {str(dtype).removeprefix('torch.')}"
    return " ".join(reprlib.repr(leaf).split())


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "nothing"


def _inner(x: Tensor, start: int, stop: int | None = None) -> tuple[int, ...] | None:
    """Those between two dimensions; None of one number, which has no batch either."""
    return x.shape[start:stop] if x.ndim or not start else None


def _caches(key: Any, leaves: list[Any]) -> list[Any]:
    """The kinds of caches that a call of a kind has; of those that are examples, none."""
    return [(key, type(x)) for x in leaves if is_cache(x) and not isinstance(x, Past)]


def _apart(x: Tensor) -> Tensor:
    """A copy, which may have been made in inference mode."""
    return x.detach().clone()


def _key(leaves: list[Any], dynamic: bool) -> Any:
    """What a plan holds for: sizes, without the batch where any will do, types and values that are no tensors."""
    if len(leaves) == 1 and dynamic:
        x = leaves[0]
        return (_inner(x, 1), x.dtype) if isinstance(x, Tensor) else repr(x)
    batches = {x.shape[:1] for x in leaves if isinstance(x, Tensor)} if dynamic else set[Any]()
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

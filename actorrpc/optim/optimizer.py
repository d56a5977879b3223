"""DistributedOptimizer: one torch optimizer on each owner of parameters, used as one."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from actorrpc import proxies, rref
from actorrpc.errors import StaleGradientsError
from actorrpc.optim.local import LocalOptimizer
from actorrpc.optim.owners import Start, ask, checked
from actorrpc.optim.steps import watched
from actorrpc.options import UNSET_RPC_TIMEOUT
from actorrpc.runtime.handling import NO_CONTEXT, in_context
from actorrpc.services.autograd import Autograd
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actorrpc.optim.local import Changes, Options
    from actorrpc.rref import RRef


log = logging.getLogger("actorrpc")
_ABSENT = object()


@dataclass
class _Owner:
    """An owner of parameters.

    Attributes:
        name: the worker's name.
        groups: which parameter groups it has a part in.
        positions: of its parameters among all, in the order in which its own optimizer has them.
        bodies: its parts of the groups, until they are sent.
        local: its LocalOptimizer.
    """

    name: str
    groups: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    bodies: list[Options] = field(default_factory=list)
    local: RRef[LocalOptimizer] | None = None

    def call(self, method: str, *args: Any) -> Start:
        """Returns what calls a method of its LocalOptimizer."""
        assert self.local is not None
        local = self.local
        return lambda: proxies.start_call(local, UNSET_RPC_TIMEOUT, method, args)


class DistributedOptimizer(torch.optim.Optimizer):
    """Optimizes parameters where they are, with the gradients of autograd contexts.

    It is a `torch.optim.Optimizer` whose `param_groups` hold references: a scheduler of `torch.optim.lr_scheduler`
    takes it as it is, and options may be changed in `param_groups`; the owners hear of it with the next step. Several
    trainers may have one each for the same parameters, or share one, which may be sent to other workers; on an owner,
    one step is made after the other. Hooks are called by `step`, but not by `state_dict` and `load_state_dict`.

    Arguments:
        optimizer_class: a class of torch.optim, or another subclass of `torch.optim.Optimizer` whose `step` needs no
            closure.
        params_rref: references to the parameters; or a list of dicts, each with such a list under "params" and
            options of its own, as `torch.optim` takes parameter groups.
        args, kwargs: for the class, after the parameters.
        max_staleness: how many steps of others may come, on an owner and for a parameter, between the first message of
            a context there and the step with its gradients. A step with older gradients is refused. Given that, a
            backward pass uses the parameters as they are when it comes to them. None: as in torch, steps are not
            counted, and a pass that needs a parameter which another step has changed since its forward pass fails.
        on_stale: "raise" an error for a step that is refused, or "drop" it. "wait": a step which would make the
            gradients of another context that has come to the owner too old waits there until that one has made its
            step, or is over. With `max_staleness` of at least the number of other trainers none is then refused.

    Raises:
        TypeError: the class is no optimizer, or something refers to no parameter.
        ValueError: there are no parameters, or the class needs a closure (LBFGS).
        BaseException: what the constructor raised on an owner; the cause names the owners on which one did, and has
            their tracebacks.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[Options],
        *args: Any,
        max_staleness: int | None = None,
        on_stale: Literal["raise", "drop", "wait"] = "raise",
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class)
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be a number of steps, or None, not {max_staleness!r}")
        if on_stale not in ("raise", "drop", "wait"):
            raise ValueError(f'on_stale must be "raise", "drop" or "wait", not {on_stale!r}')
        if on_stale == "wait" and max_staleness is None:
            raise ValueError('on_stale="wait" needs max_staleness: how old gradients may become')
        self._max_staleness, self._on_stale, self._kind = max_staleness, on_stale, optimizer_class
        self._owners: list[_Owner] = []
        self._warned = False
        super().__init__(_groups_of(params_rref), {})
        self._sent: list[Options] = []
        self._make(args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: Options) -> None:
        session, found = current(), dict[int, _Owner]()
        position = 0
        for number, group in enumerate(self.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            for ref in group["params"]:
                owner = found.setdefault(ref._handle.owner, _Owner(ref.owner_name()))
                if number not in owner.groups:
                    owner.groups.append(number)
                    owner.bodies.append({**options, "params": []})
                owner.bodies[-1]["params"].append(ref)
                owner.positions.append(position)
                position += 1
        calls = []
        for to, owner in found.items():
            given = (self._kind, owner.bodies, args, kwargs, self._max_staleness, self._on_stale)
            with in_context(NO_CONTEXT):
                owner.local = rref.make(session, to, LocalOptimizer, given, {}, UNSET_RPC_TIMEOUT)
            owner.bodies = []
            calls.append((owner.name, owner.call("describe")))
        answers = ask(f"constructor of {self._kind.__name__}", calls)
        self._owners = list(found.values())
        self.defaults = answers[0][0]
        self._take_options([options for _, options in answers])

    def _take_options(self, answers: list[list[Options]]) -> None:
        """Makes what the owners say of their groups the options of this side's."""
        for owner, answer in reversed(list(zip(self._owners, answers, strict=True))):
            for number, options in zip(owner.groups, answer, strict=True):
                group = self.param_groups[number]
                refs = group["params"]
                group.clear()
                group.update(options, params=refs)
        self._sent = [self._options(number) for number in range(len(self.param_groups))]

    def _options(self, number: int) -> Options:
        """Returns a copy of a group's options."""
        return copy.deepcopy({key: value for key, value in self.param_groups[number].items() if key != "params"})

    def _changes(self, owner: _Owner) -> Changes:
        changes = {}
        for i, number in enumerate(owner.groups):
            sent = self._sent[number]
            changed = {
                key: value
                for key, value in self.param_groups[number].items()
                if value is not (old := sent.get(key, _ABSENT)) and key != "params" and not _same(value, old)
            }
            if changed:
                changes[i] = changed
        return changes

    # -- steps

    def step(self, context_id: int) -> bool:  # type: ignore[override]
        """Makes a step with the gradients of a context, on all owners at the same time. Parameters that the context
        has no gradient for are left alone, and nobody's `.grad` is touched. Where it has none at all, the log says so,
        once.

        Arguments:
            context_id: the context's id.

        Returns whether the step was made: False where it was dropped, on one owner or all.

        Raises:
            RuntimeError: there is no such context here.
            StaleGradientsError: the gradients are older than `max_staleness` allows. It says on which owners; where
                that is known beforehand, as it is but for a race between trainers, no owner has made the step.
            RPCTimeoutError: an owner had others to wait for, or to do, for longer than the `rpc_timeout`.
            BaseException: what the step raised on an owner; the cause names the owners on which it did. On the others
                the step was made.
        """
        if watched(self):
            return self._watched_step(context_id)
        return self._step(context_id)

    step.hooked = True  # type: ignore[attr-defined]  # or torch would have every step seen

    def _step(self, context_id: int) -> bool:
        current().worker.services[Autograd].contexts.get(context_id)
        if self._max_staleness is not None and len(self._owners) > 1:
            ages = self._ask("age", [(context_id,)] * len(self._owners))
            if any(ages):
                return self._refuse(context_id, ages, "no owner has made the step")
        changes = [self._changes(owner) for owner in self._owners]
        sent = [self._options(number) if any(changes) else old for number, old in enumerate(self._sent)]
        answers = self._ask("step", [(context_id, own) for own in changes])
        self._sent = sent
        if all(answer is None for answer in answers) and not self._warned:
            self._warned = True
            log.warning(
                "%s: DistributedOptimizer.step(%d) changed no parameter, since the context has no gradient for any of "
                "them. Was the loss computed inside of `with dist_autograd.context()`, from these parameters, and "
                "dist_autograd.backward(context_id, [loss]) called? (This is said once.)",
                current().worker,
                context_id,
            )
        ages = [answer or 0 for answer in answers]
        if any(ages):
            return self._refuse(context_id, ages, "the other owners have made the step" if 0 in ages else "none has")
        return True

    _watched_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _refuse(self, context_id: int, ages: list[int], elsewhere: str) -> bool:
        if self._on_stale == "drop":
            return False
        steps = {owner.name: age for owner, age in zip(self._owners, ages, strict=True) if age}
        told = ", ".join(f"{name!r} by {age} steps" for name, age in steps.items())
        raise StaleGradientsError(
            f"the gradients of context {context_id} are older than the parameters they are for, on {told}; "
            f"max_staleness={self._max_staleness} allows fewer. The step was refused there ({elsewhere}): compute new "
            f"gradients in a new context",
            steps=steps,
        )

    def _ask(self, method: str, args: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of all owners' LocalOptimizers, with the arguments of each."""
        calls = [(owner.name, owner.call(method, *own)) for owner, own in zip(self._owners, args, strict=True)]
        return ask(f"{method} of {self._kind.__name__}", calls)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: every context begins without gradients. It is there for loops written for torch.optim."""

    def add_param_group(self, param_group: Options) -> None:
        """Is not possible any more: all groups are given to the constructor.

        Raises:
            NotImplementedError: always, to users.
        """
        if self._owners:
            raise NotImplementedError(
                "groups cannot be added to a DistributedOptimizer: give all of them to the constructor, or make "
                "another DistributedOptimizer for these parameters"
            )
        self.param_groups.append(param_group)

    # -- state

    def state_dict(self) -> Options:
        """Gathers the state of all owners into what a torch optimizer in one process would return: parameters are
        named by their positions in `params_rref`, counted over all groups. References do not outlive a world, and
        positions do; where each parameter is does not matter. Of state that belongs to no parameter, and of options
        that owners keep differently, the first owner's is taken.
        """
        parts = self._ask("state_dict", [(self._changes(owner),) for owner in self._owners])
        state: dict[Any, Any] = {}
        groups: list[Options] = [{} for _ in self.param_groups]
        for owner, part in reversed(list(zip(self._owners, parts, strict=True))):
            for number, group in zip(owner.groups, part["param_groups"], strict=True):
                groups[number] = group
            state.update({owner.positions[k] if isinstance(k, int) else k: v for k, v in part["state"].items()})
        position = 0
        for group, own in zip(groups, self.param_groups, strict=True):
            group["params"] = list(range(position, position + len(own["params"])))
            position += len(own["params"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Options) -> None:
        """Gives all owners their parts of a state.

        Arguments:
            state_dict: what `state_dict` returned, here or in an earlier world; or that of a torch optimizer of the
                same class, whose parameters were given in the same order. The parameters may be on other workers.

        Raises:
            ValueError: it has other groups, or other numbers of parameters in them.
            BaseException: what an owner raised; the cause names the owner.
        """
        saved, state = state_dict["param_groups"], state_dict["state"]
        sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in self.param_groups]
        if sizes != own:
            raise ValueError(
                f"this state is of another optimizer: its groups have {sizes} parameters, those of this one {own}"
            )
        names = [name for group in saved for name in group["params"]]
        others = {key: value for key, value in state.items() if key not in names}

        def part(owner: _Owner) -> Options:
            here = {position: i for i, position in enumerate(owner.positions)}
            return {
                "state": {**others, **{i: state[names[p]] for p, i in here.items() if names[p] in state}},
                "param_groups": [
                    {**saved[n], "params": [here[p] for p in _range_of(n, own) if p in here]} for n in owner.groups
                ],
            }

        self._take_options(self._ask("load_state_dict", [(part(owner),) for owner in self._owners]))

    def __getstate__(self) -> Options:
        """What goes with it to another worker, which then shares its owners' optimizers; not hooks, nor schedulers."""
        own = ("_owners", "_sent", "_kind", "_max_staleness", "_on_stale", "_warned")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}


def _range_of(number: int, sizes: list[int]) -> range:
    """Returns the positions of a group's parameters."""
    first = sum(sizes[:number])
    return range(first, first + sizes[number])


def _check_class(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        shown = kind.__name__ if isinstance(kind, type) else f"{type(kind).__name__}, which is none"
        raise TypeError(f"optimizer_class must be a class of optimizers, torch.optim.SGD say, not {shown}")
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ValueError(
            f"{kind.__name__} cannot work here: its step needs {', '.join(needed)}, and a function that computes the "
            f"loss again would have to run on every owner, for all of them at once; use another class"
        )


def _groups_of(params: Any) -> list[Options]:
    found = list(params) if hasattr(params, "__iter__") and not isinstance(params, (str, dict)) else params
    if not (isinstance(found, list) and found and isinstance(found[0], dict)):
        return [{"params": checked(found, "params_rref")}]
    groups = []
    for number, group in enumerate(found):
        if not (isinstance(group, dict) and "params" in group):
            raise TypeError(f'params_rref[{number}] must be a dict with a list of RRefs under "params", not {group!r}')
        groups.append({**group, "params": checked(group["params"], f'params_rref[{number}]["params"]')})
    return groups


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)

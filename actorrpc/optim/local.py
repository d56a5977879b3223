"""The owner's side of a DistributedOptimizer: a torch optimizer of its own over the parameters that live there.

RULE OP1: the torch optimizer works on *stand-ins*, leaves that share their parameter's storage. So gradients of a
context never pass through the user's `.grad`, which backward passes of other trainers are using meanwhile.
RULE OP2: one step at a time on a worker, whoever asks for it, since trainers may share parameters.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from actorrpc.errors import RPCTimeoutError
from actorrpc.optim.owners import tensor_of
from actorrpc.optim.steps import step_of
from actorrpc.runtime.handling import here
from actorrpc.services.autograd import Autograd
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from actorrpc.runtime.worker import Worker

_GLANCE_SECONDS = 0.02

Options = dict[str, Any]
"""What a parameter group has beside its parameters: lr and so on."""
Changes = dict[int, Options]
"""Options that the trainer has changed since the last call, by the number of the group here."""


class Steps:
    """What all optimizers on one worker share.

    Attributes:
        lock: held for a step (RULE OP2).
        moves: for each parameter, its steps that some living context began before: the time on `Contexts.clock`, and
            the context that the gradients came from.
        waiting: how many steps wait for others.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.Lock())
        self.moves: Any = WeakTensorKeyDictionary()
        self.waiting = 0

    @staticmethod
    def of(worker: Worker) -> Steps:
        """Returns the one of a worker."""
        found: Steps = worker.services.setdefault(Steps, Steps())
        return found


class LocalOptimizer:
    """One owner's part of a DistributedOptimizer.

    Arguments:
        kind: the torch optimizer's class.
        groups: the parameter groups as torch takes them, with references for parameters.
        args, kwargs: for the class, after the parameters.
        max_staleness, on_stale: as the DistributedOptimizer's.

    Raises:
        TypeError, ValueError: a reference refers to no parameter, or two to the same one.
        BaseException: what the class's constructor raised.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Options],
        args: tuple[Any, ...],
        kwargs: Options,
        max_staleness: int | None,
        on_stale: str,
    ) -> None:
        self._worker = worker = current().worker
        self._steps, self._max_staleness, self._waits = Steps.of(worker), max_staleness, on_stale == "wait"
        self._autograd: Autograd = worker.services[Autograd]
        self._params: list[torch.Tensor] = []
        self._stand_ins: list[torch.Tensor] = []
        self._watches: list[Any] = []
        """They make passes over the parameters cheaper."""
        self._moves: list[deque[tuple[int, int]]] = []
        made: Any = [{**group, "params": [self._take(ref) for ref in group["params"]]} for group in groups]
        if len(made) == 1 and len(made[0]) == 1:
            made = made[0]["params"]
        self._optimizer = kind(made, *args, **kwargs)
        # Torch's own classes change parameters in place.
        self._in_place = kind.__module__.startswith("torch.optim.")

    def _take(self, ref: Any) -> torch.Tensor:
        param = tensor_of(ref)
        if not param.is_leaf and not param.retains_grad:
            raise ValueError(f"can't optimize a non-leaf Tensor: gradients go to leaves, and {ref} refers to a result")
        if any(param is known for known in self._params):
            raise ValueError(f"two of the references refer to one parameter; {ref} is the second")
        # A step that is meant to run beside other trainers' passes must not have torch take it for an in-place change
        # of what they saved; any other step must.
        base = param.detach() if self._max_staleness is None else param.data
        stand_in = torch.nn.Parameter(base, param.requires_grad)
        with self._steps.lock:
            self._moves.append(self._steps.moves.setdefault(param, deque()))
        if param.is_leaf and param.requires_grad:
            self._watches.append(self._autograd.leaves.watch(param))
        self._params.append(param)
        self._stand_ins.append(stand_in)
        return stand_in

    def describe(self) -> tuple[Options, list[Options]]:
        """Returns the torch optimizer's defaults, and its groups' options."""
        return self._optimizer.defaults, self._options()

    def _options(self) -> list[Options]:
        return [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]

    def _change(self, changes: Changes) -> None:
        for number, options in changes.items():
            self._optimizer.param_groups[number].update(options)

    # -- steps

    def step(self, context_id: int, changes: Changes) -> int | None:
        """Makes a step with the gradients that a context has for parameters of this worker.

        Returns by how many steps its gradients are older than the parameters, where that is too much and no step was
        made; None where there were no gradients; else 0.
        """
        grads = self._grads(context_id)
        with self._steps.lock:
            if changes:
                self._change(changes)
            found = list(map(grads.get, self._params))
            moved = [i for i, grad in enumerate(found) if grad is not None]
            if self._max_staleness is not None and moved:
                if self._waits:
                    self._wait(context_id, moved)
                age = self._age(context_id, moved)
                if age:
                    return age
            pairs = [(self._stand_ins[i], self._params[i]) for i in moved]
            for i, (stand_in, param) in zip(moved, pairs, strict=True):
                if not stand_in.is_set_to(param):  # the user has put another tensor in its place
                    stand_in.data = param.data
                stand_in.grad = found[i]
            try:
                step_of(self._optimizer)()
            finally:
                for stand_in, param in pairs:
                    stand_in.grad = None
                    if not (self._in_place or stand_in.is_set_to(param)):  # it has put another tensor in its place
                        param.data = stand_in.data
                self._count(context_id, moved)
        return 0 if moved else None

    def age(self, context_id: int) -> int:
        """Returns what `step` would, and makes none."""
        grads = self._grads(context_id)
        with self._steps.lock:
            return self._age(context_id, [i for i, param in enumerate(self._params) if param in grads])

    def _grads(self, context_id: int) -> Mapping[torch.Tensor, torch.Tensor]:
        if self._autograd.contexts.find(context_id) is None:
            return {}  # nothing of it has come here, so it has no gradients here either
        return self._autograd.gradients(context_id)

    def _age(self, context_id: int, moved: Sequence[int]) -> int:
        if self._max_staleness is None or not moved:
            return 0
        began = self._autograd.contexts.get(context_id).began
        age = max(self._steps_since(began, i) for i in moved)
        return age if age > self._max_staleness else 0

    def _steps_since(self, began: int, i: int) -> int:
        return sum(time > began for time, _ in self._moves[i])

    def _count(self, context_id: int, moved: Sequence[int]) -> None:
        contexts = self._autograd.contexts
        oldest = min((context.began for context in contexts.all()), default=contexts.clock)
        move = contexts.clock + 1, context_id
        for i in moved:
            moves = self._moves[i]
            while moves and moves[0][0] <= oldest:
                moves.popleft()
            moves.append(move)
        # Last: a context that began here meanwhile may have seen the parameters half changed, or before.
        contexts.clock += 1
        if self._steps.waiting:
            self._steps.lock.notify_all()

    def _wait(self, context_id: int, moved: Sequence[int]) -> None:
        """Waits as long as the step would make gradients of another context too old."""
        handling = here.handling
        deadline = handling.message.deadline if handling is not None and handling.message is not None else None
        self._steps.waiting += 1
        try:
            while first := self._to_go_first(context_id, moved):
                if deadline is not None and self._worker.clock.now() >= deadline:
                    raise RPCTimeoutError(
                        f"the step of context {context_id} has waited too long on {self._worker} for the steps, or the "
                        f"ends, of the contexts {first}"
                    )
                self._steps.lock.wait(_GLANCE_SECONDS)  # the end of a context notifies nobody
        finally:
            self._steps.waiting -= 1

    def _to_go_first(self, context_id: int, moved: Sequence[int]) -> list[int]:
        """Returns the contexts that have to make their steps before this one; the oldest has none before it.

        Steps are possible in some order, without any becoming too old, if and only if they are in the order of what
        each can still bear: the first at least 0 steps of others, the second 1, the third 2, and so on.
        """
        contexts, limit = self._autograd.contexts, self._max_staleness
        assert limit is not None
        own, others = contexts.get(context_id), []
        for other in contexts.all():
            left = [i for i in moved if all(by != other.id for _, by in self._moves[i])]
            if left and other is not own:
                others.append((limit - max(self._steps_since(other.began, i) for i in left), other))
        if not any((other.began, other.id) < (own.began, own.id) for _, other in others):
            return []
        others.sort(key=lambda pair: pair[0])
        return [other.id for place, (bears, other) in enumerate(others) if bears - 1 < place]

    # -- state

    def state_dict(self, changes: Changes) -> Options:
        """Returns a copy of the torch optimizer's state."""
        with self._steps.lock:
            self._change(changes)
            return copy.deepcopy(self._optimizer.state_dict())

    def load_state_dict(self, state: Options) -> list[Options]:
        """Loads what `state_dict` returned; returns the groups' options."""
        with self._steps.lock:
            self._optimizer.load_state_dict(state)
            return self._options()

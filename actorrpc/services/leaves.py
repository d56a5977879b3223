"""Gradients of a pass go to the pass, and not to `.grad`, although the engine's own accumulation runs.

It has to run: hooks hang on it (`register_post_accumulate_grad_hook`, those of DistributedDataParallel). So the user's
`.grad` is set aside while any pass holds a leaf, and what the engine accumulated is taken right after. A hook knows
its pass by the engine's graph task, not by its thread, since a GPU's part of a graph runs on threads of the engine's.

Where nobody would see it, it need not run (RULE AG2): the engine then gives the gradients of all leaves to the pass,
touches no `.grad`, and calls nothing. It would be seen by a hook on a leaf or on the node that accumulates; by
DistributedDataParallel, whose hooks only C++ can see, and which needs torch.distributed; and by a Function of the
user's, which may run a backward pass of its own (`checkpoint` does), and may ask whether that is of this kind.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from actorrpc.services.recording import BASE, OWN_NODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actorrpc.services.passes import Pass

_functions: Any = torch._C._functions
_Accumulate: type = _functions.AccumulateGrad
_LOCK_SECONDS = 60.0
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IS_AVAILABLE = torch.distributed.is_available()
_Hooks = tuple["dict[int, Any]", "dict[int, Any]"]


def graph_task() -> int:
    """Returns the number of the pass of the engine that the present thread works for; -1 for none."""
    number: int = torch._C._current_graph_task_id()
    return number


def first_nodes(outputs: Iterable[torch.Tensor]) -> set[Any]:
    """Returns the nodes at which a backward pass from some tensors begins."""
    return {out.grad_fn or torch.autograd.graph.get_gradient_edge(out).node for out in outputs}


def leaves_of(firsts: Iterable[Any]) -> list[Any]:
    """Returns the nodes which accumulate the gradients of the leaves that a graph can reach from some nodes."""
    return Survey(firsts).leaves


class Survey:
    """A walk through the graph behind some nodes, and then others.

    Attributes:
        seen: all nodes.
        leaves: the nodes which accumulate the gradients of leaves.
        kinds: the types of the other nodes.
    """

    def __init__(self, firsts: Iterable[Any]) -> None:
        self.seen: set[Any] = set()
        self.leaves: list[Any] = []
        self.kinds: set[type] = set()
        self.add(firsts)

    def add(self, firsts: Iterable[Any]) -> None:
        """Goes on from other nodes."""
        seen, leaves, kinds = self.seen, self.leaves, self.kinds
        stack = [node for node in firsts if node not in seen]
        seen.update(stack)
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind is _Accumulate:
                leaves.append(node)
                continue
            kinds.add(kind)
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    stack.append(after)


class _Held:
    """A leaf that some pass holds.

    Attributes:
        leaf: the tensor.
        aside: the user's own `.grad`.
        passes: how many passes hold it.
        lock: held while its gradient is accumulated and taken.
        by: the pass that has the lock.

    The accumulation also runs where nothing used what the leaf was used for, with None. The user's hooks on the leaf
    are not called then, as they would not be in one process.
    """

    def __init__(self, node: Any, leaf: torch.Tensor, running: dict[int, Pass]) -> None:
        self.leaf = leaf
        grad = leaf.grad
        self.aside = _own(grad)
        if grad is not None:
            leaf.grad = None
        self.passes = 0
        self.lock = threading.Lock()
        self.by: Pass | None = None
        self._running = running
        self._given = True
        self._guarded: list[tuple[dict[int, Any], int, Any, Any]] = []
        if leaf._backward_hooks:
            self._guard(leaf._backward_hooks, lambda grad: grad is not None)
        if leaf._post_accumulate_grad_hooks:
            self._guard(leaf._post_accumulate_grad_hooks, lambda _: self._given)
        self.hooks = node.register_prehook(self._before), node.register_hook(self._after)

    def _guard(self, hooks: dict[int, Any], wanted: Callable[[Any], bool]) -> None:
        for key, hook in list(hooks.items()):
            guard = functools.partial(_call_if, wanted, hook)
            hooks[key] = guard
            self._guarded.append((hooks, key, guard, hook))

    def _before(self, grads: Any) -> None:
        if not self.lock.acquire(timeout=_LOCK_SECONDS):
            raise RuntimeError(f"another backward pass has kept a leaf of shape {tuple(self.leaf.shape)} busy")
        self._given = grads[0] is not None
        self.by = self._running.get(graph_task())

    def _after(self, *_: Any) -> None:
        grad, taker = self.leaf.grad, self.by
        if grad is not None:
            self.leaf.grad = None
            if taker is not None:
                taker.grads[self.leaf] = grad
            else:  # a backward pass of the user's own, beside this one
                self.aside = add(self.aside, grad)
        self.by = None
        self.lock.release()

    def let_go(self, holder: Pass) -> None:
        """Ends a pass's hold. What stands in `.grad` was written after the accumulation, as DDP does with its means."""
        if self.by is not holder:  # else its accumulation, or a hook on it, has failed
            self.lock.acquire(timeout=_LOCK_SECONDS)  # not for ever: a plain backward of the user's own may have failed
        self.by = None
        late = _own(self.leaf.grad)
        if late is not None:
            holder.grads[self.leaf], self.leaf.grad = late, None
        self.passes -= 1
        if not self.passes:
            for hook in self.hooks:
                hook.remove()
            for hooks, key, guard, own in self._guarded:
                if hooks.get(key) is guard:
                    hooks[key] = own
            if self.aside is not None:
                self.leaf.grad = self.aside
        self.lock.release()


def _own(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Copies a gradient that lies in one of DDP's buckets (`gradient_as_bucket_view`), which its next pass writes."""
    return grad.clone() if grad is not None and grad._is_view() else grad


def _call_if(wanted: Callable[[Any], bool], hook: Any, argument: Any) -> Any:
    return hook(argument) if wanted(argument) else None


class Watch:
    """Keeps a node that accumulates, and so its leaf, and knows the hooks on it."""

    def __init__(self, watched: dict[Any, _Hooks], node: Any) -> None:
        self._watched, self._node = watched, node
        watched.setdefault(node, _hooks_of(node))

    def __del__(self) -> None:
        self._watched.pop(self._node, None)  # another one for the same node will have to look itself up


def _hooks_of(node: Any) -> _Hooks:
    """Returns the hooks before and after a node, as they are at any time: torch shows them to those who add one."""
    found = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)
        found.append(handle.hooks_dict_ref())
        handle.remove()
    return found[0], found[1]


def _nothing(*_: Any) -> None:
    pass


def given(leaves: Sequence[torch.Tensor], grads: tuple[Any, ...]) -> dict[torch.Tensor, torch.Tensor]:
    """Returns what accumulating would have left in the `.grad` of leaves: memory of its own, laid out as the leaf's."""
    found = {}
    for i, leaf in enumerate(leaves):
        alone = _references(grads, i) == _ALONE
        grad = grads[i]
        if grad is None:
            continue
        alone = alone and grad._use_count() == 1
        if not alone or (grad.layout is torch.strided and grad.stride() != leaf.stride()):
            grad = torch.empty_like(leaf).copy_(grad) if grad.layout is torch.strided else grad.clone()
        found[leaf] = grad
    return found


def _references(them: tuple[Any, ...], i: int) -> int:
    return sys.getrefcount(them[i])


_ALONE = _references((object(),), 0)


class _Entering(threading.local):
    """The pass for which the present thread enters the engine, until the first node asks which pass it works for.

    Where only the last token is to begin at, that node is one of this library's, and needs no tie beforehand.
    """

    found: Pass | None = None


class Leaves:
    """The leaves that the passes of one worker hold."""

    def __init__(self) -> None:
        self.running: dict[int, Pass] = {}
        """By the engine's graph tasks: the passes that run."""
        self._held: dict[int, _Held] = {}
        self._door = threading.Lock()
        self.entering = _Entering()
        self._watched: dict[Any, _Hooks] = {}
        """The hooks of nodes that are kept."""

    def unseen(self, graph: Survey) -> list[torch.Tensor] | None:
        """Says whether nobody would see gradients being accumulated (RULE AG2).

        Returns the leaves of the graph; None where somebody might see it.
        """
        if _IS_AVAILABLE and torch.distributed.is_initialized():
            return None
        for kind in graph.kinds:
            if kind not in OWN_NODES and issubclass(kind, BackwardCFunction):
                return None
        leaves: list[torch.Tensor] = []
        watched = self._watched
        for node in graph.leaves:
            leaf: torch.Tensor = node.variable
            leaves.append(leaf)
            if leaf is BASE:
                continue
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks or type(leaf) not in _PLAIN:
                return None
            before, after = watched.get(node) or _hooks_of(node)
            if before or after:
                return None
        return leaves

    def watch(self, leaf: torch.Tensor) -> Watch:
        """Keeps an eye on the hooks of a leaf which many passes will come to; as long as the result lives."""
        return Watch(self._watched, torch.autograd.graph.get_gradient_edge(leaf).node)

    def current(self) -> Pass | None:
        """Returns the pass that the present thread works for."""
        task = graph_task()
        found, entering = self.running.get(task), self.entering
        if found is None and entering.found is not None:
            found, entering.found = entering.found, None
            found.tie(task)
        return found

    def hold(self, nodes: Iterable[Any]) -> list[int]:
        """Holds the leaves whose gradients some nodes accumulate; returns what `release` wants."""
        keys = []
        with self._door:
            for node in nodes:
                leaf = node.variable
                if leaf is BASE:
                    continue
                key = id(leaf)  # the same as long as it is held
                held = self._held.get(key)
                if held is None:
                    held = self._held[key] = _Held(node, leaf, self.running)
                held.passes += 1
                keys.append(key)
        return keys

    def release(self, holder: Pass, keys: list[int]) -> None:
        """Lets go of leaves. `holder.grads` is then complete."""
        with self._door:
            for key in keys:
                held = self._held[key]
                held.let_go(holder)
                if not held.passes:
                    del self._held[key]


def add(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Adds two gradients of one leaf, which may be sparse."""
    if one is None:
        return other
    if one.layout is not torch.strided:
        return other + one  # torch adds sparse ones to dense ones only
    return one + other

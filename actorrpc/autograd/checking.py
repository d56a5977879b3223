"""A step that spans workers, compared with the same step in one process."""

from __future__ import annotations

import functools
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from actorrpc import autograd
from actorrpc.errors import GradientMismatchError
from actorrpc.rpc import rpc_sync
from actorrpc.rref import RRef
from actorrpc.runtime.handling import NO_CONTEXT, here
from actorrpc.services.autograd import Autograd
from actorrpc.services.leaves import first_nodes, leaves_of
from actorrpc.session import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actorrpc.nn import RemoteModule


def check(
    step: Callable[..., Tensor],
    *refs: RRef[Any] | RemoteModule,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Runs a step over its workers, and once in this process on copies of the objects, and fails where the two differ.

        def step(embed, decoder):
            return F.cross_entropy(decoder(lstm(embed(words))), targets)

        autograd.check(step, embed_rref, remote_decoder)

    A *hop* is a call of one of the objects; they are counted from 0. First the tensors that go out and come back are
    compared, in the order of the calls; then their gradients, in the order of the backward pass, so that the first one
    that differs is the nearest to the cause; then the gradients of the objects' parameters and of leaves of this
    process. A missing gradient counts as zeros.

    The step must do the same each time it runs: call `eval()` first where there is dropout on other workers. It runs on
    the objects themselves, which keep what it changes in them; no `.grad` is changed. An object that calls others
    cannot be checked, as its copy would call those, too.

    Arguments:
        step: called twice, with a stand-in for each of `refs`: `embed(x)` and `embed.method(x, y=1)` are calls of the
            object, one after the other. It returns the loss, a scalar. Of what is sent, tensors in lists, tuples and
            dicts are compared; they go as clones, so that a Parameter arrives as a plain tensor.
        refs: RRefs to the objects, or RemoteModules.
        rtol, atol: how far values may differ, both or neither, as in `torch.testing.assert_close`.

    Raises:
        GradientMismatchError: something differs. It names hop, method, owner and tensor, and says by how much.
        RuntimeError: the thread is in an autograd context; or the step made no call through a stand-in, does not do the
            same twice, or has gradients go by other calls.
        TypeError: the step returned no scalar that requires grad; or `refs` holds something else.
        BaseException: what the step or the pass raised.
    """
    if here.context != NO_CONTEXT:
        raise RuntimeError("check begins autograd contexts of its own: call it outside of any")
    rrefs = [_rref_of(ref) for ref in refs]
    owners = [ref.owner_name() for ref in rrefs]
    copies = _copies(rrefs, owners)

    near, service = _Run(copies, owners), current().worker.services[Autograd]
    with autograd.context() as context_id:  # only to see whether anything is sent
        loss = near.forward(step)
        if service.contexts.get(context_id).last:
            raise RuntimeError(
                "gradients go by calls that are none of the step's own through its arguments: the step, or an object, "
                "calls workers in another way. Give check a reference to each object, and have the step call it"
            )
    if not loss.requires_grad:
        raise TypeError("the step must return a loss that requires grad; no gradient can flow from this one")
    inputs = [node.variable for node in leaves_of(first_nodes([loss]))]
    grads = dict(zip(inputs, torch.autograd.grad(loss, inputs, allow_unused=True), strict=True))

    far = _Run([ref.rpc_sync() if isinstance(ref, RRef) else ref for ref in refs], owners)
    with autograd.context() as context_id:
        loss = far.forward(step)
        leaves = {node.variable for node in leaves_of(first_nodes([loss]))} if loss.requires_grad else set()
        if loss.requires_grad:  # else all gradients are missing, as will be said
            autograd.backward(context_id, loss)
        theirs = [rpc_sync(owner, _gradients, args=(context_id, r)) for owner, r in zip(owners, rrefs, strict=True)]
        own = autograd.get_gradients(context_id)

    for first, then in zip_longest(near.values, far.values, fillvalue="nothing more"):
        if first != then:
            raise RuntimeError(f"the step does not do the same twice: on copies it had {first}, then {then}")
    compare = functools.partial(_compare, rtol=rtol, atol=atol)
    for at in far.values:
        compare(at, "value", far.values[at], near.values[at])
    for at in reversed(far.values):
        compare(at, "gradient", far.grads.get(at), near.grads.get(at))
    for index, value in enumerate(copies):
        for at in [at for at in far.values if at.ref == index][-1:]:
            for name, parameter in _parameters(value).items():
                at = at._replace(kind="parameter", name=f" {name!r}")
                compare(at, "gradient", theirs[index].get(name), grads.get(parameter))
    for leaf, grad in grads.items():
        if leaf in leaves:  # else it is a copy's, or the step makes it anew each time
            at = _Place(-1, -1, "", str(current().worker), "leaf")
            compare(at, "gradient", own.get(leaf), grad)


class _Place(NamedTuple):
    """Where a tensor is: in which hop (-1: in none), of which object, as what, and where in that."""

    hop: int
    ref: int
    method: str
    owner: str
    kind: str = ""
    name: str = ""

    @property
    def tensor(self) -> str:
        return self.kind + self.name

    def __str__(self) -> str:
        hop = f"hop {self.hop} ({self.method} on {self.owner!r})"
        return f"{self.tensor} of {hop if self.hop >= 0 else self.owner}"


_ADVICE = {
    ("value", "argument"): "All before agrees: the step itself makes another one each time.",
    ("value", "result"): "The arguments agree: does the method draw at random (eval() stops dropout), or keep state?",
    ("gradient", "result"): "Those of later hops agree: it goes wrong between them and this hop, in the step itself.",
    ("gradient", "argument"): "Those of later hops and of the result agree: it goes wrong in this hop, on the owner.",
    ("gradient", "parameter"): "Those of all hops agree: it goes wrong in calls of this object; this is the last.",
    ("gradient", "leaf"): "All others agree: it goes wrong in the step itself.",
}
"""Where to look, by what is the first to differ."""


class _Run:
    """One run of a step.

    Attributes:
        values: the tensors that went out and came back, in this order.
        grads: their gradients.
    """

    def __init__(self, targets: Sequence[Any], owners: Sequence[str]) -> None:
        self._targets, self._owners, self._hops = targets, owners, 0
        self.values: dict[_Place, Tensor] = {}
        self.grads: dict[_Place, Tensor] = {}

    def forward(self, step: Callable[..., Tensor]) -> Tensor:
        """Runs the step and returns its loss."""
        with torch.random.fork_rng(devices=[]):  # what it draws here is the same in both runs
            loss: object = step(*(_StandIn(self, index) for index in range(len(self._targets))))
        if not self._hops:
            raise RuntimeError("the step made no call through what it was given: there is nothing to check")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"the step must return its loss, a scalar tensor, not {kind}")
        return loss

    def call(self, index: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Makes a call of one of the objects."""
        at = _Place(self._hops, index, method, self._owners[index])
        self._hops += 1
        sent = self._watch(at, "argument", {**dict(enumerate(args)), **kwargs})
        args = tuple(sent.pop(i) for i in range(len(args)))
        return self._watch(at, "result", getattr(self._targets[index], method)(*args, **sent))

    def _watch(self, at: _Place, kind: str, tree: Any) -> Any:
        """Returns copies of the tensors in a message, as who gets it has them, and notes values and gradients."""
        seen: dict[int, Any] = {}

        def watch(path: Any, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in seen:
                place = at._replace(kind=kind, name=pytree.keystr(path))
                copy: Any = value.clone()
                seen[id(value)] = copy
                self.values[place] = value.detach().clone().requires_grad_(value.requires_grad)
                if copy.requires_grad:
                    copy.register_hook(functools.partial(self._note, place))
            return seen[id(value)]

        return pytree.tree_map_with_path(watch, tree)

    def _note(self, at: _Place, grad: Tensor | None) -> None:
        if grad is not None:
            self.grads[at] = grad.detach().clone()


class _StandIn:
    """Stands for one of the objects in a step."""

    def __init__(self, run: _Run, index: int) -> None:
        self._run, self._index = run, index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._run.call, self._index, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self._index, "__call__", *args, **kwargs)


def _compare(at: _Place, what: str, far: Any, near: Any, *, rtol: float | None, atol: float | None) -> None:
    if far is None and near is None:
        return
    missing = " (there is none)" if far is None else " (there it has none)" if near is None else ""
    far, near = torch.zeros_like(near) if far is None else far, torch.zeros_like(far) if near is None else near
    try:
        if far.requires_grad != near.requires_grad:
            raise AssertionError(f"requires_grad is {far.requires_grad}; in one process it is {near.requires_grad}")
        torch.testing.assert_close(far, near, rtol=rtol, atol=atol, equal_nan=True, check_device=False)
    except AssertionError as e:
        raise GradientMismatchError(
            f"the {what} of {at}, of shape {tuple(far.shape)}, differs from that in one process{missing}. "
            f"{_ADVICE[what, at.kind]}\n{e}",
            hop=at.hop, method=at.method, owner=at.owner, tensor=at.tensor, what=what,
        ) from None  # fmt: skip


def _rref_of(ref: Any) -> RRef[Any]:
    found = getattr(ref, "module_rref", None) if isinstance(ref, nn.Module) else ref
    if not isinstance(found, RRef):
        raise TypeError(f"check takes RRefs and RemoteModules, not a {type(ref).__name__}")
    return found


def _copies(refs: Sequence[RRef[Any]], owners: Sequence[str]) -> list[Any]:
    """Fetches copies of objects; those of one owner at once, so that parameters which they share stay shared."""
    found: dict[int, Any] = {}
    for owner in dict.fromkeys(owners):
        places = [i for i, name in enumerate(owners) if name == owner]
        found.update(zip(places, rpc_sync(owner, _values, args=([refs[i] for i in places],)), strict=True))
    return [found[i] for i in range(len(refs))]


def _parameters(value: Any) -> dict[str, Tensor]:
    """Returns the leaves that belong to an object, by name."""
    found: dict[str, Tensor] = {}
    parts = {"": value} if isinstance(value, (nn.Module, Tensor)) else getattr(value, "__dict__", {})
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            found.update((f"{name}.{inner}".lstrip("."), p) for inner, p in part.named_parameters())
        elif isinstance(part, Tensor) and part.requires_grad and part.is_leaf:
            found[name] = part
    return found


# -- on the owners


def _values(refs: Sequence[RRef[Any]]) -> list[Any]:
    return [ref.local_value() for ref in refs]


def _gradients(context_id: int, ref: RRef[Any]) -> dict[str, Tensor]:
    grads = autograd.get_gradients(context_id)
    return {name: grads[p] for name, p in _parameters(ref.local_value()).items() if p in grads}

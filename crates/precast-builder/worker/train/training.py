"""The parts of a training step: functions of a batch, the learning rate and states, which are captured like a module.

| part | inputs | states | outputs |
|---|---|---|---|
| `step` | the batch, `lr` | parameters, written buffers, the optimizer's, the seed | loss, metrics, norm of gradients |
| `gradients` | the batch | parameters, buffers, sums of gradients, the seed | loss, metrics |
| `update` | `lr` | parameters, sums of gradients, the optimizer's | norm of gradients |
| `eval` | the batch | parameters, buffers | loss, metrics |

A parameter's state has its name in the weight set, so that all parts, and a weight set of their values, agree. States
of the optimizer begin with `optimizer.`. A loss that draws random numbers has a seed and a counter as states
(`seeded.py`). A parameter without `requires_grad` in the entry's model stays a weight.

The graph comes from tracing forward, backward and update as one function; export then has it as any module's. Eager's
side of the comparison is another: `backward()` and torch's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointError

from .. import failures, tensors
from ..graph import call, flat
from ..passes import added_rows
from ..torch_private import errors, overloads, tracing
from ..values import samples
from ..wire import Failure
from . import optimizers, seeded

# The learning rate of samples: of the calls that fill the states, and of the one that is compared. A large one makes an
# error of the update larger than the tolerance of a parameter.
FILLING_RATE, COMPARED_RATE = 1e-3, 0.05
_SUMS, _BATCHES, _STEP = "optimizer.gradient", "optimizer.batches", "optimizer.step"
_METRICS = "a loss method returns the loss, or the loss and a dict of metrics, each a tensor of one element"
_RANDOM = "dropout, `bernoulli` and `rand` can be captured, outside of `checkpoint`; other noise can be an input"
# An average of gradients below this share of the mean of all is noise, or below so many roundings of the step's dtype.
_TINY, _ROUNDINGS = 1e-3, 2
# The calls from first values on that the gate makes in one session.
_CALLS = 3


class Training:
    """One part of a training step, and eager's form of it."""

    def __init__(self, opened: Any, module: dict[str, Any]) -> None:
        self.train, self.what = module["train"], call.describe(module)
        self.part, self.device, self.root = self.train["part"], opened.device, opened.root
        self.optimizer = optimizers.find(self.train, opened.root)
        path = module["path"]
        self.target = call.find(opened.model, path)
        function = call.method_of(self.target, path, module["method"])
        self.batch = [spec for spec in module["inputs"] if spec["name"] != "lr"]
        names = [spec["name"] for spec in self.batch]
        if self.part != "update":
            call.check_inputs(self.target.forward if module["method"] == "forward" else function, names, self.what)
        self.wrapped = call.wrap(self.target, module["method"], names)
        named = opened.named()

        def whole(name: str) -> str:
            return named.name_of(call.joined(path, name))

        trained = [(name, one) for name, one in self.target.named_parameters() if whole(name) not in opened.frozen]
        self.params = {name: whole(name) for name, _ in trained}
        if not self.params:
            raise Failure("bad_input", f"{self.what} has no parameter that requires a gradient")
        for name, one in trained:
            if not one.is_floating_point():
                raise Failure("bad_input", f"parameter `{name}` is {tensors.dtype_name(one.dtype)}: it has no gradient")
        written, self.random = self._tried()
        self.buffers = {name: whole(name) for name in written}
        self.specs, self.states = self._inputs(module["inputs"], dict(trained))

    def _inputs(
        self, given: list[dict[str, Any]], params: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Returns the inputs of a call with the states behind them, and the first values of states by position."""
        rate = {"sample": [COMPARED_RATE, FILLING_RATE]}
        specs = [spec | rate if spec["name"] == "lr" else spec for spec in given]
        states: dict[int, Any] = {}

        def add(name: str, like: Any, own: bool) -> None:
            states[len(specs)] = {"tensor": name} if own else "zeros"
            specs.append({"name": name, **tensors.layout(like.contiguous()), "dims": [None] * like.dim(), "pad": 0})

        count = torch.zeros((), dtype=torch.int64, device=self.device)
        for name, whole in self.params.items():
            add(whole, params[name], own=True)
        if self.part != "update":
            for name, whole in self.buffers.items():
                add(whole, self.target.get_buffer(name), own=True)
        if self.part in ("gradients", "update"):
            for name, whole in self.params.items():
                add(f"{_SUMS}.{whole}", params[name], own=False)
            add(_BATCHES, count, own=False)
        if self.part in ("step", "update"):
            for state in self.optimizer.states:
                for name, whole in self.params.items():
                    add(f"optimizer.{state}.{whole}", params[name], own=False)
            add(_STEP, count, own=False)
        if self.random:
            add(seeded.SEED, count, own=False)
            add(seeded.COUNT, count, own=False)
        names = [spec["name"] for spec in specs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise Failure("bad_input", f"`{twice}` is the name of a state of training, and of another tensor")
        return specs, states

    def _tried(self) -> tuple[list[str], bool]:
        """Runs the loss in training mode. Returns the buffers that it writes, which are restored, and whether the part
        draws random numbers.
        """
        before = {name: (buffer, buffer.clone()) for name, buffer in self.target.named_buffers()}
        given = samples.lowest(self.batch, self.device)
        if self.part == "update":
            return [], False
        found = []
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        drawing = seeded.Draws(zero, zero)
        with self._mode(training=True):
            # The version of a buffer says nothing: a batch norm writes its statistics past it.
            try:
                with torch.no_grad(), drawing.replacing():
                    self.wrapped(*given)
            except Exception as error:
                raise self._failed(error, "fails on sample inputs") from error
            finally:
                for name, (buffer, value) in before.items():
                    owner, _, leaf = name.rpartition(".")
                    now = getattr(self.target.get_submodule(owner), leaf)
                    if now is not buffer or not torch.equal(now, value):
                        found.append(name)
                        setattr(self.target.get_submodule(owner), leaf, buffer)
                        with torch.no_grad():
                            buffer.copy_(value)
        return found, drawing.drawn > 0 and self.part != "eval"

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        """Puts the model into training or eval mode, with autocast; afterwards into eval mode."""
        self.target.train(training)
        try:
            cast = self.train.get("autocast")
            with torch.autocast(self.device, getattr(torch, cast)) if cast else nullcontext():
                yield
        finally:
            self.target.eval()

    def _loss(self, leaves: dict[str, Any], held: dict[str, Any], batch: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the loss and metrics; `leaves` are the parameters. Writes new values of buffers into their states."""
        own = {name: held[whole] for name, whole in self.buffers.items()}
        given = {f"{call.INNER}.{name}": value for name, value in {**leaves, **own}.items()}
        drawing = seeded.Draws(held[seeded.SEED], held[seeded.COUNT]).replacing() if self.random else nullcontext()
        with self._mode(training=self.part != "eval"), drawing:
            returned = functional_call(self.wrapped, given, tuple(batch))
        if self.random:
            held[seeded.COUNT].add_(1)
        for name, state in own.items():
            after = given[f"{call.INNER}.{name}"]
            if after is not state and self.part != "eval":
                state.copy_(after)
        return self._taken_apart(returned)

    def _taken_apart(self, returned: Any) -> tuple[Any, dict[str, Any]]:
        loss, more = returned, {}
        if isinstance(returned, tuple | list) and returned:
            loss, *rest = returned
            named = rest[0] if len(rest) == 1 and isinstance(rest[0], dict) else None
            more = named if named is not None else {f"metric.{index}": one for index, one in enumerate(rest)}
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            kind = f"{tensors.dtype_name(loss.dtype)}{list(loss.shape)}" if isinstance(loss, torch.Tensor) else None
            kind = kind or f"a {type(loss).__name__}"
            message = f"the loss of {self.what} is {kind}, not one number"
            raise Failure("bad_input", message, hint=f"reduce it, as `loss.mean()`; {_METRICS}")
        for name, one in more.items():
            if not isinstance(one, torch.Tensor) or one.numel() != 1:
                raise Failure("bad_input", f"metric `{name}` of {self.what} is not one number", hint=_METRICS)
            if name in ("loss", "grad_norm"):
                raise Failure("bad_input", f"a metric of {self.what} has the name `{name}`", hint="rename it")
        return loss.reshape(()), {str(name): one.detach() for name, one in more.items()}

    def _check_gradients(self, grads: Sequence[Any]) -> None:
        missing = [name for name, grad in zip(self.params, grads, strict=True) if grad is None]
        if missing:
            count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = "`requires_grad_(False)` in the entry keeps it as it is; or let the loss use it"
            message = f"parameter `{missing[0]}`{count} has no gradient: the loss of {self.what} does not depend on it"
            raise Failure("bad_input", message, hint=hint)

    def __call__(self, *inputs: Any) -> dict[str, Any]:
        """Runs the part in plain operations, and writes into its states: the function that is captured."""
        return self._part(inputs, eager=False)

    def _part(self, inputs: Sequence[Any], eager: bool) -> dict[str, Any]:
        """Runs the part. In eager's form `backward()`, torch's clipping and its optimizer compute."""
        held = dict(zip((spec["name"] for spec in self.specs), inputs, strict=True))
        batch = inputs[: len(self.batch)]
        if self.part == "eval":
            loss, more = self._loss({name: held[whole] for name, whole in self.params.items()}, held, batch)
            return {"loss": loss, **more}
        out: dict[str, Any] = {}
        if self.part == "update":
            grads = self._mean(held)
        else:
            with torch.enable_grad():
                leaves = {name: held[whole].detach().requires_grad_() for name, whole in self.params.items()}
                loss, more = self._loss(leaves, held, batch)
                self._check_differentiable(loss)
                grads = _gradients(loss, list(leaves.values()), eager)
            self._check_gradients(grads)
            out = {"loss": loss.detach(), **more}
        if self.part == "gradients":
            self._add(held, grads)
            return out
        return {**out, "grad_norm": self._update(held, grads, eager)}

    def _update(self, held: dict[str, Any], grads: Sequence[Any], eager: bool) -> Any:
        """Updates parameters and states of the optimizer. Returns the norm of the gradients."""
        norm, grads = optimizers.clipped(grads, self.train.get("clip"), eager)
        held[_STEP].add_(1)
        params = [held[whole] for whole in self.params.values()]
        states = [
            {name: held[f"optimizer.{name}.{whole}"] for name in self.optimizer.states}
            for whole in self.params.values()
        ]
        if eager and self.optimizer.of_torch is not None:
            step, rate = int(held[_STEP]), float(held["lr"])
            optimizers.step_of_torch(self.optimizer, params, grads, states, rate, step)
        else:
            number = self.optimizer.once(held["lr"], held[_STEP])
            for param, grad, state in zip(params, grads, states, strict=True):
                self.optimizer.update(param, grad, state, held["lr"], number)
        self._clear(held)
        return norm

    def _check_differentiable(self, loss: Any) -> None:
        if not loss.requires_grad:
            message = f"the loss of {self.what} depends on no parameter by operations that have a gradient"
            raise Failure("bad_input", message, hint="`detach`, `no_grad` and integer operations end a gradient")

    def _add(self, held: dict[str, Any], grads: Sequence[Any]) -> None:
        for whole, grad in zip(self.params.values(), grads, strict=True):
            held[f"{_SUMS}.{whole}"].add_(grad)
        held[_BATCHES].add_(1)

    def _mean(self, held: dict[str, Any]) -> list[Any]:
        """Returns the mean gradients of the batches since the last update."""
        sums = [held[f"{_SUMS}.{whole}"] for whole in self.params.values()]
        return [one / held[_BATCHES].clamp(min=1).to(one.dtype) for one in sums]

    def _clear(self, held: dict[str, Any]) -> None:
        if self.part == "update":
            for whole in self.params.values():
                held[f"{_SUMS}.{whole}"].zero_()
            held[_BATCHES].zero_()

    def run(self, given: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Runs the part with `backward()` and torch's optimizer, where torch has it. Returns the outputs, and the
        inputs after the call; the given ones keep their values.
        """
        # `clone` makes tensors of inference mode usable by autograd.
        with torch.inference_mode(False), torch.no_grad():
            inputs = [value.clone() for value in given]
            return self._part(inputs, eager=True), inputs

    def sequence(self, first: list[Any], draw: Callable[[int], list[Any]]) -> list[tuple[list[Any], list[Any]]]:
        """Returns inputs and outputs of calls that follow each other, from these states on."""
        found = []
        for salt in range(1, _CALLS + 1):
            drawn = draw(salt)
            given = [first[at] if at in self.states else drawn[at] for at in range(len(drawn))]
            out, first = self.run(given)
            found.append(([one for at, one in enumerate(given) if at not in self.states], list(out.values())))
        return found

    def settle(self, inputs: list[Any]) -> None:
        """Changes states of a sample so that rounding of a gradient changes the update by as little.

        An optimizer that divides by the root of a square makes a large update of a gradient that is zero but for
        rounding, as that of a bias before a softmax is. So squares have a minimum, averages that are tiny beside others
        get values as those have, and so do the sums of gradients of `update`.
        """
        names = [spec["name"] for spec in self.specs]
        for at in self.states:
            drawn = torch.Generator().manual_seed(samples.seed(names[at]))
            value = inputs[at]
            if self.part == "update" and names[at] == _BATCHES:
                value.fill_(2)
            elif self.part == "update" and names[at].startswith(f"{_SUMS}."):
                value.copy_(torch.randn(value.shape, generator=drawn) * 1e-2)
            elif self.part == "update" and self._squares(names[at]):
                value.copy_(torch.rand(value.shape, generator=drawn) * 1e-4 + 1e-5)
        self._fill_tiny(names, inputs)
        squares = [inputs[at] for at in self.states if self._squares(names[at])]
        if squares:
            least = torch.cat([one.reshape(-1) for one in squares]).mean() * 0.1
            for one in squares:
                one.clamp_(min=float(least))

    def _fill_tiny(self, names: list[str], inputs: list[Any]) -> None:
        """Draws averages that are zero but for rounding: compared with themselves they would differ in every digit."""
        cast = self.train.get("autocast")
        share = max(_TINY, _ROUNDINGS * torch.finfo(getattr(torch, cast or "float32")).eps)
        for state in self.optimizer.states:
            if state in self.optimizer.squares:
                continue
            own = [at for at in self.states if names[at].startswith(f"optimizer.{state}.")]
            if not own:  # gradients and losses alone
                continue
            scale = float(torch.cat([inputs[at].reshape(-1) for at in own]).abs().mean())
            for at in own:
                if float(inputs[at].abs().max()) < scale * share:
                    drawn = torch.Generator().manual_seed(samples.seed(names[at]))
                    inputs[at].copy_(torch.randn(inputs[at].shape, generator=drawn) * scale)

    def _squares(self, name: str) -> bool:
        return any(name.startswith(f"optimizer.{square}.") for square in self.optimizer.squares)

    def export(self) -> Any:
        """Returns the exported program of the part, on inputs and states."""
        inputs = samples.lowest(self.specs, self.device)
        try:
            graph = tracing.trace(self, inputs, added_rows.decompositions() if self.device == "cpu" else None)
        except Failure:
            raise
        except Exception as error:
            raise self._failed(error, "can't be captured") from error
        random = next((node for node in graph.graph.nodes if overloads.is_random(node)), None)
        if random is not None:
            message = f"{self.what} draws random numbers: `{overloads.name_of(random.target)}`"
            raise Failure("capture", message, location=failures.line_of(random, self.root), hint=_RANDOM)
        return flat.export(graph, inputs, self.root, self.what)

    def _failed(self, error: Exception, how: str) -> Failure:
        if errors.depends_on_data(error):
            message = f"{self.what} {how}: its loss or its optimizer reads a value of a tensor"
            hint = "use torch operations, as `torch.where`, in place of `.item()` and of branches on values"
        elif self.random and isinstance(error, CheckpointError):
            message, hint = f"{self.what} draws random numbers in a region that `checkpoint` computes again", _RANDOM
        else:
            message, hint = f"{self.what} {how}: {failures.named(error)}", None
        return Failure("capture", message, location=failures.location(error, self.root), hint=hint)


def _gradients(loss: Any, leaves: Sequence[Any], eager: bool) -> Sequence[Any]:
    """Returns the gradients of a loss; None for a leaf that it does not depend on."""
    if eager:
        loss.backward()
        return [leaf.grad for leaf in leaves]
    grads: Sequence[Any] = torch.autograd.grad(loss, leaves, allow_unused=True)
    return grads


def reshape(graph: Any) -> None:
    """Lets operations take inputs of other strides than in the trace, as a batch norm's result may have."""
    aten = torch.ops.aten
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default

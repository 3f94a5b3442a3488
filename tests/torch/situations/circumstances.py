"""The circumstances of the table: what programs do around, in and to a module between its input and its gradients.

A circumstance is given a `Case`, of the module of one process or of this rank's, and leaves gradients at its parameters
and its input. What it does to both is the same, so that one function says what is wanted and what is got.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.torch.situations.models import Tied

# What stands between the boundary of a module and its first matmul: each takes the input and returns what is read.


def looked(context: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    with context():
        x.abs().max()
    return x


def looked_at_copy(x: torch.Tensor) -> torch.Tensor:
    x.detach().abs().max()
    return x


def hooked_tensor(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 1.0)
    return x


def doubling_hook(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2.0)
    return x


def in_place(x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    return x.mul_(0.5)


def half_in_place(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, :, : x.shape[2] // 2] *= 0.5
    return x


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 0.5


def halved(x: torch.Tensor) -> torch.Tensor:
    function: Any = Halved
    return function.apply(x)


def changed_itself(x: torch.Tensor) -> torch.Tensor:
    """In place, where the input is no leaf."""
    return x.mul_(0.5) if x.grad_fn is not None or not x.requires_grad else x * 0.5


ROUGH, EXACT = 0.06, 2e-5  # relative to the largest element wanted


def weighed(y: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return (y.float().tanh() * factors).sum()


@dataclass
class Case:
    """mesh: of the ranks, in two dimensions, the second of them that of the plan; None: one process."""

    model: Any
    x: torch.Tensor
    factors: torch.Tensor  # by which elements of the result are weighed
    mesh: Any = None
    is_sequence: bool = True
    by_torch: Callable[[], Any] | None = None  # makes the same model, cut by torch's styles

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        return weighed(y, self.factors)

    def backward(self) -> None:
        self.loss(self.model(self.x)).backward()

    def weights(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]


def plain(case: Case) -> None:
    case.backward()


def between(function: Callable[[torch.Tensor], torch.Tensor], case: Case) -> None:
    """Something stands between the boundary of the module and its first matmul."""
    case.model.between = function
    case.backward()


def retaining(case: Case) -> None:
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.retain_grad()
            kept.append(x)
        return x

    between(keep, case)
    assert kept[0].grad is not None


def hooked_layers(register: str, hook: Callable[..., None], case: Case) -> None:
    """On a layer and on the module."""
    for module in (
        case.model,
        case.model.get_submodule(case.model.columns[0]),
        case.model.get_submodule(case.model.rows[0]),
    ):
        getattr(module, register)(hook)
    case.backward()


def hooked_everywhere(case: Case) -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        case.backward()
    finally:
        handle.remove()


def within(context: Callable[[], Any], case: Case) -> None:
    with context():
        y = case.model(case.x)
    case.loss(y).backward()


def autocast_within(case: Case) -> None:
    """Autocast is on for the backward pass, too."""
    with torch.autocast("cpu", torch.bfloat16):
        case.backward()


def autocast_twice(case: Case) -> None:
    """One call under autocast and one not, in one graph."""
    with torch.autocast("cpu", torch.bfloat16):
        one = case.model(case.x)
    (case.loss(one) + case.loss(case.model(case.x))).backward()


def scaled(case: Case) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(case.loss(case.model(case.x))).backward()
    cut = [[each for each in case.weights() if isinstance(each, DTensor) == is_cut] for is_cut in (True, False)]
    optimizers = [torch.optim.SGD(weights, lr=0.0) for weights in cut if weights]  # torch unscales DTensors apart
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert case.x.grad is not None
    case.x.grad /= 64.0


def weights_first(case: Case) -> None:
    loss = case.loss(case.model(case.x))
    weights = case.weights()
    of_weights = torch.autograd.grad(loss, weights, retain_graph=True)
    (case.x.grad,) = torch.autograd.grad(loss, case.x)
    for weight, gradient in zip(weights, of_weights, strict=True):
        weight.grad = gradient


def input_first(case: Case) -> None:
    loss = case.loss(case.model(case.x))
    (of_x,) = torch.autograd.grad(loss, case.x, retain_graph=True)
    loss.backward(inputs=case.weights())
    case.x.grad = of_x


def one_weight_at_a_time(case: Case) -> None:
    loss = case.loss(case.model(case.x))
    for each in [case.x, *case.weights()]:
        (each.grad,) = torch.autograd.grad(loss, each, retain_graph=True)


def split(case: Case) -> None:
    """As pipelines split it: the input's gradient, and later those of weights."""
    loss = case.loss(case.model(case.x))
    _, groups = stage_backward_input([loss], None, [case.x], iter(case.model.parameters()))
    stage_backward_weight(iter(case.model.parameters()), groups)


def pipelined(case: Case) -> None:
    """Two stages of torch's own pipeline on this rank, whose schedule computes gradients of weights later."""
    last = copy.deepcopy(case.model)
    case.x = case.x.detach()
    if case.mesh is None:
        for x, factors in zip(case.x.split(1), case.factors.split(1), strict=True):
            weighed(last(case.model(x)), factors).backward()
        return
    group = case.mesh["dp"].get_group()
    stages = [PipelineStage(each, at, 2, case.x.device, group=group) for at, each in enumerate((case.model, last))]
    ScheduleZBVZeroBubble(stages, n_microbatches=2, loss_fn=weighed, scale_grads=False).step(
        case.x, target=case.factors
    )


def saved(is_ours: bool, case: Case) -> None:
    """A distributed checkpoint of ours, loaded into a model of torch's styles, or the other way."""
    if case.by_torch is not None:
        source, target = (case.model, case.by_torch()) if is_ours else (case.by_torch(), case.model)
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        checkpoints.save(source.state_dict(), checkpoint_id=folder[0])
        with torch.no_grad():
            for each in target.parameters():
                each.zero_()
        checkpoints.load(target.state_dict(), checkpoint_id=folder[0])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])
        case.model = target
    case.backward()


def accumulated(case: Case) -> None:
    for step in range(3):
        case.loss(case.model(case.x * (1.0 + step))).backward()


def one_forward_one_backward(case: Case) -> None:
    """Forward passes run ahead of backward passes, as in a pipeline."""
    losses = [case.loss(case.model(case.x * (1.0 + step))) for step in range(2)]
    for step in range(2, 5):
        losses.pop(0).backward()
        losses.append(case.loss(case.model(case.x * (1.0 + step))))
    for loss in losses:
        loss.backward()


def checkpointed(use_reentrant: bool, case: Case) -> None:
    case.loss(checkpoint(case.model, case.x, use_reentrant=use_reentrant)).backward()


def checkpointed_twice(case: Case) -> None:
    """One within another."""
    inner = partial(checkpoint, case.model, use_reentrant=False)
    case.loss(checkpoint(inner, case.x, use_reentrant=False)).backward()


def _saves_products(_: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    keeps = "mm" in str(op) or "matmul" in str(op)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def _saves_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _selective(policy: Callable[..., CheckpointPolicy], forward: Callable[..., Any]) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def selectively(policy: Callable[..., CheckpointPolicy], case: Case) -> None:
    case.loss(_selective(policy, case.model)(case.x)).backward()


def selectively_inside(policy: Callable[..., CheckpointPolicy], case: Case) -> None:
    """The segment is given what the boundary of the module prepared."""
    case.model.forward = _selective(policy, case.model.forward)
    case.backward()


def selectively_layers(policy: Callable[..., CheckpointPolicy], case: Case) -> None:
    for name in case.model.columns:
        layer = case.model.get_submodule(name)
        layer.forward = _selective(policy, layer.forward)
    case.backward()


def checkpointed_layers(use_reentrant: bool, case: Case) -> None:
    """A segment inside the module, whose input is the module's own."""
    layer = case.model.get_submodule(case.model.columns[0])
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)
    case.backward()


def frozen(kept: Callable[[str], bool], case: Case) -> None:
    for name, each in case.model.named_parameters():
        each.requires_grad_(kept(name))
    case.backward()


def frozen_input(case: Case) -> None:
    case.x = case.x.detach()
    case.backward()


def twice_backward(case: Case) -> None:
    loss = case.loss(case.model(case.x))
    loss.backward(retain_graph=True)
    loss.backward()


def copied(case: Case) -> None:
    original, case.model = case.model, copy.deepcopy(case.model)
    with torch.no_grad():
        for each in original.parameters():
            each.zero_()  # a copy that computed with the weights of the original would show it
    case.backward()


def used_twice(case: Case) -> None:
    (case.loss(case.model(case.x)) + case.loss(case.model(case.x * 0.5))).backward()


def in_a_row(case: Case) -> None:
    case.loss(case.model(case.model(case.x))).backward()


def stepped_in_backward(case: Case) -> None:
    """Each weight is changed as soon as it has its gradient."""

    def step(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.5)

    for each in case.weights():
        each.register_post_accumulate_grad_hook(step)
    case.backward()


class _AsItIs(nn.Module):
    """A parametrization whose weight is a view of the parameter."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)


def parametrized_and_stepped(case: Case) -> None:
    for name in (case.model.columns[0], case.model.rows[0]):
        nn.utils.parametrize.register_parametrization(case.model.get_submodule(name), "weight", _AsItIs())
    stepped_in_backward(case)


def in_double(case: Case) -> None:
    """Of a dtype that no operator of overweave takes."""
    case.model.double()
    case.x = case.x.detach().double().requires_grad_()
    case.backward()


def sharded(case: Case) -> None:
    """FSDP2 beside the plan, over the first dimension of the mesh, and over layers apart."""
    if case.mesh is not None:
        fully_shard(case.model, mesh=case.mesh["dp"])
    case.backward()


def sharded_layers(case: Case) -> None:
    if case.mesh is not None:
        columns = [case.model.get_submodule(name) for name in case.model.columns]
        for each in [columns] if isinstance(case.model, Tied) else columns:
            fully_shard(each, mesh=case.mesh["dp"])
        fully_shard(case.model, mesh=case.mesh["dp"])
    case.backward()


def as_dtensor(case: Case) -> None:
    """The input is a DTensor."""
    if case.mesh is None or not case.is_sequence:
        return case.backward()
    whole = DTensor.from_local(case.x, case.mesh["tp"], [Shard(1)], run_check=False)
    case.loss(case.model(whole)).backward()
    return None


def looks_on(case: Case) -> None:
    """A gradient that nobody asks for, before one that is."""
    with torch.no_grad():
        case.model(case.x)
    with torch.inference_mode():
        case.model(case.x)
    case.backward()


def penalized(case: Case) -> None:
    """A gradient penalty: the gradient of the input is differentiated."""
    loss = case.loss(case.model(case.x))
    (of_x,) = torch.autograd.grad(loss, case.x, create_graph=True)
    (loss + of_x.square().sum()).backward()


class Circumstance(NamedTuple):
    """run: see above. tolerance: relative. stays_fused: whether every site of a plan is overweave's, as when nothing
    happens. plans_only: of what only a plan knows. two_meshes: the module's boundary and its layers lie on meshes that
    are equal and not the same. torch_fails: torch's own styles raise, or are wrong."""

    run: Callable[[Case], None]
    tolerance: float = EXACT
    stays_fused: bool = False
    plans_only: bool = False
    two_meshes: bool = False
    torch_fails: bool = False


def _bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _reads(*arguments: Any) -> None:
    for each in torch.utils._pytree.tree_leaves(arguments):
        if isinstance(each, torch.Tensor):
            each.detach().abs().sum()


CIRCUMSTANCES: dict[str, Circumstance] = {
    "plain": Circumstance(plain, stays_fused=True),
    "a look under no_grad": Circumstance(partial(between, partial(looked, torch.no_grad))),
    "a look under inference_mode": Circumstance(partial(between, partial(looked, torch.inference_mode))),
    "a look with gradients": Circumstance(partial(between, partial(looked, nullcontext))),
    "a look at a copy": Circumstance(partial(between, looked_at_copy)),
    "a scale between": Circumstance(partial(between, lambda x: x * 0.5)),
    "a change in place between": Circumstance(partial(between, in_place)),
    "a change of the input in place": Circumstance(partial(between, changed_itself), torch_fails=True),
    "a change of a part between": Circumstance(partial(between, half_in_place)),
    "a split between": Circumstance(partial(between, lambda x: torch.cat([each * 1.5 for each in x.split(1)]))),
    "a view between": Circumstance(partial(between, lambda x: x.flatten(0, 1).view(x.shape))),
    "a function between": Circumstance(partial(between, halved)),
    "a tensor hook": Circumstance(partial(between, hooked_tensor)),
    "a tensor hook that changes": Circumstance(partial(between, doubling_hook)),
    "a retained gradient": Circumstance(retaining),
    "forward hooks": Circumstance(partial(hooked_layers, "register_forward_hook", lambda *_: None), stays_fused=True),
    "forward hooks that read": Circumstance(partial(hooked_layers, "register_forward_hook", _reads)),
    "forward pre-hooks": Circumstance(
        partial(hooked_layers, "register_forward_pre_hook", lambda *_: None), stays_fused=True
    ),
    "full backward hooks": Circumstance(partial(hooked_layers, "register_full_backward_hook", _reads)),
    "full backward pre-hooks": Circumstance(partial(hooked_layers, "register_full_backward_pre_hook", _reads)),
    "hooks of all modules": Circumstance(hooked_everywhere),
    "CommDebugMode": Circumstance(partial(within, CommDebugMode)),
    "anomaly mode": Circumstance(partial(within, torch.autograd.detect_anomaly)),
    "saved on the CPU": Circumstance(partial(within, save_on_cpu)),
    "autocast": Circumstance(partial(within, _bf16), ROUGH, stays_fused=True),
    "autocast and backward": Circumstance(autocast_within, ROUGH, stays_fused=True),
    "autocast once": Circumstance(autocast_twice, ROUGH, stays_fused=True),
    "a look under autocast": Circumstance(
        lambda case: within(_bf16, _with(case, partial(looked, torch.no_grad))), ROUGH
    ),
    "GradScaler": Circumstance(scaled, stays_fused=True),
    "weights first": Circumstance(weights_first, stays_fused=True),
    "input first": Circumstance(input_first, stays_fused=True),
    "one gradient at a time": Circumstance(one_weight_at_a_time, stays_fused=True),
    "a split backward": Circumstance(split, stays_fused=True),
    "a pipeline with a split backward": Circumstance(pipelined),
    "a checkpoint of torch's styles": Circumstance(partial(saved, False), stays_fused=True, plans_only=True),
    "a checkpoint for torch's styles": Circumstance(partial(saved, True), plans_only=True),
    "accumulation": Circumstance(accumulated, stays_fused=True),
    "one forward, one backward": Circumstance(one_forward_one_backward, stays_fused=True),
    "checkpoint, reentrant": Circumstance(partial(checkpointed, True), stays_fused=True),
    "checkpoint": Circumstance(partial(checkpointed, False), stays_fused=True),
    "checkpoint in a checkpoint": Circumstance(checkpointed_twice, stays_fused=True),
    "selective checkpoint": Circumstance(partial(selectively, _saves_products), stays_fused=True),
    "selective checkpoint of all": Circumstance(partial(selectively, _saves_all), stays_fused=True),
    "selective checkpoint inside": Circumstance(partial(selectively_inside, _saves_products)),
    "selective checkpoint inside of all": Circumstance(partial(selectively_inside, _saves_all)),
    "selective checkpoint of layers": Circumstance(partial(selectively_layers, _saves_products)),
    "checkpoint inside, reentrant": Circumstance(partial(checkpointed_layers, True)),
    "checkpoint inside": Circumstance(partial(checkpointed_layers, False)),
    "frozen weights": Circumstance(partial(frozen, lambda name: False), stays_fused=True),
    "frozen but for biases": Circumstance(partial(frozen, lambda name: "bias" in name), stays_fused=True),
    "frozen but for the last": Circumstance(partial(frozen, lambda name: name[0] in "do"), stays_fused=True),
    "a frozen input": Circumstance(frozen_input),
    "a gradient penalty": Circumstance(penalized, torch_fails=True),
    "backward twice": Circumstance(twice_backward, stays_fused=True),
    "a deep copy": Circumstance(copied, stays_fused=True),
    "used twice": Circumstance(used_twice, stays_fused=True),
    "in a row": Circumstance(in_a_row, stays_fused=True),
    "optimizer in backward": Circumstance(stepped_in_backward),
    "parametrized weights that step": Circumstance(parametrized_and_stepped),
    "fp64": Circumstance(in_double),
    "no gradient before": Circumstance(looks_on),
    "FSDP2": Circumstance(sharded, stays_fused=True, plans_only=True),
    "FSDP2 of layers": Circumstance(sharded_layers, plans_only=True),
    "a DTensor": Circumstance(as_dtensor, stays_fused=True, plans_only=True),
    "two meshes": Circumstance(plain, plans_only=True, two_meshes=True),
}


def _with(case: Case, function: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    case.model.between = function
    return case

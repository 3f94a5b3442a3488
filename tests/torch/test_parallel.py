"""`Colwise`, `Rowwise` and `PrepareGather` on CPU ranks: a Llama trains as unsharded, its state dict untouched."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overweave as ow
from campaigns.torch.small_llama import Llama, Sizes, loss_of, plan
from overweave import functional
from overweave.adapters import report
from overweave.adapters.parallel import gathering, styles
from overweave.errors import InputError
from tests.ranks import run_ranks

TOLERANCE = 5e-6


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained_as_unsharded(sequence: bool, has_biases: bool) -> list[str]:
    """For `run_ranks`: losses and gradients unlike those of the unsharded model; keys or placements that changed."""
    sizes = Sizes(has_biases=has_biases)
    torch.manual_seed(0)
    single = Llama(sizes)
    model = copy.deepcopy(single)
    keys = list(model.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    parallelize_module(model, mesh, plan(sizes.layers, sequence))
    found = [] if list(model.state_dict()) == keys else ["the keys of the state dict changed"]
    if model.blocks[0].attention.o.weight.placements != (Shard(1),):
        found.append("the placement of a row-parallel weight")
    for batch in (1, 2):
        tokens = torch.randint(sizes.vocabulary, (batch, 16), generator=torch.Generator().manual_seed(batch))
        losses = [loss_of(each, tokens) for each in (single, model)]
        for loss in losses:
            loss.backward()
        if not torch.allclose(*losses, rtol=1e-5):
            found.append(f"batch {batch}: loss {losses[1].item()}, not {losses[0].item()}")
        for (name, wanted), got in zip(single.named_parameters(), model.parameters(), strict=True):
            error = (whole(got.grad) - wanted.grad).abs().max().item()
            if error > TOLERANCE:
                found.append(f"batch {batch}: gradient of {name} is {error} off")
        single.zero_grad()
        model.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "sequence", "has_biases"),
    [(2, True, True), (2, False, False), (4, True, False), (4, False, True)],
)
def test_a_llama_trains_as_the_unsharded_one(world_size: int, sequence: bool, has_biases: bool):
    assert run_ranks(trained_as_unsharded, world_size, sequence, has_biases) == [[]] * world_size


def losses(steps: int) -> list[list[float]]:
    """For `run_ranks`: of the unsharded model, and of two runs by a plan."""
    sizes, found = Sizes(layers=1), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    for is_parallel in (False, True, True):
        torch.manual_seed(0)
        model = Llama(sizes)
        if is_parallel:
            parallelize_module(model, mesh, plan(sizes.layers, sequence=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        run = []
        for step in range(steps):
            tokens = torch.randint(sizes.vocabulary, (2, 16), generator=torch.Generator().manual_seed(step % 4))
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            run.append(whole(loss.detach()).item())
        found.append(run)
    return found


@pytest.mark.nightly
def test_a_llamas_losses_follow_those_of_the_unsharded_one():
    for single, first, again in run_ranks(losses, 4, 200, timeout_s=280.0):
        assert first == pytest.approx(single, rel=1e-4)
        assert first == again
        assert first[-1] < first[0] / 2


class Reader(torch.nn.Module):
    """Reads its input beside its two projections, before and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x.shape
        a = self.a(x)
        return (a * self.b(x)).sum(-1) + x.pow(2).sum(-1) + float(before[1])


def read_beside() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    single = Reader()
    model = parallelize_module(
        copy.deepcopy(single),
        mesh,
        {"": ow.PrepareGather(input_kwarg_layouts={"x": Shard(1)}), "a": ow.Colwise(), "b": ow.Colwise()},
    )
    x = torch.randn(2, 6, 8, requires_grad=True)
    shard = x.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone().requires_grad_()
    product, wanted = model(x=shard), single(x)
    own_x = x.pow(2).sum(-1).detach()
    dist.all_reduce(whole_part := (product - own_x - 6.0).detach())
    found = [] if torch.allclose(whole_part, (wanted - own_x - 6.0).detach(), atol=1e-4) else ["values"]
    # The reading without a matmul is the same on every rank: its gradient counts once, as torch's `Replicate()` does.
    product.sum().backward()
    (single_x,) = torch.autograd.grad(wanted.sum(), x)
    own = single_x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return found if torch.allclose(shard.grad, own, atol=1e-4) else [*found, "gradient of the shard"]


def test_a_module_may_read_what_it_gathers():
    assert run_ranks(read_beside, 2) == [[]] * 2


class Doubled(nn.Module):
    """A layer, called by name."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.up = nn.Linear(k, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * 2.0


def called_otherwise() -> list[str]:
    """For `run_ranks`: what is said of calls none of whose inputs has a layout, and what is wrong with one by name that
    a compiler reads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    single, shard = Reader(), torch.randn(2, 3, 8)
    for layouts, given, named in (
        ({"input_layouts": Shard(1)}, (), {"x": shard}),
        ({"input_kwarg_layouts": {"x": Shard(1)}}, (shard,), {}),
    ):
        model = nn.ModuleDict({"inner": copy.deepcopy(single)})
        parallelize_module(model, mesh, {"inner": ow.PrepareGather(**layouts)})
        with pytest.raises(InputError, match=r"'inner'.*input_kwarg_layouts"):
            model["inner"](*given, **named)
    model = Doubled(8, 16)
    parallelize_module(model, mesh, {"": ow.PrepareGather(input_kwarg_layouts={"x": Shard(1)}), "up": ow.Colwise()})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    return [] if torch.allclose(compiled(x=shard), model(x=shard), atol=1e-5) else ["values"]


def test_a_call_without_an_input_to_gather_is_refused():
    assert run_ranks(called_otherwise, 2) == [[]] * 2


def mapped() -> list[str]:
    """For `run_ranks`: what a layer of a plan that gathers nothing says to `vmap`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(nn.ModuleDict({"up": nn.Linear(8, 16)}), mesh, {"up": ow.Colwise()})
    with pytest.raises(InputError) as caught:
        torch.vmap(model["up"])(torch.randn(3, 2, 8))
    return [str(caught.value)]


def test_a_transform_of_torch_is_refused_by_the_layers_path():
    for (told,) in run_ranks(mapped, 2):
        assert "'up'" in told
        assert "torch.func" in told


def calls_of_a_block() -> dict[str, int]:
    """How often a block's forward and backward pass gathers and scatters."""
    sizes, counts = Sizes(layers=1), {"all_gather_linear": 0, "linear_reduce_scatter": 0}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Llama(sizes), mesh, plan(1))
    plain = {name: getattr(functional, name) for name in ("all_gather_linear", "linear_reduce_scatter")}

    def counted(name: str):
        def call(*arguments, **options):
            counts[name] += 1
            return plain[name](*arguments, **options)

        return call

    for module in (gathering, styles):
        vars(module).update({name: counted(name) for name in plain if name in vars(module)})
    try:
        x = torch.randn(1, 8, sizes.width, requires_grad=True)
        model.blocks[0](x).sum().backward()
        return counts
    finally:
        for module in (gathering, styles):
            vars(module).update({name: each for name, each in plain.items() if name in vars(module)})


@pytest.mark.slow
def test_what_reads_one_input_shares_one_gather_and_one_gradient():
    """Query, key and value; gate and up: one gather each, and one scattered sum of matmuls for their gradient."""
    assert run_ranks(calls_of_a_block, 2) == [{"all_gather_linear": 2, "linear_reduce_scatter": 2 + 2}] * 2


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def of_uneven_sequences() -> list[str]:
    """A DTensor knows the length of its sequence, and hands it on."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    row = {"down": ow.Rowwise(output_layouts=Shard(1))}
    plans = (
        {"": ow.PrepareGather(input_layouts=Shard(1)), "up": ow.Colwise()},
        {"up": ow.Colwise(input_layouts=Shard(1))},
    )
    for plan_, length in itertools.product(plans, (1, 5, 7)):
        torch.manual_seed(2)
        single, whole_x = Mlp(), torch.randn(2, length, 8)
        model = parallelize_module(copy.deepcopy(single), mesh, plan_ | row)
        wanted, x = whole_x.clone().requires_grad_(), distribute_tensor(whole_x, mesh, [Shard(1)]).requires_grad_()
        own = DTensor.from_local(
            model(x), mesh, [Shard(1)], shape=whole_x.shape, stride=whole_x.stride(), run_check=False
        )
        (own.full_tensor() * whole_x).sum().backward()
        (single(wanted) * whole_x).sum().backward()
        for name, (got, truth) in {"x": (x, wanted), "weight": (model.up.weight, single.up.weight)}.items():
            if not torch.allclose(whole(got.grad), truth.grad, atol=1e-5):
                found.append(f"gradient of {name}, {length} rows")
    return found


@pytest.mark.slow
def test_sequences_that_ranks_do_not_divide_are_gathered_as_dtensors():
    assert run_ranks(of_uneven_sequences, 2) == [[]] * 2


def counted_styles() -> list[str]:
    """What is torch's is counted with its reason, and what fails is named by its path."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    report.SITES.clear()
    model = torch.nn.Sequential(Mlp(), Mlp())
    model[0].up.forward = torch.nn.Linear.forward.__get__(model[0].up)
    parallelize_module(
        model, mesh, {"0.up": ow.Colwise(), "1.up": ow.Colwise(), "1": ow.PrepareGather(input_layouts=Shard(1))}
    )
    text = str(ow.report())
    found += [] if "1 by torch: a layer that is a Linear, whose forward was replaced" in text else [text]
    model[1].down = torch.nn.Identity()
    model[1](torch.randn(2, 3, 8))
    text = str(ow.report())
    found += [] if "PrepareGather: 1 by overweave, 0 by torch" in text else [text]
    with pytest.raises(InputError, match=r"layer '1\.up'"):
        model[1](torch.randn(2, 3, 5))
    wide = torch.nn.Sequential(Mlp(), torch.nn.Linear(8, 5))
    with pytest.raises(InputError, match=r"linear layer '1'.* 5 does not divide by 2 ranks"):
        parallelize_module(wide, mesh, {"1": ow.Colwise()})
    return found


def test_what_is_torchs_is_counted_and_errors_name_layers():
    assert run_ranks(counted_styles, 2) == [[]] * 2


def bad_plans() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    layer = torch.nn.Linear(8, 6)
    parallelize_module(layer, mesh, ow.Colwise())
    for style in (ow.Colwise(), ow.Rowwise()):
        with pytest.raises(InputError, match="has one already"):
            parallelize_module(layer, mesh, style)
    for style, layer in ((ow.Colwise(), torch.nn.Linear(8, 5)), (ow.Rowwise(), torch.nn.Linear(5, 8))):
        with pytest.raises(InputError, match="does not divide"):
            parallelize_module(layer, mesh, style)
    with pytest.raises(InputError, match="a dimension of rows"):
        ow.PrepareGather(input_layouts=Replicate())
    # What is not ours is torch's, and answers as torch's does.
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 6)
    x = torch.randn(3, 8)
    made = parallelize_module(copy.deepcopy(head), mesh, ow.Colwise(output_layouts=Replicate()))
    wanted = parallelize_module(copy.deepcopy(head), mesh, ColwiseParallel(output_layouts=Replicate()))
    found += [] if torch.equal(made(x), wanted(x)) else ["a gathered output"]
    table = torch.nn.Embedding(8, 6)
    made = parallelize_module(copy.deepcopy(table), mesh, ow.Rowwise(input_layouts=Replicate()))
    wanted = parallelize_module(copy.deepcopy(table), mesh, RowwiseParallel(input_layouts=Replicate()))
    tokens = torch.arange(8)
    return found + ([] if torch.equal(made(tokens), wanted(tokens)) else ["an embedding"])


@pytest.mark.bad
def test_what_a_plan_cannot_be_is_refused_and_what_is_not_ours_is_torchs():
    assert run_ranks(bad_plans, 2) == [[]] * 2


def placed_otherwise() -> list[str]:
    """For `run_ranks`: layers whose parameters were given other placements behind the plan, that are not torch's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, found = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)), []
    cases = (("weight", Replicate(), (ColwiseParallel, ow.Colwise)), ("bias", Partial(), (RowwiseParallel, ow.Rowwise)))
    for name, placement, both in cases:
        made = []
        for style in both:
            torch.manual_seed(2)
            layer = nn.Linear(8, 16, bias=name == "bias")
            parallelize_module(layer, mesh, style())
            whole = torch.ones(getattr(layer, name).shape) + (mesh.get_local_rank() if name == "bias" else 0)
            setattr(layer, name, nn.Parameter(DTensor.from_local(whole, mesh, [placement], run_check=False)))
            made.append(layer(x if name == "weight" else x.chunk(2, -1)[mesh.get_local_rank()]))
        if made[0].shape != made[1].shape or not torch.allclose(*made):
            found.append(f"{name} {placement}: {[*made[1].shape]}, torch's {[*made[0].shape]}")
    return found


def test_parameters_that_lie_otherwise_than_the_plan_said_are_torchs():
    assert run_ranks(placed_otherwise, 2) == [[], []]

"""Models of Transformers on CPU ranks, with overweave's styles under Transformers' names (`make adapters-test`)."""

from __future__ import annotations

import io
import os
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from overweave.errors import InputError
from tests.ranks import run_ranks
from tests.scripts import environment_of
from tests.source_tree import ROOT

transformers = pytest.importorskip("transformers")
from transformers.distributed.configuration_utils import DistributedConfig  # noqa: E402

from overweave.adapters import transformers as adapter  # noqa: E402
from overweave.layers.linear import local  # noqa: E402

pytestmark = pytest.mark.adapters
WORLD_SIZE, TOKENS, TOLERANCE = 4, 16, 5e-6
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 95,
    "attn_implementation": "sdpa",
}
KINDS = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}  # the second has biases


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints with random weights, made from configurations."""
    folders = {}
    for name, kind in KINDS.items():
        torch.manual_seed(0)
        model = kind(kind.config_class(**SIZES))
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


def loaded(kind: str, folder: str, by: str) -> torch.nn.Module:
    """by: `overweave`, `stock` styles, or `one` process."""
    if by == "one":
        return KINDS[kind].from_pretrained(folder)
    if by == "overweave":
        adapter.register()
    try:
        config = DistributedConfig(tp_size=torch.distributed.get_world_size(), tp_plan="auto")
        return KINDS[kind].from_pretrained(folder, distributed_config=config)
    finally:
        adapter.unregister()


def compared(kind: str, folder: str) -> list[str]:
    """For `run_ranks`: in what generation, gradients, keys and placements differ."""
    single, stock, ours = (loaded(kind, folder, by) for by in ("one", "stock", "overweave"))
    found = [] if list(ours.state_dict()) == list(stock.state_dict()) else ["keys of the state dict"]
    pairs = list(zip(stock.named_parameters(), ours.named_parameters(), strict=True))
    found += [
        f"placements of {a}" for (a, x), (_, y) in pairs if getattr(x, "placements", 0) != getattr(y, "placements", 0)
    ]
    prompt = torch.arange(2, 8)[None]
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    texts = [model.generate(prompt, **options).tolist() for model in (single, ours)]
    found += [] if texts[0] == texts[1] else [f"generated {texts}"]
    for batch in (1, 2):
        tokens = torch.randint(96, (batch, 12), generator=torch.Generator().manual_seed(batch))
        for model in (single, ours):
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
        for (name, wanted), got in zip(single.named_parameters(), ours.parameters(), strict=True):
            gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            error = (gradient - wanted.grad).abs().max().item()
            found += [] if error <= TOLERANCE else [f"batch {batch}: gradient of {name} is {error} off"]
    forwards = {layer.forward.__module__ for name, layer in ours.named_modules() if name.endswith("_proj")}
    return found if forwards == {adapter.__name__} else [*found, f"forwards of {forwards}"]


@pytest.mark.parametrize("kind", KINDS)
def test_generation_and_gradients_are_those_of_one_process(kind: str, saved: dict[str, str]):
    assert run_ranks(compared, WORLD_SIZE, kind, saved[kind], timeout_s=200.0) == [[]] * WORLD_SIZE


def losses(folder: str, steps: int) -> list[list[float]]:
    """Of the same training by one process and by the ranks."""
    found = []
    for by in ("one", "overweave", "overweave"):
        model = loaded("llama", folder, by)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        run = []
        for step in range(steps):
            tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(step % 4))
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            run.append(loss.item())
        found.append(run)
    return found


@pytest.mark.slow
def test_training_follows_that_of_one_process(saved: dict[str, str]):
    for one, ours, again in run_ranks(losses, WORLD_SIZE, saved["llama"], 200, timeout_s=280.0):
        assert ours == pytest.approx(one, rel=1e-4)
        assert ours == again


def as_documented(folder: str) -> str:
    """For `run_ranks`: what the example prints."""
    printed = io.StringIO()
    told = environment_of(torch.distributed.get_rank(), torch.distributed.get_world_size(), port=0)
    with patch.dict(os.environ, told), patch.object(sys, "argv", ["", folder]), redirect_stdout(printed):
        try:
            runpy.run_path(str(ROOT / "examples" / "torch" / "with_transformers.py"))
        finally:
            adapter.unregister()
    return printed.getvalue()


def test_the_example_runs(saved: dict[str, str]):
    assert run_ranks(as_documented, 2, saved["llama"])[0].strip().endswith("[1, 14]")


def with_lora(folder: str) -> list[str]:
    """What PEFT warns of, and whether the adapters are trained.

    Column-parallel layers: on row-parallel ones PEFT 0.21 fails with Transformers' own styles, too.
    """
    peft = pytest.importorskip("peft")
    model = loaded("llama", folder, "overweave")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "gate_proj"], r=4)
        tuned = peft.get_peft_model(model, config)
        tokens = torch.arange(24).reshape(2, 12)
        trained = {name: each for name, each in tuned.named_parameters() if "lora_B" in name}
        before = {name: local(each).clone() for name, each in trained.items()}
        optimizer = torch.optim.SGD([each for each in tuned.parameters() if each.requires_grad], lr=0.1)
        tuned(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    found = [text for each in told if "parallel" in (text := str(each.message)).lower() or "TP" in text]
    moved = [not torch.equal(old, local(trained[name])) for name, old in before.items()]
    return found if all(moved) else [*found, "an adapter was not trained"]


def test_lora_trains_without_a_warning(saved: dict[str, str]):
    assert run_ranks(with_lora, WORLD_SIZE, saved["llama"], timeout_s=100.0) == [[]] * WORLD_SIZE


def test_it_is_registered_once():
    adapter.register()
    try:
        with pytest.raises(InputError, match="Call it once"):
            adapter.register()
    finally:
        adapter.unregister()


def checkpoint(folder: str, target: str) -> list[str]:
    """A model that was saved on ranks is the model that was loaded."""
    loaded("llama", folder, "overweave").save_pretrained(target)
    torch.distributed.barrier()
    wanted, got = (loaded("llama", each, "one").state_dict() for each in (folder, target))
    return [name for name, value in wanted.items() if not torch.equal(value, got[name])]


def test_checkpoints_are_whole(saved: dict[str, str], tmp_path: Path):
    assert run_ranks(checkpoint, WORLD_SIZE, saved["llama"], str(tmp_path)) == [[]] * WORLD_SIZE

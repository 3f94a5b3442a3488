"""Generates tokens with a tensor-parallel Llama: a static cache, and on GPUs one CUDA graph for each token.

Every half of a block ends in one `matmul_all_reduce`. The tokens are those of one process.

python examples/generate.py                                   # four emulated ranks, no GPU needed
torchrun --nproc-per-node 4 examples/generate.py --cuda       # one rank per GPU, decoding in a graph
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from driver import IS_ON_GPUS, device, on_ranks
from models.llama import Cache, Llama, Sizes, decoding_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

PROMPT, TOKENS = (3, 14, 15, 92), 16


class Decoder:
    """One step of decoding on tensors that stay where they are: what a graph needs."""

    def __init__(self, model: Llama, ranks: int, device: torch.device) -> None:
        sizes = model.sizes
        shape = (1, sizes.kv_heads // ranks, sizes.context, sizes.width // sizes.heads)
        self._model, self._device = model, device
        self.caches = [Cache(shape, model.embed.weight.detach()) for _ in range(sizes.layers)]
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> None:
        """The next token in the place of the last, one position on."""
        logits = self._model(self.token, self.position, self.caches)
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position += 1

    def generate(self, prompt: torch.Tensor, count: int, is_captured: bool) -> list[int]:
        """Reads the prompt at once, then decodes token by token."""
        positions = torch.arange(prompt.shape[1], device=self._device)
        logits = self._model(prompt, positions, self.caches)
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.fill_(prompt.shape[1])
        step = self._captured() if is_captured else self.step
        found = [int(self.token)]
        for _ in range(count - 1):
            step()
            found.append(int(self.token))
        return found

    def _captured(self) -> Callable[[], None]:
        token, position = self.token.clone(), self.position.clone()
        for _ in range(2):  # what a call needs is made before the capture
            self.step()
        self.token.copy_(token)
        self.position.copy_(position)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


@torch.no_grad()
def generate() -> list[list[int]]:
    """One rank: the tokens of one process, and those of all ranks together."""
    here = device()
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    single = Llama(Sizes()).to(here)
    model = copy.deepcopy(single)
    parallelize_module(model, init_device_mesh(here.type, (ranks,)), decoding_plan(model.sizes.layers))
    prompt = torch.tensor([PROMPT], device=here)
    by_one = Decoder(single, 1, here).generate(prompt, TOKENS, is_captured=False)
    return [by_one, Decoder(model, ranks, here).generate(prompt, TOKENS, is_captured=IS_ON_GPUS)]


def main() -> None:
    """Generates on emulated ranks, or on the ranks that torchrun started."""
    found = on_ranks(generate, timeout_s=100.0)
    if found is None:
        return  # rank 0 tells
    one, all_ranks = found
    print("tokens:", *all_ranks)
    print("as one process generates them:", one == all_ranks)


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# A deep copy of a tensor-parallel model of Transformers computes with the weights of the model that it was copied from.
#
# Seen with transformers 5.24.0 and torch 2.13.0 on two CPU ranks (gloo), 2026-11-28. The forward that a style installs
# on a layer closes over that layer, and copy.deepcopy copies functions as they are: the copy's layer has weights of its
# own, and its forward reads the original's. A model without tensor parallelism is copied as one expects.
#
# Expected where a copy is a copy:  changed weights of the copy change what the copy computes, and not the original.
# Seen:                             they change nothing; changed weights of the original change what the copy computes.
#
# Exits with 0 while that is so, and with 1 once it is not. Needs Python 3.11 or newer and a package index; some minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.24.0 'numpy<2.4'
cat >"$work/copies.py" <<'PYTHON'
import copy
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

dist.init_process_group("gloo")
folder = sys.argv[1]
if dist.get_rank() == 0:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()
tokens = torch.arange(2, 10)[None]


def changes(model):
    """Whether the copy sees its own changed weights, and whether it sees those of the original."""
    clone = copy.deepcopy(model)
    seen = []
    with torch.no_grad():
        for changed in (clone, model):
            before = clone(tokens).logits.clone()
            for name, weight in changed.named_parameters():
                if "down_proj" in name:
                    weight.mul_(3.0)
            seen.append(not torch.equal(before, clone(tokens).logits))
    return seen


plain = changes(AutoModelForCausalLM.from_pretrained(folder))
split = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan="auto")
parallel = changes(AutoModelForCausalLM.from_pretrained(folder, distributed_config=split))
if dist.get_rank() == 0:
    print(f"a copy sees its own weights: plain {plain[0]}, tensor-parallel {parallel[0]}")
    print(f"a copy sees the original's weights: plain {plain[1]}, tensor-parallel {parallel[1]}")
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 timeout 300 "$work/env/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$work/copies.py" "$work/model" 2>"$work/errors" | tee "$work/seen" || { grep -v "^\[" "$work/errors" | head -40 >&2; exit 1; }
diff <(cat "$work/seen") - <<'SEEN'
a copy sees its own weights: plain True, tensor-parallel False
a copy sees the original's weights: plain False, tensor-parallel True
SEEN
echo "transformers 5.24.0: as described"

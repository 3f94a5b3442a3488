"""A Llama of Transformers that generates on the ranks of torchrun: with_transformers.py FOLDER, of a model."""

import os
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from overweave.adapters import transformers as adapter

adapter.register()
config = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan="auto")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=config)
tokens = model.generate(torch.arange(2, 8)[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
if os.environ["RANK"] == "0":
    print(list(tokens.shape))

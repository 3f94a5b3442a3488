"""A GPT of Megatron-core with overweave's linear layers: its layer spec."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from overweave.adapters import megatron

spec = megatron.woven(get_gpt_layer_local_spec())
print(spec.submodules.self_attention.submodules.linear_qkv, spec.submodules.self_attention.submodules.linear_proj)

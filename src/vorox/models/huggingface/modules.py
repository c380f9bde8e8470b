"""Names of the modules of transformers architectures, by canonical module; ``{i}`` is the layer.

Modules that share a name are concatenated.
"""

GPT2_MODULES = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attention_norm": "transformer.h.{i}.ln_1",
    "attention.query": "transformer.h.{i}.attn.c_attn",
    "attention.key": "transformer.h.{i}.attn.c_attn",
    "attention.value": "transformer.h.{i}.attn.c_attn",
    "attention.output": "transformer.h.{i}.attn.c_proj",
    "mlp_norm": "transformer.h.{i}.ln_2",
    "mlp.up": "transformer.h.{i}.mlp.c_fc",
    "mlp.down": "transformer.h.{i}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
LLAMA_MODULES = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{i}.input_layernorm",
    "attention.query": "model.layers.{i}.self_attn.q_proj",
    "attention.key": "model.layers.{i}.self_attn.k_proj",
    "attention.value": "model.layers.{i}.self_attn.v_proj",
    "attention.output": "model.layers.{i}.self_attn.o_proj",
    "attention.query_norm": "model.layers.{i}.self_attn.q_norm",
    "attention.key_norm": "model.layers.{i}.self_attn.k_norm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp.gate": "model.layers.{i}.mlp.gate_proj",
    "mlp.up": "model.layers.{i}.mlp.up_proj",
    "mlp.down": "model.layers.{i}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
MIXTRAL_MODULES = LLAMA_MODULES | {
    "mlp.router": "model.layers.{i}.block_sparse_moe.gate",
    "mlp.experts.gate": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
    "mlp.experts.up": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    "mlp.experts.down": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
}
QWEN3_MOE_MODULES = LLAMA_MODULES | {
    "mlp.router": "model.layers.{i}.mlp.gate",
    "mlp.experts.gate": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "mlp.experts.up": "model.layers.{i}.mlp.experts.{e}.up_proj",
    "mlp.experts.down": "model.layers.{i}.mlp.experts.{e}.down_proj",
}
PHI3_MODULES = LLAMA_MODULES | {
    "attention.query": "model.layers.{i}.self_attn.qkv_proj",
    "attention.key": "model.layers.{i}.self_attn.qkv_proj",
    "attention.value": "model.layers.{i}.self_attn.qkv_proj",
    "mlp.gate": "model.layers.{i}.mlp.gate_up_proj",
    "mlp.up": "model.layers.{i}.mlp.gate_up_proj",
}
OLMO2_MODULES = LLAMA_MODULES | {
    "attention_output_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm",
}
GEMMA3_MODULES = LLAMA_MODULES | {
    "attention_output_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "mlp_output_norm": "model.layers.{i}.post_feedforward_layernorm",
}
NEMOTRON_H_MODULES = {
    "embedding": "model.embeddings",
    "norm": "model.layers.{i}.norm",
    "attention.query": "model.layers.{i}.mixer.q_proj",
    "attention.key": "model.layers.{i}.mixer.k_proj",
    "attention.value": "model.layers.{i}.mixer.v_proj",
    "attention.output": "model.layers.{i}.mixer.o_proj",
    "mlp.up": "model.layers.{i}.mixer.up_proj",
    "mlp.down": "model.layers.{i}.mixer.down_proj",
    **dict.fromkeys((f"mamba.{part}" for part in ("gate", "x", "b", "c", "dt")), "model.layers.{i}.mixer.in_proj"),
    "mamba.conv": "model.layers.{i}.mixer.conv1d",
    "mamba.dt_bias": "model.layers.{i}.mixer.dt_bias",
    "mamba.A_log": "model.layers.{i}.mixer.A_log",
    "mamba.D": "model.layers.{i}.mixer.D",
    "mamba.norm": "model.layers.{i}.mixer.norm",
    "mamba.output": "model.layers.{i}.mixer.out_proj",
    "final_norm": "model.norm_f",
    "head": "lm_head",
}

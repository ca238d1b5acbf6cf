"""Writes rope.json: cosines and sines of one position under every scaling of rotary embeddings, as transformers computes them.
Made with transformers 5.24.0, torch 2.15.0 (python make_rope.py > rope.json)."""
import json, torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

cases = []
def case(kind, name, D, P, theta, length, **scaling):
    p = {"rope_type": name, "rope_theta": theta, **scaling}
    config = LlamaConfig(hidden_size=D * 2, num_attention_heads=2, head_dim=D, max_position_embeddings=P, rope_parameters=p)
    rope = LlamaRotaryEmbedding(config)
    pos = torch.arange(length)[None]
    cos, sin = rope(torch.zeros(1, length, D), pos)
    table = cos[0, -1, : D // 2].tolist() + sin[0, -1, : D // 2].tolist()
    cases.append({"type": kind, "D": D, "P": P, "theta": theta, "length": length, "factor": scaling.get("factor", 0),
                  "low": scaling.get("low_freq_factor", 0), "high": scaling.get("high_freq_factor", 0),
                  "original": scaling.get("original_max_position_embeddings", P), "attention": scaling.get("attention_factor", 0),
                  "beta_fast": scaling.get("beta_fast", 32), "beta_slow": scaling.get("beta_slow", 1),
                  "truncate": int(scaling.get("truncate", True)), "factor_out": float(rope.attention_scaling), "table": table})

case(1, "default", 64, 2048, 10000.0, 2000)
case(1, "default", 16, 2048, 1e6, 77)
case(2, "linear", 64, 1024, 10000.0, 1800, factor=4.0)
case(3, "dynamic", 32, 512, 10000.0, 1500, factor=2.0)
case(3, "dynamic", 32, 512, 10000.0, 300, factor=2.0)
case(4, "llama3", 64, 8192, 500000.0, 2500, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=2048)
case(5, "yarn", 64, 4096, 10000.0, 2500, factor=4.0, original_max_position_embeddings=1024)
case(5, "yarn", 64, 4096, 1e6, 900, factor=4.0, original_max_position_embeddings=1024, attention_factor=1.5, beta_fast=16, beta_slow=2, truncate=False)
print("[" + ",\n".join(json.dumps(c) for c in cases) + "]")

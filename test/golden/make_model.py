"""Golden files of test_model.c, in model/: tiny random models as transformers saves them, with checksums of what each
slot of the tensor table must hold, and what transformers makes of many a config.json.

Made with torch 2.15.0, transformers 5.24.0, safetensors 0.8.0:  python make_model.py
"""
import json, os, shutil
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model")
SLOTS = {  # slot -> attribute of a Llama-like layer
    "q_w": "self_attn.q_proj.weight", "k_w": "self_attn.k_proj.weight", "v_w": "self_attn.v_proj.weight",
    "o_w": "self_attn.o_proj.weight", "gate_w": "mlp.gate_proj.weight", "up_w": "mlp.up_proj.weight",
    "down_w": "mlp.down_proj.weight", "norm1_w": "input_layernorm.weight", "norm2_w": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight", "q_b": "self_attn.q_proj.bias",
    "k_b": "self_attn.k_proj.bias", "v_b": "self_attn.v_proj.bias", "o_b": "self_attn.o_proj.bias",
    "gate_b": "mlp.gate_proj.bias", "up_b": "mlp.up_proj.bias", "down_b": "mlp.down_proj.bias",
}


def slots_llama(state, layers):
    out = {"0.wte": state["model.embed_tokens.weight"], f"{layers + 1}.norm_w": state["model.norm.weight"]}
    if "lm_head.weight" in state:
        out[f"{layers + 1}.head_w"] = state["lm_head.weight"]
    for i in range(layers):
        for slot, name in SLOTS.items():
            if f"model.layers.{i}.{name}" in state:
                out[f"{i + 1}.{slot}"] = state[f"model.layers.{i}.{name}"]
    return out


def slots_gpt2(state, layers):
    t = "transformer."
    out = {"0.wte": state[t + "wte.weight"], "0.wpe": state[t + "wpe.weight"],
           f"{layers + 1}.norm_w": state[t + "ln_f.weight"], f"{layers + 1}.norm_b": state[t + "ln_f.bias"]}
    for i in range(layers):
        h = {k.split(f"{t}h.{i}.")[1]: v for k, v in state.items() if k.startswith(f"{t}h.{i}.")}
        for p, axis in ("weight", 1), ("bias", 0):
            for slot, part in zip("qkv", h[f"attn.c_attn.{p}"].chunk(3, dim=axis)):
                out[f"{i + 1}.{slot}_{p[0]}"] = part.t()
        for slot, name in ("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj"):
            out[f"{i + 1}.{slot}_w"], out[f"{i + 1}.{slot}_b"] = h[name + ".weight"].t(), h[name + ".bias"]
        for slot, name in ("norm1", "ln_1"), ("norm2", "ln_2"):
            out[f"{i + 1}.{slot}_w"], out[f"{i + 1}.{slot}_b"] = h[name + ".weight"], h[name + ".bias"]
    return out


def internlm2(config, dtype):  # transformers has no class of this family: its modelling file comes with the weights
    C, F, V, H, K = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"))
    D, G, L = C // H, H // K, config["num_hidden_layers"]
    r = lambda *shape: torch.randn(*shape).to(dtype)
    state = {"model.tok_embeddings.weight": r(V, C), "model.norm.weight": r(C), "output.weight": r(V, C)}
    out = {"0.wte": state["model.tok_embeddings.weight"], f"{L + 1}.norm_w": state["model.norm.weight"], f"{L + 1}.head_w": state["output.weight"]}
    for i in range(L):
        p = f"model.layers.{i}."
        for name, slot, shape in (("attention.wqkv", "", ((H + 2 * K) * D, C)), ("attention.wo", "o", (C, C)), ("feed_forward.w1", "gate", (F, C)),
                                  ("feed_forward.w3", "up", (F, C)), ("feed_forward.w2", "down", (C, F))):
            state[p + name + ".weight"] = r(*shape)
            if name.startswith("attention"):
                state[p + name + ".bias"] = r(shape[0])
            if slot:
                out[f"{i + 1}.{slot}_w"] = state[p + name + ".weight"]
        out[f"{i + 1}.o_b"] = state[p + "attention.wo.bias"]
        for kind in "weight", "bias":
            wqkv = state[p + "attention.wqkv." + kind].reshape(K, G + 2, D, -1)  # as the modelling file's rearrange
            for slot, part in ("q", wqkv[:, :G]), ("k", wqkv[:, -2]), ("v", wqkv[:, -1]):
                out[f"{i + 1}.{slot}_{kind[0]}"] = part.reshape(-1, wqkv.shape[-1])
        for name, slot in ("attention_norm", "norm1"), ("ffn_norm", "norm2"):
            state[p + name + ".weight"] = out[f"{i + 1}.{slot}_w"] = r(C)
    return state, out


def checksum(t):  # weights that a permutation of rows or columns would not leave alone
    t = t.detach().double().reshape(t.shape[0], -1)
    r, c = torch.arange(t.shape[0]).unsqueeze(1), torch.arange(t.shape[1]).unsqueeze(0)
    return [t.shape[0], t.shape[1], float((t * ((r * 31 + c * 17) % 97)).sum())]


def models():
    llama = dict(vocab_size=19, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=32, bos_token_id=1, eos_token_id=2)
    gpt2 = dict(vocab_size=19, n_embd=16, n_layer=2, n_head=4, n_positions=12, bos_token_id=0, eos_token_id=0)
    todo = {"gpt2": (dict(gpt2, model_type="gpt2"), torch.float32, "1GB"),
            "llama": (dict(llama, model_type="llama", attention_bias=True, mlp_bias=True), torch.bfloat16, "1GB"),
            "mistral": (dict(llama, model_type="mistral", head_dim=6, sliding_window=5), torch.float32, "8KB"),
            "qwen2": (dict(llama, model_type="qwen2", tie_word_embeddings=True), torch.float16, "1GB"),
            "qwen3": (dict(llama, model_type="qwen3", head_dim=6), torch.bfloat16, "4KB"),
            "internlm2": (dict(llama, model_type="internlm2", architectures=["InternLM2ForCausalLM"], hidden_act="silu", bias=True,
                               rope_scaling={"type": "dynamic", "factor": 2.0}), torch.bfloat16, None)}
    for seed, (name, (config, dtype, shard)) in enumerate(todo.items()):
        torch.manual_seed(seed)
        folder = os.path.join(HERE, name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        if name == "internlm2":
            state, slots = internlm2(config, dtype)
            json.dump(dict(config, torch_dtype="bfloat16"), open(os.path.join(folder, "config.json"), "w"), indent=1)
            save_file(state, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(dtype)
            for p in model.parameters():
                p.data = torch.randn(p.shape).to(dtype)
            if config.get("tie_word_embeddings", name == "gpt2"):
                model.tie_weights()
            model.save_pretrained(folder, max_shard_size=shard)
            state = model.state_dict()
            if model.config.tie_word_embeddings:
                state.pop("lm_head.weight")
            slots = (slots_gpt2 if name == "gpt2" else slots_llama)(state, 2)
        json.dump({k: checksum(v) for k, v in slots.items()}, open(os.path.join(folder, "slots.json"), "w"))


def resolve(config):
    """What transformers makes of a config.json, in the words of SftArch."""
    c = AutoConfig.for_model(**json.loads(json.dumps(config)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(c)
    gpt2 = c.model_type == "gpt2"
    layers = model.transformer.h if gpt2 else model.model.layers
    attn, mlp = (layers[0].attn, layers[0].mlp) if gpt2 else (layers[0].self_attn, layers[0].mlp)
    head = model.get_input_embeddings().weight.shape
    e = {"V": head[0], "C": head[1], "L": len(layers), "P": c.max_position_embeddings, "H": c.num_attention_heads,
         "K": c.num_attention_heads if gpt2 else c.num_key_value_heads, "D": attn.head_dim,
         "F": mlp.c_fc.weight.shape[1] if gpt2 else mlp.up_proj.weight.shape[0], "parameters": sum(p.numel() for p in model.parameters()),
         "q_bias": bool(gpt2 or attn.q_proj.bias is not None), "o_bias": bool(gpt2 or attn.o_proj.bias is not None),
         "mlp_bias": bool(gpt2 or mlp.up_proj.bias is not None), "qk_norm": hasattr(attn, "q_norm"), "tied": c.tie_word_embeddings,
         "eps": c.layer_norm_epsilon if gpt2 else c.rms_norm_eps, "init": c.initializer_range,
         "scale": (attn.head_dim ** -0.5 if c.scale_attn_weights else 1.0) if gpt2 else attn.scaling}
    eos = c.eos_token_id
    e["eos"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    e["bos"] = -1 if c.bos_token_id is None else c.bos_token_id
    if gpt2:
        e["act"] = {"NewGELUActivation": 2, "GELUTanh": 2, "FastGELUActivation": 2, "GELUActivation": 1}[type(mlp.act).__name__]
    else:
        rope = model.model.rotary_emb
        e["rope"] = rope.rope_type
        e["attention"] = rope.attention_scaling
        for ours, theirs in ("theta", "rope_theta"), ("factor", "factor"), ("original", "original_max_position_embeddings"), ("low", "low_freq_factor"), ("high", "high_freq_factor"):
            e[ours] = c.rope_parameters.get(theirs)
        windows = [getattr(l.self_attn, "sliding_window", None if c.model_type != "mistral" else c.sliding_window) for l in layers]
        e["windows"] = [w or 0 for w in windows]
    return e


def configs():
    small = dict(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8)
    cases = [dict(model_type=t) for t in ("gpt2", "llama", "mistral", "qwen2", "qwen3")]  # every key left out
    cases += [dict(small, model_type=t) for t in ("llama", "mistral", "qwen2", "qwen3")]
    cases += [
        dict(model_type="gpt2", n_inner=40, n_embd=12, n_head=4, n_layer=3, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False),
        dict(model_type="gpt2", n_inner=None, n_embd=12, n_head=3, n_layer=3, activation_function="gelu_pytorch_tanh", eos_token_id=[1, 2]),
        dict(model_type="gpt2", n_embd=12, n_head=3, n_layer=1, n_positions=7, activation_function="gelu_fast", layer_norm_epsilon=1e-6, initializer_range=0.5),
        dict(small, model_type="llama", num_key_value_heads=2, head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, eos_token_id=[5, 6, 7]),
        dict(small, model_type="llama", num_key_value_heads=None, head_dim=None, eos_token_id=None, bos_token_id=None, rms_norm_eps=1e-5, rope_theta=5e5),
        dict(small, model_type="llama", rope_theta=3e4, rope_scaling={"type": "linear", "factor": 2}),
        dict(small, model_type="llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=64),
        dict(small, model_type="llama", rope_theta=500000.0, max_position_embeddings=131072,
             rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}),
        dict(small, model_type="llama", rope_parameters={"rope_theta": 12345.0, "rope_type": "default"}, rope_theta=1.5e4),
        dict(small, model_type="llama", rope_parameters={"rope_theta": 77.0, "rope_type": "linear", "factor": 3.0}, rope_scaling={"type": "linear", "factor": 2.0}),
        dict(small, model_type="llama", rope_parameters={"rope_theta": 77.0, "rope_type": "linear", "factor": 3.0}, rope_scaling=None),
        dict(small, model_type="qwen2", rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, max_position_embeddings=131072, rope_theta=1e6),
        dict(small, model_type="qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        dict(small, model_type="qwen3", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}),
        dict(small, model_type="qwen3", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 0.5, "mscale": 0.7}),
        dict(small, model_type="qwen3", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": None, "original_max_position_embeddings": 8192}),
        dict(small, model_type="mistral", sliding_window=None, num_key_value_heads=8),
        dict(small, model_type="mistral", sliding_window=16, head_dim=16),
        dict(small, model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        dict(small, model_type="qwen2", use_sliding_window=True, sliding_window=8),
        dict(small, model_type="qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=0, use_mrope=False),
        dict(small, model_type="qwen2", use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 3 + ["sliding_attention"]),
        dict(small, model_type="qwen2", head_dim=12, num_key_value_heads=4),
        dict(small, model_type="qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2, attention_bias=True, layer_types=None),
    ]
    with open(os.path.join(HERE, "configs.json"), "w") as f:
        f.write("[" + ",\n".join(json.dumps({"config": c, "expect": resolve(c)}) for c in cases) + "]\n")


os.makedirs(HERE, exist_ok=True)
models()
configs()

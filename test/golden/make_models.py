"""Tiny random models of every family, and what PyTorch makes of them: test/golden/model_NAME/.

Made with torch 2.15.0, transformers 5.24.0, safetensors 0.8.0; run as `python make_models.py` in this folder.

A folder holds config.json and model.safetensors as the family's own checkpoints do, and golden.safetensors:
  bI.ids, bI.pos, bI.target   six micro-batches of documents in one row (a document begins where pos is 0; target -100:
                              not trained). Batch 3 has no trained token, every batch has a document of one token.
  logits, loss                of batch 0, the loss as a sum over its targets
  grad.U.SLOT                 gradient of that sum, U: 0 embeddings, 1.. blocks, last: final norm and head; SLOT as in
                              the tensor table of sft.h, linear weights [out, in]
  after.U.SLOT                parameters after three AdamW steps of two micro-batches each (loss: sum / trained tokens of
                              the step, clipping at CLIP, weight decay on matrices only), with step.loss, step.norm
Every document goes through the model alone, so that the reference knows nothing of packing. Weights are fp32, the
arithmetic is fp64 (but for what transformers itself casts to fp32: norms, softmax, cosines).
A variant (another config.json on the weights of a family) has no model.safetensors; SOURCE in the test names the family.
"""
import json, os, shutil, sys
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

LR, BETAS, EPS, DECAY, CLIP = 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0
V, C, L, F, H, K = 97, 32, 2, 40, 4, 2

llama = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=V, hidden_size=C, num_hidden_layers=L,
             intermediate_size=F, num_attention_heads=H, num_key_value_heads=K, hidden_act="silu", rms_norm_eps=1e-5,
             max_position_embeddings=64, rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False,
             attention_bias=False, mlp_bias=False, bos_token_id=1, eos_token_id=2, torch_dtype="float32")
gpt2 = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=V, n_embd=C, n_layer=L, n_head=H,
            n_inner=None, n_positions=32, n_ctx=32, activation_function="gelu_new", layer_norm_epsilon=1e-5,
            attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, bos_token_id=0, eos_token_id=0)
FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "llama_bias": llama | dict(attention_bias=True, mlp_bias=True, eos_token_id=[2, 3]),
    "mistral": llama | dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=6, head_dim=None,
                            num_key_value_heads=1),
    "qwen2": llama | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True,
                          use_sliding_window=True, sliding_window=5, max_window_layers=1, rope_theta=1000000.0,
                          rms_norm_eps=1e-6),
    "qwen3": llama | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", tie_word_embeddings=True, head_dim=12,
                          use_sliding_window=False, sliding_window=None, max_window_layers=2),
}
VARIANTS = {  # name: (family whose weights it takes, config)
    "gpt2_scaled": ("gpt2", gpt2 | dict(activation_function="gelu", scale_attn_by_inverse_layer_idx=True)),
    "llama_linear": ("llama", llama | dict(rope_scaling={"type": "linear", "factor": 2.5})),
    "llama_dynamic": ("llama", llama | dict(max_position_embeddings=16, rope_scaling={"type": "dynamic", "factor": 2.0})),
    "llama_llama3": ("llama", llama | dict(max_position_embeddings=256, rope_scaling={"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "llama_yarn": ("llama", {k: v for k, v in llama.items() if k not in ("rope_theta", "rope_scaling")} | dict(
        max_position_embeddings=256, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0})),
}


def slots(model, family):
    """{unit.slot: function from the gradient or the value of (name) to the tensor as sft.h has it}"""
    out = {}
    add = lambda unit, slot, name, f=lambda t: t: out.update({f"{unit}.{slot}": (name, f)})
    params = dict(model.named_parameters())
    if family == "gpt2":
        add(0, "wte", "transformer.wte.weight"), add(0, "wpe", "transformer.wpe.weight")
        for l in range(L):
            p, u = f"transformer.h.{l}.", l + 1
            for i, s in enumerate("qkv"):  # Conv1D: [in, out], q, k, v side by side
                add(u, s + "_w", p + "attn.c_attn.weight", lambda t, i=i: t[:, i * C:(i + 1) * C].T)
                add(u, s + "_b", p + "attn.c_attn.bias", lambda t, i=i: t[i * C:(i + 1) * C])
            for s, n in (("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
                add(u, s + "_w", p + n + ".weight", lambda t: t.T), add(u, s + "_b", p + n + ".bias")
            for s, n in (("norm1", "ln_1"), ("norm2", "ln_2")):
                add(u, s + "_w", p + n + ".weight"), add(u, s + "_b", p + n + ".bias")
        add(L + 1, "norm_w", "transformer.ln_f.weight"), add(L + 1, "norm_b", "transformer.ln_f.bias")
        return out
    add(0, "wte", "model.embed_tokens.weight")
    for l in range(L):
        p, u = f"model.layers.{l}.", l + 1
        for s, n in (("q", "self_attn.q_proj"), ("k", "self_attn.k_proj"), ("v", "self_attn.v_proj"),
                     ("o", "self_attn.o_proj"), ("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj")):
            add(u, s + "_w", p + n + ".weight")
            if p + n + ".bias" in params: add(u, s + "_b", p + n + ".bias")
        add(u, "norm1_w", p + "input_layernorm.weight"), add(u, "norm2_w", p + "post_attention_layernorm.weight")
        if family == "qwen3":
            add(u, "q_norm", p + "self_attn.q_norm.weight"), add(u, "k_norm", p + "self_attn.k_norm.weight")
    add(L + 1, "norm_w", "model.norm.weight")
    if "lm_head.weight" in params: add(L + 1, "head_w", "lm_head.weight")
    return out


def batches():
    g = torch.Generator().manual_seed(7)
    out = []
    for i, lengths in enumerate([(23, 1, 9), (5, 29, 1), (1, 12, 12), (17, 1, 4), (1, 30), (8, 1, 21)]):
        ids = [torch.randint(0, V, (n,), generator=g) for n in lengths]
        target = []
        for d in ids:
            t = torch.cat([d[1:], torch.tensor([-100])])
            t[torch.rand(len(d), generator=g) < 0.4] = -100
            if i == 3: t[:] = -100
            target.append(t)
        out.append((ids, target))
    return out


def forward(model, batch):
    """Sum of the cross-entropy over the targets, and the logits, each document on its own."""
    total, logits = 0.0, []
    for ids, target in zip(*batch):
        rotary = getattr(model.base_model, "rotary_emb", None)
        if rotary is not None: model.base_model.rotary_emb = type(rotary)(model.config)  # forget earlier, longer documents
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        total = total + torch.nn.functional.cross_entropy(logits[-1], target, ignore_index=-100, reduction="sum")
    return total, torch.cat(logits)


def randomise(model):
    g = torch.Generator().manual_seed(11)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g, dtype=torch.float32)
        is_norm = any(s in name for s in ("norm", "ln_"))
        p.data = (1 + 0.3 * noise if is_norm and name.endswith("weight") else (0.2 if p.dim() == 2 else 0.3) * noise)


def make(name, config, source=None):
    folder = f"model_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    json.dump(config, open(f"{folder}/config.json", "w"), indent=1)
    family = config["model_type"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    randomise(model)  # the same numbers for a variant as for its family: same shapes, same order
    if not source:
        tied = model.config.tie_word_embeddings
        weights = {k: v.contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        if name == "llama": internlm2(weights)
    model.double()
    named, where, data = dict(model.named_parameters()), slots(model, family), batches()
    assert {n for n, _ in where.values()} == set(named), set(named) - {n for n, _ in where.values()}
    out = {}
    for i, (ids, target) in enumerate(data):
        out[f"b{i}.ids"] = torch.cat(ids).int()
        out[f"b{i}.pos"] = torch.cat([torch.arange(len(d)) for d in ids]).int()
        out[f"b{i}.target"] = torch.cat(target).int()
        if source: break
    loss, logits = forward(model, data[0])
    loss.backward()
    out["loss"], out["logits"] = loss.detach()[None], logits.detach()
    for k, (n, f) in where.items():
        if source and k.split(".")[1] not in ("q_w", "k_w", "up_w"): continue  # what a variant's own settings touch
        out["grad." + k] = f(named[n].grad)
    if not source and name != "llama_bias":
        decay = [p for p in named.values() if p.dim() == 2]
        rest = [p for p in named.values() if p.dim() != 2]
        adam = torch.optim.AdamW([dict(params=decay, weight_decay=DECAY), dict(params=rest, weight_decay=0.0)], lr=LR,
                                 betas=BETAS, eps=EPS)
        losses, norms = [], []
        for step in range(3):
            pair = data[2 * step: 2 * step + 2]
            trained = sum(int((t >= 0).sum()) for b in pair for t in b[1])
            adam.zero_grad()
            total = 0.0
            for b in pair:
                loss = forward(model, b)[0] / trained
                loss.backward()
                total += loss.item()
            norms.append(torch.nn.utils.clip_grad_norm_(named.values(), CLIP).item())
            losses.append(total)
            adam.step()
        print(name, "loss", losses, "norm", norms)
        out["step.loss"], out["step.norm"] = torch.tensor(losses), torch.tensor(norms)
        for k, (n, f) in where.items(): out["after." + k] = f(named[n].data)
    save_file({k: (v if v.dtype == torch.int32 else v.float()).contiguous() for k, v in out.items()},
              f"{folder}/golden.safetensors")
    print(name, "loss per token", out["loss"].item() / int((out["b0.target"] >= 0).sum()), "logits", logits.std().item(),
          "grad", {k.split(".", 1)[1]: round(v.norm().item(), 3) for k, v in out.items() if k.startswith("grad.1")})


def internlm2(llama_weights):
    """The Llama model as an InternLM2 checkpoint: q, k, v of a group of heads in one matrix, other names."""
    os.makedirs("model_internlm2", exist_ok=True)
    config = {k: v for k, v in llama.items() if k not in ("attention_bias", "mlp_bias")} | dict(
        architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False,
        auto_map={"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"})
    json.dump(config, open("model_internlm2/config.json", "w"), indent=1)
    D, out = C // H, {}
    rename = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
              "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
              "embed_tokens": "tok_embeddings", "lm_head": "output"}
    for name, t in llama_weights.items():
        if "q_proj" in name:  # [K groups, H/K query heads + key + value, D, C]
            q = t.view(K, H // K, D, C)
            k = llama_weights[name.replace("q_proj", "k_proj")].view(K, 1, D, C)
            v = llama_weights[name.replace("q_proj", "v_proj")].view(K, 1, D, C)
            out[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat([q, k, v], 1).reshape(-1, C).contiguous()
        elif "k_proj" not in name and "v_proj" not in name:
            for a, b in rename.items(): name = name.replace(a, b)
            out[name] = t
    save_file(out, "model_internlm2/model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, config in FAMILIES.items(): make(name, config)
    for name, (source, config) in VARIANTS.items(): make(name, config, source)
    os.system("du -cb model_* | tail -n 1")

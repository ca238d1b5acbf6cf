"""Writes step.h: learning-rate schedules and AdamW steps, from the real thing.

    python make_step.py deepspeed-0.19.8/deepspeed/runtime/lr_schedules.py > step.h

torch 2.15.0, transformers 5.24.0; of DeepSpeed 0.19.8 the one file named on the command line (its source package).
"""
import importlib.util
import json
import sys
import types

import torch
import transformers

LR = 3e-4
HUGGING_FACE = [  # name, its parameters, W, T
    ("linear", {}, 0, 10), ("linear", {}, 4, 12), ("linear", {}, 12, 12),
    ("cosine", {}, 3, 12), ("cosine", {"num_cycles": 1.5}, 0, 12),
    ("cosine_with_restarts", {}, 2, 12), ("cosine_with_restarts", {"num_cycles": 3}, 3, 15),
    ("polynomial", {}, 2, 12), ("polynomial", {"lr_end": 1e-5, "power": 2.5}, 3, 14),
    ("constant", {}, 3, 8), ("constant_with_warmup", {}, 3, 8),
    ("inverse_sqrt", {}, 0, 12), ("inverse_sqrt", {}, 4, 12), ("inverse_sqrt", {"timescale": 7}, 3, 12),
    ("cosine_with_min_lr", {"min_lr": 3e-5}, 3, 12), ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1}, 0, 12),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 4, 12),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-5, "warmup_lr_rate": 0.3}, 4, 12),
    ("warmup_stable_decay", {"num_decay_steps": 5}, 3, 14),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 3, "warmup_type": "cosine", "decay_type": "linear", "min_lr_ratio": 0.1}, 4, 14),
    ("warmup_stable_decay", {"num_decay_steps": 6, "warmup_type": "1-sqrt", "decay_type": "1-sqrt", "num_cycles": 2}, 4, 14),
    ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "cosine", "num_cycles": 1, "min_lr_ratio": 0.2}, 2, 14),
]
DEEPSPEED = [
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, 8),
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3}, 8),
    ("WarmupLR", {"warmup_num_steps": 1}, 5),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear"}, 10),
    ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_max_lr": 2e-4}, 12),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear"}, 10),
    ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}, 12),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 4, "decay_lr_rate": 0.5, "decay_step_size": 2}, 12),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 5, "cycle_second_step_size": 7,
                  "cycle_first_stair_count": 2, "cycle_second_stair_count": 3, "cycle_min_mom": 0.85, "cycle_max_mom": 0.9,
                  "decay_mom_rate": 0.01, "decay_step_size": 3}, 18),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 3, "cycle_momentum": False}, 9),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}, 8),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}, 8),
]


def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def row(name, kwargs, W, T, rates, betas):
    quoted = json.dumps(json.dumps(kwargs))
    print(f'    {{"{name}", {quoted}, {W}, {T}, {len(rates)},')
    print("     {" + ", ".join(f"{x:.17g}" for x in rates) + "},")
    print("     {" + ", ".join(f"{x:.17g}" for x in betas) + "}},")


print(f"// Made by make_step.py: torch {torch.__version__}, transformers {transformers.__version__}, DeepSpeed 0.19.8.")
print("static const struct { const char *name, *kwargs; int W, T, n; double lr[20], beta1[20]; } golden_schedule[] = {")
for name, kwargs, W, T in HUGGING_FACE:
    opt = optimizer()
    s = transformers.get_scheduler(name, opt, num_warmup_steps=W, num_training_steps=T, scheduler_specific_kwargs=kwargs)
    rates = []
    for _ in range(T):
        rates.append(opt.param_groups[0]["lr"])
        opt.step(), s.step()
    row(name, kwargs, W, T, rates, [0.9] * T)

fake = types.ModuleType("deepspeed.utils")
fake.logger = types.SimpleNamespace(warning=lambda *_: None)
sys.modules["deepspeed"], sys.modules["deepspeed.utils"] = types.ModuleType("deepspeed"), fake
spec = importlib.util.spec_from_file_location("lr_schedules", sys.argv[1])
ds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ds)
for name, kwargs, T in DEEPSPEED:
    opt = optimizer()
    s = getattr(ds, name)(opt, **kwargs)
    rates, betas = [], []
    for _ in range(T):
        rates.append(opt.param_groups[0]["lr"]), betas.append(opt.param_groups[0]["betas"][0])
        opt.step(), s.step()
    row(name, kwargs, 0, T, rates, betas)
print("};")

# AdamW: two parameters (one decayed), three steps of two accumulated gradients, clipped. Numbers from a formula that the
# test repeats: value(i) = ((i * 7919 + 104729) mod 2003) / 2003 - 0.5.
def value(first, n):
    return torch.tensor([((i * 7919 + 104729) % 2003) / 2003 - 0.5 for i in range(first, first + n)], dtype=torch.float64).float()


n = (37, 11)
p = [torch.nn.Parameter(value(100 * k, n[k])) for k in range(2)]
opt = torch.optim.AdamW([{"params": [p[0]], "weight_decay": 0.1}, {"params": [p[1]], "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.99), eps=1e-8)
s = transformers.get_scheduler("linear", opt, num_warmup_steps=1, num_training_steps=5)
norms, rates = [], []
for step in range(3):
    for k in range(2):
        p[k].grad = value(1000 * step + 300 * k, n[k]) + value(1000 * step + 300 * k + 500, n[k])
        if step == 2:
            p[k].grad *= 0.1  # small enough not to be clipped
    norms.append(torch.nn.utils.clip_grad_norm_(p, 1.0).item())
    rates.append(opt.param_groups[0]["lr"])
    opt.step(), s.step()
print("static const double golden_norm[] = {" + ", ".join(f"{x:.9g}" for x in norms) + "};")
for k in range(2):
    for what, t in (("p", p[k]), ("m", opt.state[p[k]]["exp_avg"]), ("v", opt.state[p[k]]["exp_avg_sq"])):
        print(f"static const float golden_{what}{k}[] = {{" + ", ".join(f"{x:.9g}f" if "." in f"{x:.9g}" or "e" in f"{x:.9g}" else f"{x:.9g}.0f" for x in t.tolist()) + "};")

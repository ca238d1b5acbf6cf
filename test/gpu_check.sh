#!/bin/sh
# All that a machine with a GPU can say about this program, in one go of at most ten minutes:
#     test/gpu_check.sh [MODEL [FIGURES]]
# MODEL: a Hugging Face folder to train, SmolLM2-135M say; without one, a model of GPT-2's size from random weights.
# Needs nvcc and what `make deps` installs, and no network. All is printed and written to FIGURES (build/gpu_check.txt),
# with date, chip and commands. PROGRAM=./train_gpt2cu_emu STEPS=2 test/gpu_check.sh MODEL tries its last part alone.
cd "$(dirname "$0")/.." || exit 2
model=$1 figures=${2:-build/gpu_check.txt} program=${PROGRAM:-./train_gpt2cu} steps=${STEPS:-20} failed=0
mkdir -p build && : >"$figures"
say() { echo "$*" | tee -a "$figures"; }
step() { # step SECONDS COMMAND...: runs it for at most so long; counts it if it fails
    seconds=$1 && shift
    say "" && say "\$ $*"
    start=$(date +%s)
    timeout "$seconds" "$@" >build/gpu_check.log 2>&1
    status=$?
    tail -n 400 build/gpu_check.log | tee -a "$figures"
    say "# $(($(date +%s) - start)) s"
    [ $status -eq 0 ] && return
    say "FAILED with status $status (124: after $seconds seconds)" && failed=$((failed + 1))
    return 1
}
field() { # field NAME: its value in the last line of $log that has it
    grep -o "\"$1\":[^,}]*" "$log" | tail -n 1 | cut -d: -f2
}
say "$(date -u '+%Y-%m-%d %H:%M') UTC, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
smi="nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader"
say "$($smi 2>&1 || echo 'no nvidia-smi')"
say "$(nvcc --version 2>&1 | tail -n 1)"

if [ -z "$PROGRAM" ]; then
    step 240 make -s -j"$(nproc)" train_gpt2cu build/cuda/test_ops build/cuda/bench
    step 80 build/cuda/test_ops
    step 160 build/cuda/bench --json build/bench-cuda.json 0.1
fi
if [ -z "$model" ]; then
    model=build/gpu_model
    mkdir -p $model && cp data/tiny/tokenizer.json data/tiny/tokenizer_config.json $model
    echo '{"model_type": "gpt2", "vocab_size": 1536, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "activation_function": "gelu_new", "initializer_range": 0.02, "eos_token_id": 0}' >$model/config.json
    options="--init scratch --template chatml"
fi
for type in bf16 fp16; do # of the first steps, which find memory and clocks, nothing is in the last's figures
    step 60 $program train --model_name_or_path "$model" $options --train_file data/instructions.jsonl --packing \
        --$type --max_length 1024 --per_device_train_batch_size 8 --max_steps $steps --save_strategy no \
        --overwrite_output_dir --output_dir build/gpu_$type || continue
    log=build/gpu_$type/log.jsonl
    say "$type, last step: $(field tokens_per_second) tokens/s, MFU $(field mfu), loss $(field loss);" \
        "memory: $(field plan_bytes) bytes planned, $(field peak_bytes) used"
done
say "" && say "$failed steps failed; figures in $figures"
[ $failed -eq 0 ]

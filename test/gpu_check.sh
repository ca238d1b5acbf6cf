#!/bin/sh
# All that a machine with a GPU can say about this program, in one go of ten minutes:
#     test/gpu_check.sh [MODEL [FIGURES]]
# MODEL: a Hugging Face folder to train, SmolLM2-135M say; without one that part is left out, and named. Needs nvcc and
# what `make deps` installs. All is printed and written to FIGURES (build/gpu_check.txt), with date, chip and commands.
cd "$(dirname "$0")/.." || exit 2
model=$1 figures=${2:-build/gpu_check.txt} failed=0
mkdir -p build && : >"$figures"
say() { echo "$*" | tee -a "$figures"; }
step() { # step SECONDS COMMAND...: runs it for at most so long; counts it if it fails
    seconds=$1 && shift
    say "" && say "\$ $*"
    start=$(date +%s)
    timeout "$seconds" "$@" >build/gpu_check.log 2>&1
    status=$?
    tail -n 400 build/gpu_check.log | tee -a "$figures"
    [ $status -eq 0 ] || { say "FAILED with status $status (124: after $seconds seconds)" && failed=$((failed + 1)); }
    say "# $(($(date +%s) - start)) s"
}
say "$(date -u '+%Y-%m-%d %H:%M') UTC, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
say "$(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader || echo 'no nvidia-smi')"
say "$(nvcc --version | tail -n 1)"

step 240 make -s -j"$(nproc)" train_gpt2cu build/cuda/test_ops build/cuda/bench
step 120 build/cuda/test_ops
step 200 build/cuda/bench --json build/bench-cuda.json 0.1
if [ -d "$model" ]; then
    for type in bf16 fp16; do # 20 steps; the first ones, which find memory and clocks, are not in the last's figures
        step 60 ./train_gpt2cu train --model_name_or_path "$model" --train_file data/instructions.jsonl --packing \
            --$type --max_length 1024 --per_device_train_batch_size 8 --max_steps 20 --save_strategy no \
            --overwrite_output_dir --output_dir build/gpu_$type
        say "# $type, the last step and the summary (plan_bytes: planned; peak_bytes: used):"
        tail -n 2 build/gpu_$type/log.jsonl | tee -a "$figures"
    done
else
    say "" && say "NOT RUN: training, for no model folder was given"
fi
say "" && say "$failed steps failed; figures in $figures"
[ $failed -eq 0 ]

#!/bin/sh
# train_gpt2cu_emu against train_gpt2, in TAP: whole runs of a tiny GPT-2 and a tiny Llama (fewer kv heads than heads, an
# untied head), packed, two micro-batches a step. The two differ by rounding alone: they add in different orders.
cd "$(dirname "$0")/.." || exit 1
root=$PWD dir=$(mktemp -d) failed=0
trap 'rm -rf "$dir"' EXIT
for model in gpt2 llama; do
    mkdir "$dir/$model" && cp data/tiny/tokenizer.json data/tiny/tokenizer_config.json "$dir/$model"
done
cat >"$dir/gpt2/config.json" <<'END'
{"model_type": "gpt2", "vocab_size": 1536, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64,
 "activation_function": "gelu_new", "initializer_range": 0.05, "eos_token_id": 0}
END
cat >"$dir/llama/config.json" <<'END'
{"model_type": "llama", "vocab_size": 1536, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu",
 "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
 "initializer_range": 0.05, "eos_token_id": 0}
END
cat >"$dir/run.json" <<'END'
{"train_file": "data/instructions.jsonl", "max_samples": 100, "template": "chatml", "init": "scratch",
 "max_length": 64, "packing": true, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
 "max_steps": 20, "learning_rate": 1e-3, "save_strategy": "no"}
END
report() { # report NAME: what $dir/fault holds are the faults
    if [ -s "$dir/fault" ]; then tail -n 20 "$dir/fault"; echo "not ok - $1"; failed=1; else echo "ok - $1"; fi
}
run() { # run PROGRAM MODEL OUT [OPTION ...]: a run into $dir/OUT
    program=$1 model=$2 out=$3 && shift 3
    "$root/$program" "$dir/run.json" --model_name_or_path "$dir/$model" --output_dir "$dir/$out" "$@" >"$dir/log" 2>&1 ||
        cat "$dir/log" >>"$dir/fault"
}
field() { # field OUT NAME: its value at every step, null where it is not a number, "-" where it is not there
    awk -v name="\"$2\":" '/^{"step":/ && /"loss":/ {
        at = index($0, name); x = at ? substr($0, at + length(name)) : "-"; sub(/[,}].*/, "", x); print x }' "$dir/$1/log.jsonl"
}
agree() { # agree A B STEPS TOLERANCE: losses of the same steps, relative
    field "$1" loss >"$dir/a" && field "$2" loss >"$dir/b"
    paste "$dir/a" "$dir/b" | awk -v steps="$3" -v tolerance="$4" '
        { far = $1 / $2 - 1; far = far < 0 ? -far : far
          if (!($1 > 0 && $2 > 0) || far > tolerance) print "step " NR ": loss " $1 " and " $2 }
        END { if (NR != steps) print NR " steps, expected " steps }' >>"$dir/fault"
}

# fp32: sums of some thousand products in another order, 20 steps of AdamW, which turns an error of a small gradient into
# one of its step: measured 3e-7. 16-bit types: activations and logits are rounded, by half a unit of 2^-8 (bf16) or
# 2^-11 (fp16) of their size, and may go the other way; a loss is a difference of logits.
for model in gpt2 llama; do
    for type in fp32 bf16 fp16; do
        : >"$dir/fault"
        case $type in
        fp32) tolerance=1e-5 options= ;;
        bf16) tolerance=2e-3 options="--bf16" ;;
        fp16) tolerance=2.5e-4 options="--fp16" ;;
        esac
        run train_gpt2 $model cpu-$model-$type $options
        run train_gpt2cu_emu $model cuda-$model-$type $options
        agree cpu-$model-$type cuda-$model-$type 20 $tolerance
        report "$model, $type: losses of 20 steps"
    done
done

: >"$dir/fault"
awk '/"event":"summary"/ { match($0, /"plan_bytes":[0-9]+/); a = substr($0, RSTART + 13, RLENGTH - 13)
    match($0, /"peak_bytes":[0-9]+/); b = substr($0, RSTART + 13, RLENGTH - 13)
    if (a != b) print FILENAME ": " a " bytes planned, " b " used" }' "$dir"/cuda-*/log.jsonl >"$dir/fault"
report "what was planned is what was used"

# A scale of 2^20 makes gradients that fp16 cannot hold, again and again as it grows back: both must skip the same steps,
# and a skipped step must leave no trace.
: >"$dir/fault"
scaler='{"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 5}'
run train_gpt2 llama cpu-skip --fp16 "$scaler"
run train_gpt2cu_emu llama cuda-skip --fp16 "$scaler"
agree cpu-skip cuda-skip 20 2.5e-4
for out in cpu-skip cuda-skip; do field $out skipped >"$dir/$out.skipped"; done
diff "$dir/cpu-skip.skipped" "$dir/cuda-skip.skipped" >>"$dir/fault"
skipped=$(grep -c true "$dir/cpu-skip.skipped")
[ "$skipped" -gt 1 ] && [ "$skipped" -lt 15 ] || echo "$skipped steps were skipped" >>"$dir/fault"
report "fp16: the same $skipped steps overflow and are skipped"

# Ten steps here and ten there are the twenty steps of one of them.
for first in train_gpt2 train_gpt2cu_emu; do
    : >"$dir/fault"
    second=train_gpt2cu_emu && [ $first = $second ] && second=train_gpt2
    run $first llama moved-$first --save_strategy steps --save_steps 10 --bf16 --max_steps 10 --lr_scheduler_type constant
    run $second llama moved-$first --save_strategy steps --save_steps 10 --bf16 --lr_scheduler_type constant \
        --resume_from_checkpoint latest
    [ $first = train_gpt2 ] && run train_gpt2 llama stayed --bf16 --lr_scheduler_type constant
    agree stayed moved-$first 20 2e-3
    report "a checkpoint of $first goes on in $second"
done

# The same bits whenever threads and streams run, and no host code that reads the GPU's memory.
: >"$dir/fault"
options="--bf16 --max_steps 4 --gradient_checkpointing"
run train_gpt2cu_emu llama order $options
weights=$(cksum <"$dir/order/model.safetensors")
for setting in EMU_PROTECT=1 EMU_ORDER=reverse "EMU_ORDER=random:1 EMU_STREAM=lazy" "EMU_ORDER=random:2 EMU_ASYNC=early EMU_CHIP=sm_80"; do
    (export $setting && run train_gpt2cu_emu llama order $options --overwrite_output_dir)
    [ "$weights" = "$(cksum <"$dir/order/model.safetensors")" ] || echo "$setting: other bits" >>"$dir/fault"
done
report "the same bits twice, in other orders of threads, and with lazy streams"

# What the model says, and what it thinks of each token of a row.
: >"$dir/fault"
for program in train_gpt2 train_gpt2cu_emu; do
    "$root/$program" generate "$dir/cpu-llama-fp32" "What is the opposite of full?" --max_new_tokens 12 --json >"$dir/$program.said" 2>"$dir/log" ||
        cat "$dir/log" >>"$dir/fault"
    "$root/$program" eval "$dir/cpu-llama-fp32" --validation_file data/heldout.jsonl --max_samples 4 --max_length 64 \
        --per_token --json 2>"$dir/log" | tr ',[]{}:' '\n' | grep '^-*[0-9.e-]*$' >"$dir/$program.tokens" || cat "$dir/log" >>"$dir/fault"
done
cmp "$dir/train_gpt2.said" "$dir/train_gpt2cu_emu.said" >>"$dir/fault"
grep -q '"output_ids":\[[0-9]' "$dir/train_gpt2.said" || echo "no answer" >>"$dir/fault"
paste "$dir/train_gpt2.tokens" "$dir/train_gpt2cu_emu.tokens" | awk '
    { far = $1 - $2; if (far > 1e-4 || far < -1e-4) print "number " NR ": " $1 " and " $2 }
    END { if (NR < 100) print "only " NR " numbers" }' >>"$dir/fault" # log-probabilities to -9: 10 units of fp32 each layer
report "the same answer, the same log-probabilities"

# A plan that does not fit is refused with what would, and that fits.
: >"$dir/fault"
export EMU_MEMORY=4400000
"$root/train_gpt2cu_emu" "$dir/run.json" --model_name_or_path "$dir/llama" --output_dir "$dir/full" >"$dir/log" 2>&1
status=$?
[ $status -eq 1 ] || echo "status $status" >>"$dir/fault"
tokens=$(sed -n 's/^error: the memory plan has .* micro-batches of at most \([0-9]*\) tokens.*/\1/p' "$dir/log")
if [ -z "$tokens" ]; then cat "$dir/log" >>"$dir/fault"
else run train_gpt2cu_emu llama full --max_length "$tokens" --max_steps 1 $(grep -o 'gradient_checkpointing true' "$dir/log" | sed 's/^/--/'); fi
report "a plan that does not fit: $tokens tokens would, and do"
exit $failed

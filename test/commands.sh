#!/bin/sh
# ./train_gpt2's commands that read what people type or pipe into them, in TAP: bytes of any kind, prompts line by line, a
# conversation. What they answer is the model's affair; here the model is the small one of data/.
cd "$(dirname "$0")/.." || exit 1
dir=$(mktemp -d) model=data/tiny failed=0
trap 'rm -rf "$dir"' EXIT
program() { OMP_WAIT_POLICY=passive ./train_gpt2 "$@" 2>"$dir/err"; }
is() { # is NAME EXPECTED GOT
    if [ "$2" = "$3" ]; then echo "ok - $1"; else printf 'expected %s\ngot %s\n' "$2" "$3"; echo "not ok - $1"; failed=1; fi
}
refused() { # refused NAME WORDS ARGUMENT ...: status 1, nothing on standard output, and WORDS in the one line that says why
    name=$1 words=$2 && shift 2
    program "$@" >"$dir/out"
    is "$name" "1 0 1 1" "$? $(wc -c <"$dir/out") $(grep -c '^error: ' "$dir/err") $(grep -c "$words" "$dir/err")"
}

printf 'one \377 two\0three\nfour' >"$dir/bytes"
ids=$(program tokenize $model "$dir/bytes")
is "tokenize reads any bytes, to the end" "one � two three four" "$(echo "$ids" | program tokenize $model --decode | tr '\0\n' '  ' | sed 's/ $//')"
is "tokenize reads standard input the same" "$ids" "$(program tokenize $model <"$dir/bytes")"
is "tokenize reads a pipe, too" "$ids" "$(mkfifo "$dir/pipe" && { cat "$dir/bytes" >"$dir/pipe" & program tokenize $model "$dir/pipe"; })"
refused "tokenize refuses a folder" "cannot read data" tokenize $model data
printf 'b\n"a"\n' >"$dir/lines"
refused "tokenize names the line that is no JSON" "lines, line 1: expected a JSON string" tokenize $model "$dir/lines" --jsonl

options="--template chatml --max_new_tokens 4"
printf '"Hi"\n\n  \r\n[{"role": "user", "content": "Hi"}]\r\n{"prompt": "Hi"}' >"$dir/prompts"
answer=$(program generate $model Hi $options)
json=$(program generate $model Hi $options --json)
is "generate answers every prompt of a file" "$json $json $json" "$(echo $(program generate $model --file "$dir/prompts" $options))"
printf '{"prompt": 5}' >"$dir/prompts"
refused "generate names the prompt at fault" "prompts, line 1: a prompt is a string" generate $model --file "$dir/prompts" $options
is "chat forgets at clear and ends at exit" "$answer $answer" "$(printf 'Hi\n\nclear\nHi\r\nexit\nHi\n' | echo $(program chat $model $options))"
is "a command of the wrong kind ends with status 1" 1 "$(program eval $model >"$dir/out"; echo $?)"

# A learning rate that ruins the model: its perplexity is beyond any number, and JSON has no word for that but null.
program train data/quickstart.json --max_steps 3 --learning_rate 10 --max_grad_norm 0 --warmup_steps 0 --eval_strategy no \
    --evaluation_inputs null --output_dir "$dir/ruined" --json >"$dir/out"
is "train's result is the log's last line" "$(tail -n 1 "$dir/ruined/log.jsonl" | cut -d, -f1-2)" "$(cut -d, -f1-2 "$dir/out")"
is "export says where" "{\"folder\":\"$dir/exported\"}" "$(program export "$dir/ruined" "$dir/exported" --json)"
json=$(program eval "$dir/ruined" --validation_file data/heldout.jsonl --json)
is "eval of a ruined model is JSON all the same" '"perplexity":null}' "${json##*,}"
exit $failed

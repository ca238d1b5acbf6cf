#!/bin/sh
# Makes data/tiny/model.safetensors anew: the corpus, the training from random weights, the export. About six minutes on
# two cores. data/tiny's tokenizer stays as it is; data/make_tokenizer.py made it from the same corpus.
set -e
cd "$(dirname "$0")/.."
mkdir -p out/corpus
${CC:-cc} -O2 data/generate.c -o out/corpus/generate
out/corpus/generate out/corpus ${LINES_OF_TEXT:-180000}
./train_gpt2 train data/pretrain.json "$@"
cp out/pretrain/model.safetensors data/tiny/

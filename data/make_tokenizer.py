"""Trains data/tiny/tokenizer.json: byte-level BPE on the corpus and the instructions that generate.c wrote.

    python make_tokenizer.py FOLDER-OF-THE-CORPUS data/tiny        (tokenizers 0.23.3)

Text is split before BPE as the regex says: a Chinese character by itself, a word with the space before it, a digit by
itself, the rest in runs. Chinese words are then always the same tokens, whatever stands around them.
"""
import json, sys
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

corpus, out = sys.argv[1:]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = r"\p{Han}|(?:(?!\p{Han})[\p{L}\p{M}])+|\p{N}|\s|[^\s\p{L}\p{M}\p{N}]"
CHAT = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=1536, min_frequency=8, special_tokens=SPECIAL,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
tokenizer.train([f"{corpus}/corpus.txt", f"{corpus}/instructions.jsonl"], trainer)
tokenizer.save(f"{out}/tokenizer.json", pretty=False)
with open(f"{out}/tokenizer_config.json", "w") as f:
    json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
               "model_max_length": 256, "clean_up_tokenization_spaces": False, "chat_template": CHAT}, f, indent=2)
print(f"{out}/tokenizer.json: {tokenizer.get_vocab_size()} tokens")

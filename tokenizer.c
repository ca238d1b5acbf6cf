// tokenizer.c - Hugging Face tokenizers and chat templates: text in, token ids out, and back. See "The tokenizer" in sft.h.
#include "sft.h"

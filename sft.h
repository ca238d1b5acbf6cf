/* sft.h - supervised fine-tuning of language models, in C and CUDA                                      MIT licence

   A base model predicts the next token of any text. Fine-tuning teaches it to answer: it is shown conversations and
   trained, by the same next-token loss, on the answers alone. This header does that for the models that people use
   (GPT-2, Llama, Mistral, Qwen, SmolLM2, InternLM2), from a Hugging Face folder and a file of instructions to a
   Hugging Face folder again. One training step is

       data -> forward -> loss -> backward -> (reduce over ranks) -> clip -> AdamW

   and the sections below stand in that order.

   HOW TO USE
       #include "sft.h"                               declarations, as C11 or C++17
       #define SFT_IMPLEMENTATION                     in exactly one C file, before the include: the bodies too
   train.c is the program; tokenizer.c turns text into token ids; kernels.cu holds the same operations for a GPU.

   TABLE OF CONTENTS      (search for "[5]" to find a section's declarations, then its body)
       [0] tour        this page, glossary, build options
       [1] ground      errors, memory arenas, number types, random numbers, clock, files
       [2] config      run.json, DeepSpeed JSON and command line -> one checked struct
       [3] data        rows -> messages -> token ids with a mask -> packs -> batches; the data report
       [4] model       families, the tensor table, units, the memory plan, safetensors in and out
       [5] ops         every operation, forward above backward, and the table that lists them
       [6] forward     the block and the model; backward beside it; activation checkpointing
       [7] ranks       which part of the work is this process's
       [8] step        loss scaler, gradient norm, clipping, learning-rate schedules, AdamW over units
       [9] state       checkpoints, resume, export
       [10] speak      generation with a KV cache
       [11] record     progress line, JSON log, summary

   GLOSSARY OF DIMENSIONS
       N   tokens in a micro-batch: a row of tokens, documents side by side, no padding
       V   vocabulary       C   hidden size       L   layers (blocks)       P   positions (learned embeddings)
       H   query heads      K   key/value heads   D   size of a head        F   hidden size of the MLP
       T   longest document that is trained (max_length)

   BUILD OPTIONS
       SFT_IMPLEMENTATION   compile the bodies
       SFT_NO_OPENMP        one thread
*/
#ifndef SFT_H
#define SFT_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define SFT_HD static __host__ __device__ inline // scalar formulae that the CPU and the GPU share
#else
#define SFT_HD static inline
#endif
#ifdef __GNUC__
#define SFT_PRINTF(f, a) __attribute__((format(printf, f, a)))
#define SFT_NORETURN __attribute__((noreturn))
#else
#define SFT_PRINTF(f, a)
#define SFT_NORETURN
#endif

struct json_t; // jansson's value; only the bodies include jansson.h

/* ================================================================================================================
   [1] ground: errors, arenas, types, random numbers, clock, files
   ================================================================================================================
   Errors end the program with one line that says what is wrong, where, what was expected and got, and what to do.
   Nothing here returns an error code that a caller could forget to look at. */

enum { SFT_BAD_INPUT = 1, SFT_BROKEN = 2 }; // exit status: the input is wrong | something broke in the run

// Prints "error: ..." on standard error and ends all ranks with `status`. `sft_die_hook`, if set, gets the line first
// and may leave by longjmp (tests and fuzzers do).
SFT_NORETURN void sft_die(int status, const char *format, ...) SFT_PRINTF(2, 3);
extern void (*sft_die_hook)(int status, const char *line);

// Prints "note: ..." on standard error, on the first rank, once per distinct text.
void sft_note(const char *format, ...) SFT_PRINTF(1, 2);

void *sft_alloc(size_t bytes);                                       // zeroed; dies with SFT_BROKEN when there is none
void *sft_realloc(void *old, size_t bytes);                          // as realloc; dies with SFT_BROKEN
char *sft_format(const char *format, ...) SFT_PRINTF(1, 2);          // printf into a new string; the caller frees it
#define SFT_NEW(T, n) ((T *)sft_alloc((size_t)(n) * sizeof(T)))      // n zeroed objects of type T
void *sft_room(void *list, int64_t n, size_t size);                  // the list of n elements, with room for one more
#define SFT_PUSH(list, n, ...) ((list) = sft_room(list, n, sizeof *(list)), (list)[(n)++] = (__VA_ARGS__)) // appends
#define SFT_COUNT(array) ((int)(sizeof(array) / sizeof(*(array))))
#define SFT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define SFT_MAX(a, b) ((a) > (b) ? (a) : (b))

/* An arena is one allocation from which pieces are taken in order and given back all at once or down to a mark. With
   base == NULL it only counts: the memory plan is made by running the very code that will later take the memory. */
typedef struct {
    const char *name;        // as the plan prints it: "weights", "gradients", ...
    char *base;              // NULL while planning
    size_t size, used, peak; // bytes
} SftArena;
#define SFT_ALIGN 64 // every piece begins on a cache line
void sft_arena_open(SftArena *arena, const char *name, size_t bytes); // zeroed; in huge pages where there are any
void sft_arena_close(SftArena *arena);
void *sft_take(SftArena *arena, size_t bytes);           // a piece (NULL while planning); dies when the arena is full
void sft_give_back(SftArena *arena, size_t mark);        // everything taken since `mark = arena->used`

typedef enum { SFT_F32, SFT_BF16, SFT_F16, SFT_TYPES } SftType;
size_t sft_type_size(SftType type);      // bytes of one element
const char *sft_type_name(SftType type); // "fp32", "bf16", "fp16"
void sft_to_f32(float *out, const void *in, SftType type, int64_t n);   // out = in, widened (exact); any alignment
void sft_from_f32(void *out, SftType type, const float *in, int64_t n); // out = in, rounded to nearest even

/* One number at a time, for any input: subnormals, infinities, NaN (which stays NaN). bf16 is the upper half of a
   float: 8 bits of exponent, 7 of mantissa. fp16 has 5 and 10: from 65520 on it is infinite, below 2^-14 subnormal. */
SFT_HD uint32_t sft_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
SFT_HD float sft_bits_f32(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
SFT_HD float sft_bf16_to_f32(uint16_t h) { return sft_bits_f32((uint32_t)h << 16); }
SFT_HD uint16_t sft_f32_to_bf16(float x) {
    uint32_t u = sft_f32_bits(x), nan = u >> 16 | 0x40;
    uint32_t rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16; // half way: to the even one; a carry moves up the exponent
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}
SFT_HD float sft_f16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)(h & 0x7fff) << 13, exponent = u & 0x0f800000;
    float small = sft_bits_f32(u + (113u << 23)) - sft_bits_f32(113u << 23); // subnormal: (2^-14 + x) - 2^-14 is exact
    u += exponent == 0x0f800000 ? 224u << 23 : 112u << 23;                   // infinity, NaN | bias 127 instead of 15
    return sft_bits_f32((exponent ? u : sft_f32_bits(small)) | (uint32_t)(h & 0x8000) << 16);
}
SFT_HD uint16_t sft_f32_to_f16(float x) {
    uint32_t u = sft_f32_bits(x) & 0x7fffffff, sign = sft_f32_bits(x) >> 16 & 0x8000;
    uint32_t rounded = (u - (112u << 23) + 0xfff + (u >> 13 & 1)) >> 13;
    uint32_t small = sft_f32_bits(sft_bits_f32(u) + 0.5f) - sft_f32_bits(0.5f); // 0.5 + x keeps multiples of 2^-24
    rounded = u < 113u << 23 ? small : rounded;
    rounded = u >= 143u << 23 ? 0x7c00 : rounded; // 2^16 and more
    rounded = u > 255u << 23 ? 0x7e00 : rounded;
    return (uint16_t)(rounded | sign);
}

/* A tensor is a pointer with its type and shape; rows are contiguous and nothing is padded. Passed by value. An absent
   tensor (no bias, no residual) has data == NULL and dim[0] == 0. While planning, data is NULL and dim[0] is not. */
typedef struct {
    void *data;
    SftType type;
    int64_t dim[3]; // unused ones are 1, so that the number of elements is always their product
} SftTensor;
#define SFT_NONE ((SftTensor){0}) // the absent tensor
static inline int64_t sft_size(SftTensor t) { return t.dim[0] * t.dim[1] * t.dim[2]; }
SftTensor sft_tensor(void *data, SftType type, int64_t d0, int64_t d1, int64_t d2);
SftTensor sft_take_tensor(SftArena *arena, SftType type, int64_t d0, int64_t d1, int64_t d2);
SftTensor sft_rows(SftTensor t, int64_t first, int64_t n); // rows first .. first+n of t's leading dimension

// 64 random bits that depend on nothing but these four numbers (seed of the run, step, what they are for, which one).
// Any thread may ask for any of them in any order.
SFT_HD uint64_t sft_random(uint64_t seed, uint64_t step, uint64_t site, uint64_t index) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u * (step + 1); // SplitMix64 (Steele, Lea, Flood 2014), once per number
    const uint64_t more[3] = {site, index, 0};
    for (int i = 0; i < 3; i++) {
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x = (x ^ (x >> 31)) + 0x9e3779b97f4a7c15u * (more[i] + 1);
    }
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
SFT_HD float sft_uniform(uint64_t bits) { return (float)(bits >> 40) * (1.0f / 16777216.0f); } // [0, 1)
enum { SFT_SITE_INIT, SFT_SITE_SHUFFLE, SFT_SITE_SPLIT, SFT_SITE_SAMPLE, SFT_SITE_MIX };      // what numbers are for

double sft_now(void); // seconds of a clock that never goes back

// Files. Every function dies with the path and the system's reason; sft_map's bytes are read-only and end in the file.
bool sft_exists(const char *path);
bool sft_is_folder(const char *path);
void sft_make_folder(const char *path);                       // and its parents; fine if there already
char *sft_read_file(const char *path, size_t *bytes);         // all of it and a final '\0'; the caller frees it
void sft_write_file(const char *path, const void *data, size_t bytes); // to a temporary name, fsync, rename
const char *sft_map(const char *path, size_t *bytes);         // memory-mapped; an empty file gives "" and 0
void sft_unmap(const char *data, size_t bytes);
struct json_t *sft_json_file(const char *path); // object or list, no key twice; errors with line and column
struct json_t *sft_json_big(const char *path); // the same; all numbers as reals where one is beyond 64 bits
const char *sft_path(char out[4096], const char *folder, const char *name); // folder/name, in `out`

/* ================================================================================================================
   [2] config: run.json, DeepSpeed JSON and command line -> one checked struct
   ================================================================================================================
   One table lists every option: it makes the struct's fields, the JSON and command-line parser, --help, the
   README's table and the manifest of a run (a final _ is not part of the name: C++ owns that word). Names and
   meanings are those of transformers' TrainingArguments, trl's SFTConfig and DeepSpeed. A column: kind, name,
   default, lowest, highest, allowed words (JSON: allowed types), help. */
// clang-format off
#define SFT_OPTIONS(X) \
SFT_SECTION(X, "Model") \
X(STR,  model_name_or_path,   NULL,          0, 0, NULL, "Hugging Face folder: config.json, *.safetensors, tokenizer files") \
X(STR,  init,                 "pretrained",  0, 0, "pretrained|scratch", "scratch: random weights for this config.json") \
X(BOOL, resize_vocab,         false,         0, 0, NULL, "grow the embedding to the tokenizer's size, new rows = mean of the old") \
SFT_SECTION(X, "Data") \
X(JSON, train_file,           NULL,          0, 0, "string|list|object", "a path, or a list of paths or {\"path\", \"weight\"}") \
X(JSON, validation_file,      NULL,          0, 0, "string|list|object", "as train_file") \
X(REAL, validation_split,     0,             0, 1e9, NULL, "share (below 1) or number of rows of train_file that are kept for validation") \
X(JSON, template_,            NULL,          0, 0, "string|object", "chat template: a name, or {\"system\", \"user\", \"assistant\", \"stop\"}; unset: the model's own") \
X(JSON, columns,              NULL,          0, 0, "object", "what the columns mean, e.g. {\"query\": \"user\", \"response\": \"assistant\"}") \
X(STR,  dataset_format,       "auto",        0, 0, "auto|alpaca|messages|conversation|sharegpt|prompt_completion|text", "auto: recognised by the row's keys") \
X(INT,  max_length,           1024,          2, 1<<30, NULL, "longest document in tokens (max_seq_length is accepted)") \
X(STR,  truncation_mode,      "keep_start",  0, 0, "keep_start|drop|error", "what happens to longer conversations") \
X(BOOL, packing,              false,         0, 0, NULL, "fill rows of max_length tokens with several documents") \
X(STR,  packing_strategy,     "bfd",         0, 0, "bfd|wrapped", "best-fit decreasing, or concatenate and cut") \
X(BOOL, use_varlen_attn,      true,          0, 0, NULL, "false: documents of a pack see the ones before them, as in XTuner") \
X(BOOL, train_on_prompt,      false,         0, 0, NULL, "train system and user text too") \
X(BOOL, mask_history,         false,         0, 0, NULL, "train the last answer of a conversation only") \
X(STR,  on_bad_row,           "error",       0, 0, "error|skip", "skip: count malformed rows and go on") \
X(INT,  max_samples,          0,             0, 1LL<<40, NULL, "use the first rows only; 0: all") \
X(BOOL, shuffle,              true,          0, 0, NULL, "a new order every epoch, from the seed") \
SFT_SECTION(X, "Training") \
X(INT,  per_device_train_batch_size, 8,      1, 1<<20, NULL, "rows per micro-batch and rank") \
X(INT,  per_device_eval_batch_size,  0,      0, 1<<20, NULL, "rows per evaluation batch; 0: as in training") \
X(INT,  gradient_accumulation_steps, 1,      1, 1<<20, NULL, "micro-batches per optimizer step") \
X(REAL, num_train_epochs,     3,             0, 1e6, NULL, "passes over the data") \
X(INT,  max_steps,            -1,           -1, 1LL<<40, NULL, "optimizer steps; overrides num_train_epochs when positive") \
X(REAL, learning_rate,        2e-5,          0, 10, NULL, "peak learning rate") \
X(STR,  lr_scheduler_type,    "linear",      0, 0, "linear|cosine|cosine_with_restarts|cosine_with_min_lr|polynomial|constant|constant_with_warmup|inverse_sqrt|cosine_warmup_with_min_lr|warmup_stable_decay|WarmupLR|WarmupDecayLR|WarmupCosineLR|OneCycle|LRRangeTest", "learning-rate schedule of Hugging Face or (capital letters) of DeepSpeed") \
X(JSON, lr_scheduler_kwargs,  NULL,          0, 0, "object", "the schedule's own parameters, e.g. {\"num_cycles\": 2}") \
X(INT,  warmup_steps,         0,             0, 1LL<<40, NULL, "steps of rising learning rate") \
X(REAL, warmup_ratio,         0,             0, 1, NULL, "the same as a share of all steps; warmup_steps wins") \
X(REAL, weight_decay,         0,             0, 10, NULL, "decoupled; norms and biases are left out") \
X(REAL, adam_beta1,           0.9,           0, 0.9999999, NULL, "share of the old mean of gradients that is kept") \
X(REAL, adam_beta2,           0.999,         0, 0.9999999, NULL, "share of the old mean of squared gradients that is kept") \
X(REAL, adam_epsilon,         1e-8,          0, 1, NULL, "added to the root of the mean square") \
X(REAL, max_grad_norm,        1,             0, 1e9, NULL, "clip the global gradient norm; 0: off") \
X(JSON, fp16,                 NULL,          0, 0, "boolean|object", "true, or {\"initial_scale_power\", \"loss_scale\", \"loss_scale_window\", \"hysteresis\", \"min_loss_scale\", \"consecutive_hysteresis\"}") \
X(BOOL, bf16,                 false,         0, 0, NULL, "bfloat16 storage, fp32 sums and master weights") \
X(BOOL, gradient_checkpointing, false,       0, 0, NULL, "keep one tensor per block, recompute the rest") \
X(INT,  max_nonfinite_steps,  16,            1, 1<<20, NULL, "skipped steps in a row before the run stops") \
X(INT,  seed,                 42,            0, 1LL<<53, NULL, "of the data order, scratch weights and sampling") \
X(INT,  threads,              0,             0, 4096, NULL, "OpenMP threads; 0: all processors") \
X(JSON, deepspeed,            NULL,          0, 0, "string|object", "a DeepSpeed configuration: its path or the object itself") \
SFT_SECTION(X, "Output") \
X(STR,  output_dir,           NULL,          0, 0, NULL, "where checkpoints, the log and the trained model go") \
X(BOOL, overwrite_output_dir, false,         0, 0, NULL, "start afresh where checkpoints stand already") \
X(JSON, resume_from_checkpoint, NULL,        0, 0, "boolean|string", "true (the latest in output_dir) or a path: continue, bit for bit") \
X(STR,  init_from,            NULL,          0, 0, NULL, "take the weights of a checkpoint, start at step 0") \
X(STR,  export_dtype,         "auto",        0, 0, "auto|float32|bfloat16|float16", "type of the exported weights; auto: as the source") \
X(REAL, max_shard_size,       5e9,           1e3, 1e15, NULL, "bytes of one exported safetensors file") \
X(INT,  logging_steps,        1,             1, 1LL<<40, NULL, "steps between printed lines; log.jsonl has every step") \
X(INT,  save_steps,           500,           0, 1LL<<40, NULL, "steps between checkpoints; 0: none but the last") \
X(STR,  save_strategy,        "steps",       0, 0, "steps|epoch|no", "a checkpoint every save_steps, after every epoch, or none") \
X(INT,  save_total_limit,     0,             0, 1<<20, NULL, "keep this many checkpoints, the newest; 0: all") \
X(INT,  eval_steps,           0,             0, 1LL<<40, NULL, "steps between evaluations; 0: at the end only") \
X(STR,  eval_strategy,        "steps",       0, 0, "steps|epoch|no", "evaluate every eval_steps, after every epoch (both: at the end too), or never") \
X(BOOL, eval_on_start,        false,         0, 0, NULL, "evaluate before the first step too") \
X(BOOL, eval_exact_match,     false,         0, 0, NULL, "an evaluation also answers every validation sample and counts the answers that are right word for word") \
X(JSON, evaluation_inputs,    NULL,          0, 0, "string|list", "prompts that are answered before, during and after training") \
X(INT,  evaluation_freq,      0,             0, 1LL<<40, NULL, "steps between those answers; 0: before and after only") \
SFT_SECTION(X, "Generation") \
X(INT,  max_new_tokens,       256,           1, 1<<30, NULL, "longest answer in tokens") \
X(REAL, temperature,          0,             0, 100, NULL, "0: greedy") \
X(INT,  top_k,                0,             0, 1<<30, NULL, "sample among the k likeliest tokens; 0: off") \
X(REAL, top_p,                1,             0, 1, NULL, "sample among the likeliest tokens of this total probability; 1: off") \
X(REAL, repetition_penalty,   1,             0.01, 100, NULL, "divides the logits of tokens that were there already; 1: off") \
X(BOOL, raw,                  false,         0, 0, NULL, "the prompt as it is, no chat template") \
X(STR,  system,               NULL,          0, 0, NULL, "system text of generate and chat") \
X(STR,  file,                 NULL,          0, 0, NULL, "generate: a prompt (a string or messages) per line of this file") \
SFT_SECTION(X, "Output of the commands") \
X(BOOL, json,                 false,         0, 0, NULL, "the result as one JSON object, alone on standard output") \
X(STR,  dump,                 NULL,          0, 0, NULL, "data: write every sample's input_ids and labels to this file") \
X(BOOL, jsonl,                false,         0, 0, NULL, "tokenize: a JSON string per line in, an array of ids per line out") \
X(BOOL, decode,               false,         0, 0, NULL, "tokenize: ids in, text out") \
X(BOOL, add_special_tokens,   false,         0, 0, NULL, "tokenize: as the tokenizer's post-processor says") \
X(BOOL, per_row,              false,         0, 0, NULL, "eval: the loss of every row") \
X(BOOL, per_token,            false,         0, 0, NULL, "eval: the log-probability of every token")
// clang-format on

#define SFT__C_STR char *
#define SFT__C_INT int64_t
#define SFT__C_REAL double
#define SFT__C_BOOL bool
#define SFT__C_JSON struct json_t *
#define SFT_SECTION(X, title)
typedef struct {
#define X(kind, name, standard, low, high, words, help) SFT__C_##kind name;
    SFT_OPTIONS(X)
#undef X
    const char *command; // "train", "data", ...
    char **args;         // what is neither an option nor the run file: a model folder, a prompt
    int nargs;
    char *file_name; // the run file, NULL without one
    bool quickstart; // it is the embedded default
    SftType type;    // of the computation: fp32, or what fp16 and bf16 ask for
} SftConfig;

/* Reads [COMMAND] [run.json] [--key value | --key=value | --flag] ...: defaults, then the file, then the
   command line; checks every value. Without a command: train. Without a run file and without a model:
   data/quickstart.json of the current folder, or beside the program. Paths are relative to the current
   folder. eval, generate, chat and tokenize take a model folder as their first argument: it is args[0] and
   model_name_or_path. fp16 is NULL unless it is on: true or an object; evaluation_inputs is NULL or a list.
   DeepSpeed's values stand in the options they mean; an "auto" of its schedule's parameters is left for the
   schedule. Dies with the option's name, what was expected and what was got; an unknown key with the nearest
   known one. */
SftConfig sft_config(int argc, char **argv);
void sft_config_free(SftConfig *config);
struct json_t *sft_config_json(const SftConfig *config); // every option with its value: a run file itself
void sft_help(FILE *out);                                // the command line and the table of options
void sft_help_markdown(FILE *out);                       // the table of options, as the README has it

/* ================================================================================================================
   The tokenizer (tokenizer.c)
   ================================================================================================================ */
typedef struct SftTokenizer SftTokenizer;
typedef struct { int32_t *ids; int64_t n, cap; } SftIds; // a growing list of ids; zero it to begin, free(ids) to end
static inline void sft_ids_room(SftIds *list, int64_t more) { // makes room for so many more
    if (list->n + more <= list->cap) return;
    list->cap = 2 * (list->n + more) + 64;
    list->ids = (int32_t *)sft_realloc(list->ids, (size_t)list->cap * sizeof *list->ids);
}
static inline void sft_ids_add(SftIds *list, int32_t id) { // appends
    sft_ids_room(list, 1);
    list->ids[list->n++] = id;
}

/* Loads tokenizer.json, or vocab.json + merges.txt (encoder.json + vocab.bpe), or a SentencePiece BPE tokenizer.model,
   with tokenizer_config.json beside it. Dies with the component's name when one is not supported. Read-only afterwards:
   any number of threads may encode with it. */
SftTokenizer *sft_tokenizer_load(const char *folder);
void sft_tokenizer_free(SftTokenizer *t);
// Appends the ids of text[0..n): any bytes, no '\0' needed. Special tokens written in the text are recognised.
// add_special: what the post-processor adds (BOS, EOS) is added too.
void sft_encode(const SftTokenizer *t, SftIds *out, const char *text, size_t n, bool add_special);
// The text of ids, ending in '\0', its length in *bytes (may be NULL); the caller frees it. skip_special leaves out
// special tokens. Invalid UTF-8 becomes U+FFFD, as the Hugging Face decoders do.
char *sft_decode(const SftTokenizer *t, const int32_t *ids, int64_t n, bool skip_special, size_t *bytes);
int64_t sft_vocab_size(const SftTokenizer *t);                      // highest id + 1, added tokens included
int32_t sft_token_id(const SftTokenizer *t, const char *token);     // id of that very token, -1 if there is none
const char *sft_token_text(const SftTokenizer *t, int32_t id);      // as the vocabulary spells it, NULL if there's none
int32_t sft_bos(const SftTokenizer *t);                             // -1 if none; tokenizer_config.json's bos_token
int32_t sft_eos(const SftTokenizer *t);
bool sft_adds_bos(const SftTokenizer *t);                           // the post-processor or add_bos_token says so
const char *sft_chat_template(const SftTokenizer *t);               // the Jinja text of the folder, NULL if none

/* A chat template turns messages into pieces that are tokenised separately, so that what is trained is exact. */
typedef struct SftTemplate SftTemplate;
typedef struct {
    const char *role;    // "system", "user", "assistant", "tool" (observation), "function_call"
    const char *content; // UTF-8, ends in '\0' at content[bytes]
    size_t bytes;
    double weight; // 0: not trained; otherwise trained (assistant and function_call messages only, unless asked)
} SftMessage;
// Appended tokens: ids and, for each, whether it is trained.
typedef struct { int32_t *ids; uint8_t *trained; int64_t n, cap; } SftTokens;

/* The template called `name`, or the plain user template of the JSON object, or (both NULL) the one that is recognised
   from the tokenizer's own chat_template, else "default". Dies when a stop token is not one token of the vocabulary. */
SftTemplate *sft_template(const SftTokenizer *t, const char *name, struct json_t *plain);
const char *sft_template_name(const SftTemplate *t);
void sft_template_free(SftTemplate *t);
int sft_template_stops(const SftTemplate *t, const int32_t **ids); // ids that end an answer; their number
const char *sft_template_jinja(const SftTemplate *t); // the same as a Jinja chat_template, for the exported folder
/* Appends a conversation, BOS first where the tokenizer wants it. generation: ends with what precedes an answer.
   Returns NULL, or what is wrong with the messages (roles out of order, unknown role, ...): a string to free. */
char *sft_render(const SftTemplate *t, SftTokens *out, const SftMessage *messages, int n, bool generation);

/* ================================================================================================================
   [3] data: rows -> messages -> token ids with a mask -> packs -> batches; the data report
   ================================================================================================================
   All samples lie one after another in one list of tokens; a sample is a range of it (several samples may be the same
   range: a file of weight 2). A pack is a list of samples that travel as one row; without packing every sample is its
   own pack. What is trained is a property of a token: the one before it learns to predict it. */
typedef struct { int64_t begin, n, trained; } SftSample; // range in the dataset's tokens; how many are trained targets
typedef struct {                                         // what became of the rows
    int64_t rows;                                        // rows of the files that were looked at
    int64_t bad, dropped_empty, dropped_no_answer, dropped_too_long; // malformed; no text; nothing trained; too long
    int64_t truncated, cut;                              // conversations cut short; documents of text cut into pieces
    int64_t tokens, trained_tokens;
} SftDataReport;
typedef struct {
    SftTokens tokens;
    SftSample *sample;   // [samples]
    int64_t samples;
    SftSample *document; // [documents] what packs hold: the samples themselves, or with "wrapped" pieces of them
    int64_t documents;
    int64_t *pack;       // [packs+1] first entry of each pack in `order`
    int64_t *order;      // [documents] the documents, pack by pack
    int64_t packs;
    int64_t longest;     // tokens of the longest pack
    SftDataReport report;
    bool documents_see_each_other;   // within a pack
    int64_t rows_per_step, max_steps; // of the run that the data is for, as its report says
    double epochs;
} SftDataset;

typedef struct { // a micro-batch: N tokens in one row, with what attention and the loss need to know of each
    int64_t n, documents, trained; // tokens, documents, tokens that have a target
    int32_t *ids;                  // [n]
    int32_t *target;               // [n] the id that follows in the document if it is trained, else -100
    int32_t *pos;                  // [n] position in the document, from 0
    int32_t *begin, *end;          // [n] the document's first token and one past its last, as indices of the row
    int64_t cap;                   // tokens there is room for
} SftBatch;

/* Reads `files`, the value of train_file or validation_file: a path, {"path", "weight"} or a list of them; a folder is
   its .json, .jsonl and .txt files. weight w: every row floor(w) times and, of the rest w - floor(w), that share of the
   rows, chosen by seed (0.5 takes half of them). What a file is (JSON array, JSON lines, text) its content says, what a
   row is its keys. Dies naming file, line and column of a malformed row (on_bad_row "skip": counts it), and when
   nothing trained is left. A prompt/completion pair is a conversation of two messages, rendered with the template. */
SftDataset sft_dataset(const SftConfig *config, const SftTokenizer *t, const SftTemplate *tpl, struct json_t *files);
// Moves a share (< 1) or a number (>= 1) of the samples, chosen by seed, to `validation`, which goes on using the
// tokens of `train`. Dies if none would be left.
void sft_dataset_split(SftDataset *train, SftDataset *validation, double share, uint64_t seed);
void sft_dataset_pack(SftDataset *d, const SftConfig *config); // fills pack and order; call once, after the split
void sft_dataset_free(SftDataset *d);
/* A prompt as token ids that end where its answer begins: a text, a list of messages as in the rows above, or an object
   with either as "prompt" or "messages"; config->system stands in front. With config->raw a text is taken as it is.
   Dies naming `where` and the message at fault. The caller frees the ids. */
SftIds sft_prompt(const SftConfig *config, const SftTokenizer *t, const SftTemplate *tpl, struct json_t *prompt,
                  const char *where);
// The report, then the first `samples` samples with their trained tokens marked: in colour on a terminal, else in ⟦ ⟧.
void sft_data_show(FILE *out, const SftDataset *d, const SftTokenizer *t, int samples);
void sft_data_dump(const char *path, const SftDataset *d); // a line {"input_ids", "labels"} per sample, packed or not
struct json_t *sft_data_json(const SftDataset *d); // the report

/* The order of an epoch is a permutation of the packs that depends on (seed, epoch) alone. Optimizer step s of an epoch
   takes the next rows_per_step of them (the last step of an epoch takes what is left); micro-batch g of rank r takes
   per_device of these. So the same tokens form step s at every world size. */
int64_t sft_steps_per_epoch(const SftDataset *d, int64_t rows_per_step);
int64_t sft_total_steps(const SftDataset *d); // of the run that the data is for
void sft_epoch_order(int64_t *out, const SftDataset *d, uint64_t seed, int64_t epoch, bool shuffle); // [packs]
int64_t sft_pack_targets(const SftDataset *d, int64_t pack);  // trained targets of a pack
// The most tokens, and the most targets, in a micro-batch of `rows` packs, in the first `steps` steps of a run,
// `per_step` packs each: where they are more than what stands there already.
void sft_largest_batch(int64_t *tokens, int64_t *targets, const SftDataset *d, int64_t rows, int64_t per_step,
                       int64_t steps, uint64_t seed, bool shuffle);
// Fills batch (growing it as needed) with `n` packs; n may be 0.
void sft_batch_fill(SftBatch *batch, const SftDataset *d, const int64_t *packs, int64_t n);
void sft_batch_room(SftBatch *batch, int64_t tokens); // makes room; what was in it is kept
void sft_batch_free(SftBatch *batch);

/* ================================================================================================================
   [4] model: families, the tensor table, units, the memory plan, safetensors in and out
   ================================================================================================================ */
typedef enum {
    SFT_ROPE_NONE, SFT_ROPE_PLAIN, SFT_ROPE_LINEAR, SFT_ROPE_DYNAMIC, SFT_ROPE_LLAMA3, SFT_ROPE_YARN
} SftRopeType;
typedef enum { SFT_LINEAR, SFT_GELU, SFT_GELU_TANH } SftAct; // what a matmul's epilogue applies
typedef struct {
    char family[32];                   // model_type of config.json
    int64_t V, C, L, P, H, K, D, F;    // see the glossary; V: rows of the embedding; P: positions it was made for
    int64_t V_source;                  // rows of the embedding in the folder: less than V after sft_resize_vocab
    bool layernorm;                    // else RMSNorm
    bool learned_positions;            // else RoPE
    bool q_bias, o_bias, mlp_bias;     // q_bias: of q, k and v
    bool qk_norm;                      // RMSNorm of each head's q and k (Qwen3)
    bool gated;                        // SwiGLU: down(silu(gate x) * up x); else down(act(up x))
    bool tied;                         // the head is the embedding
    SftAct act;                        // of an ungated MLP
    float norm_eps;
    float attn_scale;                  // 1/sqrt(D) but for GPT-2's variants
    bool scale_by_layer;               // GPT-2: attn_scale / (layer + 1)
    int64_t window, window_from;       // a token sees `window` tokens, its own too (0: all), in layers >= window_from
    SftRopeType rope;
    double rope_theta, rope_factor;    // base of the frequencies; by how much longer texts may be (1: plain)
    double rope_original;              // original_max_position_embeddings (Llama 3, YaRN), P (Dynamic)
    double rope_low, rope_high;        // Llama 3: low_freq_factor, high_freq_factor
    double rope_attention;             // what cosines and sines are multiplied with: 1 but for YaRN
    double rope_beta_fast, rope_beta_slow; // YaRN's ramp, its ends rounded to whole dimensions if rope_truncate
    bool rope_truncate;
    double init_std;
    int32_t bos, eos[8];
    int neos;
    SftType source_type;               // of the folder's weights: config.json's word; once loaded, the embedding's
    struct json_t *json;               // config.json as it was read (vocab_size follows sft_resize_vocab)
} SftArch;

/* The tensor table. A column: slot, the unit it belongs to, rows, columns, initial value, weight decay or not, LoRA
   target or not. A slot with no rows is absent. `a` is the SftArch. Decayed tensors stand first in a unit, so that a
   unit's flat vector is two ranges, with and without decay. Weights of linear layers are [out, in]. */
// clang-format off
#define SFT_TENSORS(X) \
X(wte,     SFT_EMBED, a->V,                                  a->C,        SFT_INIT_NORMAL, 1, 0) \
X(wpe,     SFT_EMBED, a->learned_positions ? a->P : 0,       a->C,        SFT_INIT_NORMAL, 1, 0) \
X(q_w,     SFT_BLOCK, a->H * a->D,                           a->C,        SFT_INIT_NORMAL, 1, 1) \
X(k_w,     SFT_BLOCK, a->K * a->D,                           a->C,        SFT_INIT_NORMAL, 1, 1) \
X(v_w,     SFT_BLOCK, a->K * a->D,                           a->C,        SFT_INIT_NORMAL, 1, 1) \
X(o_w,     SFT_BLOCK, a->C,                                  a->H * a->D, SFT_INIT_SCALED, 1, 1) \
X(gate_w,  SFT_BLOCK, a->gated ? a->F : 0,                   a->C,        SFT_INIT_NORMAL, 1, 1) \
X(up_w,    SFT_BLOCK, a->F,                                  a->C,        SFT_INIT_NORMAL, 1, 1) \
X(down_w,  SFT_BLOCK, a->C,                                  a->F,        SFT_INIT_SCALED, 1, 1) \
X(norm1_w, SFT_BLOCK, a->C,                                  1,           SFT_INIT_ONE,    0, 0) \
X(norm1_b, SFT_BLOCK, a->layernorm ? a->C : 0,               1,           SFT_INIT_ZERO,   0, 0) \
X(norm2_w, SFT_BLOCK, a->C,                                  1,           SFT_INIT_ONE,    0, 0) \
X(norm2_b, SFT_BLOCK, a->layernorm ? a->C : 0,               1,           SFT_INIT_ZERO,   0, 0) \
X(q_norm,  SFT_BLOCK, a->qk_norm ? a->D : 0,                 1,           SFT_INIT_ONE,    0, 0) \
X(k_norm,  SFT_BLOCK, a->qk_norm ? a->D : 0,                 1,           SFT_INIT_ONE,    0, 0) \
X(q_b,     SFT_BLOCK, a->q_bias ? a->H * a->D : 0,           1,           SFT_INIT_ZERO,   0, 0) \
X(k_b,     SFT_BLOCK, a->q_bias ? a->K * a->D : 0,           1,           SFT_INIT_ZERO,   0, 0) \
X(v_b,     SFT_BLOCK, a->q_bias ? a->K * a->D : 0,           1,           SFT_INIT_ZERO,   0, 0) \
X(o_b,     SFT_BLOCK, a->o_bias ? a->C : 0,                  1,           SFT_INIT_ZERO,   0, 0) \
X(gate_b,  SFT_BLOCK, a->gated && a->mlp_bias ? a->F : 0,    1,           SFT_INIT_ZERO,   0, 0) \
X(up_b,    SFT_BLOCK, a->mlp_bias ? a->F : 0,                1,           SFT_INIT_ZERO,   0, 0) \
X(down_b,  SFT_BLOCK, a->mlp_bias ? a->C : 0,                1,           SFT_INIT_ZERO,   0, 0) \
X(head_w,  SFT_FINAL, a->tied ? 0 : a->V,                    a->C,        SFT_INIT_NORMAL, 1, 0) \
X(norm_w,  SFT_FINAL, a->C,                                  1,           SFT_INIT_ONE,    0, 0) \
X(norm_b,  SFT_FINAL, a->layernorm ? a->C : 0,               1,           SFT_INIT_ZERO,   0, 0)
// clang-format on
typedef enum { SFT_EMBED, SFT_BLOCK, SFT_FINAL } SftUnitKind;
typedef enum { SFT_INIT_NORMAL, SFT_INIT_SCALED, SFT_INIT_ONE, SFT_INIT_ZERO } SftInit; // scaled: std / sqrt(2 L)
typedef enum {
#define X(slot, ...) SFT_SLOT_##slot,
    SFT_TENSORS(X)
#undef X
        SFT_SLOTS
} SftSlot;
typedef struct { // one unit's tensors by name; those of other kinds of unit are absent
#define X(slot, ...) SftTensor slot;
    SFT_TENSORS(X)
#undef X
} SftWeights;

/* A unit is the embeddings, a block, or the final norm with the head: what is sharded, reduced, gathered, recomputed
   and stored together. Its trainable parameters are one flat vector; tensors are ranges of it, in the table's order. */
typedef struct {
    SftUnitKind kind;
    int64_t count, decayed;    // parameters of the flat vector; the first `decayed` of them have weight decay
    int64_t offset[SFT_SLOTS]; // of each tensor in the vector, -1 if absent
    void *weights;             // [count] in the type of the computation (== master when that is fp32)
    float *master;             // [count] what AdamW updates
    float *grad;               // [count] fp32, accumulated over micro-batches
    float *m, *v;              // [count] AdamW's moments
    SftWeights w;              // views of weights
    SftWeights dw;             // views of grad
} SftUnit;

// What a memory plan is made of; one arena each.
enum {
    SFT_MEM_WEIGHTS, SFT_MEM_MASTER, SFT_MEM_GRADS, SFT_MEM_MOMENTS, SFT_MEM_ACTS, SFT_MEM_CACHE, SFT_MEM_WORK,
    SFT_MEM_HOST, // the host's end of transfers; the others lie where the ops work
    SFT_MEMS
};

typedef struct SftModel SftModel; // the whole: see [6]

/* Reads config.json (and the stop tokens of generation_config.json). Dies with the key, what it holds and what was
   expected; a model_type that is not known, with the list of those that are. Nothing depends on a model's name. */
SftArch sft_arch(const char *folder);
void sft_arch_free(SftArch *a);
int64_t sft_parameters(const SftArch *a); // all of them, a tied head once
const char *sft_slot_name(SftSlot slot);  // as the table spells it: "q_w"
typedef struct { const char *name; SftUnitKind unit; int64_t rows, cols; SftInit init; bool decay, lora; } SftSlotInfo;
SftSlotInfo sft_slot(const SftArch *a, SftSlot slot); // a row of the table for this model; absent: rows == 0
static inline SftTensor *sft_weight(SftWeights *w, SftSlot slot) { return (SftTensor *)w + slot; } // to loop over slots
// The Hugging Face name of a slot of block `layer` (ignored for the others), e.g. "model.layers.3.mlp.up_proj.weight".
// Slots that a family stores fused (GPT-2's c_attn, InternLM2's wqkv) share a name.
const char *sft_hf_name(const SftArch *a, SftSlot slot, int64_t layer, char out[256]);
/* The tokenizer has `tokens` ids: dies if the embedding is smaller, unless `allowed` (option resize_vocab); then the
   model is to have as many rows, and sft_load_weights fills the new ones with the mean of the old. Call it before
   sft_model_open. */
void sft_resize_vocab(SftArch *a, int64_t tokens, bool allowed);

/* Lays out m->units units in m->unit, from m->arch, m->type and m->trains: counts, offsets, and each flat vector as a
   piece of its arena (NULL while that arena plans). fp32: weights and master are one vector. !trains: weights only. */
void sft_units_open(SftModel *m);
void sft_units_close(SftModel *m);                      // frees m->unit; the arenas are the caller's
void sft_load_weights(SftModel *m, const char *folder); // safetensors, or its index of shards -> weights and master
void sft_init_weights(SftModel *m, uint64_t seed);      // "init": "scratch"
/* Writes model.safetensors, or shards of at most max_shard_bytes with their index: names and layout as the family
   stores them, a tied head left out. Streams: memory for a few rows only. */
void sft_save_weights(const SftModel *m, const char *folder, SftType type, double max_shard_bytes);

/* safetensors (github.com/huggingface/safetensors): 8 bytes of header length, a JSON header that gives each tensor's
   dtype, shape and range of bytes, then the bytes. A file is checked in full before the first byte is believed. */
typedef struct { const char *name, *dtype; int dims; int64_t dim[8]; const char *data; size_t bytes; } SftFileTensor;
typedef struct {
    char *path; const char *map; size_t bytes; SftFileTensor *tensor; int64_t n; struct json_t *header;
} SftSafetensors;
SftSafetensors sft_safetensors_open(const char *path); // dies with the file, the tensor and the reason
const SftFileTensor *sft_safetensors_find(const SftSafetensors *f, const char *name); // NULL if not there
void sft_safetensors_close(SftSafetensors *f);
/* Writes a file in the order of tensor[0..n), to a temporary name, fsync, rename. Of each: name, dtype ("F32", "BF16",
   "F16", "I64", ...; larger elements first, to keep them aligned), dims, dim; `bytes` is not looked at. Where data is
   NULL, fill(arg, i, first, rows, out) is asked for rows first .. first+rows of tensor i's leading dimension, in order.
   metadata: an object of strings, or NULL; the caller keeps it. */
typedef void SftFill(void *arg, int64_t i, int64_t first, int64_t rows, void *out);
void sft_safetensors_write(const char *path, const SftFileTensor *tensor, int64_t n, struct json_t *metadata,
                           SftFill *fill, void *arg);

/* ================================================================================================================
   [5] ops: every operation, forward above backward, and the table that lists them
   ================================================================================================================
   An op takes a context, then outputs, inputs and dimensions. It allocates nothing but pieces of c->work, given back
   before it returns. `=` overwrites, `+=` adds. Storage is fp32, bf16 or fp16, sums are fp32; gradients of weights are
   always fp32 and always `+=`. When planning (c->work->base == NULL) an op takes its workspace, nothing else. */
struct SftOps;
typedef struct {
    const struct SftOps *ops; // sft_cpu, or sft_cuda
    void *stream;             // the GPU stream that ops are put on
    SftArena *work;           // workspace
    uint64_t seed, step;      // key of this step's random numbers
} SftCtx;
static inline bool sft_planning(const SftCtx *c) { return c->work->base == NULL; }
typedef struct { double lr, beta1, beta2, eps, decay, correct1, correct2; } SftAdam; // correctN = 1 - betaN^t

/* Scalar formulae that the CPU and the GPU share. They have no branches, so that a compiler turns a loop over them into
   vector code; the C library's expf and erff would stay calls. */

// e^x, relative error below 1e-7; 0 below x = -87, infinity above 88.73, NaN stays NaN. 2^n e^r with |r| <= ln(2)/2:
// adding 1.5 * 2^23 leaves n, rounded, in the lowest bits; the polynomial of e^r is a minimax fit.
SFT_HD float sft_exp(float x) {
#ifdef __CUDA_ARCH__
    return expf(x);
#else
    x = x < -87.5f ? -87.5f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts, the first exact in products with n
    float p = 0.00836941879f + r * 0.00138131448f;
    p = 0.166665152f + r * (0.041668456f + r * p);
    p = 1.0f + r * (1.0f + r * (0.49999994f + r * p));
    return (p + p) * sft_bits_f32((sft_f32_bits(shifted) << 23) + (126u << 23)); // 2^(n-1): n may be 128; 0 at n = -126
#endif
}
SFT_HD float sft_sigmoid(float x) { return 1.0f / (1.0f + sft_exp(-x)); }
SFT_HD float sft_silu(float x) { return x * sft_sigmoid(x); }
SFT_HD float sft_silu_grad(float x) {
    float s = sft_sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}
// The standard normal's density and cumulative probability, relative error of both tails below 1e-6 for |x| < 5.
// P(-|x|) = e^(-x^2/2) q(t), t = 1 / (1 + 0.3 |x|): q is a minimax fit.
SFT_HD float sft_normal(float x, float *density) {
    float t = 1.0f / (1.0f + 0.3f * fabsf(x)), e = sft_exp(-0.5f * x * x);
    float q = -0.157201439f + t * 0.0356744081f;
    q = 0.128559962f + t * (-0.0536806732f + t * (0.206350476f + t * q));
    q = t * (0.119629301f + t * (0.120753869f + t * (0.0999140218f + t * q))) * e;
    *density = 0.398942280f * e;
    return x < 0 ? q : 1.0f - q;
}
// GELU(x) = x P(X < x) (Hendrycks and Gimpel 2016), the exact form; absolute error below 1e-7 (1 + |x|)
SFT_HD float sft_gelu(float x) {
    float density;
    return x * sft_normal(x, &density);
}
SFT_HD float sft_gelu_grad(float x) {
    float density, p = sft_normal(x, &density);
    return p + x * density;
}
// Its tanh form, 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3): the same as x sigmoid(2u)
SFT_HD float sft_gelu_tanh(float x) { return x * sft_sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }
SFT_HD float sft_gelu_tanh_grad(float x) {
    float u = 1.59576912f * (x + 0.044715f * x * x * x), e = sft_exp(-fabsf(u)), r = 1.0f / (1.0f + e);
    float s = u < 0 ? e * r : r; // sigmoid(u); its derivative is e r^2 on both sides, without a difference
    return s + x * (e * r * r) * 1.59576912f * (1.0f + 0.134145f * x * x);
}
// AdamW (Loshchilov, Hutter 2019) in PyTorch's order: decay, moments, update; eps outside the root. What is the same
// for all parameters is computed once, in double (1 - 0.999 in fp32 would be off by 5e-5 of itself); then one
// parameter.
typedef struct { float keep, rate, new_m, keep_v, new_v, root, eps; } SftAdamFactors;
static inline SftAdamFactors sft_adam_factors(SftAdam a) {
    const SftAdamFactors f = {(float)(1 - a.lr * a.decay), (float)(a.lr / a.correct1), (float)(1 - a.beta1),
                              (float)a.beta2, (float)(1 - a.beta2), (float)sqrt(a.correct2), (float)a.eps};
    return f;
}
SFT_HD void sft_adamw(float *w, float *m, float *v, float g, SftAdamFactors f) {
    *m = *m + (g - *m) * f.new_m;
    *v = *v * f.keep_v + g * g * f.new_v;
    *w = *w * f.keep - f.rate * (*m / (sqrtf(*v) / f.root + f.eps));
}
/* The angle per token by which numbers j and j + D/2 of a head are turned in a document of `length` tokens, and what
   cosines and sines are multiplied with: see [5.5]. */
SFT_HD float sft_rope_frequency(const SftArch *a, int64_t j, int64_t length) {
    double D = (double)a->D, f = a->rope_factor, theta = a->rope_theta;
    if (a->rope == SFT_ROPE_DYNAMIC) {
        double most = (double)a->P, L = SFT_MAX((double)length, most);
        theta *= pow(f * L / most - (f - 1), D / (D - 2));
    }
    double w = 1.0f / (float)pow(theta, (double)((float)(2 * j) / (float)a->D));
    if (a->rope == SFT_ROPE_LINEAR) w /= f;
    if (a->rope == SFT_ROPE_LLAMA3) {
        double turns = a->rope_original * w / (2 * M_PI), s = (turns - a->rope_low) / (a->rope_high - a->rope_low);
        w = s <= 0 ? w / f : s >= 1 ? w : (1 - s) * w / f + s * w;
    }
    if (a->rope == SFT_ROPE_YARN) { // the ramp: numbers of a head that make beta turns within the original length
        double low = D * log(a->rope_original / (a->rope_beta_fast * 2 * M_PI)) / (2 * log(theta));
        double high = D * log(a->rope_original / (a->rope_beta_slow * 2 * M_PI)) / (2 * log(theta));
        if (a->rope_truncate) low = floor(low), high = ceil(high);
        low = SFT_MAX(low, 0), high = SFT_MIN(high, D - 1);
        if (low == high) high += 0.001;
        double s = SFT_MIN(SFT_MAX(((double)j - low) / (high - low), 0), 1);
        w = s * w / f + (1 - s) * w;
    }
    return (float)w;
}
SFT_HD float sft_rope_scale(const SftArch *a) {
    if (a->rope != SFT_ROPE_YARN) return 1;
    return a->rope_attention > 0 ? (float)a->rope_attention
           : a->rope_factor > 1  ? (float)(0.1 * log(a->rope_factor) + 1)
                                 : 1;
}

// What gradients of that norm are multiplied with, so that it is at most max_norm (0: any), as clip_grad_norm_ does.
SFT_HD double sft_clip(double norm, double max_norm) {
    double clip = max_norm > 0 ? max_norm / (norm + 1e-6) : 1;
    return clip < 1 ? clip : 1;
}

/* NF4 (Dettmers et al. 2023): 16 numbers, quantiles of a normal distribution, and the middles between neighbours. A
   number becomes the nearest of them, the lower of two as near, NaN the first. */
SFT_HD float sft_nf4(int code) {
    static const float book[16] = {-1.0f,           -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                   -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                                   0.07958029955625534f,  0.16093020141124725f,  0.24611230194568634f,
                                   0.33791524171829224f,  0.44070982933044434f,  0.5626170039176941f,
                                   0.7229568362236023f,   1.0f};
    return book[code];
}
SFT_HD int sft_nf4_code(float x) {
    static const float middle[15] = {-0.8480964004993439f,   -0.6106329262256622f, -0.4599952697753906f,
                                     -0.33967943489551544f,  -0.23460740596055984f, -0.13791173323988914f,
                                     -0.045525018125772476f, 0.03979014977812767f, 0.1202552504837513f,
                                     0.2035212516784668f,    0.2920137718319893f,  0.3893125355243683f,
                                     0.5016634166240692f,    0.6427869200706482f,  0.8614784181118011f};
    int code = 0;
    for (int i = 0; i < 15; i++) code += x > middle[i];
    return code;
}
/* 8 bits for numbers of very different size (Dettmers 2016): code 127 is 0, 255 is 1, and 127 + k and 127 - k, with k =
   2^e + j, are the middle of the j-th of 2^e equal parts of 0.1 .. 1, times 10^(e-6), and minus that. Rounded as
   bitsandbytes' table is, to the bit. Back: the nearest, the lower of two as near, NaN the first. */
SFT_HD float sft_dynamic8(int code) {
    static const float power[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    const int k = code < 127 ? 127 - code : code - 127;
    if (k == 0 || k == 128) return k ? 1.0f : 0.0f;
    int e = 0;
    while (2 << e <= k) e++;
    const int n = 1 << e, j = k - n;
    const float step = 0.9f / (float)n;
    const float low = j < (n + 1) / 2 ? fmaf(step, (float)j, 0.1f) : fmaf(-step, (float)(n - j), 1.0f);
    const float high = j + 1 < (n + 1) / 2 ? fmaf(step, (float)(j + 1), 0.1f) : fmaf(-step, (float)(n - j - 1), 1.0f);
    const float x = (low + high) * 0.5f * power[e];
    return code < 127 ? -x : x;
}
SFT_HD int sft_dynamic8_code(float x) {
    int low = 0, high = 255;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (x > (sft_dynamic8(middle) + sft_dynamic8(middle + 1)) * 0.5f) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* A second product that joins a matmul's sum. It is LoRA's (Hu et al. 2021): beside a frozen w are trained A[r,I] and
   B[O,r] of a small r; u = s x A^T and du = s dy B are products with `scale` s, and then
       y = x w^T + u B^T: {u, B}     dx = dy w + du A: {du, A}     dB += dy^T u     dA += du^T x
   so that y and dx are written once. Types are those of x and w. On a GPU an r that is no multiple of 8 (fp32: 4) makes
   all of the product slow; A and B filled up with zeros give the same, and stay zero there. */
typedef struct { SftTensor x, w; } SftSide;
#define SFT_NO_SIDE ((SftSide){SFT_NONE, SFT_NONE})

/* Frozen weights in 4 and 8 bits, as bitsandbytes stores them: see [5.8]. Numbers count row by row, and rows need not
   begin a block. With double quantisation absmax is NULL, and the maximum of block b is
   sft_dynamic8(level[b]) * nested[b / 256] + offset[0]; without it the last three are NULL. */
enum { SFT_NF4_BLOCK = 64, SFT_NF4_NEST = 256 };
typedef struct {
    uint8_t *code;  // [(n + 1) / 2] number 2 i is the high half of byte i
    float *absmax;  // [blocks] the largest absolute value of a block of 64
    uint8_t *level; // [blocks]
    float *nested;  // [(blocks + 255) / 256]
    float *offset;  // [1]
} SftNf4;
typedef struct { int8_t *code; float *absmax; } SftInt8; // [rows, columns]; [rows]: a number is code * absmax / 127

// clang-format off
#define SFT_OPS(X) \
/* x[N,C] = wte[ids] (+ wpe[pos]) */ \
X(embedding_forward,  (SftCtx *c, SftTensor x, SftTensor wte, SftTensor wpe, const int32_t *ids, const int32_t *pos)) \
/* dwte[ids] += dx; dwpe[pos] += dx */ \
X(embedding_backward, (SftCtx *c, SftTensor dwte, SftTensor dwpe, SftTensor dx, const int32_t *ids, const int32_t *pos)) \
/* y = (x - mean) * rstd * w + b over rows of x[N,C]; stat[N,2] = mean, rstd in fp32 */ \
X(layernorm_forward,  (SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, SftTensor b, float eps)) \
/* dx = residual gradient dres (absent: 0) + the norm's; dw, db += . dx may be dres itself */ \
X(layernorm_backward, (SftCtx *c, SftTensor dx, SftTensor dw, SftTensor db, SftTensor dres, SftTensor dy, SftTensor x, SftTensor w, SftTensor stat)) \
/* y = x * rstd * w; stat[N] = rstd. Rows are of size w.dim[0]: q and k heads are x[N*H, D]. y may be x */ \
X(rmsnorm_forward,    (SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, float eps)) \
X(rmsnorm_backward,   (SftCtx *c, SftTensor dx, SftTensor dw, SftTensor dres, SftTensor dy, SftTensor x, SftTensor w, SftTensor stat)) \
/* z = scale (x[N,I] w[O,I]^T + side.x[N,r] side.w[O,r]^T) + bias; pre = z if pre is not absent; y[N,O] = act(z) + residual. */ \
/* y may be residual */ \
X(matmul_forward,     (SftCtx *c, SftTensor y, SftTensor pre, SftTensor x, SftTensor w, SftSide side, SftTensor bias, SftTensor residual, float scale, SftAct act)) \
/* dx[N,I] = (add ? dx : 0) + scale (dy[N,O] w[O,I] + side.x[N,r] side.w[r,I]) * act'(pre[N,I]) */ \
X(matmul_backward_x,  (SftCtx *c, SftTensor dx, SftTensor dy, SftTensor w, SftSide side, SftTensor pre, float scale, SftAct act, bool add)) \
/* dw[O,I] += dy^T x; dbias[O] += column sums of dy */ \
X(matmul_backward_w,  (SftCtx *c, SftTensor dw, SftTensor dbias, SftTensor dy, SftTensor x)) \
/* y, pre, residual and dy may be wider than O: the columns behind are never used, and those of y and pre may change */ \
/* table[N,D] fp32 = cosines (D/2), sines (D/2) of pos * inv_freq (Dynamic scaling: by the document's length), times the attention factor */ \
X(rope_table,         (SftCtx *c, SftTensor table, const SftArch *a, const int32_t *pos, const int32_t *begin, const int32_t *end)) \
/* rotates the halves of each head of x[N,H,D] in place, by +angle (forward) or -angle (backward) */ \
X(rope_forward,       (SftCtx *c, SftTensor x, SftTensor table)) \
X(rope_backward,      (SftCtx *c, SftTensor dx, SftTensor table)) \
/* y[N,H,D] = softmax(scale q k^T) v, lse[N,H] fp32 = log-sum-exp. q[N,H,D]; k, v[M,K,D] with M >= N: query i stands at \
   key j = i + M - N and sees keys max(begin[i], j - window + 1) .. j (window 0: no limit). begin[N] indexes the keys */ \
X(attention_forward,  (SftCtx *c, SftTensor y, SftTensor lse, SftTensor q, SftTensor k, SftTensor v, const int32_t *begin, float scale, int64_t window)) \
/* dq, dk, dv = ; M == N; end[i]: one past the document's last token */ \
X(attention_backward, (SftCtx *c, SftTensor dq, SftTensor dk, SftTensor dv, SftTensor dy, SftTensor y, SftTensor lse, SftTensor q, SftTensor k, SftTensor v, const int32_t *begin, const int32_t *end, float scale, int64_t window)) \
/* y = silu(gate) * up */ \
X(swiglu_forward,     (SftCtx *c, SftTensor y, SftTensor gate, SftTensor up)) \
/* dgate, dup = ; dgate may be gate, dup may be up */ \
X(swiglu_backward,    (SftCtx *c, SftTensor dgate, SftTensor dup, SftTensor dy, SftTensor gate, SftTensor up)) \
/* loss[n] fp32 = -log softmax(logits[n,Vp])[target] over the first V columns, 0 where target < 0. If scale != 0: \
   logits = (softmax - onehot) * scale, 0 where target < 0 and in columns >= V */ \
X(cross_entropy,      (SftCtx *c, SftTensor loss, SftTensor logits, const int32_t *target, int64_t V, float scale)) \
/* y[n,C] = x[index[n]] */ \
X(gather_rows,        (SftCtx *c, SftTensor y, SftTensor x, const int32_t *index)) \
/* dx = 0; dx[index[n]] = dy[n]; indices are distinct */ \
X(scatter_rows,       (SftCtx *c, SftTensor dx, SftTensor dy, const int32_t *index)) \
/* x = 0 */ \
X(zero,               (SftCtx *c, SftTensor x)) \
/* y = x, converted to y's type */ \
X(convert,            (SftCtx *c, SftTensor y, SftTensor x)) \
/* sum[0] += sum of x in double, in a fixed order; sum[1] += sum of squares. Not finite if any x is not */ \
X(sums,               (SftCtx *c, double *sum, SftTensor x)) \
/* *factor = what a gradient is multiplied with: sft_clip of its norm, the root of the n sums of squares sum[1], sum[3], .. */ \
/* divided by scale, then / scale. NaN if one of them is not finite */ \
X(clip,               (SftCtx *c, float *factor, const double *sum, int64_t n, double max_norm, double scale)) \
/* AdamW on n fp32 values, gradient g = grad * *factor; weights (16-bit copy, absent in fp32) = master rounded. */ \
/* Nothing if *factor is NaN: the step is skipped */ \
X(adamw,              (SftCtx *c, SftTensor weights, SftTensor master, SftTensor m, SftTensor v, SftTensor grad, const float *factor, SftAdam adam)) \
/* q = the n numbers of w in NF4; w = those of q. code, level: on 4 bytes */ \
X(nf4_quantize,       (SftCtx *c, SftNf4 q, SftTensor w)) \
X(nf4_dequantize,     (SftCtx *c, SftTensor w, SftNf4 q)) \
/* q = the rows of w in 8 bits; w = those of q. code: on 8 bytes */ \
X(int8_quantize,      (SftCtx *c, SftInt8 q, SftTensor w)) \
X(int8_dequantize,    (SftCtx *c, SftTensor w, SftInt8 q))
// clang-format on
typedef struct { // what ops run on; 0: not known
    char name[256];
    size_t memory, free;     // bytes that there are; that are free
    double flops[SFT_TYPES]; // the most operations per second, by type
} SftDevice;
typedef struct SftOps {
    const char *name;
    /* Memory. A model's arenas lie where ops work. If that is not the host's own memory (remote), the host reads and
       writes it only by these calls, which keep their place among the ops. */
    bool remote;
    void *(*reserve)(size_t bytes, bool host); // zeroed, NULL if there is none; host: the host's end of transfers
    void (*release)(void *p, size_t bytes, bool host);
    void (*upload)(SftCtx *c, void *to, const void *from, size_t bytes);   // `from` may change when it returns
    void (*download)(SftCtx *c, void *to, const void *from, size_t bytes); // has begun when it returns
    void (*wait)(SftCtx *c);                                               // until all downloads have arrived
    SftDevice (*device)(void);
#define X(op, args) void(*op) args;
    SFT_OPS(X)
#undef X
} SftOps;
extern const SftOps sft_cpu, sft_cuda; // sft_cuda: kernels.cu

/* ================================================================================================================
   [6] forward: the block and the model; backward beside it; activation checkpointing
   ================================================================================================================ */
/* The model reads like its equations: every line below is one operation of [5] on named tensors. Activations of the
   blocks live in one arena whose layout is the memory plan: tensors that are never alive together share their place. */
typedef struct { // activations of one block; [N, ...] in the type of the computation, statistics in fp32
    SftTensor x;                  // [N,C] what enters: the residual stream
    SftTensor norm1, stat1;       // [N,C], [N,2] (RMSNorm: [N])
    SftTensor q_raw, k_raw;       // [N,H,D], [N,K,D] before the q/k norm (absent without one)
    SftTensor q_stat, k_stat;     // [N,H], [N,K]
    SftTensor q, k, v;            // [N,H,D], [N,K,D], [N,K,D], after q/k norm and RoPE
    SftTensor keys, values;       // [M,K,D] what attention looks at: k and v, or a cache whose last rows they are
    SftTensor att, lse;           // [N,H,D], [N,H]
    SftTensor mid;                // [N,C] after attention
    SftTensor norm2, stat2;       // as norm1
    SftTensor gate, up, act;      // [N,F] (ungated: up is what enters the activation, gate is absent)
} SftActs;

typedef struct { // the keys and values of tokens that came before the batch, for generation
    SftTensor *keys, *values;     // [L] of [room,K,D] each, in the type of the computation
    int64_t n, room;              // rows that are filled; rows there are
} SftCache;

struct SftModel {
    SftArch arch;
    const SftOps *ops;            // whose memory it lies in
    SftType type;                 // of weights and activations
    int64_t units;                // L + 2
    SftUnit *unit;                // embeddings, blocks, final norm with the head
    bool trains, checkpointing;   // room for gradients and moments; blocks keep only x
    int64_t tokens, targets;      // N there is room for; targets among them
    SftArena mem[SFT_MEMS];
    SftActs *acts;                // [L+1]; the last has only x, the output of the last block
    SftTensor rope;               // [N,D] table of this batch (absent with learned positions)
    SftTensor final, stat;        // [N,C] after the final norm, its statistics
    SftTensor loss;               // [N] fp32, one for each target of the batch
    SftTensor chunk, logits;      // [rows,C], [rows,Vp]: the hidden states and logits of a chunk of the targets
                                  // Vp: V up to a multiple of 16, so that rows begin where a GPU's sectors do
    SftBatch seen;                // the batch of the last sft_forward as ops see it
    int32_t *index, *wanted;      // [N] where targets stand, from the first row of their chunk on; the targets
    double *sums;                 // [units+1,2] sums and sums of squares: of losses, and of each unit's gradient
    SftTensor dnorm;              // [N,C] gradient of a norm's output
    SftTensor dchunk;             // [rows,C]
    SftTensor dx;                 // [N,C] gradient of the residual stream
    SftTensor dq, dk, dv, datt;   // as q, k, v, att
    struct { int mem; size_t bytes; char what[120]; } part[16]; // the plan, part by part
    int parts;
    SftCache cache;               // for generation
    void *room;                   // remote memory only: what the host holds of it for a moment: a unit, a row of logits
    int32_t *host_index, *host_wanted; // index and wanted, sums as the host fills and reads them
    double *host_sums;
};

/* Plans or makes a model: layout of all memory for batches of up to `tokens` tokens, `targets` of them trained. With
   plan true nothing is allocated and mem[].peak tells what would be; otherwise exactly these sizes are allocated,
   weights zero. A model that speaks has a KV cache of `cache` tokens, prompt and answer together; 0: it does not. The
   workspace depends on the number of OpenMP threads: set it before. */
void sft_model_open(SftModel *m, const SftArch *a, SftType type, bool trains, bool checkpointing, int64_t tokens,
                    int64_t targets, int64_t cache, bool plan, const SftOps *ops);
void sft_model_close(SftModel *m);
size_t sft_plan_bytes(const SftModel *m); // of all arenas together
void sft_plan_print(FILE *out, const SftModel *m);
struct json_t *sft_plan_json(const SftModel *m); // {bytes, memory: {arena: bytes}, parts: [{memory, what, bytes}]}

// Runs the blocks: m->final = the normalised hidden states of the batch.
void sft_forward(SftCtx *c, SftModel *m, const SftBatch *b);
// The same after cache->n earlier tokens: appends the batch's keys and values. b->begin and b->end count in the cache.
void sft_forward_cached(SftCtx *c, SftModel *m, const SftBatch *b, SftCache *cache);
/* The head and the loss, chunk by chunk, for the tokens that have a target: their cross-entropies are added to m->sums.
   With scale != 0, also the gradient of (scale * sum) by the head's weights (+=) and by m->final (into m->dnorm). With
   logprobs (b->n floats), also each target's log-probability, 0 where there is none. b is the batch of sft_forward. */
void sft_loss(SftCtx *c, SftModel *m, const SftBatch *b, float scale, float *logprobs);
double sft_loss_sum(SftCtx *c, SftModel *m); // of the sft_loss since the last call, or the last sft_update
/* From m->dnorm back through the model: every weight's gradient (+=). Once per sft_forward: it reuses activations whose
   turn is over. */
void sft_backward(SftCtx *c, SftModel *m, const SftBatch *b);
/* Operations that training on a batch needs, whoever computes them how: 6 for each weight of a matrix that a token
   meets (a product and a sum forward, twice that backward), 12 for each number of each pair of a head's query and key.
   What checkpointing computes again does not count. */
double sft_flops(const SftArch *a, const SftBatch *b);

/* ================================================================================================================
   [7] ranks: which part of the work is this process's
   ================================================================================================================ */
typedef struct { int rank, world; } SftRanks; // one process: 0 of 1

/* ================================================================================================================
   [8] step: loss scaler, gradient norm, clipping, learning-rate schedules, AdamW over units
   ================================================================================================================ */
typedef struct { // DeepSpeed's dynamic loss scaler, with a ceiling; fp32 and bf16 have a constant scale of 1
    double scale, min_scale, max_scale;
    int64_t iter, last_overflow, window; // calls so far; that of the last overflow, -1 if none; see sft_scaler_update
    int64_t hysteresis, left;            // overflows until the scale is halved; how many of them are left
    bool consecutive, dynamic;           // one good step refills `left`; false: the scale never changes
} SftScaler;
SftScaler sft_scaler(const SftConfig *config);       // what config->fp16 asks for; dies naming a key out of range
bool sft_scaler_update(SftScaler *s, bool overflow); // once a step; false: an overflow at min_scale, nothing left to do

/* The learning rate of the step after `done` successful ones, in a run of `total`. Dies, naming them, when
   lr_scheduler_type is unknown, or a key of lr_scheduler_kwargs is unknown, missing or out of range. */
double sft_learning_rate(const SftConfig *config, int64_t done, int64_t total);

typedef struct { // what became of a step
    double loss, grad_norm, lr; // sum of the losses; norm before clipping
    bool clipped, skipped;
} SftStep;
typedef struct {
    SftScaler scaler;
    int64_t step, updates; // optimizer steps, and those among them that were not skipped (Adam's t)
    int64_t total;         // steps of the whole run
    int64_t bad_in_a_row;  // skipped ones
} SftTrainer;
SftTrainer sft_trainer(const SftConfig *config, int64_t total); // step 0 of `total`; checks scaler and schedule
void sft_zero_grad(SftCtx *c, SftModel *m);
/* Norm of all gradients, clip, AdamW on every unit; t moves on by one step. `grad_scale` is what the loss was
   multiplied with in backward (the scaler's scale, times whatever the loss was not divided by). A gradient that is not
   finite skips the step: weights and moments stay; dies with the tensor's name when that cannot get better. While
   planning it takes its workspace and does nothing else. */
SftStep sft_update(SftCtx *c, SftModel *m, SftTrainer *t, const SftConfig *config, double grad_scale);

/* ================================================================================================================
   [9] state: checkpoints, resume, export
   ================================================================================================================ */
/* Writes output_dir/checkpoint-N, N = t->step, and makes output_dir/latest name it; then removes the oldest beyond
   save_total_limit. In the folder: the weights as fp32 masters in Hugging Face's layout, optimizer.safetensors (m, v),
   config.json, the tokenizer's files of model_name_or_path, and state.json (steps, scaler, configuration, the other
   files' sizes and checksums). It appears whole or not at all, and nothing old goes before it is there. When the disk
   is full: dies, the unfinished folder removed. */
void sft_checkpoint_save(const SftModel *m, const SftTrainer *t, const SftConfig *config);
/* The checkpoint that resume_from_checkpoint means (true or "latest": what output_dir/latest names; or a path), to be
   freed; NULL for a new run. Dies when it is not there, naming those that are, and when a new run's output_dir holds
   checkpoints and overwrite_output_dir does not allow that. */
char *sft_checkpoint_find(const SftConfig *config);
/* Weights, m, v and *t as they were saved; t is what sft_trainer made for this run, whose total and scaler settings
   stay. t == NULL (init_from): the weights alone; then `folder` may also be a Hugging Face one. Dies when the model is
   another one or a file is missing, cut or changed. Notes options that are not what they were (config may be NULL). */
void sft_checkpoint_load(SftModel *m, SftTrainer *t, const SftConfig *config, const char *folder);
/* Writes a Hugging Face folder: config.json, weights in export_dtype ("auto": the source's type), the tokenizer's files
   of `source` with the trained chat template, generation_config.json with the stop tokens. Other files in `folder` stay
   as they are. tpl may be NULL: then template and stop tokens are the source's; so may t. */
void sft_export(const SftModel *m, const SftTokenizer *t, const SftTemplate *tpl, const SftConfig *config,
                const char *source, const char *folder);

/* ================================================================================================================
   [10] speak: generation with a KV cache
   ================================================================================================================ */
typedef struct {
    int64_t max_new_tokens, top_k; double temperature, top_p, repetition_penalty; uint64_t seed;
} SftSampling;
/* Continues prompt[n] until a stop token, max_new_tokens or the end of the cache: appends to `out` (the stop token
   included). on_token, if set, sees each token as it comes. The model was opened with a cache; the activations of an
   earlier sft_forward are overwritten. Dies when the prompt is empty or does not fit. */
void sft_generate(SftCtx *c, SftModel *m, SftIds *out, const int32_t *prompt, int64_t n, const int32_t *stops,
                  int nstops, SftSampling how, void (*on_token)(void *arg, int32_t id), void *arg);
// The ids that end an answer, the template's (NULL: none) first, then the model's own. Returns how many.
int sft_stops(int32_t out[64], const SftModel *m, const SftTemplate *tpl);

/* ================================================================================================================
   [11] record: progress line, JSON log, summary
   ================================================================================================================ */
/* The record of a run is output_dir/log.jsonl: one JSON object per line, each written at once, so that a
   killed run loses at most the line it was writing. Beside it, for the person: a line per logging_steps on
   standard output (on standard error with --json) and a bar on a terminal. A write that fails (disk full)
   ends the run with SFT_BROKEN. */
typedef struct SftRecord SftRecord;
typedef struct {                   // an optimizer step, over all its micro-batches and ranks
    SftStep update;                // norm before clipping, learning rate, clipped, skipped
    int64_t step, total;           // steps done, steps of the run
    int64_t tokens, trained_tokens;
    double epoch, loss, seconds;   // loss: mean over trained_tokens
    double loss_scale;             // shown and logged with fp16 only
    double comm_seconds, mfu;      // waiting for other ranks; share of the machine's peak. 0: left out
} SftStepLine;
// Fresh (resume_step 0): a new log that begins with the configuration. Otherwise the old one is cut back to
// the lines of steps <= resume_step and goes on.
SftRecord *sft_record_open(const SftConfig *config, int64_t resume_step);
void sft_record_event(SftRecord *r, struct json_t *line); // any line of log.jsonl; takes the reference
void sft_record_step(SftRecord *r, const SftStepLine *line);
// Token-weighted validation loss; exact: share of answers that are right word for word, NAN where nobody
// asked.
void sft_record_evaluation(SftRecord *r, int64_t step, double loss, int64_t tokens, double exact);
void sft_record_sample(SftRecord *r, int64_t step, struct json_t *prompt, const char *answer);
// The last line, which is returned, too (a new reference): totals since the run began or was resumed, plan and peaks of
// memory. NAN where there was no evaluation.
struct json_t *sft_record_summary(SftRecord *r, const SftModel *m, double eval_loss_before, double eval_loss_after);
void sft_record_close(SftRecord *r);
// A live bar on a terminal, nothing elsewhere; done == total removes it.
void sft_progress(const char *what, double done, double total);
struct json_t *sft_json_real(double x); // null for what JSON cannot say: NaN and infinities
int64_t sft_peak_rss(void);             // bytes of memory this process had resident at most

#ifdef __cplusplus
}
#endif
#endif // SFT_H

#ifdef SFT_IMPLEMENTATION
#ifndef SFT__BODIES
#define SFT__BODIES
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>
#ifndef SFT_NO_OPENMP
#include <omp.h>
#endif
#ifdef __F16C__
#include <immintrin.h>
#endif

/* ================================================================================================================
   [1] ground: errors, arenas, types, random numbers, clock, files
   ================================================================================================================ */
void (*sft_die_hook)(int status, const char *line) = NULL;

void sft_die(int status, const char *format, ...) {
    char line[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    for (char *p = line; *p; p++) *p = *p == '\n' ? ' ' : *p; // one line, whatever a file's name holds
    if (sft_die_hook) sft_die_hook(status, line);
    fflush(stdout);
    fprintf(stderr, "error: %s\n", line);
    exit(status);
}

void sft_note(const char *format, ...) {
    static char *seen[256];
    static int n = 0;
    char line[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    for (int i = 0; i < n; i++)
        if (!strcmp(seen[i], line)) return;
    if (n < SFT_COUNT(seen)) seen[n++] = strdup(line);
    fprintf(stderr, "note: %s\n", line);
}

void *sft_alloc(size_t bytes) { return memset(sft_realloc(NULL, bytes), 0, bytes); }

void *sft_realloc(void *old, size_t bytes) {
    void *p = realloc(old, bytes ? bytes : 1);
    if (!p) sft_die(SFT_BROKEN, "out of memory: %.1f MB more were asked for", (double)bytes / 1e6);
    return p;
}

void *sft_room(void *list, int64_t n, size_t size) { // full at every power of two: then twice as large
    return n & (n - 1) ? list : sft_realloc(list, (size_t)SFT_MAX(1, 2 * n) * size);
}

char *sft_format(const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    char none[1];
    int n = vsnprintf(none, 1, format, args);
    va_end(args);
    char *s = (char *)sft_alloc((size_t)n + 1);
    vsnprintf(s, (size_t)n + 1, format, again);
    va_end(again);
    return s;
}

// Arenas. A private mapping is zeroed by the system page by page as it is touched; huge pages make first touch cheap.
static void *sft__reserve(size_t bytes, bool host) {
    (void)host;
    void *p = mmap(NULL, SFT_MAX(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE); // advice only: without it all works, slower
#endif
    return p;
}
static void sft__release(void *p, size_t bytes, bool host) {
    (void)host;
    if (p) munmap(p, SFT_MAX(bytes, 1));
}

void sft_arena_open(SftArena *arena, const char *name, size_t bytes) {
    *arena = (SftArena){.name = name, .size = bytes, .base = (char *)sft__reserve(bytes, true)};
    if (!arena->base) sft_die(SFT_BROKEN, "out of memory: %.1f MB for %s", (double)bytes / 1e6, name);
}

void sft_arena_close(SftArena *arena) {
    sft__release(arena->base, arena->size, true);
    *arena = (SftArena){0};
}

void *sft_take(SftArena *arena, size_t bytes) {
    size_t at = arena->used;
    arena->used += (bytes + SFT_ALIGN - 1) / SFT_ALIGN * SFT_ALIGN;
    if (arena->used > arena->peak) arena->peak = arena->used;
    if (!arena->base) return NULL;
    if (arena->used > arena->size)
        sft_die(SFT_BROKEN, "the memory plan is too small: %s holds %zu bytes, %zu are needed", arena->name,
                arena->size, arena->used);
    return arena->base + at;
}

void sft_give_back(SftArena *arena, size_t mark) { arena->used = mark; }

// Types. The compiler turns the loops over bf16 into vector code; for fp16 x86 has instructions of its own.
static const struct { const char *name; size_t size; } sft__types[SFT_TYPES] = {{"fp32", 4}, {"bf16", 2}, {"fp16", 2}};
size_t sft_type_size(SftType type) { return sft__types[type].size; }
const char *sft_type_name(SftType type) { return sft__types[type].name; }

typedef uint16_t sft__half __attribute__((aligned(1))); // in a file, numbers may begin at an odd byte
void sft_to_f32(float *out, const void *in, SftType type, int64_t n) {
    const sft__half *h = (const sft__half *)in;
    int64_t i = 0;
    if (type == SFT_F32) {
        memmove(out, in, (size_t)n * 4);
    } else if (type == SFT_BF16) {
        for (; i < n; i++) out[i] = sft_bf16_to_f32(h[i]);
    } else {
#ifdef __F16C__
        for (; i < n / 8 * 8; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(h + i))));
#endif
        for (; i < n; i++) out[i] = sft_f16_to_f32(h[i]);
    }
}

void sft_from_f32(void *out, SftType type, const float *in, int64_t n) {
    uint16_t *h = (uint16_t *)out;
    int64_t i = 0;
    if (type == SFT_F32) {
        memmove(out, in, (size_t)n * 4);
    } else if (type == SFT_BF16) {
        for (; i < n; i++) h[i] = sft_f32_to_bf16(in[i]);
    } else {
#ifdef __F16C__
        for (; i < n / 8 * 8; i += 8) _mm_storeu_si128((__m128i *)(h + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
#endif
        for (; i < n; i++) h[i] = sft_f32_to_f16(in[i]);
    }
}

SftTensor sft_tensor(void *data, SftType type, int64_t d0, int64_t d1, int64_t d2) {
    return (SftTensor){data, type, {d0, d1, d2}};
}

SftTensor sft_take_tensor(SftArena *arena, SftType type, int64_t d0, int64_t d1, int64_t d2) {
    return sft_tensor(sft_take(arena, (size_t)(d0 * d1 * d2) * sft_type_size(type)), type, d0, d1, d2);
}

SftTensor sft_rows(SftTensor t, int64_t first, int64_t n) {
    if (t.data) t.data = (char *)t.data + (size_t)(first * t.dim[1] * t.dim[2]) * sft_type_size(t.type);
    t.dim[0] = n;
    return t;
}

double sft_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Files
const char *sft_path(char out[4096], const char *folder, const char *name) {
    if (snprintf(out, 4096, "%s/%s", folder, name) >= 4096)
        sft_die(SFT_BAD_INPUT, "the path %.200s... is longer than 4095 bytes", folder);
    return out;
}

static const char *sft__ending(const char *path) { // ".json" of "a/b.json", "" where there is none
    const char *dot = strrchr(path, '.');
    return dot ? dot : "";
}

bool sft_exists(const char *path) { return access(path, F_OK) == 0; }

bool sft_is_folder(const char *path) {
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

void sft_make_folder(const char *path) {
    char part[4096];
    if (snprintf(part, 4096, "%s", path) >= 4096) sft_die(SFT_BAD_INPUT, "the path %.200s... is too long", path);
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p) continue;
        char c = *p;
        *p = 0;
        if (mkdir(part, 0777) && errno != EEXIST) sft_die(SFT_BROKEN, "cannot make %s: %s", part, strerror(errno));
        *p = c;
        if (!c) break;
    }
    if (!sft_is_folder(path)) sft_die(SFT_BROKEN, "%s is not a folder", path);
}

// The names in a folder, in order; the caller frees them and the list. A folder that is not there has none.
static int sft__by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static char **sft__list(const char *folder, int *n) {
    char **names = NULL;
    DIR *dir = opendir(folder);
    *n = 0;
    for (struct dirent *e; dir && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) SFT_PUSH(names, *n, strdup(e->d_name));
    if (dir) closedir(dir);
    if (*n) qsort(names, (size_t)*n, sizeof *names, sft__by_text);
    return names;
}
static void sft__list_free(char **names, int n) {
    for (int i = 0; i < n; i++) free(names[i]);
    free(names);
}

const char *sft_map(const char *path, size_t *bytes) {
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &s)) sft_die(SFT_BAD_INPUT, "cannot open %s: %s", path, strerror(errno));
    if (!S_ISREG(s.st_mode)) sft_die(SFT_BAD_INPUT, "%s is not a file", path);
    *bytes = (size_t)s.st_size;
    const char *data = "";
    if (*bytes) {
        void *p = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) sft_die(SFT_BROKEN, "cannot map %s: %s", path, strerror(errno));
        data = (const char *)p;
    }
    close(fd);
    return data;
}

void sft_unmap(const char *data, size_t bytes) {
    if (bytes) munmap((void *)data, bytes);
}

char *sft_read_file(const char *path, size_t *bytes) {
    size_t n;
    const char *map = sft_map(path, &n);
    char *text = (char *)sft_realloc(NULL, n + 1);
    memcpy(text, map, n);
    text[n] = 0;
    sft_unmap(map, n);
    if (bytes) *bytes = n;
    return text;
}

static bool sft__write(int fd, const char *data, size_t bytes) { // all of it; if false, errno says why
    while (bytes) {
        ssize_t n = write(fd, data, bytes);
        if (n < 0 && errno != EINTR) return false;
        if (n > 0) data += n, bytes -= (size_t)n;
    }
    return true;
}

void sft_write_file(const char *path, const void *data, size_t bytes) {
    char *temporary = sft_format("%s.tmp%ld", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool good = fd >= 0 && sft__write(fd, (const char *)data, bytes) && fsync(fd) == 0;
    int reason = errno;
    if (fd >= 0) good = close(fd) == 0 && good;
    if (!good || rename(temporary, path)) {
        if (good) reason = errno;
        unlink(temporary);
        sft_die(SFT_BROKEN, "cannot write %s: %s", path, strerror(reason));
    }
    free(temporary);
}

// What Python and JavaScript would accept gets a better word than "unexpected token".
static const char *sft__json_hint(const char *text, size_t n, const json_error_t *e) {
    size_t at = SFT_MIN((size_t)SFT_MAX(e->position, 0), n);
    for (; at && !strchr("]}", text[at - 1]); at--) {}
    for (at -= at > 0; at && strchr(" \t\r\n", text[at - 1]); at--) {} // now after what the bracket closes
    const char *why = e->text;
    if (strstr(why, "'True'") || strstr(why, "'False'") || strstr(why, "'None'"))
        return ": JSON writes true, false and null";
    if (strstr(why, "near '''")) return ": JSON strings stand in double quotes";
    if (strstr(why, "near '#'") || strstr(why, "near '/'")) return ": JSON has no comments";
    return at && text[at - 1] == ',' ? ": a trailing comma" : "";
}

static json_t *sft__json_file(const char *path, bool big) {
    size_t n;
    const char *text = sft_map(path, &n);
    size_t bom = n >= 3 && !memcmp(text, "\xef\xbb\xbf", 3) ? 3 : 0; // a byte order mark
    json_error_t e;
    json_t *json = json_loadb(text + bom, n - bom, JSON_REJECT_DUPLICATES, &e);
    if (!json && big && json_error_code(&e) == json_error_numeric_overflow)
        json = json_loadb(text + bom, n - bom, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &e);
    const char *hint = json ? "" : sft__json_hint(text + bom, n - bom, &e);
    sft_unmap(text, n);
    if (!json) sft_die(SFT_BAD_INPUT, "%s, line %d, column %d: %s%s", path, e.line, e.column, e.text, hint);
    return json;
}

json_t *sft_json_file(const char *path) { return sft__json_file(path, false); }
json_t *sft_json_big(const char *path) { return sft__json_file(path, true); }

/* ================================================================================================================
   [2] config: run.json, DeepSpeed JSON and command line -> one checked struct
   ================================================================================================================
   A run is described in three places, with names that people bring along from transformers, trl, XTuner,
   LLaMA-Factory and DeepSpeed. In come argv and the files it names; out comes one SftConfig.
   - A value passes the same check wherever it comes from: the command line is turned into JSON values first.
   - Nothing is ignored in silence. A key is an option, another name of one, known to change nothing here
   (noted once), or refused. Guarded by test/test_config.c, which sets every option of the table in both ways,
   and test/fuzz_config.c. The usual pitfall: a misspelt key that is skipped, and a day of training with the
   default. */
enum { SFT__STR, SFT__INT, SFT__REAL, SFT__BOOL, SFT__JSON, SFT__TITLE };
typedef struct {
    int kind;
    const char *name;
    size_t offset;        // in SftConfig
    const char *standard; // the default as it stands in the table
    double low, high;
    const char *words, *help;
} SftOption;

#undef SFT_SECTION
#define SFT_SECTION(X, title) {SFT__TITLE, title, 0, "", 0, 0, NULL, ""},
#define X(kind, name, standard, low, high, words, help) \
    {SFT__##kind, #name, offsetof(SftConfig, name), #standard, low, high, words, help},
static const SftOption sft__option[] = {SFT_OPTIONS(X)};
#undef X
#undef SFT_SECTION
#define SFT_SECTION(X, title)

/* Other names. Under `prefix` stand `names`: NAME=OPTION is another name of an option. The others are things
   this program does not act on: a value among `same` says what happens anyway and passes; with "*" every
   value is harmless, and the name is noted as ignored; "off" passes a section that is switched off; the rest
   is refused with `why`. Sources: transformers' TrainingArguments, trl's SFTConfig, LLaMA-Factory's and
   XTuner's arguments, DeepSpeed's runtime/config.py and zero/config.py. */
typedef struct { const char *prefix, *names, *same, *why; } SftOther;
#define SFT__DS "deepspeed."
#define SFT__ZERO "deepspeed.zero_optimization."
#define SFT__NONE_HERE "there is no such thing here"
#define SFT__ONE "this version trains on one process, without sharding or offload"
// clang-format off
static const SftOther sft__other[] = {
    {"", "max_seq_length=max_length|cutoff_len=max_length|evaluation_strategy=eval_strategy|data_files=train_file|lr=learning_rate|"
         "prompt_template=template|shuffle_dataset=shuffle|work_dir=output_dir|val_size=validation_split|max_epochs=num_train_epochs|"
         "per_gpu_train_batch_size=per_device_train_batch_size|per_gpu_eval_batch_size=per_device_eval_batch_size|"
         "accumulative_counts=gradient_accumulation_steps|pretrained_model_name_or_path=model_name_or_path", NULL, NULL},
    {"", "dataloader_num_workers|dataloader_pin_memory|dataloader_persistent_workers|dataloader_prefetch_factor|dataset_num_proc|"
         "preprocessing_num_workers|remove_unused_columns|length_column_name|pad_to_multiple_of|logging_dir|logging_strategy|"
         "logging_first_step|logging_nan_inf_filter|log_level|log_on_each_node|disable_tqdm|report_to|run_name|plot_loss|"
         "include_num_input_tokens_seen|skip_memory_metrics|overwrite_cache|cache_dir|save_safetensors|save_on_each_node|"
         "ddp_timeout|ddp_backend|ddp_find_unused_parameters|ddp_bucket_cap_mb|gradient_checkpointing_kwargs|flash_attn|"
         "attn_implementation|use_liger_kernel|torch_compile|tf32|no_cuda|use_cpu|full_determinism|trust_remote_code|"
         "use_fast_tokenizer|do_train|do_eval|prediction_loss_only|eval_accumulation_steps|metric_for_best_model|"
         "greater_is_better|average_tokens_across_devices", "*", NULL},
    {"", "optim", "adamw_torch|adamw_torch_fused|adamw_hf", "the optimizer is AdamW (adamw_torch)"},
    {"", "group_by_length|train_sampling_strategy|data_seed", "false|random|null", "the data order comes from seed and shuffle"},
    {"", "label_smoothing_factor|loss_type", "0|0.0|null|nll|chunked_nll", "the loss is plain cross-entropy (nll)"},
    {"", "dataloader_drop_last", "false", "no row is dropped: an epoch's last step is smaller"},
    {"", "load_best_model_at_end", "false", "the trained model is the last one; every checkpoint can be exported"},
    {"", "save_only_model", "false", "a checkpoint always holds all that a resumed run needs"},
    {"", "ignore_data_skip", "false", "a resumed run continues with the data it has not seen"},
    {"", "auto_find_batch_size", "false", "see the memory plan: train_gpt2 estimate"},
    {"", "assistant_only_loss|completion_only_loss", "true|null", "answers alone are trained; \"train_on_prompt\": true adds the rest"},
    {"", "dataset_text_field", "text", "name it in columns, e.g. {\"content\": \"text\"}"},
    {"", "torch_dtype|dtype", "auto|null", "the type is fp32 unless \"bf16\": true or \"fp16\": true"},
    {"", "stage", "sft", "supervised fine-tuning is what there is"},
    {"", "finetuning_type|use_peft|load_in_4bit|load_in_8bit|quantization_bit|quantization_config|peft_config|lora_r|lora_rank|lora_alpha|"
         "lora_dropout|lora_target|lora_target_modules", "full|false|null", "this version trains all weights, without adapters or quantised bases"},
    {"", "train_batch_size", "", "set per_device_train_batch_size and gradient_accumulation_steps"},
    {"", "world|fsdp|tensor_parallel_size|pipeline_parallel_size", "null|1|false", SFT__ONE},
    {"", "push_to_hub|adafactor|activation_offloading|bf16_full_eval|fp16_full_eval|neftune_noise_alpha", "false|null|0|0.0", SFT__NONE_HERE},
    {SFT__DS, "train_micro_batch_size_per_gpu=per_device_train_batch_size|gradient_accumulation_steps=gradient_accumulation_steps|"
         "gradient_clipping=max_grad_norm|fp16=fp16", NULL, NULL},
    {SFT__DS, "train_batch_size", NULL, NULL}, // read by sft__config_deepspeed
    {SFT__DS, "steps_per_print|wall_clock_breakdown|memory_breakdown|dump_state|log_level|disable_allgather|zero_allow_untested_optimizer|"
         "zero_force_ds_cpu_optimizer|communication_data_type|activation_checkpointing|checkpoint", "*", NULL},
    {SFT__DS, "prescale_gradients|sparse_gradients|dataloader_drop_last|gradient_predivide_factor", "false|1|1.0", SFT__NONE_HERE},
    {SFT__DS, "amp|autotuning|torch_autocast|elasticity|tensorboard|csv_monitor|wandb|comet|flops_profiler|comms_logger|"
         "compression_training|data_efficiency|curriculum_learning", "off", SFT__NONE_HERE},
    {SFT__DS, "tensor_parallel|pipeline|sequence_parallel_size", "null|1", SFT__ONE},
    {SFT__DS "optimizer.", "type", "Adam|AdamW", "the optimizer is AdamW"},
    {SFT__DS "optimizer.params.", "lr=learning_rate|betas=adam_beta1|eps=adam_epsilon|weight_decay=weight_decay", NULL, NULL}, // betas: a pair
    {SFT__DS "optimizer.params.", "adam_w_mode|bias_correction", "true|auto", "AdamW, with bias correction, is what there is"},
    {SFT__DS "optimizer.params.", "amsgrad", "false|auto", "AdamW without amsgrad is what there is"},
    {SFT__DS "optimizer.params.", "torch_adam|fused|foreach", "*", NULL},
    {SFT__DS "optimizer.params.", "max_grad_norm", "", "DeepSpeed calls it gradient_clipping, at the top level"},
    {SFT__DS "scheduler.", "type=lr_scheduler_type|params=lr_scheduler_kwargs", NULL, NULL},
    {SFT__DS "bfloat16.", "enabled=bf16", NULL, NULL},
    {SFT__DS "bf16.", "enabled=bf16", NULL, NULL},
    {SFT__DS "bf16.", "immediate_grad_update", "*", NULL},
    {SFT__DS "bf16.", "check_grad_overflow", "true", "steps with non-finite gradients are always skipped"},
    {SFT__DS "bf16.", "bf16_master_weights_and_grads|bf16_optimizer_states", "false", "master weights, gradients and moments are fp32"},
    {SFT__DS "data_types.", "grad_accum_dtype", "fp32|null", "gradients are accumulated in fp32"},
    {SFT__ZERO, "stage", "0", SFT__ONE ": stage 0"},
    {SFT__ZERO "offload_param.", "device", "none", SFT__ONE},
    {SFT__ZERO "offload_optimizer.", "device", "none", SFT__ONE},
    {SFT__ZERO "offload_param.", "nvme_path|buffer_count|buffer_size|max_in_cpu|pin_memory", "*", NULL},
    {SFT__ZERO "offload_optimizer.", "nvme_path|buffer_count|pin_memory|pipeline_read|pipeline_write|fast_init|ratio", "*", NULL},
    {SFT__ZERO, "contiguous_gradients|reduce_scatter|reduce_bucket_size|use_multi_rank_bucket_allreduce|allgather_partitions|" // stage 0: no effect
         "allgather_bucket_size|overlap_comm|load_from_fp32_weights|elastic_checkpoint|sub_group_size|ignore_unused_parameters|"
         "round_robin_gradients|stage3_prefetch_bucket_size|stage3_param_persistence_threshold|stage3_model_persistence_threshold|"
         "stage3_max_live_parameters|stage3_max_reuse_distance|stage3_gather_16bit_weights_on_model_save", "*", NULL},
};

static const struct { const char *name, *arguments; int most; const char *help; } sft__command[] = {
    {"train",    "[run.json]",          0, "fine-tune; without a run file: the small model in data/"},
    {"data",     "[run.json]",          0, "the data report and the first samples, trained tokens marked"},
    {"eval",     "[run.json | MODEL]",  1, "token-weighted loss of validation_file"},
    {"generate", "MODEL \"PROMPT\"",    2, "one answer; greedy unless temperature is given"},
    {"chat",     "MODEL",               1, "a conversation"},
    {"tokenize", "MODEL [FILE]",        2, "text in (a file or standard input), token ids out"},
    {"export",   "CHECKPOINT FOLDER",   2, "a checkpoint as a Hugging Face folder"},
    {"estimate", "[run.json]",          0, "the memory plan; allocates nothing"},
    {"help",     "",                    1, "this page"},
};
// clang-format on

typedef struct { // what is being read
    SftConfig *config;
    uint8_t given[SFT_COUNT(sft__option)]; // 0: default, 1: by a file, 2: by the command line
    uint8_t pass;                          // 1 or 2
    json_t *line;          // the options of the command line, each an object of one key
    bool own;              // which names its own model or data
    const char *file, *text;               // NULL on the command line
    size_t skip;           // bytes of a path that are not in this file: a DeepSpeed file has no "deepspeed."
    char where[512];       // where the present key stands
    char mismatch[1024];   // DeepSpeed against the run: all of it in one message
} SftParse;

static const char *sft__option_name(const SftOption *o) {
    return strcmp(o->name, "template_") ? o->name : "template";
}

// Where `word` stands in "a|b|c" (or "a=x|b=y": its first part counts); NULL if it does not.
static const char *sft__option_among(const char *words, const char *word) {
    size_t n = strlen(word);
    for (const char *p = words; n && *p; p += strcspn(p, "|"), p += *p == '|')
        if (strcspn(p, "|=") == n && !strncmp(p, word, n)) return p;
    return NULL;
}

static const SftOption *sft__option_find(const char *key) {
    for (const SftOption *o = sft__option; o < sft__option + SFT_COUNT(sft__option); o++)
        if (o->kind != SFT__TITLE && !strcmp(sft__option_name(o), key)) return o;
    return NULL;
}

// The option that a key means, by its own name or another, NULL if none; *other: the row of sft__other that has it.
static const SftOption *sft__option_meant(const char *prefix, const char *key, const SftOther **other) {
    const SftOption *own = *prefix ? NULL : sft__option_find(key);
    *other = NULL;
    for (const SftOther *o = sft__other; !own && o < sft__other + SFT_COUNT(sft__other); o++) {
        const char *name = strcmp(prefix, o->prefix) ? NULL : sft__option_among(o->names, key);
        char option[64];
        if (!name) continue;
        *other = o;
        name += strlen(key);
        snprintf(option, sizeof option, "%.*s", (int)strcspn(name, "|"), name); // "=OPTION", or nothing
        return *option ? sft__option_find(option + 1) : NULL;
    }
    return own;
}

/* Keeps in best[64] the word of "a|b|c" with the fewest letters to insert, delete or change to get it from
   `key` (Levenshtein 1966, row by row), when these are fewer than *least. */
static void sft__option_nearer(char best[64], int *least, const char *key, const char *words) {
    for (const char *w = words; *w && strlen(key) < 64;) {
        int row[64], n = (int)strcspn(w, "|=");
        for (int j = 0; j <= n; j++) row[j] = j;
        for (int i = 1; key[i - 1]; i++) {
            int diagonal = row[0];
            row[0] = i;
            for (int j = 1; j <= n; j++) {
                int change = diagonal + (key[i - 1] != w[j - 1]);
                diagonal = row[j];
                row[j] = SFT_MIN(change, 1 + SFT_MIN(row[j], row[j - 1]));
            }
        }
        if (row[n] < *least) *least = row[n], snprintf(best, 64, "%.*s", n, w);
        w += strcspn(w, "|"), w += *w == '|';
    }
}

SFT_NORETURN static void sft__option_unknown(const char *where, const char *prefix, const char *key) {
    char best[64] = "";
    int least = 3 + (int)strlen(key) / 3; // as many changes make another word
    for (int i = 0; i < SFT_COUNT(sft__option) && !*prefix; i++)
        if (sft__option[i].kind != SFT__TITLE)
            sft__option_nearer(best, &least, key, sft__option_name(&sft__option[i]));
    for (int i = 0; i < SFT_COUNT(sft__other); i++)
        if (!strcmp(sft__other[i].prefix, prefix)) sft__option_nearer(best, &least, key, sft__other[i].names);
    const char *advice = *best ? "the nearest is " : "see train_gpt2 help";
    sft_die(SFT_BAD_INPUT, "%s is not an option; %s%s", where, advice, best);
}

/* Where "a.b.c" stands in a JSON text that is known to be well-formed: a string at the right depth with a
   colon behind it. jansson keeps no positions. False when the key is spelt with escapes. */
static bool sft__json_line(const char *text, const char *path, int *line, int *column) {
    int depth = 0, level = 0; // level: how many parts of the path have been entered
    const char *bol = text;
    *line = 1;
    for (const char *p = text; *p; p++) {
        if (*p == '\n') ++*line, bol = p + 1;
        if (*p == '{' || *p == '[') depth++;
        if ((*p == '}' || *p == ']') && --depth <= level) return false; // left the object of the last part
        if (*p != '"') continue;
        const char *end = p + 1;
        while (*end != '"') end += 1 + (*end == '\\');
        size_t n = strcspn(path, "."), gap = strspn(end + 1, " \t\r\n");
        bool key = depth == level + 1 && end[1 + gap] == ':';
        if (key && n == (size_t)(end - p) - 1 && !strncmp(p + 1, path, n)) {
            *column = (int)(p - bol) + 1;
            if (!path[n]) return true;
            path += n + 1, level++;
        }
        p = end;
    }
    return false;
}

// "run.json, line 3, column 5: key" or "--key"
static const char *sft__option_where(SftParse *p, const char *path) {
    int line, column;
    const char *key = path + (strlen(path) > p->skip ? p->skip : 0);
    if (!p->file) snprintf(p->where, sizeof p->where, "--%.400s", path);
    else if (p->text && sft__json_line(p->text, key, &line, &column))
        snprintf(p->where, sizeof p->where, "%.200s, line %d, column %d: %.200s", p->file, line, column, key);
    else snprintf(p->where, sizeof p->where, "%.200s: %.200s", p->file, key);
    return p->where;
}

static const char *sft__json_type(const json_t *v) {
    static const char *const names[] = {"object", "list",    "string",  "number",
                                        "number", "boolean", "boolean", "null"};
    return names[json_typeof(v)];
}

static bool sft__json_is(const json_t *v, const char *text) {
    return json_is_string(v) && !strcmp(json_string_value(v), text);
}

// The value as text: strings without their quotes when `plain`.
static void sft__json_text(char out[80], const json_t *v, bool plain) {
    char *s = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(12));
    const char *shown = plain && json_is_string(v) ? json_string_value(v) : s ? s : "?";
    snprintf(out, 80, strlen(shown) > 70 ? "%.70s..." : "%s", shown);
    free(s);
}

// Dies when `object` (NULL is fine) is not an object or has a key that is not one of the words "a|b|c".
static void sft__known_keys(const json_t *object, const char *where, const char *keys) {
    if (object && !json_is_object(object)) sft_die(SFT_BAD_INPUT, "%s must be an object {\"key\": value}", where);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
        if (!sft__option_among(keys, key))
            sft_die(SFT_BAD_INPUT, "%s: unknown key \"%s\"; known: %s", where, key, *keys ? keys : "none");
}

// One key of a JSON object: kind 'n' any number, 'w' a whole one, 'b' true or false. Absent, null or "auto" (as
// DeepSpeed writes it) give `standard`; where that is NAN the key must be there. `where` names the object in errors.
static double sft__json_number(const json_t *object, const char *where, const char *key, char kind, double standard,
                               double low, double high) {
    const json_t *v = json_object_get(object, key);
    if (!v || json_is_null(v) || sft__json_is(v, "auto")) {
        if (isnan(standard)) sft_die(SFT_BAD_INPUT, "%s needs \"%s\"", where, key);
        return standard;
    }
    double x = json_is_boolean(v) ? json_is_true(v) : json_number_value(v);
    bool good = kind == 'b' ? json_is_boolean(v) : json_is_number(v) && (kind == 'n' || floor(x) == x);
    if (good && x >= low && x <= high) return x;
    const char *kinds = kind == 'b' ? "true or false, within" : kind == 'w' ? "a whole number" : "a number";
    char got[80];
    sft__json_text(got, v, false);
    sft_die(SFT_BAD_INPUT, "%s: \"%s\" must be %s from %g to %g, got %s", where, key, kinds, low, high, got);
}

// A key whose value is one of the words "a|b|c": its index among them. Absent, null or "auto": `standard`.
static int sft__json_word(const json_t *object, const char *where, const char *key, int standard, const char *words) {
    const json_t *v = json_object_get(object, key);
    if (!v || json_is_null(v) || sft__json_is(v, "auto")) return standard;
    const char *s = json_string_value(v), *at = s ? sft__option_among(words, s) : NULL;
    if (!at) sft_die(SFT_BAD_INPUT, "%s: \"%s\" must be one of %s, got %s", where, key, words, s ? s : "no string");
    int index = 0;
    for (; at > words; at--) index += at[-1] == '|';
    return index;
}

SFT_NORETURN static void sft__option_wrong(const char *where, int kind, const json_t *v,
                                           const char *expected) {
    char got[80];
    const char *hint = "";
    sft__json_text(got, v, false);
    if (json_is_null(v)) hint = "; leave the key out for the default";
    else if (sft__json_is(v, "auto")) hint = "; only DeepSpeed's JSON has \"auto\"";
    else if (json_is_string(v) && kind != SFT__STR && kind != SFT__JSON && *where != '-')
        hint = "; write it without quotes";
    sft_die(SFT_BAD_INPUT, "%s must be %s, got %s%s", where, expected, got, hint);
}

// Checks a value and puts it in its place.
static void sft__option_set(SftConfig *c, const SftOption *o, const json_t *v, const char *where) {
    void *at = (char *)c + o->offset;
    char expected[640];
    double x = json_number_value(v);
    bool whole = o->kind == SFT__INT, json = o->kind == SFT__JSON;
    bool unset = json_is_null(v) && !strcmp(o->standard, "NULL");
    const char *s = json_string_value(v), *kind = whole ? "a whole number" : "a number";
    if (whole || o->kind == SFT__REAL) {
        if (o->high >= 1e9) snprintf(expected, sizeof expected, "%s, at least %g", kind, o->low);
        else snprintf(expected, sizeof expected, "%s from %.9g to %.9g", kind, o->low, o->high);
        if (!json_is_number(v) || !(x >= o->low && x <= o->high) || (whole && x != floor(x)))
            sft__option_wrong(where, o->kind, v, expected);
        if (whole) *(int64_t *)at = json_is_integer(v) ? (int64_t)json_integer_value(v) : (int64_t)x;
        else *(double *)at = x;
    } else if (o->kind == SFT__BOOL) {
        if (!json_is_boolean(v)) sft__option_wrong(where, o->kind, v, "true or false");
        *(bool *)at = json_is_true(v);
    } else {
        const char *said = json ? "of type " : o->words ? "one of " : "a string";
        snprintf(expected, sizeof expected, "%s%s", said, o->words ? o->words : "");
        bool fits = json ? sft__option_among(o->words, sft__json_type(v)) != NULL
                         : s && (!o->words || sft__option_among(o->words, s));
        if (!unset && !fits) sft__option_wrong(where, o->kind, v, expected);
        if (json) json_decref(*(json_t **)at), *(json_t **)at = unset ? NULL : json_incref((json_t *)v);
        else free(*(char **)at), *(char **)at = unset ? NULL : strdup(s);
    }
}

static json_t *sft__option_get(const SftConfig *c, const SftOption *o) { // a new reference
    const void *at = (const char *)c + o->offset;
    switch (o->kind) {
    case SFT__INT: return json_integer(*(const int64_t *)at);
    case SFT__REAL: return json_real(*(const double *)at);
    case SFT__BOOL: return json_boolean(*(const bool *)at);
    case SFT__STR: return *(char *const *)at ? json_string(*(char *const *)at) : json_null();
    default: return *(json_t *const *)at ? json_incref(*(json_t *const *)at) : json_null();
    }
}

// The keys of an fp16 object, DeepSpeed's; sft_scaler [8] checks the values.
static void sft__config_fp16(SftParse *p, const char *path, const json_t *fp16) {
    static const char known[] = "loss_scale|initial_scale_power|loss_scale_window|hysteresis|min_loss_scale|"
                                "consecutive_hysteresis|enabled",
                      never[] = "auto_cast|fp16_master_weights_and_grads";
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)fp16, key, v) {
        char full[512], best[64] = "";
        int least = 99;
        snprintf(full, sizeof full, "%s.%.200s", path, key);
        const char *where = sft__option_where(p, full);
        sft__option_nearer(best, &least, key, known);
        if (!strcmp(key, "enabled") && !json_is_boolean(v))
            sft__option_wrong(where, SFT__BOOL, v, "true or false");
        if (sft__option_among(never, key) && !json_is_false(v))
            sft_die(SFT_BAD_INPUT, "%s must be false: master weights and gradients are fp32", where);
        if (!sft__option_among(known, key) && !sft__option_among(never, key))
            sft_die(SFT_BAD_INPUT, "%s is not an option of fp16; the nearest is %s", where, best);
    }
}

/* DeepSpeed's value of an option. "auto" takes the run's. A value stands unless the run says otherwise
   itself: then both are kept for one message that lists every such pair. */
static void sft__config_theirs(SftParse *p, const SftOption *o, const json_t *v, const char *path) {
    uint8_t *given = &p->given[o - sft__option];
    if (sft__json_is(v, "auto")) return;
    json_t *mine = sft__option_get(p->config, o), *value = json_copy((json_t *)v), *item;
    const char *key;
    void *next;
    if (!strcmp(o->name, "fp16") && json_is_object(v)) { // an object that may be off: {"enabled": true, ...}
        bool wanted = json_is_object(mine) || json_is_true(mine);
        const json_t *enabled = json_object_get(v, "enabled");
        bool on = sft__json_is(enabled, "auto") ? wanted : json_is_true(enabled);
        json_object_foreach_safe(value, next, key, item) // "auto" in here: DeepSpeed's own default
            if (sft__json_is(item, "auto")) json_object_del(value, key);
        sft__config_fp16(p, path, value);
        json_object_del(value, "enabled");
        if (!on) json_decref(value), value = *given ? json_false() : json_null();
        else if (json_is_true(mine)) *given = 0; // the same, and more exact
    }
    bool numbers = json_is_number(mine) && json_is_number(value);
    bool same = numbers ? json_number_value(mine) == json_number_value(value) : json_equal(mine, value);
    if (*given && !same) {
        char a[80], b[80];
        size_t n = strlen(p->mismatch);
        sft__json_text(a, value, false), sft__json_text(b, mine, false);
        snprintf(p->mismatch + n, sizeof p->mismatch - n, "%s%s is %s, but %s is %s", n ? "; " : "", path, a,
                 sft__option_name(o), b);
    } else {
        sft__option_set(p->config, o, value, sft__option_where(p, path));
        *given = 1;
    }
    json_decref(mine), json_decref(value);
}

// One key of an object whose own path is `prefix` ("" at the top of a run file or on the command line).
static void sft__config_key(SftParse *p, const char *prefix, const char *key, const json_t *v) {
    char path[512], text[80];
    snprintf(path, sizeof path, "%s%.200s", prefix, key);
    const char *where = sft__option_where(p, path), *inner;
    const SftOther *other;
    const SftOption *o = sft__option_meant(prefix, key, &other);
    if (o && !*prefix) {
        uint8_t *given = &p->given[o - sft__option];
        if (p->pass == 1 && *given)
            sft_die(SFT_BAD_INPUT, "%s: %s is given twice", where, sft__option_name(o));
        *given = p->pass;
        sft__option_set(p->config, o, v, where);
        if (!strcmp(o->name, "fp16")) sft__config_fp16(p, path, v);
    } else if (o && !strcmp(key, "betas") && !sft__json_is(v, "auto")) {
        if (json_array_size(v) != 2) sft__option_wrong(where, SFT__JSON, v, "a list of two numbers");
        sft__config_theirs(p, o, json_array_get(v, 0), path);
        sft__config_theirs(p, sft__option_find("adam_beta2"), json_array_get(v, 1), path);
    } else if (o) {
        sft__config_theirs(p, o, v, path);
    } else if (other && other->same) {
        sft__json_text(text, v, true);
        bool section = json_is_object(v) && !json_is_true(json_object_get(v, "enabled"));
        bool off = !strcmp(other->same, "off") && (json_is_null(v) || json_is_false(v) || section);
        if (!strcmp(other->same, "*")) sft_note("%s is ignored: it changes nothing here", path);
        else if (!off && !sft__option_among(other->same, text))
            sft_die(SFT_BAD_INPUT, "%s is %s: %s", where, text, other->why);
    } else if (!other) { // a section, if some row's names begin with this path
        bool section = false;
        strcat(path, ".");
        for (int i = 0; i < SFT_COUNT(sft__other); i++)
            section |= !strncmp(sft__other[i].prefix, path, strlen(path));
        if (!section) sft__option_unknown(where, prefix, key);
        if (!json_is_object(v)) sft_die(SFT_BAD_INPUT, "%s must be an object", where);
        json_t *item;
        json_object_foreach((json_t *)v, inner, item) sft__config_key(p, path, inner, item);
    }
}

static json_t *sft__config_load(const char *path, char **text) { // the text, too: it has the places of keys
    json_t *json = sft_json_file(path);
    if (!json_is_object(json)) sft_die(SFT_BAD_INPUT, "%s must be a JSON object: {\"key\": value, ...}", path);
    *text = sft_read_file(path, NULL);
    return json;
}

// What of DeepSpeed's configuration applies to one process.
static void sft__config_deepspeed(SftParse *p) {
    SftConfig *c = p->config;
    char *text = NULL;
    const char *key, *path = json_string_value(c->deepspeed);
    json_t *v, *ds = path ? sft__config_load(path, &text) : json_incref(c->deepspeed);
    if (path) p->file = path, p->text = text; // a file of its own
    if (path || !p->file) p->skip = strlen(SFT__DS);
    if (!p->file) p->file = "--deepspeed";
    json_object_foreach(ds, key, v) sft__config_key(p, SFT__DS, key, v);
    if (*p->mismatch)
        sft_die(SFT_BAD_INPUT, "DeepSpeed's configuration and the run's own disagree: %s", p->mismatch);
    int64_t *m = &c->per_device_train_batch_size, *g = &c->gradient_accumulation_steps;
    if ((v = json_object_get(ds, "train_batch_size")) && !sft__json_is(v, "auto")) {
        int64_t B = (int64_t)json_integer_value(v);
        const char *where = sft__option_where(p, SFT__DS "train_batch_size");
        if (B < 1 || B > 1 << 30) sft__option_wrong(where, SFT__INT, v, "a whole number of rows");
        bool has_m = p->given[sft__option_find("per_device_train_batch_size") - sft__option];
        bool has_g = p->given[sft__option_find("gradient_accumulation_steps") - sft__option];
        if (has_m && !has_g && B % *m == 0) *g = B / *m;
        if (!has_m && B % *g == 0) *m = B / *g;
        if (*m * *g != B)
            sft_die(SFT_BAD_INPUT,
                    "%s is %lld, but per_device_train_batch_size %lld x gradient_accumulation_steps "
                    "%lld x 1 process is %lld",
                    where, (long long)B, (long long)*m, (long long)*g, (long long)(*m * *g));
    }
    json_decref(ds);
    free(text);
}

// A value of the command line as JSON, so that it meets the same checks as the file's: numbers, true and
// false as JSON writes them; what is no JSON of a kind that the option takes is a string.
static json_t *sft__config_value(const SftOption *o, const char *text, const char *where) {
    json_error_t e;
    if (o && !strcmp(o->standard, "NULL") && !strcmp(text, "null")) return json_null(); // unsets what the file sets
    bool json = !o || o->kind == SFT__JSON, word = o && o->kind == SFT__STR;
    json_t *v = word ? NULL : json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (json && !v && (*text == '{' || *text == '[') && !sft_exists(text))
        sft_die(SFT_BAD_INPUT, "%s, column %d: %s", where, e.column, e.text);
    if (v && json && o && sft__option_among(o->words, "string") &&
        !sft__option_among(o->words, sft__json_type(v)))
        json_decref(v), v = NULL; // a file called 123
    if (!v && !(v = json_string(text))) sft_die(SFT_BAD_INPUT, "%s is not UTF-8", where);
    return v;
}

// Appends the option argv[i] to p->line; returns the index of its last word.
static int sft__config_argument(SftParse *p, int argc, char **argv, int i) {
    char shown[256], *key = shown + 2;
    const char *a = argv[i], *equals = strchr(a, '='), *value = equals ? equals + 1 : NULL;
    const char *next = i + 1 < argc && strncmp(argv[i + 1], "--", 2) ? argv[i + 1] : NULL;
    snprintf(shown, sizeof shown, "%.*s", (int)SFT_MIN(equals ? (size_t)(equals - a) : strlen(a), 200), a);
    for (char *k = key; *k; k++) *k = *k == '-' ? '_' : *k;
    const SftOther *other;
    const SftOption *o = sft__option_meant("", key, &other);
    if (!o && !other) sft__option_unknown(shown, "", key);
    bool json = o && o->kind == SFT__JSON;
    bool flag =
        !o || o->kind == SFT__BOOL || (json && sft__option_among(o->words, "boolean")); // may stand alone
    bool words = !o || !flag || (json && sft__option_among(o->words, "string"));
    if (!value && next && (words || *next == '{' || sft__option_among("true|false|null", next)))
        value = next, i++;
    if (!value && !flag) sft_die(SFT_BAD_INPUT, "%s needs a value: %s", shown, o->help);
    json_t *v = value ? sft__config_value(o, value, shown) : json_true();
    json_array_append_new(p->line, json_pack("{s:o}", key, v));
    p->own |= o && sft__option_among("model_name_or_path|train_file", o->name);
    return i;
}

// Options are kept for after the run file; what is no option is that file, or an argument.
static void sft__config_arguments(SftParse *p, int argc, char **argv, int first) {
    SftConfig *c = p->config;
    p->line = json_array();
    bool options = true; // until "--": the rest are arguments, whatever they look like
    for (int i = first; i < argc; i++) {
        const char *a = argv[i];
        bool file = !strcmp(sft__ending(a), ".json") || (sft_exists(a) && !sft_is_folder(a));
        if (options && !strcmp(a, "--")) options = false;
        else if (options && !strncmp(a, "--", 2)) i = sft__config_argument(p, argc, argv, i);
        else if (options && file && !c->file_name && !c->nargs) c->file_name = strdup(a);
        else SFT_PUSH(c->args, c->nargs, strdup(a));
    }
}

/* The run file of the embedded default, in the current folder or beside the program. There its paths are read
   relative to the program's folder, so that the program can be called from anywhere. */
static json_t *sft__config_embedded(SftConfig *c, const char *program, char **text) {
    static const char name[] = "data/quickstart.json";
    static const char *const paths[] = {"model_name_or_path", "train_file", "validation_file"};
    const char *slash = strrchr(program, '/');
    int n = slash && !sft_exists(name) ? (int)(slash + 1 - program) : 0; // bytes of the program's folder; 0: it is here
    c->file_name = sft_format("%.*s%s", n, program, name);
    c->quickstart = true;
    if (!sft_exists(c->file_name))
        sft_die(SFT_BAD_INPUT, "no run file was given, and %s is neither here nor beside the program; "
                "see train_gpt2 help", name);
    sft_note("no run file was given: this is %s", c->file_name);
    json_t *json = sft__config_load(c->file_name, text);
    for (int i = 0; i < SFT_COUNT(paths) && n; i++) {
        const char *path = json_string_value(json_object_get(json, paths[i]));
        if (path && *path != '/') json_object_set_new(json, paths[i], json_sprintf("%.*s%s", n, program, path));
    }
    return json;
}

// What can only be seen when all values are there.
static void sft__config_check(SftConfig *c) {
    const char *command = c->command;
    json_t **fp16 = &c->fp16, **resume = &c->resume_from_checkpoint;
    if (json_is_false(*fp16) || json_is_false(json_object_get(*fp16, "enabled")))
        json_decref(*fp16), *fp16 = NULL;
    if (json_is_false(*resume)) json_decref(*resume), *resume = NULL;
    if (json_is_string(c->evaluation_inputs))
        c->evaluation_inputs = json_pack("[o]", c->evaluation_inputs); // one prompt
    c->type = c->bf16 ? SFT_BF16 : c->fp16 ? SFT_F16 : SFT_F32;
    sft_scaler(c); // for its checks
    bool train = !strcmp(command, "train"), data = !strcmp(command, "data"), eval = !strcmp(command, "eval");
    bool exports = !strcmp(command, "export"), generate = !strcmp(command, "generate");
    double split = c->validation_split;
    bool validates = c->validation_file || split > 0;
    const struct { bool wrong; const char *why;
    } rules[] = {
        {c->bf16 && c->fp16, "fp16 and bf16 are both on; take one"},
        {*resume && c->init_from,
         "resume_from_checkpoint (continue) and init_from (weights only) exclude each other"},
        {*resume && c->overwrite_output_dir,
         "resume_from_checkpoint (continue) and overwrite_output_dir (start afresh) exclude each other"},
        {c->validation_file && split > 0, "validation_file and validation_split exclude each other"},
        {split >= 1 && split != floor(split),
         "validation_split must be a share below 1 or a whole number of rows"},
        {train && !validates && (c->eval_steps || c->eval_on_start),
         "eval_steps or eval_on_start is set, but there is nothing to evaluate: set validation_file or "
         "validation_split"},
        {!exports && !c->model_name_or_path, "model_name_or_path is missing: the folder of a model"},
        {(train || data) && !c->train_file, "train_file is missing: the data to train on"},
        {train && !c->output_dir, "output_dir is missing: a folder for checkpoints, log and trained model"},
        {eval && !c->validation_file, "validation_file is missing: the data to evaluate"},
        {exports && c->nargs != 2, "export needs two folders: CHECKPOINT FOLDER"},
        {generate && c->nargs < 2 && !c->file,
         "generate needs a prompt: MODEL \"PROMPT\", or --file PROMPTS.jsonl"},
    };
    for (int i = 0; i < SFT_COUNT(rules); i++)
        if (rules[i].wrong) sft_die(SFT_BAD_INPUT, "%s", rules[i].why);
}

// Which command the first argument is; *first: where the other arguments begin. Returns its row of
// sft__command.
static int sft__config_command(const char *a, int *first) {
    char best[64] = "";
    int least = 3;
    for (int i = 0; i < SFT_COUNT(sft__command); i++) {
        if (!strcmp(a, sft__command[i].name)) return *first = 2, i;
        sft__option_nearer(best, &least, a, sft__command[i].name);
    }
    if (sft__option_among("merge|convert|list-cfg|copy-cfg", a))
        sft_die(SFT_BAD_INPUT, "this version has no command %s; see train_gpt2 help", a);
    if (*a && strncmp(a, "--", 2) && strcmp(a, "-h") && strcmp(sft__ending(a), ".json") &&
        (!sft_exists(a) || sft_is_folder(a)))
        sft_die(SFT_BAD_INPUT, "%.200s is neither a command nor a run file%s%s; see train_gpt2 help", a,
                *best ? "; the nearest command is " : "", best);
    return *first = 1, 0;
}

SftConfig sft_config(int argc, char **argv) {
    SftConfig c;
    SftParse p = {.config = (SftConfig *)memset(&c, 0, sizeof c), .pass = 1};
    char *text = NULL;
    int first, row = sft__config_command(argc > 1 ? argv[1] : "", &first);
    c.command = sft__command[row].name;
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) c.command = "help";
    for (int i = 0; i < SFT_COUNT(sft__option); i++) {
        json_t *standard =
            json_loads(sft__option[i].standard, JSON_DECODE_ANY, NULL); // none for NULL and titles
        if (standard) sft__option_set(&c, &sft__option[i], standard, sft__option[i].name);
        json_decref(standard);
    }
    if (!strcmp(c.command, "help")) return c;
    sft__config_arguments(&p, argc, argv, first);
    if (c.nargs > sft__command[row].most)
        sft_die(SFT_BAD_INPUT, "%s does not take the argument \"%.200s\", nor is there such a file",
                c.command, c.args[sft__command[row].most]);

    p.own |= c.nargs || sft__option_among("generate|chat|tokenize|export", c.command);
    const char *key;
    json_t *v, *json = NULL, *option;
    size_t i;
    if (c.file_name) json = sft__config_load(c.file_name, &text);
    else if (!p.own) json = sft__config_embedded(&c, argv[0], &text);
    p.file = c.file_name, p.text = text;
    json_object_foreach(json, key, v) sft__config_key(&p, "", key, v);
    p.pass = 2, p.file = p.text = NULL;
    json_array_foreach(p.line, i, option)
        json_object_foreach(option, key, v) sft__config_key(&p, "", key, v);
    if (c.nargs && strcmp(c.command, "export"))
        free(c.model_name_or_path), c.model_name_or_path = strdup(c.args[0]);
    if (p.given[sft__option_find("deepspeed") - sft__option] == 1) p.file = c.file_name, p.text = text;
    if (c.deepspeed) sft__config_deepspeed(&p);
    sft__config_check(&c);
    json_decref(json), json_decref(p.line);
    free(text);
    return c;
}

void sft_config_free(SftConfig *c) {
    for (int i = 0; i < SFT_COUNT(sft__option); i++) {
        void *at = (char *)c + sft__option[i].offset;
        if (sft__option[i].kind == SFT__STR) free(*(char **)at);
        if (sft__option[i].kind == SFT__JSON) json_decref(*(json_t **)at);
    }
    for (int i = 0; i < c->nargs; i++) free(c->args[i]);
    free(c->args), free(c->file_name);
    memset(c, 0, sizeof *c);
}

json_t *sft_config_json(const SftConfig *c) {
    json_t *all = json_object();
    for (const SftOption *o = sft__option; o < sft__option + SFT_COUNT(sft__option); o++)
        if (o->kind != SFT__TITLE) json_object_set_new(all, sft__option_name(o), sft__option_get(c, o));
    return all;
}

// Prints `text` from column `at` on, broken before column 100 at spaces and behind '|'.
static void sft__help_wrap(FILE *out, int at, const char *text) {
    int column = at;
    for (const char *p = text; *p;) {
        bool space = *p == ' ';
        int n = (int)strcspn(p + space, " |");
        n += p[space + n] == '|';
        if (column + space + n > 100) fprintf(out, "\n%*s", column = at, "");
        space = space && column > at;
        fprintf(out, "%.*s", n + space, p + (*p == ' ') - space);
        column += n + space, p += n + (*p == ' ');
    }
    fputc('\n', out);
}

static const char *sft__help_text(char out[640],
                                  const SftOption *o) { // with its words: "what happens (a|b|c)"
    bool words = o->kind == SFT__STR && o->words;
    return snprintf(out, 640, words ? "%s (%s)" : "%s", o->help, o->words), out;
}

void sft_help(FILE *out) {
    char text[640];
    fprintf(out, "train_gpt2 [COMMAND] [run.json] [--key value ...]\n\n");
    for (int i = 0; i < SFT_COUNT(sft__command); i++) {
        snprintf(text, sizeof text, "%s %s", sft__command[i].name, sft__command[i].arguments);
        fprintf(out, "  %-26s", text);
        sft__help_wrap(out, 28, sft__command[i].help);
    }
    fprintf(out, "\nAn option is a key of run.json or stands on the command line, which wins. A true/false\n"
                 "option may stand alone. Paths are relative to the current folder.\n");
    for (const SftOption *o = sft__option; o < sft__option + SFT_COUNT(sft__option); o++) {
        bool title = o->kind == SFT__TITLE, quoted = *o->standard == '"', none = !strcmp(o->standard, "NULL");
        if (title) fprintf(out, "\n%s\n", o->name);
        if (title) continue;
        int n = none ? 1 : (int)strlen(o->standard) - 2 * quoted;
        fprintf(out, "  --%-28s %-11.*s", sft__option_name(o), n, none ? "-" : o->standard + quoted);
        sft__help_wrap(out, 44, sft__help_text(text, o));
    }
}

void sft_help_markdown(FILE *out) {
    char text[640];
    for (const SftOption *o = sft__option; o < sft__option + SFT_COUNT(sft__option); o++) {
        if (o->kind == SFT__TITLE) {
            fprintf(out, "%s**%s**\n\n| option | default | meaning |\n|---|---|---|\n",
                    o == sft__option ? "" : "\n", o->name);
            continue;
        }
        fprintf(out, "| `%s` | %s | ", sft__option_name(o), strcmp(o->standard, "NULL") ? o->standard : "");
        for (const char *t = sft__help_text(text, o); *t; t++) fprintf(out, *t == '|' ? "\\%c" : "%c", *t);
        fprintf(out, " |\n");
    }
}

/* ================================================================================================================
   [3] data: rows -> messages -> token ids with a mask -> packs -> batches; the data report
   ================================================================================================================
   The problem: files come in half a dozen shapes, and a mistake here is silent: a model that trains on the wrong tokens
   still shows a falling loss. So every row is either a sample or counted under the reason why not, every format ends in
   the same list of messages, and there is one place where a mask is made (the template, token by token).
   In: files, a tokenizer, a template. Out: one list of token ids with a flag each, samples as ranges of it, packs as
   lists of samples, batches as rows of tokens. Files are mapped and read row by row, thousands of rows at a time in
   parallel, and put together in the file's order: memory grows with the tokens, not with the text.
   Invariants: a target is always the next token of the same document; every token of a sample is in exactly one pack;
   the same seed gives the same split, order and packs. Guarded by test/test_data.c (trl's packing, hand-made masks).
   The usual pitfalls: BOS twice; an answer without its stop token; a document that sees its neighbour. */

// Rows of a file: elements of a JSON array, JSON objects (a line each, or over several lines), or lines of text.
typedef struct {
    const char *path, *s; // mapped
    size_t n, at;
    enum { SFT__ARRAY, SFT__OBJECTS, SFT__LINES, SFT__TEXT } form;
    bool begun, done;
} SftRows;
typedef struct { // a row on its way from text to tokens
    const char *s;
    size_t n;
    int copies;            // how often it becomes a sample
    char *error, *unknown; // what is wrong with it; names of columns that are not used
    enum { SFT__SAMPLE, SFT__DOCUMENT, SFT__EMPTY } kind;
    SftTokens tokens;
} SftRow;

static size_t sft__skip_blank(const char *s, size_t n, size_t i) {
    while (i < n && (s[i] == ' ' || s[i] == '\t' || s[i] == '\n' || s[i] == '\r')) i++;
    return i;
}
static size_t sft__line_end(const char *s, size_t n, size_t i) {
    const char *end = i < n ? (const char *)memchr(s + i, '\n', n - i) : NULL;
    return end ? (size_t)(end - s) : n;
}

// One past the JSON value that begins at i: brackets are counted outside strings, nothing else is looked at. 0: no end.
static size_t sft__value_end(const char *s, size_t n, size_t i) {
    int64_t depth = 0;
    for (bool quoted = false; i < n; i++) {
        char c = s[i];
        if (quoted && c == '\\') i++;
        else if (c == '"') quoted = !quoted;
        else if (quoted) continue;
        else if (c == '{' || c == '[') depth++;
        else if ((c == '}' || c == ']') && --depth <= 0) return i + (depth == 0); // one too many ends a bare value
        else if (depth == 0 && (c == ',' || c == '\n')) return i;
    }
    return depth == 0 ? n : 0;
}

static char *sft__row_place(const SftRows *f, size_t at) { // counted only when somebody asks
    int64_t line = 1, begin = 0;
    for (size_t i = 0; i < at && i < f->n; i++)
        if (f->s[i] == '\n') line++, begin = (int64_t)i + 1;
    return sft_format("%s, line %" PRId64 ", column %" PRId64, f->path, line, (int64_t)at - begin + 1);
}

// What the file is, by its content; a .txt is JSON only if it begins with an object or an array of them.
static SftRows sft__rows_open(const char *path, bool text) {
    SftRows f = {.path = path};
    f.s = sft_map(path, &f.n);
    if (f.n >= 3 && !memcmp(f.s, "\xef\xbb\xbf", 3)) f.at = 3; // byte order mark
    size_t first = sft__skip_blank(f.s, f.n, f.at), inner = sft__skip_blank(f.s, f.n, first + 1);
    char c = first < f.n ? f.s[first] : 0, after = inner < f.n ? f.s[inner] : 0;
    text = text || !strcmp(sft__ending(path), ".txt");
    if (c == '[' && (!text || after == '{')) {
        f.form = SFT__ARRAY, f.at = first + 1;
    } else if (c == '{' && (!text || after == '"')) { // lines, if the first ends on its line or the next begins one
        size_t end = sft__value_end(f.s, f.n, first), line = sft__line_end(f.s, f.n, first);
        f.form = (end && end <= line) || (line + 1 < f.n && f.s[line + 1] == '{') ? SFT__LINES : SFT__OBJECTS;
    } else if (text || !c) {
        f.form = SFT__TEXT;
    } else {
        char *got = strndup(f.s + first, SFT_MIN(f.n - first, 20));
        sft_unmap(f.s, f.n);
        sft_die(SFT_BAD_INPUT, "%s, line 1: expected a JSON array, JSON objects, or text in a file called .txt; "
                               "got \"%s\"", path, got);
    }
    return f;
}

static bool sft__bad_border(SftRows *f, SftRow *row, const char *what) { // where the next row is cannot be told
    *row = (SftRow){.s = f->s + SFT_MIN(f->at, f->n), .error = strdup(what)};
    return f->done = true;
}

// The next row, or false at the end of the file.
static bool sft__next_row(SftRows *f, SftRow *row) {
    size_t end;
    *row = (SftRow){0};
    for (; f->form >= SFT__LINES && f->at < f->n; f->at = end + 1) {
        end = sft__line_end(f->s, f->n, f->at);
        if (sft__skip_blank(f->s, end, f->at) == end) continue;
        *row = (SftRow){.s = f->s + f->at, .n = end - f->at - (f->s[end - 1] == '\r')};
        f->at = end + 1;
        return true;
    }
    f->at = sft__skip_blank(f->s, f->n, f->at);
    if (f->form == SFT__ARRAY && !f->done) {
        bool comma = f->begun && f->at < f->n && f->s[f->at] == ',';
        if (comma) f->at = sft__skip_blank(f->s, f->n, f->at + 1);
        if (f->at == f->n) return sft__bad_border(f, row, "the file ends inside the JSON array; expected ]");
        if (f->s[f->at] == ']') {
            if (comma) return sft__bad_border(f, row, "expected a row after the comma, got ]");
            f->at = sft__skip_blank(f->s, f->n, f->at + 1), f->done = true;
            return f->at < f->n && sft__bad_border(f, row, "expected the end of the file after the JSON array");
        }
        if (f->begun && !comma) return sft__bad_border(f, row, "expected , or ] after the row before");
    }
    if (f->done || f->at >= f->n) return false;
    end = sft__value_end(f->s, f->n, f->at);
    if (!end) return sft__bad_border(f, row, "the row that begins here does not end: a bracket or quote is missing");
    if (end <= f->at) return sft__bad_border(f, row, "expected a row");
    *row = (SftRow){.s = f->s + f->at, .n = end - f->at};
    f->at = end;
    return f->begun = true;
}

// From a row to messages. Columns can be renamed ("columns": {"query": "user"}): the names that are looked for.
enum { SFT__INSTRUCTION, SFT__INPUT, SFT__OUTPUT, SFT__SYSTEM, SFT__HISTORY, SFT__PROMPT, SFT__COMPLETION, SFT__WORDS,
       SFT__MESSAGES, SFT__TURNS, SFT__CONVERSATIONS, SFT__CHOSEN, SFT__COLUMNS };
static const char *const sft__columns[] = {
    "instruction", "input", "output", "system", "history", "prompt", "completion", "text", "messages", "conversation",
    "conversations", "chosen", /* "columns" knows two more names: */ "user", "assistant"};
typedef struct {
    const SftConfig *config;
    const SftTokenizer *t;
    const SftTemplate *tpl;
    const char *name[SFT__COLUMNS]; // of the columns, as the files call them
    SftMessage *message; // of one row
    int messages;
    json_t *made;        // a list of the strings that were made for it
    char *error;
} SftReader;

static void sft__rename_columns(SftReader *r, json_t *map) {
    const char *column;
    json_t *means;
    for (int i = 0; i < SFT__COLUMNS; i++) r->name[i] = sft__columns[i];
    json_object_foreach(map, column, means) {
        int i = 0, n = SFT_COUNT(sft__columns);
        while (i < n && (!json_is_string(means) || strcmp(sft__columns[i], json_string_value(means)))) i++;
        if (i == n)
            sft_die(SFT_BAD_INPUT, "columns: \"%s\" is mapped to %s; expected one of user, assistant, system, input, "
                    "history, prompt, completion, text, messages, conversation, conversations", column,
                    json_is_string(means) ? json_string_value(means) : "something that is not a string");
        r->name[i < SFT__COLUMNS ? i : i == SFT__COLUMNS ? SFT__INSTRUCTION : SFT__OUTPUT] = column;
    }
}

// Keeps the first thing that is wrong with the row.
#define SFT__FAIL(r, ...) ((r)->error = (r)->error ? (r)->error : sft_format(__VA_ARGS__))

static void sft__say(SftReader *r, const char *role, const char *text, double weight) {
    SFT_PUSH(r->message, r->messages, (SftMessage){role, text, strlen(text), weight});
}

static const char *sft__keep(SftReader *r, char *text) { // until the row has been read
    json_array_append_new(r->made, json_string(text));
    free(text);
    return json_string_value(json_array_get(r->made, json_array_size(r->made) - 1));
}

// The text of a value: a string, or a list of {"type": "text", "text" | "value"}. Null or absent: `fallback`, an error
// if that is NULL.
static const char *sft__text(SftReader *r, json_t *value, const char *what, const char *fallback) {
    if (json_is_string(value)) return json_string_value(value);
    if ((!value || json_is_null(value)) && fallback) return fallback;
    if (!json_is_array(value)) {
        SFT__FAIL(r, "expected \"%s\" to be a string%s", what, value ? "" : ", it is missing");
        return "";
    }
    char *all = strdup("");
    size_t i;
    json_t *part;
    json_array_foreach(value, i, part) {
        const char *type = json_string_value(json_object_get(part, "type"));
        json_t *text = json_object_get(part, json_object_get(part, "text") ? "text" : "value");
        if (type && strcmp(type, "text")) SFT__FAIL(r, "expected parts of type text in \"%s\", got %s", what, type);
        if (!json_is_string(text)) SFT__FAIL(r, "expected parts {\"type\": \"text\", \"text\": ...} in \"%s\"", what);
        if (r->error) break;
        char *longer = sft_format("%s%s", all, json_string_value(text));
        free(all), all = longer;
    }
    return sft__keep(r, all);
}

static const char *sft__column_text(SftReader *r, json_t *row, int column, const char *fallback) {
    return sft__text(r, json_object_get(row, r->name[column]), r->name[column], fallback);
}

// "loss": true | false | "True" | "False", or "loss_weight" | "weight": a number. Absent or null: trained.
static double sft__weight(SftReader *r, json_t *message, const char *flag) {
    json_t *loss = json_object_get(message, flag), *weight = json_object_get(message, "loss_weight");
    const char *word = json_string_value(loss);
    if (!weight) weight = json_object_get(message, "weight");
    if (json_is_boolean(loss)) return json_is_true(loss);
    if (word && (!strcasecmp(word, "true") || !strcasecmp(word, "false"))) return !strcasecmp(word, "true");
    if (loss && !json_is_null(loss)) SFT__FAIL(r, "expected \"%s\" to be true or false", flag);
    if (json_is_number(weight)) return json_number_value(weight);
    if (weight && !json_is_null(weight)) SFT__FAIL(r, "expected \"loss_weight\" to be a number");
    return 1;
}

// A message, as {"role", "content"} or {"from", "value"}; roles by the names that the field uses for them.
static void sft__read_message(SftReader *r, json_t *m) {
    static const char *const roles[][2] = {
        {"system", "system"}, {"developer", "system"}, {"user", "user"}, {"human", "user"}, {"assistant", "assistant"},
        {"gpt", "assistant"}, {"model", "assistant"}, {"bot", "assistant"}, {"function_call", "function_call"},
        {"tool", "tool"}, {"observation", "tool"}, {"function", "tool"}, {"ipython", "tool"}};
    const char *role = json_string_value(json_object_get(m, json_object_get(m, "role") ? "role" : "from"));
    const char *key = json_object_get(m, "content") || !json_object_get(m, "value") ? "content" : "value", *said = role;
    if (!role) {
        SFT__FAIL(r, "expected messages {\"role\", \"content\"} or {\"from\", \"value\"}");
        return;
    }
    role = NULL;
    for (int i = 0; i < SFT_COUNT(roles); i++)
        if (!strcmp(said, roles[i][0])) role = roles[i][1];
    if (!role) SFT__FAIL(r, "unknown role \"%s\"; expected system, user, assistant, tool or function_call", said);
    if (json_array_size(json_object_get(m, "tool_calls")))
        SFT__FAIL(r, "\"tool_calls\" is not read: write the call as a message of role function_call");
    const char *text = sft__text(r, json_object_get(m, key), key, NULL);
    double weight = sft__weight(r, m, "loss");
    if (role) sft__say(r, role, text, !strcmp(role, "assistant") || !strcmp(role, "function_call") ? weight : 0);
}

static void sft__read_messages(SftReader *r, json_t *list, const char *what) {
    size_t i;
    json_t *m;
    if (!json_is_array(list)) SFT__FAIL(r, "expected \"%s\" to be a list of messages", what);
    json_array_foreach(list, i, m) sft__read_message(r, m);
}

// What one side says: a text, or messages of its own. Returns the bytes of the last one.
static size_t sft__read_side(SftReader *r, json_t *value, const char *what, const char *role, double weight) {
    int first = r->messages;
    json_t *part = json_array_get(value, 0);
    if (json_object_get(part, "role") || json_object_get(part, "from")) sft__read_messages(r, value, what);
    else sft__say(r, role, sft__text(r, value, what, NULL), weight);
    for (int i = first; i < r->messages && weight == 0; i++) r->message[i].weight = 0;
    return r->messages ? r->message[r->messages - 1].bytes : 0;
}

// A row, or one turn of a conversation, whose columns are a question and its answer, with or without a system text,
// more input and earlier [question, answer] pairs. False where there is no answer to learn.
static bool sft__turn(SftReader *r, json_t *row, int user, int output, double weight) {
    json_t *pair, *answer = json_object_get(row, r->name[output]);
    const char *system = sft__column_text(r, row, SFT__SYSTEM, ""), *history = r->name[SFT__HISTORY];
    size_t i;
    if (*system) sft__say(r, "system", system, 0);
    json_array_foreach(json_object_get(row, history), i, pair) {
        if (json_array_size(pair) != 2) SFT__FAIL(r, "expected \"%s\" to be a list of [question, answer]", history);
        sft__read_side(r, json_array_get(pair, 0), history, "user", 0);
        sft__read_side(r, json_array_get(pair, 1), history, "assistant", 1);
    }
    if (user == SFT__PROMPT) {
        sft__read_side(r, json_object_get(row, r->name[user]), r->name[user], "user", 0);
    } else {
        const char *text = sft__column_text(r, row, user, ""), *input = "";
        if (user == SFT__INSTRUCTION) input = sft__column_text(r, row, SFT__INPUT, "");
        if (*text && *input) text = sft__keep(r, sft_format("%s\n%s", text, input));
        sft__say(r, "user", *text ? text : input, 0);
    }
    size_t n = sft__read_side(r, answer, r->name[output], "assistant", weight);
    return n && !(json_is_string(answer) && !strcmp(json_string_value(answer), "<nooutput>"));
}
static bool sft__read_alpaca(SftReader *r, json_t *row) { return sft__turn(r, row, SFT__INSTRUCTION, SFT__OUTPUT, 1); }
static bool sft__read_pair(SftReader *r, json_t *row) { return sft__turn(r, row, SFT__PROMPT, SFT__COMPLETION, 1); }

static bool sft__read_turns(SftReader *r, json_t *row) { // XTuner's conversation: {"system", "input", "output"} a turn
    json_t *turns = json_object_get(row, r->name[SFT__TURNS]), *turn;
    bool some = false;
    size_t i;
    json_array_foreach(turns, i, turn)
        some = sft__turn(r, turn, SFT__INPUT, SFT__OUTPUT, sft__weight(r, turn, "output_with_loss")) || some;
    if (!json_is_array(turns)) SFT__FAIL(r, "expected \"%s\" to be a list of {input, output}", r->name[SFT__TURNS]);
    return some;
}

static bool sft__read_list(SftReader *r, json_t *row) { // a system column stands in front of messages without their own
    int column = json_object_get(row, r->name[SFT__MESSAGES]) ? SFT__MESSAGES : SFT__CONVERSATIONS;
    json_t *list = json_object_get(row, r->name[column]), *chosen = json_object_get(row, r->name[SFT__CHOSEN]);
    const char *system = sft__column_text(r, row, SFT__SYSTEM, "");
    if (*system) sft__say(r, "system", system, 0);
    sft__read_messages(r, list, r->name[column]);
    if (*system && r->messages > 1 && !strcmp(r->message[1].role, "system"))
        memmove(r->message, r->message + 1, (size_t)--r->messages * sizeof *r->message);
    if (json_is_object(chosen)) sft__read_message(r, chosen); // preference data: its better answer
    else if (chosen) sft__read_side(r, chosen, r->name[SFT__CHOSEN], "assistant", 1);
    return r->messages > 0;
}

/* The formats: name, columns that a row must have, columns that it may have, reader. "auto" takes the first that fits.
   A reader returns false for a row without text to learn from. */
#define SFT__C(column) (1 << SFT__##column)
static const struct { const char *name; int needs, knows; bool (*read)(SftReader *, json_t *); } sft__formats[] = {
    {"messages", SFT__C(MESSAGES), SFT__C(SYSTEM) | SFT__C(CHOSEN), sft__read_list},
    {"sharegpt", SFT__C(CONVERSATIONS), SFT__C(SYSTEM) | SFT__C(CHOSEN), sft__read_list},
    {"conversation", SFT__C(TURNS), 0, sft__read_turns},
    {"prompt_completion", SFT__C(PROMPT) | SFT__C(COMPLETION), SFT__C(SYSTEM) | SFT__C(HISTORY), sft__read_pair},
    {"alpaca", SFT__C(INSTRUCTION) | SFT__C(OUTPUT), SFT__C(INPUT) | SFT__C(SYSTEM) | SFT__C(HISTORY),
     sft__read_alpaca},
    {"alpaca", SFT__C(INPUT) | SFT__C(OUTPUT), SFT__C(SYSTEM) | SFT__C(HISTORY), sft__read_alpaca}, // no instruction
    {"text", SFT__C(WORDS), 0, NULL},
};

static void sft__document(SftReader *r, SftRow *row, const char *text, size_t n) { // BOS if the tokenizer says so, eos
    SftIds ids = {0};
    int32_t bos = sft_adds_bos(r->t) ? sft_bos(r->t) : -1, eos = sft_eos(r->t);
    if (bos >= 0) sft_ids_add(&ids, bos);
    sft_encode(r->t, &ids, text, n, false);
    if (eos >= 0 && (!ids.n || ids.ids[ids.n - 1] != eos)) sft_ids_add(&ids, eos);
    row->tokens = (SftTokens){ids.ids, (uint8_t *)memset(sft_alloc((size_t)ids.n), 1, (size_t)ids.n), ids.n, ids.n};
    row->kind = n ? SFT__DOCUMENT : SFT__EMPTY;
}

static void sft__conversation(SftReader *r, SftRow *row) {
    bool later = false; // an answer that comes after this one
    for (int i = r->messages - 1; i >= 0; i--) {
        SftMessage *m = &r->message[i];
        bool answer = !strcmp(m->role, "assistant") || !strcmp(m->role, "function_call");
        if (answer && later && r->config->mask_history) m->weight = 0;
        if (!answer && r->config->train_on_prompt) m->weight = 1;
        later = later || answer;
    }
    r->error = sft_render(r->tpl, &row->tokens, r->message, r->messages, false);
}

static char *sft__keys(const SftReader *r, json_t *row, int known) { // columns other than the known ones: "a, b, c"
    char *all = strdup("");
    const char *key;
    json_t *value;
    json_object_foreach(row, key, value) {
        bool skip = false;
        for (int i = 0; i < SFT__COLUMNS; i++) skip = skip || (known >> i & 1 && !strcmp(r->name[i], key));
        char *longer = skip ? NULL : sft_format("%s%s%s", all, *all ? ", " : "", key);
        if (longer) free(all), all = longer;
    }
    return all;
}

static void sft__read_object(SftReader *r, SftRow *row, json_t *json, bool first) {
    const char *asked = r->config->dataset_format;
    bool any = !strcmp(asked, "auto");
    int have = 0, f = 0, n = SFT_COUNT(sft__formats);
    for (int i = 0; i < SFT__COLUMNS; i++) have |= json_object_get(json, r->name[i]) ? 1 << i : 0;
    while (f < n && ((!any && strcmp(asked, sft__formats[f].name)) || sft__formats[f].needs & ~have)) f++;
    if (f == n) {
        char *keys = sft__keys(r, json, 0);
        SFT__FAIL(r, "expected the columns of %s (messages | conversations | conversation | prompt, completion | "
                  "instruction, output | text; \"columns\" renames); got %s", any ? "a known format" : asked, keys);
        free(keys);
        return;
    }
    if (first) row->unknown = sft__keys(r, json, sft__formats[f].needs | sft__formats[f].knows);
    if (!sft__formats[f].read) {
        const char *text = sft__column_text(r, json, SFT__WORDS, "");
        sft__document(r, row, text, strlen(text));
    } else {
        row->kind = sft__formats[f].read(r, json) ? SFT__SAMPLE : SFT__EMPTY;
        if (!r->error && row->kind == SFT__SAMPLE) sft__conversation(r, row);
    }
}

// Any thread: row->s -> row->tokens, or row->error.
static void sft__read_row(SftReader *r, SftRow *row, const SftRows *f, bool first) {
    json_error_t error;
    if (row->error) return;
    if (f->form == SFT__TEXT) {
        sft__document(r, row, row->s, row->n);
        return;
    }
    json_t *json = json_loadb(row->s, row->n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    r->messages = 0, r->made = json_array(), r->error = NULL;
    if (!json) row->error = strdup(error.text), row->s += SFT_MIN((size_t)SFT_MAX(error.position, 0), row->n); // where
    else if (!json_is_object(json)) row->error = strdup("expected a row {...}");
    else sft__read_object(r, row, json, first), row->error = r->error;
    json_decref(r->made), json_decref(json);
}

SftIds sft_prompt(const SftConfig *config, const SftTokenizer *t, const SftTemplate *tpl, json_t *prompt,
                  const char *where) {
    SftIds ids = {0};
    json_t *messages = json_object_get(prompt, "messages"), *message;
    if (json_is_object(prompt)) prompt = messages ? messages : json_object_get(prompt, "prompt");
    const char *text = json_string_value(prompt);
    if (!text && !json_is_array(prompt))
        sft_die(SFT_BAD_INPUT, "%s: a prompt is a string or a list of messages", where);
    if (text && config->raw) {
        sft_encode(t, &ids, text, strlen(text), true);
        return ids;
    }
    SftReader r = {.made = json_array()};
    SftTokens tokens = {0};
    size_t i;
    if (config->system) sft__say(&r, "system", config->system, 0);
    if (text) sft__say(&r, "user", text, 0);
    json_array_foreach(prompt, i, message) {
        sft__read_message(&r, message);
        if (r.error) sft_die(SFT_BAD_INPUT, "%s, message %zu: %s", where, i + 1, r.error);
    }
    r.error = sft_render(tpl, &tokens, r.message, r.messages, true);
    if (r.error) sft_die(SFT_BAD_INPUT, "%s: %s", where, r.error);
    free(r.message), json_decref(r.made), free(tokens.trained);
    return (SftIds){tokens.ids, tokens.n, tokens.cap};
}

static SftSample sft__range(const SftTokens *t, int64_t begin, int64_t n) { // a document's first token is no target
    SftSample s = {begin, n, 0};
    for (int64_t i = 1; i < n; i++) s.trained += t->trained[begin + i];
    return s;
}

// In the file's order: what the row has become joins the dataset, or is counted as dropped.
static void sft__add_row(SftDataset *d, const SftConfig *config, const SftRows *f, SftRow *row) {
    SftTokens *all = &d->tokens;
    SftDataReport *report = &d->report;
    int64_t n = row->tokens.n, most = config->max_length, begin = all->n;
    bool cut = !row->error && row->kind == SFT__SAMPLE && n > most;
    bool refused = cut && !strcmp(config->truncation_mode, "error");
    report->rows++;
    if (row->unknown && *row->unknown) sft_note("%s: not used: the columns %s", f->path, row->unknown);
    if (refused || (row->error && strcmp(config->on_bad_row, "skip"))) {
        char *place = sft__row_place(f, (size_t)(row->s - f->s));
        sft_unmap(f->s, f->n);
        if (refused) sft_die(SFT_BAD_INPUT, "%s: this has %" PRId64 " tokens, max_length is %" PRId64, place, n, most);
        sft_die(SFT_BAD_INPUT, "%s: %s (on_bad_row \"skip\" leaves such rows out)", place, row->error);
    }
    if (cut) n = most;
    if (row->error) report->bad++;
    else if (row->kind == SFT__EMPTY) report->dropped_empty++;
    else if (cut && !strcmp(config->truncation_mode, "drop")) report->dropped_too_long++;
    else if (!sft__range(&row->tokens, 0, n).trained) report->dropped_no_answer++;
    else {
        if (begin + n > all->cap) {
            all->cap = (begin + n) * 3 / 2 + 4096;
            all->ids = (int32_t *)sft_realloc(all->ids, (size_t)all->cap * sizeof(int32_t));
            all->trained = (uint8_t *)sft_realloc(all->trained, (size_t)all->cap);
        }
        memcpy(all->ids + begin, row->tokens.ids, (size_t)n * sizeof(int32_t));
        memcpy(all->trained + begin, row->tokens.trained, (size_t)n);
        all->n += n, report->truncated += cut, report->cut += n > most;
        for (int64_t at = 0; at < n; at += most) // only a document of text is longer than one piece
            for (int c = 0; c < row->copies; c++)
                SFT_PUSH(d->sample, d->samples, sft__range(all, begin + at, SFT_MIN(most, n - at)));
    }
    free(row->error), free(row->unknown), free(row->tokens.ids), free(row->tokens.trained);
}

// Selection sampling (Knuth 3.4.2, algorithm S): is this one of the `wanted` among the `left` that are still to come?
static bool sft__chosen(uint64_t seed, uint64_t which, uint64_t site, int64_t left, int64_t wanted) {
    return left > 0 && sft_uniform(sft_random(seed, which, site, (uint64_t)left)) * (double)left < (double)wanted;
}

// Rows are gathered in the file's order, read by all threads, and added in the file's order.
static void sft__read_file(SftDataset *d, const SftReader *reader, const char *path, double weight, int which) {
    const SftConfig *config = reader->config;
    enum { ROWS = 8192, BYTES = 8 << 20 };
    SftRows f = sft__rows_open(path, !strcmp(config->dataset_format, "text"));
    SftRow *rows = NULL, row;
    double share = weight - floor(weight);
    int64_t left = 0, wanted; // of the rows that are left, so many are taken once more
    for (SftRows count = f; share > 0 && sft__next_row(&count, &row);) left++, free(row.error);
    wanted = llround(share * (double)left);
    for (bool more = true, first = true; more; first = false) {
        int64_t n = 0;
        for (size_t bytes = 0; n < ROWS && bytes < BYTES;) {
            more = (!config->max_samples || d->report.rows + n < config->max_samples) && sft__next_row(&f, &row);
            if (!more) break;
            bool again = sft__chosen((uint64_t)config->seed, (uint64_t)which, SFT_SITE_MIX, left, wanted);
            row.copies = (int)weight + again, wanted -= again, left--;
            if (!row.copies && !row.error) continue;
            SFT_PUSH(rows, n, row);
            bytes += row.n;
        }
#pragma omp parallel
        {
            SftReader mine = *reader;
#pragma omp for schedule(dynamic, 16)
            for (int64_t i = 0; i < n; i++) sft__read_row(&mine, &rows[i], &f, first);
            free(mine.message);
        }
        for (int64_t i = 0; i < n; i++) sft__add_row(d, config, &f, &rows[i]);
        sft_progress("reading data", (double)SFT_MIN(f.at, f.n), (double)f.n + 1);
    }
    sft_progress("reading data", 1, 1);
    free(rows);
    sft_unmap(f.s, f.n);
}

static void sft__read_path(SftDataset *d, const SftReader *r, const char *path, double weight, int *which) {
    if (!sft_is_folder(path)) {
        sft__read_file(d, r, path, weight, (*which)++);
        return;
    }
    if (access(path, R_OK)) sft_die(SFT_BAD_INPUT, "cannot open the folder %s: %s", path, strerror(errno));
    char file[4096];
    int n, before = *which;
    char **names = sft__list(path, &n);
    for (int i = 0; i < n; i++)
        if (sft__option_among(".json|.jsonl|.txt", sft__ending(names[i])))
            sft__read_file(d, r, sft_path(file, path, names[i]), weight, (*which)++);
    sft__list_free(names, n);
    if (*which == before) sft_die(SFT_BAD_INPUT, "the folder %s holds no .json, .jsonl or .txt file", path);
}

static void sft__count(SftDataset *d) { // tokens of the report, as they stand
    SftDataReport *r = &d->report;
    const SftSample *s = d->packs ? d->document : d->sample, *end = s + (d->packs ? d->documents : d->samples);
    r->tokens = r->trained_tokens = 0;
    for (; s < end; s++) r->tokens += s->n, r->trained_tokens += s->trained;
}

SftDataset sft_dataset(const SftConfig *config, const SftTokenizer *t, const SftTemplate *tpl, json_t *files) {
    SftDataset d = {.documents_see_each_other = config->packing && !config->use_varlen_attn,
                    .epochs = config->num_train_epochs, .max_steps = config->max_steps,
                    .rows_per_step = config->per_device_train_batch_size * config->gradient_accumulation_steps};
    SftReader reader = {.config = config, .t = t, .tpl = tpl};
    sft__rename_columns(&reader, config->columns);
    int which = 0;
    for (size_t i = 0; i < (json_is_array(files) ? json_array_size(files) : 1); i++) {
        json_t *file = json_is_array(files) ? json_array_get(files, i) : files;
        json_t *weight = json_object_get(file, "weight");
        const char *path = json_string_value(json_is_object(file) ? json_object_get(file, "path") : file);
        double w = weight ? json_number_value(weight) : 1;
        if (!path) sft_die(SFT_BAD_INPUT, "train_file, validation_file: expected a path, {path, weight} or a list");
        if (json_is_object(file)) sft__known_keys(file, path, "path|weight");
        if ((weight && !json_is_number(weight)) || !(w > 0 && w <= 1000))
            sft_die(SFT_BAD_INPUT, "the weight of %s must be a number above 0, at most 1000", path);
        sft__read_path(&d, &reader, path, w, &which);
    }
    SftDataReport *p = &d.report;
    if (!d.samples)
        sft_die(SFT_BAD_INPUT, "no row has a trained token left: %" PRId64 " rows read, %" PRId64 " without text, %"
                PRId64 " with no trained token in their first %" PRId64 " (max_length), %" PRId64 " too long, %" PRId64
                " malformed", p->rows, p->dropped_empty, p->dropped_no_answer, config->max_length, p->dropped_too_long,
                p->bad);
    sft__count(&d);
    return d;
}

void sft_dataset_split(SftDataset *train, SftDataset *validation, double share, uint64_t seed) {
    int64_t n = train->samples, wanted = share < 1 ? SFT_MAX(1, llround(share * (double)n)) : (int64_t)share;
    *validation = (SftDataset){.rows_per_step = train->rows_per_step, .epochs = 1};
    if (share <= 0) return;
    if (wanted >= n)
        sft_die(SFT_BAD_INPUT, "validation_split: %" PRId64 " of %" PRId64 " samples would leave none to train on",
                wanted, n);
    validation->tokens = train->tokens, validation->tokens.cap = 0; // the same tokens, not its own
    train->samples = 0;
    bool moves = false;
    for (int64_t i = 0, last = -1; i < n; i++) {
        SftSample s = train->sample[i];
        if (s.begin != last) moves = sft__chosen(seed, 0, SFT_SITE_SPLIT, n - i, wanted); // copies go together
        last = s.begin, wanted -= moves;
        if (moves) SFT_PUSH(validation->sample, validation->samples, s);
        else train->sample[train->samples++] = s;
    }
    validation->report.rows = validation->samples;
    sft__count(train), sft__count(validation);
}

/* Packing, best fit decreasing: samples from long to short, each into the pack whose free space is the smallest that
   holds it, the oldest among equals; a new pack when none does. The packs of one free space are a queue; a bit for each
   size of free space says whether its queue has any, 64 sizes at a glance. Same packs as trl's "bfd". */
static int64_t sft__next_bit(const uint64_t *bits, int64_t n, int64_t at) { // the first from `at` on that is set, or n
    for (; at < n; at = (at / 64 + 1) * 64) {
        uint64_t rest = bits[at / 64] >> at % 64;
        if (rest) return at + __builtin_ctzll(rest);
    }
    return n;
}

static void sft__pack_bfd(SftDataset *d, int64_t room) {
    typedef struct { int64_t head, tail, longer; } Space; // queue of the packs with this space; samples that leave less
    int64_t n = d->samples, packs = 0;
    uint64_t *some = SFT_NEW(uint64_t, room / 64 + 1); // bit s: there are packs with space s
    Space *space = SFT_NEW(Space, room + 2);
    int64_t *next = SFT_NEW(int64_t, 4 * n), *free_ = next + n, *sorted = next + 2 * n, *in = next + 3 * n;
    for (int64_t i = 0; i < n; i++) space[room - d->sample[i].n + 1].longer++; // counting sort, longest first, stable
    for (int64_t i = 0; i <= room; i++) space[i + 1].longer += space[i].longer;
    for (int64_t i = 0; i < n; i++) sorted[space[room - d->sample[i].n].longer++] = i;
    d->pack = SFT_NEW(int64_t, n + 1);
    for (int64_t k = 0; k < n; k++) {
        int64_t size = d->sample[sorted[k]].n, s = sft__next_bit(some, room + 1, size), p = packs;
        if (s <= room) { // the oldest pack of that space
            p = space[s].head, space[s].head = next[p];
            if (p == space[s].tail) some[s / 64] &= ~(1ull << s % 64);
        } else {
            free_[packs++] = room;
        }
        s = free_[p] -= size, in[sorted[k]] = p, d->pack[p + 1]++;
        if (some[s / 64] >> s % 64 & 1) next[space[s].tail] = p;
        else space[s].head = p;
        space[s].tail = p, some[s / 64] |= 1ull << s % 64;
    }
    for (int64_t p = 0; p < packs; p++) d->pack[p + 1] += d->pack[p];
    memcpy(next, d->pack, (size_t)packs * sizeof *next); // where each pack's next sample goes
    for (int64_t k = 0; k < n; k++) d->order[next[in[sorted[k]]]++] = sorted[k];
    d->packs = packs;
    free(some), free(space), free(next);
}

// Packing, wrapped: the samples one after another, cut every `room` tokens; the last pack is what is left. The second
// part of a cut sample is a document of its own.
static void sft__pack_wrapped(SftDataset *d, int64_t room, const int64_t *samples) {
    int64_t total = 0, filled = 0;
    for (int64_t i = 0; i < d->samples; i++) total += d->sample[i].n;
    d->packs = (total + room - 1) / room;
    d->document = SFT_NEW(SftSample, d->samples + d->packs);
    d->pack = SFT_NEW(int64_t, d->packs + 1);
    d->documents = 0;
    for (int64_t i = 0; i < d->samples; i++) {
        SftSample s = d->sample[samples[i]];
        for (int64_t at = 0, n; at < s.n; at += n, filled += n) {
            n = SFT_MIN(s.n - at, room - filled % room);
            d->document[d->documents++] = sft__range(&d->tokens, s.begin + at, n);
            d->pack[filled / room + 1] = d->documents;
        }
    }
}

static void sft__shuffle(int64_t *list, int64_t n, uint64_t seed, uint64_t epoch) { // Fisher and Yates, from the end
    for (int64_t i = n - 1; i > 0; i--) {
        uint64_t bits = sft_random(seed, epoch, SFT_SITE_SHUFFLE, (uint64_t)i);
        int64_t j = (int64_t)((unsigned __int128)bits * (uint64_t)(i + 1) >> 64), swap = list[i];
        list[i] = list[j], list[j] = swap;
    }
}

static SftSample sft__pack_sum(const SftDataset *d, int64_t pack) { // its tokens and its targets
    SftSample sum = {0};
    for (int64_t k = d->pack[pack]; k < d->pack[pack + 1]; k++) {
        const SftSample *s = &d->document[d->order[k]];
        sum.n += s->n, sum.trained += s->trained;
    }
    return sum;
}
int64_t sft_pack_targets(const SftDataset *d, int64_t pack) { return sft__pack_sum(d, pack).trained; }

void sft_dataset_pack(SftDataset *d, const SftConfig *config) {
    int64_t room = SFT_MAX(2, SFT_MIN(config->max_length, d->report.tokens)), n = d->samples;
    d->document = d->sample, d->documents = n;
    d->order = SFT_NEW(int64_t, n);
    for (int64_t i = 0; i < n; i++) d->order[i] = i;
    if (config->packing && !strcmp(config->packing_strategy, "wrapped")) { // mixed first: neighbours are alike
        if (config->shuffle) sft__shuffle(d->order, n, (uint64_t)config->seed, UINT64_MAX);
        sft__pack_wrapped(d, room, d->order);
        d->order = (int64_t *)sft_realloc(d->order, (size_t)d->documents * sizeof *d->order);
        for (int64_t i = 0; i < d->documents; i++) d->order[i] = i;
    } else if (config->packing) {
        sft__pack_bfd(d, room);
    } else {
        d->packs = n, d->pack = SFT_NEW(int64_t, n + 1);
        for (int64_t i = 0; i <= n; i++) d->pack[i] = i;
    }
    d->longest = 0;
    for (int64_t p = 0; p < d->packs; p++) d->longest = SFT_MAX(d->longest, sft__pack_sum(d, p).n);
    sft__count(d);
}

void sft_dataset_free(SftDataset *d) {
    if (d->document != d->sample) free(d->document);
    if (d->tokens.cap) free(d->tokens.ids), free(d->tokens.trained); // else they are another dataset's
    free(d->sample), free(d->pack), free(d->order);
    *d = (SftDataset){0};
}

int64_t sft_steps_per_epoch(const SftDataset *d, int64_t rows_per_step) {
    return (d->packs + rows_per_step - 1) / rows_per_step;
}

int64_t sft_total_steps(const SftDataset *d) {
    if (d->max_steps > 0) return d->max_steps;
    return (int64_t)ceil((double)sft_steps_per_epoch(d, d->rows_per_step) * d->epochs);
}

void sft_epoch_order(int64_t *out, const SftDataset *d, uint64_t seed, int64_t epoch, bool shuffle) {
    for (int64_t i = 0; i < d->packs; i++) out[i] = i;
    if (shuffle) sft__shuffle(out, d->packs, seed, (uint64_t)epoch);
}

void sft_batch_room(SftBatch *b, int64_t tokens) {
    if (tokens <= b->cap) return;
    int32_t **rows[] = {&b->ids, &b->target, &b->pos, &b->begin, &b->end};
    for (int i = 0; i < SFT_COUNT(rows); i++) *rows[i] = (int32_t *)sft_realloc(*rows[i], (size_t)tokens * 4);
    b->cap = tokens;
}

void sft_largest_batch(int64_t *tokens, int64_t *targets, const SftDataset *d, int64_t rows, int64_t per_step,
                       int64_t steps, uint64_t seed, bool shuffle) {
    int64_t *order = SFT_NEW(int64_t, d->packs);
    SftSample batch = {0}; // its sums
    for (int64_t epoch = 0; steps > 0 && d->packs; epoch++) {
        sft_epoch_order(order, d, seed, epoch, shuffle);
        for (int64_t first = 0; first < d->packs && steps > 0; first += per_step, steps--)
            for (int64_t at = first; at < SFT_MIN(first + per_step, d->packs); at++) {
                SftSample pack = sft__pack_sum(d, order[at]);
                if ((at - first) % rows == 0) batch = (SftSample){0};
                batch.n += pack.n, batch.trained += pack.trained;
                *tokens = SFT_MAX(*tokens, batch.n), *targets = SFT_MAX(*targets, batch.trained);
            }
        if (!shuffle) break; // every epoch is this one
    }
    free(order);
}

void sft_batch_fill(SftBatch *b, const SftDataset *d, const int64_t *packs, int64_t n) {
    int64_t need = 0;
    for (int64_t i = 0; i < n; i++) need += sft__pack_sum(d, packs[i]).n;
    sft_batch_room(b, need);
    b->n = b->documents = b->trained = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t begin = b->n; // of what attention may see: a document, or the whole pack
        for (int64_t k = d->pack[packs[i]], last = d->pack[packs[i] + 1]; k < last; k++) {
            SftSample s = d->document[d->order[k]];
            const int32_t *ids = d->tokens.ids + s.begin;
            const uint8_t *trained = d->tokens.trained + s.begin;
            for (int64_t j = 0; j < s.n; j++) {
                bool target = j + 1 < s.n && trained[j + 1];
                b->ids[b->n + j] = ids[j];
                b->target[b->n + j] = target ? ids[j + 1] : -100;
                b->trained += target;
            }
            b->n += s.n;
            if (d->documents_see_each_other && k + 1 < last) continue;
            for (int64_t j = begin; j < b->n; j++)
                b->begin[j] = (int32_t)begin, b->end[j] = (int32_t)b->n, b->pos[j] = (int32_t)(j - begin);
            begin = b->n, b->documents++;
        }
    }
}

void sft_batch_free(SftBatch *b) {
    free(b->ids), free(b->target), free(b->pos), free(b->begin), free(b->end);
    *b = (SftBatch){0};
}

// Reports
static void sft__show_sample(FILE *out, const SftDataset *d, const SftTokenizer *t, SftSample s) {
    bool colour = isatty(fileno(out));
    const char *open = colour ? "\033[1;32m" : "⟦", *close = colour ? "\033[0m" : "⟧";
    const uint8_t *trained = d->tokens.trained + s.begin;
    for (int64_t i = 0, end; i < s.n; i = end) {
        for (end = i + 1; end < s.n && trained[end] == trained[i]; end++) {}
        char *text = sft_decode(t, d->tokens.ids + s.begin + i, end - i, false, NULL);
        fprintf(out, "%s%s%s", trained[i] ? open : "", text, trained[i] ? close : "");
        free(text);
    }
    fprintf(out, "\n");
}

void sft_data_show(FILE *out, const SftDataset *d, const SftTokenizer *t, int samples) {
    const SftDataReport *r = &d->report;
    int64_t per_epoch = sft_steps_per_epoch(d, d->rows_per_step), steps = sft_total_steps(d);
    double share = 100 * (double)r->trained_tokens / (double)SFT_MAX(r->tokens, 1);
    const struct { int64_t n; const char *why; } dropped[] = {
        {r->bad, "malformed"}, {r->dropped_empty, "without text"},
        {r->dropped_no_answer, "no trained token in max_length"}, {r->dropped_too_long, "longer than max_length"}};
    fprintf(out, "rows      %" PRId64 " read", r->rows);
    for (int i = 0; i < SFT_COUNT(dropped); i++)
        if (dropped[i].n) fprintf(out, ", %" PRId64 " dropped: %s", dropped[i].n, dropped[i].why);
    fprintf(out, "\nsamples   %" PRId64, d->samples);
    if (r->truncated) fprintf(out, ", %" PRId64 " conversations cut short at max_length", r->truncated);
    if (r->cut) fprintf(out, ", %" PRId64 " documents cut into pieces", r->cut);
    if (d->packs != d->samples) fprintf(out, ", in %" PRId64 " packs", d->packs);
    fprintf(out, "; the longest row has %" PRId64 " tokens\n", d->longest);
    fprintf(out, "tokens    %" PRId64 ", %" PRId64 " of them trained (%.1f %%)\n", r->tokens, r->trained_tokens, share);
    fprintf(out, "steps     %" PRId64 " an epoch of %" PRId64 " rows each, %" PRId64 " in all\n", per_epoch,
            d->rows_per_step, steps);
    fflush(out);
    if (steps < 20)
        sft_note("only %" PRId64 " optimizer steps: the model will hardly change; more data, more num_train_epochs "
                 "or fewer rows a step make more", steps);
    for (int64_t i = 0; i < SFT_MIN(samples, d->samples); i++) {
        const SftSample *s = &d->sample[i];
        fprintf(out, "sample %" PRId64 ", %" PRId64 " tokens, %" PRId64 " trained:\n", i + 1, s->n, s->trained);
        sft__show_sample(out, d, t, *s);
    }
}

void sft_data_dump(const char *path, const SftDataset *d) {
    FILE *out = fopen(path, "w");
    if (!out) sft_die(SFT_BROKEN, "cannot write %s: %s", path, strerror(errno));
    for (int64_t i = 0; i < d->samples; i++) {
        const int32_t *ids = d->tokens.ids + d->sample[i].begin;
        const uint8_t *trained = d->tokens.trained + d->sample[i].begin;
        for (int labels = 0; labels < 2; labels++) {
            fputs(labels ? "], \"labels\": [" : "{\"input_ids\": [", out);
            for (int64_t j = 0; j < d->sample[i].n; j++)
                fprintf(out, "%s%d", j ? ", " : "", labels && !trained[j] ? -100 : ids[j]);
        }
        fputs("]}\n", out);
    }
    bool bad = ferror(out);
    if (fclose(out) || bad) sft_die(SFT_BROKEN, "cannot write %s: %s", path, strerror(errno));
}

json_t *sft_data_json(const SftDataset *d) {
    const SftDataReport *r = &d->report;
    int64_t steps = sft_steps_per_epoch(d, d->rows_per_step);
    json_t *dropped = json_pack("{s:I, s:I, s:I, s:I}",
        "malformed", (json_int_t)r->bad, "empty", (json_int_t)r->dropped_empty,
        "no_trained_token", (json_int_t)r->dropped_no_answer, "too_long", (json_int_t)r->dropped_too_long);
    return json_pack("{s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I}",
        "rows", (json_int_t)r->rows, "samples", (json_int_t)d->samples, "dropped", dropped,
        "truncated", (json_int_t)r->truncated, "cut", (json_int_t)r->cut, "packs", (json_int_t)d->packs,
        "tokens", (json_int_t)r->tokens, "trained_tokens", (json_int_t)r->trained_tokens,
        "steps_per_epoch", (json_int_t)steps);
}

/* ================================================================================================================
   [4] model: families, the tensor table, units, the memory plan, safetensors in and out
   ================================================================================================================
   From a folder's config.json to a checked SftArch; from that, through the tensor table, to units; and weights between
   files and units. A family is what Hugging Face calls model_type: it fixes the standard value of every key that
   config.json leaves out, and the names and layout of the tensors in the files.

   In: config.json, generation_config.json, *.safetensors. Out: SftArch, filled units, and files as the family has them.
   Invariants: a value that changes the mathematics is obeyed or refused; to load and to save in the same type gives the
   same bytes; no more than a few rows are in memory twice. Tests: test_model.c, test_safetensors.c, fuzz_safetensors.c.
   Pitfall: GPT-2 stores linear layers as [in, out] and q, k, v in one tensor; InternLM2 mixes their rows by kv head. */

// safetensors, reading. Names, shapes and ranges come from outside: all of it is checked before any of it is used.
static const struct { const char *name; int bits; } sft__dtypes[] = { // the first ones in the order of SftType
    {"F32", 32}, {"BF16", 16}, {"F16", 16}, {"F64", 64}, {"I64", 64}, {"I32", 32}, {"I16", 16}, {"I8", 8}, {"U64", 64},
    {"U32", 32}, {"U16", 16}, {"U8", 8}, {"BOOL", 8}, {"C64", 64}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8},
    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};

// Bytes that dtype and shape ask for, -1 if there is no such number.
static int64_t sft__tensor_bytes(const SftFileTensor *t) {
    int64_t bits = 0;
    for (int i = 0; i < SFT_COUNT(sft__dtypes); i++)
        if (!strcmp(t->dtype, sft__dtypes[i].name)) bits = sft__dtypes[i].bits;
    if (!bits) return -1;
    for (int i = 0; i < t->dims; i++)
        if (t->dim[i] < 0 || __builtin_mul_overflow(bits, t->dim[i], &bits)) return -1;
    return bits % 8 ? -1 : bits / 8;
}

static int sft__by_place(const void *a, const void *b) {
    const SftFileTensor *x = (const SftFileTensor *)a, *y = (const SftFileTensor *)b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); // what is empty comes first
}
static int sft__by_name(const void *a, const void *b) {
    return strcmp(((const SftFileTensor *)a)->name, ((const SftFileTensor *)b)->name);
}

// One entry of the header -> *t. Returns NULL, or what is wrong: a string to free.
static char *sft__safetensors_entry(SftFileTensor *t, const char *name, json_t *entry, const char *data, size_t size) {
    const char *dtype;
    json_t *shape, *dim;
    json_int_t from, to;
    int bad = json_unpack(entry, "{s:s, s:o, s:[I, I!]}", "dtype", &dtype, "shape", &shape, "data_offsets", &from, &to);
    if (bad || !json_is_array(shape))
        return sft_format("tensor %s: expected {\"dtype\", \"shape\", \"data_offsets\": [begin, end]}", name);
    size_t dims = json_array_size(shape), i;
    *t = (SftFileTensor){.name = name, .dtype = dtype, .dims = (int)SFT_MIN(dims, 8)};
    if (dims > 8) return sft_format("tensor %s: %zu dimensions; at most 8 are supported", name, dims);
    json_array_foreach(shape, i, dim) {
        t->dim[i] = json_is_integer(dim) ? json_integer_value(dim) : -1;
        if (t->dim[i] < 0) return sft_format("tensor %s: a dimension that is not a number from 0", name);
    }
    int64_t bytes = sft__tensor_bytes(t);
    if (bytes < 0) return sft_format("tensor %s: dtype %s with this shape has no size in bytes", name, t->dtype);
    if (from < 0 || to < from || (uint64_t)to > size)
        return sft_format("tensor %s: data_offsets [%lld, %lld], the file has %zu bytes of data", name, (long long)from,
                          (long long)to, size);
    if (to - from != bytes)
        return sft_format("tensor %s: its shape takes %lld bytes, data_offsets give %lld", name, (long long)bytes,
                          (long long)(to - from));
    t->data = data + from, t->bytes = (size_t)bytes;
    return NULL;
}

// f->map and f->bytes -> f->tensor, sorted by name. Returns NULL, or what is wrong: a string to free.
static char *sft__safetensors_parse(SftSafetensors *f) {
    uint64_t header = 0;
    if (f->bytes < 8) return sft_format("%zu bytes are too few for a safetensors file", f->bytes);
    for (int i = 0; i < 8; i++) header |= (uint64_t)(uint8_t)f->map[i] << 8 * i; // little endian, wherever this runs
    if (header > 100000000) return sft_format("a header of %zu bytes; at most 100000000 are allowed", (size_t)header);
    if (header > f->bytes - 8)
        return sft_format("a header of %zu bytes in a file of %zu: cut short?", (size_t)header, f->bytes);
    if (!header || f->map[8] != '{') return sft_format("the header does not begin with '{': not a safetensors file");
    json_error_t error;
    f->header = json_loadb(f->map + 8, header, JSON_REJECT_DUPLICATES, &error);
    if (!f->header) return sft_format("the header, byte %d: %s", error.position, error.text);
    const char *data = f->map + 8 + header, *end = f->map + f->bytes, *name, *key;
    json_t *entry, *value, *metadata = json_object_get(f->header, "__metadata__");
    if (metadata && !json_is_object(metadata)) return sft_format("__metadata__ is not an object");
    json_object_foreach(metadata, key, value)
        if (!json_is_string(value)) return sft_format("__metadata__: %s is not a string", key);
    f->tensor = SFT_NEW(SftFileTensor, json_object_size(f->header));
    json_object_foreach(f->header, name, entry) {
        if (entry == metadata) continue;
        char *wrong = sft__safetensors_entry(&f->tensor[f->n++], name, entry, data, (size_t)(end - data));
        if (wrong) return wrong;
    }
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, sft__by_place);
    for (int64_t i = 0; i < f->n; data += f->tensor[i++].bytes)
        if (f->tensor[i].data != data)
            return sft_format("tensor %s %s", f->tensor[i].name,
                              f->tensor[i].data < data ? "overlaps the one before" : "comes after a hole in the data");
    if (data != end) return sft_format("%zu bytes after the last tensor", (size_t)(end - data));
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, sft__by_name);
    return NULL;
}

SftSafetensors sft_safetensors_open(const char *path) {
    SftSafetensors f = {.path = sft_format("%s", path)};
    f.map = sft_map(path, &f.bytes);
    char *wrong = sft__safetensors_parse(&f);
    if (wrong) {
        sft_safetensors_close(&f);
        sft_die(SFT_BAD_INPUT, "%s: %s", path, wrong);
    }
    return f;
}

const SftFileTensor *sft_safetensors_find(const SftSafetensors *f, const char *name) {
    SftFileTensor key = {.name = name};
    return (const SftFileTensor *)bsearch(&key, f->tensor, (size_t)f->n, sizeof key, sft__by_name);
}

void sft_safetensors_close(SftSafetensors *f) {
    if (f->path) sft_unmap(f->map, f->bytes);
    json_decref(f->header);
    free(f->tensor), free(f->path);
    *f = (SftSafetensors){0};
}

// safetensors, writing
static char *sft__safetensors_header(const SftFileTensor *tensor, int64_t n, json_t *metadata) {
    json_t *header = json_object();
    if (metadata) json_object_set(header, "__metadata__", metadata);
    json_int_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t bytes = sft__tensor_bytes(&tensor[i]);
        bool twice = json_object_get(header, tensor[i].name) != NULL;
        if (bytes < 0 || twice)
            sft_die(SFT_BROKEN, "tensor %s cannot be written: %s", tensor[i].name,
                    twice ? "its name comes twice" : "its dtype or shape has no size");
        json_t *shape = json_array();
        for (int d = 0; d < tensor[i].dims; d++) json_array_append_new(shape, json_integer(tensor[i].dim[d]));
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor[i].dtype, "shape", shape, "data_offsets", at,
                                  at + bytes);
        json_object_set_new(header, tensor[i].name, entry);
        at += bytes;
    }
    char *text = json_dumps(header, JSON_COMPACT);
    if (!text) sft_die(SFT_BROKEN, "the name of a tensor is not UTF-8");
    json_decref(header);
    return text;
}

void sft_safetensors_write(const char *path, const SftFileTensor *tensor, int64_t n, json_t *metadata, SftFill *fill,
                           void *arg) {
    char *header = sft__safetensors_header(tensor, n, metadata), *temporary = sft_format("%s.tmp%d", path, getpid());
    uint64_t length = (strlen(header) + 7) / 8 * 8; // the data begins on a multiple of 8
    FILE *file = fopen(temporary, "wb");
    for (int i = 0; file && i < 8; i++) putc((int)(length >> 8 * i & 255), file);
    bool good = file && fprintf(file, "%-*s", (int)length, header) >= 0;
    for (int64_t i = 0; good && i < n; i++) {
        size_t bytes = (size_t)sft__tensor_bytes(&tensor[i]);
        if (tensor[i].data || !bytes) {
            good = !bytes || fwrite(tensor[i].data, 1, bytes, file) == bytes;
            continue;
        }
        int64_t rows = tensor[i].dims ? tensor[i].dim[0] : 1; // so many at a time that they are about 4 MB
        size_t row = bytes / (size_t)rows, step = SFT_MIN(SFT_MAX((size_t)(4 << 20) / row, 1), (size_t)rows);
        char *piece = (char *)sft_alloc(step * row);
        for (int64_t r = 0; good && r < rows; r += (int64_t)step) {
            size_t now = SFT_MIN(step, (size_t)(rows - r));
            fill(arg, i, r, (int64_t)now, piece);
            good = fwrite(piece, row, now, file) == now;
        }
        free(piece);
    }
    good = good && fflush(file) == 0 && fsync(fileno(file)) == 0;
    int reason = errno;
    if (file && fclose(file) && good) good = false, reason = errno;
    if (good && rename(temporary, path)) good = false, reason = errno;
    if (!good) {
        unlink(temporary);
        sft_die(SFT_BROKEN, "cannot write %s: %s", path, strerror(reason));
    }
    free(header), free(temporary);
}

/* Families. Where a file's tensor goes (`#` is the layer): its rows are those of up to three slots, one after another
   or, grouped, for each kv head its q heads, then k, then v. Transposed: the file holds [in, out]. */
typedef struct { const char *name; SftSlot slot[3]; bool transposed, grouped; } SftHfTensor;
#define SFT__SAME(name, slot) {name, {SFT_SLOT_##slot, SFT_SLOTS, SFT_SLOTS}, false, false}
#define SFT__CONV(name, slot) {name, {SFT_SLOT_##slot, SFT_SLOTS, SFT_SLOTS}, true, false}
#define SFT__QKV(name, p, conv, grouped) {name, {SFT_SLOT_q_##p, SFT_SLOT_k_##p, SFT_SLOT_v_##p}, conv, grouped}
// clang-format off
#define L "transformer.h.#."
static const SftHfTensor sft__gpt2[] = {
    SFT__SAME("transformer.wte.weight", wte),           SFT__SAME("transformer.wpe.weight", wpe),
    SFT__SAME(L "ln_1.weight", norm1_w),                SFT__SAME(L "ln_1.bias", norm1_b),
    SFT__QKV(L "attn.c_attn.weight", w, true, false),   SFT__QKV(L "attn.c_attn.bias", b, false, false),
    SFT__CONV(L "attn.c_proj.weight", o_w),             SFT__SAME(L "attn.c_proj.bias", o_b),
    SFT__SAME(L "ln_2.weight", norm2_w),                SFT__SAME(L "ln_2.bias", norm2_b),
    SFT__CONV(L "mlp.c_fc.weight", up_w),               SFT__SAME(L "mlp.c_fc.bias", up_b),
    SFT__CONV(L "mlp.c_proj.weight", down_w),           SFT__SAME(L "mlp.c_proj.bias", down_b),
    SFT__SAME("transformer.ln_f.weight", norm_w),       SFT__SAME("transformer.ln_f.bias", norm_b),
    SFT__SAME("lm_head.weight", head_w)};
#undef L
#define L "model.layers.#."
static const SftHfTensor sft__llama[] = {
    SFT__SAME("model.embed_tokens.weight", wte),        SFT__SAME(L "input_layernorm.weight", norm1_w),
    SFT__SAME(L "self_attn.q_proj.weight", q_w),        SFT__SAME(L "self_attn.q_proj.bias", q_b),
    SFT__SAME(L "self_attn.k_proj.weight", k_w),        SFT__SAME(L "self_attn.k_proj.bias", k_b),
    SFT__SAME(L "self_attn.v_proj.weight", v_w),        SFT__SAME(L "self_attn.v_proj.bias", v_b),
    SFT__SAME(L "self_attn.o_proj.weight", o_w),        SFT__SAME(L "self_attn.o_proj.bias", o_b),
    SFT__SAME(L "self_attn.q_norm.weight", q_norm),     SFT__SAME(L "self_attn.k_norm.weight", k_norm),
    SFT__SAME(L "post_attention_layernorm.weight", norm2_w),
    SFT__SAME(L "mlp.gate_proj.weight", gate_w),        SFT__SAME(L "mlp.gate_proj.bias", gate_b),
    SFT__SAME(L "mlp.up_proj.weight", up_w),            SFT__SAME(L "mlp.up_proj.bias", up_b),
    SFT__SAME(L "mlp.down_proj.weight", down_w),        SFT__SAME(L "mlp.down_proj.bias", down_b),
    SFT__SAME("model.norm.weight", norm_w),             SFT__SAME("lm_head.weight", head_w)};
static const SftHfTensor sft__internlm2[] = {
    SFT__SAME("model.tok_embeddings.weight", wte),      SFT__SAME(L "attention_norm.weight", norm1_w),
    SFT__QKV(L "attention.wqkv.weight", w, false, true), SFT__QKV(L "attention.wqkv.bias", b, false, true),
    SFT__SAME(L "attention.wo.weight", o_w),            SFT__SAME(L "attention.wo.bias", o_b),
    SFT__SAME(L "ffn_norm.weight", norm2_w),            SFT__SAME(L "feed_forward.w1.weight", gate_w),
    SFT__SAME(L "feed_forward.w3.weight", up_w),        SFT__SAME(L "feed_forward.w2.weight", down_w),
    SFT__SAME("model.norm.weight", norm_w),             SFT__SAME("output.weight", head_w)};
#undef L
// clang-format on

/* Standard values: those of the classes in transformers 5.24, and of InternLM2's own configuration_internlm2.py. A key
   that a family does not list, it does not have. Single quotes stand for double ones. */
#define SFT__ALL "'num_hidden_layers':32,'num_attention_heads':32,'hidden_size':4096,'hidden_act':'silu'," \
                 "'initializer_range':0.02,'rms_norm_eps':1e-6,'tie_word_embeddings':false,"
#define SFT__QWEN SFT__ALL "'vocab_size':151936,'intermediate_size':22016,'num_key_value_heads':32," \
                           "'max_position_embeddings':32768,'bos_token_id':null,'eos_token_id':null," \
                           "'use_sliding_window':false,'sliding_window':4096,'max_window_layers':28,'layer_types':null,"
static const struct SftFamily {
    const char *name;
    const SftHfTensor *tensor;
    int tensors;
    bool gpt2, qkv_bias, qk_norm;
    const char *standard;
} sft__families[] = {
    {"gpt2", sft__gpt2, SFT_COUNT(sft__gpt2), true, true, false,
     "{'vocab_size':50257,'n_embd':768,'n_inner':null,'n_layer':12,'n_head':12,'n_positions':1024,'bos_token_id':50256,"
     "'eos_token_id':50256,'activation_function':'gelu_new','layer_norm_epsilon':1e-5,'tie_word_embeddings':true,"
     "'initializer_range':0.02,'scale_attn_weights':true,'scale_attn_by_inverse_layer_idx':false}"},
    {"llama", sft__llama, SFT_COUNT(sft__llama), false, false, false,
     "{" SFT__ALL "'vocab_size':32000,'intermediate_size':11008,'num_key_value_heads':null,'head_dim':null,"
     "'max_position_embeddings':2048,'bos_token_id':1,'eos_token_id':2,'attention_bias':false,'mlp_bias':false}"},
    {"mistral", sft__llama, SFT_COUNT(sft__llama), false, false, false,
     "{" SFT__ALL "'vocab_size':32000,'intermediate_size':14336,'num_key_value_heads':8,'head_dim':null,"
     "'max_position_embeddings':131072,'bos_token_id':1,'eos_token_id':2,'sliding_window':4096}"},
    {"qwen2", sft__llama, SFT_COUNT(sft__llama), false, true, false, "{" SFT__QWEN "'head_dim':null}"},
    {"qwen3", sft__llama, SFT_COUNT(sft__llama), false, false, true,
     "{" SFT__QWEN "'head_dim':128,'attention_bias':false}"},
    {"internlm2", sft__internlm2, SFT_COUNT(sft__internlm2), false, false, false,
     "{" SFT__ALL "'vocab_size':103168,'intermediate_size':11008,'num_key_value_heads':null,"
     "'max_position_embeddings':2048,'bos_token_id':1,'eos_token_id':2,'bias':true}"}};

static const struct SftFamily *sft__family(const char *name) {
    for (int i = 0; i < SFT_COUNT(sft__families); i++)
        if (!strcmp(sft__families[i].name, name)) return &sft__families[i];
    return NULL;
}

// Reading config.json: a key's value is the file's, else the family's standard one.
typedef struct { const char *path, *family; json_t *json, *standard; } SftKeys;

SFT_NORETURN static void sft__bad_key(const SftKeys *k, const char *key, json_t *value, const char *expected) {
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    sft_die(SFT_BAD_INPUT, "%s: \"%s\" is %.200s: expected %s", k->path, key, text ? text : "missing", expected);
}

// GPT-2 has its own words for what the others call *key. NULL: null, or neither in the file nor a key of the family.
static json_t *sft__key(const SftKeys *k, const char **key) {
    static const char *gpt2[][2] = {
        {"hidden_size", "n_embd"}, {"intermediate_size", "n_inner"}, {"num_hidden_layers", "n_layer"},
        {"num_attention_heads", "n_head"}, {"hidden_act", "activation_function"},
        {"rms_norm_eps", "layer_norm_epsilon"}, {"max_position_embeddings", "n_positions"}};
    for (int i = 0; i < SFT_COUNT(gpt2); i++)
        if (!strcmp(*key, gpt2[i][0]) && json_object_get(k->standard, gpt2[i][1])) *key = gpt2[i][1];
    json_t *value = json_object_get(k->json, *key);
    value = value ? value : json_object_get(k->standard, *key);
    return json_is_null(value) ? NULL : value;
}

// A number from low to high, `fallback` where there is none. A key that the family does not have must say the same.
static double sft__number(const SftKeys *k, const char *key, double fallback, double low, double high, bool whole) {
    json_t *value = sft__key(k, &key);
    double x = value ? json_number_value(value) : fallback;
    char words[160];
    snprintf(words, sizeof words, "%s from %.10g to %.10g", whole ? "a whole number" : "a number", low, high);
    bool kind = !value || (whole ? json_is_integer(value) : json_is_number(value));
    if (!kind || !(x >= low && x <= high)) sft__bad_key(k, key, value, words);
    snprintf(words, sizeof words, "%.10g, as every %s model", fallback, k->family);
    if (x != fallback && k->standard && !json_object_get(k->standard, key)) sft__bad_key(k, key, value, words);
    return x;
}
static int64_t sft__whole(const SftKeys *k, const char *key, int64_t fallback, int64_t high) {
    return (int64_t)sft__number(k, key, (double)fallback, 1, (double)high, true);
}
static bool sft__flag(const SftKeys *k, const char *key, bool fallback) {
    json_t *value = sft__key(k, &key);
    if (value && !json_is_boolean(value)) sft__bad_key(k, key, value, "true or false");
    bool flag = value ? json_is_true(value) : fallback;
    if (flag != fallback && k->standard && !json_object_get(k->standard, key))
        sft__bad_key(k, key, value, fallback ? "true" : "false");
    return flag;
}

// RoPE as transformers resolves it: rope_scaling, else rope_parameters; inside them rope_theta and rope_type ("type").
static void sft__arch_rope(SftArch *a, const SftKeys *k) {
    static const char *types[] = {NULL, "default", "linear", "dynamic", "llama3", "yarn"}; // of SftRopeType
    const char *key = "rope_scaling", *inner, *original = "original_max_position_embeddings";
    json_t *rope = sft__key(k, &key), *value;
    if (!rope || (json_is_object(rope) && !json_object_size(rope))) key = "rope_parameters", rope = sft__key(k, &key);
    if (rope && !json_is_object(rope)) sft__bad_key(k, key, rope, "an object");
    json_object_foreach(rope, inner, value)
        if (json_is_object(value)) sft__bad_key(k, inner, value, "RoPE parameters that hold for all layers");
    SftKeys r = {k->path, k->family, rope, NULL}, top = {k->path, k->family, k->json, NULL};
    double theta = sft__number(&top, "rope_theta", 10000, 1.001, 1e30, false);
    a->rope_theta = sft__number(&r, "rope_theta", theta, 1.001, 1e30, false);
    sft__number(&r, "partial_rotary_factor", sft__number(&top, "partial_rotary_factor", 1, 1, 1, false), 1, 1, false);
    json_t *type = json_object_get(rope, json_object_get(rope, "rope_type") ? "rope_type" : "type");
    const char *name = type ? json_string_value(type) : "default";
    for (int i = SFT_ROPE_PLAIN; i <= SFT_ROPE_YARN; i++)
        if (name && !strcmp(name, types[i])) a->rope = (SftRopeType)i;
    if (!a->rope) sft__bad_key(k, "rope_type", type, "\"default\", \"linear\", \"dynamic\", \"llama3\" or \"yarn\"");
    a->rope_factor = a->rope_attention = 1;
    a->rope_original = (double)a->P;
    bool yarn = a->rope == SFT_ROPE_YARN;
    if (yarn || a->rope == SFT_ROPE_LLAMA3) // written beside the RoPE parameters it wins, as in transformers
        for (int i = 0; i < 2; i++)
            a->rope_original = sft__number(i ? &top : &r, original, a->rope_original, 1, 1e12, true);
    if (a->rope != SFT_ROPE_PLAIN)
        a->rope_factor = sft__number(&r, "factor", yarn ? (double)a->P / a->rope_original : 0, 1e-3, 1e6, false);
    if (a->rope == SFT_ROPE_DYNAMIC && a->D <= 2) sft__bad_key(k, "rope_type", type, "another one for heads of size 2");
    if (a->rope == SFT_ROPE_LLAMA3) {
        a->rope_low = sft__number(&r, "low_freq_factor", 0, 1e-6, 1e6, false);
        a->rope_high = sft__number(&r, "high_freq_factor", 0, 1e-6, 1e6, false);
        if (a->rope_high <= a->rope_low)
            sft__bad_key(k, "high_freq_factor", json_object_get(rope, "high_freq_factor"), "more than low_freq_factor");
    }
    if (!yarn) return;
    double mscale = sft__number(&r, "mscale", 0, 0, 1e6, false);
    double all = sft__number(&r, "mscale_all_dim", 0, 0, 1e6, false);
    double grows = a->rope_factor > 1 ? 0.1 * log(a->rope_factor) : 0; // YaRN (Peng et al. 2023), equation 22
    a->rope_attention = mscale && all ? (mscale * grows + 1) / (all * grows + 1) : grows + 1;
    a->rope_attention = sft__number(&r, "attention_factor", a->rope_attention, 1e-6, 1e6, false);
    a->rope_beta_fast = sft__number(&r, "beta_fast", 32, 1e-6, 1e6, false);
    a->rope_beta_slow = sft__number(&r, "beta_slow", 1, 1e-6, 1e6, false);
    a->rope_truncate = sft__flag(&r, "truncate", true);
}

// Which layers have a sliding window: all of them (Mistral), those from one on (Qwen), or none.
static void sft__arch_window(SftArch *a, const SftKeys *k) {
    bool qwen = json_object_get(k->standard, "max_window_layers") != NULL;
    bool on = qwen ? sft__flag(k, "use_sliding_window", false) : json_object_get(k->standard, "sliding_window") != NULL;
    if (on) a->window = (int64_t)sft__number(k, "sliding_window", 0, 0, 1 << 30, true);
    if (on && qwen) a->window_from = (int64_t)sft__number(k, "max_window_layers", 0, 0, 1 << 30, true);
    const char *key = "layer_types";
    json_t *types = sft__key(k, &key), *type;
    if (!types) return;
    if (json_array_size(types) != (size_t)a->L) sft__bad_key(k, key, types, "a list with an entry for each layer");
    int64_t from = a->L; // the first layer that slides
    size_t i;
    json_array_foreach(types, i, type) {
        const char *name = json_is_string(type) ? json_string_value(type) : "";
        bool slides = !strcmp(name, "sliding_attention");
        if (slides && from == a->L) from = (int64_t)i;
        if (!slides && (from < a->L || strcmp(name, "full_attention")))
            sft__bad_key(k, key, types, "\"full_attention\" layers, then \"sliding_attention\" layers");
    }
    if (qwen && on) a->window_from = from;
    if (from != (a->window ? SFT_MIN(a->window_from, a->L) : a->L))
        sft__bad_key(k, key, types, "what sliding_window says");
}

static void sft__arch_eos(SftArch *a, const SftKeys *k) { // adds the ids that are new
    const char *key = "eos_token_id";
    json_t *value = sft__key(k, &key);
    for (size_t i = 0; i < (json_is_array(value) ? json_array_size(value) : value != NULL); i++) {
        json_t *id = json_is_array(value) ? json_array_get(value, i) : value;
        json_int_t x = json_integer_value(id);
        if (!json_is_integer(id) || x < 0 || x > INT32_MAX) sft__bad_key(k, key, value, "a token id or a list of them");
        bool there = false;
        for (int j = 0; j < a->neos; j++) there |= a->eos[j] == x;
        if (!there && a->neos == SFT_COUNT(a->eos)) sft__bad_key(k, key, value, "at most 8 different ids");
        if (!there) a->eos[a->neos++] = (int32_t)x;
    }
}

// What would change the result and is not done here, whatever the family.
static void sft__arch_refuse(const SftKeys *k) {
    static const char *keys[] = {
        "add_cross_attention", "is_encoder_decoder", "num_experts", "num_local_experts", "n_routed_experts",
        "no_rope_layers", "attn_logit_softcapping", "final_logit_softcapping", "attn_temperature_tuning", "logit_scale",
        "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "use_mrope"};
    json_t *value = json_object_get(k->json, "quantization_config");
    if (value && !json_is_null(value)) sft__bad_key(k, "quantization_config", value, "weights in fp32, bf16 or fp16");
    for (int i = 0; i < SFT_COUNT(keys); i++) {
        value = json_object_get(k->json, keys[i]);
        bool zero = json_is_number(value) && !json_number_value(value);
        bool off = !value || json_is_null(value) || json_is_false(value) || zero;
        if (!off) sft__bad_key(k, keys[i], value, "it to be off: this is not supported");
    }
}

static void sft__arch_sizes(SftArch *a, const SftKeys *k) {
    a->V = a->V_source = sft__whole(k, "vocab_size", 0, 1 << 28);
    a->C = sft__whole(k, "hidden_size", 0, 1 << 24);
    a->L = sft__whole(k, "num_hidden_layers", 0, 1 << 16);
    a->P = sft__whole(k, "max_position_embeddings", 0, 1 << 30);
    a->H = sft__whole(k, "num_attention_heads", 0, 1 << 16);
    a->K = sft__whole(k, "num_key_value_heads", a->H, 1 << 16);
    a->F = sft__whole(k, "intermediate_size", 4 * a->C, 1 << 28);
    a->D = (int64_t)sft__number(k, "head_dim", (double)(a->C / a->H), 0, 1 << 24, true);
    const char *key = "head_dim";
    if (a->H % a->K)
        sft_die(SFT_BAD_INPUT, "%s: %lld attention heads cannot share %lld key/value heads: expected a multiple",
                k->path, (long long)a->H, (long long)a->K);
    if (!sft__key(k, &key) && a->C % a->H)
        sft_die(SFT_BAD_INPUT, "%s: a hidden size of %lld does not divide into %lld heads", k->path, (long long)a->C,
                (long long)a->H);
    if (a->D < 1 || (a->D % 2 && !a->learned_positions))
        sft_die(SFT_BAD_INPUT, "%s: heads of size %lld: expected a positive even one (RoPE)", k->path, (long long)a->D);
    double block = (double)a->C * (double)(a->H * a->D + a->F), ends = (double)(a->V + a->P) * (double)a->C;
    if (block * (double)a->L + ends > 1e15) sft_die(SFT_BAD_INPUT, "%s: more than 1e15 parameters", k->path);
}

SftArch sft_arch(const char *folder) {
    char path[4096], names[256] = "";
    SftArch arch = {.bos = -1}, *a = &arch;
    sft_path(path, folder, "config.json");
    if (!sft_exists(path)) sft_die(SFT_BAD_INPUT, "%s is not there: expected a Hugging Face model folder", path);
    a->json = sft_json_file(path);
    const char *key = "model_type", *type = json_string_value(json_object_get(a->json, key));
    const struct SftFamily *family = type ? sft__family(type) : NULL;
    SftKeys keys = {path, type, a->json, NULL}, *k = &keys;
    for (int i = 0; i < SFT_COUNT(sft__families); i++)
        strcat(strcat(names, i ? ", " : "one of "), sft__families[i].name);
    if (!family) sft__bad_key(k, key, json_object_get(a->json, key), names);
    snprintf(a->family, sizeof a->family, "%s", type);
    char *standard = sft_format("%s", family->standard);
    for (char *c = standard; *c; c++) *c = *c == '\'' ? '"' : *c;
    k->standard = json_loads(standard, 0, NULL);
    free(standard);
    sft__arch_refuse(k);
    a->layernorm = a->learned_positions = family->gpt2;
    a->gated = !family->gpt2;
    sft__arch_sizes(a, k);
    bool bias = sft__flag(k, "bias", false) || (!family->qkv_bias && sft__flag(k, "attention_bias", false));
    a->q_bias = family->qkv_bias || bias;
    a->o_bias = family->gpt2 || bias;
    a->mlp_bias = family->gpt2 || sft__flag(k, "mlp_bias", false);
    a->qk_norm = family->qk_norm;
    a->tied = sft__flag(k, "tie_word_embeddings", false);
    a->norm_eps = (float)sft__number(k, "rms_norm_eps", 0, 0, 1, false);
    a->init_std = sft__number(k, "initializer_range", 0, 0, 100, false);
    a->attn_scale = sft__flag(k, "scale_attn_weights", true) ? 1 / sqrtf((float)a->D) : 1;
    a->scale_by_layer = sft__flag(k, "scale_attn_by_inverse_layer_idx", false);
    key = "hidden_act";
    json_t *value = sft__key(k, &key);
    const char *act = json_is_string(value) ? json_string_value(value) : "";
    bool tanh = !strcmp(act, "gelu_new") || !strcmp(act, "gelu_pytorch_tanh") || !strcmp(act, "gelu_fast");
    if (a->gated && strcmp(act, "silu") && strcmp(act, "swish")) sft__bad_key(k, key, value, "\"silu\"");
    if (!a->gated && !tanh && strcmp(act, "gelu"))
        sft__bad_key(k, key, value, "\"gelu_new\", \"gelu_pytorch_tanh\" or \"gelu\"");
    a->act = a->gated ? SFT_LINEAR : tanh ? SFT_GELU_TANH : SFT_GELU;
    if (!a->learned_positions) sft__arch_rope(a, k);
    sft__arch_window(a, k);
    key = "bos_token_id";
    if (sft__key(k, &key)) a->bos = (int32_t)sft__number(k, key, 0, 0, INT32_MAX, true);
    sft__arch_eos(a, k);
    key = json_object_get(a->json, "dtype") ? "dtype" : "torch_dtype";
    const char *dtype = json_string_value(json_object_get(a->json, key));
    if (dtype) a->source_type = !strcmp(dtype, "bfloat16") ? SFT_BF16 : !strcmp(dtype, "float16") ? SFT_F16 : SFT_F32;
    json_decref(k->standard);
    if (sft_exists(sft_path(path, folder, "generation_config.json"))) {
        SftKeys more = {path, type, sft_json_file(path), NULL};
        sft__arch_eos(a, &more);
        json_decref(more.json);
    }
    return arch;
}

void sft_arch_free(SftArch *a) {
    json_decref(a->json);
    *a = (SftArch){0};
}

void sft_resize_vocab(SftArch *a, int64_t tokens, bool allowed) {
    if (tokens <= a->V) return;
    if (!allowed)
        sft_die(SFT_BAD_INPUT, "the tokenizer has %lld ids and the model's embedding %lld rows: set \"resize_vocab\": "
                "true to add rows, or use the model's own tokenizer", (long long)tokens, (long long)a->V);
    a->V = tokens;
    json_object_set_new(a->json, "vocab_size", json_integer(tokens));
}

// The tensor table
SftSlotInfo sft_slot(const SftArch *a, SftSlot slot) {
    switch (slot) {
#define X(slot, unit, rows, cols, init, decay, lora) \
    case SFT_SLOT_##slot: return (SftSlotInfo){#slot, unit, rows, cols, init, decay, lora};
        SFT_TENSORS(X)
#undef X
    default: return (SftSlotInfo){0};
    }
}

const char *sft_slot_name(SftSlot slot) {
#define X(slot, ...) #slot,
    static const char *names[] = {SFT_TENSORS(X)};
#undef X
    return names[slot];
}

int64_t sft_parameters(const SftArch *a) {
    int64_t n = 0;
    for (int s = 0; s < SFT_SLOTS; s++) {
        SftSlotInfo t = sft_slot(a, (SftSlot)s);
        n += t.rows * t.cols * (t.unit == SFT_BLOCK ? a->L : 1);
    }
    return n;
}

static const char *sft__hf_name(const SftHfTensor *t, int64_t layer, char out[256]) {
    const char *mark = strchr(t->name, '#');
    if (!mark) snprintf(out, 256, "%s", t->name);
    else snprintf(out, 256, "%.*s%lld%s", (int)(mark - t->name), t->name, (long long)layer, mark + 1);
    return out;
}

const char *sft_hf_name(const SftArch *a, SftSlot slot, int64_t layer, char out[256]) {
    const struct SftFamily *family = sft__family(a->family);
    out[0] = 0;
    for (int i = 0; i < family->tensors; i++)
        for (int part = 0; part < 3; part++)
            if (family->tensor[i].slot[part] == slot) sft__hf_name(&family->tensor[i], layer, out);
    return out;
}

// Units
void sft_units_open(SftModel *m) {
    const SftArch *a = &m->arch;
    SftArena *mem = m->mem;
    size_t size = sft_type_size(m->type);
    double residual = json_number_value(json_object_get(a->json, "resid_pdrop"));
    double attention = json_number_value(json_object_get(a->json, "attention_dropout"));
    if (m->trains && mem[SFT_MEM_WEIGHTS].base && (residual > 0 || attention > 0))
        sft_note("config.json's dropout is not applied");
    m->units = a->L + 2;
    m->unit = SFT_NEW(SftUnit, m->units);
    for (int64_t i = 0; i < m->units; i++) {
        SftUnit *u = &m->unit[i];
        u->kind = i == 0 ? SFT_EMBED : i <= a->L ? SFT_BLOCK : SFT_FINAL;
        for (int s = 0; s < SFT_SLOTS; s++) {
            SftSlotInfo t = sft_slot(a, (SftSlot)s);
            u->offset[s] = t.unit == u->kind && t.rows ? u->count : -1;
            if (u->offset[s] >= 0) u->count += t.rows * t.cols;
            if (u->offset[s] >= 0 && t.decay) u->decayed = u->count;
        }
        u->weights = sft_take(&mem[SFT_MEM_WEIGHTS], (size_t)u->count * size);
        if (m->trains) {
            size_t bytes = (size_t)u->count * 4;
            u->master = (float *)(m->type == SFT_F32 ? u->weights : sft_take(&mem[SFT_MEM_MASTER], bytes));
            u->grad = (float *)sft_take(&mem[SFT_MEM_GRADS], bytes);
            u->m = (float *)sft_take(&mem[SFT_MEM_MOMENTS], bytes);
            u->v = (float *)sft_take(&mem[SFT_MEM_MOMENTS], bytes);
        }
        for (int s = 0; s < SFT_SLOTS; s++) {
            if (u->offset[s] < 0) continue;
            SftSlotInfo t = sft_slot(a, (SftSlot)s);
            char *w = u->weights ? (char *)u->weights + (size_t)u->offset[s] * size : NULL;
            float *dw = u->grad ? u->grad + u->offset[s] : NULL;
            *sft_weight(&u->w, (SftSlot)s) = sft_tensor(w, m->type, t.rows, t.cols, 1);
            if (m->trains) *sft_weight(&u->dw, (SftSlot)s) = sft_tensor(dw, SFT_F32, t.rows, t.cols, 1);
        }
    }
}

void sft_units_close(SftModel *m) {
    free(m->unit);
    m->unit = NULL;
}

/* Between files and units. The numbers of a unit are exact in its master, or, where nothing is trained, in its weights.
   The host works on them there, or, where it cannot, in m->room, one unit at a time: sft__fetch before it reads them,
   sft__put after it has written them all. */
static SftCtx sft__context(const SftModel *m) {
    return (SftCtx){.ops = m->ops, .work = (SftArena *)&m->mem[SFT_MEM_WORK]};
}
// Where the host reads what lies at `from` when wait returns: there, or, if that is remote, in `room`.
static const void *sft__read(SftCtx *c, void *room, const void *from, size_t bytes) {
    if (!c->ops->remote || sft_planning(c)) return from;
    c->ops->download(c, room, from, bytes);
    return room;
}
static SftTensor sft__exact(const SftModel *m, const SftUnit *u) { // [count]
    return sft_tensor(m->trains ? (void *)u->master : u->weights, m->trains ? SFT_F32 : m->type, u->count, 1, 1);
}
static SftTensor sft__on_host(const SftModel *m, const SftUnit *u) {
    SftTensor exact = sft__exact(m, u);
    if (m->ops->remote) exact.data = m->room;
    return exact;
}
static void sft__fetch(const SftModel *m, const SftUnit *u) {
    SftCtx c = sft__context(m);
    SftTensor exact = sft__exact(m, u);
    sft__read(&c, m->room, exact.data, (size_t)u->count * sft_type_size(exact.type));
    m->ops->wait(&c);
}
static void sft__put(const SftModel *m, SftUnit *u) {
    SftCtx c = sft__context(m);
    SftTensor exact = sft__exact(m, u), weights = sft_tensor(u->weights, m->type, u->count, 1, 1);
    m->ops->upload(&c, exact.data, sft__on_host(m, u).data, (size_t)u->count * sft_type_size(exact.type));
    if (exact.data != u->weights) m->ops->convert(&c, weights, exact);
}

// Shape of a file's tensor as [out, in]; false if the model has none of it in this kind of unit.
static bool sft__file_shape(const SftArch *a, const SftHfTensor *t, SftUnitKind kind, int64_t *rows, int64_t *cols) {
    *rows = 0;
    for (int part = 0; part < 3 && t->slot[part] != SFT_SLOTS; part++) {
        SftSlotInfo s = sft_slot(a, t->slot[part]);
        if (s.unit == kind) *rows += s.rows, *cols = s.cols;
    }
    return *rows > 0;
}

// Row r of a file's tensor, as [out, in], is row *row of the slot of *part, and so on for as many rows as are returned.
static int64_t sft__part(const SftArch *a, const SftHfTensor *t, int64_t r, int *part, int64_t *row) {
    *part = 0, *row = r;
    if (t->slot[1] == SFT_SLOTS) return INT64_MAX;
    int64_t heads = t->grouped ? 1 : a->K, kv = heads * a->D, q = a->H / a->K * kv; // rows of a group: q, kv, kv
    int64_t group = r / (q + 2 * kv), in = r % (q + 2 * kv);
    *part = in < q ? 0 : in < q + kv ? 1 : 2;
    int64_t first = *part == 0 ? 0 : q + (*part - 1) * kv, size = *part == 0 ? q : kv;
    *row = group * size + in - first;
    return first + size - in;
}

// out = in, from one type to another
static void sft__copy_as(void *out, SftType to, const void *in, SftType from, int64_t n) {
    if (to == from) memcpy(out, in, (size_t)n * sft_type_size(to));
    else if (to == SFT_F32) sft_to_f32((float *)out, in, from, n);
    else
        for (int64_t i = 0; i < n; i += 256) {
            float piece[256];
            int64_t now = SFT_MIN(256, n - i);
            sft_to_f32(piece, (const char *)in + (size_t)i * sft_type_size(from), from, now);
            sft_from_f32((char *)out + (size_t)i * sft_type_size(to), to, piece, now);
        }
}

// x[n] <-> every stride-th element of p from `at` on, n <= 16
static void sft__column(float *x, void *p, SftType type, int64_t at, int64_t stride, int64_t n, bool store) {
    uint16_t h[16] = {0}, *p16 = (uint16_t *)p;
    float *p32 = (float *)p;
    if (store && type != SFT_F32) sft_from_f32(h, type, x, n);
    for (int64_t j = 0, k = at; j < n; j++, k += stride) {
        if (type == SFT_F32 && store) p32[k] = x[j];
        else if (type == SFT_F32) x[j] = p32[k];
        else if (store) p16[k] = h[j];
        else h[j] = p16[k];
    }
    if (!store && type != SFT_F32) sft_to_f32(x, h, type, n);
}

/* Rows first .. first+n of a file's tensor of `type`, lying at `file`, from (save) or to the slots of unit u. Threads
   take 16 rows of [out, in] each: in the file one after another, or, transposed, 16 neighbours in every row. */
static void sft__exchange(const SftModel *m, const SftUnit *u, const SftHfTensor *t, char *file, SftType type,
                          int64_t first, int64_t n, bool save) {
    const SftTensor exact = sft__on_host(m, u);
    size_t fs = sft_type_size(type), es = sft_type_size(exact.type);
    int64_t rows = 0, cols = 1;
    sft__file_shape(&m->arch, t, u->kind, &rows, &cols);
    int64_t begin = t->transposed ? 0 : first, end = t->transposed ? rows : first + n;
#pragma omp parallel for schedule(dynamic, 4) if ((end - begin) * cols > 65536)
    for (int64_t block = begin; block < end; block += 16)
        for (int64_t r = block, now; r < SFT_MIN(block + 16, end); r += now) {
            int part;
            int64_t row, left = sft__part(&m->arch, t, r, &part, &row), at;
            now = SFT_MIN(left, SFT_MIN(block + 16, end) - r);
            at = u->offset[t->slot[part]] + row * cols;
            char *e = (char *)exact.data + (size_t)at * es, *f = file + (size_t)((r - begin) * cols) * fs;
            if (!t->transposed && save) sft__copy_as(f, type, e, exact.type, now * cols);
            if (!t->transposed && !save) sft__copy_as(e, exact.type, f, type, now * cols);
            for (int64_t c = 0; t->transposed && c < n; c++) {
                float x[16];
                f = file + (size_t)(c * rows + r) * fs;
                if (!save) sft_to_f32(x, f, type, now);
                sft__column(x, exact.data, exact.type, at + first + c, cols, now, !save);
                if (save) sft_from_f32(f, type, x, now);
            }
        }
}

// Loading: a folder's files, and which of them holds what.
typedef struct { SftSafetensors *file; size_t files; json_t *map, *used; char index[4096]; } SftSource;

static SftSource sft__source_open(const char *folder) {
    char path[4096];
    SftSource s = {.used = json_object()};
    if (sft_exists(sft_path(path, folder, "model.safetensors"))) {
        s.file = SFT_NEW(SftSafetensors, 1);
        s.file[s.files++] = sft_safetensors_open(path);
        return s;
    }
    if (!sft_exists(sft_path(s.index, folder, "model.safetensors.index.json"))) {
        if (sft_exists(sft_path(path, folder, "pytorch_model.bin")) ||
            sft_exists(sft_path(path, folder, "pytorch_model.bin.index.json")))
            sft_die(SFT_BAD_INPUT, "%s has no model.safetensors, only pytorch_model.bin; convert it in Python: "
                    "from transformers import AutoModelForCausalLM as M; M.from_pretrained(\"%s\", dtype=\"auto\")"
                    ".save_pretrained(\"NEW_FOLDER\") and copy the tokenizer's files there", folder, folder);
        sft_die(SFT_BAD_INPUT, "%s has no model.safetensors and no model.safetensors.index.json", folder);
    }
    json_t *json = sft_json_file(s.index), *file;
    s.map = json_incref(json_object_get(json, "weight_map"));
    json_decref(json);
    if (!json_is_object(s.map)) sft_die(SFT_BAD_INPUT, "%s: expected an object \"weight_map\"", s.index);
    s.file = SFT_NEW(SftSafetensors, json_object_size(s.map));
    const char *name;
    json_object_foreach(s.map, name, file) { // each entry becomes the number of its file
        const char *shard = json_string_value(file);
        if (!shard || strchr(shard, '/')) sft_die(SFT_BAD_INPUT, "%s: %s: expected a file beside it", s.index, name);
        size_t i = 0;
        sft_path(path, folder, shard);
        while (i < s.files && strcmp(s.file[i].path, path)) i++;
        if (i == s.files) s.file[s.files++] = sft_safetensors_open(path);
        if (!sft_safetensors_find(&s.file[i], name))
            sft_die(SFT_BAD_INPUT, "%s: tensor %s is not in %s", s.index, name, shard);
        json_object_set_new(s.map, name, json_integer((json_int_t)i));
    }
    return s;
}

static void sft__source_close(SftSource *s) {
    for (size_t i = 0; i < s->files; i++) sft_safetensors_close(&s->file[i]);
    free(s->file), json_decref(s->map), json_decref(s->used);
}

// A tensor by its full name, or without "model." or "transformer.": GPT-2 on the hub, models saved without their head.
static const SftFileTensor *sft__source_find(SftSource *s, const char *name) {
    bool prefix = !strncmp(name, "model.", 6) || !strncmp(name, "transformer.", 12);
    for (int cut = 0; cut <= prefix; cut++) {
        const char *key = cut ? strchr(name, '.') + 1 : name;
        json_t *file = json_object_get(s->map, key);
        if (s->map && !file) continue;
        const SftFileTensor *t = sft_safetensors_find(&s->file[json_integer_value(file)], key);
        if (!t) continue;
        json_object_set_new(s->used, key, json_true());
        return t;
    }
    sft_die(SFT_BAD_INPUT, "%s: tensor %s is missing", s->map ? s->index : s->file[0].path, name);
}

static SftType sft__file_type(const SftFileTensor *t) {
    for (SftType type = SFT_F32; type < SFT_TYPES; type = (SftType)(type + 1))
        if (!strcmp(t->dtype, sft__dtypes[type].name)) return type;
    sft_die(SFT_BAD_INPUT, "tensor %s has dtype %s: expected F32, BF16 or F16; a quantised model must be converted "
                           "first", t->name, t->dtype);
}

static const char *sft__shape_text(int dims, const int64_t *dim, char out[200]) {
    int n = snprintf(out, 200, "[");
    for (int i = 0; i < dims; i++) n += snprintf(out + n, 200 - (size_t)n, i ? ", %lld" : "%lld", (long long)dim[i]);
    snprintf(out + n, 200 - (size_t)n, "]");
    return out;
}

// New rows of the embedding or the head (resize_vocab): the mean of the old ones.
static void sft__mean_rows(SftModel *m, SftUnit *u, SftSlot slot) {
    const SftArch *a = &m->arch;
    const SftTensor exact = sft__on_host(m, u);
    const size_t size = sft_type_size(exact.type);
    char *rows = (char *)exact.data + (size_t)u->offset[slot] * size; // [V,C]
    double *sum = SFT_NEW(double, a->C);
    float *row = SFT_NEW(float, a->C);
    for (int64_t r = 0; r < a->V_source; r++) {
        sft_to_f32(row, rows + (size_t)(r * a->C) * size, exact.type, a->C);
        for (int64_t c = 0; c < a->C; c++) sum[c] += row[c];
    }
    for (int64_t c = 0; c < a->C; c++) row[c] = (float)(sum[c] / (double)a->V_source);
    for (int64_t r = a->V_source; r < a->V; r++) sft_from_f32(rows + (size_t)(r * a->C) * size, exact.type, row, a->C);
    free(sum), free(row);
}

/* A tensor that no slot asked for. Buffers of older versions are known and harmless, and so is a tied head that equals
   the embedding. Anything else inside a layer would change the result: refused. The rest (other heads) is named. */
static void sft__unexpected(const SftArch *a, SftSource *s, const SftSafetensors *f, const SftFileTensor *t) {
    static const char *harmless[] = {".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"};
    char name[256];
    for (int i = 0; i < SFT_COUNT(harmless); i++) {
        size_t n = strlen(t->name), end = strlen(harmless[i]);
        if (n > end && !strcmp(t->name + n - end, harmless[i])) return;
    }
    if (a->tied && !strcmp(t->name, sft_hf_name(a, SFT_SLOT_head_w, 0, name))) {
        const SftFileTensor *wte = sft__source_find(s, sft_hf_name(a, SFT_SLOT_wte, 0, name));
        if (!strcmp(wte->dtype, t->dtype) && wte->bytes == t->bytes && !memcmp(wte->data, t->data, t->bytes)) return;
        sft_die(SFT_BAD_INPUT, "%s: %s differs from the embedding although \"tie_word_embeddings\" is true: set it to "
                "false in config.json to use both", f->path, t->name);
    }
    const char *block = a->learned_positions ? "h." : "layers.", *at = t->name;
    while ((at = strstr(at, block)) && at != t->name && at[-1] != '.') at++;
    if (at && strtoll(at + strlen(block), NULL, 10) < a->L)
        sft_die(SFT_BAD_INPUT, "%s: tensor %s is not part of a %s model with this config.json; merge adapters and "
                "convert quantised weights first", f->path, t->name, a->family);
    sft_note("%s: tensor %s is not used", f->path, t->name);
}

void sft_load_weights(SftModel *m, const char *folder) {
    SftArch *a = &m->arch;
    const struct SftFamily *family = sft__family(a->family);
    SftSource s = sft__source_open(folder);
    for (int64_t i = 0; i < m->units; i++) {
        for (int j = 0; j < family->tensors; j++) {
            const SftHfTensor *t = &family->tensor[j];
            char name[256], got[200], expected[200];
            int64_t rows, cols;
            if (!sft__file_shape(a, t, m->unit[i].kind, &rows, &cols)) continue;
            bool vocab = t->slot[0] == SFT_SLOT_wte || t->slot[0] == SFT_SLOT_head_w;
            if (vocab) rows = a->V_source;
            const SftFileTensor *file = sft__source_find(&s, sft__hf_name(t, i - 1, name));
            int64_t shape[2] = {t->transposed ? cols : rows, t->transposed ? rows : cols};
            int dims = sft_slot(a, t->slot[0]).decay ? 2 : 1; // norms and biases are vectors
            if (file->dims != dims || memcmp(file->dim, shape, (size_t)dims * sizeof *shape))
                sft_die(SFT_BAD_INPUT, "tensor %s has the shape %s: config.json gives %s", file->name,
                        sft__shape_text(file->dims, file->dim, got), sft__shape_text(dims, shape, expected));
            SftType type = sft__file_type(file);
            if (t->slot[0] == SFT_SLOT_wte) a->source_type = type;
            // Pages are read ahead of their use, and given back after it: a mapped file does not fill the memory.
            uintptr_t page = (uintptr_t)file->data & ~(uintptr_t)4095, n = (uintptr_t)file->data + file->bytes - page;
            madvise((void *)page, n + (16 << 20), MADV_WILLNEED);
            sft__exchange(m, &m->unit[i], t, (char *)file->data, type, 0, shape[0], false);
            madvise((void *)page, n & ~(uintptr_t)4095, MADV_DONTNEED);
            if (vocab && a->V > a->V_source) sft__mean_rows(m, &m->unit[i], t->slot[0]);
        }
        sft__put(m, &m->unit[i]);
    }
    for (size_t i = 0; i < s.files; i++)
        for (const SftFileTensor *t = s.file[i].tensor; t < s.file[i].tensor + s.file[i].n; t++)
            if (!json_object_get(s.used, t->name)) sft__unexpected(a, &s, &s.file[i], t);
    sft__source_close(&s);
}

/* Random weights, each tensor by its own key: normal(0, init_std) by the method of Box and Muller (1958), which makes
   two normal numbers of two uniform ones; what is added to the residual stream starts smaller, as in GPT-2. */
void sft_init_weights(SftModel *m, uint64_t seed) {
    const double turn = 2 * 3.14159265358979323846 * 0x1p-32;
    for (int64_t i = 0; i < m->units; i++) {
        SftUnit *u = &m->unit[i];
        const SftTensor exact = sft__on_host(m, u);
        for (int s = 0; s < SFT_SLOTS; s++) {
            if (u->offset[s] < 0) continue;
            SftSlotInfo t = sft_slot(&m->arch, (SftSlot)s);
            bool random = t.init == SFT_INIT_NORMAL || t.init == SFT_INIT_SCALED;
            float std = (float)(m->arch.init_std / (t.init == SFT_INIT_SCALED ? sqrt(2.0 * (double)m->arch.L) : 1));
            uint64_t site = (uint64_t)(i * SFT_SLOTS + s);
#pragma omp parallel for
            for (int64_t at = 0; at < t.rows * t.cols; at += 256) {
                float x[256];
                for (int64_t j = 0; j < 256; j += 2) {
                    uint64_t bits = sft_random(seed, site, SFT_SITE_INIT, (uint64_t)(at + j));
                    float radius = std * sqrtf(-2 * logf(((float)(bits >> 32) + 1) * 0x1p-32f));
                    float angle = (float)(turn * (double)(uint32_t)bits);
                    x[j] = random ? radius * cosf(angle) : t.init == SFT_INIT_ONE;
                    x[j + 1] = random ? radius * sinf(angle) : t.init == SFT_INIT_ONE;
                }
                char *to = (char *)exact.data + (size_t)(u->offset[s] + at) * sft_type_size(exact.type);
                sft_from_f32(to, exact.type, x, SFT_MIN(256, t.rows * t.cols - at));
            }
        }
        sft__put(m, u);
    }
}

// Saving: the tensors of the files in the order of units, where each comes from, and the first one of the file at hand.
typedef struct {
    const SftModel *m; SftType type; const SftHfTensor **from; const SftUnit **unit, *fetched; int64_t at;
} SftSave;

static void sft__save_rows(void *arg, int64_t i, int64_t first, int64_t n, void *out) {
    SftSave *s = (SftSave *)arg;
    if (s->fetched != s->unit[s->at + i]) sft__fetch(s->m, s->fetched = s->unit[s->at + i]);
    sft__exchange(s->m, s->unit[s->at + i], s->from[s->at + i], (char *)out, s->type, first, n, true);
}

void sft_save_weights(const SftModel *m, const char *folder, SftType type, double max_shard_bytes) {
    const struct SftFamily *family = sft__family(m->arch.family);
    int64_t most = m->units * family->tensors, n = 0, total = 0, shards = 1;
    SftSave s = {m, type, SFT_NEW(const SftHfTensor *, most), SFT_NEW(const SftUnit *, most), NULL, 0};
    SftFileTensor *file = SFT_NEW(SftFileTensor, most);
    int64_t *start = SFT_NEW(int64_t, most + 1); // first tensor of each shard
    char path[4096], name[256];
    double size = 0;
    for (int64_t i = 0; i < m->units; i++)
        for (const SftHfTensor *t = family->tensor; t < family->tensor + family->tensors; t++) {
            int64_t rows, cols;
            if (!sft__file_shape(&m->arch, t, m->unit[i].kind, &rows, &cols)) continue;
            s.from[n] = t, s.unit[n] = &m->unit[i];
            file[n] = (SftFileTensor){.name = strdup(sft__hf_name(t, i - 1, name)), .dtype = sft__dtypes[type].name};
            file[n].dims = sft_slot(&m->arch, t->slot[0]).decay ? 2 : 1;
            file[n].dim[0] = t->transposed ? cols : rows, file[n].dim[1] = t->transposed ? rows : cols;
            int64_t bytes = sft__tensor_bytes(&file[n]);
            if (size > 0 && size + (double)bytes > max_shard_bytes) start[shards++] = n, size = 0;
            size += (double)bytes, total += bytes, n++;
        }
    start[shards] = n;
    json_t *metadata = json_pack("{s:s}", "format", "pt"), *map = json_object();
    for (int64_t k = 0; k < shards; k++) {
        snprintf(name, sizeof name, shards > 1 ? "model-%05d-of-%05d.safetensors" : "model.safetensors", (int)k + 1,
                 (int)shards);
        s.at = start[k];
        sft_path(path, folder, name);
        sft_safetensors_write(path, file + start[k], start[k + 1] - start[k], metadata, sft__save_rows, &s);
        for (int64_t i = start[k]; i < start[k + 1]; i++) json_object_set_new(map, file[i].name, json_string(name));
    }
    json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    char *text = json_dumps(index, JSON_INDENT(2) | JSON_SORT_KEYS);
    sft_path(path, folder, "model.safetensors.index.json");
    if (shards > 1) sft_write_file(path, text, strlen(text)), sft_path(path, folder, "model.safetensors");
    unlink(path); // what an earlier save in another number of files left
    for (int64_t i = 0; i < n; i++) free((char *)file[i].name);
    free(text), free(start), free(file), free(s.from), free(s.unit), json_decref(index), json_decref(metadata);
}

/* ================================================================================================================
   [5] ops: every operation, forward above backward, and the table that lists them
   ================================================================================================================
   In: tensors of any storage type. Out: what the table in the declarations says, to the letter. An op reads a row into
   floats, computes in fp32 and writes it back rounded once. fp32 rows are used where they lie.

   Invariants. The same bits for every number of threads: threads share out rows, tiles and blocks whose sizes are fixed
   below, no sum is split by the number of threads, and partial sums are added in the order of their blocks. Workspace
   depends on the dimensions and on omp_get_max_threads(), never shrinks when N grows, and is taken in the same way when
   planning: plan with the largest N and with the number of threads that will run.
   Guarded by test/test_ops.c: every op against float64 formulas and finite differences, at shapes that fit no tile.
   Usual pitfall: a loop that the compiler cannot turn into vector code (a sum without `omp simd`, a call of the C
   library, a branch) runs ten times slower and nothing says so. `make bench` does. */

// [5.1] threads, rows, blocks ------------------------------------------------------------------------------------
#ifdef SFT_NO_OPENMP
static inline int sft__threads(void) { return 1; }
static inline int sft__thread(void) { return 0; }
#else
static inline int sft__threads(void) { return omp_get_max_threads(); }
static inline int sft__thread(void) { return omp_get_thread_num(); }
#endif
#define SFT__INLINE static inline __attribute__((always_inline))
enum { SFT__BLOCK = 1024 };    // elements of a task of an elementwise op
enum { SFT__SMALL = 1 << 15 }; // elements below which waking the other threads costs more than they bring

static inline int64_t sft__round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t sft__width(SftTensor t) { return t.dim[1] * t.dim[2]; } // elements of a row
static inline char *sft__at(SftTensor t, int64_t i) { return (char *)t.data + (size_t)i * (t.type == SFT_F32 ? 4 : 2); }

// A piece of the workspace.
static float *sft__floats(SftCtx *c, int64_t n) { return (float *)sft_take(c->work, (size_t)n * sizeof(float)); }

// Elements at .. at+n as floats: where they lie if they are fp32, else widened into buf[n].
SFT__INLINE const float *sft__widen(float *buf, SftTensor t, int64_t at, int64_t n) {
    if (t.type == SFT_F32) return (const float *)t.data + at;
    sft_to_f32(buf, sft__at(t, at), t.type, n);
    return buf;
}
// Where to compute elements at .. at+n: in their place if they are fp32, else in buf; sft__round then rounds them.
SFT__INLINE float *sft__place(float *buf, SftTensor t, int64_t at) {
    return t.type == SFT_F32 ? (float *)t.data + at : buf;
}
SFT__INLINE void sft__round(SftTensor t, int64_t at, const float *x, int64_t n) {
    if (t.type != SFT_F32) sft_from_f32(sft__at(t, at), t.type, x, n);
    else if ((const float *)t.data + at != x) memcpy((float *)t.data + at, x, (size_t)n * 4);
}
// [5.2] matmul ---------------------------------------------------------------------------------------------------
/* out(i,j) = sum over k of a(i,k) b(j,k), in three layers.
   The register tile: MR x NR sums live in vector registers while k runs; per k it reads MR + NR numbers and does MR *
   NR multiply-adds. It reads them from packed strips, MR rows of a (NR of b) side by side: strip[k][row], so that every
   load is the next one in memory, whatever the strides and the type of the operand were.
   The block: up to SFT__ROW_BLOCK rows of a, SFT__DEPTH deep, are packed into strips by all threads together; then each
   thread takes one strip of b after another from a common heap, packs it, and multiplies it with every strip of a. So b
   is packed once where a has no more rows than a block; its strip stays in L1 or L2, those of a come from L2 or beyond.
   The epilogue: what follows the sum (bias, activation, residual, rounding) happens to a tile while it is in L1.
   An output's sum is always taken in the same order: within SFT__DEPTH in order, then depth after depth. */
#if defined(__AVX512F__)
enum { SFT__VL = 16, SFT__MR = 8, SFT__NV = 2 };
#elif defined(__AVX2__) || defined(__AVX__)
enum { SFT__VL = 8, SFT__MR = 6, SFT__NV = 2 };
#elif defined(__aarch64__)
enum { SFT__VL = 4, SFT__MR = 8, SFT__NV = 2 };
#else
enum { SFT__VL = 4, SFT__MR = 4, SFT__NV = 2 };
#endif
enum { SFT__NR = SFT__VL * SFT__NV, SFT__DEPTH = 768, SFT__ROW_BLOCK = 2048, SFT__COL_BLOCK = 2048 };
typedef float SftVec __attribute__((vector_size(4 * SFT__VL)));
typedef float SftVecAt __attribute__((vector_size(4 * SFT__VL), aligned(4), may_alias)); // one anywhere in memory
typedef int32_t SftLanes __attribute__((vector_size(4 * SFT__VL)));

// bf16 operands on a CPU that multiplies bf16 pairs: a slot of a strip holds (k, k+1) of its row, and a multiply-add
// does both. Products are exact and sums are fp32 as ever; subnormal inputs count as zero.
#ifdef __AVX512BF16__
enum { SFT__PAIRS = 1 };
SFT__INLINE SftVec sft__add_pairs(SftVec sum, SftVec a, SftVec b) {
    return (SftVec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
SFT__INLINE SftVec sft__spread(const float *a) { return (SftVec)_mm512_set1_epi32((int)sft_f32_bits(*a)); }
#else
enum { SFT__PAIRS = 0 };
SFT__INLINE SftVec sft__add_pairs(SftVec sum, SftVec a, SftVec b) { return (void)a, (void)b, sum; } // never called
SFT__INLINE SftVec sft__spread(const float *a) { return (SftVec){0} + *a; }
#endif

// A CPU with AMX multiplies bf16 by tiles: sums[16][16] += rows[16][16 slots] columns[16 slots][16] is one instruction,
// and a register tile of 2 x 2 of them takes SFT__AMX rows. A strip of a then lies as [slot / 16][row][16 slots].
// The operating system must be asked before a process may use the tiles; if it refuses, pairs do.
#if defined(__AMX_BF16__) && defined(__linux__)
enum { SFT__AMX = 32 };
static bool sft__amx(void) {
    static int granted = -1;
    if (granted < 0) granted = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */);
    return granted;
}
static void sft__amx_begin(void) { // in each thread, before its first tile: 8 tiles of 16 rows of 64 bytes
    struct { uint8_t palette, start, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
}
static void sft__amx_end(void) { _tile_release(); }
// tile[32][32] (+)= strip a, laid out as above, times strip b[slots][32]; slots are a multiple of 16.
static void sft__amx_tile(float *tile, const float *a, const float *b, int64_t slots, bool add) {
    __asm__ volatile("" ::: "memory"); // strips are written: gcc's tile loads do not say that they read memory
#define SFT__SQUARES(X) X(0, tile) X(1, tile + 16) X(2, tile + 512) X(3, tile + 528)
#define X(i, at) if (add) _tile_loadd(i, at, 128); else _tile_zero(i);
    SFT__SQUARES(X)
#undef X
    for (int64_t k = 0; k < slots; k += 16, a += 512, b += 512) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 128);
        _tile_loadd(7, b + 16, 128);
        _tile_loadd(5, a + 256, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
#define X(i, at) _tile_stored(i, at, 128);
    SFT__SQUARES(X)
#undef X
#undef SFT__SQUARES
}
#else
enum { SFT__AMX = SFT__MR };
static bool sft__amx(void) { return false; }
static void sft__amx_begin(void) {}
static void sft__amx_end(void) {}
static void sft__amx_tile(float *tile, const float *a, const float *b, int64_t slots, bool add) { // never called
    (void)tile, (void)a, (void)b, (void)slots, (void)add;
}
#endif

// tile[MR][NR] (+)= the product of strip a[depth][MR] and strip b[depth][NR]. Every loop over the sums must be
// unrolled: one that stays a loop indexes them in memory, and the kernel runs at a tenth of its speed.
SFT__INLINE void sft__tile_of(float *tile, const float *a, const float *b, int64_t depth, bool pairs, bool add) {
    SftVec sum[SFT__MR][SFT__NV] = {{{0}}};
    for (int64_t k = 0; k < depth; k++, a += SFT__MR, b += SFT__NR) {
        SftVec bv[SFT__NV];
#pragma GCC unroll 4
        for (int j = 0; j < SFT__NV; j++) bv[j] = ((const SftVecAt *)b)[j];
#pragma GCC unroll 16
        for (int i = 0; i < SFT__MR; i++)
#pragma GCC unroll 4
            for (int j = 0; j < SFT__NV; j++)
                sum[i][j] = pairs ? sft__add_pairs(sum[i][j], sft__spread(a + i), bv[j]) : sum[i][j] + a[i] * bv[j];
    }
    SftVecAt *out = (SftVecAt *)tile;
#pragma GCC unroll 16
    for (int i = 0; i < SFT__MR; i++)
#pragma GCC unroll 4
        for (int j = 0; j < SFT__NV; j++, out++) *out = add ? (SftVec)*out + sum[i][j] : sum[i][j];
}
static void sft__tile(float *tile, const float *a, const float *b, int64_t depth, bool pairs, bool add) {
    if (pairs) sft__tile_of(tile, a, b, depth, true, add);
    else sft__tile_of(tile, a, b, depth, false, add);
}

// An operand: element (i, k) stands at data[i * row + k * col]; one of the strides is 1.
typedef struct {
    const void *data;
    SftType type;
    int64_t row, col;
} SftMat;

// Transposes VL x VL numbers in registers: in round s, numbers whose row and column differ in bit s change places.
SFT__INLINE void sft__transpose(SftVec r[SFT__VL]) {
#ifdef __clang__
    for (int i = 0; i < SFT__VL; i++)
        for (int j = 0; j < i; j++) {
            float x = r[i][j];
            r[i][j] = r[j][i], r[j][i] = x;
        }
#else
    SftLanes lane;
    for (int i = 0; i < SFT__VL; i++) lane[i] = i;
#pragma GCC unroll 4
    for (int s = SFT__VL / 2; s; s /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < SFT__VL; i++) {
            if (i & s) continue;
            const SftLanes odd = (lane & s) != 0;
            SftVec a = r[i], b = r[i | s];
            r[i] = __builtin_shuffle(a, b, (~odd & lane) | (odd & ((lane ^ s) + SFT__VL)));
            r[i | s] = __builtin_shuffle(a, b, (~odd & (lane | s)) | (odd & (lane + SFT__VL)));
        }
#endif
}

// dst[k][W] = slots of 4 bytes (a float, or a bf16 pair) of n <= W rows that lie `stride` bytes apart and end after
// `bytes`; absent rows and the missing half of a last pair are zero.
SFT__INLINE void sft__pack_rows(float *dst, int W, const char *src, int64_t stride, int n, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 4 * SFT__VL) {
        int64_t left = SFT_MIN(bytes - at, 4 * SFT__VL);
        for (int i0 = 0; i0 < W; i0 += SFT__VL) {
            const int wide = W - i0 < SFT__VL ? W - i0 : SFT__VL;
            SftVec r[SFT__VL];
#pragma GCC unroll 16
            for (int q = 0; q < SFT__VL; q++) {
                r[q] = (SftVec){0};
                if (q >= wide || i0 + q >= n) continue;
                __builtin_prefetch(src + (i0 + q) * stride + at + 256); // more rows than the hardware follows
                if (left == 4 * SFT__VL) memcpy(&r[q], src + (i0 + q) * stride + at, 4 * SFT__VL);
                else memcpy(&r[q], src + (i0 + q) * stride + at, (size_t)left);
            }
            sft__transpose(r);
            float *out = dst + at / 4 * W + i0;
            if (left == 4 * SFT__VL) {
#pragma GCC unroll 16
                for (int q = 0; q < SFT__VL; q++) memcpy(out + q * W, &r[q], (size_t)wide * 4);
            } else {
                for (int q = 0; q < (left + 3) / 4; q++) memcpy(out + q * W, &r[q], (size_t)wide * 4);
            }
        }
    }
}

// One strip: dst[k][W] = rows first .. first+n of m, from k0 on, kc numbers deep ((kc + 1) / 2 slots if pairs).
SFT__INLINE void sft__pack(float *dst, int W, SftMat m, int64_t first, int n, int64_t k0, int64_t kc, bool pairs) {
    const int size = m.type == SFT_F32 ? 4 : 2;
    const char *src = (const char *)m.data + (first * m.row + k0 * m.col) * size;
    if (m.col == 1 && (m.type == SFT_F32 || pairs)) {
        sft__pack_rows(dst, W, src, m.row * size, n, kc * size);
    } else if (m.col == 1) { // widened piece by piece, then as above
        float piece[SFT__NR * 64];
        for (int64_t k = 0; k < kc; k += 64) {
            int64_t now = SFT_MIN(64, kc - k);
            for (int i = 0; i < n; i++) sft_to_f32(piece + i * 64, src + (i * m.row + k) * size, m.type, now);
            sft__pack_rows(dst + k * W, W, (const char *)piece, 64 * 4, n, now * 4);
        }
    } else if (pairs) {
        for (int64_t k = 0; k < kc; k += 2, dst += W, src += 2 * m.col * size) {
            const uint16_t *x = (const uint16_t *)src, *y = x + m.col;
            uint32_t slot[SFT__NR] = {0};
            if (k + 1 == kc) for (int i = 0; i < n; i++) slot[i] = x[i];
            else if (n == W) for (int i = 0; i < W; i++) slot[i] = x[i] | (uint32_t)y[i] << 16;
            else for (int i = 0; i < n; i++) slot[i] = x[i] | (uint32_t)y[i] << 16;
            memcpy(dst, slot, (size_t)W * 4);
        }
    } else {
        for (int64_t k = 0; k < kc; k++, dst += W, src += m.col * size) {
            if (m.type != SFT_F32) sft_to_f32(dst, src, m.type, n);
            else if (n == W) memcpy(dst, src, (size_t)W * 4);
            else memcpy(dst, src, (size_t)n * 4);
            for (int i = n; i < W; i++) dst[i] = 0;
        }
    }
}

// A strip of a for tiles: dst[slot / 16][SFT__AMX][16 slots], the same rows and numbers; what is missing is zero.
static void sft__pack_tiles(float *dst, SftMat m, int64_t first, int n, int64_t k0, int64_t kc) {
    for (int64_t k = 0; k < kc; k += 32, dst += SFT__AMX * 16) {
        const int deep = (int)SFT_MIN(32, kc - k);
        if (deep < 32 || n < SFT__AMX) memset(dst, 0, SFT__AMX * 64);
        if (m.col == 1) {
            const uint16_t *src = (const uint16_t *)m.data + first * m.row + k0 + k;
            for (int i = 0; i < n; i++) {
                __builtin_prefetch(src + i * m.row + 128);
                if (deep == 32) memcpy(dst + i * 16, src + i * m.row, 64);
                else memcpy(dst + i * 16, src + i * m.row, (size_t)deep * 2);
            }
        } else {
            float strip[16 * SFT__AMX] = {0};
            sft__pack(strip, SFT__AMX, m, first, n, k0 + k, deep, true);
            for (int i = 0; i < SFT__AMX; i += SFT__VL) for (int j = 0; j < 16; j += SFT__VL) {
                SftVec r[SFT__VL];
                for (int q = 0; q < SFT__VL; q++) r[q] = *(const SftVecAt *)(strip + (j + q) * SFT__AMX + i);
                sft__transpose(r);
                for (int q = 0; q < SFT__VL; q++) *(SftVecAt *)(dst + (i + q) * 16 + j) = r[q];
            }
        }
    }
}

typedef struct { // out[M,N] = epilogue(a b^T): forward act(sum + bias), backward sum * act'(pre); then + residual
    SftMat a[2], b[2]; // [1]: the side's, whose k follow the product's in the same sum
    int64_t M, N, K[2];
    SftTensor out, pre, bias, residual;
    float scale; // of the sum
    SftAct act;
    bool backward;
} SftGemm;

static void sft__activate(float *z, const float *x, int64_t n, SftAct act, bool backward) { // z = act(x) | z *= act'(x)
    if (act == SFT_GELU && !backward) for (int64_t j = 0; j < n; j++) z[j] = sft_gelu(x[j]);
    if (act == SFT_GELU && backward) for (int64_t j = 0; j < n; j++) z[j] *= sft_gelu_grad(x[j]);
    if (act == SFT_GELU_TANH && !backward) for (int64_t j = 0; j < n; j++) z[j] = sft_gelu_tanh(x[j]);
    if (act == SFT_GELU_TANH && backward) for (int64_t j = 0; j < n; j++) z[j] *= sft_gelu_tanh_grad(x[j]);
}

SFT__INLINE void sft__finish_n(const SftGemm *g, float *tile, int64_t i0, int64_t j0, int64_t m, int64_t n) {
    float buf[SFT__NR], wide[SFT__NR];
    const int64_t ld = sft__width(g->out);
    const float *bias = g->bias.data ? sft__widen(wide, g->bias, j0, n) : NULL;
    for (int64_t i = 0; i < m; i++) {
        float *z = tile + i * SFT__NR;
        int64_t at = (i0 + i) * ld + j0;
        if (g->scale != 1) for (int64_t j = 0; j < n; j++) z[j] *= g->scale;
        if (bias) for (int64_t j = 0; j < n; j++) z[j] += bias[j];
        if (g->pre.data && !g->backward) sft__round(g->pre, at, z, n);
        if (g->act != SFT_LINEAR)
            sft__activate(z, g->backward ? sft__widen(buf, g->pre, at, n) : z, n, g->act, g->backward);
        if (g->residual.data) {
            const float *r = sft__widen(buf, g->residual, at, n);
            for (int64_t j = 0; j < n; j++) z[j] += r[j];
        }
        sft__round(g->out, at, z, n);
    }
}
static void sft__finish(const SftGemm *g, float *tile, int64_t i0, int64_t j0, int64_t m, int64_t n) {
    if (n == SFT__NR) sft__finish_n(g, tile, i0, j0, m, SFT__NR);
    else sft__finish_n(g, tile, i0, j0, m, n);
}

typedef struct { // a step: rows ib .. ib+mb, columns jb .. jb+nb, depth k0 .. k0+kc[0] and then kc[1] of the side's
    int64_t ib, mb, jb, nb, k0, kc[2], slots, mr; // mr: rows of a strip of a
    float *a, *part; // packed strips of a; sums of the depths before (NULL if there is one depth)
    bool pairs, tiles;
} SftGemmStep;

static int64_t sft__slots(int64_t kc, bool pairs, bool tiles) { // that kc numbers of a row take in a strip
    return tiles ? sft__round_up((kc + 1) / 2, 16) : pairs ? (kc + 1) / 2 : kc;
}
// A step's strip of a or b: rows first .. first+n of m[0], and behind them the side's. What is missing is zero.
SFT__INLINE void sft__pack_step(float *dst, const SftGemmStep *s, const SftMat *m, bool b, int64_t first, int n) {
    const int W = b ? SFT__NR : SFT__MR;
    for (int side = 0; side < 2 && s->kc[side]; side++) {
        const int64_t k0 = side ? 0 : s->k0, kc = s->kc[side], slots = sft__slots(kc, s->pairs, s->tiles);
        if (s->tiles && !b) sft__pack_tiles(dst, m[side], first, n, k0, kc);
        else sft__pack(dst, W, m[side], first, n, k0, kc, s->pairs);
        for (int64_t k = (kc + 1) / 2; s->tiles && b && k < slots; k++) memset(dst + k * W, 0, (size_t)W * 4);
        dst += slots * (b ? W : s->mr);
    }
}

// Columns j .. j+n of a step: packs their strip of b, then multiplies it with every strip of a.
static void sft__gemm_columns(const SftGemm *g, const SftGemmStep *s, float *b, int64_t j, int64_t n) {
    const int64_t ld = sft__width(g->out);
    sft__pack_step(b, s, g->b, true, j, (int)n);
    for (int64_t i = 0; i < s->mb; i += s->mr) {
        float local[SFT__AMX * SFT__NR] __attribute__((aligned(64)));
        float *tile = s->part ? s->part + (j - s->jb) * sft__round_up(s->mb, s->mr) + i * SFT__NR : local;
        const int64_t m = SFT_MIN(s->mr, s->mb - i);
        const bool last = s->k0 + s->kc[0] == g->K[0];
        for (int64_t r = 0; r < m && last; r++) // once the sums are there, so is the memory they go to
            for (int64_t e = 0; e < n; e += 16) __builtin_prefetch(sft__at(g->out, (s->ib + i + r) * ld + j + e), 1);
        if (s->tiles) sft__amx_tile(tile, s->a + i * s->slots, b, s->slots, s->k0 > 0);
        else sft__tile(tile, s->a + i * s->slots, b, s->slots, s->pairs, s->k0 > 0);
        if (last) sft__finish(g, tile, s->ib + i, j, m, n);
    }
}

// A step, by all threads of a team together; b is this thread's strip.
static void sft__gemm_step(const SftGemm *g, const SftGemmStep *s, float *b) {
    if (s->jb == 0 || s->part) { // a's strips serve every block of columns
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < s->mb; i += s->mr)
            sft__pack_step(s->a + i * s->slots, s, g->a, false, s->ib + i, (int)SFT_MIN(s->mr, s->mb - i));
    }
#pragma omp for schedule(dynamic)
    for (int64_t j = 0; j < s->nb; j += SFT__NR)
        sft__gemm_columns(g, s, b, s->jb + j, SFT_MIN(SFT__NR, s->nb - j));
}

static void sft__gemm(SftCtx *c, const SftGemm *g) {
    const int64_t K = g->K[0], side = g->K[1];
    const bool pairs = SFT__PAIRS && g->a[0].type == SFT_BF16 && g->b[0].type == SFT_BF16 &&
                       (!side || (g->a[1].type == SFT_BF16 && g->b[1].type == SFT_BF16));
    const bool tiles = pairs && sft__amx();
    const int64_t most = pairs ? 2 * SFT__DEPTH : SFT__DEPTH, depths = (K + most - 1) / most;
    const int64_t depth = sft__round_up((K + depths - 1) / SFT_MAX(depths, 1), 16);         // of about the same size
    const int64_t mr = tiles ? SFT__AMX : SFT__MR;
    const int64_t mb = SFT_MIN(sft__round_up(g->M, mr), SFT__ROW_BLOCK / mr * mr);
    const int64_t nb = SFT_MIN(sft__round_up(g->N, SFT__NR), SFT__COL_BLOCK);
    const int64_t strip = sft__round_up(SFT_MIN(K, most), 16) + sft__round_up(side, 16); // slots of its rows, at most
    size_t mark = c->work->used;
    float *a = sft__floats(c, mb * strip), *b = sft__floats(c, sft__threads() * SFT__NR * strip);
    float *sums = sft__floats(c, mb * nb), *part = depths > 1 ? sums : NULL; // one plan for all K
    sft_give_back(c->work, mark);
    if (sft_planning(c) || g->M * g->N == 0) return;
#pragma omp parallel if (g->M * g->N * K > SFT__SMALL)
    {
        if (tiles) sft__amx_begin();
        for (int64_t ib = 0; ib < g->M; ib += mb)
            for (int64_t jb = 0; jb < g->N; jb += nb)
                for (int64_t k0 = 0; k0 < K; k0 += depth) {
                    const int64_t kc = SFT_MIN(depth, K - k0), more = k0 + kc == K ? side : 0;
                    const SftGemmStep s = {
                        ib, SFT_MIN(mb, g->M - ib), jb, SFT_MIN(nb, g->N - jb), k0, {kc, more},
                        sft__slots(kc, pairs, tiles) + sft__slots(more, pairs, tiles), mr, a, part, pairs, tiles};
                    sft__gemm_step(g, &s, b + sft__thread() * SFT__NR * strip);
                }
        if (tiles) sft__amx_end();
    }
}

// A row or few (generation): w is read once, where it lies. Sums are taken in SFT__VL * 4 lanes.
enum { SFT__FEW = 4, SFT__PIECE = 1024 };
SFT__INLINE float sft__dot(const float *x, const float *y, int64_t n) {
    SftVec s[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * SFT__VL <= n; i += 4 * SFT__VL)
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++)
            s[q] += *(const SftVecAt *)(x + i + q * SFT__VL) * *(const SftVecAt *)(y + i + q * SFT__VL);
    s[0] = (s[0] + s[1]) + (s[2] + s[3]);
    float sum = 0;
    for (int q = 0; q < SFT__VL; q++) sum += s[0][q];
    for (; i < n; i++) sum += x[i] * y[i];
    return sum;
}
static void sft__matmul_few(const SftGemm *g) {
#pragma omp parallel for schedule(dynamic) if (g->N * g->K[0] > SFT__SMALL)
    for (int64_t j = 0; j < g->N; j += SFT__NR) {
        int64_t n = SFT_MIN(SFT__NR, g->N - j);
        float tile[SFT__FEW * SFT__NR] = {0}, xs[SFT__FEW][SFT__PIECE], ws[SFT__PIECE];
        for (int side = 0; side < 2; side++) {
            const int64_t K = g->K[side];
            SftTensor x = {(void *)g->a[side].data, g->a[side].type, {0}};
            SftTensor w = {(void *)g->b[side].data, g->b[side].type, {0}};
            for (int64_t k = 0; k < K; k += SFT__PIECE) {
                int64_t kc = SFT_MIN(SFT__PIECE, K - k);
                const float *xp[SFT__FEW];
                for (int64_t i = 0; i < g->M; i++) xp[i] = sft__widen(xs[i], x, i * K + k, kc);
                for (int64_t q = 0; q < n; q++) {
                    const float *wp = sft__widen(ws, w, (j + q) * K + k, kc);
                    for (int64_t i = 0; i < g->M; i++) tile[i * SFT__NR + q] += sft__dot(xp[i], wp, kc);
                }
            }
        }
        sft__finish(g, tile, 0, j, g->M, n);
    }
}

// The rows of an operand are those of a tensor, k along them; or they are its columns, k down from row to row.
static SftMat sft__along(SftTensor t) { return (SftMat){t.data, t.type, sft__width(t), 1}; }
static SftMat sft__down(SftTensor t) { return (SftMat){t.data, t.type, 1, sft__width(t)}; }

static void sft__matmul_forward(SftCtx *c, SftTensor y, SftTensor pre, SftTensor x, SftTensor w, SftSide side,
                                SftTensor bias, SftTensor residual, float scale, SftAct act) {
    int64_t N = y.dim[0], O = w.dim[0], I = sft__width(w), r = sft__width(side.w);
    SftGemm g = {{sft__along(x), sft__along(side.x)}, {sft__along(w), sft__along(side.w)}, N, O, {I, r}, y, pre, bias,
                 residual, scale, act, false};
    if (N > SFT__FEW || sft_planning(c)) sft__gemm(c, &g);
    else if (N > 0) sft__matmul_few(&g);
}

static void sft__matmul_backward_x(SftCtx *c, SftTensor dx, SftTensor dy, SftTensor w, SftSide side, SftTensor pre,
                                   float scale, SftAct act, bool add) {
    int64_t N = dx.dim[0], O = w.dim[0], I = sft__width(w), r = side.w.dim[0];
    SftTensor sum = add ? dx : SFT_NONE;
    SftGemm g = {{sft__along(dy), sft__along(side.x)}, {sft__down(w), sft__down(side.w)}, N, I, {O, r}, dx, pre,
                 SFT_NONE, sum, scale, act, true};
    sft__gemm(c, &g);
}

static void sft__matmul_backward_w(SftCtx *c, SftTensor dw, SftTensor dbias, SftTensor dy, SftTensor x) {
    int64_t N = dy.dim[0], O = dw.dim[0], I = sft__width(dw);
    SftGemm g = {{sft__down(dy)}, {sft__down(x)}, O, I, {N}, dw, SFT_NONE, SFT_NONE, dw, 1, SFT_LINEAR, true};
    if (sft_planning(c) || N > 0) sft__gemm(c, &g);
    if (sft_planning(c) || !dbias.data) return;
#pragma omp parallel for schedule(static) if (N * O > SFT__SMALL)
    for (int64_t o = 0; o < O; o += 64) { // columns side by side; sums of 64 rows each, then the sum of those
        int64_t n = SFT_MIN(64, O - o);
        float total[64] = {0}, buf[64];
        for (int64_t i0 = 0; i0 < N; i0 += 64) {
            float sum[64] = {0};
            for (int64_t i = i0; i < SFT_MIN(i0 + 64, N); i++) {
                const float *d = sft__widen(buf, dy, i * sft__width(dy) + o, n);
                for (int64_t j = 0; j < n; j++) sum[j] += d[j];
            }
            for (int64_t j = 0; j < n; j++) total[j] += sum[j];
        }
        for (int64_t j = 0; j < n; j++) ((float *)dbias.data)[o + j] += total[j];
    }
}

// [5.3] embedding, rows ------------------------------------------------------------------------------------------
static void sft__embedding_forward(SftCtx *c, SftTensor x, SftTensor wte, SftTensor wpe, const int32_t *ids,
                                   const int32_t *pos) {
    int64_t N = x.dim[0], C = sft__width(x);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (N * C > SFT__SMALL)
    for (int64_t i = 0; i < N; i++) for (int64_t j = 0; j < C; j += SFT__PIECE) {
        int64_t n = SFT_MIN(SFT__PIECE, C - j);
        float a[SFT__PIECE], b[SFT__PIECE], *out = sft__place(a, x, i * C + j);
        sft_to_f32(out, sft__at(wte, ids[i] * C + j), wte.type, n);
        if (wpe.data) {
            const float *p = sft__widen(b, wpe, pos[i] * C + j, n);
            for (int64_t k = 0; k < n; k++) out[k] += p[k];
        }
        sft__round(x, i * C + j, out, n);
    }
}

// Tokens may share a row of dwte: a thread owns columns, not tokens, and adds to them in the order of the tokens.
static void sft__embedding_backward(SftCtx *c, SftTensor dwte, SftTensor dwpe, SftTensor dx, const int32_t *ids,
                                    const int32_t *pos) {
    int64_t N = dx.dim[0], C = sft__width(dx);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (N * C > SFT__SMALL)
    for (int64_t j = 0; j < C; j += 64) {
        int64_t n = SFT_MIN(64, C - j);
        float buf[64];
        for (int64_t i = 0; i < N; i++) {
            const float *d = sft__widen(buf, dx, i * C + j, n);
            float *e = (float *)dwte.data + ids[i] * C + j, *p = dwpe.data ? (float *)dwpe.data + pos[i] * C + j : NULL;
            for (int64_t k = 0; k < n; k++) e[k] += d[k];
            if (p) for (int64_t k = 0; k < n; k++) p[k] += d[k];
        }
    }
}

static void sft__gather_rows(SftCtx *c, SftTensor y, SftTensor x, const int32_t *index) {
    int64_t N = y.dim[0], C = sft__width(y);
    size_t row = (size_t)C * sft_type_size(y.type);
    if (sft_planning(c)) return;
    for (int64_t i = 0; i < N; i++) memcpy(sft__at(y, i * C), sft__at(x, index[i] * C), row);
}

static void sft__zero(SftCtx *c, SftTensor x) {
    size_t size = (size_t)sft_size(x) * sft_type_size(x.type), piece = 1 << 20;
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > piece)
    for (size_t at = 0; at < size; at += piece) memset((char *)x.data + at, 0, SFT_MIN(piece, size - at));
}

static void sft__scatter_rows(SftCtx *c, SftTensor dx, SftTensor dy, const int32_t *index) {
    int64_t N = dy.dim[0], C = sft__width(dy);
    size_t row = (size_t)C * sft_type_size(dy.type);
    sft__zero(c, dx);
    if (sft_planning(c)) return;
    for (int64_t i = 0; i < N; i++) memcpy(sft__at(dx, index[i] * C), sft__at(dy, i * C), row);
}

static void sft__convert(SftCtx *c, SftTensor y, SftTensor x) {
    int64_t size = sft_size(y);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t at = 0; at < size; at += SFT__BLOCK) {
        int64_t n = SFT_MIN(SFT__BLOCK, size - at);
        float buf[SFT__BLOCK];
        sft__round(y, at, sft__widen(buf, x, at, n), n);
    }
}

// [5.4] norms ----------------------------------------------------------------------------------------------------
/* LayerNorm (Ba, Kiros, Hinton 2016) and RMSNorm (Zhang, Sennrich 2019) are one computation: with u = (x - mean) rstd,
   y = u w + b; RMSNorm has mean = 0 and no b. Backward, with g = dy w:
   dx = rstd (g - average(g) - u average(g u)), where RMSNorm has no average(g), for its mean does not depend on x. */
static void sft__norm_forward(SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, SftTensor b, float eps,
                              bool centred) {
    int64_t C = sft_size(w), rows = C ? sft_size(x) / C : 0, threads = sft__threads();
    size_t mark = c->work->used;
    float *work = sft__floats(c, (2 * threads + 2) * C);
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return;
    const float *wf = sft__widen(work, w, 0, C), *bf = b.data ? sft__widen(work + C, b, 0, C) : NULL;
#pragma omp parallel for schedule(static) if (rows * C > SFT__SMALL)
    for (int64_t i = 0; i < rows; i++) {
        float *buf = work + (2 + 2 * sft__thread()) * C, mean = 0, square = 0;
        const float *xi = sft__widen(buf, x, i * C, C);
        if (centred) {
#pragma omp simd reduction(+ : mean)
            for (int64_t j = 0; j < C; j++) mean += xi[j];
            mean /= (float)C;
        }
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < C; j++) square += (xi[j] - mean) * (xi[j] - mean);
        float rstd = 1.0f / sqrtf(square / (float)C + eps), *out = sft__place(buf + C, y, i * C);
        if (bf) for (int64_t j = 0; j < C; j++) out[j] = (xi[j] - mean) * rstd * wf[j] + bf[j];
        else for (int64_t j = 0; j < C; j++) out[j] = (xi[j] - mean) * rstd * wf[j];
        sft__round(y, i * C, out, C);
        float *s = (float *)stat.data + (centred ? 2 * i : i);
        if (centred) *s++ = mean;
        *s = rstd;
    }
}
static void sft__layernorm_forward(SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, SftTensor b,
                                   float eps) {
    sft__norm_forward(c, y, stat, x, w, b, eps, true);
}
static void sft__rmsnorm_forward(SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, float eps) {
    sft__norm_forward(c, y, stat, x, w, SFT_NONE, eps, false);
}

// dw and db are sums over rows: over each of at most 64 blocks of rows, then over the blocks, in order.
enum { SFT__NORM_BLOCKS = 64, SFT__NORM_ROWS = 16 };
static void sft__norm_backward(SftCtx *c, SftTensor dx, SftTensor dw, SftTensor db, SftTensor dres, SftTensor dy,
                               SftTensor x, SftTensor w, SftTensor stat, bool centred) {
    int64_t C = sft_size(w), rows = C ? sft_size(dy) / C : 0, threads = sft__threads();
    int64_t step = SFT_MAX(SFT__NORM_ROWS, (rows + SFT__NORM_BLOCKS - 1) / SFT__NORM_BLOCKS);
    int64_t blocks = (rows + step - 1) / step;
    int64_t most = SFT_MIN(SFT__NORM_BLOCKS, (rows + SFT__NORM_ROWS - 1) / SFT__NORM_ROWS); // blocks, but it only grows
    size_t mark = c->work->used;
    float *work = sft__floats(c, (2 * most + 4 * threads + 1) * C), *bufs = work + 2 * most * C;
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return;
    const float *wf = sft__widen(bufs + 4 * threads * C, w, 0, C);
#pragma omp parallel for schedule(dynamic) if (rows * C > SFT__SMALL)
    for (int64_t block = 0; block < blocks; block++) {
        float *pw = work + 2 * block * C, *pb = pw + C, *buf = bufs + 4 * sft__thread() * C;
        memset(pw, 0, (size_t)(2 * C) * 4);
        for (int64_t i = block * step; i < SFT_MIN(rows, (block + 1) * step); i++) {
            const float *xi = sft__widen(buf, x, i * C, C), *dyi = sft__widen(buf + C, dy, i * C, C);
            const float *s = (const float *)stat.data + (centred ? 2 * i : i);
            float mean = centred ? *s++ : 0, rstd = *s, g1 = 0, g2 = 0;
#pragma omp simd reduction(+ : g1, g2)
            for (int64_t j = 0; j < C; j++) {
                float u = (xi[j] - mean) * rstd;
                pw[j] += dyi[j] * u, pb[j] += dyi[j];
                g1 += dyi[j] * wf[j], g2 += dyi[j] * wf[j] * u;
            }
            g1 = centred ? g1 / (float)C : 0, g2 /= (float)C;
            float *out = sft__place(buf + 2 * C, dx, i * C);
            if (dres.data) {
                const float *r = sft__widen(buf + 3 * C, dres, i * C, C);
                for (int64_t j = 0; j < C; j++)
                    out[j] = r[j] + rstd * (dyi[j] * wf[j] - g1 - (xi[j] - mean) * rstd * g2);
            } else {
                for (int64_t j = 0; j < C; j++) out[j] = rstd * (dyi[j] * wf[j] - g1 - (xi[j] - mean) * rstd * g2);
            }
            sft__round(dx, i * C, out, C);
        }
    }
    for (int64_t block = 0; block < blocks; block++) {
        const float *pw = work + 2 * block * C, *pb = pw + C;
        for (int64_t j = 0; j < C; j++) ((float *)dw.data)[j] += pw[j];
        if (db.data) for (int64_t j = 0; j < C; j++) ((float *)db.data)[j] += pb[j];
    }
}
static void sft__layernorm_backward(SftCtx *c, SftTensor dx, SftTensor dw, SftTensor db, SftTensor dres, SftTensor dy,
                                    SftTensor x, SftTensor w, SftTensor stat) {
    sft__norm_backward(c, dx, dw, db, dres, dy, x, w, stat, true);
}
static void sft__rmsnorm_backward(SftCtx *c, SftTensor dx, SftTensor dw, SftTensor dres, SftTensor dy, SftTensor x,
                                  SftTensor w, SftTensor stat) {
    sft__norm_backward(c, dx, dw, SFT_NONE, dres, dy, x, w, stat, false);
}

// [5.5] rotary positions -----------------------------------------------------------------------------------------
/* Rotary embedding (Su et al. 2021): numbers j and j + D/2 of a head are a point that is turned by pos * inv[j], inv[j]
   = theta^(-2j/D). Scalings stretch the slow turns of longer texts: linear (all by 1/factor), dynamic (theta grows with
   the document), llama3 (by wavelength, a ramp between two bounds), yarn (Peng et al. 2023: the same by number of
   turns). Frequencies are rounded to fp32, as in transformers: at position 8000 this turns the angle by 5e-4. */
static void sft__rope_table(SftCtx *c, SftTensor table, const SftArch *a, const int32_t *pos, const int32_t *begin,
                            const int32_t *end) {
    int64_t N = table.dim[0], half = a->D / 2;
    const float factor = sft_rope_scale(a);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (N * half > 1024)
    for (int64_t i0 = 0; i0 < N; i0 += 64) {
        float inv[256];
        int64_t length = -1;
        for (int64_t i = i0; i < SFT_MIN(i0 + 64, N); i++) {
            const int64_t n = end[i] - begin[i];
            if (length < 0 || (a->rope == SFT_ROPE_DYNAMIC && length != n))
                for (int64_t j = 0; j < half; j++) inv[j] = sft_rope_frequency(a, j, n);
            length = n;
            float *cosine = (float *)table.data + i * a->D, *sine = cosine + half;
            for (int64_t j = 0; j < half; j++) {
                float angle = (float)pos[i] * inv[j];
                cosine[j] = cosf(angle) * factor, sine[j] = sinf(angle) * factor;
            }
        }
    }
}

static void sft__rope(SftCtx *c, SftTensor x, SftTensor table, float sign) {
    int64_t N = x.dim[0], H = x.dim[1], D = x.dim[2], half = D / 2;
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (N * H * D > SFT__SMALL)
    for (int64_t i = 0; i < N; i++) for (int64_t h = 0; h < H; h++) {
        float buf[256], *v = sft__place(buf, x, (i * H + h) * D);
        const float *cosine = (const float *)table.data + i * D, *sine = cosine + half;
        if (x.type != SFT_F32) sft_to_f32(v, sft__at(x, (i * H + h) * D), x.type, D);
#pragma omp simd
        for (int64_t j = 0; j < half; j++) {
            float a = v[j], b = v[j + half], s = sign * sine[j];
            v[j] = a * cosine[j] - b * s, v[j + half] = b * cosine[j] + a * s;
        }
        sft__round(x, (i * H + h) * D, v, D);
    }
}
static void sft__rope_forward(SftCtx *c, SftTensor x, SftTensor table) { sft__rope(c, x, table, 1); }
static void sft__rope_backward(SftCtx *c, SftTensor dx, SftTensor table) { sft__rope(c, dx, table, -1); }

// [5.6] attention ------------------------------------------------------------------------------------------------
/* softmax(scale q k^T) v without the T x T matrix (Milakov, Gimelshein 2018; Dao et al. 2022), on the register tile.
   A task is a head and a block of queries. Its queries stand side by side in strips of NR lanes, keys run down the
   rows: the scores of 64 keys are S[key][query] = k q^T. So the softmax over keys never crosses lanes (maximum,
   exponential, sum and masks are vector code), and S already is the packed strip that the second product v^T S wants:
   nothing is moved between the two. Outputs accumulate as O[d][query] and are turned round once, at the end.
   Backward recomputes S from lse, twice: once per block of queries for dq, once per block of keys for dk and dv (7
   products instead of 5). In return every output has one owner, and the order of its sum is fixed.
     P = exp(scale s - lse);  dv = P^T dy;  dP = dy v^T;  delta = dy . y;
     dS = scale P (dP - delta);  dq = dS k;  dk = dS^T q
   Rows no lane of a strip may see are skipped in steps of MR: other documents cost nothing, the causal mask little. */
enum { SFT__QUERIES = 128, SFT__KEYS = 64 / SFT__MR * SFT__MR };

typedef struct { // what all tasks of one call share
    SftTensor q, k, v, dy;
    int64_t N, M, H, K, D, Dp; // Dp: D in whole rows of the register tile
    const int32_t *begin, *end;
    float scale;
    int64_t window;
} SftAttention;

// Keys low .. high are seen by query i.
static inline int64_t sft__key_high(const SftAttention *t, int64_t i) { return i + t->M - t->N; }
static inline int64_t sft__key_low(const SftAttention *t, int64_t i) {
    int64_t high = sft__key_high(t, i);
    return t->window ? SFT_MAX(t->begin[i], high - t->window + 1) : t->begin[i];
}

// Head h of a tensor as an operand: rows are tokens.
static SftMat sft__head(SftTensor t, int64_t h) { return (SftMat){sft__at(t, h * t.dim[2]), t.type, sft__width(t), 1}; }
// n tokens from `first` on as strips of W tokens, D deep, or as strips of MR numbers of the head, n deep.
static void sft__pack_lanes(float *dst, SftTensor t, int64_t h, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; i += SFT__NR)
        sft__pack(dst + i * t.dim[2], SFT__NR, sft__head(t, h), first + i, SFT_MIN(SFT__NR, n - i), 0, t.dim[2], false);
}
static void sft__pack_tokens(float *dst, SftTensor t, int64_t h, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; i += SFT__MR)
        sft__pack(dst + i * t.dim[2], SFT__MR, sft__head(t, h), first + i, SFT_MIN(SFT__MR, n - i), 0, t.dim[2], false);
}
static void sft__pack_turned(float *dst, SftTensor t, int64_t h, int64_t first, int64_t n) {
    const int64_t D = t.dim[2], whole = D / SFT__MR * SFT__MR;
    for (int64_t i = 0; i < n; i++) { // token by token: tokens are so far apart that they share few sets of the cache
        float buf[256];
        const float *x = sft__widen(buf, t, (first + i) * sft__width(t) + h * D, D);
        for (int64_t d = 0; d < whole; d += SFT__MR) memcpy(dst + d * n + i * SFT__MR, x + d, SFT__MR * 4);
        for (int64_t d = whole; d < t.dim[2]; d++) dst[whole * n + i * SFT__MR + d - whole] = x[d];
        for (int64_t d = D; whole < D && d < whole + SFT__MR; d++) dst[whole * n + i * SFT__MR + d - whole] = 0;
    }
}

// out[rows][NR] (+)= a b: a in strips of MR rows that are `strip` numbers long, b one strip, `n` deep.
static void sft__lanes(float *out, const float *a, int64_t strip, const float *b, int64_t rows, int64_t n, bool add) {
    for (int64_t r = 0; r < rows; r += SFT__MR) sft__tile(out + r * SFT__NR, a + r / SFT__MR * strip, b, n, false, add);
}

// Writes lanes 0 .. n of o[D][NR] to tokens first .. first+n of head h.
static void sft__unpack_lanes(SftTensor out, int64_t h, int64_t first, int64_t n, const float *o) {
    int64_t D = out.dim[2];
    float turned[SFT__NR * SFT__NR];
    for (int64_t d = 0; d < D; d += SFT__NR) {
        int64_t wide = SFT_MIN(SFT__NR, D - d);
        sft__pack(turned, SFT__NR, (SftMat){o, SFT_F32, SFT__NR, 1}, d, (int)wide, 0, SFT__NR, false);
        for (int64_t i = 0; i < n; i++)
            sft__round(out, (first + i) * sft__width(out) + h * D + d, turned + i * SFT__NR, wide);
    }
}

typedef struct { // one strip of queries in forward: running maximum, sum, and the range of keys of each lane
    float most[SFT__NR], sum[SFT__NR];
    int32_t low[SFT__NR], high[SFT__NR];
} SftSoftmax;

// s[rows][NR], keys `key` and following: s = exp(scale s - maximum), the strip's sum and o[Dp][NR] follow the maximum.
static void sft__softmax_step(float *s, int64_t rows, int64_t key, float scale, SftSoftmax *t, float *o, int64_t Dp) {
    float most[SFT__NR], shrink[SFT__NR], sum[SFT__NR] = {0};
    memcpy(most, t->most, sizeof most);
    for (int64_t r = 0; r < rows; r++) {
        float *row = s + r * SFT__NR;
        int32_t at = (int32_t)(key + r);
        for (int j = 0; j < SFT__NR; j++) {
            float x = (at >= t->low[j]) & (at <= t->high[j]) ? row[j] * scale : -INFINITY;
            row[j] = x;
            most[j] = x > most[j] ? x : most[j];
        }
    }
    for (int j = 0; j < SFT__NR; j++) shrink[j] = sft_exp(t->most[j] - most[j]);
    for (int64_t r = 0; r < rows; r++) {
        float *row = s + r * SFT__NR;
        for (int j = 0; j < SFT__NR; j++) row[j] = sft_exp(row[j] - most[j]), sum[j] += row[j];
    }
    for (int j = 0; j < SFT__NR; j++) t->sum[j] = t->sum[j] * shrink[j] + sum[j], t->most[j] = most[j];
    for (int64_t d = 0; d < Dp; d++)
        for (int j = 0; j < SFT__NR; j++) o[d * SFT__NR + j] *= shrink[j];
}

static void sft__attend(const SftAttention *t, SftTensor y, SftTensor lse, int64_t h, int64_t q0, float *work) {
    const int64_t n = SFT_MIN(SFT__QUERIES, t->N - q0), kh = h / (t->H / t->K), D = t->D;
    float *q = work, *k = q + SFT__QUERIES * D, *v = k + SFT__KEYS * D;
    float *s = v + SFT__KEYS * t->Dp, *o = s + SFT__KEYS * SFT__NR;
    SftSoftmax strip[SFT__QUERIES / SFT__NR];
    sft__pack_lanes(q, t->q, h, q0, n);
    memset(o, 0, (size_t)(SFT__QUERIES * t->Dp) * 4);
    for (int64_t i = 0; i < sft__round_up(n, SFT__NR); i++) {
        SftSoftmax *x = &strip[i / SFT__NR];
        const int lane = (int)(i % SFT__NR);
        x->most[lane] = -1e30f, x->sum[lane] = 0; // finite: -INFINITY - -INFINITY would be NaN
        x->low[lane] = i < n ? (int32_t)sft__key_low(t, q0 + i) : 1;
        x->high[lane] = i < n ? (int32_t)sft__key_high(t, q0 + i) : 0;
    }
    const int64_t last = sft__key_high(t, q0 + n - 1) + 1;
    for (int64_t k0 = sft__key_low(t, q0); k0 < last; k0 += SFT__KEYS) {
        const int64_t nk = SFT_MIN(SFT__KEYS, last - k0);
        sft__pack_tokens(k, t->k, kh, k0, nk);
        sft__pack_turned(v, t->v, kh, k0, nk);
        for (int64_t i = 0; i < n; i += SFT__NR) {
            SftSoftmax *x = &strip[i / SFT__NR];
            const int64_t end = sft__key_high(t, q0 + SFT_MIN(i + SFT__NR, n) - 1) + 1; // of the keys the strip sees
            int64_t a = SFT_MAX(x->low[0] - k0, 0) / SFT__MR * SFT__MR, b = SFT_MIN(end - k0, nk);
            if (a >= b) continue;
            sft__lanes(s, k + a * D, SFT__MR * D, q + i * D, b - a, D, false);
            sft__softmax_step(s, b - a, k0 + a, t->scale, x, o + i * t->Dp, t->Dp);
            sft__lanes(o + i * t->Dp, v + a * SFT__MR, SFT__MR * nk, s, t->Dp, b - a, true);
        }
    }
    for (int64_t i = 0; i < n; i += SFT__NR) {
        const SftSoftmax *x = &strip[i / SFT__NR];
        float inverse[SFT__NR], *oi = o + i * t->Dp;
        for (int j = 0; j < SFT__NR; j++) inverse[j] = x->sum[j] > 0 ? 1 / x->sum[j] : x->sum[j] == 0 ? 0 : x->sum[j];
        for (int64_t d = 0; d < D; d++)
            for (int j = 0; j < SFT__NR; j++) oi[d * SFT__NR + j] *= inverse[j];
        float *out = (float *)lse.data + (q0 + i) * t->H + h;
        for (int64_t j = 0; j < SFT_MIN(SFT__NR, n - i); j++) out[j * t->H] = x->most[j] + logf(x->sum[j]);
        sft__unpack_lanes(y, h, q0 + i, SFT_MIN(SFT__NR, n - i), oi);
    }
}

// Floats of a thread's workspace: `lanes` strips [D][128], `sums` accumulators [Dp][128], the rest tiles of 64 keys.
static int64_t sft__attention_work(int64_t D, int lanes, int sums, int tiles) {
    int64_t Dp = sft__round_up(D, SFT__MR);
    int64_t blocks = SFT__QUERIES * (lanes * D + sums * Dp), keys = SFT__KEYS * (tiles * Dp + 2 * SFT__NR + 2);
    return sft__round_up(blocks + keys, 16);
}

static void sft__attention_forward(SftCtx *c, SftTensor y, SftTensor lse, SftTensor q, SftTensor k, SftTensor v,
                                   const int32_t *begin, float scale, int64_t window) {
    const int64_t each = sft__attention_work(q.dim[2], 1, 1, 2);
    size_t mark = c->work->used;
    float *work = sft__floats(c, each * sft__threads());
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return;
    const SftAttention t = {q, k, v, SFT_NONE, q.dim[0], k.dim[0], q.dim[1], k.dim[1], q.dim[2],
                            sft__round_up(q.dim[2], SFT__MR), begin, NULL, scale, window};
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < t.N; i += SFT__QUERIES)
        for (int64_t h = 0; h < t.H; h++) sft__attend(&t, y, lse, h, i, work + each * sft__thread());
}

// dq of a block of queries: lanes are queries, rows are keys.
static void sft__attend_dq(const SftAttention *t, SftTensor dq, const float *lse, const float *delta, int64_t h,
                           int64_t q0, float *work) {
    const int64_t n = SFT_MIN(SFT__QUERIES, t->N - q0), kh = h / (t->H / t->K), D = t->D, last = q0 + n;
    float *q = work, *dy = q + SFT__QUERIES * D, *o = dy + SFT__QUERIES * D, *k = o + SFT__QUERIES * t->Dp;
    float *v = k + SFT__KEYS * D, *kt = v + SFT__KEYS * D, *s = kt + SFT__KEYS * t->Dp, *dp = s + SFT__KEYS * SFT__NR;
    sft__pack_lanes(q, t->q, h, q0, n);
    sft__pack_lanes(dy, t->dy, h, q0, n);
    memset(o, 0, (size_t)(SFT__QUERIES * t->Dp) * 4);
    for (int64_t k0 = sft__key_low(t, q0); k0 < last; k0 += SFT__KEYS) {
        const int64_t nk = SFT_MIN(SFT__KEYS, last - k0);
        sft__pack_tokens(k, t->k, kh, k0, nk);
        sft__pack_tokens(v, t->v, kh, k0, nk);
        sft__pack_turned(kt, t->k, kh, k0, nk);
        for (int64_t i = 0; i < n; i += SFT__NR) {
            const int64_t lanes = SFT_MIN(SFT__NR, n - i);
            int64_t a = SFT_MAX(sft__key_low(t, q0 + i) - k0, 0) / SFT__MR * SFT__MR;
            int64_t b = SFT_MIN(q0 + i + lanes - k0, nk);
            if (a >= b) continue;
            float L[SFT__NR] = {0}, delta_of[SFT__NR] = {0};
            int32_t low[SFT__NR], high[SFT__NR];
            for (int64_t j = 0; j < SFT__NR; j++) {
                const int64_t at = q0 + i + j, row = at * t->H + h;
                if (j < lanes) L[j] = lse[row], delta_of[j] = delta[row];
                low[j] = j < lanes ? (int32_t)sft__key_low(t, at) : 1, high[j] = j < lanes ? (int32_t)at : 0;
            }
            sft__lanes(s, k + a * D, SFT__MR * D, q + i * D, b - a, D, false);
            sft__lanes(dp, v + a * D, SFT__MR * D, dy + i * D, b - a, D, false);
            for (int64_t r = 0; r < b - a; r++) {
                float *sr = s + r * SFT__NR, *dr = dp + r * SFT__NR;
                int32_t at = (int32_t)(k0 + a + r);
                for (int j = 0; j < SFT__NR; j++) {
                    float p = (at >= low[j]) & (at <= high[j]) ? sr[j] * t->scale - L[j] : -INFINITY;
                    sr[j] = sft_exp(p) * (dr[j] - delta_of[j]) * t->scale;
                }
            }
            sft__lanes(o + i * t->Dp, kt + a * SFT__MR, SFT__MR * nk, s, t->Dp, b - a, true);
        }
    }
    for (int64_t i = 0; i < n; i += SFT__NR) sft__unpack_lanes(dq, h, q0 + i, SFT_MIN(SFT__NR, n - i), o + i * t->Dp);
}

// dk, dv of a block of keys: lanes are keys, rows are the queries of every head that shares the key head.
static void sft__attend_dkv(const SftAttention *t, SftTensor dk, SftTensor dv, const float *lse, const float *delta,
                            int64_t kh, int64_t k0, float *work) {
    const int64_t n = SFT_MIN(SFT__QUERIES, t->N - k0), group = t->H / t->K, D = t->D;
    float *k = work, *v = k + SFT__QUERIES * D, *ok = v + SFT__QUERIES * D, *ov = ok + SFT__QUERIES * t->Dp;
    float *q = ov + SFT__QUERIES * t->Dp, *dy = q + SFT__KEYS * D, *qt = dy + SFT__KEYS * D;
    float *dyt = qt + SFT__KEYS * t->Dp, *s = dyt + SFT__KEYS * t->Dp, *dp = s + SFT__KEYS * SFT__NR;
    sft__pack_lanes(k, t->k, kh, k0, n);
    sft__pack_lanes(v, t->v, kh, k0, n);
    memset(ok, 0, (size_t)(2 * SFT__QUERIES * t->Dp) * 4);
    const int64_t last = t->window ? SFT_MIN(t->end[k0 + n - 1], k0 + n - 1 + t->window) : t->end[k0 + n - 1];
    for (int64_t h = kh * group; h < (kh + 1) * group; h++)
        for (int64_t q0 = k0; q0 < last; q0 += SFT__KEYS) {
            const int64_t nq = SFT_MIN(SFT__KEYS, last - q0);
            sft__pack_tokens(q, t->q, h, q0, nq);
            sft__pack_tokens(dy, t->dy, h, q0, nq);
            sft__pack_turned(qt, t->q, h, q0, nq);
            sft__pack_turned(dyt, t->dy, h, q0, nq);
            for (int64_t i = 0; i < n; i += SFT__NR) {
                const int64_t key = k0 + i, final = key + SFT_MIN(SFT__NR, n - i) - 1; // the strip's keys
                const int64_t seen = t->window ? SFT_MIN(t->end[final], final + t->window) : t->end[final];
                int64_t a = SFT_MAX(key - q0, 0) / SFT__MR * SFT__MR, b = SFT_MIN(seen - q0, nq);
                if (a >= b) continue;
                sft__lanes(s, q + a * D, SFT__MR * D, k + i * D, b - a, D, false);
                sft__lanes(dp, dy + a * D, SFT__MR * D, v + i * D, b - a, D, false);
                for (int64_t r = 0; r < b - a; r++) {
                    const int64_t at = q0 + a + r;
                    const float L = lse[at * t->H + h], delta_of = delta[at * t->H + h];
                    const int32_t low = (int32_t)(sft__key_low(t, at) - key), high = (int32_t)(at - key);
                    float *sr = s + r * SFT__NR, *dr = dp + r * SFT__NR;
                    for (int32_t j = 0; j < SFT__NR; j++) {
                        float p = sft_exp((j >= low) & (j <= high) ? sr[j] * t->scale - L : -INFINITY);
                        sr[j] = p, dr[j] = p * (dr[j] - delta_of) * t->scale;
                    }
                }
                sft__lanes(ov + i * t->Dp, dyt + a * SFT__MR, SFT__MR * nq, s, t->Dp, b - a, true);
                sft__lanes(ok + i * t->Dp, qt + a * SFT__MR, SFT__MR * nq, dp, t->Dp, b - a, true);
            }
        }
    for (int64_t i = 0; i < n; i += SFT__NR) {
        sft__unpack_lanes(dk, kh, k0 + i, SFT_MIN(SFT__NR, n - i), ok + i * t->Dp);
        sft__unpack_lanes(dv, kh, k0 + i, SFT_MIN(SFT__NR, n - i), ov + i * t->Dp);
    }
}

static void sft__attention_backward(SftCtx *c, SftTensor dq, SftTensor dk, SftTensor dv, SftTensor dy, SftTensor y,
                                    SftTensor lse, SftTensor q, SftTensor k, SftTensor v, const int32_t *begin,
                                    const int32_t *end, float scale, int64_t window) {
    const int64_t each = sft__attention_work(q.dim[2], 2, 2, 4), N = q.dim[0], H = q.dim[1], K = k.dim[1], D = q.dim[2];
    size_t mark = c->work->used;
    float *delta = sft__floats(c, N * H), *work = sft__floats(c, each * sft__threads());
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return;
    const SftAttention t = {q, k, v, dy, N, N, H, K, D, sft__round_up(D, SFT__MR), begin, end, scale, window};
    const float *L = (const float *)lse.data;
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < N * H; i++) {
            float a[256], b[256];
            delta[i] = sft__dot(sft__widen(a, dy, i * D, D), sft__widen(b, y, i * D, D), D);
        }
#pragma omp for collapse(2) schedule(dynamic) nowait
        for (int64_t i = 0; i < N; i += SFT__QUERIES)
            for (int64_t h = 0; h < H; h++) sft__attend_dq(&t, dq, L, delta, h, i, work + each * sft__thread());
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t i = 0; i < N; i += SFT__QUERIES)
            for (int64_t h = 0; h < K; h++) sft__attend_dkv(&t, dk, dv, L, delta, h, i, work + each * sft__thread());
    }
}

// [5.7] SwiGLU, loss, optimizer ----------------------------------------------------------------------------------
static void sft__swiglu_forward(SftCtx *c, SftTensor y, SftTensor gate, SftTensor up) {
    int64_t size = sft_size(y);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t at = 0; at < size; at += SFT__BLOCK) {
        int64_t n = SFT_MIN(SFT__BLOCK, size - at);
        float a[SFT__BLOCK], b[SFT__BLOCK], o[SFT__BLOCK], *out = sft__place(o, y, at);
        const float *g = sft__widen(a, gate, at, n), *u = sft__widen(b, up, at, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) out[j] = sft_silu(g[j]) * u[j];
        sft__round(y, at, out, n);
    }
}

static void sft__swiglu_backward(SftCtx *c, SftTensor dgate, SftTensor dup, SftTensor dy, SftTensor gate,
                                 SftTensor up) {
    int64_t size = sft_size(dy);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t at = 0; at < size; at += SFT__BLOCK) {
        int64_t n = SFT_MIN(SFT__BLOCK, size - at);
        float b0[SFT__BLOCK], b1[SFT__BLOCK], b2[SFT__BLOCK], b3[SFT__BLOCK], b4[SFT__BLOCK];
        const float *d = sft__widen(b0, dy, at, n), *g = sft__widen(b1, gate, at, n), *u = sft__widen(b2, up, at, n);
        float *dg = sft__place(b3, dgate, at), *du = sft__place(b4, dup, at);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            float gj = g[j], uj = u[j];
            dg[j] = d[j] * uj * sft_silu_grad(gj), du[j] = d[j] * sft_silu(gj);
        }
        sft__round(dgate, at, dg, n), sft__round(dup, at, du, n);
    }
}

// Two passes over a row: maximum and sum of exponentials (rescaled when the maximum grows), then loss and gradient.
static void sft__cross_entropy(SftCtx *c, SftTensor loss, SftTensor logits, const int32_t *target, int64_t V,
                               float scale) {
    int64_t N = logits.dim[0], Vp = sft__width(logits);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(dynamic) if (N * Vp > SFT__SMALL)
    for (int64_t i = 0; i < N; i++) {
        float buf[SFT__PIECE], most = -1e30f, *out = (float *)loss.data + i;
        double sum = 0;
        if (target[i] < 0) {
            *out = 0;
            if (scale != 0) memset(sft__at(logits, i * Vp), 0, (size_t)Vp * sft_type_size(logits.type));
            continue;
        }
        for (int64_t j = 0; j < V; j += SFT__PIECE) {
            int64_t n = SFT_MIN(SFT__PIECE, V - j);
            const float *x = sft__widen(buf, logits, i * Vp + j, n);
            float m = most, s = 0;
#pragma omp simd reduction(max : m)
            for (int64_t k = 0; k < n; k++) m = x[k] > m ? x[k] : m;
#pragma omp simd reduction(+ : s)
            for (int64_t k = 0; k < n; k++) s += sft_exp(x[k] - m);
            sum = sum * exp((double)most - m) + s, most = m;
        }
        float x, lse = most + (float)log(sum);
        *out = lse - *sft__widen(&x, logits, i * Vp + target[i], 1);
        if (scale == 0) continue;
        for (int64_t j = 0; j < Vp; j += SFT__PIECE) {
            int64_t n = SFT_MIN(SFT__PIECE, Vp - j), inside = SFT_MIN(SFT_MAX(V - j, 0), n);
            float *d = sft__place(buf, logits, i * Vp + j);
            const float *l = sft__widen(buf, logits, i * Vp + j, n);
            for (int64_t k = 0; k < inside; k++) d[k] = sft_exp(l[k] - lse) * scale;
            for (int64_t k = inside; k < n; k++) d[k] = 0;
            if (target[i] >= j && target[i] < j + n) d[target[i] - j] -= scale;
            sft__round(logits, i * Vp + j, d, n);
        }
    }
}

static void sft__sums(SftCtx *c, double *sum, SftTensor x) {
    const int64_t size = sft_size(x), block = 1 << 16, blocks = (size + block - 1) / block;
    size_t mark = c->work->used;
    double *part = (double *)sft_take(c->work, (size_t)blocks * 2 * sizeof(double));
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t b = 0; b < blocks; b++) {
        double s = 0, square = 0;
        for (int64_t at = b * block; at < SFT_MIN(size, (b + 1) * block); at += SFT__BLOCK) {
            int64_t n = SFT_MIN(SFT__BLOCK, size - at);
            float buf[SFT__BLOCK];
            const float *v = sft__widen(buf, x, at, n);
            for (int64_t j = 0; j < n; j += 16) __builtin_prefetch(v + j + 2 * SFT__BLOCK); // one stream is slow alone
#pragma omp simd reduction(+ : s, square)
            for (int64_t j = 0; j < n; j++) s += (double)v[j], square += (double)v[j] * v[j];
        }
        part[2 * b] = s, part[2 * b + 1] = square;
    }
    for (int64_t b = 0; b < blocks; b++) sum[0] += part[2 * b], sum[1] += part[2 * b + 1];
}

static void sft__clip(SftCtx *c, float *factor, const double *sum, int64_t n, double max_norm, double scale) {
    if (sft_planning(c)) return;
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += sum[2 * i + 1];
    *factor = isfinite(squares) ? (float)(sft_clip(sqrt(squares) / scale, max_norm) / scale) : NAN;
}

static void sft__adamw(SftCtx *c, SftTensor weights, SftTensor master, SftTensor m, SftTensor v, SftTensor grad,
                       const float *factor, SftAdam adam) {
    int64_t size = sft_size(master);
    if (sft_planning(c) || isnan(*factor)) return;
    const float f = *factor;
    const SftAdamFactors same = sft_adam_factors(adam);
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t at = 0; at < size; at += SFT__BLOCK) {
        int64_t n = SFT_MIN(SFT__BLOCK, size - at);
        float *w = (float *)master.data + at, *mi = (float *)m.data + at, *vi = (float *)v.data + at;
        const float *g = (const float *)grad.data + at;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) sft_adamw(w + j, mi + j, vi + j, g[j] * f, same);
        if (weights.data) sft_from_f32(sft__at(weights, at), weights.type, w, n);
    }
}

// Ops and host share one memory: pieces are where they are needed already.
static void sft__transfer(SftCtx *c, void *to, const void *from, size_t bytes) {
    (void)c;
    if (to != from) memcpy(to, from, bytes);
}
static void sft__wait(SftCtx *c) { (void)c; }
static SftDevice sft__device(void) {
    size_t bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return (SftDevice){.name = "this machine", .memory = bytes, .free = bytes}; // others' share can be swapped out
}

// [5.8] weights in 4 and 8 bits ----------------------------------------------------------------------------------
/* NF4 (QLoRA, Dettmers et al. 2023): a number is one of 16, times the largest absolute value of its block of 64: 4.5
   bits a weight, 4.127 when the maxima are themselves quantised ("double": their mean is subtracted, then 8 bits each,
   scaled by the largest of 256). 8 bits (LLM.int8(), Dettmers et al. 2022): whole numbers, 127 of them either way to
   the row's largest absolute value. bitsandbytes rounds weights to fp16 before it makes 8 bits of them; here the caller
   may. A block or a row of zeros becomes zeros again. */
static void sft__nf4_nest(SftNf4 q, const float *absmax, int64_t blocks) {
    double sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += (double)absmax[b];
    *q.offset = blocks ? (float)(sum / (double)blocks) : 0;
    for (int64_t first = 0; first < blocks; first += SFT_NF4_NEST) {
        const int64_t end = SFT_MIN(blocks, first + SFT_NF4_NEST);
        float most = 0;
        for (int64_t b = first; b < end; b++) most = SFT_MAX(most, fabsf(absmax[b] - *q.offset));
        for (int64_t b = first; b < end; b++)
            q.level[b] = (uint8_t)sft_dynamic8_code((absmax[b] - *q.offset) * (1.0f / most));
        q.nested[first / SFT_NF4_NEST] = most;
    }
}
static void sft__nf4_quantize(SftCtx *c, SftNf4 q, SftTensor w) {
    const int64_t size = sft_size(w), blocks = (size + SFT_NF4_BLOCK - 1) / SFT_NF4_BLOCK;
    const size_t mark = c->work->used;
    float *maxima = sft__floats(c, blocks), *absmax = q.absmax ? q.absmax : maxima;
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * SFT_NF4_BLOCK, n = SFT_MIN(SFT_NF4_BLOCK, size - at);
        float buf[SFT_NF4_BLOCK], most = 0;
        const float *x = sft__widen(buf, w, at, n);
        for (int64_t i = 0; i < n; i++) most = SFT_MAX(most, fabsf(x[i]));
        const float scale = 1.0f / most;
        for (int64_t i = 0; i < n; i += 2) {
            const int high = sft_nf4_code(x[i] * scale), low = sft_nf4_code(i + 1 < n ? x[i + 1] * scale : 0);
            q.code[(at + i) / 2] = (uint8_t)(high << 4 | low);
        }
        absmax[b] = most;
    }
    if (!q.absmax) sft__nf4_nest(q, absmax, blocks);
}
static void sft__nf4_dequantize(SftCtx *c, SftTensor w, SftNf4 q) {
    const int64_t size = sft_size(w), blocks = (size + SFT_NF4_BLOCK - 1) / SFT_NF4_BLOCK;
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (size > SFT__SMALL)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * SFT_NF4_BLOCK, n = SFT_MIN(SFT_NF4_BLOCK, size - at);
        float buf[SFT_NF4_BLOCK], *x = sft__place(buf, w, at);
        const float most = q.absmax ? q.absmax[b] : sft_dynamic8(q.level[b]) * q.nested[b / SFT_NF4_NEST] + *q.offset;
        for (int64_t i = 0; i < n; i++)
            x[i] = sft_nf4(i % 2 ? q.code[(at + i) / 2] & 15 : q.code[(at + i) / 2] >> 4) * most;
        sft__round(w, at, x, n);
    }
}
static void sft__int8_quantize(SftCtx *c, SftInt8 q, SftTensor w) {
    const int64_t N = w.dim[0], C = sft__width(w);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (N * C > SFT__SMALL)
    for (int64_t i = 0; i < N; i++) {
        float buf[SFT__PIECE], most = 0;
        for (int64_t j = 0; j < C; j += SFT__PIECE) {
            const int64_t n = SFT_MIN(SFT__PIECE, C - j);
            const float *x = sft__widen(buf, w, i * C + j, n);
            for (int64_t k = 0; k < n; k++) most = SFT_MAX(most, fabsf(x[k]));
        }
        const float scale = most > 0 ? 127.0f / most : 0;
        for (int64_t j = 0; j < C; j += SFT__PIECE) {
            const int64_t n = SFT_MIN(SFT__PIECE, C - j);
            const float *x = sft__widen(buf, w, i * C + j, n);
            for (int64_t k = 0; k < n; k++) q.code[i * C + j + k] = (int8_t)rintf(x[k] * scale);
        }
        q.absmax[i] = most;
    }
}
static void sft__int8_dequantize(SftCtx *c, SftTensor w, SftInt8 q) {
    const int64_t N = w.dim[0], C = sft__width(w);
    if (sft_planning(c)) return;
#pragma omp parallel for schedule(static) if (N * C > SFT__SMALL)
    for (int64_t i = 0; i < N; i++)
        for (int64_t j = 0; j < C; j += SFT__PIECE) {
            const int64_t n = SFT_MIN(SFT__PIECE, C - j);
            float buf[SFT__PIECE], *x = sft__place(buf, w, i * C + j);
            for (int64_t k = 0; k < n; k++) x[k] = (float)q.code[i * C + j + k] * q.absmax[i] * (1.0f / 127);
            sft__round(w, i * C + j, x, n);
        }
}

const SftOps sft_cpu = {
    .name = "cpu",
    .reserve = sft__reserve,
    .release = sft__release,
    .upload = sft__transfer,
    .download = sft__transfer,
    .wait = sft__wait,
    .device = sft__device,
#define X(op, args) .op = sft__##op,
    SFT_OPS(X)
#undef X
};

/* ================================================================================================================
   [6] forward: the block and the model; backward beside it; activation checkpointing
   ================================================================================================================
   N token ids become hidden states, go through L equal blocks, x -> x + attention(norm(x)) -> x + mlp(norm(x)),
   and a final norm; the head and the loss compare them with the tokens that follow. Backward walks the same
   lines from the last to the first, in the order of the chain rule.
   In:    a batch: any mixture of documents in one row, up to m->tokens of them; nothing is padded.
   Out:   sft_forward m->final; sft_loss the loss and m->dnorm; sft_backward every unit's grad (+=).
   Keeps: what is allocated is what was planned, to the byte: the plan is this code, run on arenas that count.
          With checkpointing a block keeps only its input and is run again before its backward: the same bits.
   Guard: test_forward: PyTorch's logits, losses and gradients of every family; packed = alone; peak = plan.
   Pitfall: two tensors that share memory while both are needed. Every sharing here has its reason beside it. */

// Layers. A layer is named by its two slots in the tensor table: SFT__LAYER(up) are its weight and its bias.
#define SFT__LAYER(name) SFT_SLOT_##name##_w, SFT_SLOT_##name##_b
static SftTensor sft__slot(const SftWeights *w, SftSlot slot) { return *sft_weight((SftWeights *)w, slot); }
static SftTensor sft__flat(SftTensor t) { // [N,H,D] -> [N,H*D]: heads side by side
    return sft_tensor(t.data, t.type, t.dim[0], t.dim[1] * t.dim[2], 1);
}

// y[N,O] = act(x[N,I] W^T + bias) + residual; pre (if not absent) = what enters act
static void sft__linear_forward(SftCtx *c, SftTensor y, SftTensor pre, SftTensor x, const SftUnit *u, SftSlot w,
                                SftSlot b, SftTensor residual, SftAct act) {
    const SftTensor weight = sft__slot(&u->w, w), bias = sft__slot(&u->w, b);
    c->ops->matmul_forward(c, sft__flat(y), pre, sft__flat(x), weight, SFT_NO_SIDE, bias, residual, 1, act);
}

// dW += dy^T x, dbias += dy; then dx[N,I] = (add ? dx : 0) + (dy[N,O] W) * act'(pre). dW comes first, so that dx
// may take the place of x.
static void sft__linear_backward(SftCtx *c, SftTensor dx, SftTensor dy, SftTensor x, const SftUnit *u, SftSlot w,
                                 SftSlot b, SftTensor pre, SftAct act, bool add) {
    c->ops->matmul_backward_w(c, sft__slot(&u->dw, w), sft__slot(&u->dw, b), sft__flat(dy), sft__flat(x));
    c->ops->matmul_backward_x(c, sft__flat(dx), sft__flat(dy), sft__slot(&u->w, w), SFT_NO_SIDE, pre, 1, act, add);
}

// y[N,C] = the family's norm of x; stat: what backward will need of each row
static void sft__normalize_forward(SftCtx *c, const SftArch *s, SftTensor y, SftTensor stat, SftTensor x,
                                   const SftUnit *u, SftSlot w, SftSlot b) {
    const SftTensor weight = sft__slot(&u->w, w);
    if (s->layernorm) c->ops->layernorm_forward(c, y, stat, x, weight, sft__slot(&u->w, b), s->norm_eps);
    else c->ops->rmsnorm_forward(c, y, stat, x, weight, s->norm_eps);
}

// dx = dres (may be dx itself, or absent) + the norm's gradient; dw, db +=
static void sft__normalize_backward(SftCtx *c, const SftArch *s, SftTensor dx, SftTensor dres, SftTensor dy,
                                    SftTensor x, SftTensor stat, const SftUnit *u, SftSlot w, SftSlot b) {
    const SftTensor weight = sft__slot(&u->w, w), dw = sft__slot(&u->dw, w), db = sft__slot(&u->dw, b);
    if (s->layernorm) c->ops->layernorm_backward(c, dx, dw, db, dres, dy, x, weight, stat);
    else c->ops->rmsnorm_backward(c, dx, dw, dres, dy, x, weight, stat);
}

static float sft__attn_scale(const SftArch *s, int64_t layer) {
    return s->scale_by_layer ? s->attn_scale / (float)(layer + 1) : s->attn_scale;
}
static int64_t sft__window(const SftArch *s, int64_t layer) { return layer < s->window_from ? 0 : s->window; }

// The activations of a block for a batch of n tokens. Attention looks at the batch's own keys, or at a cache's, whose
// next rows they are then.
static SftActs sft__acts(const SftModel *m, int64_t layer, int64_t n, const SftCache *cache) {
    SftActs a = m->acts[layer];
    SftTensor *t = (SftTensor *)&a;
    for (size_t i = 0; i < sizeof a / sizeof *t; i++)
        if (t[i].dim[0]) t[i] = sft_rows(t[i], 0, n);
    if (cache) a.k = sft_rows(cache->keys[layer], cache->n, n), a.v = sft_rows(cache->values[layer], cache->n, n);
    a.keys = cache ? sft_rows(cache->keys[layer], 0, cache->n + n) : a.k;
    a.values = cache ? sft_rows(cache->values[layer], 0, cache->n + n) : a.v;
    return a;
}

/* out[N,C] = block(a.x[N,C]). begin[N]: where each token's document begins in the keys. With `out` absent all is made
   but the output: what backward needs, and checkpointing asks for. */
static void sft__block_forward(SftCtx *c, const SftModel *m, int64_t layer, SftActs a, const int32_t *begin,
                               SftTensor out) {
    const SftArch *s = &m->arch;
    const SftUnit *u = &m->unit[1 + layer];
    const SftOps *op = c->ops;
    const SftTensor none = SFT_NONE, rope = sft_rows(m->rope, 0, a.x.dim[0]);
    const SftTensor q = s->qk_norm ? a.q_raw : a.q, k = s->qk_norm ? a.k_raw : a.k;
    const float scale = sft__attn_scale(s, layer);

    sft__normalize_forward(c, s, a.norm1, a.stat1, a.x, u, SFT__LAYER(norm1));
    sft__linear_forward(c, q, none, a.norm1, u, SFT__LAYER(q), none, SFT_LINEAR);
    sft__linear_forward(c, k, none, a.norm1, u, SFT__LAYER(k), none, SFT_LINEAR);
    sft__linear_forward(c, a.v, none, a.norm1, u, SFT__LAYER(v), none, SFT_LINEAR);
    if (s->qk_norm) {
        op->rmsnorm_forward(c, a.q, a.q_stat, q, u->w.q_norm, s->norm_eps);
        op->rmsnorm_forward(c, a.k, a.k_stat, k, u->w.k_norm, s->norm_eps);
    }
    if (!s->learned_positions) {
        op->rope_forward(c, a.q, rope);
        op->rope_forward(c, a.k, rope);
    }
    op->attention_forward(c, a.att, a.lse, a.q, a.keys, a.values, begin, scale, sft__window(s, layer));
    sft__linear_forward(c, a.mid, none, a.att, u, SFT__LAYER(o), a.x, SFT_LINEAR); // mid = x + att Wo^T

    sft__normalize_forward(c, s, a.norm2, a.stat2, a.mid, u, SFT__LAYER(norm2));
    if (s->gated) {
        sft__linear_forward(c, a.gate, none, a.norm2, u, SFT__LAYER(gate), none, SFT_LINEAR);
        sft__linear_forward(c, a.up, none, a.norm2, u, SFT__LAYER(up), none, SFT_LINEAR);
        op->swiglu_forward(c, a.act, a.gate, a.up);
    } else {
        sft__linear_forward(c, a.act, a.up, a.norm2, u, SFT__LAYER(up), none, s->act);
    }
    if (out.dim[0]) sft__linear_forward(c, out, none, a.act, u, SFT__LAYER(down), a.mid, SFT_LINEAR);
}

/* m->dx[N,C]: in, the gradient by the block's output; out, by its input. The lines of forward from the last to the
   first. Gradients move into activations that nothing needs any more, under the names on the left. */
static void sft__block_backward(SftCtx *c, SftModel *m, int64_t layer, SftActs a, int64_t n) {
    const SftArch *s = &m->arch;
    const SftUnit *u = &m->unit[1 + layer];
    const SftOps *op = c->ops;
    const SftBatch *b = &m->seen;
    const int64_t window = sft__window(s, layer);
    const SftTensor none = SFT_NONE, rope = sft_rows(m->rope, 0, n), datt = sft_rows(m->datt, 0, n);
    const SftTensor dx = sft_rows(m->dx, 0, n), dnorm = sft_rows(m->dnorm, 0, n);
    const SftTensor dq = sft_rows(m->dq, 0, n), dk = sft_rows(m->dk, 0, n), dv = sft_rows(m->dv, 0, n);
    const SftTensor dact = a.act, dgate = a.gate, dup = s->gated ? a.up : a.act;
    const float scale = sft__attn_scale(s, layer);

    if (s->gated) {
        sft__linear_backward(c, dact, dx, a.act, u, SFT__LAYER(down), none, SFT_LINEAR, false);
        op->swiglu_backward(c, dgate, dup, dact, a.gate, a.up);
        sft__linear_backward(c, dnorm, dgate, a.norm2, u, SFT__LAYER(gate), none, SFT_LINEAR, false);
    } else {
        sft__linear_backward(c, dup, dx, a.act, u, SFT__LAYER(down), a.up, s->act, false);
    }
    sft__linear_backward(c, dnorm, dup, a.norm2, u, SFT__LAYER(up), none, SFT_LINEAR, s->gated);
    sft__normalize_backward(c, s, dx, dx, dnorm, a.mid, a.stat2, u, SFT__LAYER(norm2));

    sft__linear_backward(c, datt, dx, a.att, u, SFT__LAYER(o), none, SFT_LINEAR, false);
    op->attention_backward(c, dq, dk, dv, datt, a.att, a.lse, a.q, a.k, a.v, b->begin, b->end, scale, window);
    if (!s->learned_positions) {
        op->rope_backward(c, dq, rope);
        op->rope_backward(c, dk, rope);
    }
    const SftTensor dq_raw = s->qk_norm ? a.q : dq, dk_raw = s->qk_norm ? a.k : dk;
    if (s->qk_norm) {
        op->rmsnorm_backward(c, dq_raw, u->dw.q_norm, none, dq, a.q_raw, u->w.q_norm, a.q_stat);
        op->rmsnorm_backward(c, dk_raw, u->dw.k_norm, none, dk, a.k_raw, u->w.k_norm, a.k_stat);
    }
    sft__linear_backward(c, dnorm, dq_raw, a.norm1, u, SFT__LAYER(q), none, SFT_LINEAR, false);
    sft__linear_backward(c, dnorm, dk_raw, a.norm1, u, SFT__LAYER(k), none, SFT_LINEAR, true);
    sft__linear_backward(c, dnorm, dv, a.norm1, u, SFT__LAYER(v), none, SFT_LINEAR, true);
    sft__normalize_backward(c, s, dx, dx, dnorm, a.x, a.stat1, u, SFT__LAYER(norm1));
}

// A batch that does not fit would read or write where it must not.
static void sft__check_batch(const SftModel *m, const SftBatch *b, const SftCache *cache) {
    const long long V = m->arch.V, P = m->arch.learned_positions ? m->arch.P : INT32_MAX;
    if (b->n > m->tokens)
        sft_die(SFT_BROKEN, "a batch of %lld tokens, but memory was planned for %lld", (long long)b->n,
                (long long)m->tokens);
    if (cache && cache->n + b->n > cache->room)
        sft_die(SFT_BROKEN, "the cache has room for %lld tokens", (long long)cache->room);
    for (int64_t i = 0; i < b->n; i++) {
        int32_t id = b->ids[i] < 0 ? b->ids[i] : SFT_MAX(b->ids[i], b->target[i]);
        if (id < 0 || id >= V)
            sft_die(SFT_BAD_INPUT, "token id %d is outside the model's vocabulary of %lld: take the model's own "
                                   "tokenizer, or set resize_vocab", id, V);
        if (b->pos[i] >= P)
            sft_die(SFT_BAD_INPUT, "a document of %d or more tokens, but the model has learned %lld positions: lower "
                                   "max_length", b->pos[i] + 1, P);
    }
}

void sft_forward(SftCtx *c, SftModel *m, const SftBatch *b) { sft_forward_cached(c, m, b, NULL); }

// m->seen = b as the ops see it: b itself, or, if their memory is remote, a copy there.
static void sft__show(SftCtx *c, SftModel *m, const SftBatch *b) {
    SftBatch *s = &m->seen;
    int32_t *to[] = {s->ids, s->pos, s->begin, s->end}, *from[] = {b->ids, b->pos, b->begin, b->end};
    if (!c->ops->remote) *s = *b;
    for (int i = 0; i < 4 && c->ops->remote; i++) c->ops->upload(c, to[i], from[i], (size_t)b->n * sizeof(int32_t));
}

void sft_forward_cached(SftCtx *c, SftModel *m, const SftBatch *batch, SftCache *cache) {
    const SftArch *s = &m->arch;
    const SftBatch *b = &m->seen;
    const SftUnit *first = &m->unit[0], *last = &m->unit[m->units - 1];
    const int64_t n = batch->n, L = s->L;
    if (!n) return;
    if (!sft_planning(c)) sft__check_batch(m, batch, cache), sft__show(c, m, batch);
    const SftTensor final = sft_rows(m->final, 0, n), stat = sft_rows(m->stat, 0, n), rope = sft_rows(m->rope, 0, n);

    c->ops->embedding_forward(c, sft_rows(m->acts[0].x, 0, n), first->w.wte, first->w.wpe, b->ids, b->pos);
    if (!s->learned_positions) c->ops->rope_table(c, rope, s, b->pos, b->begin, b->end);
    for (int64_t l = 0; l < L; l++)
        sft__block_forward(c, m, l, sft__acts(m, l, n, cache), b->begin, sft_rows(m->acts[l + 1].x, 0, n));
    sft__normalize_forward(c, s, final, stat, sft_rows(m->acts[L].x, 0, n), last, SFT__LAYER(norm));
    if (cache) cache->n += n;
}

// Pair i of m->sums, for the ops.
static double *sft__sum_pair(const SftModel *m, int64_t i) { return m->sums ? m->sums + 2 * i : NULL; }
static void sft__zero_sums(SftCtx *c, const SftModel *m, int64_t i, int64_t n) {
    c->ops->zero(c, sft_tensor(sft__sum_pair(m, i), SFT_F32, n * 2 * (int64_t)(sizeof(double) / sizeof(float)), 1, 1));
}

// Lists the targets for the ops: m->index and m->wanted, `rows` to a chunk. Returns their number.
static int64_t sft__list_targets(SftCtx *c, SftModel *m, const SftBatch *b, int64_t rows) {
    int64_t n = 0, first = 0;
    for (int64_t i = 0; i < b->n; i++) {
        if (b->target[i] < 0) continue;
        if (n && n % rows == 0) first = i;
        m->host_index[n] = (int32_t)(i - first), m->host_wanted[n++] = b->target[i];
    }
    c->ops->upload(c, m->index, m->host_index, (size_t)n * sizeof(int32_t));
    c->ops->upload(c, m->wanted, m->host_wanted, (size_t)n * sizeof(int32_t));
    return n;
}

void sft_loss(SftCtx *c, SftModel *m, const SftBatch *b, float scale, float *logprobs) {
    const SftOps *op = c->ops;
    const SftUnit *u = &m->unit[m->arch.tied ? 0 : m->units - 1];
    const SftTensor none = SFT_NONE, head = m->arch.tied ? u->w.wte : u->w.head_w; // [V,C]
    const SftTensor dhead = m->arch.tied ? u->dw.wte : u->dw.head_w;
    const int64_t rows = m->logits.dim[0];
    const int64_t targets = sft_planning(c) ? b->trained : sft__list_targets(c, m, b, rows);
    int64_t done = 0;
    for (int64_t first = 0, next = 0; first < b->n; first = next) { // a chunk: rows first .. next of the batch,
        int64_t n = 0;                                              // with n <= `rows` targets among them
        if (sft_planning(c)) n = SFT_MIN(rows, b->n), next = b->n;
        for (; next < b->n && (n < rows || b->target[next] < 0); next++) n += b->target[next] >= 0;
        const int32_t *index = m->index ? m->index + done : NULL, *wanted = m->wanted ? m->wanted + done : NULL;
        const SftTensor x = sft_rows(m->chunk, 0, n), dx = sft_rows(m->dchunk, 0, n);
        const SftTensor logits = sft_rows(m->logits, 0, n), loss = sft_rows(m->loss, done, n);
        if (n) {
            op->gather_rows(c, x, sft_rows(m->final, first, next - first), index);
            op->matmul_forward(c, logits, none, x, head, SFT_NO_SIDE, none, none, 1, SFT_LINEAR);
            op->cross_entropy(c, loss, logits, wanted, m->arch.V, scale); // logits are now their own gradient
        }
        if (n && scale != 0) {
            op->matmul_backward_w(c, dhead, none, logits, x);
            op->matmul_backward_x(c, dx, logits, head, SFT_NO_SIDE, none, 1, SFT_LINEAR, false);
        }
        if (scale != 0) op->scatter_rows(c, sft_rows(m->dnorm, first, next - first), dx, index); // else 0
        done += n;
    }
    op->sums(c, m->sums, sft_rows(m->loss, 0, targets)); // of all: the same for every size of chunk
    if (!logprobs) return;
    const float *loss = (const float *)sft__read(c, m->room, m->loss.data, (size_t)targets * sizeof *loss);
    op->wait(c);
    for (int64_t i = 0; i < b->n; i++) logprobs[i] = b->target[i] >= 0 ? -*loss++ : 0;
}

double sft_loss_sum(SftCtx *c, SftModel *m) {
    const double *sum = (const double *)sft__read(c, m->host_sums, m->sums, 2 * sizeof *sum);
    c->ops->wait(c);
    double loss = *sum;
    sft__zero_sums(c, m, 0, 1);
    return loss;
}

void sft_backward(SftCtx *c, SftModel *m, const SftBatch *batch) {
    const SftArch *s = &m->arch;
    const SftBatch *b = &m->seen;
    const SftUnit *first = &m->unit[0], *last = &m->unit[m->units - 1];
    const int64_t n = batch->n, L = s->L;
    if (!n) return;
    const SftTensor dx = sft_rows(m->dx, 0, n), dnorm = sft_rows(m->dnorm, 0, n), stat = sft_rows(m->stat, 0, n);

    sft__normalize_backward(c, s, dx, SFT_NONE, dnorm, sft_rows(m->acts[L].x, 0, n), stat, last, SFT__LAYER(norm));
    for (int64_t l = L - 1; l >= 0; l--) {
        SftActs a = sft__acts(m, l, n, NULL);
        if (m->checkpointing && l < L - 1) // forward ended with the last block: its activations are still there
            sft__block_forward(c, m, l, a, b->begin, SFT_NONE);
        sft__block_backward(c, m, l, a, n);
    }
    c->ops->embedding_backward(c, first->dw.wte, first->dw.wpe, dx, b->ids, b->pos);
}

double sft_flops(const SftArch *a, const SftBatch *b) {
    const double heads = (double)(2 * a->H + 2 * a->K), mlp = (double)(a->F * (a->gated ? 3 : 2));
    double weights = (double)(a->L * a->C) * (heads * (double)a->D + mlp), pairs = 0; // of all layers
    for (int64_t l = 0; l < a->L; l++) {
        int64_t window = sft__window(a, l);
        for (int64_t i = 0; i < b->n; i++) pairs += (double)SFT_MIN(b->pos[i] + 1, window ? window : INT32_MAX);
    }
    return 6 * (weights * (double)b->n + (double)(a->V * a->C) * (double)b->trained) +
           12 * pairs * (double)(a->H * a->D);
}

// Memory. A tensor [tokens, d1, d2] of the activations; absent if d1 is 0.
static SftTensor sft__take_rows(SftModel *m, SftType type, int64_t d1, int64_t d2) {
    return d1 ? sft_take_tensor(&m->mem[SFT_MEM_ACTS], type, m->tokens, d1, d2) : SFT_NONE;
}

static size_t sft__sums_bytes(const SftModel *m) { return (size_t)(m->units + 1) * 2 * sizeof(double); }
static int32_t *sft__take_indices(SftModel *m, int mem) {
    return (int32_t *)sft_take(&m->mem[mem], (size_t)m->tokens * sizeof(int32_t));
}

// The activations of one block but for x. Inference needs nothing twice: there the residual stream is one tensor
// that the blocks update in place.
static void sft__take_block(SftModel *m, SftActs *b) {
    const SftArch *a = &m->arch;
    const int64_t H = a->H, K = a->K, D = a->D, stats = a->layernorm ? 2 : 1;
    b->norm1 = sft__take_rows(m, m->type, a->C, 1);
    b->stat1 = sft__take_rows(m, SFT_F32, stats, 1);
    b->q_raw = sft__take_rows(m, m->type, a->qk_norm ? H : 0, D);
    b->k_raw = sft__take_rows(m, m->type, a->qk_norm ? K : 0, D);
    b->q_stat = sft__take_rows(m, SFT_F32, a->qk_norm ? H : 0, 1);
    b->k_stat = sft__take_rows(m, SFT_F32, a->qk_norm ? K : 0, 1);
    b->q = sft__take_rows(m, m->type, H, D);
    b->k = sft__take_rows(m, m->type, K, D);
    b->v = sft__take_rows(m, m->type, K, D);
    b->att = sft__take_rows(m, m->type, H, D);
    b->lse = sft__take_rows(m, SFT_F32, H, 1);
    b->mid = m->trains ? sft__take_rows(m, m->type, a->C, 1) : b->x;
    b->norm2 = m->trains ? sft__take_rows(m, m->type, a->C, 1) : b->norm1; // has become q, k and v by then
    b->stat2 = sft__take_rows(m, SFT_F32, stats, 1);
    b->gate = sft__take_rows(m, m->type, a->gated ? a->F : 0, 1);
    b->up = sft__take_rows(m, m->type, a->gated || m->trains ? a->F : 0, 1);
    b->act = sft__take_rows(m, m->type, a->F, 1);
}

// Notes what an arena took since it held `from` bytes, for the printed plan.
SFT_PRINTF(4, 5) static void sft__plan_part(SftModel *m, int mem, size_t from, const char *format, ...) {
    if (m->mem[mem].used <= from) return;
    va_list args;
    va_start(args, format);
    m->part[m->parts].mem = mem;
    m->part[m->parts].bytes = m->mem[mem].used - from;
    vsnprintf(m->part[m->parts++].what, sizeof m->part->what, format, args);
    va_end(args);
}

/* Rows of a chunk of the loss: its logits hold about 256 MB, in multiples of 16 rows. Small enough that the logits of
   a long batch are never whole in memory; large enough that for each chunk to read the head and to add to its gradient
   anew (16 bytes a number of it in fp32, beside 6 operations for each row) costs little: 1000 rows do 375 a byte. It
   depends on the model alone, and with it the order in which the head's gradient is summed. */
static int64_t sft__chunk_rows(const SftModel *m) {
    int64_t rows = (256 << 20) / (m->arch.V * (int64_t)sft_type_size(m->type)) / 16 * 16;
    return SFT_MAX(SFT_MIN(SFT_MAX(rows, 16), m->targets), 1);
}

static void sft__take_acts(SftModel *m) {
    const SftArch *a = &m->arch;
    const int64_t C = a->C, L = a->L, rows = sft__chunk_rows(m);
    const bool trains = m->trains, whole = trains && !m->checkpointing; // every block keeps what backward needs
    SftArena *mem = &m->mem[SFT_MEM_ACTS];
    size_t mark = mem->used;
    for (int64_t l = 0; l <= L; l++) m->acts[l].x = trains || !l ? sft__take_rows(m, m->type, C, 1) : m->acts[0].x;
    sft__plan_part(m, SFT_MEM_ACTS, mark, "residual stream%s", trains ? ": the input of every block" : "");

    mark = mem->used;
    for (int64_t l = 0; l < L; l++) {
        const SftTensor x = m->acts[l].x;
        if (whole || l == 0) sft__take_block(m, &m->acts[l]);
        else m->acts[l] = m->acts[0], m->acts[l].x = x; // one set: blocks take turns
    }
    sft__plan_part(m, SFT_MEM_ACTS, mark, "inside %s%s", whole ? "the blocks" : "one block at a time",
                   m->checkpointing ? ": backward runs each again" : "");

    mark = mem->used;
    m->rope = sft__take_rows(m, SFT_F32, a->learned_positions ? 0 : a->D, 1);
    m->final = trains ? sft__take_rows(m, m->type, C, 1) : m->acts[0].norm1; // the blocks are done with it
    m->stat = sft__take_rows(m, SFT_F32, a->layernorm ? 2 : 1, 1);
    m->loss = sft__take_rows(m, SFT_F32, 1, 1);
    m->index = sft__take_indices(m, SFT_MEM_ACTS), m->wanted = sft__take_indices(m, SFT_MEM_ACTS);
    m->sums = (double *)sft_take(mem, sft__sums_bytes(m));
    // The gradient by a norm's output is used up before that by attention's output is made, and the other way round.
    const SftTensor turns = sft__take_rows(m, m->type, trains ? SFT_MAX(C, a->H * a->D) : 0, 1);
    m->dnorm = sft_tensor(turns.data, m->type, turns.dim[0], C, 1);
    m->datt = sft_tensor(turns.data, m->type, turns.dim[0], a->H, a->D);
    sft__plan_part(m, SFT_MEM_ACTS, mark, "final hidden states%s, losses%s", trains ? ", their gradient" : "",
                   a->learned_positions ? "" : ", rotary angles");

    // All chunks of the loss are done before backward enters the model: the same memory serves first the one, then
    // the other. (dnorm goes across, and so is not here.)
    mark = mem->used;
    m->chunk = sft_take_tensor(mem, m->type, rows, C, 1);
    m->logits = sft_take_tensor(mem, m->type, rows, sft__round_up(a->V, 16), 1);
    if (trains) m->dchunk = sft_take_tensor(mem, m->type, rows, C, 1);
    const size_t end = mem->used;
    sft_give_back(mem, mark);
    m->dx = sft__take_rows(m, m->type, trains ? C : 0, 1);
    m->dq = sft__take_rows(m, m->type, trains ? a->H : 0, a->D);
    m->dk = sft__take_rows(m, m->type, trains ? a->K : 0, a->D);
    m->dv = sft__take_rows(m, m->type, trains ? a->K : 0, a->D);
    mem->used = SFT_MAX(end, mem->used);
    sft__plan_part(m, SFT_MEM_ACTS, mark, "logits of %lld tokens at a time%s", (long long)rows,
                   trains ? "; then, in their place, gradients inside a block" : "");
}

/* What the host reads and writes of the model: on the host's memory where it lies. Remote memory has a copy of the
   batch, and the host the other end of whatever goes to and fro. */
static void sft__take_host(SftModel *m) {
    m->host_index = m->index, m->host_wanted = m->wanted, m->host_sums = m->sums;
    if (!m->ops->remote) return;
    size_t mark = m->mem[SFT_MEM_ACTS].used, room = (size_t)SFT_MAX(m->arch.V, m->tokens) * sizeof(float);
    int32_t **batch[] = {&m->seen.ids, &m->seen.pos, &m->seen.begin, &m->seen.end};
    for (int i = 0; i < SFT_COUNT(batch); i++) *batch[i] = sft__take_indices(m, SFT_MEM_ACTS);
    sft__plan_part(m, SFT_MEM_ACTS, mark, "token ids, positions and documents of the batch");
    m->host_index = sft__take_indices(m, SFT_MEM_HOST), m->host_wanted = sft__take_indices(m, SFT_MEM_HOST);
    m->host_sums = (double *)sft_take(&m->mem[SFT_MEM_HOST], sft__sums_bytes(m));
    for (int64_t u = 0; u < m->units; u++) {
        const SftTensor exact = sft__exact(m, &m->unit[u]);
        room = SFT_MAX(room, (size_t)exact.dim[0] * sft_type_size(exact.type));
    }
    m->room = sft_take(&m->mem[SFT_MEM_HOST], room);
    sft__plan_part(m, SFT_MEM_HOST, 0, "of the host: a unit on its way from or to a file");
}

static void sft__layout(SftModel *m) {
    m->parts = 0;
    sft_units_open(m);
    sft__plan_part(m, SFT_MEM_WEIGHTS, 0, "parameters in %s", sft_type_name(m->type));
    sft__plan_part(m, SFT_MEM_MASTER, 0, "parameters in fp32, as AdamW updates them");
    sft__plan_part(m, SFT_MEM_GRADS, 0, "fp32, summed over micro-batches");
    sft__plan_part(m, SFT_MEM_MOMENTS, 0, "AdamW's m and v in fp32");
    sft__take_acts(m);
    sft__take_host(m);
    for (int64_t l = 0; l < m->arch.L; l++) {
        m->cache.keys[l] = sft_take_tensor(&m->mem[SFT_MEM_CACHE], m->type, m->cache.room, m->arch.K, m->arch.D);
        m->cache.values[l] = sft_take_tensor(&m->mem[SFT_MEM_CACHE], m->type, m->cache.room, m->arch.K, m->arch.D);
    }
    sft__plan_part(m, SFT_MEM_CACHE, 0, "keys and values of %lld tokens", (long long)m->cache.room);
}

// A whole step, and generation, on arenas that count: every op only takes its workspace.
static void sft__rehearse(SftModel *m, const SftOps *ops) {
    SftCtx c = {.ops = ops, .work = &m->mem[SFT_MEM_WORK]};
    SftBatch b = {.n = m->tokens, .documents = 1, .trained = m->targets};
    SftConfig config = {.lr_scheduler_type = (char *)"constant"};
    SftTrainer trainer = {.total = 1};
    sft_forward(&c, m, &b);
    sft_loss(&c, m, &b, m->trains, NULL);
    if (m->trains) {
        sft_backward(&c, m, &b);
        sft_update(&c, m, &trainer, &config, 1);
    }
    if (m->cache.room) {
        b.n = SFT_MIN(m->tokens, m->cache.room);
        m->cache.n = m->cache.room - b.n;
        sft_forward_cached(&c, m, &b, &m->cache);
        m->cache.n = 0;
    }
}

// The plan of an arena: what it was opened with, or what a dry run counted.
static size_t sft__planned(const SftArena *arena) { return arena->base ? arena->size : arena->peak; }

size_t sft_plan_bytes(const SftModel *m) {
    size_t bytes = 0;
    for (int i = 0; i < SFT_MEMS; i++) bytes += sft__planned(&m->mem[i]);
    return bytes;
}

// What the plan takes of the memory where ops work.
static size_t sft__plan_there(const SftModel *m) { return sft_plan_bytes(m) - sft__planned(&m->mem[SFT_MEM_HOST]); }

// Refuses a plan that does not fit into `room` bytes, with what would: fewer tokens at a time, with checkpointing if
// that is not enough.
SFT_NORETURN static void sft__no_room(const SftModel *m, const char *device, size_t room) {
    char fits[200] = "not even one token at a time would fit: take a smaller model";
    for (int64_t tokens = m->tokens, found = 0; tokens > 0 && !found; tokens /= 2)
        for (int again = m->checkpointing; again < 2 && !found; again++) {
            SftModel other;
            sft_model_open(&other, &m->arch, m->type, m->trains, again, tokens, SFT_MIN(m->targets, tokens),
                           m->cache.room, true, m->ops);
            found = sft__plan_there(&other) <= room;
            if (found)
                snprintf(fits, sizeof fits, "%.1f MB would do with %smicro-batches of at most %lld tokens instead of "
                         "%lld (per_device_%s_batch_size, max_length)", (double)sft__plan_there(&other) / 1e6,
                         again && !m->checkpointing ? "gradient_checkpointing true and " : "", (long long)tokens,
                         (long long)m->tokens, m->trains ? "train" : "eval");
            sft_model_close(&other);
        }
    sft_die(SFT_BAD_INPUT, "the memory plan has %.1f MB, %s can give %.1f MB; %s", (double)sft__plan_there(m) / 1e6,
            device, (double)room / 1e6, fits);
}

// Reserves the arenas of the plan. There may be less than there seemed to be: in pieces, or another program was faster.
static void sft__open_memory(SftModel *m) {
    const size_t need = sft__plan_there(m);
    SftDevice d = m->ops->device();
    if (d.free && need > d.free) sft__no_room(m, d.name, d.free);
    size_t taken = 0;
    for (int i = 0; i < SFT_MEMS; i++) {
        const bool host = i == SFT_MEM_HOST;
        const size_t bytes = m->mem[i].peak;
        char *base = (char *)m->ops->reserve(bytes, host);
        if (!base && host) sft_die(SFT_BROKEN, "out of memory: %.1f MB for %s", (double)bytes / 1e6, m->mem[i].name);
        if (!base) {
            d = m->ops->device();
            sft__no_room(m, d.name, d.free ? SFT_MIN(taken + d.free, need - 1) : need - 1);
        }
        m->mem[i] = (SftArena){.name = m->mem[i].name, .base = base, .size = bytes};
        taken += bytes;
    }
}

void sft_model_open(SftModel *m, const SftArch *a, SftType type, bool trains, bool checkpointing, int64_t tokens,
                    int64_t targets, int64_t cache, bool plan, const SftOps *ops) {
    const char *name[] = {"weights",     "master weights", "gradients", "moments",
                          "activations", "KV cache",       "workspace", "host buffers"};
    *m = (SftModel){.arch = *a, .ops = ops, .type = type, .trains = trains, .tokens = tokens, .targets = targets};
    m->checkpointing = trains && checkpointing;
    m->acts = SFT_NEW(SftActs, a->L + 1);
    m->cache = (SftCache){.keys = SFT_NEW(SftTensor, a->L), .values = SFT_NEW(SftTensor, a->L), .room = cache};
    for (int i = 0; i < SFT_MEMS; i++) m->mem[i].name = name[i];
    sft__layout(m);
    sft__rehearse(m, ops);
    if (plan) return;
    sft__open_memory(m);
    sft_units_close(m);
    sft__layout(m);
}

void sft_model_close(SftModel *m) {
    for (int i = 0; i < SFT_MEMS; i++)
        if (m->mem[i].base) m->ops->release(m->mem[i].base, m->mem[i].size, i == SFT_MEM_HOST);
    sft_units_close(m);
    free(m->acts);
    free(m->cache.keys), free(m->cache.values);
    *m = (SftModel){0};
}

void sft_plan_print(FILE *out, const SftModel *m) {
    fprintf(out, "memory plan: %s, %.1f M parameters, %s, batches of up to %lld tokens%s\n", m->arch.family,
            (double)sft_parameters(&m->arch) / 1e6, sft_type_name(m->type), (long long)m->tokens,
            m->checkpointing ? ", gradient checkpointing" : "");
    for (int i = 0; i < SFT_MEMS; i++) {
        const double bytes = (double)sft__planned(&m->mem[i]);
        int parts = 0, last = 0;
        for (int p = 0; p < m->parts; p++)
            if (m->part[p].mem == i) parts++, last = p;
        const char *only = parts == 1 ? m->part[last].what : "";
        if (bytes > 0) fprintf(out, "  %-14s %10.1f MB   %s\n", m->mem[i].name, bytes / 1e6, only);
        for (int p = 0; p < m->parts && parts > 1; p++)
            if (m->part[p].mem == i) fprintf(out, "  %25.1f MB   %s\n", m->part[p].bytes / 1e6, m->part[p].what);
    }
    fprintf(out, "  %-14s %10.1f MB\n", "total", (double)sft_plan_bytes(m) / 1e6);
}

json_t *sft_plan_json(const SftModel *m) {
    json_t *memory = json_object(), *parts = json_array(), *bytes = json_integer((json_int_t)sft_plan_bytes(m));
    for (int i = 0; i < SFT_MEMS; i++)
        json_object_set_new(memory, m->mem[i].name, json_integer((json_int_t)sft__planned(&m->mem[i])));
    for (int p = 0; p < m->parts; p++)
        json_array_append_new(parts, json_pack("{s:s, s:s, s:I}", "memory", m->mem[m->part[p].mem].name, "what",
                                               m->part[p].what, "bytes", (json_int_t)m->part[p].bytes));
    return json_pack("{s:o, s:o, s:o}", "bytes", bytes, "memory", memory, "parts", parts);
}

/* ================================================================================================================
   [8] step: loss scaler, gradient norm, clipping, learning-rate schedules, AdamW over units
   ================================================================================================================
   Backward has left the sum of all micro-batches' gradients, times a scale, in every unit's fp32 vector. A
   step reads them twice: for the norm, and in AdamW (Loshchilov and Hutter 2019), where one factor takes the
   scale out and clips at the same time. Per parameter that is 4 + 28 bytes of memory traffic (gradient; then
   gradient, master, m, v read and master, m, v written), at so few operations per byte that nothing else here
   costs time.

   Invariants: the norm adds the units' sums in order, so that its bits depend on the gradients alone; a
   skipped step leaves weights and moments as they are, counts as a step, and moves neither the schedule nor
   Adam's t.
   Test: test_step.c, against PyTorch, transformers and DeepSpeed.
   Pitfall: the scaler changes its scale in the very step whose gradients still carry the old one. Divided by
   the new one they are off by two at every growth (DeepSpeed 0.19 does that). */

/* The loss scaler. fp16 knows nothing below 6e-8, so gradients are lifted by multiplying the loss. Too large
   a scale overflows instead: then the step is skipped and, once `left` overflows are used up, the scale is
   halved. `window` good steps double it again. All as DeepSpeed 0.19, whose first growth comes at good step
   window + 1. */
SftScaler sft_scaler(const SftConfig *config) {
    SftScaler s = {.scale = 1, .min_scale = 1, .max_scale = 1 << 24, .last_overflow = -1, .window = 1};
    if (config->type != SFT_F16) return s;
    const json_t *o = config->fp16; // its keys have been checked
    double fixed = sft__json_number(o, "fp16", "loss_scale", 'n', 0, 0, s.max_scale); // 0: dynamic
    s.dynamic = fixed == 0;
    s.scale = fixed > 0 ? fixed : ldexp(1, (int)sft__json_number(o, "fp16", "initial_scale_power", 'w', 16, 0, 24));
    s.window = (int64_t)sft__json_number(o, "fp16", "loss_scale_window", 'w', 1000, 1, 1e12);
    s.hysteresis = s.left = (int64_t)sft__json_number(o, "fp16", "hysteresis", 'w', 2, 1, 1e6);
    s.consecutive = sft__json_number(o, "fp16", "consecutive_hysteresis", 'b', 0, 0, 1) != 0;
    if (s.dynamic) s.min_scale = sft__json_number(o, "fp16", "min_loss_scale", 'n', 1, 1e-9, s.scale);
    return s;
}

bool sft_scaler_update(SftScaler *s, bool overflow) {
    if (!s->dynamic) return true;
    int64_t stable = s->iter++ - s->last_overflow - 1; // good steps since the last overflow, before this one
    if (overflow) {
        if (s->left == 1 && s->scale == s->min_scale) return false;
        if (s->left == 1) s->scale = SFT_MAX(s->scale / 2, s->min_scale);
        s->left = SFT_MAX(s->left - 1, 1);
        s->last_overflow = s->iter - 1;
        return true;
    }
    bool grow = stable > 0 && stable % s->window == 0;
    if (grow || s->consecutive) s->left = s->hysteresis;
    if (grow) s->scale = SFT_MIN(s->scale * 2, s->max_scale);
    return true;
}

/* Schedules. s counts the successful steps so far, T is the run's length, W the warm-up's. Hugging Face's
   (transformers.optimization, 5.24) are a factor of learning_rate and begin at 0 when there is a warm-up.
   DeepSpeed's (runtime/lr_schedules.py, 0.19) count it = s - 1: their first two steps have the lowest rate.
   Columns: name, the keys that its lr_scheduler_kwargs may have. */
// clang-format off
#define SFT__SCHEDULES(X) \
X(linear,                    "") \
X(cosine,                    "num_cycles") \
X(cosine_with_restarts,      "num_cycles") \
X(polynomial,                "lr_end|power") \
X(constant,                  "") \
X(constant_with_warmup,      "") \
X(inverse_sqrt,              "timescale") \
X(cosine_with_min_lr,        "num_cycles|min_lr|min_lr_rate") \
X(cosine_warmup_with_min_lr, "num_cycles|min_lr|min_lr_rate|warmup_lr_rate") \
X(warmup_stable_decay,       "num_decay_steps|num_stable_steps|warmup_type|decay_type|min_lr_ratio|num_cycles") \
X(WarmupLR,                  "warmup_min_lr|warmup_max_lr|warmup_num_steps|warmup_type") \
X(WarmupDecayLR,             "warmup_min_lr|warmup_max_lr|warmup_num_steps|warmup_type|total_num_steps") \
X(WarmupCosineLR,            "warmup_min_ratio|warmup_num_steps|warmup_type|cos_min_ratio|total_num_steps") \
X(OneCycle,                  "cycle_min_lr|cycle_max_lr|cycle_first_step_size|cycle_second_step_size|" \
                             "cycle_first_stair_count|cycle_second_stair_count|decay_lr_rate|decay_step_size|" \
                             "cycle_momentum|cycle_min_mom|cycle_max_mom|decay_mom_rate") \
X(LRRangeTest,               "lr_range_test_min_lr|lr_range_test_step_size|lr_range_test_step_rate|" \
                             "lr_range_test_staircase")
typedef enum {
#define X(name, keys) SFT__##name,
    SFT__SCHEDULES(X)
#undef X
    SFT__SCHEDULE_COUNT
} SftSchedule;
static const char *const sft__schedules[SFT__SCHEDULE_COUNT][2] = {
#define X(name, keys) {#name, keys},
    SFT__SCHEDULES(X)
#undef X
};
typedef struct { double lr, beta1, beta2; } SftRate;
typedef struct { // a point of a schedule
    SftSchedule kind;
    const json_t *own;    // lr_scheduler_kwargs
    const char *where;    // names them in errors
    double s, T, W, peak; // peak: learning_rate
} SftPoint;
// clang-format on
#define SFT__NUMBER(key, standard, low, high) sft__json_number(p->own, p->where, key, 'n', standard, low, high)
#define SFT__WHOLE(key, standard, low) sft__json_number(p->own, p->where, key, 'w', standard, low, 1e15)
#define SFT__FLAG(key, standard) (sft__json_number(p->own, p->where, key, 'b', standard, 0, 1) != 0)
#define SFT__WORD(key, standard, words) sft__json_word(p->own, p->where, key, standard, words)

// `cycles` = 1/2: half a wave, from 1 at x = 0 down to 0 at x = 1.
static double sft__cosine(double x, double cycles) { return 0.5 * (1 + cos(M_PI * cycles * 2 * x)); }

// The lowest rate as a share of learning_rate, from min_lr or min_lr_rate, one of which must be given.
static double sft__lowest(const SftPoint *p) {
    double rate = SFT__NUMBER("min_lr_rate", -1, 0, 1), lr = SFT__NUMBER("min_lr", -1, 0, p->peak);
    if ((rate < 0) == (lr < 0))
        sft_die(SFT_BAD_INPUT, "%s needs one of \"min_lr\" and \"min_lr_rate\", and not both", p->where);
    return rate >= 0 ? rate : p->peak > 0 ? lr / p->peak : 0;
}

// warmup_stable_decay: up, level, down; up and down are linear, a cosine, or 1 - sqrt.
static double sft__stable(const SftPoint *p) {
    int up = SFT__WORD("warmup_type", 0, "linear|cosine|1-sqrt");
    int down = SFT__WORD("decay_type", 1, "linear|cosine|1-sqrt");
    double decay = SFT__WHOLE("num_decay_steps", NAN, 0);
    double level = SFT__WHOLE("num_stable_steps", p->T - p->W - decay, 0);
    double low = SFT__NUMBER("min_lr_ratio", 0, 0, 1), cycles = SFT__NUMBER("num_cycles", 0.5, 0, 1e9);
    double x = p->s / fmax(1, p->W), f;
    if (p->s < p->W) {
        f = up == 0 ? x : up == 1 ? 0.5 * (1 - cos(M_PI * x)) : 1 - sqrt(1 - x);
    } else if (p->s < p->W + level) {
        return 1;
    } else {
        if (p->s >= p->W + level + decay) return low;
        x = (p->s - p->W - level) / decay;
        f = down == 0 ? 1 - x : down == 1 ? sft__cosine(x, cycles) : 1 - sqrt(x);
    }
    return fmax(0, f * (1 - low) + low);
}

// Hugging Face's schedules: the factor of learning_rate.
static double sft__factor(const SftPoint *p) {
    double s = p->s, T = p->T, W = p->W, length = fmax(1, T - W), x = (s - W) / length, low, a, b;
    bool warming = s < W;
    switch (p->kind) {
    case SFT__linear: return warming ? s / W : fmax(0, (T - s) / length);
    case SFT__cosine: // num_cycles may be any number of waves
        a = SFT__NUMBER("num_cycles", 0.5, 0, 1e9);
        return warming ? s / W : sft__cosine(x, a);
    case SFT__cosine_with_restarts: // half waves, each from the top
        a = SFT__NUMBER("num_cycles", 1, 0, 1e9);
        return warming ? s / W : x >= 1 ? 0 : sft__cosine(fmod(a * x, 1), 0.5);
    case SFT__polynomial:
        a = SFT__NUMBER("lr_end", 1e-7, 0, 10), b = SFT__NUMBER("power", 1, 0, 1e3);
        if (a >= p->peak)
            sft_die(SFT_BAD_INPUT, "%s: \"lr_end\" %g must be below learning_rate %g", p->where, a, p->peak);
        return warming ? s / W : s >= T ? a / p->peak : ((p->peak - a) * pow(1 - x, b) + a) / p->peak;
    case SFT__constant: return 1;
    case SFT__constant_with_warmup: return warming ? s / W : 1;
    case SFT__inverse_sqrt:
        a = SFT__NUMBER("timescale", W > 0 ? W : 10000, 1e-9, 1e15);
        return warming ? s / W : 1 / sqrt((s + (a - W)) / a);
    case SFT__cosine_with_min_lr:
        low = sft__lowest(p), a = SFT__NUMBER("num_cycles", 0.5, 0, 1e9);
        return warming ? s / W : sft__cosine(x, a) * (1 - low) + low;
    case SFT__cosine_warmup_with_min_lr: // a step ahead of the others: never 0, the last step is the lowest
        low = sft__lowest(p), a = SFT__NUMBER("num_cycles", 0.5, 0, 1e9);
        b = SFT__NUMBER("warmup_lr_rate", -1, 0, 1e3);
        if (warming) return b < 0 ? (s + 1) / W : b + (1 - b) * s / fmax(1, W - 1);
        return sft__cosine((s - W + 1) / length, a) * (1 - low) + low;
    default: return sft__stable(p);
    }
}

// DeepSpeed's three warm-ups, logarithmic unless warmup_type says linear; then level, a line down or half a
// wave down.
static double sft__warmup_lr(const SftPoint *p) {
    bool wave = p->kind == SFT__WarmupCosineLR, decay = p->kind == SFT__WarmupDecayLR;
    bool straight = SFT__WORD("warmup_type", 0, "log|linear") == 1;
    bool auto_steps = json_is_string(json_object_get(p->own, "warmup_num_steps")); // as warmup_steps says
    double it = p->s - 1, W = SFT__WHOLE("warmup_num_steps", p->W > 0 ? p->W : auto_steps ? 0 : 1000, 1);
    if (W < 1)
        sft_die(SFT_BAD_INPUT, "%s: \"warmup_num_steps\" is \"auto\", but warmup_steps is not set", p->where);
    if (p->W > 0 && W != p->W)
        sft_die(SFT_BAD_INPUT, "%s: \"warmup_num_steps\" is %g, but warmup_steps says %g", p->where, W, p->W);
    W = fmax(2, W); // as DeepSpeed: log(1) would be divided by
    double T = wave || decay ? SFT__WHOLE("total_num_steps", p->T, 1) : 0;
    double warm = it < 0 ? 0 : straight ? it / W : log(it + 1) / log(W);
    if (wave) {
        double low = SFT__NUMBER("warmup_min_ratio", 0, 0, 1), end = SFT__NUMBER("cos_min_ratio", 1e-4, 0, 1);
        if (it < W) return it < 0 ? 0 : p->peak * (low + (1 - low) * warm);
        return p->peak * (end + (1 - end) * sft__cosine(fmin(1, (it - W + 1) / fmax(1, T - W)), 0.5));
    }
    bool top = json_object_get(p->own, "warmup_max_lr") != NULL;
    if (decay && !top)
        sft_note("WarmupDecayLR without warmup_max_lr rises to 0.001, as in DeepSpeed, not to learning_rate");
    double low = SFT__NUMBER("warmup_min_lr", 0, 0, 10);
    double high = SFT__NUMBER("warmup_max_lr", decay && !top ? 1e-3 : p->peak, 0, 10);
    if (it >= W) warm = decay ? fmax(0, (T - it) / fmax(1, T - W)) : 1;
    return low + (high - low) * warm;
}

// DeepSpeed's OneCycle: the rate goes up and down once while the momentum (beta1) goes down and up; then both
// decay. With stairs a way is made of that many level steps. beta2 becomes 0.99. The first step has both at
// their lowest.
static SftRate sft__one_cycle(const SftPoint *p, SftRate r) {
    double low = SFT__NUMBER("cycle_min_lr", NAN, 0, 10), high = SFT__NUMBER("cycle_max_lr", NAN, 0, 10);
    double first = SFT__WHOLE("cycle_first_step_size", 2000, 1);
    double up = SFT__WHOLE("cycle_first_stair_count", 0, 0);
    double last = SFT__WHOLE("cycle_second_step_size", first, 1);
    double down = SFT__WHOLE("cycle_second_stair_count", up, 0);
    double size = SFT__WHOLE("decay_step_size", 0, 0), lr_decay = SFT__NUMBER("decay_lr_rate", 0, 0, 1e9);
    double least = SFT__NUMBER("cycle_min_mom", 0.8, 0, 0.9999999);
    double most = SFT__NUMBER("cycle_max_mom", 0.9, 0, 0.9999999);
    double mom_decay = SFT__NUMBER("decay_mom_rate", 0, 0, 1e9);
    double all = first + last, height = 0, intervals = 0;
    bool momentum = SFT__FLAG("cycle_momentum", 1);
    if (p->s > all) {
        intervals = size > 0 ? (p->s - all) / size : 0;
    } else if (p->s < all) { // at p->s == all the cycle has come back to height 0
        bool rising = p->s <= first;
        double way = rising ? p->s : all - p->s, whole = rising ? first : last, stairs = rising ? up : down;
        height = stairs > 0 ? floor(way * stairs / whole) / stairs : way / whole;
    }
    r.lr = (low + (high - low) * height) / (1 + lr_decay * intervals);
    if (!momentum) return r;
    r.beta1 = p->s == 0 ? least : (most - (most - least) * height) * (1 + mom_decay * intervals);
    r.beta2 = 0.99;
    if (r.beta1 >= 1)
        sft_die(SFT_BAD_INPUT, "%s: \"decay_mom_rate\" brings the momentum to %g at step %g", p->where,
                r.beta1, p->s + 1);
    return r;
}

static double sft__range_test(const SftPoint *p) {
    double low = SFT__NUMBER("lr_range_test_min_lr", 1e-3, 0, 10);
    double rate = SFT__NUMBER("lr_range_test_step_rate", 1, 0, 1e9);
    double x = p->s / SFT__WHOLE("lr_range_test_step_size", 2000, 1);
    return low * (1 + rate * (SFT__FLAG("lr_range_test_staircase", 0) ? floor(x) : x));
}

// Learning rate and betas of the step after `done` successful ones.
static SftRate sft__rate(const SftConfig *config, int64_t done, int64_t total) {
    char where[128], known[512] = "";
    const char *name = config->lr_scheduler_type;
    SftPoint p = {.own = config->lr_scheduler_kwargs, .where = where, .s = (double)done, .T = (double)total};
    while (p.kind < SFT__SCHEDULE_COUNT && strcmp(name, sft__schedules[p.kind][0])) p.kind++;
    for (int i = 0; i < SFT__SCHEDULE_COUNT; i++) strcat(strcat(known, i ? ", " : ""), sft__schedules[i][0]);
    if (!strcmp(name, "reduce_lr_on_plateau") || !strcmp(name, "greedy"))
        sft_die(SFT_BAD_INPUT, "lr_scheduler_type \"%s\" follows a metric: not supported; known: %s", name, known);
    if (p.kind == SFT__SCHEDULE_COUNT)
        sft_die(SFT_BAD_INPUT, "lr_scheduler_type \"%s\" is unknown; known: %s", name, known);
    snprintf(where, sizeof where, "lr_scheduler_kwargs of %s", name);
    sft__known_keys(p.own, where, sft__schedules[p.kind][1]);
    p.peak = config->learning_rate;
    p.W = config->warmup_steps > 0 ? (double)config->warmup_steps : ceil(p.T * config->warmup_ratio);
    SftRate r = {0, config->adam_beta1, config->adam_beta2};
    if (p.kind == SFT__OneCycle) return sft__one_cycle(&p, r);
    bool warmup = p.kind == SFT__WarmupLR || p.kind == SFT__WarmupDecayLR || p.kind == SFT__WarmupCosineLR;
    if (p.kind == SFT__LRRangeTest) r.lr = sft__range_test(&p);
    else r.lr = warmup ? sft__warmup_lr(&p) : p.peak * sft__factor(&p);
    return r;
}

double sft_learning_rate(const SftConfig *config, int64_t done, int64_t total) {
    return sft__rate(config, done, total).lr;
}

SftTrainer sft_trainer(const SftConfig *config, int64_t total) {
    sft__rate(config, 0, total); // a mistake in the schedule shows before the first step
    return (SftTrainer){.scaler = sft_scaler(config), .total = total};
}

// n elements, from `from` on, of a unit's flat vector.
static SftTensor sft__flat_part(void *data, SftType type, int64_t from, int64_t n) {
    return data ? sft_tensor((char *)data + (size_t)from * sft_type_size(type), type, n, 1, 1) : SFT_NONE;
}

void sft_zero_grad(SftCtx *c, SftModel *m) {
    for (int64_t u = 0; u < m->units; u++)
        c->ops->zero(c, sft__flat_part(m->unit[u].grad, SFT_F32, 0, m->unit[u].count));
}

// The Hugging Face name of the first tensor, in the model's order, whose gradient is not finite.
static const char *sft__nonfinite(SftCtx *c, const SftModel *m, char name[256]) {
    for (int64_t u = 0; u < m->units; u++) {
        const SftTensor *dw = (const SftTensor *)&m->unit[u].dw;
        for (int slot = 0; slot < SFT_SLOTS; slot++) {
            sft__zero_sums(c, m, 0, 1);
            if (dw[slot].data) c->ops->sums(c, m->sums, dw[slot]);
            const double *sum = (const double *)sft__read(c, m->host_sums, m->sums, 2 * sizeof *sum);
            c->ops->wait(c);
            if (!isfinite(sum[1])) return sft_hf_name(&m->arch, (SftSlot)slot, u - 1, name);
        }
    }
    return "a tensor";
}

// A step whose gradient is not finite: the scaler takes note; the run ends where no later step can be better.
static void sft__skip(SftCtx *c, const SftModel *m, SftTrainer *t, const SftConfig *config) {
    char name[256];
    t->bad_in_a_row++;
    if (!sft_scaler_update(&t->scaler, true))
        sft_die(SFT_BROKEN, "step %lld: the gradient of %s is not finite, and the loss scale is at its minimum, "
                "%g; lower learning_rate or use bf16", (long long)t->step, sft__nonfinite(c, m, name),
                t->scaler.scale);
    if (!t->scaler.dynamic && t->bad_in_a_row >= config->max_nonfinite_steps)
        sft_die(SFT_BROKEN, "step %lld: the gradient of %s is not finite, for %lld steps in a row "
                "(max_nonfinite_steps); lower %s, or look at the data", (long long)t->step,
                sft__nonfinite(c, m, name), (long long)t->bad_in_a_row,
                t->scaler.scale == 1 ? "learning_rate" : "loss_scale");
}

// AdamW on every unit, as the n-th step that was not skipped; what *factor says is for the ops to read.
static void sft__adamw_units(SftCtx *c, SftModel *m, const SftConfig *config, SftRate rate, double n,
                             const float *factor) {
    SftAdam adam = {.lr = (float)rate.lr, .beta1 = (float)rate.beta1, .beta2 = (float)rate.beta2};
    adam.eps = (float)config->adam_epsilon;
    adam.correct1 = (float)(1 - pow(rate.beta1, n)), adam.correct2 = (float)(1 - pow(rate.beta2, n));
    for (int64_t u = 0; u < m->units; u++)
        for (int plain = 0; plain < 2; plain++) { // the range with weight decay, the range without
            SftUnit *w = &m->unit[u];
            int64_t from = plain ? w->decayed : 0, count = plain ? w->count - w->decayed : w->decayed;
            adam.decay = plain ? 0 : (float)config->weight_decay;
            SftTensor master = sft__flat_part(w->master, SFT_F32, from, count);
            SftTensor grad = sft__flat_part(w->grad, SFT_F32, from, count);
            SftTensor m1 = sft__flat_part(w->m, SFT_F32, from, count), v1 = sft__flat_part(w->v, SFT_F32, from, count);
            SftTensor rounded = sft__flat_part(m->type == SFT_F32 ? NULL : w->weights, m->type, from, count);
            if (count) c->ops->adamw(c, rounded, master, m1, v1, grad, factor, adam);
        }
}

/* The norm of all gradients is the root of the units' sums of squares, in double, the units in order. The ops need
   nothing from the host: they make the factor that clips and unscales, and leave all as it is if that is NaN. The host
   learns of it all in one download, which passes AdamW on its way. */
SftStep sft_update(SftCtx *c, SftModel *m, SftTrainer *t, const SftConfig *config, double grad_scale) {
    SftRate rate = sft__rate(config, t->updates, t->total);
    size_t mark = c->work->used;
    float *factor = (float *)sft_take(c->work, sizeof *factor);
    for (int64_t u = 0; u < m->units; u++)
        c->ops->sums(c, sft__sum_pair(m, u + 1), sft__flat_part(m->unit[u].grad, SFT_F32, 0, m->unit[u].count));
    c->ops->clip(c, factor, sft__sum_pair(m, 1), m->units, config->max_grad_norm, grad_scale);
    const size_t bytes = (size_t)(m->units + 1) * 2 * sizeof(double);
    const double *sum = (const double *)sft__read(c, m->host_sums, m->sums, bytes);
    sft__adamw_units(c, m, config, rate, (double)(t->updates + 1), factor);
    sft_give_back(c->work, mark);
    if (sft_planning(c)) return (SftStep){0};

    c->ops->wait(c);
    double squares = 0;
    for (int64_t u = 0; u < m->units; u++) squares += sum[2 * u + 3];
    SftStep step = {.loss = sum[0], .grad_norm = sqrt(squares) / grad_scale, .lr = rate.lr};
    step.skipped = !isfinite(squares);
    step.clipped = !step.skipped && sft_clip(step.grad_norm, config->max_grad_norm) < 1;
    sft__zero_sums(c, m, 0, m->units + 1);
    t->step++;
    if (step.skipped) {
        sft__skip(c, m, t, config);
    } else {
        sft_scaler_update(&t->scaler, false); // what it says now is for the next step
        t->bad_in_a_row = 0;
        t->updates++;
    }
    return step;
}

/* ================================================================================================================
   [9] state: checkpoints, resume, export
   ================================================================================================================
   A checkpoint appears whole or not at all: everything is written into checkpoint-N.tmp and fsynced, the folder takes
   its name in one rename, and only then `latest` names it and older ones may go. Whenever the run is killed, `latest`
   names a complete checkpoint. Data order and random numbers are functions of seed and step: the step number is
   their whole state.

   Invariants: a resumed run goes on with the same bits; a file that was cut or changed is found before anything of it
   is used; tensors are written from where they lie. Test: test_state.c kills, cuts, flips and fills disks.
   Pitfall: a rename survives a power cut only when the folder around it is fsynced, too; and what is deleted to make
   room is missed when the disk turns out to be full all the same. */

static void sft__remove_folder(const char *folder) { // with the files in it; a checkpoint has no folders inside
    char path[4096];
    int n;
    char **names = sft__list(folder, &n);
    for (int i = 0; i < n; i++) unlink(sft_path(path, folder, names[i]));
    sft__list_free(names, n);
    rmdir(folder);
}

static void sft__fsync_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool good = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL); // EINVAL: this file system has nothing to sync
    if (!good) sft_die(SFT_BROKEN, "cannot make the folder %s durable: %s", path, strerror(errno));
    close(fd);
}

// 64 bits, in hexadecimal, that change with any byte: x -> (x ^ word) * odd maps no two x, and no two words, to one
// (FNV with words for bytes). Finds accidents, not attacks.
static void sft__sum(char out[24], const char *data, size_t bytes) {
    uint64_t x = bytes, word;
    for (size_t at = 0; at < bytes; at += 8) {
        word = 0;
        if (bytes - at >= 8) memcpy(&word, data + at, 8);
        else memcpy(&word, data + at, bytes - at);
        x = (x ^ word) * 0x9e3779b97f4a7c15u;
        x ^= x >> 29;
    }
    snprintf(out, 24, "%016llx", (unsigned long long)x);
}
static size_t sft__sum_file(char out[24], const char *path) {
    size_t bytes;
    const char *data = sft_map(path, &bytes);
    sft__sum(out, data, bytes);
    sft_unmap(data, bytes);
    return bytes;
}

static void sft__write_json(const char *folder, const char *name, const json_t *json) {
    char path[4096], *text = json_dumps(json, JSON_INDENT(2) | JSON_REAL_PRECISION(15)); // 0.9, not 0.90000000000000002
    json_t *back = json_loads(text, 0, NULL);
    if (!json_equal(json, back)) free(text), text = json_dumps(json, JSON_INDENT(2)); // 17 digits are always enough
    char *line = sft_format("%s\n", text);
    sft_write_file(sft_path(path, folder, name), line, strlen(line));
    free(text), free(line), json_decref(back);
}
static json_t *sft__read_json(const char *folder, const char *name) { // {} where there is no such file
    char path[4096];
    json_t *json = sft_exists(sft_path(path, folder, name)) ? sft_json_big(path) : json_object();
    if (!json_is_object(json)) sft_die(SFT_BAD_INPUT, "%s: expected a JSON object", path);
    return json;
}

// Copies the tokenizer's files, and the Python files of models that bring their own code.
static void sft__copy_model_files(const char *from, const char *to) {
    const char *wanted = "tokenizer.json|tokenizer.model|tokenizer_config.json|special_tokens_map.json|"
                         "added_tokens.json|vocab.json|merges.txt|encoder.json|vocab.bpe|chat_template.jinja|"
                         "generation_config.json";
    char path[4096], target[4096];
    struct stat a, b;
    int n;
    char **names = sft__list(from, &n);
    for (int i = 0; i < n; i++) {
        sft_path(path, from, names[i]), sft_path(target, to, names[i]);
        if (!sft__option_among(wanted, names[i]) && strcmp(sft__ending(names[i]), ".py")) continue;
        if (stat(path, &a) || !S_ISREG(a.st_mode)) continue;
        if (!stat(target, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino) continue; // the same file
        size_t bytes;
        const char *data = sft_map(path, &bytes);
        sft_write_file(target, data, bytes);
        sft_unmap(data, bytes);
    }
    sft__list_free(names, n);
}

// Checkpoints of a folder, oldest first: by when they were written, for a run that starts afresh counts from 0 again.
typedef struct { char name[64]; int64_t step; struct timespec written; } SftSaved;
static int sft__by_age(const void *a, const void *b) {
    const SftSaved *x = (const SftSaved *)a, *y = (const SftSaved *)b;
    if (x->written.tv_sec != y->written.tv_sec) return x->written.tv_sec < y->written.tv_sec ? -1 : 1;
    if (x->written.tv_nsec != y->written.tv_nsec) return x->written.tv_nsec < y->written.tv_nsec ? -1 : 1;
    return (x->step > y->step) - (x->step < y->step);
}
static SftSaved *sft__checkpoints(const char *folder, int *n) {
    char path[4096], state[4096];
    int names;
    char **name = sft__list(folder, &names);
    SftSaved *list = SFT_NEW(SftSaved, names);
    *n = 0;
    for (int i = 0; i < names; i++) {
        struct stat s;
        size_t length = strlen(name[i]), digits = length > 11 ? strspn(name[i] + 11, "0123456789") : 0;
        if (strncmp(name[i], "checkpoint-", 11) || !digits || digits > 18 || length != 11 + digits) continue;
        if (stat(sft_path(state, sft_path(path, folder, name[i]), "state.json"), &s)) continue;
        SftSaved *c = &list[(*n)++];
        strcpy(c->name, name[i]);
        c->step = strtoll(name[i] + 11, NULL, 10), c->written = s.st_mtim;
    }
    sft__list_free(name, names);
    qsort(list, (size_t)*n, sizeof *list, sft__by_age);
    return list;
}

// "checkpoint-5, checkpoint-10" of a folder, without `except`, or "none": for an error message.
static const char *sft__others(char out[1024], const char *folder, const char *except) {
    int n;
    SftSaved *list = sft__checkpoints(folder, &n);
    out[0] = 0;
    for (int i = 0; i < n; i++)
        if (strcmp(list[i].name, except) && strlen(out) < 900) strcat(strcat(out, *out ? ", " : ""), list[i].name);
    free(list);
    return *out ? out : strcpy(out, "none");
}

// Saving. When anything goes wrong sft_die comes here first: an unfinished folder must not fill the disk.
static char sft__unfinished[4096];
static void (*sft__next_hook)(int status, const char *line);
static void sft__save_failed(int status, const char *line) {
    sft_die_hook = sft__next_hook;
    sft__remove_folder(sft__unfinished);
    if (sft_die_hook) sft_die_hook(status, line);
}

// Adam's m and v as named tensors, where they lie: "3.q_w.m" is of unit 3. Returns their number; frees nothing.
static int64_t sft__moments(const SftModel *m, SftFileTensor **tensor) {
    int64_t n = 0;
    *tensor = SFT_NEW(SftFileTensor, m->units * SFT_SLOTS * 2);
    for (int64_t u = 0; u < m->units; u++)
        for (int k = 0; k < SFT_SLOTS * 2; k++) {
            int64_t offset = m->unit[u].offset[k / 2];
            SftTensor w = ((const SftTensor *)&m->unit[u].w)[k / 2];
            if (offset < 0) continue;
            SftFileTensor t = {.dtype = "F32", .dims = 2, .dim = {w.dim[0], w.dim[1]}};
            t.bytes = (size_t)sft_size(w) * 4;
            t.name = sft_format("%lld.%s.%c", (long long)u, sft_slot_name((SftSlot)(k / 2)), k % 2 ? 'v' : 'm');
            t.data = (const char *)((k % 2 ? m->unit[u].v : m->unit[u].m) + offset);
            (*tensor)[n++] = t;
        }
    return n;
}
static void sft__moments_free(SftFileTensor *tensor, int64_t n) {
    for (int64_t i = 0; i < n; i++) free((char *)tensor[i].name);
    free(tensor);
}

typedef struct { const SftModel *m; const SftFileTensor *moment; } SftMoments;
static void sft__moment_rows(void *arg, int64_t i, int64_t first, int64_t rows, void *out) {
    const SftMoments *s = (const SftMoments *)arg;
    SftCtx c = sft__context(s->m);
    size_t row = s->moment[i].bytes / (size_t)s->moment[i].dim[0];
    s->m->ops->download(&c, out, s->moment[i].data + (size_t)first * row, (size_t)rows * row);
    s->m->ops->wait(&c);
}

static void sft__save_moments(const SftModel *m, const char *path) {
    SftMoments from = {m, NULL};
    SftFileTensor *tensor;
    int64_t n = sft__moments(m, (SftFileTensor **)&from.moment);
    tensor = SFT_NEW(SftFileTensor, n);
    for (int64_t i = 0; i < n; i++) {
        tensor[i] = from.moment[i];
        if (m->ops->remote) tensor[i].data = NULL; // then its rows are asked for
    }
    sft_safetensors_write(path, tensor, n, NULL, sft__moment_rows, &from);
    free(tensor);
    sft__moments_free((SftFileTensor *)from.moment, n);
}

// Of the state without its own "checksum": text whose layout and order do not matter.
static void sft__state_sum(char out[24], json_t *state) {
    json_object_del(state, "checksum");
    char *text = json_dumps(state, JSON_COMPACT | JSON_SORT_KEYS);
    sft__sum(out, text, strlen(text));
    free(text);
}

static void sft__write_state(const SftModel *m, const SftTrainer *t, const SftConfig *config, const char *folder) {
    char path[4096], sum[24];
    int n;
    json_t *files = json_object(), *scaler = json_pack("{s:f, s:I, s:I, s:I, s:b}", "scale", t->scaler.scale,
        "iter", (json_int_t)t->scaler.iter, "last_overflow", (json_int_t)t->scaler.last_overflow,
        "left", (json_int_t)t->scaler.left, "dynamic", (int)t->scaler.dynamic);
    char **names = sft__list(folder, &n);
    for (int i = 0; i < n; i++) {
        size_t bytes = sft__sum_file(sum, sft_path(path, folder, names[i]));
        json_object_set_new(files, names[i], json_pack("{s:I, s:s}", "bytes", (json_int_t)bytes, "checksum", sum));
    }
    sft__list_free(names, n);
    json_t *state = json_pack("{s:s, s:i, s:I, s:I, s:I, s:I, s:s, s:o, s:o, s:o}", "format", "sft checkpoint",
        "version", 1, "step", (json_int_t)t->step, "updates", (json_int_t)t->updates, "total", (json_int_t)t->total,
        "bad_in_a_row", (json_int_t)t->bad_in_a_row, "source_type", sft_type_name(m->arch.source_type),
        "scaler", scaler, "config", sft_config_json(config), "files", files);
    sft__state_sum(sum, state);
    json_object_set_new(state, "checksum", json_string(sum));
    sft__write_json(folder, "state.json", state);
    json_decref(state);
}

static json_t *sft__model_json(const SftArch *a) { // config.json as it was read, with the vocabulary as it is
    json_t *json = a->json ? json_deep_copy(a->json) : json_object();
    json_object_set_new(json, "vocab_size", json_integer(a->V));
    return json;
}

// Gives `temporary` the name `target`. Where that is taken, the two change places in one call, if the system can.
static void sft__put_in_place(const char *temporary, const char *target) {
    char *old = sft_format("%s.old.tmp", target);
    bool taken = sft_exists(target), good;
#ifdef SYS_renameat2
    if (taken && !syscall(SYS_renameat2, AT_FDCWD, temporary, AT_FDCWD, target, 2 /* exchange */)) {
        sft__remove_folder(temporary);
        free(old);
        return;
    }
#endif
    good = (!taken || !rename(target, old)) && !rename(temporary, target); // for a moment there may be neither
    if (!good) sft_die(SFT_BROKEN, "cannot rename %s to %s: %s", temporary, target, strerror(errno));
    sft__remove_folder(old);
    free(old);
}

// Removes the oldest beyond `limit`, never `keep`. Each loses its name first, so that no half of one is ever found.
static void sft__rotate(const char *folder, int64_t limit, const char *keep) {
    char path[4096], temporary[4096], name[80];
    int n;
    SftSaved *list = sft__checkpoints(folder, &n);
    for (int i = 0, left = n; i < n && limit > 0 && left > limit; i++) {
        if (!strcmp(list[i].name, keep)) continue;
        snprintf(name, sizeof name, "%s.tmp", list[i].name);
        if (rename(sft_path(path, folder, list[i].name), sft_path(temporary, folder, name)) == 0) left--;
        sft__remove_folder(temporary);
    }
    free(list);
}

void sft_checkpoint_save(const SftModel *m, const SftTrainer *t, const SftConfig *config) {
    char name[80], target[4096], path[4096];
    const char *folder = config->output_dir;
    int n;
    sft_make_folder(folder);
    char **names = sft__list(folder, &n); // what a killed run has left
    for (int i = 0; i < n; i++) {
        bool unfinished = !strncmp(names[i], "checkpoint-", 11) && !strcmp(sft__ending(names[i]), ".tmp");
        sft_path(path, folder, names[i]);
        if (!strncmp(names[i], "latest.tmp", 10)) unlink(path);
        if (unfinished) sft__remove_folder(path);
    }
    sft__list_free(names, n);
    snprintf(name, sizeof name, "checkpoint-%lld.tmp", (long long)t->step);
    sft_path(sft__unfinished, folder, name);
    *strrchr(name, '.') = 0;
    sft__next_hook = sft_die_hook, sft_die_hook = sft__save_failed;
    sft_make_folder(sft__unfinished);
    sft_save_weights(m, sft__unfinished, SFT_F32, INFINITY);
    sft__save_moments(m, sft_path(path, sft__unfinished, "optimizer.safetensors"));
    if (config->model_name_or_path) sft__copy_model_files(config->model_name_or_path, sft__unfinished);
    json_t *model = sft__model_json(&m->arch);
    sft__write_json(sft__unfinished, "config.json", model);
    json_decref(model);
    sft__write_state(m, t, config, sft__unfinished);
    sft__fsync_folder(sft__unfinished);
    sft__put_in_place(sft__unfinished, sft_path(target, folder, name));
    sft_die_hook = sft__next_hook;
    sft__fsync_folder(folder);
    char *line = sft_format("%s\n", name);
    sft_write_file(sft_path(path, folder, "latest"), line, strlen(line));
    free(line);
    sft__fsync_folder(folder);
    sft__rotate(folder, config->save_total_limit, name);
}

char *sft_checkpoint_find(const SftConfig *config) {
    const json_t *ask = config->resume_from_checkpoint;
    const char *folder = config->output_dir, *given = json_string_value(ask);
    char path[4096], others[1024] = "none", inside[1024], name[80] = "";
    bool none = !folder || !strcmp(sft__others(others, folder, ""), "none");
    if (!given && !json_is_true(ask)) { // a new run
        if (!none && !config->overwrite_output_dir)
            sft_die(SFT_BAD_INPUT, "output_dir %s holds checkpoints (%s): go on with \"resume_from_checkpoint\": true, "
                    "or start afresh with \"overwrite_output_dir\": true", folder, others);
        if (!none) unlink(sft_path(path, folder, "latest")); // it must not lead back to the run that is given up
        return NULL;
    }
    if (given && strcmp(given, "latest")) {
        if (sft_exists(sft_path(path, given, "state.json"))) return sft_format("%s", given);
        sft_die(SFT_BAD_INPUT, "resume_from_checkpoint: %s is not a checkpoint (no state.json); checkpoints in it: %s; "
                "in output_dir: %s", given, sft__others(inside, given, ""), others);
    }
    if (!folder) sft_die(SFT_BAD_INPUT, "resume_from_checkpoint needs output_dir, or the path of a checkpoint");
    if (none) sft_die(SFT_BAD_INPUT, "resume_from_checkpoint: there is no checkpoint in output_dir %s", folder);
    if (sft_exists(sft_path(path, folder, "latest"))) {
        char *text = sft_read_file(path, NULL);
        snprintf(name, sizeof name, "%.*s", (int)strcspn(text, "\r\n"), text);
        free(text);
    }
    int n;
    bool found = false;
    SftSaved *list = sft__checkpoints(folder, &n);
    for (int i = 0; i < n; i++) found |= !strcmp(list[i].name, name);
    free(list);
    if (found) return sft_format("%s/%s", folder, name);
    sft_die(SFT_BAD_INPUT, "%s/latest %s \"%s\", which is not a complete checkpoint; name another in "
            "resume_from_checkpoint: %s", folder, *name ? "says" : "is missing or says", name, others);
}

// Loading
SFT_NORETURN static void sft__damaged(const char *folder, const char *what) {
    char parent[4096], others[1024];
    snprintf(parent, sizeof parent, "./%s", folder);
    if (*folder == '/') snprintf(parent, sizeof parent, "%s", folder);
    for (size_t n = strlen(parent); parent[n - 1] == '/'; n--) parent[n - 1] = 0;
    char *slash = strrchr(parent, '/');
    *slash = 0;
    sft_die(SFT_BAD_INPUT, "checkpoint %s is damaged: %s; others beside it: %s", folder, what,
            sft__others(others, parent, slash + 1));
}

// state.json, after it and every file it lists have been compared with their checksums.
static json_t *sft__checked_state(const char *folder) {
    char path[4096], sum[24], was[24] = "";
    json_error_t error;
    json_t *state = json_load_file(sft_path(path, folder, "state.json"), JSON_REJECT_DUPLICATES, &error), *entry;
    if (!state) sft__damaged(folder, sft_format("state.json, line %d: %s", error.line, error.text));
    const char *format = json_string_value(json_object_get(state, "format")), *name;
    if (!format || strcmp(format, "sft checkpoint")) sft__damaged(folder, "state.json is not that of a checkpoint");
    long long version = json_integer_value(json_object_get(state, "version"));
    if (version != 1) sft_die(SFT_BAD_INPUT, "%s has format version %lld; this program reads version 1", path, version);
    const char *own = json_string_value(json_object_get(state, "checksum"));
    snprintf(was, sizeof was, "%s", own ? own : "");
    sft__state_sum(sum, state);
    if (strcmp(sum, was)) sft__damaged(folder, "state.json has been changed (its checksum differs)");
    json_object_foreach(json_object_get(state, "files"), name, entry) {
        if (!sft_exists(sft_path(path, folder, name))) sft__damaged(folder, sft_format("%s is missing", name));
        size_t bytes = sft__sum_file(sum, path), wanted = (size_t)json_integer_value(json_object_get(entry, "bytes"));
        if (bytes != wanted) sft__damaged(folder, sft_format("%s has %zu bytes, %zu were saved", name, bytes, wanted));
        if (strcmp(sum, json_string_value(json_object_get(entry, "checksum"))))
            sft__damaged(folder, sft_format("%s has been changed (its checksum differs)", name));
    }
    return state;
}

// The model's config.json and the checkpoint's must say the same, but for what does not change the computation.
static void sft__check_model(const SftModel *m, const char *folder) {
    const char *key, *harmless = "_name_or_path|architectures|auto_map|bos_token_id|dtype|eos_token_id|pad_token_id|"
                                 "torch_dtype|transformers_version|use_cache";
    json_t *mine = sft__model_json(&m->arch), *old = sft__read_json(folder, "config.json"), *all = json_copy(mine), *v;
    json_object_update_missing(all, old);
    json_object_foreach(all, key, v) {
        json_t *a = json_object_get(old, key), *b = json_object_get(mine, key);
        char there[80], here[80];
        if (json_equal(a, b) || sft__option_among(harmless, key)) continue;
        sft__json_text(there, a, false), sft__json_text(here, b, false);
        sft_die(SFT_BAD_INPUT, "checkpoint %s is of another model: %s is %s there, %s here", folder, key, there, here);
    }
    json_decref(all), json_decref(mine), json_decref(old);
}

static void sft__load_moments(SftModel *m, const char *folder) {
    char path[4096];
    SftCtx c = sft__context(m);
    SftFileTensor *tensor;
    SftSafetensors f = sft_safetensors_open(sft_path(path, folder, "optimizer.safetensors"));
    int64_t n = sft__moments(m, &tensor);
    for (int64_t i = 0; i < n; i++) {
        const SftFileTensor *want = &tensor[i], *got = sft_safetensors_find(&f, want->name);
        bool good = got && !strcmp(got->dtype, "F32") && got->dims == 2;
        if (!good || got->dim[0] != want->dim[0] || got->dim[1] != want->dim[1])
            sft_die(SFT_BAD_INPUT, "%s has no tensor %s of fp32 [%lld, %lld]", path, want->name,
                    (long long)want->dim[0], (long long)want->dim[1]);
        m->ops->upload(&c, (char *)want->data, got->data, want->bytes);
    }
    if (n != f.n) sft_die(SFT_BAD_INPUT, "%s has %lld tensors, the model has %lld", path, (long long)f.n, (long long)n);
    sft__moments_free(tensor, n);
    sft_safetensors_close(&f);
}

// Says which options that decide about data or steps are no longer what they were: then it is not the same run.
static void sft__compare_config(const json_t *state, const SftConfig *config) {
    const char *key, *deciding = "train_file|template|columns|dataset_format|validation_split|max_length|packing|"
        "packing_strategy|use_varlen_attn|train_on_prompt|mask_history|max_samples|shuffle|per_device_train_batch_size|"
        "gradient_accumulation_steps|learning_rate|lr_scheduler_type|lr_scheduler_kwargs|warmup_steps|warmup_ratio|"
        "weight_decay|adam_beta1|adam_beta2|adam_epsilon|max_grad_norm|fp16|bf16|seed|truncation_mode";
    json_t *all = sft_config_json(config), *v;
    json_object_foreach(all, key, v) {
        json_t *old = json_object_get(json_object_get(state, "config"), key);
        char now[80], then[80];
        if (json_equal(v, old) || !sft__option_among(deciding, key)) continue;
        sft__json_text(now, v, false), sft__json_text(then, old, false);
        sft_note("%s is %s; the checkpoint was written with %s", key, now, then);
    }
    json_decref(all);
}

void sft_checkpoint_load(SftModel *m, SftTrainer *t, const SftConfig *config, const char *folder) {
    char path[4096];
    SftArch *a = &m->arch;
    bool checkpoint = sft_exists(sft_path(path, folder, "state.json"));
    if (t && !checkpoint) sft_die(SFT_BAD_INPUT, "%s is not a checkpoint: it has no state.json", folder);
    json_t *state = checkpoint ? sft__checked_state(folder) : NULL, *s = json_object_get(state, "scaler");
    if (checkpoint) sft__check_model(m, folder);
    json_t *model = sft__read_json(folder, "config.json");
    int64_t rows = json_integer_value(json_object_get(model, "vocab_size"));
    if (rows > 0 && rows <= a->V) a->V_source = rows;
    json_decref(model);
    sft_load_weights(m, folder); // a checkpoint is a Hugging Face folder, too
    if (!checkpoint) return;
    const char *source = json_string_value(json_object_get(state, "source_type"));
    for (int type = 0; source && type < SFT_TYPES; type++) // what an export's "auto" means, not the fp32 of the masters
        if (!strcmp(source, sft_type_name((SftType)type))) a->source_type = (SftType)type;
    if (t) {
        sft__load_moments(m, folder);
        t->step = (int64_t)sft__json_number(state, path, "step", 'w', NAN, 0, 1e15);
        t->updates = (int64_t)sft__json_number(state, path, "updates", 'w', NAN, 0, 1e15);
        t->bad_in_a_row = (int64_t)sft__json_number(state, path, "bad_in_a_row", 'w', NAN, 0, 1e15);
        double total = sft__json_number(state, path, "total", 'w', NAN, 0, 1e15);
        if (total != (double)t->total)
            sft_note("the run has %lld steps; %.0f when the checkpoint was written", (long long)t->total, total);
        if (t->scaler.dynamic && json_is_true(json_object_get(s, "dynamic"))) { // its settings are the configuration's
            t->scaler.scale = sft__json_number(s, path, "scale", 'n', NAN, 0, 1e15);
            t->scaler.scale = fmin(t->scaler.max_scale, fmax(t->scaler.min_scale, t->scaler.scale));
            t->scaler.iter = (int64_t)sft__json_number(s, path, "iter", 'w', NAN, 0, 1e15);
            t->scaler.last_overflow = (int64_t)sft__json_number(s, path, "last_overflow", 'w', NAN, -1, 1e15);
            int64_t left = (int64_t)sft__json_number(s, path, "left", 'w', NAN, 1, 1e15);
            t->scaler.left = SFT_MIN(t->scaler.hysteresis, left);
        }
        if (config) sft__compare_config(state, config);
    }
    json_decref(state);
}

// Exporting
// The tokenizer's files as they are, but for the chat template and the token that ends an answer.
static void sft__export_tokenizer(const SftTokenizer *t, const SftTemplate *tpl, int32_t stop, const char *source,
                                  const char *folder) {
    char path[4096];
    sft__copy_model_files(source, folder);
    if (!tpl || !t) return;
    const char *jinja = sft_template_jinja(tpl), *text = stop >= 0 ? sft_token_text(t, stop) : NULL;
    const char *files[] = {"tokenizer_config.json", "special_tokens_map.json"};
    for (int i = 0; i < 2; i++) {
        if (i && !sft_exists(sft_path(path, folder, files[i]))) continue;
        json_t *json = sft__read_json(folder, files[i]);
        if (!i) json_object_set_new(json, "chat_template", json_string(jinja));
        if (text) json_object_set_new(json, "eos_token", json_string(text));
        sft__write_json(folder, files[i], json);
        json_decref(json);
    }
    sft_write_file(sft_path(path, folder, "chat_template.jinja"), jinja, strlen(jinja)); // newer readers look here
}

void sft_export(const SftModel *m, const SftTokenizer *t, const SftTemplate *tpl, const SftConfig *config,
                const char *source, const char *folder) {
    static const char *const dtypes[SFT_TYPES] = {"float32", "bfloat16", "float16"};
    SftType type = m->arch.source_type;
    for (int i = 0; i < SFT_TYPES; i++)
        if (!strcmp(config->export_dtype, dtypes[i])) type = (SftType)i;
    int32_t stops[64];
    int n = sft_stops(stops, m, tpl);
    sft_make_folder(folder);
    sft_save_weights(m, folder, type, config->max_shard_size);
    sft__export_tokenizer(t, tpl, n ? stops[0] : -1, source, folder);
    json_t *json = sft__model_json(&m->arch), *ids = json_array();
    json_t *generation = sft__read_json(folder, "generation_config.json");
    for (int i = 0; i < n; i++) json_array_append_new(ids, json_integer(stops[i]));
    json_object_set_new(json, json_object_get(json, "dtype") ? "dtype" : "torch_dtype", json_string(dtypes[type]));
    json_t *end = n == 1 ? json_array_get(ids, 0) : ids; // one id, or a list of them
    if (n) json_object_set(json, "eos_token_id", end), json_object_set(generation, "eos_token_id", end);
    if (t && sft_bos(t) >= 0) json_object_set_new(generation, "bos_token_id", json_integer(sft_bos(t)));
    json_t *tokens = sft__read_json(folder, "tokenizer_config.json"), *pad = json_object_get(tokens, "pad_token");
    const char *text = json_string_value(json_is_object(pad) ? json_object_get(pad, "content") : pad);
    int32_t id = t && text ? sft_token_id(t, text) : -1;
    if ((n || id >= 0) && !json_is_integer(json_object_get(generation, "pad_token_id")))
        json_object_set_new(generation, "pad_token_id", json_integer(id >= 0 ? id : stops[0]));
    sft__write_json(folder, "config.json", json);
    sft__write_json(folder, "generation_config.json", generation);
    json_decref(json), json_decref(generation), json_decref(ids), json_decref(tokens);
}

/* ================================================================================================================
   [10] speak: generation with a KV cache
   ================================================================================================================
   Generation asks for one token after another. The keys and values of all earlier tokens stay the same, so they are
   kept (m->cache, a pair of tensors per block) and every new token runs through the blocks alone, attending to the
   cache. The prompt goes through in pieces of as many tokens as the activations have room for; then one token at a
   time, each of which reads every weight once: decoding is bound by memory, not by arithmetic.
   Comes in: token ids. Goes out: token ids, the stop token included. Test: test/test_speak.c (the cache changes
   nothing: each token's logits equal those of a forward pass over the whole text). Pitfall: with greedy decoding one
   different rounding can turn an answer; the cache path therefore runs the same block code as training. */

// One candidate of the next token.
typedef struct { float logit; int32_t id; } Sft__Candidate;

static int sft__by_logit(const void *a, const void *b) { // highest first; equal ones in order of their ids
    const Sft__Candidate *x = (const Sft__Candidate *)a, *y = (const Sft__Candidate *)b;
    return x->logit != y->logit ? (x->logit < y->logit ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

/* Divides the logits of tokens that were seen already by the penalty (multiplies the negative ones): Keskar et al.
   2019, as transformers applies it, once per distinct token of prompt and answer. */
static void sft__repetition(float *logits, int64_t V, double penalty, const int32_t *seen, int64_t n, uint8_t *mark) {
    if (penalty == 1) return;
    memset(mark, 0, (size_t)V);
    for (int64_t i = 0; i < n; i++) {
        if (mark[seen[i]]++) continue;
        float *x = &logits[seen[i]];
        *x = (float)(*x < 0 ? *x * penalty : *x / penalty);
        mark[seen[i]] = 1;
    }
}

/* Draws a token from softmax(logits / temperature), cut to the top_k best and then to the smallest set of the best
   whose probabilities reach top_p (Holtzman et al. 2020). Temperature 0: the best one, the lowest id among equals. */
static int32_t sft__sample(const float *logits, int64_t V, SftSampling how, uint64_t index, Sft__Candidate *list) {
    int64_t best = 0, n = 0;
    for (int64_t i = 1; i < V; i++) best = logits[i] > logits[best] ? i : best;
    if (how.temperature == 0) return (int32_t)best;
    // Only tokens within 30 temperatures of the best matter: the others have probability below e^-30 each.
    for (int64_t i = 0; i < V; i++)
        if (logits[i] >= logits[best] - 30 * (float)how.temperature)
            list[n++] = (Sft__Candidate){logits[i], (int32_t)i};
    qsort(list, (size_t)n, sizeof *list, sft__by_logit);
    if (how.top_k && how.top_k < n) n = how.top_k;
    double sum = 0, part = 0;
    for (int64_t i = 0; i < n; i++) sum += exp((list[i].logit - list[0].logit) / how.temperature);
    for (int64_t i = 0; i < n && how.top_p < 1; i++) {
        part += exp((list[i].logit - list[0].logit) / how.temperature) / sum;
        if (part >= how.top_p) n = i + 1, sum *= part; // what is left of the sum
    }
    double at = sft_uniform(sft_random(how.seed, 0, SFT_SITE_SAMPLE, index)) * sum;
    for (int64_t i = 0; i < n - 1; i++) {
        at -= exp((list[i].logit - list[0].logit) / how.temperature);
        if (at < 0) return list[i].id;
    }
    return list[n - 1].id;
}

/* Runs n new tokens of the one document through the blocks, after those that the cache holds. Leaves their hidden
   states in m->final. */
static void sft__extend(SftCtx *c, SftModel *m, SftBatch *b, const int32_t *ids, int64_t n) {
    b->n = n;
    for (int64_t i = 0; i < n; i++) {
        b->ids[i] = ids[i], b->target[i] = -100, b->begin[i] = 0;
        b->pos[i] = (int32_t)(m->cache.n + i), b->end[i] = (int32_t)(m->cache.n + n);
    }
    sft_forward_cached(c, m, b, &m->cache);
}

// The logits [V] of the token after row `row` of m->final, in fp32.
static void sft__next_logits(SftCtx *c, SftModel *m, float *logits, int64_t row) {
    const SftTensor head = m->arch.tied ? m->unit[0].w.wte : m->unit[m->units - 1].w.head_w;
    const SftTensor out = sft_rows(m->logits, 0, 1);
    c->ops->matmul_forward(c, out, SFT_NONE, sft_rows(m->final, row, 1), head, SFT_NO_SIDE, SFT_NONE, SFT_NONE, 1,
                           SFT_LINEAR);
    const void *data = sft__read(c, m->room, out.data, (size_t)m->arch.V * sft_type_size(out.type));
    c->ops->wait(c);
    sft_to_f32(logits, data, out.type, m->arch.V);
}

int sft_stops(int32_t out[64], const SftModel *m, const SftTemplate *tpl) {
    const int32_t *trained = NULL;
    int n = 0, given = tpl ? sft_template_stops(tpl, &trained) : 0;
    for (int i = 0; i < given + m->arch.neos && n < 64; i++) {
        int k = 0;
        out[n] = i < given ? trained[i] : m->arch.eos[i - given];
        while (out[k] != out[n]) k++;
        n += k == n;
    }
    return n;
}

void sft_generate(SftCtx *c, SftModel *m, SftIds *out, const int32_t *prompt, int64_t n, const int32_t *stops,
                  int nstops, SftSampling how, void (*on_token)(void *arg, int32_t id), void *arg) {
    const int64_t V = m->arch.V, room = m->cache.room;
    if (n < 1) sft_die(SFT_BAD_INPUT, "the prompt has no tokens: give it some text");
    if (n >= room)
        sft_die(SFT_BAD_INPUT, "the prompt has %lld tokens; with its answer there is room for %lld", (long long)n,
                (long long)room);
    SftIds all = {0};
    for (int64_t i = 0; i < n; i++) sft_ids_add(&all, prompt[i]);
    SftBatch batch = {0};
    sft_batch_room(&batch, m->tokens);
    float *logits = SFT_NEW(float, V);
    uint8_t *mark = SFT_NEW(uint8_t, V);
    Sft__Candidate *list = SFT_NEW(Sft__Candidate, V);
    int64_t done = m->cache.n = 0;
    for (int64_t made = 0; made < how.max_new_tokens && all.n < room; made++) {
        int64_t last = 0; // row of the last token
        for (int64_t piece; done < all.n; done += piece) {
            piece = SFT_MIN(all.n - done, m->tokens);
            sft__extend(c, m, &batch, all.ids + done, piece);
            last = piece - 1;
        }
        sft__next_logits(c, m, logits, last);
        sft__repetition(logits, V, how.repetition_penalty, all.ids, all.n, mark);
        int32_t id = sft__sample(logits, V, how, (uint64_t)all.n, list);
        sft_ids_add(&all, id), sft_ids_add(out, id);
        if (on_token) on_token(arg, id);
        bool stop = false;
        for (int i = 0; i < nstops; i++) stop |= stops[i] == id;
        if (stop) break;
    }
    sft_batch_free(&batch);
    free(all.ids), free(logits), free(mark), free(list);
}

/* ================================================================================================================
   [11] record: progress line, JSON log, summary
   ================================================================================================================
   In come the figures of every step, evaluation and sample answer; out go log.jsonl for programs and lines
   for people. Invariants: a line of the log is one write() of one JSON object; it holds no NaN; after a
   resume the log is what an uninterrupted run would have written, but for the times. Guarded by
   test/test_record.c. The usual pitfalls: a log that is buffered and lost with the run, and a resumed run
   whose log has the same steps twice. */
struct SftRecord {
    const SftConfig *config;
    FILE *out; // where the lines for people go
    int file;
    char path[4096];
    double opened, last;                                   // clock: at the beginning, after the last step
    double busy; // seconds from step to step, all that happens between included
    int64_t steps, tokens, trained, skipped, clipped; // since the beginning
    double window_loss, window_seconds, loss; // since the last printed line; the loss that was printed
    int64_t window_tokens, window_trained;
};

json_t *sft_json_real(double x) { return isfinite(x) ? json_real(x) : json_null(); }

int64_t sft_peak_rss(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
#ifdef __APPLE__
    return (int64_t)u.ru_maxrss; // bytes there, kilobytes elsewhere
#else
    return (int64_t)u.ru_maxrss * 1024;
#endif
}

typedef char SftShort[24];
static const char *sft__short(SftShort out, double x) { // 950, 6.1k, 1.2M
    static const char *const unit[] = {"", "k", "M", "G", "T"};
    int k = 0;
    for (; fabs(x) >= 999.5 && k < 4; k++) x /= 1000;
    return snprintf(out, sizeof(SftShort), k && x < 99.95 ? "%.1f%s" : "%.0f%s", x, unit[k]), out;
}

static const char *sft__clock(SftShort out, double seconds) { // 0:07, 12:34, 1:02:03
    long long s = (long long)(seconds < 0 ? 0 : fmin(seconds, 1e12) + 0.5);
    if (s < 3600) snprintf(out, sizeof(SftShort), "%lld:%02lld", s / 60, s % 60);
    else snprintf(out, sizeof(SftShort), "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    return out;
}

// The state of the bar is the terminal's: there is one per process.
void sft_progress(const char *what, double done, double total) {
    static char shown[32];
    static double began, first, drawn, before; // drawn: when the picture on the screen was, 0: there is none
    if (!isatty(STDERR_FILENO)) return;
    double now = sft_now();
    bool other = strncmp(what, shown, sizeof shown - 1) || done < before;
    if (drawn > 0 && (other || done >= total)) fprintf(stderr, "\r\033[K"), drawn = 0;
    if (other) snprintf(shown, sizeof shown, "%s", what), began = now, first = done;
    before = done;
    if (done < total && now - drawn >= 0.1) { // ten pictures a second are enough
        SftShort a, b, rate, eta;
        double share = total > 0 ? done / total : 0, pace = done > first ? (done - first) / (now - began) : 0;
        int full = (int)(share * 30);
        fprintf(stderr, "\r%-10s [%.*s%.*s] %3.0f %%  %s/%s", shown, full, "##############################",
                30 - full, "..............................", 100 * share, sft__short(a, done),
                sft__short(b, total));
        if (pace > 0)
            fprintf(stderr, "  %s/s  eta %s", sft__short(rate, pace), sft__clock(eta, (total - done) / pace));
        fprintf(stderr, "\033[K");
        fflush(stderr);
        drawn = now;
    }
}

// Lines of a log that a run resumed at step k keeps: all but the summary, what came later, and what was cut
// short.
static bool sft__keeps(const char *line, size_t n, int64_t k) {
    json_t *json = json_loadb(line, n, 0, NULL);
    const char *event = json_string_value(json_object_get(json, "event"));
    bool keep = json_is_object(json) && !(event && !strcmp(event, "summary")) &&
                json_integer_value(json_object_get(json, "step")) <= k;
    json_decref(json);
    return keep;
}

SftRecord *sft_record_open(const SftConfig *config, int64_t resume_step) {
    SftRecord *r = SFT_NEW(SftRecord, 1);
    r->config = config;
    r->loss = NAN;
    r->out = config->json ? stderr : stdout;
    r->opened = r->last = sft_now();
    sft_make_folder(config->output_dir);
    sft_path(r->path, config->output_dir, "log.jsonl");
    bool goes_on = resume_step > 0 && sft_exists(r->path);
    if (goes_on) {
        size_t n, kept = 0;
        char *text = sft_read_file(r->path, &n);
        for (char *p = text, *end; (end = (char *)memchr(p, '\n', n - (size_t)(p - text))); p = end + 1) {
            size_t bytes = (size_t)(end + 1 - p);
            if (sft__keeps(p, bytes, resume_step)) memmove(text + kept, p, bytes), kept += bytes;
        }
        goes_on = kept > 0;
        sft_write_file(r->path, text, kept);
        free(text);
    }
    r->file = open(r->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (goes_on ? 0 : O_TRUNC), 0666);
    if (r->file < 0) sft_die(SFT_BROKEN, "cannot open %s: %s", r->path, strerror(errno));
    if (!goes_on) {
        json_t *line = json_pack("{s:s}", "event", "config"), *options = sft_config_json(config);
        json_object_update(line, options);
        json_decref(options);
        sft_record_event(r, line);
    }
    return r;
}

void sft_record_event(SftRecord *r, json_t *line) {
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(15)); // 15: 0.1 stays 0.1
    json_decref(line);
    if (!text) sft_die(SFT_BROKEN, "a line of %s cannot be written as JSON", r->path);
    size_t n = strlen(text);
    text[n++] = '\n'; // in the place of the final '\0'
    if (!sft__write(r->file, text, n)) sft_die(SFT_BROKEN, "cannot write %s: %s", r->path, strerror(errno));
    free(text);
}

// The line for people, over the steps since the last one.
static void sft__step_print(SftRecord *r, const SftStepLine *s) {
    SftShort a, b;
    double left = r->steps ? r->busy / (double)r->steps * (double)(s->total - s->step) : 0;
    sft_progress("", 1, 1); // takes the bar away
    fprintf(r->out, "step %*lld/%lld  epoch %.2f  ", snprintf(a, sizeof a, "%lld", (long long)s->total),
            (long long)s->step, (long long)s->total, s->epoch);
    if (r->window_trained) r->loss = r->window_loss / (double)r->window_trained;
    fprintf(r->out, "loss %.4f  lr %.2e  ", r->loss, s->update.lr);
    if (s->update.skipped) fprintf(r->out, "SKIPPED: non-finite gradient  ");
    else fprintf(r->out, "norm %.3g%s  ", s->update.grad_norm, s->update.clipped ? " clipped" : "");
    if (r->config->fp16) fprintf(r->out, "scale %g  ", s->loss_scale);
    if (r->skipped) fprintf(r->out, "skipped %lld  ", (long long)r->skipped);
    fprintf(r->out, "%s tok/s  ",
            sft__short(a, r->window_seconds > 0 ? (double)r->window_tokens / r->window_seconds : 0));
    if (s->mfu > 0) fprintf(r->out, "mfu %.0f %%  ", 100 * s->mfu);
    fprintf(r->out, "%sB  eta %s\n", sft__short(a, (double)sft_peak_rss()), sft__clock(b, left));
    fflush(r->out);
    r->window_loss = r->window_seconds = 0;
    r->window_tokens = r->window_trained = 0;
}

void sft_record_step(SftRecord *r, const SftStepLine *s) {
    bool good = isfinite(s->loss) && !s->update.skipped;
    double now = sft_now();
    r->busy += r->steps ? now - r->last : s->seconds; // loading before the first step is none of its time
    r->last = now;
    r->steps++, r->tokens += s->tokens, r->trained += s->trained_tokens;
    r->skipped += s->update.skipped, r->clipped += s->update.clipped;
    if (good) r->window_loss += s->loss * (double)s->trained_tokens, r->window_trained += s->trained_tokens;
    r->window_tokens += s->tokens, r->window_seconds += s->seconds;
    json_t *line = json_pack("{s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:o, s:o}", "step", (json_int_t)s->step,
        "epoch", sft_json_real(s->epoch), "loss", sft_json_real(s->loss),
        "grad_norm", sft_json_real(s->update.grad_norm), "learning_rate", sft_json_real(s->update.lr),
        "tokens", (json_int_t)s->tokens, "trained_tokens", (json_int_t)s->trained_tokens,
        "tokens_per_second", sft_json_real((double)s->tokens / s->seconds), "step_seconds", sft_json_real(s->seconds));
    if (r->config->fp16) json_object_set_new(line, "loss_scale", sft_json_real(s->loss_scale));
    if (s->update.skipped) json_object_set_new(line, "skipped", json_true());
    if (s->update.clipped) json_object_set_new(line, "clipped", json_true());
    if (s->comm_seconds > 0) json_object_set_new(line, "comm_seconds", sft_json_real(s->comm_seconds));
    if (s->mfu > 0) json_object_set_new(line, "mfu", sft_json_real(s->mfu));
    sft_record_event(r, line);
    if (s->step % r->config->logging_steps == 0 || s->step == s->total) sft__step_print(r, s);
    sft_progress("training", (double)s->step, (double)s->total);
}

void sft_record_evaluation(SftRecord *r, int64_t step, double loss, int64_t tokens, double exact) {
    json_t *line = json_pack("{s:I, s:o, s:I}", "step", (json_int_t)step, "eval_loss", sft_json_real(loss),
                             "eval_tokens", (json_int_t)tokens);
    if (!isnan(exact)) json_object_set_new(line, "eval_exact_match", sft_json_real(exact));
    sft_record_event(r, line);
    sft_progress("", 1, 1);
    fprintf(r->out, "step %lld  validation loss %.4f  perplexity %.4g", (long long)step, loss, exp(loss));
    if (!isnan(exact)) fprintf(r->out, "  exact match %.1f %%", 100 * exact);
    fprintf(r->out, "  (%lld trained tokens)\n", (long long)tokens);
    fflush(r->out);
}

void sft_record_sample(SftRecord *r, int64_t step, json_t *prompt, const char *answer) {
    json_t *text = json_string(answer); // NULL when it is not UTF-8
    json_t *line = json_pack("{s:I, s:O, s:o}", "step", (json_int_t)step, "prompt", prompt, "answer",
                             text ? text : json_null());
    sft_record_event(r, line);
    char *shown = json_is_string(prompt) ? strdup(json_string_value(prompt)) : json_dumps(prompt, JSON_ENCODE_ANY);
    sft_progress("", 1, 1);
    fprintf(r->out, "step %lld  prompt: %s\n  answer: %s\n", (long long)step, shown ? shown : "", answer);
    fflush(r->out);
    free(shown);
}

json_t *sft_record_summary(SftRecord *r, const SftModel *m, double before, double after) {
    SftShort a, b, c;
    size_t plan = 0, peak = 0;
    for (int i = 0; i < SFT_MEMS; i++) plan += m->mem[i].size, peak += m->mem[i].peak;
    double seconds = sft_now() - r->opened;
    json_t *line = json_pack("{s:s, s:I, s:o, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:I, s:I, s:I}", "event", "summary",
        "steps", (json_int_t)r->steps, "seconds", sft_json_real(seconds), "tokens", (json_int_t)r->tokens,
        "trained_tokens", (json_int_t)r->trained, "skipped", (json_int_t)r->skipped,
        "clipped", (json_int_t)r->clipped, "loss", sft_json_real(r->loss), "eval_loss_before", sft_json_real(before),
        "eval_loss", sft_json_real(after), "plan_bytes", (json_int_t)plan, "peak_bytes", (json_int_t)peak,
        "peak_rss_bytes", (json_int_t)sft_peak_rss());
    sft_record_event(r, json_incref(line));
    sft_progress("", 1, 1);
    fprintf(r->out, "done: %lld steps in %s, %s tokens (%s trained), %lld steps clipped, %lld skipped\n",
            (long long)r->steps, sft__clock(a, seconds), sft__short(b, (double)r->tokens),
            sft__short(c, (double)r->trained), (long long)r->clipped, (long long)r->skipped);
    if (!isnan(after) && isnan(before))
        fprintf(r->out, "validation loss %.4f, perplexity %.4g\n", after, exp(after));
    else if (!isnan(after))
        fprintf(r->out, "validation loss %.4f -> %.4f, perplexity %.4g -> %.4g\n", before, after, exp(before),
                exp(after));
    fprintf(r->out, "memory: %sB planned, %sB used, %sB resident at most\n", sft__short(a, (double)plan),
            sft__short(b, (double)peak), sft__short(c, (double)sft_peak_rss()));
    fflush(r->out);
    return line;
}

void sft_record_close(SftRecord *r) {
    sft_progress("", 1, 1);
    bool good = fsync(r->file) == 0 || errno == EINVAL || errno == EROFS; // EINVAL: not a file on a disk
    if (close(r->file) || !good) sft_die(SFT_BROKEN, "cannot write %s: %s", r->path, strerror(errno));
    free(r);
}

#endif // SFT__BODIES
#endif // SFT_IMPLEMENTATION

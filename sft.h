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
void sft_arena_open(SftArena *arena, const char *name, size_t bytes); // allocates (huge pages where the system has them), zeroed
void sft_arena_close(SftArena *arena);
void *sft_take(SftArena *arena, size_t bytes);           // a piece (NULL while planning); dies when the arena is full
void sft_give_back(SftArena *arena, size_t mark);        // everything taken since `mark = arena->used`

typedef enum { SFT_F32, SFT_BF16, SFT_F16, SFT_TYPES } SftType;
size_t sft_type_size(SftType type);      // bytes of one element
const char *sft_type_name(SftType type); // "fp32", "bf16", "fp16"
void sft_to_f32(float *out, const void *in, SftType type, int64_t n);   // out = in, widened (exact)
void sft_from_f32(void *out, SftType type, const float *in, int64_t n); // out = in, rounded to nearest even

/* One number at a time, for any input: subnormals, infinities, NaN (which stays NaN). bf16 is the upper half of a float:
   8 bits of exponent, 7 of mantissa. fp16 has 5 and 10: from 65520 on it is infinite, below 2^-14 subnormal. */
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
    u += exponent == 0x0f800000 ? 224u << 23 : 112u << 23;                   // infinity and NaN | bias 127 instead of 15
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
struct json_t *sft_json_file(const char *path);               // duplicate keys refused; errors with line and column
const char *sft_path(char out[4096], const char *folder, const char *name); // folder/name, in `out`

/* ================================================================================================================
   [2] config: run.json, DeepSpeed JSON and command line -> one checked struct
   ================================================================================================================
   One table lists every option: it makes the struct's fields, the JSON and command-line parser, --help, the README's
   table and the manifest of a run (a final _ is not part of the name: C++ owns that word). Names and meanings are those of transformers' TrainingArguments, trl's SFTConfig and
   DeepSpeed. A column: kind, name, default, lowest, highest, allowed words, help. */
// clang-format off
#define SFT_OPTIONS(X) \
SFT_SECTION(X, "Model") \
X(STR,  model_name_or_path,   NULL,          0, 0, NULL, "Hugging Face folder: config.json, *.safetensors, tokenizer files") \
X(STR,  init,                 "pretrained",  0, 0, "pretrained|scratch", "scratch: random weights for this config.json") \
X(BOOL, resize_vocab,         false,         0, 0, NULL, "grow the embedding to the tokenizer's size, new rows = mean of the old") \
SFT_SECTION(X, "Data") \
X(JSON, train_file,           NULL,          0, 0, NULL, "a path or a list of paths or {\"path\", \"weight\"}") \
X(JSON, validation_file,      NULL,          0, 0, NULL, "as train_file") \
X(REAL, validation_split,     0,             0, 1e9, NULL, "share (< 1) or number of rows of train_file that are kept for validation") \
X(JSON, template_,            NULL,          0, 0, NULL, "chat template: a name, or {\"system\", \"user\", \"assistant\", \"stop\"}; unset: the model's own") \
X(JSON, columns,              NULL,          0, 0, NULL, "names of the columns, e.g. {\"query\": \"user\", \"response\": \"assistant\"}") \
X(STR,  dataset_format,       "auto",        0, 0, "auto|alpaca|messages|conversation|sharegpt|prompt_completion|text", "auto: recognised by the row's keys") \
X(INT,  max_length,           1024,          2, 1<<30, NULL, "longest document in tokens (max_seq_length is accepted)") \
X(STR,  truncation_mode,      "keep_start",  0, 0, "keep_start|drop|error", "what happens to longer conversations") \
X(BOOL, packing,              false,         0, 0, NULL, "fill rows of max_length tokens with several documents") \
X(STR,  packing_strategy,     "bfd",         0, 0, "bfd|wrapped", "best-fit decreasing, or concatenate and cut") \
X(BOOL, use_varlen_attn,      true,          0, 0, NULL, "false: documents of a pack see the ones before them, as in XTuner") \
X(BOOL, train_on_prompt,      false,         0, 0, NULL, "train system and user text too") \
X(BOOL, mask_history,         false,         0, 0, NULL, "train the last answer of a conversation only") \
X(STR,  on_bad_row,           "error",       0, 0, "error|skip", "skip: count malformed rows and go on") \
X(INT,  max_samples,          0,             0, 1L<<40, NULL, "use the first rows only; 0: all") \
X(BOOL, shuffle,              true,          0, 0, NULL, "a new order every epoch, from the seed") \
SFT_SECTION(X, "Training") \
X(INT,  per_device_train_batch_size, 8,      1, 1<<20, NULL, "rows per micro-batch and rank") \
X(INT,  per_device_eval_batch_size,  8,      1, 1<<20, NULL, "rows per evaluation batch") \
X(INT,  gradient_accumulation_steps, 1,      1, 1<<20, NULL, "micro-batches per optimizer step") \
X(REAL, num_train_epochs,     3,             0, 1e6, NULL, "passes over the data") \
X(INT,  max_steps,            -1,           -1, 1L<<40, NULL, "optimizer steps; overrides num_train_epochs when positive") \
X(REAL, learning_rate,        2e-5,          0, 10, NULL, "peak learning rate") \
X(STR,  lr_scheduler_type,    "linear",      0, 0, NULL, "linear, cosine, constant, ... (Hugging Face), WarmupLR, ... (DeepSpeed)") \
X(JSON, lr_scheduler_kwargs,  NULL,          0, 0, NULL, "the schedule's own parameters, e.g. {\"num_cycles\": 2}") \
X(INT,  warmup_steps,         0,             0, 1L<<40, NULL, "steps of rising learning rate") \
X(REAL, warmup_ratio,         0,             0, 1, NULL, "the same as a share of all steps; warmup_steps wins") \
X(REAL, weight_decay,         0,             0, 10, NULL, "decoupled; norms and biases are left out") \
X(REAL, adam_beta1,           0.9,           0, 0.9999999, NULL, "") \
X(REAL, adam_beta2,           0.999,         0, 0.9999999, NULL, "") \
X(REAL, adam_epsilon,         1e-8,          0, 1, NULL, "") \
X(REAL, max_grad_norm,        1,             0, 1e9, NULL, "clip the global gradient norm; 0: off") \
X(JSON, fp16,                 NULL,          0, 0, NULL, "true, or {\"initial_scale_power\", \"loss_scale\", \"loss_scale_window\", \"hysteresis\", \"min_loss_scale\", \"consecutive_hysteresis\"}") \
X(BOOL, bf16,                 false,         0, 0, NULL, "bfloat16 storage, fp32 sums and master weights") \
X(BOOL, gradient_checkpointing, false,       0, 0, NULL, "keep one tensor per block, recompute the rest") \
X(INT,  max_nonfinite_steps,  16,            1, 1<<20, NULL, "skipped steps in a row before the run stops") \
X(INT,  seed,                 42,            0, 1L<<62, NULL, "") \
X(INT,  threads,              0,             0, 4096, NULL, "OpenMP threads; 0: all processors") \
SFT_SECTION(X, "Output") \
X(STR,  output_dir,           NULL,          0, 0, NULL, "where checkpoints, the log and the trained model go") \
X(BOOL, overwrite_output_dir, false,         0, 0, NULL, "start afresh where checkpoints stand already") \
X(JSON, resume_from_checkpoint, NULL,        0, 0, NULL, "true (the latest in output_dir) or a path: continue, bit for bit") \
X(STR,  init_from,            NULL,          0, 0, NULL, "take the weights of a checkpoint, start at step 0") \
X(STR,  export_dtype,         "auto",        0, 0, "auto|float32|bfloat16|float16", "type of the exported weights; auto: as the source") \
X(REAL, max_shard_size,       5e9,           1e3, 1e15, NULL, "bytes of one exported safetensors file") \
X(INT,  logging_steps,        1,             1, 1L<<40, NULL, "") \
X(INT,  save_steps,           500,           0, 1L<<40, NULL, "0: none but the last") \
X(STR,  save_strategy,        "steps",       0, 0, "steps|epoch|no", "") \
X(INT,  save_total_limit,     0,             0, 1<<20, NULL, "keep the newest checkpoints; 0: all") \
X(INT,  eval_steps,           0,             0, 1L<<40, NULL, "0: at the end only") \
X(BOOL, eval_on_start,        false,         0, 0, NULL, "") \
X(JSON, evaluation_inputs,    NULL,          0, 0, NULL, "prompts that are answered before, during and after training") \
X(INT,  evaluation_freq,      0,             0, 1L<<40, NULL, "steps between those answers; 0: before and after only") \
SFT_SECTION(X, "Generation") \
X(INT,  max_new_tokens,       256,           1, 1<<30, NULL, "") \
X(REAL, temperature,          0,             0, 100, NULL, "0: greedy") \
X(INT,  top_k,                0,             0, 1<<30, NULL, "0: off") \
X(REAL, top_p,                1,             0, 1, NULL, "1: off") \
X(REAL, repetition_penalty,   1,             0.01, 100, NULL, "1: off") \
X(BOOL, raw,                  false,         0, 0, NULL, "the prompt as it is, no chat template") \
X(STR,  system,               NULL,          0, 0, NULL, "system text of generate and chat") \
X(STR,  file,                 NULL,          0, 0, NULL, "generate: a prompt (a string or messages) per line of this file") \
SFT_SECTION(X, "Output of the commands") \
X(BOOL, json,                 false,         0, 0, NULL, "the result as one JSON object on standard output") \
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
    SftType type;    // of the computation: fp32, or what fp16 and bf16 ask for
} SftConfig;

/* Reads COMMAND [run.json] [--key value ...]: defaults, then the file, then the command line; checks every value. Dies
   with the option's name, what was expected and what was got; an unknown key with the nearest known one. */
SftConfig sft_config(int argc, char **argv);
void sft_config_free(SftConfig *config);
struct json_t *sft_config_json(const SftConfig *config); // every option with its value: the manifest
void sft_help(FILE *out);                                // the command line and the table of options

/* ================================================================================================================
   The tokenizer (tokenizer.c)
   ================================================================================================================ */
typedef struct SftTokenizer SftTokenizer;
typedef struct { int32_t *ids; int64_t n, cap; } SftIds; // a growing list of token ids; zero it to begin, free(ids) to end

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
const char *sft_token_text(const SftTokenizer *t, int32_t id);      // as the vocabulary spells it, NULL if there is none
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
   All samples lie one after another in one list of tokens; a sample is a range of it. A pack is a list of samples that
   travel as one row; without packing every sample is its own pack. */
typedef struct { int64_t begin, n, trained; } SftSample; // range in the dataset's tokens; tokens with a trained target
typedef struct {
    int64_t rows, bad, dropped_empty, dropped_no_answer, dropped_too_long, truncated, cut; // what became of the rows
    int64_t samples, packs, tokens, trained_tokens;
} SftDataReport;
typedef struct {
    SftTokens tokens;
    SftSample *sample;   // [samples]
    int64_t samples;
    int64_t *pack;       // [packs+1] first entry of each pack in `order`
    int64_t *order;      // [samples] the samples, pack by pack
    int64_t packs;
    int64_t longest;     // tokens of the longest pack
    SftDataReport report;
    bool documents_see_each_other;
} SftDataset;

typedef struct { // a micro-batch: N tokens in one row, with what attention and the loss need to know of each
    int64_t n, documents, trained; // tokens, documents, tokens that have a target
    int32_t *ids;                  // [n]
    int32_t *target;               // [n] the id that follows in the document if it is trained, else -100
    int32_t *pos;                  // [n] position in the document, from 0
    int32_t *begin, *end;          // [n] the document's first token and one past its last, as indices of the row
    int64_t cap;                   // tokens there is room for
} SftBatch;

SftDataset sft_dataset(const SftConfig *config, const SftTokenizer *t, const SftTemplate *tpl, struct json_t *files);
void sft_dataset_split(SftDataset *train, SftDataset *validation, double share, uint64_t seed); // moves samples
void sft_dataset_pack(SftDataset *d, const SftConfig *config); // fills pack and order; call once, after the split
void sft_dataset_free(SftDataset *d);
void sft_data_show(FILE *out, const SftDataset *d, const SftTokenizer *t, int samples); // report and first samples, trained tokens marked
void sft_data_dump(const char *path, const SftDataset *d);  // a line {"input_ids", "labels"} per sample
struct json_t *sft_data_json(const SftDataset *d, const SftConfig *config);

/* The order of an epoch is a permutation of the packs that depends on (seed, epoch) alone. Optimizer step s of an epoch
   takes the next rows_per_step of them (the last step of an epoch takes what is left); micro-batch g of rank r takes
   per_device of these. So the same tokens form step s at every world size. */
int64_t sft_steps_per_epoch(const SftDataset *d, int64_t rows_per_step);
void sft_epoch_order(int64_t *out, const SftDataset *d, uint64_t seed, int64_t epoch, bool shuffle); // [packs]
// Fills batch (growing it as needed) with `n` packs; n may be 0.
void sft_batch_fill(SftBatch *batch, const SftDataset *d, const int64_t *packs, int64_t n);
void sft_batch_free(SftBatch *batch);

/* ================================================================================================================
   [4] model: families, the tensor table, units, the memory plan, safetensors in and out
   ================================================================================================================ */
typedef enum { SFT_ROPE_NONE, SFT_ROPE_PLAIN, SFT_ROPE_LINEAR, SFT_ROPE_DYNAMIC, SFT_ROPE_LLAMA3, SFT_ROPE_YARN } SftRopeType;
typedef enum { SFT_LINEAR, SFT_GELU, SFT_GELU_TANH } SftAct; // what a matmul's epilogue applies
typedef struct {
    char family[32];                   // model_type of config.json
    int64_t V, C, L, P, H, K, D, F;    // see the glossary; V: rows of the embedding; P: positions the model was made for
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
    int64_t window, window_from;       // sliding window (0: none) in layers >= window_from
    SftRopeType rope;
    double rope_theta, rope_factor, rope_low, rope_high, rope_original, rope_attention, rope_beta_fast, rope_beta_slow;
    bool rope_truncate;
    double init_std;
    int32_t bos, eos[8];
    int neos;
    SftType source_type;               // of the weights in the folder
    struct json_t *json;               // config.json as it was read
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

/* A unit is the embeddings, a block, or the final norm with the head: what is sharded, reduced, gathered, recomputed and
   stored together. Its trainable parameters are one flat vector; tensors are ranges of it, in the order of the table. */
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
enum { SFT_MEM_WEIGHTS, SFT_MEM_MASTER, SFT_MEM_GRADS, SFT_MEM_MOMENTS, SFT_MEM_ACTS, SFT_MEM_WORK, SFT_MEMS };

typedef struct SftModel SftModel; // the whole: see [6]

/* Reads config.json (and the stop tokens of generation_config.json). Dies with the key, what it holds and what was
   expected; a model_type that is not known, with the list of those that are. Nothing depends on a model's name. */
SftArch sft_arch(const char *folder);
void sft_arch_free(SftArch *a);
int64_t sft_parameters(const SftArch *a); // all of them, a tied head once
const char *sft_slot_name(SftSlot slot);  // as the table spells it: "q_w"
// The Hugging Face name of a slot of block `layer` (ignored for the others), e.g. "model.layers.3.self_attn.q_proj.weight".
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
void sft_load_weights(SftModel *m, const char *folder); // safetensors or its sharded index -> every unit's weights and master
void sft_init_weights(SftModel *m, uint64_t seed);      // "init": "scratch"
/* Writes model.safetensors, or shards of at most max_shard_bytes with their index: names and layout as the family
   stores them, a tied head left out. Streams: memory for a few rows only. */
void sft_save_weights(const SftModel *m, const char *folder, SftType type, double max_shard_bytes);

/* safetensors (github.com/huggingface/safetensors): 8 bytes of header length, a JSON header that gives each tensor's
   dtype, shape and range of bytes, then the bytes. A file is checked in full before the first byte is believed. */
typedef struct { const char *name, *dtype; int dims; int64_t dim[8]; const char *data; size_t bytes; } SftFileTensor;
typedef struct { char *path; const char *map; size_t bytes; SftFileTensor *tensor; int64_t n; struct json_t *header; } SftSafetensors;
SftSafetensors sft_safetensors_open(const char *path); // dies with the file, the tensor and the reason
const SftFileTensor *sft_safetensors_find(const SftSafetensors *f, const char *name); // NULL if not there
void sft_safetensors_close(SftSafetensors *f);
/* Writes a file in the order of tensor[0..n), to a temporary name, fsync, rename. Of each: name, dtype ("F32", "BF16",
   "F16", "I64", ...; larger elements first, to keep them aligned), dims, dim; `bytes` is not looked at. Where data is
   NULL, fill(arg, i, first, rows, out) is asked for rows first .. first+rows of tensor i's leading dimension, in order.
   metadata: an object of strings, or NULL; the caller keeps it. */
typedef void SftFill(void *arg, int64_t i, int64_t first, int64_t rows, void *out);
void sft_safetensors_write(const char *path, const SftFileTensor *tensor, int64_t n, struct json_t *metadata, SftFill *fill, void *arg);

/* ================================================================================================================
   [5] ops: every operation, forward above backward, and the table that lists them
   ================================================================================================================
   An op takes a context, then outputs, inputs and dimensions. It allocates nothing but pieces of c->work, given back
   before it returns. `=` overwrites, `+=` adds. Storage is fp32, bf16 or fp16, sums are fp32; gradients of weights are
   always fp32 and always `+=`. When planning (c->work->base == NULL) an op takes its workspace and does nothing else. */
struct SftOps;
typedef struct {
    const struct SftOps *ops; // sft_cpu, or sft_cuda
    void *stream;             // the GPU stream that ops are put on
    SftArena *work;           // workspace
    uint64_t seed, step;      // key of this step's random numbers
} SftCtx;
static inline bool sft_planning(const SftCtx *c) { return c->work->base == NULL; }
typedef struct { float lr, beta1, beta2, eps, decay, correct1, correct2; } SftAdam; // correctN = 1 - betaN^t

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
/* z = x[N,I] w[O,I]^T + bias; pre = z if pre is not absent; y[N,O] = act(z) + residual. y may be residual */ \
X(matmul_forward,     (SftCtx *c, SftTensor y, SftTensor pre, SftTensor x, SftTensor w, SftTensor bias, SftTensor residual, SftAct act)) \
/* dx[N,I] = (add ? dx : 0) + (dy[N,O] w[O,I]) * act'(pre[N,I]) */ \
X(matmul_backward_x,  (SftCtx *c, SftTensor dx, SftTensor dy, SftTensor w, SftTensor pre, SftAct act, bool add)) \
/* dw[O,I] += dy^T x; dbias[O] += column sums of dy */ \
X(matmul_backward_w,  (SftCtx *c, SftTensor dw, SftTensor dbias, SftTensor dy, SftTensor x)) \
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
/* AdamW on n fp32 values, gradient g = grad * *factor; weights (16-bit copy, absent in fp32) = master rounded */ \
X(adamw,              (SftCtx *c, SftTensor weights, SftTensor master, SftTensor m, SftTensor v, SftTensor grad, const float *factor, SftAdam adam))
// clang-format on
typedef struct SftOps {
    const char *name;
#define X(op, args) void(*op) args;
    SFT_OPS(X)
#undef X
} SftOps;
extern const SftOps sft_cpu;

/* ================================================================================================================
   [6] forward: the block and the model; backward beside it; activation checkpointing
   ================================================================================================================ */
typedef struct { // activations of one block; [N, ...] in the type of the computation, statistics in fp32
    SftTensor x;                 // [N,C] what enters: the residual stream
    SftTensor norm1, stat1;      // [N,C], [N,2] (RMSNorm: [N])
    SftTensor q, k, v;           // [N,H,D], [N,K,D], [N,K,D], after q/k norm and RoPE
    SftTensor q_raw, k_raw;      // before the q/k norm (absent without one)
    SftTensor q_stat, k_stat;    // [N*H], [N*K]
    SftTensor att, lse;          // [N,H,D], [N,H]
    SftTensor mid;               // [N,C] after attention
    SftTensor norm2, stat2;      // as norm1
    SftTensor gate, up, act;     // [N,F] (ungated: up is what enters the activation, gate is absent)
} SftActs;

struct SftModel {
    SftArch arch;
    SftType type;                // of weights and activations
    int64_t units;               // L + 2
    SftUnit *unit;               // embeddings, blocks, final norm with the head
    bool trains, checkpointing;  // room for gradients and moments; blocks keep only x
    int64_t tokens;              // N there is room for
    SftArena mem[SFT_MEMS];
    SftActs *acts;               // [L]; with checkpointing all share one set but for x
    SftTensor last, final, stat; // [N,C] output of the last block, after the final norm, its statistics
    SftTensor rope;              // [N,D] table of this batch
    SftTensor dx, dnorm;         // [N,C] gradient of the residual stream; of a norm's output
    SftTensor dq, dk, dv, datt;  // as q, k, v, att
    SftTensor dgate, dup;        // [N,F]
    SftTensor logits;            // [rows, V] one chunk
    SftTensor loss;              // [rows] fp32
    SftTensor chunk, dchunk;     // [rows, C]
};

/* Plans or makes a model: layout of all memory for batches of up to `tokens` tokens. With plan true nothing is
   allocated and mem[].peak tells what would be; otherwise the same sizes are allocated. */
void sft_model_open(SftModel *m, const SftArch *a, SftType type, bool trains, bool checkpointing, int64_t tokens, bool plan, const SftOps *ops);
void sft_model_close(SftModel *m);
void sft_plan_print(FILE *out, const SftModel *m);
struct json_t *sft_plan_json(const SftModel *m);

// Runs the blocks: m->final = the normalised hidden states of the batch.
void sft_forward(SftCtx *c, SftModel *m, const SftBatch *b);
/* The head and the loss, chunk by chunk, for the tokens that have a target: returns the sum of their cross-entropies.
   With scale != 0, also the gradient of (scale * sum) by the head's weights (+=) and by m->final (into m->dnorm). With
   logprobs (b->n floats), also each target's log-probability, 0 where there is none. */
double sft_loss(SftCtx *c, SftModel *m, const SftBatch *b, float scale, float *logprobs);
// From m->dnorm back through the model: every weight's gradient (+=).
void sft_backward(SftCtx *c, SftModel *m, const SftBatch *b);

/* ================================================================================================================
   [7] ranks: which part of the work is this process's
   ================================================================================================================ */
typedef struct { int rank, world; } SftRanks; // one process: 0 of 1

/* ================================================================================================================
   [8] step: loss scaler, gradient norm, clipping, learning-rate schedules, AdamW over units
   ================================================================================================================ */
typedef struct { // DeepSpeed's dynamic loss scaler, with a ceiling
    double scale, min_scale, max_scale;
    int64_t iter, last_overflow, window;
    int hysteresis, left;  // overflows before the scale is halved; how many are left
    bool consecutive, dynamic;
} SftScaler;
SftScaler sft_scaler(const SftConfig *config);
void sft_scaler_update(SftScaler *s, bool overflow); // once per step; dies at min_scale as DeepSpeed does

// The learning rate of the step after `done` successful ones, of `total`.
double sft_learning_rate(const SftConfig *config, int64_t done, int64_t total);

typedef struct { double grad_norm, lr; bool clipped, skipped; } SftStep; // what became of a step
typedef struct {
    SftScaler scaler;
    int64_t step, updates; // optimizer steps, and those among them that were not skipped (Adam's t)
    int64_t total;         // steps of the whole run
    int64_t bad_in_a_row;  // skipped ones
} SftTrainer;
void sft_zero_grad(SftCtx *c, SftModel *m);
/* Norm of all gradients, clip, AdamW on every unit. `grad_scale` is what the loss was multiplied with in backward. */
SftStep sft_update(SftCtx *c, SftModel *m, SftTrainer *t, const SftConfig *config, double grad_scale);

/* ================================================================================================================
   [9] state: checkpoints, resume, export
   ================================================================================================================ */
/* output_dir/checkpoint-N: weights.safetensors (fp32 masters), optimizer.safetensors (m, v), state.json (step, scaler,
   data position, config), and the tokenizer's and the model's files. Written beside its final name, fsynced, renamed;
   "latest" is written last. Older ones are removed as save_total_limit says. */
void sft_checkpoint_save(const SftModel *m, const SftTrainer *t, const SftConfig *config);
char *sft_checkpoint_find(const SftConfig *config);   // what resume_from_checkpoint means; NULL if not asked; dies if not there
void sft_checkpoint_load(SftModel *m, SftTrainer *t, const char *folder, bool weights_only);
// A Hugging Face folder: config.json, weights, tokenizer files with the trained chat template, generation_config.json.
void sft_export(const SftModel *m, const SftTokenizer *t, const SftTemplate *tpl, const SftConfig *config, const char *source, const char *folder);

/* ================================================================================================================
   [10] speak: generation with a KV cache
   ================================================================================================================ */
typedef struct { int64_t max_new_tokens, top_k; double temperature, top_p, repetition_penalty; uint64_t seed; } SftSampling;
/* Continues prompt[n] until a stop token or max_new_tokens: appends to `out` (the stop token included). on_token, if
   set, sees each token as it comes. Memory for the cache is taken and freed inside. */
void sft_generate(SftCtx *c, SftModel *m, SftIds *out, const int32_t *prompt, int64_t n, const int32_t *stops, int nstops,
                  SftSampling how, void (*on_token)(void *arg, int32_t id), void *arg);

/* ================================================================================================================
   [11] record: progress line, JSON log, summary
   ================================================================================================================ */
typedef struct SftRecord SftRecord;
SftRecord *sft_record_open(const SftConfig *config, int64_t resume_step); // cuts output_dir/log.jsonl back, then appends
void sft_record_event(SftRecord *r, struct json_t *line);                 // one line of log.jsonl; takes the reference
void sft_record_close(SftRecord *r);
void sft_progress(const char *what, double done, double total);           // a live bar on a terminal, nothing elsewhere

#ifdef __cplusplus
}
#endif
#endif // SFT_H

#ifdef SFT_IMPLEMENTATION
#ifndef SFT__BODIES
#define SFT__BODIES
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
void sft_arena_open(SftArena *arena, const char *name, size_t bytes) {
    *arena = (SftArena){.name = name, .size = bytes};
    void *p = mmap(NULL, SFT_MAX(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) sft_die(SFT_BROKEN, "out of memory: %.1f MB for %s", (double)bytes / 1e6, name);
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE); // advice only: without it all works, slower
#endif
    arena->base = (char *)p;
}

void sft_arena_close(SftArena *arena) {
    if (arena->base) munmap(arena->base, SFT_MAX(arena->size, 1));
    *arena = (SftArena){0};
}

void *sft_take(SftArena *arena, size_t bytes) {
    size_t at = arena->used;
    arena->used += (bytes + SFT_ALIGN - 1) / SFT_ALIGN * SFT_ALIGN;
    if (arena->used > arena->peak) arena->peak = arena->used;
    if (!arena->base) return NULL;
    if (arena->used > arena->size)
        sft_die(SFT_BROKEN, "the memory plan is too small: %s holds %zu bytes, %zu are needed", arena->name, arena->size, arena->used);
    return arena->base + at;
}

void sft_give_back(SftArena *arena, size_t mark) { arena->used = mark; }

// Types. The compiler turns the loops over bf16 into vector code; for fp16 x86 has instructions of its own.
static const struct { const char *name; size_t size; } sft__types[SFT_TYPES] = {{"fp32", 4}, {"bf16", 2}, {"fp16", 2}};
size_t sft_type_size(SftType type) { return sft__types[type].size; }
const char *sft_type_name(SftType type) { return sft__types[type].name; }

void sft_to_f32(float *out, const void *in, SftType type, int64_t n) {
    const uint16_t *h = (const uint16_t *)in;
    int64_t i = 0;
    if (type == SFT_F32) {
        memmove(out, in, (size_t)n * 4);
    } else if (type == SFT_BF16) {
        for (; i < n; i++) out[i] = sft_bf16_to_f32(h[i]);
    } else {
#ifdef __F16C__
        for (; i < n / 8 * 8; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(h + i))));
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
    if (snprintf(out, 4096, "%s/%s", folder, name) >= 4096) sft_die(SFT_BAD_INPUT, "the path %.200s... is longer than 4095 bytes", folder);
    return out;
}

bool sft_exists(const char *path) { return access(path, F_OK) == 0; }

bool sft_is_folder(const char *path) {
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

void sft_make_folder(const char *path) {
    char part[4096];
    if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part) sft_die(SFT_BAD_INPUT, "the path %.200s... is too long", path);
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p) continue;
        char c = *p;
        *p = 0;
        if (mkdir(part, 0777) && errno != EEXIST) sft_die(SFT_BROKEN, "cannot make the folder %s: %s", part, strerror(errno));
        *p = c;
        if (!c) break;
    }
    if (!sft_is_folder(path)) sft_die(SFT_BROKEN, "%s is not a folder", path);
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

void sft_write_file(const char *path, const void *data, size_t bytes) {
    char *temporary = sft_format("%s.tmp%ld", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool good = fd >= 0;
    for (size_t at = 0; good && at < bytes;) {
        ssize_t n = write(fd, (const char *)data + at, bytes - at);
        good = n > 0 || (n < 0 && errno == EINTR);
        if (n > 0) at += (size_t)n;
    }
    good = good && fsync(fd) == 0;
    int reason = errno;
    if (fd >= 0) good = close(fd) == 0 && good;
    if (!good || rename(temporary, path)) {
        if (good) reason = errno;
        unlink(temporary);
        sft_die(SFT_BROKEN, "cannot write %s: %s", path, strerror(reason));
    }
    free(temporary);
}

json_t *sft_json_file(const char *path) {
    size_t n;
    const char *text = sft_map(path, &n);
    json_error_t error;
    json_t *json = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    sft_unmap(text, n);
    if (!json) sft_die(SFT_BAD_INPUT, "%s, line %d, column %d: %s", path, error.line, error.column, error.text);
    return json;
}

/* ================================================================================================================
   [4] model: families, the tensor table, units, the memory plan, safetensors in and out
   ================================================================================================================ */
// safetensors, reading. The names, shapes and ranges come from outside: nothing is used before all of it is checked.
static const struct { const char *name; int bits; } sft__dtypes[] = {
    {"F32", 32}, {"BF16", 16}, {"F16", 16}, {"F64", 64}, {"I64", 64}, {"I32", 32}, {"I16", 16}, {"I8", 8}, {"U64", 64}, {"U32", 32},
    {"U16", 16}, {"U8", 8}, {"BOOL", 8}, {"C64", 64}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};

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
    return x->data != y->data ? (x->data > y->data) - (x->data < y->data) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}
static int sft__by_name(const void *a, const void *b) {
    return strcmp(((const SftFileTensor *)a)->name, ((const SftFileTensor *)b)->name);
}

// One entry of the header -> *t. Returns NULL, or what is wrong: a string to free.
static char *sft__safetensors_entry(SftFileTensor *t, const char *name, json_t *entry, const char *data, size_t size) {
    json_t *dtype = json_object_get(entry, "dtype"), *shape = json_object_get(entry, "shape");
    json_t *range = json_object_get(entry, "data_offsets"), *begin = json_array_get(range, 0), *end = json_array_get(range, 1);
    if (!json_is_string(dtype) || !json_is_array(shape) || json_array_size(range) != 2 || !json_is_integer(begin) || !json_is_integer(end))
        return sft_format("tensor %s: expected {\"dtype\", \"shape\", \"data_offsets\": [begin, end]}", name);
    *t = (SftFileTensor){.name = name, .dtype = json_string_value(dtype), .dims = (int)SFT_MIN(json_array_size(shape), 9)};
    if (t->dims > SFT_COUNT(t->dim)) return sft_format("tensor %s: %zu dimensions; at most 8 are supported", name, json_array_size(shape));
    for (int i = 0; i < t->dims; i++) {
        t->dim[i] = json_is_integer(json_array_get(shape, (size_t)i)) ? json_integer_value(json_array_get(shape, (size_t)i)) : -1;
        if (t->dim[i] < 0) return sft_format("tensor %s: a dimension that is not a number from 0", name);
    }
    int64_t from = json_integer_value(begin), to = json_integer_value(end), bytes = sft__tensor_bytes(t);
    if (bytes < 0) return sft_format("tensor %s: dtype %s with this shape has no size in bytes", name, t->dtype);
    if (from < 0 || to < from || (uint64_t)to > size)
        return sft_format("tensor %s: data_offsets [%lld, %lld], the file has %zu bytes of data", name, (long long)from, (long long)to, size);
    if (to - from != bytes)
        return sft_format("tensor %s: its shape takes %lld bytes, data_offsets give %lld", name, (long long)bytes, (long long)(to - from));
    t->data = data + from, t->bytes = (size_t)bytes;
    return NULL;
}

// f->map and f->bytes -> f->tensor. Returns NULL, or what is wrong: a string to free.
static char *sft__safetensors_parse(SftSafetensors *f) {
    uint64_t header = 0;
    if (f->bytes < 8) return sft_format("%zu bytes are too few for a safetensors file", f->bytes);
    for (int i = 0; i < 8; i++) header |= (uint64_t)(uint8_t)f->map[i] << 8 * i; // little endian, wherever this runs
    if (header > 100000000) return sft_format("a header of %llu bytes; at most 100000000 are allowed", (unsigned long long)header);
    if (header > f->bytes - 8) return sft_format("a header of %llu bytes in a file of %zu: cut short?", (unsigned long long)header, f->bytes);
    if (!header || f->map[8] != '{') return sft_format("the header does not begin with '{': not a safetensors file");
    json_error_t error;
    f->header = json_loadb(f->map + 8, header, JSON_REJECT_DUPLICATES, &error);
    if (!f->header) return sft_format("the header, byte %d: %s", error.position, error.text);
    const char *data = f->map + 8 + header, *name, *key;
    size_t size = f->bytes - 8 - header;
    json_t *entry, *value, *metadata = json_object_get(f->header, "__metadata__");
    if (metadata && !json_is_object(metadata)) return sft_format("__metadata__ is not an object");
    json_object_foreach(metadata, key, value)
        if (!json_is_string(value)) return sft_format("__metadata__: %s is not a string", key);
    f->tensor = SFT_NEW(SftFileTensor, json_object_size(f->header));
    json_object_foreach(f->header, name, entry) {
        if (entry == metadata) continue;
        char *wrong = sft__safetensors_entry(&f->tensor[f->n++], name, entry, data, size);
        if (wrong) return wrong;
    }
    qsort(f->tensor, (size_t)f->n, sizeof *f->tensor, sft__by_place);
    for (int64_t i = 0; i < f->n; i++) {
        if (f->tensor[i].data != data)
            return sft_format("tensor %s %s", f->tensor[i].name, f->tensor[i].data < data ? "overlaps the one before it" : "comes after a hole in the data");
        data += f->tensor[i].bytes;
    }
    if (data != f->map + f->bytes) return sft_format("%zu bytes after the last tensor", (size_t)(f->map + f->bytes - data));
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
static json_t *sft__safetensors_header(const SftFileTensor *tensor, int64_t n, json_t *metadata) {
    json_t *header = json_object();
    if (metadata) json_object_set(header, "__metadata__", metadata);
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t bytes = sft__tensor_bytes(&tensor[i]);
        if (bytes < 0 || json_object_get(header, tensor[i].name))
            sft_die(SFT_BROKEN, "tensor %s cannot be written: %s", tensor[i].name, bytes < 0 ? "its dtype or shape has no size" : "its name comes twice");
        json_t *shape = json_array();
        for (int d = 0; d < tensor[i].dims; d++) json_array_append_new(shape, json_integer(tensor[i].dim[d]));
        json_object_set_new(header, tensor[i].name, json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor[i].dtype, "shape", shape,
                                                              "data_offsets", (json_int_t)at, (json_int_t)(at + bytes)));
        at += bytes;
    }
    return header;
}

static bool sft__write(int fd, const void *data, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t n = write(fd, (const char *)data + at, SFT_MIN(bytes - at, (size_t)1 << 26));
        if (n < 0 && errno != EINTR) return false;
        if (n > 0) at += (size_t)n;
    }
    return true;
}

void sft_safetensors_write(const char *path, const SftFileTensor *tensor, int64_t n, json_t *metadata, SftFill *fill, void *arg) {
    json_t *json = sft__safetensors_header(tensor, n, metadata);
    char *text = json_dumps(json, JSON_COMPACT), *temporary = sft_format("%s.tmp%ld", path, (long)getpid());
    json_decref(json);
    if (!text) sft_die(SFT_BROKEN, "cannot write %s: a tensor's name is not UTF-8", path);
    uint64_t length = (strlen(text) + 7) / 8 * 8; // the data begins on a multiple of 8
    char *header = (char *)sft_alloc(8 + length);
    for (int i = 0; i < 8; i++) header[i] = (char)(length >> 8 * i);
    memset(header + 8, ' ', length);
    memcpy(header + 8, text, strlen(text));
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool good = fd >= 0 && sft__write(fd, header, 8 + length);
    for (int64_t i = 0; good && i < n; i++) {
        size_t bytes = (size_t)sft__tensor_bytes(&tensor[i]);
        if (tensor[i].data || !bytes) {
            good = sft__write(fd, tensor[i].data, bytes);
            continue;
        }
        int64_t rows = tensor[i].dims ? tensor[i].dim[0] : 1, step = SFT_MAX(1, (int64_t)((4 << 20) / (bytes / (size_t)rows)));
        char *piece = (char *)sft_alloc((size_t)SFT_MIN(step, rows) * (bytes / (size_t)rows));
        for (int64_t r = 0; good && r < rows; r += step) {
            int64_t now = SFT_MIN(step, rows - r);
            fill(arg, i, r, now, piece);
            good = sft__write(fd, piece, (size_t)now * (bytes / (size_t)rows));
        }
        free(piece);
    }
    good = good && fsync(fd) == 0;
    int reason = errno;
    if (fd >= 0 && close(fd) && good) good = false, reason = errno;
    if (good && rename(temporary, path)) good = false, reason = errno;
    if (!good) {
        unlink(temporary);
        sft_die(SFT_BROKEN, "cannot write %s: %s", path, strerror(reason));
    }
    free(text), free(header), free(temporary);
}

#endif // SFT__BODIES
#endif // SFT_IMPLEMENTATION

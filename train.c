/* train.c - the program: one training run as a short list of calls, and the command line around it.

   train_gpt2 [COMMAND] [run.json] [--key value ...]        Every command reads like `train`: config, data, model, work.
   Numbers in brackets are the sections of sft.h. Read train() first: it is the story of the whole project. */
#define SFT_IMPLEMENTATION
#include "sft.h"
#include <signal.h>

#ifdef SFT_CUDA // train_gpt2cu: the same program, its ops on a GPU
static const SftOps *const ops = &sft_cuda;
#else
static const SftOps *const ops = &sft_cpu;
#endif

// What a command works on: the model with its tokenizer and chat template, and the context that its ops run in.
typedef struct {
    const SftConfig *config;
    const char *folder; // a Hugging Face folder or a checkpoint: config.json, weights, tokenizer
    SftTokenizer *tokenizer;
    SftTemplate *chat;
    SftArch arch;
    SftModel model;
    SftCtx ctx;
    SftDevice device; // that they run on
    SftDataset train, validation;
    SftBatch batch;
    SftRecord *record;
} Run;

// A signal asks the loop to end after the step it is in, with a checkpoint; a second one ends the program at once.
static volatile sig_atomic_t stop_signal = 0;
static void on_signal(int number) {
    stop_signal = number;
    signal(number, SIG_DFL);
}

/* ---- opening and closing --------------------------------------------------------------------------------------- */
static Run open_run(const SftConfig *config, const char *folder) {
    Run r = {.config = config, .folder = folder};
    if (!sft_is_folder(folder))
        sft_die(SFT_BAD_INPUT, "model_name_or_path: there is no folder %s (expected a Hugging Face folder with "
                               "config.json, *.safetensors and tokenizer files)", folder);
    json_t *tpl = config->template_;
    r.tokenizer = sft_tokenizer_load(folder);
    r.chat = sft_template(r.tokenizer, json_string_value(tpl), json_is_object(tpl) ? tpl : NULL);
    return r;
}

static void open_data(Run *r, bool training) { // [3]
    const SftConfig *config = r->config;
    if (training) {
        r->train = sft_dataset(config, r->tokenizer, r->chat, config->train_file);
        if (config->validation_split > 0 && !config->validation_file)
            sft_dataset_split(&r->train, &r->validation, config->validation_split, (uint64_t)config->seed);
        sft_dataset_pack(&r->train, config);
    }
    if (config->validation_file) r->validation = sft_dataset(config, r->tokenizer, r->chat, config->validation_file);
    SftConfig unpacked = *config;
    unpacked.packing = config->packing && training; // evaluation alone reports row by row
    if (r->validation.samples) sft_dataset_pack(&r->validation, &unpacked);
}

static int64_t rows_per_evaluation(const SftConfig *c) {
    return c->per_device_eval_batch_size ? c->per_device_eval_batch_size : c->per_device_train_batch_size;
}

static void open_model(Run *r, bool trains, int64_t tokens, int64_t targets, int64_t cache, bool plan) { // [4] [6]
    const SftConfig *config = r->config;
    r->arch = sft_arch(r->folder);
    sft_resize_vocab(&r->arch, sft_vocab_size(r->tokenizer), config->resize_vocab);
    if (r->arch.learned_positions && trains && config->max_length > r->arch.P)
        sft_die(SFT_BAD_INPUT, "max_length is %lld, but this model has learned positions for %lld tokens only",
                (long long)config->max_length, (long long)r->arch.P);
    sft_model_open(&r->model, &r->arch, config->type, trains, config->gradient_checkpointing, tokens, targets, cache,
                   plan, ops);
    if (!plan) r->device = ops->device();
    r->ctx = (SftCtx){.ops = ops, .work = &r->model.mem[SFT_MEM_WORK], .seed = (uint64_t)config->seed};
}

// Plans (or makes) the model for the largest micro-batch of the run, whose whole order is known before it begins.
static void open_run_model(Run *r, bool trains, bool plan) {
    const SftConfig *c = r->config;
    int64_t tokens = 0, targets = 0, rows = c->per_device_train_batch_size, size = rows_per_evaluation(c);
    if (r->train.packs)
        sft_largest_batch(&tokens, &targets, &r->train, rows, r->train.rows_per_step, sft_total_steps(&r->train),
                          (uint64_t)c->seed, c->shuffle);
    else if (trains) tokens = targets = rows * c->max_length; // an estimate without data
    int64_t steps = sft_steps_per_epoch(&r->validation, size);
    sft_largest_batch(&tokens, &targets, &r->validation, size, size, steps, 0, false);
    bool generates = trains && (c->evaluation_inputs || (c->eval_exact_match && r->validation.samples));
    int64_t cache = generates ? c->max_length + c->max_new_tokens : 0;
    open_model(r, trains, tokens, c->per_token ? tokens : targets, cache, plan);
}

static void load_weights(Run *r) { // of a Hugging Face folder or a checkpoint [9]
    sft_checkpoint_load(&r->model, NULL, r->config, r->folder);
}

static void close_run(Run *r) {
    sft_batch_free(&r->batch);
    sft_dataset_free(&r->train);
    sft_dataset_free(&r->validation);
    sft_model_close(&r->model);
    sft_arch_free(&r->arch);
    sft_template_free(r->chat);
    sft_tokenizer_free(r->tokenizer);
}

/* ---- reading and printing ---------------------------------------------------------------------------------------- */
// A file or, without a path, standard input, read line by line or as a whole; `where` names the line in errors.
typedef struct { FILE *in; const char *name; char *text, where[4200]; size_t n, cap; long line; } Input;

static Input open_input(const char *path) {
    Input in = {.in = path ? fopen(path, "rb") : stdin, .name = path ? path : "standard input"};
    if (!in.in) sft_die(SFT_BAD_INPUT, "cannot open %s: %s", in.name, strerror(errno));
    return in;
}

static void check_input(const Input *in) {
    if (ferror(in->in)) sft_die(SFT_BAD_INPUT, "cannot read %s: %s", in->name, strerror(errno));
}

static void close_input(Input *in) {
    fclose(in->in), free(in->text);
}

static bool next_line(Input *in) { // without its end; false after the last
    ssize_t n = getline(&in->text, &in->cap, in->in);
    check_input(in);
    if (n < 0) return false;
    while (n > 0 && (in->text[n - 1] == '\n' || in->text[n - 1] == '\r')) in->text[--n] = 0;
    in->n = (size_t)n;
    snprintf(in->where, sizeof in->where, "%s, line %ld", in->name, ++in->line);
    return true;
}

static void read_all(Input *in) { // any bytes; a read that does not fill the room was the last
    while (in->n == in->cap) {
        in->text = (char *)sft_realloc(in->text, in->cap = 2 * in->cap + 4096);
        in->n += fread(in->text + in->n, 1, in->cap - in->n, in->in);
    }
    check_input(in);
}

static void print_json(json_t *result) { // the result of a command, alone on standard output
    json_dumpf(result, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(result);
}

static json_t *ids_json(const int32_t *ids, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_integer(ids[i]));
    return list;
}

/* ---- asking the model ------------------------------------------------------------------------------------------- */
// An answer, with what was asked. The token that ended it is in `ids`, not in the text.
typedef struct { const SftTokenizer *tokenizer; SftIds prompt, ids; char *text; size_t bytes, shown; } Answer;

static void free_answer(Answer *a) {
    free(a->prompt.ids), free(a->ids.ids), free(a->text);
}

static void decode_answer(Answer *a) {
    free(a->text);
    a->text = sft_decode(a->tokenizer, a->ids.ids, a->ids.n, true, &a->bytes);
}

static void show_token(void *arg, int32_t id) { // prints what has come; no character before all its bytes are there
    Answer *a = (Answer *)arg;
    (void)id; // it is in a->ids
    decode_answer(a);
    bool broken = a->bytes >= 3 && !memcmp(a->text + a->bytes - 3, "\xef\xbf\xbd", 3);
    if (!broken && a->bytes > a->shown) fwrite(a->text + a->shown, 1, a->bytes - a->shown, stdout), a->shown = a->bytes;
    fflush(stdout);
}

static Answer answer(Run *r, const int32_t *prompt, int64_t n, int64_t max_new_tokens, bool show) { // [10]
    const SftConfig *config = r->config;
    SftSampling how = {max_new_tokens, config->top_k, config->temperature, config->top_p, config->repetition_penalty,
                       (uint64_t)config->seed};
    int32_t stops[64];
    int nstops = sft_stops(stops, &r->model, r->chat);
    Answer a = {.tokenizer = r->tokenizer};
    sft_generate(&r->ctx, &r->model, &a.ids, prompt, n, stops, nstops, how, show ? show_token : NULL, &a);
    decode_answer(&a);
    if (show) putchar('\n');
    return a;
}

static Answer answer_prompt(Run *r, json_t *prompt, const char *where, bool show) {
    SftIds ids = sft_prompt(r->config, r->tokenizer, r->chat, prompt, where); // [3]
    Answer a = answer(r, ids.ids, ids.n, r->config->max_new_tokens, show);
    a.prompt = ids;
    return a;
}

static void answer_inputs(Run *r, int64_t step) { // evaluation_inputs, to the screen and the log
    size_t i;
    json_t *prompt;
    json_array_foreach(r->config->evaluation_inputs, i, prompt) {
        Answer a = answer_prompt(r, prompt, "evaluation_inputs", false);
        sft_record_sample(r->record, step, prompt, a.text);
        free_answer(&a);
    }
}

/* ---- evaluation: loss by token, and exact match ------------------------------------------------------------------ */
// loss: mean over tokens; exact: share of rows, NAN if not asked
typedef struct { double loss, exact; int64_t tokens; } Score;

// Adds a row of {"loss", "tokens"[, "input_ids", "labels", "logprobs"]} for every document of the batch. `targets` are
// the trained ones; with per_token, logprobs holds those of all tokens.
static void add_rows(const Run *r, json_t *rows, const SftBatch *b, const int32_t *targets, const float *logprobs) {
    for (int64_t first = 0; first < b->n; first = b->end[first]) {
        double sum = 0;
        int64_t n = 0;
        json_t *row = json_object(), *ids = json_array(), *labels = json_array(), *each = json_array();
        for (int64_t i = first; i < b->end[first]; i++) {
            if (targets[i] >= 0) sum -= logprobs[i], n++;
            json_array_append_new(ids, json_integer(b->ids[i]));
            json_array_append_new(labels, json_integer(i > first && targets[i - 1] >= 0 ? b->ids[i] : -100));
            json_array_append_new(each, i > first ? sft_json_real(logprobs[i - 1]) : json_null());
        }
        json_object_set_new(row, "loss", n ? sft_json_real(sum / (double)n) : json_null());
        json_object_set_new(row, "tokens", json_integer(n));
        if (r->config->per_token) {
            json_object_set(row, "input_ids", ids);
            json_object_set(row, "labels", labels);
            json_object_set(row, "logprobs", each);
        }
        json_decref(ids), json_decref(labels), json_decref(each);
        json_array_append_new(rows, row);
    }
}

static Score evaluate(Run *r, json_t *rows) {
    const SftDataset *d = &r->validation;
    SftBatch *b = &r->batch;
    double sum = 0;
    int64_t tokens = 0, size = rows_per_evaluation(r->config);
    int64_t *packs = SFT_NEW(int64_t, d->packs);
    float *logprobs = rows ? SFT_NEW(float, r->model.tokens) : NULL;
    int32_t *targets = rows ? SFT_NEW(int32_t, r->model.tokens) : NULL;
    sft_epoch_order(packs, d, 0, 0, false);
    for (int64_t at = 0; at < d->packs; at += size) {
        sft_batch_fill(b, d, packs + at, SFT_MIN(size, d->packs - at));
        if (rows) memcpy(targets, b->target, (size_t)b->n * sizeof *targets);
        tokens += b->trained;
        if (r->config->per_token && rows) // every token but a document's first is a target then
            for (int64_t i = 0; i < b->n; i++) b->target[i] = i + 1 < b->end[i] ? b->ids[i + 1] : -100;
        sft_forward(&r->ctx, &r->model, b);
        sft_loss(&r->ctx, &r->model, b, 0, logprobs);
        for (int64_t i = 0; rows && i < b->n; i++) sum -= targets[i] >= 0 ? (double)logprobs[i] : 0;
        if (rows) add_rows(r, rows, b, targets, logprobs);
        sft_progress("evaluating", (double)SFT_MIN(at + size, d->packs), (double)d->packs);
    }
    free(packs), free(logprobs), free(targets);
    double all = sft_loss_sum(&r->ctx, &r->model); // with per_token, not of the trained tokens alone
    if (!rows) sum = all;
    return (Score){tokens ? sum / (double)tokens : 0, NAN, tokens};
}

/* The share of samples whose last answer the model gives word for word, greedily, from the tokens before it. An answer
   of n bytes has at most n tokens, so that a longer one is wrong already. */
static double exact_match(Run *r) {
    const SftDataset *d = &r->validation;
    int64_t right = 0;
    for (int64_t s = 0; s < d->samples; s++) {
        const int32_t *ids = d->tokens.ids + d->sample[s].begin;
        const uint8_t *trained = d->tokens.trained + d->sample[s].begin;
        int64_t end = d->sample[s].n, first;
        while (end > 0 && !trained[end - 1]) end--;
        for (first = end; first > 0 && trained[first - 1];) first--;
        size_t bytes;
        char *expected = sft_decode(r->tokenizer, ids + first, end - first, true, &bytes);
        Answer a = {0};
        if (first > 0) a = answer(r, ids, first, (int64_t)bytes + 1, false);
        right += a.text && a.bytes == bytes && !memcmp(a.text, expected, bytes);
        free_answer(&a), free(expected);
        sft_progress("answering", (double)(s + 1), (double)d->samples);
    }
    return d->samples ? (double)right / (double)d->samples : NAN;
}

static Score score(Run *r, int64_t step) {
    Score s = evaluate(r, NULL);
    if (r->config->eval_exact_match) s.exact = exact_match(r);
    sft_record_evaluation(r->record, step, s.loss, s.tokens, s.exact);
    return s;
}

/* ---- train ------------------------------------------------------------------------------------------------------- */
/* One optimizer step over `rows` packs: every micro-batch forward and backward, then the update. The gradient is that
   of the mean loss over all trained tokens of the step, so their number is known before the first backward. */
static SftStepLine optimizer_step(Run *r, SftTrainer *t, const int64_t *packs, int64_t rows) {
    SftStepLine line = {0};
    double start = sft_now(), flops = 0, peak = r->device.flops[r->model.type];
    for (int64_t i = 0; i < rows; i++) line.trained_tokens += sft_pack_targets(&r->train, packs[i]);
    double scale = t->scaler.scale / (double)SFT_MAX(line.trained_tokens, 1);
    int64_t size = r->config->per_device_train_batch_size;
    r->ctx.step = (uint64_t)t->step;
    sft_zero_grad(&r->ctx, &r->model);
    for (int64_t at = 0; at < rows; at += size) {
        sft_batch_fill(&r->batch, &r->train, packs + at, SFT_MIN(size, rows - at)); // [3]
        sft_forward(&r->ctx, &r->model, &r->batch);                                // [6]
        sft_loss(&r->ctx, &r->model, &r->batch, (float)scale, NULL);               // [6]
        sft_backward(&r->ctx, &r->model, &r->batch);                               // [6]
        line.tokens += r->batch.n;
        if (peak > 0) flops += sft_flops(&r->arch, &r->batch);
    }
    line.update = sft_update(&r->ctx, &r->model, t, r->config, t->scaler.scale); // [8]
    line.loss = line.update.loss / (double)SFT_MAX(line.trained_tokens, 1);
    line.step = t->step;
    line.total = t->total;
    line.loss_scale = t->scaler.scale;
    line.seconds = sft_now() - start;
    line.mfu = peak > 0 ? flops / (line.seconds * peak) : 0;
    return line;
}

// Whether a strategy (no, steps, epoch) asks for something after this step.
static bool due(const char *strategy, int64_t every, int64_t step, bool new_epoch) {
    if (!strcmp(strategy, "epoch")) return new_epoch;
    return !strcmp(strategy, "steps") && every && step % every == 0;
}

static void train(const SftConfig *config) {
    char *resume = sft_checkpoint_find(config); // [9]
    Run r = open_run(config, resume ? resume : config->model_name_or_path);
    open_data(&r, true);                                                 // [3]
    for (int plan = 1; plan >= 0; plan--) {
        open_run_model(&r, true, plan); // [4] [6]
        if (plan) sft_plan_print(stderr, &r.model);
        else if (ops->remote) fprintf(stderr, "%s, %.1f GB\n", r.device.name, (double)r.device.memory / 1e9);
    }
    const int64_t rows = r.train.rows_per_step, per_epoch = sft_steps_per_epoch(&r.train, rows);
    int64_t *order = SFT_NEW(int64_t, r.train.packs), order_of = -1;
    SftTrainer t = sft_trainer(config, sft_total_steps(&r.train)); // [8]
    if (resume) sft_checkpoint_load(&r.model, &t, config, resume); // [9]
    else if (config->init_from) sft_checkpoint_load(&r.model, NULL, config, config->init_from);
    else if (!strcmp(config->init, "scratch")) sft_init_weights(&r.model, (uint64_t)config->seed);
    else load_weights(&r);

    if (t.step >= t.total)
        sft_note("nothing to do: the checkpoint is at step %lld of %lld", (long long)t.step, (long long)t.total);
    r.record = sft_record_open(config, resume ? t.step : 0); // [11]
    sft_data_show(stderr, &r.train, r.tokenizer, 1);
    const bool validates = r.validation.samples && strcmp(config->eval_strategy, "no");
    Score before = {NAN, NAN, 0}, after = before;
    if (config->eval_on_start && validates && !resume) before = score(&r, t.step);
    if (!resume) answer_inputs(&r, t.step); // [10]
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);

    while (t.step < t.total && !stop_signal) {
        int64_t epoch = t.step / per_epoch, first = t.step % per_epoch * rows;
        if (order_of != epoch)
            sft_epoch_order(order, &r.train, (uint64_t)config->seed, order_of = epoch, config->shuffle);
        SftStepLine line = optimizer_step(&r, &t, order + first, SFT_MIN(rows, r.train.packs - first));
        line.epoch = (double)t.step / (double)per_epoch;
        sft_record_step(r.record, &line); // [11]
        bool last = t.step == t.total, new_epoch = t.step % per_epoch == 0;
        bool evaluates = due(config->eval_strategy, config->eval_steps, t.step, new_epoch);
        if (evaluates && !last && validates) score(&r, t.step);
        if (config->evaluation_freq && t.step % config->evaluation_freq == 0 && !last) answer_inputs(&r, t.step);
        bool wanted = due(config->save_strategy, config->save_steps, t.step, new_epoch);
        wanted |= last && strcmp(config->save_strategy, "no");
        if (wanted || stop_signal) sft_checkpoint_save(&r.model, &t, config); // [9]
    }
    if (!stop_signal) {
        if (validates) after = score(&r, t.step);
        answer_inputs(&r, t.step);
        sft_export(&r.model, r.tokenizer, r.chat, config, r.folder, config->output_dir); // [9]
    }
    json_t *summary = sft_record_summary(r.record, &r.model, before.loss, after.loss);
    if (config->json) print_json(json_incref(summary));
    else if (config->quickstart && !stop_signal && after.exact >= 0 && before.exact >= 0)
        printf("quickstart: held-out exact match %.1f %% -> %.1f %%, validation loss %.3f -> %.3f\n",
               100 * before.exact, 100 * after.exact, before.loss, after.loss);
    sft_record_close(r.record);
    free(order), free(resume), json_decref(summary);
    close_run(&r);
}

/* ---- the other commands ------------------------------------------------------------------------------------------ */
static void data(const SftConfig *config) {
    Run r = open_run(config, config->model_name_or_path);
    open_data(&r, true);
    if (config->dump) sft_data_dump(config->dump, &r.train);
    if (config->json) print_json(sft_data_json(&r.train));
    else sft_data_show(stdout, &r.train, r.tokenizer, 3);
    close_run(&r);
}

static void eval(const SftConfig *config) {
    Run r = open_run(config, config->model_name_or_path);
    open_data(&r, false);
    open_run_model(&r, false, false);
    load_weights(&r);
    json_t *rows = config->per_row || config->per_token ? json_array() : NULL;
    Score s = evaluate(&r, rows);
    json_t *result = json_pack("{s:o, s:I, s:o}", "loss", sft_json_real(s.loss), "tokens", (json_int_t)s.tokens,
                               "perplexity", sft_json_real(exp(s.loss)));
    if (rows) json_object_set_new(result, "rows", rows);
    if (config->json) print_json(result);
    else {
        size_t i;
        json_t *row;
        json_array_foreach(rows, i, row)
            printf("row %zu: loss %.5f over %lld tokens\n", i + 1, json_real_value(json_object_get(row, "loss")),
                   (long long)json_integer_value(json_object_get(row, "tokens")));
        printf("loss %.5f, perplexity %.3f, %lld tokens\n", s.loss, exp(s.loss), (long long)s.tokens);
        json_decref(result);
    }
    close_run(&r);
}

static void estimate(const SftConfig *config) {
    Run r = open_run(config, config->model_name_or_path);
    if (config->train_file) open_data(&r, true);
    open_run_model(&r, true, true);
    if (config->json) print_json(sft_plan_json(&r.model));
    else sft_plan_print(stdout, &r.model);
}

static void export(const SftConfig *config) {
    Run r = open_run(config, config->args[0]);
    open_model(&r, false, 1, 1, 0, false);
    load_weights(&r);
    sft_make_folder(config->args[1]);
    sft_export(&r.model, r.tokenizer, r.chat, config, r.folder, config->args[1]);
    if (config->json) print_json(json_pack("{s:s}", "folder", config->args[1]));
    close_run(&r);
}

// A model that answers: room for one prompt and its answer.
static void open_speaker(Run *r, const SftConfig *config) {
    *r = open_run(config, config->model_name_or_path);
    SftArch a = sft_arch(r->folder);
    int64_t room = a.learned_positions ? a.P : SFT_MIN(a.P, 8192);
    sft_arch_free(&a);
    open_model(r, false, SFT_MIN(room, 512), 1, room, false);
    load_weights(r);
}

static void print_answer(Run *r, json_t *prompt, const char *where, bool json) {
    Answer a = answer_prompt(r, prompt, where, !json);
    if (json)
        print_json(json_pack("{s:o, s:o, s:o}", "prompt_ids", ids_json(a.prompt.ids, a.prompt.n), "output_ids",
                             ids_json(a.ids.ids, a.ids.n), "text", json_stringn(a.text, a.bytes)));
    fflush(stdout);
    free_answer(&a);
}

static void generate(const SftConfig *config) {
    Run r;
    open_speaker(&r, config);
    if (config->file) {
        Input in = open_input(config->file);
        while (next_line(&in)) {
            json_error_t error;
            json_t *prompt = json_loadb(in.text, in.n, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &error);
            if (!prompt && strspn(in.text, " \t\r") == in.n) continue; // an empty line
            if (!prompt) sft_die(SFT_BAD_INPUT, "%s, column %d: %s", in.where, error.column, error.text);
            print_answer(&r, prompt, in.where, true);
            json_decref(prompt);
        }
        close_input(&in);
    } else {
        json_t *prompt = json_string(config->args[1]);
        if (!prompt) sft_die(SFT_BAD_INPUT, "the prompt is not valid UTF-8");
        print_answer(&r, prompt, "the prompt", config->json);
        json_decref(prompt);
    }
    close_run(&r);
}

static void chat(const SftConfig *config) {
    Run r;
    open_speaker(&r, config);
    Input in = open_input(NULL);
    json_t *messages = json_array();
    fprintf(stderr, "template %s; \"clear\" forgets the conversation, \"exit\" ends it\n", sft_template_name(r.chat));
    for (fputs("> ", stderr); next_line(&in) && strcmp(in.text, "exit"); fputs("> ", stderr)) {
        bool clear = !strcmp(in.text, "clear");
        json_t *said = clear ? NULL : json_stringn(in.text, in.n);
        if (clear) json_array_clear(messages);
        else if (!said) fprintf(stderr, "that line is not valid UTF-8\n");
        if (!said || !in.n) continue;
        json_array_append_new(messages, json_pack("{s:s, s:o}", "role", "user", "content", said));
        Answer a = answer_prompt(&r, messages, "the conversation", true);
        said = json_stringn(a.text, a.bytes);
        json_array_append_new(messages, json_pack("{s:s, s:o}", "role", "assistant", "content", said));
        free_answer(&a);
    }
    close_input(&in);
    json_decref(messages);
    close_run(&r);
}

// Text in, ids out on one line; --jsonl: a JSON string in, an array out, line by line; --decode: the other way round.
static void tokenize_text(const SftConfig *config, const SftTokenizer *t, const char *text, size_t bytes) {
    SftIds ids = {0};
    sft_encode(t, &ids, text, bytes, config->add_special_tokens);
    if (config->json || config->jsonl) print_json(ids_json(ids.ids, ids.n));
    else {
        for (int64_t i = 0; i < ids.n; i++) printf(i ? " %d" : "%d", ids.ids[i]);
        putchar('\n');
    }
    free(ids.ids);
}

static void detokenize(const SftConfig *config, const SftTokenizer *t, const Input *line) {
    SftIds ids = {0};
    for (const char *p = line->text + strspn(line->text, "[ ,\t]"); *p; p += strspn(p, "[ ,\t]")) {
        char *end;
        long id = strtol(p, &end, 10);
        if (end == p || id < 0 || id >= sft_vocab_size(t))
            sft_die(SFT_BAD_INPUT, "%s: expected token ids below %lld, got \"%.20s\"", line->where,
                    (long long)sft_vocab_size(t), p);
        sft_ids_add(&ids, (int32_t)id);
        p = end;
    }
    size_t bytes;
    char *text = sft_decode(t, ids.ids, ids.n, false, &bytes);
    if (config->json || config->jsonl) print_json(json_stringn(text, bytes));
    else fwrite(text, 1, bytes, stdout), putchar('\n');
    free(text), free(ids.ids);
}

static void tokenize(const SftConfig *config) {
    SftTokenizer *t = sft_tokenizer_load(config->model_name_or_path);
    Input in = open_input(config->nargs > 1 ? config->args[1] : NULL);
    if (!config->decode && !config->jsonl) {
        read_all(&in);
        tokenize_text(config, t, in.text, in.n);
    }
    while (next_line(&in)) {
        json_error_t error;
        json_t *s = config->decode ? NULL : json_loadb(in.text, in.n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
        if (config->decode) detokenize(config, t, &in);
        else if (json_is_string(s)) tokenize_text(config, t, json_string_value(s), json_string_length(s));
        else sft_die(SFT_BAD_INPUT, "%s: expected a JSON string%s%s", in.where, s ? "" : ": ", s ? "" : error.text);
        json_decref(s);
    }
    close_input(&in);
    sft_tokenizer_free(t);
}

static void help(const SftConfig *config) {
    (void)config;
    sft_help(stdout);
}

/* Threads that wait for each other spin a moment before they sleep. GCC's OpenMP spins for milliseconds, which costs
   nothing on an idle machine and a factor of ten and more beside another busy program: each then waits for a thread
   that is not running. It reads the length only when a program starts, so this one starts again with a short one. */
static void spin_briefly(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv("/proc/self/exe", argv); // goes on here if that cannot be done
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(const SftConfig *); } commands[] = {
        {"train", train}, {"data", data}, {"eval", eval}, {"estimate", estimate}, {"generate", generate},
        {"chat", chat}, {"tokenize", tokenize}, {"export", export}, {"help", help}};
    spin_briefly(argv);
    SftConfig config = sft_config(argc, argv); // [2]
#ifndef SFT_NO_OPENMP
    if (config.threads) omp_set_num_threads((int)config.threads);
#endif
    for (int i = 0; i < SFT_COUNT(commands); i++)
        if (!strcmp(config.command, commands[i].name)) {
            commands[i].run(&config);
            sft_config_free(&config);
            if (fflush(stdout) || ferror(stdout)) sft_die(SFT_BROKEN, "cannot write to standard output");
            return stop_signal ? 128 + stop_signal : 0;
        }
    sft_die(SFT_BAD_INPUT, "there is no command \"%s\"; see %s help", config.command, argv[0]);
}

// [6] forward: every family against PyTorch (test/golden/make_models.py says how), and the model against itself.
#include "test.h"

typedef struct { const char *name, *source; bool steps; } Family; // source: whose weights (NULL: its own)
static const Family families[] = {
    {"gpt2", NULL, true},          {"llama", NULL, true},           {"llama_bias", NULL, false},
    {"mistral", NULL, true},       {"qwen2", NULL, true},           {"qwen3", NULL, true},
    {"gpt2_scaled", "gpt2", 0},    {"llama_linear", "llama", 0},    {"llama_dynamic", "llama", 0},
    {"llama_llama3", "llama", 0},  {"llama_yarn", "llama", 0}};
// between them every setting of the block
static const char *mixed[] = {"gpt2", "llama_bias", "mistral", "qwen2", "qwen3"};

static const char *folder(char out[4096], const char *name) {
    snprintf(out, 4096, "test/golden/model_%s", name);
    return out;
}

// A model with its weights, its goldens and a context; batches as the goldens or a test make them.
typedef struct { SftModel m; SftCtx c; SftSafetensors golden; SftArch arch; } Fixture;
static Fixture *open_model(const char *name, const char *source, SftType type, bool trains, bool checkpointing,
                           int64_t tokens) {
    char path[4096];
    Fixture *f = SFT_NEW(Fixture, 1);
    f->arch = sft_arch(folder(path, name));
    sft_model_open(&f->m, &f->arch, type, trains, checkpointing, tokens, tokens, 0, false, &sft_cpu);
    f->c = (SftCtx){.ops = &sft_cpu, .work = &f->m.mem[SFT_MEM_WORK]};
    sft_load_weights(&f->m, folder(path, source ? source : name));
    folder(path, !strcmp(name, "internlm2") ? "llama" : name);
    strcat(path, "/golden.safetensors");
    f->golden = sft_safetensors_open(path);
    return f;
}
static void close_model(Fixture *f) {
    sft_safetensors_close(&f->golden);
    sft_model_close(&f->m);
    sft_arch_free(&f->arch);
    free(f);
}

static const SftFileTensor *find(const Fixture *f, const char *format, ...) SFT_PRINTF(2, 3);
static const SftFileTensor *find(const Fixture *f, const char *format, ...) {
    char name[64];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    const SftFileTensor *t = sft_safetensors_find(&f->golden, name);
    if (!t) fail_msg("no golden %s", name);
    return t;
}

// Appends n tokens to a batch: what the data section does, without it. A document begins where pos is 0.
static void append(SftBatch *b, const int32_t *ids, const int32_t *target, const int32_t *pos, int64_t n) {
    size_t bytes = (size_t)(b->n + n) * sizeof(int32_t);
    int32_t **list[] = {&b->ids, &b->target, &b->pos, &b->begin, &b->end};
    for (int i = 0; i < SFT_COUNT(list); i++) *list[i] = sft_realloc(*list[i], bytes);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = b->n + i;
        b->ids[at] = ids[i], b->target[at] = target[i], b->pos[at] = pos[i];
        b->begin[at] = (int32_t)(at - pos[i]);
        for (int64_t j = b->begin[at]; j <= at; j++) b->end[j] = (int32_t)at + 1;
        b->documents += pos[i] == 0, b->trained += target[i] >= 0;
    }
    b->n = b->cap = b->n + n;
}
static SftBatch golden_batch(const Fixture *f, int i) {
    SftBatch b = {0};
    const SftFileTensor *ids = find(f, "b%d.ids", i);
    append(&b, (const int32_t *)ids->data, (const int32_t *)find(f, "b%d.target", i)->data,
           (const int32_t *)find(f, "b%d.pos", i)->data, ids->dim[0]);
    return b;
}
static void free_batch(SftBatch *b) {
    free(b->ids), free(b->target), free(b->pos), free(b->begin), free(b->end);
    *b = (SftBatch){0};
}

static void zero_grad(Fixture *f) { memset(f->m.mem[SFT_MEM_GRADS].base, 0, f->m.mem[SFT_MEM_GRADS].used); }
// The whole of it: forward, loss, backward.
static double run(Fixture *f, const SftBatch *b, float scale, float *logprobs) {
    sft_forward(&f->c, &f->m, b);
    sft_loss(&f->c, &f->m, b, scale, logprobs);
    double loss = sft_loss_sum(&f->c, &f->m);
    if (scale != 0) sft_backward(&f->c, &f->m, b);
    return loss;
}
static double largest(const float *x, int64_t n) {
    double most = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(x[i]));
    return most;
}
static double furthest(const float *a, const float *b, int64_t n) { // NaN counts as infinitely far
    double most = 0;
    for (int64_t i = 0; i < n; i++)
        most = isfinite(a[i]) && isfinite(b[i]) ? fmax(most, fabs((double)a[i] - b[i])) : INFINITY;
    return most;
}
static double distance(const float *a, const float *b, int64_t n, double unscale) { // |a*unscale - b| / |b|
    double d = 0, s = 0;
    for (int64_t i = 0; i < n; i++) d += pow(a[i] * unscale - b[i], 2), s += pow(b[i], 2);
    return sqrt(d / s);
}
static float *copy_grads(const Fixture *f) {
    float *g = sft_realloc(NULL, f->m.mem[SFT_MEM_GRADS].used);
    return memcpy(g, f->m.mem[SFT_MEM_GRADS].base, f->m.mem[SFT_MEM_GRADS].used);
}
// with gaps of 0
static int64_t grads(const Fixture *f) { return (int64_t)(f->m.mem[SFT_MEM_GRADS].used / sizeof(float)); }

/* Compares every tensor's gradient, or what it is after the steps, with its golden; a variant has goldens of some only.
   Gradients: in fp32 a number errs by 6e-8 of its size; through two blocks and back, sums of some 40 numbers that
   cancel make that 2.5e-6 of a tensor's largest at worst (measured; 1e-5 is allowed). 2e-6 is for those whose true
   gradient is 0. After: AdamW divides a gradient by its own size, so that rounding makes a large part of a step of 1e-2
   where the gradient is small: measured 3e-4 at worst, and 1.5e-4 of a tensor's size in all. Decay by mistake would be
   3e-3 of it. */
static void compare_all(Fixture *f, bool after, bool variant) {
    int compared = 0;
    for (int64_t u = 0; u < f->m.units; u++)
        for (int s = 0; s < SFT_SLOTS; s++) {
            SftUnit *unit = &f->m.unit[u];
            SftTensor t = *sft_weight(after ? &unit->w : &unit->dw, (SftSlot)s);
            char name[64];
            snprintf(name, sizeof name, "%s.%d.%s", after ? "after" : "grad", (int)u, sft_slot_name((SftSlot)s));
            const SftFileTensor *g = sft_safetensors_find(&f->golden, name);
            if (!t.dim[0] && g) fail_msg("%s has a golden, but no tensor", name);
            if (!g && t.dim[0] && !variant) fail_msg("%s has no golden", name);
            if (!g) continue;
            assert_int_equal(sft_size(t) * 4, g->bytes);
            const float *want = (const float *)g->data;
            double far = furthest(t.data, want, sft_size(t)), most = largest(want, sft_size(t)),
                   part = distance(t.data, want, sft_size(t), 1);
            // GPT-2's key bias moves every score of a query alike: its gradient is rounding, and AdamW makes steps of
            // it.
            bool zero = s == SFT_SLOT_k_b && f->arch.learned_positions;
            bool good = !after ? far <= 1e-5 * most + 2e-6 : zero || (far <= 1e-3 && part <= 5e-4);
            if (!good) fail_msg("%s: off by %g, largest %g; %g of all of it", name, far, most, part);
            compared++;
        }
    assert_true(compared >= 6);
}

static void one_family(const char *name, const char *source) {
    Fixture *f = open_model(name, source, SFT_F32, true, false, 40);
    SftBatch b = golden_batch(f, 0);
    sft_forward(&f->c, &f->m, &b);
    SftUnit *head = &f->m.unit[f->arch.tied ? 0 : f->m.units - 1];
    SftTensor logits = sft_rows(f->m.logits, 0, b.n);
    sft_cpu.matmul_forward(&f->c, logits, SFT_NONE, sft_rows(f->m.final, 0, b.n),
                           f->arch.tied ? head->w.wte : head->w.head_w, SFT_NO_SIDE, SFT_NONE, SFT_NONE, 1,
                           SFT_LINEAR);
    const SftFileTensor *g = find(f, "logits");
    double far = 0;
    for (int64_t i = 0; i < b.n; i++)
        far = fmax(far, furthest(sft_rows(logits, i, 1).data, (const float *)g->data + i * f->arch.V, f->arch.V));
    if (!(far <= 1e-5)) fail_msg("%s: logits off by %g", name, far); // numbers up to 4: 20 units in the last place
    float logprobs[64];
    sft_loss(&f->c, &f->m, &b, 1, logprobs);
    double loss = sft_loss_sum(&f->c, &f->m), golden = *(const float *)find(f, "loss")->data, sum = 0;
    if (!(fabs(loss - golden) <= 1e-6 * golden)) fail_msg("%s: loss %.9g, golden %.9g", name, loss, golden);
    for (int64_t i = 0; i < b.n; i++) {
        sum -= logprobs[i];
        if (b.target[i] < 0) assert_true(logprobs[i] == 0);
    }
    assert_true(fabs(sum - loss) <= 1e-14 * loss); // some 40 doubles, in another order
    sft_backward(&f->c, &f->m, &b);
    compare_all(f, false, source);
    free_batch(&b);
    close_model(f);
}
static void every_family_gives_pytorchs_logits_loss_and_gradients(void **state) {
    (void)state;
    for (int i = 0; i < SFT_COUNT(families); i++) one_family(families[i].name, families[i].source);
    one_family("internlm2", NULL); // the Llama of the goldens, stored as InternLM2 does
}

/* Three steps of two micro-batches, one of which has nothing to learn from: accumulation, the mean over
   the step's tokens, clipping, decay of matrices only. Every other family with checkpointing. */
static void three_steps_of_adamw_are_pytorchs(void **state) {
    (void)state;
    SftConfig config = {.lr_scheduler_type = (char *)"constant",
                        .learning_rate = 1e-2,
                        .adam_beta1 = 0.9,
                        .adam_beta2 = 0.95,
                        .adam_epsilon = 1e-8,
                        .weight_decay = 0.1,
                        .max_grad_norm = 1};
    for (int i = 0; i < SFT_COUNT(families); i++) {
        if (!families[i].steps) continue;
        Fixture *f = open_model(families[i].name, NULL, SFT_F32, true, i % 2, 40);
        SftTrainer trainer = sft_trainer(&config, 3);
        for (int s = 0; s < 3; s++) {
            SftBatch b[2] = {golden_batch(f, 2 * s), golden_batch(f, 2 * s + 1)};
            double scale = 1.0 / (double)(b[0].trained + b[1].trained), loss = 0;
            sft_zero_grad(&f->c, &f->m);
            for (int k = 0; k < 2; k++) loss += run(f, &b[k], (float)scale, NULL) * scale, free_batch(&b[k]);
            SftStep step = sft_update(&f->c, &f->m, &trainer, &config, 1);
            assert_true(fabs(loss / ((const float *)find(f, "step.loss")->data)[s] - 1) < 1e-5);
            assert_true(fabs(step.grad_norm / ((const float *)find(f, "step.norm")->data)[s] - 1) < 1e-5);
            assert_true(step.clipped && !step.skipped && trainer.updates == s + 1);
        }
        compare_all(f, true, false);
        close_model(f);
    }
}

static void documents_in_one_row_are_as_if_alone(void **state) {
    (void)state;
    for (int k = 0; k < SFT_COUNT(mixed); k++) {
        Fixture *f = open_model(mixed[k], NULL, SFT_F32, true, false, 100);
        SftBatch b = golden_batch(f, 1);
        float together[64], alone[64];
        double loss = run(f, &b, 1, together), sum = 0;
        float *g = copy_grads(f);
        zero_grad(f);
        for (int64_t at = 0; at < b.n; at = b.end[at]) {
            SftBatch d = {0};
            append(&d, b.ids + at, b.target + at, b.pos + at, b.end[at] - at);
            sum += run(f, &d, 1, alone + at);
            free_batch(&d);
        }
        // The same products in the same order but for where attention's tiles begin: rounding, nothing else.
        if (!(furthest(together, alone, b.n) <= 3e-6))
            fail_msg("%s: log-probabilities differ by %g", mixed[k], furthest(together, alone, b.n));
        assert_true(fabs(loss - sum) <= 1e-6 * loss);
        double far = furthest(g, (float *)f->m.mem[SFT_MEM_GRADS].base, grads(f)), most = largest(g, grads(f));
        if (!(far <= 2e-6 * most)) fail_msg("%s: gradients differ by %g of %g", mixed[k], far, most);
        free(g);
        free_batch(&b);
        close_model(f);
    }
}

static void a_smaller_batch_uses_part_of_the_plan(void **state) {
    (void)state;
    Fixture *f[2] = {open_model("qwen3", NULL, SFT_F32, true, true, 33),
                     open_model("qwen3", NULL, SFT_F32, true, true, 200)};
    SftBatch b = golden_batch(f[0], 0);
    assert_int_equal(b.n, 33);
    double loss[2] = {run(f[0], &b, 1, NULL), run(f[1], &b, 1, NULL)};
    assert_true(loss[0] == loss[1]);
    assert_memory_equal(f[0]->m.mem[SFT_MEM_GRADS].base, f[1]->m.mem[SFT_MEM_GRADS].base,
                        f[0]->m.mem[SFT_MEM_GRADS].used);
    free_batch(&b);
    close_model(f[0]), close_model(f[1]);
}

static void checkpointing_changes_no_bit(void **state) {
    (void)state;
    for (int type = 0; type < SFT_TYPES; type++)
        for (int k = 0; k < SFT_COUNT(mixed); k++) {
            Fixture *f[2];
            double loss[2];
            for (int i = 0; i < 2; i++) {
                f[i] = open_model(mixed[k], NULL, (SftType)type, true, i, 40);
                SftBatch b[2] = {golden_batch(f[i], 0), golden_batch(f[i], 1)};
                loss[i] = run(f[i], &b[0], 4, NULL) + run(f[i], &b[1], 4, NULL);
                free_batch(&b[0]), free_batch(&b[1]);
            }
            assert_true(loss[0] == loss[1]);
            assert_memory_equal(f[0]->m.mem[SFT_MEM_GRADS].base, f[1]->m.mem[SFT_MEM_GRADS].base,
                                f[0]->m.mem[SFT_MEM_GRADS].used);
            assert_true(f[1]->m.mem[SFT_MEM_ACTS].size < f[0]->m.mem[SFT_MEM_ACTS].size);
            close_model(f[0]), close_model(f[1]);
        }
}

static void a_loss_in_chunks_is_the_loss(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        Fixture *f = open_model(k ? "qwen2" : "llama", NULL, SFT_F32, true, false, 70); // tied | not
        SftBatch b = golden_batch(f, 0), more = golden_batch(f, 1);
        append(&b, more.ids, more.target, more.pos, more.n);
        free_batch(&more);
        for (int64_t i = 0; i < b.n; i++)
            if (i % 4) b.target[i] = b.ids[i]; // some 55 of them: four chunks
        double whole = run(f, &b, 1, NULL);
        float *g = copy_grads(f);
        zero_grad(f);
        f->m.logits = sft_rows(f->m.logits, 0, 16); // the rows of a chunk, as if V were huge
        double chunked = run(f, &b, 1, NULL);
        // a token's loss does not depend on its neighbours, and is added in the same order
        assert_true(chunked == whole);
        double far = furthest(g, (float *)f->m.mem[SFT_MEM_GRADS].base, grads(f)), most = largest(g, grads(f));
        assert_true(far <= 1e-6 * most && far > 0); // the head's gradient is summed chunk by chunk
        free(g);
        free_batch(&b);
        close_model(f);
    }
}

/* 16-bit storage rounds every tensor of the forward and the backward to 2^-9 (bf16) or 2^-12 (fp16) of each value. Two
   blocks have some 40 such roundings one after another, independent: sqrt(40) of them make 1.2 % or 0.15 % of a
   gradient's size; these weights, large for so small a model, double that (measured 2.1 %, 0.31 %). Losses are sums
   over the tokens of errors of both signs: measured 0.05 %, 0.009 %. */
static void sixteen_bits_are_close(void **state) {
    (void)state;
    const double allowed[SFT_TYPES] = {0, 0.04, 0.006};
    for (int type = SFT_BF16; type <= SFT_F16; type++)
        for (int k = 0; k < SFT_COUNT(mixed); k++) {
            Fixture *exact = open_model(mixed[k], NULL, SFT_F32, true, false, 40),
                    *f = open_model(mixed[k], NULL, (SftType)type, true, false, 40);
            SftBatch b = golden_batch(f, 0);
            double want = run(exact, &b, 1, NULL), loss = run(f, &b, 256, NULL); // fp16 is trained with a scale
            if (!(fabs(loss / want - 1) <= allowed[type] / 20))
                fail_msg("%s in %s: loss %g, not %g", mixed[k], sft_type_name(type), loss, want);
            double far = distance((float *)f->m.mem[SFT_MEM_GRADS].base, (float *)exact->m.mem[SFT_MEM_GRADS].base,
                                  grads(f), 1.0 / 256);
            if (!(far <= allowed[type]))
                fail_msg("%s in %s: gradients are %g away", mixed[k], sft_type_name(type), far);
            free_batch(&b);
            close_model(f), close_model(exact);
        }
}

#ifndef SFT_NO_OPENMP
static void threads_change_no_bit(void **state) {
    (void)state;
    int before = omp_get_max_threads();
    for (int k = 0; k < SFT_COUNT(mixed); k++) {
        Fixture *f[2];
        double loss[2];
        for (int i = 0; i < 2; i++) {
            omp_set_num_threads(i + 1);
            f[i] = open_model(mixed[k], NULL, SFT_F32, true, true, 400);
            SftBatch b = {0};
            for (int j = 0; j < 11; j++) { // 11 * 33 or so tokens: enough rows for two threads
                SftBatch more = golden_batch(f[i], j % 6);
                append(&b, more.ids, more.target, more.pos, more.n);
                free_batch(&more);
            }
            loss[i] = run(f[i], &b, 1, NULL);
            free_batch(&b);
        }
        omp_set_num_threads(before);
        assert_true(loss[0] == loss[1]);
        assert_memory_equal(f[0]->m.mem[SFT_MEM_GRADS].base, f[1]->m.mem[SFT_MEM_GRADS].base,
                            f[0]->m.mem[SFT_MEM_GRADS].used);
        close_model(f[0]), close_model(f[1]);
    }
}
#endif

static void the_plan_is_what_is_used(void **state) {
    (void)state;
    char path[4096];
    for (int k = 0; k < SFT_COUNT(mixed); k++)
        for (int how = 0; how < 9; how++) {
            SftType type = (SftType)(how / 3);
            bool trains = how % 3 > 0, checkpointing = how % 3 > 1;
            Fixture *f = open_model(mixed[k], NULL, type, trains, checkpointing, 33);
            SftModel plan;
            sft_model_open(&plan, &f->arch, type, trains, checkpointing, 33, 33, 0, true, &sft_cpu);
            SftBatch b = golden_batch(f, 0);
            for (int64_t i = 0; i < b.n; i++) b.target[i] = b.ids[i]; // every token has a target: the most there can be
            for (int i = 0; i < 2; i++) run(f, &b, trains, NULL);
            size_t sum = 0, parts = 0;
            for (int i = 0; i < SFT_MEMS; i++) {
                assert_null(plan.mem[i].base);
                assert_int_equal(plan.mem[i].peak, f->m.mem[i].size);
                assert_int_equal(plan.mem[i].peak, f->m.mem[i].peak);
                assert_int_equal(plan.logits.dim[0], 33); // not a row more than can have a target
                sum += f->m.mem[i].peak;
            }
            assert_int_equal(sft_plan_bytes(&plan), sum);
            assert_int_equal(sft_plan_bytes(&f->m), sum);
            json_t *json = sft_plan_json(&plan), *part;
            size_t i;
            json_array_foreach(json_object_get(json, "parts"), i, part)
                parts += (size_t)json_integer_value(json_object_get(part, "bytes"));
            assert_int_equal(parts + plan.mem[SFT_MEM_WORK].peak, sum);
            assert_int_equal(json_integer_value(json_object_get(json, "bytes")), sum);
            json_decref(json);
            FILE *out = tmpfile();
            sft_plan_print(out, &plan);
            assert_true(ftell(out) > 200);
            fclose(out);
            free_batch(&b);
            sft_model_close(&plan);
            close_model(f);
        }
    SftArch arch = sft_arch(folder(path, "llama"));
    SftModel plan, m;
    arch.V = 3001; // here the head needs the most workspace
    sft_model_open(&plan, &arch, SFT_F32, true, true, 12, 12, 0, true, &sft_cpu);
    sft_model_open(&m, &arch, SFT_F32, true, true, 12, 12, 0, false, &sft_cpu);
    sft_init_weights(&m, 1);
    Fixture *f = open_model("llama", NULL, SFT_F32, false, false, 1);
    SftBatch b = golden_batch(f, 2), d = {0};
    append(&d, b.ids + 1, b.ids, b.pos + 1, 12);
    SftCtx c = {.ops = &sft_cpu, .work = &m.mem[SFT_MEM_WORK]};
    sft_forward(&c, &m, &d);
    sft_loss(&c, &m, &d, 1, NULL);
    assert_true(fabs(sft_loss_sum(&c, &m) / 12 - log(3001)) < 0.5); // a model that knows nothing yet
    sft_backward(&c, &m, &d);
    for (int i = 0; i < SFT_MEMS; i++) assert_int_equal(plan.mem[i].peak, m.mem[i].peak);
    free_batch(&b), free_batch(&d);
    close_model(f);
    sft_model_close(&plan), sft_model_close(&m);

    // A large model is planned at once, and nothing is allocated.
    arch.V = 128256, arch.C = 4096, arch.L = 32, arch.H = 32, arch.K = 8, arch.D = 128, arch.F = 14336;
    sft_model_open(&plan, &arch, SFT_BF16, true, true, 8192, 8192, 0, true, &sft_cpu);
    double parameters = (double)sft_parameters(&arch); // bf16 weights, fp32 master, gradient and two moments: 18 bytes
    assert_true(sft_plan_bytes(&plan) > 18 * parameters && sft_plan_bytes(&plan) < 18 * parameters + 6e9);
    assert_int_equal(plan.logits.dim[0], 1040); // 256 MiB / (128256 * 2 bytes) = 1046, in multiples of 16
    sft_model_close(&plan);
    sft_arch_free(&arch);
}

static void nothing_to_learn_from_is_zero(void **state) {
    (void)state;
    Fixture *f = open_model("qwen2", NULL, SFT_F32, true, true, 40);
    SftBatch none = {0}, b = golden_batch(f, 3);
    assert_int_equal(b.trained, 0);
    float logprobs[40];
    run(f, &(SftBatch){0}, 1, NULL);
    assert_true(run(f, &none, 1, NULL) == 0 && run(f, &b, 1, logprobs) == 0);
    assert_true(largest((float *)f->m.mem[SFT_MEM_GRADS].base, grads(f)) == 0 && largest(logprobs, b.n) == 0);
    assert_true(furthest(logprobs, logprobs, b.n) == 0);
    free_batch(&b);
    close_model(f);
}

static void a_batch_that_does_not_fit_is_refused(void **state) {
    (void)state;
    Fixture *f = open_model("gpt2", NULL, SFT_F32, false, false, 40);
    SftBatch b = golden_batch(f, 0);
    b.ids[3] = 97;
    EXPECT_ERROR(sft_forward(&f->c, &f->m, &b), "token id 97");
    b.ids[3] = -1;
    EXPECT_ERROR(sft_forward(&f->c, &f->m, &b), "token id -1");
    b.ids[3] = 0, b.pos[3] = 32;
    EXPECT_ERROR(sft_forward(&f->c, &f->m, &b), "33 or more tokens");
    b.pos[3] = 3;
    f->m.tokens = 32;
    EXPECT_ERROR(sft_forward(&f->c, &f->m, &b), "planned for 32");
    f->m.tokens = 40;
    SftTensor room = sft_tensor(NULL, SFT_F32, 50, 4, 8);
    SftCache cache = {&room, &room, 18, 50};
    EXPECT_ERROR(sft_forward_cached(&f->c, &f->m, &b, &cache), "room for 50");
    free_batch(&b);
    close_model(f);
}

// A document in pieces, its keys and values in a cache, is the document: what generation does.
static void a_document_continues_from_a_cache(void **state) {
    (void)state;
    for (int k = 0; k < 2 * SFT_COUNT(mixed); k++) {
        const bool trains = k % 2; // answers are generated during training too
        Fixture *f = open_model(mixed[k / 2], NULL, SFT_F32, trains, trains, 40);
        SftModel *m = &f->m;
        SftBatch b = golden_batch(f, 0), d = {0};
        append(&d, b.ids, b.target, b.pos, 23);
        sft_forward(&f->c, m, &d);
        float *whole = sft_realloc(NULL, (size_t)(d.n * f->arch.C) * 4);
        memcpy(whole, m->final.data, (size_t)(d.n * f->arch.C) * 4);
        SftArena mem;
        sft_arena_open(&mem, "cache", 1 << 16);
        SftTensor keys[2], values[2];
        for (int l = 0; l < 2; l++) {
            keys[l] = sft_take_tensor(&mem, SFT_F32, 30, f->arch.K, f->arch.D);
            values[l] = sft_take_tensor(&mem, SFT_F32, 30, f->arch.K, f->arch.D);
        }
        SftCache cache = {keys, values, 0, 30};
        const int64_t pieces[] = {0, 9, 10, 11, 23};
        for (int p = 0; p < 4; p++) {
            int64_t from = pieces[p], n = pieces[p + 1] - from;
            SftBatch piece = {.n = n,
                              .ids = d.ids + from,
                              .target = d.target + from,
                              .pos = d.pos + from,
                              .begin = d.begin + from,
                              .end = d.end + from};
            sft_forward_cached(&f->c, m, &piece, &cache);
            double far = furthest(whole + from * f->arch.C, m->final.data, n * f->arch.C);
            if (!(far <= 5e-6))
                fail_msg("%s: tokens from %d on differ by %g", mixed[k / 2], (int)from, far); // numbers up to 4
        }
        assert_int_equal(cache.n, 23);
        free(whole);
        sft_arena_close(&mem);
        free_batch(&b), free_batch(&d);
        close_model(f);
    }
}

// A plan that memory cannot hold is refused with what would fit, which is a plan of its own.
static size_t room;
static SftDevice small_device(void) { return (SftDevice){.name = "a small GPU", .free = room}; }
static size_t left; // of what can really be had
static void *less_than_it_said(size_t bytes, bool host) {
    if (bytes > left) return NULL;
    left -= bytes;
    return sft_cpu.reserve(bytes, host);
}
static void a_plan_that_does_not_fit_is_refused(void **state) {
    (void)state;
    char path[4096];
    SftArch a = sft_arch(folder(path, "llama"));
    SftOps small = sft_cpu;
    small.device = small_device;
    SftModel m, plan[2];
    for (int again = 0; again < 2; again++) {
        sft_model_open(&plan[again], &a, SFT_F32, true, again, 40, 40, 0, true, &small);
        room = sft_plan_bytes(&plan[again]);
    }
    assert_true(room < sft_plan_bytes(&plan[0]));
#define OPEN(trains) sft_model_open(&m, &a, SFT_F32, trains, false, 40, 40, 0, false, &small)
    EXPECT_ERROR(OPEN(true), "gradient_checkpointing true and micro-batches of at most 40 tokens");
    assert_int_equal(test__status, SFT_BAD_INPUT);
    room--;
    EXPECT_ERROR(OPEN(true), "at most 20 tokens instead of 40 (per_device_train_batch_size");
    room = 1;
    EXPECT_ERROR(OPEN(true), "not even one token");
    EXPECT_ERROR(OPEN(false), "not even one token");
    small.reserve = less_than_it_said;
    for (int known = 1; known >= 0; known--) { // fails when half is taken
        room = known << 30, left = sft_plan_bytes(&plan[0]) / 2;
        EXPECT_ERROR(OPEN(true), "gradient_checkpointing true and micro-batches of at most 40 tokens");
        assert_int_equal(test__status, SFT_BAD_INPUT);
    }
    for (int again = 0; again < 2; again++) sft_model_close(&plan[again]);
    sft_arch_free(&a);
}

// Counted from the tensor table: each token meets each matrix of the blocks, each target the head, each pair of tokens
// that see each other (at most `window` back) q k and p v in each head. Twice that for a product and a sum, three times
// for backward.
static void operations_are_counted(void **state) {
    (void)state;
    for (int i = 0; i < SFT_COUNT(families); i++) {
        char path[4096];
        SftArch a = sft_arch(folder(path, families[i].name));
        int32_t pos[7] = {0, 1, 2, 0, 1, 2, 3};
        SftBatch b = {.n = 7, .trained = 4, .pos = pos};
        double matrices = 0, pairs = 0;
        for (int s = 0; s < SFT_SLOTS; s++) {
            SftSlotInfo t = sft_slot(&a, (SftSlot)s);
            if (t.unit == SFT_BLOCK && t.decay) matrices += (double)(t.rows * t.cols * a.L);
        }
        for (int64_t l = 0; l < a.L; l++)
            for (int k = 0; k < 7; k++)
                for (int back = 0; back <= pos[k]; back++)
                    pairs += !a.window || l < a.window_from || back < a.window;
        double want = 6 * (7 * matrices + 4 * (double)(a.V * a.C) + 2 * pairs * (double)(a.H * a.D));
        assert_true(fabs(sft_flops(&a, &b) - want) < 0.5);
        sft_arch_free(&a);
    }
}

SFT_TEST_MAIN(cmocka_unit_test(every_family_gives_pytorchs_logits_loss_and_gradients),
              cmocka_unit_test(three_steps_of_adamw_are_pytorchs),
              cmocka_unit_test(documents_in_one_row_are_as_if_alone),
              cmocka_unit_test(a_smaller_batch_uses_part_of_the_plan), cmocka_unit_test(checkpointing_changes_no_bit),
              cmocka_unit_test(a_loss_in_chunks_is_the_loss), cmocka_unit_test(sixteen_bits_are_close),
#ifndef SFT_NO_OPENMP
              cmocka_unit_test(threads_change_no_bit),
#endif
              cmocka_unit_test(the_plan_is_what_is_used), cmocka_unit_test(nothing_to_learn_from_is_zero),
              cmocka_unit_test(a_batch_that_does_not_fit_is_refused),
              cmocka_unit_test(a_document_continues_from_a_cache), cmocka_unit_test(operations_are_counted),
              cmocka_unit_test(a_plan_that_does_not_fit_is_refused))

// [10] speak: generation with a cache against forward passes over the whole text; the sampler against its definition.
#include "test.h"

static const char *families[] = {"gpt2", "llama_bias", "mistral", "qwen2", "qwen3"};

typedef struct { SftModel m; SftCtx c; SftArch arch; } Fixture;
static Fixture *open_model(const char *name, bool trains, int64_t tokens, int64_t cache) {
    char path[4096];
    snprintf(path, sizeof path, "test/golden/model_%s", name);
    Fixture *f = SFT_NEW(Fixture, 1);
    f->arch = sft_arch(path);
    sft_model_open(&f->m, &f->arch, SFT_F32, trains, false, tokens, tokens, cache, false, &sft_cpu);
    f->c = (SftCtx){.ops = &sft_cpu, .work = &f->m.mem[SFT_MEM_WORK]};
    sft_load_weights(&f->m, path);
    return f;
}
static void close_model(Fixture *f) {
    sft_model_close(&f->m);
    sft_arch_free(&f->arch);
    free(f);
}

// The same answer without a cache: the whole text again for every token.
static void answer_slowly(Fixture *f, SftIds *out, const int32_t *prompt, int64_t n, int64_t count) {
    SftBatch b = {0};
    sft_batch_room(&b, n + count);
    float *logits = SFT_NEW(float, f->arch.V);
    for (b.n = 0; b.n < n; b.n++) b.ids[b.n] = prompt[b.n];
    for (; b.n < n + count; b.n++) {
        for (int64_t i = 0; i < b.n; i++)
            b.target[i] = -100, b.pos[i] = (int32_t)i, b.begin[i] = 0, b.end[i] = (int32_t)b.n;
        sft_forward(&f->c, &f->m, &b);
        sft__next_logits(&f->c, &f->m, logits, b.n - 1);
        int64_t best = 0;
        for (int64_t i = 1; i < f->arch.V; i++) best = logits[i] > logits[best] ? i : best;
        b.ids[b.n] = (int32_t)best;
        sft_ids_add(out, (int32_t)best);
    }
    free(logits);
    sft_batch_free(&b);
}

static void a_cache_changes_nothing(void **state) {
    (void)state;
    const int32_t prompt[] = {5, 17, 3, 96, 40, 41, 2, 8, 11, 60, 61};
    for (int k = 0; k < 2 * SFT_COUNT(families); k++) {
        Fixture *f = open_model(families[k / 2], k % 2, 31, 31), *g = open_model(families[k / 2], k % 2, 4, 31);
        SftIds slow = {0}, fast = {0}, pieces = {0};
        SftSampling greedy = {20, 0, 0, 1, 1, 0};
        answer_slowly(f, &slow, prompt, SFT_COUNT(prompt), 20);
        sft_generate(&f->c, &f->m, &fast, prompt, SFT_COUNT(prompt), NULL, 0, greedy, NULL, NULL);
        // prompt in threes and fours
        sft_generate(&g->c, &g->m, &pieces, prompt, SFT_COUNT(prompt), NULL, 0, greedy, NULL, NULL);
        assert_int_equal(fast.n, 20);
        assert_memory_equal(fast.ids, slow.ids, 20 * sizeof(int32_t));
        assert_memory_equal(pieces.ids, slow.ids, 20 * sizeof(int32_t));
        int different = 0; // a model that says one thing only would pass whatever the cache holds
        for (int i = 1; i < 20; i++) different += fast.ids[i] != fast.ids[0];
        assert_true(different > 0);
        free(slow.ids), free(fast.ids), free(pieces.ids);
        close_model(f), close_model(g);
    }
}

static int heard;
static void listen(void *arg, int32_t id) { heard += *(int32_t *)arg == id; }

static void it_stops_where_it_should(void **state) {
    (void)state;
    const int32_t prompt[] = {5, 17, 3};
    Fixture *f = open_model("llama_bias", false, 8, 12);
    SftIds all = {0}, cut = {0};
    SftSampling greedy = {100, 0, 0, 1, 1, 0};
    sft_generate(&f->c, &f->m, &all, prompt, 3, NULL, 0, greedy, NULL, NULL);
    assert_int_equal(all.n, 9); // the cache is full
    int32_t stop = all.ids[4], first = 0;
    while (all.ids[first] != stop) first++;
    heard = 0;
    sft_generate(&f->c, &f->m, &cut, prompt, 3, &stop, 1, greedy, listen, &stop);
    assert_int_equal(cut.n, first + 1);
    assert_int_equal(cut.ids[cut.n - 1], stop);
    assert_int_equal(heard, 1);
    EXPECT_ERROR(sft_generate(&f->c, &f->m, &cut, all.ids, 0, NULL, 0, greedy, NULL, NULL), "no tokens");
    int32_t lengthy[12] = {0};
    EXPECT_ERROR(sft_generate(&f->c, &f->m, &cut, lengthy, 12, NULL, 0, greedy, NULL, NULL), "room for 12");
    free(all.ids), free(cut.ids);
    close_model(f);
}

// Frequencies of many draws against the probabilities that the definition gives.
static void check_draws(SftSampling how, const double *expected) {
    const float logits[5] = {1, 3, 2, 0, 2.5f};
    Sft__Candidate list[5];
    int count[5] = {0};
    const int n = 40000;
    for (int i = 0; i < n; i++) count[sft__sample(logits, 5, how, (uint64_t)i, list)]++;
    for (int i = 0; i < 5; i++) { // 4.5 standard deviations
        double p = expected[i], deviation = sqrt(p * (1 - p) / n);
        if (fabs((double)count[i] / n - p) > 4.5 * deviation)
            fail_msg("token %d: drawn %d of %d times, expected share %g", i, count[i], n, p);
    }
}

static void the_sampler_draws_by_its_definition(void **state) {
    (void)state;
    const double w[5] = {exp(1), exp(3), exp(2), exp(0), exp(2.5)}, sum = w[0] + w[1] + w[2] + w[3] + w[4];
    check_draws((SftSampling){0, 0, 0, 1, 1, 7}, (double[5]){0, 1, 0, 0, 0});
    check_draws((SftSampling){0, 0, 1, 1, 1, 7},
                (double[5]){w[0] / sum, w[1] / sum, w[2] / sum, w[3] / sum, w[4] / sum});
    const double k2 = w[1] + w[4];
    check_draws((SftSampling){0, 2, 1, 1, 1, 7}, (double[5]){0, w[1] / k2, 0, 0, w[4] / k2});
    // The best two hold 0.74 of the probability: top_p 0.7 keeps them, 0.8 takes the third too.
    check_draws((SftSampling){0, 0, 1, 0.7, 1, 7}, (double[5]){0, w[1] / k2, 0, 0, w[4] / k2});
    const double k3 = k2 + w[2];
    check_draws((SftSampling){0, 0, 1, 0.8, 1, 7}, (double[5]){0, w[1] / k3, w[2] / k3, 0, w[4] / k3});
    const double h[5] = {exp(0.5), exp(1.5), exp(1), 1, exp(1.25)}, hs = h[0] + h[1] + h[2] + h[3] + h[4];
    check_draws((SftSampling){0, 0, 2, 1, 1, 7}, (double[5]){h[0] / hs, h[1] / hs, h[2] / hs, h[3] / hs, h[4] / hs});
    float logits[4] = {2, -2, 1, 3};
    uint8_t mark[4];
    sft__repetition(logits, 4, 2, (const int32_t[]){0, 1, 0}, 3, mark); // once, however often it was there
    assert_true(logits[0] == 1 && logits[1] == -4 && logits[2] == 1 && logits[3] == 3);
}

SFT_TEST_MAIN(cmocka_unit_test(a_cache_changes_nothing), cmocka_unit_test(it_stops_where_it_should),
              cmocka_unit_test(the_sampler_draws_by_its_definition))

// [8] step: the loss scaler and schedules of DeepSpeed, the schedules of transformers, AdamW with clipping as PyTorch.
#include "test.h"
#include "golden/step.h"

static SftConfig base(void) {
    return (SftConfig){.learning_rate = 3e-4,
                       .lr_scheduler_type = "linear",
                       .adam_beta1 = 0.9,
                       .adam_beta2 = 0.999,
                       .adam_epsilon = 1e-8,
                       .max_grad_norm = 1,
                       .max_nonfinite_steps = 3};
}

static json_t *parse(const char *text) {
    json_t *json = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
    assert_non_null(json);
    return json;
}

static void schedules_equal_transformers_and_deepspeed(void **state) {
    (void)state;
    for (int i = 0; i < SFT_COUNT(golden_schedule); i++) {
        SftConfig c = base();
        c.lr_scheduler_type = (char *)golden_schedule[i].name;
        c.lr_scheduler_kwargs = parse(golden_schedule[i].kwargs);
        c.warmup_steps = golden_schedule[i].W;
        for (int k = 0; k < golden_schedule[i].n; k++) {
            SftRate r = sft__rate(&c, k, golden_schedule[i].T);
            double lr = golden_schedule[i].lr[k], beta1 = golden_schedule[i].beta1[k];
            // both are a few operations in double: 1e-14 is 50 roundings; of the peak, for cosines that end near 0
            if (fabs(r.lr - lr) > 1e-14 * fmax(3e-4, lr) || fabs(r.beta1 - beta1) > 1e-14)
                fail_msg("%s %s step %d: lr %.17g beta1 %.17g, expected %.17g %.17g", golden_schedule[i].name,
                         golden_schedule[i].kwargs, k, r.lr, r.beta1, lr, beta1);
        }
        json_decref(c.lr_scheduler_kwargs);
    }
}

// The vectors of DeepSpeed's documentation of itself: rates of the first successful steps, learning_rate 1e-3.
static void deepspeed_vectors(void **state) {
    (void)state;
    // clang-format off
    static const struct { const char *name, *kwargs; int n; double lr[13]; } v[] = {
        {"WarmupLR", "{\"warmup_num_steps\": 4, \"warmup_type\": \"linear\"}", 7, {0, 0, .00025, .0005, .00075, .001, .001}},
        {"WarmupLR", "{\"warmup_num_steps\": 4}", 6, {0, 0, .0005, .00079248, .001, .001}},
        {"WarmupDecayLR", "{\"warmup_num_steps\": 4, \"warmup_type\": \"linear\", \"total_num_steps\": 10}", 13,
         {0, 0, .00025, .0005, .00075, .001, .00083333, .00066667, .0005, .00033333, .00016667, 0, 0}},
        {"WarmupCosineLR", "{\"warmup_num_steps\": 4, \"warmup_type\": \"linear\", \"total_num_steps\": 10}", 12,
         {0, 0, .00025, .0005, .00075, .00093302, .00075003, .00050005, .00025008, .0000670806, 1e-7, 1e-7}},
        {"OneCycle", "{\"cycle_min_lr\": 0.1, \"cycle_max_lr\": 1, \"cycle_first_step_size\": 4, \"decay_lr_rate\": 0.5, \"decay_step_size\": 2}", 13,
         {.1, .325, .55, .775, 1, .775, .55, .325, .1, .08, .0666667, .0571429, .05}},
    };
    // clang-format on
    for (int i = 0; i < SFT_COUNT(v); i++) {
        SftConfig c = base();
        c.learning_rate = 1e-3;
        c.lr_scheduler_type = (char *)v[i].name;
        c.lr_scheduler_kwargs = parse(v[i].kwargs);
        for (int k = 0; k < v[i].n; k++) // 6e-9 and 5e-7: half a unit of the last digit written above
            if (fabs(sft_learning_rate(&c, k, 10) - v[i].lr[k]) > (v[i].lr[4] > 0.01 ? 5e-7 : 6e-9))
                fail_msg("%s step %d", v[i].name, k);
        json_decref(c.lr_scheduler_kwargs);
    }
}

static void warmup_and_auto(void **state) {
    (void)state;
    SftConfig c = base();
    c.lr_scheduler_type = "constant_with_warmup", c.warmup_ratio = 0.1; // of 21 steps: ceil(2.1) = 3
    assert_true(sft_learning_rate(&c, 2, 21) < c.learning_rate && sft_learning_rate(&c, 3, 21) == c.learning_rate);
    c.warmup_steps = 5; // wins over the ratio
    assert_true(sft_learning_rate(&c, 4, 21) < c.learning_rate && sft_learning_rate(&c, 5, 21) == c.learning_rate);
    c.lr_scheduler_type = "WarmupDecayLR";
    c.lr_scheduler_kwargs = parse("{\"warmup_num_steps\": \"auto\", \"warmup_max_lr\": \"auto\", \"total_num_steps\": "
                                  "\"auto\", \"warmup_min_lr\": \"auto\"}");
    assert_true(sft_learning_rate(&c, 6, 21) == c.learning_rate && sft_learning_rate(&c, 22, 21) == 0);
    c.warmup_steps = 0, c.warmup_ratio = 0;
    EXPECT_ERROR(sft_learning_rate(&c, 0, 21), "warmup_steps is not set");
    json_decref(c.lr_scheduler_kwargs);
}

static void schedule_errors_name_the_key(void **state) {
    (void)state;
    static const char *const wrong[][3] = { // schedule, parameters, words of the error
        {"lineer", "{}", "warmup_stable_decay"},
        {"reduce_lr_on_plateau", "{}", "metric"},
        {"", "{}", "linear"},
        {"linear", "{\"num_cycles\": 1}", "unknown key \"num_cycles\""},
        {"cosine", "{\"num_cycle\": 1}", "known: num_cycles"},
        {"cosine", "{\"cycles\": 1}", "unknown key \"cycles\""},
        {"cosine", "{\"\": 1}", "unknown key"},
        {"cosine", "{\"num_cycles\": \"two\"}", "\"num_cycles\" must be a number"},
        {"cosine", "{\"num_cycles\": true}", "\"num_cycles\" must be a number"},
        {"cosine", "{\"num_cycles\": -1}", "from 0"},
        {"cosine", "[1]", "must be an object"},
        {"cosine_with_min_lr", "{}", "one of \"min_lr\" and \"min_lr_rate\""},
        {"cosine_with_min_lr", "{\"min_lr\": 1e-5, \"min_lr_rate\": 0.1}", "not both"},
        {"polynomial", "{\"lr_end\": 0.1}", "below learning_rate"},
        {"warmup_stable_decay", "{}", "needs \"num_decay_steps\""},
        {"warmup_stable_decay", "{\"num_decay_steps\": 2, \"decay_type\": \"lin\"}", "linear|cosine|1-sqrt"},
        {"warmup_stable_decay", "{\"num_decay_steps\": 2, \"decay_type\": 3}", "\"decay_type\" must be"},
        {"WarmupLR", "{\"warmup_num_steps\": 0}", "\"warmup_num_steps\" must be a whole number from 1"},
        {"WarmupLR", "{\"warmup_num_steps\": 1.5}", "whole number"},
        {"OneCycle", "{\"cycle_min_lr\": 0.1}", "needs \"cycle_max_lr\""},
        {"OneCycle", "{\"cycle_min_lr\": 0.1, \"cycle_max_lr\": 1, \"cycle_momentum\": 1}", "true or false"},
    };
    for (int i = 0; i < SFT_COUNT(wrong); i++) {
        SftConfig c = base();
        c.lr_scheduler_type = (char *)wrong[i][0];
        c.lr_scheduler_kwargs = parse(wrong[i][1]);
        EXPECT_ERROR(sft_trainer(&c, 10), wrong[i][2]);
        json_decref(c.lr_scheduler_kwargs);
    }
    SftConfig c = base();
    c.lr_scheduler_type = "WarmupLR", c.warmup_steps = 5;
    c.lr_scheduler_kwargs = parse("{\"warmup_num_steps\": 4}");
    EXPECT_ERROR(sft_trainer(&c, 10), "says 5");
    json_decref(c.lr_scheduler_kwargs);
    c.lr_scheduler_type = "OneCycle", c.warmup_steps = 0;
    c.lr_scheduler_kwargs = parse("{\"cycle_min_lr\": 0.1, \"cycle_max_lr\": 1, \"cycle_first_step_size\": 1, "
                                  "\"decay_mom_rate\": 1, \"decay_step_size\": 1}");
    EXPECT_ERROR(sft_learning_rate(&c, 5, 9), "decay_mom_rate");
    json_decref(c.lr_scheduler_kwargs);
}

static SftScaler scaler(const char *fp16) {
    SftConfig c = base();
    c.type = SFT_F16, c.fp16 = parse(fp16);
    SftScaler s = sft_scaler(&c);
    json_decref(c.fp16);
    return s;
}

static void scaler_equals_deepspeed(void **state) {
    (void)state;
    // clang-format off
    static const struct { const char *fp16, *steps; int scale[10], left[10]; bool dies; } v[] = { // o: overflow
        {"{\"initial_scale_power\": 4, \"loss_scale_window\": 2}", "........", {16, 16, 32, 32, 64, 64, 128, 128}, {2, 2, 2, 2, 2, 2, 2, 2}, false},
        {"{\"initial_scale_power\": 4, \"loss_scale_window\": 2}", "oooo......", {16, 8, 4, 2, 2, 2, 4, 4, 8, 8}, {1, 1, 1, 1, 1, 1, 2, 2, 2, 2}, false},
        {"{\"initial_scale_power\": 4, \"loss_scale_window\": 2}", "o.o.o...", {16, 16, 8, 8, 4, 4, 4, 8}, {1, 1, 1, 1, 1, 1, 1, 2}, false},
        {"{\"initial_scale_power\": 4, \"loss_scale_window\": 2, \"consecutive_hysteresis\": true}", "o.o.o...", {16, 16, 16, 16, 16, 16, 16, 32},
         {1, 2, 1, 2, 1, 2, 2, 2}, false},
        {"{\"initial_scale_power\": 4, \"loss_scale_window\": 2, \"hysteresis\": 1}", "oooo", {8, 4, 2, 1}, {1, 1, 1, 1}, true},
        {"{\"initial_scale_power\": 2, \"loss_scale_window\": 2}", "ooo", {4, 2, 1}, {1, 1, 1}, true},
        {"{\"initial_scale_power\": 2, \"min_loss_scale\": 3, \"hysteresis\": 1}", "o", {3}, {1}, true}, // clamped first, dies one later
    };
    // clang-format on
    for (int i = 0; i < SFT_COUNT(v); i++) {
        SftScaler s = scaler(v[i].fp16);
        for (int k = 0; v[i].steps[k]; k++) {
            assert_true(sft_scaler_update(&s, v[i].steps[k] == 'o'));
            if (s.scale != v[i].scale[k] || s.left != v[i].left[k])
                fail_msg("vector %d, call %d: %g/%d", i, k, s.scale, (int)s.left);
        }
        if (v[i].dies) assert_false(sft_scaler_update(&s, true));
    }
    SftScaler s = scaler("true"); // 2^16, window 1000: doubled at calls 1001, 2001 and 3001
    for (int call = 1; call <= 3001; call++) {
        double before = s.scale;
        sft_scaler_update(&s, false);
        assert_true((s.scale == 2 * before) == (call % 1000 == 1 && call > 1));
    }
    s = scaler("{\"initial_scale_power\": 24, \"loss_scale_window\": 1}"); // the ceiling, where DeepSpeed has none
    for (int i = 0; i < 5; i++) sft_scaler_update(&s, false);
    assert_true(s.scale == 16777216);
    s = scaler("{\"loss_scale\": 128}"); // static
    for (int i = 0; i < 50; i++) assert_true(sft_scaler_update(&s, i % 2));
    assert_true(s.scale == 128 && !s.dynamic);
    SftConfig c = base();
    assert_true(sft_scaler(&c).scale == 1 && !sft_scaler(&c).dynamic);
}

static void scaler_ranges_are_checked(void **state) {
    (void)state;
    static const char *const wrong[][2] = {
        {"{\"initial_scale_power\": 25}", "initial_scale_power"},
        {"{\"initial_scale_power\": 1.5}", "whole number"},
        {"{\"hysteresis\": 0}", "hysteresis"},
        {"{\"loss_scale_window\": 0}", "loss_scale_window"},
        {"{\"loss_scale\": -1}", "loss_scale"},
        {"{\"loss_scale\": true}", "loss_scale"},
        {"{\"min_loss_scale\": 0}", "min_loss_scale"},
        {"{\"initial_scale_power\": 1, \"min_loss_scale\": 4}", "min_loss_scale"},
        {"{\"consecutive_hysteresis\": 1}", "true or false"},
    };
    for (int i = 0; i < SFT_COUNT(wrong); i++) EXPECT_ERROR(scaler(wrong[i][0]), wrong[i][1]);
}

/* A model of two units, 40 and 8 parameters, without a network: norm1_w .. stand for anything. What make_step.py calls
   parameter 0 (37, decayed) and 1 (11, not decayed) lies so: unit 0 = the first 37 and 3 of the others; unit 1 = 8. */
typedef struct {
    SftModel m;
    SftUnit unit[2];
    float master[48], grad[48], mom[48], var[48];
    double sums[6];
    uint16_t half[48];
    SftArena work;
    SftCtx c;
} Toy;
static void toy_open(Toy *t, SftType type) {
    *t = (Toy){.m = {.type = type, .units = 2, .arch = {.family = "llama"}}};
    for (int u = 0; u < 2; u++) {
        int at = u ? 40 : 0;
        t->unit[u] = (SftUnit){.kind = u ? SFT_BLOCK : SFT_EMBED,
                               .count = u ? 8 : 40,
                               .decayed = u ? 0 : 37,
                               .master = t->master + at,
                               .grad = t->grad + at,
                               .m = t->mom + at,
                               .v = t->var + at,
                               .weights = type == SFT_F32 ? (void *)(t->master + at) : (void *)(t->half + at)};
    }
    t->unit[0].dw.wte = sft_tensor(t->grad, SFT_F32, 40, 1, 1);
    t->unit[1].dw.norm2_w = sft_tensor(t->grad + 40, SFT_F32, 8, 1, 1);
    t->m.unit = t->unit, t->m.sums = t->sums;
    sft_arena_open(&t->work, "workspace", 1 << 20);
    t->c = (SftCtx){.ops = &sft_cpu, .work = &t->work};
}
static float value(int i) { return (float)((i * 7919 + 104729) % 2003 / 2003.0 - 0.5); }
static float grad_value(int step, int i) { // of the sum of two micro-batches
    int first = 1000 * step + (i < 37 ? 0 : 300), k = i < 37 ? i : i - 37;
    return (value(first + k) + value(first + k + 500)) * (step == 2 ? 0.1f : 1);
}
static void toy_step(Toy *t, SftTrainer *trainer, const SftConfig *config, int step, double scale) {
    sft_zero_grad(&t->c, &t->m);
    for (int i = 0; i < 48; i++) assert_true(t->grad[i] == 0);
    for (int i = 0; i < 48; i++) t->grad[i] += grad_value(step, i) * (float)scale;
    SftStep s = sft_update(&t->c, &t->m, trainer, config, scale);
    assert_false(s.skipped);
    assert_int_equal(s.clipped, step < 2);
    assert_true(fabs(s.grad_norm / golden_norm[step] - 1) < 2e-7); // PyTorch's own is fp32
    assert_true(s.lr == (step == 0 ? 0 : 1e-2 * (5 - step) / 4.0));
}

static void three_steps_equal_pytorch(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) { // fp32; fp32 with a scaled loss; bf16 with masters
        Toy *t = SFT_NEW(Toy, 1);
        SftConfig c = base();
        c.learning_rate = 1e-2, c.adam_beta2 = 0.99, c.weight_decay = 0.1, c.warmup_steps = 1;
        toy_open(t, kind == 2 ? SFT_BF16 : SFT_F32);
        for (int i = 0; i < 48; i++) t->master[i] = i < 37 ? value(i) : value(100 + i - 37);
        SftTrainer trainer = sft_trainer(&c, 5);
        for (int step = 0; step < 3; step++) toy_step(t, &trainer, &c, step, kind == 1 ? 4096 : 1);
        assert_int_equal(trainer.updates, 3);
        // relative errors of a dozen fp32 roundings; of m by the size of what was added up
        for (int i = 0; i < 48; i++) {
            float p = i < 37 ? golden_p0[i] : golden_p1[i - 37], m = i < 37 ? golden_m0[i] : golden_m1[i - 37];
            float v = i < 37 ? golden_v0[i] : golden_v1[i - 37];
            if (fabsf(t->master[i] - p) > 1e-6f * fmaxf(fabsf(p), 0.01f) || fabsf(t->mom[i] - m) > 1e-6f * 0.02f ||
                fabsf(t->var[i] - v) > 2e-6f * v)
                fail_msg("parameter %d: %.9g %.9g %.9g, PyTorch %.9g %.9g %.9g", i, t->master[i], t->mom[i], t->var[i],
                         p, m, v);
            uint16_t rounded;
            sft_from_f32(&rounded, SFT_BF16, &t->master[i], 1);
            if (kind == 2) assert_int_equal(t->half[i], rounded);
        }
        sft_arena_close(&t->work);
        free(t);
    }
}

static void nonfinite_steps_are_skipped_and_counted(void **state) {
    (void)state;
    Toy *t = SFT_NEW(Toy, 1), *before = SFT_NEW(Toy, 1);
    SftConfig c = base();
    toy_open(t, SFT_F32);
    SftTrainer trainer = sft_trainer(&c, 10);
    for (int i = 0; i < 48; i++) t->master[i] = value(i), t->grad[i] = 0.01f;
    sft_update(&t->c, &t->m, &trainer, &c, 1);
    *before = *t;
    for (int bad = 0; bad < 2; bad++) {
        t->grad[44] = bad ? NAN : -INFINITY;
        SftStep s = sft_update(&t->c, &t->m, &trainer, &c, 1);
        assert_true(s.skipped && !s.clipped);
        assert_true(s.lr == sft_learning_rate(&c, 1, 10)); // the schedule stands still
        assert_int_equal(trainer.step, 2 + bad);
        assert_int_equal(trainer.updates, 1);
    }
    assert_memory_equal(t->master, before->master, sizeof t->master);
    assert_memory_equal(t->mom, before->mom, sizeof t->mom);
    assert_memory_equal(t->var, before->var, sizeof t->var);
    EXPECT_ERROR(sft_update(&t->c, &t->m, &trainer, &c, 1),
                 "model.layers.0.post_attention_layernorm.weight is not finite, for 3 steps");
    assert_int_equal(test__status, SFT_BROKEN);
    t->grad[44] = 0; // a good step ends the row
    sft_update(&t->c, &t->m, &trainer, &c, 1);
    assert_int_equal(trainer.bad_in_a_row, 0);
    assert_int_equal(trainer.updates, 2);

    c.type = SFT_F16, c.fp16 = parse("{\"initial_scale_power\": 1, \"hysteresis\": 1}");
    trainer = sft_trainer(&c, 10);
    t->grad[3] = INFINITY; // the first bad tensor in the model's order is named
    t->grad[44] = NAN;
    assert_true(sft_update(&t->c, &t->m, &trainer, &c, trainer.scaler.scale).skipped);
    assert_true(trainer.scaler.scale == 1);
    EXPECT_ERROR(sft_update(&t->c, &t->m, &trainer, &c, trainer.scaler.scale), "gradient of model.embed_tokens.weight");
    json_decref(c.fp16);
    sft_arena_close(&t->work);
    free(t), free(before);
}

static void gradients_are_unscaled_with_the_scale_of_backward(void **state) {
    (void)state;
    Toy *t = SFT_NEW(Toy, 1);
    SftConfig c = base();
    c.type = SFT_F16, c.fp16 = parse("{\"initial_scale_power\": 3, \"loss_scale_window\": 1}");
    toy_open(t, SFT_F32);
    SftTrainer trainer = sft_trainer(&c, 10);
    for (int step = 0; step < 4; step++) { // the scale doubles in the 2nd, 3rd and 4th of them
        double scale = trainer.scaler.scale;
        for (int i = 0; i < 48; i++) t->grad[i] = (float)scale;
        assert_true(fabs(sft_update(&t->c, &t->m, &trainer, &c, scale).grad_norm - sqrt(48)) < 1e-12);
        assert_true(trainer.scaler.scale == (step ? 2 * scale : scale));
    }
    for (int i = 0; i < 48; i++) t->grad[i] = 0; // no trained token at all: a norm of zero is legal
    SftStep s = sft_update(&t->c, &t->m, &trainer, &c, trainer.scaler.scale);
    assert_true(s.grad_norm == 0 && !s.skipped && !s.clipped && isfinite(t->master[0]));
    SftArena plan = {.name = "plan"};
    SftCtx planning = {.ops = &sft_cpu, .work = &plan};
    int64_t steps = trainer.step;
    sft_update(&planning, &t->m, &trainer, &c, 1);
    assert_true(plan.peak > 0 && plan.used == 0 && trainer.step == steps);
    json_decref(c.fp16);
    sft_arena_close(&t->work);
    free(t);
}

SFT_TEST_MAIN(cmocka_unit_test(schedules_equal_transformers_and_deepspeed), cmocka_unit_test(deepspeed_vectors),
              cmocka_unit_test(warmup_and_auto), cmocka_unit_test(schedule_errors_name_the_key),
              cmocka_unit_test(scaler_equals_deepspeed), cmocka_unit_test(scaler_ranges_are_checked),
              cmocka_unit_test(three_steps_equal_pytorch), cmocka_unit_test(nonfinite_steps_are_skipped_and_counted),
              cmocka_unit_test(gradients_are_unscaled_with_the_scale_of_backward))

/* [5] ops: every operation against float64 formulas, at shapes that fit no tile, in every storage type; gradients against
   central differences of those formulas; the same bits with 1, 2 and 3 threads; workspace exactly as planned.

   A value is a tensor and its elements as doubles, rounded to the tensor's type, so that a reference starts from the very
   numbers that the op sees. What may differ is then the op's own arithmetic. The tolerance of one output is
       half a unit of the output's type (its one rounding) * |reference|  +  4 * 2^-24 * size
   where size is the sum of the absolute values of the terms that make the output: n terms added in fp32 in any order
   differ by about sqrt(n) 2^-24 times their root mean square, which is less than 2^-24 size; exp, erf and division inside
   the terms add a few units of 2^-24 each. */
#include "test.h"

typedef struct {
    SftTensor t;
    double *x;
    int64_t n;
} Val;

static uint64_t counter; // every value is different, and the same in every run
static double random_number(void) { return 2 * (double)sft_uniform(sft_random(7, 0, 0, counter++)) - 1; }
static const double half_unit[SFT_TYPES] = {0x1p-24, 0x1p-8, 0x1p-11};

static double *doubles(int64_t n) { return SFT_NEW(double, n + 1); }
static Val value(SftType type, int64_t d0, int64_t d1, int64_t d2, double scale) {
    Val v = {sft_tensor(NULL, type, d0, d1, d2), NULL, d0 * d1 * d2};
    // exactly as long as it is, so that AddressSanitizer sees the first byte beyond
    v.t.data = sft_alloc((size_t)v.n * sft_type_size(type)), v.x = doubles(v.n);
    for (int64_t i = 0; i < v.n; i++) {
        float f = (float)(scale * random_number());
        char *at = (char *)v.t.data + (size_t)i * sft_type_size(type);
        sft_from_f32(at, type, &f, 1), sft_to_f32(&f, at, type, 1);
        v.x[i] = f;
    }
    return v;
}
static const Val none = {{0}, NULL, 0};
static void drop(Val v) { free(v.t.data), free(v.x); }
#define DROP(...) do { Val all[] = {__VA_ARGS__}; for (int d = 0; d < SFT_COUNT(all); d++) drop(all[d]); } while (0)

static uint64_t fingerprint; // of every output that was checked, in order
static void check(const char *what, SftTensor got, const double *want, const double *size, double factor) {
    int64_t n = sft_size(got);
    for (int64_t i = 0; i < n; i++) {
        float f;
        sft_to_f32(&f, (char *)got.data + (size_t)i * sft_type_size(got.type), got.type, 1);
        fingerprint = (fingerprint ^ sft_f32_bits(f)) * 0x100000001b3u;
        double tolerance = half_unit[got.type] * 1.01 * fabs(want[i]) + 4 * 0x1p-24 * factor * (size ? size[i] : fabs(want[i])) + (got.type == SFT_F16 ? 0x1p-25 : 1e-37);
        if (!(fabs((double)f - want[i]) <= tolerance))
            fail_msg("%s, %s [%ld,%ld,%ld], element %ld: got %.9g, want %.9g, tolerance %.3g", what, sft_type_name(got.type), (long)got.dim[0], (long)got.dim[1],
                     (long)got.dim[2], (long)i, (double)f, want[i], tolerance);
    }
}

// Runs an op in exactly the workspace that it plans.
#define RUN(op, ...)                                                                                                   \
    do {                                                                                                               \
        SftArena plan = {.name = "plan"}, real;                                                                        \
        SftCtx ctx = {&sft_cpu, NULL, &plan, 0, 0};                                                                    \
        sft_cpu.op(&ctx, __VA_ARGS__);                                                                                 \
        assert_int_equal(plan.used, 0);                                                                                \
        sft_arena_open(&real, #op, plan.peak);                                                                         \
        ctx.work = &real;                                                                                              \
        sft_cpu.op(&ctx, __VA_ARGS__);                                                                                 \
        assert_int_equal(real.used, 0);                                                                                \
        sft_arena_close(&real);                                                                                        \
    } while (0)

// --- the scalar formulae -------------------------------------------------------------------------------------------
static double phi(double x) { return exp(-x * x / 2) / sqrt(2 * M_PI); }
static double act(double x, SftAct a) {
    if (a == SFT_GELU) return 0.5 * x * erfc(-x / sqrt(2));
    if (a == SFT_GELU_TANH) return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    return x;
}
static double act_grad(double x, SftAct a) {
    if (a == SFT_GELU) return 0.5 * erfc(-x / sqrt(2)) + x * phi(x);
    if (a == SFT_LINEAR) return 1;
    double u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), t = tanh(u);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}
static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void formulae_are_accurate(void **state) {
    (void)state;
    double worst[7] = {0};
#define WORST(i, got, want, size) worst[i] = fmax(worst[i], fabs((double)(got) - (want)) / (size))
    for (double at = -86.9; at < 88.7; at += 0.0037) WORST(0, sft_exp((float)at), exp((float)at), exp((float)at));
    for (double at = -30; at < 30; at += 0.00173) {
        float x = (float)at, density;
        WORST(1, sft_gelu(x), act(x, SFT_GELU), 1 + fabs(at));
        WORST(2, sft_gelu_grad(x), act_grad(x, SFT_GELU), 1);
        WORST(3, sft_gelu_tanh(x), act(x, SFT_GELU_TANH), 1 + fabs(at));
        WORST(4, sft_gelu_tanh_grad(x), act_grad(x, SFT_GELU_TANH), 1);
        WORST(5, sft_silu_grad(x), sigmoid(x) * (1 + x * (1 - sigmoid(x))), 1);
        if (fabs(at) < 5) WORST(6, sft_normal(-fabsf(x), &density), 0.5 * erfc(fabs((double)x) / sqrt(2)), 0.5 * erfc(fabs((double)x) / sqrt(2)));
    }
    const double bound[7] = {8e-8, 1e-7, 3e-7, 1e-7, 3e-7, 1e-6, 1e-6}; // what sft.h promises
    for (int i = 0; i < 7; i++)
        if (!(worst[i] < bound[i])) fail_msg("formula %d: error %g", i, worst[i]);
    assert_true(sft_exp(-INFINITY) == 0 && sft_exp(-88) == 0 && sft_exp(89) == INFINITY && isnan(sft_exp(NAN)) && sft_exp(0) == 1);
    assert_true(isnan(sft_gelu(NAN)) && isnan(sft_silu(NAN)) && sft_silu(-200) == 0 && sft_gelu(-40) == 0 && sft_gelu(40) == 40);
}

// --- matmul --------------------------------------------------------------------------------------------------------
// out[M,N] = sum over k of a(i,k) b(j,k), with the sum of absolute values
static void product(double *out, double *size, const double *a, int64_t ar, int64_t ac, const double *b, int64_t br, int64_t bc, int64_t M, int64_t N, int64_t K) {
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            double s = 0, z = 0;
            for (int64_t k = 0; k < K; k++) {
                double t = a[i * ar + k * ac] * b[j * br + k * bc];
                s += t, z += fabs(t);
            }
            out[i * N + j] = s, size[i * N + j] = z;
        }
}

static void matmul_case(SftType type, int64_t N, int64_t I, int64_t O, SftAct a, bool extras) {
    Val x = value(type, N, I, 1, 1), w = value(type, O, I, 1, 1), y = value(type, N, O, 1, 1), pre = extras ? value(type, N, O, 1, 1) : none;
    Val bias = extras ? value(type, O, 1, 1, 1) : none, dy = value(type, N, O, 1, 1), dx = value(type, N, I, 1, 1), dpre = value(type, N, I, 1, 1);
    Val dw = value(SFT_F32, O, I, 1, 1), db = value(SFT_F32, O, 1, 1, 1);
    double *z = doubles(N * O), *size = doubles(N * O);
    product(z, size, x.x, I, 1, w.x, I, 1, N, O, I);
    for (int64_t i = 0; extras && i < N * O; i++) z[i] += bias.x[i % O], size[i] += fabs(bias.x[i % O]);
    RUN(matmul_forward, y.t, pre.t, x.t, w.t, bias.t, extras ? y.t : SFT_NONE, a); // y is the residual too
    if (extras) check("matmul pre", pre.t, z, size, 1);
    for (int64_t i = 0; i < N * O; i++) z[i] = act(z[i], a) + (extras ? y.x[i] : 0), size[i] += 1 + fabs(z[i]);
    check("matmul", y.t, z, size, 1);
    free(z), free(size);

    z = doubles(N * I), size = doubles(N * I);
    product(z, size, dy.x, O, 1, w.x, 1, I, N, I, O);
    for (int64_t i = 0; i < N * I; i++) {
        double d = act_grad(dpre.x[i], a);
        z[i] = z[i] * d + (extras ? dx.x[i] : 0), size[i] = size[i] * (fabs(d) + 1) + fabs(dx.x[i]);
    }
    RUN(matmul_backward_x, dx.t, dy.t, w.t, a == SFT_LINEAR ? SFT_NONE : dpre.t, a, extras);
    check("matmul dx", dx.t, z, size, 1);
    free(z), free(size);

    z = doubles(O * I), size = doubles(O * I);
    product(z, size, dy.x, 1, O, x.x, 1, I, O, I, N);
    for (int64_t i = 0; i < O * I; i++) z[i] += dw.x[i], size[i] += fabs(dw.x[i]);
    double *sum = doubles(O), *sum_size = doubles(O);
    for (int64_t o = 0; o < O; o++) sum[o] = db.x[o], sum_size[o] = 1;
    for (int64_t i = 0; i < N * O; i++) sum[i % O] += dy.x[i], sum_size[i % O] += fabs(dy.x[i]);
    RUN(matmul_backward_w, dw.t, extras ? db.t : SFT_NONE, dy.t, x.t);
    check("matmul dw", dw.t, z, size, 1);
    if (extras) check("matmul dbias", db.t, sum, sum_size, 1);
    free(z), free(size), free(sum), free(sum_size);
    DROP(x, w, y, pre, bias, dy, dx, dpre, dw, db);
}

static void matmul_works(void **state) {
    (void)state;
    static const int shape[][3] = {{0, 5, 7}, {1, 1, 1}, {1, 97, 33}, {3, 1500, 70}, {4, 33, 97}, {5, 33, 97}, {64, 64, 64}, {97, 130, 31}, {130, 7, 257}, {17, 801, 65}, {9, 65, 1601}, {1601, 9, 5}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        for (int type = 0; type < SFT_TYPES; type++) {
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], SFT_LINEAR, false);
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], (SftAct)(1 + s % 2), true);
        }
    matmul_case(SFT_F32, 2100, 3, 2200, SFT_LINEAR, false);   // more than one block of rows and of columns,
    matmul_case(SFT_BF16, 9, 2111, 2, SFT_LINEAR, true);      // of a depth of one and of more,
    matmul_case(SFT_F32, 7, 2111, 800, SFT_GELU, true);       // and a bf16 pair that is only half there
    matmul_case(SFT_BF16, 2051, 5, 1600, SFT_GELU_TANH, true);
}

// --- attention -----------------------------------------------------------------------------------------------------
typedef struct {
    int64_t N, M, H, K, D, window;
    const int32_t *begin;
    double scale;
} Att;
static void attention(double *y, double *lse, const double *q, const double *k, const double *v, const Att *t) {
    double *p = doubles(t->M);
    for (int64_t i = 0; i < t->N; i++)
        for (int64_t h = 0; h < t->H; h++) {
            int64_t g = h / (t->H / t->K), high = i + t->M - t->N, low = t->begin[i];
            if (t->window && high - t->window + 1 > low) low = high - t->window + 1;
            double most = -1e300, sum = 0;
            for (int64_t j = low; j <= high; j++) {
                p[j] = 0;
                for (int64_t d = 0; d < t->D; d++) p[j] += q[(i * t->H + h) * t->D + d] * k[(j * t->K + g) * t->D + d];
                p[j] *= t->scale, most = fmax(most, p[j]);
            }
            for (int64_t j = low; j <= high; j++) sum += exp(p[j] - most);
            lse[i * t->H + h] = most + log(sum);
            for (int64_t d = 0; d < t->D; d++) {
                double s = 0;
                for (int64_t j = low; j <= high; j++) s += exp(p[j] - most) / sum * v[(j * t->K + g) * t->D + d];
                y[(i * t->H + h) * t->D + d] = s;
            }
        }
    free(p);
}
static void attention_grad(double *dq, double *dk, double *dv, const double *dy, const double *y, const double *lse, const double *q, const double *k, const double *v, const Att *t) {
    for (int64_t i = 0; i < t->N; i++)
        for (int64_t h = 0; h < t->H; h++) {
            int64_t g = h / (t->H / t->K), low = t->begin[i], at = (i * t->H + h) * t->D;
            if (t->window && i - t->window + 1 > low) low = i - t->window + 1;
            for (int64_t j = low; j <= i; j++) {
                int64_t kat = (j * t->K + g) * t->D;
                double s = 0, dp = 0, delta = 0;
                for (int64_t d = 0; d < t->D; d++) s += q[at + d] * k[kat + d], dp += dy[at + d] * v[kat + d], delta += dy[at + d] * y[at + d];
                double p = exp(s * t->scale - lse[i * t->H + h]), ds = p * (dp - delta) * t->scale;
                for (int64_t d = 0; d < t->D; d++) dq[at + d] += ds * k[kat + d], dk[kat + d] += ds * q[at + d], dv[kat + d] += p * dy[at + d];
            }
        }
}

static int32_t *documents(int32_t **end, int64_t N, int64_t length) { // documents of about `length` tokens
    int32_t *begin = SFT_NEW(int32_t, N + 1);
    *end = SFT_NEW(int32_t, N + 1);
    for (int64_t b = 0, n = 0; b < N; b += n) {
        n = SFT_MIN(length > 2 ? length + (b * 7 + 3) % 5 - 2 : length, N - b);
        for (int64_t i = b; i < b + n; i++) begin[i] = (int32_t)b, (*end)[i] = (int32_t)(b + n);
    }
    return begin;
}

static void attention_case(SftType type, int64_t N, int64_t M, int64_t H, int64_t K, int64_t D, int64_t document, int64_t window) {
    int32_t *end, *begin = documents(&end, N, document);
    Val q = value(type, N, H, D, 2), k = value(type, M, K, D, 2), v = value(type, M, K, D, 1), y = value(type, N, H, D, 1), lse = value(SFT_F32, N, H, 1, 1);
    Att t = {N, M, H, K, D, window, begin, (float)(1 / sqrt((double)D))};
    double *ry = doubles(N * H * D), *rl = doubles(N * H), *size = doubles(SFT_MAX(N * H, M * K) * D);
    attention(ry, rl, q.x, k.x, v.x, &t);
    RUN(attention_forward, y.t, lse.t, q.t, k.t, v.t, begin, (float)t.scale, window);
    // Scores reach 4 D scale and are wrong by some 2^-24 of that; so are, relatively, the probabilities.
    for (int64_t i = 0; i < SFT_MAX(N * H, M * K) * D; i++) size[i] = 4 * sqrt((double)D) + 4;
    check("attention", y.t, ry, size, 1);
    check("attention lse", lse.t, rl, size, 1);
    if (M == N) {
        Val dy = value(type, N, H, D, 1), dq = value(type, N, H, D, 1), dk = value(type, M, K, D, 1), dv = value(type, M, K, D, 1);
        double *rq = doubles(N * H * D), *rk = doubles(M * K * D), *rv = doubles(M * K * D), *yx = doubles(N * H * D);
        // backward is given the y that was stored, rounded as it is
        for (int64_t i = 0; i < N * H * D; i++) {
            float f;
            sft_to_f32(&f, (char *)y.t.data + (size_t)i * sft_type_size(type), type, 1), yx[i] = f;
        }
        attention_grad(rq, rk, rv, dy.x, yx, rl, q.x, k.x, v.x, &t);
        RUN(attention_backward, dq.t, dk.t, dv.t, dy.t, y.t, lse.t, q.t, k.t, v.t, begin, end, (float)t.scale, window);
        // dP - delta is up to 2 sqrt(D)-ish and cancels; dk and dv sum over group and queries with weights that sum to about group
        double more = 4.0 * (double)(H / K);
        check("attention dq", dq.t, rq, size, 4);
        check("attention dk", dk.t, rk, size, more);
        check("attention dv", dv.t, rv, size, more);
        free(rq), free(rk), free(rv), free(yx);
        DROP(dy, dq, dk, dv);
    }
    free(ry), free(rl), free(size), free(begin), free(end);
    DROP(q, k, v, y, lse);
}

static void attention_works(void **state) {
    (void)state;
    for (int type = 0; type < SFT_TYPES; type++) {
        attention_case((SftType)type, 1, 1, 2, 1, 8, 1, 0);     // one token
        attention_case((SftType)type, 0, 0, 2, 1, 8, 1, 0);     // none
        attention_case((SftType)type, 37, 37, 4, 2, 16, 37, 0);
        attention_case((SftType)type, 77, 77, 3, 1, 10, 19, 0); // documents, D that fits no tile
        attention_case((SftType)type, 161, 161, 2, 2, 24, 161, 0);
        attention_case((SftType)type, 150, 150, 2, 1, 8, 80, 9); // window
        attention_case((SftType)type, 300, 300, 1, 1, 4, 140, 100);
        attention_case((SftType)type, 1, 70, 4, 2, 16, 1, 0);    // generation: few queries, many keys
        attention_case((SftType)type, 5, 203, 2, 1, 16, 5, 33);
    }
    attention_case(SFT_F32, 40, 40, 2, 1, 256, 13, 0);
    attention_case(SFT_F32, 300, 300, 2, 1, 64, 1, 0);
}

SFT_TEST_MAIN(cmocka_unit_test(formulae_are_accurate), cmocka_unit_test(matmul_works), cmocka_unit_test(attention_works))

/* [5] ops: every operation against float64 formulas, at shapes that fit no tile, in every storage type; gradients
   against central differences of those formulas; the same bits with 1, 2 and 3 threads; workspace exactly as planned.

   A value is a tensor and its elements as doubles, rounded to the tensor's type, so that a reference starts from the
   very numbers that the op sees. What may differ is then the op's own arithmetic. The tolerance of one output is
       half a unit of the output's type (its one rounding) * |reference|  +  4 * 2^-24 * size
   where size is the sum of the absolute values of the terms that make the output: n terms added in fp32 in any order
   differ by about sqrt(n) 2^-24 times their root mean square, which is less than 2^-24 size; exp, erf and division
   inside the terms add a few units of 2^-24 each.

   With -DSFT_TEST_CUDA the same tests, shapes and tolerances are sft_cuda's: tensors lie on the GPU, ops run on a
   stream, and of test/emu the whole runs in several orders of threads and streams, which must not change a bit. */
#include "test.h"

typedef struct {
    SftTensor t; // where the ops find it
    void *base;  // of the memory; t begins `shift` elements behind it
    double *x;
    int64_t n;
} Val;

#ifdef SFT_TEST_CUDA
#include <sys/mman.h>
#include <sys/wait.h>
void *test_gpu_stream(void), *test_gpu_alloc(size_t bytes), test_gpu_free(void *p);
void test_gpu_copy(void *to, const void *from, size_t bytes);
int test_gpu_emulated(void), test_gpu_watched(void), test_gpu_races(void);
#define TESTED sft_cuda
#define STREAM test_gpu_stream()
static void *memory(size_t bytes) { return test_gpu_alloc(bytes); }
static void release(void *p) { test_gpu_free(p); }
static void copy(void *to, const void *from, size_t bytes) { test_gpu_copy(to, from, bytes); }
#else
#define TESTED sft_cpu
#define STREAM NULL
// exactly as long as it is, so that AddressSanitizer sees the first byte beyond
static void *memory(size_t bytes) { return sft_alloc(bytes); }
static void release(void *p) { free(p); }
static void copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
#endif
// n items where the ops find them, and back.
static void *put(const void *from, size_t bytes) {
    void *p = memory(bytes);
    copy(p, from, bytes);
    return p;
}
static const int32_t *indices(const int32_t *x, int64_t n) { return put(x, (size_t)n * 4); }

static int64_t shift;    // 1: tensors that begin on no more than the size of an element
/* Is a shape tried in this type? In all, and of tensors that begin anywhere in every third pair: they take the code of
   rows that do, which each type has met at odd widths; what is new is the beginning, at each shape and in each type. */
static bool tried(int shape, int type) { return !shift || (shape + type) % 3 == 0; }
#define FOR_TYPES(shape) for (int type = 0; type < SFT_TYPES; type++) if (tried(shape, type))
static uint64_t counter; // every value is different, and the same in every run
static double random_number(void) { return 2 * (double)sft_uniform(sft_random(7, 0, 0, counter++)) - 1; }
static const double half_unit[SFT_TYPES] = {0x1p-24, 0x1p-8, 0x1p-11};

static double *doubles(int64_t n) { return SFT_NEW(double, n + 1); }
// The tensor becomes v.x, and v.x what the tensor's type keeps of it; back: the tensor's elements.
static void set(Val v) {
    const size_t size = sft_type_size(v.t.type);
    char *host = sft_alloc((size_t)v.n * size);
    for (int64_t i = 0; i < v.n; i++) {
        float f = (float)v.x[i];
        sft_from_f32(host + (size_t)i * size, v.t.type, &f, 1), sft_to_f32(&f, host + (size_t)i * size, v.t.type, 1);
        v.x[i] = f;
    }
    copy(v.t.data, host, (size_t)v.n * size);
    free(host);
}
static float *get(SftTensor t) {
    const int64_t n = sft_size(t);
    void *host = sft_alloc((size_t)n * sft_type_size(t.type));
    float *x = SFT_NEW(float, n + 1);
    copy(host, t.data, (size_t)n * sft_type_size(t.type));
    sft_to_f32(x, host, t.type, n);
    free(host);
    return x;
}
static Val value(SftType type, int64_t d0, int64_t d1, int64_t d2, double scale) {
    Val v = {sft_tensor(NULL, type, d0, d1, d2), NULL, NULL, d0 * d1 * d2};
    v.x = doubles(v.n);
    for (int64_t i = 0; i < v.n; i++) v.x[i] = scale * random_number();
    v.base = memory((size_t)(v.n + shift) * sft_type_size(type));
    v.t.data = (char *)v.base + (size_t)shift * sft_type_size(type);
    set(v);
    return v;
}
static const Val none = {0};
static void drop(Val v) {
    if (v.base) release(v.base);
    free(v.x);
}
#define DROP(...) do { Val all[] = {__VA_ARGS__}; for (int d = 0; d < SFT_COUNT(all); d++) drop(all[d]); } while (0)

#define ANYTHING 1e300 // what an op may leave as it likes
static uint64_t fingerprint; // of every output that was checked, in order
static void check(const char *what, SftTensor got, const double *want, const double *size, double factor) {
    int64_t n = sft_size(got);
    float *x = get(got);
    for (int64_t i = 0; i < n; i++) {
        if (want[i] == ANYTHING) continue;
        const float f = x[i];
        fingerprint = (fingerprint ^ sft_f32_bits(f)) * 0x100000001b3u;
        double tolerance = half_unit[got.type] * 1.01 * fabs(want[i]) +
                           4 * 0x1p-24 * factor * (size ? size[i] : fabs(want[i])) +
                           (got.type == SFT_F16 ? 0x1p-25 : 1e-37);
        if (!(fabs((double)f - want[i]) <= tolerance))
            fail_msg("%s, %s [%ld,%ld,%ld], element %ld: got %.9g, want %.9g, tolerance %.3g", what,
                     sft_type_name(got.type), (long)got.dim[0], (long)got.dim[1], (long)got.dim[2], (long)i, (double)f,
                     want[i], tolerance);
    }
    free(x);
}

// Runs an op in exactly the workspace that it plans. That is freed when the next op begins: to free waits for all
// streams of a GPU, and what the op has done on another stream than its own must not look done.
static void *workspace;
#define RUN(op, ...)                                                                                                   \
    do {                                                                                                               \
        SftArena plan = {.name = "plan"}, real = {.name = #op};                                                        \
        SftCtx ctx = {&TESTED, STREAM, &plan, 0, 0};                                                                   \
        TESTED.op(&ctx, __VA_ARGS__);                                                                                  \
        assert_int_equal(plan.used, 0);                                                                                \
        release(workspace);                                                                                            \
        real.size = plan.peak, real.base = memory(plan.peak);                                                          \
        ctx.work = &real;                                                                                              \
        TESTED.op(&ctx, __VA_ARGS__);                                                                                  \
        assert_int_equal(real.used, 0);                                                                                \
        workspace = real.base;                                                                                         \
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
        if (fabs(at) < 5)
            WORST(6, sft_normal(-fabsf(x), &density), 0.5 * erfc(fabs((double)x) / sqrt(2)),
                  0.5 * erfc(fabs((double)x) / sqrt(2)));
    }
    const double bound[7] = {1e-7, 1e-7, 3e-7, 1e-7, 3e-7, 1e-6, 1e-6}; // what sft.h promises
    for (int i = 0; i < 7; i++)
        if (!(worst[i] < bound[i])) fail_msg("formula %d: error %g", i, worst[i]);
    assert_true(sft_exp(-INFINITY) == 0 && sft_exp(-88) == 0 && sft_exp(89) == INFINITY && isnan(sft_exp(NAN)) &&
                sft_exp(0) == 1);
    assert_true(isnan(sft_gelu(NAN)) && isnan(sft_silu(NAN)) && sft_silu(-200) == 0 && sft_gelu(-40) == 0 &&
                sft_gelu(40) == 40);
}

// --- matmul --------------------------------------------------------------------------------------------------------
/* out[M,N], lines ld apart, += sum over k of a(i,k) b(j,k); size: the sum of absolute values, and for the few sums that
   are large, most of whose terms have one sign, what is lost on the way: K sums that grow to |s|, each rounded by up to
   2^-24 of it, are off by sqrt(K) / 3 of 2^-24 |s| in the mean. Three times that; check takes all 4 times. */
static void product(double *out, double *size, int64_t ld, const double *a, int64_t ar, int64_t ac, const double *b,
                    int64_t br, int64_t bc, int64_t M, int64_t N, int64_t K) {
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            double s = 0, z = 0;
            for (int64_t k = 0; k < K; k++) {
                double t = a[i * ar + k * ac] * b[j * br + k * bc];
                s += t, z += fabs(t);
            }
            out[i * ld + j] += s, size[i * ld + j] += z + sqrt((double)K) / 4 * fabs(out[i * ld + j]);
        }
}

// r: the side's depth, 0: no side
static void matmul_case(SftType type, int64_t N, int64_t I, int64_t O, int64_t r, SftAct a, bool extras) {
    const int64_t Op = extras ? O : (O + 7) / 8 * 8; // y and dy may be wider than what is multiplied
    const float scale = extras ? 0.3f : 1;
    Val x = value(type, N, I, 1, 1), w = value(type, O, I, 1, 1), y = value(type, N, Op, 1, 1),
        pre = extras ? value(type, N, O, 1, 1) : none;
    Val bias = extras ? value(type, O, 1, 1, 1) : none, dy = value(type, N, Op, 1, 1), dx = value(type, N, I, 1, 1),
        dpre = value(type, N, I, 1, 1);
    Val dw = value(SFT_F32, O, I, 1, 1), db = value(SFT_F32, O, 1, 1, 1);
    Val u = r ? value(type, N, r, 1, 1) : none, B = r ? value(type, O, r, 1, 1) : none;
    Val du = r ? value(type, N, r, 1, 1) : none, A = r ? value(type, r, I, 1, 1) : none;
    double *z = doubles(N * Op), *size = doubles(N * Op);
    product(z, size, Op, x.x, I, 1, w.x, I, 1, N, O, I);
    product(z, size, Op, u.x, r, 1, B.x, r, 1, N, O, r);
    for (int64_t i = 0; i < N * Op; i++) z[i] *= scale, size[i] *= scale;
    for (int64_t i = 0; extras && i < N * O; i++) z[i] += bias.x[i % O], size[i] += fabs(bias.x[i % O]);
    RUN(matmul_forward, y.t, pre.t, x.t, w.t, (SftSide){u.t, B.t}, bias.t, extras ? y.t : SFT_NONE, // y is the residual
        scale, a);
    if (extras) check("matmul pre", pre.t, z, size, 1);
    for (int64_t i = 0; i < N * Op; i++) {
        z[i] = i % Op >= O ? ANYTHING : act(z[i], a) + (extras ? y.x[i] : 0);
        size[i] += 1 + fabs(z[i]);
    }
    check("matmul", y.t, z, size, 1);
    free(z), free(size);

    z = doubles(N * I), size = doubles(N * I);
    product(z, size, I, dy.x, Op, 1, w.x, 1, I, N, I, O);
    product(z, size, I, du.x, r, 1, A.x, 1, I, N, I, r);
    for (int64_t i = 0; i < N * I; i++) {
        double d = scale * act_grad(dpre.x[i], a);
        z[i] = z[i] * d + (extras ? dx.x[i] : 0), size[i] = size[i] * (fabs(d) + 1) + fabs(dx.x[i]);
    }
    RUN(matmul_backward_x, dx.t, dy.t, w.t, (SftSide){du.t, A.t}, a == SFT_LINEAR ? SFT_NONE : dpre.t, scale, a,
        extras);
    check("matmul dx", dx.t, z, size, 1);
    free(z), free(size);

    z = doubles(O * I), size = doubles(O * I);
    product(z, size, I, dy.x, 1, Op, x.x, 1, I, O, I, N);
    for (int64_t i = 0; i < O * I; i++) z[i] += dw.x[i], size[i] += fabs(dw.x[i]);
    double *sum = doubles(O), *sum_size = doubles(O);
    for (int64_t o = 0; o < O; o++) sum[o] = db.x[o], sum_size[o] = 1;
    for (int64_t i = 0; i < N * O; i++) sum[i % O] += dy.x[i], sum_size[i % O] += fabs(dy.x[i]);
    RUN(matmul_backward_w, dw.t, extras ? db.t : SFT_NONE, dy.t, x.t);
    check("matmul dw", dw.t, z, size, 1);
    if (extras) check("matmul dbias", db.t, sum, sum_size, 1);
    free(z), free(size), free(sum), free(sum_size);
    DROP(x, w, y, pre, bias, dy, dx, dpre, dw, db, u, B, du, A);
}

static void matmul_works(void **state) {
    (void)state;
    static const int shape[][3] = {{0, 5, 7},     {1, 1, 1},     {1, 97, 33},  {3, 1500, 70},
                                   {4, 33, 97},   {5, 33, 97},   {64, 64, 64}, {97, 130, 31},
                                   {130, 7, 257}, {17, 801, 35}, {9, 35, 801}, {801, 9, 5}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s) {
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], 0, SFT_LINEAR, false);
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], 0, (SftAct)(1 + s % 2), true);
        }
}
/* Lines of whole chunks of 16 bytes, which a GPU gives to tensor cores: the edges of narrow and wide tiles; k in parts,
   forward, for dx and for dw, whose k is odd; more than 8 rows of tiles, and a padded line. */
static void tensor_cores_work(void **state) {
    (void)state;
    static const int shape[][3] = {{136, 392, 136}, {130, 72, 392}, {24, 1032, 40}, {20, 40, 1032}, {1033, 24, 37}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        for (int type = SFT_BF16; type < SFT_TYPES; type++) {
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], 0, SFT_LINEAR, false);
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], 8 + 8 * s, (SftAct)(1 + s % 2), true);
        }
}
static void matmul_with_a_side_works(void **state) {
    (void)state; // N, I, O, r: sums that a GPU cuts into parts, too, and an r that is most of k
    static const int shape[][4] = {{0, 5, 7, 3},     {1, 1, 1, 1},      {1, 97, 33, 7},    {1, 64, 40, 8},
                                   {3, 1500, 70, 8}, {4, 33, 97, 1},    {7, 40, 48, 16},   {5, 33, 97, 64},
                                   {17, 801, 35, 8}, {9, 35, 801, 100}, {97, 130, 31, 7},  {64, 64, 64, 16},
                                   {130, 8, 264, 8}, {37, 1040, 72, 8}, {35, 72, 1032, 16}, {130, 72, 40, 200}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s)
            matmul_case((SftType)type, shape[s][0], shape[s][1], shape[s][2], shape[s][3], (SftAct)(s % 3), s % 2);
}
static void large_matmul_works(void **state) { // more than one block of rows, of columns, of depth; half a bf16 pair
    (void)state;
#ifdef SFT_TEST_CUDA
    const int64_t rows = 1100, columns = 150, more = 80; // blocks are smaller there: 8 x 128 rows, 128 columns
#else
    const int64_t rows = 2100, columns = 2200, more = 1600;
#endif
    matmul_case(SFT_F32, rows, 1, columns, 0, SFT_LINEAR, false);
    matmul_case(SFT_BF16, 9, 2111, 2, 33, SFT_LINEAR, true);
    matmul_case(SFT_F32, 7, 2111, more / 2, 0, SFT_GELU, true);
    matmul_case(SFT_BF16, rows - 49, 2, more, 1, SFT_GELU_TANH, true);
}

// --- attention -----------------------------------------------------------------------------------------------------
typedef struct {
    int64_t N, M, H, K, D, window;
    const int32_t *begin;
    double scale;
} Att;
// `terms`: the sums of the absolute values of the terms.
static void attention(double *y, double *terms, double *lse, const double *q, const double *k, const double *v,
                      const Att *t) {
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
                double s = 0, z = 0;
                for (int64_t j = low; j <= high; j++) {
                    const double x = exp(p[j] - most) / sum * v[(j * t->K + g) * t->D + d];
                    s += x, z += fabs(x);
                }
                y[(i * t->H + h) * t->D + d] = s, terms[(i * t->H + h) * t->D + d] = z;
            }
        }
    free(p);
}
static void attention_grad(double *dq, double *dk, double *dv, double *zq, double *zk, double *zv, const double *dy,
                           const double *y, const double *lse, const double *q, const double *k, const double *v,
                           const Att *t) {
    for (int64_t i = 0; i < t->N; i++)
        for (int64_t h = 0; h < t->H; h++) {
            int64_t g = h / (t->H / t->K), low = t->begin[i], at = (i * t->H + h) * t->D;
            if (t->window && i - t->window + 1 > low) low = i - t->window + 1;
            for (int64_t j = low; j <= i; j++) {
                int64_t kat = (j * t->K + g) * t->D;
                double s = 0, dp = 0, delta = 0;
                for (int64_t d = 0; d < t->D; d++)
                    s += q[at + d] * k[kat + d], dp += dy[at + d] * v[kat + d], delta += dy[at + d] * y[at + d];
                double p = exp(s * t->scale - lse[i * t->H + h]), ds = p * (dp - delta) * t->scale;
                for (int64_t d = 0; d < t->D; d++) {
                    dq[at + d] += ds * k[kat + d], dk[kat + d] += ds * q[at + d], dv[kat + d] += p * dy[at + d];
                    zq[at + d] += fabs(ds * k[kat + d]), zk[kat + d] += fabs(ds * q[at + d]);
                    zv[kat + d] += fabs(p * dy[at + d]);
                }
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

/* What the tolerance goes by: `scores` for the fp32 sums. Tensor cores take probabilities and their gradients rounded
   to the tensors' own type: each of the terms may be off by half a unit of it. */
static void attention_size(double *size, double scores, const double *terms, SftType type, int64_t n) {
#ifdef SFT_TEST_CUDA
    const double rounded = type == SFT_F32 ? 0 : half_unit[type] / (4 * 0x1p-24);
#else
    const double rounded = 0 * (double)type;
#endif
    for (int64_t i = 0; i < n; i++) size[i] = scores + (terms ? rounded * terms[i] : 0);
}

static void attention_case(SftType type, int64_t N, int64_t M, int64_t H, int64_t K, int64_t D, int64_t document,
                           int64_t window) {
    int32_t *end, *begin = documents(&end, N, document);
    Val q = value(type, N, H, D, 2), k = value(type, M, K, D, 2), v = value(type, M, K, D, 1),
        y = value(type, N, H, D, 1), lse = value(SFT_F32, N, H, 1, 1);
    Att t = {N, M, H, K, D, window, begin, (float)(1 / sqrt((double)D))};
    const int64_t most = SFT_MAX(N * H, M * K) * D;
    double *ry = doubles(N * H * D), *rl = doubles(N * H), *size = doubles(most), *terms = doubles(most);
    attention(ry, terms, rl, q.x, k.x, v.x, &t);
    const int32_t *first = indices(begin, N), *last = indices(end, N);
    RUN(attention_forward, y.t, lse.t, q.t, k.t, v.t, first, (float)t.scale, window);
    // Scores reach 4 D scale and are wrong by some 2^-24 of that; so are, relatively, the probabilities.
    const double scores = 4 * sqrt((double)D) + 4;
    attention_size(size, scores, terms, type, most);
    check("attention", y.t, ry, size, 1);
    attention_size(size, scores, NULL, type, most);
    check("attention lse", lse.t, rl, size, 1);
    if (M == N) {
        Val dy = value(type, N, H, D, 1), dq = value(type, N, H, D, 1), dk = value(type, M, K, D, 1),
            dv = value(type, M, K, D, 1);
        double *rq = doubles(N * H * D), *rk = doubles(M * K * D), *rv = doubles(M * K * D), *yx = doubles(N * H * D);
        double *zq = doubles(N * H * D), *zk = doubles(M * K * D), *zv = doubles(M * K * D);
        // backward is given the y that was stored, rounded as it is
        float *stored = get(y.t);
        for (int64_t i = 0; i < N * H * D; i++) yx[i] = stored[i];
        attention_grad(rq, rk, rv, zq, zk, zv, dy.x, yx, rl, q.x, k.x, v.x, &t);
        RUN(attention_backward, dq.t, dk.t, dv.t, dy.t, y.t, lse.t, q.t, k.t, v.t, first, last, (float)t.scale, window);
        // dP - delta is up to 2 sqrt(D)-ish and cancels; dk and dv sum over group and queries with weights that sum to
        // about group
        const double group = (double)(H / K);
        attention_size(size, 4 * scores, zq, type, N * H * D);
        check("attention dq", dq.t, rq, size, 1);
        attention_size(size, 4 * group * scores, zk, type, M * K * D);
        check("attention dk", dk.t, rk, size, 1);
        attention_size(size, 4 * group * scores, zv, type, M * K * D);
        check("attention dv", dv.t, rv, size, 1);
        free(zq), free(zk), free(zv);
        free(rq), free(rk), free(rv), free(yx), free(stored);
        DROP(dy, dq, dk, dv);
    }
    free(ry), free(rl), free(size), free(terms), free(begin), free(end), release((void *)first), release((void *)last);
    DROP(q, k, v, y, lse);
}

static void attention_works(void **state) {
    (void)state;
    static const struct { int N, M, H, K, D, document, window;
    } cases[] = {
        {1, 1, 2, 1, 8, 1, 0},         // one token
        {0, 0, 2, 1, 8, 1, 0},         // none
        {37, 37, 4, 2, 16, 37, 0},
        {77, 77, 3, 1, 10, 19, 0},     // documents, D that fits no tile
        {161, 161, 2, 2, 24, 161, 0},
        {150, 150, 2, 1, 8, 80, 9},    // window
        {300, 300, 1, 1, 4, 140, 100},
        {1, 70, 4, 2, 16, 1, 0},       // generation: few queries, many keys
        {5, 203, 2, 1, 16, 5, 33},
        {16, 130, 3, 1, 256, 16, 0},
        {1, 300, 8, 2, 72, 1, 0},
        {20, 90, 4, 2, 64, 20, 0},     // a longer prompt behind a cache
        {33, 100, 2, 1, 40, 33, 50},
        {40, 40, 2, 1, 32, 25, 0},     // heads of models, and such as fit no tile
        {70, 70, 4, 2, 40, 33, 0},
        {150, 150, 2, 1, 64, 90, 0},
        {66, 66, 2, 2, 72, 66, 20},
        {65, 65, 3, 1, 80, 30, 0},
        {140, 140, 1, 1, 128, 140, 0},
        {50, 50, 2, 1, 136, 31, 0},
        {70, 70, 2, 1, 256, 70, 30},
        {20, 20, 256, 128, 8, 13, 0},  // so many heads that a block has all of a group
    };
    for (int s = 0; s < SFT_COUNT(cases); s++)
        FOR_TYPES(s)
            attention_case((SftType)type, cases[s].N, cases[s].M, cases[s].H, cases[s].K, cases[s].D, cases[s].document,
                           cases[s].window);
    attention_case(SFT_F32, 40, 40, 2, 1, 256, 13, 0);
    attention_case(SFT_F32, 300, 300, 2, 1, 64, 1, 0);
}

// --- gradients by central differences ------------------------------------------------------------------------------
// A reference in float64 as a function of its inputs: out[] from in[0..3]; `arg` are the dimensions.
typedef void Function(double *out, double *const *in, const void *arg);
// d sum(dy * f(in)) / d in[which]. With h = 1e-4 the error is about h^2 of the third derivative and 1e-16 / h: 1e-8.
static double *difference(Function *f, double **in, int which, int64_t n, const double *dy, int64_t outs,
                          const void *arg) {
    double *g = doubles(n), *a = doubles(outs), *b = doubles(outs), h = 1e-4;
    for (int64_t i = 0; i < n; i++) {
        double x = in[which][i];
        in[which][i] = x + h, f(a, in, arg);
        in[which][i] = x - h, f(b, in, arg);
        in[which][i] = x;
        for (int64_t o = 0; o < outs; o++) g[i] += dy[o] * (a[o] - b[o]) / (2 * h);
    }
    free(a), free(b);
    return g;
}
static double *constant(int64_t n, double x) {
    double *c = doubles(n);
    for (int64_t i = 0; i < n; i++) c[i] = x;
    return c;
}
static void add_to(double *a, const double *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) a[i] += b[i];
}

// --- LoRA: a side and a scale make a layer, whose gradients are those of its formula ---------------------------------
typedef struct { int64_t N, I, O, r; double s; } Lora;
static void lora(double *y, double *const *in, const void *arg) { // y = x w^T + s x A^T B^T, x = gelu(in[0]); A, B, w
    const Lora *t = arg;
    const int64_t N = t->N, I = t->I, O = t->O, r = t->r;
    double *x = doubles(N * I), *u = doubles(N * r), *size = doubles(N * (O + r)); // which is not looked at
    for (int64_t i = 0; i < N * I; i++) x[i] = act(in[0][i], SFT_GELU);
    for (int64_t i = 0; i < N * O; i++) y[i] = 0;
    product(u, size, r, x, I, 1, in[1], I, 1, N, r, I);
    for (int64_t i = 0; i < N * r; i++) u[i] *= t->s;
    product(y, size, O, x, I, 1, in[3], I, 1, N, O, I);
    product(y, size, O, u, r, 1, in[2], r, 1, N, O, r);
    free(x), free(u), free(size);
}
static void lora_gradient_is_right(void **state) {
    (void)state;
    const Lora t = {6, 11, 9, 3, 0.7f};
    Val pre = value(SFT_F32, t.N, t.I, 1, 1), x = value(SFT_F32, t.N, t.I, 1, 1), w = value(SFT_F32, t.O, t.I, 1, 1),
        A = value(SFT_F32, t.r, t.I, 1, 1), B = value(SFT_F32, t.O, t.r, 1, 1), dy = value(SFT_F32, t.N, t.O, 1, 1);
    Val u = value(SFT_F32, t.N, t.r, 1, 1), du = value(SFT_F32, t.N, t.r, 1, 1), y = value(SFT_F32, t.N, t.O, 1, 1),
        dx = value(SFT_F32, t.N, t.I, 1, 1), dA = value(SFT_F32, t.r, t.I, 1, 0), dB = value(SFT_F32, t.O, t.r, 1, 0);
    for (int64_t i = 0; i < x.n; i++) x.x[i] = act(pre.x[i], SFT_GELU);
    set(x);
    RUN(matmul_forward, u.t, SFT_NONE, x.t, A.t, SFT_NO_SIDE, SFT_NONE, SFT_NONE, (float)t.s, SFT_LINEAR);
    RUN(matmul_forward, y.t, SFT_NONE, x.t, w.t, (SftSide){u.t, B.t}, SFT_NONE, SFT_NONE, 1, SFT_LINEAR);
    RUN(matmul_backward_x, du.t, dy.t, B.t, SFT_NO_SIDE, SFT_NONE, (float)t.s, SFT_LINEAR, false);
    RUN(matmul_backward_w, dB.t, SFT_NONE, dy.t, u.t);
    RUN(matmul_backward_w, dA.t, SFT_NONE, du.t, x.t);
    RUN(matmul_backward_x, dx.t, dy.t, w.t, (SftSide){du.t, A.t}, pre.t, 1, SFT_GELU, false);
    double *in[4] = {pre.x, A.x, B.x, w.x}, *size = constant(400, 200); // of up to N I r terms, all below 1
    lora(y.x, in, &t);
    check("lora y", y.t, y.x, size, 1);
    const SftTensor got[3] = {dx.t, dA.t, dB.t};
    for (int which = 0; which < 3; which++) {
        double *g = difference(lora, in, which, sft_size(got[which]), dy.x, y.n, &t);
        check("lora gradient", got[which], g, size, 1);
        free(g);
    }
    free(size);
    DROP(pre, x, w, A, B, dy, u, du, y, dx, dA, dB);
}

// --- norms ---------------------------------------------------------------------------------------------------------
typedef struct { int64_t rows, C; bool centred, bias; double eps; } Norm;
static double norm_of_row(double *u, const double *x, const Norm *t) { // u = (x - mean) rstd; rstd
    double mean = 0, square = 0;
    for (int64_t j = 0; j < t->C; j++) mean += t->centred ? x[j] / (double)t->C : 0;
    for (int64_t j = 0; j < t->C; j++) square += (x[j] - mean) * (x[j] - mean) / (double)t->C;
    for (int64_t j = 0; j < t->C; j++) u[j] = (x[j] - mean) / sqrt(square + t->eps);
    return 1 / sqrt(square + t->eps);
}
static void norm(double *y, double *const *in, const void *arg) { // x, w, b
    const Norm *t = arg;
    for (int64_t i = 0; i < t->rows; i++) {
        norm_of_row(y + i * t->C, in[0] + i * t->C, t);
        for (int64_t j = 0; j < t->C; j++)
            y[i * t->C + j] = y[i * t->C + j] * in[1][j] + (t->bias ? in[2][j] : 0);
    }
}
static void norm_grad(double *gx, double *gw, double *gb, double *const *in, const double *dy, const Norm *t) {
    double *u = doubles(t->C);
    for (int64_t i = 0; i < t->rows; i++) {
        const double rstd = norm_of_row(u, in[0] + i * t->C, t), *d = dy + i * t->C;
        double g1 = 0, g2 = 0;
        for (int64_t j = 0; j < t->C; j++) {
            gw[j] += d[j] * u[j], gb[j] += d[j];
            g1 += t->centred ? d[j] * in[1][j] / (double)t->C : 0, g2 += d[j] * in[1][j] * u[j] / (double)t->C;
        }
        for (int64_t j = 0; j < t->C; j++) gx[i * t->C + j] = rstd * (d[j] * in[1][j] - g1 - u[j] * g2);
    }
    free(u);
}
// The formula above is compared with differences, which are good to h^2 = 1e-8 of the third derivative: some rstd^3.
static void norm_grad_is_right(double *const *g, double **in, const double *dy, const Norm *t) {
    const int64_t n[3] = {t->rows * t->C, t->C, t->bias ? t->C : 0};
    double *u = doubles(t->C), rstd = 1;
    for (int64_t i = 0; i < t->rows; i++) rstd = fmax(rstd, norm_of_row(u, in[0] + i * t->C, t));
    free(u);
    for (int which = 0; which < 3; which++) {
        double *d = difference(norm, in, which, n[which], dy, n[0], t);
        for (int64_t i = 0; i < n[which]; i++) assert_true(fabs(d[i] - g[which][i]) < 1e-7 * (1 + pow(rstd, 3)));
        free(d);
    }
}
static void norm_case(SftType type, int64_t rows, int64_t C, bool centred, bool bias, bool residual) {
    const Norm t = {rows, C, centred, bias, (float)1e-5};
    Val x = value(type, rows, C, 1, 2), w = value(type, C, 1, 1, 1), b = bias ? value(type, C, 1, 1, 1) : none,
        y = value(type, rows, C, 1, 1);
    Val stat = value(SFT_F32, rows, centred ? 2 : 1, 1, 1), dy = value(type, rows, C, 1, 1),
        dx = value(type, rows, C, 1, 1);
    Val dw = value(SFT_F32, C, 1, 1, 1), db = bias ? value(SFT_F32, C, 1, 1, 1) : none;
    double *in[3] = {x.x, w.x, b.x}, *want = doubles(rows * C), *size = constant(rows * C, 8),
           *many = constant(C, 8.0 * (double)rows + 8);
    norm(want, in, &t);
    for (int64_t i = 0; i < rows; i++) { // u is wrong by 2^-24 |x| rstd, and dx by that times rstd
        double *u = doubles(C), rstd = norm_of_row(u, x.x + i * C, &t);
        for (int64_t j = 0; j < C; j++) size[i * C + j] += 8 * rstd * rstd;
        free(u);
    }
    if (centred) RUN(layernorm_forward, y.t, stat.t, x.t, w.t, b.t, (float)1e-5);
    else RUN(rmsnorm_forward, y.t, stat.t, x.t, w.t, (float)1e-5);
    check("norm", y.t, want, size, 1);
    double *g[3] = {doubles(rows * C), doubles(C), doubles(C)};
    norm_grad(g[0], g[1], g[2], in, dy.x, &t);
    if (rows * C < 1000) norm_grad_is_right(g, in, dy.x, &t);
    if (residual) add_to(g[0], dx.x, rows * C); // dx is the residual's gradient too
    add_to(g[1], dw.x, C);
    if (bias) add_to(g[2], db.x, C);
    if (centred) RUN(layernorm_backward, dx.t, dw.t, db.t, residual ? dx.t : SFT_NONE, dy.t, x.t, w.t, stat.t);
    else RUN(rmsnorm_backward, dx.t, dw.t, residual ? dx.t : SFT_NONE, dy.t, x.t, w.t, stat.t);
    check("norm dx", dx.t, g[0], size, 2);
    check("norm dw", dw.t, g[1], many, 1);
    if (bias) check("norm db", db.t, g[2], many, 1);
    if (!centred) { // in place, as for the heads' q and k
        RUN(rmsnorm_forward, x.t, stat.t, x.t, w.t, (float)1e-5);
        check("norm in place", x.t, want, size, 1);
    }
    free(want), free(size), free(many), free(g[0]), free(g[1]), free(g[2]);
    DROP(x, w, b, y, stat, dy, dx, dw, db);
}
static void norms_work(void **state) {
    (void)state;
    static const int shape[][2] = {{0, 5}, {1, 3}, {3, 33}, {19, 8}, {35, 17}, {70, 64}, {33, 136}, {21, 1032}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s)
            for (int k = 0; k < 6; k++)
                norm_case((SftType)type, shape[s][0], shape[s][1], k < 4, k < 4 && k & 1, k & 2);
    norm_case(SFT_F32, 1100, 3, false, false, true); // more blocks of 16 rows than the CPU takes,
    norm_case(SFT_BF16, 4500, 8, true, true, true);  // than the GPU takes,
    norm_case(SFT_F16, 19, 8200, true, true, true);  // and a row that does not stay in registers
    norm_case(SFT_F32, 2, 4100, false, false, false);
}

// --- embedding, rows -----------------------------------------------------------------------------------------------
static void embedding_works(void **state) {
    (void)state;
    for (int s = 0; s < 5; s++)
        FOR_TYPES(s)
            for (int learned = 0; learned < 2; learned++) {
                // more than a piece of a row; few ids, so that rows are met again and again
                static const int shape[5][2] = {{0, 8}, {1, 33}, {29, 1030}, {58, 1032}, {2100, 8}};
                enum { V = 11, P = 7 };
                const int64_t N = shape[s][0], C = shape[s][1];
                int32_t ids[2100], pos[2100];
                for (int i = 0; i < 2100; i++) ids[i] = i * i % V, pos[i] = i % P;
                const int32_t *id = indices(ids, N), *at = indices(pos, N);
                Val wte = value((SftType)type, V, C, 1, 1), wpe = learned ? value((SftType)type, P, C, 1, 1) : none,
                    x = value((SftType)type, N, C, 1, 1), dx = value((SftType)type, N, C, 1, 1);
                Val dwte = value(SFT_F32, V, C, 1, 1), dwpe = learned ? value(SFT_F32, P, C, 1, 1) : none;
                double *want = doubles(N * C), *size = constant(V * C, (double)N + 1);
                for (int64_t i = 0; i < N * C; i++)
                    want[i] = wte.x[ids[i / C] * C + i % C] + (learned ? wpe.x[pos[i / C] * C + i % C] : 0);
                RUN(embedding_forward, x.t, wte.t, wpe.t, id, at);
                check("embedding", x.t, want, NULL, 1);
                RUN(embedding_backward, dwte.t, dwpe.t, dx.t, id, at);
                for (int64_t i = 0; i < N * C; i++) {
                    dwte.x[ids[i / C] * C + i % C] += dx.x[i];
                    if (learned) dwpe.x[pos[i / C] * C + i % C] += dx.x[i];
                }
                check("embedding dwte", dwte.t, dwte.x, size, 1);
                if (learned) check("embedding dwpe", dwpe.t, dwpe.x, size, 1);
                free(want), free(size), release((void *)id), release((void *)at);
                DROP(wte, wpe, x, dx, dwte, dwpe);
            }
}

static void rows_and_types_work(void **state) {
    (void)state;
    for (int type = 0; type < SFT_TYPES; type++)
        for (int64_t C = 1; C < 6000; C = C * 9 - 1) { // 8, 71, 638, 5741: one pack, parts of several, several blocks
            const int32_t index[4] = {5, 0, 3, 2}, *rows = indices(index, 4);
            Val x = value((SftType)type, 6, C, 1, 1), y = value((SftType)type, 4, C, 1, 1);
            RUN(gather_rows, y.t, x.t, rows);
            for (int64_t i = 0; i < 4 * C; i++) y.x[i] = x.x[index[i / C] * C + i % C];
            check("gather", y.t, y.x, NULL, 0);
            for (int to = 0; to < SFT_TYPES; to++) {
                Val z = value((SftType)to, 6, C, 1, 1);
                RUN(convert, z.t, x.t);
                check("convert", z.t, x.x, NULL, 0);
                drop(z);
            }
            RUN(scatter_rows, x.t, y.t, rows);
            for (int64_t i = 0; i < 6 * C; i++) x.x[i] = 0;
            for (int64_t i = 0; i < 4 * C; i++) x.x[index[i / C] * C + i % C] = y.x[i];
            check("scatter", x.t, x.x, NULL, 0);
            RUN(zero, y.t);
            for (int64_t i = 0; i < 4 * C; i++) y.x[i] = 0;
            check("zero", y.t, y.x, NULL, 0);
            release((void *)rows);
            DROP(x, y);
        }
}

// --- rotary positions ----------------------------------------------------------------------------------------------
/* cos and sin, times the attention factor, of transformers' ROPE_INIT_FUNCTIONS: see golden/make_rope.py. The angle is
   pos * frequency in fp32, with frequencies that may differ by two units: at pos <= 2500 by 2500 * 2^-22 = 6e-4. */
static void rope_table_is_that_of_transformers(void **state) {
    (void)state;
    json_t *all = sft_json_file("test/golden/rope.json"), *g;
    size_t at;
    json_array_foreach(all, at, g) {
#define GOLD(key) json_number_value(json_object_get(g, key))
        SftArch a = {.D = (int64_t)GOLD("D"),
                     .P = (int64_t)GOLD("P"),
                     .rope = (SftRopeType)GOLD("type"),
                     .rope_theta = GOLD("theta"),
                     .rope_factor = GOLD("factor"),
                     .rope_low = GOLD("low"),
                     .rope_high = GOLD("high"),
                     .rope_original = GOLD("original"),
                     .rope_attention = GOLD("attention"),
                     .rope_beta_fast = GOLD("beta_fast"),
                     .rope_beta_slow = GOLD("beta_slow"),
                     .rope_truncate = GOLD("truncate") != 0};
        // of the document; its last token is compared, beside another document's
        const int32_t length = (int32_t)GOLD("length");
        const int32_t pos[2] = {0, length - 1}, begin[2] = {0, 1}, end[2] = {1, 1 + length};
        Val table = value(SFT_F32, 2, a.D, 1, 1);
        double *size = constant(2 * a.D, length / 2500.0 * 6e-4 / (4 * 0x1p-24) + 4);
        const int32_t *p = indices(pos, 2), *b = indices(begin, 2), *e = indices(end, 2);
        RUN(rope_table, table.t, &a, p, b, e);
        release((void *)p), release((void *)b), release((void *)e);
        for (int64_t j = 0; j < 2 * a.D; j++)
            table.x[j] = j < a.D ? (j < a.D / 2 ? json_number_value(json_object_get(g, "factor_out")) : 0)
                                 : json_number_value(json_array_get(json_object_get(g, "table"), (size_t)(j - a.D)));
        check("rope table", table.t, table.x, size, 1);
        free(size);
        drop(table);
    }
    json_decref(all);
}

typedef struct { int64_t N, H, D; const double *table; } Rope;
static void rope(double *y, double *const *in, const void *arg) {
    const Rope *t = arg;
    for (int64_t i = 0; i < t->N * t->H * t->D; i++) {
        int64_t j = i % t->D, half = t->D / 2, n = i / t->D / t->H;
        double c = t->table[n * t->D + j % half], s = t->table[n * t->D + half + j % half];
        y[i] = in[0][i] * c + (j < half ? -in[0][i + half] : in[0][i - half]) * s;
    }
}
static void rope_turns_and_turns_back(void **state) {
    (void)state;
    static const int shape[][3] = {{0, 2, 8}, {1, 1, 2}, {13, 3, 10}, {5, 6, 128}, {700, 1, 64}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s) {
            Val x = value((SftType)type, shape[s][0], shape[s][1], shape[s][2], 1),
                dx = value((SftType)type, shape[s][0], shape[s][1], shape[s][2], 1),
                table = value(SFT_F32, shape[s][0], shape[s][2], 1, 1);
            const Rope t = {shape[s][0], shape[s][1], shape[s][2], table.x};
            double *in[1] = {x.x}, *want = doubles(x.n), *size = constant(x.n, 2);
            double *g = x.n < 1000 ? difference(rope, in, 0, x.n, dx.x, x.n, &t) : NULL;
            rope(want, in, &t);
            RUN(rope_forward, x.t, table.t);
            check("rope", x.t, want, size, 1);
            RUN(rope_backward, dx.t, table.t);
            if (g) check("rope dx", dx.t, g, size, 1);
            free(want), free(size), free(g);
            DROP(x, dx, table);
        }
}

// --- attention's own gradient, which the large cases above rely on, by differences -----------------------------------
static void attention_of(double *y, double *const *in, const void *arg) {
    const Att *t = arg;
    double *lse = doubles(t->N * t->H);
    double *terms = doubles(t->N * t->H * t->D);
    attention(y, terms, lse, in[0], in[1], in[2], t);
    free(lse), free(terms);
}
static void attention_gradient_is_right(void **state) {
    (void)state;
    int32_t *end, *begin = documents(&end, 13, 8);
    const Att t = {13, 13, 4, 2, 3, 4, begin, 0.7};
    Val q = value(SFT_F32, 13, 4, 3, 2), k = value(SFT_F32, 13, 2, 3, 2), v = value(SFT_F32, 13, 2, 3, 1),
        dy = value(SFT_F32, 13, 4, 3, 1);
    double *in[3] = {q.x, k.x, v.x}, *d[3] = {doubles(q.n), doubles(k.n), doubles(k.n)}, *y = doubles(q.n),
           *lse = doubles(13 * 4), *z = doubles(q.n); // z: sizes, which are not looked at
    attention(y, z, lse, q.x, k.x, v.x, &t);
    attention_grad(d[0], d[1], d[2], z, z, z, dy.x, y, lse, q.x, k.x, v.x, &t);
    for (int which = 0; which < 3; which++) {
        int64_t n = which ? k.n : q.n;
        double *g = difference(attention_of, in, which, n, dy.x, q.n, &t);
        for (int64_t i = 0; i < n; i++) assert_true(fabs(g[i] - d[which][i]) < 1e-6);
        free(g), free(d[which]);
    }
    free(y), free(lse), free(z), free(begin), free(end);
    DROP(q, k, v, dy);
}

// --- SwiGLU, loss, optimizer ---------------------------------------------------------------------------------------
static void swiglu(double *y, double *const *in, const void *arg) {
    for (int64_t i = 0; i < *(const int64_t *)arg; i++) y[i] = in[0][i] * sigmoid(in[0][i]) * in[1][i];
}
static void swiglu_works(void **state) {
    (void)state;
    static const int shape[][2] = {{0, 7}, {1, 1}, {5, 33}, {8, 65}, {9, 4111}, {3, 4112}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s) {
            Val gate = value((SftType)type, shape[s][0], shape[s][1], 1, 6),
                up = value((SftType)type, shape[s][0], shape[s][1], 1, 1),
                dy = value((SftType)type, shape[s][0], shape[s][1], 1, 1),
                y = value((SftType)type, shape[s][0], shape[s][1], 1, 1);
            double *in[2] = {gate.x, up.x}, *want = doubles(y.n), *size = constant(y.n, 12);
            swiglu(want, in, &y.n);
            RUN(swiglu_forward, y.t, gate.t, up.t);
            check("swiglu", y.t, want, size, 1);
            // each output depends on its own two inputs: a difference is one evaluation
            for (int64_t i = 0; i < y.n; i++) {
                double h = 1e-5, x = gate.x[i], u = up.x[i];
                in[0][i] = dy.x[i] * ((x + h) * sigmoid(x + h) - (x - h) * sigmoid(x - h)) / (2 * h) * u;
                in[1][i] = dy.x[i] * x * sigmoid(x);
            }
            RUN(swiglu_backward, gate.t, up.t, dy.t, gate.t, up.t); // in place
            check("swiglu dgate", gate.t, gate.x, size, 1);
            check("swiglu dup", up.t, up.x, size, 1);
            free(want), free(size);
            DROP(gate, up, dy, y);
        }
}

static void cross_entropy_works(void **state) {
    (void)state;
    static const int shape[][3] = {
        {0, 5, 5}, {1, 1, 1}, {3, 9, 9}, {5, 11, 16}, {4, 1023, 1024}, {7, 3079, 3100}, {2, 33001, 33008}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s)
            for (int backward = 0; backward < 2; backward++) {
                int64_t N = shape[s][0], V = shape[s][1], Vp = shape[s][2];
                Val logits = value((SftType)type, N, Vp, 1, 20), loss = value(SFT_F32, N, 1, 1, 1);
                int32_t target[8];
                double *want = doubles(N), *g = doubles(N * Vp), *size = constant(N, 40), *gsize = doubles(N * Vp),
                       scale = backward ? 0.37 : 0;
                for (int64_t i = 0; i < N; i++) {
                    const double *x = logits.x + i * Vp;
                    double sum = 0;
                    target[i] = i % 3 == 1 ? -100 : (int32_t)((i * 997 + V - 1) % V);
                    for (int64_t j = 0; j < V; j++) sum += exp(x[j]);
                    want[i] = target[i] < 0 ? 0 : log(sum) - x[target[i]];
                    // the log-sum-exp, up to 20 + log V, is wrong by 2^-24 of that
                    for (int64_t j = 0; j < V && target[i] >= 0; j++) {
                        g[i * Vp + j] = (float)scale * (exp(x[j]) / sum - (j == target[i]));
                        gsize[i * Vp + j] =
                            40 * scale * exp(x[j]) / sum + (j == target[i]) * scale / 4; // p - 1 is rounded
                    }
                }
                const int32_t *labels = indices(target, N);
                RUN(cross_entropy, loss.t, logits.t, labels, V, (float)scale);
                check("loss", loss.t, want, size, 1);
                check("logits", logits.t, backward ? g : logits.x, gsize, backward);
                free(want), free(g), free(size), free(gsize), release((void *)labels);
                DROP(logits, loss);
            }
}

static void sums_work(void **state) {
    (void)state;
    for (int type = 0; type < SFT_TYPES; type++)
        for (int64_t n = 0; n < 300000; n = 7 * n + 8 + (n > 64)) { // 8, 64, 456: whole packs; 3201 and more: not

            Val x = value((SftType)type, n, 1, 1, 1);
            double sum[2] = {1, 2}, want[2] = {1, 2}, *gpu = memory(sizeof sum);
            for (int64_t i = 0; i < n; i++) want[0] += x.x[i], want[1] += x.x[i] * x.x[i];
            copy(gpu, sum, sizeof sum);
            RUN(sums, gpu, x.t);
            copy(sum, gpu, sizeof sum);
            fingerprint = (fingerprint ^ sft_f32_bits((float)(1e6 * sum[0]))) * 0x100000001b3u;
            assert_true(fabs(sum[0] - want[0]) < 1e-13 * (double)(n + 10) &&
                        fabs(sum[1] - want[1]) < 1e-13 * (double)(n + 10)); // sqrt(3e5) 2^-53 a term
            for (int k = 0; k < 3 && n > 1; k++) {
                x.x[n - 1 - k % 2] = k == 0 ? INFINITY : k == 1 ? -INFINITY : NAN;
                set(x);
                sum[0] = sum[1] = 0;
                copy(gpu, sum, sizeof sum);
                RUN(sums, gpu, x.t);
                copy(sum, gpu, sizeof sum);
                assert_true(!isfinite(sum[0]) && !isfinite(sum[1]));
            }
            release(gpu);
            drop(x);
        }
}

static void clip_works(void **state) {
    (void)state;
    static const struct { double max_norm, scale, bad; } cases[] = {
        {0, 1, 0}, {1, 1, 0}, {100, 1, 0}, {1, 65536, 0}, {0, 65536, 0}, {1, 1, INFINITY}, {0, 8, NAN}};
    for (int i = 0; i < SFT_COUNT(cases); i++)
        for (int n = 1; n < 50; n += 16) {
            double sum[100], squares = 0;
            for (int k = 0; k < 2 * n; k++) sum[k] = k % 2 ? fabs(random_number()) * pow(cases[i].scale, 2) : NAN;
            for (int k = 0; k < n; k++) squares += sum[2 * k + 1];
            if (cases[i].bad != 0) sum[2 * n - 1] = cases[i].bad;
            const double norm = sqrt(squares) / cases[i].scale, most = cases[i].max_norm; // 0.4 to 6
            const double want = (most > 0 && norm > most ? most / (norm + 1e-6) : 1) / cases[i].scale;
            float got = 0, *factor = put(&got, sizeof got);
            double *gpu = put(sum, sizeof sum);
            RUN(clip, factor, gpu, n, most, cases[i].scale);
            copy(&got, factor, sizeof got);
            fingerprint = (fingerprint ^ sft_f32_bits(got)) * 0x100000001b3u;
            assert_true(cases[i].bad != 0 ? isnan(got) : fabs(got - want) <= 0x1p-24 * want);
            release(factor), release(gpu);
        }
}

static void adamw_is_that_of_pytorch(void **state) {
    (void)state;
    for (int type = 0; type < SFT_TYPES; type++)
        for (int64_t n = 0; n < 20000; n = n < 9 ? n + 1 : 9 * n - 1) { // 1 to 9, 80, 719, 6470

            Val w = value(SFT_F32, n, 1, 1, 1), m = value(SFT_F32, n, 1, 1, 0.1), v = value(SFT_F32, n, 1, 1, 0.01),
                grad = value(SFT_F32, n, 1, 1, 8), low = type ? value((SftType)type, n, 1, 1, 1) : none;
            const double lr = 0.01, decay = 0.1, eps = 1e-8, b1 = 0.9, b2 = 0.999, factor = 0.25;
            float f = (float)factor, *scale = put(&f, sizeof f);
            double *size = constant(n, 2);
            const int t = 3;
            for (int64_t i = 0; i < n; i++) v.x[i] = fabs(v.x[i]);
            set(v);
            SftAdam adam = {lr, b1, b2, eps, decay, 1 - pow(b1, t), 1 - pow(b2, t)};
            for (int64_t i = 0; i < n; i++) { // torch/optim/adamw.py, _single_tensor_adamw
                double g = factor * grad.x[i];
                w.x[i] *= 1 - lr * decay;
                m.x[i] += (1 - b1) * (g - m.x[i]);
                v.x[i] = b2 * v.x[i] + (1 - b2) * g * g;
                w.x[i] -= lr / (1 - pow(b1, t)) * m.x[i] / (sqrt(v.x[i]) / sqrt(1 - pow(b2, t)) + eps);
            }
            RUN(adamw, low.t, w.t, m.t, v.t, grad.t, scale, adam);
            check("adamw w", w.t, w.x, size, 1);
            check("adamw m", m.t, m.x, size, 1);
            check("adamw v", v.t, v.x, NULL, 2);
            float *full = get(w.t), *half = type ? get(low.t) : NULL;
            for (int64_t i = 0; i < n && type; i++) {
                sft_from_f32(&f, (SftType)type, full + i, 1), sft_to_f32(&f, &f, (SftType)type, 1);
                assert_true(f == half[i]);
            }
            f = NAN, copy(scale, &f, sizeof f); // a step that is skipped
            RUN(adamw, low.t, w.t, m.t, v.t, grad.t, scale, adam);
            float *after = get(w.t);
            assert_memory_equal(after, full, (size_t)n * sizeof *full);
            check("adamw m, skipped", m.t, m.x, size, 1);
            check("adamw v, skipped", v.t, v.x, NULL, 2);
            free(size), free(full), free(half), free(after), release(scale);
            DROP(w, m, v, grad, low);
        }
}

// --- weights in 4 and 8 bits ---------------------------------------------------------------------------------------
static void dynamic8_is_that_of_bitsandbytes(void **state) {
    (void)state;
    json_t *gold = sft_json_file("test/golden/dynamic8.json"), *map = json_object_get(gold, "map");
    assert_int_equal(json_array_size(map), 256);
    for (int i = 0; i < 256; i++) {
        assert_true(sft_dynamic8(i) == (float)json_number_value(json_array_get(map, (size_t)i)));
        assert_int_equal(sft_dynamic8_code(sft_dynamic8(i)), i);
        assert_int_equal(sft_dynamic8_code(nextafterf(sft_dynamic8(i), -2)), i); // nearer to i than to i - 1
    }
    json_decref(gold);
}
// Is `code` the number of table() that is nearest to x? Both sides are rounded: by less than 1e-6.
static bool nearest(float (*table)(int), int codes, int code, double x) {
    double least = 1e30;
    for (int i = 0; i < codes; i++) least = fmin(least, fabs((double)table(i) - x));
    return fabs((double)table(code) - x) <= least + 1e-6;
}
static void *take(const void *from, int64_t bytes) { // a copy of what an op has written
    void *p = sft_alloc((size_t)bytes + 1);
    copy(p, from, (size_t)bytes);
    return p;
}
static void nf4_case(SftType type, int64_t n, bool doubled) {
    const int64_t blocks = (n + 63) / 64, nests = (blocks + 255) / 256;
    Val w = value(type, n, 1, 1, 1), back = value(type, n, 1, 1, 1);
    for (int64_t i = 0; i < n; i++)
        w.x[i] *= i / 64 % 5 == 3 ? 0 : 0.01 + (double)(i / 64 % 7); // a block of zeros, too
    set(w);
    const SftNf4 q = {memory((size_t)(n + 1) / 2), doubled ? NULL : memory((size_t)blocks * 4),
                      doubled ? memory((size_t)blocks) : NULL, doubled ? memory((size_t)nests * 4) : NULL,
                      doubled ? memory(4) : NULL};
    RUN(nf4_quantize, q, w.t);
    RUN(nf4_dequantize, back.t, q);
    uint8_t *code = take(q.code, (n + 1) / 2), *level = doubled ? take(q.level, blocks) : NULL;
    float *absmax = doubled ? NULL : take(q.absmax, blocks * 4), *nested = doubled ? take(q.nested, nests * 4) : NULL;
    float *offset = doubled ? take(q.offset, 4) : NULL;
    double *most = doubles(blocks), *widest = doubles(nests), mean = 0, *want = doubles(n), *size = doubles(n);
    for (int64_t i = 0; i < n; i++) most[i / 64] = fmax(most[i / 64], fabs(w.x[i]));
    for (int64_t b = 0; b < blocks; b++) mean += most[b] / (double)blocks;
    if (doubled && n) assert_true(fabs(*offset - mean) <= 0x1p-23 * mean);
    for (int64_t b = 0; b < blocks && doubled; b++) widest[b / 256] = fmax(widest[b / 256], fabs(most[b] - *offset));
    for (int64_t b = 0; b < blocks; b++) {
        if (!doubled) assert_true(absmax[b] == most[b]);
        if (!doubled) continue;
        assert_true(fabs(nested[b / 256] - widest[b / 256]) <= 0x1p-23 * (mean + most[b]));
        if (widest[b / 256] > 1e-3 * mean) // else all maxima are the mean, and rounding decides
            assert_true(nearest(sft_dynamic8, 256, level[b], (most[b] - *offset) / nested[b / 256]));
    }
    for (int64_t i = 0; i < n; i++) {
        const int c = i % 2 ? code[i / 2] & 15 : code[i / 2] >> 4;
        const double step = doubled ? (double)sft_dynamic8(level[i / 64]) * nested[i / 64 / 256] : 0;
        if (most[i / 64] > 0) assert_true(nearest(sft_nf4, 16, c, w.x[i] / most[i / 64]));
        want[i] = sft_nf4(c) * (doubled ? step + *offset : absmax[i / 64]);
        size[i] = fabs(want[i]) + (doubled ? fabs(step) + fabs(*offset) : 0);
    }
    check("nf4", back.t, want, size, 1);
    void *const made[5] = {q.code, q.absmax, q.level, q.nested, q.offset};
    for (int k = 0; k < 5; k++) if (made[k]) release(made[k]);
    free(code), free(level), free(absmax), free(nested), free(offset), free(most), free(widest), free(want), free(size);
    DROP(w, back);
}
static void nf4_works(void **state) {
    (void)state;
    for (int type = 0; type < SFT_TYPES; type++)
        for (int doubled = 0; doubled < 2; doubled++) {
            const int64_t n[] = {0, 1, 63, 64, 1000, 10243, 64 * 600}; // more than two nests of 256 blocks
            for (int k = 0; k < SFT_COUNT(n); k++) nf4_case((SftType)type, n[k], doubled);
        }
}
static void int8_works(void **state) {
    (void)state;
    static const int shape[][2] = {{0, 8}, {1, 1}, {5, 33}, {9, 1032}, {3, 4099}};
    for (int s = 0; s < SFT_COUNT(shape); s++)
        FOR_TYPES(s) {
            const int64_t N = shape[s][0], C = shape[s][1];
            Val w = value((SftType)type, N, C, 1, 1), back = value((SftType)type, N, C, 1, 1);
            for (int64_t i = 0; i < N * C; i++) w.x[i] *= i / C == 2 ? 0 : (double)(i / C + 1); // a row of zeros, too
            set(w);
            const SftInt8 q = {memory((size_t)(N * C)), memory((size_t)N * 4)};
            RUN(int8_quantize, q, w.t);
            RUN(int8_dequantize, back.t, q);
            int8_t *code = take(q.code, N * C);
            float *absmax = take(q.absmax, N * 4);
            double *most = doubles(N), *want = doubles(N * C);
            for (int64_t i = 0; i < N * C; i++) most[i / C] = fmax(most[i / C], fabs(w.x[i]));
            for (int64_t i = 0; i < N * C; i++) {
                assert_true(absmax[i / C] == most[i / C]);
                if (most[i / C] > 0) assert_true(fabs(code[i] - 127 * w.x[i] / most[i / C]) < 0.5001);
                want[i] = code[i] * most[i / C] / 127;
            }
            check("int8", back.t, want, NULL, 1);
            release(q.code), release(q.absmax);
            free(code), free(absmax), free(most), free(want);
            DROP(w, back);
        }
}

// --- what holds for all of them --------------------------------------------------------------------------------------
static void (*const everything[])(void **) = {
    matmul_works,        matmul_with_a_side_works,  attention_works, norms_work,   embedding_works,
    rows_and_types_work, rope_turns_and_turns_back, swiglu_works,    cross_entropy_works,
    sums_work,           clip_works,                adamw_is_that_of_pytorch, nf4_works,
    int8_works};
static void unaligned_tensors_work(void **state) {
    shift = 1;
    for (int i = 0; i < SFT_COUNT(everything); i++) everything[i](state);
    shift = 0;
}
#ifndef SFT_TEST_CUDA
static void threads_change_nothing(void **state) {
#ifdef SFT_NO_OPENMP
    (void)state;
    skip();
#else
    uint64_t first = 0;
    int before = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        counter = fingerprint = 0;
        for (int i = 0; i < SFT_COUNT(everything); i++) everything[i](state);
        if (threads == 1) first = fingerprint;
        assert_true(fingerprint == first);
    }
    omp_set_num_threads(before);
#endif
}
#endif

// The plan knows shapes alone: no op may look at data, or at whether there is a bias.
static void planning_needs_no_data(void **state) {
    (void)state;
    SftArena plan = {.name = "plan"};
    SftCtx c = {&TESTED, NULL, &plan, 0, 0};
    SftTensor x = sft_tensor(NULL, SFT_BF16, 40, 64, 1), w = sft_tensor(NULL, SFT_BF16, 100, 64, 1),
              y = sft_tensor(NULL, SFT_BF16, 40, 100, 1), f = sft_tensor(NULL, SFT_F32, 40, 64, 1);
    SftTensor q = sft_tensor(NULL, SFT_BF16, 40, 4, 16), k = sft_tensor(NULL, SFT_BF16, 40, 2, 16),
              n = sft_tensor(NULL, SFT_BF16, 64, 1, 1), s = sft_tensor(NULL, SFT_F32, 40, 2, 1);
    SftArch a = {.D = 16, .rope = SFT_ROPE_PLAIN};
    const SftOps *o = &TESTED;
    o->embedding_forward(&c, x, w, SFT_NONE, NULL, NULL), o->embedding_backward(&c, w, SFT_NONE, x, NULL, NULL);
    o->layernorm_forward(&c, x, s, x, n, n, 1e-5f), o->layernorm_backward(&c, x, n, n, x, x, x, n, s);
    o->rmsnorm_forward(&c, x, s, x, n, 1e-5f), o->rmsnorm_backward(&c, x, n, x, x, x, n, s);
    const SftTensor u = sft_tensor(NULL, SFT_BF16, 40, 8, 1);
    const SftSide down = {u, sft_tensor(NULL, SFT_BF16, 100, 8, 1)}, up = {u, sft_tensor(NULL, SFT_BF16, 8, 64, 1)};
    o->matmul_forward(&c, y, y, x, w, down, n, y, 1, SFT_GELU);
    o->matmul_backward_x(&c, x, y, w, up, x, 1, SFT_GELU, true), o->matmul_backward_w(&c, w, n, y, x);
    o->rope_table(&c, f, &a, NULL, NULL, NULL), o->rope_forward(&c, q, f), o->rope_backward(&c, q, f);
    o->attention_forward(&c, q, s, q, k, k, NULL, 1, 0),
        o->attention_backward(&c, q, k, k, q, q, s, q, k, k, NULL, NULL, 1, 0);
    o->swiglu_forward(&c, x, x, x), o->swiglu_backward(&c, x, x, x, x, x), o->cross_entropy(&c, s, y, NULL, 100, 1);
    o->gather_rows(&c, x, x, NULL), o->scatter_rows(&c, x, x, NULL), o->zero(&c, x), o->convert(&c, f, x);
    const SftNf4 four = {0};
    const SftInt8 eight = {0};
    o->nf4_quantize(&c, four, x), o->nf4_dequantize(&c, x, four), o->int8_quantize(&c, eight, x);
    o->int8_dequantize(&c, x, eight);
    o->sums(&c, NULL, x), o->clip(&c, NULL, NULL, 3, 1, 1), o->adamw(&c, x, f, f, f, f, NULL, (SftAdam){0});
    assert_true(plan.used == 0 && plan.peak > 0);
}

#ifdef SFT_TEST_CUDA
/* The peak of a GPU is found by its driver's name; what another chip is called must not find it. The figures, of fp32
   and in Tflop/s, are of NVIDIA's data sheets; 0: no peak is known. A process for each name: a device is asked once. */
static void peaks_are_found_by_whole_names(void **state) {
    (void)state;
    static const struct { const char *name; double single;
    } cases[] = {
        {"NVIDIA H100 80GB HBM3", 67},        {"NVIDIA H100 PCIe", 51},       {"NVIDIA H100 NVL", 60},
        {"NVIDIA H200", 67},                  {"NVIDIA H20", 44},             {"NVIDIA GH200 480GB", 67},
        {"NVIDIA B200", 75},                  {"NVIDIA GB200", 80},           {"NVIDIA A100-SXM4-80GB", 19.5},
        {"NVIDIA A100 80GB PCIe", 19.5},      {"NVIDIA A10", 31.2},           {"NVIDIA A10G", 31.5},
        {"NVIDIA A10M", 0},                   {"NVIDIA L4", 30.3},            {"NVIDIA L40", 90.5},
        {"NVIDIA L40S", 91.6},                {"NVIDIA L400", 0},             {"Tesla T4", 8.1},
        {"NVIDIA T400 4GB", 0},               {"NVIDIA RTX A6000", 38.7},     {"NVIDIA RTX A4000", 0},
        {"NVIDIA GeForce RTX 4090", 82.6},    {"NVIDIA GeForce RTX 4090 D", 0}, {"NVIDIA GeForce RTX 3090", 35.6},
        {"NVIDIA GeForce RTX 3090 Ti", 40},   {"NVIDIA GeForce RTX 3080 Ti", 0}, {"NVIDIA GeForce RTX 5090", 104.8},
        {"NVIDIA GeForce RTX 4080 SUPER", 0}, {"NVIDIA GeForce RTX 4090 Laptop GPU", 0},
        {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0}, {"NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0}, {"emulated sm_90a", 0}};
    if (!test_gpu_emulated()) skip();
    for (int i = 0; i < SFT_COUNT(cases); i++) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            setenv("EMU_NAME", cases[i].name, 1);
            const SftDevice d = TESTED.device();
            const bool good = !strcmp(d.name, cases[i].name) && fabs(d.flops[SFT_F32] - cases[i].single * 1e12) < 1 &&
                              (d.flops[SFT_BF16] > 0) == (cases[i].single > 0);
            if (!good) printf("%s: %g flop/s in fp32\n", d.name, d.flops[SFT_F32]), fflush(stdout);
            _exit(!good);
        }
        int status = 1;
        assert_true(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
}
static void no_races(void **state) {
    (void)state;
    assert_int_equal(test_gpu_races(), 0);
}
#endif

static const struct CMUnitTest tests[] = {
#ifdef SFT_TEST_CUDA
    cmocka_unit_test(peaks_are_found_by_whole_names), // before the device has been asked
#endif
    cmocka_unit_test(formulae_are_accurate), cmocka_unit_test(matmul_works), cmocka_unit_test(tensor_cores_work),
    cmocka_unit_test(large_matmul_works), cmocka_unit_test(matmul_with_a_side_works),
    cmocka_unit_test(lora_gradient_is_right),
    cmocka_unit_test(attention_gradient_is_right), cmocka_unit_test(attention_works), cmocka_unit_test(norms_work),
    cmocka_unit_test(embedding_works), cmocka_unit_test(rows_and_types_work),
    cmocka_unit_test(rope_table_is_that_of_transformers), cmocka_unit_test(rope_turns_and_turns_back),
    cmocka_unit_test(swiglu_works), cmocka_unit_test(cross_entropy_works), cmocka_unit_test(sums_work),
    cmocka_unit_test(clip_works), cmocka_unit_test(adamw_is_that_of_pytorch),
    cmocka_unit_test(dynamic8_is_that_of_bitsandbytes), cmocka_unit_test(nf4_works), cmocka_unit_test(int8_works),
    cmocka_unit_test(unaligned_tensors_work), cmocka_unit_test(planning_needs_no_data),
#ifndef SFT_TEST_CUDA
    cmocka_unit_test(threads_change_nothing)};
int main(void) { return cmocka_run_group_tests(tests, NULL, NULL) != 0; }
#else
                                           cmocka_unit_test(no_races)};
/* Each setting of the emulator is a process of its own: threads in order, backwards and shuffled, streams at once and
   as late as allowed, asynchronous copies late and early, on chips with wgmma and without, with one multiprocessor or
   several, device memory that the host may not touch. The bits of all outputs must be the same. A GPU runs once, and
   builds that watch every access run all in one setting, and in another what depends on the chip. */
static const struct CMUnitTest by_chip[] = {cmocka_unit_test(tensor_cores_work), cmocka_unit_test(no_races)};
int main(void) {
    static const struct { const char *order, *stream, *async, *chip, *sms;
    } setting[] = {{"", "", "", "sm_90a", "4"},
                   {"reverse", "lazy", "", "sm_80", "4"},
                   {"random:1", "lazy", "early", "sm_90a", "1"},
                   {"random:2", "", "random", "sm_80", "3"}};
    if (!test_gpu_emulated()) return TESTED.device(), cmocka_run_group_tests(tests, NULL, NULL) != 0;
    const bool watched = test_gpu_watched();
    const int n = watched ? 2 : SFT_COUNT(setting);
    uint64_t *bits = mmap(NULL, sizeof *bits * (size_t)n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int failed = 0;
    for (int i = 0; i < n; i++) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            setenv("EMU_ORDER", setting[i].order, 1), setenv("EMU_STREAM", setting[i].stream, 1);
            setenv("EMU_ASYNC", setting[i].async, 1), setenv("EMU_CHIP", setting[i].chip, 1);
            setenv("EMU_SMS", setting[i].sms, 1), setenv("EMU_PROTECT", i || watched ? "" : "1", 1);
            const int bad = watched && i ? cmocka_run_group_tests(by_chip, NULL, NULL)
                                         : cmocka_run_group_tests(tests, NULL, NULL);
            bits[i] = fingerprint;
            fflush(stdout), _exit(bad);
        }
        int status = 1;
        if (child < 0 || waitpid(child, &status, 0) < 0 || status) failed++;
    }
    for (int i = 1; i < n && !watched; i++) failed += bits[i] != bits[0];
    printf("%s - %s\n", failed ? "not ok" : "ok",
           watched ? "every run ends well" : "the same bits in 4 orders of threads and streams");
    return failed != 0;
}
#endif

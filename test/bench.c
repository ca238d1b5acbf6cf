/* Speed of the CPU operations against what the machine can do: make bench, or build/bench [--json] [--cpu] [--only
   WORDS] [seconds per case].

   The machine's two limits are measured beside every case, for machines are shared and clocks move: multiply-adds per
   second of all threads from registers, and bytes per second of x = a x + y over arrays larger than the caches. An
   operation's share is the median over turns of its rate against the limit measured just before: the first limit for
   multiplications, the second for what only moves numbers. Operands are real and cold only as far as their size makes
   them so. */
#define SFT_IMPLEMENTATION
#include "../sft.h"

static SftArena memory, work;
static SftCtx ctx = {&sft_cpu, NULL, &work, 0, 0};
static double budget = 0.25;
static json_t *results;
static bool as_json, by_cpu;

// Seconds: of the wall, or (--cpu) of the CPU per thread, which a machine shared with other programs does not spoil,
// but which does not see threads wait for each other either.
static double now(void) {
    struct timespec t;
    if (!by_cpu) return sft_now();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return ((double)t.tv_sec + 1e-9 * (double)t.tv_nsec) / sft__threads();
}

static SftTensor tensor(SftType type, int64_t d0, int64_t d1, int64_t d2, double scale) {
    SftTensor t = sft_take_tensor(&memory, type, d0, d1, d2);
    for (int64_t i = 0; i < sft_size(t); i++) {
        float x = (float)(scale * (2 * sft_uniform(sft_random(1, 0, 0, (uint64_t)i)) - 1));
        sft_from_f32(sft__at(t, i), type, &x, 1);
    }
    return t;
}

// Multiply-adds from registers, on every thread: 2 * 16 * SFT__VL operations a round.
static double peak_flops(void) {
    const int64_t rounds = 20000;
    double start = now();
#pragma omp parallel
    {
        SftVec s[16], a = (SftVec){0} + 0.999f, b = (SftVec){0} + 0.001f;
        for (int i = 0; i < 16; i++) s[i] = (SftVec){0} + (float)i;
        for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) s[i] = s[i] * a + b;
        for (int i = 1; i < 16; i++) s[0] += s[i];
        if (s[0][0] == 12345) printf("\n"); // so that the sums are needed
    }
    return 2.0 * 16 * SFT__VL * (double)rounds * sft__threads() / (now() - start);
}

static SftTensor stream_x, stream_y; // 32 MB each and more
static double bandwidth(void) {
    float *x = stream_x.data, *y = stream_y.data;
    int64_t n = stream_x.dim[0];
    double start = now();
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * 0.5f + y[i];
    return 12.0 * (double)n / (now() - start);
}

static double best_flops, best_bytes; // of the whole run
typedef struct { const char *name, *type; double flops, bytes, seconds, share; } Result;
static void report(Result *r) {
    if (as_json)
        json_array_append_new(results,
                              json_pack("{s:s,s:s,s:f,s:f,s:f,s:f}", "name", r->name, "type", r->type, "seconds",
                                        r->seconds, "flops", r->flops, "bytes", r->bytes, "share", r->share));
    else
        printf("%-34s %-5s %10.3f ms  %8.1f %-8s %5.2f of %s\n", r->name, r->type, 1e3 * r->seconds,
               (r->flops > 0 ? r->flops : r->bytes) / r->seconds * 1e-9, r->flops > 0 ? "GFLOP/s" : "GB/s", r->share,
               r->flops > 0 ? "peak" : "bandwidth");
    fflush(stdout);
}
static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Times `statement` and a limit in turns until the budget is spent; leaves the share in `shared`.
static double shared;
static const char *only = "";
#define TIME(title, kind, operations, traffic, statement)                                                              \
    do {                                                                                                               \
        Result r = {title, sft_type_name(kind), operations, traffic, 1e30, 0};                                         \
        double limit = 0, ratio[1000], opened = sft_now();                                                             \
        int turns = 0;                                                                                                 \
        if (!strstr(r.name, only)) break;                                                                              \
        for (; turns < 3 || (sft_now() - opened < budget && turns < 1000); turns++) {                                  \
            if (r.flops > 0 || turns % 8 == 0) limit = r.flops > 0 ? peak_flops() : bandwidth();                       \
            if (r.flops > 0) best_flops = fmax(best_flops, limit);                                                     \
            else best_bytes = fmax(best_bytes, limit);                                                                 \
            double started = now();                                                                                    \
            statement;                                                                                                 \
            double seconds = now() - started;                                                                          \
            r.seconds = fmin(r.seconds, seconds), ratio[turns] = fmax(r.flops, r.bytes) / seconds / limit;             \
        }                                                                                                              \
        qsort(ratio, (size_t)turns, sizeof *ratio, ascending);                                                         \
        r.share = shared = ratio[turns / 2];                                                                           \
        report(&r);                                                                                                    \
    } while (0)

// The linear layers of GPT-2 124M on N tokens, forward and both gradients; returns the geometric mean of the shares.
static double matmuls(SftType type, int64_t N) {
    static const struct {
        const char *name;
        int64_t I, O;
    } layer[] = {{"q/k/v/o", 768, 768}, {"up", 768, 3072}, {"down", 3072, 768}, {"head", 768, 50257}};
    double product = 0;
    for (int l = 0; l < SFT_COUNT(layer); l++) {
        const int64_t I = layer[l].I, O = layer[l].O;
        size_t mark = memory.used;
        SftTensor x = tensor(type, N, I, 1, 1), w = tensor(type, O, I, 1, 1), y = tensor(type, N, O, 1, 1),
                  dw = tensor(SFT_F32, O, I, 1, 1);
        char name[3][64];
        const char *form[3] = {"forward", "dx", "dw"};
        for (int f = 0; f < 3; f++) snprintf(name[f], 64, "matmul %s N=%ld %s", layer[l].name, (long)N, form[f]);
        const double flops = 2.0 * (double)N * (double)I * (double)O;
        TIME(name[0], type, flops, 0, sft_cpu.matmul_forward(&ctx, y, SFT_NONE, x, w, SFT_NONE, SFT_NONE, SFT_LINEAR));
        product += log(shared);
        TIME(name[1], type, flops, 0, sft_cpu.matmul_backward_x(&ctx, x, y, w, SFT_NONE, SFT_LINEAR, false));
        product += log(shared);
        TIME(name[2], type, flops, 0, sft_cpu.matmul_backward_w(&ctx, dw, SFT_NONE, y, x));
        product += log(shared);
        sft_give_back(&memory, mark);
    }
    return exp(product / (3 * SFT_COUNT(layer)));
}

static void attentions(SftType type, int64_t N, int64_t T) { // 12 heads of 64, N tokens in documents of T
    size_t mark = memory.used;
    SftTensor q = tensor(type, N, 12, 64, 1), k = tensor(type, N, 12, 64, 1), v = tensor(type, N, 12, 64, 1),
              y = tensor(type, N, 12, 64, 1), lse = tensor(SFT_F32, N, 12, 1, 1);
    SftTensor dq = tensor(type, N, 12, 64, 1), dk = tensor(type, N, 12, 64, 1), dv = tensor(type, N, 12, 64, 1);
    int32_t *begin = SFT_NEW(int32_t, N), *end = SFT_NEW(int32_t, N);
    for (int64_t i = 0; i < N; i++) begin[i] = (int32_t)(i / T * T), end[i] = (int32_t)SFT_MIN(begin[i] + T, N);
    const double product = (double)N * (double)(T + 1) * 12 * 64; // flops of one product of visible pairs
    char name[64];
    snprintf(name, 64, "attention T=%ld", (long)T);
    TIME(name, type, 2 * product, 0, sft_cpu.attention_forward(&ctx, y, lse, q, k, v, begin, 0.125f, 0));
    snprintf(name, 64, "attention T=%ld backward", (long)T); // counted as 5 products, though 7 are done
    TIME(name, type, 5 * product, 0,
         sft_cpu.attention_backward(&ctx, dq, dk, dv, y, y, lse, q, k, v, begin, end, 0.125f, 0));
    free(begin), free(end);
    sft_give_back(&memory, mark);
}

static void streams(SftType type) { // operations that memory limits; bytes are those that must move once
    const int64_t N = 1024, C = 768, F = 3072, V = 50257, P = 20000000;
    const double e = (double)sft_type_size(type), NC = (double)(N * C), NF = (double)(N * F);
    size_t mark = memory.used;
    SftTensor x = tensor(type, N, C, 1, 1), y = tensor(type, N, C, 1, 1), w = tensor(type, C, 1, 1, 1),
              dw = tensor(SFT_F32, C, 1, 1, 1), stat = tensor(SFT_F32, N, 2, 1, 1);
    TIME("layernorm", type, 0, 2 * e * NC, sft_cpu.layernorm_forward(&ctx, y, stat, x, w, w, 1e-5f));
    TIME("layernorm backward", type, 0, 4 * e * NC, sft_cpu.layernorm_backward(&ctx, x, dw, dw, x, y, y, w, stat));
    TIME("rmsnorm", type, 0, 2 * e * NC, sft_cpu.rmsnorm_forward(&ctx, y, stat, x, w, 1e-5f));
    TIME("rmsnorm backward", type, 0, 4 * e * NC, sft_cpu.rmsnorm_backward(&ctx, x, dw, x, y, y, w, stat));
    SftTensor q = x, table = tensor(SFT_F32, N, 64, 1, 1);
    q.dim[1] = 12, q.dim[2] = 64;
    TIME("rope", type, 0, 2 * e * NC, sft_cpu.rope_forward(&ctx, q, table));
    SftTensor wte = tensor(type, V, C, 1, 1), dwte = tensor(SFT_F32, V, C, 1, 1), logits = tensor(type, 256, V, 1, 5),
              loss = tensor(SFT_F32, 256, 1, 1, 1);
    int32_t ids[1024], target[256];
    for (int i = 0; i < 1024; i++)
        ids[i] = (int32_t)(sft_random(2, 0, 0, (uint64_t)i) % (uint64_t)V), target[i % 256] = ids[i];
    TIME("embedding", type, 0, 2 * e * NC, sft_cpu.embedding_forward(&ctx, y, wte, SFT_NONE, ids, ids));
    TIME("embedding backward", type, 0, (8 + e) * NC, sft_cpu.embedding_backward(&ctx, dwte, SFT_NONE, y, ids, ids));
    TIME("cross entropy 256 x 50257", type, 0, 3 * e * 256 * (double)V,
         sft_cpu.cross_entropy(&ctx, loss, logits, target, V, 1e-3f));
    TIME("matmul head N=1", type, 0, e * (double)(V * C),
         sft_cpu.matmul_forward(&ctx, sft_rows(logits, 0, 1), SFT_NONE, sft_rows(x, 0, 1), wte, SFT_NONE, SFT_NONE,
                                SFT_LINEAR));
    SftTensor up = tensor(type, N, F, 1, 1), gate = tensor(type, N, F, 1, 1), act = tensor(type, N, F, 1, 1);
    TIME("swiglu", type, 0, 3 * e * NF, sft_cpu.swiglu_forward(&ctx, act, gate, up));
    TIME("swiglu backward", type, 0, 5 * e * NF, sft_cpu.swiglu_backward(&ctx, gate, up, act, gate, up));
    SftTensor p[4], low = type == SFT_F32 ? SFT_NONE : tensor(type, P, 1, 1, 1);
    for (int i = 0; i < 4; i++) p[i] = tensor(SFT_F32, P, 1, 1, i == 2 ? 0 : 1);
    const float one = 1;
    const SftAdam adam = {1e-4, 0.9, 0.999, 1e-8, 0.01, 0.1, 0.001};
    TIME("adamw", type, 0, (28 + (type == SFT_F32 ? 0 : e)) * (double)P,
         sft_cpu.adamw(&ctx, low, p[0], p[1], p[2], p[3], &one, adam));
    double sum[2] = {0};
    TIME("sums", SFT_F32, 0, 4.0 * (double)P, sft_cpu.sums(&ctx, sum, p[3]));
    if (type != SFT_F32) TIME("convert from fp32", type, 0, (4 + e) * (double)P, sft_cpu.convert(&ctx, low, p[0]));
    sft_give_back(&memory, mark);
}

/* A whole training step (forward, loss, backward, AdamW) of GPT-2 124M on B documents of T tokens, against the
   roofline: its multiply-adds at the peak (6 per weight and token, the head's included, and attention's: 741 MFLOP a
   token and more with T), then AdamW's 28 bytes per parameter at the bandwidth; both limits measured before every step.
 */
static void training_step(SftType type, int64_t B, int64_t T) {
    char folder[] = "/tmp/sft_bench_XXXXXX", path[4096], name[64];
    snprintf(name, sizeof name, "step GPT-2 124M B=%ld T=%ld", (long)B, (long)T);
    if (!strstr(name, only)) return;
    if (!mkdtemp(folder)) sft_die(SFT_BROKEN, "cannot make %s", folder);
    sft_write_file(sft_path(path, folder, "config.json"), "{\"model_type\": \"gpt2\"}", 22);
    SftArch arch = sft_arch(folder);
    unlink(path), rmdir(folder);
    SftModel m;
    SftConfig config = {.learning_rate = 1e-4, .adam_beta1 = 0.9, .adam_beta2 = 0.999, .adam_epsilon = 1e-8};
    config.lr_scheduler_type = (char *)"constant";
    SftTrainer trainer = {.total = 1000};
    SftBatch b = {0};
    sft_model_open(&m, &arch, type, true, false, B * T, B * T, 0, false, &sft_cpu);
    SftCtx c = {&sft_cpu, NULL, &m.mem[SFT_MEM_WORK], 0, 0};
    sft_init_weights(&m, 1);
    sft_batch_room(&b, B * T);
    b.n = b.trained = B * T, b.documents = B;
    for (int64_t i = 0; i < b.n; i++) {
        b.ids[i] = b.target[i] = (int32_t)(sft_random(3, 0, 0, (uint64_t)i) % (uint64_t)arch.V);
        b.pos[i] = (int32_t)(i % T), b.begin[i] = (int32_t)(i / T * T), b.end[i] = (int32_t)(i / T * T + T);
    }
    const double P = (double)sft_parameters(&arch), weights = P - (double)(arch.P * arch.C);
    const double flops = (double)b.n * 6 * (weights + (double)(arch.L * arch.C * (T + 1))); // half of T x T, twice
    double best = 1e30, share[100];
    int turns = 0;
    for (double opened = sft_now(); turns < 5 || (turns < 100 && sft_now() - opened < 20 * budget); turns++) {
        double roofline = flops / peak_flops() + 28 * P / bandwidth(), start = now();
        sft_zero_grad(&c, &m), sft_forward(&c, &m, &b);
        sft_loss(&c, &m, &b, 1.0f / (float)b.n, NULL);
        sft_backward(&c, &m, &b), sft_update(&c, &m, &trainer, &config, 1);
        double seconds = now() - start;
        best = fmin(best, seconds), share[turns] = roofline / seconds;
    }
    qsort(share, (size_t)turns, sizeof *share, ascending);
    Result r = {name, sft_type_name(type), flops, 0, best, share[turns / 2]};
    report(&r);
    if (!as_json) printf("%-40s %10.0f tokens/s\n", "", (double)b.n / best);
    sft_batch_free(&b), sft_model_close(&m);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--json")) as_json = true;
        else if (!strcmp(argv[i], "--cpu")) by_cpu = true;
        else if (!strcmp(argv[i], "--only") && i + 1 < argc) only = argv[++i];
        else budget = atof(argv[i]);
    }
    results = json_array();
    sft_arena_open(&memory, "operands", (size_t)1600 << 20);
    sft_arena_open(&work, "workspace", (size_t)256 << 20);
    stream_x = tensor(SFT_F32, 16 << 20, 1, 1, 1), stream_y = tensor(SFT_F32, 16 << 20, 1, 1, 1);
    if (!as_json)
        printf("%d threads, vectors of %d floats, register tile %d x %d, bf16 by %s\n", sft__threads(), SFT__VL,
               SFT__MR, SFT__NR, sft__amx() ? "tiles (AMX)" : SFT__PAIRS ? "pairs" : "widening");
    for (int type = 0; type <= (int)SFT_BF16; type++)
        training_step((SftType)type, 4, 64), training_step((SftType)type, 4, 256);
    for (int type = 0; type <= (int)SFT_BF16; type++) {
        double share[2] = {matmuls((SftType)type, 256), matmuls((SftType)type, 1024)};
        if (!as_json)
            printf("matmul %s, geometric mean: %.3f of fp32 peak at N=256, %.3f at N=1024\n",
                   sft_type_name((SftType)type), share[0], share[1]);
        json_array_append_new(results,
                              json_pack("{s:s,s:s,s:f,s:f}", "name", "matmul geometric mean", "type",
                                        sft_type_name((SftType)type), "share_256", share[0], "share_1024", share[1]));
    }
    for (int type = 0; type <= (int)SFT_BF16; type++) {
        attentions((SftType)type, 1024, 64), attentions((SftType)type, 1024, 256),
            attentions((SftType)type, 2048, 2048);
        streams((SftType)type);
    }
    if (as_json)
        json_dumpf(json_pack("{s:f,s:f,s:i,s:o}", "peak_flops", best_flops, "bandwidth", best_bytes, "threads",
                             sft__threads(), "results", results),
                   stdout, JSON_INDENT(1));
    else
        printf("peak %.1f GFLOP/s, bandwidth %.1f GB/s (the best that were seen)\n", 1e-9 * best_flops,
               1e-9 * best_bytes);
    return 0;
}

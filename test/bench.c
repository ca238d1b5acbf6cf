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

// A case is timed in turns with its limit until the budget is spent.
static const char *only = "";
static struct {
    Result r;
    char name[64];
    double limit, ratio[1000], opened, started;
    int turns;
} timed;
static double logs; // of the shares of matmuls
static int matmuls;
static void start_turn(void) {
    if (timed.r.flops > 0) best_flops = fmax(best_flops, timed.limit = peak_flops());
    else if (timed.turns % 8 == 0) best_bytes = fmax(best_bytes, timed.limit = bandwidth());
    timed.started = now();
}
static bool measure(const char *op, const char *what, SftType type, double flops, double bytes) {
    snprintf(timed.name, sizeof timed.name, "%s %s", op, what);
    if (!strstr(timed.name, only)) return false;
    timed.r = (Result){timed.name, sft_type_name(type), flops, bytes, 1e30, 0};
    timed.turns = 0, timed.opened = sft_now();
    start_turn();
    return true;
}
static bool again(void) {
    Result *r = &timed.r;
    const double seconds = now() - timed.started;
    timed.ratio[timed.turns++] = (r->flops > 0 ? r->flops : r->bytes) / seconds / timed.limit;
    r->seconds = fmin(r->seconds, seconds);
    if (timed.turns < 3 || (timed.turns < 1000 && sft_now() - timed.opened < budget)) {
        start_turn();
        return true;
    }
    qsort(timed.ratio, (size_t)timed.turns, sizeof *timed.ratio, ascending);
    r->share = timed.ratio[timed.turns / 2];
    if (r->flops > 0 && !strncmp(r->name, "matmul", 6)) logs += log(r->share), matmuls++;
    report(r);
    return false;
}
static const SftOps *ops = &sft_cpu;
static void place(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
#include "cases.h"

// Matmuls at N tokens; returns the geometric mean of their shares.
static double matmul_share(SftType type, int64_t N) {
    logs = matmuls = 0;
    matmul_cases(type, N, 50257);
    return matmuls ? exp(logs / matmuls) : 0;
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
    stream_x = vector(SFT_F32, 16 << 20), stream_y = vector(SFT_F32, 16 << 20);
    if (!as_json)
        printf("%d threads, vectors of %d floats, register tile %d x %d, bf16 by %s\n", sft__threads(), SFT__VL,
               SFT__MR, SFT__NR, sft__amx() ? "tiles (AMX)" : SFT__PAIRS ? "pairs" : "widening");
    for (int type = 0; type <= (int)SFT_BF16; type++)
        training_step((SftType)type, 4, 64), training_step((SftType)type, 4, 256);
    for (int type = 0; type <= (int)SFT_BF16; type++) {
        double share[2] = {matmul_share((SftType)type, 256), matmul_share((SftType)type, 1024)};
        if (!as_json)
            printf("matmul %s, geometric mean: %.3f of fp32 peak at N=256, %.3f at N=1024\n",
                   sft_type_name((SftType)type), share[0], share[1]);
        json_array_append_new(results,
                              json_pack("{s:s,s:s,s:f,s:f}", "name", "matmul geometric mean", "type",
                                        sft_type_name((SftType)type), "share_256", share[0], "share_1024", share[1]));
    }
    for (int type = 0; type <= (int)SFT_BF16; type++) {
        attention_cases((SftType)type, 1024, 256), attention_cases((SftType)type, 2048, 2048);
        memory_cases((SftType)type, (Shapes){1024, 1024, 256, 50257, 256, 20000000});
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

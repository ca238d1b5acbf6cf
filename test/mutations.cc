/* mutations.cc - are the detectors awake? mutations.txt lists edits that break kernels.cu, each with the detector that
   must notice; mutate.pl puts them all into a copy of it, which ends by including this file. Without an argument the
   program runs every trial with sound kernels, in several orders of threads, which must pass, and with every broken
   kernel, in a process of its own, which must be caught. By hand: MUTATION TRIAL, a number (0: sound) and a name. */
#include <math.h>
#include <memory>
#include <string>
#include <vector>
enum Detector {
    RACE,      // the race detector
    NAN_SEEN,  // NaN in the result: what is not there yet, or was never written, is NaN in test/emu
    IN_FLIGHT, // a block ends before what it has begun
    VALUES,    // the result is not sft_cpu's
    BOUNDS,    // AddressSanitizer, and bounds of memory that the emulator knows itself
    CONFLICTS, // the counter of bank conflicts
    SECTORS,   // the counter of sectors of global memory
    ORDER,     // other bits in another order of threads and blocks
};
static const struct { const char *name, *words; } DETECTORS[] = {
    {"the race detector", "emu: race"},
    {"NaN", "NaN in"},
    {"what is still in flight", "in flight"},
    {"sft_cpu", "is not what"},
    {"the bounds of memory", "out of bounds|past the end|AddressSanitizer"},
    {"the counter of bank conflicts", "bank conflicts"},
    {"the counter of sectors", "sectors, "},
    {"other bits", ""},
};
struct Mutation { const char *name, *trial, *environment; Detector detector; };

// --- trials: an op with tensors, its outputs first, run by the CPU reference and by the kernels
struct Side { // of the comparison
    SftOps op;
    SftCtx c;
    SftTensor t[10];
    const int32_t *begin, *end; // documents of attention; ids
};
static const SftTensor none = {};
static void forward(Side &s) { // t[6], t[7]: LoRA's
    s.op.matmul_forward(&s.c, s.t[0], s.t[1], s.t[2], s.t[3], {s.t[6], s.t[7]}, s.t[4], s.t[5], 1, SFT_GELU);
}
static void dw(Side &s) { s.op.matmul_backward_w(&s.c, s.t[0], s.t[1], s.t[2], s.t[3]); }
static void attend(Side &s) {
    s.op.attention_forward(&s.c, s.t[0], s.t[1], s.t[2], s.t[3], s.t[4], s.begin, 0.2f, 0);
}
static void attend_backward(Side &s) {
    SftTensor *t = s.t;
    s.op.attention_forward(&s.c, t[4], t[5], t[6], t[7], t[8], s.begin, 0.2f, 0);
    s.op.attention_backward(&s.c, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], s.begin, s.end, 0.2f, 0);
}
static void norm(Side &s) { s.op.layernorm_forward(&s.c, s.t[0], s.t[1], s.t[2], s.t[3], s.t[4], 1e-5f); }
static void norm_backward(Side &s) {
    s.op.layernorm_backward(&s.c, s.t[0], s.t[1], s.t[2], s.t[3], s.t[4], s.t[5], s.t[6], s.t[7]);
}
static void embed(Side &s) { s.op.embedding_forward(&s.c, s.t[0], s.t[1], s.t[2], s.begin, s.begin); }
static void embed_backward(Side &s) { s.op.embedding_backward(&s.c, s.t[0], none, s.t[1], s.begin, NULL); }
static void loss(Side &s) { s.op.cross_entropy(&s.c, s.t[0], s.t[1], s.end, 997, 1); }
static void sum(Side &s) { s.op.sums(&s.c, (double *)s.t[0].data, s.t[1]); }
static SftTensor h(int64_t a, int64_t b = 1, int64_t c = 1) { return {NULL, SFT_BF16, {a, b, c}}; }
static SftTensor f(int64_t a, int64_t b = 1, int64_t c = 1) { return {NULL, SFT_F32, {a, b, c}}; }
struct Trial {
    const char *name;
    void (*run)(Side &);
    int outputs;
    bool whole; // lines begin and end with sectors of 32 bytes
    std::vector<SftTensor> t;
    std::vector<const char *> kernels; // that have no bank conflicts, and if whole, waste no sectors
};
static const std::vector<Trial> trials = {
    {"forward", forward, 1, true,
     {h(136, 272), none, h(136, 80), h(272, 80), h(272), h(136, 272)}, {"matmul_tensor", "matmul_hopper"}},
    {"side", forward, 1, true,
     {h(136, 272), none, h(136, 80), h(272, 80), none, none, h(136, 16), h(272, 16)}, {"matmul_tensor", "matmul_hopper"}},
    {"embedding", embed, 1, true, {h(50, 48), h(1, 48), none}, {"rows_kernel"}},
#ifdef EMU_TRACE
    {"plain", forward, 2, false,
     {h(130, 132), h(130, 132), h(130, 36), h(132, 36), h(132), h(130, 132)}, {"matmul_plain"}},
    {"few", forward, 1, false, {h(3, 70), none, h(3, 77), h(70, 77), none, none}, {}},
    {"parts", forward, 1, true, {h(130, 144), none, h(130, 528), h(144, 528), none, none}, {"matmul_tensor"}},
    {"deep", forward, 1, true, {h(136, 272), none, h(136, 640), h(272, 640), none, none}, {"matmul_hopper"}},
    {"dw", dw, 2, true, {f(144, 160), f(144), h(520, 144), h(520, 160)}, {"matmul_tensor", "matmul_bias"}},
    {"attention", attend, 2, false,
     {h(150, 4, 64), f(150, 4), h(150, 4, 64), h(150, 2, 64), h(150, 2, 64)}, {"attention_forward_mma"}},
    {"generation", attend, 2, false,
     {h(1, 4, 40), f(1, 4), h(1, 4, 40), h(200, 2, 40), h(200, 2, 40)}, {}},
    {"attention_backward", attend_backward, 3, true,
     {h(160, 4, 64), h(160, 2, 64), h(160, 2, 64), h(160, 4, 64), h(160, 4, 64), f(160, 4), h(160, 4, 64),
      h(160, 2, 64), h(160, 2, 64)}, {"attention_delta_kernel", "attention_backward_mma"}},
    {"attention_backward_odd", attend_backward, 3, false,
     {h(50, 4, 36), h(50, 2, 36), h(50, 2, 36), h(50, 4, 36), h(50, 4, 36), f(50, 4), h(50, 4, 36), h(50, 2, 36),
      h(50, 2, 36)}, {}},
    {"norm", norm, 2, true, {h(40, 64), f(40, 2), h(40, 64), h(64), h(64)}, {"norm_kernel"}},
    {"norm_wide", norm, 2, true, {h(5, 1536), f(5, 2), h(5, 1536), h(1536), h(1536)}, {"norm_kernel"}},
    {"norm_backward", norm_backward, 3, true,
     {h(40, 768), f(768), f(768), h(40, 768), h(40, 768), h(40, 768), h(768), f(40, 2)},
     {"norm_grad_kernel", "add_lines_kernel"}},
    {"embedding_backward", embed_backward, 1, true, {f(150, 96), h(150, 96)}, {"rows_add"}},
    {"cross_entropy", loss, 2, true, {f(20), h(20, 1008)}, {"cross_entropy_kernel"}},
    {"sums", sum, 0, true, {f(4), h(40000)}, {"sums_kernel"}}, // of values, none: doubles are not compared here
#endif
};
static SftOps kernels() { // what is not called is not compiled
    SftOps o = {};
    o.name = "cuda", o.matmul_forward = matmul_forward, o.embedding_forward = embedding_forward;
#ifdef EMU_TRACE
    o.matmul_backward_w = matmul_backward_w;
    o.attention_forward = attention_forward, o.attention_backward = attention_backward;
    o.layernorm_forward = layernorm_forward, o.layernorm_backward = layernorm_backward;
    o.embedding_backward = embedding_backward, o.cross_entropy = cross_entropy, o.sums = sums;
#endif
    return o;
}

static size_t bytes(SftTensor t) { return (size_t)(t.dim[0] * t.dim[1] * t.dim[2]) * (t.type == SFT_F32 ? 4 : 2); }
static std::vector<std::unique_ptr<char[]>> rooms;
static char *room(size_t n) { // on the host, until the program ends
    rooms.emplace_back(new char[n]);
    return rooms.back().get();
}
static void *copied(const void *from, size_t n) { // exactly as long as it is: detectors see the first byte beyond
    void *p;
    CHECK(cudaMalloc(&p, n)), CHECK(cudaMemcpy(p, from, n, cudaMemcpyHostToDevice));
    return p;
}
static void run(const Trial &t, Side &s, const char *which, bool gpu) { // in exactly the workspace that it plans
    SftArena plan = {}, real = {};
    cudaStream_t stream = NULL;
    if (gpu) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); // nothing orders it and the default one
    s.c = {&s.op, stream, &plan, 0, 0}, plan.name = which;
    t.run(s);
    real.name = which, real.size = plan.peak, real.base = room(plan.peak + 1);
    if (gpu) CHECK(cudaMalloc((void **)&real.base, plan.peak + 1));
    s.c.work = &real;
    t.run(s);
}
/* Both sides start from the same numbers in [-1, 1). A result is rounded once, to 8 bits; on its way probabilities and
   their gradients are rounded to 8 bits, too, by tensor cores, which puts a sum of them off by some 2^-8 of a result's
   usual size, by more where few tokens are seen; eight times that is allowed. Strict tolerances are test_ops's: what is
   broken here is far off. */
static bool compare(SftTensor want, SftTensor got, int output) {
    const size_t n = (size_t)(want.dim[0] * want.dim[1] * want.dim[2]);
    std::vector<float> w(n), g(n);
    sft_to_f32(w.data(), want.data, want.type, (int64_t)n), sft_to_f32(g.data(), got.data, got.type, (int64_t)n);
    double square = 0;
    for (float x : w) square += (double)x * x / (double)n;
    for (size_t i = 0; i < n; i++) {
        if (g[i] == g[i] && fabs(g[i] - w[i]) <= 0x1p-5 * (fabs(w[i]) + sqrt(square))) continue;
        if (g[i] != g[i]) printf("NaN in output %d, number %zu\n", output, i);
        else printf("output %d, number %zu, is not what sft_cpu says: %g, expected %g\n", output, i, g[i], w[i]);
        return false;
    }
    return true;
}
static bool counted(const Trial &t) {
    bool good = true;
    for (const char *kernel : t.kernels) {
        const EmuCount *c = emu_counts((std::string("{anonymous}::") + kernel).c_str());
        long sectors = 0, enough = 0;
        for (int i = 0; c && i < c->nlines; i++)
            if (c->lines[i].space == 'g') sectors += c->lines[i].sectors, enough += c->lines[i].ideal;
        if (c && c->conflicts) printf("%s: %ld bank conflicts\n", kernel, c->conflicts), good = false;
        if (!t.whole || sectors * 100 <= enough * 105) continue;
        printf("%s: %ld sectors, %ld are enough\n", kernel, sectors, enough);
        good = false;
    }
    return good;
}
static int run_trial(int number, const char *name) {
    mutation = number;
    for (const Trial &t : trials) {
        if (strcmp(t.name, name)) continue;
        Side cpu = {sft_cpu, {}, {}, NULL, NULL}, gpu = {kernels(), {}, {}, NULL, NULL};
        int32_t begin[256], end[256]; // documents of 60 tokens
        for (int i = 0; i < 256; i++) begin[i] = i / 60 * 60, end[i] = begin[i] + 60;
        const int64_t rows = t.t[0].dim[0];
        for (int i = 0; i < 256; i++) end[i] = (int32_t)SFT_MIN(end[i], rows);
        cpu.begin = begin, cpu.end = end;
        gpu.begin = (int32_t *)copied(begin, (size_t)rows * 4), gpu.end = (int32_t *)copied(end, (size_t)rows * 4);
        for (size_t i = 0; i < t.t.size(); i++) {
            SftTensor &x = cpu.t[i], &y = gpu.t[i];
            x = y = t.t[i];
            if (!bytes(x)) continue;
            x.data = room(bytes(x));
            for (int64_t j = 0; j < x.dim[0] * x.dim[1] * x.dim[2]; j++) {
                const float f = 2 * sft_uniform(sft_random(1, 0, (int)i, (uint64_t)j)) - 1;
                sft_from_f32((char *)x.data + j * (x.type == SFT_F32 ? 4 : 2), x.type, &f, 1);
            }
            y.data = copied(x.data, bytes(x));
        }
        run(t, cpu, "cpu", false);
        emu_count(!t.kernels.empty()), run(t, gpu, "cuda", true);
        CHECK(cudaDeviceSynchronize());
        emu_count(false);
        uint64_t bits = 0xcbf29ce484222325;
        bool good = counted(t);
        for (int i = 0; i < t.outputs; i++) {
            SftTensor result = gpu.t[i];
            if (!bytes(result)) continue;
            result.data = room(bytes(result));
            CHECK(cudaMemcpy(result.data, gpu.t[i].data, bytes(result), cudaMemcpyDeviceToHost));
            for (size_t j = 0; j < bytes(result); j++)
                bits = (bits ^ ((unsigned char *)result.data)[j]) * 0x100000001b3u;
            good &= compare(cpu.t[i], result, i);
        }
        printf("bits %016llx\n", (unsigned long long)bits);
        return good && !emu_races() ? 0 : 4;
    }
    printf("there is no trial \"%s\"\n", name);
    return 0; // so that nothing was caught
}

// --- all of them, each in a process of its own
struct Result { int status; std::string text; };
static Result process(const char *self, int number, const char *trial, const char *environment) {
    const std::string command = std::string(environment) + " '" + self + "' " + std::to_string(number) + " " + trial;
    Result r;
    char line[1000];
    FILE *f = popen((command + " 2>&1").c_str(), "r");
    while (fgets(line, sizeof line, f)) r.text += line;
    r.status = pclose(f);
    return r;
}
static bool says(const std::string &text, std::string words) { // one of them, between |
    for (size_t bar; (bar = words.find('|')) != std::string::npos; words = words.substr(bar + 1))
        if (text.find(words.substr(0, bar)) != std::string::npos) return true;
    return text.find(words) != std::string::npos;
}
static const Mutation mutations[] = {MUTATIONS};
static bool caught(const char *self, int number, const Mutation &m, Result &r) {
    r = process(self, number, m.trial, m.environment);
    if (m.detector != ORDER) return r.status != 0 && says(r.text, DETECTORS[m.detector].words);
    const Result other = process(self, number, m.trial, (std::string(m.environment) + " EMU_ORDER=reverse").c_str());
    return other.text != r.text && says(r.text, "bits ") && says(other.text, "bits ");
}
int main(int argc, char **argv) {
    if (argc == 3) return run_trial(atoi(argv[1]), argv[2]);
    bool all = true;
    auto report = [&](bool ok, std::string what, const Result &r) {
        printf("%s - %s\n", ok ? "ok" : "not ok", what.c_str()), all &= ok;
        if (!ok) printf("status %d\n%s\n", r.status, r.text.c_str());
        fflush(stdout);
    };
    for (const Trial &t : trials)
        for (std::string chip : {"sm_80", "sm_90a"}) {
            if (chip == "sm_90a" && t.run != forward && t.run != dw) continue; // matmul alone has another kernel there
            std::string first;
            Result r = {};
            bool ok = true;
            for (const char *order :
                 {"", " EMU_ORDER=reverse", " EMU_ORDER=random:3 EMU_ASYNC=early EMU_STREAM=lazy"}) {
                if (ok) r = process(argv[0], 0, t.name, ("EMU_CHIP=" + chip + order).c_str());
                if (first.empty()) first = r.text;
                ok &= r.status == 0 && r.text == first;
            }
            report(ok, std::string("sound: ") + t.name + ", " + chip, r);
        }
    for (int i = 0; i < SFT_COUNT(mutations); i++) {
        const Mutation &m = mutations[i];
#ifdef EMU_TRACE
        if (m.detector == BOUNDS) continue;
#else
        if (m.detector != BOUNDS) continue;
#endif
        Result r;
        report(caught(argv[0], i + 1, m, r), std::string("caught by ") + DETECTORS[m.detector].name + ": " + m.name, r);
    }
    return !all;
}

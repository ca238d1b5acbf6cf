/* layernorm.cu - from the formula to the speed of the memory: y = (x - mean) / sqrt(variance + eps) * w + b for each
   row of x[N,C] in bf16. The formula does some 10 flop for 4 bytes: all that counts is which bytes move, and how. Four
   steps of one idea each; the fifth is layernorm_forward of kernels.cu: step 4 with 8 to 512 threads a row, by its
   length.

       step           idea                                             global memory for each number, C large
       1 literal      a thread per row                                 96 + 2 + 32 bytes: a sector for each 2
       2 warp         neighbours read neighbours                       6 + 4 + 2: x three times, w and b, y
       3 packs        a lane moves 16 bytes at once                    the same by an eighth of the instructions
       4 registers    what will be needed again stays with its thread  2 + 4 + 2: x once

   (x + w and b + y.) The floor is 4 bytes a number, x and y once: w and b are the same for all rows, and in L1. From
   step 2 on L1 serves the second and third reading of x, too, as long as the rows of all warps fit; step 4 does not
   ask. ladder.h says what the program does; `layernorm bench 8192 768`. Steps 3 and 4 want C to be a multiple of 8,
   step 4 at most 1024. */
#include "ladder.h"
static const float EPS = 1e-5f;

// --- 1: the formula ---------------------------------------------------------------------------------------------
// Neighbours in a warp are neighbours among the rows, 2 C bytes apart: 32 sectors of 32 bytes for 64 bytes. The other
// 30 bytes of each are for the next 15 numbers, if L1 still has them then: those of 2048 threads are 64 KB.
__global__ void literal(bf16 *y, float2 *stat, const bf16 *x, const bf16 *w, const bf16 *b, int N, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    x += (size_t)i * C, y += (size_t)i * C;
    float mean = 0, square = 0;
    for (int j = 0; j < C; j++) mean += __bfloat162float(x[j]);
    mean /= C;
    for (int j = 0; j < C; j++) {
        const float u = __bfloat162float(x[j]) - mean;
        square += u * u;
    }
    const float rstd = 1 / sqrtf(square / C + EPS);
    for (int j = 0; j < C; j++) {
        const float u = (__bfloat162float(x[j]) - mean) * rstd;
        y[j] = __float2bfloat16(u * __bfloat162float(w[j]) + __bfloat162float(b[j]));
    }
    stat[i] = make_float2(mean, rstd);
}

// --- 2: a warp per row ------------------------------------------------------------------------------------------
// Lanes side by side: a request is 64 neighbouring bytes, two whole sectors. 5 shuffles add up what 32 lanes have; the
// sum of a butterfly is the same in all of them, to the last bit.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(~0u, x, k);
    return x;
}
__global__ void __launch_bounds__(256)
warp_per_row(bf16 *y, float2 *stat, const bf16 *x, const bf16 *w, const bf16 *b, int N, int C) {
    const int i = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= N) return;
    x += (size_t)i * C, y += (size_t)i * C;
    float mean = 0, square = 0;
    for (int j = lane; j < C; j += 32) mean += __bfloat162float(x[j]);
    mean = warp_sum(mean) / C;
    for (int j = lane; j < C; j += 32) {
        const float u = __bfloat162float(x[j]) - mean;
        square += u * u;
    }
    const float rstd = 1 / sqrtf(warp_sum(square) / C + EPS);
    for (int j = lane; j < C; j += 32) {
        const float u = (__bfloat162float(x[j]) - mean) * rstd;
        y[j] = __float2bfloat16(u * __bfloat162float(w[j]) + __bfloat162float(b[j]));
    }
    if (lane == 0) stat[i] = make_float2(mean, rstd);
}

// --- 3: 16 bytes at a time --------------------------------------------------------------------------------------
// The sectors are those of step 2, and so are the flops. But a request is 512 bytes now: memory that answers after
// 600 cycles wants some 40 KB in flight from every multiprocessor to be busy, and a warp waits with one request at a
// time: 64 warps with 64 bytes each are 4 KB, with 512 bytes 32 KB.
struct alignas(16) Pack { bf16 v[8]; };
__device__ __forceinline__ void widen(float (&x)[8], const Pack &pack) {
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = __bfloat162float(pack.v[e]);
}
__device__ __forceinline__ void load(float (&x)[8], const bf16 *p) {
    const Pack pack = *(const Pack *)p;
    widen(x, pack);
}
// y = (x - mean) * rstd * w + b, for 8 of each
__device__ __forceinline__ void normalise(bf16 *y, const float (&x)[8], const bf16 *w, const bf16 *b, float mean,
                                          float rstd) {
    float weight[8], bias[8];
    Pack out;
    load(weight, w), load(bias, b);
#pragma unroll
    for (int e = 0; e < 8; e++) out.v[e] = __float2bfloat16((x[e] - mean) * rstd * weight[e] + bias[e]);
    *(Pack *)y = out;
}
__global__ void __launch_bounds__(256)
packs(bf16 *y, float2 *stat, const bf16 *x, const bf16 *w, const bf16 *b, int N, int C) {
    const int i = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= N) return;
    x += (size_t)i * C, y += (size_t)i * C;
    float mean = 0, square = 0, v[8];
    for (int j = lane * 8; j < C; j += 256) {
        load(v, x + j);
#pragma unroll
        for (int e = 0; e < 8; e++) mean += v[e];
    }
    mean = warp_sum(mean) / C;
    for (int j = lane * 8; j < C; j += 256) {
        load(v, x + j);
#pragma unroll
        for (int e = 0; e < 8; e++) square += (v[e] - mean) * (v[e] - mean);
    }
    const float rstd = 1 / sqrtf(warp_sum(square) / C + EPS);
    for (int j = lane * 8; j < C; j += 256) {
        load(v, x + j);
        normalise(y + j, v, w + j, b + j, mean, rstd);
    }
    if (lane == 0) stat[i] = make_float2(mean, rstd);
}

// --- 4: the row in registers ------------------------------------------------------------------------------------
// A lane's share of 1024 numbers is 4 packs, 16 registers as they are stored. All are asked for before the first is
// used: 2 KB in flight a warp. The variance can be taken from the differences to the mean, a second pass over
// registers; from the sum of squares, in one pass, it would lose all digits where the mean is large. (Registers have
// no index: the loop over p is unrolled.)
__global__ void __launch_bounds__(256)
registers(bf16 *y, float2 *stat, const bf16 *x, const bf16 *w, const bf16 *b, int N, int C) {
    const int i = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (i >= N) return;
    x += (size_t)i * C, y += (size_t)i * C;
    Pack kept[4];
    float mean = 0, square = 0, v[8];
#pragma unroll
    for (int p = 0; p < 4; p++)
        if (p * 256 + lane * 8 < C) kept[p] = *(const Pack *)(x + p * 256 + lane * 8);
#pragma unroll
    for (int p = 0; p < 4; p++)
        if (p * 256 + lane * 8 < C) {
            widen(v, kept[p]);
#pragma unroll
            for (int e = 0; e < 8; e++) mean += v[e];
        }
    mean = warp_sum(mean) / C;
#pragma unroll
    for (int p = 0; p < 4; p++)
        if (p * 256 + lane * 8 < C) {
            widen(v, kept[p]);
#pragma unroll
            for (int e = 0; e < 8; e++) square += (v[e] - mean) * (v[e] - mean);
        }
    const float rstd = 1 / sqrtf(warp_sum(square) / C + EPS);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const int j = p * 256 + lane * 8;
        if (j >= C) break;
        widen(v, kept[p]);
        normalise(y + j, v, w + j, b + j, mean, rstd);
    }
    if (lane == 0) stat[i] = make_float2(mean, rstd);
}

// --- the test and the bench -------------------------------------------------------------------------------------
typedef void Kernel(bf16 *, float2 *, const bf16 *, const bf16 *, const bf16 *, int, int);
struct Step { const char *name; Kernel *kernel; int rows, threads; }; // of a block
static const Step steps[] = {
    {"literal", literal, 128, 128},
    {"warp_per_row", warp_per_row, 8, 256},
    {"packs", packs, 8, 256},
    {"registers", registers, 8, 256},
};
static const int STEPS = 4;
static const char *name(int s) { return s < STEPS ? steps[s].name : "kernels.cu"; }
static SftTensor tensor(const void *p, SftType type, int64_t d0, int64_t d1) {
    return {const_cast<void *>(p), type, {d0, d1, 1}};
}
struct Case { // on the GPU
    int N, C;
    bf16 *x, *w, *b, *y;
    float2 *stat;
    Case(int N, int C) : N(N), C(C) {
        const size_t n = (size_t)N * C;
        x = on_gpu(numbers(n, 0)), w = on_gpu(numbers(C, 1)), b = on_gpu(numbers(C, 2)), y = on_gpu(numbers(n, 3));
        stat = on_gpu(std::vector<float2>((size_t)N));
    }
    ~Case() { cudaFree(x), cudaFree(w), cudaFree(b), cudaFree(y), cudaFree(stat); }
    void run(int s) {
        if (s == STEPS) { // what kernels.cu has
            SftArena work;
            SftCtx c = context(&work);
            return sft_cuda.layernorm_forward(&c, tensor(y, SFT_BF16, N, C), tensor(stat, SFT_F32, N, 2),
                                              tensor(x, SFT_BF16, N, C), tensor(w, SFT_BF16, C, 1),
                                              tensor(b, SFT_BF16, C, 1), EPS);
        }
        Kernel *const kernel = steps[s].kernel;
        kernel<<<(N + steps[s].rows - 1) / steps[s].rows, steps[s].threads>>>(y, stat, x, w, b, N, C);
        cuda(cudaGetLastError());
    }
};
static int bench(int N, int C) {
    Case c(N, C);
    for (int s = 0; s <= STEPS; s++) {
        const float ms = best_ms([&] { c.run(s); });
        printf("%-16s %9.3f ms %8.1f GB/s of x and y\n", name(s), ms, 4.0 * N * C / ms * 1e-6);
    }
    return 0;
}

// y and its statistics against sft_cpu in fp32, on the same numbers. A result is rounded once, to 8 bits; the numbers
// before it are of size 1, off by some roundings of 2^-24 each and by those of a sum of C.
static bool right(int s, int N, int C) {
    Case c(N, C);
    c.run(s);
    const std::vector<bf16> y = from_gpu(c.y, (size_t)N * C);
    const std::vector<float2> stat = from_gpu(c.stat, (size_t)N);
    std::vector<float> in[3], want((size_t)N * C), want_stat((size_t)N * 2);
    for (int i = 0; i < 3; i++)
        for (bf16 e : numbers(i ? C : (size_t)N * C, i)) in[i].push_back(__bfloat162float(e));
    on_cpu([&](SftCtx *cpu) {
        sft_cpu.layernorm_forward(cpu, tensor(want.data(), SFT_F32, N, C), tensor(want_stat.data(), SFT_F32, N, 2),
                                  tensor(in[0].data(), SFT_F32, N, C), tensor(in[1].data(), SFT_F32, C, 1),
                                  tensor(in[2].data(), SFT_F32, C, 1), EPS);
    });
    const auto off = [](double got, double expected, double allowed) { return !(fabs(got - expected) <= allowed); };
    for (size_t i = 0; i < (size_t)N * C; i++) {
        const float got = __bfloat162float(y[i]), *st = &want_stat[i / C * 2];
        if (!off(got, want[i], 0x1.02p-8 * fabs(want[i]) + 0x1p-19) && !off(stat[i / C].x, st[0], 0x1p-20) &&
            !off(stat[i / C].y, st[1], 0x1p-20 * st[1])) continue;
        printf("%s, %d x %d: y(%zu,%zu) is %g, expected %g; mean %g, %g; rstd %g, %g\n", name(s), N, C, i / C, i % C,
               got, want[i], stat[i / C].x, st[0], stat[i / C].y, st[1]);
        return false;
    }
    return true;
}

#ifdef EMU
// What the steps move, counted by the emulator: the bytes of the table above, and fewer instructions from step 3 on.
static bool counts_fall() {
    const int N = 32, C = 1024;
    long read[STEPS + 1], written[STEPS + 1], requests[STEPS + 1] = {};
    printf("# %d x %d          read      written  instructions\n", N, C);
    for (int s = 0; s <= STEPS; s++) {
        emu_count(true), Case(N, C).run(s), emu_count(false);
        const Counts n(s < STEPS ? name(s) : "{anonymous}::norm_kernel");
        read[s] = n.c.read, written[s] = n.c.written;
        for (int i = 0; i < n.c.nlines; i++) requests[s] += n.c.lines[i].space == 'g' ? n.c.lines[i].requests : 0;
        printf("# %-16s %7ld kB %9ld kB %9ld\n", name(s), read[s] / 1024, written[s] / 1024, requests[s]);
    }
    const long n = (long)N * C, stat = 32 * N; // a sector for each row's
    return read[0] == 98 * n && read[1] == 10 * n && read[2] == 10 * n && read[3] == 6 * n && read[4] == 6 * n &&
           written[0] >= 32 * n && written[1] <= 2 * n + stat && written[4] <= 2 * n + stat &&
           requests[2] * 7 < requests[1] && emu_races() == 0;
}
// kernels.cu, forward or backward: rows of C numbers, a LayerNorm or an RMSNorm. x, dy and dres are read once and y and
// dx are written once; w (and b) is read by every row, but in backward by every thread once.
static bool op_is_clean(SftType type, int C, bool centred, bool backward) {
    const int N = 48;
    const long size = type == SFT_F32 ? 4 : 2, all = (long)N * C * size;
    char *memory;
    cuda(cudaMalloc((void **)&memory, 16 << 20)), cuda(cudaMemset(memory, 0, 16 << 20));
    SftArena work;
    SftCtx c = context(&work);
    auto take = [&](SftType t, int64_t d0, int64_t d1) {
        const SftTensor r = tensor(memory, t, d0, d1);
        memory += (d0 * d1 * 4 + 255) / 256 * 256;
        return r;
    };
    const SftTensor x = take(type, N, C), y = take(type, N, C), dx = take(type, N, C), dres = take(type, N, C);
    const SftTensor w = take(type, C, 1), b = take(type, C, 1), stat = take(SFT_F32, N, centred ? 2 : 1);
    const SftTensor dw = take(SFT_F32, C, 1), db = take(SFT_F32, C, 1);
    emu_count(true);
    if (!backward && centred) sft_cuda.layernorm_forward(&c, y, stat, x, w, b, EPS);
    if (!backward && !centred) sft_cuda.rmsnorm_forward(&c, y, stat, x, w, EPS);
    if (backward && centred) sft_cuda.layernorm_backward(&c, dx, dw, db, dres, y, x, w, stat);
    if (backward && !centred) sft_cuda.rmsnorm_backward(&c, dx, dw, dres, y, x, w, stat);
    emu_count(false);
    const Counts n(backward ? "{anonymous}::norm_grad_kernel" : "{anonymous}::norm_kernel");
    const long weights = backward ? N / 16 * 256 * 64 : all * (centred ? 2 : 1);
    const long floor = backward ? 3 * all : all;
    if (n.c.read > 1.1 * floor + weights || n.c.written > 1.1 * all + 64 * N + (backward ? N / 16 * 2 * C * 4 : 0)) {
        printf("%ld bytes read, %ld written; %ld and %ld are enough\n", n.c.read, n.c.written, floor + weights, all);
        return false;
    }
    return clean({"norm_kernel", "norm_grad_kernel", "add_lines_kernel"});
}
#endif

static void test(const char *chip) { // of the steps and of kernels.cu
    static const int shapes[][2] = {{3, 8}, {130, 64}, {9, 1000}, {33, 768}, {1, 1024}};
    if (*chip) return; // norms know of no chip
    for (int s = 0; s <= STEPS; s++) {
        bool ok = true;
        for (auto &d : shapes) ok &= right(s, d[0], d[1]);
        report(ok, name(s), chip);
    }
#ifdef EMU
    if (!emu_traces()) return;
    report(counts_fall(), "each step moves what the table says", "");
    for (SftType type : {SFT_F32, SFT_BF16}) // fp16 runs the same lines as bf16
        for (int C : {64, 768, 4096})        // 8, 64, 256 (fp32: 512) threads a row
            for (bool centred : {true, false})
                for (bool backward : {false, true}) {
                    const std::string what = std::string(sft_type_name(type)) + ", rows of " + std::to_string(C) +
                                             (centred ? ", LayerNorm" : ", RMSNorm") + (backward ? " backward" : "");
                    report(op_is_clean(type, C, centred, backward), what.c_str(), "");
                }
#endif
}
int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "bench")) return bench(atoi(argv[2]), atoi(argv[3]));
    return ladder(test);
}

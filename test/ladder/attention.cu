/* attention.cu - from the formula to the speed of the hardware: y = softmax(scale q k^T) v, every query seeing itself
   and what came before; q, k, v and y are [N,H,64] in bf16. Five steps of one idea each; the sixth is
   attention_forward of kernels.cu: step 5 with two fragments of queries a warp (an operand is loaded once for both),
   documents, windows, groups of heads, other head sizes.

       step              idea                                              an A100's roof for it
       1 literal         a thread per query; maximum, sum, result          L1: q is read again for every score
       2 one pass        the softmax on the way, q and y in registers      load units: a load for a multiply-add
       3 shared tiles    what 128 queries read is read once for them       19.5 Tflop/s: fp32 multiply-adds
       4 tensor cores    a warp multiplies; probabilities stay where       312 Tflop/s, while tiles last
                         they were made
       5 copies ahead    v arrives during the scores, k during the sums    312 Tflop/s

   None of them has the N x N matrix in memory: it would be 4 N^2 H bytes, written once and read twice, at 2 TB/s
   longer than all the arithmetic of step 3. ladder.h says what the program does; `attention bench 4096 16`. */
#include "ladder.h"
const int D = 64; // the head size of all steps

// --- 1: the formula ---------------------------------------------------------------------------------------------
// exp(score - maximum) / sum of those: the maximum is one pass over the keys, the sum another, the result a third,
// each with all scores anew. Neighbours in a warp are neighbours among the queries: a number of k or v is the same
// for all of them, one sector; numbers of q are 128 H bytes apart, 32 sectors.
__global__ void literal(bf16 *y, const bf16 *q, const bf16 *k, const bf16 *v, int N, int H, float scale) {
    const int i = blockIdx.x * 128 + threadIdx.x, h = blockIdx.y;
    if (i >= N) return;
    auto at = [&](int token, int d) { return ((size_t)token * H + h) * D + d; };
    auto score = [&](int j) {
        float s = 0;
        for (int d = 0; d < D; d++) s += __bfloat162float(q[at(i, d)]) * __bfloat162float(k[at(j, d)]);
        return s * scale;
    };
    float most = -INFINITY, sum = 0, o[D] = {};
    for (int j = 0; j <= i; j++) most = fmaxf(most, score(j));
    for (int j = 0; j <= i; j++) sum += expf(score(j) - most);
    for (int j = 0; j <= i; j++) {
        const float p = expf(score(j) - most) / sum;
#pragma unroll
        for (int d = 0; d < D; d++) o[d] += p * __bfloat162float(v[at(j, d)]);
    }
#pragma unroll
    for (int d = 0; d < D; d++) y[at(i, d)] = __float2bfloat16(o[d]);
}

// --- 2: one pass ------------------------------------------------------------------------------------------------
// Sums relative to the largest score so far; when a larger one comes, what was summed shrinks by exp(old - new) and
// is then what it would have been. q and the sums stay in registers, 128 of them.
__device__ __forceinline__ void see(float (&o)[D], float &most, float &sum, float s) { // weighs come after it
    if (s <= most) return;
    const float shrink = expf(most - s); // the first time exp(-infinity) = 0
    most = s, sum *= shrink;
#pragma unroll
    for (int d = 0; d < D; d++) o[d] *= shrink;
}
__global__ void __launch_bounds__(128)
one_pass(bf16 *y, const bf16 *q, const bf16 *k, const bf16 *v, int N, int H, float scale) {
    const int i = blockIdx.x * 128 + threadIdx.x, h = blockIdx.y;
    if (i >= N) return;
    auto at = [&](int token, int d) { return ((size_t)token * H + h) * D + d; };
    float most = -INFINITY, sum = 0, o[D] = {}, mine[D];
#pragma unroll
    for (int d = 0; d < D; d++) mine[d] = __bfloat162float(q[at(i, d)]) * scale;
    for (int j = 0; j <= i; j++) {
        float s = 0;
#pragma unroll
        for (int d = 0; d < D; d++) s += mine[d] * __bfloat162float(k[at(j, d)]);
        see(o, most, sum, s);
        const float p = expf(s - most);
        sum += p;
#pragma unroll
        for (int d = 0; d < D; d++) o[d] += p * __bfloat162float(v[at(j, d)]);
    }
#pragma unroll
    for (int d = 0; d < D; d++) y[at(i, d)] = __float2bfloat16(o[d] / sum);
}

// --- 3: tiles in shared memory ----------------------------------------------------------------------------------
// 128 queries walk over the keys together, 32 at a time: the block reads a tile of k and one of v and converts them
// once. Then all lanes read the same 16 bytes, a broadcast: one pass over the banks for four multiply-adds of a warp,
// which is what an A100's multiprocessor does in the same cycle.
__global__ void __launch_bounds__(128)
shared_tiles(bf16 *y, const bf16 *q, const bf16 *k, const bf16 *v, int N, int H, float scale) {
    __shared__ __align__(16) float tile_k[32][D], tile_v[32][D];
    const int i0 = blockIdx.x * 128, i = i0 + threadIdx.x, h = blockIdx.y;
    auto at = [&](int token, int d) { return ((size_t)min(token, N - 1) * H + h) * D + d; };
    auto copy = [&](float (&tile)[32][D], const bf16 *x, int j0) { // thread t: quads of numbers t % 16, rows t / 16 ...
        for (int r = threadIdx.x / 16, d = threadIdx.x % 16 * 4; r < 32; r += 8) {
            const uint2 quad = *(const uint2 *)(x + at(j0 + r, d));
            const bf16 *e = (const bf16 *)&quad;
            *(float4 *)&tile[r][d] = make_float4(__bfloat162float(e[0]), __bfloat162float(e[1]),
                                                 __bfloat162float(e[2]), __bfloat162float(e[3]));
        }
    };
    float most = -INFINITY, sum = 0, o[D] = {}, mine[D];
#pragma unroll
    for (int d = 0; d < D; d += 8) {
        const int4 eight = *(const int4 *)(q + at(i, d));
        for (int e = 0; e < 8; e++) mine[d + e] = __bfloat162float(((const bf16 *)&eight)[e]) * scale;
    }
    for (int j0 = 0; j0 < min(i0 + 128, N); j0 += 32) {
        copy(tile_k, k, j0), copy(tile_v, v, j0);
        __syncthreads(); // the tiles are there
        for (int j = 0; j < 32 && j0 + j <= i; j++) {
            float s = 0;
#pragma unroll
            for (int d = 0; d < D; d += 4) {
                const float4 x = *(const float4 *)&tile_k[j][d];
                s += mine[d] * x.x + mine[d + 1] * x.y + mine[d + 2] * x.z + mine[d + 3] * x.w;
            }
            see(o, most, sum, s);
            const float p = expf(s - most);
            sum += p;
#pragma unroll
            for (int d = 0; d < D; d += 4) {
                const float4 x = *(const float4 *)&tile_v[j][d];
                o[d] += p * x.x, o[d + 1] += p * x.y, o[d + 2] += p * x.z, o[d + 3] += p * x.w;
            }
        }
        __syncthreads(); // and all have used them
    }
    if (i < N)
#pragma unroll
        for (int d = 0; d < D; d++) y[at(i, d)] = __float2bfloat16(o[d] / sum);
}

// --- 4: tensor cores --------------------------------------------------------------------------------------------
// The instructions, as in kernels.cu [1.3], where their layouts are explained.
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&both;
}
// What a warp has of its 16 queries; a lane, of rows lane / 4 and 8 more, the pairs of columns at lane % 4 * 2.
struct Queries {
    uint32_t q[4][4]; // 16 x 64, left operands
    float o[8][4];    // sums of v, 8 columns each
    float most[2], sum[2];
};
// s = exp(scale q k^T - maximum) of queries from i on and 64 keys from j on, and the sums so far relative to that
// maximum; k(row, chunk) says where in shared memory 8 numbers of a key are.
template <class K>
__device__ __forceinline__ void weights(float (&s)[8][4], Queries &x, int i, int j, float scale, K k) {
    const int lane = threadIdx.x % 32, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
    uint32_t r[4];
#pragma unroll
    for (int n = 0; n < 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int d = 0; d < 4; d++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            load_matrices(r, k(n * 16 + high * 8 + row, d * 2 + low));
            mma(s[2 * n], x.q[d], r[0], r[1]), mma(s[2 * n + 1], x.q[d], r[2], r[3]);
        }
#pragma unroll
    for (int h = 0; h < 2; h++) { // the lane's two rows, each shared by 4 lanes
        float most = x.most[h];
#pragma unroll
        for (int n = 0; n < 16; n++) {
            float &e = s[n / 2][h * 2 + n % 2];
            if (j + n / 2 * 8 + lane % 4 * 2 + n % 2 > i + h * 8 + lane / 4) e = -INFINITY;
            most = fmaxf(most, e *= scale);
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float shrink = __expf(x.most[h] - most); // every query sees the first key: no maximum is -infinity
        x.most[h] = most, x.sum[h] *= shrink;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            float &e = s[n / 2][h * 2 + n % 2];
            x.sum[h] += e = __expf(e - most);
        }
#pragma unroll
        for (int d = 0; d < 8; d++) x.o[d][h * 2] *= shrink, x.o[d][h * 2 + 1] *= shrink;
    }
}
// The sums += s v. mma leaves its result in the layout of its left operand: s enters from the registers in which it is.
template <class V> __device__ __forceinline__ void weigh(Queries &x, const float (&s)[8][4], V v) {
    const int lane = threadIdx.x % 32, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
    uint32_t r[4];
#pragma unroll
    for (int n = 0; n < 4; n++) { // 16 keys
        const uint32_t p[4] = {pack(s[2 * n][0], s[2 * n][1]), pack(s[2 * n][2], s[2 * n][3]),
                               pack(s[2 * n + 1][0], s[2 * n + 1][1]), pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
        for (int d = 0; d < 4; d++) {
            load_matrices_turned(r, v(n * 16 + low * 8 + row, d * 2 + high));
            mma(x.o[2 * d], p, r[0], r[1]), mma(x.o[2 * d + 1], p, r[2], r[3]);
        }
    }
}
template <class Q> __device__ __forceinline__ void begin(Queries &x, int row, Q q) { // from row `row` of a tile
    const int lane = threadIdx.x % 32;
    x = {};
    x.most[0] = x.most[1] = -INFINITY;
#pragma unroll
    for (int d = 0; d < 4; d++) load_matrices(x.q[d], q(row + lane % 16, d * 2 + lane / 16));
}
// Straight from registers: 4 bytes of 8 rows a warp and store, half of each sector; kernels.cu goes through shared
// memory.
__device__ __forceinline__ void finish(bf16 *y, const Queries &x, int i, int h, int N, int H) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float sum = x.sum[e];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int query = i + e * 8 + lane / 4;
#pragma unroll
        for (int d = 0; d < 8; d++)
            if (query < N)
                *(uint32_t *)&y[((size_t)query * H + h) * D + d * 8 + lane % 4 * 2] =
                    pack(x.o[d][e * 2] / sum, x.o[d][e * 2 + 1] / sum);
    }
}
// 4 warps have 64 queries, 16 each. Lines of 72 numbers: the 8 rows that ldmatrix reads at once begin 144 bytes
// apart, on 8 different groups of 4 banks.
__global__ void __launch_bounds__(128)
tensor_cores(bf16 *y, const bf16 *q, const bf16 *k, const bf16 *v, int N, int H, float scale) {
    __shared__ __align__(16) bf16 tile_k[64][72], tile_v[64][72];
    const int i0 = (gridDim.x - 1 - blockIdx.x) * 64, warp = threadIdx.x / 32 * 16, h = blockIdx.y;
    auto copy = [&](bf16 (&tile)[64][72], const bf16 *x, int j0) {
        for (int r = threadIdx.x / 8, d = threadIdx.x % 8 * 8; r < 64; r += 16)
            *(int4 *)&tile[r][d] = *(const int4 *)(x + ((size_t)min(j0 + r, N - 1) * H + h) * D + d);
    };
    auto in_k = [&](int row, int chunk) { return shared_address(&tile_k[row][chunk * 8]); };
    auto in_v = [&](int row, int chunk) { return shared_address(&tile_v[row][chunk * 8]); };
    Queries x;
    float s[8][4];
    copy(tile_k, q, i0);
    __syncthreads();
    begin(x, warp, in_k);
    __syncthreads(); // q is in registers
    for (int j0 = 0; j0 <= i0; j0 += 64) {
        copy(tile_k, k, j0), copy(tile_v, v, j0);
        __syncthreads(); // the tiles are there
        weights(s, x, i0 + warp, j0, scale, in_k);
        weigh(x, s, in_v);
        __syncthreads(); // and all have used them
    }
    finish(y, x, i0 + warp, h, N, H);
}

// --- 5: copies that run ahead -----------------------------------------------------------------------------------
// Step 4 waits for memory at every tile. Here copies go past the registers and are waited for as late as possible: k
// of the next tile is asked for when all have made their scores, and arrives during the sums of v; v, when all have
// summed the one before, and arrives during the scores. Chunks are not padded but turned, chunk c of row r stands at
// c ^ r % 8: no conflicts in 24 KB.
__global__ void __launch_bounds__(128)
copies_ahead(bf16 *y, const bf16 *q, const bf16 *k, const bf16 *v, int N, int H, float scale) {
    __shared__ __align__(128) unsigned char memory[3][64 * 128]; // q, k, v
    const int i0 = (gridDim.x - 1 - blockIdx.x) * 64, warp = threadIdx.x / 32 * 16, h = blockIdx.y;
    auto place = [&](int tile, int r, int c) { return shared_address(memory[tile]) + r * 128 + ((c ^ (r & 7)) << 4); };
    auto in_q = [&](int row, int chunk) { return place(0, row, chunk); };
    auto in_k = [&](int row, int chunk) { return place(1, row, chunk); };
    auto in_v = [&](int row, int chunk) { return place(2, row, chunk); };
    auto copy = [&](int tile, const bf16 *x, int j0) {
        for (int r = threadIdx.x / 8, c = threadIdx.x % 8; r < 64; r += 16)
            copy16(place(tile, r, c), x + ((size_t)min(j0 + r, N - 1) * H + h) * D + c * 8);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto wait = [] { // for this thread's copies; then for everyone's, and for everyone
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
    };
    Queries x;
    float s[8][4];
    copy(0, q, i0), copy(1, k, 0);
    wait();
    begin(x, warp, in_q);
    for (int j0 = 0; j0 <= i0; j0 += 64) {
        if (j0) wait(); // k is there, and nobody reads the old v any more
        copy(2, v, j0);
        weights(s, x, i0 + warp, j0, scale, in_k);
        wait(); // v is there, and nobody reads k any more
        if (j0 < i0) copy(1, k, j0 + 64);
        weigh(x, s, in_v);
    }
    finish(y, x, i0 + warp, h, N, H);
}

// --- the test and the bench -------------------------------------------------------------------------------------
typedef void Kernel(bf16 *, const bf16 *, const bf16 *, const bf16 *, int, int, float);
struct Step { const char *name; Kernel *kernel; int queries; }; // of a block of 128 threads
static const Step steps[] = {
    {"literal", literal, 128},
    {"one_pass", one_pass, 128},
    {"shared_tiles", shared_tiles, 128},
    {"tensor_cores", tensor_cores, 64},
    {"copies_ahead", copies_ahead, 64},
};
static const int STEPS = 5;
static const float SCALE = 0.125f; // 1 / sqrt(D)
static const char *name(int s) { return s < STEPS ? steps[s].name : "kernels.cu"; }
static SftTensor tensor(void *p, SftType type, int64_t d0, int64_t d1, int64_t d2) { return {p, type, {d0, d1, d2}}; }

static void run(int s, bf16 *y, bf16 *q, bf16 *k, bf16 *v, float *lse, const int32_t *begin, int N, int H) {
    if (s == STEPS) { // what kernels.cu has
        SftArena work;
        SftCtx c = context(&work);
        auto t = [&](bf16 *p) { return tensor(p, SFT_BF16, N, H, D); };
        return sft_cuda.attention_forward(&c, t(y), tensor(lse, SFT_F32, N, H, 1), t(q), t(k), t(v), begin, SCALE, 0);
    }
    Kernel *const kernel = steps[s].kernel;
    kernel<<<dim3((N + steps[s].queries - 1) / steps[s].queries, H), 128>>>(y, q, k, v, N, H, SCALE);
    cuda(cudaGetLastError());
}
struct Case { // q, k, v and what a result needs, on the GPU
    int N, H;
    bf16 *q, *k, *v, *y;
    float *lse;
    int32_t *begin;
    Case(int N, int H) : N(N), H(H) {
        const size_t n = (size_t)N * H * D;
        q = on_gpu(numbers(n, 0)), k = on_gpu(numbers(n, 1)), v = on_gpu(numbers(n, 2)), y = on_gpu(numbers(n, 3));
        lse = on_gpu(std::vector<float>((size_t)N * H)), begin = on_gpu(std::vector<int32_t>((size_t)N));
    }
    ~Case() { cudaFree(q), cudaFree(k), cudaFree(v), cudaFree(y), cudaFree(lse), cudaFree(begin); }
    void run(int s) { ::run(s, y, q, k, v, lse, begin, N, H); }
};
static int bench(int N, int H) {
    Case c(N, H);
    for (int s = 0; s <= STEPS; s++) { // two products of D multiply-adds for each pair of a query and a key it sees
        const float ms = best_ms([&] { c.run(s); });
        printf("%-16s %9.3f ms %8.1f Tflop/s\n", name(s), ms, 2.0 * N * (N + 1) * D * H / ms * 1e-9);
    }
    return 0;
}

// y against sft_cpu in fp32, on the same numbers. A result is rounded once, to 8 bits; from step 4 on probabilities
// are too, which changes a sum by at most 2^-8 of its terms' sizes: those are the attention to |v|. 2^-16 of them are
// left for exponentials and fp32 sums.
static bool right(int s, int N, int H) {
    Case c(N, H);
    c.run(s);
    const size_t n = (size_t)N * H * D;
    const std::vector<bf16> y = from_gpu(c.y, n);
    std::vector<float> x[3], lse((size_t)N * H), want(n), size(n);
    for (int i = 0; i < 3; i++)
        for (bf16 e : numbers(n, i)) x[i].push_back(__bfloat162float(e));
    const std::vector<int32_t> begin((size_t)N);
    auto reference = [&](std::vector<float> &out) {
        auto t = [&](std::vector<float> &e) { return tensor(e.data(), SFT_F32, N, H, D); };
        on_cpu([&](SftCtx *cpu) {
            sft_cpu.attention_forward(cpu, t(out), tensor(lse.data(), SFT_F32, N, H, 1), t(x[0]), t(x[1]), t(x[2]),
                                      begin.data(), SCALE, 0);
        });
    };
    reference(want);
    for (float &e : x[2]) e = fabsf(e);
    reference(size);
    for (size_t i = 0; i < n; i++) {
        const float got = __bfloat162float(y[i]);
        const double allowed = 0x1.02p-8 * fabs(want[i]) + ((s > 2 ? 0x1p-8 : 0) + 0x1p-16) * size[i];
        if (fabs(got - want[i]) <= allowed) continue;
        printf("%s, %d x %d: y(%zu,%zu,%zu) is %g, expected %g\n", name(s), N, H, i / D / H, i / D % H, i % D, got,
               want[i]);
        return false;
    }
    return true;
}

#ifdef EMU
// What the steps move, counted by the emulator: each step must do better than the one before where its idea says so,
// and kernels.cu reads q once, and k and v once for every 128 queries, as far as these see (and where they begin).
static bool counts_fall() {
    const int N = 256, H = 1;
    long read[STEPS + 1], passes[STEPS + 1], conflicts[STEPS + 1], flops[STEPS + 1];
    printf("# %d queries, a head     global read  shared passes  conflicts\n", N);
    for (int s = 0; s <= STEPS; s++) {
        emu_count(true), Case(N, H).run(s), emu_count(false);
        const Counts n(s < STEPS ? name(s) : "{anonymous}::attention_forward_mma");
        read[s] = n.c.read, passes[s] = n.passes, conflicts[s] = n.c.conflicts, flops[s] = n.c.mma_flops;
        printf("# %-16s %13ld kB %14ld %10ld\n", name(s), read[s] / 1024, passes[s], conflicts[s]);
    }
    const long tiles = N / 64 * (N / 64 + 1) / 2; // of 64 x 64 scores
    return read[1] * 10 < read[0] && read[2] * 10 < read[1] && passes[3] * 4 < passes[2] &&
           flops[3] == tiles * 2 * 2 * 64 * 64 * D && read[4] <= read[3] && passes[4] <= passes[3] &&
           passes[5] < passes[4] && read[5] < read[4] && !conflicts[2] && !conflicts[3] && !conflicts[4] &&
           !conflicts[5] && read[5] * 100 <= 105 * (N + 2 * (128 + 256)) * D * 2 && emu_races() == 0;
}
#endif

#ifdef EMU
// lse is [N,H]: a head's numbers are H apart, a store of a warp touches a sector for each; it is one of 4 bytes for
// each row of y.
static bool stores_lse(const EmuLine &l) { return l.space == 'g' && l.kind == 'w' && l.bytes == 4; }
// kernels.cu: heads of `head` numbers, two for each key head, two documents.
static bool op_is_clean(SftType type, int head, bool backward) {
    const int N = 144, H = 4, K = 2;
    char *memory;
    cuda(cudaMalloc((void **)&memory, 8 << 20)), cuda(cudaMemset(memory, 0, 8 << 20));
    SftArena work;
    SftCtx c = context(&work);
    auto take = [&](SftType t, int64_t heads, int64_t d) {
        const SftTensor r = tensor(memory, t, N, heads, d);
        memory += N * heads * d * 4;
        return r;
    };
    std::vector<int32_t> begins(N), ends(N);
    for (int i = 0; i < N; i++) begins[i] = i < 56 ? 0 : 56, ends[i] = i < 56 ? 56 : N;
    const int32_t *begin = on_gpu(begins), *end = on_gpu(ends);
    const SftTensor q = take(type, H, head), k = take(type, K, head), v = take(type, K, head), y = take(type, H, head);
    const SftTensor dq = take(type, H, head), dk = take(type, K, head), dv = take(type, K, head);
    const SftTensor dy = take(type, H, head), lse = take(SFT_F32, H, 1);
    emu_count(true);
    if (!backward) sft_cuda.attention_forward(&c, y, lse, q, k, v, begin, SCALE, 0);
    else sft_cuda.attention_backward(&c, dq, dk, dv, dy, y, lse, q, k, v, begin, end, SCALE, 0);
    emu_count(false);
    return clean({"attention_forward_mma", "attention_forward_kernel", "attention_delta_kernel",
                  "attention_backward_mma", "attention_backward_kernel", "attention_group_kernel"}, stores_lse);
}
#endif
static void test(const char *chip) { // of kernels.cu on a chip; without one, of the steps too
    static const int shapes[][2] = {{128, 2}, {200, 3}, {1, 1}, {33, 2}, {321, 1}};
    for (int s = *chip ? STEPS : 0; s <= STEPS; s++) {
        bool ok = true;
        for (auto &d : shapes) ok &= right(s, d[0], d[1]);
        report(ok, name(s), chip);
    }
#ifdef EMU
    if (!emu_traces()) return;
    if (*chip) return; // there is no other attention on another chip
    report(counts_fall(), "each step moves less than the one before", "");
    for (SftType type : {SFT_F32, SFT_BF16}) // fp16 runs the same lines as bf16
        for (int head : type == SFT_F32 ? std::vector<int>{64, 256} : std::vector<int>{32, 64, 128, 256})
            for (bool backward : {false, true}) {
                const std::string what = std::string(sft_type_name(type)) + ", heads of " +
                                         std::to_string(head) + (backward ? ", backward" : ", forward");
                report(op_is_clean(type, head, backward), what.c_str(), "");
            }
#endif
}
int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "bench")) return bench(atoi(argv[2]), atoi(argv[3]));
    return ladder(test);
}

/* matmul.cu - from the formula to the speed of the hardware: y[M,N] = x[M,K] w[N,K]^T in bf16, sums in fp32, in
   five steps of one idea each. The sixth is matmul_forward of kernels.cu: step 5 with layouts, edges in k,
   epilogues; and beyond it stands matmul_hopper.

       step              idea                                              an A100's roof for it
       1 literal         a thread per output                               L1: 4 bytes for 2 flop
       2 shared tiles    what 32 threads read is read once for them        shared memory: 8 bytes for 2 flop
       3 register tiles  what is in a register is used 8 times             19.5 Tflop/s: fp32 multiply-adds
       4 tensor cores    a warp multiplies matrices                        312 Tflop/s, while operands last
       5 ring of copies  operands arrive while others are multiplied       312 Tflop/s

   ladder.h says what the program does; `matmul bench 4096 4096 4096`. K must be a multiple of 32; of rows beyond the
   last the last is read instead, and nothing is written. */
#include "ladder.h"

// --- 1: the formula ---------------------------------------------------------------------------------------------
// Neighbours in a warp have neighbouring j: lines of w, K numbers apart. Each load of w touches 32 sectors for 64
// bytes.
__global__ void literal(bf16 *y, const bf16 *x, const bf16 *w, int M, int N, int K) {
    const int i = blockIdx.y * 8 + threadIdx.y, j = blockIdx.x * 32 + threadIdx.x;
    if (i >= M || j >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += __bfloat162float(x[(size_t)i * K + k]) * __bfloat162float(w[(size_t)j * K + k]);
    y[(size_t)i * N + j] = __float2bfloat16(sum);
}

// --- 2: tiles of 32 x 32 in shared memory -----------------------------------------------------------------------
// 1024 threads read a tile of x and one of w together, along the lines, and each uses 32 + 32 of the 2048
// numbers: global memory gives every number once for 32 uses. Lines of 33: b[x][k] is then in another bank for
// each x.
__global__ void __launch_bounds__(1024) shared_tiles(bf16 *y, const bf16 *x, const bf16 *w, int M, int N, int K) {
    __shared__ float a[32][33], b[32][33];
    const int i0 = blockIdx.y * 32, j0 = blockIdx.x * 32, r = threadIdx.y, c = threadIdx.x;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        a[r][c] = __bfloat162float(x[(size_t)min(i0 + r, M - 1) * K + k0 + c]);
        b[r][c] = __bfloat162float(w[(size_t)min(j0 + r, N - 1) * K + k0 + c]);
        __syncthreads(); // the tiles are there
        for (int k = 0; k < 32; k++) sum += a[r][k] * b[c][k];
        __syncthreads(); // and all have used them
    }
    if (i0 + r < M && j0 + c < N) y[(size_t)(i0 + r) * N + j0 + c] = __float2bfloat16(sum);
}

// --- 3: 8 x 8 outputs a thread ----------------------------------------------------------------------------------
// Per k a thread reads 8 + 8 numbers from shared memory and does 64 multiply-adds, where step 2 read 2 for 1: the
// fp32 units are the limit now. 256 threads have 128 x 128 outputs, 16 k at a time; tiles lie with k as lines, so
// that a thread's 4 neighbouring rows are one read of 16 bytes.
__global__ void __launch_bounds__(256, 2) register_tiles(bf16 *y, const bf16 *x, const bf16 *w, int M, int N, int K) {
    __shared__ __align__(16) float a[16][132], b[16][132];
    const int i0 = blockIdx.y * 128, j0 = blockIdx.x * 128, row = threadIdx.x / 2, half = threadIdx.x % 2 * 8;
    const int r = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 4; // rows r .. r+3 and 64 on, columns c .. c+3 and 64 on
    const bf16 *from_x = x + (size_t)min(i0 + row, M - 1) * K + half;
    const bf16 *from_w = w + (size_t)min(j0 + row, N - 1) * K + half;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += 16) {
        const int4 px = *(const int4 *)(from_x + k0), pw = *(const int4 *)(from_w + k0); // 8 numbers each
        for (int e = 0; e < 8; e++) a[half + e][row] = __bfloat162float(((const bf16 *)&px)[e]);
        for (int e = 0; e < 8; e++) b[half + e][row] = __bfloat162float(((const bf16 *)&pw)[e]);
        __syncthreads();
#pragma unroll 2
        for (int k = 0; k < 16; k++) {
            float u[8], v[8];
            *(float4 *)u = *(float4 *)&a[k][r], *(float4 *)(u + 4) = *(float4 *)&a[k][r + 64];
            *(float4 *)v = *(float4 *)&b[k][c], *(float4 *)(v + 4) = *(float4 *)&b[k][c + 64];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += u[i] * v[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int m = i0 + r + i % 4 + i / 4 * 64, n = j0 + c + j % 4 + j / 4 * 64;
            if (m < M && n < N) y[(size_t)m * N + n] = __float2bfloat16(sum[i][j]);
        }
}

// --- 4: tensor cores --------------------------------------------------------------------------------------------
// The three instructions, as in kernels.cu [1.3], where their layouts are explained.
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 32 k of a warp's 64 x 64 outputs: `a(row, chunk)` and `b` say where 8 numbers of a row are in shared memory.
template <class A, class B> __device__ __forceinline__ void multiply(float (&sum)[4][8][4], int wi, int wj, A a, B b) {
    const int lane = threadIdx.x % 32, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int k = 0; k < 4; k += 2) { // chunks: 16 k are two
        uint32_t u[4][4], v[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) load_matrices(u[i], a(wi + 16 * i + 8 * low + row, k + high));
#pragma unroll
        for (int j = 0; j < 4; j++) load_matrices(v[j], b(wj + 16 * j + 8 * high + row, k + low));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) mma(sum[i][j], u[i], v[j / 2][j % 2 * 2], v[j / 2][j % 2 * 2 + 1]);
    }
}
// Straight from registers: 4 bytes of 8 rows a warp and store, half of each sector; kernels.cu goes through
// shared memory.
__device__ __forceinline__ void write(bf16 *y, const float (&sum)[4][8][4], int i0, int j0, int M, int N) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 128; e++) {
        const int m = i0 + e / 32 * 16 + e / 2 % 2 * 8 + lane / 4, n = j0 + e / 4 % 8 * 8 + lane % 4 * 2 + e % 2;
        if (m < M && n < N) y[(size_t)m * N + n] = __float2bfloat16(sum[e / 32][e / 4 % 8][e % 4]);
    }
}
// 4 warps have 128 x 128 outputs, 64 x 64 each. An instruction does 4096 flop where step 3's did 64. Lines of 40
// numbers: the 8 rows that ldmatrix reads at once begin 80 bytes apart, on 8 different groups of 4 banks (the
// stores collide a little).
__global__ void __launch_bounds__(128, 2) tensor_cores(bf16 *y, const bf16 *x, const bf16 *w, int M, int N, int K) {
    __shared__ __align__(16) bf16 a[128][40], b[128][40];
    const int i0 = blockIdx.y * 128, j0 = blockIdx.x * 128;
    const int wi = threadIdx.x / 32 % 2 * 64, wj = threadIdx.x / 64 * 64;
    const int row = threadIdx.x / 4, chunk = threadIdx.x % 4 * 8;
    float sum[4][8][4] = {};
    for (int k0 = 0; k0 < K; k0 += 32) {
        for (int q = 0; q < 128; q += 32) {
            *(int4 *)&a[row + q][chunk] = *(const int4 *)(x + (size_t)min(i0 + row + q, M - 1) * K + k0 + chunk);
            *(int4 *)&b[row + q][chunk] = *(const int4 *)(w + (size_t)min(j0 + row + q, N - 1) * K + k0 + chunk);
        }
        __syncthreads();
        multiply(sum, wi, wj, [&](int r, int c) { return shared_address(&a[r][c * 8]); },
                 [&](int r, int c) { return shared_address(&b[r][c * 8]); });
        __syncthreads();
    }
    write(y, sum, i0 + wi, j0 + wj, M, N);
}

// --- 5: copies that run ahead -----------------------------------------------------------------------------------
// Step 4 waits: load, store, barrier, multiply, barrier. Here the copies of a step are begun two steps before it
// and go past the registers into a ring of three stages, and one barrier a step is enough. The ring needs every
// byte: chunks are not padded but turned, chunk c of row r stands at c ^ r / 2 % 4.
__global__ void __launch_bounds__(128, 2) ring_of_copies(bf16 *y, const bf16 *x, const bf16 *w, int M, int N, int K) {
    __shared__ __align__(128) unsigned char ring[3][2][128 * 64]; // stage, operand
    const int i0 = blockIdx.y * 128, j0 = blockIdx.x * 128;
    const int wi = threadIdx.x / 32 % 2 * 64, wj = threadIdx.x / 64 * 64;
    auto place = [](uint32_t tile, int r, int c) { return tile + r * 64 + ((c ^ (r >> 1 & 3)) << 4); };
    auto copy = [&](int step) {
        const uint32_t a = shared_address(ring[step % 3][0]), b = shared_address(ring[step % 3][1]);
        const int r = threadIdx.x / 4, c = threadIdx.x % 4;
        for (int q = 0; q < 128 && step < K / 32; q += 32) {
            copy16(place(a, r + q, c), x + (size_t)min(i0 + r + q, M - 1) * K + step * 32 + c * 8);
            copy16(place(b, r + q, c), w + (size_t)min(j0 + r + q, N - 1) * K + step * 32 + c * 8);
        }
        asm volatile("cp.async.commit_group;" ::: "memory"); // an empty group too: the wait below counts groups
    };
    float sum[4][8][4] = {};
    copy(0), copy(1);
    for (int step = 0; step < K / 32; step++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory"); // all but the latest: this step's copies are there,
        __syncthreads();                                     // everyone's, and the stage of step - 1 is free
        copy(step + 2);
        const uint32_t a = shared_address(ring[step % 3][0]), b = shared_address(ring[step % 3][1]);
        multiply(sum, wi, wj, [&](int r, int c) { return place(a, r, c); },
                 [&](int r, int c) { return place(b, r, c); });
    }
    write(y, sum, i0 + wi, j0 + wj, M, N);
}

// --- the test and the bench -------------------------------------------------------------------------------------
typedef void Kernel(bf16 *, const bf16 *, const bf16 *, int, int, int);
struct Step { const char *name; Kernel *kernel; int threads_x, threads_y, tile_m, tile_n; };
static const Step steps[] = {
    {"literal", literal, 32, 8, 8, 32},
    {"shared_tiles", shared_tiles, 32, 32, 32, 32},
    {"register_tiles", register_tiles, 256, 1, 128, 128},
    {"tensor_cores", tensor_cores, 128, 1, 128, 128},
    {"ring_of_copies", ring_of_copies, 128, 1, 128, 128},
};
static const int STEPS = 5;
static void run(int s, bf16 *y, const bf16 *x, const bf16 *w, int M, int N, int K) {
    if (s == STEPS) { // what kernels.cu has
        SftArena work;
        SftCtx c = context(&work);
        const SftTensor none = {}, ty = {y, SFT_BF16, {M, N, 1}}, tx = {(void *)x, SFT_BF16, {M, K, 1}};
        const SftTensor tw = {(void *)w, SFT_BF16, {N, K, 1}};
        return sft_cuda.matmul_forward(&c, ty, none, tx, tw, {}, none, none, 1, SFT_LINEAR);
    }
    const Step &t = steps[s];
    const dim3 grid((N + t.tile_n - 1) / t.tile_n, (M + t.tile_m - 1) / t.tile_m), block(t.threads_x, t.threads_y);
    Kernel *const kernel = t.kernel;
    kernel<<<grid, block>>>(y, x, w, M, N, K);
    cuda(cudaGetLastError());
}
static const char *name(int s) { return s < STEPS ? steps[s].name : "kernels.cu"; }

static int bench(int M, int N, int K) {
    bf16 *x = on_gpu(numbers((size_t)M * K, 0)), *w = on_gpu(numbers((size_t)N * K, 1)), *y;
    cuda(cudaMalloc((void **)&y, (size_t)M * N * 2));
    for (int s = 0; s <= STEPS; s++) {
        const float ms = best_ms([&] { run(s, y, x, w, M, N, K); });
        printf("%-16s %9.3f ms %8.1f Tflop/s\n", name(s), ms, 2.0 * M * N * K / ms * 1e-9);
    }
    return 0;
}

// y against float64. A result is rounded once, to 8 bits, and its sum is off by some 2^-24 of its terms' sizes (K
// / 4 of them on average); 4 such are allowed, and 4 more for the order in which a tensor core adds.
static bool right(int s, int M, int N, int K) {
    const std::vector<bf16> hx = numbers((size_t)M * K, 0), hw = numbers((size_t)N * K, 1);
    bf16 *x = on_gpu(hx), *w = on_gpu(hw), *y = on_gpu(numbers((size_t)M * N, 2));
    run(s, y, x, w, M, N, K);
    const std::vector<bf16> hy = from_gpu(y, (size_t)M * N);
    cudaFree(x), cudaFree(w), cudaFree(y);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0, size = 0, got = __bfloat162float(hy[(size_t)i * N + j]);
            for (int k = 0; k < K; k++) {
                const double u = __bfloat162float(hx[(size_t)i * K + k]), v = __bfloat162float(hw[(size_t)j * K + k]);
                sum += u * v, size += fabs(u * v);
            }
            if (fabs(got - sum) <= 0x1.02p-8 * fabs(sum) + 8 * 0x1p-24 * size) continue;
            printf("%s, %d x %d x %d: y(%d,%d) is %g, expected %g\n", name(s), M, N, K, i, j, got, sum);
            return false;
        }
    return true;
}

#ifdef EMU
// What the steps move, counted by the emulator: each step must do better than the one before where its idea says
// so.
static bool counts_fall() {
    const int n = 256;
    EmuCount c[STEPS];
    long passes[STEPS];
    printf("# %d x %d x %d      global read  shared passes  conflicts\n", n, n, n);
    for (int s = 0; s < STEPS; s++) {
        emu_count(true), right(s, n, n, n), emu_count(false);
        const Counts n(name(s));
        c[s] = n.c, passes[s] = n.passes;
        printf("# %-16s %10ld kB %14ld %10ld\n", name(s), c[s].read / 1024, passes[s], c[s].conflicts);
    }
    return c[1].read * 100 < c[0].read && c[2].read * 4 <= c[1].read && passes[2] * 5 < passes[1] &&
           passes[3] * 5 < passes[2] && c[3].mma_flops == 2L * n * n * n && passes[4] < passes[3] &&
           c[4].conflicts == 0 && emu_races() == 0;
}
static bool op_is_clean(SftType type, int product) {
    const int N = 256, I = 192, O = 128; // rows, in, out
    const size_t size = type == SFT_F32 ? 4 : 2;
    char *memory;
    cuda(cudaMalloc((void **)&memory, 8 << 20)), cuda(cudaMemset(memory, 0, 8 << 20));
    SftArena work;
    SftCtx c = context(&work);
    auto take = [&](SftType t, int64_t d0, int64_t d1) {
        const SftTensor r = {memory, t, {d0, d1, 1}};
        memory += (d0 * d1 * (t == SFT_F32 ? 4 : size) + 255) / 256 * 256;
        return r;
    };
    const SftTensor x = take(type, N, I), w = take(type, O, I), y = take(type, N, O), bias = take(type, O, 1);
    const SftTensor pre = take(type, N, O), before = take(type, N, I);
    const SftTensor dw = take(SFT_F32, O, I), db = take(SFT_F32, O, 1);
    emu_count(true);
    if (product == 0) sft_cuda.matmul_forward(&c, y, pre, x, w, {}, bias, y, 1, SFT_GELU);
    if (product == 1) sft_cuda.matmul_backward_x(&c, x, y, w, {}, before, 1, SFT_GELU_TANH, true);
    if (product == 2) sft_cuda.matmul_backward_w(&c, dw, db, y, x);
    emu_count(false);
    return clean({"matmul_plain", "matmul_tensor", "matmul_hopper", "matmul_bias", "matmul_parts", "add_lines_kernel"});
}
#endif

static void test(const char *chip) { // of kernels.cu on a chip; without one, of the steps too
    static const int shapes[][3] = {{128, 128, 64}, {200, 136, 96}, {1, 8, 32}, {130, 257, 64}};
    for (int s = *chip ? STEPS : 0; s <= STEPS; s++) {
        bool ok = true;
        for (auto &d : shapes) ok &= right(s, d[0], d[1], d[2]);
        report(ok, name(s), chip);
    }
#ifdef EMU
    if (!emu_traces()) return;
    if (!*chip) report(counts_fall(), "each step moves less than the one before", "");
    static const char *names[SFT_TYPES][3] = {{"fp32 y = x w^T", "fp32 dx = dy w", "fp32 dw += dy^T x"},
                                              {"bf16 y = x w^T", "bf16 dx = dy w", "bf16 dw += dy^T x"},
                                              {"fp16 y = x w^T", "fp16 dx = dy w", "fp16 dw += dy^T x"}};
    for (int type = 0; type < SFT_TYPES; type++)
        for (int product = 0; product < 3; product++)
            report(op_is_clean((SftType)type, product), names[type][product], chip);
#endif
}
int main(int argc, char **argv) {
    if (argc == 5 && !strcmp(argv[1], "bench")) return bench(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
    return ladder(test);
}

/* kernels.cu - the operations of sft.h on a GPU                                                          MIT licence

   sft.h says what every operation computes, and holds a CPU reference of each; this file says how a GPU does the same
   fast, and never repeats the mathematics. Read the two side by side: sections and subsections have the same ids,
   forward stands above backward, and `const SftOps sft_cuda` at the end is the same table as `sft_cpu`. train_gpt2cu
   is train.c with that table; nothing else differs.

   SECTIONS (ids are sft.h's)
       [1] ground      number types and vectors, warps and blocks, tensor-core instructions, errors, launches, memory
       [5] ops         5.2 matmul   5.3 embedding, rows   5.4 norms   5.5 rotary positions   5.6 attention
                       5.7 SwiGLU, loss, optimizer   and the table

   HOW TO READ A KERNEL
   Above it stands how threads map to data, what it moves against the least that it must move (its floor), why it is
   fast, and what was tried. Most operations do a few flops per byte: their time is bytes / bandwidth, so the rules are
   - every byte once: what a thread will need again stays in registers;
   - 16 bytes per thread and access, neighbouring threads at neighbouring addresses (a warp then moves 512 bytes whole);
   - enough bytes in flight: several loads before the first use, enough blocks to fill every multiprocessor;
   - sums in fp32, in an order that depends on the dimensions alone; no float atomics anywhere.

   WORDS FOR THREADS
       lane     a thread within its warp of 32; lanes run together and swap registers by shuffles
       warp     32 threads; a row of a few hundred numbers is a warp's work
       block    warps that share memory and barriers; a long row is a block's work
       W        numbers that a thread moves at once: 16 bytes' worth, or 1 where a row does not begin on 16 bytes
       "thread (warp, block) per row": the i-th of the grid has row i, so that neighbours read neighbouring bytes */
#include "sft.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdlib.h>
#include <type_traits>

namespace {

/* ================================================================================================================
   [1] ground: errors, arenas, types, random numbers, clock, files
   ================================================================================================================
   Number types as templates see them, W numbers at a time; sums over warps and blocks; the few PTX instructions that
   have no name in CUDA C++, each in a function of its own; errors; launches; memory.
   Guarded by test/test_kernels.cu. Pitfall: an error of a kernel shows up at some later call. CUDA_LAUNCH_BLOCKING=1 in
   the environment makes it show up at its own. */

// [1.1] number types ---------------------------------------------------------------------------------------------
typedef __nv_bfloat16 bf16;
typedef __half f16;
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
// Rounded to nearest even, as on the CPU.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }

// Two floats as two 16-bit numbers in one register, x in the lower half: what tensor cores eat.
template <class T> __device__ __forceinline__ uint32_t pack2(float x, float y) {
    T both[2] = {from_float<T>(x), from_float<T>(y)};
    uint32_t u;
    memcpy(&u, both, 4);
    return u;
}

// W numbers at p as floats, by the widest accesses that W allows, 16 bytes at most; p is aligned to them.
template <class T, int W> struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) Pack {
    T v[W];
};
template <class T> constexpr int wide = 16 / (int)sizeof(T); // numbers in 16 bytes

template <int W, class T> __device__ __forceinline__ void load(float (&x)[W], const T *p) {
    const Pack<T, W> pack = *(const Pack<T, W> *)p;
#pragma unroll
    for (int i = 0; i < W; i++) x[i] = to_float(pack.v[i]);
}
template <int W, class T> __device__ __forceinline__ void store(T *p, const float (&x)[W]) {
    Pack<T, W> pack;
#pragma unroll
    for (int i = 0; i < W; i++) pack.v[i] = from_float<T>(x[i]);
    *(Pack<T, W> *)p = pack;
}

// [1.2] warps and blocks -----------------------------------------------------------------------------------------
__device__ __forceinline__ int lane() { return (int)threadIdx.x & 31; }
__device__ __forceinline__ int warp() { return (int)threadIdx.x >> 5; }
__device__ __forceinline__ int64_t thread() { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; } // of the grid
__device__ __forceinline__ int64_t threads() { return (int64_t)gridDim.x * blockDim.x; }

// Sum and maximum over the lanes of a warp; every lane gets the same bits, for a + b == b + a.
template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int k = 16; k; k >>= 1) x += __shfl_xor_sync(~0u, x, k);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int k = 16; k; k >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, k));
    return x;
}
// Sum over a block of THREADS threads, the warps in order of the butterfly. All of the block must call it.
template <int THREADS, class T> __device__ __forceinline__ T block_sum(T x) {
    __shared__ T part[THREADS / 32];
    x = warp_sum(x);
    if (THREADS == 32) return x;
    __syncthreads(); // the sums of an earlier call have been read
    if (lane() == 0) part[warp()] = x;
    __syncthreads();
    return warp_sum(lane() < THREADS / 32 ? part[lane()] : T(0));
}

// [1.3] instructions without a name ------------------------------------------------------------------------------
// Shared memory as PTX addresses it: an offset of 32 bits.
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// 16 bytes from global to shared memory, past the registers; they arrive some time before copy_wait. Only the first
// `bytes` are read, the others become zeros (bytes == 0: nothing is read).
__device__ __forceinline__ void copy_part(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool valid) {
    copy_part(to, from, valid ? 16 : 0);
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); } // ends a group
template <int LEFT> __device__ __forceinline__ void copy_wait() { // all groups have arrived but the LEFT latest
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Four 8x8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8 (16 bytes each). Lane i
// gets of each matrix, in r[matrix], the pair at row i / 4, columns 2 (i % 4) and one more; turned: of its transpose.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_turned(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
/* d[16,8] += a[16,16] b[16,8] of a warp, in fp32. With g = i / 4 and c = 2 (i % 4), lane i holds
   d: (g,c) (g,c+1) (g+8,c) (g+8,c+1);  a: pairs along a row from (g,c) (g+8,c) (g,c+8) (g+8,c+8) on;
   b: pairs down column g from (c,g) (c+8,g) on. */
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [1.4] errors, launches -----------------------------------------------------------------------------------------
// CHECK(cudaFree(p)); and, right after kernel<<<...>>>(...): LAUNCHED("kernel"); end the program with what went wrong.
void check(cudaError_t error, const char *what, const char *file, int line) {
    if (error != cudaSuccess) sft_die(SFT_BROKEN, "%s:%d: %s: %s", file, line, what, cudaGetErrorString(error));
}
#define CHECK(call) check((call), #call, __FILE__, __LINE__)
#define LAUNCHED(kernel) check(cudaGetLastError(), "kernel " kernel, __FILE__, __LINE__)

cudaStream_t stream(const SftCtx *c) { return (cudaStream_t)c->stream; }

// What kernels need to know about the GPU, asked for once.
const cudaDeviceProp &gpu() {
    static cudaDeviceProp properties;
    if (!properties.multiProcessorCount) {
        int device;
        CHECK(cudaGetDevice(&device));
        CHECK(cudaGetDeviceProperties(&properties, device));
    }
    return properties;
}

// Blocks that n pieces of work need at `each` per block.
unsigned blocks(int64_t n, int64_t each) {
    const int64_t count = (n + each - 1) / each;
    if (count >> 31) sft_die(SFT_BROKEN, "a grid of %lld blocks is more than a GPU takes", (long long)count);
    return (unsigned)count;
}

/* From types of the run to types of the compiler: f is called with a value of T, and compiled for each of them.
       with_type(x.type, [&](auto t) { typedef decltype(t) T; ... kernel<T><<<...>>>((T *)x.data); });
   with_width also gives W: 16 bytes' worth if rows of C elements begin on 16 bytes in all of the tensors, else 1.
       with_width(x.type, C, [&](auto t, auto w) { constexpr int W = decltype(w)::value; ... }, x, y); */
template <class F> void with_type(SftType type, F f) {
    if (type == SFT_F32) f(float());
    else if (type == SFT_BF16) f(bf16());
    else f(f16());
}
bool aligned(int64_t) { return true; }
template <class... Tensors> bool aligned(int64_t C, SftTensor t, Tensors... more) {
    const int64_t bytes = C * (t.type == SFT_F32 ? 4 : 2);
    return (uintptr_t)t.data % 16 == 0 && (!t.data || bytes % 16 == 0) && aligned(C, more...);
}
template <class F, class... Tensors> void with_width(SftType type, int64_t C, F f, Tensors... tensors) {
    with_type(type, [&](auto t) {
        typedef decltype(t) T;
        if (aligned(C, tensors...)) f(t, std::integral_constant<int, wide<T>>());
        else f(t, std::integral_constant<int, 1>());
    });
}

/* ================================================================================================================
   [5] ops: every operation, forward above backward, and the table that lists them
   ================================================================================================================
   As in sft.h: an op allocates nothing but pieces of c->work (which lies on the GPU), given back before it returns,
   and when planning takes them and does nothing else. Ops of one stream run in order, so that a piece given back may be
   taken by the next op. Nothing here waits for the GPU, and nothing reads its memory.

   Invariants. The same bits every time, on every GPU: sums are split by constants of this file, never by the number of
   multiprocessors, and their parts are added in a fixed order. Any size works; sizes whose rows begin on 16 bytes are
   the fast ones. Guarded by test/test_kernels.cu: every op of the table against sft_cpu, in test/emu, at shapes that
   fit no tile, under AddressSanitizer, in several orders of threads.
   Usual pitfall: int overflow. Elements of a tensor are counted in int64_t; V * N exceeds 2^31. */

// An op that is not written yet says so when it is called.
#define UNWRITTEN(op) template <class... A> void op(A...) { sft_die(SFT_BROKEN, "sft_cuda has no " #op " yet"); }

// [5.2] matmul ---------------------------------------------------------------------------------------------------
/* The three products are one: out(i,j) = epilogue(sum over k of a(i,k) b(j,k)), out[M,N], with

       forward   y = x w^T       a = x[N,I]    b = w[O,I]    k = I
       dx        dx = dy w       a = dy[N,O]   b = w[O,I]    k = O: down the columns of w
       dw        dw += dy^T x    a = dy[N,O]   b = x[N,I]    k = N: down the columns of both

   and an operand is a pointer, the distance of its lines in memory, and a bool of the template, DOWN: k runs
   along the lines (neighbours in memory have the same i), or down, from line to line (neighbours have the same
   k). Nothing is transposed in memory: what a kernel must know of a layout are the two or three functions that
   stand before it.

   Kernels, from the general to the special; `multiply` at the end chooses.
       matmul_plain    fp32, and what tensor cores cannot take: rows that do not begin on 16 bytes
       matmul_tensor   bf16 and fp16
       matmul_few      up to 8 rows of x: generation
       matmul_parts    adds what several blocks have summed of the same outputs

   Floor: 2 M N K flop against 2 (M K + N K + M N) bytes in bf16. At 312 Tflop/s and 2 TB/s (A100) flops take
   longer as soon as each of M, N and K exceeds about 470: large products are bound by arithmetic, few rows by
   memory. */
constexpr int TILE = 128;        // a block's outputs are TILE x TILE
constexpr int SPLIT = 216;       // blocks that fill a GPU: two for each of an A100's 108 multiprocessors
constexpr int SPLIT_DEPTH = 256; // the least k that is worth a block of its own

struct Product {
    const void *a, *b;           // of type T
    void *out, *pre;             // out: T, or fp32 if f32; pre: T, NULL if absent
    const void *bias, *residual; // T; out's type; NULL if absent
    int64_t lda, ldb, ld;        // numbers from a line to the next: of a; of b; of out, pre and residual
    int64_t part;                // numbers from a part of the sums to the next
    int M, N, K, depth;          // blocks with blockIdx.z = z sum k = z depth .. (z+1) depth, which is part z
    SftAct act;
    bool backward, f32;          // the sums are multiplied by act'(pre) | out is fp32
    bool aligned, quads;         // lines of a and b begin on 16 bytes | those of the epilogue on 4 numbers
};

// n <= 4 numbers (none if n < 1) from p on, zeros after them; `whole`: there are 4, and p is aligned to them.
template <class T> __device__ __forceinline__ void load_quad(float (&x)[4], const T *p, int n, bool whole) {
    if (whole) return load(x, p);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = e < n ? to_float(p[e]) : 0.0f;
}

// z = act(x), or z *= act'(x)
template <int W>
__device__ __forceinline__ void activate(float (&z)[W], const float (&x)[W], SftAct act, bool backward) {
#define EACH(formula) _Pragma("unroll") for (int e = 0; e < W; e++) z[e] formula(x[e])
    if (act == SFT_GELU && !backward) EACH(= sft_gelu);
    if (act == SFT_GELU && backward) EACH(*= sft_gelu_grad);
    if (act == SFT_GELU_TANH && !backward) EACH(= sft_gelu_tanh);
    if (act == SFT_GELU_TANH && backward) EACH(*= sft_gelu_tanh_grad);
#undef EACH
}

/* The epilogue of Q times W sums: columns j .. j+W of rows i, i + 2, ... All is read before any is used, so
   that a thread waits for memory once. The conditions on p are the same for all threads. */
template <class T, int W, int Q>
__device__ __forceinline__ void finish(const Product &p, float (&z)[Q][W], int i, int j) {
    const int64_t at = (int64_t)blockIdx.z * p.part + i * p.ld + j;
    const int rows = (p.M - i + 1) / 2; // row i + 2 q exists if q < rows
    float x[Q][W] = {}, r[Q][W] = {}, b[W] = {};
    if (p.bias) load(b, (const T *)p.bias + j);
#pragma unroll
    for (int q = 0; q < Q; q++) {
        const int64_t here = at + 2 * q * p.ld;
        if (q < rows && p.backward && p.act != SFT_LINEAR) load(x[q], (const T *)p.pre + here);
        if (q < rows && p.residual && p.f32) load(r[q], (const float *)p.residual + here);
        if (q < rows && p.residual && !p.f32) load(r[q], (const T *)p.residual + here);
    }
#pragma unroll
    for (int q = 0; q < Q; q++) {
        const int64_t here = at + 2 * q * p.ld;
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (p.bias) z[q][e] += b[e];
            if (!p.backward) x[q][e] = z[q][e];
        }
        if (q < rows && p.pre && !p.backward) store((T *)p.pre + here, z[q]);
        activate(z[q], x[q], p.act, p.backward);
        if (p.residual)
#pragma unroll
            for (int e = 0; e < W; e++) z[q][e] += r[q][e];
        if (q < rows && p.f32) store((float *)p.out + here, z[q]);
        if (q < rows && !p.f32) store((T *)p.out + here, z[q]);
    }
}

/* From registers to memory. A thread's sums lie where the inner loop wants them, in pairs or quads all over the
   tile; memory wants neighbours in a row from neighbours in a warp. So a warp puts a slice of 16 x 64 sums into
   4 KB of shared memory that the main loop no longer needs, takes it out by rows, 16 lanes to a row's 64
   columns, and every access to global memory is of whole sectors of 32 bytes (pairs straight from registers
   would fill half of each).
   Banks: 8 columns are a block, and block c of row r stands where block c ^ r % 4 would. Half a warp writes
   pairs to 4 rows of one block: 4 x 8 banks. It reads 4 blocks of a row: the same 32.
   Tried: 4 quads a thread in flight instead of 2. The formulas of 16 numbers at a time took all 255 registers;
   and 2 quads of 8 warps are the 8 KB that a multiprocessor of an A100 must have in flight to get its share of
   2 TB/s. */
__device__ __forceinline__ float *slice_at(float *slice, int row, int column) {
    return slice + row * 64 + (column ^ (row & 3) << 3);
}
template <class T> __device__ __forceinline__ void finish_slice(const Product &p, float *slice, int i, int j) {
    constexpr int Q = 2;
    const int half = lane() >> 4, part = lane() & 15;
    __syncwarp();
#pragma unroll 1
    for (int row = half; row < 16; row += 2 * Q) {
        if (p.quads && p.N - j >= 4 * part + 4) {
            float z[Q][4];
#pragma unroll
            for (int q = 0; q < Q; q++) load(z[q], slice_at(slice, row + 2 * q, 4 * part));
            finish<T>(p, z, i + row, j + 4 * part);
        } else
#pragma unroll 1
            for (int e = 0; e < 4; e++) {
                const int column = p.quads ? 4 * part + e : part + 16 * e; // the last few, or a line without quads
                float z[Q][1];
#pragma unroll
                for (int q = 0; q < Q; q++) z[q][0] = *slice_at(slice, row + 2 * q, column);
                if (column < p.N - j) finish<T>(p, z, i + row, j + column);
            }
    }
    __syncwarp();
}

// The corner of block b's tile, which is `width` wide. Blocks that run at the same time should find each
// other's operands in L2: they go in groups of 8 rows of tiles, column after column, so that 216 blocks read
// the lines of 8 + 27 tiles, not of 1 + 216 or 216 + 1.
struct Corner {
    int m, n;
};
__device__ __forceinline__ Corner corner(const Product &p, int width, int b) {
    const int rows = (p.M + TILE - 1) / TILE, columns = (p.N + width - 1) / width;
    const int first = b / (8 * columns) * 8, height = min(8, rows - first), at = b % (8 * columns);
    return {(first + at % height) * TILE, at / height * width};
}

/* matmul_plain. 256 threads have a tile of 128 x 128 outputs, 8 x 8 each: a warp 32 x 64, lane (y, x) of 4 x 8
   rows 4y .. 4y+3 and 16 further on, columns 4x .. 4x+3 and 32 further on. Per k a thread reads 2 + 2 quads
   from shared memory and does 64 multiply-adds, 4 a number read; less would be bound by shared memory.
   Memory: a block reads its 128 lines of a and of b once; all blocks, a N / 128 times and b M / 128 times,
   mostly from L2.
   8 k at a time: the next ones come into registers during the sums and go to the other of two buffers after
   them, so that there is one barrier a step and memory has a step's 512 multiply-adds to answer.
   Banks: number (row, k) stands in line k at row ^ 16 (k / 4 % 2). An operand with k along its lines arrives as
   quads of 4 k, 16 rows x 2 quads a warp; each of the 4 stores hits 16 banks and the 16 others. Quads along a
   line, and all reads (8 lanes side by side, or the same quad), take a bank once as they are.
   120-126 registers, 32 KB: 2 blocks on a multiprocessor. Tried: 16 k at a time, and all 8 k unrolled; both
   spill at 128. */
constexpr int PLAIN_DEPTH = 8;
__device__ __forceinline__ float *plain_at(float *tile, int row, int k) {
    return tile + k * TILE + (row ^ (k & 4) << 2);
}
// A thread's quad of each tile of an operand: of k at a row or, DOWN, of rows at a k.
template <class T, bool DOWN> struct Plain {
    const T *next;
    int rows; // from the quad's row to the operand's last
    static __device__ __forceinline__ int row() { return DOWN ? lane() * 4 : (int)threadIdx.x / 2; }
    static __device__ __forceinline__ int k() { return DOWN ? warp() : threadIdx.x % 2 * 4; }
    __device__ __forceinline__ Plain(const void *x, int64_t ld, int i, int M, int k0) : rows(M - i - row()) {
        next = (const T *)x + (DOWN ? (k0 + k()) * ld + i + row() : (i + row()) * ld + k0 + k());
    }
    // The quad of the next tile; `left` k are left from the tile's first. What lies outside is 0.
    __device__ __forceinline__ void read(float (&x)[4], int64_t ld, int left, bool aligned) {
        const int n = DOWN ? (k() < left ? rows : 0) : (rows > 0 ? left - k() : 0);
        load_quad(x, next, n, aligned && n >= 4);
        next += DOWN ? PLAIN_DEPTH * ld : PLAIN_DEPTH;
    }
    static __device__ __forceinline__ void write(float *tile, const float (&x)[4]) {
        if (DOWN) store(plain_at(tile, row(), k()), x);
        else
#pragma unroll
            for (int e = 0; e < 4; e++) *plain_at(tile, row(), k() + e) = x[e];
    }
};
template <class T, bool DOWN_A, bool DOWN_B> __global__ void __launch_bounds__(256, 2) matmul_plain(Product p) {
    __shared__ __align__(16) float memory[2][2 * 16 * TILE]; // tiles of a and b; at the end, slices
    const Corner at = corner(p, TILE, blockIdx.x);
    const int begin = blockIdx.z * p.depth, end = min(p.K, begin + p.depth);
    const int wy = warp() / 2 * 32, wx = warp() % 2 * 64, y = lane() / 8 * 4, x = lane() % 8 * 4;
    float sum[8][8] = {}, a[4], b[4];
    Plain<T, DOWN_A> from_a(p.a, p.lda, at.m, p.M, begin);
    Plain<T, DOWN_B> from_b(p.b, p.ldb, at.n, p.N, begin);
    from_a.read(a, p.lda, end - begin, p.aligned), from_b.read(b, p.ldb, end - begin, p.aligned);
    for (int k = begin, now = 0; k < end; k += PLAIN_DEPTH, now ^= 1) {
        float *tile_a = memory[now], *tile_b = tile_a + PLAIN_DEPTH * TILE;
        from_a.write(tile_a, a), from_b.write(tile_b, b);
        __syncthreads(); // all is there; and all are done with the sums of the step before, whose buffer is next
        const int left = end - k - PLAIN_DEPTH;
        from_a.read(a, p.lda, left, p.aligned), from_b.read(b, p.ldb, left, p.aligned);
#pragma unroll 2
        for (int q = 0; q < PLAIN_DEPTH; q++) {
            float u[2][4], v[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                load(u[h], plain_at(tile_a, wy + y + 16 * h, q));
                load(v[h], plain_at(tile_b, wx + x + 32 * h, q));
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += u[i / 4][i % 4] * v[j / 4][j % 4];
        }
    }
    __syncthreads();
    float *slice = &memory[0][0] + warp() * 16 * 64;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++) { // quad i % 2 of row i / 2
            const float *s = &sum[4 * h + i / 2][i % 2 * 4];
            *(float4 *)slice_at(slice, y + i / 2, x + i % 2 * 32) = make_float4(s[0], s[1], s[2], s[3]);
        }
        finish_slice<T>(p, slice, at.m + wy + 16 * h, at.n + wx);
    }
}

/* matmul_tensor. 4 warps have a tile of 128 x 128 outputs, 64 x 64 each, 32 k a step. For 16 k a warp loads 4
   fragments of a and 4 of b, 16 x 16 each (ldmatrix), and multiplies each with each (mma): 4 KB of shared
   memory for 131,072 flop. An A100's multiprocessor does 2048 flop a cycle, so it asks for 64 bytes of the 128
   a cycle that it can have; with warps of 32 x 32 it would ask for all of them. Smaller fragments starve,
   larger ones have no registers: 128 hold the sums alone.
   Memory: operands go from global to shared memory past the registers (cp.async), 16 bytes a thread, 3 stages
   of 16 KB in a ring: while a step is multiplied the next is there and the one after is on its way. As in
   matmul_plain a is read N / 128 times, b M / 128 times, mostly from L2. Edges are zeros, put in by the copy
   itself.
   Banks: ldmatrix reads 8 rows of 16 bytes at a time, and they must lie in 8 different groups of 4 banks. k
   along the lines: a line is 64 bytes, so that lines 0, 2, 4, 6 begin on the same bank, and chunk c of line l
   stands where c ^ l / 2 % 4 would. DOWN: a line is 256 bytes, all lines begin on the same bank, c ^ l % 8. The
   copies' writes, 8 lanes to 128 bytes of a line or of two, hit every group once too.
   232-240 registers, 48 KB: 2 blocks on a multiprocessor, whose barriers and copies hide behind each other's
   mma. */
constexpr int STAGES = 3, STEP = 32, OPERAND = TILE * STEP * 2; // bytes of a tile of an operand
// Where chunk c (16 bytes, 8 numbers) of line l is in a tile: of 128 lines of 4 chunks or, DOWN, 32 lines of 16.
template <bool DOWN> __device__ __forceinline__ uint32_t chunk_at(int l, int c) {
    return DOWN ? l * 256 + ((c ^ (l & 7)) << 4) : l * 64 + ((c ^ (l >> 1 & 3)) << 4);
}
template <class T, bool DOWN>
__device__ __forceinline__ void copy_tile(uint32_t tile, const void *x, int64_t ld, int i0, int rows, int k0, int end) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int own = threadIdx.x + 128 * q, l = DOWN ? own / 16 : own / 4, c = DOWN ? own % 16 : own % 4;
        const int i = i0 + (DOWN ? 8 * c : l), k = k0 + (DOWN ? l : 8 * c);
        const int n = i < rows && k < end ? min(8, DOWN ? rows - i : end - k) : 0; // numbers that are there
        copy_part(tile + chunk_at<DOWN>(l, c), (const T *)x + (DOWN ? k * ld + i : i * ld + k), 2 * n);
    }
}
// The fragment of 16 rows from i, 16 k from k: 4 matrices of 8 x 8, in the order in which mma wants them: of a,
// rows + 8 before k + 8; of b, k + 8 before rows + 8.
template <bool DOWN, bool B>
__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t tile, int i, int k) {
    const int matrix = lane() / 8, row = lane() % 8, low = matrix % 2 * 8, high = matrix / 2 * 8;
    i += B ? high : low, k += B ? low : high;
    if (DOWN) load_matrices_turned(r, tile + chunk_at<true>(k + row, i / 8));
    else load_matrices(r, tile + chunk_at<false>(i + row, k / 8));
}
template <class T, bool DOWN_A, bool DOWN_B> __global__ void __launch_bounds__(128, 2) matmul_tensor(Product p) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t ring = shared_address(memory);
    const Corner at = corner(p, TILE, blockIdx.x);
    const int begin = blockIdx.z * p.depth, end = min(p.K, begin + p.depth);
    const int steps = (end - begin + STEP - 1) / STEP, wy = warp() % 2 * 64, wx = warp() / 2 * 64;
    float sum[4][8][4] = {};
    auto copy = [&](int step) {
        const uint32_t to = ring + step % STAGES * 2 * OPERAND;
        if (step < steps) {
            copy_tile<T, DOWN_A>(to, p.a, p.lda, at.m, p.M, begin + step * STEP, end);
            copy_tile<T, DOWN_B>(to + OPERAND, p.b, p.ldb, at.n, p.N, begin + step * STEP, end);
        }
        copy_commit(); // an empty group too: copy_wait counts groups
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(s);
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); // this step is there for all; and all are done with the step before, whose stage is next
        copy(step + STAGES - 1);
        const uint32_t a = ring + step % STAGES * 2 * OPERAND, b = a + OPERAND;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t u[4][4], v[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) load_fragment<DOWN_A, false>(u[i], a, wy + 16 * i, k);
#pragma unroll
            for (int j = 0; j < 4; j++) load_fragment<DOWN_B, true>(v[j], b, wx + 16 * j, k);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) mma<T>(sum[i][j], u[i], v[j / 2][j % 2 * 2], v[j / 2][j % 2 * 2 + 1]);
        }
    }
    __syncthreads();
    float *slice = (float *)memory + warp() * 16 * 64;
#pragma unroll 1
    for (int s = 0; s < 4; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i == s) // registers have no index: which ones these are must be known when compiling
#pragma unroll
                for (int j = 0; j < 16; j++) { // pair j % 2 (rows 8 apart) of the sums 8 columns wide
                    const float *pair = &sum[i][j / 2][j % 2 * 2];
                    float *to = slice_at(slice, j % 2 * 8 + lane() / 4, j / 2 * 8 + lane() % 4 * 2);
                    *(float2 *)to = make_float2(pair[0], pair[1]);
                }
        finish_slice<T>(p, slice, at.m + wy + 16 * s, at.n + wx);
    }
}

/* matmul_parts. A small out has too few tiles to fill a GPU: dw of 768 x 768 has 36. Then k is cut into parts,
   blocks with blockIdx.z = z write the sums of part z in fp32, and a thread of this kernel adds W neighbours of
   all parts, in order, and does the epilogue. The parts move 8 bytes an output and part; SPLIT_DEPTH keeps that
   below the operands' share. */
template <class T, int W>
__global__ void __launch_bounds__(256) matmul_parts(Product p, const float *parts, int n) {
    const int64_t line = p.N / W, i = thread() / line, j = thread() % line * W, size = (int64_t)p.M * p.N;
    if (i >= p.M) return;
    float z[1][W] = {}, x[W];
    for (int s = 0; s < n; s++) {
        load(x, parts + s * size + i * p.N + j);
#pragma unroll
        for (int e = 0; e < W; e++) z[0][e] += x[e];
    }
    finish<T>(p, z, (int)i, (int)j);
}

/* matmul_few. Generation multiplies one row, or few, with every weight once: its time is the weights' bytes /
   bandwidth. A warp has 2 lines of w and all rows of x, lanes side by side along k, 16 bytes each, two steps in
   flight; x comes from L1, read M / 2 times the bytes of w, which 8 rows just allow. No shared memory, no
   barrier: 5 shuffles add up a sum. */
template <class T, int ROWS> __global__ void __launch_bounds__(128, 3) matmul_few(Product p) {
    constexpr int W = wide<T>;
    const int j = (blockIdx.x * 4 + warp()) * 2, last = p.N - 1;
    if (j > last) return;
    const T *x[ROWS], *w[2] = {(const T *)p.b + j * p.ldb, (const T *)p.b + min(j + 1, last) * p.ldb};
#pragma unroll
    for (int r = 0; r < ROWS; r++) x[r] = (const T *)p.a + min(r, p.M - 1) * p.lda;
    float sum[ROWS][2] = {};
    const int whole = p.aligned ? p.K / W * W : 0;
#pragma unroll 2
    for (int k = lane() * W; k < whole; k += 32 * W) {
        float u[2][W], v[W];
        load(u[0], w[0] + k), load(u[1], w[1] + k);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            load(v, x[r] + k);
#pragma unroll
            for (int e = 0; e < W; e++) sum[r][0] += u[0][e] * v[e], sum[r][1] += u[1][e] * v[e];
        }
    }
    for (int k = whole + lane(); k < p.K; k += 32)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int q = 0; q < 2; q++) sum[r][q] += to_float(w[q][k]) * to_float(x[r][k]);
    float z[1][1] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const float s = warp_sum(sum[r][q]);
            if (lane() == 2 * r + q) z[0][0] = s;
        }
    const int i = lane() / 2, column = j + lane() % 2;
    if (i < p.M && column <= last) finish<T>(p, z, i, column);
}

/* matmul_bias: dbias += column sums of dy[N,O]. A block has 128 columns, a quad per lane, and 256 rows, every
   8th a warp's; its sums, warps in order, are a line of parts[N / 256][O], and matmul_bias_add adds the lines
   in order. Reads dy once. */
constexpr int BIAS_ROWS = 256;
template <class T> __global__ void __launch_bounds__(256)
matmul_bias(float *parts, const T *dy, int64_t ld, int rows, int columns, bool quads) {
    __shared__ __align__(16) float all[8][TILE];
    const int j = blockIdx.x * TILE + lane() * 4, n = columns - j, first = blockIdx.y * BIAS_ROWS;
    float sum[4] = {}, x[4];
#pragma unroll 4
    for (int i = first + warp(); i < min(rows, first + BIAS_ROWS); i += 8) {
        load_quad(x, dy + i * ld + j, n, quads && n >= 4);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] += x[e];
    }
    store(&all[warp()][lane() * 4], sum);
    __syncthreads();
    const int column = blockIdx.x * TILE + threadIdx.x;
    if (threadIdx.x >= TILE || column >= columns) return;
    float total = 0;
    for (int w = 0; w < 8; w++) total += all[w][threadIdx.x];
    parts[(int64_t)blockIdx.y * columns + column] = total;
}
__global__ void __launch_bounds__(256) matmul_bias_add(float *dbias, const float *parts, int n, int columns) {
    const int64_t j = thread();
    if (j >= columns) return;
    float total = 0;
    for (int s = 0; s < n; s++) total += parts[(int64_t)s * columns + j];
    dbias[j] += total;
}

template <class T> void multiply_few(SftCtx *c, const Product &p) {
    const unsigned grid = blocks(p.N, 8);
    if (p.M == 1) matmul_few<T, 1><<<grid, 128, 0, stream(c)>>>(p);
    else if (p.M == 2) matmul_few<T, 2><<<grid, 128, 0, stream(c)>>>(p);
    else if (p.M <= 4) matmul_few<T, 4><<<grid, 128, 0, stream(c)>>>(p);
    else matmul_few<T, 8><<<grid, 128, 0, stream(c)>>>(p);
    LAUNCHED("matmul_few");
}
template <class T, bool DOWN_A, bool DOWN_B> void multiply_tiles(SftCtx *c, const Product &p, dim3 grid) {
    if constexpr (sizeof(T) == 2)
        if (p.aligned) {
            matmul_tensor<T, DOWN_A, DOWN_B><<<grid, 128, STAGES * 2 * OPERAND, stream(c)>>>(p);
            LAUNCHED("matmul_tensor");
            return;
        }
    matmul_plain<T, DOWN_A, DOWN_B><<<grid, 256, 0, stream(c)>>>(p);
    LAUNCHED("matmul_plain");
}
// Chooses the kernel, and into how many parts k is cut: as many as fill a GPU with blocks, each of at least
// SPLIT_DEPTH.
template <bool DOWN_A, bool DOWN_B> void multiply(SftCtx *c, Product p, SftType type) {
    const int64_t tiles = (int64_t)((p.M + TILE - 1) / TILE) * ((p.N + TILE - 1) / TILE);
    const int64_t most = p.K / SPLIT_DEPTH;
    const int64_t sums = SFT_MIN(most * p.M * p.N, (int64_t)SPLIT * TILE * TILE); // not fewer for a larger M or K
    const size_t mark = c->work->used;
    float *parts = (float *)sft_take(c->work, most > 1 ? (size_t)sums * 4 : 0);
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !tiles) return;
    int64_t n = SFT_MAX(1, SFT_MIN(SPLIT / tiles, most));
    p.depth = SFT_MAX((int)((p.K + 32 * n - 1) / (32 * n)) * 32, 32);
    n = SFT_MAX(1, (p.K + p.depth - 1) / p.depth);
    Product q = p; // what the blocks of a part write: its sums
    if (n > 1) {
        q.out = parts, q.f32 = true, q.pre = NULL, q.bias = q.residual = NULL, q.act = SFT_LINEAR;
        q.ld = p.N, q.part = (int64_t)p.M * p.N, q.quads = p.N % 4 == 0;
    }
    with_type(type, [&](auto t) {
        typedef decltype(t) T;
        if (!DOWN_A && !DOWN_B && p.M <= 8) return multiply_few<T>(c, p);
        multiply_tiles<T, DOWN_A, DOWN_B>(c, q, dim3(blocks(tiles, 1), 1, (unsigned)n));
        if (n == 1) return;
        const int64_t size = (int64_t)p.M * p.N;
        if (p.quads && p.N % 4 == 0) matmul_parts<T, 4><<<blocks(size, 1024), 256, 0, stream(c)>>>(p, parts, (int)n);
        else matmul_parts<T, 1><<<blocks(size, 256), 256, 0, stream(c)>>>(p, parts, (int)n);
        LAUNCHED("matmul_parts");
    });
}

const SftTensor absent = {};
int64_t width(SftTensor t) { return t.dim[1] * t.dim[2]; } // numbers from a line to the next
// What the three have in common. An absent tensor is aligned.
Product product(SftTensor out, SftTensor a, SftTensor b, SftTensor pre, SftTensor bias, SftTensor residual,
                SftAct act) {
    for (SftTensor t : {b, pre, bias})
        if (t.data && t.type != a.type)
            sft_die(SFT_BROKEN, "matmul on a GPU: %s and %s, expected one type", sft_type_name(a.type),
                    sft_type_name(t.type));
    Product p = {};
    p.a = a.data, p.b = b.data, p.out = out.data, p.pre = pre.data, p.bias = bias.data, p.residual = residual.data;
    p.lda = width(a), p.ldb = width(b), p.ld = width(out), p.act = act, p.f32 = out.type == SFT_F32;
    p.aligned = aligned(width(a), a) && aligned(width(b), b);
    p.quads = p.ld % 4 == 0 && aligned(0, out, pre, bias, residual);
    return p;
}
void matmul_forward(SftCtx *c, SftTensor y, SftTensor pre, SftTensor x, SftTensor w, SftTensor bias, SftTensor residual,
                    SftAct act) {
    Product p = product(y, x, w, pre, bias, residual, act);
    p.M = (int)y.dim[0], p.N = (int)w.dim[0], p.K = (int)width(w);
    multiply<false, false>(c, p, x.type);
}
void matmul_backward_x(SftCtx *c, SftTensor dx, SftTensor dy, SftTensor w, SftTensor pre, SftAct act, bool add) {
    Product p = product(dx, dy, w, pre, absent, add ? dx : absent, act);
    p.M = (int)dx.dim[0], p.N = (int)width(w), p.K = (int)w.dim[0], p.backward = true;
    multiply<false, true>(c, p, dy.type);
}
void matmul_backward_w(SftCtx *c, SftTensor dw, SftTensor dbias, SftTensor dy, SftTensor x) {
    Product p = product(dw, dy, x, absent, absent, dw, SFT_LINEAR);
    p.M = (int)dw.dim[0], p.N = (int)width(dw), p.K = (int)dy.dim[0], p.backward = true;
    if (sft_planning(c) || p.K) multiply<true, true>(c, p, dy.type);
    if (!dbias.dim[0]) return;
    const unsigned n = blocks(p.K, BIAS_ROWS);
    const size_t mark = c->work->used;
    float *parts = (float *)sft_take(c->work, (size_t)n * (size_t)p.M * 4);
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !p.K) return;
    with_type(dy.type, [&](auto t) {
        typedef decltype(t) T;
        const dim3 grid(blocks(p.M, TILE), n);
        matmul_bias<T><<<grid, 256, 0, stream(c)>>>(parts, (const T *)dy.data, p.lda, p.K, p.M, p.aligned);
        LAUNCHED("matmul_bias");
    });
    matmul_bias_add<<<blocks(p.M, 256), 256, 0, stream(c)>>>((float *)dbias.data, parts, (int)n, p.M);
    LAUNCHED("matmul_bias_add");
}

// [5.3] embedding, rows ------------------------------------------------------------------------------------------
UNWRITTEN(embedding_forward)
UNWRITTEN(embedding_backward)
UNWRITTEN(gather_rows)
UNWRITTEN(scatter_rows)
UNWRITTEN(zero)
UNWRITTEN(convert)

// [5.4] norms ----------------------------------------------------------------------------------------------------
UNWRITTEN(layernorm_forward)
UNWRITTEN(layernorm_backward)
UNWRITTEN(rmsnorm_forward)
UNWRITTEN(rmsnorm_backward)

// [5.5] rotary positions -----------------------------------------------------------------------------------------
UNWRITTEN(rope_table)
UNWRITTEN(rope_forward)
UNWRITTEN(rope_backward)

// [5.6] attention ------------------------------------------------------------------------------------------------
UNWRITTEN(attention_forward)
UNWRITTEN(attention_backward)

// [5.7] SwiGLU, loss, optimizer ----------------------------------------------------------------------------------
/* swiglu_forward: thread per W numbers of the flat vectors. Moves 3 numbers per output, the floor. */
template <class T, int W>
__global__ void __launch_bounds__(256) swiglu_kernel(T *y, const T *gate, const T *up, int64_t n) {
    const int64_t i = thread() * W;
    if (i >= n) return;
    float g[W], u[W];
    load(g, gate + i), load(u, up + i);
#pragma unroll
    for (int k = 0; k < W; k++) g[k] = sft_silu(g[k]) * u[k];
    store(y + i, g);
}
void swiglu_forward(SftCtx *c, SftTensor y, SftTensor gate, SftTensor up) {
    const int64_t n = sft_size(y);
    if (sft_planning(c) || !n) return;
    with_width(y.type, n, [&](auto t, auto w) {
        typedef decltype(t) T;
        constexpr int W = decltype(w)::value;
        const T *g = (const T *)gate.data, *u = (const T *)up.data;
        swiglu_kernel<T, W><<<blocks(n, 256 * W), 256, 0, stream(c)>>>((T *)y.data, g, u, n);
        LAUNCHED("swiglu_forward");
    }, y, gate, up);
}
UNWRITTEN(swiglu_backward)
UNWRITTEN(cross_entropy)
UNWRITTEN(sums)
UNWRITTEN(adamw)
} // namespace

const SftOps sft_cuda = {
    "cuda",
#define X(op, args) op,
    SFT_OPS(X)
#undef X
};

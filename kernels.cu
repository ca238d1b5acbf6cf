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
// 16 bytes from global to shared memory, past the registers; they arrive some time before copy_wait. !valid: zeros, and
// `from` is not read (it must still be an address).
__device__ __forceinline__ void copy16(uint32_t to, const void *from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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
UNWRITTEN(matmul_forward)
UNWRITTEN(matmul_backward_x)
UNWRITTEN(matmul_backward_w)

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

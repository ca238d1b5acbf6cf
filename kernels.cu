/* kernels.cu - the operations of sft.h on a GPU                                                          MIT licence

   sft.h says what every operation computes, and holds a CPU reference of each; this file says how a GPU does the same
   fast, and never repeats the mathematics. Read the two side by side: sections and subsections have the same ids,
   forward stands above backward, and `const SftOps sft_cuda` at the end is the same table as `sft_cpu`. train_gpt2cu
   is train.c with that table; nothing else differs.

   SECTIONS (ids are sft.h's)
       [1] ground      number types and vectors, warps and blocks, tensor-core instructions, errors, launches, memory
       [5] ops         5.2 matmul   5.3 embedding, rows   5.4 norms   5.5 rotary positions   5.6 attention
                       5.7 SwiGLU, loss, optimizer   5.8 weights in 4 and 8 bits   and the table

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
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ctype.h>
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
template <int THREADS> __device__ __forceinline__ float block_max(float x) {
    __shared__ float part[THREADS / 32];
    x = warp_max(x);
    __syncthreads();
    if (lane() == 0) part[warp()] = x;
    __syncthreads();
    return warp_max(part[lane() % (THREADS / 32)]);
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
__device__ __forceinline__ void copy8(uint32_t to, const void *from, bool valid) { // the same with 8
    const int bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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

// Hopper only (sm_90a). A barrier lies in shared memory; a phase ends when `arrivals` threads have arrived and the
// bytes expected are there. Phases have parity 0, 1, 0, ...; on a new barrier barrier_wait(b, 1) returns at once.
__device__ __forceinline__ void barrier_init(uint32_t b, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_fence() { // inits are seen by copy_box; __syncthreads for the other threads
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t b, int bytes) { // arrives, too
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t b, int parity) {
    asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(b), "r"(parity) : "memory");
}
// The box of a tensor map whose corner is column x of line y, to shared memory; its bytes arrive at barrier b.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, uint32_t b, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(b), "r"(x), "r"(y) : "memory");
}
// Registers of each thread of a warpgroup (4 warps) from now on: what one gives back another may take.
template <int N> __device__ __forceinline__ void registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
/* d[64, 64 S] = (add ? d : 0) + a[64,16] b[16, 64 S] of a warpgroup, begun here and done after wgmma_wait; a and b
   are matrix descriptors, DOWN as in [5.2]. A warp has 16 rows; its d[s] are columns 64 s .. 64 s + 63, 8 times what
   mma's d is. Between wgmma_fence and wgmma_wait nobody may touch d. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() { // all groups are done but the LEFT latest
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// clang-format off
#define WGMMA_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_32(d) WGMMA_4(d[0]), WGMMA_4(d[1]), WGMMA_4(d[2]), WGMMA_4(d[3]), WGMMA_4(d[4]), WGMMA_4(d[5]), WGMMA_4(d[6]), WGMMA_4(d[7])
#define WGMMA_NAMES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_MORE ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA(n, type, names, a, b, add, down_a, down_b) "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64" n "k16.f32." type "." type " {" names "}, " a ", " b ", p, 1, 1, " down_a ", " down_b ";\n}"
// clang-format on
template <class T, int DOWN_A, int DOWN_B>
__device__ __forceinline__ void wgmma(float (&d)[2][8][4], uint64_t a, uint64_t b, int add) {
    if constexpr (std::is_same<T, bf16>::value)
        asm volatile(WGMMA("n128", "bf16", WGMMA_NAMES, "%64", "%65", "%66", "%67", "%68")
                     : WGMMA_32(d[0]), WGMMA_32(d[1]) : "l"(a), "l"(b), "r"(add), "n"(DOWN_A), "n"(DOWN_B));
    else
        asm volatile(WGMMA("n128", "f16", WGMMA_NAMES, "%64", "%65", "%66", "%67", "%68")
                     : WGMMA_32(d[0]), WGMMA_32(d[1]) : "l"(a), "l"(b), "r"(add), "n"(DOWN_A), "n"(DOWN_B));
}
template <class T, int DOWN_A, int DOWN_B>
__device__ __forceinline__ void wgmma(float (&d)[4][8][4], uint64_t a, uint64_t b, int add) {
    if constexpr (std::is_same<T, bf16>::value)
        asm volatile(WGMMA("n256", "bf16", WGMMA_NAMES WGMMA_MORE, "%128", "%129", "%130", "%131", "%132")
                     : WGMMA_32(d[0]), WGMMA_32(d[1]), WGMMA_32(d[2]), WGMMA_32(d[3])
                     : "l"(a), "l"(b), "r"(add), "n"(DOWN_A), "n"(DOWN_B));
    else
        asm volatile(WGMMA("n256", "f16", WGMMA_NAMES WGMMA_MORE, "%128", "%129", "%130", "%131", "%132")
                     : WGMMA_32(d[0]), WGMMA_32(d[1]), WGMMA_32(d[2]), WGMMA_32(d[3])
                     : "l"(a), "l"(b), "r"(add), "n"(DOWN_A), "n"(DOWN_B));
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

// [1.5] memory ---------------------------------------------------------------------------------------------------
/* Arenas lie on the GPU. What comes from the host goes through two pinned halves that take turns: pageable memory would
   make each copy wait until all work on the stream is done, so that the host could not run ahead of the GPU. What goes
   to the host has a stream of its own, which waits for the work so far and no longer: the figures of a step arrive
   while AdamW still runs. The host's end is pinned, too: an arena of reserve(.., true). */
constexpr size_t HALF = 4 << 20;
struct Transfers {
    char *pinned;              // [2 HALF]
    int half;                  // the one that is being filled
    size_t used;               // of it
    cudaEvent_t sent[2], made; // all of a half; what is to be downloaded
    cudaStream_t copier;
};
Transfers &transfers() {
    static Transfers t;
    if (t.pinned) return t;
    CHECK(cudaMallocHost((void **)&t.pinned, 2 * HALF));
    for (cudaEvent_t *e : {&t.sent[0], &t.sent[1], &t.made}) CHECK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    CHECK(cudaStreamCreateWithFlags(&t.copier, cudaStreamNonBlocking));
    return t;
}

void *reserve(size_t bytes, bool host) {
    void *p = NULL;
    bytes = bytes ? bytes : 1;
    const cudaError_t error = host ? cudaMallocHost(&p, bytes) : cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) return cudaGetLastError(), nullptr; // which forgets the error
    CHECK(error);
    if (host) memset(p, 0, bytes);
    else CHECK(cudaMemset(p, 0, bytes));
    return p;
}
void release(void *p, size_t, bool host) {
    if (host) CHECK(cudaFreeHost(p));
    else CHECK(cudaFree(p));
}

void upload(SftCtx *c, void *to, const void *from, size_t bytes) {
    Transfers &t = transfers();
    for (size_t done = 0, n; done < bytes; done += n) {
        if (t.used == HALF) {
            CHECK(cudaEventRecord(t.sent[t.half], stream(c)));
            t.half ^= 1, t.used = 0;
            CHECK(cudaEventSynchronize(t.sent[t.half])); // its turn before this one
        }
        n = bytes - done < HALF - t.used ? bytes - done : HALF - t.used;
        char *piece = t.pinned + t.half * HALF + t.used;
        memcpy(piece, (const char *)from + done, n);
        CHECK(cudaMemcpyAsync((char *)to + done, piece, n, cudaMemcpyHostToDevice, stream(c)));
        t.used += n;
    }
}
void download(SftCtx *c, void *to, const void *from, size_t bytes) {
    Transfers &t = transfers();
    CHECK(cudaEventRecord(t.made, stream(c)));
    CHECK(cudaStreamWaitEvent(t.copier, t.made, 0));
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, t.copier));
}
void wait_for_downloads(SftCtx *) { CHECK(cudaStreamSynchronize(transfers().copier)); }

/* The most that a GPU can do, in 10^12 flop/s: tensor cores with 16-bit numbers and fp32 sums, without sparsity; fp32
   without tensor cores. From NVIDIA's data sheets of the chips and its white papers of GA102 (RTX 30), AD102 (RTX 40)
   and GB202 (RTX 50), whose consumer cards sum in fp32 at half the speed of their fp16 sums. A name is found where it
   stands as words of the driver's name for the GPU; of two that fit, the first counts. RTX names must be whole: one
   that goes on (SUPER, Laptop GPU) is another chip. So is a part of a chip (MIG). */
struct Peak { const char *name; double half, single; };
const Peak peaks[] = {
    {"B300", 2250, 75}, {"GB200", 2500, 80}, {"B200", 2250, 75}, {"GH200", 990, 67}, {"H200 NVL", 836, 60},
    {"H200", 990, 67}, {"H100 NVL", 836, 60}, {"H100 PCIe", 756, 51}, {"H100", 990, 67}, {"H800", 990, 67},
    {"H20", 148, 44}, {"A100", 312, 19.5}, {"A800", 312, 19.5}, {"A30", 165, 10.3}, {"A40", 149.7, 37.4},
    {"A10G", 70, 31.5}, {"A10", 125, 31.2}, {"L40S", 362, 91.6}, {"L40", 181, 90.5}, {"L4", 121, 30.3},
    {"T4", 65, 8.1}, {"V100", 125, 15.7}, {"RTX A6000", 154.8, 38.7}, {"RTX A5000", 111.1, 27.8},
    {"RTX 6000 Ada Generation", 364.2, 91.1}, {"RTX 5090", 209.5, 104.8}, {"RTX 5080", 112.6, 56.3},
    {"RTX 4090", 165.2, 82.6}, {"RTX 4080", 97.5, 48.7}, {"RTX 3090 Ti", 80, 40}, {"RTX 3090", 71, 35.6},
    {"RTX 3080", 59.5, 29.8},
};
SftDevice device() {
    SftDevice d = {};
    const cudaError_t error = cudaMemGetInfo(&d.free, &d.memory);
    if (error)
        sft_die(SFT_BROKEN, "no GPU can be used: %s; train_gpt2 does the same on a CPU", cudaGetErrorString(error));
    snprintf(d.name, sizeof d.name, "%.255s", gpu().name);
    for (const Peak &p : peaks) {
        const char *at = strstr(d.name, p.name), *end = at ? at + strlen(p.name) : NULL;
        if (!at || (at > d.name && at[-1] != ' ') || isalnum(*end)) continue;
        if ((*end && strstr(p.name, "RTX")) || strstr(d.name, "MIG")) continue;
        d.flops[SFT_F32] = p.single * 1e12;
        d.flops[SFT_F16] = p.half * 1e12;
        if (gpu().major >= 8) d.flops[SFT_BF16] = p.half * 1e12; // earlier ones have no bf16
        break;
    }
    return d;
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

// [5.1] threads, rows, blocks ------------------------------------------------------------------------------------
const SftTensor absent = {};
int64_t width(SftTensor t) { return t.dim[1] * t.dim[2]; } // numbers from a line to the next
size_t bytes_of(SftType type) { return type == SFT_F32 ? 4 : 2; }
template <int N> using Int = std::integral_constant<int, N>;

// Ends the program unless all of these that are there have the type of the first.
template <class... Tensors> void one_type(const char *op, SftTensor first, Tensors... others) {
    for (const SftTensor &t : {others...})
        if (t.data && t.type != first.type)
            sft_die(SFT_BROKEN, "%s on a GPU: %s and %s, expected one type", op, sft_type_name(first.type),
                    sft_type_name(t.type));
}

/* add_lines: out[C] += the lines of parts[n][C]: what the blocks of a kernel have summed, in the order of the blocks. A
   block has 32 columns; a warp adds every 8th line, and the warps' sums are added in order. Reads parts once, from L2
   where it has just been written. */
__global__ void __launch_bounds__(256) add_lines_kernel(float *out, const float *parts, int n, int64_t C) {
    __shared__ float sum[8][32];
    const int64_t j = (int64_t)blockIdx.x * 32 + lane();
    float s = 0, total = 0;
    if (j < C)
#pragma unroll 4
        for (int i = warp(); i < n; i += 8) s += parts[i * C + j];
    sum[warp()][lane()] = s;
    __syncthreads();
    if (warp() || j >= C) return;
#pragma unroll
    for (int k = 0; k < 8; k++) total += sum[k][lane()];
    out[j] += total;
}
void add_lines(SftCtx *c, SftTensor out, const float *parts, unsigned n, int64_t C) {
    add_lines_kernel<<<blocks(C, 32), 256, 0, stream(c)>>>((float *)out.data, parts, (int)n, C);
    LAUNCHED("add_lines");
}

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
       matmul_hopper   the same, by what the tensor cores of sm_90 want
       matmul_few      up to 8 rows of x: generation
       matmul_parts    adds what several blocks have summed of the same outputs

   A side (LoRA's) is a second pair of operands whose k follow the first's in the same sum: [x | u] [w | B]^T,
   [dy | du] [w ; A]. No output is read or written again; copies to shared memory run ahead across the change.

   Floor: 2 M N K flop against 2 (M K + N K + M N) bytes in bf16. At 312 Tflop/s and 2 TB/s (A100) flops take
   longer as soon as each of M, N and K exceeds about 470: large products are bound by arithmetic, few rows by
   memory. Registers below are ptxas's for sm_80 to sm_90a, banks and sectors test/emu's (gated by
   test/ladder/matmul.cu, which also climbs from the formula to matmul_tensor in five steps); speeds on a GPU
   are still to be measured. */
constexpr int TILE = 128;        // a block's outputs are TILE x TILE
constexpr int SPLIT = 216;       // blocks that fill a GPU: two for each of an A100's 108 multiprocessors
constexpr int SPLIT_DEPTH = 256; // the least k that is worth a block of its own

struct Operands {
    const void *a, *b;           // of type T
    int64_t lda, ldb;            // numbers from a line to the next
    int K;                       // 0: there are none
};
struct Product {
    Operands main, side;         // the side's k follow the main ones in the same sum (LoRA)
    void *out, *pre;             // out: T, or fp32 if f32; pre: T, NULL if absent
    const void *bias, *residual; // T; out's type; NULL if absent
    int64_t ld;                  // numbers from a line to the next of out, pre and residual
    int64_t part_size;           // numbers from a part of the sums to the next
    int M, N, depth, parts;      // part z sums k = z depth .. (z+1) depth, the last one the side's too
    int columns;                 // of out that are written: N, or up to 3 more, so that a padded line ends with a quad
    float scale;                 // of the sum
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
__device__ __forceinline__ void finish(const Product &p, int part, float (&z)[Q][W], int i, int j) {
    const int64_t at = part * p.part_size + i * p.ld + j;
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
            z[q][e] *= p.scale;
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
template <class T>
__device__ __forceinline__ void finish_slice(const Product &p, int part, float *slice, int i, int j) {
    constexpr int Q = 2;
    const int half = lane() >> 4, quad = lane() & 15;
    __syncwarp();
#pragma unroll 1
    for (int row = half; row < 16; row += 2 * Q) {
        if (p.quads && p.columns - j >= 4 * quad + 4) {
            float z[Q][4];
#pragma unroll
            for (int q = 0; q < Q; q++) load(z[q], slice_at(slice, row + 2 * q, 4 * quad));
            finish<T>(p, part, z, i + row, j + 4 * quad);
        } else
#pragma unroll 1
            for (int e = 0; e < 4; e++) {
                const int column = p.quads ? 4 * quad + e : quad + 16 * e; // the last few, or a line without quads
                if (column >= p.columns - j) break;
                float z[Q][1];
#pragma unroll
                for (int q = 0; q < Q; q++) z[q][0] = *slice_at(slice, row + 2 * q, column);
                finish<T>(p, part, z, i + row, j + column);
            }
    }
    __syncwarp();
}

// The same from the sums of tensor cores: S slices, slice s of rows i + DI s, columns j + DJ s. `slice` is a
// warp's 4 KB.
template <class T, int DI, int DJ, int S>
__device__ __forceinline__ void finish_sums(const Product &p, int part, float (&sum)[S][8][4], float *slice, int i,
                                            int j) {
#pragma unroll 1
    for (int s = 0; s < S; s++) {
#pragma unroll
        for (int t = 0; t < S; t++)
            if (t == s) // registers have no index: which ones these are must be known when compiling
#pragma unroll
                for (int q = 0; q < 16; q++) { // pair q % 2 (8 rows apart) of the sums q / 2, 8 columns wide
                    const float *pair = &sum[t][q / 2][q % 2 * 2];
                    float *to = slice_at(slice, q % 2 * 8 + lane() / 4, q / 2 * 8 + lane() % 4 * 2);
                    *(float2 *)to = make_float2(pair[0], pair[1]);
                }
        finish_slice<T>(p, part, slice, i + DI * s, j + DJ * s);
    }
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
   122-128 registers, 32 KB: 2 blocks on a multiprocessor. Tried: 16 k at a time, and all 8 k unrolled; both
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
    const int wy = warp() / 2 * 32, wx = warp() % 2 * 64, y = lane() / 8 * 4, x = lane() % 8 * 4;
    float sum[8][8] = {}, a[4], b[4];
    int now = 0; // the buffer that nobody reads
    auto multiply = [&](const Operands &o, int k, int left) { // from k on
        Plain<T, DOWN_A> from_a(o.a, o.lda, at.m, p.M, k);
        Plain<T, DOWN_B> from_b(o.b, o.ldb, at.n, p.N, k);
        from_a.read(a, o.lda, left, p.aligned), from_b.read(b, o.ldb, left, p.aligned);
        for (; left > 0; now ^= 1) {
            float *tile_a = memory[now], *tile_b = tile_a + PLAIN_DEPTH * TILE;
            from_a.write(tile_a, a), from_b.write(tile_b, b);
            __syncthreads(); // all is there; and all are done with the sums of the step before, whose buffer is next
            left -= PLAIN_DEPTH;
            from_a.read(a, o.lda, left, p.aligned), from_b.read(b, o.ldb, left, p.aligned);
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
    };
    const int first = blockIdx.z * p.depth;
    multiply(p.main, first, min(p.main.K - first, p.depth));
    if ((int)blockIdx.z == p.parts - 1 && p.side.K) multiply(p.side, 0, p.side.K);
    __syncthreads();
    float *slice = &memory[0][0] + warp() * 16 * 64;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 8; i++) { // quad i % 2 of row i / 2
            const float *z = &sum[4 * h + i / 2][i % 2 * 4];
            *(float4 *)slice_at(slice, y + i / 2, x + i % 2 * 32) = make_float4(z[0], z[1], z[2], z[3]);
        }
        finish_slice<T>(p, blockIdx.z, slice, at.m + wy + 16 * h, at.n + wx);
    }
}

// A part is a row of steps, each of `step` k: `own` from begin on, which end at `end`, and in the last part the side's.
// Only those who copy must tell them apart.
struct Steps {
    int begin, end, own, all;
    __device__ __forceinline__ Steps(const Product &p, int part, int step) : begin(part * p.depth) {
        end = min(p.main.K, begin + p.depth), own = (end - begin + step - 1) / step;
        all = own + (part == p.parts - 1 ? (p.side.K + step - 1) / step : 0);
    }
};

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
   234-242 registers, 48 KB: 2 blocks on a multiprocessor, whose barriers and copies hide behind each other's
   mma. */
constexpr int STAGES = 3, STEP = 32, OPERAND = TILE * STEP * 2; // bytes of a tile of an operand
// Where chunk c (16 bytes, 8 numbers) of line l is in a tile: of 128 lines of 4 chunks or, DOWN, 32 lines of
// 16.
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
    const Steps s(p, blockIdx.z, STEP);
    const int wy = warp() % 2 * 64, wx = warp() / 2 * 64;
    float sum[4][8][4] = {};
    auto copy = [&](int step) {
        const uint32_t to = ring + step % STAGES * 2 * OPERAND;
        const bool side = step >= s.own;
        const int k = side ? (step - s.own) * STEP : s.begin + step * STEP, end = side ? p.side.K : s.end;
        if (step < s.all) {
            const void *a = side ? p.side.a : p.main.a, *b = side ? p.side.b : p.main.b;
            copy_tile<T, DOWN_A>(to, a, side ? p.side.lda : p.main.lda, at.m, p.M, k, end);
            copy_tile<T, DOWN_B>(to + OPERAND, b, side ? p.side.ldb : p.main.ldb, at.n, p.N, k, end);
        }
        copy_commit(); // an empty group too: copy_wait counts groups
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) copy(step);
    for (int step = 0; step < s.all; step++) {
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
    finish_sums<T, 16, 0>(p, blockIdx.z, sum, (float *)memory + warp() * 16 * 64, at.m + wy, at.n + wx);
}

/* matmul_hopper. A Hopper's tensor cores reach about 65 % of their speed by mma (arXiv 2501.12084); the rest
   takes wgmma, which 4 warps, a warpgroup, begin together and which reads both operands from shared memory by
   itself. Roles: of a block's three warpgroups one copies and two multiply, 64 x WIDTH outputs each. One thread
   of the first asks for boxes of 64 k (TMA: an instruction a box; zeros beyond the edges) into a ring of
   stages. Barrier `full` says that a stage's bytes have arrived, `empty` that 8 warps are done with it. A group
   of 4 wgmma stays in flight: a stage is given back when the next one's group has begun. Registers follow the
   roles: 40 a thread there, 232 here, where 128 are sums. A block stays on its multiprocessor and goes from
   tile to tile; the copies of the next tile run during the epilogue.
   Memory: 128 x 256 outputs do 85 flop per byte from L2, 128 x 128 only 64; narrow tiles are for outputs that
   leave fewer multiprocessors idle that way (768 columns and 8192 rows are 192 wide tiles, 384 narrow ones, for
   132).
   Banks: a line of a box is 128 bytes and chunk c of line l stands at c ^ l % 8, the swizzle that both TMA and
   wgmma know. 168 registers (more and less by role), 224 KB. Left out, for they double the code: pairs of
   blocks that share what they read (multicast), and stores by TMA; others found 5 to 15 % in them. */
constexpr int HOPPER_STEP = 64;
template <int WIDTH> struct Hopper { // a ring of stages, each with 64 k of 128 lines of a and WIDTH of b; then 8 slices
    static constexpr int BYTES_A = TILE * 128, BYTES = BYTES_A + WIDTH * 128, STAGES = WIDTH == 256 ? 4 : 6;
    static constexpr int SLICES = STAGES * BYTES, SHARED = SLICES + 8 * 4096;
};
// A stage of an operand: 64 k are a line of 128 bytes; DOWN, 64 rows are, a line for each k, ROWS / 64 boxes
// side by side.
template <bool DOWN, int ROWS>
__device__ __forceinline__ void copy_boxes(uint32_t to, const CUtensorMap *map, uint32_t full, int i, int k) {
    if (!DOWN) copy_box(to, map, full, k, i);
    else
#pragma unroll
        for (int r = 0; r < ROWS; r += 64) copy_box(to + r * 128, map, full, i + r, k);
}
// What wgmma must know of it, from k on ("Matrix Descriptor Format" in the PTX ISA, units of 16 bytes): where
// it begins; the distance of boxes; of groups of 8 lines; lines of 128 bytes, swizzled.
template <bool DOWN> __device__ __forceinline__ uint64_t descriptor(uint32_t address, int k) {
    address += k * (DOWN ? 128 : 2);
    return address >> 4 | (uint64_t)(DOWN ? 8192 >> 4 : 1) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
struct Maps { // of the operands, and of the side's
    CUtensorMap a[2], b[2];
};
template <class T, bool DOWN_A, bool DOWN_B, int WIDTH>
__global__ void __launch_bounds__(384, 1) matmul_hopper(const Product p, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef Hopper<WIDTH> H;
    extern __shared__ __align__(1024) unsigned char stages[];
    __shared__ __align__(8) uint64_t barriers[2][H::STAGES];
    const uint32_t ring = shared_address(stages);
    const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
    const int tiles = (p.M + TILE - 1) / TILE * ((p.N + WIDTH - 1) / WIDTH);
    if (threadIdx.x == 0) {
        for (int s = 0; s < H::STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 8);
        barrier_fence();
    }
    __syncthreads();
    int stage = 0, phase = 0; // a stage's barriers are in phase `phase`
    auto next = [&] {
        if (++stage == H::STAGES) stage = 0, phase ^= 1;
    };
    if (warp() < 4) {
        registers_less<40>();
        if (threadIdx.x > 0) return;
        for (int t = blockIdx.x; t < tiles * p.parts; t += gridDim.x) {
            const Corner at = corner(p, WIDTH, t % tiles);
            const Steps s(p, t / tiles, HOPPER_STEP);
            for (int step = 0; step < s.all; step++, next()) {
                const bool side = step >= s.own;
                const int k = side ? (step - s.own) * HOPPER_STEP : s.begin + step * HOPPER_STEP;
                barrier_wait(empty + 8 * stage, phase ^ 1); // the phase before: none, the first time round
                barrier_expect(full + 8 * stage, H::BYTES);
                const uint32_t to = ring + stage * H::BYTES;
                copy_boxes<DOWN_A, TILE>(to, &maps.a[side], full + 8 * stage, at.m, k);
                copy_boxes<DOWN_B, WIDTH>(to + H::BYTES_A, &maps.b[side], full + 8 * stage, at.n, k);
            }
        }
    } else {
        registers_more<232>();
        const int group = warp() / 4 - 1;
        float *slice = (float *)(stages + H::SLICES) + (warp() - 4) * 16 * 64;
        auto before = [&] { return empty + 8 * (stage ? stage - 1 : H::STAGES - 1); };
        for (int t = blockIdx.x; t < tiles * p.parts; t += gridDim.x) {
            const Corner at = corner(p, WIDTH, t % tiles);
            const int part = t / tiles, steps = Steps(p, part, HOPPER_STEP).all;
            float sum[WIDTH / 64][8][4]; // which the first wgmma overwrites
            for (int step = 0; step < steps; step++, next()) {
                const uint32_t a = ring + stage * H::BYTES, b = a + H::BYTES_A;
                barrier_wait(full + 8 * stage, phase);
                wgmma_fence();
#pragma unroll
                for (int q = 0; q < HOPPER_STEP; q += 16)
                    wgmma<T, DOWN_A, DOWN_B>(sum, descriptor<DOWN_A>(a + group * 64 * 128, q), descriptor<DOWN_B>(b, q),
                                             step > 0 || q > 0);
                wgmma_commit();
                wgmma_wait<1>(); // the stage before is done with
                if (step > 0 && lane() == 0) barrier_arrive(before());
            }
            wgmma_wait<0>();
            if (lane() == 0) barrier_arrive(before());
            finish_sums<T, 0, 64>(p, part, sum, slice, at.m + group * 64 + warp() % 4 * 16, at.n);
        }
    }
#endif
}

/* matmul_parts. A small out has too few tiles to fill a GPU: dw of 768 x 768 has 36. Then k is cut into parts,
   blocks with blockIdx.z = z write the sums of part z in fp32, and a thread of this kernel adds W neighbours of
   all parts, in order, and does the epilogue. The parts move 8 bytes an output and part; SPLIT_DEPTH keeps that
   below the operands' share. */
template <class T, int W>
__global__ void __launch_bounds__(256) matmul_parts(Product p, const float *parts, int n) {
    const int64_t C = p.columns, i = thread() / (C / W), j = thread() % (C / W) * W, size = p.M * C;
    if (i >= p.M) return;
    float z[1][W] = {}, x[W];
    for (int s = 0; s < n; s++) {
        load(x, parts + s * size + i * C + j);
#pragma unroll
        for (int e = 0; e < W; e++) z[0][e] += x[e];
    }
    finish<T>(p, 0, z, (int)i, (int)j);
}

/* matmul_few. Generation multiplies one row, or few, with every weight once: its time is the weights' bytes /
   bandwidth. A warp has 2 lines of w and all rows of x, lanes side by side along k, 16 bytes each, two steps in
   flight; x comes from L1, read M / 2 times the bytes of w, which 8 rows just allow. No shared memory, no
   barrier: 5 shuffles add up a sum. */
template <class T, int ROWS> __global__ void __launch_bounds__(128, 3) matmul_few(Product p) {
    constexpr int W = wide<T>;
    const int j = (blockIdx.x * 4 + warp()) * 2, last = p.N - 1;
    if (j > last) return;
    float sum[ROWS][2] = {};
    auto multiply = [&](const Operands &o) {
        const T *x[ROWS], *w[2] = {(const T *)o.b + j * o.ldb, (const T *)o.b + min(j + 1, last) * o.ldb};
#pragma unroll
        for (int r = 0; r < ROWS; r++) x[r] = (const T *)o.a + min(r, p.M - 1) * o.lda;
        const int whole = p.aligned ? o.K / W * W : 0;
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
        for (int k = whole + lane(); k < o.K; k += 32)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int q = 0; q < 2; q++) sum[r][q] += to_float(w[q][k]) * to_float(x[r][k]);
    };
    multiply(p.main);
    if (p.side.K) multiply(p.side);
    float z[1][1] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const float s = warp_sum(sum[r][q]);
            if (lane() == 2 * r + q) z[0][0] = s;
        }
    const int i = lane() / 2, column = j + lane() % 2;
    if (i < p.M && column <= last) finish<T>(p, 0, z, i, column);
}

/* matmul_bias: dbias += column sums of dy[N,O]. A block has 128 columns, a quad per lane, and 256 rows, every
   8th a warp's; its sums, warps in order, are a line of parts[N / 256][O], which add_lines adds up. Reads dy
   once. */
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
template <class T> void multiply_few(SftCtx *c, const Product &p) {
    const unsigned grid = blocks(p.N, 8);
    if (p.M == 1) matmul_few<T, 1><<<grid, 128, 0, stream(c)>>>(p);
    else if (p.M == 2) matmul_few<T, 2><<<grid, 128, 0, stream(c)>>>(p);
    else if (p.M <= 4) matmul_few<T, 4><<<grid, 128, 0, stream(c)>>>(p);
    else matmul_few<T, 8><<<grid, 128, 0, stream(c)>>>(p);
    LAUNCHED("matmul_few");
}
// A map of an operand's lines for copy_box: boxes of 64 numbers of `lines` lines, each line turned as wgmma
// wants it.
template <class T> CUtensorMap box_map(const void *x, int64_t length, int64_t count, int64_t ld, int lines) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode;
    cudaDriverEntryPointQueryResult found;
    if (!encode) // asked for at run time: the program does not need a driver to start
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault,
                                               &found));
    CUtensorMap map;
    const cuuint64_t size[2] = {(cuuint64_t)length, (cuuint64_t)count}, bytes = (cuuint64_t)ld * 2;
    const cuuint32_t box[2] = {64, (cuuint32_t)lines}, step[2] = {1, 1};
    const auto type = std::is_same<T, f16>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (encode(&map, type, 2, (void *)x, size, &bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        sft_die(SFT_BROKEN, "cuTensorMapEncodeTiled refuses %lld lines of %lld", (long long)count, (long long)length);
    return map;
}
template <class T, bool DOWN_A, bool DOWN_B, int WIDTH>
void multiply_hopper(SftCtx *c, const Product &p, int64_t blocks) {
    auto kernel = matmul_hopper<T, DOWN_A, DOWN_B, WIDTH>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Hopper<WIDTH>::SHARED));
    Maps maps = {};
    for (int side = 0; side < (p.side.K ? 2 : 1); side++) {
        const Operands &o = side ? p.side : p.main;
        maps.a[side] = DOWN_A ? box_map<T>(o.a, p.M, o.K, o.lda, 64) : box_map<T>(o.a, o.K, p.M, o.lda, TILE);
        maps.b[side] = DOWN_B ? box_map<T>(o.b, p.N, o.K, o.ldb, 64) : box_map<T>(o.b, o.K, p.N, o.ldb, WIDTH);
    }
    kernel<<<(unsigned)blocks, 384, Hopper<WIDTH>::SHARED, stream(c)>>>(p, maps);
    LAUNCHED("matmul_hopper");
}
// Is this a Hopper, and was the file compiled for sm_90a? If not, the kernel is empty and takes hardly a
// register.
bool hopper() {
    static int answer = -1;
    cudaFuncAttributes attributes;
    if (answer < 0) {
        CHECK(cudaFuncGetAttributes(&attributes, matmul_hopper<bf16, false, false, 256>));
        answer = gpu().major == 9 && attributes.numRegs >= 64;
    }
    return answer;
}
// Wide tiles or narrow ones: which take fewer rounds of all multiprocessors, a wide one 1.8 times as long?
template <class T, bool DOWN_A, bool DOWN_B> void multiply_widths(SftCtx *c, const Product &p) {
    const int64_t all = gpu().multiProcessorCount, rows = (int64_t)(p.M + TILE - 1) / TILE * p.parts;
    const int64_t wide = rows * ((p.N + 255) / 256), narrow = rows * ((p.N + 127) / 128);
    if (10 * ((narrow + all - 1) / all) < 18 * ((wide + all - 1) / all))
        multiply_hopper<T, DOWN_A, DOWN_B, 128>(c, p, SFT_MIN(all, narrow));
    else multiply_hopper<T, DOWN_A, DOWN_B, 256>(c, p, SFT_MIN(all, wide));
}
template <class T, bool DOWN_A, bool DOWN_B> void multiply_tiles(SftCtx *c, const Product &p, dim3 grid) {
    if constexpr (sizeof(T) == 2)
        if (p.aligned) {
            if (hopper() && p.main.K) return multiply_widths<T, DOWN_A, DOWN_B>(c, p);
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
    const int64_t most = p.main.K / SPLIT_DEPTH;
    p.columns = p.quads && !p.bias ? (p.N + 3) / 4 * 4 : p.N;
    const int64_t size = (int64_t)p.M * p.columns;
    const int64_t sums = SFT_MIN(most * size, (int64_t)SPLIT * TILE * TILE); // not fewer for a larger M or K
    const size_t mark = c->work->used;
    float *parts = (float *)sft_take(c->work, most > 1 ? (size_t)sums * 4 : 0);
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !tiles) return;
    int64_t n = SFT_MAX(1, SFT_MIN(SPLIT / tiles, most));
    p.depth = SFT_MAX((int)((p.main.K + 64 * n - 1) / (64 * n)) * 64, 64);
    p.parts = (int)(n = SFT_MAX(1, (p.main.K + p.depth - 1) / p.depth));
    Product q = p; // what the blocks of a part write: its sums
    if (n > 1) {
        q.out = parts, q.f32 = true, q.pre = NULL, q.bias = q.residual = NULL, q.scale = 1, q.act = SFT_LINEAR;
        q.ld = p.columns, q.part_size = size, q.quads = p.columns % 4 == 0;
    }
    with_type(type, [&](auto t) {
        typedef decltype(t) T;
        if (!DOWN_A && !DOWN_B && p.M <= 8) return multiply_few<T>(c, p);
        multiply_tiles<T, DOWN_A, DOWN_B>(c, q, dim3(blocks(tiles, 1), 1, (unsigned)n));
        if (n == 1) return;
        if (p.quads && p.columns % 4 == 0)
            matmul_parts<T, 4><<<blocks(size, 1024), 256, 0, stream(c)>>>(p, parts, (int)n);
        else matmul_parts<T, 1><<<blocks(size, 256), 256, 0, stream(c)>>>(p, parts, (int)n);
        LAUNCHED("matmul_parts");
    });
}

// What the three have in common. An absent tensor is aligned.
Product product(SftTensor out, SftTensor a, SftTensor b, SftSide side, SftTensor pre, SftTensor bias,
                SftTensor residual, float scale, SftAct act) {
    one_type("matmul", a, b, side.x, side.w, pre, bias);
    Product p = {};
    p.main = {a.data, b.data, width(a), width(b), 0};
    p.side = {side.x.data, side.w.data, width(side.x), width(side.w), (int)width(side.x)};
    p.out = out.data, p.pre = pre.data, p.bias = bias.data, p.residual = residual.data;
    p.ld = width(out), p.scale = scale, p.act = act, p.f32 = out.type == SFT_F32;
    p.aligned = aligned(width(a), a) && aligned(width(b), b) && aligned(width(side.x), side.x) &&
                aligned(width(side.w), side.w);
    p.quads = p.ld % 4 == 0 && aligned(0, out, pre, bias, residual);
    return p;
}
void matmul_forward(SftCtx *c, SftTensor y, SftTensor pre, SftTensor x, SftTensor w, SftSide side, SftTensor bias,
                    SftTensor residual, float scale, SftAct act) {
    Product p = product(y, x, w, side, pre, bias, residual, scale, act);
    p.M = (int)y.dim[0], p.N = (int)w.dim[0], p.main.K = (int)width(w);
    multiply<false, false>(c, p, x.type);
}
void matmul_backward_x(SftCtx *c, SftTensor dx, SftTensor dy, SftTensor w, SftSide side, SftTensor pre, float scale,
                       SftAct act, bool add) {
    Product p = product(dx, dy, w, side, pre, absent, add ? dx : absent, scale, act);
    p.M = (int)dx.dim[0], p.N = (int)width(w), p.main.K = (int)w.dim[0], p.backward = true;
    multiply<false, true>(c, p, dy.type);
}
void matmul_backward_w(SftCtx *c, SftTensor dw, SftTensor dbias, SftTensor dy, SftTensor x) {
    Product p = product(dw, dy, x, {}, absent, absent, dw, 1, SFT_LINEAR);
    p.M = (int)dw.dim[0], p.N = (int)width(dw), p.main.K = (int)dy.dim[0], p.backward = true;
    if (sft_planning(c) || p.main.K) multiply<true, true>(c, p, dy.type);
    if (!dbias.dim[0]) return;
    const unsigned n = blocks(p.main.K, BIAS_ROWS);
    const size_t mark = c->work->used;
    float *parts = (float *)sft_take(c->work, (size_t)n * (size_t)p.M * 4);
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !p.main.K) return;
    with_type(dy.type, [&](auto t) {
        typedef decltype(t) T;
        const dim3 grid(blocks(p.M, TILE), n);
        matmul_bias<T><<<grid, 256, 0, stream(c)>>>(parts, (const T *)dy.data, p.main.lda, p.main.K, p.M, p.aligned);
        LAUNCHED("matmul_bias");
    });
    add_lines(c, dbias, parts, n, p.M);
}

// [5.3] embedding, rows ------------------------------------------------------------------------------------------
/* rows_kernel: y[i] = x[index[i]] (+ more[also[i]]), zeros where index[i] < 0. Warp per row of C numbers, 2 packs of 16
   bytes per lane and input before the first is used. Writes every number once and reads it once, the floor; rows that
   several tokens share, positions above all, are read by each of them, from L2. */
template <class T, int W>
__global__ void __launch_bounds__(256) rows_kernel(T *y, const T *x, const T *more, const int32_t *index,
                                                   const int32_t *also, int64_t N, int64_t C) {
    const int64_t i = thread() / 32;
    if (i >= N) return;
    const int64_t from = index[i];
    x += from * C, y += i * C;
    if (more) more += also[i] * C;
    for (int64_t j0 = lane() * W; j0 < C; j0 += 2 * 32 * W) {
        float a[2][W] = {}, b[2][W] = {};
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int64_t j = j0 + u * 32 * W;
            if (j < C && from >= 0) load(a[u], x + j);
            if (j < C && more) load(b[u], more + j);
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int64_t j = j0 + u * 32 * W;
#pragma unroll
            for (int e = 0; e < W; e++)
                if (more) a[u][e] += b[u][e];
            if (j < C) store(y + j, a[u]);
        }
    }
}
void embedding_forward(SftCtx *c, SftTensor x, SftTensor wte, SftTensor wpe, const int32_t *ids, const int32_t *pos) {
    const int64_t N = x.dim[0], C = width(x);
    if (sft_planning(c) || !N) return;
    one_type("embedding_forward", x, wte, wpe);
    with_width(x.type, C, [&](auto t, auto w) {
        typedef decltype(t) T;
        rows_kernel<T, decltype(w)::value><<<blocks(N, 8), 256, 0, stream(c)>>>(
            (T *)x.data, (const T *)wte.data, (const T *)wpe.data, ids, pos, N, C);
        LAUNCHED("rows");
    }, x, wte, wpe);
}

/* The tokens that share a row of dwte are added to it in their order, by one warp: no atomics, and the bits of the CPU.
   For that they are sorted by id, and those of one id by their place. The place of token i is the number of tokens that
   come before it, so a sort without any communication is to count them:
       sort_count    thread per token and slice of 1024 tokens: how many of the slice come before it. N^2 comparisons of
                     numbers in shared memory, all lanes of the same one: 2 instructions each, 0.02 ms for 8192 tokens
                     on an A100, 1 ms for 65536 (a radix sort would win beyond). Integer atomics add up the slices.
       sort_place    thread per token: to its place
       rows_add      warp per place and 512 columns: where an id begins, it takes the row of dwte and adds all of the
                     id's tokens, 32 places at a look, 2 rows of 4 packs a lane in flight. Reads dx once, and reads and
                     writes once the rows of dwte that are met: the floor, and 320 bytes of places to 5 KB of them.
   Places are written as they come, 8 bytes to a sector. Columns are shared out so that a frequent id is not one warp's
   work alone. Tried on paper: a chain from each token to the next of its id; each step waits for the one before. */
constexpr int SLICE = 1024;
__global__ void __launch_bounds__(256) sort_count(int *place, const int32_t *ids, int N) {
    __shared__ __align__(16) int32_t slice[SLICE];
    const int i = (int)thread(), first = blockIdx.y * SLICE;
    for (int k = threadIdx.x; k < SLICE; k += 256) slice[k] = first + k < N ? ids[first + k] : INT32_MAX;
    __syncthreads();
    if (i >= N) return;
    const int id = ids[i];
    int before = 0;
#pragma unroll 8
    for (int k = 0; k < SLICE; k++) before += slice[k] < id + (first + k < i);
    atomicAdd(place + i, before);
}
__global__ void __launch_bounds__(256) sort_place(int2 *sorted, const int *place, const int32_t *ids, int N) {
    const int i = (int)thread();
    if (i < N) sorted[place[i]] = make_int2(ids[i], i);
}
constexpr int ADD_PACKS = 4; // of a lane
template <class T, int W>
__global__ void __launch_bounds__(256) rows_add(float *dw, const T *dx, const int2 *sorted, int N, int64_t C) {
    constexpr int P = ADD_PACKS, U = 2;
    int at = (int)(thread() / 32);
    if (at >= N) return;
    const int id = sorted[at].x;
    if (at && sorted[at - 1].x == id) return; // not the first of its id
    const int64_t j = ((int64_t)blockIdx.y * P * 32 + lane()) * W;
    float sum[P][W] = {}, x[U][P][W] = {};
#pragma unroll
    for (int p = 0; p < P; p++)
        if (j + p * 32 * W < C) load(sum[p], dw + id * C + j + p * 32 * W);
    for (bool more = true; more; at += 32) {
        const int2 token = at + lane() < N ? sorted[at + lane()] : make_int2(-1, 0);
        const unsigned others = ~__ballot_sync(~0u, token.x == id);
        const int n = others ? __ffs((int)others) - 1 : 32; // tokens of this id among these 32
        more = n == 32;
        for (int k = 0; k < n; k += U) {
#pragma unroll
            for (int u = 0; u < U; u++) {
                const int64_t row = __shfl_sync(~0u, token.y, (k + u) & 31);
#pragma unroll
                for (int p = 0; p < P; p++)
                    if (k + u < n && j + p * 32 * W < C) load(x[u][p], dx + row * C + j + p * 32 * W);
            }
#pragma unroll
            for (int i = 0; i < U * P * W; i++)
                if (k + i / (P * W) < n) sum[i / W % P][i % W] += x[i / (P * W)][i / W % P][i % W];
        }
    }
#pragma unroll
    for (int p = 0; p < P; p++)
        if (j + p * 32 * W < C) store(dw + id * C + j + p * 32 * W, sum[p]);
}
// dw[ids[i]] += dx[i]
void add_rows(SftCtx *c, SftTensor dw, SftTensor dx, const int32_t *ids) {
    const int64_t N = dx.dim[0], C = width(dx);
    const size_t mark = c->work->used;
    int *place = (int *)sft_take(c->work, (size_t)N * sizeof(int));
    int2 *sorted = (int2 *)sft_take(c->work, (size_t)N * sizeof(int2));
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !N) return;
    const int n = (int)N;
    CHECK(cudaMemsetAsync(place, 0, (size_t)N * sizeof(int), stream(c)));
    sort_count<<<dim3(blocks(N, 256), blocks(N, SLICE)), 256, 0, stream(c)>>>(place, ids, n);
    LAUNCHED("sort_count");
    sort_place<<<blocks(N, 256), 256, 0, stream(c)>>>(sorted, place, ids, n);
    LAUNCHED("sort_place");
    with_width(dx.type, C, [&](auto t, auto w) {
        typedef decltype(t) T;
        constexpr int W = SFT_MIN(decltype(w)::value, 4); // 16 bytes of dw
        const dim3 grid(blocks(N, 8), blocks(C, ADD_PACKS * 32 * W));
        rows_add<T, W><<<grid, 256, 0, stream(c)>>>((float *)dw.data, (const T *)dx.data, sorted, n, C);
        LAUNCHED("rows_add");
    }, dx, dw);
}
void embedding_backward(SftCtx *c, SftTensor dwte, SftTensor dwpe, SftTensor dx, const int32_t *ids,
                        const int32_t *pos) {
    add_rows(c, dwte, dx, ids);
    if (dwpe.data) add_rows(c, dwpe, dx, pos);
}

void gather_rows(SftCtx *c, SftTensor y, SftTensor x, const int32_t *index) {
    embedding_forward(c, y, x, absent, index, NULL);
}

/* scatter_rows writes dx once, the floor: which row of dy a row of dx is, or none, is found first (scatter_index, 4
   bytes a row, to sectors as the indices say), and rows_kernel then gathers. To zero dx and then write the rows would
   move up to half as much again. */
__global__ void __launch_bounds__(256) scatter_index(int32_t *from, const int32_t *index, int64_t n) {
    if (thread() < n) from[index[thread()]] = (int32_t)thread();
}
void scatter_rows(SftCtx *c, SftTensor dx, SftTensor dy, const int32_t *index) {
    const int64_t N = dx.dim[0], n = dy.dim[0];
    const size_t mark = c->work->used;
    int32_t *from = (int32_t *)sft_take(c->work, (size_t)N * sizeof(int32_t));
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !N) return;
    CHECK(cudaMemsetAsync(from, 0xff, (size_t)N * sizeof(int32_t), stream(c))); // -1
    if (n) {
        scatter_index<<<blocks(n, 256), 256, 0, stream(c)>>>(from, index, n);
        LAUNCHED("scatter_index");
    }
    gather_rows(c, dx, dy, from);
}

void zero(SftCtx *c, SftTensor x) {
    if (sft_planning(c) || !sft_size(x)) return;
    CHECK(cudaMemsetAsync(x.data, 0, (size_t)sft_size(x) * bytes_of(x.type), stream(c)));
}

/* convert: thread per 4 times W numbers, 256 W apart, so that 4 loads are in flight; W numbers are 16 bytes of the
   wider of the two types. Reads and writes once. */
template <class To, class From, int W>
__global__ void __launch_bounds__(256) convert_kernel(To *y, const From *x, int64_t n) {
    const int64_t i = ((int64_t)blockIdx.x * 1024 + threadIdx.x) * W;
    float v[4][W];
#pragma unroll
    for (int u = 0; u < 4; u++)
        if (i + u * 256 * W < n) load(v[u], x + i + u * 256 * W);
#pragma unroll
    for (int u = 0; u < 4; u++)
        if (i + u * 256 * W < n) store(y + i + u * 256 * W, v[u]);
}
void convert(SftCtx *c, SftTensor y, SftTensor x) {
    const int64_t n = sft_size(y);
    if (sft_planning(c) || !n) return;
    with_type(y.type, [&](auto to) {
        with_width(x.type, n, [&](auto from, auto w) {
            typedef decltype(to) To;
            typedef decltype(from) From;
            constexpr int W = SFT_MIN(decltype(w)::value, wide<To>);
            convert_kernel<To, From, W>
                <<<blocks(n, 1024 * W), 256, 0, stream(c)>>>((To *)y.data, (const From *)x.data, n);
            LAUNCHED("convert");
        }, x, y);
    });
}

// [5.4] norms ----------------------------------------------------------------------------------------------------
/* A row is the work of G threads; it stays in their registers, as PER packs of W numbers each, from its only read to
   its only write (test/ladder/layernorm.cu: how one comes to that). By the length of the row, in 16 bits (fp32: half of
   it):
       G =   8, PER = 2   up to  128 numbers: heads; a warp has 4 rows, and nobody waits at a barrier
       G =  64, PER = 2   up to 1024
       G = 256, PER = 2   up to 4096
       G = 512, PER = 2   up to 8192
       G = 256, PER = 0   any, and rows that do not begin on 16 bytes: read again for every sum, from the caches
   A block has 256 threads, or G. Floor: x read and y written, and 4 or 8 bytes of statistics a row. Every row reads the
   weights, too, but finds them in L1: they count as moved (a third of everything), and no memory moves them.

   Backward also adds up dw and db over the rows. A block has a fixed share of the rows, `step` of them; a thread keeps
   the sums of its columns in registers through all of its rows, the groups of the block add theirs in order through
   shared memory (in two passes of its banks each, once a block), and add_lines adds the blocks' lines in order. So dy,
   x and dres are read once and dx is written once; the lines add 16 bytes for each column and at least NORM_ROWS rows
   (8 without db), and stay in L2. Rows and gradients are kept as they are stored, 16 bytes in 4 registers, and widened
   for each of the two passes. Tried: PER = 4, rows of 1024 by a warp, without barriers. With db that takes 168 (sm_90:
   205) registers, and one block fits where now two do, one of which loads while the other adds; held to 128, it spills.
 */
template <int G> constexpr int norm_threads = G > 256 ? G : 256;
// Sum over the G <= 32 lanes of a group.
template <int G> __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int k = G / 2; k; k >>= 1) x += __shfl_xor_sync(~0u, x, k);
    return x;
}
// Sums over the G threads of a row, N at once.
template <int G, int N> __device__ __forceinline__ void group_sums(float (&x)[N]) {
    if constexpr (G <= 32) {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = lanes_sum<G>(x[i]);
    } else {
        constexpr int K = G / 32; // warps of a row
        __shared__ float part[N][norm_threads<G> / 32];
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = warp_sum(x[i]);
        __syncthreads(); // the sums of an earlier call have been read
#pragma unroll
        for (int i = 0; i < N; i++)
            if (lane() == 0) part[i][warp()] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = lanes_sum<K>(part[i][warp() / K * K + lane() % K]);
    }
}
template <int G> __device__ __forceinline__ float group_sum(float x) {
    float one[1] = {x};
    group_sums<G>(one);
    return one[0];
}
// f(p, j) for the thread's packs of a row of C numbers: the p-th begins at column j.
template <int W, int G, int PER, class F> __device__ __forceinline__ void each_pack(int64_t C, F f) {
    const int t = threadIdx.x % G;
    if constexpr (PER == 0) {
        for (int64_t j = t * W; j < C; j += G * W) f(0, j);
    } else {
#pragma unroll
        for (int p = 0; p < PER; p++)
            if ((p * G + t) * W < C) f(p, (int64_t)(p * G + t) * W);
    }
}
// f(T(), W, G, PER), as integral constants, for rows of C numbers that lie as these tensors do.
template <class F, class... Tensors> void with_row(SftType type, int64_t C, F f, Tensors... tensors) {
    with_width(type, C, [&](auto t, auto w) {
        constexpr int W = decltype(w)::value;
        if constexpr (W == 1) return f(t, w, Int<256>(), Int<0>());
        else if (C <= 16 * W) f(t, w, Int<8>(), Int<2>());
        else if (C <= 128 * W) f(t, w, Int<64>(), Int<2>());
        else if (C <= 512 * W) f(t, w, Int<256>(), Int<2>());
        else if (C <= 1024 * W) f(t, w, Int<512>(), Int<2>());
        else f(t, w, Int<256>(), Int<0>());
    }, tensors...);
}

template <class T, int W, int G, int PER, bool CENTRED>
__global__ void __launch_bounds__(norm_threads<G>, 512 / norm_threads<G>)
    norm_kernel(T *y, float *stat, const T *x, const T *w, const T *b, int64_t rows, int64_t C, float eps) {
    const int64_t row = thread() / G, n = row < rows ? C : 0; // of a row that does not exist, nothing
    x += row * C, y += row * C;
    Pack<T, W> kept[SFT_MAX(PER, 1)];
    auto fetch = [&](int p, int64_t j) { kept[p] = *(const Pack<T, W> *)(x + j); };
    if (PER) each_pack<W, G, PER>(n, fetch);
    float mean = 0, square = 0;
    if (CENTRED) {
        each_pack<W, G, PER>(n, [&](int p, int64_t j) {
            if (!PER) fetch(p, j);
#pragma unroll
            for (int e = 0; e < W; e++) mean += to_float(kept[p].v[e]);
        });
        mean = group_sum<G>(mean) / (float)C;
    }
    each_pack<W, G, PER>(n, [&](int p, int64_t j) {
        if (!PER) fetch(p, j);
#pragma unroll
        for (int e = 0; e < W; e++) square += (to_float(kept[p].v[e]) - mean) * (to_float(kept[p].v[e]) - mean);
    });
    const float rstd = 1.0f / sqrtf(group_sum<G>(square) / (float)C + eps);
    each_pack<W, G, PER>(n, [&](int p, int64_t j) {
        if (!PER) fetch(p, j);
        float out[W], weight[W], bias[W] = {};
        load(weight, w + j);
        if (CENTRED && b) load(bias, b + j);
#pragma unroll
        for (int e = 0; e < W; e++) out[e] = (to_float(kept[p].v[e]) - mean) * rstd * weight[e] + bias[e];
        store(y + j, out);
    });
    constexpr int STATS = CENTRED ? 2 : 1;
    const int t = threadIdx.x % G;
    if (row < rows && t < STATS) stat[STATS * row + t] = t < STATS - 1 ? mean : rstd;
}
template <bool CENTRED>
void norm_forward(SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, SftTensor b, float eps) {
    const int64_t C = sft_size(w), rows = C ? sft_size(x) / C : 0;
    if (sft_planning(c) || !rows) return;
    one_type("norm_forward", y, x, w, b);
    with_row(x.type, C, [&](auto t, auto pack, auto g, auto per) {
        typedef decltype(t) T;
        constexpr int W = decltype(pack)::value, G = decltype(g)::value, PER = decltype(per)::value;
        norm_kernel<T, W, G, PER, CENTRED><<<blocks(rows, norm_threads<G> / G), norm_threads<G>, 0, stream(c)>>>(
            (T *)y.data, (float *)stat.data, (const T *)x.data, (const T *)w.data, (const T *)b.data, rows, C, eps);
        LAUNCHED("norm");
    }, y, x, w, b);
}
void layernorm_forward(SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, SftTensor b, float eps) {
    norm_forward<true>(c, y, stat, x, w, b, eps);
}
void rmsnorm_forward(SftCtx *c, SftTensor y, SftTensor stat, SftTensor x, SftTensor w, float eps) {
    norm_forward<false>(c, y, stat, x, w, absent, eps);
}

constexpr int NORM_BLOCKS = 256, NORM_ROWS = 16; // blocks at most; rows of a block at least
template <class T, int W, int G, int PER, bool CENTRED>
__global__ void __launch_bounds__(norm_threads<G>, 512 / norm_threads<G>)
    norm_grad_kernel(T *dx, float *lines_w, float *lines_b, const T *dres, const T *dy, const T *x, const T *w,
                     const float *stat, int64_t rows, int64_t C, int64_t step) {
    constexpr int P = SFT_MAX(PER, 1), THREADS = norm_threads<G>, GROUPS = THREADS / G;
    const int64_t first = blockIdx.x * step, end = SFT_MIN(rows, first + step);
    const int group = threadIdx.x / G;
    lines_w += blockIdx.x * C, lines_b += blockIdx.x * C;
    Pack<T, W> xs[P], dys[P], ws[P];
    float sum_w[P][W] = {}, sum_b[P][W] = {};
    if (PER) each_pack<W, G, PER>(C, [&](int p, int64_t j) { ws[p] = *(const Pack<T, W> *)(w + j); });
    for (int64_t row0 = first; row0 < end; row0 += GROUPS) {
        const int64_t row = row0 + group, n = row < end ? C : 0;
        auto fetch = [&](int p, int64_t j) {
            xs[p] = *(const Pack<T, W> *)(x + row * C + j), dys[p] = *(const Pack<T, W> *)(dy + row * C + j);
            if (!PER) ws[p] = *(const Pack<T, W> *)(w + j);
        };
        if (PER) each_pack<W, G, PER>(n, fetch);
        float mean = 0, rstd = 0, average[CENTRED ? 2 : 1] = {}; // of g u, of g
        if (n && CENTRED) mean = stat[2 * row], rstd = stat[2 * row + 1];
        if (n && !CENTRED) rstd = stat[row];
        each_pack<W, G, PER>(n, [&](int p, int64_t j) {
            if (!PER) fetch(p, j);
            if (!PER && row0 > first) load(sum_w[0], lines_w + j), load(sum_b[0], lines_b + j);
#pragma unroll
            for (int e = 0; e < W; e++) {
                const float u = (to_float(xs[p].v[e]) - mean) * rstd, d = to_float(dys[p].v[e]);
                const float g = d * to_float(ws[p].v[e]);
                sum_w[p][e] += d * u, average[0] += g * u;
                if constexpr (CENTRED) sum_b[p][e] += d, average[1] += g;
            }
            if (!PER) {
                store(lines_w + j, sum_w[0]), store(lines_b + j, sum_b[0]);
#pragma unroll
                for (int e = 0; e < W; e++) sum_w[0][e] = sum_b[0][e] = 0;
            }
        });
        group_sums<G>(average);
        const float g_u = average[0] / (float)C, g_1 = CENTRED ? average[CENTRED] / (float)C : 0;
        each_pack<W, G, PER>(n, [&](int p, int64_t j) {
            if (!PER) fetch(p, j);
            float out[W] = {};
            if (dres) load(out, dres + row * C + j);
#pragma unroll
            for (int e = 0; e < W; e++) {
                const float u = (to_float(xs[p].v[e]) - mean) * rstd, g = to_float(dys[p].v[e]) * to_float(ws[p].v[e]);
                out[e] += rstd * (g - g_1 - u * g_u);
            }
            store(dx + row * C + j, out);
        });
    }
    if constexpr (PER > 0) { // the block's lines: its groups, in order
        __shared__ __align__(16) float all[GROUPS][G * PER * W];
        for (int which = 0; which <= CENTRED; which++) {
            __syncthreads();
            each_pack<W, G, PER>(C, [&](int p, int64_t j) { store(&all[group][j], which ? sum_b[p] : sum_w[p]); });
            __syncthreads();
            for (int64_t j = threadIdx.x; j < C; j += THREADS) {
                float total = 0;
#pragma unroll
                for (int k = 0; k < GROUPS; k++) total += all[k][j];
                (which ? lines_b : lines_w)[j] = total;
            }
        }
    }
}
template <bool CENTRED>
void norm_backward(SftCtx *c, SftTensor dx, SftTensor dw, SftTensor db, SftTensor dres, SftTensor dy, SftTensor x,
                   SftTensor w, SftTensor stat) {
    const int64_t C = sft_size(w), rows = C ? sft_size(dy) / C : 0;
    const int64_t step = SFT_MAX(NORM_ROWS, (rows + NORM_BLOCKS - 1) / NORM_BLOCKS);
    const int64_t most = SFT_MIN(NORM_BLOCKS, (rows + NORM_ROWS - 1) / NORM_ROWS); // blocks, but it only grows
    const size_t mark = c->work->used;
    float *lines = (float *)sft_take(c->work, (size_t)(2 * most * C) * sizeof(float));
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !rows) return;
    one_type("norm_backward", dx, dres, dy, x, w);
    const unsigned n = blocks(rows, step);
    with_row(x.type, C, [&](auto t, auto pack, auto g, auto per) {
        typedef decltype(t) T;
        constexpr int W = decltype(pack)::value, G = decltype(g)::value, PER = decltype(per)::value;
        norm_grad_kernel<T, W, G, PER, CENTRED><<<n, norm_threads<G>, 0, stream(c)>>>(
            (T *)dx.data, lines, lines + n * C, (const T *)dres.data, (const T *)dy.data, (const T *)x.data,
            (const T *)w.data, (const float *)stat.data, rows, C, step);
        LAUNCHED("norm_grad");
    }, dx, dres, dy, x, w);
    add_lines(c, dw, lines, n, C);
    if (CENTRED && db.data) add_lines(c, db, lines + n * C, n, C);
}
void layernorm_backward(SftCtx *c, SftTensor dx, SftTensor dw, SftTensor db, SftTensor dres, SftTensor dy, SftTensor x,
                        SftTensor w, SftTensor stat) {
    norm_backward<true>(c, dx, dw, db, dres, dy, x, w, stat);
}
void rmsnorm_backward(SftCtx *c, SftTensor dx, SftTensor dw, SftTensor dres, SftTensor dy, SftTensor x, SftTensor w,
                      SftTensor stat) {
    norm_backward<false>(c, dx, dw, absent, dres, dy, x, w, stat);
}

// [5.5] rotary positions -----------------------------------------------------------------------------------------
/* rope_table: thread per number j < D/2 and 16 tokens. The frequency takes a power in double, hundreds of instructions,
   so it is made once for the 16 tokens, and again only where dynamic scaling meets another document. Writes N D floats,
   and reads 3 numbers a token, each a sector to itself for every warp: once a step, nothing beside the rest. */
constexpr int ROPE_TOKENS = 16;
__global__ void rope_table_kernel(float *table, SftArch a, const int32_t *pos, const int32_t *begin,
                                  const int32_t *end, int64_t N) {
    const int64_t half = a.D / 2, j = threadIdx.x, first = (int64_t)blockIdx.x * ROPE_TOKENS;
    const float scale = sft_rope_scale(&a);
    float frequency = 0;
    int64_t length = -1;
    for (int64_t i = first; j < half && i < SFT_MIN(N, first + ROPE_TOKENS); i++) {
        const int64_t n = end[i] - begin[i];
        if (length < 0 || (a.rope == SFT_ROPE_DYNAMIC && n != length)) frequency = sft_rope_frequency(&a, j, n);
        length = n;
        const float angle = (float)pos[i] * frequency;
        table[i * a.D + j] = cosf(angle) * scale, table[i * a.D + half + j] = sinf(angle) * scale;
    }
}
void rope_table(SftCtx *c, SftTensor table, const SftArch *a, const int32_t *pos, const int32_t *begin,
                const int32_t *end) {
    const int64_t N = table.dim[0];
    if (sft_planning(c) || !N) return;
    const unsigned lanes = (unsigned)(a->D / 2 + 31) / 32 * 32;
    rope_table_kernel<<<blocks(N, ROPE_TOKENS), lanes, 0, stream(c)>>>((float *)table.data, *a, pos, begin, end, N);
    LAUNCHED("rope_table");
}

/* rope: in place. A thread has W numbers of the first half of a head and the W of the second that turn with them, of
   every other head of a token, 4 heads at a time: it reads the token's cosines and sines once and keeps them. Moves x
   twice, the floor, and the table twice, for the second of the two threads from L1: 8 D bytes a token against 4 H D (16
   bits), which is much for the 2 or 3 heads of k only. */
constexpr int ROPE_SHARE = 2;
template <class T, int W>
__global__ void __launch_bounds__(256) rope_kernel(T *x, const float *table, int64_t N, int64_t H, int64_t D,
                                                   float sign) {
    const int64_t half = D / 2, packs = half / W, rest = thread() / packs, j = thread() % packs * W;
    const int64_t i = rest / ROPE_SHARE;
    if (i >= N) return;
    float cosine[W], sine[W];
    load(cosine, table + i * D + j), load(sine, table + i * D + half + j);
#pragma unroll
    for (int e = 0; e < W; e++) sine[e] *= sign;
#pragma unroll 4
    for (int64_t h = rest % ROPE_SHARE; h < H; h += ROPE_SHARE) {
        T *at = x + (i * H + h) * D + j;
        float a[W], b[W];
        load(a, at), load(b, at + half);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float p = a[e], q = b[e];
            a[e] = p * cosine[e] - q * sine[e], b[e] = q * cosine[e] + p * sine[e];
        }
        store(at, a), store(at + half, b);
    }
}
void rope(SftCtx *c, SftTensor x, SftTensor table, float sign) {
    const int64_t N = x.dim[0], H = x.dim[1], D = x.dim[2];
    if (sft_planning(c) || !N) return;
    with_width(x.type, D / 2, [&](auto t, auto w) {
        typedef decltype(t) T;
        constexpr int W = SFT_MIN(decltype(w)::value, 4); // 16 bytes of the table
        const unsigned grid = blocks(N * ROPE_SHARE * (D / 2 / W), 256);
        rope_kernel<T, W><<<grid, 256, 0, stream(c)>>>((T *)x.data, (const float *)table.data, N, H, D, sign);
        LAUNCHED("rope");
    }, x, table);
}
void rope_forward(SftCtx *c, SftTensor x, SftTensor table) { rope(c, x, table, 1); }
void rope_backward(SftCtx *c, SftTensor dx, SftTensor table) { rope(c, dx, table, -1); }

// [5.6] attention ------------------------------------------------------------------------------------------------
/* No T x T matrix: a block of threads owns some rows (queries; or keys, for dk and dv), keeps them and their
   sums on the chip, and walks over tiles of the tokens they see (Dao et al. 2022). The walk goes from the first
   token that the first row sees to the last that the last row sees: documents, window and causality are those
   two numbers and nothing else, and what lies outside costs nothing. Masks are applied only in tiles that some
   row of a warp sees in part.

   Kernels; the host's functions at the end choose:
       tensor cores   bf16 and fp16, rows on 16 bytes: forward, and one kernel for both passes of backward
       CUDA cores     fp32, and whatever else: the same walk with plain multiplications
       few queries    generation: the CUDA-core forward with the keys split over blocks, and an ordered sum

   On tensor cores both products of a tile are "rows of the block times the tile", and mma's result has the
   layout of its left operand: scores become probabilities, are rounded to T, and enter the second product
   without leaving their registers. In backward too, for the owner of dk and dv computes the scores turned round,
   S[key][query]; the probabilities of a key are then a row, as those of a query are in the other pass:

                      rows      tile     S = rows x tile        P = 2^(scale2 S - L),  dS = P (dP - delta)
       forward        q         k, v     q k^T                  y = P v / sum of P; maximum and sum on the way
       backward dq    q, dy     k, v     q k^T, dP = dy v^T     dq = scale dS k
       backward dkv   k, v      q, dy    k q^T, dP = v dy^T     dk = scale dS q,  dv = P dy

   L (log2 of a query's sum of exponentials) and delta (dy . y) are numbers of a query: forward leaves lse, and
   attention_delta_kernel makes both of it before the passes. In dkv a query is a column: the tile brings them along.

   dq sums over keys, dk and dv over queries, so they want different owners. Either one pass does all, 5 products,
   and adds dq up in memory: deterministic only if every block has an fp32 copy of dq (gigabytes), which costs 8
   bytes of traffic per number and tile, 80 flop a byte with 64 rows: at 1 TB/s half of what an RTX 4090
   multiplies. Or two passes own what they write and both compute S and dP: 7 products, no traffic but the
   operands'. Here it is two passes.

   Shared memory bounds these kernels as much as the tensor cores do: an mma takes 2 cycles of an A100's
   multiprocessor, which loads 256 bytes in them. A warp with 16 rows loads 256 bytes a right operand, one mma's
   worth; with 32 rows (R = 2), two. So R is 2 wherever the registers suffice for the sums. Bytes loaded per mma:

       D      forward: rows, columns, bytes, shared     backward: rows, columns, bytes of dq and dkv, shared
       32     128, 64, 160, 16 KB                       128, 32, 213, 192, 24 KB
       64     128, 64, 160, 32 KB                       128, 32, 213, 192, 48 KB
       128    128, 64, 160, 64 KB                        64, 32, 341, 320, 64 KB
       256     64, 32, 320, 64 KB                        64, 16, 427, dk 427, dv 384, 96 KB: a pass each

   Two blocks of 4 warps run on a multiprocessor of an A100 (on an RTX 4090 one from D = 128 on; its tensor cores
   take 8 cycles an mma, and shared memory is no bound). Other D are padded with zeros in shared memory. Registers on
   tensor cores: 181 to 255, which is why masks and bounds are asked for anew in every tile; none spills. Banks and
   sectors are gated by test/ladder/attention.cu, which climbs from the formula to the forward kernel in five steps. */
struct Attention {
    int N, M, H, K, group, D, window; // queries, keys; heads, key heads, H / K; window 0: no limit
    float scale, scale2;              // scale2 = scale log2(e): every exponential is a power of 2, one instruction
    bool whole;                       // rows of all tensors begin on 16 bytes
    const int32_t *begin, *end;
};

__device__ __forceinline__ float power_of_2(float x) { // one instruction; 0 below 2^-126
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// First (x) and last (y) key that query i sees; KEYS: first and last query that sees key i. Neither ever falls as
// i grows. Rows past the end see what the last one sees; they are computed like others, and not stored.
template <bool KEYS> __device__ __forceinline__ int2 seen(const Attention &a, int i) {
    i = min(i, a.N - 1);
    const int at = KEYS ? i : i + a.M - a.N; // a key's place among the queries; a query's among the keys
    int first = KEYS ? at : a.begin[i], last = KEYS ? a.end[i] - 1 : at;
    if (a.window && KEYS) last = min(last, at + a.window - 1);
    if (a.window && !KEYS) first = max(first, at - a.window + 1);
    return make_int2(first, last);
}

// --- tensor cores: tiles of rows of D numbers in shared memory, 8 numbers (16 bytes, a chunk) at a time
// Byte of a chunk. ldmatrix reads one chunk of 8 rows: they change places so that these lie in different groups
// of 4 banks. No conflicts, no padding.
template <int D> __device__ __forceinline__ uint32_t spot(uint32_t row, uint32_t chunk) {
    return row * (D * 2) + (chunk ^ (D == 32 ? row / 2 % 4 : row % 8)) * 16;
}
// ROWS rows of `width` numbers, `stride` apart, into a tile; zeros from row `rows` on and beyond the width.
template <int D, int ROWS, class T>
__device__ __forceinline__ void copy_tile(uint32_t tile, const T *from, int stride, int rows, int width) {
    constexpr int STEP = 128 / (D / 8); // rows that the block copies at once
    const int chunk = (int)threadIdx.x % (D / 8) * 8, row = (int)threadIdx.x / (D / 8);
    const T *p = from + row * (int64_t)stride + chunk;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, p += STEP * stride)
        copy16(tile + spot<D>(row + i, chunk / 8), p, row + i < rows && chunk < width);
}
// Operands of mma from a tile: a[16 rows, 16 columns]; two b[16, 8] side by side, whose columns are rows of the
// tile (load_b) or whose rows are (load_b_turned). `row` and `column` are multiples of 16, and so xor does for +.
template <int D> __device__ __forceinline__ void load_a(uint32_t (&r)[4], uint32_t tile, int row, int column) {
    load_matrices(r, tile + row * D * 2 + (spot<D>(lane() % 16, lane() / 16) ^ column * 2));
}
template <int D> __device__ __forceinline__ void load_b(uint32_t (&r)[4], uint32_t tile, int row, int column) {
    load_matrices(r, tile + row * D * 2 + (spot<D>(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2) ^ column * 2));
}
template <int D> __device__ __forceinline__ void load_b_turned(uint32_t (&r)[4], uint32_t tile, int row, int column) {
    load_matrices_turned(r, tile + row * D * 2 + (spot<D>(lane() % 16, lane() / 16) ^ column * 2));
}

// s[16 R rows][COLS] += tile a (from `row` on) times tile x turned
template <class T, int D, int R, int COLS>
__device__ __forceinline__ void scores(float (&s)[R][COLS / 8][4], uint32_t a, int row, uint32_t x) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t left[R][4], right[4];
#pragma unroll
        for (int r = 0; r < R; r++) load_a<D>(left[r], a, row + r * 16, k);
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            load_b<D>(right, x, n * 16, k);
#pragma unroll
            for (int r = 0; r < R; r++) {
                mma<T>(s[r][2 * n], left[r], right[0], right[1]);
                mma<T>(s[r][2 * n + 1], left[r], right[2], right[3]);
            }
        }
    }
}
// o[16 R rows][D] += p[16 R rows][COLS] times tile x; p is where `scores` left it
template <class T, int D, int R, int COLS>
__device__ __forceinline__ void weigh(float (&o)[R][D / 8][4], const float (&p)[R][COLS / 8][4], uint32_t x) {
#pragma unroll
    for (int k = 0; k < COLS / 16; k++) {
        uint32_t left[R][4], right[4];
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *pair = &p[r][2 * k + i / 2][i % 2 * 2];
                left[r][i] = pack2<T>(pair[0], pair[1]);
            }
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            load_b_turned<D>(right, x, k * 16, d * 16);
#pragma unroll
            for (int r = 0; r < R; r++) {
                mma<T>(o[r][2 * d], left[r], right[0], right[1]);
                mma<T>(o[r][2 * d + 1], left[r], right[2], right[3]);
            }
        }
    }
}
// -infinity where a row (the warp's are `row` and on) does not see a column (the tile's are `column` and on)
template <bool KEYS, int R, int N>
__device__ __forceinline__ void mask(float (&s)[R][N][4], const Attention &a, int row, int column) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int2 see = seen<KEYS>(a, row + r * 16 + i * 8 + lane() / 4);
#pragma unroll
            for (int n = 0; n < N * 2; n++) {
                const int at = column + n / 2 * 8 + lane() % 4 * 2 + n % 2;
                if (at < see.x || at > see.y) s[r][n / 2][i * 2 + n % 2] = -INFINITY;
            }
        }
}
// 16 rows of sums, the first 8 times f0, the others times f1, to `to`: by way of a tile's rows that only this warp
// reads, from where a lane takes whole chunks. (Pairs straight from the registers would fill half a sector each.)
template <int D, class T>
__device__ __forceinline__ void store_rows(T *to, int stride, int rows, int width, unsigned char *tile,
                                           const float (&x)[D / 8][4], float f0, float f1) {
    __syncwarp();
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
        unsigned char *pair = tile + spot<D>(lane() / 4, d) + lane() % 4 * 4;
        *(uint32_t *)pair = pack2<T>(x[d][0] * f0, x[d][1] * f0);
        *(uint32_t *)(pair + 8 * D * 2) = pack2<T>(x[d][2] * f1, x[d][3] * f1);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * D; i += 32) {
        const int row = (i + lane()) / (D / 8), chunk = (i + lane()) % (D / 8);
        if (row < rows && chunk * 8 < width)
            *(uint4 *)(to + row * (int64_t)stride + chunk * 8) = *(const uint4 *)(tile + spot<D>(row, chunk));
    }
}
// The same as fp32, rows side by side; a pair of floats fills its part of a sector.
template <int D>
__device__ __forceinline__ void store_parts(float *to, int rows, int width, const float (&x)[D / 8][4], float factor) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
            const int row = i * 8 + lane() / 4, column = d * 8 + lane() % 4 * 2;
            if (row < rows && column < width)
                *(float2 *)(to + row * width + column) = make_float2(x[d][i * 2] * factor, x[d][i * 2 + 1] * factor);
        }
}
/* A tile's scores of 16 rows, two of them a lane's: s becomes exp(scale (s - most)), `most` the largest score so far,
   and sum and o, relative to the largest before, shrink to it. A lane sums its own columns; the four lanes of a row
   are added at the end. Where a row has seen nothing yet all is -infinity, of which no NaN may come; NaN stays NaN. */
template <int N, int ND>
__device__ __forceinline__ void softmax_step(float (&s)[N][4], float (&o)[ND][4], float (&most)[2], float (&sum)[2],
                                             float scale2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float m = most[i];
#pragma unroll
        for (int n = 0; n < N; n++) m = fmaxf(m, fmaxf(s[n][i * 2], s[n][i * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float base = m == -INFINITY ? 0 : m * scale2, shrink = power_of_2(most[i] * scale2 - base);
        most[i] = m, sum[i] *= shrink;
#pragma unroll
        for (int n = 0; n < N * 2; n++) {
            float &x = s[n / 2][i * 2 + n % 2];
            x = power_of_2(x * scale2 - base), sum[i] += x;
        }
        if (__any_sync(~0u, shrink != 1)) // seldom, once a few tiles have been seen
#pragma unroll
            for (int d = 0; d < ND; d++) o[d][i * 2] *= shrink, o[d][i * 2 + 1] *= shrink;
    }
}

/* attention_forward. Block per (64 R queries, head), 16 R queries a warp. k and v have a buffer each and take turns: v
   arrives during q k^T and the softmax, the next k during P v. Two barriers a tile. Moves q and y once. k and v are
   read by each block, once for 64 R queries of a head, but mostly from L2, where blocks of the same key head find what
   their neighbours have read. The last queries, which see most keys, begin first. A document of N tokens is 2 N^2 D H
   flop: two products, and half of N^2 pairs are seen. */
template <class T, int D, int R, int COLS>
__global__ void __launch_bounds__(128, 2)
attention_forward_mma(T *y, float *lse, const T *q, const T *k, const T *v, Attention a) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int ROWS = 64 * R;
    const uint32_t tile_q = shared_address(memory), tile_k = tile_q + ROWS * D * 2, tile_v = tile_k + COLS * D * 2;
    const int h = blockIdx.y, row0 = (gridDim.x - 1 - blockIdx.x) * ROWS, row = warp() * 16 * R, mine = row0 + row;
    const int stride = a.K * a.D, stride_q = a.H * a.D, head = h / a.group * a.D;
    const int first = seen<false>(a, row0).x, last = seen<false>(a, row0 + ROWS - 1).y;
    copy_tile<D, ROWS>(tile_q, q + (int64_t)row0 * stride_q + h * a.D, stride_q, a.N - row0, a.D);
    copy_tile<D, COLS>(tile_k, k + (int64_t)first * stride + head, stride, a.M - first, a.D);
    copy_commit();
    float o[R][D / 8][4] = {}, most[R][2], sum[R][2] = {};
#pragma unroll
    for (int i = 0; i < 2 * R; i++) most[i / 2][i % 2] = -INFINITY;
    for (int j = first; j <= last; j += COLS) {
        copy_wait<0>();
        __syncthreads(); // k is there, and nobody reads the old v any more
        copy_tile<D, COLS>(tile_v, v + (int64_t)j * stride + head, stride, a.M - j, a.D);
        copy_commit();
        // Does a row of the warp see any of the tile; does some row not see all of it? (Asked anew for each tile:
        // the registers are taken.)
        const int2 low = seen<false>(a, mine), high = seen<false>(a, mine + 16 * R - 1);
        const bool any = mine < a.N && j <= high.y && j + COLS > low.x;
        float s[R][COLS / 8][4] = {};
        if (any) {
            scores<T, D, R, COLS>(s, tile_q, row, tile_k);
            if (j < high.x || j + COLS - 1 > low.y) mask<false>(s, a, mine, j);
#pragma unroll
            for (int r = 0; r < R; r++) softmax_step(s[r], o[r], most[r], sum[r], a.scale2);
        }
        copy_wait<0>();
        __syncthreads(); // v is there, and nobody reads k any more
        if (j + COLS <= last)
            copy_tile<D, COLS>(tile_k, k + (int64_t)(j + COLS) * stride + head, stride, a.M - j - COLS, a.D);
        copy_commit();
        if (any) weigh<T, D, R, COLS>(o, s, tile_v);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int begin = mine + r * 16;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float &total = sum[r][i];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int query = begin + i * 8 + lane() / 4;
            if (lane() % 4 == 0 && query < a.N)
                lse[(int64_t)query * a.H + h] = most[r][i] * a.scale + logf(total);
        }
        store_rows<D>(y + (int64_t)begin * stride_q + h * a.D, stride_q, a.N - begin, a.D,
                      memory + (row + r * 16) * D * 2, o[r], 1 / sum[r][0], 1 / sum[r][1]);
    }
}

// What backward wants to know of a query, [H][N]: log2 of its sum of exponentials, and delta = dy . y. Block per (32
// queries, head), warp per query; turned round in shared memory, so that a head's queries are neighbours.
template <class T>
__global__ void __launch_bounds__(256)
attention_delta_kernel(float2 *stat, const T *dy, const T *y, const float *lse, Attention a) {
    __shared__ float2 out[32];
    const int h = blockIdx.y, first = blockIdx.x * 32, t = threadIdx.x;
    for (int i = warp(); i < min(32, a.N - first); i += 8) {
        const int64_t at = (int64_t)(first + i) * a.H + h;
        float sum = 0;
        for (int d = lane(); d < a.D; d += 32) sum += to_float(dy[at * a.D + d]) * to_float(y[at * a.D + d]);
        sum = warp_sum(sum);
        if (lane() == 0) out[i] = make_float2(lse[at] * 1.44269504f, sum);
    }
    __syncthreads();
    if (t < 32 && first + t < a.N) stat[(int64_t)h * a.N + first + t] = out[t];
}

/* attention_backward. Block per (64 R rows, head) for dq, per (64 R rows, key head) for dk and dv. The tiles that the
   rows see (for dk and dv: of one query head of the group after the other) are one sequence; the next tile is copied
   to a second buffer while this one is used, so that there is one barrier a tile. A lane holds R D / 2 floats of
   each sum and R COLS / 4 each of S and dP. At D = 256 dk and dv do not fit together: GRADS says what a pass makes.
   Few key heads and few tokens are too few blocks for a GPU: then a block does one query head of a group
   (part_k is there) and writes fp32, [H][N][D], and attention_group_kernel adds the heads of a group up in order.
   dq and dkv together are 7 products of N^2 D H flop for a document of N tokens. */
enum { DQ = 1, DK = 2, DV = 4 };
template <class T> struct Backward {
    const T *q, *k, *v, *dy;
    const float2 *stat;
    T *dq, *dk, *dv;
    float *part_k, *part_v;
};
template <class T, int D, int R, int COLS, int GRADS>
__global__ void __launch_bounds__(128, 2) attention_backward_mma(Backward<T> t, Attention a) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr bool KEYS = GRADS != DQ; // of the two sides, the rows are the keys
    constexpr int ROWS = 64 * R, SIZE = COLS * D * 2, STAGE = 2 * SIZE + COLS * 8;
    const uint32_t tile_a = shared_address(memory), tile_b = tile_a + ROWS * D * 2, stages = tile_b + ROWS * D * 2;
    // Heaviest first: the first keys are seen by most queries, the last queries see most keys.
    const int row0 = (KEYS ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * ROWS, row = warp() * 16 * R, mine = row0 + row;
    const int first = seen<KEYS>(a, row0).x, last = seen<KEYS>(a, row0 + ROWS - 1).y;
    // The rows' head; the other side's first head, and how many follow each other.
    const bool part = KEYS && t.part_k;
    const int own = part ? blockIdx.y / a.group : blockIdx.y, heads = KEYS && !part ? a.group : 1;
    int head = part ? blockIdx.y : KEYS ? own * a.group : own / a.group, next = first;
    const int stride = (KEYS ? a.K : a.H) * a.D, stride_x = (KEYS ? a.H : a.K) * a.D;
    auto fetch = [&](uint32_t to) { // the tile at (head, next)
        const int64_t from = ((int64_t)next * (KEYS ? a.H : a.K) + head) * a.D;
        copy_tile<D, COLS>(to, (KEYS ? t.q : t.k) + from, stride_x, a.N - next, a.D);
        copy_tile<D, COLS>(to + SIZE, (KEYS ? t.dy : t.v) + from, stride_x, a.N - next, a.D);
        if (KEYS && threadIdx.x < COLS)
            copy8(to + 2 * SIZE + threadIdx.x * 8, t.stat + (int64_t)head * a.N + next + threadIdx.x,
                  next + (int)threadIdx.x < a.N);
        copy_commit();
    };
    const int64_t at = (int64_t)row0 * stride + own * a.D;
    copy_tile<D, ROWS>(tile_a, (KEYS ? t.k : t.q) + at, stride, a.N - row0, a.D);
    if (GRADS != DV) copy_tile<D, ROWS>(tile_b, (KEYS ? t.v : t.dy) + at, stride, a.N - row0, a.D);
    int left = heads * ((last - first) / COLS + 1); // tiles; its lowest bit says which buffer a tile is in
    fetch(stages + left % 2 * STAGE);
    float2 stats[R][2]; // of a lane's rows
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        const int query = mine + i * 8 + lane() / 4;
        const bool valid = !KEYS && query < a.N;
        stats[i / 2][i % 2] = valid ? t.stat[(int64_t)own * a.N + query] : make_float2(0, 0);
    }
    float sum_a[R][D / 8][4] = {}, sum_b[R][D / 8][4] = {}; // a sum that GRADS does not ask for takes no registers
    for (; left; left--) {
        copy_wait<0>();
        __syncthreads(); // this tile is there, and nobody reads the one before it any more
        const int j = next;
        next += COLS;
        if (next > last) next = first, head++;
        if (left > 1) fetch(stages + (left - 1) % 2 * STAGE);
        const int2 low = seen<KEYS>(a, mine), high = seen<KEYS>(a, mine + 16 * R - 1);
        if (mine >= a.N || j > high.y || j + COLS <= low.x) continue; // no row of the warp sees any of it
        const uint32_t tile_x = stages + left % 2 * STAGE, tile_y = tile_x + SIZE;
        float s[R][COLS / 8][4] = {}, dp[R][COLS / 8][4] = {};
        scores<T, D, R, COLS>(s, tile_a, row, tile_x);
        if (GRADS != DV) scores<T, D, R, COLS>(dp, tile_b, row, tile_y);
        if (j < high.x || j + COLS - 1 > low.y) mask<KEYS>(s, a, mine, j);
        const float4 *columns = (const float4 *)(memory + (tile_y + SIZE - tile_a)) + lane() % 4; // stats of two
#pragma unroll
        for (int n = 0; n < COLS / 8; n++) {
            const float4 c = KEYS ? columns[n * 4] : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float2 stat = !KEYS ? stats[r][e / 2] : e % 2 ? make_float2(c.z, c.w) : make_float2(c.x, c.y);
                    s[r][n][e] = power_of_2(s[r][n][e] * a.scale2 - stat.x);
                    dp[r][n][e] = s[r][n][e] * (dp[r][n][e] - stat.y);
                }
        }
        if (GRADS & DV) weigh<T, D, R, COLS>(sum_b, s, tile_y);
        if (GRADS != DV) weigh<T, D, R, COLS>(sum_a, dp, tile_x);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int begin = mine + r * 16, rows = a.N - begin;
        const int64_t to = (int64_t)begin * stride + own * a.D, to_part = ((int64_t)blockIdx.y * a.N + begin) * a.D;
        unsigned char *place = memory + (row + r * 16) * D * 2;
        if (part && GRADS & DK) store_parts<D>(t.part_k + to_part, rows, a.D, sum_a[r], a.scale);
        if (part && GRADS & DV) store_parts<D>(t.part_v + to_part, rows, a.D, sum_b[r], 1);
        T *const da = KEYS ? t.dk : t.dq;
        if (!part && GRADS != DV) store_rows<D>(da + to, stride, rows, a.D, place, sum_a[r], a.scale, a.scale);
        if (!part && GRADS & DV) store_rows<D>(t.dv + to, stride, rows, a.D, place + ROWS * D * 2, sum_b[r], 1, 1);
    }
}
// Thread per number of `to`, dk or dv [N,K,D]: the sum over a group's heads of part [H][N][D].
template <class T>
__global__ void __launch_bounds__(256) attention_group_kernel(T *to, const float *part, Attention a) {
    const int64_t i = thread();
    if (i >= (int64_t)a.N * a.K * a.D) return;
    const int64_t d = i % a.D, head = i / a.D % a.K, token = i / a.D / a.K;
    float sum = 0;
    for (int g = 0; g < a.group; g++) sum += part[((head * a.group + g) * a.N + token) * a.D + d];
    to[i] = from_float<T>(sum);
}

/* --- CUDA cores. Four warps have R rows each, a tile has 32 tokens; in the scores a lane has a token: then what the
   softmax wants to know of a row is one butterfly, and a number of the tile, read once, serves R rows, whose numbers
   come as broadcasts. In the second product a lane has every 32nd number of the head. Tiles are fp32 in shared
   memory, rows D + 4 apart: eight lanes that read 16 bytes of eight rows meet every bank once. Query heads that
   share a key head are rows of the same block: row r is query r / group, head r % group of the group. For a quad of
   the tile a warp issues 4 R multiply-adds, R cycles of four schedulers, and passes 4 + R times over shared memory:
   with R = 8 that bounds it, at two thirds of what the multipliers could do. */
// ROWS rows of `width` numbers, row r from from[at(r)] on, as fp32; zeros from row `rows` on and beyond the width.
template <int D, int ROWS, int STRIDE, class T, class At>
__device__ __forceinline__ void fill_tile(float *tile, const T *from, int rows, int width, bool whole, At at) {
    if (whole) {
#pragma unroll 4
        for (int i = (int)threadIdx.x * 4; i < ROWS * D; i += 512) {
            float x[4] = {};
            if (i / D < rows && i % D < width) load(x, from + at(i / D) + i % D);
            store(tile + i / D * STRIDE + i % D, x);
        }
    } else {
        for (int i = (int)threadIdx.x; i < ROWS * D; i += 128)
            tile[i / D * STRIDE + i % D] = i / D < rows && i % D < width ? to_float(from[at(i / D) + i % D]) : 0.0f;
    }
}
// s[r] = rows[r] . the lane's row of the tile
template <int D, int R>
__device__ __forceinline__ void dots(float (&s)[R], const float *rows, const float *tile, int width) {
#pragma unroll
    for (int r = 0; r < R; r++) s[r] = 0;
#pragma unroll 4
    for (int d = 0; d < width; d += 4) {
        float x[4], y[4];
        load(x, tile + lane() * (D + 4) + d);
#pragma unroll
        for (int r = 0; r < R; r++) {
            load(y, rows + r * D + d);
#pragma unroll
            for (int i = 0; i < 4; i++) s[r] += y[i] * x[i];
        }
    }
}
// o[r] += sum over the tile's rows of p[r][row] * row, the numbers lane, lane + 32, ... of it
template <int D, int R>
__device__ __forceinline__ void add_rows(float (&o)[R][D / 32], const float *p, const float *tile) {
#pragma unroll 2
    for (int j = 0; j < 32; j += 4) {
        float w[R][4];
#pragma unroll
        for (int r = 0; r < R; r++) load(w[r], p + r * 32 + j);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int c = 0; c < D / 32; c++) {
                const float x = tile[(j + i) * (D + 4) + c * 32 + lane()];
#pragma unroll
                for (int r = 0; r < R; r++) o[r][c] += w[r][i] * x;
            }
    }
}

/* attention_forward: block per (4 R rows, key head, piece of the keys). With chunk 0 there is one piece, and y and lse
   are written. Otherwise piece z is the keys from z chunk on; what comes of it goes to part [pieces][N*H][D] and stat
   (maximum, sum), and attention_join_kernel adds the pieces up in order: a single query and a long cache then
   keep a whole GPU busy, and k and v, the floor, are read once for a group of heads. */
template <class T, int D, int R>
__global__ void __launch_bounds__(128, 2)
attention_forward_kernel(T *y, float *lse, float *part, float2 *stat, const T *q, const T *k, const T *v, int chunk,
                         Attention a) {
    extern __shared__ __align__(128) unsigned char memory[];
    float *rows = (float *)memory, *tile = rows + 4 * R * D, *p = tile + 32 * (D + 4) + warp() * R * 32;
    const int row0 = (gridDim.x - 1 - blockIdx.x) * 4 * R, mine = row0 + warp() * R, count = a.N * a.group;
    const int64_t stride = (int64_t)a.K * a.D;
    auto index = [&](int r) { // among all heads of all queries
        return (int64_t)(r / a.group) * a.H + blockIdx.y * a.group + r % a.group;
    };
    fill_tile<D, 4 * R, D>(rows, q, count - row0, a.D, a.whole, [&](int r) { return index(row0 + r) * a.D; });
    int begin = seen<false>(a, row0 / a.group).x, end = seen<false>(a, (row0 + 4 * R - 1) / a.group).y + 1;
    if (chunk) begin = max(begin, (int)blockIdx.z * chunk), end = min(end, (int)(blockIdx.z + 1) * chunk);
    int2 see[R];
    float o[R][D / 32] = {}, most[R], sum[R] = {}, s[R];
#pragma unroll
    for (int r = 0; r < R; r++) see[r] = seen<false>(a, (mine + r) / a.group), most[r] = -INFINITY;
    for (int j = begin; j < end; j += 32) {
        auto at = [&](int r) { return (j + r) * stride + blockIdx.y * a.D; };
        __syncthreads(); // nobody reads the old v any more
        fill_tile<D, 32, D + 4>(tile, k, end - j, a.D, a.whole, at);
        __syncthreads();
        if (mine < count) dots<D>(s, rows + warp() * R * D, tile, a.D);
        __syncthreads(); // nobody reads k any more
        fill_tile<D, 32, D + 4>(tile, v, end - j, a.D, a.whole, at);
#pragma unroll
        for (int r = 0; r < R && mine < count; r++) {
            const bool sees = j + lane() >= see[r].x && j + lane() <= see[r].y && j + lane() < end;
            const float x = sees ? s[r] * a.scale2 : -INFINITY, m = fmaxf(most[r], warp_max(x));
            const float base = m == -INFINITY ? 0 : m, shrink = power_of_2(most[r] - base), e = power_of_2(x - base);
            most[r] = m, sum[r] = sum[r] * shrink + e, p[r * 32 + lane()] = e;
#pragma unroll
            for (int c = 0; c < D / 32; c++) o[r][c] *= shrink;
        }
        __syncthreads();
        if (mine < count) add_rows<D>(o, p, tile);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (mine + r >= count) continue;
        const float total = warp_sum(sum[r]);
        const int64_t i = index(mine + r), at = i + (int64_t)blockIdx.z * a.N * a.H;
        if (lane() == 0 && chunk) stat[at] = make_float2(most[r], total);
        if (lane() == 0 && !chunk) lse[i] = (most[r] + log2f(total)) * 0.693147181f;
#pragma unroll
        for (int c = 0; c < D / 32; c++) {
            const int d = c * 32 + lane();
            if (d < a.D && chunk) part[at * a.D + d] = o[r][c];
            if (d < a.D && !chunk) y[i * a.D + d] = from_float<T>(o[r][c] / total);
        }
    }
}
// Warp per row of y[n, D], n = N*H. Pieces are relative to a maximum of their own; where nothing was seen the sum is 0.
template <class T>
__global__ void __launch_bounds__(128)
attention_join_kernel(T *y, float *lse, const float *part, const float2 *stat, int pieces, int n, int D) {
    const int64_t i = (int64_t)blockIdx.x * 4 + warp();
    if (i >= n) return;
    float most = -INFINITY, total = 0;
    for (int z = 0; z < pieces; z++) most = fmaxf(most, stat[z * (int64_t)n + i].x);
    auto weight = [&](int z) {
        const float2 s = stat[z * (int64_t)n + i];
        return s.y == 0 ? 0 : power_of_2(s.x - most);
    };
    for (int z = 0; z < pieces; z++) total += stat[z * (int64_t)n + i].y * weight(z);
    for (int d = lane(); d < D; d += 32) {
        float sum = 0;
        for (int z = 0; z < pieces; z++) sum += part[(z * (int64_t)n + i) * D + d] * weight(z);
        y[i * D + d] = from_float<T>(sum / total);
    }
    if (lane() == 0) lse[i] = (most + log2f(total)) * 0.693147181f;
}

/* attention_backward: block per (4 R rows, key head); rows and tile have the parts that they have on tensor cores. */
template <class T, int D, int R, bool KEYS>
__global__ void __launch_bounds__(128, 2) attention_backward_kernel(Backward<T> t, Attention a) {
    extern __shared__ __align__(128) unsigned char memory[];
    float *rows_a = (float *)memory, *rows_b = rows_a + 4 * R * D, *tile_x = rows_b + 4 * R * D;
    float *tile_y = tile_x + 32 * (D + 4), *p = tile_y + 32 * (D + 4) + warp() * R * 64, *ds = p + R * 32;
    const int group = KEYS ? 1 : a.group, own = KEYS ? a.K : a.H, others = KEYS ? a.group : 1; // heads
    const int row0 = blockIdx.x * 4 * R, mine = row0 + warp() * R, count = a.N * group;
    auto index = [&](int r) { return (int64_t)(r / group) * own + blockIdx.y * group + r % group; };
    auto at = [&](int r) { return index(row0 + r) * a.D; };
    fill_tile<D, 4 * R, D>(rows_a, KEYS ? t.k : t.q, count - row0, a.D, a.whole, at);
    fill_tile<D, 4 * R, D>(rows_b, KEYS ? t.v : t.dy, count - row0, a.D, a.whole, at);
    const int begin = seen<KEYS>(a, row0 / group).x, end = seen<KEYS>(a, (row0 + 4 * R - 1) / group).y + 1;
    float sum_a[R][D / 32] = {}, sum_b[R][D / 32] = {}, s[R], dp[R];
    int2 see[R];
    float2 stat[R]; // of the rows; if they are keys, stat[0] is that of the lane's query
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int i = (mine + r) / group, h = blockIdx.y * group + (mine + r) % group;
        see[r] = seen<KEYS>(a, i), stat[r] = make_float2(0, 0);
        if (!KEYS && i < a.N) stat[r] = t.stat[(int64_t)h * a.N + i];
    }
    for (int h = blockIdx.y * others; h < (int)(blockIdx.y + 1) * others; h++)
        for (int j = begin; j < end; j += 32) {
            auto from = [&](int r) { return ((int64_t)(j + r) * (KEYS ? a.H : a.K) + h) * a.D; };
            __syncthreads(); // nobody reads the old tile any more
            fill_tile<D, 32, D + 4>(tile_x, KEYS ? t.q : t.k, end - j, a.D, a.whole, from);
            fill_tile<D, 32, D + 4>(tile_y, KEYS ? t.dy : t.v, end - j, a.D, a.whole, from);
            if (KEYS) stat[0] = j + lane() < end ? t.stat[(int64_t)h * a.N + j + lane()] : make_float2(0, 0);
            __syncthreads();
            if (mine >= count) continue;
            dots<D>(s, rows_a + warp() * R * D, tile_x, a.D);
            dots<D>(dp, rows_b + warp() * R * D, tile_y, a.D);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const bool sees = j + lane() >= see[r].x && j + lane() <= see[r].y;
                const float2 of = stat[KEYS ? 0 : r];
                const float e = sees ? power_of_2(s[r] * a.scale2 - of.x) : 0;
                p[r * 32 + lane()] = e, ds[r * 32 + lane()] = e * (dp[r] - of.y);
            }
            __syncwarp();
            add_rows<D>(sum_a, ds, tile_x);
            if (KEYS) add_rows<D>(sum_b, p, tile_y);
            __syncwarp();
        }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < D / 32; c++) {
            const int d = c * 32 + lane();
            if (mine + r >= count || d >= a.D) continue;
            const int64_t to = index(mine + r) * a.D + d;
            (KEYS ? t.dk : t.dq)[to] = from_float<T>(sum_a[r][c] * a.scale);
            if (KEYS) t.dv[to] = from_float<T>(sum_b[r][c]);
        }
}

// --- on the host: which kernel, how many blocks, how much memory
Attention attention(SftTensor q, SftTensor k, const int32_t *begin, const int32_t *end, float scale, int64_t window) {
    const int64_t N = q.dim[0], M = k.dim[0], H = q.dim[1], K = k.dim[1], D = q.dim[2];
    if (M > 1 << 29 || D > 256)
        sft_die(SFT_BROKEN, "attention to %lld keys, heads of %lld numbers: a GPU takes up to 2^29 and 256",
                (long long)M, (long long)D);
    return {(int)N, (int)M, (int)H, (int)K, (int)(H / K), (int)D, (int)SFT_MIN(window, M),
            scale, scale * 1.44269504f, false, begin, end};
}
// f is called with the head size that kernels are compiled for, a constant: f(std::integral_constant<int, 64>()).
template <class F> void with_head(int64_t D, F f) {
    if (D <= 64) f(std::integral_constant<int, 64>());
    else if (D <= 128) f(std::integral_constant<int, 128>());
    else f(std::integral_constant<int, 256>());
}
template <class... P, class... A>
void launch_attention(const SftCtx *c, void (*kernel)(P...), dim3 grid, size_t bytes, A... arguments) {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<grid, 128, bytes, stream(c)>>>(arguments...);
    LAUNCHED("attention");
}

// Pieces that the keys of few queries are cut into, by the dimensions alone: so many that there are enough blocks,
// but none under 64 keys.
constexpr int FEW_QUERIES = 16, ENOUGH_BLOCKS = 512, LEAST_KEYS = 64;
int64_t key_pieces(int64_t N, int64_t M, int64_t H, int64_t K) {
    if (!N || N > FEW_QUERIES) return 1;
    const int64_t rows = N * (H / K), tiles = rows <= 8 ? 1 : (rows + 31) / 32;
    return SFT_MAX(1, SFT_MIN(ENOUGH_BLOCKS / (tiles * K), (M + LEAST_KEYS - 1) / LEAST_KEYS));
}

void attention_forward(SftCtx *c, SftTensor y, SftTensor lse, SftTensor q, SftTensor k, SftTensor v,
                       const int32_t *begin, float scale, int64_t window) {
    Attention a = attention(q, k, begin, NULL, scale, window);
    const int64_t N = a.N, M = a.M, H = a.H, K = a.K, D = a.D, pieces = key_pieces(N, M, H, K);
    a.whole = aligned(D, y, q, k, v);
    int64_t rows = pieces > 1 ? pieces * N * H : 0;
    for (int64_t n = 1; sft_planning(c) && n <= SFT_MIN(N, FEW_QUERIES); n++) // a plan must do for fewer, too
        rows = SFT_MAX(rows, key_pieces(n, M, H, K) * n * H);
    const size_t mark = c->work->used;
    float2 *stat = (float2 *)sft_take(c->work, (size_t)rows * sizeof(float2));
    float *part = (float *)sft_take(c->work, (size_t)(rows * D) * sizeof(float));
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !N) return;
    with_type(q.type, [&](auto type) {
        typedef decltype(type) T;
        T *to = (T *)y.data;
        float *sums = (float *)lse.data;
        const T *qs = (const T *)q.data, *ks = (const T *)k.data, *vs = (const T *)v.data;
        if constexpr (sizeof(T) == 2)
            if (N > FEW_QUERIES && a.whole) {
                auto run = [&](auto head) {
                    constexpr int DP = decltype(head)::value, R = DP > 128 ? 1 : 2, COLS = DP > 128 ? 32 : 64;
                    launch_attention(c, attention_forward_mma<T, DP, R, COLS>, dim3(blocks(N, 64 * R), (unsigned)H),
                                     (64 * R + 2 * COLS) * DP * 2, to, sums, qs, ks, vs, a);
                };
                if (D <= 32) run(std::integral_constant<int, 32>());
                else with_head(D, run);
                return;
            }
        auto run = [&](auto head, auto each) {
            constexpr int DP = decltype(head)::value, R = decltype(each)::value;
            const int chunk = pieces > 1 ? (int)((M + pieces * 32 - 1) / (pieces * 32) * 32) : 0;
            launch_attention(c, attention_forward_kernel<T, DP, R>,
                             dim3(blocks(N * a.group, 4 * R), (unsigned)K, (unsigned)pieces),
                             (4 * R * DP + 32 * (DP + 4) + 4 * R * 32) * 4, to, sums, part, stat, qs, ks, vs, chunk, a);
        };
        with_head(D, [&](auto head) {
            if (N * a.group <= 8) run(head, std::integral_constant<int, 2>());
            else run(head, std::integral_constant<int, 8>());
        });
        if (pieces == 1) return;
        const int n = (int)(N * H);
        attention_join_kernel<T><<<blocks(n, 4), 128, 0, stream(c)>>>(to, sums, part, stat, (int)pieces, n, (int)D);
        LAUNCHED("attention_join");
    });
}

// Fewer blocks of 64 keys than this do not fill a GPU, and every query head gets its own: by the dimensions alone.
constexpr int FEW_BLOCKS = 128;
void attention_backward(SftCtx *c, SftTensor dq, SftTensor dk, SftTensor dv, SftTensor dy, SftTensor y, SftTensor lse,
                        SftTensor q, SftTensor k, SftTensor v, const int32_t *begin, const int32_t *end, float scale,
                        int64_t window) {
    Attention a = attention(q, k, begin, end, scale, window);
    const int64_t N = a.N, H = a.H, K = a.K, D = a.D;
    a.whole = aligned(D, dq, dk, dv, dy) && aligned(D, q, k, v);
    const int64_t few = H > K && q.type != SFT_F32 ? (FEW_BLOCKS - 1) / K * 64 : 0; // tokens that make few blocks
    const int64_t parts = N <= few ? N : sft_planning(c) ? few : 0;                 // a plan must do for fewer, too
    const size_t mark = c->work->used;
    float2 *stat = (float2 *)sft_take(c->work, (size_t)(N * H) * sizeof(float2));
    float *part_k = (float *)sft_take(c->work, (size_t)(parts * H * D) * sizeof(float));
    float *part_v = (float *)sft_take(c->work, (size_t)(parts * H * D) * sizeof(float));
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !N) return;
    with_type(q.type, [&](auto type) {
        typedef decltype(type) T;
        const bool split = parts && a.whole;
        const Backward<T> t = {(const T *)q.data, (const T *)k.data, (const T *)v.data, (const T *)dy.data, stat,
                               (T *)dq.data, (T *)dk.data, (T *)dv.data, split ? part_k : NULL, part_v};
        attention_delta_kernel<T><<<dim3(blocks(N, 32), (unsigned)H), 256, 0, stream(c)>>>(
            stat, t.dy, (const T *)y.data, (const float *)lse.data, a);
        LAUNCHED("attention_delta");
        if constexpr (sizeof(T) == 2)
            if (a.whole) {
                auto run = [&](auto head) {
                    constexpr int DP = decltype(head)::value, R = DP <= 64 ? 2 : 1, COLS = DP <= 128 ? 32 : 16;
                    constexpr size_t bytes = 64 * R * DP * 4 + 2 * COLS * (DP * 4 + 8);
                    const dim3 queries(blocks(N, 64 * R), (unsigned)H), keys(queries.x, (unsigned)(split ? H : K));
                    launch_attention(c, attention_backward_mma<T, DP, R, COLS, DQ>, queries, bytes, t, a);
                    if constexpr (DP <= 128) {
                        launch_attention(c, attention_backward_mma<T, DP, R, COLS, DK | DV>, keys, bytes, t, a);
                    } else {
                        launch_attention(c, attention_backward_mma<T, DP, R, COLS, DK>, keys, bytes, t, a);
                        launch_attention(c, attention_backward_mma<T, DP, R, COLS, DV>, keys, bytes, t, a);
                    }
                };
                if (D <= 32) run(std::integral_constant<int, 32>());
                else with_head(D, run);
                for (int i = 0; i < 2 && split; i++) {
                    T *to = i ? t.dv : t.dk;
                    const float *part = i ? part_v : part_k;
                    attention_group_kernel<T><<<blocks(N * K * D, 256), 256, 0, stream(c)>>>(to, part, a);
                    LAUNCHED("attention_group");
                }
                return;
            }
        with_head(D, [&](auto head) {
            constexpr int DP = decltype(head)::value, R = 512 / DP;
            constexpr size_t bytes = (2 * 4 * R * DP + 2 * 32 * (DP + 4) + 2 * 4 * R * 32) * 4;
            const dim3 queries(blocks(N * a.group, 4 * R), (unsigned)K), keys(blocks(N, 4 * R), (unsigned)K);
            launch_attention(c, attention_backward_kernel<T, DP, R, false>, queries, bytes, t, a);
            launch_attention(c, attention_backward_kernel<T, DP, R, true>, keys, bytes, t, a);
        });
    });
}

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
/* swiglu_backward: the same, 5 numbers per output. Each thread reads all that it overwrites before it writes, so dgate
   may be gate and dup may be up. */
template <class T, int W>
__global__ void __launch_bounds__(256) swiglu_grad_kernel(T *dgate, T *dup, const T *dy, const T *gate, const T *up,
                                                          int64_t n) {
    const int64_t i = thread() * W;
    if (i >= n) return;
    float d[W], g[W], u[W];
    load(d, dy + i), load(g, gate + i), load(u, up + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float x = g[k];
        g[k] = d[k] * u[k] * sft_silu_grad(x), u[k] = d[k] * sft_silu(x);
    }
    store(dgate + i, g), store(dup + i, u);
}
void swiglu_backward(SftCtx *c, SftTensor dgate, SftTensor dup, SftTensor dy, SftTensor gate, SftTensor up) {
    const int64_t n = sft_size(dy);
    if (sft_planning(c) || !n) return;
    one_type("swiglu_backward", dgate, dup, dy, gate, up);
    with_width(dy.type, n, [&](auto t, auto w) {
        typedef decltype(t) T;
        constexpr int W = decltype(w)::value;
        const T *d = (const T *)dy.data, *g = (const T *)gate.data, *u = (const T *)up.data;
        swiglu_grad_kernel<T, W><<<blocks(n, 256 * W), 256, 0, stream(c)>>>((T *)dgate.data, (T *)dup.data, d, g, u, n);
        LAUNCHED("swiglu_backward");
    }, dgate, dup, dy, gate, up);
}

/* cross_entropy: block per row. One pass for maximum and sum together (Milakov, Gimelshein 2018: the sum is rescaled
   where the maximum grows, once per 4 packs), one for the gradient. Floor: a logit read once and written once. The
   second pass reads the row again, from L2 if few rows are on the way at once: so a block has all 1024 threads, and 132
   rows of 152,000 numbers in bf16 are 40 MB, an H100's L2. Rows go from the last to the first: the matmul that made the
   logits ended with the last, and the one that follows begins with the first. */
template <class T, int W>
__global__ void __launch_bounds__(1024) cross_entropy_kernel(float *loss, T *logits, const int32_t *target, int V,
                                                             int Vp, float scale) {
    constexpr int U = 4, STEP = 1024 * W;
    const int64_t row = gridDim.x - 1 - blockIdx.x;
    const int label = target[row], first = (int)threadIdx.x * W;
    T *x = logits + row * Vp;
    Pack<T, W> v[U];
    auto fetch = [&](int j0) { // U packs from column j0 on; of columns that are none, minus infinity
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int j = j0 + u * STEP;
            if (j + W <= V) v[u] = *(const Pack<T, W> *)(x + j);
            else
#pragma unroll
                for (int e = 0; e < W; e++) v[u].v[e] = j + e < V ? x[j + e] : from_float<T>(-INFINITY);
        }
    };
    float most = -1e30f, sum = 0;
    for (int j0 = first; j0 < V && label >= 0; j0 += U * STEP) {
        fetch(j0);
        float m = most;
#pragma unroll
        for (int k = 0; k < U * W; k++) m = fmaxf(m, to_float(v[k / W].v[k % W]));
        sum *= sft_exp(most - m), most = m;
#pragma unroll
        for (int k = 0; k < U * W; k++) sum += sft_exp(to_float(v[k / W].v[k % W]) - m);
    }
    const float correct = label >= 0 && threadIdx.x == 0 ? to_float(x[label]) : 0; // before it is overwritten
    const float all = block_max<1024>(most);
    const float lse = all + logf(block_sum<1024>(sum * sft_exp(most - all)));
    if (threadIdx.x == 0) loss[row] = label >= 0 ? lse - correct : 0;
    for (int j0 = first; j0 < Vp && scale != 0; j0 += U * STEP) {
        fetch(j0);
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int j = j0 + u * STEP;
            float d[W];
#pragma unroll
            for (int e = 0; e < W; e++) {
                d[e] = (sft_exp(to_float(v[u].v[e]) - lse) - (j + e == label ? 1.0f : 0.0f)) * scale;
                if (label < 0 || j + e >= V) d[e] = 0;
            }
            if (j < Vp) store(x + j, d);
        }
    }
}
void cross_entropy(SftCtx *c, SftTensor loss, SftTensor logits, const int32_t *target, int64_t V, float scale) {
    const int64_t N = logits.dim[0], Vp = width(logits);
    if (sft_planning(c) || !N) return;
    with_width(logits.type, Vp, [&](auto t, auto w) {
        typedef decltype(t) T;
        cross_entropy_kernel<T, decltype(w)::value><<<blocks(N, 1), 1024, 0, stream(c)>>>(
            (float *)loss.data, (T *)logits.data, target, (int)V, (int)Vp, scale);
        LAUNCHED("cross_entropy");
    }, logits);
}

/* sums: block per SUMS numbers, 4 packs per thread in flight, sums in double; then one block adds the blocks' sums.
   Both add in an order of constants. Reads x once. Doubles are 1/64 as fast as floats on a 4090: 2 operations a number
   are then 1.3 TB/s of fp32, still more than its memory has. Infinity and NaN stay what they are in a sum. */
constexpr int SUMS = 1 << 14;
__device__ __forceinline__ void add_sums(double *sum, double s, double square, bool add) {
    s = block_sum<256>(s), square = block_sum<256>(square);
    if (threadIdx.x == 0) sum[0] = s + (add ? sum[0] : 0), sum[1] = square + (add ? sum[1] : 0);
}
template <class T, int W> __global__ void __launch_bounds__(256) sums_kernel(double *parts, const T *x, int64_t n) {
    constexpr int U = 4, STEP = 256 * W;
    const int64_t first = (int64_t)blockIdx.x * SUMS, end = SFT_MIN(n, first + SUMS);
    double s = 0, square = 0;
    for (int64_t i = first + threadIdx.x * W; i < end; i += U * STEP) {
        float v[U][W] = {};
#pragma unroll
        for (int u = 0; u < U; u++)
            if (i + u * STEP < end) load(v[u], x + i + u * STEP);
#pragma unroll
        for (int k = 0; k < U * W; k++) {
            const double d = v[k / W][k % W];
            s += d, square += d * d;
        }
    }
    add_sums(parts + 2 * blockIdx.x, s, square, false);
}
__global__ void __launch_bounds__(256) sums_add_kernel(double *sum, const double *parts, int64_t n) {
    double s = 0, square = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < n; i += 256) {
        const Pack<double, 2> part = ((const Pack<double, 2> *)parts)[i];
        s += part.v[0], square += part.v[1];
    }
    add_sums(sum, s, square, true);
}
void sums(SftCtx *c, double *sum, SftTensor x) {
    const int64_t n = sft_size(x);
    const unsigned grid = blocks(n, SUMS);
    const size_t mark = c->work->used;
    double *parts = (double *)sft_take(c->work, (size_t)grid * 2 * sizeof(double));
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !n) return;
    with_width(x.type, n, [&](auto t, auto w) {
        typedef decltype(t) T;
        sums_kernel<T, decltype(w)::value><<<grid, 256, 0, stream(c)>>>(parts, (const T *)x.data, n);
        LAUNCHED("sums");
    }, x);
    sums_add_kernel<<<1, 256, 0, stream(c)>>>(sum, parts, (int64_t)grid);
    LAUNCHED("sums_add");
}

/* clip: one thread. The units are few, and their order is the order of the sum: the host adds the same bits. */
__global__ void clip_kernel(float *factor, const double *sum, int64_t n, double max_norm, double scale) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += sum[2 * i + 1];
    *factor = isfinite(squares) ? (float)(sft_clip(sqrt(squares) / scale, max_norm) / scale) : NAN;
}
void clip(SftCtx *c, float *factor, const double *sum, int64_t n, double max_norm, double scale) {
    if (sft_planning(c)) return;
    clip_kernel<<<1, 1, 0, stream(c)>>>(factor, sum, n, max_norm, scale);
    LAUNCHED("clip");
}

/* adamw: thread per 4 parameters. Reads weight, m, v and gradient and writes weight, m and v, 28 bytes a parameter, and
   2 more for the 16-bit copy (T = float: there is none): the floor. Four loads are in flight. The factor is read on the
   GPU, where clip put it; all threads or none return there. */
template <class T, int W>
__global__ void __launch_bounds__(256) adamw_kernel(T *weights, float *master, float *m, float *v, const float *grad,
                                                    const float *factor, SftAdamFactors same, int64_t n) {
    const int64_t i = thread() * W;
    if (i >= n) return;
    const float f = *factor;
    if (isnan(f)) return;
    float w[W], mi[W], vi[W], g[W];
    load(w, master + i), load(mi, m + i), load(vi, v + i), load(g, grad + i);
#pragma unroll
    for (int e = 0; e < W; e++) sft_adamw(&w[e], &mi[e], &vi[e], g[e] * f, same);
    store(master + i, w), store(m + i, mi), store(v + i, vi);
    if (sizeof(T) == 2) store(weights + i, w);
}
void adamw(SftCtx *c, SftTensor weights, SftTensor master, SftTensor m, SftTensor v, SftTensor grad,
           const float *factor, SftAdam adam) {
    const int64_t n = sft_size(master);
    if (sft_planning(c) || !n) return;
    const SftAdamFactors same = sft_adam_factors(adam);
    with_width(weights.data ? weights.type : SFT_F32, n, [&](auto t, auto w) {
        typedef decltype(t) T;
        constexpr int W = SFT_MIN(decltype(w)::value, 4);
        adamw_kernel<T, W><<<blocks(n, 256 * W), 256, 0, stream(c)>>>((T *)weights.data, (float *)master.data,
            (float *)m.data, (float *)v.data, (const float *)grad.data, factor, same, n);
        LAUNCHED("adamw");
    }, weights, master, m, v, grad);
}

// [5.8] weights in 4 and 8 bits ----------------------------------------------------------------------------------
/* Frozen weights are quantised once and made numbers again before every use, for the matmul to take: what counts is
   the way back. It moves 2.5 bytes a weight in bf16 (int8: 3), and the matmul reads 2 of them again: at the 2 TB/s of
   an A100 2.2 ps, beside the 26 ps of the 8192 flop that 4096 tokens do with the weight. With fewer it is worth more.

   nf4_kernel: thread per 4 times W numbers, 256 W apart: 4 loads of W / 2 bytes in flight, and W numbers are 16 bytes
   of the result. The code book lies in the lanes of the warp: lane i knows number i % 16, and a shuffle is a look-up
   without memory (all lanes look up at once, each its own). Doubly quantised maxima go through a table that the block
   makes for itself, one entry a thread; 8 lanes share a maximum. Moves the floor: half a byte and the result. */
__device__ __forceinline__ float nf4_absmax(const SftNf4 &q, int64_t block, const float *map) {
    return q.absmax ? q.absmax[block] : map[q.level[block]] * q.nested[block / SFT_NF4_NEST] + *q.offset;
}
template <class T, int W> __global__ void __launch_bounds__(256) nf4_kernel(T *w, SftNf4 q, int64_t n) {
    constexpr int BYTES = SFT_MAX(W / 2, 1);
    __shared__ float map[256];
    const float book = sft_nf4(lane() & 15);
    const int64_t i0 = ((int64_t)blockIdx.x * 1024 + threadIdx.x) * W;
    Pack<uint8_t, BYTES> code[4] = {};
    float most[4] = {};
    if (!q.absmax) map[threadIdx.x] = sft_dynamic8(threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int u = 0; u < 4; u++) {
        const int64_t i = i0 + u * 256 * W;
        if (i < n) code[u] = *(const Pack<uint8_t, BYTES> *)(q.code + i / 2), most[u] = nf4_absmax(q, i / 64, map);
    }
#pragma unroll
    for (int u = 0; u < 4; u++) {
        const int64_t i = i0 + u * 256 * W;
        float v[W];
#pragma unroll
        for (int e = 0; e < W; e++) {
            const bool odd = W > 1 ? e % 2 : i % 2;
            v[e] = __shfl_sync(~0u, book, odd ? code[u].v[e / 2] & 15 : code[u].v[e / 2] >> 4) * most[u];
        }
        if (i < n) store(w + i, v);
    }
}
void nf4_dequantize(SftCtx *c, SftTensor w, SftNf4 q) {
    const int64_t n = sft_size(w);
    if (sft_planning(c) || !n) return;
    with_width(w.type, n, [&](auto t, auto pack) {
        typedef decltype(t) T;
        constexpr int W = decltype(pack)::value;
        nf4_kernel<T, W><<<blocks(n, 1024 * W), 256, 0, stream(c)>>>((T *)w.data, q, n);
        LAUNCHED("nf4");
    }, w);
}

/* nf4_code_kernel: warp per block of 64 numbers; a lane codes numbers i and i + 32 of them, so that both loads are of
   whole sectors, and writes byte i, whose two numbers other lanes have. nf4_nest_kernel: block per 256 maxima, one a
   thread. */
template <class T>
__global__ void __launch_bounds__(256) nf4_code_kernel(uint8_t *code, float *absmax, const T *w, int64_t n) {
    const int64_t block = thread() / 32, i = block * 64 + lane();
    const float x = i < n ? to_float(w[i]) : 0, y = i + 32 < n ? to_float(w[i + 32]) : 0;
    const float most = warp_max(fmaxf(fabsf(x), fabsf(y))), scale = 1.0f / most;
    const unsigned both = sft_nf4_code(i < n ? x * scale : 0) | sft_nf4_code(i + 32 < n ? y * scale : 0) << 4;
    const int half = lane() / 16 * 4; // of the block: lanes 0 .. 15 write the bytes of the first
    const unsigned first = __shfl_sync(~0u, both, 2 * lane() & 31) >> half;
    const unsigned second = __shfl_sync(~0u, both, (2 * lane() + 1) & 31) >> half;
    if (block * 64 + 2 * lane() < n) code[block * 32 + lane()] = (uint8_t)((first & 15) << 4 | (second & 15));
    if (lane() == 0 && i < n) absmax[block] = most;
}
__global__ void __launch_bounds__(SFT_NF4_NEST) nf4_nest_kernel(SftNf4 q, const float *absmax, const double *sum,
                                                                int64_t n) {
    const int64_t i = thread();
    const float offset = (float)(*sum / (double)n), x = i < n ? absmax[i] - offset : 0;
    const float most = block_max<SFT_NF4_NEST>(fabsf(x));
    if (i < n) q.level[i] = (uint8_t)sft_dynamic8_code(x * (1.0f / most));
    if (threadIdx.x == 0) q.nested[blockIdx.x] = most;
    if (i == 0) *q.offset = offset;
}
void nf4_quantize(SftCtx *c, SftNf4 q, SftTensor w) {
    const int64_t n = sft_size(w), count = (n + SFT_NF4_BLOCK - 1) / SFT_NF4_BLOCK;
    const size_t mark = c->work->used;
    double *sum = (double *)sft_take(c->work, 2 * sizeof(double));
    const SftTensor maxima = sft_take_tensor(c->work, SFT_F32, count, 1, 1);
    if (!sft_planning(c) && n) {
        float *absmax = q.absmax ? q.absmax : (float *)maxima.data;
        CHECK(cudaMemsetAsync(sum, 0, 2 * sizeof(double), stream(c)));
        with_type(w.type, [&](auto t) {
            typedef decltype(t) T;
            nf4_code_kernel<T><<<blocks(count, 8), 256, 0, stream(c)>>>(q.code, absmax, (const T *)w.data, n);
            LAUNCHED("nf4_code");
        });
    }
    if (!q.absmax) sums(c, sum, maxima);
    sft_give_back(c->work, mark);
    if (sft_planning(c) || !n || q.absmax) return;
    const unsigned grid = blocks(count, SFT_NF4_NEST);
    nf4_nest_kernel<<<grid, SFT_NF4_NEST, 0, stream(c)>>>(q, (const float *)maxima.data, sum, count);
    LAUNCHED("nf4_nest");
}

/* int8_kernel: warp per row, 2 packs in flight: W bytes of code for 16 of the result. int8_code_kernel: block per row,
   a number a thread, the row read twice: it runs once. */
template <class T, int W>
__global__ void __launch_bounds__(256) int8_kernel(T *w, SftInt8 q, int64_t N, int64_t C) {
    const int64_t row = thread() / 32;
    if (row >= N) return;
    const float most = q.absmax[row];
    for (int64_t j0 = lane() * W; j0 < C; j0 += 2 * 32 * W) {
        Pack<int8_t, W> code[2];
#pragma unroll
        for (int u = 0; u < 2; u++)
            if (j0 + u * 32 * W < C) code[u] = *(const Pack<int8_t, W> *)(q.code + row * C + j0 + u * 32 * W);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            float v[W];
#pragma unroll
            for (int e = 0; e < W; e++) v[e] = (float)code[u].v[e] * most * (1.0f / 127);
            if (j0 + u * 32 * W < C) store(w + row * C + j0 + u * 32 * W, v);
        }
    }
}
void int8_dequantize(SftCtx *c, SftTensor w, SftInt8 q) {
    const int64_t N = w.dim[0], C = width(w);
    if (sft_planning(c) || !N) return;
    with_width(w.type, C, [&](auto t, auto pack) {
        typedef decltype(t) T;
        int8_kernel<T, decltype(pack)::value><<<blocks(N, 8), 256, 0, stream(c)>>>((T *)w.data, q, N, C);
        LAUNCHED("int8");
    }, w);
}
template <class T> __global__ void __launch_bounds__(256) int8_code_kernel(SftInt8 q, const T *w, int64_t C) {
    const int64_t row = blockIdx.x;
    float most = 0;
    for (int64_t j = threadIdx.x; j < C; j += 256) most = fmaxf(most, fabsf(to_float(w[row * C + j])));
    most = block_max<256>(most);
    const float scale = most > 0 ? 127.0f / most : 0;
    for (int64_t j = threadIdx.x; j < C; j += 256)
        q.code[row * C + j] = (int8_t)rintf(to_float(w[row * C + j]) * scale);
    if (threadIdx.x == 0) q.absmax[row] = most;
}
void int8_quantize(SftCtx *c, SftInt8 q, SftTensor w) {
    const int64_t N = w.dim[0], C = width(w);
    if (sft_planning(c) || !N) return;
    with_type(w.type, [&](auto t) {
        typedef decltype(t) T;
        int8_code_kernel<T><<<blocks(N, 1), 256, 0, stream(c)>>>(q, (const T *)w.data, C);
        LAUNCHED("int8_code");
    });
}
} // namespace

const SftOps sft_cuda = {
    "cuda", true, reserve, release, upload, download, wait_for_downloads, device,
#define X(op, args) op,
    SFT_OPS(X)
#undef X
};

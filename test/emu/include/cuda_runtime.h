// Stand-in for <cuda_runtime.h>: the part of CUDA's language and runtime that sft.h's kernels use, on the CPU.
// What is not here does not compile, and the compiler names it.
#pragma once
#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <algorithm>
#include <cmath>
#include "emu.h"

// ---- language. Host and device code are one compilation here: the newest architecture is taken, and the instructions
// of sm_90a stop on an older EMU_CHIP. __CUDACC__ comes from the command line, as with nvcc.
#define CUDART_VERSION 12080
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __global__
#define __device__
#define __host__
#define __constant__ EMU_DEVICE_VARIABLE
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __builtin_assume(x) ((void)0)

#define EMU_VECTOR(T, N, A2, A4) \
    struct N##1 { T x; }; \
    struct alignas(A2) N##2 { T x, y; }; \
    struct N##3 { T x, y, z; }; \
    struct alignas(A4) N##4 { T x, y, z, w; }; \
    static inline N##1 make_##N##1(T x) { return {x}; } \
    static inline N##2 make_##N##2(T x, T y) { return {x, y}; } \
    static inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; } \
    static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(signed char, char, 2, 4) EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(short, short, 4, 8) EMU_VECTOR(unsigned short, ushort, 4, 8)
EMU_VECTOR(int, int, 8, 16) EMU_VECTOR(unsigned, uint, 8, 16) EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(long, long, 16, 16) EMU_VECTOR(unsigned long, ulong, 16, 16)
EMU_VECTOR(long long, longlong, 16, 16) EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
EMU_VECTOR(double, double, 16, 16)
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
template <class G, class B> emu::Configuration::Configuration(G g, B b, size_t dynamic, cudaStream_t s) {
    dim3 grid(g), block(b);
    l = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, dynamic, s};
}

// ---- host API: errors
enum cudaError {
    cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9, cudaErrorInvalidSymbol = 13, cudaErrorInvalidDevicePointer = 17,
    cudaErrorInvalidMemcpyDirection = 21, cudaErrorInsufficientDriver = 35, cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101, cudaErrorInvalidResourceHandle = 400, cudaErrorSymbolNotFound = 500,
    cudaErrorNotReady = 600, cudaErrorIllegalAddress = 700, cudaErrorLaunchOutOfResources = 701,
    cudaErrorLaunchFailure = 719, cudaErrorNotSupported = 801, cudaErrorUnknown = 999
};
typedef enum cudaError cudaError_t;
cudaError_t cudaGetLastError(), cudaPeekAtLastError();
const char *cudaGetErrorString(cudaError_t e), *cudaGetErrorName(cudaError_t e);

// ---- host API: devices
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin;
    size_t reservedSharedMemPerBlock;
    int major, minor, multiProcessorCount, warpSize, maxThreadsPerMultiProcessor, maxThreadsPerBlock, maxThreadsDim[3],
        maxGridSize[3], regsPerBlock, regsPerMultiprocessor, l2CacheSize, persistingL2CacheMaxSize, concurrentKernels,
        asyncEngineCount, unifiedAddressing, maxBlocksPerMultiProcessor, memoryBusWidth, pciBusID, pciDeviceID,
        pciDomainID, ECCEnabled, integrated, canMapHostMemory, managedMemory, cooperativeLaunch;
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrL2CacheSize = 38, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrMemoryPoolsSupported = 115
};
cudaError_t cudaGetDeviceCount(int *n), cudaGetDevice(int *device), cudaSetDevice(int device), cudaDeviceReset();
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr a, int device), cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t *free, size_t *total), cudaRuntimeGetVersion(int *v), cudaDriverGetVersion(int *v);

// ---- host API: memory
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum { cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
enum { cudaHostRegisterReadOnly = 8 };
cudaError_t cudaMalloc(void **p, size_t n), cudaFree(void *p), cudaFreeHost(void *p), cudaHostUnregister(void *p);
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s), cudaFreeAsync(void *p, cudaStream_t s);
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags), cudaMallocHost(void **p, size_t n, unsigned flags = 0);
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags);
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind k);
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t st = 0);
cudaError_t cudaMemcpy2DAsync(void *d, size_t dpitch, const void *s, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind k, cudaStream_t st = 0);
cudaError_t cudaMemset(void *d, int v, size_t n), cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st = 0);
template <class T> cudaError_t cudaMalloc(T **p, size_t n) { return cudaMalloc((void **)p, n); }
template <class T> cudaError_t cudaMallocAsync(T **p, size_t n, cudaStream_t s) {
    return cudaMallocAsync((void **)p, n, s);
}
template <class T> cudaError_t cudaHostAlloc(T **p, size_t n, unsigned flags) {
    return cudaHostAlloc((void **)p, n, flags);
}
template <class T> cudaError_t cudaMallocHost(T **p, size_t n, unsigned flags = 0) {
    return cudaMallocHost((void **)p, n, flags);
}
template <class T> cudaError_t cudaGetSymbolAddress(void **p, T &symbol) { *p = (void *)&symbol; return cudaSuccess; }
template <class T> cudaError_t cudaMemcpyToSymbol(T &symbol, const void *s, size_t n, size_t offset = 0,
                                                  cudaMemcpyKind k = cudaMemcpyHostToDevice) {
    return cudaMemcpy((char *)&symbol + offset, s, n, k);
}
template <class T> cudaError_t cudaMemcpyFromSymbol(void *d, T &symbol, size_t n, size_t offset = 0,
                                                    cudaMemcpyKind k = cudaMemcpyDeviceToHost) {
    return cudaMemcpy(d, (const char *)&symbol + offset, n, k);
}

// ---- host API: streams and events
typedef struct EmuEvent *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *data);
#define cudaStreamLegacy ((cudaStream_t)1)
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
cudaError_t cudaStreamCreate(cudaStream_t *s), cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t s), cudaStreamSynchronize(cudaStream_t s), cudaStreamQuery(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data);
cudaError_t cudaEventCreate(cudaEvent_t *e, unsigned flags = 0),
    cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e), cudaEventRecord(cudaEvent_t e, cudaStream_t s = 0);
cudaError_t cudaEventSynchronize(cudaEvent_t e), cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b);

// ---- host API: kernels
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum { cudaSharedmemCarveoutDefault = -1, cudaSharedmemCarveoutMaxShared = 100, cudaSharedmemCarveoutMaxL1 = 0 };
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
namespace emu {
cudaError_t set_attribute(Kernel *k, cudaFuncAttribute a, int value);
cudaError_t get_attributes(cudaFuncAttributes *a, Kernel *k);
cudaError_t occupancy(int *blocks, Kernel *k, int threads, size_t dynamic);
} // namespace emu
template <class... A> cudaError_t cudaFuncSetAttribute(void (*f)(A...), cudaFuncAttribute a, int value) {
    return emu::set_attribute(emu::kernel_of(f), a, value);
}
template <class... A> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, void (*f)(A...)) {
    return emu::get_attributes(a, emu::kernel_of(f));
}
template <class... A>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void (*f)(A...), int threads, size_t dynamic) {
    return emu::occupancy(blocks, emu::kernel_of(f), threads, dynamic);
}
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *result = nullptr);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *result = nullptr);

// ---- device built-ins: where a thread is, barriers, warps
#define threadIdx (emu::cur->thread)
#define blockIdx (emu::block_id)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)
static const int warpSize = 32;
#define __syncthreads() ((void)emu::syncthreads(EMU_SITE))
#define __syncthreads_count(p) emu::syncthreads(EMU_SITE, p, emu::COUNT)
#define __syncthreads_and(p) emu::syncthreads(EMU_SITE, p, emu::AND)
#define __syncthreads_or(p) emu::syncthreads(EMU_SITE, p, emu::OR)
#define __syncwarp(...) emu::syncwarp(EMU_SITE, ##__VA_ARGS__)
#define __activemask() emu::active_mask()
#define __shfl_sync(...) emu::shuffle(EMU_SITE, 'i', __VA_ARGS__)
#define __shfl_xor_sync(...) emu::shuffle(EMU_SITE, 'x', __VA_ARGS__)
#define __shfl_up_sync(...) emu::shuffle(EMU_SITE, 'u', __VA_ARGS__)
#define __shfl_down_sync(...) emu::shuffle(EMU_SITE, 'd', __VA_ARGS__)
#define __ballot_sync(m, p) emu::vote(EMU_SITE, m, p)
#define __any_sync(m, p) ((int)(emu::vote(EMU_SITE, m, p) != 0))
#define __all_sync(m, p) ((int)(emu::vote(EMU_SITE, m, !(p)) == 0))
#define __match_any_sync(m, v) emu::match_any(EMU_SITE, m, (uint64_t)(v))
template <class T> T emu_reduce(const char *site, unsigned m, int op, T v) {
    static_assert(sizeof(T) == 4 && std::is_integral<T>::value, "__reduce_*_sync takes int or unsigned");
    bool extremum = op == 'm' || op == 'M';
    return (T)emu::reduce(site, m, extremum && std::is_unsigned<T>::value ? op + 1 : op, (uint32_t)v); // 'n', 'N'
}
#define __reduce_add_sync(m, v) emu_reduce(EMU_SITE, m, '+', v)
#define __reduce_min_sync(m, v) emu_reduce(EMU_SITE, m, 'm', v)
#define __reduce_max_sync(m, v) emu_reduce(EMU_SITE, m, 'M', v)
#define __reduce_and_sync(m, v) emu_reduce(EMU_SITE, m, '&', v)
#define __reduce_or_sync(m, v) emu_reduce(EMU_SITE, m, '|', v)
#define __reduce_xor_sync(m, v) emu_reduce(EMU_SITE, m, '^', v)
#define __nanosleep(ns) emu::pause(EMU_SITE)
#define __trap() emu::fail("%s: __trap()", EMU_SITE)
static inline void __threadfence() { emu::fence(); }
static inline void __threadfence_system() { emu::fence(); }
static inline void __threadfence_block() {}
static inline size_t __cvta_generic_to_shared(const void *p) { return emu::shared_address(p); }
static inline void *__cvta_shared_to_generic(size_t a) { return emu::generic_address((uint32_t)a); }
static inline long long clock64() { return 0; }

// ---- device built-ins: memory. Cache hints change no result.
#define EMU_LOAD(name) template <class T> EMU_INLINE T name(const T *p) { return *p; }
EMU_LOAD(__ldg) EMU_LOAD(__ldca) EMU_LOAD(__ldcg) EMU_LOAD(__ldcs) EMU_LOAD(__ldlu) EMU_LOAD(__ldcv)
#define EMU_STORE(name) template <class T> EMU_INLINE void name(T *p, std::common_type_t<T> v) { *p = v; }
EMU_STORE(__stwb) EMU_STORE(__stcg) EMU_STORE(__stcs) EMU_STORE(__stwt)
namespace emu {
#ifdef EMU_TRACE // one thread at a time
template <class T, class F> EMU_INLINE T atomic(T *p, F f) { // the old value; new = f(old)
    access(p, sizeof(T), ATOMIC);
    T old, v;
    copy(&old, p, sizeof(T));
    v = f(old);
    copy(p, &v, sizeof(T));
    return old;
}
#else
template <int N> struct Word;
template <> struct Word<2> { typedef uint16_t type; };
template <> struct Word<4> { typedef uint32_t type; };
template <> struct Word<8> { typedef uint64_t type; };
template <class T, class F> EMU_INLINE T atomic(T *p, F f) {
    typedef typename Word<sizeof(T)>::type W;
    W before = __atomic_load_n((W *)p, __ATOMIC_RELAXED), after;
    T old, v;
    do {
        memcpy((void *)&old, &before, sizeof(T));
        v = f(old);
        memcpy(&after, &v, sizeof(T));
    } while (!__atomic_compare_exchange_n((W *)p, &before, after, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    return old;
}
#endif
} // namespace emu
#define EMU_ATOMIC(name, T, expression) \
    EMU_INLINE T name(T *p, T v) { return emu::atomic(p, [=](T x) -> T { return expression; }); }
#define EMU_ATOMIC_INTEGER(T) \
    EMU_ATOMIC(atomicAdd, T, x + v) EMU_ATOMIC(atomicSub, T, x - v) EMU_ATOMIC(atomicMin, T, v < x ? v : x) \
    EMU_ATOMIC(atomicMax, T, v > x ? v : x) EMU_ATOMIC(atomicAnd, T, x & v) EMU_ATOMIC(atomicOr, T, x | v) \
    EMU_ATOMIC(atomicXor, T, x ^ v) EMU_ATOMIC(atomicExch, T, ((void)x, v)) \
    EMU_INLINE T atomicCAS(T *p, T c, T v) { return emu::atomic(p, [=](T x) { return x == c ? v : x; }); }
EMU_ATOMIC_INTEGER(int) EMU_ATOMIC_INTEGER(unsigned) EMU_ATOMIC_INTEGER(unsigned long long)
EMU_ATOMIC(atomicAdd, float, x + v) EMU_ATOMIC(atomicAdd, double, x + v) EMU_ATOMIC(atomicExch, float, ((void)x, v))
EMU_ATOMIC(atomicInc, unsigned, x >= v ? 0 : x + 1) EMU_ATOMIC(atomicDec, unsigned, x == 0 || x > v ? v : x - 1)
EMU_INLINE float2 atomicAdd(float2 *p, float2 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)}; }

// ---- device built-ins: arithmetic
EMU_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// Macros, because the C library has declared functions of these names.
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanhf(x) tanhf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)
EMU_INLINE float __fdividef(float a, float b) { return a / b; }
EMU_INLINE float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; } // NaN becomes 0
EMU_INLINE float __frcp_rn(float a) { return 1.0f / a; }
EMU_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
EMU_INLINE float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
__attribute__((optimize("fp-contract=off"), noinline)) inline float __fmul_rn(float a, float b) { return a * b; }
__attribute__((optimize("fp-contract=off"), noinline)) inline float __fadd_rn(float a, float b) { return a + b; }
__attribute__((optimize("fp-contract=off"), noinline)) inline float __fsub_rn(float a, float b) { return a - b; }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE int __float2int_rn(float x) { return (int)rintf(x); }
EMU_INLINE int __float2int_rz(float x) { return (int)x; }
EMU_INLINE int __float2int_rd(float x) { return (int)floorf(x); }
EMU_INLINE unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
EMU_INLINE float __int2float_rn(int x) { return (float)x; }
EMU_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
template <class To, class From> EMU_INLINE To emu_bits(From v) { To r; memcpy((void *)&r, &v, sizeof r); return r; }
EMU_INLINE float __int_as_float(int x) { return emu_bits<float>(x); }
EMU_INLINE float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
EMU_INLINE int __float_as_int(float x) { return emu_bits<int>(x); }
EMU_INLINE unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
EMU_INLINE double __longlong_as_double(long long x) { return emu_bits<double>(x); }
EMU_INLINE long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
EMU_INLINE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
EMU_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
EMU_INLINE unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
EMU_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    unsigned long long v = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned n = s >> i * 4 & 15, byte = (unsigned)(v >> (n & 7) * 8) & 255;
        r |= (n & 8 ? (byte & 128 ? 255 : 0) : byte) << i * 8;
    }
    return r;
}
EMU_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) << (n & 31) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((unsigned long long)hi << 32 | lo) >> (n & 31));
}
#define EMU_MINMAX(R, A, B) \
    EMU_INLINE R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
    EMU_INLINE R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
#define EMU_MINMAX_INTEGER(S) \
    EMU_MINMAX(S, S, S) EMU_MINMAX(unsigned S, unsigned S, unsigned S) \
    EMU_MINMAX(unsigned S, S, unsigned S) EMU_MINMAX(unsigned S, unsigned S, S)
EMU_MINMAX_INTEGER(int) EMU_MINMAX_INTEGER(long) EMU_MINMAX_INTEGER(long long)
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }

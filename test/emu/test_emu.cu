// test_emu.cu - small kernels, one per feature that kernels.cu may use, and beside each a twin that is broken on
// purpose: the emulator must catch it. This file is real CUDA: nvcc compiles it as it is (and on a GPU the sound
// kernels run).
//
// Each case runs in a process of its own, because a broken kernel ends it, and with an environment of its own.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <string>
#include <vector>

#define CHECK(x) do { if (!(x)) { printf("line %d: %s is not so\n", __LINE__, #x); exit(1); } } while (0)
#define CUDA(x)                                                                                                        \
    do {                                                                                                               \
        cudaError_t e_ = (x);                                                                                          \
        if (e_) {                                                                                                      \
            printf("line %d: %s: %s\n", __LINE__, #x, cudaGetErrorString(e_));                                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

template <class T> struct Device { // an array in device memory
    T *p;
    size_t n;
    Device(size_t n) : n(n) { CUDA(cudaMalloc(&p, n * sizeof(T))); }
    Device(const std::vector<T> &v) : Device(v.size()) {
        CUDA(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Device() { cudaFree(p); }
    std::vector<T> get() {
        CUDA(cudaGetLastError());
        CUDA(cudaDeviceSynchronize());
        std::vector<T> v(n);
        CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};
static uint32_t seed = 1;
static float uniform() { return (float)((seed = seed * 1664525 + 1013904223) >> 8) / (1 << 23) - 1.0f; }
static std::vector<float> random_floats(size_t n) {
    std::vector<float> v(n);
    for (auto &x : v) x = uniform();
    return v;
}
static void no_nan(const std::vector<float> &v) {
    for (float x : v)
        if (x != x) { printf("NaN in the output\n"); exit(1); }
}

// ---- launches and indices
struct Pair { int a, b; };
template <class T, int N> struct Box { static __device__ T twice(T x) { return x * N; } };
template <class B> __global__ void indices(int *out, const int *null, Pair p) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    out[i] = null ? -1 : B::twice(i) + p.a - p.b;
}
static void test_launch() {
    Device<int> out(2 * 3 * 4 * 30);
    Pair p = {7, 2};
    indices<Box<int, 2>><<<dim3(2, 3, 4), dim3(5, 3, 2)>>>(out.p, NULL, p);
    auto v = out.get();
    for (int i = 0; i < (int)v.size(); i++) CHECK(v[i] == 2 * i + 5);
}
__global__ void __launch_bounds__(64) bounded(float *x) { x[threadIdx.x] = 1; }
__global__ void much_shared(float *x) {
    extern __shared__ float s[];
    s[threadIdx.x] = 1;
    x[threadIdx.x] = s[threadIdx.x];
}
static void test_launch_errors() {
    Device<float> x(1024);
    bounded<<<1, 0>>>(x.p);
    CHECK(cudaPeekAtLastError() == cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    bounded<<<1, 1025>>>(x.p);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    bounded<<<dim3(1, 65536), 1>>>(x.p);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
    bounded<<<1, 65>>>(x.p);
    CHECK(cudaGetLastError() != cudaSuccess);
    much_shared<<<1, 32, 49 * 1024>>>(x.p); // 48 KB unless asked for
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CUDA(cudaFuncSetAttribute(much_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 49 * 1024));
    much_shared<<<1, 32, 49 * 1024>>>(x.p);
    CUDA(cudaGetLastError());
    CHECK(cudaFuncSetAttribute(much_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 300 * 1024) ==
          cudaErrorInvalidValue);
    cudaGetLastError();
    int blocks = 0;
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, bounded, 64, 0));
    CHECK(blocks >= 1);
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, 0));
    CHECK(p.major >= 8 && p.warpSize == 32 && p.sharedMemPerBlockOptin > 48 * 1024);
}

// ---- warps
__global__ void warp_operations(int *out) {
    int lane = threadIdx.x % 32, v = lane * lane;
    int *o = out + threadIdx.x * 16;
    o[0] = __shfl_sync(0xffffffffu, v, 5);
    o[1] = __shfl_xor_sync(0xffffffffu, v, 9);
    o[2] = __shfl_up_sync(0xffffffffu, v, 3);
    o[3] = __shfl_down_sync(0xffffffffu, v, 3);
    o[4] = __shfl_sync(0xffffffffu, v, 5, 8);
    o[5] = __shfl_xor_sync(0xffffffffu, v, 3, 4);
    o[6] = __shfl_up_sync(0xffffffffu, v, 3, 8);
    o[7] = __shfl_down_sync(0xffffffffu, v, 3, 16);
    o[8] = (int)__ballot_sync(0xffffffffu, lane % 3 == 0);
    o[9] = __any_sync(0xffffffffu, lane == 31) * 2 + __all_sync(0xffffffffu, lane < 32);
    if (lane < 16) o[10] = __shfl_xor_sync(0x0000ffffu, v, 1); // the halves go their own ways
    else o[10] = __shfl_xor_sync(0xffff0000u, v, 2);
    o[11] = __reduce_add_sync(0xffffffffu, lane);
    o[12] = (int)__reduce_max_sync(0xffffffffu, (unsigned)v);
    o[13] = (int)__match_any_sync(0xffffffffu, lane % 4);
    __syncwarp();
    o[14] = (int)__float_as_uint(__shfl_xor_sync(0xffffffffu, (float)lane, 16));
    o[15] = (int)(__shfl_down_sync(0xffffffffu, (unsigned long long)lane << 33, 1) >> 33);
}
static void test_warp() {
    Device<int> out(64 * 16);
    warp_operations<<<1, 64>>>(out.p);
    auto v = out.get();
    auto sq = [](int x) { return x * x; };
    for (int t = 0; t < 64; t++) {
        int l = t % 32, *o = &v[t * 16];
        CHECK(o[0] == 25 && o[1] == sq(l ^ 9) && o[2] == sq(l < 3 ? l : l - 3) && o[3] == sq(l > 28 ? l : l + 3));
        CHECK(o[4] == sq(l / 8 * 8 + 5) && o[5] == sq(l ^ 3) && o[6] == sq(l % 8 < 3 ? l : l - 3));
        CHECK(o[7] == sq(l % 16 > 12 ? l : l + 3) && o[8] == 0x49249249 && o[9] == 3 &&
              o[10] == sq(l < 16 ? l ^ 1 : l ^ 2));
        CHECK(o[11] == 496 && o[12] == 961 && (unsigned)o[13] == 0x11111111u << l % 4);
        float f = (float)(l ^ 16);
        CHECK(!memcmp(&o[14], &f, 4) && o[15] == (l == 31 ? 31 : l + 1));
    }
}
__global__ void mask_without_caller(int *out) {
    if (threadIdx.x >= 16) out[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, (int)threadIdx.x, 1);
}
static void broken_mask() { Device<int> o(32); mask_without_caller<<<1, 32>>>(o.p); o.get(); }
__global__ void half_a_shuffle(int *out) { // the mask names lanes that never come
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1);
    else __syncthreads();
}
static void broken_shuffle() { Device<int> o(32); half_a_shuffle<<<1, 32>>>(o.p); o.get(); }

// ---- blocks: barriers and shared memory
template <int N> __global__ void reverse(float *x) {
    __shared__ float s[N], *unused;
    extern __shared__ __align__(16) float4 dynamic[];
    s[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x == 0) dynamic[0] = make_float4(1, 2, 3, 4);
    __syncthreads();
    (void)unused;
    x[threadIdx.x] = s[N - 1 - threadIdx.x] + dynamic[0].w;
}
__global__ void predicates(int *out) {
    int t = threadIdx.x;
    int n = __syncthreads_count(t % 3 == 0), a = __syncthreads_and(t < 100), o = __syncthreads_or(t == 77);
    out[t] = n * 4 + (a != 0) * 2 + (o != 0);
}
__device__ __forceinline__ void named_sync(int id, int n) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int n) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
__global__ void producer_consumer(int *out) { // warps 0, 1 fill a buffer, warps 2, 3 empty it
    __shared__ int buffer[64];
    int t = threadIdx.x % 64, sum = 0;
    if (threadIdx.x < 64)
        for (int i = 0; i < 4; i++) {
            if (i) named_sync(2, 128); // empty
            buffer[t] = t * 10 + i;
            named_arrive(1, 128); // full
        }
    else {
        for (int i = 0; i < 4; i++) {
            named_sync(1, 128);
            sum += buffer[63 - t];
            if (i < 3) named_arrive(2, 128);
        }
        out[t] = sum;
    }
}
static void test_block() {
    std::vector<float> h(96);
    for (int i = 0; i < 96; i++) h[i] = (float)i;
    Device<float> x(h);
    reverse<96><<<1, 96, 64>>>(x.p);
    auto v = x.get();
    for (int i = 0; i < 96; i++) CHECK(v[i] == 95 - i + 4);
    Device<int> o(100);
    predicates<<<1, 100>>>(o.p);
    for (int r : o.get()) CHECK(r == 34 * 4 + 3);
    Device<int> q(64);
    producer_consumer<<<1, 128>>>(q.p);
    auto w = q.get();
    for (int t = 0; t < 64; t++) CHECK(w[t] == (63 - t) * 40 + 6);
}
__global__ void missing_barrier(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
static void broken_missing_barrier() {
    Device<float> x(random_floats(64));
    missing_barrier<<<1, 64>>>(x.p);
    no_nan(x.get());
}
__global__ void missing_second_barrier(float *x) { // a fast warp overwrites what a slow one still reads
    __shared__ float s[64];
    float v = x[threadIdx.x];
    for (int i = 0; i < 3; i++) {
        s[threadIdx.x] = v;
        __syncthreads();
        v += s[(threadIdx.x + 33) % 64];
    }
    x[threadIdx.x] = v;
}
static void broken_second_barrier() {
    Device<float> x(random_floats(64));
    missing_second_barrier<<<1, 64>>>(x.p);
    no_nan(x.get());
}
__global__ void divergent_barrier(float *x) {
    if (threadIdx.x < 32) __syncthreads();
    else { x[threadIdx.x] = 1; __syncthreads(); }
}
static void broken_divergent_barrier() { Device<float> x(64); divergent_barrier<<<1, 64>>>(x.p); x.get(); }
__global__ void endless(float *x) {
    if (threadIdx.x < 32) named_sync(1, 64);
    else named_sync(2, 64);
    x[threadIdx.x] = 1;
}
static void broken_deadlock() { Device<float> x(64); endless<<<1, 64>>>(x.p); x.get(); }
__global__ void shared_past_end(float *x, int n) {
    __shared__ float s[64];
    for (int i = threadIdx.x; i <= n; i += 32) s[i] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}
static void broken_shared() { Device<float> x(32); shared_past_end<<<1, 32>>>(x.p, 64); x.get(); }
__global__ void dynamic_past_end(float *x, int n) {
    extern __shared__ float s[];
    for (int i = threadIdx.x; i <= n; i += 32) s[i] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}
static void broken_dynamic() { Device<float> x(32); dynamic_past_end<<<1, 32, 64 * 4>>>(x.p, 64); x.get(); }
__global__ void uninitialised(float *x) {
    __shared__ float s[64];
    if (threadIdx.x < 63) s[threadIdx.x] = 0;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}
static void broken_uninitialised() { Device<float> x(64); uninitialised<<<1, 64>>>(x.p); no_nan(x.get()); }

// ---- global memory
__device__ int device_counter = 3;
__constant__ float device_table[4] = {1, 2, 4, 8};
__global__ void atomics(int *i, unsigned *u, float *f, __nv_bfloat162 *b) {
    atomicAdd(&i[0], 2);
    atomicMax(&i[1], (int)threadIdx.x);
    atomicMin(&i[2], (int)threadIdx.x);
    atomicInc(&u[0], 9);
    atomicExch(&u[1], 5u);
    atomicCAS(&u[2], 0u, 1u);
    atomicAdd(f, 0.5f);
    atomicAdd(b, __floats2bfloat162_rn(1, 2));
    if (threadIdx.x == 0 && blockIdx.x == 0) device_counter += (int)device_table[3];
}
static void test_global() {
    Device<int> i(std::vector<int>{0, -1, 1000});
    Device<unsigned> u(std::vector<unsigned>{0, 0, 0});
    Device<float> f(std::vector<float>{0});
    Device<__nv_bfloat162> b(1);
    CUDA(cudaMemset(b.p, 0, 4));
    atomics<<<2, 32>>>(i.p, u.p, f.p, b.p);
    auto vi = i.get();
    auto vu = u.get();
    CHECK(vi[0] == 128 && vi[1] == 31 && vi[2] == 0 && vu[0] == 4 && vu[1] == 5 && vu[2] == 1);
    CHECK(f.get()[0] == 32);
    float2 s = __bfloat1622float2(b.get()[0]);
    CHECK(s.x == 64 && s.y == 128);
    int counter, value = 40;
    CUDA(cudaMemcpyFromSymbol(&counter, device_counter, sizeof counter));
    CHECK(counter == 11);
    CUDA(cudaMemcpyToSymbol(device_counter, &value, sizeof value));
    atomics<<<1, 32>>>(i.p, u.p, f.p, b.p);
    CUDA(cudaMemcpyFromSymbol(&counter, device_counter, sizeof counter));
    CHECK(counter == 48);
}
__global__ void past_end(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) x[i] = 1;
}
static void broken_global() { Device<float> x(100); past_end<<<1, 128>>>(x.p, 100); x.get(); }
__global__ void misaligned(float *x) { *(float4 *)(x + threadIdx.x) = make_float4(1, 2, 3, 4); }
static void broken_misaligned() { Device<float> x(100); misaligned<<<1, 32>>>(x.p); x.get(); }
__global__ void add_without_atomic(float *x) { x[0] += 1; }
static void broken_block_race() { Device<float> x(random_floats(1)); add_without_atomic<<<4, 1>>>(x.p); x.get(); }
static void test_memory() {
    void *p = NULL;
    size_t free, total;
    CUDA(cudaMemGetInfo(&free, &total));
    CHECK(cudaMalloc(&p, total + 1) == cudaErrorMemoryAllocation && cudaGetLastError() == cudaErrorMemoryAllocation);
    CUDA(cudaMalloc(&p, 1000));
    float h[250];
    CHECK(cudaMemcpy(h, p, 1000, cudaMemcpyDefault) == cudaSuccess && h[249] == h[249] + 0 ? 1 : isnan(h[249]));
    CUDA(cudaFree(p));
    CUDA(cudaFree(NULL));
    CHECK(cudaMemcpy(NULL, h, 1000, cudaMemcpyHostToDevice) != cudaSuccess);
    cudaGetLastError();
}
static void test_budget() { // EMU_MEMORY=100000
    void *a, *b, *c;
    CUDA(cudaMalloc(&a, 40000));
    CUDA(cudaMalloc(&b, 40000));
    CHECK(cudaMalloc(&c, 40000) == cudaErrorMemoryAllocation && !c);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    CUDA(cudaFree(a));
    CUDA(cudaMalloc(&c, 40000));
    CUDA(cudaFree(b));
    CUDA(cudaFree(c));
}
static void broken_host_access() {
    Device<float> x(random_floats(10));
    printf("%g\n", *(volatile float *)x.p);
}

// ---- order between blocks, and within a warp
template <bool FENCE, bool SYNC>
__global__ void last_block_sums(float *out, float *partial, unsigned *count, const float *x) {
    __shared__ bool last;
    __shared__ float s[64];
    s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (int i = 0; i < 64; i++) sum += s[i];
        partial[blockIdx.x] = sum;
        if (FENCE) __threadfence();
        last = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
    }
    if (SYNC) __syncthreads();
    else __syncwarp();
    if (threadIdx.x == 32 * !SYNC && last) {
        float sum = 0;
        for (unsigned i = 0; i < gridDim.x; i++) sum += partial[i];
        *out = sum;
    }
}
template <bool FENCE, bool SYNC> static void last_block_case() {
    Device<float> x(std::vector<float>(64 * 8, 0.5f)), out(1), partial(8);
    Device<unsigned> count(std::vector<unsigned>{0});
    last_block_sums<FENCE, SYNC><<<8, 64>>>(out.p, partial.p, count.p, x.p);
    float sum = out.get()[0];
    CHECK(sum == 256 || !SYNC);
}
static void test_last_block() { last_block_case<true, true>(); }
static void broken_fence() { last_block_case<false, true>(); }
static void broken_last_block() { last_block_case<true, false>(); }
template <bool SYNC> __global__ void lanes_exchange(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    if (SYNC) __syncwarp();
    x[threadIdx.x] = s[threadIdx.x ^ 1];
}
static void test_syncwarp() {
    Device<float> x(random_floats(64));
    lanes_exchange<true><<<1, 64>>>(x.p);
    no_nan(x.get());
}
static void broken_syncwarp() {
    Device<float> x(random_floats(64));
    lanes_exchange<false><<<1, 64>>>(x.p);
    x.get();
}
static void broken_host_pointer() {
    std::vector<float> h(64);
    lanes_exchange<true><<<1, 64>>>(h.data());
}

// ---- types
__global__ void half_types(uint16_t *out, const float *in) {
    for (int i = threadIdx.x; i < 65536; i += blockDim.x) { // every value survives the way to float and back
        __nv_bfloat16 b = __ushort_as_bfloat16((unsigned short)i);
        __half h = __ushort_as_half((unsigned short)i);
        out[i] = __bfloat16_as_ushort(__float2bfloat16(__bfloat162float(b)));
        out[65536 + i] = __half_as_ushort(__float2half(__half2float(h)));
    }
    if (threadIdx.x == 0)
        for (int i = 0; i < 8; i++) {
            out[131072 + i] = __bfloat16_as_ushort(__float2bfloat16(in[i]));
            out[131080 + i] = __half_as_ushort(__float2half(in[i]));
        }
}
static void test_types() {
    // ties go to even; a value just above half the smallest subnormal; overflow to infinity; NaN
    Device<float> in(std::vector<float>{1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f, 3.1e-8f, 65519.9f,
                                        65520.0f, -2.5f});
    Device<uint16_t> out(131088);
    half_types<<<1, 256>>>(out.p, in.p);
    auto v = out.get();
    for (int i = 0; i < 65536; i++) {
        if ((i & 0x7fff) <= 0x7f80) CHECK(v[i] == i);
        if ((i & 0x7fff) <= 0x7c00) CHECK(v[65536 + i] == i);
    }
    CHECK(v[131072] == 0x3f80 && v[131073] == 0x3f82 && v[131079] == 0xc020);
    CHECK(v[131082] == 0x3c00 && v[131083] == 0x3c02 && v[131084] == 1 && v[131085] == 0x7bff && v[131086] == 0x7c00);
}

// ---- tensor cores: C = A B^T for one 16 x 8 x k tile, operands through shared memory
template <bool TRANS> __device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], const void *p) {
    uint32_t a = (uint32_t)__cvta_generic_to_shared(p);
    if (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(a));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(a));
}
__device__ __forceinline__ void ldmatrix2(uint32_t (&r)[2], const void *p) {
    uint32_t a = (uint32_t)__cvta_generic_to_shared(p);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a));
}
#define F4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define R4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
template <class T>
__device__ __forceinline__ void mma16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if (sizeof(T) == 2 && T(1.0f) == T(1.0f) && (float)T(65504.0f) == 65504.0f) // fp16
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : F4(d)
            : R4(a), "r"(b[0]), "r"(b[1]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : F4(d)
            : R4(a), "r"(b[0]), "r"(b[1]));
}
template <class T, bool TRANS>
__global__ void mma_tile(float *C, const T *A, const T *B) { // A 16x16 (TRANS: stored k x m), B 8x16
    __shared__ __align__(16) T a[16][24], b[8][24];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) a[i / 16][i % 16] = A[i];
    for (int i = lane; i < 128; i += 32) b[i / 16][i % 16] = B[i];
    __syncwarp();
    uint32_t ra[4], rb[2];
    int m = lane / 8, r = lane % 8; // which matrix, which row of it
    if (TRANS) ldmatrix4<true>(ra, &a[r + m / 2 * 8][m % 2 * 8]);
    else ldmatrix4<false>(ra, &a[r + m % 2 * 8][m / 2 * 8]);
    ldmatrix2(rb, &b[r][m % 2 * 8]);
    float d[4] = {0, 0, 0, 0};
    mma16816<T>(d, ra, rb);
    for (int i = 0; i < 4; i++) C[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
template <class T, bool TRANS> static void check_mma() {
    std::vector<T> a(256), b(128);
    for (auto &x : a) x = T(uniform());
    for (auto &x : b) x = T(uniform());
    Device<T> A(a), B(b);
    Device<float> C(128);
    mma_tile<T, TRANS><<<1, 32>>>(C.p, A.p, B.p);
    auto c = C.get();
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            double s = 0;
            for (int k = 0; k < 16; k++) s += (double)(float)a[TRANS ? k * 16 + m : m * 16 + k] * (float)b[n * 16 + k];
            CHECK(fabs(c[m * 8 + n] - s) < 16 * 6e-8 * 16); // 16 terms below 1, each sum rounded to fp32
        }
}
__global__ void mma_tf32(float *C, const float *A, const float *B) { // one 16 x 8 x 8 tile; A 16x8, B 8x8 (n, k)
    int g = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = __float_as_uint(A[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    for (int i = 0; i < 2; i++) b[i] = __float_as_uint(B[g * 8 + t + i * 4]);
    float d[4] = {1, 1, 1, 1};
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : F4(d)
        : R4(a), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 4; i++) C[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
}
static void test_mma() {
    check_mma<__nv_bfloat16, false>();
    check_mma<__nv_bfloat16, true>();
    check_mma<__half, false>();
    std::vector<float> a(128), b(64);
    for (int i = 0; i < 128; i++) a[i] = (float)(i % 13 - 6); // small integers are exact in tf32
    for (int i = 0; i < 64; i++) b[i] = (float)(i % 7 - 3);
    Device<float> A(a), B(b), C(128);
    mma_tf32<<<1, 32>>>(C.p, A.p, B.p);
    auto c = C.get();
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            float s = 1;
            for (int k = 0; k < 8; k++) s += a[m * 8 + k] * b[n * 8 + k];
            CHECK(c[m * 8 + n] == s);
        }
}
__global__ void unknown_instruction(float *x) { asm volatile("fma.rn.f32 %0, %0, %0, %0;" : "+f"(x[0])); }
static void broken_ptx() { Device<float> x(random_floats(1)); unknown_instruction<<<1, 1>>>(x.p); x.get(); }
__global__ void mma_in_half_a_warp(float *x) {
    if (threadIdx.x < 16) {
        float d[4] = {0, 0, 0, 0};
        uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
        mma16816<__nv_bfloat16>(d, a, b);
        x[threadIdx.x] = d[0];
    } else __syncthreads();
}
static void broken_mma() { Device<float> x(32); mma_in_half_a_warp<<<1, 32>>>(x.p); x.get(); }

// ---- cp.async
template <int BYTES> __device__ __forceinline__ void copy_async(void *to, const void *from, int given = BYTES) {
    uint32_t a = (uint32_t)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(a), "l"(from), "n"(BYTES), "r"(given)
                 : "memory");
}
template <int WAIT> __global__ void double_buffer(float *out, const float *in, int tiles) { // out = sum of the tiles
    __shared__ __align__(16) float s[2][128];
    int t = threadIdx.x;
    float sum = 0;
    copy_async<16>(&s[0][t * 4], in + t * 4);
    asm volatile("cp.async.commit_group;");
    for (int i = 0; i < tiles; i++) {
        if (i + 1 < tiles) copy_async<16>(&s[(i + 1) % 2][t * 4], in + (i + 1) * 128 + t * 4);
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group %0;" ::"n"(WAIT));
        __syncthreads();
        for (int j = 0; j < 4; j++) sum += s[i % 2][127 - t * 4 - j];
        __syncthreads();
    }
    out[t] = sum;
}
__global__ void zero_fill(float *out, const float *in) {
    __shared__ __align__(16) float s[32 * 4 + 64 + 32];
    int t = threadIdx.x;
    copy_async<16>(s + t * 4, in + t * 4, t % 5 * 4 > 16 ? 16 : t % 5 * 4);
    copy_async<8>(s + 128 + t * 2, in + t * 2, t % 2 * 8);
    copy_async<4>(s + 192 + t, in + t, 4);
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    for (int i = t; i < 224; i += 32) out[i] = s[i];
}
template <int WAIT> static void double_buffer_case() {
    auto h = random_floats(128 * 5);
    Device<float> in(h), out(32);
    double_buffer<WAIT><<<1, 32>>>(out.p, in.p, 5);
    auto v = out.get();
    no_nan(v);
    for (int t = 0; t < 32; t++) {
        float sum = 0;
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 4; j++) sum += h[i * 128 + 127 - t * 4 - j];
        CHECK(v[t] == sum);
    }
}
static void test_cp_async() {
    double_buffer_case<1>();
    auto h = random_floats(128);
    Device<float> in(h), out(224);
    zero_fill<<<1, 32>>>(out.p, in.p);
    auto v = out.get();
    for (int t = 0; t < 32; t++) {
        for (int j = 0; j < 4; j++) CHECK(v[t * 4 + j] == (j < t % 5 ? h[t * 4 + j] : 0));
        for (int j = 0; j < 2; j++) CHECK(v[128 + t * 2 + j] == (t % 2 ? h[t * 2 + j] : 0));
        CHECK(v[192 + t] == h[t]);
    }
}
static void broken_cp_wait() { double_buffer_case<2>(); }
__global__ void copies_of_others(float *out, const float *in) { // a thread waits for its own copies, not for others'
    __shared__ __align__(16) float s[256];
    copy_async<16>(s + threadIdx.x * 4, in + threadIdx.x * 4);
    asm volatile("cp.async.wait_all;");
    out[threadIdx.x] = s[255 - threadIdx.x];
}
static void broken_cp_barrier() {
    Device<float> in(random_floats(256)), out(64);
    copies_of_others<<<1, 64>>>(out.p, in.p);
    no_nan(out.get());
}

// ---- Hopper: mbarriers, TMA, wgmma. Compiled for sm_90a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define HOPPER 1
#endif
#ifdef HOPPER
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(uint64_t *b, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t *b, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t *b, int parity) {
    asm volatile("{\n.reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
                 ::"r"(shared_address(b)), "r"(parity) : "memory");
}
__device__ __forceinline__ void tma_load(void *to, const CUtensorMap *map, uint64_t *b, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
                 "%4}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(b)), "r"(x), "r"(y)
                 : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap *map, const void *from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(map), "r"(shared_address(from)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D32(d) D4(d, 0), D4(d, 4), D4(d, 8), D4(d, 12), D4(d, 16), D4(d, 20), D4(d, 24), D4(d, 28)
#define NAMES32                                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%" \
    "30,%31}"
template <int TA, int TB> __device__ __forceinline__ void wgmma64(float (&d)[32], uint64_t a, uint64_t b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
        ", %32, %33, p, 1, 1, %35, %36;\n}"
        : D32(d)
        : "l"(a), "l"(b), "r"(keep), "n"(TA), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void wgmma64_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int keep) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
        ", {%32,%33,%34,%35}, %36, p, 1, -1, %38;\n}"
        : D32(d)
        : R4(a), "l"(b), "r"(keep), "n"(TB)); // D -= A B
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(uint32_t a, int leading, int stride,
                                               int swizzle) { // bytes; swizzle 0 32 64 128
    uint64_t mode = swizzle == 128 ? 1 : swizzle == 64 ? 2 : swizzle == 32 ? 3 : 0;
    return (uint64_t)((a & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | mode << 62;
}
__device__ __forceinline__ uint32_t
swizzle_address(uint32_t a, int width) { // the pattern, said another way than the emulator says it
    uint32_t row = a / 128 % 8, chunk = a / 16 % 8,
             x = width == 128  ? row
                 : width == 64 ? row / 2 * 2 / 2
                 : width == 32 ? row / 4
                               : 0;
    if (width == 64) x = row % 4;
    if (width == 32) x = row % 2;
    return a / 128 * 128 + (chunk ^ x) * 16 + a % 16;
}
#endif
// A box of W / 2 columns and 16 rows goes to shared memory, is read there, doubled, and goes back. W: bytes of a row,
// the swizzle.
enum Fault { NONE, NO_WAIT, NO_PROXY_FENCE, NO_READ_WAIT, WRONG_BYTES, NO_INIT_SYNC };
template <int W, int FAULT>
__global__ void tma_round_trip(float *seen, const __grid_constant__ CUtensorMap in,
                               const __grid_constant__ CUtensorMap out, int x, int y) {
#ifdef HOPPER
    __shared__ __align__(1024) char tile[16 * W];
    __shared__ __align__(8) uint64_t full;
    if (threadIdx.x == 0) barrier_init(&full, 1);
    if (FAULT != NO_INIT_SYNC) __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(&full, FAULT == WRONG_BYTES ? 16 * W + 16 : 16 * W);
        tma_load(tile, &in, &full, x, y);
    }
    if (FAULT != NO_WAIT || threadIdx.x == 0) barrier_wait(&full, 0);
    for (int i = threadIdx.x; i < 16 * W / 2; i += blockDim.x) {
        __nv_bfloat16 *e = (__nv_bfloat16 *)(tile + swizzle_address(i * 2, W));
        seen[i] = __bfloat162float(*e);
        *e = __float2bfloat16(2 * seen[i]);
    }
    if (FAULT != NO_PROXY_FENCE) proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(&out, tile, x, y);
        bulk_commit();
        if (FAULT != NO_READ_WAIT) bulk_wait_read<0>();
    }
#endif
}
static CUtensorMap tensor_map(void *p, int columns, int rows, int pitch, int box_columns, int box_rows, int swizzle) {
    CUtensorMap m;
    cuuint64_t dims[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)pitch * 2};
    cuuint32_t box[2] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows}, ones[2] = {1, 1};
    CUtensorMapSwizzle s = swizzle == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_NONE;
    void *f = NULL;
    cudaDriverEntryPointQueryResult found;
    CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    auto encode = (CUresult(*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                               const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill))f;
    CHECK(encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, s,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
    return m;
}
static bool hopper() { // is there one?
    cudaDeviceProp p;
    CUDA(cudaGetDeviceProperties(&p, 0));
    return p.major == 9;
}
template <int W, int FAULT> static void round_trip(int x, int y) {
    int columns = 90, rows = 40, pitch = 96;
    std::vector<__nv_bfloat16> h(rows * pitch);
    for (int i = 0; i < rows * pitch; i++) h[i] = __float2bfloat16((float)(i % 251 - 125));
    Device<__nv_bfloat16> in(h), out(h);
    Device<float> seen(8 * W);
    tma_round_trip<W, FAULT><<<1, 128>>>(seen.p, tensor_map(in.p, columns, rows, pitch, W / 2, 16, W == 16 ? 0 : W),
                                         tensor_map(out.p, columns, rows, pitch, W / 2, 16, W == 16 ? 0 : W), x, y);
    auto v = seen.get();
    auto o = out.get();
    no_nan(v);
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < W / 2; c++) { // what sticks out reads as zero, and is not written
            bool inside = x + c >= 0 && x + c < columns && y + r >= 0 && y + r < rows;
            CHECK(v[r * (W / 2) + c] == (inside ? (float)h[(y + r) * pitch + x + c] : 0));
            if (inside) CHECK((float)o[(y + r) * pitch + x + c] == 2 * (float)h[(y + r) * pitch + x + c]);
        }
    for (int i = 0; i < rows * pitch; i++) {
        int r = i / pitch, c = i % pitch;
        if (r < y || r >= y + 16 || c < x || c >= x + W / 2 || c >= columns) CHECK((float)o[i] == (float)h[i]);
    }
}
static void test_tma() {
    if (!hopper()) return;
    round_trip<128, NONE>(16, 8);
    round_trip<128, NONE>(45, 33); // ragged at both ends
    round_trip<64, NONE>(-8, -4);
    round_trip<32, NONE>(80, 0);
    round_trip<16, NONE>(0, 0); // no swizzle
}

// One 64 x 64 x 64 product by one warpgroup. T: the operand lies MN-major in memory (A: k x m, B: k x n). W: the
// swizzle.
enum Wgmma { SOUND, NO_FENCE, NO_WGMMA_WAIT, TOUCHED, THREE_WARPS };
template <int TA, int TB, int W, int FAULT> __global__ void __launch_bounds__(128)
wgmma_tile(float *C, const __grid_constant__ CUtensorMap mapA, const __grid_constant__ CUtensorMap mapB) {
#ifdef HOPPER
    __shared__ __align__(1024) char a[64 * 128], b[64 * 128];
    __shared__ __align__(8) uint64_t full;
    const int panels = 128 / W, bytes = 64 * W; // boxes of W bytes and 64 rows
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    if (t == 0) barrier_init(&full, 1);
    __syncthreads();
    if (t == 0) {
        barrier_expect(&full, 2 * 64 * 128);
        for (int i = 0; i < panels; i++) {
            tma_load(a + i * bytes, &mapA, &full, i * W / 2, 0);
            tma_load(b + i * bytes, &mapB, &full, i * W / 2, 0);
        }
    }
    barrier_wait(&full, 0);
    float d[32];
    if (FAULT != NO_FENCE) wgmma_fence();
    if (FAULT == THREE_WARPS && warp == 3) return;
    for (int k = 0; k < 64; k += 16) { // K-major: k * 2 bytes into the rows; MN-major: k rows down
        uint32_t at = k * 2 / W * bytes + k * 2 % W;
        uint64_t da = descriptor(shared_address(a) + (TA ? k * W : at), TA ? bytes : 16, 8 * W, W);
        uint64_t db = descriptor(shared_address(b) + (TB ? k * W : at), TB ? bytes : 16, 8 * W, W);
        wgmma64<TA, TB>(d, da, db, k > 0);
    }
    wgmma_commit();
    if (FAULT == TOUCHED) d[0] = 1;
    if (FAULT != NO_WGMMA_WAIT) wgmma_wait<0>();
    for (int j = 0; j < 32; j++)
        C[(warp * 16 + lane / 4 + j / 2 % 2 * 8) * 64 + j / 4 * 8 + lane % 4 * 2 + j % 2] = d[j];
    if (FAULT == NO_WGMMA_WAIT) wgmma_wait<0>();
#endif
}
template <int TA, int TB, int W, int FAULT> static void wgmma_case() {
    std::vector<__nv_bfloat16> a(64 * 64), b(64 * 64);
    for (auto &x : a) x = __float2bfloat16(uniform());
    for (auto &x : b) x = __float2bfloat16(uniform());
    Device<__nv_bfloat16> A(a), B(b);
    Device<float> C(64 * 64);
    wgmma_tile<TA, TB, W, FAULT>
        <<<1, 128>>>(C.p, tensor_map(A.p, 64, 64, 64, W / 2, 64, W), tensor_map(B.p, 64, 64, 64, W / 2, 64, W));
    auto c = C.get();
    no_nan(c);
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < 64; n++) {
            double s = 0;
            for (int k = 0; k < 64; k++)
                s += (double)(float)a[TA ? k * 64 + m : m * 64 + k] * (float)b[TB ? k * 64 + n : n * 64 + k];
            CHECK(fabs(c[m * 64 + n] - s) < 64 * 64 * 6e-8); // 64 terms below 1, each sum rounded to fp32
        }
}
// A from registers, B without swizzle: core matrices of 8 rows of 16 bytes, written with ordinary stores.
template <bool FENCE>
__global__ void __launch_bounds__(128) wgmma_registers(float *C, const __nv_bfloat16 *A, const __nv_bfloat16 *B) {
#ifdef HOPPER
    __shared__ __align__(128) __nv_bfloat16 b[64 * 16];
    int t = threadIdx.x, warp = t / 32, g = t % 32 / 4, c = t % 4;
    for (int i = t; i < 64 * 16;
         i += 128) { // element (n, k): core (n / 8, k / 8), cores of one k / 8 lie one after another
        int n = i / 16, k = i % 16;
        b[k / 8 * 512 + n / 8 * 64 + n % 8 * 8 + k % 8] = B[i];
    }
    if (FENCE) proxy_fence();
    __syncthreads();
    uint32_t a[4];
    for (int i = 0; i < 4; i++) a[i] = *(const uint32_t *)(A + (warp * 16 + g + i % 2 * 8) * 16 + c * 2 + i / 2 * 8);
    float d[32];
    for (int j = 0; j < 32; j++) d[j] = (float)j;
    wgmma_fence();
    wgmma64_registers<0>(d, a, descriptor(shared_address(b), 1024, 128, 0), 1);
    wgmma_commit();
    wgmma_wait<0>();
    for (int j = 0; j < 32; j++) C[(warp * 16 + g + j / 2 % 2 * 8) * 64 + j / 4 * 8 + c * 2 + j % 2] = d[j];
#endif
}
template <bool FENCE> static void wgmma_registers_case() {
    std::vector<__nv_bfloat16> a(64 * 16), b(64 * 16);
    for (auto &x : a) x = __float2bfloat16(uniform());
    for (auto &x : b) x = __float2bfloat16(uniform());
    Device<__nv_bfloat16> A(a), B(b);
    Device<float> C(64 * 64);
    wgmma_registers<FENCE><<<1, 128>>>(C.p, A.p, B.p);
    auto c = C.get();
    for (int m = 0; m < 64; m++)
        for (int n = 0; n < 64; n++) {
            double s = n / 8 * 4 + m / 8 % 2 * 2 + n % 2; // what d[j] began with
            for (int k = 0; k < 16; k++) s -= (double)(float)a[m * 16 + k] * (float)b[n * 16 + k];
            CHECK(fabs(c[m * 64 + n] - s) < 16 * 40 * 6e-8);
        }
}
static void test_wgmma() {
    if (!hopper()) return;
    wgmma_case<0, 0, 128, SOUND>();
    wgmma_case<1, 0, 128, SOUND>();
    wgmma_case<0, 1, 128, SOUND>();
    wgmma_case<1, 1, 128, SOUND>();
    wgmma_case<0, 0, 64, SOUND>();
    wgmma_case<1, 1, 64, SOUND>();
    wgmma_case<0, 1, 32, SOUND>();
    wgmma_case<1, 0, 32, SOUND>();
    wgmma_registers_case<true>();
}
// A ring of two buffers: warp 0 fetches tiles, warps 1 to 4 add them up.
template <bool LATE> __global__ void ring(float *out, const __grid_constant__ CUtensorMap map, int tiles) {
#ifdef HOPPER
    __shared__ __align__(128) __nv_bfloat16 s[2][8 * 64];
    __shared__ __align__(8) uint64_t full[2], empty[2];
    int t = threadIdx.x;
    if (t == 0)
        for (int i = 0; i < 2; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 128);
    __syncthreads();
    if (t < 32) {
        if (t == 0)
            for (int i = 0; i < tiles; i++) {
                barrier_wait(&empty[i % 2], i / 2 % 2 ^ 1);
                barrier_expect(&full[i % 2], sizeof s[0]);
                tma_load(s[i % 2], &map, &full[i % 2], 0, i * 8);
            }
        return;
    }
    float sum = 0;
    for (int i = 0; i < tiles; i++) {
        barrier_wait(&full[i % 2], i / 2 % 2);
        if (!LATE) barrier_arrive(&empty[i % 2]); // before it has read
        for (int j = 0; j < 4; j++) sum += __bfloat162float(s[i % 2][j * 128 + (t + 40) % 128]);
        if (LATE) barrier_arrive(&empty[i % 2]);
    }
    out[t - 32] = sum;
#endif
}
template <bool LATE> static void ring_case() {
    std::vector<__nv_bfloat16> h(64 * 64);
    for (int i = 0; i < 64 * 64; i++) h[i] = __float2bfloat16((float)(i / 512 + i % 8));
    Device<__nv_bfloat16> in(h);
    Device<float> out(128);
    ring<LATE><<<1, 160>>>(out.p, tensor_map(in.p, 64, 64, 64, 64, 8, 0), 8);
    auto v = out.get();
    for (int t = 0; t < 128; t++) CHECK(v[t] == 4 * (28 + 8 * (t % 8)));
}
static void test_ring() {
    if (hopper()) ring_case<true>();
}
static void broken_ring() { ring_case<false>(); }
static void broken_mbarrier_wait() { round_trip<128, NO_WAIT>(16, 8); }
static void broken_proxy_fence() { round_trip<128, NO_PROXY_FENCE>(16, 8); }
static void broken_read_wait() { round_trip<128, NO_READ_WAIT>(16, 8); }
static void broken_bytes() { round_trip<128, WRONG_BYTES>(16, 8); }
static void broken_init() { round_trip<128, NO_INIT_SYNC>(16, 8); }
static void broken_wgmma_fence() { wgmma_case<0, 0, 128, NO_FENCE>(); }
static void broken_wgmma_wait() { wgmma_case<0, 0, 128, NO_WGMMA_WAIT>(); }
static void broken_wgmma_touched() { wgmma_case<0, 0, 128, TOUCHED>(); }
static void broken_wgmma_warps() { wgmma_case<0, 0, 128, THREE_WARPS>(); }
static void broken_wgmma_proxy() { wgmma_registers_case<false>(); }

// ---- counters
#ifdef EMU
__global__ void strided_copy(float *d, const float *s, int stride) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * stride;
    d[i] = s[i];
}
__global__ void vector_copy(float4 *d, const float4 *s) { d[threadIdx.x] = s[threadIdx.x]; }
template <int PAD> __global__ void transpose(float *d, const float *s) {
    __shared__ float t[32][32 + PAD];
    t[threadIdx.y][threadIdx.x] = s[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    d[threadIdx.y * 32 + threadIdx.x] = t[threadIdx.x][threadIdx.y];
}
__global__ void odd_and_even(float *d) {
    if (threadIdx.x & 1) d[threadIdx.x] = 1;
    else d[threadIdx.x] = 2;
}
__global__ void polynomial(float *d, const float *s, int n) { // 2 n operations a thread, and nothing else on floats
    float x = s[threadIdx.x], y = 0;
    for (int i = 0; i < n; i++) y = y * x + 1.0f;
    d[threadIdx.x] = y;
}
static const EmuLine *line_of(const char *kernel, char space, char kind) {
    const EmuCount *c = emu_counts(kernel);
    CHECK(c);
    for (int i = 0; i < c->nlines; i++)
        if (c->lines[i].space == space && c->lines[i].kind == kind) return &c->lines[i];
    CHECK(!"no such line");
    return NULL;
}
static void test_counters() {
    auto h = random_floats(4096);
    Device<float> s(h), d(4096);
    emu_count(true);
    strided_copy<<<2, 64>>>(d.p, s.p, 1);
    const EmuLine *l = line_of("strided_copy", 'g', 'r');
    CHECK(l->requests == 4 && l->lanes == 128 && l->sectors == 16 && l->ideal == 16 && l->bytes == 4);
    CHECK(strstr(l->file, "test_emu.cu") && l->line == l->outer);
    CHECK(emu_counts("strided_copy")->needed == 1024 && emu_counts("strided_copy")->read == 512);
    emu_count(true);
    strided_copy<<<1, 64>>>(d.p, s.p, 32); // every lane a sector of its own
    CHECK(line_of("strided_copy", 'g', 'r')->sectors == 64 && line_of("strided_copy", 'g', 'w')->ideal == 8);
    vector_copy<<<1, 32>>>((float4 *)d.p, (const float4 *)s.p);
    l = line_of("vector_copy", 'g', 'w');
    CHECK(l->requests == 1 && l->bytes == 16 && l->sectors == 16 && l->ideal == 16);
    transpose<0><<<1, dim3(32, 32)>>>(d.p, s.p);
    transpose<1><<<1, dim3(32, 32)>>>(d.p, s.p);
    CHECK(emu_counts("transpose<PAD = 0>")->conflicts == 32 * 31 && emu_counts("transpose<PAD = 1>")->conflicts == 0);
    CHECK(line_of("transpose<PAD = 0>", 's', 'r')->sectors == 1024 &&
          line_of("transpose<PAD = 0>", 's', 'w')->sectors == 32);
    odd_and_even<<<1, 32>>>(d.p);
    l = line_of("odd_and_even", 'g', 'w');
    const EmuCount *c = emu_counts("odd_and_even");
    CHECK(l->requests == 1 && l->lanes == 16 && c->active < 32 * c->issued);
    polynomial<<<1, 64>>>(d.p, s.p, 10);
    CHECK(emu_counts("polynomial")->flops == 64 * 20);
    std::vector<__nv_bfloat16> a(256), b(128);
    Device<__nv_bfloat16> A(a), B(b);
    mma_tile<__nv_bfloat16, false><<<1, 32>>>(d.p, A.p, B.p);
    CHECK(emu_counts("mma_tile")->mma_flops == 2 * 16 * 8 * 16);
    emu_report(NULL);
}
#endif

// ---- streams
__global__ void fill(float *x, float v) { x[threadIdx.x] = v; }
__global__ void add_one(float *y, const float *x) { y[threadIdx.x] = x[threadIdx.x] + 1; }
static void two_streams(bool wait) {
    Device<float> a(32), b(32);
    cudaStream_t s1, s2;
    cudaEvent_t e;
    float *h;
    CUDA(cudaStreamCreate(&s1));
    CUDA(cudaStreamCreateWithFlags(&s2, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    CUDA(cudaHostAlloc(&h, 128, cudaHostAllocDefault));
    fill<<<1, 32, 0, s1>>>(a.p, 41);
    CUDA(cudaEventRecord(e, s1));
    if (wait) CUDA(cudaStreamWaitEvent(s2, e, 0));
    add_one<<<1, 32, 0, s2>>>(b.p, a.p);
    CUDA(cudaMemcpyAsync(h, b.p, 128, cudaMemcpyDeviceToHost, s2));
    CUDA(cudaStreamSynchronize(s2));
    for (int i = 0; i < 32; i++) CHECK(h[i] == 42);
    CUDA(cudaStreamDestroy(s1));
    CUDA(cudaStreamDestroy(s2));
    CUDA(cudaEventDestroy(e));
    CUDA(cudaFreeHost(h));
}
static void test_streams() { two_streams(true); }
static void broken_streams() { two_streams(false); }
static void broken_host_read() { // a pinned buffer is read before the copy is waited for
    Device<float> a(32);
    float *h;
    CUDA(cudaHostAlloc(&h, 128, cudaHostAllocDefault));
    fill<<<1, 32>>>(a.p, 41);
    CUDA(cudaMemcpyAsync(h, a.p, 128, cudaMemcpyDeviceToHost, 0));
    CHECK(h[0] == 41);
}

#ifdef EMU
#include <nccl.h>
static void test_nccl() { // one rank: collectives are copies; more are refused
    Device<float> a(random_floats(100)), b(100);
    ncclUniqueId id;
    ncclComm_t c;
    CHECK(ncclGetUniqueId(&id) == ncclSuccess && ncclCommInitRank(&c, 2, id, 0) == ncclInvalidUsage);
    CHECK(ncclCommInitRank(&c, 1, id, 0) == ncclSuccess);
    CHECK(ncclReduceScatter(a.p, b.p, 100, ncclFloat, ncclSum, c, 0) == ncclSuccess && a.get() == b.get());
    CHECK(ncclCommDestroy(c) == ncclSuccess);
}
#endif

// ---- what the emulator costs: test_emu bench
__global__ void empty(float *) {}
__global__ void barriers(float *, int n) {
    for (int i = 0; i < n; i++) __syncthreads();
}
__global__ void shuffles(float *x, int n) {
    float v = x[threadIdx.x];
    for (int i = 0; i < n; i++) v += __shfl_xor_sync(0xffffffffu, v, 1);
    x[threadIdx.x] = v;
}
__global__ void tensor_cores(float *x, int n) {
    __shared__ __align__(16) __nv_bfloat16 s[16][24];
    if (threadIdx.x < 16)
        for (int i = 0; i < 24; i++) s[threadIdx.x][i] = __float2bfloat16(0);
    __syncthreads();
    float d[4] = {0, 0, 0, 0};
    uint32_t a[4], b[2] = {0, 0};
    for (int i = 0; i < n; i++) {
        ldmatrix4<false>(a, &s[threadIdx.x % 16][threadIdx.x % 32 / 16 * 8]);
        for (int j = 0; j < 8; j++) mma16816<__nv_bfloat16>(d, a, b);
    }
    x[threadIdx.x] = d[0];
}
__global__ void copies(float *x, const float *y, int n) {
    __shared__ __align__(16) float s[1024];
    for (int i = 0; i < n; i++) {
        copy_async<16>(s + threadIdx.x * 4, y + threadIdx.x * 4);
        asm volatile("cp.async.wait_all;");
    }
    x[threadIdx.x] = s[threadIdx.x * 4];
}
template <class F> static void measure(const char *what, double times, F f) { // processor time: the machine may be busy
    f();
    CUDA(cudaDeviceSynchronize());
    clock_t start = clock();
    f();
    CUDA(cudaDeviceSynchronize());
    printf("%8.1f ns per %s\n", (double)(clock() - start) / CLOCKS_PER_SEC * 1e9 / times, what);
}
static void bench() {
    Device<float> x(std::vector<float>(4096, 1.0f)), y(std::vector<float>(4096, 1.0f));
    measure("launch", 2e4, [&] { for (int i = 0; i < 20000; i++) empty<<<1, 1>>>(x.p); });
    measure("block of 128 threads", 2e4, [&] { empty<<<20000, 128>>>(x.p); });
    measure("thread", 4e6, [&] { empty<<<4000, 1000>>>(x.p); });
    measure("thread and barrier", 256e4, [&] { barriers<<<1, 256>>>(x.p, 10000); });
    measure("thread and shuffle", 256e4, [&] { shuffles<<<1, 256>>>(x.p, 10000); });
    measure("warp and mma.sync (with an eighth of an ldmatrix.x4)", 8 * 8e4,
            [&] { tensor_cores<<<1, 256>>>(x.p, 10000); });
    measure("thread and cp.async with its wait", 256e4, [&] { copies<<<1, 256>>>(x.p, y.p, 10000); });
}

// ---- the list. In each build and environment named, a sound case (words: null) must end well; a broken one must not,
// and say the words.
enum { FAST = 1, ASAN = 2, TRACE = 4, ALL = 7 };
static const struct Case { const char *name; void (*run)(); int builds; const char *environment, *words;
} CASES[] = {
    {"launches and indices", test_launch, ALL, "", NULL},
    {"launch errors", test_launch_errors, ALL, "", NULL},
    {"warp operations", test_warp, ALL, "", NULL},
    {"barriers and shared memory", test_block, ALL, "", NULL},
    {"atomics and device variables", test_global, ALL, "", NULL},
    {"device memory", test_memory, ALL, "", NULL},
    {"device memory has a budget", test_budget, ALL, "EMU_MEMORY=100000", NULL},
    {"the last block adds up", test_last_block, ALL, "", NULL},
    {"lanes exchange", test_syncwarp, ALL, "", NULL},
    {"16-bit types", test_types, ALL, "", NULL},
    {"mma.sync and ldmatrix", test_mma, ALL, "", NULL},
    {"cp.async", test_cp_async, ALL, "", NULL},
    {"cp.async that lands at once", test_cp_async, FAST | TRACE, "EMU_ASYNC=early", NULL},
    {"TMA and mbarriers", test_tma, ALL, "", NULL},
    {"TMA that lands at once", test_tma, FAST | TRACE, "EMU_ASYNC=early", NULL},
    {"wgmma", test_wgmma, ALL, "", NULL},
    {"wgmma at once, random threads", test_wgmma, FAST | TRACE, "EMU_ASYNC=early EMU_ORDER=random:3", NULL},
    {"wgmma, random threads, some at once", test_wgmma, FAST | TRACE, "EMU_ASYNC=random EMU_ORDER=random:4", NULL},
    {"a ring of buffers", test_ring, ALL, "", NULL},
    {"a ring of buffers, random threads and landings", test_ring, FAST | TRACE, "EMU_ORDER=random:5 EMU_ASYNC=random",
     NULL},
    {"streams", test_streams, ALL, "", NULL},
    {"streams, lazy", test_streams, FAST, "EMU_STREAM=lazy", NULL},
    {"streams, memory protected", test_streams, FAST, "EMU_PROTECT=1", NULL},
    {"barriers, reversed threads", test_block, FAST, "EMU_ORDER=reverse", NULL},
    {"barriers, random threads", test_block, FAST | ASAN, "EMU_ORDER=random:7", NULL},
    {"warp operations, random threads", test_warp, FAST, "EMU_ORDER=random:8", NULL},
    {"cp.async, random threads and landings", test_cp_async, FAST, "EMU_ORDER=random:9 EMU_ASYNC=random", NULL},
#ifdef EMU // a GPU would hang, or say nothing
    {"NCCL for one rank", test_nccl, FAST, "", NULL},
    {"caught: a mask that leaves out its caller", broken_mask, FAST, "", "does not name lane"},
    {"caught: a shuffle that half the warp skips", broken_shuffle, FAST, "", "deadlock"},
    {"caught: missing barrier, NaN", broken_missing_barrier, FAST, "", "NaN in the output"},
    {"caught: threads at different barriers", broken_divergent_barrier, FAST, "", "divergent barrier"},
    {"caught: named barriers that never fill", broken_deadlock, FAST, "", "wait in a named barrier"},
    {"caught: missing barrier, by the race detector", broken_missing_barrier, TRACE, "", "race"},
    {"caught: missing barrier in a loop", broken_second_barrier, TRACE, "", "race"},
    {"caught: a race between blocks", broken_block_race, TRACE, "", "race"},
    {"counters", test_counters, TRACE, "", NULL},
    {"caught: no __threadfence before the atomic", broken_fence, TRACE, "", "__threadfence() before an atomic"},
    {"caught: the last block's other threads do not wait", broken_last_block, TRACE, "", "race in last_block_sums"},
    {"caught: no __syncwarp", broken_syncwarp, TRACE, "", "no __syncwarp"},
    {"caught: cp.async, others' copies without a barrier", broken_cp_barrier, TRACE, "", "race in copies_of_others"},
    {"caught: a host pointer", broken_host_pointer, FAST, "", "argument 1 is a host pointer"},
    {"caught: shared memory, past the end", broken_shared, TRACE, "", "shared memory access out of bounds"},
    {"caught: global memory, past the end", broken_global, TRACE, "", "global memory access out of bounds"},
    {"caught: shared memory, past the end", broken_shared, FAST, "", "past the end of a __shared__ variable"},
    {"caught: shared memory, past the end", broken_shared, ASAN, "", "index 64 out of bounds"},
    {"caught: dynamic shared memory, past the end", broken_dynamic, FAST, "", "past the end of the dynamic part"},
    {"caught: dynamic shared memory, past the end", broken_dynamic, ASAN, "", "use-after-poison"},
    {"caught: uninitialised shared memory", broken_uninitialised, FAST, "", "NaN in the output"},
    {"caught: global memory, past the end", broken_global, FAST, "", "past the end of an allocation"},
    {"caught: global memory, past the end", broken_global, ASAN, "",
     "kernel past_end, block (0,0,0) of (1,1,1), thread (100,0,0)"},
    {"caught: a misaligned vector", broken_misaligned, ASAN, "", "misaligned address"},
    {"caught: the host reads device memory", broken_host_access, FAST, "EMU_PROTECT=1",
     "host code touches device memory"},
    {"caught: an unknown instruction", broken_ptx, FAST, "", "fma.rn.f32"},
    {"caught: an instruction newer than the chip", broken_ptx, FAST, "EMU_CHIP=sm_80", "fma.rn.f32"},
    {"caught: mma.sync in half a warp", broken_mma, FAST, "", "wait in a warp-wide operation"},
    {"caught: cp.async, a wait too few", broken_cp_wait, FAST, "", "NaN in the output"},
    {"caught: TMA, threads that do not wait", broken_mbarrier_wait, FAST, "", "NaN in the output"},
    {"caught: TMA, threads that do not wait", broken_mbarrier_wait, TRACE, "EMU_ASYNC=early", "race in tma_round_trip"},
    {"caught: TMA, no fence.proxy.async", broken_proxy_fence, TRACE, "", "without fence.proxy.async"},
    {"caught: TMA, no wait before the end", broken_read_wait, FAST, "", "bulk stores may still read"},
    {"caught: TMA, wrong number of bytes", broken_bytes, FAST, "", "wait in mbarrier.try_wait"},
    {"caught: mbarrier, used before it is known", broken_init, FAST, "EMU_ORDER=reverse", "there is no mbarrier"},
    {"caught: mbarrier, used before it is known", broken_init, TRACE, "", "race in tma_round_trip"},
    {"caught: a ring that overwrites what is still read", broken_ring, TRACE, "", "race in ring"},
    {"caught: wgmma, no fence", broken_wgmma_fence, FAST, "", "without wgmma.fence"},
    {"caught: wgmma, no wait", broken_wgmma_wait, FAST, "", "NaN in the output"},
    {"caught: wgmma, no wait, even at once", broken_wgmma_wait, FAST, "EMU_ASYNC=early", "NaN in the output"},
    {"caught: wgmma, an accumulator in use", broken_wgmma_touched, FAST, "", "touched before wgmma.wait_group"},
    {"caught: wgmma by three warps", broken_wgmma_warps, FAST, "", "for other warps to begin"},
    {"caught: wgmma, no fence.proxy.async", broken_wgmma_proxy, TRACE, "", "without fence.proxy.async"},
    {"caught: wgmma on an older chip", broken_wgmma_proxy, FAST, "EMU_CHIP=sm_80", "needs a newer chip"},
    {"caught: a stream that does not wait for another", broken_streams, FAST, "EMU_STREAM=lazy",
     "h[i] == 42 is not so"},
    {"caught: the host does not wait for a copy", broken_host_read, FAST, "EMU_STREAM=lazy", "h[0] == 41 is not so"},
#endif
};
static int build_mode() {
#if defined(__SANITIZE_ADDRESS__)
    return ASAN;
#elif defined(EMU_TRACE)
    return TRACE;
#else
    return FAST;
#endif
}
int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench(), 0;
    if (argc > 1) {
        CASES[atoi(argv[1])].run();
#ifdef EMU
        return emu_races() ? 4 : 0;
#else
        return 0;
#endif
    }
    int failed = 0, n = (int)(sizeof CASES / sizeof *CASES);
    for (int i = 0; i < n; i++) {
        const Case &c = CASES[i];
        if (!(c.builds & build_mode())) continue;
        std::string command = std::string(c.environment) + " '" + argv[0] + "' " + std::to_string(i) + " 2>&1", output;
        FILE *f = popen(command.c_str(), "r");
        char line[1000];
        while (fgets(line, sizeof line, f)) output += line;
        int status = pclose(f);
        bool ok = c.words ? status != 0 && output.find(c.words) != std::string::npos : status == 0;
        printf("%s %d - %s\n", ok ? "ok" : "not ok", i + 1, c.name);
        if (!ok)
            printf("status %d, expected %s%s\n%s\n", status, c.words ? "the words: " : "success",
                   c.words ? c.words : "", output.c_str());
        failed += !ok;
        fflush(stdout);
    }
    return failed != 0;
}

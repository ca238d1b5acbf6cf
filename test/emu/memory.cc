// memory.cc - device memory, streams and events, and the runtime's calls about devices, errors and launches.
#include "internal.h"
#include "include/cuda.h"
#include "include/nccl.h"
#include <stdarg.h>
#include <sys/mman.h>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace emu {
// ---- errors: the last one stays until cudaGetLastError; a line on standard error says more than CUDA would
static cudaError_t last_error;
cudaError_t report(cudaError_t e, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "emu: ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, " (%s)\n", cudaGetErrorName(e));
    va_end(ap);
    return last_error = e;
}
static const struct { cudaError_t e; const char *name, *text; } ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

// ---- the chip. Figures of the CUDA C++ Programming Guide, "Compute Capabilities"; only the number of multiprocessors
// is ours: few, so that persistent kernels go round their loops in small tests.
const Chip &chip() {
    static const Chip chips[] = {{"sm_80", 8, 0, 2048, 164 << 10, 163 << 10, 40 << 20},
                                 {"sm_89", 8, 9, 1536, 100 << 10, 99 << 10, 72 << 20},
                                 {"sm_90a", 9, 0, 2048, 228 << 10, 227 << 10, 50 << 20}};
    static const Chip &c = [&]() -> const Chip & {
        const char *name = getenv("EMU_CHIP");
        for (const Chip &c : chips)
            if (name && !strcmp(name, c.name)) return c;
        if (name) fail("EMU_CHIP=%s: there are sm_80, sm_89 and sm_90a", name);
        return chips[2];
    }();
    return c;
}
static int environment(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

// ---- device memory: one range of addresses, handed out first fit. After each allocation lies a red zone.
char *arena;
size_t arena_size;
static long changes = 1;             // of the two maps below
static size_t budget_used, frontier; // bytes allocated; where untouched memory begins
static std::map<size_t, size_t> allocated, unused; // offset -> size
static std::set<std::pair<const char *, size_t>> pinned;
static std::recursive_mutex lock; // streams' host functions may call back
static const size_t GRAIN = 256;
static size_t footprint(size_t n) { return (n + GRAIN - 1) / GRAIN * GRAIN + GRAIN; }

bool in_arena(const void *p) { return arena && (const char *)p >= arena && (const char *)p < arena + arena_size; }
static int open_count = 1; // kernels and copies that run; the arena starts open
void protect(bool on) {
    if (!settings().protect || !arena) return;
    std::lock_guard<std::recursive_mutex> l(lock);
    open_count += on ? -1 : 1;
    if (frontier && (on ? open_count == 0 : open_count == 1))
        mprotect(arena, (frontier + 4095) & ~(size_t)4095, on ? PROT_NONE : PROT_READ | PROT_WRITE);
}
struct Open { // device memory is open to the host within a scope
    Open() { protect(false); }
    ~Open() { protect(true); }
};
bool in_allocation(const void *p, size_t n) {
    static __thread size_t low, high; // the last one asked about
    static __thread long known;
    if (!in_arena(p)) return false;
    size_t at = (const char *)p - arena;
    if (known == changes && at >= low && at + n <= high) return true;
    auto a = allocated.upper_bound(at);
    if (a == allocated.begin()) return false;
    --a;
    known = changes, low = a->first, high = low + a->second;
    return at >= low && at + n <= high;
}
extern "C" __attribute__((weak)) char __start_emu_device[], __stop_emu_device[];
bool is_symbol(const void *p) {
    return (const char *)p >= __start_emu_device && (const char *)p < __stop_emu_device;
}
static bool is_pinned(const void *p) {
    auto a = pinned.upper_bound({(const char *)p, SIZE_MAX});
    return a != pinned.begin() && (--a, (const char *)p < a->first + a->second);
}
static size_t take(size_t need) {
    for (auto u = unused.begin(); u != unused.end(); ++u)
        if (u->second >= need) {
            size_t at = u->first, left = u->second - need;
            unused.erase(u);
            if (left) unused[at + need] = left;
            return at;
        }
    size_t at = frontier;
    if (at + need > arena_size) return SIZE_MAX;
    size_t from = at & ~(size_t)4095, to = (at + need + 4095) & ~(size_t)4095;
    if (mprotect(arena + from, to - from, PROT_READ | PROT_WRITE)) return SIZE_MAX;
    frontier += need;
    return at;
}
static cudaError_t allocate(void **p, size_t n) {
    std::lock_guard<std::recursive_mutex> l(lock);
    if (!arena) { // addresses for twice the budget: what fragmentation may cost
        arena_size = settings().memory * 2 + (1 << 20);
        arena = (char *)mmap(nullptr, arena_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena == MAP_FAILED) fail("EMU_MEMORY=%zu: no such range of addresses here", settings().memory);
        open_count = settings().protect ? 0 : 1;
        my_engine(); // says which access was wrong
    }
    *p = nullptr;
    if (n == 0) return cudaSuccess;
    if (n > settings().memory || budget_used + footprint(n) - GRAIN > settings().memory)
        return last_error = cudaErrorMemoryAllocation;
    Open open;
    size_t at = take(footprint(n));
    if (at == SIZE_MAX) return last_error = cudaErrorMemoryAllocation;
    allocated[at] = n;
    changes++;
    budget_used += footprint(n) - GRAIN;
    EMU_UNPOISON(arena + at, footprint(n));
    memset(arena + at, 0xff, footprint(n)); // NaN in every floating-point format
    EMU_POISON(arena + at + n, footprint(n) - n);
    *p = arena + at;
    return cudaSuccess;
}
static void check_red_zone(const Kernel *k, size_t at, size_t n) {
#ifndef EMU_ASAN
    const unsigned char *end = (unsigned char *)arena + at + n;
    for (size_t i = 0; i < footprint(n) - n; i++)
        if (end[i] != 0xff)
            fail("%s: device memory written %zu bytes past the end of an allocation of %zu bytes",
                 k ? kernel_name(k->name).c_str() : "cudaFree", i, n);
#else
    (void)k, (void)at, (void)n;
#endif
}
void check_red_zones(const Kernel *k) {
    std::lock_guard<std::recursive_mutex> l(lock);
    Open open;
    for (auto &a : allocated) check_red_zone(k, a.first, a.second);
}
// What is free up to the frontier is untouched memory again: protect() takes time by the pages below it.
static void lower_frontier(std::map<size_t, size_t>::iterator last) {
    const size_t from = (last->first + 4095) & ~(size_t)4095, to = (frontier + 4095) & ~(size_t)4095;
    if (from < to) mprotect(arena + from, to - from, PROT_NONE);
    frontier = last->first;
    unused.erase(last);
}
static cudaError_t release(void *p) {
    std::lock_guard<std::recursive_mutex> l(lock);
    if (!p) return cudaSuccess;
    auto a = in_arena(p) ? allocated.find((char *)p - arena) : allocated.end();
    if (a == allocated.end())
        return report(cudaErrorInvalidValue, "cudaFree: %p was not allocated, or freed before", p);
    Open open;
    size_t at = a->first, need = footprint(a->second);
    check_red_zone(nullptr, at, a->second);
    EMU_UNPOISON(arena + at, need);
    memset(arena + at, 0xff, need);
    EMU_POISON(arena + at, need);
    budget_used -= need - GRAIN;
    allocated.erase(a);
    changes++;
    auto next = unused.insert({at, need}).first, piece = next; // joined with its neighbours
    if (++next != unused.end() && at + need == next->first) piece->second += next->second, unused.erase(next);
    if (piece != unused.begin()) {
        auto before = std::prev(piece);
        if (before->first + before->second == at) before->second += piece->second, unused.erase(piece), piece = before;
    }
    if (piece->first + piece->second == frontier) lower_frontier(piece);
    return cudaSuccess;
}
} // namespace emu

// ---- streams. Eager, or (EMU_STREAM=lazy) an operation runs only when something waits for it: the latest moment that
// CUDA allows. A missing synchronisation then reads NaN or old data every time, not once in a thousand runs.
struct EmuOperation {
    std::function<void()> run;
    std::vector<std::pair<EmuStream *, long>> after; // stream, and how many of its operations must have run
};
struct EmuStream {
    std::deque<EmuOperation> queue;
    long done = 0;
    bool blocking = true, running = false;
    long tail() const { return done + (long)queue.size(); }
};
struct EmuEvent {
    EmuStream *stream = nullptr;
    long at = 0;
    double time = 0;
    bool timing = true;
};
namespace emu {
static EmuStream null_stream;
static std::set<EmuStream *> streams;
static EmuStream *stream_of(cudaStream_t s) { return !s || s == cudaStreamLegacy ? &null_stream : s; }
static bool valid(cudaStream_t s) { return stream_of(s) == &null_stream || streams.count(s); }
static void drain(EmuStream *s, long upto) {
    while (s->done < upto && !s->running) {
        EmuOperation op = std::move(s->queue.front());
        s->running = true;
        for (auto &a : op.after)
            if (a.first == &null_stream || streams.count(a.first)) drain(a.first, a.second);
        op.run();
        s->queue.pop_front();
        s->done++;
        s->running = false;
    }
}
static void drain(EmuStream *s) { drain(s, s->tail()); }
static void drain_all() {
    drain(&null_stream);
    for (EmuStream *s : streams) drain(s);
}
static void enqueue_after(cudaStream_t stream, std::function<void()> op, EmuStream *other, long upto) {
    std::lock_guard<std::recursive_mutex> l(lock);
    EmuStream *s = stream_of(stream);
    EmuOperation o = {std::move(op), {}};
    if (other) o.after.push_back({other, upto});
    if (s == &null_stream) { // the legacy stream and the blocking ones wait for each other
        for (EmuStream *t : streams)
            if (t->blocking) o.after.push_back({t, t->tail()});
    } else if (s->blocking) o.after.push_back({&null_stream, null_stream.tail()});
    s->queue.push_back(std::move(o));
    if (!settings().lazy) drain(s);
}
void enqueue(cudaStream_t s, std::function<void()> op) { enqueue_after(s, std::move(op), nullptr, 0); }

// ---- launches
void check_pointer(int argument, const void *p) { // pinned memory is a kernel's to read, too
    if (p && !in_arena(p) && !is_symbol(p) && !is_pinned(p))
        fail("a kernel's argument %d is a host pointer, %p", argument, p);
}
void launch(const Launch &l, std::function<void()> body) {
    Kernel *k = nullptr;
    query = &k;
    body();
    query = nullptr;
    const Id &g = l.grid, &b = l.block;
    size_t threads = (size_t)b.x * b.y * b.z;
    auto bad = [&](cudaError_t e, const char *why) {
        std::string name = kernel_name(k->name);
        report(e, "%s<<<(%u,%u,%u), (%u,%u,%u), %zu>>>: %s", name.c_str(), g.x, g.y, g.z, b.x, b.y, b.z, l.dynamic,
               why);
    };
    if (!valid(l.stream)) return bad(cudaErrorInvalidResourceHandle, "no such stream");
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535)
        return bad(cudaErrorInvalidConfiguration, "a grid is 1 to 2147483647 x 65535 x 65535 blocks");
    if (!threads || threads > MAX_THREADS || b.x > 1024 || b.y > 1024 || b.z > 64)
        return bad(cudaErrorInvalidConfiguration, "a block is 1 to 1024 threads (1024 x 1024 x 64)");
    if (k->max_threads && threads > (size_t)k->max_threads)
        return bad(cudaErrorLaunchOutOfResources, "more threads than __launch_bounds__ allows");
    if (l.dynamic > (size_t)k->max_dynamic)
        return bad(cudaErrorInvalidValue,
                   "more dynamic shared memory than cudaFuncSetAttribute allowed (48 KB unless called)");
    if (l.dynamic + k->static_bytes > chip().shared_block)
        return bad(cudaErrorInvalidValue, "more shared memory than the chip has");
    enqueue(l.stream, [k, l, body = std::move(body)] { run_grid(k, l, body); });
}
cudaError_t set_attribute(Kernel *k, cudaFuncAttribute a, int value) {
    if (a != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)(value + k->static_bytes) > chip().shared_block)
        return report(cudaErrorInvalidValue, "cudaFuncSetAttribute(%s): %d bytes of shared memory; %s has %zu",
                      kernel_name(k->name).c_str(), value, chip().name, chip().shared_block);
    k->max_dynamic = value;
    return cudaSuccess;
}
cudaError_t get_attributes(cudaFuncAttributes *a, Kernel *k) {
    *a = cudaFuncAttributes();
    a->sharedSizeBytes = k->static_bytes, a->maxDynamicSharedSizeBytes = k->max_dynamic;
    a->maxThreadsPerBlock = k->max_threads ? k->max_threads : MAX_THREADS, a->numRegs = 64;
    a->ptxVersion = a->binaryVersion = chip().major * 10 + chip().minor;
    return cudaSuccess;
}
cudaError_t occupancy(int *blocks, Kernel *k, int threads, size_t dynamic) { // by threads and shared memory alone
    size_t shared = dynamic + k->static_bytes + 1024; // of which 1 KB is the system's
    if (threads < 1)
        return report(cudaErrorInvalidValue, "cudaOccupancyMaxActiveBlocksPerMultiprocessor: %d threads", threads);
    int by_threads = chip().threads_sm / ((threads + 31) / 32 * 32);
    *blocks = (int)std::min({(size_t)by_threads, chip().shared_sm / shared, (size_t)32});
    return cudaSuccess;
}
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// Which side a pointer is on must be what the call says; a range must lie in one allocation.
static cudaError_t check_copy(const void *p, size_t n, bool device, const char *what) {
    if (!n || is_symbol(p) || in_allocation(p, n)) {
        if (!n || device) return cudaSuccess;
        return report(cudaErrorInvalidValue, "cudaMemcpy: the %s is device memory, the kind says host", what);
    }
    if (device)
        return report(cudaErrorInvalidValue, "cudaMemcpy: the %s, %zu bytes at %p, is not within one allocation", what,
                      n, p);
    return cudaSuccess;
}
static cudaError_t copy(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t st, bool wait) {
    std::lock_guard<std::recursive_mutex> l(lock);
    if (k == cudaMemcpyDefault)
        k = (cudaMemcpyKind)((in_arena(s) || is_symbol(s) ? 2 : 0) + (in_arena(d) || is_symbol(d) ? 1 : 0));
    cudaError_t e = check_copy(d, n, k & 1, "destination");
    if (!e) e = check_copy(s, n, k & 2, "source");
    if (e) return e;
    if (!valid(st)) return report(cudaErrorInvalidResourceHandle, "cudaMemcpyAsync: no such stream");
    if (k == cudaMemcpyHostToDevice && !wait && !is_pinned(s)) { // pageable memory is read before the call returns
        std::string staged((const char *)s, n);
        enqueue(st, [=, staged = std::move(staged)] { Open open; memcpy(d, staged.data(), n); });
    } else enqueue(st, [=] { Open open; memmove(d, s, n); });
    if (wait || (k == cudaMemcpyDeviceToHost && !is_pinned(d))) drain(stream_of(st)); // and written before it does
    return cudaSuccess;
}
static cudaError_t set(void *d, int v, size_t n, cudaStream_t s) {
    std::lock_guard<std::recursive_mutex> l(lock);
    if (n && !is_symbol(d) && !in_allocation(d, n))
        return report(cudaErrorInvalidValue, "cudaMemset: %zu bytes at %p are not within one allocation", n, d);
    enqueue(s, [=] { Open open; memset(d, v, n); });
    return cudaSuccess;
}
static cudaError_t pin(void **p, size_t n) {
    *p = n ? aligned_alloc(256, (n + 255) & ~(size_t)255) : nullptr;
    if (n && !*p) return last_error = cudaErrorMemoryAllocation;
    if (n) memset(*p, 0xff, n), pinned.insert({(const char *)*p, n});
    return cudaSuccess;
}
static cudaError_t unpin(void *p) {
    auto a = pinned.lower_bound({(const char *)p, 0});
    if (a == pinned.end() || a->first != p) return report(cudaErrorInvalidValue, "%p is not pinned host memory", p);
    pinned.erase(a);
    return cudaSuccess;
}
} // namespace emu
using namespace emu;

cudaError_t cudaGetLastError() {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorString(cudaError_t e) {
    for (auto &x : ERRORS) if (x.e == e) return x.text;
    return "unrecognized error code";
}
const char *cudaGetErrorName(cudaError_t e) {
    for (auto &x : ERRORS) if (x.e == e) return x.name;
    return "unrecognized error code";
}
static __thread int device;
cudaError_t cudaGetDeviceCount(int *n) {
    return *n = environment("EMU_DEVICES", 1), *n ? cudaSuccess : last_error = cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int *d) { return *d = device, cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= environment("EMU_DEVICES", 1)) return report(cudaErrorInvalidDevice, "cudaSetDevice(%d)", d);
    return device = d, cudaSuccess;
}
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    const Chip &c = chip();
    *p = cudaDeviceProp();
    const char *name = getenv("EMU_NAME");
    snprintf(p->name, sizeof p->name, "%s%s", name ? "" : "emulated ", name ? name : c.name);
    p->totalGlobalMem = settings().memory, p->sharedMemPerBlock = 48 << 10, p->sharedMemPerMultiprocessor = c.shared_sm;
    p->sharedMemPerBlockOptin = c.shared_block, p->reservedSharedMemPerBlock = 1024, p->l2CacheSize = (int)c.l2;
    p->major = c.major, p->minor = c.minor, p->multiProcessorCount = environment("EMU_SMS", 4), p->warpSize = 32;
    p->maxThreadsPerMultiProcessor = c.threads_sm, p->maxThreadsPerBlock = MAX_THREADS;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536,
    p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
    p->asyncEngineCount = 2, p->maxBlocksPerMultiProcessor = 32;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, cudaDeviceAttr a, int d) {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, d);
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    default: return report(cudaErrorInvalidValue, "cudaDeviceGetAttribute: attribute %d is not emulated", (int)a);
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return drain_all(), last_error == cudaErrorLaunchFailure ? last_error : cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    return *total = settings().memory, *free = *total - budget_used, cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) { return *v = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { return *v = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t) { return allocate(p, n); }
cudaError_t cudaFree(void *p) { return drain_all(), release(p); } // waits for the device
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return enqueue(s, [=] { release(p); }), cudaSuccess; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return pin(p, n); }
cudaError_t cudaMallocHost(void **p, size_t n, unsigned) { return pin(p, n); }
cudaError_t cudaFreeHost(void *p) {
    drain_all();
    cudaError_t e = p ? unpin(p) : cudaSuccess;
    if (!e) free(p);
    return e;
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned) { return pinned.insert({(const char *)p, n}), cudaSuccess; }
cudaError_t cudaHostUnregister(void *p) { return unpin(p); }
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind k) { return copy(d, s, n, k, nullptr, true); }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind k, cudaStream_t st) {
    return copy(d, s, n, k, st, false);
}
cudaError_t cudaMemcpy2DAsync(void *d, size_t dpitch, const void *s, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind k, cudaStream_t st) {
    cudaError_t e = cudaSuccess;
    for (size_t i = 0; i < height && !e; i++)
        e = copy((char *)d + i * dpitch, (const char *)s + i * spitch, width, k, st, false);
    return e;
}
cudaError_t cudaMemset(void *d, int v, size_t n) { return set(d, v, n, nullptr); }
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) { return set(d, v, n, s); }

cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    *s = new EmuStream();
    (*s)->blocking = !(flags & cudaStreamNonBlocking);
    return streams.insert(*s), cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int) {
    return cudaStreamCreateWithFlags(s, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    if (!s || !streams.count(s)) return report(cudaErrorInvalidResourceHandle, "cudaStreamDestroy: no such stream");
    drain(s);
    streams.erase(s);
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    if (!valid(s)) return report(cudaErrorInvalidResourceHandle, "cudaStreamSynchronize: no such stream");
    std::lock_guard<std::recursive_mutex> l(lock);
    return drain(stream_of(s)), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { // asking makes a lazy stream move, or a polling host would wait for ever
    EmuStream *t = stream_of(s);
    if (t->queue.empty()) return cudaSuccess;
    return drain(t, t->done + 1), cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    if (e->stream) enqueue_after(s, [] {}, e->stream, e->at);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    return enqueue(s, [=] { f(data); }), cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e, unsigned flags) {
    *e = new EmuEvent();
    (*e)->timing = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return cudaEventCreate(e, flags); }
static void wait(cudaEvent_t e) {
    if (e->stream == &null_stream || streams.count(e->stream)) drain(e->stream, e->at);
}
cudaError_t cudaEventDestroy(cudaEvent_t e) { return wait(e), delete e, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    if (!valid(s)) return report(cudaErrorInvalidResourceHandle, "cudaEventRecord: no such stream");
    e->stream = stream_of(s), e->at = e->stream->tail() + 1;
    return enqueue(s, [=] { e->time = now(); }), cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return wait(e), cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) {
    if (!streams.count(e->stream) && e->stream != &null_stream) return cudaSuccess;
    if (e->stream->done >= e->at) return cudaSuccess;
    return drain(e->stream, e->stream->done + 1), cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    if (!a->stream || !b->stream || !a->timing || !b->timing)
        return report(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event without a time");
    if (cudaEventQuery(a) || cudaEventQuery(b)) return last_error = cudaErrorNotReady;
    return *ms = (float)((b->time - a->time) * 1e3), cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    *f = strcmp(name, "cuTensorMapEncodeTiled") ? nullptr : (void *)cuTensorMapEncodeTiled;
    if (result) *result = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *f ? cudaSuccess : report(cudaErrorSymbolNotFound, "the driver's %s is not emulated", name);
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, f, CUDART_VERSION, flags, result);
}

// ---- NCCL for one rank: each collective is a copy. More ranks are refused.
struct EmuNccl { cudaStream_t stream; };
static size_t nccl_bytes(ncclDataType_t t) {
    static const size_t size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return size[t];
}
static ncclResult_t nccl_copy(const void *s, void *r, size_t n, ncclDataType_t t, cudaStream_t st) {
    if (s == r) return ncclSuccess;
    return cudaMemcpyAsync(r, s, n * nccl_bytes(t), cudaMemcpyDeviceToDevice, st) ? ncclUnhandledCudaError
                                                                                  : ncclSuccess;
}
ncclResult_t ncclGetVersion(int *v) { return *v = NCCL_VERSION_CODE, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return memset(id, 0, sizeof *id), ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId, int rank) {
    if (n != 1 || rank != 0) {
        fprintf(stderr, "emu: ncclCommInitRank: %d ranks; the emulator has NCCL for one\n", n);
        return ncclInvalidUsage;
    }
    return *c = new EmuNccl(), ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t c) { return delete c, ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t c) { return ncclCommDestroy(c); }
ncclResult_t ncclCommCount(const ncclComm_t, int *n) { return *n = 1, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t, int *r) { return *r = 0, ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e) { return *e = ncclSuccess, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t r) {
    static const char *text[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                 "invalid argument", "invalid usage", "remote process exited", "operation in progress"};
    return (unsigned)r < 8 ? text[r] : "unknown result code";
}
const char *ncclGetLastError(ncclComm_t) { return "the emulator has NCCL for one rank"; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t st) {
    return nccl_copy(s, r, n, t, st);
}
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t, ncclComm_t,
                               cudaStream_t st) {
    return nccl_copy(s, r, n, t, st);
}
ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t, cudaStream_t st) {
    return nccl_copy(s, r, n, t, st);
}
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t st) {
    return nccl_copy(s, r, n, t, st);
}
ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t, int, ncclComm_t,
                        cudaStream_t st) {
    return nccl_copy(s, r, n, t, st);
}
ncclResult_t ncclSend(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }
ncclResult_t ncclRecv(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return ncclInvalidUsage; }

// internal.h - what the engine's four files share: engine.cc (threads), memory.cc (memory, streams, the runtime's
// calls), ptx.cc (inline PTX), trace.cc (race detector and counters).
#pragma once
#include <string>
#include <vector>
#include "include/cuda_fp16.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#ifdef EMU_ASAN // the engine itself is not instrumented: its frames end without returning
#include <sanitizer/asan_interface.h>
#define EMU_POISON(p, n) __asan_poison_memory_region(p, n)
#define EMU_UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define EMU_POISON(p, n) ((void)(p), (void)(n))
#define EMU_UNPOISON(p, n) ((void)(p), (void)(n))
#endif

namespace emu {
constexpr int MAX_THREADS = 1024, MAX_WARPS = 32, BARRIERS = 16;
constexpr int ALIGNED = 0x1000; // collectives of this kind and above: all lanes at one instruction
constexpr size_t WINDOW = 512 << 10; // address range of one block's shared memory
constexpr size_t SHARED_BASE = 1024; // its first byte: no valid shared address is 0
constexpr size_t RED = 64;           // red zone around each shared variable

enum State : uint8_t { NEW, READY, AT_WARP, AT_BARRIER, AT_MBARRIER, AT_WARPGROUP, DONE };
struct Thread {
    Context c;
    void *sp, *fake;     // where it stopped; ASan's own note of that
    char *stack;
    State state;
    const char *site;    // of what it waits for
    const char *what;
    int barrier, result; // which one it waits at; what its predicates came to
    uint32_t address, parity; // of an mbarrier
};
struct WarpOp { // lanes that wait for each other
    unsigned mask, arrived;
    int kind;
    const char *site;
    Execute execute;
    void *data[32];
};
struct Warp {
    unsigned live, ready; // lanes that have not returned; lanes that can run
    int nops;
    WarpOp ops[32];       // waiting collectives: more than one when lanes have diverged
};
struct Barrier {
    int expected, arrived, count; // expected 0: every live thread
    Reduce op;
    const char *site;
    unsigned waiting[MAX_WARPS];
};
struct Async;   // ptx.cc: copies and products in flight
struct Engine { // one per OS thread: the block it runs
    Thread th[MAX_THREADS];
    Warp warps[MAX_WARPS];
    Barrier bars[BARRIERS];
    unsigned ready_warps;
    int nthreads, nwarps, live;
    long idle;            // pauses since anything happened
    long barriers;        // passed in this block
    Kernel *kernel;
    const std::function<void()> *body;
    Launch launch;
    long block;           // linear index
    uint64_t random;
    std::vector<char *> stacks; // free ones
    void *main_sp, *main_fake;
    const void *main_stack;
    size_t main_size;
    char *window;         // shared memory: [dynamic][red]([static][red])*
    size_t dynamic_at, used, filled;
    std::vector<std::pair<size_t, size_t>> statics; // offset, size
    Async *async;
};
extern __thread Engine *engine;
struct Settings {
    int order;            // 0 forward, 1 reversed, 2 random
    uint64_t seed;
    int async;            // when asynchronous copies happen: 0 as late as allowed, 1 at once, 2 at random
    bool lazy, protect;
    size_t memory;
};
const Settings &settings();
struct Chip { const char *name; int major, minor, threads_sm; size_t shared_sm, shared_block, l2; };
const Chip &chip();

inline Thread &self() { return engine->th[cur->tid]; }
bool same_site(const char *a, const char *b);
uint64_t random_next(uint64_t &state);
void wait_here(State s, const char *what, const char *site); // gives the processor away until wake()
void wake(Thread &t);
void check_shared(const char *site, uint32_t address, size_t bytes, size_t align);
int barrier_arrive(const char *site, int id, int expected, int predicate, Reduce op, bool wait);
Engine *my_engine();
void run_grid(Kernel *k, const Launch &l, const std::function<void()> &body);
std::string kernel_name(const char *pretty); // "gemm<AT = true>" of a __PRETTY_FUNCTION__

// memory.cc
extern char *arena;
extern size_t arena_size;
bool in_arena(const void *p);
bool in_allocation(const void *p, size_t bytes); // all of it within one
bool is_symbol(const void *p);                   // a __device__ or __constant__ variable
void protect(bool on);
void check_red_zones(const Kernel *k); // which has just run
void enqueue(cudaStream_t s, std::function<void()> op);
cudaError_t report(cudaError_t e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

// ptx.cc
void async_begin();              // a block starts
bool async_progress();           // completes one operation in flight, if there is one
void async_thread_end();
void async_block_end();

// trace.cc: happens-before, and counters. Nothing in builds without EMU_TRACE.
constexpr int COPIES = MAX_WARPS, PRODUCTS = MAX_WARPS + 1; // what TMA and wgmma do counts as done by two more warps
#ifdef EMU_TRACE
struct Clock { uint32_t at[MAX_WARPS + 2]; }; // of each warp, and of the two below
#else
struct Clock {};
#endif
#ifdef EMU_TRACE
#define EMU_HOOK(declaration) declaration;
#else
#define EMU_HOOK(declaration) static inline declaration {}
#endif
EMU_HOOK(void trace_launch(Kernel *, const Launch &))
EMU_HOOK(void trace_launch_end(Kernel *, const Launch &))
EMU_HOOK(void trace_block_begin())
EMU_HOOK(void trace_block_end())
EMU_HOOK(void trace_converge(int /* warp */, unsigned /* lanes */, bool /* ordered: __syncwarp */))
EMU_HOOK(void trace_arrive(int /* barrier */))
EMU_HOOK(void trace_depart(int /* barrier */, const unsigned * /* lanes of each warp that waited */))
EMU_HOOK(void trace_access(void * /* pc */, const void *, size_t, Access, bool /* for the whole warp */))
EMU_HOOK(void trace_landing(void * /* pc */, const void *, size_t)) // an asynchronous copy's data are there
EMU_HOOK(void trace_mma(long /* flops */))
EMU_HOOK(void trace_release(Clock &)) // what the current thread has done is before whoever acquires the clock
EMU_HOOK(void trace_acquire(const Clock &))
EMU_HOOK(void trace_join(Clock & /* into */, const Clock &))
EMU_HOOK(void trace_snapshot(Clock &))                                        // an asynchronous operation starts
EMU_HOOK(void trace_async(int, void *, const void *, size_t, Access, const Clock &)) // and touches memory
EMU_HOOK(void trace_async_done(int, Clock & /* into */, const Clock &))
EMU_HOOK(void trace_sync_read(void *, const void *, size_t)) // of an mbarrier, which must have been made known
EMU_HOOK(void trace_proxy_fence())
} // namespace emu

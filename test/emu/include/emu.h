// emu.h - the engine as the stand-in headers, the rewritten source and the tests see it. ../README.md tells the story.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <functional>
#include <type_traits>
#include <utility>

#define EMU_INLINE static inline __attribute__((always_inline))
#define EMU 1 // this is the emulator
struct dim3;
struct uint3;
typedef struct EmuStream *cudaStream_t;

// ---- what tests read: the counts of every kernel that ran while counting was on (trace builds)
struct EmuLine {            // one instruction that touches memory
    const char *file;       // where it was written: the innermost line that is not in a header of the emulator
    const char *path;       // the file with its folders
    int line, outer;        // outer: the kernel's own line, when the access stands in a function that was inlined
    uint64_t pc;            // its address
    char space, kind;       // 'g'lobal or 's'hared; 'r'ead, 'w'rite, 'a'tomic
    int bytes;              // of one thread's access
    long requests, lanes;   // warp instructions, and threads that took part in them
    long sectors, ideal;    // global: 32-byte sectors moved, and the fewest that could hold the same bytes;
};                          // shared: passes over the 32 banks, and the fewest possible
struct EmuCount {           // one kernel, all launches since emu_count(true)
    const char *name;       // with its template arguments
    long launches, blocks, threads, barriers;
    long read, written;     // bytes of global memory moved, as whole sectors per request
    long needed;            // bytes of different sectors read and written, per launch: what a perfect cache moves
    long shared;            // bytes of shared memory a block
    long flops, mma_flops;  // scalar arithmetic; tensor cores
    long issued, active;    // warp instructions (as basic blocks), threads active in them: active / issued / 32
    long conflicts;         // passes over shared memory beyond the fewest possible
    int nlines;
    const EmuLine *lines;
};
void emu_count(bool on);                     // on: from zero
const EmuCount *emu_counts(const char *name); // by name, template arguments or not; null if it did not run
const char *emu_kernel(int i);                // the name of the i-th that ran; null: there are not so many
int emu_races();                             // races reported so far (trace builds)
bool emu_traces();                           // is this a trace build?
void emu_report(const char *name);           // prints one kernel's counts beside its lines; null: every kernel's

namespace emu {
// ---- a thread and where it is
struct Id { unsigned x, y, z; };
struct Context { Id thread; int tid, lane, warp; };
extern __thread Context *cur; // the thread that runs; null in host code
extern __thread Id block_id, block_size, grid_size;
[[noreturn]] void fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

// ---- launches
struct Kernel { // one per __global__ function (per instantiation), inside it
    const char *name;
    int max_threads;                  // __launch_bounds__, or 0
    int max_dynamic = 48 * 1024;      // cudaFuncAttributeMaxDynamicSharedMemorySize
    int static_bytes = 0;             // of __shared__ variables, as seen in its first block
};
struct Launch { Id grid, block; size_t dynamic; cudaStream_t stream; };
extern __thread Kernel **query;       // set: a kernel only says who it is
constexpr int bounds(int threads, ...) { return threads; }
void launch(const Launch &l, std::function<void()> body);
struct Configuration {
    Launch l;
    template <class G, class B> Configuration(G g, B b, size_t dynamic = 0, cudaStream_t s = nullptr);
};
void check_pointer(int argument, const void *p); // fails unless a kernel may have it
template <class T> void check_argument(int, const T &) {}
template <class T> void check_argument(int i, T *p) { check_pointer(i, (const void *)p); }
template <class F> struct Launcher {  // holds the kernel's name as a generic lambda, so that the call deduces templates
    Launch l;
    F kernel;
    template <class... A> void operator()(A... a) const { // arguments are copied now; a lazy stream runs later
        int i = 0;
        (check_argument(++i, a), ...);
        launch(l, [kernel = kernel, a...] { kernel(a...); });
    }
};
template <class F> Launcher<F> launcher(const Configuration &c, F f) { return {c.l, f}; }
template <class... A> Kernel *kernel_of(void (*f)(A...)) {
    Kernel *k = nullptr;
    query = &k;
    f(std::decay_t<A>()...);
    query = nullptr;
    return k;
}

// ---- shared memory
void *dynamic_shared(size_t align);
void *static_shared(size_t size, size_t align);
extern __thread long block_serial;
template <class S> S &shared() { // one address per block and type; the first thread to come by allocates
    static __thread long serial;
    static __thread S *p;
    if (serial != block_serial) {
        p = (S *)static_shared(sizeof(S), alignof(S));
        serial = block_serial;
    }
    return *p;
}
uint32_t shared_address(const void *generic);
void *generic_address(uint32_t shared);

// ---- barriers and warp-wide operations
enum Reduce { PLAIN, COUNT, AND, OR };
int syncthreads(const char *site, int predicate = 0, Reduce op = PLAIN);
typedef void (*Execute)(void **data, unsigned mask); // data[lane], for the lanes of mask
// Waits until every thread of the mask that still runs has come with the same mask and kind; then `execute` runs once.
void collective(const char *site, unsigned mask, int kind, void *data, Execute execute);
struct Shuffle { uint64_t in, out; int source; };
void shuffle(const char *site, unsigned mask, Shuffle *s);
int shuffle_source(int mode, int x, int width); // the lane that mode ('i'ndex, 'x'or, 'u'p, 'd'own) reads from
template <class T> T shuffle(const char *site, int mode, unsigned mask, T v, int x, int width = 32) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves 2, 4 or 8 bytes");
    Shuffle s = {0, 0, shuffle_source(mode, x, width)};
    memcpy(&s.in, &v, sizeof(T));
    shuffle(site, mask, &s);
    memcpy((void *)&v, &s.out, sizeof(T));
    return v;
}
uint32_t vote(const char *site, unsigned mask, bool predicate); // ballot
uint32_t match_any(const char *site, unsigned mask, uint64_t v);
uint32_t reduce(const char *site, unsigned mask, int op,
                uint32_t v); // '+', 'm'in, 'M'ax (signed), 'n', 'N' (unsigned), '&', '|', '^'
void syncwarp(const char *site, unsigned mask = 0xffffffffu);
uint32_t active_mask();
void pause(const char *site); // lets other threads run

// ---- what the compiler's instrumentation does not see (trace builds)
enum Access { READ, WRITE, ATOMIC };
#ifdef EMU_TRACE
void access(const void *p, size_t bytes, Access kind); // by the caller's own line
void fence();
void copy(void *to, const void *from, size_t bytes); // memcpy, unseen
#else
static inline void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

// ---- inline PTX
struct Operand { void *p; };
template <char Mode, char Kind> struct Typed : Operand { static constexpr char mode = Mode, kind = Kind; };
constexpr int operand_bytes(char kind, int otherwise) {
    return kind == 'h' ? 2 : kind == 'r' || kind == 'f' ? 4 : kind == 'l' || kind == 'd' ? 8 : otherwise;
}
template <char Mode, char Kind, class T> Typed<Mode, Kind> operand(T &&x) {
    typedef std::remove_reference_t<T> V;
    static_assert(sizeof(V) == operand_bytes(Kind, sizeof(V)), "asm operand: the type does not fit its constraint");
    static_assert(Mode == ' ' || !std::is_const<V>::value, "asm operand: an output must be writable");
    if constexpr (Kind == 'n') return {{(void *)(intptr_t)x}}; // a constant: the value itself
    else return {{(void *)&x}};
}
struct Asm { const char *text, *site; struct Program *program; };
void run_asm(Asm *a, Operand *ops, int n, const char *kinds);
inline Operand plain(Operand o) { return o; }
template <char... C> struct Kinds { static constexpr char text[] = {C..., 0}; };
template <class... A> __attribute__((always_inline)) inline void ptx_typed(Asm *a, A... ops) {
    Operand list[] = {plain(ops)..., {nullptr}};
    run_asm(a, list, sizeof...(A), Kinds<A::mode..., A::kind...>::text);
}
struct Clobber : Operand { static constexpr char mode = ' ', kind = '!'; };
template <char M, char K> Typed<M, K> operand_or_clobber(Typed<M, K> o) { return o; }
inline Clobber operand_or_clobber(const char *) { return {}; }
template <class... A> __attribute__((always_inline)) inline void ptx(Asm *a, A... ops) {
    ptx_typed(a, operand_or_clobber(ops)...);
}
} // namespace emu

#define EMU_STRING2(x) #x
#define EMU_STRING(x) EMU_STRING2(x)
#define EMU_SITE __FILE__ ":" EMU_STRING(__LINE__) "\0" EMU_STRING(__COUNTER__) // two barriers on one line differ
#define EMU_ASM(text) ({ static emu::Asm emu_asm = {text, EMU_SITE, nullptr}; &emu_asm; })
#define EMU_LAUNCH(kernel, ...) \
    emu::launcher(emu::Configuration(__VA_ARGS__), [=](auto... emu_a) { kernel(emu_a...); })
#define EMU_KERNEL(...) \
    static emu::Kernel emu_kernel = {__PRETTY_FUNCTION__, emu::bounds(__VA_ARGS__)}; \
    if (emu::query) { *emu::query = &emu_kernel; return; }
#define EMU_DEVICE_VARIABLE __attribute__((section("emu_device")))
#define EMU_NOINLINE __attribute__((noinline))

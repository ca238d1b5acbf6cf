// engine.cc - a GPU's threads on a CPU. Every thread of a block is a fiber: a stack of its own, switched by hand when
// it comes to something that it must wait for. Blocks are shared out over the processor's cores. ../README.md explains.
#include "internal.h"
#include <omp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <map>
#include <string>
#if !defined(__x86_64__) && !defined(__aarch64__)
#define EMU_UCONTEXT 1
#endif
#ifdef EMU_UCONTEXT
#include <ucontext.h>
#endif
#ifdef EMU_ASAN
extern "C" void __sanitizer_start_switch_fiber(void **save, const void *bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void *save, const void **bottom_old, size_t *size_old);
#endif

namespace emu {
__thread Context *cur;
__thread Id block_id, block_size, grid_size;
__thread Engine *engine;
__thread Kernel **query;
__thread long block_serial;
static const size_t STACK = 256 << 10;

const Settings &settings() {
    static const Settings s = [] {
        Settings s = {};
        const char *order = getenv("EMU_ORDER"), *async = getenv("EMU_ASYNC"), *stream = getenv("EMU_STREAM");
        if (order) s.order = !strcmp(order, "reverse") ? 1 : !strncmp(order, "random", 6) ? 2 : 0;
        if (s.order == 2) s.seed = order[6] == ':' ? strtoull(order + 7, nullptr, 10) : 1;
        if (async) s.async = !strcmp(async, "early") ? 1 : !strcmp(async, "random") ? 2 : 0;
        s.lazy = stream && !strcmp(stream, "lazy");
        s.protect = getenv("EMU_PROTECT") && atoi(getenv("EMU_PROTECT"));
        s.memory = getenv("EMU_MEMORY") ? strtoull(getenv("EMU_MEMORY"), nullptr, 10) : 4ull << 30;
        return s;
    }();
    return s;
}

uint64_t random_next(uint64_t &x) { // xorshift64
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x;
}

// A site is "file:line", a zero, and a number that tells two on one line apart.
bool same_site(const char *a, const char *b) {
    return a == b || (!strcmp(a, b) && !strcmp(a + strlen(a) + 1, b + strlen(b) + 1));
}

// "void gemm(const bf16*, ...) [with bool AT = true; int N = 3]" -> "gemm<AT = true, N = 3>"
std::string kernel_name(const char *pretty) {
    std::string s = pretty, with;
    size_t open = s.find('('), start = s.rfind(' ', open), w = s.find(" [with ");
    for (size_t i = w + 7, end; w != std::string::npos && i < s.size(); i = end + 2) {
        end = std::min(s.find("; ", i), s.size() - 1);
        std::string one = s.substr(i, end - i);
        for (const char *type : {"bool ", "int "})
            if (!one.compare(0, strlen(type), type)) one.erase(0, strlen(type));
        if (one.find("_t = ") == std::string::npos) with += (with.empty() ? "" : ", ") + one; // int64_t is no parameter
    }
    return s.substr(start + 1, open - start - 1) + (with.empty() ? "" : "<" + with + ">");
}

static void where() {
    if (engine && engine->kernel) {
        fprintf(stderr, "\n  kernel %s", kernel_name(engine->kernel->name).c_str());
        fprintf(stderr, ", block (%u,%u,%u) of (%u,%u,%u)", block_id.x, block_id.y, block_id.z, grid_size.x,
                grid_size.y, grid_size.z);
        if (cur)
            fprintf(stderr, ", thread (%u,%u,%u) of (%u,%u,%u)", cur->thread.x, cur->thread.y, cur->thread.z,
                    block_size.x, block_size.y, block_size.z);
    }
    fprintf(stderr, "\n");
    fflush(stderr);
}
void fail(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "\nemu: ");
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    where();
    abort();
}

// ---- fibers. A switch saves what a called function must keep and changes the stack. All switches happen in one place,
// go(): so the processor, which expects a return to where the last call came from, is right although the stack is
// another.
#ifdef EMU_UCONTEXT
static void emu_switch(void **save, void *load) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, (ucontext_t *)load);
}
#else
extern "C" void emu_switch(void **save, void *load);
#ifdef __x86_64__
asm(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n.size emu_switch,.-emu_switch\n");
#else
asm(".text\n.globl emu_switch\n.type emu_switch,%function\nemu_switch:\n"
    "sub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
    "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\n"
    "ldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\n"
    "ldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\nadd sp,sp,#160\nret\n.size emu_switch,.-emu_switch\n");
#endif
#endif
static void fiber_main();
static void prepare(Thread &t) { // a stack on which switching to t enters fiber_main
    Engine &e = *engine;
    if (e.stacks.empty()) {
        char *s = (char *)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (s == MAP_FAILED) fail("no memory for a thread's stack");
        mprotect(s, 4096, PROT_NONE); // an overflow stops here
        e.stacks.push_back(s + 4096);
    }
    t.stack = e.stacks.back();
    e.stacks.pop_back();
    // The lanes of a warp start at different cache sets.
    void **top = (void **)(t.stack + STACK - 64 - ((uintptr_t)t.stack >> 12) % 32 * 128);
#ifdef EMU_UCONTEXT
    ucontext_t *u = (ucontext_t *)t.stack;
    getcontext(u);
    u->uc_stack.ss_sp = t.stack + sizeof *u, u->uc_stack.ss_size = (char *)top - t.stack - sizeof *u,
    u->uc_link = nullptr;
    makecontext(u, fiber_main, 0);
    t.sp = u;
#elif defined(__x86_64__)
    *--top = nullptr; // keeps the stack aligned as after a call
    *--top = (void *)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    t.sp = top;
#else
    top -= 20;
    memset(top, 0, 160);
    top[11] = (void *)fiber_main; // x30
    t.sp = top;
#endif
}
// Leaves `from` (null: the scheduler) for `to` (null: the scheduler).
static void go(Thread *from, Thread *to) {
    Engine &e = *engine;
    cur = to ? &to->c : nullptr;
    if (to && to->state == NEW) to->state = READY, prepare(*to);
#ifdef EMU_ASAN
    bool last = from && from->state == DONE;
    __sanitizer_start_switch_fiber(last ? nullptr : from ? &from->fake : &e.main_fake, to ? to->stack : e.main_stack,
                                   to ? STACK : e.main_size);
#endif
    emu_switch(from ? &from->sp : &e.main_sp, to ? to->sp : e.main_sp);
#ifdef EMU_ASAN
    Thread *me = cur ? &self() : nullptr;
    __sanitizer_finish_switch_fiber(me ? me->fake : e.main_fake, nullptr, nullptr);
#endif
}

// ---- who runs next
static int random_bit(unsigned mask, uint64_t &random) { // of those that are set, the first from a random one on
    const unsigned from = (unsigned)random_next(random) & 31;
    return (int)((__builtin_ctz(mask >> from | mask << (-from & 31)) + from) & 31);
}
[[noreturn]] static void deadlock(const char *why) {
    Engine &e = *engine;
    std::map<std::string, std::pair<int, int>> groups; // what they do -> how many, the first
    for (int i = 0; i < e.nthreads; i++) {
        Thread &t = e.th[i];
        char line[400];
        if (t.state == DONE) snprintf(line, sizeof line, "have returned");
        else if (t.state == READY || t.state == NEW) snprintf(line, sizeof line, "poll at %s", t.site ? t.site : "?");
        else snprintf(line, sizeof line, "wait in %s at %s", t.what, t.site);
        auto &g = groups.insert({line, {0, i}}).first->second;
        g.first++;
    }
    fprintf(stderr, "\nemu: %s\n", why);
    for (auto &g : groups)
        fprintf(stderr, "  %4d threads (first: %d) %s\n", g.second.first, g.second.second, g.first.c_str());
    cur = nullptr;
    fail("these threads wait for each other for ever");
}
static Thread *pick(int warp) { // null: the block has ended
    Engine &e = *engine;
    for (;;) {
        if (unsigned ready = e.ready_warps) {
            int order = settings().order;
            if (order == 2) warp = random_bit(ready, e.random);
            else if (!(ready >> warp & 1)) {
                unsigned after = order ? ready & ((1u << warp) - 1) : ready & ~((2u << warp) - 1);
                if (!after) after = ready;
                warp = order ? 31 - __builtin_clz(after) : __builtin_ctz(after);
            }
            unsigned lanes = e.warps[warp].ready;
            int lane = order == 0 ? __builtin_ctz(lanes) : order == 1 ? 31 - __builtin_clz(lanes)
                     : random_bit(lanes, e.random);
            return &e.th[warp * 32 + lane];
        }
        if (!e.live) return nullptr;
        if (!async_progress()) deadlock("deadlock");
    }
}
static void not_ready(Thread &t) {
    Warp &w = engine->warps[t.c.warp];
    w.ready &= ~(1u << t.c.lane);
    if (!w.ready) engine->ready_warps &= ~(1u << t.c.warp);
}
void wake(Thread &t) {
    t.state = READY;
    engine->warps[t.c.warp].ready |= 1u << t.c.lane;
    engine->ready_warps |= 1u << t.c.warp;
    engine->idle = 0;
}
static void reschedule(Thread &me) {
    Thread *next = pick(me.c.warp);
    if (next != &me) go(&me, next);
}
void wait_here(State s, const char *what, const char *site) {
    Thread &me = self();
    me.state = s, me.what = what, me.site = site;
    not_ready(me);
    reschedule(me);
}
// A polling thread: the lanes and warps behind it go first, round and round.
void pause(const char *site) {
    Thread &me = self();
    Engine &e = *engine;
    me.site = site;
    if (++e.idle > 2 * e.live && async_progress()) e.idle = 0;
    if (e.idle > 1000L * e.live + 100000) deadlock("livelock: every thread polls, none gets on");
    unsigned lanes = e.warps[me.c.warp].ready & ~((2u << me.c.lane) - 1),
             warps = e.ready_warps & ~((2u << me.c.warp) - 1);
    Thread *next;
    if (settings().order == 2) next = pick(me.c.warp);
    else if (lanes) next = &e.th[me.c.warp * 32 + __builtin_ctz(lanes)];
    else {
        int w = __builtin_ctz(warps ? warps : e.ready_warps);
        next = &e.th[w * 32 + __builtin_ctz(e.warps[w].ready)];
    }
    if (next != &me) go(&me, next);
}

// ---- a thread's life
static void complete(Warp &w, int i);
static void check_barriers();
static void finish(Thread &t) { // whoever waited for this thread may go on
    Engine &e = *engine;
    async_thread_end();
    Warp &w = e.warps[t.c.warp];
    not_ready(t);
    t.state = DONE;
    w.live &= ~(1u << t.c.lane);
    e.live--, e.idle = 0;
    if (!w.live) trace_converge(t.c.warp, 0, false);
    for (int i = 0; i < w.nops; i++)
        if (w.ops[i].arrived == (w.ops[i].mask & w.live)) complete(w, i), i = -1;
    check_barriers();
}
static void fiber_main() {
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, engine->main_stack ? nullptr : &engine->main_stack,
                                    engine->main_stack ? nullptr : &engine->main_size);
#endif
    for (;;) {
        Engine &e = *engine;
        Thread &t = self();
        (*e.body)();
        finish(t);
        Thread *next = pick(t.c.warp);
        if (next && next->state == NEW) { // the next thread takes over this stack: no switch, if nothing ever waits
            next->state = READY, next->stack = t.stack;
            cur = &next->c;
            continue;
        }
        e.stacks.push_back(t.stack); // nobody starts on it before the switch
        go(&t, next);
    }
}

// ---- warp-wide operations
static void complete(Warp &w, int i) {
    WarpOp &op = w.ops[i];
    Engine &e = *engine;
    int warp = (int)(&w - e.warps);
    unsigned lanes = op.arrived;
    if (op.execute) op.execute(op.data, lanes);
    trace_converge(warp, lanes, op.kind == 0);
    if (i != --w.nops) op = w.ops[w.nops];
    for (unsigned m = lanes; m; m &= m - 1) e.th[warp * 32 + __builtin_ctz(m)].state = READY;
    w.ready |= lanes;
    e.ready_warps |= 1u << warp;
    e.idle = 0;
}
void collective(const char *site, unsigned mask, int kind, void *data, Execute execute) {
    Thread &me = self();
    Warp &w = engine->warps[me.c.warp];
    unsigned bit = 1u << me.c.lane;
    if (!(mask & bit)) fail("%s: the mask %08x does not name lane %d, which calls", site, mask, me.c.lane);
    int i = 0;
    while (i < w.nops && (w.ops[i].mask != mask || w.ops[i].kind != kind || w.ops[i].arrived & bit)) i++;
    WarpOp &op = w.ops[i];
    if (i == w.nops) w.nops++, op.mask = mask, op.arrived = 0, op.kind = kind, op.site = site, op.execute = execute;
    else if (kind >= ALIGNED && !same_site(site, op.site))
        fail("lanes of one warp are at different .aligned instructions: %s and %s", op.site, site);
    op.arrived |= bit;
    op.data[me.c.lane] = data;
    me.state = AT_WARP, me.what = "a warp-wide operation", me.site = site;
    not_ready(me);
    if (op.arrived == (mask & w.live)) complete(w, i);
    reschedule(me);
}
static int lane_up(int lane, int x, int width) { return lane - x < (lane & -width) ? lane : lane - x; }
int shuffle_source(int mode, int x, int width) { // CUDA C++ Programming Guide, "Warp Shuffle Functions"
    int lane = cur->lane, first = lane & -width, last = first + width - 1;
    if (width < 1 || width > 32 || width & (width - 1))
        fail("a shuffle's width is a power of two up to 32, not %d", width);
    if (mode == 'u') return lane_up(lane, x, width);
    int source = mode == 'i' ? first | (x & (width - 1)) : mode == 'x' ? lane ^ x : lane + x;
    return source > last ? lane : source;
}
static void shuffle_execute(void **data, unsigned mask) {
    for (unsigned m = mask; m; m &= m - 1) {
        Shuffle *s = (Shuffle *)data[__builtin_ctz(m)];
        bool there = mask >> s->source & 1; // else: rubbish
        s->out = there ? ((Shuffle *)data[s->source])->in : ~0ull;
    }
}
void shuffle(const char *site, unsigned mask, Shuffle *s) { collective(site, mask, 1, s, shuffle_execute); }
struct Vote { uint64_t in; uint32_t out; };
uint32_t vote(const char *site, unsigned mask, bool predicate) {
    Vote v = {predicate, 0};
    collective(site, mask, 2, &v, [](void **data, unsigned mask) {
        unsigned all = 0;
        for (unsigned m = mask; m; m &= m - 1)
            all |= (unsigned)((Vote *)data[__builtin_ctz(m)])->in << __builtin_ctz(m);
        for (unsigned m = mask; m; m &= m - 1) ((Vote *)data[__builtin_ctz(m)])->out = all;
    });
    return v.out;
}
uint32_t match_any(const char *site, unsigned mask, uint64_t value) {
    Vote v = {value, 0};
    collective(site, mask, 3, &v, [](void **data, unsigned mask) {
        for (unsigned m = mask; m; m &= m - 1)
            for (unsigned n = mask; n; n &= n - 1) {
                Vote *a = (Vote *)data[__builtin_ctz(m)], *b = (Vote *)data[__builtin_ctz(n)];
                if (a->in == b->in) a->out |= 1u << __builtin_ctz(n);
            }
    });
    return v.out;
}
struct Reduction { int op; uint32_t v; };
static uint32_t combine(int op, uint32_t a, uint32_t b) {
    switch (op) {
    case '+': return a + b;
    case '&': return a & b;
    case '|': return a | b;
    case '^': return a ^ b;
    case 'm': return (int)a < (int)b ? a : b;
    case 'M': return (int)a > (int)b ? a : b;
    case 'n': return a < b ? a : b;
    default: return a > b ? a : b;
    }
}
uint32_t reduce(const char *site, unsigned mask, int op, uint32_t value) {
    Reduction r = {op, value};
    collective(site, mask, 0x100 + op, &r, [](void **data, unsigned mask) {
        Reduction *first = (Reduction *)data[__builtin_ctz(mask)];
        uint32_t v = first->v;
        for (unsigned m = mask & (mask - 1); m; m &= m - 1)
            v = combine(first->op, v, ((Reduction *)data[__builtin_ctz(m)])->v);
        for (unsigned m = mask; m; m &= m - 1) ((Reduction *)data[__builtin_ctz(m)])->v = v;
    });
    return r.v;
}
void syncwarp(const char *site, unsigned mask) { collective(site, mask, 0, nullptr, nullptr); }
// The lanes that could be at this place together: on this engine, those that have not returned.
uint32_t active_mask() { return engine->warps[cur->warp].live; }

// ---- block barriers (PTX ISA, "bar, barrier"). 0 is __syncthreads' own.
static void release(Barrier &b) {
    Engine &e = *engine;
    int result = b.op == COUNT ? b.count : b.op == AND ? b.count == b.arrived : b.count > 0;
    unsigned lanes[MAX_WARPS];
    memcpy(lanes, b.waiting, sizeof lanes);
    for (int w = 0; w < e.nwarps; w++)
        for (unsigned m = lanes[w]; m; m &= m - 1) {
            Thread &t = e.th[w * 32 + __builtin_ctz(m)];
            t.result = result;
            if (t.state == AT_BARRIER && &b == &e.bars[t.barrier]) wake(t); // others have only arrived
        }
    trace_depart((int)(&b - e.bars), lanes);
    b = Barrier();
    e.barriers++;
}
static void check_barriers() {
    Engine &e = *engine;
    for (Barrier &b : e.bars)
        if (b.arrived && !b.expected && b.arrived == e.live) release(b);
}
// Arrives at barrier `id` for `expected` threads (0: all that live), and waits there or not (bar.arrive).
int barrier_arrive(const char *site, int id, int expected, int predicate, Reduce op, bool wait) {
    Thread &me = self();
    Engine &e = *engine;
    if (id < 0 || id >= BARRIERS) fail("%s: there are barriers 0 to 15, not %d", site, id);
    if (expected % 32) fail("%s: a barrier waits for whole warps, not for %d threads", site, expected);
    Barrier &b = e.bars[id];
    if (b.arrived && (b.expected != expected || b.op != op))
        fail("barrier %d: %s and %s disagree on the number of threads or the operation", id, b.site, site);
    if (b.arrived && !expected && !same_site(b.site, site))
        fail("divergent barrier: threads of one block wait at %s and at %s", b.site, site);
    if (b.waiting[me.c.warp] >> me.c.lane & 1) fail("%s: barrier %d: the same thread arrives twice", site, id);
    b.expected = expected, b.op = op, b.site = site;
    b.arrived++, b.count += predicate != 0;
    b.waiting[me.c.warp] |= 1u << me.c.lane;
    trace_arrive(id);
    if (wait) {
        me.state = AT_BARRIER, me.barrier = id, me.what = id ? "a named barrier" : "__syncthreads", me.site = site;
        not_ready(me);
    }
    if (b.arrived == (expected ? expected : e.live)) release(b);
    if (wait) reschedule(me);
    return me.result;
}
int syncthreads(const char *site, int predicate, Reduce op) { return barrier_arrive(site, 0, 0, predicate, op, true); }

// ---- shared memory. A block's window starts as NaN bytes, red zones too: nothing there reads as zero by luck.
static void shared_begin() {
    Engine &e = *engine;
    if (!e.window) {
        e.window =
            (char *)mmap(nullptr, WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (e.window == MAP_FAILED) fail("no memory for a block's shared memory");
        e.filled = WINDOW;
    }
    EMU_UNPOISON(e.window, WINDOW);
    memset(e.window, 0xff, e.filled);
    e.dynamic_at = 0;
    e.used = SHARED_BASE + 512 + e.launch.dynamic + RED; // 512: room for the alignment below
    e.used = (e.used + 127) & ~(size_t)127;
    e.filled = e.used;
    e.statics.clear();
    EMU_POISON(e.window, WINDOW);
    block_serial++;
}
static void shared_end() { // what was written past an end
    Engine &e = *engine;
    EMU_UNPOISON(e.window, WINDOW);
    auto check = [&](size_t end, const char *what) {
        for (size_t i = end; i < end + RED; i++)
            if (e.window[i] != (char)0xff) fail("shared memory written %zu bytes past the end of %s", i - end, what);
    };
    e.kernel->static_bytes = 0;
    for (auto &s : e.statics) e.kernel->static_bytes += (int)s.second;
    if (e.launch.dynamic && e.dynamic_at) check(e.dynamic_at + e.launch.dynamic, "the dynamic part");
    for (auto &s : e.statics) check(s.first + s.second, "a __shared__ variable");
}
// Dynamic shared memory is aligned as its declaration says and no better.
void *dynamic_shared(size_t align) {
    Engine &e = *engine;
    size_t at = align >= 1024 ? 1024 : SHARED_BASE + (align < 16 ? 16 : align);
    if (align > 1024) fail("extern __shared__: alignment %zu is above 1024", align);
    if (e.dynamic_at && e.dynamic_at != at) fail("extern __shared__: all declarations in a kernel need one alignment");
    if (!e.dynamic_at) EMU_UNPOISON(e.window + at, e.launch.dynamic);
    e.dynamic_at = at;
    return e.window + at;
}
void *static_shared(size_t size, size_t align) {
    Engine &e = *engine;
    size_t at = (e.used + RED + align - 1) & ~(align - 1), total = e.launch.dynamic + size;
    for (auto &s : e.statics) total += s.second;
    if (total - e.launch.dynamic > 48 * 1024) fail("more than 48 KB of static __shared__ variables");
    if (total > chip().shared_block)
        fail("%zu bytes of shared memory; %s has %zu", total, chip().name, chip().shared_block);
    e.statics.push_back({at, size});
    e.used = at + size;
    if (e.used + RED > e.filled) {
        size_t filled = (e.used + RED + 127) & ~(size_t)127;
        EMU_UNPOISON(e.window + e.filled, filled - e.filled);
        memset(e.window + e.filled, 0xff, filled - e.filled);
        EMU_POISON(e.window + e.filled, filled - e.filled);
        e.filled = filled;
    }
    EMU_UNPOISON(e.window + at, size);
    return e.window + at;
}
uint32_t shared_address(const void *p) {
    size_t at = (const char *)p - engine->window;
    if (at >= WINDOW) fail("__cvta_generic_to_shared: %p is not in shared memory", p);
    return (uint32_t)at;
}
void *generic_address(uint32_t a) { return engine->window + a; }
void check_shared(const char *site, uint32_t a, size_t bytes, size_t align) {
    Engine &e = *engine;
    if (a % align) fail("%s: shared address %#x is not a multiple of %zu", site, a, align);
    bool in = e.dynamic_at && a >= e.dynamic_at && a + bytes <= e.dynamic_at + e.launch.dynamic;
    for (auto &s : e.statics) in |= a >= s.first && a + bytes <= s.first + s.second;
    if (!in) fail("%s: %zu bytes at shared address %#x are out of bounds", site, bytes, a);
}

// ---- blocks and grids
static void run_block(long block) {
    Engine &e = *engine;
    block_id = {(unsigned)(block % grid_size.x), (unsigned)(block / grid_size.x % grid_size.y),
                (unsigned)(block / grid_size.x / grid_size.y)};
    e.block = block;
    e.random = (settings().seed + 1) * 0x9e3779b97f4a7c15ull ^ ((uint64_t)block + 1) * 0xbf58476d1ce4e5b9ull;
    for (int i = 0; i < 4; i++) random_next(e.random);
    e.live = e.nthreads, e.idle = 0, e.barriers = 0, e.ready_warps = 0;
    for (int w = 0; w < e.nwarps; w++) {
        int n = std::min(32, e.nthreads - w * 32);
        e.warps[w].live = e.warps[w].ready = n == 32 ? ~0u : (1u << n) - 1;
        e.warps[w].nops = 0;
        e.ready_warps |= 1u << w;
    }
    for (int i = 0; i < e.nthreads; i++) {
        Thread &t = e.th[i];
        t.c = {{i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y}, i, i % 32, i / 32};
        t.state = NEW, t.site = nullptr, t.result = 0;
    }
    for (Barrier &b : e.bars) b = Barrier();
    shared_begin();
    async_begin();
    trace_block_begin();
    go(nullptr, pick(settings().order == 1 ? e.nwarps - 1 : 0));
    async_block_end();
    shared_end();
    trace_block_end();
}
#ifndef EMU_ASAN
static void on_fault(int, siginfo_t *info, void *) {
    const char *a = (const char *)info->si_addr;
    if (arena && a >= arena && a < arena + arena_size) {
        if (cur) fail("illegal global memory access at %p", (void *)a);
        fail("host code touches device memory at %p", (void *)a);
    }
    if (cur && engine)
        for (int i = 0; i < engine->nthreads; i++)
            if (engine->th[i].stack && a >= engine->th[i].stack - 4096 && a < engine->th[i].stack)
                fail("a thread's stack overflows (256 KB)");
    fail(a ? "segmentation fault at %p" : "segmentation fault at %p: a null pointer or a misaligned vector access",
         (void *)a);
}
#endif
Engine *my_engine() { // of this OS thread
    if (!engine) {
        engine = new Engine();
#ifndef EMU_ASAN
        stack_t alternate = {};
        alternate.ss_sp = malloc(alternate.ss_size = 64 << 10);
        sigaltstack(&alternate, nullptr);
        struct sigaction act = {};
        act.sa_sigaction = on_fault, act.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &act, nullptr);
        sigaction(SIGBUS, &act, nullptr);
#endif
    }
    return engine;
}
void run_grid(Kernel *k, const Launch &l, const std::function<void()> &body) {
    long blocks = (long)l.grid.x * l.grid.y * l.grid.z, next = 0;
    int nthreads = (int)(l.block.x * l.block.y * l.block.z), order = settings().order;
    my_engine();
    std::vector<long> shuffled;
    if (order == 2) { // Fisher and Yates
        uint64_t random = settings().seed * 0x2545f4914f6cdd1dull + 1;
        for (long i = 0; i < blocks; i++) shuffled.push_back(i);
        for (long i = blocks - 1; i > 0; i--) std::swap(shuffled[i], shuffled[random_next(random) % (i + 1)]);
    }
    protect(false);
    trace_launch(k, l);
    auto work = [&] {
        Engine &e = *my_engine();
        e.kernel = k, e.launch = l, e.body = &body, e.nthreads = nthreads, e.nwarps = (nthreads + 31) / 32;
        block_size = l.block, grid_size = l.grid;
        for (long i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < blocks;)
            run_block(order == 0 ? i : order == 1 ? blocks - 1 - i : shuffled[i]);
        e.kernel = nullptr;
    };
#ifndef EMU_TRACE
    if (order == 0 && blocks > 1 && blocks * nthreads >= 2048) { // other orders are repeatable: one block at a time
#pragma omp parallel
        work();
    } else
#endif
        work();
    trace_launch_end(k, l);
    protect(true);
    check_red_zones(k);
}
} // namespace emu
#ifdef EMU_ASAN
extern "C" void __asan_on_error() { // before ASan's own report
    fprintf(stderr, "\nemu: AddressSanitizer found an error");
    emu::where();
}
#endif

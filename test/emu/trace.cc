// trace.cc - the race detector and the counters. In trace builds the kernels are compiled with g++'s instrumentation
// for ThreadSanitizer and for coverage, but linked with the hooks below instead of its library: every load and store
// calls
// __tsan_readN or __tsan_writeN, every basic block __sanitizer_cov_trace_pc. Blocks run one after another.
#include "internal.h"
#ifndef EMU_TRACE
int emu_races() { return 0; }
bool emu_traces() { return false; }
void emu_count(bool) {}
const EmuCount *emu_counts(const char *) { return nullptr; }
const char *emu_kernel(int) { return nullptr; }
void emu_report(const char *) { printf("counters need a trace build\n"); }
#else
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

namespace emu {
typedef uint64_t Pc;
static bool counting, racing = true;

// ---- where an instruction was written: addr2line's inlined frames, innermost first, without the emulator's headers
struct Frame { std::string function, path, file; int line; };
typedef std::vector<Frame> Place;
static void ask_addr2line(Pc pc, Place &place) { // one addr2line for the whole run: it reads the program only once
    static FILE *to, *from;
    if (!to) {
        const std::string exe = "/proc/" + std::to_string(getpid()) + "/exe";
        int in[2], out[2];
        if (pipe(in) || pipe(out)) return;
        if (fork() == 0) {
            dup2(in[0], 0), dup2(out[1], 1);
            for (int fd : {in[0], in[1], out[0], out[1]}) close(fd);
            execlp("addr2line", "addr2line", "-a", "-f", "-i", "-e", exe.c_str(), nullptr);
            _exit(1);
        }
        close(in[0]), close(out[1]);
        to = fdopen(in[1], "w"), from = fdopen(out[0], "r");
    }
    char function[4096], text[1000];
    fprintf(to, "%#lx\n0\n", (unsigned long)pc - 1); // into the call; the answer to 0 ends that to pc
    fflush(to);
    if (!fgets(text, sizeof text, from)) return;
    while (fgets(function, sizeof function, from) && fgets(text, sizeof text, from)) {
        if (!strncmp(function, "0x", 2)) { // the answer to 0: its address, "??", "??:0"
            if (!fgets(text, sizeof text, from)) fail("addr2line ended");
            return;
        }
        char *colon = strrchr(text, ':'), *slash = strrchr(text, '/');
        if (!colon || strstr(text, "/emu/include/") || strstr(text, "/c++/")) continue;
        *colon = 0;
        if (int line = atoi(colon + 1)) place.push_back({function, text, slash ? slash + 1 : text, line});
    }
}
static const Place &frames(Pc pc) {
    static std::unordered_map<Pc, Place> places;
    auto found = places.find(pc);
    if (found == places.end()) found = places.insert({pc, {}}).first, ask_addr2line(pc, found->second);
    return found->second;
}
static const Frame &place(Pc pc) {
    static const Frame unknown = {"", "?", "?", 0};
    const Place &p = frames(pc);
    return p.empty() ? unknown : p[0];
}
// The kernel's own line: of the outermost frame that is the kernel; what launched it may be around it, inlined too.
static int own_line(const Place &frames, const std::string &kernel) {
    for (auto f = frames.rbegin(); f != frames.rend(); f++)
        if (f->function.find(kernel) != std::string::npos) return f->line;
    for (auto f = frames.rbegin(); f != frames.rend(); f++)
        if (f->file == frames[0].file) return f->line;
    return 0;
}

// ---- races. Happens-before between the warps of a block is kept in vector clocks: clocks[w][v] is the newest moment
// of warp v that warp w is known to come after. Barriers join clocks. Within a warp, `syncs` counts __syncwarp and
// barriers; lanes are ordered by nothing else. Each 4-byte word of memory remembers who wrote it last and two who have
// read it.
struct Cell {
    uint32_t block, clock, sync; // serial number of the block; its warp's clock and syncs at the access
    uint16_t thread;             // WHOLE_WARP: ldmatrix, stmatrix
    uint8_t bytes, kind;         // which of the four; Access
    uint16_t fences;             // the thread's fence.proxy.async before it
    Pc pc;
};
struct Shadow { Cell write, read[2]; };
const uint16_t WHOLE_WARP = 0x8000; // plus the first lane's number
static Shadow *global_shadow, *shared_shadow;
static std::unordered_map<uintptr_t, Shadow> symbol_shadow; // __device__ variables
static uint32_t serial, first_serial;                       // blocks so far; first of this launch
static Clock clocks[MAX_WARPS], barrier_clock[BARRIERS];
static uint32_t syncs[MAX_WARPS + 2], ticks[MAX_WARPS + 2]; // ticks: of COPIES and PRODUCTS
static uint16_t fences[MAX_THREADS];          // fence.proxy.async, by thread
static std::unordered_map<int, Clock> fence_clock;
static int races;
static std::set<std::pair<Pc, Pc>> reported;

// Between blocks only one thing orders: a thread that has executed __threadfence() and then an atomic on global memory
// releases what its block did before; a later atomic on the same address acquires it ("the last block done").
struct Event { const void *variable; size_t at; uint16_t thread; uint32_t sync, clock; Clock clocks; };
static std::unordered_map<uint32_t, std::vector<Event>> releases; // by block
static std::unordered_map<const void *, size_t> released;         // variable -> number of releases
static std::vector<Event> acquired;                               // by the block that runs
static std::vector<bool> fenced;

static Event event(const void *variable, size_t at) {
    int w = cur->warp;
    return {variable, at, (uint16_t)cur->tid, syncs[w], clocks[w].at[w], clocks[w]};
}
static int warp_of(uint16_t thread) { return (thread & ~WHOLE_WARP) / 32; }
// Is an access (its thread, sync, clock) before a moment of the same block (its thread, sync, and its warp's clocks)?
static bool before(uint16_t t, uint32_t sync, uint32_t clock, uint16_t later, uint32_t later_sync,
                   const Clock &later_clocks) {
    if (t == later && t < WHOLE_WARP) return true;
    int w = warp_of(t);
    return w == warp_of(later) && w < COPIES ? sync < later_sync : later_clocks.at[w] >= clock;
}
static bool released_to(const Cell &o, const Cell &n, const Clock &known) {
    auto r = releases.find(o.block);
    if (r == releases.end()) return false;
    for (const Event &e : r->second)
        if (before(o.thread, o.sync, o.clock, e.thread, e.sync, e.clocks))
            for (const Event &a : acquired)
                if (a.variable == e.variable && a.at > e.at &&
                    before(a.thread, a.sync, a.clock, n.thread, n.sync, known))
                    return true;
    return false;
}
// Do two accesses conflict, and does the second not come after the first? `known`: what the second's warp knows of
// others.
static bool conflict(const Cell &o, const Cell &n, bool shared, const Clock &known) {
    if (o.block < first_serial || !(o.bytes & n.bytes) || (o.kind == READ && n.kind == READ)) return false;
    if (o.kind == ATOMIC && n.kind == ATOMIC) return false;
    if (o.block == n.block) return !before(o.thread, o.sync, o.clock, n.thread, n.sync, known);
    return !shared && !released_to(o, n, known);
}
static void race(const Cell &o, const Cell &n, bool shared) {
    if (!reported.insert({std::min(o.pc, n.pc), std::max(o.pc, n.pc)}).second) return;
    static const char *kinds[] = {"read", "write", "atomic"};
    const Frame &a = place(o.pc), &b = place(n.pc);
    bool blocks = o.block != n.block, warp = warp_of(o.thread) == warp_of(n.thread);
    races++;
    fprintf(stderr, "emu: race in %s, %s memory: %s at %s:%d by ", kernel_name(engine->kernel->name).c_str(),
            shared ? "shared" : "global", kinds[o.kind], a.file.c_str(), a.line);
    if (blocks) fprintf(stderr, "block %u, ", o.block - first_serial);
    fprintf(stderr, "thread %d; %s at %s:%d by ", o.thread & ~WHOLE_WARP, kinds[n.kind], b.file.c_str(), b.line);
    if (blocks) fprintf(stderr, "block %u, ", n.block - first_serial);
    fprintf(stderr, "thread %d; %s\n", n.thread & ~WHOLE_WARP,
            blocks ? "nothing orders two blocks of a launch, but __threadfence() before an atomic and an atomic after"
            : warp ? "no __syncwarp or __syncthreads between" : "no barrier between");
}
static Shadow &shadow(uintptr_t word, bool shared, bool global) {
    if (shared) return shared_shadow[(word - (uintptr_t)engine->window) / 4];
    if (global) return global_shadow[(word - (uintptr_t)arena) / 4];
    return symbol_shadow[word];
}
static void check_races(const char *p, size_t n, Cell c, const Clock &known, bool shared, bool global) {
    for (uintptr_t word = (uintptr_t)p & ~(uintptr_t)3; word < (uintptr_t)p + n; word += 4) {
        c.bytes = 15;
        if (word < (uintptr_t)p) c.bytes &= 15 << ((uintptr_t)p - word);
        if (word + 4 > (uintptr_t)p + n) c.bytes &= 15 >> (word + 4 - (uintptr_t)p - n);
        Shadow &s = shadow(word, shared, global);
        if (conflict(s.write, c, shared, known)) race(s.write, c, shared);
        if (c.kind != READ) {
            for (Cell &r : s.read)
                if (conflict(r, c, shared, known)) race(r, c, shared);
            s.write = c;
            s.read[0].block = s.read[1].block = 0;
        } else if (s.read[0].block != c.block || s.read[0].thread == c.thread) s.read[0] = c;
        else s.read[1] = c;
    }
}
static Cell cell(Pc pc, uint16_t thread, Access kind) {
    int w = warp_of(thread);
    return {serial,        w >= COPIES ? ticks[w] : clocks[w].at[w],     syncs[w], thread, 0,
            (uint8_t)kind, w >= COPIES ? (uint16_t)0 : fences[cur->tid], pc};
}
// The asynchronous proxy (TMA stores, wgmma) sees what ordinary stores wrote only behind fence.proxy.async, by the
// thread that wrote, or by one that comes after it and before the read.
static void check_proxy(Pc pc, const char *p, size_t n, const Clock &known) {
    for (const char *word = p; word < p + n; word += 4) {
        Cell &w = shadow((uintptr_t)word, true, false).write;
        if (w.block != serial || warp_of(w.thread) >= COPIES || fences[w.thread & ~WHOLE_WARP] != w.fences) continue;
        bool fenced = false;
        for (auto &f : fence_clock)
            fenced |= f.second.at[warp_of(w.thread)] >= w.clock && known.at[f.first / 32] >= f.second.at[f.first / 32];
        if (fenced || !reported.insert({w.pc, pc}).second) continue;
        races++;
        fprintf(stderr,
                "emu: race in %s: %s:%d writes what %s:%d reads asynchronously, without fence.proxy.async between\n",
                kernel_name(engine->kernel->name).c_str(), place(w.pc).file.c_str(), place(w.pc).line,
                place(pc).file.c_str(), place(pc).line);
    }
}

// ---- counters. Each thread keeps a list of what it executed. When the lanes of a warp meet, the k-th execution of an
// instruction by one lane and the k-th by another are taken to be one instruction of the warp.
struct Record { // space: 'g'lobal, 's'hared; or a 'b'asic block, `bytes` times in a row
    Pc pc;
    const char *p;
    uint16_t bytes;
    uint8_t kind;
    char space;
};
static uint64_t key(const Record &r) { return r.pc << 8 | (uint64_t)r.space << 2 | r.kind; }
struct Kernelcount {
    EmuCount c = {};
    std::unordered_map<uint64_t, EmuLine> lines; // by key: one instruction may read and write
    std::unordered_map<Pc, long> basic_blocks;   // executions by threads
    std::unordered_map<uintptr_t, int> sectors;  // of this launch: 1 read, 2 written
    std::vector<EmuLine> sorted;
    std::string name;
};
static std::map<std::string, Kernelcount> counts;
static Kernelcount *counted;
static std::vector<Record> records[MAX_THREADS];
struct Group { const Record *lane[32] = {}; int n = 0; };

// The bytes that lanes from .. to-1 touch, as spans in order, none of which touches the next; returns how many.
struct Span { uintptr_t begin, end; };
static int spans(Span *s, const Group &g, int from, int to) {
    int n = 0, merged = 0;
    for (int lane = from; lane < to; lane++)
        if (const Record *r = g.lane[lane]) s[n++] = {(uintptr_t)r->p, (uintptr_t)r->p + r->bytes};
    std::sort(s, s + n, [](const Span &a, const Span &b) { return a.begin < b.begin; });
    for (int i = 0; i < n; i++)
        if (merged && s[i].begin <= s[merged - 1].end) s[merged - 1].end = std::max(s[merged - 1].end, s[i].end);
        else s[merged++] = s[i];
    return merged;
}
// f(i) for each piece of `size` bytes that the spans touch, once
template <class F> static void each_piece(const Span *s, int n, size_t size, F f) {
    for (uintptr_t i = 0, next = 0; n; n--, s++)
        for (i = std::max(next, s->begin / size); i * size < s->end; i++) f(i), next = i + 1;
}
static void touch(Kernelcount &k, uintptr_t sector, char kind) { // kind: 'r'ead, 'w'rite, 'a'tomic
    k.sectors[sector] |= kind == 'r' ? 1 : kind == 'w' ? 2 : 3;
}
static void count_global(EmuLine &l, const Group &g, Kernelcount &k) {
    Span s[32];
    const int n = spans(s, g, 0, 32);
    long bytes = 0, sectors = 0;
    for (int i = 0; i < n; i++) bytes += (long)(s[i].end - s[i].begin);
    each_piece(s, n, 32, [&](uintptr_t sector) { sectors++, touch(k, sector, l.kind); });
    l.sectors += sectors, l.ideal += (bytes + 31) / 32;
    if (l.kind != 'w') k.c.read += sectors * 32;
    if (l.kind != 'r') k.c.written += sectors * 32;
}
// Shared memory has 32 banks of 4 bytes. A warp's request goes in parts of 128 bytes: 32 lanes of 4 bytes, 16 of 8, 8
// of 16. A part takes as many passes as the busiest bank has different words.
static void count_shared(EmuLine &l, const Group &g, Kernelcount &k) {
    int part = std::max(1, std::min(32, 128 / std::max(4, l.bytes)));
    for (int from = 0; from < 32; from += part) {
        Span s[32];
        int banks[32] = {}, passes = 0;
        const int n = spans(s, g, from, from + part);
        each_piece(s, n, 4, [&](uintptr_t word) { passes = std::max(passes, ++banks[word % 32]); });
        l.sectors += passes, l.ideal += passes > 0, k.c.conflicts += std::max(0, passes - 1);
    }
}
static void count(const Group &g) { // one instruction of a warp
    const Record *r = *std::find_if(g.lane, g.lane + 32, [](const Record *r) { return r != nullptr; });
    Kernelcount &k = *counted;
    if (r->space == 'b') {
        long most = 0, all = 0;
        for (const Record *x : g.lane) most = std::max<long>(most, x ? x->bytes : 0), all += x ? x->bytes : 0;
        k.c.issued += most, k.c.active += all, k.basic_blocks[r->pc] += all;
        return;
    }
    EmuLine &l = k.lines[key(*r)];
    l.pc = r->pc, l.space = r->space, l.kind = "rwa"[r->kind], l.bytes = r->bytes;
    l.requests++, l.lanes += g.n;
    if (r->space == 'g') count_global(l, g, k);
    else count_shared(l, g, k);
}
static void flush(int warp) {
    std::vector<Record> *r = records + warp * 32, *first = std::find_if(r, r + 32, [](auto &v) { return !v.empty(); });
    if (first == r + 32) return;
    bool same = true; // did the lanes that did anything do the same?
    for (auto *v = first; v < r + 32; v++) same &= v->empty() || v->size() == first->size();
    for (auto *v = first; same && v < r + 32; v++)
        same = v->empty() || std::equal(v->begin(), v->end(), first->begin(),
                                        [](const Record &a, const Record &b) { return key(a) == key(b); });
    for (size_t i = 0; same && i < first->size(); i++) {
        Group g;
        for (int lane = 0; lane < 32; lane++)
            if (!r[lane].empty()) g.lane[lane] = &r[lane][i], g.n++;
        count(g);
    }
    std::unordered_map<uint64_t, std::vector<Group>> groups;
    for (int lane = 0; !same && lane < 32; lane++) {
        std::unordered_map<uint64_t, size_t> seen;
        for (const Record &x : r[lane]) {
            const size_t i = seen[key(x)]++;
            auto &v = groups[key(x)];
            if (v.size() <= i) v.push_back(Group());
            v[i].lane[lane] = &x, v[i].n++;
        }
    }
    for (auto &entry : groups)
        for (const Group &g : entry.second) count(g);
    for (int lane = 0; lane < 32; lane++) r[lane].clear();
}

// Arithmetic instructions of each basic block, from a disassembly of this very program: scalar operations count 1,
// fused ones and calls of fmaf 2, calls of a mathematical function 1.
static int flops_of(const char *op, const char *rest) {
    static const char *names[] = {"addss", "subss", "mulss", "divss", "maxss", "minss",  "sqrtss", "fadd",
                                  "fsub",  "fmul",  "fdiv",  "fmax",  "fmin",  "fmaxnm", "fminnm", "fsqrt"};
    static const char *functions[] = {"expf", "exp2f", "logf", "log2f", "powf",  "tanhf",
                                      "sinf", "cosf",  "erff", "sqrtf", "fmaxf", "fminf"};
    if (!strncmp(op, "vfm", 3) || !strncmp(op, "vfnm", 4) || !strcmp(op, "fmadd") || !strcmp(op, "fmsub") ||
        strstr(rest, "<fmaf@"))
        return 2;
    for (const char *n : names)
        if (!strcmp(op + (op[0] == 'v'), n)) return 1;
    for (const char *n : functions)
        if (const char *at = strstr(rest, n))
            if (at[-1] == '<' && at[strlen(n)] == '@') return 1;
    return 0;
}
static const std::unordered_map<Pc, int> &static_flops() {
    static std::unordered_map<Pc, int> m;
    static bool done;
    if (done) return m;
    done = true;
    std::string command = "objdump -d --no-show-raw-insn /proc/" + std::to_string(getpid()) + "/exe";
    FILE *f = popen(command.c_str(), "r");
    char line[600];
    Pc block = 0;
    bool next = false;
    while (f && fgets(line, sizeof line, f)) {
        unsigned long a;
        char op[40];
        int n = 0;
        if (sscanf(line, " %lx: %39s%n", &a, op, &n) != 2) { block = 0; continue; } // a new function
        if (next) block = a, next = false;
        if (strstr(line, "<__sanitizer_cov_trace_pc>")) next = true;
        else if (block)
            if (int flops = flops_of(op, line + n)) m[block] += flops;
    }
    if (f) pclose(f);
    return m;
}

// ---- the hooks
static void record(Pc pc, const void *address, size_t n, Access kind, bool warp = false) {
    if (!cur) return;
    const char *p = (const char *)address;
    bool shared = p >= engine->window && p < engine->window + WINDOW, global = in_arena(p);
    if (!shared && !global && !is_symbol(p)) return; // the thread's own
    if (shared) {
        size_t at = p - engine->window;
        bool in =
            engine->dynamic_at && at >= engine->dynamic_at && at + n <= engine->dynamic_at + engine->launch.dynamic;
        for (auto &s : engine->statics) in |= at >= s.first && at + n <= s.first + s.second;
        if (!in) fail("%s:%d: shared memory access out of bounds", place(pc).file.c_str(), place(pc).line);
    } else if (global && !in_allocation(p, n))
        fail("%s:%d: global memory access out of bounds: %zu bytes at %p", place(pc).file.c_str(), place(pc).line, n,
             address);
    if (racing) {
        Cell c = cell(pc, (uint16_t)(warp ? WHOLE_WARP + cur->warp * 32 : cur->tid), kind);
        check_races(p, n, c, clocks[cur->warp], shared, global);
    }
    if (counting) records[cur->tid].push_back({pc, p, (uint16_t)n, (uint8_t)kind, shared ? 's' : 'g'});
}
static void join(Clock &into, const Clock &from) {
    for (int i = 0; i <= PRODUCTS; i++) into.at[i] = std::max(into.at[i], from.at[i]);
}
void trace_launch(Kernel *k, const Launch &l) {
    if (!global_shadow && racing) {
        auto map = [](size_t n) {
            void *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) fail("the race detector needs %zu bytes of address space: set EMU_MEMORY lower", n);
            return (Shadow *)p;
        };
        if (arena) global_shadow = map(arena_size / 4 * sizeof(Shadow));
        if (!shared_shadow) shared_shadow = map(WINDOW / 4 * sizeof(Shadow));
    }
    first_serial = serial + 1;
    releases.clear();
    released.clear();
    if (!counting) return;
    counted = &counts[kernel_name(k->name)];
    counted->sectors.clear();
    counted->c.launches++, counted->c.blocks += (long)l.grid.x * l.grid.y * l.grid.z;
    counted->c.threads += (long)l.grid.x * l.grid.y * l.grid.z * l.block.x * l.block.y * l.block.z;
}
void trace_launch_end(Kernel *k, const Launch &l) {
    if (!counting) return;
    counted->c.shared = std::max(counted->c.shared, (long)l.dynamic + k->static_bytes);
    for (auto &s : counted->sectors) counted->c.needed += s.second == 3 ? 64 : 32;
}
void trace_block_begin() {
    serial++;
    memset(clocks, 0, sizeof clocks);
    memset(syncs, 0, sizeof syncs);
    memset(barrier_clock, 0, sizeof barrier_clock);
    memset(fences, 0, sizeof fences);
    fence_clock.clear();
    memset(ticks, 0, sizeof ticks);
    for (int w = 0; w < MAX_WARPS; w++) clocks[w].at[w] = 1;
    acquired.clear();
    fenced.assign(MAX_THREADS, false);
}
void trace_block_end() {
    for (int w = 0; counting && w < engine->nwarps; w++) flush(w);
    if (counting) counted->c.barriers += engine->barriers;
}
void trace_converge(int warp, unsigned lanes, bool ordered) {
    if (ordered) syncs[warp]++;
    if (counting && lanes == engine->warps[warp].live) flush(warp);
}
void trace_arrive(int barrier) {
    int w = cur->warp;
    join(barrier_clock[barrier], clocks[w]);
    clocks[w].at[w]++;
}
void trace_depart(int barrier, const unsigned *lanes) {
    for (int w = 0; w < engine->nwarps; w++)
        if (lanes[w]) {
            join(clocks[w], barrier_clock[barrier]);
            syncs[w]++;
            if (counting) flush(w);
        }
    barrier_clock[barrier] = Clock();
}
void trace_access(void *pc, const void *p, size_t n, Access kind, bool warp) { record((Pc)pc, p, n, kind, warp); }
void trace_landing(void *pc, const void *p, size_t n) { // a write, as far as order goes; counted when it was issued
    bool c = counting;
    counting = false;
    record((Pc)pc, p, n, WRITE);
    counting = c;
}
void trace_release(Clock &c) {
    join(c, clocks[cur->warp]);
    clocks[cur->warp].at[cur->warp]++;
}
void trace_join(Clock &into, const Clock &c) { join(into, c); }
void trace_acquire(const Clock &c) {
    join(clocks[cur->warp], c);
    syncs[cur->warp]++;
}
void trace_snapshot(Clock &c) {
    c = clocks[cur->warp];
    clocks[cur->warp].at[cur->warp]++;
}
void trace_async(int who, void *pc, const void *address, size_t n, Access kind, const Clock &start) {
    const char *p = (const char *)address;
    bool shared = p >= engine->window && p < engine->window + WINDOW;
    ticks[who]++;
    if (!racing || (!shared && !in_arena(p))) return;
    check_races(p, n, cell((Pc)pc, (uint16_t)(WHOLE_WARP + who * 32), kind), start, shared, !shared);
    if (shared && kind == READ) check_proxy((Pc)pc, p, n, start);
    if (shared || !counting) return;
    (kind == READ ? counted->c.read : counted->c.written) += (long)n;
    touch(*counted, (uintptr_t)p / 32, kind == READ ? 'r' : 'w');
}
void trace_async_done(int who, Clock &into, const Clock &start) {
    Clock c = start;
    c.at[who] = ticks[who];
    join(into, c);
}
void trace_sync_read(void *pc, const void *p, size_t n) {
    bool c = counting;
    counting = false;
    record((Pc)pc, p, n, READ); // what initialised it must come before
    counting = c;
}
void trace_proxy_fence() {
    fences[cur->tid]++;
    fence_clock[cur->tid] = clocks[cur->warp];
    clocks[cur->warp].at[cur->warp]++;
}
void trace_mma(long flops) {
    if (counting) counted->c.mma_flops += flops;
}
__attribute__((noinline)) void access(const void *p, size_t n, Access kind) {
    record((Pc)__builtin_return_address(0), p, n, kind);
    if (kind != ATOMIC || !in_arena(p) || !racing) return;
    size_t &count = released[p];
    if (count) acquired.push_back(event(p, count));
    if (fenced[cur->tid]) releases[serial].push_back(event(p, count++));
    clocks[cur->warp].at[cur->warp]++;
}
void fence() {
    if (cur) fenced[cur->tid] = true;
}
void copy(void *to, const void *from, size_t n) { memcpy(to, from, n); }
} // namespace emu
using namespace emu;

int emu_races() { return races; }
bool emu_traces() { return true; }
void emu_count(bool on) {
    if (on) counts.clear();
    counting = on;
}
const EmuCount *emu_counts(const char *name) {
    for (auto &entry : counts) {
        Kernelcount &k = entry.second;
        if (entry.first != name && entry.first.substr(0, entry.first.find('<')) != name) continue;
        std::string own = entry.first.substr(0, entry.first.find('<'));
        own.erase(0, own.rfind(':') + 1);
        static std::set<std::string> files; // keeps the names
        std::map<std::tuple<const char *, int, int, int, int>, EmuLine> merged; // unrolled copies of a line are one
        for (auto &l : k.lines) {
            const Frame &p = place((Pc)l.second.pc);
            EmuLine x = l.second;
            x.file = files.insert(p.file).first->c_str(), x.path = files.insert(p.path).first->c_str();
            x.line = p.line, x.outer = own_line(frames((Pc)x.pc), own);
            EmuLine &m = merged[{x.file, x.outer, x.line, x.space * 256 + x.kind, x.bytes}];
            long sums[4] = {m.requests, m.lanes, m.sectors, m.ideal};
            m = x;
            m.requests += sums[0], m.lanes += sums[1], m.sectors += sums[2], m.ideal += sums[3];
        }
        k.sorted.clear();
        for (auto &m : merged) k.sorted.push_back(m.second);
        k.c.flops = 0;
        auto &flops = static_flops();
        for (auto &b : k.basic_blocks) {
            auto f = flops.find(b.first);
            if (f != flops.end()) k.c.flops += b.second * f->second;
        }
        k.name = entry.first;
        k.c.name = k.name.c_str(), k.c.nlines = (int)k.sorted.size(), k.c.lines = k.sorted.data();
        return &k.c;
    }
    return nullptr;
}
const char *emu_kernel(int i) {
    for (auto &entry : counts)
        if (i-- == 0) return entry.first.c_str();
    return nullptr;
}

// A line of a source file without its indentation; empty if the file is not there.
static std::string source(const char *path, int line) {
    static std::map<std::string, std::vector<std::string>> files;
    auto found = files.find(path);
    if (found == files.end()) {
        auto &lines = files[path];
        if (FILE *f = fopen(path, "r")) {
            for (char text[1000]; fgets(text, sizeof text, f);) {
                text[strcspn(text, "\n")] = 0;
                lines.push_back(text + strspn(text, " "));
            }
            fclose(f);
        }
        found = files.find(path);
    }
    return line >= 1 && line <= (int)found->second.size() ? found->second[line - 1] : "";
}
static void report_line(const EmuLine &l) {
    const double r = (double)l.requests, got = (double)l.sectors / r, best = (double)l.ideal / r;
    char where[40] = "";
    if (l.line != l.outer) snprintf(where, sizeof where, "line %d: ", l.line);
    printf("      %14s%s %-6s %2d bytes %9ld requests %5.1f lanes  %6.2f %s (at best %.2f)%s\n", where,
           l.space == 'g' ? "global" : "shared", l.kind == 'r' ? "load" : l.kind == 'w' ? "store" : "atomic", l.bytes,
           l.requests, (double)l.lanes / r, got, l.space == 'g' ? "sectors" : "passes ", best,
           got > 1.05 * best ? " <--" : "");
}
void emu_report(const char *name) {
    for (auto &entry : counts) {
        if (name && entry.first != name && entry.first.substr(0, entry.first.find('<')) != name) continue;
        const EmuCount *c = emu_counts(entry.first.c_str());
        printf("%s: %ld launches, %ld blocks, %ld threads, %ld block barriers, %ld bytes of shared memory a block\n",
               c->name, c->launches, c->blocks, c->threads, c->barriers, c->shared);
        printf("  global memory: %ld bytes read, %ld written; with a perfect cache %ld\n", c->read, c->written,
               c->needed);
        printf("  arithmetic: %ld, tensor cores: %ld; %.1f of 32 lanes active; %ld bank conflicts\n", c->flops,
               c->mma_flops, c->issued ? (double)c->active / (double)c->issued : 32.0, c->conflicts);
        for (int i = 0; i < c->nlines; i++) { // in order of files and the kernel's own lines
            const EmuLine &l = c->lines[i];
            if (!i || l.outer != (&l)[-1].outer || l.file != (&l)[-1].file)
                printf("  %s:%d  %s\n", l.file, l.outer, source(l.path, l.outer).c_str());
            report_line(l);
        }
    }
}
extern "C" {
#define PC ((Pc)__builtin_return_address(0))
#define HOOK(n) \
    void __tsan_read##n(void *p) { record(PC, p, n, READ); } \
    void __tsan_write##n(void *p) { record(PC, p, n, WRITE); } \
    void __tsan_unaligned_read##n(void *p) { record(PC, p, n, READ); } \
    void __tsan_unaligned_write##n(void *p) { record(PC, p, n, WRITE); } \
    void __tsan_volatile_read##n(void *p) { record(PC, p, n, READ); } \
    void __tsan_volatile_write##n(void *p) { record(PC, p, n, WRITE); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void *p, size_t n) { record(PC, p, n, READ); }
void __tsan_write_range(void *p, size_t n) { record(PC, p, n, WRITE); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __sanitizer_cov_trace_pc() {
    if (!cur || !counting) return;
    auto &v = records[cur->tid];
    if (!v.empty() && v.back().pc == PC && v.back().bytes < UINT16_MAX) v.back().bytes++; // a loop of one block
    else v.push_back({PC, nullptr, 1, 0, 'b'});
}
}
#endif

// hopper.cc - what sm_90a adds: mbarriers, TMA, wgmma. All of it is asynchronous, and late here: a copy lands when
// every thread of the block is waiting, a product appears when its warp waits for it (EMU_ASYNC=early: at once).
#include "ptx.h"
#include <algorithm>
#include <deque>
#include <map>
#include <memory>

namespace emu {
struct TensorMap { // fits CUtensorMap's 128 bytes
    char *address;
    uint64_t strides[4]; // bytes between neighbours of dimension 1, 2, ...
    uint32_t dimensions[5];
    uint16_t box[5];
    uint8_t rank, bytes, swizzle, valid; // bytes of an element; swizzle: 0, or 32, 64, 128
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a tensor map has 128 bytes");
struct Mbarrier { int expected, pending; long bytes; int phase; Clock arrived, done; };
struct Bulk { // a copy by TMA
    void *pc;
    const char *site;
    TensorMap map; // rank 0: plain bytes
    int at[5];
    char *global;
    uint32_t shared, bytes, mbarrier;
    Clock clock;
    int group;
    std::string staged; // a store that has read shared memory, and not yet written
};
struct Accumulator { // of one warp: 16 rows
    int columns, uses; // uses: products in flight
    float *lane[32][128];
    float v[16][256];
};
struct Product { // one warp's part of a wgmma
    const Instruction *in; // null when it has been carried out
    void *pc;
    const char *site;
    uint64_t a, b;
    uint32_t registers[32][4]; // A, unless it is in shared memory
    bool keep, negate, trans_a, trans_b;
    int group;
    std::shared_ptr<Accumulator> d;
    Clock clock;
};
struct WarpProducts {
    std::deque<Product> open;
    std::vector<std::shared_ptr<Accumulator>> live;
    int group = 0;
    size_t issued = 0; // so far, open ones included
    bool fenced = false;
};
struct ThreadStores { std::deque<Bulk> open; int group = 0; };
struct Hopper {
    std::map<uint32_t, Mbarrier> mbarriers;
    std::deque<Bulk> loads;
    std::map<int, ThreadStores> stores;
    std::vector<Bulk> staged; // stores whose data are written when the block ends
    WarpProducts warps[MAX_WARPS];
    std::vector<std::pair<uint64_t, uint64_t>> order[MAX_WARPS / 4]; // descriptors, by a warpgroup's first warp
};
static __thread Hopper *hopper;

// ---- mbarriers (PTX ISA, "mbarrier"): a phase ends when the arrivals and the bytes that it expects have come
static const char MARK[9] = "mbarrier"; // what shared memory holds there: the real contents are nobody's business
static Mbarrier &mbarrier(const char *site, uint32_t a) {
    check_shared(site, a, 8, 8);
    auto m = hopper->mbarriers.find(a);
    if (m == hopper->mbarriers.end()) fail("%s: there is no mbarrier at shared address %#x", site, a);
    if (memcmp(generic_address(a), MARK, 8)) fail("%s: the mbarrier at shared address %#x was overwritten", site, a);
    return m->second;
}
static void end_phase(uint32_t a, Mbarrier &m) {
    if (m.pending || m.bytes) return;
    m.phase++, m.pending = m.expected, m.done = m.arrived;
    Engine &e = *engine;
    for (int i = 0; i < e.nthreads; i++) {
        Thread &t = e.th[i];
        if (t.state == AT_MBARRIER && t.address == a && (uint32_t)(m.phase & 1) != t.parity) wake(t);
    }
}
void run_mbarrier_init(const Instruction &in, Frame &f) {
    uint32_t a = value(in.args[0], f), n = value(in.args[1], f);
    check_shared(f.site, a, 8, 8);
    if (n < 1 || n >= 1 << 20) fail("%s: an mbarrier counts 1 to 2^20 - 1 arrivals, not %u", f.site, n);
    hopper->mbarriers[a] = {(int)n, (int)n, 0, 0, {}, {}};
    memcpy(generic_address(a), MARK, 8);
    trace_access(f.pc, generic_address(a), 8, WRITE, false);
}
void run_mbarrier_invalidate(const Instruction &in, Frame &f) {
    uint32_t a = value(in.args[0], f);
    mbarrier(f.site, a);
    hopper->mbarriers.erase(a);
}
static void expect(Frame &f, Mbarrier &m, const Argument &bytes) {
    m.bytes += value(bytes, f);
    if (m.bytes >= 1 << 20) fail("%s: an mbarrier counts bytes up to 2^20 - 1", f.site);
}
void run_mbarrier_arrive(const Instruction &in, Frame &f) { // _, [a]{, count} or, .expect_tx, _, [a], bytes
    if (in.args[0].type != '_')
        fail("%s: mbarrier.arrive: write _ for its state; only parity waits are emulated", f.site);
    uint32_t a = value(in.args[1], f);
    Mbarrier &m = mbarrier(f.site, a);
    trace_sync_read(f.pc, generic_address(a), 8);
    if (in.flag) expect(f, m, in.args[2]);
    m.pending -= !in.flag && in.args.size() > 2 ? (int)value(in.args[2], f) : 1;
    if (m.pending < 0) fail("%s: more arrivals than the %d that the mbarrier counts", f.site, m.expected);
    trace_release(m.arrived);
    end_phase(a, m);
}
void run_mbarrier_expect(const Instruction &in, Frame &f) {
    expect(f, mbarrier(f.site, value(in.args[0], f)), in.args[1]);
}
// p, [a], parity: waits for the end of the phase of that parity
void run_mbarrier_wait(const Instruction &in, Frame &f) {
    uint32_t a = value(in.args[1], f), parity = value(in.args[2], f) & 1;
    Mbarrier *m = &mbarrier(f.site, a);
    trace_sync_read(f.pc, generic_address(a), 8);
    if ((uint32_t)(m->phase & 1) == parity) {
        if (in.flag2) pause(f.site);
        else {
            self().address = a, self().parity = parity;
            wait_here(AT_MBARRIER, "mbarrier.try_wait", f.site);
        }
        m = &mbarrier(f.site, a);
    }
    uint32_t done = (uint32_t)(m->phase & 1) != parity;
    if (done) trace_acquire(m->done);
    memcpy(pointer(in.args[0], f), &done, 4);
}

// ---- TMA (PTX ISA, "cp.async.bulk.tensor", "Swizzling modes"). A box's elements lie in shared memory one after
// another, the first dimension innermost; swizzling then exchanges 16-byte pieces by the address's own bits.
static uint32_t swizzled(uint32_t a, int swizzle) {
    return swizzle == 128  ? a ^ (a >> 3 & 0x70)
           : swizzle == 64 ? a ^ (a >> 3 & 0x30)
           : swizzle == 32 ? a ^ (a >> 3 & 0x10)
                           : a;
}
// Calls piece(shared address, global address or null where the box sticks out, bytes) for every 16 bytes of the box, or
// less at the tensor's edge.
template <class F> static void each_piece(const Bulk &c, F piece) {
    const TensorMap &m = c.map;
    if (!m.rank) {
        for (uint32_t i = 0; i < c.bytes; i += 16) piece(c.shared + i, c.global + i, 16);
        return;
    }
    int row = m.box[0] * m.bytes, rows = (int)c.bytes / row, per = 16 / m.bytes;
    for (int r = 0; r < rows; r++) {
        char *from = m.address;
        bool inside = true;
        for (int d = 1, left = r; d < m.rank; left /= m.box[d++]) {
            long i = c.at[d] + left % m.box[d];
            inside &= i >= 0 && i < (long)m.dimensions[d];
            from += i * (long)m.strides[d - 1];
        }
        for (int x = 0; x < m.box[0]; x += per) {
            uint32_t to = swizzled(c.shared + (uint32_t)(r * row + x * m.bytes), m.swizzle);
            long first = c.at[0] + x, last = first + per;
            if (inside && first >= 0 && last <= (long)m.dimensions[0]) piece(to, from + first * m.bytes, 16);
            else for (int i = 0; i < per; i++) {
                bool in = inside && first + i >= 0 && first + i < (long)m.dimensions[0];
                piece(to + i * m.bytes, in ? from + (first + i) * m.bytes : nullptr, m.bytes);
            }
        }
    }
}
static void check_global(const Bulk &c, const char *p, int n) {
    if (!in_allocation(p, n)) fail("%s: TMA: %d bytes at %p are not in device memory", c.site, n, (const void *)p);
}
static void complete_load(Bulk &c) {
    each_piece(c, [&](uint32_t to, const char *from, int n) {
        if (from) check_global(c, from, n), memcpy(generic_address(to), from, n);
        else memset(generic_address(to), 0, n);
        trace_async(COPIES, c.pc, generic_address(to), n, WRITE, c.clock);
        if (from) trace_async(COPIES, c.pc, from, n, READ, c.clock);
    });
    Mbarrier &m = mbarrier(c.site, c.mbarrier);
    trace_async_done(COPIES, m.arrived, c.clock);
    m.bytes -= c.bytes;
    end_phase(c.mbarrier, m);
}
static void read_store(Bulk &c) {
    each_piece(c, [&](uint32_t from, const char *to, int n) {
        trace_async(COPIES, c.pc, generic_address(from), n, READ, c.clock);
        if (to) trace_async(COPIES, c.pc, to, n, WRITE, c.clock), c.staged.append((char *)generic_address(from), n);
    });
}
static void write_store(Bulk &c) {
    size_t i = 0;
    each_piece(c, [&](uint32_t, char *to, int n) {
        if (to) check_global(c, to, n), memcpy(to, &c.staged[i], n), i += n;
    });
}
static Bulk tensor_copy(const Instruction &in, Frame &f, const Argument &map, size_t coordinates,
                        const Argument &shared) {
    Bulk c = {f.pc, f.site, {}, {}, nullptr, value(shared, f), 0, 0, {}, 0, {}};
    memcpy(&c.map, (void *)value64(map, f), sizeof c.map);
    const TensorMap &m = c.map;
    if (m.valid != 1 || m.rank < 1 || m.rank > 5) fail("%s: this is no tensor map", f.site);
    if (m.rank != in.count) fail("%s: %s on a tensor of %d dimensions", f.site, in.op.c_str(), m.rank);
    c.bytes = m.bytes;
    for (int i = 0; i < m.rank; i++) c.at[i] = (int)value(in.args[coordinates + i], f), c.bytes *= m.box[i];
    check_shared(f.site, c.shared, c.bytes, 128);
    trace_snapshot(c.clock);
    return c;
}
static void start_load(Bulk c) {
    mbarrier(c.site, c.mbarrier);
    if (at_once()) complete_load(c);
    else hopper->loads.push_back(std::move(c));
}
static void start_store(Bulk c) {
    ThreadStores &s = hopper->stores[cur->tid];
    c.group = s.group;
    if (at_once()) read_store(c);
    s.open.push_back(std::move(c));
}
void run_tma_load(const Instruction &in, Frame &f) { // [shared], [map, {coordinates}], [mbarrier]
    Bulk c = tensor_copy(in, f, in.args[1], 2, in.args[0]);
    c.mbarrier = value(in.args[2 + in.count], f);
    start_load(std::move(c));
}
void run_tma_store(const Instruction &in, Frame &f) { // [map, {coordinates}], [shared]
    start_store(tensor_copy(in, f, in.args[0], 1, in.args[1 + in.count]));
}
static Bulk plain_copy(Frame &f, const Argument &shared, const Argument &global, const Argument &bytes) {
    Bulk c = {f.pc, f.site, {}, {}, (char *)value64(global, f), value(shared, f), value(bytes, f), 0, {}, 0, {}};
    if (c.bytes % 16 || (uintptr_t)c.global % 16) fail("%s: a bulk copy goes by 16 bytes", f.site);
    check_shared(f.site, c.shared, c.bytes, 16);
    trace_snapshot(c.clock);
    return c;
}
void run_bulk_load(const Instruction &in, Frame &f) { // [shared], [global], bytes, [mbarrier]
    Bulk c = plain_copy(f, in.args[0], in.args[1], in.args[2]);
    c.mbarrier = value(in.args[3], f);
    start_load(std::move(c));
}
void run_bulk_store(const Instruction &in, Frame &f) { start_store(plain_copy(f, in.args[1], in.args[0], in.args[2])); }
void run_bulk_commit(const Instruction &, Frame &) { hopper->stores[cur->tid].group++; }
// .read: until shared memory may be written again; else until all is done
void run_bulk_wait(const Instruction &in, Frame &f) {
    ThreadStores &s = hopper->stores[cur->tid];
    int pending = (int)value(in.args[0], f);
    for (Bulk &c : s.open)
        if (c.group < s.group - pending) {
            if (c.staged.empty()) read_store(c);
            trace_async_done(COPIES, c.clock, c.clock);
            trace_acquire(c.clock);
        }
    while (!s.open.empty() && s.open.front().group < s.group - pending) {
        if (in.flag) hopper->staged.push_back(std::move(s.open.front())); // written at the latest possible moment
        else {
            for (Bulk &c : hopper->staged) write_store(c);
            hopper->staged.clear();
            write_store(s.open.front());
        }
        s.open.pop_front();
    }
}
void run_proxy_fence(const Instruction &, Frame &) { trace_proxy_fence(); }

// ---- wgmma: D (64 x N) += A (64 x 16) B (16 x N) by four warps; each has 16 rows. PTX ISA, "Matrix Descriptor Format"
// and "Strides": where element (mn, k) of an operand in shared memory lies. K-major: rows of `swizzle` bytes along k,
// eight rows to a group, groups `stride` apart. MN-major: rows of `swizzle` bytes along m or n, one for each k, eight
// to a group, groups `stride` apart; the next `swizzle` bytes of m or n are `leading` away. Without swizzle rows are 16
// bytes, and the next 16 bytes are `leading` away (K-major), or the next group of 8 k is, and the next of 8 mn `stride`
// (MN-major).
struct Descriptor { uint32_t start, leading, stride; int swizzle; };
static Descriptor descriptor(const char *site, uint64_t d) {
    static const int modes[] = {0, 128, 64, 32};
    if (d >> 49 & 7) fail("%s: a matrix descriptor with a base offset is not emulated", site);
    return {(uint32_t)(d & 0x3fff) << 4, (uint32_t)(d >> 16 & 0x3fff) << 4, (uint32_t)(d >> 32 & 0x3fff) << 4,
            modes[d >> 62]};
}
// The address of 8 elements: of row mn from k (a multiple of 8), or, MN-major, of column k from mn (a multiple of 8).
static uint32_t piece_address(const Descriptor &d, bool mn_major, int mn, int k) {
    uint32_t a = d.start;
    if (!mn_major)
        a += d.swizzle ? mn % 8 * d.swizzle + mn / 8 * d.stride + k * 2
                       : mn % 8 * 16 + mn / 8 * d.stride + k / 8 * d.leading;
    else if (d.swizzle) {
        int width = d.swizzle / 2; // elements in a row
        a += mn % width * 2 + mn / width * d.leading + k % 8 * d.swizzle + k / 8 * d.stride;
    } else a += mn / 8 * d.stride + k % 8 * 16 + k / 8 * d.leading;
    return swizzled(a, d.swizzle);
}
// out[k][mn] for mn < n, k < 16
static void load_operand(const Product &p, uint64_t desc, bool mn_major, int first, int n, char type,
                         float (*out)[256]) {
    Descriptor d = descriptor(p.site, desc);
    for (int i = 0; i < (mn_major ? 16 * n / 8 : 2 * n); i++) {
        int mn = mn_major ? i % (n / 8) * 8 : i / 2, k = mn_major ? i / (n / 8) : i % 2 * 8;
        uint32_t a = piece_address(d, mn_major, first + mn, k);
        check_shared(p.site, a, 16, 16);
        trace_async(PRODUCTS, p.pc, generic_address(a), 16, READ, p.clock);
        const uint16_t *h = (const uint16_t *)generic_address(a);
        for (int j = 0; j < 8; j++) {
            float v = type == 'b' ? from_bf16(h[j]) : from_f16(h[j]);
            if (mn_major) out[k][mn + j] = v;
            else out[k + j][mn] = v;
        }
    }
}
static void multiply(Product &p, int warp) {
    if (!p.in) return;
    static __thread float (*A)[256], (*B)[256];
    if (!A) A = new float[16][256], B = new float[16][256];
    const Instruction &in = *p.in;
    int N = in.count;
    if (in.flag) { // A in registers: the fragment of mma.m16n8k16
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 8; i++)
                A[lane % 4 * 2 + i % 2 + i / 4 * 8][lane / 4 + i / 2 % 2 * 8] =
                    element(p.registers[lane][i / 2], i % 2, in.type);
    } else load_operand(p, p.a, p.trans_a, warp % 4 * 16, 16, in.type, A);
    load_operand(p, p.b, p.trans_b, 0, N, in.type, B);
    trace_async_done(PRODUCTS, p.clock, p.clock);
    for (int m = 0; m < 16; m++) {
        float *v = p.d->v[m];
        if (!p.keep) memset(v, 0, N * sizeof *v);
        for (int k = 0; k < 16; k++) {
            float a = p.negate ? -A[k][m] : A[k][m];
            for (int n = 0; n < N; n++) v[n] += a * B[k][n];
        }
    }
    p.in = nullptr;
}
static const uint32_t POISON = 0xffffdead; // a NaN: what an accumulator's registers hold while a product is in flight
template <class F> static void each_register(Accumulator &d, F f) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < d.columns / 2; i++)
            f(d.lane[lane][i], d.v[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
}
static void wgmma_execute(void **data, unsigned) {
    Lane *first = (Lane *)data[0];
    const Instruction &in = *first->in;
    int n = in.count / 2, at = n + (in.flag ? 4 : 1);
    WarpProducts &w = hopper->warps[cur->warp];
    Product p = {};
    p.in = &in, p.pc = first->f->pc, p.site = first->f->site, p.b = value64(in.args[at], *first->f), p.group = w.group;
    trace_snapshot(p.clock);
    uint32_t rest[5] = {0, 1, 1, 0, 0}; // scale-d, signs of A and B, transpositions of A and B
    for (size_t i = at + 1; i < in.args.size(); i++) rest[i - at - 1] = value(in.args[i], *first->f);
    p.keep = rest[0] & 1, p.negate = ((int)rest[1] < 0) != ((int)rest[2] < 0);
    p.trans_a = !in.flag && rest[3], p.trans_b = in.flag ? rest[3] : rest[4];
    if (!in.flag) p.a = value64(in.args[n], *first->f);
    for (int lane = 0; lane < 32; lane++) {
        Frame &f = *((Lane *)data[lane])->f;
        for (int i = 0; in.flag && i < 4; i++) p.registers[lane][i] = value(in.args[n + i], f);
        if (value64(in.args[at], f) != p.b || (!in.flag && value64(in.args[n], f) != p.a))
            fail("%s: lanes of a warp give wgmma different descriptors", p.site);
    }
    auto &order = hopper->order[cur->warp / 4];
    if (w.issued == order.size()) order.push_back({p.a, p.b});
    else if (order[w.issued] != std::make_pair(p.a, p.b))
        fail("%s: warps of a warpgroup execute different wgmma", p.site);
    w.issued++;
    float *key = (float *)pointer(in.args[0], *first->f);
    for (auto &d : w.live)
        if (d->lane[0][0] == key && d->columns == in.count) p.d = d;
    if (!p.d) { // registers that were the thread's own until now
        if (!w.fenced) fail("%s: wgmma.mma_async after the accumulators were used, without wgmma.fence", p.site);
        p.d = std::make_shared<Accumulator>();
        p.d->columns = in.count;
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < n; i++) p.d->lane[lane][i] = (float *)pointer(in.args[i], *((Lane *)data[lane])->f);
        each_register(*p.d, [](float *r, float &v) { v = *r, memcpy(r, &POISON, 4); });
        w.live.push_back(p.d);
    }
    p.d->uses++;
    w.open.push_back(std::move(p));
    if (at_once())
        for (Product &q : w.open) multiply(q, cur->warp); // in order
    trace_mma(2L * 16 * 16 * in.count);
    for (int t = cur->warp / 4 * 128; t < cur->warp / 4 * 128 + 128; t++) // others may have waited for this warp's part
        if (engine->th[t].state == AT_WARPGROUP) wake(engine->th[t]);
}
void run_wgmma(const Instruction &in, Frame &f) {
    if (engine->nwarps % 4) fail("%s: wgmma needs whole warpgroups of 128 threads", f.site);
    aligned(in, f, wgmma_execute);
}
void run_wgmma_fence(const Instruction &in, Frame &f) {
    aligned(in, f, [](void **, unsigned) { hopper->warps[cur->warp].fenced = true; });
}
void run_wgmma_commit(const Instruction &in, Frame &f) {
    aligned(in, f, [](void **, unsigned) { hopper->warps[cur->warp].group++; });
}
// A product is the warpgroup's: it is over for all four warps when it is over for one, and none before all have begun
// it.
void run_wgmma_wait(const Instruction &in, Frame &f) {
    WarpProducts &mine = hopper->warps[cur->warp], *four = &hopper->warps[cur->warp / 4 * 4];
    size_t until = mine.issued - mine.open.size();
    for (const Product &p : mine.open) until += p.group < mine.group - (int)value(in.args[0], f);
    while (std::any_of(four, four + 4, [&](const WarpProducts &w) { return w.issued < until; }))
        wait_here(AT_WARPGROUP, "wgmma.wait_group, for other warps to begin", f.site);
    aligned(in, f, [](void **data, unsigned) {
        Lane *l = (Lane *)data[0];
        int warp = cur->warp, pending = (int)value(l->in->args[0], *l->f);
        WarpProducts &w = hopper->warps[warp];
        while (!w.open.empty() && w.open.front().group < w.group - pending) {
            size_t number = w.issued - w.open.size();
            Clock all = w.open.front().clock;
            for (int round = 0; round < 2; round++) // carried out, then known to all four
                for (int i = warp / 4 * 4; i < warp / 4 * 4 + 4; i++) {
                    WarpProducts &other = hopper->warps[i];
                    size_t first = other.issued - other.open.size();
                    if (number < first) continue;
                    Product &part = other.open[number - first];
                    if (round == 0) multiply(part, i), trace_join(all, part.clock);
                    else trace_join(part.clock, all);
                }
            Product &p = w.open.front();
            trace_acquire(p.clock);
            if (!--p.d->uses) { // no product in flight uses it: the registers are the thread's again
                each_register(*p.d, [&](float *r, float &v) {
                    if (memcmp(r, &POISON, 4)) fail("%s: an accumulator was touched before wgmma.wait_group", p.site);
                    *r = v;
                });
                w.live.erase(std::find(w.live.begin(), w.live.end(), p.d));
                w.fenced = false;
            }
            w.open.pop_front();
        }
    });
}

// ---- blocks
void hopper_begin() {
    if (!hopper) hopper = new Hopper();
    else if (!hopper->mbarriers.empty() || hopper->warps[0].issued) *hopper = Hopper();
}
bool hopper_progress() {
    auto &q = hopper->loads;
    if (q.empty()) return false;
    size_t i = settings().order == 2 ? random_next(engine->random) % q.size() : 0; // copies may pass each other
    Bulk c = std::move(q[i]);
    q.erase(q.begin() + i);
    complete_load(c);
    return true;
}
void hopper_thread_end() {
    auto s = hopper->stores.find(cur->tid);
    if (s != hopper->stores.end() && !s->second.open.empty())
        fail("%s: the thread returns while bulk stores may still read shared memory", s->second.open.front().site);
    WarpProducts &w = hopper->warps[cur->warp];
    if (!w.open.empty()) fail("%s: the warp returns with wgmma in flight", w.open.front().site);
}
void hopper_block_end() {
    if (!hopper->loads.empty()) fail("%s: the block ends with a TMA load in flight", hopper->loads.front().site);
    for (Bulk &c : hopper->staged) write_store(c);
    hopper->staged.clear();
    hopper->stores.clear();
    for (int w = 0; w < MAX_WARPS; w++)
        if (hopper->warps[w].issued != hopper->order[w / 4].size() && hopper->order[w / 4].size())
            fail("a wgmma that not all four warps of the warpgroup execute");
}
} // namespace emu

// ---- tensor maps (CUDA Driver API, "Tensor Map Object Management"): the rules are the driver's
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dimensions, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    emu::TensorMap m = {};
    auto wrong = [](const char *why) {
        emu::report(cudaErrorInvalidValue, "cuTensorMapEncodeTiled: %s", why);
        return CUDA_ERROR_INVALID_VALUE;
    };
    if (rank < 1 || rank > 5) return wrong("a tensor has 1 to 5 dimensions");
    if ((uintptr_t)map % 64) return wrong("the map is not aligned to 64 bytes");
    if ((uintptr_t)address % 16) return wrong("the tensor is not aligned to 16 bytes");
    m.address = (char *)address, m.rank = (uint8_t)rank, m.bytes = bytes[type], m.valid = 1;
    m.swizzle = swizzle ? (uint8_t)(16 << swizzle) : 0;
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!dimensions[i] || dimensions[i] > 1ull << 32) return wrong("a dimension is 1 to 2^32");
        if (!box[i] || box[i] > 256) return wrong("a box has 1 to 256 elements in each dimension");
        if (element_strides[i] != 1) return wrong("element strides other than 1 are not emulated");
        m.dimensions[i] = (uint32_t)dimensions[i], m.box[i] = (uint16_t)box[i];
        if (i + 1 < rank) {
            if (strides[i] % 16 || strides[i] >= 1ull << 40)
                return wrong("a stride is a multiple of 16 bytes below 2^40");
            m.strides[i] = strides[i];
        }
    }
    if (box[0] * m.bytes % 16) return wrong("the box's first dimension is not a multiple of 16 bytes");
    if (m.swizzle && box[0] * m.bytes > m.swizzle) return wrong("the box's first dimension is longer than the swizzle");
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

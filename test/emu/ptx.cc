// ptx.cc - inline PTX. The text of an asm statement is parsed when it is first met; each instruction is a function
// below. Layouts of fragments and of shared memory: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions" and
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions". What is unknown stops, with its text.
#include "ptx.h"
#include <map>
#include <mutex>

namespace emu {
struct Program {
    std::vector<Instruction> code;
    std::string kinds, modes;       // of the statement's operands
    bool single = false;            // one instruction, no registers
};
// ---- mma.sync: D = A B + C, one 16 x 8 tile per warp. With g = lane / 4 and t = lane % 4, "Matrix Fragments for
// mma.m16n8k16": a register of A holds two neighbours in k of row g (or g + 8), of B two neighbours in k of column g; C
// and D hold columns 2t, 2t + 1 of rows g and g + 8.
static void mma_execute(void **data, unsigned) {
    const Instruction &in = *((Lane *)data[0])->in;
    int k = in.count, na = in.type == 't' ? 4 : k / 4, nb = na / 2; // registers of A and of B
    float A[16][16], B[16][8], D[16][8];
    for (int lane = 0; lane < 32; lane++) {
        Operand *ops = ((Lane *)data[lane])->f->ops;
        auto word = [&](int i) { return *(uint32_t *)ops[in.args[i].index].p; };
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < na; i++) {
            uint32_t w = word(4 + i);
            int row = g + (i & 1) * 8;
            if (in.type == 't') A[row][t + (i >> 1) * 4] = emu_bits<float>(w & 0xffffe000);
            else for (int h = 0; h < 2; h++) A[row][t * 2 + h + (i >> 1) * 8] = element(w, h, in.type);
        }
        for (int i = 0; i < nb; i++) {
            uint32_t w = word(4 + na + i);
            if (in.type == 't') B[t + i * 4][g] = emu_bits<float>(w & 0xffffe000);
            else for (int h = 0; h < 2; h++) B[t * 2 + h + i * 8][g] = element(w, h, in.type);
        }
        for (int i = 0; i < 4; i++) D[g + (i >> 1) * 8][t * 2 + (i & 1)] = emu_bits<float>(word(4 + na + nb + i));
    }
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < k; j++)
            for (int n = 0; n < 8; n++) D[i][n] += A[i][j] * B[j][n];
    for (int lane = 0; lane < 32; lane++) {
        Operand *ops = ((Lane *)data[lane])->f->ops;
        for (int i = 0; i < 4; i++)
            *(float *)ops[in.args[i].index].p = D[(lane >> 2) + (i >> 1) * 8][(lane & 3) * 2 + (i & 1)];
    }
    trace_mma(2L * 16 * 8 * k);
}
static void run_mma(const Instruction &in, Frame &f) { aligned(in, f, mma_execute); }

// ---- ldmatrix, stmatrix: 8 x 8 matrices of 16 bits. Lane 8 j + i gives the address of row i of matrix j; lane l holds
// elements 2 (l % 4) and the next of row l / 4, or, .trans, of column l / 4.
static uint16_t *matrix_element(uint16_t *const row[8], int lane, int half, bool trans) {
    int i = lane >> 2, j = (lane & 3) * 2 + half;
    return trans ? &row[j][i] : &row[i][j];
}
template <bool Store> static void matrix_execute(void **data, unsigned) {
    const Instruction &in = *((Lane *)data[0])->in;
    int first = Store ? 1 : 0, address = Store ? 0 : in.count;
    for (int j = 0; j < in.count; j++) {
        uint16_t *row[8];
        for (int i = 0; i < 8; i++)
            row[i] = (uint16_t *)generic_address(value(in.args[address], *((Lane *)data[j * 8 + i])->f));
        for (int lane = 0; lane < 32; lane++) {
            uint32_t *r = (uint32_t *)pointer(in.args[first + j], *((Lane *)data[lane])->f), w = *r;
            uint16_t *lo = matrix_element(row, lane, 0, in.flag), *hi = matrix_element(row, lane, 1, in.flag);
            if (Store) *lo = (uint16_t)w, *hi = (uint16_t)(w >> 16);
            else *r = *lo | (uint32_t)*hi << 16;
        }
    }
}
template <bool Store> static void run_matrix(const Instruction &in, Frame &f) {
    if (cur->lane < in.count * 8) {
        uint32_t a = value(in.args[Store ? 0 : in.count], f);
        check_shared(f.site, a, 16, 16);
        trace_access(f.pc, generic_address(a), 16, Store ? WRITE : READ, true);
    }
    aligned(in, f, matrix_execute<Store>);
}

// ---- cp.async: a thread's own copies, global to shared. The data land when the thread waits for them and no earlier,
// or (EMU_ASYNC=early) at once: a kernel must be right both ways.
struct Copy { void *pc; uint32_t to; int bytes, given, group; const void *from; };
struct Copies { std::vector<Copy> open; size_t first = 0; int group = 0; };
struct Async {
    Copies th[MAX_THREADS];
};
static void land(const Copy &c) {
    char *to = (char *)generic_address(c.to);
    memcpy(to, c.from, c.given);
    memset(to + c.given, 0, c.bytes - c.given);
}
static void run_cp_async(const Instruction &in, Frame &f) {
    int n = (int)value(in.args[2], f), given = in.args.size() > 3 + (size_t)in.flag ? (int)value(in.args[3], f) : n;
    Copy c = {f.pc, value(in.args[0], f), n, given, 0, (const void *)value64(in.args[1], f)};
    if (n != 4 && n != 8 && n != 16) fail("%s: cp.async copies 4, 8 or 16 bytes, not %d", f.site, n);
    if (in.flag2 && n != 16) fail("%s: cp.async.cg copies 16 bytes, not %d", f.site, n);
    if (given < 0 || given > n) fail("%s: cp.async of %d bytes out of %d", f.site, given, n);
    if ((uintptr_t)c.from % n) fail("%s: cp.async: source %p is not a multiple of %d", f.site, c.from, n);
    check_shared(f.site, c.to, n, n);
    if (given) trace_access(f.pc, c.from, given, READ, false);
    trace_access(f.pc, generic_address(c.to), n, WRITE, false);
    Copies &q = engine->async->th[cur->tid];
    c.group = q.group;
    if (at_once()) land(c);
    else q.open.push_back(c);
}
static void wait_groups(int pending) { // until at most `pending` committed groups are open
    Copies &q = engine->async->th[cur->tid];
    while (q.first < q.open.size() && q.open[q.first].group < q.group - pending) {
        Copy &c = q.open[q.first++];
        land(c);
        trace_landing(c.pc, generic_address(c.to), c.bytes);
    }
    if (q.first == q.open.size()) q.open.clear(), q.first = 0;
}
static void run_cp_commit(const Instruction &, Frame &) { engine->async->th[cur->tid].group++; }
static void run_cp_wait(const Instruction &in, Frame &f) {
    wait_groups(in.args.empty() ? -1 : (int)value(in.args[0], f));
}

void async_begin() {
    if (!engine->async) engine->async = new Async();
    hopper_begin();
}
void async_thread_end() { // copies that nobody waited for land at last
    Copies &q = engine->async->th[cur->tid];
    if (q.open.size()) wait_groups(-1);
    q.group = 0;
    hopper_thread_end();
}
void async_block_end() { hopper_block_end(); }
bool async_progress() { return hopper_progress(); }

// ---- small things
static void run_nothing(const Instruction &, Frame &) {}
static void run_set(const Instruction &in, Frame &f) { // setp.ne.b32 p, a, b
    uint32_t a = value(in.args[1], f), b = value(in.args[2], f);
    int32_t x = (int32_t)a, y = (int32_t)b;
    const std::string &o = in.op;
    f.regs[in.args[0].index] = has(o, ".ne")   ? a != b
                               : has(o, ".eq") ? a == b
                               : has(o, ".lt") ? x < y
                               : has(o, ".le") ? x <= y
                               : has(o, ".gt") ? x > y
                                               : x >= y;
}
static void run_select(const Instruction &in, Frame &f) { // selp.u32 d, a, b, p
    uint32_t v = value(in.args[3], f) & 1 ? value(in.args[1], f) : value(in.args[2], f);
    memcpy(pointer(in.args[0], f), &v, 4);
}
static void run_move(const Instruction &in, Frame &f) {
    uint64_t v = in.count == 8 ? value64(in.args[1], f) : value(in.args[1], f);
    memcpy(pointer(in.args[0], f), &v, in.count);
}
static void run_branch(const Instruction &, Frame &f) { f.jump = true; }
static void run_barrier(const Instruction &in, Frame &f) { // bar.sync a{, b}; bar.arrive a, b
    int id = (int)value(in.args[0], f), n = in.args.size() > 1 ? (int)value(in.args[1], f) : 0;
    if (in.flag && !n) fail("%s: bar.arrive needs a number of threads", f.site);
    barrier_arrive(f.site, id, n, 0, PLAIN, !in.flag);
}
static void run_syncwarp(const Instruction &in, Frame &f) { syncwarp(f.site, value(in.args[0], f)); }
static void run_elect(const Instruction &in, Frame &f) { // elect.sync d|p, mask: the lowest lane of the mask
    uint32_t mask = value(in.args.back(), f), live = vote(f.site, mask, true);
    for (size_t i = 0; i + 1 < in.args.size(); i++) {
        uint32_t v =
            in.args[i].type == 'r' && i + 2 == in.args.size() ? cur->lane == __builtin_ctz(live) : __builtin_ctz(live);
        if (in.args[i].type != '_') memcpy(pointer(in.args[i], f), &v, 4);
    }
}
static void run_store_shared(const Instruction &in, Frame &f) { // st.shared{.v2,.v4}.b32
    int n = in.count;
    uint32_t a = value(in.args[0], f);
    check_shared(f.site, a, 4 * n, 4 * n);
    trace_access(f.pc, generic_address(a), 4 * n, WRITE, false);
    for (int i = 0; i < n; i++) memcpy((char *)generic_address(a) + 4 * i, pointer(in.args[1 + i], f), 4);
}
static void run_load_shared(const Instruction &in, Frame &f) {
    int n = in.count;
    uint32_t a = value(in.args[n], f);
    check_shared(f.site, a, 4 * n, 4 * n);
    trace_access(f.pc, generic_address(a), 4 * n, READ, false);
    for (int i = 0; i < n; i++) memcpy(pointer(in.args[i], f), (char *)generic_address(a) + 4 * i, 4);
}
static void run_exp2(const Instruction &in, Frame &f) { // ex2.approx.ftz.f32
    *(float *)pointer(in.args[0], f) = exp2f(emu_bits<float>(value(in.args[1], f)));
}
static void run_tanh(const Instruction &in, Frame &f) {
    *(float *)pointer(in.args[0], f) = tanhf(emu_bits<float>(value(in.args[1], f)));
}
static void run_cvt_tf32(const Instruction &in, Frame &f) { // to nearest, ties away from zero
    uint32_t v = (value(in.args[1], f) + 0x1000) & 0xffffe000;
    memcpy(pointer(in.args[0], f), &v, 4);
}

// ---- the table: how an instruction's name starts, who runs it, the oldest chip, and its operands. In a pattern, f r l
// are the constraints, capitals are outputs, i is an integer operand, register or immediate, ? anything; * repeats it,
// or leaves it out.
struct Entry { const char *name; void (*run)(const Instruction &, Frame &); int arch; const char *pattern; };
static const Entry TABLE[] = {
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", run_mma, 80, "FFFFrrrrrrffff"},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", run_mma, 80, "FFFFrrrrrrffff"},
    {"mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", run_mma, 80, "FFFFrrrffff"},
    {"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", run_mma, 80, "FFFFrrrffff"},
    {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", run_mma, 80, "FFFFrrrrrrffff"},
    {"ldmatrix.sync.aligned.", run_matrix<false>, 80, "R*i"},
    {"stmatrix.sync.aligned.", run_matrix<true>, 90, "ir*"},
    {"cp.async.ca.shared", run_cp_async, 80, "il?*"},
    {"cp.async.cg.shared", run_cp_async, 80, "il?*"},
    {"cp.async.commit_group", run_cp_commit, 80, ""},
    {"cp.async.wait_group", run_cp_wait, 80, "i"},
    {"cp.async.wait_all", run_cp_wait, 80, ""},
    {"bar.sync", run_barrier, 80, "ii*"},
    {"barrier.sync", run_barrier, 80, "ii*"},
    {"barrier.cta.sync", run_barrier, 80, "ii*"},
    {"bar.arrive", run_barrier, 80, "ii"},
    {"barrier.arrive", run_barrier, 80, "ii"},
    {"bar.warp.sync", run_syncwarp, 80, "i"},
    {"elect.sync", run_elect, 90, "??i"},
    {"st.shared", run_store_shared, 80, "i?*"},
    {"ld.shared", run_load_shared, 80, "?*i"},
    {"setp.", run_set, 80, "?ii"},
    {"selp.", run_select, 80, "?iii"},
    {"mov.", run_move, 80, "?i"},
    {"bra", run_branch, 80, ""},
    {"ex2.approx", run_exp2, 80, "Ff"},
    {"tanh.approx.f32", run_tanh, 80, "Ff"},
    {"cvt.rna.tf32.f32", run_cvt_tf32, 80, "Rf"},
    {"setmaxnreg.", run_nothing, 90, "i"},
    {"griddepcontrol.", run_nothing, 90, ""},
    {"prefetch", run_nothing, 80, "?*"},
    {"mbarrier.init", run_mbarrier_init, 80, "ii"},
    {"mbarrier.inval", run_mbarrier_invalidate, 80, "i"},
    {"mbarrier.arrive", run_mbarrier_arrive, 90, "?ii*"},
    {"mbarrier.arrive.expect_tx", run_mbarrier_arrive, 90, "?ii"},
    {"mbarrier.expect_tx", run_mbarrier_expect, 90, "ii"},
    {"mbarrier.try_wait.parity", run_mbarrier_wait, 90, "?iii*"},
    {"mbarrier.test_wait.parity", run_mbarrier_wait, 90, "?ii"},
    {"cp.async.bulk.tensor.", run_tma_load, 90, "???*"},
    {"cp.async.bulk.shared", run_bulk_load, 90, "ilii?*"},
    {"cp.async.bulk.global", run_bulk_store, 90, "lii?*"},
    {"cp.async.bulk.commit_group", run_bulk_commit, 90, ""},
    {"cp.async.bulk.wait_group", run_bulk_wait, 90, "i"},
    {"fence.proxy.async", run_proxy_fence, 90, ""},
    {"wgmma.fence.sync.aligned", run_wgmma_fence, 90, ""},
    {"wgmma.commit_group.sync.aligned", run_wgmma_commit, 90, ""},
    {"wgmma.wait_group.sync.aligned", run_wgmma_wait, 90, "i"},
    {"wgmma.mma_async.sync.aligned.m64n", run_wgmma, 90, "?*"},
    {"createpolicy.", run_nothing, 80, "?*"},
    {"fence.", run_nothing, 80, ""},
};

// ---- parsing
[[noreturn]] static void bad(const Asm *a, const std::string &text, const char *why) {
    fail("%s: %s\n  %s\n  in asm: %s", a->site, why, text.c_str(), a->text);
}
static void decode(const Asm *a, Instruction &in, const std::string &text, const Program &p) {
    const Entry *entry = nullptr;
    for (const Entry &e : TABLE)
        if (starts(in.op, e.name) && (!entry || strlen(e.name) > strlen(entry->name))) entry = &e;
    if (!entry) bad(a, text, "this PTX instruction is not emulated");
    if (entry->arch > chip().major * 10 + chip().minor)
        bad(a, text, "this instruction needs a newer chip than EMU_CHIP");
    in.run = entry->run;
    const std::string &o = in.op;
    in.type = has(o, ".bf16") ? 'b' : has(o, ".tf32") ? 't' : 'h';
    if (starts(o, "mma.")) {
        in.count = has(o, ".m16n8k16") ? 16 : 8;
        for (const Argument &arg : in.args)
            if (arg.type != '%') bad(a, text, "operands of mma.sync are emulated as %0, %1 ... alone");
    }
    if (o.find("matrix") != std::string::npos) {
        in.count = has(o, ".x4") ? 4 : has(o, ".x2") ? 2 : has(o, ".x1") ? 1 : 0;
        in.flag = has(o, ".trans");
        if (!in.count || !has(o, ".m8n8") || !has(o, ".b16")) bad(a, text, "this PTX instruction is not emulated");
        if ((int)in.args.size() != in.count + 1) bad(a, text, "wrong number of operands");
    } else if (starts(o, "cp.async.bulk.tensor.")) {
        if (has(o, ".global") && o.find(".global") < o.find(".shared")) in.run = run_tma_store;
        in.count = o[21] - '0', in.flag = has(o, ".L2::cache_hint");
        if ((int)in.args.size() < 2 + in.count) bad(a, text, "wrong number of operands");
        const Argument &map = in.args[in.run == run_tma_load];
        if (map.type != '%' || p.kinds[map.index] != 'l') bad(a, text, "the tensor map is not an \"l\" operand");
        if (has(o, ".im2col") || has(o, ".multicast::cluster") || o.find("reduce") != std::string::npos)
            bad(a, text, "this form is not emulated");
    } else if (starts(o, "wgmma.mma")) {
        in.count = atoi(o.c_str() + strlen("wgmma.mma_async.sync.aligned.m64n"));
        int left =
            (int)in.args.size() - in.count / 2; // A: descriptor or 4 registers, B, scale-d, two signs, transpositions
        in.flag = left == 9; // A in registers
        if (!has(o, ".f32") || !(o.find("k16.f32.bf16.bf16") + 1 || o.find("k16.f32.f16.f16") + 1) || in.count % 8 ||
            in.count < 8 || in.count > 256 || (left != 7 && left != 9))
            bad(a, text, "this form of wgmma is not emulated");
        for (int i = 0; i < in.count / 2; i++)
            if (in.args[i].type != '%' || p.kinds[in.args[i].index] != 'f' || p.modes[in.args[i].index] != '+')
                bad(a, text, "an accumulator of wgmma must be a \"+f\" operand");
    } else if (starts(o, "mbarrier.") || starts(o, "cp.async.bulk")) {
        in.flag = o.find(".expect_tx") != std::string::npos || has(o, ".read"),
        in.flag2 = o.find("test_wait") != std::string::npos;
    } else if (starts(o, "cp.async.c")) in.flag = has(o, ".L2::cache_hint"), in.flag2 = has(o, ".cg");
    else if (o.find(".shared") != std::string::npos) {
        in.count = has(o, ".v4") ? 4 : has(o, ".v2") ? 2 : 1;
        if (starts(o, "st.") || starts(o, "ld."))
            if (!(has(o, ".b32") || has(o, ".u32") || has(o, ".f32") || has(o, ".s32")))
                bad(a, text, "only 32-bit elements are emulated");
    } else if (starts(o, "mov.")) in.count = o.find("64") != std::string::npos ? 8 : 4;
    else if (o.find(".arrive") != std::string::npos) in.flag = true;
    // Operands against the pattern, in which one item may repeat.
    int rest = (int)in.args.size();
    for (const char *c = entry->pattern; *c; c++) rest -= *c != '*' && c[1] != '*';
    if (rest < 0 || (rest > 0 && !strchr(entry->pattern, '*'))) bad(a, text, "wrong number of operands");
    size_t i = 0;
    for (const char *c = entry->pattern; *c; c++)
        for (int n = *c == '*' ? 0 : c[1] == '*' ? rest : 1; n > 0; n--, i++) {
            const Argument &arg = in.args[i];
            bool operand = arg.type == '%', output = *c >= 'A' && *c <= 'Z';
            char kind = operand ? p.kinds[arg.index] : arg.type;
            bool ok = *c == '?' || (*c == 'i' ? strchr("rinh", kind) != nullptr : kind == (*c | 32) || isdigit(kind));
            if (output && operand && p.modes[arg.index] == ' ') ok = false;
            if (!ok && kind != 'r')
                bad(a, text, ("operand " + std::to_string(i) + " has the wrong constraint").c_str());
        }
}
static Program *parse(const Asm *a, int n, const char *kinds) {
    Program *p = new Program();
    p->modes = std::string(kinds, n), p->kinds = std::string(kinds + n, n);
    std::map<std::string, int> regs, labels;
    std::string s = a->text;
    for (size_t at; (at = s.find("//")) != std::string::npos;) s.erase(at, s.find('\n', at) - at);
    size_t i = 0;
    auto space = [&] { while (i < s.size() && (isspace((unsigned char)s[i]))) i++; };
    auto word = [&] {
        size_t from = i;
        while (i < s.size() && (isalnum((unsigned char)s[i]) || strchr("_.:$%", s[i]))) i++;
        return s.substr(from, i - from);
    };
    auto reg = [&](const std::string &name) {
        auto r = regs.insert({name, (int)regs.size()}).first->second;
        if (r >= 16) bad(a, name, "more than 16 registers");
        return r;
    };
    for (;;) {
        while (space(), i < s.size() && strchr("{};", s[i])) i++;
        if (i >= s.size()) break;
        size_t from = i;
        Instruction in;
        if (s[i] == '@') {
            i++;
            if (s[i] == '!') in.negated = true, i++;
            in.guard = reg(word());
            space();
        }
        in.op = word();
        if (in.op.empty()) bad(a, s.substr(from), "this cannot be parsed");
        if (in.op.back() == ':') { // a label
            labels[in.op.substr(0, in.op.size() - 1)] = (int)p->code.size();
            continue;
        }
        size_t end = s.find(';', i);
        if (end == std::string::npos) end = s.size();
        std::string text = s.substr(from, end - from);
        if (starts(in.op, ".reg")) {
            for (space(), word(); i < end; i++)
                if (isalpha((unsigned char)s[i]) || s[i] == '_' || s[i] == '%') reg(word()), i--;
            continue;
        }
        if (starts(in.op, "bra")) {
            space();
            in.label = word();
            in.run = run_branch;
            p->code.push_back(in);
            continue;
        }
        while (i < end) {
            char c = s[i];
            if (isspace((unsigned char)c) || strchr(",[]{}|", c)) { i++; continue; }
            if (c == '+') { // [%0 + 16]
                i++;
                space();
                if (in.args.empty()) bad(a, text, "this cannot be parsed");
                in.args.back().value += strtoll(word().c_str(), nullptr, 0);
                continue;
            }
            bool minus = c == '-';
            i += minus;
            std::string w = word();
            if (w.empty()) bad(a, text, "this cannot be parsed");
            if (w[0] == '%' && isdigit((unsigned char)w[1])) {
                int k = atoi(w.c_str() + 1);
                if (k >= n) bad(a, text, "no such operand");
                if (p->kinds[k] == 'n') in.args.push_back({'n', k, 0});
                else in.args.push_back({'%', k, 0});
            } else if (isdigit((unsigned char)w[0]))
                in.args.push_back({'i', 0, strtoll(w.c_str(), nullptr, 0) * (minus ? -1 : 1)});
            else if (w == "_") in.args.push_back({'_', 0, 0});
            else if (regs.count(w)) in.args.push_back({'r', regs[w], 0});
            else bad(a, text, ("what is " + w + "?").c_str());
        }
        decode(a, in, text, *p);
        p->code.push_back(in);
    }
    for (Instruction &in : p->code)
        if (in.run == run_branch) {
            if (!labels.count(in.label)) bad(a, in.label, "no such label");
            in.target = labels[in.label];
        }
    p->single = p->code.size() == 1 && regs.empty() && p->code[0].run != run_branch;
    return p;
}
static __attribute__((noinline)) void run_program(const Program &p, Frame &f) {
    uint64_t regs[16];
    f.regs = regs, f.jump = false;
    for (size_t pc = 0; pc < p.code.size(); pc++) {
        const Instruction &in = p.code[pc];
        if (in.guard >= 0 && (bool)(regs[in.guard] & 1) == in.negated) continue;
        in.run(in, f);
        if (f.jump) pc = in.target - 1, f.jump = false;
    }
}
static __attribute__((noinline)) Program *parse_once(Asm *a, int n, const char *kinds) {
    static std::mutex lock;
    std::lock_guard<std::mutex> l(lock);
    if (!a->program) __atomic_store_n(&a->program, parse(a, n, kinds), __ATOMIC_RELEASE);
    return a->program;
}
void run_asm(Asm *a, Operand *ops, int n, const char *kinds) {
    Program *p = __atomic_load_n(&a->program, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!p, 0)) p = parse_once(a, n, kinds);
    Frame f = {a->site, __builtin_return_address(0), ops, nullptr, false};
    if (p->single) p->code[0].run(p->code[0], f); // small frames: 32 lanes share a first-level cache
    else run_program(*p, f);
}
} // namespace emu

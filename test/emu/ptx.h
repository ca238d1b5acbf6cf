// ptx.h - instructions, for the two files that carry them out: ptx.cc (parsing, warps) and hopper.cc (sm_90a).
#pragma once
#include "internal.h"
#include "include/cuda.h"

namespace emu {
struct Argument { char type; int index; int64_t value; }; // '%' operand, 'i' immediate, 'r' local register, '_' nothing
struct Frame { const char *site; void *pc; Operand *ops; uint64_t *regs; bool jump; };
struct Instruction {
    std::string op, label;          // label: of a branch's target
    std::vector<Argument> args;     // braces and brackets removed
    int guard = -1;                 // @p
    bool negated = false;
    int target = 0, count = 0;      // branch; what decode() found: matrices, bytes ...
    bool flag = false, flag2 = false;
    char type = 0;                  // of elements: 'b'f16, 'h'alf, 't'f32
    void (*run)(const Instruction &, Frame &) = nullptr;
};
inline bool has(const std::string &op, const char *modifier) { // ".x4" as a whole word of the dotted name
    size_t at = op.find(modifier), n = strlen(modifier);
    return at != std::string::npos && (at + n == op.size() || op[at + n] == '.' || op[at + n] == ':');
}
inline bool starts(const std::string &s, const char *with) { return !s.compare(0, strlen(with), with); }

inline void *pointer(const Argument &a, Frame &f) { return a.type == 'r' ? &f.regs[a.index] : f.ops[a.index].p; }
inline uint64_t value64(const Argument &a, Frame &f) {
    if (a.type == 'i') return (uint64_t)a.value;
    if (a.type == 'n') return (uint64_t)f.ops[a.index].p;
    uint64_t v;
    memcpy(&v, pointer(a, f), 8);
    return v + (uint64_t)a.value;
}
inline uint32_t value(const Argument &a, Frame &f) {
    if (a.type == 'i') return (uint32_t)a.value;
    if (a.type == 'n') return (uint32_t)(uintptr_t)f.ops[a.index].p;
    uint32_t v;
    memcpy(&v, pointer(a, f), 4);
    return v + (uint32_t)a.value; // [%0 + 16]
}
inline float element(uint32_t word, int half, char type) {
    uint16_t h = (uint16_t)(word >> half * 16);
    return type == 'b' ? from_bf16(h) : from_f16(h);
}
inline bool at_once() { return settings().async == 1 || (settings().async == 2 && random_next(engine->random) & 1); }
struct Lane { const Instruction *in; Frame *f; };
inline void aligned(const Instruction &in, Frame &f, Execute execute) {
    Lane l = {&in, &f};
    collective(f.site, ~0u, ALIGNED + (int)((uintptr_t)execute >> 4 & 0xffffff), &l, execute);
}

// hopper.cc
typedef void Run(const Instruction &, Frame &);
Run run_mbarrier_init, run_mbarrier_invalidate, run_mbarrier_arrive, run_mbarrier_expect, run_mbarrier_wait,
    run_tma_load, run_tma_store, run_bulk_load, run_bulk_store, run_bulk_commit, run_bulk_wait, run_proxy_fence,
    run_wgmma, run_wgmma_fence, run_wgmma_commit, run_wgmma_wait;
void hopper_begin(); // a block starts
void hopper_thread_end();
void hopper_block_end();
bool hopper_progress(); // completes one operation in flight, if there is one
} // namespace emu

/* kernel_report.cu - what every kernel of kernels.cu asks of a GPU, counted by running it in emulation (a trace build
   of test/emu), and what ptxas gave it. Counts, not times; README, "Reading the kernel report", says how to read them.

       kernel_report [LOG...]                a line per case and one per kernel; build/kernel-report.json: the same
       kernel_report KERNEL=name [LOG...]    one kernel, line by line, in the first case that runs it
       kernel_report gates [LOG...]          the same figures as tests, in TAP
   LOG: what `nvcc -cubin -Xptxas -v -arch=A` said, in a file whose name ends in A.log. KERNEL is part of a kernel's
   name; EMU_CHIP says on which chip (sm_80; sm_90a for matmul_hopper). fp16 is left out, its kernels are bf16's; so
   are the large layers in fp32, whose kernels the small ones run. */
#include "../sft.h"
#include <cuda_runtime.h>
#include <cxxabi.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

// Peaks: dense bf16 with fp32 sums, fp32, memory. NVIDIA's data sheets of A100 80GB SXM and H100 SXM; "NVIDIA Ada GPU
// architecture", appendix A, of the RTX 4090.
struct Chip { const char *name; double tensor, fp32, bandwidth; };
static const Chip chips[] = {
    {"A100", 312e12, 19.5e12, 2039e9}, {"H100", 989.4e12, 66.9e12, 3352e9}, {"4090", 165.2e12, 82.6e12, 1008e9}};

// --- a row: one kernel in one case. Workers send rows through a pipe, whole ones: they are smaller than PIPE_BUF.
struct Fault { int line; char space; long got, ideal; }; // a line of the kernel with more sectors or passes than needed
struct Row {
    int at;                   // number of the case
    char op[24], what[32], type[8], chip[8], kernel[128];
    char error[160];          // the case died: no kernel
    double flops, bytes;      // the case's floor
    long launches, blocks, threads, shared;
    long requests, sectors, ideal;        // global memory
    long passes, least, conflicts;        // shared memory
    long moved, needed, arithmetic, tensor, issued, active;
    int races, faults;
    Fault fault[32];          // the first ones
};
static double roofline(const Row &r, const Chip &c) { // seconds
    return fmax((double)r.tensor / c.tensor + (double)r.arithmetic / c.fp32, (double)r.needed / c.bandwidth);
}

static std::string replaced(std::string s, const std::string &from, const std::string &to) {
    for (size_t at = 0; (at = s.find(from, at)) != std::string::npos; at += to.size()) s.replace(at, from.size(), to);
    return s;
}
// "matmul_tensor<bf16, false, true>" of the emulator's name and of ptxas's
static std::string short_name(std::string s) {
    for (const char *word : {"{anonymous}::", "(anonymous namespace)::", "void "}) s = replaced(s, word, "");
    s = replaced(replaced(s, "__nv_bfloat16", "bf16"), "__half", "fp16");
    for (size_t at; (at = s.find(" = ")) != std::string::npos;) { // "T = float"
        const size_t from = s.find_last_of("<, ", at - 1) + 1;
        s.erase(from, at + 3 - from);
    }
    int depth = 0;
    for (size_t i = 0; i < s.size(); i++) { // arguments begin at the first parenthesis outside < >
        depth += (s[i] == '<') - (s[i] == '>');
        if (s[i] == '(' && !depth) return s.substr(0, i);
    }
    return s;
}

// --- running the cases
static const SftOps *ops = &sft_cuda;
static SftArena memory, work;
static SftCtx ctx = {&sft_cuda, NULL, &work, 0, 0};
static int out, part, parts, number;        // the pipe; this worker takes every parts-th case
static const char *chip, *only, *listed = NULL; // cases of this op, or NULL; the kernel to list, or NULL
static Row now;
static std::set<std::string> shown;

static void place(void *to, const void *from, size_t bytes) {
    if (cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) != cudaSuccess) sft_die(SFT_BROKEN, "cudaMemcpy");
}
static bool measure(const char *op, const char *what, SftType type, double flops, double bytes) {
    if (number++ % parts != part || (only && strncmp(op, only, strlen(only)))) return false;
    if (type == SFT_F32 && (!strcmp(chip, "sm_90a") || strstr(what, "3072"))) return false;
    memset(&now, 0, sizeof now);
    now.at = number, now.flops = flops, now.bytes = bytes;
    snprintf(now.op, sizeof now.op, "%s", op), snprintf(now.what, sizeof now.what, "%s", what);
    snprintf(now.type, sizeof now.type, "%s", sft_type_name(type)), snprintf(now.chip, sizeof now.chip, "%s", chip);
    emu_count(true);
    return true;
}
static void send(const Row &r) {
    static_assert(sizeof r <= 4096, "rows are written whole");
    if (write(out, &r, sizeof r) != (ssize_t)sizeof r) exit(1);
}
static void died(const char *line) {
    if (listed) { printf("%s %s: %s\n", now.op, now.type, line); return; }
    Row r = now;
    snprintf(r.error, sizeof r.error, "%s", line);
    send(r);
    ctx.work->used = 0;
}
static void add_line(Row &r, const EmuLine &l) {
    const bool global = l.space == 'g';
    (global ? r.requests : r.passes) += global ? l.requests : l.sectors;
    if (global) r.sectors += l.sectors, r.ideal += l.ideal;
    else r.least += l.ideal;
    if (l.sectors * 100 <= l.ideal * (global ? 105 : 100)) return;
    if (r.faults < SFT_COUNT(r.fault)) r.fault[r.faults] = {l.line, l.space, l.sectors, l.ideal};
    r.faults++;
}
static bool again(void) {
    emu_count(false);
    if (!emu_kernel(0) && !listed) send(now); // an op without a kernel: cudaMemset
    for (int i = 0; const char *name = emu_kernel(i); i++) {
        const std::string brief = short_name(name);
        if (listed && (brief.find(listed) == std::string::npos || !shown.insert(brief).second)) continue;
        if (listed) {
            printf("\n%s %s %s on %s\n", now.op, now.what, now.type, now.chip), emu_report(name);
            continue;
        }
        const EmuCount *c = emu_counts(name);
        Row r = now;
        snprintf(r.kernel, sizeof r.kernel, "%s", brief.c_str());
        r.launches = c->launches, r.blocks = c->blocks, r.threads = c->threads, r.shared = c->shared;
        r.moved = c->read + c->written, r.needed = c->needed, r.conflicts = c->conflicts, r.races = emu_races();
        r.arithmetic = c->flops, r.tensor = c->mma_flops, r.issued = c->issued, r.active = c->active;
        for (int l = 0; l < c->nlines; l++) add_line(r, c->lines[l]);
        send(r);
    }
    return false;
}
#define CALL(call) try { call; } catch (const std::string &line) { died(line.c_str()); }
#include "cases.h"

static void run_cases(const char *on, const char *op) { // this process's share of them
    setenv("EMU_CHIP", on, 1), chip = on, only = op;
    memory.size = 96 << 20, work.size = 64 << 20;
    if (cudaMalloc((void **)&memory.base, memory.size) != cudaSuccess ||
        cudaMalloc((void **)&work.base, work.size) != cudaSuccess)
        exit(1);
    sft_die_hook = [](int, const char *line) { throw std::string(line); };
    // A tile's worth of tokens: more are more of the same. An odd vocabulary, as GPT-2's.
    const Shapes s = {1024, 128, 256, 2057, 32, 1 << 18};
    for (int type = SFT_F32; type <= SFT_BF16; type++) {
        matmul_cases((SftType)type, s.matmul_tokens, s.vocabulary);
        attention_cases((SftType)type, 256, 128);
        memory_cases((SftType)type, s);
    }
}
// All cases on sm_80, and on sm_90a the matmuls in 16 bits, which are other kernels there. Four processes, two cores.
static std::vector<Row> all_rows() {
    int ends[2];
    if (pipe(ends)) exit(1);
    std::vector<Row> rows;
    std::vector<pid_t> workers;
    for (int w = 0; w < 4; w++) {
        const pid_t id = fork();
        if (id < 0) exit(1);
        if (id == 0) {
            close(ends[0]), out = ends[1], part = w % 2, parts = 2;
            run_cases(w < 2 ? "sm_80" : "sm_90a", w < 2 ? NULL : "matmul");
            exit(0);
        }
        workers.push_back(id);
    }
    close(ends[1]);
    for (Row r; read(ends[0], &r, sizeof r) == (ssize_t)sizeof r;) rows.push_back(r);
    for (pid_t w : workers) {
        int status;
        if (waitpid(w, &status, 0) < 0 || status) fprintf(stderr, "a worker ended with status %d\n", status), exit(1);
    }
    std::stable_sort(rows.begin(), rows.end(), [](const Row &a, const Row &b) {
        return a.at != b.at ? a.at < b.at : strcmp(a.chip, b.chip) < 0;
    });
    return rows;
}

// --- what ptxas said
struct Compiled { int registers = 0, shared = 0, stack = 0, spilled = 0; };
struct Log { std::string arch; std::map<std::string, Compiled> kernels; std::vector<std::string> warnings; };
static Log read_log(const char *path) {
    Log log;
    const char *slash = strrchr(path, '/'), *at = strstr(slash ? slash : path, "sm_");
    log.arch = at ? std::string(at, strcspn(at, ".")) : path;
    FILE *f = fopen(path, "r");
    if (!f) fprintf(stderr, "%s: cannot open\n", path), exit(1);
    Compiled *k = NULL;
    for (char text[4096], name[4096]; fgets(text, sizeof text, f);) {
        int stored = 0, loaded = 0;
        const char *used = strstr(text, "Used "), *smem = strstr(text, " bytes smem");
        if (sscanf(text, "ptxas info : Compiling entry function '%[^']'", name) == 1) {
            int status;
            char *plain = abi::__cxa_demangle(name, NULL, NULL, &status);
            k = &log.kernels[short_name(plain ? plain : name)];
            free(plain);
        } else if (k && strstr(text, "bytes stack frame")) {
            int stack = 0; // the kernel's; functions that it calls come after it
            sscanf(text, " %d bytes stack frame, %d bytes spill stores, %d", &stack, &stored, &loaded);
            k->stack = SFT_MAX(k->stack, stack), k->spilled = SFT_MAX(k->spilled, stored + loaded);
        } else if (k && used) {
            sscanf(used, "Used %d", &k->registers);
            while (smem && smem > text && smem[-1] != ' ') smem--;
            k->shared = smem ? atoi(smem) : 0;
        } else if (strstr(text, "wgmma") || strstr(text, "ptxas warning") || strstr(text, "Performance Loss"))
            log.warnings.push_back(std::string(text, strcspn(text, "\n")));
    }
    fclose(f);
    return log;
}

// --- the report
static size_t same_case(const std::vector<Row> &rows, size_t i) { // how many rows from i on are of one case on one chip
    size_t n = 1;
    while (i + n < rows.size() && rows[i + n].at == rows[i].at && !strcmp(rows[i + n].chip, rows[i].chip)) n++;
    return n;
}
static void print_case(const Row *r, size_t n) { // the kernels of a case on a chip
    printf("\n%s  %s  %s  (%s)", r->op, r->what, r->type, r->chip);
    if (r->error[0]) { printf("  %s\n", r->error); return; }
    long moved = 0;
    for (size_t i = 0; i < n; i++) moved += r[i].moved;
    printf("  floor %.3f MB, %.1f Mflop; moved %.3f MB = %.2f x floor;  ", r->bytes * 1e-6, r->flops * 1e-6,
           (double)moved * 1e-6, (double)moved / r->bytes);
    for (const Chip &c : chips)
        printf("  %s %.2f us", c.name,
               1e6 * fmax(r->flops / (strcmp(r->type, "fp32") ? c.tensor : c.fp32), r->bytes / c.bandwidth));
    printf("\n");
}
static void print(const std::vector<Row> &rows, const std::vector<Log> &logs) {
    printf("%-48s %6s %8s %13s %9s %5s %8s %6s %9s %7s %22s %13s %6s %6s\n", "kernel", "blocks", "requests",
           "sectors/req.", "conflicts", "lanes", "moved kB", "/need", "kflop", "flop/B", "us: A100 / H100 / 4090",
           "registers", "shared", "spills");
    for (size_t i = 0, next = 0; i < rows.size(); i++) {
        const Row &r = rows[i];
        if (i == next) print_case(&r, same_case(rows, i)), next += same_case(rows, i);
        if (!r.kernel[0]) continue;
        const double requests = (double)SFT_MAX(r.requests, 1), flops = (double)(r.arithmetic + r.tensor);
        std::string registers, times;
        char text[64];
        int spilled = 0, shared = 0;
        for (const Log &l : logs) {
            auto k = l.kernels.find(r.kernel);
            const Compiled c = k == l.kernels.end() ? Compiled() : k->second;
            registers += (registers.empty() ? "" : "/") + std::to_string(c.registers);
            spilled = SFT_MAX(spilled, c.spilled), shared = SFT_MAX(shared, c.shared);
        }
        for (const Chip &c : chips)
            snprintf(text, sizeof text, "%s%.2f", times.empty() ? "" : " / ", 1e6 * roofline(r, c)), times += text;
        snprintf(text, sizeof text, "%.2f (%.2f)", (double)r.sectors / requests, (double)r.ideal / requests);
        printf("%-48s %6ld %8ld %13s %9ld %5.1f %8ld %6.2f %9.0f %7.1f %22s %13s %6ld %6s\n", r.kernel, r.blocks,
               r.requests, text, r.conflicts, (double)r.active / (double)SFT_MAX(r.issued, 1), r.moved / 1000,
               (double)r.moved / (double)SFT_MAX(r.needed, 1), flops / 1e3, flops / (double)SFT_MAX(r.needed, 1),
               times.c_str(), logs.empty() ? "no nvcc" : registers.c_str(), r.shared,
               logs.empty() ? "" : std::to_string(spilled).c_str());
    }
}
static json_t *json(const Row &r, const std::vector<Log> &logs) {
    json_t *o = json_pack("{s:s,s:s,s:s,s:s,s:s,s:f,s:f}", "kernel", r.kernel, "op", r.op, "case", r.what, "type",
                          r.type, "chip", r.chip, "case_flops", r.flops, "case_floor_bytes", r.bytes);
    if (r.error[0]) json_object_set_new(o, "error", json_string(r.error));
    const struct { const char *name; long n; } counted[] = {
        {"launches", r.launches}, {"blocks", r.blocks}, {"threads", r.threads}, {"requests", r.requests},
        {"sectors", r.sectors}, {"ideal_sectors", r.ideal}, {"shared_passes", r.passes},
        {"ideal_shared_passes", r.least}, {"bank_conflicts", r.conflicts}, {"bytes_moved", r.moved},
        {"bytes_compulsory", r.needed}, {"flops", r.arithmetic + r.tensor}, {"tensor_flops", r.tensor},
        {"shared_bytes", r.shared}};
    for (auto &c : counted) json_object_set_new(o, c.name, json_integer(c.n));
    const double requests = (double)SFT_MAX(r.requests, 1), needed = (double)SFT_MAX(r.needed, 1);
    const struct { const char *name; double x; } derived[] = {
        {"sectors_per_request", (double)r.sectors / requests},
        {"ideal_sectors_per_request", (double)r.ideal / requests},
        {"simt_efficiency", (double)r.active / (double)SFT_MAX(r.issued, 1) / 32},
        {"moved_over_compulsory", (double)r.moved / needed},
        {"arithmetic_intensity", (double)(r.arithmetic + r.tensor) / needed}};
    for (auto &d : derived) json_object_set_new(o, d.name, json_real(d.x));
    json_t *times = json_object(), *compiled = logs.empty() ? json_string("no nvcc") : json_object();
    for (const Chip &c : chips) json_object_set_new(times, c.name, json_real(roofline(r, c)));
    for (const Log &l : logs) {
        auto k = l.kernels.find(r.kernel);
        if (k != l.kernels.end())
            json_object_set_new(compiled, l.arch.c_str(), json_pack("{s:i,s:i,s:i,s:i}", "registers",
                                k->second.registers, "static_shared_bytes", k->second.shared, "stack_bytes",
                                k->second.stack, "spilled_bytes", k->second.spilled));
    }
    json_object_set_new(o, "roofline_seconds", times);
    json_object_set_new(o, "ptxas", compiled);
    return o;
}

// --- the gates. What a kernel may do nevertheless, with the reason; what nothing needs any more is a failure, too.
enum Gate { SECTORS, CONFLICTS, BYTES, SPILLS };
static struct Exception {
    Gate gate;
    const char *name, *where; // of the kernel (BYTES: the op); part of the case's name (SPILLS: of the architecture)
    double most;              // times the ideal (SPILLS: bytes)
    const char *reason;
    bool needed = false;
} exceptions[] = {
    // clang-format off
    {SECTORS, "matmul_", "head", 1.11, "the last columns of an odd vocabulary fill no sector: one of 17 tiles here"},
    {SECTORS, "matmul_plain", "head", 8, "the last few k of an odd vocabulary come number by number"},
    {SECTORS, "attention_forward_mma", "", 8, "lse lies [N,H]: 4 bytes a query and head, 1 / 64 of what y takes"},
    {SECTORS, "rows_add", "", 1.1, "ids in their sorted order, 4 bytes a token, from wherever a word's begin"},
    {BYTES, "embedding_forward", "", 1.6, "words and places that occur again are read again, from L2"},
    {BYTES, "embedding_backward", "", 1.7, "sorts the ids first; rows of words that occur again are read again"},
    {BYTES, "layernorm_backward", "", 1.3, "a line of sums for every block of rows: less, the more rows there are"},
    {BYTES, "rmsnorm_backward", "", 1.2, "the same"},
    {SPILLS, "rope_table_kernel", "", 64, "sine and cosine of large angles: CUDA's own table, in local memory"},
    {SECTORS, "sort_place", "", 4, "a counting sort scatters: 4 bytes a token"},
    {SECTORS, "scatter_index", "", 4, "writes where the indices say: 4 bytes a row"},
    {BYTES, "cross_entropy", "", 2.5, "the second pass over a row, which an L2 serves"},
    {BYTES, "layernorm_forward", "", 2.1, "every row reads w and b again, from L1 or L2"},
    {BYTES, "rmsnorm_forward", "", 1.6, "every row reads w again, from L1 or L2"},
    {BYTES, "matmul_forward", "head, one token", 1.6, "x is read for every two rows of w, from L1"},
    {BYTES, "attention_forward", "one token", 1.2, "each piece of the keys has sums of its own, added up later"},
    {BYTES, "nf4_dequantize", "double", 1.2, "a doubly quantised maximum is three numbers, read by 8 or 16 lanes"},
    {CONFLICTS, "nf4_kernel", "double", 1.5, "the look-up of a maximum: lanes meet in a bank as their levels have it"},
    {BYTES, "nf4_quantize", "", 1.3, "a warp writes one maximum, 4 bytes of a sector; doubly, they are read again"},
    {BYTES, "int8_quantize", "", 1.9, "reads a row for its maximum, and again, from L2, for its codes"},
    {BYTES, "rope_table", "", 1.5, "three integers a token, read by every warp of it"},
    // clang-format on
};
static bool excused(Gate gate, const std::string &name, const char *where, double ratio) {
    bool yes = false;
    for (Exception &e : exceptions)
        if (e.gate == gate && !name.compare(0, strlen(e.name), e.name) && strstr(where, e.where) && ratio <= e.most)
            e.needed = yes = true;
    return yes;
}
typedef std::map<std::string, std::vector<std::string>> Faults; // by the gate's name; none: it is passed
template <class... A> static void add(std::vector<std::string> &list, const char *format, A... values) {
    char text[400];
    snprintf(text, sizeof text, format, values...);
    list.push_back(text);
}
static std::string base(const Row &r) { return std::string(r.kernel, strcspn(r.kernel, "<")); }
static void check_lines(Faults &f, const Row &r) {
    auto &sectors = f[base(r) + ": whole sectors"], &conflicts = f[base(r) + ": no bank conflicts"];
    for (int i = 0; i < SFT_MIN(r.faults, SFT_COUNT(r.fault)); i++) {
        const Fault &x = r.fault[i];
        const double ratio = (double)x.got / (double)x.ideal;
        if (excused(x.space == 'g' ? SECTORS : CONFLICTS, base(r), r.what, ratio)) continue;
        add(x.space == 'g' ? sectors : conflicts, "%s %s %s, %s, line %d: %ld %s, %ld are enough: x %.2f", r.op, r.what,
            r.type, r.kernel, x.line, x.got, x.space == 'g' ? "sectors" : "passes", x.ideal, ratio);
    }
    if (r.faults > SFT_COUNT(r.fault)) add(sectors, "%s: %d such lines; some were not looked at", r.kernel, r.faults);
    auto &races = f[base(r) + ": no races"];
    if (r.races) add(races, "%s %s %s: %d races", r.op, r.what, r.type, r.races);
}
static void check_case(Faults &f, const Row *r, size_t n) { // a case's kernels together against its floor
    long moved = 0;
    for (size_t i = 0; i < n; i++) moved += r[i].moved;
    auto &bytes = f[std::string(r->op) + ": bytes within 1.1 of the floor"];
    const double ratio = (double)moved / r->bytes;
    if (ratio > 1.1 && !excused(BYTES, r->op, r->what, ratio))
        add(bytes, "%s %s %s: %ld bytes, %.0f are the floor: x %.2f", r->op, r->what, r->type, moved, r->bytes, ratio);
}
static void check_compiled(Faults &f, const std::vector<Row> &rows, const Log &log) {
    auto &spills = f["ptxas, " + log.arch + ": no spills, no local memory"];
    for (auto &k : log.kernels) {
        const int bytes = SFT_MAX(k.second.stack, k.second.spilled);
        if (bytes && !excused(SPILLS, k.first, log.arch.c_str(), bytes))
            add(spills, "%s: %d bytes", k.first.c_str(), bytes);
    }
    f["ptxas, " + log.arch + ": no warnings, no wgmma one after the other"] = log.warnings;
    auto &known = f["ptxas, " + log.arch + ": every kernel that ran is there"];
    for (const Row &r : rows)
        if (r.kernel[0] && !log.kernels.count(r.kernel)) add(known, "%s is not", r.kernel);
}
static int gates(const std::vector<Row> &rows, const std::vector<Log> &logs) {
    Faults f;
    auto &cases = f["every operation has a case, and none fails"];
    auto has_case = [&](const char *op) {
        return std::any_of(rows.begin(), rows.end(), [&](const Row &r) { return !strcmp(r.op, op); });
    };
#define X(name, args) \
    if (!has_case(#name)) add(cases, "%s has none", #name);
    SFT_OPS(X)
#undef X
    for (size_t i = 0, n; i < rows.size(); i += n) {
        n = same_case(rows, i);
        if (rows[i].error[0]) add(cases, "%s %s: %s", rows[i].op, rows[i].what, rows[i].error);
        else if (rows[i].flops == 0) check_case(f, &rows[i], n);
    }
    for (const Row &r : rows)
        if (r.kernel[0]) check_lines(f, r);
    for (const Log &log : logs) check_compiled(f, rows, log);
    if (logs.empty())
        for (const char *arch : {"sm_80", "sm_89", "sm_90a"})
            printf("ok - ptxas, %s: no spills, no warnings # SKIP there is no nvcc\n", arch);
    auto &exceptional = f["every exception is needed"];
    for (const Exception &e : exceptions)
        if (!e.needed && (e.gate != SPILLS || !logs.empty()))
            add(exceptional, "%s, %s (%s)", e.name, e.where, e.reason);
    int failed = 0;
    for (auto &gate : f) {
        for (const std::string &fault : gate.second) printf("%s\n", fault.c_str());
        printf("%s - %s\n", gate.second.empty() ? "ok" : "not ok", gate.first.c_str());
        failed += !gate.second.empty();
    }
    return failed > 0;
}

int main(int argc, char **argv) {
    std::vector<Log> logs;
    bool test = false;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "gates")) test = true;
        else if (!strncmp(argv[i], "KERNEL=", 7)) listed = argv[i] + 7;
        else logs.push_back(read_log(argv[i]));
    if (listed) {
        const std::string op(listed, strcspn(listed, "_")); // most kernels are named after their op
        const char *on = getenv("EMU_CHIP");
        parts = 1;
        run_cases(on ? on : strstr(listed, "hopper") ? "sm_90a" : "sm_80", op.c_str());
        return 0;
    }
    const std::vector<Row> rows = all_rows();
    if (test) return gates(rows, logs);
    json_t *list = json_array();
    for (const Row &r : rows) json_array_append_new(list, json(r, logs));
    if (json_dump_file(list, "build/kernel-report.json", JSON_INDENT(1) | JSON_PRESERVE_ORDER)) return 1;
    print(rows, logs);
    return 0;
}

/* ladder.h - what the ladders share: numbers, memory, the clock, and the counts of test/emu. A ladder climbs from an
   operation's formula to its kernel in kernels.cu, a step an idea; its program tests every step and, in a trace
   build of test/emu, counts what the steps move and that the op of kernels.cu wastes nothing. On a GPU, `NAME bench
   SIZES` times them. */
#include "../../sft.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <string>
#include <vector>
typedef __nv_bfloat16 bf16;

static void cuda(cudaError_t e) {
    if (e != cudaSuccess) printf("not ok - CUDA: %s\n", cudaGetErrorString(e)), exit(1);
}
static inline std::vector<bf16> numbers(size_t n, int site) { // in [-1, 1)
    std::vector<bf16> v(n);
    for (size_t i = 0; i < n; i++) v[i] = __float2bfloat16(2 * sft_uniform(sft_random(1, 0, site, i)) - 1);
    return v;
}
template <class T> static T *on_gpu(const std::vector<T> &v) {
    void *p;
    cuda(cudaMalloc(&p, v.size() * sizeof(T) + 1));
    cuda(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return (T *)p;
}
template <class T> static std::vector<T> from_gpu(const T *p, size_t n) {
    std::vector<T> v(n);
    cuda(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
static inline SftCtx context(SftArena *work) { // of kernels.cu, with 16 MB to work in
    static void *memory;
    if (!memory) cuda(cudaMalloc(&memory, 16 << 20));
    *work = {}, work->base = (char *)memory, work->size = 16 << 20;
    return {&sft_cuda, NULL, work, 0, 0};
}
template <class F> static void on_cpu(F f) { // f(context) calls an op of sft_cpu, in exactly the memory that it plans
    SftArena plan = {}, work = {};
    SftCtx c = {&sft_cpu, NULL, &plan, 0, 0};
    f(&c);
    work.size = plan.peak, work.base = (char *)sft_alloc(plan.peak + 1), c.work = &work;
    f(&c);
    free(work.base);
}
template <class F> static float best_ms(F f) { // of five
    cudaEvent_t begin, end;
    float best = 1e30f, ms = 0;
    cuda(cudaEventCreate(&begin)), cuda(cudaEventCreate(&end));
    for (int i = 0; i < 5; i++) {
        cuda(cudaEventRecord(begin)), f(), cuda(cudaEventRecord(end));
        cuda(cudaEventSynchronize(end)), cuda(cudaEventElapsedTime(&ms, begin, end));
        best = fminf(best, ms);
    }
    return best;
}

static bool good = true;
static inline void report(bool ok, const char *what, const char *more) {
    printf("%s - %s%s\n", ok ? "ok" : "not ok", what, more), good &= ok;
}

#ifdef EMU
struct Counts { // a kernel's, by name; zeros if it did not run
    EmuCount c = {};
    long passes = 0; // over the banks of shared memory
    explicit Counts(const char *kernel) {
        if (const EmuCount *n = emu_counts(kernel)) c = *n;
        for (int i = 0; i < c.nlines; i++) passes += c.lines[i].space == 's' ? c.lines[i].sectors : 0;
    }
};
// Of those kernels of kernels.cu that ran since emu_count(true): every access to global memory is of whole sectors
// (within 5 %, but for exceptions), no access to shared memory waits for another, nothing races.
static inline bool clean(std::initializer_list<const char *> kernels, bool (*exception)(const EmuLine &) = NULL) {
    bool fine = true, ran = false;
    for (const char *k : kernels) {
        const Counts n((std::string("{anonymous}::") + k).c_str());
        for (int i = 0; i < n.c.nlines; i++) {
            const EmuLine &l = n.c.lines[i];
            ran = true;
            if (l.sectors * 100 <= l.ideal * (l.space == 'g' ? 105 : 100)) continue;
            if (exception && exception(l)) continue;
            printf("%s, line %d: %ld %s for %ld requests, %ld are enough\n", k, l.line, l.sectors,
                   l.space == 'g' ? "sectors" : "passes", l.requests, l.ideal);
            fine = false;
        }
    }
    return fine && ran && emu_races() == 0;
}
#endif

// test("") tests the steps and the op; test(", sm_80"), the op on an older chip, is another process.
static inline int ladder(void (*test)(const char *chip)) {
#ifdef EMU
    if (fork() == 0) {
        setenv("EMU_CHIP", "sm_80", 1), test(", sm_80"), fflush(stdout);
        _exit(!good);
    }
    int status = 0;
    if (wait(&status) < 0 || status != 0) good = false;
#endif
    test("");
    return !good;
}

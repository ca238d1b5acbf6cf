/* transpose.cu - how to read the counts, on the smallest kernel that has something to count: y[N,M] = x[M,N]^T in fp32,
   in three steps. Nothing is computed, so a perfect kernel takes as long as the bytes do.

       step       idea                                    a load   a store   of shared memory
       1 naive    a thread per number                     4        32        -                 sectors, passes
       2 tile     turned round in shared memory           4        4         32
       3 padded   a number of padding in every line       4        4         1

   `make kernel-report LADDER=transpose` shows each step beside its lines: README, "Reading the kernel report". */
#include "ladder.h"

// --- 1: the formula. Neighbours in a warp read neighbours of x and write to y M numbers apart: 32 sectors of 32 bytes
// for 32 numbers of 4.
__global__ void naive(float *y, const float *x, int M, int N) {
    const int i = blockIdx.y * 32 + threadIdx.y, j = blockIdx.x * 32 + threadIdx.x;
    if (i < M && j < N) y[(size_t)j * M + i] = x[(size_t)i * N + j];
}

// --- 2: a block turns a tile round in shared memory, so that neighbours write neighbours of y. But they read the
// tile down a column: 32 words whose distance is 32, all of them in one bank.
__global__ void tile(float *y, const float *x, int M, int N) {
    __shared__ float t[32][32];
    const int i0 = blockIdx.y * 32, j0 = blockIdx.x * 32, a = threadIdx.x, b = threadIdx.y;
    if (i0 + b < M && j0 + a < N) t[b][a] = x[(size_t)(i0 + b) * N + j0 + a];
    __syncthreads();
    if (j0 + b < N && i0 + a < M) y[(size_t)(j0 + b) * M + i0 + a] = t[a][b];
}

// --- 3: lines of 33 words: down a column the distance is 33, and each word in another bank.
__global__ void padded(float *y, const float *x, int M, int N) {
    __shared__ float t[32][33];
    const int i0 = blockIdx.y * 32, j0 = blockIdx.x * 32, a = threadIdx.x, b = threadIdx.y;
    if (i0 + b < M && j0 + a < N) t[b][a] = x[(size_t)(i0 + b) * N + j0 + a];
    __syncthreads();
    if (j0 + b < N && i0 + a < M) y[(size_t)(j0 + b) * M + i0 + a] = t[a][b];
}

typedef void Kernel(float *, const float *, int, int);
static const struct { const char *name; Kernel *kernel; } steps[] = {
    {"naive", naive}, {"tile", tile}, {"padded", padded}};
static void run(int s, float *y, const float *x, int M, int N) {
    Kernel *const kernel = steps[s].kernel;
    kernel<<<dim3((N + 31) / 32, (M + 31) / 32), dim3(32, 32)>>>(y, x, M, N);
    cuda(cudaGetLastError());
}
static bool right(int s, int M, int N) {
    std::vector<float> x((size_t)M * N);
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)i;
    float *from = on_gpu(x), *to = on_gpu(std::vector<float>(x.size()));
    run(s, to, from, M, N);
    const std::vector<float> y = from_gpu(to, x.size());
    cudaFree(from), cudaFree(to);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++)
            if (y[(size_t)j * M + i] != x[(size_t)i * N + j]) return false;
    return true;
}
static int bench(int M, int N) {
    float *x = on_gpu(std::vector<float>((size_t)M * N)), *y = on_gpu(std::vector<float>((size_t)M * N));
    for (int s = 0; s < SFT_COUNT(steps); s++) {
        const float ms = best_ms([&] { run(s, y, x, M, N); });
        printf("%-8s %9.3f ms %8.1f GB/s\n", steps[s].name, ms, 8.0 * M * N / ms * 1e-6);
    }
    return 0;
}

#ifdef EMU
static const EmuCount *counts(int s) { // of 256 x 192 numbers: 1536 warps
    float *x = on_gpu(std::vector<float>(256 * 192)), *y = on_gpu(std::vector<float>(256 * 192));
    emu_count(true), run(s, y, x, 256, 192), emu_count(false);
    cudaFree(x), cudaFree(y);
    return emu_counts(steps[s].name);
}
// Sectors of the global stores and passes over shared memory, per request, are what the table above says.
static bool counts_are(int s, int store, int passes) {
    const EmuCount *c = counts(s);
    bool good = true;
    for (int i = 0; i < c->nlines; i++) {
        const EmuLine &l = c->lines[i];
        const int want = l.space == 's' ? (l.kind == 'r' ? passes : 1) : l.kind == 'w' ? store : 4;
        good &= l.requests == 1536 && l.sectors == 1536L * want;
    }
    return good && c->nlines == (passes ? 4 : 2) && emu_races() == 0;
}
#endif
int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "bench")) return bench(atoi(argv[2]), atoi(argv[3]));
#ifdef EMU
    if (argc == 2 && !strcmp(argv[1], "report")) {
        for (int s = 0; s < SFT_COUNT(steps); s++) counts(s), emu_report(NULL), printf("\n");
        return 0;
    }
#endif
    for (int s = 0; s < SFT_COUNT(steps); s++)
        report(right(s, 96, 64) && right(s, 45, 70) && right(s, 1, 33), steps[s].name, "");
#ifdef EMU
    static const int want[][2] = {{32, 0}, {4, 32}, {4, 1}};
    for (int s = 0; s < SFT_COUNT(steps) && emu_traces(); s++)
        report(counts_are(s, want[s][0], want[s][1]), steps[s].name, ": sectors and passes are the table's");
#endif
    return !good;
}

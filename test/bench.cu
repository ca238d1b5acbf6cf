/* bench.cu - speed of the GPU operations: build/cuda/bench [--json FILE] [--only WORDS] [seconds per case].

   The cases of cases.h, median time by CUDA events, against what the chip can do: bytes against its bandwidth as
   copying a gigabyte measures it, multiplications against its data sheet's flops (a kernel of nothing but mma cannot
   reach those of a Hopper, which wants wgmma), and against cuBLAS where it was there when this was compiled: the
   plain product, without the bias, GELU or residual that ours does in the same pass. Operands are larger than the
   caches. */
#include "../sft.h"
#include <cuda_runtime.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <string>
#include <vector>
#ifdef CUBLAS
#include <cublas_v2.h>
#endif

static void cuda(cudaError_t e) {
    if (e != cudaSuccess) printf("CUDA: %s\n", cudaGetErrorString(e)), exit(2);
}
static SftOps yardstick;             // sft_cuda with cuBLAS's matmuls
static const SftOps *ops = &sft_cuda;
static SftArena memory, work;
static SftCtx ctx = {&sft_cuda, NULL, &work, 0, 0};
static const char *only = "";
static double budget = 0.2, bandwidth, flops_peak[SFT_TYPES];
static json_t *results;
static cudaEvent_t begin, end;
static struct { std::string name; SftType type; double flops, bytes; std::vector<float> ms; double opened; } timed;
static std::vector<double> yardsticks; // seconds of cuBLAS, case by case
static size_t at;                      // the next one that a matmul is compared with

static void place(void *to, const void *from, size_t bytes) { cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); }
static bool measure(const char *op, const char *what, SftType type, double flops, double bytes) {
    timed = {std::string(op) + " " + what, type, flops, bytes, {}, sft_now()};
    if (!strstr(timed.name.c_str(), only) || (ops == &yardstick && strncmp(op, "matmul", 6))) return false;
    cuda(cudaEventRecord(begin));
    return true;
}
static void report(double seconds) {
    const bool memory_bound = timed.flops == 0, matmul = !timed.name.compare(0, 6, "matmul");
    const bool compared = matmul && at < yardsticks.size();
    const double rate = (memory_bound ? timed.bytes : timed.flops) / seconds;
    const double peak = memory_bound ? bandwidth : flops_peak[timed.type], share = peak > 0 ? rate / peak : 0;
    const double ratio = compared ? yardsticks[at++] / seconds : 0;
    printf("%-40s %-5s %10.4f ms %9.1f %-8s", timed.name.c_str(), sft_type_name(timed.type), 1e3 * seconds,
           rate * (memory_bound ? 1e-9 : 1e-12), memory_bound ? "GB/s" : "Tflop/s");
    if (share > 0) printf(" %5.2f of %s", share, memory_bound ? "bandwidth" : "peak     ");
    if (compared) printf("  %5.2f of cuBLAS", ratio);
    printf("\n"), fflush(stdout);
    json_t *o = json_pack("{s:s,s:s,s:f,s:f,s:f,s:f}", "name", timed.name.c_str(), "type", sft_type_name(timed.type),
                          "seconds", seconds, "flops", timed.flops, "bytes", timed.bytes, "share", share);
    if (compared) json_object_set_new(o, "of_cublas", json_real(ratio));
    json_array_append_new(results, o);
}
static bool again(void) { // the first turn warms up and is not counted
    float ms;
    cuda(cudaEventRecord(end)), cuda(cudaEventSynchronize(end)), cuda(cudaEventElapsedTime(&ms, begin, end));
    timed.ms.push_back(ms);
    if (timed.ms.size() < 6 || (sft_now() - timed.opened < budget && timed.ms.size() < 1000)) {
        cuda(cudaEventRecord(begin));
        return true;
    }
    std::sort(timed.ms.begin() + 1, timed.ms.end());
    const double seconds = timed.ms[timed.ms.size() / 2] * 1e-3;
    if (ops == &yardstick) yardsticks.push_back(seconds);
    else report(seconds);
    return false;
}
#include "cases.h"

#ifdef CUBLAS
// out^T[m,n] = beta out^T + a b, in cuBLAS's order, columns first: our rows are its columns.
static void product(SftTensor out, SftTensor a, SftTensor b, bool turn_a, bool turn_b, int64_t k, float beta) {
    static cublasHandle_t handle;
    static const cudaDataType_t types[SFT_TYPES] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F};
    const float one = 1;
    if (!handle && cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) sft_die(SFT_BROKEN, "cublasCreate");
    if (cublasGemmEx(handle, turn_a ? CUBLAS_OP_T : CUBLAS_OP_N, turn_b ? CUBLAS_OP_T : CUBLAS_OP_N, (int)out.dim[1],
                     (int)out.dim[0], (int)k, &one, a.data, types[a.type], (int)a.dim[1], b.data, types[b.type],
                     (int)b.dim[1], &beta, out.data, types[out.type], (int)out.dim[1], CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
        sft_die(SFT_BROKEN, "cublasGemmEx");
}
static void cublas_forward(SftCtx *, SftTensor y, SftTensor, SftTensor x, SftTensor w, SftSide side, SftTensor,
                           SftTensor, float, SftAct) {
    product(y, w, x, true, false, x.dim[1], 0);
    if (side.x.data) product(y, side.w, side.x, true, false, side.x.dim[1], 1);
}
static void cublas_x(SftCtx *, SftTensor dx, SftTensor dy, SftTensor w, SftSide side, SftTensor, float, SftAct, bool) {
    product(dx, w, dy, false, false, dy.dim[1], 0);
    if (side.x.data) product(dx, side.w, side.x, false, false, side.x.dim[1], 1);
}
static void cublas_w(SftCtx *, SftTensor dw, SftTensor, SftTensor dy, SftTensor x) {
    product(dw, x, dy, false, true, x.dim[0], 1);
}
#endif

static double copy_bandwidth(void) { // of a copy of 1 GB: read and written
    const size_t bytes = (size_t)1 << 30;
    void *p;
    float best = 1e30f, ms;
    cuda(cudaMalloc(&p, 2 * bytes));
    for (int i = 0; i < 10; i++) {
        cuda(cudaEventRecord(begin)), cuda(cudaMemcpyAsync(p, (char *)p + bytes, bytes, cudaMemcpyDeviceToDevice));
        cuda(cudaEventRecord(end)), cuda(cudaEventSynchronize(end)), cuda(cudaEventElapsedTime(&ms, begin, end));
        best = fminf(best, ms);
    }
    cuda(cudaFree(p));
    return 2 * (double)bytes / (best * 1e-3);
}
static void all_cases(void) { // 8 documents of 1024 tokens
    const Shapes s = {8192, 8192, 1024, 50257, 1024, 124439808};
    for (int type = SFT_F32; type <= SFT_BF16; type++) {
        matmul_cases((SftType)type, s.matmul_tokens, s.vocabulary);
        attention_cases((SftType)type, s.tokens, s.document);
        memory_cases((SftType)type, s);
    }
}
int main(int argc, char **argv) {
    const char *file = NULL;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--only") && i + 1 < argc) only = argv[++i];
        else if (!strcmp(argv[i], "--json") && i + 1 < argc) file = argv[++i];
        else budget = atof(argv[i]);
    const SftDevice device = sft_cuda.device();
    results = json_array();
    memory.size = (size_t)8 << 30, work.size = (size_t)1 << 30;
    cuda(cudaMalloc((void **)&memory.base, memory.size)), cuda(cudaMalloc((void **)&work.base, work.size));
    cuda(cudaEventCreate(&begin)), cuda(cudaEventCreate(&end));
    bandwidth = copy_bandwidth();
    for (int type = 0; type < SFT_TYPES; type++) flops_peak[type] = device.flops[type];
    printf("%s: copies %.0f GB/s; data sheet %.1f Tflop/s in fp32, %.1f in bf16\n", device.name, bandwidth * 1e-9,
           flops_peak[SFT_F32] * 1e-12, flops_peak[SFT_BF16] * 1e-12);
#ifdef CUBLAS
    yardstick = sft_cuda, yardstick.matmul_forward = cublas_forward;
    yardstick.matmul_backward_x = cublas_x, yardstick.matmul_backward_w = cublas_w;
    ops = &yardstick, all_cases(), ops = &sft_cuda;
#endif
    all_cases();
    if (!file) return 0;
    return json_dump_file(json_pack("{s:s,s:f,s:f,s:o}", "device", device.name, "bandwidth", bandwidth, "peak_bf16",
                                    flops_peak[SFT_BF16], "results", results), file, JSON_INDENT(1)) != 0;
}

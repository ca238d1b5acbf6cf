/* gpu.cu - what a test in C needs of CUDA: memory of the GPU, a stream, and the race detector's count. */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#define CUDA(call) cuda((call), #call)
static void cuda(cudaError_t error, const char *call) {
    if (error != cudaSuccess) printf("not ok - %s: %s\n", call, cudaGetErrorString(error)), exit(1);
}

extern "C" {
void *test_gpu_stream(void) { // one that does not wait for the default stream, nor that for it
    static cudaStream_t stream;
    if (!stream) CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
void *test_gpu_alloc(size_t bytes) {
    void *p = NULL;
    CUDA(cudaMalloc(&p, bytes ? bytes : 1));
    return p;
}
void test_gpu_free(void *p) { CUDA(cudaFree(p)); }
void test_gpu_copy(void *to, const void *from, size_t bytes) { // to or from the GPU, behind all ops of the stream
    cudaStream_t stream = (cudaStream_t)test_gpu_stream();
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream)), CUDA(cudaStreamSynchronize(stream));
}
int test_gpu_emulated(void) {
#ifdef EMU
    return 1;
#else
    return 0;
#endif
}
int test_gpu_watched(void) { // does this build watch every access? It is slow, then
#ifdef __SANITIZE_ADDRESS__
    return 1;
#elif defined(EMU)
    return emu_traces();
#else
    return 0;
#endif
}
int test_gpu_races(void) {
#ifdef EMU
    return emu_races();
#else
    return 0;
#endif
}
}

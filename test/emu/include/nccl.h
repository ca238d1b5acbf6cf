// Stand-in for <nccl.h>: the calls are declared; one rank works (../memory.cc).
#pragma once
#include "cuda_runtime.h"
#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_VERSION_CODE 22800
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct EmuNccl *ncclComm_t;
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;
typedef enum {
    ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclSystemError = 2, ncclInternalError = 3, ncclInvalidArgument = 4,
    ncclInvalidUsage = 5, ncclRemoteError = 6, ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;
typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9
} ncclDataType_t;
ncclResult_t ncclGetVersion(int *version), ncclGetUniqueId(ncclUniqueId *id), ncclGroupStart(), ncclGroupEnd();
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t c), ncclCommAbort(ncclComm_t c),
    ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e);
ncclResult_t ncclCommCount(const ncclComm_t c, int *n), ncclCommUserRank(const ncclComm_t c, int *r);
const char *ncclGetErrorString(ncclResult_t r), *ncclGetLastError(ncclComm_t c);
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t st);
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t nrecv, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t st);
ncclResult_t ncclAllGather(const void *s, void *r, size_t nsend, ncclDataType_t t, ncclComm_t c, cudaStream_t st);
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st);
ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c,
                        cudaStream_t st);
ncclResult_t ncclSend(const void *s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st);
ncclResult_t ncclRecv(void *r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st);

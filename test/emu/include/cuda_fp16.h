// Stand-in for <cuda_fp16.h>.
#pragma once
#include "cuda_bf16.h"
EMU_HALF(__half, __half2, __half_raw, emu::to_f16, emu::from_f16)
typedef __half half;
typedef __half2 half2;
static inline half __float2half(float f) { return f; }
static inline half __float2half_rn(float f) { return f; }
static inline half __double2half(double f) { return f; }
static inline float __half2float(half h) { return h; }
static inline half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
static inline half2 __float2half2_rn(float f) { return {f, f}; }
static inline half2 __half2half2(half h) { return {h, h}; }
static inline half2 __halves2half2(half x, half y) { return {x, y}; }
static inline float2 __half22float2(half2 v) { return {(float)v.x, (float)v.y}; }
static inline half __ushort_as_half(unsigned short u) { return __half_raw{u}; }
static inline unsigned short __half_as_ushort(half h) { return h.__x; }

// Stand-in for <cuda_fp16.h>.
#pragma once
#include "cuda_bf16.h"
EMU_HALF(__half, __half2, __half_raw, emu::to_f16, emu::from_f16)
typedef __half half;
typedef __half2 half2;
EMU_INLINE half __float2half(float f) { return f; }
EMU_INLINE half __float2half_rn(float f) { return f; }
EMU_INLINE half __double2half(double f) { return f; }
EMU_INLINE float __half2float(half h) { return h; }
EMU_INLINE half2 __floats2half2_rn(float x, float y) { return {x, y}; }
EMU_INLINE half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
EMU_INLINE half2 __float2half2_rn(float f) { return {f, f}; }
EMU_INLINE half2 __half2half2(half h) { return {h, h}; }
EMU_INLINE half2 __halves2half2(half x, half y) { return {x, y}; }
EMU_INLINE float2 __half22float2(half2 v) { return {(float)v.x, (float)v.y}; }
EMU_INLINE half __ushort_as_half(unsigned short u) { return __half_raw{u}; }
EMU_INLINE unsigned short __half_as_ushort(half h) { return h.__x; }

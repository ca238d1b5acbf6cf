// Stand-in for <cuda_bf16.h>; both 16-bit types are made here, because they differ in their conversions alone.
#pragma once
#include "cuda_runtime.h"
namespace emu {
EMU_INLINE uint16_t to_bf16(float f) { // to nearest, ties to even
    uint32_t u = emu_bits<uint32_t>(f);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
EMU_INLINE float from_bf16(uint16_t h) { return emu_bits<float>((uint32_t)h << 16); }
#if defined(__F16C__) && defined(__FLT16_MANT_DIG__) // one instruction
EMU_INLINE uint16_t to_f16(float f) { return f != f ? 0x7fff : emu_bits<uint16_t>((_Float16)f); }
EMU_INLINE float from_f16(uint16_t h) { return (float)emu_bits<_Float16>(h); }
#else
EMU_INLINE uint16_t to_f16(float f) {
    uint32_t u = emu_bits<uint32_t>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00); // rounds to infinity
    if (a < 0x38800000) return (uint16_t)(sign | (uint32_t)nearbyintf(emu_bits<float>(a) * 0x1p24f)); // subnormal
    a -= 0x38000000;
    return (uint16_t)(sign | (a + 0xfff + (a >> 13 & 1)) >> 13);
}
EMU_INLINE float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 0) return emu_bits<float>(sign | emu_bits<uint32_t>((float)m * 0x1p-24f));
    return emu_bits<float>(sign | (e == 31 ? 0x7f800000 : (e + 112) << 23) | m << 13);
}
#endif
} // namespace emu
#define EMU_METHOD __attribute__((always_inline))
#define EMU_HALF(T, T2, RAW, to, from) \
    struct RAW { unsigned short x; }; \
    struct T { \
        uint16_t __x; \
        T() = default; \
        EMU_METHOD T(RAW r) : __x(r.x) {} \
        EMU_METHOD T(float f) : __x(to(f)) {} \
        EMU_METHOD T(double f) : __x(to((float)f)) {} \
        EMU_METHOD T(int i) : __x(to((float)i)) {} \
        EMU_METHOD T(unsigned i) : __x(to((float)i)) {} \
        EMU_METHOD operator float() const { return from(__x); } \
        EMU_METHOD operator RAW() const { return {__x}; } \
        EMU_METHOD T &operator+=(T o) { return *this = T((float)*this + (float)o); } \
        EMU_METHOD T &operator-=(T o) { return *this = T((float)*this - (float)o); } \
        EMU_METHOD T &operator*=(T o) { return *this = T((float)*this * (float)o); } \
        EMU_METHOD T &operator/=(T o) { return *this = T((float)*this / (float)o); } \
    }; \
    struct alignas(4) T2 { \
        T x, y; \
        T2() = default; \
        EMU_METHOD T2(T x, T y) : x(x), y(y) {} \
    }; \
    EMU_INLINE T operator+(T a, T b) { return T((float)a + (float)b); } \
    EMU_INLINE T operator-(T a, T b) { return T((float)a - (float)b); } \
    EMU_INLINE T operator*(T a, T b) { return T((float)a * (float)b); } \
    EMU_INLINE T operator/(T a, T b) { return T((float)a / (float)b); } \
    EMU_INLINE T operator-(T a) { return T(RAW{(uint16_t)(a.__x ^ 0x8000)}); } \
    EMU_INLINE bool operator<(T a, T b) { return (float)a < (float)b; } \
    EMU_INLINE bool operator>(T a, T b) { return (float)a > (float)b; } \
    EMU_INLINE bool operator<=(T a, T b) { return (float)a <= (float)b; } \
    EMU_INLINE bool operator>=(T a, T b) { return (float)a >= (float)b; } \
    EMU_INLINE bool operator==(T a, T b) { return (float)a == (float)b; } \
    EMU_INLINE bool operator!=(T a, T b) { return (float)a != (float)b; } \
    EMU_INLINE T __hadd(T a, T b) { return a + b; } \
    EMU_INLINE T __hsub(T a, T b) { return a - b; } \
    EMU_INLINE T __hmul(T a, T b) { return a * b; } \
    EMU_INLINE T __hdiv(T a, T b) { return a / b; } \
    EMU_INLINE T __hneg(T a) { return -a; } \
    EMU_INLINE T __habs(T a) { return T(RAW{(uint16_t)(a.__x & 0x7fff)}); } \
    EMU_INLINE T __hfma(T a, T b, T c) { return T(fmaf(a, b, c)); } \
    EMU_INLINE T __hmax(T a, T b) { return T(fmaxf(a, b)); } \
    EMU_INLINE T __hmin(T a, T b) { return T(fminf(a, b)); } \
    EMU_INLINE bool __hisnan(T a) { return std::isnan((float)a); } \
    EMU_INLINE int __hisinf(T a) { return std::isinf((float)a) ? (float)a > 0 ? 1 : -1 : 0; } \
    EMU_INLINE T2 __hadd2(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; } \
    EMU_INLINE T2 __hsub2(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; } \
    EMU_INLINE T2 __hmul2(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; } \
    EMU_INLINE T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    EMU_INLINE T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; } \
    EMU_INLINE T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; } \
    EMU_INLINE T2 operator+(T2 a, T2 b) { return __hadd2(a, b); } \
    EMU_INLINE T2 operator*(T2 a, T2 b) { return __hmul2(a, b); } \
    EMU_INLINE T __low2half(T2 v) { return v.x; } \
    EMU_INLINE T __high2half(T2 v) { return v.y; } \
    EMU_INLINE float __low2float(T2 v) { return v.x; } \
    EMU_INLINE float __high2float(T2 v) { return v.y; } \
    EMU_INLINE T atomicAdd(T *p, T v) { return emu::atomic(p, [=](T x) { return x + v; }); } \
    EMU_INLINE T2 atomicAdd(T2 *p, T2 v) { return emu::atomic(p, [=](T2 x) { return __hadd2(x, v); }); }
EMU_HALF(__nv_bfloat16, __nv_bfloat162, __nv_bfloat16_raw, emu::to_bf16, emu::from_bf16)
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
EMU_INLINE nv_bfloat16 __float2bfloat16(float f) { return f; }
EMU_INLINE nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
EMU_INLINE nv_bfloat16 __double2bfloat16(double f) { return f; }
EMU_INLINE float __bfloat162float(nv_bfloat16 h) { return h; }
EMU_INLINE nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
EMU_INLINE nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
EMU_INLINE nv_bfloat162 __float2bfloat162_rn(float f) { return {f, f}; }
EMU_INLINE nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 h) { return {h, h}; }
EMU_INLINE nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
EMU_INLINE nv_bfloat16 __low2bfloat16(nv_bfloat162 v) { return v.x; }
EMU_INLINE nv_bfloat16 __high2bfloat16(nv_bfloat162 v) { return v.y; }
EMU_INLINE float2 __bfloat1622float2(nv_bfloat162 v) { return {(float)v.x, (float)v.y}; }
EMU_INLINE nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return __nv_bfloat16_raw{u}; }
EMU_INLINE unsigned short __bfloat16_as_ushort(nv_bfloat16 h) { return h.__x; }

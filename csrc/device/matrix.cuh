// Tensor cores' own operations, and numbers as they take them.
#pragma once
#include "device/ring.cuh"

namespace distmk {

DISTMK_FN void load_matrices(uint32_t address, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

// c += a b: 16 rows by 16, 16 by 8 columns. Lane 4 g + t holds of `a` row g, columns 2 t and 2 t + 1 (a[0]) and those 8
// further on (a[2]), the same of row g + 8 (a[1], a[3]); of `b` column g, rows as the columns of a; of `c` row g (c[0],
// c[1]) and row g + 8, columns 2 t and 2 t + 1.
DISTMK_FN void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DISTMK_FN uint32_t pack_bf16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// What rounding to bf16 leaves of a number, itself rounded: two bf16 say a float to within its last few bits.
DISTMK_FN float low_half(float v) { return v - __bfloat162float(__float2bfloat16_rn(v)); }

}  // namespace distmk

// Lamport buffers: elements that carry their own arrival. Zero means not published yet, and a value of zero is
// published as -0. A reader polls elements instead of waiting for an event, which would take a fence and a counter
// more. Before a buffer is used again its elements are reset to zero (distmk/lower/rotating.py); distmk check proves
// both.
#pragma once
#include "device/core/bf16.cuh"

namespace distmk {

// A float as it is published.
DISTMK_FN float lamport_value(float value) { return value == 0.0f ? -0.0f : value; }

DISTMK_FN void publish(float* out, float value) { publish_store(out, lamport_value(value)); }
DISTMK_FN void publish_four(float* out, const float4& v) {
  const auto bits = [](float value) { return __float_as_uint(lamport_value(value)); };
  publish_store(reinterpret_cast<uint4*>(out), {bits(v.x), bits(v.y), bits(v.z), bits(v.w)});
}

// Part of a bf16 vector, and the buffer of its last use, to be reset (null: nobody polls the vector).
struct LamportVector {
  __nv_bfloat16 *out, *reset;

  DISTMK_FN explicit operator bool() const { return out; }
  DISTMK_FN void store(uint64_t i, float value) const {
    const unsigned short bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    publish_store(out + i, bits ? bits : 0x8000);
    if (reset) publish_store(reset + i, 0);
  }
  // Whether publish_four() is aligned, for rows of that stride and columns that are multiples of four.
  DISTMK_FN bool takes_four(uint32_t stride) const {
    return ((reinterpret_cast<uint64_t>(out) | reinterpret_cast<uint64_t>(reset)) % sizeof(uint2) | stride % 4) == 0;
  }
  DISTMK_FN void publish_four(uint64_t i, const float (&v)[4]) const {
    publish_store(reinterpret_cast<uint2*>(out + i), {lamport_pair_of(v[0], v[1]), lamport_pair_of(v[2], v[3])});
    if (reset) publish_store(reinterpret_cast<uint2*>(reset + i), {0, 0});
  }

 private:
  DISTMK_FN static uint32_t lamport_pair_of(float a, float b) {
    const uint32_t pair = pack_bf16(a, b);
    return pair | (pair & 0xffff ? 0 : 0x8000) | (pair >> 16 ? 0 : 0x80000000u);
  }
};

// A word of two bf16 elements that is published as a whole, so that only 0 means not yet.
DISTMK_FN uint32_t lamport_pair(uint32_t pair) { return pair ? pair : 0x80008000u; }

// Whether all eight bf16 elements are published.
DISTMK_FN bool all_published(const uint4& v) {
  const auto missing = [](uint32_t pair) { return (pair - 0x00010001u) & ~pair & 0x80008000u; };
  return !(missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w));
}

// Whether all four words, or any of them, are published.
DISTMK_FN bool words_published(const uint4& v) { return v.x && v.y && v.z && v.w; }
DISTMK_FN bool any_published(const uint4& v) { return v.x | v.y | v.z | v.w; }

}  // namespace distmk

// Lamport (sentinel) buffers, as in the one-shot all-reduces of TensorRT-LLM and FlashInfer. Elements carry their own
// arrival, so a reader needs neither a fence nor a counter.
//   publish  A value is stored once. Zero means not yet, so a value of zero is published as -0.
//   poll     A body loads elements until all are published, or until the task's waits are met (Context::poll).
//   rotate   A writer publishes to several buffers in turn (distmk/lower/rotating.py).
//   reset    The writer zeroes the same elements of an older buffer, or a single reader zeroes them after reading.
//   shrink   After a larger batch, the writer also zeroes the rows that only the previous iteration had.
// `distmk check` proves that elements are published once between two resets, and that a reset is over before anybody
// may poll (distmk/check/lamport.py).
#pragma once
#include "device/core/bf16.cuh"
#include "runtime/task_types.h"

namespace distmk {

// The value that is published for a float: -0 instead of 0.
DISTMK_FN float lamport_value(float value) { return value == 0.0f ? -0.0f : value; }

DISTMK_FN void publish(float* out, float value) { publish_store(out, lamport_value(value)); }
DISTMK_FN void publish_four(float* out, const float4& v) {
  const auto bits = [](float value) { return __float_as_uint(lamport_value(value)); };
  publish_store(reinterpret_cast<uint4*>(out), {bits(v.x), bits(v.y), bits(v.z), bits(v.w)});
}

// Whether polled values have been published: all of them, or any of them.
DISTMK_FN bool is_published(float value) { return __float_as_uint(value) != 0; }
DISTMK_FN bool is_published(const float2& v) { return is_published(v.x) && is_published(v.y); }
DISTMK_FN bool words_published(const uint4& v) { return v.x && v.y && v.z && v.w; }
DISTMK_FN bool any_published(const uint4& v) { return v.x | v.y | v.z | v.w; }
// Whether all eight bf16 elements have been published, by a test for zero halves.
DISTMK_FN bool all_published(const uint4& v) {
  const auto missing = [](uint32_t pair) { return (pair - 0x00010001u) & ~pair & 0x80008000u; };
  return !(missing(v.x) | missing(v.y) | missing(v.z) | missing(v.w));
}

// Resets one element, or all words of a vector type.
DISTMK_FN void lamport_reset(float* p) { publish_store(p, 0.0f); }
DISTMK_FN void lamport_reset(__nv_bfloat16* p) { publish_store(p, 0); }
DISTMK_FN void lamport_reset(uint2* p) { publish_store(p, {0, 0}); }
DISTMK_FN void lamport_reset(uint4* p) { publish_store(p, {0, 0, 0, 0}); }

// Part of a bf16 vector, and the same part of an older buffer of the rotation, which is to be reset (null: nobody polls
// the vector).
struct LamportVector {
  __nv_bfloat16 *out, *reset;

  DISTMK_FN explicit operator bool() const { return out; }
  DISTMK_FN void store(uint64_t i, float value) const {
    const unsigned short bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    publish_store(out + i, bits ? bits : 0x8000);
    if (reset) lamport_reset(reset + i);
  }
  // Whether publish_four() is aligned, for rows of this stride and columns that are multiples of four.
  DISTMK_FN bool takes_four(uint32_t stride) const {
    return ((reinterpret_cast<uint64_t>(out) | reinterpret_cast<uint64_t>(reset)) % sizeof(uint2) | stride % 4) == 0;
  }
  DISTMK_FN void publish_four(uint64_t i, const float (&v)[4]) const {
    publish_store(reinterpret_cast<uint2*>(out + i), {lamport_pair_of(v[0], v[1]), lamport_pair_of(v[2], v[3])});
    if (reset) lamport_reset(reinterpret_cast<uint2*>(reset + i));
  }

 private:
  DISTMK_FN static uint32_t lamport_pair_of(float a, float b) {
    const uint32_t pair = pack_bf16(a, b);
    return pair | (pair & 0xffff ? 0 : 0x8000) | (pair >> 16 ? 0 : 0x80000000u);
  }
};

// Two bf16 elements that are published as one word, so only a word of 0 means not yet.
DISTMK_FN uint32_t lamport_pair(uint32_t pair) { return pair ? pair : 0x80008000u; }

// Implements reset_stale_rows() of a body (device/core/hot_path.cuh): resets the rows that only the previous iteration
// had. The body has reset the others.
template <class T>
DISTMK_FN void reset_rows(const Context& context, const Batch& batch, T* columns, uint32_t num_cols, uint32_t stride) {
  DISTMK_NO_UNROLL
  for (uint32_t row = batch.num_rows; row < batch.num_reset_rows; ++row) {
    DISTMK_NO_UNROLL
    for (uint32_t i = context.team.index; i < num_cols; i += context.team.size)
      lamport_reset(columns + uint64_t{row} * stride + i);
  }
}
// reset_rows() for a task whose columns all lie at `args.lamport_reset`.
template <class T, class Args>
DISTMK_FN void reset_columns(const Context& context, const Args& args, const Batch& batch, uint32_t num_cols,
                             uint32_t stride) {
  reset_rows(context, batch, context.at<T>(args.lamport_reset), num_cols, stride);
}

}  // namespace distmk

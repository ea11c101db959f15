// Where the epilogue of linear layers stores a column of the output (epilogue.cuh), and the factors of its sums.
#pragma once
#include "device/comm/lamport.cuh"
#include "runtime/context.h"
#include "runtime/pointwise.h"

namespace distmk {
namespace linear {

// `Args`: the arguments of a linear task, or of one with packed weights.
template <class Args>
struct EpilogueParams {
  Context& context;
  const Args& args;
  uint32_t num_tokens;

  DISTMK_FN Epilogue kind() const { return static_cast<Epilogue>(args.epilogue); }
};

// Factors of a weight row's sums besides the scale of the token: there are none. Some packed weights have them
// (device/formats/packed_linear.cuh).
struct NoRowFactors {
  template <class Params>
  DISTMK_FN void load(const Params&, uint32_t, uint32_t) {}
  template <class Context, class Args>
  DISTMK_FN static void prefetch(const Context&, const Args&) {}
  DISTMK_FN float gate(float scale) const { return scale; }
  DISTMK_FN float up(float scale) const { return scale; }
};
template <class Args>
struct RowFactors : NoRowFactors {};

// Where one column of the output goes: addresses for token 0, and strides from token to token. A null pointer means
// nowhere. The addresses are resolved before the partial sums are complete, because every instruction after that adds
// latency.
template <class Args>
struct OutputPointers : RowFactors<Args> {
  LamportVector bf16 = {nullptr, nullptr};
  float *f32 = nullptr, *f32_reset = nullptr;
  uint32_t bf16_stride = 0, f32_stride = 0;
  float bias = 0.0f, up_bias = 0.0f;
  uint32_t up_rows = 0;  // gated: distance from the column's gate row to its up row

  // `rank`: the rank that PUSH stores to; the pointers stay null if it is not peer-mapped. ONE_TOKEN excludes ARGMAX.
  template <bool ONE_TOKEN>
  DISTMK_FN void resolve(const EpilogueParams<Args>& params, uint32_t column, uint32_t rank) {
    const Context& context = params.context;
    const Args& args = params.args;
    if (const float* biases = context.at<float>(args.bias)) {
      bias = biases[column];
      if (up_rows) up_bias = biases[args.num_features + column];
    }
    if (!ONE_TOKEN && params.kind() == Epilogue::ARGMAX) return;  // stores_logits() decides row by row
    switch (params.kind()) {
      case Epilogue::PUSH:
        return resolve_f32(context.peer<float>(rank, args.out), column, args.num_features);
        DISTMK_GATED_CASES
        return resolve_bf16(params, args.out, column, args.out_stride);
      default:
        resolve_f32(context.at<float>(args.out), column, args.out_stride);
        if (args.out_bf16)
          resolve_bf16(params, args.out_bf16, column, args.out_bf16_stride);
        else
          f32_reset = at_column(context.at<float>(args.lamport_reset), column);
    }
  }

  DISTMK_FN void store(uint32_t token, float value) const {
    if (bf16) bf16.store(uint64_t{token} * bf16_stride, value);  // first, because other tasks poll it
    const uint64_t i = uint64_t{token} * f32_stride;
    if (f32) publish(f32 + i, value);
    if (f32_reset) lamport_reset(f32_reset + i);
  }

 private:
  template <class T>
  DISTMK_FN static T* at_column(T* matrix, uint32_t column) {
    return matrix ? matrix + column : nullptr;
  }
  DISTMK_FN void resolve_f32(float* matrix, uint32_t column, uint32_t stride) {
    f32 = at_column(matrix, column);
    f32_stride = stride;
  }
  DISTMK_FN void resolve_bf16(const EpilogueParams<Args>& params, uint64_t matrix, uint32_t column, uint32_t stride) {
    bf16.out = params.context.template at<__nv_bfloat16>(matrix) + column;
    bf16.reset = at_column(params.context.template at<__nv_bfloat16>(params.args.lamport_reset), column);
    bf16_stride = stride;
  }
};

}  // namespace linear
}  // namespace distmk

// Rows of bf16 weights, of which nothing is decoded (distmk/formats/bf16.py).
#pragma once
#include "host/formats/row_format.h"

namespace distmk {

struct Bf16Rows {};

}  // namespace distmk

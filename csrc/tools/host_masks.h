// Masks of constrained requests, as a host writes them while a launch runs, for run_ranks.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"

namespace distmk {

class HostMasks {
 public:
  // `early_stamp`: a planted bug. The position is stored before the words, so that these may be read too early.
  HostMasks(uint32_t vocab, bool early_stamp)
      : vocab_(vocab), num_words_((vocab + 127) / 128 * 4), early_stamp_(early_stamp) {}

  // Makes a request constrained. Its first mask is written by begin().
  void constrain(RequestEntry& request) {
    rows_.push_back({request.id, request.prompt_len, std::vector<uint32_t>(HEADER_WORDS + num_words_)});
    request.sample = static_cast<uint32_t>(RowSample::DRAW);
    request.sampling.mask = reinterpret_cast<uint64_t>(rows_.back().memory.data());
    request.sampling.num_logprobs = request.sampling.num_prompt_logprobs = -1;
  }
  void begin() {
    for (Row& row : rows_) write(row);
  }
  // Reads the tokens that the launch has published since the last call, and writes the masks of the next ones.
  void advance(const HostCounts& counts, const std::vector<TokenEvent>& tokens) {
    const uint64_t end = __atomic_load_n(&counts.tokens, __ATOMIC_ACQUIRE);
    for (; num_read_ < end; ++num_read_) {
      const TokenEvent& event = tokens[num_read_];
      for (Row& row : rows_) {
        if (row.request != event.request || event.token < 0) continue;
        num_wrong_ += !is_allowed(row, static_cast<uint32_t>(event.token));
        ++num_tokens_;
        ++row.position;
        if (event.finish == static_cast<uint16_t>(FinishReason::NONE)) write(row);
      }
    }
  }
  uint32_t num_tokens() const { return num_tokens_; }
  uint32_t num_wrong() const { return num_wrong_; }

 private:
  static constexpr uint32_t HEADER_WORDS = sizeof(TokenMask) / sizeof(uint32_t);
  struct Row {
    uint32_t request, position;  // position: of the next token
    std::vector<uint32_t> memory;
  };
  const uint32_t vocab_, num_words_;
  const bool early_stamp_;
  std::vector<Row> rows_;
  uint64_t num_read_ = 0;
  uint32_t num_tokens_ = 0, num_wrong_ = 0;

  // Every seventh token, another seventh at each position.
  static bool is_allowed(const Row& row, uint32_t token) { return (token + row.position * 3 + row.request) % 7 == 0; }

  void write(Row& row) {
    if (early_stamp_) stamp(row);
    for (uint32_t word = 0; word < num_words_; ++word) {
      uint32_t bits = 0;
      for (uint32_t bit = 0; bit < 32; ++bit)
        bits |= uint32_t{word * 32 + bit < vocab_ && is_allowed(row, word * 32 + bit)} << bit;
      row.memory[HEADER_WORDS + word] = bits;
    }
    if (!early_stamp_) stamp(row);
  }
  static void stamp(Row& row) {
    auto* mask = reinterpret_cast<TokenMask*>(row.memory.data());
    __atomic_store_n(&mask->position, uint64_t{row.position}, __ATOMIC_RELEASE);
  }
};

}  // namespace distmk

#pragma once

#include <cstdint>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

enum class Status { kSolved, kInfeasible, kTimedOut };

struct Question {
  std::int64_t capacity = -1;  // bytes; -1: the least height
  double within = 0.0;         // minimising: so small a part above the bound is low enough
  double seconds = 60.0;
  std::uint64_t seed = 0;
  int threads = 2;
  bool descend = true;    // one layout after another without a look back
  bool search = true;  // the exact search
  const std::uint8_t* cancel = nullptr;  // a byte that is set to end it
};

struct Answer {
  Status status = Status::kTimedOut;
  std::int64_t height = -1;           // bytes; -1: nothing found
  std::int64_t bound = 0;             // bytes; no layout is lower
  std::vector<std::int64_t> offsets;  // bytes, one a buffer; empty: nothing found
  std::vector<int> witness;           // rows that cannot fit together, where infeasible
};

// The same question, seed and number of threads give the same answer, time permitting.
Answer solve(const Columns& columns, const Question& question);

}  // namespace memplan::packing

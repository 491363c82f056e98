#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memplan::recompute {

// Terms of what segments of a chain hold, in bytes; see memplan/recompute/chain/traced.py. Row
// k - 1 is layer k = 1..n, row i is boundary i = 0..n - 1.
struct ChainColumns {
  std::span<const std::int64_t> keep;      // a_i: a checkpoint on boundary i.
  std::span<const std::int64_t> kept;      // Q_i: what layers up to i save.
  std::span<const std::int64_t> unsaved;   // u_i: a_i where no backward reads it, else 0.
  std::span<const std::int64_t> backward;  // D_k
  std::span<const std::int64_t> forward;   // By layer, beside its input.
  std::span<const std::int64_t> replay;    // F_k
  std::span<const std::int64_t> tail;      // Last layer that a replay up to k runs; 0 for none.
  std::span<const std::int64_t> end;       // Held when that replay ends, beside entry.
  std::span<const std::int64_t> entry;     // Held before the backward of layer k.
  std::span<const std::int64_t> first;     // Held at the first op of the backward of layer k.
  std::span<const std::int64_t> last;      // S(i, n)
};

struct ChainOptimum {
  std::int64_t peak_bytes = 0;
  std::vector<std::int64_t> checkpoints;  // Rising, without boundary 0.
};

// The least peak of a chain of at least one layer, in amortised O(n). `tail` must not fall. Proved
// where S grows with j and with falling i; else an upper bound's subset, whose peak is for the caller to find.
ChainOptimum least_peak_chain(const ChainColumns& columns);

}  // namespace memplan::recompute

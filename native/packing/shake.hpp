#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "packing/problem.hpp"

namespace memplan::packing {

// Better and better layouts by one descent after another: buffers that stood out above the bound
// are taken earlier the next time, and some at random; what comes out higher is forgotten.
// (Squeaky wheel optimisation, Joslin and Clements 1999.)
class Shake {
 public:
  // `descent` lays out by scores: fills the offsets and returns the height, -1 when stopped.
  using Descent =
      std::function<std::int64_t(const std::vector<double>&, std::vector<std::int64_t>&)>;

  Shake(const Problem& problem, std::vector<double> score, std::uint64_t seed);

  // A number of descents, fewer when one reaches `goal`.
  void run(const Descent& descent, int descents, std::int64_t goal);

  std::int64_t height() const { return height_; }  // -1: nothing yet
  const std::vector<std::int64_t>& offsets() const { return offsets_; }

 private:
  std::vector<double> changed();

  const Problem* problem_;
  std::mt19937_64 random_;
  std::vector<double> score_;
  std::vector<std::int64_t> offsets_;
  std::int64_t height_ = -1;
};

}  // namespace memplan::packing

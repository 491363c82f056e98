#include "packing/shake.hpp"

#include <cmath>
#include <utility>

namespace memplan::packing {

Shake::Shake(const Problem& problem, std::vector<double> score, std::uint64_t seed)
    : problem_(&problem), random_(seed), score_(std::move(score)) {}

std::vector<double> Shake::changed() {
  std::uniform_real_distribution<double> unit(0.0, 1.0);
  std::vector<double> score = score_;
  const double gap = static_cast<double>(height_ - problem_->bound);
  const double line = static_cast<double>(problem_->bound) + gap * unit(random_);
  const double chance = unit(random_);
  for (std::size_t i = 0; i < score.size(); ++i) {
    const auto top = static_cast<double>(offsets_[i] + problem_->items[i].size);
    if (top > line && unit(random_) < chance) score[i] *= 1.0 + 0.5 * unit(random_);
  }
  const auto some = static_cast<std::size_t>(std::exp2(3.0 * unit(random_)));
  std::uniform_int_distribution<std::size_t> any(0, score.size() - 1);
  for (std::size_t k = 0; k < some; ++k) {
    score[any(random_)] *= std::exp(2.0 * unit(random_) - 1.0);
  }
  return score;
}

void Shake::run(const Descent& descent, int descents, std::int64_t goal) {
  std::vector<std::int64_t> offsets;
  for (int i = 0; i < descents; ++i) {
    if (height_ >= 0 && height_ <= goal) return;
    std::vector<double> score = height_ < 0 ? score_ : changed();
    const std::int64_t height = descent(score, offsets);
    if (height < 0) return;
    if (height_ >= 0 && height > height_) continue;
    height_ = height;
    score_ = std::move(score);
    offsets_ = offsets;
  }
}

}  // namespace memplan::packing

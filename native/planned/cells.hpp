#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace memplan::planned {

// A set of cells, one bit each.
class Cells {
 public:
  explicit Cells(std::int32_t count)
      : count_(count), words_((static_cast<std::size_t>(count) + 63) / 64 + 1, 0) {}

  // Whether none of [first, last) is in the set.
  bool none(std::int32_t first, std::int32_t last) const {
    return each(first, last, [this](std::size_t word, std::uint64_t mask) {
      return (words_[word] & mask) == 0;
    });
  }
  void add(std::int32_t first, std::int32_t last) {
    each(first, last, [this](std::size_t word, std::uint64_t mask) {
      words_[word] |= mask;
      return true;
    });
  }
  void remove(std::int32_t first, std::int32_t last) {
    each(first, last, [this](std::size_t word, std::uint64_t mask) {
      words_[word] &= ~mask;
      return true;
    });
  }
  void add(const Cells& other) {
    for (std::size_t word = 0; word < words_.size(); ++word) words_[word] |= other.words_[word];
  }

  // The first cell from `from` on that is (not) in the set; the number of cells where there is none.
  std::int32_t next_in(std::int32_t from) const { return next(from, 0); }
  std::int32_t next_out(std::int32_t from) const { return next(from, ~std::uint64_t{0}); }

 private:
  template <typename Visit>
  static bool each(std::int32_t first, std::int32_t last, Visit visit) {
    if (first >= last) return true;
    const auto begin = static_cast<std::uint32_t>(first), end = static_cast<std::uint32_t>(last) - 1;
    std::size_t word = begin / 64;
    const std::size_t final = end / 64;
    std::uint64_t mask = ~std::uint64_t{0} << (begin % 64);
    for (; word < final; ++word, mask = ~std::uint64_t{0}) {
      if (!visit(word, mask)) return false;
    }
    return visit(final, mask & (~std::uint64_t{0} >> (63 - end % 64)));
  }

  std::int32_t next(std::int32_t from, std::uint64_t flip) const {
    if (from >= count_) return count_;
    auto word = static_cast<std::size_t>(from) / 64;
    std::uint64_t bits = (words_[word] ^ flip) & (~std::uint64_t{0} << (from % 64));
    while (bits == 0) {
      if (++word == words_.size()) return count_;
      bits = words_[word] ^ flip;
    }
    const auto found = static_cast<std::int32_t>(word * 64) + std::countr_zero(bits);
    return found < count_ ? found : count_;
  }

  std::int32_t count_;
  std::vector<std::uint64_t> words_;
};

}  // namespace memplan::planned

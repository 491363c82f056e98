#include "recompute/search.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <random>

namespace memplan::recompute {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

double processor_seconds() {
  return static_cast<double>(std::clock()) / static_cast<double>(CLOCKS_PER_SEC);
}

using Wall = std::chrono::steady_clock;
constexpr double kPatience = 4.0;  // PATIENCE of types/deadline.py

struct Change {
  Value value;
  std::int32_t group;
  bool held;
};

class Search {
 public:
  Search(Model& model, const SearchSettings& settings, std::span<const Value> drops,
         std::span<const Value> holds, std::span<std::int32_t> group, std::span<std::uint8_t> held)
      : model_(model),
        settings_(settings),
        drops_(drops),
        holds_(holds),
        group_(group),
        held_(held),
        random_(settings.seed),
        sizes_(model.values(), 0),
        row_bytes_(model.rows()),
        group_seconds_(model.values()),
        end_(processor_seconds() + settings.deadline_seconds),
        latest_(Wall::now() + std::chrono::duration_cast<Wall::duration>(
                                  std::chrono::duration<double>(
                                      kPatience * std::min(settings.deadline_seconds, 1e8)))) {
    for (const std::int32_t number : group_) {
      if (number >= 0) ++sizes_[at(number)];
    }
    now_ = model_.evaluate(group_, held_, row_bytes_, group_seconds_);
    keep_best();
  }

  Outcome run() {
    const double ratio = settings_.end_temperature / settings_.start_temperature;
    const bool nothing = drops_.empty() && holds_.empty();
    for (std::int64_t i = 0; i < (nothing ? 0 : settings_.iterations); ++i) {
      if ((i & 15) == 0 && out_of_time()) break;
      const double progress = static_cast<double>(i) / static_cast<double>(settings_.iterations);
      step(settings_.start_temperature * std::pow(ratio, progress));
    }
    restore_best();
    descend();
    restore_best();
    return now_;
  }

 private:
  bool out_of_time() const {
    return processor_seconds() >= end_ || Wall::now() >= latest_;
  }

  Outcome judge() {
    return model_.evaluate_unchecked(group_, held_, row_bytes_, group_seconds_);
  }

  std::int64_t excess(const Outcome& outcome) const {
    return std::max<std::int64_t>(0, outcome.peak_bytes - settings_.budget_bytes);
  }

  double price(const Outcome& outcome) const {
    return outcome.seconds + settings_.byte_price * static_cast<double>(excess(outcome));
  }

  bool better(const Outcome& a, const Outcome& b) const {
    const std::int64_t x = excess(a);
    const std::int64_t y = excess(b);
    return x != y ? x < y : a.seconds < b.seconds * (1 - 1e-12);
  }

  void keep_best() {
    best_ = now_;
    best_group_.assign(group_.begin(), group_.end());
    best_held_.assign(held_.begin(), held_.end());
  }

  void restore_best() {
    std::copy(best_group_.begin(), best_group_.end(), group_.begin());
    std::copy(best_held_.begin(), best_held_.end(), held_.begin());
    std::fill(sizes_.begin(), sizes_.end(), 0);
    for (const std::int32_t number : group_) {
      if (number >= 0) ++sizes_[at(number)];
    }
    now_ = best_;
  }

  std::size_t below(std::size_t bound) {
    return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random_);
  }
  double chance() { return std::uniform_real_distribution<double>(0.0, 1.0)(random_); }

  void assign(Value value, std::int32_t number, bool hold) {
    undo_.push_back({value, group_[at(value)], held_[at(value)] != 0});
    if (group_[at(value)] >= 0) --sizes_[at(group_[at(value)])];
    if (number >= 0) ++sizes_[at(number)];
    group_[at(value)] = number;
    held_[at(value)] = hold ? 1 : 0;
  }

  void put_back() {
    while (!undo_.empty()) {
      const Change change = undo_.back();
      undo_.pop_back();
      if (group_[at(change.value)] >= 0) --sizes_[at(group_[at(change.value)])];
      if (change.group >= 0) ++sizes_[at(change.group)];
      group_[at(change.value)] = change.group;
      held_[at(change.value)] = change.held ? 1 : 0;
    }
  }

  std::int32_t fresh(Value value) {
    if (sizes_[at(value)] == 0) return value;
    for (const Value other : drops_) {
      if (sizes_[at(other)] == 0) return other;
    }
    return value;
  }

  // The group of a dropped value near drops_[place], on a random side; -1 when there is none.
  std::int32_t neighbour(std::size_t place) {
    const int sign = chance() < 0.5 ? -1 : 1;
    const std::int32_t own = group_[at(drops_[place])];
    auto skip = static_cast<int>(below(3));
    for (auto i = static_cast<std::int64_t>(place) + sign;
         i >= 0 && i < static_cast<std::int64_t>(drops_.size()); i += sign) {
      const std::int32_t number = group_[at(drops_[at(i)])];
      if (number >= 0 && number != own && skip-- == 0) return number;
    }
    return -1;
  }

  void change_one() {
    const std::size_t place = below(drops_.size());
    const Value value = drops_[place];
    const bool dropped = group_[at(value)] >= 0;
    const double draw = chance();
    std::int32_t target = -1;
    if (!dropped || draw > 0.45) {
      target = draw < 0.72 ? neighbour(place) : -1;
      if (target < 0) target = fresh(value);
    }
    assign(value, target, false);
  }

  void change_range() {
    const std::size_t begin = below(drops_.size());
    const std::size_t length = 2 + below(std::min<std::size_t>(drops_.size(), 24));
    const std::size_t end = std::min(drops_.size(), begin + length);
    const double draw = chance();
    const std::int32_t shared = fresh(drops_[begin]);
    for (std::size_t i = begin; i < end; ++i) {
      const Value value = drops_[i];
      if (draw < 0.3) {
        assign(value, -1, false);
      } else if (draw < 0.7) {
        assign(value, shared, false);
      } else if (group_[at(value)] < 0) {
        assign(value, fresh(value), false);
      }
    }
  }

  void swap_two() {
    const Value a = drops_[below(drops_.size())];
    const Value b = drops_[below(drops_.size())];
    if (a == b || group_[at(a)] == group_[at(b)]) return;
    const std::int32_t first = group_[at(a)];
    const std::int32_t second = group_[at(b)];
    assign(a, second, false);
    assign(b, first, false);
  }

  void merge() {
    const std::size_t place = below(drops_.size());
    const std::int32_t from = group_[at(drops_[place])];
    const std::int32_t to = neighbour(place);
    if (from < 0 || to < 0) return change_one();
    for (const Value value : drops_) {
      if (group_[at(value)] == from) assign(value, to, false);
    }
  }

  void propose() {
    const double draw = chance();
    if (drops_.empty() || (draw < 0.1 && !holds_.empty())) {
      const Value value = holds_[below(holds_.size())];
      assign(value, -1, held_[at(value)] == 0);
    } else if (draw < 0.6) {
      change_one();
    } else if (draw < 0.75) {
      swap_two();
    } else if (draw < 0.9) {
      change_range();
    } else {
      merge();
    }
  }

  void step(double temperature) {
    undo_.clear();
    propose();
    if (undo_.empty()) return;
    const Outcome next = judge();
    const double rise = price(next) - price(now_);
    if (rise > 0 && chance() >= std::exp(-rise / temperature)) return put_back();
    now_ = next;
    if (better(now_, best_)) keep_best();
  }

  bool try_change(Value value, std::int32_t number, bool hold) {
    undo_.clear();
    assign(value, number, hold);
    const Outcome next = judge();
    if (!better(next, now_)) {
      put_back();
      return false;
    }
    now_ = next;
    keep_best();
    return true;
  }

  // Single changes, over and over, until none helps.
  void descend() {
    bool changed = true;
    while (changed) {
      changed = false;
      for (std::size_t i = 0; i < drops_.size(); ++i) {
        if (out_of_time()) return;
        const Value value = drops_[i];
        if (group_[at(value)] >= 0) {
          changed = try_change(value, -1, false) || changed;
        }
        const std::int32_t near = neighbour(i);
        if (near >= 0) changed = try_change(value, near, false) || changed;
        if (sizes_[at(value)] == 0) changed = try_change(value, value, false) || changed;
      }
      for (const Value value : holds_) {
        if (out_of_time()) return;
        changed = try_change(value, -1, held_[at(value)] == 0) || changed;
      }
    }
  }

  Model& model_;
  const SearchSettings& settings_;
  std::span<const Value> drops_, holds_;
  std::span<std::int32_t> group_;
  std::span<std::uint8_t> held_;
  std::mt19937_64 random_;
  std::vector<std::int32_t> sizes_;
  std::vector<std::int64_t> row_bytes_;
  std::vector<double> group_seconds_;
  double end_;  // In processor seconds.
  Wall::time_point latest_;
  std::vector<Change> undo_;
  Outcome now_, best_;
  std::vector<std::int32_t> best_group_;
  std::vector<std::uint8_t> best_held_;
};

}  // namespace

Outcome search(Model& model, const SearchSettings& settings, std::span<const Value> drops,
               std::span<const Value> holds, std::span<std::int32_t> group,
               std::span<std::uint8_t> held) {
  return Search(model, settings, drops, holds, group, held).run();
}

}  // namespace memplan::recompute

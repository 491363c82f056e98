#include "order/state.hpp"

namespace memplan::order {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): a key of each operator for hashes of sets.
std::uint64_t key_of(Op op) {
  std::uint64_t x = (static_cast<std::uint64_t>(op) + 1) * 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

State::State(const Graph& graph)
    : graph_(&graph),
      has_(at(graph.ops()), 0),
      waits_(at(graph.ops()), 0),
      followed_(at(graph.ops()), 0),
      used_(at(graph.values()), 0),
      bytes_(graph.base) {
  for (Op op = 0; op < graph.ops(); ++op) {
    waits_[at(op)] = static_cast<std::int32_t>(graph.before[op].size());
  }
  for (Value value = 0; value < graph.values(); ++value) {
    const bool waits = !graph.users[value].empty() && graph.lasts[at(value)] == 0;
    if (graph.maker[at(value)] < 0 && waits) bytes_ += graph.bytes[at(value)];
  }
}

std::int64_t State::growth_of_add(Op op) const {
  std::int64_t growth = graph_->stays[at(op)];
  for (const Value value : graph_->uses[op]) {
    if (used_[at(value)] + 1 == users(value) && graph_->lasts[at(value)] == 0) {
      growth -= graph_->bytes[at(value)];
    }
  }
  return growth;
}

std::int64_t State::growth_of_remove(Op op) const {
  std::int64_t growth = -graph_->stays[at(op)];
  for (const Value value : graph_->uses[op]) {
    if (used_[at(value)] == users(value) && graph_->lasts[at(value)] == 0) {
      growth += graph_->bytes[at(value)];
    }
  }
  return growth;
}

void State::add(Op op) {
  bytes_ += growth_of_add(op);
  for (const Value value : graph_->uses[op]) ++used_[at(value)];
  for (const Op later : graph_->after[op]) --waits_[at(later)];
  for (const Op earlier : graph_->before[op]) ++followed_[at(earlier)];
  has_[at(op)] = 1;
  hash_ ^= key_of(op);
  ++count_;
}

void State::remove(Op op) {
  bytes_ += growth_of_remove(op);
  for (const Value value : graph_->uses[op]) --used_[at(value)];
  for (const Op later : graph_->after[op]) ++waits_[at(later)];
  for (const Op earlier : graph_->before[op]) --followed_[at(earlier)];
  has_[at(op)] = 0;
  hash_ ^= key_of(op);
  --count_;
}

}  // namespace memplan::order

#include "runtime/prefix_index.h"

#include <algorithm>
#include <bit>

#include "common/check.h"
#include "common/counters.h"

namespace astrai::runtime {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

PrefixIndex::PrefixIndex(int64_t num_pages, int64_t page_size) : page_size_(page_size) {
  const auto size = static_cast<size_t>(num_pages);
  parent_.assign(size, kAbsent);
  first_child_.assign(size, kNone);
  next_sibling_.assign(size, kNone);
  prev_sibling_.assign(size, kNone);
  next_in_bucket_.assign(size, kNone);
  buckets_.assign(std::bit_ceil(size), kNone);
  subtree_.reserve(size);
}

// ---- look-up ------------------------------------------------------------------------------------

uint64_t PrefixIndex::hash(int32_t parent, std::span<const int64_t> tokens) const {
  uint64_t state = mix(static_cast<uint32_t>(parent) + 0x9e3779b97f4a7c15u);
  for (int64_t token : tokens) state = mix(state ^ static_cast<uint64_t>(token));
  return state & (buckets_.size() - 1);
}

std::span<const int64_t> PrefixIndex::block(std::span<const int64_t> tokens, size_t index) const {
  const auto length = static_cast<size_t>(page_size_);
  return tokens.subspan(index * length, length);
}

std::span<const int64_t> PrefixIndex::tokens_of(int32_t page) const {
  return block(tokens_, static_cast<size_t>(page));
}

int32_t PrefixIndex::find(int32_t parent, std::span<const int64_t> tokens) const {
  int32_t page = buckets_[hash(parent, tokens)];
  while (page != kNone && !(parent_[page] == parent && std::ranges::equal(tokens_of(page), tokens)))
    page = next_in_bucket_[page];
  return page;
}

void PrefixIndex::match(std::span<const int64_t> tokens, std::string_view salt, int64_t max_pages,
                        std::vector<int32_t>& pages) const {
  const auto root = roots_.find(std::string(salt));
  if (root == roots_.end()) return;
  int32_t parent = root->second.code;
  const int64_t full_pages = static_cast<int64_t>(tokens.size()) / page_size_;
  const int64_t limit = std::min(max_pages, full_pages);
  for (int64_t i = 0; i < limit; ++i) {
    const int32_t page = find(parent, block(tokens, static_cast<size_t>(i)));
    if (page == kNone) return;
    pages.push_back(page);
    parent = page;
  }
}

// ---- changes ------------------------------------------------------------------------------------

int32_t PrefixIndex::root_for(std::string_view salt) {
  const auto [entry, is_new] = roots_.try_emplace(std::string(salt));
  if (is_new) {
    entry->second.code = next_code_--;
    salts_.emplace(entry->second.code, entry->first);
    count(counters().host_allocations);
  }
  return entry->second.code;
}

void PrefixIndex::drop_root_child(int32_t code) {
  const auto salt = salts_.find(code);
  const auto root = roots_.find(salt->second);
  if (--root->second.num_children > 0) return;
  roots_.erase(root);
  salts_.erase(salt);
}

bool PrefixIndex::insert(std::span<const int64_t> tokens, std::span<const int32_t> pages,
                         std::string_view salt) {
  if (pages.empty()) return true;
  if (tokens_.empty()) {
    tokens_.resize(parent_.size() * static_cast<size_t>(page_size_));
    count(counters().host_allocations);
  }
  const bool complete = insert_below(root_for(salt), tokens, pages);
  const auto root = roots_.find(std::string(salt));
  if (root->second.num_children == 0) {  // refused at the first page
    salts_.erase(root->second.code);
    roots_.erase(root);
  }
  return complete;
}

bool PrefixIndex::insert_below(int32_t parent, std::span<const int64_t> tokens,
                               std::span<const int32_t> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {
    const std::span<const int64_t> own = block(tokens, i);
    const int32_t known = find(parent, own);
    if (known == kNone) {
      if (contains(pages[i])) return false;
      link(pages[i], parent, own);
    }
    parent = known == kNone ? pages[i] : known;
  }
  return true;
}

void PrefixIndex::link(int32_t page, int32_t parent, std::span<const int64_t> tokens) {
  std::ranges::copy(tokens, tokens_.begin() + page * page_size_);
  parent_[page] = parent;
  first_child_[page] = kNone;
  prev_sibling_[page] = next_sibling_[page] = kNone;
  if (parent <= kFirstRoot) {
    ++roots_.at(salts_.at(parent)).num_children;
  } else {
    next_sibling_[page] = first_child_[parent];
    if (first_child_[parent] != kNone) prev_sibling_[first_child_[parent]] = page;
    first_child_[parent] = page;
  }
  int32_t& bucket = buckets_[hash(parent, tokens)];
  next_in_bucket_[page] = bucket;
  bucket = page;
  ++num_indexed_;
}

void PrefixIndex::unlink_from_bucket(int32_t page) {
  int32_t* place = &buckets_[hash(parent_[page], tokens_of(page))];
  while (*place != page) place = &next_in_bucket_[*place];
  *place = next_in_bucket_[page];
}

void PrefixIndex::unlink_from_parent(int32_t page) {
  const int32_t parent = parent_[page];
  if (parent <= kFirstRoot) return drop_root_child(parent);
  const int32_t previous = prev_sibling_[page];
  const int32_t next = next_sibling_[page];
  (previous == kNone ? first_child_[parent] : next_sibling_[previous]) = next;
  if (next != kNone) prev_sibling_[next] = previous;
}

void PrefixIndex::forget(int32_t page) {
  if (!contains(page)) return;
  unlink_from_parent(page);
  subtree_.clear();
  subtree_.push_back(page);
  for (size_t i = 0; i < subtree_.size(); ++i) {
    const int32_t node = subtree_[i];
    for (int32_t child = first_child_[node]; child != kNone; child = next_sibling_[child]) {
      subtree_.push_back(child);
    }
    unlink_from_bucket(node);
  }
  // Only now: a bucket is found through the parent's number.
  for (int32_t node : subtree_) parent_[node] = kAbsent;
  num_indexed_ -= static_cast<int64_t>(subtree_.size());
}

// ---- integrity ----------------------------------------------------------------------------------

void PrefixIndex::check_integrity() const {
  int64_t found = 0;
  std::unordered_map<int32_t, int64_t> root_children;
  for (size_t i = 0; i < parent_.size(); ++i) {
    const auto page = static_cast<int32_t>(i);
    if (!contains(page)) continue;
    ++found;
    const int32_t parent = parent_[page];
    ASTRAI_CHECK_STATE(find(parent, tokens_of(page)) == page, "prefix_index: page ", page,
                       " is not found by its own tokens");
    if (parent <= kFirstRoot) {
      ASTRAI_CHECK_STATE(salts_.contains(parent), "prefix_index: page ", page, " has no root");
      ++root_children[parent];
      continue;
    }
    ASTRAI_CHECK_STATE(contains(parent), "prefix_index: page ", page, " is below page ", parent,
                       ", which is absent");
    int32_t child = first_child_[parent];
    while (child != kNone && child != page) child = next_sibling_[child];
    ASTRAI_CHECK_STATE(child == page, "prefix_index: page ", page,
                       " is not among the children of page ", parent);
  }
  ASTRAI_CHECK_STATE(found == num_indexed_, "prefix_index: ", found, " pages are there; expected ",
                     num_indexed_);
  ASTRAI_CHECK_STATE(root_children.size() == roots_.size() && roots_.size() == salts_.size(),
                     "prefix_index: ", roots_.size(), " roots, ", root_children.size(),
                     " of them with pages");
  for (const auto& [salt, root] : roots_) {
    const auto counted = root_children.find(root.code);
    ASTRAI_CHECK_STATE(counted != root_children.end() && counted->second == root.num_children,
                       "prefix_index: salt \"", salt, "\" counts ", root.num_children,
                       " pages at its root");
  }
}

}  // namespace astrai::runtime

// Which pages hold which prefixes: a radix tree over full pages of tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace astrai::runtime {

// A node is a page; the path to it spells the tokens whose keys and values it holds. Two pages with
// the same path are never both in the tree. Tokens are compared one by one, so a hash collision
// costs time and nothing else. Prefixes under different salts share nothing.
//
// All arrays are as long as the pool and allocated once, the tokens' at the first page that comes
// in; later only a salt that is new allocates. Knows nothing of reference counts: PagePool says
// when a page gets other contents.
//
// Source: Zheng et al. 2023, "Efficiently Programming Large Language Models using SGLang"
// (RadixAttention), arXiv:2312.07104, over pages as in Kwon et al. 2023, arXiv:2309.06180.
class PrefixIndex {
 public:
  PrefixIndex(int64_t num_pages, int64_t page_size);

  // Appends to `pages` the pages of the longest prefix of `tokens` in whole pages, at most
  // max_pages.
  void match(std::span<const int64_t> tokens, std::string_view salt, int64_t max_pages,
             std::vector<int32_t>& pages) const;

  // Page i of `pages` holds tokens [i * page_size, (i + 1) * page_size). Where another page has the
  // same path already, that one stays. Returns false, having added what comes before it, at a page
  // that is in the tree under another path.
  bool insert(std::span<const int64_t> tokens, std::span<const int32_t> pages,
              std::string_view salt);

  // The same below `parent`, a page of the tree: `tokens` and `pages` follow what it holds.
  bool insert_below(int32_t parent, std::span<const int64_t> tokens,
                    std::span<const int32_t> pages);

  bool contains(int32_t page) const { return parent_[static_cast<size_t>(page)] != kAbsent; }
  // Takes a page out, with all that can only be reached through it. Nothing for an absent page.
  void forget(int32_t page);

  int64_t num_pages() const { return num_indexed_; }
  int64_t num_salts() const { return static_cast<int64_t>(roots_.size()); }

  // Throws std::runtime_error describing the first inconsistency.
  void check_integrity() const;

 private:
  static constexpr int32_t kNone = -1;
  static constexpr int32_t kAbsent = -2;
  // A root's code as a parent: kFirstRoot - its number.
  static constexpr int32_t kFirstRoot = -3;

  struct Root {
    int32_t code = kFirstRoot;
    int64_t num_children = 0;
  };

  uint64_t hash(int32_t parent, std::span<const int64_t> tokens) const;
  std::span<const int64_t> block(std::span<const int64_t> tokens, size_t index) const;
  std::span<const int64_t> tokens_of(int32_t page) const;
  int32_t find(int32_t parent, std::span<const int64_t> tokens) const;
  int32_t root_for(std::string_view salt);
  void drop_root_child(int32_t code);
  void link(int32_t page, int32_t parent, std::span<const int64_t> tokens);
  void unlink_from_bucket(int32_t page);
  void unlink_from_parent(int32_t page);

  int64_t page_size_;
  int64_t num_indexed_ = 0;
  std::vector<int64_t> tokens_;        // [num_pages, page_size], or empty before the first page
  std::vector<int32_t> parent_;        // page, root code or kAbsent
  std::vector<int32_t> first_child_;   // page or kNone
  std::vector<int32_t> next_sibling_;  // children of a page, doubly linked; unused below a root
  std::vector<int32_t> prev_sibling_;
  std::vector<int32_t> buckets_;  // by hash of (parent, tokens); a power of two
  std::vector<int32_t> next_in_bucket_;
  std::vector<int32_t> subtree_;  // scratch of forget
  std::unordered_map<std::string, Root> roots_;
  std::unordered_map<int32_t, std::string> salts_;  // by code
  int32_t next_code_ = kFirstRoot;
};

}  // namespace astrai::runtime

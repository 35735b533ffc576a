#include "offload/link_queue.h"

#include <utility>

namespace terrace {

void LinkQueue::push(TransferBlock block) {
  const bool needs_staging = block.job->route.second.has_value() && block.staging == nullptr;
  const Key key{block.job->request.priority, block.job->id, block.index};
  (needs_staging ? staged_ : direct_).emplace(key, std::move(block));
}

std::optional<TransferBlock> LinkQueue::pop(Staging& staging) {
  if (!staged_.empty() && (direct_.empty() || staged_.begin()->first < direct_.begin()->first)) {
    if (staged_.begin()->second.job->error) {
      return take_first(staged_);
    }
    if (std::byte* memory = staging.try_take()) {
      TransferBlock block = take_first(staged_);
      block.staging = memory;
      return block;
    }
  }
  if (!direct_.empty()) {
    return take_first(direct_);
  }
  return std::nullopt;
}

void LinkQueue::raise(const std::shared_ptr<TransferJob>& job, TransferPriority from) {
  for (Blocks* blocks : {&staged_, &direct_}) {
    auto at = blocks->lower_bound(Key{from, job->id, 0});
    while (at != blocks->end() && at->second.job == job) {
      auto node = blocks->extract(at++);
      std::get<TransferPriority>(node.key()) = job->request.priority;
      blocks->insert(std::move(node));
    }
  }
}

TransferBlock LinkQueue::take_first(Blocks& blocks) {
  TransferBlock block = std::move(blocks.begin()->second);
  blocks.erase(blocks.begin());
  return block;
}

}  // namespace terrace

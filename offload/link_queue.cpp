#include "offload/link_queue.h"

#include <algorithm>

namespace terrace {

void LinkQueue::push(std::shared_ptr<TransferJob> job) {
  const Turn turn{job->request.priority, job->id};
  (job->route.second ? staged_ : direct_).emplace(turn, Waiting{std::move(job)});
}

void LinkQueue::push(TransferBlock block) {
  passed_on_.emplace(std::tuple(block.job->request.priority, block.job->id, block.index), std::move(block));
}

std::optional<TransferBlock> LinkQueue::pop(Staging& staging) {
  using enum TransferPriority;
  const std::size_t passed_on = passed_on_.size();
  std::optional<TransferBlock> block;
  if (has_turn_of_passed_on()) {
    block = take_passed_on(passed_on_.begin());
  } else if (urgent_in_a_row_ == most_urgent_in_a_row) {
    block = pop_between(write_back, write_back, staging);
  }
  if (!block) {
    block = pop_between(demand, early, staging);
  }
  if (block) {
    note_passing(*block, passed_on);
  }
  return block;
}

std::optional<TransferBlock> LinkQueue::pop_before(TransferPriority priority, Staging& staging) {
  using enum TransferPriority;
  if (priority == demand || has_turn_of_passed_on() || (urgent_in_a_row_ == most_urgent_in_a_row && has_write_back())) {
    return std::nullopt;
  }
  const std::size_t passed_on = passed_on_.size();
  const auto last = static_cast<TransferPriority>(static_cast<std::uint8_t>(priority) - 1);
  std::optional<TransferBlock> block = pop_between(demand, last, staging);
  if (block) {
    note_passing(*block, passed_on);
  }
  return block;
}

void LinkQueue::note_passing(const TransferBlock& block, std::size_t passed_on_before) {
  const auto one_more = [](std::size_t& count, bool passes) {
    count = passes ? std::min(count + 1, most_urgent_in_a_row) : 0;
  };
  one_more(urgent_in_a_row_, block.job->request.priority < TransferPriority::write_back && has_write_back());
  one_more(ahead_of_passed_on_, !passed_on_.empty() && passed_on_.size() == passed_on_before);
}

TransferBlock LinkQueue::take_passed_on(PassedOn::iterator at) {
  TransferBlock block = std::move(at->second);
  passed_on_.erase(at);
  return block;
}

bool LinkQueue::has_write_back() const {
  const auto is_one = [](const auto& waiting, const auto& at) {
    return at != waiting.end() && std::get<TransferPriority>(at->first) == TransferPriority::write_back;
  };
  constexpr Turn first{TransferPriority::write_back, TransferId{}};
  return is_one(staged_, staged_.lower_bound(first)) || is_one(direct_, direct_.lower_bound(first)) ||
         is_one(passed_on_, passed_on_.lower_bound({first.first, first.second, 0}));
}

std::optional<TransferBlock> LinkQueue::pop_between(TransferPriority first, TransferPriority last, Staging& staging) {
  // After all others, of a queue that has none.
  constexpr Turn never{static_cast<TransferPriority>(transfer_priority_count), TransferId{}};
  const auto turn_of = [&](const auto& waiting, const auto& at) {
    if (at == waiting.end() || std::get<0>(at->first) > last) {
      return never;
    }
    return Turn{std::get<0>(at->first), std::get<1>(at->first)};
  };
  const auto passed_on = passed_on_.lower_bound({first, TransferId{}, 0});
  const auto direct = direct_.lower_bound({first, TransferId{}});
  const auto staged = staged_.lower_bound({first, TransferId{}});
  const Turn passed_on_turn = turn_of(passed_on_, passed_on);
  const Turn direct_turn = turn_of(direct_, direct);
  if (turn_of(staged_, staged) < std::min(passed_on_turn, direct_turn)) {
    TransferJob& job = *staged->second.job;
    job.error = job.error ? job.error : staging.failure();
    if (job.error) {
      return take_block(staged_, staged);
    }
    if (std::byte* memory = staging.try_take()) {
      TransferBlock block = take_block(staged_, staged);
      block.staging = memory;
      return block;
    }
  }
  if (passed_on_turn < direct_turn) {
    return take_passed_on(passed_on);
  }
  if (direct_turn != never) {
    return take_block(direct_, direct);
  }
  return std::nullopt;
}

TransferBlock LinkQueue::take_block(Jobs& jobs, Jobs::iterator at) {
  Waiting& waiting = at->second;
  TransferBlock block{.job = waiting.job, .index = waiting.next++};
  if (waiting.next == waiting.job->blocks) {
    jobs.erase(at);
  }
  return block;
}

void LinkQueue::raise(const std::shared_ptr<TransferJob>& job, TransferPriority from) {
  for (Jobs* jobs : {&staged_, &direct_}) {
    if (auto node = jobs->extract(Turn{from, job->id})) {
      node.key().first = job->request.priority;
      jobs->insert(std::move(node));
    }
  }
  auto at = passed_on_.lower_bound({from, job->id, 0});
  while (at != passed_on_.end() && at->second.job == job) {
    auto node = passed_on_.extract(at++);
    std::get<TransferPriority>(node.key()) = job->request.priority;
    passed_on_.insert(std::move(node));
  }
}

}  // namespace terrace

#include "offload/link_queue.h"

namespace terrace {
namespace {

std::size_t index_of(TransferPriority priority) { return static_cast<std::size_t>(priority); }

}  // namespace

void LinkQueue::push(std::shared_ptr<TransferJob> job) {
  Jobs& jobs = (job->route.second ? staged_ : direct_)[index_of(job->request.priority)];
  const TransferId id = job->id;
  jobs.emplace(id, Waiting{std::move(job)});
}

void LinkQueue::push(TransferBlock block) {
  Blocks& blocks = passed_on_[index_of(block.job->request.priority)];
  blocks.emplace(std::pair(block.job->id, block.index), std::move(block));
}

std::optional<TransferBlock> LinkQueue::pop(Staging& staging) {
  using enum TransferPriority;
  if (!over_.empty()) {
    return take_first(over_);
  }
  const std::size_t passed_on = count_passed_on();
  std::optional<TransferBlock> block;
  if (has_turn_of_passed_on()) {
    block = take_first(*std::ranges::find_if_not(passed_on_, &Blocks::empty));
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
  if (!over_.empty()) {
    return take_first(over_);
  }
  if (priority == demand || has_turn_of_passed_on() || (urgent_in_a_row_ == most_urgent_in_a_row && has_write_back())) {
    return std::nullopt;
  }
  const std::size_t passed_on = count_passed_on();
  const auto last = static_cast<TransferPriority>(static_cast<std::uint8_t>(priority) - 1);
  std::optional<TransferBlock> block = pop_between(demand, last, staging);
  if (block) {
    note_passing(*block, passed_on);
  }
  return block;
}

std::size_t LinkQueue::count_passed_on() const {
  std::size_t count = 0;
  for (const Blocks& blocks : passed_on_) {
    count += blocks.size();
  }
  return count;
}

void LinkQueue::note_passing(const TransferBlock& block, std::size_t passed_on_before) {
  const auto one_more = [](std::size_t& count, bool passes) {
    count = passes ? std::min(count + 1, most_urgent_in_a_row) : 0;
  };
  one_more(urgent_in_a_row_, block.job->request.priority < TransferPriority::write_back && has_write_back());
  const std::size_t passed_on = count_passed_on();
  one_more(ahead_of_passed_on_, passed_on > 0 && passed_on == passed_on_before);
}

bool LinkQueue::has_write_back() const {
  const std::size_t at = index_of(TransferPriority::write_back);
  return !staged_[at].empty() || !direct_[at].empty() || !passed_on_[at].empty();
}

std::optional<TransferBlock> LinkQueue::pop_between(TransferPriority first, TransferPriority last, Staging& staging) {
  // After all others, of a queue that has none.
  constexpr Turn never{static_cast<TransferPriority>(transfer_priority_count), TransferId{}};
  const auto first_turn = [&](const auto& queues) {
    for (std::size_t at = index_of(first); at <= index_of(last); ++at) {
      if (!queues[at].empty()) {
        return Turn{static_cast<TransferPriority>(at), queues[at].begin()->second.job->id};
      }
    }
    return never;
  };
  const Turn passed_on = first_turn(passed_on_);
  const Turn direct = first_turn(direct_);
  if (const Turn staged = first_turn(staged_); staged < std::min(passed_on, direct)) {
    Jobs& jobs = staged_[index_of(staged.first)];
    TransferJob& job = *jobs.begin()->second.job;
    job.error = job.error ? job.error : staging.failure();
    if (job.error) {
      return take_first(jobs);
    }
    if (std::byte* memory = staging.try_take()) {
      TransferBlock block = take_first(jobs);
      block.staging = memory;
      return block;
    }
  }
  if (passed_on < direct) {
    return take_first(passed_on_[index_of(passed_on.first)]);
  }
  if (direct != never) {
    return take_first(direct_[index_of(direct.first)]);
  }
  return std::nullopt;
}

TransferBlock LinkQueue::take_first(Jobs& jobs) {
  Waiting& waiting = jobs.begin()->second;
  TransferBlock block{.job = waiting.job, .index = waiting.next++};
  if (waiting.next == waiting.job->blocks) {
    jobs.erase(jobs.begin());
  }
  return block;
}

TransferBlock LinkQueue::take_first(Blocks& blocks) {
  TransferBlock block = std::move(blocks.begin()->second);
  blocks.erase(blocks.begin());
  return block;
}

void LinkQueue::raise(const std::shared_ptr<TransferJob>& job, TransferPriority from) {
  const std::size_t to = index_of(job->request.priority);
  for (ByPriority<Jobs>* jobs : {&staged_, &direct_}) {
    (*jobs)[to].insert((*jobs)[index_of(from)].extract(job->id));
  }
  Blocks& before = passed_on_[index_of(from)];
  auto at = before.lower_bound({job->id, 0});
  while (at != before.end() && at->second.job == job) {
    passed_on_[to].insert(before.extract(at++));
  }
}

void LinkQueue::put_first(const std::shared_ptr<TransferJob>& job) {
  for (ByPriority<Jobs>* jobs : {&staged_, &direct_}) {
    over_.insert((*jobs)[index_of(job->request.priority)].extract(job->id));
  }
}

}  // namespace terrace

#include "memory/pool_budget.h"

#include <algorithm>
#include <exception>
#include <string>

#include "base/log.h"

namespace terrace {

PoolBudget::PoolBudget(AccessStream& stream, SegmentPool& pool, std::function<void()> before_growth)
    : stream_(stream), pool_(pool), before_growth_(std::move(before_growth)), uncounted_(pool.reserved_bytes()) {
  stream_.add_spare_room(*this);
}

PoolBudget::~PoolBudget() {
  stream_.remove_spare_room(*this);
  stream_.free(counted_, Kind::other);
}

std::uint64_t PoolBudget::missing_for(const PoolCall& what) {
  one_stream_ = one_stream_ && (!any_stream_ || what.stream == only_stream_);
  only_stream_ = what.stream;
  any_stream_ = true;
  const auto has_room = [&] { return most_reserved_ + what.most_growth + promised_ <= counted_; };
  if (!has_room()) {
    look(std::max(most_ahead_bytes, what.most_growth));
  }
  if (has_room()) {
    most_reserved_ += what.most_growth;
    return 0;
  }
  return is_served_from_kept(what) ? 0 : most_reserved_ + what.most_growth + promised_ - counted_;
}

bool PoolBudget::is_served_from_kept(const PoolCall& what) {
  return one_stream_ && what.kept_block_needed > 0 && pool_.largest_kept_bytes() >= what.kept_block_needed;
}

void PoolBudget::look(std::uint64_t ahead_bytes) {
  const std::uint64_t reserved = pool_.reserved_bytes();
  most_reserved_ = reserved - std::min(reserved, uncounted_);
  const std::uint64_t needed = most_reserved_ + ahead_bytes + promised_;
  if (counted_ > needed) {
    stream_.free(counted_ - needed, Kind::other);
    counted_ = needed;
  }
}

void PoolBudget::reserve(std::uint64_t bytes) {
  stream_.allocate(bytes, Kind::other);
  try {
    before_growth_();
  } catch (...) {
    stream_.free(bytes, Kind::other);
    throw;
  }
  const std::scoped_lock lock(mutex_);
  counted_ += bytes;
  promised_ += bytes;
}

bool PoolBudget::give_back() noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    const std::uint64_t before = counted_;
    pool_.give_back_kept();
    look(0);
    return counted_ < before;
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("device: the program's pool gives nothing back: ") + error.what());
    return false;
  }
}

}  // namespace terrace

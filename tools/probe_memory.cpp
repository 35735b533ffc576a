#include "tools/probe_memory.h"

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/memory_info.h"
#include "offload/copy_rate.h"

namespace terrace {
namespace {

constexpr std::int64_t kLasts_ns = 500'000'000;
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20U;

std::size_t thread_count(const Topology& topology) {
  const std::size_t seen = topology.usable_threads > 0 ? topology.usable_threads : std::thread::hardware_concurrency();
  return std::max<std::size_t>(seen, 1);
}

/// Words of one of a thread's two buffers: all of them together are four times the caches, where memory allows.
std::size_t buffer_words(const Topology& topology, std::size_t threads) {
  std::uint64_t cached = 0;
  for (const Topology::Cache& cache : topology.caches) cached += cache.bytes * cache.count;
  const std::uint64_t wanted = std::max(32 * kMiB, 2 * cached / threads);
  const std::uint64_t most = available_memory_bytes() / 8 / threads;
  return static_cast<std::size_t>(std::max(std::min(wanted, most), kMiB) / sizeof(std::uint64_t));
}

/// Of one thread. They are taken from the system when that thread fills them, near to where it runs.
struct Buffers {
  explicit Buffers(std::size_t count)
      : words(count),
        from(std::make_unique_for_overwrite<std::uint64_t[]>(count)),
        to(std::make_unique_for_overwrite<std::uint64_t[]>(count)) {}

  void fill() {
    std::fill_n(from.get(), words, 1);
    std::fill_n(to.get(), words, 2);
  }
  std::size_t bytes() const { return words * sizeof(std::uint64_t); }

  const std::size_t words;
  std::unique_ptr<std::uint64_t[]> from;
  std::unique_ptr<std::uint64_t[]> to;
};

/// Goes over as many bytes as a buffer has.
using Pass = void (*)(Buffers& buffers);

void copy_pass(Buffers& buffers) {
  std::memcpy(buffers.to.get(), buffers.from.get(), buffers.bytes());
  ++buffers.from[0];  // so that no pass can be left out
}

void read_pass(Buffers& buffers) {
  buffers.to[0] = std::accumulate(buffers.from.get(), buffers.from.get() + buffers.words, std::uint64_t{0});
  ++buffers.from[0];
}

void write_pass(Buffers& buffers) {
  std::memset(buffers.to.get(), static_cast<int>(++buffers.from[0] % 256), buffers.bytes());
}

/// Counts what threads that begin together go over until the last of them ends.
class Race {
 public:
  Race(Pass pass, std::size_t threads, std::size_t words, const std::function<bool()>& stop)
      : pass_(pass), stop_(stop), together_(static_cast<std::ptrdiff_t>(threads)) {
    for (std::size_t thread = 0; thread < threads; ++thread) buffers_.emplace_back(words);
  }

  /// Bytes per second.
  double run() {
    std::vector<std::jthread> others;
    try {
      for (std::size_t thread = 1; thread < buffers_.size(); ++thread) {
        others.emplace_back([this, thread] { work(buffers_[thread]); });
      }
    } catch (...) {
      // Those that are there must not wait for those that are not.
      for (std::size_t missing = others.size(); missing < buffers_.size(); ++missing) together_.arrive_and_drop();
      throw;
    }
    work(buffers_[0]);
    others.clear();  // waits for them
    return static_cast<double>(bytes_) * 1e9 / static_cast<double>(end_ns_ - begin_ns_);
  }

 private:
  void work(Buffers& buffers) {
    buffers.fill();
    together_.arrive_and_wait();
    const std::int64_t begin_ns = monotonic_ns();
    std::uint64_t bytes = 0;
    do {
      pass_(buffers);
      bytes += buffers.bytes();
    } while (monotonic_ns() - begin_ns < kLasts_ns && !stop_());
    const std::lock_guard lock(mutex_);
    bytes_ += bytes;
    begin_ns_ = begin_ns_ == 0 ? begin_ns : std::min(begin_ns_, begin_ns);
    end_ns_ = std::max(end_ns_, monotonic_ns());
  }

  const Pass pass_;
  const std::function<bool()>& stop_;
  std::barrier<> together_;
  std::deque<Buffers> buffers_;  // one a thread

  std::mutex mutex_;
  std::uint64_t bytes_ = 0;
  std::int64_t begin_ns_ = 0;
  std::int64_t end_ns_ = 0;
};

}  // namespace

MemoryRates probe_memory(const Topology& topology, const std::function<bool()>& stop) {
  const std::size_t threads = thread_count(topology);
  const std::size_t words = buffer_words(topology, threads);
  MemoryRates rates;
  rates.copy_one_core = measured_copy_rate();
  rates.copy = Race(copy_pass, threads, words, stop).run();
  rates.read = Race(read_pass, threads, words, stop).run();
  rates.write = Race(write_pass, threads, words, stop).run();
  rates.measured_at = time_now();
  return rates;
}

}  // namespace terrace

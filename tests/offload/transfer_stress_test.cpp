/// Random operations on a service whose drive does everything wrong that a drive can: whatever is read is
/// what was written last, or the read says that it is not. TERRACE_TEST_OPERATIONS says how many, for a long run.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "offload/emulated_device.h"
#include "offload/transfer_service.h"
#include "tests/base/temporary_folder.h"
#include "tests/offload/engine_by_name.h"
#include "tests/offload/fault_injecting_engine.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::size_t granule = 4096;
constexpr std::size_t object_count = 96;
constexpr std::size_t most_blocks = 5;
constexpr std::size_t client_count = 4;
constexpr std::size_t most_outstanding = 6;  ///< of each client
constexpr std::uint64_t operations_an_epoch = 12'500;

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

/// A block of memory knows which object's it is, which of its blocks, and when it was filled.
std::uint64_t word_of(std::size_t object, std::size_t block, std::uint64_t stamp, std::size_t position) {
  return (stamp * 1024 + object) * 0x9e3779b97f4a7c15 + block * 0xbf58476d1ce4e5b9 + position;
}
void fill(std::byte* memory, std::size_t bytes, std::size_t object, std::size_t block, std::uint64_t stamp) {
  for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
    const std::uint64_t word = word_of(object, block, stamp, at);
    std::memcpy(memory + at, &word, 8);
  }
}
bool holds(const std::byte* memory, std::size_t bytes, std::size_t object, std::size_t block, std::uint64_t stamp) {
  for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, memory + at, 8);
    if (word != word_of(object, block, stamp, at)) return false;
  }
  return true;
}

/// Some bytes with room on every tier, and what they are known to be on each. Used by who has taken it.
struct Object {
  std::size_t number = 0;
  std::uint64_t bytes = 0;
  TransferPlaces places;
  std::array<std::uint64_t, tier_count> stamps{};  ///< 0: nobody knows
  bool taken = false;                              ///< guarded by the world's mutex

  std::uint64_t& stamp(Tier tier) { return stamps[index_of(tier)]; }
  void put(Tier tier, std::uint64_t with) {
    for_each_block(tier, [&](std::byte* memory, std::size_t length, std::size_t block) {
      fill(memory, length, number, block, with);
    });
    stamp(tier) = with;
  }
  bool is(Tier tier, std::uint64_t expected) {
    bool all = true;
    for_each_block(tier, [&](std::byte* memory, std::size_t length, std::size_t block) {
      all = all && holds(memory, length, number, block, expected);
    });
    return all;
  }

 private:
  template <class Visit>
  void for_each_block(Tier tier, Visit&& visit) {
    for (std::size_t block = 0; block * granule < bytes; ++block) {
      visit(tier == Tier::device ? places.device + block * granule : places.host[block],
            static_cast<std::size_t>(std::min<std::uint64_t>(granule, bytes - block * granule)), block);
    }
  }
};

struct Tally {
  std::atomic<std::uint64_t> succeeded{0}, failed{0}, corrupt{0}, cancelled{0}, unanswered{0}, wrong{0}, refused{0};
};

/// One life of a service, from its start to its end, by whatever that comes.
class Epoch {
 public:
  Epoch(const std::string& engine, const std::filesystem::path& folder, std::uint64_t seed, Tally& tally)
      : seed_(seed),
        tally_(tally),
        store_({folder}, extent_file_bytes(granule, object_count * most_blocks), granule),
        engine_(make_engine(engine), seed),
        service_(device_, arena_, &store_, &engine_, {.patience = std::chrono::seconds(2)}) {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < object_count; ++i) {
      const std::size_t blocks = 1 + random() % most_blocks;
      Object& object = objects_[i];
      object.number = i;
      object.bytes = blocks * granule - random() % 256 * 8;
      object.places = {
          .device = device_.map_slot(object.bytes), .host = arena_.allocate(blocks), .nvme = store_.reserve(blocks)};
    }
    for (const auto& [fault, probability] : {std::pair{Fault::io_error, 0.002},
                                             {Fault::no_space, 0.001},
                                             {Fault::short_transfer, 0.001},
                                             {Fault::flipped_bit, 0.001},
                                             {Fault::torn, 0.001},
                                             {Fault::late, 0.01},
                                             {Fault::slow, 0.0002}}) {
      // Nobody says so where a read is torn or a bit of it flips, but for the checksum.
      engine_.inject({.fault = fault, .probability = probability});
    }
  }
  ~Epoch() {
    for (Object& object : objects_) device_.unmap_slot(object.places.device, object.bytes);
  }
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;

  /// Carries out so many operations; in the middle of them the drive may be lost.
  void run(std::uint64_t operations, std::optional<Fault> loss) {
    left_ = static_cast<std::int64_t>(operations);
    std::vector<std::jthread> clients;
    for (std::size_t i = 0; i < client_count; ++i) {
      clients.emplace_back([this, i] { client(i); });
    }
    if (loss) {
      while (left_ > static_cast<std::int64_t>(operations / 2)) std::this_thread::yield();
      engine_.heal();
      engine_.inject({.fault = *loss, .probability = 0.01});
    }
  }

 private:
  void client(std::size_t number) {
    std::mt19937_64 random(seed_ * client_count + number);
    while (left_.fetch_sub(1) > 0) {
      Object* const object = take(random());
      begin(*object, random);
    }
    std::unique_lock lock(mutex_);
    given_back_.wait(lock, [&] { return outstanding_ == 0; });
  }

  /// Any that nobody else has, when there are not too many under way.
  Object* take(std::uint64_t random) {
    std::unique_lock lock(mutex_);
    given_back_.wait(lock, [&] { return outstanding_ < client_count * most_outstanding; });
    ++outstanding_;
    for (std::size_t i = 0; i < object_count; ++i) {
      Object& object = objects_[(random + i) % object_count];
      if (!std::exchange(object.taken, true)) return &object;
    }
    throw std::logic_error("all objects are lost");
  }
  void give_back(Object& object) {
    const std::lock_guard lock(mutex_);
    object.taken = false;
    --outstanding_;
    given_back_.notify_all();
  }

  void begin(Object& object, std::mt19937_64& random) {
    constexpr std::array<std::pair<Tier, Tier>, 6> routes{{{Tier::host, Tier::nvme},
                                                           {Tier::nvme, Tier::host},
                                                           {Tier::host, Tier::device},
                                                           {Tier::device, Tier::host},
                                                           {Tier::device, Tier::nvme},
                                                           {Tier::nvme, Tier::device}}};
    auto [from, to] = routes[random() % routes.size()];
    if (object.stamp(from) == 0 && from == Tier::nvme) std::swap(from, to);  // what it held is not known any more
    if (object.stamp(from) == 0 || (from != Tier::nvme && random() % 4 == 0)) object.put(from, next_stamp_++);
    const std::uint64_t expected = object.stamp(from);
    object.stamp(to) = 0;
    TransferRequest request;
    request.from = from;
    request.to = to;
    request.bytes = object.bytes;
    request.priority = static_cast<TransferPriority>(random() % transfer_priority_count);
    request.prepare = [&object] { return object.places; };
    request.done = [this, &object, to = to, expected](const std::exception_ptr& error) {
      settle(object, to, expected, error);
    };
    const TransferId id = service_.start(std::move(request));
    if (random() % 8 == 0) service_.raise(id, static_cast<TransferPriority>(random() % transfer_priority_count));
    if (random() % 16 == 0) service_.cancel(id);
  }

  void settle(Object& object, Tier to, std::uint64_t expected, const std::exception_ptr& error) {
    bool can_be_used = true;
    try {
      if (error) std::rethrow_exception(error);
      ++tally_.succeeded;
      object.stamp(to) = expected;
      if (to != Tier::nvme && !object.is(to, expected)) ++tally_.wrong;
    } catch (const Cancelled&) {
      ++tally_.cancelled;
    } catch (const CorruptData&) {
      ++tally_.corrupt;
      object.stamp(Tier::nvme) = 0;
    } catch (const Unanswered&) {
      ++tally_.unanswered;
      can_be_used = false;
    } catch (const IoError&) {
      ++tally_.failed;
    } catch (const std::exception& other) {
      ++tally_.refused;
      ADD_FAILURE() << other.what();
    }
    if (can_be_used) {
      give_back(object);
      return;
    }
    const std::lock_guard lock(mutex_);  // nobody takes it again
    --outstanding_;
    given_back_.notify_all();
  }

  const std::uint64_t seed_;
  Tally& tally_;
  EmulatedDevice device_{64 << 20};
  HostArena arena_{granule, object_count* most_blocks + TransferService::staging_blocks};
  NvmeStore store_;
  FaultInjectingEngine engine_;
  std::array<Object, object_count> objects_;
  std::atomic<std::int64_t> left_{0};
  std::atomic<std::uint64_t> next_stamp_{1};
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::size_t outstanding_ = 0;
  TransferService service_;  // last: its threads use the rest
};

TEST(TransferStress, random_operations_with_faults_read_what_was_written_last_or_say_that_they_do_not) {
  const std::uint64_t seed = number_from("TERRACE_TEST_SEED", std::random_device()());
  const std::uint64_t operations = number_from("TERRACE_TEST_OPERATIONS", 100'000);
  SCOPED_TRACE("TERRACE_TEST_SEED=" + std::to_string(seed));
  std::vector<std::string> engines{"threads"};
  if (UringEngine::available()) engines.emplace_back("io_uring");
  const TemporaryFolder folder;
  Tally tally;
  std::uint64_t done = 0;
  for (std::uint64_t epoch = 0; done < operations; ++epoch) {
    const std::array<std::optional<Fault>, 4> losses{std::nullopt, Fault::dead_queue, std::nullopt, Fault::stuck};
    const std::uint64_t now = std::min(operations - done, operations_an_epoch);
    Epoch(engines[epoch % engines.size()], folder.path(), seed + epoch, tally).run(now, losses[epoch / 2 % 4]);
    done += now;
  }
  EXPECT_EQ(tally.wrong, 0u);
  EXPECT_EQ(tally.refused, 0u);
  const std::uint64_t all = tally.succeeded + tally.failed + tally.corrupt + tally.cancelled + tally.unanswered;
  EXPECT_EQ(all, operations) << "every wait ends, once";
  for (const auto* each : {&tally.succeeded, &tally.failed, &tally.corrupt, &tally.cancelled, &tally.unanswered}) {
    EXPECT_GT(*each, 0u) << "of each kind there are some";
  }
  EXPECT_GT(tally.succeeded, operations / 4);
  std::printf("%lu operations: %lu succeeded, %lu failed, %lu corrupt, %lu cancelled, %lu unanswered\n", all,
              tally.succeeded.load(), tally.failed.load(), tally.corrupt.load(), tally.cancelled.load(),
              tally.unanswered.load());
}

}  // namespace
}  // namespace terrace

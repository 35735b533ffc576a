#include "offload/uring_engine.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <liburing.h>
#include <list>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "offload/errno_text.h"
#include "offload/io_error.h"

namespace terrace {
namespace {

IoError refused(const std::string& what, int error_number) {
  return IoError("io_uring: " + what + " failed: " + errno_text(error_number), "set io.engine to \"threads\"");
}

class Ring {
 public:
  explicit Ring(unsigned entries) {
    if (const int result = ::io_uring_queue_init(entries, &ring_, 0); result < 0) {
      throw refused("opening a ring of " + std::to_string(entries) + " entries", -result);
    }
  }
  ~Ring() { ::io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  io_uring* get() noexcept { return &ring_; }

 private:
  io_uring ring_{};
};

/// Counts wakes; a read of it in the ring completes at the first.
class WakeEvent {
 public:
  WakeEvent() : descriptor_(::eventfd(0, EFD_CLOEXEC)) {
    if (descriptor_ < 0) {
      throw refused("making an event", errno);
    }
  }
  ~WakeEvent() { ::close(descriptor_); }
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;
  int descriptor() const noexcept { return descriptor_; }
  void raise() noexcept {
    const std::uint64_t one = 1;
    while (::write(descriptor_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  const int descriptor_;
};

class UringQueue final : public IoQueue {
 public:
  UringQueue(std::size_t depth, std::span<const std::span<std::byte>> registered)
      : depth_(depth), ring_(static_cast<unsigned>(depth + 2)) {
    register_memory(registered);
    watch_wakes();
    enter();
  }

  ~UringQueue() override {
    std::vector<IoCompletion> completions;
    stopping_ = true;
    event_.raise();
    try {
      while (in_flight_ > 0 || watching_) {
        take_one();
        take_ready(completions);
      }
    } catch (...) {
      // The ring is torn down below, which ends what the kernel still has.
    }
  }

  std::size_t depth() const noexcept override { return depth_; }
  std::size_t in_flight() const noexcept override { return in_flight_; }

  void submit(const IoOperation& operation) override {
    if (in_flight_ == depth_) {
      throw LogicError("io: more than " + std::to_string(depth_) + " operations at once");
    }
    moving_.push_back({operation, 0});
    moving_.back().self = std::prev(moving_.end());
    ++in_flight_;
    queue(moving_.back());
    enter();
  }

  void wait(std::vector<IoCompletion>& completions) override {
    const std::size_t before = completions.size();
    take_ready(completions);
    while (completions.size() == before && !woken_) {
      take_one();
      take_ready(completions);
    }
    woken_ = false;
  }

  void poll(std::vector<IoCompletion>& completions) override { take_ready(completions); }

  void wake() noexcept override { event_.raise(); }

 private:
  struct Moving {
    IoOperation operation;
    std::size_t done = 0;
    std::list<Moving>::iterator self{};
  };

  void register_memory(std::span<const std::span<std::byte>> registered) {
    std::vector<iovec> regions;
    for (const std::span<std::byte> region : registered) {
      regions.push_back({region.data(), region.size()});
    }
    if (regions.empty()) {
      return;
    }
    const int result = ::io_uring_register_buffers(ring_.get(), regions.data(), static_cast<unsigned>(regions.size()));
    if (result == 0) {
      registered_ = std::move(regions);
    } else {
      log_once("io.registered", LogLevel::warning,
               "io_uring: memory could not be registered (" + errno_text(-result) +
                   "); transfers cost a little more. The limit on locked memory may be too low (ulimit -l)");
    }
  }

  void watch_wakes() {
    io_uring_sqe* entry = next_entry();
    ::io_uring_prep_read(entry, event_.descriptor(), &wakes_, sizeof wakes_, 0);
    ::io_uring_sqe_set_data(entry, this);
    watching_ = true;
  }

  void queue(Moving& moving) {
    const IoOperation& operation = moving.operation;
    std::byte* memory = operation.memory + moving.done;
    const auto left = static_cast<unsigned>(operation.bytes - moving.done);
    const std::uint64_t offset = operation.offset + moving.done;
    const int descriptor = operation.file->descriptor;
    const auto region = std::find_if(registered_.begin(), registered_.end(), [&](const iovec& each) {
      const auto* base = static_cast<std::byte*>(each.iov_base);
      return memory >= base && memory + left <= base + each.iov_len;
    });
    const int index = static_cast<int>(region - registered_.begin());
    const bool reads = operation.direction == IoOperation::Direction::read;
    io_uring_sqe* entry = next_entry();
    if (region != registered_.end()) {
      (reads ? ::io_uring_prep_read_fixed(entry, descriptor, memory, left, offset, index)
             : ::io_uring_prep_write_fixed(entry, descriptor, memory, left, offset, index));
    } else {
      reads ? ::io_uring_prep_read(entry, descriptor, memory, left, offset)
            : ::io_uring_prep_write(entry, descriptor, memory, left, offset);
    }
    ::io_uring_sqe_set_data(entry, &moving);
  }

  io_uring_sqe* next_entry() {
    // There is always one: every operation has at most one entry, and the ring has room for all and the wakes.
    if (io_uring_sqe* entry = ::io_uring_get_sqe(ring_.get())) {
      return entry;
    }
    enter();
    if (io_uring_sqe* entry = ::io_uring_get_sqe(ring_.get())) {
      return entry;
    }
    throw LogicError("io_uring: the ring is full");
  }

  /// Hands the queued entries to the kernel. What it does not take, it is given again by the next wait, which throws
  /// if it is refused for good.
  void enter() noexcept { ::io_uring_submit(ring_.get()); }

  void take_one() {
    const int result = ::io_uring_submit_and_wait(ring_.get(), 1);
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
      throw refused("waiting", -result);
    }
  }

  void take_ready(std::vector<IoCompletion>& completions) {
    io_uring_cqe* completion = nullptr;
    bool queued = false;
    while (::io_uring_peek_cqe(ring_.get(), &completion) == 0) {
      void* const owner = ::io_uring_cqe_get_data(completion);
      const int result = completion->res;
      ::io_uring_cqe_seen(ring_.get(), completion);
      if (owner == this) {
        woken_ = true;
        watching_ = false;
        if (!stopping_) {
          watch_wakes();
          queued = true;
        }
        continue;
      }
      queued = settle(*static_cast<Moving*>(owner), result, completions) || queued;
    }
    if (queued) {
      enter();
    }
  }

  /// True if the operation goes on; otherwise it has completed.
  bool settle(Moving& moving, int result, std::vector<IoCompletion>& completions) {
    const IoOperation& operation = moving.operation;
    if (result == -EINTR || result == -EAGAIN) {
      queue(moving);
      return true;
    }
    IoCompletion completion{.owner = operation.owner, .error = nullptr};
    if (result > 0) {
      moving.done += static_cast<std::size_t>(result);
      if (moving.done < operation.bytes) {
        queue(moving);
        return true;
      }
    } else if (result == 0) {
      completion.error = std::make_exception_ptr(io_stopped_short(operation, moving.done));
    } else {
      completion.error = std::make_exception_ptr(io_error(operation, -result));
    }
    completions.push_back(std::move(completion));
    moving_.erase(moving.self);
    --in_flight_;
    return false;
  }

  const std::size_t depth_;
  WakeEvent event_;  // outlives the ring, which reads it
  std::uint64_t wakes_ = 0;
  Ring ring_;
  std::vector<iovec> registered_;
  std::list<Moving> moving_;  // with the kernel; addresses are their entries' data
  std::size_t in_flight_ = 0;
  bool watching_ = false;  // a read of the event is with the kernel
  bool woken_ = false;
  bool stopping_ = false;
};

}  // namespace

bool UringEngine::available(std::string* why_not) {
  const auto no = [&](const std::string& reason) {
    if (why_not != nullptr) {
      *why_not = reason;
    }
    return false;
  };
  try {
    Ring ring(4);
    io_uring_probe* probe = ::io_uring_get_probe_ring(ring.get());
    if (probe == nullptr) {
      return no("the kernel does not say what its rings can do");
    }
    constexpr std::array needed{IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED};
    const bool all =
        std::all_of(needed.begin(), needed.end(), [&](int op) { return ::io_uring_opcode_supported(probe, op) != 0; });
    ::io_uring_free_probe(probe);
    return all || no("the kernel's rings cannot read and write");
  } catch (const IoError& error) {
    return no(error.message());
  }
}

std::unique_ptr<IoQueue> UringEngine::open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered) {
  return std::make_unique<UringQueue>(depth, registered);
}

}  // namespace terrace

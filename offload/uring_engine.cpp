#include "offload/uring_engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <functional>
#include <liburing.h>
#include <optional>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fallback.h"
#include "base/log.h"
#include "offload/errno_text.h"
#include "offload/io_progress.h"

namespace terrace {
namespace {

// What an entry of the ring is about, where it is not the number of a transfer.
constexpr std::uint64_t kWake = std::uint64_t{1} << 32;
constexpr std::uint64_t kNothing = kWake + 1;

constexpr std::size_t kLargestRegistration = std::size_t{1} << 30;  // the kernel's limit for one buffer
constexpr int kMostRefusals = 10000;
constexpr unsigned kEntriesBesides = 2;  // what is not about a transfer
constexpr unsigned kUsualDepth = 64;     // the greatest that queues have unless they are told otherwise

bool may_pass(int error_number) { return error_number == EINTR || error_number == EAGAIN || error_number == EBUSY; }

/// Counts the rings that ended. The kernel gives the memory of one to the next, of any thread; liburing maps it by
/// calls of its own, so that a sanitizer has to be told here that what the one wrote there was before what the other
/// writes.
std::atomic<std::uint64_t> rings_ended{0};

const char* hint_for(int error_number) {
  switch (error_number) {
    case EMFILE:
    case ENFILE:
      return "raise the limit on open files (ulimit -n)";
    case EINVAL:
      return "lower io.depth or choose the I/O engine threads";
    default:
      return "raise the limit on locked memory (ulimit -l) or choose the I/O engine threads";
  }
}

/// io_uring's own handle, open as long as this lives.
struct Ring {
  explicit Ring(unsigned entries) {
    const int result = io_uring_queue_init(entries, &ring, 0);
    static_cast<void>(rings_ended.load(std::memory_order_acquire));
    if (result == 0) return;
    throw IoError("nvme: opening an io_uring of " + std::to_string(entries) + " entries failed: " + errno_text(-result),
                  hint_for(-result));
  }
  ~Ring() {
    rings_ended.fetch_add(1, std::memory_order_release);
    io_uring_queue_exit(&ring);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring ring{};
};

/// A counter that the kernel can wait for.
struct Event {
  Event() : descriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (descriptor < 0) throw IoError("nvme: opening an eventfd failed: " + errno_text(errno), hint_for(errno));
  }
  ~Event() { ::close(descriptor); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  const int descriptor;
};

/// True while this lives.
struct Sleep {
  explicit Sleep(std::atomic<bool>& flag) : sleeps(flag) { sleeps = true; }
  ~Sleep() { sleeps = false; }
  Sleep(const Sleep&) = delete;
  Sleep& operator=(const Sleep&) = delete;

  std::atomic<bool>& sleeps;
};

/// Memory that the kernel knows by number.
class RegisteredMemory {
 public:
  RegisteredMemory(io_uring& ring, std::span<const std::span<std::byte>> regions) : ring_(ring) { fix(regions); }

  /// Other memory in place of it; nothing of it is in use.
  void replace(std::span<const std::span<std::byte>> regions) {
    let_go();
    fix(regions);
  }
  void let_go() {
    if (pieces_.empty()) return;
    pieces_.clear();
    while (io_uring_unregister_buffers(&ring_) == -EINTR) {
    }
  }

  /// The number of the piece that holds all of these bytes.
  std::optional<int> find(const std::byte* memory, std::size_t bytes) const {
    const auto after =
        std::upper_bound(pieces_.begin(), pieces_.end(), memory,
                         [](const std::byte* at, const iovec& piece) { return std::less<>()(at, begin(piece)); });
    if (after == pieces_.begin()) return std::nullopt;
    const iovec& piece = *std::prev(after);
    const auto into = static_cast<std::size_t>(memory - begin(piece));
    if (into > piece.iov_len || bytes > piece.iov_len - into) return std::nullopt;
    return static_cast<int>(after - pieces_.begin() - 1);
  }

 private:
  static const std::byte* begin(const iovec& piece) { return static_cast<const std::byte*>(piece.iov_base); }

  void fix(std::span<const std::span<std::byte>> regions) {
    for (std::span<std::byte> region : regions) {
      for (; !region.empty(); region = region.subspan(pieces_.back().iov_len)) {
        pieces_.push_back({region.data(), std::min(region.size(), kLargestRegistration)});
      }
    }
    if (pieces_.empty()) return;
    std::sort(pieces_.begin(), pieces_.end(), [](const iovec& a, const iovec& b) { return begin(a) < begin(b); });
    const int result = io_uring_register_buffers(&ring_, pieces_.data(), static_cast<unsigned>(pieces_.size()));
    if (result == 0) return;
    pieces_.clear();
    note_fallback("nvme: io_uring transfers memory that is not registered, a little slower",
                  "registering it failed: " + errno_text(-result) + " (raise the limit on locked memory, ulimit -l)");
  }

  io_uring& ring_;
  std::vector<iovec> pieces_;  // by address, as they are registered
};

/// Files that the kernel knows by number.
class RegisteredFiles {
 public:
  RegisteredFiles(io_uring& ring, std::span<const IoFile* const> files) : ring_(ring) {
    for (const IoFile* file : files) descriptors_.push_back(file->descriptor);
    if (descriptors_.empty()) return;
    const int result = io_uring_register_files(&ring_, descriptors_.data(), static_cast<unsigned>(descriptors_.size()));
    if (result == 0) return;
    descriptors_.clear();
    note_fallback("nvme: io_uring looks files up at each transfer, a little slower",
                  "registering them failed: " + errno_text(-result));
  }

  /// Nothing of them is in use.
  void let_go() {
    if (descriptors_.empty()) return;
    descriptors_.clear();
    while (io_uring_unregister_files(&ring_) == -EINTR) {
    }
  }

  std::optional<int> find(const IoFile& file) const {
    const auto found = std::find(descriptors_.begin(), descriptors_.end(), file.descriptor);
    if (found == descriptors_.end()) return std::nullopt;
    return static_cast<int>(found - descriptors_.begin());
  }

 private:
  io_uring& ring_;
  std::vector<int> descriptors_;  // by number; a file a path, so that they are few
};

class UringQueue : public IoQueue {
 public:
  UringQueue(std::size_t depth, std::span<const std::span<std::byte>> registered, std::span<const IoFile* const> files)
      : ring_(static_cast<unsigned>(depth) + kEntriesBesides),
        registered_(ring_.ring, registered),
        files_(ring_.ring, files),
        transfers_(depth) {
    for (std::size_t index = depth; index > 0; --index) free_.push_back(index - 1);
    over_.reserve(depth);
  }

  ~UringQueue() override {
    // What the kernel still works on would go on to use memory that its owner believes to be free.
    while (in_kernel_ > 0) {
      reap();
      if (in_kernel_ == 0) break;
      if (const int error_number = enter_and_wait(); error_number != 0 && !may_pass(error_number)) {
        log(LogLevel::error, "nvme: waiting for io_uring failed: " + errno_text(error_number));
        return;
      }
    }
    // The kernel takes a ring down some time after it was told to, and until then would hold these: the space of files
    // that have lost their names, too.
    files_.let_go();
    registered_.let_go();
  }

  std::size_t depth() const noexcept override { return transfers_.size(); }
  std::size_t in_flight() const noexcept override { return transfers_.size() - free_.size(); }

  void register_memory(std::span<const std::span<std::byte>> regions) override { registered_.replace(regions); }

  void submit(const IoOperation& operation) override {
    if (free_.empty()) {
      throw LogicError("nvme: an operation beyond the " + std::to_string(depth()) + " that a queue holds");
    }
    const std::size_t index = free_.back();
    free_.pop_back();
    transfers_[index].emplace(operation);
    go_on(index);
  }

  void wait(std::vector<IoCompletion>& done) override {
    const Sleep sleep(sleeps_);
    for (;;) {
      reap();
      if (woken_.exchange(false) || !over_.empty()) {
        flush();
        break;
      }
      const int error_number = enter_and_wait();
      if (error_number != 0 && !may_pass(error_number) && over_.empty()) {
        throw IoError("nvme: waiting for io_uring failed: " + errno_text(error_number));
      }
    }
    hand_over(done);
  }

  void poll(std::vector<IoCompletion>& done) override {
    flush();
    reap();
    flush();  // what goes on where it stopped short
    hand_over(done);
  }

  void wake() noexcept override {
    // In one order with what `wait` does: it looks for `woken_` after it has said that it sleeps. Who was first to set
    // that tells the kernel, where anybody has to.
    if (woken_.exchange(true) || !sleeps_) return;
    const std::uint64_t one = 1;
    // It fails only where the counter is full, and then it is not zero, which is all that matters.
    [[maybe_unused]] const ssize_t ignored = ::write(event_.descriptor, &one, sizeof one);
  }

 private:
  /// Puts the next piece of a transfer into the ring, unless it is over.
  void go_on(std::size_t index) {
    IoProgress& transfer = *transfers_[index];
    io_uring_sqe* entry = transfer.over() ? nullptr : io_uring_get_sqe(&ring_.ring);
    // There is room for all, unless the kernel has stopped taking any.
    if (!transfer.over() && entry == nullptr) transfer.advance(-EBUSY);
    if (transfer.over()) {
      over_.push_back(index);
      return;
    }
    const bool reads = transfer.operation().direction == IoOperation::Direction::read;
    const std::optional<int> registered_file = files_.find(*transfer.operation().file);
    const int file = registered_file.value_or(transfer.operation().file->descriptor);
    const auto length = static_cast<unsigned>(transfer.bytes());
    const std::optional<int> buffer = registered_.find(transfer.memory(), transfer.bytes());
    if (buffer && reads) {
      io_uring_prep_read_fixed(entry, file, transfer.memory(), length, transfer.offset(), *buffer);
    } else if (buffer) {
      io_uring_prep_write_fixed(entry, file, transfer.memory(), length, transfer.offset(), *buffer);
    } else if (reads) {
      io_uring_prep_read(entry, file, transfer.memory(), length, transfer.offset());
    } else {
      io_uring_prep_write(entry, file, transfer.memory(), length, transfer.offset());
    }
    if (registered_file) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, index);
    ++in_kernel_;
  }

  /// Has the ring tell when the event's counter is no longer zero: once, and at once if it is so already.
  void listen() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_.ring);
    listening_ = entry != nullptr;
    if (!listening_) return;
    io_uring_prep_poll_add(entry, event_.descriptor, POLLIN);
    io_uring_sqe_set_data64(entry, kWake);
  }

  /// Gives the kernel what is in the ring. What it refuses for the moment stays there for the next call.
  void flush() {
    while (io_uring_sq_ready(&ring_.ring) > 0) {
      const int result = io_uring_submit(&ring_.ring);
      if (result == -EINTR) continue;
      told(result);
      if (result <= 0) return;
    }
  }

  /// The same, and waits for a completion. Returns 0 or an errno value.
  int enter_and_wait() {
    const int result = io_uring_submit_and_wait(&ring_.ring, 1);
    told(result);
    return result < 0 ? -result : 0;
  }

  void told(int result) {
    if (result >= 0) {
      refusals_ = 0;
    } else if (result != -EINTR && (!may_pass(-result) || ++refusals_ > kMostRefusals)) {
      fail_unsubmitted(result);
      refusals_ = 0;
    }
  }

  /// Ends the transfers that the kernel will not take. Their entries stay in the ring as requests for nothing.
  void fail_unsubmitted(int result) {
    const io_uring_sq& queue = ring_.ring.sq;
    for (unsigned at = queue.sqe_tail - io_uring_sq_ready(&ring_.ring); at != queue.sqe_tail; ++at) {
      io_uring_sqe* entry = &queue.sqes[at & queue.ring_mask];
      const std::uint64_t index = entry->user_data;
      if (index >= kWake) continue;
      io_uring_prep_nop(entry);
      io_uring_sqe_set_data64(entry, kNothing);
      --in_kernel_;
      // EAGAIN would mean another attempt.
      transfers_[index]->advance(may_pass(-result) ? -ENOMEM : result);
      over_.push_back(index);
    }
  }

  /// Takes in what the kernel has completed.
  void reap() {
    io_uring_cqe* completed = nullptr;
    while (io_uring_peek_cqe(&ring_.ring, &completed) == 0) {
      const std::uint64_t about = completed->user_data;
      const int result = completed->res;
      io_uring_cqe_seen(&ring_.ring, completed);
      if (about == kWake) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t ignored = ::read(event_.descriptor, &count, sizeof count);
        listening_ = false;
      } else if (about != kNothing) {
        --in_kernel_;
        transfers_[about]->advance(result);
        go_on(about);
      }
    }
    // Here and not where the queue is opened: the kernel ties what a thread puts into a ring to that thread.
    if (!listening_) listen();
  }

  void hand_over(std::vector<IoCompletion>& done) {
    done.reserve(done.size() + over_.size());
    for (const std::size_t index : over_) {
      done.push_back(transfers_[index]->completion());
      transfers_[index].reset();
      free_.push_back(index);
    }
    over_.clear();
  }

  Event event_;  // first: the ring listens to it
  Ring ring_;
  RegisteredMemory registered_;
  RegisteredFiles files_;
  std::vector<std::optional<IoProgress>> transfers_;  // by index; its length is the depth
  std::vector<std::size_t> free_;                     // indices without a transfer
  std::vector<std::size_t> over_;                     // indices of transfers that are to be handed back
  std::size_t in_kernel_ = 0;                         // entries of transfers in the ring or beyond
  int refusals_ = 0;                                  // in a row
  bool listening_ = false;
  std::atomic<bool> sleeps_{false};  // or is about to
  std::atomic<bool> woken_{false};   // since the last `wait`
};

}  // namespace

bool UringEngine::available(std::string* why_not) {
  const auto refuse = [&](const std::string& reason) {
    if (why_not != nullptr) *why_not = reason;
    return false;
  };
  io_uring ring{};
  // As large as it will be: there is a limit on the memory of rings.
  if (const int result = io_uring_queue_init(kUsualDepth + kEntriesBesides, &ring, 0); result != 0) {
    return refuse("opening a ring failed: " + errno_text(-result) +
                  (result == -ENOMEM ? " (raise the limit on locked memory, ulimit -l)" : ""));
  }
  struct Operation {
    int code;
    const char* name;
  };
  constexpr std::array kNeeded = {Operation{IORING_OP_READ, "read"}, Operation{IORING_OP_WRITE, "write"},
                                  Operation{IORING_OP_READ_FIXED, "read into registered memory"},
                                  Operation{IORING_OP_WRITE_FIXED, "write from registered memory"},
                                  Operation{IORING_OP_POLL_ADD, "poll"}};
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  const auto* missing = std::find_if(kNeeded.begin(), kNeeded.end(), [&](const Operation& operation) {
    return probe == nullptr || io_uring_opcode_supported(probe, operation.code) == 0;
  });
  const bool has_probe = probe != nullptr;
  if (has_probe) io_uring_free_probe(probe);
  io_uring_queue_exit(&ring);
  if (!has_probe) return refuse("this kernel does not say what its rings can do");
  if (missing != kNeeded.end()) return refuse("this kernel's rings cannot " + std::string(missing->name));
  return true;
}

std::unique_ptr<IoQueue> UringEngine::open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered,
                                                 std::span<const IoFile* const> files) {
  if (depth == 0) throw LogicError("nvme: a queue needs a depth of at least 1");
  return std::make_unique<UringQueue>(depth, registered, files);
}

}  // namespace terrace

#include "offload/nvme_worker.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"

namespace terrace {
namespace {

/// Bytes that may be with a drive at once, each way, and operations.
constexpr std::size_t bytes_in_flight = std::size_t{8} << 20U;
constexpr std::size_t fewest_operations = 8;
constexpr std::size_t most_operations = 64;

/// What is gathered before the drive hears of it: enough that small blocks go to it together, little enough that it
/// never waits for long while checksums are taken.
constexpr std::size_t bytes_at_once = std::size_t{256} << 10U;

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.message();
  } catch (const std::exception& other) {
    return other.what();
  }
}

/// Queues that the kernel may still work on, until the process ends.
void keep_for_good(std::unique_ptr<IoQueue> queue) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::unique_ptr<IoQueue>>;  // reachable, and never destroyed
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(queue));
}

}  // namespace

std::size_t NvmeWorker::default_depth(std::size_t block_bytes) noexcept {
  return std::clamp(bytes_in_flight / block_bytes, fewest_operations, most_operations);
}

NvmeWorker::NvmeWorker(TransferBoard& board, NvmeStore& store, IoEngine& engine, Link link, std::size_t depth)
    : board_(board),
      store_(store),
      link_(link),
      engine_(engine),
      depth_(depth),
      io_(engine.open_queue(depth, board.staging_memory(link), store.io_files())),
      thread_([this] { work(); }) {}

NvmeWorker::~NvmeWorker() {
  if (!unanswered_.empty()) {
    keep_for_good(std::move(io_));
  }
}

void NvmeWorker::wake() noexcept {
  {
    const std::lock_guard lock(io_mutex_);
    io_->wake();
  }
  work_.notify_one();
}

void NvmeWorker::tick() noexcept {
  ++ticks_;
  const std::lock_guard lock(io_mutex_);
  io_->wake();
}

void NvmeWorker::work() {
  std::vector<IoCompletion> ended;
  std::vector<IoCompletion> next;
  for (;;) {
    const Filled filled = fill();
    if (filled == Filled::nothing_will_come && ended.empty()) {
      return;
    }
    next.clear();
    receive(next, ended.empty() ? filled : Filled::in_part);
    for (const IoCompletion& completion : ended) {
      finish(completion);
    }
    ended.swap(next);
    give_up_on_the_unanswered(ended);
  }
}

/// Gives the queue what it has room for, or as much of it as goes to the drive at once.
NvmeWorker::Filled NvmeWorker::fill() {
  std::size_t bytes = 0;
  while (bytes < bytes_at_once) {
    std::optional<TransferBlock> next;
    {
      const TransferBoard::Lock lock = board_.lock();
      const bool changes = !dead_ && board_.registration_number(lock) != registration_;
      if (changes && io_->in_flight() > 0) {
        return Filled::all;  // and nothing more before it has come to rest
      }
      if (!changes && (dead_ || io_->in_flight() < io_->depth())) {
        next = board_.pop(link_, lock);
      }
      if (!changes && !next) {
        return moving_.empty() && board_.stopping(lock) ? Filled::nothing_will_come : Filled::all;
      }
    }
    if (next) {
      bytes += start(std::move(*next));
    } else {
      open_queue_again();
    }
  }
  return Filled::in_part;
}

void NvmeWorker::open_queue_again() {
  TransferBoard::Registration wanted;
  {
    const TransferBoard::Lock lock = board_.lock();
    wanted = board_.registration(link_, lock);
  }
  registration_ = wanted.number;
  try {
    std::unique_ptr<IoQueue> fresh = engine_.open_queue(depth_, wanted.memory, store_.io_files());
    const std::lock_guard lock(io_mutex_);
    io_.swap(fresh);  // what was registered goes with the one before
  } catch (...) {
    die(std::current_exception());
    return;
  }
  board_.registered(link_, wanted.number);
}

/// Returns how many bytes are with the queue now.
std::size_t NvmeWorker::start(TransferBlock block) {
  const auto at = moving_.insert(moving_.end(), {.block = std::move(block), .since = ticks_});
  const TransferBlock& started = at->block;
  try {
    if (dead_) {
      std::rethrow_exception(dead_);
    }
    if (!board_.begin(started)) {
      end(at, nullptr);
      return 0;
    }
    IoOperation operation = link_ == Link::nvme_to_host
                                ? store_.begin_read(started.on_nvme(), started.on_host(), started.bytes())
                                : store_.begin_write(started.on_nvme(), started.on_host(), started.bytes());
    operation.owner = &*at;
    io_->submit(operation);
    return operation.bytes;
  } catch (...) {
    end(at, std::current_exception());
    return 0;
  }
}

/// Hands the drive what `fill` has gathered, and takes what has ended; waits for that where nothing else is to be done.
void NvmeWorker::receive(std::vector<IoCompletion>& done, Filled filled) {
  if (broken_) {
    TransferBoard::Lock lock = board_.lock();
    if (filled == Filled::all && !board_.has_work(link_, lock) && !board_.stopping(lock)) {
      work_.wait(lock);
    }
    return;
  }
  try {
    if (filled == Filled::all) {
      io_->wait(done);
    } else {
      io_->poll(done);
    }
  } catch (...) {
    broken_ = true;
    die(std::current_exception());
    while (!moving_.empty()) {
      give_up_on(moving_.begin(), message_of(std::current_exception()));
    }
  }
}

void NvmeWorker::finish(const IoCompletion& completion) {
  const auto is_owner = [&](const Moving& moving) { return &moving == completion.owner; };
  const auto at = std::find_if(moving_.begin(), moving_.end(), is_owner);
  if (at == moving_.end()) {
    return;  // an answer that came too late
  }
  const TransferBlock& block = at->block;
  const TransferJob& job = *block.job;
  const ExtentId extent = block.on_nvme();
  std::exception_ptr error = completion.error;
  try {
    if (link_ == Link::nvme_to_host) {
      store_.end_read(extent, block.on_host(), error);
    } else {
      store_.end_write(extent, error == nullptr);
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error && link_ == Link::host_to_nvme && job.request.write_failed) {
    job.request.write_failed(extent, error);
  }
  if (!error && link_ == Link::nvme_to_host && job.route.second) {
    TransferBlock next = std::move(at->block);
    moving_.erase(at);
    board_.pass_on(std::move(next));
    return;
  }
  end(at, error);
}

/// But not on what has been answered, however long ago.
void NvmeWorker::give_up_on_the_unanswered(const std::vector<IoCompletion>& answered) {
  const std::uint64_t now = ticks_;
  for (auto at = moving_.begin(); at != moving_.end();) {
    const auto next = std::next(at);
    if (now - at->since > most_ticks &&
        std::none_of(answered.begin(), answered.end(), [&](const auto& each) { return each.owner == &*at; })) {
      give_up_on(at, "the drive does not answer");
    }
    at = next;
  }
}

void NvmeWorker::give_up_on(AllMoving::iterator at, const std::string& why) {
  const TransferBlock& block = at->block;
  const Unanswered lost("nvme: " + std::string(link_ == Link::nvme_to_host ? "read" : "write") + " of " +
                            std::to_string(block.bytes()) + " B, " + store_.describe(block.on_nvme()) +
                            ", has no end: " + why,
                        "look at the drive and the system's log, and begin again from a checkpoint");
  die(std::make_exception_ptr(
      IoError("nvme: nothing more is asked of a drive that was lost: " + lost.message(), lost.hint())));
  store_.keep_files_open();
  TransferBlock ended = block;
  unanswered_.splice(unanswered_.end(), moving_, at);  // its address may still come back with a completion
  board_.abandon(std::move(ended), std::make_exception_ptr(lost));
}

void NvmeWorker::die(const std::exception_ptr& error) {
  if (!dead_) {
    dead_ = error;
    board_.lose(link_, error);
    board_.registered(link_, std::numeric_limits<std::uint64_t>::max());
  }
}

void NvmeWorker::end(AllMoving::iterator at, std::exception_ptr error) {
  TransferBlock block = std::move(at->block);
  moving_.erase(at);
  board_.end(std::move(block), std::move(error));
}

}  // namespace terrace

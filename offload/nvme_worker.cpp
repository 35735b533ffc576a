#include "offload/nvme_worker.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "offload/start_thread.h"
#include "offload/time_slice.h"

namespace terrace {
namespace {

/// Bytes that may be with a drive at once, each way, and most operations: more than is on its way at any time where a
/// drive of 2 GB/s answers after 4 ms, as virtual ones do.
constexpr std::size_t bytes_in_flight = std::size_t{16} << 20U;
constexpr std::size_t most_operations = 128;

/// What is settled before the drive is looked after again: little enough that it never waits for long while checksums
/// are taken.
constexpr std::size_t most_settled_bytes = std::size_t{256} << 10U;

/// The most that is gathered before the drive hears of it: the kernel makes one request of neighbours that come
/// together. Where so many bytes are 256 KiB, they are written in requests of 0.2 to 0.4 MB, with 1 MiB in those of 1.5
/// MB, as they are read, and a virtual drive moves a tenth more in all.
constexpr std::size_t most_gathered_bytes = std::size_t{1} << 20U;

/// For how long is gathered what the drive does not hear of yet. It is longer than checksums of so many bytes take:
/// only who is slow to begin or to end a transfer takes so long.
constexpr std::int64_t gathering_ns = 400'000;

/// A quarter of what may be with the drive at once, so that it has the rest meanwhile. Where that is less than a block,
/// one is gathered all the same.
std::size_t gathered_bytes(std::size_t block_bytes, std::size_t depth) {
  return std::min(most_gathered_bytes, block_bytes * depth / 4);
}

/// How many blocks may have their checksum before there is room for them: as many as a drive may answer at a time.
std::size_t most_ready(Link link, std::size_t depth) {
  return link == Link::host_to_nvme ? depth : 0;  // a read takes no work before it starts
}

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

NvmeWorker::NvmeWorker(TransferBoard& board, NvmeStore& store, IoEngine& engine, Link link, std::size_t depth,
                       const Processors& processors)
    : board_(board),
      store_(store),
      link_(link),
      most_ready_(most_ready(link, depth)),
      gathered_bytes_(gathered_bytes(board.block_bytes(), depth)),
      io_(engine.open_queue(depth, board.staging_memory(link), store.io_files())) {
  // Room for all that may be on their way: with the queue, answered and not settled, and ready.
  spare_.resize(2 * depth + most_ready_ + 1);
  completions_.reserve(2 * depth);
  beginnings_.reserve(2 * depth);
  ends_of_writes_.reserve(2 * depth);
  ends_of_reads_.reserve(2 * depth);
  ended_.reserve(2 * depth);
  passed_on_.reserve(2 * depth);
  thread_ = start_thread<std::thread>("transfer: starting the thread of the link " + std::string(name_of(link)),
                                      processors, [this] { work(); });
}

NvmeWorker::~NvmeWorker() {
  if (!unanswered_.empty()) {
    keep_for_good(std::move(io_));
  }
}

void NvmeWorker::wake() noexcept {
  if (is_full_) {
    return;  // it looks at the board, which has what is new by now, after it has said that it is full no more
  }
  io_->wake();
  work_.notify_one();
}

void NvmeWorker::tick() noexcept {
  ++ticks_;
  io_->wake();
}

void NvmeWorker::work() {
  // Small blocks come in bunches. Who runs at the first of one runs in place of the kernel's thread that ends the rest.
  if (board_.block_bytes() > most_settled_bytes) {
    prefer_short_time_slices();
  }
  for (;;) {
    const Filled filled = fill();
    if (filled == Filled::nothing_will_come) {
      return;
    }
    const bool came = receive(filled);
    give_up_on_the_unanswered();
    // Where the drive answers faster than checksums are taken, both take turns. What has come does not wait for others
    // that take long, however much comes.
    if (!answered_.empty() && (!came || filled == Filled::late)) {
      settle_some();
    }
    while (answered_.size() > io_->depth()) {
      settle_some();
    }
  }
}

/// Gives the queue what it has room for, or as much of it as goes to the drive at once; where there is room for none,
/// readies some more.
NvmeWorker::Filled NvmeWorker::fill() {
  is_full_ = false;
  if (!dead_ && board_.registration_number() != registration_) {
    if (io_->in_flight() > 0) {
      return Filled::all;  // and nothing more before it has come to rest
    }
    register_anew();
  }
  bool submitted = false;
  const Stopwatch watch;
  const auto in_part = [&] { return watch.elapsed_ns() < gathering_ns ? Filled::in_part : Filled::late; };
  for (std::size_t bytes = 0; bytes < gathered_bytes_ && watch.elapsed_ns() < gathering_ns;) {
    const std::size_t room = dead_ ? io_->depth() : io_->depth() - io_->in_flight();
    if (room == 0 && ready_.size() >= most_ready_) {
      is_full_ = true;
      return Filled::all;
    }
    if (room == 0 && submitted) {
      return in_part();  // the drive hears of that first
    }
    {
      const TransferBoard::Lock lock = board_.lock();
      choose(room, gathered_bytes_ - bytes, lock);
      if (chosen_.empty()) {
        const bool ends = ready_.empty() && moving_.empty() && answered_.empty() && board_.stopping(lock);
        return ends ? Filled::nothing_will_come : Filled::all;
      }
    }
    while (!chosen_.empty()) {
      bytes += make_ready();
      while (!chosen_.empty() && chosen_.front().is_ready) {
        if (room == 0) {
          ready_.splice(ready_.end(), chosen_, chosen_.begin());
        } else {
          submit(chosen_.begin());
          submitted = true;
        }
      }
    }
    report();
  }
  return in_part();
}

/// What takes time before it is submitted.
std::size_t NvmeWorker::bytes_to_check(const Moving& moving) const {
  return link_ == Link::host_to_nvme ? moving.block.bytes() : 0;
}

/// What is next, in one look at the board: to be submitted, as far as there is room, or to be made ready. It ends with
/// a block whose transfer has not begun, as nobody knows how long that takes, and where so many bytes are to be
/// checked: what is chosen is not passed by what comes then.
void NvmeWorker::choose(std::size_t room, std::size_t bytes, const TransferBoard::Lock& lock) {
  const std::size_t most = room > 0 ? room : most_ready_ - ready_.size();
  for (std::size_t chosen_bytes = 0; chosen_.size() < most && chosen_bytes < bytes;) {
    auto at = room > 0 && !ready_.empty() ? next_ready(lock) : ready_.end();
    std::optional<TransferBlock> block;
    if (at == ready_.end()) {
      block = board_.pop(link_, lock);
    } else if (passed_in_a_row_ < LinkQueue::most_urgent_in_a_row) {
      block = board_.pop_before(at->block.job->request.priority, link_, lock);
    }
    if (block) {
      at = take_in(std::move(*block), lock);
      chosen_bytes += bytes_to_check(*at);
    } else if (at == ready_.end()) {
      return;
    } else {
      at->error = at->block.job->error;
    }
    if (room > 0) {
      passed_in_a_row_ = at == ready_.begin() ? 0 : passed_in_a_row_ + 1;
    }
    chosen_.splice(chosen_.end(), ready_, at);
    if (!at->is_ready && !at->has_begun) {
      return;
    }
  }
}

/// The most urgent by now: what was raised since it is ready goes ahead of what was not. But none is passed for ever.
NvmeWorker::AllMoving::iterator NvmeWorker::next_ready(const TransferBoard::Lock& /*lock*/) {
  if (passed_in_a_row_ >= LinkQueue::most_urgent_in_a_row) {
    return ready_.begin();
  }
  return std::min_element(ready_.begin(), ready_.end(), [](const Moving& a, const Moving& b) {
    return a.block.job->request.priority < b.block.job->request.priority;
  });
}

/// With nothing in flight. In the queue that there is: another one could fail to open, for reasons that have nothing to
/// do with the drive.
void NvmeWorker::register_anew() {
  TransferBoard::Registration wanted;
  {
    const TransferBoard::Lock lock = board_.lock();
    wanted = board_.registration(link_, lock);
  }
  registration_ = wanted.number;
  io_->register_memory(wanted.memory);
  board_.registered(link_, wanted.number);
}

/// To what is ready, as its last.
NvmeWorker::AllMoving::iterator NvmeWorker::take_in(TransferBlock block, const TransferBoard::Lock& lock) {
  if (spare_.empty()) {
    spare_.emplace_back();
  }
  const auto at = spare_.begin();
  *at = Moving{.block = std::move(block), .place = at};
  at->has_begun = TransferBoard::has_begun(at->block, lock);
  ready_.splice(ready_.end(), spare_, at);
  return at;
}

/// What is chosen and is not ready yet, all at once; what cannot be is over. It ends before a transfer that has not
/// begun, as what is before that does not wait for it. Returns the bytes that were to be checked.
std::size_t NvmeWorker::make_ready() {
  beginnings_.clear();
  std::size_t checked = 0;
  auto at = chosen_.begin();
  while (at != chosen_.end() && (at->is_ready || at->has_begun || at == chosen_.begin())) {
    const auto moving = at++;
    const TransferBlock& its = moving->block;
    if (moving->is_ready) {
      if (moving->error) {
        end(chosen_, moving, end_in_store(*moving, moving->error));
      }
      continue;
    }
    checked += bytes_to_check(*moving);
    if (!moving->has_begun) {
      report();  // what has ended does not wait for another's beginning
    }
    try {
      if (dead_) {
        std::rethrow_exception(dead_);
      }
      if (!moving->has_begun && !board_.begin(its)) {
        end(chosen_, moving, nullptr);
        continue;
      }
      beginnings_.push_back({its.on_nvme(), its.on_host(), its.bytes()});
    } catch (...) {
      end(chosen_, moving, std::current_exception());
    }
  }
  if (beginnings_.empty()) {
    return checked;
  }
  if (link_ == Link::nvme_to_host) {
    store_.begin_reads(beginnings_);
  } else {
    store_.begin_writes(beginnings_);
  }
  const auto end_of_these = at;
  auto beginning = beginnings_.begin();
  for (at = chosen_.begin(); at != end_of_these;) {
    const auto moving = at++;
    if (moving->is_ready) {
      continue;
    }
    if (beginning->error) {
      end(chosen_, moving, beginning->error);
    } else {
      moving->operation = beginning->operation;
      moving->operation.owner = &*moving;
      moving->is_ready = true;
    }
    ++beginning;
  }
  return checked;
}

void NvmeWorker::submit(AllMoving::iterator at) {
  try {
    if (dead_) {
      std::rethrow_exception(dead_);
    }
    io_->submit(at->operation);
  } catch (...) {
    end(chosen_, at, end_in_store(*at, std::current_exception()));
    return;
  }
  at->is_with_queue = true;
  moving_.splice(moving_.end(), chosen_, at);
}

/// Hands the drive what `fill` has gathered, and takes what it has answered; waits for that where nothing else is to be
/// done. Returns whether there was any.
bool NvmeWorker::receive(Filled filled) {
  const bool waits = filled == Filled::all && answered_.empty();
  if (broken_) {
    TransferBoard::Lock lock = board_.lock();
    if (waits && !board_.has_work(link_, lock) && !board_.stopping(lock)) {
      work_.wait(lock);
    }
    return false;
  }
  completions_.clear();
  // However long it took to gather them, the drive hears of these only now.
  for (auto at = moving_.rbegin(); at != moving_.rend() && !at->is_told; ++at) {
    at->is_told = true;
    at->since = ticks_;
  }
  try {
    if (waits) {
      io_->wait(completions_);
    } else {
      io_->poll(completions_);
    }
  } catch (...) {
    broken_ = true;
    die(std::current_exception());
    while (!moving_.empty()) {
      give_up_on(moving_.begin(), message_of(std::current_exception()));
    }
    return false;
  }
  for (const IoCompletion& completion : completions_) {
    auto& moving = *static_cast<Moving*>(completion.owner);
    if (std::exchange(moving.is_with_queue, false)) {  // or the answer comes too late
      moving.error = completion.error;
      answered_.splice(answered_.end(), moving_, moving.place);
    }
  }
  return !completions_.empty();
}

void NvmeWorker::settle_some() {
  if (link_ == Link::nvme_to_host) {
    settle_reads();
  } else {
    settle_writes();
  }
  report();
}

void NvmeWorker::settle_reads() {
  ends_of_reads_.clear();
  std::size_t bytes = 0;
  for (auto at = answered_.begin(); at != answered_.end() && bytes < most_settled_bytes; ++at) {
    bytes += at->operation.bytes;
    ends_of_reads_.push_back({.extent = at->block.on_nvme(), .block = at->block.on_host(), .error = at->error});
  }
  store_.end_reads(ends_of_reads_);
  for (auto& ended : ends_of_reads_) {
    const auto first = answered_.begin();
    if (ended.error || !first->block.job->route.second) {
      end(answered_, first, std::move(ended.error));
    } else {
      passed_on_.push_back(std::move(first->block));
      spare_.splice(spare_.begin(), answered_, first);
    }
  }
}

/// All at once: no checksum is to be taken, and records of neighbours cost as much as one.
void NvmeWorker::settle_writes() {
  ends_of_writes_.clear();
  for (const Moving& moving : answered_) {
    ends_of_writes_.push_back({.extent = moving.block.on_nvme(), .error = moving.error});
  }
  store_.end_writes(ends_of_writes_);
  for (auto& ended : ends_of_writes_) {
    const TransferRequest& request = answered_.front().block.job->request;
    if (ended.error && request.write_failed) {
      request.write_failed(ended.extent, ended.error);
    }
    end(answered_, answered_.begin(), std::move(ended.error));
  }
}

std::exception_ptr NvmeWorker::end_in_store(const Moving& moving, std::exception_ptr error) {
  const ExtentId extent = moving.block.on_nvme();
  try {
    if (link_ == Link::nvme_to_host) {
      store_.end_read(extent, moving.block.on_host(), error);
    } else {
      store_.end_write(extent, error == nullptr);
    }
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

void NvmeWorker::give_up_on_the_unanswered() {
  const std::uint64_t now = ticks_;
  if (std::exchange(last_look_, now) == now) {
    return;
  }
  for (auto at = moving_.begin(); at != moving_.end();) {
    const auto next = std::next(at);
    if (now - at->since > most_ticks) {
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
  at->is_with_queue = false;
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

/// The board hears of it at the next `report`.
void NvmeWorker::end(AllMoving& list, AllMoving::iterator at, std::exception_ptr error) {
  ended_.push_back({std::move(at->block), std::move(error)});
  spare_.splice(spare_.begin(), list, at);
}

void NvmeWorker::report() {
  if (!passed_on_.empty()) {
    board_.pass_on(passed_on_);
    passed_on_.clear();
  }
  if (!ended_.empty()) {
    board_.end(ended_);
    ended_.clear();
  }
}

}  // namespace terrace

/// Moves bytes between memory and files without anyone waiting for them.
///
/// An engine opens queues; a queue runs many operations at a time and hands back one completion for each. What an
/// operation needs of the kernel is the queue's business: interruptions are retried and short transfers resumed, so a
/// completion without an error means that every byte has moved. An error is an IoError with path, offset, length and
/// cause; a failed write may have changed any part of its range, a failed read any part of its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace terrace {

/// An open file and the name that messages give it. Whoever opened the descriptor closes it.
struct IoFile {
  int descriptor = -1;
  std::filesystem::path path;
};

/// One transfer. File and memory stay as they are until it has completed; operations in flight at once complete in
/// any order, and ranges that overlap are the caller's to order. Direct files need multiples of their block size.
struct IoOperation {
  enum class Direction : std::uint8_t { read, write };

  Direction direction = Direction::read;
  const IoFile* file = nullptr;
  std::uint64_t offset = 0;     // bytes, in the file
  std::byte* memory = nullptr;  // only read from by a write
  std::size_t bytes = 0;
  void* owner = nullptr;  // comes back with the completion
};

struct IoCompletion {
  void* owner = nullptr;
  std::exception_ptr error;  // null: every byte moved
};

/// Operations in flight, at most `depth()`. Used by one thread at a time, but for `wake`.
class IoQueue {
 public:
  IoQueue() = default;
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  /// Waits for what is in flight and drops its completions.
  virtual ~IoQueue() = default;

  virtual std::size_t depth() const noexcept = 0;
  /// Submitted, and not yet handed back by `wait` or `poll`.
  virtual std::size_t in_flight() const noexcept = 0;

  /// Has these regions registered in place of those before, of which the kernel then holds nothing; as at
  /// `open_queue`, they change nothing else, and what cannot be registered is moved without. Only with nothing in
  /// flight.
  virtual void register_memory(std::span<const std::span<std::byte>> regions) = 0;

  /// Takes an operation and never waits for it; the drive may hear of it only at the next `poll` or `wait`, so that
  /// several are handed over at once. What goes wrong is told by its completion; only a submission beyond `depth()`
  /// throws, LogicError.
  virtual void submit(const IoOperation& operation) = 0;

  /// Appends what has completed. Blocks until there is something, or until `wake` was called since the last `wait`.
  /// Throws IoError should the queue itself fail.
  virtual void wait(std::vector<IoCompletion>& done) = 0;
  /// Appends what has completed, without blocking. A `wake` is left for the next `wait`.
  virtual void poll(std::vector<IoCompletion>& done) = 0;

  /// Ends a `wait`, the next one if nobody waits at the moment. Any thread.
  virtual void wake() noexcept = 0;
};

/// Thread-safe. Queues may outlive their engine.
class IoEngine {
 public:
  IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;
  virtual ~IoEngine() = default;

  virtual std::string_view name() const noexcept = 0;

  /// `registered`: page-aligned regions that outlive the queue, or others in their place, and in which the memory of
  /// most operations lies, and `files` on which most of them are; either may be empty. They make transfers cheaper
  /// where the engine can register them with the kernel, and change nothing else. Throws IoError, and LogicError if
  /// `depth` is 0.
  virtual std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered = {},
                                              std::span<const IoFile* const> files = {}) = 0;
};

}  // namespace terrace

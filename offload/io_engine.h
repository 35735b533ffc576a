/// Asynchronous I/O between memory and files: queues of operations, each of which completes once.
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

/// One movement of bytes. Offset, length and address are multiples of 4096 where the file was opened with O_DIRECT.
struct IoOperation {
  enum class Direction : std::uint8_t { read, write };

  Direction direction = Direction::read;
  const IoFile* file = nullptr;
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  void* owner = nullptr;  ///< comes back with the completion
};

/// How an operation ended. No error: every byte has moved, as short transfers are resumed; there is no partial success.
/// Otherwise IoError with path, offset, length and cause; a failed write may have changed any part of its range, a
/// failed read any part of its memory.
struct IoCompletion {
  void* owner = nullptr;
  std::exception_ptr error;
};

/// Operations under way, of one thread: only `wake` may be called by others.
class IoQueue {
 public:
  /// Waits for what is under way.
  virtual ~IoQueue() = default;

  virtual std::size_t depth() const noexcept = 0;
  virtual std::size_t in_flight() const noexcept = 0;

  /// Starts an operation and never waits for it. What keeps it from starting is its completion's error. Throws
  /// LogicError beyond `depth`.
  virtual void submit(const IoOperation& operation) = 0;
  /// Appends what has completed; blocks until there is something, or until `wake` is called or has been since the last
  /// wait.
  virtual void wait(std::vector<IoCompletion>& completions) = 0;
  /// The same without blocking.
  virtual void poll(std::vector<IoCompletion>& completions) = 0;
  virtual void wake() noexcept = 0;
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  virtual std::string_view name() const noexcept = 0;
  /// `registered`: memory that lives as long as the queue and that many operations will use; may be empty. Throws
  /// IoError if the system refuses the queue.
  virtual std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered) = 0;
};

}  // namespace terrace

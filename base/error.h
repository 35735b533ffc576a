/// The exceptions of Terrace.
///
/// Every error that Terrace raises derives from `Error`. A message says what was attempted, on what and why it
/// failed; a hint says the way out. `what()` holds both, as
///
///     nvme: write of 1048576 B at offset 73400320 to /data/extents.0 failed: No space left on device (ENOSPC)
///       hint: free space or lower nvme.memory (now 100GiB)
///
/// Copying an error does not throw.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace terrace {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, const std::string& hint = "")
      : std::runtime_error(hint.empty() ? message : message + kHintPrefix + hint), message_size_(message.size()) {}

  /// What failed and why, without the hint.
  std::string message() const { return std::string(what(), message_size_); }

  /// The way out; empty if there is none to give.
  std::string hint() const {
    const std::string both = what();
    return both.size() == message_size_ ? "" : both.substr(message_size_ + std::char_traits<char>::length(kHintPrefix));
  }

 private:
  static constexpr const char* kHintPrefix = "\n  hint: ";

  std::size_t message_size_;  // the texts live in what(): its copies cannot throw, a std::string's can
};

/// A setting or an argument that cannot be accepted.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// A budget that is too small for what was asked.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A file or a device that could not be read or written.
class IoError : public Error {
 public:
  using Error::Error;
};

/// Bytes that came back other than they were written.
class CorruptData : public Error {
 public:
  using Error::Error;
};

/// A gradient with an element that is NaN or infinite, where that is not to pass.
class NonFiniteGradient : public Error {
 public:
  using Error::Error;
};

/// Another rank, or the way to it, that failed.
class DistributedError : public Error {
 public:
  using Error::Error;
};

/// A call that the state of an object does not allow: a defect of the program or of Terrace.
class LogicError : public Error {
 public:
  using Error::Error;
};

}  // namespace terrace

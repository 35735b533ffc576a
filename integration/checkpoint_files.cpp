#include "integration/checkpoint_files.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "base/error.h"
#include "base/fallback.h"
#include "offload/errno_text.h"

namespace terrace {
namespace {

/// `path` is of a file; that of a folder ends with a separator.
std::string hint_for_missing(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path.parent_path(), error)) {
    return "the folder has been removed meanwhile: leave it where it is while something is saved or loaded";
  }
  if (std::filesystem::is_symlink(path, error)) {
    return "it is a link to what is missing: remove it, or choose another folder";
  }
  return "a file has been removed from the folder meanwhile: leave it alone while something is saved or loaded";
}

std::string hint_for(int error_number, const std::filesystem::path& path) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT:
      return "free space for a checkpoint beside the one before, or choose another folder";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a folder that can be read and written";
    case ENOTDIR:
      return "choose a folder: there is a file in its place, or in that of one it lies in";
    case EEXIST:
      return "move what is there out of the way, or choose another folder";
    case EISDIR:
      return "there is a folder in the place of a file: move it out of the way, or choose another folder";
    case ENOENT:
      return hint_for_missing(path);
    case ELOOP:
    case ENAMETOOLONG:
      return "choose a folder of another name";
    case EFBIG:
      return "choose a folder on a file system that takes larger files, and raise the limit on their size (ulimit -f)";
    case EMFILE:
    case ENFILE:
      return "raise the limit on open files (ulimit -n)";
    case ENOLCK:
    case EOPNOTSUPP:
      return "choose a folder on a file system that has locks, such as a local one";
    case EIO:
      return "the drive may be failing: see the kernel log (dmesg), or choose a folder on another drive";
    default:
      return "choose another folder, or one on another drive";
  }
}

/// `path` is what it failed on, as `hint_for_missing` takes it.
[[noreturn]] void fail(const std::string& attempt, int error_number, const std::filesystem::path& path) {
  throw IoError("checkpoint: " + attempt + " failed: " + errno_text(error_number), hint_for(error_number, path));
}

[[noreturn]] void fail_to_make(const std::filesystem::path& folder, int error_number) {
  const std::string attempt = "making the folder " + folder.string();
  if (error_number != ENOENT) fail(attempt, error_number, folder);
  throw IoError("checkpoint: " + attempt + " failed: " + errno_text(error_number),
                "choose another folder: none can be made there");
}

std::string range(std::size_t bytes, std::uint64_t offset) {
  return std::to_string(bytes) + " B at offset " + std::to_string(offset);
}

CheckpointFile open_file(const std::filesystem::path& path, int flags, const char* attempt) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (descriptor < 0) fail(attempt + path.string(), errno, (flags & O_DIRECTORY) != 0 ? path / "" : path);
  return {descriptor, path};
}

struct stat status_of(const CheckpointFile& file) {
  struct stat status = {};
  if (::fstat(file.descriptor(), &status) != 0) fail("asking what " + file.path().string() + " is", errno, file.path());
  return status;
}

class SystemFiles final : public CheckpointFiles {
 public:
  void make_folder(const std::filesystem::path& folder) override {
    std::vector<std::filesystem::path> made;
    std::error_code error;
    for (auto path = std::filesystem::absolute(folder);
         !std::filesystem::exists(path, error) && path.has_relative_path(); path = path.parent_path()) {
      made.push_back(path);
    }
    std::filesystem::create_directories(folder, error);
    if (error) fail_to_make(folder, error.value());
    for (const auto& path : made) sync_folder(path.parent_path());
  }

  std::optional<std::vector<std::string>> list(const std::filesystem::path& folder) override {
    std::error_code error;
    std::filesystem::directory_iterator entries(folder, error);
    if (error == std::errc::no_such_file_or_directory) return std::nullopt;
    std::vector<std::string> names;
    for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
      names.push_back(entries->path().filename().string());
    }
    if (error) fail("listing the folder " + folder.string(), error.value(), folder / "");
    return names;
  }

  std::optional<CheckpointFile> lock(const std::filesystem::path& path) override {
    CheckpointFile file = open_file(path, O_RDWR | O_CREAT, "opening ");
    if (::flock(file.descriptor(), LOCK_EX | LOCK_NB) == 0) return file;
    if (errno != EWOULDBLOCK) fail("locking " + path.string(), errno, path);
    return std::nullopt;
  }

  CheckpointFile create(const std::filesystem::path& path) override {
    return open_file(path, O_WRONLY | O_CREAT | O_EXCL, "creating ");
  }

  std::optional<CheckpointFile> open(const std::filesystem::path& path) override {
    // Where it is a pipe, opening it would wait for who writes to it.
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0) {
      if (errno != ENOENT) fail("opening " + path.string(), errno, path);
      return std::nullopt;
    }
    CheckpointFile file(descriptor, path);
    if (!S_ISREG(status_of(file).st_mode)) {
      throw IoError("checkpoint: " + path.string() + " is no regular file",
                    "move it out of the way, or choose another folder");
    }
    return file;
  }

  bool is_in_place(const CheckpointFile& file) override {
    struct stat there = {};
    if (::stat(file.path().c_str(), &there) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return false;
      fail("asking what is at " + file.path().string(), errno, file.path());
    }
    const struct stat held = status_of(file);
    return there.st_dev == held.st_dev && there.st_ino == held.st_ino;
  }

  std::uint64_t size(const CheckpointFile& file) override {
    return static_cast<std::uint64_t>(status_of(file).st_size);
  }

  void resize(const CheckpointFile& file, std::uint64_t bytes) override {
    if (::ftruncate(file.descriptor(), static_cast<off_t>(bytes)) != 0) {
      fail("setting the size of " + file.path().string() + " to " + std::to_string(bytes) + " B", errno, file.path());
    }
  }

  void write(const CheckpointFile& file, std::uint64_t offset, std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t taken = ::pwrite(file.descriptor(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (taken < 0 && errno == EINTR) continue;
      if (taken <= 0) {
        fail("write of " + range(bytes.size(), offset) + " to " + file.path().string(), taken < 0 ? errno : EIO,
             file.path());
      }
      bytes = bytes.subspan(static_cast<std::size_t>(taken));
      offset += static_cast<std::uint64_t>(taken);
    }
  }

  std::size_t read(const CheckpointFile& file, std::uint64_t offset, std::span<std::byte> bytes) override {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t got =
          ::pread(file.descriptor(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("read of " + range(bytes.size(), offset) + " from " + file.path().string(), errno, file.path());
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

  void sync(const CheckpointFile& file) override {
    if (::fsync(file.descriptor()) != 0) fail("sync of " + file.path().string(), errno, file.path());
  }

  void sync_folder(const std::filesystem::path& folder) override {
    const CheckpointFile opened = open_file(folder, O_RDONLY | O_DIRECTORY, "opening ");
    if (::fsync(opened.descriptor()) == 0) return;
    if (errno != EINVAL && errno != ENOTSUP) fail("sync of " + folder.string(), errno, folder / "");
    note_fallback("checkpoint: what is saved in " + folder.string() + " may be lost should the machine fail",
                  "its file system syncs no folders: " + errno_text(errno));
  }

  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) fail("renaming " + from.string() + " to " + to.string(), errno, from);
  }

  void remove(const std::filesystem::path& path) override {
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail("removing " + path.string(), errno, path);
  }
};

CheckpointFiles* replacement = nullptr;

}  // namespace

CheckpointFile::~CheckpointFile() {
  if (file_.descriptor >= 0) ::close(file_.descriptor);
}

std::unique_ptr<CheckpointFiles> make_system_files() { return std::make_unique<SystemFiles>(); }

CheckpointFiles& checkpoint_files() {
  static SystemFiles system;
  return replacement != nullptr ? *replacement : system;
}

void replace_checkpoint_files(CheckpointFiles* files) noexcept { replacement = files; }

}  // namespace terrace

#include "offload/nvme_store.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "offload/checksum.h"
#include "offload/nvme_paths.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kAlignmentBytes = 4096;

std::string hexadecimal(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::uint64_t number(ExtentId extent) { return static_cast<std::uint64_t>(extent); }

std::size_t whole_units(std::size_t bytes) { return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes; }

void check_alignment(const std::byte* block, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(block) % kAlignmentBytes == 0) return;
  throw LogicError("nvme: " + std::string(what) + " with memory that does not start at a multiple of 4096");
}

LogicError no_transfer(const char* what, ExtentId extent, const std::string& where) {
  return LogicError("nvme: end of a " + std::string(what) + " of extent " + std::to_string(number(extent)) + " (" +
                    where + "), of which none is under way");
}

}  // namespace

NvmeStore::NvmeStore(std::vector<fs::path> paths, std::uint64_t capacity_bytes, std::size_t extent_bytes)
    : paths_(std::move(paths)), capacity_bytes_(capacity_bytes), extent_bytes_(extent_bytes) {
  if (paths_.empty()) throw LogicError("nvme: a store needs at least one path");
  if (extent_bytes == 0 || extent_bytes % kAlignmentBytes != 0) {
    throw LogicError("nvme: an extent of " + std::to_string(extent_bytes) + " B is not a multiple of 4096 B");
  }
  const std::uint64_t extents_per_file = extents_a_path(paths_.size(), capacity_bytes, extent_bytes);

  Patience patience;
  for (const fs::path& path : paths_) {
    make_nvme_folder(path);
    for (fs::path& removed : remove_dead_extent_files(path, patience)) removed_files_.push_back(std::move(removed));
  }
  // The files come before the free space, because a file system that cannot be written may report none.
  for (const fs::path& path : paths_) files_.emplace_back(path, extent_bytes, extents_per_file);
  require_nvme_room(paths_, capacity_bytes_, extent_bytes_, Leftovers::removed);

  extents_.resize(extents_per_file * paths_.size());
  space_ = ExtentSpace(extents_.size(), paths_.size());
}

NvmeStore::~NvmeStore() {
  if (!keeps_files_open_) return;
  for (ExtentFile& file : files_) file.remove();
  static std::mutex mutex;
  static auto* const kept = new std::deque<std::deque<ExtentFile>>;  // reachable, and never destroyed
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(files_));
}

std::uint64_t NvmeStore::offset_of(ExtentId extent) const {
  return file_of(extent).offset_of(number(extent) / files_.size());
}

std::string NvmeStore::describe(ExtentId extent) const {
  return file_of(extent).file().path.string() + ", offset " + std::to_string(offset_of(extent));
}

std::string NvmeStore::describe(std::span<const ExtentId> run) const {
  const std::string first = std::to_string(number(run.front())) + " (" + describe(run.front()) + ")";
  return run.size() == 1 ? "extent " + first : std::to_string(run.size()) + " extents from " + first + " on";
}

std::vector<fs::path> NvmeStore::files() const {
  std::vector<fs::path> result;
  for (const ExtentFile& file : files_) result.push_back(file.file().path);
  return result;
}

std::vector<const IoFile*> NvmeStore::io_files() const {
  std::vector<const IoFile*> result;
  for (const ExtentFile& file : files_) result.push_back(&file.file());
  return result;
}

bool NvmeStore::direct() const noexcept {
  return std::all_of(files_.begin(), files_.end(), [](const ExtentFile& file) { return file.direct(); });
}

std::uint64_t NvmeStore::free_extents() const {
  std::lock_guard lock(mutex_);
  return space_.free_extents();
}

std::uint64_t NvmeStore::retired_extents() const {
  std::lock_guard lock(mutex_);
  return retired_extents_;
}

std::uint64_t NvmeStore::used_bytes() const {
  std::lock_guard lock(mutex_);
  return (extents_.size() - space_.free_extents() - retired_extents_) * extent_bytes_;
}

// ---- Reserving and releasing

std::vector<ExtentId> NvmeStore::reserve(std::size_t count) {
  std::vector<ExtentId> extents;
  {
    const Lock lock(mutex_);
    extents = take(lock, count);
  }
  try {
    give_space_to(extents);
  } catch (...) {
    const Lock lock(mutex_);
    for (ExtentId extent : extents) give_back(lock, extent);
    throw;
  }
  return extents;
}

std::vector<ExtentId> NvmeStore::take(const Lock&, std::size_t count) {
  const std::uint64_t free = space_.free_extents();
  if (count > free) {
    throw OutOfMemory("nvme: " + std::to_string(count) + " extents of " + format_bytes(extent_bytes_) +
                          " do not fit: of " + std::to_string(extents_.size()) + ", " +
                          std::to_string(extents_.size() - free - retired_extents_) + " are in use and " +
                          std::to_string(retired_extents_) + " are bad",
                      "raise nvme.memory (now " + format_bytes(capacity_bytes_) + ")");
  }
  std::vector<ExtentId> extents = space_.take(count);
  for (const ExtentId extent : extents) extents_[number(extent)].state = State::held;
  return extents;
}

void NvmeStore::give_back(const Lock&, ExtentId extent) {
  extents_[number(extent)].state = State::free;
  space_.give_back(extent);
}

/// Visits runs of neighbours in a file, each with the place of its first in the file.
template <class Visit>
void NvmeStore::for_each_run(std::vector<ExtentId>& extents, Visit&& visit) {
  const std::uint64_t stride = files_.size();
  std::sort(extents.begin(), extents.end(), [&](ExtentId a, ExtentId b) {
    return std::pair(number(a) % stride, number(a)) < std::pair(number(b) % stride, number(b));
  });
  for (std::size_t first = 0; first < extents.size();) {
    std::size_t end = first + 1;
    while (end < extents.size() && number(extents[end]) == number(extents[end - 1]) + stride) ++end;
    visit(std::span(extents).subspan(first, end - first), number(extents[first]) / stride);
    first = end;
  }
}

void NvmeStore::give_space_to(std::span<const ExtentId> extents) {
  std::vector<ExtentId> without;
  {
    const Lock lock(mutex_);
    std::copy_if(extents.begin(), extents.end(), std::back_inserter(without),
                 [&](ExtentId extent) { return !extents_[number(extent)].has_space; });
  }
  for_each_run(without, [&](std::span<const ExtentId> run, std::uint64_t first_in_file) {
    file_of(run.front()).reserve_space(first_in_file, run.size());
    const Lock lock(mutex_);
    for (const ExtentId extent : run) extents_[number(extent)].has_space = true;
  });
}

void NvmeStore::clear_records(std::vector<ExtentId> extents) noexcept {
  for_each_run(extents, [&](std::span<const ExtentId> run, std::uint64_t first_in_file) {
    try {
      try {
        file_of(run.front()).clear_records(first_in_file, run.size());
      } catch (const Error& error) {
        log(LogLevel::warning, "nvme: clearing the record of " + describe(run) + " failed: " + error.message());
      }
    } catch (const std::bad_alloc&) {  // it matters only to who looks at the store once it is dead
    }
  });
}

void NvmeStore::release(std::span<const ExtentId> extents) {
  std::vector<ExtentId> ordered(extents.begin(), extents.end());
  std::sort(ordered.begin(), ordered.end());
  if (std::adjacent_find(ordered.begin(), ordered.end()) != ordered.end()) {
    throw LogicError("nvme: release of the same extent twice");
  }
  std::vector<ExtentId> recorded;
  recorded.reserve(ordered.size());  // for which there may be no memory, before anything changes
  {
    const Lock lock(mutex_);
    for (ExtentId extent : ordered) idle(lock, extent, "release");
    for (ExtentId extent : ordered) {
      if (std::exchange(extents_[number(extent)].has_record, false)) recorded.push_back(extent);
      extents_[number(extent)].state = State::leaving;
    }
  }
  // Before others can have them: what they write is not to be cleared.
  clear_records(std::move(recorded));
  const Lock lock(mutex_);
  for (ExtentId extent : ordered) give_back(lock, extent);
}

void NvmeStore::retire(ExtentId extent) {
  std::vector<ExtentId> recorded;
  recorded.reserve(1);
  {
    const Lock lock(mutex_);
    Extent& entry = idle(lock, extent, "retirement");
    entry.state = State::retired;
    if (std::exchange(entry.has_record, false)) recorded.push_back(extent);
    ++retired_extents_;
    space_.set_failing(extent, true);
  }
  clear_records(std::move(recorded));
}

NvmeStore::Extent& NvmeStore::known(const Lock&, ExtentId extent, const char* what) {
  const std::uint64_t id = number(extent);
  if (id >= extents_.size()) {
    throw LogicError("nvme: " + std::string(what) + " of extent " + std::to_string(id) + ", of which there are " +
                     std::to_string(extents_.size()));
  }
  return extents_[id];
}

NvmeStore::Extent& NvmeStore::held(const Lock& lock, ExtentId extent, const char* what) {
  Extent& entry = known(lock, extent, what);
  const std::uint64_t id = number(extent);
  if (entry.state == State::free || entry.state == State::retired || entry.state == State::leaving) {
    throw LogicError("nvme: " + std::string(what) + " of extent " + std::to_string(id) + " (" + describe(extent) +
                     "), which is " + (entry.state == State::retired ? "retired" : "not reserved"));
  }
  if (entry.writing) {
    throw LogicError("nvme: " + std::string(what) + " of extent " + std::to_string(id) + " (" + describe(extent) +
                     ") while it is being written");
  }
  return entry;
}

NvmeStore::Extent& NvmeStore::idle(const Lock& lock, ExtentId extent, const char* what) {
  Extent& entry = held(lock, extent, what);
  if (entry.readers > 0) {
    throw LogicError("nvme: " + std::string(what) + " of extent " + std::to_string(number(extent)) + " (" +
                     describe(extent) + ") while it is being read");
  }
  return entry;
}

// ---- Reading and writing

IoOperation NvmeStore::operation(IoOperation::Direction direction, const Beginning& transfer) const {
  return {direction, &file_of(transfer.extent).file(), offset_of(transfer.extent), transfer.block,
          whole_units(transfer.bytes)};
}

void NvmeStore::begin_writes(std::span<Beginning> writes) noexcept {
  {
    const Lock lock(mutex_);
    for (Beginning& write : writes) {
      write.error = nullptr;
      try {
        if (write.bytes == 0 || write.bytes > extent_bytes_) {
          throw LogicError("nvme: write of " + std::to_string(write.bytes) + " B to an extent of " +
                           std::to_string(extent_bytes_) + " B");
        }
        check_alignment(write.block, "write");
        Extent& entry = idle(lock, write.extent, "write");
        write.operation = operation(IoOperation::Direction::write, write);
        entry.writing = true;
        entry.state = State::held;
        entry.length = write.bytes;
        entry.sequence = next_sequence_++;
      } catch (...) {
        write.error = std::current_exception();
      }
    }
  }
  for (const Beginning& write : writes) {
    if (write.error) continue;
    std::memset(write.block + write.bytes, 0, whole_units(write.bytes) - write.bytes);
    extents_[number(write.extent)].checksum = checksum_of({write.block, write.bytes});
  }
}

IoOperation NvmeStore::begin_write(ExtentId extent, std::byte* block, std::size_t bytes) {
  Beginning write{extent, block, bytes};
  begin_writes({&write, 1});
  if (write.error) std::rethrow_exception(write.error);
  return write.operation;
}

void NvmeStore::end_writes(std::span<EndOfWrite> ends) noexcept {
  {
    const Lock lock(mutex_);
    for (EndOfWrite& end : ends) {
      try {
        Extent& entry = known(lock, end.extent, "end of write");
        if (!entry.writing) throw no_transfer("write", end.extent, describe(end.extent));
        end.is_under_way = true;
        entry.has_record = entry.has_record || !end.error;  // or a part of one
      } catch (...) {
        end.error = std::current_exception();
      }
    }
  }
  // While they count as being written nobody else touches their records.
  record(ends);
  const Lock lock(mutex_);
  for (EndOfWrite& end : ends) {
    if (!end.is_under_way) continue;
    Extent& entry = extents_[number(end.extent)];
    try {
      if (!entry.writing) throw no_transfer("write", end.extent, describe(end.extent));  // it is there twice
    } catch (...) {
      end.error = std::current_exception();
      continue;
    }
    entry.writing = false;
    if (end.error) continue;
    entry.state = State::written;
    space_.set_failing(end.extent, false);
  }
}

/// Of what was written; what that fails with is its error.
void NvmeStore::record(std::span<EndOfWrite> ends) noexcept {
  const auto is_written = [](const EndOfWrite& end) { return end.is_under_way && !end.error; };
  try {
    std::vector<ExtentId> written;
    for (const EndOfWrite& end : ends) {
      if (is_written(end)) written.push_back(end.extent);
    }
    for_each_run(written, [&](std::span<const ExtentId> run, std::uint64_t first_in_file) {
      std::exception_ptr error = record(run, first_in_file);
      if (!error) return;
      for (std::size_t i = 0; i < run.size(); ++i) {
        // Each by itself, so that those fail that cannot be recorded, and not their neighbours.
        if (run.size() > 1) error = record(run.subspan(i, 1), first_in_file + i);
        const auto is_it = [&](const EndOfWrite& end) { return end.extent == run[i]; };
        if (error) std::ranges::find_if(ends, is_it)->error = error;
      }
    });
  } catch (...) {
    for (EndOfWrite& end : ends) {
      if (is_written(end)) end.error = std::current_exception();
    }
  }
}

/// What recording a run of neighbours fails with, if it does.
std::exception_ptr NvmeStore::record(std::span<const ExtentId> run, std::uint64_t first_in_file) {
  try {
    std::vector<ExtentRecord> records = records_of(run);
    file_of(run.front()).record(first_in_file, records);
  } catch (const IoError& error) {
    return std::make_exception_ptr(
        IoError("nvme: writing the record of " + describe(run) + " failed: " + error.message(), error.hint()));
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

std::vector<ExtentRecord> NvmeStore::records_of(std::span<const ExtentId> extents) const {
  std::vector<ExtentRecord> records;
  const Lock lock(mutex_);
  for (const ExtentId extent : extents) {
    const Extent& entry = extents_[number(extent)];
    records.push_back({.sequence = entry.sequence,
                       .bytes = entry.length,
                       .content_checksum = entry.checksum,
                       .unused = {},
                       .own_checksum = 0});
  }
  return records;
}

void NvmeStore::end_write(ExtentId extent, bool written) {
  const std::exception_ptr known = written ? nullptr : std::make_exception_ptr(IoError("nvme: not written"));
  EndOfWrite end{.extent = extent, .error = known};
  end_writes({&end, 1});
  if (end.error != known) std::rethrow_exception(end.error);
}

void NvmeStore::begin_reads(std::span<Beginning> reads) noexcept {
  const Lock lock(mutex_);
  for (Beginning& read : reads) {
    read.error = nullptr;
    try {
      check_alignment(read.block, "read");
      Extent& entry = held(lock, read.extent, "read");
      if (entry.state != State::written || entry.length != read.bytes) {
        throw LogicError("nvme: read of " + std::to_string(read.bytes) + " B from extent " +
                         std::to_string(number(read.extent)) + " (" + describe(read.extent) + "), which holds " +
                         (entry.state == State::written ? std::to_string(entry.length) + " B" : "nothing"));
      }
      read.operation = operation(IoOperation::Direction::read, read);
      ++entry.readers;
    } catch (...) {
      read.error = std::current_exception();
    }
  }
}

IoOperation NvmeStore::begin_read(ExtentId extent, std::byte* block, std::size_t bytes) {
  Beginning read{extent, block, bytes};
  begin_reads({&read, 1});
  if (read.error) std::rethrow_exception(read.error);
  return read.operation;
}

void NvmeStore::end_reads(std::span<EndOfRead> ends) noexcept {
  {
    const Lock lock(mutex_);
    for (EndOfRead& end : ends) {
      try {
        if (known(lock, end.extent, "end of read").readers == 0) {
          throw no_transfer("read", end.extent, describe(end.extent));
        }
        end.is_under_way = true;
      } catch (...) {
        end.error = std::current_exception();
      }
    }
  }
  // Until the count goes down nobody can write to an extent, so what was read is compared with what was expected.
  for (EndOfRead& end : ends) {
    if (!end.is_under_way || end.error) continue;
    const Extent& entry = extents_[number(end.extent)];
    try {
      const std::uint64_t found = checksum_of({end.block, entry.length});
      if (found != entry.checksum) throw not_what_was_written(end.extent, found);
    } catch (...) {
      end.error = std::current_exception();
    }
  }
  const Lock lock(mutex_);
  for (EndOfRead& end : ends) {
    if (!end.is_under_way) continue;
    std::uint32_t& readers = extents_[number(end.extent)].readers;
    try {
      if (readers == 0) throw no_transfer("read", end.extent, describe(end.extent));  // it is there too often
      --readers;
    } catch (...) {
      end.error = std::current_exception();
    }
  }
}

void NvmeStore::end_read(ExtentId extent, const std::byte* block, const std::exception_ptr& error) {
  EndOfRead end{.extent = extent, .block = block, .error = error};
  end_reads({&end, 1});
  if (end.error) std::rethrow_exception(end.error);
}

CorruptData NvmeStore::not_what_was_written(ExtentId extent, std::uint64_t found) const {
  const Extent& entry = extents_[number(extent)];
  return CorruptData("nvme: " + std::to_string(entry.length) + " B at offset " + std::to_string(offset_of(extent)) +
                         " of " + file_of(extent).file().path.string() + " are not what was written: checksum " +
                         hexadecimal(found) + " found, " + hexadecimal(entry.checksum) + " expected",
                     "the drive or another program changed them; restart from a checkpoint, on another drive if it "
                     "happens again");
}

}  // namespace terrace

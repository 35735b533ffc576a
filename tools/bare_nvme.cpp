#include "tools/bare_nvme.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <future>
#include <liburing.h>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "offload/checksum.h"
#include "tools/random_bytes.h"

namespace terrace {
namespace {

[[noreturn]] void fail(const std::filesystem::path& folder, const std::string& what, int error_number) {
  throw IoError("bench: " + what + " in " + folder.string() +
                    " failed: " + std::error_code(error_number, std::generic_category()).message(),
                "give it a folder of a file system with O_DIRECT and enough free space");
}

/// Random bytes in huge pages, as the service's are: for the drive a block is of few pieces then.
std::span<std::byte> map_memory(const std::filesystem::path& folder, std::size_t bytes) {
  constexpr std::size_t page = std::size_t{2} << 20U;
  const std::size_t whole_pages = (bytes + page - 1) / page * page;
  void* const mapped = mmap(nullptr, whole_pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) fail(folder, "mapping buffers", errno);
  madvise(mapped, whole_pages, MADV_HUGEPAGE);
  const std::span memory(static_cast<std::byte*>(mapped), whole_pages);
  fill_with_random_bytes(memory);
  return memory;
}

}  // namespace

struct BareNvme::Ring {
  Ring(std::filesystem::path of_file, std::uint64_t from, std::uint64_t read_bytes, std::uint64_t written_bytes,
       const Options& of, int flags)
      : folder(std::move(of_file)),
        base(from),
        block_bytes(of.block_bytes),
        depth(of.depth),
        own_memory(of.own_memory || of.in_place),
        checksums(of.checksums),
        in_place(of.in_place),
        reads(whole_blocks(read_bytes)),
        writes(whole_blocks(written_bytes)) {
    memory = map_memory(folder, (own_memory ? reads + writes : 2 * depth) * block_bytes);
    file = open(folder.c_str(), flags | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    const int result = file < 0 ? -errno : io_uring_queue_init(2 * depth, &ring, 0);
    if (result < 0) {
      release();
      fail(folder, file < 0 ? "opening a file with O_DIRECT" : "opening an io_uring", -result);
    }
    has_ring = true;
    const iovec whole{memory.data(), memory.size()};
    registered = io_uring_register_buffers(&ring, &whole, 1) == 0;  // without: as fast as the drive allows all the same
    knows_file = io_uring_register_files(&ring, &file, 1) == 0;
  }
  ~Ring() { release(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void release() {
    if (has_ring) io_uring_queue_exit(&ring);
    if (file >= 0) close(file);
    munmap(memory.data(), memory.size());
  }

  std::byte* buffer(unsigned slot, std::uint64_t block) const {
    return memory.data() + (own_memory ? block : slot) * block_bytes;
  }
  std::uint64_t whole_blocks(std::uint64_t bytes) const { return (bytes + block_bytes - 1) / block_bytes; }
  std::uint64_t offset_of(std::uint64_t block) const {
    return base + (in_place && block >= reads ? block - reads : block) * block_bytes;
  }
  void take_checksum(const std::byte* of) {
    if (checksums) all_checksums ^= checksum_of({of, block_bytes});
  }

  void submit(unsigned slot, std::uint64_t block) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring);
    const bool is_read = slot < depth;
    const int descriptor = knows_file ? 0 : file;
    const auto length = static_cast<unsigned>(block_bytes);
    const std::uint64_t offset = offset_of(block);
    std::byte* const at = buffer(slot, block);
    if (!is_read) take_checksum(at);
    if (is_read && registered) {
      io_uring_prep_read_fixed(entry, descriptor, at, length, offset, 0);
    } else if (is_read) {
      io_uring_prep_read(entry, descriptor, at, length, offset);
    } else if (registered) {
      io_uring_prep_write_fixed(entry, descriptor, at, length, offset, 0);
    } else {
      io_uring_prep_write(entry, descriptor, at, length, offset);
    }
    if (knows_file) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, block << 32U | slot);
  }

  void load() const {
    for (std::uint64_t block = reads; block < reads + writes; ++block) {
      const ssize_t moved = pread(file, buffer(0, block), block_bytes, static_cast<off_t>(offset_of(block)));
      if (moved != static_cast<ssize_t>(block_bytes)) fail(folder, "reading a block", moved < 0 ? errno : EIO);
    }
  }

  /// Blocks [0, reads) are read and [first_written, first_written + writes) written.
  void run(std::uint64_t to_read, std::uint64_t first_written, std::uint64_t to_write) {
    const std::uint64_t totals[2]{to_read, to_write};
    std::uint64_t started[2]{};
    std::uint64_t in_flight = 0;
    const auto start = [&](unsigned slot) {
      const unsigned way = slot < depth ? 0 : 1;
      if (started[way] == totals[way]) return;
      submit(slot, started[way]++ + (way == 1 ? first_written : 0));
      ++in_flight;
    };
    for (unsigned slot = 0; slot < 2 * depth; ++slot) start(slot);
    while (in_flight > 0) {
      const int submitted = io_uring_submit_and_wait(&ring, 1);
      if (submitted < 0 && submitted != -EINTR) fail(folder, "submitting I/O", -submitted);
      io_uring_cqe* completion = nullptr;
      while (io_uring_peek_cqe(&ring, &completion) == 0) {
        const std::uint64_t about = io_uring_cqe_get_data64(completion);
        const auto slot = static_cast<unsigned>(about);
        const int moved = completion->res;
        io_uring_cqe_seen(&ring, completion);
        --in_flight;
        if (moved != static_cast<int>(block_bytes)) fail(folder, "moving a block", moved < 0 ? -moved : EIO);
        moved_blocks.fetch_add(1, std::memory_order_relaxed);
        const bool was_read = slot < depth;
        if (was_read) take_checksum(buffer(slot, about >> 32U));
        start(slot);
      }
    }
  }

  const std::filesystem::path folder;  // or file
  const std::uint64_t base;
  const std::size_t block_bytes;
  const unsigned depth;
  const bool own_memory;
  const bool checksums;
  const bool in_place;
  const std::uint64_t reads;   // blocks of the first region
  const std::uint64_t writes;  // and of the second
  std::uint64_t all_checksums = 0;
  std::atomic<std::uint64_t> moved_blocks{0};
  std::span<std::byte> memory;
  int file = -1;
  io_uring ring{};
  bool has_ring = false;
  bool registered = false;
  bool knows_file = false;
};

BareNvme::BareNvme(const std::filesystem::path& folder, std::uint64_t most_bytes, const Options& options)
    : ring_(std::make_unique<Ring>(folder, 0, most_bytes, most_bytes, options, O_TMPFILE)) {
  const std::uint64_t blocks = ring_->reads + ring_->writes;
  const auto bytes = static_cast<off_t>(blocks * ring_->block_bytes);
  if (const int error = posix_fallocate(ring_->file, 0, bytes); error != 0) fail(folder, "setting space aside", error);
  ring_->run(0, 0, blocks);
}

BareNvme::BareNvme(const Part& part, std::uint64_t read_bytes, std::uint64_t written_bytes, const Options& options)
    : ring_(std::make_unique<Ring>(part.file, part.offset, read_bytes, written_bytes, options, 0)) {}

BareNvme::~BareNvme() = default;

void BareNvme::load() { ring_->load(); }

double BareNvme::seconds(std::uint64_t read_bytes, std::uint64_t written_bytes) {
  const std::uint64_t reads = std::min(ring_->whole_blocks(read_bytes), ring_->reads);
  const std::uint64_t writes = std::min(ring_->whole_blocks(written_bytes), ring_->writes);
  const Stopwatch watch;
  ring_->run(reads, ring_->reads, writes);
  return watch.elapsed_seconds();
}

std::uint64_t BareNvme::most_blocks() const noexcept { return ring_->reads + ring_->writes; }

std::uint64_t BareNvme::blocks_moved() const noexcept { return ring_->moved_blocks.load(std::memory_order_relaxed); }

bool BareNvme::wait_until_moved(std::uint64_t blocks, const std::stop_token& stop) const {
  constexpr std::int64_t rest_ns = 200'000;  // a drive of 5 GB/s moves 1 MB meanwhile
  for (;;) {
    const bool is_over = stop.stop_requested();  // before what it has moved is looked at
    if (blocks_moved() >= blocks) return true;
    if (is_over) return false;
    sleep_until(monotonic_ns() + rest_ns);
  }
}

BareNvmeEachWay::BareNvmeEachWay(const BareNvme::Part& part, std::uint64_t read_bytes, std::uint64_t written_bytes,
                                 const BareNvme::Options& options) {
  const std::uint64_t blocks_read = (read_bytes + options.block_bytes - 1) / options.block_bytes;
  BareNvme::Part written = part;
  written.offset += blocks_read * options.block_bytes;
  if (read_bytes > 0) {
    ways_.push_back({read_bytes, 0, std::make_unique<BareNvme>(part, read_bytes, 0, options)});
  }
  if (written_bytes > 0) {
    ways_.push_back({0, written_bytes, std::make_unique<BareNvme>(written, 0, written_bytes, options)});
  }
}

double BareNvmeEachWay::seconds() {
  const Stopwatch watch;
  std::vector<std::future<double>> running;
  for (const Way& way : ways_) {
    running.push_back(
        std::async(std::launch::async, [&way] { return way.loop->seconds(way.read_bytes, way.written_bytes); }));
  }
  for (std::future<double>& each : running) {
    each.get();
  }
  return watch.elapsed_seconds();
}

BareNvmeBesideChecksums::BareNvmeBesideChecksums(const BareNvme::Part& part, std::uint64_t read_bytes,
                                                 std::uint64_t written_bytes, const BareNvme::Options& options)
    : read_bytes_(read_bytes),
      written_bytes_(written_bytes),
      block_bytes_(options.block_bytes),
      loop_(part, read_bytes, written_bytes, options),
      memory_(map_memory(part.file, loop_.most_blocks() * options.block_bytes)) {}

BareNvmeBesideChecksums::~BareNvmeBesideChecksums() { munmap(memory_.data(), memory_.size()); }

double BareNvmeBesideChecksums::seconds() {
  const std::jthread beside(
      [this, moved_before = loop_.blocks_moved()](const std::stop_token& stop) { take_checksums(stop, moved_before); });
  return loop_.seconds(read_bytes_, written_bytes_);
}

std::uint64_t BareNvmeBesideChecksums::blocks() const noexcept {
  const auto whole = [&](std::uint64_t bytes) { return (bytes + block_bytes_ - 1) / block_bytes_; };
  return whole(read_bytes_) + whole(written_bytes_);
}

void BareNvmeBesideChecksums::take_checksums(const std::stop_token& stop, std::uint64_t moved_before) {
  for (std::uint64_t block = 0; block < loop_.most_blocks(); ++block) {
    if (!loop_.wait_until_moved(moved_before + block + 1, stop)) return;
    all_checksums_ ^= checksum_of(memory_.subspan(block * block_bytes_, block_bytes_));
  }
}

}  // namespace terrace

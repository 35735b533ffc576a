#include "tools/bare_nvme.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <liburing.h>
#include <random>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>
#include <vector>
#include <xxhash.h>

#include "base/clock.h"
#include "base/error.h"

namespace terrace {
namespace {

[[noreturn]] void fail(const std::filesystem::path& folder, const std::string& what, int error_number) {
  throw IoError("bench: " + what + " in " + folder.string() +
                    " failed: " + std::error_code(error_number, std::generic_category()).message(),
                "give --nvme a folder of a file system with O_DIRECT and enough free space");
}

}  // namespace

struct BareNvme::Ring {
  Ring(std::filesystem::path in, const Options& of)
      : folder(std::move(in)), block_bytes(of.block_bytes), depth(of.depth), checksums(of.checksums) {
    const std::size_t bytes = buffer_bytes();
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) fail(folder, "mapping buffers", errno);
    memory = static_cast<std::byte*>(mapped);
    std::mt19937_64 generator(7);
    for (std::size_t i = 0; i < bytes; i += sizeof(std::uint64_t)) {
      *reinterpret_cast<std::uint64_t*>(memory + i) = generator();
    }
    file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
    const int result = file < 0 ? -errno : io_uring_queue_init(2 * depth, &ring, 0);
    if (result < 0) {
      release();
      fail(folder, file < 0 ? "opening a file with O_DIRECT" : "opening an io_uring", -result);
    }
    has_ring = true;
    const iovec whole{memory, bytes};
    registered = io_uring_register_buffers(&ring, &whole, 1) == 0;  // without: as fast as the drive allows all the same
    knows_file = io_uring_register_files(&ring, &file, 1) == 0;
  }
  ~Ring() { release(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void release() {
    if (has_ring) io_uring_queue_exit(&ring);
    if (file >= 0) close(file);
    munmap(memory, buffer_bytes());
  }

  std::size_t buffer_bytes() const { return std::size_t{2} * depth * block_bytes; }
  std::byte* buffer(unsigned slot) const { return memory + slot * block_bytes; }
  std::uint64_t whole_blocks(std::uint64_t bytes) const { return (bytes + block_bytes - 1) / block_bytes; }
  void take_checksum(unsigned slot) {
    if (checksums) all_checksums ^= XXH3_64bits(buffer(slot), block_bytes);
  }

  void submit(unsigned slot, std::uint64_t offset) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring);
    const bool reads = slot < depth;
    const int descriptor = knows_file ? 0 : file;
    const auto length = static_cast<unsigned>(block_bytes);
    if (!reads) take_checksum(slot);
    if (reads && registered) {
      io_uring_prep_read_fixed(entry, descriptor, buffer(slot), length, offset, 0);
    } else if (reads) {
      io_uring_prep_read(entry, descriptor, buffer(slot), length, offset);
    } else if (registered) {
      io_uring_prep_write_fixed(entry, descriptor, buffer(slot), length, offset, 0);
    } else {
      io_uring_prep_write(entry, descriptor, buffer(slot), length, offset);
    }
    if (knows_file) entry->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(entry, slot);
  }

  /// Blocks [0, reads) are read and [first_written, first_written + writes) written.
  void run(std::uint64_t reads, std::uint64_t first_written, std::uint64_t writes) {
    const std::uint64_t totals[2]{reads, writes};
    std::uint64_t started[2]{};
    std::uint64_t in_flight = 0;
    const auto start = [&](unsigned slot) {
      const unsigned way = slot < depth ? 0 : 1;
      if (started[way] == totals[way]) return;
      submit(slot, (started[way]++ + (way == 1 ? first_written : 0)) * block_bytes);
      ++in_flight;
    };
    for (unsigned slot = 0; slot < 2 * depth; ++slot) start(slot);
    while (in_flight > 0) {
      const int submitted = io_uring_submit_and_wait(&ring, 1);
      if (submitted < 0 && submitted != -EINTR) fail(folder, "submitting I/O", -submitted);
      io_uring_cqe* completion = nullptr;
      while (io_uring_peek_cqe(&ring, &completion) == 0) {
        const auto slot = static_cast<unsigned>(io_uring_cqe_get_data64(completion));
        const int moved = completion->res;
        io_uring_cqe_seen(&ring, completion);
        --in_flight;
        if (moved != static_cast<int>(block_bytes)) fail(folder, "moving a block", moved < 0 ? -moved : EIO);
        const bool was_read = slot < depth;
        if (was_read) take_checksum(slot);
        start(slot);
      }
    }
  }

  const std::filesystem::path folder;
  const std::size_t block_bytes;
  const unsigned depth;
  const bool checksums;
  std::uint64_t all_checksums = 0;
  std::byte* memory = nullptr;
  int file = -1;
  io_uring ring{};
  bool has_ring = false;
  bool registered = false;
  bool knows_file = false;
  std::uint64_t blocks = 0;  // of one region
};

BareNvme::BareNvme(const std::filesystem::path& folder, std::uint64_t most_bytes, const Options& options)
    : ring_(std::make_unique<Ring>(folder, options)) {
  ring_->blocks = ring_->whole_blocks(most_bytes);
  const auto bytes = static_cast<off_t>(2 * ring_->blocks * ring_->block_bytes);
  if (const int error = posix_fallocate(ring_->file, 0, bytes); error != 0) fail(folder, "setting space aside", error);
  ring_->run(0, 0, 2 * ring_->blocks);
}

BareNvme::~BareNvme() = default;

double BareNvme::seconds(std::uint64_t read_bytes, std::uint64_t written_bytes) {
  const std::uint64_t reads = std::min(ring_->whole_blocks(read_bytes), ring_->blocks);
  const std::uint64_t writes = std::min(ring_->whole_blocks(written_bytes), ring_->blocks);
  const Stopwatch watch;
  ring_->run(reads, ring_->blocks, writes);
  return watch.elapsed_seconds();
}

}  // namespace terrace

#include "tools/nvme_sides.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <span>
#include <unistd.h>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "offload/choose_engine.h"
#include "offload/emulated_device.h"
#include "offload/errno_text.h"
#include "offload/transfer_service.h"
#include "tools/random_bytes.h"

namespace terrace {
namespace {

using Direction = IoOperation::Direction;

constexpr std::size_t kBlocksInTransfer = 8;

std::size_t blocks_of(std::uint64_t bytes, const NvmeLoad& load) {
  return static_cast<std::size_t>((bytes + load.block_bytes - 1) / load.block_bytes);
}

/// How full a queue is while more waits: from its first operation to its last. Of all queues of an engine.
class MeasuredEngine final : public IoEngine {
 public:
  explicit MeasuredEngine(std::unique_ptr<IoEngine> engine) : engine_(std::move(engine)) {}

  std::string_view name() const noexcept override { return engine_->name(); }
  std::unique_ptr<IoQueue> open_queue(std::size_t depth, std::span<const std::span<std::byte>> registered,
                                      std::span<const IoFile* const> files) override {
    return std::make_unique<Queue>(engine_->open_queue(depth, registered, files), *this);
  }

  void begin(bool looks) {
    looks_ = looks;
    ++sample_;
  }
  double share() const {
    return static_cast<double>(full_ns_) / static_cast<double>(std::max<std::int64_t>(1, all_ns_));
  }

 private:
  /// In parts of its depth times nanoseconds. What is counted at an operation is the time since the one before.
  class Queue final : public IoQueue {
   public:
    Queue(std::unique_ptr<IoQueue> queue, MeasuredEngine& engine) : queue_(std::move(queue)), engine_(engine) {}

    std::size_t depth() const noexcept override { return queue_->depth(); }
    std::size_t in_flight() const noexcept override { return queue_->in_flight(); }
    void register_memory(std::span<const std::span<std::byte>> regions) override { queue_->register_memory(regions); }
    void submit(const IoOperation& operation) override {
      if (!engine_.looks_) return queue_->submit(operation);
      note(queue_->in_flight());
      if (sample_ == engine_.sample_) {
        engine_.full_ns_ += weighted_ns_ / static_cast<std::int64_t>(queue_->depth());
        engine_.all_ns_ += passed_ns_;
      }
      sample_ = engine_.sample_;
      weighted_ns_ = passed_ns_ = 0;
      queue_->submit(operation);
    }
    void wait(std::vector<IoCompletion>& done) override {
      const std::size_t before = queue_->in_flight();
      queue_->wait(done);
      note(before);
    }
    void poll(std::vector<IoCompletion>& done) override {
      const std::size_t before = queue_->in_flight();
      queue_->poll(done);
      note(before);
    }
    void wake() noexcept override { queue_->wake(); }

   private:
    void note(std::size_t in_flight) {
      if (!engine_.looks_) return;
      const std::int64_t now_ns = monotonic_ns();
      const std::int64_t passed_ns = now_ns - std::exchange(last_ns_, now_ns);
      weighted_ns_ += passed_ns * static_cast<std::int64_t>(in_flight);
      passed_ns_ += passed_ns;
    }

    const std::unique_ptr<IoQueue> queue_;
    MeasuredEngine& engine_;
    int sample_ = 0;
    std::int64_t last_ns_ = monotonic_ns();
    std::int64_t weighted_ns_ = 0;
    std::int64_t passed_ns_ = 0;
  };

  const std::unique_ptr<IoEngine> engine_;
  std::atomic<bool> looks_{false};
  std::atomic<int> sample_{0};
  std::atomic<std::int64_t> full_ns_{0};
  std::atomic<std::int64_t> all_ns_{0};
};

}  // namespace

// ---- The service

struct ServiceSide::Parts {
  Parts(const std::filesystem::path& folder, const NvmeLoad& of)
      : load(of),
        reads(blocks_of(of.read_bytes, of)),
        writes(blocks_of(of.written_bytes, of)),
        arena(of.block_bytes, reads + writes + TransferService::staging_blocks),
        store({folder}, extent_file_bytes(of.block_bytes, reads + writes), of.block_bytes),
        engine(make_io_engine("auto")) {
    // The service takes its staging blocks first, as in a session: what comes after them lies in huge pages.
    service.emplace(device, arena, &store, &engine, TransferService::Options{.nvme_depth = of.depth});
    host = arena.allocate(reads + writes);
    fill_with_random_bytes(arena.region());
    extents = store.reserve(reads + writes);
    service->hold_arena(arena.capacity_bytes());
    move(Tier::host, Tier::nvme, 0, reads + writes);
    wait();
  }

  /// Starts transfers of so many blocks from the `first` on.
  void move(Tier from, Tier to, std::size_t first, std::size_t count) {
    for (std::size_t at = first; at < first + count; at += kBlocksInTransfer) {
      const std::size_t blocks = std::min(kBlocksInTransfer, first + count - at);
      TransferRequest request;
      request.from = from;
      request.to = to;
      request.bytes = blocks * load.block_bytes;
      request.priority = from == Tier::nvme ? TransferPriority::prefetch : TransferPriority::write_back;
      request.prepare = [this, at, blocks] {
        const auto part = [&](const auto& all) { return std::vector(all.begin() + at, all.begin() + at + blocks); };
        return TransferPlaces{.device = nullptr, .host = part(host), .nvme = part(extents)};
      };
      request.done = [this](std::exception_ptr failed) {
        const std::lock_guard lock(mutex);
        error = error ? error : std::move(failed);
        if (--under_way == 0) ended.notify_all();
      };
      {
        const std::lock_guard lock(mutex);
        ++under_way;
      }
      service->start(std::move(request));
    }
  }
  void wait() {
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return under_way == 0; });
    if (error) std::rethrow_exception(error);
  }

  const NvmeLoad load;
  const std::size_t reads;
  const std::size_t writes;
  EmulatedDevice device{std::uint64_t{1} << 20U};
  HostArena arena;
  NvmeStore store;
  MeasuredEngine engine;
  std::vector<std::byte*> host;
  std::vector<ExtentId> extents;
  std::mutex mutex;
  std::condition_variable ended;
  std::size_t under_way = 0;
  std::exception_ptr error;
  std::optional<TransferService> service;  // last: its threads use the rest
};

ServiceSide::ServiceSide(const std::filesystem::path& folder, const NvmeLoad& load)
    : parts_(std::make_unique<Parts>(folder, load)) {}

ServiceSide::~ServiceSide() = default;

std::filesystem::path ServiceSide::file() const { return parts_->store.files().front(); }

std::uint64_t ServiceSide::first_offset() noexcept { return ExtentFileHeader::kBytes; }

double ServiceSide::seconds() {
  const Stopwatch watch;
  parts_->move(Tier::nvme, Tier::host, 0, parts_->reads);
  parts_->move(Tier::host, Tier::nvme, parts_->reads, parts_->writes);
  parts_->wait();
  return watch.elapsed_seconds();
}

void ServiceSide::look() {
  parts_->engine.begin(true);
  seconds();
  parts_->engine.begin(false);
}

double ServiceSide::depth_share() const { return parts_->engine.share(); }

// ---- The engine

struct EngineSide::Parts {
  Parts(const std::filesystem::path& path, const NvmeLoad& of)
      : load(of),
        file{::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC), path},
        blocks(blocks_of(of.read_bytes, of) + blocks_of(of.written_bytes, of)),
        arena(of.block_bytes, blocks),
        memory(arena.allocate(blocks)),
        engine(make_io_engine("auto")) {
    if (file.descriptor < 0) throw IoError("bench: opening " + path.string() + " failed: " + errno_text(errno));
    fill_with_random_bytes(arena.region());
    arena.keep_all();  // as the service's is
    const std::array<const IoFile*, 1> files{&file};
    const std::span<std::byte> region = arena.region();
    queue = engine->open_queue(2 * of.depth, {&region, 1}, files);
  }
  ~Parts() {
    queue.reset();
    if (file.descriptor >= 0) ::close(file.descriptor);
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  struct Course {
    std::size_t first = 0;
    std::size_t count = 0;
  };

  void run(Course read, Course written) {
    std::array<Course, 2> left{read, written};
    const auto start = [&](bool writes) {
      Course& course = left[writes ? 1 : 0];
      if (course.count == 0) return;
      --course.count;
      const std::size_t block = course.first++;
      queue->submit({writes ? Direction::write : Direction::read, &file,
                     ServiceSide::first_offset() + block * load.block_bytes, memory[block], load.block_bytes,
                     writes ? this : nullptr});
    };
    for (std::size_t i = 0; i < load.depth; ++i) {
      start(false);
      start(true);
    }
    std::vector<IoCompletion> done;
    while (queue->in_flight() > 0) {
      done.clear();
      queue->wait(done);
      for (const IoCompletion& completion : done) {
        if (completion.error) std::rethrow_exception(completion.error);
        start(completion.owner != nullptr);
      }
    }
  }

  const NvmeLoad load;
  const IoFile file;
  const std::size_t blocks;
  HostArena arena;
  const std::vector<std::byte*> memory;
  const std::unique_ptr<IoEngine> engine;
  std::unique_ptr<IoQueue> queue;  // after the memory, which it may still use when it goes
};

EngineSide::EngineSide(const ServiceSide& service, const NvmeLoad& load)
    : parts_(std::make_unique<Parts>(service.file(), load)) {}

EngineSide::~EngineSide() = default;

double EngineSide::seconds() {
  const NvmeLoad& load = parts_->load;
  const std::size_t reads = blocks_of(load.read_bytes, load);
  const Stopwatch watch;
  parts_->run({.first = 0, .count = reads}, {.first = reads, .count = blocks_of(load.written_bytes, load)});
  return watch.elapsed_seconds();
}

// ---- fio

std::optional<double> fio_bytes_per_second(const ServiceSide& service, const NvmeLoad& load) {
  if (load.read_bytes > 0 && load.written_bytes > 0) return std::nullopt;
  const std::string command = "fio --name=bench --filename='" + service.file().string() +
                              "' --rw=" + (load.read_bytes > 0 ? "read" : "write") +
                              " --bs=" + std::to_string(load.block_bytes) + " --iodepth=" + std::to_string(load.depth) +
                              " --offset=" + std::to_string(ServiceSide::first_offset()) +
                              " --size=" + std::to_string(load.read_bytes + load.written_bytes) +
                              " --ioengine=io_uring --direct=1 --fixedbufs --registerfiles --allow_file_create=0 "
                              "--loops=4 --output-format=json" +
                              " 2>/dev/null";
  std::string output;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return std::nullopt;
  std::array<char, 4096> part;
  while (const std::size_t length = std::fread(part.data(), 1, part.size(), pipe)) output.append(part.data(), length);
  if (::pclose(pipe) != 0) return std::nullopt;
  const auto json = nlohmann::json::parse(output.substr(std::min(output.size(), output.find('{'))), nullptr, false);
  if (json.is_discarded() || !json.contains("jobs")) return std::nullopt;
  const auto& job = json["jobs"][0];
  return job["read"]["bw_bytes"].get<double>() + job["write"]["bw_bytes"].get<double>();
}

}  // namespace terrace

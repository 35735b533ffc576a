#include "integration/program_memory.h"

#include <atomic>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "base/error.h"
#include "integration/byte_copies.h"
#include "integration/pause.h"

namespace terrace {
namespace {

/// Lies before every block's data, which stays aligned to 64 bytes; of a block that the CPU does not reach, apart from
/// it.
struct alignas(64) Header {
  std::uintptr_t mark;  ///< tells our blocks from the previous allocator's; first, for `free_block` to clear
  std::shared_ptr<BlockSource> source;
  std::uint64_t bytes;
  Kind kind;
};
static_assert(sizeof(Header) == 64);

std::uintptr_t mark_of(const void* data) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) ^ std::uintptr_t{0x7E44ACE0B10C5EED};
}

Header* header_of(void* data) noexcept { return reinterpret_cast<Header*>(data) - 1; }

std::atomic<ProgramMemory*> current{nullptr};

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* previous) : previous_(previous) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    ProgramMemory* memory = Pause::active() ? nullptr : current.load(std::memory_order_acquire);
    if (memory == nullptr) {
      return previous_->allocate(bytes);
    }
    try {
      const std::shared_ptr<BlockSource> source = memory->source();
      return source ? allocate_from(source, bytes, Kind::other) : previous_->allocate(bytes);
    } catch (const Error& error) {
      memory->refused(std::current_exception());
      TORCH_CHECK_WITH(OutOfMemoryError, false, "terrace: ", error.what());
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

  c10::Allocator& previous() const noexcept { return *previous_; }

  /// Frees a block whose maker is not known: LibTorch's raw interface has one deleter for all. The previous
  /// allocator aligns to 64 bytes too and keeps its own header below, so what is read here is mapped.
  static void free_any(void* data);

 private:
  c10::Allocator* previous_;
};

Allocator* installed = nullptr;

void end(Header* header) noexcept {
  header->~Header();
  // Whoever gets this memory next may not be us. Volatile: to a compiler, bytes that no object has are never read.
  *reinterpret_cast<volatile std::uintptr_t*>(header) = 0;
}

void free_block(void* data) {
  if (data == nullptr) {
    return;
  }
  Header* header = header_of(data);
  const std::shared_ptr<BlockSource> source = std::move(header->source);
  const std::uint64_t bytes = header->bytes;
  const Kind kind = header->kind;
  end(header);
  source->give_back(reinterpret_cast<std::byte*>(header), bytes, kind);
}

c10::DataPtr with_header(std::byte* block, const std::shared_ptr<BlockSource>& source, std::uint64_t bytes, Kind kind,
                         c10::Device device) noexcept {
  auto* header = new (block) Header{0, source, bytes, kind};
  void* data = header + 1;
  header->mark = mark_of(data);
  return {data, data, &free_block, device};
}

/// A block on a device whose memory the CPU does not reach.
struct FarBlock {
  Header header;
  std::byte* block;
};

void free_far_block(void* context) {
  const std::unique_ptr<FarBlock> far(static_cast<FarBlock*>(context));
  far->header.source->give_back(far->block, far->header.bytes, far->header.kind);
}

c10::DataPtr allocate_far(const std::shared_ptr<BlockSource>& source, std::uint64_t bytes, Kind kind,
                          c10::Device device) {
  auto far = std::make_unique<FarBlock>(FarBlock{{0, source, bytes, kind}, nullptr});
  std::byte* const block = far->block = source->take(bytes, kind);
  return {block, far.release(), &free_far_block, device};
}

/// What is known of the block behind `data`; null if no source gave it.
const Header* find_header(const c10::DataPtr& data) noexcept {
  if (data.get_context() == nullptr) {
    return nullptr;
  }
  if (data.get_deleter() == &free_far_block) {
    return &static_cast<const FarBlock*>(data.get_context())->header;
  }
  return data.get_deleter() == &free_block ? header_of(data.get_context()) : nullptr;
}

void Allocator::free_any(void* data) {
  if (data == nullptr) {
    return;
  }
  if (header_of(data)->mark == mark_of(data)) {
    free_block(data);
  } else {
    installed->previous().raw_deallocate(data);
  }
}

Allocator& installed_allocator() {
  static Allocator* const allocator = [] {
    installed = new Allocator(c10::GetCPUAllocator());  // lives until the process exits: LibTorch keeps it
    constexpr std::uint8_t above_all = 255;
    c10::SetCPUAllocator(installed, above_all);
    return installed;
  }();
  return *allocator;
}

}  // namespace

void attach_program_memory(ProgramMemory& memory) {
  installed_allocator();
  current.store(&memory, std::memory_order_release);
}

void detach_program_memory() noexcept { current.store(nullptr, std::memory_order_release); }

c10::DataPtr allocate_from(const std::shared_ptr<BlockSource>& source, std::uint64_t bytes, Kind kind,
                           c10::Device device) {
  if (bytes == 0) {
    return {nullptr, nullptr, &free_block, device};
  }
  if (!device.is_cpu()) {
    return allocate_far(source, bytes, kind, device);
  }
  const std::uint64_t whole = block_bytes(bytes);
  return with_header(source->take(whole, kind), source, whole, kind, device);
}

std::uint64_t block_bytes(std::uint64_t data_bytes) noexcept { return data_bytes + sizeof(Header); }

std::optional<TakenBlock> take_block(const std::shared_ptr<BlockSource>& source, std::uint64_t data_bytes,
                                     c10::DataPtr& data) noexcept {
  if (data.get_context() == nullptr || data.get_deleter() != &free_block) {
    return std::nullopt;
  }
  Header* const header = header_of(data.get_context());
  if (header->source != source || header->bytes != block_bytes(data_bytes)) {
    return std::nullopt;
  }
  data.release_context();
  data.clear();
  const TakenBlock block{reinterpret_cast<std::byte*>(header), header->bytes, sizeof(Header), header->kind};
  end(header);
  return block;
}

c10::DataPtr put_back_block(const std::shared_ptr<BlockSource>& source, const TakenBlock& block) noexcept {
  return with_header(block.memory, source, block.bytes, block.kind, c10::DeviceType::CPU);
}

std::uint64_t bytes_counted_by(const BlockSource& source, const c10::DataPtr& data) noexcept {
  const Header* const header = find_header(data);
  return header != nullptr && header->source.get() == &source ? header->bytes : 0;
}

std::optional<Kind> kind_of(const c10::DataPtr& data) noexcept {
  const Header* const header = find_header(data);
  return header != nullptr ? std::optional(header->kind) : std::nullopt;
}

c10::DataPtr allocate_ordinary(std::uint64_t bytes, c10::Device device) {
  if (device.is_cpu()) {
    return installed_allocator().previous().allocate(bytes);
  }
  const Pause uncounted;
  return allocate_like_the_program(device, bytes);
}

}  // namespace terrace

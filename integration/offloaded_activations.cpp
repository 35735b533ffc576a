#include "integration/offloaded_activations.h"

#include <algorithm>
#include <optional>
#include <typeinfo>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/error.h"
#include "base/log.h"
#include "base/memory_info.h"
#include "base/units.h"
#include "integration/managed_storage.h"
#include "integration/offloaded_activation.h"
#include "integration/pause.h"
#include "integration/pending_activations.h"
#include "integration/tensor_record.h"
#include "memory/access_stream.h"

namespace terrace {
namespace {

/// How a tensor looks at its storage.
struct View {
  explicit View(const at::Tensor& tensor)
      : keys(tensor.key_set()),
        type(tensor.dtype()),
        sizes(tensor.sizes()),
        strides(tensor.strides()),
        offset(tensor.storage_offset()) {}

  at::Tensor of(c10::Storage storage) const {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, type);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return tensor;
  }

  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::SmallVector<std::int64_t, 4> sizes;
  c10::SmallVector<std::int64_t, 4> strides;
  std::int64_t offset;
};

}  // namespace

/// Stands in a graph for one saved tensor.
class OffloadedActivations::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<OffloadedActivations> owner) : owner_(std::move(owner)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    record_.emplace(tensor);
    if (!owner_->is_wanted(tensor)) {
      kept_ = tensor.tensor_data();
      return;
    }
    view_.emplace(tensor);
    activation_ = owner_->activation_of(tensor);
  }

  at::Tensor call_unpack_hook() override {
    record_->check_unchanged();
    if (!view_) {
      return kept_;
    }
    at::Tensor tensor = view_->of(storage());
    record_->share_version_with(tensor);
    return tensor;
  }

 private:
  /// As ops do where their operands cannot be had.
  c10::Storage storage() const {
    try {
      return activation_->storage();
    } catch (const Error& error) {
      if (owner_->memory_ != nullptr) {
        owner_->failed_(std::current_exception());
      }
      TORCH_CHECK_WITH(OutOfMemoryError, dynamic_cast<const OutOfMemory*>(&error) == nullptr,
                       "terrace: ", error.what());
      TORCH_CHECK(false, "terrace: ", error.what());
    }
  }

  const std::shared_ptr<OffloadedActivations> owner_;
  std::optional<TensorRecord> record_;
  at::Tensor kept_;  ///< where it does not leave
  std::optional<View> view_;
  std::shared_ptr<OffloadedActivation> activation_;
};

OffloadedActivations::OffloadedActivations(SessionMemory& memory, Tier home, bool is_asked_for,
                                           std::function<void(std::exception_ptr)> failed)
    : memory_(&memory),
      device_(memory.program_device()),
      home_(home),
      is_asked_for_(is_asked_for),
      smallest_bytes_(std::max<std::uint64_t>(smallest_that_leaves, memory.stream().granule_bytes())),
      failed_(std::move(failed)) {}

OffloadedActivations::~OffloadedActivations() = default;

void OffloadedActivations::open() {
  set_usual_source(shared_from_this());
  memory_->stream().add_spare_room(*this);
}

void OffloadedActivations::close() noexcept {
  set_usual_source(nullptr);
  memory_->stream().remove_spare_room(*this);
  std::vector<std::shared_ptr<OffloadedActivation>> away;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [chunk, activation] : away_) {
      if (auto lives = activation.lock()) {
        away.push_back(std::move(lives));
      }
    }
  }
  std::optional<std::uint64_t> left;
  std::string why_not;
  for (const auto& activation : away) {
    try {
      left = left ? left : available_memory_bytes() / 10 * 9;
      if (activation->bytes() > *left) {
        throw OutOfMemory("the machine's memory does not hold them");
      }
      activation->become_ordinary();
      *left -= activation->bytes();
    } catch (const std::exception& error) {
      why_not = error.what();
      activation->end();
    }
  }
  memory_ = nullptr;
  if (!why_not.empty()) {
    log(LogLevel::warning, "activations that a graph holds end with their session: " + why_not);
  }
}

void OffloadedActivations::some_leave() noexcept {
  const Pause pause;
  has_pending_ = some_pending_leave();
}

bool OffloadedActivations::give_back() noexcept {
  const Pause pause;
  return all_pending_leave();
}

std::unique_ptr<torch::autograd::SavedVariableHooks> OffloadedActivations::hooks() {
  if (Pause::active() || c10::InferenceMode::is_enabled() || SessionMemory::is_constructing()) {
    return nullptr;
  }
  return std::make_unique<Hooks>(shared_from_this());
}

bool OffloadedActivations::is_wanted(const at::Tensor& tensor) const {
  if (!tensor.defined() || typeid(*tensor.unsafeGetTensorImpl()) != typeid(c10::TensorImpl) ||
      tensor.layout() != c10::kStrided || tensor.device() != device_ || !tensor.has_storage()) {
    return false;
  }
  c10::StorageImpl& storage = storage_of(tensor);
  if (storage.nbytes() < smallest_bytes_) {
    return false;
  }
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  const bool is_of_the_program =
      device_.is_cpu() ? kind_of(data) == Kind::other : ManagedStorage::of(storage) == nullptr;
  return is_of_the_program || OffloadedActivation::of(storage) != nullptr;
}

std::shared_ptr<OffloadedActivation> OffloadedActivations::activation_of(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  if (auto opened = OffloadedActivation::of(*storage.unsafeGetStorageImpl())) {
    return opened;
  }
  std::shared_ptr<OffloadedActivation> activation;
  {
    const std::scoped_lock lock(mutex_);
    auto& entry = here_[storage.unsafeGetStorageImpl()];
    activation = entry.second.lock();
    if (activation == nullptr) {
      activation = std::make_shared<OffloadedActivation>(shared_from_this(), storage);
      entry = {activation.get(), activation};
    }
  }
  // Also what was saved before, by another thread or before a backward: this one may be the last to hold it.
  add_pending(activation);
  has_pending_ = true;
  return activation;
}

void OffloadedActivations::forget(const c10::StorageImpl* storage, const OffloadedActivation* activation) noexcept {
  const std::scoped_lock lock(mutex_);
  if (const auto found = here_.find(storage); found != here_.end() && found->second.first == activation) {
    here_.erase(found);
  }
}

bool OffloadedActivations::may_leave(std::uint64_t bytes) const {
  if (home_ != Tier::host) {
    return true;
  }
  const Budget& host = memory_->budget(Tier::host);
  const std::uint64_t taken =
      kept_from_host_ + host.used(Kind::activation) + host.used(Kind::buffer) + host.used(Kind::other);
  const std::uint64_t needed = taken + memory_->stream().room_bytes(bytes)[index_of(Tier::host)];
  if (is_asked_for_ && needed > host.capacity()) {
    throw OutOfMemory("host: " + format_bytes(bytes) + " of activations do not fit beside " + format_bytes(taken) +
                          " for chunks, their updates and other activations, in a budget of " +
                          format_bytes(host.capacity()),
                      host.hint_to_hold(needed) + ", or set placement.activations = \"nvme\"");
  }
  return needed <= host.capacity();
}

ChunkId OffloadedActivations::take_chunk(std::uint64_t bytes) {
  AccessStream::ChunkOptions options;
  options.device_room_bytes = room_bytes(bytes);
  {
    const std::scoped_lock lock(mutex_);
    if (const auto found = gone_.find(bytes); found != gone_.end()) {
      options.in_place_of = found->second.extract(found->second.begin()).value();
      if (found->second.empty()) {
        gone_.erase(found);
      }
    }
  }
  const auto keep_id = [&](std::optional<ChunkId> taken) {
    if (options.in_place_of && taken != options.in_place_of) {
      const std::scoped_lock lock(mutex_);
      gone_[bytes].insert(*options.in_place_of);
    }
  };
  try {
    const ChunkId chunk = memory_->stream().add_chunk(Kind::activation, 0, bytes, home_, options);
    keep_id(chunk);
    return chunk;
  } catch (...) {
    keep_id(std::nullopt);
    throw;
  }
}

std::uint64_t OffloadedActivations::room_bytes(std::uint64_t bytes) const {
  return device_.is_cpu() ? memory_->device().allocation_bytes(block_bytes(bytes)) : 0;
}

void OffloadedActivations::give_back_chunk(ChunkId chunk, std::uint64_t bytes) noexcept {
  const std::scoped_lock lock(mutex_);
  away_.erase(chunk);
  if (memory_ != nullptr) {
    memory_->stream().remove_chunk(chunk);
    gone_[bytes].insert(chunk);
  }
}

void OffloadedActivations::stays(std::exception_ptr error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& reason) {
    const bool is_fine = !is_asked_for_ && dynamic_cast<const OutOfMemory*>(&reason) != nullptr;
    if (!is_fine) {
      failed_(error);
    }
    {
      const std::scoped_lock lock(mutex_);
      if (std::exchange(has_said_so_, true)) {
        return;
      }
    }
    log(is_fine ? LogLevel::info : LogLevel::warning,
        std::string("activations stay on the device that have no room elsewhere: ") + reason.what());
  } catch (...) {
    failed_(error);
  }
}

}  // namespace terrace

/// What a session is made of: its memory, the parameters under management, and the ways in which LibTorch
/// calls back (ops, allocations, gradients).
///
/// Lives from the session's construction to its destructor, which calls `close`; optimizers hold it weakly.
///
/// Threads. What is known of parameters, chunks and views (the members below and the fields of ManagedParameter) is
/// read and changed under the program mutex. `lock` takes it; what may be called by anybody does so itself, and the
/// rest is called under it. It is recursive because ops run while it is held, and because a program's own hooks may
/// call `step`. Ops take it for a look-up only, and most not at all.
///
/// While it is held, only transfers, readers, storages on their way and updates are waited for, and none ever asks for
/// it: an update runs no ops, and when it lets go of gradients it calls Gradients::notice_dead_storages, which takes
/// the mutexes below this one only. Nobody waits for another thread's pin, and for an op that was refused its operands
/// (see OpenStorages) a few milliseconds only. So whoever holds it goes on by himself.
///
/// Order: LibTorch's mutex of a node; that of the generators, then a RecomputedBlock's; the program mutex; that of the
/// spillable storages; the update queue's or that of Gradients; that of GradientSums; the AccessStream's. The
/// registry's and `error_mutex_` are taken last.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include <torch/csrc/api/include/torch/nn/module.h>

#include "base/config.h"
#include "integration/activation_planner.h"
#include "integration/checkpoint_notes.h"
#include "integration/gathered.h"
#include "integration/gradients.h"
#include "integration/interceptor.h"
#include "integration/managed_buffer.h"
#include "integration/managed_parameter.h"
#include "integration/model_notes.h"
#include "integration/offloaded_activations.h"
#include "integration/open_storages.h"
#include "integration/program_memory.h"
#include "integration/session_memory.h"
#include "integration/spillable_storages.h"
#include "integration/unique_names.h"
#include "memory/layout.h"
#include "memory/placement.h"
#include "memory/step_clock.h"
#include "optimizer/update_queue.h"

namespace terrace {

class CheckpointLock;
class CheckpointReader;
class CheckpointWriter;
struct CheckpointRecord;

class SessionState final : public OpPinner, public ProgramMemory {
 public:
  explicit SessionState(const Config& config);
  ~SessionState() override;

  /// The program mutex, for what takes several of the calls below.
  [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(program_mutex_); }

  void manage(torch::nn::Module& module);
  /// Brings parameters and buffers whose storage the program has replaced (by set_data, Module::to, torch::load) under
  /// management again, and parameters that need a gradient now and needed none before. Throws LogicError, naming the
  /// parameter, where that cannot be.
  void take_in_replaced();
  /// Of those the buffers alone.
  void take_in_replaced_buffers();
  /// Gives back what parameters and buffers take that the program cannot reach any more, and their names.
  void forget_dead();
  /// Gives every trainable chunk set that optimizers can update a momentum, a master where it needs one, and a variance
  /// if asked for. Throws OutOfMemory.
  void add_optimizer_chunks(bool with_variance);
  /// Makes the model's tensors ordinary where they fit, and ends interception. No other thread uses the session any
  /// more. Never throws.
  void close() noexcept;

  /// The managed parameter of a tensor, or null.
  ManagedParameter* find(const at::Tensor& tensor) noexcept;
  std::list<ManagedParameter>& parameters() noexcept { return parameters_; }
  std::span<const ChunkSet> chunk_sets() const noexcept { return chunk_sets_; }
  Gradients& gradients() noexcept { return *gradients_; }
  SessionMemory& memory() noexcept { return memory_; }
  SpillableStorages& spillable() noexcept { return spillable_; }
  UpdateQueue& updates() noexcept { return *updates_; }
  NonFinite non_finite() const noexcept { return non_finite_; }
  /// Whether a step's update is over when the step is.
  bool updates_at_once() const { return config_.optimizer.update == "immediate"; }
  /// What gradients of a parameter of that type are summed up in.
  at::ScalarType gradient_type_of(at::ScalarType parameter) const noexcept;
  Gathered gather(std::vector<at::Tensor> tensors, Access mode);
  void for_each_parameter(const std::function<void(const std::string&, at::Tensor&)>& visit, Access mode);

  // As Session says.
  void save(const std::filesystem::path& folder, const CheckpointNotes& notes);
  void save(CheckpointLock& lock, const CheckpointNotes& notes);
  CheckpointNotes load(const std::filesystem::path& folder);
  /// Throws the error at which a load left a part of the session as it was.
  void require_whole() const {
    if (!is_whole_) rethrow_failed_load();
  }

  /// Finishes the update that was submitted, where the configuration says so, and ends the step. Whether its gradients
  /// rest until it, and do not die within backward, is learned for the next run.
  void end_step(bool gradients_rest);
  /// Of those that were refused for their gradients, and of which nobody has heard or will.
  void warn_of_refused_steps() const noexcept;
  /// Throws LogicError, naming it, if a parameter or gradient in these sets of chunks is gathered at the moment.
  void require_not_gathered(const std::string& what, const std::set<std::uint32_t>& sets) const;

  /// Throws LogicError if anything is gathered at the moment.
  void require_nothing_gathered(const std::string& what);

  /// What is used and was moved, and of which size the chunks are. Any thread.
  MemoryUsage memory_usage() const;
  std::exception_ptr last_error() const;
  std::optional<ActivationReport> activation_report() const {
    return planner_ != nullptr ? planner_->report() : std::nullopt;
  }

  // OpPinner
  std::unique_ptr<at::ObserverContext> pin(std::span<const OpOperand> operands,
                                           c10::ArrayRef<const c10::IValue> inputs) noexcept override;
  // ProgramMemory
  std::shared_ptr<BlockSource> source() override;
  void refused(std::exception_ptr error) noexcept override;

 private:
  class Blocks;
  class OpPins;
  struct RefusedOp;

  /// The chunks of one index, with what they hold.
  struct SetInfo {
    at::ScalarType type = at::kFloat;
    std::uint64_t elements = 0;
    bool trainable = false;
    bool gradients_read_once = false;  ///< as ModelNotes has it
    std::size_t parameters = 0;        ///< that lie in it; without any its chunks are removed
  };

  /// How a model lies in chunks.
  struct ModelLayout {
    Layout layout;
    std::uint64_t chunk_bytes = 0;  ///< of those that hold more than one parameter
    bool is_by_use = false;
    bool gradients_read_once = false;  ///< as ModelNotes has it
  };

  [[noreturn]] void rethrow_failed_load() const;
  /// Throws LogicError if the storage belongs to a session that has ended.
  void require_own(const ManagedStorage& storage) const;
  /// An op uses them, while a model is to be learned of.
  void note_uses(std::span<const OpOperand> operands) noexcept;
  enum class Pass : std::uint8_t { unknown, without_graph, with_graph };
  /// An op is not in the pass that residency has been told of: tells it if another has begun. May take the program
  /// mutex.
  void notice_pass(Pass pass, std::span<const OpOperand> operands, c10::ArrayRef<const c10::IValue> inputs);
  /// The sets of chunks that have gradients.
  std::set<std::uint32_t> trained_sets() const;
  std::vector<const ManagedParameter*> manage_parameters(std::span<ManagedParameter> found, const ModelLayout& chosen);
  /// Throws ConfigError, naming the parameter, if the program has asked LibTorch for gradients of another type than the
  /// session sums up.
  void require_gradient_type(const ManagedParameter& parameter) const;
  void forget_dead_parameters();
  /// Has the parameter's gradients come under management, and the one that it has.
  void watch(ManagedParameter& parameter);
  /// Where `move_in` fails the tensors are what they were before, and no chunk is left behind.
  void move_in_or_restore(std::span<ManagedParameter> found, const ModelLayout& chosen);
  /// Where a tensor's bytes were before it came under management.
  struct FormerPlace {
    c10::Device device;
    bool was_constructed;
  };
  /// False where that fails; then the parameter stays where it is until the session ends.
  bool move_out(const ManagedParameter& parameter, const FormerPlace& former) noexcept;
  /// Moves the parameters' bytes into new chunks, and makes room for their gradients.
  void move_in(std::span<ManagedParameter> found, const ModelLayout& chosen);
  ModelLayout choose_layout(std::span<const ManagedParameter> found, const ModelNotes& notes) const;
  /// Whether chunks in the order of use take no more room than those by construction, and the device has room for
  /// whatever an op may need more of them at one moment.
  bool has_room_for(const ModelLayout& by_use, const ModelLayout& by_construction, const ModelNotes& notes) const;
  /// Gives each its run of a new set of chunks; which of them lie in each of the sets.
  std::vector<std::vector<ManagedParameter*>> lay_out(std::span<ManagedParameter> found, const ModelLayout& chosen);
  static LayoutRun run_of(const ManagedParameter& parameter);
  /// What AdamW keeps of such runs takes so much, on the host and where the program computes.
  std::uint64_t room_of(const LayoutChunk& chunk) const;
  /// The most that a chunk of any kind takes there.
  std::uint64_t largest_on_device(const Layout& layout) const;
  /// The parameters of one call of `manage`.
  struct Model {
    ModelNotesFile file;
    ModelNotes notes;  ///< at first those that it is placed by
    std::vector<const ManagedParameter*> parameters;
    bool is_laid_out_by_use;
    std::uint64_t largest_chunk_bytes;  ///< on the device
    bool is_learned = false;
  };
  /// Of models that have been trained: keeps for the next run what would have it do otherwise.
  void learn_of_models(bool gradients_rest) noexcept;
  /// False while the model has not been trained, and may be.
  bool learn_of(Model& model, bool gradients_rest) noexcept;
  /// Of first use, where chunks in that order are better.
  std::vector<std::uint32_t> better_order_of(const Model& model) const;
  void note_device_bytes(const Model& model, ModelNotes& notes) const;
  /// The order of use needed more than there was, and is not to be taken again with no more than that.
  void note_refusal(ModelNotes& notes) const;
  void note_step_times(ModelNotes& notes) const;
  void keep(Model& model, ModelNotes notes);
  /// What the whole run has needed, and how long its steps were. The session or the model ends.
  void learn_at_end(Model& model) noexcept;
  StepClock::Moment moment() const;
  /// What notes and measurements tell of it.
  StepRates step_rates() const;
  /// Works out what `memory_usage` tells of the chunks.
  void note_waste();
  void manage_buffers(torch::nn::Module& module, UniqueNames& names);
  /// Moves the buffer's bytes to where the session counts them, if they are not there.
  void take_in(const at::Tensor& buffer);
  /// The names of all parameters and buffers.
  UniqueNames names() const;
  /// What a tensor that was constructed takes of the host's budget.
  std::uint64_t bytes_on_host(const at::Tensor& tensor) const;
  void remove_chunk(ChunkId id);
  void remove_set(std::uint32_t set);
  void remove_empty_sets();
  /// The parameter's new storage holds its bytes in the run that it has.
  void refill(ManagedParameter& parameter);
  /// The parameters are of another type or size now, or have gradients, and get other runs.
  void manage_anew(std::span<ManagedParameter*> parameters);
  /// Bytes on the host of a chunk, and of the largest tensor that moves into it.
  std::uint64_t room_to_move_in(std::uint64_t chunk_bytes, std::uint64_t largest_tensor) const;
  /// Copies the tensor's bytes to the parameter's run, of whose chunk alone `pin` holds the host's copy, and attaches
  /// its storage to it.
  void attach_run(ManagedParameter& parameter, const Pin& pin);
  void fill_chunk(std::uint32_t set, std::span<ManagedParameter* const> members);
  /// Registers one chunk a request, at homes chosen by `shares`.
  struct ChunkRequest {
    std::uint32_t set;
    Kind kind;
  };
  /// `to_be_freed`: what will have been given up by then.
  std::vector<Tier> choose_homes_for(std::span<const ChunkRequest> requests,
                                     const std::optional<Config::Shares>& shares, const RestingRoom& to_be_freed) const;
  /// Whether where gradients rest is chosen here, and there is a choice.
  bool places_gradients_by_notes() const { return !config_.placement.gradients && memory_.has_nvme(); }
  bool lays_out_by_notes() const { return config_.placement.order != "construction"; }
  /// Bytes of each tier that no further chunk may rest in.
  RestingRoom not_for_resting(const RestingRoom& to_be_freed) const;
  /// What shares that are given say of gradients and states that are not there yet, as far as it is known now.
  RestingRoom told_to_rest_later() const;
  /// Where states lack room on the host, has gradients that are read once rest on NVMe by default, as far as that makes
  /// the step shorter; those that hold something stay. Returns of which sets.
  std::vector<std::uint32_t> make_way_for(std::span<const ChunkRequest> states);
  /// They hold nothing. Throws OutOfMemory or IoError, and then they rest where they did.
  void move_gradients(std::uint32_t set, Tier home);
  /// All of them, or where that throws none.
  void add_optimizer_chunks(std::span<const ChunkRequest> requests);
  std::optional<ChunkId>& state_chunk(const ChunkRequest& request);
  /// What the session itself takes of the host.
  std::uint64_t room_without_tensors() const;
  /// What an update of one set's chunks brings to the host at most, of those that rest elsewhere: the session's, and
  /// planned ones that will rest at `homes`.
  std::uint64_t largest_visit_of_update(std::span<const ChunkRequest> planned, std::span<const Tier> homes) const;
  /// Throws OutOfMemory, with the setting that all of them need together, before any is registered. Of states also with
  /// what their update brings to the host: chunks of parameters may take the place of others, which are still there.
  void require_room_to_rest(std::span<const ChunkRequest> requests, std::span<const Tier> homes,
                            const std::optional<Config::Shares>& shares, const RestingRoom& to_be_freed) const;
  /// What a tensor that was constructed takes of the host's budget: its block, where it has not left for NVMe, and at
  /// least while it moves in.
  struct BytesOnHost {
    std::uint64_t now = 0;
    std::uint64_t as_it_moves = 0;
  };
  /// Throws OutOfMemory, with what it takes at least at one moment, where the host cannot hold the chunks and, one
  /// chunk after the other, what of the tensors has not moved into them yet and cannot leave for NVMe.
  void require_room_to_move_in(std::span<const ChunkRequest> requests, std::span<const Tier> homes,
                               std::span<const std::vector<ManagedParameter*>> members,
                               const std::unordered_map<const ManagedParameter*, BytesOnHost>& on_host) const;
  ChunkId add_chunk(const ChunkRequest& request, Tier home);
  std::uint64_t bytes_of(const SetInfo& info, Kind kind) const;
  std::uint64_t bytes_of(const ChunkRequest& request) const { return bytes_of(set_infos_[request.set], request.kind); }
  /// What the host must hold at once to update a set of chunks.
  std::uint64_t update_room(const SetInfo& info) const;
  std::uint64_t largest_update_room() const;
  /// What rests on the host, and is updated there, has its room from whatever else could lie there.
  void keep_host_for_chunks();
  /// Throws OutOfMemory, with the smallest sufficient setting, if what rests leaves no room to work in.
  void check_room_to_work();
  void prepare_to_save(const CheckpointNotes& notes);
  void save_all(CheckpointWriter& writer, const CheckpointNotes& notes) const;
  void save_parameters(CheckpointWriter& writer) const;
  /// Throws ConfigError, listing them, if the checkpoint's parameters and buffers are others than the session's.
  void require_same_tensors(const std::vector<CheckpointRecord>& records) const;
  /// Whose default generators a checkpoint holds.
  std::vector<c10::Device> devices_with_generators() const;
  void load_parameters(const CheckpointReader& reader);
  void load_buffers(const CheckpointReader& reader);
  void restore_storages();
  /// Makes them ordinary, those that can be. Throws the first error, and OutOfMemory if they do not fit together.
  void restore(const std::vector<std::shared_ptr<ManagedStorage>>& storages);
  /// Of one chunk, which it ends on a device that is not the CPU.
  void restore_chunk(ChunkId chunk, const std::vector<std::shared_ptr<ManagedStorage>>& storages);
  /// What ordinary tensors on the device may take, where no chunk is left there.
  std::uint64_t free_for_the_program() const;
  void restore(ManagedStorage& storage);
  /// Gives the storage `data` with the bytes of its run.
  void restore(ManagedStorage& storage, c10::DataPtr data);
  /// Copies the first `bytes` of the storage's run to `data`, by way of the host.
  void read_run(const ManagedStorage& storage, std::uint64_t bytes, const c10::DataPtr& data);

  const Config config_;
  const StateFormat state_format_;
  const NonFinite non_finite_;
  mutable std::recursive_mutex program_mutex_;
  SessionMemory memory_;
  const std::shared_ptr<StorageRegistry> registry_ = std::make_shared<StorageRegistry>();
  SpillableStorages spillable_;
  std::unique_ptr<UpdateQueue> updates_;
  std::shared_ptr<Gradients> gradients_;
  std::shared_ptr<OffloadedActivations> activations_;  ///< null where they do not leave the device
  std::shared_ptr<ActivationPlanner> planner_;         ///< null where nobody has to plan
  std::list<ManagedParameter> parameters_;             // by number, at stable addresses
  std::uint64_t managed_so_far_ = 0;                   ///< parameters, those that have died too
  std::vector<ManagedBuffer> buffers_;
  std::vector<std::shared_ptr<ManagedStorage>> left_behind_;  ///< by a `manage` that failed
  std::unordered_map<const ManagedStorage*, ManagedParameter*> by_storage_;
  std::vector<std::weak_ptr<OpenStorages>> gathered_;
  std::vector<ChunkSet> chunk_sets_;
  std::vector<SetInfo> set_infos_;
  std::atomic<std::uint64_t> chunk_bytes_;
  RestingRoom rested_{};  ///< bytes that rest on each tier
  std::atomic<std::uint64_t> chunk_room_bytes_{0};
  std::atomic<std::uint64_t> chunk_wasted_bytes_{0};
  std::vector<Model> models_;
  StepClock step_clock_;  ///< where gradients are placed by notes
  std::atomic<bool> is_in_forward_{false};
  /// While a model is to be learned of: what ops use is noted, of any thread.
  std::atomic<bool> is_learning_{false};
  std::atomic<std::uint32_t> first_uses_{0};
  std::atomic<std::uint64_t> most_operands_{0};  ///< of one op
  std::atomic<bool> is_laid_out_by_use_{false};
  std::atomic<bool> was_refused_memory_{false};  ///< an op or a tensor of the program
  mutable std::mutex error_mutex_;
  std::exception_ptr last_error_;
  /// Where a load left a part of the session as it was. Set while no op runs.
  std::exception_ptr failed_load_;
  std::atomic<bool> is_whole_{true};
  /// What residency has been told of. Ops of any thread look at it without a lock: where two threads are in different
  /// passes residency is told of each in turn, and looks ahead less well.
  std::atomic<Pass> pass_{Pass::unknown};
};

}  // namespace terrace

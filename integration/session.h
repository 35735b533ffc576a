/// A session: the memory of the models it manages, across device, host and NVMe.
///
///     terrace::Session session(terrace::Config::load("terrace.toml"));
///     auto model = session.construct([&] { return Gpt(options); });
///     session.manage(*model);
///     terrace::AdamW optimizer(session, torch::optim::AdamWOptions(3e-4));
///
/// After that the training loop is plain LibTorch. One session lives at a time in a process; a second one
/// throws LogicError. While it lives, a managed parameter's bytes can be touched by ops, and while they are gathered:
/// anything else throws, naming the parameter. Ops that fail because of the session throw c10::Error with the message;
/// `last_error` has the typed exception.
///
/// Threads: several may train and evaluate at once, each its own models. Models that are trained beside others come
/// under management by a call of `manage` each, so that they share no chunks, and have an AdamW each, over their own
/// parameters. What ops of all threads use at one moment must fit the device together: nobody waits for another thread,
/// an op that finds no room throws with OutOfMemory, and so may another thread's on the same parameters meanwhile.
/// Which thread trains a model may change between ops; two that train one model at once race as in plain LibTorch.
/// While one thread replaces parameters' storages (set_data, Module::to, torch::load) or freezes and unfreezes them, no
/// other steps. The session ends when no other thread uses it any more.
#pragma once

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include "base/config.h"
#include "base/error.h"
#include "integration/activation_planner.h"
#include "integration/checkpoint_notes.h"
#include "integration/gathered.h"
#include "memory/chunk.h"
#include "memory/timeline.h"
#include "memory/usage.h"

namespace terrace {

class CheckpointLock;
class SessionState;

class Session {
 public:
  /// Takes the budgets. Throws ConfigError (also for what a program has filled in and `Config::validate` refuses),
  /// OutOfMemory or IoError (a path that cannot be written, an nvme.memory above the free space).
  explicit Session(const Config& config = {});
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  /// Models become ordinary again where their bytes fit the available memory less 10%, those on a CUDA device where
  /// they fit `device.memory` beside what the program has there; otherwise they stay guarded. Never throws.
  ~Session();

  /// Runs `build` with its tensors counted against `host.memory`, and returns what it returns: a model that
  /// is built outside is counted on the device as a whole. With an NVMe tier the model may be larger than the budget:
  /// what was not used for longest leaves for NVMe, and comes back when an op uses it. A pointer into a tensor is
  /// good until the thread's next op or tensor, or the end of `build`.
  template <class Build>
  auto construct(Build&& build) {
    synchronize();  // what an update holds on the host could not leave
    const Construction construction(*state_);
    return std::forward<Build>(build)();
  }

  /// Brings a module's parameters and buffers under management: parameters rest where `[placement]` says,
  /// buffers stay on the device. May be called again, for other modules or for parameters added since. Names are those
  /// within the module; one that the session has already gets "#2" at its end, or "#3" and so on.
  /// Throws OutOfMemory if what must rest somewhere, or one op's smallest operand, does not fit.
  void manage(torch::nn::Module& module);

  /// Keeps parameters on the device as ordinary tensors, whose bytes may be reached by pointer, for as long as what it
  /// returns lives: of the module and those within it, or of a list. Updates that are queued for them are done first.
  /// Ordinary tensors in the list stay as they are. `Access::write` where bytes may be changed other than by ops.
  /// Changes made by pointer under `Access::read` may be lost. A step while something is gathered that lies in a chunk
  /// with what it changes throws LogicError, and so does `manage` while anything that is trained is gathered.
  ///
  ///     auto view = session.gather(*model, terrace::Access::read);
  ///
  /// Throws OutOfMemory, with the bytes, if they do not fit the device together.
  [[nodiscard]] Gathered gather(torch::nn::Module& module, Access access);
  [[nodiscard]] Gathered gather(std::vector<at::Tensor> tensors, Access access);

  /// Calls `visit` with each managed parameter's name and tensor, gathered one at a time, in the order in which they
  /// came under management. Pass `Access::read` where bytes
  /// are only looked at, so that nothing has to be written back.
  void for_each_parameter(const std::function<void(const std::string& name, at::Tensor& parameter)>& visit,
                          Access access = Access::write);

  /// Saves a checkpoint: parameters, their masters, moments and counts of updates, buffers, the states of LibTorch's
  /// default generators (the CPU's, and the CUDA device's where the session has one), and the program's `notes`.
  /// Gradients are not in it, nor learning rates and schedulers, nor what else is the program's own. Moments and counts
  /// end with their AdamW: one that is destroyed before has none in it. What is saved is known by name, kind, type and
  /// shape: budgets, placement and chunk sizes of the session that loads it may be others.
  ///
  /// Finishes queued updates first. Returns when the checkpoint lasts; until then, and whenever the process is killed,
  /// the folder holds the one before. Throws ConfigError (the folder has no name or holds something else, another
  /// process saves to it, or notes are not UTF-8), IoError, OutOfMemory (a chunk finds no room on the host), or the
  /// error of an update; LogicError while anything is gathered, or for a buffer that is not dense or a type that has no
  /// name in a checkpoint.
  void save(const std::filesystem::path& folder, const CheckpointNotes& notes = {});
  /// The same, to the folder whose lock the program holds. A folder that has been removed or moved meanwhile is made
  /// again; IoError too, if there is one in its place that is in use.
  void save(CheckpointLock& lock, const CheckpointNotes& notes);

  /// Goes to the checkpoint's state, before or after an AdamW is made, and returns the notes: the next step gives the
  /// bits that it would have given there. Gradients stay as they are. States of parameters that need no gradient now
  /// are left out, with a warning: load before freezing them. The states are of no AdamW until one has updated them.
  /// Steps that were refused for their gradients, and of which nobody has heard, are over with a load that succeeds:
  /// the log tells of them.
  ///
  /// All of the checkpoint is checked before anything changes. Throws ConfigError (no checkpoint, or one that has other
  /// parameters and buffers than the session, which are listed), CorruptData, IoError, OutOfMemory (no room for the
  /// states), LogicError while anything is gathered. Should reading fail afterwards, a part of the session is of the
  /// checkpoint and the rest is not: it throws that error on each use from then on, until a load succeeds.
  CheckpointNotes load(const std::filesystem::path& folder);

  /// Where the program's tensors go: `cuda:0` with a CUDA device, `cpu` with the emulated one.
  at::Device device() const;

  MemoryUsage memory_usage() const;

  /// With `placement.activations = "auto"`: which blocks keep what they save on the device, have it leave, or run again
  /// in backward, and what was predicted and measured of that. Nothing until a step with blocks was measured.
  std::optional<ActivationReport> activation_report() const;

  /// What has moved, what was waited for and what was used, as far back as `timeline.memory` reaches.
  Timeline& timeline();

  /// Waits for everything queued. Rethrows the first deferred error. Of steps that were refused for their gradients
  /// each call rethrows one, the first of which nobody has heard.
  void synchronize();

  /// The last error of the session's own, typed (OutOfMemory, IoError, CorruptData, ...), or null.
  std::exception_ptr last_error() const;

  /// For the other parts of this floor.
  const std::shared_ptr<SessionState>& state() noexcept { return state_; }

 private:
  class Construction {
   public:
    explicit Construction(SessionState& state);
    ~Construction();
    Construction(const Construction&) = delete;
    Construction& operator=(const Construction&) = delete;

   private:
    SessionState& state_;
  };

  std::shared_ptr<SessionState> state_;
};

}  // namespace terrace

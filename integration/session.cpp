#include "integration/session.h"

#include <atomic>

#include "base/log.h"
#include "integration/session_state.h"
#include "memory/current_op.h"

namespace terrace {
namespace {

std::atomic<bool> one_lives{false};

std::shared_ptr<SessionState> make_state(const Config& config) {
  config.validate();  // a program may have filled it in
  if (one_lives.exchange(true)) {
    throw LogicError("a session lives already in this process", "end it before the next one begins");
  }
  set_log_level(config.log.level);
  try {
    return std::make_shared<SessionState>(config);
  } catch (...) {
    one_lives = false;
    throw;
  }
}

}  // namespace

Session::Session(const Config& config) : state_(make_state(config)) {}

Session::~Session() {
  state_->close();
  state_.reset();
  one_lives = false;
}

void Session::manage(torch::nn::Module& module) {
  const OpScope scope("Session::manage");
  state_->manage(module);
}

Gathered Session::gather(torch::nn::Module& module, Access access) {
  return gather(module.parameters(/*recurse=*/true), access);
}

Gathered Session::gather(std::vector<at::Tensor> tensors, Access access) {
  return state_->gather(std::move(tensors), access);
}

void Session::for_each_parameter(const std::function<void(const std::string&, at::Tensor&)>& visit, Access access) {
  state_->for_each_parameter(visit, access);
}

void Session::save(const std::filesystem::path& folder, const CheckpointNotes& notes) {
  const OpScope scope("Session::save");
  state_->save(folder, notes);
}

void Session::save(CheckpointLock& lock, const CheckpointNotes& notes) {
  const OpScope scope("Session::save");
  state_->save(lock, notes);
}

CheckpointNotes Session::load(const std::filesystem::path& folder) {
  const OpScope scope("Session::load");
  return state_->load(folder);
}

at::Device Session::device() const { return state_->memory().program_device(); }

MemoryUsage Session::memory_usage() const { return state_->memory_usage(); }

Timeline& Session::timeline() { return state_->memory().timeline(); }

void Session::synchronize() {
  const OpScope scope("Session::synchronize");
  state_->updates().finish();
}

std::exception_ptr Session::last_error() const { return state_->last_error(); }

std::optional<ActivationReport> Session::activation_report() const { return state_->activation_report(); }

Session::Construction::Construction(SessionState& state) : state_(state) {
  state_.forget_dead();
  state_.spillable().begin_construction();
  SessionMemory::enter_construction();
}

Session::Construction::~Construction() {
  SessionMemory::leave_construction();
  state_.spillable().end_construction();
}

}  // namespace terrace

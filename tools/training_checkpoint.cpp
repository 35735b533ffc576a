// What a training run keeps in a checkpoint beside its session's state: its step, where its data are, and the settings
// that its losses depend on.

#include <array>
#include <charconv>
#include <sstream>
#include <string>
#include <system_error>

#include "base/log.h"
#include "integration/checkpoint_checksum.h"
#include "integration/checkpoint_reader.h"
#include "tools/training.h"

namespace terrace {
namespace {

// Names of notes.
constexpr const char* kStep = "step";
constexpr const char* kLoss = "loss";
constexpr const char* kHeads = "model.heads";
constexpr const char* kDataGenerator = "data.generator";
constexpr const char* kDataDigest = "data.digest";

[[noreturn]] void refuse(const std::filesystem::path& folder, const std::string& note) {
  throw ConfigError("checkpoint: " + folder.string() + " was not saved by terrace train: its note \"" + note +
                        "\" is missing or says something else",
                    "resume from a folder that terrace train --save has saved to");
}

const std::string& text_in(const CheckpointNotes& notes, const std::string& note, const std::filesystem::path& folder) {
  const auto found = notes.find(note);
  if (found == notes.end()) refuse(folder, note);
  return found->second;
}

/// The number of a note as it was written; nothing is left of the text. Losses may be infinite or none.
template <class Number>
Number number_in(const CheckpointNotes& notes, const char* note, const std::filesystem::path& folder) {
  const std::string& text = text_in(notes, note, folder);
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) refuse(folder, note);
  return number;
}

/// A double keeps all its bits.
template <class Number>
std::string text_of(Number number) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr};
}

std::mt19937_64 generator_in(const CheckpointNotes& notes, const std::filesystem::path& folder) {
  std::istringstream text(text_in(notes, kDataGenerator, folder));
  std::mt19937_64 generator;
  if (!(text >> generator) || !(text >> std::ws).eof()) refuse(folder, kDataGenerator);
  return generator;
}

std::string text_of(const std::mt19937_64& generator) {
  std::ostringstream text;
  text << generator;
  return text.str();
}

/// What a run may change when it resumes, and has other losses then.
CheckpointNotes settings_of(const Config::Train& train) {
  return {{"train.steps", text_of(train.steps)},
          {"train.warmup", text_of(train.warmup)},
          {"train.weight_decay", text_of(train.weight_decay)},
          {"train.max_gradient_norm", text_of(train.max_gradient_norm)},
          {"train.micro_batch", text_of(train.micro_batch)},
          {"train.accumulate", text_of(train.accumulate)},
          {"train.seed", text_of(train.seed)},
          {"train.learning_rate", text_of(train.learning_rate)},
          {"threads", text_of(at::get_num_threads())}};
}

/// Where a run stood, as its notes say.
struct Position {
  Position(const CheckpointNotes& notes, const std::filesystem::path& folder, const Config& config)
      : step(number_in<std::int64_t>(notes, kStep, folder)),
        loss(number_in<double>(notes, kLoss, folder)),
        generator(generator_in(notes, folder)),
        data_digest(text_in(notes, kDataDigest, folder)) {
    if (step < 0) refuse(folder, kStep);
    if (const auto heads = number_in<std::int64_t>(notes, kHeads, folder); heads != config.model.heads) {
      throw ConfigError("checkpoint: " + folder.string() + " is of a model with " + std::to_string(heads) +
                            " heads, and model.heads is " + std::to_string(config.model.heads),
                        "set model.heads to " + std::to_string(heads));
    }
    for (const auto& [setting, now] : settings_of(config.train)) {
      if (const std::string& then = text_in(notes, setting, folder); then != now) {
        other_settings += (other_settings.empty() ? "" : ", ") + setting + " was " + then + " and is " + now;
      }
    }
  }

  std::int64_t step;
  double loss;
  std::mt19937_64 generator;
  std::string data_digest;
  std::string other_settings;
};

}  // namespace

void Training::leave_out_of_steps(const MemoryUsage& before) {
  const MemoryUsage now = usage();
  for (std::size_t cause = 0; cause < now.stall_seconds_by_cause.size(); ++cause) {
    counted_.stall_seconds_by_cause[cause] += now.stall_seconds_by_cause[cause] - before.stall_seconds_by_cause[cause];
  }
  counted_.update_seconds += now.update_seconds - before.update_seconds;
  for (std::size_t link = 0; link < now.bytes_moved.size(); ++link) {
    for (std::size_t kind = 0; kind < now.bytes_moved[link].size(); ++kind) {
      counted_.bytes_moved[link][kind] += now.bytes_moved[link][kind] - before.bytes_moved[link][kind];
    }
  }
}

void Training::save(CheckpointLock& lock) {
  finish();  // the last step's update, which is a step's all the same
  const MemoryUsage before = usage();
  typed([&] {
    CheckpointNotes notes = settings_of(config_.train);
    notes[kStep] = text_of(steps_done_);
    notes[kLoss] = text_of(last_loss_);
    notes[kHeads] = text_of(config_.model.heads);
    notes[kDataGenerator] = text_of(generator_);
    notes[kDataDigest] = to_hex(dataset_.digest());
    session_->save(lock, notes);
  });
  leave_out_of_steps(before);
}

void Training::resume(const std::filesystem::path& folder) {
  const MemoryUsage before = usage();
  typed([&] {
    // What is refused is refused before the session changes. What counts is what it loads: a run that saves there may
    // have replaced the one looked at.
    Position(CheckpointReader(checkpoint_files(), folder).manifest().notes, folder, config_);
    const Position position(session_->load(folder), folder, config_);
    const std::string consequence = ": losses may not be those of a run that was not interrupted";
    if (position.data_digest != to_hex(dataset_.digest())) {
      log(LogLevel::warning,
          "data: they are not those that the run in " + folder.string() + " has learned from" + consequence);
    }
    if (!position.other_settings.empty()) {
      log(LogLevel::warning, "resumed run: " + position.other_settings + consequence);
    }
    last_loss_ = position.loss;
    generator_ = position.generator;
    steps_done_ = position.step;
  });
  leave_out_of_steps(before);
}

}  // namespace terrace

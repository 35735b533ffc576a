// What a training run keeps in a checkpoint beside its session's state: its step, and where its data are.

#include <sstream>
#include <string>

#include "base/log.h"
#include "integration/checkpoint_checksum.h"
#include "tools/training.h"

namespace terrace {
namespace {

// Names of notes.
constexpr const char* kStep = "step";
constexpr const char* kLoss = "loss";
constexpr const char* kHeads = "model.heads";
constexpr const char* kDataGenerator = "data.generator";
constexpr const char* kDataDigest = "data.digest";

[[noreturn]] void refuse(const std::filesystem::path& folder, const char* note) {
  throw ConfigError("checkpoint: " + folder.string() + " was not saved by terrace train: its note \"" + note +
                        "\" is missing or says something else",
                    "resume from a folder that terrace train --save has saved to");
}

/// The value of a note as it was written; nothing is left of the text.
template <class Value>
Value value_of(const CheckpointNotes& notes, const char* note, const std::filesystem::path& folder) {
  const auto found = notes.find(note);
  if (found == notes.end()) refuse(folder, note);
  std::istringstream text(found->second);
  Value value{};
  if (!(text >> value) || !(text >> std::ws).eof()) refuse(folder, note);
  return value;
}

template <class Value>
std::string text_of(const Value& value) {
  std::ostringstream text;
  text.precision(17);  // a double keeps all its bits
  text << value;
  return text.str();
}

}  // namespace

void Training::save(const std::filesystem::path& folder) {
  typed([&] {
    session_->save(folder, {{kStep, text_of(steps_done_)},
                            {kLoss, text_of(last_loss_)},
                            {kHeads, text_of(config_.model.heads)},
                            {kDataGenerator, text_of(generator_)},
                            {kDataDigest, to_hex(dataset_.digest())}});
  });
}

void Training::resume(const std::filesystem::path& folder) {
  typed([&] {
    const CheckpointNotes notes = session_->load(folder);
    const auto step = value_of<std::int64_t>(notes, kStep, folder);
    if (step < 0) refuse(folder, kStep);
    if (const auto heads = value_of<std::int64_t>(notes, kHeads, folder); heads != config_.model.heads) {
      throw ConfigError("checkpoint: " + folder.string() + " is of a model with " + std::to_string(heads) +
                            " heads, and model.heads is " + std::to_string(config_.model.heads),
                        "set model.heads to " + std::to_string(heads));
    }
    last_loss_ = value_of<double>(notes, kLoss, folder);
    generator_ = value_of<std::mt19937_64>(notes, kDataGenerator, folder);
    if (value_of<std::string>(notes, kDataDigest, folder) != to_hex(dataset_.digest())) {
      log(LogLevel::warning, "data: they are not those that the run in " + folder.string() +
                                 " has learned from: losses will not be those of a run that was not interrupted");
    }
    steps_done_ = step;
  });
}

}  // namespace terrace

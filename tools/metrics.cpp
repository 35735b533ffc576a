#include "tools/metrics.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/log.h"

namespace terrace {
namespace {

[[noreturn]] void fail(const std::string& attempt, const std::filesystem::path& path) {
  throw IoError(attempt + " " + path.string() + " failed: " + std::generic_category().message(errno),
                "give a path that can be written, on a disk with free space");
}

struct KeptLines {
  std::uint64_t bytes = 0;
  std::int64_t last_step = 0;
};

/// The lines of the steps up to `last`. One that is cut short, or is none of these, ends them.
KeptLines lines_up_to(const std::filesystem::path& path, std::int64_t last) {
  std::ifstream file(path, std::ios::binary);
  KeptLines kept;
  for (std::string line; std::getline(file, line) && !file.eof(); kept.bytes += line.size() + 1) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto step = json.is_object() ? json.find("step") : json.end();
    if (step == json.end() || !step->is_number_integer() || step->get<std::int64_t>() > last) break;
    kept.last_step = step->get<std::int64_t>();
  }
  return kept;
}

}  // namespace

std::string to_json(const StepMetrics& metrics) {
  nlohmann::ordered_json json;
  json["step"] = metrics.step;
  json["loss"] = metrics.loss;
  json["learning_rate"] = metrics.learning_rate;
  json["gradient_norm"] = nullptr;
  if (metrics.gradient_norm) json["gradient_norm"] = *metrics.gradient_norm;
  json["tokens"] = metrics.tokens;
  json["seconds"] = metrics.seconds;
  json["tokens_per_second"] = metrics.tokens_per_second();
  json["stall_seconds"] = metrics.stall_seconds;
  for (const Tier tier : all_tiers) json[std::string(name_of(tier)) + "_bytes"] = metrics.peak_bytes[index_of(tier)];
  for (const Link link : all_links) json["bytes_moved"][name_of(link)] = metrics.bytes_moved[index_of(link)];
  return json.dump();
}

MetricsFile::MetricsFile(std::filesystem::path path, std::int64_t kept_steps) : path_(std::move(path)) {
  const bool keeps = kept_steps > 0 && std::filesystem::is_regular_file(path_);
  errno = 0;
  if (keeps) {
    const KeptLines lines = lines_up_to(path_, kept_steps);
    if (lines.last_step < kept_steps) {
      log(LogLevel::warning, "metrics: " + path_.string() + " has the lines of the steps up to " +
                                 std::to_string(lines.last_step) + ", and the run goes on after step " +
                                 std::to_string(kept_steps) + ": those between are lost");
    }
    std::error_code error;
    std::filesystem::resize_file(path_, lines.bytes, error);
    errno = error.value();
    if (error) fail("metrics: cutting", path_);
  }
  file_.open(path_, std::ios::binary | (keeps ? std::ios::app : std::ios::trunc));
  if (!file_) fail("metrics: opening", path_);
}

void MetricsFile::write(const StepMetrics& metrics) {
  errno = 0;
  file_ << to_json(metrics) << '\n' << std::flush;
  if (!file_) fail("metrics: writing to", path_);
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text << std::flush;
  if (!file) fail("writing", path);
}

}  // namespace terrace
